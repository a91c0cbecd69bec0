"""The rows given to a ranking loss: what is checked, the checked form of the rows, and draws of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.header import DeviceCheck
from ..errors import Words, check_tensor, expected
from ..kernels.registration import check_not_batched
from ..queues.memory_queue import QueueRows
from .targets import TargetRule, check_targets
from .tensors import check_device, compute_dtype, has_values, is_integer

_SEED = 0x66756C6C  # seed and number of the draw determine the draw


class Batch(NamedTuple):
    """Checked rows: targets as int64 indices (0 and 1 in binary mode) or multi-hot codes, weights in compute dtype."""

    logits: Tensor  # [N, C]
    targets: Tensor  # [N] or [N, C]
    iid_mask: Tensor | None = None  # [N]
    sample_weight: Tensor | None = None  # [N]
    indexes: Tensor | None = None  # [N] int64, the query of each row
    complete: bool = False  # True: no target is ignored. False: not known, which costs one more pass over the targets.
    num_positive: int | None = None  # of a single class; None if the host does not know
    num_stored: int | None = None  # rows that may enter a queue; None if the host does not know
    over_ranks: bool = False  # of several ranks
    rule: TargetRule = TargetRule(1)  # how the targets are read

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The row-aligned tensors, in the order of the fields."""
        return self[:5]

    @property
    def counts(self) -> tuple[float, float, float]:
        """What :meth:`of_all` adds over the ranks; NaN where the host does not know."""
        if not self.targets.shape[0]:
            return 0.0, 0.0, 0.0
        positive, stored = self.num_positive, self.num_stored
        known = math.nan if positive is None else positive, math.nan if stored is None else stored
        return not self.complete, *known

    @staticmethod
    def of_all(tensors: Sequence[Any], totals: Sequence[Sequence[float]], rule: TargetRule) -> Batch:
        """Return the rows of all ranks with what the host knows of them, from the :attr:`counts` of each."""
        incomplete, *sums, _ = map(sum, zip(*totals))
        positive, stored = (None if number != number else int(number) for number in sums)
        logits, targets, iid_mask, weight, indexes = tensors
        return Batch(logits, targets, iid_mask, weight, indexes, incomplete == 0, positive, stored, True, rule)

    def take(self, index: Tensor) -> Batch:
        """Return the rows of ``index``."""
        iid_mask, weight, indexes = (None if tensor is None else tensor[index] for tensor in self.tensors[2:])
        return Batch(self.logits[index], self.targets[index], iid_mask, weight, indexes, self.complete, rule=self.rule)


def with_queue(live: Batch, queued: QueueRows, uses_iid: bool = True) -> Batch:
    """Return the live rows followed by the queued rows, in the dtype of the computation."""
    device, wide = live.logits.device, compute_dtype(live.logits.dtype)
    num_live, num_queued = live.logits.shape[0], queued.logits.shape[0]
    # Queued rows may have been enqueued with a mask or with weights. Rows without them have the defaults.
    iid = live.iid_mask
    if uses_iid:
        iid = torch.ones(num_live, dtype=torch.bool, device=device) if iid is None else iid
        iid = torch.cat([iid, queued.iid_mask.to(device)])
    weight, queued_weight = live.sample_weight, queued.sample_weight
    if weight is not None or queued_weight is not None:
        weight = torch.ones(num_live, dtype=wide, device=device) if weight is None else weight
        queued_weight = weight.new_ones(num_queued) if queued_weight is None else queued_weight.to(weight)
        weight = torch.cat([weight, queued_weight])
    return Batch(
        torch.cat([live.logits.to(wide), queued.logits.to(device, wide)]),
        torch.cat([live.targets, queued.targets.to(live.targets)]),
        iid if uses_iid else None,
        weight,
        complete=live.complete and not live.rule.multi_hot,  # a row whose target is ignored never enters the queue
        rule=live.rule,
    )


def check_batch(
    logits: Tensor,
    targets: Tensor,
    iid_mask: Tensor | None,
    sample_weight: Tensor | None,
    rule: TargetRule,
    *,
    indexes: Tensor | None = None,
    validate_args: bool = True,
    stored: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Batch:
    """Return the checked rows, or raise TypeError or ValueError.

    The checks that read values wait for the device. ``validate_args=False`` skips them, and so does compiling. Weights
    are one wait, and targets another, which also brings what the host will need later: the number of positives, and
    that of the rows for which ``stored(logits, targets)`` is True.
    """
    check_tensor("logits", logits)
    check_tensor("targets", targets)
    check_not_batched(logits, targets, iid_mask, sample_weight, indexes)
    validate_args = validate_args and has_values(logits)
    if not logits.is_floating_point():
        raise TypeError(expected("logits", "a floating-point tensor", logits, "Pass raw scores."))
    if logits.ndim == 1 and rule.num_classes == 1:
        logits = logits[:, None]  # a view: the gradient has the shape of the input
    if logits.ndim != 2 or logits.shape[1] != rule.num_classes:
        fix = "Flatten leading dimensions; for binary scores (N,) use num_classes=1."
        if rule.num_classes == 1 and logits.ndim == 2:
            fix = "Use num_classes=C for C classes; of two columns for one label pass logits[:, 1:] - logits[:, :1]."
        shape = f"(N, {rule.num_classes})" + (" or (N,)" if rule.num_classes == 1 else "")
        raise ValueError(expected("logits", f"shape {shape}", logits, fix))
    if logits.device.type != "cpu" and has_values(logits) and not _has_float64(logits.device):
        what, found = "a device with float64, in which the sums over a pool are made", Words(f"one on {logits.device}")
        raise TypeError(expected("logits", what, found, "Use logits.cpu(): the gradient comes back to the device."))
    targets, complete, num_positive, num_stored = check_targets(logits, targets, rule, validate_args, stored)
    if iid_mask is not None:
        _check_row_tensor("iid_mask", iid_mask, logits)
        if iid_mask.dtype != torch.bool:
            fix = "Weights go to sample_weight=." if iid_mask.is_floating_point() else "Use iid_mask.bool()."
            raise TypeError(expected("iid_mask", "a bool tensor", iid_mask, fix))
    if sample_weight is not None:
        _check_row_tensor("sample_weight", sample_weight, logits)
        sample_weight, check = weight_and_check(sample_weight, compute_dtype(logits.dtype), validate_args)
        if check is not None:
            check.read()
    if indexes is not None:
        indexes = checked_indexes(indexes, logits)
        if logits.shape[1] != 1:
            fix = "A query ranks its rows by one score; without indexes the columns are classes."
            raise ValueError(expected("logits", "shape (N, 1) with indexes", logits, fix))
    known = complete, num_positive, num_stored
    return Batch(logits, targets, iid_mask, sample_weight, indexes, *known, rule=rule)


def checked_indexes(indexes: Tensor, logits: Tensor) -> Tensor:
    """Return the query of each row of ``logits`` as int64, or raise TypeError or ValueError."""
    _check_row_tensor("indexes", indexes, logits)
    if not is_integer(indexes):
        raise TypeError(expected("indexes", "a tensor of integers", indexes, "Use indexes.long()."))
    return indexes.to(torch.int64)  # the ranks must send the same dtype


@functools.cache
def _has_float64(device: torch.device) -> bool:
    """Return False on a device without float64, such as those of type mps."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def _check_row_tensor(name: str, value: Tensor, logits: Tensor) -> None:
    check_tensor(name, value, "a tensor or None")
    count = logits.shape[0]
    if tuple(value.shape) != (count,):
        fix = f"Use {name}.squeeze(1)." if tuple(value.shape) == (count, 1) else ""
        raise ValueError(expected(name, f"shape ({count},), one entry per row of logits", value, fix))
    check_device(name, value, logits)


def weight_and_check(
    sample_weight: Tensor, dtype: torch.dtype, validate_args: bool
) -> tuple[Tensor, DeviceCheck | None]:
    """Return the weights detached and in ``dtype``, and whether one is negative or not finite; None if not checked."""
    if sample_weight.is_complex() or sample_weight.dtype == torch.bool:
        fix = "Use sample_weight.float()." if sample_weight.dtype == torch.bool else ""
        raise TypeError(expected("sample_weight", "a tensor of real numbers", sample_weight, fix))
    sample_weight = sample_weight.detach()
    if not (validate_args and has_values(sample_weight)):
        return sample_weight.to(dtype), None
    bad = ~(sample_weight.isfinite() & (sample_weight >= 0))

    def error() -> Exception:
        return ValueError(expected("sample_weight", "finite numbers >= 0", sample_weight[bad][0].item()))

    return sample_weight.to(dtype), DeviceCheck(bad.any(), error)


def draw_rows(batch: Batch, size: int, draw: int) -> Tensor:
    """Return the indices, ascending, of at most ``size`` rows of ``batch``, (size,) int64.

    The classes present share half of the budget equally; rows without a class count as one class. The other half is
    drawn uniformly from the remaining rows. A multi-hot row counts for each of its classes. Rows ignored for every
    class are not drawn. All ranks with the same rows and number of the ``draw``, which is the seed, draw the same ones.
    """
    rule, generator = batch.rule, torch.Generator().manual_seed((_SEED << 32) + draw)
    count = batch.targets.shape[0]
    shuffled = torch.randperm(count, generator=generator, device="cpu")
    shuffled = shuffled.to(batch.targets.device, non_blocking=True)
    targets = batch.targets[shuffled]
    if rule.multi_hot:
        taking_part = (targets != rule.ignore_index).any(dim=1)  # [M]
        positive = rule.marked(targets)
        without = taking_part & ~positive.any(dim=1)
        membership = torch.cat([positive, without[:, None]], dim=1)  # [M, C + 1]
    else:
        taking_part = targets != rule.ignore_index  # [M]
        classes = torch.arange(max(2, rule.num_classes), device=targets.device)
        membership = (targets[:, None] == classes) & taking_part[:, None]  # [M, C], or [M, 2] in binary mode
    num_present = membership.any(dim=0).sum().clamp_min(1)
    quota = (size // (2 * num_present)).clamp_min(1)
    # 1 for the first row of a class in shuffled order. int32: with the masks 6 bytes a row and class.
    place = membership.cumsum(dim=0, dtype=torch.int32)
    reserved = membership.logical_and_(place <= quota).any(dim=1)
    # Reserved rows first, then the others, then the ignored ones; each group in shuffled order.
    order = torch.where(taking_part, (~reserved).to(torch.int64), 2).argsort(stable=True)
    chosen = order[: min(size, int(taking_part.sum()))]
    return shuffled[chosen].sort().values
