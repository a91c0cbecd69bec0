"""The surrogate "dro" of partial AUC at its edges; values, queue and ranks are tested with the other surrogates."""

from __future__ import annotations

import copy
import math

import loss_cases as cases
import pytest
import reference
import torch
from loss_cases import INPUTS
from reference import Rows
from torch import Tensor
from torch.testing import assert_close

from fullrank import PAUCAtBudgetLoss, RecallAtQuantileLoss
from fullrank.kernels import entropic_risk, native
from fullrank.kernels.costs import TABLE
from fullrank.losses import pauc_at_budget

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def dro(logits: Tensor, targets: Tensor, tilt: float = 1.0, **options: object) -> Tensor:
    return pauc_at_budget(logits, targets, surrogate="dro", dro_lambda=tilt, **options)


FORMS = ["c", "powers", "pairs"]
of_forms = pytest.mark.parametrize("form", FORMS)
of_budgets = pytest.mark.parametrize("form", FORMS[:2])


def take(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let C compute the loss, or torch by powers, or torch by pairs where a lambda is given."""
    if form == "c" and not native.FUNCTIONS:
        pytest.skip("the extension was not built")
    monkeypatch.setattr(native, "FUNCTIONS", FUNCTIONS if form == "c" else {})
    monkeypatch.setattr(entropic_risk, "MOST_POWERS", 0 if form == "pairs" else 100)


FUNCTIONS = native.FUNCTIONS


def with_gradient(logits: Tensor, targets: Tensor, tilt: float, **options: object) -> tuple[Tensor, Tensor]:
    return cases.step(dro, logits, targets, tilt=tilt, **options)


def test_a_temperature_makes_it_the_smooth_recall() -> None:
    """One that is given, assigned or loaded, unless the surrogate is named."""
    rows, smooth = INPUTS["binary"].rows(), RecallAtQuantileLoss(1, temperature=0.1, surrogate="sigmoid")
    expected, other = (loss(rows.logits, rows.targets) for loss in (smooth, RecallAtQuantileLoss(1)))
    loaded, assigned, named = RecallAtQuantileLoss(1), RecallAtQuantileLoss(1), RecallAtQuantileLoss(1, surrogate="dro")
    changed = RecallAtQuantileLoss(1)
    changed.temperature = 0.1  # the state has a temperature that is not that of the constructor
    for loss in (loaded, named):
        loss.load_state_dict(changed.state_dict())
    assigned.temperature = 0.1
    for loss in (loaded, assigned, RecallAtQuantileLoss(1, temperature=0.1)):
        assert torch.equal(loss(rows.logits, rows.targets), expected)
    assert torch.equal(named(rows.logits, rows.targets), other)
    assert not torch.equal(expected, other)  # control


@of_budgets
def test_tied_negatives_at_the_top_are_all_that_can_count(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as two of ten: with any hardness they share the weight, so the softest that leaves them alone is taken."""
    take(form, monkeypatch)
    for tied, count in ((2, 10), (1, 49), (2, 98), (3, 30), (7, 103)):  # 49 * (1 / 49) is below 1 in double
        scores = torch.tensor([0.0, *[60.0] * tied, *[-60.0] * (count - tied)], dtype=torch.float64)
        for shift in (0.0, 0.1, 1 / 3):
            module = PAUCAtBudgetLoss(beta=tied / count)
            module((scores + shift)[:, None], (torch.arange(count + 1) == 0).long())
            assert module.current_hardness == 1.0


@pytest.mark.parametrize("tilt", [0.3, 0.25])
@pytest.mark.parametrize("limit", [1, 40, 10**6])
def test_chunks_of_pairs_and_blocks_of_powers(monkeypatch: pytest.MonkeyPatch, limit: int, tilt: float) -> None:
    take("powers", monkeypatch)
    rows, module = INPUTS["classes"].rows(weighted=True), PAUCAtBudgetLoss(3, beta=0.1)
    given = {"sample_weight": rows.sample_weight}
    expected, hardness = with_gradient(rows.logits, rows.targets, tilt), None
    for most in (10**6, limit):
        monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(pairs_at_once=most, rows_at_once=most))
        assert_close(with_gradient(rows.logits, rows.targets, tilt), expected, **EXACT)
        module(rows.logits, rows.targets, **given)
        assert hardness in (None, module.current_hardness)
        hardness = module.current_hardness


def tilt_of(rows: Rows) -> float:
    """Return lambda as the budget of 0.05 determines it."""
    (problem,) = reference.problems(rows)
    problem = [row._replace(mass=row.weight) for row in problem]
    parts = ([row for row in problem if row.positive == is_positive] for is_positive in (True, False))
    return reference.tilt_of_budget(*parts, 1.0, 0.05)


@pytest.mark.parametrize(
    ("form", "spread"), [*(("c", spread) for spread in (1e-3, 1.0, 30.0, 300.0)), ("powers", 30.0), ("pairs", 1.0)]
)
def test_it_is_the_definition(form: str, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ties, of a row far above or far below, with weights and any number of rows; float32 rounds the gradient."""
    take(form, monkeypatch)
    generator = torch.Generator().manual_seed(int(spread))
    for case, count in enumerate((2, 15, 16, 17, 513)):
        logits = spread * torch.randn(count, generator=generator, dtype=torch.float64)
        positive = torch.rand(count, generator=generator) < 0.2
        positive[0], positive[1] = True, False
        weight = torch.ones(count) if case % 2 else (torch.rand(count, generator=generator) + 0.1).float()
        logits = logits.round() if case % 3 == 0 else logits
        logits[case % 2] += (0, 50, -50)[case % 3] * spread
        logits = logits.float().double()
        for tilt in (None, 1.0, 1 / 12, 0.01) if form != "pairs" else (1.0, 0.2, 0.7, 3.0):
            rows = cases.leaf(Rows(logits[:, None], positive.long(), None, None if case % 2 else weight))
            expected = reference.pauc_at_budget(rows, beta=0.05, dro_lambda=tilt).loss
            (exact,) = torch.autograd.grad(expected, rows.logits)
            module = PAUCAtBudgetLoss(beta=0.05, dro_lambda=tilt)
            assert module.current_hardness == tilt  # None until a call has found it
            given = rows.targets, rows.sample_weight
            value, gradient = cases.step(module, logits, given[0], sample_weight=given[1])
            hardness = module.current_hardness
            assert hardness == (tilt_of(rows) if tilt is None else tilt)
            # A few rounding errors of exponents as large as the distances, and of sums.
            error = 2.0**-52 * (16 + float(logits.abs().max()))
            assert abs(value - expected) <= error * expected
            assert (gradient - exact[:, 0]).norm() <= 16 * error / hardness * exact.norm()
            _, single = cases.step(module, logits.float(), given[0], sample_weight=given[1])
            assert torch.equal(single, gradient.float())


def test_live_positives_and_iid_negatives_in_all_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pools with queued rows, whose positives do not count. The control counts them."""
    rows, found = INPUTS["binary"].rows(num_rows=60), {}
    mask = torch.arange(60) % 3 > 0
    for form in FORMS if native.FUNCTIONS else FORMS[1:]:
        take(form, monkeypatch)
        for numerator in ("live", "pool"):
            module = PAUCAtBudgetLoss(dro_lambda=0.25, pos_numerator=numerator, queue_size=60)
            module(rows.logits.flip(0) + 1, rows.targets, mask)
            found[form, numerator] = cases.step(module, rows.logits, rows.targets, iid_mask=mask)
            assert_close(found[form, numerator], found[next(iter(found))[0], numerator], **EXACT)
    assert abs(found["pairs", "live"][0] - found["pairs", "pool"][0]) > 1e-3


@of_budgets
def test_rows_beyond_the_exponentials(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One positive above or below the others by more than a number of double is an exponential of."""
    take(form, monkeypatch)
    targets = torch.tensor([1, 1, 0, 0, 0])
    for gap in (30.0, 699.0, 710.0, 746.0, 1e4):
        for end in (gap, -gap):
            scores = torch.tensor([end, 0.3, 0.2, 0.0, -gap], dtype=torch.float64)
            rows = cases.leaf(Rows(scores[:, None], targets))
            expected = reference.pauc_at_budget(rows, dro_lambda=0.25).loss
            (exact,) = torch.autograd.grad(expected, rows.logits)
            value, gradient = with_gradient(scores, targets, 0.25)
            assert_close(value, expected.detach(), rtol=1e-14, atol=0)
            # The definition rounds exponents of up to 4 * gap.
            assert_close(gradient, exact[:, 0], rtol=2.0**-50 * 4 * gap, atol=1e-15)


@of_forms
@pytest.mark.parametrize(("tilt", "scale"), [(0.3, None), (0.25, "iqr")])
def test_infinite_scores(monkeypatch: pytest.MonkeyPatch, tilt: float, scale: str | None, form: str) -> None:
    """A row at the good end counts as one very far away; at the bad end the loss is infinite, with a finite slope."""
    take(form, monkeypatch)
    rows = INPUTS["binary"].rows(num_rows=140)
    targets = rows.targets.clone()
    targets[0], targets[5] = 1, 0
    for place, far in ((0, math.inf), (5, -math.inf), (0, -math.inf), (5, math.inf)):
        results = []
        for value in (far, math.copysign(1e6, far)):
            logits = rows.logits.clone()
            logits[place] = value
            results.append(with_gradient(logits, targets, tilt, tau_scale=scale))
        bad = (place == 0) == (far < 0)
        assert bool(results[0][0].isinf()) == bad
        assert bool(results[0][1].isfinite().all())
        if not bad:
            assert_close(results[0], results[1], **EXACT)
            continue
        assert (results[0][1][place] > 0) == (far > 0)
        assert abs(results[0][1].sum()) <= 1e-12
    for end in (math.inf, -math.inf):
        logits = rows.logits.clone()
        logits[0] = logits[5] = end
        assert dro(logits, targets, tilt, tau_scale=scale).isnan()  # infinity less infinity, by the definition


def test_without_iid_negatives_a_class_is_not_valid() -> None:
    rows = INPUTS["binary"].rows()
    module = PAUCAtBudgetLoss(1, surrogate="dro", budget_basis="population", queue_size=0)
    leaf = rows.logits.clone().requires_grad_()
    result = module(leaf, rows.targets, rows.targets == 1, return_per_class=True)
    assert (result.loss.item(), result.valid.tolist()) == (0.0, [False])
    assert not torch.autograd.grad(result.loss, leaf)[0].any()
    assert module(leaf, rows.targets, return_per_class=True).valid.tolist() == [True]


def test_a_loss_is_copied_after_a_transform() -> None:
    rows, loss = INPUTS["binary"].rows(), PAUCAtBudgetLoss()
    gradient = torch.func.grad(lambda x: loss(x, rows.targets))(rows.logits)
    assert torch.equal(gradient, cases.step(copy.deepcopy(loss), rows.logits, rows.targets)[1])
