"""Exact partial area under the ROC curve, over a band of false-positive rates."""

from __future__ import annotations

from typing import Any

import numpy

from ..losses.arguments import completed
from ..losses.pooled.pauc_surrogates import BudgetBasis, PartialArea, check_area
from ..losses.pooled.pool import Pool
from .ranking_metric import Array, Average, Ranked, ReviewedMetric

_TINY = numpy.finfo(float).tiny


@completed()
class PAUCAtBudget(ReviewedMetric):
    r"""Mean true-positive rate over a band of false-positive rates: the partial area under the ROC curve, normalized.

    Equal, for ``alpha=0, beta=1``, to ``sklearn.metrics.roc_auc_score``; O(N log N) time and O(N C) memory. With
    ``indexes`` it is the mean over the queries, such as users, of the area of each; those without a positive or without
    a negative are left out.

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
    ranks_queries = True

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

    def compute_per_class(self, pool: Pool) -> tuple[Array, Array]:
        # The curve rises in the runs of equal scores that have a positive, straight from their first row to their last.
        ranked = Ranked.of(pool)
        rises = ranked.rises()
        num_negative, by_negatives = rises.num_rows - rises.num_positive, self.budget_basis == "fpr"
        spent = rises.rows - rises.positives if by_negatives else rises.rows
        begin, end = edges = spent / (num_negative if by_negatives else rises.num_rows)[rises.group]
        left, right = numpy.minimum(numpy.maximum(edges, self.alpha), self.beta)
        # Of the band, what a positive adds: the part beyond its run, and the part of the run that it is above.
        inside = (right - left) * ((left + right) / 2 - begin) / numpy.maximum(end - begin, _TINY)
        gain = (rises.positives[1] - rises.positives[0]) / rises.num_positive[rises.group]
        area = rises.sum_of(gain * (self.beta - right + inside) / (self.beta - self.alpha))
        return ranked.result(area, (rises.num_positive > 0) & (num_negative > 0))
