r"""The p-norm of the gradients that one rank holds: one pass, no overflow, no underflow, no wait for the device.

Norms are joined by :math:`\|(a, b)\|_p = \|(\|a\|_p, \|b\|_p)\|_p`, so one number is kept of a row, a tensor, a rank or
a stage: its norm. Only elements are raised to powers. A square overflows float16 above 256 and float32 above 1.8e19,
which bfloat16 gradients can exceed. So powers are summed

- on the CPU in float32 (float64 for float64), row by row. If the sum shows that powers have left the range, which is
  rare, they are summed a second time, with the elements divided by the largest.
- on other devices in float64, which holds the powers of float32 up to the 6th, because reading the sum would wait for
  the device. Float64 gradients, and elements for higher powers, are always divided by the largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .torch_private import norms_of_each

# Elements in a row. Sums in float32 must be short: the relative error of the norm of 5e7 elements is 1e-8 with rows of
# 4096, and 3e-5 with one sum per tensor (benchmarks/grad_norm.py).
_ROW = 4096
# Tensors up to this length are one row, because cutting one costs more than adding it up. The error of such a row is
# 1.7e-7 in float32 (root mean square).
_WHOLE = 8 * _ROW
_MOST_TRIES = 16  # for rows of equal length
_CHUNK = 2**20  # elements converted or divided at a time, which takes little memory and stays in the cache
_HIGHEST_POWER = 6  # of float32 within float64: 3.4e38 ** 6 = 1.5e231, 1.4e-45 ** 6 = 7.5e-270


def join_norms(norms: Tensor, norm_type: float) -> Tensor:
    """Return the p-norm over the first dimension of ``norms`` (K, ...), K >= 1, all >= 0, in float64; NaN stays."""
    if norms.dtype is torch.float32 and norm_type <= _HIGHEST_POWER:
        return torch.linalg.vector_norm(norms, norm_type, dim=0, dtype=torch.float64)
    norms = norms.double()
    if norms.shape[0] == 1:
        return norms[0]
    largest = norms.amax(dim=0)  # NaN if any is NaN
    if norm_type == math.inf:
        return largest
    scale = _finite_scale(largest)
    return torch.linalg.vector_norm(norms / scale, norm_type, dim=0) * scale


def local_norm(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the p-norm of all elements of one or more ``tensors`` on one device, as a float64 scalar on it."""
    groups = by_dtype(tensors).values()
    if norm_type == math.inf:
        return torch.stack([_largest(group) for group in groups]).amax()
    measure = _norm_on_host if tensors[0].device.type == "cpu" else _norm_without_reading
    norms = [measure(group, norm_type) for group in groups]
    return norms[0] if len(norms) == 1 else join_norms(torch.stack(norms), norm_type)


def by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    listed = list(tensors)
    dtypes = [tensor.dtype for tensor in listed]
    if len(set(dtypes)) == 1:
        return {dtypes[0]: listed}
    return {dtype: [tensor for tensor in listed if tensor.dtype == dtype] for dtype in dict.fromkeys(dtypes)}


def by_device(tensors: list[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    if len(devices) == 1:
        return [tensors] if tensors else []
    return [own for device in devices if (own := [tensor for tensor in tensors if tensor.device == device])]


def _norm_on_host(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype on the CPU, where the host can read a value at no cost."""
    dtype, sizes = torch.promote_types(tensors[0].dtype, torch.float32), [tensor.numel() for tensor in tensors]
    small = [tensor for tensor, size in zip(tensors, sizes) if size <= _WHOLE]
    norms = [torch.stack(norms_of_each(small, norm_type, dtype=dtype))] if small else []
    if len(small) < len(tensors):
        norms += _norms_of_rows([tensor for tensor, size in zip(tensors, sizes) if size > _WHOLE], norm_type, dtype)
    total = join_norms(norms[0] if len(norms) == 1 else torch.cat(norms), norm_type)
    limits = torch.finfo(dtype)
    # A power that underflows has an error of at most `tiny`. Above this mean power, that is less than one rounding.
    if (limits.tiny / limits.eps * sum(sizes)) ** (1 / norm_type) <= total.item() < math.inf:
        return total
    return _norm_of_quotients(tensors, norm_type)


def _norm_without_reading(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype by operations that do not depend on the values."""
    dtype = tensors[0].dtype
    if dtype in (torch.float64, torch.complex128) or norm_type > _HIGHEST_POWER:
        return _norm_of_quotients(tensors, norm_type)
    double = torch.complex128 if dtype.is_complex else torch.float64
    return join_norms(torch.stack(norms_of_each(tensors, norm_type, dtype=double)), norm_type)


def _norm_of_quotients(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of ``tensors`` of one dtype, from the elements divided by the largest."""
    dtype, scale = torch.promote_types(tensors[0].dtype, torch.float32), _finite_scale(_largest(tensors))
    norms = [*_norms_of_rows(tensors, norm_type, dtype, scale)]
    return join_norms(norms[0] if len(norms) == 1 else torch.cat(norms), norm_type) * scale


def _norms_of_rows(
    tensors: list[Tensor], norm_type: float, dtype: torch.dtype, scale: Tensor | None = None
) -> Iterator[Tensor]:
    """Yield vectors of the norms of the rows of each tensor in ``dtype``; of the elements divided by ``scale``."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            # A transposed tensor is contiguous in another order of dimensions, and the order does not change the norm.
            tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
        # Convert or divide chunk by chunk, without a copy of the whole tensor.
        is_ready = scale is None and tensor.dtype == dtype
        for chunk in (tensor,) if is_ready else tensor.reshape(-1).split(_CHUNK):
            part = chunk if is_ready else chunk.to(dtype)
            if scale is not None and dtype.is_complex:  # complex division squares the divisor, which may underflow to 0
                part = torch.view_as_complex(torch.view_as_real(part.resolve_conj()) / scale)
            elif scale is not None:
                part = part / scale
            if num_rows := _num_rows(part.numel()):
                yield torch.linalg.vector_norm(part.reshape(num_rows, -1), norm_type, 1)
                continue
            rows, rest = part.reshape(-1).tensor_split([part.numel() // _ROW * _ROW])
            yield torch.linalg.vector_norm(rows.reshape(-1, _ROW), norm_type, 1)
            yield torch.linalg.vector_norm(rest, norm_type, 0, keepdim=True)


@lru_cache(maxsize=4096)
def _num_rows(size: int) -> int:
    """Return into how many rows of equal length ``size`` elements are cut; 0 for rows of _ROW and a rest."""
    if size % _ROW == 0:
        return size // _ROW
    fewest = -(-2 * size // _WHOLE)
    return next((number for number in range(fewest, fewest + _MOST_TRIES) if size % number == 0), 0)


def _largest(tensors: list[Tensor]) -> Tensor:
    """Return the largest magnitude in ``tensors`` as float64; NaN if any element is NaN; 0 without elements."""
    device, tensors = tensors[0].device, [tensor for tensor in tensors if tensor.numel() > 0]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    if tensors[0].dtype.is_complex:
        return torch.stack([torch.linalg.vector_norm(tensor, math.inf) for tensor in tensors]).amax().double()
    # On the CPU ten times as fast as the inf-norm.
    bounds = torch.stack([bound for tensor in tensors for bound in torch.aminmax(tensor)])
    return bounds.abs().amax().double()


def _finite_scale(largest: Tensor) -> Tensor:
    """Return ``largest``, or 1 where it is 0, inf or NaN, so that these values propagate."""
    return torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
