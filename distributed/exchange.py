"""The collectives after the header of a call, and the layout of the rows that they move.

Every rank makes the same exchanges in the same order, of the same sizes. Which ones it makes may depend only on what is
equal on all ranks: the headers and the results of earlier exchanges.

A few rows travel with the header, in :mod:`~fullrank.distributed.room`. All others that belong together are packed into
one block of bytes, for one collective. Each tensor is padded to the largest row count of any rank, and to a multiple of
16 bytes, so that every dtype can be viewed in place on arrival::

    | tensor 0: rows, padding | tensor 1: rows, padding | ...

A single tensor with equal row counts on all ranks is sent and received in place, without packing or copying.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import expected
from .group import backend_by_device, check_device_of_group
from .torch_private import all_gather_flat, reduce_scatter

all_reduce_flat = dist.all_reduce

ALONE = "A rank that works alone, such as in validation, sets gather_distributed=False on its losses."
# The advice where a rank makes no call, or another one, than the others.
OTHER_CALLS = (
    f"If the loaders of the ranks have different numbers of batches, use fullrank.data.until_all_end. {ALONE} "
    "It makes its metrics with sync_on_compute=False."
)
ALIGN = 16  # bytes of the widest dtype, complex128


def reduce_scatter_flat(output: Tensor, tensor: Tensor, group: ProcessGroup) -> None:
    """Fill ``output`` (n,) with this rank's part of the sum of ``tensor`` (W * n,) over the ranks.

    On the host gloo would reduce all of it on every rank, in twice the time and more. There each rank adds its parts.
    """
    if tensor.is_cpu:
        parts = torch.empty_like(tensor)
        dist.all_to_all_single(parts, tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output)
    else:
        reduce_scatter(output, tensor, group=group)


def round_up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def bytes_of(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a flat tensor of uint8, which shares its memory if it is contiguous."""
    flat = tensor.detach()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    flat = flat.contiguous()
    # A tensor of at most one element counts as contiguous with any strides, but not all of them can be viewed as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


class Exchange(NamedTuple):
    """The collectives of a call. Its name heads the error of a collective that fails."""

    call: str
    group: ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Return the sum of ``tensor``, which may be overwritten, over the ranks. ``what`` names it, in the plural."""
        return self._reduce(tensor, what, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor, what: str) -> Tensor:
        """Return the elementwise maximum of ``tensor``, which may be overwritten, over the ranks."""
        return self._reduce(tensor, what, dist.ReduceOp.MAX)

    def each(self, tensor: Tensor, what: str) -> Tensor:
        """Return ``tensor`` (...) of every rank, stacked in rank order (W, ...), on the host if it was staged."""
        staged = tensor.cpu() if is_staged(tensor, self.group) else tensor
        output = staged.new_empty(self.group.size(), *tensor.shape)
        where, sent = f"the all-gather of {what}", staged.contiguous().view(-1)
        communicate(self.call, where, all_gather_flat, output.view(-1), sent, self.group)
        return output

    def rows(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Gather each of ``tensors`` (N, ...), alike but for N, and return (sum N_r, ...); ``counts`` are all N."""
        most = max(counts)
        if len(tensors) == 1 and min(counts) == most and tensors[0].numel() > 0:
            return [self._gather_bytes(tensors[0], (len(counts) * most, *tensors[0].shape[1:]))]
        parts = []
        for tensor in tensors:
            content = bytes_of(tensor)
            parts += [content, content.new_empty(round_up(most * row_bytes(tensor)) - content.numel())]
        # The block is never empty, because every rank makes the same collective whatever the data.
        block = torch.cat(parts) if any(part.numel() for part in parts) else parts[0].new_zeros(ALIGN)
        gathered = self._gather_bytes(block, (len(counts) * block.numel(),))
        outputs, offset = [], 0
        for tensor in tensors:
            outputs.append(_unpack_rows(gathered, tensor, offset, counts))
            offset += round_up(most * row_bytes(tensor))
        return outputs

    def sum_own(self, tensor: Tensor, counts: Sequence[int], what: str) -> Tensor:
        """Sum ``tensor`` (sum of counts, ...) over the ranks, and return the rows of this rank."""
        most = max(1, *counts)
        if min(counts) < most:
            zeros = tensor.new_zeros(most, *tensor.shape[1:])
            parts = [(part, zeros[len(part) :]) for part in tensor.split([*counts])]
            tensor = torch.cat([piece for pair in parts for piece in pair])
        staged = tensor.cpu() if is_staged(tensor, self.group) else tensor
        summed = staged.new_empty(most, *tensor.shape[1:])
        if summed.numel():  # else the rows have no elements on any rank
            where = f"the reduce-scatter of {what}"
            communicate(
                self.call, where, reduce_scatter_flat, summed.view(-1), staged.contiguous().view(-1), self.group
            )
        return summed[: counts[self.rank]].to(tensor.device)

    def _reduce(self, tensor: Tensor, what: str, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Return ``tensor`` reduced over the ranks, with the same bits on every rank."""
        staged = tensor.cpu() if is_staged(tensor, self.group) else tensor.contiguous()
        communicate(self.call, f"the all-reduce of {what}", all_reduce_flat, staged, op=operation, group=self.group)
        return staged.to(tensor.device)

    def _gather_bytes(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Gather ``tensor`` of every rank into ``shape``, as bytes, because not every backend supports every dtype."""
        staged = tensor.cpu() if is_staged(tensor, self.group) else tensor
        output = staged.new_empty(shape)
        where = "the all-gather of the rows, which every rank had announced,"
        communicate(self.call, where, all_gather_flat, bytes_of(output), bytes_of(staged), self.group)
        return output.to(tensor.device)


def check_rows(tensors: Sequence[Tensor | None]) -> int:
    """Return the common number of rows of ``tensors`` (0 if all are None), or raise TypeError or ValueError."""
    count: int | None = None
    for index, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or hasattr(tensor, "full_tensor"):
            fix = "Pass dtensor.full_tensor() or its local rows." if isinstance(tensor, Tensor) else ""
            raise TypeError(expected(f"tensor {index}", "a plain torch.Tensor or None", tensor, fix))
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
            raise TypeError(expected(f"tensor {index}", "a dense tensor", str(tensor.layout), "Use to_dense()."))
        if tensor.ndim == 0:
            raise ValueError(expected(f"tensor {index}", "at least one dimension", tensor, "Use reshape(1)."))
        if count is not None and tensor.shape[0] != count:
            raise ValueError(expected(f"tensor {index}", f"{count} rows as in the tensors before it", tensor))
        count = tensor.shape[0]
    return count or 0


def check_devices(tensors: Sequence[Tensor | None], group: ProcessGroup) -> bool:
    """Return whether all tensors are on the host; ValueError unless ``group`` serves the one device of all tensors."""
    usable = backend_by_device(group)
    devices = {tensor.device.type for tensor in tensors if tensor is not None}
    if devices <= {"cpu"} <= usable.keys():
        return True
    if len(devices) > 1:
        raise ValueError(expected("tensors", "all on one device", sorted(devices), "Move them with to(device)."))
    if not devices <= usable.keys():
        fix = f"Move them to {' or '.join(usable)}, or use a backend for {min(devices)}."
        raise ValueError(expected("tensors", "a device that the process group serves", sorted(devices), fix))
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            check_device_of_group(f"tensor {index}", tensor, group)
    return False


WITH_GRADIENT = " with gradient"


def describe_rows(tensor: Tensor | None) -> str | None:
    """Return the properties of a tensor that must be equal on all ranks, all but the number of rows."""
    if tensor is None:
        return None
    gradient = WITH_GRADIENT if tensor.requires_grad and torch.is_grad_enabled() else ""
    sizes = "".join(map(", {}".format, tensor.shape[1:]))
    return f"{str(tensor.dtype).removeprefix('torch.')} (N{sizes}){gradient} on {tensor.device.type}"


def _unpack_rows(gathered: Tensor, like: Tensor, offset: int, counts: Sequence[int]) -> Tensor:
    """Return a copy of the rows (sum N_r, ...) of the tensor ``like``, ``offset`` bytes behind the start of blocks."""
    if not row_bytes(like):
        return like.new_empty(sum(counts), *like.shape[1:])
    shape = len(counts), max(counts), *like.shape[1:]
    blocks = gathered.view(like.dtype).view(len(counts), -1)[:, offset // like.element_size() :]
    blocks = blocks[:, : math.prod(shape[1:])].view(shape)
    parts, kind = [block[:count] for block, count in zip(blocks.unbind(), counts)], gathered.device.type
    # Not a view of the rows joined flat: autograd refuses changes in place of a view that a function returned. Autocast
    # to bfloat16 refuses to join float16.
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        return torch.cat(parts)


def is_staged(tensor: Tensor, group: ProcessGroup) -> bool:
    """Return True if ``tensor`` must be copied to the CPU first, because gloo cannot send memory of an accelerator."""
    return not tensor.is_cpu and backend_by_device(group).get(tensor.device.type) == "gloo"


def communicate(
    call: str,
    what: str,
    collective: Callable[..., Any],
    *arguments: Any,
    cause: Exception | None = None,
    **options: Any,
) -> None:
    """Make a collective, such as ``what`` "the all-gather of the rows"; name it and the public call if it fails.

    When a rank dies, the other ranks fail in their next collective, and torch's error does not say which that was.
    ``cause`` is an exception that the collective reports to them.
    """
    try:
        collective(*arguments, **options)
    except RuntimeError as error:
        raise RuntimeError(
            f"{call}: {what} failed. Another rank has probably died, has left early, or did not make this call within "
            f"the timeout of the process group: look into the log of each rank for the first error. {OTHER_CALLS} "
            f"{error}"
        ) from (cause or error)
