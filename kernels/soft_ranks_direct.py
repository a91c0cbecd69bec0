"""Smooth-AP pair by pair: the definition, in chunks of positives, and the reference of the faster ways.

With u_i the share of positive i: dloss/ds_ij = u_i r_i / (r_i + n_i)^2 for a negative j, and -u_i n_i / (r_i + n_i)^2
for a positive j; ds_ij/dx_j = s (1 - s) / tau = -ds_ij/dx_i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .sigmoid_sums import chunk_size, sigmoid_and_slope


def smooth_ap_direct(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    positives: tuple[Tensor, Tensor],
    share: Tensor,
    temperature: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) float64 and its gradient (C, M), empty unless asked for.

    Args:
        scores: (C, M).
        positive: (C, M) bool.
        member: (C, M) bool, None for all True.
        positives: class and row indices of the positives, (P,) each.
        share: (P,) float64, the weight of each positive in the mean of its class.
        temperature: > 0.
        with_grad: compute the gradient too.
    """
    if scores.shape[0] == 1:
        return _of_one_class(scores, positive, member, positives[1], share, temperature, with_grad)
    loss = share.new_zeros(scores.shape[0])
    gradient = torch.zeros_like(scores) if with_grad else scores.new_empty(0)
    step = chunk_size(scores, scores.shape[1])
    for first in range(0, share.shape[0], step):
        c, row = positives[0][first : first + step], positives[1][first : first + step]
        difference = (scores.index_select(0, c) - scores[c, row][:, None]).div_(temperature)  # [p, M]
        if member is not None:
            difference.masked_fill_(~member.index_select(0, c), -math.inf)
        difference.scatter_(1, row[:, None], -math.inf)  # j = i does not count
        sigmoid, slope = sigmoid_and_slope(difference)
        is_positive = positive.index_select(0, c)
        among_positives = sigmoid * is_positive
        n = (sigmoid - among_positives).sum(dim=1)
        weight = share[first : first + step]
        missed, push, pull = _terms(among_positives.sum(dim=1), n, weight.to(n.dtype), temperature)
        loss.index_add_(0, c, weight * missed)
        if with_grad:
            slope *= torch.where(is_positive, push[:, None], pull[:, None])
            gradient.index_add_(0, c, slope)
            gradient.index_put_((c, row), -slope.sum(dim=1), accumulate=True)
    return loss, gradient


def _of_one_class(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    row: Tensor,
    share: Tensor,
    temperature: float,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Do the same for C = 1: all positives have the same keys, and with the positive ones first, masks are slices."""
    negative = ~positive[0] if member is None else member[0] & ~positive[0]
    order = torch.cat([row, negative.nonzero()[:, 0]])
    keys, weight, count = scores[0].index_select(0, order), share.to(scores.dtype), row.numel()
    loss, gradient = share.new_zeros(1), torch.zeros_like(keys)
    step = chunk_size(scores, keys.numel())
    for first in range(0, count, step):
        own = slice(first, min(first + step, count))
        difference = (keys - keys[own, None]).div_(temperature)  # [p, K]
        difference.diagonal(first).fill_(-math.inf)  # j = i does not count
        sigmoid, slope = sigmoid_and_slope(difference)
        sums = sigmoid[:, :count].sum(dim=1), sigmoid[:, count:].sum(dim=1)
        missed, push, pull = _terms(*sums, weight[own], temperature)
        loss += (share[own] * missed).sum()
        if with_grad:
            slope[:, :count].mul_(push[:, None])  # not *=, which would also copy the product onto itself
            slope[:, count:].mul_(pull[:, None])
            gradient += slope.sum(dim=0)
            gradient[own].sub_(slope.sum(dim=1))
    if not with_grad:
        return loss, scores.new_empty(0)
    return loss, torch.zeros_like(scores).index_copy_(1, order, gradient[None])


def _terms(above: Tensor, n: Tensor, weight: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return n / (r + n) of each positive (p,), and its factor on the slope of a positive and of a negative.

    Args:
        above: (p,) sum of the sigmoids over the other positives, r - 1.
        n: (p,) the same over the negatives.
        weight: (p,) share of the positive in the mean.
        temperature: > 0.
    """
    r = above + 1
    total = r + n
    factor = weight / total / (total * temperature)
    return n / total, (n * factor).neg_(), r * factor
