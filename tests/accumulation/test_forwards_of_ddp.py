"""DDP reduces only after a forward of its own: a loss that bypassed it raises on every rank before the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from batches import all_batches, make_window, num_valid, one_process, sum_loss
from on_ranks import on_ranks
from subjects import Model, error, gradient, has_gradients
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import error_of

from fullrank import DeferredMean, accumulate, count_valid_tokens


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


OF_RANK = "accumulate (end of the window) failed on rank 1: loss of micro-batch 2: expected a tensor from the forward"
# Of its micro-batches the last rank leaves out ``manual_backward`` in these; or every rank back-propagates the last one
# itself, so that no rank reduces, which shows at the end of the window.
FAULTS = {
    "last": OF_RANK,
    "every one": OF_RANK,
    "none": "",
    "unprepared": "loss: expected a tensor from the forward of the DDP module",
}


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_a_rank_that_leaves_out_manual_backward_raises_on_every_rank(
    rank: int, fault: str, buffers: bool, num_before: int
) -> None:
    """In a window inside a forward of DDP; the windows around it are exact."""
    inner = Model(buffers=buffers)
    model, errors, found = DistributedDataParallel(Stepping(inner)), [], ("none", "")
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
            errors.append(error(gradient(model), one_process(Model(torch.float64), all_batches("full")).gradient))
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
