"""A queue of past rows of which each rank keeps its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.exchange import Exchange
from ..distributed.group import Group, is_initialized, resolve_group
from ..distributed.header import Offer, State, agree_on, digest
from ..distributed.torch_private import not_compiled
from ..errors import Words, expected, warn
from .memory_queue import GATHER_FIRST, SAME_QUEUE, Keep, MemoryQueue, QueueRows, on_host

_COLUMNS = ("_logits", "_targets", "_iid", "_weight", "_numbers")


class _Step(NamedTuple):
    """The rows that all ranks enqueued in one call: numbers from ``first`` on, in rank order."""

    first: int
    counts: tuple[int, ...]  # [W]

    @property
    def end(self) -> int:
        """The first number after those of this step."""
        return self.first + sum(self.counts)

    def held(self, rank: int, limit: int) -> int:
        """Return how many rows of a rank have numbers from ``limit`` on."""
        end = self.first + sum(self.counts[: rank + 1])
        return max(0, min(self.counts[rank], end - limit))


class ShardedQueue(MemoryQueue):
    """The last ``capacity`` rows of all ranks, each kept by the rank that computed it.

    All accepted rows are numbered, over steps, ranks and rows in this order, and a rank keeps its own rows whose number
    is among the last ``capacity``. Together the ranks hold the rows of a :class:`MemoryQueue`, so the memory of each
    falls with their number. Every rank knows how many rows the others hold.

    ``state_dict`` holds this rank's rows alone, with a warning, unless :meth:`gather` was called after the last change.
    Then it holds those of all ranks, in the form of a :class:`MemoryQueue`. On as many ranks as before each gets its
    own rows again, on others an equal part.

    Args:
        capacity: number of rows of all ranks together.
        num_classes, ignore_index, keep, multi_hot: see :class:`MemoryQueue`.
    """

    def __init__(
        self, capacity: int, num_classes: int, ignore_index: int = -100, *, keep: Keep = "all", multi_hot: bool = False
    ) -> None:
        self._steps: deque[_Step] = deque()
        self._start = 0  # of the rows held, in the buffers
        self._place = (0, 1)  # rank and number of ranks of which the rows are this rank's part
        self._gathered: dict[str, Any] | None = None  # the state of all ranks, while it is up to date
        self.is_gathered_later = False  # who saves puts the rows of all ranks into the state: no warning
        super().__init__(capacity, num_classes, ignore_index, keep=keep, multi_hot=multi_hot)

    @torch.inference_mode(False)
    def _allocate(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        capacity, self.capacity = self.capacity, 0  # buffers grow with the rows, which may be a small part
        self._numbers = torch.zeros(0, dtype=torch.int64, device="cpu")  # of the rows held, ascending
        super()._allocate(device, dtype)
        self.capacity = capacity

    def reset(self) -> None:
        """Remove all rows."""
        super().reset()
        self._steps.clear()
        self._start, self._gathered, self._loaded = 0, None, 0
        self._trace = 0  # hash of the marks of all calls since the last reset, equal on the ranks of one training

    @property
    def num_held(self) -> int:
        """The number of rows that all ranks hold together."""
        return min(self._num_enqueued, self.capacity)

    @property
    def checksum(self) -> Tensor:
        """A hash of what was loaded, 0 without: no replica could differ but by a load of different checkpoints."""
        return torch.tensor(self._loaded, dtype=torch.int64, device="cpu")

    @property
    def position(self) -> tuple[int, int, int, bool]:
        """The state that must be equal on all ranks: ranks, rows held, rows so far, weighted."""
        return self._place[1] if self._num_enqueued else 0, self.num_held, self._num_enqueued, self._has_weights

    @property
    def has_weights(self) -> bool:
        """True from the first weighted rows of any rank on."""
        return self._has_weights

    def rows(self) -> QueueRows:
        """Return this rank's rows, as views, oldest first."""
        held = slice(self._start, self._start + self._fill)
        weight = self._weight[held] if self._has_weights else None
        return QueueRows(self._logits[held], self._targets[held], self._iid[held], weight)

    def count(self, logits: Tensor, targets: Tensor) -> int:
        """Return how many of the rows would be stored."""
        return int(self.wanted(logits.detach(), targets).sum()) if self.capacity else 0

    @torch.inference_mode(False)
    def take_place(self, rank: int, world_size: int) -> None:
        """Keep the part of this rank of rows that were loaded for any number of ranks.

        Raises:
            ValueError: when the rows are the part of another place.
        """
        if self._place == (rank, world_size):
            return
        if not self._num_enqueued:
            self._place, self._gathered = (rank, world_size), None
            self._steps.clear()
            return
        if self._place != (0, 1) or self._gathered is None:
            raise _elsewhere(self._place, (rank, world_size))
        total, least = self.num_held, self._num_enqueued - self.num_held
        if self._gathered.get("world_size") == world_size:  # each rank has its own rows again, so sums round as before
            self._steps = _steps_of(self._gathered)
        else:
            counts = tuple(total * (r + 1) // world_size - total * r // world_size for r in range(world_size))
            self._steps = deque([_Step(least, counts)])
        self._place, self._gathered = (rank, world_size), None
        self._numbers = _runs(*(held[rank] for held in self._held())).cpu()
        for name in _COLUMNS[:-1]:
            whole = getattr(self, name)  # oldest row first
            setattr(self, name, whole[(self._numbers - least).to(whole.device)])
        if rank > 0:
            self._checksum = torch.zeros_like(self._checksum)  # the parts of all ranks add up to that of the queue
        self._start, self._fill = 0, len(self._numbers)

    def take_whole(self, call: str) -> None:
        """Be the queue of one process.

        Raises:
            RuntimeError: when the rows are this rank's part of those of several ranks.
        """
        if self._num_enqueued and self._place[1] > 1:
            fix = "Validate with pool='gathered', with queue_size=0, or on every rank; or call reset_queue()."
            held = Words(f"the queued rows of one rank of {self._place[1]}")
            raise RuntimeError(expected(f"{call}, called by one rank alone", "an empty queue", held, fix))
        if self._place[1] > 1:
            self.take_place(0, 1)

    @torch.inference_mode(False)
    @torch.no_grad()
    def enqueue(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        sample_weight: Tensor | None = None,
        counts: Sequence[int] | None = None,
        *,
        num_rows: int | None = None,
        mark: Sequence[float] = (),
        num_stored: int | None = None,
    ) -> None:
        """Store this rank's rows, and forget those that are no longer among the last of all ranks.

        Args:
            logits, targets, iid_mask, sample_weight: see :meth:`MemoryQueue.enqueue`.
            counts: how many rows every rank stores in this call, see :meth:`count`; None if there is one rank.
            num_rows: how many rows all ranks give, stored or not; None for those of this rank and of ``counts``.
            mark: numbers of this call that all ranks know and that another training would not have.
            num_stored: not needed.
        """
        num_rows = max(logits.shape[0], sum(counts or ())) if num_rows is None else num_rows
        if self.capacity == 0 or num_rows == 0:
            return
        self._gathered = None
        self._trace = digest({"before": str(self._trace), "mark": repr(tuple(mark))})
        wanted = self.wanted(logits, targets)
        iid_mask = wanted.new_ones(wanted.shape) if iid_mask is None else iid_mask
        weight = logits.new_ones(wanted.shape) if sample_weight is None else sample_weight
        rows = [new[wanted] for new in self._as_stored(logits, targets, iid_mask, weight) if new is not None]
        step = _Step(self._num_enqueued, (rows[0].shape[0],) if counts is None else tuple(counts))
        rank = self._place[0]
        self._num_enqueued = first = step.first + sum(step.counts[:rank])
        self._checksum = self._checksum + self._hash(*on_host(rows))
        self._num_enqueued = step.first
        self._has_weights |= sample_weight is not None
        if step.end == step.first:
            return
        limit, dropped = step.end - self.capacity, 0  # the least number of a row that stays
        while self._steps:
            oldest = self._steps[0]
            dropped += oldest.held(rank, self._limit) - oldest.held(rank, limit)
            if oldest.end > limit:
                break
            self._steps.popleft()
        self._start += dropped
        self._fill -= dropped
        self._num_enqueued = step.end
        self._steps.append(step)
        rows.append(torch.arange(first, first + rows[0].shape[0], device="cpu"))
        held = step.held(rank, self._limit)  # all of this rank's rows, or the last of them
        self._append([new[len(new) - held :] for new in rows])

    @property
    def _limit(self) -> int:
        """The least number of a row that is held."""
        return self._num_enqueued - self.capacity

    def _append(self, rows: list[Tensor]) -> None:
        count, end = rows[0].shape[0], self._start + self._fill
        if end + count > self._logits.shape[0]:
            size = max(self._logits.shape[0], 2 * (self._fill + count))
            for name in _COLUMNS:
                old = getattr(self, name)
                new = old.new_empty(size, *old.shape[1:])
                new[: self._fill] = old[self._start : end]
                setattr(self, name, new)
            self._start, end = 0, self._fill
        for name, new in zip(_COLUMNS, rows):
            getattr(self, name)[end : end + count] = new
        self._fill += count

    def _held(self) -> tuple[Tensor, Tensor]:
        """Return the first number and the number of rows that each rank holds of each step, (W, S) int64."""
        world_size = self._place[1]
        first = torch.tensor([step.first for step in self._steps], dtype=torch.int64)
        counts = torch.tensor([step.counts for step in self._steps], dtype=torch.int64).view(-1, world_size).t()
        end = first + counts.cumsum(dim=0)  # [W, S]
        begin = (end - counts).clamp_min(self._limit)
        return begin, (end - begin).clamp_min(0)

    def places(self) -> Tensor:
        """Return (rows,) int64: where a :class:`MemoryQueue` has this rank's rows."""
        return self._numbers[self._start : self._start + self._fill] % max(1, self.capacity)

    def find(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return at which of ``places`` (n,) a :class:`MemoryQueue` has a row of this rank, and these rows; (m,) int64.

        Equal to looking each place up in :meth:`places`, in O(n log rows).
        """
        held, device, places = self._numbers[self._start : self._start + self._fill], places.device, places.cpu()
        if not self._fill:
            return held.to(device), held.to(device)
        least = max(0, self._limit)
        number = least + (places - least) % self.capacity  # the only one with this place that any rank holds
        row = torch.searchsorted(held, number).clamp_max(self._fill - 1)
        found = ((held[row] == number) & (places >= 0)).nonzero()[:, 0]
        return found.to(device), row[found].to(device)

    def whole(self, exchange: Exchange) -> QueueRows:
        """Return the rows of all ranks, in the order of a :class:`MemoryQueue`; a collective."""
        begin, count = self._held()
        own, counts = self.rows(), count.sum(dim=1).tolist()
        gathered = exchange.rows([tensor for tensor in own if tensor is not None], counts)
        numbers = _runs(begin.flatten(), count.flatten())
        order = (numbers % max(1, self.capacity)).argsort().to(own.logits.device)
        logits, targets, iid, *weight = (tensor[order] for tensor in gathered)
        return QueueRows(logits, targets, iid, weight[0] if weight else None)

    @not_compiled
    def assert_synchronized(self, group: Group = None) -> None:
        """Compare how many rows each rank holds. No two ranks hold the same row, so there are no contents to compare.

        Raises:
            RuntimeError: on every rank, with the ranks that differ.
        """
        if not is_initialized():
            return
        agree_on("ShardedQueue.assert_synchronized", resolve_group(group), lambda: Offer(None, {"queue": self._state}))

    @property
    def _state(self) -> State:
        """What must be equal on all ranks before one reads how many rows the others hold."""
        held = [[step.first, *step.counts] for step in self._steps]
        return State((self.capacity, self.position, held, self._trace, self._loaded), SAME_QUEUE)

    @torch.no_grad()
    def gather(self, group: ProcessGroup | None) -> None:
        """Let the next ``state_dict`` hold the rows of all ranks; every rank must call it.

        Args:
            group: the ranks over which the loss is pooled; None if this process is alone.

        Raises:
            RuntimeError: on every rank, when a rank makes another call or its queue is in another state; on this rank
                if it is alone and holds its part of the rows of several ranks.
            ValueError: on every rank, when the rows of one are the part of another place.
        """
        if group is None:
            if self._num_enqueued and self._place[1] > 1:
                fix = "Call it on every rank, in the process group of the training, with gather_distributed=None."
                held = Words(f"rank {self._place[0]} of {self._place[1]} alone")
                raise RuntimeError(expected("gather_queue", "a call on all ranks of the queue", held, fix))
            return

        def bring() -> Offer[None]:
            self.take_place(group.rank(), group.size())
            return Offer(None, {"queue": self._state})

        agree_on("gather_queue", group, bring)
        if not self._num_enqueued:
            return
        exchange = Exchange("gather_queue", group)
        checksum = exchange.sum(self._checksum.clone().reshape(1), "the checksums of the queue")[0]
        self._gathered = self._state_of(self.whole(exchange), checksum) | self._owners()

    def _state_of(self, rows: QueueRows, checksum: Tensor) -> dict[str, Any]:
        """Return the state of a :class:`MemoryQueue` with ``rows``, in its order."""
        twin = MemoryQueue(self.capacity, self.num_classes, self.ignore_index, keep=self.keep, multi_hot=self.multi_hot)
        twin._allocate(rows.logits.device, rows.logits.dtype)
        twin._fill = rows.logits.shape[0]
        for name, values in zip(("_logits", "_targets", "_iid", "_weight"), rows):
            if values is not None:
                getattr(twin, name)[: twin._fill] = values
        twin._pointer = self._num_enqueued % self.capacity if self.capacity else 0
        twin._num_enqueued, twin._has_weights, twin._checksum = self._num_enqueued, self._has_weights, checksum
        return twin.get_extra_state()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the rows of all ranks after :meth:`gather` or with one rank, else this rank's; never communicates."""
        if self._gathered is not None:
            return dict(self._gathered)
        rows = self.rows()
        if self._place[1] == 1 or not self._num_enqueued:
            order = self.places().argsort().to(rows.logits.device)
            logits, targets, iid, weight = rows
            weight = None if weight is None else weight[order]
            return self._state_of(QueueRows(logits[order], targets[order], iid[order], weight), self._checksum.clone())
        state = super().get_extra_state()
        if not self.is_gathered_later:
            what = f"the queued rows of rank {self._place[0]} of {self._place[1]}, and load there alone"
            warn(f"A state_dict of a sharded queue has only {what}. {GATHER_FIRST}")
        columns = ("logits", "targets", "iid_mask", "sample_weight")
        held = {name: state[name][self._start : self._start + self._fill] for name in columns}
        return state | held | self._owners() | {"rank": self._place[0], "trace": self._trace}

    def _owners(self) -> dict[str, Any]:
        """Return what says which rank holds which rows."""
        steps = [[step.first, *step.counts] for step in self._steps]
        return {"world_size": self._place[1], "steps": steps}

    def check_saved(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError when ``state`` belongs to a queue with other arguments."""
        super().check_saved({name: value for name, value in state.items() if name != "rank"})

    def check_place(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Raise ValueError when ``state`` holds the rows of another rank, or of one of another number of ranks."""
        saved = int(state["rank"]), int(state["world_size"])
        if state["num_enqueued"] and saved != (rank, world_size):
            raise _elsewhere(saved, (rank, world_size))

    @torch.inference_mode(False)
    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of this class or of a :class:`MemoryQueue`, on this queue's device."""
        super().set_extra_state(state)
        self._start = 0
        if "rank" in state:
            self._gathered, self._place = None, (int(state["rank"]), int(state["world_size"]))
            self._steps = _steps_of(state)
            self._trace = int(state["trace"])
            self._numbers = _runs(*(held[self._place[0]] for held in self._held())).cpu()
            # What every rank of one checkpoint knows. Another training may have had as many rows in every step.
            self._loaded = digest({"steps": repr(list(self._steps)), "trace": str(self._trace)})
            return
        self._loaded = self._trace = int(state["checksum"])
        fill, pointer = self._fill, self._pointer
        if fill == self.capacity:  # the oldest row is where the next one would go
            for name in ("_logits", "_targets", "_iid", "_weight"):
                setattr(self, name, getattr(self, name).roll(-pointer, 0))
        self._place, self._steps = (0, 1), deque([_Step(self._num_enqueued - fill, (fill,))])
        self._gathered = dict(state)
        self._numbers = torch.arange(len(self._logits), device="cpu") + (self._num_enqueued - fill)


def _steps_of(state: Mapping[str, Any]) -> deque[_Step]:
    return deque(_Step(int(first), tuple(map(int, counts))) for first, *counts in state["steps"])


def _runs(first: Tensor, count: Tensor) -> Tensor:
    """Return ``count`` (S,) numbers from each of ``first`` (S,) on, one run after the other."""
    within = torch.arange(int(count.sum())) - (count.cumsum(0) - count).repeat_interleave(count)
    return first.repeat_interleave(count) + within


def _elsewhere(held: tuple[int, int], place: tuple[int, int]) -> ValueError:
    found = Words(f"those of rank {held[0]} of {held[1]}")
    return ValueError(expected("queue", f"the rows of rank {place[0]} of {place[1]}", found, GATHER_FIRST))
