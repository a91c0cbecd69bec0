"""The pool that a ranking loss is computed over, one binary problem per class, and its reduction to a loss."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed.errors import check_choice, check_positive, expected

REDUCTIONS = ("mean", "sum", "none")


class Batch(NamedTuple):
    """Checked rows: targets as int64 indices (0 and 1 in binary mode) or multi-hot codes, weights in compute dtype."""

    logits: Tensor  # [N, C]
    targets: Tensor  # [N] or [N, C]
    iid_mask: Tensor | None = None  # [N]
    sample_weight: Tensor | None = None  # [N]

    def take(self, index: Tensor) -> Batch:
        """Return the rows of ``index``."""
        optional = (None if tensor is None else tensor[index] for tensor in self[2:])
        return Batch(self.logits[index], self.targets[index], *optional)


class TargetRule(NamedTuple):
    """How targets are read: number of classes (1 is binary), the ignored value, class indices or multi-hot."""

    num_classes: int
    ignore_index: int = -100
    multi_hot: bool = False


class Pool(NamedTuple):
    """One binary problem per class. Scores outside ``member`` are 0, so that nothing there can poison a sum."""

    scores: Tensor  # [C, M] float32 or float64
    positive: Tensor  # [C, M] bool, a subset of member
    member: Tensor  # [C, M] bool: the row takes part in the class
    iid: Tensor | None = None  # [M] bool, None for all True
    live: Tensor | None = None  # [M] bool: not from the queue; None for all True
    weight: Tensor | None = None  # [M], None for all 1

    @property
    def negative(self) -> Tensor:
        """(C, M) bool: the members that are not positive."""
        return self.member & ~self.positive


class PerClass(NamedTuple):
    """A loss before its reduction."""

    values: Tensor  # [C], arbitrary but finite where not valid
    valid: Tensor  # [C] bool


class LossWithClasses(NamedTuple):
    """``loss``, with the loss of each class (NaN where the class is not valid) and which classes are valid."""

    loss: Tensor
    per_class: Tensor  # [C]
    valid: Tensor  # [C] bool


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype a loss is computed in: half precision in float32, whose sums over a pool do not saturate."""
    return torch.promote_types(dtype, torch.float32)


def check_batch(
    logits: Tensor,
    targets: Tensor,
    iid_mask: Tensor | None,
    sample_weight: Tensor | None,
    rule: TargetRule,
    *,
    validate_args: bool = True,
) -> Batch:
    """Return the rows in canonical form, or raise TypeError or ValueError.

    ``validate_args=False`` leaves out the checks that read values, each of which waits for the device.
    """
    validate_args = validate_args and not torch.compiler.is_compiling()
    for name, value in (("logits", logits), ("targets", targets)):
        if not isinstance(value, Tensor):
            raise TypeError(expected(name, "a tensor", value))
    if not logits.is_floating_point():
        raise TypeError(expected("logits", "a floating-point tensor", logits, "Pass raw scores."))
    if logits.ndim != 2 or logits.shape[1] != rule.num_classes:
        fix = "Flatten leading dimensions; for binary scores (N,) use logits.unsqueeze(1) and num_classes=1."
        raise ValueError(expected("logits", f"shape (N, {rule.num_classes})", logits, fix))
    targets = _check_targets(logits, targets, rule, validate_args)
    if iid_mask is not None:
        _check_row_tensor("iid_mask", iid_mask, logits)
        if iid_mask.dtype != torch.bool:
            raise TypeError(expected("iid_mask", "a bool tensor", iid_mask, "Use iid_mask.bool()."))
    if sample_weight is not None:
        _check_row_tensor("sample_weight", sample_weight, logits)
        sample_weight = check_weight(sample_weight, compute_dtype(logits.dtype), validate_args)
    return Batch(logits, targets, iid_mask, sample_weight)


def check_weight(sample_weight: Tensor, dtype: torch.dtype, validate_args: bool) -> Tensor:
    """Return the weights detached and in ``dtype``; ValueError when one is negative or not finite."""
    if sample_weight.is_complex() or sample_weight.dtype == torch.bool:
        raise TypeError(expected("sample_weight", "a tensor of real numbers", sample_weight))
    sample_weight = sample_weight.detach()
    if validate_args and not torch.compiler.is_compiling():
        bad = ~(sample_weight.isfinite() & (sample_weight >= 0))
        if bool(bad.any()):
            first = sample_weight[bad][0].item()
            raise ValueError(expected("sample_weight", "finite numbers >= 0", first))
    return sample_weight.to(dtype)


def _check_row_tensor(name: str, value: Tensor, logits: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(expected(name, "a tensor or None", value))
    if tuple(value.shape) != (logits.shape[0],):
        raise ValueError(expected(name, f"shape ({logits.shape[0]},), one entry per row of logits", value))
    _check_device(name, value, logits)


def _check_device(name: str, value: Tensor, logits: Tensor) -> None:
    if value.device != logits.device:
        raise ValueError(expected(name, f"a tensor on {logits.device}, as logits", str(value.device)))


def _check_targets(logits: Tensor, targets: Tensor, rule: TargetRule, validate_args: bool) -> Tensor:
    if targets.is_floating_point() or targets.is_complex():
        what = "integers or bools"
        raise TypeError(expected("targets", what, targets, "Use targets.long() on class indices."))
    _check_device("targets", targets, logits)
    count = logits.shape[0]
    if rule.multi_hot:
        if tuple(targets.shape) != (count, rule.num_classes):
            raise ValueError(expected("targets", f"multi-hot shape {(count, rule.num_classes)}", targets))
        return _check_multi_hot(targets, rule, validate_args)
    if tuple(targets.shape) == (count, 1):
        targets = targets[:, 0]
    if tuple(targets.shape) != (count,):
        fix = "Pass multi_hot=True for (N, C) targets of 0 and 1." if targets.ndim == 2 else ""
        raise ValueError(expected("targets", f"shape ({count},), one entry per row of logits", targets, fix))
    targets = targets.to(torch.int64)
    ignored = targets == rule.ignore_index
    if rule.num_classes == 1:
        return _check_binary(targets, ignored, validate_args)
    if validate_args:
        bad = ((targets < 0) | (targets >= rule.num_classes)) & ~ignored
        if bool(bad.any()):
            what = f"class indices in [0, {rule.num_classes}) or ignore_index={rule.ignore_index}"
            raise ValueError(expected("targets", what, int(targets[bad][0])))
    return targets


def _check_binary(targets: Tensor, ignored: Tensor, validate_args: bool) -> Tensor:
    if validate_args:
        odd = (targets != 0) & (targets != 1) & ~ignored
        if bool(odd.any()):
            values = targets[odd].unique()[:8].tolist()
            warnings.warn(
                f"targets: expected 0 or 1 with num_classes=1, got {values}. Every value but 0 counts as positive.",
                UserWarning,
                stacklevel=2,
            )
    return torch.where(ignored, targets, (targets != 0).to(torch.int64))


def _check_multi_hot(targets: Tensor, rule: TargetRule, validate_args: bool) -> Tensor:
    small = -128 <= rule.ignore_index <= 127
    if validate_args:
        bad = (targets != 0) & (targets != 1) & (targets != rule.ignore_index)
        if bool(bad.any()):
            what = f"0, 1 or ignore_index={rule.ignore_index}"
            raise ValueError(expected("targets", what, int(targets[bad][0])))
    # Every rank sends the same dtype whatever it was given, and a byte is enough for 0, 1 and the default -100.
    return targets.to(torch.int8 if small else torch.int64)


def one_vs_rest(batch: Batch, rule: TargetRule, live: Tensor | None = None, queue_keep: str = "all") -> Pool:
    """Return the pool of ``batch``: class c against the rest, ignored rows left out.

    Args:
        batch: live rows, then queued rows.
        rule: how targets are read.
        live: (M,) bool, False for queued rows.
        queue_keep: with ``"negatives"`` a queued row is left out of the classes it is a positive of.
    """
    if rule.multi_hot:
        codes = batch.targets.t()  # [C, M]
        positive, member = (codes == 1) & (codes != rule.ignore_index), codes != rule.ignore_index
    else:
        classes = torch.arange(rule.num_classes, device=batch.targets.device)
        index = batch.targets - 1 if rule.num_classes == 1 else batch.targets  # binary: 1 is the only class
        part = (batch.targets != rule.ignore_index)[None]
        positive = (index[None] == classes[:, None]) & part  # [C, M]
        member = part.expand_as(positive)
    if live is not None and queue_keep == "negatives":
        member = member & (live | ~positive)
        positive = positive & live
    scores = batch.logits.to(compute_dtype(batch.logits.dtype)).t()
    scores = torch.where(member, scores, torch.zeros((), dtype=scores.dtype, device=scores.device))
    return Pool(scores, positive, member, batch.iid_mask, live, batch.sample_weight)


def local_pool(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    reduction: str,
    ignore_index: int,
    *,
    iid_mask: Tensor | None = None,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Pool:
    """Check the arguments that the pure functions share, and return the pool of the given rows."""
    check_positive("temperature", temperature)
    check_choice("reduction", reduction, REDUCTIONS)
    has_columns = isinstance(logits, Tensor) and logits.ndim == 2
    rule = TargetRule(logits.shape[1] if has_columns else 1, ignore_index, multi_hot)
    batch = check_batch(logits, targets, iid_mask, sample_weight, rule, validate_args=validate_args)
    return one_vs_rest(batch, rule)


def positive_shares(pool: Pool, numerator: Tensor) -> tuple[Tensor, Tensor]:
    """Return each positive's share of its class's mean (C, M), and which classes have any (C,).

    Args:
        pool: the pool, whose weights count where it has them.
        numerator: (C, M) bool, the positives of the mean.
    """
    mass = numerator.to(pool.scores.dtype)
    if pool.weight is not None:
        mass = mass * pool.weight
    total = mass.sum(dim=1)  # [C]
    valid = total > 0
    return mass / torch.where(valid, total, torch.ones_like(total))[:, None], valid


def reduce_classes(per_class: PerClass, pool: Pool, reduction: str) -> LossWithClasses:
    """Return the loss over the valid classes; a NaN among the scores of a class makes its value NaN, valid or not.

    ``"mean"`` and ``"sum"`` leave invalid classes out and are 0 without any; ``"none"`` gives (C,) with NaN there. The
    loss is connected to the graph of every row in each case.
    """
    values, valid = per_class
    poisoned = pool.scores.detach().isnan().any(dim=1)  # [C]
    values = values * torch.where(poisoned, math.nan, 1.0).to(values)
    per_class_loss = values.masked_fill(~valid, math.nan)
    if reduction == "none":
        return LossWithClasses(per_class_loss, per_class_loss, valid)
    counted = valid | poisoned
    total = torch.where(counted, values, torch.zeros_like(values)).sum()
    loss = total / counted.sum().clamp_min(1) if reduction == "mean" else total
    return LossWithClasses(loss, per_class_loss, valid)


def compact(mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``mask`` and ``tensors`` (C, M) reduced to (C, K): the entries of each row's mask first, then padding.

    K is the largest number of entries of any row. Reading it waits for the device once; while compiling, where shapes
    must be known, everything is returned as it is.
    """
    if torch.compiler.is_compiling():
        return mask, *tensors
    count = mask.sum(dim=1)
    width = int(count.max()) if count.numel() else 0
    slot = torch.where(mask, mask.cumsum(dim=1) - 1, width)
    rows = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    index = rows.new_zeros(mask.shape[0], width + 1).scatter_(1, slot, rows)[:, :width]
    kept = torch.arange(width, device=mask.device)[None] < count[:, None]
    return kept, *(tensor.gather(1, index) for tensor in tensors)
