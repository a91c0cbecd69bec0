"""What holds for every loss of the registry, and behavior at the edges: ties, extremes, NaN, empty classes, draws."""

from __future__ import annotations

import itertools
import math
from typing import Any

import loss_cases as cases
import numpy
import pytest
import reference
import torch
from loss_cases import FORMS, IGNORED, INPUTS, OF_POOL, POOLED, InputCase
from reference import Rows
from torch import Tensor
from torch.testing import assert_close
from workers import forget_hints

from fullrank import losses
from fullrank.kernels import quantiles
from fullrank.kernels.quantiles import INTERPOLATIONS, upper_levels
from fullrank.losses.pooled.base import draw_rows
from fullrank.losses.rows import Batch, TargetRule

# float64 sums of some tens of terms, in another order; gradients divide by temperatures of 0.03 at the least.
SAME = {"rtol": 1e-12, "atol": 1e-13}

OF_ORDER = [name for name in OF_POOL if FORMS[name].loss.of_order]
over_losses = pytest.mark.parametrize("name", POOLED)
over_forms = pytest.mark.parametrize("name", OF_POOL)
over_inputs = pytest.mark.parametrize("inputs", INPUTS)


def run(name: str, case: InputCase, rows: Rows, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the loss of each class and the gradient of the rows."""
    rows = cases.leaf(rows)
    value = cases.call(case.module(FORMS[name], reduction="none", **options), rows)
    return value.detach(), torch.autograd.grad(value.nansum(), rows.logits)[0]


def assert_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], **tolerance: float) -> None:
    assert_close(ours, theirs, equal_nan=True, **(tolerance or SAME))


# --- numerics --------------------------------------------------------------------------------------------------------


def assert_reference(name: str, logits: Tensor, targets: Tensor, rtol: float, **changes: Any) -> None:
    """The loss is that of the reference, with a finite gradient."""
    form = FORMS[name]
    value, gradient = cases.step(form.call(**changes), logits, targets)
    assert bool(gradient.isfinite().all())
    expected = form.loss.reference(Rows(logits.double(), targets), **{**form.settings, **changes}).loss
    assert_close(value.double(), expected, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@over_forms
def test_extreme_magnitudes(name: str, dtype: torch.dtype) -> None:
    rows = INPUTS["binary"].rows()
    logits = rows.logits.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    if "dro" in name and "tau_scale" in FORMS[name].settings:  # the unit of the scores does not matter
        everywhere, once = (cases.step(FORMS[name].call(), x, rows.targets) for x in (logits * 1e30, logits))
        assert_close(everywhere[0], once[0], rtol=tolerance, atol=0)
        assert bool(everywhere[1].isfinite().all())
    else:
        assert_reference(name, logits * 1e30, rows.targets, tolerance)
    for index in (0, int((rows.targets == 0).nonzero()[0])):  # one positive, one negative far away
        for far in (1e30, -1e30):
            one = logits.clone()
            one[index] = far
            assert_reference(name, one, rows.targets, tolerance)


def test_equal_scores_are_valid_where_no_scale_divides_them() -> None:
    """Each pair has the logistic loss of 0, and pulls its rows apart by half."""
    logits = torch.full((9, 2), 2.5, requires_grad=True)
    targets = (torch.arange(9)[:, None] < torch.tensor([3, 0])).long()
    module = losses.PAUCAtBudgetLoss(2, queue_size=0, multi_hot=True)
    result = module(logits, targets, return_per_class=True, return_diagnostics=True)  # a warning would be an error
    assert result.valid.tolist() == [True, False]  # the second has no positive
    assert_close(result.loss.item(), math.log(2), rtol=1e-6, atol=0)
    assert result.stats["tau_eff"][0] == 1.0
    (gradient,) = torch.autograd.grad(result.loss, logits)
    expected = torch.zeros(9, 2)
    expected[:3, 0], expected[3:, 0] = -0.5 / 3, 0.5 / 6
    assert_close(gradient, expected, rtol=1e-6, atol=0)
    scaled = losses.PAUCAtBudgetLoss(2, tau_scale="iqr", queue_size=0, multi_hot=True)
    with pytest.warns(UserWarning, match="tau_scale='iqr' is at most 1e-12"):  # the control
        assert not scaled(logits, targets, return_per_class=True).valid.any()


@pytest.mark.parametrize(("label", "score"), [(0, -math.inf), (1, math.inf)], ids=["negative_last", "positive_first"])
@pytest.mark.parametrize("name", [name for name in OF_POOL if "automatic" not in name])  # its spread sees no infinity
def test_infinite_scores_at_the_right_end(name: str, label: int, score: float) -> None:
    rows = INPUTS["binary"].rows(num_rows=40)
    place = int((rows.targets == label).nonzero()[0])
    results = []
    for value in (score, math.copysign(1e6, score)):
        logits = rows.logits.clone()
        logits[place] = value
        results.append(cases.step(FORMS[name].call(), logits, rows.targets))
    assert_same(*results)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_losses_of_extreme_logits(gamma: float) -> None:
    for far in (math.inf, 1e30):  # on the right side: p_t is 1
        logits = torch.tensor([far, -far], requires_grad=True)
        loss = losses.sigmoid_focal(logits, torch.tensor([1.0, 0.0]), gamma=gamma)
        assert loss.item() == 0.0
        assert torch.autograd.grad(loss, logits)[0].tolist() == [0.0, 0.0]
    logits = torch.tensor([-1e30, 1e30], requires_grad=True)
    loss = losses.sigmoid_focal(logits, torch.tensor([1.0, 0.0]), alpha=-1, gamma=gamma, reduction="sum")
    assert loss.item() == pytest.approx(2e30, rel=1e-6)
    assert torch.autograd.grad(loss, logits)[0].tolist() == [-1.0, 1.0]
    logits = torch.tensor([[1e30, 0.0, -math.inf], [1e30, 0.0, -math.inf]], requires_grad=True)
    loss = losses.softmax_focal(logits, torch.tensor([0, 1]), gamma=gamma, reduction="sum")
    assert loss.item() == pytest.approx(1e30, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    # sqrt has no slope at 0; the one used instead leaves 1e-19 of the probability's own error at most.
    assert_close(gradient, torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.0, 0.0]]), rtol=1e-6, atol=1e-18)


@over_inputs
@over_losses
def test_nan_poisons_its_own_step_and_no_other(name: str, inputs: str) -> None:
    case, loss = INPUTS[inputs], POOLED[name]
    rows, clean = case.rows(0), case.rows(1)
    for column in range(case.num_classes):
        valid = (rows.targets if rows.targets.ndim == 1 else rows.targets[:, column]) >= 0
        logits = rows.logits.clone()
        place = int(valid.nonzero()[-1])
        logits[place, column] = math.nan
        module, twin = (case.module(loss.first, queue_size=100) for _ in range(2))
        leaf = cases.leaf(rows._replace(logits=logits))
        poisoned = cases.call(module, leaf, return_per_class=True)
        assert bool(poisoned.loss.isnan())
        others = [c for c in range(case.num_classes) if c != column]
        assert not poisoned.per_class[others].isnan().any()
        if others:
            (gradient,) = torch.autograd.grad(poisoned.per_class[others].sum(), leaf.logits)
            assert bool(gradient[:, others].isfinite().all())
        cases.call(twin, reference.take(rows, torch.arange(case.num_rows) != place))
        assert len(module.queue) == len(twin.queue)
        assert torch.equal(cases.call(module, clean), cases.call(twin, clean))


# --- degenerate classes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", ["binary", "multi_hot"])
@pytest.mark.parametrize("missing", ["positives", "negatives", "rows", "valid"])
@over_losses
def test_without_valid_classes_the_loss_is_zero_and_connected(name: str, missing: str, inputs: str) -> None:
    case, loss = INPUTS[inputs], POOLED[name]
    if missing in ("positives", "negatives") and missing not in loss.needs:
        pytest.skip(f"needs no {missing}")
    given = case.rows(num_rows=0 if missing == "rows" else 12)
    fill = {"positives": 0, "negatives": 1, "valid": IGNORED, "rows": 0}[missing]
    given = given._replace(targets=torch.full_like(given.targets, fill))
    if (missing, inputs) == ("negatives", "multi_hot"):
        given.logits[:2] = math.inf  # two positives at +inf have no order, but without negatives none is asked for
    for reduction in ("mean", "sum", "none"):
        rows = cases.leaf(given)
        module = case.module(loss.first, queue_size=8, reduction=reduction)
        result = cases.call(module, rows, return_per_class=True)
        assert not result.valid.any()
        assert bool(result.per_class.isnan().all())
        if reduction == "none":
            assert bool(result.loss.isnan().all())
            continue
        result.loss.backward()
        assert result.loss.item() == 0.0
        assert rows.logits.grad is not None
        assert not rows.logits.grad.any()
        weightless = given._replace(sample_weight=torch.zeros(len(given.logits)))
        assert cases.call(module, weightless).item() == 0.0


@over_forms
def test_rows_of_no_weight_do_not_count(name: str) -> None:
    """Whatever their scores are; a class that has no other positives, or if it needs them negatives, is not valid."""
    form, case, rows = FORMS[name], INPUTS["classes"], INPUTS["classes"].rows()
    for weight, needed in ((rows.targets != 1, "positives"), (rows.targets == 1, "negatives")):
        found = cases.call(case.module(form), rows._replace(sample_weight=weight.double()), return_per_class=True)
        assert bool(found.valid[1]) == (needed not in form.loss.needs)
    kept = torch.arange(len(rows.targets)) % 4 > 0  # of those that are left out some are positives, others negatives
    expected, slopes = run(name, case, reference.take(rows, kept))
    for score in (2.0, -math.inf, math.nan):
        logits = torch.where(kept[:, None], rows.logits, score)
        found, gradient = run(name, case, Rows(logits, rows.targets, None, kept.double()))
        assert_same((found, gradient[kept]), (expected, slopes))
        assert not gradient[~kept].any()
    control, _ = run(name, case, Rows(torch.where(kept[:, None], rows.logits, 2.0), rows.targets))
    assert not torch.allclose(control, expected, rtol=1e-6)


@over_forms
def test_equal_weights_are_none(name: str) -> None:
    """To the last bit. The control: weights that are nearly equal, and all but one or all of them 0."""
    case = INPUTS["classes"]
    rows = case.rows()
    expected = run(name, case, rows)
    for weight in (1.0, 0.3, 1e-300):
        found = run(name, case, rows._replace(sample_weight=torch.full((case.num_rows,), weight, dtype=torch.float64)))
        assert all(torch.equal(*both) for both in zip(found, expected))
    nearly = torch.linspace(1, 1.001, case.num_rows, dtype=torch.float64)
    assert not torch.equal(run(name, case, rows._replace(sample_weight=nearly))[0], expected[0])
    assert run(name, case, rows._replace(sample_weight=nearly * 0))[0].isnan().all()


@pytest.mark.parametrize("budget_basis", ["fpr", "population"])
@pytest.mark.parametrize("tau_scale", ["iqr", "band"])
@pytest.mark.parametrize("surrogate", ["trapezoid", "pairwise", "dro"])
def test_an_undefined_scale_does_not_reach_a_class_without_positives(
    surrogate: str, tau_scale: str, budget_basis: str
) -> None:
    """Between two negatives at infinity the scale is inf - inf. With a positive that makes the loss NaN."""
    scores = torch.randn(20, 1, generator=torch.Generator().manual_seed(0))
    scores[:16] = math.inf
    loss = losses.PAUCAtBudgetLoss(1, beta=0.3, surrogate=surrogate, tau_scale=tau_scale, budget_basis=budget_basis)
    for num_positive in (0, 1):
        targets = (torch.arange(20) >= 20 - num_positive).long()
        leaf = scores.clone().requires_grad_()
        value = loss(leaf, targets)
        value.backward()
        if num_positive == 0:
            assert value.item() == 0.0
            assert not leaf.grad.any()
        elif surrogate != "dro":
            assert value.isnan()  # the control


# --- max_pool_size ---------------------------------------------------------------------------------------------------


def test_draw_keeps_a_quota_of_every_class() -> None:
    targets = torch.cat([torch.zeros(900), torch.ones(6), torch.full((60,), 2), torch.full((34,), IGNORED)]).long()
    batch = Batch(torch.zeros(1000, 3), targets, rule=TargetRule(3))
    draws = [draw_rows(batch, 120, draw) for draw in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    for index in draws:
        counts = targets[index].clamp_min(-1).add(1).bincount(minlength=4).tolist()
        assert len(index) == 120 == len(index.unique())
        assert counts[0] == 0  # ignored rows are not drawn
        assert counts[2] == 6  # all of a class below its quota of 120 / 2 / 3
        assert min(counts[1], counts[3]) >= 20
    # 20 + 6 + 20 are reserved, the other 74 uniform over 880 + 40: class 2 gets 3.2 of them, never its share of 1/3.
    assert counts[3] < 35
    few = targets.masked_fill(torch.arange(1000) >= 50, IGNORED)
    assert len(draw_rows(Batch(torch.zeros(1000, 3), few, rule=TargetRule(3)), 120, 0)) == 50
    index = draw_rows(Batch(torch.zeros(400, 8), torch.arange(400) % 8, rule=TargetRule(8)), 8, 0)
    assert (index % 8).sort().values.tolist() == [*range(8)]  # one of each, where there is no room for two
    # A multi-hot row counts under each of its classes.
    codes = torch.zeros(400, 2, dtype=torch.int64)
    codes[:3] = 1
    codes[3, 0] = 1
    index = draw_rows(Batch(torch.zeros(400, 2), codes, rule=TargetRule(2, multi_hot=True)), 30, 0)
    assert codes[index].sum(dim=0).tolist() == [4, 3]
    codes[4:, 0] = IGNORED  # a row that counts for the other class is drawn
    assert len(draw_rows(Batch(torch.zeros(400, 2), codes, rule=TargetRule(2, multi_hot=True)), 30, 0)) == 30


@over_losses
def test_max_pool_size(name: str) -> None:
    case, loss = INPUTS["classes"], POOLED[name]
    steps = [case.rows(seed, num_rows=60) for seed in range(4)]
    module, twin, resumed = (case.module(loss.first, queue_size=50, max_pool_size=40) for _ in range(3))
    with pytest.warns(UserWarning, match="max_pool_size=40") as caught:
        ours = [cases.call(module, rows).item() for rows in steps]
    assert [warning.filename for warning in caught] == [cases.__file__]  # of the line that calls the loss
    assert ours[:2] == [cases.call(twin, rows).item() for rows in steps[:2]]  # losses of one class warn once
    resumed.load_state_dict(twin.state_dict())
    assert ours[2:] == [cases.call(resumed, rows).item() for rows in steps[2:]]
    index = draw_rows(Batch(*steps[0][:2], rule=TargetRule(3)), 40, 0)
    assert_close(ours[0], loss.reference(reference.take(steps[0], index), **loss.first.settings).loss.item(), **SAME)
    # Every step draws again, also without a queue.
    forget_hints()
    module = case.module(loss.first, max_pool_size=20)
    with pytest.warns(UserWarning, match="max_pool_size=20"):
        assert cases.call(module, steps[0]).item() != cases.call(module, steps[0]).item()
    # Validation does not move the draws.
    before = resumed.saved_num_draws.item()
    cases.call(resumed.eval(), steps[0])
    assert resumed.saved_num_draws.item() == before > 0


# --- quantiles -------------------------------------------------------------------------------------------------------

SIZES = range(1, 301)


def pools() -> tuple[Tensor, Tensor]:
    """Row n - 1 has n members, anywhere among 300 columns whose other entries would be noticed."""
    generator = torch.Generator().manual_seed(0)
    member = torch.rand(300, 300, generator=generator).argsort(dim=1) < torch.tensor(SIZES)[:, None]
    scores = torch.randn(300, 300, generator=generator, dtype=torch.float64)
    return scores.masked_fill(~member, math.nan), member


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_quantiles_equal_those_of_numpy_and_of_the_decimal_fraction(interpolation: str) -> None:
    scores, member = pools()
    values = [scores[n - 1][member[n - 1]] for n in SIZES]
    # Multiples of 1/64, for which 1 - q and (1 - q)(n - 1) have no rounding error in numpy.
    binary = [k / 64 for k in (0, 1, 5, 16, 31, 32, 33, 48, 63, 64)]
    expected = [numpy.quantile(v.numpy(), 1 - numpy.array(binary), method=interpolation).tolist() for v in values]
    ours = upper_levels(scores, member, binary, interpolation).value
    assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    decimal = [0.005, 0.01, 0.05, 0.1, 0.3, 0.7, 0.995]
    expected = [[reference.upper_quantile(v.tolist(), q, interpolation) for q in decimal] for v in values]
    ours = upper_levels(scores, member, decimal, interpolation).value
    assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)
    for place, fraction in enumerate(decimal):
        assert torch.equal(upper_levels(scores, member, [fraction], interpolation).value[:, 0], ours[:, place])
    assert math.ceil((1 - 0.7) * 10) == 4  # 3.0000000000000004: rounding moves it past an integer
    eleven = torch.arange(11.0)[None]
    assert upper_levels(eleven, torch.ones_like(eleven, dtype=torch.bool), [0.7], "higher").value.item() == 3.0


def test_a_member_of_minus_infinity_lies_below_all_that_are_none() -> None:
    """The places of the members from the top are 0, 1/4, 1/2 and 1. The control: the member below them."""
    scores, weight = torch.tensor([[3.0, 2.0, 1.0, -math.inf, 9.0, 9.0]]), torch.tensor([1.0, 1.0, 1.0, 2.0, 1.0, 1.0])
    for interpolation, expected in (("higher", 1.0), ("lower", -math.inf)):
        assert upper_levels(scores, scores < 9, [0.75], interpolation, weight=weight).base.item() == expected


ORDERS = [(order, "linear") for order in ("random", "sorted", "periodic", "ties", "constant", "infinite")]
ORDERS += [("random", rule) for rule in ("higher", "midpoint")]


@pytest.mark.parametrize(("order", "interpolation"), ORDERS)
def test_quantiles_bracketed_by_a_sample_are_the_same(
    order: str, interpolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 2000, generator=generator)
    scores = {
        "random": scores,
        "sorted": scores.sort(dim=1).values,
        "periodic": scores + 9.0 * (torch.arange(2000) % 5 == 0),
        "ties": (scores * 2).round() / 2,
        "constant": torch.full_like(scores, 2.0),
        "infinite": scores.masked_fill(scores > 1, math.inf).masked_fill(scores < -1, -math.inf),
    }[order]
    fractions = [0.0, 0.005, 0.01, 0.25, 0.3, 0.5, 0.75, 0.999, 1.0]
    members = None, torch.rand(3, 2000, generator=generator) < 0.5, torch.arange(2000).expand(3, -1) % 400 == 7
    for member, weight in itertools.product(members, (torch.rand(2000, generator=generator) ** 4, None)):
        results = []
        # A sample of 100 scores is bracketed well, one of 3 often fails, and then all scores are ordered.
        for rows, sample in ((10**9, 100), (1, 100), (1, 3)):
            monkeypatch.setattr(quantiles, "BRACKETED", rows)
            monkeypatch.setattr(quantiles, "SAMPLE", sample)
            results.append(upper_levels(scores, member, fractions, interpolation, weight=weight))
            one = upper_levels(scores, member, [0.01], interpolation, weight=weight)
            assert torch.equal(one.base[:, 0], results[-1].base[:, 2])
        for other in results[1:]:
            assert torch.equal(other.base, results[0].base)
            assert (other.offset is None) == (interpolation not in ("linear", "midpoint"))
            if weight is not None and other.offset is not None:  # sums of the weights are rounded
                assert_close(other.offset, results[0].offset, rtol=1e-9, atol=1e-12)
            else:
                assert other.offset is None or torch.equal(other.offset, results[0].offset)
    assert torch.equal(results[0].base[:, 0], scores[:, 7::400].amax(dim=1))  # a control that calls no code of ours


def test_undefined_scores_are_the_highest_in_brackets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.arange(100.0)[None].clone()
    scores[0, 3] = math.nan
    for rows in (10**9, 1):
        monkeypatch.setattr(quantiles, "BRACKETED", rows)
        found = upper_levels(scores, None, [0.0, 0.5]).value
        assert found[0, 0].isnan()
        assert found[0, 1] == 51.0


# --- second derivatives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [40, 4000], ids=["pairs", "bins"])
@pytest.mark.parametrize(
    "name", [*OF_ORDER, *(n for n, f in FORMS.items() if f.loss.kind in ("queries", "grades", "embeddings", "pairs"))]
)
def test_a_second_derivative_is_refused(name: str, size: int) -> None:
    """A gradient penalty would add nothing; the first derivative is that of a run without ``create_graph``."""
    leaf = torch.randn(size, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    rows, targets = leaf, (torch.arange(size) % 4 == 0).long()
    if FORMS[name].columns > 1:
        rows, targets = torch.cat([leaf, leaf**2], dim=1)[:40], targets[:40]
    value = FORMS[name].value(rows, targets)
    (expected,) = torch.autograd.grad(value, leaf, retain_graph=True)
    (found,) = torch.autograd.grad(value, leaf, create_graph=True)
    assert torch.equal(found, expected)
    assert found.requires_grad
    penalty = found.square().sum()
    for second in (
        lambda: torch.autograd.grad(penalty, leaf, allow_unused=True, retain_graph=True),
        lambda: torch.autograd.grad(value + penalty, leaf, retain_graph=True),
        penalty.backward,
    ):
        with pytest.raises(RuntimeError, match="expected a first derivative, got a second one"):
            second()
