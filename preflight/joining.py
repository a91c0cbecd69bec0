"""The batches of several ranks or micro-batches as one batch, for the run on one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.until_all_end import items_of, with_items
from ..errors import Words, expected

Join = Callable[[Sequence[Any]], Any]
_JOIN = "Pass join=, a function from the list of all batches to one batch."


def is_window(batch: Any) -> bool:
    """Return True for a list of micro-batches: of containers of one type, or of tensors that differ in their rows."""
    if not isinstance(batch, list) or not all(map(tensors_in, batch)):
        return False
    return len({(part.dtype, part.shape[1:]) if isinstance(part, Tensor) else type(part) for part in batch}) == 1


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    items = items_of(batch)
    return batch if items is None else with_items(batch, {key: map_tensors(function, items[key]) for key in items})


def tensors_in(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for value in (items_of(batch) or {}).values() for tensor in tensors_in(value)]


def concatenate(batches: Sequence[Any]) -> Any:
    """Return one batch: tensors, arrays and lists of plain values one after another; other values must be equal.

    Raises:
        ValueError: for batches of different structure, or values that cannot be joined.
    """
    return _join(batches, "batch", _cat)


def pad_tokens(ignore_index: int = -100, *, pad: int = 0) -> Join:
    """Return a ``join`` for token batches of different lengths: mappings of tensors of shape (B, T) and others.

    Args:
        ignore_index: what fills up the tensors of which the key contains "label".
        pad: what fills up the others, token numbers and attention masks.
    """

    def fill(tensors: Sequence[Tensor], name: str) -> Tensor:
        if tensors[0].ndim > 1:
            value = ignore_index if "label" in name.lower() else pad
            width = max(tensor.shape[1] for tensor in tensors)
            after = [(*(0, 0) * (tensor.ndim - 2), 0, width - tensor.shape[1]) for tensor in tensors]
            tensors = [F.pad(tensor, sides, value=value) for tensor, sides in zip(tensors, after)]
        return _cat(tensors, name)

    return lambda batches: _join(batches, "batch", fill)


def _join(values: Sequence[Any], name: str, join_tensors: Callable[[Sequence[Tensor], str], Tensor]) -> Any:
    def refuse(what: str, got: str) -> ValueError:
        return ValueError(expected(name, what, Words(got), _JOIN))

    first, items = values[0], [items_of(value) for value in values]
    if len(kinds := {type(value).__name__ for value in values}) > 1:
        raise refuse("the same type in every batch", " and ".join(sorted(kinds)))
    if isinstance(first, Tensor) and first.ndim:
        return join_tensors(values, name)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(values)
    if isinstance(first, list) and not any(map(tensors_in, values)):
        return [item for value in values for item in value]
    if items[0] is not None:
        if len({tuple(map(str, item or ())) for item in items}) > 1:
            raise refuse("the same keys or length in every batch", "different ones")
        columns = {key: [(item or {})[key] for item in items] for key in items[0]}
        return with_items(first, {key: _join(columns[key], f"{name}[{key!r}]", join_tensors) for key in columns})
    if not all(bool(value == first) for value in values):
        raise refuse("tensors with rows, or the same value in every batch", ", ".join(map(str, values[:4])))
    return first


def _cat(tensors: Sequence[Tensor], name: str) -> Tensor:
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1:
        got = Words(" and ".join(f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}" for tensor in tensors[:4]))
        fix = f"{_JOIN} For tokens: pad_tokens(-100) of fullrank.preflight, where labels have 'label' in their key."
        raise ValueError(expected(name, "tensors that differ in their number of rows alone", got, fix))
    return torch.cat(list(tensors))
