"""Stratified sampling: a subset of the pool with a quota for every class, the same subset on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch
from .targets import TargetRule

_SEED = 0x66756C6C  # seed and number of the draw determine the draw


def draw_rows(batch: Batch, rule: TargetRule, size: int, draw: int) -> Tensor:
    """Return the indices, ascending, of at most ``size`` rows of ``batch``, (size,) int64.

    The classes present share half of the budget equally; rows without a class count as one class. The other half is
    drawn uniformly from the remaining rows. A multi-hot row counts for each of its classes. Rows that are ignored for
    every class are not drawn.

    The random numbers come from a CPU generator that is seeded with the number of the draw, so all ranks with the same
    rows draw the same subset.

    Args:
        batch: the pool of M rows.
        rule: how targets are read.
        size: the budget.
        draw: number of this draw, counted from 0.
    """
    generator = torch.Generator().manual_seed((_SEED << 32) + draw)
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
