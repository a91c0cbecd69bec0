"""Exact partial area under the ROC curve, over a band of false-positive rates."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..losses.partial_area import BudgetBasis, PartialArea, check_area
from ..losses.pool import PerClass, Pool
from .ranking_metric import Average, RankingMetric


class _Counts(NamedTuple):
    """Rows flagged by a threshold just below each score, best first. Of tied scores only the last is a threshold."""

    positives: Tensor  # [C, M]
    rows: Tensor  # [C, M]
    last_of_tie: Tensor  # [C, M] bool


def _count_flagged(pool: Pool) -> _Counts:
    """Count the flagged rows for every threshold of every class. Rows that are no members count nowhere."""
    scores, order = pool.scores.sort(dim=1, descending=True)
    positives = pool.positive.gather(1, order).cumsum(dim=1)
    if pool.member is None:
        rows = torch.arange(1, scores.shape[1] + 1, device=scores.device).expand_as(positives)
    else:
        rows = pool.member.gather(1, order).cumsum(dim=1)
    last_of_tie = torch.ones_like(pool.positive)
    # Compared, not subtracted: the difference of two equal infinities is NaN.
    last_of_tie[:, :-1] = scores[:, 1:] != scores[:, :-1]
    return _Counts(positives, rows, last_of_tie)


def _area_between(x: Tensor, y: Tensor, vertex: Tensor, alpha: float, beta: float) -> Tensor:
    """Return the area under the polyline through (0, 0) and the vertices, for x in [alpha, beta].

    Args:
        x: (C, M) >= 0, not decreasing along a row.
        y: as x.
        vertex: (C, M) bool, the points that are vertices.

    Shape:
        output (C,).
    """
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


def exact_pauc(pool: Pool, band: PartialArea) -> PerClass:
    """Return the partial area of each class of ``pool``, over the width of the band."""
    flagged = _count_flagged(pool)
    positives, negatives = pool.positive.sum(dim=1, keepdim=True), pool.negative.sum(dim=1, keepdim=True)  # [C, 1]
    tpr = flagged.positives.to(pool.scores) / positives.clamp_min(1)
    if band.budget_basis == "fpr":
        spent = (flagged.rows - flagged.positives).to(pool.scores) / negatives.clamp_min(1)
    else:
        spent = flagged.rows.to(pool.scores) / (positives + negatives)
    area = _area_between(spent, tpr, flagged.last_of_tie, band.alpha, band.beta)
    return PerClass(area / (band.beta - band.alpha), ((positives > 0) & (negatives > 0))[:, 0])


class PAUCAtBudget(RankingMetric):
    r"""Mean true-positive rate over a band of false-positive rates: the partial area under the ROC curve, normalized.

    Equal, for ``alpha=0, beta=1``, to ``sklearn.metrics.roc_auc_score``; O(N log N) time and O(N C) memory.

    .. math:: \frac{1}{\beta - \alpha} \int_\alpha^\beta \mathrm{TPR}(u) \, du

    with u the false-positive rate, or the share of all rows that are flagged. The integral of the empirical curve is
    exact. The curve has a point for each distinct score, so tied rows are one step, and straight lines between the
    points. The area is not standardized as McClish does: a random ranking has (alpha + beta) / 2, and a perfect one has
    1, or less than 1 under ``"population"``, where positives use up part of the budget.

    The exact counterpart of :class:`~fullrank.losses.PAUCAtBudgetLoss`. It keeps every row until :meth:`reset`,
    4 * num_classes + 8 bytes for each. The value is float64.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        alpha, beta: the band of false-positive rates, 0 <= alpha < beta <= 1.
        budget_basis: what u is a share of: the negatives (``"fpr"``), or all rows (``"population"``).
        average: ``"macro"`` for the mean over the valid classes, None for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        **kwargs: arguments of :class:`torchmetrics.Metric`, such as ``process_group`` or ``sync_on_compute``.

    Shape:
        update: logits (N, C), or (N,) when C = 1; targets (N,) or (N, 1), or (N, C) with ``multi_hot``. compute:
        float64 scalar, or (C,) with ``average=None``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, at construction and in ``update``.

    Degenerate:
        A class without a positive or without a negative is NaN under ``average=None`` and left out of the mean; the
        mean over no class is NaN. A NaN score makes its class NaN, and the mean with it.

    Distributed:
        As for :class:`~fullrank.metrics.RecallAtQuantile`: every rank gets the value of one process with all rows.

    Example:
        >>> import torch
        >>> metric = PAUCAtBudget(num_classes=1, beta=0.5)
        >>> metric.update(torch.tensor([[4.0], [3.0], [2.0], [1.0]]), torch.tensor([1, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)

    Reference:
        McClish, Analyzing a Portion of the ROC Curve, Medical Decision Making, 1989.
    """

    def __init__(
        self,
        num_classes: int,
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
        check_area(self.band)

    @property
    def band(self) -> PartialArea:
        """The arguments that define the partial area."""
        return PartialArea(self.alpha, self.beta, surrogate="trapezoid", budget_basis=self.budget_basis)

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the partial area of each class."""
        return exact_pauc(pool, self.band)

    def _own_arguments(self) -> tuple[str, ...]:
        return "alpha", "beta", "budget_basis"
