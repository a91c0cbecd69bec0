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
from collections.abc import Iterable
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
    num_classes, num_rows = scores.shape
    negative = ~positive if member is None else member & ~positive
    positives, negatives = positive.to(scores.dtype), negative.to(scores.dtype)
    mass = positives if weight is None else positives * weight
    total_mass = mass.sum(dim=1, keepdim=True)  # [C, 1]
    valid = (total_mass[:, 0] > 0) & negative.any(dim=1)
    share = mass / total_mass.clamp_min(torch.finfo(scores.dtype).tiny)
    # 0, or NaN for a class with a NaN: there may be no positive whose sums would be NaN.
    nan = scores.amax(dim=1, keepdim=True).clamp(0, 0) if num_rows else scores.new_zeros(num_classes, 1)

    difference = _without_itself((scores[:, None, :] - scores[:, :, None]) / temperature)  # [C, M, M]
    r, n = _products(torch.sigmoid(difference), positives, negatives)  # [C, M], of the positives
    # Two negatives at one infinity have no difference, and need none.
    r, n = r.masked_fill(negative, 0.0) + 1.0, n.masked_fill(negative, 0.0)
    total = r + n
    loss = (share * n / total).sum(dim=1, dtype=torch.float64) + nan[:, 0]
    if not with_grad:
        return loss, scores.new_empty(0), valid

    factor = share / (total * total) / temperature
    push, pull = factor * n, factor * r  # B and A, 0 outside of the positives
    small = difference.copysign(-1.0).sigmoid()  # of both tails
    slope = torch.addcmul(small, small, small, value=-1).nan_to_num(0.0)
    by_pull, by_push, by_positives, by_negatives = _products(slope, pull, push, positives, negatives)
    of_positive = torch.addcmul(push * by_positives, pull, by_negatives, value=-1) - by_push
    gradient = torch.where(positive, of_positive, by_pull) + nan
    if member is not None:
        gradient = gradient.masked_fill(~member, 0.0)
    return loss, gradient, valid


def _without_itself(difference: Tensor) -> Tensor:
    """Return ``difference`` (C, M, M) with -inf on the diagonal: a row has no pair with itself."""
    if not torch.compiler.is_compiling():
        difference.diagonal(dim1=1, dim2=2).fill_(-math.inf)
        return difference
    place = torch.arange(difference.shape[1], device=difference.device)
    return torch.where(place == place[:, None], -math.inf, difference)


def _products(matrix: Tensor, *columns: Tensor) -> Iterable[Tensor]:
    """Return the products of ``matrix`` (C, M, M) with each of ``columns`` (C, M).

    Compiled, they are sums, which the compiler fuses with what computes the matrix, so that no matrix is stored.
    """
    if not torch.compiler.is_compiling():
        return (matrix @ torch.stack(columns, dim=2)).unbind(dim=2)
    return [(matrix * column[:, None, :]).sum(dim=2) for column in columns]


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
