"""Losses at thresholds, of rows that stay on their ranks: recall at a quantile, and partial AUC by the trapezoid rule.

A quantile of all rows is exact, from counts that add up over the ranks, see :mod:`fullrank.kernels.selection`. The
loss is then a sum over positives, and each rank has those of its own. A threshold that carries a gradient passes the
slopes of all positives to the rows near it, in shares whose sum is 1 over all ranks: three more sums for each
threshold, which travel with the loss::

    own rows ==counts, 3 or 6 all-reduces==> thresholds -> sums of own rows ==all-gather==> loss, gradient of own rows

Where gathering the rows is cheaper, they are gathered.
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
from ..losses.pooled.pauc_surrogates import PartialArea, first_flat, fractions_of, thresholds_of
from ..losses.pooled.pool import PerClass
from .part import Part, Positives

COSTS = {"sums": 1.0, "gather": 1.0}  # of a byte in each form; the cheapest form is taken


def recall_of_part(
    part: Part, temperature: float, quantile: float, interpolation: str, threshold_gradient: bool
) -> PerClass | None:
    """Return one minus the smooth recall of each class, or None if the rows are to be gathered; equal on all ranks."""
    if not _pays(part, 1, interpolation):
        return None
    positives = Positives.of(part.pool)
    selected = _select(part, part.pool.member, [quantile], interpolation, [_total(part, positives)])
    total, has_nan = selected.extra.view(2, -1)
    valid = total > 0
    levels = selected.levels.where(valid)
    taus = levels.base.new_full(levels.base.shape[:1], temperature)
    rule = _Rule(levels, torch.ones_like(levels.base), taus, part.pool.member, threshold_gradient)
    return _loss_of(part, positives, total, has_nan > 0, valid, rule)


def trapezoid_of_part(part: Part, area: PartialArea, temperature: float) -> tuple[PerClass | None, int | None]:
    """Return the missed area of each class by the trapezoid rule, and the first with a flat reference; None: gather."""
    fractions = fractions_of(area)
    if not _pays(part, len(fractions), area.quantile_interpolation):
        return None, None
    pool, positives = part.pool, Positives.of(part.pool)
    iid = pool.everyone if pool.iid is None else pool.everyone & pool.iid
    reference = iid if area.budget_basis == "population" else iid & ~pool.positive
    extra = [_total(part, positives), pool.negative.sum(dim=1).double()]
    selected = _select(part, reference, fractions, area.quantile_interpolation, extra)
    total, negatives, has_nan = selected.extra.view(3, -1)
    thresholds = thresholds_of(selected.levels, area, temperature, selected.members > 0)
    assert thresholds.edges is not None
    valid = (total > 0) & (negatives > 0) & thresholds.resolved
    weights = torch.full_like(thresholds.edges.base, 1.0 / (area.n_knots - 1))  # on an interval of 1
    weights[:, 0] /= 2
    weights[:, -1] /= 2
    taus = torch.where(valid, thresholds.tau, 1.0)
    rule = _Rule(thresholds.edges.where(valid), weights, taus, reference, area.threshold_gradient)
    per_class = _loss_of(part, positives, total, has_nan > 0, valid, rule)
    return per_class, first_flat((total > 0) & thresholds.has_reference & ~thresholds.resolved)


def _pays(part: Part, num_fractions: int, interpolation: str) -> bool:
    """Return whether the counts are fewer bytes than the rows."""
    (num_classes, _), dtype = part.pool.scores.shape, part.pool.scores.dtype
    counts = 16.0 * num_counts(dtype, num_classes, num_fractions, interpolation)
    rows = part.num_rows * (num_classes * dtype.itemsize + 8.0)
    return COSTS["sums"] * counts <= COSTS["gather"] * rows


def _total(part: Part, positives: Positives) -> Tensor:
    """Return (C,) the sum of the weights."""
    num_classes = part.pool.scores.shape[0]
    return positives.mass.new_zeros(num_classes).index_add_(0, positives.class_of, positives.mass)


def _select(
    part: Part, reference: Tensor | None, fractions: list[float], interpolation: str, extra: list[Tensor]
) -> Selected:
    """Return the quantiles of the reference rows of all ranks, the sums of ``extra``, and how many ranks have a NaN."""
    scores = part.pool.scores.detach()
    has_nan = scores.new_zeros(scores.shape[0], dtype=torch.float64)
    if scores.shape[1]:
        has_nan = scores.amax(dim=1).isnan().double()
    numbers = torch.cat([*extra, has_nan])

    def add(counts: Tensor) -> Tensor:
        return part.exchange.sum(counts, "the counts of the quantiles")

    return select_levels(scores, reference, fractions, interpolation, add, numbers)


class _Rule(NamedTuple):
    """Where the loss is read: it is the mean over the positives of the weighted sum of ``s((level - x) / tau)``."""

    levels: Levels  # (C, L)
    weights: Tensor  # [C, L] of the levels
    taus: Tensor  # [C]
    reference: Tensor | None  # [C, N] bool, the rows that levels pass their gradient to; None for all
    threshold_gradient: bool


def _loss_of(part: Part, positives: Positives, total: Tensor, has_nan: Tensor, valid: Tensor, rule: _Rule) -> PerClass:
    """Return the loss by ``rule`` of the positives, whose weights add up to ``total`` over all ranks."""
    factor = torch.where(valid, total, 1.0).reciprocal() * valid
    share = positives.mass * factor.masked_fill(has_nan, math.nan)[positives.class_of]
    loss, gradient = _at_levels(part.pool.scores.detach(), part, positives, share, rule)
    loss = loss.masked_fill(has_nan, math.nan)
    if gradient is not None and rule.threshold_gradient:  # else only positives have one
        gradient.masked_fill_(loss.isnan()[:, None], math.nan)  # also of inf - inf, on any rank
    return PerClass(part.attach(loss, gradient), valid)


@exact
def _at_levels(
    scores: Tensor, part: Part, positives: Positives, share: Tensor, rule: _Rule
) -> tuple[Tensor, Tensor | None]:
    """Return the loss (C,) float64, and the gradient of the rows (C, N), None where none is needed."""
    levels, weights, taus, _, threshold_gradient = rule
    exchange, (class_of, row_of, _) = part.exchange, positives
    num_classes, num_levels = levels.base.shape
    loss = share.new_zeros(num_classes)
    drawn = share.new_zeros(num_classes, num_levels)  # the slopes of the positives at each level
    own = share.new_zeros(share.shape)  # dloss/dx of each positive
    for level in range(num_levels):
        x, point = scores[class_of, row_of], levels.movable[class_of, level].to(scores.dtype)
        x = x if levels.offset is None else x - levels.base[class_of, level]
        sigmoid, slope = sigmoid_and_slope((point - x).div_(taus[class_of]))
        weight = share * weights[class_of, level]
        loss.index_add_(0, class_of, weight * sigmoid)
        push = weight * slope / taus[class_of]
        drawn[:, level].index_add_(0, class_of, push)
        own -= push
    if not (part.needs_gradient and threshold_gradient):
        loss = exchange.each(loss, "the losses").sum(dim=0)
        if not part.needs_gradient:
            return loss, None
        gradient = torch.zeros_like(scores)
    else:
        slopes, sums, nearest = _slopes(scores, rule)
        every = exchange.each(torch.cat([loss[:, None], drawn, sums, nearest], dim=1), "the sums at the thresholds")
        loss = every[:, :, 0].sum(dim=0)
        drawn, parts, distances = (column.clone() for column in every[:, :, 1:].chunk(3, dim=2))  # [W, C, L]
        # The slopes of each rank are in units of that of its nearest row. Here the nearest row of all is the unit.
        units = torch.where(distances.isfinite(), (distances.amin(dim=0) - distances) / taus[:, None], -math.inf).exp()
        whole = (parts * units).sum(dim=0)  # [C, L]
        finite = levels.base.isfinite() if levels.offset is None else levels.base.isfinite() & levels.offset.isfinite()
        factor = torch.where(finite & (whole > 0), drawn.sum(dim=0) * units[exchange.rank] / whole, 0.0)
        gradient = torch.zeros_like(scores)
        for level, slope in enumerate(slopes):
            gradient.addcmul_(slope, factor[:, level : level + 1].to(slope.dtype))
    gradient[class_of, row_of] += own.to(gradient.dtype)
    return loss, gradient


def _slopes(scores: Tensor, rule: _Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Return slopes of this rank's reference rows (L, C, N), their sums and a distance for each, (C, L) float64.

    The slopes are in units of the slope at that distance from the level. A level that is the score of a reference row
    has one nearby, and the unit is 1. Else it is the slope of the nearest row of this rank, see threshold_gradient.py.
    """
    levels, _, taus, reference, _ = rule
    num_classes, num_levels = levels.base.shape
    slopes = scores.new_empty(num_levels, *scores.shape)
    sums = torch.zeros(num_classes, num_levels, dtype=torch.float64, device=scores.device)
    nearest = torch.full_like(sums, 0.0 if levels.offset is None else math.inf)
    base = torch.where(levels.base.isfinite(), levels.base, 0.0)
    shift = torch.zeros_like(sums) if levels.offset is None else levels.offset.nan_to_num(0.0, 0.0, 0.0)

    def distances(c: slice, m: slice, level: int) -> Tensor:
        found = (scores[c, m].double() - base[c, level, None].double()).sub_(shift[c, level, None]).abs_()
        return found if reference is None else found.masked_fill_(~reference[c, m], math.inf)

    for level in range(num_levels):
        if levels.offset is not None:
            for c, m in chunks(scores):
                nearest[c, level] = torch.minimum(nearest[c, level], distances(c, m, level).amin(dim=1))
            start = nearest[:, level].nan_to_num(posinf=0.0)
            factors = (-start / taus).exp().to(scores.dtype)
        for c, m in chunks(scores):
            slope = slopes[level, c, m]
            if levels.offset is None:
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
