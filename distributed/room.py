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

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

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
    return tensor.shape[1:].numel() * tensor.element_size()


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


def pack_into(target: memoryview, tensors: Sequence[Tensor]) -> None:
    """Write the rows of ``tensors``, which are on the host, into ``target``."""
    start = 0
    for tensor in tensors:
        content = bytes_of(tensor)
        target[start : start + content.numel()] = content.numpy().data
        start += aligned(content.numel())


def unpack(block: Tensor, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return each of ``tensors`` with the rows of all ranks, as copies.

    Args:
        block: (W, size) uint8, the rooms of all ranks as they arrived.
        tensors: those of this rank, for their dtypes and shapes.
        counts: the number of rows of every rank.
    """
    outputs, starts = [], [0] * len(counts)
    for tensor in tensors:
        sizes = [count * row_bytes(tensor) for count in counts]
        # No view, because it may change in place.
        output = block.new_empty(sum(counts), *tensor.shape[1:], dtype=tensor.dtype)
        content = output.view(-1).view(torch.uint8)
        if min(counts) == max(counts):
            content.view(len(counts), -1).copy_(block[:, starts[0] : starts[0] + sizes[0]])
        else:
            torch.cat([one[start : start + size] for one, start, size in zip(block, starts, sizes)], out=content)
        outputs.append(output)
        starts = [start + aligned(size) for start, size in zip(starts, sizes)]
    return outputs
