"""The surrogate ``"dro"`` of recall and of partial AUC: a soft maximum over the negatives.

Per class it takes three steps, which one kernel makes, :mod:`~fullrank.kernels.entropic_risk`:

1. lambda: the soft maximum whose effective number of negatives is nearest to the budget, for the mean positive.
2. The loss of each positive: the soft maximum of its logistic losses against the negatives.
3. Their mean, and its gradient for every positive and every negative.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.entropic_risk import entropic_risk
from .pool import PerClass, Pool


class SoftMaximum(NamedTuple):
    """The loss of each class, and what is reported next to it."""

    per_class: PerClass
    tilts: Tensor  # [C] float64, lambda: 1 where not valid
    variance: Tensor  # [C] float64, of the losses of the positives; empty if not asked for


def soft_maximum(
    pool: Pool,
    budget: float,
    iid: Tensor | None = None,
    live: Tensor | None = None,
    scales: Tensor | None = None,
    tilt: float | None = None,
    with_variance: bool = False,
) -> SoftMaximum:
    """Return for each class the mean over its positives of the soft maximum over its negatives.

    A class is valid if it has a positive of positive weight and a negative.

    Args:
        budget: the share of the negatives that counts.
        iid: (M,) bool, the negatives that count; None for all.
        live: (M,) bool, the positives of the mean; None for all.
        scales: (C,) float64 > 0, what differences of scores are divided by; None for 1.
        tilt: lambda instead of a budget.
        with_variance: whether to compute the variance.
    """
    scores = pool.scores.contiguous()
    with_grad = torch.is_grad_enabled() and scores.requires_grad
    rows = scores, pool.positive, pool.member, iid, live, pool.weight, pool.key_weight, scales
    loss, _, valid, tilts, variance = entropic_risk(*rows, budget, tilt, pool.num_positive, with_grad, with_variance)
    return SoftMaximum(PerClass(loss, valid), tilts, variance)
