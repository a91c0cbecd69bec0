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
    """Drawing does not change the metric, on axes of one's own too."""
    metric = make_metric(kind)
    _, axes = metric.plot()
    ((height,),) = drawn(axes)
    assert height == pytest.approx(float(metric.compute()), rel=1e-12)  # drawing does no arithmetic
    assert 0.2 < height < 1  # neither end of the range, where anything might be drawn
    assert axes.get_ylabel() == kind[0].__name__
    assert axes.get_ylim() == pytest.approx((-0.1, 1.1))  # the range of the metric, with a margin
    values = [make_metric(kind, seed=seed).compute() for seed in range(4)]
    _, own = pyplot.subplots()
    assert metric.plot(values, ax=own) == (None, own)
    (line,) = drawn(own)
    assert line == pytest.approx(torch.stack(values).tolist(), rel=1e-12)
    assert len(set(line)) > 1
    assert float(metric.compute()) == height


@over_metrics
def test_a_value_per_class_and_step(kind: Any, pyplot: Any) -> None:
    """A line per class, also if a class is NaN for a step, which leaves a gap and no point at zero."""
    steps = [make_metric(kind, average=None, seed=seed).compute() for seed in range(4)]
    steps[2] = torch.where(torch.arange(3) == 1, torch.nan, steps[2])
    for values in (None, steps):
        metric = make_metric(kind, average=None)
        _, axes = metric.plot(values)
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["Class 0", "Class 1", "Class 2"]
        expected = metric.compute()[None] if values is None else torch.stack(values)
        assert len(set(expected[0].tolist())) == 3  # else the order of the classes would not show
        for line, column in zip(drawn(axes), expected.t(), strict=True):
            assert line == pytest.approx(column.tolist(), rel=1e-12, nan_ok=True)
