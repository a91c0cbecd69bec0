"""What the kernels and the checks in front of them ask torch about a running transform or backward: all private."""

from __future__ import annotations

import torch
from torch import Tensor

_functorch = getattr(torch._C, "_functorch", None)
_graph_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
_are_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


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


def may_overwrite(saved: Tensor) -> bool:
    """Return True in a backward that frees its graph, so that nobody reads its ``saved`` tensor again."""
    is_plain = type(saved) is Tensor and not (torch.compiler.is_compiling() or _are_active())
    return is_plain and not _graph_is_kept()
