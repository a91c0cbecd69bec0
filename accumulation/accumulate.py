"""Accumulation of summed losses over micro-batches and ranks, with one division by one global count.

The loss of a window is ``(sum over ranks and micro-batches of S) / N``. The ranks count N before the first backward,
and each micro-batch back-propagates ``m * S / N``, where m is the number that the wrapper divides gradients by.

What happens in a window, on every rank and whatever the data::

    opening header      number of micro-batches, local count, what must be equal        open_window
    all but the last    forward, backward: only the wrapper communicates                Step._iterate
    the last            forward
    closing header      sum of losses, and any error of this rank since the opening     Step._close_window
    the last            backward, in which the wrapper reduces

The closing header comes before the last backward. This is the last point at which all ranks can raise the same error,
because DDP has not begun to reduce. A rank must not raise earlier: the others may be several micro-batches away from
any exchange. It stores the error, runs a backward of zeros instead, and continues. Ranks outside the group, such as
those of tensor parallelism, do not see the error.

A loss that back-propagates itself reduces in its own backward. Its factor m / N is needed before that, so
``Step.factor`` exchanges the closing header when it is read in the last micro-batch. What is known only later, the loss
of that micro-batch and its errors, goes into one more header at the end of the loop. All ranks know of it from the
first one.

A header and a collective of the wrapper must never meet in the same group. DDP and plain modules communicate nothing
between the two headers, so their ranks may skip a micro-batch or have different numbers of them. FSDP2, SyncBatchNorm
and sync="each" communicate in every micro-batch, so different numbers are refused. DDP's first forward would rebuild
buckets and broadcast buffers; this happens right after the opening header instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..distributed.gather import gather_after
from ..distributed.group import Group, group_ranks, header_device, is_initialized
from ..distributed.header import NUM_TOTALS, DeviceCheck, Offer, agree_on, combined, digest
from ..distributed.torch_private import is_mean, is_over_ranks, not_compiled
from ..errors import RankValueError, Words, check_amount, check_number, check_positive, expected
from ..gradients.all_reduce_grads import note_count
from ..gradients.when_reduced import discard_gradients_
from ..gradients.wrappers import unseen_forward
from ..kernels.documents import note_token_range
from .inner_backward import Gradients, gradients_to_watch
from .token_count import TokenRule, as_numbers, check_amounts, check_scalar, counts_of, sums_of, token_rule
from .window import Window, open_window

B = TypeVar("B")

SUM_UP = 'Sum it up, as with reduction="sum"'
# Relative tolerance between the sum of num_items and the count: integers agree exactly, float32 sums of weights do not.
_ROUNDING = 1e-5
MAX_TERMS = NUM_TOTALS - 3  # with counts of their own; a header has two totals of num_items and one of Step.factor too

Count = Callable[[Any], Tensor | float] | Tensor | float


@not_compiled
def accumulate(
    model: nn.Module,
    micro_batches: Sequence[B],
    count: Count | Mapping[str, Count],
    *,
    group: Group = None,
    sync: str = "last",
    multiplier: float | None = None,
    each: bool = False,
) -> Iterator[tuple[Step, B]]:
    r"""Loop over the micro-batches of one optimizer step, for a loss that is a sum divided by a count.

    .. math:: \frac{\sum_r \sum_g S_{rg}}{\sum_r \sum_g n_{rg}}

    over ranks r and micro-batches g: the value that one process computes from the whole batch. The usual mean of the
    micro-batches' means gives a micro-batch of 100 tokens the same weight as one of 900. ::

        for micro_batches in windows(loader, 4):
            optimizer.zero_grad()
            for step, batch in accumulate(model, micro_batches, count_valid_tokens):
                step.backward(loss_sum(model(batch), batch))
            optimizer.step()
            log(step.mean_loss())

    Args:
        model: a plain module, a module with DDP, FSDP2 or HSDP anywhere in it, or a part of a model under FSDP2. How it
            reduces gradients is read and not changed. Under DDP pass the DDP module, not its ``module``.
        micro_batches: the window, a list such as :func:`windows` cuts; at least one micro-batch on every rank.
        count: the number of terms that the losses sum. Pass a function that takes a micro-batch and returns its number
            of terms, or the sum of their weights, on this rank; or :func:`count_valid_tokens`, with keywords bound by
            ``functools.partial``; or one number that already covers all ranks and micro-batches. For several losses
            with counts of their own, at most 5, pass a mapping of names to counts: the loss of the window is the sum
            over the names of :math:`w S / N`, see :meth:`Step.backward`.
        group: the ranks that hold different rows. None is the ranks over which ``model`` reduces its gradients, or the
            default group if no wrapper reduces them. Pass the larger group if context parallelism is outside of the
            wrapper's mesh. A model without a wrapper requires it on several ranks: it says that you add up the
            gradients.
        sync: when gradients are reduced: after the ``"last"`` micro-batch; after ``"each"``, which takes less memory
            under FSDP2; or for HSDP ``"shard"``, over the shards after each and over the replicas after the last.
        multiplier: the number that gradients are divided by after the loss, such as in a hook; None to read it from
            ``model``.
        each: let :meth:`Step.losses` return the loss of each micro-batch too. ``count`` must be a function.

    Returns:
        An iterator over ``(step, micro_batch)``. ``step`` is the same :class:`Step` throughout: call
        ``step.backward(loss_sum)`` once per micro-batch, ``step.mean_loss()`` after the loop.

    Raises:
        TypeError: for micro-batches without a length, such as a generator; for a bad ``count``.
        ValueError: when a rank has no micro-batch; when the ranks have different numbers of them and each communicates
            (FSDP2, HSDP, SyncBatchNorm, ``sync="each"``); for counts that are negative or not finite; for gradients
            that are divided by several numbers (experts: see :func:`sum_gradients_`); for gradients that no wrapper
            reduces on several ranks, unless you pass ``group``, or ``multiplier`` for a model without any wrapper; for
            DDP with ``static_graph`` whose very first backward would not reduce; for arguments that differ between
            ranks.

    Degenerate: with a count of 0 over all ranks every gradient exists and is 0, even when losses are NaN. A rank or a
        micro-batch without terms takes part like any other.
    Numerics: N in float64. The scaled loss is in the dtype of the loss, float32 for half precision.
    Distributed: one header before the first micro-batch and one in the last. The host reads the counts from the device
        once for the first, and the losses once for the second. One reduction of the gradients with ``sync="last"``.
        Errors are raised on every rank, see :meth:`Step.backward`. Without a process group, or with one rank, nothing
        is exchanged. Leave the loop early on every rank or on none, and then call :func:`discard_gradients_`. With
        ``each`` the sums travel with the second header; in the first window, and on an accelerator, in a payload of
        their own behind it.

    Example:
        >>> import torch
        >>> model, rows = torch.nn.Linear(1, 1, bias=False), [torch.tensor([[1.0]]), torch.tensor([[2.0], [6.0]])]
        >>> for step, batch in accumulate(model, rows, len):
        ...     step.backward(model(batch).sum())
        >>> model.weight.grad
        tensor([[3.]])
    """

    def bring(window: Window) -> Offer[tuple[Terms, list[TokenRule]]]:
        window.wrappers.check_managed(others_reduce=group is not None, multiplier=multiplier)
        window.wrappers.check_group(group)
        factor = window.wrappers.multiplier if multiplier is None else check_positive("multiplier", multiplier)
        terms, rules, checks = Terms({}, {}, factor), [], []
        if not isinstance(each, bool):
            raise TypeError(expected("each", "True or False", each))
        facts: dict[str, object] = {"multiplier": factor, "each": each}
        for name, one in _named_counts(count):
            label = _label("count", name)
            terms.numbers[name], terms.counts[name], facts[label] = _count(window, one, label)
            if each and terms.counts[name] is None:
                fix = "The number over all ranks does not say how many terms a micro-batch has."
                raise ValueError(expected(label, "a function with each=True", one, fix))
            if (rule := token_rule(one)) is not None:
                rules.append(rule)
            elif (counts := terms.counts[name]) is not None:
                names = [f"{label} of micro-batch {index}" for index in range(len(counts))]
                checks.append(check_amounts(names, counts, window.ranks))
        lists = [terms.counts[name] or [number] for name, number in terms.numbers.items()]
        ends = [] if _are_on_host(*lists) else _ends(window, rules)
        check = combined([each for each in checks if each is not None])
        totals = sums_of([*lists, *([end] for end in ends)], window.ranks)
        return Offer((terms, rules if ends else []), facts, totals=totals, check=check)

    window, (terms, rules), totals = open_window(
        "accumulate", model, micro_batches, sync=sync, group=group, multiplier=multiplier, bring=bring
    )
    if sync == "each":
        window.check_equal_numbers()  # a plain model too: a hook may reduce after each
    for place, name in enumerate(terms.numbers):
        if terms.counts[name] is not None:
            terms.numbers[name] = math.fsum(row[place] for row in totals)
    for rule in rules:
        low, high = totals[0 if window.ranks is None else window.ranks.rank()][len(terms.numbers) :][:2]
        for micro_batch in window.micro_batches:
            note_token_range(rule.labels(micro_batch)[0], rule.ignore_index, int(low), int(high))
    return Step(window, terms, each)._iterate()


class Terms(NamedTuple):
    """The counts and the multiplier of a window, by the names of the losses; a loss without a name has the name ""."""

    numbers: dict[str, float]  # N, over all ranks and micro-batches
    counts: dict[str, list[Tensor | float] | None]  # of this rank's micro-batches; None when the caller passed N
    multiplier: float  # m

    def factor(self, name: str) -> float:
        """Return m / N, or 0 without terms."""
        return self.multiplier / self.numbers[name] if self.numbers[name] else 0.0

    @property
    def are_named(self) -> bool:
        return "" not in self.numbers


def _named_counts(count: Any) -> list[tuple[str, Any]]:
    """Return the counts with their names, in an order that is the same on every rank."""
    if not isinstance(count, Mapping):
        return [("", count)]
    if not all(isinstance(name, str) and name for name in count):
        raise TypeError(expected("count", "names that are not empty, each with a count", list(count)))
    if not 0 < len(count) <= MAX_TERMS:
        raise ValueError(expected("count", f"one to {MAX_TERMS} names", len(count), "Add up losses of equal counts."))
    return sorted(count.items())


def _label(what: str, name: str) -> str:
    return f"{what} of {name!r}" if name else what


def _are_on_host(*lists: Sequence[Tensor | float]) -> bool:
    return all(not isinstance(value, Tensor) or value.is_cpu for values in lists for value in values)


def _ends(window: Window, rules: Sequence[TokenRule]) -> list[Tensor]:
    """Return the least and the largest label of the window, with which the loss need not check them again."""
    ranges = [found for rule in rules if (found := rule.token_range(window.micro_batches)) is not None]
    if not ranges:
        return []
    if len(ranges) == 1:
        return [*ranges[0]]
    lows, highs = zip(*ranges)
    return [torch.stack(lows).amin(), torch.stack(highs).amax()]


def _count(window: Window, count: Any, label: str) -> tuple[float, list[Tensor | float] | None, object]:
    """Return the number of terms if it was given, or that of each micro-batch; and what must be equal on all ranks."""
    rule = token_rule(count)
    count_terms = count if rule is None else rule.num_valid
    if callable(count_terms):
        counts = counts_of(window.micro_batches, count_terms, label)
        # The ranks cannot compare functions: each rank has an object of its own.
        return 0.0, counts, rule or Words("a function")
    if isinstance(count, (Tensor, int, float)) and not isinstance(count, bool):
        number = float(check_amount(label, as_numbers([check_scalar(label, count)])[0]))
        # The number covers all ranks. Ranks that pass different numbers have counted only their own rows.
        return number, None, Words(f"{number:.17g} over all ranks")
    what = "a function of a micro-batch, count_valid_tokens, or the number of terms over all ranks"
    raise TypeError(expected(label, what, count))


class Step:
    """Back-propagates the micro-batches of one window. Made by :func:`accumulate`; one object for the whole window."""

    _call = "accumulate"
    _items_name = "num_items"
    _mean_fix = f"{SUM_UP}, or pass num_items=, the number of terms in the mean."

    def __init__(self, window: Window, terms: Terms, each: bool) -> None:
        self._window, self._terms = window, terms
        # (G, 2, names) with ``each``: the sums of each micro-batch, and its counts.
        self._each: Tensor | None = None
        if each:
            counts = torch.tensor([as_numbers(each) for each in terms.counts.values() if each], dtype=torch.float64).T
            self._each = torch.stack([torch.zeros_like(counts), counts], dim=1)
        self._index = -1  # of the current micro-batch; -1 outside of the loop
        self._is_last = False
        self._num_calls = self._num_backward = 0  # in this micro-batch
        # The sums, with micro-batch and name; the device is read when the window closes.
        self._losses: list[tuple[int, str, Any]] = []
        self._weights: dict[str, float] = {}  # of the names in the loss of the window
        self._items: list[Tensor | float] = []
        self._used: Sequence[bool] = ()  # see Window.switch
        self._before: Gradients | None = None  # the gradients at the start of the first micro-batch, if it is watched
        self._num_added: Tensor | None = None  # of elements of them, before the call for it
        self._is_prepared = True  # False while the caller's framework must still prepare the reduction of DDP
        self._error: Exception | None = None  # the first one, for the closing header
        self._is_agreed = False  # whether the header before the last backward was exchanged
        self._is_closed = False  # whether no header follows
        self._has_ended = False
        self._recorded: set[str] = set()  # names in this micro-batch
        self._kind = torch.get_default_dtype(), torch.device("cpu")  # of the losses
        self._switched = ExitStack()  # restores the wrappers' switches
        self._totals = dict.fromkeys(terms.numbers, 0.0)  # sums of the losses over all ranks
        self._num_items = self._num_with_items = 0.0  # the sum of num_items, and their number

    @not_compiled
    def backward(
        self,
        loss: Tensor | Mapping[str, Tensor],
        *,
        num_items: Tensor | float | None = None,
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
                Not for counts by name.
            weights: the factors of the names in the loss of the window, 1 for the others; the same in every
                micro-batch and on every rank.

        Raises:
            TypeError: when ``loss`` is not a floating-point tensor, or a mapping where there are counts by name; when
                ``num_items`` or a weight is not a number.
            ValueError: for names that are unknown or missing; for weights that change or differ between ranks; for a
                ``loss`` that is not a scalar, has no graph, or is not from the forward of the DDP module; for a mean
                without ``num_items``, if the graph shows that it is a mean, unless the micro-batch counts as one term;
                for ``num_items`` that are negative or do not add up to the count.
            RuntimeError: for a micro-batch with two calls, or with none; for a loss that has back-propagated inside
                itself, as chunked cross-entropies do, without :attr:`factor`: that part is not divided by the count.
                It is looked for in the first micro-batch of windows 1, 2, 4, 8, ... of a model. Gradients that you add
                yourself, such as those of a penalty, belong after this call.

        Distributed:
            The call for the last micro-batch exchanges one header before it back-propagates. If any rank has failed
            since the window began, every rank raises that error there, and the gradients of the model are discarded. A
            rank raises alone only if the others wait for a backward that it cannot run: one whose loss has no graph,
            under FSDP2 or ``sync="each"``.
        """
        share = self._scale(loss, num_items, weights, others_prepare=False)
        self._num_backward += 1
        share.backward()

    @not_compiled
    def scale(
        self,
        loss: Tensor | Mapping[str, Tensor],
        *,
        num_items: Tensor | float | None = None,
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
        return self._terms.factor("")

    @property
    @not_compiled
    def factors(self) -> dict[str, float]:
        """What :attr:`factor` is, by name, for counts by name; without the weights."""
        self._check_naming("factors", are_named=True)
        self._begin_own_backward()
        return {name: self._terms.factor(name) for name in self._terms.numbers}

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
            self._keep_loss(value, term, weight)
        except Exception as error:
            self._store_or_raise(error, runs_backward=True)

    def _begin_own_backward(self) -> None:
        """Exchange the header before the last backward, and look no longer for a loss that back-propagates itself."""
        self._check_inside()
        self._before = self._num_added = None
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
        num_items: Tensor | float | None,
        weights: Mapping[str, float] | None,
        *,
        others_prepare: bool,
    ) -> Tensor:
        """Return what :meth:`scale` returns; ``others_prepare`` as in :meth:`GradientSync.check_forwards`."""
        self._check_inside()
        self._num_calls += 1
        if self._before is not None:
            self._num_added, self._before = self._before.count_added(), None
        try:
            losses = self._losses_of(loss, num_items, weights)
            share = self._checked_share(losses, num_items, weights or {}, others_prepare)
        except Exception as error:
            given = loss if isinstance(loss, Mapping) else {"": loss}
            is_whole = not isinstance(loss, Mapping) or self._recorded.union(given) >= self._terms.numbers.keys()
            can_run = is_whole and all(map(_has_graph, given.values())) and (self._is_last or self._is_prepared)
            can_run = can_run and self._num_calls == 1
            self._store_or_raise(error, runs_backward=self._num_calls > 1 or can_run)
            # Back-propagate zeros, through the graph if there is one: the others may communicate in their backward.
            zeros = [each.sum() * 0 for each in given.values()] if can_run else []
            share = sum(zeros[1:], zeros[0]) if zeros else torch.zeros((), requires_grad=True)
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
        return self._as_loss(sum(self._weights.get(name, 1.0) * mean for name, mean in self._means()))

    def mean_losses(self) -> dict[str, Tensor]:
        """Return :meth:`mean_loss` by name, without the weights, for counts by name."""
        self._check_naming("mean_losses", are_named=True)
        self._check_ended("mean_losses")
        return {name: self._as_loss(mean) for name, mean in self._means()}

    def losses(self) -> Tensor:
        """Return the loss of each micro-batch, (G,): its sum over all ranks, divided by its terms on all ranks.

        With counts by name the weighted sum. G is the largest number of micro-batches of a rank. Like :meth:`mean_loss`
        otherwise.

        Raises:
            RuntimeError: without ``accumulate(..., each=True)``; before the loop has ended, or when it was left early.
        """
        if self._each is None:
            got, fix = Words("one without it"), "Pass each=True to accumulate."
            raise RuntimeError(expected("losses", "a window with each=True", got, fix))
        self._check_ended("losses")
        sums, counts = self._each.unbind(1)
        weights = torch.tensor([self._weights.get(name, 1.0) for name in self._terms.numbers], dtype=torch.float64)
        means = torch.where(counts > 0, sums / counts, 0.0) * weights  # [G, names]
        dtype, device = self._kind
        return means.sum(1).to(device, dtype)

    def _check_ended(self, name: str) -> None:
        if not self._has_ended:
            fix = "Call it after the loop over accumulate(...), which must have run to its end."
            raise RuntimeError(expected(name, "a window that has ended", Words("one that has not"), fix))

    def _means(self) -> Iterator[tuple[str, float]]:
        for name, number in self._terms.numbers.items():
            yield name, self._totals[name] / number if number else 0.0

    def _as_loss(self, value: float) -> Tensor:
        dtype, device = self._kind
        return torch.full((), value, dtype=dtype, device=device)

    def _iterate(self) -> Iterator[tuple[Step, Any]]:
        """Switch the wrappers for each micro-batch, yield it with this step, and check that it had one backward."""
        window = self._window
        with self._switched as switched:
            if window.wrappers.unwrapped is None:
                switched.enter_context(window.wrappers.restored(quiet=window.sync != "each"))
            if window.sync == "each":
                window.wrappers.expect_broadcasts(False)  # in the first forward; the others follow a reduction
            switched.callback(setattr, self, "_index", -1)
            self._before = gradients_to_watch(window.model)
            for index, micro_batch in enumerate(window.micro_batches):
                self._index, self._is_last = index, index == len(window.micro_batches) - 1
                self._num_calls = self._num_backward = 0
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
                    ran = self._num_backward > 0 or bool(self._recorded)
                    self._store_or_raise(RuntimeError(text), runs_backward=ran)
                elif is_own and self._is_last and not self._has_used_ddp():
                    self._store_or_raise(unseen_forward("loss"), runs_backward=True)
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
        where, name = f"of micro-batch {self._index}", f"loss of micro-batch {self._index}"
        if self._num_calls > 1:
            fix = "Add the losses of a micro-batch, then call it once."
            raise RuntimeError(expected(f"step {where}", "one call of backward or scale", self._num_calls, fix))
        numbers, is_mapping = self._terms.numbers, isinstance(loss, Mapping)
        if is_mapping != self._terms.are_named:
            what = (
                f"a mapping of {list(numbers)} to summed losses" if self._terms.are_named else "a floating-point tensor"
            )
            raise TypeError(expected(name, what, loss))
        losses = dict(loss) if is_mapping else {"": loss}
        if losses.keys() - numbers.keys() or not losses or losses.keys() | self._recorded != numbers.keys():
            what = f"the names {list(numbers)}, without those that were recorded"
            fix = "A micro-batch without terms of a name passes a sum of 0 with its graph."
            raise ValueError(expected(name, what, Words(str(list(losses))), fix))
        if weights is not None and not (
            is_mapping and isinstance(weights, Mapping) and weights.keys() <= losses.keys()
        ):
            what = (
                f"a mapping of names among {list(losses)} to numbers" if is_mapping else "None without counts by name"
            )
            raise ValueError(expected(f"weights {where}", what, weights))
        if num_items is not None and is_mapping:
            raise ValueError(expected(f"num_items {where}", "None with counts by name", num_items, f"{SUM_UP}."))
        for term, each in losses.items():
            check_summed_loss(_label(name, term), each)
        return {term: losses[term] for term in numbers if term in losses}

    def _checked_share(
        self,
        losses: dict[str, Tensor],
        num_items: Tensor | float | None,
        weights: Mapping[str, float],
        others_prepare: bool,
    ) -> Tensor:
        """Check the losses of a micro-batch, record their sums, and return the sum of ``weight * m * S / N``."""
        where, name = f"of micro-batch {self._index}", f"loss of micro-batch {self._index}"
        wrappers, sync = self._window.wrappers, self._window.sync
        if self._is_last or sync == "each" or wrappers.fsdp:
            self._is_prepared = False  # until the check has passed
            first, *others = losses.values()
            graph = sum(others, first)
            self._is_prepared = wrappers.check_forwards(name, graph, self._used, others_prepare=others_prepare)
        totals: dict[str, Tensor] = {}
        for term, loss in losses.items():
            self._check_sum(_label(name, term), loss, term, is_mean_allowed=num_items is not None)
            # Half precision would round m / N, and float16 overflows above 65504.
            total = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
            totals[term] = total.reshape(()) if total.ndim else total
        if num_items is not None:
            items, total = check_scalar(f"num_items {where}", num_items), totals[""]
            if isinstance(items, Tensor):
                number = items.to(total.device, total.dtype)
                totals[""] = torch.where(number == 0, torch.zeros_like(total), total * number)
            else:
                totals[""] = total * items if check_amount(f"num_items {where}", items) else zero_loss(total)
            self._items.append(items)
        shares: list[Tensor] = []
        counted = [total for term, total in totals.items() if self._terms.numbers[term]]
        for term, total in totals.items():
            weight = weights.get(term, 1.0)
            self._keep_loss(total.detach(), term, weight)
            factor = self._terms.factor(term)
            shares.append(total * (weight * factor) if factor else zero_loss(total, counted))
        return sum(shares[1:], shares[0])

    def _check_sum(self, name: str, loss: Tensor, term: str, *, is_mean_allowed: bool = False) -> None:
        """Raise ValueError for a loss that gathers, or a mean, if the graph shows it."""
        if self._window.ranks is not None and is_over_ranks(loss) and not self._has_one_term(term):
            raise ValueError(gathered_loss_message(name))
        if not is_mean_allowed and is_mean(loss) and not self._has_one_term(term):
            what = "the sum over its terms"
            raise ValueError(expected(name, what, Words(f"a mean without {self._items_name}"), self._mean_fix))

    def _keep_loss(self, value: Tensor | float, term: str, weight: float) -> None:
        """Keep a detached sum for the closing header, and the weight of its name, which does not change."""
        kept: Any = value
        weight = check_number(_label("weight", term), weight)
        if self._weights.setdefault(term, weight) != weight:
            what = f"{self._weights[term]:g}, as earlier in this window"
            raise ValueError(expected(_label("weight", term), what, weight))
        if isinstance(value, Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            self._kind = torch.promote_types(value.dtype, torch.float32), value.device
            kept = value.tolist() if value.is_cpu else value.clone()
        self._losses.append((self._index, term, kept))

    def _has_used_ddp(self) -> bool:
        """Whether DDP has prepared to reduce in this micro-batch what it has computed in the window."""
        seen = self._window.wrappers.forwards_seen
        return not seen or (any(seen) and not any(used and not now for used, now in zip(self._used, seen)))

    def _has_one_term(self, term: str) -> bool:
        """Whether this micro-batch counts as one term, such as a sequence whose loss is a mean over its tokens."""
        counts, window = self._terms.counts[term], self._window
        whole = self._terms.numbers[term] == sum(window.num_micro_batches)
        return whole if counts is None else bool(counts[self._index] == 1)

    def _store_or_raise(self, error: Exception, *, runs_backward: bool) -> None:
        """Store ``error`` for the closing header; raise it if none follows, or if the others wait for a backward."""
        reduces = self._is_agreed and bool(self._window.wrappers.ddp or self._window.wrappers.fsdp)
        hangs = (reduces or (self._window.is_lockstep and not self._is_last)) and not runs_backward
        if self._window.ranks is None or self._is_closed or hangs:
            if not self._is_closed:
                self._abandon()
            raise error
        self._error = self._error or error

    def _close_window(self, *, is_early: bool = False) -> None:
        """Exchange a closing header before the last backward: add the losses, or raise an error, on every rank.

        If any rank calls it ``is_early``, before it knows its last loss, all ranks call it again after the backward.
        """
        window, terms = self._window, self._terms

        def bring() -> Offer[None]:
            if self._error is not None:
                raise self._error
            checks = [check_amounts([self._items_name] * len(self._items), self._items, window.ranks)]
            if self._num_added is not None:
                checks.append(DeviceCheck(self._num_added > 0, self._added_error))
            forwards = window.wrappers.same_forwards
            if is_early and window.wrappers.ddp:
                forwards = forwards._replace(value=Words("some"))  # this rank's may follow
            values = {name: [value for _, term, value in self._losses if term == name] for name in terms.numbers}
            if self._each is not None:
                numbers = as_numbers([value for *_, value in self._losses])
                for (index, name, _), value in zip(self._losses, numbers):
                    self._each[index, 0, [*values].index(name)] += value
            # A rank that comes early does not know its weights.
            state = -1 if is_early else digest(dict(sorted(self._weights.items()))) % 2**52 if terms.are_named else 0
            items, *sums = sums_of([self._items, *values.values()], window.ranks)
            rows = self._each
            if rows is not None and window.ranks is not None:
                rows = rows.to(header_device(window.ranks))
            tensors = None if rows is None else (rows,)
            return Offer(
                None,
                {"forwards of DDP": forwards},
                totals=(items, len(self._items), state, *sums),
                check=combined([each for each in checks if each is not None]),
                tensors=tensors,
                names=("losses",),
            )

        try:
            call = f"{self._call} (end of the window)"
            agreed = agree_on(call, window.ranks, bring)
            totals = agreed.totals
            states = [row[2] for row in totals]
            items, num_with_items, _, *losses = map(sum, zip(*totals))
            is_final = -1 not in states
            for name, loss in zip(terms.numbers, losses):
                self._totals[name] += loss
            self._num_items += items
            self._num_with_items += num_with_items
            self._losses.clear()
            self._items.clear()
            kind = ValueError if window.ranks is None else RankValueError
            if is_final and window.ranks is not None and len(set(states)) > 1:
                others = [rank for rank, state in zip(group_ranks(window.ranks), states) if state != states[0]]
                raise kind(expected("weights", "the same on every rank", Words(f"others on ranks {others}")))
            is_complete = terms.counts.get("") is not None and self._num_with_items == sum(window.num_micro_batches)
            number = terms.numbers.get("", 0.0)
            if is_final and is_complete and not abs(self._num_items - number) <= _ROUNDING * number:
                fix = "Count exactly the terms that the losses are means of: after the shift, without those ignored."
                what = f"a sum over the window equal to its count, {number:.17g}"
                raise kind(expected("num_items", what, self._num_items, fix))
            if is_final and self._each is not None and window.ranks is not None:
                (gathered,) = gather_after(call, window.ranks, agreed)
                parts = gathered.cpu().split(agreed.rows)
                most = max(agreed.rows)
                padded = [nn.functional.pad(part, (0, 0, 0, 0, 0, most - len(part))) for part in parts]
                self._each = torch.stack(padded).sum(0)
        except Exception:
            self._abandon()
            raise
        self._is_agreed, self._is_closed = True, is_final

    def _added_error(self) -> Exception:
        """Return the error for a loss that has back-propagated itself; waits for the device."""
        what = "gradients that have not changed since the loop began"
        assert self._num_added is not None
        got = Words(f"{int(self._num_added)} changed elements before step.backward(loss)")
        fix = (
            "The loss has probably called backward itself, and that part would not be divided by the count: "
            "multiply it by step.factor in its backward, and pass its sum to step.record in place of "
            "step.backward. What must stay undivided, such as a penalty, calls backward only after "
            "step.backward(loss)."
        )
        return RuntimeError(expected("loss of micro-batch 0", what, got, fix))

    def _abandon(self) -> None:
        """Discard the gradients of the window, unless no rank has run a backward, and reset the wrappers."""
        window = self._window
        has_begun = self._index > 0 if window.ranks is None else max(window.num_micro_batches) > 1
        if has_begun or self._is_agreed:
            discard_gradients_(window.model)
        else:
            window.wrappers.forget_forwards()
        self._switched.close()  # not when the generator ends: the caller may keep it


def gathered_loss_message(name: str) -> str:
    """Return the message for a loss that already covers the rows of all ranks, so that adding it counts them again."""
    fix = "Set gather_distributed=False and sum up; for a ranking loss over the whole window use pooled_backward."
    return expected(name, "the sum over this rank's terms", Words("a loss over the rows of all ranks"), fix)


def check_summed_loss(name: str, loss: Any) -> None:
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


def zero_loss(loss: Tensor, others: Sequence[Tensor] = ()) -> Tensor:
    """Return 0, connected to the graph of ``loss``, with exactly zero gradients for everything in the graph.

    The gradients of ``others``, which have nodes of that graph too, stay.

    ``loss * 0`` is not enough: a mean over no rows is 0 / 0, and its backward turns even a gradient of 0 into NaN. That
    backward must still run, because the wrapper communicates in it. So hooks replace the gradients that each node of
    the graph returns by zeros.
    """
    seen: set[Node] = set()
    pending = [other.grad_fn for other in others]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        # Leaves return nothing, and DDP keeps them alive: a hook on a leaf would never go away.
        if node is not None and node not in seen and node.next_functions:
            seen.add(node)
            node.register_hook(lambda grads, _: tuple(None if g is None else torch.zeros_like(g) for g in grads))
            pending += [following for following, _ in node.next_functions]
    return torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0
