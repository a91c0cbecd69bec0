"""Binary cross-entropy over the positives and the highest-scoring negatives of the pool."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..errors import check_between
from .arguments import completed
from .pooled.base import PoolOptions, RankingLoss
from .pooled.pool import PerClass, Pool, Reduction, local_pool, reduce_values, spread_nan

_SNAP = 1e-9  # relative distance at which a product counts as an integer: 0.07 * 100 is 7.000000000000001


@completed(local_pool)
def hard_negative_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    share: float = 0.2,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    *,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Tensor:
    r"""Compute the binary cross-entropy over the positives and the highest-scoring share of the negatives.

    .. math:: L = \frac{\sum_{i \in P} w_i \log(1 + e^{-x_i}) + \sum_{j \in H} w_j \log(1 + e^{x_j})}
              {\sum_{i \in P \cup H} w_i}, \quad H = \{j \in N : x_j \ge \theta\}

    :math:`\theta` is the k-th highest score of the n negatives N, with k = max(1, ceil(share n)), detached. Negatives
    that tie with it belong to H, so the order of the rows does not matter. With ``share=1`` the loss of a class is
    ``torch.nn.functional.binary_cross_entropy_with_logits``.

    Args:
        share: in (0, 1], the share of the negatives of a class that count.
        sample_weight: (N,) >= 0, weights of positives and negatives in the mean, not in the choice of negatives.

    Degenerate:
        A class without positives is valid: its highest negatives still learn that they are negatives. A class without
        negatives is valid too. A class whose selected rows have no weight is invalid: left out of the mean and the sum,
        NaN under ``"none"``. With no valid class the loss is 0 with zero gradients.

    Numerics:
        Half precision is computed and returned in float32. A row at the wrong infinity gives an infinite loss, and the
        gradient that a large finite score gives.

    Example:
        >>> import torch
        >>> hard_negative_cross_entropy(torch.tensor([[0.0], [0.0], [-9.0]]), torch.tensor([1, 0, 0]), share=0.5)
        tensor(0.6931)

    Reference:
        Shrivastava, Gupta and Girshick, Training Region-based Object Detectors with Online Hard Example Mining, CVPR
        2016, which takes the examples of the highest loss; here all positives count.
    """
    check_between("share", share, 0, 1, above=True)
    given = logits, targets, 1.0, reduction, ignore_index  # there is no temperature
    pool = local_pool(*given, sample_weight=sample_weight, multi_hot=multi_hot, validate_args=validate_args)
    return reduce_values(_per_class(pool, share), reduction, pool.scores.dtype)


def _per_class(pool: Pool, share: float) -> PerClass:
    selected = pool.positive | _hardest(pool, share)  # [C, M]
    mass = selected.to(pool.scores.dtype)
    if pool.weight is not None:
        mass = mass * pool.weight
    total = mass.sum(dim=1)  # [C]
    valid = total > 0
    cross_entropy = -F.logsigmoid(torch.where(pool.positive, pool.scores, -pool.scores))  # [C, M]
    # An infinite loss counts where the row does; 0 times infinity would be NaN.
    counted = torch.where(mass > 0, cross_entropy, torch.zeros_like(cross_entropy)) * mass
    values = counted.sum(dim=1) / torch.where(valid, total, torch.ones_like(total))
    return PerClass(spread_nan(values, pool), valid)


def _hardest(pool: Pool, share: float) -> Tensor:
    """Return (C, M) bool: the negatives that score at least as high as the k-th of their class."""
    negative, num_rows = pool.negative, pool.scores.shape[1]
    if share == 1 or num_rows == 0:
        return negative
    wanted = negative.sum(dim=1, dtype=torch.float64) * share  # [C]
    rounded = wanted.round()
    exact = (wanted - rounded).abs() <= _SNAP * rounded.clamp_min(1)
    k = torch.where(exact, rounded, wanted.ceil()).clamp_min(1).to(torch.int64)
    most = min(num_rows, math.floor(share * num_rows * (1 + _SNAP)) + 2)  # at least every k
    # The other rows are at -inf, behind all negatives that k counts; a negative there ties with nothing but negatives.
    top = pool.scores.detach().masked_fill(~negative, -math.inf).topk(most, dim=1).values  # [C, most]
    threshold = top.gather(1, (k - 1).clamp_max(most - 1)[:, None])  # [C, 1]
    return negative & (pool.scores.detach() >= threshold)


@completed(hard_negative_cross_entropy)
class HardNegativeCrossEntropyLoss(RankingLoss):
    """Binary cross-entropy over the positives and the highest-scoring negatives of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.hard_negative_cross_entropy`. The negatives that count are the
    hardest of all ranks and of the queue, not the hardest of each rank. There is no temperature. ``iid_mask`` has no
    effect. With ``share=0.2`` it did not raise average precision on 29 tables (0.006 below cross-entropy).

    Args:
        queue_keep: ``"all"`` rows, or ``"negatives"`` only, which do not dilute the gradient of live positives.

    Example:
        >>> import torch
        >>> loss = HardNegativeCrossEntropyLoss(num_classes=1, share=0.5)
        >>> loss(torch.tensor([[0.0], [0.0], [-9.0]]), torch.tensor([1, 0, 0]))
        tensor(0.6931)
    """

    has_temperature = False
    _own_arguments = ("share",)

    def __init__(
        self,
        num_classes: int = 1,
        share: float = 0.2,
        queue_size: int = 0,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        update_queue_in_eval: bool = False,
        gather_distributed: bool | None = None,
        max_pool_size: int | None = None,
        **options: Unpack[PoolOptions],
    ) -> None:
        given = num_classes, queue_size, None, reduction, ignore_index, update_queue_in_eval
        super().__init__(*given, gather_distributed, max_pool_size, **options)
        self.share = check_between("share", share, 0, 1, above=True)

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the cross-entropy of each class over its positives and its hardest negatives."""
        return _per_class(pool, self.share)
