"""The recipe of docs/integrations.md for torchmetrics, and what a missing framework says."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from pages import PAGES, blocks, run_block
from sklearn.metrics import average_precision_score
from torch import Tensor

from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

pytestmark = pytest.mark.slow


def metric_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(0, 3, (90,), generator=generator)
    logits = 4 * torch.randn(90, 3, generator=generator)
    logits[torch.arange(90), targets] += 3
    logits[:2] += 20  # float32 makes 1 of their sigmoid
    return logits, targets


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


WRONG = {"softmax": "logits", "float32": "logits.sigmoid()"}  # the controls: other scores, which rank otherwise


@pytest.mark.parametrize("control", [None, *WRONG])
@on_ranks(2)
def test_metrics_with_the_losses(rank: int, control: str | None) -> None:
    """Rank 0 has 50 of the rows in three batches, rank 1 40 in two."""
    logits, targets = metric_rows()
    starts = ((0, 10, 30, 50), (50, 55, 90))[rank]
    batches = [(logits[start:end], targets[start:end]) for start, end in pairwise(starts)]
    recipe = METRICS if control is None else METRICS.replace("logits.double().sigmoid()", WRONG[control])
    assert (recipe == METRICS) == (control is None)
    found = {name: float(value) for name, value in run_block(recipe, {"batches": batches})["values"].items()}
    expected = references(logits, targets)
    if control is None:
        assert found == pytest.approx(expected, rel=1e-6)
    else:
        assert found["ap"] != pytest.approx(expected["ap"], rel=1e-4)


def test_without_lightning_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    monkeypatch.delitem(sys.modules, "fullrank.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match="its extra `integrations`"):
        importlib.import_module("fullrank.integrations.lightning")
