"""DDP reduces only after a forward of its own: a loss that bypassed it raises on every rank before the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accumulate_cases import Counting, Model, all_batches, error, flat, make_window, num_valid, sum_loss, whole
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import WorkerPool, error_of

from fullrank import DeferredMean, accumulate, count_valid_tokens, pooled_backward

VERBS = ["accumulate", "each", "DeferredMean", "pooled_backward"]
FAULTS = ["module on one rank", "module on every rank", "module in one micro-batch", "leaf on one rank"]


def scores_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return one score a token."""
    return model(batch["tokens"]).flatten(0, 1)[:, :1]


def run(verb: str, model: nn.Module, deferred: DeferredMean, rank: int, fault: str) -> None:
    """Run one window; with ``fault``, on some ranks a loss that DDP does not see in one micro-batch or in all."""
    batches = make_window("full", rank)
    odd = rank == dist.get_world_size() - 1 or "every" in fault

    def forward_of(index: int) -> Any:
        bypasses = fault.startswith("module") and odd and ("in one" not in fault or index == len(batches) - 1)
        return model.module if bypasses else model

    def loss(index: int) -> Tensor:
        if fault.startswith("leaf") and odd and index == len(batches) - 1:
            return torch.zeros((), dtype=torch.float64, requires_grad=True)
        return sum_loss(forward_of(index), batches[index])

    if verb == "DeferredMean":
        for index, batch in enumerate(batches):
            deferred.backward(loss(index), num_valid(batch))
        deferred.finish()
    elif verb == "pooled_backward":
        places = {id(batch): index for index, batch in enumerate(batches)}
        pooled_backward(
            model,
            batches,
            forward=lambda batch: scores_of(forward_of(places[id(batch)]), batch),
            loss=lambda scores, _: scores.square().sum(),
        )
    else:
        sync = "each" if verb == "each" else "last"
        for index, (step, _) in enumerate(accumulate(model, batches, count_valid_tokens, sync=sync)):
            step.backward(loss(index))


def reference(verb: str) -> Tensor:
    """Return the gradient of one process."""
    model = Model(torch.float64)
    if verb != "pooled_backward":
        return whole(model, all_batches("full")).gradient
    torch.cat([scores_of(model, batch) for batch in all_batches("full")]).square().sum().backward()
    return flat(model) / dist.get_world_size()  # its loss is that of each rank's own rows, and DDP takes the mean


def bypassed(rank: int, verb: str, fault: str, num_before: int, buffers: bool) -> tuple[tuple[str, str], list[float]]:
    """Return what a window with a fault raises, and the errors of the windows before and after it."""
    model = DistributedDataParallel((Counting if buffers else Model)(torch.float64))
    deferred, errors, found = DeferredMean(model), [], ("none", "")
    for index in range(num_before + 3):
        model.zero_grad()
        if index == num_before:
            found = error_of(lambda: run(verb, model, deferred, rank, fault))
            deferred.discard()
        else:
            run(verb, model, deferred, rank, "")
            errors.append(error(flat(model), reference(verb)))
    return found, errors


def bypassed_without_check(rank: int) -> float:
    """Return the error of a plain backward of DDP after a forward of its module."""
    model = DistributedDataParallel(Model(torch.float64))
    world_size = dist.get_world_size()
    batch = make_window("full", rank)[0]
    total = sum(num_valid(make_window("full", other)[0]) for other in range(world_size))
    (sum_loss(model.module, batch) * world_size / total).backward()
    first = [make_window("full", other)[0] for other in range(world_size)]
    return error(flat(model), whole(Model(torch.float64), first).gradient)


def repeated(rank: int) -> tuple[list[tuple[str, str]], float]:
    """Return what DeferredMean raises for a bad count and for the same loss again; the error after a new forward."""
    model, batch = DistributedDataParallel(Model(torch.float64)), make_window("full", rank)[0]
    deferred, loss = DeferredMean(model), sum_loss(model, batch)
    found = [error_of(lambda: deferred.backward(loss, -1)), error_of(lambda: deferred.backward(loss, num_valid(batch)))]
    deferred.backward(sum_loss(model, batch), num_valid(batch))
    deferred.finish()
    batches = [make_window("full", other)[0] for other in range(dist.get_world_size())]
    return found, error(flat(model), whole(Model(torch.float64), batches).gradient)


class Stepping(nn.Module):
    """Runs a whole window inside the forward of DDP, as Lightning runs ``training_step``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[nn.Module], None]) -> None:
        run(self.model)


def manual_backward(model: DistributedDataParallel, loss: Tensor) -> None:
    """Prepare the reduction of DDP before the backward, as ``manual_backward`` of Lightning does."""
    model.require_forward_param_sync = model.require_backward_grad_sync
    if model.require_backward_grad_sync:
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
    loss.backward()


def inside_a_forward(rank: int, fault: str, num_before: int, buffers: bool) -> tuple[tuple[str, str], list[float]]:
    """Return what a window inside a forward of DDP raises when the last rank leaves out ``manual_backward``.

    And the errors of the windows around it. ``fault``: "last", "every one" or "none" of its micro-batches.
    """
    inner = (Counting if buffers else Model)(torch.float64)
    model, errors, found = DistributedDataParallel(Stepping(inner)), [], ("none", "")
    batches, odd = make_window("full", rank), rank == dist.get_world_size() - 1

    def window(fault: str, inner: nn.Module) -> None:
        for index, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens)):
            loss = sum_loss(inner, batch)
            if odd and (fault == "every one" or (fault == "last" and index == len(batches) - 1)):
                step.backward(loss)
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
        else:
            training_step("none")
            errors.append(error(flat(model), whole(Model(torch.float64), all_batches("full")).gradient))
    return found, errors


@pytest.mark.parametrize("fault", ["last", "every one", "none"])
def test_a_rank_that_leaves_out_manual_backward_raises_on_every_rank(pool_of_two: WorkerPool, fault: str) -> None:
    """In the first and the second window, with and without buffers; with the fault "none" nothing raises."""
    for buffers in (False, True):
        for num_before in (0, 1):
            for found, errors in pool_of_two(inside_a_forward, fault, num_before, buffers):
                assert found[0] == ("none" if fault == "none" else "ValueError")
                assert ("failed on rank 1: loss of micro-batch 2: expected a tensor from the forward" in found[1]) == (
                    fault != "none"
                )
                assert max(errors) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_loss_that_ddp_does_not_see_raises_on_every_rank(pool_of_two: WorkerPool, verb: str, fault: str) -> None:
    """In the first and the second window, with and without buffers; the windows around it are exact."""
    if (verb == "pooled_backward" and fault.startswith("leaf")) or (verb == "each" and fault == FAULTS[0]):
        pytest.skip("a replay has scores; with sync='each' the first micro-batch raises on that rank alone")
    for buffers in (False, True):
        for num_before in (0, 1):
            if buffers and verb == "each" and fault != FAULTS[1]:
                continue  # every forward broadcasts buffers, after a reduction
            outcomes = pool_of_two(bypassed, verb, fault, num_before, buffers)
            for found, errors in outcomes:
                assert "leaf" in found[1] if fault.startswith("leaf") else "forward of the DDP module" in found[1]
                assert found[0] == "ValueError"
                assert found == outcomes[0][0] or (verb == "each" and fault == FAULTS[1])  # each raises at once
                assert max(errors) <= 1e-12


def test_control_ddp_does_not_reduce_after_a_forward_of_its_module(pool_of_two: WorkerPool) -> None:
    assert max(pool_of_two(bypassed_without_check)) > 0.1


def test_the_loss_of_a_call_that_raised_is_not_taken_again(pool_of_two: WorkerPool) -> None:
    """The error has reset DDP, so a backward of that loss would not reduce."""
    for found, wrong in pool_of_two(repeated):
        assert "n: expected a finite number >= 0" in found[0][1]
        assert "forward of the DDP module" in found[1][1]
        assert wrong <= 1e-12
