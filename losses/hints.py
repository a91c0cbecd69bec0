"""Warnings about a ranking loss that is probably misused, each at most once and with the fix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import warn
from .rows import Batch

_EMPTY_CALLS = 20  # calls in a row without a valid class
_SMALL_POOLS = 3  # in a row: the last batch of an epoch may be small
_FEW_ROWS = 16  # with fewer rows the range of the scores does not tell probabilities from logits
_COPIED_ROWS = 16  # of one rank, and at least two calls: few rows of few values may be equal by chance
_WIDE = 0.5  # scores in [0, 1] with a smaller range may be those of an untrained network
_WIDE_CALLS = 2  # with such scores, and none with a score outside of [0, 1]: logits may lie in it by chance
_FEW_POSITIVES = 20  # with fewer, all of them may have no gradient by chance
_NO_GRADIENT = 1e-6  # times the largest gradient of the class; a gradient up to it counts as none
_MANY = 0.99  # the share of live positives without a gradient above which a hint is due
_SMALL_LOSS = 0.05  # below it the positives are ranked well and need no gradient


class Empty(NamedTuple):
    """Why a call may have nothing to rank, as the hint says it, and the fix."""

    what: str
    fix: str


NO_CLASS = Empty(
    "no class was valid",
    "Usually no class had both a positive and a negative: draw batches with positives in them "
    "(fullrank.data.BalancedBatchSampler), use larger batches, or set queue_size so that past rows stay in the pool.",
)


class Setting(NamedTuple):
    """What decides which hints apply to a call; None where a hint does not apply."""

    temperature: float | None  # None if it is automatic, or if the loss has none
    small_pool: str | None  # the problem with a pool as small as this one, and the fix
    argument: str | None = None  # which argument is probably misread, and the fix


class Hints:
    """Looks at training calls of one loss, and warns once about each likely mistake.

    Nothing waits for an accelerator: its values are copied in the background, and read in a later call.
    """

    def __init__(self, loss: str) -> None:
        self._loss = loss
        self._warned: set[str] = set()
        self._calls = self._empty_calls = self._small_pools = self._positives = self._lost = 0
        self._copied_calls = self._copied_rows = self._wide_calls = 0
        self.looks_for_all = False  # in this call: in 1, 2, 4, 8, ..., in which all hints are looked for
        self._are_logits = False  # whether a score has been outside of [0, 1]
        self._copies: list[tuple[Copy, Callable[[Any], None]]] = []  # each with what to call when it is there

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_copies": []}  # events can be neither copied nor pickled

    def should_observe(self, *, per_query: bool = False) -> bool:
        """Count a call before its formula, and return whether to pass it to the methods ``observe...`` after it.

        A loss ``per_query`` may be averaged over micro-batches.

        True in calls 1, 2, 4, 8, ..., in which all hints are looked for. True also after a call with too few rows or
        without a valid class, until the series ends or its hint is given.
        """
        if self._copies:
            self._read_copies()
        self._calls += 1
        self.looks_for_all = self._calls & (self._calls - 1) == 0
        if self.looks_for_all:
            if not per_query and _accelerate_accumulates():
                mixins = "fullrank.integrations.transformers.PooledLossMixin (or .sentence_transformers)"
                fix = f"a Trainer has {mixins} for it"
                self.warn_once("accumulation", accumulation_hint("gradient_accumulation_steps", fix))
            return True
        return 0 < self._small_pools < _SMALL_POOLS or 0 < self._empty_calls < _EMPTY_CALLS

    def observe(self, setting: Setting, live: Batch, valid: Tensor) -> None:
        """Look at one call of a loss over a pool: the live rows of all ranks, and which classes (C,) are valid."""
        if live.logits.shape[1] == 2 and live.targets.ndim == 1:
            self.warn_once(
                "two columns",
                "logits of shape (N, 2) are ranked as two classes, so that the frequent class counts as much as the "
                "rare one. If the problem is binary, use num_classes=1 and one logit: logits[:, 1:] - logits[:, :1].",
            )
        if setting.argument is not None:
            self.warn_once("argument", setting.argument)
        self._small_pools = 0 if setting.small_pool is None else self._small_pools + 1
        if setting.small_pool is not None and self._small_pools == _SMALL_POOLS:
            self.warn_once("few rows", setting.small_pool)
        self.observe_valid(valid, NO_CLASS)
        if not self.looks_for_all or self._are_logits or "probabilities" in self._warned:
            return
        if live.logits.shape[0] >= _FEW_ROWS:
            self.read(torch.stack(live.logits.detach().aminmax()), self._check_range)

    def observe_valid(self, valid: Tensor, empty: Empty) -> None:
        """Look at which classes, queries or rows of one call are valid; a call with none counts as ``empty``."""
        if "empty" not in self._warned:
            self.read(valid.any()[None], lambda found: self._count_empty_calls(any(found), empty))

    def _count_empty_calls(self, any_valid: bool, empty: Empty) -> None:
        self._empty_calls = 0 if any_valid else self._empty_calls + 1
        if self._empty_calls == _EMPTY_CALLS:
            self.warn_once("empty", f"{empty.what} in {_EMPTY_CALLS} calls in a row, so the loss was 0. {empty.fix}")

    def observe_ranks(self, counts: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
        """Look whether all ranks passed the same rows: ``tensors`` have the ``counts`` rows of all, in rank order.

        Rows that are all equal within a rank tell nothing, such as the scores of a network whose last layer is 0.
        """
        rows = [tensor.detach() for tensor in tensors if tensor is not None]
        count, num_ranks = counts[0], len(counts)
        if not self.looks_for_all or "copies" in self._warned or min(count, num_ranks) < 2 or {*counts} != {count}:
            return
        are_copies = (rows[0][:count] != rows[0][:1]).any()
        for tensor in rows:
            of_ranks = tensor.reshape(num_ranks, count, -1)
            are_copies = are_copies & (of_ranks == of_ranks[:1]).all()
        self.read(are_copies[None], lambda found: self._count_copies(bool(found[0]), count, num_ranks))

    def _count_copies(self, are_copies: bool, count: int, num_ranks: int) -> None:
        self._copied_calls = self._copied_calls + 1 if are_copies else 0
        self._copied_rows = self._copied_rows + count if are_copies else 0
        if self._copied_calls > 1 and self._copied_rows >= _COPIED_ROWS:
            self.warn_once(
                "copies",
                f"all {num_ranks} ranks passed the same rows, so every row is counted {num_ranks} times and ranked "
                "against its own copies. Give each rank rows of its own, such as with "
                "torch.utils.data.DistributedSampler. If they were gathered before, pass this rank's rows instead. "
                "(gather_distributed=False is right only after a gather that carries the gradient, such as "
                "fullrank.gather_rows; after dist.all_gather it leaves 1/W of the gradient.) Ranks that hold the same "
                "rows on purpose, as with tensor parallelism, need group=.",
            )

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

    def watch_positives(
        self, scores: Tensor, positive: Tensor, losses: Tensor, valid: Tensor, temperature: float
    ) -> None:
        """Count in the backward how many live positives get a gradient.

        Args:
            scores, positive: (C, M), and which of them are live positives with a weight.
            losses, valid: (C,), the loss of each class, and which are valid.
            temperature: what the scores were divided by.
        """
        if "gradient" in self._warned or not scores.requires_grad or not scores.numel():
            return
        open_to_gain = valid & (losses.detach() > _SMALL_LOSS)  # [C]
        incoming: list[Tensor | int] = []  # of the losses: a class whose loss is multiplied by 0 is not counted
        if losses.requires_grad:
            losses.register_hook(lambda grad: incoming.append(0 if grad is None else grad.detach()))

        def count(gradient: Tensor | None) -> None:
            if gradient is None:
                return
            size = gradient.detach().abs()
            is_used = incoming[-1] != 0 if incoming else torch.ones_like(open_to_gain)
            counted = positive & (open_to_gain & is_used)[:, None]
            lost = counted & (size <= _NO_GRADIENT * size.amax(dim=1, keepdim=True))
            sums = torch.stack([lost.sum(), counted.sum()])
            self.read(sums, lambda counts: self._count_lost(counts, temperature), later=True)

        scores.register_hook(count)

    def _count_lost(self, sums: list[float], temperature: float) -> None:
        self._lost, self._positives = self._lost + int(sums[0]), self._positives + int(sums[1])
        if self._positives >= _FEW_POSITIVES and self._lost > _MANY * self._positives:
            self.warn_once(
                "gradient",
                f"{self._lost} of {self._positives} live positives had no gradient: temperature={temperature:g} is "
                "too small for the distances between the scores. Use a larger one, or temperature=None where the loss "
                "has it, which follows the spread of the scores.",
            )

    def read(self, values: Tensor, use: Callable[[Any], None], *, later: bool = False) -> None:
        """Call ``use`` with ``values``: in a later training call if ``later``, or if they are on an accelerator."""
        copy = start_copy(values)
        if copy is not None:
            self._copies.append((copy, use))
            if not later:
                self._read_copies()

    def _read_copies(self) -> None:
        while self._copies and self._copies[0][0].has_arrived():
            copy, use = self._copies.pop(0)
            use(copy.host.tolist())

    def warn_once(self, kind: str, text: str) -> None:
        """Warn with ``text``, which follows the name of the loss, unless there was a warning of this ``kind``."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"{self._loss}: {text}")


def accumulation_hint(argument: str, how: str) -> str:
    """Return the hint for a pooled loss of each micro-batch; ``argument`` is what the framework calls their number."""
    return (
        f"{argument} is greater than 1, so each call compares the rows of one micro-batch alone, and the losses are "
        "averaged or added up. That is not the loss of all rows: use fullrank.pooled_backward for the micro-batches of "
        f"a step ({how}), or larger batches and {argument}=1."
    )


def _accelerate_accumulates() -> bool:
    """Return True between optimizer steps of Accelerate, or of a Trainer, which uses it."""
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return state is not None and state().sync_gradients is False  # all its objects are one


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
