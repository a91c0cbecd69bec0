"""A pool that no rank holds: each rank keeps its own rows, and class-wise sums travel instead of rows.

Which way a loss is computed depends on numbers that are equal on all ranks, so every rank makes the same calls. A rank
has the gradient of its own rows from the same sums, and its backward multiplies it by k, as that of a gather does.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ..distributed.exchange import Exchange
from ..distributed.header import Agreement
from ..kernels.spread import MOST_IN_FULL, sampled_places, spread_of_sample
from ..queues.sharded_queue import ShardedQueue
from .attached import attach
from .pool import Pool


class PoolFacts(NamedTuple):
    """What every rank knows of a sharded pool, equal on all of them but for ``queue``."""

    exchange: Exchange
    scale: int  # k, the factor on the gradient of this rank's rows
    rows: tuple[int, ...]  # live rows of each rank
    num_queued: int  # queued rows of all ranks together
    queue: ShardedQueue | None  # this rank's queued rows, which follow its live rows; None if the pool has none
    low: float  # of the scores of the pool, NaN if one is NaN; inf without rows
    high: float
    positives: tuple[float, ...]  # of all classes, of each rank; inf on a rank that needs the rows gathered
    stored: tuple[int, ...]  # rows that each rank enqueues
    weighted: bool  # rows of the pool have sample weights, on whichever rank; ``pool.weight`` of a rank may be None

    @staticmethod
    def of(
        exchange: Exchange, scale: int, agreed: Agreement[Any], queue: ShardedQueue | None, is_weighted: bool
    ) -> PoolFacts:
        """Return the facts of the header, see :func:`totals_of`; ``queue`` is None if its rows are left out."""
        low, high, positives, stored = numpy.array(agreed.totals).T
        return PoolFacts(
            exchange,
            scale,
            agreed.rows,
            0 if queue is None else queue.num_held,
            queue,
            float(low.min()),  # NaN if one is
            float(high.max()),
            tuple(positives.tolist()),
            tuple(map(int, stored.tolist())),
            is_weighted or (queue is not None and queue.has_weights),
        )

    @property
    def num_live(self) -> int:
        """Live rows of this rank."""
        return self.rows[self.exchange.rank]

    @property
    def must_gather(self) -> bool:
        """A rank needs the rows of all ranks to be gathered."""
        return math.inf in self.positives

    @property
    def num_rows(self) -> int:
        """Rows of the pool."""
        return sum(self.rows) + self.num_queued


@torch.no_grad()
def totals_of(pool: Pool, num_stored: int, gather: bool) -> tuple[float, float, float, float]:
    """Return what the header carries: lowest and highest score, positives (inf: ``gather`` the rows), rows to store."""
    low, high = math.inf, -math.inf
    if pool.scores.numel():
        least, most = pool.scores, pool.scores
        if pool.member is not None:
            least, most = (pool.scores.masked_fill(~pool.member, end) for end in (low, high))
        low, high = float(least.amin()), float(most.amax())  # NaN if one is
    return low, high, math.inf if gather else float(pool.positive.sum()), float(num_stored)


def agreed_temperature(pool: Pool, shared: PoolFacts, temperature: float | None, multiple: float) -> float | None:
    """Return the temperature; None stands for ``multiple`` times the spread of the scores of the whole pool.

    The sample is that of a gathered pool, score by score; each rank contributes the rows that it has. Returns None if
    the sample has no spread and the pool is small enough to be looked at as a whole.
    """
    if temperature is not None:
        return temperature
    scores = pool.scores.detach()
    num_classes = scores.shape[0]
    classes, rows = sampled_places(num_classes, shared.num_rows, scores.device)
    sample = scores.new_zeros(classes.numel(), rows.numel())

    def values(columns: Tensor) -> Tensor:
        at = classes[:, None], columns[None]
        return scores[at] if pool.member is None else torch.where(pool.member[at], scores[at], math.nan)

    # A gathered pool has the live rows of all ranks first, then the queue.
    column = rows - sum(shared.rows[: shared.exchange.rank])
    live = ((column >= 0) & (column < shared.num_live)).nonzero()[:, 0]
    sample[:, live] = values(column[live])
    if shared.queue is not None:
        found, queued = shared.queue.find(rows - sum(shared.rows))
        sample[:, found] = values(queued + shared.num_live)
    sample = shared.exchange.sum(sample, "the sample of the scores")
    spread = spread_of_sample(sample)
    if spread is None and sample.numel() < num_classes * shared.num_rows <= MOST_IN_FULL:
        return None
    return multiple * (1.0 if spread is None else spread)


def with_gradient(values: Tensor, gradient: Tensor | None, pool: Pool, shared: PoolFacts) -> Tensor:
    """Return ``values`` (C,) with ``gradient`` (C, N) for the live rows of this rank; None is no gradient."""
    if gradient is None or not needs_gradient(pool):
        return values
    live = pool.scores[:, : shared.num_live] if shared.num_live < pool.scores.shape[1] else pool.scores
    return attach(shared.exchange.call, values, [live], [gradient], shared.scale)


class Positives(NamedTuple):
    """Positives of this rank, one entry each."""

    class_of: Tensor  # [P] int64
    row_of: Tensor  # [P] int64
    mass: Tensor  # [P] float64, their weights

    @staticmethod
    def of(pool: Pool, counted: Tensor) -> Positives:
        """Return those of the mask ``counted`` (C, M)."""
        class_of, row_of = counted.nonzero(as_tuple=True)
        mass = pool.scores.new_ones(row_of.shape, dtype=torch.float64)
        return Positives(class_of, row_of, mass if pool.weight is None else pool.weight[row_of].double())


def needs_gradient(pool: Pool) -> bool:
    """Return True if the scores need a gradient."""
    return pool.scores.requires_grad and torch.is_grad_enabled()
