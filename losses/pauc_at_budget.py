"""Smooth partial area under the ROC curve, over a band of false-positive rates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed.group import Group
from ..kernels.sigmoid_sums import sigmoid_sums
from ..queues.memory_queue import Keep
from .band import (
    SMALLEST_SCALE,
    Band,
    BudgetBasis,
    PosNumerator,
    Surrogate,
    TauScale,
    Thresholds,
    band_thresholds,
    check_band,
)
from .pool import (
    LossWithClasses,
    PerClass,
    Pool,
    compact,
    local_pool,
    positive_shares,
    reduce_classes,
    spread_nan,
    with_classes,
)
from .ranking import RankingLoss, Reduction


class PAUCResult(NamedTuple):
    """The loss of each class, with what a diagnosis needs."""

    per_class: PerClass
    stats: dict[str, Tensor]
    flat: Tensor  # [C] bool: has positives and a reference, but of one value


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


def pauc_at_budget(
    logits: Tensor,
    targets: Tensor,
    alpha: float = 0.0,
    beta: float = 0.005,
    surrogate: Surrogate = "trapezoid",
    n_knots: int = 2,
    tau_scale: TauScale = "iqr",
    budget_basis: BudgetBasis = "fpr",
    temperature: float = 0.1,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    quantile_interpolation: str = "higher",
    return_per_class: bool = False,
    *,
    iid_mask: Tensor | None = None,
    sample_weight: Tensor | None = None,
    multi_hot: bool = False,
    validate_args: bool = True,
) -> Tensor | LossWithClasses:
    r"""Compute one minus the smooth area under the ROC curve between two false-positive rates, over their distance.

    The band edges are score quantiles of the reference rows R, detached: the iid negatives, or all iid rows.

    .. math::
        t_\alpha = Q_{1-\alpha}(x_R), \quad t_\beta = Q_{1-\beta}(x_R), \quad
        \tau = \text{temperature} \cdot (\mathrm{IQR}(x_R) \text{ or } t_\alpha - t_\beta)

    Both surrogates are a mean over positives of their chance to exceed reference points :math:`t_k` with weights
    :math:`c_k` that sum to one:

    .. math:: L = \frac{1}{|P|} \sum_{i \in P} \sum_k c_k \, \sigma\!\left(\frac{t_k - x_i}{\tau}\right)

    ``"trapezoid"``: the quantiles at ``n_knots`` equally spaced rates, with the weights of the trapezoid rule; gradient
    reaches positives only. ``"pairwise"``: the negatives inside the band, both ends in, with equal weights; gradient
    reaches them too.

    Args:
        logits: (N, C) raw scores; C = 1 is binary.
        targets: (N,) class indices, or 0 and 1 when C = 1; (N, C) with ``multi_hot``.
        alpha, beta: the band, 0 <= alpha < beta <= 1; 0 and the budget contrast positives with every false alarm.
        surrogate: see above.
        n_knots: >= 2, for ``"trapezoid"``.
        tau_scale: ``"iqr"`` of the reference, or the width of the ``"band"``.
        budget_basis: reference rows: iid negatives (``"fpr"``) or all iid rows (``"population"``).
        temperature: > 0, without unit: a multiple of the scale.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,).
        ignore_index: rows with this target take no part.
        quantile_interpolation: how thresholds are read between two scores.
        return_per_class: return ``LossWithClasses(loss, per_class, valid)``.
        iid_mask: (N,) bool, the rows that may set thresholds; None for all.
        sample_weight: (N,) >= 0, weights of the positives in the mean over P; thresholds have none.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``.
        validate_args: check target ranges and weights; never done while compiling.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate:
        A class is invalid without a positive of positive weight, a negative or a reference row, when the scale is at
        most 1e-12, and under ``"pairwise"`` without a negative in the band: left out of the mean and the sum, NaN under
        ``"none"``.

    Example:
        >>> import torch
        >>> scores = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]])
        >>> pauc_at_budget(scores, torch.tensor([0, 1, 1, 0, 0]), beta=0.5, surrogate="pairwise")
        tensor(0.5000)

    Reference:
        McClish, Analyzing a Portion of the ROC Curve, 1989; Narasimhan and Agarwal, ICML 2013; Zhu et al., ICML 2022.
    """
    band = Band(alpha, beta, surrogate, n_knots, tau_scale, "pool", budget_basis, quantile_interpolation)
    check_band(band)
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
    per_class = pauc_per_class(pool, band, temperature).per_class
    loss = reduce_classes(per_class, pool, reduction)
    return with_classes(loss, per_class) if return_per_class else loss


def pauc_per_class(pool: Pool, band: Band, temperature: float) -> PAUCResult:
    """Return one minus the smooth partial area of each class of ``pool``, and its diagnostics."""
    iid = pool.everyone if pool.iid is None else pool.everyone & pool.iid
    edges = band_thresholds(pool, iid, band, temperature)
    live = pool.positive if pool.live is None else pool.positive & pool.live
    numerator = live if band.pos_numerator == "live" else pool.positive
    share, has_positive = positive_shares(pool, numerator)  # [C, M], [C]
    negative = pool.negative
    in_band = negative & (pool.scores >= edges.t_beta[:, None]) & (pool.scores <= edges.t_alpha[:, None])
    valid = has_positive & pool.has_negative & edges.resolved
    # In units of tau from an edge of the band: dividing scores far from 0 would round their differences away.
    center = torch.where(edges.t_beta.isfinite(), edges.t_beta, torch.zeros_like(edges.t_beta))[:, None]
    scaled = (pool.scores - center) / edges.tau[:, None]
    if band.surrogate == "trapezoid":
        mask, queries, shares = numerator, scaled, share
        points = (edges.knots - center) / edges.tau[:, None]
        weights = _trapezoid(band.n_knots, edges.knots)
    else:
        valid = valid & in_band.any(dim=1)
        mask, queries, shares = compact(numerator, scaled, share)
        shares = shares * mask
        inside, points = compact(in_band, scaled)  # [C, K]
        weights = inside / inside.sum(dim=1, keepdim=True).clamp_min(1).to(scaled)
        points = torch.where(inside, points, torch.zeros_like(points))
    queries = torch.where(mask & valid[:, None], queries, torch.zeros_like(queries))
    points = torch.where(valid[:, None], points, torch.zeros_like(points))
    missed = sigmoid_sums(queries, points, weights.to(scaled)[:, :, None], 1.0)[:, :, 0]  # [C, P]
    per_class = PerClass(spread_nan((missed * shares).sum(dim=1), pool), valid)
    stats = _stats(edges, valid, missed.detach(), mask, in_band & iid, live)
    return PAUCResult(per_class, stats, has_positive & edges.has_reference & ~edges.resolved)


def _trapezoid(n_knots: int, like: Tensor) -> Tensor:
    """Return (C, K): the weights of the trapezoid rule on an interval of length one."""
    weights = torch.full_like(like, 1.0 / (n_knots - 1))
    weights[:, 0] /= 2
    weights[:, -1] /= 2
    return weights


def _stats(
    edges: Thresholds, valid: Tensor, missed: Tensor, numerator: Tensor, in_band: Tensor, live: Tensor
) -> dict[str, Tensor]:
    """Return the diagnostics, each (C,): NaN, or 0 for counts, where the class is not valid."""
    count = numerator.sum(dim=1).clamp_min(1)
    inside = numerator.to(missed)
    mean = (missed * inside).sum(dim=1) / count
    variance = ((missed - mean[:, None]) ** 2 * inside).sum(dim=1) / count
    nan = torch.full_like(variance, torch.nan)
    floats = {"t_alpha": edges.t_alpha, "t_beta": edges.t_beta, "tau_eff": edges.tau, "pauc_var": variance}
    counts = {"band_neg_count": in_band.sum(dim=1), "grad_pos_count": live.sum(dim=1)}
    stats = {name: torch.where(valid, value, nan) for name, value in floats.items()}
    stats |= {name: torch.where(valid, value, torch.zeros_like(value)) for name, value in counts.items()}
    return stats


class PAUCAtBudgetLoss(RankingLoss):
    """One minus the smooth partial AUC over a band, over the rows of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.pauc_at_budget`. The pool is the rows of all ranks and of the queue.
    With fewer than ``1 / beta`` iid negatives, 200 by default, both edges of a band from 0 are the top negative: let
    the pool have many more, and watch ``band_neg_count``.

    With ``surrogate="trapezoid"`` the gradient raises positives and lowers no negative: alone, it lets all scores rise
    together. Anchor it with a pointwise loss, such as ``LossWarmupWrapper(..., final_main_weight=0.5)``, or use
    ``"pairwise"``, which lowers the negatives in the band.

    Args:
        num_classes: columns C of the logits; class c is ranked against the rest. 1 is binary, with targets 0 and 1.
        alpha, beta: the band of false-positive rates, 0 <= alpha < beta <= 1.
        surrogate: ``"trapezoid"`` over knots, or ``"pairwise"`` with the negatives in the band.
        n_knots: number of knots >= 2, for ``"trapezoid"``.
        tau_scale: scale of the temperature: ``"iqr"`` of the reference scores, or the width of the ``"band"``.
        pos_numerator: the positives of the mean: ``"pool"``, or ``"live"``, whose gradient the queued positives do not
            dilute; a class without live positives is then invalid for the step.
        budget_basis: reference rows: iid negatives (``"fpr"``) or all iid rows (``"population"``).
        queue_size: rows of the memory queue, 0 for none. Queued rows belong to the pool and carry no gradient.
        temperature: > 0, without unit: a multiple of the scale of the reference scores; 0.25 to 0.1 is usual.
        reduction: ``"mean"`` or ``"sum"`` over the valid classes, or ``"none"`` for (C,) with NaN where not valid.
        ignore_index: rows with this target take no part.
        update_queue_in_eval: let rows enter the queue in eval mode too.
        gather_distributed: None detects a process group at the forward, False keeps to this rank, True demands a group.
        quantile_interpolation: how thresholds are read between two scores: ``"linear"``, ``"lower"``, ``"higher"``,
            ``"nearest"`` or ``"midpoint"``.
        max_pool_size: draw at most this many rows of the pool, with a quota for every class; None for all.
        group: process group or device mesh of the data-parallel ranks; None for the default group.
        gradient_reduction: how the wrapper combines parameter gradients: ``"mean"``, ``"sum"``, or a number of ranks.
        queue_keep: ``"all"`` rows, or ``"negatives"``, so that queued positives do not dilute the live ones' gradient;
            beside a pointwise loss, since against constant negatives all scores may rise together.
        multi_hot: targets are (N, C) of 0, 1 and ``ignore_index``, which leaves an element out for its class only.
        validate_args: check values (target ranges, weights), which waits for the device; never done while compiling.

    Shape:
        logits (N, C), targets (N,), or (N, C) with ``multi_hot``; N may differ between ranks and may be 0. Output
        scalar, or (C,) with ``reduction="none"``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, at construction and in the forward, on every rank.
        RuntimeError: when ranks disagree about the call or the state, or inside activation checkpointing.

    Degenerate:
        A class is invalid without a positive of positive weight, a negative or a reference row, when the scale is at
        most 1e-12 (a warning, once), and under ``"pairwise"`` without a negative in the band: left out of the mean and
        the sum. With no valid class the loss is 0 and its gradient too.

    Distributed:
        Two collectives forward, the header and one payload with the rows of all ranks; none backward. Every rank gets
        the same value and holds the same queue.

    Example:
        >>> import torch
        >>> loss = PAUCAtBudgetLoss(num_classes=1, beta=0.5, surrogate="pairwise", queue_size=0)
        >>> scores = torch.tensor([[4.0], [3.0], [2.0], [1.0], [0.0]])
        >>> loss(scores, torch.tensor([0, 1, 1, 0, 0]))
        tensor(0.5000)

    Reference:
        McClish, Analyzing a Portion of the ROC Curve, 1989; Narasimhan and Agarwal, ICML 2013; Zhu et al., ICML 2022.
    """

    def __init__(
        self,
        num_classes: int,
        alpha: float = 0.0,
        beta: float = 0.005,
        surrogate: Surrogate = "trapezoid",
        n_knots: int = 2,
        tau_scale: TauScale = "iqr",
        pos_numerator: PosNumerator = "pool",
        budget_basis: BudgetBasis = "fpr",
        queue_size: int = 1024,
        temperature: float = 0.1,
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
        multi_hot: bool = False,
        validate_args: bool = True,
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
            multi_hot=multi_hot,
            validate_args=validate_args,
        )
        band = Band(alpha, beta, surrogate, n_knots, tau_scale, pos_numerator, budget_basis, quantile_interpolation)
        check_band(band)
        self.alpha, self.beta = alpha, beta
        self.surrogate, self.n_knots, self.tau_scale = surrogate, n_knots, tau_scale
        self.pos_numerator, self.budget_basis = pos_numerator, budget_basis
        self.quantile_interpolation = quantile_interpolation

    @property
    def band(self) -> Band:
        """The arguments that define the partial area."""
        return Band(
            self.alpha,
            self.beta,
            self.surrogate,
            self.n_knots,
            self.tau_scale,
            self.pos_numerator,
            self.budget_basis,
            self.quantile_interpolation,
        )

    def forward(  # type: ignore[override]
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
            logits, targets, iid_mask, return_per_class, sample_weight: see :meth:`RankingLoss.forward`.
            return_diagnostics: also return ``stats``, a dict of tensors (C,): the band edges ``t_alpha`` and
                ``t_beta``, the temperature ``tau_eff``, ``band_neg_count`` iid negatives inside the band, ``pauc_var``
                the variance over positives of their share of the area, and ``grad_pos_count`` positives that carry
                gradient, over all ranks.
        """
        pool, live = self._pool(logits, targets, iid_mask, sample_weight)
        outcome = pauc_per_class(pool, self.band, self.temperature)
        self._warn_flat(outcome.flat)
        loss = reduce_classes(outcome.per_class, pool, self.reduction)
        self._enqueue(live)
        if return_per_class:
            result = with_classes(loss, outcome.per_class)
            return LossWithClassesAndStats(*result, outcome.stats) if return_diagnostics else result
        return LossWithStats(loss, outcome.stats) if return_diagnostics else loss

    def _warn_flat(self, flat: Tensor) -> None:
        if self.validate_args and "flat" not in self._warned and bool(flat.any()):
            self._warn_once(
                "flat",
                f"{type(self).__name__}: class {int(flat.nonzero()[0, 0])} is left out. Its reference scores "
                f"hardly differ: the scale by tau_scale={self.tau_scale!r} is at most {SMALLEST_SCALE}. "
                "Enlarge queue_size, widen the band, or try the other tau_scale.",
            )

    def _own_arguments(self) -> tuple[str, ...]:
        return Band._fields
