"""What the kernels and the checks in front of them ask torch about a running ``torch.func`` transform: all private."""

from __future__ import annotations

import torch
from torch import Tensor

_functorch = getattr(torch._C, "_functorch", None)
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
