"""Rows sorted into bins of equal width: where a row lies, what a bin holds, and how a row reads what a bin has learned.

The line of scores is cut into coarse bins of width H, and each of these into F fine bins::

    coarse    |               T               |              T+1              |
    fine      | 0 | 1 | 2 | ...         | F-1 | 0 | 1 | ...
    a row         ^ at u in [-1, 1] of its fine bin

H is a power of two times the unit of the scores, between 2 and 4 temperatures. Dividing by a power of two is exact, so
the position u inside a bin is exact too, in float32 already, however far from 0 the scores are.

A bin that is empty costs as much as a full one. Where scores spread over more coarse bins than there are rows to fill
them (one logit of 1e30, two clusters), a window of bins covers the bulk, and only occupied bins exist outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2**18  # rows looked at together: their positions and indices stay in the cache
LANES = 4  # parts of the rows of a class that threads add up side by side, each in its own table
MOST_EMPTY = 4096  # coarse bins that always may exist
ROWS_PER_BIN = 64  # beyond these: one coarse bin for so many rows
MOST_EXACT = 2**24 // 64  # of 64 fine bins each: up to here float32 counts fine bins exactly
FEWEST_ROWS = 4  # per coarse bin on average; with fewer, a row's own pair is most of what cancels, and costs digits


class Outside(NamedTuple):
    """The occupied coarse bins outside of the window of :class:`Bins`."""

    ids: Tensor  # [U] float64, ascending: coarse bin numbers
    num_left: int  # how many lie left of the window


class Bins(NamedTuple):
    """Coarse bins of one or several classes, all of the same width."""

    width: float  # H in units of the scores
    fine: int  # F, fine bins per coarse bin
    first: Tensor  # [C] coarse bin number at which the window begins, in the dtype of the scores
    window: int  # coarse bins in the window
    outside: Outside | None  # only with one class

    @property
    def num_coarse(self) -> int:
        """Coarse bins per class."""
        return self.window + (0 if self.outside is None else self.outside.ids.numel())

    @property
    def num_fine(self) -> int:
        """Fine bins per class."""
        return self.num_coarse * self.fine


def bin_width(temperature: float) -> float:
    """Return the power of two H with ``2 < H / temperature <= 4``."""
    return 2.0 ** math.floor(math.log2(4.0 * temperature))


def cover(low: Tensor, high: Tensor, temperature: float, fine: int) -> Bins:
    """Return bins that cover [low, high] of each class, (C,) each, in one window."""
    width = bin_width(temperature)
    first, last = (_coarse(_round(value, width, fine), fine) for value in (low, high))
    return Bins(width, fine, first, _span(first, last), None)


def _span(first: Tensor, last: Tensor) -> int:
    # In float32 a score of 1e37 over a width of 0.03 is infinite: NaN here, and more bins than there may be.
    return int((last - first).max().nan_to_num(nan=2.0**62).clamp_max(2.0**62)) + 1 if first.numel() else 1


def most_bins(num_rows: int) -> int:
    """Return how many coarse bins a class may have: more would mostly be empty, and cost more than the rows."""
    return min(max(MOST_EMPTY, num_rows // ROWS_PER_BIN), max(1, num_rows // FEWEST_ROWS), MOST_EXACT)


def cover_bulk(scores: Tensor, temperature: float, fine: int) -> Bins | None:
    """Return bins with a window on the bulk of ``scores`` (M,), and one for each occupied bin outside of it.

    None when that does not help: too many bins, or too few rows in them.
    """
    size = scores.numel()
    sample = scores[:: max(1, size // MOST_EMPTY)].sort().values
    trim = sample.numel() // 1000
    bins = cover(sample[trim : trim + 1], sample[-1 - trim :][:1], temperature, fine)
    if bins.window > most_bins(size):  # not a few outliers but clusters, or wide tails: take the middle
        middle = cover(sample[sample.numel() // 2 :][:1], sample[sample.numel() // 2 :][:1], temperature, fine)
        window = min(MOST_EMPTY, most_bins(size))
        bins = middle._replace(first=middle.first - window // 2, window=window)
    away = _outside(bins, scores)
    occupied = away.unique()  # ascending
    inside = size - away.numel()
    if occupied.numel() > most_bins(size) or inside < FEWEST_ROWS * bins.window:
        return None
    return bins._replace(outside=Outside(occupied, int((occupied < bins.first.double()).sum())))


def _outside(bins: Bins, scores: Tensor) -> Tensor:
    """Return the coarse bin numbers, float64, of the rows outside of the window."""
    ids: list[Tensor] = []
    low, high = bins.first, bins.first + bins.window
    for start in range(0, scores.numel(), CHUNK):
        part = scores[start : start + CHUNK]
        coarse = _coarse(_round(part, bins.width, bins.fine), bins.fine)
        away = part[(coarse < low) | (coarse >= high)].double()  # in float32, 1e38 / width would overflow
        ids.append(_coarse(_round(away, bins.width, bins.fine), bins.fine))
    return torch.cat(ids)


def compact_ids(bins: Bins, reach: int) -> Tensor | None:
    """Return (B,) int64 numbers of the coarse bins, gaps cut to ``reach + 1``; None when the bins are contiguous.

    Two bins are then within ``reach`` of each other if and only if they were before, and numbers as large as 1e36, at
    which float64 cannot count any more, become small.
    """
    if bins.outside is None:
        return None
    ids, left = bins.outside.ids, bins.outside.num_left
    window = bins.first.double() + torch.arange(bins.window, dtype=torch.float64, device=ids.device)
    every = torch.cat([ids[:left], window, ids[left:]])
    gaps = every.diff().clamp_max(reach + 1)
    return torch.cat([gaps.new_zeros(1), gaps.cumsum(0)]).to(torch.int64)


def _round(scores: Tensor, width: float, fine: int) -> Tensor:
    return (scores * (fine / width)).round_()


def _coarse(rounded: Tensor, fine: int) -> Tensor:
    return torch.floor(rounded / fine)


def chunks(num_classes: int, num_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of classes and of rows with about ``CHUNK`` entries each."""
    classes = max(1, CHUNK // max(1, num_rows))
    for first_class in range(0, num_classes, classes):
        for first in range(0, num_rows, CHUNK):
            yield slice(first_class, first_class + classes), slice(first, first + CHUNK)


def locate(bins: Bins, scores: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Return where the rows ``scores`` (c, m) of ``classes`` lie: (c, m) int64 fine bins, and u (c, m) in [-1, 1].

    All scores are finite.
    """
    scaled = scores * (bins.fine / bins.width)
    rounded = scaled.round()
    u = scaled.sub_(rounded).mul_(2.0)  # [c, m]
    relative = rounded.sub_((bins.first[classes] * bins.fine)[:, None])
    if bins.outside is not None:
        relative = _place_outside(bins, scores, relative, u)
    return relative.to(torch.int64), u


def _place_outside(bins: Bins, scores: Tensor, relative: Tensor, u: Tensor) -> Tensor:
    """Return ``relative`` counted from the first of all bins, the ones left of the window included, and mend ``u``."""
    assert bins.outside is not None
    ids, left = bins.outside.ids, bins.outside.num_left
    away = (relative < 0) | (relative >= bins.window * bins.fine)
    placed = relative + left * bins.fine
    if bool(away.any()):
        scaled = scores[away].double() * (bins.fine / bins.width)
        rounded = scaled.round()
        u[away] = ((scaled - rounded) * 2.0).to(u.dtype)
        coarse = _coarse(rounded, bins.fine)
        position = torch.searchsorted(ids, coarse)
        position = position + (position >= left) * bins.window
        placed[away] = (position * bins.fine + (rounded - coarse * bins.fine)).to(placed.dtype)
    return placed


def num_lanes(shape: torch.Size, size: int) -> int:
    """Return how many tables of ``size`` bins each of C classes gets, ``shape`` (C, M): a table has one thread."""
    return LANES if shape[0] == 1 and shape[1] > LANES * size else 1


def add_moments(moments: Tensor, index: Tensor, u: Tensor, weight: Tensor | None = None) -> None:
    """Add the powers of ``u`` (c, m), each times its ``weight``, to ``moments`` (p, c, bins) at ``index`` (c, m).

    With more tables than classes, the rows of the only class go to the tables in equal parts, or all to the first.
    In float64: under ties a bin holds millions of equal numbers, whose float32 sums would stall.
    """
    index, wide = _spread(index, moments.shape[1]), _spread(u.double(), moments.shape[1])
    # Ones are written out: added as one number that is repeated, they take twice as long.
    power = torch.ones_like(wide) if weight is None else _spread(weight.double(), moments.shape[1])
    ours = 2 if weight is None else 1  # from this degree on `power` is a tensor of our own, not an input
    for degree in range(moments.shape[0]):
        if degree > ours:
            power.mul_(wide)
        elif degree:
            power = power * wide if degree == ours else wide
        moments[degree].scatter_add_(1, index, power)


def evaluate(coefficients: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Return the polynomial of each row's bin at the row: coefficients (p, c, bins), index, u and result (c, m)."""
    lanes = LANES if u.shape[0] == 1 else u.shape[0]
    index, place = _spread(index, lanes), _spread(u, lanes)
    table = coefficients.expand(-1, lanes, -1)
    value = table[-1].gather(1, index)
    for degree in range(table.shape[0] - 2, -1, -1):
        value = value.mul_(place).add_(table[degree].gather(1, index))
    return value.view_as(u)


def _spread(rows: Tensor, lanes: int) -> Tensor:
    """Return the rows (1, m) of one class as (lanes, m / lanes) where they divide evenly; other rows as they are."""
    return rows.reshape(lanes, -1) if rows.shape[0] == 1 and rows.shape[1] % lanes == 0 else rows
