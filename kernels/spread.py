"""The spread of scores: the unit of an automatic temperature.

It is the interquartile range of each class divided by 1.349, which is the standard deviation of normal scores, averaged
over the classes, of a sample of about 4,096 scores that depends only on the shape. If the range is less than a
hundredth of the standard deviation without the 1 % most extreme scores at each end, because most scores of a class are
tied or hardly differ, that deviation takes its place.

A width at the level of the rounding of the scores counts as 0: a model that gives all rows the same score up to
rounding must not get a temperature of 1e-9, and gradients of 1e9. Scores that are all numbers of half precision are
judged by its rounding, whatever their dtype is now.
"""

from __future__ import annotations

import math

import numpy
import torch
from torch import Tensor

from .registration import OPAQUE
from .torch_private import func_transforms_are_active

MOST_SCORES = 4096  # of all classes in a sample; the quartiles of normal scores are then within 3 % of the true ones
LEAST_ROWS = 64  # of each class in a sample
MOST_IN_FULL = 2**20  # scores: a pool of at most this size is used whole if its sample has no spread
IQR_OF_NORMAL = 1.3489795003921634  # the interquartile range of a normal distribution of standard deviation 1
TRIMMED = 100  # the standard deviation leaves out one score in so many at each end, at least one
TIGHT = 0.01  # of the standard deviation: a smaller range is that of scores that hardly differ
# The smallest and the largest spread: a small part of it, and its inverse, must be normal numbers of the dtype.
_INFO = {dtype: torch.finfo(dtype) for dtype in (torch.float32, torch.float64)}
LIMITS = {dtype: (info.tiny * 2.0**20, info.max) for dtype, info in _INFO.items()}
# The width, relative to the scores, up to which differences may be rounding alone. In half precision a width of few
# steps may be all that there is.
_ROUNDING = {dtype: 8 * info.eps for dtype, info in _INFO.items()}
_ROUNDING |= {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}
_GOLDEN = 0.6180339887498949
_MOST_CLASSES = MOST_SCORES // LEAST_ROWS


def spread_of(scores: Tensor, member: Tensor | None) -> float:
    """Return the spread of the members' scores (C, M), finite and > 0; waits for the device.

    Infinite and undefined scores are left out, and so are classes without a spread. If no class of the sample has one,
    a pool of moderate size is used whole. If that does not help, the spread is 1.
    """
    scores = scores.detach()
    sample = sample_of(scores, member)
    spread = spread_or_zero(sample)
    if spread == 0.0 and sample.numel() < scores.numel() <= MOST_IN_FULL:
        spread = spread_or_zero(_nan_outside(scores, member))
    least, most = LIMITS[scores.dtype]
    return min(max(spread or 1.0, least), most)


def standardized(scores: Tensor, member: Tensor | None) -> Tensor:
    """Return the scores in units of their spread, from the median of their class; reads no value.

    For graphs of ``torch.compile`` and the meta device. Division alone would round scores that are far from 0.
    """
    if scores.numel() == 0:
        return scores
    classes, index = index_of_sample(scores.shape[0], scores.shape[1], scores.device)
    rows = _nan_outside(scores.detach(), member)
    rows = rows if index is None else rows.index_select(1, index)
    values, count = _sorted(rows)  # [C, n], [C]
    center = values.gather(1, ((count - 1).clamp_min(0) // 2)[:, None])  # [C, 1]
    center = torch.where(count[:, None] > 0, center, 0.0)
    if index is None and classes is None:
        mean = _mean_of_positive(_widths(values, count, _rounding(rows)))
        spread = torch.where(mean > 0, mean, 1.0).clamp(*LIMITS[scores.dtype])
    else:  # only the values tell whether the pool must be used whole
        spread = _spread_in_a_call(scores.detach(), member)
    result = (scores - 2 * center.to(scores.dtype)) / spread.to(scores.dtype)
    return result if member is None else torch.where(member, result, 0.0)


@torch.library.custom_op("fullrank::spread", mutates_args=(), **OPAQUE)
def _spread_in_a_call(scores: Tensor, member: Tensor | None) -> Tensor:
    return torch.tensor(spread_of(scores, member), dtype=torch.float64, device=scores.device)


@_spread_in_a_call.register_fake
def _(scores: Tensor, member: Tensor | None) -> Tensor:
    return scores.new_empty((), dtype=torch.float64)


def sample_of(scores: Tensor, member: Tensor | None) -> Tensor:
    """Return (c, n) scores that are spread evenly over the rows and the classes, NaN where a row is no member."""
    classes, rows = index_of_sample(scores.shape[0], scores.shape[1], scores.device)
    for index, dim in ((rows, 1), (classes, 0)):
        if index is not None:
            scores = scores.index_select(dim, index)
            member = None if member is None else member.index_select(dim, index)
    return scores if member is None else _nan_outside(scores, member)


def evenly_spaced(count: int, among: int, device: torch.device) -> Tensor:
    """Return (count,) int64 numbers in [0, among), increasing: one from each of ``count`` equal parts, in turn.

    Their places in the parts are multiples of the golden ratio, which have no period: positives may come in a rhythm.
    """
    number = torch.arange(count, dtype=torch.float64, device=device)
    return ((number + (number * _GOLDEN).frac()) * (among / count)).to(torch.int64)


def index_of_sample(num_classes: int, num_rows: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Return the classes (c,) and the rows (n,) of which :func:`sample_of` takes the scores; None for all."""
    classes = rows = None
    if num_classes > _MOST_CLASSES:
        classes = torch.arange(_MOST_CLASSES, device=device) * num_classes // _MOST_CLASSES
    count = max(LEAST_ROWS, MOST_SCORES // max(1, num_classes))
    if num_rows > count:
        rows = evenly_spaced(count, num_rows, device)
    return classes, rows


def _nan_outside(scores: Tensor, member: Tensor | None) -> Tensor:
    return scores if member is None else torch.where(member, scores, math.nan)


def spread_or_zero(sample: Tensor) -> float:
    """Return the spread of ``sample`` (c, n), NaN where there is no score; 0 if it has none."""
    if sample.numel() == 0:
        return 0.0
    # The common case is finite scores whose range is neither rounding nor tight. numpy sorts them five to ten times as
    # fast as torch.
    last = sample.shape[1] - 1
    widths = []
    # Inside a transform a tensor is a wrapper that has no array.
    values = numpy.array(sample.tolist()) if func_transforms_are_active() else sample.cpu().numpy()
    for row in numpy.sort(values, axis=1):
        least, low, high, most = row.item(0), row.item(last // 4), row.item(last - last // 4), row.item(last)
        half = 0.5 * high - 0.5 * low  # the difference of two finite scores may be infinite
        width = half * (2 / IQR_OF_NORMAL)
        is_usual = half > _ROUNDING[torch.bfloat16] * max(abs(low), abs(high)) and width >= TIGHT * 0.5 * (most - least)
        if not (is_usual and math.isfinite(least) and math.isfinite(most)):  # NaN is the most
            sample = sample.cpu()  # so that the device has no small steps to launch
            return _mean_of_positive(_widths(*_sorted(sample), _rounding(sample))).item()
        widths.append(width / len(values))
    return math.fsum(widths)


def _sorted(sample: Tensor) -> tuple[Tensor, Tensor]:
    """Return halves of the finite scores of each class in order (c, n) float64, 0 after them, and their number (c,).

    The difference of two finite scores may be infinite, that of their halves is not.
    """
    finite = sample.isfinite()
    count = finite.sum(dim=1)
    values = torch.where(finite, sample, math.inf).sort(dim=1).values.double() * 0.5
    return torch.where(values.isfinite(), values, 0.0), count


def _widths(values: Tensor, count: Tensor, rounding: Tensor) -> Tensor:
    """Return the spread of each class (c,), 0 if it has none, from what :func:`_sorted` returned."""
    last = (count - 1).clamp_min(0)
    low, high = (values.gather(1, place[:, None])[:, 0] for place in (last // 4, last - last // 4))  # [c]
    is_real = high - low > 2 * rounding * torch.maximum(low.abs(), high.abs())  # not rounding alone
    ranges = torch.where(is_real, (high - low) * (2 / IQR_OF_NORMAL), 0.0)
    # The standard deviation without the scores at both ends; 0 if it is rounding alone.
    count = count[:, None]  # [c, 1]
    cut = (count // TRIMMED).clamp_min(1)
    place = torch.arange(values.shape[1], device=values.device)
    inside = (place >= cut) & (place < count - cut)  # [c, n]
    number = inside.sum(dim=1, keepdim=True).clamp_min(1)
    largest = torch.where(inside, values.abs(), 0.0).amax(dim=1, keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0)  # no square overflows or underflows in units of the largest score
    scaled = torch.where(inside, values / unit, 0.0)
    offset = torch.where(inside, scaled - scaled.sum(dim=1, keepdim=True) / number, 0.0)
    deviation = (offset.square().sum(dim=1, keepdim=True) / number).sqrt()
    deviations = torch.where(deviation > rounding, 2 * (deviation * unit), 0.0)[:, 0]
    return torch.where(ranges >= TIGHT * deviations, ranges, deviations)


def _rounding(sample: Tensor) -> Tensor:
    """Return the width, relative to the scores, up to which differences may be rounding alone."""
    result = torch.full((), _ROUNDING[sample.dtype], dtype=torch.float64, device=sample.device)
    finite = sample.isfinite()
    for dtype in (torch.float16, torch.bfloat16):  # few numbers may fit both: the coarser one decides
        fits = ((sample.to(dtype).to(sample.dtype) == sample) | ~finite).all()
        result = torch.where(fits, _ROUNDING[dtype], result)
    return result


def _mean_of_positive(widths: Tensor) -> Tensor:
    """Return the mean of the ``widths`` > 0, or 0."""
    # Divided first: the sum of finite widths may be infinite.
    return (widths / (widths > 0).sum().clamp_min(1)).sum()
