"""Smooth average precision."""

from __future__ import annotations

import torch
from torch import Tensor

from ..distributed.torch_private import not_compiled
from ..kernels.soft_ranks import smooth_ap_sums
from .pool import LossWithClasses, PerClass, Pool, local_pool, reduce_classes, with_classes
from .queries import group_rows
from .ranking import RankingLoss, Reduction


def smooth_ap(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 0.01,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    return_per_class: bool = False,
    *,
    sample_weight: Tensor | None = None,
    indexes: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Tensor | LossWithClasses:
    r"""Compute one minus the smooth average precision of each class against the rest, or of each query.

    .. math::
        L = 1 - \frac{1}{|P|} \sum_{i \in P}
            \frac{1 + \sum_{j \in P, j \ne i} \sigma((x_j - x_i)/\tau)}{1 + \sum_{j \ne i} \sigma((x_j - x_i)/\tau)}

    With ``indexes`` there is one such loss for each query, over its rows alone, and "class" below reads "query". It is
    what torchmetrics' ``RetrievalMAP`` measures, but for queries without a negative: there it counts an AP of 1, and
    here nothing. Those without a positive count nowhere with its ``empty_target_action="skip"``.

    Args:
        logits: (N, C) raw scores; C = 1 is binary.
        targets: (N,) class indices, or 0 and 1 when C = 1; (N, C) with ``multi_hot``.
        temperature: tau > 0, in units of the scores: a hundredth to a tenth of their spread. The smaller, the closer to
            the exact metric, and the fewer rows have gradient.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,).
        ignore_index: rows with this target take no part.
        return_per_class: return ``LossWithClasses(loss, per_class, valid)``.
        sample_weight: (N,) >= 0, weights of the positives in the mean over P.
        indexes: (N,) integers, with C = 1: rows with the same one belong to the same query, in any order and number.
            ``"none"`` gives (queries,) in the order of ``indexes.unique()``, and ``return_per_class`` likewise.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``.
        validate_args: check target ranges and weights; never done while compiling.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate:
        A class without a positive of positive weight, or without a negative, is invalid: left out of the mean and the
        sum, NaN under ``"none"``. With no valid class the loss is 0 and its gradient too.

    Numerics:
        Half precision is computed in float32. O(N C) memory, and time but for small N, where it is O(positives x N).
        Queries are padded to like lengths, which at most doubles the rows; compiled graphs leave their grouping out.

    Example:
        >>> import torch
        >>> logits, targets = torch.tensor([[3.0], [2.0], [1.0], [0.0], [1.0]]), torch.tensor([1, 0, 1, 1, 0])
        >>> smooth_ap(logits[:3], targets[:3])
        tensor(0.1667)
        >>> smooth_ap(logits, targets, reduction="none", indexes=torch.tensor([4, 4, 4, 7, 7]))
        tensor([0.1667, 0.5000])

    Reference:
        Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020, eq. 6.
    """
    pool = local_pool(
        logits,
        targets,
        temperature,
        reduction,
        ignore_index,
        sample_weight=sample_weight,
        indexes=indexes,
        multi_hot=multi_hot,
        validate_args=validate_args,
    )
    per_class = smooth_ap_per_class(pool, temperature)
    loss = reduce_classes(per_class, pool, reduction)
    return with_classes(loss, per_class) if return_per_class else loss


def smooth_ap_per_class(pool: Pool, temperature: float) -> PerClass:
    """Return one minus the smooth average precision of each class of ``pool``, or of each query if it has indexes."""
    if pool.indexes is not None:
        return _per_query(pool, pool.indexes, temperature)
    return PerClass(*smooth_ap_sums(pool.scores, pool.positive, pool.member, pool.weight, temperature))


@not_compiled
def _per_query(pool: Pool, indexes: Tensor, temperature: float) -> PerClass:
    """Return one minus the smooth average precision of each query, in the order of its index."""
    scores, positive = pool.scores[0], pool.positive[0]
    num_queries, blocks = group_rows(indexes)
    values, valid = scores.new_zeros(num_queries, dtype=torch.float64), positive.new_zeros(num_queries)
    values = values + scores[:0].sum()  # without a block it would not be connected to the rows
    for block in blocks:
        member = block.present if pool.member is None else block.take(pool.member[0])
        weight = None if pool.weight is None else block.take(pool.weight)
        loss, holds = smooth_ap_sums(block.take(scores), block.take(positive), member, weight, temperature)
        values = values.index_copy(0, block.queries, loss)
        valid[block.queries] = holds
    return PerClass(values, valid)


class SmoothAPLoss(RankingLoss):
    """One minus the smooth average precision, over the rows of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.smooth_ap`. The pool is the rows of all ranks and of the queue.

    A call with ``indexes`` is about queries instead, one loss for each: rows with the same index on whatever rank are
    one query, and since rows of earlier steps belong to others, it neither reads nor fills the queue.

    The temperature is in units of the scores: a hundredth to a tenth of their spread. The default of 0.01 suits scores
    of unit scale; with logits that spread over 10 it gives gradient to few rows: use 0.1 to 1.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        queue_size: rows of the memory queue, 0 for none. Queued rows belong to the pool and carry no gradient.
        temperature: width of the sigmoid that stands for the step, > 0, in units of the scores; see above.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        update_queue_in_eval: let rows enter the queue in eval mode too.
        gather_distributed: None detects a process group at the forward, False keeps to this rank, True demands a group.
        max_pool_size: draw at most this many rows of the pool, with a quota for every class; None for all.
        group: process group or device mesh of the data-parallel ranks; None for the default group.
        gradient_reduction: how the wrapper combines parameter gradients: ``"mean"``, ``"sum"``, or a number of ranks.
        queue_keep: ``"all"`` rows, or ``"negatives"``, so that queued positives do not dilute the live ones' gradient;
            beside a pointwise loss, since against constant negatives all scores may rise together.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        validate_args: check values (target ranges, weights), which waits for the device; never done while compiling.

    Shape:
        logits (N, C), targets (N,), or (N, C) with ``multi_hot``; N may differ between ranks and may be 0. Output
        scalar, or (C,) with ``reduction="none"``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, at construction and in the forward, on every rank.
        RuntimeError: when ranks disagree about the call or the state, or inside activation checkpointing.

    Degenerate:
        A class without a positive of positive weight, or without a negative, is invalid: left out of the mean and the
        sum. With no valid class the loss is 0 and its gradient too.

    Distributed:
        Two collectives forward, the header and one payload with the rows of all ranks; none backward. Every rank gets
        the same value and holds the same queue.

    Example:
        >>> import torch
        >>> loss = SmoothAPLoss(num_classes=1, queue_size=0)
        >>> loss(torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([1, 0, 1]))
        tensor(0.1667)

    Reference:
        Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020.
    """

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
        """Return the loss as :meth:`RankingLoss.forward` does, or that of each query.

        Args:
            logits, targets, iid_mask, return_per_class, sample_weight: see :meth:`RankingLoss.forward`.
            indexes: (N,) integers, the query of each row, on every rank or on none; needs ``num_classes=1`` and no
                ``max_pool_size``. ``reduction`` is then over the queries of all ranks, and so is ``return_per_class``:
                (queries,) in the order of the sorted indexes of all ranks. The queue is neither read nor filled.
        """
        pool, live = self._pool(logits, targets, iid_mask, sample_weight, indexes)
        return self._loss(pool, live, return_per_class)

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return one minus the smooth average precision of each class, or of each query."""
        return smooth_ap_per_class(pool, self.temperature)
