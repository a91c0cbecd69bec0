"""Smooth recall above a quantile of the scores."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..distributed.errors import check_choice, check_number, expected
from .pool import LossWithClasses, PerClass, Pool, local_pool, positive_shares, reduce_classes
from .quantiles import INTERPOLATIONS, upper_quantiles
from .ranking import RankingLoss, RankingOptions, Reduction
from .sigmoid_sums import sigmoid_sums


def recall_at_quantile(
    logits: Tensor,
    targets: Tensor,
    quantile: float = 0.005,
    temperature: float = 0.01,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    quantile_interpolation: str = "higher",
    return_per_class: bool = False,
    *,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Tensor | LossWithClasses:
    r"""Compute one minus the smooth share of positives above the (1 - q) quantile of all scores.

    .. math:: L = 1 - \frac{1}{|P|} \sum_{i \in P} \sigma\!\left(\frac{x_i - \theta}{\tau}\right), \quad
              \theta = Q_{1-q}(x) \text{ detached}

    Args:
        logits: (N, C) raw scores; C = 1 is binary.
        targets: (N,) class indices, or 0 and 1 when C = 1; (N, C) with ``multi_hot``.
        quantile: q in (0, 1), the share of rows that can be reviewed.
        temperature: tau > 0, in units of the scores.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,).
        ignore_index: rows with this target take no part, in the threshold either.
        quantile_interpolation: how the threshold is read between two scores: ``"linear"``, ``"lower"``, ``"higher"``,
            ``"nearest"`` or ``"midpoint"``; ``"higher"`` never admits more than the share q.
        return_per_class: return ``LossWithClasses(loss, per_class, valid)``.
        sample_weight: (N,) >= 0, weights of the positives in the mean over P; the threshold has none.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``.
        validate_args: check target ranges and weights.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate:
        A class without a positive of positive weight is invalid: left out of the mean and the sum, NaN under
        ``"none"``. With no valid class the loss is 0 and its gradient too.

    Example:
        >>> import torch
        >>> recall_at_quantile(torch.tensor([[3.0], [2.0], [1.0], [0.0]]), torch.tensor([1, 0, 1, 0]), quantile=0.5)
        tensor(0.5000)
    """
    check_quantile(quantile)
    check_choice("quantile_interpolation", quantile_interpolation, INTERPOLATIONS)
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
    per_class = recall_per_class(pool, quantile, temperature, quantile_interpolation)
    result = reduce_classes(per_class, pool, reduction)
    return result if return_per_class else result.loss


def check_quantile(quantile: float) -> float:
    """Return ``quantile`` unchanged, or raise ValueError when it is not strictly between 0 and 1."""
    check_number("quantile", quantile)
    if not 0 < quantile < 1:
        raise ValueError(expected("quantile", "a number strictly between 0 and 1", quantile))
    return quantile


def recall_per_class(pool: Pool, quantile: float, temperature: float, interpolation: str) -> PerClass:
    """Return one minus the smooth recall at the quantile, of each class of ``pool``."""
    share, valid = positive_shares(pool, pool.positive)
    threshold = upper_quantiles(pool.scores, pool.member, [quantile], interpolation)  # [C, 1]
    threshold = torch.where(valid[:, None], threshold, torch.zeros_like(threshold))
    below = sigmoid_sums(pool.scores, threshold, torch.ones_like(threshold)[:, :, None], temperature)[:, :, 0]
    return PerClass((below * share).sum(dim=1), valid)


class RecallAtQuantileLoss(RankingLoss):
    """One minus the smooth recall at a quantile, over the rows of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.recall_at_quantile`; the shared arguments, the pool and what travels
    between ranks are those of :class:`~fullrank.losses.RankingLoss`. At ``quantile=0.005`` the threshold is known only
    from some 200 rows on: let the pool have many more.

    The threshold is detached, so the gradient raises positives and lowers no negative: alone, the loss lets all scores
    rise together. Anchor it with a pointwise loss, such as ``LossWarmupWrapper(..., final_main_weight=0.5)``.

    Args:
        num_classes, queue_size, temperature, reduction, ignore_index, update_queue_in_eval, gather_distributed,
            max_pool_size: see :class:`~fullrank.losses.RankingLoss`, as for the keyword-only arguments.
        quantile: q in (0, 1), the share of rows that can be reviewed.
        quantile_interpolation: how the threshold is read between two scores.

    Example:
        >>> import torch
        >>> loss = RecallAtQuantileLoss(num_classes=1, quantile=0.5, queue_size=0)
        >>> loss(torch.tensor([[3.0], [2.0], [1.0], [0.0]]), torch.tensor([1, 0, 1, 0]))
        tensor(0.5000)
    """

    def __init__(
        self,
        num_classes: int,
        quantile: float = 0.005,
        queue_size: int = 1024,
        temperature: float = 0.01,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        update_queue_in_eval: bool = False,
        gather_distributed: bool | None = None,
        quantile_interpolation: str = "higher",
        max_pool_size: int | None = None,
        **options: Unpack[RankingOptions],
    ) -> None:
        super().__init__(
            num_classes,
            queue_size,
            temperature,
            reduction,
            ignore_index,
            update_queue_in_eval,
            gather_distributed,
            max_pool_size,
            **options,
        )
        self.quantile = check_quantile(quantile)
        self.quantile_interpolation = check_choice("quantile_interpolation", quantile_interpolation, INTERPOLATIONS)

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return one minus the smooth recall of each class."""
        return recall_per_class(pool, self.quantile, self.temperature, self.quantile_interpolation)

    def _own_arguments(self) -> tuple[str, ...]:
        return "quantile", "quantile_interpolation"
