"""A subset of a pool with a quota for every class, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch, TargetRule

_SEED = 0x66756C6C  # with the number of the draw, the whole state of the draw


def draw_rows(batch: Batch, rule: TargetRule, size: int, draw: int) -> Tensor:
    """Return the indices, ascending, of at most ``size`` rows of ``batch``, (size,) int64.

    Half of the budget is shared equally by the classes present (rows without a class are one of them), the rest is
    uniform over the other rows. A multi-hot row counts under each of its classes. Rows that are ignored for every class
    are not drawn.

    The draw comes from a CPU generator seeded by its number: every rank that holds the same rows draws the same.
    """
    generator = torch.Generator().manual_seed((_SEED << 32) + draw)
    count = batch.targets.shape[0]
    shuffled = torch.randperm(count, generator=generator, device="cpu").to(batch.targets.device)
    membership, taking_part = _membership(batch.targets[shuffled], rule)  # [M, G]
    num_present = int(membership.any(dim=0).sum())
    quota = max(1, size // (2 * max(1, num_present)))
    place = membership.to(torch.int64).cumsum(dim=0)  # 1 for the first row of a class in shuffled order
    reserved = (membership & (place <= quota)).any(dim=1)
    # Reserved rows first, then the others, then the ignored; each in shuffled order.
    order = torch.where(taking_part, (~reserved).to(torch.int64), 2).argsort(stable=True)
    chosen = order[: min(size, int(taking_part.sum()))]
    return shuffled[chosen].sort().values


def _membership(targets: Tensor, rule: TargetRule) -> tuple[Tensor, Tensor]:
    """Return (M, G) bool, the groups of each row, and (M,) bool, whether the row takes part at all."""
    if rule.multi_hot:
        taking_part = (targets != rule.ignore_index).any(dim=1)
        positive = rule.marked(targets)
        without = taking_part & ~positive.any(dim=1)
        return torch.cat([positive, without[:, None]], dim=1), taking_part
    taking_part = targets != rule.ignore_index
    groups = torch.arange(max(2, rule.num_classes), device=targets.device)
    return (targets[:, None] == groups) & taking_part[:, None], taking_part
