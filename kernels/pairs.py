"""Pairs of scores: the rows of a call of Smooth-AP, the sizes of chunks, and the sigmoid of a difference."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .costs import costs_of


class Problem(NamedTuple):
    """The rows of a call of Smooth-AP and the weights of the positives."""

    scores: Tensor  # [C, M]
    positive: Tensor  # [C, M] bool
    member: Tensor | None  # [C, M] bool: the rows that take part, None for all
    class_of: Tensor  # [P] int64, ascending: class of each positive of a valid class
    row_of: Tensor  # [P] int64: its row
    share: Tensor  # [P] float64: its weight in the mean of its class; may have a stride of 0
    temperature: float


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
