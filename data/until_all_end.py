"""Loaders with different numbers of batches: a process whose loader has ended continues with batches without rows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

from ..distributed.group import Group, group_ranks, is_initialized, resolve_group
from ..distributed.header import Offer, agree_on
from ..errors import RankValueError, Words, expected

T = TypeVar("T")

_FIX = "Pass empty=, a batch without rows."
_END: Any = object()
_PLAIN = (str, bytes, int, float)


def until_all_end(loader: Iterable[T], group: Group = None, empty: T | None = None) -> Iterable[T]:
    """Iterate over a loader until those of all processes have ended.

    Equal to ``itertools.chain(loader, itertools.repeat(empty, n))``, where the longest loader has n batches more. If
    processes take different numbers of steps, those with more steps hang in a collective that the others never join.
    The losses of this package accept batches without rows, and their gradient remains that of one process with the rows
    of all; torch's losses return NaN for them.

    Args:
        loader: gives the batches of this process; iterated again in each epoch.
        group: process group or device mesh of the data-parallel ranks; None for the default group.
        empty: what a process yields after its last batch. None is that batch without rows: tensors, arrays, and lists
            of strings and numbers are cut in dim 0; dicts, and lists and tuples of others, keep their form. Batches
            with other objects require it, and so do processes without a batch.

    Returns:
        An iterable for any number of epochs, without a length.

    Raises:
        RankError: on every rank, when the loader of a process raises, or when a process has nothing to yield.

    Distributed:
        One collective, a header, before each step, and one at the end, so that every rank raises an error in one
        loader. Models that do not accept a batch without rows, such as ``torch.nn.BatchNorm1d`` in training mode,
        cannot use this. One process iterates the loader as it is.

    Example:
        >>> import torch
        >>> batches = [torch.ones(2, 3), torch.ones(1, 3)]
        >>> [len(batch) for batch in until_all_end(batches)]
        [2, 1]
    """
    return _UntilAllEnd(loader, group, empty)


class _UntilAllEnd(Generic[T]):
    def __init__(self, loader: Iterable[T], group: Group, empty: T | None) -> None:
        self.loader, self.group, self.empty = loader, group, empty
        self._empty_batch: T | None = None  # the last batch without rows, also for the next epoch

    def __iter__(self) -> Iterator[T]:
        group = resolve_group(self.group) if self.group is not None or is_initialized() else None
        if group is None or group.size() == 1:
            yield from self.loader
            return
        batches: Iterator[T] | None = None

        def bring() -> Offer[Any]:
            nonlocal batches
            batches = iter(self.loader) if batches is None else batches
            batch = next(batches, _END)
            if batch is _END:
                batches = iter(())
                empty = self._empty_batch if self.empty is None else self.empty
                return Offer(copy.deepcopy(empty), totals=(0.0, float(empty is None)))  # a loop may change its batches
            if self.empty is None:
                self._empty_batch = without_rows(batch)
            return Offer(batch, totals=(1.0, 0.0))

        while True:
            agreed = agree_on("until_all_end", group, bring)
            has_batch, lacks, *_ = zip(*agreed.totals)
            if not any(has_batch):
                return
            if any(lacks):
                ranks = ", ".join(str(rank) for rank, lacks_batch in zip(group_ranks(group), lacks) if lacks_batch)
                what = "a batch in the loader of every rank"
                raise RankValueError(expected("until_all_end", what, Words(f"none on rank {ranks}"), _FIX))
            yield agreed.value


def without_rows(batch: Any) -> Any:
    """Return ``batch`` cut to no rows, without a reference to its memory."""
    if isinstance(batch, Tensor):
        return batch[:0].detach().clone() if batch.ndim else batch
    if isinstance(batch, (list, tuple)) and all(isinstance(value, _PLAIN) for value in batch):
        return batch if hasattr(batch, "_fields") else batch[:0]
    if (items := items_of(batch)) is not None:
        return with_items(batch, {key: without_rows(value) for key, value in items.items()})
    if batch is None or isinstance(batch, _PLAIN):
        return batch
    if isinstance(getattr(batch, "shape", None), tuple) and hasattr(batch, "copy"):  # a numpy array
        return batch[:0].copy() if batch.shape else batch
    raise TypeError(expected("batch", "tensors, in dicts, lists and tuples", batch, _FIX))


def items_of(batch: Any) -> dict[Any, Any] | None:
    """Return what a container holds; None for anything else."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else None


def with_items(batch: Any, items: dict[Any, Any]) -> Any:
    """Return a container like ``batch`` that holds ``items``."""
    if isinstance(batch, (list, tuple)):
        return type(batch)(*items.values()) if hasattr(batch, "_fields") else type(batch)(items.values())
    if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping):
        return type(batch)(items)  # type: ignore[call-arg]
    changed = copy.copy(batch)  # keeps the attributes of a subclass
    # object's own sets fields of a frozen dataclass, and those that its constructor does not take.
    assign = changed.__setitem__ if isinstance(batch, Mapping) else partial(object.__setattr__, changed)
    for name, value in items.items():
        assign(name, value)
    return changed
