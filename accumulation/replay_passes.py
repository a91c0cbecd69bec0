"""The two passes over a window of micro-batches, and the loss between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.group import group_ranks
from ..distributed.header import Agreement, agree
from ..errors import attempt
from ..gradients.wrappers import GradientSync, discard_gradients_
from .buffers import buffers_kept, hold_broadcasts
from .replay_checks import (
    check_differences,
    check_loss,
    check_replayed,
    join_scores,
    largest_difference,
    largest_score,
    tolerance,
)
from .rng_state import RngState, restore_rng, save_rng

CALL = "pooled_backward"


class Window(NamedTuple):
    """What both passes over the micro-batches need."""

    model: nn.Module
    batches: list[Any]
    forward: Callable[[Any], Tensor]
    wrappers: GradientSync
    sync: str
    devices: tuple[torch.device, ...]

    @property
    def passes_communicate(self) -> bool:
        """Whether the second pass communicates before its last backward, and so must be as long on every rank."""
        return self.wrappers.is_lockstep or (self.sync == "each" and bool(self.wrappers.ddp or self.wrappers.fsdp))


class Scored(NamedTuple):
    """What the first pass leaves: the scores of the window as one leaf, and rows and random state of each part."""

    leaf: Tensor  # [rows of this rank, ...]
    rows: list[int]
    states: list[RngState]


class _Replayed(NamedTuple):
    """The last micro-batch, whose backward reduces; and how far any replay was off, a scalar."""

    scores: Tensor
    grad: Tensor
    difference: Tensor


def agree_or_raise(
    ranks: ProcessGroup | None,
    error: Exception | None,
    *,
    facts: Mapping[str, object] | None = None,
    rows: int = 0,
    totals: Sequence[Tensor | float] = (),
) -> Agreement[None]:
    """Agree over ``ranks``; alone, raise ``error`` or return what was brought."""
    if ranks is not None:
        return agree(CALL, ranks, error=error, facts=facts, rows=rows, totals=totals)
    if error is not None:
        raise error
    return Agreement(None, (rows,), torch.tensor([[float(total) for total in totals]], dtype=torch.float64))


def score(window: Window, ranks: ProcessGroup | None) -> Scored:
    """Make the first pass."""
    states: list[RngState] = []

    def score_one(batch: Any) -> Any:
        states.append(save_rng(window.devices))
        scores = window.forward(batch)
        # A copy: the next forward may write its output into the same memory.
        return scores.detach().clone() if isinstance(scores, Tensor) else scores

    def score_all() -> list[Any]:
        with torch.no_grad(), buffers_kept(window.model):
            return [score_one(batch) for batch in window.batches]

    scores, error = attempt(score_all)
    _clear_cast_weights()
    if error is not None and window.wrappers.is_lockstep:
        raise error  # the other ranks wait inside the model: a header would meet their collective
    leaf, error = (None, error) if scores is None else attempt(partial(join_scores, scores))
    agree_or_raise(ranks, error)
    assert scores is not None
    assert leaf is not None
    return Scored(leaf, [part.shape[0] for part in scores], states)


def _clear_cast_weights() -> None:
    """Let autocast forget the weights that it has cast in the first pass.

    Older versions of torch keep them without a graph, and the second pass would use them (pytorch issue 158232).
    """
    torch.clear_autocast_cache()


def evaluate(
    window: Window, leaf: Tensor, loss: Callable[[Tensor, list[Any]], Tensor], ranks: ProcessGroup | None
) -> Tensor:
    """Return the loss, with its graph to ``leaf``."""

    def compute() -> Tensor:
        value = loss(leaf, window.batches)
        check_loss(value, leaf, window.model)
        return value

    value, error = attempt(compute)
    agree_or_raise(ranks, error)
    assert value is not None
    return value


def replay(
    window: Window, scored: Scored, value: Tensor, scaler: Any, check_replay: bool, ranks: ProcessGroup | None
) -> None:
    """Make the second pass; afterwards the random generators stand where they stood before it."""
    state = save_rng(window.devices)
    try:
        replayed, error = attempt(lambda: _replay_all(window, scored, value, scaler, check_replay))
        if error is not None and window.passes_communicate:
            raise error  # as in the first pass
        totals: tuple[Tensor, ...] = ()
        if replayed is not None and check_replay:
            top = largest_score(scored.leaf.detach())
            totals = (replayed.difference, top * tolerance(scored.leaf.dtype), top)
        known = agree_or_raise(ranks, error, totals=totals).totals
        assert replayed is not None
        if check_replay:
            check_differences(known, [0] if ranks is None else group_ranks(ranks))
        with _autocast_off(window.devices):
            replayed.scores.backward(replayed.grad)
    except BaseException:
        discard_gradients_(window.model)
        raise
    finally:
        restore_rng(state)


def _replay_all(window: Window, scored: Scored, value: Tensor, scaler: Any, check_replay: bool) -> _Replayed:
    """Carry the gradient of ``value`` through all micro-batches but the last, whose forward is made only."""
    with _autocast_off(window.devices):
        (slope,) = torch.autograd.grad(value if scaler is None else scaler.scale(value), scored.leaf)
    firsts, grads = scored.leaf.detach().split(scored.rows), slope.split(scored.rows)
    difference = largest_difference(firsts[0][:0], firsts[0][:0])
    for index, (batch, state, first, grad) in enumerate(zip(window.batches, scored.states, firsts, grads)):
        is_last = index == len(firsts) - 1
        window.wrappers.switch(window.sync, is_last)
        hold_broadcasts(window.wrappers.ddp)
        restore_rng(state)
        scores = window.forward(batch)
        check_replayed(scores, first)
        if check_replay:
            difference = torch.maximum(difference, largest_difference(first, scores.detach()))
        if not is_last:
            with _autocast_off(window.devices):
                scores.backward(grad)
    return _Replayed(scores, grad, difference)


@contextmanager
def _autocast_off(devices: Sequence[torch.device]) -> Iterator[None]:
    """Leave the caller's autocast: a backward takes the dtypes of its forward, also of one that had left it too."""
    with ExitStack() as stack:
        for kind in {"cpu", *(device.type for device in devices)}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
