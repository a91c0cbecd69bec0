"""How the targets of a ranking loss are read, and the checks of their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed.header import DeviceCheck
from ..errors import expected, warn
from ..queues.memory_queue import multi_hot_dtype
from .tensors import check_device, has_values


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


Checked = tuple[Tensor, bool, int | None, int | None]


def check_targets(
    logits: Tensor,
    targets: Tensor,
    rule: TargetRule,
    validate_args: bool,
    stored: Callable[[Tensor, Tensor], Tensor] | None,
) -> Checked:
    """Return the targets, and what is known of them: the fields of :class:`Batch` from ``complete`` on."""
    check_device("targets", targets, logits)
    count = logits.shape[0]
    if rule.multi_hot:
        check_exact(targets, 2)
        if tuple(targets.shape) == (count,) and rule.num_classes == 1:
            targets = targets[:, None]
        if tuple(targets.shape) != (count, rule.num_classes):
            raise ValueError(expected("targets", f"multi-hot shape {(count, rule.num_classes)}", targets))
        if validate_args:
            bad = (targets != 0) & (targets != 1) & (targets != rule.ignore_index)
            if bool(bad.any()):
                raise _not_binary(targets[bad][0].item(), rule.ignore_index)
        return targets.to(rule.dtype), False, None, None  # the ranks must send the same dtype
    if tuple(targets.shape) == (count, 1):
        targets = targets[:, 0]
    if tuple(targets.shape) != (count,):
        fix = "Pass multi_hot=True for (N, C) targets of 0 and 1." if targets.ndim == 2 else ""
        raise ValueError(expected("targets", f"shape ({count},), one entry per row of logits", targets, fix))
    check_exact(targets, rule.num_classes)
    given, targets, num_stored = targets, targets.to(torch.int64), None
    # On the host it costs less to know that no row is ignored than to compute as if one were.
    if count and (validate_args or (targets.device.type == "cpu" and has_values(targets))):
        low, high, num_inexact, num_positive, num_stored = _read(logits, given, targets, rule, stored)
        # The common case takes one pass over the targets.
        if low >= 0 and high < max(2, rule.num_classes) and not num_inexact:
            complete = not low <= rule.ignore_index <= high
            return targets, complete, num_positive if complete else None, num_stored
    ignored = targets == rule.ignore_index
    if rule.num_classes > 1:
        if validate_args:
            check_class_range(given, targets, ignored, rule.num_classes, rule.ignore_index)
        return targets, False, None, num_stored
    if validate_args and given.is_floating_point():
        odd = (given != 0) & (given != 1) & (given != rule.ignore_index)
        if bool(odd.any()):
            raise _not_binary(given[odd][0].item(), rule.ignore_index)
    elif validate_args:
        odd = (targets != 0) & (targets != 1) & ~ignored
        if bool(odd.any()):
            values = targets[odd].unique()[:8].tolist()
            found = f"targets: expected 0 or 1 with num_classes=1, got {values}. Every value but 0 counts as positive."
            warn(f"{found} Use (targets > 0).long() for targets of -1 and +1, num_classes=C for indices of C classes.")
    return torch.where(ignored, targets, (targets != 0).to(torch.int64)), False, None, num_stored


def _read(
    logits: Tensor, given: Tensor, targets: Tensor, rule: TargetRule, stored: Callable[[Tensor, Tensor], Tensor] | None
) -> tuple[int, int, int, int | None, int | None]:
    """Return what is known of ``targets``, the int64 form of ``given``; waits for the device once.

    The lowest and the highest target, how many have changed in the conversion, and the two numbers of :class:`Batch`.
    """
    values = [*targets.aminmax()]
    if given.is_floating_point():
        values.append((given != targets).sum())
    if targets.device.type == "cpu":  # nothing waits: what is not needed now may be counted when it is
        return int(values[0]), int(values[1]), int(sum(values[2:])), None, None
    if rule.num_classes == 1:
        values.append(targets.sum())  # the number of ones, where that of the positives is used
    if stored is not None:
        values.append(stored(logits.detach(), targets).sum())
    low, high, *counts = torch.stack(values).tolist()
    num_inexact = counts.pop(0) if given.is_floating_point() else 0
    num_positive = counts[0] if rule.num_classes == 1 else None
    return low, high, num_inexact, num_positive, counts[-1] if stored is not None else None


def check_exact(targets: Tensor, num_classes: int) -> None:
    """Raise TypeError when the dtype of ``targets`` cannot hold the indices of the classes."""
    if targets.is_complex():
        raise TypeError(expected("targets", "integers, bools or floats", targets, "Use targets.long()."))
    if targets.is_floating_point() and num_classes > 2 / torch.finfo(targets.dtype).eps:
        fix = "That dtype rounds whole numbers so large. Keep class indices as integers."
        raise TypeError(expected("targets", f"a dtype that holds the indices of {num_classes} classes", targets, fix))


def check_class_range(given: Tensor, targets: Tensor, ignored: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise ValueError when a class index is outside [0, num_classes) and not ignored, or a float is no whole number.

    ``targets`` is the int64 form of ``given``. Waits for the device.
    """
    bad = ((targets < 0) | (targets >= num_classes)) & ~ignored
    check_of_classes(given, targets, bad, num_classes, ignore_index).read()


def check_of_classes(given: Tensor, targets: Tensor, bad: Tensor, num_classes: int, ignore_index: int) -> DeviceCheck:
    """Return whether a class index is ``bad``, or a float is no whole number; ``targets`` is the int64 form."""
    bad = bad | (given != targets) if given.is_floating_point() else bad

    def error() -> Exception:
        first = given[bad][0].item()
        what = f"class indices in [0, {num_classes}) or ignore_index={ignore_index}"
        fix = "Class indices start at 0; rows to leave out have ignore_index for a target."
        if first != first or first % 1:
            fix = "Targets are one class each, as whole numbers; rows to leave out have ignore_index for a target."
        return ValueError(expected("targets", what, first, fix))

    return DeviceCheck(bad.any(), error)


def _not_binary(value: float, ignore_index: int) -> ValueError:
    fix = ""
    if value == -1:
        fix = "Use (targets > 0).long() for targets of -1 and +1."
    elif value != value:
        fix = f"Rows without a label have ignore_index for a target: targets.nan_to_num({ignore_index})."
    elif 0 < value < 1:
        fix = "Use (targets > 0.5).long(), or SigmoidFocalLoss for soft targets."
    elif isinstance(value, float):
        fix = "Use (targets > 0).long() if all but 0 are positives, num_classes=C for indices of C classes."
    return ValueError(expected("targets", f"0, 1 or ignore_index={ignore_index}", value, fix))


def may_hold(targets: Tensor, value: int) -> bool:
    """Return False if one pass over the targets shows that none is ``value``; True otherwise, and while compiling."""
    if not has_values(targets) or targets.numel() == 0:
        return True
    low, high = torch.stack(targets.aminmax()).tolist()
    return bool(low <= value <= high)
