"""What the measurements ask torch about the operators of a step: the one file with private interfaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorCount(TorchDispatchMode):
    """Counts the operators that run inside, of the backward too, and the bytes of their inputs and outputs.

    Views and allocations are free. An operator may be several kernels, a sort for example.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
            self.operators += 1
            self.num_bytes += sum(map(_bytes_of, _tensors([args, list(kwargs.values()), result])))
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _bytes_of(tensor: Tensor) -> int:
    number = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride()):
        number *= size if stride else 1  # an expanded dimension is read once
    return number
