"""Device meshes and groups for the tests, one per shape or ranks.

A new one opens threads and sockets that live as long as its process, and of each group one thread wakes up a hundred
times a second.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

_made: dict[Any, Any] = {}


def init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """Return the mesh of this shape and these names over the default group, made on first use."""
    key = (dist.group.WORLD, device_type, tuple(mesh_shape), mesh_dim_names)
    if key not in _made:
        _made[key] = device_mesh.init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)
    return _made[key]


def group_of(*ranks: int) -> Any:
    """Return a group of these ranks, made on first use. As of ``new_group``, all ranks call it in the same order."""
    key = (dist.group.WORLD, ranks)
    if key not in _made:
        _made[key] = dist.new_group([*ranks])
    return _made[key]
