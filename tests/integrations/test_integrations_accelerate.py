"""Accelerate: the recipes of docs/integrations.md train as one process does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import integration_accelerate_cases as cases
import pytest
from integration_cases import blocks, own_pool
from workers import WorkerPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs the extra `integrations`")

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
    for errors in workers(cases.summed, SUMS, {}):
        assert max(errors) <= LIMIT


def test_control_accumulation_of_accelerate_is_a_mean_of_means(workers: WorkerPool) -> None:
    for parameters, norm in workers(cases.summed, MEAN_OF_MEANS, {"gradient_accumulation_steps": 2}):
        assert parameters > 0.05
        assert norm > 0.05


def test_control_gradient_accumulation_steps_divide_once_more(workers: WorkerPool) -> None:
    for _, norm in workers(cases.summed, SUMS, {"gradient_accumulation_steps": 2}):
        assert norm > 0.4


def test_pooled_losses_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(cases.pooled, POOLED):
        assert max(errors) <= LIMIT


def test_control_the_mean_of_two_pools_is_not_the_loss_of_both(workers: WorkerPool) -> None:
    apart = POOLED.replace("windows(loader, 2)", "windows(loader, 1)")
    assert apart != POOLED
    for parameters, *_ in workers(cases.pooled, apart):
        assert parameters > 0.05


def test_the_state_of_accelerate_holds_the_queue(workers: WorkerPool, tmp_path: Path) -> None:
    for value, again in workers(cases.checkpointed, str(tmp_path)):
        assert value == again
