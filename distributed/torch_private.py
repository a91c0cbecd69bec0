"""Every use of a torch interface that is private or changed its name between versions. Nothing else stands here."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..errors import RankError

# torch 2.13 renamed the collectives on one tensor and warns about the old names.
_ALL_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
_IN_ORDER = dist.distributed_c10d.AllgatherOptions()
_IN_ORDER.asyncOp = False  # an accelerator works on its current stream
# Fills ``output`` (n,) with this rank's part of the sum of ``tensor`` (W * n,) over the ranks.
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_flat(output: Tensor, own: Tensor, group: ProcessGroup) -> None:
    """Fill ``output`` (W * n,) with ``own`` (n,) of every rank, in rank order.

    The function of ``torch.distributed`` around it takes as long again for few bytes.
    """
    work = getattr(group, _ALL_GATHER)(output, own, _IN_ORDER)
    if work is not None:
        work.wait()


def bound_device(group: ProcessGroup) -> torch.device | None:
    """Return the device that ``group`` was bound to by ``init_process_group(device_id=...)``, if there is one."""
    return getattr(group, "bound_device_id", None)


P = ParamSpec("P")
T = TypeVar("T")

_TAKES_REASON = "reason" in inspect.signature(torch.compiler.disable).parameters  # from torch 2.7 on
_EAGER = "it communicates or keeps state between calls, so it runs eagerly. Compile without fullgraph=True"


def not_compiled(function: Callable[P, T], reason: str = _EAGER) -> Callable[P, T]:
    """Keep ``function`` out of compiled graphs, as ``torch.compiler.disable`` does.

    With ``fullgraph=True`` the error of torch quotes the name of the function and ``reason``.

    ``torch.compiler.disable`` imports the compiler (1.5 s), and ``torch._disable_dynamo`` does so in the first call.
    This decorator never imports it: where nobody has, there is nothing to be kept out of.

    The traceback of a :class:`RankError` ends here: its text says everything, and the ranks print one each.
    """
    disabled: Callable[P, T] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        try:
            if disabled is None:
                if "torch._dynamo" not in sys.modules:
                    return function(*args, **kwargs)
                disabled = torch.compiler.disable(function, **({"reason": reason} if _TAKES_REASON else {}))
            return disabled(*args, **kwargs)
        except RankError as error:
            raise error.with_traceback(None) from error.__cause__

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # the compiler breaks the graph at a call of it
    call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return call


# Whether this is inside ``torch.func.grad``, ``torch.vmap`` or another transform of ``torch.func``; and a context in
# which those around it leave tensors alone.
func_transforms_are_active: Callable[[], bool]
func_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
outside_func_transforms: Callable[[], AbstractContextManager[object]]
outside_func_transforms = getattr(torch._C, "_DisableFuncTorch", nullcontext)


def has_tangent(*values: object) -> bool:
    """Return True if one of ``values`` is a dual tensor of forward-mode differentiation."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(isinstance(one, Tensor) and forward_ad.unpack_dual(one).tangent is not None for one in values)


def version_of(tensor: Tensor) -> int:
    """Return a number that changes with each change in place of ``tensor``; -1 where torch counts none."""
    return -1 if tensor.is_inference() else tensor._version


def flatten_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Return the one group over all dimensions of ``mesh``; torch creates it at the first call and keeps it."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


_MEAN, _OVER_RANKS = "fullrank: a mean", "fullrank: over ranks"
_SUMS_AND_FACTORS = ("AddBackward", "DivBackward", "MulBackward", "SubBackward")
_AS_IT_IS = ("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0")


def note_kind(loss: Tensor, *, over_ranks: bool = False) -> Tensor:
    """Return ``loss``, with a note in its graph that it is a mean, for :func:`is_mean`.

    With ``over_ranks`` the note says instead that it has the rows of several ranks, for :func:`is_over_ranks`.
    """
    node: Any = None if torch.compiler.is_compiling() else loss.grad_fn
    if node is not None:
        node.metadata[_OVER_RANKS if over_ranks else _MEAN] = True
    return loss


def is_over_ranks(loss: Tensor) -> bool:
    """Return True if the graph says that ``loss`` has the rows of several ranks: its parts, before sums and factors."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if _OVER_RANKS in node.metadata:
            return True
        if node.name() in _AS_IT_IS or node.name().startswith(_SUMS_AND_FACTORS):
            nodes += [before for before, _ in node.next_functions]
    return False


def is_mean(loss: Tensor) -> bool:
    """Return True if the graph of a scalar says that it is a mean of several terms, or a part of one.

    The last node of a loss of torch records its reduction, and :func:`note_kind` that of ours. A division by a number
    >= 1 leaves a mean one; a product may be the way back to the sum.
    """
    node: Any = loss.grad_fn
    divisors: list[Any] = []
    while node is not None and _MEAN not in node.metadata:
        is_division = node.name().startswith("DivBackward")
        if not is_division and node.name() not in _AS_IT_IS:
            break
        divisors += [node._saved_other] if is_division else []
        node = node.next_functions[0][0]
    # A divisor on an accelerator is not waited for.
    if node is None or any(isinstance(one, Tensor) and one.device.type != "cpu" for one in divisors):
        return False
    if node.name().startswith("MeanBackward"):
        is_found = node._saved_self_sym_numel != 1
    else:
        recorded = getattr(node, "_saved_reduction", None) == 1 and node._saved_target.numel() != 1
        is_found = recorded or _MEAN in node.metadata
    return bool(is_found and all(one >= 1 for one in divisors))


def backward_is_running() -> bool:
    """Return True inside a backward pass, where activation checkpointing runs forward code a second time."""
    return torch._C._current_graph_task_id() != -1


# In few kernels where the device has them: the p-norm of every tensor, its powers summed in ``dtype``; copies, which
# convert dtypes; products with a scalar on the device; divisions by a number.
norms_of_each, copy_each_ = torch._foreach_norm, torch._foreach_copy_
multiply_each_, divide_each_ = torch._foreach_mul_, torch._foreach_div_

sparse_values = Tensor._values  # those that a sparse COO tensor stores, not coalesced, sharing its memory


class FsdpGroup:
    """One set of parameters that FSDP2 reduces together: its switches and its unreduced gradients.

    FSDP2 has no public way to read them. Where FSDPModule has a public setter, changes go through the setter.
    """

    def __init__(self, state: Any, ids: set[int], module: Any) -> None:
        self.state, self.module = state, module  # the module is the FSDPModule that holds the group
        self._ids = ids  # of the model's parameters: the group may hold parameters of other modules too

    @property
    def switches(self) -> tuple[bool, bool]:
        """Whether a backward reduces over the shards, and whether it then reduces over the replicas."""
        return self.state.reduce_grads, self.state.all_reduce_grads

    @switches.setter
    def switches(self, value: tuple[bool, bool]) -> None:
        self.state.reduce_grads, self.state.all_reduce_grads = value

    @property
    def divisor(self) -> float:
        """The number by which FSDP2 divides a reduced gradient."""
        factor = self.state.gradient_divide_factor
        return float(self.num_ranks if factor is None else factor)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that the gradients are reduced over: shards times replicas."""
        info = self.state.mesh_info
        return int(getattr(info, "shard_mesh_size", 1) * getattr(info, "replicate_mesh_size", 1))

    @property
    def is_sharded(self) -> bool:
        """Whether a forward has to gather the parameters from other ranks."""
        return bool(getattr(self.state.mesh_info, "shard_mesh_size", 1) > 1)

    @property
    def is_hybrid(self) -> bool:
        """Whether there are both shards and replicas."""
        info = self.state.mesh_info
        return hasattr(info, "shard_mesh_size") and hasattr(info, "replicate_mesh_size")

    def process_group(self) -> ProcessGroup:
        """Return the group of all the ranks that the gradients are reduced over."""
        return flatten_mesh(self._mesh())

    def ranks(self) -> list[int]:
        """Return the global ranks of :meth:`process_group`, without creating it."""
        return list(self._mesh().mesh.flatten().tolist())

    def _mesh(self) -> DeviceMesh:
        """Return the part of the mesh that the gradients are reduced over."""
        info = self.state.mesh_info
        dims = [dim for dim in (info.replicate_mesh_dim, info.shard_mesh_dim) if dim is not None]
        return info.mesh if info.mesh.ndim == len(dims) else info.mesh[tuple(info.mesh.mesh_dim_names[d] for d in dims)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters, in both forms that its modules may hold: sharded, and whole for computing."""
        return [form for held in self._held() for form in _forms(held)]

    def _held(self) -> list[Any]:
        """Return what torch keeps for each parameter of the model in this group."""
        return [held for held in self.state.fsdp_params if any(id(form) in self._ids for form in _forms(held))]

    def discard(self) -> None:
        """Drop every gradient of these parameters, and the unsharded ones that a backward without reduction leaves."""
        for parameter in self.parameters():
            parameter.grad = None
        for held in self._held():
            if held.unsharded_accumulated_grad is not None:  # from torch 2.15 on the `grad` of a form
                held.unsharded_accumulated_grad = None
        self.state._partial_reduce_output = None


def _forms(held: Any) -> list[Any]:
    both = held.sharded_param, getattr(held, "_unsharded_param", None)
    return [form for form in both if form is not None]


def forget_forward(module: DistributedDataParallel) -> None:
    """Reset DDP's reducer after a forward without backward; otherwise the next backward all-reduces even under no_sync.

    Call it on every rank or on none: DDP rebuilds its buckets two forwards later, which is a collective.
    """
    reducer = getattr(module, "reducer", None)  # the compiler's own reducer prepares nothing in the forward
    try:
        if reducer is not None:
            reducer._check_reducer_finalized()
            reducer._reset_state()
    except RuntimeError:
        pass  # a backward failed inside the reduction: DDP raises at its next forward, and this must not hide it


def awaits_first_reduction(module: DistributedDataParallel) -> bool:
    """Return True until DDP with ``static_graph`` has recorded its graph, in its first backward."""
    return module.static_graph and not module._static_graph_delay_allreduce_enqueued


def fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the FSDPModules among ``modules``. FSDP (0.7 s) is not imported: if nobody has, there are none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in modules if isinstance(module, fsdp.FSDPModule)]


def has_fsdp1(modules: Iterable[nn.Module]) -> bool:
    """Return True when one of ``modules`` is wrapped by the FullyShardedDataParallel that FSDP2 replaces."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules)


def fsdp_groups(model: nn.Module) -> list[FsdpGroup]:
    """Return the groups of parameters that FSDP2 manages for ``model``.

    They belong to FSDPModules in ``model``, and to those around it when some trainable parameters are in none of them:
    FSDP2 leaves no mark on a parameter, but torch keeps a weak mapping of all modules that it has wrapped.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    listed = list(model.parameters())  # once: reading them for each group takes most of the time
    ids, inside = set(map(id, listed)), fsdp_modules(model.modules())
    groups = [FsdpGroup(group, ids, module) for module in inside for group in _param_groups(module)]
    managed = {id(form) for group in groups for form in group.parameters()}
    left = {id(p) for p in listed if p.requires_grad} - managed
    if left:
        from torch.distributed._composable_state import _module_state_mapping

        known = {id(group.state) for group in groups}
        wrapped: list[Any] = list(_module_state_mapping)
        for module in wrapped:
            for group in _param_groups(module) if hasattr(module, "_get_fsdp_state") else []:
                has_some = any(id(form) in left for held in group.fsdp_params for form in _forms(held))
                if has_some and id(group) not in known:
                    known.add(id(group))
                    groups.append(FsdpGroup(group, ids, module))
    return groups


def count_unreduced(parameters: Iterable[Tensor]) -> int:
    """Return how many of ``parameters`` have a gradient that FSDP2 has not reduced yet and that no ``grad`` shows."""
    if "torch.distributed.fsdp" not in sys.modules:
        return 0
    from torch.distributed._composable_state import _module_state_mapping

    wrapped: list[Any] = list(_module_state_mapping)
    groups = [group for module in wrapped if hasattr(module, "_get_fsdp_state") for group in _param_groups(module)]
    unreduced: dict[int, int] = {}  # of every form, the place of its parameter
    for group in groups:
        is_partial = getattr(group, "_partial_reduce_output", None) is not None  # HSDP, over the shards alone
        for held in group.fsdp_params:
            if is_partial or _is_unreduced(held):
                unreduced |= dict.fromkeys(map(id, _forms(held)), id(held))
    return len({unreduced[id(parameter)] for parameter in parameters if id(parameter) in unreduced}) if unreduced else 0


def _is_unreduced(held: Any) -> bool:
    whole = getattr(held, "_unsharded_param", None)
    return held.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    several = [state._fsdp_param_group] if several is None else several  # one, or None, before torch 2.12
    return [group for group in several if group is not None]


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which ``module`` holds its own buffers; writing to it writes to the module."""
    return module._buffers


# What ``require_forward_param_sync`` is set to at the end of a window. It is truthy, but not the True or False that DDP
# assigns, so a later forward of DDP is visible.
_AS_LEFT = 1


def forwards_since(module: DistributedDataParallel) -> int:
    """Return 0 if DDP has run no forward since :func:`leave_as_reduced`; else 2 if its next one broadcasts, or 1."""
    flag: Any = module.require_forward_param_sync
    return 0 if type(flag) is int else 1 + bool(flag)


# Of each DDP module that is watched, whether its last forward with gradients ran inside no_sync.
_LOCAL_FORWARDS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def holds_unreduced(module: DistributedDataParallel) -> bool:
    """Return True if DDP has probably not reduced the gradients of ``module``.

    A forward without gradients leaves the same mark as one inside no_sync. A gradient that nothing has written to in
    place tells them apart, because DDP writes what it has reduced. Several backwards in no_sync write too: then a hook
    watches which forward is the last one with gradients, and tells from the next call on.
    """
    if module.require_forward_param_sync is not False:
        return False
    ignored = getattr(module, "parameters_to_ignore", ())  # DDP writes to none of these
    reduced = [p for name, p in module.module.named_parameters() if p.requires_grad and name not in ignored]
    if any(p.grad is not None and p.grad._version == 0 for p in reduced):
        return True
    if module not in _LOCAL_FORWARDS:
        _LOCAL_FORWARDS[module] = False
        module.register_forward_pre_hook(_note_forward)
    return _LOCAL_FORWARDS[module]


def _note_forward(module: nn.Module, _: object) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _LOCAL_FORWARDS[module] = not module.require_backward_grad_sync


def leave_as_reduced(module: DistributedDataParallel) -> None:
    """Say that the last backward has reduced, as DDP does, and that no forward has followed it."""
    module.require_forward_param_sync = _AS_LEFT  # type: ignore[assignment]


def watch_forward(module: DistributedDataParallel) -> None:
    """Let :func:`has_run_forward` return False until the next forward of DDP; what that forward does is unchanged."""
    module.require_forward_param_sync = int(module.require_forward_param_sync)  # type: ignore[assignment]


def has_run_forward(module: DistributedDataParallel) -> bool:
    """Return True if DDP has run a forward since :func:`watch_forward`, or needs none to reduce its gradients."""
    return _active_reducer(module) is None or type(module.require_forward_param_sync) is not int


def has_never_run(module: DistributedDataParallel) -> bool:
    """Return True if DDP has not run its first forward yet; a compiled forward does not count."""
    return not module._lazy_init_ran


def is_in_forward(module: DistributedDataParallel) -> bool:
    """Return True inside a forward of DDP, such as the ``training_step`` that Lightning runs there."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is module


def rebuild_ddp_buckets(module: DistributedDataParallel) -> None:
    """Do now what the next forward of DDP with gradients would do about its buckets; collective where it would be."""
    reducer = _active_reducer(module)
    if reducer is not None and reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True


def broadcast_ddp_buffers(module: DistributedDataParallel) -> None:
    """Do now what the next forward of DDP would do about its buffers, and nothing if it would do nothing."""
    if _active_reducer(module) is not None and module._check_sync_bufs_pre_fwd():
        module._sync_buffers()


def _active_reducer(module: DistributedDataParallel) -> Any:
    """Return the reducer that the forward of DDP uses; None where the compiler or a single hook reduces instead."""
    idle = getattr(module, "_use_python_reducer", False) or getattr(module, "_delay_all_reduce_all_params", False)
    return None if idle else module.reducer
