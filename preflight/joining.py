"""The batches of several ranks or micro-batches as one batch, for the run on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import Words, expected

Join = Callable[[Sequence[Any]], Any]
_JOIN = "Pass join=, a function from the list of all batches to one batch."


def is_window(batch: Any) -> bool:
    """Return True for a list of micro-batches; a list of tensors that do not fit each other is one batch."""
    if not isinstance(batch, list):
        return False
    kinds = {(part.dtype, part.shape[1:]) if isinstance(part, Tensor) and part.ndim else None for part in batch}
    return len(kinds) <= 1 or not all(isinstance(part, Tensor) for part in batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return ``batch`` with ``function`` applied to every tensor in it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return _remake(batch, {key: map_tensors(function, value) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        return _remake(batch, [map_tensors(function, value) for value in batch])
    return batch


def count_rows(batch: Any) -> int | None:
    """Return the length of the first tensor in ``batch``; None if it has none."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), None)


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors in ``batch``."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found


def concatenate(batches: Sequence[Any]) -> Any:
    """Return one batch: tensors, arrays and lists of plain values one after another; other values must be equal.

    Raises:
        ValueError: for batches of different structure, or values that cannot be joined.
    """
    return _join(batches, "batch", lambda tensors, name: _cat(tensors, name))


def pad_tokens(ignore_index: int = -100, *, pad: int = 0) -> Join:
    """Return a ``join`` for token batches of different lengths: mappings of tensors of shape (B, T) and others.

    Args:
        ignore_index: what fills up the tensors of which the key contains "label".
        pad: what fills up the others, token numbers and attention masks.
    """

    def fill(tensors: Sequence[Tensor], name: str) -> Tensor:
        lengths = {tensor.shape[1] for tensor in tensors if tensor.ndim > 1}
        if len(lengths) <= 1:
            return _cat(tensors, name)
        value, width = ignore_index if "label" in name.lower() else pad, max(lengths)
        padded = [
            torch.cat([tensor, tensor.new_full((len(tensor), width - tensor.shape[1], *tensor.shape[2:]), value)], 1)
            for tensor in tensors
        ]
        return _cat(padded, name)

    return lambda batches: _join(batches, "batch", fill)


def _join(values: Sequence[Any], name: str, join_tensors: Callable[[Sequence[Tensor], str], Tensor]) -> Any:
    first = values[0]
    if len({type(value) for value in values}) > 1:
        kinds = Words(", ".join(type(value).__name__ for value in values[:4]))
        raise ValueError(expected(name, "the same type in every batch", kinds, _JOIN))
    if isinstance(first, Tensor) and first.ndim:
        return join_tensors(values, name)
    if isinstance(first, Mapping):
        if len({tuple(map(str, value)) for value in values}) > 1:
            raise ValueError(expected(name, "the same keys in every batch", Words("different ones"), _JOIN))
        parts = {key: _join([v[key] for v in values], f"{name}[{key!r}]", join_tensors) for key in first}
        return _remake(first, parts)
    if isinstance(first, np.ndarray) and first.ndim:
        return np.concatenate(values)
    if isinstance(first, list) and not any(_holds_tensors(value) for value in values):
        return [item for value in values for item in value]
    if isinstance(first, (list, tuple)):
        if len({len(value) for value in values}) > 1:
            raise ValueError(expected(name, "the same length in every batch", Words("different ones"), _JOIN))
        columns = enumerate(zip(*values))
        return _remake(first, [_join(column, f"{name}[{place}]", join_tensors) for place, column in columns])
    if not all(bool(value == first) for value in values):
        got = Words(", ".join(map(str, values[:4])))
        raise ValueError(expected(name, "tensors with rows, or the same value in every batch", got, _JOIN))
    return first


def _cat(tensors: Sequence[Tensor], name: str) -> Tensor:
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1:
        got = Words(" and ".join(f"{str(tensor.dtype)[6:]} {tuple(tensor.shape)}" for tensor in tensors[:4]))
        fix = f"{_JOIN} For tokens: join=fullrank.preflight.pad_tokens(-100)."
        raise ValueError(expected(name, "tensors that differ in their number of rows alone", got, fix))
    return torch.cat(list(tensors))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensors, value)))


def _remake(batch: Any, values: Any) -> Any:
    """Return a container like ``batch`` with other values."""
    if hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*values)
    return type(batch)(values)
