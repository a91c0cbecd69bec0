"""Smooth recall above a quantile of the scores."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor
from typing_extensions import Unpack

from ...errors import check_choice, check_share
from ...kernels.below_levels import Carriers, below_levels
from ...kernels.quantiles import INTERPOLATIONS, upper_levels
from ..arguments import completed
from ..base import unchecked
from ..rows import Batch
from .base import PoolOptions, RankingLoss
from .pauc_surrogates import PartialArea, check_used, soft_maximum
from .pool import (
    PerClass,
    Pool,
    Reduction,
    Weighting,
    at_temperature,
    local_pool,
    positive_shares,
    reduce_values,
)

Surrogate = Literal["dro", "sigmoid"]
_SURROGATES = (None, *get_args(Surrogate))

SPREAD_MULTIPLE = 0.3  # of the spread of the scores: the automatic temperature
# Arguments that only some surrogates use, with their defaults.
_USED_BY: dict[str, tuple[tuple[str, ...], object]] = {
    "temperature": (("sigmoid",), None),
    "quantile_interpolation": (("sigmoid",), "higher"),
    "threshold_gradient": (("sigmoid",), True),
}


@completed(local_pool, at_temperature, PartialArea)
def recall_at_quantile(
    logits: Tensor,
    targets: Tensor,
    quantile: float = 0.005,
    temperature: float | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    quantile_interpolation: str = "higher",
    *,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    weighting: Weighting = "rows",
    validate_args: bool = True,
    threshold_gradient: bool = True,
    surrogate: Surrogate | None = None,
) -> Tensor:
    r"""Compute a loss for the recall among the share q of the rows with the highest scores, by one of two surrogates.

    ``"dro"``, the default without a temperature, is that of :func:`~fullrank.losses.pauc_at_budget` with
    ``beta=quantile``. All positives and negatives have a gradient. The scores are logits, and the loss may exceed 1.

    ``"sigmoid"``, the default with one, is one minus the smooth share of positives above the (1 - q) quantile of all
    scores:

    .. math:: L = 1 - \frac{1}{|P|} \sum_{i \in P} \sigma\!\left(\frac{x_i - \theta}{\tau}\right), \quad
              \theta = Q_{1-q}(x)

    With ``quantile_interpolation="higher"`` at most the share q of the rows scores strictly above the threshold. Only
    positives within a few tau of the threshold have gradient.

    Its threshold passes a gradient to all rows, so that the gradient of all rows adds up to 0:

    .. math:: \frac{\partial \theta}{\partial x_j} =
              \frac{\sigma'((x_j - \theta) / \tau)}{\sum_k \sigma'((x_k - \theta) / \tau)}

    With weights the threshold is the weighted quantile: a row's rank is the weight below it, divided by that of all
    other rows, so that at most the share q of the weight scores strictly above the threshold ``"higher"``.

    Args:
        quantile: q in (0, 1), the share of rows that can be reviewed; under ``"dro"`` a share of negatives.
        surrogate: ``"dro"``, a soft maximum over the negatives, or ``"sigmoid"``, the smooth recall. ``temperature``,
            ``quantile_interpolation`` and ``threshold_gradient`` act with ``"sigmoid"`` alone. None is ``"sigmoid"``
            if one of them is not at its default, else ``"dro"``. A named ``"dro"`` refuses them.

    Degenerate:
        A class without a positive of positive weight is not valid, and under ``"dro"`` one without a negative. With
        fewer than 1 / q rows the threshold of ``"sigmoid"`` is the top score. An infinite one carries no gradient.

    Numerics:
        Half precision is computed in float32. The shares of the threshold's gradient add up to 1 even where every
        :math:`\sigma'` underflows. A second derivative raises RuntimeError.

    Example:
        >>> import torch
        >>> scores, targets = torch.tensor([[3.0], [2.0], [1.0], [0.0]]), torch.tensor([1, 0, 1, 0])
        >>> recall_at_quantile(scores, targets, quantile=0.5, surrogate="sigmoid")
        tensor(0.5000)

    Reference:
        Zhu et al., When AUC meets DRO, ICML 2022, SOPA-s (``"dro"``); Boyd et al., Accuracy at the Top, NeurIPS 2012,
        for the threshold at a quantile of all scores; Eban et al., Scalable Learning of Non-Decomposable Objectives,
        AISTATS 2017, Mackey, Luo and Eban, Constrained Classification and Ranking via Quantiles, 2018, and Macha, Adam
        and Smidl, Pat&Mat, 2020, for thresholds with a gradient.
    """
    given = Batch(logits, targets, None, sample_weight)
    pool = local_pool(given, temperature, reduction, ignore_index, multi_hot, validate_args, weighting)
    form = _checked_form(surrogate, quantile, temperature, quantile_interpolation, threshold_gradient)
    if form == "dro":
        per_class = soft_maximum(pool, quantile)[0]
    else:
        pool, temperature = at_temperature(pool, temperature, SPREAD_MULTIPLE)
        per_class = _missed(pool, quantile, temperature, quantile_interpolation, threshold_gradient)
    return reduce_values(per_class, reduction, pool.scores.dtype)


def _checked_form(
    surrogate: str | None, quantile: float, temperature: float | None, interpolation: str, threshold_gradient: bool
) -> str:
    """Return the surrogate, or raise TypeError or ValueError for arguments that define no loss."""
    check_share("quantile", quantile)
    check_choice("quantile_interpolation", interpolation, INTERPOLATIONS)
    check_choice("surrogate", surrogate, _SURROGATES)
    form = _form(surrogate, temperature, interpolation, threshold_gradient)
    check_used(form, dict(zip(_USED_BY, (temperature, interpolation, threshold_gradient))), _USED_BY)
    return form


def _form(surrogate: str | None, temperature: float | None, interpolation: str, threshold_gradient: bool) -> str:
    """Return the surrogate; None is the one that uses the arguments which are not at their defaults."""
    is_plain = temperature is None and interpolation == "higher" and threshold_gradient
    return surrogate or ("dro" if is_plain else "sigmoid")


def _missed(pool: Pool, quantile: float, temperature: float, interpolation: str, threshold_gradient: bool) -> PerClass:
    """Return one minus the smooth recall of each class."""
    share, valid = positive_shares(pool, pool.positive)
    levels = upper_levels(pool.scores, pool.member, [quantile], interpolation, weight=pool.key_weight)
    levels = levels.where(valid)  # [C, 1]
    taus = levels.base.new_full(levels.base.shape[:1], temperature)
    carriers = Carriers(pool.member, pool.live, pool.key_weight) if threshold_gradient else None
    return PerClass(below_levels(pool.scores, share, levels, [1.0], taus, carriers), valid)


@completed(recall_at_quantile)
class RecallAtQuantileLoss(RankingLoss):
    """Recall among the share ``quantile`` of the rows with the highest scores, over the rows of all ranks and a queue.

    The formulas are those of :func:`~fullrank.losses.recall_at_quantile`: the smooth recall also if a schedule or a
    checkpoint assigns a temperature, unless ``surrogate`` decides otherwise.

    With ``"sigmoid"`` give the pool ``10 / quantile`` rows or more, 2,000 by default, and add the loss to weighted
    cross-entropy (see the page about choosing a loss). With a queue the threshold carries the slope of the live
    positives alone. In a class without a live row of finite score no row has a gradient then.

    Example:
        >>> import torch
        >>> scores, targets = torch.tensor([[3.0], [2.0], [1.0], [0.0]]), torch.tensor([1, 0, 1, 0])
        >>> RecallAtQuantileLoss(num_classes=1, quantile=0.5)(scores, targets)
        tensor(0.7572)
    """

    spread_multiple = SPREAD_MULTIPLE
    own_arguments = "quantile", "quantile_interpolation", "threshold_gradient", "surrogate"
    _checks = RankingLoss._checks | dict.fromkeys(own_arguments, unchecked)

    def __init__(
        self,
        num_classes: int = 1,
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
        threshold_gradient: bool = True,
        surrogate: Surrogate | None = None,
        **options: Unpack[PoolOptions],
    ) -> None:
        shared = num_classes, queue_size, temperature, reduction, ignore_index, update_queue_in_eval
        super().__init__(*shared, gather_distributed, max_pool_size, **options)
        _checked_form(surrogate, quantile, temperature, quantile_interpolation, threshold_gradient)
        self.quantile, self.quantile_interpolation = quantile, quantile_interpolation
        self.threshold_gradient, self.surrogate = threshold_gradient, surrogate

    @property
    def form(self) -> str:
        """The surrogate of the next call: ``surrogate``, or that which uses the arguments that were given."""
        return _form(self.surrogate, self.temperature, self.quantile_interpolation, self.threshold_gradient)

    def compute_per_class(self, pool: Pool) -> PerClass:
        if self.form == "dro":
            return soft_maximum(pool, self.quantile)[0]
        scaled, temperature = at_temperature(pool, self.temperature, self.spread_multiple)
        self._note_temperature(pool, temperature)
        return _missed(scaled, self.quantile, temperature, self.quantile_interpolation, self.threshold_gradient)

    def _check_change(self, name: str, value: Any) -> None:
        super()._check_change(name, value)
        names = "surrogate", "quantile", "temperature", "quantile_interpolation", "threshold_gradient"
        _checked_form(*(value if one == name else getattr(self, one) for one in names))
