"""Scores, weights and soft targets at which a formula written down naively loses its digits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from bounds import assert_as_exact
from loss_cases import FORMS, normal
from on_ranks import on_ranks
from reference import Rows
from subjects import error
from torch import Tensor

from fullrank import PAUCAtBudgetLoss, SigmoidFocalLoss
from fullrank.kernels import sigmoid_sums as sums
from fullrank.kernels.costs import TABLE
from fullrank.losses import pauc_at_budget, sigmoid_focal
from fullrank.metrics import RecallAtQuantile

# Relative errors of a gradient: a slope s'(d) errs by |d| roundings, and is below e^-32 from d = 32; the promise.
FLOAT32, FLOAT64 = 32 * torch.finfo(torch.float32).eps, 1e-12
DTYPES = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, FLOAT32), (torch.float64, FLOAT64)], ids=str)


# Partial AUC


def exactly(scores: Tensor, positive: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the definition in float64."""
    leaf = scores[:, None].clone().requires_grad_()
    loss = reference.pauc_at_budget(Rows(leaf, positive.long()), temperature=0.1, **options).loss
    return loss.detach(), torch.autograd.grad(loss, leaf)[0][:, 0]


def ours(scores: Tensor, positive: Tensor, dtype: torch.dtype, **options: object) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the package for scores (M,) or (M, C)."""
    leaf = scores.to(dtype).requires_grad_()
    logits, multi = (leaf, True) if scores.ndim == 2 else (leaf[:, None], False)
    value = pauc_at_budget(logits, positive.long(), temperature=0.1, multi_hot=multi, **options)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def with_ends(scores: Tensor, positive: Tensor) -> Tensor:
    """Return scores 1e-9 apart, of which a negative and two positives are at the ends of float32."""
    scores = scores * 1e-9
    negatives, positives = (~positive).nonzero()[:, 0], positive.nonzero()[:, 0]
    scores[negatives[0]], scores[positives[0]], scores[positives[1]] = -3e30, 3e30, -3e30
    return scores


def with_outlier(outlier: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a change that moves one negative."""
    return lambda scores, positive: scores.index_fill(0, (~positive).nonzero()[3], outlier)


# How the scores are changed, the rate to which the band reaches, and the rule of its quantiles.
CHANGES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, str]] = {
    **{f"outlier {far:g}": (with_outlier(far), 1.0, "higher") for far in (-1e6, -1e7, -1e9, -1e30)},
    "ranges beyond float32 in temperatures": (with_ends, 1.0, "higher"),
    "interpolated edges": (lambda scores, positive: scores, 0.3, "linear"),
    "interpolated edges far from zero": (lambda scores, positive: scores + 1e6, 0.3, "linear"),
}


@DTYPES
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("surrogate", ["trapezoid", "pairwise"])
def test_pauc_of_scores_far_apart(surrogate: str, change: str, dtype: torch.dtype, limit: float) -> None:
    changed, beta, interpolation = CHANGES[change]
    positive = normal(300, seed=1) > 1
    scores = changed(normal(300), positive).float().double()
    options = {"beta": beta, "surrogate": surrogate, "quantile_interpolation": interpolation}
    loss, exact = exactly(scores, positive, **options)
    value, gradient = ours(scores, positive, dtype, **options)
    # In float64 the reference itself rounds its quantiles, to 1e-10 of the spread at 1e6.
    limit = max(limit, 1e-9 if "zero" in change else 0)
    assert error(gradient, exact) <= limit
    assert abs(float(value) - float(loss)) <= limit
    if dtype == torch.float32 and change == "outlier -1e+07":  # control: the scores divided around the outlier
        shifted = (scores.float() + 1e7).double()
        assert error(ours(shifted, positive, torch.float64, **options)[1], exact) > 1e-3


MANY = 9  # classes, of which four at a time have kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_classes", "surrogate", "method", "dtype"),
    [
        (3, "trapezoid", "binned", torch.float32),
        (3, "pairwise", "direct", torch.float64),
        (MANY, "trapezoid", "direct", torch.float64),
        (MANY, "pairwise", "binned", torch.float32),
    ],
)
def test_classes_of_different_scale_share_a_call(
    num_classes: int, surrogate: str, method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has an outlier in addition. Its class is summed alone, and the others together."""
    pair = {"direct": 0.0, "binned": 1e9}[method]
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(pair=pair))
    monkeypatch.setattr(sums, "MOST_KERNELS", 4)
    count = 400
    scales = 10.0 ** torch.linspace(-3, 3, num_classes).double()
    scores = (normal(count, num_classes) * scales + 100).float().double()
    positive = normal(count, num_classes, seed=1) > 1
    scores[(~positive[:, 1]).nonzero()[0], 1] = -1e7
    # Bins have the error of the largest slope. With the lowest score for a knot, no positive may be near any knot.
    beta = {"trapezoid": 0.3, "pairwise": 1.0}[surrogate]
    options = {"beta": beta, "surrogate": surrogate}
    exact = torch.stack([exactly(scores[:, c], positive[:, c], **options)[1] for c in range(num_classes)], dim=1)
    _, gradient = ours(scores, positive, dtype, reduction="sum", **options)
    for c in range(num_classes):
        assert error(gradient[:, c], exact[:, c]) <= (FLOAT32 if dtype == torch.float32 else FLOAT64)


@pytest.mark.parametrize("surrogate", ["trapezoid", "pairwise"])
def test_an_infinite_band_leaves_out_its_class_and_no_other(surrogate: str) -> None:
    """An infinite scale gives no temperature. The scale of the quartiles stays finite, and so does that loss."""
    scores, positive = normal(200, 2).float(), normal(200, 2, seed=1) > 1
    row = int((~positive[:, 0]).nonzero()[0])
    scores[row, 0] = math.inf
    options = {"beta": 0.3, "surrogate": surrogate, "multi_hot": True}
    for scale, valid in (("band", [False, True]), ("iqr", [True, True])):
        leaf = scores.clone().requires_grad_()
        per_class = pauc_at_budget(leaf, positive.long(), tau_scale=scale, reduction="none", **options)
        assert (~per_class.isnan()).tolist() == valid
        loss = pauc_at_budget(leaf, positive.long(), tau_scale=scale, **options)
        assert loss.isfinite()
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert gradient.isfinite().all()
        assert bool(gradient[:, 1].any())
        assert bool(gradient[:, 0].any()) == valid[0]
    module = PAUCAtBudgetLoss(2, beta=0.3, surrogate=surrogate, tau_scale="band", multi_hot=True, queue_size=0)
    with pytest.warns(UserWarning, match="class 0 is left out"):
        assert module(scores, positive.long()).isfinite()
    scores[row, 0] = math.nan
    assert pauc_at_budget(scores, positive.long(), tau_scale="band", **options).isnan()


def test_a_threshold_between_two_large_scores_counts_only_those_above() -> None:
    """The sum 1e6 + 0.3 * 0.0625 in float32 is 1e6, at which the lower row would be counted too."""
    scores = torch.tensor([1e6, 1e6 + 0.0625])
    assert float(scores[0] + (scores[1] - scores[0]) * 0.3) == 1e6
    metric = RecallAtQuantile(1, 0.7, quantile_interpolation="linear")
    metric.update(scores[:, None], torch.tensor([1, 1]))
    assert float(metric.compute()) == 0.5


# Soft targets


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("alpha", [-1.0, 0.25])
def test_soft_targets_of_sigmoid_focal(alpha: float, gamma: float) -> None:
    """Float32 against float64 with 1 - p_t and log p_t from sums of positive numbers."""
    x = torch.tensor([-40.0, -15.0, -7.3, -1.0, 0.0, 0.4, 3.0, 9.0, 15.0, 30.0])
    y = torch.tensor([1e-6, 1e-4, 0.01, 0.3, 0.5, 0.7, 0.99, 0.9999])
    x, y = x.repeat_interleave(y.numel()), y.repeat(x.numel())
    wide, p = x.double(), y.double()
    missed = torch.sigmoid(wide) * (1 - p) + torch.sigmoid(-wide) * p
    entropy = p * torch.log1p(torch.exp(-wide.abs())) + (1 - p) * torch.log1p(torch.exp(-wide.abs()))
    entropy = entropy + p * (-wide).clamp_min(0) + (1 - p) * wide.clamp_min(0)
    exact = missed**gamma * entropy * (1.0 if alpha < 0 else alpha * p + (1 - alpha) * (1 - p))
    found = sigmoid_focal(x, y, alpha, gamma, reduction="none").double()
    assert ((found - exact).abs() / exact).max() <= FLOAT32
    # Control: 1 - p_t from the logarithm of p_t, as for hard targets.
    if gamma == 2.0:
        log_p = (torch.sigmoid(x) * y + torch.sigmoid(-x) * (1 - y)).log()
        lost = (-torch.expm1(log_p)).double() ** gamma
        assert ((lost - missed**gamma).abs() / missed**gamma).max() > 1e-3


# Weights that the dtype of the scores cannot hold, or their sum

# Of scores in the first dtype: the dtype of the weights, and the largest of them.
WEIGHTS = [(torch.float32, torch.float32, 3e38), (torch.float64, torch.float32, 1e-30)]
WEIGHTS += [(torch.float32, torch.float64, size) for size in (3e306, math.exp(-200))]
# All but the loss of each query, which has no mean over queries.
WEIGHTED = [name for name, form in FORMS.items() if form.loss.takes("sample_weight") and name != "retrieval_none"]


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_count_by_their_ratios(name: str) -> None:
    """However large or small all of them are: as exact as with weights of order one. The control: no weights."""
    form, ramp = FORMS[name], torch.linspace(0.01, 1, 64, dtype=torch.float64)

    def outcome(dtype: torch.dtype, sample_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        leaf = normal(64, 3).to(dtype).requires_grad_()
        loss = form.call(num_classes=3)(**form.arguments(leaf, torch.arange(64) % 3), sample_weight=sample_weight)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    for dtype, of_weights, size in WEIGHTS:
        given = (size * ramp).to(of_weights)
        ratios = given.double() / size
        exact = outcome(torch.float64, ratios)
        assert exact[0] > 0
        assert_as_exact(outcome(dtype, given), outcome(dtype, ratios), exact)
    assert error(outcome(torch.float64, None)[1], exact[1]) > 1e-3


@pytest.mark.parametrize("name", [name for name in WEIGHTED if FORMS[name].is_first])
@on_ranks()
def test_weights_count_by_their_ratios_over_ranks(rank: int, name: str) -> None:
    """Each rank has other weights, which float32 cannot hold. The control: one rank has those of another size."""
    logits, targets, ramp = normal(66, 3).float(), torch.arange(66) % 3, torch.linspace(0.01, 1, 66).double()
    own, (form, found) = torch.arange(66).tensor_split(dist.get_world_size())[rank], (FORMS[name], [])
    for factor, local in ((1.0, True), (1e300, False), (math.exp(-200), False), (1000.0**rank, False)):
        part = slice(None) if local else own
        weight = (factor * ramp)[part]
        given = form.arguments(logits[part], targets[part], torch.arange(66)[part] % 4)
        loss = form.call(True, num_classes=3, gather_distributed=not local)(**given, sample_weight=weight)
        found.append(loss.detach())
    torch.testing.assert_close(found[1:3], found[:1] * 2, rtol=2e-6, atol=1e-7)
    assert not torch.allclose(found[3], found[0], rtol=1e-3)


def test_sums_and_elements_keep_the_unit_of_huge_weights() -> None:
    x, y = torch.zeros(2), torch.tensor([1.0, 0.5])
    one = sigmoid_focal(x, y, -1, 0.0, reduction="none")
    weight = torch.tensor([2.0**100, 2.0**99])
    assert torch.equal(sigmoid_focal(x, y, -1, 0.0, reduction="none", sample_weight=weight), one * weight)
    assert sigmoid_focal(x, y, -1, 0.0, reduction="sum", sample_weight=weight) == (one * weight).sum()
    assert SigmoidFocalLoss(-1, 0.0, reduction="sum")(x, y, sample_weight=weight) == (one * weight).sum()
