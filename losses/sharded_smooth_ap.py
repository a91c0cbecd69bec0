"""Smooth-AP of rows that stay on their ranks, in one of two forms; see :mod:`fullrank.kernels.soft_ranks_binned`.

moments
    Every quantity is a function of the score, known from the moments of bins, and moments add up. One all-reduce of the
    tables, then every rank has the loss, and the gradient as polynomials, which it reads at its own rows::

        own rows -> moments ==all-reduce==> fields -> loss, polynomials -> gradient of own rows

positives
    Only the positives travel: their scores are gathered, and two sums for each are reduced. It needs no bins, so it is
    for scores so far apart that most bins would be empty, and for many classes, where a row has one positive and C
    scores. With R_N and R_P the sums over all negatives and positives at x_i, the loss is the weighted mean of
    R_N / (R_N + R_P + 1/2), as R_P contains the pair of i with itself::

        positives ==all-gather==> sums over own rows ==all-reduce==> loss, slopes -> gradient of own rows as keys
                                                                 gradient of the positives as queries ==all-reduce==>

The form is the cheapest by ``COSTS``. Where gathering the rows is cheaper, they are gathered.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.bins import Bins, cover, most_bins
from ..kernels.costs import costs_of
from ..kernels.node_tables import Order, order_for
from ..kernels.registration import exact
from ..kernels.sigmoid_sums import sigmoid_sums
from ..kernels.soft_ranks_binned import (
    Grid,
    Places,
    fields_of,
    locate_positives,
    locate_rows,
    loss_at_nodes,
    make_grid,
    polynomials_of,
    read_gradient,
    split_moments,
    sum_positives,
    sum_rows,
    weights_of,
)
from ..kernels.soft_ranks_pairs import Problem
from .pool import PerClass, Pool
from .sharded import PoolFacts, needs_gradient, with_gradient

# Of a byte in each form; the cheapest form is taken. That of the positives computes more, in float64.
COSTS = {"moments": 1.0, "positives": 16.0, "gather": 1.0}


class _Range(NamedTuple):
    """The range of the finite scores of each class over all ranks, and the classes that are NaN."""

    low: Tensor  # [C] float64, 0 without a row
    high: Tensor  # [C]
    undefined: Tensor  # [C] bool: the class has a NaN
    clashes: Tensor  # [C] bool: two equal infinities, one of them of a positive, have no difference


def smooth_ap_of_part(pool: Pool, shared: PoolFacts, temperature: float) -> PerClass | None:
    """Return the loss of each class from this rank's part of the pool, or None if the rows have to be gathered.

    Args:
        pool: live and queued rows of this rank.
        shared: what all ranks know.
        temperature: > 0, the same on all ranks.
    """
    num_classes, size = pool.scores.shape[0], pool.scores.element_size()
    if shared.must_gather:
        return None
    bytes_of = {
        "gather": shared.num_rows * (num_classes * size + 8.0),
        "positives": sum(shared.positives) * (size + 60.0),
        "moments": math.inf,
    }
    scores, (low, high, undefined, clashes) = _make_finite(pool, shared, temperature)
    order = order_for(scores, shared.num_rows)
    bins = cover(low.to(scores.dtype), high.to(scores.dtype), temperature, order.fine)
    if bins.window <= most_bins(shared.num_rows):
        tables = 3.0 if shared.weighted else 2.0
        bytes_of["moments"] = 16.0 * tables * order.p * num_classes * bins.num_fine
    form = min(COSTS, key=lambda name: COSTS[name] * bytes_of[name])
    if form == "gather":
        return None
    if form == "moments":
        loss, gradient, valid = _by_moments(scores, pool, shared, temperature, bins, order)
    else:
        loss, gradient, valid = _by_positives(scores, pool, shared, temperature)
    undefined = undefined | (clashes & valid)
    loss = loss.masked_fill(undefined, math.nan)
    gradient = None if gradient is None else gradient.masked_fill_(undefined[:, None], math.nan)
    return PerClass(with_gradient(loss, gradient, pool, shared), valid)


def _make_finite(pool: Pool, shared: PoolFacts, temperature: float) -> tuple[Tensor, _Range]:
    """Return this rank's scores, infinite ones replaced as in a gathered pool, and their range over all ranks.

    With one class the header has the range. Only infinite scores take two more exchanges.
    """
    scores, member, device = pool.scores.detach(), pool.member, pool.scores.device
    num_classes = scores.shape[0]
    if num_classes == 1:
        ends = torch.tensor([[-shared.low], [shared.high]], dtype=torch.float64, device=device)
        undefined = ends[0].isnan()
    else:
        ends = torch.full((3, num_classes), -math.inf, dtype=torch.float64, device=device)
        if scores.shape[1]:
            for sign, end in ((-1.0, ends[0]), (1.0, ends[1])):
                end.copy_(_largest(scores, sign, member))
        ends[2] = ends[:2].isnan().any(dim=0)
        ends[:2].masked_fill_(ends[2] > 0, -math.inf)  # some reductions drop a NaN
        ends = shared.exchange.largest(ends, "the ranges of the classes")
        undefined = ends[2] > 0
    low, high = -ends[0], ends[1]
    empty = (low == math.inf) & (high == -math.inf) | undefined
    low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
    if bool(undefined.any()):
        scores = scores.masked_fill(undefined[:, None], 0.0)
    if bool((low.isfinite() & high.isfinite()).all()):
        return scores, _Range(low, high, undefined, torch.zeros_like(undefined))

    # An infinite score moves beyond the reach of every finite one, see soft_ranks.py.
    finite = scores.isfinite() if member is None else scores.isfinite() & member
    edges = torch.full((2, num_classes), -math.inf, dtype=torch.float64, device=device)
    counts = torch.zeros(4, num_classes, dtype=torch.float64, device=device)
    for k, sign in enumerate((-1.0, 1.0)):
        if scores.shape[1]:
            edges[k] = _largest(scores, sign, finite)
        infinite = scores == sign * math.inf
        infinite = infinite if member is None else infinite & member
        counts[2 * k], counts[2 * k + 1] = infinite.sum(dim=1), (infinite & pool.positive).sum(dim=1)
    edges = shared.exchange.largest(edges, "the ends of the finite scores")
    counts = shared.exchange.sum(counts, "the numbers of infinite scores")
    edges.nan_to_num_(neginf=0.0)
    low, high, clashes = -edges[0], edges[1], torch.zeros_like(undefined)
    for k, sign in enumerate((-1.0, 1.0)):
        edge = edges[k].to(scores.dtype)
        beyond = edge + (edge.abs() * 1e-3).clamp_min(64 * temperature)
        beyond = beyond.clamp_max(torch.finfo(scores.dtype).max)
        scores = torch.where(scores == sign * math.inf, sign * beyond[:, None], scores)
        moved = counts[2 * k] > 0
        clashes = clashes | ((counts[2 * k] > 1) & (counts[2 * k + 1] > 0))
        if sign < 0:
            low = torch.where(moved, -beyond.double(), low)
        else:
            high = torch.where(moved, beyond.double(), high)
    return scores, _Range(low, high, undefined, clashes)


def _largest(scores: Tensor, sign: float, part: Tensor | None) -> Tensor:
    """Return the largest of ``sign`` times the scores (C, M) of each class in ``part``; NaN if one of these is NaN."""
    if part is not None:
        scores = scores.masked_fill(~part, -sign * math.inf)
    return scores.amax(dim=1) if sign > 0 else -scores.amin(dim=1)


def _rows_of(scores: Tensor, pool: Pool, temperature: float) -> Problem:
    """Return this rank's rows for the kernels, with the weight of each positive for its share."""
    class_of, row_of = pool.positive.nonzero(as_tuple=True)
    mass = scores.new_ones(row_of.shape, dtype=torch.float64) if pool.weight is None else pool.weight[row_of].double()
    return Problem(scores, pool.positive, pool.member, class_of, row_of, mass, temperature)


def shares_of(total: Tensor, positives: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the weight of a positive is multiplied by, and which classes are valid, (C,) each.

    Args:
        total: (C,) the weight of the positives over all ranks.
        positives: (C,) their number.
        members: (C,) the number of positives and negatives.
    """
    valid = (total > 0) & (members > positives)
    return torch.where(valid, total, 1.0).reciprocal() * valid, valid


def read_tables(moments: Tensor, factor: Tensor, grid: Grid, with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Return the loss (C,) float64 and its gradient as polynomials, see :func:`polynomials_of`.

    Args:
        moments: (2 or 3, p, C, B F + 1) of all rows, which are overwritten, of the positives and, where they differ, of
            the weights of these.
        factor: (C,) what the weights are multiplied by.
        grid: the bins.
        with_grad: compute the polynomials too.
    """
    weights = weights_of(moments[-1], grid) * factor[:, None, None]
    fields = fields_of(split_moments(moments[0], moments[1]), grid)
    loss = loss_at_nodes(fields, weights)
    return loss, polynomials_of(fields, weights, grid) if with_grad else None


@exact
def _by_moments(
    scores: Tensor, pool: Pool, shared: PoolFacts, temperature: float, bins: Bins, order: Order
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the loss (C,) float64, the gradient of the live rows (C, N), and the validity (C,)."""
    rows = _rows_of(scores, pool, temperature)
    located = locate_rows(rows, bins)
    places = locate_positives(rows, bins, located)
    counted, weighted = sum_positives(rows, bins, order, places)
    tables = [sum_rows(rows, bins, order, located), counted, *([weighted] if shared.weighted else [])]
    sums = shared.exchange.sum(torch.stack(tables), "the moments")  # [2 or 3, p, C, B F + 1]
    del tables, counted, weighted
    members, positives, total = (sums[k, 0, :, :-1].sum(dim=1) for k in (0, 1, sums.shape[0] - 1))
    factor, valid = shares_of(total, positives, members)
    with_grad, num_live = needs_gradient(pool), shared.num_live
    gradient = scores.new_empty(scores.shape[0], num_live) if with_grad else None
    live = rows.row_of < num_live
    # What is read: the live rows, and the live positives with their shares.
    rows = rows._replace(
        scores=scores[:, :num_live],
        member=None if pool.member is None else pool.member[:, :num_live],
        class_of=rows.class_of[live],
        row_of=rows.row_of[live],
        share=(rows.share * factor[rows.class_of])[live],
    )
    places = Places(places.bin_of[:, live], places.u[:, live])
    grid = make_grid(bins, order, scores.device, temperature)
    loss = torch.empty_like(factor)
    step = max(1, costs_of(scores.device).tables_at_once // bins.num_coarse)
    for first in range(0, scores.shape[0], step):
        part = slice(first, first + step)
        loss[part], polynomials = read_tables(sums[:, :, part], factor[part], grid, with_grad)
        if gradient is None or polynomials is None:
            continue
        own = slice(None)
        if step < scores.shape[0]:
            own = slice(*torch.searchsorted(rows.class_of, rows.class_of.new_tensor([first, first + step])).tolist())
        some = rows._replace(
            scores=rows.scores[part],
            member=None if rows.member is None else rows.member[part],
            class_of=rows.class_of[own] - first,
            row_of=rows.row_of[own],
            share=rows.share[own],
        )
        at = Places(places.bin_of[:, own] - first * (bins.num_fine + 1), places.u[:, own])
        read_gradient(polynomials, some, bins._replace(first=bins.first[part]), None, at, gradient[part])
    return loss, gradient, valid


@exact
def _by_positives(
    scores: Tensor, pool: Pool, shared: PoolFacts, temperature: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the loss (C,) float64, the gradient of the live rows (C, N), and the validity (C,).

    In float64: the pair of a positive with itself has a slope in both of its terms, which cancel.
    """
    rows, exchange, num_classes = _rows_of(scores, pool, temperature), shared.exchange, scores.shape[0]
    counts = [int(count) for count in shared.positives]
    sent = [scores[rows.class_of, rows.row_of], rows.class_of.to(torch.int32)]
    x, class_of, *mass = exchange.rows([*sent, rows.share] if shared.weighted else sent, counts)
    x, class_of = x.double(), class_of.to(torch.int64)
    weight = mass[0] if mass else torch.ones_like(x)
    groups = _groups(class_of, num_classes)
    with_grad = needs_gradient(pool)

    # Two sums for each positive over this rank's negatives and positives, and the number of its rows in each class.
    sums = x.new_zeros(2 * x.numel() + num_classes)
    own_rows = scores.shape[1] if pool.member is None else pool.member.sum(dim=1)
    sums[2 * x.numel() :] = own_rows
    at_positives, graphs = sums[: 2 * x.numel()].view(-1, 2), []
    for classes, place in groups:
        real = place >= 0
        queries = x[place.clamp_min(0)]  # [c, q], some of them padding
        kinds = torch.stack([pool.negative[classes], pool.positive[classes]], dim=2).double()
        keys = scores[classes].double()
        with torch.set_grad_enabled(with_grad):
            queries.requires_grad_(with_grad)
            keys.requires_grad_(with_grad)
            found = sigmoid_sums(queries, keys, kinds, temperature)  # [c, q, 2]
        at_positives[place[real]] = found.detach()[real]
        graphs.append((queries, keys, found))
    sums = exchange.sum(sums, "the sums at the positives")
    r_n, r_p = sums[: 2 * x.numel()].view(-1, 2).unbind(dim=1)
    r_p = r_p + 0.5
    members = sums[2 * x.numel() :]
    positives = torch.bincount(class_of, minlength=num_classes).double()
    factor, valid = shares_of(x.new_zeros(num_classes).index_add_(0, class_of, weight), positives, members)
    share = weight * factor[class_of]
    loss = x.new_zeros(num_classes).index_add_(0, class_of, share * (r_n / (r_n + r_p)))
    if not with_grad:
        return loss, None, valid

    square = (r_n + r_p) ** 2
    slopes = torch.stack([share * r_p / square, -share * r_n / square], dim=1)  # [P, 2] dloss/dR
    gradient, of_queries = scores.new_zeros(num_classes, shared.num_live, dtype=torch.float64), torch.zeros_like(x)
    for (classes, place), (queries, keys, found) in zip(groups, graphs):
        real = place >= 0
        upstream = torch.where(real[:, :, None], slopes[place.clamp_min(0)], 0.0)
        found_queries, found_keys = torch.autograd.grad(found, (queries, keys), upstream)
        of_queries[place[real]] = found_queries[real]
        gradient[classes] = found_keys[:, : shared.num_live]
    of_queries = exchange.sum(of_queries, "the gradients of the positives")
    rank = exchange.rank
    own = of_queries[sum(counts[:rank]) : sum(counts[: rank + 1])]
    live = rows.row_of < shared.num_live
    gradient[rows.class_of[live], rows.row_of[live]] += own[live]
    return loss, gradient.to(scores.dtype), valid


def _groups(class_of: Tensor, num_classes: int) -> list[tuple[Tensor, Tensor]]:
    """Return groups of classes (c,) with similar numbers of positives, and the places (c, q) of these, -1 for none.

    Within a group the lists are padded to the longest, which at most doubles them. Classes without a positive are in no
    group.
    """
    order = class_of.argsort(stable=True)
    count = torch.bincount(class_of, minlength=num_classes)
    first = count.cumsum(0) - count
    kind = torch.frexp(count.double()).exponent  # 0 without positives, 1 with one, 2 with two or three ...
    groups = []
    for exponent in kind.unique().tolist():
        if exponent == 0:
            continue
        classes = (kind == exponent).nonzero()[:, 0]
        column = torch.arange(int(count[classes].max()), device=class_of.device)
        inside = column < count[classes, None]
        place = order[(first[classes, None] + column).clamp_max(max(0, order.numel() - 1))]
        groups.append((classes, torch.where(inside, place, -1)))
    return groups
