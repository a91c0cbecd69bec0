"""A row of weight w counts as w rows in quantiles, rates and means: recall and partial AUC as temperatures fall."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import reference
import torch
from loss_cases import LINEAR, POOLED, SMOOTH_RECALL, step
from sklearn.metrics import recall_score, roc_curve
from torch import Tensor

from fullrank.losses import RankingLoss

Loss = tuple[str, dict[str, Any]]
PAUC = {"beta": 0.3, "temperature": 1e-3}
LOSSES: dict[str, Loss] = {
    "recall": ("recall", {"quantile": 0.2, "temperature": 1e-3, **SMOOTH_RECALL}),
    "recall linear": ("recall", {"quantile": 0.2, "temperature": 0.3, **LINEAR, **SMOOTH_RECALL}),
    "trapezoid": ("pauc", {**PAUC, "surrogate": "trapezoid", "n_knots": 400}),
    "pairwise": ("pauc", {**PAUC, "surrogate": "pairwise"}),
    "recall dro": ("recall_dro", {"quantile": 0.1}),
    "dro": ("pauc", {"beta": 0.1}),
    "dro by pairs": ("pauc", {"dro_lambda": 1.7}),
}


def make(name: str, **options: Any) -> RankingLoss:
    loss_name, settings = LOSSES[name]
    return POOLED[loss_name].module(1, queue_size=0, **settings, **options)


def weighted_rows(count: int = 80) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores at least 15 of the smallest temperatures apart, targets, and whole weights of which some are 0."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randperm(count, generator=generator).double()[:, None] / 10
    targets = (torch.rand(count, generator=generator) < 0.2 + 0.5 * scores[:, 0] / count * 10).long()
    return scores, targets, torch.randint(0, 5, (count,), generator=generator).double()


def test_recall_falls_to_that_of_scikit_learn() -> None:
    scores, targets, weights = weighted_rows()
    value, _ = step(make("recall"), scores, targets, sample_weight=weights)
    counted = weights > 0
    level = reference.upper_level(scores[counted, 0].tolist(), 0.2, "higher", weights[counted].tolist())
    at_level = (scores[:, 0] == sum(level)).double() / 2  # a positive at the threshold counts half
    half = float((at_level * targets * weights).sum() / (targets * weights).sum())
    expected = recall_score(targets, scores[:, 0] >= sum(level), sample_weight=weights) - half
    assert 1 - float(value) == pytest.approx(expected, abs=1e-6)
    assert abs(1 - float(step(make("recall"), scores, targets)[0]) - expected) > 1e-3  # control


def test_pairs_in_the_band_fall_to_the_weighted_curve_of_scikit_learn() -> None:
    """The mean over the negatives in the band of the true-positive rate at each; the curve has a step at each."""
    scores, targets, weights = weighted_rows()
    rates, hits, thresholds = roc_curve(targets, scores[:, 0], sample_weight=weights, drop_intermediate=False)
    negatives = (targets == 0) & (weights > 0)
    low = reference.upper_level(scores[negatives, 0].tolist(), 0.3, "higher", weights[negatives].tolist())
    in_band = numpy.isin(thresholds, scores[negatives, 0].numpy()) & (thresholds >= sum(low))
    masses = numpy.diff(rates, prepend=0.0)[in_band]
    expected = float((hits[in_band] * masses).sum() / masses.sum())
    value, _ = step(make("pairwise"), scores, targets, sample_weight=weights)
    assert 1 - float(value) == pytest.approx(expected, abs=1e-6)
    assert abs(1 - float(step(make("pairwise"), scores, targets)[0]) - expected) > 1e-3  # control


def test_many_knots_fall_to_the_weighted_area_of_scikit_learn() -> None:
    scores, targets, weights = weighted_rows(2000)
    rates, hits, _ = roc_curve(targets, scores[:, 0], sample_weight=weights, drop_intermediate=False)
    grid = numpy.linspace(0, 0.3, 10_001)
    expected = float(numpy.trapezoid(numpy.interp(grid, rates, hits), grid) / 0.3)
    value, _ = step(make("trapezoid"), scores, targets, sample_weight=weights)
    assert 1 - float(value) == pytest.approx(expected, abs=1e-3)
    assert abs(1 - float(step(make("trapezoid"), scores, targets)[0]) - expected) > 3e-3  # control


@pytest.mark.parametrize("name", [name for name in LOSSES if "dro" in name])
def test_dro_counts_a_weight_as_copies(name: str) -> None:
    """For a soft maximum copies are exactly that; a quantile of copies lies between two of them."""
    scores, targets, weights = weighted_rows()
    copies = weights.long()
    value, gradient = step(make(name), *(rows.repeat_interleave(copies, dim=0) for rows in (scores, targets)))
    found, of_rows = step(make(name), scores, targets, sample_weight=weights)
    torch.testing.assert_close(found, value, rtol=1e-12, atol=0)
    owner = torch.arange(len(copies)).repeat_interleave(copies)
    summed = torch.zeros_like(scores).index_add_(0, owner, gradient)
    torch.testing.assert_close(of_rows, summed, rtol=1e-12, atol=1e-15)
    for wrong in (
        step(make(name), scores, targets),
        step(make(name, weighting="positives"), scores, targets, sample_weight=weights),
    ):
        assert not torch.allclose(wrong[0], value, rtol=1e-6)  # controls: none, and those of positives alone


@pytest.mark.parametrize("name", LOSSES)
def test_weights_of_positives_alone(name: str) -> None:
    scores, targets, weights = weighted_rows()
    others = torch.where(targets == 1, weights, weights.flip(0) + 0.5)
    value, gradient = step(make(name, weighting="positives"), scores, targets, sample_weight=weights)
    found, of_rows = step(make(name, weighting="positives"), scores, targets, sample_weight=others)
    assert torch.equal(found, value)
    assert torch.equal(of_rows, gradient)
    assert not torch.equal(step(make(name), scores, targets, sample_weight=others)[0], value)  # control
