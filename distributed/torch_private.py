"""Every use of a torch interface that is private or that changed its name between versions, and nothing else."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# torch 2.13 renamed the collectives on one tensor and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Decorator that keeps a function out of compiled graphs: torch.compiler.disable, without importing the compiler (1.5 s)
# before the first call.
not_compiled = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def all_gather_flat(output: Tensor, tensor: Tensor, group: ProcessGroup) -> None:
    """Fill ``output`` (W * n,) with ``tensor`` (n,) of every rank, in rank order."""
    _all_gather(output, tensor, group=group)


def reduce_scatter_flat(output: Tensor, tensor: Tensor, group: ProcessGroup) -> None:
    """Fill ``output`` (n,) with this rank's part of the sum over ranks of ``tensor`` (W * n,)."""
    _reduce_scatter(output, tensor, group=group)


def flatten_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Return the one group over all dimensions of ``mesh``; torch creates it at the first call and keeps it."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def backward_is_running() -> bool:
    """Return True inside a backward pass, where activation checkpointing runs forward code a second time."""
    return torch._C._current_graph_task_id() != -1
