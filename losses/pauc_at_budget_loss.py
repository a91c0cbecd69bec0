"""Smooth partial area under the ROC curve over the rows of all ranks and of a memory queue."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor
from typing_extensions import Unpack

from ..kernels.torch_private import func_transforms_are_active
from .arguments import completed
from .distributed_loss import compiled_where_local
from .hints import Setting
from .partial_area import (
    SMALLEST_SCALE,
    TEMPERATURE,
    BudgetBasis,
    PartialArea,
    PosNumerator,
    Surrogate,
    TauScale,
    check_area,
    missed_area,
)
from .pauc_at_budget import pauc_at_budget
from .pool import LossWithClasses, LossWithClassesAndStats, LossWithStats, Reduction
from .queued_loss import PoolOptions
from .ranking import Given, RankingLoss
from .tensors import has_values

_AREA_OF = attrgetter(*PartialArea._fields)


@completed(pauc_at_budget)
class PAUCAtBudgetLoss(RankingLoss):
    """Partial AUC at low false-positive rates, over the rows of all ranks and of a memory queue.

    The formulas are those of :func:`~fullrank.losses.pauc_at_budget`. The pool is the rows of all ranks and of the
    queue. How hard the default, ``surrogate="dro"``, is follows from ``beta``; ``current_hardness`` is the lambda of
    the last call. A number for ``dro_lambda`` takes the place of the budget, and ``beta`` then only sets the
    diagnostics. Added to cross-entropy with its defaults it lowered average precision on 29 tables by 0.008.

    With fewer than ``1 / beta`` iid negatives, 200 by default, both edges of a hard band from 0 are the top negative.
    Give the pool many more, and watch ``band_neg_count``.

    The gradient raises positives, and lowers live reference rows: with ``"dro"`` all iid negatives, the hardest ones
    most, with ``"pairwise"`` the negatives in the band, with ``"trapezoid"`` those near the knots. A queue changes the
    knots of the trapezoid, not the balance: they carry the slope of the live positives, and the gradient of the live
    rows adds up to 0. In a step without a live reference row of finite score no row of the class has a gradient then,
    because nothing would fall while the positives rise.

    Args:
        temperature: > 0, a multiple of the scale of the reference scores, usually 0.25 to 0.1. Not for ``"dro"``.
        pos_numerator: the positives of the mean: those of the ``"pool"``, or the ``"live"`` ones, whose gradient the
            queued positives then do not dilute. A class without live positives is invalid in that step.

    Distributed:
        The collectives of :func:`~fullrank.gather_rows` forward, one or two. None backward. Every rank gets
        the same value and holds the same queue.

    Example:
        >>> import torch
        >>> scores, targets = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]]), torch.tensor([0, 1, 1, 0, 0])
        >>> loss = PAUCAtBudgetLoss(num_classes=1, queue_size=0)
        >>> loss(scores, targets)
        tensor(1.6285)
        >>> loss = PAUCAtBudgetLoss(num_classes=1, beta=0.5, surrogate="pairwise", queue_size=0)
        >>> loss(scores, targets)
        tensor(0.5000)
    """

    temperature: float  # never None: it is a multiple of the scale already
    uses_iid = True
    _own_arguments = PartialArea._fields

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
        given = num_classes, queue_size, temperature, reduction, ignore_index, update_queue_in_eval
        super().__init__(*given, gather_distributed, max_pool_size, **options)
        self.alpha, self.beta, self.surrogate, self.n_knots = alpha, beta, surrogate, n_knots
        self.tau_scale, self.pos_numerator, self.budget_basis = tau_scale, pos_numerator, budget_basis
        self.quantile_interpolation = quantile_interpolation
        self.dro_lambda, self.threshold_gradient = dro_lambda, threshold_gradient
        self._tilts: Tensor | None = None  # of the last call
        self._checked = check_area(self._area, self.temperature)

    @property
    def current_hardness(self) -> float | tuple[float, ...] | None:
        """The lambda of ``"dro"``: ``dro_lambda`` if it is a number, else what the last call found from ``beta``.

        One number, or a tuple with that of each class for several classes. None before the first call, after a compiled
        one, and with the other surrogates. To read it waits for an accelerator.
        """
        if self.surrogate != "dro" or self.dro_lambda is not None:
            return self.dro_lambda
        found = None if self._tilts is None else tuple(self._tilts.tolist())
        return found[0] if found and self.num_classes == 1 else found

    @property
    def _area(self) -> PartialArea:
        return PartialArea(*_AREA_OF(self))

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
        live = self._rows_of_all(Given(logits, targets, iid_mask, sample_weight))
        pool = self._join(live)
        per_class, flat_class, stats, tilts = missed_area(
            pool, self._area, self.temperature, with_stats=return_diagnostics
        )
        is_number = tilts is not None and has_values(tilts) and not func_transforms_are_active()
        self._tilts = tilts if is_number else None
        if flat_class is not None and self.validate_args:
            self._warn_of_flat(flat_class)
        loss = self._reduce_and_enqueue(live, pool, per_class)
        if not return_per_class:
            return loss if stats is None else LossWithStats(loss, stats)
        result = LossWithClasses.of(loss, per_class)
        return result if stats is None else LossWithClassesAndStats(*result, stats)

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward  # type: ignore[assignment]

    def _warn_of_flat(self, flat_class: int) -> None:
        other = "tau_scale=None" if self.surrogate == "dro" else "the other tau_scale"
        self._warn_once(
            "flat",
            f"{type(self).__name__}: class {flat_class} is left out. Its reference scores hardly differ: the scale "
            f"by tau_scale={self.tau_scale or 'iqr'!r} is at most {SMALLEST_SCALE}. Enlarge queue_size, widen the "
            f"band, or try {other}.",
        )

    def _setting(self, num_rows: int) -> Setting:
        if self.surrogate == "dro":  # which has no temperature, and no band that can be empty
            return Setting(None, None)
        small = (
            f"a band up to beta={self.beta:g} holds less than one of the {num_rows} rows of the pool. Make the pool "
            f"several times 1/beta = {1 / self.beta:.0f} rows, by larger batches or queue_size, or raise beta."
        )
        return super()._setting(num_rows)._replace(small_pool=small if num_rows * self.beta < 1 else None)

    def _check_settings(self) -> None:
        super()._check_settings()
        if self._area != self._checked:  # a schedule may have assigned a temperature, which "dro" does not use
            self._checked = check_area(self._area)
