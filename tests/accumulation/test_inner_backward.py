"""A loss that back-propagates inside itself takes the factor of the window, or is refused; correct programs are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import IGNORED, Batch, all_batches, make_window, one_process, sum_loss
from on_ranks import common_error, on_ranks
from subjects import Model, by_hand, error, mesh_of, reduced, wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workers import error_of

from fullrank import accumulate, clip_grad_norm_, count_valid_tokens


class _Bridge(torch.autograd.Function):
    """A value whose gradient has been computed before."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return value

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> Any:
        return ctx.saved_tensors[0] * outer, None, None


def run(model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], batches: list[Batch], **options: Any) -> None:
    for step, batch in accumulate(model, batches, count_valid_tokens, group=by_hand(model), **options):
        step.backward(loss(model, batch))


@pytest.mark.parametrize("is_chunked", [True, False])
@on_ranks()
def test_gradients_that_fsdp_holds_in_another_dtype_are_seen(rank: int, is_chunked: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).double()
    for layer in model:
        fully_shard(layer, mesh=mesh_of("fsdp2"), mp_policy=policy)

    def window() -> None:
        for step, batch in accumulate(model, [torch.ones(2, 3, dtype=torch.float64)] * 2, len):
            hidden = model[0](batch)
            if is_chunked:
                leaf = hidden.detach().requires_grad_()
                model[1](leaf).sum().backward()
                step.backward(_Bridge.apply(hidden, leaf.grad, hidden.detach().sum()))
            else:
                step.backward(model[1](hidden).sum())

    found, text = common_error(window)
    assert found == ("RuntimeError" if is_chunked else "none"), text
    assert ("expected gradients that have not changed" in text) == is_chunked


def _zeros(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def _clip(model: nn.Module) -> None:
    clip_grad_norm_(model, 1e-3)


def _others(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def _checkpointed(model: nn.Module, batch: Batch) -> Tensor:
    logits = checkpoint(model, batch["tokens"], use_reentrant=False)[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def _with_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss and 0 times a penalty on gradients, which ``torch.autograd.grad`` computes."""
    loss = sum_loss(model, batch)
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.is_leaf], create_graph=True)
    return loss + 0 * torch.stack([grad.square().sum() for grad in grads]).sum()


@on_ranks()
def test_values_without_gradients_are_means(rank: int) -> None:
    """Numbers, as of a micro-batch whose loss has been computed elsewhere."""
    model = Model()
    for step, _ in accumulate(model, [1.0, 2.0], lambda batch: 2, group=by_hand(model)):
        step.record(3 + rank)
    world_size = dist.get_world_size()
    assert step.mean_loss() == sum(3 + other for other in range(world_size)) / 2 / world_size
    found, text = error_of(lambda: step.factor)
    assert (found, "none: the loop was left" in text) == ("RuntimeError", True)


HABITS: dict[str, Any] = {  # wrapper and its options, what is called in the first micro-batch, and after a window; loss
    "none in the window": ("ddp", {}, nn.Module.zero_grad, None, sum_loss),
    "zeros in the window": ("ddp", {}, _zeros, None, sum_loss),
    "zeros in a plain window": ("plain", {}, _zeros, None, sum_loss),
    "zeros made in the window": ("plain", {}, _others, None, sum_loss),
    "sharded zeros in the window": ("fsdp2", {}, _zeros, None, sum_loss),
    "clipping": ("ddp", {}, _zeros, _clip, sum_loss),
    "checkpoint": ("ddp", {}, None, nn.Module.zero_grad, _checkpointed),
    "penalty": ("plain", {}, None, nn.Module.zero_grad, _with_penalty),
    "views of buckets": ("ddp", {"gradient_as_bucket_view": True}, None, _zeros, sum_loss),
    "unused parameters": ("ddp", {"find_unused_parameters": True}, None, _zeros, sum_loss),
}


@pytest.mark.parametrize(("habit", "sync"), [*zip(HABITS, itertools.cycle(["last", "each"]))])
@on_ranks()
def test_correct_programs_pass(rank: int, habit: str, sync: str) -> None:
    """In three windows, the first two of which are watched; control: a gradient that is not 0 is added."""
    kind, options, first, after, loss = HABITS[habit]
    model, batches = wrap(Model(), kind, **options), make_window("full", rank)
    expected = one_process(Model(), all_batches("full")).gradient

    def compute(model: nn.Module, batch: Batch, more: Any = None) -> Tensor:
        if batch is batches[0]:
            [change(model) for change in (first, more) if change is not None]
        return loss(model, batch)

    for _ in range(3):
        run(model, compute, batches, sync=sync)
        assert error(reduced(model), expected) <= 1e-12
        if after is not None:
            after(model)

    def add(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad.add_(1)

    model = wrap(Model(), kind, **options)
    _, text = common_error(lambda: run(model, lambda model, batch: compute(model, batch, add), batches, sync=sync))
    assert "micro-batch 0: expected gradients that have not changed" in text
