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
    """Arguments have the same names, order and defaults; ours come after them, in a forward keyword-only."""
    theirs, ours = getattr(imbalanced_losses, name), getattr(fullrank, name)
    expected, given = (inspect.signature(one).parameters for one in (theirs, ours))
    assert list(given)[: len(expected)] == list(expected)
    for parameter in expected.values():
        assert given[parameter.name].default == CHANGED.get((name, parameter.name), parameter.default)
        assert given[parameter.name].kind == parameter.kind
    if inspect.isclass(theirs):
        expected, given = (inspect.signature(one.forward).parameters for one in (theirs, ours))
        assert list(given)[: len(expected)] == list(expected)
        assert {parameter.kind for parameter in list(given.values())[len(expected) :]} <= {parameter.KEYWORD_ONLY}


def run(module: Any, name: str, options: dict[str, Any], *, weighted: bool = False) -> list[Tensor]:
    """Return losses, per-class losses and gradients of six steps, the queue filling; thresholds have no gradient."""
    if module is fullrank and name != "SmoothAPLoss" and options.get("surrogate") != "pairwise":
        options = options | {"threshold_gradient": False}
    loss = getattr(module, name)(queue_size=256, **options)
    if module is imbalanced_losses:
        loss.double()  # its queue is a buffer of the module's dtype
    results, columns = [], options["num_classes"]
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        logits = torch.randn(40, columns, dtype=torch.float64, generator=generator, requires_grad=True)
        targets = torch.randint(0, max(2, columns), (40,), generator=generator)
        targets[::7] = -100
        iid_mask = torch.rand(40, generator=generator) > 0.2
        weight = torch.rand(40, dtype=torch.float64, generator=generator) if weighted else None
        value, *others = loss(logits, targets, iid_mask, True, sample_weight=weight)
        results += [value.detach(), *(other.detach() for other in others), torch.autograd.grad(value, logits)[0]]
    return results


PAUC = {"alpha": 0.05, "beta": 0.4, "quantile_interpolation": "linear"}
CASES = [("SmoothAPLoss", {"temperature": 0.3}), ("RecallAtQuantileLoss", {"temperature": 0.3, "quantile": 0.2})]
CASES += [
    ("PAUCAtBudgetLoss", PAUC | surrogate | {"tau_scale": scale, "pos_numerator": numerator, "budget_basis": basis})
    for surrogate in ({"surrogate": "trapezoid", "n_knots": 4}, {"surrogate": "pairwise"})
    for scale, numerator, basis in itertools.product(("iqr", "band"), ("pool", "live"), ("fpr", "population"))
]


@pytest.mark.parametrize("num_classes", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_same_numbers(name: str, options: dict[str, Any], num_classes: int) -> None:
    options = options | {"num_classes": num_classes}
    for weighted in (False, True):
        ours, theirs = (run(module, name, options, weighted=weighted) for module in (fullrank, imbalanced_losses))
        for a, b in zip(ours, theirs, strict=True):
            # Rounding: the same sums in another order.
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)
    if "temperature" in options:  # the control
        other = run(fullrank, name, options | {"temperature": 0.31}, weighted=True)
        assert not torch.allclose(other[0], theirs[0], rtol=1e-6)
        assert not torch.allclose(other[-1], theirs[-1], rtol=1e-6)


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
    targets = torch.randint(0, 4, (5, 3), generator=generator).index_put((torch.tensor(0),), torch.tensor(-100))
    if name == "SigmoidFocalLoss":
        targets = (torch.rand(shape, generator=generator) < 0.3).double()
    weights = None, torch.rand(of_weights, generator=generator).double()
    for weight, reduction, *others in itertools.product(weights, values[0], *values[1].values()):
        options = {"gamma": 1.5, "reduction": reduction, **dict(zip(values[1], others))}
        ours, theirs = (
            getattr(module, name)(**options)(inputs, targets, sample_weight=weight)
            for module in (fullrank, imbalanced_losses)
        )
        rounded = isinstance(options["alpha"], list)  # theirs are float32
        torch.testing.assert_close(ours, theirs, rtol=1e-7 if rounded else 1e-12, atol=1e-14)


@pytest.mark.parametrize("surrogate", ["trapezoid", "pairwise"])
def test_same_diagnostics(surrogate: str) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(60, 3, generator=generator).double(), torch.randint(0, 3, (60,), generator=generator)
    losses = [m.PAUCAtBudgetLoss(3, beta=0.3, surrogate=surrogate, queue_size=0) for m in (fullrank, imbalanced_losses)]
    ours, theirs = (loss(*rows, return_diagnostics=True)[1] for loss in losses)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value.double(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "lengths", [{"warmup_steps": 3, "blend_steps": 2}, {"warmup_epochs": 1, "blend_epochs": 2}], ids=str
)
def test_same_schedule(lengths: dict[str, int]) -> None:
    """Phases, weights, temperatures and losses of the wrapper, step by step."""
    traces: list[list[tuple[Any, ...]]] = [[], []]
    for trace, module in zip(traces, (fullrank, imbalanced_losses)):
        losses = torch.nn.CrossEntropyLoss(), module.SmoothAPLoss(4, queue_size=0)
        temperatures = {"temp_start": 0.5, "temp_end": 0.1, "temp_decay_steps": 6}
        wrapper = module.LossWarmupWrapper(*losses, **temperatures, final_main_weight=0.75, **lengths)
        for step in range(16):
            if step % 4 == 0:
                wrapper.on_train_epoch_start(step // 4)
            wrapper.on_train_batch_start(step)
            logits = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            loss = wrapper(logits, torch.arange(12) % 4).item()
            temperature = -1.0 if wrapper.in_warmup else wrapper.current_temperature
            trace.append((wrapper.in_warmup, wrapper.in_blend, wrapper.main_weight, temperature, loss))
    for ours, theirs in zip(*traces):
        assert ours == pytest.approx(theirs, rel=1e-12)
