"""The surrogate ``"dro"`` of recall and of partial AUC: for each positive, a soft maximum over the negatives.

One kernel, :mod:`~fullrank.kernels.entropic_risk`, finds how hard it is, the loss of each positive, and the gradient.
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

    A class is valid if it has a positive of positive weight and a negative. ``iid`` (M,) are the negatives and ``live``
    (M,) the positives that count, None for all; differences of scores are divided by ``scales`` (C,) float64.
    ``tilt`` is a lambda instead of the ``budget``.
    """
    scores = pool.scores.contiguous()
    if scores.shape[1] == 0:
        zero, one = scores.sum(dim=1, dtype=torch.float64), scores.new_ones(len(scores), dtype=torch.float64)
        return SoftMaximum(PerClass(zero, one == 0), one, zero.detach())
    with_grad = torch.is_grad_enabled() and scores.requires_grad
    rows = scores, pool.positive, pool.member, iid, live, pool.weight, pool.key_weight, scales
    loss, _, valid, tilts, variance = entropic_risk(*rows, budget, tilt, pool.num_positive, with_grad, with_variance)
    return SoftMaximum(PerClass(loss, valid), tilts, variance)
