"""docs/migrating.md: imbalanced-losses has the same calls and numbers, and LibAUC the gradient that is written out.

What the page says of this package is shown by the tests of the folders, and of other losses by formulas there.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from functools import partial
from typing import Any

import loss_cases
import pages
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import Tensor
from torch.testing import assert_close

import fullrank

pytestmark = pytest.mark.slow

PAGE = "migrating.md"
draw = partial(loss_cases.draw, 40, columns=3)


def peer(name: str) -> Any:
    """Return another package, or skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


# imbalanced-losses: the same constructors and calls, the same numbers in one process

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


def test_every_name_and_argument_is_there() -> None:
    """Arguments have the same names, order and defaults; ours come after them, in a forward keyword-only."""
    for name in peer("imbalanced_losses").__all__:
        theirs, ours = getattr(peer("imbalanced_losses"), name), getattr(fullrank, name)
        expected, given = (inspect.signature(one).parameters for one in (theirs, ours))
        assert list(given)[: len(expected)] == list(expected)
        for parameter in expected.values():
            assert given[parameter.name].default == CHANGED.get((name, parameter.name), parameter.default)
            assert given[parameter.name].kind == parameter.kind
        if inspect.isclass(theirs):
            expected, given = (inspect.signature(one.forward).parameters for one in (theirs, ours))
            assert list(given)[: len(expected)] == list(expected)
            assert {parameter.kind for parameter in list(given.values())[len(expected) :]} <= {parameter.KEYWORD_ONLY}


def steps_of(module: Any, name: str, options: dict[str, Any], *, weighted: bool = False) -> list[Tensor]:
    """Return losses, per-class losses and gradients of six steps, the queue filling; thresholds have no gradient."""
    if module is fullrank:
        options = options | {"weighting": "positives"}
        if name != "SmoothAPLoss" and options.get("surrogate") != "pairwise":
            options |= {"threshold_gradient": False}
    loss = getattr(module, name)(queue_size=256, **options)
    if module is not fullrank:
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
    for scale, numerator, basis in (  # each pair of values
        ("iqr", "pool", "fpr"),
        ("iqr", "live", "population"),
        ("band", "pool", "population"),
        ("band", "live", "fpr"),
    )
]


@pytest.mark.parametrize("num_classes", [1, 4])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_same_numbers(name: str, options: dict[str, Any], num_classes: int) -> None:
    options = options | {"num_classes": num_classes}
    for weighted in (False, True):
        ours, theirs = (
            steps_of(module, name, options, weighted=weighted) for module in (fullrank, peer("imbalanced_losses"))
        )
        for a, b in zip(ours, theirs, strict=True):
            # Rounding: the same sums in another order.
            assert_close(a, b, rtol=1e-12, atol=1e-14, equal_nan=True)
    if "temperature" in options:  # the control
        other = steps_of(fullrank, name, options | {"temperature": 0.31}, weighted=True)
        assert not torch.allclose(other[0], theirs[0], rtol=1e-6)
        assert not torch.allclose(other[-1], theirs[-1], rtol=1e-6)


@pytest.mark.parametrize("name", loss_cases.SUMMED)
def test_same_focal_losses(name: str) -> None:
    loss = loss_cases.SUMMED[name]
    inputs, targets, weight = loss_cases.rows_of_elements(loss.kind)
    for form, reduction, given in itertools.product(loss.compared.values(), ["mean", "sum", "none"], (None, weight)):
        options = {**form.settings, "reduction": reduction}
        ours, theirs = (
            getattr(module, loss.module.__name__)(**options)(inputs, targets, sample_weight=given)
            for module in (fullrank, peer("imbalanced_losses"))
        )
        rounded = isinstance(options.get("alpha"), list)  # theirs are float32
        assert_close(ours, theirs, rtol=1e-7 if rounded else 1e-12, atol=1e-14)


@on_ranks(2)
def test_imbalanced_losses_on_two_ranks(rank: int) -> None:
    """The share of the gradient under DDP, the elements, whether both ranks draw alike, and the positives."""
    import imbalanced_losses

    logits, targets = draw(columns=1)
    logits, own, arguments = logits.detach(), slice(20 * rank, 20 * rank + 20), {"queue_size": 0, "temperature": 0.3}
    found = []
    for module in (fullrank, imbalanced_losses):
        weight, one = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
        module.SmoothAPLoss(1, **arguments)(weight * logits[own], targets[own]).backward()
        dist.all_reduce(weight.grad)
        whole = module.SmoothAPLoss(1, **arguments, gather_distributed=False)(one * logits, targets)
        share = round(float(weight.grad / 2 / gradient(whole, one)), 6)
        elements = module.SigmoidFocalLoss(reduction="none")(logits[own], targets[own, None].double())
        torch.manual_seed(rank)
        drawn = module.SmoothAPLoss(1, **arguments, max_pool_size=8)(logits[own], targets[own])
        alike = fullrank.all_gather_no_grad(drawn[None]).unique().numel() == 1
        counts = module.PAUCAtBudgetLoss(1, beta=0.5, surrogate="pairwise", queue_size=0)
        stats = counts(logits[own], targets[own], return_per_class=True, return_diagnostics=True)[3]
        found.append((share, len(elements), alike, int(stats["grad_pos_count"])))
    assert found == [(1, 20, True, int(targets.sum())), (0.5, 40, False, int(targets[own].sum()))]


def test_the_old_numbers() -> None:
    """What the block prints is what the defaults of the other package give."""
    theirs = peer("imbalanced_losses")
    ((code, printed),) = pages.printing_blocks(PAGE, "imbalanced-losses 0.6")
    losses = [getattr(theirs, name)(3) for name in ("SmoothAPLoss", "RecallAtQuantileLoss", "PAUCAtBudgetLoss")]
    names = pages.run_block(code, {})
    found = [float(loss(names["logits"], names["targets"])) for loss in losses]
    assert found == pytest.approx([float(number) for number in printed.split()], abs=1e-6)


# LibAUC: its gradient is written out


def test_the_partial_auc_of_libauc() -> None:
    """One step with ``gamma=1``, whose moving average is that of the batch alone; the control has another hardness."""
    scores, targets = draw(columns=1)
    positives, negatives = scores[targets == 1], scores[targets == 0]
    pairs = F.softplus(negatives.T - positives)  # [P, N], the logistic surrogate
    weights = (pairs / 0.5).exp().detach()
    expected = gradient((weights / weights.mean(dim=1, keepdim=True) * pairs).mean(), scores)
    for hardness, is_equal in ((0.5, True), (1.0, False)):
        ours = fullrank.PAUCAtBudgetLoss(num_classes=1, surrogate="dro", dro_lambda=hardness)(scores, targets)
        assert torch.allclose(gradient(ours, scores), expected, rtol=1e-9, atol=1e-12) == is_equal
