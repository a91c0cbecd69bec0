"""What the pooled losses share: check, gather, join with the queue, draw, compute per class, reduce, enqueue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..distributed.gather import Rows, gather_agreed
from ..distributed.group import Group
from ..distributed.header import Checksum, State, refuse_in_backward
from ..errors import check_choice, check_count, check_int, check_positive, expected, warn
from ..queues.load_check import check_saved_queues
from ..queues.memory_queue import SAME_QUEUE, Keep, MemoryQueue
from .batch import Batch, TargetRule, check_batch, compute_dtype
from .distributed_loss import SAME_TEMPERATURE, DistributedLoss
from .pool import REDUCTIONS, LossWithClasses, PerClass, Pool, one_vs_rest, reduce_classes, with_classes
from .sampling import draw_rows

Reduction = Literal["mean", "sum", "none"]

_SAME_MODE = "Call train() or eval() on every rank; gather_distributed=False lets a rank work alone."


class RankingLoss(DistributedLoss):
    """Base of the losses over a pool of rows; a subclass adds its hyper-parameters and its formula.

    The pool is the live rows of all ranks, in rank order, then the rows of the memory queue, which carry no gradient.
    After the loss is computed the live rows enter the queue, in training mode only.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        queue_size: rows of the memory queue, 0 for none.
        temperature: width of the sigmoid that stands for the step; may be changed between steps.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        update_queue_in_eval: let rows enter the queue in eval mode too.
        max_pool_size: draw at most this many rows of the pool, with a quota for every class; None for all.
        gather_distributed: None detects a process group at the forward, False keeps to this rank, True demands a group.
        group: process group or device mesh of the data-parallel ranks; None for the default group.
        gradient_reduction: how the wrapper combines parameter gradients: ``"mean"``, ``"sum"``, or a number of ranks.
        queue_keep: ``"all"`` rows, or ``"negatives"``, so that queued positives do not dilute the live ones' gradient.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        validate_args: check values (target ranges, weights), which waits for the device; never done while compiling.
    """

    def __init__(
        self,
        num_classes: int,
        queue_size: int = 1024,
        temperature: float = 0.01,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        update_queue_in_eval: bool = False,
        gather_distributed: bool | None = None,
        max_pool_size: int | None = None,
        *,
        group: Group = None,
        gradient_reduction: str | int = "mean",
        queue_keep: Keep = "all",
        multi_hot: bool = False,
        validate_args: bool = True,
    ) -> None:
        super().__init__(gather_distributed, group, gradient_reduction, validate_args)
        self.num_classes, self.queue_size, self.ignore_index = num_classes, queue_size, ignore_index
        check_count("num_classes", num_classes, 1)
        check_count("queue_size", queue_size, 0)
        check_int("ignore_index", ignore_index)
        if max_pool_size is not None:
            check_count("max_pool_size", max_pool_size, 1)
        self.temperature = check_positive("temperature", temperature)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.update_queue_in_eval, self.multi_hot = update_queue_in_eval, multi_hot
        self.max_pool_size = max_pool_size
        self.queue_keep = check_choice("queue_keep", queue_keep, ("all", "negatives"))
        self.queue = MemoryQueue(queue_size, num_classes, ignore_index, keep=queue_keep, multi_hot=multi_hot)
        self._num_draws = 0
        self._warned: set[str] = set()
        self.register_load_state_dict_pre_hook(check_saved_queues)

    @property
    def _rule(self) -> TargetRule:
        return TargetRule(self.num_classes, self.ignore_index, self.multi_hot)

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the loss of each class over ``pool``; the formula of the subclass."""
        raise NotImplementedError

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: bool = False,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor | LossWithClasses:
        """Return the loss of this rank's rows, pooled with those of the other ranks and of the queue.

        Args:
            logits: (N, C) raw scores of this rank; N may differ between ranks and may be 0.
            targets: (N,) class indices, integers or bools; (N, C) of 0 and 1 with ``multi_hot``.
            iid_mask: (N,) bool, which rows may set thresholds in partial AUC; None for all.
            return_per_class: also return the loss of each class and which classes are valid.
            sample_weight: (N,) >= 0; the positives' weights count in the mean over positives, others never do.

        Returns:
            The loss, or ``LossWithClasses(loss, per_class, valid)`` with ``return_per_class``.

        Raises:
            TypeError, ValueError: for arguments that do not fit; on every rank, with nothing enqueued.
            RuntimeError: when ranks disagree about the call or the state, or inside activation checkpointing.
        """
        return self._loss(*self._pool(logits, targets, iid_mask, sample_weight), return_per_class)

    def _loss(self, pool: Pool, live: Batch, return_per_class: bool) -> Tensor | LossWithClasses:
        """Return the loss over ``pool``, and enqueue the live rows."""
        per_class = self.compute_per_class(pool)
        loss = reduce_classes(per_class, pool, self.reduction)
        self._enqueue(live)
        return with_classes(loss, per_class) if return_per_class else loss

    def _pool(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None,
        sample_weight: Tensor | None,
        indexes: Tensor | None = None,
    ) -> tuple[Pool, Batch]:
        """Return the pool, and the live rows of all ranks; with ``indexes`` the pool is the live rows, by query."""
        call = type(self).__name__
        refuse_in_backward(call)

        def check() -> Batch:
            check_positive("temperature", self.temperature)
            if indexes is not None and self.max_pool_size is not None:
                fix = "A draw would take rows out of their queries."
                raise ValueError(expected("max_pool_size", "None in a call with indexes", self.max_pool_size, fix))
            given = (logits, targets, iid_mask, sample_weight)
            return check_batch(*given, self._rule, indexes=indexes, validate_args=self.validate_args)

        def prepare() -> Rows:
            facts = {**self._facts(), "with indexes": indexes is not None}
            checksum = Checksum(self.queue.checksum, "queue", SAME_QUEUE) if self.queue_size else None
            return Rows(check().tensors, facts, checksum)

        group = self._resolve_group()
        if group is None:
            return self._join(live := check()), live
        tensors = gather_agreed(call, group, prepare, gradient_reduction=self.gradient_reduction).tensors
        live = Batch(*tensors)
        return self._join(live), live

    @property
    def _enqueues(self) -> bool:
        return self.queue_size > 0 and (self.training or self.update_queue_in_eval)

    def _facts(self) -> Mapping[str, object]:
        """Return what all ranks must agree on besides the tensors."""
        return {
            **self._shared_facts(),
            "temperature": State(self.temperature, SAME_TEMPERATURE),
            "enqueues rows": State(self._enqueues, _SAME_MODE),
            "queue": State(self.queue.position, SAME_QUEUE),
            "draws": State(self._num_draws, "Load the same checkpoint on every rank."),
        }

    def _join(self, live: Batch) -> Pool:
        """Return the pool of live and queued rows, at most ``max_pool_size`` of them."""
        batch, is_live = live, None
        if live.indexes is not None:  # rows of earlier steps belong to other queries
            return one_vs_rest(live, self._rule)
        if len(self.queue):
            count = live.logits.shape[0]
            batch = self._with_queue(live)
            is_live = torch.arange(batch.logits.shape[0], device=live.logits.device) < count
        limit = self.max_pool_size
        if limit is not None and batch.logits.shape[0] > limit:
            self._warn_once(
                "draw",
                f"{type(self).__name__}: a pool of {batch.logits.shape[0]} rows is drawn down to max_pool_size={limit} "
                "with a quota for every class. The loss is a random approximation from here on.",
            )
            index = draw_rows(batch, self._rule, limit, self._num_draws)
            # Validation on one rank must not move the draws of the training steps.
            self._num_draws += self.training
            batch, is_live = batch.take(index), None if is_live is None else is_live[index]
        return one_vs_rest(batch, self._rule, is_live, self.queue_keep)

    def _with_queue(self, live: Batch) -> Batch:
        device = live.logits.device
        queued = self.queue.rows()
        wide = compute_dtype(live.logits.dtype)
        iid, weight = live.iid_mask, live.sample_weight
        count, num_queued = live.logits.shape[0], len(self.queue)
        # A queued row was accepted as iid or weighted in its time, so the flags exist as soon as either side has them.
        iid = torch.ones(count, dtype=torch.bool, device=device) if iid is None else iid
        if weight is not None or queued.sample_weight is not None:
            ours = torch.ones(count, dtype=wide, device=device) if weight is None else weight
            theirs = queued.sample_weight
            theirs = torch.ones(num_queued, dtype=wide, device=device) if theirs is None else theirs.to(ours)
            weight = torch.cat([ours, theirs])
        return Batch(
            torch.cat([live.logits.to(wide), queued.logits.to(device, wide)]),
            torch.cat([live.targets, queued.targets.to(live.targets)]),
            torch.cat([iid, queued.iid_mask.to(device)]),
            weight,
        )

    def _enqueue(self, live: Batch) -> None:
        if self._enqueues and live.indexes is None:
            self.queue.enqueue(live.logits, live.targets, live.iid_mask, live.sample_weight)

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)

    def reset_queue(self) -> None:
        """Forget the queued rows; with several ranks, on every one of them."""
        self.queue.reset()

    def get_extra_state(self) -> dict[str, Any]:
        """Return what changes during training besides the queue: the temperature and the number of draws."""
        return {"temperature": float(self.temperature), "num_draws": self._num_draws}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self.temperature, self._num_draws = float(state["temperature"]), int(state["num_draws"])

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``, and for the comparison between ranks."""
        names = ("num_classes", *self._own_arguments(), "queue_size", "reduction", "ignore_index", "max_pool_size")
        names = (*names, "gradient_reduction", "queue_keep", "multi_hot")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def _own_arguments(self) -> tuple[str, ...]:
        """Return the names of the subclass's own arguments, for ``repr``."""
        return ()
