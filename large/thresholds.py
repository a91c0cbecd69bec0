"""Losses at thresholds, of rows that stay on their ranks: recall at a quantile, and partial AUC by the trapezoid rule.

A threshold with a gradient passes the slopes of all positives to the rows near it, in shares whose sum over all ranks
is 1. That takes three more sums for each threshold, which travel with the loss::

own rows ==counts, 3 or 6 all-reduces==> thresholds -> sums of own rows ==all-gather==> loss, gradient of own rows
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.below_levels import origins, write_relative_slopes, write_slopes
from ..kernels.pairs import sigmoid_and_slope
from ..kernels.quantiles import Levels
from ..kernels.registration import exact
from ..losses.pooled.pauc_surrogates import PartialArea, fractions_of, reference_of, thresholds_of, trapezoid_rule
from ..losses.pooled.pool import PerClass
from .selection import Selected, num_counts, select_levels
from .shard import Positives, Shard

COSTS = {"sums": 1.0, "gather": 1.0}  # of a byte in each form; the cheapest form is used


def recall_of_shard(
    shard: Shard, temperature: float, quantile: float, interpolation: str, threshold_gradient: bool
) -> PerClass | None:
    """Return one minus the smooth recall of each class, or None if the rows are to be gathered; equal on all ranks."""
    if not _pays(shard, 1, interpolation):
        return None
    positives = Positives.of(shard.pool)
    selected = _select(shard, positives, shard.pool.member, [quantile], interpolation)
    total, has_nan = selected.extra.view(2, -1)
    valid = total > 0
    levels = selected.levels.where(valid)
    taus = levels.base.new_full(levels.base.shape[:1], temperature)
    rule = _Rule(levels, levels.base.new_ones(1), taus, shard.pool.member, threshold_gradient)
    return _loss_of(shard, positives, total, has_nan > 0, valid, rule)


def trapezoid_of_shard(shard: Shard, area: PartialArea, temperature: float) -> tuple[PerClass | None, Tensor | None]:
    """Return the missed area of each class, None to gather the rows, and which classes have a flat reference."""
    fractions = fractions_of(area)
    if not _pays(shard, len(fractions), area.quantile_interpolation):
        return None, None
    positives, reference = Positives.of(shard.pool), reference_of(shard.pool, area)
    negatives = shard.pool.negative.sum(dim=1).double()
    selected = _select(shard, positives, reference, fractions, area.quantile_interpolation, negatives)
    total, has_nan, negatives = selected.extra.view(3, -1)
    thresholds = thresholds_of(selected.levels, area, temperature, selected.members > 0)
    valid = (total > 0) & (negatives > 0) & thresholds.resolved
    weights = thresholds.edges.base.new_tensor(trapezoid_rule(area.n_knots))
    taus = torch.where(valid, thresholds.tau, 1.0)
    rule = _Rule(thresholds.edges.where(valid), weights, taus, reference, area.threshold_gradient)
    per_class = _loss_of(shard, positives, total, has_nan > 0, valid, rule)
    return per_class, (total > 0) & thresholds.has_reference & ~thresholds.resolved


def _pays(shard: Shard, num_fractions: int, interpolation: str) -> bool:
    """Return whether the rows have no weights and the counts are fewer bytes than the rows."""
    if shard.pool.key_weight is not None:
        return False
    (num_classes, _), dtype = shard.pool.scores.shape, shard.pool.scores.dtype
    counts = 16.0 * num_counts(dtype, num_classes, num_fractions, interpolation)
    rows = shard.num_rows * (num_classes * dtype.itemsize + 8.0)
    return COSTS["sums"] * counts <= COSTS["gather"] * rows


def _select(
    shard: Shard,
    positives: Positives,
    reference: Tensor | None,
    fractions: list[float],
    interpolation: str,
    *numbers: Tensor,
) -> Selected:
    """Return the quantiles of the reference rows of all ranks, and sums over the ranks, of each class.

    They are of the weights of the positives, of ranks with a NaN, and of ``numbers``.
    """
    scores = shard.pool.scores.detach()
    has_nan = scores.amax(dim=1).isnan() if scores.shape[1] else scores.new_zeros(scores.shape[0])
    total = positives.mass.new_zeros(scores.shape[0]).index_add_(0, positives.class_of, positives.mass)
    extra = torch.cat([total, has_nan.double(), *numbers])

    def add(counts: Tensor) -> Tensor:
        return shard.exchange.sum(counts, "the counts of the quantiles")

    return select_levels(scores, reference, fractions, interpolation, add, extra)


class _Rule(NamedTuple):
    """The loss is the mean over the positives x of the weighted sum over the levels of ``s((level - x) / tau)``."""

    levels: Levels  # (C, L)
    weights: Tensor  # [L] of the levels
    taus: Tensor  # [C]
    reference: Tensor | None  # [C, N] bool, the rows to which levels pass their gradient; None for all
    threshold_gradient: bool


def _loss_of(
    shard: Shard, positives: Positives, total: Tensor, has_nan: Tensor, valid: Tensor, rule: _Rule
) -> PerClass:
    """Return the loss by ``rule`` of the positives, whose weights add up to ``total`` over all ranks."""
    factor = torch.where(valid, total, 1.0).reciprocal() * valid
    share = positives.mass * factor.masked_fill(has_nan, math.nan)[positives.class_of]
    loss, gradient = _at_levels(shard.pool.scores.detach(), shard, positives, share, rule)
    loss = loss.masked_fill(has_nan, math.nan)
    if gradient is not None:
        gradient.masked_fill_(loss.isnan()[:, None], math.nan)  # the loss may also be NaN by inf - inf on some rank
    return PerClass(shard.attach(loss, gradient), valid)


@exact
def _at_levels(
    scores: Tensor, shard: Shard, positives: Positives, share: Tensor, rule: _Rule
) -> tuple[Tensor, Tensor | None]:
    """Return the loss (C,) float64, and the gradient of the rows (C, N), None where none is needed."""
    levels, weights, taus, _, threshold_gradient = rule
    exchange, (class_of, row_of, _) = shard.exchange, positives
    num_classes, num_levels = levels.base.shape
    loss = share.new_zeros(num_classes)
    pushes = share.new_zeros(num_classes, num_levels)  # the sum of the slopes of the positives at each level
    of_positives = share.new_zeros(share.shape)  # dloss/dx of each positive
    for level in range(num_levels):
        x, point = scores[class_of, row_of], levels.movable[class_of, level].to(scores.dtype)
        x = x if levels.offset is None else x - levels.base[class_of, level]
        sigmoid, slope = sigmoid_and_slope((point - x).div_(taus[class_of]))
        weight = share * weights[level]
        loss.index_add_(0, class_of, weight * sigmoid)
        push = weight * slope / taus[class_of]
        pushes[:, level].index_add_(0, class_of, push)
        of_positives -= push
    if not (shard.needs_gradient and threshold_gradient):
        loss = exchange.each(loss, "the losses").to(loss.device).sum(dim=0)
        if not shard.needs_gradient:
            return loss, None
        gradient = torch.zeros_like(scores)
    else:
        finite, origin, shift, rates = origins(levels, taus)
        slopes = scores.new_empty(*origin.shape, scores.shape[1])  # [L, C, N]
        nearest = torch.zeros_like(origin, dtype=torch.float64)  # [L, C] distances, 0 where every level is a score
        if shift is None:
            sums, _ = write_slopes(slopes, scores, origin, rates, rule.reference, with_largest=False)
        else:
            sums = torch.zeros_like(nearest)
            for number in range(num_levels):  # the distances are float64, of one level at a time
                part = slice(number, number + 1)
                rows = slopes[part], scores, origin[part], shift[part], rates, rule.reference
                sums[part], nearest[part] = write_relative_slopes(*rows)
        local = torch.cat([loss[:, None], pushes, sums.t(), nearest.t()], dim=1)
        of_ranks = exchange.each(local, "the sums at the thresholds").to(local.device)
        loss = of_ranks[:, :, 0].sum(dim=0)
        pushes, sums, distances = (column.clone() for column in of_ranks[:, :, 1:].chunk(3, dim=2))  # [W, C, L]
        # Each rank has divided by exp(-distance / tau) of its nearest row. From here on that of the nearest row of all.
        units = torch.where(distances.isfinite(), (distances.amin(dim=0) - distances) / taus[:, None], -math.inf).exp()
        whole = (sums * units).sum(dim=0)  # [C, L]
        factor = torch.where(finite.t() & (whole > 0), pushes.sum(dim=0) * units[exchange.rank] / whole, 0.0)
        gradient = torch.zeros_like(scores)
        for level, slope in enumerate(slopes):
            gradient.addcmul_(slope, factor[:, level : level + 1].to(slope.dtype))
    gradient[class_of, row_of] += of_positives.to(gradient.dtype)
    return loss, gradient
