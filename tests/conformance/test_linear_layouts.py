"""The loss from hidden states where the weight is not at hand after the forward: FSDP2 that shards again, TP, both.

Where it is, under DDP or FSDP2 of the root, it is a verb of the table in verbs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from batches import Batch, Result, make_window, one_process
from meshes import init_device_mesh
from on_ranks import common_error, on_ranks
from subjects import HIDDEN, NUM_FEATURES, Headless, Model, error, gradient
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullrank
from fullrank import causal_lm_loss
from fullrank.losses.summed import vocabulary

LAYOUTS = ("root", "resharded", "method of the head", "tp", "fsdp2 x tp")


class Tied(Headless):
    """Words have one vector, for input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN).double()
        self.embed = nn.Embedding(NUM_FEATURES, HIDDEN).double()
        for number, parameter in enumerate([*self.up.parameters(), self.embed.weight]):
            parameter.data = (
                torch.arange(7.0 * number, 7.0 * number + parameter.numel()).double().sin().view_as(parameter)
            )
        self.down.weight = self.embed.weight


class TiedWhole(Tied):
    forward = Model.forward


Loss = Callable[[Any, Tensor, Batch], Tensor]


class WithLoss(nn.Module):
    """Computes its loss in its forward, or in a method that FSDP2 treats like it."""

    def __init__(self, model: nn.Module, loss_of: Loss) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def loss_sum(self, batch: Batch) -> Tensor:
        return self.loss_of(self.model.down, self.model(batch["tokens"]), batch)


class Head(nn.Linear):
    def loss_sum(self, hidden: Tensor, batch: Batch) -> Tensor:
        return loss_of(self, hidden, batch)


def loss_of(head: nn.Linear, hidden: Tensor, batch: Batch) -> Tensor:
    return causal_lm_loss(hidden, batch["labels"], weight=head.weight, bias=head.bias, reduction="sum")


def minus_log_probs(head: nn.Linear, hidden: Tensor, batch: Batch) -> Tensor:
    """Return the same from the log-probability of each token."""
    labels, weights = batch["labels"][:, 1:], {"weight": head.weight, "bias": head.bias}
    return -fullrank.token_log_probs(hidden[:, :-1], labels, **weights).sum()


class Made(NamedTuple):
    """A wrapped model, what computes the loss of a micro-batch, the group to count over, and the rank of the data."""

    model: nn.Module
    loss: Callable[[Batch], Tensor]
    group: Any
    data_rank: int
    num_data: int


def make(layout: str, tied: bool, loss_of: Loss = loss_of) -> Made:
    model: Any = Tied() if tied else Headless()
    size, rank = dist.get_world_size(), dist.get_rank()
    if "tp" in layout:
        shape = (1, size) if layout == "tp" else (2, size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))
        plan: Any = {"down": ColwiseParallel()}
        plan |= {"embed": RowwiseParallel(input_layouts=Replicate())} if tied else {}
        parallelize_module(model, mesh["model"], plan)
        if tied:
            model.down.weight = model.embed.weight  # each has been made a parameter of its own
        whole = WithLoss(model, loss_of)
        if layout == "tp":
            return Made(whole, whole.loss_sum, mesh["data"], 0, 1)
        fully_shard(model.up, mesh=mesh["data"])
        fully_shard(whole, mesh=mesh["data"], reshard_after_forward=True)
        register_fsdp_forward_method(whole, "loss_sum")
        return Made(whole, whole.loss_sum, None, rank // (size // 2), 2)
    mesh = init_device_mesh("cpu", (size,))
    if layout == "method of the head":
        head = Head(HIDDEN, NUM_FEATURES).double()
        head.load_state_dict(model.down.state_dict())
        model.down = head
        for part in (model.up, head, model):
            fully_shard(part, mesh=mesh)
        register_fsdp_forward_method(head, "loss_sum")
        loss = lambda batch: head.loss_sum(model(batch["tokens"]), batch)  # noqa: E731
        return Made(model, loss, None, rank, size)
    fully_shard(model.up, mesh=mesh)
    if layout == "root":
        fully_shard(model, mesh=mesh)
        return Made(model, lambda batch: loss_of(model.down, model(batch["tokens"]), batch), None, rank, size)
    whole = WithLoss(model, loss_of)
    fully_shard(whole, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(whole, "loss_sum")
    return Made(whole, whole.loss_sum, None, rank, size)


def window_of(made: Made, rank: int) -> list[Batch]:
    """Return the window of a data rank, in which some micro-batches have no labels."""
    return make_window("full" if made.num_data == 1 else "uneven", rank)


def run(made: Made) -> Tensor:
    batches = window_of(made, made.data_rank)
    for step, batch in fullrank.accumulate(made.model, batches, fullrank.count_valid_tokens, group=made.group):
        step.backward(made.loss(batch))
    return step.mean_loss()


def expected_of(made: Made, tied: bool) -> Result:
    batches = [batch for rank in range(made.num_data) for batch in window_of(made, rank)]
    return one_process(TiedWhole() if tied else Model(), batches)


CASES = [
    pytest.param(size, layout, tied, loss, marks=pytest.mark.full if size == 3 else pytest.mark.slow)
    for layout in LAYOUTS
    for tied, loss in ((False, loss_of), (False, minus_log_probs), (True, loss_of))
    # The embedding needs the weight outside of the methods of the head.
    if layout != "method of the head" or (not tied and loss is loss_of)
    for size in ((4,) if layout == "fsdp2 x tp" else (2, 3))
]


@pytest.mark.parametrize(("world_size", "layout", "tied", "loss"), CASES)
@on_ranks(...)
def test_layout(rank: int, layout: str, tied: bool, loss: Loss) -> None:
    """In two steps, because wrappers set themselves up in the first."""
    made = make(layout, tied, loss)
    for _ in range(2):
        made.model.zero_grad()
        found, expected = run(made), expected_of(made, tied)
        assert error(gradient(made.model), expected.gradient) <= 1e-12
        assert error(found, expected.loss) <= 1e-12


class NoExchange:
    """In the place of what ranks exchange."""

    def __init__(self, call: str, group: Any) -> None:
        self.group = group

    largest = sum = staticmethod(lambda tensor, what: tensor)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "fsdp2 x tp"])
@on_ranks(4)
def test_control_without_what_the_ranks_exchange(rank: int, layout: str) -> None:
    made = make(layout, False)
    with mock.patch.object(vocabulary, "Exchange", NoExchange):
        run(made)
    assert error(gradient(made.model), expected_of(made, False).gradient) > 0.1


@pytest.mark.slow
@on_ranks(2)
def test_a_weight_that_fsdp2_has_sharded_again_is_refused(rank: int) -> None:
    """On every rank, with what to do; also that of a head with a ``fully_shard`` of its own, outside of its methods."""
    batch = make_window("full", rank)[0]
    hidden = torch.randn(*batch["tokens"].shape, HIDDEN, dtype=torch.float64)
    models: list[Any] = [make("resharded", False).model, make("method of the head", False).model]
    for down in (models[0].model.down, models[1].down):
        kind, text = common_error(partial(loss_of, down, hidden, batch))
        assert kind == "ValueError"
        assert "got a part that FSDP2 holds between forwards. FSDP2 gathers the weight inside the forward" in text
        assert 'register_fsdp_forward_method(module, "name")' in text
