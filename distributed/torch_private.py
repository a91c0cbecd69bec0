"""Every use of a torch interface that is private or was renamed between versions, and nothing else."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ..errors import RankError

# torch 2.13 renamed the collectives on one tensor and warns about the old names.
_ALL_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
_IN_ORDER = dist.distributed_c10d.AllgatherOptions()
_IN_ORDER.asyncOp = False  # on an accelerator: on the current stream
# Fills ``output`` (n,) with this rank's part of the sum of ``tensor`` (W * n,) over the ranks.
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_flat(output: Tensor, tensor: Tensor, group: ProcessGroup) -> None:
    """Fill ``output`` (W * n,) with ``tensor`` (n,) of every rank, in rank order.

    For a few bytes the public function of ``torch.distributed`` takes twice as long.
    """
    work = getattr(group, _ALL_GATHER)(output, tensor, _IN_ORDER)
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
    This decorator never imports it: while it is not imported, there are no compiled graphs.

    The traceback of a :class:`RankError` ends here, because its text is complete and every rank prints it.
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

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # makes the compiler break the graph at a call
    call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return call


# Whether the code runs inside ``torch.func.grad``, ``torch.vmap`` or another transform of ``torch.func``; and a context
# manager that switches the transforms around it off.
func_transforms_are_active: Callable[[], bool]
func_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
outside_func_transforms: Callable[[], AbstractContextManager[object]]
outside_func_transforms = getattr(torch._C, "_DisableFuncTorch", nullcontext)


def has_tangent(*values: object) -> bool:
    """Return True if one of ``values`` is a dual tensor of forward-mode differentiation."""
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    return any(isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None for value in values)


def flatten_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Return the one group over all dimensions of ``mesh``; torch creates it at the first call and keeps it."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


_MEAN, _OVER_RANKS, _OF_POOL = "fullrank: a mean", "fullrank: over ranks", "fullrank: of a pool"
_SUMS_AND_FACTORS = ("AddBackward", "DivBackward", "MulBackward", "SubBackward")
_SAME_VALUE = ("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0")


def note_kind(loss: Tensor, *, over_ranks: bool = False, of_pool: bool = False) -> Tensor:
    """Note in the graph of ``loss`` that it is a mean, for :func:`is_mean`, and return it.

    With ``over_ranks`` the note says instead that it is over the rows of several ranks, for :func:`is_over_ranks`; with
    ``of_pool`` also that it compares its rows, for :func:`is_of_pool`.
    """
    node: Any = None if torch.compiler.is_compiling() else loss.grad_fn
    if node is not None:
        node.metadata[_OVER_RANKS if over_ranks else _MEAN] = True
        if of_pool:
            node.metadata[_OF_POOL] = True
    return loss


def is_over_ranks(loss: Tensor) -> bool:
    """Return True if a note in the graph says that ``loss``, or a part of a weighted sum, is over several ranks."""
    return _is_noted(loss, _OVER_RANKS)


def is_of_pool(loss: Tensor) -> bool:
    """Return True if a note in the graph says that ``loss``, or a part of a weighted sum, compares its rows."""
    return _is_noted(loss, _OF_POOL)


def _is_noted(loss: Tensor, note: str) -> bool:
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if note in node.metadata:
            return True
        if node.name() in _SAME_VALUE or node.name().startswith(_SUMS_AND_FACTORS):
            nodes += [parent for parent, _ in node.next_functions]
    return False


def is_mean(loss: Tensor) -> bool:
    """Return True if the graph of a scalar says that it is a mean of several terms, or a fraction of one.

    The last node of torch's losses records the reduction, and :func:`note_kind` notes that of ours. A mean divided by a
    number >= 1 still counts as a mean. A multiple does not, because it may be the sum.
    """
    node: Any = loss.grad_fn
    divisors: list[Any] = []
    while node is not None and _MEAN not in node.metadata:
        is_division = node.name().startswith("DivBackward")
        if not is_division and node.name() not in _SAME_VALUE:
            break
        divisors += [node._saved_other] if is_division else []
        node = node.next_functions[0][0]
    # Reading a divisor on an accelerator would wait for the device.
    if node is None or any(isinstance(divisor, Tensor) and divisor.device.type != "cpu" for divisor in divisors):
        return False
    if node.name().startswith("MeanBackward"):
        is_recorded = node._saved_self_sym_numel != 1
    else:
        is_recorded = getattr(node, "_saved_reduction", None) == 1 and node._saved_target.numel() != 1
        is_recorded = is_recorded or _MEAN in node.metadata
    return bool(is_recorded and all(divisor >= 1 for divisor in divisors))


def loss_parallel_is_active() -> bool:
    """Return True inside of torch's ``loss_parallel()``, whose handlers compute the cross-entropy of DTensors."""
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    return handlers is None or torch.ops.aten.nll_loss_forward.default in handlers


def backward_is_running() -> bool:
    """Return True while a backward pass runs, in which activation checkpointing runs forward code a second time."""
    return torch._C._current_graph_task_id() != -1


def tensors_with_graph(outputs: object) -> list[Tensor]:
    """Return the plain tensors with a graph in what a module returns; FSDP2 looks for them in the same way."""
    return [leaf for leaf in tree_leaves(outputs) if type(leaf) is Tensor and leaf.requires_grad]


def back_propagate_zeros(roots: Sequence[Any]) -> None:
    """Run the backward of tensors, or edges of tensors that nobody has to hold any more, with gradients of zero."""
    zeros = []
    for root in roots:
        like = root if isinstance(root, Tensor) else root.node._input_metadata[root.output_nr]
        zeros.append(torch.zeros(like.shape, dtype=like.dtype, device=like.device))
    torch.autograd.backward(roots, zeros)


# On lists of tensors, in few kernels if the device has them: the p-norm of each, with powers summed in ``dtype``;
# copies, which convert dtypes; products with a scalar on the device; divisions by a number.
norms_of_each, copy_each_ = torch._foreach_norm, torch._foreach_copy_
multiply_each_, divide_each_ = torch._foreach_mul_, torch._foreach_div_

sparse_values = Tensor._values  # the memory of the values of a sparse COO tensor, coalesced or not


class FsdpGroup:
    """A set of parameters that FSDP2 reduces together: its switches and its unreduced gradients.

    FSDP2 has no public way to read them. Changes go through the public setters of FSDPModule where there are any.

    Args:
        state: the parameter group of FSDP2.
        ids: of the model's parameters; the group may have parameters of other models too.
        module: the FSDPModule that the group belongs to.
    """

    def __init__(self, state: Any, ids: set[int], module: Any) -> None:
        self.state, self.module, self._ids = state, module, ids

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

    @property
    def has_hook(self) -> bool:
        """Whether a function given to ``set_all_reduce_hook`` changes the reduced gradients."""
        return getattr(self.state, "_all_reduce_hook", None) is not None

    def process_group(self) -> ProcessGroup:
        """Return the group of all the ranks that FSDP2 reduces the gradients over."""
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
        """Return the model's parameters in both forms that its modules may have: sharded, and whole for computing."""
        return [form for param in self._own_params() for form in _forms(param)]

    def _own_params(self) -> list[Any]:
        """Return torch's records of the model's parameters in this group."""
        return [param for param in self.state.fsdp_params if any(id(form) in self._ids for form in _forms(param))]

    def unreduced(self) -> dict[int, Tensor]:
        """Return the gradients that are not in the ``grad`` of a parameter, by the ids of what they belong to."""
        found = {id(param): param.unsharded_accumulated_grad for param in self._own_params()}
        found[id(self.state)] = getattr(self.state, "_partial_reduce_output", None)
        return {place: grad for place, grad in found.items() if grad is not None}

    def discard(self) -> None:
        """Drop every gradient of these parameters, and the unsharded ones left by a backward without reduction."""
        for parameter in self.parameters():
            parameter.grad = None
        for param in self._own_params():
            if param.unsharded_accumulated_grad is not None:  # from torch 2.15 on the `grad` of a form, dropped above
                param.unsharded_accumulated_grad = None
        self.state._partial_reduce_output = None


def _forms(param: Any) -> list[Any]:
    both = param.sharded_param, getattr(param, "_unsharded_param", None)
    return [form for form in both if form is not None]


def forget_forward(module: DistributedDataParallel) -> None:
    """Reset DDP's reducer after a forward without backward; otherwise the next backward all-reduces even under no_sync.

    Call it on every rank or on none: DDP rebuilds its buckets two forwards later, which is a collective.
    """
    reducer = getattr(module, "reducer", None)  # missing under the compiler's reducer, whose forward prepares nothing
    try:
        if reducer is not None:
            reducer._check_reducer_finalized()
            reducer._reset_state()
    except RuntimeError:
        pass  # a backward failed inside the reduction, and DDP raises at its next forward: this must not hide it


def awaits_first_reduction(module: DistributedDataParallel) -> bool:
    """Return True until DDP with ``static_graph`` has recorded its graph, in its first backward."""
    return module.static_graph and not module._static_graph_delay_allreduce_enqueued


def fsdp_modules(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the FSDPModules among ``modules``, without importing FSDP (0.7 s): until it is imported there are none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in modules if isinstance(module, fsdp.FSDPModule)]


def has_fsdp1(modules: Iterable[nn.Module]) -> bool:
    """Return True if one of ``modules`` is a FullyShardedDataParallel, which FSDP2 replaces."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules)


def has_composable_replicate(modules: Iterable[nn.Module]) -> bool:
    """Return True if ``replicate`` of torch.distributed._composable has given one of ``modules`` a DDP out of sight."""
    return any(type(module).__module__ == "torch.distributed._composable.replicate" for module in modules)


def fsdp_groups(model: nn.Module) -> list[FsdpGroup]:
    """Return the groups of parameters that FSDP2 manages for ``model``.

    They belong to FSDPModules in ``model`` and, if these do not manage all trainable parameters, to FSDPModules around
    it. FSDP2 leaves no mark on a parameter, but torch keeps a weak mapping of all modules that it has wrapped.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    listed = list(model.parameters())  # once, because reading them for each group would take most of the time
    ids, inside = set(map(id, listed)), fsdp_modules(model.modules())
    groups = [FsdpGroup(group, ids, module) for module in inside for group in _param_groups(module)]
    managed = {id(form) for group in groups for form in group.parameters()}
    missing = {id(p) for p in listed if p.requires_grad} - managed
    if missing:
        from torch.distributed._composable_state import _module_state_mapping

        known = {id(group.state) for group in groups}
        wrapped: list[Any] = list(_module_state_mapping)
        for module in wrapped:
            for group in _param_groups(module) if hasattr(module, "_get_fsdp_state") else []:
                is_of_model = any(id(form) in missing for param in group.fsdp_params for form in _forms(param))
                if is_of_model and id(group) not in known:
                    known.add(id(group))
                    groups.append(FsdpGroup(group, ids, module))
    return groups


def count_unreduced(parameters: Iterable[Tensor]) -> int:
    """Return how many of ``parameters`` have a gradient that FSDP2 has not reduced yet and stores outside ``grad``."""
    if "torch.distributed.fsdp" not in sys.modules:
        return 0
    from torch.distributed._composable_state import _module_state_mapping

    wrapped: list[Any] = list(_module_state_mapping)
    groups = [group for module in wrapped if hasattr(module, "_get_fsdp_state") for group in _param_groups(module)]
    unreduced: dict[int, int] = {}  # from the id of each form to the id of its parameter
    for group in groups:
        is_partial = getattr(group, "_partial_reduce_output", None) is not None  # HSDP has reduced over the shards only
        for param in group.fsdp_params:
            if is_partial or _is_unreduced(param):
                unreduced |= dict.fromkeys(map(id, _forms(param)), id(param))
    return len({unreduced[id(parameter)] for parameter in parameters if id(parameter) in unreduced}) if unreduced else 0


def _is_unreduced(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups  # one, or None, before torch 2.12
    return [group for group in groups if group is not None]


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which ``module`` stores its own buffers; writing to it changes the module."""
    return module._buffers


# ``require_forward_param_sync`` at the end of a window. It is truthy, but neither the True nor the False that a forward
# of DDP assigns, so it shows whether one has run since.
_NO_FORWARD = 1


def forwards_since(module: DistributedDataParallel) -> int:
    """Return 0 if DDP has run no forward since :func:`leave_as_reduced`, 2 if its next forward broadcasts, else 1."""
    flag: Any = module.require_forward_param_sync
    return 0 if type(flag) is int else 1 + bool(flag)


# For each DDP module with the hook: whether its last forward with gradients ran inside no_sync.
_LOCAL_FORWARDS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def holds_unreduced(module: DistributedDataParallel) -> bool:
    """Return True if DDP has probably not reduced the gradients of ``module``.

    A forward without gradients leaves the same flag as one inside no_sync. If a gradient was never changed in place, it
    was not reduced, because DDP writes reduced gradients in place. Several backwards in no_sync change it too. Then a
    hook notes the last forward with gradients, and the answer is known from the next call on.
    """
    if module.require_forward_param_sync is not False:
        return False
    ignored = getattr(module, "parameters_to_ignore", ())  # DDP does not reduce these
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
    """Set the flag of DDP that the last backward has reduced, and note that no forward has run since."""
    module.require_forward_param_sync = _NO_FORWARD  # type: ignore[assignment]


def watch_forward(module: DistributedDataParallel) -> None:
    """Make :func:`has_run_forward` return False until the next forward of DDP, which does the same as without it."""
    module.require_forward_param_sync = int(module.require_forward_param_sync)  # type: ignore[assignment]


def has_run_forward(module: DistributedDataParallel) -> bool:
    """Return True if DDP has run a forward since :func:`watch_forward`, or reduces without a forward."""
    return _active_reducer(module) is None or type(module.require_forward_param_sync) is not int


def has_never_run(module: DistributedDataParallel) -> bool:
    """Return True until DDP has run its first forward; a compiled forward does not count."""
    return not module._lazy_init_ran


def is_in_forward(module: DistributedDataParallel) -> bool:
    """Return True inside a forward of DDP, in which Lightning runs ``training_step``."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is module


def rebuild_ddp_buckets(module: DistributedDataParallel) -> None:
    """Rebuild DDP's buckets now if its next forward with gradients would; then this is a collective."""
    reducer = _active_reducer(module)
    if reducer is not None and reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True


def broadcast_ddp_buffers(module: DistributedDataParallel) -> None:
    """Broadcast DDP's buffers now if its next forward would."""
    if _active_reducer(module) is not None and module._check_sync_bufs_pre_fwd():
        module._sync_buffers()


def _active_reducer(module: DistributedDataParallel) -> Any:
    """Return the reducer that the forward of DDP uses; None if the compiler or a single hook reduces instead."""
    is_idle = getattr(module, "_use_python_reducer", False) or getattr(module, "_delay_all_reduce_all_params", False)
    return None if is_idle else module.reducer


def stages_of_schedule(schedule: Any) -> list[Any]:
    """Return the stages of a pipeline schedule on this rank; none for another object."""
    return list(getattr(schedule, "_stages", None) or [stage for stage in [getattr(schedule, "_stage", None)] if stage])


def num_micro_batches_of_schedule(schedule: Any) -> int:
    """Return the number of micro-batches that a pipeline schedule cuts a batch into."""
    return int(schedule._n_microbatches)


@contextmanager
def loss_of_schedule(schedule: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let a pipeline schedule use ``change(loss_fn)`` inside, and not divide gradients by the micro-batches."""
    kept = schedule._loss_fn, schedule.scale_grads
    schedule._loss_fn, schedule.scale_grads = change(kept[0]), False
    try:
        yield
    finally:
        schedule._loss_fn, schedule.scale_grads = kept
