"""The room behind the headers of a group, in which few rows travel with them: one collective instead of two.

All ranks must send the same number of bytes in every call, whichever call each of them makes. So the room belongs to
the group. It changes only after an agreement, by what all ranks then know: it grows to the rows of that call, and
shrinks when eight calls in a row have used at most half of it. Rows that do not fit travel after the header.

The rows of a rank lie one tensor after another, each padded to a multiple of 16 bytes, so that every dtype can be
viewed in place on arrival::

    | header | tensor 0: own rows | padding | tensor 1: own rows | padding | ... unused |

Only the host has room. There a collective costs more than the bytes in it; an accelerator would have to pack and to
unpack them in launches of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import memmove
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import expected

MOST = 2**16  # bytes of a rank
MOST_OF_ALL = 2**20  # bytes of all ranks, which each of them receives
PATIENCE = 8

ALIGN = 16  # bytes of the widest dtype, complex128


class Room:
    """The bytes that a group has for rows behind each header: ``size``, a power of two or 0."""

    def __init__(self, num_ranks: int) -> None:
        self.size = 0
        self._limit = min(MOST, MOST_OF_ALL // num_ranks)
        self._num_idle = self._most_of_idle = 0

    def adapt(self, needed: int) -> None:
        """Grow or shrink after an agreement of which the rank with the most rows needs ``needed`` bytes."""
        wanted = 1 << (needed - 1).bit_length() if 0 < needed <= self._limit else 0
        if wanted >= self.size:
            self.size, self._num_idle, self._most_of_idle = wanted, 0, 0
            return
        self._num_idle, self._most_of_idle = self._num_idle + 1, max(self._most_of_idle, wanted)
        if self._num_idle == PATIENCE:
            self.size, self._num_idle, self._most_of_idle = self._most_of_idle, 0, 0


# By the object, not by its name: a group that is created again under the same name begins without room on every rank.
_ROOMS: WeakKeyDictionary[ProcessGroup, Room] = WeakKeyDictionary()


def room_of(group: ProcessGroup) -> Room:
    """Return the room of ``group``, the same object in every call."""
    room = _ROOMS.get(group)
    if room is None:
        room = _ROOMS[group] = Room(group.size())
    return room


def aligned(size: int) -> int:
    """Return ``size`` rounded up to a multiple of 16 bytes."""
    return -(-size // ALIGN) * ALIGN


def row_bytes(tensor: Tensor) -> int:
    """Return the bytes of one row of ``tensor``."""
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def size_of(tensors: Sequence[Tensor], count: int) -> int:
    """Return the bytes that ``count`` rows of ``tensors`` need."""
    return sum(aligned(count * row_bytes(tensor)) for tensor in tensors)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a flat tensor of uint8, sharing its memory where that is possible."""
    flat = tensor.detach()
    if flat.is_conj() or flat.is_neg():
        flat = flat.resolve_conj().resolve_neg()
    flat = flat.contiguous()
    # A tensor of at most one element counts as contiguous whatever its strides, and torch would not view it as bytes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


# Memory is copied by its address: an operator of torch takes several times as long for few rows.


def pack_into(target: int, tensors: Sequence[Tensor]) -> None:
    """Write the rows of ``tensors``, which are on the host, to the address ``target``."""
    for tensor in tensors:
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        content, size = tensor if is_plain else bytes_of(tensor), tensor.nbytes
        if size and not content.data_ptr():
            content = content.clone()  # plain, of the result of a collective that may still run
            if not content.data_ptr():  # such as a wrapper of a transform
                raise RuntimeError(expected("rows", "a tensor with memory of its own", tensor))
        memmove(target, content.data_ptr(), size)
        target += aligned(size)


def unpack(arrived: Tensor, header: int, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return each of ``tensors`` with the rows of all ranks, as copies.

    Args:
        arrived: (W, words) on the host, contiguous: the headers of all ranks with their rooms.
        header: bytes of a header.
        tensors: those of this rank, for their dtypes and shapes.
        counts: the number of rows of every rank.
    """
    block = arrived.nbytes // len(counts)
    outputs, sources = [], [arrived.data_ptr() + block * place + header for place in range(len(counts))]
    for tensor in tensors:
        # No view, because it may change in place.
        output = torch.empty((sum(counts), *tensor.shape[1:]), dtype=tensor.dtype, device="cpu")
        target, width = output.data_ptr(), row_bytes(tensor)
        for place, count in enumerate(counts):
            memmove(target, sources[place], count * width)
            target += count * width
            sources[place] += aligned(count * width)
        outputs.append(output)
    return outputs
