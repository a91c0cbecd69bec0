"""Accumulation of summed losses over micro-batches and ranks, with one division by one global count.

The loss of a window is ``(sum over ranks and micro-batches of S) / N``. N is counted before the first backward, and
every micro-batch back-propagates ``m * S / N`` at once, m being what the wrapper divides gradients by. So the gradients
that are added up, and reduced once per window, are those of one process with all the rows.

What happens in a window, on every rank and whatever the data::

    opening header      number of micro-batches, local count, what must be equal
    all but the last    forward, backward: what they communicate is the wrapper's
    the last            forward
    closing header      sum of losses, and what this rank has done wrong since the opening
    the last            backward, in which the wrapper reduces

The closing header stands in front of the last backward because there, and not later, a mistake can still be answered on
every rank alike: DDP has not begun to reduce, so nobody waits in a collective that others will not enter. Before it no
rank may raise, because the others may be micro-batches away from any exchange. It notes the mistake, runs a backward of
zeros in its place and goes on.

A header never meets a collective of the wrapper in the same group. Between the two headers a wrapper communicates
either nothing (DDP and plain modules, whose ranks may therefore bring different numbers of micro-batches; DDP
broadcasts its buffers in the first forward of a window only, and every rank has a first), or the same on all ranks
(FSDP2, SyncBatchNorm and sync="each", where different numbers are refused). What a forward or backward has enqueued on
a device's stream was enqueued before the header on every rank.

Not covered, because no exchange is left for it: a rank that leaves the loop early while others go on, one that fails in
a forward, and one that calls ``backward`` a second time in the last micro-batch. Ranks outside the group, as those of
tensor parallelism, hear nothing of a mistake that they have not made too. And after a forward of DDP with gradients on
that no backward has followed, DDP reduces in the first backward of a window though it is told not to, and nothing shows
that it will: ranks with different numbers of micro-batches then hang. ``discard_gradients_`` makes it forget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.group import Group, group_ranks
from ..distributed.header import agree
from ..errors import Words, attempt, check_positive, expected
from ..gradients.wrappers import GradientSync, find_sync
from .accumulation_step import Step, Window
from .window import add_counts, as_numbers, check_amount, check_scalar, check_window, token_rule

B = TypeVar("B")


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[B],
    count: Callable[[Any], Tensor | float] | Tensor | float,
    *,
    group: Group = None,
    sync: str = "last",
    multiplier: float | None = None,
) -> Iterator[tuple[Step, B]]:
    r"""Loop over the micro-batches of one optimizer step, for a loss that is a sum divided by a count.

    .. math:: \frac{\sum_r \sum_g S_{rg}}{\sum_r \sum_g n_{rg}}

    over ranks r and micro-batches g: what one process computes from the whole batch. The mean of the micro-batches'
    means, which accumulation usually computes, weights a micro-batch of 100 tokens like one of 900. ::

        for micro_batches in windows(loader, 4):
            optimizer.zero_grad()
            for step, batch in accumulate(model, micro_batches, count_valid_tokens):
                step.backward(loss_sum(model(batch), batch))
            optimizer.step()
            log(step.mean_loss())

    Args:
        model: with DDP, FSDP2 or HSDP modules anywhere in it, or plain. How it reduces is read off it and not changed.
        micro_batches: the window, a list such as :func:`windows` cuts; at least one micro-batch on every rank.
        count: how many terms the losses sum: a function of a micro-batch that returns its number of terms, or their
            mass of weights, on this rank; or :func:`count_valid_tokens`, keywords bound by ``functools.partial``; or
            one number, already over all ranks and micro-batches.
        group: the ranks that hold different rows. None for those that ``model`` reduces its gradients over, else the
            default group. With context parallelism that is not part of the wrapper's mesh, the larger group.
        sync: when gradients are reduced: after the ``"last"`` micro-batch, after ``"each"`` (needs less memory under
            FSDP2), or for HSDP ``"shard"``, over the shards after each and over the replicas after the last.
        multiplier: what gradients are divided by after the loss; None for what ``model`` says. Give it when a hook of
            yours divides by another number.

    Returns:
        An iterator over ``(step, micro_batch)``. ``step`` is the same :class:`Step` throughout: call
        ``step.backward(loss_sum)`` once per micro-batch, ``step.mean_loss()`` after the loop.

    Raises:
        TypeError: for micro-batches without a length, such as a generator; a bad ``count``.
        ValueError: for no micro-batch on some rank; different numbers of them under FSDP2, HSDP, SyncBatchNorm or
            ``sync="each"``; counts that are negative or not finite; gradients that are divided by several numbers
            (experts: see :func:`sum_gradients_`); trainable parameters that no wrapper reduces, unless ``group`` says
            that this is known; DDP with ``static_graph`` whose very first backward would not reduce; arguments that
            differ between ranks.

    Degenerate: with a count of 0 over all ranks every gradient exists and is 0, even when losses are NaN. A rank, or a
        micro-batch, without terms takes part like any other.
    Numerics: N in float64. The scaled loss is in the dtype of the loss, float32 for half precision.
    Distributed: one header of 64 bytes before the first micro-batch, where the device is read once for the counts, and
        one in the last, where it is read once for the losses; none in between. One reduction of the gradients with
        ``sync="last"``. Errors are raised on every rank, see :meth:`Step.backward`. Without a process group, or with
        one rank, nothing is exchanged. Leave the loop early on every rank or on none, and call
        :func:`discard_gradients_` then.

    Example:
        >>> import torch
        >>> model, rows = torch.nn.Linear(1, 1, bias=False), [torch.tensor([[1.0]]), torch.tensor([[2.0], [6.0]])]
        >>> for step, batch in accumulate(model, rows, len):
        ...     step.backward(model(batch).sum())
        >>> model.weight.grad
        tensor([[3.]])
    """
    ranks = _find_ranks(model, group)
    brought = _open(lambda: _bring(model, micro_batches, count, sync, multiplier, group is not None), ranks)
    return Step(brought.window).run(brought.micro_batches)


class _Brought(NamedTuple):
    """What this rank brings to a window, checked: its count and micro-batches, and what all ranks must share."""

    window: Window
    micro_batches: list[Any]
    facts: Mapping[str, object]


def _find_ranks(model: nn.Module, group: Group) -> ProcessGroup | None:
    """Return the ranks that agree, None when this process is alone; a bad model is reported to the default group."""
    wrappers, _ = attempt(lambda: find_sync(model))
    return (wrappers or GradientSync([], [], [])).resolve_group(group)


def _bring(
    model: nn.Module, micro_batches: Any, count: Any, sync: str, multiplier: float | None, others_reduce: bool
) -> _Brought:
    """Check the arguments and count on this rank."""
    wrappers, batches = find_sync(model), check_window(micro_batches)
    if not batches:
        fix = "Give a rank without rows a micro-batch without valid labels: it has to take part in the reduction."
        raise ValueError(expected("micro_batches", "at least one micro-batch on every rank", Words("none"), fix))
    wrappers.check(sync, len(batches))
    wrappers.check_managed(others_reduce=others_reduce, multiplier=multiplier)
    factor = wrappers.multiplier if multiplier is None else check_positive("multiplier", multiplier)
    rule = token_rule(count)
    is_counted = rule is not None or callable(count)
    number = add_counts(batches, rule.num_valid if rule is not None else count) if is_counted else _check_total(count)
    # Counts that the ranks made by themselves differ, and so cannot pass for the one that is over all of them.
    kind: object = rule or Words("a function" if is_counted else f"{number:.17g} over all ranks")
    facts = {"sync": sync, "wrapper": wrappers.kind, "multiplier": factor, "count": kind}
    window = Window(model, wrappers, sync, None, (len(batches),), number, is_counted, factor)
    return _Brought(window, batches, facts)


def _check_total(count: Any) -> float:
    """Return a count that was given as a number, or raise."""
    if not isinstance(count, (Tensor, int, float)) or isinstance(count, bool):
        what = "a function of a micro-batch, count_valid_tokens, or the number of terms over all ranks"
        raise TypeError(expected("count", what, count))
    return float(check_amount("count", as_numbers([check_scalar("count", count)])[0]))


def _open(bring: Callable[[], _Brought], ranks: ProcessGroup | None) -> _Brought:
    """Exchange the opening header, and return what this rank brings with what it needs of the others."""
    if ranks is None:
        return bring()
    brought, error = attempt(bring)
    if brought is None:
        agree("accumulate", ranks, error=error)
        raise AssertionError("unreachable: agree raises when a rank failed")
    window = brought.window
    agreed = agree("accumulate", ranks, facts=brought.facts, rows=window.rows[0], totals=(window.num_terms,))
    in_lockstep = window.wrappers.is_lockstep or window.sync == "each"
    if in_lockstep and len(set(agreed.rows)) > 1:
        found = Words(", ".join(f"{rows} on rank {rank}" for rank, rows in zip(group_ranks(ranks), agreed.rows)))
        fix = "FSDP2, SyncBatchNorm and sync='each' communicate in each: fill up with ones that have no valid labels."
        raise ValueError(expected("micro_batches", "as many on every rank", found, fix))
    num_terms = math.fsum(agreed.totals[:, 0].tolist()) if window.is_counted else window.num_terms
    return brought._replace(window=window._replace(group=ranks, rows=agreed.rows, num_terms=num_terms))
