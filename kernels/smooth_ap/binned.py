"""Smooth-AP in time linear in the rows: every quantity is a function of the score, known at the nodes of bins.

With R_P(x) and R_N(x) the sums of ``s((x_j - x) / tau)`` over positives and negatives, the term of a positive i is
f(x_i), f = R_N / (R_P + 1/2 + R_N): R_P already contains the pair of i with itself, s(0) = 1/2, in place of the 1 in
r_i. So the loss is the sum over the nodes of f times the weights of the positives there, and reads no positive. The
gradient of a negative is a function of its score too, g_N, and that of a positive is w_i f'(x_i) - g_P(x_i), where the
pair with itself cancels::

    A = (R_P + 1/2) / D^2,  B = R_N / D^2,  D = R_P + 1/2 + R_N
    g_N(x) = sum_i w_i A(x_i) k(x - x_i),  g_P(x) = sum_i w_i B(x_i) k(x - x_i),  k = s' / tau

Where rows are compared with weights v_j, these are factors in R_N and R_P, and of g_N and g_P in the gradient of row j.
The 1/2 is v_i / 2 then, so that f and its slope, A and B are no functions of the score alone: R_N, R_P and their slopes
are read at each positive instead, and A and B become moments of the positives.

Three bins by hand, with the names of the steps in the order in which they run. Two negatives have the scores 0.5 and
8.5, a positive has 4, and the temperature is 1, for which bins are 4 wide. With two nodes in a bin (F = 1, p = q = 2),
at u = 0.707 and -0.707, a bin has two numbers; "|" stands between bins, N for negatives and P for positives::

    locate          0.5 is 0.125 bins: bin 0, and u = 2 * 0.125    N u = 0.250 | - | 0.250      P u = - | 0.000 | -
    add_moments     the sums of 1 and of u         N 1.000 0.250 | 0.000 0.000 | 1.000 0.250
                                                   P 0.000 0.000 | 1.000 0.000 | 0.000 0.000
    fine_weights    at the nodes, of equal sums    N 0.677 0.323 | 0.000 0.000 | 0.677 0.323
                                                   P 0.000 0.000 | 0.500 0.500 | 0.000 0.000
    interact        sums through the sigmoids    R_N 1.354 1.800 | 0.924 1.159 | 0.357 0.805
                    between all nodes            R_P 0.873 0.990 | 0.278 0.722 | 0.010 0.127
    solve           f at the nodes                 f 0.497 0.547 | 0.543 0.487 | 0.412 0.562
                    its sum, weighted by P         loss = 0.5 * 0.543 + 0.5 * 0.487 = 0.515
    polynomials_of  values at the nodes are lines in u: g_N = 0.0119 + 0.0140 u | 0.0366 + 0.0037 u | 0.0143 - 0.0167 u
    evaluate        the lines at the rows          gradient 0.0154 | -0.0256 | 0.0101

By pairs the loss is 0.505 and the gradient 0.0070 | -0.0097 | 0.0027: two nodes are crude. With those of float32 (F, p
and q of ``order_for``) all these digits agree. There a coarse bin has several fine bins, so that a row needs few
moments, and ``coarse_weights`` and ``at_fine_nodes`` carry the numbers from fine to coarse nodes and back. Bins further
apart than 34 temperatures are left out of ``interact``: ``beyond_reach`` counts those to the right. ``locate``,
``add_moments`` and ``evaluate`` are in bins.py, the steps between nodes in node_tables.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..bins import Bins, Line, add_moments, chunks, compact_ids, evaluate, locate, num_lanes
from ..costs import costs_of
from ..node_tables import (
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
from ..pairs import Problem

# The loss (C,), the moments of the rates, and the slopes of the terms of the positives; None without gradient.
Rates = tuple[Tensor, Tensor | None, Tensor | None]
_KEPT_BYTES = 2**25  # the largest piece of memory that the C library may keep for its next user


def smooth_ap_binned(
    problem: Problem,
    bins: Bins,  # which hold the rows of all parts
    order: Order,
    with_grad: bool,
    sums: Tensor | None = None,  # :meth:`Places.moments` of all parts, overwritten; None if there are no others
    factor: Tensor | None = None,  # (C,) factors of the weights in ``sums``
    add: Callable[[Tensor], Tensor] | None = None,  # with a ``key_weight``: the sum of a tensor over the parts
) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) float64 and its gradient (C, M), empty unless ``with_grad``; all scores are finite.

    The rows may be one of several parts::

        each part -> moments, added up -> fields -> loss, polynomials -> gradient of the rows of each part
    """
    gradient = _memory_like(problem.scores) if with_grad else problem.scores.new_empty(0)
    losses, temperature = [], problem.temperature
    for c, own, own_bins in _runs(problem, bins):
        places, terms = Places.of(own, own_bins), None
        moments = places.moments(order) if sums is None else [*sums[:, :, c]]
        if problem.key_weight is None:
            factor_of_run = None if factor is None else factor[c]
            loss, polynomials = solve(moments, own_bins, order, temperature, factor_of_run, with_grad)
        else:
            rates = partial(places.rates, order)
            loss, polynomials, terms = solve_at_positives(moments, own_bins, order, temperature, rates, with_grad, add)
        losses.append(loss)
        if polynomials is not None:
            places.read_gradient(polynomials, terms, gradient[c])
    return losses[0] if len(losses) == 1 else torch.cat(losses), gradient


def _runs(problem: Problem, bins: Bins) -> Iterator[tuple[slice, Problem, Bins]]:
    """Yield runs of classes whose tables fit into memory together, with their rows and bins."""
    scores, positive, member, class_of, row_of, share, temperature, key_weight, *_ = problem
    num_classes, step = len(scores), max(1, costs_of(scores.device).tables_at_once // bins.num_coarse)
    if num_classes <= step:
        yield slice(None), problem, bins
        return
    runs = [slice(first, first + step) for first in range(0, num_classes, step)]
    stops = torch.arange(step, runs[-1].stop + 1, step, device=scores.device)
    ends = torch.searchsorted(class_of, stops).tolist()  # of the positives of each run
    for c, first, end in zip(runs, [0, *ends], ends):
        rows = scores[c], positive[c], None if member is None else member[c]
        listed = class_of[first:end] - c.start, row_of[first:end], share[first:end]
        weight = key_weight if key_weight is None or key_weight.ndim == 1 else key_weight[c]
        yield c, Problem(*rows, *listed, temperature, weight), bins._replace(first=bins.first[c])


def smooth_ap_of_one_class(
    scores: Tensor, positive: Tensor, num_positive: int, bins: Bins, order: Order, temperature: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`smooth_ap_binned` for one class of equal weights.

    It does not list the positives. On the host it is computed in C; on an accelerator all bins are in the window.
    """
    if not scores.is_cpu:
        return _of_one_class_on_device(scores, positive, num_positive, bins, order, temperature, with_grad)
    outside, numbering, num_fine = bins.outside, bins.numbering, bins.window * bins.fine
    groups = native.moments(scores, None, *numbering, num_fine, order.p, positive)  # [p, 2, B F + 1]
    window = slice(num_fine)
    if outside is not None:
        window = slice(outside.num_left * bins.fine, outside.num_left * bins.fine + num_fine)
        of_window, groups = groups, groups.new_zeros(order.p, 2, bins.num_fine + 1)
        groups[..., window] = of_window[..., :-1]
        far, is_positive = scores.index_select(1, outside.rows), positive.index_select(1, outside.rows)
        index, u = locate(bins, far, slice(None))
        add_moments(groups, index.expand(2, -1), u.expand(2, -1), torch.cat([~is_positive, is_positive]))
    positives = groups[:, 1:]
    moments = [groups.sum(dim=1, keepdim=True), positives, positives / num_positive]
    loss, polynomials = solve(moments, bins, order, temperature, None, with_grad)
    if polynomials is None:
        return loss, scores.new_empty(0)
    pull, of_positives = polynomials[:, 0], polynomials[:, 1] + polynomials[:, 2] / num_positive
    gradient = _memory_like(scores)
    tables = [F.pad(table[..., window], (0, 1)) for table in (pull.to(scores.dtype), of_positives)]
    native.evaluate(tables[0], scores, None, *numbering, gradient, positive, tables[1])
    if outside is not None:
        value = torch.where(is_positive, evaluate(of_positives, index, u.double()), evaluate(pull, index, u.double()))
        gradient.index_copy_(1, outside.rows, value.to(gradient.dtype))
    return loss, gradient


def _of_one_class_on_device(
    scores: Tensor, positive: Tensor, num_positive: int, bins: Bins, order: Order, temperature: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Sum the rows into the bins of the negatives, followed by those of the positives."""
    size = bins.num_fine + 1
    index, u = locate(bins, scores, slice(None))
    index, u = torch.add(index, positive, alpha=size), u.double()
    groups = scores.new_zeros(order.p, num_lanes(scores, 2 * size), 2 * size, dtype=torch.float64)
    add_moments(groups, index, u)
    both = groups.sum(dim=1, keepdim=True).unflatten(-1, (2, size))  # [p, 1, 2, B F + 1]
    loss, polynomials = solve([both, both[:, :, 1] / num_positive], bins, order, temperature, None, with_grad)
    if polynomials is None:
        return loss, scores.new_empty(0)
    of_positives = torch.add(polynomials[:, 1], polynomials[:, 2], alpha=1 / num_positive)
    tables = torch.cat([polynomials[:, 0], of_positives], dim=-1)  # [p, 1, 2 (B F + 1)]
    return loss, evaluate(tables, index, u).to(scores.dtype)


def _memory_like(scores: Tensor) -> Tensor:
    if scores.is_cpu and scores.nbytes > _KEPT_BYTES:
        return torch.from_numpy(numpy.empty_like(scores.numpy()))  # in huge pages, which are ready sooner
    return torch.empty_like(scores)


def weighted_smooth_ap_in_c(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor,
    bins: Bins,
    order: Order,
    temperature: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of :func:`smooth_ap_binned` for rows with a ``key_weight`` in C, and the validity (C,).

    It does not list the positives. All bins are in the window.
    """
    num_classes, (scale, first) = len(scores), bins.numbering
    groups = native.moments(scores, member, scale, first, bins.num_fine, order.p, positive, weight)
    groups = groups.view(order.p, num_classes, 2, -1)
    masses = groups[0, :, :, :-1].sum(dim=-1)  # [C, 2]
    valid = (masses > 0).all(dim=1)
    factor = torch.where(valid, masses[:, 1], math.inf).reciprocal()

    def rates(tables: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return native.rates(tables, scores, positive, weight, scale, first, factor)

    loss, polynomials, terms = solve_at_positives(
        [*groups.unbind(dim=2)], bins, order, temperature, rates, with_grad, None
    )
    if polynomials is None:
        return loss, scores.new_empty(0), valid
    # Scores of several classes may be a transpose, which empty_like keeps and C refuses.
    gradient, pull = _memory_like(scores).contiguous(), polynomials[:, 0].to(scores.dtype)
    rows = scores, member, scale, first, gradient, positive
    native.evaluate(pull, *rows, polynomials[:, 1], weight, terms)
    return loss, gradient, valid


class Places(NamedTuple):
    """The rows of a call, and where they and the listed positives are in the bins."""

    problem: Problem
    line: Line
    bin_of: Tensor  # [1, P] int64: fine bin of each positive, in one table of all classes with B F + 1 bins each
    u: Tensor  # [1, P] float64: its position in the bin

    @staticmethod
    def of(problem: Problem, bins: Bins) -> Places:
        """Return the places of the rows and of the listed positives."""
        scores, class_of, row_of = problem.scores, problem.class_of, problem.row_of
        line = Line(bins, scores, problem.member)
        if len([*chunks(scores)]) <= 1 and not line.is_read_in_c(problem.key_weight):
            rows = line.locate(slice(None), slice(None))
            line, (bin_of, u) = line._replace(places=rows), (values[class_of, row_of] for values in rows)
        else:
            # Each positive as a class of its own, with the window of its class: bin and position, (P, 1) each.
            values = scores[class_of, row_of][:, None]
            bins_of_positives = bins._replace(first=bins.first[class_of])
            bin_of, u = (place.view(-1) for place in locate(bins_of_positives, values, slice(None)))
        if scores.shape[0] > 1:
            bin_of = bin_of + class_of * (bins.num_fine + 1)
        return Places(problem, line, bin_of[None], u.double()[None])

    def moments(self, order: Order) -> list[Tensor]:
        """Return the moments of all rows, of the listed positives, and of the positives weighted by their shares.

        (p, C, B F + 1) float64 each; the last bin holds the rows that take no part. With a ``key_weight``, those of the
        negatives and of the positives weighted by it.
        """
        problem = self.problem
        of_all = self.line.moments(order.p, problem.weight_of_negatives)
        if problem.key_weight is None:
            weights = torch.stack([torch.ones_like(problem.share), problem.share])
        else:
            weights = problem.at_positives(problem.key_weight)[None]
        return [of_all, *self._moments_of_positives(weights, order)]

    def _moments_of_positives(self, weights: Tensor, order: Order) -> tuple[Tensor, ...]:
        """Return the moments of the listed positives for each of n columns of weights (n, P): (p, C, B F + 1) each."""
        shape, num_columns = (len(self.problem.scores), self.line.bins.num_fine + 1), len(weights)
        moments = self.problem.scores.new_zeros(order.p, num_columns, math.prod(shape), dtype=torch.float64)
        add_moments(moments, self.bin_of.expand(num_columns, -1), self.u.expand(num_columns, -1), weights)
        return moments.unflatten(-1, shape).unbind(dim=1)

    def rates(self, order: Order, tables: Tensor) -> Rates:
        """Return the loss (C,) float64, the moments (p, 2, C, B F + 1) of A and B, and the slopes of the terms (P,).

        ``tables`` (p, 4, C, B F + 1) has R_N, R_P and their slopes as polynomials; without the slopes, only the loss is
        computed.
        """
        problem, share_of = self.problem, self.problem.share
        assert problem.key_weight is not None
        rates, terms = share_of.new_empty(2, share_of.numel()), torch.empty_like(share_of)
        loss, half = share_of.new_zeros(len(problem.scores)), problem.at_positives(problem.key_weight) / 2
        for part, (r_n, r_p, *slopes) in self._at_positives(tables):
            r_p = r_p + half[part]
            total, share = r_n + r_p, share_of[part]
            loss.index_add_(0, problem.class_of[part], share * (r_n / total))
            if slopes:
                factor = share / total**2
                rates[0, part], rates[1, part] = factor * r_p, factor * r_n
                terms[part] = factor * (slopes[0] * r_p - slopes[1] * r_n)
        if tables.shape[1] == 2:
            return loss, None, None
        return loss, torch.stack(self._moments_of_positives(rates, order), dim=1), terms

    def _at_positives(self, tables: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield parts of the positives, and the n polynomials ``tables`` (p, n, C, B F + 1) there, (n, P') each."""
        tables = tables.flatten(-2)
        for _, part in chunks(self.problem.share[None]):
            at = (place[:, part].expand(tables.shape[1], -1) for place in (self.bin_of, self.u))
            yield part, evaluate(tables, *at)

    def read_gradient(self, polynomials: Tensor, terms: Tensor | None, gradient: Tensor) -> None:
        """Write the gradient of the rows into ``gradient`` (C, M).

        ``polynomials`` and ``terms`` are the results of :func:`solve_at_positives`; ``terms`` is None for those of
        :func:`solve`.
        """
        problem = self.problem
        # Every row is treated as a negative first, then the positives are overwritten.
        self.line.read(polynomials[:, 0].to(problem.scores.dtype), gradient, problem.weight_of_negatives)
        # Both terms of a positive contain its pair with itself. With few rows near it their difference is much smaller
        # than either, so it is computed before rounding to the dtype of the scores.
        own_weight = None if problem.key_weight is None else problem.at_positives(problem.key_weight)
        for part, (from_others, *slope) in self._at_positives(polynomials[:, 1:]):
            if terms is None or own_weight is None:
                value = from_others + slope[0] * problem.share[part]
            else:
                value = from_others * own_weight[part] + terms[part]
            gradient[problem.class_of[part], problem.row_of[part]] = value.to(gradient.dtype)


class Grid(NamedTuple):
    """What the tables of a set of bins have in common."""

    matrices: Constants
    kernel: Kernel
    ids: Tensor | None  # [B] int64 numbers of the coarse bins; None if they are contiguous


class Fields(NamedTuple):
    """R_N, R_P and their derivatives with respect to x at the fine nodes, (C, B, F p) float64 each.

    Without a ``key_weight`` the second is R_P + 1/2.
    """

    r_n: Tensor
    r_p: Tensor
    slope_n: Tensor
    slope_p: Tensor


def solve(
    moments: list[Tensor],
    bins: Bins,
    order: Order,
    temperature: float,
    factor: Tensor | None,  # (C,) factors of the weights; None for 1
    with_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the loss (C,) float64 and, ``with_grad``, its gradient as polynomials, see :func:`polynomials_of`.

    ``moments`` are those of :meth:`Places.moments`, without the last if it equals the one before. In place of the first
    two may be (p, C, 2, B F + 1) of the negatives and of the positives. The list is emptied, and the tables are
    overwritten: with many bins a table is as large as the rows.
    """
    grid, layout = _grid_of(bins, order, temperature, moments[0].device), (bins.num_coarse, bins.fine)
    weights = fine_weights(moments[-1][..., :-1].unflatten(-1, layout), grid.matrices)  # [C, B, F p]
    weights = weights if factor is None else weights * factor[:, None, None]
    # Positives are few. Negatives = all - positives, which is cheaper than masking every row.
    is_split = moments[0].ndim == 4
    both = moments[0] if is_split else torch.stack([moments[0].sub_(moments[1]), moments[1]], dim=2)
    moments.clear()
    both = both[..., :-1].unflatten(-1, layout)  # [p, C, 2, B, F]
    fields = fields_of(both, grid)
    del both
    fields.r_p.add_(0.5)
    loss = (weights * (fields.r_n / (fields.r_n + fields.r_p))).sum(dim=(1, 2))
    return loss, polynomials_of(fields, weights, grid) if with_grad else None


def solve_at_positives(
    moments: list[Tensor],
    bins: Bins,
    order: Order,
    temperature: float,
    rates: Callable[[Tensor], Rates],  # those of the rows of this part
    with_grad: bool,
    add: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the same for rows that have a ``key_weight``, and the slope of the term of each listed positive (P,).

    The polynomials are (p, 2, C, B F + 1) float64, of g_N and -g_P.
    """
    grid, layout = _grid_of(bins, order, temperature, moments[0].device), (bins.num_coarse, bins.fine)
    both = torch.stack(moments, dim=2)[..., :-1].unflatten(-1, layout)
    moments.clear()
    fields = fields_of(both, grid)
    del both
    loss, moments_of_rates, terms = rates(_coefficients(torch.stack(fields if with_grad else fields[:2]), grid))
    del fields
    if moments_of_rates is None:
        return loss if add is None else add(loss), None, None
    if add is not None:
        sums = add(torch.cat([loss, moments_of_rates.flatten()]))
        loss, moments_of_rates = sums[: loss.numel()], sums[loss.numel() :].view_as(moments_of_rates)
    rates_at_nodes = fine_weights(moments_of_rates[..., :-1].unflatten(-1, layout), grid.matrices)  # [2, C, B, F p]
    pulled = _pulled(rates_at_nodes, grid)
    return loss, _coefficients(torch.stack([pulled[0], -pulled[1]]), grid), terms


def _grid_of(bins: Bins, order: Order, temperature: float, device: torch.device) -> Grid:
    matrices = constants(order, device)
    kernel = make_kernel(matrices, bins.width, temperature)
    return Grid(matrices, kernel, compact_ids(bins, kernel.reach))


def fields_of(moments: Tensor, grid: Grid) -> Fields:
    """Return the sums over negatives and positives at the fine nodes from the moments (p, C, 2, B, F) of both."""
    matrices, kernel = grid.matrices, grid.kernel
    sources, q = sources_of(moments, matrices), matrices.nodes.numel()  # [C, 2, B, q]
    near = interact(sources, kernel.both, kernel.reach, grid.ids)  # [C, 2, B, 2q]
    far = beyond_reach(moments[0].sum(dim=-1), kernel.reach, grid.ids)  # [C, 2, B]
    values = at_fine_nodes(near[..., :q], matrices).add_(far[..., None])
    slopes = at_fine_nodes(near[..., q:], matrices).neg_()
    return Fields(values[:, 0], values[:, 1], slopes[:, 0], slopes[:, 1])


def polynomials_of(fields: Fields, weights: Tensor, grid: Grid) -> Tensor:
    """Return (p, 3, C, B F + 1) float64: g_N, -g_P and f' as polynomials of the fine bins; overwrites the slopes."""
    r_n, r_p, slope_n, slope_p = fields
    square = (r_n + r_p) ** 2
    pulled = _pulled(torch.stack([weights * r_p, weights * r_n]).div_(square), grid)
    slope_of_term = slope_n.mul_(r_p).sub_(slope_p.mul_(r_n)).div_(square)
    del square
    tables = torch.stack([pulled[0], -pulled[1], slope_of_term])  # [3, C, B, F p]
    del pulled
    return _coefficients(tables, grid)


def _pulled(sources: Tensor, grid: Grid) -> Tensor:
    """Return the sums over the fine nodes of ``sources`` (..., B, F p) through the slope of the sigmoid, there too."""
    at_nodes = interact(coarse_weights(sources, grid.matrices), grid.kernel.slope, grid.kernel.reach, grid.ids)
    return at_fine_nodes(at_nodes, grid.matrices)


def _coefficients(tables: Tensor, grid: Grid) -> Tensor:
    """Return (p, n, C, B F + 1) float64: n values (n, C, B, F p) at the fine nodes as polynomials of the fine bins."""
    polynomials = coefficients(tables, grid.matrices, torch.float64).view(grid.matrices.order.p, *tables.shape[:2], -1)
    return F.pad(polynomials, (0, 1))  # 0 for the rows that take no part
