"""Which ranks take part in a call: groups, meshes, the auto-detection of the losses, and the scale of gradients."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..errors import Words, expected, warn
from .torch_private import bound_device, flatten_mesh

Group = ProcessGroup | DeviceMesh | None

# The backends of a group never change, and torch stores them as text. This saves parsing it in every call.
_BACKENDS: WeakKeyDictionary[ProcessGroup, dict[str, str]] = WeakKeyDictionary()

_NO_GROUP = "call torch.distributed.init_process_group first (torchrun sets what it needs)"


def is_initialized() -> bool:
    """Return True when a default process group exists; torch.compile takes ``dist.is_initialized()`` for a constant."""
    return dist.is_available() and dist.group.WORLD is not None


def resolve_group(group: Group = None, *, name: str = "group") -> ProcessGroup:
    """Return the process group that ``group`` stands for, or raise an error about the argument ``name``.

    A mesh of several dimensions is flattened once, which creates a group: every rank of it must make that first call.
    """
    if not is_initialized():
        raise RuntimeError(expected(name, "an initialized process group", None, f"Please {_NO_GROUP}."))
    _check_group(group, name)
    resolved = ONLY.get() or (flatten_mesh(group) if isinstance(group, DeviceMesh) else group or dist.group.WORLD)
    assert resolved is not None
    _check_exists(resolved, name)
    return resolved


def _check_group(group: object, name: str) -> None:
    """Raise TypeError unless ``group`` is a group, a mesh or None, and ValueError if it does not contain this rank."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or (isinstance(group, DeviceMesh) and group.get_coordinate() is None):
        fix = "Pass the group that this rank belongs to: new_group returns one on each of its members."
        raise ValueError(expected(name, "a group with this rank in it", f"one without rank {dist.get_rank()}", fix))
    if group is not None and not isinstance(group, (ProcessGroup, DeviceMesh)):
        raise TypeError(expected(name, "a ProcessGroup, a DeviceMesh or None", group))


def _check_exists(group: ProcessGroup, name: str) -> None:
    try:
        dist.get_rank(group)
    except (ValueError, RuntimeError, TypeError) as error:
        fix = "It was destroyed: pass another one, or None for the default group."
        raise RuntimeError(expected(name, "a process group that exists", group, fix)) from error


def group_ranks(group: ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def header_device(group: ProcessGroup) -> torch.device:
    """Return the device of the header, for any arguments: the CPU if the group serves it, else its accelerator."""
    if "cpu" in backend_by_device(group):
        return torch.device("cpu")
    bound = bound_device(group)
    if bound is not None and bound.index is not None:
        return bound
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())


def check_device_of_group(name: str, tensor: Tensor, group: ProcessGroup) -> None:
    """Raise ValueError when ``tensor`` is on another accelerator than that of ``group``, as without ``set_device``."""
    device = header_device(group)
    if tensor.device.type == device.type != "cpu" and tensor.device != device:
        call = f"torch.{device.type}.set_device({tensor.device.index})"
        fix = f"Call {call} before init_process_group, or pass it device_id={str(tensor.device)!r}."
        what = f"a tensor on {device}, the device of the process group"
        raise ValueError(expected(name, what, Words(f"one on {tensor.device}"), fix))


def backend_by_device(group: ProcessGroup) -> dict[str, str]:
    """Return the backend that ``group`` uses for each type of device, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    backends = _BACKENDS.get(group)
    if backends is None:
        config = dist.get_backend_config(group)
        backends = _BACKENDS[group] = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    return backends


# The number that the model divides its gradients by, set while a loss is evaluated by a caller that knows it.
DIVISOR: ContextVar[float | None] = ContextVar("fullrank_gradient_divisor", default=None)
# The group of this rank alone, while a program of several ranks runs as on one: it stands for every group.
ONLY: ContextVar[ProcessGroup | None] = ContextVar("fullrank_only_group", default=None)
# Callbacks that undo changes of state; the caller that sets it runs them if its call fails later.
UNDO: ContextVar[ExitStack | None] = ContextVar("fullrank_undo", default=None)


def gradient_scale(gradient_reduction: str | int, group: ProcessGroup, *, needs_grad: bool = True) -> int:
    """Return k, the factor on this rank's rows in the backward of a gather; see :func:`all_gather_with_grad`.

    ValueError where ``DIVISOR`` says that the model combines its gradients in another way.
    """
    scale = int(gradient_reduction) if isinstance(gradient_reduction, int) else 1
    if gradient_reduction == "mean":
        scale = group.size()
    divisor = DIVISOR.get()
    if needs_grad and divisor is not None:
        # Each gather has its own pool. A model that averages over more ranks averages over several pools.
        fits = divisor % scale == 0 if gradient_reduction == "mean" else divisor == scale
        if not fits:
            what = f"the way the model combines gradients, which divides their sum over the ranks by {divisor:g}"
            fitting = '"sum"' if divisor == 1 else '"mean"' if divisor == group.size() else f"{divisor:g}"
            fix = f"The gradient would be {scale / divisor:g} times the right one: pass gradient_reduction={fitting}."
            raise ValueError(expected("gradient_reduction", what, gradient_reduction, fix))
    return scale


def alone(group: ProcessGroup, gradient_reduction: str | int) -> bool:
    """Return True if a call over ``group`` may skip all communication: the group has one rank, and k = 1.

    In a job of several ranks a wrapper may average the gradients of a group of one with those of other ranks.
    """
    if group.size() > 1 or dist.get_world_size() == 1:
        return group.size() == 1
    return gradient_scale(gradient_reduction, group, needs_grad=torch.is_grad_enabled()) == 1


SAME_REDUCTION = "Set the same gradient_reduction on every rank."


def check_gradient_reduction(gradient_reduction: str | int) -> str | int:
    is_count = isinstance(gradient_reduction, int) and not isinstance(gradient_reduction, bool)
    if gradient_reduction in ("mean", "sum") or (is_count and int(gradient_reduction) >= 1):
        return gradient_reduction
    fix = "DDP, FSDP2 and HSDP average as they come: 'mean'."
    what = "'mean', 'sum' or the number of ranks that the wrapper averages over"
    raise ValueError(expected("gradient_reduction", what, gradient_reduction, fix))


class DataGroup:
    """The ranks whose rows a loss pools, resolved at the first forward in a process group, and again in another one.

    A copy shares the group. A pickle cannot contain a group, so an unpickled loss uses the default group.
    """

    def __init__(self, group: Group = None) -> None:
        _check_group(group, "group")
        self.group = group
        self._world: ProcessGroup | None = None
        self._resolved: ProcessGroup | None = None
        self._dropped = False

    def resolve(self, gather_distributed: bool | None, gradient_reduction: str | int) -> ProcessGroup | None:
        """Return the group to communicate over, or None if the call is local or :func:`alone`."""
        if gather_distributed is False:
            return None
        world = dist.group.WORLD if dist.is_available() else None
        if world is None:
            if gather_distributed:
                fix = f"Please {_NO_GROUP}, or set gather_distributed=None to detect it."
                raise RuntimeError(expected("gather_distributed=True", "an initialized process group", None, fix))
            return None
        if self._world is not world:
            if self._dropped:
                warn(
                    "A loss that was unpickled has lost its process group and uses the default group. "
                    "Set loss.group to choose another."
                )
            self._resolved = resolve_group(self.group)
            self._world = world
        assert self._resolved is not None
        if self._resolved is not world:  # the default group exists
            _check_exists(self._resolved, "group")
        return None if alone(self._resolved, gradient_reduction) else self._resolved

    def __deepcopy__(self, memo: dict[int, object]) -> DataGroup:
        return self

    def __copy__(self) -> DataGroup:
        return self

    def __getstate__(self) -> dict[str, bool]:
        return {"dropped": self.group is not None or self._dropped}

    def __setstate__(self, state: dict[str, bool]) -> None:
        DataGroup.__init__(self)
        self._dropped = state["dropped"]


def check_gather_distributed(value: bool | None) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(expected("gather_distributed", "None, True or False", value))
