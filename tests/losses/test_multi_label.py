"""Multi-hot targets through every pooled loss: scikit-learn's macro averages, ignored elements, ranks, a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gradient_cases
import numpy
import pytest
import torch
from gradient_cases import Case
from loss_cases import IGNORED
from sklearn.datasets import make_multilabel_classification
from sklearn.metrics import average_precision_score, roc_curve
from torch import Tensor
from torch.testing import assert_close
from workers import WorkerPool

from fullrank import losses
from fullrank.losses import smooth_ap

NUM_CLASSES = 5
SMALL = 0.01  # a hundredth of the step between scores: sigmoids are 0, 1/2 and 1 to within exp(-100)


class MultiLabel(NamedTuple):
    """A loss; with ``options`` it is close to its metric, ``training`` holds the options for learning."""

    module: type[losses.RankingLoss]
    functional: Callable[..., Any]
    options: Mapping[str, Any]
    training: Mapping[str, Any]


_BAND = {"alpha": 0.0, "beta": 0.4}
LOSSES = {
    "smooth_ap": MultiLabel(losses.SmoothAPLoss, losses.smooth_ap, {"temperature": SMALL}, {"temperature": 0.3}),
    "recall": MultiLabel(
        losses.RecallAtQuantileLoss,
        losses.recall_at_quantile,
        {"temperature": SMALL, "quantile": 0.1},
        {"temperature": 0.3, "quantile": 0.3},
    ),
    # The temperature of partial AUC is in units of the spread of the negatives, here some hundred.
    "pauc_pairwise": MultiLabel(
        losses.PAUCAtBudgetLoss,
        losses.pauc_at_budget,
        {"temperature": 1e-5, "surrogate": "pairwise", **_BAND},
        {"temperature": 0.3, "surrogate": "pairwise", **_BAND},
    ),
    "pauc_trapezoid": MultiLabel(
        losses.PAUCAtBudgetLoss,
        losses.pauc_at_budget,
        {"temperature": 1e-5, "surrogate": "trapezoid", "n_knots": 101, **_BAND},
        {"temperature": 0.3, "surrogate": "trapezoid", "n_knots": 5, **_BAND},
    ),
}


def make_rows(seed: int, ignored: bool) -> tuple[Tensor, Tensor]:
    """Return scores (300, 5), each column a permutation of whole numbers, and multi-hot targets of many shares.

    With ``ignored`` a third of the elements is, most of them with high scores.
    """
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.6])
    targets = (torch.rand(300, NUM_CLASSES, generator=generator) < share).long()
    noise = torch.randn(300, NUM_CLASSES, generator=generator, dtype=torch.float64)
    scores = (noise + 1.2 * targets).argsort(dim=0).argsort(dim=0).double()
    if ignored:
        chance = 2 / 3 * scores / 300
        targets[torch.rand(300, NUM_CLASSES, generator=generator) < chance] = IGNORED
    return scores, targets


def values_over_ranks(rank: int, name: str) -> tuple[float, float]:
    """Return the loss over two ranks with 100 and 200 rows, and that of this rank's rows alone."""
    scores, targets = make_rows(0, ignored=True)
    own = slice(0, 100) if rank == 0 else slice(100, None)
    loss = LOSSES[name]
    values = []
    for gather in (True, False):
        module = loss.module(NUM_CLASSES, multi_hot=True, queue_size=0, gather_distributed=gather, **loss.options)
        values.append(module(scores[own], targets[own]).item())
    return values[0], values[1]


over_losses = pytest.mark.parametrize("name", LOSSES)


def _average_precision(scores: numpy.ndarray, targets: numpy.ndarray) -> float:
    return float(average_precision_score(targets, scores))


def _recall(scores: numpy.ndarray, targets: numpy.ndarray) -> float:
    """The share of positives above the threshold; one that is at it counts half, as its sigmoid does."""
    threshold = numpy.quantile(scores, 1 - 0.1, method="higher")
    return float(((scores > threshold) + 0.5 * (scores == threshold))[targets == 1].mean())


def _partial_area(scores: numpy.ndarray, targets: numpy.ndarray) -> float:
    """The area under the empirical ROC up to a false-positive rate of 0.4, over 0.4."""
    fpr, tpr, _ = roc_curve(targets, scores, drop_intermediate=False)
    edges = numpy.append(numpy.unique(fpr[fpr < 0.4]), 0.4)
    # Without ties the curve is a staircase: on each piece the higher of two equal rates counts.
    heights = [tpr[fpr <= middle].max() for middle in (edges[1:] + edges[:-1]) / 2]
    return float(numpy.diff(edges) @ heights) / 0.4


# name: the metric of one class, and how far the surrogate is from it: 0.4 of some 270 negatives are in the band, and
# one of them more or less at its edge, by the rule of the quantile, is a hundredth at the most.
METRICS = {
    "smooth_ap": (_average_precision, 1e-12),
    "recall": (_recall, 1e-12),
    "pauc_pairwise": (_partial_area, 1e-2),
    "pauc_trapezoid": (_partial_area, 1e-2),
}


def _macro(name: str, scores: Tensor, targets: Tensor, *, every_element: bool = False) -> float:
    """Return the mean over the classes of the metric of the elements that are not ignored."""
    values = []
    for column, codes in zip(scores.t(), targets.t()):
        kept = torch.ones_like(codes, dtype=torch.bool) if every_element else codes != IGNORED
        values.append(METRICS[name][0](column[kept].numpy(), (codes[kept] == 1).long().numpy()))
    return sum(values) / len(values)


@pytest.mark.parametrize("ignored", [False, True], ids=["complete", "ignored elements"])
@over_losses
def test_small_temperatures_give_the_macro_metric(name: str, ignored: bool) -> None:
    loss = LOSSES[name]
    limit = METRICS[name][1]
    for seed in range(2):
        scores, targets = make_rows(seed, ignored)
        expected = _macro(name, scores, targets)
        functional = loss.functional(scores, targets, multi_hot=True, **loss.options)
        assert_close(1 - functional.item(), expected, rtol=0, atol=limit)
        module = loss.module(scores.shape[1], multi_hot=True, queue_size=0, **loss.options)
        assert torch.equal(module(scores, targets), functional)
        if ignored:  # the control: ignored elements as negatives
            assert abs(_macro(name, scores, targets, every_element=True) - expected) > 2 * limit


def test_macro_average_precision_is_that_of_scikit_learn() -> None:
    """Also where no element is ignored and scikit-learn takes the average itself; its micro average is another."""
    scores, targets = make_rows(0, ignored=False)
    value = 1 - smooth_ap(scores, targets, SMALL, multi_hot=True).item()
    macro, micro = (average_precision_score(targets.numpy(), scores.numpy(), average=how) for how in ("macro", "micro"))
    assert_close(value, macro, rtol=1e-12, atol=0)
    assert abs(value - micro) > 1e-2


@over_losses
def test_a_label_that_nobody_has_is_left_out(name: str) -> None:
    loss = LOSSES[name]
    scores, targets = make_rows(0, ignored=True)
    targets[:, 2] = targets[:, 2].clamp_max(0)
    value, per_class = (
        loss.functional(scores, targets, multi_hot=True, reduction=how, **loss.options) for how in ("mean", "none")
    )
    assert per_class.isnan().tolist() == [False, False, True, False, False]
    kept = torch.tensor([0, 1, 3, 4])
    assert_close(1 - value.item(), _macro(name, scores[:, kept], targets[:, kept]), rtol=0, atol=METRICS[name][1])
    assert abs(value.item() - per_class.nansum().item() / 5) > 1e-2  # the control: the mean over all labels


@over_losses
def test_two_ranks_give_the_macro_metric_of_all_rows(pool_of_two: WorkerPool, name: str) -> None:
    scores, targets = make_rows(0, ignored=True)
    expected = _macro(name, scores, targets)
    for value, alone in pool_of_two(values_over_ranks, name):
        assert_close(1 - value, expected, rtol=0, atol=METRICS[name][1])
        assert abs(1 - alone - expected) > METRICS[name][1]  # the control: this rank's rows alone


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("loss", ["recall", "pauc_pairwise"])
def test_gradient_equals_one_process(pool_of_two: WorkerPool, loss: str, dtype: str) -> None:
    """As tests/distributed/test_promise.py has it for the other two losses."""
    limit = {"float64": 1e-12, "float32": 2e-6}[dtype]
    case = Case(loss, dtype=dtype, num_classes=3, multi_hot=True, weighted=True)
    assert max(max(errors) for errors in pool_of_two(gradient_cases.worst_error, 2, case)) <= limit


# --- a training ------------------------------------------------------------------------------------------------------


def _dataset() -> tuple[Tensor, Tensor]:
    features, targets = make_multilabel_classification(
        n_samples=400, n_features=20, n_classes=5, n_labels=2, random_state=0
    )
    features = torch.tensor(features, dtype=torch.float64)
    return (features - features.mean(dim=0)) / features.std(dim=0), torch.tensor(targets)


def _gain(name: str, features: Tensor, targets: Tensor, given: Tensor) -> float:
    """Return by how much the macro AP of the last 200 rows rises in 40 steps on ``given`` targets of the first 200."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.1 * torch.randn(features.shape[1], 5, generator=generator, dtype=torch.float64)).requires_grad_()
    loss = LOSSES[name].module(5, queue_size=200, multi_hot=True, **LOSSES[name].training)
    optimizer = torch.optim.Adam([weight], lr=0.03)
    values = []
    for step in range(41):
        if step in (0, 40):
            scores = (features[200:] @ weight).detach()
            values.append(average_precision_score(targets[200:].numpy(), scores.numpy(), average="macro"))
        batch = torch.randint(0, 200, (50,), generator=generator)
        optimizer.zero_grad()
        loss(features[batch] @ weight, given[batch]).backward()
        optimizer.step()
    return float(values[1] - values[0])


@pytest.mark.slow
@over_losses
def test_training_raises_the_macro_average_precision(name: str) -> None:
    """On rows that it has not seen. The control learns the targets of other rows, and it does not rise."""
    features, targets = _dataset()
    wrong = targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(1))]
    gain, of_control = (_gain(name, features, targets, given) for given in (targets, wrong))
    assert gain > 0.15
    assert of_control < gain / 3
