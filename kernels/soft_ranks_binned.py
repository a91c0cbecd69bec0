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

import math
from typing import NamedTuple

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
from .soft_ranks_pairs import Problem


def smooth_ap_binned(problem: Problem, bins: Bins, order: Order, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) float64 and its gradient (C, M), empty unless ``with_grad``; all scores are finite.

    Args:
        problem: the rows.
        bins: bins that hold all of them.
        order: the numbers of fine bins and of nodes.
        with_grad: compute the gradient too.
    """
    scores, positive, member, class_of, row_of, share, temperature, _ = problem
    gradient = scores.new_empty(scores.shape if with_grad else 0)
    step = max(1, costs_of(scores.device).tables_at_once // bins.num_coarse)  # classes whose tables fit
    if step >= scores.shape[0]:
        return _sum_by_bins(problem, bins, order, gradient if with_grad else None), gradient
    loss = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    firsts = torch.arange(0, scores.shape[0] + step, step, device=scores.device)
    ends = torch.searchsorted(class_of, firsts).tolist()  # of the positives of each part
    for number, first in enumerate(range(0, scores.shape[0], step)):
        part, own = slice(first, first + step), slice(*ends[number : number + 2])
        some = Problem(
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


def _sum_by_bins(problem: Problem, bins: Bins, order: Order, gradient: Tensor | None) -> Tensor:
    """Return the loss (C,) float64, and write its gradient into ``gradient`` (C, M) if there is one."""
    grid = make_grid(bins, order, problem.scores.device, problem.temperature)
    rows = locate_rows(problem, bins)
    positives = locate_positives(problem, bins, rows)
    # With many bins a table is as large as the rows: none is kept for longer than it is needed.
    counted, weighted = sum_positives(problem, bins, order, positives)
    weights = weights_of(weighted, grid)
    moments = split_moments(sum_rows(problem, bins, order, rows), counted)
    del counted, weighted
    fields = fields_of(moments, grid)
    del moments
    loss = loss_at_nodes(fields, weights)
    if gradient is None:
        return loss
    polynomials = polynomials_of(fields, weights, grid)
    del fields, weights
    read_gradient(polynomials, problem, bins, rows, positives, gradient)
    return loss


class Grid(NamedTuple):
    """What the tables of a set of bins have in common."""

    order: Order
    matrices: Constants
    kernel: Kernel
    ids: Tensor | None  # [B] int64 numbers of the coarse bins; None if they are contiguous
    layout: tuple[int, int]  # (B, F)


class Places(NamedTuple):
    """Where the positives are."""

    bin_of: Tensor  # [1, P] int64: fine bin, in one table of all classes with B F + 1 bins each
    u: Tensor  # [1, P] float64: position in the bin


class Fields(NamedTuple):
    """R_N, R_P + 1/2 and their derivatives with respect to x at the fine nodes, (C, B, F p) float64 each."""

    r_n: Tensor
    r_p: Tensor
    slope_n: Tensor
    slope_p: Tensor


def make_grid(bins: Bins, order: Order, device: torch.device, temperature: float) -> Grid:
    """Return the matrices, the kernel and the numbers of ``bins``."""
    matrices = constants(order, device)
    kernel = make_kernel(matrices, bins.width, temperature)
    return Grid(order, matrices, kernel, compact_ids(bins, kernel.reach), (bins.num_coarse, bins.fine))


# Rows -> tables. The moments of a table add up over parts of the rows.


class RowPlaces(NamedTuple):
    """The places of all rows in one chunk, (C, M) each; see :func:`locate`."""

    bin_of: Tensor
    u: Tensor


def locate_rows(problem: Problem, bins: Bins) -> RowPlaces | None:
    """Return the places of the rows, or None if they are too many to be kept: then each use computes them again."""
    if len([*chunks(problem.scores)]) > 1:
        return None
    return RowPlaces(*_locate_chunk(problem, bins, slice(None), slice(None)))


def sum_rows(problem: Problem, bins: Bins, order: Order, rows: RowPlaces | None = None) -> Tensor:
    """Return the moments (p, C, B F + 1) float64 of all rows; the last bin holds the rows that take no part."""
    scores, size = problem.scores, bins.num_fine + 1
    lanes = num_lanes(scores, size)
    table = scores.new_zeros(order.p, scores.shape[0] * lanes, size, dtype=torch.float64)
    for c, m in chunks(scores):
        add_moments(table[:, c] if lanes == 1 else table, *(rows or _locate_chunk(problem, bins, c, m)))
    return table if lanes == 1 else table.sum(dim=1, keepdim=True)


def locate_positives(problem: Problem, bins: Bins, rows: RowPlaces | None = None) -> Places:
    """Return the bins and positions of the listed positives."""
    if rows is not None:
        bin_of, u = (values[problem.class_of, problem.row_of] for values in rows)
        if problem.scores.shape[0] > 1:
            bin_of = bin_of + problem.class_of * (bins.num_fine + 1)
        return Places(bin_of[None], u.double()[None])
    # Each positive as a class of its own, with the window of its class: bin and position, (P, 1) each.
    values = problem.scores[problem.class_of, problem.row_of][:, None]
    index, u = locate(bins._replace(first=bins.first[problem.class_of]), values, slice(None))
    return Places((index.view(-1) + problem.class_of * (bins.num_fine + 1))[None], u.double().view(1, -1))


def sum_positives(problem: Problem, bins: Bins, order: Order, positives: Places) -> tuple[Tensor, Tensor]:
    """Return the moments (p, C, B F + 1) float64 of the listed positives, and those of each times its share."""
    shape = problem.scores.shape[0], bins.num_fine + 1
    table = torch.zeros(order.p, 2, math.prod(shape), dtype=torch.float64, device=problem.scores.device)
    weights = torch.stack([torch.ones_like(problem.share), problem.share])
    add_moments(table, positives.bin_of.expand(2, -1), positives.u.expand(2, -1), weights)
    counted, weighted = table.unflatten(-1, shape).unbind(dim=1)
    return counted, weighted


def split_moments(everyone: Tensor, positives: Tensor) -> Tensor:
    """Return (p, C, 2, B F) the moments of negatives and positives; ``everyone`` is overwritten."""
    # Positives are few. Negatives = all - positives, which is cheaper than masking every row.
    return torch.stack([everyone.sub_(positives), positives], dim=2)[..., :-1]


# Tables -> the loss, and the gradient as a function of the score.


def fields_of(moments: Tensor, grid: Grid) -> Fields:
    """Return the sums over negatives and positives at the fine nodes from the moments (p, C, 2, B F) of both."""
    moments, matrices, kernel = moments.unflatten(-1, grid.layout), grid.matrices, grid.kernel
    sources, q = sources_of(moments, matrices), matrices.nodes.numel()  # [C, 2, B, q]
    near = interact(sources, kernel.both, kernel.reach, grid.ids)  # [C, 2, B, 2q]
    far = beyond_reach(moments[0].sum(dim=-1), kernel.reach, grid.ids)  # [C, 2, B]
    values = at_fine_nodes(near[..., :q], matrices).add_(far[..., None])
    slopes = at_fine_nodes(near[..., q:], matrices).neg_()
    return Fields(values[:, 0], values[:, 1].add_(0.5), slopes[:, 0], slopes[:, 1])


def weights_of(moments: Tensor, grid: Grid) -> Tensor:
    """Return (C, B, F p) the weights of the positives at the fine nodes, from the moments (p, C, B F + 1) of these."""
    return fine_weights(moments[..., :-1].unflatten(-1, grid.layout), grid.matrices)


def loss_at_nodes(fields: Fields, weights: Tensor) -> Tensor:
    """Return the loss (C,) float64."""
    return (weights * (fields.r_n / (fields.r_n + fields.r_p))).sum(dim=(1, 2))


def polynomials_of(fields: Fields, weights: Tensor, grid: Grid) -> Tensor:
    """Return (p, 3, C, B F + 1) float64: g_N, -g_P and f' as polynomials of the fine bins; overwrites the slopes."""
    r_n, r_p, slope_n, slope_p = fields
    square = (r_n + r_p) ** 2
    sources = torch.stack([weights * r_p, weights * r_n]).div_(square)
    sources = coarse_weights(sources, grid.matrices)
    pulled = at_fine_nodes(interact(sources, grid.kernel.slope, grid.kernel.reach, grid.ids), grid.matrices)
    own_slope = slope_n.mul_(r_p).sub_(slope_p.mul_(r_n)).div_(square)
    del square
    tables = torch.stack([pulled[0], -pulled[1], own_slope])  # [3, C, B, F p]
    del pulled
    polynomials = coefficients(tables, grid.matrices, torch.float64)
    polynomials = polynomials.view(grid.order.p, 3, weights.shape[0], -1)
    return F.pad(polynomials, (0, 1))  # 0 for the rows that take no part


# The gradient at rows.


def read_gradient(
    polynomials: Tensor, problem: Problem, bins: Bins, rows: RowPlaces | None, positives: Places, gradient: Tensor
) -> None:
    """Write the gradient of the rows of ``problem`` into ``gradient`` (C, M)."""
    # Every row is treated as a negative first, then the positives are overwritten.
    pull = polynomials[:, 0].to(problem.scores.dtype)
    for c, m in chunks(problem.scores):
        gradient[c, m] = evaluate(pull[:, c], *(rows or _locate_chunk(problem, bins, c, m)))
    # Both terms of a positive contain its pair with itself. With few rows near it their difference is much smaller than
    # either, so it is taken before the values are rounded to the dtype of the scores.
    tables = polynomials[:, 1:].flatten(-2)  # [p, 2, C (B F + 1)]
    for _, some in chunks(problem.share[None]):
        at = positives.bin_of[:, some].expand(2, -1), positives.u[:, some].expand(2, -1)
        pushed, own = evaluate(tables, *at)
        value = (pushed + own * problem.share[some]).to(gradient.dtype)
        gradient[problem.class_of[some], problem.row_of[some]] = value


def _locate_chunk(problem: Problem, bins: Bins, classes: slice, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the fine bin and the position of each row, (c, m) each; rows that take no part go to the extra bin."""
    index, u = locate(bins, problem.scores[classes, rows], classes)
    if problem.member is not None:
        index = index.masked_fill_(~problem.member[classes, rows], bins.num_fine)
    return index, u
