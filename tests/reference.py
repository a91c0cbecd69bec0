"""Slow definitions of the losses in float64, one loop over classes and one over positives. Nothing of the package here.

Every function takes the live rows as :class:`Rows` and, for the pooled losses, past rows that carry no gradient. They
are torch code, so ``torch.autograd.grad`` of a reference is the reference of the gradient:

    result = reference.smooth_ap(Rows(logits, targets), past, temperature=0.1)
    result.loss, result.per_class, result.valid, result.stats

``past`` is what :func:`enqueue` returns for the rows of earlier steps. Over several ranks the live rows are simply the
concatenation of theirs, in rank order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Rows as they are given to a loss: (N, C), (N,) or multi-hot (N, C), (N,) bool, (N,)."""

    logits: Tensor
    targets: Tensor
    iid_mask: Tensor | None = None
    sample_weight: Tensor | None = None


class Result(NamedTuple):
    """``loss`` with the loss of each class (NaN where not valid), validity, and the diagnostics of partial AUC."""

    loss: Tensor
    per_class: Tensor
    valid: Tensor
    stats: dict[str, Tensor]


class Row(NamedTuple):
    """One row of one class's binary problem."""

    score: Tensor
    positive: bool
    iid: bool
    live: bool
    weight: float
    mass: float = 1.0  # how many rows it counts as where rows are compared, and in rates and quantiles


Problem = list[Row]


def cat(*parts: Rows) -> Rows:
    """Return the rows of all parts; what some parts have and others have not is True or 1 for the others."""
    columns = []
    for name, default in (("iid_mask", torch.bool), ("sample_weight", torch.float64)):
        values = [getattr(part, name) for part in parts]
        if all(value is None for value in values):
            columns.append(None)
            continue
        ones = [torch.ones(len(part.logits), dtype=default) for part in parts]
        columns.append(torch.cat([one if value is None else value.to(default) for one, value in zip(ones, values)]))
    return Rows(torch.cat([part.logits for part in parts]), torch.cat([part.targets for part in parts]), *columns)


def take(rows: Rows, index: Tensor) -> Rows:
    """Return the rows of ``index`` (positions or a bool mask)."""
    return Rows(*(None if value is None else value[index] for value in rows))


def enqueue(
    past: Rows | None,
    live: Rows,
    capacity: int,
    *,
    ignore_index: int = -100,
    queue_keep: str = "all",
) -> Rows | None:
    """Return the last ``capacity`` rows that may enter a queue, oldest first; None when there are none."""
    multi_hot, binary = live.targets.ndim == 2, live.logits.shape[1] == 1
    kept = []
    for n in range(len(live.logits)):
        codes = live.targets[n].reshape(-1).tolist()
        finite = all(math.isfinite(score) for score in live.logits[n].tolist())
        enters = finite and any(code != ignore_index for code in codes)
        if queue_keep == "negatives" and (multi_hot or binary):
            enters = enters and any(code == 0 for code in codes)
        if enters:
            kept.append(n)
    fresh = take(Rows(live.logits.detach(), *live[1:]), torch.tensor(kept, dtype=torch.int64))
    rows = fresh if past is None else cat(past, fresh)
    first = max(0, len(rows.logits) - capacity)
    return take(rows, torch.arange(first, len(rows.logits))) if len(rows.logits) > first else None


def problems(
    live: Rows, past: Rows | None = None, *, ignore_index: int = -100, queue_keep: str = "all"
) -> list[Problem]:
    """Return class c against the rest for every class: its rows, without those that take no part in it."""
    num_classes = live.logits.shape[1]
    result: list[Problem] = [[] for _ in range(num_classes)]
    for rows, is_live in ((live, True), (past, False)):
        if rows is None:
            continue
        scores = [row.unbind() for row in rows.logits.double()]
        for n in range(len(rows.logits)):
            for c in range(num_classes):
                code = int(rows.targets[n, c] if rows.targets.ndim == 2 else rows.targets[n])
                if code == ignore_index:
                    continue
                indicator = rows.targets.ndim == 2 or num_classes == 1
                positive = code != 0 if indicator else code == c
                if positive and not is_live and queue_keep == "negatives":
                    continue  # a queued positive is left out of its own class
                iid = True if rows.iid_mask is None else bool(rows.iid_mask[n])
                weight = 1.0 if rows.sample_weight is None else float(rows.sample_weight[n])
                score = scores[n][c] if is_live else scores[n][c].detach()
                result[c].append(Row(score, positive, iid, is_live, weight))
    return result


def _reduce(losses: list[Tensor | None], anchor: Tensor, reduction: str, stats: list[dict[str, float]]) -> Result:
    """Reduce over the valid classes; None is the loss of a class that is not valid."""
    kept = [loss for loss in losses if loss is not None]
    per_class = torch.stack([torch.tensor(math.nan).double() if loss is None else loss for loss in losses])
    total = sum(kept, anchor.double().nan_to_num(0.0, 0.0, 0.0).sum() * 0)
    if reduction == "none":
        loss = per_class
    else:
        loss = total / max(1, len(kept)) if reduction == "mean" else total
    valid = torch.tensor([loss is not None for loss in losses])
    return Result(
        loss,
        per_class,
        valid,
        {name: torch.tensor([each[name] for each in stats], dtype=torch.float64) for name in stats[0]},
    )


def _pooled(
    live: Rows,
    past: Rows | None,
    formula: Callable[[Problem], tuple[Tensor | None, dict[str, float]]],
    reduction: str,
    ignore_index: int,
    queue_keep: str,
    weighting: str = "positives",
) -> Result:
    """With ``weighting="rows"`` rows of weight 0 are none, and the others have their weight as ``mass``."""
    classes = problems(live, past, ignore_index=ignore_index, queue_keep=queue_keep)
    if weighting == "rows":
        classes = [[row._replace(mass=row.weight) for row in problem if row.weight] for problem in classes]
    outcomes = [formula(problem) for problem in classes]
    return _reduce([loss for loss, _ in outcomes], live.logits, reduction, [stats for _, stats in outcomes])


def _column(rows: list[Row]) -> Tensor:
    return torch.stack([row.score for row in rows]) if rows else torch.zeros(0).double()


def _weighted_mean(values: list[Tensor], rows: list[Row]) -> Tensor:
    mass = sum(row.weight for row in rows)
    return sum(value * row.weight for value, row in zip(values, rows)) / mass


# --- average precision -----------------------------------------------------------------------------------------------


def smooth_ap(
    live: Rows,
    past: Rows | None = None,
    *,
    temperature: float | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    queue_keep: str = "all",
    weighting: str = "rows",
) -> Result:
    """1 - weighted mean over P of (w_i + sum over j in P, j != i, of w_j s((x_j - x_i) / t)) / (the same over all j).

    Rows of weight 0 are none. With ``weighting="positives"`` the mean alone has weights.
    """
    classes = problems(live, past, ignore_index=ignore_index, queue_keep=queue_keep)
    if weighting == "rows":
        classes = [[row for row in problem if row.weight] for problem in classes]
    if temperature is None:
        temperature = 0.1 * spread(classes)

    losses: list[Tensor | None] = []
    for problem in classes:
        positives = [row for row in problem if row.positive]
        if sum(row.weight for row in positives) == 0 or len(positives) == len(problem):
            losses.append(None)
            continue
        scores, weights = _column(problem), torch.tensor([row.weight for row in problem], dtype=torch.float64)
        if weighting == "positives":
            weights = torch.ones_like(weights)
        is_positive = torch.tensor([row.positive for row in problem])
        precisions = []
        for i, row in enumerate(problem):
            if row.positive:
                above = weights * torch.sigmoid((scores - scores[i]) / temperature)  # [rows]
                above = torch.where(torch.arange(len(problem)) == i, weights, above)  # a row counts itself as above
                precisions.append(above[is_positive].sum() / above.sum())
        losses.append(1 - _weighted_mean(precisions, positives))
    return _reduce(losses, live.logits, reduction, [{}])


def smooth_ap_of_queries(
    live: Rows,
    indexes: Tensor,
    *,
    temperature: float | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Result:
    """``smooth_ap`` of the rows of each distinct index by themselves; ``per_class`` is per query, in sorted order."""
    if temperature is None:
        temperature = 0.1 * spread(problems(live, ignore_index=ignore_index))
    of_rows = partial(smooth_ap, temperature=temperature, ignore_index=ignore_index)
    return _of_queries(of_rows, live, indexes, reduction)


def pauc_of_queries(
    live: Rows, indexes: Tensor, *, reduction: str = "mean", ignore_index: int = -100, **band: float | str
) -> Result:
    """``pauc_at_budget`` of the rows of each distinct index by themselves, with the scale of all rows."""
    if band.get("surrogate", "dro") != "dro" or band.get("tau_scale"):
        band["tau"] = pauc_at_budget(live, ignore_index=ignore_index, **band).stats["tau_eff"].item()
    return _of_queries(partial(pauc_at_budget, ignore_index=ignore_index, **band), live, indexes, reduction)


def _of_queries(of_rows: Callable[[Rows], Result], live: Rows, indexes: Tensor, reduction: str) -> Result:
    losses: list[Tensor | None] = []
    for index in sorted(set(indexes.tolist())):
        rows = take(live, torch.tensor([n for n, other in enumerate(indexes.tolist()) if other == index]))
        alone = of_rows(rows)
        losses.append(alone.loss if bool(alone.valid[0]) else None)
    return _reduce(losses, live.logits, reduction, [{}])


def retrieval_smooth_ap(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    reduction: str = "mean",
    ignore_index: int = -100,
    among: tuple[Tensor, Tensor] | None = None,
) -> Result:
    """``smooth_ap`` of every row against all others, or ``among`` others, by their cosine; ``per_class`` is per row."""
    z, count = embeddings.double(), len(embeddings)
    ranked, names = (z, labels) if among is None else among
    losses: list[Tensor | None] = []
    for q in range(count):
        others = [j for j in range(len(ranked)) if (among or j != q) and int(names[j]) != ignore_index]
        if int(labels[q]) == ignore_index or not others:
            losses.append(None)
            continue
        cosines = (ranked[others] * z[q]).sum(dim=1) / (ranked[others].norm(dim=1) * z[q].norm())
        targets = (names[others] == labels[q]).long()
        alone = smooth_ap(Rows(cosines[:, None], targets), temperature=temperature)
        losses.append(alone.loss if bool(alone.valid[0]) else None)
    return _reduce(losses, z, reduction, [{}])


# --- the spread of the scores -----------------------------------------------------------------------------------------


def spread(classes: list[Problem]) -> float:
    """Return the interquartile range over 1.349, the mean over the classes that have one; of all rows, not of a sample.

    The standard deviation without 1 % of the scores at each end, at least one, takes its place in a class of which the
    range is less than a hundredth of it. Without a spread it is 1.
    """
    columns = [sorted(x for row in problem if math.isfinite(x := row.score.item())) for problem in classes]
    widths = []
    for column in columns:
        n = len(column)
        if n == 0:
            continue
        quartiles = (column[n - 1 - (n - 1) // 4] - column[(n - 1) // 4]) / 1.3489795003921634
        cut, deviation = max(1, n // 100), 0.0
        inner = column[cut : n - cut]
        if inner and inner[0] < inner[-1]:
            mean = math.fsum(inner) / len(inner)
            deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in inner) / len(inner))
        widths.append(quartiles if quartiles >= 0.01 * deviation else deviation)
    widths = [width for width in widths if width > 0]
    return math.fsum(widths) / len(widths) if widths else 1.0


def evenly_spaced(count: int, among: int) -> list[int]:
    """Return one number from each of ``count`` equal parts of range(among), by the multiples of the golden ratio."""
    places = ((k * 0.6180339887498949) % 1.0 for k in range(count))
    return [int((k + place) * (among / count)) for k, place in enumerate(places)]


# --- quantiles -------------------------------------------------------------------------------------------------------


def exact(number: float | Fraction) -> Fraction:
    """Return the decimal number that was written, 0.005 as 1/200 and not as the nearest binary fraction."""
    return number if isinstance(number, Fraction) else Fraction(repr(number))


def upper_quantile(values: list[float], q: float | Fraction, interpolation: str = "higher") -> float:
    """Return the (1 - q) quantile; its rank (1 - q)(n - 1) is an exact rational number here."""
    return sum(upper_level(values, q, interpolation))


def upper_level(
    values: list[float], q: float | Fraction, interpolation: str = "higher", masses: list[float] | None = None
) -> tuple[float, float]:
    """Return the (1 - q) quantile as one of the values and what is added to it.

    A value of mass m has the rank of all mass below it over that of all others, times n - 1: k - 1 for equal masses.
    """
    if masses is not None and len(set(masses)) > 1:
        return _weighted_level(values, q, interpolation, masses)
    ordered = sorted(values)
    rank = (1 - exact(q)) * (len(ordered) - 1)
    lower, upper = math.floor(rank), math.ceil(rank)
    if interpolation == "lower":
        return ordered[lower], 0.0
    if interpolation == "higher":
        return ordered[upper], 0.0
    if interpolation == "nearest":
        return ordered[round(rank)], 0.0  # half to even
    low, high = ordered[lower], ordered[upper]
    if interpolation == "midpoint":
        return (low, 0.0) if low == high else (low, (high - low) / 2)
    assert interpolation == "linear"
    return (low, 0.0) if low == high else (low, (high - low) * float(rank - lower))


@lru_cache(maxsize=8)
def _places(masses: tuple[float, ...]) -> list[Fraction]:
    """Return the mass below each value over that of all others, which several levels of the same rows ask for."""
    total, below, places = sum(map(Fraction, masses)), Fraction(0), []
    for mass in map(Fraction, masses):
        places.append(below / (total - mass))
        below += mass
    return places


def _weighted_level(
    values: list[float], q: float | Fraction, interpolation: str, masses: list[float]
) -> tuple[float, float]:
    ordered = sorted(zip(values, masses), key=lambda pair: (pair[0], -pair[1]))  # of equal values the lightest is last
    places = _places(tuple(mass for _, mass in ordered))
    place = 1 - exact(q)
    lower = max(k for k, each in enumerate(places) if each <= place)
    upper = min(k for k, each in enumerate(places) if each >= place)
    share = (place - places[lower]) / (places[upper] - places[lower]) if upper != lower else Fraction(0)
    low, high = ordered[lower][0], ordered[upper][0]
    if interpolation in ("lower", "higher"):
        return (low if interpolation == "lower" else high), 0.0
    if interpolation == "nearest":
        is_upper = upper % 2 == 0 if share == Fraction(1, 2) else share > Fraction(1, 2)
        return (high if is_upper else low), 0.0
    share = Fraction(1, 2) if interpolation == "midpoint" else share
    return (low, 0.0) if low == high or upper == lower else (low, (high - low) * float(share))


# --- thresholds ------------------------------------------------------------------------------------------------------


def log_slope(distance: float, tau: float) -> float:
    """Return log s'(distance / tau), which exists where s' underflows."""
    z = abs(distance) / tau
    return -z - 2 * math.log1p(math.exp(-z))


def carriers(reference: list[Row]) -> list[Row]:
    """Return the rows that can carry the gradient of a threshold: the live and finite ones of its reference rows."""
    return [row for row in reference if row.live and math.isfinite(row.score.item())]


def shares_of(distances: list[float], masses: list[float], tau: float) -> list[float]:
    """Return m_j k_j / sum m k with k_j = s'(d_j / tau), the largest term being 1 before the division."""
    logs = [log_slope(d, tau) + math.log(mass) if mass > 0 else -math.inf for d, mass in zip(distances, masses)]
    terms = [0.0 if log == -math.inf else math.exp(log - max(logs)) for log in logs]
    return [term / (sum(terms) or 1.0) for term in terms]


def carry(base: float, offset: float, reference: list[Row], positives: list[Row], tau: float) -> Tensor:
    """Return the threshold base + offset with d threshold / d x_j = rho k_j / sum k over the live reference rows.

    rho is the part of the live rows in the slope of the positives. An infinite threshold has no gradient.
    """
    threshold = torch.tensor(base + offset, dtype=torch.float64)
    rows = carriers(reference)
    if not math.isfinite(base) or not rows:
        return threshold
    slopes = shares_of([i.score.item() - base - offset for i in positives], [i.weight for i in positives], tau)
    rho = sum(slope for slope, i in zip(slopes, positives) if i.live)
    shares = shares_of([j.score.item() - base - offset for j in rows], [j.mass for j in rows], tau)
    scores = _column(rows)
    return threshold + rho * (torch.tensor(shares, dtype=torch.float64) * (scores - scores.detach())).sum()


# --- recall ----------------------------------------------------------------------------------------------------------


def recall_at_quantile(
    live: Rows,
    past: Rows | None = None,
    *,
    quantile: float = 0.005,
    temperature: float | None = None,
    quantile_interpolation: str = "higher",
    reduction: str = "mean",
    ignore_index: int = -100,
    queue_keep: str = "all",
    threshold_gradient: bool = True,
    surrogate: str | None = None,
    weighting: str = "rows",
) -> Result:
    """1 - mean over P of s((x_i - threshold) / t), the threshold being the (1 - q) quantile of all scores.

    With "dro", or None and nothing that only the former uses, the mean over P of a soft maximum over the negatives,
    whose perplexity is q times their number.
    """
    if surrogate is None:
        is_smooth = temperature is not None or quantile_interpolation != "higher" or not threshold_gradient
        surrogate = "sigmoid" if is_smooth else "dro"
    if temperature is None:
        classes = problems(live, past, ignore_index=ignore_index, queue_keep=queue_keep)
        kept = [[row for row in problem if row.weight or weighting == "positives"] for problem in classes]
        temperature = 0.3 * spread(kept)

    def formula(problem: Problem) -> tuple[Tensor | None, dict[str, float]]:
        positives = [row for row in problem if row.positive]
        if sum(row.weight for row in positives) == 0:
            return None, {}
        if surrogate == "dro":
            negatives = [row for row in problem if not row.positive]
            if not negatives:
                return None, {}
            tilt = tilt_of_budget(positives, negatives, 1.0, quantile)
            return _weighted_mean(_soft_maxima(positives, negatives, 1.0, tilt), positives), {}
        level = upper_level(
            [row.score.item() for row in problem], quantile, quantile_interpolation, [row.mass for row in problem]
        )
        threshold = carry(*level, problem, positives, temperature) if threshold_gradient else sum(level)
        chances = [torch.sigmoid((i.score - threshold) / temperature) for i in positives]
        if threshold_gradient and not carriers(problem):
            chances = [chance.detach() for chance in chances]
        return 1 - _weighted_mean(chances, positives), {}

    return _pooled(live, past, formula, reduction, ignore_index, queue_keep, weighting)


# --- partial AUC -----------------------------------------------------------------------------------------------------

NO_STATS = {"t_alpha": math.nan, "t_beta": math.nan, "tau_eff": math.nan, "pauc_var": math.nan}
NO_STATS |= {"band_neg_count": 0, "grad_pos_count": 0}


class Band(NamedTuple):
    """The arguments of partial AUC."""

    alpha: float = 0.0
    beta: float = 0.005
    surrogate: str = "dro"
    n_knots: int = 2
    tau_scale: str | None = None
    pos_numerator: str = "pool"
    budget_basis: str = "fpr"
    temperature: float = 0.1
    quantile_interpolation: str = "higher"
    dro_lambda: float | None = None
    threshold_gradient: bool = True
    tau: float | None = None  # the temperature itself, of all queries


def pauc_at_budget(
    live: Rows,
    past: Rows | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    queue_keep: str = "all",
    weighting: str = "rows",
    **band: float | str,
) -> Result:
    """The mean over positives of a soft maximum over negatives, or of their mean chance not to exceed the band."""
    settings = Band(**band)
    return _pooled(live, past, lambda problem: _pauc(problem, settings), reduction, ignore_index, queue_keep, weighting)


def _pauc(problem: Problem, band: Band) -> tuple[Tensor | None, dict[str, float]]:
    negatives = [row for row in problem if not row.positive]
    numerator = [row for row in problem if row.positive and (row.live or band.pos_numerator == "pool")]
    reference_rows = [row for row in problem if row.iid and (band.budget_basis == "population" or not row.positive)]
    reference = [row.score.item() for row in reference_rows]
    if sum(row.weight for row in numerator) == 0 or not negatives or not reference:
        return None, dict(NO_STATS)

    masses = [row.mass for row in reference_rows]

    def level(q: float | Fraction) -> float:
        return sum(upper_level(reference, q, band.quantile_interpolation, masses))

    t_alpha, t_beta = level(band.alpha), level(band.beta)
    by_default = 1.0 if band.surrogate == "dro" else level(0.25) - level(0.75)
    scales = {None: by_default, "iqr": level(0.25) - level(0.75), "band": t_alpha - t_beta}
    scale = scales[band.tau_scale] if band.tau is None else band.tau
    tau = scale if band.surrogate == "dro" or band.tau is not None else band.temperature * scale
    rivals = [j for j in negatives if j.iid]
    in_band = [j for j in negatives if t_beta <= j.score.item() <= t_alpha]
    if scale <= 1e-12 or scale == math.inf or (band.surrogate == "pairwise" and not in_band):
        return None, dict(NO_STATS)
    if band.surrogate == "dro" and not rivals:
        return None, dict(NO_STATS)
    if band.surrogate == "dro":
        tilt = tilt_of_budget(numerator, rivals, tau, band.beta) if band.dro_lambda is None else band.dro_lambda
        chances = _soft_maxima(numerator, rivals, tau, tilt)
    elif band.surrogate == "pairwise":
        parts = torch.tensor([j.mass for j in in_band], dtype=torch.float64) / sum(j.mass for j in in_band)
        chances = [torch.sigmoid((i.score - _column(in_band)) / tau) @ parts for i in numerator]
    else:
        levels = [upper_level(reference, rate, band.quantile_interpolation, masses) for rate in _rates(band)]
        knots: list[Tensor | float] = [sum(each) for each in levels]
        if band.threshold_gradient:
            knots = [carry(*each, reference_rows, numerator, tau) for each in levels]
        chances = [_soft_tpr(i, knots, tau) for i in numerator]
        if band.threshold_gradient and not carriers(reference_rows):
            chances = [chance.detach() for chance in chances]
    values, masses = [chance.item() for chance in chances], [row.weight for row in numerator]
    mean = sum(map(operator.mul, masses, values)) / sum(masses)
    stats = {
        "t_alpha": t_alpha,
        "t_beta": t_beta,
        "tau_eff": tau,
        "pauc_var": sum(mass * (value - mean) ** 2 for mass, value in zip(masses, values)) / sum(masses),
        "band_neg_count": sum(j.iid for j in in_band),
        "grad_pos_count": sum(row.positive and row.live for row in problem),
    }
    mean_chance = _weighted_mean(chances, numerator)
    return mean_chance if band.surrogate == "dro" else 1 - mean_chance, stats


def tilt_of_budget(numerator: list[Row], negatives: list[Row], scale: float, budget: float) -> float:
    """Return the 1/m with which the perplexity of the weights for the mean positive is nearest to the budget."""
    finite = [j.score.item() for j in negatives if math.isfinite(j.score.item())]
    if not finite:
        return 1.0
    total = sum(i.weight for i in numerator)
    moved = [min(max(i.score.item(), min(finite)), max(finite)) * i.weight / total for i in numerator]
    differences = [(min(j.score.item(), max(finite)) - sum(moved)) / scale for j in negatives]
    losses = [max(d, 0.0) + math.log1p(math.exp(-abs(d))) for d in differences]

    def distance(m: int) -> float:
        highest = max(losses)
        weights = [j.mass * math.exp(m * (loss - highest)) for j, loss in zip(negatives, losses)]
        total = sum(weights)
        shares = [weight / total for weight in weights]
        # Of a negative of mass k as k negatives, each with the k-th part of its share.
        entropy = -sum(share * math.log(share / j.mass) for j, share in zip(negatives, shares) if share > 0)
        return entropy - math.log(budget * sum(j.mass for j in negatives))

    multiples = range(1, 13)
    above = [m for m in multiples if distance(m) > 1e-9]
    ends = above[-1:] + [m for m in multiples if m not in above][:1]
    return 1 / min(ends, key=lambda m: abs(distance(m)))


def _soft_maxima(positives: list[Row], negatives: list[Row], scale: float, tilt: float) -> list[Tensor]:
    """Return, for each i, lambda log mean over the negatives j of exp(log(1 + exp((x_j - x_i) / s)) / lambda)."""
    masses = torch.tensor([j.mass for j in negatives], dtype=torch.float64)
    losses = -torch.nn.functional.logsigmoid((_column(positives)[:, None] - _column(negatives)) / scale)
    return [*(tilt * torch.logsumexp(losses / tilt + (masses / masses.sum()).log(), dim=1))]


def _rates(band: Band) -> list[Fraction]:
    alpha, width = exact(band.alpha), exact(band.beta) - exact(band.alpha)
    return [alpha + width * k / (band.n_knots - 1) for k in range(band.n_knots)]


def _soft_tpr(i: Row, knots: list[Tensor | float], tau: float) -> Tensor:
    """Return the trapezoid rule over equally spaced rates of s((x_i - threshold of the rate) / tau), over the width."""
    heights = [torch.sigmoid((i.score - knot) / tau) for knot in knots]
    steps = len(knots) - 1
    return sum((heights[k] + heights[k + 1]) / 2 for k in range(steps)) / steps


# --- focal -----------------------------------------------------------------------------------------------------------


def sigmoid_focal(
    inputs: Tensor,
    targets: Tensor,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    reduction: str = "mean",
    sample_weight: Tensor | None = None,
) -> Tensor:
    """alpha_t (1 - p_t)^gamma CE(x, y) for every element; ``sample_weight`` has the shape of ``inputs``."""
    values, mass = [], 0.0
    weights = torch.ones_like(inputs) if sample_weight is None else sample_weight
    for x, y, weight in zip(inputs.double().reshape(-1), targets.double().reshape(-1), weights.reshape(-1).tolist()):
        p = torch.sigmoid(x)
        p_t = p * y + (1 - p) * (1 - y)
        cross_entropy = -(y * p.log() + (1 - y) * (1 - p).log())
        alpha_t = 1.0 if alpha < 0 else alpha * y + (1 - alpha) * (1 - y)
        values.append(weight * alpha_t * (1 - p_t) ** gamma * cross_entropy)
        mass += weight * float(alpha_t) if reduction == "mean_weighted" else weight
    return _reduce_elements(values, inputs.shape, mass, inputs, reduction)


def softmax_focal(
    inputs: Tensor,
    targets: Tensor,
    *,
    alpha: list[float] | None = None,
    gamma: float = 2.0,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    background_class: int = 0,
    sample_weight: Tensor | None = None,
) -> Tensor:
    """alpha_y (1 - p_y)^gamma CE(x, smoothed y) for every element of (N, *); p_y is that of the target itself."""
    rows = inputs.double().movedim(1, -1).reshape(-1, inputs.shape[1])
    weights = torch.ones(targets.shape) if sample_weight is None else sample_weight
    values, mass = [], 0.0
    for x, y, weight in zip(rows, targets.reshape(-1).tolist(), weights.reshape(-1).tolist()):
        if y == ignore_index:
            values.append(torch.zeros(()).double())
            continue
        log_p = x - torch.logsumexp(x, dim=0)
        smooth = [label_smoothing / len(x) + (1 - label_smoothing) * (c == y) for c in range(len(x))]
        cross_entropy = -sum(share * log_p[c] for c, share in enumerate(smooth))
        alpha_y = 1.0 if alpha is None else float(alpha[y])
        values.append(weight * alpha_y * (1 - log_p[y].exp()) ** gamma * cross_entropy)
        if reduction == "mean_weighted":
            mass += weight * alpha_y
        elif reduction != "mean_positive" or y != background_class:
            mass += weight
    return _reduce_elements(values, targets.shape, mass, inputs, reduction)


def _reduce_elements(values: list[Tensor], shape: torch.Size, mass: float, inputs: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return torch.stack(values).reshape(shape)
    total = sum(values, inputs.double().sum() * 0)
    return total if reduction == "sum" else total / (mass or 1.0)


# --- sums of sigmoids ------------------------------------------------------------------------------------------------


def sigmoid_sums(queries: Tensor, keys: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """The one line that specifies it, for (Q,), (K,), (K, n) and with a leading dimension of classes."""
    return torch.sigmoid((keys.unsqueeze(-2) - queries.unsqueeze(-1)) / temperature) @ weights
