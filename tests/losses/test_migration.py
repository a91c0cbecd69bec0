"""What README promises to users of imbalanced-losses 0.6: same constructors and calls, same numbers in one process."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import imbalanced_losses
import pytest
import torch
from torch import Tensor

import fullrank

NAMES = [name for name in imbalanced_losses.__all__ if inspect.isclass(getattr(imbalanced_losses, name))]
RANKING = ["SmoothAPLoss", "RecallAtQuantileLoss", "PAUCAtBudgetLoss"]


# Defaults that differ on purpose; docs/migrating.md names them.
CHANGED = {
    **{(name, "queue_size"): 0 for name in RANKING},
    **{(name, "num_classes"): 1 for name in RANKING},
    ("SmoothAPLoss", "temperature"): None,
    ("RecallAtQuantileLoss", "temperature"): None,
    ("PAUCAtBudgetLoss", "surrogate"): "dro",
    ("PAUCAtBudgetLoss", "tau_scale"): None,
    ("LossWarmupWrapper", "temp_start"): None,
    ("LossWarmupWrapper", "temp_end"): None,
}


@pytest.mark.parametrize("name", imbalanced_losses.__all__)
def test_every_name_and_argument_is_there(name: str) -> None:
    """Arguments have the same names, order and defaults; ours come after them, keyword-only."""
    theirs, ours = getattr(imbalanced_losses, name), getattr(fullrank, name)
    expected = list(inspect.signature(theirs).parameters.values())
    given = inspect.signature(ours).parameters
    assert [p.name for p in expected] == list(given)[: len(expected)]
    for parameter in expected:
        default = CHANGED.get((name, parameter.name), parameter.default)
        assert given[parameter.name].default == default
        assert given[parameter.name].kind == parameter.kind


@pytest.mark.parametrize("name", NAMES)
def test_forward_takes_the_same_arguments(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(module, name).forward) for module in (imbalanced_losses, fullrank))
    expected = list(theirs.parameters)
    assert list(ours.parameters)[: len(expected)] == expected
    added = list(ours.parameters.values())[len(expected) :]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in added)


def run(module: Any, name: str, arguments: dict[str, Any], weighted: bool) -> list[Tensor]:
    """Return losses, per-class losses and gradients of six steps, the queue filling; thresholds have no gradient."""
    if module is fullrank and name != "SmoothAPLoss" and arguments.get("surrogate") != "pairwise":
        arguments = arguments | {"threshold_gradient": False}
    loss = getattr(module, name)(queue_size=256, **arguments)
    if module is imbalanced_losses:
        loss.double()  # its queue is a buffer of the module's dtype
    results = []
    generator = torch.Generator().manual_seed(1)
    columns = arguments["num_classes"]
    for _ in range(6):
        logits = torch.randn(40, columns, dtype=torch.float64, generator=generator, requires_grad=True)
        targets = torch.randint(0, max(2, columns), (40,), generator=generator)
        targets[::7] = -100
        iid_mask = torch.rand(40, generator=generator) > 0.2
        weight = torch.rand(40, dtype=torch.float64, generator=generator) if weighted else None
        value, per_class, valid = loss(logits, targets, iid_mask, True, sample_weight=weight)
        value.backward()
        assert logits.grad is not None
        results += [value.detach(), per_class.detach(), valid, logits.grad]
    return results


def assert_same(name: str, arguments: dict[str, Any], weighted: bool) -> None:
    ours, theirs = (run(module, name, arguments, weighted) for module in (fullrank, imbalanced_losses))
    for a, b in zip(ours, theirs):
        # Rounding: the same sums in another order.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("num_classes", [1, 4])
def test_same_numbers(num_classes: int, weighted: bool) -> None:
    arguments = {"num_classes": num_classes, "temperature": 0.3}
    assert_same("SmoothAPLoss", arguments, weighted)
    assert_same("RecallAtQuantileLoss", arguments | {"quantile": 0.2}, weighted)


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [1, 4])
@pytest.mark.parametrize("surrogate", ["trapezoid", "pairwise"])
def test_same_numbers_of_partial_auc(surrogate: str, num_classes: int) -> None:
    values = itertools.product(("iqr", "band"), ("pool", "live"), ("fpr", "population"))
    for index, (tau_scale, pos_numerator, basis) in enumerate(values):
        arguments = {
            "num_classes": num_classes,
            "alpha": 0.05,
            "beta": 0.4,
            "surrogate": surrogate,
            **({"n_knots": 4} if surrogate == "trapezoid" else {}),
            "tau_scale": tau_scale,
            "pos_numerator": pos_numerator,
            "budget_basis": basis,
            "quantile_interpolation": "linear",
        }
        assert_same("PAUCAtBudgetLoss", arguments, weighted=index % 3 == 0)


def test_control_another_temperature_gives_other_numbers() -> None:
    ours = run(fullrank, "SmoothAPLoss", {"num_classes": 1, "temperature": 0.3}, False)
    theirs = run(imbalanced_losses, "SmoothAPLoss", {"num_classes": 1, "temperature": 0.31}, False)
    assert not torch.allclose(ours[0], theirs[0], rtol=1e-6)
    assert not torch.allclose(ours[3], theirs[3], rtol=1e-6)


# loss, shape of the inputs and of the weights, reductions, and the values of each other argument
FOCAL = {
    "SigmoidFocalLoss": ((9, 3), (9, 1), ["mean", "sum", "none"], {"alpha": [0.25, -1]}),
    "SoftmaxFocalLoss": (
        (5, 4, 3),
        (5, 3),
        ["mean", "mean_positive", "sum", "none"],
        {"alpha": [None, [0.1, 0.2, 0.3, 0.4]], "label_smoothing": [0.0, 0.1]},
    ),
}


@pytest.mark.parametrize("name", FOCAL)
def test_same_focal_losses(name: str) -> None:
    shape, of_weights, *values = FOCAL[name]
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(shape, dtype=torch.float64, generator=generator)
    if name == "SigmoidFocalLoss":
        targets = (torch.rand(shape, generator=generator) < 0.3).double()
    else:
        targets = torch.randint(0, 4, (5, 3), generator=generator)
        targets[0, 0] = -100
    weights = None, torch.rand(of_weights, generator=generator).double()
    for weight, reduction, *others in itertools.product(weights, values[0], *values[1].values()):
        arguments = {"gamma": 1.5, "reduction": reduction, **dict(zip(values[1], others))}
        ours, theirs = (
            getattr(module, name)(**arguments)(inputs, targets, sample_weight=weight)
            for module in (fullrank, imbalanced_losses)
        )
        rounded = isinstance(arguments["alpha"], list)  # theirs are float32
        torch.testing.assert_close(ours, theirs, rtol=1e-7 if rounded else 1e-12, atol=1e-14)


def test_same_diagnostics() -> None:
    generator = torch.Generator().manual_seed(4)
    logits, targets = torch.randn(60, 3, generator=generator).double(), torch.randint(0, 3, (60,), generator=generator)
    for surrogate in ("trapezoid", "pairwise"):
        stats = [
            module.PAUCAtBudgetLoss(3, beta=0.3, surrogate=surrogate, queue_size=0)(logits, targets, None, True, True)[
                3
            ]
            for module in (fullrank, imbalanced_losses)
        ]
        assert set(stats[0]) == set(stats[1])
        for name, value in stats[1].items():
            torch.testing.assert_close(stats[0][name].double(), value.double(), rtol=1e-12, atol=1e-14)


def test_same_schedule() -> None:
    """Phases, weights, temperatures and losses of the wrapper, step by step."""
    for lengths in ({"warmup_steps": 3, "blend_steps": 2}, {"warmup_epochs": 1, "blend_epochs": 2}):
        traces = []
        for module in (fullrank, imbalanced_losses):
            wrapper = module.LossWarmupWrapper(
                torch.nn.CrossEntropyLoss(),
                module.SmoothAPLoss(4, queue_size=0),
                temp_start=0.5,
                temp_end=0.1,
                temp_decay_steps=6,
                final_main_weight=0.75,
                **lengths,
            )
            trace = []
            for step in range(16):
                if step % 4 == 0:
                    wrapper.on_train_epoch_start(step // 4)
                wrapper.on_train_batch_start(step)
                generator = torch.Generator().manual_seed(step)
                logits = torch.randn(12, 4, dtype=torch.float64, generator=generator)
                loss = wrapper(logits, torch.arange(12) % 4).item()
                temperature = -1.0 if wrapper.in_warmup else wrapper.current_temperature
                trace.append((wrapper.in_warmup, wrapper.in_blend, wrapper.main_weight, temperature, loss))
            traces.append(trace)
        for ours, theirs in zip(*traces):
            assert ours[:2] == theirs[:2]
            assert ours[2:] == pytest.approx(theirs[2:], rel=1e-12)
