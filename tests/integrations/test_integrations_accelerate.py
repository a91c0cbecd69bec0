"""Accelerate: the recipes of docs/integrations.md train as one process does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_cases import (
    SIZE,
    blocks,
    change,
    flat,
    make_encoder,
    make_rows,
    make_tokens,
    make_writer,
    own_pool,
    run_block,
    token_mean,
    train,
    windows_of,
)
from torch import Tensor
from torch.utils.data import DataLoader
from workers import WorkerPool

import fullrank


def make_accelerator(**options: Any) -> Any:
    """Return an Accelerator of two gloo processes."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **options)
    assert accelerator.num_processes == 2
    return accelerator


def summed(rank: int, recipe: str, options: dict[str, Any]) -> tuple[float, float]:
    """Return the errors of parameters and last gradient norm after windows of 2, 2 and 1 micro-batches."""
    rows, model, reference = make_tokens(40), make_writer(), make_writer()
    before = flat(model)
    names = {"accelerator": make_accelerator(**options), "model": model, "loader": DataLoader(rows, batch_size=SIZE)}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    found = run_block(recipe, names)

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        tokens, labels = (torch.stack([rows[row][key] for row in chosen]) for key in ("tokens", "labels"))
        return token_mean(reference(tokens), labels)

    expected, _, norms = train(reference, loss, [windows_of(40)], max_norm=1.0)
    return change(model, before, expected), abs(float(found["norm"]) / norms[-1] - 1)


def pooled(rank: int, recipe: str) -> tuple[float, float, float]:
    """Return the errors of parameters, last gradient norm and last loss for SmoothAP with a queue."""
    features, targets = make_rows(48)
    rows = [{"features": features[row], "targets": targets[row]} for row in range(48)]
    model, reference = make_encoder(), make_encoder()
    before = flat(model)
    names = {"accelerator": make_accelerator(), "model": model, "loader": DataLoader(rows, batch_size=SIZE)}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    found = run_block(recipe, names)
    loss_fn = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5, gather_distributed=False)

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        return loss_fn(reference(features[chosen]), targets[chosen])

    expected, losses, norms = train(reference, loss, [windows_of(48)], max_norm=1.0)
    errors = abs(float(found["norm"]) / norms[-1] - 1), abs(float(found["loss"]) / losses[-1] - 1)
    return change(model, before, expected), *errors


def checkpointed(rank: int, folder: str) -> tuple[float, float]:
    """Return the loss of a batch before its rows entered the queue, and after the state of then was loaded."""
    accelerator = make_accelerator()
    loss_fn = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5)
    accelerator.register_for_checkpointing(loss_fn)
    features, targets = (part[24 * rank : 24 * rank + 24] for part in make_rows(48))
    encoder = make_encoder()
    loss_fn(encoder(features), targets)
    accelerator.save_state(folder)
    torch.distributed.barrier()
    value = loss_fn(encoder(features + 1), targets)
    loss_fn.reset_queue()
    accelerator.load_state(folder)
    return float(value), float(loss_fn(encoder(features + 1), targets))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs the extra `integrations`"),
]

LIMIT = 1e-6  # float32, of what the training has changed
(SUMS,) = blocks("Sums")
(POOLED,) = blocks("Pooled losses")
# What Accelerate's documentation calls gradient accumulation.
MEAN_OF_MEANS = """
from fullrank import causal_lm_loss

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(causal_lm_loss(model(batch["tokens"]), batch["labels"]))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    yield from own_pool("accelerate")


def test_sums_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(summed, SUMS, {}):
        assert max(errors) <= LIMIT


def test_control_accumulation_of_accelerate_is_a_mean_of_means(workers: WorkerPool) -> None:
    for parameters, norm in workers(summed, MEAN_OF_MEANS, {"gradient_accumulation_steps": 2}):
        assert parameters > 0.05
        assert norm > 0.05


def test_control_gradient_accumulation_steps_divide_once_more(workers: WorkerPool) -> None:
    for _, norm in workers(summed, SUMS, {"gradient_accumulation_steps": 2}):
        assert norm > 0.4


def test_pooled_losses_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(pooled, POOLED):
        assert max(errors) <= LIMIT


def test_control_the_mean_of_two_pools_is_not_the_loss_of_both(workers: WorkerPool) -> None:
    apart = POOLED.replace("windows(loader, 2)", "windows(loader, 1)")
    assert apart != POOLED
    for parameters, *_ in workers(pooled, apart):
        assert parameters > 0.05


def test_the_state_of_accelerate_holds_the_queue(workers: WorkerPool, tmp_path: Path) -> None:
    for value, again in workers(checkpointed, str(tmp_path)):
        assert value == again
