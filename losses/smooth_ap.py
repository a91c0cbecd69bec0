"""Smooth average precision."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..distributed.gather import rows_after, times
from ..distributed.group import gradient_scale
from ..distributed.header import Agreement
from ..distributed.torch_private import not_compiled, note_kind
from ..errors import expected, first_order_only
from ..kernels import native
from ..kernels.costs import costs_of
from ..kernels.registration import refuse_forward_mode
from ..kernels.soft_ranks import smooth_ap_sums
from ..kernels.soft_ranks_plain import scaled
from ..kernels.spread import MOST_SCORES
from ..kernels.torch_private import are_numbers_in_memory
from ..queues.memory_queue import QueueRows
from .arguments import completed
from .pool import PerClass, Pool, Reduction, at_temperature, local_pool, reduce_values
from .ranking import Given, RankingLoss
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
    per_class = _per_class(*at_temperature(pool, temperature, SPREAD_MULTIPLE))
    return reduce_values(per_class, reduction, pool.scores.dtype)


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


class _WithGradient(torch.autograd.Function):
    """The number ``loss``, with the ``gradient`` of the logits that came with it, times k, divided by ``count``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: float, gradient: Tensor, count: int, k: int) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.witness, ctx.count, ctx.k = logits, count, k
        return torch.scalar_tensor(loss, dtype=logits.dtype, device=logits.device)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # As in a mean of float64 numbers, and in the backward of a gather.
        gradient = scaled(ctx.saved_tensors[0], grad if ctx.count == 1 else grad.double() / ctx.count)
        return times(gradient, ctx.k), None, None, None, None

    jvp = staticmethod(refuse_forward_mode)


def _of_small_pool(
    logits: Tensor,
    targets: Tensor,
    queued: QueueRows | None,
    temperature: float | None,
    multiple: float,
    ignore_index: int,
    num_classes: int,
    is_mean: bool,
    with_grad: bool,
) -> tuple[float, Tensor | None, int, float] | None:
    """Return the loss of a pool of at most 4,096 rows in one call of C, the gradient, its divisor, the temperature.

    None for all but an ordinary call: finite scores in contiguous memory of the host, int64 indices of the classes, and
    pairs that take less time than bins.
    """
    if not (type(logits) is type(targets) is Tensor and targets.dtype is torch.int64 and native.is_usable(logits)):
        return None
    if not are_numbers_in_memory(logits, targets):
        return None
    count = targets.shape[0] if targets.ndim == 1 else 0
    shaped = logits.shape == (count, num_classes) or (num_classes == 1 and logits.shape == (count,))
    if not (count and shaped and logits.is_contiguous() and targets.is_contiguous()):
        return None
    scores = logits.detach()
    if queued is not None:
        if queued.sample_weight is not None:
            return None
        scores = torch.cat([scores.view(count, num_classes), queued.logits.to(scores)])
        targets = torch.cat([targets, queued.targets.to(targets)])
    if targets.shape[0] > MOST_SCORES:
        return None
    most = costs_of(logits.device).most_native_pairs(num_classes, scores.numel())
    found = native.smooth_ap_step(scores, targets, ignore_index, temperature, multiple, with_grad, most)
    if found is None:
        return None
    losses, num_valid, gradient, width = found
    loss, divisor = losses[0], num_valid if is_mean else 1
    if num_classes > 1:  # the sum in the order of torch
        loss = torch.tensor(losses, dtype=torch.float64, device=logits.device).sum().item() / divisor
    return loss, gradient, divisor, width


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
        return _per_class(*self._at_temperature(pool))

    def _at_once(self, given: Given, agreed: Agreement[None] | None) -> Tensor | None:
        has_more = given.iid_mask is not None or given.sample_weight is not None or given.indexes is not None
        keeps = self.queue_keep != "all" or self.max_pool_size is not None or self.pool_counts is not None
        is_ordinary, is_mean = not (self.multi_hot or self.reduction == "none"), self.reduction == "mean"
        is_watched = self.validate_args and self.training
        is_own = type(self).compute_per_class is SmoothAPLoss.compute_per_class  # no subclass has another formula
        if not is_own or has_more or keeps or not is_ordinary or (is_watched and self._hints.looks_at_rows):
            return None
        temperature = self.temperature
        if temperature is not None and not (type(temperature) is float and 0 < temperature < math.inf):
            return None
        if torch.compiler.is_compiling():
            return None
        group = None if agreed is None else self._resolve_group()
        live = given[:2] if agreed is None or group is None else rows_after(type(self).__name__, group, agreed)
        logits = given.logits  # which may be no tensor
        with_grad = torch.is_grad_enabled() and getattr(logits, "requires_grad", False)
        settings = temperature, self.spread_multiple, self.ignore_index, self.num_classes, is_mean
        found = _of_small_pool(live[0], live[1], self._queued_rows(), *settings, with_grad)
        if found is None:
            return None
        value, gradient, divisor, self._last_temperature = found
        if gradient is None:
            loss = torch.scalar_tensor(value, dtype=logits.dtype, device=logits.device)
        else:
            begin, k = 0, 1
            if agreed is not None and group is not None:
                begin, k = sum(agreed.rows[: group.rank()]), gradient_scale(self.gradient_reduction, group)
            if gradient.shape != logits.shape:
                gradient = gradient.narrow(0, begin, logits.shape[0])
                gradient = gradient if gradient.shape == logits.shape else gradient.view(logits.shape)
            loss = _WithGradient.apply(logits, value, gradient, divisor, k)
        if self._enqueues:
            self.queue.enqueue(live[0].view(-1, self.num_classes), live[1], num_stored=live[1].shape[0])
        if is_watched:
            self._hints.observe_valid_class()
        loss = note_kind(loss) if is_mean else loss
        return loss if agreed is None else note_kind(loss, over_ranks=True)
