"""One run of the benchmark on real data: a job, what it computes, and the processes that share the jobs."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch
from quality_data import Rows, Splits
from quality_runs import METRICS, Cache, Figures, evaluate, make_model, say
from real_data import split
from real_methods import TREES, Config, Loss, build, cost
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import average_precision_score, balanced_accuracy_score
from torch import Tensor, nn

PARTS = 4  # checkpoints per length
OVERHEAD = 1.1  # on the milliseconds of the steps: loading, evaluation, the rest of the machine
TREE_MS = 1_500.0


class Job(NamedTuple):
    """One training; its fields are the key in the cache."""

    set: str
    seed: int
    method: str
    config: Config  # "lr", and what the method is built with
    lengths: tuple[int, ...]  # steps; the longest is trained, the others are read on the way
    batch_size: int
    smallest: float | None = None  # several classes: size of the smallest relative to the largest; None for one logit

    @property
    def key(self) -> list[Any]:
        """What identifies the run in the file."""
        return list(self)

    @property
    def milliseconds(self) -> float:
        """An estimate of the time, for the progress."""
        if self.method == TREES:
            return TREE_MS
        rows = 0.6 + 0.4 * self.batch_size / 512
        classes = 1.0 if self.smallest is None else 2.5
        queue = 1.3 if self.config.get("queue_size") else 1.0
        return OVERHEAD * rows * classes * queue * cost(self.method) * max(self.lengths)


@lru_cache(maxsize=4)
def _rows(name: str, seed: int, smallest: float | None) -> Splits:
    return split(name, seed, 1.0 if smallest is None else smallest)


def shares(targets: Tensor, one_logit: bool) -> Tensor:
    """Return the share of positives, (1,), or of every class, (C,)."""
    return targets.float().mean()[None] if one_logit else targets.bincount().float() / len(targets)


def train(
    rows: Rows, loss: Loss, job: Job, outputs: int, checkpoints: Iterable[int], visit: Callable[[int, nn.Module], None]
) -> None:
    """Train a small network with Adam, and call ``visit(step, model)`` after the steps in ``checkpoints``.

    The seed of the job sets the initial weights and the batches: they are the same for every method.
    """
    model = make_model(rows.features.shape[1], job.seed, outputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=job.config["lr"], fused=True)
    generator = torch.Generator().manual_seed(job.seed)
    size, visits, step = min(job.batch_size, len(rows.targets)), set(checkpoints), 0
    while step < max(visits):
        epoch = rows.take(torch.randperm(len(rows.targets), generator=generator))
        for features, targets in zip(epoch.features.split(size), epoch.targets.split(size), strict=True):
            if len(targets) < size or step == max(visits):
                break
            optimizer.zero_grad()
            loss(model(features), targets).backward()
            optimizer.step()
            step += 1
            if step in visits:
                visit(step, model)


def _run_binary(job: Job) -> Figures:
    """Return the test figures at the checkpoint with the best AP on validation rows, for each length.

    ``"own_recall"`` and ``"own_pauc"`` are read at the checkpoint with the best recall and the best partial AUC on
    validation rows. ``"validation"`` is the best AP itself, by which the search of the tuned table chooses.
    """
    rows = _rows(job.set, job.seed, None)
    share = shares(rows.train.targets, one_logit=True)
    found: dict[int, list[Figures]] = {}  # of validation and of test rows, after a number of steps
    steps = {length: [length * (part + 1) // PARTS for part in range(PARTS)] for length in job.lengths}

    def visit(step: int, model: nn.Module) -> None:
        with torch.no_grad():
            scores = [model(part.features)[:, 0] for part in rows[1:]]
        found[step] = [evaluate(each, part.targets, float(share)) for each, part in zip(scores, rows[1:], strict=True)]

    checkpoints = {step for each in steps.values() for step in each}
    if job.method == TREES:
        trees = HistGradientBoostingClassifier(random_state=job.seed)
        trees.fit(rows.train.features.numpy(), rows.train.targets.numpy())
        for step in checkpoints:
            visit(step, lambda features: torch.tensor(trees.decision_function(features.numpy()))[:, None])
    else:
        train(rows.train, build(job.method, share, job.config), job, 1, checkpoints, visit)
    figures: Figures = {}
    for length in job.lengths:
        for metric in METRICS:
            validation, test = max((found[step] for step in steps[length]), key=lambda both: both[0][metric])
            if metric == "ap":
                figures |= {f"{name}@{length}": test[name] for name in METRICS}
                figures[f"validation@{length}"] = validation["ap"]
            else:
                figures[f"own_{metric}@{length}"] = test[metric]
    return figures


def _run_classes(job: Job) -> Figures:
    """Return the figures of ``evaluate_classes`` on test rows after the last step."""
    rows = _rows(job.set, job.seed, job.smallest)
    share = shares(rows.train.targets, one_logit=False)
    figures: Figures = {}

    def visit(step: int, model: nn.Module) -> None:
        with torch.no_grad():
            logits = model(rows.test.features)
        figures.update(evaluate_classes(logits, rows.test.targets))

    train(rows.train, build(job.method, share, job.config), job, len(share), job.lengths, visit)
    return figures


def evaluate_classes(logits: Tensor, targets: Tensor) -> Figures:
    """Return the macro AP of the logits and of the softmax probabilities, and the balanced accuracy of the argmax.

    Macro AP is the mean over the classes of the AP of each against the rest. A loss through a softmax leaves a constant
    per row undetermined, so its logits are not comparable between rows, and its probabilities are. A ranking loss
    leaves a constant per class undetermined, so its probabilities are not.
    """
    if not bool(logits.isfinite().all()):
        return {"macro_ap_logits": 0.0, "macro_ap_softmax": 0.0, "balanced_accuracy": 0.0}
    figures = {}
    for name, scores in (("macro_ap_logits", logits), ("macro_ap_softmax", logits.double().softmax(dim=1))):
        each = [average_precision_score(targets == label, scores[:, label]) for label in targets.unique()]
        figures[name] = float(np.mean(each))
    accuracy = balanced_accuracy_score(targets.numpy(), logits.argmax(dim=1).numpy())
    return figures | {"balanced_accuracy": float(accuracy)}


def compute(job: Job) -> Figures:
    """Return the figures of one job."""
    return _run_binary(job) if job.smallest is None else _run_classes(job)


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a method that gets no gradient says so; its figures say so too


class Workers:
    """Processes that share the jobs; with one, the jobs run in this process."""

    def __init__(self, count: int, cache: Cache) -> None:
        self.count, self.cache, self.pool = count, cache, None
        if count > 1:
            os.environ["OMP_NUM_THREADS"] = "1"  # the processes read it when they start
            self.pool = get_context("spawn").Pool(count, _start)

    def run(self, title: str, jobs: list[Job]) -> list[Figures]:
        """Return the figures of ``jobs``, in their order, from the cache or computed; each goes to the cache."""
        todo = [job for job in jobs if json.dumps(job.key, sort_keys=True) not in self.cache.known]
        todo.sort(key=lambda job: (job.set, job.seed, job.smallest or 0))  # a process keeps the last rows that it read
        total = sum(job.milliseconds for job in todo)
        minutes = total / 60_000 / self.count
        say(f"{title}: {len(jobs)} runs, {len(todo)} to do, about {minutes:.1f} minutes on {self.count} processes")
        begun, done, last = time.monotonic(), 0.0, time.monotonic()
        found = map(compute, todo) if self.pool is None else self.pool.imap(compute, todo, chunksize=2)
        for job, figures in zip(todo, found, strict=True):
            self.cache.get(job.key, lambda: figures)  # noqa: B023
            done += job.milliseconds
            if time.monotonic() - last > 60:
                last = time.monotonic()
                left = (last - begun) * (total / done - 1) / 60
                say(f"{title}: {job.set}, {done / total:.0%}, about {left:.1f} minutes left")
        return [self.cache.get(job.key, lambda: compute(job)) for job in jobs]  # noqa: B023

    def close(self) -> None:
        """End the processes."""
        if self.pool is not None:
            self.pool.close()
            self.pool.join()
