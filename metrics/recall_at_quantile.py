"""Exact recall above a quantile of the scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import check_choice, check_share, warn
from ..kernels.quantiles import INTERPOLATIONS, upper_levels
from ..losses.arguments import completed
from ..losses.pooled.pauc_surrogates import PartialArea
from ..losses.pooled.pool import Pool, propagate_nan
from ..losses.rows import has_values
from .ranking_metric import Array, Average, ReviewedMetric, mass_of

_TIED = 0.1  # of the rows, beyond the quantile
_FEW_ROWS = 100  # with fewer rows a few ties are a tenth


@completed(PartialArea)
class RecallAtQuantile(ReviewedMetric):
    r"""Share of the positives that score at or above the (1 - q) quantile of all scores, so that they are reviewed.

    Equal to ``(scores[positive] >= torch.quantile(scores, 1 - q, interpolation="higher")).mean()`` for each class;
    O(N) time for small q, O(N C) memory.

    .. math:: \frac{1}{|P|} \sum_{i \in P} [x_i \ge \theta], \quad \theta = Q_{1-q}(x)

    The exact counterpart of :class:`~fullrank.losses.RecallAtQuantileLoss`. At q = 0.005 the threshold is the highest
    score until there are about 200 rows. With ``quantile_interpolation="higher"`` the row at the threshold and its ties
    are reviewed, so equal scores, as of a network that has collapsed, have a recall of 1: ``compute`` warns once where
    ties add a tenth of the rows or more. Ignored rows do not move the threshold. With weights it is the weighted
    quantile of :func:`~fullrank.losses.recall_at_quantile`.

    Args:
        quantile: q in (0, 1), the share of rows that can be reviewed.

    Example:
        >>> import torch
        >>> metric = RecallAtQuantile(num_classes=1, quantile=0.5)
        >>> metric.update(torch.tensor([[3.0], [2.0], [1.0], [0.0]]), torch.tensor([1, 0, 1, 0]))
        >>> metric.compute()
        tensor(0.5000, dtype=torch.float64)
    """

    own_arguments = "quantile", "quantile_interpolation"
    _has_warned = False

    def __init__(
        self,
        num_classes: int = 1,
        quantile: float = 0.005,
        *,
        quantile_interpolation: str = "higher",
        average: Average = "macro",
        ignore_index: int = -100,
        multi_hot: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_classes, average, ignore_index, multi_hot, **kwargs)
        self.quantile = check_share("quantile", quantile)
        self.quantile_interpolation = check_choice("quantile_interpolation", quantile_interpolation, INTERPOLATIONS)

    def compute_per_class(self, pool: Pool) -> tuple[Array, Array]:
        rule = [self.quantile], self.quantile_interpolation
        threshold = upper_levels(pool.scores, pool.member, *rule, weight=pool.key_weight)  # [C, 1]
        positives = mass_of(pool.positive, pool)  # [C, M]
        reached, _ = threshold.compare(pool.scores)
        self._warn_of_ties(pool, reached)
        total = positives.sum(dim=1)  # [C]
        recall = (positives * reached).sum(dim=1) / torch.where(total > 0, total, 1.0)
        # An interpolation between -inf and another score has no value. NaN shows that; a recall of 0 would hide it.
        recall = recall.masked_fill(threshold.value[:, 0].isnan() & (total > 0), math.nan)
        return propagate_nan(recall, pool).cpu().numpy(), (total > 0).cpu().numpy()

    def _warn_of_ties(self, pool: Pool, reached: Tensor) -> None:
        if self._has_warned or pool.scores.shape[1] < _FEW_ROWS or not has_values(reached):
            return
        rows = mass_of(pool.everyone, pool)
        share = float(((rows * reached).sum(dim=1) / rows.sum(dim=1)).nan_to_num(0.0).max())
        if share > self.quantile + _TIED:
            self._has_warned = True
            warn(
                f"RecallAtQuantile: {100 * share:.0f} % of the rows reach the threshold of quantile={self.quantile:g}, "
                "because scores are equal, and all of them count as reviewed. Equal scores of all rows have a recall "
                "of 1: look at the average precision too, and do not choose a model by this value."
            )
