"""From the norms of what one rank holds to the norm of everything: one all-gather per process group.

What is sharded over the same groups shares one norm, a column. Group by group, in the order of the plan, the columns
sharded over that group are joined over its ranks. A column that has met all of its groups is whole::

    sent by each rank:  | failed | digest | narrow | not finite | whole | column | column | ...

    failed       1 when this rank, or one that it has heard of, has an exception to raise
    digest       hash of the arguments and of the layout of the columns, which the ranks must share
    narrow       1 when the norm is returned in float32 on this rank, or on one that it has heard of, else 0
    not finite   inf or NaN when this rank, or one that it has heard of, holds such a gradient; else 0
    whole        norm of what every rank of the group has whole: the first rank's counts. Of stages, all ranks' count
    column       norm of this rank's part of what is sharded over this group, and perhaps over others yet to come

A gather and not an all-reduce: the powers of norms can be added without leaving the range of float64 only where all of
them are known. The ranks then all add them in the same order, to the same bits, and NaN survives the maximum.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.collectives import all_gather
from ..distributed.group import is_initialized
from ..distributed.header import backend_by_device
from .norm_measure import join_norms
from .norm_plan import Layout, Plan

_HEAD = 5  # words in front of the columns
_LEAST = 16  # words: ranks that disagree on the number of columns must still meet


class Reduced(NamedTuple):
    """Float64 scalars: the norm of everything; 1 (and the norm NaN) if a rank failed or the ranks disagree, else 0."""

    norm: Tensor
    rounded: Tensor  # to float32 if a rank returns it so: the same number on all ranks
    failed: Tensor


def reduce_columns(
    columns: Mapping[Layout, Tensor],
    plan: Plan,
    norm_type: float,
    facts: Mapping[str, object],
    *,
    failed: bool,
    narrow: bool,
) -> Reduced:
    """Return the norm of everything, bit-identical on all ranks that the groups of ``plan`` connect.

    Args:
        columns: for each layout the norm of what this rank holds; float64 scalars on one device, () among them.
        plan: the groups, their order, and which of them connect stages.
        norm_type: p.
        facts: arguments that must be equal on every rank, ``"call"`` among them.
        failed: whether this rank has an exception to raise.
        narrow: whether this rank returns the norm in float32.
    """
    left = dict(columns)
    held = torch.stack(list(left.values()))
    odd = torch.where(held.isfinite(), 0.0, held).sum()  # inf, NaN, or 0
    fault, rounds = torch.full_like(odd, float(failed)), torch.full_like(odd, float(narrow))
    for place, group in enumerate(plan.groups):
        layouts = sorted(layout for layout in left if place in layout)
        digest = torch.full_like(odd, _digest({**facts, "layouts": layouts}))
        sent = torch.stack([fault, digest, rounds, odd, left[()], *(left.pop(layout) for layout in layouts)])
        ranks = _gather(sent, group, str(facts["call"]))  # [W, words]
        differ = ranks[:, 1] != ranks[0, 1]
        fault = torch.maximum(ranks[:, 0], differ.double()).amax()
        rounds, odd = ranks[:, 2].amax(), ranks[:, 3].sum()
        left[()] = join_norms(ranks[:, 4], norm_type) if place >= plan.first_stage else ranks[0, 4]
        for layout, norm in zip(layouts, join_norms(ranks[:, _HEAD : sent.numel()], norm_type)):
            rest = tuple(other for other in layout if other != place)
            left[rest] = join_norms(torch.stack([left[rest], norm]), norm_type) if rest in left else norm
    norm = torch.where(fault > 0, math.nan, left[()] + odd)
    return Reduced(norm, torch.where(rounds > 0, norm.float().double(), norm), fault)


def meeting_device(group: ProcessGroup, own: torch.device | None) -> torch.device:
    """Return the device on which the ranks of ``group`` exchange norms; ``own`` is that of the gradients, if any."""
    served = backend_by_device(group)
    if own is not None and served.get(own.type, "gloo") != "gloo":
        return own
    if "cpu" in served and (own is not None or set(served.values()) == {"gloo"}):
        return torch.device("cpu")  # gloo moves no memory of an accelerator
    # Without gradients of its own, a rank goes where those of the others are likely to be.
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def exchange(plan: Plan, own: Any) -> list[tuple[int, Any]]:
    """Return (rank, object) of all ranks that the groups connect, in the order of the ranks. On the way to an error."""
    known = {dist.get_rank() if is_initialized() else 0: own}
    for group in plan.groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, known, group=group)
        known = {rank: value for part in gathered for rank, value in part.items()}
    return sorted(known.items(), key=lambda item: item[0])


def _gather(sent: Tensor, group: ProcessGroup, call: str) -> Tensor:
    """Return the words of all ranks, (W, n) and padding, on the device of ``sent`` (n,)."""
    padded = torch.nn.functional.pad(sent, (0, -sent.numel() % _LEAST)).to(meeting_device(group, sent.device))
    gathered = padded.new_empty(dist.get_world_size(group) * padded.numel())
    all_gather(gathered, padded, group, call=call, what="the all-gather of the norms")
    return gathered.view(-1, padded.numel()).to(sent.device)


def _digest(facts: Mapping[str, object]) -> float:
    """Return a hash of 48 bits, which float64 holds exactly, the same in every process."""
    return float(int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=6).digest(), "big"))
