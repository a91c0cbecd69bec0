"""Smooth-AP from soft ranks, value and gradient in one pass over the pairs of positives and pool rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .sigmoid_sums import chunk_size


def smooth_ap_sums(scores: Tensor, positive: Tensor, member: Tensor, weight: Tensor, temperature: float) -> Tensor:
    r"""Return (C,) the weighted mean over positives i of ``1 - rank_pos_i / rank_i``.

    With :math:`s_{ij} = \sigma((x_j - x_i)/\tau)`, :math:`r_i = 1 + \sum_{j \in P, j \ne i} s_{ij}` the soft rank among
    positives and :math:`n_i = \sum_{j \in N} s_{ij}` the negatives above it,

    .. math:: 1 - \frac{r_i}{r_i + n_i} = \frac{n_i}{r_i + n_i}

    which loses no digits when a positive is ranked almost perfectly.

    Args:
        scores: (C, M) float32 or float64.
        positive: (C, M) bool, a subset of ``member``.
        member: (C, M) bool: the rows that take part.
        weight: (C, M), the share of each positive in the mean (they sum to 1 in a valid class); 0 elsewhere.
        temperature: > 0.

    O(positives x M) time, O(C M) memory. The gradient is linear in the incoming one, so it is computed with the value.
    """
    with_grad = scores.requires_grad and torch.is_grad_enabled()
    loss, _ = _smooth_ap(scores, positive, member, weight, float(temperature), with_grad)
    return loss


@torch.library.custom_op("fullrank::smooth_ap", mutates_args=())
def _smooth_ap(
    scores: Tensor, positive: Tensor, member: Tensor, weight: Tensor, temperature: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) and its gradient with respect to the scores (C, M).

    With u_i the weight of positive i: dloss/ds_ij = u_i r_i / (r_i + n_i)^2 for a negative j, and
    -u_i n_i / (r_i + n_i)^2 for a positive j; ds_ij/dx_j = s (1 - s) / tau = -ds_ij/dx_i.
    """
    loss = scores.new_zeros(scores.shape[0])
    gradient = torch.zeros_like(scores) if with_grad else scores.new_empty(0)
    class_of, row_of = (positive & (weight > 0)).nonzero(as_tuple=True)  # [P] over all classes
    outsiders = None if bool(member.all()) else ~member
    step = chunk_size(scores, scores.shape[1])
    for first in range(0, class_of.shape[0], step):
        c, row = class_of[first : first + step], row_of[first : first + step]
        share = weight[c, row]  # [p]
        difference = (scores[c] - scores[c, row][:, None]).div_(temperature)  # [p, M]
        if outsiders is not None:
            difference.masked_fill_(outsiders[c], -math.inf)
        difference.scatter_(1, row[:, None], -math.inf)  # j = i does not count
        sigmoid = torch.sigmoid(difference)
        is_positive = positive[c]  # [p, M]
        among_positives = sigmoid * is_positive
        r = 1 + among_positives.sum(dim=1)  # [p]
        n = (sigmoid - among_positives).sum(dim=1)
        loss.index_add_(0, c, share * n / (r + n))
        if with_grad:
            slope = sigmoid.mul_(torch.sigmoid(difference.neg_()))
            factor = share / (r + n) ** 2 / temperature
            slope *= torch.where(is_positive, (-n * factor)[:, None], (r * factor)[:, None])
            gradient.index_add_(0, c, slope)
            gradient.index_put_((c, row), -slope.sum(dim=1), accumulate=True)
    return loss, gradient


@_smooth_ap.register_fake
def _(
    scores: Tensor, positive: Tensor, member: Tensor, weight: Tensor, temperature: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape[0]), torch.empty_like(scores) if with_grad else scores.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad_loss: Tensor, grad_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return grad_loss[:, None] * gradient, None, None, None, None, None


_smooth_ap.register_autograd(_backward, setup_context=_setup_context)
