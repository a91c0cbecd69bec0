"""The arguments and the state that the losses over a pool share: the queue, the temperature, the draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import Unpack

from ..distributed.header import Checksum, State
from ..errors import check_choice, check_count, check_int, warn
from ..kernels import native
from ..queues.memory_queue import SAME_QUEUE, Keep, MemoryQueue, QueueRows, check_saved_queues
from .arguments import completed
from .distributed_loss import CurrentTemperature, GroupOptions
from .hints import Hints
from .pool import REDUCTIONS, PoolCounts, Reduction, check_temperature, local_pool
from .targets import TargetRule

_COMPARED = "name", "training", "gradient_reduction", "update_queue_in_eval", "queue_in_eval", "_num_draws"
_FIXED = {bool, float, int, str, type(None), tuple, State}  # types of arguments and of state

_SAME_MODE = "Call train() or eval() on every rank; gather_distributed=False lets a rank work alone."


class PoolOptions(GroupOptions, total=False):
    """The keyword arguments of :class:`QueuedLoss`, which its subclasses pass on as they are."""

    queue_keep: Keep
    queue_in_eval: bool
    multi_hot: bool


class HoldsQueue(CurrentTemperature):
    """Base of the losses with a memory queue: which of its rows a call uses, and what the ranks compare.

    Args:
        queue_size: rows of earlier steps that are kept, 0 for none: a cross-batch memory. The live rows are compared
            with them too. They have no loss of their own, carry no gradient, are the same on every rank, and enter
            after the loss is computed. In eval mode none is used or enters. Rows with a non-finite number never enter.
        num_features: D, for a queue that ``torch.distributed.checkpoint`` loads before the first call; else None.
    """

    queue: MemoryQueue
    queue_size: int
    update_queue_in_eval = queue_in_eval = False
    _num_draws = 0
    # What the last call compared, the types, and as which facts.
    _last_facts: tuple[list[object], list[type], dict[str, object]] = [], [], {}

    def _hold_rows(self, queue_size: int, num_features: int | None, ignore_index: int) -> None:
        """Make the queue of rows of embeddings, (queue_size, num_features) with a label each."""
        self.queue_size = check_count("queue_size", queue_size, 0)
        self.queue = MemoryQueue(queue_size, num_features, ignore_index)
        self.register_load_state_dict_pre_hook(check_saved_queues)

    def _queued_rows(self) -> QueueRows | None:
        """Return the rows of the queue that belong to the pool, None without any."""
        return self.queue.rows() if self._ranks_queue and len(self.queue) else None

    @property
    def _enqueues(self) -> bool:
        return self.queue_size > 0 and (self.training or self.update_queue_in_eval)

    @property
    def _ranks_queue(self) -> bool:
        return self.queue_size > 0 and (self.training or self.queue_in_eval)

    @property
    def _checksum(self) -> Checksum | None:
        return Checksum(self.queue.checksum, "queue", SAME_QUEUE) if self.queue_size else None

    def _state(self) -> dict[str, object]:
        return {
            **self._shared_facts(),
            "enqueues rows": State(self._enqueues, _SAME_MODE),
            "ranks queued rows": State(self._ranks_queue, _SAME_MODE),
            "queue": State(self.queue.position, SAME_QUEUE),
        }

    def _facts(self, of_call: Mapping[str, object]) -> dict[str, object]:
        """Return :meth:`_state` and ``of_call``; the object of the last call, whose hash is known, if all are equal."""
        seen = [getattr(self, name) for name in (*self._shown, *_COMPARED)]
        seen += [*self._surrounding_facts.values(), *of_call.values(), native.KERNELS]
        seen += [self.temperature] if self.has_temperature else []
        (last, types, facts), kinds = self._last_facts, [*map(type, seen)]
        # 1 and True are equal. Values of other types, such as lists, may change in place.
        if seen != last or kinds != types or not _FIXED.issuperset(kinds):
            facts = {**self._state(), **of_call}
            vars(self)["_last_facts"] = seen, kinds, facts  # an assignment to a module takes as long as an operator
        return {**facts, "queue": State(self.queue.position, SAME_QUEUE)} if self.queue_size else facts

    def reset_queue(self) -> None:
        """Remove all queued rows. With several ranks, call it on every rank."""
        self.queue.reset()


@completed(local_pool)
class QueuedLoss(HoldsQueue):
    """Base of the losses with a memory queue: holds the arguments that they share, and saves what changes.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        queue_size: rows of the memory queue, 0 for none. Queued rows belong to the pool and carry no gradient.
        update_queue_in_eval: let rows enter the queue in eval mode too.
        max_pool_size: draw at most this many rows of the pool, with a quota for every class; None uses all rows.
        queue_keep: ``"all"`` rows, or ``"negatives"`` only, which do not dilute the gradient of live positives. Combine
            these with a pointwise loss: all scores may rise against constant ones.
        queue_in_eval: let queued rows belong to the pool in eval mode too. By default validation rows are ranked alone.

    Shape:
        logits (N, C), or (N,) when C = 1; targets (N,) or (N, 1), or (N, C) with ``multi_hot``; N may differ between
        ranks and may be 0. Output scalar, or (C,) with ``reduction="none"``.
    """

    # temperature=None is this many times the spread of the scores; None in a subclass that requires a number.
    spread_multiple: ClassVar[float | None] = None
    _own_arguments: ClassVar[tuple[str, ...]] = ()  # the names of the subclass's own arguments, for ``repr``

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
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(gather_distributed, **options)
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
        self.queue = MemoryQueue(queue_size, num_classes, ignore_index, keep=queue_keep, multi_hot=multi_hot)
        self._num_draws = 0
        self._warned: set[str] = set()
        self._hints = Hints(type(self).__name__)
        self.pool_counts: PoolCounts | None = None  # of the training calls since a logger has set it
        self.register_load_state_dict_pre_hook(check_saved_queues)

    @property
    def _rule(self) -> TargetRule:
        return TargetRule(self.num_classes, self.ignore_index, self.multi_hot)

    def _state(self) -> dict[str, object]:
        return {**super()._state(), "draws": State(self._num_draws, "Load the same checkpoint on every rank.")}

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what changes during training besides the queue: the temperature and the number of draws."""
        return {"num_draws": self._num_draws, **(super().get_extra_state() if self.has_temperature else {})}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self._num_draws = int(state["num_draws"])
        super().set_extra_state(state)

    @property
    def _shown(self) -> tuple[str, ...]:
        names = ("num_classes", *self._own_arguments, "queue_size", "reduction", "ignore_index", "max_pool_size")
        return (*names, "gradient_reduction", "queue_keep", "queue_in_eval", "multi_hot")
