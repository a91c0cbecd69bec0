"""The room behind the header of a group. A few rows travel in it with the header, which saves a second collective.

All ranks must send the same number of bytes in every call, even when they make different calls. So the room belongs to
the group. It changes only after an agreement, by what all ranks then know: it grows to the rows of that call, and
shrinks when several calls in a row have used at most half of it. Rows that do not fit travel after the header.

The room shrinks when the unused bytes have cost about as much as one collective, which ``python benchmarks/gather.py``
measures: after two calls at 64 KiB, four at 32 KiB, eight at 16 KiB or less.

The block of a rank is its header and then its tensors, as in :mod:`~fullrank.distributed.exchange`. Rows travel this
way on the host only, where a collective costs more than its bytes. On an accelerator, packing and unpacking them would
take kernel launches of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from weakref import WeakKeyDictionary

import numpy
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .exchange import check_devices, check_rows, describe_rows, round_up, row_bytes
from .group import backend_by_device

MAX_SIZE = 2**16  # bytes that a rank sends
MAX_TOTAL_SIZE = 2**20  # bytes that a rank receives: the room of all ranks
MAX_IDLE_CALLS = 8  # in a row before the room shrinks; fewer in a large room
_MAX_IDLE_BYTES = 2**17  # that calls in a row send unused before the room shrinks

NUM_TOTALS = 8
HEADER_BYTES = 8 * (4 + NUM_TOTALS)

_MAX_PARCELS = 64  # that a group remembers


class Room:
    """The memory in which the headers of a group travel, and behind each of them ``size`` bytes for rows.

    ``block`` are the header and the rows of this rank, as bytes, and ``sent`` the same memory as a tensor. ``arrived``
    (W * words,) are the blocks of all ranks, and ``heads`` (W, 4) and ``totals`` (W, 8) views of their headers.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._limit = num_ranks, min(MAX_SIZE, MAX_TOTAL_SIZE // num_ranks)
        self._parcels: dict[object, Parcel] = {}
        self.is_on_host = True
        self._resize(0)

    @torch.inference_mode(False)
    def _resize(self, size: int) -> None:
        self.size, self._num_idle, self._max_idle_size = size, 0, 0
        self._parcels.clear()  # they hold views of the old memory
        block = numpy.zeros((HEADER_BYTES + size) // 8, numpy.int64)
        blocks = numpy.zeros((self._num_ranks, len(block)), numpy.int64)
        self.heads, self.totals = blocks[:, :4], blocks[:, 4 : 4 + NUM_TOTALS].view(numpy.float64)
        self.block, self.sent, self.arrived = block.data, torch.from_numpy(block), torch.from_numpy(blocks.reshape(-1))

    def adapt(self, needed: int) -> None:
        """Grow or shrink after an agreement in which the rank with the most rows needs ``needed`` bytes."""
        wanted = 1 << (needed - 1).bit_length() if 0 < needed <= self._limit else 0
        if wanted > self.size:
            self._resize(wanted)
        elif wanted == self.size:
            self._num_idle = self._max_idle_size = 0
        else:
            self._num_idle, self._max_idle_size = self._num_idle + 1, max(self._max_idle_size, wanted)
            if self._num_idle == min(MAX_IDLE_CALLS, _MAX_IDLE_BYTES // self.size):
                self._resize(self._max_idle_size)

    def parcel_of(self, call: str, tensors: Sequence[Tensor | None], group: ProcessGroup) -> Parcel:
        """Return the parcel of ``tensors`` in ``call``, or raise TypeError or ValueError if they cannot travel."""
        with_grad = torch.is_grad_enabled()
        key = (call, *[None if tensor is None else _kind_of(tensor, with_grad) for tensor in tensors])
        parcel = self._parcels.get(key)
        if parcel is None:
            parcel = Parcel(tensors, group)
            if parcel.is_on_host:  # on an accelerator the device of the group may change between calls
                if len(self._parcels) == _MAX_PARCELS:
                    self._parcels.clear()
                self._parcels[key] = parcel
        return parcel


def _kind_of(tensor: Tensor, with_grad: bool) -> object:
    """Return the shape of ``tensor`` and all other properties that are checked."""
    if not isinstance(tensor, Tensor):
        return type(tensor)
    shape = tensor.is_nested or tensor.shape
    return type(tensor), tensor.dtype, tensor.layout, tensor.is_cpu, with_grad and tensor.requires_grad, shape


class Parcel:
    """The layout of tensors that travel together. Calls that differ only in the values share one parcel."""

    def __init__(self, tensors: Sequence[Tensor | None], group: ProcessGroup) -> None:
        self.count, self.is_on_host = check_rows(tensors), check_devices(tensors, group)
        self.described = [*map(describe_rows, tensors)]  # must be equal on all ranks
        self._kinds = [(tensor.dtype, tensor.shape[1:], row_bytes(tensor)) for tensor in tensors if tensor is not None]
        self.needed = self.bytes_of(self.count)
        self._own_views: list[Tensor] | None = None
        self._counts: tuple[int, ...] | None = None
        self._views: list[tuple[Tensor, ...]] = []

    def bytes_of(self, count: int) -> int:
        return sum(round_up(count * width) for _, _, width in self._kinds)

    def write(self, room: Room, tensors: Sequence[Tensor | None]) -> None:
        """Copy ``tensors``, which are on the host, behind the header of this rank."""
        if self._own_views is None:
            self._own_views = self._views_of(room.sent, self.count)
        views = iter(self._own_views)
        for tensor in tensors:
            if tensor is not None:
                next(views).copy_(tensor.detach() if tensor.requires_grad else tensor)

    def read(self, room: Room, counts: tuple[int, ...]) -> list[Tensor]:
        if self._counts != counts:
            blocks = room.arrived.chunk(len(counts))
            self._views = [*zip(*(self._views_of(block, count) for block, count in zip(blocks, counts)))]
            self._counts = counts
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
            return [*map(torch.cat, self._views)]  # which autocast to bfloat16 refuses for float16

    @torch.inference_mode(False)  # the views are kept for calls outside of it
    def _views_of(self, block: Tensor, count: int) -> list[Tensor]:
        """Return a view of each tensor in the block of a rank with ``count`` rows."""
        start, views = HEADER_BYTES, []
        for dtype, trailing, width in self._kinds:
            rows = block.view(dtype).narrow(0, start // dtype.itemsize, count * math.prod(trailing))
            views.append(rows.view(count, *trailing))
            start += round_up(count * width)
        return views


# Keyed by the object: a group that is created again under the same name starts with an empty room on every rank.
_ROOMS: WeakKeyDictionary[ProcessGroup, Room] = WeakKeyDictionary()


def room_of(group: ProcessGroup) -> Room:
    """Return the room of ``group``, the same object in every call."""
    room = _ROOMS.get(group)
    if room is None:
        room = _ROOMS[group] = Room(group.size())
        room.is_on_host = "cpu" in backend_by_device(group)
    return room
