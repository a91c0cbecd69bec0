"""Smooth-AP in time linear in the rows: every quantity is a function of the score, known at the nodes of bins.

With R_P(x) and R_N(x) the sums of ``s((x_j - x) / tau)`` over positives and negatives, the term of a positive i is
f(x_i), f = R_N / (R_P + 1/2 + R_N): its own pair adds s(0) = 1/2 to R_P, and 1 is asked for. So the loss needs no value
at the positives, only f at the nodes times what the positives weigh there. The gradient of a negative is a function of
its score too, g_N, and that of a positive is w_i f'(x_i) - g_P(x_i), where its own pair cancels::

    A = (R_P + 1/2) / D^2,  B = R_N / D^2,  D = R_P + 1/2 + R_N
    g_N(x) = sum_i w_i A(x_i) k(x - x_i),  g_P(x) = sum_i w_i B(x_i) k(x - x_i),  k = s' / tau
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .bins import Bins, add_moments, chunks, compact_ids, evaluate, locate, num_lanes
from .node_tables import (
    Constants,
    Kernel,
    Order,
    at_fine_nodes,
    beyond_reach,
    coarse_weights,
    coefficients,
    constants,
    fine_weights,
    interact,
    make_kernel,
    sources_of,
)


class Fields(NamedTuple):
    """R_N, R_P + 1/2 and their derivatives with respect to x, at the fine nodes; each (C, B, F p) float64."""

    negatives: Tensor
    positives: Tensor
    negatives_slope: Tensor
    positives_slope: Tensor


class Rows(NamedTuple):
    """The rows of a call, every score finite."""

    scores: Tensor  # [C, M]
    member: Tensor | None  # [C, M] bool, None for all True

    def locate(self, bins: Bins, classes: slice, part: slice) -> tuple[Tensor, Tensor]:
        """Return the fine bin of each row and its position in the bin, (c, m) each.

        A class has one bin more than it needs, for the rows that take no part.
        """
        index, u = locate(bins, self.scores[classes, part], classes)
        if self.member is not None:
            index = index.masked_fill_(~self.member[classes, part], bins.num_fine)
        return index, u


def smooth_ap_binned(
    rows: Rows,
    share: Tensor,
    positives: tuple[Tensor, Tensor],
    bins: Bins,
    order: Order,
    temperature: float,
    gradient: Tensor | None,
) -> Tensor:
    """Return the loss (C,) float64, and write its gradient into ``gradient`` (C, M) if there is one.

    Args:
        rows: the rows.
        share: (P,) float64, the weight of each positive in the mean of its class.
        positives: class and row indices of the positives, (P,) each.
        bins: bins that hold all rows.
        order: numbers of nodes.
        temperature: > 0.
        gradient: where to write, or None.
    """
    matrices = constants(order, rows.scores.device)
    kernel = make_kernel(matrices, bins.width, temperature)
    ids = compact_ids(bins, kernel.reach)
    index, u = _locate_positives(rows.scores, positives, bins)
    everyone = _moments(rows, bins, order)
    members = _moments_of(index, u, None, everyone)
    # The negatives are all rows less the positives: it is faster to look at the few twice than to tell all apart.
    fields = _fields(torch.stack([everyone - members, members], dim=2)[..., :-1], bins, matrices, kernel, ids)
    weights = fine_weights(_split(_moments_of(index, u, share, everyone)[..., :-1], bins), matrices)  # [C, B, F p]
    denominator = fields.negatives + fields.positives
    loss = (weights * (fields.negatives / denominator)).sum(dim=(1, 2))
    if gradient is None:
        return loss
    tables = _gradient_tables(fields, weights, matrices, kernel, ids)  # [3, C, B, F p]
    polynomials = coefficients(tables, matrices, rows.scores.dtype).view(order.p, 3, rows.scores.shape[0], -1)
    polynomials = F.pad(polynomials, (0, 1))  # [p, 3, C, B F + 1]: 0 for the rows that take no part
    for c, m in chunks(*rows.scores.shape):
        gradient[c, m] = evaluate(polynomials[:, 0, c], *rows.locate(bins, c, m))
    pushed, own = (evaluate(polynomials[:, table].reshape(order.p, 1, -1), index, u).view(-1) for table in (1, 2))
    gradient[positives] = pushed + own * share.to(own.dtype)
    return loss


def _moments(rows: Rows, bins: Bins, order: Order) -> Tensor:
    """Return the moments (p, C, B F + 1) of all rows."""
    size = bins.num_fine + 1
    lanes = num_lanes(rows.scores.shape, size)
    moments = rows.scores.new_zeros(order.p, rows.scores.shape[0] * lanes, size, dtype=torch.float64)
    for c, m in chunks(*rows.scores.shape):
        add_moments(moments[:, c] if lanes == 1 else moments, *rows.locate(bins, c, m))
    return moments if lanes == 1 else moments.sum(dim=1, keepdim=True)


def _moments_of(index: Tensor, u: Tensor, weight: Tensor | None, like: Tensor) -> Tensor:
    """Return the moments, in the shape of ``like``, of rows (1, P) located in one table of all classes."""
    moments = torch.zeros_like(like)
    add_moments(moments.view(like.shape[0], 1, -1), index, u, None if weight is None else weight[None])
    return moments


def _split(moments: Tensor, bins: Bins) -> Tensor:
    """Return moments (..., B F) as (..., B, F)."""
    return moments.unflatten(-1, (bins.num_coarse, bins.fine))


def _fields(moments: Tensor, bins: Bins, matrices: Constants, kernel: Kernel, ids: Tensor | None) -> Fields:
    """Return what the moments (p, C, 2, B F) of negatives and positives make at the fine nodes."""
    moments = _split(moments, bins)
    sources = sources_of(moments, matrices)  # [C, 2, B, q]
    both = torch.cat([kernel.sigmoid, kernel.slope], dim=2)
    near = interact(sources, both, kernel.reach, ids)  # [C, 2, B, 2q]
    far = beyond_reach(moments[0].sum(dim=-1), kernel.reach, ids)  # [C, 2, B]
    q = matrices.nodes.numel()
    values = at_fine_nodes(near[..., :q], matrices) + far[..., None]
    slopes = at_fine_nodes(near[..., q:], matrices).neg_()
    return Fields(values[:, 0], values[:, 1] + 0.5, slopes[:, 0], slopes[:, 1])


def _locate_positives(scores: Tensor, positives: tuple[Tensor, Tensor], bins: Bins) -> tuple[Tensor, Tensor]:
    """Return the fine bin, in one table of all classes, and the position of each positive, (1, P) each."""
    class_of, row_of = positives
    chosen = scores[class_of, row_of][:, None]
    # Each positive as a class of its own, with the window of its class.
    index, u = locate(bins._replace(first=bins.first[class_of]), chosen, slice(None))
    return (index.view(-1) + class_of * (bins.num_fine + 1))[None], u.view(1, -1)


def _gradient_tables(
    fields: Fields, weights: Tensor, matrices: Constants, kernel: Kernel, ids: Tensor | None
) -> Tensor:
    """Return g_N, -g_P and f' at the fine nodes, (3, C, B, F p)."""
    square = (fields.negatives + fields.positives) ** 2
    sources = torch.stack([weights * fields.positives, weights * fields.negatives]) / square
    pulled = at_fine_nodes(interact(coarse_weights(sources, matrices), kernel.slope, kernel.reach, ids), matrices)
    slope = fields.negatives_slope * fields.positives - fields.negatives * fields.positives_slope
    return torch.stack([pulled[0], -pulled[1], slope / square])
