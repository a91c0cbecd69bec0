"""Smooth partial area under the ROC curve, at low false-positive rates or over a band of them: the pure function."""

from __future__ import annotations

from torch import Tensor

from .arguments import completed
from .partial_area import TEMPERATURE, BudgetBasis, PartialArea, Surrogate, TauScale, check_area, missed_area
from .pool import Reduction, local_pool, reduce_values


@completed(local_pool, PartialArea)
def pauc_at_budget(
    logits: Tensor,
    targets: Tensor,
    alpha: float = 0.0,
    beta: float = 0.005,
    surrogate: Surrogate = "dro",
    n_knots: int = 2,
    tau_scale: TauScale | None = None,
    budget_basis: BudgetBasis = "fpr",
    temperature: float = TEMPERATURE,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    quantile_interpolation: str = "higher",
    *,
    iid_mask: Tensor | None = None,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
    dro_lambda: float | None = None,
    threshold_gradient: bool = True,
) -> Tensor:
    r"""Compute a loss for the area under the ROC curve at low false-positive rates, by one of three surrogates.

    ``"dro"`` (SOPA-s), the default, averages over positives P a soft maximum over iid negatives N of the logistic loss
    of pairs:

    .. math::
        L = \frac{1}{|P|} \sum_{i \in P} \lambda \log \frac{1}{|N|} \sum_{j \in N}
            \exp\!\left(\frac{1}{\lambda} \log\!\left(1 + e^{(x_j - x_i) / s}\right)\right)

    The hardest negatives of each positive count most, and :math:`\lambda` says how much: the smaller it is, the fewer
    negatives count. It is found from the budget, for each class and in each call: with it the effective number of
    negatives, the perplexity of their weights for the mean positive, is nearest to ``beta`` times their number.
    Positives beyond the negatives are moved to their ends for that. :math:`1 / \lambda` is a whole number from 1 to 12.
    At 12 more than ``beta`` of the negatives count where logits lie close together; at 1 fewer do where they spread
    over several units, and a larger ``beta`` then changes nothing. It is a constant for the gradient, which all
    negatives have. With ``tau_scale=None`` :math:`s = 1`: the scores are logits as in cross-entropy. L may exceed 1.

    ``"pairwise"`` and ``"trapezoid"`` have a hard band: they are one minus the smooth area under the ROC curve between
    the false-positive rates ``alpha`` and ``beta``, over their distance. With ``alpha=0`` and ``beta`` the budget,
    positives are compared with every false alarm that the budget allows. The band edges are score quantiles of the
    reference rows R: the iid negatives, or all iid rows.

    .. math::
        t_\alpha = Q_{1-\alpha}(x_R), \quad t_\beta = Q_{1-\beta}(x_R), \quad
        \tau = \text{temperature} \cdot (\mathrm{IQR}(x_R) \text{ or } t_\alpha - t_\beta)

    Both average over the positives how likely reference points :math:`t_k` are above; the :math:`c_k` sum to one:

    .. math:: L = \frac{1}{|P|} \sum_{i \in P} \sum_k c_k \, \sigma\!\left(\frac{t_k - x_i}{\tau}\right)

    ``"pairwise"``: the points are the negatives inside the band, both ends included, with equal weights, and have the
    gradient themselves; the band edges have none, whatever ``threshold_gradient`` is. ``"trapezoid"``: the points are
    the quantiles at ``n_knots`` equally spaced rates, with the weights of the trapezoid rule. Each passes its gradient
    to the reference rows, as a quantile of the smoothed scores does.

    .. math:: \frac{\partial t_k}{\partial x_j} =
              \frac{\sigma'((x_j - t_k) / \tau)}{\sum_{r \in R} \sigma'((x_r - t_k) / \tau)}, \quad j \in R

    With every surrogate the gradient of all rows adds up to 0, unless ``threshold_gradient=False``: positives rise, and
    negatives or reference rows fall. Scale and temperature are detached.

    Args:
        alpha, beta: the band of false-positive rates, 0 <= alpha < beta <= 1; under ``"dro"`` a share of negatives.
        surrogate: ``"dro"``, a soft maximum over all iid negatives, which requires ``alpha=0``; for a hard band
            ``"pairwise"`` with the negatives in it, or ``"trapezoid"`` over knots. Arguments without effect raise.
        n_knots: number of knots >= 2, for ``"trapezoid"`` alone.
        tau_scale: what differences of scores are divided by: ``"iqr"`` of the reference scores, or the width of the
            ``"band"``, times the temperature except under ``"dro"``. None is 1 under ``"dro"``, which takes the scores
            as logits, and ``"iqr"`` for the other surrogates.
        budget_basis: reference rows: iid negatives (``"fpr"``) or all iid rows (``"population"``).
        temperature: > 0, a multiple of the scale of the reference scores, usually 0.25 to 0.1. Not for ``"dro"``.
        dro_lambda: None finds it from ``beta``; or a number > 0 for ``"dro"`` alone: towards 0 only the hardest
            negative counts, and for large values all count alike. 1, 1/2, 1/3, ... take O((P + N) / dro_lambda) time,
            others O(P N).

    Degenerate:
        A class is invalid without a positive of positive weight, a negative or a reference row, when its scale is at
        most 1e-12 or infinite (the module warns, once), under ``"pairwise"`` without a negative in the band, and under
        ``"dro"`` without an iid negative: left out of the mean and the sum, NaN under ``"none"``. With no valid class
        the loss is 0 with zero gradients. ``"dro"`` without a scale is valid where all scores are equal. The scale
        ``"band"`` is infinite as soon as one edge is, as with ``alpha=0`` and a negative of +inf; the scale ``"iqr"``
        only where a quarter of the reference is. An infinite knot carries no gradient.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]])
        >>> pauc_at_budget(scores, torch.tensor([0, 1, 1, 0, 0]))
        tensor(1.6285)
        >>> pauc_at_budget(scores, torch.tensor([0, 1, 1, 0, 0]), beta=0.5, surrogate="pairwise")
        tensor(0.5000)

    Reference:
        McClish, Analyzing a Portion of the ROC Curve, 1989; Narasimhan and Agarwal, ICML 2013; Zhu et al., When AUC
        meets DRO, ICML 2022, SOPA-s (``"dro"``). Thresholds with a gradient: Boyd et al., Accuracy at the Top, NeurIPS
        2012; Eban et al., AISTATS 2017; Mackey, Luo and Eban, 2018; Macha, Adam and Smidl, Pat&Mat, 2020.
    """
    budget = budget_basis, quantile_interpolation, dro_lambda, threshold_gradient
    area = check_area(PartialArea(alpha, beta, surrogate, n_knots, tau_scale, "pool", *budget), temperature)
    given = logits, targets, temperature, reduction, ignore_index, False
    pool = local_pool(
        *given, iid_mask=iid_mask, sample_weight=sample_weight, multi_hot=multi_hot, validate_args=validate_args
    )
    per_class = missed_area(pool, area, temperature, with_stats=False).per_class
    return reduce_values(per_class, reduction, pool.scores.dtype)
