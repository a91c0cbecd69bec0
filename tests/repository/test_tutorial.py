"""The task of the tutorial: each of its losses beats cross-entropy in the metric it is for, whatever the seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pages import BLOCK, PAGES, run_block

import fullrank

pytestmark = pytest.mark.full

SEEDS = range(3)
LOSSES = {
    "ap": lambda: fullrank.SmoothAPLoss(num_classes=1),
    "recall": lambda: fullrank.RecallAtQuantileLoss(num_classes=1, quantile=0.05),
    "pauc": lambda: fullrank.PAUCAtBudgetLoss(num_classes=1),
}


@pytest.fixture(scope="module")
def tutorial() -> dict[str, Any]:
    """What the blocks before the section "One added line" define: rows, network, metrics, training."""
    section = PAGES["tutorial.md"].split("## One added line")[0]
    return run_block("".join(code for code, _ in BLOCK.findall(section)), {})


def figures(tutorial: dict[str, Any], loss: Any, seed: int) -> dict[str, float]:
    """Return the metrics on the test rows after a training from the initial weights of ``seed``."""
    with torch.random.fork_rng(devices=[]):
        model = tutorial["make_model"]()
        torch.manual_seed(100 + seed)
        for layer in model:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        tutorial["train"](model, loss)
    metrics = tutorial["make_metrics"]()
    with torch.no_grad():
        metrics.update(model(tutorial["test_features"]).double().sigmoid(), tutorial["test_targets"])
    return {name: float(value) for name, value in metrics.compute().items()}


@pytest.fixture(scope="module")
def cross_entropy(tutorial: dict[str, Any]) -> list[dict[str, float]]:
    """The metrics of cross-entropy, by seed."""
    return [figures(tutorial, fullrank.SigmoidFocalLoss(alpha=-1, gamma=0), seed) for seed in SEEDS]


@pytest.mark.parametrize("metric", LOSSES)
def test_each_loss_beats_cross_entropy_in_its_metric(
    tutorial: dict[str, Any], cross_entropy: list[dict[str, float]], metric: str
) -> None:
    gains = [figures(tutorial, LOSSES[metric](), seed)[metric] - cross_entropy[seed][metric] for seed in SEEDS]
    assert min(gains) > 0.02, gains


def test_control_with_targets_of_other_rows_none_does(
    tutorial: dict[str, Any], cross_entropy: list[dict[str, float]]
) -> None:
    for metric, make in LOSSES.items():
        loss = make()
        found = figures(tutorial, lambda logits, targets, loss=loss: loss(logits, targets.roll(1, 0)), 0)
        assert found[metric] < cross_entropy[0][metric]
