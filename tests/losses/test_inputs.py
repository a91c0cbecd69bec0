"""The forms in which labels and scores come: columns, bools, floats of 0 and 1, and scores without class dimension."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device import DEVICE, count
from loss_cases import POOLED
from torch import Tensor, nn
from workers import WorkerPool, error_of

from fullrank import LossWarmupWrapper, SigmoidFocalLoss, SmoothAPLoss, SoftmaxFocalLoss
from fullrank.losses import sigmoid_focal, softmax_focal

over_losses = pytest.mark.parametrize("name", POOLED)

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "(N, 1)": lambda targets: targets[:, None],
    "int8": lambda targets: targets.to(torch.int8),
    "float32": lambda targets: targets.float(),
    "float64, (N, 1)": lambda targets: targets.double()[:, None],
    "float16": lambda targets: targets.half(),
    "bfloat16": lambda targets: targets.bfloat16(),
}


def binary_rows(count: int = 60, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """Logits (N, 1) and targets, of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    targets = (torch.rand(count, generator=generator) < 0.3).long()
    targets[::7] = -100
    return logits.to(device), targets.to(device)


def value_and_gradient(
    loss: Callable[..., Any], logits: Tensor, *rest: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of the logits."""
    logits = logits.clone().requires_grad_()
    value = loss(logits, *rest, **options)
    value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Bit by bit; the gradient has the shape of the logits that were given."""
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].reshape(expected[1].shape), expected[1])


@pytest.mark.parametrize("form", FORMS)
@over_losses
def test_targets_of_every_form_are_those_of_integers(name: str, form: str, device: torch.device) -> None:
    case = POOLED[name]
    logits, targets = binary_rows(device=device)
    for loss in (case.module(1, queue_size=30, **case.default), case.functional):
        options = {} if isinstance(loss, nn.Module) else case.default
        for given in (targets, targets.clamp_min(0)):
            twin = copy.deepcopy(loss)
            found = value_and_gradient(loss, logits, FORMS[form](given), **options)
            assert_same(found, value_and_gradient(twin, logits, given, **options))
            if isinstance(loss, nn.Module):
                assert torch.equal(loss.queue.checksum, twin.queue.checksum)
    several = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).to(device)
    classes = torch.where(targets < 0, targets, torch.arange(60, device=device) % 3)
    loss = case.module(3, **case.default)
    assert_same(value_and_gradient(loss, several, FORMS[form](classes)), value_and_gradient(loss, several, classes))


@over_losses
def test_bools_and_scores_without_a_class_dimension(name: str, device: torch.device) -> None:
    case = POOLED[name]
    logits, targets = binary_rows(device=device)
    targets = targets.clamp_min(0)
    for loss in (case.module(1, queue_size=80, **case.default), case.functional):
        options = {} if isinstance(loss, nn.Module) else case.default
        twin = copy.deepcopy(loss)
        for _ in range(2):  # the second step has a queue
            expected = value_and_gradient(twin, logits, targets, **options)
            found = value_and_gradient(loss, logits[:, 0], targets.bool(), **options)
            assert found[1].shape == logits[:, 0].shape
            assert_same(found, expected)
    # The control: other labels give another loss.
    assert not torch.equal(case.functional(logits[:, 0], 1 - targets, **case.default), expected[0])


@over_losses
def test_multi_hot_targets_of_floats_and_of_one_class(name: str, device: torch.device) -> None:
    case = POOLED[name]
    logits = torch.randn(40, 3, generator=torch.Generator().manual_seed(2)).to(device)
    targets = (torch.rand(40, 3, generator=torch.Generator().manual_seed(3)) < 0.4).long().to(device)
    targets[::5, 1] = -100
    loss = case.module(3, multi_hot=True, **case.default)
    expected = value_and_gradient(loss, logits, targets)
    assert_same(value_and_gradient(loss, logits, targets.float()), expected)
    with pytest.raises(ValueError, match=r"targets: expected 0, 1 or ignore_index=-100, got 0\.5.* SigmoidFocalLoss"):
        loss(logits, targets.float() * 0.5)
    single = case.module(1, multi_hot=True, **case.default)
    expected = value_and_gradient(single, logits[:, :1], targets[:, :1])
    assert_same(value_and_gradient(single, logits[:, 0], targets[:, 0].float()), expected)


@pytest.mark.parametrize("form", FORMS)
def test_focal_losses_take_targets_of_every_form(form: str, device: torch.device) -> None:
    logits, targets = binary_rows(device=device)
    targets = targets.clamp_min(0)
    expected = value_and_gradient(sigmoid_focal, logits, targets[:, None])
    for given in (logits, logits[:, 0]):
        assert_same(value_and_gradient(sigmoid_focal, given, FORMS[form](targets)), expected)
        assert_same(value_and_gradient(SigmoidFocalLoss(), given, FORMS[form](targets)), expected)
        assert sigmoid_focal(given, FORMS[form](targets), reduction="none").shape == given.shape
    several = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).to(device)
    classes = torch.arange(60, device=device) % 3
    classes[::9] = -100
    expected = value_and_gradient(softmax_focal, several, classes)
    assert_same(value_and_gradient(SoftmaxFocalLoss(), several, FORMS[form](classes)), expected)
    images, pixels = several.reshape(20, 3, 3), classes.reshape(20, 3)
    expected = value_and_gradient(softmax_focal, images, pixels)
    assert_same(value_and_gradient(softmax_focal, images, pixels[..., None].double()), expected)


def test_floats_cost_no_wait_and_three_launches() -> None:
    logits, targets = binary_rows(device=DEVICE)
    costs = []
    for given in (targets.clamp_min(0), targets.clamp_min(0).float()):
        loss = SmoothAPLoss(1, temperature=0.1)
        loss(logits, given)
        with count() as counts:
            loss(logits, given)
        costs.append((counts.waits, counts.launches))
    integers, floats = costs
    assert floats[0] == integers[0]
    assert floats[1] <= integers[1] + 3


# --- the losses of torch in a warm-up --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_warm_up_gives_the_losses_of_torch_what_they_need(form: str, device: torch.device) -> None:
    logits, targets = binary_rows(device=device)
    targets = targets.clamp_min(0)
    binary = LossWarmupWrapper(nn.BCEWithLogitsLoss(), SmoothAPLoss(1), warmup_steps=1, blend_steps=1)
    expected = nn.BCEWithLogitsLoss()(logits, targets[:, None].double())
    ranking = SmoothAPLoss(1)(logits, targets)
    for given in (logits, logits[:, 0]):
        binary.on_train_batch_start(0)
        assert torch.equal(binary(given, FORMS[form](targets)), expected)
        binary.on_train_batch_start(1)
        assert torch.equal(binary(given, FORMS[form](targets)), 0.5 * expected + 0.5 * ranking)
    several = torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).to(device)
    classes = torch.where(torch.arange(60, device=device) % 9 == 0, -100, torch.arange(60, device=device) % 3)
    wrapper = LossWarmupWrapper(nn.CrossEntropyLoss(), SmoothAPLoss(3), warmup_steps=1)
    wrapper.on_train_batch_start(0)
    assert torch.equal(wrapper(several, FORMS[form](classes)), nn.CrossEntropyLoss()(several, classes))


def test_a_warm_up_refuses_what_the_losses_of_torch_would_get_wrong() -> None:
    logits, targets = binary_rows()
    wrapper = LossWarmupWrapper(nn.CrossEntropyLoss(), SmoothAPLoss(1), warmup_steps=1)
    wrapper.on_train_batch_start(0)
    for given in (logits, logits[:, 0]):
        with pytest.raises(ValueError, match=r"at least two classes .*one logit is always 0. Use SigmoidFocalLoss\("):
            wrapper(given, targets.clamp_min(0))
    wrapper = LossWarmupWrapper(nn.CrossEntropyLoss(), SmoothAPLoss(2), warmup_steps=1)
    wrapper.on_train_batch_start(0)
    with pytest.raises(ValueError, match=r"targets: expected class indices in \[0, 2\).*got 0\.5"):
        wrapper(torch.zeros(3, 2), torch.full((3,), 0.5))
    soft = torch.full((3, 2), 0.5)
    assert torch.equal(wrapper(torch.ones(3, 2), soft), nn.CrossEntropyLoss()(torch.ones(3, 2), soft))


# --- over ranks ------------------------------------------------------------------------------------------------------


def other_forms(rank: int) -> list[Any]:
    """Give each rank its rows in another form; return the losses, and what a bad row of rank 1 raises."""
    logits, targets = binary_rows()
    own = slice(0, 20) if rank == 0 else slice(20, 60)
    found: list[Any] = []
    for given in (
        (logits[own], targets[own]),
        (logits[own] if rank else logits[own, 0], targets[own].float() if rank else targets[own, None]),
    ):
        loss = SmoothAPLoss(1, temperature=0.3, queue_size=30)
        value, gradient = value_and_gradient(loss, *given)
        found.append([value.item(), gradient.flatten().tolist(), int(loss.queue.checksum)])
    focal = SigmoidFocalLoss()
    clean = targets.clamp_min(0)[own]
    found.append([focal(logits[own], given).item() for given in (clean[:, None], clean.float() if rank else clean)])
    bad = targets[own].float()
    bad[3] = 0.25 if rank else 1.0
    found.append(error_of(lambda: SmoothAPLoss(1)(logits[own], bad)))
    return found


def test_ranks_may_give_their_rows_in_other_forms(pool_of_two: WorkerPool) -> None:
    outcomes = pool_of_two(other_forms)
    for plain, other, focal, (error, text) in outcomes:
        assert plain == other
        assert focal[0] == focal[1]
        assert error == "ValueError"
        assert "rank 1: targets: expected 0, 1 or ignore_index=-100, got 0.25." in text
    assert outcomes[0][0][0] == outcomes[1][0][0]
