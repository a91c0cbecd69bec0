"""Smooth partial area under the ROC curve, at low false-positive rates or over a band of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor
from typing_extensions import Unpack

from ...kernels.torch_private import func_transforms_are_active
from ..arguments import completed
from ..base import compiled_where_local, unchecked
from ..rows import Batch, has_values
from .base import PoolOptions, RankingLoss
from .pauc_surrogates import (
    SMALLEST_SCALE,
    TEMPERATURE,
    BudgetBasis,
    MissedArea,
    PartialArea,
    PosNumerator,
    Surrogate,
    TauScale,
    check_area,
    missed_area,
)
from .pool import (
    LossWithClasses,
    LossWithClassesAndStats,
    LossWithStats,
    PerClass,
    Pool,
    Reduction,
    Weighting,
    local_pool,
    reduce_values,
)


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
    indexes: Tensor | None = None,
    multi_hot: bool = False,
    weighting: Weighting = "rows",
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

    The smaller :math:`\lambda`, the fewer of the hardest negatives of each positive count. It is found for each class
    and in each call so that the perplexity of the negatives' weights, of the mean positive within their range, is
    nearest to ``beta`` times their number, with :math:`1 / \lambda` a whole number from 1 to 12. It is a constant for
    the gradient, and all negatives have a gradient. With ``tau_scale=None`` :math:`s = 1`: the scores are logits as in
    cross-entropy. L may exceed 1.

    ``"pairwise"`` and ``"trapezoid"`` are one minus the smooth area under the ROC curve between the false-positive
    rates ``alpha`` and ``beta``, over their distance. The band edges are score quantiles of the reference rows R:

    .. math::
        t_\alpha = Q_{1-\alpha}(x_R), \quad t_\beta = Q_{1-\beta}(x_R), \quad
        \tau = \text{temperature} \cdot (\mathrm{IQR}(x_R) \text{ or } t_\alpha - t_\beta)

    Both average over the positives how likely reference points :math:`t_k` are above; the :math:`c_k` sum to one:

    .. math:: L = \frac{1}{|P|} \sum_{i \in P} \sum_k c_k \, \sigma\!\left(\frac{t_k - x_i}{\tau}\right)

    ``"pairwise"``: the points are the negatives inside the band, both ends included, with equal weights and a gradient
    of their own; ``beta=1`` is one minus the smooth AUC. ``"trapezoid"``: they are the quantiles at ``n_knots`` equally
    spaced rates, with the weights of the trapezoid rule, and pass their gradient to the reference rows as the threshold
    of :func:`~fullrank.losses.recall_at_quantile` does, which also says what weights do to quantiles.

    With ``indexes`` there is one such loss for each query, over its rows alone; read "query" for "class" below. The
    scale is that of the reference rows of all queries.

    The gradient of all rows adds up to 0, unless ``threshold_gradient=False``. Scale and temperature are detached.

    Args:
        alpha, beta: the band of false-positive rates, 0 <= alpha < beta <= 1; under ``"dro"`` a share of negatives.
        surrogate: ``"dro"``, which requires ``alpha=0``, ``"pairwise"`` or ``"trapezoid"``. An argument without effect
            raises.
        n_knots: number of knots >= 2, for ``"trapezoid"`` alone.
        tau_scale: what differences of scores are divided by: ``"iqr"`` of the reference scores, or the width of the
            ``"band"``, times the temperature except under ``"dro"``. None is 1 under ``"dro"``, else ``"iqr"``.
        budget_basis: reference rows: iid negatives (``"fpr"``) or all iid rows (``"population"``).
        temperature: > 0, a multiple of the scale of the reference scores, usually 0.25 to 0.1. Not for ``"dro"``.
        dro_lambda: None finds it from ``beta``; or a number > 0 for ``"dro"`` alone. 1, 1/2, 1/3, ... take
            O((P + N) / dro_lambda) time, others O(P N).

    Degenerate:
        A class is not valid without a positive of positive weight, a negative or a reference row, when its scale is at
        most 1e-12 or infinite (the module warns, once), under ``"pairwise"`` without a negative in the band, and under
        ``"dro"`` without an iid negative. An infinite edge makes the scale ``"band"`` infinite, and has no gradient.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]])
        >>> pauc_at_budget(scores, torch.tensor([0, 1, 1, 0, 0]))
        tensor(1.6285)

    Reference:
        McClish, Analyzing a Portion of the ROC Curve, 1989; Narasimhan and Agarwal, ICML 2013; Zhu et al., When AUC
        meets DRO, ICML 2022, SOPA-s (``"dro"``). Thresholds: see :func:`~fullrank.losses.recall_at_quantile`.
    """
    others = budget_basis, quantile_interpolation, dro_lambda, threshold_gradient
    area = check_area(PartialArea(alpha, beta, surrogate, n_knots, tau_scale, "pool", *others), temperature)
    given = Batch(logits, targets, iid_mask, sample_weight, indexes)
    pool = local_pool(given, temperature, reduction, ignore_index, multi_hot, validate_args, weighting, False)
    per_class = missed_area(pool, area, temperature, with_stats=False).per_class
    return reduce_values(per_class, reduction, pool.scores.dtype, of_pool=indexes is None)


@completed(pauc_at_budget)
class PAUCAtBudgetLoss(RankingLoss):
    """Partial AUC at low false-positive rates, over the rows of all ranks and of a memory queue.

    The formulas are those of :func:`~fullrank.losses.pauc_at_budget`. With fewer than ``1 / beta`` iid negatives, 200
    by default, both edges of a hard band from 0 are the top negative. Give the pool ten times as many, and watch
    ``band_neg_count``; ``"dro"`` works with any number.

    With a queue the knots of the trapezoid carry the slope of the live positives alone. In a step without a live
    reference row of finite score no row of the class has a gradient then.

    Args:
        pos_numerator: the positives of the mean: those of the ``"pool"``, or the ``"live"`` ones, whose gradient the
            queued positives then do not dilute. A class without live positives is invalid in that step.

    Example:
        >>> import torch
        >>> scores, targets = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]]), torch.tensor([0, 1, 1, 0, 0])
        >>> PAUCAtBudgetLoss(num_classes=1, beta=0.5, surrogate="pairwise")(scores, targets)
        tensor(0.5000)
    """

    temperature: float  # never None: it is a multiple of the scale already
    uses_iid = True
    ranks_queries = True
    own_arguments = PartialArea._fields
    _checks = RankingLoss._checks | dict.fromkeys(own_arguments, unchecked)

    def __init__(
        self,
        num_classes: int = 1,
        alpha: float = 0.0,
        beta: float = 0.005,
        surrogate: Surrogate = "dro",
        n_knots: int = 2,
        tau_scale: TauScale | None = None,
        pos_numerator: PosNumerator = "pool",
        budget_basis: BudgetBasis = "fpr",
        queue_size: int = 0,
        temperature: float = TEMPERATURE,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        update_queue_in_eval: bool = False,
        gather_distributed: bool | None = None,
        quantile_interpolation: str = "higher",
        max_pool_size: int | None = None,
        *,
        dro_lambda: float | None = None,
        threshold_gradient: bool = True,
        **options: Unpack[PoolOptions],
    ) -> None:
        shared = num_classes, queue_size, temperature, reduction, ignore_index, update_queue_in_eval
        super().__init__(*shared, gather_distributed, max_pool_size, **options)
        self.alpha, self.beta, self.surrogate, self.n_knots = alpha, beta, surrogate, n_knots
        self.tau_scale, self.pos_numerator, self.budget_basis = tau_scale, pos_numerator, budget_basis
        self.quantile_interpolation = quantile_interpolation
        self.dro_lambda, self.threshold_gradient = dro_lambda, threshold_gradient
        self._tilts: Tensor | None = None  # of the last call
        check_area(self._area, self.temperature)

    @property
    def current_hardness(self) -> float | tuple[float, ...] | None:
        """The lambda of ``"dro"``, of the last call if it follows from ``beta``; of several classes a tuple.

        None before the first call, after a compiled call, and with the other surrogates. It waits for an accelerator.
        """
        if self.surrogate != "dro" or self.dro_lambda is not None:
            return self.dro_lambda
        tilts = None if self._tilts is None else tuple(self._tilts.tolist())
        return tilts[0] if tilts and len(tilts) == 1 else tilts

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
        indexes: Tensor | None = None,
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
        indexes: Tensor | None = None,
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
        indexes: Tensor | None = None,
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
        indexes: Tensor | None = None,
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
        indexes: Tensor | None = None,
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
        indexes: Tensor | None = None,
    ) -> Tensor | LossWithClasses | LossWithStats | LossWithClassesAndStats:
        """Return the loss as :meth:`RankingLoss.forward` does, with diagnostics on request.

        Args:
            return_diagnostics: also return ``stats``, a dict of tensors (C,): the band edges ``t_alpha`` and
                ``t_beta``; the temperature ``tau_eff``, which is the scale with ``"dro"``; ``band_neg_count``, the iid
                negatives inside the band; ``pauc_var``, the weighted variance over positives of their share of the
                area, of their loss with ``"dro"``; ``grad_pos_count``, the positives of all ranks that carry gradient.

        Returns:
            The loss, ``LossWithClasses``, ``LossWithStats`` or ``LossWithClassesAndStats``, as requested.
        """
        stats: dict[str, Tensor] = {}

        def with_stats(pool: Pool) -> PerClass:
            missed = self._missed_area(pool, with_stats=True)
            stats.update(missed.stats)
            return missed.per_class

        formula = with_stats if return_diagnostics else self.compute_per_class
        loss, per_class = self._step(Batch(logits, targets, iid_mask, sample_weight, indexes), formula)
        if not return_per_class:
            return LossWithStats(loss, stats) if return_diagnostics else loss
        with_classes = LossWithClasses.of(loss, per_class)
        return LossWithClassesAndStats(*with_classes, stats) if return_diagnostics else with_classes

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward  # type: ignore[assignment]

    def compute_per_class(self, pool: Pool) -> PerClass:
        return self._missed_area(pool, with_stats=False).per_class

    def _missed_area(self, pool: Pool, with_stats: bool) -> MissedArea:
        missed = missed_area(pool, self._area, self.temperature, with_stats=with_stats)
        tilts = missed.tilts
        has_numbers = tilts is not None and has_values(tilts) and not func_transforms_are_active()
        vars(self)["_tilts"] = tilts if has_numbers else None
        self._observe_flat(missed.flat)
        return missed

    def _observe_flat(self, flat: Tensor | None) -> None:
        def warn_of(flat: list[bool]) -> None:
            if True in flat:
                other = "tau_scale=None" if self.surrogate == "dro" else "the other tau_scale"
                self._hints.warn_once(
                    "flat",
                    f"class {flat.index(True)} is left out. Its reference scores hardly differ: the scale "
                    f"by tau_scale={self.tau_scale or 'iqr'!r} is at most {SMALLEST_SCALE}. Enlarge queue_size, widen "
                    f"the band, or try {other}.",
                )

        if flat is not None and self.validate_args and has_values(flat):
            self._hints.read(flat, warn_of)

    def _check_change(self, name: str, value: Any) -> None:
        super()._check_change(name, value)
        is_own = name in self.own_arguments
        area = self._area._replace(**{name: value}) if is_own else self._area
        check_area(area, value if name == "temperature" else self.temperature)
