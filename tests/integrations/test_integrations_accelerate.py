"""Accelerate: the recipes of docs/recipes/accelerate.md train as one process does."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import integration_cases as cases
import pytest
import torch
from on_ranks import gathered
from pages import blocks, run_block
from torch.utils.data import DataLoader
from workers import WorkerPool

pytestmark = pytest.mark.slow

FRAMEWORK = ["accelerate"]

LIMIT = 1e-6  # float32, of what the training has changed
QUEUE = ("SmoothAPLoss(num_classes=1)", "SmoothAPLoss(num_classes=1, queue_size=64, temperature=0.5)")
DEFINITIONS, SCRIPT, SUMS, POOLED = blocks("recipes/accelerate.md")
POOLED = POOLED.replace(*QUEUE)


def windowed(rank: int, kind: str, recipe: str, options: dict[str, Any]) -> list[float]:
    """Return the errors of parameters, last norm and, of "pooled", last loss after windows of two and of one."""
    from accelerate import Accelerator

    if kind == "sums":
        rows, model, reference = cases.make_tokens(40), cases.make_writer(), cases.make_writer()
        loss = cases.of_tokens(reference, rows)
    else:
        (features, targets), model, reference = cases.make_rows(48), cases.make_encoder(), cases.make_encoder()
        rows = [{"features": one, "targets": target} for one, target in zip(features, targets)]
        loss = cases.of_rows(cases.loss_alone(), reference, features, targets)
    before = cases.flat(model)
    cases.reset_accelerate()
    accelerator = Accelerator(cpu=True, **options)
    assert accelerator.num_processes == 2
    names = {"accelerator": accelerator, "model": model, "loader": DataLoader(rows, batch_size=cases.SIZE)}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    found = run_block(recipe, names)
    expected, losses, norms = cases.train(reference, loss, [cases.windows_of(len(rows))], max_norm=1.0)
    errors = [cases.change(model, before, expected), cases.worst([found["norm"]], norms[-1:])]
    return errors + ([cases.worst([found["loss"]], losses[-1:])] if kind == "pooled" else [])


def fitted(rank: int, definitions: str, script: str, folder: str, is_control: bool) -> None:
    """Train two epochs as one process does, validate, and resume after the first; the control validates wrongly."""
    names = run_block(definitions.replace(*QUEUE), {})
    features, targets = cases.make_rows(64)
    features = features.double()
    rows = [{"features": one, "targets": target} for one, target in zip(features, targets)]
    number = {tuple(row): index for index, row in enumerate(features.tolist())}
    seen: list[Any] = []

    def job(place: str, script: str, forgets: bool = False) -> tuple[Any, list[float]]:
        cases.reset_accelerate()
        seen.clear()
        model, loss_fn = cases.make_encoder().double(), deepcopy(names["loss_fn"])
        model.register_forward_pre_hook(lambda module, args: seen.append(args[0].tolist()) if module.training else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = {**names, "model": model, "loss_fn": loss_fn, "optimizer": optimizer}
        found["train_loader"] = DataLoader(rows, cases.SIZE, shuffle=True)
        found["val_loader"] = DataLoader(rows[:45], cases.SIZE)  # 45: not a multiple of the ranks
        if forgets:
            loss_fn.load_state_dict = lambda *args: None
        run_block(script.replace("outputs", f"{folder}/{place}"), found)
        return model, found["history"]

    model, history = job("through", script)
    chosen = [[number[tuple(row)] for part in step for row in part] for step in zip(*gathered(seen))]
    reference = cases.make_encoder().double()
    loss = cases.of_rows(cases.alone(deepcopy(names["loss_fn"])), reference, features, targets)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    expected, *_ = cases.train(reference, loss, [chosen[:8], chosen[8:]], make_optimizer=adam)
    by_sklearn = cases.average_precision(model, features[:45], targets[:45])
    if is_control:
        assert history[-1] != pytest.approx(by_sklearn, rel=1e-4)
        return
    assert cases.change(model, cases.flat(cases.make_encoder().double()), expected) <= LIMIT
    assert history[0] < history[1]  # the first epoch improves the metric
    assert history[-1] == pytest.approx(by_sklearn, rel=1e-6)  # each validation row once
    for forgets in (False, True):  # the control: the queue of the first epoch is missing
        job("killed", script.replace("epochs=2", "epochs=1"))
        again, _ = job("killed", script.replace("epochs=2", "epochs=2, first=1"), forgets)
        assert torch.equal(cases.flat(model), cases.flat(again)) != forgets


def best_after_restart(rank: int, definitions: str, script: str, folder: str) -> list[bool]:
    """Return whether the last epoch is the best: of a job, a restart from a worse one, and another restart."""
    rows = [{"features": features, "targets": target} for features, target in zip(*cases.make_rows(16))]
    found = []
    for first, metrics in ((0, [0.1, 0.9, 0.5]), (2, [0.5, 0.6]), (3, [0.6, 0.95])):
        cases.reset_accelerate()
        values, model = iter(metrics), cases.make_encoder()
        names = run_block(definitions, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
        names["train_loader"] = names["val_loader"] = DataLoader(rows, cases.SIZE)
        names["evaluate"] = lambda *args, values=values: next(values)
        epochs = first + len(metrics) - 1
        run_block(script.replace("outputs", folder).replace("epochs=2", f"epochs={epochs}, first={first}"), names)
        torch.distributed.barrier()  # the files are there
        best, last = (Path(folder, name, "model.safetensors").read_bytes() for name in ("best", "last"))
        found.append(best == last)
        torch.distributed.barrier()
    return found


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
RECIPES: dict[str, tuple[Any, ...]] = {"sums": ("sums", SUMS, {}), "pooled": ("pooled", POOLED, {})}
CONTROLS: dict[str, tuple[Any, ...]] = {
    "accumulation of Accelerate is a mean of means": ("sums", MEAN_OF_MEANS, {"gradient_accumulation_steps": 2}),
    "gradient_accumulation_steps divide once more": ("sums", SUMS, {"gradient_accumulation_steps": 2}),
    "the mean of two pools": ("pooled", POOLED.replace("windows(loader, 2)", "windows(loader, 1)"), {}),
}


@pytest.mark.parametrize("name", [*RECIPES, *(pytest.param(name, marks=pytest.mark.full) for name in CONTROLS)])
def test_windows_train_as_one_process(workers: WorkerPool, name: str) -> None:
    """The controls are what is widely done."""
    for parameters, norm, *loss in workers(windowed, *(RECIPES | CONTROLS)[name]):
        assert max(parameters, norm, *loss) <= LIMIT if name in RECIPES else max(parameters, norm) > 0.05


def test_it_trains_validates_and_resumes_as_one_process(workers: WorkerPool, tmp_path: Path) -> None:
    workers(fitted, DEFINITIONS, SCRIPT, str(tmp_path), False)
    assert {path.name for path in (tmp_path / "through").iterdir()} == {"best", "last"}


def test_a_restart_keeps_the_best_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers(best_after_restart, DEFINITIONS, SCRIPT, str(tmp_path)) == [[False, False, True]] * 2


@pytest.mark.full
def test_control_the_repeated_rows_count(workers: WorkerPool, tmp_path: Path) -> None:
    repeated = DEFINITIONS.replace("gather_for_metrics", "gather")
    assert repeated != DEFINITIONS
    workers(fitted, repeated, SCRIPT, str(tmp_path), True)
