"""Accelerate: the recipes of docs/recipes/accelerate.md train as one process does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_cases import (
    SIZE,
    change,
    flat,
    gathered,
    make_encoder,
    make_rows,
    make_tokens,
    make_writer,
    own_pool,
    token_mean,
    train,
    windows_of,
)
from pages import blocks, run_block
from sklearn.metrics import average_precision_score
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


def fitted(rank: int, definitions: str, script: str, folder: str) -> tuple[float, list[float], float, bool, bool]:
    """Return the error of the parameters after two epochs, the metrics, and the last one by scikit-learn.

    The last two: whether a job that resumes after the first epoch ends with the same bits, with the state of the loss
    and without.
    """
    from accelerate.state import AcceleratorState

    names = run_block(definitions.replace(*QUEUE), {})
    features, targets = make_rows(64)
    features = features.double()
    rows = [{"features": features[row], "targets": targets[row]} for row in range(64)]
    number = {tuple(row): index for index, row in enumerate(features.tolist())}
    seen: list[Tensor] = []

    def job(place: str, script: str, forgets: bool = False) -> tuple[Any, list[float]]:
        AcceleratorState._reset_state(reset_partial_state=True)
        seen.clear()
        model, loss_fn = make_encoder().double(), deepcopy(names["loss_fn"])
        model.register_forward_pre_hook(lambda module, args: seen.append(args[0]) if module.training else None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = {**names, "model": model, "loss_fn": loss_fn, "optimizer": optimizer}
        found["train_loader"] = DataLoader(rows, SIZE, shuffle=True)
        found["val_loader"] = DataLoader(rows[:45], SIZE)  # 45: not a multiple of the ranks
        if forgets:
            loss_fn.load_state_dict = lambda *args: None
        run_block(script.replace("outputs", f"{folder}/{place}"), found)
        return model, found["history"]

    model, history = job("through", script)
    chosen = [[number[tuple(row)] for part in step for row in part] for step in zip(*gathered_rows(seen))]
    reference = make_encoder().double()
    loss_fn = deepcopy(names["loss_fn"])
    loss_fn.gather_distributed = False

    def loss(epoch: int, step: int, chosen: list[int]) -> Tensor:
        return loss_fn(reference(features[chosen]), targets[chosen])

    adam = partial(torch.optim.AdamW, lr=1e-2)
    expected, *_ = train(reference, loss, [chosen[:8], chosen[8:]], make_optimizer=adam)
    error = change(model, flat(make_encoder().double()), expected)
    resumed = []
    for forgets in (False, True):
        job("killed", script.replace("epochs=2", "epochs=1"))
        again, _ = job("killed", script.replace("epochs=2", "epochs=2, first=1"), forgets)
        resumed.append(torch.equal(flat(model), flat(again)))
    with torch.no_grad():
        by_sklearn = average_precision_score(targets[:45].numpy(), model(features[:45]).numpy())
    return error, history, float(by_sklearn), *resumed


def best_after_restart(rank: int, definitions: str, script: str, folder: str) -> list[bool]:
    """Return whether the last epoch is the best checkpoint, after a job and after two restarts of it.

    The metrics are given. The first restart continues from an epoch that is worse than the best one.
    """
    from accelerate.state import AcceleratorState

    rows = [{"features": features, "targets": target} for features, target in zip(*make_rows(16))]
    found = []
    for first, metrics in ((0, [0.1, 0.9, 0.5]), (2, [0.5, 0.6]), (3, [0.6, 0.95])):
        AcceleratorState._reset_state(reset_partial_state=True)
        values, model = iter(metrics), make_encoder()
        names = run_block(definitions, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
        names["train_loader"] = names["val_loader"] = DataLoader(rows, SIZE)
        names["evaluate"] = lambda *args, values=values: next(values)
        epochs = first + len(metrics) - 1
        run_block(script.replace("outputs", folder).replace("epochs=2", f"epochs={epochs}, first={first}"), names)
        torch.distributed.barrier()  # the files are there
        best, last = (Path(folder, name, "model.safetensors").read_bytes() for name in ("best", "last"))
        found.append(best == last)
        torch.distributed.barrier()
    return found


def gathered_rows(seen: list[Tensor]) -> list[list[list[list[float]]]]:
    """Return the rows of each step of every rank."""
    return gathered([part.tolist() for part in seen])


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs the extra `integrations`"),
]

LIMIT = 1e-6  # float32, of what the training has changed
QUEUE = ("SmoothAPLoss(num_classes=1)", "SmoothAPLoss(num_classes=1, queue_size=64, temperature=0.5)")
DEFINITIONS, SCRIPT, SUMS, POOLED = blocks("recipes/accelerate.md")
POOLED = POOLED.replace(*QUEUE)
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


def test_pooled_losses_train_as_one_process(workers: WorkerPool) -> None:
    for errors in workers(pooled, POOLED):
        assert max(errors) <= LIMIT


# What is wrong: the training, its recipe and options.
CONTROLS: dict[str, tuple[Any, ...]] = {
    "accumulation of Accelerate is a mean of means": (summed, MEAN_OF_MEANS, {"gradient_accumulation_steps": 2}),
    "gradient_accumulation_steps divide once more": (summed, SUMS, {"gradient_accumulation_steps": 2}),
    "the mean of two pools": (pooled, POOLED.replace("windows(loader, 2)", "windows(loader, 1)")),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CONTROLS)
def test_control_what_is_widely_done_trains_otherwise(workers: WorkerPool, name: str) -> None:
    for parameters, norm, *_ in workers(*CONTROLS[name]):
        assert max(parameters, norm) > 0.05


@pytest.mark.parametrize("form", ["sharded", pytest.param("gathered", marks=pytest.mark.full)])
def test_it_trains_validates_and_resumes_as_one_process(workers: WorkerPool, tmp_path: Path, form: str) -> None:
    definitions = DEFINITIONS.replace(QUEUE[0], QUEUE[1].replace("queue_size=64", f"queue_size=64, pool={form!r}"))
    found = workers(fitted, definitions, SCRIPT, str(tmp_path))
    for parameters, history, expected, resumed, without_loss in found:
        assert parameters <= LIMIT
        assert history[0] < history[1]  # the first epoch improves the metric
        assert history[-1] == pytest.approx(expected, rel=1e-6)  # each validation row once
        assert resumed
        assert not without_loss  # control: the queue of the first epoch is missing
    assert {path.name for path in (tmp_path / "through").iterdir()} == {"best", "last"}


def test_a_restart_keeps_the_best_checkpoint(workers: WorkerPool, tmp_path: Path) -> None:
    assert workers(best_after_restart, DEFINITIONS, SCRIPT, str(tmp_path)) == [[False, False, True]] * 2


@pytest.mark.full
def test_control_the_repeated_rows_count(workers: WorkerPool, tmp_path: Path) -> None:
    repeated = DEFINITIONS.replace("gather_for_metrics", "gather")
    assert repeated != DEFINITIONS
    for _, history, expected, *_ in workers(fitted, repeated, SCRIPT, str(tmp_path)):
        assert history[-1] != pytest.approx(expected, rel=1e-4)
