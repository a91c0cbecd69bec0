"""Small temperatures against scikit-learn, gradients against finite differences, half precision, and a training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from loss_cases import CLASSES, FUNCTIONS, IGNORED, normal
from sklearn.metrics import average_precision_score, roc_curve
from torch import Tensor
from torch.testing import assert_close

from fullrank.losses import (
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    hard_negative_cross_entropy,
    pauc_at_budget,
    recall_at_quantile,
    sigmoid_focal,
    sigmoid_sums,
    smooth_ap,
    softmax_focal,
)

# --- limits ----------------------------------------------------------------------------------------------------------

FORMS = {"binary": (1500, 1), "classes": (400, 4), "multi_hot": (300, 5), "multi_hot with ignored elements": (300, 5)}
SMALL = 0.01  # a hundredth of the step between scores: sigmoids are 0, 1/2 and 1 to within exp(-100)


def make_rows(form: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return scores, each column a permutation of whole numbers in which positives are a little higher, and targets.

    Of ignored elements, a third of all, most have high scores.
    """
    generator = torch.Generator().manual_seed(seed)
    count, columns = FORMS[form]
    share = torch.tensor([0.2, 0.05, 0.1, 0.4, 0.6][:columns])
    codes = torch.rand(count, columns, generator=generator) < share
    if form == "classes":
        codes = torch.nn.functional.one_hot(torch.randint(0, columns, (count,), generator=generator)) == 1
    noise = torch.randn(count, columns, generator=generator, dtype=torch.float64)
    scores = (noise + 1.2 * codes).argsort(dim=0).argsort(dim=0).double()
    targets = codes.long()
    if "ignored" in form:
        targets[torch.rand(count, columns, generator=generator) < 2 / 3 * scores / count] = IGNORED
    if form == "classes":
        return scores, targets.argmax(dim=1)
    return scores, targets[:, 0] if columns == 1 else targets


def average_precision(scores: numpy.ndarray, targets: numpy.ndarray) -> float:
    return float(average_precision_score(targets, scores))


def recall_above(quantile: float, scores: numpy.ndarray, targets: numpy.ndarray) -> float:
    """The share of positives above the threshold; one that is at it counts half, as its sigmoid does."""
    threshold = numpy.sort(scores)[math.ceil((1 - quantile) * (len(scores) - 1) - 1e-9)]
    return float(((scores > threshold) + 0.5 * (scores == threshold))[targets == 1].mean())


def partial_area(alpha: float, beta: float, scores: numpy.ndarray, targets: numpy.ndarray) -> float:
    """The area under the empirical ROC over the band, over its width.

    Without ties the curve is a staircase: on each piece of the grid the higher of two equal rates counts.
    """
    fpr, tpr, _ = roc_curve(targets, scores, drop_intermediate=False)
    edges = numpy.unique(numpy.concatenate([fpr[(fpr > alpha) & (fpr < beta)], [alpha, beta]]))
    heights = [tpr[fpr <= middle].max() for middle in (edges[1:] + edges[:-1]) / 2]
    return float(numpy.diff(edges) @ heights) / (beta - alpha)


class Limit(NamedTuple):
    """A loss close to its metric, and by how much it may be off: negatives at the edges of a band, gaps of knots."""

    function: Callable[..., Tensor]
    metric: Callable[[numpy.ndarray, numpy.ndarray], float]
    negatives: float = 0.0
    knots: float = 1e-12


LIMITS = {"smooth_ap": Limit(functools.partial(smooth_ap, temperature=SMALL), average_precision)}
for _quantile in (0.005, 0.05, 0.3, 0.9):
    LIMITS[f"recall {_quantile}"] = Limit(
        functools.partial(recall_at_quantile, quantile=_quantile, temperature=SMALL),
        functools.partial(recall_above, _quantile),
    )
for _alpha, _beta in ((0.0, 0.1), (0.0, 1.0), (0.1, 0.4)):
    # The temperature of partial AUC is in units of the spread of the negatives. One negative more or less may be at
    # each edge of the band; a trapezoid has a knot every hundredth of it, of a monotone curve from 0 to 1.
    _band: dict[str, Any] = {"alpha": _alpha, "beta": _beta, "temperature": 1e-5}
    _pairs = functools.partial(pauc_at_budget, surrogate="pairwise", **_band)
    _knots = functools.partial(pauc_at_budget, surrogate="trapezoid", n_knots=101, **_band)
    _metric, _negatives = functools.partial(partial_area, _alpha, _beta), 2 / (_beta - _alpha)
    LIMITS[f"pauc pairwise {_alpha}-{_beta}"] = Limit(_pairs, _metric, _negatives)
    LIMITS[f"pauc trapezoid {_alpha}-{_beta}"] = Limit(_knots, _metric, _negatives, 1e-2)


def macro(name: str, scores: Tensor, targets: Tensor, *, every_element: bool = False) -> tuple[float, float]:
    """Return the mean over the classes of the metric, and by how much the loss may be off."""
    if targets.ndim == 1:
        codes = targets[:, None] if scores.shape[1] == 1 else torch.nn.functional.one_hot(targets, scores.shape[1])
    else:
        codes = targets
    values, fewest = [], math.inf
    for column, code in zip(scores.t(), codes.t()):
        kept = torch.ones_like(code, dtype=torch.bool) if every_element else code != IGNORED
        values.append(LIMITS[name].metric(column[kept].numpy(), (code[kept] == 1).long().numpy()))
        fewest = min(fewest, int((code[kept] != 1).sum()))
    return sum(values) / len(values), LIMITS[name].negatives / fewest + LIMITS[name].knots


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LIMITS)
def test_small_temperatures_give_the_macro_metric(name: str, form: str) -> None:
    for seed in range(2):
        scores, targets = make_rows(form, seed)
        expected, limit = macro(name, scores, targets)
        value = 1 - LIMITS[name].function(scores, targets, multi_hot="multi_hot" in form).item()
        assert abs(value - expected) <= limit
    # The controls: temperatures of the size of the scores, ignored elements as negatives, another band.
    if "pauc" not in name:
        wide = LIMITS[name].function(scores, targets, multi_hot="multi_hot" in form, temperature=300.0)
        assert abs(1 - wide.item() - expected) > 1e-2
        if "ignored" in form and name != "recall 0.9":  # which nearly all positives are above
            assert abs(macro(name, scores, targets, every_element=True)[0] - expected) > 1e-2
    elif name.endswith("0.1-0.4") and form == "binary":
        assert abs(macro(name.replace("0.1-0.4", "0.0-1.0"), scores, targets)[0] - value) > 2 * limit


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(smooth_ap, temperature=0.5),
        functools.partial(hard_negative_cross_entropy, share=0.3),
        functools.partial(softmax_focal, label_smoothing=0.1, alpha=[0.5, 1.0, 2.0]),
    ],
    ids=["smooth_ap", "hard_negative", "softmax_focal"],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_of_classes(loss: Callable[..., Tensor], reduction: str) -> None:
    logits = normal(12, 3).requires_grad_()
    targets = (torch.arange(12) % 4).masked_fill(torch.arange(12) % 4 == 3, IGNORED)
    weight = torch.linspace(0, 2, 12, dtype=torch.float64)
    call = functools.partial(loss, sample_weight=weight, reduction=reduction)
    assert torch.autograd.gradcheck(lambda x: call(x, targets), (logits,))


@pytest.mark.parametrize("leading", [(), (2,)], ids=["plain", "classes"])
def test_gradcheck_of_sums_and_soft_targets(leading: tuple[int, ...], device: torch.device) -> None:
    shapes = (*leading, 4), (*leading, 5), (*leading, 5, 2)
    inputs = [normal(*shape, seed=seed).to(device).requires_grad_() for seed, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(lambda q, k, w: sigmoid_sums(q, k, w, 0.5), inputs)
    soft = torch.rand(*shapes[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    for reduction in ("mean", "sum", "none"):
        call = functools.partial(sigmoid_focal, reduction=reduction)
        assert torch.autograd.gradcheck(lambda x, f=call: f(x, soft), inputs[1:2])


# The thresholds are constants to autograd and not to finite differences: the rows that set them, here at 1 ... 9 and
# negatives, are left alone. The perturbation of 1e-6 moves no row past another. With threshold_gradient the gradient is
# not the derivative of the value.
FIXED = torch.arange(1.0, 10.0, dtype=torch.float64)
# 14 rows, (1 - 0.5) 13 = 6.5: the seventh and eighth are at 4 and 5.
BY_THRESHOLD: dict[str, tuple[Callable[..., Tensor], list[float], list[bool]]] = {
    "recall": (
        functools.partial(recall_at_quantile, quantile=0.5, temperature=0.7, quantile_interpolation="linear"),
        [0.3, 2.2, 2.7, 6.6, 7.3],
        [True, False, True, True, True],
    )
}
for _surrogate in ("trapezoid", "pairwise"):
    for _scale in ("iqr", "band"):
        # The free negative, at 4.5, is inside the band, whose edges are 3 and 9, and no quartile (4 and 7).
        _options: dict[str, Any] = {"n_knots": 2, "tau_scale": _scale, "temperature": 0.3, "beta": 0.8}
        BY_THRESHOLD[f"{_surrogate}, {_scale}"] = (
            functools.partial(pauc_at_budget, surrogate=_surrogate, **_options),
            [0.3, 4.5, 2.7, 6.6, 9.3],
            [True, _surrogate == "pairwise", True, True, True],
        )


@pytest.mark.parametrize("name", BY_THRESHOLD)
def test_gradcheck_of_rows_that_set_no_threshold(name: str) -> None:
    loss, scores, moves = BY_THRESHOLD[name]
    detached = {} if "pairwise" in name else {"threshold_gradient": False}  # its band is detached in any case
    targets = torch.cat([torch.zeros(len(FIXED), dtype=torch.int64), torch.tensor([1, 0, 1, 1, 1])])
    free = torch.tensor(scores, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return loss(torch.cat([FIXED, x])[:, None], targets, **detached)

    assert torch.autograd.gradcheck(call, (free,))
    assert torch.autograd.grad(call(free), free)[0].ne(0).tolist() == moves


# --- low precision ---------------------------------------------------------------------------------------------------


def binary(num_rows: int, share: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return scores that are a shuffled grid of step 0.01, positives a little higher, and targets."""
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(num_rows, generator=generator) < share).long()
    order = (torch.randn(num_rows, generator=generator) + 1.2 * targets).argsort().argsort()
    return 0.01 * order.double(), targets


BY_FLOAT32 = FUNCTIONS | {"queries": lambda x: smooth_ap(x[:, :1], CLASSES == 0, indexes=torch.arange(60) % 7)}
del BY_FLOAT32["sigmoid_sums"]  # returns the dtype of its inputs


@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BY_FLOAT32)
def test_half_precision_is_that_of_float32_rounded_once(name: str, dtype: torch.dtype, offset: float) -> None:
    # bfloat16 has steps of 4 at 1000: spread the scores, so that not all are ties.
    half = ((32 if offset else 2) * normal(60, 3) + offset).to(dtype).requires_grad_()
    single = half.detach().float().requires_grad_()
    losses = [BY_FLOAT32[name](x) for x in (half, single)]
    assert losses[0].dtype == torch.float32
    assert torch.equal(losses[0], losses[1])
    gradients = [torch.autograd.grad(loss, x)[0] for loss, x in zip(losses, (half, single))]
    assert gradients[0].dtype == dtype
    assert torch.equal(gradients[0], gradients[1].to(dtype))
    # And float32 is close to float64: roundings of 6e-8 over temperatures of 0.1.
    wide = half.detach().double().requires_grad_()
    exact = BY_FLOAT32[name](wide)
    assert_close(losses[1].double(), exact, rtol=5e-6, atol=0)
    truth = torch.autograd.grad(exact, wide)[0]
    assert (gradients[1].double() - truth).norm() <= 5e-6 * truth.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rank_sums_of_half_precision_do_not_saturate(dtype: torch.dtype, device: torch.device) -> None:
    # One positive below 4095 negatives: its precision is 1/4096. A sum in bfloat16 stops at 256.
    scores = torch.full((4096, 1), 1.0, dtype=dtype, device=device)
    targets = torch.zeros(4096, dtype=torch.int64, device=device)
    scores[7], targets[7] = -1.0, 1
    loss = smooth_ap(scores, targets, temperature=0.01)
    assert loss.dtype == torch.float32
    assert_close(1 - loss.item(), 1 / 4096, rtol=1e-3, atol=0)  # 1 - (1 - 1/4096) in float32
    weights = torch.ones(4096, 1, dtype=dtype, device=device)
    assert sigmoid_sums(scores[7], scores[:, 0], weights, 0.01).float().item() == pytest.approx(4096, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_through_module_and_queue(dtype: torch.dtype, device: torch.device) -> None:
    for loss in (RecallAtQuantileLoss(1, 0.5, temperature=0.5), PAUCAtBudgetLoss(1, beta=0.5, surrogate="trapezoid")):
        for seed in range(2):
            scores, targets = binary(40, share=0.5, seed=seed)
            logits = scores[:, None].to(device, dtype).requires_grad_()
            value = loss(logits, targets.to(device))
            value.backward()
            assert bool(value.isfinite())
            assert logits.grad.dtype == dtype
            assert bool(logits.grad.any())
        assert loss.queue.rows().logits.dtype == torch.float32


@pytest.mark.parametrize("budget_basis", ["fpr", "population"])
@pytest.mark.parametrize("tau_scale", ["iqr", "band"])
@pytest.mark.parametrize("surrogate", ["trapezoid", "pairwise", "dro"])
def test_an_undefined_scale_does_not_reach_a_class_without_positives(
    surrogate: str, tau_scale: str, budget_basis: str
) -> None:
    """Between two negatives at infinity the scale is inf - inf. With a positive that makes the loss NaN."""
    scores = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    scores[:16] = math.inf
    loss = PAUCAtBudgetLoss(1, beta=0.3, surrogate=surrogate, tau_scale=tau_scale, budget_basis=budget_basis)
    for num_positive in (0, 1):
        targets = (torch.arange(20) >= 20 - num_positive).long()
        leaf = scores.clone().requires_grad_()
        value = loss(leaf, targets)
        value.backward()
        if num_positive == 0:
            assert value.item() == 0.0
            assert not leaf.grad.any()
        elif surrogate != "dro":
            assert value.isnan()  # the control
