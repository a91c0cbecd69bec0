"""Several losses with counts of their own in one window.

Their gradients against one process that divides each by its count, and the mistakes of one rank, are in
tests/conformance.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from batches import Batch, all_batches, make_window, num_valid, one_process_of_terms, sum_losses
from collective_counter import CollectiveCounter
from on_ranks import on_ranks
from subjects import TwoHeads, by_hand, error, gradient, reduced, wrap
from torch import Tensor
from verbs import COUNTS, terms_in
from workers import error_of

from fullrank import accumulate, count_valid_tokens

SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
@on_ranks()
def test_a_name_without_terms_has_no_gradient_though_its_loss_is_nan(rank: int, kind: str) -> None:
    """The layers that it shares with another name get the gradient of the other."""
    model, batches = wrap(TwoHeads(), kind), make_window("full", rank)
    expected = one_process_of_terms(TwoHeads(), all_batches("full"), mtp=0.0)
    for _ in range(2):
        for step, batch in accumulate(model, batches, COUNTS | {"mtp": lambda batch: 0}, group=by_hand(model)):
            losses = sum_losses(model, batch)
            losses["mtp"] = losses["mtp"] / losses["mtp"].detach().mul(0) * math.nan
            step.backward(losses)
        assert error(reduced(model), expected.gradient) <= 1e-12
        assert error(step.mean_loss(), expected.loss) <= 1e-12
        assert step.mean_losses()["mtp"] == 0
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


@on_ranks()
def test_weights_are_compared_as_numbers(rank: int) -> None:
    """Spelled otherwise on one rank or in one micro-batch; a float32 of numpy does not round the factor of its name."""
    model, last = TwoHeads(), dist.get_world_size() - 1
    spellings: list[tuple[Any, ...]] = [(2, 2.0), (0.0, -0.0), (True, 1), (None, 1.0), (0.5, numpy.float64(0.5))]
    for ways in [*spellings, (0.25, numpy.float32(0.25)), (-3.0, numpy.int64(-3))]:
        found = []
        for given in (ways[:1], ways[::-1] if rank == last else ways):
            window = accumulate(model, make_window("full", rank), COUNTS, group=by_hand(model))
            for index, (step, batch) in enumerate(window):
                weight = given[index % len(given)]
                step.backward(sum_losses(model, batch), weights={} if weight is None else {"mtp": weight})
            found.append(torch.cat([gradient(model), step.mean_loss()[None]]))
            model.zero_grad()
        assert torch.equal(*found), ways


@on_ranks(2)
def test_names_and_no_names_are_not_mixed(rank: int) -> None:
    model, batches = TwoHeads(), make_window("full", rank)
    for step, batch in accumulate(model, batches, COUNTS, group=by_hand(model)):
        assert error_of(lambda step=step: step.factor)[0] == "RuntimeError"
        step.backward(sum_losses(model, batch))
    for step, batch in accumulate(model, batches, count_valid_tokens, group=by_hand(model)):
        assert error_of(lambda step=step: step.factors)[0] == "RuntimeError"
        step.backward(sum_losses(model, batch)["ce"])

    assert error_of(step.mean_losses)[0] == "RuntimeError"
    assert "a window with each=True" in error_of(step.losses)[1]


def _means_of_each(layout: str) -> tuple[Tensor, Tensor]:
    """Return the losses of the micro-batches of all ranks, and the means over ranks of means, in one process."""
    windows = [make_window(layout, rank) for rank in range(dist.get_world_size())]
    columns = [[batch for batch in column if batch] for column in itertools.zip_longest(*windows)]

    def mean(*batches: Batch) -> Tensor:
        return one_process_of_terms(TwoHeads(), batches).loss

    wrong = [torch.stack([mean(batch) for batch in column]).mean() for column in columns]
    return torch.stack([mean(*column) for column in columns]), torch.stack(wrong)


@pytest.mark.parametrize(
    ("kind", "form", "layout"),
    [
        ("plain", "backward", "uneven"),
        SLOW("plain", "some early", "unequal"),
        SLOW("ddp", "factors", "unequal"),
        SLOW("ddp", "backward", "full"),
        SLOW("fsdp2", "some early", "none"),
    ],
)
@on_ranks()
def test_the_loss_of_each_micro_batch(rank: int, kind: str, form: str, layout: str) -> None:
    """Over all ranks, in three windows, and those of the names; the control is the mean over ranks of means."""
    model, batches, numbers = wrap(TwoHeads(), kind), make_window(layout, rank), []
    expected, wrong = _means_of_each(layout)
    ce, both = (one_process_of_terms(TwoHeads(), all_batches(layout), mtp=weight).loss for weight in (0.0, 1.0))
    use = terms_in("factors" if form == "factors" or (form == "some early" and rank == 0) else "backward")
    for _ in range(3):
        with CollectiveCounter() as counter:
            for index, (step, batch) in enumerate(accumulate(model, batches, COUNTS, group=by_hand(model), each=True)):
                use(step, index, sum_losses(model, batch), num_valid(batch))
        assert error(step.losses(), expected) <= 1e-12
        assert step.losses().dtype == torch.float64
        assert step.mean_losses().keys() == {"ce", "mtp"}
        assert error(step.mean_losses()["ce"], ce) <= 1e-12
        assert error(step.mean_losses()["mtp"], both - ce) <= 1e-12
        model.zero_grad()
        numbers.append(counter.total)
    if kind == "plain":  # the first window may have a payload of its own
        assert numbers[1:] == [2 if form == "backward" else 3] * 2
    if layout in ("full", "uneven"):
        assert error(wrong, expected) > 1e-3
