"""Smooth average precision."""

from __future__ import annotations

import torch
from torch import Tensor

from .pool import LossWithClasses, PerClass, Pool, local_pool, positive_shares, reduce_classes
from .ranking import RankingLoss, Reduction
from .soft_ranks import smooth_ap_sums


def smooth_ap(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 0.01,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    return_per_class: bool = False,
    *,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Tensor | LossWithClasses:
    r"""Compute one minus the smooth average precision of each class against the rest.

    .. math::
        L = 1 - \frac{1}{|P|} \sum_{i \in P}
            \frac{1 + \sum_{j \in P, j \ne i} \sigma((x_j - x_i)/\tau)}{1 + \sum_{j \ne i} \sigma((x_j - x_i)/\tau)}

    Args:
        logits: (N, C) raw scores; C = 1 is binary.
        targets: (N,) class indices, or 0 and 1 when C = 1; (N, C) with ``multi_hot``.
        temperature: tau > 0, in units of the scores; the smaller, the closer to the exact metric.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,).
        ignore_index: rows with this target take no part.
        return_per_class: return ``LossWithClasses(loss, per_class, valid)``.
        sample_weight: (N,) >= 0, weights of the positives in the mean over P.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``.
        validate_args: check target ranges and weights.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate:
        A class without a positive of positive weight, or without a negative, is invalid: left out of the mean and the
        sum, NaN under ``"none"``. With no valid class the loss is 0 and its gradient too.

    Numerics:
        Half precision is computed in float32. O(positives x N) time, O(N C) memory.

    Example:
        >>> import torch
        >>> smooth_ap(torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([1, 0, 1]))
        tensor(0.1667)

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
        multi_hot=multi_hot,
        validate_args=validate_args,
    )
    result = reduce_classes(smooth_ap_per_class(pool, temperature), pool, reduction)
    return result if return_per_class else result.loss


def smooth_ap_per_class(pool: Pool, temperature: float) -> PerClass:
    """Return one minus the smooth average precision of each class of ``pool``."""
    share, has_positive = positive_shares(pool, pool.positive)
    valid = has_positive & pool.negative.any(dim=1)
    share = torch.where(valid[:, None], share, torch.zeros_like(share))  # no pair of an invalid class is looked at
    return PerClass(smooth_ap_sums(pool.scores, pool.positive, pool.member, share, temperature), valid)


class SmoothAPLoss(RankingLoss):
    """One minus the smooth average precision, over the rows of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.smooth_ap`; arguments, the pool and what travels between ranks are
    those of :class:`~fullrank.losses.RankingLoss`. The default temperature of 0.01 suits scores of unit scale.

    Example:
        >>> import torch
        >>> loss = SmoothAPLoss(num_classes=1, queue_size=0)
        >>> loss(torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([1, 0, 1]))
        tensor(0.1667)

    Reference:
        Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020.
    """

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return one minus the smooth average precision of each class."""
        return smooth_ap_per_class(pool, self.temperature)
