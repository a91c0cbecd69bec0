"""Cross-entropy over hard negatives: torch's over all, ties, exact shares, degenerate classes, infinities."""

from __future__ import annotations

import math

import loss_cases as cases
import pytest
import torch
import torch.nn.functional as F
from loss_cases import INPUTS
from torch import Tensor
from torch.testing import assert_close

from fullrank.losses import hard_negative_cross_entropy

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def with_gradient(logits: Tensor, targets: Tensor, share: float, **options: object) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient."""
    return cases.step(hard_negative_cross_entropy, logits, targets, share=share, **options)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("inputs", ["binary", "multi_hot"])
def test_all_negatives_are_the_binary_cross_entropy_of_torch(inputs: str, weighted: bool) -> None:
    case = INPUTS[inputs]
    rows = case.rows(weighted=weighted)
    codes = rows.targets if case.multi_hot else rows.targets[:, None]
    weight = (codes >= 0) * (rows.sample_weight[:, None] if weighted else torch.ones(1, 1, dtype=torch.float64))
    theirs = F.binary_cross_entropy_with_logits(rows.logits, (codes == 1).double(), weight, reduction="none")
    theirs = theirs.sum(dim=0) / weight.sum(dim=0)
    options = {"multi_hot": case.multi_hot, "reduction": "none", "sample_weight": rows.sample_weight}
    ours = hard_negative_cross_entropy(rows.logits, rows.targets, 1, **options)
    assert_close(ours, theirs, **EXACT)
    some = hard_negative_cross_entropy(rows.logits, rows.targets, 0.2, **options)
    assert bool(((some - theirs).abs() > 1e-3).all())


def test_only_positives_and_the_hardest_have_a_gradient() -> None:
    logits = torch.tensor([[3.0], [2.0], [2.0], [2.0], [1.0], [0.0], [-1.0], [0.5]], dtype=torch.float64)
    targets = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])
    loss, gradient = with_gradient(logits, targets, 0.2)  # k = 2 of 7, and the second ties with two more
    assert gradient[:, 0].ne(0).tolist() == [True, True, True, True, False, False, False, True]
    kept = torch.tensor([0, 1, 2, 3, 7])
    theirs = F.binary_cross_entropy_with_logits(logits[kept, 0], targets[kept].double())
    assert_close(loss, theirs, **EXACT)
    order = torch.tensor([4, 2, 7, 0, 6, 3, 5, 1])
    assert_close(with_gradient(logits[order], targets[order], 0.2), (loss, gradient[order]), **EXACT)
    first_two = F.binary_cross_entropy_with_logits(logits[[0, 1, 7], 0], targets[[0, 1, 7]].double())
    assert abs(loss - first_two) > 1e-2  # a control: ties broken by the order of the rows


@pytest.mark.parametrize(("count", "share", "k"), [(100, 0.07, 7), (100, 0.29, 29), (20, 0.05, 1), (21, 0.05, 2)])
@pytest.mark.parametrize("extra", [0, 300])
def test_the_number_of_negatives_is_that_of_the_decimal_share(count: int, share: float, k: int, extra: int) -> None:
    """0.07 * 100 is 7.000000000000001 in floating point; positives and ignored rows do not count."""
    assert math.ceil(0.07 * 100) == 8
    scores = torch.arange(count + 2 * extra, dtype=torch.float64)[:, None]
    targets = torch.zeros(count + 2 * extra, dtype=torch.int64)
    targets[count : count + extra], targets[count + extra :] = 1, -100
    gradient = with_gradient(scores, targets, share)[1]
    assert gradient[:count].ne(0).nonzero()[:, 0].tolist() == list(range(count - k, count))


def test_a_class_without_negatives_or_without_weight() -> None:
    logits = torch.tensor([[1.0, 2.0], [0.0, 3.0]], dtype=torch.float64, requires_grad=True)
    targets = torch.zeros(2, dtype=torch.int64)
    per_class = hard_negative_cross_entropy(logits, targets, 0.3, "none")
    assert_close(per_class[0], F.softplus(-logits[:, 0]).mean(), **EXACT)  # class 0 has positives alone
    assert_close(per_class[1], F.softplus(logits[1, 1]), **EXACT)  # class 1 negatives alone
    weight = torch.tensor([1.0, 0.0])
    per_class = hard_negative_cross_entropy(logits, targets, 0.3, "none", sample_weight=weight)
    assert per_class.isnan().tolist() == [False, True]  # the one hard negative of class 1 weighs nothing
    loss = hard_negative_cross_entropy(logits, targets, 0.3, sample_weight=weight)
    assert torch.autograd.grad(loss, logits)[0][:, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_infinite_scores(dtype: torch.dtype) -> None:
    """At the wrong end the loss is infinite and the slope that of a large score; test_loss_properties has the other."""
    scores = torch.randn(30, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = (torch.arange(30) % 5 == 0).long()
    for place, end in ((0, -math.inf), (1, math.inf)):
        found = [
            with_gradient(scores.index_fill(0, torch.tensor(place), value), targets, 0.3)
            for value in (end, math.copysign(1e4, end))
        ]
        assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-12)
        assert found[0][0].isinf()
    minus = scores.masked_fill(targets[:, None] == 0, -math.inf)
    loss, gradient = with_gradient(minus, targets, 0.3)  # all negatives tie
    expected = F.softplus(-scores[targets == 1]).sum() / 30
    assert_close(loss, expected, rtol=1e-6, atol=0)
    assert not gradient[targets == 0].any()
