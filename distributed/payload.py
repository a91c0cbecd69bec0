"""Row-aligned tensors as one block of bytes, so that they travel in one collective.

The block of one rank holds the tensors one after another, each padded to the largest row count of any rank and to a
multiple of 16 bytes (so that every dtype can be viewed in place on arrival)::

    | tensor 0: rows, padding | tensor 1: rows, padding | ...

A single tensor with equal row counts is sent and received as it stands, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .header import backend_by_device
from .torch_private import all_gather_flat

_ALIGN = 16  # bytes of the widest dtype, complex128


def gather_payload(tensors: Sequence[Tensor], rows: Sequence[int], group: ProcessGroup) -> list[Tensor]:
    """Return each of ``tensors`` (N, ...) with the rows of all ranks, (sum N_r, ...), in rank order.

    Args:
        tensors: contiguity does not matter; equal dtypes and trailing shapes on every rank.
        rows: the number of rows of every rank, known from the header.
        group: the group; one all-gather of one block per rank.
    """
    most = max(rows)
    single = len(tensors) == 1 and min(rows) == most and tensors[0].numel() > 0
    block = _bytes_of(tensors[0]) if single else _pack(tensors, most)
    gathered = _all_gather(block, group)  # [W, bytes]
    outputs, offset = [], 0
    for tensor in tensors:
        size = most * _row_bytes(tensor)
        column = gathered[:, offset : offset + size].view(tensor.dtype)
        padded = column.view(len(rows), most, *tensor.shape[1:])  # [W, most, ...]
        if min(rows) == most:
            outputs.append(padded.reshape(len(rows) * most, *tensor.shape[1:]))
        else:
            outputs.append(torch.cat([padded[rank, :count] for rank, count in enumerate(rows)]))
        offset += _aligned(size)
    return outputs


def _pack(tensors: Sequence[Tensor], most: int) -> Tensor:
    sizes = [_aligned(most * _row_bytes(tensor)) for tensor in tensors]
    # Never empty: every rank makes the same collective whatever the data.
    block = tensors[0].new_zeros(max(sum(sizes), _ALIGN), dtype=torch.uint8)
    offset = 0
    for tensor, size in zip(tensors, sizes):
        content = _bytes_of(tensor)
        block[offset : offset + content.numel()] = content
        offset += size
    return block


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous()
    # A tensor of at most one element counts as contiguous whatever its strides, and could then not be viewed as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _all_gather(block: Tensor, group: ProcessGroup) -> Tensor:
    """Return the blocks of all ranks, (W, bytes), on the device of ``block``."""
    world_size = dist.get_world_size(group)
    # gloo moves memory of the CPU: blocks of an accelerator pass through it.
    staged = block.cpu() if backend_by_device(group).get(block.device.type) == "gloo" else block
    gathered = staged.new_empty(world_size * staged.numel())
    all_gather_flat(gathered, staged, group)
    return gathered.view(world_size, -1).to(block.device)
