"""Smooth-AP pair by pair: the definition, in chunks of positives, and the reference of the faster ways."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .sigmoid_sums import chunk_size


def smooth_ap_direct(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    positives: tuple[Tensor, Tensor],
    share: Tensor,
    temperature: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) and its gradient (C, M), empty unless asked for.

    With u_i the share of positive i: dloss/ds_ij = u_i r_i / (r_i + n_i)^2 for a negative j, and
    -u_i n_i / (r_i + n_i)^2 for a positive j; ds_ij/dx_j = s (1 - s) / tau = -ds_ij/dx_i.

    Args:
        scores: (C, M).
        positive: (C, M) bool.
        member: (C, M) bool, None for all True.
        positives: class and row indices of the positives, (P,) each.
        share: (P,) float64, the weight of each positive in the mean of its class.
        temperature: > 0.
        with_grad: compute the gradient too.
    """
    loss = scores.new_zeros(scores.shape[0])
    gradient = torch.zeros_like(scores) if with_grad else scores.new_empty(0)
    is_single = scores.shape[0] == 1  # then the rows of every pair are the same, and broadcast
    step = chunk_size(scores, scores.shape[1])
    for first in range(0, share.shape[0], step):
        c, row = positives[0][first : first + step], positives[1][first : first + step]
        keys, is_positive = (scores, positive) if is_single else (scores[c], positive[c])  # [p, M] or [1, M]
        difference = (keys - scores[c, row][:, None]).div_(temperature)  # [p, M]
        if member is not None:
            difference.masked_fill_(~member if is_single else ~member[c], -math.inf)
        difference.scatter_(1, row[:, None], -math.inf)  # j = i does not count
        sigmoid = torch.sigmoid(difference)
        among_positives = sigmoid * is_positive
        r = 1 + among_positives.sum(dim=1)  # [p]
        n = (sigmoid - among_positives).sum(dim=1)
        weight = share[first : first + step].to(scores.dtype)
        loss.index_add_(0, c, weight * n / (r + n))
        if with_grad:
            slope = sigmoid.mul_(difference.neg_().sigmoid_())
            factor = weight / (r + n) ** 2 / temperature
            slope *= torch.where(is_positive, (-n * factor)[:, None], (r * factor)[:, None])
            gradient.index_add_(0, c, slope)
            gradient.index_put_((c, row), -slope.sum(dim=1), accumulate=True)
    return loss, gradient
