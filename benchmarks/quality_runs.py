"""One run of the quality benchmarks: train a small network with one loss, evaluate, store the figures."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from quality_data import Rows
from report import Record
from scipy.stats import t as student_t
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from fullrank import LossWarmupWrapper
from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

WIDTH = 32
TIES = 0.05  # of the rows of the budget
METRICS = ("ap", "recall", "pauc")
Figures = dict[str, float]


class Setting(NamedTuple):
    """The settings that all runs of a task share."""

    budget: float  # share of rows for the recall, of negatives for the partial AUC
    steps: int
    batch_size: int


class Cache:
    """Figures of finished runs, in memory and, if a file is given, as one line of JSON per run."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Figures] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                self.known[record["key"]] = record["figures"]

    def get(self, key: list[Any], compute: Callable[[], Figures]) -> Figures:
        """Return the figures of the run called ``key``, from the file or from ``compute``."""
        text = json.dumps(key, sort_keys=True)
        if text not in self.known:
            self.known[text] = compute()
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps({"key": text, "figures": self.known[text]}) + "\n")
        return self.known[text]


def make_model(features: int, seed: int, outputs: int = 1) -> nn.Module:
    """Return a multilayer perceptron with ``outputs`` logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = [nn.Linear(features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


def train(rows: Rows, loss: nn.Module, lr: float, setting: Setting, seed: int) -> nn.Module:
    """Return the model after ``setting.steps`` of Adam with a falling rate; ``seed`` sets model and batches."""
    model = make_model(rows.features.shape[1], seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, setting.steps)
    generator = torch.Generator().manual_seed(seed)
    batches: list[Tensor] = []
    for step in range(setting.steps):
        if isinstance(loss, LossWarmupWrapper):
            loss.on_train_batch_start(step)
        if not batches:  # an epoch
            shuffled = torch.randperm(len(rows.targets), generator=generator)
            batches = list(shuffled.split(setting.batch_size))
            if len(batches) > 1 and len(batches[-1]) < setting.batch_size:
                batches.pop()
            batches.reverse()
        batch = rows.take(batches.pop())
        optimizer.zero_grad()
        loss(model(batch.features), batch.targets).backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def score(model: nn.Module, features: Tensor) -> Tensor:
    """Return the scores, (N,)."""
    return torch.cat([model(part)[:, 0] for part in features.split(65_536)])


def evaluate(scores: Tensor, targets: Tensor, budget: float) -> Figures:
    """Return average precision, recall in the top ``budget`` of rows, and partial AUC up to that false-positive rate.

    The recall metric counts all rows tied at the threshold as flagged, so equal scores for all rows would give a recall
    of 1. Ties that exceed the budget by more than a twentieth are broken at random, in expectation. If any score is not
    finite, all figures are 0.
    """
    if not bool(scores.isfinite().all()):
        return dict.fromkeys(METRICS, 0.0)
    metrics = {"recall": RecallAtQuantile(1, budget), "pauc": PAUCAtBudget(1, 0.0, budget)}
    figures = {"ap": float(average_precision_score(targets.numpy(), scores.double().numpy()))}
    for name, metric in metrics.items():
        metric.update(scores[:, None], targets)
        figures[name] = float(metric.compute())
    within = math.floor(budget * (len(scores) - 1)) + 1  # rows that are flagged when none are tied
    threshold = scores.topk(within).values[-1]
    above, tied = scores > threshold, scores == threshold
    if above.sum() + tied.sum() > (1 + TIES) * within:
        share = (within - above.sum()) / tied.sum()
        figures["recall"] = float((targets[above].sum() + share * targets[tied].sum()) / targets.sum())
    return figures


def say(text: str) -> None:
    """Print the progress of a run, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Interval(NamedTuple):
    """A mean and half the width of its interval, of 95 % by default, by Student's t; NaN for a single value."""

    mean: float
    width: float

    @classmethod
    def of(cls, values: list[float], level: float = 0.05) -> Interval:
        """Return the mean of ``values`` and its interval, which misses the true mean with probability ``level``."""
        if len(values) < 2:
            return cls(mean(values), math.nan)
        error = stdev(values) / math.sqrt(len(values))
        return cls(mean(values), float(student_t.ppf(1 - level / 2, len(values) - 1)) * error)

    @property
    def sign(self) -> str:
        """``"+"`` or ``"-"`` if the interval is on one side of 0, else ``"0"``."""
        return "+" if self.mean > self.width else "-" if -self.mean > self.width else "0"


def paired(values: list[float], base: list[float]) -> Interval:
    """Return the mean of the differences, run by run, and its interval."""
    return Interval.of([value - other for value, other in zip(values, base, strict=True)])


def summary(runs: list[Figures], base: list[Figures]) -> Record:
    """Return for each metric the figures of ``runs``, and their differences from those of ``base``."""
    result: Record = {}
    for metric in METRICS:
        values = [run[metric] for run in runs]
        interval, gain = Interval.of(values), paired(values, [run[metric] for run in base])
        result[metric] = {"mean": interval.mean, "width": interval.width, "seeds": values}
        result[metric] |= {"gain": gain.mean, "gain_width": gain.width, "sign": gain.sign}
    return result
