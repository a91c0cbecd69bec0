"""How far positives lie below levels, and the gradient that a quantile passes to its rows.

With u_i the share of positive i in its class, w_l the weight of level l, and d_il = (level_l - x_i) / tau::

    loss = sum_i u_i sum_l w_l s(d_il)
    dloss/dx_i = -u_i sum_l w_l s'(d_il) / tau                    the positive itself
    dloss/dx_j = sum_l G_l k_jl / sum_r k_rl                      row j of which the levels are quantiles

with G_l = sum_i u_i w_l s'(d_il) / tau, and k_jl = v_j s'((x_j - level_l) / tau) for a row of weight v_j, which is the
gradient of a quantile of the scores smoothed by the sigmoid. The shares k / sum are exact even if all slopes underflow.
The forward computes the gradient and the backward multiplies it. O(C L M) time, O(C M) memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .bins import chunks
from .costs import costs_of
from .pairs import sigmoid_and_slope
from .quantiles import Levels
from .registration import register, scaled

# s'(4). Up to 4 temperatures from the level, rounding the distance to float32 changes the slope by at most 5e-7.
_NEAR = 0.0177
_LEAST = 1e-37  # a smaller sum of slopes has no inverse in float32


class Carriers(NamedTuple):
    """The rows that carry the gradient of the levels, and the positives that may have one."""

    rows: Tensor | None  # [C, M] bool, the rows of which the levels are quantiles; None for all
    live: Tensor | None = None  # [M] bool, the rows that may have a gradient; None for all
    weight: Tensor | None = None  # [M], of the rows in a quantile; None for 1


def below_levels(
    scores: Tensor,  # (C, M), float32 or float64
    share: Tensor,  # (C, M), the weights of the positives; 0 for all other rows
    levels: Levels,  # (C, L)
    weights: list[float],  # of the levels
    taus: Tensor,  # (C,) > 0, the width of the sigmoid in units of the scores, detached
    carriers: Carriers | None,  # None for levels without a gradient; then only positives have one
) -> Tensor:
    """Return the loss of each class, (C,) float64, NaN for a class with a NaN score.

    Live rows alone have a gradient. The levels pass theirs to the live ``carriers.rows`` of finite score, and only live
    positives then have one: the gradient of the live rows adds up to 0. In a class without such a row no positive has a
    gradient either, because otherwise all scores would rise together. An infinite level has no gradient.
    """
    rows, live, weight = carriers or Carriers(None)
    with_grad = torch.is_grad_enabled() and scores.requires_grad
    shared = scores, share, *levels, taus.to(scores.dtype), weights
    loss: Tensor = _below_levels(*shared, rows, live, weight, carriers is not None, with_grad)[0]
    return loss


def shares_below(scores: Tensor, levels: Levels, weights: list[float], taus: Tensor) -> Tensor:
    """Return (C, M) the weighted sum over the levels of s((level - x) / tau), detached."""
    x = scores.detach()
    total = torch.zeros_like(x)
    for number, weight in enumerate(weights):
        total.add_(_distances(x, levels.take(number), taus.to(x.dtype))[0].sigmoid_(), alpha=weight)
    return total


def _distances(x: Tensor, levels: Levels, taus: Tensor) -> Tensor:
    """Return (level - x) / tau, (L, C, P)."""
    x = x if levels.offset is None else x - levels.base.t()[:, :, None]
    return (levels.movable.to(x.dtype).t()[:, :, None] - x).div_(taus[:, None])


def _loss_and_gradient(
    scores: Tensor,
    share: Tensor,
    base: Tensor,
    offset: Tensor | None,
    taus: Tensor,
    weights: list[float],
    rows: Tensor | None,
    live: Tensor | None,
    row_weight: Tensor | None,
    levels_move: bool,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) and its gradient (C, M), empty unless ``with_grad``."""
    levels, places, reads_freely = Levels(base, offset), None, costs_of(scores.device).reads_freely
    if len(scores) == 1 and reads_freely:  # the positives alone, which are few
        places = (share[0] != 0).nonzero()[:, 0]  # of bools it takes a fifth of the time
        x, mass = scores.index_select(1, places), share.index_select(1, places)
    else:  # an infinite negative at an infinite level would give NaN, even times 0
        x, mass = scores.masked_fill(share == 0, 0.0), share
    moves = None
    if live is not None and levels_move and with_grad:
        rows = live.expand_as(scores) if rows is None else rows & live
        finite_rows = rows & scores.isfinite()
        moves = finite_rows.any(dim=1, keepdim=True) & _are_finite(base, offset).any(dim=1, keepdim=True)  # [C, 1]
        moves = moves & (live if places is None else live[places])  # [C, P]
    of_level: Tensor | None = None
    if len(weights) > 1:
        of_level = torch.tensor(weights, dtype=base.dtype)[:, None, None].to(base.device, non_blocking=True)
    loss = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    of_positives, pushes = torch.zeros_like(mass), []
    step = max(1, costs_of(scores.device).rows_at_once // max(1, x.numel()))  # levels in one chunk
    for first in range(0, len(weights), step):
        part = slice(first, first + step)
        sigmoid, slope = sigmoid_and_slope(_distances(x, levels.take(part), taus))  # [l, C, P]
        factor = mass if of_level is None else mass * of_level[part]
        loss += sigmoid.mul_(factor).sum(dim=(0, 2), dtype=torch.float64)
        if with_grad:
            push = slope.mul_(factor).div_(taus[:, None])
            push = push if moves is None else push.masked_fill_(~moves, 0.0)
            of_positives -= push.sum(dim=0)
            pushes.append(push.sum(dim=2))
    if scores.shape[1]:
        loss *= scores.amax(dim=1).clamp(1.0, 1.0)  # 1, or NaN if any score is: one pass, and no mask is stored
    if not with_grad:
        return loss, scores.new_empty(0)
    if levels_move:
        # A finite level is at or between scores of its rows, which may be far from those that are live.
        gradient = _of_carriers(torch.cat(pushes), scores, levels, taus, rows, row_weight, live is None)
    else:
        gradient = scores.new_zeros(scores.shape)
    gradient = gradient.index_add_(1, places, of_positives) if places is not None else gradient.add_(of_positives)
    if not reads_freely or bool(loss.isnan().any()):
        gradient.mul_((loss * 0 + 1)[:, None])  # NaN for a class whose loss is NaN
    return loss, gradient


def _are_finite(base: Tensor, offset: Tensor | None) -> Tensor:
    finite = base - base == 0  # isfinite takes four operators
    return finite if offset is None else finite & (offset - offset == 0)


def _of_carriers(
    pushes: Tensor,
    scores: Tensor,
    levels: Levels,
    taus: Tensor,
    rows: Tensor | None,
    row_weight: Tensor | None,
    levels_are_rows: bool,
) -> Tensor:
    """Return the gradient of the scores (C, M): the sum over the levels of ``pushes`` (L, C) times the shares.

    Levels with a row near them take the plain slopes. The others take slopes relative to that of their nearest row,
    which do not underflow. ``levels_are_rows``: every finite level without an offset is the score of one of ``rows``.
    """
    finite, origin, shift, rates = origins(levels, taus)
    masses = rows if row_weight is None else row_weight.expand_as(scores) if rows is None else rows * row_weight
    may_be_far, at_once = shift is not None or not levels_are_rows, costs_of(scores.device).rows_at_once
    # In a small pool relative slopes for all levels are faster than waiting for the device to find the far ones.
    relative = shift is not None or (may_be_far and scores.numel() <= at_once)
    total = None
    step = max(1, at_once // max(1, scores.numel()))  # levels in one chunk
    for first in range(0, len(origin), step):
        part = slice(first, first + step)
        slopes, starts = scores.new_empty(*origin[part].shape, scores.shape[1]), origin[part]  # [l, C, M]
        if relative:
            shifts = None if shift is None else shift[part]
            sums, _ = write_relative_slopes(slopes, scores, starts, shifts, rates, masses)
        else:
            sums, largest = write_slopes(slopes, scores, starts, rates, masses, may_be_far)
            if may_be_far:
                assert masses is not None
                far, c = (finite[part] & (largest < _NEAR)).nonzero().unbind(dim=1)
                if len(far) > 0:
                    of_far = slopes[far, c][None]
                    far_sums, _ = write_relative_slopes(
                        of_far, scores[c], starts[far, c][None], None, rates[c], masses[c]
                    )
                    sums[far, c], slopes[far, c] = far_sums[0], of_far[0]
        # The level of an invalid class is arbitrary, and the inverse of its sum could overflow.
        counted = finite[part] & (sums >= _LEAST)
        scales = (pushes[part] * torch.where(counted, sums.reciprocal(), 0.0).to(scores.dtype))[:, :, None]
        for slope, scale in zip(slopes, scales):
            total = slope.mul_(scale) if total is None else total.addcmul_(slope, scale)
    assert total is not None  # there is a level
    return total


def origins(levels: Levels, taus: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return which levels are finite, their scores and their offsets, 0 where not, (L, C) each, and (C,) -1 / tau."""
    base, offset = levels.base.t(), None if levels.offset is None else levels.offset.t()
    finite = _are_finite(base, offset)
    shift = None if offset is None else torch.where(finite, offset, 0.0)
    rates = -taus.reciprocal().clamp_max(torch.finfo(taus.dtype).max)
    return finite, torch.where(finite, base, 0.0), shift, rates


def write_slopes(
    slopes: Tensor, scores: Tensor, origin: Tensor, rates: Tensor, masses: Tensor | None, with_largest: bool
) -> tuple[Tensor, Tensor]:
    """Write v s'(d / tau) into ``slopes`` (l, C, M); return their sums and, ``with_largest``, the largest, (l, C) each.

    ``origin`` (l, C) are the levels, ``rates`` (C,) are -1 / tau, and ``masses`` (C, M) are what each row counts.
    """
    sums = torch.zeros_like(origin, dtype=torch.float64)
    largest = torch.zeros_like(origin) if with_largest else origin
    for c, m in chunks(scores):
        slope = slopes[:, c, m]
        torch.sub(scores[c, m], origin[:, c, None], out=slope).abs_().mul_(rates[c, None]).sigmoid_()
        slope.addcmul_(slope, slope, value=-1)  # e - e^2 with e = s(-|d| / tau), exact to rounding in both tails
        if masses is not None:
            slope.mul_(masses[c, m])
        if with_largest:
            largest[:, c] = torch.maximum(largest[:, c], slope.amax(dim=2))
        sums[:, c].add_(slope.sum(dim=2))
    return sums, largest


def write_relative_slopes(
    slopes: Tensor, scores: Tensor, origin: Tensor, shift: Tensor | None, rates: Tensor, masses: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Write v s'(d / tau) / t_0 into ``slopes`` (l, C, M); return their sums and d_0, inf without rows, (l, C) each.

    d_0 is the distance of the nearest row, t = exp(-(d - d_0) / tau), and t_0 = exp(-d_0 / tau), so that s'(d / tau) =
    t t_0 / (1 + t t_0)^2. The distances are float64, in which differences of float32 scores are exact or nearly so.
    """
    origin = origin.double()

    def distances(c: slice, m: slice) -> Tensor:
        distance = scores[c, m].double() - origin[:, c, None]  # [l, c, m]
        distance = (distance if shift is None else distance.sub_(shift[:, c, None])).abs_()
        return distance if masses is None else distance.masked_fill_(masses[c, m] == 0, math.inf)

    nearest, sums = torch.full_like(origin, math.inf), torch.zeros_like(origin)
    for c, m in chunks(scores):
        nearest[:, c] = torch.minimum(nearest[:, c], distances(c, m).amin(dim=2))
    start = torch.where(nearest == math.inf, torch.zeros_like(nearest), nearest)  # a level without rows
    factors = (start * rates.double()).exp().to(scores.dtype)
    for c, m in chunks(scores):
        slope = distances(c, m).sub_(start[:, c, None]).to(scores.dtype).mul_(rates[c, None]).exp_()
        slope.div_((slope * factors[:, c, None]).add_(1).square_())
        slope = slope if masses is None else slope.mul_(masses[c, m])
        slopes[:, c, m] = slope
        sums[:, c].add_(slope.sum(dim=2))
    return sums, nearest


_below_levels = register(
    "below_levels",
    forward=_loss_and_gradient,
    fake=lambda scores, *others: (
        scores.new_empty(scores.shape[0], dtype=torch.float64),
        scores.new_empty(scores.shape if others[-1] else 0),  # with_grad
    ),
    saved=lambda inputs, outputs: (outputs, ()),
    backward=lambda grad_loss, loss, gradient: (scaled(gradient.t(), grad_loss).t(),),
)
