"""Accumulation of summed losses over micro-batches and ranks, with one division by one global count.

The ranks count N before the first backward, and each micro-batch back-propagates ``m * S / N``, S its sum and m the
number that the wrapper divides gradients by.

What happens in a window, on every rank and whatever the data::

    opening header      number of micro-batches, local count, what must be equal        open_window
    all but the last    forward, backward: only the wrapper communicates                Step._iterate
    the last            forward
    closing header      sum of losses, and any error of this rank since the opening     WindowSums.exchange
    the last            backward, in which the wrapper reduces

A header and a collective of the wrapper must never meet in the same group. DDP and plain modules communicate nothing
between the two headers, so their ranks may skip a micro-batch or have different numbers of them. What DDP's first
forward would communicate happens right after the opening header instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..distributed.group import Group
from ..distributed.header import NUM_TOTALS, Offer, combined
from ..distributed.torch_private import not_compiled
from ..errors import check_flag, expected
from ..kernels.documents import note_token_range
from .step import Step
from .summed_loss import named
from .token_count import Count, Term, TokenRule, check_amounts, read_count, sums_of
from .window import Window, open_window
from .window_sums import WindowSums

B = TypeVar("B")

# Losses with counts of their own. The opening header has two ends of the labels, and the forwards of DDP, too.
MAX_TERMS = NUM_TOTALS - 3


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

    over ranks r and micro-batches g: the value that one process computes from the whole batch. ::

        for micro_batches in windows(loader, 4):
            optimizer.zero_grad()
            for step, batch in accumulate(model, micro_batches, count_valid_tokens):
                step.backward(loss_sum(model(batch), batch))
            optimizer.step()
            log(step.mean_loss())

    Args:
        model: a plain module, one with DDP, FSDP2 or HSDP anywhere in it, or a part of a model under FSDP2. How it
            reduces gradients is read and not changed. Under DDP pass the DDP module, not its ``module``.
        micro_batches: the window, a list such as :func:`windows` cuts; at least one micro-batch on every rank.
        count: a function that takes a micro-batch and returns the number of terms that its loss sums on this rank, or
            the sum of their weights; or :func:`count_valid_tokens`, with keywords bound by ``functools.partial``; or
            the number N itself, of the terms on all ranks and in all micro-batches together. For several losses with
            counts of their own, at most 5, a mapping of names to counts: the loss of the window is the sum over the
            names of :math:`w S / N`, see :meth:`Step.backward`.
        group: the ranks that hold different rows. None is the ranks over which ``model`` reduces its gradients. Pass
            the larger group if context parallelism is outside of the wrapper's mesh. A model without a wrapper requires
            it on several ranks: it says that you add up the gradients.
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
            that are divided by several numbers (experts: see :func:`sum_gradients_`), or that no wrapper reduces on
            several ranks, without ``group``; for DDP with ``static_graph`` whose very first backward would not reduce;
            for arguments that differ between ranks.

    Degenerate: with a count of 0 over all ranks every gradient exists and is 0, even when losses are NaN.
    Numerics: N in float64. The scaled loss is in the dtype of the loss, float32 for half precision.
    Distributed: one header before the first micro-batch and one in the last, for which the host reads counts and losses
        from the device; with ``each`` a payload may follow the second. One reduction of the gradients with
        ``sync="last"``. Errors are raised on every rank, see :meth:`Step.backward`. Leave the loop early on every rank
        or on none, and then call :func:`discard_gradients_`.

    Example:
        >>> import torch
        >>> model, rows = torch.nn.Linear(1, 1, bias=False), [torch.tensor([[1.0]]), torch.tensor([[2.0], [6.0]])]
        >>> for step, batch in accumulate(model, rows, len):
        ...     step.backward(model(batch).sum())
        >>> model.weight.grad
        tensor([[3.]])
    """

    def bring(window: Window) -> Offer[tuple[WindowSums, float, list[TokenRule]]]:
        factor = window.wrappers.checked_multiplier(group, multiplier)
        check_flag("each", each)
        facts: dict[str, object] = {"multiplier": factor, "each": each}
        terms: dict[str, Term] = {}
        lists, rules, checks = [], [], []
        for name, one in _by_name(count) if isinstance(count, Mapping) else [("", count)]:
            terms[name] = term = read_count(one, window.micro_batches, name)
            label, counts = named("count", name), term.counts
            facts[label] = term.fact
            lists.append(counts or [])
            if counts is None:
                if each:
                    fix = "A number is that of all ranks and micro-batches, not of each micro-batch."
                    raise ValueError(expected(label, "a function with each=True", one, fix))
            elif not isinstance(term.fact, TokenRule):
                checks.append(check_amounts(counts, partial(named, "count", name), window.ranks))
            elif not all(isinstance(number, Tensor) and number.is_cpu for number in counts):
                rules.append(term.fact)
        # The least and the largest label of the window, with which the loss need not check them again.
        ranges = [found for rule in rules if (found := rule.token_range(window.micro_batches)) is not None]
        if ranges:
            lows, highs = zip(*ranges)
            lists += [[reduce(torch.minimum, lows)], [reduce(torch.maximum, highs)]]
        rules = rules if ranges else []
        value = WindowSums(terms, window.ranks, each=each), factor, rules
        check = combined(checks) if any(checks) else None
        return Offer(value, facts, totals=sums_of(lists, window.ranks), check=check)

    window, (sums, factor, rules), totals = open_window(
        "accumulate", model, micro_batches, sync=sync, group=group, multiplier=multiplier, bring=bring
    )
    if sync == "each":
        window.check_equal_numbers()  # a plain model too: a hook may reduce after each
    for term, counted in zip(sums.terms.values(), zip(*totals)):
        term.divide(counted, factor)
    for rule in rules:
        low, high = totals[0 if window.ranks is None else window.ranks.rank()][len(sums.terms) :][:2]
        for micro_batch in window.micro_batches:
            note_token_range(rule.labels(micro_batch)[0], rule.ignore_index, int(low), int(high))
    return Step(window, sums)._iterate()


def _by_name(count: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the counts with their names, in an order that is the same on every rank."""
    for name in count:
        if not (isinstance(name, str) and name):
            raise TypeError(expected("count", "names that are not empty, each with a count", list(count)))
    if not 0 < len(count) <= MAX_TERMS:
        raise ValueError(expected("count", f"one to {MAX_TERMS} names", len(count), "Add up losses of equal counts."))
    return sorted(count.items())
