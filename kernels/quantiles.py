"""Quantiles in the upper tail.

``torch.quantile`` sorts every element, refuses half precision, raises above 2**24 elements and computes its rank in
float32, which is off by one row from about 1e5 rows on. Here the rank is float64, and only the tail is selected.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from .spread import evenly_spaced
from .torch_private import are_plain, func_transforms_are_active, is_followed

INTERPOLATIONS = ("linear", "lower", "higher", "nearest", "midpoint")
BLENDED = ("linear", "midpoint")  # the quantile may lie between two scores
BRACKETED = 2**15  # rows from which ranks are bracketed by a sample first, on the host alone
SAMPLE = 4096
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
        """Return the levels with 0 for the classes that are not ``kept`` (C,)."""
        keep = kept[:, None]
        zero = torch.zeros((), dtype=self.base.dtype, device=self.base.device)
        offset = None if self.offset is None else torch.where(keep, self.offset, zero.double())
        return Levels(torch.where(keep, self.base, zero), offset)

    def minus(self, other: Levels) -> Tensor:
        """Return the differences to the levels ``other``, float64."""
        difference = self.base.double() - other.base
        if self.offset is not None and other.offset is not None:
            difference = difference + (self.offset - other.offset)
        return difference

    def compare(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return which ``scores`` (C, M) are at or above, and which are at or below, the one level of their class."""
        if self.offset is None:
            return scores >= self.base, scores <= self.base
        # The difference of two equal infinities is NaN.
        distance = torch.where(scores == self.base, 0.0, scores.double() - self.base.double())
        return distance >= self.offset, distance <= self.offset


def upper_levels(
    scores: Tensor,
    member: Tensor | None,
    fractions: Sequence[float],
    interpolation: str = "higher",
    num_members: int | None = None,
    weight: Tensor | None = None,
) -> Levels:
    """Return, for each class and each fraction q, the (1 - q) quantile of the members' scores, detached: (C, L).

    Equal to ``torch.quantile(scores[c][member[c]], 1 - q, interpolation=interpolation)`` for each class c, without
    rounding quantiles between two scores; arbitrary where a class has no member. Only the tail is selected.

    With weights w the rank of a row is the weight below it, divided by that of all other rows: (k - 1) / (n - 1) where
    all weights are equal. So at most the share q of the weight is strictly above the (1 - q) quantile ``"higher"``. Of
    rows with the same score the lightest is the highest. O(M log M) time.

    Args:
        scores: (C, M) floating.
        member: (C, M) bool; None for all.
        fractions: the q, in [0, 1]: 0 asks for the maximum, 1 for the minimum.
        interpolation: what to return when the rank (1 - q)(n - 1) lies between two scores: ``"linear"``, ``"lower"``,
            ``"higher"``, ``"nearest"`` (half to even) or ``"midpoint"``.
        num_members: the number of members of a single class; None counts them.
        weight: (M,), > 0 for members; None for 1.
    """
    scores = scores.detach()
    num_rows = scores.shape[1]
    if num_rows == 0:
        base = scores.new_zeros(scores.shape[0], len(fractions))
        return Levels(base, base.double() if interpolation in BLENDED else None)
    if weight is not None:
        return _weighted_levels(scores, member, weight, fractions, interpolation)
    last: Tensor | int = max(0, (num_rows if member is None or num_members is None else num_members) - 1)
    if member is None or num_members is not None:
        find = _ranks_on_host if not is_followed() and are_plain([scores]) else _ranks_on_host.__wrapped__
        ranks, weight = find(last, tuple(fractions), interpolation)
        weight = None if weight is None else weight.to(scores.device, non_blocking=True)
    else:
        last = (member.sum(dim=1, keepdim=True) - 1).clamp_min(0)  # [C, 1]
        # A copy to the device does not wait for it.
        shares = _shares_above(fractions).to(scores.device, non_blocking=True)
        ranks, weight = ranks_of(last * shares, interpolation)
    if num_rows >= BRACKETED and _numpy_can_read(scores):
        at_ranks = _select_by_brackets(scores, member, ranks.tolist())
    else:
        at_ranks = _select_by_sorting(scores, member, ranks, last, fractions)
    return blend(at_ranks, weight)


def _weighted_levels(
    scores: Tensor, member: Tensor | None, weight: Tensor, fractions: Sequence[float], interpolation: str
) -> Levels:
    mass = weight.double().expand_as(scores) if member is None else torch.where(member, weight.double(), 0.0)
    total, above = mass.sum(dim=1, keepdim=True), torch.zeros_like(mass[:, :1])
    q = torch.tensor(fractions, dtype=torch.float64, device="cpu").to(scores.device, non_blocking=True)
    if scores.shape[1] < BRACKETED or not _numpy_can_read(scores):
        rows = _filled(scores, member, -math.inf), mass
        return _weighted_levels_of(*rows, total, above, q.expand(len(scores), -1).contiguous(), interpolation)
    # Of each class and fraction, the rows between two scores of a sample that most likely enclose the level.
    places = evenly_spaced(SAMPLE, scores.shape[1], scores.device)
    levels = [
        _weighted_level(scores[c], mass[c], total[c], places, fraction, interpolation)
        for c in range(len(scores))
        for fraction in q
    ]
    base, offset = torch.cat([level.base for level in levels]), levels[0].offset
    if offset is not None:
        offset = torch.cat([level.movable for level in levels]).view(len(scores), -1)
    return Levels(base.view(len(scores), -1), offset)


def _weighted_level(row: Tensor, mass: Tensor, total: Tensor, places: Tensor, q: Tensor, interpolation: str) -> Levels:
    """Return the level of the fraction ``q`` among the scores ``row`` (M,) of the given ``mass`` (M,), on the host."""
    sample, order = row[places].sort(descending=True)
    of_sample = mass[places][order]
    margin = 4 * of_sample.norm() / of_sample.sum()  # at least 8 standard deviations of a share of the sample's mass
    shares = of_sample.cumsum(0) / of_sample.sum()
    first, beyond = torch.searchsorted(shares, torch.stack([q - margin, q + margin])).tolist()
    inside, heaviest, above = mass > 0, mass.max(), torch.zeros_like(total)
    if first > 0:
        above = mass[row > sample[first - 1]].sum()
        inside &= row <= sample[first - 1]
    if beyond < len(sample):
        inside &= row >= sample[beyond]
    rows, masses = row[inside], mass[inside]
    is_below_top = first == 0 or bool(above < q * (total - heaviest))
    is_above_end = beyond == len(sample) or bool(above + masses.sum() > q * total + heaviest)
    if len(rows) == 0 or not (is_below_top and is_above_end):  # no members, undefined scores, or an unlucky sample
        rows, masses, above = row.masked_fill(mass == 0, -math.inf), mass, torch.zeros_like(total)
    return _weighted_levels_of(rows[None], masses[None], total[None], above.view(1, 1), q[None, None], interpolation)


def _weighted_levels_of(
    scores: Tensor, mass: Tensor, total: Tensor, above: Tensor, q: Tensor, interpolation: str
) -> Levels:
    """Return the levels of the fractions ``q`` (C, L) among the ``scores`` (C, K) with a ``mass`` each, 0 for none.

    ``total`` (C, 1) is the mass of all rows, and ``above`` (C, 1) that of the rows above these.
    """
    # Rows without mass come last among equal scores too, which may be -inf as theirs are.
    lightest_first = torch.where(mass > 0, mass, math.inf).argsort(dim=1, stable=True)
    scores, mass = scores.gather(1, lightest_first), mass.gather(1, lightest_first)
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    mass = mass.gather(1, order)
    if not mass.is_cpu and torch.are_deterministic_algorithms_enabled():  # an accelerator adds in any order
        so_far = mass.cpu().cumsum(dim=1).to(mass.device)
    else:
        so_far = mass.cumsum(dim=1)
    above, others = above + so_far - mass, total - mass
    place = torch.where(others > 0, above / others, 0.0)  # [C, K] from 0 for the top score of all to 1
    last = ((mass > 0).sum(dim=1, keepdim=True) - 1).clamp_min(0)  # [C, 1]
    upper = (torch.searchsorted(place, q * (1 + _SNAP), right=True) - 1).clamp_min(0).minimum(last)
    lower = torch.searchsorted(place, q * (1 - _SNAP)).minimum(last)
    if interpolation == "higher":
        return Levels(ordered.gather(1, upper), None)
    if interpolation == "lower":
        return Levels(ordered.gather(1, lower), None)
    below = place.gather(1, lower)
    distance = below - place.gather(1, upper)
    share = torch.where(distance > 0, (below - q) / distance, 0.0).clamp(0.0, 1.0)  # of the upper score
    if interpolation == "nearest":
        is_tie = (share - 0.5).abs() <= _SNAP
        is_upper = torch.where(is_tie, (last - lower) % 2 == 1, share > 0.5)  # half to even
        return Levels(ordered.gather(1, torch.where(is_upper, upper, lower)), None)
    if interpolation == "midpoint":
        share = torch.where(distance > 0, 0.5, 0.0).double()
    return blend(ordered.gather(1, torch.cat([lower, upper], dim=1)), share)


def _shares_above(fractions: Sequence[float]) -> Tensor:
    return torch.tensor([1.0 - q for q in fractions], dtype=torch.float64, device="cpu")


@functools.lru_cache(maxsize=64)  # most steps have the number of rows of an earlier one
def _ranks_on_host(
    last: Tensor | int, fractions: tuple[float, ...], interpolation: str
) -> tuple[Tensor, Tensor | None]:
    """Return :func:`ranks_of` the quantiles among ``last + 1`` scores, (1, L) each; not to be changed in place."""
    return ranks_of(last * _shares_above(fractions)[None], interpolation)


def ranks_of(rank: Tensor, interpolation: str) -> tuple[Tensor, Tensor | None]:
    """Return the ranks to select, int64, for the ranks (1 - q)(n - 1), (c, L) float64.

    One for each quantile (c, L) and None; or the lower, then the upper ones (c, 2 L), and weights of the latter (c, L).
    """
    nearest = (2 * rank).round() / 2  # half-integers too, because "nearest" rounds up or down there
    rank = torch.where((rank - nearest).abs() <= _SNAP * nearest.clamp_min(1), nearest, rank)
    if interpolation == "nearest":
        return rank.round().to(torch.int64), None
    if interpolation == "higher":
        return rank.ceil().to(torch.int64), None
    lower = rank.floor()
    if interpolation == "lower":
        return lower.to(torch.int64), None
    upper = rank.ceil()
    weight = (upper - lower) / 2 if interpolation == "midpoint" else rank - lower
    return torch.cat([lower, upper], dim=1).to(torch.int64), weight


def blend(scores: Tensor, weight: Tensor | None) -> Levels:
    """Return the quantiles from the ``scores`` at the ranks of :func:`ranks_of`, and its weights."""
    if weight is None:
        return Levels(scores, None)
    low, high = scores.tensor_split(2, dim=1)
    # The difference of two equal infinities is NaN, so equal scores are not blended.
    between = (weight > 0) & (low != high)
    return Levels(low, torch.where(between, (high.double() - low.double()) * weight, 0.0))


def _select_by_sorting(
    scores: Tensor, member: Tensor | None, ranks: Tensor, last: Tensor | int, fractions: Sequence[float]
) -> Tensor:
    """Return the members' scores of the ``ranks`` (c, R) as (C, R), from one tail if it holds them all.

    ``last`` is the largest rank, of each class (C, 1) or of all. On the host, arithmetic with ranks launches nothing.
    """
    # Branches, because torch.compile may make the outcome of a comparison symbolic, which topk does not take.
    if max(fractions) <= 0.5:
        from_top, share = True, max(fractions)
    elif min(fractions) > 0.5:
        from_top, share = False, 1.0 - min(fractions)
    else:
        ordered = _filled(scores, member, math.inf).sort(dim=1).values  # [C, M]
        return ordered.gather(1, ranks.to(scores.device, non_blocking=True).expand(scores.shape[0], -1))
    most = min(scores.shape[1], math.floor(share * (scores.shape[1] - 1) * (1 + _SNAP)) + 2)
    tail = _filled(scores, member, -math.inf if from_top else math.inf)
    ordered = tail.topk(most, dim=1, largest=from_top).values  # [C, k]
    ranks = (last - ranks if from_top else ranks).clamp_max(most - 1)
    return ordered.gather(1, ranks.to(scores.device, non_blocking=True).expand(scores.shape[0], -1))


def _filled(scores: Tensor, member: Tensor | None, value: float) -> Tensor:
    return scores if member is None else torch.where(member, scores, value)


def _numpy_can_read(scores: Tensor) -> bool:
    """Return whether ``scores`` are numbers on the host, and no values of a graph or of a transform."""
    if torch.compiler.is_compiling() or func_transforms_are_active():
        return False
    return scores.is_cpu and scores.dtype in (torch.float32, torch.float64)


def _select_by_brackets(scores: Tensor, member: Tensor | None, ranks: list[list[int]]) -> Tensor:
    """Return the members' scores of the ``ranks``, lists for each class or one for all, as (C, R).

    A sample says between which scores a rank lies, and only the rows between them are ordered.
    """
    places = evenly_spaced(SAMPLE, scores.shape[1], scores.device).numpy()
    at_ranks = torch.empty(scores.shape[0], len(ranks[0]), dtype=scores.dtype, device=scores.device)
    for c, values in enumerate(at_ranks.numpy()):  # on one thread several times as fast as torch
        inside = None if member is None else member[c].numpy()
        values[:] = _select_in_row(scores[c].numpy(), inside, ranks[c % len(ranks)], places)
    return at_ranks


def _select_in_row(row: Any, inside: Any, ranks: list[int], places: Any) -> list[float]:
    """Return the scores of the ``ranks``, in any order, among the entries ``inside`` of ``row``; None for all."""
    count = row.size if inside is None else int(numpy.count_nonzero(inside))
    sample = row[places] if inside is None else row[places][inside[places]]
    sample.sort()
    size = sample.size
    score_of: dict[int, float] = {}
    waiting = sorted(set(ranks), reverse=True)
    usable = size > 0 and not numpy.isnan(row.max())
    while waiting:
        chosen = [waiting.pop()]
        first, beyond = _bracket(chosen[0], count, size)
        while waiting and _bracket(waiting[-1], count, size)[0] <= beyond:
            chosen.append(waiting.pop())
            beyond = _bracket(chosen[-1], count, size)[1]
        kept, below = inside, 0  # the rows between two scores of the sample, ends included, and how many are below
        if usable and first >= 0:
            kept = row >= sample[first] if inside is None else (row >= sample[first]) & inside
            below = count - int(numpy.count_nonzero(kept))
        if usable and beyond < size:
            up_to = row <= sample[beyond]
            kept = up_to if kept is None else up_to & kept
        part = row if kept is None else row[kept]
        if chosen[0] < below or chosen[-1] >= below + part.size:  # an unlucky sample
            part, below = (row if inside is None else row[inside]), 0
        if part.size:
            ordered = numpy.partition(part, [rank - below for rank in chosen])
            score_of |= {rank: ordered[rank - below] for rank in chosen}
    return [score_of.get(rank, 0.0) for rank in ranks]


def _bracket(rank: int, count: int, size: int) -> tuple[int, int]:
    """Return places in a sorted sample of ``size`` between which the ``rank`` of ``count`` scores most likely lies."""
    share = rank / max(1, count - 1)
    margin = 2 + 4 * math.sqrt(share * (1 - share) * size)  # 4 standard deviations
    return math.floor(share * size - margin), math.ceil(share * size + margin)
