"""A wrapper is found wherever its parameters are reached from: a part of a wrapped model gives its exact gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import Batch, all_batches, make_window, num_valid, one_process, sum_loss
from subjects import Model, error, gradient, mesh_of, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from verbs import run_window
from workers import WorkerPool, error_of, get_pool

from fullrank import (
    DeferredMean,
    accumulate,
    all_reduce_grads_,
    count_valid_tokens,
    discard_gradients_,
    pooled_backward,
    sum_gradients_,
)
from fullrank.gradients.wrappers import find_sync


def part_of_fsdp(rank: int, kind: str, verb: str, resharded: bool) -> list[float]:
    """Return the errors of two windows of ``up``, all that is trained of a model that FSDP2 wraps as a whole."""
    from torch.distributed.fsdp import fully_shard

    model, reference = Model(torch.float64), Model(torch.float64)
    for part in (model.embed, model.down, reference.embed, reference.down):
        part.requires_grad_(False)
    fully_shard(model, mesh=mesh_of(kind), reshard_after_forward=resharded)
    if kind == "summed":
        sum_gradients_(model)
    batches, errors = make_window("full", rank), []
    deferred = DeferredMean(model.up) if verb == "deferred" else None
    for _ in range(2):
        if deferred is None:
            for step, batch in accumulate(model.up, batches, count_valid_tokens):
                step.backward(sum_loss(model, batch))
        else:
            for batch in batches:
                deferred.backward(sum_loss(model, batch), num_valid(batch))
            deferred.finish()
        # The definition, with all rows in one process.
        reference.zero_grad()
        everything = all_batches("full")
        (sum(sum_loss(reference, batch) for batch in everything) / sum(map(num_valid, everything))).backward()
        errors.append(error(gradient(model.up), gradient(reference.up)))
        model.zero_grad()
    return errors


class Adapters(nn.Module):
    """One frozen base and an adapter for each of two clients."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Model(torch.float64).requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.adapters = nn.ModuleList(nn.Linear(7, 7, dtype=torch.float64) for _ in range(2))

    def forward(self, tokens: Tensor, client: int) -> Tensor:
        logits = self.base(tokens)
        return logits + self.adapters[client](logits)


def clients(rank: int, kind: str) -> list[float]:
    """Return the errors of two adapters that collect their gradients in turns and finish one after the other."""
    from torch.distributed.fsdp import fully_shard

    model, reference = Adapters(), Adapters()
    multiplier = None
    if kind == "ddp":
        runs: nn.Module = DistributedDataParallel(model, find_unused_parameters=True)
        multiplier = float(dist.get_world_size())
    else:
        runs = fully_shard(model, mesh=mesh_of(kind))
    deferred = [DeferredMean(adapter, multiplier=multiplier) for adapter in model.adapters]
    batches, errors = make_window("full", rank), []
    for index, batch in enumerate(batches):
        client = index % 2
        deferred[client].backward(sum_loss(lambda tokens, of=client: runs(tokens, of), batch), num_valid(batch))
    for client, one in enumerate(deferred):
        one.finish()
        mine = [b for r in range(dist.get_world_size()) for b in make_window("full", r)[client::2]]
        total = sum(map(num_valid, mine))
        (sum(sum_loss(lambda tokens, of=client: reference(tokens, of), b) for b in mine) / total).backward()
        errors.append(error(gradient(model.adapters[client]), gradient(reference.adapters[client])))
    deferred[0].discard()
    assert model.adapters[0].weight.grad is None
    assert model.adapters[1].weight.grad is not None
    return errors


def unwrapped(rank: int) -> dict[str, tuple[str, str]]:
    """Return what every verb raises for a model without a wrapper."""
    model = wrap(Model(torch.float64), "ddp")
    batches, found = make_window("full", rank), {}
    parts = {"ddp.module": model.module, "plain": Model(torch.float64)}
    for name, part in parts.items():
        found[f"accumulate {name}"] = error_of(lambda part=part: run_window(part, batches, group=None))
        found[f"deferred {name}"] = error_of(lambda part=part: DeferredMean(part))
        found[f"pooled {name}"] = error_of(
            lambda part=part: pooled_backward(part, batches, forward=lambda b: part(b["tokens"])[:, 0], loss=_mean)
        )
    # Some ranks alone pass the wrong one: all raise.
    odd = model if rank else model.module
    found["one rank"] = error_of(lambda: run_window(odd, batches, group=None))
    frozen = Model(torch.float64).requires_grad_(False)
    found["frozen"] = error_of(lambda: DeferredMean(frozen))
    return found


def _mean(scores: Tensor, batches: list[Batch]) -> Tensor:
    return scores.mean()


def by_hand_errors(rank: int) -> dict[str, float]:
    """Return the errors of flows that reduce by hand and say so; ``naive`` is ``ddp.module`` that says so wrongly."""
    expected, batches, errors = (
        one_process(Model(torch.float64), all_batches("full")).gradient,
        make_window("full", rank),
        {},
    )
    for name in ("group", "multiplier", "deferred"):
        model = Model(torch.float64)
        if name == "deferred":
            deferred = DeferredMean(model, group=dist.group.WORLD)
            for batch in batches:
                deferred.backward(sum_loss(model, batch), num_valid(batch))
            deferred.finish([dist.group.WORLD])
        else:
            options: dict[str, Any] = {"group": dist.group.WORLD} if name == "group" else {"group": None}
            run_window(model, batches, multiplier=None if name == "group" else 1.0, **options)
            all_reduce_grads_(model, dist.group.WORLD)
        errors[name] = error(gradient(model), expected)
    model = wrap(Model(torch.float64), "ddp")
    said: list[tuple[str, dict[str, Any], float]] = [
        ("ddp.module, multiplier", {"multiplier": float(dist.get_world_size())}, 1.0),
        ("naive", {"group": dist.group.WORLD}, float(dist.get_world_size())),
    ]
    for name, options, divisor in said:
        model.zero_grad()
        for step, batch in accumulate(model.module, batches, count_valid_tokens, **options):
            step.backward(sum_loss(model, batch))
        errors[name] = error(gradient(model), expected / divisor)
    return errors


def kept_gradients(rank: int) -> list[bool]:
    """Return whether ``discard_gradients_`` of a part leaves the rest of an FSDP2 group, reduced or not."""
    from torch.distributed.fsdp import fully_shard

    model = Model(torch.float64)
    fully_shard(model, mesh=mesh_of("fsdp2"))
    sum_loss(model, make_window("full", rank)[0]).backward()
    discard_gradients_(model.up)
    reduced = [model.up.weight.grad is None, model.down.weight.grad is not None]
    model.set_requires_gradient_sync(False)
    sum_loss(model, make_window("full", rank)[0]).backward()
    before = [find_sync(part).fsdp[0].is_unreduced for part in (model.up, model.down)]
    discard_gradients_(model.up)
    after = [find_sync(part).fsdp[0].is_unreduced for part in (model.up, model.down)]
    return [*reduced, *before, not after[0], after[1]]


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["accumulate", "deferred"])
@pytest.mark.parametrize(("kind", "world_size"), [("fsdp2", 2), ("summed", 2), ("hsdp", 4)])
def test_a_part_of_a_model_under_fsdp(kind: str, world_size: int, verb: str) -> None:
    for resharded in (True, False):
        for errors in get_pool(world_size)(part_of_fsdp, kind, verb, resharded):
            assert max(errors) <= 1e-12


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_adapters_with_one_base(pool: WorkerPool, kind: str) -> None:
    for errors in pool(clients, kind):
        assert max(errors) <= 1e-12


def test_a_model_that_no_wrapper_reduces_is_refused(pool_of_two: WorkerPool) -> None:
    for found in pool_of_two(unwrapped):
        assert found.pop("frozen") == ("none", "")
        for name, (kind, text) in found.items():
            assert kind == "ValueError", name
            assert "expected a model whose gradients a wrapper reduces over the ranks, got 5 trainable" in text
            assert "accelerator.unwrap_model(model), not Lightning's self" in text
            assert "failed on rank" in text or "deferred" in name
        assert "failed on rank 0: model" in found["one rank"][1]


def test_flows_that_reduce_by_hand(pool: WorkerPool) -> None:
    for errors in pool(by_hand_errors):
        assert max(errors.values()) <= 1e-12


def test_discarding_a_part_leaves_the_rest(pool_of_two: WorkerPool) -> None:
    assert pool_of_two(kept_gradients) == [[True] * 6] * 2
