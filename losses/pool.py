"""The pool that a ranking loss is computed over, one binary problem per class, and its reduction to a loss."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import check_choice, check_int, check_positive
from .batch import Batch, TargetRule, check_batch, compute_dtype, may_hold

REDUCTIONS = ("mean", "sum", "none")


class Pool(NamedTuple):
    """One binary problem per class. Scores outside ``member`` are 0, so that nothing there can poison a sum."""

    scores: Tensor  # [C, M] float32 or float64
    positive: Tensor  # [C, M] bool, a subset of member
    member: Tensor | None  # [C, M] bool: the row takes part in the class; None for all True
    iid: Tensor | None = None  # [M] bool, None for all True
    live: Tensor | None = None  # [M] bool: not from the queue; None for all True
    weight: Tensor | None = None  # [M], None for all 1
    indexes: Tensor | None = None  # [M] int64: the query of each row, of C = 1; None for one query

    @property
    def negative(self) -> Tensor:
        """(C, M) bool: the members that are not positive."""
        return ~self.positive if self.member is None else self.member & ~self.positive

    @property
    def everyone(self) -> Tensor:
        """(C, M) bool: the members, written out."""
        return torch.ones_like(self.positive) if self.member is None else self.member

    @property
    def has_negative(self) -> Tensor:
        """(C,) bool: the class has a negative."""
        return self.negative.any(dim=1)


class PerClass(NamedTuple):
    """A loss before its reduction."""

    values: Tensor  # [C]: NaN where a score of the class is NaN, valid or not; else finite where not valid
    valid: Tensor  # [C] bool


class LossWithClasses(NamedTuple):
    """``loss``, with the loss of each class (NaN where the class is not valid) and which classes are valid."""

    loss: Tensor
    per_class: Tensor  # [C]
    valid: Tensor  # [C] bool


def one_vs_rest(batch: Batch, rule: TargetRule, live: Tensor | None = None, queue_keep: str = "all") -> Pool:
    """Return the pool of ``batch``: class c against the rest, ignored rows left out.

    Args:
        batch: live rows, then queued rows.
        rule: how targets are read.
        live: (M,) bool, False for queued rows.
        queue_keep: with ``"negatives"`` a queued row is left out of the classes it is a positive of.
    """
    member: Tensor | None
    if rule.multi_hot:
        codes = batch.targets.t()  # [C, M]
        positive, member = rule.marked(codes), codes != rule.ignore_index
    else:
        classes: Tensor | int = 1  # in binary mode, the only one
        if rule.num_classes > 1:
            classes = torch.arange(rule.num_classes, device=batch.targets.device)[:, None]
        positive, member = batch.targets[None] == classes, None  # [C, M]
        if not batch.complete and may_hold(batch.targets, rule.ignore_index):
            part = (batch.targets != rule.ignore_index)[None]
            positive, member = positive & part, part.expand_as(positive)
    if live is not None and queue_keep == "negatives":
        held = live | ~positive
        positive, member = positive & live, held if member is None else member & held
    scores = batch.logits.to(compute_dtype(batch.logits.dtype)).t()
    if member is None:
        scores = scores.contiguous()
    else:
        scores = torch.where(member, scores, torch.zeros((), dtype=scores.dtype, device=scores.device))
    return Pool(scores, positive, member, batch.iid_mask, live, batch.sample_weight, batch.indexes)


def local_pool(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    reduction: str,
    ignore_index: int,
    *,
    iid_mask: Tensor | None = None,
    sample_weight: Tensor | None = None,
    indexes: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Pool:
    """Check the arguments that the pure functions share, and return the pool of the given rows."""
    check_positive("temperature", temperature)
    check_choice("reduction", reduction, REDUCTIONS)
    check_int("ignore_index", ignore_index)
    has_columns = isinstance(logits, Tensor) and logits.ndim == 2
    rule = TargetRule(logits.shape[1] if has_columns else 1, ignore_index, multi_hot)
    given = (logits, targets, iid_mask, sample_weight)
    batch = check_batch(*given, rule, indexes=indexes, validate_args=validate_args)
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


def spread_nan(values: Tensor, pool: Pool) -> Tensor:
    """Return ``values`` (C,), NaN for the classes with a NaN among their scores."""
    if pool.scores.shape[1] == 0:
        return values
    # The largest score is NaN as soon as any is; one pass, nothing stored.
    poisoned = pool.scores.detach().amax(dim=1).isnan()  # [C]
    return values * torch.where(poisoned, math.nan, 1.0).to(values)


def reduce_classes(per_class: PerClass, pool: Pool, reduction: str) -> Tensor:
    """Return the loss over the valid classes in the dtype of the scores; see :func:`reduce_values`."""
    return reduce_values(per_class, reduction, pool.scores.dtype)


def reduce_values(per_class: PerClass, reduction: str, dtype: torch.dtype) -> Tensor:
    """Return the loss over the valid classes, or queries, in ``dtype``; a NaN one counts, valid or not.

    ``"mean"`` and ``"sum"`` leave invalid ones out and are 0 without any; ``"none"`` gives (C,) with NaN there. The
    loss is connected to the graph of every row in each case. Rounded once, after the sum.
    """
    values, valid = per_class
    if reduction == "none":
        return values.masked_fill(~valid, math.nan).to(dtype)
    counted = valid | values.isnan()
    loss = (values * counted).sum()
    if reduction == "mean" and counted.numel() > 1:
        loss = loss / counted.sum().clamp_min(1)
    return loss.to(dtype)


def with_classes(loss: Tensor, per_class: PerClass) -> LossWithClasses:
    """Return ``loss`` with the loss of each class and which are valid."""
    values, valid = per_class
    return LossWithClasses(loss, values.masked_fill(~valid, math.nan).to(loss.dtype), valid)


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
