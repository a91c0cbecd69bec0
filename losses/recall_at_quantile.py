"""Smooth recall above a quantile of the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from ..distributed.group import Group
from ..errors import check_choice, check_number, expected
from ..kernels.quantiles import INTERPOLATIONS, upper_levels
from ..kernels.sigmoid_sums import sigmoid_sums
from ..queues.memory_queue import Keep
from .batch import has_values
from .pool import (
    LossWithClasses,
    PerClass,
    Pool,
    Reduction,
    SharedOptions,
    at_temperature,
    local_pool,
    loss_of,
    positive_shares,
    spread_nan,
)
from .ranking import PoolForm, RankingLoss
from .sharded import PoolFacts
from .sharded_threshold import recall_of_part
from .threshold import hold_others, threshold_with_gradient

if TYPE_CHECKING:
    from typing_extensions import Unpack


SPREAD_MULTIPLE = 0.3  # of the spread of the scores: the automatic temperature


class _Options(SharedOptions, total=False):
    temperature: float | None
    quantile_interpolation: str
    threshold_gradient: bool


@overload
def recall_at_quantile(
    logits: Tensor,
    targets: Tensor,
    quantile: float = 0.005,
    temperature: float | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    quantile_interpolation: str = "higher",
    return_per_class: Literal[False] = False,
    *,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
    threshold_gradient: bool = True,
) -> Tensor: ...
@overload
def recall_at_quantile(
    logits: Tensor,
    targets: Tensor,
    quantile: float = 0.005,
    *,
    return_per_class: Literal[True],
    **options: Unpack[_Options],
) -> LossWithClasses: ...
@overload
def recall_at_quantile(
    logits: Tensor, targets: Tensor, quantile: float = 0.005, *, return_per_class: bool, **options: Unpack[_Options]
) -> Tensor | LossWithClasses: ...
def recall_at_quantile(
    logits: Tensor,
    targets: Tensor,
    quantile: float = 0.005,
    temperature: float | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    quantile_interpolation: str = "higher",
    return_per_class: bool = False,
    *,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
    threshold_gradient: bool = True,
) -> Tensor | LossWithClasses:
    r"""Compute one minus the smooth share of positives above the (1 - q) quantile of all scores.

    .. math:: L = 1 - \frac{1}{|P|} \sum_{i \in P} \sigma\!\left(\frac{x_i - \theta}{\tau}\right), \quad
              \theta = Q_{1-q}(x)

    With ``quantile_interpolation="higher"`` at most the share q of the rows scores strictly above the threshold. Only
    positives within a few tau of the threshold have gradient.

    The threshold passes its gradient to all rows, as the quantile of the smoothed scores does. Positives rise, the rows
    near the threshold fall, and the gradient of all rows adds up to 0:

    .. math:: \frac{\partial \theta}{\partial x_j} =
              \frac{\sigma'((x_j - \theta) / \tau)}{\sum_k \sigma'((x_k - \theta) / \tau)}

    Args:
        logits: (N, C) raw scores; C = 1 is binary, and may be (N,).
        targets: (N,) or (N, 1) class indices, or 0 and 1 when C = 1; (N, C) with ``multi_hot``. Integers, bools, or
            floats that are whole numbers.
        quantile: q in (0, 1), the share of rows that can be reviewed.
        temperature: > 0, width of the sigmoid that replaces the step, in units of the scores. None, the default, is
            automatic: a multiple of the spread of the scores, 0.1 for average precision and 0.3 for recall.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        quantile_interpolation: how a threshold between two scores is read: ``"linear"``, ``"lower"``, ``"higher"``,
            ``"nearest"`` or ``"midpoint"``.
        return_per_class: return ``LossWithClasses(loss, per_class, valid)``.
        sample_weight: (N,) >= 0, weights of the positives in the mean over P; other weights have no effect.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        validate_args: check values (target ranges, weights), which waits for the device; skipped while compiling.
            Types, shapes and devices are always checked.
        threshold_gradient: let the thresholds carry a gradient to the rows of which they are quantiles; False detaches
            them, and the gradient then raises positives and lowers no negative. The loss has the same value either way.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate:
        A class without a positive of positive weight is invalid: left out of the mean and the sum, NaN under
        ``"none"``. With no valid class the loss is 0 with zero gradients. With fewer than 1 / q rows the threshold is
        the top score, and often no positive is near enough to it to have a gradient. An infinite threshold carries no
        gradient.

    Numerics:
        Half precision is computed in float32. The shares of the threshold's gradient add up to 1 even where every
        :math:`\sigma'` underflows. A second derivative raises RuntimeError.

    Automatic temperature:
        The spread is the interquartile range over 1.349, averaged over the classes, of a sample of about 4,096 scores,
        and a constant for the gradient. The sample is spread over the rows in a fixed way. Where most scores of a class
        are tied or hardly differ, so that the range is less than a hundredth of the standard deviation without the 1 %
        of scores at each end, that deviation replaces it. If all scores are equal, up to rounding, the spread is 1.
        Scores that are all numbers of half precision are judged by its rounding. Infinite scores and ignored rows are
        left out.

    Example:
        >>> import torch
        >>> recall_at_quantile(torch.tensor([[3.0], [2.0], [1.0], [0.0]]), torch.tensor([1, 0, 1, 0]), quantile=0.5)
        tensor(0.5000)

    Reference:
        Boyd et al., Accuracy at the Top, NeurIPS 2012, for the threshold at a quantile of all scores; Eban et al.,
        Scalable Learning of Non-Decomposable Objectives, AISTATS 2017, Mackey, Luo and Eban, Constrained Classification
        and Ranking via Quantiles, 2018, and Macha, Adam and Smidl, Pat&Mat, 2020, for thresholds with a gradient.
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
        automatic=True,
    )
    scaled, width = at_temperature(pool, temperature, SPREAD_MULTIPLE)
    per_class = _per_class(scaled, quantile, width, quantile_interpolation, threshold_gradient)
    return loss_of(per_class, pool, reduction, return_per_class)


def check_quantile(quantile: float) -> float:
    """Return ``quantile`` unchanged, or raise ValueError when it is not strictly between 0 and 1."""
    check_number("quantile", quantile)
    if not 0 < quantile < 1:
        raise ValueError(expected("quantile", "a number strictly between 0 and 1", quantile))
    return quantile


def _per_class(
    pool: Pool, quantile: float, temperature: float, interpolation: str, threshold_gradient: bool
) -> PerClass:
    """Return one minus the smooth recall at the quantile, of each class of ``pool``."""
    share, valid = positive_shares(pool, pool.positive)
    threshold = upper_levels(pool.scores, pool.member, [quantile], interpolation).where(valid)  # [C, 1]
    # Positives alone. They are few, and an infinite negative at an infinite threshold gives NaN, even times 0.
    rows: Tensor | None = None
    if pool.scores.shape[0] == 1 and has_values(pool.scores):
        rows = pool.positive[0].nonzero()[:, 0]
        scores, share = pool.scores.index_select(1, rows), share.index_select(1, rows)
    else:
        scores = pool.scores.masked_fill(~pool.positive, 0.0)
    point, drawing = threshold.movable.to(pool.scores.dtype), None
    if threshold_gradient:
        taus = threshold.base.new_full(threshold.base.shape[:1], temperature)
        point, drawing = threshold_with_gradient(threshold, pool, pool.member, pool.positive, taus)
        if rows is not None and drawing is not None:
            drawing = drawing.index_select(1, rows)
    if threshold.offset is not None:
        scores = scores - threshold.base
    below = sigmoid_sums(scores, point, torch.ones_like(point)[:, :, None], temperature).squeeze(2)
    below = hold_others(below, drawing)
    return PerClass(spread_nan((below * share).sum(dim=1), pool), valid)


class RecallAtQuantileLoss(RankingLoss):
    """One minus the smooth recall at a quantile, over the rows of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.recall_at_quantile`. The pool is the rows of all ranks and of the
    queue. With fewer than ``1 / quantile`` rows, 200 by default, the threshold is the top score and often no row has
    gradient. Give the pool many more rows than that.

    The threshold carries a gradient, so positives rise and the live rows near the threshold fall. A queue changes the
    threshold, not the balance: the threshold carries the slope of the live positives, and the gradient of the live rows
    adds up to 0. With ``threshold_gradient=False`` the gradient raises positives and lowers no negative. If that is the
    only loss, all scores can rise together: combine it with a pointwise loss, such as
    ``LossWarmupWrapper(..., final_main_weight=0.5)``.

    By default the temperature is 0.3 times the spread of the pool's scores: their interquartile range over 1.349,
    averaged over the classes, from a sample of about 4,096 scores. So the loss does not depend on the scale of the
    scores. The spread is a constant for the gradient. A number is an absolute width instead, and may be assigned
    between steps, as may None. ``current_temperature`` is the temperature of the last call.

    With ``quantile_interpolation="higher"`` at most the share q of the rows scores strictly above the threshold.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        quantile: q in (0, 1), the share of rows that can be reviewed.
        queue_size: rows of the memory queue, 0 for none. Queued rows belong to the pool and carry no gradient.
        temperature: > 0, width of the sigmoid that replaces the step, in units of the scores. None, the default, is
            automatic: a multiple of the spread of the scores, 0.1 for average precision and 0.3 for recall.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        update_queue_in_eval: let rows enter the queue in eval mode too.
        gather_distributed: None uses a process group if one exists at the forward, False uses this rank's rows alone,
            True requires a process group. May be changed between steps: False while rank 0 validates alone.
        quantile_interpolation: how a threshold between two scores is read: ``"linear"``, ``"lower"``, ``"higher"``,
            ``"nearest"`` or ``"midpoint"``.
        max_pool_size: draw at most this many rows of the pool, with a quota for every class; None uses all rows.
        group: process group or device mesh of the data-parallel ranks; None for the default group.
        gradient_reduction: how the wrapper combines parameter gradients over the ranks: ``"mean"`` (DDP, FSDP2, HSDP),
            ``"sum"``, or the number of ranks it averages over.
        queue_keep: ``"all"`` rows, or ``"negatives"`` only, so that queued positives do not dilute the gradient of the
            live ones. Combine ``"negatives"`` with a pointwise loss: against constant negatives all scores may rise
            together.
        queue_in_eval: let queued rows belong to the pool in eval mode too. By default a validation loss ranks the
            validation rows among themselves.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        validate_args: check values (target ranges, weights), which waits for the device; skipped while compiling.
            Types, shapes and devices are always checked.
        name: what to call this loss in the comparison between ranks, None for nothing. With two losses of one class and
            equal arguments, names let ranks that call them in different orders raise.
        threshold_gradient: let the thresholds carry a gradient to the rows of which they are quantiles; False detaches
            them, and the gradient then raises positives and lowers no negative. The loss has the same value either way.
        pool: ``"gathered"`` gives every rank the rows of all ranks and the whole queue. With ``"sharded"`` each rank
            keeps its own rows and its own part of the queue, and sums travel instead where they are smaller than the
            rows: the same loss and gradient, for large pools at a cost that falls with the number of ranks. It takes no
            ``max_pool_size``.

    Shape:
        logits (N, C), or (N,) when C = 1; targets (N,) or (N, 1), or (N, C) with ``multi_hot``; N may differ between
        ranks and may be 0. Output scalar, or (C,) with ``reduction="none"``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, at construction and in the forward, on every rank.
        RuntimeError: when ranks disagree about the call or the state, or inside activation checkpointing.

    Degenerate:
        A class without a positive of positive weight is invalid: left out of the mean and the sum. With no valid class
        the loss is 0 with zero gradients. An infinite threshold carries no gradient. In a class without a live row of
        finite score, no row has a gradient.

    Distributed:
        Two collectives forward: the header, and one payload with the rows of all ranks. None backward. Every rank gets
        the same value and holds the same queue. With ``pool="sharded"`` the header, three sums over the ranks for
        float32 and six for float64, which find the threshold, and one exchange of the sums at it; one more with an
        automatic temperature. Every rank gets the same value to the last bit, and the gradient of its own rows.

    Example:
        >>> import torch
        >>> loss = RecallAtQuantileLoss(num_classes=1, quantile=0.5, queue_size=0)
        >>> loss(torch.tensor([[3.0], [2.0], [1.0], [0.0]]), torch.tensor([1, 0, 1, 0]))
        tensor(0.5000)

    Reference:
        Boyd et al., Accuracy at the Top, NeurIPS 2012, for the threshold at a quantile of all scores; Eban et al.,
        Scalable Learning of Non-Decomposable Objectives, AISTATS 2017, Mackey, Luo and Eban, Constrained Classification
        and Ranking via Quantiles, 2018, and Macha, Adam and Smidl, Pat&Mat, 2020, for thresholds with a gradient.
    """

    spread_multiple = SPREAD_MULTIPLE

    def __init__(
        self,
        num_classes: int,
        quantile: float = 0.005,
        queue_size: int = 0,
        temperature: float | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        update_queue_in_eval: bool = False,
        gather_distributed: bool | None = None,
        quantile_interpolation: str = "higher",
        max_pool_size: int | None = None,
        *,
        group: Group = None,
        gradient_reduction: str | int = "mean",
        queue_keep: Keep = "all",
        queue_in_eval: bool = False,
        multi_hot: bool = False,
        validate_args: bool = True,
        name: str | None = None,
        threshold_gradient: bool = True,
        pool: PoolForm = "gathered",
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
            group=group,
            gradient_reduction=gradient_reduction,
            queue_keep=queue_keep,
            queue_in_eval=queue_in_eval,
            multi_hot=multi_hot,
            validate_args=validate_args,
            name=name,
            pool=pool,
        )
        self.quantile, self.threshold_gradient = check_quantile(quantile), threshold_gradient
        self.quantile_interpolation = check_choice("quantile_interpolation", quantile_interpolation, INTERPOLATIONS)

    def compute_per_class(self, pool: Pool) -> PerClass:
        """Return one minus the smooth recall of each class."""
        scaled, temperature = self._at_temperature(pool)
        return _per_class(scaled, self.quantile, temperature, self.quantile_interpolation, self.threshold_gradient)

    def _per_class_of_part(self, pool: Pool, shared: PoolFacts) -> PerClass | None:
        temperature = self._shared_temperature(pool, shared)
        if temperature is None:
            return None
        threshold = self.quantile, self.quantile_interpolation, self.threshold_gradient
        return recall_of_part(pool, shared, temperature, *threshold)

    def _small_pool_hint(self, rows: int) -> str | None:
        if rows * self.quantile >= 1:
            return None
        return (
            f"the threshold of quantile={self.quantile:g} is the top score of a pool of {rows} rows, so that hardly "
            f"any positive gets a gradient. Make the pool several times 1/quantile = {1 / self.quantile:.0f} rows, by "
            "larger batches or queue_size, or raise quantile."
        )

    def _own_arguments(self) -> tuple[str, ...]:
        return "quantile", "quantile_interpolation", "threshold_gradient"
