"""Private functions of torch that tell which transform or backward is running, for the kernels and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch: Any = torch._C._functorch
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# True inside ``torch.func.grad``, ``torch.vmap`` and the other transforms of ``torch.func``.
func_transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_num_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_PLAIN = (Tensor, torch.nn.Parameter)


def is_batched(tensor: Tensor) -> bool:
    """Return True if ``tensor``, inside a transform, is one slice of a batch in ``torch.vmap``, under any others."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def is_followed() -> bool:
    """Return True where the compiler, a transform or a mode follows the operations, which would miss what C does."""
    if torch.compiler.is_compiling() or func_transforms_are_active() or forward_ad._current_level >= 0:
        return True
    return bool(_num_modes() or torch._C._get_tracing_state() is not None)


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Return True if the numbers of all ``tensors``, which are real, are in the memory of the host as they are."""
    for tensor in tensors:
        if tensor is not None:
            if type(tensor) not in _PLAIN or not tensor.is_cpu or tensor.layout is not torch.strided:
                return False
            if tensor.is_neg() or tensor._is_zerotensor():
                return False
    return True


def may_overwrite(saved: Tensor, grad: Tensor) -> bool:
    """Return True in a backward of one gradient that frees its graph: nobody reads its ``saved`` tensor again."""
    is_plain = type(saved) is Tensor and not (torch.compiler.is_compiling() or func_transforms_are_active())
    return is_plain and not _graph_is_kept() and not _functorch.is_legacy_batchedtensor(grad)


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with each in-place change of ``tensor``; -1 if torch does not count them."""
    return -1 if tensor.is_inference() else tensor._version
