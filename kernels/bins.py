"""Bins of equal width on the line of scores: the bin of a row, the moments of a bin, the value of a bin at a row.

The line is cut into coarse bins of width H, and each of these into F fine bins::

    coarse    |               T               |              T+1              |
    fine      | 0 | 1 | 2 | ...         | F-1 | 0 | 1 | ...
    a row         ^ at u in [-1, 1] of its fine bin

H is a power of two between 2 and 4 temperatures. Division by a power of two is exact, so u is exact too, even in
float32 and far from 0.

An empty bin costs as much as a full one. If the scores of a single class spread over many more coarse bins than its
rows can fill (one logit of 1e30, two clusters), a window of bins covers the bulk, and outside of it only occupied bins
exist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native
from .costs import costs_of

MOST_EMPTY = 4096  # coarse bins that a class may always have, however few rows there are per bin
ROWS_PER_BIN = 64  # rows for each coarse bin that a class with more than MOST_EMPTY bins must have
MOST_EXACT = 2**24 // 64  # coarse bins, of 64 fine bins each, whose fine bins float32 numbers exactly
FEWEST_ROWS = 4  # per coarse bin on average; with fewer, the pair of a row with itself dominates and costs digits


class Outside(NamedTuple):
    """The occupied coarse bins outside of the window of :class:`Bins`."""

    ids: Tensor  # [U] float64, ascending: coarse bin numbers
    num_left: int  # how many of them are left of the window
    rows: Tensor  # [R] int64: the rows in them


class Bins(NamedTuple):
    """Coarse bins of one or several classes, all of the same width; the numbers of bins are per class."""

    width: float  # H in units of the scores
    fine: int  # F, fine bins per coarse bin
    first: Tensor  # [C] coarse bin number at which the window begins, in the dtype of the scores
    window: int  # coarse bins in the window
    outside: Outside | None  # only with one class

    @property
    def num_coarse(self) -> int:
        return self.window + (0 if self.outside is None else self.outside.ids.numel())

    @property
    def num_fine(self) -> int:
        return self.num_coarse * self.fine

    @property
    def numbering(self) -> tuple[float, Tensor]:
        """The fine bins per unit of the scores, and the number of the first of each class, (C,)."""
        return self.fine / self.width, self.first * self.fine


def find_bins(scores: Tensor, low: Tensor, high: Tensor, temperature: float, fine: int) -> Bins | None:
    """Return bins that hold all ``scores`` (C, M), finite; None if most bins would be empty.

    ``low`` and ``high`` (C,) are the ends of each class, on the host or on the device, which is then waited for.
    """
    bins = cover(low, high, temperature, fine)
    if bins.window <= most_bins(scores.shape[1]):
        return bins._replace(first=bins.first.to(scores.device, non_blocking=True))
    return cover_bulk(scores[0], temperature, fine) if scores.shape[0] == 1 else None


def cover(low: Tensor, high: Tensor, temperature: float, fine: int) -> Bins:
    """Return bins that cover [low, high] of each class, (C,) each, with one window."""
    width = 2.0 ** math.floor(math.log2(4.0 * temperature))  # the power of two with 2 < width / temperature <= 4
    first, last = _coarse(_round(low, width, fine), fine), _coarse(_round(high, width, fine), fine)
    # In float32 1e37 over a width of 0.03 is infinite. The difference is then NaN, which counts as too many bins.
    most = 2.0**62
    window = int((last - first).max().nan_to_num(nan=most).clamp_max(most)) + 1 if first.numel() else 1
    return Bins(width, fine, first, window, None)


def most_bins(num_rows: int) -> int:
    """Return how many coarse bins a class may have; more would mostly be empty and cost more than the rows."""
    return min(max(MOST_EMPTY, num_rows // ROWS_PER_BIN), max(1, num_rows // FEWEST_ROWS), MOST_EXACT)


def cover_bulk(scores: Tensor, temperature: float, fine: int) -> Bins | None:
    """Return a window on the bulk of ``scores`` (M,) and a bin for each occupied one outside; None if too many."""
    size = scores.numel()
    sample = scores[:: max(1, size // MOST_EMPTY)].sort().values
    trim = sample.numel() // 1000
    bins = cover(sample[trim : trim + 1], sample[-1 - trim :][:1], temperature, fine)
    if bins.window > most_bins(size):  # not a few outliers, but clusters or wide tails: take the middle
        middle = cover(sample[sample.numel() // 2 :][:1], sample[sample.numel() // 2 :][:1], temperature, fine)
        window = min(MOST_EMPTY, most_bins(size))
        bins = middle._replace(first=middle.first - window // 2, window=window)
    outside: list[Tensor] = []  # the rows outside of the window
    step = costs_of(scores.device).rows_at_once
    for first, part in zip(range(0, size, step), scores.split(step)):
        relative = _round(part, bins.width, fine).sub_(bins.first * fine)
        outside.append(_is_outside(relative, bins).nonzero()[:, 0] + first)
    rows = torch.cat(outside)
    ids = _coarse(_round(scores[rows].double(), bins.width, fine), fine)  # float32: 1e38 / H is inf
    occupied = ids.unique()  # ascending
    if occupied.numel() > most_bins(size) or size - ids.numel() < FEWEST_ROWS * bins.window:
        return None
    return bins._replace(outside=Outside(occupied, int((occupied < bins.first.double()).sum()), rows))


def compact_ids(bins: Bins, reach: int) -> Tensor | None:
    """Return (B,) int64 numbers of the coarse bins with gaps of at most ``reach + 1``; None if they are contiguous.

    The original numbers may be as large as 1e36, where float64 does not hold every integer.
    """
    if bins.outside is None:
        return None
    ids, left = bins.outside.ids, bins.outside.num_left
    window = bins.first.double() + torch.arange(bins.window, dtype=torch.float64, device=ids.device)
    numbers = torch.cat([ids[:left], window, ids[left:]])
    gaps = numbers.diff().clamp_max(reach + 1)
    return torch.cat([gaps.new_zeros(1), gaps.cumsum(0)]).to(torch.int64)


def chunks(scores: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of classes and of rows of ``scores`` (C, M), with about ``rows_at_once`` entries each."""
    (num_classes, num_rows), limit = scores.shape, costs_of(scores.device).rows_at_once
    classes = max(1, limit // max(1, num_rows))
    for first_class in range(0, num_classes, classes):
        for first in range(0, num_rows, limit):
            yield slice(first_class, first_class + classes), slice(first, first + limit)


def locate(bins: Bins, scores: Tensor, classes: slice) -> tuple[Tensor, Tensor]:
    """Return the fine bin, int64, and the position u in [-1, 1] of each finite score (c, m) of ``classes``."""
    scaled = scores * (bins.fine / bins.width)
    rounded = scaled.round()
    u = scaled.sub_(rounded).mul_(2.0)  # [c, m]
    relative = rounded.sub_((bins.first[classes] * bins.fine)[:, None])
    if bins.outside is None:
        return relative.to(torch.int64), u
    # In int64, because with the bins left of the window the numbers may exceed what float32 holds exactly.
    ids, left = bins.outside.ids, bins.outside.num_left
    outside = _is_outside(relative, bins)
    index = relative.to(torch.int64).add_(left * bins.fine)
    if bool(outside.any()):
        scaled = scores[outside].double() * (bins.fine / bins.width)
        rounded = scaled.round()
        u[outside] = ((scaled - rounded) * 2.0).to(u.dtype)
        coarse = _coarse(rounded, bins.fine)
        position = torch.searchsorted(ids, coarse)
        position = position + (position >= left) * bins.window
        index[outside] = position * bins.fine + (rounded - coarse * bins.fine).to(torch.int64)
    return index, u


class Line(NamedTuple):
    """Rows on the line of the bins."""

    bins: Bins
    scores: Tensor  # [C, M]
    member: Tensor | None = None  # [C, M] bool, the rows that take part; None for all. The others are in an extra bin
    places: tuple[Tensor, Tensor] | None = None  # what `locate` returns for all; None if they are too many to keep

    def locate(self, classes: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the fine bin and the position of some rows, (c, m) each."""
        index, u = locate(self.bins, self.scores[classes, rows], classes)
        if self.member is not None:
            index = index.masked_fill_(~self.member[classes, rows], self.bins.num_fine)
        return index, u

    def _chunks(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield slices of classes and of rows with their bins and the positions in these, (c, m) each."""
        if self.places is not None:
            yield slice(None), slice(None), *self.places
            return
        for c, m in chunks(self.scores):
            yield c, m, *self.locate(c, m)

    def is_read_in_c(self, weight: Tensor | None) -> bool:
        """Return whether C reads the rows, with ``weight``; not where their places are known."""
        is_possible = self.places is None and self.bins.outside is None
        return is_possible and native.is_usable(self.scores, self.member, weight)

    def moments(self, p: int, weight: Tensor | None = None) -> Tensor:
        """Return the moments of the rows (p, C, B F + 1) float64, each times its ``weight`` (C, M)."""
        if self.is_read_in_c(weight):
            return native.moments(self.scores, self.member, *self.bins.numbering, self.bins.num_fine, p, weight=weight)
        size = self.bins.num_fine + 1
        lanes = num_lanes(self.scores, size)
        table = self.scores.new_zeros(p, len(self.scores) * lanes, size, dtype=torch.float64)
        for c, m, index, u in self._chunks():
            add_moments(table[:, c] if lanes == 1 else table, index, u, None if weight is None else weight[c, m])
        return table if lanes == 1 else table.sum(dim=1, keepdim=True)

    def read(self, table: Tensor, out: Tensor, weight: Tensor | None = None) -> None:
        """Write the polynomials ``table`` (p, C, bins) at the rows, each times its ``weight``, into ``out`` (C, M)."""
        if self.is_read_in_c(weight) and out.is_contiguous():
            if table.shape[-1] == self.bins.num_fine:
                table = F.pad(table, (0, 1))  # 0 for the rows that take no part
            native.evaluate(table, self.scores, self.member, *self.bins.numbering, out, weight=weight)
            return
        for c, m, index, u in self._chunks():
            value = evaluate(table[:, c], index, u)
            out[c, m] = value if weight is None else value.mul_(weight[c, m])


def num_lanes(scores: Tensor, size: int) -> int:
    """Return how many tables of ``size`` bins each class of ``scores`` (C, M) gets, each summed by one thread."""
    lanes = costs_of(scores.device).lanes
    return lanes if scores.shape[0] == 1 and scores.shape[1] > lanes * size else 1


def add_moments(moments: Tensor, index: Tensor, u: Tensor, weight: Tensor | None = None) -> None:
    """Add the powers of ``u`` (c, m), each times its ``weight``, to ``moments`` (p, c, bins) at ``index`` (c, m).

    With more tables than classes each takes an equal part of the rows of the only class, and the first the remainder.
    The sums are float64: with ties a bin may sum millions of equal numbers, and a float32 sum would stop growing.
    """
    lanes, takes_turns = moments.shape[1], costs_of(u.device).interleaved and index.shape[0] == 1
    even = index.shape[1] - (index.shape[1] % lanes if takes_turns else 0)
    u = u.double()
    # scatter_add_ of a single expanded number takes twice as long as that of ones.
    power = torch.ones_like(u) if weight is None else weight.double()
    remainder, index = index[:, even:], _over_lanes(index[:, :even], lanes, takes_turns)
    first_product = 2 if weight is None else 1  # from the next degree on `power` is no input and may be overwritten
    for degree in range(moments.shape[0]):
        if degree > first_product:
            power.mul_(u)
        elif degree:
            power = power * u if degree == first_product else u
        moments[degree].scatter_add_(1, index, _over_lanes(power[:, :even], lanes, takes_turns))
        if remainder.shape[1]:
            moments[degree].scatter_add_(1, remainder, power[:, even:])


def evaluate(coefficients: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Return the polynomials ``coefficients`` (p, c, bins) at rows in the bins ``index``, at ``u``; (c, m) each."""
    costs = costs_of(u.device)
    lanes = costs.lanes if u.shape[0] == 1 and not costs.interleaved else u.shape[0]
    index, position = _over_lanes(index, lanes), _over_lanes(u, lanes)
    table = coefficients.expand(-1, lanes, -1)
    value = table[-1].gather(1, index)
    for degree in range(table.shape[0] - 2, -1, -1):
        value = value.mul_(position).add_(table[degree].gather(1, index))
    return value.view_as(u)


def _over_lanes(rows: Tensor, lanes: int, takes_turns: bool = False) -> Tensor:
    """Return the rows (1, m) of one class as (lanes, m / lanes), runs or with ``takes_turns`` strides, if they fit."""
    if rows.shape[0] > 1 or rows.shape[1] % lanes:
        return rows
    return rows.reshape(-1, lanes).t() if takes_turns else rows.reshape(lanes, -1)


def _is_outside(relative: Tensor, bins: Bins) -> Tensor:
    """Return which fine bins, numbered from that of the window, are outside of it; NaN, of two infinities, is."""
    return ~((relative >= 0) & (relative < bins.window * bins.fine))


def _round(scores: Tensor, width: float, fine: int) -> Tensor:
    return (scores * (fine / width)).round_()


def _coarse(rounded: Tensor, fine: int) -> Tensor:
    return torch.floor(rounded / fine)
