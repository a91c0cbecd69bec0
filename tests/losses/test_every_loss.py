"""What holds for every loss, whatever its formula: ignored rows, NaN, nothing to average, half precision.

The pooled losses have more properties in common, in test_loss_properties.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import loss_cases as cases
import pytest
import torch
from loss_cases import CLASSES, FUNCTIONS, IGNORED, normal
from torch import Tensor
from torch.testing import assert_close

from fullrank import BCEWithLogitsLoss, CrossEntropyLoss, InfoNCELoss, NDCGLoss, SupConLoss
from fullrank.losses import causal_lm_loss, retrieval_smooth_ap, sigmoid_focal, sigmoid_sums, smooth_ap, softmax_focal

# As functions of rows (N, 4), of targets below 4, some of which may be ignored, and of the queries of the rows.
SUBJECTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "queries": lambda x, t, q: smooth_ap(x[:, 0], t.clamp_max(1), 0.3, indexes=q),
    "retrieval": lambda x, t, q: retrieval_smooth_ap(x, t, temperature=0.1),
    "sup_con": lambda x, t, q: SupConLoss()(x, t),
    "ndcg": lambda x, t, q: NDCGLoss(0.5)(x[:, 0], t, q),
    "softmax_focal": lambda x, t, q: softmax_focal(x, t, [0.5, 1.0, 2.0, 3.0], reduction="mean_weighted"),
    "softmax_focal foreground": lambda x, t, q: softmax_focal(x, t, reduction="mean_positive"),
    "cross_entropy": lambda x, t, q: CrossEntropyLoss()(x, t),
    "cross_entropy smoothed": lambda x, t, q: CrossEntropyLoss(label_smoothing=0.1)(x, t),
    "causal_lm": lambda x, t, q: causal_lm_loss(x[None], t[None], shift=False),
}
over_subjects = pytest.mark.parametrize("name", SUBJECTS)


def make_rows(count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, targets of which a fifth is ignored, and queries."""
    targets = torch.arange(count) * 7 % 4
    return normal(count, 4), targets.masked_fill(torch.arange(count) % 5 == 2, IGNORED), torch.arange(count) % 3


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@over_subjects
def test_ignored_rows_are_removed_rows_whatever_they_hold(name: str, poison: float) -> None:
    x, targets, queries = make_rows()
    kept = targets != IGNORED
    loss, gradient = cases.step(SUBJECTS[name], x.masked_fill(~kept[:, None], poison), targets, q=queries)
    expected, slopes = cases.step(SUBJECTS[name], x[kept], targets[kept], q=queries[kept])
    assert_close(loss, expected, rtol=1e-12, atol=1e-14)
    assert_close(gradient[kept], slopes, rtol=1e-12, atol=1e-14)
    assert bool(slopes.any())
    assert not gradient[~kept].any()


@over_subjects
def test_a_nan_that_counts_is_not_hidden(name: str) -> None:
    x, targets, queries = make_rows()
    x[int((targets == 1).nonzero()[3])] = math.nan
    assert SUBJECTS[name](x, targets, queries).isnan()
    if name == "retrieval":  # nor where no query is valid
        assert retrieval_smooth_ap(x[targets == 1], targets[targets == 1]).isnan()


NO_CLASS, FIRST, ZEROS = torch.full((6,), IGNORED), torch.zeros(6, dtype=torch.int64), torch.zeros(6)
# As functions of rows (6, 4), of which nothing counts.
NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"{name}, ignored": lambda x, f=f: f(x, NO_CLASS, FIRST) for name, f in SUBJECTS.items()},
    **{f"{name}, no rows": lambda x, f=f: f(x[:0], NO_CLASS[:0], FIRST[:0]) for name, f in SUBJECTS.items()},
    "queries, no positives": lambda x: smooth_ap(x[:, 0], FIRST, indexes=torch.arange(6) % 4),
    "queries, no negatives": lambda x: smooth_ap(x[:, 0], FIRST + 1, indexes=torch.arange(6) % 4),
    "retrieval, one row": lambda x: retrieval_smooth_ap(x[:1], FIRST[:1]),
    "retrieval, one label": lambda x: retrieval_smooth_ap(x, FIRST),
    "retrieval, each its own label": lambda x: retrieval_smooth_ap(x, torch.arange(6)),
    "softmax_focal, no class of weight": lambda x: softmax_focal(x, FIRST, [0.0, 1, 1, 1], reduction="mean_weighted"),
    "softmax_focal, no weight": lambda x: softmax_focal(x, FIRST, reduction="mean_weighted", sample_weight=ZEROS),
    "sigmoid_focal, no class of weight": lambda x: sigmoid_focal(x, torch.ones(6, 4), 0.0, reduction="mean_weighted"),
    "sigmoid_focal, no weight": lambda x: sigmoid_focal(x, x * 0 > 0, reduction="mean_weighted", sample_weight=ZEROS),
    "sigmoid_focal, no rows": lambda x: sigmoid_focal(x[:0], torch.zeros(0, 4)),
    "cross_entropy, no class of weight": lambda x: CrossEntropyLoss(torch.tensor([0.0, 1, 1, 1]))(x, FIRST),
    "cross_entropy, no probabilities": lambda x: CrossEntropyLoss()(x[:0], torch.zeros(0, 4)),
    "binary_cross_entropy, no rows": lambda x: BCEWithLogitsLoss()(x[:0], torch.zeros(0, 4)),
    "info_nce, no pair": lambda x: InfoNCELoss(symmetric=True)(x[:0], x[:0]),
    "info_nce, one pair": lambda x: InfoNCELoss(symmetric=True)(x[:1], x[:1]),
    "sup_con, one row": lambda x: SupConLoss()(x[:1], FIRST[:1]),
    "ndcg, no relevance": lambda x: NDCGLoss()(x[:, 0], FIRST),
    "causal_lm, the first token alone": lambda x: causal_lm_loss(x[:, None], FIRST[:, None]),
    "causal_lm, no token of 0": lambda x: causal_lm_loss(x, NO_CLASS, num_items=0),
    "causal_lm, no token of 3": lambda x: causal_lm_loss(x, NO_CLASS, num_items=3),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_average_gives_zero_and_zero_gradients(name: str) -> None:
    """Where torch gives NaN. Nothing divides 0 by 0 on the way."""
    x = normal(6, 4).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        value = NOTHING[name](x)
        (gradient,) = torch.autograd.grad(value, x)
    assert value.item() == pytest.approx(0.0, abs=1e-15)
    assert gradient.abs().max() <= 1e-15


BY_FLOAT32 = FUNCTIONS | {
    "queries": lambda x: smooth_ap(x[:, :1], CLASSES == 0, indexes=torch.arange(60) % 7),
    "info_nce": lambda x: InfoNCELoss(symmetric=True)(x, x.detach().flip(0)),
    "sup_con": lambda x: SupConLoss()(x, CLASSES),
    "ndcg": lambda x: NDCGLoss()(x[:, 0], CLASSES),
    "cross_entropy": lambda x: CrossEntropyLoss()(x, CLASSES),
    "binary_cross_entropy": lambda x: BCEWithLogitsLoss()(x[:, 0], CLASSES == 0),
}
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
