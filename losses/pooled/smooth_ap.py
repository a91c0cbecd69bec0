"""Smooth average precision."""

from __future__ import annotations

import torch
from torch import Tensor

from ...distributed.torch_private import not_compiled
from ...errors import expected
from ...kernels.smooth_ap.sums import smooth_ap_of_rows, smooth_ap_sums
from ..arguments import completed
from ..rows import compute_dtype
from .base import RankingLoss
from .pool import PerClass, Pool, Reduction, at_temperature, local_pool, reduce_values
from .rectangles import group_rows

SPREAD_MULTIPLE = 0.1  # of the spread of the scores: the automatic temperature


@completed(local_pool, at_temperature)
def smooth_ap(
    logits: Tensor,
    targets: Tensor,
    temperature: float | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    *,
    sample_weight: Tensor | None = None,
    indexes: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Tensor:
    r"""Compute one minus the smooth average precision of each class against the rest, or of each query.

    .. math::
        L = 1 - \frac{1}{|P|} \sum_{i \in P}
            \frac{1 + \sum_{j \in P, j \ne i} \sigma((x_j - x_i)/\tau)}{1 + \sum_{j \ne i} \sigma((x_j - x_i)/\tau)}

    With ``indexes`` there is one such loss for each query, over its rows alone; read "query" for "class" below. One
    minus the loss is what torchmetrics' ``RetrievalMAP`` measures with ``empty_target_action="skip"``, except for
    queries without a negative: they are left out here, and count as an AP of 1 there.

    Args:
        indexes: (N,) integers, with C = 1: rows with the same one belong to the same query, in any order and number.
            ``"none"`` gives (queries,) in the order of ``indexes.unique()``.

    Degenerate:
        A class without a positive of positive weight, or without a negative, is invalid: left out of the mean and the
        sum, NaN under ``"none"``. With no valid class the loss is 0 with zero gradients.

    Numerics:
        Half precision is computed in float32. The smaller the temperature, the closer the loss is to the exact metric,
        and the fewer rows have gradient. O(N C) memory and time; for small N the time is O(positives x N). Queries are
        padded to similar lengths, which at most doubles the rows. Grouping rows into queries breaks a compiled graph.

    Example:
        >>> import torch
        >>> logits, targets = torch.tensor([[3.0], [2.0], [1.0], [0.0], [1.0]]), torch.tensor([1, 0, 1, 1, 0])
        >>> smooth_ap(logits[:3], targets[:3])
        tensor(0.1671)
        >>> smooth_ap(logits, targets, reduction="none", indexes=torch.tensor([4, 4, 4, 7, 7]))
        tensor([0.1667, 0.5000])

    Reference:
        Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020, eq. 6.
    """
    given = logits, targets, temperature, reduction, ignore_index
    pool = local_pool(
        *given, sample_weight=sample_weight, indexes=indexes, multi_hot=multi_hot, validate_args=validate_args
    )
    per_class, _ = _loss_of(pool, temperature, SPREAD_MULTIPLE)
    return reduce_values(per_class, reduction, compute_dtype(pool.rows.logits.dtype))


def _loss_of(pool: Pool, temperature: float | None, multiple: float) -> tuple[PerClass, float]:
    """Return the loss of each class, or of each query, and the temperature, which follows the spread if it is None."""
    rows, rule = pool.rows, pool.rows.rule
    if pool.is_in_rows and rows.indexes is None and not (rule.multi_hot or pool.leaves_out_queued):
        weight = None if rows.sample_weight is None else pool.weight
        found = smooth_ap_of_rows(rows.logits, rows.targets, weight, rule.ignore_index, temperature, multiple)
        if found is not None:
            loss, valid, width = found
            return PerClass(loss, valid), width
    scores, width = at_temperature(pool, temperature, multiple)
    return _per_class(scores, width), width


def _per_class(pool: Pool, temperature: float) -> PerClass:
    """Return one minus the smooth average precision of each class of ``pool``, or of each query if it has indexes."""
    if pool.indexes is not None:
        if pool.indexes.is_meta:
            fix = "On the meta device the number of queries is unknown; leave indexes out to count operations."
            raise RuntimeError(expected("indexes", "a tensor with values", pool.indexes, fix))
        return _per_query(pool, pool.indexes, temperature)
    given = (pool.scores, pool.positive, pool.member, pool.weight, temperature)
    return PerClass(*smooth_ap_sums(*given, num_positive=pool.num_positive))


@not_compiled
def _per_query(pool: Pool, indexes: Tensor, temperature: float) -> PerClass:
    scores, positive = pool.scores[0], pool.positive[0]
    num_queries, blocks = group_rows(indexes)
    values, valid = scores.new_zeros(num_queries, dtype=torch.float64), positive.new_zeros(num_queries)
    values = values + scores[:0].sum()  # connects the loss to the rows even without a block
    for block in blocks:
        member = block.present if pool.member is None else block.take(pool.member[0])
        weight = None if pool.weight is None else block.take(pool.weight)
        loss, holds = smooth_ap_sums(block.take(scores), block.take(positive), member, weight, temperature)
        values = values.index_copy(0, block.queries, loss)
        valid[block.queries] = holds
    return PerClass(values, valid)


@completed(smooth_ap)
class SmoothAPLoss(RankingLoss):
    """One minus the smooth average precision, over the rows of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.smooth_ap`. The pool is the rows of all ranks and of the queue. With
    ``indexes`` there is one loss for each query instead, without the queue.

    Distributed:
        The collectives of :func:`~fullrank.gather_rows` forward, one or two. None backward. Every rank gets
        the same value and holds the same queue.

    Example:
        >>> import torch
        >>> loss = SmoothAPLoss(num_classes=1, queue_size=0)
        >>> loss(torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([1, 0, 1]))
        tensor(0.1671)
    """

    ranks_queries = True
    spread_multiple = SPREAD_MULTIPLE

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return one minus the smooth average precision of each class, or of each query."""
        per_class, temperature = _loss_of(pool, self.temperature, self.spread_multiple)
        self._note_temperature(pool, temperature)
        return per_class
