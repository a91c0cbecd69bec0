"""The forwards inside a window of DDP communicate nothing, so a rank that leaves one out does not hang the others."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from batches import make_batch, make_window, one_process, sum_loss
from collective_counter import CollectiveCounter
from on_ranks import on_ranks
from subjects import Model, error, gradient, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from verbs import run_window
from workers import WorkerPool, error_of

from fullrank import DeferredMean, accumulate
from fullrank.gradients.wrappers import find_sync

OTHER_FORMS = ("find unused", "static graph", "no broadcasts", "nested")
FORMS = ["default", *(pytest.param(form, marks=pytest.mark.slow) for form in OTHER_FORMS)]


class Around(nn.Module):
    """A model that DDP wraps a part of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens)


def wrapped(form: str, buffers: bool) -> nn.Module:
    """Return a model under DDP."""
    options = {
        "find unused": {"find_unused_parameters": True},
        "static graph": {"static_graph": True},
        "no broadcasts": {"broadcast_buffers": False},
    }.get(form, {})
    module = wrap(Model(buffers=buffers), "ddp", **options)
    return Around(module) if form == "nested" else module


def window_error(rank: int, model: nn.Module, layout: str) -> float:
    """Return the error of a window without faults; "one" is one micro-batch a rank, as DDP with static_graph needs."""
    windows = [make_window("full" if layout == "one" else layout, other) for other in range(dist.get_world_size())]
    windows = [window[:1] if layout == "one" else window for window in windows]
    model.zero_grad()
    run_window(model, windows[rank])
    return error(gradient(model), one_process(Model(), [batch for window in windows for batch in window]).gradient)


def skipped(rank: int, form: str, num_before: int, buffers: bool) -> tuple[tuple[str, str], list[float]]:
    """Return what is raised when the last rank leaves out its only micro-batch, and the errors before and after it."""
    model, odd = wrapped(form, buffers), rank == dist.get_world_size() - 1
    errors = [window_error(rank, model, "one") for _ in range(num_before)]
    use = {"use": lambda step, index, loss, items: None} if odd else {}
    found = error_of(lambda: run_window(model, make_window("full", rank)[:1], **use))
    return found, errors + [window_error(rank, model, "one") for _ in range(2)]


def quiet(rank: int, form: str, buffers: bool, raw: bool) -> list[int]:
    """Return the collectives in the first forward of three windows; ``raw``: of plain steps of DDP, the control."""
    model, counts = wrapped(form, buffers), []
    for _ in range(3):
        for step, batch in [(None, make_batch(rank, 0))] if raw else accumulate(model, [make_batch(rank, 0)], 5.0):
            with CollectiveCounter() as counter:
                loss = sum_loss(model, batch)
            (loss if step is None else step).backward(*[] if step is None else [loss])
            counts.append(counter.total)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_rank_that_skips_its_only_micro_batch(pool_of_two: WorkerPool, form: str) -> None:
    """In the first, the second and the third window, with and without buffers that DDP broadcasts."""
    for buffers in (False, True):
        for num_before in (0, 1, 2):
            outcomes = pool_of_two(skipped, form, num_before, buffers)
            for found, errors in outcomes:
                assert found == outcomes[0][0]
                assert found[0] == "RuntimeError"
                assert "failed on rank 1: micro-batch 0: expected one backward, got 0" in found[1]
                assert max(errors) <= 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_forwards_inside_a_window_communicate_nothing(pool_of_two: WorkerPool, form: str) -> None:
    for buffers in (False, True):
        assert pool_of_two(quiet, form, buffers, False) == [[0, 0, 0]] * 2


def test_control_forwards_of_ddp_alone_communicate(pool_of_two: WorkerPool) -> None:
    for first, second, third in pool_of_two(quiet, "default", True, True):
        assert first == third > 0  # buffers
        assert second > first  # and buckets


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["full", "unequal"])
@pytest.mark.parametrize(
    "way", ["every rank", "every rank, one in no_sync", "one rank", "one rank in no_sync", "one rank in no_grad"]
)
@on_ranks(2)
def test_a_forward_without_a_backward_before_the_window(rank: int, way: str, layout: str) -> None:
    """Of DDP, on some ranks; two windows after it are exact. After some ways one rank alone would broadcast buffers."""
    for num_before in (0, 1, 2):
        if num_before == 1 and way in ("one rank", "one rank in no_sync"):
            continue  # DDP itself hangs: it rebuilds its buckets in the second forward with gradients
        model = wrapped("default", buffers=way.startswith("every rank, one"))
        errors = [window_error(rank, model, "one") for _ in range(num_before)]
        if way.startswith("every rank") or rank == 0:
            contexts = {"no_sync": model.no_sync, "no_grad": torch.no_grad} if rank == 0 else {}
            with contexts.get(way.partition("in ")[2], contextlib.nullcontext)():
                sum_loss(model, make_batch(rank, 0))
        errors += [window_error(rank, model, layout) for _ in range(2)]
        assert max(errors) <= 1e-12


@on_ranks(2)
def test_ranks_compare_which_modules_would_broadcast(rank: int) -> None:
    """Equal numbers if and only if the same ones would, and 0 if none has run a forward."""
    modules = [DistributedDataParallel(nn.Linear(1, 1)) for _ in range(3)]
    numbers: dict[object, set[int]] = {}
    for flags in itertools.product((1, False, True), repeat=3):  # as a window leaves it, after no_sync, after a forward
        for module, flag in zip(modules, flags):
            module.require_forward_param_sync = flag
        key = set(map(type, flags)) != {int} and [flag is True for flag in flags]
        numbers.setdefault(str(key), set()).add(find_sync(nn.ModuleList(modules)).forwards_since)
    assert numbers["False"] == {0}
    assert all(len(found) == 1 for found in numbers.values())
    assert len(set.union(*numbers.values())) == len(numbers) == 9
    assert max(map(max, numbers.values())) < 2**53


@on_ranks(2)
def test_buffers_are_broadcast_once_a_window(rank: int) -> None:
    """From rank 0, whose three forwards count; two more broadcasts arrange the buckets, in the second window."""
    model = wrapped("default", True)
    for broadcasts in (1, 3, 1):
        model.module.forwards.fill_(10.0 * rank)
        with CollectiveCounter() as counter:
            run_window(model, make_window("full", rank))
        assert (float(model.module.forwards), counter.counts["broadcast_.default"]) == (3.0, broadcasts)


@on_ranks(2)
def test_the_constructor_broadcasts_what_the_first_forward_would(rank: int) -> None:
    """Buffers that differ come from rank 0; the control is the first forward without the object."""
    for is_deferred in (True, False):
        model = wrapped("default", True)
        model.module.forwards.fill_(10.0 * rank)
        with CollectiveCounter() as constructor:
            kept = DeferredMean(model) if is_deferred else None
        with CollectiveCounter() as forward:
            sum_loss(model, make_batch(rank, 0))
        del kept
        assert float(model.module.forwards) == 1.0
        assert (constructor.total, forward.total) == ((1, 0) if is_deferred else (0, 1))
