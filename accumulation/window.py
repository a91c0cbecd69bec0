"""The window: the micro-batches of one optimizer step, and the opening header that the ranks exchange about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from ..distributed.group import Group, group_ranks
from ..distributed.header import NUM_TOTALS, Agreement, Offer, agree_on
from ..errors import RankValueError, Words, check_count, expected
from ..gradients.wrappers import GradientSync, find_ranks, find_sync

_BY_HAND = "If you add up the gradients yourself, with all_reduce_grads_, say so by passing group."

B = TypeVar("B")
T = TypeVar("T")


def windows(loader: Iterable[B], size: int) -> Iterator[list[B]]:
    """Cut an iterable of micro-batches into lists of ``size``, one an optimizer step; the last list may be shorter.

    Args:
        loader: any iterable of micro-batches, such as a ``DataLoader``, of equally many windows on every rank.
        size: micro-batches per window, at least 1.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Example:
        >>> list(windows("abcd", 3))
        [['a', 'b', 'c'], ['d']]
    """
    check_count("size", size, 1)
    if not isinstance(loader, Iterable):
        raise TypeError(expected("loader", "an iterable of micro-batches", loader, "Pass the DataLoader."))

    def cut() -> Iterator[list[B]]:
        batches = iter(loader)
        while window := list(islice(batches, size)):
            yield window

    return cut()  # an inner generator, so that the checks run at the call


class Window(NamedTuple):
    """One window on this rank, with the number of micro-batches of every rank."""

    model: nn.Module
    wrappers: GradientSync
    micro_batches: list[Any]
    sync: str
    ranks: ProcessGroup | None  # None when this process is alone
    # Whether a micro-batch before the last communicates, so that all ranks must run the same number of them.
    is_lockstep: bool
    num_micro_batches: tuple[int, ...] = ()  # of each rank; known after the opening header

    def switch(self, index: int) -> Sequence[bool]:
        """Set whether micro-batch ``index`` reduces; call it before the forward.

        Returns for each DDP module whether this backward must reduce gradients of earlier micro-batches too.
        """
        is_last = index == len(self.micro_batches) - 1
        self.wrappers.switch(self.sync, is_last)
        used = self.wrappers.forwards_seen if index and is_last and self.sync != "each" else ()
        if index == 0 or is_last or self.sync == "each":
            self.wrappers.watch_forwards()
        return used

    def close(self, call: str, bring: Callable[[], Offer[T]], *, is_early: bool = False) -> Agreement[T]:
        """Exchange the header before the backward that reduces; ``is_early`` before the forward of this rank."""

        def bring_all() -> Offer[T]:
            offer = bring()
            offer.facts = {"forwards of DDP": self.wrappers.same_forwards(may_follow=is_early), **offer.facts}
            return offer

        return agree_on(call, self.ranks, bring_all)

    def check_equal_numbers(self) -> None:
        if self.ranks is not None and len(set(self.num_micro_batches)) > 1:
            counts = zip(group_ranks(self.ranks), self.num_micro_batches)
            got = Words(", ".join(f"{count} on rank {rank}" for rank, count in counts))
            fix = (
                "FSDP2, SyncBatchNorm and sync='each' communicate in every micro-batch. Fill up with micro-batches of "
                "0 rows, as fullrank.data.until_all_end(loader) does, or without valid labels."
            )
            raise RankValueError(expected("micro_batches", "the same number on every rank", got, fix))


def open_window(
    call: str,
    model: nn.Module,
    micro_batches: Any,
    *,
    sync: str,
    group: Group,
    multiplier: float | None = None,
    bring: Callable[[Window], Offer[T]],
    sums_later: bool = False,
) -> tuple[Window, T, list[list[float]]]:
    """Check the window on every rank and exchange the opening header; return the window, the value and the totals.

    ``bring`` checks the arguments that only ``call`` has, and returns its part of the header. With ``sums_later`` it
    checks the wrappers too, and the caller adds up later what they do not reduce.
    """
    known, ranks = find_wrappers(model, group)

    def bring_all() -> Offer[tuple[Window, T]]:
        wrappers = known or find_sync(model)
        is_lockstep = wrappers.is_lockstep or (sync == "each" and bool(wrappers.ddp or wrappers.fsdp))
        window = Window(model, wrappers, list_micro_batches(micro_batches), sync, ranks, is_lockstep)
        count = len(window.micro_batches)
        if count == 0:
            fix = "Give a rank without rows a micro-batch of 0 rows, or without valid labels: it joins the reduction."
            raise ValueError(expected("micro_batches", "at least one micro-batch on every rank", Words("none"), fix))
        wrappers.check_sync(sync, count)
        if not sums_later and ranks is not None:
            wrappers.check_wrapped(others_reduce=group is not None or multiplier is not None, fix=_BY_HAND)
        if not sums_later:
            wrappers.check_managed(others_reduce=group is not None, multiplier=multiplier)
        offer = bring(window)
        facts = {"sync": sync, "wrapper": wrappers.kind, "SyncBatchNorm": wrappers.shares_statistics}
        totals = [*offer.totals, *[0] * (NUM_TOTALS - 1 - len(offer.totals)), wrappers.forwards_since]
        return Offer((window, offer.value), {**facts, **offer.facts}, count, totals, check=offer.check)

    agreed = agree_on(call, ranks, bring_all)
    (window, value), totals = agreed.value, agreed.totals
    window = window._replace(num_micro_batches=agreed.rows)
    if window.is_lockstep:
        window.check_equal_numbers()
    if window.wrappers.ddp:
        window.wrappers.communicate_before_forwards(ranks, list(zip(*totals))[-1])
    return window, value, totals


def find_wrappers(model: nn.Module, group: Group) -> tuple[GradientSync | None, ProcessGroup | None]:
    """Return how ``model`` reduces and the ranks of its window; None after an error, for the header to report."""
    wrappers = None
    with suppress(Exception):
        wrappers = find_sync(model)
    return wrappers, find_ranks(wrappers, group)


def list_micro_batches(micro_batches: Any) -> list[Any]:
    name, what = "micro_batches", "a list of micro-batches"
    if isinstance(micro_batches, (Mapping, str)):
        raise TypeError(expected(name, what, micro_batches, "Pass [batch] for one batch."))
    is_iterable = hasattr(micro_batches, "__iter__") or hasattr(micro_batches, "__getitem__")
    if not (is_iterable and hasattr(micro_batches, "__len__")):
        fix = "The window is read before its first backward: use list(...), or windows(loader, size) to cut a loader."
        raise TypeError(expected(name, f"{what}, with a length", Words(f"a {type(micro_batches).__name__}"), fix))
    return list(micro_batches)
