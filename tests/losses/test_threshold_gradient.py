"""The gradient that a threshold carries: values stay, live gradients add up to 0, and no digits are lost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_cases import LINEAR, POOLED, SMOOTH_RECALL, normal, step
from reference import Rows
from torch import Tensor
from torch.testing import assert_close

from fullrank import PAUCAtBudgetLoss, RecallAtQuantileLoss
from fullrank.kernels.below_levels import Carriers, below_levels
from fullrank.kernels.costs import TABLE
from fullrank.kernels.quantiles import Levels
from fullrank.losses import RankingLoss, recall_at_quantile

TRAPEZOID = {"surrogate": "trapezoid"}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "recall": ("recall", {"quantile": 0.1, "temperature": 0.3, **SMOOTH_RECALL}),
    "recall linear": ("recall", {"quantile": 0.13, "temperature": 0.3, **LINEAR, **SMOOTH_RECALL}),
    "pauc": ("pauc", {**TRAPEZOID, "beta": 0.3, "temperature": 0.2}),
    "pauc knots": (
        "pauc",
        {**TRAPEZOID, "alpha": 0.1, "beta": 0.6, "n_knots": 4, "quantile_interpolation": "midpoint"},
    ),
    "pauc live": ("pauc", {**TRAPEZOID, "beta": 0.3, "pos_numerator": "live"}),
    "pauc population": (
        "pauc",
        {**TRAPEZOID, "beta": 0.4, "budget_basis": "population", "tau_scale": "band"},
    ),
}
over_settings = pytest.mark.parametrize("setting", SETTINGS)


def imbalance(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient, divided by the sum of its absolute values, per class."""
    return gradient.sum(dim=0).abs() / gradient.abs().sum(dim=0)


@over_settings
def test_gradients_of_many_rows_add_up_to_zero(setting: str) -> None:
    """Sums of this size are computed by bins where that is faster."""
    loss_name, options = SETTINGS[setting]
    count = 60_000
    loss = POOLED[loss_name].module(1, queue_size=0, **(options | ({"n_knots": 12} if "pauc" in setting else {})))
    _, gradient = step(loss, normal(count, 1), (normal(count, seed=1) > 1).long())
    assert float(imbalance(gradient)) <= 1e-12


def test_positives_without_a_live_reference_row_have_no_gradient() -> None:
    past, live = Rows(normal(200, 1), torch.zeros(200).long()), Rows(normal(8, 1) + 1, torch.ones(8).long())
    for flag in (True, False):
        loss = PAUCAtBudgetLoss(1, beta=0.3, surrogate="trapezoid", queue_size=200, threshold_gradient=flag)
        loss.queue.enqueue(past.logits, past.targets)
        _, gradient = step(loss, *live[:2])
        assert bool(gradient.any()) != flag
    loss = PAUCAtBudgetLoss(1, beta=0.3, surrogate="trapezoid", queue_size=200)
    loss.queue.enqueue(past.logits, past.targets)
    logits, targets = torch.cat([live.logits, torch.tensor([[-math.inf]])]), torch.tensor([1] * 8 + [0])
    assert not bool(step(loss, logits, targets)[1].any())  # an infinite row is none either
    logits[-1] = -3.0
    gradient = step(loss, logits, targets)[1]
    assert float(gradient[-1]) > 0
    assert float(imbalance(gradient)) <= 1e-12


def test_an_infinite_threshold_carries_nothing() -> None:
    scores = torch.cat([torch.tensor([[math.inf], [math.inf], [1.0]]), normal(20, 1)]).double()
    targets = torch.tensor([0, 0, 1, *[0, 0, 0, 1] * 5])
    value, gradient = step(RecallAtQuantileLoss(1, 0.01, temperature=0.3, surrogate="sigmoid"), scores, targets)
    assert float(value) == pytest.approx(1.0, abs=1e-15)
    assert not bool(gradient.any())
    assert recall_at_quantile(
        scores, targets.index_fill(0, torch.tensor([0]), 1), 0.01, 0.3, surrogate="sigmoid"
    ).isnan()  # inf - inf
    # A threshold between a finite and an infinite score is infinite.
    linear = RecallAtQuantileLoss(1, 0.07, temperature=0.3, quantile_interpolation="linear", surrogate="sigmoid")
    value, gradient = step(linear, scores, targets)
    assert float(value) == pytest.approx(1.0, abs=1e-15)
    assert not bool(gradient.any())
    # The edge at a rate of 0 is infinite, the other knot is not.
    loss = PAUCAtBudgetLoss(1, beta=0.5, surrogate="trapezoid", queue_size=0, temperature=1.0)
    value, gradient = step(loss, scores, targets)
    assert 0.5 < float(value) < 1
    assert not bool(gradient[:2].any())
    assert bool((gradient[2:].sign().long() == 1 - 2 * targets[2:, None]).all())
    assert float(imbalance(gradient)) <= 1e-12


def test_a_threshold_near_the_ends_of_float32() -> None:
    """Between two scores, of which the difference from its offset would overflow: as that of scores near 1."""
    gradients = []
    for scale in (1.0, 1e38):
        scores = (scale * torch.tensor([[-2.0, -0.5, 0.4, 1.0]])).requires_grad_()
        levels = Levels(torch.tensor([[-2.0 * scale]]), torch.tensor([[1.6 * scale]]))
        share = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
        loss = below_levels(scores, share, levels, [1.0], torch.tensor([0.5 * scale]), Carriers(None))
        gradients.append(torch.autograd.grad(loss.sum(), scores)[0].double() * scale)
    assert_close(gradients[1], gradients[0], rtol=1e-5, atol=0)
    assert bool(gradients[0].any())


@pytest.mark.parametrize("interpolation", ["higher", "linear"])
def test_a_class_that_is_not_valid_has_no_gradient(interpolation: str) -> None:
    """Its level is 0, far from its scores."""
    scores, targets = normal(40, 3).float(), (normal(40, 3, seed=1) > 0.5).long()
    scores[:, 1], targets[:, 1] = 28.2 + scores[:, 1] * 1e-3, 0
    scores[:, 2] = math.inf
    options = {"quantile_interpolation": interpolation, "multi_hot": True, "queue_size": 0}
    losses: list[RankingLoss] = [
        RecallAtQuantileLoss(3, 0.2, temperature=0.3, surrogate="sigmoid", **options),
        PAUCAtBudgetLoss(3, beta=0.3, surrogate="trapezoid", validate_args=False, **options),
    ]
    for loss in losses:
        leaf = scores.clone().requires_grad_()
        per_class = loss(leaf, targets, return_per_class=True).per_class
        (gradient,) = torch.autograd.grad(per_class[0], leaf, retain_graph=True)
        assert bool(gradient[:, 0].any())
        assert not bool(gradient[:, 1].any())
        empty = leaf.detach()[:0].requires_grad_()
        loss(empty, targets[:0]).backward()
        assert empty.grad is not None


# Digits


@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_shares_exist_where_every_slope_underflows(
    dtype: torch.dtype, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold is a queued row 1,000 temperatures above every live one, at which a queued positive has a slope."""
    if chunk:
        monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(rows_at_once=chunk))
    far = torch.tensor([[1000.0], [0.0]], dtype=dtype)  # the levels, and the positives
    scores = torch.cat([normal(2, 200).to(dtype), far], dim=1).requires_grad_()
    rows, taus = torch.arange(201)[None].expand(2, -1) < 200, torch.tensor([1.0, 0.5], dtype=dtype)
    carriers = Carriers(rows, torch.ones(201, dtype=torch.bool))
    loss = below_levels(scores, (~rows).to(dtype), Levels(far, None), [1.0], taus, carriers)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    distance = (scores.detach().double() - far.double()).abs() / taus[:, None].double()
    logs = -distance - 2 * torch.log1p(torch.exp(-distance))
    exact = torch.softmax(logs.masked_fill(~rows, -math.inf), dim=1)
    limit = 2e-6 if dtype == torch.float32 else 1e-12
    shares = (gradient.double() * 4 * taus[:, None])[:, :200]
    assert float((shares - exact[:, :200]).abs().max() / exact.max()) <= limit
    naive = torch.sigmoid(-distance[0].to(torch.float32)) * rows[0]  # control: the slopes themselves are all 0
    assert not bool(naive.any())
