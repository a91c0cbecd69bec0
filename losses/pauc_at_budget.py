"""Smooth partial area under the ROC curve, at low false-positive rates or over a band of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, overload

from torch import Tensor
from typing_extensions import Unpack

from .arguments import completed
from .distributed_loss import compiled_where_local
from .hints import Setting
from .partial_area import (
    SMALLEST_SCALE,
    BudgetBasis,
    PartialArea,
    PosNumerator,
    Surrogate,
    TauScale,
    check_area,
    missed_area,
)
from .pool import LossWithClasses, PerClass, Pool, Reduction, local_pool, reduce_values
from .queued_loss import PoolOptions
from .ranking import Given, RankingLoss
from .sharded import PoolFacts
from .sharded_threshold import trapezoid_of_part


class LossWithStats(NamedTuple):
    """``loss``, with diagnostics of each class."""

    loss: Tensor
    stats: dict[str, Tensor]


class LossWithClassesAndStats(NamedTuple):
    """``loss``, with the loss of each class, which are valid, and diagnostics of each class."""

    loss: Tensor
    per_class: Tensor
    valid: Tensor
    stats: dict[str, Tensor]


@completed(local_pool)
def pauc_at_budget(
    logits: Tensor,
    targets: Tensor,
    alpha: float = 0.0,
    beta: float = 0.005,
    surrogate: Surrogate = "dro",
    n_knots: int = 2,
    tau_scale: TauScale | None = None,
    budget_basis: BudgetBasis = "fpr",
    temperature: float = 0.1,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    quantile_interpolation: str = "higher",
    *,
    iid_mask: Tensor | None = None,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
    dro_lambda: float = 1.0,
    threshold_gradient: bool = True,
) -> Tensor:
    r"""Compute a loss for the area under the ROC curve at low false-positive rates, by one of three surrogates.

    ``"dro"`` (SOPA-s), the default, averages over the positives P a soft maximum over the iid negatives N of the
    logistic loss of each pair:

    .. math::
        L = \frac{1}{|P|} \sum_{i \in P} \lambda \log \frac{1}{|N|} \sum_{j \in N}
            \exp\!\left(\frac{1}{\lambda} \log\!\left(1 + e^{(x_j - x_i) / s}\right)\right)

    The hardest negatives of each positive count most. :math:`\lambda` is a soft budget: the smaller it is, the more
    they count. There is no hard band: ``beta``, ``n_knots`` and ``temperature`` have no effect on the value, except
    that ``tau_scale="band"`` makes the scale depend on ``beta``. With ``tau_scale=None`` :math:`s = 1`, and the scores
    are logits as in cross-entropy. The gradient raises positives and lowers negatives. The value may exceed 1.

    ``"pairwise"`` and ``"trapezoid"`` have a hard band: they are one minus the smooth area under the ROC curve between
    the false-positive rates ``alpha`` and ``beta``, over their distance. With ``alpha=0`` and ``beta`` the budget,
    positives are compared with every false alarm that the budget allows. The band edges are score quantiles of the
    reference rows R: the iid negatives, or all iid rows.

    .. math::
        t_\alpha = Q_{1-\alpha}(x_R), \quad t_\beta = Q_{1-\beta}(x_R), \quad
        \tau = \text{temperature} \cdot (\mathrm{IQR}(x_R) \text{ or } t_\alpha - t_\beta)

    Both average over the positives how likely reference points :math:`t_k` are to exceed them. The weights :math:`c_k`
    of the points sum to one:

    .. math:: L = \frac{1}{|P|} \sum_{i \in P} \sum_k c_k \, \sigma\!\left(\frac{t_k - x_i}{\tau}\right)

    ``"pairwise"``: the points are the negatives inside the band, both ends included, with equal weights, and have the
    gradient themselves; the band edges have none, whatever ``threshold_gradient`` is. ``"trapezoid"``: the points are
    the quantiles at ``n_knots`` equally spaced rates, with the weights of the trapezoid rule. Each passes its gradient
    to the reference rows, as a quantile of the smoothed scores does.

    .. math:: \frac{\partial t_k}{\partial x_j} =
              \frac{\sigma'((x_j - t_k) / \tau)}{\sum_{r \in R} \sigma'((x_r - t_k) / \tau)}, \quad j \in R

    With every surrogate the gradient of all rows adds up to 0, unless ``threshold_gradient=False``: positives rise, and
    negatives or reference rows fall.
    Scale and temperature are detached.

    Args:
        alpha, beta: the band of false-positive rates, 0 <= alpha < beta <= 1.
        surrogate: ``"dro"``, a soft maximum over all iid negatives, which requires ``alpha=0``; for a hard band
            ``"pairwise"`` with the negatives in the band, or ``"trapezoid"`` over knots.
        n_knots: number of knots >= 2, for ``"trapezoid"``.
        tau_scale: what differences of scores are divided by: ``"iqr"`` of the reference scores, or the width of the
            ``"band"``, times the temperature except under ``"dro"``. None is 1 under ``"dro"``, which takes the scores
            as logits, and ``"iqr"`` for the other surrogates.
        budget_basis: reference rows: iid negatives (``"fpr"``) or all iid rows (``"population"``).
        temperature: > 0, without unit: a multiple of the scale of the reference scores; 0.25 to 0.1 is usual.
            ``"dro"`` does not use it.
        quantile_interpolation: how a threshold between two scores is read: ``"linear"``, ``"lower"``, ``"higher"``,
            ``"nearest"`` or ``"midpoint"``.
        dro_lambda: > 0, the soft budget of ``"dro"``: towards 0 only the hardest negative counts, and for large values
            all count alike. 1, 1/2, 1/3, ... take O((P + N) / dro_lambda) time, other values O(P N).
        threshold_gradient: let the thresholds carry a gradient to the rows of which they are quantiles; False detaches
            them, and the gradient then raises positives and lowers no negative. The loss has the same value either way.

    Degenerate:
        A class is invalid without a positive of positive weight, a negative or a reference row, when its scale is at
        most 1e-12 or infinite, under ``"pairwise"`` without a negative in the band, and under ``"dro"`` without an iid
        negative: left out of the mean and the sum, NaN under ``"none"``. ``"dro"`` without a scale is valid where all
        scores are equal. The scale ``"band"`` is infinite as soon as one edge is, as with ``alpha=0`` and a negative of
        +inf; the scale ``"iqr"`` only where a quarter of the reference is. An infinite knot carries no gradient.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]])
        >>> pauc_at_budget(scores, torch.tensor([0, 1, 1, 0, 0]))
        tensor(0.9832)
        >>> pauc_at_budget(scores, torch.tensor([0, 1, 1, 0, 0]), beta=0.5, surrogate="pairwise")
        tensor(0.5000)

    Reference:
        McClish, Analyzing a Portion of the ROC Curve, 1989; Narasimhan and Agarwal, ICML 2013; Zhu et al.,
        When AUC meets DRO, ICML 2022, SOPA-s (``"dro"``).
        Thresholds with a gradient: Boyd et al., Accuracy at the Top, NeurIPS 2012; Eban et al., AISTATS 2017; Mackey,
        Luo and Eban, 2018; Macha, Adam and Smidl, Pat&Mat, 2020.
    """
    budget = budget_basis, quantile_interpolation, dro_lambda, threshold_gradient
    area = check_area(PartialArea(alpha, beta, surrogate, n_knots, tau_scale, "pool", *budget))
    pool = local_pool(
        logits,
        targets,
        temperature,
        reduction,
        ignore_index,
        iid_mask=iid_mask,
        sample_weight=sample_weight,
        multi_hot=multi_hot,
        validate_args=validate_args,
    )
    per_class = missed_area(pool, area, temperature, with_stats=False).per_class
    return reduce_values(per_class, reduction, pool.scores.dtype)


@completed(pauc_at_budget)
class PAUCAtBudgetLoss(RankingLoss):
    """Partial AUC at low false-positive rates, over the rows of all ranks and of a memory queue.

    The formulas are those of :func:`~fullrank.losses.pauc_at_budget`. The pool is the rows of all ranks and of the
    queue. The default, ``surrogate="dro"``, is a soft maximum of the logistic losses of each positive against all iid
    negatives. ``dro_lambda`` takes the place of the budget: ``beta`` only sets the diagnostics, and ``n_knots`` and
    ``temperature`` have no effect. The scores are logits as in cross-entropy, unless ``tau_scale`` gives a scale; of
    the scales, ``"band"`` depends on ``beta``.

    For a hard band up to ``beta`` take ``surrogate="pairwise"``, or ``"trapezoid"``. With fewer than ``1 / beta`` iid
    negatives, 200 by default, both edges of a band from 0 are the top negative. Give the pool many more rows than that,
    and watch ``band_neg_count``.

    The gradient raises positives, and lowers live reference rows: with ``"dro"`` all iid negatives, the hardest ones
    most, with ``"pairwise"`` the negatives in the band, with ``"trapezoid"`` those near the knots. A queue changes the
    knots of the trapezoid, not the balance: they carry the slope of the live positives, and the gradient of the live
    rows adds up to 0. With ``threshold_gradient=False``, which only the trapezoid uses, it lowers no row. If that is
    the only loss, all scores can rise together: combine it with a pointwise loss, such as
    ``LossWarmupWrapper(..., final_main_weight=0.5)``.

    Args:
        pos_numerator: the positives of the mean: those of the ``"pool"``, or the ``"live"`` ones, whose gradient the
            queued positives then do not dilute. A class without live positives is invalid in that step.
        temperature: > 0, without unit: a multiple of the scale of the reference scores; 0.25 to 0.1 is usual.
            ``"dro"`` does not use it.

    Degenerate:
        A class is invalid without a positive of positive weight, a negative or a reference row, when its scale is at
        most 1e-12 or infinite (a warning, once), under ``"pairwise"`` without a negative in the band, and under
        ``"dro"`` without an iid negative: left out of the mean and the sum. ``"dro"`` without a scale is valid where
        all scores are equal. With no valid class the loss is 0 with zero gradients. An infinite knot carries no
        gradient. Under ``"trapezoid"`` no row of a class has a gradient in a step without a live reference row of
        finite score, because nothing would fall while the positives rise.

    Distributed:
        Two collectives forward: the header, and one payload with the rows of all ranks. None backward. Every rank gets
        the same value and holds the same queue. With ``pool="sharded"`` and ``"trapezoid"`` the header, three sums over
        the ranks for float32 and six for float64, which find the knots, and one exchange of the sums at them. The other
        surrogates gather the rows, and so do diagnostics; the queue stays sharded.

    Example:
        >>> import torch
        >>> scores, targets = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]]), torch.tensor([0, 1, 1, 0, 0])
        >>> loss = PAUCAtBudgetLoss(num_classes=1, queue_size=0)
        >>> loss(scores, targets)
        tensor(0.9832)
        >>> loss = PAUCAtBudgetLoss(num_classes=1, beta=0.5, surrogate="pairwise", queue_size=0)
        >>> loss(scores, targets)
        tensor(0.5000)
    """

    temperature: float  # never None: it is a multiple of the scale already

    def __init__(
        self,
        num_classes: int,
        alpha: float = 0.0,
        beta: float = 0.005,
        surrogate: Surrogate = "dro",
        n_knots: int = 2,
        tau_scale: TauScale | None = None,
        pos_numerator: PosNumerator = "pool",
        budget_basis: BudgetBasis = "fpr",
        queue_size: int = 0,
        temperature: float = 0.1,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        update_queue_in_eval: bool = False,
        gather_distributed: bool | None = None,
        quantile_interpolation: str = "higher",
        max_pool_size: int | None = None,
        *,
        dro_lambda: float = 1.0,
        threshold_gradient: bool = True,
        **options: Unpack[PoolOptions],
    ) -> None:
        given = num_classes, queue_size, temperature, reduction, ignore_index, update_queue_in_eval
        super().__init__(*given, gather_distributed, max_pool_size, **options)
        self.alpha, self.beta, self.surrogate, self.n_knots = alpha, beta, surrogate, n_knots
        self.tau_scale, self.pos_numerator, self.budget_basis = tau_scale, pos_numerator, budget_basis
        self.quantile_interpolation = quantile_interpolation
        self.dro_lambda, self.threshold_gradient = dro_lambda, threshold_gradient
        check_area(self._area)

    @property
    def _area(self) -> PartialArea:
        return PartialArea(*(getattr(self, name) for name in PartialArea._fields))

    @overload  # type: ignore[override]
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: Literal[False] = False,
        return_diagnostics: Literal[False] = False,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        *,
        return_per_class: Literal[True],
        return_diagnostics: Literal[False] = False,
        sample_weight: Tensor | None = None,
    ) -> LossWithClasses: ...
    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: Literal[False] = False,
        *,
        return_diagnostics: Literal[True],
        sample_weight: Tensor | None = None,
    ) -> LossWithStats: ...
    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        *,
        return_per_class: Literal[True],
        return_diagnostics: Literal[True],
        sample_weight: Tensor | None = None,
    ) -> LossWithClassesAndStats: ...
    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: bool = False,
        return_diagnostics: bool = False,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor | LossWithClasses | LossWithStats | LossWithClassesAndStats: ...
    @completed(RankingLoss.forward)
    @compiled_where_local
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: bool = False,
        return_diagnostics: bool = False,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor | LossWithClasses | LossWithStats | LossWithClassesAndStats:
        """Return the loss as :meth:`RankingLoss.forward` does, with diagnostics on request.

        Args:
            return_diagnostics: also return ``stats``, a dict of tensors (C,): the band edges ``t_alpha`` and
                ``t_beta``; the temperature ``tau_eff``, which is the scale with ``"dro"``; ``band_neg_count``, the iid
                negatives inside the band; ``pauc_var``, the variance over positives of their share of the area, of
                their loss with ``"dro"``; ``grad_pos_count``, the positives of all ranks that carry gradient.

        Returns:
            The loss, ``LossWithClasses``, ``LossWithStats`` or ``LossWithClassesAndStats``, as requested.
        """
        pooled = self._pool(Given(logits, targets, iid_mask, sample_weight), needs_rows=return_diagnostics)
        per_class, stats = pooled.per_class, None
        if per_class is None:
            found = missed_area(pooled.pool, self._area, self.temperature, with_stats=return_diagnostics)
            per_class, flat_class, stats = found
            self._warn_if_flat(flat_class)
        loss = reduce_values(per_class, self.reduction, pooled.pool.scores.dtype)
        self._finish(pooled, per_class)
        if not return_per_class:
            return loss if stats is None else LossWithStats(loss, stats)
        result = LossWithClasses.of(loss, per_class)
        return result if stats is None else LossWithClassesAndStats(*result, stats)

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward  # type: ignore[assignment]

    def _per_class_of_part(self, pool: Pool, shared: PoolFacts) -> PerClass | None:
        if self.surrogate != "trapezoid":
            return None
        found = trapezoid_of_part(pool, shared, self._area, self.temperature)
        if found is None:
            return None
        per_class, flat_class = found
        self._warn_if_flat(flat_class)
        return per_class

    def _warn_if_flat(self, flat_class: int | None) -> None:
        """Warn once when the class ``flat_class`` is left out."""
        if self.validate_args and flat_class is not None:
            other = "tau_scale=None" if self.surrogate == "dro" else "the other tau_scale"
            self._warn_once(
                "flat",
                f"{type(self).__name__}: class {flat_class} is left out. Its reference scores hardly differ: the scale "
                f"by tau_scale={self.tau_scale or 'iqr'!r} is at most {SMALLEST_SCALE}. Enlarge queue_size, widen the "
                f"band, or try {other}.",
            )

    def _setting(self, num_rows: int) -> Setting:
        if self.surrogate == "dro":  # which has neither a temperature nor a band
            return Setting(None, None)
        small = (
            f"a band up to beta={self.beta:g} holds less than one of the {num_rows} rows of the pool. Make the pool "
            f"several times 1/beta = {1 / self.beta:.0f} rows, by larger batches or queue_size, or raise beta."
        )
        return super()._setting(num_rows)._replace(small_pool=small if num_rows * self.beta < 1 else None)

    def _own_arguments(self) -> tuple[str, ...]:
        return PartialArea._fields
