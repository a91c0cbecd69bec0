"""One rank's shard of a pool, and the numbers about all shards that every rank has."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ..distributed.exchange import Exchange
from ..distributed.header import Agreement
from ..kernels.registration import with_gradients
from ..kernels.spread import LIMITS, MOST_IN_FULL, index_of_sample, spread_or_zero
from ..losses.pooled.pool import Pool
from ..losses.rows import scaled_weight, weight_unit


class Shard(NamedTuple):
    """The rows of this rank, and what is equal on all ranks: everything but ``pool`` and the rank of ``exchange``."""

    pool: Pool  # with sample weights on all ranks or on none
    exchange: Exchange
    scale: int  # k, the factor on the gradient of this rank's rows
    rows: tuple[int, ...]  # of each rank
    positives: tuple[float, ...]  # of all classes together, of each rank
    low: float  # the lowest score of all ranks, NaN if one is NaN; inf without rows
    high: float

    @staticmethod
    def of(pool: Pool, exchange: Exchange, scale: int, agreed: Agreement[Any]) -> Shard:
        """Return the shard with the totals of the header: :func:`totals_of`. The pool gets weights of a common unit."""
        positives, low, high, heaviest, *_ = numpy.array(agreed.totals).T
        ends = float(low.min()), float(high.max())  # NaN if one is
        weight = pool.rows.sample_weight
        if weight is not None:
            of_rows = torch.tensor(heaviest[numpy.array(agreed.rows) > 0], dtype=torch.float64, device="cpu")
            is_constant = pool.weighting == "rows" and bool(((of_rows == of_rows[:1]) & (of_rows > 0)).all())
            pool.weight = None if is_constant else scaled_weight(weight, weight_unit(of_rows.abs()), pool.scores.dtype)
        return Shard(pool, exchange, scale, agreed.rows, tuple(positives.tolist()), *ends)

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    @property
    def needs_gradient(self) -> bool:
        return self.pool.scores.requires_grad and torch.is_grad_enabled()

    def attach(self, values: Tensor, gradient: Tensor | None) -> Tensor:
        """Return ``values`` (C,) with the ``gradient`` (C, N) of this rank's scores, or without one if it is None."""
        if gradient is None or not self.needs_gradient:
            return values
        return with_gradients(self.exchange.call, values, [gradient.mul_(self.scale).t()], self.pool.scores.t())


class Positives(NamedTuple):
    """The positives of this rank, one entry each."""

    class_of: Tensor  # [P] int64
    row_of: Tensor  # [P] int64
    mass: Tensor  # [P] float64, their weights

    @staticmethod
    def of(pool: Pool) -> Positives:
        class_of, row_of = pool.positive.nonzero(as_tuple=True)
        mass = pool.scores.new_ones(row_of.shape, dtype=torch.float64)
        return Positives(class_of, row_of, mass if pool.weight is None else pool.weight[row_of].double())


@torch.no_grad()
def totals_of(pool: Pool) -> tuple[Tensor | float, ...]:
    """Return for the header the number of positives, ends of the scores, largest weight, negated if not all equal."""
    rows, scores = pool.rows, pool.rows.logits.t()
    if not scores.numel():
        return 0.0, math.inf, -math.inf, 0.0
    outside: Tensor | None
    if rows.unread is not None and rows.rule.num_classes == 1 and rows.sample_weight is None:
        outside, positives = (rows.targets == rows.rule.ignore_index)[None], rows.unread[1]
    else:
        outside, positives = None if pool.member is None else ~pool.member, pool.positive.sum()
    if outside is None:
        low, high = scores.aminmax()
    else:
        low, high = scores.masked_fill(outside, math.inf).amin(), scores.masked_fill(outside, -math.inf).amax()
    heaviest: Tensor | float = 0.0
    if rows.sample_weight is not None:
        lightest, heaviest = rows.sample_weight.aminmax()
        heaviest = torch.where(lightest == heaviest, heaviest, -heaviest)
    return positives, low, high, heaviest  # NaN if a score is NaN


def spread_over_shards(shard: Shard) -> float | None:
    """Return the spread of the whole pool as of a gathered one; None if it takes all scores: then gather the rows."""
    scores, member = shard.pool.scores.detach(), shard.pool.member
    num_classes, num_rows = scores.shape
    sizes = num_classes, shard.num_rows
    classes, rows = (
        torch.arange(size, device=scores.device) if index is None else index
        for size, index in zip(sizes, index_of_sample(*sizes, scores.device))
    )
    sample = scores.new_zeros(classes.numel(), rows.numel())
    row = rows - sum(shard.rows[: shard.exchange.rank])
    local = ((row >= 0) & (row < num_rows)).nonzero()[:, 0]
    at = classes[:, None], row[local][None]
    sample[:, local] = scores[at] if member is None else torch.where(member[at], scores[at], math.nan)
    sample = shard.exchange.sum(sample, "the sample of the scores")
    spread = spread_or_zero(sample)
    if spread == 0.0 and sample.numel() < num_classes * shard.num_rows <= MOST_IN_FULL:
        return None
    least, most = LIMITS[scores.dtype]
    return min(max(spread or 1.0, least), most)
