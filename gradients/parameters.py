"""The parameters of a norm and their gradients as one rank holds them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..distributed.torch_private import sparse_values
from ..errors import Words, expected

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Entry(NamedTuple):
    """One parameter and what messages call it."""

    name: str
    parameter: Tensor


def list_entries(parameters: Any, problems: list[Exception]) -> list[Entry]:
    """Return the distinct parameters in their order; what is no parameter goes to ``problems``."""
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif isinstance(parameters, nn.Module):
        parameters = parameters.named_parameters()
    elif not isinstance(parameters, Iterable):
        what = "a module, a tensor, or an iterable of parameters or of (name, parameter) pairs"
        problems.append(TypeError(expected("parameters", what, parameters)))
        return []
    entries: dict[int, Entry] = {}
    for index, item in enumerate(parameters):
        is_pair = isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)
        name, parameter = item if is_pair else (f"parameter {index}", item)
        if isinstance(parameter, Tensor):
            entries.setdefault(id(parameter), Entry(name, parameter))
        else:
            fix = "Pass .items() of a dict." if isinstance(parameter, str) else ""
            problems.append(TypeError(expected(name, "a parameter or a (name, parameter) pair", parameter, fix)))
    return list(entries.values())


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True for a DTensor, without the half second that importing them takes where there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_elsewhere(parameter: Tensor) -> bool:
    """Return True for a DTensor on a mesh without this rank, such as a parameter of another pipeline stage."""
    return is_dtensor(parameter) and parameter.device_mesh.get_coordinate() is None


def _check_gradient(entry: Entry) -> None:
    """Raise TypeError or ValueError when there is a gradient that cannot be that of its parameter."""
    parameter, grad, name = entry.parameter, entry.parameter.grad, f"gradient of {entry.name}"
    if grad is None:
        return
    if is_dtensor(parameter) != is_dtensor(grad):
        what = "a DTensor, as the parameter is" if is_dtensor(parameter) else "a plain tensor, as the parameter is"
        fix = "Use DTensor.from_local(gradient)." if is_dtensor(parameter) else "Use gradient.full_tensor()."
        raise TypeError(expected(name, what, Words(type(grad).__name__), fix))
    if is_dtensor(parameter) and is_dtensor(grad) and parameter.device_mesh != grad.device_mesh:
        meshes = (Words(mesh) for mesh in (parameter.device_mesh, grad.device_mesh))
        raise ValueError(expected(name, f"one on the mesh of the parameter, {next(meshes)}", next(meshes)))
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(expected(name, "a dense or a sparse COO tensor", Words(grad.layout), "Use to_dense()."))


def counted_gradient(entry: Entry) -> Tensor | None:
    """Return the elements of a gradient that are this rank's to count, a plain dense tensor; None without one.

    A gradient that is placed otherwise than its parameter (Partial, as of a norm under SequenceParallel; sharded, as of
    a replicated weight that met sharded activations) is first redistributed into a copy, by collectives that all
    ranks of its mesh must make.

    Raises:
        TypeError: when the gradient is a DTensor and its parameter is not, or the other way round.
        ValueError: when their meshes differ.
    """
    parameter, grad = entry.parameter, entry.parameter.grad
    if grad is None or is_elsewhere(parameter):
        return None
    _check_gradient(entry)
    if is_dtensor(parameter) and is_dtensor(grad):
        from torch.distributed.tensor import Replicate

        wanted = tuple(Replicate() if place.is_partial() else place for place in parameter.placements)
        grad = (grad if tuple(grad.placements) == wanted else grad.redistribute(placements=wanted)).to_local()
    # An index may occur several times in a sparse gradient: its values are added before their powers are taken.
    return sparse_values(grad.coalesce()) if grad.is_sparse else grad


def held_gradient(entry: Entry) -> Tensor | None:
    """Return the memory of a gradient on this rank, a plain dense tensor to be scaled in place; None without one."""
    grad = entry.parameter.grad
    if grad is None or is_elsewhere(entry.parameter):
        return None
    # Under no_grad a DTensor hands out its own memory. Scaling is linear, so Partial summands may stay as they are.
    local = grad.to_local() if is_dtensor(grad) else grad
    return sparse_values(local) if local.is_sparse else local
