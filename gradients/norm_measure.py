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
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..distributed.torch_private import norms_of_each

# Sums in float32 must be short. The relative error of the norm of 5e7 elements is 1e-8 with rows of 4096, and 3e-5
# with one sum per tensor (benchmarks/grad_norm.py).
_ROW = 4096
_CHUNK = 2**20  # elements converted or divided at a time: needs little memory and stays in the cache
_HIGHEST_POWER = 6  # of float32 within float64: 3.4e38 ** 6 = 1.5e231, 1.4e-45 ** 6 = 7.5e-270


def join_norms(norms: Tensor, norm_type: float) -> Tensor:
    """Return the p-norm over the first dimension of ``norms`` (K, ...), K >= 1, all >= 0, in float64; NaN stays."""
    if norms.dtype is torch.float32 and norm_type <= _HIGHEST_POWER:
        return torch.linalg.vector_norm(norms, norm_type, dim=0, dtype=torch.float64)
    norms = norms.double()
    if norms.shape[0] == 1:
        return norms[0]
    largest = norms.amax(dim=0)  # NaN where there is one
    if norm_type == math.inf:
        return largest
    unit = _unit(largest)
    return torch.linalg.vector_norm(norms / unit, norm_type, dim=0) * unit


def local_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all elements of ``tensors``, one or more on one device, as a float64 scalar there."""
    alike = by_dtype(tensors).values()
    if norm_type == math.inf:
        return torch.stack([_largest(same) for same in alike]).amax()
    measure = _norm_on_host if tensors[0].device.type == "cpu" else _norm_without_looking
    norms = [measure(same, norm_type) for same in alike]
    return norms[0] if len(norms) == 1 else join_norms(torch.stack(norms), norm_type)


def by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Return the tensors of each dtype, in their order."""
    listed = list(tensors)
    dtypes = [tensor.dtype for tensor in listed]
    if len(set(dtypes)) == 1:
        return {dtypes[0]: listed}
    return {dtype: [tensor for tensor in listed if tensor.dtype == dtype] for dtype in dict.fromkeys(dtypes)}


def _norm_on_host(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype on the CPU, where reading a value costs nothing."""
    dtype, sizes = torch.promote_types(tensors[0].dtype, torch.float32), [tensor.numel() for tensor in tensors]
    total = join_norms(_row_norms(tensors, sizes, norm_type, dtype), norm_type)
    limits = torch.finfo(dtype)
    # A power that underflows is off by at most `tiny`. Above this mean that is less than one rounding of the sum.
    if (limits.tiny / limits.eps * sum(sizes)) ** (1 / norm_type) <= total.item() < math.inf:
        return total
    return _norm_of_quotients(tensors, norm_type)


def _norm_without_looking(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype with the same operations whatever the values are."""
    dtype = tensors[0].dtype
    if dtype in (torch.float64, torch.complex128) or norm_type > _HIGHEST_POWER:
        return _norm_of_quotients(tensors, norm_type)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return join_norms(torch.stack(norms_of_each(tensors, norm_type, dtype=wide)), norm_type)


def _norm_of_quotients(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype; elements are divided by the largest before powers are taken."""
    dtype, unit = torch.promote_types(tensors[0].dtype, torch.float32), _unit(_largest(tensors))
    return join_norms(_row_norms(tensors, (), norm_type, dtype, unit), norm_type) * unit


def _row_norms(
    tensors: list[Tensor], sizes: Sequence[int], norm_type: float, dtype: torch.dtype, unit: Tensor | None = None
) -> Tensor:
    """Return in ``dtype`` the norms of the rows into which elements are cut; with ``unit`` divided by it, no sizes."""
    small = [tensor for tensor, size in zip(tensors, sizes) if size <= _ROW]
    long = [tensor for tensor, size in zip(tensors, sizes) if size > _ROW] if sizes else tensors
    found = [torch.stack(norms_of_each(small, norm_type, dtype=dtype))] if small else []
    found += _norms_of_long(long, norm_type, dtype, unit)
    return found[0] if len(found) == 1 else torch.cat(found)


def _norms_of_long(
    tensors: list[Tensor], norm_type: float, dtype: torch.dtype, unit: Tensor | None
) -> Iterator[Tensor]:
    """Yield vectors of the norms of the rows of each of ``tensors``."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            # The order of elements does not matter, and a transposed tensor is contiguous in another order.
            tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
        # Converted or divided in parts, without a copy of the whole tensor.
        as_it_is = unit is None and tensor.dtype == dtype
        for chunk in (tensor,) if as_it_is else tensor.reshape(-1).split(_CHUNK):
            part = chunk if as_it_is else chunk.to(dtype)
            if unit is not None and dtype.is_complex:  # torch would divide by a complex number, whose square is 0
                part = torch.view_as_complex(torch.view_as_real(part.resolve_conj()) / unit)
            elif unit is not None:
                part = part / unit
            if rest := part.numel() % _ROW:
                part = part.reshape(-1)
                yield torch.linalg.vector_norm(part[-rest:], norm_type).reshape(1)
                part = part[:-rest]
            if part.numel():
                yield torch.linalg.vector_norm(part.reshape(-1, _ROW), norm_type, 1)


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude in ``tensors`` as float64; NaN if any element is NaN; 0 without elements."""
    device, tensors = tensors[0].device, [tensor for tensor in tensors if tensor.numel() > 0]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if tensors[0].dtype.is_complex:
        return torch.stack([torch.linalg.vector_norm(tensor, math.inf) for tensor in tensors]).amax().double()
    # Ten times as fast as the inf-norm on the CPU.
    bounds = torch.stack([bound for tensor in tensors for bound in torch.aminmax(tensor)])
    return bounds.abs().amax().double()


def _unit(largest: Tensor) -> Tensor:
    """Return the divisor: ``largest``, or 1 where it is 0, inf or NaN, so that these values propagate."""
    return torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
