"""Which wrappers a model has, over which ranks they reduce gradients, and the switches for when they do.

A wrapper reduces gradients at the end of a backward, and divides them by the number W of ranks it reduces over::

    DDP             all-reduce                                            / W
    FSDP2           reduce-scatter                                        / W
    HSDP            reduce-scatter over shards, all-reduce over replicas  / W
    FSDP2 or HSDP after sum_gradients_: the same collectives              / 1
    plain module    no reduction                                          / 1

A loss whose gradients should be *added* over the ranks is therefore multiplied by W first. That factor is called the
multiplier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..distributed.group import Group, group_ranks, is_initialized, resolve_group
from ..distributed.header import State
from ..errors import Words, check_choice, check_positive, expected
from . import torch_private
from .parameters import leaves_of
from .torch_private import FsdpGroup

SYNCS = ("last", "each", "shard")

_SAME_FORWARDS = (
    "Call the forward of the DDP module on every rank, also on one without terms, and let its loss be a sum of the "
    "output: model(batch).sum() * 0."
)


@dataclass
class GradientSync:
    """The wrappers inside a model, as :func:`find_sync` found them."""

    ddp: list[DistributedDataParallel] = field(default_factory=list)
    fsdp: list[FsdpGroup] = field(default_factory=list)
    shares_statistics: bool = False  # SyncBatchNorm, which communicates in every forward and backward
    unwrapped: nn.Module | None = None  # the model, if no wrapper manages any of its parameters
    fsdp_modules: list[Any] = field(default_factory=list)  # FSDPModules, to which ``fsdp`` belong
    unmanaged: list[str] = field(default_factory=list)  # trainable parameters that no wrapper reduces, if others are

    @property
    def kind(self) -> str:
        """What wraps the model, for messages and for the comparison between ranks."""
        kinds = set()
        for module in self.ddp:
            kinds.add(f"DDP over {module.process_group.size()} ranks")
        for group in self.fsdp:
            name = "HSDP" if group.is_hybrid else "FSDP2" if group.is_sharded else "replicas"
            kinds.add(f"{name} over {group.num_ranks} ranks")
        return " and ".join(sorted(kinds)) or "a plain module"

    @property
    def multiplier(self) -> float:
        """The number that every gradient is divided by; ValueError when there are several."""
        divisors = {*map(attrgetter("divisor"), self.fsdp)}
        for module in self.ddp:
            divisors.add(float(module.process_group.size()))
        if len(divisors) > 1:
            fix = "Call sum_gradients_(model) once: every FSDP module, experts included, then adds its gradients."
            if self.ddp:
                fix = "DDP divides by the size of its group: wrap with groups of one size, or use FSDP2."
            got = Words(f"divisors {sorted(divisors)}")
            raise ValueError(expected("model", "gradients that are all divided by the same number", got, fix))
        return divisors.pop() if divisors else 1.0

    @property
    def divisor(self) -> float | None:
        """The multiplier; None without a wrapper, or when there are several numbers."""
        try:
            return self.multiplier if self.ddp or self.fsdp else None
        except ValueError:
            return None

    @property
    def is_lockstep(self) -> bool:
        """Whether a forward, or a backward without reduction, communicates, so that all ranks must run equally many."""
        return self.shares_statistics or any(map(attrgetter("is_sharded"), self.fsdp))

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that the gradients are reduced over, the largest such group; None without a wrapper."""
        if len(self._largest_groups) > 1:
            fix = "Pass group, the ranks that the loss is added over."
            got = Words(" and ".join(str(list(ranks)) for ranks in sorted(self._largest_groups)))
            raise ValueError(expected("model", "one group of ranks to reduce gradients over", got, fix))
        wrapper = next(iter(self._largest_groups.values()), None)
        return wrapper.process_group() if isinstance(wrapper, FsdpGroup) else wrapper

    @cached_property
    def _largest_groups(self) -> dict[tuple[int, ...], ProcessGroup | FsdpGroup]:
        """The largest of the groups that gradients are reduced over, keyed by their ranks."""
        groups: dict[tuple[int, ...], ProcessGroup | FsdpGroup] = {tuple(group.ranks()): group for group in self.fsdp}
        groups |= {tuple(group_ranks(module.process_group)): module.process_group for module in self.ddp}
        largest = max(map(len, groups), default=0)
        return {ranks: group for ranks, group in groups.items() if len(ranks) == largest}

    def check_group(self, group: Group) -> None:
        """Raise ValueError unless ``group``, or None without hooks, has all ranks that the wrappers reduce over."""
        if self.unwrapped is not None:
            return
        if group is None and any(map(attrgetter("has_hook"), self.fsdp)):
            fix = (
                "It may add over more ranks, or divide. Pass group, all ranks that the gradients are added over in the "
                "end; and to accumulate or DeferredMean multiplier, the number that they are divided by in all."
            )
            got = Words("a function of set_all_reduce_hook")
            raise ValueError(expected("model", "gradients that FSDP2 alone reduces, without group", got, fix))
        if group is None:
            assert self.group is not None  # or it raises: the ranks must be those of one group
            return
        ranks = group_ranks(resolve_group(group))
        for reduced in self._largest_groups:
            if not set(reduced) <= set(ranks):
                fix = "Gradients are added over more ranks than these, so their rows must be counted too."
                what = f"all of {list(reduced)}, which the model reduces its gradients over"
                raise ValueError(expected("group", what, Words(f"ranks {ranks}"), fix))

    def check_sync(self, sync: str, num_micro_batches: int) -> None:
        """Raise ValueError when the wrappers cannot accumulate ``num_micro_batches`` as ``sync`` says."""
        check_choice("sync", sync, SYNCS)
        if sync == "shard" and not self.fsdp:
            fix = "Use sync='last', or sync='each' to reduce after every micro-batch."
            raise ValueError(expected("sync", "a model with FSDP2 modules for 'shard'", Words("one without"), fix))
        if sync != "each" and num_micro_batches > 1 and any(map(torch_private.awaits_first_reduction, self.ddp)):
            fix = "Use sync='each', or a single micro-batch, in the first window, or DDP without static_graph."
            what = "DDP with static_graph to reduce in its first backward, in which it records the graph"
            got = Words(f"{num_micro_batches} micro-batches that are added up before the first reduction")
            raise ValueError(expected("model", what, got, fix))

    def check_wrapped(self, *, others_reduce: bool, fix: str) -> None:
        """Raise ValueError for a model without wrappers, such as ``ddp.module``, unless others reduce its gradients."""
        if self.unwrapped is None or others_reduce or not is_initialized() or dist.get_world_size() == 1:
            return
        number = sum(parameter.requires_grad for parameter in self.unwrapped.parameters())
        what = "a model whose gradients a wrapper reduces over the ranks"
        if torch_private.has_composable_replicate(self.unwrapped.modules()):
            got = Words("composable replicate, which hides its DDP")
            raise ValueError(expected("model", what, got, "Use DistributedDataParallel(model), or fully_shard."))
        if number:
            got = Words(f"{number} trainable parameters in no wrapper, on {dist.get_world_size()} ranks")
            advice = (
                "Pass the model as DDP or fully_shard returned it: not ddp.module, not "
                f"accelerator.unwrap_model(model), not Lightning's self but self.trainer.model. {fix}"
            )
            raise ValueError(expected("model", what, got, advice))

    def check_managed(self, *, others_reduce: bool, multiplier: float | None = None) -> None:
        """Raise ValueError when gradients would stay unreduced, or would be too large after others add them."""
        if not self.unmanaged:
            return
        got = f"{shorten(self.unmanaged)} in none of them"
        fix = "Wrap them too, or call sum_gradients_(model), pass group, and add them up with all_reduce_grads_."
        if not others_reduce:
            raise ValueError(expected("model", "every trainable parameter inside a wrapper", Words(got), fix))
        if multiplier is None and self.multiplier != 1.0:
            what = "wrappers that add gradients up, because some parameters are in no wrapper"
            got += f", and wrappers that divide by {self.multiplier:g}, for which the loss is multiplied by it"
            raise ValueError(expected("model", what, Words(got), fix))

    def checked_multiplier(self, group: Group, multiplier: float | None) -> float:
        """Return the number that gradients are divided by, :attr:`multiplier` unless the caller gives one."""
        self.check_group(group)
        return self.multiplier if multiplier is None else check_positive("multiplier", multiplier)

    def switch(self, sync: str, is_last: bool) -> None:
        """Set whether the next backward reduces or only adds up; call it before the forward."""
        for module in self.ddp:
            module.require_backward_grad_sync = is_last or sync == "each"
        for group in self.fsdp:
            group.switches = (is_last or sync != "last", is_last or sync == "each")

    @contextmanager
    def restored(self, *, quiet: bool = False) -> Iterator[None]:
        """Restore the switches at the end; ``quiet`` stops broadcasts of DDP: a rank may skip or fail in a forward."""
        ddp = [(module, module.require_backward_grad_sync, module.broadcast_buffers) for module in self.ddp]
        fsdp = [(group, group.switches) for group in self.fsdp]
        for module in self.ddp if quiet else ():
            module.broadcast_buffers = False
        try:
            yield
        finally:
            for module, reduces, broadcasts in ddp:
                module.require_backward_grad_sync, module.broadcast_buffers = reduces, broadcasts
            for group, switches in fsdp:
                group.switches = switches

    @property
    def forwards_since(self) -> int:
        """A number that the ranks compare before a window: 0 when DDP has run no forward since the last window.

        Otherwise bit 0 is set, and a bit for each module that would broadcast its buffers in its next forward.
        """
        if not any(self.forwards_seen):
            return 0
        broadcasts = [module.require_forward_param_sync is True for module in self.ddp]
        return 1 + sum(due << (1 + index % 50) for index, due in enumerate(broadcasts))

    def communicate_before_forwards(self, ranks: ProcessGroup | None, forwards: Sequence[float]) -> None:
        """Rebuild the buckets of DDP and broadcast its buffers now, as its next forwards would; right after a header.

        A forward without a backward makes DDP reduce in the next backward even when that is switched off. We cannot
        tell such a forward from others, so after any on any rank, :attr:`forwards_since` of ``ranks``, all reset DDP.
        """
        in_header = set() if ranks is None else set(group_ranks(ranks))
        for module in self.ddp:
            header_covers_group = in_header.issuperset(group_ranks(module.process_group))
            if header_covers_group and any(forwards):
                torch_private.forget_forward(module)
            if header_covers_group and len(set(forwards)) > 1:
                module.require_forward_param_sync = True  # the ranks differ, so all of them broadcast
            torch_private.communicate_before_forward(module)

    def communicate_after_backward(self) -> None:
        """Rebuild buckets and broadcast buffers now, a collective, so that the next forwards of DDP make none."""
        for module in self.ddp:
            module.require_forward_param_sync = True
            torch_private.communicate_before_forward(module)
        self.watch_forwards(broadcasts=False)

    def watch_forwards(self, *, broadcasts: bool | None = None) -> None:
        """Restart :attr:`forwards_seen`; ``broadcasts`` sets whether the next forward broadcasts buffers."""
        for module in self.ddp:
            torch_private.watch_forward(module, broadcasts)

    def prepare_first_forwards(self) -> None:
        """Broadcast the buffers of modules that have never run, and restart :attr:`forwards_seen` for them."""
        for module in self.ddp:
            if torch_private.has_never_run(module):
                torch_private.communicate_before_forward(module)
                torch_private.watch_forward(module, False)

    @property
    def forwards_seen(self) -> tuple[bool, ...]:
        """For each DDP module, whether it has run a forward since :meth:`watch_forwards`."""
        return tuple(map(torch_private.has_run_forward, self.ddp))

    def same_forwards(self, *, may_follow: bool) -> State:
        """A fact that the ranks compare before a backward that reduces: a rank without a forward would not reduce."""
        has_forward = any(self.forwards_seen) or (may_follow and bool(self.ddp))
        return State(Words("some" if has_forward else "none"), _SAME_FORWARDS)

    def unprepared(self, losses: Iterable[Tensor], used: Sequence[bool]) -> list[DistributedDataParallel]:
        """Return the DDP modules that the backward of ``losses`` reaches without a forward of DDP, so does not reduce.

        ``used`` says for each DDP module whether it has gradients of earlier micro-batches that this backward reduces.
        """
        modules = []
        for index, (module, has_run) in enumerate(zip(self.ddp, self.forwards_seen)):
            if has_run:
                continue
            leaves = {id(leaf) for loss in losses for leaf in leaves_of(loss)}
            if any(used[index : index + 1]) or not leaves.isdisjoint(map(id, module.module.parameters())):
                modules.append(module)
        return modules

    def check_forwards(
        self, name: str, losses: Collection[Tensor], used: Sequence[bool] = (), *, others_prepare: bool = False
    ) -> list[DistributedDataParallel]:
        """Raise ValueError when the backward of ``losses`` would skip the reduction of a wrapper.

        With ``others_prepare`` the code that runs the forward may still prepare the reduction, as ``manual_backward``
        of Lightning does, for the DDP modules that are returned.
        """
        if not (self.ddp or self.fsdp):
            return []
        if not any(map(attrgetter("grad_fn"), losses)):
            fix = "Use model(batch).sum() * 0 where there are no terms: the backward must reach the wrapper."
            raise ValueError(expected(name, "a tensor that the model has computed", Words("a leaf"), fix))
        modules = self.unprepared(losses, used)
        if modules and not (others_prepare and all(map(torch_private.is_in_forward, modules))):
            raise unseen_forward(name)
        return modules

    def forget_forwards(self) -> None:
        """Reset the wrappers on every rank after forwards without a backward: one of their losses is then refused."""
        for module in self.ddp:
            torch_private.forget_forward(module)
        self.watch_forwards(broadcasts=True)
        self.reshard()

    def reshard(self) -> None:
        """Free the whole parameters that a forward of FSDP2 without a backward leaves: the next step outdates them."""
        for module in self.fsdp_modules:
            module.reshard()


def unseen_forward(name: str) -> ValueError:
    """Return the error for gradients that DDP does not reduce, because its forward did not run."""
    fix = "DDP reduces only after a forward of its own: call model(batch), not model.module(batch) or another method."
    what, got = "a tensor from the forward of the DDP module", Words("one from the module inside it")
    return ValueError(expected(name, what, got, fix))


def shorten(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def find_sync(model: nn.Module) -> GradientSync:
    """Return the wrappers that manage parameters of ``model``; TypeError or ValueError if it is not supported."""
    if not isinstance(model, nn.Module):
        raise TypeError(expected("model", "an nn.Module", model, "Pass the wrapped model."))
    inside = list(model.modules())
    if torch_private.fsdp_modules(inside, "FullyShardedDataParallel"):
        fix = "Use torch.distributed.fsdp.fully_shard, or DDP."
        raise ValueError(expected("model", "FSDP2, HSDP, DDP or plain modules", Words("FullyShardedDataParallel"), fix))
    if "DeepSpeedEngine" in map(attrgetter("__name__"), type(model).__mro__):
        fix = (
            "DeepSpeed divides and reduces gradients in engine.backward alone: call engine.backward(loss_fn(...)) with "
            "gradient_accumulation_steps=1, and larger micro-batches."
        )
        raise ValueError(expected("model", "FSDP2, HSDP, DDP or plain modules", Words("an engine of DeepSpeed"), fix))
    sync = GradientSync(fsdp=torch_private.fsdp_groups(model))
    for module in inside:
        if isinstance(module, DistributedDataParallel):
            sync.ddp.append(module)
        sync.shares_statistics |= isinstance(module, nn.SyncBatchNorm)
    if not (sync.ddp or sync.fsdp):
        sync.unwrapped = model
        return sync
    fsdp_modules = dict.fromkeys([*torch_private.fsdp_modules(inside), *map(attrgetter("module"), sync.fsdp)])
    managed: set[int] = set()
    for group in sync.fsdp:
        managed.update(map(id, group.parameters()))
    for module in sync.ddp:
        ignored = module.parameters_to_ignore
        managed |= {id(p) for name, p in module.module.named_parameters() if name not in ignored}
    sync.fsdp_modules = [*fsdp_modules]
    sync.unmanaged = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in managed]
    return sync


def find_ranks(sync: GradientSync | None, group: Group) -> ProcessGroup | None:
    """Return ``group``, else the ranks that the wrappers reduce over, else all ranks; None when this process is alone.

    ``sync`` is None after an error in the model, which the header that follows reports, over all ranks.
    """
    if group is None:
        if not is_initialized():
            return None
        reduced_over = None
        with suppress(Exception):
            reduced_over = None if sync is None else sync.group
        # If these are all ranks, return the default group, the object that other calls use. A rank that fails before
        # its loss exchanges a header here, while the other ranks exchange that of their loss: both need one group.
        is_all = reduced_over is not None and sorted(group_ranks(reduced_over)) == list(range(dist.get_world_size()))
        group = None if is_all else reduced_over
    ranks = resolve_group(group)
    return ranks if ranks.size() > 1 else None
