"""The recipe of docs/integrations.md for torchmetrics, and what a missing framework says."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import PAGES, blocks, run_block
from scripts import run_script
from sklearn.metrics import average_precision_score
from torch import Tensor
from workers import WorkerPool

from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

pytestmark = pytest.mark.slow


def metric_rows() -> tuple[Tensor, Tensor]:
    """Return logits (90, 3), two of them large, and targets."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 3, (90,), generator=generator)
    logits = 4 * torch.randn(90, 3, generator=generator)
    logits[torch.arange(90), targets] += 3
    logits[:2] += 20  # float32 makes 1 of their sigmoid
    return logits, targets


def metric_values(rank: int, recipe: str) -> dict[str, float]:
    """Return the values of the collection; rank 0 has 50 of the rows in three batches, rank 1 40 in two."""
    logits, targets = metric_rows()
    starts = ((0, 10, 30, 50), (50, 55, 90))[rank]
    batches = [(logits[start:end], targets[start:end]) for start, end in pairwise(starts)]
    values = run_block(recipe, {"batches": batches})["values"]
    return {name: float(value) for name, value in values.items()}


(METRICS,) = blocks("integrations.md", "torchmetrics with the losses")


def test_every_block_is_run() -> None:
    assert PAGES["integrations.md"].count("```python") == 1


def references(scores: Tensor, targets: Tensor) -> dict[str, float]:
    """Return scikit-learn's macro average precision, and our metrics of one process on the logits as they are."""
    one_hot = np.eye(3)[targets.numpy()]
    found = {"ap": average_precision_score(one_hot, scores.double().numpy(), average="macro")}
    for name, metric in (("recall", RecallAtQuantile(3, 0.1)), ("pauc", PAUCAtBudget(3, beta=0.2))):
        metric.update(scores, targets)
        found[name] = float(metric.compute())
    return found


def test_metrics_with_the_losses(pool_of_two: WorkerPool) -> None:
    for found in pool_of_two(metric_values, METRICS):
        assert found == pytest.approx(references(*metric_rows()), rel=1e-6)


@pytest.mark.parametrize("wrong", ["logits", "logits.sigmoid()"], ids=["softmax", "float32"])
def test_control_other_scores_rank_otherwise(pool_of_two: WorkerPool, wrong: str) -> None:
    recipe = METRICS.replace("logits.double().sigmoid()", wrong)
    assert recipe != METRICS
    for found in pool_of_two(metric_values, recipe):
        assert found["ap"] != pytest.approx(references(*metric_rows())["ap"], rel=1e-4)


WITHOUT_LIGHTNING = """
import importlib.util
importlib.util.find_spec = lambda name, *rest: None
import fullrank.integrations.lightning
"""


def test_without_lightning_the_error_names_the_extra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_LIGHTNING, encoding="utf-8")
    done = run_script(script, cwd=tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "its extra `integrations`" in done.stderr
