"""The room behind the headers of a group, in which few rows travel with them: one collective instead of two.

All ranks must send the same number of bytes in every call, whichever call each of them makes. So the room belongs to
the group. It changes only after an agreement, by what all ranks then know: it grows to the rows of that call, and
shrinks when several calls in a row have used at most half of it. Rows that do not fit travel after the header.

Each call without rows pays for bytes that it does not need, and each call with rows is spared a collective. The room
shrinks when the first have cost about what the second saves: after two calls at 64 KiB, four at 32 KiB, eight at 16 KiB
or less. ``python benchmarks/gather.py`` measures both with 2, 3 and 8 processes.

The rows of a rank lie one tensor after another, each padded to a multiple of 16 bytes, so that every dtype can be
viewed in place::

    | header | tensor 0: own rows | padding | tensor 1: own rows | padding | ... unused |

Only the host has room. There a collective costs more than the bytes in it; an accelerator would have to pack and to
unpack them in launches of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .exchange import aligned, check_devices, check_rows, describe, row_bytes
from .group import backend_by_device

MOST = 2**16  # bytes of a rank
MOST_OF_ALL = 2**20  # bytes of all ranks, which each of them receives
PATIENCE = 8  # idle calls, while the room is small
_MOST_IDLE = 2**17  # bytes of idle calls in a row

NUM_TOTALS = 4
HEADER_BYTES = 8 * (4 + NUM_TOTALS)

_MOST_PARCELS = 64  # that a group remembers


class Room:
    """The bytes that a group has for rows behind each header: ``size``, a power of two or 0; and its memory.

    Attributes:
        is_on_host: whether the headers of the group travel on the host.
        own: the header and the rows of this rank; ``sent`` is the tensor (words,) int64 of the same memory.
        arrived: (W * words,) int64, those of all ranks; ``heads`` (W, 4) int64 and ``totals`` (W, 4) float64 are parts.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._limit = num_ranks, min(MOST, MOST_OF_ALL // num_ranks)
        self._parcels: dict[object, Parcel] = {}
        self.is_on_host = True
        self._resize(0)

    @torch.inference_mode(False)
    def _resize(self, size: int) -> None:
        self.size, self._num_idle, self._most_of_idle = size, 0, 0
        self._parcels.clear()  # they have places in the memory
        own = numpy.zeros((HEADER_BYTES + size) // 8, numpy.int64)
        every = numpy.zeros((self._num_ranks, len(own)), numpy.int64)
        self.heads, self.totals = every[:, :4], every[:, 4 : 4 + NUM_TOTALS].view(numpy.float64)
        self.own, self.sent, self.arrived = own.data, torch.from_numpy(own), torch.from_numpy(every.reshape(-1))

    def adapt(self, needed: int) -> None:
        """Grow or shrink after an agreement of which the rank with the most rows needs ``needed`` bytes."""
        wanted = 1 << (needed - 1).bit_length() if 0 < needed <= self._limit else 0
        if wanted > self.size:
            self._resize(wanted)
        elif wanted == self.size:
            self._num_idle = self._most_of_idle = 0
        else:
            self._num_idle, self._most_of_idle = self._num_idle + 1, max(self._most_of_idle, wanted)
            if self._num_idle == min(PATIENCE, _MOST_IDLE // self.size):
                self._resize(self._most_of_idle)

    def parcel_of(self, call: str, tensors: Sequence[Tensor | None], group: ProcessGroup) -> Parcel:
        """Return how ``tensors`` travel in ``call``, or raise TypeError or ValueError."""
        with_grad = torch.is_grad_enabled()
        key = (call, *[_kind_of(tensor, with_grad) for tensor in tensors])
        known = self._parcels.get(key)
        if known is None:
            known = Parcel(tensors, group)
            if known.is_on_host:  # which accelerator a group serves may change between calls
                if len(self._parcels) == _MOST_PARCELS:
                    self._parcels.clear()
                self._parcels[key] = known
        return known


def _kind_of(tensor: Tensor | None, with_grad: bool) -> object:
    """Return all that the checks of a tensor look at, and its shape."""
    if not isinstance(tensor, Tensor):
        return type(tensor)
    shape = tensor.is_nested or tensor.shape
    return type(tensor), tensor.dtype, tensor.layout, tensor.is_cpu, with_grad and tensor.requires_grad, shape


class Parcel:
    """Tensors that travel together, made once for calls that are alike in everything but the values.

    Attributes:
        count: the number of rows of this rank.
        described: what must be equal on all ranks.
        is_on_host: whether all tensors are.
        needed: the bytes of the rows of this rank.
        facts: those of the last call, and ``digest``, their hash.
    """

    def __init__(self, tensors: Sequence[Tensor | None], group: ProcessGroup) -> None:
        self.count, self.is_on_host = check_rows(tensors), check_devices(tensors, group)
        self.described = [*map(describe, tensors)]
        self._kinds = [(one.dtype, one.shape[1:], row_bytes(one)) for one in tensors if one is not None]
        self.needed = self.bytes_of(self.count)
        self.facts: object = None
        self.digest = 0
        self._own: list[Tensor] | None = None
        self._counts: tuple[int, ...] | None = None
        self._parts: list[tuple[Tensor, ...]] = []

    def bytes_of(self, count: int) -> int:
        """Return the bytes of ``count`` rows."""
        return sum(aligned(count * width) for _, _, width in self._kinds)

    def write(self, room: Room, tensors: Sequence[Tensor | None]) -> None:
        """Copy ``tensors``, which are on the host, behind the header of this rank."""
        if self._own is None:
            self._own = list(self._places(room.sent, self.count))
        for place, tensor in zip(self._own, [tensor for tensor in tensors if tensor is not None]):
            place.copy_(tensor.detach() if tensor.requires_grad else tensor)

    def read(self, room: Room, counts: tuple[int, ...]) -> list[Tensor]:
        """Return the tensors with the rows of all ranks, as copies."""
        if self._counts != counts:
            blocks = room.arrived.chunk(len(counts))
            self._parts = [*zip(*(self._places(block, count) for block, count in zip(blocks, counts)))]
            self._counts = counts
        return [torch.cat(parts) for parts in self._parts]

    def _places(self, block: Tensor, count: int) -> Iterator[Tensor]:
        """Yield the places of each tensor with ``count`` rows in the block of a rank."""
        start = HEADER_BYTES
        for dtype, trailing, width in self._kinds:
            rows = block.view(dtype).narrow(0, start // dtype.itemsize, count * math.prod(trailing))
            yield rows.view(count, *trailing)
            start += aligned(count * width)


# By the object, not by its name: a group that is created again under the same name begins without room on every rank.
_ROOMS: WeakKeyDictionary[ProcessGroup, Room] = WeakKeyDictionary()


def room_of(group: ProcessGroup) -> Room:
    """Return the room of ``group``, the same object in every call."""
    room = _ROOMS.get(group)
    if room is None:
        room = _ROOMS[group] = Room(group.size())
        room.is_on_host = "cpu" in backend_by_device(group)
    return room
