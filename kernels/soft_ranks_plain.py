"""Smooth-AP over all pairs of rows in plain operators of static shape, which a compiler can fuse.

Nothing here depends on a value, so nothing waits for the device, and ``torch.compile`` and CUDA graphs see every
operator. The price is time and memory for M^2 pairs instead of positives x M: for small pools on an accelerator, where
launches and waits take longer than the sums.

With u_i the share of positive i, r_i and n_i as in ``smooth_ap_sums``, s' the slope of the sigmoid, which is even, and
A_i = u_i r_i / (r_i + n_i)^2 / tau, B_i = u_i n_i / (r_i + n_i)^2 / tau, both 0 outside of the positives::

    dloss/dx_j = sum_i s'_ij A_i                                                        for a negative j
    dloss/dx_j = sum_i s'_ij (-B_i + B_j for a positive i, -A_j for a negative i)       for a positive j
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .costs import costs_of


def plain_is_faster(scores: Tensor) -> bool:
    """Return whether all pairs of ``scores`` (C, M) are few enough for the plain form on their device."""
    num_classes, num_rows = scores.shape
    return num_classes * num_rows * num_rows <= costs_of(scores.device).plain_pairs


def smooth_ap_plain(
    scores: Tensor, positive: Tensor, member: Tensor | None, weight: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return what ``smooth_ap_sums`` returns, differentiable in a graph of ``torch.compile``."""
    loss, valid = _PlainSmoothAP.apply(scores, positive, member, weight, temperature)
    return loss, valid


def loss_and_gradient(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    with_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (C,) float64, its gradient (C, M), empty unless ``with_grad``, and the validity (C,)."""
    dtype = scores.dtype
    negative = ~positive if member is None else member & ~positive
    if member is not None:
        scores = torch.where(member, scores, 0.0)
    mass = positive.double() if weight is None else torch.where(positive, weight.double(), 0.0)  # [C, M]
    total = mass.sum(dim=1, keepdim=True)
    valid = (total > 0) & negative.any(dim=1, keepdim=True)  # [C, 1]
    share = torch.where(valid, mass / total, 0.0)

    place = torch.arange(scores.shape[1], device=scores.device)
    itself = place == place[:, None]  # a difference of two equal infinities is NaN, but a row with itself is no pair
    difference = (scores[:, None, :] - scores[:, :, None]) / temperature  # [C, M, M]
    is_positive, is_negative = positive.to(dtype), negative.to(dtype)
    sigmoid = torch.where(itself, -math.inf, difference).sigmoid()
    r = (sigmoid * is_positive[:, None, :]).sum(dim=2) + 1.0  # [C, M], of the positives; the others may be NaN
    n = (sigmoid * is_negative[:, None, :]).sum(dim=2)
    loss = (share * torch.where(positive & valid, n / (r + n), 0.0)).sum(dim=1)
    loss = torch.where(scores.isnan().any(dim=1), math.nan, loss)
    if not with_grad:
        return loss, scores.new_empty(0), valid[:, 0]

    factor = torch.where(positive, share.to(dtype) / (r + n) / (r + n) / temperature, 0.0)
    push, pull = torch.where(positive, factor * n, 0.0), torch.where(positive, factor * r, 0.0)  # B and A
    small = torch.sigmoid(-difference.abs())  # of both tails; a row with itself cancels
    slope = torch.where(difference.isnan(), 0.0, small - small * small)
    of_positive = (
        push[:, :, None] * is_positive[:, None, :] - push[:, None, :] - pull[:, :, None] * is_negative[:, None, :]
    )
    gradient = (slope * torch.where(positive[:, :, None], of_positive, pull[:, None, :])).sum(dim=2)
    gradient = torch.where(loss.isnan()[:, None], math.nan, gradient)
    if member is not None:
        gradient = torch.where(member, gradient, 0.0)
    return loss, gradient, valid[:, 0]


class _PlainSmoothAP(torch.autograd.Function):
    """Forward: (C,) loss and validity. Backward: the gradient, which the forward has computed, times the incoming."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        loss, gradient, valid = loss_and_gradient(scores, *args)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(valid)
        return loss, valid

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grad.to(gradient.dtype)[:, None] * gradient, None, None, None, None
