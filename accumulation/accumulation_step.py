"""What a training loop does with one micro-batch of a window: back-propagate its share of the loss, and add it up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.header import agree
from ..errors import Words, attempt, expected
from ..gradients.wrappers import GradientSync, discard_gradients_
from .window import as_numbers, check_amount, check_scalar
from .zero_loss import zero_loss

B = TypeVar("B")

# Between the sum of num_items and the count: integers agree exactly, weights up to the rounding of their float32 sums.
_ROUNDING = 1e-5


class Window(NamedTuple):
    """What the opening header has settled."""

    model: nn.Module
    wrappers: GradientSync
    sync: str
    group: ProcessGroup | None  # None when this process is alone
    rows: tuple[int, ...]  # micro-batches of each rank
    num_terms: float  # N
    is_counted: bool  # N is the sum of the ranks' counts, not a number that was given
    multiplier: float

    @property
    def is_lockstep(self) -> bool:
        """Whether a rank that leaves out a backward leaves the others waiting in it."""
        reduces_each = self.sync == "each" and bool(self.wrappers.ddp or self.wrappers.fsdp)
        return self.group is not None and (self.wrappers.is_lockstep or reduces_each)


class Step:
    """Back-propagates the micro-batches of one window. Made by :func:`accumulate`; one object for the whole window."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._index = -1  # of the micro-batch that is open
        self._is_last = False
        self._num_calls = self._num_backward = 0  # in this micro-batch
        self._losses: list[Tensor] = []  # sums of the losses, one per micro-batch; read when the window closes
        self._items: list[Tensor | float] = []
        self._mistake: Exception | None = None
        self._is_closed = self._has_ended = False
        self._switched = ExitStack()  # puts back the wrapper's switches
        self._total = 0.0

    def backward(self, loss: Tensor, *, num_items: Tensor | float | None = None) -> None:
        """Back-propagate this micro-batch's share of the window's loss; once per micro-batch.

        Args:
            loss: scalar, the *sum* of the losses of this micro-batch's terms.
            num_items: when ``loss`` is their *mean* instead, the number of terms in it. A mean over 0 terms, NaN though
                it is, counts as nothing, in value and gradient. A tensor is not read, and with one the gradient is
                zero only if the loss turns a gradient of 0 into zeros; torch's losses do, a division by the 0 does not.

        Raises:
            TypeError: when ``loss`` is not a floating-point tensor, or ``num_items`` not a number.
            ValueError: when ``loss`` is not a scalar or has no graph; for negative ``num_items``, or ones that do not
                add up to the count that ``accumulate`` made.
            RuntimeError: for a micro-batch with two calls, or with none.

        Distributed:
            The call for the last micro-batch exchanges one header of 64 bytes before it back-propagates. There every
            rank raises what any of them has done wrong since the window began, and the gradients of the model are
            discarded. A rank raises at once, alone, only where the others wait for a backward that it cannot run:
            without a loss that has a graph, under FSDP2 or ``sync="each"``.
        """
        self.scale(loss, num_items=num_items).backward()

    def scale(self, loss: Tensor, *, num_items: Tensor | float | None = None) -> Tensor:
        """Return what :meth:`backward` calls ``backward()`` on, for those who have to do that themselves.

        ``scaler.scale(step.scale(loss)).backward()`` with a ``GradScaler``; ``accelerator.backward(step.scale(loss))``
        with an Accelerator whose ``gradient_accumulation_steps`` is 1, or it divides once more.

        Arguments and errors are those of :meth:`backward`, and so is the exchange: it happens in this call.
        """
        if self._index < 0:
            fix = "Call it inside the loop over accumulate(...)."
            raise RuntimeError(expected("step", "a micro-batch of a window", Words("none: the loop was left"), fix))
        self._num_calls += 1
        share, mistake = attempt(lambda: self._share(loss, num_items))
        can_run = self._num_calls == 1 and _has_graph(loss)
        if mistake is not None:
            self._note(mistake, keeps_step=self._num_calls > 1 or can_run)
        if self._is_last:
            self._close()
        if share is None:
            # Zeros, through the graph if there is one: the others run a backward now, and may communicate in it.
            share = loss.sum() * 0 if can_run else torch.zeros((), requires_grad=True)
        share.register_hook(self._count_backward)
        return share

    def mean_loss(self) -> Tensor:
        """Return the loss of the window: its sum over all ranks and micro-batches, divided by N.

        A detached scalar, the same on every rank, on the device and in the dtype of the losses, float32 for half
        precision. A window without terms gives the sum, which is 0. Local: the last micro-batch has exchanged it.

        Raises:
            RuntimeError: before the loop has ended, or when it was left early.
        """
        if not self._has_ended:
            fix = "Call it after the loop over accumulate(...), which must have run to its end."
            raise RuntimeError(expected("mean_loss", "a window that has ended", Words("one that has not"), fix))
        last = self._losses[-1]
        return torch.full((), self._total / (self._window.num_terms or 1.0), dtype=last.dtype, device=last.device)

    def run(self, micro_batches: Sequence[B]) -> Iterator[tuple[Step, B]]:
        """Yield this step with each micro-batch, the wrapper switched for it; close the window with the last."""
        window = self._window
        with self._switched as switched:
            switched.enter_context(window.wrappers.restored())
            switched.callback(self._end)
            for index, micro_batch in enumerate(micro_batches):
                self._index, self._is_last = index, index == len(micro_batches) - 1
                self._num_calls = self._num_backward = 0
                window.wrappers.switch(window.sync, self._is_last)
                yield self, micro_batch
                if self._index < 0:
                    return  # it failed, and the loop went on all the same
                self._leave()
            self._has_ended = True

    def _end(self) -> None:
        self._index = -1

    def _share(self, loss: Tensor, num_items: Tensor | float | None) -> Tensor:
        """Check and add up one micro-batch, and return ``m * S / N``."""
        where = f"of micro-batch {self._index}"
        if self._num_calls > 1:
            fix = "Add the losses of a micro-batch, then call it once."
            raise RuntimeError(expected(f"step {where}", "one call of backward or scale", self._num_calls, fix))
        _check_loss(f"loss {where}", loss)
        # Half precision would round m / N, and the sum itself ends at 65504.
        total = (loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss).reshape(())
        if num_items is not None:
            items = check_scalar(f"num_items {where}", num_items)
            total = _times(total, items, f"num_items {where}")
            self._items.append(items)
        detached = total.detach()
        self._losses.append(detached.full_tensor() if hasattr(detached, "full_tensor") else detached.clone())
        num_terms = self._window.num_terms
        return total * (self._window.multiplier / num_terms) if num_terms else zero_loss(total)

    def _count_backward(self, grad: Tensor) -> None:
        self._num_backward += 1

    def _note(self, mistake: Exception, *, keeps_step: bool) -> None:
        """Keep ``mistake`` for the closing header; raise it where there is none to come, or where it would hang."""
        hangs = self._window.is_lockstep and not self._is_last and not keeps_step
        if self._window.group is None or self._is_closed or hangs:
            if not self._is_closed:
                self._abandon()
            raise mistake
        self._mistake = self._mistake or mistake

    def _leave(self) -> None:
        """Check that the micro-batch that is left has been back-propagated; a rank that forgot the last closes here."""
        if self._num_backward == 1:
            return
        fix = "Call step.backward(loss) once in every pass of the loop, or backward() on what step.scale(loss) returns."
        name = f"micro-batch {self._index}"
        mistake = RuntimeError(expected(name, "one backward", Words(f"{self._num_backward}"), fix))
        self._note(mistake, keeps_step=self._num_backward > 0)
        if self._is_last:
            self._close()

    def _close(self) -> None:
        """Exchange sums and mistakes, before the last backward; raise on every rank when any has made one."""
        try:
            totals = self._exchange()
        except Exception:
            self._abandon()
            raise
        self._is_closed, self._total = True, totals

    def _exchange(self) -> float:
        """Return the sum of the losses of all ranks; raise what any of them has done wrong."""
        window = self._window
        sums, error = attempt(self._sums)
        error = self._mistake or error
        if window.group is None:
            if error is not None:
                raise error
            parts = [sums]
        else:
            call = "accumulate (end of the window)"
            parts = agree(call, window.group, error=error, totals=sums or ()).totals[:, :3].tolist()
        losses, items, has_items = (sum(column) for column in zip(*parts))
        is_complete = window.is_counted and has_items == sum(window.rows)
        if is_complete and not abs(items - window.num_terms) <= _ROUNDING * window.num_terms:
            fix = "Count exactly the terms that the losses are means of: after the shift, without those ignored."
            what = f"a sum over the window equal to its count, {window.num_terms:.17g}"
            raise ValueError(expected("num_items", what, items, fix))
        return losses

    def _sums(self) -> tuple[float, float, float]:
        """Return this rank's sum of losses, sum of num_items and number of them; the one transfer from the device."""
        items = [check_amount("num_items", number) for number in as_numbers(self._items)]
        return sum(as_numbers(self._losses)), math.fsum(items), len(items)

    def _abandon(self) -> None:
        """Leave nothing of the window behind; what was there before the first backward of any rank stays."""
        has_begun = self._index > 0 if self._window.group is None else max(self._window.rows) > 1
        if has_begun:
            discard_gradients_(self._window.model)
        else:
            self._window.wrappers.forget_forwards(self._window.model)
        self._switched.close()  # now: whoever keeps the iterator keeps its own end from running


def _check_loss(name: str, loss: Any) -> None:
    """Raise TypeError or ValueError when ``loss`` cannot be back-propagated as a scalar."""
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise TypeError(expected(name, "a floating-point tensor", loss, "Pass the summed loss, with its graph."))
    if loss.numel() != 1:
        raise ValueError(expected(name, "one element", loss, "Use loss.sum(), the sum over the terms."))
    if not _has_graph(loss):
        fix = "Compute it with gradients enabled, and do not detach it. A model without trainable parameters has none."
        raise ValueError(expected(name, "a loss with a graph", Words("one without"), fix))


def _has_graph(loss: object) -> bool:
    return isinstance(loss, Tensor) and loss.is_floating_point() and loss.requires_grad and torch.is_grad_enabled()


def _times(mean: Tensor, num_items: Tensor | float, name: str) -> Tensor:
    """Return ``mean * num_items``, and 0 for no items whatever the mean is."""
    if isinstance(num_items, Tensor):
        items = num_items.to(mean.device, mean.dtype)
        return torch.where(items == 0, torch.zeros_like(mean), mean * items)
    return mean * num_items if check_amount(name, num_items) else zero_loss(mean)
