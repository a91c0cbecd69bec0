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
from torch import Tensor

from .bins import Bins, add_moments, chunks, compact_ids, evaluate, locate, offset
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
)


class Fields(NamedTuple):
    """R_N, R_P + 1/2 and their derivatives with respect to x, at the fine nodes; each (C, B, F p) float64."""

    negatives: Tensor
    positives: Tensor
    negatives_slope: Tensor
    positives_slope: Tensor


class Rows(NamedTuple):
    """The rows of a call, every score finite. A table has a block for negatives, one for positives, one for others."""

    scores: Tensor  # [C, M]
    positive: Tensor  # [C, M] bool
    member: Tensor | None  # [C, M] bool, None for all True

    @property
    def num_blocks(self) -> int:
        """Blocks of a table: without others there are two."""
        return 2 if self.member is None else 3

    def locate(self, bins: Bins, classes: slice, part: slice) -> tuple[Tensor, Tensor]:
        """Return the fine bin of each row, in a table of all classes and blocks, and its position in the bin."""
        scores = self.scores[classes, part]
        block = self.positive[classes, part].to(scores.dtype)
        if self.member is not None:
            block = block.masked_fill_(~self.member[classes, part], 2.0)
        index, u = locate(bins, scores, classes, block)
        return offset(index, classes, u.shape, self.num_blocks * bins.num_fine), u


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
    fields = _fields(_count(rows, bins, order), matrices, kernel, ids)
    weights = _weigh(rows.scores, share, positives, bins, order, matrices)  # [C, B, F p]
    denominator = fields.negatives + fields.positives
    loss = (weights * (fields.negatives / denominator)).sum(dim=(1, 2))
    if gradient is None:
        return loss
    tables = _gradient_tables(fields, weights, matrices, kernel, ids)  # [3, C, B, F p]
    _write_gradient(gradient, rows, share, positives, bins, coefficients_of(tables, matrices, rows.scores.dtype))
    return loss


def _count(rows: Rows, bins: Bins, order: Order) -> Tensor:
    """Return the moments (p, C, 2, B, F) of negatives and positives."""
    num_classes, num_rows = rows.scores.shape
    blocks = rows.num_blocks
    moments = torch.zeros(order.p, num_classes, blocks * bins.num_fine, dtype=torch.float64, device=rows.scores.device)
    flat = moments.view(order.p, -1)
    for c, m in chunks(num_classes, num_rows):
        index, u = rows.locate(bins, c, m)
        add_moments(flat, index, u)
    return moments.view(order.p, num_classes, blocks, bins.num_coarse, bins.fine)[:, :, :2]


def _fields(moments: Tensor, matrices: Constants, kernel: Kernel, ids: Tensor | None) -> Fields:
    sources = coarse_weights(fine_weights(moments, matrices), matrices)  # [C, 2, B, q]
    both = torch.cat([kernel.sigmoid, kernel.slope], dim=2)
    near = interact(sources, both, kernel.reach, ids)  # [C, 2, B, 2q]
    far = beyond_reach(moments[0].sum(dim=-1), kernel.reach, ids)  # [C, 2, B]
    q = matrices.nodes.numel()
    values = at_fine_nodes(near[..., :q], matrices) + far[..., None]
    slopes = at_fine_nodes(near[..., q:], matrices).neg_()
    return Fields(values[:, 0], values[:, 1] + 0.5, slopes[:, 0], slopes[:, 1])


def _weigh(
    scores: Tensor, share: Tensor, positives: tuple[Tensor, Tensor], bins: Bins, order: Order, matrices: Constants
) -> Tensor:
    """Return (C, B, F p): what the positives' shares weigh at the fine nodes."""
    moments = torch.zeros(order.p, scores.shape[0] * bins.num_fine, dtype=torch.float64, device=scores.device)
    index, u = _locate_positives(scores, positives, bins)
    add_moments(moments, index, u, share)
    shape = (order.p, scores.shape[0], bins.num_coarse, bins.fine)
    return fine_weights(moments.view(shape), matrices)


def _locate_positives(scores: Tensor, positives: tuple[Tensor, Tensor], bins: Bins) -> tuple[Tensor, Tensor]:
    """Return the fine bin, in a table of all classes, and the position of each positive."""
    class_of, row_of = positives
    chosen = scores[class_of, row_of][:, None]
    # Each positive as a class of its own, with the window of its class.
    index, u = locate(bins._replace(first=bins.first[class_of]), chosen, slice(None))
    return index + class_of * bins.num_fine, u


def _gradient_tables(
    fields: Fields, weights: Tensor, matrices: Constants, kernel: Kernel, ids: Tensor | None
) -> Tensor:
    """Return g_N, -g_P and f' at the fine nodes, (3, C, B, F p)."""
    square = (fields.negatives + fields.positives) ** 2
    sources = torch.stack([weights * fields.positives, weights * fields.negatives]) / square
    pulled = at_fine_nodes(interact(coarse_weights(sources, matrices), kernel.slope, kernel.reach, ids), matrices)
    slope = fields.negatives_slope * fields.positives - fields.negatives * fields.positives_slope
    return torch.stack([pulled[0], -pulled[1], slope / square])


def coefficients_of(tables: Tensor, matrices: Constants, dtype: torch.dtype) -> Tensor:
    """Return (p, n, C B F) polynomial coefficients of ``n`` tables (n, C, B, F p)."""
    return coefficients(tables, matrices, dtype).view(matrices.to_weights.shape[0], tables.shape[0], -1)


def _write_gradient(
    gradient: Tensor, rows: Rows, share: Tensor, positives: tuple[Tensor, Tensor], bins: Bins, polynomials: Tensor
) -> None:
    """Write the gradient (C, M): g_N of negatives, -g_P + share f' of positives, 0 of others."""
    num_classes, num_rows = rows.scores.shape
    p = polynomials.shape[0]
    table = polynomials.new_zeros(p, num_classes, rows.num_blocks, bins.num_fine)
    table[:, :, :2] = polynomials[:, :2].view(p, 2, num_classes, -1).transpose(1, 2)
    table = table.view(p, -1)
    for c, m in chunks(num_classes, num_rows):
        index, u = rows.locate(bins, c, m)
        gradient[c, m] = evaluate(table, index, u)
    index, u = _locate_positives(rows.scores, positives, bins)
    own = evaluate(polynomials[:, 2].contiguous(), index, u).reshape(-1)
    gradient.index_put_(positives, own * share.to(own.dtype), accumulate=True)
