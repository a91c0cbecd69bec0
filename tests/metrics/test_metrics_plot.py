"""What ``plot()`` of the metrics draws: the values, the classes, the steps, and the range of the metric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

METRICS = [(RecallAtQuantile, {"quantile": 0.3}), (PAUCAtBudget, {"beta": 0.3})]
over_metrics = pytest.mark.parametrize("kind", METRICS, ids=["recall", "pAUC"])


@pytest.fixture
def pyplot() -> Iterator[Any]:
    """matplotlib without a screen, and without the figures that a test leaves behind."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    yield pyplot
    pyplot.close("all")


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
def test_one_value_and_one_per_step(kind: Any, pyplot: Any) -> None:
    metric = make_metric(kind)
    figure, axes = metric.plot()
    ((height,),) = drawn(axes)
    assert height == pytest.approx(float(metric.compute()), rel=1e-12)  # drawing does no arithmetic
    assert 0.2 < height < 1  # neither end of the range, where anything might be drawn
    assert axes.get_ylabel() == kind[0].__name__
    assert axes.get_ylim() == pytest.approx((-0.1, 1.1))  # the range of the metric, with a margin
    assert axes.get_legend() is None
    assert figure.axes == [axes]
    values = [make_metric(kind, seed=seed).compute() for seed in range(4)]
    _, axes = metric.plot(values)
    (line,) = drawn(axes)
    assert line == pytest.approx(torch.stack(values).tolist(), rel=1e-12)
    assert len(set(line)) > 1
    assert axes.get_xlabel() == "Step"
    assert list(axes.get_xticks()) == [0, 1, 2, 3]


@over_metrics
def test_a_value_per_class_and_step(kind: Any, pyplot: Any) -> None:
    """A line per class, also if a class is NaN for a step, which leaves a gap."""
    metric = make_metric(kind, average=None)
    _, axes = metric.plot()
    values = metric.compute()
    assert [height for (height,) in drawn(axes)] == pytest.approx(values.tolist(), rel=1e-12)
    assert len(set(values.tolist())) == 3  # else the order of the classes would not show
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["Class 0", "Class 1", "Class 2"]
    steps = [make_metric(kind, average=None, seed=seed).compute() for seed in range(4)]
    steps[2] = torch.where(torch.arange(3) == 1, torch.nan, steps[2])
    _, axes = metric.plot(steps)
    assert len(drawn(axes)) == 3
    for line, column in zip(drawn(axes), torch.stack(steps).t()):
        assert line == pytest.approx(column.tolist(), rel=1e-12, nan_ok=True)


def test_axes_of_ones_own(pyplot: Any) -> None:
    """Two metrics next to each other; drawing does not change the metric."""
    _, pair = pyplot.subplots(1, 2)
    for kind, axes in zip(METRICS, pair):
        metric = make_metric(kind)
        before = metric.compute()
        figure, used = metric.plot(ax=axes)
        assert figure is None
        assert used is axes
        assert metric.compute() == before
    assert drawn(pair[0]) != drawn(pair[1])


@pytest.mark.parametrize("average", ["macro", None])
def test_a_binary_metric_and_one_without_a_valid_class(average: Any, pyplot: Any) -> None:
    """A value that is NaN shows no point, and none at zero."""
    for targets, expected in ((torch.tensor([1, 0, 1, 0]), 0.5), (torch.zeros(4, dtype=torch.long), float("nan"))):
        metric = RecallAtQuantile(num_classes=1, quantile=0.5, average=average)
        metric.update(torch.tensor([[3.0], [2.0], [1.0], [0.0]]), targets)
        _, axes = metric.plot()
        assert drawn(axes) == [[pytest.approx(expected, nan_ok=True)]]
