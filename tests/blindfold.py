"""A context in which a read of a value raises: on an accelerator such a read waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Blindfold(TorchDispatchMode):
    """Context in which reading a value, which waits for an accelerator, raises."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError("a value was read")
        return func(*args, **(kwargs or {}))
