"""A wrapper is found wherever its parameters are reached from: a part of a wrapped model gives its exact gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from batches import Batch, all_batches, make_window, num_valid, one_process, sum_loss
from meshes import init_device_mesh
from on_ranks import on_ranks
from subjects import Adapted, Model, error, gradient, mesh_of, wrap
from torch import Tensor
from verbs import collect, run_window
from workers import error_of

from fullrank import DeferredMean, all_reduce_grads_, pooled_backward, sum_gradients_


def _mean(scores: Tensor, batches: list[Batch]) -> Tensor:
    return scores.mean()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verb"), [("fsdp2", "deferred"), ("summed", "accumulate"), ("hsdp", "accumulate")])
@on_ranks(4)
def test_a_part_of_a_model_under_fsdp(rank: int, kind: str, verb: str) -> None:
    """Two windows of ``up``, all that is trained of a model that is wrapped as a whole."""
    from torch.distributed.fsdp import fully_shard

    for resharded in (True, False):
        model, reference = Model(), Model()
        for part in (model.embed, model.down, reference.embed, reference.down):
            part.requires_grad_(False)
        fully_shard(model, mesh=mesh_of(kind), reshard_after_forward=resharded)
        if kind == "summed":
            sum_gradients_(model)
        deferred = DeferredMean(model.up) if verb == "deferred" else None
        for _ in range(2):
            if deferred is None:
                run_window(model.up, make_window("full", rank), through=lambda _, model=model: model)
            else:
                collect(deferred, model, make_window("full", rank)).finish()
            one_process(reference, all_batches("full"))
            assert error(gradient(model.up), gradient(reference.up)) <= 1e-12
            model.zero_grad()


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@on_ranks()
def test_adapters_with_one_base(rank: int, kind: str) -> None:
    """Two adapters collect their gradients in turns, and finish one after the other."""
    from torch.distributed.fsdp import fully_shard

    model, reference, size = Adapted(), Adapted(), dist.get_world_size()
    for one in (model, reference):
        one.base.requires_grad_(False)
    is_ddp = kind == "ddp"
    runs: Any = wrap(model, kind, find_unused_parameters=True) if is_ddp else fully_shard(model, mesh=mesh_of(kind))
    deferred = [DeferredMean(adapter, multiplier=float(size) if is_ddp else None) for adapter in model.adapters]
    for index, batch in enumerate(make_window("full", rank)):
        client = index % 2
        deferred[client].backward(sum_loss(partial(runs, index=client), batch), num_valid(batch))
    for client, one in enumerate(deferred):
        one.finish()
        mine = [batch for other in range(size) for batch in make_window("full", other)[client::2]]
        total = sum(map(num_valid, mine))
        (sum(sum_loss(partial(reference, index=client), batch) for batch in mine) / total).backward()
        assert error(gradient(model.adapters[client]), gradient(reference.adapters[client])) <= 1e-12
    deferred[0].discard()
    assert model.adapters[0].weight.grad is None
    assert model.adapters[1].weight.grad is not None


@pytest.mark.parametrize("verb", ["accumulate", "deferred", "pooled"])
@on_ranks()
def test_a_hook_after_the_reduction_of_fsdp(rank: int, verb: str) -> None:
    """FSDP2 does not know over which ranks the hook adds: without ``group`` every rank raises, with it all is exact."""
    from torch.distributed.fsdp import fully_shard

    size, world = dist.get_world_size(), dist.group.WORLD
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("all", "one"))
    model, reference, window = Model(), Model(), make_window("full", rank)
    fully_shard(model, mesh=mesh["one"])

    def run(group: Any) -> None:
        if verb == "pooled":
            pooled_backward(model, window, forward=lambda batch: model(batch["tokens"]), loss=_mean, group=group)
        elif verb == "accumulate":
            run_window(model, window, group=group)
        else:
            collect(DeferredMean(model, group), model, window).finish()

    if verb != "pooled":
        run(None)  # the control: without the hook each rank has the mean of its own rows
        one_process(reference, window)
        assert error(gradient(model), gradient(reference)) <= 1e-12
        model.zero_grad()
    model.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient) and None)
    name, text = error_of(lambda: run(None))
    assert name == "ValueError"
    assert "gradients that FSDP2 alone reduces, without group, got a function of set_all_reduce_hook. " in text
    assert all(parameter.grad is None for parameter in model.parameters())
    if verb == "pooled":
        return
    run(world)
    one_process(reference, all_batches("full"))
    assert error(gradient(model), gradient(reference)) <= 1e-12
    model.zero_grad()


@on_ranks(2)
def test_a_model_that_no_wrapper_reduces_is_refused(rank: int) -> None:
    model, batches = wrap(Model(), "ddp"), make_window("full", rank)
    calls: list[Callable[[], Any]] = [lambda: run_window(model if rank else model.module, batches, group=None)]
    for part in (model.module, Model()):
        forward = lambda batch, part=part: part(batch["tokens"])[:, 0]  # noqa: E731
        calls += [
            partial(run_window, part, batches, group=None),
            partial(DeferredMean, part),
            partial(pooled_backward, part, batches, forward=forward, loss=_mean),
        ]
    for index, call in enumerate(calls):
        kind, text = error_of(call)
        assert kind == "ValueError", index
        assert "expected a model whose gradients a wrapper reduces over the ranks, got 5 trainable" in text
        assert "accelerator.unwrap_model(model), not Lightning's self" in text
        assert ("failed on rank 0: model" if index == 0 else "failed on rank") in text or call.func is DeferredMean
    DeferredMean(Model().requires_grad_(False))


@on_ranks(2)
def test_composable_replicate_is_named(rank: int) -> None:
    """It leaves no DDP among the modules, and says so in the type of the module it was called with."""
    from torch.distributed._composable.replicate import replicate

    model, batches = replicate(Model()), make_window("full", rank)
    kind, text = error_of(lambda: run_window(model, batches, group=None))
    assert kind == "ValueError"
    assert "got composable replicate, which hides its DDP. Use DistributedDataParallel(model), or fully_shard." in text
    assert all(parameter.grad is None for parameter in model.parameters())


@on_ranks()
def test_flows_that_reduce_by_hand(rank: int) -> None:
    """Flows that say so; the last is ``ddp.module`` that says so wrongly."""
    expected, batches = one_process(Model(), all_batches("full")).gradient, make_window("full", rank)
    size, world = float(dist.get_world_size()), dist.group.WORLD
    for options in ({"group": world}, {"group": None, "multiplier": 1.0}):
        model = Model()
        run_window(model, batches, **options)
        all_reduce_grads_(model, world)
        assert error(gradient(model), expected) <= 1e-12
    model = wrap(Model(), "ddp")
    for options, divisor in (({"multiplier": size}, 1.0), ({"group": world}, size)):
        model.zero_grad()
        run_window(model.module, batches, through=lambda _: model, **options)
        assert error(gradient(model), expected / divisor) <= 1e-12
