"""At small temperatures the losses are the metrics of scikit-learn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import reference
import torch
from loss_cases import IGNORED
from sklearn.metrics import average_precision_score, recall_score, roc_curve
from torch import Tensor

from fullrank.losses import pauc_at_budget, recall_at_quantile, smooth_ap

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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LIMITS)
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
