"""Thresholds with a gradient that balances the gradient of the positives compared with them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.quantiles import Levels
from ...kernels.threshold_gradient import are_carried, carry_gradient
from .pool import Pool


def threshold_with_gradient(
    levels: Levels, pool: Pool, reference: Tensor | None, positives: Tensor, taus: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return ``levels.movable`` (C, L) with a gradient, and the positives (C, M) that may have one; None for all.

    The levels are quantiles of the rows in ``reference`` (C, M), None for all, and are compared with the ``positives``
    (C, M). The live rows of the reference carry the gradient of a threshold. Only live positives may have a gradient,
    see :func:`detach_outside`: the threshold then carries the sum of their slopes, and the gradient of the live rows
    adds up to 0. In a class without a live reference row of finite score nothing can carry the gradient of the
    threshold. There no positive has one either, because otherwise all scores would rise together.
    """
    if pool.live is None:
        # A finite level is at or between scores of its reference, all of which are live.
        return carry_gradient(levels, pool.scores, reference, taus, levels_are_rows=True), None
    carriers = pool.live.expand_as(pool.positive) if reference is None else reference & pool.live
    point = carry_gradient(levels, pool.scores, carriers, taus, levels_are_rows=False)
    if not point.requires_grad:
        return point, None
    # Nothing carries an infinite level either, but there no positive of finite score has a slope.
    carried = are_carried(levels, pool.scores.detach(), carriers)
    return point, positives & pool.live & carried.any(dim=1, keepdim=True)


def detach_outside(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return ``values``, detached where ``mask`` is False; None for all True."""
    if mask is None:
        return values
    # In the memory layout of the values, which decides the order in which they are added up: the last bit of the loss.
    return torch.empty_like(values).copy_(torch.where(mask, values, values.detach()))
