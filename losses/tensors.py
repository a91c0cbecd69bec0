"""What the losses ask of a tensor: whether its values may be read, in which dtype it is computed, where it is."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import Words, check_tensor, expected
from ..kernels.registration import check_not_batched
from ..kernels.torch_private import func_transforms_are_active, is_batched


def has_values(tensor: Tensor) -> bool:
    """Return True if a branch may depend on values: not while compiling, on the meta device or under ``torch.vmap``."""
    compiling = torch.compiler.is_compiling() or tensor.is_meta
    return not (compiling or (func_transforms_are_active() and is_batched(tensor)))


def weight_unit(weight: Tensor) -> Tensor:
    """Return what weights are divided by so that no sum of them overflows: 1, or a power of two for huge weights."""
    large = 2.0**64 if weight.dtype == torch.float32 else 2.0**512
    if weight.numel() == 0:
        return weight.new_ones(())
    most = weight.amax()
    return torch.where(most > large, torch.full_like(most, large), torch.ones_like(most))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype a loss is computed in: float32 for half precision, whose sums over a pool would saturate."""
    return torch.promote_types(dtype, torch.float32)


def check_device(name: str, value: Tensor, rows: Tensor, called: str = "logits") -> None:
    """Raise ValueError when ``value`` is not on the device of ``rows``, the argument named ``called``."""
    if value.device != rows.device:
        what, fix = f"a tensor on {rows.device}, as {called}", f"Use {name}.to({called}.device)."
        raise ValueError(expected(name, what, Words(f"one on {value.device}"), fix))


def checked_rows(name: str, rows: Tensor, width: int | None = None) -> Tensor:
    """Return ``rows`` (N, D) of floats, or raise TypeError or ValueError; ``width`` is the D of a queue."""
    check_tensor(name, rows)
    check_not_batched(rows)
    if not rows.is_floating_point():
        raise TypeError(expected(name, "a floating-point tensor", rows, f"Use {name}.float()."))
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(expected(name, "shape (N, D), D >= 1", rows, f"Use {name}.flatten(1)."))
    if width is not None and rows.shape[1] != width:
        fix = "Construct another loss for rows of another width."
        raise ValueError(expected(name, f"shape (N, {width}), as the queue", rows, fix))
    return rows


def check_values(name: str, tensor: Tensor) -> None:
    """Raise RuntimeError when ``tensor`` is on the meta device, for a loss that must read values."""
    if tensor.is_meta:
        raise RuntimeError(expected(name, "a tensor with values", tensor, "It is on the meta device."))


def is_integer(tensor: Tensor) -> bool:
    """Return True for integer dtypes; bool is not one of them."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows (N, D) of length 1 in the dtype of the computation; rows of zeros stay zeros.

    Divided by its largest entry first, a row has no square that overflows or underflows. That does not change its
    direction, so the entry is a constant for the gradient.
    """
    rows = rows.to(compute_dtype(rows.dtype))
    largest = rows.detach().abs().amax(dim=1, keepdim=True)
    scaled = rows / torch.where(largest > 0, largest, torch.ones_like(largest))
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / length.clamp_min(1.0)
