"""The warm-up wrapper: its course over steps and epochs, what reaches the two losses, its warnings, its state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from loss_cases import INPUTS
from torch import Tensor, nn
from torch.testing import assert_close

from fullrank import CrossEntropyLoss, LossWarmupWrapper, PAUCAtBudgetLoss, SmoothAPLoss, SoftmaxFocalLoss
from fullrank.losses import smooth_ap, softmax_focal

LOGITS = (torch.arange(24.0) * 7 % 24).reshape(8, 3)
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
ONES = torch.ones(8)
TEMPERATURES = {"temp_start": 0.8, "temp_end": 0.1}


class Recorder(nn.Module):
    """A loss without temperature and queue that remembers its keywords."""

    def forward(self, logits: Tensor, targets: Tensor, **kwargs: Any) -> Tensor:
        self.kwargs = kwargs
        return logits.sum() * 0


class Plain(nn.Module):
    """A loss that takes logits and targets alone."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.sum() * 0


class Pair(nn.Module):
    """A loss that returns a plain tuple."""

    def forward(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, str]:
        return logits.mean(), "more"


def wrapper_of(**options: Any) -> LossWarmupWrapper:
    """Return a wrapper of cross-entropy and Smooth-AP with a queue, unless ``options`` says otherwise."""
    losses = {"warmup_loss": CrossEntropyLoss(), "main_loss": SmoothAPLoss(3, queue_size=64)}
    return LossWarmupWrapper(**(losses | options))


# --- the course of a training ----------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """What a wrapper shows in one step before its forward, then its loss, the queued rows and the temperature used."""

    in_warmup: bool
    in_blend: bool
    weight: float
    temperature: float | None
    loss: float
    queued: int
    used: float | None


def course(wrapper: LossWarmupWrapper, steps: range, steps_per_epoch: int = 0) -> Iterator[Moment]:
    """Train and yield what each step shows; without ``steps_per_epoch`` no hook of epochs is called."""
    for step in steps:
        if steps_per_epoch and (step % steps_per_epoch == 0 or step == steps[0]):
            wrapper.on_train_epoch_start(step // steps_per_epoch)
        wrapper.on_train_batch_start(step)
        shown = wrapper.in_warmup, wrapper.in_blend, wrapper.main_weight, wrapper.main_loss.temperature
        logits, targets = INPUTS["classes"].rows(step, num_rows=8)[:2]
        loss = wrapper(logits, targets.clamp_min(0)).item()
        used = None if wrapper.in_warmup else wrapper.current_temperature
        yield Moment(*shown, loss, len(wrapper.main_loss.queue), used)


FIXED = {"main_loss": SmoothAPLoss(3, queue_size=64, temperature=0.07)}
LENGTHS = {"warmup_steps": 2, "blend_steps": 3, "final_main_weight": 0.8}
OF_EPOCHS = {"warmup_epochs": 1, "blend_epochs": 1, "final_main_weight": 0.8}
DECAY = {**FIXED, **TEMPERATURES, "temp_decay_steps": 3}
# options, steps, steps of an epoch, what is looked at, and what it is in each step
COURSES: dict[str, tuple[dict[str, Any], range, int, str, list[Any]]] = {
    "warm-up": (LENGTHS, range(7), 0, "in_warmup", [True, True, *[False] * 5]),
    "warm-up in epochs": (OF_EPOCHS, range(6), 2, "in_warmup", [True, True, *[False] * 4]),
    "blend": (LENGTHS, range(7), 0, "in_blend", [False, False, True, True, True, False, False]),
    "blend in epochs": (OF_EPOCHS, range(6), 2, "in_blend", [False, False, True, True, False, False]),
    # (k + 1) / (n + 1) of the final weight in blend unit k of n.
    "weight": (LENGTHS, range(7), 0, "weight", [0, 0, 0.2, 0.4, 0.6, 0.8, 0.8]),
    "weight in epochs": (OF_EPOCHS, range(6), 2, "weight", [0, 0, 0.4, 0.4, 0.8, 0.8]),
    "weight without lengths": ({"final_main_weight": 0.8}, range(2), 0, "weight", [0.8, 0.8]),
    "decay": ({**DECAY, "warmup_steps": 1}, range(6), 0, "temperature", [0.07, 0.8, 0.4, 0.2, 0.1, 0.1]),
    "decay, seen late": ({**DECAY, "warmup_steps": 1}, range(3, 6), 0, "temperature", [0.2, 0.1, 0.1]),
    "decay in epochs": ({**DECAY, "warmup_epochs": 1}, range(2, 6), 2, "temperature", [0.8, 0.4, 0.2, 0.1]),
    "decay from any step": ({**DECAY, "warmup_epochs": 1}, range(9, 12), 2, "temperature", [0.8, 0.4, 0.2]),
    "no decay": ({**FIXED, "warmup_steps": 1}, range(3), 0, "used", [None, 0.07, 0.07]),
    "automatic": ({"warmup_steps": 1}, range(3), 0, "temperature", [None] * 3),
    # The queue is filled before step 0. The switch empties it; the warm-up enqueues nothing.
    "reset at the switch": ({"warmup_epochs": 1}, range(6), 2, "queued", [8, 8, 8, 16, 24, 32]),
    "reset in epochs": (
        {"warmup_epochs": 1, "reset_queue_each_epoch": True},
        range(6),
        2,
        "queued",
        [8, 8, 8, 16, 8, 16],
    ),
}


@pytest.mark.parametrize("case", COURSES)
def test_the_course_of_a_training(case: str) -> None:
    options, steps, steps_per_epoch, name, expected = COURSES[case]
    wrapper = wrapper_of(**copy.deepcopy(options))
    wrapper.main_loss(LOGITS, TARGETS)
    found = [getattr(moment, name) for moment in course(wrapper, steps, steps_per_epoch)]
    assert found == (expected if None in expected else pytest.approx(expected, rel=1e-12))


@pytest.mark.parametrize("lengths", [{}, {"warmup_steps": 0, "blend_steps": 2}, {"warmup_steps": 1}], ids=str)
def test_without_a_warm_up_the_first_temperature_holds_from_the_construction_on(lengths: dict[str, int]) -> None:
    wrapper = wrapper_of(main_loss=SmoothAPLoss(3, temperature=0.07), **TEMPERATURES, **lengths)
    assert wrapper.current_temperature == (0.07 if lengths.get("warmup_steps") else 0.8)


def test_an_epoch_that_is_started_twice_resets_the_queue_once() -> None:
    wrapper = wrapper_of(warmup_epochs=0, blend_epochs=1, reset_queue_each_epoch=True)
    list(course(wrapper, range(2), steps_per_epoch=2))
    wrapper.on_train_epoch_start(0)
    assert len(wrapper.main_loss.queue) > 8
    wrapper.on_train_epoch_start(1)
    assert len(wrapper.main_loss.queue) == 0


def test_the_loss_of_each_phase() -> None:
    rows = INPUTS["classes"].rows(weighted=True)
    given, weight = rows[:2], rows.sample_weight
    wrapper = wrapper_of(main_loss=SmoothAPLoss(3), warmup_steps=1, blend_steps=1, final_main_weight=0.5)
    for step, share in enumerate([0.0, 0.25, 0.5]):
        wrapper.on_train_batch_start(step)
        warmup, main = softmax_focal(*given, gamma=0, sample_weight=weight), smooth_ap(*given, sample_weight=weight)
        expected = (1 - share) * warmup + share * main
        assert_close(wrapper(*given, sample_weight=weight), expected, rtol=1e-15, atol=0)
    result = wrapper(*given, sample_weight=weight, return_per_class=True)
    assert_close(result.loss, expected, rtol=1e-15, atol=0)
    per_class = wrapper.main_loss(*given, sample_weight=weight, return_per_class=True).per_class
    assert torch.equal(result.per_class, per_class)
    pair = wrapper_of(main_loss=Pair(), final_main_weight=0.5)
    value, more = pair(LOGITS, TARGETS)
    assert_close(value, 0.5 * softmax_focal(LOGITS, TARGETS, gamma=0) + 0.5 * LOGITS.mean(), rtol=1e-6, atol=0)
    assert more == "more"


# --- what reaches the two losses -------------------------------------------------------------------------------------


def test_keywords_go_to_the_main_loss_and_weights_to_both() -> None:
    given = {"iid_mask": ONES.bool(), "sample_weight": ONES}
    wrapper = wrapper_of(warmup_loss=Recorder(), main_loss=Recorder(), warmup_steps=0, blend_steps=5)
    wrapper.on_train_batch_start(0)
    wrapper(LOGITS, TARGETS, **given)
    assert wrapper.main_loss.kwargs == given
    assert wrapper.warmup_loss.kwargs == {"sample_weight": ONES}
    assert wrapper.current_temperature is None
    wrapper = wrapper_of(warmup_loss=Plain(), warmup_steps=1)
    wrapper.on_train_batch_start(0)
    assert wrapper(LOGITS, TARGETS, **given).item() == 0.0  # nothing that the warm-up loss does not take


def test_gather_distributed_of_both_losses() -> None:
    adapter = nn.Sequential(SoftmaxFocalLoss(gather_distributed=True))
    wrapper = wrapper_of(warmup_loss=adapter, main_loss=SmoothAPLoss(3, gather_distributed=False), warmup_steps=0)
    # None at construction leaves what the losses were given, and adapters are looked into.
    assert (wrapper.gather_distributed, adapter[0].gather_distributed) == (False, True)
    for value in (None, False):
        wrapper.gather_distributed = value
        assert {wrapper.main_loss.gather_distributed, adapter[0].gather_distributed} == {value}
    wrapper = wrapper_of(gather_distributed=False, warmup_steps=0)
    assert wrapper.main_loss.gather_distributed is wrapper.warmup_loss.gather_distributed is False
    with pytest.raises(TypeError, match=r"^gather_distributed: expected"):
        wrapper.gather_distributed = "no"


def test_targets_of_the_losses_of_torch() -> None:
    """Floats are checked and turned into indices; what is wrong with other targets is left to torch."""
    wrapper = wrapper_of(warmup_loss=nn.CrossEntropyLoss(), warmup_steps=1).eval()
    with pytest.raises(TypeError, match="must be Tensor"):
        wrapper(LOGITS, TARGETS.tolist())
    with pytest.raises(IndexError):
        wrapper(LOGITS, TARGETS + 1)
    assert wrapper(LOGITS.to("meta"), TARGETS.float().to("meta")).is_meta
    wrapper.main_loss.validate_args = False
    assert torch.equal(wrapper(LOGITS, TARGETS + 0.5), wrapper(LOGITS, TARGETS))


# --- warnings --------------------------------------------------------------------------------------------------------

# text: what makes the wrapper that warns of it
AT_CONSTRUCTION: dict[str, dict[str, Any]] = {
    "Plain has no temperature: temp_start .* needs an attribute `temperature`": {"main_loss": Plain(), **TEMPERATURES},
    "Loss has no reset_queue: reset_": {"main_loss": SoftmaxFocalLoss(), "reset_queue_each_epoch": True},
}


@pytest.mark.parametrize("text", AT_CONSTRUCTION)
def test_settings_without_effect_warn(text: str) -> None:
    with pytest.warns(UserWarning, match=text) as caught:
        wrapper = wrapper_of(**AT_CONSTRUCTION[text])
    assert [warning.filename for warning in caught] == [__file__]
    wrapper.on_train_batch_start(0)
    assert not hasattr(wrapper.main_loss, "temperature")


def test_a_schedule_of_a_temperature_that_has_no_effect_raises() -> None:
    with pytest.raises(ValueError, match="temp_start, temp_end: expected None, because surrogate='dro' has no temp"):
        wrapper_of(main_loss=PAUCAtBudgetLoss(3), **TEMPERATURES)
    wrapper_of(main_loss=PAUCAtBudgetLoss(3, surrogate="pairwise"), **TEMPERATURES)  # a warning would be an error


# the hooks that are called before the forward, and what is said about the others
AT_THE_FORWARD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"warmup_steps": 2}, "", r"on_train_batch_start\(global_step\) was never called, so the schedule stands still"),
    ({"warmup_epochs": 2}, "batch", r"on_train_epoch_start\(epoch\) was never called, so the schedule stands still"),
    ({"blend_epochs": 2}, "batch", r"on_train_epoch_start\(epoch\) was never called"),
    (TEMPERATURES, "", r"on_train_batch_start\(global_step\) was never called"),
    ({"warmup_epochs": 1, **TEMPERATURES}, "epoch", r"on_train_batch_start\(global_step\) was never called"),
    ({"final_main_weight": 0.5}, "", None),
    ({"warmup_steps": 2}, "batch", None),
    ({"blend_epochs": 2}, "epoch", None),
    ({"blend_epochs": 2, **TEMPERATURES}, "epoch batch", None),
]


@pytest.mark.parametrize(("options", "called", "text"), AT_THE_FORWARD)
def test_a_hook_that_is_never_called_is_named_once(options: dict[str, Any], called: str, text: str | None) -> None:
    wrapper, evaluated, complete = (wrapper_of(**options) for _ in range(3))
    for hook in called.split():
        for one in (wrapper, evaluated):
            name, _, number = hook.partition("=")
            start: Callable[[int], None] = getattr(one, f"on_train_{name}_start")
            start(int(number or 0))
    if text is not None:
        with pytest.warns(UserWarning, match=text) as caught:
            wrapper(LOGITS, TARGETS)
        assert [warning.filename for warning in caught] == [__file__]
    wrapper(LOGITS, TARGETS)  # once: a second warning would be an error
    evaluated.eval()(LOGITS, TARGETS)
    complete.on_train_epoch_start(0)
    complete.on_train_batch_start(0)
    complete(LOGITS, TARGETS)
