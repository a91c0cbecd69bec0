"""Every use of a torch interface that is private or was renamed between versions, and nothing else."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RankError

# torch 2.13 renamed the collectives on one tensor and warns about the old names.
_ALL_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
_IN_ORDER = dist.distributed_c10d.AllgatherOptions()
_IN_ORDER.asyncOp = False  # on an accelerator: on the current stream
# Fills its first argument (n,) with this rank's part of the sum of the second (W * n,) over the ranks.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_flat(output: Tensor, tensor: Tensor, group: ProcessGroup) -> None:
    """Fill ``output`` (W * n,) with ``tensor`` (n,) of every rank; for few bytes torch's own takes twice as long."""
    work = getattr(group, _ALL_GATHER)(output, tensor, _IN_ORDER)
    if work is not None:
        work.wait()


def bound_device(group: ProcessGroup) -> torch.device | None:
    """Return the device that ``group`` was bound to by ``init_process_group(device_id=...)``, if there is one."""
    return getattr(group, "bound_device_id", None)


def collectives_by_group() -> dict[ProcessGroup, int]:
    """Return the number of collectives that each process group has counted."""
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map) if dist.is_available() else []
    return {group: group._get_sequence_number_for_group() for group in groups}


@contextmanager
def watch_collectives(check: Callable[[ProcessGroup], None]) -> Iterator[None]:
    """Call ``check`` with the group of each collective of ``torch.distributed`` inside, before it communicates."""
    module: Any = dist.distributed_c10d
    is_outside = module._rank_not_in_group

    def checked(group: ProcessGroup | None) -> bool:
        if isinstance(group, ProcessGroup):
            check(group)
        return bool(is_outside(group))

    module._rank_not_in_group = checked
    try:
        yield
    finally:
        module._rank_not_in_group = is_outside


P = ParamSpec("P")
T = TypeVar("T")

_EAGER = "it communicates or keeps state between calls, so it runs eagerly. Compile without fullgraph=True"


def not_compiled(function: Callable[P, T], reason: str = _EAGER) -> Callable[P, T]:
    """Keep ``function`` out of compiled graphs, as ``torch.compiler.disable`` does, which imports the compiler (1.5 s).

    With ``fullgraph=True`` the error of torch quotes the name of the function and ``reason``. The traceback of a
    :class:`RankError` ends here, because its text is complete and every rank prints it.
    """
    disabled: Callable[P, T] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        try:
            if disabled is None:
                if "torch._dynamo" not in sys.modules:
                    return function(*args, **kwargs)
                disabled = disable()
            return disabled(*args, **kwargs)
        except RankError as error:
            raise error.with_traceback(None) from error.__cause__
        except TypeError as error:  # of a wrong call: name the class of the object, not the base that has the method
            owner, _, method = function.__qualname__.rpartition(".")
            if owner and str(error).startswith(f"{owner}.{method}() "):
                error.args = (str(error).replace(owner, type(args[0]).__name__, 1),)
            raise

    def disable() -> Callable[P, T]:
        return torch.compiler.disable(function, reason=reason)

    marked: Any
    for marked in (call, disable):  # the compiler breaks the graph at a call of either; it enters a forward
        marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, reason
    return call


# Whether the code runs inside ``torch.func.grad``, ``torch.vmap`` or another transform of ``torch.func``; and a context
# manager that switches the transforms around it off.
func_transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
outside_func_transforms: Callable[[], AbstractContextManager[object]] = torch._C._DisableFuncTorch


def flatten_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Return the one group over all dimensions of ``mesh``; torch creates it at the first call and keeps it."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


MEAN, OVER_RANKS, OF_POOL = "fullrank: a mean", "fullrank: over ranks", "fullrank: of a pool"
SAME_VALUE = ("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "ViewBackward0")
WEIGHTED_SUM = (*SAME_VALUE, "AddBackward", "DivBackward", "MulBackward", "SubBackward")


def note_kind(loss: Tensor, *, mean: bool = False, over_ranks: bool = False, of_pool: bool = False) -> Tensor:
    """Note in the graph of ``loss`` what it is, and return it.

    A ``mean``, one ``over_ranks``, of the rows of several ranks, and ``of_pool``, if it compares its rows.
    """
    node: Any = None if torch.compiler.is_compiling() else loss.grad_fn
    if node is not None:
        for note, holds in ((MEAN, mean), (OVER_RANKS, over_ranks), (OF_POOL, of_pool)):
            if holds:
                node.metadata[note] = True
    return loss


def nodes_of(*roots: Any, through: tuple[str, ...] = ("",), known: Iterable[Any] = ()) -> list[Any]:
    """Return the nodes of the graph behind ``roots`` once each, without those ``known`` and what is behind them.

    ``through`` are the beginnings of names: what is behind other nodes is left out.
    """
    nodes, pending, seen = list[Any](), [*roots], {None, *known}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            nodes.append(node)
            if node.name().startswith(through):
                pending += [parent for parent, _ in node.next_functions]
    return nodes


def is_mean(loss: Tensor) -> bool:
    """Return True if the graph of a scalar says that it is a mean of several terms, or a fraction of one.

    The last node of torch's losses records the reduction, and :func:`note_kind` notes that of ours. A mean divided by a
    number >= 1 still counts as a mean. A multiple does not, because it may be the sum.
    """
    node: Any = loss.grad_fn
    divisors: list[Any] = []
    while node is not None and MEAN not in node.metadata:
        if node.name().startswith("DivBackward"):
            divisors.append(divisor := node._saved_other)
            if isinstance(divisor, Tensor) and divisor.device.type != "cpu":
                return False  # reading it would wait for the device
        elif node.name() not in SAME_VALUE:
            break
        node = node.next_functions[0][0]
    if node is None:
        return False
    if node.name().startswith("MeanBackward"):
        is_recorded = node._saved_self_sym_numel != 1
    else:
        is_recorded = getattr(node, "_saved_reduction", None) == 1 and node._saved_target.numel() != 1
        is_recorded = is_recorded or MEAN in node.metadata
    return bool(is_recorded and all(divisor >= 1 for divisor in divisors))


def divisor_of(loss: Tensor) -> float | None:
    """Return the number on the host by which a scalar was divided last, as in ``x.sum() / mask.sum()``, else None."""
    node: Any = loss.grad_fn
    while node is not None and node.name() in SAME_VALUE:
        node = node.next_functions[0][0]
    name = "" if node is None else node.name()
    other = node._saved_other if name.startswith(("DivBackward", "MulBackward")) else None
    if other is None or (isinstance(other, Tensor) and (other.requires_grad or not other.is_cpu)) or not other:
        return None
    return float(other) if name.startswith("Div") else 1 / float(other)


def loss_parallel_is_active() -> bool:
    """Return True inside of torch's ``loss_parallel()``, whose handlers compute the cross-entropy of DTensors."""
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    return handlers is None or torch.ops.aten.nll_loss_forward.default in handlers


def backward_is_running() -> bool:
    """Return True while a backward pass runs, in which activation checkpointing runs forward code a second time."""
    return torch._C._current_graph_task_id() != -1


def fsdp_wrapped() -> list[Any]:
    """Return all modules that FSDP2 has wrapped in this process, without importing FSDP."""
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    return [module for module in _module_state_mapping if hasattr(module, "_get_fsdp_state")]


def fsdp_param_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 reduces together, of one module that it has wrapped."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups  # one, or None, before torch 2.12
    return [group for group in groups if group is not None]


def is_sharded_by_fsdp(parameter: Tensor) -> bool:
    """Return True for the part of a parameter that FSDP2 leaves in a module outside of its forward."""
    params = (param for module in fsdp_wrapped() for group in fsdp_param_groups(module) for param in group.fsdp_params)
    return any(param.sharded_param is parameter for param in params)
