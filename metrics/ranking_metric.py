"""What the ranking metrics share: their state, the checks of their inputs, and the average over classes."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics.utilities import rank_zero_warn

from ..errors import Words, check_count, check_int, expected
from ..losses.arguments import completed
from ..losses.pooled.base import RankingLoss
from ..losses.pooled.pool import PerClass, Pool, local_pool
from ..losses.rows import Batch, TargetRule, check_batch, compute_dtype
from .review_curve import ReviewCurve
from .torchmetrics_private import GatheredMetric

Average = Literal["macro"] | None

_IGNORE_NONE = -1  # an ignore_index that no target has; `update` has dropped the ignored rows


@completed(RankingLoss)
class RankingMetric(GatheredMetric):
    """Base of the metrics over all rows seen; a subclass adds its hyper-parameters and its formula.

    Args:
        average: ``"macro"`` for the mean over the valid classes, None for (C,) with NaN where not valid.
        **kwargs: arguments of :class:`torchmetrics.Metric`, such as ``process_group`` or ``sync_on_compute``.

    Shape:
        update: logits (N, C), or (N,) when C = 1; targets (N,) or (N, 1), or (N, C) with ``multi_hot``. compute:
        float64 scalar, or (C,) with ``average=None``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, at construction and in ``update``.

    Degenerate:
        A class without a positive, or for the partial area without a negative, is NaN under ``average=None`` and left
        out of the mean; the mean over no class is NaN. A NaN score makes its class NaN, and the mean with it.

    Numerics:
        Every row that is not ignored is kept until :meth:`reset`: 4 * num_classes + 8 bytes for float32 or
        half-precision logits, and 8 for a weight. The value is computed and returned in float64.

    Distributed:
        Every rank of ``process_group`` must call ``compute``. One small collective checks whether all ranks still have
        the value of the last call; if not, two more gather the rows. A rank without rows, without rows since the last
        call, or without any ``update`` takes part like the others. Every rank gets the value of all rows.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    plot_legend_name = "Class"
    own_arguments: tuple[str, ...] = ()  # the names of the subclass's own arguments, for ``repr``

    row_states = "logits", "targets", "weights"
    logits: list[Tensor]
    targets: list[Tensor]
    weights: list[Tensor]
    target_rule: Tensor

    def __init__(
        self, num_classes: int, average: Average, ignore_index: int, multi_hot: bool = False, **kwargs: Any
    ) -> None:
        check_count("num_classes", num_classes, 1)
        check_int("ignore_index", ignore_index)
        if average not in ("macro", None):
            raise ValueError(expected("average", "'macro' or None", average))
        super().__init__(**kwargs)
        self.num_classes, self.average, self.ignore_index = num_classes, average, ignore_index
        self.multi_hot, self.result_shape = multi_hot, (num_classes,) if average is None else ()
        for name in self.row_states:
            self.add_state(name, default=[], dist_reduce_fx="cat")
        # MetricCollection lets metrics whose states are equal after the first update share one state. Metrics that read
        # targets differently must not share it, so the rule by which targets are read is part of the state.
        rule = torch.tensor([num_classes, ignore_index, int(multi_hot)])
        self.add_state("target_rule", default=rule, dist_reduce_fx="max")

    @completed(local_pool)
    def update(
        self,
        logits: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        preds: Tensor | None = None,
        target: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> None:
        """Add rows.

        Args:
            logits: (N, C) raw scores of any floating dtype, or (N,) when C = 1; half precision is kept as float32.
            sample_weight: (N,) >= 0: a row weighs as much as w rows, and weight 0 leaves it out. None for 1.
            preds, target: other names of ``logits`` and ``targets``, those of torchmetrics.

        Raises:
            TypeError: for logits that are not floating, and for arguments that are missing or given twice.
            ValueError: for shapes that do not fit, tensors on two devices, or a class index out of range.
        """
        names = {"logits": "logits" if preds is None else "preds", "targets": "targets" if target is None else "target"}
        logits = _value_or_alias("logits", logits, "preds", preds)
        targets = _value_or_alias("targets", targets, "target", target)
        try:
            batch = check_batch(Batch(logits, targets, None, sample_weight), self._rule, weight_dtype=torch.float64)
        except (TypeError, ValueError) as error:  # with the names that the caller used
            message = re.sub(r"\b(logits|targets)\b", lambda match: names[match[0]], str(error))
            raise type(error)(message) from None
        is_kept = batch.targets != self.ignore_index
        is_kept = is_kept.any(dim=1) if self.multi_hot else is_kept
        self.logits.append(batch.logits.detach().to(compute_dtype(logits.dtype))[is_kept])
        self.targets.append(batch.targets[is_kept])
        one = torch.ones((), dtype=torch.float64, device=batch.logits.device)  # expanded, it takes no memory
        weight = batch.sample_weight
        self.weights.append(one.expand(len(self.targets[-1])) if weight is None else weight[is_kept])

    def compute(self) -> Tensor:
        """Return the metric over the rows of all updates, and of all ranks when it synchronizes."""
        rows = self.rows()
        if self.has_rows_of_all_ranks and len(rows[0]) == 0:
            rank_zero_warn(
                f"The ``compute`` method of metric {type(self).__name__} found no row on any rank: the value is NaN.",
                UserWarning,
            )
        pool = self._make_pool(*rows)
        values, valid = self.compute_per_class(pool)
        has_nan = pool.scores.isnan().any(dim=1)  # [C]
        values = values.masked_fill(has_nan | ~valid, math.nan)
        # The mean over no class is NaN.
        return values if self.average is None else values[valid | has_nan].mean()

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the value of each class over ``pool``; the formula of the subclass."""
        raise NotImplementedError

    def review_curve(self, class_index: int = 0) -> ReviewCurve:
        """Return precision, recall and threshold over the review budget, of one class; a collective like ``compute``.

        Raises:
            TypeError, ValueError: for a class that does not exist; on every rank, for a score that is NaN.
        """
        if not 0 <= check_int("class_index", class_index) < self.num_classes:
            raise ValueError(expected("class_index", f"0 to {self.num_classes - 1}", class_index))
        pool = self._make_pool(*self.synchronized_rows())
        member = pool.everyone[class_index]
        scores, positive = pool.scores[class_index][member], pool.positive[class_index][member]
        if scores.isnan().any():
            raise ValueError(expected(f"the scores of class {class_index}", "numbers", Words("NaN")))
        return ReviewCurve.of(scores, positive, None if pool.key_weight is None else pool.key_weight[member])

    def _make_pool(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Pool:
        rule = self._rule if self.multi_hot else TargetRule(self.num_classes, _IGNORE_NONE)
        return Pool(Batch(logits, targets, sample_weight=weights, rule=rule))

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return all rows, in these dtypes even without rows: (M, C) float64, (M,) int64 or (M, C), (M,) float64."""
        dtype = self._rule.dtype
        if self.logits:
            weights = torch.cat(self.weights).to(torch.float64)
            return torch.cat(self.logits).to(torch.float64), torch.cat(self.targets).to(dtype), weights
        device = torch.device("cpu") if self.compute_on_cpu else self.device
        logits = torch.empty(0, self.num_classes, dtype=torch.float64, device=device)
        targets = torch.empty((0, self.num_classes) if self.multi_hot else 0, dtype=dtype, device=device)
        return logits, targets, torch.empty(0, dtype=torch.float64, device=device)

    @property
    def _rule(self) -> TargetRule:
        return TargetRule(self.num_classes, self.ignore_index, self.multi_hot)

    def extra_repr(self) -> str:
        """Return the hyper-parameters."""
        names = ("num_classes", *self.own_arguments, "average", "ignore_index", "multi_hot")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def mass_of(mask: Tensor, pool: Pool) -> Tensor:
    """Return what each row of ``mask`` (C, M) counts as, float64, 0 for the others."""
    return mask.double() if pool.key_weight is None else mask * pool.key_weight


def _value_or_alias(name: str, value: Tensor | None, alias_name: str, alias: Tensor | None) -> Tensor:
    """Return the argument ``name``, which the caller may also pass as ``alias_name``."""
    if (value is None) == (alias is None):
        got = Words("neither" if value is None else "both")
        raise TypeError(expected(name, f"{name} or {alias_name}", got, "Pass one of them."))
    return alias if value is None else value  # type: ignore[return-value]
