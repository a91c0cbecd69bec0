"""Pairs of scores: the rows of a call of Smooth-AP, units of sums, sizes of chunks, the sigmoid of a difference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .costs import costs_of


class Problem(NamedTuple):
    """The rows of a call of Smooth-AP and their weights."""

    scores: Tensor  # [C, M]
    positive: Tensor  # [C, M] bool
    member: Tensor | None  # [C, M] bool: the rows that take part, None for all
    class_of: Tensor  # [P] int64, ascending: class of each positive of a valid class
    row_of: Tensor  # [P] int64: its row
    share: Tensor  # [P] float64: its weight in the mean of its class; may have a stride of 0
    temperature: float
    key_weight: Tensor | None = None  # [M] or [C, M]: the weight of each row where it is compared, None for 1
    valid: Tensor | None = None  # [C] bool, which classes are valid; None where it is not of interest
    all_valid: bool = False  # as far as the host knows

    def at_positives(self, weight: Tensor) -> Tensor:
        """Return the weight of each listed positive, [P] float64, from ``weight`` (M,) or (C, M)."""
        return weight_at(weight, self.class_of, self.row_of)

    @property
    def weight_of_negatives(self) -> Tensor | None:
        """The weight of each row that is not a positive, and 0 for the positives: [C, M]; None for 1."""
        weight = self.key_weight
        return None if weight is None else weight.expand_as(self.scores).masked_fill(self.positive, 0.0)


def weight_at(weight: Tensor, class_of: Tensor, row_of: Tensor) -> Tensor:
    """Return the entries of ``weight`` (M,) or (C, M) for the classes and rows, (P,) each, in float64."""
    return (weight[row_of] if weight.ndim == 1 else weight[class_of, row_of]).double()


_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}  # its bits


def power_of_two(numbers: Tensor) -> Tensor:
    """Return the powers of two next below ``numbers`` >= 0, at least the smallest normal one: exact to divide by."""
    dtype, exponent = _EXPONENT[numbers.dtype]
    return (numbers.view(dtype) & exponent).view(numbers.dtype).clamp_min(torch.finfo(numbers.dtype).tiny)


def chunk_size(tensor: Tensor, pairs_per_item: int) -> int:
    """Return how many items of ``pairs_per_item`` pairs make one chunk on the device of ``tensor``, at least 1."""
    return max(1, costs_of(tensor.device).pairs_at_once // max(1, pairs_per_item))


def chunks_of_pairs(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
    """Return slices of classes and of queries whose pairs with all keys make one chunk."""
    (num_classes, num_queries), num_keys = queries.shape, keys.shape[1]
    most, slices = costs_of(queries.device).pairs_at_once, []
    classes = max(1, most // max(1, num_queries * num_keys))
    step = max(1, most // max(1, num_keys)) if classes == 1 else max(1, num_queries)
    for first_class in range(0, num_classes, classes):
        for first in range(0, num_queries, step):
            slices.append((slice(first_class, first_class + classes), slice(first, first + step)))
    return slices


def places_of(mask: Tensor, count: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return where the entries of a mask (C, M) are, (C, width) with padding, and the mask of those without padding."""
    slot = torch.where(mask, mask.cumsum(dim=1) - 1, width)
    rows = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    index = rows.new_zeros(mask.shape[0], width + 1).scatter_(1, slot, rows)[:, :width]
    return index, torch.arange(width, device=mask.device)[None] < count[:, None]


def sigmoid_and_slope(difference: Tensor) -> tuple[Tensor, Tensor]:
    """Return s(d) and s'(d) = s(d) s(-d), exact to rounding in both tails; ``difference`` is overwritten.

    With e = s(-|d|) <= 1/2, s(d) is e or 1 - e, and s'(d) = e - e^2, so one exponential is enough for both.
    """
    e = difference.copysign(-1.0).sigmoid_()
    sigmoid = difference.gt_(0).sub_(e).abs_()
    return sigmoid, e.addcmul_(e, e, value=-1)


def slope_of(difference: Tensor) -> Tensor:
    """Return the second result of :func:`sigmoid_and_slope` alone; ``difference`` is overwritten."""
    e = difference.copysign_(-1.0).sigmoid_()
    return e.addcmul_(e, e, value=-1)
