"""What the pooled losses share: check, gather, join with the queue, draw, compute per class, reduce, enqueue."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.gather import gather_after
from ..distributed.header import Agreement, Offer, agree_on, refuse_in_backward
from ..distributed.torch_private import note_kind
from ..errors import expected
from ..queues.memory_queue import QueueRows
from .arguments import completed
from .batch import Batch, check_batch, draw_rows, with_queue
from .distributed_loss import DistributedLoss, compiled_where_local
from .hints import Setting
from .pool import (
    LossWithClasses,
    PerClass,
    Pool,
    at_temperature,
    check_temperature,
    local_pool,
    one_vs_rest,
    reduce_values,
)
from .queued_loss import QueuedLoss
from .tensors import has_values


class Given(NamedTuple):
    """The rows of this rank, as they were given."""

    logits: Tensor
    targets: Tensor
    iid_mask: Tensor | None = None
    sample_weight: Tensor | None = None
    indexes: Tensor | None = None


class PooledRows(NamedTuple):
    """What a call ranks."""

    pool: Pool
    live: Batch  # the rows that enter the queue
    over_ranks: bool


@completed()
class RankingLoss(QueuedLoss):
    """Base of the losses over a pool of rows; a subclass adds its hyper-parameters and its formula.

    The pool is the live rows of all ranks, in rank order, followed by the rows of the memory queue, which carry no
    gradient. The live rows enter the queue after the loss is computed. In eval mode the pool is the live rows, and none
    is enqueued.

    A subclass without a temperature sets ``has_temperature = False``: it has no attribute ``temperature``, ignores the
    argument, and saves and compares none.

    Distributed:
        The collectives of :func:`~fullrank.gather_rows` forward, one or two. None backward. Every rank gets the same
        value and holds the same queue.
    """

    ranks_queries: ClassVar[bool] = False  # True for a loss that takes ``indexes``
    uses_iid: ClassVar[bool] = False  # True for a loss in which ``iid_mask`` has an effect

    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: Literal[False] = False,
        *,
        sample_weight: Tensor | None = None,
        indexes: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        *,
        return_per_class: Literal[True],
        sample_weight: Tensor | None = None,
        indexes: Tensor | None = None,
    ) -> LossWithClasses: ...
    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: bool = False,
        *,
        sample_weight: Tensor | None = None,
        indexes: Tensor | None = None,
    ) -> Tensor | LossWithClasses: ...
    @completed(DistributedLoss, local_pool)
    @compiled_where_local
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: bool = False,
        *,
        sample_weight: Tensor | None = None,
        indexes: Tensor | None = None,
    ) -> Tensor | LossWithClasses:
        """Return the loss of this rank's rows, pooled with those of the other ranks and of the queue.

        Args:
            logits: (N, C) raw scores of this rank, or (N,) when C = 1; N may differ between ranks and may be 0.
            return_per_class: return ``LossWithClasses(loss, per_class, valid)``: also that of each class, if valid.
            indexes: (N,) integers, the query of each row, on whichever rank; for :class:`SmoothAPLoss` alone, with
                ``num_classes=1`` and no ``max_pool_size``, on every rank or on none. ``reduction`` and
                ``return_per_class`` then refer to the queries of all ranks, by sorted indexes. No queue is used.
        """
        given = Given(logits, targets, iid_mask, sample_weight, indexes)
        agreed = self._agree(given)
        at_once = None if return_per_class else self._at_once(given, agreed)
        if at_once is not None:
            return at_once
        pooled = self._pool(given, agreed)
        per_class = self.compute_per_class(pooled.pool)
        loss = self._finish(pooled, per_class)
        return LossWithClasses.of(loss, per_class) if return_per_class else loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the loss of each class over ``pool``; the formula of the subclass."""
        raise NotImplementedError

    def _at_once(self, given: Given, agreed: Agreement[None] | None) -> Tensor | None:
        """Return the loss of rows whose every step a subclass takes at once; None for all others."""
        return None

    def fits_in_a_graph(self) -> bool:
        """Return whether a call communicates with no other rank and keeps no state, so that it can be compiled."""
        return super().fits_in_a_graph() and not (self.queue_size or self.max_pool_size or self.pool_counts)

    def _at_temperature(self, pool: Pool) -> tuple[Pool, float]:
        """Return the pool and the temperature for the formula of a subclass with an automatic temperature."""
        assert self.spread_multiple is not None
        scaled, temperature = at_temperature(pool, self.temperature, self.spread_multiple)
        if temperature != self._last_temperature and has_values(pool.scores):
            self._last_temperature = temperature
        return scaled, temperature

    def _agree(self, given: Given) -> Agreement[None] | None:
        """Check the rows and exchange headers, in a call that gathers the rows of all ranks; None in all others."""
        call = type(self).__name__
        if not torch.compiler.is_compiling():
            refuse_in_backward(call)
        group = self._resolve_group()
        if group is None:
            return None

        def bring() -> Offer[None]:
            live = self._check(given, group)
            facts = self._facts({"with indexes": given.indexes is not None})
            return Offer(None, facts, totals=live.counts, checksum=self._checksum, tensors=live.tensors)

        return agree_on(call, group, bring)

    def _pool(self, given: Given, agreed: Agreement[None] | None) -> PooledRows:
        """Return what the call ranks: the live rows of all ranks, and the queue."""
        group = self._resolve_group()
        if agreed is None or group is None:
            live = self._check(given, group)
        else:
            rows = gather_after(type(self).__name__, group, agreed, self.gradient_reduction)
            live = Batch.of_all(rows, agreed.totals)
        return PooledRows(self._join(live, self._queued_rows()), live, over_ranks=group is not None)

    def _check(self, given: Given, group: ProcessGroup | None) -> Batch:
        self._check_not_gathered(group, logits=given.logits, targets=given.targets)
        self._check_settings()
        indexes = given.indexes
        if indexes is not None and not self.ranks_queries:
            raise TypeError(expected("indexes", "None, since this loss ranks one pool", indexes, "Use SmoothAPLoss."))
        if indexes is not None and self.max_pool_size is not None:
            fix = "A draw would take rows out of their queries."
            raise ValueError(expected("max_pool_size", "None in a call with indexes", self.max_pool_size, fix))
        stored = self.queue.wanted if self._enqueues else None
        return check_batch(*given[:4], self._rule, indexes=indexes, validate_args=self.validate_args, stored=stored)

    def _check_settings(self) -> None:
        if self.has_temperature:
            check_temperature(self.temperature, self.spread_multiple is not None)

    def _join(self, live: Batch, queued: QueueRows | None) -> Pool:
        """Return the pool of live and queued rows, at most ``max_pool_size`` of them."""
        if live.indexes is not None:  # rows of earlier steps belong to other queries
            return one_vs_rest(live, self._rule)
        batch, is_live = live, None
        if queued is not None:
            batch = with_queue(live, queued, self.multi_hot, self.uses_iid)
            is_live = torch.arange(batch.logits.shape[0], device=live.logits.device) < live.logits.shape[0]
        limit = self.max_pool_size
        if limit is not None and batch.logits.shape[0] > limit:
            self._warn_once(
                "draw",
                f"{type(self).__name__}: a pool of {batch.logits.shape[0]} rows is drawn down to max_pool_size={limit} "
                "with a quota for every class. The loss is a random approximation from here on.",
            )
            if has_values(batch.logits):
                index = draw_rows(batch, self._rule, limit, self._num_draws)
            else:  # on the meta device any rows have the right shape
                index = torch.arange(limit, device=batch.logits.device)
            # Only training steps count: rank 0 may validate alone, and its draws must stay those of the other ranks.
            self._num_draws += self.training
            batch, is_live = batch.take(index), None if is_live is None else is_live[index]
        return one_vs_rest(batch, self._rule, is_live, self.queue_keep)

    def _finish(self, pooled: PooledRows, per_class: PerClass) -> Tensor:
        """Return the loss. Enqueue the live rows, and warn of a likely misuse."""
        pool, live, _ = pooled
        loss = reduce_values(per_class, self.reduction, pool.scores.dtype)
        num_rows, num_queued = pool.scores.shape[1], len(self.queue)
        if self.pool_counts is not None and self.training and has_values(live.logits):
            self.pool_counts.add(pool, per_class)
        is_full = num_queued == self.queue_size
        if self._enqueues and live.indexes is None and not live.logits.is_meta:
            rows = live.logits, live.targets, live.iid_mask, live.sample_weight
            self.queue.enqueue(*rows, num_stored=live.num_stored)
        if self.validate_args and self.training and live.indexes is None and has_values(live.logits):
            setting = self._setting(num_rows)
            self._hints.observe(setting if is_full else setting._replace(small_pool=None), live, pool, per_class)
        return note_kind(loss, over_ranks=True) if pooled.over_ranks else loss

    def _setting(self, num_rows: int) -> Setting:
        return Setting(self.temperature if self.has_temperature else None, None)
