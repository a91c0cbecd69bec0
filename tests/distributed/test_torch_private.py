"""Each private name of torch and torchmetrics that the package uses is there still.

A row fails by its name when torch removes it: many uses have a fallback, so that nothing else would show it. What the
names do is shown by the tests of what the package does with them, or else by a check here.
"""

from __future__ import annotations

import ast
import configparser
import copy
import functools
import inspect
import re
import sys
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
from torch.distributed import fsdp, pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from workers import error_of

from fullrank.distributed.gather import _KEEP_ROWS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# Names that are used together and what for; what has them, or a check of what they do, each made on two ranks.
Table = dict[str, tuple[str, Callable[[], Any]]]


def leaf(size: int = 1) -> Any:
    return torch.ones(size, requires_grad=True)


def ddp(*more: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(nn.Sequential(nn.Linear(1, 1, bias=False), *more), **options)


def backward(model: nn.Module) -> float | None:
    """Run two rows forward and backward, and return the gradient of the first weight, which multiplies them."""
    model(torch.full((2, 1), 1.0 + dist.get_rank())).sum().backward()
    grad: Any = next(model.parameters()).grad
    return None if grad is None else float(getattr(grad, "to_local", lambda: grad)().flatten()[0])


def group_of_fsdp() -> Any:
    """Return the group of parameters of a module that FSDP2 has run over shards and replicas."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    module: Any = fsdp.fully_shard(nn.Linear(1, 2, bias=False), mesh=mesh)
    backward(module)
    state = module._get_fsdp_state()
    # Several groups from torch 2.12 on.
    (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return group


def schedule(name: str) -> Any:
    stage = pipelining.PipelineStage(nn.Identity(), dist.get_rank(), 2, torch.device("cpu"))
    return getattr(pipelining, name)([stage] if "Interleaved" in name else stage, 2, loss_fn=leaf)


def mean_of_squares() -> Any:
    return functional.mse_loss(leaf(6), torch.ones(6)).grad_fn


THERE: Table = {
    "Tensor._version": ("sees changes in place, such as DDP's reduction", leaf),
    "Tensor._base": ("refuses views of gathered rows", leaf),
    "Tensor._is_zerotensor": ("passes no tensors without memory to C", leaf),
    "torch._foreach_norm _foreach_copy_ _foreach_mul_ _foreach_div_": ("clips and divides gradients", lambda: torch),
    "torch._C._current_graph_task_id": ("refuses losses that a backward computes again", lambda: torch._C),
    "torch._C._are_functorch_transforms_active _DisableFuncTorch": ("refuses transforms", lambda: torch._C),
    "torch._C._functorch.is_functorch_wrapped_tensor is_batchedtensor get_unwrapped is_legacy_batchedtensor": (
        "finds tensors of vmap",
        lambda: torch._C._functorch,
    ),
    "torch._C._len_torch_dispatch_stack _get_tracing_state": (
        "passes no fake or traced tensors to C",
        lambda: torch._C,
    ),
    "torch.autograd.forward_ad._current_level": ("refuses forward mode", lambda: forward_ad),
    "torch.utils._pytree.tree_leaves": ("finds the outputs of a module", lambda: torch.utils._pytree),
    "DivBackward0._saved_other": ("recognises means", lambda: (leaf() / 4).grad_fn),
    "MeanBackward0._saved_self_sym_numel": ("counts terms", lambda: leaf(6).mean().grad_fn),
    "MseLossBackward0._saved_reduction _saved_target": ("recognises the means of torch's losses", mean_of_squares),
    "nn.Module._buffers _apply _save_to_state_dict _load_from_state_dict": ("moves and saves queues", nn.Module),
    "DDP.require_backward_grad_sync require_forward_param_sync": ("switches the reduction off, and sees forwards", ddp),
    "DDP.parameters_to_ignore reducer": ("knows which gradients are reduced", ddp),
    "DDP.reducer._reset_state _check_reducer_finalized _rebuild_buckets": (
        "resets a forward without backward, or communicates ahead of a forward",
        lambda: ddp().reducer,
    ),
    "DDP._has_rebuilt_buckets _check_sync_bufs_pre_fwd _sync_buffers broadcast_buffers": (
        "communicates ahead of a forward",
        ddp,
    ),
    "DDP.static_graph _static_graph_delay_allreduce_enqueued": (
        "accumulates once the graph is recorded",
        lambda: ddp(static_graph=True),
    ),
    "DDP._lazy_init_ran _active_ddp_module": ("knows the first forward, and one that is running", ddp),
    "Schedule._stage _loss_fn _n_microbatches scale_grads": (
        "scales the loss of a pipeline",
        lambda: schedule("ScheduleGPipe"),
    ),
    "Schedule._stages _loss_fn _n_microbatches scale_grads": (
        "scales the loss of a pipeline",
        lambda: schedule("ScheduleInterleaved1F1B"),
    ),
    "torch.distributed._composable_state._module_state_mapping": (
        "finds FSDP2",
        lambda: torch.distributed._composable_state,
    ),
    "torch.distributed._composable.replicate": ("refuses a hidden DDP", lambda: torch.distributed._composable),
    "FSDPParamGroup.fsdp_params reduce_grads all_reduce_grads _partial_reduce_output gradient_divide_factor "
    "_all_reduce_hook mesh_info": ("switches and counts the reductions of FSDP2", group_of_fsdp),
    "mesh_info.mesh shard_mesh_size replicate_mesh_size shard_mesh_dim replicate_mesh_dim": (
        "knows the ranks of a reduction",
        lambda: group_of_fsdp().mesh_info,
    ),
    "FSDPParam.sharded_param _unsharded_param unsharded_accumulated_grad": (
        "finds parameters, and drops unreduced gradients",
        lambda: group_of_fsdp().fsdp_params[0],
    ),
    "torch.distributed.distributed_c10d._rank_not_in_group": (
        "sees a collective over another group",
        lambda: dist.distributed_c10d,
    ),
    "torch.distributed.distributed_c10d._world.pg_map": ("lists the groups", lambda: dist.distributed_c10d._world),
    "ProcessGroup._get_sequence_number_for_group bound_device_id": (
        "counts collectives, and knows their device",
        lambda: dist.group.WORLD,
    ),
    "DeviceMesh._flatten": ("makes one group of all dimensions", lambda: DeviceMesh),
    "Metric._wrap_compute _sync_dist _to_sync _is_synced _computed _update_count _plot": (
        "gathers all rows at once",
        torchmetrics.SumMetric,
    ),
}


# --- checks of what no other test shows ------------------------------------------------------------------------------


def in_backward(read: Callable[[Tensor], Any], gradient: Tensor | None = None, **options: Any) -> Any:
    """Return what ``read`` returns for a gradient inside a backward."""
    seen, ones = [], leaf(2)
    (doubled := ones * 2).register_hook(lambda grad: seen.append(read(grad)))
    torch.autograd.grad(doubled, ones, torch.ones(2) if gradient is None else gradient, **options)
    return seen[0]


def kept_graphs() -> bool:
    read = torch._C._autograd._get_current_graph_task_keep_graph
    return in_backward(lambda _: read(), retain_graph=True) and not in_backward(lambda _: read())


def within(mode: Any, read: Callable[[], Any]) -> tuple[Any, Any]:
    with mode:
        inner = read()
    return inner, read()


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


def keeps_one_hook() -> bool:
    frozen, layer = nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1, bias=False)
    options: Any = {"delay_all_reduce_named_params": [("1.weight", layer.weight)]}
    model = DistributedDataParallel(nn.Sequential(frozen, layer), param_to_hook_all_reduce=layer.weight, **options)
    return model._delay_all_reduce_all_params and not ddp()._delay_all_reduce_all_params


def leaves_it_to_python() -> bool:
    (model := ddp())._use_python_reducer = True
    return not ddp()._use_python_reducer and backward(model) == 2.0 + 2.0 * dist.get_rank()


def gathers() -> bool:
    (options := dist.distributed_c10d.AllgatherOptions()).asyncOp = False
    group: Any = dist.group.WORLD
    gather = getattr(group, "all_gather_single", None) or group._allgather_base  # the first from torch 2.13 on
    if (work := gather(output := torch.empty(2), torch.full((1,), 2.0 + 2.0 * dist.get_rank()), options)) is not None:
        work.wait()
    return output.tolist() == [2.0, 4.0]


def adds_rows() -> bool:
    add = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # the first from torch 2.13 on
    add(output := torch.empty(1), torch.tensor([1.0, 2.0]) * (2.0 + 2.0 * dist.get_rank()))
    return output.item() == [6.0, 12.0][dist.get_rank()]


def is_loss_parallel() -> bool:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    def read() -> bool:
        return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers

    return within(loss_parallel(), read) == (True, False)


CHECKED: Table = {
    "torch._C._autograd._get_current_graph_task_keep_graph": ("reuses memory in the last backward", kept_graphs),
    "torch._dynamo": ("knows whether the compiler is imported", imports_compiler),
    "function._torchdynamo_disable _torchdynamo_disable_msg": ("breaks graphs and says why", breaks_graphs),
    "nn.Module._extra_state": (
        "loads states of earlier versions",
        lambda: nn.modules.module._EXTRA_STATE_KEY_SUFFIX == "_extra_state",
    ),
    "FSDPModule._get_fsdp_state _fsdp_param_groups _fsdp_param_group": ("finds parameters", group_of_fsdp),
    "compiled._orig_mod checkpointed._checkpoint_wrapped_module": ("names parameters without wrappers", unwraps),
    "DDP._use_python_reducer": ("knows that the forward prepares nothing", leaves_it_to_python),
    "DDP._delay_all_reduce_all_params": ("knows that the forward prepares nothing", keeps_one_hook),
    "ProcessGroup._allgather_base all_gather_single asyncOp": ("gathers", gathers),
    "torch.distributed.reduce_scatter_single": ("adds gradients of gathered rows", adds_rows),
    "DTensor._op_dispatcher._custom_op_handlers aten nll_loss_forward default": (
        "refuses logits outside of loss_parallel",
        is_loss_parallel,
    ),
}


# --- the tests -------------------------------------------------------------------------------------------------------

USES = THERE | CHECKED


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_torch_has_it_still(rank: int, use: str) -> None:
    purpose, make = USES[use]
    message = f"torch {torch.__version__} has changed `{use}`, with which the package {purpose}"
    try:
        found = make()
    except Exception as error:
        raise AssertionError(message) from error
    if use in THERE:
        found = all(hasattr(found, name) for name in use.rpartition(".")[2].split())
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
