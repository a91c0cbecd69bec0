"""How a model reduces its gradients over the ranks, read off its wrappers, and the switch that says when.

Every wrapper reduces at the end of a backward and divides by the number of ranks W that it reduces over::

    DDP             all-reduce                                    / W
    FSDP2           reduce-scatter                                / W
    HSDP            reduce-scatter over shards, all-reduce over replicas, / W
    sum_gradients_  FSDP2 and HSDP as above                       / 1
    plain module    nothing

So a loss that is to be *added* over the ranks is multiplied by W first, the multiplier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..distributed.group import Group, group_ranks, is_initialized, resolve_group
from ..distributed.torch_private import (
    FsdpGroup,
    awaits_first_reduction,
    forget_forward,
    fsdp_groups,
    fsdp_modules,
    has_fsdp1,
)
from ..errors import Words, check_choice, check_count, expected

SYNCS = ("last", "each", "shard")


class GradientSync(NamedTuple):
    """The wrappers inside a model."""

    ddp: list[DistributedDataParallel]
    fsdp: list[FsdpGroup]
    unmanaged: list[str]  # trainable parameters beside the wrappers that none of them reduces
    shares_statistics: bool = False  # SyncBatchNorm, which communicates in every forward and backward

    @property
    def kind(self) -> str:
        """What wraps the model, for messages and for the agreement between ranks."""
        kinds = {f"DDP over {dist.get_world_size(module.process_group)} ranks" for module in self.ddp}
        kinds |= {f"{_fsdp_name(group)} over {group.num_ranks} ranks" for group in self.fsdp}
        return " and ".join(sorted(kinds)) or "a plain module"

    @property
    def multiplier(self) -> float:
        """What every gradient is divided by; ValueError when that is not one number for all of them."""
        divisors = {float(dist.get_world_size(module.process_group)) for module in self.ddp}
        divisors |= {group.divisor for group in self.fsdp}
        if len(divisors) > 1:
            fix = "Call sum_gradients_(model) once, which makes every FSDP module, experts included, add its gradients."
            if self.ddp:
                fix = "DDP divides by the size of its group: wrap with groups of one size, or use FSDP2."
            found = Words(f"divisors {sorted(divisors)}")
            raise ValueError(expected("model", "gradients that are all divided by the same number", found, fix))
        return divisors.pop() if divisors else 1.0

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that the gradients are reduced over, the largest such group; None without a wrapper."""
        groups = self._largest_groups()
        if len(groups) > 1:
            fix = "Pass group, the ranks that the loss is added over."
            found = Words(" and ".join(str(list(ranks)) for ranks in sorted(groups)))
            raise ValueError(expected("model", "one group of ranks to reduce gradients over", found, fix))
        wrapper = next(iter(groups.values()), None)
        return wrapper.process_group() if isinstance(wrapper, FsdpGroup) else wrapper

    def _largest_groups(self) -> dict[tuple[int, ...], ProcessGroup | FsdpGroup]:
        """Return, by their ranks, those of the groups to reduce over that are the largest."""
        groups: dict[tuple[int, ...], ProcessGroup | FsdpGroup] = {tuple(group.ranks()): group for group in self.fsdp}
        groups |= {tuple(group_ranks(module.process_group)): module.process_group for module in self.ddp}
        largest = max(map(len, groups), default=0)
        return {ranks: group for ranks, group in groups.items() if len(ranks) == largest}

    @property
    def is_lockstep(self) -> bool:
        """Whether a forward or an unreduced backward communicates, so that all ranks must make the same number."""
        return self.shares_statistics or any(group.is_sharded for group in self.fsdp)

    def resolve_group(self, group: Group) -> ProcessGroup | None:
        """Return the ranks that a loss is added over, ``group`` or else the wrappers'; None when this process is alone.

        Without either it is the default group. Raises like :func:`~fullrank.distributed.group.resolve_group`, and
        ValueError for a ``group`` without some of the ranks that the wrappers reduce over.
        """
        found = self.group if group is None else None
        if found is None and (group is not None or is_initialized()):
            found = resolve_group(group)
            for ranks in self._largest_groups():
                if not set(ranks) <= set(group_ranks(found)):
                    fix = "The loss is added over more ranks than these, so they have to be counted too."
                    what = f"all of {list(ranks)}, which the model reduces its gradients over"
                    raise ValueError(expected("group", what, Words(f"ranks {group_ranks(found)}"), fix))
        return found if found is not None and dist.get_world_size(found) > 1 else None

    def check(self, sync: str, num_micro_batches: int) -> None:
        """Raise ValueError when the wrappers cannot accumulate ``num_micro_batches`` in the way of ``sync``."""
        check_choice("sync", sync, SYNCS)
        if sync == "shard" and not self.fsdp:
            fix = "Use sync='last', or sync='each' to reduce after every micro-batch."
            raise ValueError(expected("sync", "a model with FSDP2 modules for 'shard'", Words("one without"), fix))
        if sync != "each" and num_micro_batches > 1 and any(map(awaits_first_reduction, self.ddp)):
            fix = "Use sync='each', or a single micro-batch, in the first window, or DDP without static_graph."
            what = "DDP with static_graph to reduce in its first backward, in which it records the graph"
            raise ValueError(expected("model", what, Words(f"{num_micro_batches} micro-batches to add up first"), fix))

    def check_managed(self, *, others_reduce: bool, multiplier: float | None = None) -> None:
        """Raise ValueError when some gradients would stay as they are on each rank, or be too large once added up.

        Args:
            others_reduce: whether the caller has promised, by naming a group, to add up what no wrapper reduces.
            multiplier: the caller's, None for that of the wrappers.
        """
        if not self.unmanaged:
            return
        more = f" and {len(self.unmanaged) - 3} more" if len(self.unmanaged) > 3 else ""
        found = f"{', '.join(self.unmanaged[:3])}{more} in none of them"
        fix = "Wrap them too, or call sum_gradients_(model), pass group, and add them up with all_reduce_grads_."
        if not others_reduce:
            raise ValueError(expected("model", "every trainable parameter inside a wrapper", Words(found), fix))
        if multiplier is None and self.multiplier != 1.0:
            what = "wrappers that add gradients up beside parameters that are in no wrapper"
            found += f", and wrappers that divide by {self.multiplier:g}, for which the loss is multiplied by it"
            raise ValueError(expected("model", what, Words(found), fix))

    def switch(self, sync: str, is_last: bool) -> None:
        """Say what the next forward and backward do: reduce or only add up; set before the forward."""
        for module in self.ddp:
            module.require_backward_grad_sync = is_last or sync == "each"
        for group in self.fsdp:
            group.switches = (is_last or sync != "last", is_last or sync == "each")

    def forget_forwards(self, model: nn.Module) -> None:
        """Undo what forwards of ``model`` have prepared that no backward followed; on every rank."""
        for module in self.ddp:
            forget_forward(module)
            # Ranks that were in different micro-batches left it on or off; as DDP leaves it after a reduced step.
            module.require_forward_param_sync = True
        # Only a backward reshards: a forward after an optimizer step would find the parameters of before.
        for module in fsdp_modules(model):
            module.reshard()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put back the switches as they were found."""
        found = [module.require_backward_grad_sync for module in self.ddp], [group.switches for group in self.fsdp]
        try:
            yield
        finally:
            for module, reduces in zip(self.ddp, found[0]):
                module.require_backward_grad_sync = reduces
            for group, switches in zip(self.fsdp, found[1]):
                group.switches = switches


def _fsdp_name(group: FsdpGroup) -> str:
    if group.is_hybrid:
        return "HSDP"
    return "FSDP2" if group.is_sharded else "replicas"


def find_sync(model: nn.Module) -> GradientSync:
    """Return the wrappers inside ``model``, itself included; TypeError or ValueError for what is not supported."""
    if not isinstance(model, nn.Module):
        raise TypeError(expected("model", "an nn.Module", model, "Pass the wrapped model."))
    if has_fsdp1(model):
        fix = "Use torch.distributed.fsdp.fully_shard, or DDP."
        raise ValueError(expected("model", "FSDP2, HSDP, DDP or plain modules", Words("FullyShardedDataParallel"), fix))
    ddp = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    fsdp = fsdp_groups(model)
    managed = {id(parameter) for group in fsdp for parameter in group.parameters()}
    for module in ddp:
        reduced = (p for name, p in module.module.named_parameters() if name not in module.parameters_to_ignore)
        managed |= set(map(id, reduced))
    unmanaged = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in managed]
    shares_statistics = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    return GradientSync(ddp, fsdp, unmanaged if fsdp or ddp else [], shares_statistics)


def sum_gradients_(model: nn.Module) -> float:
    """Make every FSDP2 module of ``model``, experts included, add its gradients over the ranks, without dividing.

    Expert modules are sharded over fewer ranks than the rest, so each would divide by a number of its own. Added
    gradients need one division only, by the global count, and it is the loss that makes it.

    Args:
        model: the model after ``fully_shard``; DDP keeps its mean, and plain modules have nothing to change.

    Returns:
        The multiplier of a loss that is to be added over the ranks: 1 for FSDP2 and HSDP from now on, the number of
        ranks for DDP, 1 for a plain module. :func:`accumulate` finds it by itself.

    Raises:
        TypeError: when ``model`` is not a module.
        ValueError: when it contains DDP modules of different sizes, or DDP beside FSDP2.

    Distributed:
        No communication; call it on every rank. The collectives become sums too, because gloo has no other. A pooled
        loss on this model then takes ``gradient_reduction="sum"``.

    Example:
        >>> sum_gradients_(nn.Linear(2, 1))
        1.0
    """
    sync = find_sync(model)
    if sync.ddp and sync.fsdp:
        fix = "Wrap all of it in one of the two."
        raise ValueError(expected("model", "DDP or FSDP2 modules", Words("both"), fix))
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return sync.multiplier


@contextmanager
def maybe_no_sync(model: nn.Module, micro_step: int, num_micro_steps: int) -> Iterator[None]:
    """Let gradients be reduced only in the last micro-step of a window; forward and backward go inside.

    Args:
        model: a model with DDP, FSDP2 or HSDP modules anywhere in it, or a plain one.
        micro_step: which micro-batch this is, from 0.
        num_micro_steps: number of micro-batches of the window.

    Raises:
        TypeError: when ``model`` is not a module, or a number not an int.
        ValueError: when ``micro_step`` is not in [0, num_micro_steps); for DDP with ``static_graph`` whose very first
            backward would not reduce: torch fails inside it, while any later one may.

    What is found is restored afterwards, also after an exception.
    """
    check_count("num_micro_steps", num_micro_steps, 1)
    check_count("micro_step", micro_step, 0)
    if micro_step >= num_micro_steps:
        raise ValueError(expected("micro_step", f"an int in [0, {num_micro_steps})", micro_step, "It counts from 0."))
    sync = find_sync(model)
    sync.check("last", num_micro_steps)
    with sync.restored():
        sync.switch("last", micro_step == num_micro_steps - 1)
        yield


def discard_gradients_(model: nn.Module) -> None:
    """Drop all gradients of ``model``, reduced or not, as if the window had never begun.

    ``optimizer.zero_grad()`` is not enough after a window that was broken off. FSDP2 holds what it has not reduced yet
    apart from ``grad``, and would add it to the next window. A forward that no backward followed leaves FSDP2 with the
    whole parameters of before the next optimizer step, and makes DDP reduce in the first backward of the next window.

    Args:
        model: a model with DDP, FSDP2 or HSDP modules anywhere in it, or a plain one. Call it on every rank.

    Raises:
        TypeError: when ``model`` is not a module.
        ValueError: when it contains FullyShardedDataParallel.

    A backward that raised inside the reduction of DDP cannot be undone: DDP itself fails at its next forward.
    """
    sync = find_sync(model)
    for group in sync.fsdp:
        group.discard()
    sync.forget_forwards(model)
    for parameter in model.parameters():
        parameter.grad = None
