"""CrossEntropyLoss and BCEWithLogitsLoss: those of torch, and where they differ on purpose."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loss_cases import IGNORED, normal
from on_ranks import on_ranks
from sklearn.utils.class_weight import compute_class_weight
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
    calls = itertools.product((torch.float32, torch.float64), SHAPES, REDUCTIONS)
    for (dtype, shape, reduction), ignored in zip(calls, itertools.cycle([IGNORED, -1, 0, 2, 255])):
        logits = 3 * normal(*shape).to(dtype)
        targets = classes(shape, ignored) if kind == "classes" else normal(*shape, seed=3).to(dtype).softmax(dim=1)
        weight = normal(shape[1], seed=4).to(dtype).abs() if weighted else None
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        options |= {"ignore_index": ignored} if kind == "classes" else {}
        assert_as_torch(CrossEntropyLoss(weight, **options), nn.CrossEntropyLoss(weight, **options), logits, targets)


@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize(
    ("weight", "pos_weight"), [(None, None), ("full", "last"), ("last", None), ("one", "full"), (None, "one")]
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


@pytest.mark.parametrize("weight", [None, "given", "balanced"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padded_lists_are_lists_of_their_own(weight: str | None, smoothing: float, reduction: str) -> None:
    """Probabilities with -inf where a list is padded, one list without a candidate. The control: torch."""
    if weight == "balanced" and reduction != "mean":
        return
    logits, lengths = 2 * normal(7, 6), torch.tensor([6, 3, 1, 0, 5, 2, 6])
    absent = torch.arange(6) >= lengths[:, None]
    targets = normal(7, 6, seed=3).masked_fill(absent, -torch.inf).softmax(dim=1).nan_to_num()
    logits = logits.masked_fill(absent, -torch.inf).requires_grad_()
    of_classes = normal(6, seed=4).abs() if weight == "given" else None
    if weight == "balanced":
        masses = targets.sum(dim=0)
        of_classes = masses.sum() / (6 * masses)
    lists = []
    for row, target, length in zip(logits, targets, lengths):
        smoothed = (1 - smoothing) * target[:length] + smoothing / max(int(length), 1)
        factors = smoothed if of_classes is None else smoothed * of_classes[:length]
        lists.append(-(factors * row[:length].log_softmax(dim=0)).sum())
    elements, divisor = torch.stack(lists), targets.sum() if weight == "balanced" else 7
    expected = {"mean": elements.sum() / divisor, "sum": elements.sum(), "none": elements}[reduction]
    loss = CrossEntropyLoss("balanced" if weight == "balanced" else of_classes, -100, reduction, smoothing)
    theirs = nn.CrossEntropyLoss(of_classes, reduction=reduction, label_smoothing=smoothing)(logits, targets)
    for given in (None, torch.ones(7, dtype=torch.float64)):
        value = loss(logits, targets, sample_weight=given)
        assert_close(value, expected, rtol=1e-13, atol=1e-14)
        slopes = [torch.autograd.grad(one.sum(), logits, retain_graph=True)[0] for one in (value, expected)]
        assert_close(*slopes, rtol=1e-13, atol=1e-14)
    assert not theirs.sum().isfinite()
    wrong = targets.clone()
    wrong[1, 5] = 0.5  # a probability for what cannot be
    assert loss(logits, wrong).sum() == torch.inf


@on_ranks()
def test_padded_lists_over_ranks(rank: int) -> None:
    """Uneven ranks, of which one has a single empty list or none. The control: the mean of each rank."""
    cuts = [[0, 4, 5], [0, 0, 4, 5]][dist.get_world_size() - 2]
    own, absent = slice(cuts[rank], cuts[rank + 1]), torch.arange(4) >= torch.tensor([4, 1, 3, 2, 0])[:, None]
    logits, targets = normal(5, 4).masked_fill(absent, -torch.inf), normal(5, 4, seed=3).softmax(dim=1)
    targets = targets.masked_fill(absent, 0.0)
    loss, found = CrossEntropyLoss(label_smoothing=0.1), []
    for rows, loss.gather_distributed in ((slice(0, 5), False), (own, None), (own, False)):
        leaf = logits[rows].clone().requires_grad_()
        value = loss(leaf, targets[rows])
        found.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    (whole, slopes), (value, of_own), (alone, _) = found
    assert_close(value, whole, rtol=1e-14, atol=0.0)
    assert_close(of_own / dist.get_world_size(), slopes[own], rtol=1e-14, atol=1e-16)
    assert abs(alone - whole) > 1e-2


@pytest.mark.parametrize("options", [{}, {"pos_weight": torch.tensor(3.0)}, {"class_weight": "balanced"}])
def test_infinite_logits_on_the_side_of_their_target_add_nothing(options: dict[str, Any]) -> None:
    """As a logit of 800, since exp(-800) is 0. The control: torch."""
    logits, targets = normal(12), (torch.arange(12) % 3 == 0).double()
    logits[:4] = torch.tensor([torch.inf, -torch.inf, -torch.inf, torch.inf])
    loss = BCEWithLogitsLoss(**options)
    found, expected = both(loss, lambda x, y: loss(x.clamp(-800, 800), y), logits, targets)  # type: ignore[arg-type]
    assert_close(found, expected, rtol=1e-14, atol=0.0)
    assert nn.BCEWithLogitsLoss()(logits, targets).isnan()
    assert not loss(-logits, targets).isfinite()


def test_controls_other_means_are_seen() -> None:
    logits, targets, weight = normal(37, 5), classes((37, 5)), normal(5, seed=4).abs()
    ours = CrossEntropyLoss(weight)(logits, targets)
    elements = CrossEntropyLoss(weight, reduction="none")(logits, targets)
    for wrong in (elements.mean(), elements.sum() / (targets >= 0).sum(), CrossEntropyLoss()(logits, targets)):
        assert abs(wrong - ours) > 1e-2
    with pytest.raises(AssertionError):
        assert_as_torch(CrossEntropyLoss(weight), nn.CrossEntropyLoss(weight.sqrt()), logits, targets)


def balanced(targets: Tensor, num_classes: int, given: Tensor | None = None) -> Tensor:
    """Return scikit-learn's weights of the classes; a class without an element has weight 0."""
    present = targets.unique()
    found = compute_class_weight("balanced", classes=present.numpy(), y=targets.numpy(), sample_weight=given)
    return torch.zeros(num_classes, dtype=torch.float64).index_copy(0, present, torch.from_numpy(found))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("case", ["all", "ignored", "unseen", "one class", "weighted", "pixels"])
def test_balanced_classes_have_the_weights_of_scikit_learn(case: str, smoothing: float) -> None:
    shape = (6, 4, 5, 2) if case == "pixels" else (61, 4)
    logits, targets = normal(*shape), classes(shape) if case in ("ignored", "pixels") else classes(shape, 0)
    if case in ("unseen", "one class"):
        targets = targets.clamp_max(1 if case == "unseen" else 0)
    given = normal(*targets.shape, seed=6).abs() if case == "weighted" else torch.ones(targets.shape).double()
    valid = targets != IGNORED
    weight = balanced(targets[valid], 4, given[valid] if case == "weighted" else None)
    options: dict[str, Any] = {"label_smoothing": smoothing, "ignore_index": IGNORED}
    elements = nn.CrossEntropyLoss(weight, reduction="none", **options)(logits, targets)
    expected = (elements * given).sum() / (weight[targets.clamp_min(0)] * given * valid).sum()
    weights = given if case == "weighted" else None
    found = CrossEntropyLoss("balanced", **options)(logits, targets, sample_weight=weights)
    assert_close(found, expected, rtol=1e-13, atol=0.0)
    plain = CrossEntropyLoss(**options)(logits, targets, sample_weight=weights)
    # The control. Smoothing puts a share on classes without an element too, whose weight is 0.
    assert (abs(plain - expected) > 1e-3) == (case != "one class" or smoothing > 0)


@pytest.mark.parametrize("shape", [(61,), (61, 1), (61, 3), (9, 3, 5)])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_balanced_positives_have_the_weights_of_scikit_learn(shape: tuple[int, ...], weighted: bool) -> None:
    """Column by column; the last of several has no positive. The control: no weights."""
    logits, targets = normal(*shape), (normal(*shape, seed=3) > 0.8).long()
    if shape[1:2] > (1,):
        targets[:, -1] = 0
    given = normal(shape[0], seed=6).abs() if weighted else None
    rows = (torch.ones(shape[0]).double() if given is None else given).reshape(-1, *[1] * (len(shape) - 1))
    rows, weight = rows.expand(shape), torch.zeros(shape).double()
    for column in range(shape[1]) if len(shape) > 1 else (slice(None),):
        own = (slice(None), column) if len(shape) > 1 else column
        of_column = rows[own].flatten() if weighted else None
        weight[own] = balanced(targets[own].flatten(), 2, of_column)[targets[own]] * rows[own]
    elements = nn.BCEWithLogitsLoss(reduction="none")(logits, targets.double())
    expected = (weight * elements).sum() / weight.sum()
    found = BCEWithLogitsLoss(class_weight="balanced")(logits, targets, sample_weight=given)
    assert_close(found, expected, rtol=1e-13, atol=0.0)
    assert abs(BCEWithLogitsLoss()(logits, targets, sample_weight=given) - expected) > 1e-3


def test_probabilities_are_balanced_by_their_sums() -> None:
    """Each element of a column is a row of its own, with the probability for a weight."""
    logits, shares = normal(37, 4), normal(37, 4, seed=3).softmax(dim=1)
    found = CrossEntropyLoss("balanced")(logits, shares)
    rows, given = logits.repeat_interleave(4, dim=0), shares.flatten()
    expected = CrossEntropyLoss("balanced")(rows, torch.arange(4).repeat(37), sample_weight=given)
    assert_close(found, expected, rtol=1e-13, atol=0.0)
    binary = BCEWithLogitsLoss(class_weight="balanced")
    doubled = torch.cat([logits, logits]), torch.tensor([1, 0]).repeat_interleave(37)[:, None].expand(-1, 4)
    weights = torch.cat([shares, 1 - shares])
    assert_close(binary(logits, shares), binary(*doubled, sample_weight=weights), rtol=1e-13, atol=0.0)


def test_what_does_not_go_with_balanced_weights() -> None:
    for reduction in ("sum", "none"):
        with pytest.raises(ValueError, match="reduction: expected 'mean' with balanced weights"):
            CrossEntropyLoss("balanced", reduction=reduction)
    for name in ("weight", "pos_weight"):
        with pytest.raises(TypeError, match=rf"^{name}: expected a tensor .*use class_weight='balanced'"):
            BCEWithLogitsLoss(**{name: "balanced"})
        with pytest.raises(ValueError, match="class_weight: expected None next to weight or pos_weight"):
            BCEWithLogitsLoss(**{name: torch.ones(())}, class_weight="balanced")


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
        assert ours._arguments()["weight"] is ours._arguments()["weight"]  # it is read once
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
