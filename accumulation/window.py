"""Windows of micro-batches, and how many terms a summed loss has in one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.group import Group, is_initialized, resolve_group
from ..distributed.header import agree
from ..errors import Words, attempt, check_count, check_int, expected

B = TypeVar("B")


def windows(loader: Iterable[B], size: int) -> Iterator[list[B]]:
    """Cut an iterable of micro-batches into lists of ``size``, the last one shorter when they do not divide.

    Equal to ``itertools.batched`` of Python 3.12, with lists. :func:`accumulate` takes one list per optimizer step: it
    has to see all labels of a window before the first backward.

    Args:
        loader: any iterable of micro-batches, such as a ``DataLoader``. On every rank it must give the same number of
            windows, as a ``DistributedSampler`` does.
        size: micro-batches per window, at least 1.

    Raises:
        TypeError: when ``loader`` is not iterable or ``size`` not an int.
        ValueError: when ``size`` is less than 1.

    Example:
        >>> list(windows("abcd", 3))
        [['a', 'b', 'c'], ['d']]
    """
    check_count("size", size, 1)
    if not isinstance(loader, Iterable):
        raise TypeError(expected("loader", "an iterable of micro-batches", loader, "Pass the DataLoader."))
    return _windows(loader, size)


def _windows(loader: Iterable[B], size: int) -> Iterator[list[B]]:
    window: list[B] = []
    for micro_batch in loader:
        window.append(micro_batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def count_valid_tokens(
    micro_batches: Sequence[Any],
    *,
    key: str | tuple[str, ...] = "labels",
    shift: bool = True,
    ignore_index: int = -100,
    group: Group = None,
) -> int:
    """Count the tokens that a language model's loss will use in a window, over all ranks.

    Equal to ``sum((batch[key][..., 1:] != ignore_index).sum() for batch in micro_batches)``, added over the ranks.

    Args:
        micro_batches: the window, a list of mappings, or of objects with attributes.
        key: where the labels are. Of several keys the first that a micro-batch has, and that is not None, is used, for
            each micro-batch anew: ``("labels", "target_tokens")``.
        shift: a causal loss predicts each token from those before it, so the first label of a row is never a target
            and is not counted. False for labels that are shifted already, or before the sequence was cut over ranks.
        ignore_index: the label that does not count.
        group: None for the default group, a ``ProcessGroup``, or a ``DeviceMesh``: the ranks that hold *different*
            tokens. With tensor parallelism that is the data-parallel group, or every token counts several times.

    Returns:
        The same int on every rank, exact up to 2**53. Without a process group, this process's count.

    Raises:
        TypeError: when ``micro_batches`` has no length, or labels are not a plain tensor of integers.
        ValueError: when a micro-batch has none of the keys; when the other arguments differ between ranks.

    Distributed:
        One collective of 64 bytes. Errors are raised on every rank.

    Example:
        >>> import torch
        >>> count_valid_tokens([{"labels": torch.tensor([[5, -100, 7, 8], [1, 2, -100, -100]])}])
        3
    """
    rule = TokenRule(key, shift, ignore_index)
    resolved = resolve_group(group) if group is not None or is_initialized() else None
    if resolved is None or dist.get_world_size(resolved) == 1:
        return int(rule.check().total(check_window(micro_batches)))
    total, error = attempt(lambda: rule.check().total(check_window(micro_batches)))
    agreed = agree("count_valid_tokens", resolved, error=error, facts={"rule": rule}, totals=(total or 0.0,))
    return int(math.fsum(agreed.totals[:, 0].tolist()))


class TokenRule(NamedTuple):
    """Which labels count: the arguments of :func:`count_valid_tokens`."""

    key: str | tuple[str, ...] = "labels"
    shift: bool = True
    ignore_index: int = -100

    def check(self) -> TokenRule:
        """Return the rule itself, or raise TypeError or ValueError for bad arguments."""
        keys = self.keys
        if not keys or not all(isinstance(key, str) for key in keys):
            raise TypeError(expected("key", "a string or a tuple of strings", self.key))
        if not isinstance(self.shift, bool):
            raise TypeError(expected("shift", "True or False", self.shift))
        check_int("ignore_index", self.ignore_index)
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys in order of preference."""
        return tuple(self.key) if isinstance(self.key, (tuple, list)) else (self.key,)

    def total(self, micro_batches: Sequence[Any]) -> float:
        """Return the number of valid tokens in all of ``micro_batches`` on this rank; one transfer from the device."""
        return add_counts(micro_batches, self.num_valid)

    def num_valid(self, micro_batch: Any) -> Tensor:
        """Return the number of valid tokens in one micro-batch, an int64 scalar on the labels' device."""
        labels = self.labels(micro_batch)
        if not isinstance(labels, Tensor) or hasattr(labels, "full_tensor"):
            fix = "Use torch.as_tensor." if not isinstance(labels, Tensor) else "Pass its local part."
            raise TypeError(expected("labels", "a plain torch.Tensor", labels, fix))
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise TypeError(
                expected("labels", "integers", labels, "Pass class indices, ignore_index where none counts.")
            )
        if self.shift and labels.ndim == 0:
            raise ValueError(expected("labels", "a dimension of tokens", labels, "Pass shift=False for single labels."))
        return ((labels[..., 1:] if self.shift else labels) != self.ignore_index).sum()

    def labels(self, micro_batch: Any) -> Any:
        """Return what the first key present holds."""
        for key in self.keys:
            found = micro_batch.get(key) if isinstance(micro_batch, Mapping) else getattr(micro_batch, key, None)
            if found is not None:
                return found
        held = list(micro_batch) if isinstance(micro_batch, Mapping) else type(micro_batch).__name__
        raise ValueError(
            expected("micro-batch", f"one of the keys {', '.join(map(repr, self.keys))}", held, "Pass key.")
        )


def check_window(micro_batches: Iterable[B]) -> list[B]:
    """Return the micro-batches of one window as a list, or raise TypeError when they are not one yet."""
    if isinstance(micro_batches, (Mapping, str)):
        raise TypeError(
            expected("micro_batches", "a list of micro-batches", micro_batches, "Pass [batch] for one batch.")
        )
    if not (isinstance(micro_batches, Sized) and isinstance(micro_batches, Iterable)):
        fix = "A window is counted before its first backward. Use: for micro_batches in windows(loader, size)."
        kind = Words(f"a {type(micro_batches).__name__}")
        raise TypeError(expected("micro_batches", "a list of micro-batches, with a length", kind, fix))
    return list(micro_batches)


def token_rule(count: object) -> TokenRule | None:
    """Return the rule when ``count`` is :func:`count_valid_tokens`, with keywords bound by functools.partial or not."""
    if count is count_valid_tokens:
        return TokenRule()
    if not (isinstance(count, functools.partial) and count.func is count_valid_tokens):
        return None
    extra = set(count.keywords) - set(TokenRule._fields)
    if count.args or extra:
        fix = "The ranks are given by accumulate(..., group=...)."
        found = Words(", ".join(sorted(extra)) or "positional ones")
        raise TypeError(expected("count", f"the keywords {', '.join(TokenRule._fields)} only", found, fix))
    return TokenRule(**count.keywords).check()


def add_counts(micro_batches: Sequence[B], count: Callable[[B], Tensor | float]) -> float:
    """Return the sum of ``count(micro_batch)`` on this rank, exactly; an error says which one it was."""
    counts: list[Any] = []
    for index, micro_batch in enumerate(micro_batches):
        try:
            counted = count(micro_batch)
        except Exception as error:
            kind = next((kind for kind in (TypeError, ValueError) if isinstance(error, kind)), RuntimeError)
            text = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
            raise kind(f"count of micro-batch {index}: {text}") from error
        counts.append(check_scalar(f"count of micro-batch {index}", counted))
    return math.fsum(check_amount(f"count of micro-batch {i}", number) for i, number in enumerate(as_numbers(counts)))


def check_scalar(name: str, value: Any) -> Tensor | float:
    """Return ``value`` if it is a number, or its only element if it is a real tensor; else raise."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(expected(name, "one element", value, "Sum it first."))
        if value.is_complex():
            raise TypeError(expected(name, "a real number", value))
        return value.detach().reshape(())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(expected(name, "a number or a tensor of one element", value))
    return value


def check_amount(name: str, number: float) -> float:
    """Return ``number`` unchanged, or raise ValueError when it is negative or not finite."""
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(expected(name, "a finite number >= 0", number))
    return number


def as_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return ``values`` as Python numbers, in order and exactly; one transfer for each device and dtype."""
    numbers: list[Any] = list(values)
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            alike.setdefault((value.device, value.dtype), []).append(index)
    for indices in alike.values():
        for index, number in zip(indices, torch.stack([numbers[index] for index in indices]).tolist()):
            numbers[index] = number
    return numbers
