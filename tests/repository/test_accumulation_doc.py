"""Every recipe of docs/accumulation.md runs as it stands, and gives the gradient of one process."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import accumulation_doc_cases as cases
import pytest
from workers import WorkerPool, get_pool

DOCUMENT = Path(__file__).parents[2] / "docs" / "accumulation.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^###? ", TEXT, flags=re.MULTILINE)}
LIMIT = 1e-12  # float64


def blocks(section: str) -> list[str]:
    """Return the Python blocks of a section."""
    return re.findall(r"```python\n(.*?)```", SECTIONS[section], flags=re.DOTALL)


NAMES = blocks("Recipes")
LOOP, MEANS = blocks("Plain, DDP, FSDP2, HSDP")


def test_every_block_is_run_here() -> None:
    tested = ["Experts", "Context parallelism", "Pipeline schedules", "GradScaler", "Accelerate", "Pooled losses"]
    tested += ["A server, whose calls come one by one"]
    assert [len(blocks(section)) for section in tested] == [1] * len(tested)
    assert TEXT.count("```python") == len(NAMES) + 2 + len(tested)


@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_the_loop(kind: str, world_size: int) -> None:
    """Six micro-batches in windows of four: four and two."""
    assert max(get_pool(world_size)(cases.training, kind, [*NAMES, LOOP], 4)) <= LIMIT


def test_a_mean_of_means_in_the_loop_is_seen(pool_of_two: WorkerPool) -> None:
    wrong = LOOP.replace(
        "step.backward(loss_sum(model, batch))",
        "causal_lm_loss(model(batch['tokens']), batch['labels']).div(4).backward()",
    )
    assert wrong != LOOP
    with pytest.raises(AssertionError, match="expected one backward, got 0"):
        pool_of_two(cases.training, "ddp", [*NAMES, wrong], 4)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_means_with_their_number(pool_of_two: WorkerPool, kind: str) -> None:
    assert max(pool_of_two(cases.gradient, kind, [*NAMES, MEANS])) <= LIMIT


def test_experts(pool_of_four: WorkerPool) -> None:
    for errors in pool_of_four(cases.experts, NAMES + blocks("Experts")):
        assert max(errors) <= LIMIT


@pytest.mark.parametrize("folded", ["all", "none", "ulysses_only"])
def test_context_parallelism(pool_of_four: WorkerPool, folded: str) -> None:
    assert max(pool_of_four(cases.context_parallel, NAMES + blocks("Context parallelism"), folded)) <= LIMIT


def test_the_wrong_mode_of_context_parallelism_is_seen(pool_of_four: WorkerPool) -> None:
    recipe = [block.replace("all_reduce_grads_(model, group)", "") for block in blocks("Context parallelism")]
    assert min(pool_of_four(cases.context_parallel, NAMES + recipe, "none")) > 0.05


def test_pipeline_schedules(pool_of_four: WorkerPool) -> None:
    assert max(pool_of_four(cases.pipeline, NAMES + blocks("Pipeline schedules"))) <= LIMIT


def test_grad_scaler(pool_of_two: WorkerPool) -> None:
    assert max(pool_of_two(cases.training, "ddp", NAMES + blocks("GradScaler"), cases.NUM_BATCHES)) <= LIMIT


def test_accelerate(pool_of_two: WorkerPool) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    assert max(pool_of_two(cases.gradient, "ddp", NAMES + blocks("Accelerate"))) <= LIMIT


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_server(pool_of_two: WorkerPool, kind: str) -> None:
    """Two steps of three calls, by one object."""
    recipe = NAMES + blocks("A server, whose calls come one by one")
    assert max(pool_of_two(cases.training, kind, recipe, 3)) <= LIMIT


def test_pooled_losses(pool_of_two: WorkerPool) -> None:
    assert max(pool_of_two(cases.pooled, NAMES + blocks("Pooled losses"))) <= LIMIT
