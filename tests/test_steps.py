"""What a steady step of each loss and verb costs its host is what steps.txt says: a step that becomes slower is seen.

Counts, not times, so they are the same in every run: Python functions of the package that are entered, operators of
torch and those that they call, collectives and their bytes. ``python tests/test_steps.py > tests/steps.txt`` writes the
table; say in the commit why a number may rise. Waits and launches of an accelerator are in test_budgets.py.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from loss_cases import LOSSES, normal
from scripts import run_script
from torch import nn
from torch.profiler import ProfilerActivity, profile
from workers import forget_hints, get_pool

import fullrank
from fullrank.kernels import native
from fullrank.kernels.costs import costs_of

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler says when it starts and stops
TABLE = Path(__file__).with_name("steps.txt")
COUNTED_WITH = "2.13."  # another torch calls hooks and operators in another way
ROOMS = tuple(f"{path.parent}/" for path in Path(fullrank.__file__).parent.glob("*/__init__.py"))
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # which later versions of Python do not call
STEADY = 40  # steps before the one that counts: hints look at the first 20, queues and caches are full
ROWS = 48
WITH_QUEUE = ["smooth_ap", "info_nce"]
Run = Callable[[], object]


class Cost(NamedTuple):
    """What one step costs this process."""

    functions: int
    operators: int
    collectives: int
    num_bytes: int  # that it sends


def cost_of(run: Run) -> Cost:
    """Return what the step after ``STEADY`` others costs, each number counted in a step of its own."""
    functions = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal functions
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS):
            functions += frame.f_code.co_name not in INLINED

    for _ in range(STEADY):
        run()
    gc.disable()  # what it finalizes is no part of a step
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    with profile(activities=[ProfilerActivity.CPU]) as found:  # a mode would be followed: C computes nothing there
        run()
    operators = sum("::" in event.name for event in found.events())
    with CollectiveCounter() as collectives:
        run()
    return Cost(functions, operators, collectives.total, sum(collectives.sizes))


def of_loss(name: str, rank: int, **options: Any) -> Run:
    """Return forward and backward of the first form of a loss."""
    form = LOSSES[name].first
    module, count = form.make(num_classes=3, **options), ROWS + 7 * rank
    x = normal(count, max(3, form.columns), seed=rank).float().requires_grad_()
    given = form.arguments(x, torch.arange(count) % 3)

    def run() -> None:
        module(**given).backward()

    return run


def verbs(rank: int) -> Iterator[tuple[str, Run]]:
    """Yield the steps of what is no loss."""
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    wrapped = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    world = dist.group.WORLD
    rows = [normal(count + rank, 8).float() for count in (5, 3)]
    ranking = fullrank.SmoothAPLoss(num_classes=1)
    leaf = rows[0].clone().requires_grad_()

    def accumulate() -> None:
        for step, batch in fullrank.accumulate(wrapped, rows, len):
            step.backward(wrapped(batch).sum())
        step.mean_loss()

    def of_terms() -> None:
        for step, batch in fullrank.accumulate(wrapped, rows, {"a": len, "b": lambda batch: 2}):
            out = wrapped(batch)
            step.backward({"a": out.sum(), "b": out[:2].square().sum()})

    def deferred() -> None:
        model.zero_grad()
        one = fullrank.DeferredMean(model, world)
        one.backward_window(rows, lambda batch: (model(batch).sum(), len(batch)))
        one.finish([world])

    def pooled() -> None:
        loss = lambda scores, _: ranking(scores, torch.arange(len(scores)) % 2)  # noqa: E731
        fullrank.pooled_backward(wrapped, rows, forward=wrapped, loss=loss)

    yield "accumulate", accumulate
    yield "accumulate, two terms", of_terms
    yield "DeferredMean", deferred
    yield "pooled_backward", pooled
    yield "clip_grad_norm_", lambda: fullrank.clip_grad_norm_(model, 1.0)
    yield "all_reduce_grads_", lambda: fullrank.all_reduce_grads_(model, world)
    yield "global_mean", lambda: fullrank.global_mean(leaf.sum(), len(leaf)).backward()
    yield "gather_rows", lambda: fullrank.gather_rows(leaf)[0].sum().backward()
    yield "all_gather_with_grad", lambda: fullrank.all_gather_with_grad(leaf).sum().backward()


def costs(rank: int) -> dict[str, Cost]:
    """Return what each step costs this process."""
    found = {}
    torch.manual_seed(0)
    forget_hints()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hints about rows that are unusual
        for name, loss in LOSSES.items():
            if loss.module is not None:
                found[name] = cost_of(of_loss(name, rank))
        for name in WITH_QUEUE:
            found[f"{name}, queue"] = cost_of(of_loss(name, rank, queue_size=64))
        for name, run in verbs(rank):
            found[name] = cost_of(run)
    return found


def table() -> Iterator[str]:
    """Yield the lines of the table: the costs in one process, then those of the first of two."""
    yield f"{'step':26} {'functions':>9} {'operators':>9}   {'functions':>9} {'operators':>9} collectives bytes"
    of_two = get_pool(2)(import_module("test_steps").costs)[0]  # workers do not know this module as __main__
    for name, alone in costs(0).items():
        one, two = f"{alone.functions:9} {alone.operators:9}", of_two[name]
        yield f"{name:26} {one}   {two.functions:9} {two.operators:9} {two.collectives:11} {two.num_bytes:5}"


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith(COUNTED_WITH), reason=f"counted with torch {COUNTED_WITH}")
@pytest.mark.skipif(not native.FUNCTIONS, reason="counted with the library in C")
def test_a_step_costs_what_the_table_says(tmp_path: Path) -> None:
    """In new processes: what was called in one before decides on a few checks."""
    done = run_script(Path(__file__), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, written = done.stdout.splitlines(), TABLE.read_text("utf-8").splitlines()
    changed = [f"{new}\n  was {old}" for new, old in zip(found, written, strict=True) if new != old]
    assert not changed, "\n".join(["python tests/test_steps.py > tests/steps.txt, and say why", *changed])


def test_control_one_more_call_and_one_more_operator_are_seen() -> None:
    run = of_loss("smooth_ap", 0)
    before, after = cost_of(run), cost_of(lambda: (run(), costs_of(torch.empty(1).device)))
    assert after == before._replace(functions=before.functions + 1, operators=before.operators + 1)


if __name__ == "__main__":
    print("\n".join(table()))
