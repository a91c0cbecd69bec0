"""A ring buffer of past rows, with the same bits on every rank."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
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


class MemoryQueue(SavedState):
    """A ring buffer of rows: logits, targets, iid flags and sample weights.

    Every rank enqueues the gathered rows of a step, so every rank holds the same queue. The tensors are not buffers,
    because DDP broadcasts buffers at every forward and ``.bfloat16()`` would round them. They have a fixed shape. They
    follow the module's device, but not its dtype, which is float32, or float64 after float64 rows were enqueued.
    ``state_dict`` contains copies of them; that of a queue of 0 rows is empty.

    Args:
        capacity: number of rows >= 0; a queue of 0 stores nothing. A row takes ``4 * num_classes + 13`` bytes.
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
        self._logits = torch.zeros(rows, columns, dtype=dtype, device=device)
        if self.multi_hot:
            self._targets = torch.zeros(rows, columns, dtype=multi_hot_dtype(self.ignore_index), device=device)
        else:
            self._targets = torch.zeros(rows, dtype=torch.int64, device=device)
        self._iid = torch.ones(rows, dtype=torch.bool, device=device)
        self._weight = torch.ones(rows, dtype=dtype, device=device)  # in float64 from the first such weights on
        self._written: set[int] = set()  # indices of the tensors written so far; the last two are all ones before
        self.reset()

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Remove all rows."""
        self._fill = self._pointer = self._num_enqueued = 0
        self._has_weights = False
        self._checksum = torch.zeros((), dtype=torch.int64, device=self._logits.device)

    def __len__(self) -> int:
        """Return the number of rows held, at most ``capacity``."""
        return self._fill

    @property
    def checksum(self) -> Tensor:
        """Rolling 64-bit hash of every row enqueued since the last reset, in order; an int64 scalar."""
        if self._checksum.is_meta:  # the queue is empty, and will move to the device of its first rows
            return torch.zeros((), dtype=torch.int64, device="cpu")
        return self._checksum

    @property
    def position(self) -> tuple[int, int, int, bool]:
        """The state other than the checksum that must be equal on all ranks: pointer, length, rows so far, weighted."""
        return self._pointer, self._fill, self._num_enqueued, self._has_weights

    def rows(self) -> QueueRows:
        """Return the rows as views, in storage order: oldest first until the ring has wrapped around."""
        rows = self._logits, self._targets, self._iid, self._weight
        logits, targets, iid, weight = [tensor[: self._fill] for tensor in rows] if self._fill < self.capacity else rows
        return QueueRows(logits, targets, iid, weight if self._has_weights else None)

    @torch.inference_mode(False)
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
            targets: (N,) class indices, or (N, C) with ``multi_hot``.
            iid_mask: (N,) bool, None for all True.
            sample_weight: (N,), None for all 1.
            num_stored: the number of rows that :meth:`wanted` marks, if the host knows it. With None the host waits for
                the device to count them.

        Raises:
            ValueError: when shapes do not fit.
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
            self._allocate(logits.device, self._logits.dtype)
        rows = on_host(self._as_stored(logits, targets, iid_mask, sample_weight))
        if num_stored is None or num_stored < count:
            index = self.wanted(*rows[:2])
            if not logits.is_cpu and num_stored is None:
                index = index.nonzero()[:, 0]
            elif not logits.is_cpu:  # the same indices, without waiting for the device
                index = index.view(torch.uint8).argsort(stable=True, descending=True)[:num_stored]
            if not logits.is_cpu or not index.all():
                rows = [None if new is None else new[index] for new in rows]
        count, checksum = len(rows[0]), self._checksum + self._hash(*rows)
        start = (self._pointer + max(count - self.capacity, 0)) % self.capacity
        num_kept, head = min(count, self.capacity), self.capacity - start  # what is beyond the head goes to the start
        for place, (stored, new) in enumerate(zip((self._logits, self._targets, self._iid, self._weight), rows)):
            if new is None and place not in self._written:
                continue  # it holds the default everywhere
            self._written.add(place)
            old: Any = stored.numpy() if stored.is_cpu else stored
            parts = [old[start : start + num_kept], old[: max(0, num_kept - head)]]
            if undo is not None:
                for part in parts:
                    undo.callback(part.__setitem__, slice(None), part.clone() if old is stored else part.copy())
            if new is None:
                for part in parts:
                    (part.fill_ if isinstance(part, Tensor) else part.fill)(1)
            elif stored.is_cpu:
                parts[0][:], parts[1][:] = new[-self.capacity :][:head], new[-self.capacity :][head:]
            else:
                kept = new[-self.capacity :]
                number = 1 + (head < num_kept)
                torch._foreach_copy_(parts[:number], [kept[:head], kept[head:]][:number])
        vars(self).update(  # because setting an attribute of a module takes as long as an operator
            _checksum=checksum,
            _pointer=(self._pointer + count) % self.capacity,
            _fill=min(self._fill + count, self.capacity),
            _num_enqueued=self._num_enqueued + count,
            _has_weights=self._has_weights or sample_weight is not None,
        )

    def _as_stored(
        self, logits: Tensor, targets: Tensor, iid_mask: Tensor | None, sample_weight: Tensor | None
    ) -> list[Tensor | None]:
        """Move the queue to the device of the rows, and to float64 if they are, and return them in its dtypes.

        None stands for a mask or weights of ones.
        """
        dtype = torch.promote_types(self._logits.dtype, logits.dtype)
        if self._logits.is_meta:
            self._allocate(logits.device, dtype)  # nothing was stored on the meta device
        if self._logits.device != logits.device or self._logits.dtype != dtype:
            self._logits = self._logits.to(logits.device, dtype)
            self._move_to(logits.device)
        if sample_weight is not None:
            self._weight = self._weight.to(torch.promote_types(self._weight.dtype, sample_weight.dtype))
        stored = (self._logits, self._targets, self._iid, self._weight)
        rows = (logits, targets, iid_mask, sample_weight)
        return [None if new is None else new.detach().to(old) for new, old in zip(rows, stored)]

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

    def _hash(self, logits: Any, targets: Any, iid: Any = None, weight: Any = None) -> Tensor | int:
        """Return the sum of the mixed bits of all numbers, each times a factor of its row and column, modulo 2**64.

        The sum of two parts of a batch is that of the whole. The factor of a row is mixed from its sequence number, so
        the order of the rows matters. Without mixing the bits of the numbers, two flipped signs could cancel, because
        each adds 2**63 times a factor. Tensors and the arrays of :func:`on_host` give the same hash.
        """
        (count, columns), library = logits.shape, torch if isinstance(logits, Tensor) else numpy
        options: dict[str, Any] = {"dtype": library.int64, **({"device": logits.device} if library is torch else {})}
        bits = library.int64 if logits.dtype == library.float64 else library.int32
        bits_of_one = 127 << 23 if bits is library.int32 else 1023 << 52
        if weight is not None:
            with numpy.errstate(over="ignore"):
                weight = (weight.to if library is torch else weight.astype)(logits.dtype).view(bits)
        last = columns + (columns if self.multi_hot else 1)  # the place of the weight; that of the mask follows
        extra = {last: weight, last + 1: iid}
        present = [place for place, new in extra.items() if new is not None]
        # One buffer for the numbers that are mixed, of each row, and last its sequence number: fewer kernels.
        words = library.empty((last + len(present) + 1, count), **options)
        words[:columns] = logits.view(bits).T
        words[columns:last] = targets.T if self.multi_hot else targets
        for row, place in enumerate(present, start=last):
            words[row] = extra[place]
        start = self._num_enqueued + _MIX[2]
        if library is numpy:
            words[-1] = numpy.arange(start, start + count)
        else:
            torch.arange(start, start + count, out=words[-1])
        mixed = _mix_bits(words)
        absent = [(place, value) for place, value in ((last, bits_of_one), (last + 1, 1)) if extra[place] is None]
        key = last + 2, tuple(present), tuple(absent)
        if library is numpy:
            factors, constants = _column_factors(*key)
            return int((factors @ mixed[:-1] + constants[0]) @ (mixed[-1] | 1))
        factors, constants = _column_factors_on(*key, logits.device)
        of_rows = torch.addcmul(constants, mixed[:-1], factors).sum(0)
        total: Tensor = (of_rows * (mixed[-1] | 1)).sum()
        return total

    @not_compiled
    def assert_synchronized(self, group: Group = None) -> None:
        """Compare the contents over the ranks, bit for bit. Every rank must call it.

        Without a process group there is nothing to compare.

        Raises:
            RuntimeError: on every rank, with the ranks whose queues differ.
        """
        if not is_initialized():
            return
        resolved = resolve_group(group)

        def bring() -> Offer[None]:
            summary = f"{self._fill} rows with contents {_digest(self.position, self.rows(), None)}"
            return Offer(None, {"queue": State(summary, SAME_QUEUE)})

        agree_on("MemoryQueue.assert_synchronized", resolved, bring)

    @torch.inference_mode(False)
    def _move_to(self, device: torch.device) -> None:
        for name in ("_logits", "_targets", "_iid", "_weight", "_checksum"):
            setattr(self, name, getattr(self, name).to(device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MemoryQueue:
        # Only the device of the conversion applies, because to(bfloat16) must not round the stored rows.
        super()._apply(fn, recurse)
        device = fn(self._logits[:0]).device
        if device == self._logits.device:
            return self
        if self._logits.is_meta:
            self._allocate(device, self._logits.dtype)  # nothing was stored on the meta device
        else:
            self._move_to(device)
        return self

    def _saved(self) -> dict[str, Tensor]:
        if self.capacity == 0:
            return {}
        contents = _digest(self.position, self.rows(), self.checksum)
        arguments = self.capacity, self.num_classes or 0, self.keep == "negatives", self.multi_hot, self.ignore_index
        position = self._num_enqueued, self._fill, self._pointer, self._has_weights
        numbers = *arguments, *position, self._logits.dtype == torch.float64, int(self.checksum), contents
        return {
            # Always float64, which represents float32 exactly: torch.distributed.checkpoint loads into the dtype of the
            # module's state, and a new queue is float32.
            "saved_logits": self._logits.to(torch.float64, copy=True),
            "saved_targets": self._targets.clone(),
            "saved_iid_mask": self._iid.clone(),
            "saved_sample_weight": self._weight.to(torch.float64, copy=True),
            "saved_numbers": as_saved([*map(int, numbers)]).to("cpu" if self._logits.is_meta else self._logits.device),
        }

    @torch.inference_mode(False)
    def _read_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if not state:
            return {}
        missing = next((name for name in self._saved_names if name not in state), None)
        if missing is not None:
            fix = f"An earlier version saved it, or it is damaged. {_EMPTY}"
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
        dtypes = dtype, self._targets.dtype, torch.bool, torch.float64 if has_weights else dtype
        device = rows[0].device if self._logits.is_meta else self._logits.device
        rows = [tensor.to(device, kind, copy=True).contiguous() for tensor, kind in zip(rows, dtypes)]
        checksum = torch.tensor(saved["checksum"], device=device)
        if not rows[0].is_meta:
            logits, targets, iid, weight = (tensor[:fill] for tensor in rows)
            infinite = Words("others, which never enter a queue")
            _require(bool(logits.isfinite().all()), "logits", "finite numbers", infinite)
            held = QueueRows(logits, targets, iid, weight if has_weights else None)
            found = _digest((pointer, fill, enqueued, has_weights), held, checksum)
            _require(found == saved["contents"], "hash", repr(saved["contents"]), found)
        names = "_logits", "_targets", "_iid", "_weight", "_fill", "_pointer", "_num_enqueued", "_has_weights"
        read = dict(zip(names, (*rows, fill, pointer, enqueued, has_weights)))
        return {"num_classes": saved["num_classes"], "_checksum": checksum, "_written": {0, 1, 2, 3}, **read}

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"capacity={self.capacity}, num_classes={self.num_classes}, keep={self.keep!r}, fill={self._fill}"


def on_host(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return tensors on the CPU as numpy arrays, with which operations on few rows take a third of the time."""
    rows = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    return [tensor.resolve_neg().numpy() if tensor is not None and tensor.is_cpu else tensor for tensor in rows]


def _require(is_right: bool, name: str, what: str, value: object) -> None:
    if not is_right:
        fix = f"The state is damaged, or was changed: load another. {_EMPTY}"
        raise ValueError(expected(f"{name} of the saved queue", what, value, fix))


def _digest(position: tuple[int, int, int, bool], rows: QueueRows, checksum: Tensor | None) -> int:
    """Return a hash of the position, of all bits of the rows, and of the checksum."""
    words = position if checksum is None else (*position, int(checksum))
    contents = hashlib.blake2b(repr(words).encode(), digest_size=8)
    weight = None if rows.sample_weight is None else rows.sample_weight.double()  # as in a state
    for tensor in (*rows[:-1], weight) if len(rows.logits) else ():
        if tensor is not None:
            contents.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return int(contents.hexdigest(), 16) - 2**63


def _mix_bits(values: Any) -> Any:
    """Mix the 64 bits of each of ``values``, int64 of torch or numpy, in place by products and shifts; return them."""
    for factor in _MIX[:2]:
        values *= factor
        values ^= values >> 32
    return values


@functools.lru_cache(maxsize=32)
def _column_factors(size: int, present: tuple[int, ...], absent: tuple[tuple[int, int], ...]) -> tuple[Any, Any]:
    """Return the factors of the columns that are stored in :meth:`MemoryQueue._hash`, and what the others add to a row.

    Args:
        size: the number of columns; the last two are the weight and the mask.
        present: those of the last two that are given.
        absent: the other ones, each with the bits that it has in all rows.

    Returns:
        int64 arrays, both with one entry for each column; all but the first of the latter are 0.
    """
    factors = _mix_bits(numpy.arange(-size, 0) + _MIX[2]) | 1
    constants = numpy.zeros(size - len(absent), numpy.int64)
    for place, value in absent:
        constants[:1] += _mix_bits(numpy.array([value])) * factors[place]
    return factors[[*range(size - 2), *present]], constants


@functools.lru_cache(maxsize=32)
def _column_factors_on(*key: Any) -> tuple[Tensor, Tensor]:
    """Return both on a device, (columns, 1) each; the copies block, so that any stream can use them."""
    *columns, device = key
    factors, constants = (torch.from_numpy(one)[:, None].to(device) for one in _column_factors(*columns))
    return factors, constants
