"""Losses over scores that break formulas, at random."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import loss_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import IGNORED, POOLED
from reference import Rows

# Scores that break naive formulas, each alone and next to ordinary ones.
EXTREMES = (0.0, -0.0, 1e30, -1e30, 1e-40, -1e-40, 5e-324, 1.0, 1.0 + 2**-23, 65504.0, 1e37, -1e37)


def extreme_rows(num_classes: int, picks: list[tuple[int, int]], dtype: torch.dtype) -> Rows:
    """Return rows of extreme scores; ``picks`` are (score, target) pairs, an odd class index per row."""
    count = len(picks)
    scores = [[EXTREMES[(pick + 5 * column) % len(EXTREMES)] for column in range(num_classes)] for pick, _ in picks]
    labels = [target % (max(2, num_classes) + 1) for _, target in picks]
    ignored = max(2, num_classes)
    targets = torch.tensor([IGNORED if label == ignored else label for label in labels], dtype=torch.int64)
    return Rows(torch.tensor(scores, dtype=dtype).view(count, num_classes), targets)


# What the losses warn of, once each: a pool that is drawn, a reference without spread. Nothing else may warn.
pytestmark = [
    pytest.mark.full,
    *(
        pytest.mark.filterwarnings(f"ignore:.*{text}:UserWarning")
        for text in ("is drawn down to max_pool_size", "is left out. Its reference scores hardly differ")
    ),
]


def check(claim: Callable[..., None], **drawn: Any) -> None:
    """Check a claim on drawn arguments.

    The examples are the same in every run: a failure is a defect of this commit, not of this run.
    """
    settings(deadline=None, derandomize=True, database=None, max_examples=40)(given(**drawn)(claim))()


picks = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), min_size=0, max_size=9)


def stays_finite(
    name: str, rows: list[tuple[int, int]], num_classes: int, exponent: int, dtype: torch.dtype, capacity: int
) -> None:
    """Finite, in [0, 1], without a warning of torch's and with anomaly detection on; the second step sees the queue."""
    options = {"temperature": 10.0**exponent} if POOLED[name].of_order else {}
    module = POOLED[name].first.make(num_classes=num_classes, queue_size=capacity, **options)
    for _ in range(2):
        batch = cases.leaf(extreme_rows(num_classes, rows, dtype))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
            warnings.filterwarnings("ignore", message="PAUCAtBudgetLoss: .*")  # a spread of zero: ours, and said once
            with torch.autograd.detect_anomaly():
                loss = cases.call(module, batch)
                loss.backward()
        assert 0.0 <= loss.item() <= (1.0 if POOLED[name].of_order else 1e38)
        assert batch.logits.grad is not None
        assert batch.logits.grad.isfinite().all()


@pytest.mark.parametrize("name", POOLED)
def test_extreme_scores(name: str) -> None:
    check(
        stays_finite,
        name=st.just(name),
        rows=picks,
        num_classes=st.integers(1, 3),
        exponent=st.integers(-6, 6),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        capacity=st.sampled_from([0, 1, 8]),
    )
