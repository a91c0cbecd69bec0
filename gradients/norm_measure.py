r"""The p-norm of the gradients that one rank holds: one pass, no overflow, no underflow, no wait for the device.

Norms are joined by :math:`\|(a, b)\|_p = \|(\|a\|_p, \|b\|_p)\|_p`, so of a row, a tensor, a rank or a stage only
one number is kept: its norm. Only elements are raised to powers. A square overflows float16 above 256 and float32 above
1.8e19, which gradients in half precision (bfloat16) reach. So powers are summed

- on the CPU in float32 (float64 for float64), row by row. If that sum shows that powers have left the range, which is
  rare, they are summed a second time, with the elements divided by the largest.
- on other devices in float64, which holds the powers of float32 up to the 6th: reading a value there would wait for
  the device. Float64 gradients and higher powers are divided by the largest element in any case.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..distributed.torch_private import norms_of_each

# Sums in float32 must be short. The relative error of the norm of 5e7 elements is 1e-8 with rows of 4096, and 3e-5
# with one sum per tensor (benchmarks/grad_norm.py).
_ROW = 4096
_CHUNK = 2**20  # elements converted or divided at a time: needs little memory and stays in the cache
_HIGHEST_POWER = 6  # of float32 within float64: 3.4e38 ** 6 = 1.5e231, 1.4e-45 ** 6 = 7.5e-270


def join_norms(norms: Tensor, norm_type: float) -> Tensor:
    """Return the p-norm over the first dimension of ``norms`` (K, ...), K >= 1, all >= 0. NaN and inf propagate."""
    largest = norms.amax(dim=0)  # NaN where there is one
    if norm_type == math.inf:
        return largest
    unit = _unit(largest)
    return torch.linalg.vector_norm(norms / unit, norm_type, dim=0) * unit


def local_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all elements of ``tensors``, one or more on one device, as a float64 scalar there."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:  # a tensor without elements has no largest one
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    if not by_dtype:
        return torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    if norm_type == math.inf:
        return torch.stack([_largest(same) for same in by_dtype.values()]).amax()
    measure = _norm_on_host if tensors[0].device.type == "cpu" else _norm_without_looking
    return join_norms(torch.stack([measure(same, norm_type) for same in by_dtype.values()]), norm_type)


def _norm_on_host(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype on the CPU, where reading a value costs nothing."""
    dtype = _sum_dtype(tensors[0].dtype)
    total = torch.cat(list(_row_norms(tensors, norm_type, dtype))).double()
    total = join_norms(total, norm_type)
    limits = torch.finfo(dtype)
    mean_power = total.pow(norm_type) / sum(tensor.numel() for tensor in tensors)
    # A power that underflows is off by at most `tiny`. Above this mean that is less than one rounding of the sum.
    if total.isfinite() and mean_power >= limits.tiny / limits.eps:
        return total
    return _norm_of_quotients(tensors, norm_type)


def _norm_without_looking(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype with the same operations whatever the values are."""
    dtype = tensors[0].dtype
    if dtype in (torch.float64, torch.complex128) or norm_type > _HIGHEST_POWER:
        return _norm_of_quotients(tensors, norm_type)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return join_norms(torch.stack(norms_of_each(tensors, norm_type, wide)), norm_type)


def _norm_of_quotients(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype; elements are divided by the largest before powers are taken."""
    unit = _unit(_largest(tensors))
    norms = torch.cat(list(_row_norms(tensors, norm_type, _sum_dtype(tensors[0].dtype), unit))).double()
    return join_norms(norms, norm_type) * unit


def _row_norms(
    tensors: list[Tensor], norm_type: float, dtype: torch.dtype, unit: Tensor | None = None
) -> Iterator[Tensor]:
    """Cut the elements (divided by ``unit``) into rows, and yield vectors of the norms of rows in ``dtype``."""
    small = [tensor for tensor in tensors if unit is None and tensor.numel() <= _ROW]
    if small:
        yield torch.stack(norms_of_each(small, norm_type, dtype))
    for tensor in tensors:
        if unit is None and tensor.numel() <= _ROW:
            continue
        if not tensor.is_contiguous():
            # The order of elements does not matter, and a transposed tensor is contiguous in another order.
            tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
        flat = tensor.reshape(-1)
        # Converted or divided in parts, without a copy of the whole tensor.
        for chunk in (flat,) if unit is None and flat.dtype == dtype else flat.split(_CHUNK):
            part = chunk.to(dtype) if unit is None else chunk.to(dtype) / unit
            whole = part.numel() // _ROW * _ROW
            if whole > 0:
                yield torch.linalg.vector_norm(part[:whole].view(-1, _ROW), norm_type, dim=1)
            if whole < part.numel():
                yield torch.linalg.vector_norm(part[whole:], norm_type).reshape(1)


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude in ``tensors`` as float64; NaN if any element is NaN."""
    if tensors[0].dtype.is_complex:
        return torch.stack([torch.linalg.vector_norm(tensor, math.inf) for tensor in tensors]).amax().double()
    # Ten times as fast as the inf-norm on the CPU.
    bounds = torch.stack([bound for tensor in tensors for bound in torch.aminmax(tensor)])
    return bounds.abs().amax().double()


def _unit(largest: Tensor) -> Tensor:
    """Return the divisor: ``largest``, or 1 where it is 0, inf or NaN, so that these values propagate."""
    return torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
