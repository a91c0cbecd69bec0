"""A ring buffer of past rows, with the same bits on every rank."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy
import torch
from torch import Tensor

from ..distributed.group import UNDO, Group, is_initialized, resolve_group
from ..distributed.header import Offer, State, agree_on
from ..distributed.torch_private import not_compiled
from ..errors import Words, check_choice, check_count, check_int, expected
from .saved_state import ARGUMENTS, NUMBERS, ROWS, SavedState, as_saved, from_saved

Keep = Literal["all", "negatives"]

SAME_QUEUE = "Load the same checkpoint, or call reset_queue(), on every rank."

# Odd multipliers of a 64-bit multiplicative hash (the golden ratio, and two primes of xxHash), as signed integers.
_MIX = (-7046029254386353131, -4417276706812531889, 1609587929392839161)

_EMPTY = "To start with an empty queue, remove the keys that contain 'queue.' and load with strict=False."


def multi_hot_dtype(ignore_index: int) -> torch.dtype:
    """Return the dtype of multi-hot targets: int8 where ``ignore_index`` fits, as the default of -100 does."""
    return torch.int8 if -128 <= ignore_index <= 127 else torch.int64


class QueueRows(NamedTuple):
    """The rows of a queue, in storage order. ``sample_weight`` is None until weighted rows have been enqueued."""

    logits: Tensor  # [len, C]
    targets: Tensor  # [len], or [len, C] multi-hot
    iid_mask: Tensor  # [len]
    sample_weight: Tensor | None  # [len]


class _Ring(NamedTuple):
    """The memory of the rows: as :class:`QueueRows`, with weights in any case."""

    logits: Tensor
    targets: Tensor
    iid_mask: Tensor
    sample_weight: Tensor


class MemoryQueue(SavedState):
    """A ring buffer of rows: logits, targets, iid flags and sample weights.

    Every rank enqueues the gathered rows of a step, so every rank holds the same queue. The tensors are not buffers,
    because DDP broadcasts buffers at every forward and ``.bfloat16()`` would round them. They follow the module's
    device, and are float32, or float64 after float64 rows were enqueued. ``state_dict`` contains copies of them.

    Args:
        capacity: number of rows >= 0; a queue of 0 stores nothing. A row takes ``4 * num_classes + 21`` bytes.
        num_classes: columns of the logits, such as the width of embeddings; 1 is binary. With None the first rows that
            are enqueued or loaded determine it.
        ignore_index: rows with this target never enter.
        keep: ``"all"`` rows, or ``"negatives"``, the rows that are a negative of at least one class.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index`` instead of (N,) class indices.

    Raises:
        ValueError: for a negative capacity, ``num_classes`` below 1, or an unknown ``keep``.

    Example:
        >>> import torch
        >>> queue = MemoryQueue(capacity=3, num_classes=1)
        >>> queue.enqueue(torch.tensor([[0.1], [0.2], [float("nan")]]), torch.tensor([0, 1, 0]))
        >>> len(queue), queue.rows().targets.tolist()
        (2, [0, 1])

    Reference:
        He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020.
    """

    _saved_names = (*(f"saved_{name}" for name in ROWS), "saved_numbers")

    def __init__(
        self,
        capacity: int,
        num_classes: int | None,
        ignore_index: int = -100,
        *,
        keep: Keep = "all",
        multi_hot: bool = False,
    ) -> None:
        super().__init__()
        check_count("capacity", capacity, 0)
        self._any_width = num_classes is None
        if num_classes is not None:
            check_count("num_classes", num_classes, 1)
        check_int("ignore_index", ignore_index)
        check_choice("keep", keep, ("all", "negatives"))
        self.capacity, self.num_classes, self.ignore_index = capacity, num_classes, ignore_index
        self.keep, self.multi_hot = keep, multi_hot
        self._allocate(torch.empty(0).device)

    @torch.inference_mode(False)
    def _allocate(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        rows, columns = self.capacity, self.num_classes or 0
        shape = (rows, columns) if self.multi_hot else (rows,)
        kind = multi_hot_dtype(self.ignore_index) if self.multi_hot else torch.int64
        self._ring = _Ring(
            torch.zeros(rows, columns, dtype=dtype, device=device),
            torch.zeros(shape, dtype=kind, device=device),
            torch.ones(rows, dtype=torch.bool, device=device),
            torch.ones(rows, dtype=dtype, device=device),  # in float64 from the first such weights on
        )
        self._written: set[int] = set()  # indices of the tensors written so far; the last two are all ones before
        self.reset()

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Remove all rows."""
        self._fill = self._pointer = self._num_enqueued = self._num_hashed = 0
        self._has_weights = False
        # Of the rows in the ring, those of the first _num_hashed; the others follow when the checksum is read.
        self._hashes = torch.zeros(self.capacity, dtype=torch.int64, device=self._ring.logits.device)

    def __len__(self) -> int:
        """Return the number of rows held, at most ``capacity``."""
        return self._fill

    @property
    def checksum(self) -> Tensor:
        """64-bit hash of the rows held and of their numbers since the last reset; an int64 scalar."""
        if self._hashes.is_meta:  # the queue is empty, and will move to the device of its first rows
            return torch.zeros((), dtype=torch.int64, device="cpu")
        number, undo = min(self._num_enqueued - self._num_hashed, self.capacity), UNDO.get()
        start, end = self._pointer - number, self._pointer
        places = [slice(start, end)] if start >= 0 else [slice(start, None), slice(end)]  # from the end of the ring on
        if number:
            join: Any = numpy.concatenate if self._hashes.is_cpu else torch.concatenate
            rows = []
            for stored in self._memory():
                pieces = [] if stored is None else [stored[place] for place in places]
                rows.append(join(pieces) if len(pieces) > 1 else pieces[0] if pieces else None)
            new = self._hash(self._num_enqueued - number, *rows)
            hashes: Any = self._hashes.numpy() if self._hashes.is_cpu else self._hashes
            for place in places:
                if undo is not None:
                    undo.callback(self._hashes.__setitem__, place, self._hashes[place].clone())
                count = len(hashes[place])
                hashes[place], new = new[:count], new[count:]
        vars(self)["_num_hashed"] = self._num_enqueued
        return self._hashes.sum()

    @property
    def position(self) -> tuple[int, int, int, bool]:
        """The state other than the checksum that must be equal on all ranks: pointer, length, rows so far, weighted."""
        return self._pointer, self._fill, self._num_enqueued, self._has_weights

    def rows(self) -> QueueRows:
        """Return the rows as views, in storage order: oldest first until the ring has wrapped around."""
        rows = [tensor[: self._fill] for tensor in self._ring] if self._fill < self.capacity else self._ring
        logits, targets, iid, weight = rows
        return QueueRows(logits, targets, iid, weight if self._has_weights else None)

    def enqueue(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        sample_weight: Tensor | None = None,
        *,
        num_stored: int | None = None,
    ) -> None:
        """Store rows in place of the oldest ones, except rows with a non-finite logit or an ignored target.

        Two calls with the halves of a batch leave the same queue as one call. Cost: O(rows of the batch).

        Args:
            logits: (N, C), stored detached.
            targets: (N,) class indices, or (N, C) with ``multi_hot``. ValueError for shapes that do not fit.
            iid_mask: (N,) bool, None for all True.
            sample_weight: (N,), None for all 1.
            num_stored: the number of rows that :meth:`wanted` marks; with None the host waits for the device to count.
        """
        if not logits.is_floating_point():
            raise TypeError(expected("logits", "a floating-point tensor", logits))
        if targets.is_floating_point():
            raise TypeError(expected("targets", "integers or bools", targets))
        if logits.ndim != 2 or logits.shape[1] != (self.num_classes or logits.shape[1]):
            raise ValueError(expected("logits", f"shape (N, {self.num_classes or 'columns'})", logits))
        count = logits.shape[0]
        shape = tuple(logits.shape) if self.multi_hot else (count,)
        if targets.shape != shape:
            raise ValueError(expected("targets", f"shape {shape}", targets))
        for name, value in (("iid_mask", iid_mask), ("sample_weight", sample_weight)):
            if value is not None and value.shape != (count,):
                raise ValueError(expected(name, f"shape ({count},)", value))
        if self.capacity == 0 or count == 0:
            return
        undo = UNDO.get()
        if undo is not None:
            undo.callback(vars(self).update, dict(vars(self)))
        if self.num_classes is None:
            self.num_classes = logits.shape[1]
            self._allocate(logits.device, self._ring.logits.dtype)
        rows = self._as_stored(logits, targets, iid_mask, sample_weight)
        if num_stored is None or num_stored < count:
            index = self.wanted(*rows[:2])
            if not logits.is_cpu and num_stored is None:
                index = index.nonzero()[:, 0]
            elif not logits.is_cpu:  # the same indices, without waiting for the device
                index = index.view(torch.uint8).argsort(stable=True, descending=True)[:num_stored]
            if not logits.is_cpu or numpy.count_nonzero(index) < count:
                rows = [None if new is None else new[index] for new in rows]
        count = len(rows[0])
        ring = self._memory(rows)
        num_passed = max(0, count - self.capacity)  # rows that others of the same call replace
        if num_passed:
            rows = [None if new is None else new[num_passed:] for new in rows]
        start, number = (self._pointer + num_passed) % self.capacity, count - num_passed
        head = min(number, self.capacity - start)  # what is beyond the head goes to the start
        pieces = [(slice(start, start + head), slice(head)), (slice(number - head), slice(head, None))]
        copies: list[tuple[Tensor, Tensor]] = []
        for stored, memory, new in zip(self._ring, ring, rows):
            if memory is None:
                continue  # it holds the default everywhere
            for there, here in pieces[: 1 + (head < number)]:
                if undo is not None:
                    undo.callback(stored.__setitem__, there, stored[there].clone())
                if new is None or stored.is_cpu:
                    memory[there] = 1 if new is None else new[here]
                else:
                    copies.append((memory[there], new[here]))
        if copies:
            torch._foreach_copy_([old for old, _ in copies], [new for _, new in copies])
        vars(self).update(  # because setting an attribute of a module takes as long as an operator
            _pointer=(self._pointer + count) % self.capacity,
            _fill=min(self._fill + count, self.capacity),
            _num_enqueued=self._num_enqueued + count,
            _has_weights=self._has_weights or sample_weight is not None,
        )

    def _as_stored(
        self, logits: Tensor, targets: Tensor, iid_mask: Tensor | None, sample_weight: Tensor | None
    ) -> list[Any]:
        """Move the queue to where the rows are; return them in its dtypes, on the CPU as arrays, which are faster."""
        device, wide = logits.device, torch.float64
        if self._ring.logits.is_meta:
            self._allocate(device, self._ring.logits.dtype)  # nothing was stored on the meta device
        ring = self._ring
        dtype = wide if logits.dtype == wide else ring.logits.dtype
        is_wide = sample_weight is not None and sample_weight.dtype == wide
        weight_dtype = wide if is_wide else ring.sample_weight.dtype
        if (device, dtype, weight_dtype) != (ring.logits.device, ring.logits.dtype, ring.sample_weight.dtype):
            self._move_to(device, dtype, weight_dtype)
        rows: list[Any] = [logits, targets, iid_mask, sample_weight]
        for place, (new, stored) in enumerate(zip(rows, self._ring)):
            if new is not None and (new.device, new.dtype) != (stored.device, stored.dtype):
                rows[place] = new.detach().to(stored)
        return [new if new is None else new.numpy(force=True) if new.is_cpu else new.detach() for new in rows]

    def wanted(self, logits: Any, targets: Any) -> Any:
        """Return (N,) bool: the rows that :meth:`enqueue` would store. Takes tensors or arrays."""
        is_out = targets == self.ignore_index
        if self.keep == "negatives" and (self.multi_hot or self.num_classes == 1):
            is_out = is_out | (targets != 0)
        is_out = is_out.all(1) if self.multi_hot else is_out
        if logits.shape[1] > 1:
            is_finite = (torch if isinstance(logits, Tensor) else numpy).isfinite(logits).all(1)
            return is_finite & ~is_out
        # A finite number minus itself is 0, another one NaN: few kernels. numpy would warn of it.
        return (
            (logits - logits)[:, 0] == is_out if isinstance(logits, Tensor) else numpy.isfinite(logits)[:, 0] > is_out
        )

    def _memory(self, written: Iterable[Any] = ()) -> list[Any]:
        """Return the ring, on the CPU as arrays, None for a tensor of ones. What is ``written`` is one no longer."""
        used, ring, memory = self._written, self._ring, list[Any]()
        for place, new in enumerate(written):
            if new is not None:
                used.add(place)
        is_host = ring.logits.is_cpu
        for place, rows in enumerate(ring):
            memory.append(None if place not in used else rows.numpy() if is_host else rows)
        return memory

    @torch.inference_mode(False)
    def _hash(self, first: int, logits: Any, targets: Any, iid: Any, weight: Any) -> Any:
        """Return the hashes (count,) of rows, of which the first has the number ``first``; None stands for ones.

        The hash of a row is the sum of the mixed bits of all its numbers, each times a factor of its column, times a
        factor of the row, modulo 2**64, and the checksum is the sum over the rows. The factor of a row is mixed from
        its number, so the order of the rows matters. Without mixing the bits of the numbers, two flipped signs could
        cancel, because each adds 2**63 times a factor. Tensors and arrays give the same hash.
        """
        (count, columns), library = logits.shape, torch if isinstance(logits, Tensor) else numpy
        options: dict[str, Any] = {"dtype": library.int64, **({"device": logits.device} if library is torch else {})}
        bits = library.int64 if logits.dtype == library.float64 else library.int32
        width = columns + (columns if self.multi_hot else 1)
        if weight is not None:
            with numpy.errstate(over="ignore"):
                weight = (weight.astype if library is numpy else weight.to)(logits.dtype).view(bits)
        extra = {width: weight, width + 1: iid}
        present = tuple([place for place, values in extra.items() if values is not None])
        # One buffer for the numbers that are mixed, of each row, and last its sequence number: fewer kernels.
        words = library.empty((width + len(present) + 1, count), **options)
        words[:columns] = logits.view(bits).T
        words[columns:width] = targets.T if self.multi_hot else targets
        for row, place in enumerate(present, start=width):
            words[row] = extra[place]
        start = first + _MIX[2]
        if library is numpy:
            words[-1] = numpy.arange(start, start + count)
        else:
            torch.arange(start, start + count, out=words[-1])
        for factor in _MIX[:2]:
            words *= factor
            words ^= words >> 32
        one = 1023 << 52 if bits is library.int64 else 127 << 23  # the bits of the number
        factors, constant = _column_factors(width + 2, present, one, None if library is numpy else logits.device)
        return ((words[:-1] * factors).sum(0) + constant) * (words[-1] | 1)

    @not_compiled
    def assert_synchronized(self, group: Group = None) -> None:
        """Compare the contents over the ranks, bit for bit; RuntimeError on every rank names those that differ."""
        if not is_initialized():
            return
        resolved = resolve_group(group)

        def bring() -> Offer[None]:
            summary = f"{self._fill} rows with contents {_digest(self.position, self.rows(), None)}"
            return Offer(None, {"queue": State(summary, SAME_QUEUE)})

        agree_on("MemoryQueue.assert_synchronized", resolved, bring)

    @torch.inference_mode(False)
    def _move_to(self, device: torch.device, *dtypes: torch.dtype) -> None:
        logits, targets, iid, weight = [tensor.to(device) for tensor in self._ring]
        dtype, weight_dtype = dtypes or (logits.dtype, weight.dtype)
        self._ring = _Ring(logits.to(dtype), targets, iid, weight.to(weight_dtype))
        self._hashes, self._num_hashed = self._hashes.to(device), self._num_enqueued - self._fill

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MemoryQueue:
        # Only the device of the conversion applies, because to(bfloat16) must not round the stored rows.
        super()._apply(fn, recurse)
        old, device = self._ring.logits, fn(self._ring.logits[:0]).device
        if device != old.device and old.is_meta:
            self._allocate(device, old.dtype)  # nothing was stored on the meta device
        elif device != old.device:
            self._move_to(device)
        return self

    def _saved(self) -> dict[str, Tensor]:
        if self.capacity == 0:
            return {}
        contents = _digest(self.position, self.rows(), self.checksum)
        arguments = self.capacity, self.num_classes or 0, self.keep == "negatives", self.multi_hot, self.ignore_index
        position = self._num_enqueued, self._fill, self._pointer, self._has_weights
        logits, targets, iid, weight = self._ring
        numbers = *arguments, *position, logits.dtype == torch.float64, int(self.checksum), contents
        return {
            # Always float64, which represents float32 exactly: torch.distributed.checkpoint loads into the dtype of the
            # module's state, and a new queue is float32.
            "saved_logits": logits.to(torch.float64, copy=True),
            "saved_targets": targets.clone(),
            "saved_iid_mask": iid.clone(),
            "saved_sample_weight": weight.to(torch.float64, copy=True),
            "saved_numbers": as_saved([*map(int, numbers)]).to("cpu" if logits.is_meta else logits.device),
        }

    @torch.inference_mode(False)
    def _read_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if not state:
            return {}
        missing = next((name for name in self._saved_names if name not in state), None)
        if missing is not None:
            fix = f"The state is damaged. {_EMPTY}"
            raise ValueError(expected("the saved queue", repr(missing), Words("a state without it"), fix))
        saved = dict(zip(NUMBERS, from_saved(state, "numbers", (len(NUMBERS),))))
        columns, has_weights = saved["num_classes"], bool(saved["has_weights"])
        saved |= {"num_classes": columns or None, "multi_hot": bool(saved["multi_hot"])}
        saved["keep"] = "negatives" if saved["keep"] else "all"
        for name in ARGUMENTS:
            if saved[name] != getattr(self, name) and not (name == "num_classes" and self._any_width):
                of_loss = {"capacity": " (queue_size of a loss)", "keep": " (queue_keep of a loss)"}.get(name, "")
                fix = f"Construct it with {name}={saved[name]!r}{of_loss}. {_EMPTY}"
                raise ValueError(expected(f"{name} of the saved queue", repr(getattr(self, name)), saved[name], fix))

        capacity, enqueued, fill, pointer = (saved[name] for name in ("capacity", "num_enqueued", "fill", "pointer"))
        # The next row goes to the end until the ring is full.
        places = range(max(1, capacity)) if fill == capacity else range(fill, fill + 1)
        ranges = {"num_enqueued": range(2**63), "fill": range(min(capacity, enqueued) + 1), "pointer": places}
        for name, ints in ranges.items():
            _require(saved[name] in ints, name, f"an int in [{ints.start}, {ints.stop - 1}]", saved[name])
        shapes = {"logits": (capacity, columns), "targets": (capacity, columns) if self.multi_hot else (capacity,)}
        rows = [state[f"saved_{name}"] for name in ROWS]
        for name, tensor in zip(ROWS, rows):
            shape = shapes.get(name, (capacity,))
            _require(getattr(tensor, "shape", None) == shape, name, f"a tensor of shape {shape}", tensor)
        dtype = torch.float64 if saved["is_double"] else torch.float32
        dtypes = dtype, self._ring.targets.dtype, torch.bool, torch.float64 if has_weights else dtype
        device = rows[0].device if self._ring.logits.is_meta else self._ring.logits.device
        ring = _Ring(*[tensor.to(device, kind, copy=True).contiguous() for tensor, kind in zip(rows, dtypes)])
        if not ring.logits.is_meta:
            logits, targets, iid, weight = [tensor[:fill] for tensor in ring]
            infinite = Words("others, which never enter a queue")
            _require(bool(logits.isfinite().all()), "logits", "finite numbers", infinite)
            held = QueueRows(logits, targets, iid, weight if has_weights else None)
            found = _digest((pointer, fill, enqueued, has_weights), held, saved["checksum"])
            _require(found == saved["contents"], "hash", repr(saved["contents"]), found)
        read = {"_ring": ring, "_written": {0, 1, 2, 3}, "num_classes": saved["num_classes"]}
        read["_hashes"] = torch.zeros(capacity, dtype=torch.int64, device=device)
        numbers = {"_fill": fill, "_pointer": pointer, "_num_enqueued": enqueued, "_num_hashed": enqueued - fill}
        return {**read, **numbers, "_has_weights": has_weights}

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}, num_classes={self.num_classes}, keep={self.keep!r}, fill={self._fill}"


def _require(is_right: bool, name: str, what: str, value: object) -> None:
    if not is_right:
        fix = f"The state is damaged, or was changed: load another. {_EMPTY}"
        raise ValueError(expected(f"{name} of the saved queue", what, value, fix))


def _digest(position: tuple[int, int, int, bool], rows: QueueRows, checksum: Tensor | int | None) -> int:
    """Return a hash of the position, of all bits of the rows, and of the checksum."""
    words = position if checksum is None else (*position, int(checksum))
    contents = hashlib.blake2b(repr(words).encode(), digest_size=8)
    weight = None if rows.sample_weight is None else rows.sample_weight.double()  # as in a state
    for tensor in (*rows[:-1], weight) if len(rows.logits) else ():
        if tensor is not None:
            contents.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return int(contents.hexdigest(), 16) - 2**63


def _mix_bits(words: Any) -> Any:
    """Mix the 64 bits of each of ``words``, int64 of torch or numpy, in place by products and shifts; return them."""
    for factor in _MIX[:2]:
        words *= factor
        words ^= words >> 32
    return words


@functools.lru_cache(maxsize=32)
def _column_factors(width: int, present: tuple[int, ...], one: int, device: torch.device | None) -> tuple[Any, int]:
    """Return the factors (columns, 1) in :meth:`MemoryQueue._hash`, odd, and what the absent columns add to each row.

    The last two of ``width`` columns are the weight, whose bits are ``one``, and the mask. Those of them that are
    ``present`` are given. The factors are an array without a device.
    """
    factors = _mix_bits(numpy.arange(-width, 0) + _MIX[2]) | 1
    of_ones = _mix_bits(numpy.array([one, 1])) * factors[-2:]
    constant = int(of_ones[[place not in present for place in (width - 2, width - 1)]].sum())
    columns = factors[[*range(width - 2), *present], None]
    # The copy blocks, so that any stream can use it.
    return (columns if device is None else torch.from_numpy(columns).to(device)), constant
