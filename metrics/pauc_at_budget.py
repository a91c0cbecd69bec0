"""Exact partial area under the ROC curve, over a band of false-positive rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..losses.arguments import completed
from ..losses.pooled.pauc_surrogates import BudgetBasis, PartialArea, check_area
from ..losses.pooled.pool import PerClass, Pool
from .ranking_metric import Average, RankingMetric, mass_of


def _area_between(x: Tensor, y: Tensor, vertex: Tensor, alpha: float, beta: float) -> Tensor:
    """Return the area (C,) in [alpha, beta] under the polyline through (0, 0) and the points that are a ``vertex``."""
    x0, y0 = _previous_vertex(x, vertex), _previous_vertex(y, vertex)
    width = x - x0
    slope = (y - y0) / torch.where(width > 0, width, torch.ones_like(width))
    left, right = x0.clamp(alpha, beta), x.clamp(alpha, beta)
    # The mean of a straight segment is its value in the middle. A segment that is vertical or outside has width 0.
    area = (right - left) * (y0 + slope * ((left + right) / 2 - x0))
    return area.masked_fill(~vertex, 0.0).sum(dim=1)


def _previous_vertex(values: Tensor, vertex: Tensor) -> Tensor:
    """Return for each entry the value at the vertex before it, 0 before the first. Values must not decrease."""
    reached = values.masked_fill(~vertex, 0.0).cummax(dim=1).values
    return torch.cat([torch.zeros_like(reached[:, :1]), reached[:, :-1]], dim=1)


@completed()
class PAUCAtBudget(RankingMetric):
    r"""Mean true-positive rate over a band of false-positive rates: the partial area under the ROC curve, normalized.

    Equal, for ``alpha=0, beta=1``, to ``sklearn.metrics.roc_auc_score``; O(N log N) time and O(N C) memory.

    .. math:: \frac{1}{\beta - \alpha} \int_\alpha^\beta \mathrm{TPR}(u) \, du

    where u is the false-positive rate, or the share of all rows that are flagged. It is the exact counterpart of
    :class:`~fullrank.losses.PAUCAtBudgetLoss`. The empirical curve has a point for each distinct score, so tied rows
    are one step, and straight lines between the points. The area is not standardized as in McClish: a random ranking
    has (alpha + beta) / 2, and a perfect one 1, or less under ``"population"``, where positives use up budget.

    Args:
        alpha, beta: the band of false-positive rates, 0 <= alpha < beta <= 1.
        budget_basis: what u is a share of: the negatives (``"fpr"``), or all rows (``"population"``).

    Example:
        >>> import torch
        >>> metric = PAUCAtBudget(num_classes=1, beta=0.5)
        >>> metric.update(torch.tensor([[4.0], [3.0], [2.0], [1.0]]), torch.tensor([1, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)

    Reference:
        McClish, Analyzing a Portion of the ROC Curve, Medical Decision Making, 1989.
    """

    own_arguments = "alpha", "beta", "budget_basis"

    def __init__(
        self,
        num_classes: int = 1,
        alpha: float = 0.0,
        beta: float = 0.005,
        *,
        budget_basis: BudgetBasis = "fpr",
        average: Average = "macro",
        ignore_index: int = -100,
        multi_hot: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes, average, ignore_index, multi_hot, **kwargs)
        self.alpha, self.beta, self.budget_basis = alpha, beta, budget_basis
        check_area(PartialArea(alpha, beta, surrogate="trapezoid", budget_basis=budget_basis))

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the partial area of each class, over the width of the band."""
        scores, order = pool.scores.sort(dim=1, descending=True)
        # The mass of the rows above a threshold just below each score, the highest score first. Of tied scores only the
        # last is a threshold.
        of_positives, of_rows = mass_of(pool.positive, pool), mass_of(pool.everyone, pool)
        positives, rows = of_positives.gather(1, order).cumsum(dim=1), of_rows.gather(1, order).cumsum(dim=1)
        num_positive, num_rows = of_positives.sum(dim=1, keepdim=True), of_rows.sum(dim=1, keepdim=True)  # [C, 1]
        num_negative = mass_of(pool.negative, pool).sum(dim=1, keepdim=True)
        last_of_tie = torch.ones_like(pool.positive)
        # Compared, not subtracted: the difference of two equal infinities is NaN.
        last_of_tie[:, :-1] = scores[:, 1:] != scores[:, :-1]
        tpr = positives / torch.where(num_positive > 0, num_positive, 1.0)
        spent = rows / num_rows
        if self.budget_basis == "fpr":
            spent = (rows - positives) / torch.where(num_negative > 0, num_negative, 1.0)
        area = _area_between(spent, tpr, last_of_tie, self.alpha, self.beta)
        valid = (num_positive > 0) & (num_negative > 0)
        return PerClass(area / (self.beta - self.alpha), valid[:, 0])
