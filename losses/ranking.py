"""What the pooled losses share: check, gather, join with the queue, draw, compute per class, reduce, enqueue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..distributed.exchange import Exchange, check_rows
from ..distributed.gather import gather_after, gather_agreed
from ..distributed.group import gradient_scale
from ..distributed.header import Agreement, Checksum, Offer, State, agree_on, refuse_in_backward
from ..distributed.torch_private import not_compiled
from ..errors import check_choice, check_count, check_int, expected, warn
from ..queues.memory_queue import SAME_QUEUE, Keep, MemoryQueue, QueueRows, check_saved_queues
from ..queues.sharded_queue import ShardedQueue
from .arguments import completed
from .batch import Batch, TargetRule, check_batch, has_values, weight_unit, with_queue
from .distributed_loss import (
    SAME_TEMPERATURE,
    CurrentTemperature,
    DistributedLoss,
    GroupOptions,
    compiled_where_local,
    loaded_temperature,
    saved_temperature,
)
from .hints import Hints, Setting
from .pool import (
    REDUCTIONS,
    LossWithClasses,
    PerClass,
    Pool,
    Reduction,
    at_temperature,
    check_temperature,
    local_pool,
    one_vs_rest,
    reduce_values,
)
from .sampling import draw_rows
from .sharded import Found, PoolFacts, agreed_temperature, totals_of

PoolForm = Literal["gathered", "sharded"]
POOL_FORMS = ("gathered", "sharded")

_SAME_MODE = "Call train() or eval() on every rank; gather_distributed=False lets a rank work alone."


class PoolOptions(GroupOptions, total=False):
    """The keyword arguments of :class:`RankingLoss`, which its subclasses pass on as they are."""

    queue_keep: Keep
    queue_in_eval: bool
    multi_hot: bool
    pool: PoolForm


@completed(local_pool)
class RankingLoss(CurrentTemperature, DistributedLoss):
    """Base of the losses over a pool of rows; a subclass adds its hyper-parameters and its formula.

    The pool is the live rows of all ranks, in rank order, followed by the rows of the memory queue, which carry no
    gradient. The live rows enter the queue after the loss is computed. In eval mode the pool is the live rows alone,
    and none of them enters the queue.

    A subclass without a temperature sets ``has_temperature = False``: it has no attribute ``temperature``, ignores the
    argument, and saves and compares none.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        queue_size: rows of the memory queue, 0 for none. Queued rows belong to the pool and carry no gradient.
        update_queue_in_eval: let rows enter the queue in eval mode too.
        max_pool_size: draw at most this many rows of the pool, with a quota for every class; None uses all rows.
        queue_keep: ``"all"`` rows, or ``"negatives"`` only, so that queued positives do not dilute the gradient of the
            live ones. Combine ``"negatives"`` with a pointwise loss: against constant negatives all scores may rise
            together.
        queue_in_eval: let queued rows belong to the pool in eval mode too. By default a validation loss ranks the
            validation rows among themselves.
        pool: ``"gathered"`` gives every rank the rows of all ranks and the whole queue. With ``"sharded"`` each rank
            keeps its own rows and its own part of the queue, and sums travel instead where they are smaller than the
            rows: the same loss and gradient, for large pools at a cost that falls with the number of ranks. It takes no
            ``max_pool_size``.

    Shape:
        logits (N, C), or (N,) when C = 1; targets (N,) or (N, 1), or (N, C) with ``multi_hot``; N may differ between
        ranks and may be 0. Output scalar, or (C,) with ``reduction="none"``.
    """

    has_temperature: ClassVar[bool] = True
    ranks_queries: ClassVar[bool] = False  # True for a loss that takes ``indexes``
    # temperature=None is this many times the spread of the scores; None in a subclass that requires a number.
    spread_multiple: ClassVar[float | None] = None

    def __init__(
        self,
        num_classes: int,
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
        pool: PoolForm = "gathered",
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(gather_distributed, **options)
        self._pool_form = check_choice("pool", pool, POOL_FORMS)
        if pool == "sharded" and max_pool_size is not None:
            fix = "No rank holds a sharded pool, so that none has too many rows, and a draw needs them all."
            raise ValueError(expected("max_pool_size", "None with pool='sharded'", max_pool_size, fix))
        self.num_classes = check_count("num_classes", num_classes, 1)
        self.queue_size = check_count("queue_size", queue_size, 0)
        self.ignore_index = check_int("ignore_index", ignore_index)
        self.max_pool_size = None if max_pool_size is None else check_count("max_pool_size", max_pool_size, 1)
        if self.has_temperature:
            self.temperature = check_temperature(temperature, self.spread_multiple is not None)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.queue_keep = check_choice("queue_keep", queue_keep, ("all", "negatives"))
        self.update_queue_in_eval, self.queue_in_eval = update_queue_in_eval, queue_in_eval
        self.multi_hot = multi_hot
        queue = MemoryQueue if pool == "gathered" else ShardedQueue
        self.queue = queue(queue_size, num_classes, ignore_index, keep=queue_keep, multi_hot=multi_hot)
        self._num_draws = 0
        self._warned: set[str] = set()
        self._hints = Hints(type(self).__name__)
        self.register_load_state_dict_pre_hook(check_saved_queues)
        self.register_load_state_dict_pre_hook(_check_own_rows)

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
    @completed(local_pool)
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
            return_per_class: also return the loss of each class and which classes are valid.
            indexes: (N,) integers, the query of each row, on every rank or on none; :class:`SmoothAPLoss` alone takes
                it. Requires ``num_classes=1`` and no ``max_pool_size``. ``reduction`` and ``return_per_class`` then
                refer to the queries of all ranks: (queries,) in the order of their sorted indexes. The queue is neither
                read nor filled.

        Returns:
            The loss, or ``LossWithClasses(loss, per_class, valid)`` with ``return_per_class``.

        Raises:
            TypeError, ValueError: for arguments that do not fit; on every rank, with nothing enqueued.
            RuntimeError: when ranks disagree about the call or the state, or inside activation checkpointing.
        """
        return self._loss(logits, *self._pool(logits, targets, iid_mask, sample_weight, indexes), return_per_class)

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the loss of each class over ``pool``; the formula of the subclass."""
        raise NotImplementedError

    def fits_in_a_graph(self) -> bool:
        """Return whether a call communicates with no other rank and keeps no state, so that it can be compiled."""
        return super().fits_in_a_graph() and self.queue_size == 0 and self.max_pool_size is None

    def _at_temperature(self, pool: Pool) -> tuple[Pool, float]:
        """Return the pool and the temperature for the formula of a subclass with an automatic temperature."""
        assert self.spread_multiple is not None
        scaled, temperature = at_temperature(pool, self.temperature, self.spread_multiple)
        if has_values(pool.scores):
            self._last_temperature = temperature
        return scaled, temperature

    def _shared_temperature(self, pool: Pool, shared: PoolFacts) -> float | None:
        """Return the temperature for the parts of a sharded pool; None if that takes a look at all of its rows."""
        assert self.spread_multiple is not None
        temperature = agreed_temperature(pool, shared, self.temperature, self.spread_multiple)
        self._last_temperature = temperature
        return temperature

    def _per_class_of_part(self, pool: Pool, shared: PoolFacts) -> PerClass | None:
        """Return the loss of each class over the parts of a pool that the ranks hold, the same on every rank.

        None asks for the rows to be gathered, for ``compute_per_class``; that is what a subclass without a form of
        its own does. The choice depends on what is equal on all ranks, such as ``shared``, alone.

        Args:
            pool: this rank's live rows, then its queued rows.
            shared: what every rank knows of the others.
        """
        return None

    def _loss(
        self, logits: Tensor, pool: Pool, live: Batch, found: Found | None, return_per_class: bool
    ) -> Tensor | LossWithClasses:
        """Return the loss over ``pool``, and enqueue the live rows."""
        per_class = None if found is None else found.per_class
        if per_class is None:
            per_class = self.compute_per_class(pool)
        loss = reduce_values(per_class, self.reduction, pool.scores.dtype)
        self._finish(pool, live, per_class, found)
        return LossWithClasses.of(loss, per_class) if return_per_class else loss

    def _pool(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None,
        sample_weight: Tensor | None,
        indexes: Tensor | None = None,
        needs_rows: bool = False,
    ) -> tuple[Pool, Batch, Found | None]:
        """Return the pool, the live rows that enter the queue, and what was found if the pool is sharded.

        The live rows are those of all ranks, or of this rank if the pool is sharded. With ``indexes`` the pool is the
        live rows alone, and it is not sharded. ``needs_rows`` gathers the rows of a sharded pool in any case.
        """
        call = type(self).__name__
        if not torch.compiler.is_compiling():
            refuse_in_backward(call)

        def check() -> Batch:
            if self.has_temperature:
                check_temperature(self.temperature, self.spread_multiple is not None)
            if indexes is not None and not self.ranks_queries:
                raise TypeError(
                    expected("indexes", "None, since this loss ranks one pool", indexes, "Use SmoothAPLoss.")
                )
            if indexes is not None and self.max_pool_size is not None:
                fix = "A draw would take rows out of their queries."
                raise ValueError(expected("max_pool_size", "None in a call with indexes", self.max_pool_size, fix))
            given = (logits, targets, iid_mask, sample_weight)
            stored = self.queue.wanted if self._enqueues else None
            return check_batch(*given, self._rule, indexes=indexes, validate_args=self.validate_args, stored=stored)

        def facts() -> dict[str, object]:
            return {
                **self._shared_facts(),
                **({"temperature": State(self.temperature, SAME_TEMPERATURE)} if self.has_temperature else {}),
                "enqueues rows": State(self._enqueues, _SAME_MODE),
                "ranks queued rows": State(self._ranks_queue, _SAME_MODE),
                "queue": State(self.queue.position, SAME_QUEUE),
                "draws": State(self._num_draws, "Load the same checkpoint on every rank."),
                "with indexes": indexes is not None,
            }

        def bring() -> Offer[None]:
            self._check_not_gathered(group, logits=logits, targets=targets)
            live = check()
            checksum = Checksum(self.queue.checksum, "queue", SAME_QUEUE) if self.queue_size else None
            return Offer(None, facts(), totals=live.counts, checksum=checksum, tensors=live.tensors)

        def bring_part() -> Offer[tuple[Batch, Pool]]:
            assert group is not None
            self._check_not_gathered(group, logits=logits, targets=targets)
            live = check()
            check_rows(live.tensors)
            self._sharded_queue.take_place(group.rank(), group.size())
            queued = self._queued_rows()
            part = self._join(live, queued)
            stored = self._sharded_queue.count(live.logits, live.targets) if self._enqueues else 0
            weights = live.sample_weight, None if queued is None else queued.sample_weight
            is_huge = any(weight is not None and bool(weight_unit(weight) != 1) for weight in weights)
            totals = totals_of(part, stored, is_huge)
            loaded = Checksum(self.queue.checksum, "queue", SAME_QUEUE) if self.queue_size else None
            shared = {**facts(), "needs rows": needs_rows}
            return Offer((live, part), shared, totals=totals, checksum=loaded, tensors=live.tensors)

        group = self._resolve_group()
        if group is None:
            live = check()
            if self.pool == "sharded" and indexes is None and (self._ranks_queue or self._enqueues):
                self._sharded_queue.take_whole(type(self).__name__)
        elif self.pool == "sharded" and indexes is None:
            agreed = agree_on(call, group, bring_part)
            return self._sharded(Exchange(call, group), agreed, needs_rows)
        else:
            gathered = gather_agreed(call, group, bring, gradient_reduction=self.gradient_reduction)
            live = Batch(*gathered.tensors).with_counts(gathered.totals)
        return self._join(live, self._queued_rows()), live, None

    def _sharded(
        self, exchange: Exchange, agreed: Agreement[tuple[Batch, Pool]], needs_rows: bool
    ) -> tuple[Pool, Batch, Found]:
        """Return what :meth:`_pool` does: this rank's part with the loss over all of them, or the rows of all ranks."""
        live, part = agreed.value
        needs_grad = torch.is_grad_enabled() and live.logits.requires_grad
        scale = gradient_scale(self.gradient_reduction, exchange.group, needs_grad=needs_grad)
        queue = self._sharded_queue if self._ranks_queue and self._sharded_queue.num_held else None
        shared = PoolFacts.of(exchange, scale, agreed, queue, live.sample_weight is not None)
        per_class = None if needs_rows else self._per_class_of_part(part, shared)
        if per_class is None:
            rows = gather_after(exchange.call, exchange.group, agreed, self.gradient_reduction)
            queued = self._sharded_queue.whole(exchange) if shared.num_queued else None
            part = self._join(Batch(*rows), queued)
        return part, live, Found(per_class, shared)

    @property
    def _sharded_queue(self) -> ShardedQueue:
        assert isinstance(self.queue, ShardedQueue)
        return self.queue

    def _queued_rows(self) -> QueueRows | None:
        """Return the rows of the queue that belong to the pool, None without any."""
        return self.queue.rows() if self._ranks_queue and len(self.queue) else None

    @property
    def _rule(self) -> TargetRule:
        return TargetRule(self.num_classes, self.ignore_index, self.multi_hot)

    @property
    def _enqueues(self) -> bool:
        return self.queue_size > 0 and (self.training or self.update_queue_in_eval)

    @property
    def _ranks_queue(self) -> bool:
        return self.queue_size > 0 and (self.training or self.queue_in_eval)

    def _join(self, live: Batch, queued: QueueRows | None) -> Pool:
        """Return the pool of live and queued rows, at most ``max_pool_size`` of them."""
        if live.indexes is not None:  # rows of earlier steps belong to other queries
            return one_vs_rest(live, self._rule)
        batch, is_live = live, None
        if queued is not None:
            batch = with_queue(live, queued, self.multi_hot)
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

    def _finish(self, pool: Pool, live: Batch, per_class: PerClass, found: Found | None = None) -> None:
        """Enqueue the live rows, and warn of a likely misuse."""
        num_rows, num_queued = pool.scores.shape[1], len(self.queue)
        if found is not None:
            num_rows, num_queued = found.shared.num_rows, found.shared.num_queued
        is_full = num_queued == self.queue_size
        if self._enqueues and live.indexes is None and not live.logits.is_meta:
            rows = live.logits, live.targets, live.iid_mask, live.sample_weight
            if found is None:
                self.queue.enqueue(*rows, num_stored=live.num_stored)
            else:
                shared = found.shared
                mark = shared.low, shared.high, *shared.positives
                self._sharded_queue.enqueue(*rows, shared.stored, num_rows=sum(shared.rows), mark=mark)
        if self.validate_args and self.training and live.indexes is None and has_values(live.logits):
            setting = Setting(self._width_of_step(), self._small_pool_hint(num_rows) if is_full else None)
            if found is not None:  # what a hint says about some ranks' rows alone could stop these ranks alone
                none = torch.zeros(0, dtype=torch.int64, device=live.logits.device)
                pool, live = pool._replace(scores=pool.scores.detach()), live.take(none)
            self._hints.observe(setting, live, pool, per_class)

    def _width_of_step(self) -> float | None:
        """Return the temperature if it is a number that decides which positives have a gradient."""
        return self.temperature if self.has_temperature else None

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)

    def reset_queue(self) -> None:
        """Remove all queued rows. With several ranks, call it on every rank."""
        self.queue.reset()

    @not_compiled
    def gather_queue(self) -> None:
        """With ``pool="sharded"``, let the next ``state_dict`` hold the queue of all ranks; call it on every rank.

        That state loads on any number of ranks, and with ``pool="gathered"``. Without this call each rank saves its own
        rows, which load on the same rank of the same number of ranks. ``state_dict`` itself never communicates. With
        ``pool="gathered"`` every rank holds the whole queue, and there is nothing to do.

        Raises:
            RuntimeError: on every rank, when a rank makes another call or its queue is in another state.
            ValueError: on every rank, when the queue of one was loaded from the rows of another rank.
        """
        if isinstance(self.queue, ShardedQueue):
            self.queue.gather(self._resolve_group())

    def get_extra_state(self) -> dict[str, Any]:
        """Return what changes during training besides the queue: the temperature and the number of draws."""
        state: dict[str, Any] = {"num_draws": self._num_draws}
        if self.has_temperature:
            state["temperature"] = saved_temperature(self.temperature)
        return state

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self._num_draws = int(state["num_draws"])
        if self.has_temperature:
            self.temperature = loaded_temperature(state["temperature"])

    @property
    def pool(self) -> PoolForm:
        """``"gathered"`` or ``"sharded"``, as constructed: the queue is of that kind."""
        form: PoolForm = self._pool_form
        return form

    def _small_pool_hint(self, rows: int) -> str | None:
        """Return what is wrong with a pool of ``rows`` rows and how to fix it, or None."""
        return None

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``, and for the comparison between ranks."""
        names = ("num_classes", *self._own_arguments(), "queue_size", "reduction", "ignore_index", "max_pool_size")
        names = (*names, "gradient_reduction", "queue_keep", "queue_in_eval", "multi_hot")
        names = names if self.pool == "gathered" else (*names, "pool")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def _own_arguments(self) -> tuple[str, ...]:
        """Return the names of the subclass's own arguments, for ``repr``."""
        return ()


def _check_own_rows(module: RankingLoss, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    """Raise ValueError if ``state_dict`` has queued rows of another rank; a pre-hook of the load."""
    state = state_dict.get(f"{prefix}queue._extra_state", {})
    if "rank" in state and isinstance(module.queue, ShardedQueue):
        group = module._resolve_group()
        if group is not None:  # else the first call compares: the process group may come later
            module.queue.check_place(state, group.rank(), group.size())
