"""The base of the losses over a pool.

All of them make the same step, ``RankingLoss._step``::

    1. check and gather      this rank's rows are checked, and the rows of all ranks gathered      _check_and_gather
    2. make the pool         queued rows are appended, and at most max_pool_size rows drawn        _make_pool
    3. formula               the loss of each class: what a subclass adds                          compute_per_class
    4. reduce and enqueue    the loss over the classes; the live rows enter the queue              _reduce_and_enqueue
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from ...distributed.gather import check_not_gathered, gather_agreed
from ...distributed.group import UNDO, backend_by_device
from ...distributed.header import Offer, State
from ...errors import check_choice, check_count, check_int, check_temperature, expected
from ...queues.memory_queue import Keep, MemoryQueue, QueueRows
from ...queues.saved_state import as_saved, from_saved
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions, HoldsQueue, compiled_where_local, unchecked
from ..hints import Empty
from ..rows import TENSORS, Batch, TargetRule, check_batch, compute_dtype, has_values
from .pool import (
    REDUCTIONS,
    WEIGHTINGS,
    LossWithClasses,
    PerClass,
    Pool,
    PoolCounts,
    Reduction,
    Weighting,
    local_pool,
    reduce_values,
)

_SEED = 0x66756C6C  # with the number of the draw it determines which rows are drawn
NO_QUERY = Empty(
    "no query had both a positive and a negative",
    "Keep the rows of a query in one batch, such as with fullrank.data.MPerClassSampler(indexes, m, batch_size), or "
    "use larger batches.",
)


class PoolOptions(GroupOptions, total=False):
    """The keyword arguments of :class:`RankingLoss` that its subclasses pass on unchanged."""

    queue_keep: Keep
    queue_in_eval: bool
    multi_hot: bool
    weighting: Weighting


@completed(local_pool)
class RankingLoss(HoldsQueue):
    """Base of the losses over a pool of rows; a subclass adds its hyper-parameters and its formula.

    The pool is the live rows of all ranks, in rank order, followed by the rows of the memory queue. A subclass defines
    :meth:`compute_per_class`, names its hyper-parameters in ``own_arguments``, and sets ``spread_multiple`` if its
    temperature can be automatic, or ``has_temperature = False`` if it ignores the argument and has no attribute.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        queue_size: rows of earlier steps in the memory queue, 0 for none. They belong to the pool in training mode and
            carry no gradient. The live rows enter after the loss is computed.
        update_queue_in_eval: let rows enter the queue in eval mode and without gradients too.
        max_pool_size: draw at most this many rows of the pool, with a quota for every class; None uses all rows.
        queue_keep: ``"all"`` rows, or ``"negatives"`` only, which do not dilute the gradient of live positives. Combine
            ``"negatives"`` with a pointwise loss: the queued scores are constant, so all live scores may rise together.
        queue_in_eval: let queued rows belong to the pool in eval mode too.

    Shape:
        logits (N, C), or (N,) when C = 1; targets (N,) or (N, 1), or (N, C) with ``multi_hot``; N may differ between
        ranks and may be 0. Output scalar, or (C,) with ``reduction="none"``.

    Distributed:
        The collectives of :func:`~fullrank.gather_rows` forward, one or two. None backward. Every rank gets the same
        value and holds the same queue.
    """

    _saved_names = (*HoldsQueue._saved_names, "saved_num_draws")
    _checks = HoldsQueue._checks | {
        "num_classes": partial(check_count, least=1),
        "ignore_index": check_int,
        "max_pool_size": lambda name, value: None if value is None else check_count(name, value, 1),
        "reduction": partial(check_choice, choices=REDUCTIONS),
        "queue_keep": partial(check_choice, choices=("all", "negatives")),
        "multi_hot": unchecked,
        "weighting": partial(check_choice, choices=WEIGHTINGS),
    }
    _fixed = (*HoldsQueue._fixed, "num_classes", "ignore_index", "queue_keep", "multi_hot")
    own_arguments: ClassVar[tuple[str, ...]] = ()  # the names of the subclass's own arguments, for ``repr``
    spread_multiple: ClassVar[float | None] = None  # temperature=None is this many times the spread of the scores
    ranks_queries: ClassVar[bool] = False  # True for a loss that takes ``indexes``
    uses_iid: ClassVar[bool] = False  # True for a loss in which ``iid_mask`` has an effect

    def __init__(
        self,
        num_classes: int = 1,
        queue_size: int = 0,
        temperature: float | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        update_queue_in_eval: bool = False,
        gather_distributed: bool | None = None,
        max_pool_size: int | None = None,
        *,
        queue_keep: Keep = "all",
        queue_in_eval: bool = False,
        multi_hot: bool = False,
        weighting: Weighting = "rows",
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(gather_distributed, **options)
        self.num_classes, self.queue_size, self.ignore_index = num_classes, queue_size, ignore_index
        self.max_pool_size = max_pool_size
        if self.has_temperature:
            self._start_temperature(check_temperature(temperature, self.spread_multiple is not None))
        self.reduction, self.queue_keep = reduction, queue_keep
        self.update_queue_in_eval, self.queue_in_eval = update_queue_in_eval, queue_in_eval
        self.multi_hot, self.weighting = multi_hot, weighting
        self._set_queue(MemoryQueue(queue_size, num_classes, ignore_index, keep=queue_keep, multi_hot=multi_hot))
        self._num_draws = 0
        self.pool_counts: PoolCounts | None = None  # of the training calls since a logger has set it

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
            return_per_class: return ``LossWithClasses(loss, per_class, valid)``: also the loss of each class, and
                which classes are valid.
            indexes: (N,) integers, the query of each row, which may have rows on several ranks; on every rank or none.
                For :class:`SmoothAPLoss` and :class:`PAUCAtBudgetLoss` with ``num_classes=1`` and no ``max_pool_size``.
                ``reduction`` and ``return_per_class`` then refer to queries, by sorted indexes. No queue is used.
        """
        given = Batch(logits, targets, iid_mask, sample_weight, indexes)
        loss, per_class = self._step(given, self.compute_per_class)
        return LossWithClasses.of(loss, per_class) if return_per_class else loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the loss of each class over ``pool``; the formula of the subclass."""
        raise NotImplementedError

    def fits_in_a_graph(self) -> bool:
        return super().fits_in_a_graph() and not (self.queue_size or self.max_pool_size or self.pool_counts)

    def _step(self, given: Batch, formula: Callable[[Pool], PerClass]) -> tuple[Tensor, PerClass]:
        """Return the loss and what ``formula`` has returned for the pool."""
        live, counts = self._check_and_gather(given)
        pool = self._make_pool(live)
        per_class = formula(pool)

        def positives() -> Tensor:
            return pool.positive.sum(dtype=torch.float64) / pool.positive.shape[0]

        return self._reduce_and_enqueue(live, counts, per_class, positives), per_class

    # The steps of a call, in the order in which they run.

    def _check_and_gather(self, given: Batch) -> tuple[Batch, Sequence[int] | None]:
        """Return the checked rows of all ranks and how many each brought, None without a group."""
        call, group = type(self).__name__, self._resolve_group()
        if group is None:
            return self._check(given, None), None

        def bring() -> Offer[TargetRule]:
            live = self._check(given, group)
            return Offer(live.rule, self._facts(), 0, live.counts, self._checksum, live.check, live.tensors, TENSORS)

        agreed = gather_agreed(call, group, bring, gradient_reduction=self.gradient_reduction)
        return Batch.of_all(agreed.tensors, agreed.totals, agreed.value), agreed.rows

    def _check(self, given: Batch, group: ProcessGroup | None) -> Batch:
        if group is not None:
            check_not_gathered(group, logits=given.logits, targets=given.targets)
        if self.has_temperature:
            check_temperature(self.temperature, self.spread_multiple is not None)
        indexes = given.indexes
        if indexes is not None and not self.ranks_queries:
            raise TypeError(expected("indexes", "None, since this loss ranks one pool", indexes, "Use SmoothAPLoss."))
        if indexes is not None and self.max_pool_size is not None:
            fix = "A draw would take rows out of their queries."
            raise ValueError(expected("max_pool_size", "None in a call with indexes", self.max_pool_size, fix))
        return check_batch(
            given,
            TargetRule(self.num_classes, self.ignore_index, self.multi_hot),
            validate_args=self.validate_args,
            stored=self.queue.wanted if self.queue_size and self._enqueues else None,
            weight_dtype=torch.float32 if group is None else torch.float64,
            # On an accelerator the header brings what the checks find: the host waits for both at once.
            defers=group is not None and "cpu" not in backend_by_device(group),
        )

    def _make_pool(self, live: Batch) -> Pool:
        """Return the pool of live and queued rows, at most ``max_pool_size`` of them."""
        if live.indexes is not None:  # queued rows belong to other queries
            return Pool(live, weighting=self.weighting)
        is_live: Tensor | int | None = None
        rows, queued = live, self._queued_rows() if self.queue_size else None
        if queued is not None:
            rows = with_queue(live, queued, self.uses_iid)
            is_live = live.logits.shape[0]
        limit = self.max_pool_size
        if limit is not None and rows.logits.shape[0] > limit:
            self._hints.warn_once(
                "draw",
                f"a pool of {rows.logits.shape[0]} rows is drawn down to max_pool_size={limit} "
                "with a quota for every class. The loss is a random approximation from here on.",
            )
            if has_values(rows.logits):
                index = draw_rows(rows, limit, self._num_draws)
            else:  # on the meta device any rows have the right shape
                index = torch.arange(limit, device=rows.logits.device)
            # Only training steps count: after rank 0 has validated alone, it still draws the same rows as the others.
            undo = UNDO.get()
            if undo is not None:
                undo.callback(setattr, self, "_num_draws", self._num_draws)
            self._num_draws += self.training
            rows, is_live = rows.take(index), None if is_live is None else index < is_live
        return Pool(rows, is_live, self.queue_keep, self.weighting)

    def _note_temperature(self, pool: Pool, temperature: float) -> None:
        if temperature != self._last_temperature and has_values(pool.rows.logits):
            vars(self)["_last_temperature"] = temperature

    def _reduce_and_enqueue(
        self,
        live: Batch,
        counts: Sequence[int] | None,
        per_class: PerClass,
        positives: Callable[[], Tensor | float],  # in the pool, averaged over the classes
    ) -> Tensor:
        """Return the loss over the valid classes. Enqueue the live rows, count for loggers, and look for hints."""
        dtype, has_queries = compute_dtype(live.logits.dtype), live.indexes is not None
        loss = reduce_values(per_class, self.reduction, dtype, of_pool=not has_queries, over_ranks=live.over_ranks)
        if self.queue_size and self._enqueues and not has_queries and not live.logits.is_meta:
            self.queue.enqueue(*live[:4], num_stored=live.num_stored)
        if not has_values(live.logits):
            return loss
        if self.pool_counts is not None and self.training:
            self.pool_counts.add(positives(), per_class)
        if self._hints.should_observe(self, loss):
            if counts is not None:
                self._hints.observe_ranks(counts, live.tensors)
            if has_queries:
                self._hints.observe_valid(per_class.valid, NO_QUERY)
            else:
                self._hints.observe(live, per_class.valid)
        return loss

    # The facts that the ranks compare, and the state.

    def _facts(self) -> dict[str, object]:
        return {**super()._facts(), "draws": State(self._num_draws, "Load the same checkpoint on every rank.")}

    def _saved(self) -> dict[str, Tensor]:
        draws = self._num_draws or self.max_pool_size is not None
        return {**super()._saved(), **({"saved_num_draws": as_saved(self._num_draws)} if draws else {})}

    def _read_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        draws = from_saved(state, "num_draws") if "saved_num_draws" in state else self._num_draws
        return {**super()._read_saved(state), "_num_draws": check_count("num_draws of the saved state", draws, 0)}

    @property
    def _shown(self) -> tuple[str, ...]:
        names = "num_classes", *self.own_arguments, "queue_size", "reduction", "ignore_index", "max_pool_size"
        weighting = () if self.weighting == "rows" else ("weighting",)
        return *names, "gradient_reduction", "queue_keep", "queue_in_eval", "multi_hot", *weighting


def with_queue(live: Batch, queued: QueueRows, uses_iid: bool = True) -> Batch:
    """Return the live rows followed by the queued rows, in the dtype of the computation."""
    device, dtype = live.logits.device, compute_dtype(live.logits.dtype)
    num_live, num_queued = live.logits.shape[0], queued.logits.shape[0]
    # Live and queued rows without a mask all count as iid, and those without weights have weight 1.
    iid = None
    if uses_iid:
        iid = torch.ones(num_live, dtype=torch.bool, device=device) if live.iid_mask is None else live.iid_mask
        iid = torch.cat([iid, queued.iid_mask.to(device)])
    weight, queued_weight = live.sample_weight, queued.sample_weight
    if weight is not None or queued_weight is not None:
        weight = torch.ones(num_live, dtype=torch.float32, device=device) if weight is None else weight
        queued_weight = weight.new_ones(num_queued) if queued_weight is None else queued_weight.to(device)
        weight = torch.cat([weight, queued_weight])  # in float64 if one is
    return Batch(
        torch.cat([live.logits.to(dtype), queued.logits.to(device, dtype)]),
        torch.cat([live.targets, queued.targets.to(live.targets)]),
        iid,
        weight,
        complete=live.complete and not live.rule.multi_hot,  # a row whose target is ignored never enters the queue
        rule=live.rule,
    )


def draw_rows(batch: Batch, size: int, draw: int) -> Tensor:
    """Return the indices, ascending, of at most ``size`` rows of ``batch``, (size,) int64; ``draw`` is the seed.

    Half of the budget is shared equally by the classes present, of which rows without a class count as one.
    """
    rule, generator = batch.rule, torch.Generator().manual_seed((_SEED << 32) + draw)
    count = batch.targets.shape[0]
    shuffled = torch.randperm(count, generator=generator, device="cpu")
    shuffled = shuffled.to(batch.targets.device, non_blocking=True)
    targets = batch.targets[shuffled]
    codes = targets if rule.multi_hot else targets[:, None]
    taking_part = (codes != rule.ignore_index).any(dim=1)  # [M]
    if not rule.multi_hot and rule.num_classes > 1:
        positive = (codes == torch.arange(rule.num_classes, device=targets.device)) & taking_part[:, None]
    else:
        positive = rule.marked(codes)  # [M, C]
    without = taking_part & ~positive.any(dim=1)
    membership = torch.cat([positive, without[:, None]], dim=1)  # [M, C + 1]
    num_present = membership.any(dim=0).sum().clamp_min(1)
    quota = (size // (2 * num_present)).clamp_min(1)
    # 1 for the first row of a class in shuffled order. int32 because this is the largest tensor here.
    place = membership.cumsum(dim=0, dtype=torch.int32)
    reserved = membership.logical_and_(place <= quota).any(dim=1)
    # Reserved rows first, then the others, then the ignored ones; each group in shuffled order.
    order = torch.where(taking_part, (~reserved).to(torch.int64), 2).argsort(stable=True)
    chosen = order[: min(size, int(taking_part.sum()))]
    return shuffled[chosen].sort().values
