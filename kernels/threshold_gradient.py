"""The gradient that a threshold passes to the rows of which it is a quantile."""

from __future__ import annotations

import math

import numpy
import torch
from torch import Tensor

from .bins import chunks
from .costs import costs_of
from .pairs import numpy_can_sum
from .quantiles import Levels
from .registration import register

# s'(4). Up to 4 temperatures from the level, rounding the distance to float32 changes the slope by at most 5e-7.
_NEAR = 0.0177


def carry_gradient(
    levels: Levels, scores: Tensor, rows: Tensor | None, taus: Tensor, *, levels_are_rows: bool
) -> Tensor:
    r"""Return the offsets of ``levels``, or their scores if they have no offsets, with a gradient for ``scores``.

    The gradient is that of a quantile of the scores smoothed by the sigmoid:

    .. math:: \frac{\partial \theta_{cl}}{\partial x_{cj}} = \frac{k_{cj}}{\sum_i k_{ci}}, \quad
              k_{cj} = \sigma'\!\left(\frac{x_{cj} - \theta_{cl}}{\tau_c}\right)

    The sum is over the finite scores in ``rows``. The levels keep their values. The shares k / sum are exact even if
    all slopes underflow. An infinite level has no gradient, and neither has a level without rows.
    O(C L M) time in backward, O(C M) memory.

    Args:
        levels: (C, L) thresholds, detached.
        scores: (C, M), float32 or float64.
        rows: (C, M) bool, the rows that carry the gradient; None for all.
        taus: (C,) > 0, the width of the sigmoid in units of the scores, detached.
        levels_are_rows: every finite level without an offset is the score of one of ``rows``.

    Returns:
        The offsets or scores, (C, L) in the dtype of ``scores``.
    """
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return levels.movable.to(scores.dtype)
    result: Tensor = _carry(scores, *levels, taus.to(scores.dtype), rows, levels_are_rows)
    return result


def are_carried(levels: Levels, scores: Tensor, rows: Tensor) -> Tensor:
    """Return which of the ``levels`` have a gradient for one of the ``rows``, (C, L) bool."""
    return _are_finite(levels.base, levels.offset) & (rows & scores.isfinite()).any(dim=1, keepdim=True)


def _are_finite(base: Tensor, offset: Tensor | None) -> Tensor:
    finite = base - base == 0  # isfinite takes four operators
    return finite if offset is None else finite & (offset - offset == 0)


def _movable(
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

    Levels with a row near them take the plain slopes. The others take slopes relative to that of their nearest row,
    which do not underflow.
    """
    if numpy_can_sum(scores, 8 * base.shape[1] * scores.numel()):  # an exponential takes as long as about eight pairs
        return (_gradient_in_numpy(grad, scores, base, offset, taus, rows),)
    grad, base, offset = grad.t(), base.t(), None if offset is None else offset.t()  # [L, C]
    finite = _are_finite(base, offset)
    origin = torch.where(finite, base, 0.0)
    shift = None if offset is None else torch.where(finite, offset, 0.0)
    rates = -taus.reciprocal().clamp_max(torch.finfo(taus.dtype).max)
    may_be_far, at_once = offset is not None or not levels_are_rows, costs_of(scores.device).rows_at_once
    # In a small pool relative slopes for all levels are faster than waiting for the device to find the far ones.
    relative = offset is not None or (may_be_far and scores.numel() <= at_once)
    total = None
    step = max(1, at_once // max(1, scores.numel()))  # levels in one chunk
    for first in range(0, len(base), step):
        part = slice(first, first + step)
        slopes, starts = scores.new_empty(*base[part].shape, scores.shape[1]), origin[part]  # [l, C, M]
        if relative:
            shifts = None if shift is None else shift[part]
            sums = _write_relative_slopes(slopes, scores, starts, shifts, rates, rows)
        else:
            sums, largest = _write_slopes(slopes, scores, starts, rates, rows, may_be_far)
            if may_be_far:
                assert rows is not None
                far, c = (finite[part] & (largest < _NEAR)).nonzero().unbind(dim=1)
                if len(far) > 0:
                    of_far = slopes[far, c][None]
                    far_sums = _write_relative_slopes(of_far, scores[c], starts[far, c][None], None, rates[c], rows[c])
                    sums[far, c], slopes[far, c] = far_sums[0], of_far[0]
        # The level of an invalid class is arbitrary, and the inverse of its sum could overflow.
        counted = finite[part] & (sums >= _NEAR / 2)
        scales = (grad[part] * torch.where(counted, sums.reciprocal(), 0.0).to(scores.dtype))[:, :, None]
        for slope, scale in zip(slopes, scales):
            total = slope.mul_(scale) if total is None else total.addcmul_(slope, scale)
    assert total is not None  # there is a level
    return (total,)


@numpy.errstate(all="ignore")
def _gradient_in_numpy(
    grad: Tensor, scores: Tensor, base: Tensor, offset: Tensor | None, taus: Tensor, rows: Tensor | None
) -> Tensor:
    """Return the result of :func:`_gradient`, computed in numpy from relative slopes in float64."""
    x, levels, shifts = scores.detach().numpy(), base.numpy(), 0.0 if offset is None else offset.numpy()
    is_finite = numpy.isfinite(levels + shifts)
    levels, shifts = numpy.where(is_finite, levels.astype(float), 0.0), numpy.where(is_finite, shifts, 0.0)
    distance = abs(x[:, None, :] - levels[:, :, None] - shifts[:, :, None])  # [C, L, M]
    if rows is not None:
        distance = numpy.where(rows.numpy()[:, None, :], distance, math.inf)
    nearest = distance.min(axis=2, keepdims=True, initial=math.inf)
    nearest = numpy.where(nearest == math.inf, 0.0, nearest)  # a level without rows: every slope is 0
    widths = taus.numpy().astype(float)[:, None, None]
    slopes = numpy.exp((nearest - distance) / widths)
    slopes /= (1 + slopes * numpy.exp(-nearest / widths)) ** 2
    sums = slopes.sum(axis=2)
    # 0 * grad, so that a NaN gradient stays NaN for a level without rows too.
    slopes *= numpy.where(is_finite & (sums > 0), grad.numpy() / sums, 0.0 * grad.numpy())[:, :, None]
    return torch.from_numpy(slopes.sum(axis=1).astype(x.dtype, order="C"))  # contiguous, as fake_backward says


def _write_slopes(
    slopes: Tensor, scores: Tensor, origin: Tensor, rates: Tensor, rows: Tensor | None, with_largest: bool
) -> tuple[Tensor, Tensor]:
    """Write s'(d / tau) into ``slopes`` (l, C, M); return their sums and, ``with_largest``, the largest, (l, C) each.

    ``origin`` (l, C) are the levels, and ``rates`` (C,) are -1 / tau.
    """
    sums = torch.zeros_like(origin, dtype=torch.float64)
    largest = torch.zeros_like(origin) if with_largest else origin
    for c, m in chunks(scores):
        slope = slopes[:, c, m]
        torch.sub(scores[c, m], origin[:, c, None], out=slope).abs_().mul_(rates[c, None]).sigmoid_()
        slope.addcmul_(slope, slope, value=-1)  # e - e^2 with e = s(-|d| / tau), exact to rounding in both tails
        if rows is not None:
            slope.mul_(rows[c, m])
        if with_largest:
            largest[:, c] = torch.maximum(largest[:, c], slope.amax(dim=2))
        sums[:, c].add_(slope.sum(dim=2))
    return sums, largest


def _write_relative_slopes(
    slopes: Tensor, scores: Tensor, origin: Tensor, shift: Tensor | None, rates: Tensor, rows: Tensor | None
) -> Tensor:
    """Write s'(d / tau) / t_0 into ``slopes`` (l, C, M); return their sums (l, C).

    d_0 is the distance of the nearest row, t = exp(-(d - d_0) / tau), and t_0 = exp(-d_0 / tau), so that s'(d / tau) =
    t t_0 / (1 + t t_0)^2. The distances are float64, in which differences of float32 scores are exact or nearly so.
    ``rates`` (C,) are -1 / tau.
    """
    origin = origin.double()

    def distances(c: slice, m: slice) -> Tensor:
        distance = scores[c, m].double() - origin[:, c, None]  # [l, c, m]
        distance = (distance if shift is None else distance.sub_(shift[:, c, None])).abs_()
        return distance if rows is None else distance.masked_fill_(~rows[c, m], math.inf)

    nearest, sums = torch.full_like(origin, math.inf), torch.zeros_like(origin)
    for c, m in chunks(scores):
        nearest[:, c] = torch.minimum(nearest[:, c], distances(c, m).amin(dim=2))
    nearest = torch.where(nearest == math.inf, torch.zeros_like(nearest), nearest)  # a level without rows
    factors = (nearest * rates.double()).exp().to(scores.dtype)
    for c, m in chunks(scores):
        slope = distances(c, m).sub_(nearest[:, c, None]).to(scores.dtype).mul_(rates[c, None]).exp_()
        slope.div_((slope * factors[:, c, None]).add_(1).square_())
        slopes[:, c, m] = slope
        sums[:, c].add_(slope.sum(dim=2))
    return sums


_carry = register(
    "threshold_gradient",
    forward=_movable,
    fake=_movable,
    saved=lambda inputs, outputs: (inputs[:5], inputs[5:]),
    backward=_gradient,
    fake_backward=lambda grad, scores, *_: (scores.new_empty(scores.shape),),
)
