"""Gradients of sums, divided once by a count that is known only at the end.

A server that receives ``backward`` and ``step`` as separate requests cannot scale a loss by a count that still grows.
It back-propagates sums, and divides the gradients later::

    backward    header (count, sum of losses); backward, in which the wrapper reduces; any number of times
                or backward_window, which does it once for several micro-batches
    finish      header; all-reduces over the ranks that no wrapper reduces over; one division by N / m

m is the number that the wrapper has divided gradients by. Each header comes before the work that it checks, so every
rank raises the error of one rank while the gradients are untouched.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import TensorWeakRef

from ..distributed.group import Group, group_ranks, resolve_group
from ..distributed.header import DeviceCheck, Offer, agree_on, combined, copy_of
from ..distributed.torch_private import not_compiled
from ..errors import Words, expected
from ..gradients.all_reduce_grads import Summand, add_, distinct_entries, plan_sum
from ..gradients.parameters import Entry, local_gradient
from ..gradients.torch_private import divide_each_
from ..gradients.when_reduced import discard_gradients_
from ..gradients.wrappers import GradientSync, find_ranks, find_sync, shorten
from .step import Step
from .summed_loss import SUM_UP, as_mean, check_zero, checked_sum, not_a_sum, sum_of
from .token_count import Term, check_amounts, check_scalar
from .window import Window, find_wrappers, open_window
from .window_sums import WindowSums

B = TypeVar("B")

_MEAN_FIX = f"{SUM_UP}, or pass loss * n."
# All living objects: no two of them may divide the gradients of the same parameter.
_ALIVE: weakref.WeakSet[DeferredMean] = weakref.WeakSet()
_BY_HAND = (
    "If you add up the gradients yourself, say so by passing group. If DDP around the model reduces them, pass "
    "multiplier, the number of its ranks."
)


class CallTotals(NamedTuple):
    """What one call of :meth:`DeferredMean.backward` added, over all ranks."""

    loss_sum: float
    num_terms: int | float


class DeferredMean:
    r"""Collects the gradients of summed losses over any number of calls, and divides them by their count at the end.

    .. math:: \frac{\sum_r \sum_k S_{rk}}{\sum_r \sum_k n_{rk}}

    over ranks r and calls k: the value that one process computes from all the rows. For a server, or a loop, that does
    not know which backward is the last; otherwise use :func:`accumulate`, which reduces once per step. ::

        deferred = DeferredMean(model)
        for batch in requests_of_this_step:  # the same number on every rank
            deferred.backward(loss_sum(model(batch), batch), num_valid(batch))
        deferred.finish(sync_groups=[context_group])
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model, group: see :func:`accumulate`. Several objects may serve parts of one model, such as adapters, if they
            have no trainable parameter in common.
        multiplier: the number that a backward divides gradients by; None to read it from ``model``. Pass the number of
            ranks for a part of a model under DDP: its parameters do not show that DDP reduces them.

    Raises:
        TypeError, ValueError: for a model that :func:`accumulate` refuses, unless it gets ``multiplier``.
        RuntimeError: when another object has collected gradients of the same parameters and has not finished them.

    Numerics:
        Counts in float64. Before the division gradients need the range of float32 or bfloat16; with float16 gradients
        use :func:`accumulate`.
    Distributed:
        Each :meth:`backward` is one header, one reduction by the wrapper, and DDP's broadcast of buffers, which the
        next forward then leaves out; the constructor makes the first one. Every rank makes the same calls.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> deferred = DeferredMean(model)
        >>> for rows in [torch.tensor([[1.0]]), torch.tensor([[2.0], [6.0]])]:
        ...     _ = deferred.backward(model(rows).sum(), len(rows))
        >>> deferred.finish()
        3
        >>> model.weight.grad
        tensor([[3.]])
    """

    def __init__(self, model: nn.Module, group: Group = None, *, multiplier: float | None = None) -> None:
        self._model, self._group, self._given_multiplier = model, group, multiplier
        self._is_replaced = False  # by a newer object for the same parameters
        self._set_wrappers(find_sync(model))
        self._ranks = find_ranks(self._sync, group)
        trainable = _trainable(entries := distinct_entries(model))
        older = [deferred for deferred in _ALIVE if trainable & _trainable(distinct_entries(deferred._model))]
        num_open = max((deferred._sums.num_calls for deferred in older), default=0)
        if num_open:
            got = Words(f"one with {num_open} calls of backward that are not finished")
            fix = "Call finish() or discard() on it first. One object serves all steps."
            raise RuntimeError(expected("model", "no DeferredMean that is collecting gradients", got, fix))
        for deferred in older:
            deferred._is_replaced = True
        self._sync.prepare_first_forwards()
        self._sums: _Sums = _Sums()
        self._mean_loss: Tensor | None = None
        self._note_gradients(entries)
        _ALIVE.add(self)

    @not_compiled
    def backward(self, loss_sum: Tensor, n: Tensor | float) -> CallTotals:
        """Back-propagate ``loss_sum`` unscaled, and count its ``n`` terms; the wrapper reduces the gradients.

        Args:
            loss_sum: scalar, the *sum* of the losses of this rank's terms; with a graph, also on a rank without terms.
            n: the number of terms, or their mass of weights, on this rank; >= 0. With 0, as a number or a tensor on the
                CPU, the call adds nothing, even when the loss is NaN.

        Returns:
            ``CallTotals(loss_sum, num_terms)`` of this call over all ranks.

        Raises:
            TypeError, ValueError: see :meth:`Step.backward`; for a mean unless ``n`` is 1; for losses by name.
            RuntimeError: when the wrapper is set not to reduce (``no_sync``); when the first call of a step finds
                gradients that are not 0, of the constructor's time or of the last :meth:`finish`; when there is a newer
                object for the model. Every rank raises it before the backward: gradients and counts stay as they were.

        A loss may have back-propagated a part of itself before, unscaled: it is divided with the rest. Before such a
        loss set gradients to None: those that were set to 0 in place look like old ones.
        """
        is_first, sync = self._sums.num_calls == 0, None
        if is_first:
            sync, ranks = find_wrappers(self._model, self._group)
            self._ranks = ranks if sync is not None else self._ranks  # after an error those of the other ranks

        def bring() -> Offer[Tensor]:
            check, facts = self._check_call((sync or find_sync(self._model)) if is_first else None)
            if isinstance(loss_sum, Mapping):
                raise _named_terms()
            checked_sum(loss_sum, "loss_sum")
            self._sync.check_forwards("loss_sum", [loss_sum])
            number = check_scalar(n, "n")
            total = sum_of(number, loss_sum)
            loss = total.detach()
            loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            wrong = not_a_sum(loss_sum, _MEAN_FIX, "loss_sum", over_ranks=self._ranks is not None)
            if wrong is not None and float(number) != 1:
                raise wrong
            check = combined([check_amounts([number], lambda _: "n", self._ranks), check])
            return Offer(total, facts, totals=(number, loss), check=check)

        window = Window(self._model, sync or self._sync, [], "each", self._ranks, is_lockstep=True)
        try:
            agreed = window.close("DeferredMean.backward", bring)
        except Exception:
            self._sync.forget_forwards()
            raise
        agreed.value.backward()
        # Broadcast buffers now. In the next forward the others would wait for a rank that makes none.
        self._sync.communicate_after_backward()
        num_terms, loss, *_ = map(math.fsum, zip(*agreed.totals))
        return self._add(loss, num_terms, (loss_sum.dtype, loss_sum.device))

    @not_compiled
    def backward_window(
        self, micro_batches: Sequence[B], fn: Callable[[B], tuple[Tensor, Tensor | float]]
    ) -> CallTotals:
        """Back-propagate the sums of several micro-batches, with one reduction; equal to :meth:`backward` of each.

        Args:
            micro_batches: see :func:`accumulate`.
            fn: takes a micro-batch, runs the forward of the model and returns ``(loss_sum, n)``, which are the
                arguments of :meth:`backward`.

        Returns:
            ``CallTotals(loss_sum, num_terms)`` of the window over all ranks.

        Raises:
            TypeError, ValueError, RuntimeError: see :meth:`backward` and :func:`accumulate`; for a result of ``fn``
                that is no pair. An error before the first forward leaves gradients and counts as they were. A later
                one discards those of the whole step.

        Distributed: two headers, one reduction, and DDP's broadcast of buffers. Errors as in :func:`accumulate`.
        """

        def bring(window: Window) -> Offer[float]:
            check, facts = self._check_call(window.wrappers if self._sums.num_calls == 0 else None)
            if not callable(fn):
                raise TypeError(expected("fn", "a function of a micro-batch", fn))
            return Offer(self._multiplier, facts, check=check)

        window, multiplier, _ = open_window(
            _SumStep._call, self._model, micro_batches, sync="last", group=self._group, bring=bring, sums_later=True
        )
        self._ranks = window.ranks
        term = Term("", "a sum", number=multiplier, factor=1.0)
        step = _SumStep(window, sums := WindowSums({"": term}, window.ranks))
        try:
            for _, micro_batch in step._iterate():
                step.run(fn, micro_batch)
        except BaseException:
            self.discard()
            raise
        self._sync.communicate_after_backward()
        return self._add(term.total, sums.num_items, sums.kind)

    def _add(self, loss: float, num_terms: float, kind: tuple[torch.dtype, torch.device]) -> CallTotals:
        sums = self._sums
        self._sums = _Sums(sums.num_calls + 1, sums.num_terms + num_terms, sums.loss + loss, kind)
        return CallTotals(loss, _as_count(num_terms))

    def _check_call(self, sync: GradientSync | None) -> tuple[DeviceCheck | None, dict[str, object]]:
        """Check that gradients may be collected; return the check for old ones, and what all ranks must share.

        ``sync`` is how the model reduces, in the first call of a step; None in the others.
        """
        if sync is not None:
            self._set_wrappers(sync)
        if self._is_replaced:
            fix = "Keep one object for each model, and use it in every step."
            raise RuntimeError(expected("model", "one DeferredMean", Words("a newer one"), fix))
        switches = [module.require_backward_grad_sync for module in self._sync.ddp]
        if not all(switches) or not all(all(group.switches) for group in self._sync.fsdp):
            fix = "Call forward and backward outside of no_sync. To reduce once per step, use accumulate."
            raise RuntimeError(expected("model", "gradients that every backward reduces", Words("no_sync"), fix))
        old = {id(ref()) for ref in self._gradients_before if ref() is not None} if sync is not None else set()
        entries = distinct_entries(self._model) if old else []
        grads = [local_gradient(entry) for entry in entries if id(entry.parameter.grad) in old]

        def error(number: int) -> Exception:
            fix = "Call optimizer.zero_grad() after each step, which sets them to None."
            got = Words(f"gradients with {number} elements that are not 0")
            return RuntimeError(expected("model", "no gradient before the first backward of a step", got, fix))

        check = check_zero([grad for grad in grads if grad is not None], error)
        return check, {"calls before": self._sums.num_calls, "multiplier": self._multiplier}

    @not_compiled
    @torch.no_grad()
    def finish(self, sync_groups: Iterable[Any] = ()) -> int | float:
        """Add what no wrapper has added, divide all gradients by the count, and return the count over all ranks.

        Args:
            sync_groups: the groups over which gradients are added first, the same entries on every rank. An entry is a
                group, for all gradients of the model, such as the one that :func:`sequence_sync_group` picks; or a pair
                ``(parameters, group)``, such as an expert and the ranks with copies of it. None for a group adds
                nothing: ``(experts, None)`` says that their gradients are complete.

        Returns:
            N, an int when it is whole. With N = 0 every gradient that exists is set to 0.

        Raises:
            TypeError, ValueError: for an entry that is neither; for parameters that are not the model's; for the same
                parameter and group twice; for parameters that no wrapper reduces, unless a pair lists them or the
                constructor got ``group``; see also :func:`all_reduce_grads_`.
            RuntimeError: without a backward since the last finish; when the way the model reduces has changed since.
                Every rank raises it with the gradients untouched, and you may call finish again.

        Distributed: one header, another one with ``sync_groups``, and :func:`all_reduce_grads_` of each entry.
        """
        sums = self._sums

        def bring() -> Offer[tuple[list[Entry], _ToSync, set[str]]]:
            if sums.num_calls == 0:
                fix = "A second sync would add and divide final gradients again. Call backward first."
                raise RuntimeError(expected("gradients", "a backward since the last finish", Words("none"), fix))
            sync = find_sync(self._model)
            if self._given_multiplier is None and sync.multiplier != self._multiplier:
                got = Words(f"{sync.multiplier:g} after {self._multiplier:g}")
                fix = "Call sum_gradients_ before the first backward; discard() drops what was collected in two ways."
                raise RuntimeError(expected("model", "gradients divided by one number throughout", got, fix))
            entries = distinct_entries(self._model)
            to_sync, paired = _read_sync_groups(sync_groups, entries)
            unmanaged = sync.unmanaged if self._group is None else []
            missing = [name for name in unmanaged if id(self._model.get_parameter(name)) not in paired]
            if missing:
                what = "every trainable parameter inside a wrapper, or in a pair of sync_groups"
                fix = "Pass (parameters, group), with the group of the ranks that have copies, or None if none has."
                raise ValueError(expected("model", what, Words(f"{shorten(missing)} in neither"), fix))
            facts = {"calls of backward": sums.num_calls, "sync_groups": len(to_sync)}
            return Offer((entries, to_sync, set(sync.unmanaged)), facts)

        plans: list[tuple[list[Summand], ProcessGroup]] = []
        try:
            entries, to_sync, unmanaged = agree_on("DeferredMean.finish", self._ranks, bring).value
            if to_sync:
                call = "DeferredMean.finish (sync_groups)"
                plans = agree_on(call, self._ranks, lambda: Offer(_plan_sums(to_sync, sums.num_terms))).value
        except Exception:
            self._sync.forget_forwards()
            raise
        for summands, group in plans:
            add_(summands, group)
        by_kind: dict[tuple[float, torch.device, torch.dtype], list[Tensor]] = {}
        for entry in entries:
            grad = local_gradient(entry)
            if grad is not None and not sums.num_terms:
                grad.zero_()
            elif grad is not None:
                divisor = 1.0 if unmanaged and entry.name in unmanaged else self._multiplier  # of the wrapper
                by_kind.setdefault((divisor, grad.device, grad.dtype), []).append(grad)
        for (divisor, _, _), grads in by_kind.items():
            divide_each_(grads, sums.num_terms / divisor)
        self._mean_loss = as_mean(sums.loss, sums.num_terms, *sums.kind)
        self._sums = _Sums()
        self._note_gradients(entries)
        return _as_count(sums.num_terms)

    def mean_loss(self) -> Tensor:
        """Return the loss of the last finished step, as :meth:`Step.mean_loss` does; RuntimeError before one."""
        if self._mean_loss is None:
            raise RuntimeError(expected("mean_loss", "a step that is finished", Words("none"), "Call finish() first."))
        return self._mean_loss.clone()

    def discard(self) -> None:
        """Drop the gradients of the model, as :func:`discard_gradients_` does, and their count; on every rank."""
        discard_gradients_(self._model)
        self._sums = _Sums()

    def state_dict(self) -> dict[str, Tensor]:
        """Return what was counted since the last :meth:`finish`, the same on every rank.

        The sums of gradients are in the ``grad`` of the parameters. A server that saves both, on each rank, can go on
        in the middle of a step after a restart, with the same number of ranks.
        """
        sums = self._sums
        numbers = {"num_terms": sums.num_terms, "loss_sum": sums.loss, "multiplier": self._multiplier}
        state = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        dtype, device = sums.kind
        like = torch.empty(0, dtype=dtype, device=device)  # a loss
        return {**state, "num_calls": torch.tensor(sums.num_calls), "like": like}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue a step that :meth:`state_dict` describes; set the gradients too, before the next call."""
        if (given := float(state["multiplier"])) != self._multiplier:
            fix = "Finish a step on as many ranks as it was begun on."
            raise ValueError(expected("multiplier", f"{self._multiplier:g}, as the model divides now", given, fix))
        like = state["like"]
        self._sums = _Sums(
            int(state["num_calls"]), float(state["num_terms"]), float(state["loss_sum"]), (like.dtype, like.device)
        )

    def _set_wrappers(self, sync: GradientSync) -> None:
        multiplier, self._sync = self._given_multiplier, sync
        sync.check_wrapped(others_reduce=self._group is not None or multiplier is not None, fix=_BY_HAND)
        self._multiplier = sync.checked_multiplier(self._group, multiplier)

    def _note_gradients(self, entries: Iterable[Entry]) -> None:
        """Remember the gradients that the next step must not add to."""
        grads = (entry.parameter.grad for entry in entries)
        self._gradients_before = [TensorWeakRef(grad) for grad in grads if grad is not None]


class _SumStep(Step):
    """Back-propagates sums as they are. Their counts travel with the closing header."""

    _call = "DeferredMean.backward_window"
    _mean_fix = _MEAN_FIX

    def run(self, fn: Callable[[B], tuple[Tensor, Tensor | float]], micro_batch: B) -> None:
        """Back-propagate the sum of a micro-batch, or store the error of ``fn`` for the closing header."""
        self._before, index = None, self._current().index  # a loss that has back-propagated itself is divided too
        try:
            result = fn(micro_batch)
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(expected(f"fn of micro-batch {index}", "a pair (loss_sum, n)", result))
            if isinstance(result[0], Mapping):
                raise _named_terms()
            self._num_terms = self._sums.add_items(index, self._terms[""], result[1], "n")
        except Exception as error:
            self._fail(error, is_due=True)
        else:
            self.backward(sum_of(self._num_terms, result[0]))

    def _has_one_term(self, term: Term, index: int) -> bool:
        return float(self._num_terms) in (0, 1)


def _trainable(entries: Iterable[Entry]) -> set[int]:
    return {id(parameter) for _, parameter in entries if parameter.requires_grad}


def _named_terms() -> TypeError:
    fix = (
        "Their counts are open until the end, so each name would need a gradient of its own, as large as the model: "
        "use accumulate, which counts them first, or add up losses of equal counts."
    )
    return TypeError(expected("loss_sum", "one summed loss", Words("a dict"), fix))


def _as_count(number: float) -> int | float:
    """Return an int where ``number`` is whole; a mass of weights stays a float."""
    return int(number) if number.is_integer() else number


class _Sums(NamedTuple):
    """Sums over all ranks and the calls of backward since the last finish."""

    num_calls: int = 0
    num_terms: float = 0.0
    loss: float = 0.0
    kind: tuple[torch.dtype, torch.device] = torch.float32, torch.device("cpu")  # of the last loss


# Parameters, and the group over which their gradients are added; None adds nothing, and so does a group of one rank.
_ToSync = list[tuple[list[Entry], ProcessGroup | None]]


def _read_sync_groups(sync_groups: Any, model_entries: list[Entry]) -> tuple[_ToSync, set[int]]:
    """Return ``sync_groups`` of a model, and the ids of the parameters in pairs; TypeError or ValueError if bad."""
    if isinstance(sync_groups, (str, dict)) or not isinstance(sync_groups, Iterable):
        what = "a list of groups and of (parameters, group) pairs"
        raise TypeError(expected("sync_groups", what, sync_groups, "Pass [group] for one group."))
    to_sync, paired = _ToSync(), set[int]()
    for index, item in enumerate(sync_groups):
        listed, group = model_entries, item
        if isinstance(item, (tuple, list)) and len(item) == 2:
            try:
                listed, group = distinct_entries(item[0]), item[1]
            except (TypeError, ValueError) as error:
                raise type(error)(f"sync_groups[{index}]: {error}") from error
            paired.update(id(parameter) for _, parameter in listed)
        ranks = None if group is None else resolve_group(group, name=f"sync_groups[{index}]")
        to_sync.append((listed, ranks if ranks is not None and ranks.size() > 1 else None))
    known, seen = {id(entry.parameter) for entry in model_entries}, set()
    for index, (listed, ranks) in enumerate(to_sync):
        members = () if ranks is None else tuple(group_ranks(ranks))
        for entry in listed:
            key = id(entry.parameter), members
            if key[0] not in known:
                place = f"{entry.name} in sync_groups[{index}]"
                raise ValueError(expected(place, "a parameter of the model", entry.parameter))
            if members and key in seen:
                place, got = f"{entry.name} in sync_groups[{index}]", Words("a second sum over the same ranks")
                fix = "It is listed in an earlier entry, alone or with all parameters of the model."
                raise ValueError(expected(place, "one sum over each group", got, fix))
            seen.add(key)
    return to_sync, paired


def _plan_sums(to_sync: _ToSync, count: float) -> list[tuple[list[Summand], ProcessGroup]]:
    """Return what to add over which group; raise the first error after all groups, whose ranks wait for this one."""
    plans, errors = [], []
    for parameters, group in to_sync:
        if group is not None:
            try:
                plans.append((plan_sum(parameters, group, count), group))
            except Exception as error:
                errors.append(error)
    if errors:
        raise copy_of(errors[0])
    return plans
