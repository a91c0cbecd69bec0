"""What ``plot()`` of the metrics draws: the values, classes, steps and range of the metric, and its review curve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from sklearn.metrics import precision_recall_curve

from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

METRICS = [(RecallAtQuantile, {"quantile": 0.3}), (PAUCAtBudget, {"beta": 0.3})]
over_metrics = pytest.mark.parametrize("kind", METRICS, ids=["recall", "pAUC"])


def make_metric(kind: tuple[Any, dict[str, float]], average: str | None = "macro", seed: int = 0) -> Any:
    """Return a metric of three classes, of which the first is ranked best and the last worst."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, (90,), generator=generator)
    logits = torch.randn(90, 3, generator=generator)
    logits[torch.arange(90), targets] += torch.tensor([3.0, 1.5, 0.5])[targets]
    metric = kind[0](num_classes=3, average=average, **kind[1])
    metric.update(logits, targets)
    return metric


def drawn(axes: Any) -> list[list[float]]:
    """Return the heights of the points of every line."""
    return [[float(value) for value in line.get_ydata()] for line in axes.get_lines()]


@over_metrics
def test_values_per_class_and_step(kind: Any, pyplot: Any) -> None:
    """A line per class, in the range of the metric; a class that is NaN for a step leaves a gap. The metric stays."""
    steps = [make_metric(kind, average=None, seed=seed).compute() for seed in range(4)]
    steps[2] = torch.where(torch.arange(3) == 1, torch.nan, steps[2])
    metric = make_metric(kind, average=None)
    value = metric.compute()
    for values in (None, steps):
        _, axes = metric.plot(values)
        assert axes.get_ylabel() == kind[0].__name__
        assert axes.get_ylim() == pytest.approx((-0.1, 1.1))  # the range of the metric, with a margin
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["Class 0", "Class 1", "Class 2"]
        expected = value[None] if values is None else torch.stack(values)
        assert len(set(expected[0].tolist())) == 3  # else the order of the classes would not show
        for line, column in zip(drawn(axes), expected.t(), strict=True):
            assert line == pytest.approx(column.tolist(), rel=1e-12, nan_ok=True)  # drawing does no arithmetic
    assert torch.equal(metric.compute(), value)
    _, own = pyplot.subplots()
    assert make_metric(kind).plot(ax=own) == (None, own)


@over_metrics
def test_the_review_curve_is_that_of_scikit_learn(kind: Any, pyplot: Any) -> None:
    """With ties and ignored rows, of one class against the rest; the control is another class."""
    metric = kind[0](num_classes=3, **kind[1])
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(90, 3, generator=generator), torch.randint(0, 3, (90,), generator=generator)
    logits, targets[::7] = (4 * logits).round() / 4, -100
    for part in (slice(0, 40), slice(40, 90)):
        metric.update(logits[part], targets[part])
    curve, kept = metric.review_curve(class_index=1), targets != -100
    precision, recall, thresholds = precision_recall_curve((targets[kept] == 1).numpy(), logits[kept, 1].numpy())
    first = list(thresholds).index(curve.threshold[-1])  # scikit-learn leaves out what lies below the last positive
    for ours, theirs in zip(curve[1:], (precision[:-1], recall[:-1], thresholds)):
        assert ours.flip(0).tolist() == pytest.approx(theirs[first:].tolist(), rel=1e-12)
    flagged = [(logits[kept, 1] >= threshold).float().mean().item() for threshold in curve.threshold]
    assert curve.budget.tolist() == pytest.approx(flagged, rel=1e-6)
    assert not torch.equal(metric.review_curve(2).recall[:5], curve.recall[:5])

    figure, axes = curve.plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["precision", "recall", "threshold (right)"]
    for line, values in zip(drawn(axes), curve[1:]):
        assert line == values.tolist()
    assert [drawn(one) for one in figure.axes[1:]] == [[curve.threshold.tolist()]]
    _, own = pyplot.subplots()
    assert curve.plot(ax=own) == (None, own)
    with pytest.raises(ValueError, match="class_index: expected 0 to 2, got 3"):
        metric.review_curve(3)
    metric.update(torch.full((1, 3), torch.nan), torch.tensor([0]))
    with pytest.raises(ValueError, match="the scores of class 1: expected numbers, got NaN"):
        metric.review_curve(1)


def test_the_review_curve_of_few_rows() -> None:
    metric = RecallAtQuantile(quantile=0.5)
    assert [len(values) for values in metric.review_curve()] == [0] * 4
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]))
    assert metric.review_curve().precision.tolist() == [0, 0]
    assert metric.review_curve().recall.isnan().all()


@on_ranks(2)
def test_the_review_curve_is_that_of_all_ranks(rank: int) -> None:
    """Also of a rank that has no row in the first step; the metric keeps its own rows."""
    generator = torch.Generator().manual_seed(3)
    scores, targets = torch.randn(30, generator=generator), torch.randint(0, 2, (30,), generator=generator)
    metric, whole = (PAUCAtBudget(beta=0.5, sync_on_compute=sync) for sync in (True, False))
    for rows in (slice(0, 10), slice(10, 30)):
        own = [slice(rows.start, rows.start), rows][rank] if rows.start == 0 else [slice(10, 13), slice(13, 30)][rank]
        metric.update(scores[own], targets[own])
        whole.update(scores[rows], targets[rows])
        for ours, expected in zip(metric.review_curve(), whole.review_curve(), strict=True):
            assert torch.equal(ours, expected)
        assert len(metric.rows()[0]) == [0 if rows.start == 0 else 3, 10 if rows.start == 0 else 27][rank]
    alone = PAUCAtBudget(beta=0.5, sync_on_compute=False)
    alone.update(scores[own], targets[own])
    assert len(alone.review_curve().budget) < 30  # the control: the rows of one rank
