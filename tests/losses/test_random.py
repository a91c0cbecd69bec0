"""Properties of the losses over random shapes, dtypes, splits, weights, queues, and over scores that break formulas."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import loss_cases as cases
import numpy
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import IGNORED, POOLED
from reference import Rows
from workers import get_pool

from fullrank import losses


@dataclass(frozen=True)
class Problem:
    """Some steps of training, small enough to send to a worker: the rows are made from the seed on arrival.

    ``sizes``: the rows of each rank, for each step.
    """

    name: str
    setting: str
    sizes: tuple[tuple[int, ...], ...]
    num_classes: int = 1
    multi_hot: bool = False
    dtype: torch.dtype = torch.float64
    queue_size: int = 0
    queue_keep: str = "all"
    max_pool_size: int | None = None
    weighted: bool = False
    masked: bool = False
    grid: float = 0.0
    seed: int = 0

    def rows(self, step: int) -> Rows:
        """Return the rows of all ranks."""
        share = 0.3 if self.seed % 3 else 0.05
        case = cases.InputCase(self.num_classes, 0, self.multi_hot, share, self.grid)
        count = sum(self.sizes[step])
        rows = case.rows(97 * self.seed + step, num_rows=count, weighted=self.weighted, masked=self.masked)
        return rows._replace(logits=rows.logits.to(self.dtype))

    def module(self, **options: Any) -> losses.RankingLoss:
        """Return the loss."""
        loss = POOLED[self.name]
        settings = dict(loss.settings[self.setting])
        kept = {"queue_keep": self.queue_keep, "max_pool_size": self.max_pool_size, "multi_hot": self.multi_hot}
        return loss.module(self.num_classes, queue_size=self.queue_size, **settings, **kept, **options)


def problems(world_size: int) -> st.SearchStrategy[Problem]:
    """Return the strategy of problems for ``world_size`` ranks: uneven, empty, ignored, tied, weighted, queued."""
    sizes = st.lists(st.tuples(*[st.integers(0, 9)] * world_size), min_size=1, max_size=3).map(tuple)
    names = st.sampled_from([(name, setting) for name, loss in POOLED.items() for setting in loss.settings])
    return st.builds(
        lambda named, **others: Problem(*named, **others),
        names,
        sizes=sizes,
        num_classes=st.integers(1, 4),
        multi_hot=st.booleans(),
        dtype=st.sampled_from([torch.float64, torch.float32]),
        queue_size=st.sampled_from([0, 1, 2, 7, 40]),
        queue_keep=st.sampled_from(["all", "negatives"]),
        max_pool_size=st.sampled_from([None, None, 12]),
        weighted=st.booleans(),
        masked=st.booleans(),
        grid=st.sampled_from([0.0, 0.5, 100.0]),
        seed=st.integers(0, 10**6),
    )


def run(problem: Problem, own: list[slice] | None = None) -> tuple[list[float], list[Any], list[Any]]:
    """Return value and gradient of every step, and what the queue holds at the end; ``own``: which rows are given."""
    module = problem.module(gather_distributed=None if own else False)
    values, gradients = [], []
    for step in range(len(problem.sizes)):
        rows = problem.rows(step)
        rows = cases.leaf(rows if own is None else reference.take(rows, torch.arange(len(rows.logits))[own[step]]))
        loss = cases.call(module, rows)
        loss.backward()
        assert rows.logits.grad is not None
        values.append(loss.item())
        gradients.append(rows.logits.grad.double().numpy())
    held = [None if part is None else part.double().numpy() for part in module.queue.rows()]
    return values, gradients, held


def on_rank(rank: int, problem: Problem) -> tuple[list[float], list[Any], list[Any]]:
    """Return what one of several ranks gets."""
    own = [slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for sizes in problem.sizes]
    return run(problem, own)


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


def assert_near(ours: Any, truth: Any, tolerance: float) -> None:
    """The difference is small in the norm."""
    assert numpy.linalg.norm(ours - truth) <= tolerance * max(numpy.linalg.norm(truth), 1e-3)


def one_process_equals(world_size: int, problem: Problem) -> None:
    """Values, gradients and queues over ranks are those of one process."""
    values, gradients, held = run(problem)
    ranks = get_pool(world_size)(on_rank, problem)
    tolerance = 1e-12 if problem.dtype == torch.float64 else 2e-6
    for step, (value, gradient) in enumerate(zip(values, gradients)):
        assert all(mine[step] == ranks[0][0][step] or value != value for mine, _, _ in ranks)
        assert ranks[0][0][step] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True)
        spread = numpy.concatenate([theirs[step] for _, theirs, _ in ranks]) / world_size
        assert_near(spread, gradient, tolerance)
    for _, _, queue in ranks:
        for mine, other in zip(queue, held):
            numpy.testing.assert_array_equal(mine, other)


@over_examples(15, 60)
def test_one_process_equals_two(examples: int) -> None:
    check(examples, one_process_equals, world_size=st.just(2), problem=problems(2))


def test_the_comparison_can_fail() -> None:
    """Two ranks that do not gather differ from one process by far more than rounding."""
    problem = Problem("smooth_ap", "wide", sizes=((9, 7),), seed=4)
    _, (truth,), _ = run(problem)
    halves = [run(problem, [slice(0, 9)])[1][0], run(problem, [slice(9, 16)])[1][0]]
    with pytest.raises(AssertionError):
        assert_near(numpy.concatenate(halves) / 2, truth, 1e-3)


picks = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), min_size=0, max_size=9)


def stays_finite(
    name: str, rows: list[tuple[int, int]], num_classes: int, exponent: int, dtype: torch.dtype, capacity: int
) -> None:
    """Finite, in [0, 1], without a warning of torch's and with anomaly detection on; the second step sees the queue."""
    options = dict(POOLED[name].default)
    if POOLED[name].of_order:
        options["temperature"] = 10.0**exponent
    module = POOLED[name].module(num_classes, queue_size=capacity, **options)
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
