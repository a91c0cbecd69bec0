"""One window of :func:`accumulate` on this rank: the micro-batches, and the point at which all ranks raise one error.

The closing header comes before the last backward, because DDP has not begun to reduce then. A rank must not raise
earlier: the others may be several micro-batches away from any exchange. It stores the error and continues. Where the
others communicate in their backward, it back-propagates zeros from what the model has returned.

A loss that back-propagates itself needs its factor m / N before it reduces, so ``Step.factor`` exchanges the closing
header when it is read in the last micro-batch. The loss of that micro-batch and its errors go into one more header at
the end of the loop, of which all ranks know from the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..distributed.group import is_initialized
from ..distributed.header import DeviceCheck
from ..distributed.torch_private import backward_is_running, divisor_of, not_compiled
from ..errors import Words, expected
from ..gradients.all_reduce_grads import note_count
from ..gradients.torch_private import has_run_forward
from ..gradients.when_reduced import LOOPS, discard_gradients_, leave_last_loop
from ..gradients.wrappers import unseen_forward
from .summed_loss import SUM_UP, Gradients, as_mean, checked_sum, gradients_of, named, not_a_sum, zero_loss
from .token_count import Term, check_scalar
from .torch_private import tensors_with_graph
from .window import Window
from .window_sums import WindowSums

Losses = Tensor | Mapping[str, Tensor]
Numbers = Tensor | float | Mapping[str, Tensor | float]
Weights = Mapping[str, float]


class Phase(IntEnum):
    """How far a window has come."""

    OPEN = auto()  # before the last micro-batch
    LAST = auto()  # in the last micro-batch, before its header
    AGREED = auto()  # the header before the last backward was exchanged, and another one follows
    CLOSED = auto()  # no header follows
    ENDED = auto()  # the loop has run to its end


@dataclass(slots=True)
class MicroBatch:
    """What has happened in one micro-batch of a window."""

    index: int
    used: Sequence[bool]  # see Window.switch
    reaches_wrappers: bool  # whether its backward has to begin in a forward of the wrappers
    num_calls: int = 0  # of Step.backward and Step.scale
    num_backward: int = 0
    recorded: set[str] = field(default_factory=set)  # the names passed to Step.record
    unprepared: Sequence[DistributedDataParallel] = ()  # whose reduction the caller's framework must still prepare
    # What the outermost wrappers have returned, if the ranks wait for each other in this micro-batch; None before that.
    outputs: list[Any] | None = None
    reached: set[int] = field(default_factory=set)  # the places of the outputs that a backward has reached


class Step:
    """Back-propagates the micro-batches of one window. Made by :func:`accumulate`; one object for the whole window."""

    _call = "accumulate"
    _mean_fix = f"{SUM_UP}, or pass num_items=, the number of terms in the mean."

    def __init__(self, window: Window, sums: WindowSums) -> None:
        self._window, self._sums, self._terms = window, sums, sums.terms
        self._phase = Phase.OPEN
        self._micro_batch: MicroBatch | None = None  # None outside of the loop
        self._is_watched = False  # whether mistakes inside the loop are looked for
        self._before: Gradients | None = None  # the gradients at the start of the first micro-batch, if it is watched
        self._added: DeviceCheck | None = None  # that nothing was added to them before the call for it
        self._error: Exception | None = None  # the first one, for the closing header
        self._switched = ExitStack()  # restores the wrappers' switches

    @not_compiled
    def backward(self, loss: Losses, *, num_items: Numbers | None = None, weights: Weights | None = None) -> None:
        """Back-propagate this micro-batch's share of the window's loss; once per micro-batch.

        Args:
            loss: scalar, the *sum* of the losses of this micro-batch's terms, such as with ``reduction="sum"``. With
                counts by name a mapping of names to sums: all that were not passed to :meth:`record`. A name without
                terms in the window counts 0, even when its loss is NaN.
            num_items: the number of terms if ``loss`` is their *mean* instead; of 0 terms, such as NaN, it adds nothing
                to value and gradient. The host does not read a tensor: for a tensor of 0 the gradient is zero only if
                the loss turns a gradient of 0 into zeros. torch's losses do, a division by that 0 does not. With counts
                by name a mapping of the names that are means.
            weights: the factors of the names in the loss of the window, 1 for the others; the same in every
                micro-batch and on every rank.

        Raises:
            TypeError: when ``loss`` is not a floating-point tensor, or a mapping where there are counts by name; when
                ``num_items`` or a weight is not a number.
            ValueError: for names that are unknown or missing; for weights that change or differ between ranks; for a
                ``loss`` that is not a scalar, has no graph, or is not from the forward of the DDP module; for a mean
                without ``num_items``, if the graph shows that it is one of several terms; for sums divided by the
                numbers of their terms, if these differ between micro-batches; for the mean of a loss that compares
                rows or balances classes, which is for ``pooled_backward``; for ``num_items`` that are negative, or not
                the count of the micro-batch if ``count`` is a function.
            RuntimeError: for a micro-batch with two calls, or with none; for a loss that has back-propagated inside
                itself, see :attr:`factor`: gradients that you add yourself, such as those of a penalty, belong after
                this call; for an optimizer that steps before the last backward, and for gradients that were set to
                None. These, and sums that are divided, are looked for in windows 1, 2, 4, 8, ... of a model.

        Distributed:
            The call for the last micro-batch exchanges one header before it back-propagates. If any rank has failed
            since the window began, every rank raises that error there, and the gradients of the model are discarded. A
            rank raises alone only if it has run no forward of the model where the others communicate in theirs or in
            their backward, as under FSDP2 or ``sync="each"``.
        """
        micro_batch, share = self._scale(loss, num_items, weights, others_prepare=False)
        micro_batch.num_backward += 1
        share.backward()

    @not_compiled
    def scale(self, loss: Losses, *, num_items: Numbers | None = None, weights: Weights | None = None) -> Tensor:
        """Return the tensor that :meth:`backward` calls ``backward()`` on, for callers that must do that themselves.

        Such as ``scaler.scale(step.scale(loss)).backward()``, or ``accelerator.backward(step.scale(loss))`` with
        ``gradient_accumulation_steps=1``. Arguments and errors are those of :meth:`backward`.
        """
        micro_batch, share = self._scale(loss, num_items, weights, others_prepare=True)

        def count(grad: Tensor) -> None:
            micro_batch.num_backward += 1

        share.register_hook(count)
        return share

    @property
    @not_compiled
    def factor(self) -> float:
        """The factor m / N of the window's loss, for a loss that back-propagates itself; 0.0 without terms.

        Multiply by it what is back-propagated without :meth:`backward`: the chunks of a chunked cross-entropy, or an
        auxiliary loss whose gradient is added inside the forward. Pass the value of such a loss to :meth:`record`.
        RuntimeError outside of the loop, or with counts by name.

        Distributed:
            In the last micro-batch the first reading exchanges the header that :meth:`backward` exchanges otherwise,
            and the end of the loop exchanges another one. Read it on every rank at the same place, under FSDP2 before
            the forward. An error that a rank makes later is raised at the end of the loop, with the reduced gradients
            discarded.
        """
        self._check_naming("factor", are_named=False)
        self._begin_own_backward()
        return self._terms[""].factor

    @property
    @not_compiled
    def factors(self) -> dict[str, float]:
        """What :attr:`factor` is, by name, for counts by name; without the weights."""
        self._check_naming("factors", are_named=True)
        self._begin_own_backward()
        return {name: term.factor for name, term in self._terms.items()}

    @not_compiled
    def record(self, loss_sum: Tensor | float, name: str | None = None, *, weight: float = 1.0) -> None:
        """Add a summed loss to :meth:`mean_loss` without a backward; at most once per micro-batch, or name of it.

        Call it in place of :meth:`backward` for a loss that back-propagates itself, also on a rank without terms, or
        before :meth:`backward` for a further term that has its gradient from elsewhere, such as an auxiliary loss.

        Args:
            loss_sum: the sum over this micro-batch's terms, without :attr:`factor`; its gradient is not used.
            name: which of the counts by name it belongs to.
            weight: the factor of the name in :meth:`mean_loss`, as in :meth:`backward`.

        Raises:
            TypeError, ValueError, RuntimeError: see :meth:`backward`; for a second call, or one after that.
        """
        micro_batch = self._begin_own_backward()
        index, term = micro_batch.index, self._terms.get(name or "")
        try:
            if term is None:
                names = ", ".join(map(repr, self._terms)) if self._sums.are_named else None
                raise ValueError(expected(f"name of the recorded loss of micro-batch {index}", f"one of {names}", name))
            if term.name in micro_batch.recorded or micro_batch.num_calls:
                fix = "Add the values of a micro-batch, and record them before step.backward."
                what, got = "one call, before step.backward", Words("another one")
                raise RuntimeError(expected(f"recorded loss of micro-batch {index}", what, got, fix))
            micro_batch.recorded.add(term.name)
            value = check_scalar(loss_sum, "recorded loss", index)
            if isinstance(loss_sum, Tensor):
                self._check_sum(loss_sum, "recorded loss", index, term)
            self._sums.add(index, term, value, weight)
        except Exception as error:
            self._fail(error, is_due=False)

    def _current(self) -> MicroBatch:
        if self._micro_batch is None:
            fix = "Call it inside the loop over accumulate(...)."
            raise RuntimeError(expected("step", "a micro-batch of a window", Words("none: the loop was left"), fix))
        return self._micro_batch

    def _begin_own_backward(self) -> MicroBatch:
        """Exchange the header before the last backward; from now on a loss may back-propagate itself."""
        micro_batch = self._current()
        self._before = self._added = None
        self._is_watched = False  # gradients may come later
        if self._phase is Phase.LAST:
            self._close_window(is_early=True)
        return micro_batch

    def _check_naming(self, name: str, *, are_named: bool) -> None:
        if are_named != self._sums.are_named:
            what, got = ("counts by name", "one count")[:: 1 if are_named else -1]
            fix = "Use step.factors and step.mean_losses() with counts by name, step.factor without."
            raise RuntimeError(expected(name, what, Words(got), fix))

    def mean_loss(self) -> Tensor:
        """Return the loss of the window: its sum over all ranks and micro-batches, divided by N; 0 without terms.

        With counts by name the weighted sum of :meth:`mean_losses`. A detached scalar, the same on every rank, on the
        device and in the dtype of the losses, float32 for half precision. RuntimeError before the loop has ended.
        """
        self._check_ended("mean_loss")
        counted = [term for term in self._terms.values() if term.number]
        total = sum((term.weight or 0.0) * (term.total / term.number) for term in counted)
        return as_mean(total, 1.0, *self._sums.kind)

    def mean_losses(self) -> dict[str, Tensor]:
        """Return :meth:`mean_loss` by name, without the weights, for counts by name."""
        self._check_naming("mean_losses", are_named=True)
        self._check_ended("mean_losses")
        return {name: as_mean(term.total, term.number, *self._sums.kind) for name, term in self._terms.items()}

    def losses(self) -> Tensor:
        """Return the loss of each micro-batch, (G,): its sum over all ranks, divided by its terms on all ranks.

        For ``accumulate(..., each=True)``; G is the largest number of micro-batches of a rank. Otherwise like
        :meth:`mean_loss`.
        """
        if self._sums.each is None:
            got, fix = Words("one without it"), "Pass each=True to accumulate."
            raise RuntimeError(expected("losses", "a window with each=True", got, fix))
        self._check_ended("losses")
        sums, counts = self._sums.each.unbind(1)
        weights = torch.tensor([term.weight for term in self._terms.values()], dtype=torch.float64)
        means = torch.where(counts > 0, sums / counts, 0.0) * weights  # [G, names]
        dtype, device = self._sums.kind
        return means.sum(1).to(device, torch.promote_types(dtype, torch.float32))

    def _check_ended(self, name: str) -> None:
        if self._phase is not Phase.ENDED:
            fix = "Call it after the loop over accumulate(...), which must have run to its end."
            raise RuntimeError(expected(name, "a window that has ended", Words("one that has not"), fix))

    def _iterate(self) -> Iterator[tuple[Step, Any]]:
        """Switch the wrappers for each micro-batch, yield it with this step, and check that it had one backward."""
        window, wrappers = self._window, self._window.wrappers
        number = leave_last_loop(window.model) + 1
        LOOPS[window.model] = number, ref(self._switched)
        with self._switched as switched:
            if wrappers.unwrapped is None:
                switched.enter_context(wrappers.restored(quiet=window.sync != "each"))
            if window.sync == "each":
                wrappers.watch_forwards(broadcasts=False)  # in the first forward; the others follow a reduction
            switched.callback(setattr, self, "_micro_batch", None)
            # Windows 1, 2, 4, 8, ...: a program with such a mistake makes it from the first one on.
            self._is_watched = number & (number - 1) == 0
            if self._is_watched:
                self._before = Gradients(window.model)
                switched.callback(register_optimizer_step_pre_hook(self._note_optimizer).remove)
            if window.is_lockstep and window.ranks is not None:
                inside = set[nn.Module]()
                for module in [*wrappers.ddp, *wrappers.fsdp_modules] or [window.model]:
                    if module not in inside:
                        switched.callback(module.register_forward_hook(self._note_outputs).remove)
                        inside.update(module.modules())
            for index, batch in enumerate(window.micro_batches):
                if index == len(window.micro_batches) - 1:
                    self._phase = Phase.LAST
                reaches = self._phase is Phase.LAST or window.sync == "each" or bool(wrappers.fsdp)
                self._micro_batch = micro_batch = MicroBatch(index, window.switch(index), reaches)
                yield self, batch
                if self._micro_batch is None:
                    return  # the step raised, and the caller continued the loop
                if micro_batch.num_backward != 1:
                    self._check_own_backward(micro_batch)
                if Phase.LAST <= self._phase < Phase.CLOSED:
                    self._close_window()  # the last call of backward was left out, or its header came too early
            if not all(map(has_run_forward, micro_batch.unprepared)):
                discard_gradients_(window.model)
                raise unseen_forward("loss")
            self._phase = Phase.ENDED
        wrappers.watch_forwards(broadcasts=True)  # after the reduction
        if is_initialized():
            note_count(window.model, math.fsum([term.number for term in self._terms.values()]))

    def _check_own_backward(self, micro_batch: MicroBatch) -> None:
        """Check that the loss of ``micro_batch``, which has not had one backward of this step, had its own."""
        if micro_batch.num_calls or micro_batch.recorded != self._terms.keys():
            fix = (
                "Call step.backward(loss) once per iteration, or backward() on what step.scale(loss) returns, "
                "or step.record(loss_sum) for a loss that back-propagates itself."
            )
            text = expected(f"micro-batch {micro_batch.index}", "one backward", micro_batch.num_backward, fix)
            self._fail(RuntimeError(text), is_due=not (micro_batch.num_backward or micro_batch.recorded))
            return
        wrappers = self._window.wrappers
        is_unseen = wrappers.ddp and (not any(wrappers.forwards_seen) or wrappers.unprepared((), micro_batch.used))
        if is_unseen and self._phase is not Phase.OPEN:
            self._fail(unseen_forward("loss"), is_due=False)

    def _scale(
        self, loss: Losses, num_items: Numbers | None, weights: Weights | None, *, others_prepare: bool
    ) -> tuple[MicroBatch, Tensor]:
        """Return the micro-batch and what :meth:`scale` returns; see also :meth:`GradientSync.check_forwards`."""
        micro_batch = self._current()
        micro_batch.num_calls += 1
        if self._before is not None:
            self._added, self._before = self._before.check_added(), None
        elif self._is_watched and micro_batch.index and not [*gradients_of(self._window.model)]:
            fix = "Call optimizer.zero_grad() before the loop over accumulate(...)."
            what = f"gradients at the loss of micro-batch {micro_batch.index}"
            self._fail(RuntimeError(expected(what, "those of the micro-batches before", None, fix)), is_due=False)
        try:
            losses = self._losses_of(micro_batch, loss, num_items, weights)
            if micro_batch.reaches_wrappers:
                name = f"loss of micro-batch {micro_batch.index}"
                micro_batch.unprepared = self._window.wrappers.check_forwards(
                    name, losses.values(), micro_batch.used, others_prepare=others_prepare
                )
            items = {} if num_items is None else num_items if self._sums.are_named else {"": num_items}
            share = self._share(micro_batch.index, losses, items, weights or {})
        except Exception as error:
            given = [*loss.values()] if isinstance(loss, Mapping) else [loss]
            is_whole = not isinstance(loss, Mapping) or micro_batch.recorded.union(loss) >= self._terms.keys()
            self._fail(error, is_due=micro_batch.num_calls == 1, losses=given if is_whole else ())
            share = torch.zeros((), requires_grad=True)
        if self._phase is Phase.LAST:
            self._close_window()
        return micro_batch, share

    def _note_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if self._phase < Phase.AGREED and not stepped.isdisjoint(map(id, self._window.model.parameters())):
            what, fix = "a call after the last backward of the window", "Call it after the loop over accumulate(...)."
            self._fail(RuntimeError(expected("optimizer.step()", what, Words("one before"), fix)), is_due=False)

    def _losses_of(self, micro_batch: MicroBatch, loss: Any, num_items: Any, weights: Any) -> Mapping[str, Tensor]:
        """Check a micro-batch's call, and return its losses by name, in the order of the counts."""
        index, terms = micro_batch.index, self._terms
        if micro_batch.num_calls > 1:
            fix = "Add the losses of a micro-batch, then call it once."
            what = f"step of micro-batch {index}"
            raise RuntimeError(expected(what, "one call of backward or scale", micro_batch.num_calls, fix))
        if not self._sums.are_named:
            if weights is not None:
                raise ValueError(expected(f"weights of micro-batch {index}", "None without counts by name", weights))
            return {"": checked_sum(loss, "loss", index)}
        name = f"loss of micro-batch {index}"
        if not isinstance(loss, Mapping):
            raise TypeError(expected(name, f"a mapping of {[*terms]} to summed losses", loss))
        if not loss or loss.keys() | micro_batch.recorded != terms.keys():
            what = f"the names {[*terms]}, without those that were recorded"
            fix = "A micro-batch without terms of a name passes a sum of 0 with its graph."
            raise ValueError(expected(name, what, Words(str(list(loss))), fix))
        for what, given in (("weights", weights), ("num_items", num_items)):
            if given is not None and not (isinstance(given, Mapping) and given.keys() <= loss.keys()):
                what = f"{what} of micro-batch {index}"
                names = [term for term in terms if term in loss]
                raise ValueError(expected(what, f"a mapping of names among {names} to numbers", given))
        return {term: checked_sum(loss[term], "loss", index, term) for term in terms if term in loss}

    def _share(self, index: int, losses: Mapping[str, Tensor], num_items: Any, weights: Weights) -> Tensor:
        """Add the sums of micro-batch ``index``, and return the sum of ``weight * m * S / N``."""
        items: dict[str, Tensor | float] = {}
        share, empty = None, set()  # names without terms, as far as the host knows
        for name in losses:
            if name in num_items:
                items[name] = self._sums.add_items(index, self._terms[name], num_items[name])
            given = items.get(name, 1)
            if not self._terms[name].factor or not (isinstance(given, Tensor) or given):
                empty.add(name)
        for name, total in losses.items():
            term, number = self._terms[name], items.get(name)
            self._check_sum(total, "loss", index, term, may_be_mean=number is not None)
            if name in empty:
                total = zero_loss(total, [other for live, other in losses.items() if live not in empty])
            elif isinstance(number, Tensor):
                number = number.to(total.device, total.dtype)
                total = torch.where(number == 0, torch.zeros_like(total), total * number)
            elif number is not None:
                total = total * number
            part = total * (self._sums.add(index, term, total, weights.get(name, 1.0)) * term.factor)
            share = part if share is None else share + part
        assert share is not None
        return share

    def _check_sum(self, loss: Tensor, what: str, index: int, term: Term, *, may_be_mean: bool = False) -> None:
        """Raise ValueError for a loss that gathers or compares rows, or a mean, if the graph shows it."""
        over_ranks = self._window.ranks is not None
        error = not_a_sum(loss, self._mean_fix, what, index, term.name, over_ranks=over_ranks, may_be_mean=may_be_mean)
        if error is not None and not self._has_one_term(term, index):
            raise error
        count = term.counts[index] if self._is_watched and term.counts and not may_be_mean else 1
        if (isinstance(count, Tensor) and not count.is_cpu) or count == 1 or (divisor := divisor_of(loss)) is None:
            return
        if abs(divisor - float(count)) <= 1e-6 * divisor:
            term.divisors.add(float(count))
            if len(term.divisors) > 1:  # one number may divide a sum for any reason
                got = Words("one divided by the number of its terms, as in another micro-batch: a mean")
                raise ValueError(expected(named(what, index, term.name), "the sum over its terms", got, self._mean_fix))

    def _has_one_term(self, term: Term, index: int) -> bool:
        """Whether the micro-batch counts as one term, such as a sequence whose loss is a mean over its tokens."""
        if term.counts is not None:
            return bool(term.counts[index] == 1)
        return term.number == sum(self._window.num_micro_batches)

    def _note_outputs(self, module: nn.Module, inputs: object, outputs: object) -> None:
        if torch.compiler.is_compiling() or backward_is_running():  # a checkpoint recomputes a forward
            return
        # The hooks must not refer to the micro-batch: it refers to the graph, which would stay alive with them.
        micro_batch, reached = self._current(), self._current().reached
        micro_batch.outputs = micro_batch.outputs or []
        for place, tensor in enumerate(tensors_with_graph(outputs), len(micro_batch.outputs)):
            micro_batch.outputs.append(_root_of(tensor))
            tensor.register_hook(lambda _, place=place: reached.add(place))

    def _fail(self, error: Exception, *, is_due: bool, losses: Sequence[Tensor] = ()) -> None:
        """Store ``error`` for the closing header; raise it if none follows, or if this rank cannot get there.

        If the backward of the micro-batch ``is_due``, and the others communicate in theirs, zeros are back-propagated.
        ``losses`` are all that the micro-batch was to back-propagate.
        """
        window, wrappers, micro_batch = self._window, self._window.wrappers, self._current()
        is_due = is_due and not micro_batch.reached
        reduces = self._phase >= Phase.AGREED and bool(wrappers.ddp or wrappers.fsdp)
        is_awaited = is_due and (reduces or (window.is_lockstep and self._phase is Phase.OPEN))
        # If the loss itself is usable, back-propagate zeros from it, as the other ranks do from theirs.
        has_graph = bool(losses) and all(isinstance(loss, Tensor) and loss.requires_grad for loss in losses)
        is_usable = has_graph and not (micro_batch.reaches_wrappers and wrappers.unprepared(losses, micro_batch.used))
        roots = [*map(_root_of, losses)] if is_usable else micro_batch.outputs
        hangs = (is_awaited and not roots) or (is_due and wrappers.is_lockstep and micro_batch.outputs is None)
        if window.ranks is None or self._phase >= Phase.CLOSED or hangs:
            if self._phase < Phase.CLOSED:
                self._abandon()
            raise error
        self._error = self._error or error
        if is_awaited and roots:
            edges, zeros = zip(*roots)
            torch.autograd.backward(edges, [make() for make in zeros])

    def _close_window(self, *, is_early: bool = False) -> None:
        """Exchange a closing header; if any rank ``is_early``, before its last loss is known, another one follows."""
        call = f"{self._call} (end of the window)"
        bring = partial(self._sums.offer, self._error, self._added, is_early)
        try:
            is_last = self._sums.take(call, self._window.close(call, bring, is_early=is_early))
        except Exception:
            self._abandon()
            raise
        self._phase = Phase.CLOSED if is_last else Phase.AGREED

    def _abandon(self) -> None:
        """Discard the gradients of the window, unless no rank has run a backward, and reset the wrappers."""
        window = self._window
        numbers = window.num_micro_batches if window.ranks is not None else (self._current().index + 1,)
        if max(numbers) > 1 or self._phase >= Phase.AGREED:
            discard_gradients_(window.model)
        else:
            window.wrappers.forget_forwards()
        self._switched.close()  # not when the generator ends: the caller may keep it


def _root_of(tensor: Tensor) -> tuple[Any, Callable[[], Tensor]]:
    """Return where the backward of ``tensor`` begins, and what makes a gradient of zero for it, without the tensor."""
    zeros = partial(torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return get_gradient_edge(tensor), zeros
