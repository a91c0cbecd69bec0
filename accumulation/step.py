"""One window of :func:`accumulate` on this rank: the micro-batches, and the point at which all ranks raise one error.

The closing header comes before the last backward. This is the last point at which all ranks can raise the same error,
because DDP has not begun to reduce. A rank must not raise earlier: the others may be several micro-batches away from
any exchange. It stores the error and continues. Where the others communicate in their backward, it back-propagates
zeros from what the model has returned. Ranks outside the group, such as those of tensor parallelism, do not see the
error.

A loss that back-propagates itself reduces in its own backward. Its factor m / N is needed before that, so
``Step.factor`` exchanges the closing header when it is read in the last micro-batch. What is known only later, the loss
of that micro-batch and its errors, goes into one more header at the end of the loop. All ranks know of it from the
first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..distributed.group import is_initialized
from ..distributed.header import DeviceCheck
from ..distributed.torch_private import (
    back_propagate_zeros,
    backward_is_running,
    not_compiled,
    tensors_with_graph,
)
from ..errors import Words, expected
from ..gradients.all_reduce_grads import note_count
from ..gradients.when_reduced import LOOPS, discard_gradients_, leave_last_loop
from ..gradients.wrappers import unseen_forward
from .inner_backward import Gradients
from .summed_loss import SUM_UP, check_summed_loss, not_a_sum, total_of, zero_loss
from .token_count import check_scalar
from .window import Window
from .window_sums import Terms, WindowSums, named


class Step:
    """Back-propagates the micro-batches of one window. Made by :func:`accumulate`; one object for the whole window."""

    _call = "accumulate"
    _mean_fix = f"{SUM_UP}, or pass num_items=, the number of terms in the mean."

    def __init__(self, window: Window, terms: Terms, *, each: bool) -> None:
        self._window, self._terms = window, terms
        # m / N by name, 0 without terms.
        self._factors = {name: terms.multiplier / number if number else 0.0 for name, number in terms.numbers.items()}
        self._sums = WindowSums(window, terms, each=each)
        self._index = -1  # of the current micro-batch; -1 outside of the loop
        self._is_last = False
        self._num_calls = self._num_backward = 0  # in this micro-batch
        self._used: Sequence[bool] = ()  # see Window.switch
        self._before: Gradients | None = None  # the gradients at the start of the first micro-batch, if it is watched
        self._added: DeviceCheck | None = None  # that nothing was added to them before the call for it
        self._is_prepared = True  # False while the caller's framework must still prepare the reduction of DDP
        # Of the outermost wrappers in this micro-batch, if the ranks wait for each other in it: whether a forward has
        # run, what it has returned, and whether a backward has begun there.
        self._has_forward = self._has_backward = False
        self._outputs: list[Any] = []
        self._error: Exception | None = None  # the first one, for the closing header
        self._is_agreed = False  # whether the header before the last backward was exchanged
        self._is_closed = False  # whether no header follows
        self._has_ended = False
        self._recorded: set[str] = set()  # names in this micro-batch
        self._switched = ExitStack()  # restores the wrappers' switches

    @not_compiled
    def backward(
        self,
        loss: Tensor | Mapping[str, Tensor],
        *,
        num_items: Tensor | float | Mapping[str, Tensor | float] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Back-propagate this micro-batch's share of the window's loss; once per micro-batch.

        Args:
            loss: scalar, the *sum* of the losses of this micro-batch's terms, such as with ``reduction="sum"``. With
                counts by name a mapping of all names to sums, except for those that were passed to :meth:`record`. A
                name without terms in the window counts 0, even when its loss is NaN.
            num_items: the number of terms if ``loss`` is their *mean* instead. A mean over 0 terms is NaN; it adds
                nothing to value and gradient. The host does not read a tensor: for a tensor of 0 the gradient is zero
                only if the loss turns a gradient of 0 into zeros. torch's losses do, a division by that 0 does not.
                With counts by name a mapping of the names that are means.
            weights: the factors of the names in the loss of the window, 1 for the others; the same in every
                micro-batch and on every rank.

        Raises:
            TypeError: when ``loss`` is not a floating-point tensor, or a mapping where there are counts by name; when
                ``num_items`` or a weight is not a number.
            ValueError: for names that are unknown or missing; for weights that change or differ between ranks; for a
                ``loss`` that is not a scalar, has no graph, or is not from the forward of the DDP module; for a mean
                without ``num_items``, if the graph shows that it is a mean, unless the micro-batch counts as one term;
                for the mean of a loss that compares rows or balances classes, which is for ``pooled_backward``;
                for ``num_items`` that are negative, or not the count of the micro-batch if ``count`` is a function.
            RuntimeError: for a micro-batch with two calls, or with none; for a loss that has back-propagated inside
                itself, as chunked cross-entropies do, without :attr:`factor`: that part is not divided by the count.
                It is looked for in the first micro-batch of windows 1, 2, 4, 8, ... of a model. Gradients that you add
                yourself, such as those of a penalty, belong after this call.

        Distributed:
            The call for the last micro-batch exchanges one header before it back-propagates. If any rank has failed
            since the window began, every rank raises that error there, and the gradients of the model are discarded. A
            rank raises alone only if it has run no forward of the model where the others communicate in theirs or in
            their backward, as under FSDP2 or ``sync="each"``.
        """
        share = self._scale(loss, num_items, weights, others_prepare=False)
        self._num_backward += 1
        share.backward()

    @not_compiled
    def scale(
        self,
        loss: Tensor | Mapping[str, Tensor],
        *,
        num_items: Tensor | float | Mapping[str, Tensor | float] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Tensor:
        """Return the tensor that :meth:`backward` calls ``backward()`` on, for callers that must do that themselves.

        Use ``scaler.scale(step.scale(loss)).backward()`` with a ``GradScaler``. With an Accelerator use
        ``accelerator.backward(step.scale(loss))`` and ``gradient_accumulation_steps=1``; otherwise it divides again.
        Arguments and errors are those of :meth:`backward`. The header is exchanged in this call.
        """
        share = self._scale(loss, num_items, weights, others_prepare=True)

        def count(grad: Tensor) -> None:
            self._num_backward += 1

        share.register_hook(count)
        return share

    @property
    @not_compiled
    def factor(self) -> float:
        """The factor m / N of the window's loss, for a loss that back-propagates itself; 0.0 without terms.

        N is the count over all ranks and micro-batches, m the number that gradients are divided by. Multiply by it what
        is back-propagated without :meth:`backward`: the chunks of a chunked cross-entropy, or an auxiliary loss whose
        gradient is added inside the forward. Pass the value of such a loss to :meth:`record`.

        Raises:
            RuntimeError: outside of the loop; with counts by name.

        Distributed:
            In the last micro-batch the first reading exchanges the header that :meth:`backward` exchanges otherwise,
            and the end of the loop exchanges another one. Read it on every rank at the same place, under FSDP2 before
            the forward. An error that a rank makes before is raised here, on every rank. One made later is raised at
            the end of the loop, when the gradients have been reduced; they are discarded.
        """
        self._check_naming("factor", are_named=False)
        self._begin_own_backward()
        return self._factors[""]

    @property
    @not_compiled
    def factors(self) -> dict[str, float]:
        """What :attr:`factor` is, by name, for counts by name; without the weights."""
        self._check_naming("factors", are_named=True)
        self._begin_own_backward()
        return dict(self._factors)

    @not_compiled
    def record(self, loss_sum: Tensor | float, name: str | None = None, *, weight: float = 1.0) -> None:
        """Add a summed loss to :meth:`mean_loss` without a backward; at most once per micro-batch, or name of it.

        Call it in place of :meth:`backward` for a loss that back-propagates itself, also on a rank without terms. Call
        it before :meth:`backward` for a further term that has its gradient from elsewhere, such as an auxiliary loss.

        Args:
            loss_sum: the sum over this micro-batch's terms, without :attr:`factor`; its gradient is not used.
            name: which of the counts by name it belongs to.
            weight: the factor of the name in :meth:`mean_loss`, as in :meth:`backward`.

        Raises:
            TypeError, ValueError: for what is not a number, or an unknown name; see also :meth:`backward`.
            RuntimeError: for a second call, or one after :meth:`backward`.
        """
        self._begin_own_backward()
        where, term = f"recorded loss of micro-batch {self._index}", name or ""
        try:
            if term not in self._terms.numbers:
                names = Words(", ".join(map(repr, self._terms.numbers))) if self._terms.are_named else None
                raise ValueError(expected(f"name of the {where}", f"one of {names}", name))
            if term in self._recorded or self._num_calls:
                fix = "Add the values of a micro-batch, and record them before step.backward."
                raise RuntimeError(expected(where, "one call, before step.backward", Words("another one"), fix))
            self._recorded.add(term)
            value = check_scalar(where, loss_sum)
            if isinstance(loss_sum, Tensor):
                self._check_sum(where, loss_sum, term)
            self._sums.add(self._index, term, value, weight)
        except Exception as error:
            self._store_or_raise(error, is_due=False)

    def _begin_own_backward(self) -> None:
        """Exchange the header before the last backward, and look no longer for a loss that back-propagates itself."""
        self._check_inside()
        self._before = self._added = None
        if self._is_last and not self._is_agreed:
            self._close_window(is_early=True)

    def _check_inside(self) -> None:
        if self._index < 0:
            fix = "Call it inside the loop over accumulate(...)."
            raise RuntimeError(expected("step", "a micro-batch of a window", Words("none: the loop was left"), fix))

    def _check_naming(self, name: str, *, are_named: bool) -> None:
        if are_named != self._terms.are_named:
            what, got = ("counts by name", "one count")[:: 1 if are_named else -1]
            fix = "Use step.factors and step.mean_losses() with counts by name, step.factor without."
            raise RuntimeError(expected(name, what, Words(got), fix))

    def _scale(
        self,
        loss: Tensor | Mapping[str, Tensor],
        num_items: Tensor | float | Mapping[str, Tensor | float] | None,
        weights: Mapping[str, float] | None,
        *,
        others_prepare: bool,
    ) -> Tensor:
        """Return what :meth:`scale` returns; ``others_prepare`` as in :meth:`GradientSync.check_forwards`."""
        self._check_inside()
        self._num_calls += 1
        if self._before is not None:
            self._added, self._before = self._before.check_added(), None
        try:
            losses = self._losses_of(loss, num_items, weights)
            items: Any = {} if num_items is None else num_items if self._terms.are_named else {"": num_items}
            share = self._checked_share(losses, items, weights or {}, others_prepare)
        except Exception as error:
            given = [*loss.values()] if isinstance(loss, Mapping) else [loss]
            is_whole = not isinstance(loss, Mapping) or self._recorded.union(loss) >= self._terms.numbers.keys()
            has_graph = all(isinstance(each, Tensor) and each.requires_grad for each in given)
            if given and is_whole and has_graph and self._is_prepared:
                self._outputs = given  # with the graph that the other ranks have
            self._store_or_raise(error, is_due=self._num_calls == 1)
            share = torch.zeros((), requires_grad=True)
        if self._is_last and not self._is_agreed:
            self._close_window()
        return share

    def mean_loss(self) -> Tensor:
        """Return the loss of the window: its sum over all ranks and micro-batches, divided by N.

        With counts by name it is the weighted sum of :meth:`mean_losses`. A detached scalar on the device and in the
        dtype of the losses, float32 for half precision; 0 without terms. It is the same on every rank of the group over
        which the terms were counted, and costs no communication.

        Raises:
            RuntimeError: before the loop has ended, or when it was left early.
        """
        self._check_ended("mean_loss")
        return self._sums.mean()

    def mean_losses(self) -> dict[str, Tensor]:
        """Return :meth:`mean_loss` by name, without the weights, for counts by name."""
        self._check_naming("mean_losses", are_named=True)
        self._check_ended("mean_losses")
        return self._sums.means()

    def losses(self) -> Tensor:
        """Return the loss of each micro-batch, (G,): its sum over all ranks, divided by its terms on all ranks.

        With counts by name the weighted sum. G is the largest number of micro-batches of a rank. Like :meth:`mean_loss`
        otherwise.

        Raises:
            RuntimeError: without ``accumulate(..., each=True)``; before the loop has ended, or when it was left early.
        """
        losses = self._sums.of_each()
        if losses is None:
            got, fix = Words("one without it"), "Pass each=True to accumulate."
            raise RuntimeError(expected("losses", "a window with each=True", got, fix))
        self._check_ended("losses")
        return losses

    def _check_ended(self, name: str) -> None:
        if not self._has_ended:
            fix = "Call it after the loop over accumulate(...), which must have run to its end."
            raise RuntimeError(expected(name, "a window that has ended", Words("one that has not"), fix))

    def _iterate(self) -> Iterator[tuple[Step, Any]]:
        """Switch the wrappers for each micro-batch, yield it with this step, and check that it had one backward."""
        window = self._window
        number = leave_last_loop(window.model) + 1
        LOOPS[window.model] = number, ref(self._switched)
        with self._switched as switched:
            if window.wrappers.unwrapped is None:
                switched.enter_context(window.wrappers.restored(quiet=window.sync != "each"))
            if window.sync == "each":
                window.wrappers.expect_broadcasts(False)  # in the first forward; the others follow a reduction
            switched.callback(setattr, self, "_index", -1)
            # Windows 1, 2, 4, 8, ...: a loss that back-propagates inside itself does so from the first one on.
            self._before = Gradients(window.model) if number & (number - 1) == 0 else None
            if window.is_lockstep and window.ranks is not None:
                wrappers, inside = window.wrappers, set[nn.Module]()
                switched.callback(setattr, self, "_outputs", [])
                for module in [*wrappers.ddp, *wrappers.fsdp_modules] or [window.model]:
                    if module not in inside:
                        switched.callback(module.register_forward_hook(self._note_outputs).remove)
                        inside.update(module.modules())
            for index, micro_batch in enumerate(window.micro_batches):
                self._index, self._is_last = index, index == len(window.micro_batches) - 1
                self._num_calls = self._num_backward = 0
                self._has_forward, self._has_backward, self._outputs = False, False, []
                self._recorded.clear()
                self._used = window.switch(index)
                yield self, micro_batch
                if self._index < 0:
                    return  # the step raised, and the caller continued the loop
                # Whether the loss has back-propagated itself.
                is_own = self._num_calls == 0 and self._recorded == self._terms.numbers.keys()
                if self._num_backward != 1 and not is_own:
                    fix = (
                        "Call step.backward(loss) once per iteration, or backward() on what step.scale(loss) returns, "
                        "or step.record(loss_sum) for a loss that back-propagates itself."
                    )
                    text = expected(f"micro-batch {index}", "one backward", self._num_backward, fix)
                    self._store_or_raise(RuntimeError(text), is_due=not (self._num_backward or self._recorded))
                elif is_own and self._is_last and not self._has_used_ddp():
                    self._store_or_raise(unseen_forward("loss"), is_due=False)
                if self._is_last and not self._is_closed:
                    self._close_window()  # the last call of backward was left out, or its header came too early
            if not (self._is_prepared or all(window.wrappers.forwards_seen)):
                discard_gradients_(window.model)
                raise unseen_forward("loss")
            self._has_ended = True
        window.wrappers.leave_as_reduced()
        if is_initialized():
            note_count(window.model, math.fsum(self._terms.numbers.values()))

    def _losses_of(self, loss: Any, num_items: object, weights: object) -> dict[str, Tensor]:
        """Check a micro-batch's call, and return its losses by name, in the order of the counts."""
        name, numbers = f"loss of micro-batch {self._index}", self._terms.numbers
        if self._num_calls > 1:
            fix = "Add the losses of a micro-batch, then call it once."
            what = f"step of micro-batch {self._index}"
            raise RuntimeError(expected(what, "one call of backward or scale", self._num_calls, fix))
        if not self._terms.are_named:
            if weights is not None:
                what = f"weights of micro-batch {self._index}"
                raise ValueError(expected(what, "None without counts by name", weights))
            check_summed_loss(name, loss)
            return {"": loss}
        if not isinstance(loss, Mapping):
            raise TypeError(expected(name, f"a mapping of {list(numbers)} to summed losses", loss))
        losses = {term: loss[term] for term in numbers if term in loss}
        if len(losses) < len(loss) or not losses or losses.keys() | self._recorded != numbers.keys():
            what = f"the names {list(numbers)}, without those that were recorded"
            fix = "A micro-batch without terms of a name passes a sum of 0 with its graph."
            raise ValueError(expected(name, what, Words(str(list(loss))), fix))
        for what, given in (("weights", weights), ("num_items", num_items)):
            if given is not None and not (isinstance(given, Mapping) and given.keys() <= losses.keys()):
                name = f"{what} of micro-batch {self._index}"
                raise ValueError(expected(name, f"a mapping of names among {list(losses)} to numbers", given))
        for term, each in losses.items():
            check_summed_loss(named(name, term), each)
        return losses

    def _checked_share(
        self,
        losses: dict[str, Tensor],
        num_items: Mapping[str, Tensor | float],
        weights: Mapping[str, float],
        others_prepare: bool,
    ) -> Tensor:
        """Check the losses of a micro-batch, record their sums, and return the sum of ``weight * m * S / N``."""
        name = f"loss of micro-batch {self._index}"
        wrappers = self._window.wrappers
        if self._is_last or self._window.sync == "each" or wrappers.fsdp:
            self._is_prepared = False  # until the check has passed
            first, *others = losses.values()
            graph = sum(others, first)
            self._is_prepared = wrappers.check_forwards(name, graph, self._used, others_prepare=others_prepare)
        items: dict[str, Tensor | float] = {}
        for term, given in num_items.items():
            items[term] = self._sums.add_items(self._index, term, given)

        def is_empty(term: str) -> bool:  # as far as the host knows
            number = items.get(term, 1)
            return not self._factors[term] or not (isinstance(number, Tensor) or number)

        share = None
        for term, loss in losses.items():
            number, weight = items.get(term), weights.get(term, 1.0)
            self._check_sum(name, loss, term, may_be_mean=number is not None)
            total = total_of(loss)
            if is_empty(term):
                total = zero_loss(total, [each for other, each in losses.items() if not is_empty(other)])
            elif isinstance(number, Tensor):
                number = number.to(total.device, total.dtype)
                total = torch.where(number == 0, torch.zeros_like(total), total * number)
            elif number is not None:
                total = total * number
            self._sums.add(self._index, term, total, weight)
            part = total * (weight * self._factors[term])
            share = part if share is None else share + part
        assert share is not None
        return share

    def _check_sum(self, name: str, loss: Tensor, term: str, *, may_be_mean: bool = False) -> None:
        """Raise ValueError for a loss that gathers or compares rows, or a mean, if the graph shows it."""
        over_ranks = self._window.ranks is not None
        error = not_a_sum(named(name, term), loss, self._mean_fix, over_ranks=over_ranks, may_be_mean=may_be_mean)
        if error is not None and not self._has_one_term(term):
            raise error

    def _has_used_ddp(self) -> bool:
        """Whether DDP has prepared to reduce in this micro-batch what it has computed in the window."""
        seen = self._window.wrappers.forwards_seen
        return not seen or (any(seen) and not any(used and not now for used, now in zip(self._used, seen)))

    def _has_one_term(self, term: str) -> bool:
        """Whether this micro-batch counts as one term, such as a sequence whose loss is a mean over its tokens."""
        counts, window = self._terms.counts[term], self._window
        whole = self._terms.numbers[term] == sum(window.num_micro_batches)
        return whole if counts is None else bool(counts[self._index] == 1)

    def _note_outputs(self, module: nn.Module, inputs: object, outputs: object) -> None:
        """Note where the backward of a forward begins."""
        if torch.compiler.is_compiling() or backward_is_running():  # a checkpoint recomputes a forward
            return

        def note(grad: Tensor) -> None:
            self._has_backward = True

        self._has_forward = True
        for tensor in tensors_with_graph(outputs):
            self._outputs.append(get_gradient_edge(tensor))
            tensor.register_hook(note)

    def _store_or_raise(self, error: Exception, *, is_due: bool) -> None:
        """Store ``error`` for the closing header; raise it if none follows, or if this rank cannot get there.

        If the backward of the micro-batch ``is_due``, and the others communicate in theirs, zeros are back-propagated.
        """
        window, wrappers = self._window, self._window.wrappers
        is_due = is_due and not self._has_backward
        reduces = self._is_agreed and bool(wrappers.ddp or wrappers.fsdp)
        is_awaited = is_due and (reduces or (window.is_lockstep and not self._is_last))
        hangs = (is_awaited and not self._outputs) or (is_due and wrappers.is_lockstep and not self._has_forward)
        if window.ranks is None or self._is_closed or hangs:
            if not self._is_closed:
                self._abandon()
            raise error
        self._error = self._error or error
        if is_awaited:
            back_propagate_zeros(self._outputs)

    def _close_window(self, *, is_early: bool = False) -> None:
        """Exchange a closing header and note what follows; see :meth:`WindowSums.exchange`."""
        try:
            self._is_closed = self._sums.exchange(self._call, is_early=is_early, error=self._error, check=self._added)
        except Exception:
            self._abandon()
            raise
        self._is_agreed = True

    def _abandon(self) -> None:
        """Discard the gradients of the window, unless no rank has run a backward, and reset the wrappers."""
        window = self._window
        has_begun = self._index > 0 if window.ranks is None else max(window.num_micro_batches) > 1
        if has_begun or self._is_agreed:
            discard_gradients_(window.model)
        else:
            window.wrappers.forget_forwards()
        self._switched.close()  # not when the generator ends: the caller may keep it
