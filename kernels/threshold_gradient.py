"""The gradient that a threshold passes to the rows of which it is a quantile."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .bins import chunks
from .costs import costs_of
from .quantiles import Levels
from .registration import register

# s'(4). Where a row is at most 4 temperatures away, a distance that is rounded to float32 costs its slope 5e-7.
_NEAR = 0.0177


def carry_gradient(
    levels: Levels, scores: Tensor, rows: Tensor | None, taus: Tensor, *, levels_are_rows: bool
) -> Tensor:
    r"""Return the offsets of ``levels``, or their scores if they have no offsets, with a gradient for ``scores``.

    It is that of a quantile of the scores smoothed by the sigmoid:

    .. math:: \frac{\partial \theta_{cl}}{\partial x_{cj}} = \frac{k_{cj}}{\sum_i k_{ci}}, \quad
              k_{cj} = \sigma'\!\left(\frac{x_{cj} - \theta_{cl}}{\tau_c}\right)

    The sum goes over the finite scores in ``rows``. The levels keep their values. The shares of the sum are exact even
    where all slopes are below the smallest number. An infinite level has no gradient, and neither has one without rows.
    O(C L M) time in backward, O(C M) memory.

    Args:
        levels: (C, L) thresholds, detached.
        scores: (C, M), float32 or float64.
        rows: (C, M) bool, the rows that carry the gradient; None for all.
        taus: (C,) > 0, the width of the sigmoid in units of the scores, detached.
        levels_are_rows: every finite level without an offset is the score of one of ``rows``.

    Returns:
        The levels (C, L) in the dtype of ``scores``.
    """
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return levels.movable.to(scores.dtype)
    point: Tensor = _carry(scores, *levels, taus.to(scores.dtype), rows, levels_are_rows)
    return point


def are_carried(levels: Levels, scores: Tensor, rows: Tensor) -> Tensor:
    """Return which of the ``levels`` have a gradient for one of the ``rows``, (C, L) bool."""
    return _are_finite(levels.base, levels.offset) & (rows & scores.isfinite()).any(dim=1, keepdim=True)


def _are_finite(base: Tensor, offset: Tensor | None) -> Tensor:
    finite = base - base == 0  # isfinite takes four operators
    return finite if offset is None else finite & (offset - offset == 0)


def _points(
    scores: Tensor, base: Tensor, offset: Tensor | None, taus: Tensor, rows: Tensor | None, levels_are_rows: bool
) -> Tensor:
    return base.clone() if offset is None else offset.to(scores.dtype, copy=True)


def _gradient(
    grad: Tensor,
    scores: Tensor,
    base: Tensor,
    offset: Tensor | None,
    taus: Tensor,
    rows: Tensor | None,
    levels_are_rows: bool,
) -> tuple[Tensor]:
    """Return the gradient of the scores (C, M): the sum over the levels of their gradients times the shares.

    The slopes are computed as they are where a row is near its level, and relative to that of the nearest row if not.
    """
    finite = _are_finite(base, offset)
    origin = torch.where(finite, base, 0.0)
    shift = None if offset is None else torch.where(finite, offset, 0.0)
    rates = -taus.reciprocal().clamp_max(torch.finfo(taus.dtype).max)
    # In a small pool it is faster to compute them the accurate way than to wait for the device.
    in_doubt = offset is not None or not levels_are_rows
    accurate = offset is not None or (in_doubt and scores.numel() <= costs_of(scores.device).rows_at_once)
    total = scores.new_empty(scores.shape)
    for level in range(base.shape[1]):
        slopes, start = torch.empty_like(total) if level else total, origin[:, level]
        if accurate:
            moved = None if shift is None else shift[:, level]
            sums = _write_relative_slopes(slopes, scores, start, moved, rates, rows)
        else:
            sums, most = _write_slopes(slopes, scores, start, rates, rows, in_doubt)
            if in_doubt:
                assert rows is not None  # else ``most`` is not the largest slope
                far = (finite[:, level] & (most < _NEAR)).nonzero()[:, 0]
                if len(far) > 0:
                    part, part_of_rows = slopes[far], None if rows is None else rows[far]
                    sums[far] = _write_relative_slopes(part, scores[far], start[far], None, rates[far], part_of_rows)
                    slopes[far] = part
        # The level of a class that is not valid is arbitrary, and the inverse of its sum may be as large as floats are.
        counted = finite[:, level] & (sums >= _NEAR / 2)
        scale = (grad[:, level] * torch.where(counted, sums.reciprocal(), 0.0).to(scores.dtype))[:, None]
        if level:
            total.addcmul_(slopes, scale)
        else:
            total.mul_(scale)
    return (total,)


def _write_slopes(
    slopes: Tensor, scores: Tensor, origin: Tensor, rates: Tensor, rows: Tensor | None, with_most: bool
) -> tuple[Tensor, Tensor]:
    """Write s'(d / tau) into ``slopes`` (C, M); return their sums and, ``with_most``, the largest, (C,) each.

    ``rates`` (C,) are -1 / tau.
    """
    sums = torch.zeros_like(origin, dtype=torch.float64)
    most = torch.zeros_like(origin) if with_most else origin
    for c, m in chunks(scores):
        slope = slopes[c, m]
        torch.sub(scores[c, m], origin[c, None], out=slope).abs_().mul_(rates[c, None]).sigmoid_()
        slope.addcmul_(slope, slope, value=-1)  # e - e^2 with e = s(-|d| / tau), exact to rounding in both tails
        if rows is not None:
            slope.mul_(rows[c, m])
        if with_most:
            most[c] = torch.maximum(most[c], slope.amax(dim=1))
        sums[c].add_(slope.sum(dim=1))
    return sums, most


def _write_relative_slopes(
    slopes: Tensor, scores: Tensor, origin: Tensor, shift: Tensor | None, rates: Tensor, rows: Tensor | None
) -> Tensor:
    """Write s'(d / tau), divided by a factor of order s'(d_0 / tau), into ``slopes`` (C, M); return their sums (C,).

    d_0 is the distance of the nearest row. With t = exp(-(d - d_0) / tau) and t_0 = exp(-d_0 / tau) the slope is
    s'(d / tau) = t t_0 / (1 + t t_0)^2, here without its factor t_0. The distances are float64, in which differences of
    float32 scores are exact or nearly so. ``rates`` (C,) are -1 / tau.
    """
    origin = origin.double()

    def distances(c: slice, m: slice) -> Tensor:
        found = scores[c, m].double() - origin[c, None]
        found = (found if shift is None else found.sub_(shift[c, None])).abs_()
        return found if rows is None else found.masked_fill_(~rows[c, m], math.inf)

    nearest, sums = torch.full_like(origin, math.inf), torch.zeros_like(origin)
    for c, m in chunks(scores):
        nearest[c] = torch.minimum(nearest[c], distances(c, m).amin(dim=1))
    nearest = torch.where(nearest == math.inf, torch.zeros_like(nearest), nearest)  # without a row no slope counts
    factors = (nearest * rates.double()).exp().to(scores.dtype)
    for c, m in chunks(scores):
        slope = distances(c, m).sub_(nearest[c, None]).to(scores.dtype).mul_(rates[c, None]).exp_()
        slope.div_((slope * factors[c, None]).add_(1).square_())
        slopes[c, m] = slope
        sums[c].add_(slope.sum(dim=1))
    return sums


def _fake_gradient(
    grad: Tensor,
    scores: Tensor,
    base: Tensor,
    offset: Tensor | None,
    taus: Tensor,
    rows: Tensor | None,
    levels_are_rows: bool,
) -> tuple[Tensor]:
    return (scores.new_empty(scores.shape),)


_carry = register(
    "threshold_gradient",
    forward=_points,
    fake=_points,
    saved=lambda inputs, outputs: (inputs[:5], inputs[5:]),
    backward=_gradient,
    fake_backward=_fake_gradient,
)
