"""Exact quantiles of scores in several parts, from counts that add up over the parts.

The bits of a float, read as an integer whose order is that of the floats, are found digit by digit, the highest first:
the counts of each digit over all scores give the digit of the wanted score and the number of scores below it. The next
round counts only the scores with that digit. A digit has up to 11 bits, so float32 takes 3 rounds and float64 6.
The quantiles of a class with a NaN are arbitrary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.bins import chunks
from ..kernels.quantiles import BLENDED, Levels, blend, ranks_of

MOST_BITS = 11  # of a digit: float32 has three digits and float64 six, each of which is a collective
MOST_COUNTS = 2**17  # in one round, 1 MiB, as long as a digit has MIN_BITS: it bounds memory and what travels
MIN_BITS = 4
_WIDTH = {torch.float32: 32, torch.float64: 64}
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


class Selected(NamedTuple):
    """Quantiles over all parts."""

    levels: Levels  # (C, L)
    members: Tensor  # [C] float64, the number of scores they are taken of
    extra: Tensor  # as given, summed over the parts


def select_levels(
    scores: Tensor,
    member: Tensor | None,
    fractions: Sequence[float],
    interpolation: str,
    add: Callable[[Tensor], Tensor],
    extra: Tensor,
) -> Selected:
    """Return the quantiles of :func:`~fullrank.kernels.quantiles.upper_levels` over the scores of all parts.

    ``add`` returns the sum of a float64 tensor (n,) over the parts, such as of the numbers ``extra`` (k,). Its calls,
    and the sizes of their arguments, depend on the dtype, the number of classes and the number of fractions alone.
    """
    scores, num_classes = scores.detach(), scores.shape[0]
    wanted = len(fractions) * (2 if interpolation in BLENDED else 1)
    bits = _bits_of_rounds(_WIDTH[scores.dtype], num_classes, wanted)
    shift, size = _WIDTH[scores.dtype] - bits[0], 1 << bits[0]
    # The first digit is counted by its raw bits. The highest is the sign, so negative scores are in reverse order.
    counts = torch.zeros(num_classes * size + extra.numel(), dtype=torch.float64, device=scores.device)
    for c, m in chunks(scores):
        digit = _bits_of_first(scores[c, m], shift, size, c)
        digit = digit.reshape(-1) if member is None else digit[member[c, m]]
        counts[: num_classes * size] += torch.bincount(digit, minlength=num_classes * size)
    counts[num_classes * size :] = extra
    counts = add(counts)
    extra = counts[num_classes * size :]
    of_bits = counts[: num_classes * size].view(num_classes, size)
    cumulated = torch.cat([of_bits[:, size // 2 :].flip(1), of_bits[:, : size // 2]], dim=1).cumsum(dim=1)
    count = cumulated[:, -1]
    shares = count.new_tensor([1.0 - q for q in fractions])
    ranks, weight = ranks_of((count[:, None] - 1).clamp_min(0) * shares, interpolation)  # [C, wanted] from the bottom
    digit, rest = _digit_of(cumulated[:, None].expand(-1, wanted, -1), ranks.double())
    prefix = digit - (size >> 1)  # [C, wanted]

    # Ranks with the same digits so far share a slot, and only scores in a slot are counted further.
    slot = _first_equal(prefix)
    if wanted == 1:  # two comparisons are faster than a table
        first, last = prefix << shift, (prefix << shift) + ((1 << shift) - 1)
        last = last.masked_fill(last == -1, -2)  # -1 is -0, which compares equal to the 0 of the next slot
        low, high = _floats(first, scores.dtype), _floats(last, scores.dtype)
        low, high = (edge.nan_to_num(end, math.inf, -math.inf) for edge, end in ((low, -math.inf), (high, math.inf)))
    table = digit.new_full((num_classes * size,), -1)
    bits_of = torch.where(prefix < 0, size // 2 - 1 - prefix, prefix)
    table.scatter_(0, (bits_of + _offsets(digit, size)).view(-1), slot.expand_as(digit).reshape(-1))
    keys, groups = [digit.new_zeros(0)], [digit.new_zeros(0)]
    for c, m in chunks(scores):
        part = scores[c, m]
        if wanted == 1:
            inside = (part >= low[c]) & (part <= high[c])
        else:
            slots = table.take(_bits_of_first(part, shift, size, c))
            inside = slots >= 0
        rows = (inside if member is None else inside & member[c, m]).reshape(-1).nonzero()[:, 0]
        keys.append(_sortable(part.reshape(-1)[rows]).to(torch.int64))
        group = (rows // max(1, part.shape[1]) + c.start) * wanted
        groups.append(group if wanted == 1 else group + slots.reshape(-1)[rows])
    key, group = torch.cat(keys), torch.cat(groups)
    for width in bits[1:]:
        shift, size = shift - width, 1 << width
        digits = group * size + ((key >> shift) & (size - 1))
        counts = add(torch.bincount(digits, minlength=num_classes * wanted * size).double())
        cumulated = counts.view(num_classes, wanted, size).cumsum(dim=2)
        cumulated = cumulated.gather(1, slot[:, :, None].expand(-1, -1, size))
        digit, rest = _digit_of(cumulated, rest)
        prefix = (prefix << width) | digit
        if shift:
            place = (slot * size + digit) + _offsets(digit, wanted * size)
            slot = _first_equal(prefix)
            table = digit.new_full((num_classes * wanted * size,), -1)
            table.scatter_(0, place.view(-1), slot.reshape(-1))
            slots = table[digits]
            inside = slots >= 0
            key = key[inside]
            group = (group[inside] // wanted) * wanted + slots[inside]
    return Selected(blend(_floats(prefix, scores.dtype), weight), count, extra)


def num_counts(dtype: torch.dtype, num_classes: int, num_fractions: int, interpolation: str) -> int:
    """Return how many numbers :func:`select_levels` adds up over the parts, without ``extra``."""
    wanted = num_fractions * (2 if interpolation in BLENDED else 1)
    first, *later = _bits_of_rounds(_WIDTH[dtype], num_classes, wanted)
    return num_classes * ((1 << first) + wanted * sum(1 << width for width in later))


def _bits_of_rounds(width: int, num_classes: int, wanted: int) -> list[int]:
    """Return how many bits the digit of each round has."""
    most = [MOST_COUNTS / max(1, num_classes), MOST_COUNTS / max(1, num_classes * wanted)]
    first, later = (max(MIN_BITS, min(MOST_BITS, int(math.log2(max(1.0, limit))))) for limit in most)
    rounds, left = math.ceil((width - first) / later), width - first
    bits = [first]
    for number in range(rounds, 0, -1):
        bits.append(math.ceil(left / number))
        left -= bits[-1]
    return bits


def _sortable(scores: Tensor) -> Tensor:
    """Return signed integers in the order of ``scores``; -0 is 0."""
    bits, most = (scores + 0.0).view(_INTEGER[scores.dtype]), torch.iinfo(_INTEGER[scores.dtype]).max
    return bits ^ ((bits >> (_WIDTH[scores.dtype] - 1)) & most)


def _floats(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scores from the integers of :func:`_sortable`."""
    bits, most = keys.to(_INTEGER[dtype]), torch.iinfo(_INTEGER[dtype]).max
    return (bits ^ ((bits >> (_WIDTH[dtype] - 1)) & most)).view(dtype)


def _bits_of_first(scores: Tensor, shift: int, size: int, classes: slice) -> Tensor:
    """Return the bits of the first digit of each score (c, m), contiguous, in one table of all classes."""
    bits = (scores + 0.0).contiguous().view(_INTEGER[scores.dtype])
    bits = (bits >> shift).bitwise_and_(size - 1).to(torch.int64)
    if scores.shape[0] == 1 and classes.start == 0:
        return bits
    return bits.add_((torch.arange(scores.shape[0], device=scores.device) + classes.start)[:, None] * size)


def _offsets(of_classes: Tensor, size: int) -> Tensor:
    return (torch.arange(of_classes.shape[0], device=of_classes.device) * size)[:, None]


def _first_equal(values: Tensor) -> Tensor:
    """Return (C, n): for each of a row's values, the place of the first value of the row that equals it."""
    return (values[:, :, None] == values[:, None, :]).to(torch.int64).argmax(dim=2)


def _digit_of(cumulated: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    """Return the digit at each ``rank`` (C, n) of the counts up to each digit, and its rank among those with it."""
    digit = torch.searchsorted(cumulated.contiguous(), rank[:, :, None].contiguous(), right=True)[:, :, 0]
    digit = digit.clamp_max(cumulated.shape[2] - 1)
    below = cumulated.gather(2, (digit - 1).clamp_min(0)[:, :, None])[:, :, 0]
    return digit, rank - torch.where(digit > 0, below, 0.0)
