"""CrossEntropyLoss and BCEWithLogitsLoss: those of torch, and where they differ on purpose."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from loss_cases import IGNORED, normal
from torch import Tensor, nn
from torch.testing import assert_close

from fullrank import BCEWithLogitsLoss, CrossEntropyLoss

SHAPES = [(37, 5), (6, 3, 4), (4, 3, 2, 3), (301, 11)]
REDUCTIONS = ["mean", "sum", "none"]


def classes(shape: tuple[int, ...], ignored: int = IGNORED) -> Tensor:
    """Return class indices for logits of ``shape``, about a fifth of them ignored."""
    targets = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(1))
    return targets.masked_fill(normal(*targets.shape, seed=2) > 0.84, ignored)


def both(ours: nn.Module, theirs: nn.Module, logits: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return value and gradient of both losses."""
    found = []
    for loss in (ours, theirs):
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, targets)
        factors = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view(value.shape)
        (gradient,) = torch.autograd.grad((value * factors).sum(), leaf)
        found.append((value.detach(), gradient))
    return found


def assert_as_torch(ours: nn.Module, theirs: nn.Module, logits: Tensor, targets: Tensor) -> None:
    """Assert equal bits for sums and elements. A mean divides a sum once, which torch may do in other places."""
    found, expected = both(ours, theirs, logits, targets)
    eps = torch.finfo(logits.dtype).eps if ours.reduction == "mean" else 0.0
    for one, other in zip(found, expected):
        assert one.dtype == other.dtype
        # An element of the gradient is a difference of probabilities, which may cancel.
        assert_close(one, other, rtol=16 * eps, atol=2 * eps * float(other.abs().max()))


@pytest.mark.parametrize("kind", ["classes", "probabilities"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_is_that_of_torch(kind: str, weighted: bool, smoothing: float) -> None:
    for dtype, shape, reduction in itertools.product((torch.float32, torch.float64), SHAPES, REDUCTIONS):
        logits = 3 * normal(*shape).to(dtype)
        targets = classes(shape) if kind == "classes" else normal(*shape, seed=3).to(dtype).softmax(dim=1)
        weight = normal(shape[1], seed=4).to(dtype).abs() if weighted else None
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        assert_as_torch(CrossEntropyLoss(weight, **options), nn.CrossEntropyLoss(weight, **options), logits, targets)


@pytest.mark.parametrize("ignored", [IGNORED, -1, 0, 2, 255])
def test_cross_entropy_ignores_as_torch_does(ignored: int) -> None:
    logits, targets = normal(37, 5), classes((37, 5), ignored)
    for weight, reduction in itertools.product((None, normal(5, seed=4).abs()), REDUCTIONS):
        options: dict[str, Any] = {"ignore_index": ignored, "reduction": reduction}
        assert_as_torch(CrossEntropyLoss(weight, **options), nn.CrossEntropyLoss(weight, **options), logits, targets)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("weight", [None, "full", *(pytest.param(w, marks=pytest.mark.slow) for w in ("last", "one"))])
@pytest.mark.parametrize(
    "pos_weight", [None, "last", *(pytest.param(w, marks=pytest.mark.slow) for w in ("full", "one"))]
)
def test_binary_cross_entropy_is_that_of_torch(kind: str, weight: str | None, pos_weight: str | None) -> None:
    shapes = [(7,), (7, 1), (5, 3), (4, 3, 2)]
    for dtype, shape, reduction in itertools.product((torch.float32, torch.float64), shapes, REDUCTIONS):
        logits, targets = 3 * normal(*shape).to(dtype), normal(*shape, seed=3).to(dtype).sigmoid()
        targets = (targets > 0.6).to(dtype) if kind == "hard" else targets
        sizes = {"full": shape[1:], "last": shape[-1:], "one": ()}
        made = [None if one is None else normal(*sizes[one], seed=5).to(dtype).abs() for one in (weight, pos_weight)]
        options: dict[str, Any] = {"weight": made[0], "pos_weight": made[1], "reduction": reduction}
        assert_as_torch(BCEWithLogitsLoss(**options), nn.BCEWithLogitsLoss(**options), logits, targets)


def test_controls_other_means_are_seen() -> None:
    logits, targets, weight = normal(37, 5), classes((37, 5)), normal(5, seed=4).abs()
    ours = CrossEntropyLoss(weight)(logits, targets)
    elements = CrossEntropyLoss(weight, reduction="none")(logits, targets)
    for wrong in (elements.mean(), elements.sum() / (targets >= 0).sum(), CrossEntropyLoss()(logits, targets)):
        assert abs(wrong - ours) > 1e-2
    with pytest.raises(AssertionError):
        assert_as_torch(CrossEntropyLoss(weight), nn.CrossEntropyLoss(weight.sqrt()), logits, targets)


@pytest.mark.parametrize("kind", ["classes", "probabilities", "binary"])
def test_sample_weights_become_the_counts(kind: str) -> None:
    logits, given, weight = normal(37, 5), normal(37, seed=6).abs(), normal(5, seed=4).abs()
    if kind == "binary":
        targets = normal(37, 5, seed=3).sigmoid()
        elements = BCEWithLogitsLoss(weight, reduction="none")(logits, targets)
        ours = BCEWithLogitsLoss(weight)(logits, targets, sample_weight=given)
        expected, count = (elements * given[:, None]).sum(), 5 * given.sum()
    else:
        targets = classes((37, 5)) if kind == "classes" else normal(37, 5, seed=3).softmax(dim=1)
        elements = CrossEntropyLoss(weight, reduction="none")(logits, targets)
        ours = CrossEntropyLoss(weight)(logits, targets, sample_weight=given)
        mass = torch.ones(37, dtype=torch.float64)
        if kind == "classes":
            mass = torch.where(targets >= 0, weight[targets.clamp_min(0)], 0.0)
        expected, count = (elements * given).sum(), (mass * given).sum()
    assert_close(ours, expected / count, rtol=1e-13, atol=0.0)
    assert abs(ours - elements.mean()) > 1e-3


def test_the_weights_are_those_of_torch_in_every_respect() -> None:
    """Buffers with the names of torch: a state of torch loads, they move and are converted with the module."""
    weight, pos_weight = torch.tensor([1.0, 2.0, 0.5]), torch.tensor(3.0)
    for theirs, ours in (
        (nn.CrossEntropyLoss(weight), CrossEntropyLoss(torch.ones(3))),
        (nn.BCEWithLogitsLoss(weight, pos_weight=pos_weight), BCEWithLogitsLoss(torch.ones(3), torch.ones(()))),
    ):
        before = ours.extra_repr()
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(ours.weight, weight)
        assert ours.extra_repr() != before  # the ranks compare the values that are used
        assert "1.0, 2.0, 0.5" in ours.extra_repr()
        ours.weight.mul_(2)
        assert "2.0, 4.0, 1.0" in ours.extra_repr()
        assert ours.double().weight.dtype == torch.float64
        logits, targets = normal(8, 3), torch.arange(8) % 3
        targets = targets if isinstance(ours, CrossEntropyLoss) else normal(8, 3, seed=3).sigmoid()
        for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(twin(logits, targets), ours(logits, targets))
            twin.weight.zero_()
            assert "0.0, 0.0, 0.0" in twin.extra_repr()
        assert "2.0, 4.0, 1.0" in ours.extra_repr()
    many = [CrossEntropyLoss(torch.arange(5000.0) + shift) for shift in (0, 0, 1)]
    texts = [loss.extra_repr() for loss in many]
    assert texts[0] == texts[1] != texts[2]
    assert all(len(text) < 120 for text in texts)
