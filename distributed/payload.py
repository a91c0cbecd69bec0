"""Pack row-aligned tensors into one block of bytes, so that one collective gathers them all.

The block of a rank holds its tensors one after another. Each is padded to the largest row count of any rank, and to a
multiple of 16 bytes, so that every dtype can be viewed in place on arrival::

    | tensor 0: rows, padding | tensor 1: rows, padding | ...

A single tensor with equal row counts on all ranks is sent and received in place, without packing or copying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import all_gather
from .header import backend_by_device

_ALIGN = 16  # bytes of the widest dtype, complex128


def gather_payload(
    tensors: Sequence[Tensor], rows: Sequence[int], group: ProcessGroup, call: str = "a gather"
) -> list[Tensor]:
    """Return each of ``tensors`` (N, ...) with the rows of all ranks, (sum N_r, ...), in rank order.

    Args:
        tensors: contiguity does not matter; equal dtypes and trailing shapes on every rank.
        rows: the number of rows of every rank, known from the header.
        group: the group; one all-gather of one block per rank.
        call: name of the call, for the error of a collective that fails.
    """
    most = max(rows)
    if len(tensors) == 1 and min(rows) == most and tensors[0].numel() > 0:
        return [_gather_as_it_stands(tensors[0], group, call)]
    gathered = _all_gather(_pack(tensors, most), group, call)  # [W, bytes]
    device = tensors[0].device
    places = padded_places(rows, device) if min(rows) < most and device.type != "cpu" else None
    outputs, offset = [], 0
    for tensor in tensors:
        size = most * _row_bytes(tensor)
        column = gathered[:, offset : offset + size].view(tensor.dtype)
        outputs.append(_unpack(column.view(len(rows), most, *tensor.shape[1:]), rows, places))
        offset += _aligned(size)
    return outputs


def _gather_as_it_stands(tensor: Tensor, group: ProcessGroup, call: str) -> Tensor:
    """Return the rows of all ranks, received directly into the output."""
    if is_staged(tensor, group):
        return _gather_as_it_stands(tensor.detach().cpu(), group, call).to(tensor.device)
    output = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    _exchange(output.view(-1).view(torch.uint8), _bytes_of(tensor), group, call)
    return output


def _pack(tensors: Sequence[Tensor], most: int) -> Tensor:
    """Return the block of this rank: every tensor padded to ``most`` rows and to a multiple of 16 bytes."""
    parts = []
    for tensor in tensors:
        content = _bytes_of(tensor)
        padding = _aligned(most * _row_bytes(tensor)) - content.numel()
        parts += [content, content.new_zeros(padding)] if padding else [content]
    # The block is never empty, because every rank makes the same collective whatever the data.
    return torch.cat(parts) if any(part.numel() for part in parts) else parts[0].new_zeros(_ALIGN)


Places = tuple[Tensor, Tensor]


def padded_places(rows: Sequence[int], device: torch.device) -> Places:
    """Return the rank of each row of all ranks and its place among the rows of that rank, (sum N_r,) int64 each.

    The number of kernels does not depend on the number of ranks, and nothing waits for the device.
    """
    counts = torch.tensor(rows, dtype=torch.int64, device="cpu")
    ends, starts = torch.stack([counts.cumsum(0), counts.cumsum(0) - counts]).to(device, non_blocking=True)
    row = torch.arange(sum(rows), device=device)
    rank = torch.searchsorted(ends, row, right=True)
    return rank, row - starts[rank]


def _unpack(padded: Tensor, rows: Sequence[int], places: Places | None) -> Tensor:
    """Return the rows (sum N_r, ...) without the padding of ``padded`` (W, most, ...), which leaves out ``places``.

    Always a copy, because the caller could not change a view of the block in place.
    """
    if places is not None:
        return padded[places]
    if min(rows) < max(rows):  # on the CPU, where a copy of each part is faster than one of each row
        return torch.cat([padded[rank, :count] for rank, count in enumerate(rows)])
    output = padded.new_empty(sum(rows), *padded.shape[2:])
    output.view(padded.shape).copy_(padded)
    return output


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A tensor of at most one element counts as contiguous whatever its strides, and torch would not view it as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def is_staged(tensor: Tensor, group: ProcessGroup) -> bool:
    """Return True when the tensor must be copied to the CPU first: gloo moves no memory of an accelerator."""
    return tensor.device.type != "cpu" and backend_by_device(group).get(tensor.device.type) == "gloo"


def _all_gather(block: Tensor, group: ProcessGroup, call: str) -> Tensor:
    """Return the blocks of all ranks, (W, bytes), on the device of ``block``."""
    staged = block.cpu() if is_staged(block, group) else block
    gathered = staged.new_empty(group.size() * staged.numel())
    _exchange(gathered, staged, group, call)
    return gathered.view(-1, staged.numel()).to(block.device)


def _exchange(output: Tensor, block: Tensor, group: ProcessGroup, call: str) -> None:
    all_gather(output, block, group, call=call, what="the all-gather of the rows, which every rank had announced,")
