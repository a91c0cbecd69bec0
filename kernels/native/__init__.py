"""Smooth-AP over pairs of rows in C, where the extension was built; everywhere else torch computes.

``setup.py`` builds ``pairs.c`` into a library that is loaded through ``ctypes``; ``FULLRANK_NATIVE=0`` leaves it out.
The results differ from those of torch by rounding, so all ranks of a job must use it, or none of them: the losses
compare :data:`KERNELS`.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PLACES = {torch.float32: "smooth_ap_float32", torch.float64: "smooth_ap_float64"}
_LEAST = 1e-30  # temperature: the kernel multiplies by its reciprocal


def _load() -> ctypes.CDLL | None:
    path = Path(__file__).with_name("pairs.library")
    if os.environ.get("FULLRANK_NATIVE") == "0" or not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # built for another machine
        return None


_library = _load()
FUNCTIONS: dict[torch.dtype, Any] = {}
if _library is not None:
    for _dtype, _name in _PLACES.items():
        _function = getattr(_library, _name)
        _pointer, _number = ctypes.c_void_p, ctypes.c_int64
        _function.argtypes = [*[_pointer] * 4, *[_number] * 3, ctypes.c_double, _number, *[_pointer] * 5]
        _function.restype = _number
        FUNCTIONS[_dtype] = _function

KERNELS = "native" if FUNCTIONS else "torch"


def smooth_ap(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    with_grad: bool,
    most: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return what :func:`~fullrank.kernels.soft_ranks.smooth_ap_and_gradient` returns, or None.

    None stands for more than ``most`` pairs, and for what the kernel does not compute: another device or dtype, a
    temperature below 1e-30, no library.
    """
    function = FUNCTIONS.get(scores.dtype)
    if function is None or not scores.is_cpu or temperature < _LEAST or scores.numel() == 0:
        return None
    num_classes, num_rows = scores.shape
    scores, positive = scores.detach().contiguous(), positive.contiguous()
    member = None if member is None else member.contiguous()
    weight = None if weight is None else weight.detach().to(scores.dtype).contiguous()
    loss, valid = torch.empty(num_classes, dtype=torch.float64), torch.empty(num_classes, dtype=torch.bool)
    gradient = torch.empty_like(scores) if with_grad else scores.new_empty(0)
    work, order = scores.new_empty(3 * num_rows), torch.empty(num_rows, dtype=torch.int64)
    found = function(
        scores.data_ptr(),
        positive.data_ptr(),
        None if member is None else member.data_ptr(),
        None if weight is None else weight.data_ptr(),
        0 if weight is None or weight.ndim == 1 else num_rows,
        num_classes,
        num_rows,
        temperature,
        most,
        loss.data_ptr(),
        valid.data_ptr(),
        gradient.data_ptr() if with_grad else None,
        work.data_ptr(),
        order.data_ptr(),
    )
    return (loss, gradient, valid) if found else None
