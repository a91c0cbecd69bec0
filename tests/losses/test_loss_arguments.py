"""Bad arguments: the right class, a message that names what was given and expected, and nothing changed by the call.

The warm-up wrapper has its arguments, its phases and its state tested here too.
"""

import inspect
import math
import re

import numpy
import pytest
import torch
from loss_cases import FOCAL, INPUTS, ORDER, POOLED
from torch import nn
from torch.testing import assert_close

from fullrank.losses import (
    LossWarmupWrapper,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
    sigmoid_focal,
    sigmoid_sums,
    smooth_ap,
    softmax_focal,
)

over_losses = pytest.mark.parametrize("name", POOLED)


def _raises(error, name, given=""):
    """The one form of all messages: name, what was expected, what was given."""
    return pytest.raises(error, match=rf"(?s)^{name}.*: expected .+, got .*{given}.*\.")


# --- inputs of the pooled losses -------------------------------------------------------------------------------------

# Enough rows for the quartiles of a class's negatives to differ.
LOGITS = (torch.arange(24.0) * 7 % 24).reshape(8, 3)
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
ONES = torch.ones(8)


def _with(values, number):
    """Return ``values`` with one entry replaced."""
    return torch.cat([values[:-1], torch.tensor([number], dtype=values.dtype)])


# name: (class, argument that the message names, what it says was given, changed arguments)
BAD_ROWS = {
    "logits is a list": (TypeError, "logits", "", {"logits": LOGITS.tolist()}),
    "logits of integers": (TypeError, "logits", "int64", {"logits": LOGITS.long()}),
    "logits of three dimensions": (ValueError, "logits", r"\(8, 3, 1\)", {"logits": LOGITS[..., None]}),
    "targets is a list": (TypeError, "targets", "", {"targets": TARGETS.tolist()}),
    "complex targets": (TypeError, "targets", "complex64", {"targets": TARGETS * 1j}),
    "a target between two classes": (ValueError, "targets", "0.5", {"targets": _with(TARGETS.double(), 0.5)}),
    "a target without a number": (ValueError, "targets", "nan", {"targets": _with(TARGETS.float(), math.nan)}),
    "an infinite target": (ValueError, "targets", "-inf", {"targets": _with(TARGETS.half(), -math.inf)}),
    "a float above the range": (ValueError, "targets", r"3\.0", {"targets": _with(TARGETS.float(), 3.0)}),
    "too few targets": (ValueError, "targets", r"\(3,\)", {"targets": TARGETS[:3]}),
    "multi-hot targets": (ValueError, "targets", r"\(8, 3\)", {"targets": torch.ones(8, 3, dtype=torch.int64)}),
    "target above the range": (ValueError, "targets", "3", {"targets": _with(TARGETS, 3)}),
    "target below the range": (ValueError, "targets", "-1", {"targets": _with(TARGETS, -1)}),
    "weights are a list": (TypeError, "sample_weight", "", {"sample_weight": [1.0] * 8}),
    "weights of bools": (TypeError, "sample_weight", "bool", {"sample_weight": ONES.bool()}),
    "complex weights": (TypeError, "sample_weight", "complex", {"sample_weight": ONES * 1j}),
    "weights of another shape": (ValueError, "sample_weight", r"\(8, 3\)", {"sample_weight": torch.ones(8, 3)}),
    "negative weight": (ValueError, "sample_weight", "-1", {"sample_weight": _with(ONES, -1.0)}),
    "nan weight": (ValueError, "sample_weight", "nan", {"sample_weight": _with(ONES, math.nan)}),
    "infinite weight": (ValueError, "sample_weight", "inf", {"sample_weight": _with(ONES, math.inf)}),
}
BAD_MASKS = {
    "mask is a list": (TypeError, "iid_mask", "", {"iid_mask": [True] * 8}),
    "mask of integers": (TypeError, "iid_mask", "int64", {"iid_mask": ONES.long()}),
    "mask of another shape": (ValueError, "iid_mask", r"\(5,\)", {"iid_mask": torch.ones(5, dtype=torch.bool)}),
}
BAD_COLUMNS = {
    "logits of two columns": (ValueError, "logits", r"\(8, 2\)", {"logits": LOGITS[:, :2]}),
    "logits of one dimension": (ValueError, "logits", r"\(24,\)", {"logits": LOGITS.flatten()}),
}


@pytest.mark.parametrize("bad", [*BAD_ROWS, *BAD_MASKS, *BAD_COLUMNS])
@over_losses
def test_bad_rows_raise_and_change_nothing(name, bad):
    error, argument, given, changes = (BAD_ROWS | BAD_MASKS | BAD_COLUMNS)[bad]
    module, twin = (POOLED[name].module(3, queue_size=8, **POOLED[name].default) for _ in range(2))
    for loss in (module, twin):
        loss(LOGITS, TARGETS)
    with _raises(error, argument, given):
        module(**({"logits": LOGITS, "targets": TARGETS} | changes))
    assert module.queue.position == twin.queue.position
    assert torch.equal(module.queue.checksum, twin.queue.checksum)
    assert torch.equal(module(LOGITS, TARGETS), twin(LOGITS, TARGETS))


@pytest.mark.parametrize("bad", BAD_ROWS)
@over_losses
def test_bad_rows_raise_in_the_functional_forms(name, bad):
    error, argument, given, changes = BAD_ROWS[bad]
    with _raises(error, argument, given):
        POOLED[name].functional(**({"logits": LOGITS, "targets": TARGETS} | changes))


@over_losses
def test_bad_multi_hot_targets(name):
    module = POOLED[name].module(3, queue_size=8, multi_hot=True, **POOLED[name].default)
    with _raises(ValueError, "targets", r"\(8,\)"):
        module(LOGITS, TARGETS)
    with _raises(ValueError, "targets", "2"):
        module(LOGITS, torch.full((8, 3), 2))
    assert len(module.queue) == 0


@over_losses
def test_values_are_not_looked_at_without_validation(name):
    module = POOLED[name].module(3, queue_size=0, validate_args=False, **POOLED[name].default)
    module(LOGITS, _with(TARGETS, 7))
    with _raises(ValueError, "targets"):  # metadata always is
        module(LOGITS, TARGETS[:3])


@over_losses
def test_other_values_of_binary_targets_warn_and_count_as_positive(name):
    module = POOLED[name].module(1, queue_size=0, **POOLED[name].default)
    logits = LOGITS.reshape(24, 1)
    targets = torch.tensor([0, 2, 0, 1] * 6)
    text = r"targets: expected 0 or 1 with num_classes=1, got \[2\].* Use \(targets > 0\)\.long\(\)"
    with pytest.warns(UserWarning, match=text) as caught:
        loss = module(logits, targets)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=text) as caught:
        POOLED[name].functional(logits, targets)
    assert caught[0].filename == __file__
    assert torch.equal(loss, module(logits, (targets != 0).long()))


# --- hyper-parameters ------------------------------------------------------------------------------------------------

BAD_SHARED = [
    ("num_classes", 0, ValueError),
    ("num_classes", -1, ValueError),
    ("num_classes", 2.0, TypeError),
    ("num_classes", True, TypeError),
    ("queue_size", -1, ValueError),
    ("queue_size", 1.5, TypeError),
    ("temperature", 0.0, ValueError),
    ("temperature", -0.1, ValueError),
    ("temperature", math.nan, ValueError),
    ("temperature", math.inf, ValueError),
    ("temperature", "0.1", TypeError),
    ("reduction", "average", ValueError),
    ("reduction", None, ValueError),
    ("ignore_index", 1.0, TypeError),
    ("ignore_index", None, TypeError),
    ("max_pool_size", 0, ValueError),
    ("max_pool_size", 2.5, TypeError),
    ("queue_keep", "positives", ValueError),
    ("gather_distributed", "yes", TypeError),
    ("gather_distributed", 1, TypeError),
    ("gradient_reduction", "max", ValueError),
    ("gradient_reduction", 0, ValueError),
    ("group", "world", TypeError),
]
BAD_RECALL = [
    *[("quantile", value, ValueError) for value in (0.0, 1.0, -0.1, 1.5, math.nan)],
    ("quantile", "0.1", TypeError),
    ("quantile_interpolation", "cubic", ValueError),
]
BAD_PAUC = [
    *[("alpha", value, ValueError) for value in (-0.1, 0.005, 0.5, math.nan)],
    *[("beta", value, ValueError) for value in (0.0, 1.1, -0.5, math.nan)],
    ("alpha", "0", TypeError),
    ("beta", None, TypeError),
    ("surrogate", "hinge", ValueError),
    ("dro_lambda", 0.0, ValueError),
    ("dro_lambda", "1", TypeError),
    ("n_knots", 1, ValueError),
    ("n_knots", 2.5, (TypeError, ValueError)),
    ("tau_scale", "std", ValueError),
    ("pos_numerator", "queue", ValueError),
    ("budget_basis", "tpr", ValueError),
    ("quantile_interpolation", "cubic", ValueError),
]
BAD_SHARE = [
    *[("share", value, ValueError) for value in (0.0, 1.1, -0.1, math.nan)],
    ("share", "0.1", TypeError),
]
MODULE_ONLY = {"num_classes", "queue_size", "max_pool_size", "queue_keep", "gather_distributed", "gradient_reduction"}
MODULE_ONLY |= {"group", "pos_numerator"}
BAD_SETTINGS = [
    (name, *bad)
    for name, own in [("smooth_ap", []), ("recall_at_quantile", BAD_RECALL), ("pauc_at_budget", BAD_PAUC)]
    for bad in (*BAD_SHARED, *own)
]
BAD_SETTINGS += [("hard_negative_cross_entropy", *bad) for bad in (*BAD_SHARED, *BAD_SHARE) if bad[0] != "temperature"]


@pytest.mark.parametrize(("name", "argument", "value", "error"), BAD_SETTINGS)
def test_bad_settings_raise(name, argument, value, error):
    with _raises(error, rf"(\w+, )?{argument}"):
        POOLED[name].module(**({"num_classes": 3} | {argument: value}))
    if argument not in MODULE_ONLY:
        with _raises(error, rf"(\w+, )?{argument}"):
            POOLED[name].functional(LOGITS, TARGETS, **{argument: value})


@pytest.mark.parametrize("name", ORDER)
def test_a_bad_temperature_set_later_raises_at_the_forward(name):
    module = POOLED[name].module(3, queue_size=8, **POOLED[name].default)
    module.temperature = -1.0
    with _raises(ValueError, "temperature", "-1.0"):
        module(LOGITS, TARGETS)
    assert len(module.queue) == 0


FOCAL_BAD = {
    "sigmoid_focal": [
        *[("alpha", value, ValueError) for value in (-0.5, 1.5, math.nan)],
        ("alpha", "0.5", TypeError),
        *[("gamma", value, ValueError) for value in (-1.0, math.nan)],
        ("gamma", "2", TypeError),
        ("reduction", "mean_positive", ValueError),
    ],
    "softmax_focal": [
        ("alpha", 0.25, TypeError),
        ("alpha", "balanced", TypeError),
        ("ignore_index", None, TypeError),
        ("background_class", 0.5, TypeError),
        ("alpha", [1.0, -1.0, 1.0, 1.0], ValueError),
        ("alpha", [1.0, math.nan, 1.0, 1.0], ValueError),
        *[("gamma", value, ValueError) for value in (-1.0, math.nan)],
        ("gamma", "2", TypeError),
        *[("label_smoothing", value, ValueError) for value in (-0.1, 1.1, math.nan)],
        ("label_smoothing", "0.1", TypeError),
        ("reduction", "average", ValueError),
    ],
}


@pytest.mark.parametrize(("name", "argument", "value", "error"), [(n, *bad) for n in FOCAL for bad in FOCAL_BAD[n]])
def test_bad_focal_settings_raise(name, argument, value, error):
    with _raises(error, argument):
        FOCAL[name].module(**{argument: value})
    logits, targets, _ = FOCAL[name].inputs()
    with _raises(error, argument):
        FOCAL[name].functional(logits, targets, **{argument: value})


X, Y = torch.zeros(4, 3, 2), torch.zeros(4, 2, dtype=torch.int64)
BAD_FOCAL_INPUTS = [
    (softmax_focal, TypeError, "inputs", {"inputs": [[0.0]]}),
    (softmax_focal, TypeError, "inputs", {"inputs": X.long()}),
    (softmax_focal, ValueError, "inputs", {"inputs": X[:, 0, 0], "targets": Y[:, 0]}),
    (softmax_focal, ValueError, "targets", {"targets": Y[:, 0]}),
    (softmax_focal, TypeError, "targets", {"targets": Y * 1j}),
    (softmax_focal, ValueError, "targets", {"targets": Y + 0.5}),
    (softmax_focal, ValueError, "targets", {"targets": Y + 3.0}),
    (sigmoid_focal, ValueError, "targets", {"targets": X.transpose(1, 2)}),
    (softmax_focal, ValueError, "targets", {"targets": Y + 3}),
    (softmax_focal, ValueError, "targets", {"targets": Y - 1}),
    (softmax_focal, ValueError, "alpha", {"alpha": [1.0, 2.0]}),
    (softmax_focal, ValueError, "sample_weight", {"sample_weight": torch.ones(4)}),
    (softmax_focal, ValueError, "sample_weight", {"sample_weight": -torch.ones(4, 2)}),
    (softmax_focal, TypeError, "sample_weight", {"sample_weight": [1.0]}),
    (sigmoid_focal, TypeError, "inputs", {"inputs": X.long()}),
    (sigmoid_focal, TypeError, "targets", {"targets": 1.0}),
    (sigmoid_focal, ValueError, "targets", {"targets": Y}),
    (sigmoid_focal, ValueError, "sample_weight", {"targets": X, "sample_weight": torch.ones(3)}),
    (sigmoid_focal, ValueError, "sample_weight", {"targets": X, "sample_weight": torch.ones(4, 5, 2)}),
    (sigmoid_focal, ValueError, "sample_weight", {"targets": X, "sample_weight": torch.tensor(1.0)}),
    (sigmoid_focal, ValueError, "sample_weight", {"targets": X, "sample_weight": torch.full((4,), math.inf)}),
]


@pytest.mark.parametrize(("function", "error", "argument", "changes"), BAD_FOCAL_INPUTS)
def test_bad_focal_inputs_raise(function, error, argument, changes):
    with _raises(error, argument):
        function(**({"inputs": X, "targets": Y} | changes))


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": -1.0}),
        ("temperature", {"temperature": math.nan}),
        ("method", {"method": "fast"}),
        ("queries, keys, weights", {"weights": torch.ones(5)}),
        ("queries, keys, weights", {"weights": torch.ones(4, 1)}),
        ("queries, keys, weights", {"queries": torch.ones(2, 3)}),
        ("queries, keys, weights", {"queries": torch.tensor(1.0)}),
    ],
)
def test_bad_arguments_of_sigmoid_sums_raise(argument, changes):
    arguments = {"queries": torch.ones(3), "keys": torch.ones(5), "weights": torch.ones(5, 1), "temperature": 1.0}
    with _raises(ValueError, argument):
        sigmoid_sums(**(arguments | changes))


@pytest.mark.parametrize("name", [*POOLED, *FOCAL])
def test_gathering_without_a_process_group_raises(name):
    if name in POOLED:
        module, rows = POOLED[name].module(3, queue_size=8, gather_distributed=True), (LOGITS, TARGETS)
    else:
        module, rows = FOCAL[name].module(gather_distributed=True), FOCAL[name].inputs()[:2]
    with _raises(RuntimeError, "gather_distributed=True", "None"):
        module(*rows)
    for value in (None, False):  # may be changed between steps
        module.gather_distributed = value
        assert bool(module(*rows).isfinite())
    with _raises(TypeError, "gather_distributed", "yes"):
        module.gather_distributed = "yes"


ADVICE = [
    (
        lambda: SmoothAPLoss(3)(numpy.zeros((8, 3)), TARGETS),
        r"got numpy.ndarray of dtype float64 and shape \(8, 3\)\. Use ",
    ),
    (lambda: SmoothAPLoss(3)(LOGITS.tolist() * 100, TARGETS), r"\.\.\. \(list\)\. Use torch\.as_tensor\(logits\)\."),
    (lambda: SmoothAPLoss(3)(LOGITS.long(), TARGETS), "got an int64 tensor"),
    (lambda: SmoothAPLoss(3, temperature=torch.tensor(0.1)), r"Pass float\(temperature\)\."),
    (lambda: SmoothAPLoss(3)(LOGITS, TARGETS + 1), "Class indices start at 0"),
    (lambda: SmoothAPLoss(3)(LOGITS, TARGETS, sample_weight=ONES[:, None]), r"Use sample_weight\.squeeze\(1\)\."),
    (lambda: SmoothAPLoss(3)(LOGITS, TARGETS, ONES), "Weights go to sample_weight=."),
    (lambda: SmoothAPLoss(3)(LOGITS, TARGETS.to("meta")), r"Use targets\.to\(logits\.device\)\."),
    (lambda: softmax_focal(LOGITS, TARGETS + 0.5), r"got 0\.5\. Targets are one class each, as whole numbers"),
    (lambda: smooth_ap(ONES, ONES * 0.3), r"0, 1 or ignore_index=-100, got 0\.3.* SigmoidFocalLoss for soft targets"),
    (lambda: smooth_ap(ONES, -ONES), r"got -1\.0\. Use \(targets > 0\)\.long\(\) for targets of -1 and \+1"),
    (lambda: smooth_ap(ONES, ONES * math.nan), r"got nan\. Rows without a label .*nan_to_num\(-100\)"),
    (lambda: smooth_ap(ONES, ONES * 2), r"got 2\.0\. Use .*num_classes=C"),
    (
        lambda: smooth_ap(torch.zeros(3, 257), torch.zeros(3, dtype=torch.bfloat16)),
        "holds the indices of 257 classes, got a bfloat16 tensor.*Keep class indices as integers",
    ),
    (lambda: softmax_focal(LOGITS, TARGETS, sample_weight=ONES[:, None]), r"Use sample_weight\.squeeze\(1\)\."),
    (
        lambda: softmax_focal(LOGITS[:, :1], TARGETS * 0),
        "at least two classes in dim 1.*For one logit use SigmoidFocalLoss",
    ),
    (lambda: sigmoid_focal(ONES, -ONES), r"numbers in \[0, 1\], got -1\.0\. Use \(targets > 0\)\.float\(\)"),
    (lambda: SigmoidFocalLoss()(ONES, ONES * math.nan), r"numbers in \[0, 1\], got nan"),
]


@pytest.mark.parametrize(("call", "text"), ADVICE, ids=[text for _, text in ADVICE])
def test_messages_say_what_to_do_and_are_short(call, text):
    with pytest.raises((TypeError, ValueError), match=text) as caught:
        call()
    assert len(str(caught.value)) < 400


def test_targets_of_the_sigmoid_loss_are_not_looked_at_without_validation():
    assert bool(sigmoid_focal(ONES, -ONES, gamma=0, validate_args=False).isfinite())


@over_losses
def test_a_warning_of_a_module_points_at_the_line_that_calls_it(name):
    module = POOLED[name].module(3, queue_size=0, max_pool_size=6, **POOLED[name].default)
    with pytest.warns(UserWarning, match="drawn down to max_pool_size=6") as caught:
        nn.Sequential()(module(LOGITS, TARGETS))
    assert caught[0].filename == __file__


LOSSES = [*(loss.module for loss in (*POOLED.values(), *FOCAL.values())), LossWarmupWrapper]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_argument_is_in_the_signature_and_the_docstring(loss):
    parameters = inspect.signature(loss).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    docstring = inspect.getdoc(loss)
    listed = docstring.split("\nArgs:\n")[1].split("\n\n")[0]
    names = {name for line in re.findall(r"^    (\w.*?):", listed, re.MULTILINE) for name in line.split(", ")}
    assert names == set(parameters)
    sections = {"Shape:", "Raises:", "Distributed:", "Example:"}
    if loss is not LossWarmupWrapper:
        sections |= {"Degenerate:", "Reference:"}
    assert sections == {section for section in sections if f"\n{section}" in docstring}


# --- warm-up ---------------------------------------------------------------------------------------------------------


def _wrapper(main=None, **options):
    main = SmoothAPLoss(3, queue_size=64) if main is None else main
    return LossWarmupWrapper(SoftmaxFocalLoss(gamma=0), main, **options)


def _phases(wrapper, steps, steps_per_epoch=1):
    """Return (in_warmup, in_blend, main_weight) of each step."""
    phases = []
    for step in range(steps):
        if step % steps_per_epoch == 0:
            wrapper.on_train_epoch_start(step // steps_per_epoch)
        wrapper.on_train_batch_start(step)
        phases.append((wrapper.in_warmup, wrapper.in_blend, wrapper.main_weight))
    return phases


@pytest.mark.parametrize("unit", ["steps", "epochs"])
def test_phases_and_weights(unit):
    wrapper = _wrapper(**{f"warmup_{unit}": 2, f"blend_{unit}": 3}, final_main_weight=0.8)
    phases = _phases(wrapper, 14, steps_per_epoch=2)
    phases = phases[::2] if unit == "epochs" else phases[:7]
    assert [phase[0] for phase in phases] == [True, True, False, False, False, False, False]
    assert [phase[1] for phase in phases] == [False, False, True, True, True, False, False]
    # (k + 1) / (n + 1) of the final weight in blend unit k of n = 3.
    assert [phase[2] for phase in phases] == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.8, 0.8])


def test_loss_of_each_phase():
    rows = INPUTS["classes"].rows()
    wrapper = _wrapper(SmoothAPLoss(3, queue_size=0), warmup_steps=1, blend_steps=1, final_main_weight=0.5)
    for step, weight in enumerate([0.0, 0.25, 0.5]):
        wrapper.on_train_batch_start(step)
        ours = wrapper(*rows[:2])
        expected = (1 - weight) * wrapper.warmup_loss(*rows[:2]) + weight * wrapper.main_loss(*rows[:2])
        assert_close(ours, expected, rtol=1e-15, atol=0)
    result = wrapper(*rows[:2], return_per_class=True)
    assert_close(result.loss, ours, rtol=1e-15, atol=0)
    assert torch.equal(result.per_class, wrapper.main_loss(*rows[:2], return_per_class=True).per_class)
    only_main = _wrapper(SmoothAPLoss(3, queue_size=0), warmup_steps=0)
    only_main.on_train_batch_start(0)
    assert torch.equal(only_main(*rows[:2]), only_main.main_loss(*rows[:2]))


def test_temperature_decays_geometrically_from_the_switch_on():
    main = SmoothAPLoss(3, queue_size=64, temperature=0.01)
    wrapper = _wrapper(main, warmup_steps=3, temp_start=0.08, temp_end=0.01, temp_decay_steps=6)
    temperatures = []
    for step in range(12):
        wrapper.on_train_batch_start(step)
        temperatures.append(wrapper.current_temperature)
    assert temperatures[:3] == [0.01] * 3  # the main loss's own, until the switch
    assert temperatures[3:] == pytest.approx([0.08 * 8 ** (-min(k, 6) / 6) for k in range(9)], rel=1e-12)
    assert temperatures[-1] == 0.01 == wrapper.main_loss.temperature


def test_the_temperature_is_left_alone_without_a_schedule_of_it():
    for temperature in (None, 0.07):
        wrapper = _wrapper(SmoothAPLoss(3, queue_size=64, temperature=temperature), warmup_steps=1)
        for step in range(3):
            wrapper.on_train_batch_start(step)
            wrapper(LOGITS, TARGETS)
            assert wrapper.main_loss.temperature == temperature
        used = wrapper.current_temperature
        assert used == wrapper.main_loss.current_temperature
        assert used == 0.07 if temperature else 0 < used != 0.07


def test_the_decay_counts_from_warmup_steps_whichever_step_is_seen_first():
    options = {"temp_start": 0.8, "temp_end": 0.1, "temp_decay_steps": 1000}
    early, late = _wrapper(warmup_steps=100, **options), _wrapper(warmup_steps=100, **options)
    for step in range(90, 501):
        early.on_train_batch_start(step)
    late.on_train_batch_start(500)
    assert late.current_temperature == early.current_temperature == pytest.approx(0.8 * 8**-0.4, rel=1e-12)
    in_epochs = _wrapper(warmup_epochs=1, **options)  # here the switch is the first step that is seen
    in_epochs.on_train_epoch_start(1)
    in_epochs.on_train_batch_start(500)
    assert in_epochs.current_temperature == 0.8


def test_a_wrapper_with_nothing_to_do_raises():
    with _raises(ValueError, "warmup_epochs", "main_loss alone"):
        _wrapper()
    something = {"warmup_steps": 0}, {"final_main_weight": 0.5}, {"temp_start": 0.3, "temp_end": 0.1}
    for options in (*something, {"reset_queue_each_epoch": True}):
        _wrapper(**options)


def test_temperatures_for_a_loss_without_one_warn():
    temperatures = {"temp_start": 0.3, "temp_end": 0.1}
    with pytest.warns(UserWarning, match="surrogate='dro' has no temperature"):
        LossWarmupWrapper(SoftmaxFocalLoss(gamma=0), PAUCAtBudgetLoss(3), **temperatures)
    LossWarmupWrapper(SoftmaxFocalLoss(gamma=0), PAUCAtBudgetLoss(3, surrogate="pairwise"), **temperatures)


def test_queue_is_reset_at_the_switch_and_each_epoch_on_request():
    for each_epoch in (False, True):
        wrapper = _wrapper(warmup_epochs=1, reset_queue_each_epoch=each_epoch)
        wrapper.main_loss(LOGITS, TARGETS)
        fills = []
        for step in range(6):
            if step % 2 == 0:
                wrapper.on_train_epoch_start(step // 2)
            wrapper.on_train_batch_start(step)
            wrapper(LOGITS, TARGETS)
            fills.append(len(wrapper.main_loss.queue))
        # Step 2 is the switch, step 4 another epoch; the warm-up enqueues nothing.
        assert fills == [8, 8, 8, 16, *([8, 16] if each_epoch else [24, 32])]


class _Recorder(nn.Module):
    """A loss that remembers its keywords."""

    def forward(self, logits, targets, **kwargs):
        self.kwargs = kwargs
        return logits.sum() * 0


class _Plain(nn.Module):
    def forward(self, logits, targets):
        return logits.sum() * 0


def test_keywords_go_to_the_main_loss_and_weights_to_both():
    times = {"warmup_steps": 0, "blend_steps": 5, "temp_start": 0.2, "temp_end": 0.1}
    with pytest.warns(UserWarning, match="_Recorder has no temperature"):
        wrapper = LossWarmupWrapper(_Recorder(), _Recorder(), **times)
    wrapper.on_train_batch_start(0)
    given = {"iid_mask": ONES.bool(), "sample_weight": ONES}
    wrapper(LOGITS, TARGETS, **given)
    assert set(wrapper.main_loss.kwargs) == {"iid_mask", "sample_weight"}
    assert set(wrapper.warmup_loss.kwargs) == {"sample_weight"}
    assert wrapper.current_temperature is None
    wrapper = LossWarmupWrapper(_Plain(), SmoothAPLoss(3), warmup_steps=1)
    wrapper.on_train_batch_start(0)
    assert wrapper(LOGITS, TARGETS, **given).item() == 0.0  # nothing that the warm-up loss does not take


def test_wrapper_warnings():
    with pytest.warns(UserWarning, match="_Plain has no temperature: .* needs a property `temperature`") as caught:
        LossWarmupWrapper(_Plain(), _Plain(), temp_start=0.2, temp_end=0.1)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="SoftmaxFocalLoss has no (temperature|reset_queue)") as caught:
        LossWarmupWrapper(_Plain(), SoftmaxFocalLoss(), temp_start=0.2, temp_end=0.1, reset_queue_each_epoch=True)
    assert len(caught) == 2
    LossWarmupWrapper(_Plain(), _Plain(), warmup_steps=1)  # no temperature is asked for
    wrapper = _wrapper(temp_start=0.2, temp_end=0.1)
    with pytest.warns(UserWarning, match="on_train_batch_start.* was never called"):
        wrapper(LOGITS, TARGETS)
    wrapper(LOGITS, TARGETS)  # once: a second warning would be an error
    _wrapper(temp_start=0.2, temp_end=0.1).eval()(LOGITS, TARGETS)


@pytest.mark.parametrize(
    ("options", "hook", "phase"),
    [
        ({"warmup_steps": 2}, "on_train_batch_start(global_step)", "warm-up"),
        ({"warmup_epochs": 2}, "on_train_epoch_start(epoch)", "warm-up"),
        ({"blend_epochs": 2}, "on_train_epoch_start(epoch)", "blend"),
    ],
)
def test_a_hook_that_is_never_called_is_named(options, hook, phase):
    wrapper = _wrapper(**options)
    if "epoch" in hook:
        wrapper.on_train_batch_start(0)
    with pytest.warns(UserWarning, match=rf"{re.escape(hook)} was never called, so the {phase} never ends") as caught:
        wrapper(LOGITS, TARGETS)
    assert [warning.filename for warning in caught] == [__file__]
    wrapper(LOGITS, TARGETS)  # once: a second warning would be an error
    _wrapper(**options).eval()(LOGITS, TARGETS)
    wrapper = _wrapper(**options)
    wrapper.on_train_epoch_start(0)
    wrapper.on_train_batch_start(0)
    wrapper(LOGITS, TARGETS)


def test_wrapper_sets_gather_distributed_of_both():
    wrapper = _wrapper(gather_distributed=False, warmup_steps=0)
    assert wrapper.main_loss.gather_distributed is False
    assert wrapper.warmup_loss.gather_distributed is False
    assert wrapper.gather_distributed is False
    wrapper.gather_distributed = None
    assert wrapper.main_loss.gather_distributed is None
    assert wrapper.warmup_loss.gather_distributed is None
    with _raises(TypeError, "gather_distributed"):
        wrapper.gather_distributed = "no"
    # None at construction leaves what the losses were given, and adapters are looked into.
    adapter = nn.Sequential(SoftmaxFocalLoss(gather_distributed=True))
    wrapper = LossWarmupWrapper(adapter, SmoothAPLoss(3, gather_distributed=False), warmup_steps=0)
    assert wrapper.gather_distributed is False
    assert adapter[0].gather_distributed is True
    wrapper.gather_distributed = False
    assert adapter[0].gather_distributed is False


@pytest.mark.parametrize("argument", ["warmup_loss", "main_loss"])
@pytest.mark.parametrize("loss", [SmoothAPLoss, nn.functional.cross_entropy, None])
def test_the_wrapper_takes_module_instances(argument, loss):
    losses = {"warmup_loss": SoftmaxFocalLoss(), "main_loss": SmoothAPLoss(3)}
    with _raises(TypeError, argument):
        LossWarmupWrapper(**(losses | {argument: loss}))


def test_one_logit_through_the_wrapper():
    """The recipe of the README: integer targets (N, 1) in each phase."""
    warmup, main = SigmoidFocalLoss(alpha=-1, gamma=0), SmoothAPLoss(1, queue_size=0)
    wrapper = LossWarmupWrapper(warmup, main, warmup_steps=1, blend_steps=1)
    logits, targets = LOGITS[:, :1], TARGETS.clamp(max=1)[:, None]
    bce = nn.functional.binary_cross_entropy_with_logits(logits, targets.float())
    for step, weight in enumerate([0.0, 0.5, 1.0]):
        wrapper.on_train_batch_start(step)
        expected = (1 - weight) * bce + weight * smooth_ap(logits, targets[:, 0], main.temperature)
        assert_close(wrapper(logits, targets), expected, rtol=1e-6, atol=0)  # float32


@pytest.mark.parametrize("temperatures", [{}, {"temp_start": 0.05, "temp_end": 0.005}], ids=["automatic", "decay"])
@pytest.mark.parametrize("saved_at", [2, 5, 9], ids=["warmup", "blend", "after"])
def test_resuming_continues_as_if_never_stopped(saved_at, temperatures):
    def build():
        return _wrapper(warmup_steps=4, blend_steps=3, temp_decay_steps=8, **temperatures)

    def train(wrapper, steps):
        values = []
        for step in steps:
            wrapper.on_train_batch_start(step)
            rows = INPUTS["classes"].rows(step)
            state = wrapper.main_weight, wrapper.main_loss.temperature, len(wrapper.main_loss.queue)
            value = wrapper(*rows[:2]).item()
            used = None if wrapper.in_warmup else wrapper.current_temperature
            values.append((*state, value, used))
        return values

    straight = train(build(), range(12))
    first, second = build(), build()
    train(first, range(saved_at))
    second.load_state_dict(first.state_dict())
    assert (second.in_warmup, second.main_weight) == (first.in_warmup, first.main_weight)
    assert train(second, range(saved_at, 12)) == straight[saved_at:]


@pytest.mark.parametrize(
    ("argument", "options", "error"),
    [
        ("warmup_epochs", {"warmup_epochs": -1}, ValueError),
        ("warmup_epochs", {"warmup_epochs": 1.5}, TypeError),
        ("blend_epochs", {"blend_epochs": -1}, ValueError),
        ("warmup_steps", {"warmup_steps": -1}, ValueError),
        ("warmup_steps", {"warmup_steps": True}, TypeError),
        ("warmup_steps", {"warmup_steps": 5, "warmup_epochs": 1}, ValueError),
        ("blend_steps", {"blend_steps": 5}, ValueError),
        ("blend_steps", {"warmup_steps": 1, "blend_steps": -1}, ValueError),
        ("blend_epochs", {"warmup_steps": 1, "blend_epochs": 1}, ValueError),
        *[("temp_start", {"temp_start": value}, ValueError) for value in (0.0, -1.0, math.nan, math.inf)],
        ("temp_end", {"temp_end": 0.0}, ValueError),
        ("temp_end", {"temp_end": "0.1"}, TypeError),
        ("temp_end", {"temp_start": 0.1}, ValueError),
        ("temp_start", {"temp_end": 0.1}, ValueError),
        ("temp_decay_steps", {"temp_decay_steps": 0}, ValueError),
        ("temp_decay_steps", {"temp_decay_steps": 1.5}, TypeError),
        *[("final_main_weight", {"final_main_weight": value}, ValueError) for value in (0.0, 1.1, -0.5, math.nan)],
        ("final_main_weight", {"final_main_weight": "1"}, TypeError),
        ("gather_distributed", {"gather_distributed": 1}, TypeError),
    ],
)
def test_bad_arguments_of_the_wrapper_raise(argument, options, error):
    with _raises(error, argument):
        _wrapper(**options)


def test_repr_shows_the_settings():
    assert "alpha=0.1" in repr(PAUCAtBudgetLoss(2, alpha=0.1, beta=0.2, surrogate="pairwise"))
    assert "quantile=0.3" in repr(RecallAtQuantileLoss(2, quantile=0.3))
    assert "gamma=1.5" in repr(SigmoidFocalLoss(gamma=1.5))
    assert "warmup_steps=3" in repr(_wrapper(warmup_steps=3))
