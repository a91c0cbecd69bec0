"""The number of terms that a summed loss has in a window: valid tokens, or the result of a function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.group import Group, header_device, is_initialized, resolve_group
from ..distributed.header import DeviceCheck, Offer, agree_on, public_class, reason_of
from ..errors import Words, check_amount, check_int, expected, is_from_a_check, warn
from ..kernels.documents import SHIFTED_DOCUMENTS, check_tokens, same_document
from .summed_loss import named
from .window import list_micro_batches

B = TypeVar("B")
Count = Callable[[Any], Tensor | float] | Tensor | float

_HOST = torch.device("cpu")
# Relative tolerance between num_items and a count: integers agree exactly, float32 sums of weights do not.
_ROUNDING = 1e-5
# Keys whose name says that their labels are shifted already. "targets" and "labels" may be either.
_SHIFTED_KEYS = frozenset({"target_tokens", "shift_labels", "shifted_labels"})
# The advice for batches such as those of a TensorDataset.
OF_TUPLES = "For batches that are tuples accumulate takes a function: count=lambda batch: (batch[1] != -100).sum()."


def count_valid_tokens(
    micro_batches: Sequence[Any],
    *,
    key: str | tuple[str, ...] = "labels",
    shift: bool | tuple[bool, ...] = True,
    document_ids_key: str | None = None,
    ignore_index: int = -100,
    group: Group = None,
) -> int:
    """Count the tokens that a language model's loss will use in a window, over all ranks.

    Equal to ``sum((batch[key][..., 1:] != ignore_index).sum() for batch in micro_batches)``, added over the ranks.

    Args:
        micro_batches: the window, a list of mappings, or of objects with attributes.
        key: key or attribute of the labels; of several the first that a micro-batch has and that is not None.
        shift: leave out the first label of a row, which a causal loss never predicts. False for labels that are already
            shifted, also before a sequence was cut over ranks. A tuple has a value for each key:
            ``key=("labels", "target_tokens"), shift=(True, False)``. True warns once for labels found under
            ``target_tokens``, ``shift_labels`` or ``shifted_labels``.
        document_ids_key: key of the document ids, integers of the shape of the labels, if a row consists of several
            documents: the first token of a document is not a target. Requires ``shift=True``.
        ignore_index: the label that is not counted.
        group: the ranks that hold *different* tokens, under tensor parallelism the data-parallel group.

    Returns:
        The same int on every rank, exact up to 2**53. Without a process group, this process's count.

    Raises:
        TypeError, ValueError: on every rank, for micro-batches without a length, or with none of the keys; for labels
            or document ids that are no plain tensors of integers of one shape; for arguments that differ between ranks.

    Distributed: one collective, the header.

    Example:
        >>> import torch
        >>> count_valid_tokens([{"labels": torch.tensor([[5, -100, 7, 8], [1, 2, -100, -100]])}])
        3
    """
    rule = TokenRule(key, shift, document_ids_key, ignore_index)
    ranks = resolve_group(group) if group is not None or is_initialized() else None

    def bring() -> Offer[None]:
        counts = counts_of(list_micro_batches(micro_batches), rule.check().num_valid)
        return Offer(None, {"rule": rule}, totals=sums_of([counts], several))

    several = ranks if ranks is not None and ranks.size() > 1 else None
    agreed = agree_on("count_valid_tokens", several, bring)
    return int(math.fsum(number for number, *_ in agreed.totals))


class TokenRule(NamedTuple):
    """Which labels count: the arguments of :func:`count_valid_tokens`."""

    key: str | tuple[str, ...] = "labels"
    shift: bool | tuple[bool, ...] = True
    document_ids_key: str | None = None
    ignore_index: int = -100

    def keys_and_shifts(self) -> tuple[Sequence[str], Sequence[bool]]:
        """Return the keys in order of preference, and for each whether its labels are shifted when they are counted."""
        keys = self.key if isinstance(self.key, (tuple, list)) else (self.key,)
        return keys, self.shift if isinstance(self.shift, (tuple, list)) else (self.shift,) * len(keys)

    def check(self) -> TokenRule:
        keys, shifts = self.keys_and_shifts()
        if not keys or not all(isinstance(key, str) for key in keys):
            raise TypeError(expected("key", "a string or a tuple of strings", self.key, OF_TUPLES))
        if not all(isinstance(shift, bool) for shift in shifts):
            raise TypeError(expected("shift", "True or False, or a tuple with one for each key", self.shift))
        if len(shifts) != len(keys):
            raise ValueError(expected("shift", f"one for each of the {len(keys)} keys", self.shift))
        if not isinstance(self.document_ids_key, (str, type(None))):
            raise TypeError(expected("document_ids_key", "a string or None", self.document_ids_key))
        if self.document_ids_key is not None and not all(shifts):
            raise ValueError(expected("shift", "True with document_ids_key", self.shift, SHIFTED_DOCUMENTS))
        check_int("ignore_index", self.ignore_index)
        return self

    def labels(self, micro_batch: Any) -> tuple[Tensor, bool]:
        """Return the labels of one micro-batch, and whether they are shifted when they are counted."""
        keys, shifts = self.keys_and_shifts()
        for key, shift in zip(keys, shifts):
            if (found := _entry(micro_batch, key)) is None:
                continue
            if shift and key in _SHIFTED_KEYS:
                _warn_of_shift(key)
            labels = check_tokens("labels", found)
            if shift and labels.ndim == 0:
                fix = "Pass shift=False for single labels."
                raise ValueError(expected("labels", "a dimension of tokens", labels, fix))
            return labels, shift
        fix = OF_TUPLES if isinstance(micro_batch, (tuple, list, Tensor)) else "Pass key."
        raise _missing(micro_batch, f"one of the keys {', '.join(map(repr, keys))}", fix)

    def token_range(self, micro_batches: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
        """Return the least and the largest label that is not ignored, or 0, on their device; None for no labels."""
        labels = torch.cat([self.labels(micro_batch)[0].flatten() for micro_batch in micro_batches])
        return torch.where(labels == self.ignore_index, 0, labels).aminmax() if len(labels) else None

    def num_valid(self, micro_batch: Any) -> Tensor:
        """Return the number of valid tokens in one micro-batch, an int64 scalar on the labels' device."""
        labels, shift = self.labels(micro_batch)
        valid = (labels[..., 1:] if shift else labels) != self.ignore_index
        if self.document_ids_key is not None:
            ids = _entry(micro_batch, self.document_ids_key)
            if ids is None:
                fix = "Give every micro-batch the document of each token."
                raise _missing(micro_batch, f"the key {self.document_ids_key!r}", fix)
            valid = valid & same_document(self.document_ids_key, ids, labels)
        return valid.sum()


@functools.cache
def _warn_of_shift(key: str) -> None:
    warn(
        f"count_valid_tokens: shift=True does not count the first label of each row, but {key!r} "
        "says that they are shifted already. One token a row is missing then. Pass shift=False; with several keys a "
        'tuple, such as key=("labels", "target_tokens"), shift=(True, False).'
    )


def _entry(micro_batch: Any, key: str) -> Any:
    return micro_batch.get(key) if isinstance(micro_batch, Mapping) else getattr(micro_batch, key, None)


def _missing(micro_batch: Any, what: str, fix: str) -> ValueError:
    got = list(micro_batch) if isinstance(micro_batch, Mapping) else type(micro_batch).__name__
    return ValueError(expected("micro-batch", what, got, fix))


def token_rule(count: object) -> TokenRule | None:
    """Return the rule if ``count`` is :func:`count_valid_tokens`, alone or with keywords bound by functools.partial."""
    if count is count_valid_tokens:
        return TokenRule()
    if not (isinstance(count, functools.partial) and count.func is count_valid_tokens):
        return None
    extra = set(count.keywords) - set(TokenRule._fields)
    if count.args or extra:
        fix = "The ranks are given by accumulate(..., group=...)."
        got = Words(", ".join(sorted(extra)) or "positional ones")
        raise TypeError(expected("count", f"the keywords {', '.join(TokenRule._fields)} only", got, fix))
    return TokenRule(**count.keywords).check()


@dataclass(slots=True)
class Term:
    """One loss of a window: the number of terms that it sums, and its sums; a loss without a name has the name ""."""

    name: str
    fact: object  # what must be equal on all ranks: the number, or how it is counted
    number: float = 0.0  # N, over all ranks and micro-batches
    counts: list[Tensor | float] | None = None  # of this rank's micro-batches; None when the caller passed N
    factor: float = 0.0  # m / N; 0 without terms
    divisors: set[float] = field(default_factory=set)  # numbers of terms by which micro-batches have divided their sums
    weight: float | None = None  # in the loss of the window; None until it is known
    sums: list[Any] = field(default_factory=list)  # of this rank's micro-batches, until they are exchanged
    total: float = 0.0  # the sum over all ranks, of what was exchanged

    def divide(self, counted: Sequence[float], multiplier: float) -> None:
        """Set N, from the counts of all ranks unless the caller passed it, and the factor."""
        if self.counts is not None:
            self.number = math.fsum(counted)
        self.factor = multiplier / self.number if self.number else 0.0


def read_count(count: Any, micro_batches: Sequence[Any], name: str = "") -> Term:
    """Return the loss ``name`` with its number of terms if that was given, or that of each micro-batch."""
    if isinstance(count, (Tensor, int, float)) and not isinstance(count, bool):
        number = float(check_scalar(count, "count", name))
        if not 0 <= number < math.inf:
            check_amount(named("count", name), number)
        # The number covers all ranks. Ranks that pass different numbers have counted only their own rows.
        return Term(name, Words(f"{number:.17g} over all ranks and micro-batches"), number)
    rule = token_rule(count)
    count_terms = count if rule is None else rule.num_valid
    if callable(count_terms):
        # The ranks cannot compare functions: each rank has an object of its own.
        return Term(name, rule or Words("a function"), counts=counts_of(micro_batches, count_terms, name))
    what = "a function of a micro-batch, count_valid_tokens, or the number of terms over all ranks"
    fix = f"For mappings pass functools.partial(count_valid_tokens, key={count!r}). {OF_TUPLES}"
    raise TypeError(expected(named("count", name), what, count, fix if isinstance(count, str) else ""))


def counts_of(micro_batches: Sequence[B], count: Callable[[B], Tensor | float], name: str = "") -> list[Tensor | float]:
    """Return ``count(micro_batch)`` of each on this rank, not yet read; an error names the micro-batch."""
    counts: list[Tensor | float] = []
    for index, micro_batch in enumerate(micro_batches):
        try:
            counted = count(micro_batch)
        except Exception as error:
            kind, label = public_class(error), named("count", name, index)
            if is_from_a_check(error):
                raise kind(f"{label}: {error}") from None
            # Name the line of the caller's function instead of a traceback on every rank. The first frame is ours.
            place, trace = "", error.__traceback__ and error.__traceback__.tb_next
            if trace is not None:
                code = trace.tb_frame.f_code
                place = f", raised in {code.co_name} ({code.co_filename}, line {trace.tb_lineno})"
            text = f"{type(error).__name__}: " + reason_of(error).removeprefix(f"{type(error).__name__}: ")
            raise kind(expected(label, "a number", Words(text + place))) from None
        counts.append(check_scalar(counted, "count", name, index))
    return counts


def check_amounts(
    values: Sequence[Tensor | float],
    name_of: Callable[[int], str],
    ranks: ProcessGroup | None,
    counts: Sequence[Tensor | float] = (),
) -> DeviceCheck | None:
    """Check that all ``values`` are finite and >= 0: now, or with the header of ``ranks`` if they travel with it.

    ``name_of`` takes the place of a value. With ``counts`` each value must be equal to its count.
    """
    if ranks is None or not _travel([*values, *counts], ranks):
        numbers = as_numbers(values)
        for place, (number, wanted) in enumerate(zip(numbers, as_numbers(counts) if counts else numbers)):
            if not 0 <= number < math.inf:
                check_amount(name_of(place), number)
            if not abs(number - wanted) <= _ROUNDING * wanted:
                what = f"{wanted:.17g}, the count of the micro-batch"
                fix = "Count exactly the terms that the loss is a mean of: after the shift, without those ignored."
                raise ValueError(expected(name_of(place), what, number, fix))
        return None
    stacked = _stacked(values, device := header_device(ranks))
    is_right = (stacked >= 0) & stacked.isfinite()
    if counts:
        wanted_ones = _stacked(counts, device)
        is_right &= (stacked - wanted_ones).abs() <= _ROUNDING * wanted_ones

    def error() -> Exception:
        try:
            check_amounts(values, name_of, None, counts)
        except Exception as found:
            return found
        raise AssertionError(values)

    return DeviceCheck(~is_right.all(), error)


def sums_of(lists: Sequence[Sequence[Tensor | float]], ranks: ProcessGroup | None) -> list[Tensor | float]:
    """Return the sum of each list, exactly. Sums that the header of ``ranks`` can take from the device stay there."""
    flat = [*chain.from_iterable(lists)]
    if ranks is None or not _travel(flat, ranks):
        numbers = iter(as_numbers(flat))
        return [math.fsum(islice(numbers, len(values))) for values in lists]
    sums: list[Tensor | float] = []
    for values in lists:
        tensors = [value for value in values if isinstance(value, Tensor)]
        rest = math.fsum(value for value in values if not isinstance(value, Tensor))
        total = _stacked(tensors, tensors[0].device).sum(dtype=torch.float64) if tensors else 0.0
        sums.append(total + rest if rest else total)
    return sums


def _stacked(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return (n,) on ``device`` without waiting for it, in float64 unless all have one dtype."""
    scalars = [torch.as_tensor(value).to(device, non_blocking=True) for value in values]
    is_one = len({scalar.dtype for scalar in scalars}) == 1
    return torch.stack(scalars if is_one else [scalar.to(torch.float64) for scalar in scalars])


def _travel(values: Sequence[Tensor | float], ranks: ProcessGroup) -> bool:
    """Whether tensors among ``values`` are where the header of ``ranks`` travels, if that is an accelerator."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or (device := header_device(ranks)) == _HOST:
        return False
    return all(value.device == device for value in tensors)


def check_scalar(value: Any, *name: Any) -> Tensor | float:
    """Return ``value`` if it is a number, or its only element if it is a real tensor; ``name`` as in :func:`named`."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(expected(named(*name), "one element", value, "Sum it first."))
        if value.is_complex():
            raise TypeError(expected(named(*name), "a real number", value))
        value = value.detach()
        return value.reshape(()) if value.ndim else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(expected(named(*name), "a number or a tensor of one element", value))
    return value


def as_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return ``values`` as Python numbers, in order and exactly; one transfer for each dtype of an accelerator."""
    numbers: list[Any] = [*values]
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and value.is_cpu:
            numbers[index] = value.tolist()
        elif isinstance(value, Tensor):
            by_kind.setdefault((value.device, value.dtype), []).append(index)
    for indices in by_kind.values():
        for index, number in zip(indices, torch.stack([numbers[index] for index in indices]).tolist()):
            numbers[index] = number
    return numbers
