"""Smooth-AP in time linear in the rows: every quantity is a function of the score, known at the nodes of bins.

With R_P(x) and R_N(x) the sums of ``s((x_j - x) / tau)`` over positives and negatives, the term of a positive i is
f(x_i), f = R_N / (R_P + 1/2 + R_N): R_P already contains the pair of i with itself, s(0) = 1/2, in place of the 1 in
r_i. So the loss is the sum over the nodes of f times the weights of the positives there, and reads no positive. The
gradient of a negative is a function of its score too, g_N, and that of a positive is w_i f'(x_i) - g_P(x_i), where the
pair with itself cancels::

    A = (R_P + 1/2) / D^2,  B = R_N / D^2,  D = R_P + 1/2 + R_N
    g_N(x) = sum_i w_i A(x_i) k(x - x_i),  g_P(x) = sum_i w_i B(x_i) k(x - x_i),  k = s' / tau
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .bins import Bins, add_moments, chunks, compact_ids, evaluate, locate, num_lanes
from .costs import costs_of
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
from .soft_ranks_pairs import Pool


def smooth_ap_binned(pool: Pool, bins: Bins, order: Order, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) float64 and its gradient (C, M), empty unless ``with_grad``; all scores are finite.

    Args:
        pool: the rows.
        bins: bins that hold all of them.
        order: the numbers of fine bins and of nodes.
        with_grad: compute the gradient too.
    """
    scores, positive, member, class_of, row_of, share, temperature = pool
    loss = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    gradient = scores.new_empty(scores.shape if with_grad else 0)
    step = max(1, costs_of(scores.device).tables_at_once // bins.num_coarse)  # classes whose tables fit
    for first in range(0, scores.shape[0], step):
        part, own = slice(first, first + step), slice(None)
        if step < scores.shape[0]:
            own = slice(*torch.searchsorted(class_of, class_of.new_tensor([first, first + step])).tolist())
        some = Pool(
            scores[part],
            positive[part],
            None if member is None else member[part],
            class_of[own] - first,
            row_of[own],
            share[own],
            temperature,
        )
        into = gradient[part] if with_grad else None
        loss[part] = _sum_by_bins(some, bins._replace(first=bins.first[part]), order, into)
    return loss, gradient


def _sum_by_bins(pool: Pool, bins: Bins, order: Order, gradient: Tensor | None) -> Tensor:
    """Return the loss (C,) float64, and write its gradient into ``gradient`` (C, M) if there is one."""
    scores, _, _, class_of, row_of, share, temperature = pool
    num_classes, layout = scores.shape[0], (bins.num_coarse, bins.fine)
    matrices = constants(order, scores.device)
    kernel = make_kernel(matrices, bins.width, temperature)
    ids = compact_ids(bins, kernel.reach)

    # Moments (p, C, B F + 1) of all rows and of the positives, which are few. Negatives = all - positives, which is
    # cheaper than masking every row. The extra bin of each class takes the rows that take no part.
    size = bins.num_fine + 1
    lanes = num_lanes(scores, size)
    everyone = scores.new_zeros(order.p, num_classes * lanes, size, dtype=torch.float64)
    for c, m in chunks(scores):
        add_moments(everyone[:, c] if lanes == 1 else everyone, *_locate_rows(pool, bins, c, m))
    everyone = everyone if lanes == 1 else everyone.sum(dim=1, keepdim=True)
    # Each positive as a class of its own, with the window of its class: bin and position, (P, 1) each.
    index, u = locate(bins._replace(first=bins.first[class_of]), scores[class_of, row_of][:, None], slice(None))
    index, u = (index.view(-1) + class_of * size)[None], u.view(1, -1)  # [1, P], in one table of all classes

    def of_positives(weight: Tensor | None) -> Tensor:
        moments = scores.new_zeros(order.p, num_classes, size, dtype=torch.float64)
        add_moments(moments.view(order.p, 1, -1), index, u, weight)
        return moments

    # With many bins a table is as large as the rows: none is kept for longer than it is needed.
    positives = of_positives(None)
    moments = torch.stack([everyone.sub_(positives), positives], dim=2)[..., :-1]  # [p, C, 2, B F]
    del everyone, positives
    r_n, r_p, slope_n, slope_p = _fields(moments.unflatten(-1, layout), matrices, kernel, ids)
    del moments
    weights = fine_weights(of_positives(share[None])[..., :-1].unflatten(-1, layout), matrices)  # [C, B, F p]
    loss = (weights * (r_n / (r_n + r_p))).sum(dim=(1, 2))
    if gradient is None:
        return loss

    # g_N, -g_P and f' at the fine nodes, then as polynomials of the fine bins.
    square = (r_n + r_p) ** 2
    sources = torch.stack([weights * r_p, weights * r_n]).div_(square)
    del weights
    sources = coarse_weights(sources, matrices)
    pulled = at_fine_nodes(interact(sources, kernel.slope, kernel.reach, ids), matrices)
    own_slope = slope_n.mul_(r_p).sub_(slope_p.mul_(r_n)).div_(square)
    del r_n, r_p, slope_n, slope_p, square
    tables = torch.stack([pulled[0], -pulled[1], own_slope])  # [3, C, B, F p]
    del pulled, own_slope
    polynomials = coefficients(tables, matrices, torch.float64).view(order.p, 3, num_classes, -1)
    del tables
    polynomials = F.pad(polynomials, (0, 1))  # [p, 3, C, B F + 1]: 0 for the rows that take no part

    # Every row is treated as a negative first, then the positives are overwritten.
    pull = polynomials[:, 0].to(scores.dtype)
    for c, m in chunks(scores):
        gradient[c, m] = evaluate(pull[:, c], *_locate_rows(pool, bins, c, m))
    # Both terms of a positive contain its pair with itself. With few rows near it their difference is much smaller than
    # either, so it is taken before the values are rounded to the dtype of the scores.
    for _, some in chunks(share[None]):
        at = index[:, some], u[:, some].double()
        pushed, own = (evaluate(polynomials[:, table].reshape(order.p, 1, -1), *at).view(-1) for table in (1, 2))
        gradient[class_of[some], row_of[some]] = (pushed + own * share[some]).to(gradient.dtype)
    return loss


def _fields(moments: Tensor, matrices: Constants, kernel: Kernel, ids: Tensor | None) -> tuple[Tensor, ...]:
    """Return R_N, R_P + 1/2 and their derivatives with respect to x at the fine nodes, (C, B, F p) float64 each.

    They come from the moments (p, C, 2, B, F) of negatives and positives.
    """
    sources, q = sources_of(moments, matrices), matrices.nodes.numel()  # [C, 2, B, q]
    near = interact(sources, torch.cat([kernel.sigmoid, kernel.slope], dim=2), kernel.reach, ids)  # [C, 2, B, 2q]
    far = beyond_reach(moments[0].sum(dim=-1), kernel.reach, ids)  # [C, 2, B]
    values = at_fine_nodes(near[..., :q], matrices).add_(far[..., None])
    slopes = at_fine_nodes(near[..., q:], matrices).neg_()
    return values[:, 0], values[:, 1].add_(0.5), slopes[:, 0], slopes[:, 1]


def _locate_rows(pool: Pool, bins: Bins, classes: slice, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the fine bin and the position of each row, (c, m) each; rows that take no part go to the extra bin."""
    index, u = locate(bins, pool.scores[classes, rows], classes)
    if pool.member is not None:
        index = index.masked_fill_(~pool.member[classes, rows], bins.num_fine)
    return index, u
