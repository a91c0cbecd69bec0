"""What the kernels and the checks in front of them ask torch about a running transform or backward: all private."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_functorch = getattr(torch._C, "_functorch", None)
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_are_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)
_num_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_is_batched_gradient = getattr(_functorch, "is_legacy_batchedtensor", lambda tensor: False)


def func_transforms_are_active() -> bool:
    """Return True inside ``torch.func.grad``, ``torch.vmap`` and the other transforms of ``torch.func``."""
    return bool(_are_active())


def is_batched(tensor: Tensor) -> bool:
    """Return True if ``tensor`` stands for one slice of a batch in ``torch.vmap``, under any other transforms."""
    if _functorch is None or torch.compiler.is_compiling() or not _are_active():
        return False
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def are_numbers_in_memory(*tensors: Tensor) -> bool:
    """Return True for ordinary tensors of the host that hold their numbers, where nothing follows operations on them.

    What follows them: the compiler, transforms, tangents, tracing, and modes such as that of fake tensors.
    """
    if torch.compiler.is_compiling() or _are_active() or _num_modes() or torch._C._get_tracing_state() is not None:
        return False
    is_plain = all(type(one) is Tensor and one.is_cpu and one.layout is torch.strided for one in tensors)
    return (
        is_plain and forward_ad._current_level < 0 and not any(one.is_neg() or one._is_zerotensor() for one in tensors)
    )


def may_overwrite(saved: Tensor, grad: Tensor) -> bool:
    """Return True in a backward that frees its graph, so that nobody reads its ``saved`` tensor again.

    Not if ``grad`` stands for several gradients, as with ``torch.autograd.grad(..., is_grads_batched=True)``.
    """
    is_plain = type(saved) is Tensor and not (torch.compiler.is_compiling() or _are_active())
    return is_plain and not _graph_is_kept() and not _is_batched_gradient(grad)
