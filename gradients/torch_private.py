"""Every use of an interface of torch that is private, by the code for gradients: lists of tensors, FSDP2 and DDP."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..distributed.torch_private import flatten_mesh, fsdp_param_groups, fsdp_wrapped

# On lists of tensors, in few kernels if the device has them: the p-norm of each, with powers summed in ``dtype``;
# copies, which convert dtypes; products with a scalar on the device; divisions by a number.
norms_of_each, copy_each_ = torch._foreach_norm, torch._foreach_copy_
multiply_each_, divide_each_ = torch._foreach_mul_, torch._foreach_div_


class FsdpGroup:
    """A set of parameters that FSDP2 reduces together: its switches and its unreduced gradients.

    ``state`` is the parameter group of FSDP2, of which torch has no public form, and ``module`` the FSDPModule that it
    belongs to. ``ids`` are of the model's parameters: the group may have those of other models too.
    """

    def __init__(self, state: Any, ids: set[int], module: Any) -> None:
        self.state, self.module, self._ids = state, module, ids
        shards = getattr(state.mesh_info, "shard_mesh_size", None)
        replicas = getattr(state.mesh_info, "replicate_mesh_size", None)
        self.is_hybrid = None not in (shards, replicas)  # both shards and replicas
        self.is_sharded = (shards or 1) > 1  # a forward has to gather the parameters from other ranks
        self.num_ranks = (shards or 1) * (replicas or 1)  # that the gradients are reduced over

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
    """Reset DDP's reducer after a forward without backward, on all ranks; else the next backward always all-reduces."""
    reducer = getattr(module, "reducer", None)  # missing under the compiler's reducer, whose forward prepares nothing
    try:
        if reducer is not None:
            reducer._check_reducer_finalized()
            reducer._reset_state()
    except RuntimeError:
        pass  # a backward failed inside the reduction, and DDP raises at its next forward: this must not hide it


def reset_reducer(module: DistributedDataParallel) -> None:
    """Reset DDP's reducer after a backward that has not reached all parameters."""
    if (reducer := getattr(module, "reducer", None)) is not None:
        reducer._reset_state()


def awaits_first_reduction(module: DistributedDataParallel) -> bool:
    """Return True until DDP with ``static_graph`` has recorded its graph, in its first backward."""
    return module.static_graph and not module._static_graph_delay_allreduce_enqueued


def fsdp_modules(modules: Iterable[nn.Module], kind: str = "FSDPModule") -> list[Any]:
    """Return the modules of a ``kind`` of FSDP, without importing it (0.7 s): until it is imported there are none."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in modules if isinstance(module, getattr(fsdp, kind))]


def has_composable_replicate(modules: Iterable[nn.Module]) -> bool:
    """Return True if ``replicate`` of torch.distributed._composable has given one of ``modules`` a DDP out of sight."""
    return any(type(module).__module__ == "torch.distributed._composable.replicate" for module in modules)


def fsdp_groups(model: nn.Module) -> list[FsdpGroup]:
    """Return the groups of parameters that FSDP2 manages for ``model``, of FSDPModules in it and around it."""
    if not (wrapped := fsdp_wrapped()):
        return []
    listed = list(model.parameters())  # once, because reading them for each group would take most of the time
    ids, inside = set(map(id, listed)), fsdp_modules(model.modules())
    groups = [FsdpGroup(group, ids, module) for module in inside for group in fsdp_param_groups(module)]
    managed = {id(form) for group in groups for form in group.parameters()}
    missing = {id(p) for p in listed if p.requires_grad} - managed
    known = {id(group.state) for group in groups}
    for module in wrapped if missing else ():  # around it: FSDP2 leaves no mark on a parameter
        for group in fsdp_param_groups(module):
            is_of_model = any(id(form) in missing for param in group.fsdp_params for form in _forms(param))
            if is_of_model and id(group) not in known:
                known.add(id(group))
                groups.append(FsdpGroup(group, ids, module))
    return groups


def count_unreduced(parameters: Iterable[Tensor]) -> int:
    """Return how many of ``parameters`` have a gradient that FSDP2 has not reduced yet and stores outside ``grad``."""
    groups = [group for module in fsdp_wrapped() for group in fsdp_param_groups(module)]
    unreduced: dict[int, int] = {}  # from the id of each form to the id of its parameter
    for group in groups:
        is_partial = getattr(group, "_partial_reduce_output", None) is not None  # HSDP has reduced over the shards only
        for param in group.fsdp_params:
            whole = getattr(param, "_unsharded_param", None)
            is_whole = param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
            if is_partial or is_whole:
                unreduced |= dict.fromkeys(map(id, _forms(param)), id(param))
    return len({unreduced[id(parameter)] for parameter in parameters if id(parameter) in unreduced}) if unreduced else 0


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


# A forward of DDP, or the code of Lightning that prepares a reduction without one, sets `require_forward_param_sync` to
# True or False. We keep it an int meanwhile, which means the same to DDP, so a bool means: there was one since.


def watch_forward(module: DistributedDataParallel, broadcasts: bool | None = None) -> None:
    """Make :func:`has_run_forward` return False until the next forward of DDP, which ``broadcasts`` buffers or not."""
    flag = module.require_forward_param_sync if broadcasts is None else broadcasts
    module.require_forward_param_sync = int(flag)  # type: ignore[assignment]


def has_run_forward(module: DistributedDataParallel) -> bool:
    """Return True if DDP has run a forward since :func:`watch_forward`, or reduces without a forward."""
    return type(module.require_forward_param_sync) is bool or _active_reducer(module) is None


def has_never_run(module: DistributedDataParallel) -> bool:
    """Return True until DDP has run its first forward; a compiled forward does not count."""
    return not module._lazy_init_ran


def is_in_forward(module: DistributedDataParallel) -> bool:
    """Return True inside a forward of DDP, in which Lightning runs ``training_step``."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is module


def communicate_before_forward(module: DistributedDataParallel) -> None:
    """Rebuild DDP's buckets and broadcast its buffers now, collectives, if its next forward with gradients would."""
    if (reducer := _active_reducer(module)) is None:
        return
    if reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True
    if module._check_sync_bufs_pre_fwd():
        module._sync_buffers()


def _active_reducer(module: DistributedDataParallel) -> Any:
    """Return the reducer that the forward of DDP uses; None if the compiler or a single hook reduces instead."""
    is_idle = getattr(module, "_use_python_reducer", False) or getattr(module, "_delay_all_reduce_all_params", False)
    return None if is_idle else module.reducer
