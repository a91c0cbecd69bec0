"""A band of false-positive rates, and the score thresholds that bound it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import check_choice, check_number, check_positive, expected
from ..kernels.quantiles import INTERPOLATIONS, Levels, upper_levels
from .pool import Pool

Surrogate = Literal["trapezoid", "pairwise", "dro"]
TauScale = Literal["iqr", "band"]
PosNumerator = Literal["pool", "live"]
BudgetBasis = Literal["fpr", "population"]

SMALLEST_SCALE = 1e-12  # at or below it the reference scores do not differ, and no temperature follows from them


class Band(NamedTuple):
    """The arguments that define the partial area; :func:`check_band` checks them."""

    alpha: float = 0.0
    beta: float = 0.005
    surrogate: Surrogate = "dro"
    n_knots: int = 2
    tau_scale: TauScale | None = None
    pos_numerator: PosNumerator = "pool"
    budget_basis: BudgetBasis = "fpr"
    quantile_interpolation: str = "higher"
    dro_lambda: float = 1.0
    threshold_gradient: bool = True


def check_band(band: Band) -> Band:
    """Return ``band`` unchanged, or raise TypeError or ValueError."""
    check_number("alpha", band.alpha)
    check_number("beta", band.beta)
    if not 0 <= band.alpha < band.beta <= 1:
        raise ValueError(expected("alpha, beta", "0 <= alpha < beta <= 1", (band.alpha, band.beta)))
    if isinstance(band.n_knots, bool) or not isinstance(band.n_knots, int) or band.n_knots < 2:
        raise ValueError(expected("n_knots", "an int >= 2", band.n_knots))
    check_choice("surrogate", band.surrogate, ("trapezoid", "pairwise", "dro"))
    check_positive("dro_lambda", band.dro_lambda)
    if band.surrogate == "dro" and band.alpha != 0:
        raise ValueError(
            expected("alpha", "0 with surrogate='dro'", band.alpha, "For a band use surrogate='pairwise'.")
        )
    if band.tau_scale is not None:
        check_choice("tau_scale", band.tau_scale, ("iqr", "band"))
    check_choice("pos_numerator", band.pos_numerator, ("pool", "live"))
    check_choice("budget_basis", band.budget_basis, ("fpr", "population"))
    check_choice("quantile_interpolation", band.quantile_interpolation, INTERPOLATIONS)
    return band


class Thresholds(NamedTuple):
    """The scores at the band edges and at the knots, and the temperature, all detached, and what they come from."""

    alpha: Levels  # [C, 1] the upper edge of the band
    beta: Levels  # [C, 1] the lower edge
    knots: Levels  # [C, K]
    tau: Tensor  # [C], 1 where the scale gives no temperature
    resolved: Tensor  # [C] bool: the class has reference rows, and their scale gives a temperature
    has_reference: Tensor  # [C] bool: the class has reference rows
    reference: Tensor  # [C, M] bool: the rows of which the thresholds are quantiles


def band_thresholds(pool: Pool, iid: Tensor, band: Band, temperature: float) -> Thresholds:
    """Return the band edges, the knots and the temperature, or the scale of "dro", of each class, all detached."""
    reference = iid if band.budget_basis == "population" else iid & ~pool.positive
    fractions = fractions_of(band)
    has_reference = reference.any(dim=1)
    levels = upper_levels(pool.scores, reference, fractions, band.quantile_interpolation)
    return thresholds_of(levels, band, temperature, has_reference, reference)


def fractions_of(band: Band) -> list[float]:
    """Return the fractions of the quantiles that :func:`thresholds_of` takes."""
    fractions = [band.alpha, band.beta]
    if band.surrogate == "trapezoid":
        # Equally spaced rates. The first and the last are the band edges to the last bit.
        steps = band.n_knots - 1
        inner = [band.alpha + (band.beta - band.alpha) * k / steps for k in range(1, steps)]
        fractions += [band.alpha, *inner, band.beta]
    return [*fractions, 0.25, 0.75] if _has_quartiles(band) else fractions


def _is_absolute(band: Band) -> bool:
    return band.surrogate == "dro" and band.tau_scale is None  # the scores are logits as they are


def _has_quartiles(band: Band) -> bool:
    return not _is_absolute(band) and band.tau_scale != "band"


def thresholds_of(
    levels: Levels, band: Band, temperature: float, has_reference: Tensor, reference: Tensor
) -> Thresholds:
    """Return the thresholds from the quantiles ``levels`` (C, L) at :func:`fractions_of`.

    Args:
        levels: (C, L); those of a class without a reference are arbitrary.
        band: the arguments.
        temperature: > 0.
        has_reference: (C,) bool.
        reference: (C, M) bool.
    """
    levels, count = levels.where(has_reference), levels.base.shape[1]
    ends = (count - 2, count - 1) if _has_quartiles(band) else (0, 1)
    scale = levels.take(ends[0]).minus(levels.take(ends[1]))[:, 0]
    if _is_absolute(band):
        scale = torch.ones_like(scale)
    # A NaN scale counts as usable: the loss is then NaN instead of being left out.
    usable = ~((scale <= SMALLEST_SCALE) | scale.isinf())
    if band.surrogate != "dro":
        scale = scale * temperature
    tau = torch.where(usable, scale, torch.ones_like(scale)).to(levels.base.dtype)
    knots = levels.take(slice(2, 2 + (band.n_knots if band.surrogate == "trapezoid" else 0)))
    return Thresholds(levels.take(0), levels.take(1), knots, tau, has_reference & usable, has_reference, reference)
