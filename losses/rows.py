"""The checks of what a loss is called with, before anything travels: whole batches, then single tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.header import DeviceCheck, combined
from ..errors import Words, check_tensor, expected
from ..kernels import native
from ..kernels.pairs import power_of_two
from ..kernels.registration import check_not_batched
from ..kernels.torch_private import func_transforms_are_active, is_batched, is_followed
from ..queues.memory_queue import multi_hot_dtype


class TargetRule(NamedTuple):
    """How targets are read: number of classes (1 is binary), the ignored value, class indices or multi-hot."""

    num_classes: int
    ignore_index: int = -100
    multi_hot: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of checked targets, the same on every rank."""
        return multi_hot_dtype(self.ignore_index) if self.multi_hot else torch.int64

    def marked(self, codes: Tensor) -> Tensor:
        """Return which multi-hot ``codes`` are positives: those equal to 1, or none if 1 is the ignored value."""
        return (codes == 1) & (codes != self.ignore_index)


class Batch(NamedTuple):
    """Rows of a ranking loss, with what is known about them once :func:`check_batch` has checked them."""

    logits: Tensor  # [N, C]
    targets: Tensor  # [N] int64 indices, 0 and 1 in binary mode, or [N, C] multi-hot codes
    iid_mask: Tensor | None = None  # [N]
    sample_weight: Tensor | None = None  # [N]
    indexes: Tensor | None = None  # [N] int64, the query of each row
    complete: bool = False  # True: no target is ignored. False: not known, which costs one more pass over the targets.
    num_positive: int | None = None  # of a single class; None if the host does not know
    num_stored: int | None = None  # rows that may enter a queue; None if the host does not know
    over_ranks: bool = False  # True for the rows of several ranks
    rule: TargetRule = TargetRule(1)  # how the targets are read
    check: DeviceCheck | None = None  # checks of values that the host has not read
    unread: tuple[float | Tensor, ...] | None = None  # :attr:`counts` on the device, where ``check`` is

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    @property
    def counts(self) -> tuple[float | Tensor, ...]:
        """What :meth:`of_all` adds over the ranks: rows ignored, or 1 if some may be; positive; stored; or NaN."""
        if not self.targets.shape[0]:
            return 0.0, 0.0, 0.0
        if self.unread is not None:
            return self.unread
        positive, stored = self.num_positive, self.num_stored
        known = math.nan if positive is None else positive, math.nan if stored is None else stored
        return not self.complete, *known

    @staticmethod
    def of_all(tensors: Sequence[Any], counts: Sequence[Sequence[float]], rule: TargetRule) -> Batch:
        """Return the rows of all ranks, from the gathered tensors and the :attr:`counts` of each rank."""
        ignored, positive, stored = map(sum, [*zip(*counts)][:3])
        # A number that a rank does not know is NaN. Without rows several classes add up to 0 positives too.
        has_number = ignored == 0 and rule.num_classes == 1 and positive == positive
        num_positive, num_stored = int(positive) if has_number else None, int(stored) if stored == stored else None
        logits, targets, iid_mask, weight, indexes = tensors
        known = ignored == 0, num_positive, num_stored
        return Batch(logits, targets, iid_mask, weight, indexes, *known, True, rule)

    def take(self, index: Tensor) -> Batch:
        iid_mask, weight, indexes = (None if tensor is None else tensor[index] for tensor in self.tensors[2:])
        return Batch(self.logits[index], self.targets[index], iid_mask, weight, indexes, self.complete, rule=self.rule)


TENSORS = Batch._fields[:5]  # the names of the row-aligned tensors


def check_batch(
    given: Batch,
    rule: TargetRule,
    *,
    validate_args: bool = True,
    stored: Callable[[Tensor, Tensor], Tensor] | None = None,
    weight_dtype: torch.dtype = torch.float32,
    defers: bool = False,
) -> Batch:
    """Return the rows that the caller passed as ``given``, checked, or raise TypeError or ValueError.

    ``stored(logits, targets)`` says which rows may enter a queue. With ``defers`` no value is read: ``check`` and
    ``unread`` of the batch travel with a header. The weights are at least in ``weight_dtype``: float64 if they travel,
    so that all ranks have the same dtype.
    """
    logits, targets, iid_mask, sample_weight, indexes = tensors = given[:5]
    check_tensor("logits", logits)
    check_tensor("targets", targets)
    check_not_batched(*tensors)
    validate_args = validate_args and has_values(logits)
    if not logits.is_floating_point():
        raise TypeError(expected("logits", "a floating-point tensor", logits, "Pass raw scores."))
    logits, targets = in_memory(logits), in_memory(targets)
    if logits.ndim == 1 and rule.num_classes == 1:
        logits = logits[:, None]  # a view: the gradient has the shape of the input
    if logits.ndim != 2 or logits.shape[1] != rule.num_classes:
        fix = "Flatten leading dimensions; for binary scores (N,) use num_classes=1."
        if rule.num_classes == 1 and logits.ndim == 2:
            fix = "Use num_classes=C for C classes; of two columns for one label pass logits[:, 1:] - logits[:, :1]."
        shape = f"(N, {rule.num_classes})" + (" or (N,)" if rule.num_classes == 1 else "")
        raise ValueError(expected("logits", f"shape {shape}", logits, fix))
    if logits.device.type != "cpu" and has_values(logits) and not has_float64(logits.device):
        what, device = "a device with float64, in which the sums over a pool are made", Words(f"one on {logits.device}")
        raise TypeError(expected("logits", what, device, "Use logits.cpu(): the gradient comes back to the device."))
    checked = _check_targets(logits, targets, rule, validate_args, stored, defers)
    if iid_mask is None and sample_weight is None and indexes is None:
        return checked
    checks = [checked.check]
    if iid_mask is not None:
        _check_row_tensor("iid_mask", iid_mask, logits)
        if iid_mask.dtype != torch.bool:
            fix = "Pass the query of each row as indexes=. If this is a mask, use iid_mask.bool()."
            if iid_mask.is_floating_point():
                fix = "Weights go to sample_weight=."
            raise TypeError(expected("iid_mask", "a bool tensor", iid_mask, fix))
    if sample_weight is not None:
        sample_weight, check = weight_of_rows(sample_weight, logits, "logits", validate_args, weight_dtype)
        if check is not None and defers:
            checks.append(check)
        elif check is not None:
            check.read()
    if indexes is not None:
        indexes = checked_indexes(indexes, logits)
        if logits.shape[1] != 1:
            fix = "A query ranks its rows by one score; without indexes the columns are classes."
            raise ValueError(expected("logits", "shape (N, 1) with indexes", logits, fix))
    check = combined(checks)
    return checked._replace(iid_mask=iid_mask, sample_weight=sample_weight, indexes=indexes, check=check)


def in_memory(numbers: Tensor) -> Tensor:
    """Return a copy of a negated view, and of zeros without memory, which neither numpy nor C reads."""
    if not torch.compiler.is_compiling() and (numbers.is_neg() or numbers._is_zerotensor()):
        return numbers.clone()
    return numbers


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return False on a device without float64, such as those of type mps."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def _check_targets(
    logits: Tensor,
    targets: Tensor,
    rule: TargetRule,
    validate_args: bool,
    stored: Callable[[Tensor, Tensor], Tensor] | None,
    defers: bool,
) -> Batch:
    """Return the logits with the checked targets and what is known about them."""
    if targets.device != logits.device:
        check_device("targets", targets, logits)
    count, is_int64 = logits.shape[0], targets.dtype is torch.int64
    if rule.multi_hot:
        check_exact(targets, 2)
        if tuple(targets.shape) == (count,) and rule.num_classes == 1:
            targets = targets[:, None]
        if tuple(targets.shape) != (count, rule.num_classes):
            raise ValueError(expected("targets", f"multi-hot shape {(count, rule.num_classes)}", targets))
        check = _binary_check(targets, rule) if validate_args else None
        if check is not None and not defers:
            check.read()
        # The ranks must send the same dtype.
        return Batch(logits, targets.to(rule.dtype), rule=rule, check=check if defers else None)
    if tuple(targets.shape) == (count, 1):
        targets = targets[:, 0]
    if tuple(targets.shape) != (count,):
        fix = "Pass multi_hot=True for (N, C) targets of 0 and 1." if targets.ndim == 2 else ""
        raise ValueError(expected("targets", f"shape ({count},), one entry per row of logits", targets, fix))
    raw = targets
    if not is_int64:
        check_exact(targets, rule.num_classes)
        targets = targets.to(torch.int64)
    is_binary, is_host = rule.num_classes == 1, targets.device.type == "cpu"

    def check_of_values() -> DeviceCheck:
        if is_binary:  # floats before the conversion cuts them off, integers in a dtype that holds ignore_index
            return _binary_check(raw if raw.is_floating_point() else targets, rule)
        bad = ((targets < 0) | (targets >= rule.num_classes)) & (targets != rule.ignore_index)
        return class_range_check(raw, targets, bad, rule.num_classes, rule.ignore_index)

    if count and validate_args and not is_host:
        numbers = _count_on_device(raw, targets, rule)
        to_store = None if stored is None else stored(logits.detach(), targets).sum(dtype=torch.float64)
        if defers and rule.ignore_index < 2**63 - 1:  # int64 has no end for the interval of that one
            flag = torch.ne(numbers.sum(), count, out=targets.new_empty(()))  # in the dtype of the header
            check = DeviceCheck(flag, lambda: check_of_values().error())
            unread = numbers[0], numbers[1] if is_binary else math.nan, math.nan if to_store is None else to_store
            return Batch(logits, targets, rule=rule, check=check, unread=unread)
        found = (numbers if to_store is None else torch.cat([numbers, to_store[None]])).tolist()
        num_stored = None if to_store is None else int(found.pop())
        if sum(found) == count:
            num_positive = int(found[1]) if is_binary and not found[0] else None
            return Batch(logits, targets, None, None, None, not found[0], num_positive, num_stored, rule=rule)
    elif count and is_host and (validate_args or has_values(targets)):
        # It is cheaper to find out that no row is ignored than to compute as if one were. One pass over the targets.
        low, high = map(int, targets.aminmax())
        is_exact = not raw.is_floating_point() or bool((raw == targets).all())
        if low >= 0 and high < max(2, rule.num_classes) and is_exact:
            return Batch(logits, targets, complete=not low <= rule.ignore_index <= high, rule=rule)
    if validate_args:
        check_of_values().read()
    if is_binary:
        ignored = targets == rule.ignore_index
        targets = torch.where(ignored, targets, (targets != 0).to(torch.int64))
    return Batch(logits, targets, rule=rule)


def _count_on_device(raw: Tensor, targets: Tensor, rule: TargetRule) -> Tensor:
    """Count the targets that are ignored, and valid or of a single class 1, in float64; all are valid if they add to N.

    ``targets`` is the int64 form of ``raw``.
    """
    if rule.num_classes == 1 and rule.ignore_index not in (0, 1):
        # float64 holds both exactly
        dtype = torch.float64 if raw.is_floating_point() else torch.int64
        codes = _codes(rule.ignore_index, dtype, targets.device)
        return ((raw if raw.is_floating_point() else targets) == codes).sum(dim=1, dtype=torch.float64)
    is_beyond = targets >= _edges(rule.num_classes, rule.ignore_index, targets.device)  # [2, K, N]
    if raw.is_floating_point():
        is_beyond = is_beyond & (raw == targets)
    return torch.sub(*is_beyond.sum(dim=2, dtype=torch.float64).unbind())


@functools.lru_cache(maxsize=8)
def _codes(ignore_index: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values that a binary target may have, (3, 1); a blocking copy, so that any stream can use it."""
    return torch.tensor([[ignore_index], [1], [0]], dtype=dtype, device="cpu").to(device)


@functools.lru_cache(maxsize=8)
def _edges(num_classes: int, ignored: int, device: torch.device) -> Tensor:
    """Return the starts and the ends of disjoint intervals of int64 (2, K, 1): the ignored value, then valid values."""
    pieces = [(ignored, min(ignored + 1, 2**63 - 1))]
    for start, end in [(1, 2), (0, 1)] if num_classes == 1 else [(0, num_classes)]:
        pieces += [(start, ignored), (ignored + 1, end)] if start <= ignored < end else [(start, end)]
    return torch.tensor(pieces, device="cpu").t()[:, :, None].to(device)


def _binary_check(targets: Tensor, rule: TargetRule) -> DeviceCheck:
    """Return the check that every target is 0, 1 or ignored."""
    odd = (targets != 0) & (targets != 1) & (targets != rule.ignore_index)

    def error() -> Exception:
        value = targets[odd][0].item()
        if value == -1:
            fix = "Use (targets > 0).long() for targets of -1 and +1, ignore_index=-1 if it marks rows without a label."
        elif value != value:
            fix = f"Rows without a label have ignore_index for a target: targets.nan_to_num({rule.ignore_index})."
        elif 0 < value < 1:
            fix = "Use (targets > 0.5).long(), or SigmoidFocalLoss for soft targets."
        else:
            fix = "Use (targets > 0).long() if all but 0 are positives"
            fix += "." if rule.multi_hot else ", num_classes=C for indices of C classes."
        return ValueError(expected("targets", f"0, 1 or ignore_index={rule.ignore_index}", value, fix))

    return DeviceCheck(odd.any(), error)


def check_exact(targets: Tensor, num_classes: int) -> None:
    """Raise TypeError when the dtype of ``targets`` cannot represent every class index exactly."""
    if targets.is_complex():
        raise TypeError(expected("targets", "integers, bools or floats", targets, "Use targets.long()."))
    if targets.is_floating_point() and num_classes > 2 / torch.finfo(targets.dtype).eps:
        fix = "That dtype rounds whole numbers so large. Keep class indices as integers."
        raise TypeError(expected("targets", f"a dtype that holds the indices of {num_classes} classes", targets, fix))


def class_range_check(raw: Tensor, targets: Tensor, bad: Tensor, num_classes: int, ignore_index: int) -> DeviceCheck:
    """Return the check that no class index is ``bad`` and every float is whole; ``targets`` is ``raw`` in int64."""
    bad = bad | (raw != targets) if raw.is_floating_point() else bad

    def error() -> Exception:
        first = raw[bad][0].item()
        what = f"class indices in [0, {num_classes}) or ignore_index={ignore_index}"
        fix = "Class indices start at 0; rows to leave out have ignore_index for a target."
        if first != first or first % 1:
            fix = "Targets are one class each, as whole numbers; rows to leave out have ignore_index for a target."
        return ValueError(expected("targets", what, first, fix))

    return DeviceCheck(bad.any(), error)


def weight_and_check(
    sample_weight: Tensor, dtype: torch.dtype, validate_args: bool
) -> tuple[Tensor, DeviceCheck | None]:
    """Return the weights detached, at least in ``dtype``, and the check that all are finite and >= 0, None for none."""
    if sample_weight.is_complex() or sample_weight.dtype == torch.bool:
        fix = "Use sample_weight.float()." if sample_weight.dtype == torch.bool else ""
        raise TypeError(expected("sample_weight", "a tensor of real numbers", sample_weight, fix))
    sample_weight = in_memory(sample_weight.detach())
    sample_weight = sample_weight.to(torch.promote_types(sample_weight.dtype, dtype))
    if not (validate_args and has_values(sample_weight) and sample_weight.numel()):
        return sample_weight, None
    low, high = sample_weight.aminmax()  # NaN if one is

    def error() -> Exception:
        bad = sample_weight[~(sample_weight.isfinite() & (sample_weight >= 0))]
        return ValueError(expected("sample_weight", "finite numbers >= 0", bad[0].item()))

    return sample_weight, DeviceCheck(~((low >= 0) & (high < math.inf)), error)


def checked_indexes(indexes: Tensor, logits: Tensor) -> Tensor:
    """Return the query of each row of ``logits`` as int64, or raise TypeError or ValueError."""
    _check_row_tensor("indexes", indexes, logits)
    if not is_integer(indexes):
        raise TypeError(expected("indexes", "a tensor of integers", indexes, "Use indexes.long()."))
    return indexes.to(torch.int64)  # the ranks must send the same dtype


def weight_of_rows(
    sample_weight: Tensor | None,
    rows: Tensor,
    rows_name: str,
    validate_args: bool,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor | None, DeviceCheck | None]:
    """Return the weights of ``rows`` as :func:`weight_and_check` does, None for no weights."""
    if sample_weight is None:
        return None, None
    _check_row_tensor("sample_weight", sample_weight, rows, rows_name)
    return weight_and_check(sample_weight, dtype, validate_args)


def _check_row_tensor(name: str, value: Tensor, rows: Tensor, rows_name: str = "logits") -> None:
    check_tensor(name, value, "a tensor or None")
    count = rows.shape[0]
    if tuple(value.shape) != (count,):
        fix = f"Use {name}.squeeze(1)." if tuple(value.shape) == (count, 1) else ""
        raise ValueError(expected(name, f"shape ({count},), one entry per row of {rows_name}", value, fix))
    check_device(name, value, rows, rows_name)


def check_device(name: str, value: Tensor, rows: Tensor, rows_name: str = "logits") -> None:
    """Raise ValueError when ``value`` is not on the device of ``rows``, the argument called ``rows_name``."""
    if value.device != rows.device:
        what, fix = f"a tensor on {rows.device}, as {rows_name}", f"Use {name}.to({rows_name}.device)."
        raise ValueError(expected(name, what, Words(f"one on {value.device}"), fix))


def checked_embeddings(name: str, rows: Tensor, width: int | None = None) -> Tensor:
    """Return ``rows`` (N, D) of floats in memory, or raise TypeError or ValueError; ``width`` is the D of a queue."""
    check_tensor(name, rows)
    if func_transforms_are_active():
        check_not_batched(rows)
    if hasattr(rows, "full_tensor"):
        raise TypeError(expected(name, "a plain tensor", rows, f"Pass {name}.full_tensor() or its local rows."))
    if not rows.is_floating_point():  # a quantized one is none either
        raise TypeError(expected(name, "a floating-point tensor", rows, f"Use {name}.float()."))
    if rows.ndim != 2 or rows.shape[1] == 0:
        fix = f"Use {name}.flatten(1)."
        if rows.ndim == 3:
            labels = f" and labels.repeat_interleave({rows.shape[1]})" if name == "embeddings" else ""
            views = f"{name}.flatten(0, 1){labels} if dim 1 is views or tokens, rows of their own"
            fix = f"Use {views}, else {name}.flatten(1)."
        elif rows.ndim < 2:
            fix = f"Use {name}[None] for one row."
        raise ValueError(expected(name, "shape (N, D), D >= 1", rows, fix))
    if width is not None and rows.shape[1] != width:
        fix = "Construct another loss for rows of another width."
        raise ValueError(expected(name, f"shape (N, {width}), as the queue", rows, fix))
    return in_memory(rows)


def check_values(name: str, tensor: Tensor) -> None:
    """Raise RuntimeError when ``tensor`` is on the meta device, for a loss that must read values."""
    if tensor.is_meta:
        raise RuntimeError(expected(name, "a tensor with values", tensor, "It is on the meta device."))


def has_values(tensor: Tensor) -> bool:
    """Return True if a branch may depend on values: not while compiling, on the meta device or under ``torch.vmap``."""
    compiling = torch.compiler.is_compiling() or tensor.is_meta
    return not (compiling or (func_transforms_are_active() and is_batched(tensor)))


def may_hold(targets: Tensor, value: int) -> bool:
    """Return False if one pass over the targets shows that none is ``value``; True otherwise, and while compiling."""
    if not has_values(targets) or targets.numel() == 0:
        return True
    low, high = torch.stack(targets.aminmax()).tolist()
    return bool(low <= value <= high)


def is_integer(tensor: Tensor) -> bool:
    """Return True for integer dtypes; bool is not one of them."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


# The dtype a loss is computed in, from that of its rows: float32 for half precision, whose sums would saturate.
compute_dtype = functools.partial(torch.promote_types, torch.float32)


# Of the largest weight: a smaller one counts as this much, so that quotients and squares of sums are normal numbers.
_LEAST_WEIGHT = {torch.float32: 2.0**-100, torch.float64: 2.0**-500}


def query_weight(weight: Tensor | None, reduction: str) -> Tensor | None:
    """Return the weights of queries for a reduction: in the mean their ratios count, and ``"none"`` has none."""
    if weight is None or reduction == "none":
        return None
    return weight / weight_unit(weight) if reduction == "mean" else weight


def weight_unit(weight: Tensor, dim: int | None = None) -> Tensor:
    """Return the power of two next below the largest weight, a scalar or that along ``dim``, kept."""
    if weight.numel() == 0:
        return weight.new_ones(())
    return power_of_two(weight.amax() if dim is None else weight.amax(dim, keepdim=True))


def scaled_weight(weight: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight / unit`` in ``dtype``. A weight > 0 stays > 0: a positive of no weight would be ranked 0 / 0."""
    scaled = (weight / unit).to(dtype).clamp_min_(_LEAST_WEIGHT[dtype])
    return scaled.masked_fill_(weight == 0, 0.0)


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows (N, D) of length 1 in the dtype of the computation; rows of zeros stay zeros."""
    rows = rows.to(compute_dtype(rows.dtype))
    if not (is_followed() or (rows.requires_grad and torch.is_grad_enabled())):
        unit = native.unit_rows(rows)
        if unit is not None:
            return unit
    largest = rows.detach().abs().amax(dim=1, keepdim=True)  # divided by it, no square overflows
    scaled = rows / torch.where(largest > 0, largest, 1.0)
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / length.clamp_min(1.0)
