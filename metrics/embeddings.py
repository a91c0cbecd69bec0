"""Exact metrics of embeddings with labels: each query ranks the rows of all ranks, without the matrix of all pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.global_mean import global_sum
from ..distributed.group import resolve_group
from ..errors import check_count, check_flag, check_int, expected, warn
from ..kernels.registration import exact
from ..losses.arguments import completed
from ..losses.embeddings.base import blocks_of_scores
from ..losses.embeddings.retrieval import checked_labels
from ..losses.rows import checked_embeddings, unit_rows
from .torchmetrics_private import GatheredMetric

_BOTH, _QUERY, _KEY = range(3)  # what a row is
_PAIRED = torch.iinfo(torch.int64).min  # stands for the label of a pair until all pairs are numbered
_FEWEST_PAIRS = 16  # with fewer, labels of few classes may look like numbers


@completed()
class EmbeddingMetric(GatheredMetric):
    """Base of the metrics of embeddings: a query ranks all other rows by cosine; those of its label are right.

    Args:
        num_features: D, on every rank if one may have no rows; else None.
        ignore_index: rows with this label take no part.
        **kwargs: arguments of :class:`torchmetrics.Metric`, such as ``process_group`` or ``sync_on_compute``.

    Degenerate:
        A query without another row of its label is left out; the mean over no query is NaN, and so is that with a row
        that is not finite. Of equally similar rows the wrong ones come first, as far as float32 has copies of a row
        equally similar: a product may round them differently.

    Numerics:
        Rows are kept in float32 until :meth:`reset`, and compared in it. O(N M D) time and O(M D) memory for N queries
        and M rows.

    Distributed:
        Every rank must call ``compute``. A header, the rows, and the sums of each rank over its part of the queries.
        Every rank gets the same value.
    """

    own_argument: str  # that of the subclass, for ``repr``
    num_values = 1  # L, of a query
    row_states = "embeddings", "labels", "roles"
    embeddings: list[Tensor]
    labels: list[Tensor]
    roles: list[Tensor]

    def __init__(self, num_features: int | None, ignore_index: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_features = num_features if num_features is None else check_count("num_features", num_features, 1)
        self.ignore_index = check_int("ignore_index", ignore_index)

    def update(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        *,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
    ) -> None:
        """Add rows, each a query that ranks all others, or with ``references`` queries and the rows that they rank.

        The references of all updates and ranks are ranked for every query. Updates of queries alone, or of references
        alone, pass (0, D) for the other. For pairs, such as images and texts, leave the labels out: row i of the
        references is right for row i of the embeddings, in this update on this rank alone.

        Args:
            embeddings: (N, D) of any floating dtype.
            labels: (N,) or (N, 1) integers or bools, with one meaning in all updates and on all ranks. None for pairs.
            references: (M, D), the rows to rank; they are no queries. M is N for pairs.
            reference_labels: (M,) or (M, 1); None for pairs.
        """
        if (references is None) != (reference_labels is None) and labels is not None:
            missing = "references" if references is None else "reference_labels"
            raise ValueError(expected(missing, "a tensor, because the other one is given", None, "Pass both or none."))
        is_paired = references is not None and reference_labels is None and len(references) == len(embeddings)
        if labels is None and not is_paired:
            fix = "Without labels row i of the references is right for row i of the embeddings."
            raise ValueError(expected("labels", "a tensor, or None for as many references without labels", None, fix))
        parts = [("embeddings", embeddings, labels, _BOTH if references is None else _QUERY)]
        if references is not None:
            parts.append(("references", references, reference_labels, _KEY))
        width, added = self.embeddings[0].shape[1] if self.embeddings else self.num_features, []
        for name, given, its_labels, role in parts:
            rows = checked_embeddings(name, given)
            if width not in (None, rows.shape[1]):
                raise ValueError(expected(name, f"shape (N, {width}), as num_features or the other rows", rows))
            if its_labels is None:
                targets = torch.full((len(rows),), _PAIRED, device=rows.device)
            else:
                targets = checked_labels(its_labels, rows, name)
            kept, width = targets != self.ignore_index, rows.shape[1]
            added.append((unit_rows(rows.detach().float()[kept]), targets[kept], role))
        for unit, targets, role in added:
            self.embeddings.append(unit)
            self.labels.append(targets)
            self.roles.append(torch.full_like(targets, role))

    def compute(self) -> Any:
        """Return the mean over the queries of all updates, and of all ranks when it synchronizes; float64."""
        rows, labels, roles = self.rows()
        for role in (_QUERY, _KEY):  # every update has added as many queries as references, in the same order
            (pairs,) = ((labels == _PAIRED) & (roles == role)).nonzero(as_tuple=True)
            labels = labels.index_add(0, pairs, torch.arange(len(pairs), device=labels.device))
        _warn_of_numbers(type(self).__name__, labels[roles == _QUERY], labels[roles == _KEY])
        (queries,), (keys,) = (roles != _KEY).nonzero(as_tuple=True), (roles != _QUERY).nonzero(as_tuple=True)
        group = None
        if self.has_rows_of_all_ranks and self.dist_sync_fn is None:
            group = resolve_group(self.process_group, name="process_group")
            queries = queries[group.rank() :: group.size()]
        sums = exact(self._sums)(rows, labels, queries, keys)
        total = sums if group is None else global_sum(sums, group)
        if len(rows) and total[-1] == 0:
            warn(f"{type(self).__name__}: no query has another row of its label, so that the mean over them is NaN.")
        values = total[:-1] / total[-1]
        return self._result(values if bool(rows.isfinite().all()) else values * math.nan)

    def _result(self, values: Tensor) -> Any:
        """Return what ``compute`` does, from the means (L,)."""
        return values[0]

    @torch.no_grad()
    def _sums(self, rows: Tensor, labels: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the sums of the values of the queries (L,), and the number of valid ones after them, float64."""
        candidates, of_candidates = rows[keys], labels[keys]
        sums = torch.zeros(self.num_values + 1, dtype=torch.float64, device=rows.device)
        for place, _, scores in blocks_of_scores(rows[queries], candidates, fewest=1):
            block = queries[place]
            scores.masked_fill_(block[:, None] == keys, -math.inf)  # a query does not rank itself
            right = (labels[block, None] == of_candidates) & (block[:, None] != keys)
            valid = right.any(dim=1)
            values = self._values(scores[valid], right[valid])  # [b, L]
            sums[:-1] += values.sum(dim=0, dtype=torch.float64)
            sums[-1] += valid.sum()
        return sums

    def _values(self, scores: Tensor, right: Tensor) -> Tensor:
        """Return the values (b, L) of queries from their scores (b, K), of which at least one is ``right``."""
        raise NotImplementedError

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all rows: (M, D) float32 of length 1, (M,) and (M,) int64."""
        if self.embeddings:
            return torch.cat(self.embeddings), torch.cat(self.labels), torch.cat(self.roles)
        labels = torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.empty(0, self.num_features or 0, device=self.device), labels, labels.clone()

    def extra_repr(self) -> str:
        return f"{self.own_argument}={getattr(self, self.own_argument)!r}, ignore_index={self.ignore_index}"


def _warn_of_numbers(metric: str, queries: Tensor, keys: Tensor) -> None:
    """Warn if the labels of pairs begin again at 0 on other ranks or in other updates."""
    starts = queries == 0
    if len(queries) < _FEWEST_PAIRS or not 1 < int(starts.sum()) <= len(queries) / 2 or not torch.equal(queries, keys):
        return
    if bool(starts[0] & (starts[1:] | (queries[1:] == queries[:-1] + 1)).all()):
        warn(
            f"{metric}: the labels are 0, 1, 2, ... again and again. If they number the pairs of a batch, pairs of "
            "other updates and ranks get the same label: leave labels and reference_labels out."
        )


class _AtK(EmbeddingMetric):
    """Base of the metrics of the first k rows.

    Args:
        k: numbers >= 1: ``compute`` returns a dictionary with a scalar for each. Or one number: it returns a
            scalar, which a MetricCollection with a prefix needs.
    """

    own_argument = "k"

    def __init__(
        self,
        k: int | Sequence[int] = (1, 5, 10),
        *,
        num_features: int | None = None,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> None:
        numbers = tuple(k) if isinstance(k, Sequence) and not isinstance(k, str) else (k,)
        if not numbers:
            raise ValueError(expected("k", "at least one number", k))
        super().__init__(num_features, ignore_index, **kwargs)
        checked = tuple(check_count("k", number, 1) for number in numbers)
        self.k = checked if isinstance(k, Sequence) else checked[0]
        self.num_values = len(checked)

    def _result(self, values: Tensor) -> Any:
        return dict(zip(self.k, values.unbind())) if isinstance(self.k, tuple) else values[0]


@completed()
class EmbeddingRecall(_AtK):
    r"""Recall at k: the share of the queries with a row of their label among the k most similar rows.

    For the keys of pairs it is the share of the queries whose key is among the first k.

    Example:
        >>> import torch
        >>> metric = EmbeddingRecall(k=(1, 2))
        >>> metric.update(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        {1: tensor(0.5000, dtype=torch.float64), 2: tensor(1., dtype=torch.float64)}

    Reference:
        Jegou et al., Product Quantization for Nearest Neighbor Search, PAMI 2011.
    """

    def _values(self, scores: Tensor, right: Tensor) -> Tensor:
        first = _first_place(scores, right)
        return first <= first.new_tensor(self.k).reshape(-1)


@completed()
class EmbeddingPrecision(_AtK):
    r"""Precision at k: the share of the k most similar rows that are of the label of the query, averaged over queries.

    The share is of k, also where fewer rows can be ranked.

    Example:
        >>> import torch
        >>> metric = EmbeddingPrecision(k=(1, 2))
        >>> metric.update(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        {1: tensor(0.5000, dtype=torch.float64), 2: tensor(0.5000, dtype=torch.float64)}
    """

    def _values(self, scores: Tensor, right: Tensor) -> Tensor:
        numbers = torch.tensor(self.k, device=scores.device).reshape(-1)
        places = _places(scores, right, max(numbers.tolist()))
        return (places[:, :, None] <= numbers).sum(dim=1) / numbers.double()


@completed()
class EmbeddingReciprocalRank(EmbeddingMetric):
    r"""Mean reciprocal rank: 1 over the rank of the most similar row of the label of the query, averaged over queries.

    Args:
        k: a query without such a row among the first k has the value 0; None for any rank.

    Example:
        >>> import torch
        >>> metric = EmbeddingReciprocalRank()
        >>> metric.update(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    own_argument = "k"

    def __init__(
        self, k: int | None = None, *, num_features: int | None = None, ignore_index: int = -100, **kwargs: Any
    ) -> None:
        super().__init__(num_features, ignore_index, **kwargs)
        self.k = k if k is None else check_count("k", k, 1)

    def _values(self, scores: Tensor, right: Tensor) -> Tensor:
        first = _first_place(scores, right).double()
        return 1 / first if self.k is None else (first <= self.k) / first


@completed()
class EmbeddingAveragePrecision(EmbeddingMetric):
    r"""Mean average precision: each query ranks all other rows, and those of its label should come first.

    With R rows of its label, of which the i-th is at rank :math:`r_i`, the value of a query is
    :math:`\frac{1}{R} \sum_i i / r_i`, over all i, or with ``at_r`` over those with :math:`r_i \le R` (mAP@R).
    It is the exact counterpart of :class:`~fullrank.RetrievalSmoothAPLoss`.

    Args:
        at_r: count only the first R rows.

    Example:
        >>> import torch
        >>> metric = EmbeddingAveragePrecision()
        >>> metric.update(torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.4583, dtype=torch.float64)

    Reference:
        Musgrave et al., A Metric Learning Reality Check, ECCV 2020 (mAP@R).
    """

    own_argument = "at_r"

    def __init__(
        self, at_r: bool = False, *, num_features: int | None = None, ignore_index: int = -100, **kwargs: Any
    ) -> None:
        super().__init__(num_features, ignore_index, **kwargs)
        check_flag("at_r", at_r)
        self.at_r = at_r

    def _values(self, scores: Tensor, right: Tensor) -> Tensor:
        total = right.sum(dim=1, keepdim=True)
        limit = max(total[:, 0].tolist(), default=0) if self.at_r else scores.shape[1]
        places = _places(scores, right, limit)
        shares = torch.arange(1, places.shape[1] + 1, device=scores.device) / (places * total)
        return (shares * (places <= total) if self.at_r else shares).sum(dim=1, keepdim=True)


def _first_place(scores: Tensor, right: Tensor) -> Tensor:
    """Return the place (b, 1) of the first right row among the scores (b, K), 1 for the top of all."""
    best = scores.masked_fill(~right, -math.inf).amax(dim=1, keepdim=True)
    return 1 + ((scores >= best) & ~right).sum(dim=1, keepdim=True)


def _places(scores: Tensor, right: Tensor, limit: int) -> Tensor:
    """Return the places (b, P) of the right rows among the scores (b, K), the best first, float64; inf in the padding.

    Places beyond ``limit`` are only known to be. The wrong rows come first where scores are equal.
    """
    most = min(limit, max(right.sum(dim=1).tolist(), default=0))
    own = scores.masked_fill(~right, -math.inf).topk(most, dim=1).values
    wrong = scores.masked_fill(right, -math.inf)
    wrong = wrong.topk(limit, dim=1).values.flip(1) if limit < wrong.shape[1] else wrong.sort(dim=1).values
    before = wrong.shape[1] - torch.searchsorted(wrong, own)  # wrong rows with at least this score
    places = before + torch.arange(1.0, most + 1, dtype=torch.float64, device=own.device)
    return places.masked_fill(own == -math.inf, math.inf)
