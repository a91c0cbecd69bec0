"""Exact metrics of rerankers: each query ranks its own rows. No loop over queries, O(N log N) time and O(N) memory."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import check_choice, check_count
from ..losses.arguments import completed
from ..losses.pooled.ndcg import checked_grades, relevance_check
from ..losses.pooled.pool import Pool
from .ranking_metric import Array, Average, Ranked, RankingMetric


@completed()
class QueryMetric(RankingMetric):
    """Base of the metrics of the rows of each query.

    Args:
        k: how many rows of a query are looked at; None for all.
        average: ``"macro"`` for the mean over the valid queries, None for (queries,) with NaN where not valid, by
            sorted indexes.

    Shape:
        update: logits (N,) or (N, 1), targets and indexes (N,). compute: float64 scalar, or (queries,).

    Degenerate:
        A query without a relevant row is NaN under ``average=None`` and left out of the mean; the mean over no query is
        NaN. A NaN score makes its query NaN, and the mean with it. Of equal scores the rows that are not relevant come
        first.
    """

    own_arguments: tuple[str, ...] = ("k",)
    ranks_queries = True

    def __init__(
        self, k: int | None = None, *, average: Average = "macro", ignore_index: int = -100, **kwargs: Any
    ) -> None:
        super().__init__(1, average, ignore_index, **kwargs)
        self.k = k if k is None else check_count("k", k, 1)

    def update(  # type: ignore[override]
        self,
        logits: Tensor | None = None,
        targets: Tensor | None = None,
        indexes: Tensor | None = None,
        *,
        preds: Tensor | None = None,
        target: Tensor | None = None,
    ) -> None:
        """Add rows.

        Args:
            logits: (N,) or (N, 1) raw scores of any floating dtype.
            targets: (N,) or (N, 1), 1 for relevant rows, 0, or ``ignore_index``.
            indexes: (N,) integers, the query of each row, in every update and on every rank; in none if all rows are of
                one query. The rows of a query may be in several updates and on several ranks.
            preds, target: other names of ``logits`` and ``targets``, those of torchmetrics.
        """
        super().update(logits, targets, preds=preds, target=target, indexes=indexes)


@completed()
class QueryReciprocalRank(QueryMetric):
    """Mean reciprocal rank: 1 over the rank of the first relevant row of a query, 0 beyond the first k rows.

    Example:
        >>> import torch
        >>> metric = QueryReciprocalRank()
        >>> metric.update(torch.tensor([3.0, 2.0, 1.0, 5.0]), torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 0, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    def compute_per_class(self, pool: Pool) -> tuple[Array, Array]:
        ranked = Ranked.of(pool)
        rises = ranked.rises()
        first = numpy.full(len(rises.num_rows), math.inf)
        numpy.minimum.at(first, rises.group, rises.rows[1] - (rises.positives[1] - rises.positives[0]) + 1)
        return ranked.result((first <= (self.k or math.inf)) / first, rises.num_positive > 0)


@completed()
class QueryRecall(QueryMetric):
    """Recall at k: the share of the relevant rows of a query that are among its first k, averaged over queries.

    Example:
        >>> import torch
        >>> metric = QueryRecall(k=2)
        >>> metric.update(torch.tensor([3.0, 2.0, 1.0, 5.0]), torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 0, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    def compute_per_class(self, pool: Pool) -> tuple[Array, Array]:
        ranked = Ranked.of(pool)
        rises = ranked.rises()
        number = rises.positives[1] - rises.positives[0]  # [R] of a run, which come last in it
        above = rises.rows[1] - number
        found = ((self.k or math.inf) - above).clip(0.0, number)
        return ranked.result(rises.sum_of(found) / rises.num_positive, rises.num_positive > 0)


@completed()
class QueryNDCG(QueryMetric):
    """Normalised discounted cumulative gain of graded rows, averaged over queries; the counterpart of ``NDCGLoss``.

    Equal to the mean of ``sklearn.metrics.ndcg_score`` of the queries: rows of equal scores share their discounts.

    Args:
        gain: of a relevance r: ``"linear"``, r, or ``"exponential"``, 2^r - 1.

    Degenerate:
        A query without a relevance above 0 is NaN under ``average=None`` and left out of the mean; the mean over no
        query is NaN. A NaN score makes its query NaN, and the mean with it.

    Example:
        >>> import torch
        >>> metric = QueryNDCG()
        >>> metric.update(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 3]), torch.tensor([0, 0, 0]))
        >>> metric.compute()
        tensor(0.5869, dtype=torch.float64)
    """

    own_arguments = "k", "gain"
    target_dtype = torch.float64

    def __init__(
        self,
        k: int | None = None,
        *,
        gain: Literal["linear", "exponential"] = "linear",
        average: Average = "macro",
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> None:
        super().__init__(k, average=average, ignore_index=ignore_index, **kwargs)
        self.gain = check_choice("gain", gain, ("linear", "exponential"))
        # Metrics of classes may not share the state, since they refuse grades.
        self.add_state("target_rule", default=torch.tensor([0, ignore_index, 0]), dist_reduce_fx="max")

    def update(  # type: ignore[override]
        self, logits: Tensor, relevance: Tensor, indexes: Tensor | None = None
    ) -> None:
        """Add rows.

        Args:
            relevance: (N,) or (N, 1) numbers >= 0, or ``ignore_index``; higher is more relevant.
        """
        scores, grades, queries = checked_grades(logits, relevance, indexes)
        check = relevance_check(grades, self.gain, self.ignore_index)
        if check is not None:
            check.read()
        kept = grades != self.ignore_index
        self._add(scores.detach()[kept, None], grades[kept].double(), None, None if queries is None else queries[kept])

    def compute_per_class(self, pool: Pool) -> tuple[Array, Array]:
        grades = pool.rows.targets.double()
        pool.positive, pool.member = (grades.exp2() - 1 if self.gain == "exponential" else grades)[None], None
        ranked = Ranked.of(pool)
        gains, bounds, stops = map(torch.from_numpy, (ranked.positive, ranked.bounds, ranked.stops))
        sizes = bounds.diff()
        query = torch.arange(len(sizes), device=bounds.device).repeat_interleave(sizes)  # [K]
        ideal = gains.argsort(descending=True)
        ideal = gains[ideal[query[ideal].argsort(stable=True)]]
        discount = 1 / torch.arange(2, len(gains) + 2, dtype=torch.float64, device=gains.device).log2()
        discount = discount.where(torch.arange(len(gains), device=gains.device) < (self.k or math.inf), 0.0)
        so_far, first = F.pad(discount.cumsum(0), (1, 0)), bounds[query]
        places, number = torch.arange(len(gains), device=gains.device) - first, stops.diff()
        starts = stops[:-1].repeat_interleave(number) - first  # of the run of equal scores of each row
        number = number.repeat_interleave(number)
        shared = (so_far[starts + number] - so_far[starts]) / number
        sums = gains.new_zeros(2, len(sizes)).index_add_(
            1, query, torch.stack([gains * shared, ideal * discount[places]])
        )
        return ranked.result((sums[0] / sums[1]).numpy(), (sums[1] > 0).numpy())
