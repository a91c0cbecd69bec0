"""The parameters that a caller lists, and their gradients as one rank holds them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ..distributed.torch_private import nodes_of
from ..errors import Words, expected

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = {Tensor, nn.Parameter}
Label = str | int  # the name of a parameter, or its place in the list


class Entry(NamedTuple):
    """One parameter and its name in messages."""

    label: Label
    parameter: Tensor

    @property
    def name(self) -> str:
        return self.label if isinstance(self.label, str) else f"parameter {self.label}"


def list_distinct(parameters: Any) -> list[tuple[Label, Any]]:
    """Return the distinct items with labels, in their order, not checked to be parameters; TypeError without items."""
    items = [parameters] if isinstance(parameters, Tensor) else parameters
    items = items.named_parameters() if isinstance(items, nn.Module) else items
    if not isinstance(items, Iterable):
        what = "a module, a tensor, or an iterable of parameters or of (name, parameter) pairs"
        raise TypeError(expected("parameters", what, parameters))
    distinct: dict[int, tuple[Label, Any]] = {}
    label: Label
    for label, item in enumerate(items):
        if isinstance(item, Entry) or (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)):
            label, item = item
        distinct.setdefault(id(item), (label, item))
    return list(distinct.values())


def check_parameter(entry: Entry) -> None:
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


def fitting_gradient(entry: Entry) -> Tensor | None:
    """Return the gradient, if there is one; TypeError or ValueError when it does not fit its parameter."""
    parameter: Any = entry.parameter
    grad: Any = parameter.grad
    if grad is None:
        return None
    is_placed = is_dtensor(parameter)
    if is_placed != is_dtensor(grad):
        what = "a DTensor, as the parameter is" if is_placed else "a plain tensor, as the parameter is"
        fix = "Use DTensor.from_local(gradient)." if is_placed else "Use gradient.full_tensor()."
        raise TypeError(expected(f"gradient of {entry.name}", what, Words(type(grad).__name__), fix))
    if is_placed and parameter.device_mesh != grad.device_mesh:
        what = f"one on the mesh of the parameter, {parameter.device_mesh}"
        raise ValueError(expected(f"gradient of {entry.name}", what, Words(grad.device_mesh)))
    if grad.layout not in (torch.strided, torch.sparse_coo):
        what = "a dense or a sparse COO tensor"
        raise TypeError(expected(f"gradient of {entry.name}", what, Words(grad.layout), "Use to_dense()."))
    return grad


def plain_gradients(parameters: Sequence[Any]) -> list[Tensor] | None:
    """Return the gradients if they and the parameters are all plain and dense, so that they fit; else None."""
    if not _PLAIN.issuperset(map(type, parameters)):
        return None
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    is_plain = _PLAIN.issuperset(map(type, grads)) and {grad.layout for grad in grads} <= {torch.strided}
    return grads if is_plain else None


def local_gradient(entry: Entry) -> Tensor | None:
    """Return the memory of a gradient on this rank as a plain tensor, sparse or not; None without a gradient."""
    grad = entry.parameter.grad
    if grad is None or is_elsewhere(entry.parameter):
        return None
    # Under no_grad, to_local() of a DTensor returns its own memory. Partial summands stay: scaling is linear.
    return grad.to_local() if is_dtensor(grad) else grad


def elements_of(grad: Tensor) -> Tensor:
    """Return the elements of a gradient on this rank, dense; a sparse one may list an index several times."""
    local = grad.to_local() if is_dtensor(grad) else grad
    return local.coalesce().values() if local.is_sparse else local


def leaves_of(value: Tensor) -> list[Tensor]:
    nodes = nodes_of(torch.autograd.graph.get_gradient_edge(value).node)
    return [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]


def variables_of(function: Any) -> dict[str, Any]:
    """Return what the code of a function, a method or a partial refers to, as far as it can be found."""
    function = inspect.unwrap(function)
    variables = {"self": getattr(function, "__self__", None), **getattr(function, "keywords", {})}
    variables |= {f"self.{name}": value for name, value in getattr(variables["self"], "__dict__", {}).items()}
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        variables |= {f"default {place}": value for place, value in enumerate(function.__defaults__ or ())}
        with suppress(ValueError):  # a variable without a value
            closure = inspect.getclosurevars(function)
            variables |= {**closure.globals, **closure.nonlocals}
    return variables
