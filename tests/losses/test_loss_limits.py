"""Small temperatures against scikit-learn, gradients against finite differences, half precision, compilation."""

import functools
import itertools
import math

import numpy
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_curve
from torch.testing import assert_close

from fullrank.losses import (
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    pauc_at_budget,
    recall_at_quantile,
    sigmoid_focal,
    sigmoid_sums,
    smooth_ap,
    softmax_focal,
)


def _binary(num_rows=300, share=0.2, seed=0):
    """Scores that are a shuffled grid of step 0.01, so that no two are closer; positives a little higher."""
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(num_rows, generator=generator) < share).long()
    order = (torch.randn(num_rows, generator=generator) + 1.2 * targets).argsort().argsort()
    return 0.01 * order.double(), targets


# --- limits ----------------------------------------------------------------------------------------------------------

# A hundredth of the step between scores: the sigmoids are 0 and 1 to within exp(-100).
SMALL = 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_smooth_ap_tends_to_average_precision(seed):
    scores, targets = _binary(seed=seed)
    expected = average_precision_score(targets.numpy(), scores.numpy())
    assert_close(1 - smooth_ap(scores[:, None], targets, temperature=SMALL).item(), expected, rtol=1e-12, atol=0)
    # A control: at a temperature of the size of the scores it is something else.
    assert abs(1 - smooth_ap(scores[:, None], targets, temperature=1.0).item() - expected) > 1e-2


def test_smooth_ap_tends_to_average_precision_of_each_class():
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(200, 4, generator=generator, dtype=torch.float64).argsort(dim=0).double()
    targets = torch.randint(0, 4, (200,), generator=generator)
    values = smooth_ap(scores, targets, temperature=1e-2, reduction="none")
    expected = [average_precision_score((targets == c).numpy(), scores[:, c].numpy()) for c in range(4)]
    assert_close(1 - values, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("quantile", [0.005, 0.05, 0.3, 0.9])
def test_recall_tends_to_the_share_above_the_threshold(quantile):
    scores, targets = _binary()
    values = {}
    for label in (0, 1):  # the row at the threshold is a negative, then a positive that counts half
        at_threshold = int(numpy.ceil((1 - quantile) * 299 - 1e-9))
        labels = targets.clone()
        labels[(scores * 100).round() == at_threshold] = label
        positives = scores[labels == 1] * 100
        above = (positives.round() > at_threshold).sum() + 0.5 * (positives.round() == at_threshold).sum()
        values[label] = recall_at_quantile(scores[:, None], labels, quantile, temperature=SMALL).item()
        assert_close(1 - values[label], (above / len(positives)).item(), rtol=0, atol=1e-6)  # `above` is float32
    assert values[0] != values[1]


def _exact_partial_area(scores, targets, alpha, beta):
    fpr, tpr, _ = roc_curve(targets.numpy(), scores.numpy(), drop_intermediate=False)
    grid = numpy.unique(numpy.concatenate([fpr[(fpr > alpha) & (fpr < beta)], [alpha, beta]]))
    # Without ties the curve is a staircase: on each piece of the grid the higher of two equal rates counts.
    heights = [tpr[fpr <= (left + right) / 2].max() for left, right in itertools.pairwise(grid)]
    return float(numpy.diff(grid) @ heights) / (beta - alpha)


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.1), (0.0, 1.0), (0.1, 0.4)])
def test_trapezoid_tends_to_the_partial_area(alpha, beta):
    scores, targets = _binary(1500, seed=3)
    value = pauc_at_budget(scores[:, None], targets, alpha, beta, surrogate="trapezoid", n_knots=101, temperature=1e-5)
    expected = _exact_partial_area(scores, targets, alpha, beta)
    # A knot every hundredth of the band, of a monotone curve from 0 to 1.
    assert abs(1 - value.item() - expected) < 1e-2
    assert abs(1 - value.item() - _exact_partial_area(scores, targets, alpha, beta / 2 + alpha / 2)) > 1e-2


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.1), (0.0, 1.0), (0.1, 0.4)])
def test_pairwise_tends_to_the_partial_area(alpha, beta):
    scores, targets = _binary(1500, seed=3)
    value = pauc_at_budget(scores[:, None], targets, alpha, beta, surrogate="pairwise", temperature=1e-5)
    in_band = (beta - alpha) * (targets == 0).sum().item()
    # One negative more or less at each edge of the band.
    assert abs(1 - value.item() - _exact_partial_area(scores, targets, alpha, beta)) < 2 / in_band


# --- gradients -------------------------------------------------------------------------------------------------------


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradcheck_smooth_ap(device):
    logits = _normal(12, 3).to(device).requires_grad_()
    targets = (torch.arange(12) % 4).masked_fill(torch.arange(12) % 4 == 3, -100).to(device)
    weight = torch.linspace(0, 2, 12, dtype=torch.float64).to(device)
    function = functools.partial(smooth_ap, temperature=0.5, sample_weight=weight, reduction="none")
    assert torch.autograd.gradcheck(lambda x: function(x, targets), (logits,))


@pytest.mark.parametrize("leading", [(), (2,)], ids=["plain", "classes"])
def test_gradcheck_sigmoid_sums(leading, device):
    shapes = (*leading, 4), (*leading, 5), (*leading, 5, 2)
    inputs = [_normal(*shape, seed=seed).to(device).requires_grad_() for seed, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(lambda q, k, w: sigmoid_sums(q, k, w, 0.5), inputs)


# The thresholds are constants to autograd and not to finite differences: the rows that set them, here at 1 ... 9 and
# negatives, are left alone. The perturbation of 1e-6 moves no row past another.
FIXED = torch.arange(1.0, 10.0, dtype=torch.float64)


def _check_free_rows(loss, free, labels):
    targets = torch.cat([torch.zeros(len(FIXED), dtype=torch.int64), torch.tensor(labels)])
    free = torch.tensor(free, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(torch.cat([FIXED, x])[:, None], targets), (free,))
    (gradient,) = torch.autograd.grad(loss(torch.cat([FIXED, free])[:, None], targets), free)
    return gradient


def test_gradcheck_recall():
    # 14 rows, (1 - 0.5) 13 = 6.5: the seventh and eighth are at 4 and 5.
    loss = functools.partial(recall_at_quantile, quantile=0.5, temperature=0.7, quantile_interpolation="linear")
    loss = functools.partial(loss, threshold_gradient=False)  # with it the gradient is not the derivative of the value
    gradient = _check_free_rows(loss, [0.3, 2.2, 2.7, 6.6, 7.3], [1, 0, 1, 1, 1])
    assert gradient.ne(0).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("surrogate", ["trapezoid", "pairwise"])
@pytest.mark.parametrize("tau_scale", ["iqr", "band"])
def test_gradcheck_pauc(surrogate, tau_scale):
    # The free negative, at 4.5, is inside the band, whose edges are 3 and 9, and no quartile (4 and 7).
    loss = functools.partial(
        pauc_at_budget, beta=0.8, surrogate=surrogate, n_knots=2, tau_scale=tau_scale, temperature=0.3
    )
    loss = functools.partial(loss, threshold_gradient=False)  # with it the gradient is not the derivative of the value
    gradient = _check_free_rows(loss, [0.3, 4.5, 2.7, 6.6, 9.3], [1, 0, 1, 1, 1])
    assert gradient.ne(0).tolist() == [True, surrogate == "pairwise", True, True, True]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck_focal(reduction):
    logits, targets = _normal(4, 3, 2), torch.tensor([[0, 1], [2, -100], [1, 1], [0, 2]])
    logits.requires_grad_()
    options = {"reduction": reduction, "label_smoothing": 0.1, "alpha": [0.5, 1.0, 2.0]}
    assert torch.autograd.gradcheck(lambda x: softmax_focal(x, targets, **options), (logits,))
    soft = torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: sigmoid_focal(x, soft, reduction=reduction), (logits,))


# --- low precision ---------------------------------------------------------------------------------------------------


def _naive_smooth_ap(scores, positive):
    sigmoids = torch.sigmoid((scores[None] - scores[positive][:, None]) / 0.5)
    own = 0.5  # of the row itself
    return 1 - ((0.5 + sigmoids[:, positive].sum(dim=1)) / (1 - own + sigmoids.sum(dim=1))).mean()


def _naive_recall(scores, positive):
    threshold = scores.detach().sort().values[-int(0.1 * (len(scores) - 1)) - 1]
    shares = torch.softmax(-2 * torch.log(torch.cosh((scores.detach() - threshold) / 1.0)), dim=0)  # s'(2 z) by cosh z
    threshold = threshold + (shares * (scores - scores.detach())).sum()
    return 1 - torch.sigmoid((scores[positive] - threshold) / 0.5).mean()


def _naive_pairwise(scores, positive):
    negatives = scores[~positive]
    ordered = negatives.detach().sort().values
    last = len(ordered) - 1

    def level(q):
        return ordered[int(numpy.ceil((1 - q) * last - 1e-9))]

    inside = negatives[negatives >= level(0.5)]
    tau = 0.3 * (level(0.25) - level(0.75))
    return 1 - torch.sigmoid((scores[positive][:, None] - inside) / tau).mean()


LOW_PRECISION = {
    "smooth_ap": (functools.partial(smooth_ap, temperature=0.5), _naive_smooth_ap),
    "recall": (functools.partial(recall_at_quantile, quantile=0.1, temperature=0.5), _naive_recall),
    "pauc": (functools.partial(pauc_at_budget, beta=0.5, surrogate="pairwise", temperature=0.3), _naive_pairwise),
}


@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centered", "far"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", LOW_PRECISION)
def test_low_precision_error_is_within_that_of_the_naive_formula_in_float32(name, dtype, offset, device):
    ours, naive = LOW_PRECISION[name]
    scores, targets = _binary(252)
    # bfloat16 has steps of 4 at 1000 and float16 of 0.5: spread the scores, so that not all are ties.
    spread = 16 if offset and dtype != torch.float32 else 1
    rounded = (scores * spread + offset).to(device, dtype)
    targets = targets.to(device)
    results = {}
    for kind, function, inputs in [
        ("true", naive, rounded.double()),
        ("naive", naive, rounded.float()),
        ("ours", lambda x, _: ours(x[:, None], targets), rounded.clone()),
    ]:
        inputs.requires_grad_()
        loss = function(inputs, targets == 1)
        (gradient,) = torch.autograd.grad(loss, inputs)
        results[kind] = loss.item(), gradient
    assert results["ours"][1].dtype == dtype
    # Sums of 252 float32 terms. The gradient is rounded once to the dtype of the input: half an ulp.
    scale = results["true"][1].abs().max()
    for place, tolerance in [(0, 1e-6), (1, 2e-6 * scale + torch.finfo(dtype).eps * scale)]:
        true, other, mine = (torch.as_tensor(results[kind][place]).double() for kind in ("true", "naive", "ours"))
        assert (mine - true).abs().max() <= (other - true).abs().max() + tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rank_sums_of_half_precision_do_not_saturate(dtype, device):
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
def test_half_precision_through_module_and_queue(dtype, device):
    for loss in (RecallAtQuantileLoss(1, 0.5, temperature=0.5), PAUCAtBudgetLoss(1, beta=0.5, surrogate="trapezoid")):
        for seed in range(2):
            scores, targets = _binary(40, share=0.5, seed=seed)
            logits = scores[:, None].to(device, dtype).requires_grad_()
            value = loss(logits, targets.to(device))
            value.backward()
            assert bool(value.isfinite())
            assert logits.grad.dtype == dtype
            assert bool(logits.grad.any())
        assert loss.queue.rows().logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_focal_in_half_precision(dtype, device):
    logits = (4 * _normal(64, 5)).to(device, dtype).requires_grad_()
    targets = (torch.arange(64) % 5).to(device)
    wide = logits.detach().double().requires_grad_()
    for inputs in (logits, wide):
        softmax_focal(inputs, targets).backward()
    # One rounding to the dtype of the input, and float32 before it.
    eps = torch.finfo(dtype).eps
    assert logits.grad.dtype == dtype
    assert_close(logits.grad.double(), wide.grad, rtol=eps, atol=1e-7)
    assert softmax_focal(logits, targets).dtype == torch.float32  # a sum over many elements overflows fp16


# --- compilation -----------------------------------------------------------------------------------------------------

WEIGHT = torch.linspace(0.1, 1, 24, dtype=torch.float64)
CLASSES = torch.arange(24) % 4 - 1
CLASSES[CLASSES < 0] = -100
COMPILED = {
    "smooth_ap": (smooth_ap, CLASSES, {"temperature": 0.3, "sample_weight": WEIGHT}),
    "recall_at_quantile": (recall_at_quantile, CLASSES, {"quantile": 0.3, "temperature": 0.3}),
    "pauc_trapezoid": (
        pauc_at_budget,
        CLASSES,
        {"beta": 0.4, "surrogate": "trapezoid", "n_knots": 3, "sample_weight": WEIGHT},
    ),
    "pauc_pairwise": (pauc_at_budget, CLASSES, {"beta": 0.4, "surrogate": "pairwise", "iid_mask": WEIGHT > 0.3}),
    "pauc_dro": (pauc_at_budget, CLASSES, {"sample_weight": WEIGHT, "iid_mask": WEIGHT > 0.3}),
    "softmax_focal": (softmax_focal, CLASSES, {"alpha": torch.tensor([0.5, 1.0, 2.0]), "label_smoothing": 0.1}),
    "sigmoid_focal": (sigmoid_focal, (CLASSES[:, None] == torch.arange(3)).double(), {"sample_weight": WEIGHT}),
}


def _loss_and_gradient(function, targets, options):
    logits = _normal(24, 3).requires_grad_()
    loss = function(logits, targets, **options)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_functional_compiles_without_graph_breaks(name):
    function, targets, options = COMPILED[name]
    # aot_eager traces what every backend is given, forward and backward, and runs it.
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(*(_loss_and_gradient(f, targets, options) for f in (compiled, function))):
        assert_close(ours, eager, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_sigmoid_sums_compiles_without_graph_breaks():
    inputs = [_normal(*shape).requires_grad_() for shape in ((4,), (5,), (5, 2))]
    compiled = torch.compile(sigmoid_sums, fullgraph=True, backend="aot_eager")
    values = [f(*inputs, 0.3) for f in (compiled, sigmoid_sums)]
    assert_close(*values, rtol=1e-12, atol=1e-14)
    assert_close(*(torch.autograd.grad(v.sum(), inputs) for v in values), rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_inductor_compiles_smooth_ap():
    function, targets, options = COMPILED["smooth_ap"]
    compiled = torch.compile(function, fullgraph=True)
    try:
        result = _loss_and_gradient(compiled, targets, options)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        pytest.skip(f"inductor cannot build here: {error}")
    for ours, eager in zip(result, _loss_and_gradient(function, targets, options)):
        assert_close(ours, eager, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("budget_basis", ["fpr", "population"])
@pytest.mark.parametrize("tau_scale", ["iqr", "band"])
@pytest.mark.parametrize("surrogate", ["trapezoid", "pairwise", "dro"])
def test_an_undefined_scale_does_not_reach_a_class_without_positives(surrogate, tau_scale, budget_basis):
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
