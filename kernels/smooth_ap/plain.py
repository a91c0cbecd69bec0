"""Smooth-AP over all pairs of rows in plain operators of static shape, which a compiler can fuse.

Nothing here depends on a value, so nothing waits for the device, and ``torch.compile`` and CUDA graphs see every
operator. It takes time and memory for M^2 pairs instead of positives x M, so it is for small pools on an accelerator,
where launches and waits take longer than the sums.

Let u_i be the share of positive i, r_i and n_i as in ``smooth_ap_sums``, s' the slope of the sigmoid, which is even,
and A_i = u_i r_i / (r_i + n_i)^2 / tau, B_i = u_i n_i / (r_i + n_i)^2 / tau, both 0 for rows that are not positives::

    dloss/dx_j = w_j sum_i s'_ij A_i                                                      for a negative j
    dloss/dx_j = sum_i s'_ij (-w_j B_i + w_i B_j for a positive i, -w_i A_j for a negative i)  for a positive j

w is the weight of a row where rows are compared. Each pair of quantities is one tensor (C, M, 2), the second one with
its sign reversed: (r, -n) and (A, -B).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..costs import costs_of
from ..registration import scaled


def plain_is_faster(scores: Tensor) -> bool:
    """Return whether all pairs of ``scores`` (C, M) are few enough for the plain form on their device."""
    num_classes, num_rows = scores.shape
    return num_classes * num_rows * num_rows <= costs_of(scores.device).plain_pairs


def smooth_ap_plain(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    key_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return what ``smooth_ap_sums`` returns, differentiable in a graph of ``torch.compile``."""
    weight = weight if key_weight is None else None  # the compiler refuses the same tensor twice
    loss, valid = _PlainSmoothAP.apply(scores, positive, member, weight, temperature, True, key_weight)
    return loss, valid


def plain_loss_and_gradient(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    with_grad: bool = True,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (C,) float64, its gradient (C, M), empty unless ``with_grad``, and the validity (C,).

    Where there is a ``key_weight``, it is the weight in the mean too.
    """
    num_classes, num_rows = scores.shape
    if num_rows == 0:
        nothing = scores.new_zeros(num_classes)
        return nothing.double(), scores.new_empty(scores.shape if with_grad else 0), nothing > 0
    # [C, M, 2]: (1, 0) for positives, (0, -1) for the others
    marks = positive[:, :, None] + torch.arange(0, -2, -1, dtype=scores.dtype, device=scores.device)
    groups = marks if member is None else marks * member[:, :, None]
    groups = groups if key_weight is None else groups * key_weight[..., None]
    numbers = groups.sum(dim=1)  # [C, 2] positives, and minus the negatives, or their weights
    mass, total_mass = groups[:, :, 0], numbers[:, :1]  # [C, M] and [C, 1]
    if weight is not None and key_weight is None:
        mass = marks[:, :, 0] * weight
        total_mass = mass.sum(dim=1, keepdim=True)
    valid = torch.logical_and(total_mass[:, 0], numbers[:, 1])  # a product of weights may underflow
    # This makes a class with a NaN score NaN, even without a positive whose sums would be NaN.
    tiny = torch.finfo(scores.dtype).tiny
    share = mass / torch.maximum(total_mass, scores.amax(dim=1, keepdim=True).clamp(tiny, tiny))

    difference = (scores[:, None, :] - scores[:, :, None]) / temperature  # [C, M, M]
    # inf on the diagonal: a row with itself adds 1, or its weight, and has no slope.
    if torch.compiler.is_compiling():
        place = torch.arange(num_rows, device=scores.device)
        difference = torch.where(place == place[:, None], math.inf, difference)
    else:
        difference.diagonal(dim1=1, dim2=2).fill_(math.inf)
    # The difference of two negatives at the same infinity is NaN, so the sums of negatives are not used.
    sums = torch.where(positive[:, :, None], _product(torch.sigmoid(difference), groups), marks)  # (r, -n)
    minus_total = sums[:, :, 1] - sums[:, :, 0]
    parts = sums * (share / minus_total)[:, :, None]  # [C, M, 2]: the second is the loss of each positive
    loss = parts[:, :, 1].sum(dim=1, dtype=torch.float64)
    if not with_grad:
        return loss, scores.new_empty(0), valid

    rates = parts / (minus_total * temperature)[:, :, None]  # (A, -B)
    e = difference.copysign(-1.0).sigmoid()  # s(-|d|)
    slope = torch.addcmul(e, e, e, value=-1).nan_to_num(0.0)  # e - e^2, exact to rounding in both tails
    (by_a, by_b), (by_positives, by_negatives) = (_product(slope, pair).unbind(dim=2) for pair in (rates, groups))
    gradient = torch.where(positive, by_b, by_a)
    gradient = gradient if key_weight is None else gradient * key_weight
    gradient = gradient.addcmul(rates[:, :, 0], by_negatives)
    gradient = gradient.addcmul(rates[:, :, 1], by_positives, value=-1)
    if member is not None:
        gradient = gradient.masked_fill(~member, 0.0)
    return loss, gradient, valid


def _product(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return ``matrix @ columns``, (C, M, M) and (C, M, 2).

    In a compiled graph it consists of sums, which the compiler fuses with the computation of the matrix, so that no
    matrix is stored. ``torch.where`` replaces ``stack``, which the compiler does not fuse.
    """
    if not torch.compiler.is_compiling():
        return matrix @ columns
    first, second = ((matrix * column[:, None, :]).sum(dim=2, keepdim=True) for column in columns.unbind(dim=2))
    return torch.where(torch.arange(2, device=matrix.device) == 0, first, second)


class _PlainSmoothAP(torch.autograd.Function):
    """Forward: (C,) loss and validity. Backward: the gradient that the forward has computed, times the incoming one."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        loss, gradient, valid = plain_loss_and_gradient(scores, *args)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(valid)
        return loss, valid

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient.t(), grad).t(), None, None, None, None, None, None
