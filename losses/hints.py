"""Warnings about a ranking loss that is probably misused, each at most once and with the fix.

They cost nothing in a steady step, and never wait for an accelerator: values are copied, and read in a later call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import warn
from .rows import Batch

_CALLS = 20  # in a row: without a valid class, with a new queue in each, or in eval mode with a backward
_CALLS_OF_A_STEP = 8  # at most, in which a queue that is constructed in every step is used
_FEW_ROWS = 16  # with fewer rows the range of the scores does not tell probabilities from logits
_EQUAL_ROWS = 16  # and at least two calls: few rows of few values may be equal by chance
_WIDE = 0.5  # scores in [0, 1] with a smaller range may be those of an untrained network
_WIDE_CALLS = 2  # with such scores, and none with a score outside of [0, 1]: logits may lie in it by chance


class Empty(NamedTuple):
    """Why a call may have nothing to rank, as the hint says it, and the fix."""

    what: str
    fix: str


NO_CLASS = Empty(
    "no class was valid",
    "Usually no class had both a positive and a negative: draw batches with positives in them "
    "(fullrank.data.BalancedBatchSampler), use larger batches, or set queue_size so that past rows stay in the pool.",
)
# What it means that all ranks passed the same, and the fix.
_COPIES = {
    "rows": "every row is counted {} times and ranked against its own copies. Give each rank rows of its own, such as "
    "with torch.utils.data.DistributedSampler. If they were gathered before, pass this rank's rows instead. "
    "(gather_distributed=False is right only after a gather that carries the gradient, such as fullrank.gather_rows; "
    "after dist.all_gather it leaves 1/W of the gradient.) Ranks that hold the same rows on purpose, as with tensor "
    "parallelism, need group=.",
    "mask": "it does not belong to the rows of each rank. Pass what the guide returns for this rank's rows.",
}
_COPIES["reference"] = _COPIES["negatives"] = (
    "every one of them is counted {} times. Pass other ones on each rank, or all on one rank and none, rows[:0], on "
    "the others."
)


class Hints:
    """Looks at the training calls of the losses of one class and name, and warns once about each likely mistake."""

    def __init__(self, loss: str, name: str | None) -> None:
        self._key = loss, name
        self._warned: set[str] = set()
        self._calls = self._empty_calls = self._wide_calls = self._eval_calls = 0
        self._queues = self._calls_before_queue = 0
        self._equal: dict[str, tuple[int, int]] = {}  # calls in a row in which all ranks passed the same, and the rows
        self.looks_for_all = False  # in this call: in 1, 2, 4, 8, ..., in which all hints are looked for
        self._are_logits = False  # whether a score has been outside of [0, 1]
        self._copies: list[tuple[Copy, Callable[[Any], None]]] = []  # each with what to call when it is there

    def __reduce__(self) -> tuple[Any, ...]:
        return hints_of, self._key  # a copy of a loss has the hints of its class and name

    def count_queue(self) -> None:
        """Count a queue that is constructed, and warn if one is in every step."""
        calls, self._calls_before_queue = self._calls - self._calls_before_queue, self._calls
        if calls:
            self._queues = self._queues + 1 if calls <= _CALLS_OF_A_STEP else 0
        if self._queues == _CALLS:
            self.warn_once(
                "queue",
                f"a loss with a queue was constructed {_CALLS} times in a row after few calls, so the queue never "
                "holds rows of earlier steps. Construct the loss once, before the loop.",
            )

    def should_observe(self, loss: Any, value: Tensor) -> bool:
        """Count a call that returns ``value``, and return whether to pass it to the methods ``observe...``."""
        if not loss.validate_args:
            return False
        if not loss.training:
            self._count_eval(loss, value)
            return False
        if self._copies:
            self._read_copies()
        self._calls += 1
        self._eval_calls = 0
        self.looks_for_all = self._calls & (self._calls - 1) == 0
        return self.looks_for_all or 0 < self._empty_calls < _CALLS

    def _count_eval(self, loss: Any, value: Tensor) -> None:
        """Count the backwards in eval mode with a queue that training has filled, and that eval mode does not use."""
        if self._eval_calls >= _CALLS:
            self.warn_once(
                "eval",
                f"{_CALLS} steps in a row were trained in eval mode, in which no queued row is used and none enters. "
                "Call loss.train() after a validation.",
            )
        elif value.requires_grad and getattr(loss, "queue", None) and not loss.queue_in_eval:
            value.register_hook(lambda _: setattr(self, "_eval_calls", self._eval_calls + 1))

    def observe(self, live: Batch, valid: Tensor) -> None:
        """Look at one call of a loss over a pool: the live rows of all ranks, and which classes (C,) are valid."""
        if live.logits.shape[1] == 2 and live.targets.ndim == 1:
            self.warn_once(
                "two columns",
                "logits of shape (N, 2) are ranked as two classes, so that the frequent class counts as much as the "
                "rare one. If the problem is binary, use num_classes=1 and one logit: logits[:, 1:] - logits[:, :1].",
            )
        self.observe_valid(valid, NO_CLASS)
        if not self.looks_for_all or self._are_logits or "probabilities" in self._warned:
            return
        if live.logits.shape[0] >= _FEW_ROWS:
            self.read(torch.stack(live.logits.detach().aminmax()), self._check_range)

    def observe_valid(self, valid: Tensor, empty: Empty) -> None:
        """Look at which classes, queries or rows of one call are valid; a call with none counts as ``empty``."""

        def count(found: list[bool]) -> None:
            self._empty_calls = 0 if any(found) else self._empty_calls + 1
            if self._empty_calls == _CALLS:
                self.warn_once("empty", f"{empty.what} in {_CALLS} calls in a row, so the loss was 0. {empty.fix}")

        if "empty" not in self._warned:
            self.read(valid.any()[None], count)

    def observe_ranks(self, counts: Sequence[int], tensors: Sequence[Tensor | None], what: str = "rows") -> None:
        """Look whether all ranks passed the same: ``tensors`` have the ``counts`` rows of all, in rank order."""
        rows = [tensor.detach() for tensor in tensors if tensor is not None]
        count, num_ranks = counts[0], len(counts)
        if not self.looks_for_all or what in self._warned or min(count, num_ranks) < 2 or {*counts} != {count}:
            return
        are_copies = (rows[0][:count] != rows[0][:1]).any()  # equal rows of a rank may be of a network that starts at 0
        for tensor in rows:
            of_ranks = tensor.reshape(num_ranks, count, -1)
            are_copies = are_copies & (of_ranks == of_ranks[:1]).all()
        text = f"all {num_ranks} ranks passed the same {what}, so {_COPIES[what].format(num_ranks)}"
        self.read(are_copies[None], lambda found: self._count_equal(found[0], count, what, text))

    def observe_labels(self, counts: Sequence[int], labels: Tensor | None) -> None:
        """Look whether the labels number the rows of each rank: ``labels`` are those of all, in rank order."""
        if labels is None or not self.looks_for_all or len(counts) < 2 or min(counts) < 2 or len(labels) != sum(counts):
            return
        numbers = torch.tensor([*itertools.chain(*map(range, counts))], device="cpu")
        are_numbers = (labels == numbers.to(labels.device, non_blocking=True)).all()
        text = (
            "the labels on every rank are 0, 1, 2, ... in the order of its rows. If they number the rows of a batch, "
            "rows of different ranks get the same label. Pass numbers that differ between the ranks, such as the "
            "indices of the data set, or no labels where row i belongs to row i."
        )
        self.read(are_numbers[None], lambda found: self._count_equal(found[0], sum(counts), "labels", text))

    def _count_equal(self, are_equal: bool, count: int, what: str, text: str) -> None:
        calls, rows = self._equal.get(what, (0, 0))
        self._equal[what] = calls, rows = (calls + 1, rows + count) if are_equal else (0, 0)
        if calls > 1 and rows >= _EQUAL_ROWS and "rows" not in self._warned:  # copies of rows have copies of the others
            self.warn_once(what, text)

    def _check_range(self, ends: list[float]) -> None:
        low, high = ends
        self._are_logits |= low < 0 or high > 1
        self._wide_calls += high - low > _WIDE
        if not self._are_logits and self._wide_calls == _WIDE_CALLS:
            self.warn_once(
                "probabilities",
                f"all scores lie between 0 and 1 ({low:.3g} to {high:.3g}). If they are probabilities, pass the logits "
                "from before the sigmoid or softmax: probabilities near 0 and 1 are too close to each other to rank.",
            )

    def read(self, values: Tensor, use: Callable[[Any], None]) -> None:
        """Call ``use`` with ``values``: in a later training call if they are on an accelerator."""
        copy = start_copy(values)
        if copy is not None:
            self._copies.append((copy, use))
            self._read_copies()

    def _read_copies(self) -> None:
        while self._copies and self._copies[0][0].has_arrived():
            copy, use = self._copies.pop(0)
            use(copy.host.tolist())

    def warn_once(self, kind: str, text: str) -> None:
        """Warn with ``text``, which follows the name of the loss, unless there was a warning of this ``kind``."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"{self._key[0]}: {text}")


_HINTS: dict[tuple[str, str | None], Hints] = {}


def hints_of(loss: str, name: str | None) -> Hints:
    """Return the hints of the losses of this class and name, so that one that is constructed in every step is seen."""
    return _HINTS.setdefault((loss, name), Hints(loss, name))


class Copy(NamedTuple):
    """Numbers that are being copied to the host."""

    has_arrived: Callable[[], bool]
    host: Tensor  # not to be read before they have arrived


def start_copy(values: Tensor) -> Copy | None:
    """Copy ``values`` to the host in the background; None on a device where that would wait."""
    if values.device.type == "cpu":
        return Copy(lambda: True, values)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != values.device.type:
        return None
    finished = torch.Event(values.device)
    host = torch.empty_like(values, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    finished.record(torch.accelerator.current_stream(values.device))  # the current device may be another one
    return Copy(finished.query, host)
