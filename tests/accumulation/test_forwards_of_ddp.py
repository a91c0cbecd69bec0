"""The forwards of DDP in a window: they communicate nothing, and a loss that bypassed them raises on every rank.

So a rank that leaves a forward out does not hang the others, and no gradient stays without its reduction.
"""

from __future__ import annotations

import contextlib
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from batches import all_batches, make_batch, make_window, num_valid, one_process, sum_loss
from collective_counter import CollectiveCounter
from on_ranks import on_ranks, slow_but
from subjects import Model, error, gradient, has_gradients, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from verbs import run_window
from workers import error_of

from fullrank import DeferredMean, accumulate, count_valid_tokens
from fullrank.gradients.wrappers import find_sync

OTHER_FORMS = ("find unused", "static graph", "no broadcasts", "nested")


def wrapped(form: str, buffers: bool) -> nn.Module:
    options = {
        "find unused": {"find_unused_parameters": True},
        "static graph": {"static_graph": True},
        "no broadcasts": {"broadcast_buffers": False},
    }.get(form, {})
    module = wrap(Model(buffers=buffers), "ddp", **options)
    return nn.Sequential(module) if form == "nested" else module


def window_error(rank: int, model: nn.Module, layout: str) -> float:
    """Return the error of a window without faults; "one" is one micro-batch a rank, as DDP with static_graph needs."""
    windows = [make_window("full" if layout == "one" else layout, other) for other in range(dist.get_world_size())]
    windows = [window[:1] if layout == "one" else window for window in windows]
    model.zero_grad()
    run_window(model, windows[rank])
    return error(gradient(model), one_process(Model(), [batch for window in windows for batch in window]).gradient)


@pytest.mark.slow
@pytest.mark.parametrize("form", OTHER_FORMS)
@on_ranks(2)
def test_a_rank_that_skips_its_only_micro_batch(rank: int, form: str) -> None:
    """In the first, the second and the third window, with and without buffers that DDP broadcasts."""
    for buffers, num_before in itertools.product((False, True), (0, 1, 2)):
        model = wrapped(form, buffers)
        errors = [window_error(rank, model, "one") for _ in range(num_before)]
        use = {"use": lambda step, index, loss, items: None} if rank else {}
        kind, text = error_of(partial(run_window, model, make_window("full", rank)[:1], **use))
        assert kind == "RuntimeError"
        assert "failed on rank 1: micro-batch 0: expected one backward, got 0" in text
        assert max(errors + [window_error(rank, model, "one") for _ in range(2)]) <= 1e-12


def collectives(rank: int, form: str, buffers: bool, is_raw: bool = False) -> list[int]:
    """Return the collectives in the first forward of three windows, or of three plain steps of DDP."""
    model, counts = wrapped(form, buffers), []
    for _ in range(3):
        for step, batch in [(None, make_batch(rank, 0))] if is_raw else accumulate(model, [make_batch(rank, 0)], 5.0):
            with CollectiveCounter() as counter:
                loss = sum_loss(model, batch)
            (loss if step is None else step).backward(*[] if step is None else [loss])
            counts.append(counter.total)
    return counts


@pytest.mark.parametrize("form", slow_but(["default"], ["default", *OTHER_FORMS]))
@on_ranks(2)
def test_forwards_inside_a_window_communicate_nothing(rank: int, form: str) -> None:
    for buffers in (False, True):
        assert collectives(rank, form, buffers) == [0, 0, 0]


@on_ranks(2)
def test_control_forwards_of_ddp_alone_communicate(rank: int) -> None:
    first, second, third = collectives(rank, "default", True, is_raw=True)
    assert first == third > 0  # buffers
    assert second > first  # and buckets


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["every rank", "every rank, one in no_sync", "one rank", "one rank in no_sync", "one rank in no_grad"]
)
@on_ranks(2)
def test_a_forward_without_a_backward_before_the_window(rank: int, way: str) -> None:
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
        errors += [window_error(rank, model, layout) for layout in ("unequal", "full")]
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
    """From rank 0; two more broadcasts arrange the buckets, in the second window. After no_sync there is none."""
    model = wrapped("default", True)
    for broadcasts, forwards in ((1, 3.0), (3, 3.0), (1, 3.0), (0, 4.0)):
        model.module.forwards.fill_(10.0 * rank)
        if broadcasts == 0:
            with model.no_sync():
                sum_loss(model, make_batch(rank, 0)).backward()
        with CollectiveCounter() as counter:
            run_window(model, make_window("full", rank))
        assert (float(model.module.forwards), counter.counts["broadcast_.default"]) == (forwards, broadcasts)


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


def manual_backward(model: DistributedDataParallel, loss: Tensor) -> None:
    """Prepare the reduction of DDP before the backward, as ``manual_backward`` of Lightning does."""
    model.require_forward_param_sync = model.require_backward_grad_sync
    if model.require_backward_grad_sync:
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
    loss.backward()


OF_RANK = "accumulate (end of the window) failed on rank 1: loss of micro-batch 2: expected a tensor from the forward"
# Of its micro-batches the last rank leaves out ``manual_backward`` in these; or every rank back-propagates the last one
# itself, so that no rank reduces, which shows at the end of the window.
FAULTS = {
    "last": OF_RANK,
    "every one": OF_RANK,
    "none": "",
    "unprepared": "loss: expected a tensor from the forward of the DDP module",
}


@pytest.mark.parametrize(("buffers", "num_before"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_a_rank_that_leaves_out_manual_backward_raises_on_every_rank(
    rank: int, fault: str, buffers: bool, num_before: int
) -> None:
    """In a window inside a forward of DDP; the windows around it are exact."""
    inner = Model(buffers=buffers)
    stepping = nn.ModuleList([inner])  # runs a whole window inside the forward, as Lightning runs ``training_step``
    stepping.forward = lambda run: run(inner)
    model, errors, found = DistributedDataParallel(stepping), [], ("none", "")
    batches, odd = make_window("full", rank), rank == dist.get_world_size() - 1

    def window(fault: str, inner: nn.Module) -> None:
        for index, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens)):
            loss = sum_loss(inner, batch)
            is_last = index == len(batches) - 1
            if odd and (fault == "every one" or (fault == "last" and is_last)):
                step.backward(loss)
            elif fault == "unprepared" and is_last:
                step.scale(loss).backward()
            else:
                manual_backward(model, step.scale(loss))

    def training_step(fault: str) -> None:
        model.require_backward_grad_sync = False  # Lightning does so for the forward around a training step
        try:
            model(partial(window, fault))
        finally:
            model.require_backward_grad_sync = True

    for index in range(num_before + 3):
        model.zero_grad()
        if index == num_before:
            found = error_of(lambda: training_step(fault))
            assert has_gradients(model) == (fault == "none")
        else:
            training_step("none")
            errors.append(error(gradient(model), one_process(Model(), all_batches("full")).gradient))
    assert found[0] == ("none" if fault == "none" else "ValueError")
    assert found[1].startswith(FAULTS[fault])
    assert max(errors) <= 1e-12


@on_ranks(2)
def test_control_ddp_does_not_reduce_after_a_forward_of_its_module(rank: int) -> None:
    """A plain backward after it, without the check."""
    model, first = DistributedDataParallel(Model()), [make_window("full", other)[0] for other in range(2)]
    (sum_loss(model.module, first[rank]) * 2 / sum(map(num_valid, first))).backward()
    assert error(gradient(model), one_process(Model(), first).gradient) > 0.1


@on_ranks(2)
def test_a_module_that_earlier_micro_batches_alone_have_used(rank: int) -> None:
    """The last backward would leave its gradients as they are on this rank. The control uses it there too."""
    model, batches = nn.ModuleList(DistributedDataParallel(Model()) for _ in range(2)), make_window("full", rank)

    def window(places: tuple[int, ...]) -> None:
        for index, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens)):
            step.backward(sum(sum_loss(used, batch) for used in model[: 1 + (index in places)]))

    for places in ((0,), (0, 2), (1,), (0,)):
        kind, text = error_of(partial(window, places))
        assert kind == ("none" if 2 in places else "ValueError")
        assert ("loss of micro-batch 2: expected a tensor from the forward of the DDP module" in text) == (
            kind != "none"
        )


@on_ranks(2)
def test_the_loss_of_a_call_that_raised_is_not_taken_again(rank: int) -> None:
    """The error has reset DDP, so a backward of that loss would not reduce."""
    model, first = DistributedDataParallel(Model()), [make_window("full", other)[0] for other in range(2)]
    deferred, loss, number = DeferredMean(model), sum_loss(model, first[rank]), num_valid(first[rank])
    assert "n: expected a finite number >= 0" in error_of(lambda: deferred.backward(loss, -1))[1]
    assert "forward of the DDP module" in error_of(lambda: deferred.backward(loss, number))[1]
    deferred.backward(sum_loss(model, first[rank]), number)
    deferred.finish()
    assert error(gradient(model), one_process(Model(), first).gradient) <= 1e-12
