"""The parameters that a caller lists, and their gradients as one rank holds them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..distributed.torch_private import sparse_values
from ..errors import Words, expected

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_PLAIN = {Tensor, nn.Parameter}


class Entry(NamedTuple):
    """One parameter and its name in messages."""

    label: str | int  # its name, or its place in the list
    parameter: Tensor

    @property
    def name(self) -> str:
        return self.label if isinstance(self.label, str) else f"parameter {self.label}"


def read_once(parameters: Any) -> list[Any] | nn.Module:
    """Return ``parameters`` as a module or a list, which can be read several times; TypeError if it is not iterable."""
    if isinstance(parameters, nn.Module):
        return parameters
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable):
        what = "a module, a tensor, or an iterable of parameters or of (name, parameter) pairs"
        raise TypeError(expected("parameters", what, parameters))
    return list(parameters)


def list_entries(parameters: Any) -> list[Entry]:
    """Return the distinct items of ``parameters`` with names, in their order, not checked to be parameters."""
    listed = read_once(parameters)
    entries: dict[int, Entry] = {}
    for index, item in enumerate(listed.named_parameters() if isinstance(listed, nn.Module) else listed):
        entry = Entry(index, item)
        if isinstance(item, Entry):
            entry = item
        elif isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str):
            entry = Entry(*item)
        entries.setdefault(id(entry.parameter), entry)
    return list(entries.values())


def check_parameter(entry: Entry) -> None:
    """Raise TypeError when ``entry`` is not a parameter."""
    if not isinstance(entry.parameter, Tensor):
        fix = "Pass .items() of a dict." if isinstance(entry.parameter, str) else ""
        raise TypeError(expected(entry.name, "a parameter or a (name, parameter) pair", entry.parameter, fix))


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True for a DTensor, without importing DTensor (0.5 s): until it is imported there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_elsewhere(parameter: Tensor) -> bool:
    """Return True for a DTensor on a mesh without this rank, such as a parameter of another pipeline stage."""
    return is_dtensor(parameter) and parameter.device_mesh.get_coordinate() is None


def check_gradient(entry: Entry) -> None:
    """Raise TypeError or ValueError when the gradient, if there is one, does not fit its parameter."""
    parameter, name = entry.parameter, f"gradient of {entry.name}"
    grad: Any = parameter.grad
    if grad is None:
        return
    if is_dtensor(parameter):
        if not is_dtensor(grad):
            got, fix = Words(type(grad).__name__), "Use DTensor.from_local(gradient)."
            raise TypeError(expected(name, "a DTensor, as the parameter is", got, fix))
        if parameter.device_mesh != grad.device_mesh:
            what = f"one on the mesh of the parameter, {parameter.device_mesh}"
            raise ValueError(expected(name, what, Words(grad.device_mesh)))
    elif is_dtensor(grad):
        got, fix = Words(type(grad).__name__), "Use gradient.full_tensor()."
        raise TypeError(expected(name, "a plain tensor, as the parameter is", got, fix))
    if grad.layout not in (torch.strided, torch.sparse_coo):
        raise TypeError(expected(name, "a dense or a sparse COO tensor", Words(grad.layout), "Use to_dense()."))


class Plain(NamedTuple):
    """Distinct parameters and their gradients, without the missing ones. All are plain tensors, the gradients dense."""

    parameters: list[Tensor]
    grads: list[Tensor]


def read_plain(listed: list[Any] | nn.Module) -> Plain | None:
    """Return the result of :func:`read_once` as :class:`Plain` if all items are plain and without a name; else None.

    No item needs a check of its own then: gradients fit their parameters, and every element counts in a norm.
    """
    items = list(listed.parameters() if isinstance(listed, nn.Module) else listed)
    if not _PLAIN.issuperset(map(type, items)):
        return None
    distinct = list(dict(zip(map(id, items), items)).values())
    grads = [grad for parameter in distinct if (grad := parameter.grad) is not None]
    is_plain = _PLAIN.issuperset(map(type, grads)) and {grad.layout for grad in grads} <= {torch.strided}
    return Plain(distinct, grads) if is_plain else None


def counted_gradient(entry: Entry) -> Tensor | None:
    """Return the elements of a gradient that this rank counts in a norm, a plain dense tensor; None without a gradient.

    A gradient that is not placed as its parameter is first redistributed into a copy, by collectives that all ranks of
    its mesh must make. Examples are the Partial gradient of a norm layer under SequenceParallel, and the sharded
    gradient of a replicated weight that was multiplied by sharded activations. Raises as :func:`check_gradient`.
    """
    parameter, grad = entry.parameter, entry.parameter.grad
    if grad is None or is_elsewhere(parameter):
        return None
    check_gradient(entry)
    if is_dtensor(parameter) and is_dtensor(grad):
        from torch.distributed.tensor import Replicate

        wanted = tuple(Replicate() if place.is_partial() else place for place in parameter.placements)
        grad = (grad if tuple(grad.placements) == wanted else grad.redistribute(placements=wanted)).to_local()
    # A sparse gradient may list an index several times, and its values must be added before powers are taken.
    return sparse_values(grad.coalesce()) if grad.is_sparse else grad


def local_gradient(entry: Entry) -> Tensor | None:
    """Return the memory of a gradient on this rank as a plain dense tensor; None without a gradient."""
    grad = entry.parameter.grad
    if grad is None or is_elsewhere(entry.parameter):
        return None
    return local_values(grad)


def local_values(grad: Tensor) -> Tensor:
    """Return the memory of a gradient as a plain dense tensor."""
    # Under no_grad, to_local() of a DTensor returns its own memory. Partial summands stay: scaling is linear.
    local = grad.to_local() if is_dtensor(grad) else grad
    return sparse_values(local) if local.is_sparse else local


def leaves_of(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of the graph of ``value``."""
    seen, pending = set(), [torch.autograd.graph.get_gradient_edge(value).node]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable  # type: ignore[attr-defined]
        pending += [parent for parent, _ in node.next_functions if parent is not None]
