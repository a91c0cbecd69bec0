"""Properties of the losses over random shapes, dtypes, splits, weights, queues, and over scores that break formulas."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import gradient_cases
import loss_cases as cases
import pytest
import torch
from gradient_cases import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import IGNORED, OF_POOL, POOLED
from reference import Rows
from workers import get_pool


def random_case(seed: int) -> Case:
    """Return a loss over a pool at random."""
    draw = random.Random(seed)
    return Case(
        draw.choice(OF_POOL),
        weighted=draw.random() < 0.5,
        num_classes=draw.choice([1, 2, 3, 4]),
        queue_size=draw.choice([0, 1, 2, 7, 40]),
        multi_hot=draw.random() < 0.5,
        options={
            "queue_keep": draw.choice(["all", "negatives"]),
            "max_pool_size": draw.choice([None, None, 12]),
            "reduction": draw.choice(["mean", "sum", "none"]),
        },
        tied=draw.random() < 0.5,
        masked=draw.random() < 0.5,
        seed=1000 * seed,
    )


@pytest.mark.parametrize("number", [10, pytest.param(50, marks=pytest.mark.full)])
def test_one_process_equals_two(number: int) -> None:
    """Uneven and empty shards, with rows that are ignored."""
    for of_rank in get_pool(2)(gradient_cases.worst_errors, 2, [*map(random_case, range(number))]):
        for seed, errors in enumerate(of_rank):
            # The rounding of a step moves the parameters of the next, at some scales tenfold.
            assert max(errors) <= 1e-11, random_case(seed)


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
    pytest.mark.slow,
    *(
        pytest.mark.filterwarnings(f"ignore:.*{text}:UserWarning")
        for text in ("is drawn down to max_pool_size", "is left out. Its reference scores hardly differ")
    ),
]


def over_examples(few: int, many: int) -> pytest.MarkDecorator:
    """Run with few examples, and in ``make full`` with many."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.full)])


def check(examples: int, claim: Callable[..., None], **drawn: Any) -> None:
    """Check a claim on drawn arguments.

    The examples are the same in every run: a failure is a defect of this commit, not of this run.
    """
    settings(deadline=None, derandomize=True, database=None, max_examples=examples)(given(**drawn)(claim))()


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


@over_examples(10, 40)
@pytest.mark.parametrize("name", POOLED)
def test_extreme_scores(name: str, examples: int) -> None:
    check(
        examples,
        stays_finite,
        name=st.just(name),
        rows=picks,
        num_classes=st.integers(1, 3),
        exponent=st.integers(-6, 6),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        capacity=st.sampled_from([0, 1, 8]),
    )
