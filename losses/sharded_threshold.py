"""Losses at thresholds, of rows that stay on their ranks: recall at a quantile, and partial AUC by the trapezoid rule.

A quantile of all rows is exact, from counts that add up over the ranks, see :mod:`fullrank.kernels.selection`. The
loss is then a sum over positives, and each rank has those of its own. A threshold that carries a gradient passes the
slopes of all positives to the rows near it, in shares whose sum is 1 over all ranks: three more sums for each
threshold, which travel with the loss::

    own rows ==counts, 3 or 6 all-reduces==> thresholds -> sums of own rows ==all-gather==> loss, gradient of own rows
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.bins import chunks
from ..kernels.pairs import sigmoid_and_slope
from ..kernels.quantiles import Levels
from ..kernels.registration import exact
from ..kernels.selection import Selected, num_counts, select_levels
from .partial_area import PartialArea, first_flat, fractions_of, thresholds_of
from .pool import PerClass, Pool
from .sharded import PoolFacts, Positives, needs_gradient, with_gradient

COSTS = {"sums": 1.0, "gather": 1.0}  # of a byte in each form; the cheapest form is taken


def recall_of_part(
    pool: Pool, shared: PoolFacts, temperature: float, quantile: float, interpolation: str, threshold_gradient: bool
) -> PerClass | None:
    """Return one minus the smooth recall of each class from this rank's rows, or None if all must be gathered."""
    if not _pays(pool, shared, 1, interpolation):
        return None
    positives = Positives.of(pool, pool.positive)
    found = _select(pool, shared, pool.member, [quantile], interpolation, [_total(positives, pool)])
    total, has_nan = found.extra.view(2, -1)
    valid = total > 0
    levels = found.levels.where(valid)
    taus = levels.base.new_full(levels.base.shape[:1], temperature)
    sums = _Sums(levels, torch.ones_like(levels.base), taus, pool.member, threshold_gradient)
    return _loss_at_levels(pool, shared, positives, total, has_nan > 0, valid, sums)


def trapezoid_of_part(
    pool: Pool, shared: PoolFacts, area: PartialArea, temperature: float
) -> tuple[PerClass | None, int | None]:
    """Return the missed area of each class by the trapezoid rule, and the first with a flat reference; None: gather."""
    fractions = fractions_of(area)
    if not _pays(pool, shared, len(fractions), area.quantile_interpolation):
        return None, None
    iid = pool.everyone if pool.iid is None else pool.everyone & pool.iid
    reference = iid if area.budget_basis == "population" else iid & ~pool.positive
    counted = pool.positive if pool.live is None or area.pos_numerator == "pool" else pool.positive & pool.live
    positives = Positives.of(pool, counted)
    extra = [_total(positives, pool), pool.negative.sum(dim=1).double()]
    found = _select(pool, shared, reference, fractions, area.quantile_interpolation, extra)
    total, negatives, has_nan = found.extra.view(3, -1)
    thresholds = thresholds_of(found.levels, area, temperature, found.members > 0)
    assert thresholds.edges is not None
    valid = (total > 0) & (negatives > 0) & thresholds.resolved
    weights = torch.full_like(thresholds.edges.base, 1.0 / (area.n_knots - 1))  # on an interval of 1
    weights[:, 0] /= 2
    weights[:, -1] /= 2
    taus = torch.where(valid, thresholds.tau, 1.0)
    sums = _Sums(thresholds.edges.where(valid), weights, taus, reference, area.threshold_gradient)
    per_class = _loss_at_levels(pool, shared, positives, total, has_nan > 0, valid, sums)
    return per_class, first_flat((total > 0) & thresholds.has_reference & ~thresholds.resolved)


def _pays(pool: Pool, shared: PoolFacts, num_fractions: int, interpolation: str) -> bool:
    """Return whether the counts are fewer bytes than the rows."""
    if shared.must_gather:
        return False
    num_classes, dtype = pool.scores.shape[0], pool.scores.dtype
    counts = 16.0 * num_counts(dtype, num_classes, num_fractions, interpolation)
    rows = shared.num_rows * (num_classes * pool.scores.element_size() + 8.0)
    return COSTS["sums"] * counts <= COSTS["gather"] * rows


def _total(positives: Positives, pool: Pool) -> Tensor:
    """Return (C,) the sum of the weights."""
    return positives.mass.new_zeros(pool.scores.shape[0]).index_add_(0, positives.class_of, positives.mass)


def _select(
    pool: Pool,
    shared: PoolFacts,
    reference: Tensor | None,
    fractions: list[float],
    interpolation: str,
    extra: list[Tensor],
) -> Selected:
    """Return the quantiles of the reference rows of all ranks, the sums of ``extra``, and how many ranks have a NaN."""
    scores = pool.scores.detach()
    has_nan = scores.new_zeros(scores.shape[0], dtype=torch.float64)
    if scores.shape[1]:
        has_nan = scores.amax(dim=1).isnan().double()
    numbers = torch.cat([*extra, has_nan])

    def add(counts: Tensor) -> Tensor:
        return shared.exchange.sum(counts, "the counts of the quantiles")

    return select_levels(scores, reference, fractions, interpolation, add, numbers)


class _Sums(NamedTuple):
    """What is summed: over the positives, and over the rows that the levels pass their gradient to."""

    levels: Levels  # (C, L)
    weights: Tensor  # [C, L] of the levels
    taus: Tensor  # [C]
    reference: Tensor | None  # [C, M] bool, None for all
    threshold_gradient: bool


@exact
def _found_at_levels(
    scores: Tensor, shared: PoolFacts, positives: Positives, share: Tensor, sums: _Sums, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the loss (C,) float64, and the gradient of the live rows (C, N), None unless ``with_grad``."""
    levels, weights, taus, reference, threshold_gradient = sums
    class_of, row_of, _ = positives
    num_classes, num_live, num_levels = scores.shape[0], shared.num_live, levels.base.shape[1]
    loss = share.new_zeros(num_classes)
    drawn = share.new_zeros(num_classes, num_levels)  # the slopes of the positives at each level
    own = share.new_zeros(share.shape)  # dloss/dx of each positive
    live = row_of < num_live
    for level in range(num_levels):
        x, point = scores[class_of, row_of], levels.movable[class_of, level].to(scores.dtype)
        x = x if levels.offset is None else x - levels.base[class_of, level]
        sigmoid, slope = sigmoid_and_slope((point - x).div_(taus[class_of]))
        weight = share * weights[class_of, level]
        loss.index_add_(0, class_of, weight * sigmoid)
        push = (weight * slope / taus[class_of]).masked_fill_(~live, 0.0)
        drawn[:, level].index_add_(0, class_of, push)
        own -= push
    if not with_grad:
        return shared.exchange.each(loss, "the losses").sum(dim=0), None

    gradient = scores.new_zeros(num_classes, num_live)
    if not threshold_gradient:
        loss = shared.exchange.each(loss, "the losses").sum(dim=0)
    else:
        slopes, found, nearest = _slopes(scores, shared, levels, taus, reference)
        every = shared.exchange.each(
            torch.cat([loss[:, None], drawn, found, nearest], dim=1), "the sums at the thresholds"
        )
        loss = every[:, :, 0].sum(dim=0)
        drawn, parts, distances = (part.clone() for part in every[:, :, 1:].chunk(3, dim=2))  # [W, C, L]
        # The slopes of each rank are in units of that of its nearest row. Here the nearest row of all is the unit.
        units = torch.where(distances.isfinite(), (distances.amin(dim=0) - distances) / taus[:, None], -math.inf).exp()
        whole = (parts * units).sum(dim=0)  # [C, L]
        finite = levels.base.isfinite() if levels.offset is None else levels.base.isfinite() & levels.offset.isfinite()
        carried = finite & (whole > 0)
        factor = torch.where(carried, drawn.sum(dim=0) * units[shared.exchange.rank] / whole, 0.0)
        for level, slope in enumerate(slopes):
            gradient.addcmul_(slope, factor[:, level : level + 1].to(slope.dtype))
        if shared.num_queued:  # what nothing carries does not draw either
            own = own * carried.any(dim=1)[class_of]
    gradient[class_of[live], row_of[live]] += own[live].to(gradient.dtype)
    return loss, gradient


def _slopes(
    scores: Tensor, shared: PoolFacts, levels: Levels, taus: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return slopes of this rank's live reference rows (L, C, N), their sums and a distance for each, (C, L) float64.

    The slopes are in units of the slope at that distance from the level. Without a queue a level is the score of a
    reference row, and the unit is 1; else the unit is the slope of the nearest row, see threshold_gradient.py.
    """
    scores = scores[:, : shared.num_live]
    reference = None if reference is None else reference[:, : shared.num_live]
    absolute = shared.num_queued == 0 and levels.offset is None
    num_levels = levels.base.shape[1]
    slopes = scores.new_empty(num_levels, *scores.shape)
    sums = torch.zeros(scores.shape[0], num_levels, dtype=torch.float64, device=scores.device)
    nearest = torch.full_like(sums, 0.0 if absolute else math.inf)
    base = torch.where(levels.base.isfinite(), levels.base, 0.0)
    shift = torch.zeros_like(sums) if levels.offset is None else levels.offset.nan_to_num(0.0, 0.0, 0.0)

    def distances(c: slice, m: slice, level: int) -> Tensor:
        found = (scores[c, m].double() - base[c, level, None].double()).sub_(shift[c, level, None]).abs_()
        return found if reference is None else found.masked_fill_(~reference[c, m], math.inf)

    for level in range(num_levels):
        if not absolute:
            for c, m in chunks(scores):
                nearest[c, level] = torch.minimum(nearest[c, level], distances(c, m, level).amin(dim=1))
            start = nearest[:, level].nan_to_num(posinf=0.0)
            factors = (-start / taus).exp().to(scores.dtype)
        for c, m in chunks(scores):
            slope = slopes[level, c, m]
            if absolute:
                torch.sub(scores[c, m], base[c, level, None], out=slope).abs_().div_(-taus[c, None]).sigmoid_()
                slope.addcmul_(slope, slope, value=-1)  # e - e^2 with e = s(-|d| / tau)
                if reference is not None:
                    slope.mul_(reference[c, m])
            else:
                relative = distances(c, m, level).sub_(start[c, None]).div_(taus[c, None].double()).neg_()
                torch.exp(relative.to(slope.dtype), out=slope)
                slope.div_((slope * factors[c, None]).add_(1).square_())
            sums[c, level] += slope.sum(dim=1)
    return slopes, sums, nearest


def _loss_at_levels(
    pool: Pool, shared: PoolFacts, positives: Positives, total: Tensor, has_nan: Tensor, valid: Tensor, sums: _Sums
) -> PerClass:
    """Return the mean over the positives of the weighted sums of ``s((level - x) / tau)``."""
    factor = torch.where(valid, total, 1.0).reciprocal() * valid
    share = positives.mass * factor.masked_fill(has_nan, math.nan)[positives.class_of]
    given = shared, positives, share, sums, needs_gradient(pool)
    loss, gradient = _found_at_levels(pool.scores.detach(), *given)
    loss = loss.masked_fill(has_nan, math.nan)
    if gradient is not None and sums.threshold_gradient:  # else only positives have one
        gradient.masked_fill_(loss.isnan()[:, None], math.nan)  # also of inf - inf, on any rank
    return PerClass(with_gradient(loss, gradient, pool, shared), valid)
