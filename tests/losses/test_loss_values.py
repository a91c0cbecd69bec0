"""Values and gradients of every loss against the loop-written definitions, with controls that must fail."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import loss_cases as cases
import numpy
import pytest
import reference
import torch
from loss_cases import IGNORED, INPUTS, POOLED, SUMMED
from reference import Rows
from sklearn.metrics import average_precision_score, recall_score, roc_curve
from torch import Tensor
from torch.testing import assert_close

from fullrank.kernels.costs import TABLE
from fullrank.losses import pauc_at_budget, recall_at_quantile, smooth_ap

# Both sides are float64 and add at most some hundred terms of order one in another order: a few ulp of 2e-16 each,
# divided by temperatures of 0.05 and shares of some positives in the gradient.
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def _settings(table):
    return [(name, setting) for name, loss in table.items() for setting in loss.compared]


def _options(keep):
    return {"reduction": ("sum" if keep == "all" else "mean"), "queue_keep": keep}


def _in_turn(*values):
    """Settings, inputs and values: with the first setting of a loss all values, with the others one after another.

    The fast tests have the first setting with two inputs, and the others with one of them in turn; `make test` another
    one in turn, and `make full` all.
    """
    firsts = dict(reversed(_settings(POOLED)))
    fast = ["binary", "multi_hot"]
    found = []
    for index, (name, setting) in enumerate(_settings(POOLED)):
        is_first = setting == firsts[name]
        for number, inputs in enumerate(INPUTS):
            turn = values if is_first and inputs in fast else [values[(index + number) % len(values)]]
            is_slow = inputs not in fast and (index + number) % 3 == 0
            marks = [] if inputs == fast[index % 2] else [pytest.mark.slow if is_slow else pytest.mark.full]
            marks = [] if is_first and inputs in fast else marks
            found += [pytest.param(name, setting, inputs, value, marks=marks) for value in turn]
    return found


@pytest.mark.parametrize(("name", "setting", "inputs", "keep"), _in_turn("all", "negatives"))
def test_module_with_queue_over_three_steps(name, setting, inputs, keep):
    loss, case = POOLED[name], INPUTS[inputs]
    form = loss.compared[setting]
    settings = {**form.settings, **_options(keep)}
    capacity = case.num_rows + case.num_rows // 2  # the third step overwrites rows of the first
    module, past = case.module(form, queue_size=capacity, **_options(keep)), None
    for step in range(3):
        rows = cases.leaf(case.rows(step, weighted=step > 0, masked=step != 1, poisoned=step > 0))
        twin = cases.leaf(rows)
        expected = loss.reference(twin, past, **settings)
        result = cases.call(module, rows, return_per_class=True)
        assert_close((result.loss, result.per_class), expected[:2], equal_nan=True, **EXACT)
        assert torch.equal(result.valid, expected.valid)
        gradient = cases.gradient(result.loss, rows.logits)
        assert_close(gradient, cases.gradient(expected.loss, twin.logits), **EXACT)
        assert bool(gradient.any())
        past = reference.enqueue(past, twin, capacity, queue_keep=keep)
        assert len(module.queue) == len(past.logits)


FUNCTIONAL = [pytest.param(*case.values, "cpu", marks=case.marks) for case in _in_turn("mean", "sum", "none")]
FUNCTIONAL += cases.on_devices(
    [], [(name, next(iter(loss.compared)), "binary", "none") for name, loss in POOLED.items()]
)


@pytest.mark.parametrize(("name", "setting", "inputs", "reduction", "device"), FUNCTIONAL, indirect=["device"])
def test_functional(name, setting, inputs, reduction, device):
    loss, case = POOLED[name], INPUTS[inputs]
    settings = {key: value for key, value in loss.compared[setting].settings.items() if key in loss.of_function}
    twin = cases.leaf(case.rows(10, weighted=True, masked="iid_mask" in loss.of_function))
    rows = cases.leaf(Rows(*(None if value is None else value.to(device) for value in twin)))
    expected = loss.reference(twin, reduction=reduction, **settings)
    result = cases.call(loss.function, rows, reduction=reduction, multi_hot=case.multi_hot, **settings)
    assert_close(result.cpu(), expected.loss, equal_nan=True, **EXACT)
    ours, theirs = cases.gradient(result, rows.logits).cpu(), cases.gradient(expected.loss, twin.logits)
    assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("name", POOLED)
def test_controls_of_the_definitions(name):
    """Another argument, ignored rows as positives, no mask and no queue give other values."""
    loss, case = POOLED[name], INPUTS["binary"]
    rows, past = case.rows(0), case.rows(1)
    rows = rows._replace(iid_mask=torch.arange(case.num_rows) % 2 == 0 if "iid_mask" in loss.of_function else None)
    settings = loss.first.settings
    module = case.module(loss.first, queue_size=100)
    module.queue.enqueue(past.logits, past.targets)
    ours, past = cases.call(module, rows).item(), reference.enqueue(None, past, 100)
    assert_close(ours, loss.reference(rows, past, **settings).loss.item(), **EXACT)
    wrong = [loss.reference(rows, past, **{**settings, **change}) for change in loss.controls]
    wrong += [
        loss.reference(rows, **settings),
        loss.reference(rows._replace(targets=rows.targets.abs().clamp_max(1)), past, **settings),
    ]
    if rows.iid_mask is not None:
        wrong.append(loss.reference(rows._replace(iid_mask=None), past, **settings))
    assert min(abs(ours - other.loss.item()) for other in wrong) > 1e-5


OF_ELEMENTS = [(*each, is_weighted) for each in _settings(SUMMED) for is_weighted in {True, each[1] == ""}]


@pytest.mark.parametrize(
    ("name", "setting", "weighted", "device"),
    cases.on_devices(OF_ELEMENTS, [(name, "weights", True) for name in SUMMED]),
    indirect=["device"],
)
def test_sums_over_elements(name, setting, weighted, device):
    loss = SUMMED[name]
    refused = loss.own["reduction"].bad if "reduction" in loss.own else ()
    for seed, reduction in enumerate(("mean", "sum", "none", "mean_weighted", "mean_positive")):
        if reduction in refused:
            continue
        settings = {**loss.compared[setting].settings, "reduction": reduction}
        logits, targets, weight = cases.rows_of_elements(loss.kind, seed)
        twin, logits = logits.requires_grad_(), logits.detach().to(device).requires_grad_()
        expected = loss.reference(twin, targets, sample_weight=weight if weighted else None, **settings)
        given = {"sample_weight": weight.to(device) if weighted else None}
        form = cases.Form(loss, settings)
        for ours in (form.make(), form.call()):
            result = ours(logits, targets.to(device), **given)
            assert_close(result.cpu(), expected, **EXACT)
            assert_close(cases.gradient(result, logits).cpu(), cases.gradient(expected, twin), **EXACT)


OF_PAUC = [*zip(POOLED["pauc"].compared, itertools.cycle(["classes", "multi_hot"]))]


@pytest.mark.parametrize(("setting", "inputs"), OF_PAUC)
def test_pauc_diagnostics(setting, inputs):
    loss, case = POOLED["pauc"], INPUTS[inputs]
    form = loss.compared[setting]
    module, past = case.module(form, queue_size=30), None
    for step in range(2):
        rows = case.rows(step, weighted=True, masked=True)
        if step == 1:  # no live positive of class 1: valid only with queued ones in the numerator
            targets = rows.targets.clone()
            positive = targets[:, 1] == 1 if case.multi_hot else targets == 1
            (targets[:, 1] if case.multi_hot else targets)[positive] = 0
            rows = rows._replace(targets=targets)
        expected = loss.reference(rows, past, **form.settings)
        result = cases.call(module, rows, return_per_class=True, return_diagnostics=True)
        assert_close(result.per_class, expected.per_class, equal_nan=True, **EXACT)
        assert set(result.stats) == set(expected.stats)
        for name, value in expected.stats.items():
            assert_close(result.stats[name].double(), value.double(), equal_nan=True, msg=f"{name} differs", **EXACT)
        past = reference.enqueue(past, rows, 30)
    assert bool(expected.valid[1]) == ("live" not in setting)
    assert module.training
    assert cases.call(module, rows, return_diagnostics=True)._fields == ("loss", "stats")


@pytest.mark.parametrize(("method", "limit"), [("auto", None), ("direct", None), *(("auto", n) for n in (1, 40, 286))])
@pytest.mark.parametrize("leading", [(), (3,)], ids=["plain", "classes"])
@pytest.mark.parametrize("sizes", [(5, 7), (11, 13), (123, 507), (1, 1), (0, 4), (4, 0)], ids=str)
def test_sigmoid_sums(sizes, leading, method, limit, monkeypatch):
    """Also in chunks of ``limit`` pairs: of 11 queries and 13 keys a part of a query, three queries, two classes."""
    if limit:
        monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(pairs_at_once=limit))
    generator = torch.Generator().manual_seed(0)
    shapes = (*leading, sizes[0]), (*leading, sizes[1]), (*leading, sizes[1], 2)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ours = cases.losses.sigmoid_sums(*inputs, 0.3, method=method)
    theirs = reference.sigmoid_sums(*inputs, 0.3)
    # Weights have both signs: sums of 507 terms cancel to about a twentieth.
    assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    factors = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for mine, true in zip(*(torch.autograd.grad((y * factors).sum(), inputs) for y in (ours, theirs))):
        assert_close(mine, true, rtol=1e-12, atol=1e-12)


# --- at small temperatures the losses are the metrics of scikit-learn -------------------------------------------------


FORMS = {"binary": (1500, 1), "classes": (400, 4), "multi_hot": (300, 5), "multi_hot with ignored elements": (300, 5)}
SMALL = 0.01  # a hundredth of the step between scores: sigmoids are 0, 1/2 and 1 to within exp(-100)


def make_rows(form: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return scores, each column a permutation of whole numbers in which positives are a little higher, and targets.

    Of ignored elements, a third of all, most have high scores.
    """
    generator = torch.Generator().manual_seed(seed)
    count, columns = FORMS[form]
    share = torch.tensor([0.2, 0.05, 0.1, 0.4, 0.6][:columns])
    codes = torch.rand(count, columns, generator=generator) < share
    if form == "classes":
        codes = torch.nn.functional.one_hot(torch.randint(0, columns, (count,), generator=generator)) == 1
    noise = torch.randn(count, columns, generator=generator, dtype=torch.float64)
    scores = (noise + 1.2 * codes).argsort(dim=0).argsort(dim=0).double()
    targets = codes.long()
    if "ignored" in form:
        targets[torch.rand(count, columns, generator=generator) < 2 / 3 * scores / count] = IGNORED
    if form == "classes":
        return scores, targets.argmax(dim=1)
    return scores, targets[:, 0] if columns == 1 else targets


def average_precision(scores: numpy.ndarray, targets: numpy.ndarray, weight: numpy.ndarray | None = None) -> float:
    return float(average_precision_score(targets, scores, sample_weight=weight))


def recall_above(quantile: float, scores: numpy.ndarray, targets: numpy.ndarray, weight: numpy.ndarray) -> float:
    """The share of positives above the threshold; one that is at it counts half, as its sigmoid does."""
    kept = weight > 0
    threshold = sum(reference.upper_level(scores[kept].tolist(), quantile, "higher", weight[kept].tolist()))
    flagged = scores > threshold, scores >= threshold
    return sum(float(recall_score(targets, one, sample_weight=weight)) for one in flagged) / 2


def partial_area(
    alpha: float, beta: float, scores: numpy.ndarray, targets: numpy.ndarray, weight: numpy.ndarray
) -> float:
    """The area under the empirical ROC over the band, over its width.

    Without ties the curve is a staircase: on each piece of the grid the higher of two equal rates counts.
    """
    fpr, tpr, _ = roc_curve(targets, scores, drop_intermediate=False, sample_weight=weight)
    edges = numpy.unique(numpy.concatenate([fpr[(fpr > alpha) & (fpr < beta)], [alpha, beta]]))
    heights = [tpr[fpr <= middle].max() for middle in (edges[1:] + edges[:-1]) / 2]
    return float(numpy.diff(edges) @ heights) / (beta - alpha)


class Limit(NamedTuple):
    """A loss close to its metric, and by how much it may be off: negatives at the edges of a band, gaps of knots."""

    function: Callable[..., Tensor]
    metric: Callable[[numpy.ndarray, numpy.ndarray, numpy.ndarray], float]
    negatives: float = 0.0
    knots: float = 1e-12


LIMITS = {"smooth_ap": Limit(functools.partial(smooth_ap, temperature=SMALL), average_precision)}
for _quantile in (0.005, 0.05, 0.3, 0.9):
    LIMITS[f"recall {_quantile}"] = Limit(
        functools.partial(recall_at_quantile, quantile=_quantile, temperature=SMALL, surrogate="sigmoid"),
        functools.partial(recall_above, _quantile),
    )
for _alpha, _beta in ((0.0, 0.1), (0.0, 1.0), (0.1, 0.4)):
    # The temperature of partial AUC is in units of the spread of the negatives. One negative more or less may be at
    # each edge of the band; a trapezoid has a knot every hundredth of it, of a monotone curve from 0 to 1.
    _band: dict[str, Any] = {"alpha": _alpha, "beta": _beta, "temperature": 1e-5}
    _pairs = functools.partial(pauc_at_budget, surrogate="pairwise", **_band)
    _knots = functools.partial(pauc_at_budget, surrogate="trapezoid", n_knots=101, **_band)
    _metric, _negatives = functools.partial(partial_area, _alpha, _beta), 2 / (_beta - _alpha)
    LIMITS[f"pauc pairwise {_alpha}-{_beta}"] = Limit(_pairs, _metric, _negatives)
    LIMITS[f"pauc trapezoid {_alpha}-{_beta}"] = Limit(_knots, _metric, _negatives, 1e-2)


def macro(
    name: str, scores: Tensor, targets: Tensor, weight: Tensor, *, every_element: bool = False
) -> tuple[float, float]:
    """Return the mean over the classes of the metric, and by how much the loss may be off."""
    if targets.ndim == 1:
        codes = targets[:, None] if scores.shape[1] == 1 else torch.nn.functional.one_hot(targets, scores.shape[1])
    else:
        codes = targets
    values, fewest = [], math.inf
    for column, code in zip(scores.t(), codes.t()):
        kept = torch.ones_like(code, dtype=torch.bool) if every_element else code != IGNORED
        given = column[kept].numpy(), (code[kept] == 1).long().numpy(), weight[kept].numpy()
        values.append(LIMITS[name].metric(*given))
        fewest = min(fewest, float((weight[kept] * (code[kept] != 1)).sum() / weight.max()))
    return sum(values) / len(values), LIMITS[name].negatives / fewest + LIMITS[name].knots


# Each limit of one class, and of one of the other forms in turn.
OF_METRICS = [(name, form) for turn, name in enumerate(LIMITS) for form in ("binary", [*FORMS][1 + turn % 3])]


@pytest.mark.parametrize(("name", "form"), OF_METRICS)
def test_small_temperatures_give_the_macro_metric(name: str, form: str) -> None:
    """With whole weights, of which some are 0, and without."""
    (scores, targets), found = make_rows(form, 0), []
    ones = torch.ones(len(scores), dtype=torch.float64)
    drawn = torch.randint(0, 5, ones.shape, generator=torch.Generator().manual_seed(0)).double()
    for weight in (drawn, ones):
        given = {"multi_hot": "multi_hot" in form, "sample_weight": None if weight is ones else weight}
        expected, limit = macro(name, scores, targets, weight)
        found.append(1 - LIMITS[name].function(scores, targets, **given).item())
        assert abs(found[-1] - expected) <= limit
    # The controls: no weights, temperatures of the size of the scores, ignored elements as negatives, another band.
    assert abs(found[0] - found[1]) > 1e-4 or found == [1.0, 1.0]
    if "pauc" not in name:
        wide = LIMITS[name].function(scores, targets, temperature=300.0, **given)
        assert abs(1 - wide.item() - expected) > 1e-2
        if "ignored" in form and name != "recall 0.9":  # which nearly all positives are above
            assert abs(macro(name, scores, targets, ones, every_element=True)[0] - expected) > 1e-2
    elif name.endswith("0.1-0.4") and form == "binary":
        assert abs(macro(name.replace("0.1-0.4", "0.0-1.0"), scores, targets, ones)[0] - found[-1]) > 2 * limit
