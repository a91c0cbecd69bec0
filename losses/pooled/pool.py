"""The pool that a ranking loss is computed over, what every formula does with it, and what a call returns."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...distributed.torch_private import note_kind
from ...errors import check_choice, check_int, check_temperature, expected
from ...kernels.spread import spread_of, standardized
from ...kernels.torch_private import func_transforms_are_active
from ..rows import Batch, TargetRule, check_batch, compute_dtype, has_values, may_hold, scaled_weight, weight_unit

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")
Weighting = Literal["rows", "positives"]
WEIGHTINGS = ("rows", "positives")
_ORDINARY = 2.0**-64  # sums of weights between it and its inverse are in range
T = TypeVar("T")


class _Once(Generic[T]):
    """``functools.cached_property`` without its lock, which the compiler cannot trace before Python 3.12."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, pool: Any, owner: type) -> T:
        value = self.make(pool)
        setattr(pool, self.name, value)  # is found before this descriptor from now on
        return value


class Pool:
    """M rows, and one binary problem for each of C classes, whose tensors are made when they are first read.

    Scores outside ``member`` are 0, so that a NaN there cannot reach a sum.

    Args:
        rows: the checked rows, live ones and then queued ones.
        live: (M,) bool, False for queued rows, or the number of the first rows that are live; None for all True.
        queue_keep: with ``"negatives"`` a queued row takes no part in the classes of which it is a positive.
        weighting: what the weights of the rows count in: every sum over rows, or with ``"positives"`` the mean over P.

    Attributes:
        iid: (M,) bool, None for all True.
        indexes: (M,) int64, the query of each row, with C = 1; None for one query.
        num_positive: of a single class; None if the host does not know, as where a row of weight 0 takes no part.
    """

    def __init__(
        self, rows: Batch, live: Tensor | int | None = None, queue_keep: str = "all", weighting: str = "rows"
    ) -> None:
        self.rows, self._live, self.weighting = rows, live, weighting
        self.iid, self.indexes = rows.iid_mask, rows.indexes
        self.num_positive = rows.num_positive if rows.sample_weight is None or weighting != "rows" else None
        self.drops_queued_positives = live is not None and queue_keep == "negatives"
        self._with_grad = torch.is_grad_enabled()  # the scores are made later, in the grad mode of the call

    @property
    def is_of_rows(self) -> bool:
        """Whether no tensor of the classes has been made or assigned, so that a formula may read the rows instead."""
        made = self.__dict__
        return not ("scores" in made or "positive" in made or "member" in made or "weight" in made)

    @_Once
    def live(self) -> Tensor | None:
        """(M,) bool, False for queued rows; None for all True."""
        if not isinstance(self._live, int):
            return self._live
        return torch.arange(self.rows.logits.shape[0], device=self.rows.logits.device) < self._live

    @_Once
    def scores(self) -> Tensor:
        """(C, M) float32 or float64."""
        with torch.set_grad_enabled(self._with_grad):
            scores = self.rows.logits.to(compute_dtype(self.rows.logits.dtype)).t()
            if self.member is None:
                return scores.contiguous()
            return torch.where(self.member, scores, torch.zeros((), dtype=scores.dtype, device=scores.device))

    @_Once
    def positive(self) -> Tensor:
        """(C, M) bool, a subset of member."""
        positive, self.member = self._positive_and_member()
        return positive

    @_Once
    def member(self) -> Tensor | None:
        """(C, M) bool: the row takes part in the class; None for all True."""
        self.positive, member = self._positive_and_member()
        return member

    @_Once
    def weight(self) -> Tensor | None:
        """(M,), of the positives in the mean over P, None for equal weights; only ratios matter, no sum overflows."""
        weight = self.rows.sample_weight
        if weight is None:
            return None
        dtype = compute_dtype(self.rows.logits.dtype)
        if weight.is_cpu and has_values(weight) and weight.numel():
            low, high = map(float, weight.aminmax())
            if self.weighting == "rows" and 0 < low == high:
                return None
            if weight.dtype == dtype and (low == 0 or low > _ORDINARY) and _ORDINARY < high < 1 / _ORDINARY:
                return weight  # as they are, which takes no time
        return scaled_weight(weight, weight_unit(weight), dtype)

    @property
    def key_weight(self) -> Tensor | None:
        """(M,), of the rows in all other sums, > 0 for all members: rows of weight 0 are none; None for all 1."""
        return self.weight if self.weighting == "rows" else None

    @_Once
    def negative(self) -> Tensor:
        """(C, M) bool: the members that are not positives."""
        return ~self.positive if self.member is None else self.member & ~self.positive

    @_Once
    def everyone(self) -> Tensor:
        """(C, M) bool: the members, as a tensor even where all rows are members."""
        return torch.ones_like(self.positive) if self.member is None else self.member

    def queries(self) -> tuple[int, list[tuple[Tensor, Pool]]]:
        """Return the number of queries, and pools of some of them, of which each is a class, with their places."""
        assert self.indexes is not None
        if self.indexes.is_meta:
            fix = "On the meta device the number of queries is unknown; leave indexes out to count operations."
            raise RuntimeError(expected("indexes", "a tensor with values", self.indexes, fix))
        count, blocks = query_blocks(self.indexes)
        found = []
        for block in blocks:
            part = copy.copy(self)
            part.indexes, part.num_positive = None, None
            part.iid = None if self.iid is None else block.take(self.iid)
            part.scores, part.positive = block.take(self.scores[0]), block.take(self.positive[0])
            part.member = block.present if self.member is None else block.take(self.member[0])
            if self.weight is not None and self.rows.sample_weight is not None:
                of_rows = block.take(self.rows.sample_weight)
                part.weight = scaled_weight(of_rows, weight_unit(of_rows, dim=1), self.scores.dtype)
            found.append((block.queries, part))
        return count, found

    def _positive_and_member(self) -> tuple[Tensor, Tensor | None]:
        rows, rule = self.rows, self.rows.rule
        member: Tensor | None
        if rule.multi_hot:
            codes = rows.targets.t()  # [C, M]
            positive, member = rule.marked(codes), codes != rule.ignore_index
        else:
            is_host, member = rows.targets.device.type == "cpu", None
            if rule.num_classes > 1:
                classes = torch.arange(rule.num_classes, device=rows.targets.device)[:, None]
                positive = rows.targets.unsqueeze(0) == classes  # [C, M]
            elif is_host and has_values(rows.targets) and not func_transforms_are_active():
                positive = torch.from_numpy(rows.targets.numpy() == 1)[None]  # takes a fifth of the time of torch
            else:
                positive = rows.targets.unsqueeze(0) == 1
            # Build the mask on an accelerator anyway: asking whether it is needed would wait for the device.
            if not rows.complete and (not is_host or may_hold(rows.targets, rule.ignore_index)):
                valid = (rows.targets != rule.ignore_index)[None]
                positive, member = positive & valid, valid.expand_as(positive)
        if self.drops_queued_positives and self.live is not None:
            kept = self.live | ~positive
            positive, member = positive & self.live, kept if member is None else member & kept
        weight = self.key_weight
        is_host = weight is not None and weight.is_cpu and has_values(weight) and weight.numel() > 0
        if weight is not None and not (is_host and weight.amin() > 0):
            positive, kept = positive & (weight != 0), (weight != 0).expand_as(positive)
            member = kept if member is None else member & kept
        return positive, member


def local_pool(
    given: Batch,
    temperature: float | None,
    reduction: str,
    ignore_index: int,
    multi_hot: bool,
    validate_args: bool,
    weighting: str = "rows",
    automatic: bool = True,
) -> Pool:
    """Check the arguments that the pure functions share, described here, and return the pool of the given rows.

    Args:
        logits: (N, C) raw scores; C = 1 is binary, and may be (N,).
        targets: (N,) or (N, 1) class indices, or 0 and 1 when C = 1; (N, C) with ``multi_hot``. Integers, bools or
            whole floats.
        temperature: > 0, width of the sigmoid that replaces the step, in units of the scores. None, the default, is
            automatic: a multiple of the spread of the scores, 0.1 for average precision and 0.3 for recall.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, 0 with zero gradients if none is valid; or ``"none"``
            for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        iid_mask: (N,) bool, the rows that may set thresholds in partial AUC; None for all.
        sample_weight: (N,) >= 0, finite: a row weighs as much as w rows, in every sum. A factor common to all has no
            effect. Weight 0 leaves a row out, except with ``weighting="positives"``, where the weights of negatives are
            not read.
        indexes: (N,) integers, with C = 1: rows with the same index belong to the same query, in any order and number.
            ``"none"`` gives (queries,) in the order of ``indexes.unique()``.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        weighting: where weights count: ``"rows"``, for every row; ``"positives"``, only in the mean over the positives,
            as in imbalanced-losses.
        validate_args: check values (target ranges, weights), which waits for the device; skipped while compiling.

    Raises:
        TypeError, ValueError: for arguments that do not fit.
    """
    check_temperature(temperature, automatic)
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("weighting", weighting, WEIGHTINGS)
    check_int("ignore_index", ignore_index)
    has_columns = isinstance(given.logits, Tensor) and given.logits.ndim == 2
    rule = TargetRule(given.logits.shape[1] if has_columns else 1, ignore_index, multi_hot)
    return Pool(check_batch(given, rule, validate_args=validate_args), weighting=weighting)


def at_temperature(pool: Pool, temperature: float | None, multiple: float) -> tuple[Pool, float]:
    """Return the pool and the temperature to compute a loss with; None is ``multiple`` times the spread of the scores.

    Where no value may be read, the scores of the returned pool are in units of their spread instead.

    Automatic temperature:
        With None the loss does not depend on the scale of the scores. In a module ``current_temperature`` is that of
        the last call. The spread is the interquartile range over 1.349 of a sample of about 4,096 scores, averaged over
        the classes, a constant for the gradient. Where most scores are tied it is the standard deviation of the central
        scores, and 1 where all scores are equal up to rounding. Infinite scores and ignored rows are left out.
    """
    if temperature is not None:
        return pool, temperature
    if has_values(pool.scores):
        return pool, multiple * spread_of(pool.scores, pool.member)
    scaled = copy.copy(pool)
    scaled.scores = standardized(pool.scores, pool.member)
    return scaled, multiple


def positive_shares(pool: Pool, numerator: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of each positive of ``numerator`` in the mean of its class (C, M), and which are valid (C,)."""
    if pool.weight is None:
        total = numerator.sum(dim=1).to(pool.scores.dtype)  # [C]
        return torch.where(numerator, total.reciprocal()[:, None], 0.0), total > 0
    mass = numerator * pool.weight
    total = mass.sum(dim=1)
    valid = total > 0
    return mass / torch.where(valid, total, 1.0)[:, None], valid


def propagate_nan(values: Tensor, pool: Pool) -> Tensor:
    """Return ``values`` (C,), with NaN for the classes that have a NaN among their scores."""
    if pool.scores.shape[1] == 0:
        return values
    one_or_nan = pool.scores.detach().amax(dim=1).clamp(1.0, 1.0)  # [C], one pass and no mask
    return values * one_or_nan.to(values)


class PerClass(NamedTuple):
    """The loss of each class, or of each query, before the reduction."""

    values: Tensor  # [C]: NaN where a score of the class is NaN; else 0, without a gradient, where not valid
    valid: Tensor  # [C] bool


def reduce_values(
    per_class: PerClass,
    reduction: str,
    dtype: torch.dtype,
    weight: Tensor | None = None,
    *,
    of_pool: bool = True,
    over_ranks: bool = False,
) -> Tensor:
    """Return the loss over the valid classes, or queries, in ``dtype``; ``weight`` (C,) are factors of the values.

    A class whose loss is NaN always counts. In every case the loss is connected to the graph of every row.
    ``of_pool=False`` is for a mean over queries, which may be averaged over micro-batches.
    """
    values, valid = per_class
    is_mean = reduction == "mean"
    if reduction == "none":
        loss = values.masked_fill(~valid, math.nan)
    elif values.numel() == 1 and weight is None:
        # Not a view of float64 values: a kernel has saved them, and the caller may change the loss in place.
        loss = values.sum(dtype=dtype) if values.dtype == torch.float64 else values.reshape(())
    elif is_mean:
        counted = valid | values.isnan()
        if weight is None:
            mass = counted.sum().clamp_min(1)
        else:
            mass = (counted * weight).sum()
            mass = torch.where(mass > 0, mass, 1.0)
        loss = values.sum() / mass
    else:
        loss = values.sum()
    return note_kind(loss.to(dtype), mean=is_mean, over_ranks=over_ranks, of_pool=is_mean and of_pool)


class LossWithClasses(NamedTuple):
    """``loss``, with the loss of each class (NaN where the class is not valid) and which classes are valid."""

    loss: Tensor
    per_class: Tensor  # [C]
    valid: Tensor  # [C] bool

    @staticmethod
    def of(loss: Tensor, per_class: PerClass) -> LossWithClasses:
        values, valid = per_class
        return LossWithClasses(loss, values.masked_fill(~valid, math.nan).to(loss.dtype), valid)


class LossWithStats(NamedTuple):
    """``loss``, with diagnostics of each class."""

    loss: Tensor
    stats: dict[str, Tensor]


class LossWithClassesAndStats(NamedTuple):
    """``loss``, with the loss of each class, which are valid, and diagnostics of each class."""

    loss: Tensor
    per_class: Tensor
    valid: Tensor
    stats: dict[str, Tensor]


class PoolCounts:
    """Sums over the training calls of a loss, for a logger. An accelerator is waited for only when they are read."""

    def __init__(self) -> None:
        self.calls = 0
        # Of each call: the positives of a class in the pool, averaged over the classes; the share of invalid classes.
        self.sums = torch.zeros(2, dtype=torch.float64)

    def add(self, positives: Tensor | float, per_class: PerClass) -> None:
        valid = per_class.valid.detach()
        missing = (~valid).sum(dtype=torch.float64) / max(1, valid.numel())
        self.calls += 1
        counts = torch.as_tensor(positives, dtype=missing.dtype, device=missing.device)
        self.sums = self.sums.to(valid.device) + torch.stack([counts, missing])


def query_blocks(indexes: Tensor) -> tuple[int, list[QueryBlock]]:
    """Return the number of distinct ``indexes`` (M,), the queries in sorted order, and their rows in blocks.

    A block has queries of similar length: 1, 2, 3 to 4, 5 to 8 and so on. Waits for the device three times.
    """
    distinct, query = indexes.unique(return_inverse=True)
    count = torch.bincount(query, minlength=distinct.numel())
    order = query.argsort(stable=True)
    start = count.cumsum(0) - count
    # count - 1 has k binary digits where 2^(k-1) < count <= 2^k. float64 holds these integers exactly.
    digits = torch.frexp((count - 1).double()).exponent.to(torch.int64)
    widths = count.new_zeros(64).scatter_reduce_(0, digits, count, "amax").tolist()
    sizes = torch.bincount(digits, minlength=64).tolist()
    by_length = digits.argsort(stable=True).split(sizes)
    blocks = []
    for queries, width in zip(by_length, widths):
        if not width:
            continue
        place = torch.arange(width, device=indexes.device)
        present = place < count[queries][:, None]
        rows = order[(start[queries][:, None] + place).clamp_max_(order.numel() - 1)]
        blocks.append(QueryBlock(queries, rows, present))
    return distinct.numel(), blocks


class QueryBlock(NamedTuple):
    """Queries of similar length, one per row of a rectangle."""

    queries: Tensor  # [q] their positions among all queries
    rows: Tensor  # [q, L] the row in each place; an arbitrary row in the padding
    present: Tensor  # [q, L] bool: the place holds a row

    def take(self, column: Tensor) -> Tensor:
        """Return the entries of ``column`` (M,) in their places, (q, L); 0 or False in the padding."""
        entries = column.index_select(0, self.rows.view(-1)).view(self.rows.shape)
        # Not a product with the mask: the padding holds entries of other queries, which may be NaN.
        return torch.where(self.present, entries, torch.zeros((), dtype=column.dtype, device=column.device))
