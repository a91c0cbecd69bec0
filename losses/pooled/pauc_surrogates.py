"""The surrogates of the partial area under the ROC curve: their arguments, thresholds, values and diagnostics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...distributed.torch_private import not_compiled
from ...errors import check_choice, check_number, check_positive, expected, of_percent
from ...kernels.below_levels import Carriers, below_levels, shares_below
from ...kernels.entropic_risk import entropic_risk
from ...kernels.pairs import places_of
from ...kernels.quantiles import INTERPOLATIONS, Levels, upper_levels
from ...kernels.sigmoid_sums import sigmoid_sums_of_classes
from ..rows import has_values
from .pool import PerClass, Pool, positive_shares, propagate_nan

Surrogate = Literal["trapezoid", "pairwise", "dro"]
TauScale = Literal["iqr", "band"]
PosNumerator = Literal["pool", "live"]
BudgetBasis = Literal["fpr", "population"]

TEMPERATURE = 0.1  # by default
SMALLEST_SCALE = 1e-12  # at or below it the reference scores do not differ, and give no temperature


class PartialArea(NamedTuple):
    """The arguments that define the partial area; :func:`check_area` checks them.

    Args:
        quantile_interpolation: how a threshold between two scores is read: ``"linear"``, ``"lower"``, ``"higher"``,
            ``"nearest"`` or ``"midpoint"``.
        threshold_gradient: let the threshold, or the knots of ``"trapezoid"``, carry a gradient to the rows of which
            they are quantiles. With False the gradient raises positives and lowers no negative: combine the loss with a
            pointwise one, or all scores can rise together.
    """

    alpha: float = 0.0
    beta: float = 0.005
    surrogate: Surrogate = "dro"
    n_knots: int = 2
    tau_scale: TauScale | None = None
    pos_numerator: PosNumerator = "pool"
    budget_basis: BudgetBasis = "fpr"
    quantile_interpolation: str = "higher"
    dro_lambda: float | None = None
    threshold_gradient: bool = True

    @property
    def scale(self) -> str | None:
        """What differences of scores are divided by: ``"iqr"``, ``"band"``, or None for 1."""
        return self.tau_scale if self.surrogate == "dro" else self.tau_scale or "iqr"


# Arguments that only some surrogates use, with their defaults.
_USED_BY: dict[str, tuple[tuple[str, ...], object]] = {
    "temperature": (("pairwise", "trapezoid"), TEMPERATURE),
    "n_knots": (("trapezoid",), 2),
    "threshold_gradient": (("trapezoid",), True),
    "dro_lambda": (("dro",), None),
}


def check_area(area: PartialArea, temperature: float = TEMPERATURE) -> PartialArea:
    """Return ``area`` unchanged, or raise TypeError or ValueError."""
    band = check_number("alpha", area.alpha), check_number("beta", area.beta)
    if not 0 <= area.alpha < area.beta <= 1:
        raise ValueError(expected("alpha, beta", "0 <= alpha < beta <= 1", band, of_percent(area.beta)))
    if isinstance(area.n_knots, bool) or not isinstance(area.n_knots, int) or area.n_knots < 2:
        raise ValueError(expected("n_knots", "an int >= 2", area.n_knots))
    check_choice("surrogate", area.surrogate, get_args(Surrogate))
    check_choice("tau_scale", area.tau_scale, (None, *get_args(TauScale)))
    check_choice("pos_numerator", area.pos_numerator, get_args(PosNumerator))
    check_choice("budget_basis", area.budget_basis, get_args(BudgetBasis))
    check_choice("quantile_interpolation", area.quantile_interpolation, INTERPOLATIONS)
    if area.dro_lambda is not None:
        check_positive("dro_lambda", area.dro_lambda)
    if area.surrogate == "dro" and area.alpha != 0:
        fix = "For a band use surrogate='pairwise'."
        raise ValueError(expected("alpha", "0 with surrogate='dro'", area.alpha, fix))
    check_used(area.surrogate, {**area._asdict(), "temperature": temperature}, _USED_BY)
    return area


def check_used(
    surrogate: str, arguments: Mapping[str, object], used_by: Mapping[str, tuple[tuple[str, ...], object]]
) -> None:
    """Raise ValueError for an argument that is not at its default and that ``surrogate`` does not use."""
    for name, (surrogates, default) in used_by.items():
        if surrogate not in surrogates and arguments[name] != default:
            fix = f"It acts with surrogate={' and '.join(map(repr, surrogates))} alone: leave it out, or choose one."
            raise ValueError(expected(name, f"{default!r} with surrogate={surrogate!r}", arguments[name], fix))


class MissedArea(NamedTuple):
    """The loss of each class, and what is reported next to it."""

    per_class: PerClass
    flat: Tensor | None  # [C] bool: the class has positives and reference rows, but their scores do not differ
    stats: dict[str, Tensor]  # each [C]: NaN, or 0 for counts, where the class is not valid; empty if not asked for
    tilts: Tensor | None = None  # [C] float64, the lambda of each class, under "dro"


class Thresholds(NamedTuple):
    """The thresholds of each class and its temperature, all detached."""

    edges: Levels  # [C, E] the upper edge of the band, further knots, the lower edge
    tau: Tensor  # [C], 1 where the scale gives no temperature
    resolved: Tensor  # [C] bool: the class has reference rows, and their scale gives a temperature
    has_reference: Tensor  # [C] bool: the class has reference rows


def missed_area(
    pool: Pool, area: PartialArea, temperature: float, *, with_stats: bool, whole: Thresholds | None = None
) -> MissedArea:
    """Return the loss of each class, or query; ``whole`` are the thresholds of the pool that this is a part of."""
    if pool.indexes is not None:
        return _of_queries(pool, area, temperature, with_stats)
    if area.surrogate == "dro":
        return _soft_area(pool, area, with_stats, whole)
    negative, reference = pool.negative, reference_of(pool, area)
    thresholds = _thresholds(pool, reference, area, temperature, whole)
    live = pool.positive if pool.live is None else pool.positive & pool.live
    numerator = live if area.pos_numerator == "live" else pool.positive
    share, has_positive = positive_shares(pool, numerator)  # [C, M], [C]
    valid = has_positive & thresholds.resolved
    if area.budget_basis != "fpr":
        valid = valid & negative.any(dim=1)
    # The scale between two equal infinities is NaN, which must not reach an invalid class.
    thresholds = thresholds._replace(tau=thresholds.tau.masked_fill(~valid, 1.0))
    flat = has_positive & (thresholds.has_reference ^ thresholds.resolved)
    if area.surrogate == "trapezoid":
        knots, weights, share = thresholds.edges.where(valid), trapezoid_rule(area.n_knots), share * valid[:, None]
        carriers = Carriers(reference, pool.live, pool.key_weight) if area.threshold_gradient else None
        losses = below_levels(pool.scores, share, knots, weights, thresholds.tau, carriers)
        missed = shares_below(pool.scores, knots, weights, thresholds.tau) if with_stats else losses
    else:
        rivals = _in_band(pool, negative, thresholds)
        valid = valid & rivals.any(dim=1)
        share, missed = _mean_over_rivals(pool, thresholds, valid, numerator, share, rivals)
        losses = propagate_nan((missed * share).sum(dim=1) * valid, pool)
    stats: dict[str, Tensor] = {}
    if with_stats:
        missed = torch.where(share > 0, missed.detach(), 0.0)
        mean = (missed * share).sum(dim=1, keepdim=True)  # [C, 1], over the positives
        variance = ((missed - mean) ** 2 * share).sum(dim=1)
        stats = _stats_of(pool, thresholds, valid, variance)
    return MissedArea(PerClass(losses, valid), flat, stats)


@not_compiled
def _of_queries(pool: Pool, area: PartialArea, temperature: float, with_stats: bool) -> MissedArea:
    """Return the same for each query, in the order of ``indexes.unique()``; differences have one scale for all."""
    number, blocks = pool.queries()
    whole, stats = None, dict[str, Tensor]()
    if area.scale is not None:
        whole = _thresholds(pool, reference_of(pool, area), area, 1.0 if area.surrogate == "dro" else temperature)
    zeros = pool.scores.new_zeros(number, dtype=torch.float64) + pool.scores[0, :0].sum()  # connected to all rows
    values, tilts = zeros, torch.ones_like(zeros.detach())
    valid, flat = pool.positive.new_zeros(number), pool.positive.new_zeros(1)
    for queries, part in blocks:
        missed = missed_area(part, area, temperature, with_stats=with_stats, whole=whole)
        values = values.index_copy(0, queries, missed.per_class.values.double())
        valid[queries] = missed.per_class.valid
        flat = flat if missed.flat is None else flat | missed.flat.any()
        tilts = tilts if missed.tilts is None else tilts.index_copy(0, queries, missed.tilts)
        for name, found in missed.stats.items():
            stats[name] = stats.get(name, found.new_zeros(number)).index_copy(0, queries, found)
    return MissedArea(PerClass(values, valid), flat, stats, tilts if area.surrogate == "dro" else None)


def _soft_area(pool: Pool, area: PartialArea, with_stats: bool, whole: Thresholds | None) -> MissedArea:
    """Return the same for ``"dro"``, which needs no threshold unless it is scaled by one or reports them."""
    live, scales = pool.live if area.pos_numerator == "live" else None, None
    if area.scale is not None or with_stats:
        thresholds = _thresholds(pool, reference_of(pool, area), area, 1.0, whole)
        scales = None if area.scale is None else thresholds.tau.double()
    rest = scales, area.dro_lambda, with_stats
    (values, valid), tilts, variance = soft_maximum(pool, area.beta, pool.iid, live, *rest)
    flat = None
    if scales is not None:
        numerator = pool.positive if live is None else pool.positive & live
        flat = positive_shares(pool, numerator)[1] & (thresholds.has_reference ^ thresholds.resolved)
        values = values.masked_fill(~(thresholds.resolved | values.isnan()), 0.0)
        valid = valid & thresholds.resolved
    stats = _stats_of(pool, thresholds, valid, variance) if with_stats else {}
    return MissedArea(PerClass(values, valid), flat, stats, tilts)


def soft_maximum(
    pool: Pool,
    budget: float,
    iid: Tensor | None = None,
    live: Tensor | None = None,
    scales: Tensor | None = None,
    tilt: float | None = None,
    with_variance: bool = False,
) -> tuple[PerClass, Tensor, Tensor]:
    """Return for each class the mean over its positives of the soft maximum over its negatives, lambda, and a variance.

    ``iid`` (M,) are the negatives and ``live`` (M,) the positives that count; ``tilt`` is a lambda instead of the
    ``budget``. Lambda (C,) float64 is 1 where not valid; the variance of the losses of the positives may be empty.
    """
    scores = pool.scores.contiguous()
    if scores.shape[1] == 0:
        zero, one = scores.sum(dim=1, dtype=torch.float64), scores.new_ones(len(scores), dtype=torch.float64)
        return PerClass(zero, one == 0), one, zero.detach()
    with_grad = torch.is_grad_enabled() and scores.requires_grad
    rows = scores, pool.positive, pool.member, iid, live, pool.weight, pool.key_weight, scales
    loss, _, valid, tilts, variance = entropic_risk(*rows, budget, tilt, pool.num_positive, with_grad, with_variance)
    return PerClass(loss, valid), tilts, variance


def reference_of(pool: Pool, area: PartialArea) -> Tensor:
    """Return the rows whose scores set thresholds, (C, M) bool."""
    rows = pool.negative if area.budget_basis == "fpr" else pool.everyone
    return rows if pool.iid is None else rows & pool.iid


def _thresholds(
    pool: Pool, reference: Tensor, area: PartialArea, temperature: float, whole: Thresholds | None = None
) -> Thresholds:
    """Return the thresholds of the scores of ``reference`` (C, M), with the scale of ``whole`` if it is given."""
    num_reference = None  # where the host knows it
    if pool.num_positive is not None and pool.iid is None and pool.member is None:
        num_reference = pool.scores.shape[1] - (pool.num_positive if area.budget_basis == "fpr" else 0)
    rule = area.quantile_interpolation, num_reference, pool.key_weight
    levels = upper_levels(pool.scores, reference, fractions_of(area), *rule)
    found = thresholds_of(levels, area, temperature, reference.any(dim=1))
    if whole is None:
        return found
    return found._replace(tau=whole.tau.expand_as(found.tau), resolved=found.has_reference & whole.resolved)


def _mean_over_rivals(
    pool: Pool, thresholds: Thresholds, valid: Tensor, numerator: Tensor, share: Tensor, rivals: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the share of each positive, and its weighted mean over rivals of s((rival - positive) / tau), (C, P)."""
    is_positive, positives, share, is_rival, points, mass = _compact(pool, numerator, share, rivals)
    # In the padding, and in classes that are not valid, a score that neither widens their range nor gives NaN.
    kept, lowest = valid[:, None], thresholds.edges.base[:, -1:]
    filling = torch.where((lowest - lowest == 0) & kept, lowest, 0.0)  # isfinite takes four operators
    positives = torch.where(kept if is_positive is None else is_positive & kept, positives, filling)
    points = torch.where(kept if is_rival is None else is_rival & kept, points, filling)
    part = points.new_full(points.shape, 1 / max(1, points.shape[1]))  # of each rival, 1 in each class
    if is_rival is not None or mass is not None:
        part = torch.ones_like(points) if mass is None else torch.where(kept, mass, 1.0).to(points)
        part = part if is_rival is None else part * is_rival
        total = part.sum(dim=1, keepdim=True)
        part = part / torch.where(total > 0, total, 1.0)
    means = sigmoid_sums_of_classes(positives, points, part[:, :, None], thresholds.tau).squeeze(2)
    return share if is_positive is None else share * is_positive, means


def _compact(
    pool: Pool, numerator: Tensor, share: Tensor, rivals: Tensor
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Return mask, scores and shares of the positives (C, P), and mask, scores and weights of the rivals (C, K).

    A mask is None without padding. The device is waited for once; where values cannot be read, all rows come back.
    """
    scores, weight = pool.scores, pool.key_weight
    weight = None if weight is None else weight.expand_as(scores)
    if scores.shape[0] == 0 or not has_values(numerator):
        return numerator, scores, share, rivals, scores, weight
    counts = [mask.sum(dim=1) for mask in (numerator, rivals)]  # [C] each
    sizes = torch.stack([count.max() for count in counts]).tolist()
    if scores.shape[0] == 1:
        both = torch.cat([numerator[0], rivals[0]])
        rows = torch.nonzero_static(both, size=sum(sizes))[:, 0].remainder_(max(1, scores.shape[1]))
        positives, points = scores.index_select(1, rows).split(sizes, dim=1)
        mass = None if weight is None else weight.index_select(1, rows[sizes[0] :])
        return None, positives, share.index_select(1, rows[: sizes[0]]), None, points, mass
    (index, mask), (rival_index, inside) = (places_of(*group) for group in zip((numerator, rivals), counts, sizes))
    mass = None if weight is None else weight.gather(1, rival_index)
    return mask, scores.gather(1, index), share.gather(1, index), inside, scores.gather(1, rival_index), mass


def _stats_of(pool: Pool, thresholds: Thresholds, valid: Tensor, variance: Tensor) -> dict[str, Tensor]:
    """Return the diagnostics of each class, see :class:`MissedArea`."""
    ends, negative = thresholds.edges.value, pool.negative
    in_band = _in_band(pool, negative, thresholds) & (negative if pool.iid is None else negative & pool.iid)
    live = pool.positive if pool.live is None else pool.positive & pool.live
    floats = {"t_alpha": ends[:, 0], "t_beta": ends[:, -1], "tau_eff": thresholds.tau, "pauc_var": variance.to(ends)}
    counts = {"band_neg_count": in_band.sum(dim=1), "grad_pos_count": live.sum(dim=1)}
    stats = {name: torch.where(valid, value, torch.full_like(value, torch.nan)) for name, value in floats.items()}
    return stats | {name: torch.where(valid, value, torch.zeros_like(value)) for name, value in counts.items()}


def trapezoid_rule(num_knots: int) -> list[float]:
    """Return the weights of equally spaced knots on an interval of length 1."""
    step = 1.0 / (num_knots - 1)
    return [step / 2, *[step] * (num_knots - 2), step / 2]


def fractions_of(area: PartialArea) -> list[float]:
    """Return the fractions of the quantiles that :func:`thresholds_of` takes; the ends are the exact edges."""
    steps = area.n_knots - 1 if area.surrogate == "trapezoid" else 1
    inner = [area.alpha + (area.beta - area.alpha) * k / steps for k in range(1, steps)]
    fractions = [area.alpha, *inner, area.beta]
    return [*fractions, 0.25, 0.75] if area.scale == "iqr" else fractions


def thresholds_of(levels: Levels, area: PartialArea, temperature: float, has_reference: Tensor) -> Thresholds:
    """Return the thresholds from the quantiles (C, L) at :func:`fractions_of`; any numbers without a reference."""
    levels = levels.where(has_reference)
    num_edges = levels.base.shape[1] - (2 if area.scale == "iqr" else 0)
    ones = torch.ones(has_reference.shape, dtype=levels.base.dtype, device=levels.base.device)
    edges = levels.take(slice(0, num_edges))
    if area.scale is None:
        return Thresholds(edges, ones, has_reference, has_reference)
    upper, lower = (num_edges, num_edges + 1) if area.scale == "iqr" else (0, num_edges - 1)
    scale = levels.take(upper).minus(levels.take(lower))[:, 0]
    # A NaN scale counts as usable: the loss is then NaN instead of being left out.
    usable = ~((scale <= SMALLEST_SCALE) | scale.isinf())
    if area.surrogate != "dro":
        scale = scale * temperature
    return Thresholds(edges, torch.where(usable, scale.to(ones), ones), has_reference & usable, has_reference)


def _in_band(pool: Pool, negative: Tensor, thresholds: Thresholds) -> Tensor:
    """Return the negatives between the edges of the band, both ends included, (C, M) bool."""
    at_least_beta, _ = thresholds.edges.take(slice(-1, None)).compare(pool.scores)
    _, at_most_alpha = thresholds.edges.take(0).compare(pool.scores)
    return negative & at_least_beta & at_most_alpha
