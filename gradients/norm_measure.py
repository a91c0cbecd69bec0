r"""The p-norm of the gradients that one rank holds: one pass, no overflow, no underflow, no wait for the device.

Norms are joined by :math:`\|(a, b)\|_p = \|(\|a\|_p, \|b\|_p)\|_p`, so all that is ever kept of a row, a tensor, a rank
or a stage is one number: its norm. Powers are taken of elements only. A square leaves float16 at 256 and float32 at
1.8e19, which gradients in half precision reach; so they are summed

- on the CPU in float32 (float64 for float64), row by row, and a second time, divided by the largest element, in the
  rare case that the first sum shows that powers have left the range;
- elsewhere, where to look at a value is to wait for the device, in float64, which holds the powers of float32 up to
  the 6th. Float64 gradients and higher powers are divided by the largest element at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..distributed.torch_private import norms_of_each

# Sums in float32 stay short. By rows of 4096 the norm of 5e7 elements is off by 1e-8, in one sum for each tensor by
# 3e-5 (benchmarks/grad_norm.py).
_ROW = 4096
_CHUNK = 2**20  # elements converted or divided at a time: little memory, and it stays in the cache
_HIGHEST_POWER = 6  # of float32 within float64: 3.4e38 ** 6 = 1.5e231, 1.4e-45 ** 6 = 7.5e-270


def join_norms(norms: Tensor, norm_type: float) -> Tensor:
    """Return the p-norm over the first dimension of ``norms`` (K, ...), K >= 1, all >= 0. NaN and inf come through."""
    largest = norms.amax(dim=0)  # NaN where there is one
    if norm_type == math.inf:
        return largest
    unit = _unit(largest)
    return torch.linalg.vector_norm(norms / unit, norm_type, dim=0) * unit


def local_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all elements of ``tensors``, one or more on one device, as a float64 scalar there."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:  # no elements have no largest
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    if not by_dtype:
        return torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    if norm_type == math.inf:
        return torch.stack([_largest(same) for same in by_dtype.values()]).amax()
    measure = _norm_on_host if tensors[0].device.type == "cpu" else _norm_without_looking
    return join_norms(torch.stack([measure(same, norm_type) for same in by_dtype.values()]), norm_type)


def _norm_on_host(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype where reading a value costs nothing."""
    dtype = _sum_dtype(tensors[0].dtype)
    total = torch.cat(list(_row_norms(tensors, norm_type, dtype))).double()
    total = join_norms(total, norm_type)
    limits = torch.finfo(dtype)
    mean_power = total.pow(norm_type) / sum(tensor.numel() for tensor in tensors)
    # A power that underflows is off by `tiny` at most: below this mean, all of them together by more than one rounding.
    if total.isfinite() and mean_power >= limits.tiny / limits.eps:
        return total
    return _norm_of_quotients(tensors, norm_type)


def _norm_without_looking(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype by the same operations whatever the values are."""
    dtype = tensors[0].dtype
    if dtype in (torch.float64, torch.complex128) or norm_type > _HIGHEST_POWER:
        return _norm_of_quotients(tensors, norm_type)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return join_norms(torch.stack(norms_of_each(tensors, norm_type, wide)), norm_type)


def _norm_of_quotients(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype, whose elements are divided by the largest before their powers."""
    unit = _unit(_largest(tensors))
    norms = torch.cat(list(_row_norms(tensors, norm_type, _sum_dtype(tensors[0].dtype), unit))).double()
    return join_norms(norms, norm_type) * unit


def _row_norms(
    tensors: list[Tensor], norm_type: float, dtype: torch.dtype, unit: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield vectors of norms, in ``dtype``, of rows into which the elements (over ``unit``) are cut."""
    small = [tensor for tensor in tensors if unit is None and tensor.numel() <= _ROW]
    if small:
        yield torch.stack(norms_of_each(small, norm_type, dtype))
    for tensor in tensors:
        if unit is None and tensor.numel() <= _ROW:
            continue
        for part in _parts(tensor, dtype, unit):
            whole = part.numel() // _ROW * _ROW
            if whole > 0:
                yield torch.linalg.vector_norm(part[:whole].view(-1, _ROW), norm_type, dim=1)
            if whole < part.numel():
                yield torch.linalg.vector_norm(part[whole:], norm_type).reshape(1)


def _parts(tensor: Tensor, dtype: torch.dtype, unit: Tensor | None) -> Iterator[Tensor]:
    """Yield the elements of ``tensor`` over ``unit`` in ``dtype``, flat, without a copy of the whole."""
    if not tensor.is_contiguous():
        # The order of elements is of no concern, and a transposed tensor is contiguous in another one.
        tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    flat = tensor.reshape(-1)
    if unit is None and flat.dtype == dtype:
        yield flat
        return
    for chunk in flat.split(_CHUNK):
        wide = chunk.to(dtype)
        yield wide if unit is None else wide / unit


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude in ``tensors``, float64; NaN if there is one."""
    if tensors[0].dtype.is_complex:
        return torch.stack([torch.linalg.vector_norm(tensor, math.inf) for tensor in tensors]).amax().double()
    # Ten times as fast as the inf-norm on the CPU.
    bounds = torch.stack([bound for tensor in tensors for bound in torch.aminmax(tensor)])
    return bounds.abs().amax().double()


def _unit(largest: Tensor) -> Tensor:
    """Return what to divide by: ``largest``, and 1 where it is 0, inf or NaN, so that these come through."""
    return torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
