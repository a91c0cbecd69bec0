"""One rank's part of a pool that no rank holds, and what every rank knows of all parts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ..distributed.exchange import Exchange
from ..distributed.header import Agreement
from ..kernels.registration import with_gradients
from ..kernels.spread import MOST_IN_FULL, sampled_places, spread_of_sample
from ..losses.pooled.pool import Pool


class Part(NamedTuple):
    """The rows of this rank, and what is equal on all ranks: everything but ``pool`` and the rank of ``exchange``."""

    pool: Pool  # with sample weights on all ranks or on none
    exchange: Exchange
    scale: int  # k, the factor on the gradient of this rank's rows
    rows: tuple[int, ...]  # of each rank
    positives: tuple[float, ...]  # of all classes together, of each rank
    low: float  # the lowest score of all ranks, NaN if one is NaN; inf without rows
    high: float
    must_gather: bool  # a rank has rows of which no sums are known

    @staticmethod
    def of(pool: Pool, exchange: Exchange, scale: int, agreed: Agreement[Any]) -> Part:
        """Return the part with what the header says: :func:`totals_of`, and whether the rows must be gathered."""
        positives, low, high, must_gather = numpy.array(agreed.totals).T
        ends = float(low.min()), float(high.max())  # NaN if one is
        return Part(pool, exchange, scale, agreed.rows, tuple(positives.tolist()), *ends, bool(must_gather.any()))

    @property
    def num_rows(self) -> int:
        """Rows of the pool."""
        return sum(self.rows)

    @property
    def needs_gradient(self) -> bool:
        """Whether the scores need a gradient."""
        return self.pool.scores.requires_grad and torch.is_grad_enabled()

    def attach(self, values: Tensor, gradient: Tensor | None) -> Tensor:
        """Return ``values`` (C,) with ``gradient`` (C, N) of the scores of this rank; None is no gradient."""
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
        """Return those of ``pool``."""
        class_of, row_of = pool.positive.nonzero(as_tuple=True)
        mass = pool.scores.new_ones(row_of.shape, dtype=torch.float64)
        return Positives(class_of, row_of, mass if pool.weight is None else pool.weight[row_of].double())


@torch.no_grad()
def totals_of(pool: Pool) -> tuple[Tensor | float, Tensor | float, Tensor | float]:
    """Return what the header carries of a part: positives, lowest and highest score."""
    if not pool.scores.numel():
        return 0.0, math.inf, -math.inf
    least, most = pool.scores, pool.scores
    if pool.member is not None:
        least, most = (pool.scores.masked_fill(~pool.member, end) for end in (math.inf, -math.inf))
    return pool.positive.sum(), least.amin(), most.amax()  # NaN if one is


def spread_of_parts(part: Part) -> float | None:
    """Return the spread of the scores of the whole pool, from the sample that a gathered pool is judged by.

    Returns None if the sample has no spread and the pool is small enough to be looked at as a whole.
    """
    scores, member = part.pool.scores.detach(), part.pool.member
    num_classes, num_rows = scores.shape
    classes, rows = sampled_places(num_classes, part.num_rows, scores.device)
    sample = scores.new_zeros(classes.numel(), rows.numel())
    row = rows - sum(part.rows[: part.exchange.rank])
    own = ((row >= 0) & (row < num_rows)).nonzero()[:, 0]
    at = classes[:, None], row[own][None]
    sample[:, own] = scores[at] if member is None else torch.where(member[at], scores[at], math.nan)
    sample = part.exchange.sum(sample, "the sample of the scores")
    spread = spread_of_sample(sample)
    if spread is None and sample.numel() < num_classes * part.num_rows <= MOST_IN_FULL:
        return None
    return 1.0 if spread is None else spread
