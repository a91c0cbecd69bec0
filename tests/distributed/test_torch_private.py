"""Each private name of torch and torchmetrics that the package uses still does what the package relies on.

A row fails by its name when torch changes or removes it; many uses have a fallback, so that nothing else would show it.
"""

from __future__ import annotations

import ast
import configparser
import copy
import functools
import inspect
import re
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torchmetrics
from meshes import init_device_mesh
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from workers import error_of

from fullrank.accumulation.torch_private import tensors_with_graph
from fullrank.distributed.gather import _KEEP_ROWS
from fullrank.distributed.torch_private import collectives_by_group, watch_collectives

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
Table = dict[str, tuple[str, Callable[[], Any]]]  # names that are used together, what for, and a check on two ranks


# --- autograd and tensors --------------------------------------------------------------------------------------------


def leaf(size: int = 1) -> Any:
    return torch.ones(size, requires_grad=True)


def versions() -> bool:
    (one := leaf()).mul(2).sum().backward()
    before, _ = one.grad._version, one.grad.div_(2)
    return (before, one.grad._version) == (0, 1)


def zero_tensors() -> bool:
    return torch._efficientzerotensor(1)._is_zerotensor() and not torch.zeros(1)._is_zerotensor()


def norms() -> bool:
    (norm,) = torch._foreach_norm([2 * torch.ones(4)], 2.0, dtype=torch.float64)
    return (norm.item(), norm.dtype) == (4.0, torch.float64)


def in_each(function: Callable[..., Any], argument: Any) -> list[float]:
    """Return the elements of two tensors of ones after ``function``."""
    function(tensors := [torch.ones(2), torch.ones(1)], argument)
    return torch.cat(tensors).tolist()


def in_backward(read: Callable[[Tensor], Any], gradient: Tensor | None = None, **options: Any) -> Any:
    """Return what ``read`` returns for a gradient inside a backward."""
    seen, ones = [], leaf(2)
    (doubled := ones * 2).register_hook(lambda grad: seen.append(read(grad)))
    torch.autograd.grad(doubled, ones, torch.ones(2) if gradient is None else gradient, **options)
    return seen[0]


def inside(transform: Callable[..., Any], read: Callable[[Tensor], Any]) -> Any:
    seen: list[Any] = []
    transform(lambda x: (seen.append(read(x)), x.sum())[1])(torch.ones(2, 1))
    return seen[0]


def graph_tasks() -> bool:
    read = torch._C._current_graph_task_id
    return read() == -1 != in_backward(lambda _: read())


def kept_graphs() -> bool:
    read = torch._C._autograd._get_current_graph_task_keep_graph
    return in_backward(lambda _: read(), retain_graph=True) and not in_backward(lambda _: read())


def transforms() -> bool:
    read = torch._C._are_functorch_transforms_active
    return inside(torch.vmap, lambda _: read()) and not read()


def plain_tensors() -> bool:
    def is_wrapped(_: Tensor) -> bool:
        with torch._C._DisableFuncTorch():
            return torch._C._functorch.is_functorch_wrapped_tensor(torch.ones(1) * 2)

    return not inside(torch.func.grad, is_wrapped)


def wrapped_tensors() -> bool:
    read = torch._C._functorch.is_functorch_wrapped_tensor
    return inside(torch.vmap, read) and inside(torch.func.grad, read) and not read(leaf())


def batched_tensors() -> bool:
    of = torch._C._functorch
    found = inside(
        lambda function: torch.vmap(torch.func.grad(function)),
        lambda x: (of.is_batchedtensor(x), of.is_batchedtensor(of.get_unwrapped(x))),
    )
    return found == (False, True)


def batched_gradients() -> bool:
    read = torch._C._functorch.is_legacy_batchedtensor
    return in_backward(read, torch.eye(2), is_grads_batched=True) and not in_backward(read)


def within(mode: Any, read: Callable[[], Any]) -> tuple[Any, Any]:
    with mode:
        inner = read()
    return inner, read()


def tracing() -> bool:
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.trace(lambda x: (seen.append(torch._C._get_tracing_state()), x + 1)[1], leaf(), check_trace=False)
    return seen[0] is not None and torch._C._get_tracing_state() is None


def leaves() -> bool:
    named = namedtuple("named", "first second")
    with_graph = [leaf() for _ in range(4)]
    nested = {"a": [with_graph[0], (with_graph[1], 3)], "b": named(with_graph[2], None)}, with_graph[3], torch.ones(1)
    return list(map(id, tensors_with_graph(nested))) == list(map(id, with_graph))


def reductions() -> bool:
    x, targets, losses = leaf(6).view(3, 2), torch.ones(3, 2), []
    for reduction in ("mean", "sum"):
        losses.append(functional.cross_entropy(x, torch.tensor([0, 1, 1]), reduction=reduction))
        losses.append(functional.mse_loss(x, targets, reduction=reduction))
        losses.append(functional.binary_cross_entropy_with_logits(x, targets, reduction=reduction))
    nodes: list[Any] = [loss.grad_fn for loss in losses]
    found = [(node._saved_reduction, node._saved_target.numel()) for node in nodes]
    return found == [(1, 3), (1, 6), (1, 6), (2, 3), (2, 6), (2, 6)]


TENSORS: Table = {
    "Tensor._version": ("sees changes in place, such as DDP's reduction", versions),
    "Tensor._base": ("refuses views of gathered rows", lambda: (rows := torch.ones(2))[:1]._base is rows),
    "Tensor._is_zerotensor": ("passes no tensors without memory to C", zero_tensors),
    "torch._foreach_norm": ("computes the norms of all gradients", norms),
    "torch._foreach_copy_": (
        "copies gradients between dtypes",
        lambda: in_each(torch._foreach_copy_, [torch.zeros(2).double(), torch.zeros(1).bfloat16()]) == [0, 0, 0],
    ),
    "torch._foreach_mul_": ("clips", lambda: in_each(torch._foreach_mul_, torch.tensor(3.0)) == [3, 3, 3]),
    "torch._foreach_div_": ("divides by a count", lambda: in_each(torch._foreach_div_, 4.0) == [0.25, 0.25, 0.25]),
    "torch._C._current_graph_task_id": ("refuses losses that a backward computes again", graph_tasks),
    "torch._C._autograd._get_current_graph_task_keep_graph": ("reuses memory in the last backward", kept_graphs),
    "torch._C._are_functorch_transforms_active": ("refuses transforms", transforms),
    "torch._C._DisableFuncTorch": ("agrees on that with the other ranks", plain_tensors),
    "torch._C._functorch.is_functorch_wrapped_tensor": ("finds tensors of vmap", wrapped_tensors),
    "torch._C._functorch.is_batchedtensor get_unwrapped": ("finds tensors of vmap in transforms", batched_tensors),
    "torch._C._functorch.is_legacy_batchedtensor": ("reuses no memory for several gradients", batched_gradients),
    "torch._C._len_torch_dispatch_stack": (
        "passes no fake tensors to C",
        lambda: within(TorchDispatchMode(), torch._C._len_torch_dispatch_stack) == (1, 0),
    ),
    "torch._C._get_tracing_state": ("passes no traced tensors to C", tracing),
    "torch.autograd.forward_ad._current_level": (
        "refuses forward mode",
        lambda: within(forward_ad.dual_level(), lambda: forward_ad._current_level) == (0, -1),
    ),
    "torch.utils._pytree.tree_leaves": ("finds the outputs of a module", leaves),
    "DivBackward0._saved_other": ("recognises means", lambda: (leaf() / 4).grad_fn._saved_other == 4),
    "MeanBackward0._saved_self_sym_numel": ("counts terms", lambda: leaf(6).mean().grad_fn._saved_self_sym_numel == 6),
    "MseLossBackward0._saved_reduction _saved_target": ("recognises the means of torch's losses", reductions),
}


# --- modules and the compiler ----------------------------------------------------------------------------------------


class Noting(nn.Module):
    """Notes what ``_apply`` is given, and writes and reads a tensor of its own."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Noting:
        self.noted = fn(torch.empty(0)).dtype, recurse
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}own"] = torch.ones(1)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.loaded = state_dict.pop(f"{prefix}own"), *rest
        super()._load_from_state_dict(state_dict, prefix, *rest)


def moves() -> bool:
    nn.Sequential(one := Noting()).to(torch.float64)
    return one.noted == (torch.float64, True)


def keeps_state() -> bool:
    """The dict from which a module takes its keys is a copy."""
    state = (outer := nn.Sequential(Noting())).state_dict()
    outer.load_state_dict(state)
    own, _, strict, *lists = outer[0].loaded
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) .* \"0._extra_state\""):  # of an earlier version
        outer.load_state_dict(state | {"0._extra_state": {}})
    return [*state] == ["0.own"] and own is state["0.own"] and strict is True and lists == [[], [], []]


def buffers() -> bool:
    (module := nn.BatchNorm1d(1))._buffers["running_mean"] = torch.full((1,), 7.0)
    return module.running_mean == 7


def imports_compiler() -> bool:
    torch.compile(torch.neg, backend="eager")(leaf())
    return "torch._dynamo" in sys.modules


def breaks_graphs() -> bool:
    def marked(x: Tensor) -> Tensor:
        return x + 1

    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, "the reason"  # type: ignore[attr-defined]
    compiled = torch.compile(lambda x: marked(x), backend="eager", fullgraph=True)
    return "the reason" in error_of(lambda: compiled(leaf()))[1]


def unwraps() -> bool:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    compiled = torch.compile(inner := nn.Linear(1, 1), backend="eager")
    return compiled._orig_mod is inner is checkpoint_wrapper(inner)._checkpoint_wrapped_module


MODULES: Table = {
    "compiled._orig_mod checkpointed._checkpoint_wrapped_module": ("names parameters without wrappers", unwraps),
    "nn.Module._buffers": ("restores buffers before a replay", buffers),
    "nn.Module._apply": ("moves queues", moves),
    "nn.Module._save_to_state_dict _load_from_state_dict _extra_state": ("saves and loads queues", keeps_state),
    "torch._dynamo": ("knows whether the compiler is imported", imports_compiler),
    "function._torchdynamo_disable _torchdynamo_disable_msg": ("breaks graphs and says why", breaks_graphs),
}


# --- DDP and FSDP2 ---------------------------------------------------------------------------------------------------

MEAN = 3.0  # the gradient of `backward`, reduced over two ranks


def local() -> float:
    """The gradient of :func:`backward` on this rank."""
    return 2.0 + 2.0 * dist.get_rank()


def backward(model: nn.Module) -> float | None:
    """Run two rows forward and backward, and return the gradient of the first weight, which multiplies them."""
    model(torch.full((2, 1), 1.0 + dist.get_rank())).sum().backward()
    grad: Any = next(model.parameters()).grad
    return None if grad is None else float(getattr(grad, "to_local", lambda: grad)().flatten()[0])


def ddp(*more: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(nn.Sequential(nn.Linear(1, 1, bias=False), *more), **options)


def steps(name: str, **options: Any) -> list[Any]:
    model = ddp(**options)
    return [getattr(model, name), *((backward(model), getattr(model, name))[1] for _ in range(2))]


def gradient_with(name: str, value: object) -> float | None:
    setattr(model := ddp(), name, value)
    return backward(model)


def forwards() -> bool:
    found = []
    for reduces in (True, False):
        (model := ddp()).require_backward_grad_sync = reduces
        model.require_forward_param_sync = 1  # as the package does
        backward(model)
        found.append(model.require_forward_param_sync is reduces)
    return all(found)


def ignored() -> bool:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    return set(DistributedDataParallel(module).parameters_to_ignore) == {"1.weight"}


def resets() -> bool:
    found = []
    for is_reset in (True, False):
        (model := ddp())(torch.ones(1, 1))
        if is_reset:
            model.reducer._reset_state()
        model.require_backward_grad_sync = False
        found.append(backward(model))
    return found == [local(), MEAN]


def unfinished() -> bool:
    (model := ddp(nn.Linear(1, 1))).reducer._check_reducer_finalized()
    model.module.forward = model.module[0].forward  # without the second layer
    backward(model)
    return error_of(model.reducer._check_reducer_finalized)[0] == "RuntimeError"


def rebuilds() -> bool:
    backward(model := ddp())
    return [model.reducer._rebuild_buckets() for _ in range(2)] == [True, False]


def with_buffer() -> Any:
    (model := ddp(nn.BatchNorm1d(1, affine=False)).eval()).module[1].running_mean.fill_(local())
    return model


def buffers_due() -> bool:
    (quiet := with_buffer()).require_forward_param_sync = False
    return with_buffer()._check_sync_bufs_pre_fwd() and not quiet._check_sync_bufs_pre_fwd()


def sends_buffers() -> bool:
    (model := with_buffer())._sync_buffers()
    return model.module[1].running_mean == 2  # as on rank 0


def keeps_buffers() -> bool:
    (model := with_buffer()).broadcast_buffers = False
    return model(torch.ones(1, 1)).shape == (1, 1) and model.module[1].running_mean == local()


def one_hook() -> bool:
    frozen, layer = nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1, bias=False)
    options: Any = {"delay_all_reduce_named_params": [("1.weight", layer.weight)]}
    model = DistributedDataParallel(nn.Sequential(frozen, layer), param_to_hook_all_reduce=layer.weight, **options)
    return model._delay_all_reduce_all_params and not ddp()._delay_all_reduce_all_params


def active_module() -> bool:
    seen: list[Any] = []
    (model := ddp()).module.register_forward_hook(lambda *_: seen.append(type(model)._active_ddp_module))
    backward(model)
    return seen == [model] and type(model)._active_ddp_module is None


def replicates() -> bool:
    from torch.distributed._composable.replicate import replicate

    before, model = type(module := nn.Linear(1, 1)), replicate(module)
    return before.__module__ != type(model).__module__ == "torch.distributed._composable.replicate"


class Sharded:
    """A module with one weight that FSDP2 manages, and what torch keeps for it."""

    def __init__(self, *, hybrid: bool = False, **options: Any) -> None:
        shape, names = ((2, 1), ("replicas", "shards")) if hybrid else ((2,), ("shards",))
        self.module: Any = nn.Linear(1, 2, bias=False)
        fsdp.fully_shard(self.module, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names), **options)
        state = self.module._get_fsdp_state()
        # Several groups from torch 2.12 on.
        (self.group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        (self.held,) = self.group.fsdp_params

    def backward(self, reduces: bool = True, over_replicas: bool = True) -> float | None:
        self.group.reduce_grads, self.group.all_reduce_grads = reduces, over_replicas
        return backward(self.module)


def managed_modules() -> bool:
    from torch.distributed._composable_state import _module_state_mapping

    return Sharded().module in _module_state_mapping and not hasattr(nn.Linear(1, 1), "_get_fsdp_state")


def sharded_form() -> bool:
    return (one := Sharded()).held.sharded_param is one.module.weight


def whole_form() -> bool:
    (one := Sharded()).backward(reduces=False)
    is_unreduced, one.held._unsharded_param.grad = one.held._unsharded_param.grad is not None, None
    reduced = one.backward()
    one.module.unshard()
    return is_unreduced and reduced == MEAN and one.held._unsharded_param is one.module.weight


def accumulated() -> bool:
    """A sum in another dtype is kept here before torch 2.15, and as the gradient of the whole form from then on."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    (one := Sharded(mp_policy=policy)).backward(reduces=False)
    is_unreduced, one.held._unsharded_param.grad = one.held.unsharded_accumulated_grad is not None, None
    if one.held.unsharded_accumulated_grad is not None:
        one.held.unsharded_accumulated_grad = None
    return is_unreduced and one.backward() == MEAN


def partial_output() -> bool:
    is_empty = (one := Sharded(hybrid=True)).group._partial_reduce_output is None
    one.backward(over_replicas=False)
    is_unreduced, one.group._partial_reduce_output = one.group._partial_reduce_output is not None, None
    return is_empty and is_unreduced and one.backward() == MEAN


def adds_up() -> bool:
    is_on = (one := Sharded()).group.reduce_grads
    return is_on and one.backward(reduces=False) is None and one.backward() == 2 * MEAN


def adds_up_shards() -> bool:
    is_on = (one := Sharded(hybrid=True)).group.all_reduce_grads
    return is_on and one.backward(over_replicas=False) is None and one.backward() == 2 * MEAN


def divides() -> bool:
    is_unset = (one := Sharded()).group.gradient_divide_factor is None
    one.module.set_gradient_divide_factor(1.0)
    one.module.set_force_sum_reduction_for_comms(True)
    return is_unset and one.group.gradient_divide_factor == 1.0 and one.backward() == 2 * MEAN


def hooks() -> bool:
    is_unset = (one := Sharded()).group._all_reduce_hook is None
    one.module.set_all_reduce_hook(lambda gradient: gradient.mul_(3))
    return is_unset and one.group._all_reduce_hook is not None and one.backward() == 3 * MEAN


def meshes() -> bool:
    both, shards = Sharded(hybrid=True).group.mesh_info, Sharded().group.mesh_info
    found = [both.replicate_mesh_size, both.shard_mesh_size, both.replicate_mesh_dim, both.shard_mesh_dim]
    found += [shards.shard_mesh_size, shards.shard_mesh_dim, shards.replicate_mesh_dim, both.mesh.ndim]
    return found == [2, 1, 0, 1, 2, 0, None, 2] and not hasattr(shards, "replicate_mesh_size")


def schedules() -> bool:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

    rank, device = dist.get_rank(), torch.device("cpu")
    single = ScheduleGPipe(stage := PipelineStage(nn.Identity(), rank, 2, device), 3, loss_fn=leaf)
    stages = [PipelineStage(nn.Identity(), number, 4, device) for number in (rank, 2 + rank)]
    several = ScheduleInterleaved1F1B(stages, 4, loss_fn=leaf)
    numbers = single._n_microbatches, several._n_microbatches
    found = single._stage is stage and several._stages == stages and numbers == (3, 4)
    return found and single._loss_fn is several._loss_fn is leaf and single.scale_grads and several.scale_grads


WRAPPERS: Table = {
    "DDP.require_backward_grad_sync": (
        "switches the reduction off",
        lambda: gradient_with("require_backward_grad_sync", False) == local(),
    ),
    "DDP.require_forward_param_sync": ("sees forwards", forwards),
    "DDP.parameters_to_ignore": ("knows which gradients are reduced", ignored),
    "DDP.reducer _reset_state": ("resets a forward without backward", resets),
    "DDP.reducer._check_reducer_finalized": ("leaves a failed reduction to DDP", unfinished),
    "DDP.reducer._rebuild_buckets": ("communicates ahead of a forward", rebuilds),
    "DDP._has_rebuilt_buckets": (
        "communicates ahead of a forward",
        lambda: steps("_has_rebuilt_buckets") == [False, False, True],
    ),
    "DDP._check_sync_bufs_pre_fwd": ("knows whether the next forward broadcasts", buffers_due),
    "DDP._sync_buffers": ("broadcasts ahead of a forward", sends_buffers),
    "DDP.broadcast_buffers": ("keeps forwards from communicating", keeps_buffers),
    "DDP.static_graph _static_graph_delay_allreduce_enqueued": (
        "accumulates once the graph is recorded",
        lambda: (
            ddp(static_graph=True).static_graph
            and steps("_static_graph_delay_allreduce_enqueued", static_graph=True) == [False, True, True]
        ),
    ),
    "DDP._use_python_reducer": (
        "knows that the forward prepares nothing",
        lambda: not ddp()._use_python_reducer and gradient_with("_use_python_reducer", True) == local(),
    ),
    "DDP._delay_all_reduce_all_params": ("knows that the forward prepares nothing", one_hook),
    "DDP._lazy_init_ran": ("knows the first forward", lambda: steps("_lazy_init_ran") == [False, True, True]),
    "DDP._active_ddp_module": ("knows a forward that is running", active_module),
    "Schedule._stage _stages _loss_fn _n_microbatches scale_grads": ("scales the loss of a pipeline", schedules),
    "torch.distributed._composable.replicate": ("refuses a hidden DDP", replicates),
    "torch.distributed._composable_state._module_state_mapping _get_fsdp_state": ("finds FSDP2", managed_modules),
    "FSDPState._fsdp_param_groups _fsdp_param_group fsdp_params sharded_param": ("finds parameters", sharded_form),
    "FSDPParam._unsharded_param": ("drops unreduced gradients", whole_form),
    "FSDPParam.unsharded_accumulated_grad": ("drops unreduced gradients", accumulated),
    "FSDPParamGroup._partial_reduce_output": ("drops gradients of one replica", partial_output),
    "FSDPParamGroup.reduce_grads": ("switches the reduction off", adds_up),
    "FSDPParamGroup.all_reduce_grads": ("switches the reduction over replicas off", adds_up_shards),
    "FSDPParamGroup.gradient_divide_factor": ("knows the divisor of gradients", divides),
    "FSDPParamGroup._all_reduce_hook": ("refuses a reduction that a hook may change", hooks),
    "FSDPParamGroup.mesh_info shard_mesh_size replicate_mesh_size shard_mesh_dim replicate_mesh_dim": (
        "knows the ranks of a reduction",
        meshes,
    ),
}


# --- groups and torchmetrics -----------------------------------------------------------------------------------------


def gathers() -> bool:
    (options := dist.distributed_c10d.AllgatherOptions()).asyncOp = False
    group: Any = dist.group.WORLD
    gather = getattr(group, "all_gather_single", None) or group._allgather_base  # the first from torch 2.13 on
    if (work := gather(output := torch.empty(2), torch.full((1,), local()), options)) is not None:
        work.wait()
    return output.tolist() == [2.0, 4.0]


def adds_rows() -> bool:
    add = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the first from torch 2.13 on
    add(output := torch.empty(1), torch.tensor([1.0, 2.0]) * local())
    return output.item() == [6.0, 12.0][dist.get_rank()]


def flattens() -> bool:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    groups = [mesh._flatten().get_group() for _ in range(2)]
    return groups[0].size() == 2 and groups[0] is groups[1]


def binds() -> bool:
    group: Any = dist.group.WORLD
    before, group.bound_device_id = group.bound_device_id, torch.device("cpu", 0)
    after, group.bound_device_id = group.bound_device_id, None
    return (before, after) == (None, torch.device("cpu", 0))


class Total(torchmetrics.Metric):
    """The sum of one value over the ranks; notes what torchmetrics calls, and its flags inside ``compute``."""

    full_state_update = False

    def __init__(self, *values: float) -> None:
        self.calls: list[Any] = []
        super().__init__()
        self.add_state("total", torch.zeros(1), dist_reduce_fx="sum")
        for value in values:
            self.update(value)

    def update(self, value: float) -> None:
        self.total += value

    def compute(self) -> Tensor:
        self.calls.append((self._to_sync, self._is_synced))
        return self.total.sum()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        self.calls.append("wrap")
        return super()._wrap_compute(compute)

    def _sync_dist(self, *arguments: Any, **options: Any) -> None:
        self.calls.append("sync")
        super()._sync_dist(*arguments, **options)


def synchronizes() -> bool:
    return (one := Total(local())).compute() == 6 and one.calls == ["wrap", "sync", (True, True)]


def stays_local() -> bool:
    return (one := Total())(local()) == local() and one.calls == ["wrap", (False, False)]


def caches() -> bool:
    is_empty = (one := Total(local()))._computed is None
    is_cached, one._computed = one.compute() == 6 == one._computed, None
    return is_empty and is_cached and one.compute() == 6 and one.calls.count("sync") == 2


def counts_updates() -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (0, 1):
            (one := Total())._update_count = count
            one.compute()
    return sum("before the ``update``" in str(warning.message) for warning in caught) == 1


def plots() -> bool:
    from matplotlib.figure import Figure

    return Total()._plot(torch.tensor(0.5), axes := Figure().subplots())[1] is axes


def is_loss_parallel() -> bool:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    def read() -> bool:
        return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers

    return within(loss_parallel(), read) == (True, False)


def counts_collectives() -> bool:
    before, watched = collectives_by_group()[group := dist.group.WORLD], []
    with watch_collectives(watched.append):
        dist.all_reduce(torch.ones(1), group=group)
    return collectives_by_group()[group] == before + 1 and watched == [group]


GROUPS_AND_METRICS: Table = {
    "torch.distributed.distributed_c10d._world ProcessGroup._get_sequence_number_for_group pg_map _rank_not_in_group": (
        "sees a collective over another group",
        counts_collectives,
    ),
    "ProcessGroup._allgather_base all_gather_single asyncOp": ("gathers", gathers),
    "torch.distributed.reduce_scatter_single": ("adds gradients of gathered rows", adds_rows),
    "DeviceMesh._flatten": ("makes one group of all dimensions", flattens),
    "DTensor._op_dispatcher._custom_op_handlers aten nll_loss_forward default": (
        "refuses logits outside of loss_parallel",
        is_loss_parallel,
    ),
    "ProcessGroup.bound_device_id": ("knows the device of collectives", binds),
    "Metric._wrap_compute _sync_dist": ("gathers all rows at once", synchronizes),
    "Metric._to_sync": ("knows whether compute synchronizes", stays_local),
    "Metric._is_synced": (
        "knows the rows of all ranks",
        lambda: [(one := Total(1.0))._is_synced, one.sync(), one._is_synced] == [False, None, True],
    ),
    "Metric._computed": ("drops a value that not every rank has cached", caches),
    "Metric._update_count": ("silences a warning", counts_updates),
    "Metric._plot": ("plots", plots),
}


# --- the tests -------------------------------------------------------------------------------------------------------

USES = TENSORS | MODULES | WRAPPERS | GROUPS_AND_METRICS


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_torch_has_it_still(rank: int, use: str) -> None:
    purpose, works = USES[use]
    message = f"torch {torch.__version__} has changed `{use}`, with which the package {purpose}"
    try:
        found = works()
    except Exception as error:
        raise AssertionError(message) from error
    assert found, message


# Nodes that the package follows, by what ``name()`` says before "Backward0".
NODES: dict[str, Callable[[Tensor], Any]] = {
    "Add": lambda x: x + 1,
    "Alias": torch.ops.aten.alias,
    "Clone": torch.clone,
    "Div": lambda x: x / 2,
    "Index": lambda x: x[torch.tensor([0])],
    "IndexSelect": lambda x: x.index_select(0, torch.tensor([0])),
    "MaskedSelect": lambda x: x.masked_select(x > 0),
    "Mean": torch.mean,
    "Mul": lambda x: x * 2,
    "Neg": torch.neg,
    "ReshapeAlias": lambda x: torch.ops.aten._reshape_alias(x, (4, 1), (1, 1)),
    "Select": lambda x: x[0],
    "Sigmoid": torch.sigmoid,
    "Slice": lambda x: x[:1],
    "Squeeze": torch.squeeze,
    "Sub": lambda x: x - 1,
    "ToCopy": Tensor.double,
    "UnsafeView": lambda x: torch.ops.aten._unsafe_view(x, (4, 1)),
    "Unsqueeze": lambda x: x[None],
    "View": lambda x: x.view(4, 1),
}


@pytest.mark.parametrize("name", NODES)
def test_a_node_has_its_name_still(name: str) -> None:
    assert NODES[name](leaf(4)).grad_fn.name() == f"{name}Backward0"


# Every attribute in the files about torch's inner parts needs a row, except those of the package and of these.
INNER = ("_private.py", "wrappers.py")
CLASSES = (nn.Module(), torchmetrics.SumMetric(), DistributedDataParallel)  # a subclass may override what they have
OWNERS = [*CLASSES, torch, nn, dist, fsdp, torch.compiler, Tensor, DeviceMesh, dist.ProcessGroup, dist.distributed_c10d]
OWNERS += [torch.autograd.graph.Node, forward_ad, forward_ad.UnpackedDualTensor, copy, functools, inspect, sys]
OWNERS += [inspect.Signature, property, Exception, dict, set, list, str]
# "_backward" ends the names of the operators of kernels/registration.py.
STANDARD = {*dir(namedtuple("Empty", "")), *dir(sys), "kwargs", "_", "_backward"}


def of(*owners: object) -> set[str]:
    return {name for owner in owners for name in dir(owner)}


@functools.cache
def names_in(source: str) -> tuple[set[str], set[str], set[str]]:
    """Return the attributes, the identifiers in texts and imports, and what classes and modules define."""
    attributes, named, defined = set(), set(), set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                defined.add(node.attr)
            case ast.Attribute():
                attributes.add(node.attr)
            case ast.FunctionDef() | ast.ClassDef():
                defined.add(node.name)
                lines = [line for line in node.body if isinstance(line, ast.Assign) and isinstance(node, ast.ClassDef)]
                defined |= {name.id for line in lines for name in line.targets if isinstance(name, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
            case ast.Import() | ast.ImportFrom(level=0):
                paths = [getattr(node, "module", ""), *(alias.name for alias in node.names)]
                named.update(*(path.split(".") for path in paths))
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                attributes.add(name)
            case ast.Constant(value=str(text)):
                named.update(filter(str.isidentifier, text.split(".")))
    return attributes, named, defined


def gaps(files: dict[str, str], rows: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the private names in ``files`` that have no row, and the rows that are not in ``files``."""
    found = {path: names_in(source) for path, source in files.items()}
    used = set().union(*(attributes | named for attributes, named, _ in found.values()))
    defined = set().union(*(names for *_, names in found.values()))
    needed = {name for name in (used - defined) | ((used | defined) & of(*CLASSES)) if name.startswith("_")}
    needed = needed.union(*(found[path][0] - defined - of(*OWNERS) for path in found if path.endswith(INNER)))
    needed = {name for name in needed - STANDARD if not name.startswith("__")}
    return needed - set(rows), set(rows) - used - defined


def sources() -> dict[str, str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    folders = [ROOT.joinpath(*name.split(".")[1:]) for name in config["options"]["packages"].split()]
    files = [file for folder in folders for file in folder.glob("*.py") if file != ROOT / "setup.py"]
    return {str(file): file.read_text("utf-8") for file in files}


# The private parts of paths, and the names at their ends.
NAMES = {name for use in USES for name in [*re.findall(r"\b_\w+", use), *use.rpartition(".")[2].split()]}


def test_every_private_name_has_a_row() -> None:
    assert gaps(sources(), NAMES) == (set(), set())


@pytest.mark.parametrize(
    "source",
    [
        "tensor._new",
        "getattr(tensor, '_new', None)",
        "import torch._new",
        "from torch._new import name",
        "'torch._new' in sys.modules",
        "class Queue(nn.Module):\n    def _call_impl(self): ...",
        "group.mesh_info.new_size",
    ],
)
def test_control_a_private_name_without_a_row_is_seen(source: str) -> None:
    missing, unused = gaps(sources() | {"new_private.py": source}, NAMES | {"_old"})
    assert (len(missing), unused) == (1, {"_old"})


def test_every_node_has_a_row() -> None:
    followed = {name.partition("Backward") for source in sources().values() for name in names_in(source)[1]}
    assert {name for name, is_node, _ in followed if name and is_node} | _KEEP_ROWS == set(NODES)
