"""What the ranking metrics share: their state, the checks of their inputs, and the average over classes."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, Literal, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.utilities import rank_zero_warn

from ..errors import Words, check_count, check_int, expected
from ..losses.arguments import completed
from ..losses.pooled.base import RankingLoss
from ..losses.pooled.pool import Pool, local_pool
from ..losses.rows import Batch, TargetRule, check_batch, compute_dtype
from .review_curve import ReviewCurve
from .torchmetrics_private import GatheredMetric

Average = Literal["macro"] | None
Array = NDArray[Any]

_NO_QUERY = torch.iinfo(torch.int64).min  # stands for the query of a row in an update without indexes
_IGNORE_NONE = -1  # an ignore_index that no target has; `update` has dropped the ignored rows


@completed(RankingLoss)
class RankingMetric(GatheredMetric):
    """Base of the metrics over all rows seen; a subclass adds its hyper-parameters and its formula.

    Args:
        average: ``"macro"`` for the mean over the valid classes, None for (C,) with NaN where not valid. With
            ``indexes`` over the queries, by sorted indexes.
        **kwargs: arguments of :class:`torchmetrics.Metric`, such as ``process_group`` or ``sync_on_compute``.

    Shape:
        update: logits (N, C), or (N,) when C = 1; targets (N,) or (N, 1), or (N, C) with ``multi_hot``. compute:
        float64 scalar, or (C,) with ``average=None``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, at construction and in ``update``.

    Degenerate:
        A class without a positive, or for the partial area without a negative, is NaN under ``average=None`` and left
        out of the mean; the mean over no class is NaN. A NaN score makes its class NaN, and the mean with it.

    Numerics:
        Every row that is not ignored is kept until :meth:`reset`: 4 * num_classes + 8 bytes for float32 or
        half-precision logits, and 8 each for a weight and an index. The value is computed and returned in float64.

    Distributed:
        Every rank of ``process_group`` must call ``compute``. One small collective checks whether all ranks still have
        the value of the last call; if not, two more gather the rows. A rank without rows, without rows since the last
        call, or without any ``update`` takes part like the others. Every rank gets the value of all rows.
    """

    plot_legend_name = "Class"
    own_arguments: tuple[str, ...] = ()  # the names of the subclass's own arguments, for ``repr``
    ranks_queries = False  # True for a metric that takes ``indexes``
    target_dtype: torch.dtype | None = None  # None for that of class indices

    row_states = "logits", "targets", "weights", "indexes"
    logits: list[Tensor]
    targets: list[Tensor]
    weights: list[Tensor]
    indexes: list[Tensor]
    target_rule: Tensor

    def __init__(
        self, num_classes: int, average: Average, ignore_index: int, multi_hot: bool = False, **kwargs: Any
    ) -> None:
        check_count("num_classes", num_classes, 1)
        check_int("ignore_index", ignore_index)
        if average not in ("macro", None):
            raise ValueError(expected("average", "'macro' or None", average))
        super().__init__(**kwargs)
        self.num_classes, self.average, self.ignore_index = num_classes, average, ignore_index
        self.multi_hot = multi_hot
        # MetricCollection lets metrics whose states are equal after the first update share one state. Metrics that read
        # targets differently must not share it, so the rule by which targets are read is part of the state.
        rule = torch.tensor([num_classes, ignore_index, int(multi_hot)])
        self.add_state("target_rule", default=rule, dist_reduce_fx="max")

    @completed(local_pool)
    def update(
        self,
        logits: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        preds: Tensor | None = None,
        target: Tensor | None = None,
        sample_weight: Tensor | None = None,
        indexes: Tensor | None = None,
    ) -> None:
        """Add rows.

        Args:
            logits: (N, C) raw scores of any floating dtype, or (N,) when C = 1; half precision is kept as float32.
            sample_weight: (N,) >= 0: a row weighs as much as w rows, and weight 0 leaves it out. None for 1.
            indexes: (N,) integers, the query of each row, in every update and on every rank or in none; the rows of a
                query may be in several. For :class:`PAUCAtBudget` alone, with ``num_classes=1``.
            preds, target: other names of ``logits`` and ``targets``, those of torchmetrics.

        Raises:
            TypeError: for logits that are not floating, and for arguments that are missing or given twice.
            ValueError: for shapes that do not fit, tensors on two devices, or a class index out of range.
        """
        scores = _value_or_alias("logits", logits, "preds", preds)
        classes = _value_or_alias("targets", targets, "target", target)
        if indexes is not None and not self.ranks_queries:
            raise TypeError(expected("indexes", "None, since this metric ranks one pool", indexes, "Use PAUCAtBudget."))
        try:
            given = Batch(scores, classes, None, sample_weight, indexes)
            batch = check_batch(given, self._rule, weight_dtype=torch.float64)
        except (TypeError, ValueError) as error:  # with the names that the caller used
            of_logits, of_targets = "logits" if preds is None else "preds", "targets" if target is None else "target"
            names = {"logits": of_logits, "targets": of_targets}
            message = re.sub(r"\b(logits|targets)\b", lambda match: names[match[0]], str(error))
            raise type(error)(message) from None
        kept = batch.logits.detach().to(compute_dtype(batch.logits.dtype))
        rows: list[Tensor | None] = [kept, batch.targets, batch.sample_weight, batch.indexes]
        if not batch.complete:
            is_kept = batch.targets != self.ignore_index
            is_kept = is_kept.any(dim=1) if self.multi_hot else is_kept
            rows = [None if row is None else row[is_kept] for row in rows]
        self._add(*rows)

    def _add(self, *rows: Tensor | None) -> None:
        """Add checked rows of each state; None stands for weights of 1 and for no query."""
        scores = rows[0]
        assert scores is not None
        for name, row, missing in zip(self.row_states, rows, (0, 0, 1.0, _NO_QUERY)):
            # One number in all places takes no memory.
            given = _number(missing, scores.device).expand(scores.shape[0]) if row is None else row
            getattr(self, name).append(given)

    def compute(self) -> Tensor:
        """Return the metric over the rows of all updates, and of all ranks when it synchronizes."""
        rows = self.rows()
        if self.has_rows_of_all_ranks and len(rows[0]) == 0:
            rank_zero_warn(
                f"The ``compute`` method of metric {type(self).__name__} found no row on any rank: the value is NaN.",
                UserWarning,
            )
        with numpy.errstate(divide="ignore", invalid="ignore"):  # of classes that are not valid
            values, valid = self.compute_per_class(self._make_pool(*rows))
            counted = valid | numpy.isnan(values)
            # The mean over no class is NaN.
            mean = self.average is not None
            result = values[counted].sum() / counted.sum() if mean else numpy.where(counted, values, math.nan)
        if self.result_shape != result.shape:  # an attribute of a module takes 5 us
            self.result_shape = result.shape
        return torch.as_tensor(result, device=rows[0].device)

    def compute_per_class(self, pool: Pool) -> tuple[Array, Array]:
        """Return the value of each class or query, NaN if one of its scores is NaN, and which are valid."""
        raise NotImplementedError

    def _make_pool(self, logits: Tensor, targets: Tensor, weights: Tensor, indexes: Tensor) -> Pool:
        rule = self._rule if self.multi_hot else TargetRule(self.num_classes, _IGNORE_NONE)
        queries, of_rows = None if _is_one_number(indexes) else indexes, None if _is_one_number(weights) else weights
        if queries is not None:
            is_missing = queries == _NO_QUERY
            queries = None if is_missing.all() else queries  # without rows too
            if queries is not None and is_missing.any():
                what, got = "the query of each row in every update and on every rank, or in none", Words("both")
                raise ValueError(expected("indexes", what, got))
        return Pool(Batch(logits, targets, None, of_rows, queries, complete=not self.multi_hot, rule=rule))

    def rows(self) -> tuple[Tensor, ...]:
        """Return all rows of each state: logits (M, C) float64, targets, weights (M,) float64, indexes (M,) int64."""
        dtypes = torch.float64, self.target_dtype or self._rule.dtype, torch.float64, torch.int64
        if self.logits:
            return tuple([_joined(getattr(self, name)).to(dtype) for name, dtype in zip(self.row_states, dtypes)])
        device = torch.device("cpu") if self.compute_on_cpu else self.device
        shapes = (0, self.num_classes), (0, self.num_classes) if self.multi_hot else (0,), (0,), (0,)
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes))

    @property
    def _rule(self) -> TargetRule:
        return TargetRule(self.num_classes, self.ignore_index, self.multi_hot)

    def extra_repr(self) -> str:
        names = ("num_classes", *self.own_arguments, "average", "ignore_index", "multi_hot")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class ReviewedMetric(RankingMetric):
    """Base of the metrics of one pool, whose rows are reviewed from the highest score on."""

    def review_curve(self, class_index: int = 0) -> ReviewCurve:
        """Return precision, recall and threshold over the review budget, of one class; a collective like ``compute``.

        Raises:
            TypeError, ValueError: for a class that does not exist; on every rank, for a score that is NaN.
        """
        if not 0 <= check_int("class_index", class_index) < self.num_classes:
            raise ValueError(expected("class_index", f"0 to {self.num_classes - 1}", class_index))
        pool = self._make_pool(*self.synchronized_rows())
        member = pool.everyone[class_index]
        scores, positive = pool.scores[class_index][member], pool.positive[class_index][member]
        if scores.isnan().any():
            raise ValueError(expected(f"the scores of class {class_index}", "numbers", Words("NaN")))
        return ReviewCurve.of(scores, positive, None if pool.key_weight is None else pool.key_weight[member])


class Ranked(NamedTuple):
    """The rows of each class, or of each query, one after the other, from the highest score to the lowest.

    An accelerator sorts them; all else is on the host, where numpy takes a quarter of the time of torch for few rows.
    There are G classes or queries, and K rows of all.
    """

    scores: Array  # [K]
    positive: Array  # [K] bool
    mass: Array | None  # [K] float64, what a row counts as; None for 1
    bounds: Array  # [G + 1] int64, where the rows of each class or query begin, and the last ones end

    @staticmethod
    def of(pool: Pool) -> Ranked:
        """Return the members of ``pool``; queries are those with a member, in sorted order."""
        weight, member = pool.key_weight, pool.member
        kept: Any = None
        if pool.indexes is None:
            order = _descending(pool.scores)
            scores, positive = pool.scores.gather(1, order), pool.positive.gather(1, order)
            mass = None if weight is None else weight[order]
            kept = None if member is None else member.gather(1, order).cpu().numpy()
            number, size = scores.shape
            bounds = numpy.arange(number + 1) * size if kept is None else _so_far(kept.sum(axis=1))
        else:
            order = _descending(pool.scores)[0]
            order = order if member is None else order[member[0, order]]
            _, query, counts = pool.indexes[order].unique(return_inverse=True, return_counts=True)
            rows, bounds = order[query.argsort(stable=True)], _so_far(counts.cpu().numpy())
            scores, positive = pool.scores[0, rows], pool.positive[0, rows]
            mass = None if weight is None else weight[rows]
        columns = [column if column is None else column.cpu().numpy() for column in (scores, positive, mass)]
        of_rows: Any = [c if c is None else c.ravel() if kept is None else c[kept] for c in columns]
        return Ranked._make((*of_rows, bounds))

    @property
    def stops(self) -> Array:
        """How many rows there are up to the end of each run of equal scores, (R + 1,) with a 0 before."""
        is_stop = numpy.zeros(len(self.scores) + 1, dtype=bool)
        # Compared, not subtracted: the difference of two equal infinities is NaN.
        numpy.not_equal(self.scores[1:], self.scores[:-1], out=is_stop[1:-1])
        is_stop[self.bounds] = True
        return is_stop.nonzero()[0]

    def rises(self) -> Rises:
        """Return the runs of equal scores that have a positive."""
        bounds, stops = self.bounds, self.stops
        caught = _so_far(self.positive if self.mass is None else self.mass * self.positive)
        masses = numpy.arange(len(caught)) if self.mass is None else _so_far(self.mass)
        up_to, of_bounds, rows_of_bounds = caught[stops], caught[bounds], masses[bounds]
        runs = (up_to[1:] != up_to[:-1]).nonzero()[0]
        places = stops[numpy.array([runs, runs + 1])]
        group = bounds[1:].searchsorted(places[1])
        rows, positives = masses[places] - rows_of_bounds[group], caught[places] - of_bounds[group]
        return Rises(group, rows, positives, of_bounds[1:] - of_bounds[:-1], rows_of_bounds[1:] - rows_of_bounds[:-1])

    def result(self, values: Array, valid: Array) -> tuple[Array, Array]:
        """Return ``values`` (G,), 0 where not ``valid``, and NaN where a score is, and ``valid``."""
        values, is_nan = numpy.where(valid, values, 0.0), numpy.isnan(self.scores)
        if numpy.count_nonzero(is_nan):  # `any` takes ten times as long for few rows
            values[numpy.searchsorted(self.bounds[1:], is_nan.nonzero()[0], side="right")] = math.nan
        return values, valid


class Rises(NamedTuple):
    """R runs of equal scores with a positive, and what their classes or queries have; weights where given."""

    group: Array  # [R] the class or query
    rows: Array  # [2, R] its rows above the run, and those up to the end of the run
    positives: Array  # [2, R] its positives among them
    num_positive: Array  # [G]
    num_rows: Array  # [G]

    def sum_of(self, values: Array) -> Array:
        return numpy.bincount(self.group, values, minlength=len(self.num_rows))


def _descending(scores: Tensor) -> Tensor:
    """Return the columns of ``scores`` (C, M) from the highest score to the lowest, row by row."""
    if scores.is_cpu:  # numpy sorts without branches where the processor can
        return torch.from_numpy(numpy.negative(scores.numpy(), order="C").argsort(axis=1))
    return scores.argsort(dim=1, descending=True)


def _so_far(numbers: Array) -> Array:
    """Return the sums of the first 0, 1, 2, ... ``numbers``."""
    sums = numpy.zeros(len(numbers) + 1, dtype=float if numbers.dtype.kind == "f" else int)
    numpy.add.accumulate(numbers, out=sums[1:])
    return sums


@functools.cache
def _number(number: int | float, device: torch.device) -> Tensor:
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64, device=device)


def _is_one_number(row: Tensor) -> bool:
    """Return True for the row of an argument that was not passed: one number in all places."""
    return row.stride() == (0,)


def _joined(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if len(parts[0]) and all(map(_is_one_number, parts)):
        return parts[0][:1].expand(sum(map(len, parts)))
    return torch.cat(parts)


def mass_of(mask: Tensor, pool: Pool) -> Tensor:
    """Return what each row of ``mask`` (C, M) counts as, float64, 0 for the others."""
    return mask.double() if pool.key_weight is None else mask * pool.key_weight


def _value_or_alias(name: str, value: Tensor | None, alias_name: str, alias: Tensor | None) -> Tensor:
    """Return the argument ``name``, which the caller may also pass as ``alias_name``."""
    if (value is None) == (alias is None):
        got = Words("neither" if value is None else "both")
        raise TypeError(expected(name, f"{name} or {alias_name}", got, "Pass one of them."))
    return alias if value is None else value  # type: ignore[return-value]
