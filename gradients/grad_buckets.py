"""Sums of many tensors over ranks by few collectives: small ones travel together, large ones in their own memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.collectives import lost
from ..distributed.payload import _is_staged
from ..distributed.torch_private import copy_each_

BUCKET_BYTES = 25 * 2**20  # of what travels; large enough for the bandwidth, small beside the gradients


def add_over_ranks_(tensors: Sequence[Tensor], group: ProcessGroup, call: str) -> None:
    """Replace each tensor, in its memory, by its sum over the ranks; half precision is added in float32.

    Args:
        tensors: of equal shapes, dtypes and types of device on every rank, in the same order. Empty ones do not travel.
        group: the group.
        call: name of the public call, for the error of a collective that fails.
    """
    for bucket in buckets(tensors):
        _add_bucket(bucket, group, call)


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype and device, as many as travel together, in their order."""
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        kind, size = (tensor.device, tensor.dtype), tensor.numel() * _wide(tensor.dtype).itemsize
        if kind in filling and sizes[kind] + size > BUCKET_BYTES:
            yield filling.pop(kind)
        sizes[kind] = size + (sizes[kind] if kind in filling else 0)
        filling.setdefault(kind, []).append(tensor)
    yield from filling.values()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are made in."""
    return torch.promote_types(dtype, torch.float32)


def _add_bucket(tensors: list[Tensor], group: ProcessGroup, call: str) -> None:
    first, dtype = tensors[0], _wide(tensors[0].dtype)
    staged = _is_staged(first, group)
    if len(tensors) == 1 and first.dtype == dtype and first.is_contiguous() and not staged:
        _all_reduce(first, group, call)
        return
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=dtype, device="cpu" if staged else first.device)
    parts = [part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors)]
    copy_each_(parts, tensors)
    _all_reduce(flat, group, call)
    copy_each_(tensors, parts)


def _all_reduce(tensor: Tensor, group: ProcessGroup, call: str) -> None:
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        raise lost(call, "an all-reduce of gradients", error) from error
