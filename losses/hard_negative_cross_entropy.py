"""Binary cross-entropy over the positives and the highest-scoring negatives of the pool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed.group import Group
from ..errors import check_number, expected
from ..queues.memory_queue import Keep
from .pool import LossWithClasses, PerClass, Pool, Reduction, SharedOptions, local_pool, loss_of, spread_nan
from .ranking import RankingLoss

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SNAP = 1e-9  # relative distance at which a product counts as an integer: 0.07 * 100 is 7.000000000000001


@overload
def hard_negative_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    share: float = 0.05,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    return_per_class: Literal[False] = False,
    *,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Tensor: ...
@overload
def hard_negative_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    share: float = 0.05,
    *,
    return_per_class: Literal[True],
    **options: Unpack[SharedOptions],
) -> LossWithClasses: ...
@overload
def hard_negative_cross_entropy(
    logits: Tensor, targets: Tensor, share: float = 0.05, *, return_per_class: bool, **options: Unpack[SharedOptions]
) -> Tensor | LossWithClasses: ...
def hard_negative_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    share: float = 0.05,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    return_per_class: bool = False,
    *,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Tensor | LossWithClasses:
    r"""Compute the binary cross-entropy over the positives and the highest-scoring share of the negatives.

    .. math:: L = \frac{\sum_{i \in P} w_i \log(1 + e^{-x_i}) + \sum_{j \in H} w_j \log(1 + e^{x_j})}
              {\sum_{i \in P \cup H} w_i}, \quad H = \{j \in N : x_j \ge \theta\}

    :math:`\theta` is the k-th highest score of the n negatives N, with k = max(1, ceil(share n)), detached. Negatives
    that tie with it belong to H, so the order of the rows does not matter. With ``share=1`` the loss of a class is
    ``torch.nn.functional.binary_cross_entropy_with_logits``.

    Args:
        logits: (N, C) raw scores; C = 1 is binary, and may be (N,).
        targets: (N,) or (N, 1) class indices, or 0 and 1 when C = 1; (N, C) with ``multi_hot``. Integers, bools, or
            floats that are whole numbers.
        share: in (0, 1], the share of the negatives of a class that count.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        return_per_class: return ``LossWithClasses(loss, per_class, valid)``.
        sample_weight: (N,) >= 0, weights of positives and negatives in the mean. They do not change which negatives
            are selected.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        validate_args: check values (target ranges, weights), which waits for the device; skipped while compiling.
            Types, shapes and devices are always checked.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate:
        A class without positives is valid: its highest negatives still learn that they are negatives. A class without
        negatives is valid too. A class whose selected rows have no weight is invalid: left out of the mean and the sum,
        NaN under ``"none"``. With no valid class the loss is 0 with zero gradients.

    Numerics: half precision is computed and returned in float32. A row at the wrong infinity gives an infinite loss,
    and the gradient that a large finite score gives.

    Example:
        >>> import torch
        >>> hard_negative_cross_entropy(torch.tensor([[0.0], [0.0], [-9.0]]), torch.tensor([1, 0, 0]), share=0.5)
        tensor(0.6931)

    Reference:
        Shrivastava, Gupta and Girshick, Training Region-based Object Detectors with Online Hard Example Mining, CVPR
        2016, which takes the examples of the highest loss; here all positives count.
    """
    check_share(share)
    pool = local_pool(
        logits,
        targets,
        1.0,  # there is no temperature
        reduction,
        ignore_index,
        sample_weight=sample_weight,
        multi_hot=multi_hot,
        validate_args=validate_args,
    )
    return loss_of(_per_class(pool, share), pool, reduction, return_per_class)


def check_share(share: float) -> float:
    """Return ``share`` unchanged, or raise TypeError or ValueError when it is not in (0, 1]."""
    check_number("share", share)
    if not 0 < share <= 1:
        raise ValueError(expected("share", "a number in (0, 1]", share))
    return share


def _per_class(pool: Pool, share: float) -> PerClass:
    """Return the cross-entropy of each class of ``pool`` over its positives and its hardest negatives."""
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


class HardNegativeCrossEntropyLoss(RankingLoss):
    """Binary cross-entropy over the positives and the highest-scoring negatives of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.hard_negative_cross_entropy`. The pool is the rows of all ranks and
    of the queue, so the negatives that count are the hardest of all, not the hardest of each rank. There is no
    temperature.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        share: in (0, 1], the share of the negatives of a class that count.
        queue_size: rows of the memory queue, 0 for none. Queued rows belong to the pool and carry no gradient.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        update_queue_in_eval: let rows enter the queue in eval mode too.
        gather_distributed: None uses a process group if one exists at the forward, False uses this rank's rows alone,
            True requires a process group. May be changed between steps: False while rank 0 validates alone.
        max_pool_size: draw at most this many rows of the pool, with a quota for every class; None uses all rows.
        group: process group or device mesh of the data-parallel ranks; None for the default group.
        gradient_reduction: how the wrapper combines parameter gradients over the ranks: ``"mean"`` (DDP, FSDP2, HSDP),
            ``"sum"``, or the number of ranks it averages over.
        queue_keep: ``"all"`` rows, or ``"negatives"`` only, so that queued positives do not dilute the gradient of the
            live ones.
        queue_in_eval: let queued rows belong to the pool in eval mode too. By default a validation loss ranks the
            validation rows among themselves.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        validate_args: check values (target ranges, weights), which waits for the device; skipped while compiling.
            Types, shapes and devices are always checked.
        name: what to call this loss in the comparison between ranks, None for nothing. With two losses of one class and
            equal arguments, names let ranks that call them in different orders raise.

    Shape:
        logits (N, C), or (N,) when C = 1; targets (N,) or (N, 1), or (N, C) with ``multi_hot``; N may differ between
        ranks and may be 0. Output scalar, or (C,) with ``reduction="none"``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, at construction and in the forward, on every rank.
        RuntimeError: when ranks disagree about the call or the state, or inside activation checkpointing.

    Degenerate:
        A class without positives is valid: its highest negatives still learn that they are negatives. A class whose
        selected rows have no weight is invalid: left out of the mean and the sum. With no valid class the loss is 0
        with zero gradients.

    Distributed:
        Two collectives forward: the header, and one payload with the rows of all ranks. None backward. Every rank gets
        the same value and holds the same queue. ``iid_mask`` has no effect. ``sample_weight`` counts for positives and
        negatives, unlike in the other pooled losses, and does not change which negatives are selected.

    Example:
        >>> import torch
        >>> loss = HardNegativeCrossEntropyLoss(num_classes=1, share=0.5)
        >>> loss(torch.tensor([[0.0], [0.0], [-9.0]]), torch.tensor([1, 0, 0]))
        tensor(0.6931)

    Reference:
        Shrivastava, Gupta and Girshick, Training Region-based Object Detectors with Online Hard Example Mining, CVPR
        2016.
    """

    has_temperature = False
    depends_on_order_alone = False

    def __init__(
        self,
        num_classes: int,
        share: float = 0.05,
        queue_size: int = 0,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        update_queue_in_eval: bool = False,
        gather_distributed: bool | None = None,
        max_pool_size: int | None = None,
        *,
        group: Group = None,
        gradient_reduction: str | int = "mean",
        queue_keep: Keep = "all",
        queue_in_eval: bool = False,
        multi_hot: bool = False,
        validate_args: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(
            num_classes,
            queue_size,
            reduction=reduction,
            ignore_index=ignore_index,
            update_queue_in_eval=update_queue_in_eval,
            gather_distributed=gather_distributed,
            max_pool_size=max_pool_size,
            group=group,
            gradient_reduction=gradient_reduction,
            queue_keep=queue_keep,
            queue_in_eval=queue_in_eval,
            multi_hot=multi_hot,
            validate_args=validate_args,
            name=name,
        )
        self.share = check_share(share)

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return the cross-entropy of each class over its positives and its hardest negatives."""
        return _per_class(pool, self.share)

    def _own_arguments(self) -> tuple[str, ...]:
        return ("share",)
