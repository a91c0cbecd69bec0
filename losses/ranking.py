"""What the pooled losses share: check, gather, join with the queue, draw, compute per class, reduce, enqueue."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.gather import gather_agreed
from ..distributed.header import Offer, refuse_in_backward
from ..distributed.torch_private import note_kind
from ..errors import expected
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
    reduce_values,
)
from .queued_loss import QueuedLoss
from .tensors import compute_dtype, has_values


class Given(NamedTuple):
    """The rows of this rank, as they were given."""

    logits: Tensor
    targets: Tensor
    iid_mask: Tensor | None = None
    sample_weight: Tensor | None = None
    indexes: Tensor | None = None


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
        live = self._rows_of_all(Given(logits, targets, iid_mask, sample_weight, indexes))
        pool = self._join(live)
        per_class = self.compute_per_class(pool)
        loss = self._reduce_and_enqueue(live, pool, per_class)
        return LossWithClasses.of(loss, per_class) if return_per_class else loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the loss of each class over ``pool``; the formula of the subclass."""
        raise NotImplementedError

    def fits_in_a_graph(self) -> bool:
        """Return whether a call communicates with no other rank and keeps no state, so that it can be compiled."""
        return super().fits_in_a_graph() and not (self.queue_size or self.max_pool_size or self.pool_counts)

    def _at_temperature(self, pool: Pool) -> tuple[Pool, float]:
        """Return the pool and the temperature for the formula of a subclass with an automatic temperature."""
        assert self.spread_multiple is not None
        scaled, temperature = at_temperature(pool, self.temperature, self.spread_multiple)
        self._note_temperature(pool, temperature)
        return scaled, temperature

    def _note_temperature(self, pool: Pool, temperature: float) -> None:
        if temperature != self._last_temperature and has_values(pool.rows.logits):
            vars(self)["_last_temperature"] = temperature

    def _rows_of_all(self, given: Given) -> Batch:
        """Return the checked rows of all ranks; if one rank's rows do not pass, every rank raises."""
        call, group = type(self).__name__, self._resolve_group()
        if not torch.compiler.is_compiling():
            refuse_in_backward(call)
        if group is None:
            return self._check(given, None)

        def bring() -> Offer[None]:
            live = self._check(given, group)
            facts = self._facts({"with indexes": given.indexes is not None})
            return Offer(None, facts, totals=live.counts, checksum=self._checksum, tensors=live.tensors)

        agreed = gather_agreed(call, group, bring, gradient_reduction=self.gradient_reduction)
        return Batch.of_all(agreed.tensors, agreed.totals, self._rule)

    def _check(self, given: Given, group: ProcessGroup | None) -> Batch:
        if group is not None:
            self._check_not_gathered(group, logits=given.logits, targets=given.targets)
        self._check_settings()
        indexes = given.indexes
        if indexes is not None and not self.ranks_queries:
            raise TypeError(expected("indexes", "None, since this loss ranks one pool", indexes, "Use SmoothAPLoss."))
        if indexes is not None and self.max_pool_size is not None:
            fix = "A draw would take rows out of their queries."
            raise ValueError(expected("max_pool_size", "None in a call with indexes", self.max_pool_size, fix))
        stored = self.queue.wanted if self.queue_size and self._enqueues else None
        return check_batch(*given[:4], self._rule, indexes=indexes, validate_args=self.validate_args, stored=stored)

    def _check_settings(self) -> None:
        if self.has_temperature:
            check_temperature(self.temperature, self.spread_multiple is not None)

    def _join(self, live: Batch) -> Pool:
        """Return the pool of live and queued rows, at most ``max_pool_size`` of them."""
        if live.indexes is not None:  # rows of earlier steps belong to other queries
            return Pool(live)
        rows, is_live, queued = live, None, self._queued_rows() if self.queue_size else None
        if queued is not None:
            rows = with_queue(live, queued, self.uses_iid)
            is_live = torch.arange(rows.logits.shape[0], device=live.logits.device) < live.logits.shape[0]
        limit = self.max_pool_size
        if limit is not None and rows.logits.shape[0] > limit:
            self._warn_once(
                "draw",
                f"{type(self).__name__}: a pool of {rows.logits.shape[0]} rows is drawn down to max_pool_size={limit} "
                "with a quota for every class. The loss is a random approximation from here on.",
            )
            if has_values(rows.logits):
                index = draw_rows(rows, limit, self._num_draws)
            else:  # on the meta device any rows have the right shape
                index = torch.arange(limit, device=rows.logits.device)
            # Only training steps count: rank 0 may validate alone, and its draws must stay those of the other ranks.
            self._num_draws += self.training
            rows, is_live = rows.take(index), None if is_live is None else is_live[index]
        pool = Pool(rows, is_live, self.queue_keep)
        if self.validate_args and self.training and has_values(live.logits):
            pool.is_watched = self._hints.look(pool)
        return pool

    def _reduce_and_enqueue(self, live: Batch, pool: Pool, per_class: PerClass) -> Tensor:
        """Return the loss over the valid classes. The live rows enter the queue, and loggers and hints see the call."""
        loss = reduce_values(per_class, self.reduction, compute_dtype(live.logits.dtype))
        if self.pool_counts is not None and self.training and has_values(live.logits):
            self.pool_counts.add(pool, per_class)
        is_full = True
        if self.queue_size:
            is_full = len(self.queue) == self.queue_size
            if self._enqueues and live.indexes is None and not live.logits.is_meta:
                rows = live.logits, live.targets, live.iid_mask, live.sample_weight
                self.queue.enqueue(*rows, num_stored=live.num_stored)
        if pool.is_watched:
            setting = self._setting(pool.rows.logits.shape[0])
            self._hints.observe(setting if is_full else setting._replace(small_pool=None), live, pool, per_class)
        return note_kind(loss, over_ranks=True) if live.over_ranks else loss

    def _setting(self, num_rows: int) -> Setting:
        return Setting(self.temperature if self.has_temperature else None, None)
