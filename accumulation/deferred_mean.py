"""Gradients of sums, divided once by a count that is known only at the end.

A server that is told ``backward`` and ``step`` by its clients does not know which backward is the last of a step, so it
cannot scale a loss by a count that is still growing. It back-propagates sums, and divides the gradients instead::

    backward    header (count, sum of losses, mistakes); backward, in which the wrapper reduces; any number of times
    finish      header; all-reduces over the ranks that no wrapper reduces over; one division by N / m

N is the sum of all counts over all ranks, m what the wrapper has divided gradients by. Each header stands in front of
what it decides about, so a mistake of one rank is raised on all of them while the gradients are as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.group import Group
from ..distributed.torch_private import not_compiled
from ..errors import Words, attempt, expected
from ..gradients.all_reduce_grads import distinct_entries
from ..gradients.wrappers import GradientSync, discard_gradients_, find_sync
from .accumulation_step import _check_loss
from .deferred_header import Sums, Told, exchange
from .deferred_sync import (
    SyncEntry,
    add_planned_,
    check_whole,
    count_nonzero,
    divide_,
    plan_sync,
    read_sync_groups,
)
from .window import check_scalar

# Who divides the gradients of a model; weak on both sides.
_OWNERS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DeferredMean]] = weakref.WeakKeyDictionary()


class DeferredMean:
    r"""Collects the gradients of summed losses over any number of calls, and divides them by their count at the end.

    .. math:: \frac{\sum_r \sum_k S_{rk}}{\sum_r \sum_k n_{rk}}

    over ranks r and calls k: what one process computes from all the rows. For a server, or a loop, that does not know
    which backward is the last; one that does takes :func:`accumulate`, which reduces once per step. ::

        deferred = DeferredMean(model)
        for batch in requests_of_this_step:  # as many on every rank
            deferred.backward(loss_sum(model(batch), batch), num_valid(batch))
        deferred.finish(sync_groups=[context_group])
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model: with DDP, FSDP2 or HSDP modules anywhere in it, or plain. How it reduces is read off it and not changed.
        group: the ranks that hold different rows, over which counts and losses are added. None for those that ``model``
            reduces its gradients over, else the default group. With tokens of one sequence on several ranks that FSDP
            does not reduce over, the group of all of them; each rank counts its own tokens.

    Raises:
        TypeError: when ``model`` is not a module.
        ValueError: when its gradients are divided by several numbers (experts: see :func:`sum_gradients_`).
        RuntimeError: when another object has collected gradients of ``model`` that are not finished.

    Numerics:
        Counts in float64, exact up to 2**53. Gradients grow as large as their sums before the division: they need the
        range of float32 or bfloat16. A model whose gradients are float16 takes :func:`accumulate`.
    Distributed:
        Each :meth:`backward` is one header of 64 bytes and one reduction by the wrapper; every rank makes the same
        calls. Without a process group, or with one rank, nothing is exchanged.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> deferred = DeferredMean(model)
        >>> for rows in [torch.tensor([[1.0]]), torch.tensor([[2.0], [6.0]])]:
        ...     deferred.backward(model(rows).sum(), len(rows))
        >>> deferred.finish()
        3
        >>> model.weight.grad
        tensor([[3.]])
    """

    def __init__(self, model: nn.Module, group: Group = None) -> None:
        self._model, self._group = model, group
        self._read_wrappers()
        owner = _owner(model)
        if owner is not None and owner._sums.num_calls:
            found = Words(f"one with {owner._sums.num_calls} calls of backward that are not finished")
            fix = "Call finish() or discard() on it first. One object serves all steps."
            raise RuntimeError(expected("model", "no DeferredMean at work on it", found, fix))
        self._sums: Sums = Sums()
        self._mean_loss: Tensor | None = None
        _OWNERS[model] = weakref.ref(self)

    @not_compiled
    def backward(self, loss_sum: Tensor, n: Tensor | float) -> None:
        """Back-propagate ``loss_sum`` as it is, and count its ``n`` terms; the wrapper reduces the gradients.

        Args:
            loss_sum: scalar, the *sum* of the losses of this rank's terms; with a graph, also on a rank without terms.
            n: the number of terms, or their mass of weights, on this rank; >= 0.

        Raises:
            TypeError: when ``loss_sum`` is not a floating-point tensor, or ``n`` not a number.
            ValueError: when ``loss_sum`` is not a scalar or has no graph, or ``n`` is negative or not finite.
            RuntimeError: when the wrapper is told not to reduce (``no_sync``); when the first call of a step finds
                gradients that are not 0; when a newer object has taken over the model.

        Errors are raised on every rank, in front of the backward: gradients and counts are as before the call.
        """
        told, error = attempt(lambda: self._check_call(loss_sum, n))
        facts = {"calls before": self._sums.num_calls, "multiplier": self._multiplier}
        every = self._exchange("backward", error, facts, told)
        loss_sum.backward()
        self._sums = self._sums.add(every)
        self._loss_kind = loss_sum.device, torch.promote_types(loss_sum.dtype, torch.float32)

    @not_compiled
    @torch.no_grad()
    def finish(self, sync_groups: Iterable[Any] = ()) -> int | float:
        """Add what no wrapper has added, divide all gradients by the count, and return the count over all ranks.

        Args:
            sync_groups: over which groups gradients are added first. A group, for all gradients of the model, such as
                the one that :func:`sequence_sync_group` picks; or a pair ``(parameters, group)``, such as an expert and
                the ranks with copies of it. None for a group adds nothing: ``(experts, None)`` says that their
                gradients are whole. As many entries, in the same order, on every rank.

        Returns:
            N, an int when it is whole. With N = 0 every gradient that exists is set to 0.

        Raises:
            TypeError, ValueError: for an entry that is none of these; parameters that are not the model's; the same
                parameter and group twice; parameters that no wrapper reduces, unless pairs, or the ``group`` of the
                constructor, say that this is known; see also :func:`all_reduce_grads_`.
            RuntimeError: without a backward since the last finish: a second sync would add again what is final; when
                the way the model reduces has changed since the first backward.

        Distributed:
            One header, another one with ``sync_groups``, and what :func:`all_reduce_grads_` exchanges for each. Errors
            are raised on every rank with the gradients untouched, and finish may then be called again. Gradients,
            DTensors too, stay the same objects.
        """
        sync = find_sync(self._model)
        read, error = attempt(lambda: self._check_finish(sync, sync_groups))
        facts = {"calls of backward": self._sums.num_calls, "sync_groups": len(read or ())}
        self._exchange("finish", error, facts)
        assert read is not None
        plans, error = plan_sync(read)
        if read:
            self._exchange("finish (sync_groups)", error, {})
        add_planned_(plans)
        num_terms = self._sums.num_terms
        divide_(distinct_entries(self._model), set(sync.unmanaged), num_terms, self._multiplier)
        device, dtype = self._loss_kind
        self._mean_loss = torch.full((), self._sums.loss / (num_terms or 1.0), dtype=dtype, device=device)
        self._sums = Sums()
        return int(num_terms) if num_terms.is_integer() else num_terms

    def mean_loss(self) -> Tensor:
        """Return the loss of the step that was finished last: a detached scalar, the same on every rank; local.

        In the dtype of the losses, float32 for half precision.

        Raises:
            RuntimeError: before the first :meth:`finish`.
        """
        if self._mean_loss is None:
            raise RuntimeError(expected("mean_loss", "a step that is finished", Words("none"), "Call finish() first."))
        return self._mean_loss.clone()

    def discard(self) -> None:
        """Drop all gradients of the model and their count, as if the step had never begun; call it on every rank.

        After a backward that broke off inside the reduction of DDP, DDP itself fails: see :func:`discard_gradients_`.
        """
        discard_gradients_(self._model)
        self._sums = Sums()

    def _read_wrappers(self) -> None:
        """Settle for a step how the model reduces, and over which ranks."""
        self._sync = find_sync(self._model)
        self._multiplier = self._sync.multiplier
        self._ranks = self._sync.resolve_group(self._group)

    def _exchange(
        self, method: str, error: Exception | None, facts: Mapping[str, object], told: Told | None = None
    ) -> list[list[float]]:
        """Return what every rank told; when it raises, undo what a forward has prepared for the backward to come."""
        try:
            return exchange(f"DeferredMean.{method}", self._ranks, error, facts, told)
        except Exception:
            self._sync.forget_forwards(self._model)
            raise

    def _check_call(self, loss_sum: Any, n: Any) -> Told:
        """Check the state and the arguments of a backward."""
        is_first = self._sums.num_calls == 0
        if is_first:
            self._read_wrappers()
        if _owner(self._model) is not self:
            fix = "Keep one object for each model, and use it in every step."
            raise RuntimeError(expected("model", "one DeferredMean", Words("a newer one"), fix))
        _check_loss("loss_sum", loss_sum)
        switches = [module.require_backward_grad_sync for module in self._sync.ddp]
        switches += [reduces for group in self._sync.fsdp for reduces in group.switches]
        if not all(switches):
            fix = "Call forward and backward outside of no_sync. To reduce once per step, use accumulate."
            raise RuntimeError(expected("model", "gradients that every backward reduces", Words("no_sync"), fix))
        loss = loss_sum.detach()
        stale = count_nonzero(distinct_entries(self._model)) if is_first else 0
        return Told(check_scalar("n", n), loss.full_tensor() if hasattr(loss, "full_tensor") else loss, stale)

    def _check_finish(self, sync: GradientSync, sync_groups: Any) -> list[SyncEntry]:
        """Check the state and the arguments of a finish."""
        if self._sums.num_calls == 0:
            fix = "A second sync would add and divide again what is final. Call backward first."
            raise RuntimeError(expected("gradients", "a backward since the last finish", Words("none"), fix))
        if sync.multiplier != self._multiplier:
            found = Words(f"{sync.multiplier:g} after {self._multiplier:g}")
            fix = "Call sum_gradients_ before the first backward; discard() drops what was collected in two ways."
            raise RuntimeError(expected("model", "gradients divided by one number throughout", found, fix))
        read = read_sync_groups(sync_groups, distinct_entries(self._model))
        if self._group is None:
            check_whole(sync, self._model, read)
        return read


def _owner(model: nn.Module) -> DeferredMean | None:
    """Return the object that divides the gradients of ``model``, if it is alive."""
    reference = _OWNERS.get(model)
    return None if reference is None else reference()
