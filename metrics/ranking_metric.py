"""What the ranking metrics share: their state, how it travels between ranks, and the average over classes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import rank_zero_warn
from torchmetrics.utilities.distributed import gather_all_tensors

from ..distributed.gather import Rows, gather_agreed
from ..distributed.group import Group, resolve_group
from ..distributed.header import Offer, State, agree_on
from ..errors import check_count, check_int, expected
from ..losses.batch import Batch, TargetRule, check_batch, compute_dtype
from ..losses.distributed_loss import SAME_ARGUMENTS
from ..losses.pool import PerClass, Pool, one_vs_rest

Average = Literal["macro"] | None

# The state holds no ignored row, so nothing is left to ignore; no class has this index.
_NOTHING = -1


class RankingMetric(Metric):
    """Base of the metrics over all rows seen; a subclass adds its hyper-parameters and its formula.

    Every row that is not ignored is kept until :meth:`reset`: 4 * num_classes + 8 bytes for float32 or half-precision
    logits. The value is computed and returned in float64.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        average: ``"macro"`` for the mean over the valid classes, None for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        **kwargs: arguments of :class:`torchmetrics.Metric`, such as ``process_group`` or ``sync_on_compute``.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    plot_legend_name = "Class"

    logits: list[Tensor]
    targets: list[Tensor]
    target_rule: Tensor

    def __init__(self, num_classes: int, average: Average, ignore_index: int, **kwargs: Any) -> None:
        check_count("num_classes", num_classes, 1)
        check_int("ignore_index", ignore_index)
        if average not in ("macro", None):
            raise ValueError(expected("average", "'macro' or None", average))
        super().__init__(**kwargs)
        self.num_classes, self.average, self.ignore_index = num_classes, average, ignore_index
        self.add_state("logits", default=[], dist_reduce_fx="cat")
        self.add_state("targets", default=[], dist_reduce_fx="cat")
        # MetricCollection lets metrics whose states are equal after the first update share one state from then on. That
        # must not join two that read targets differently, so how they are read is part of the state.
        self.add_state("target_rule", default=torch.tensor([num_classes, ignore_index]), dist_reduce_fx="max")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add rows.

        Args:
            logits: (N, C) raw scores of any floating dtype; half precision is kept as float32.
            targets: (N,) or (N, 1) class indices, or 0 and 1 when C = 1, integers or bools.

        Raises:
            TypeError: for logits that are not floating, or targets that are.
            ValueError: for shapes that do not fit, tensors on two devices, or a class index out of range.
        """
        batch = check_batch(logits, targets, None, None, TargetRule(self.num_classes, self.ignore_index))
        kept = batch.targets != self.ignore_index
        self.logits.append(batch.logits.detach().to(compute_dtype(logits.dtype))[kept])
        self.targets.append(batch.targets[kept])

    def compute(self) -> Tensor:
        """Return the metric over the rows of all updates, and of all ranks when it synchronizes."""
        logits, targets = self._rows()
        if self._is_synced and len(targets) == 0:
            rank_zero_warn(
                f"The ``compute`` method of metric {type(self).__name__} found no row on any rank: the value is NaN.",
                UserWarning,
            )
        pool = one_vs_rest(Batch(logits, targets), TargetRule(self.num_classes, _NOTHING))
        values, valid = self.compute_per_class(pool)
        poisoned = pool.scores.isnan().any(dim=1)  # [C]
        values = values.masked_fill(poisoned | ~valid, math.nan)
        # The mean over no class is NaN.
        return values if self.average is None else values[valid | poisoned].mean()

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the value of each class over ``pool``; the formula of the subclass."""
        raise NotImplementedError

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot ``val``, results of ``forward`` or ``compute`` (by default a new one), and return figure and axes."""
        return self._plot(val, ax)

    def extra_repr(self) -> str:
        """Return the hyper-parameters."""
        names = ("num_classes", *self._own_arguments(), "average", "ignore_index")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def _own_arguments(self) -> tuple[str, ...]:
        return ()

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return all rows of the state as (M, C) float64 and (M,) int64, whatever was seen, nothing included."""
        if self.logits:
            return torch.cat(self.logits).to(torch.float64), torch.cat(self.targets).to(torch.int64)
        device = torch.device("cpu") if self.compute_on_cpu else self.device
        logits = torch.empty(0, self.num_classes, dtype=torch.float64, device=device)
        return logits, torch.empty(0, dtype=torch.int64, device=device)

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Group = None) -> None:
        """Replace the state with the rows of all ranks.

        This is the hook between torchmetrics' ``sync`` and ``unsync``, which keep the local state. Its own version
        gathers each tensor of a list by itself: a rank with an empty list makes other collectives than the rest, and
        they abort or wait for it. Here every rank sends one block, of the same dtypes even without rows.
        """
        group = self.process_group if process_group is None else process_group
        if dist_sync_fn is gather_all_tensors:
            logits, targets = self._gather(group)
        else:
            logits, targets = (torch.cat(list(dist_sync_fn(rows, group=group))) for rows in self._rows())
        # New lists: the old ones may be shared with other metrics of a MetricCollection.
        self.logits, self.targets = [logits], [targets]

    def _gather(self, group: Group) -> tuple[Tensor, Tensor]:
        resolved = resolve_group(group, name="process_group")
        if dist.get_world_size(resolved) == 1:
            return self._rows()
        call = f"{type(self).__name__}.sync"
        facts = {"arguments": State(self.extra_repr(), SAME_ARGUMENTS)}
        logits, targets = gather_agreed(call, resolved, lambda: Rows(self._rows(), facts)).tensors
        assert logits is not None
        assert targets is not None
        return logits, targets

    def _agree_on_cache(self) -> None:
        """Drop the cached value unless every rank has one.

        torchmetrics returns it without asking the others. A rank without new rows would do so while the rest, which
        have some, wait for it in the gather.
        """
        if self.dist_sync_fn is not None:
            self._computed = None  # how its ranks communicate is not known here
        if self.dist_sync_fn is not None or not self.compute_with_cache:
            return
        group = resolve_group(self.process_group, name="process_group")
        if dist.get_world_size(group) > 1:
            facts = {"arguments": State(self.extra_repr(), SAME_ARGUMENTS)}
            offer = Offer(None, facts, totals=[float(self._computed is not None)])
            cached = agree_on(f"{type(self).__name__}.compute", group, lambda: offer).totals[:, 0]
            if cached.min() == 0:
                self._computed = None

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap as torchmetrics does, without three of its effects that are wrong here."""
        wrapped = super()._wrap_compute(compute)

        @functools.wraps(compute)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            synchronizes = self._to_sync and not self._is_synced and self.distributed_available_fn()
            if synchronizes:
                self._agree_on_cache()
            # torchmetrics warns before it synchronizes that this rank has no rows. Others may have them; `compute`
            # warns when none has.
            count = self._update_count
            if synchronizes or self._is_synced:
                self._update_count = max(count, 1)
            try:
                value = wrapped(*args, **kwargs)
            finally:
                self._update_count = count
            # torchmetrics squeezes (1,) to ().
            return value if self.average == "macro" else value.reshape(self.num_classes)

        return wrapper

    def __deepcopy__(self, memo: dict[int, Any]) -> RankingMetric:
        """Copy all but the process group, which cannot be copied: the copy shares it, as a loss's does."""
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin
