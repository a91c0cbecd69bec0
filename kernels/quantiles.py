"""Quantiles in the upper tail.

``torch.quantile`` sorts every element, refuses half precision, raises above 2**24 elements and computes its rank in
float32, which is off by one row from about 1e5 rows on. Here the rank is float64, and only the tail is selected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

INTERPOLATIONS = ("linear", "lower", "higher", "nearest", "midpoint")
_SNAP = 1e-9  # relative distance at which a rank counts as an integer: (1 - 0.7) * 10 is 3.0000000000000004


class Levels(NamedTuple):
    """Quantiles, each a score plus an offset: between two large scores the sum would be rounded to one of them."""

    base: Tensor  # [C, L] scores
    offset: Tensor | None  # [C, L] float64; None if every quantile is a score

    @property
    def value(self) -> Tensor:
        """(C, L): the quantiles in the dtype of the scores."""
        if self.offset is None:
            return self.base
        return torch.where(self.offset == 0, self.base, (self.base.double() + self.offset).to(self.base.dtype))

    @property
    def movable(self) -> Tensor:
        """(C, L): the offsets, or the scores where every quantile is a score."""
        return self.base if self.offset is None else self.offset

    def take(self, index: int | slice) -> Levels:
        """Return some of the levels, (C, l); one for an int."""
        part = slice(index, index + 1) if isinstance(index, int) else index
        return Levels(self.base[:, part], None if self.offset is None else self.offset[:, part])

    def where(self, kept: Tensor) -> Levels:
        """Return the levels of the classes ``kept`` (C,), and 0 for the others."""
        keep = kept[:, None]
        zero = torch.zeros((), dtype=self.base.dtype, device=self.base.device)
        offset = None if self.offset is None else torch.where(keep, self.offset, zero.double())
        return Levels(torch.where(keep, self.base, zero), offset)

    def minus(self, other: Levels) -> Tensor:
        """Return the differences to the levels ``other``, float64."""
        difference = self.base.double() - other.base.double()
        if self.offset is not None and other.offset is not None:
            difference = difference + (self.offset - other.offset)
        return difference

    def compare(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return which ``scores`` (C, M) are at or above, and which are at or below, the one level of their class."""
        if self.offset is None:
            return scores >= self.base, scores <= self.base
        # Of two equal infinities there is no difference.
        distance = torch.where(scores == self.base, 0.0, scores.double() - self.base.double())
        return distance >= self.offset, distance <= self.offset


def upper_quantiles(
    scores: Tensor, member: Tensor | None, fractions: Sequence[float], interpolation: str = "higher"
) -> Tensor:
    """Return, for each class and each fraction q, the (1 - q) quantile of the members' scores.

    Equal to ``torch.quantile(scores[c][member[c]], 1 - q, interpolation=interpolation)`` for each class c; O(M) time
    for small q, because only the tail is selected.

    Args:
        scores: (C, M) floating; entries outside ``member`` are ignored.
        member: (C, M) bool, None for all True.
        fractions: the q, in [0, 1]: 0 asks for the maximum, 1 for the minimum.
        interpolation: what to return when the rank (1 - q)(n - 1) lies between two scores: ``"linear"``, ``"lower"``,
            ``"higher"``, ``"nearest"`` (half to even) or ``"midpoint"``.

    Shape:
        output (C, len(fractions)), detached; arbitrary where a class has no member.
    """
    return upper_levels(scores, member, fractions, interpolation).value


def upper_levels(
    scores: Tensor, member: Tensor | None, fractions: Sequence[float], interpolation: str = "higher"
) -> Levels:
    """Return the quantiles of :func:`upper_quantiles` without rounding those between two scores."""
    scores = scores.detach()
    blends = interpolation in ("linear", "midpoint")
    if scores.shape[1] == 0:
        base = scores.new_zeros(scores.shape[0], len(fractions))
        return Levels(base, base.double() if blends else None)
    if member is None:
        count = torch.full(scores.shape[:1], float(scores.shape[1]), dtype=torch.float64, device=scores.device)
    else:
        count = member.sum(dim=1, dtype=torch.float64)  # [C]
    last = (count - 1).clamp_min(0)
    quantiles, offsets = [torch.empty(0)] * len(fractions), [torch.empty(0)] * len(fractions)
    for from_top in (True, False):
        # Two comparisons: torch.compile cannot compare the outcome of one, which may be symbolic, with from_top.
        chosen = [index for index, q in enumerate(fractions) if (q <= 0.5 if from_top else q > 0.5)]
        if not chosen:
            continue
        # The tail holds enough entries of each class for every chosen quantile, best first.
        share = max(fractions[index] if from_top else 1.0 - fractions[index] for index in chosen)
        enough = min(scores.shape[1], math.floor(share * (scores.shape[1] - 1) * (1 + _SNAP)) + 2)
        last_value = -math.inf if from_top else math.inf
        tail = scores if member is None else scores.masked_fill(~member, last_value)  # [C, M]
        tail = tail.topk(enough, dim=1, largest=from_top).values  # [C, k]
        for index in chosen:
            lower, upper, weight = _ranks(last, fractions[index], interpolation)
            places = [
                (last - rank if from_top else rank).clamp(0, enough - 1).to(torch.int64) for rank in (lower, upper)
            ]
            low, high = (tail.gather(1, place[:, None])[:, 0] for place in places)
            quantiles[index] = torch.where(weight == 1, high, low)
            if blends:
                # The difference of two equal infinities is NaN, so equal scores are not blended.
                between = (weight > 0) & (weight < 1) & (low != high)
                offsets[index] = torch.where(between, (high.double() - low.double()) * weight, torch.zeros_like(weight))
    return Levels(torch.stack(quantiles, dim=1), torch.stack(offsets, dim=1) if blends else None)


def _ranks(last: Tensor, fraction: float, interpolation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two neighbouring ranks of (1 - q)(n - 1) and the weight of the upper one, each (C,) float64."""
    rank = last * (1.0 - fraction)
    nearest = (2 * rank).round() / 2  # half-integers too, because "nearest" rounds up or down there
    rank = torch.where((rank - nearest).abs() <= _SNAP * nearest.clamp_min(1), nearest, rank)
    lower, upper = rank.floor(), rank.ceil()
    if interpolation == "lower":
        return lower, upper, torch.zeros_like(rank)
    if interpolation == "higher":
        return lower, upper, torch.ones_like(rank)
    if interpolation == "nearest":
        return lower, upper, (rank.round() > lower).to(rank)
    if interpolation == "midpoint":
        return lower, upper, torch.where(upper > lower, 0.5, 0.0).to(rank)
    return lower, upper, rank - lower
