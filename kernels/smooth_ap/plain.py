"""Smooth-AP over all pairs of rows in plain operators of static shape, which a compiler can fuse.

Nothing here depends on a value, so nothing waits for the device, and ``torch.compile`` and CUDA graphs see every
operator. It takes time and memory for M^2 pairs instead of positives x M, so it is for small pools on an accelerator,
where launches and waits take longer than the sums.

Let u_i be the share of positive i, r_i and n_i as in ``smooth_ap_sums``, s' the slope of the sigmoid, which is even,
w the weight of a row where rows are compared, and A_i = u_i r_i / (r_i + n_i)^2 / tau, B_i = u_i n_i / (r_i + n_i)^2 /
tau, both 0 for rows that are not positives::

    dloss/dx_j = w_j sum_i s'_ij A_i                                                      for a negative j
    dloss/dx_j = sum_i s'_ij (-w_j B_i + w_i B_j for a positive i, -w_i A_j for a negative i)  for a positive j

With N, P the weights of negatives and positives, 0 for other rows, a matrix product and a row-wise one give it::

    tau dloss/dx_j = A_j S(-N)_j + B_j S(P)_j + P_j S(-B)_j + N_j S(A)_j,   S(y)_j = sum_i s'_ij y_i tau

The columns stand in one tensor (C, M, 8), each factor three columns behind the other one::

    | -N | P | -B | A | B | P | N | -1 |     and before the rates are known | -N | P | -N | P | N | P | N | -1 |

The sums are in float64: a matrix product adds row after row, and in float32 the rounding of 2,000 rows, which has one
sign where scores are tied, adds up to 1e-5 of the gradient. Differences, sigmoids and the result are in the dtype of
the scores. A kernel that computes in float32 can write float64, so this takes no kernel more.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..costs import costs_of
from ..registration import scaled

_TINY = torch.finfo(torch.float64).tiny
_COLUMNS = [[0, 1, 0, 1, 0, 1, 0, -1], [-1, 0, -1, _TINY, 1, 0, 1, -1], [0, 0, 0, 0, 0, 0, 0, -1]]


def plain_is_faster(scores: Tensor) -> bool:
    """Return whether all pairs of ``scores`` (C, M) are few enough for the plain form."""
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
    """Return the results of ``smooth_ap_and_gradient``; a ``key_weight`` is the weight in the mean too."""
    num_classes, num_rows = scores.shape
    if num_rows == 0:
        nothing = scores.new_zeros(num_classes)
        return nothing.double(), scores.new_empty(scores.shape if with_grad else 0), nothing > 0
    of_positive, of_other, of_none = _columns(scores.device)
    groups = torch.where(positive[:, :, None], of_positive, of_other)  # [C, M, 8]
    groups = groups if member is None else groups * member[:, :, None]
    groups = groups if key_weight is None else groups * key_weight[..., None]
    numbers = groups.sum(dim=1)  # [C, 8] minus the negatives, positives ..., or their weights
    mass, total_mass = groups[:, :, 1], numbers[:, 1:2]  # [C, M] and [C, 1]
    unit = numbers[:, 3:4]  # the positives, > 0 even without one
    if member is not None or weight is not None or key_weight is not None:
        if weight is not None and key_weight is None:
            mass = mass * weight
            total_mass = mass.sum(dim=1, keepdim=True)
        unit = total_mass.clamp_min(_TINY)
    valid = torch.logical_and(total_mass[:, 0], numbers[:, 0])  # a product of weights may underflow
    # NaN for a NaN score, which makes its class NaN, even without a positive whose sums would be NaN.
    per_share = scores.clamp(unit, unit)  # [C, M]: the inverse of the share of a positive
    if weight is not None or key_weight is not None:
        per_share = per_share / mass

    difference = (scores[:, None, :] - scores[:, :, None]).div_(temperature)  # [C, M, M]
    # -inf on the diagonal: a row with itself has no slope, and its weight is added to its sums.
    if torch.compiler.is_compiling():
        place = torch.arange(num_rows, device=scores.device)
        sigmoid = torch.where(place == place[:, None], -math.inf, difference).sigmoid()
    else:
        difference.diagonal(dim1=1, dim2=2).fill_(-math.inf)
        sigmoid = torch.sigmoid(difference, out=torch.empty_like(difference, dtype=torch.float64))  # one kernel
    # The difference of two negatives at the same infinity is NaN, so the sums of negatives are not used.
    sums = torch.where(positive[:, :, None], _product(sigmoid, groups, groups), of_none)
    minus_total = sums[:, :, 7:]  # -(r + n)
    parts = sums[:, :, 2:5] / (minus_total * per_share[:, :, None])  # [C, M, 3]: the first is the loss of each positive
    loss = parts[:, :, 0].sum(dim=1)
    if not with_grad:
        return loss, scores.new_empty(0), valid

    if torch.compiler.is_compiling():
        column = torch.arange(8, device=scores.device)
        groups = torch.where((column < 2) | (column > 4), groups, torch.nn.functional.pad(parts / minus_total, (2, 3)))
    else:
        torch.div(parts, minus_total, out=groups[:, :, 2:5])
    slope = (sigmoid * sigmoid.mT).nan_to_num_(0.0)  # exact to rounding in both tails
    by_row = _product(slope, groups[:, :, :4], None, 1 / temperature)
    products = torch.mul(by_row, groups[:, :, 3:7], out=torch.empty_like(by_row, dtype=scores.dtype))
    gradient = products.sum(dim=2)
    return loss, gradient if member is None else torch.where(member, gradient, 0.0), valid


def _columns(device: torch.device) -> Tensor:
    """Return the columns of a positive, of another row, and of a row without sums, (3, 8).

    The fourth number of another row is so small that it only shows where there is no positive.
    """
    if torch.compiler.is_compiling():
        return torch.tensor(_COLUMNS, dtype=torch.float64, device=device)
    return _kept_columns(device)


@functools.lru_cache(maxsize=8)
def _kept_columns(device: torch.device) -> Tensor:
    # A blocking copy, so that any stream can use it.
    return torch.tensor(_COLUMNS, dtype=torch.float64, device="cpu").to(device)


def _product(matrix: Tensor, columns: Tensor, plus: Tensor | None, factor: float = 1.0) -> Tensor:
    """Return ``plus + factor * matrix @ columns``, (C, M, M) and (C, M, n).

    In a compiled graph it consists of sums, which the compiler fuses with the matrix, and of ``torch.where`` for
    ``stack``, which it does not fuse.
    """
    if not torch.compiler.is_compiling():
        others, beta = (columns.new_empty(()), 0) if plus is None else (plus, 1)
        return torch.baddbmm(others, matrix, columns, beta=beta, alpha=factor)
    product, place = columns.new_zeros(()), torch.arange(columns.shape[2], device=columns.device)
    for index, column in enumerate(columns.unbind(dim=2)):
        product = torch.where(place == index, (matrix * column[:, None, :]).sum(dim=2, keepdim=True), product)
    return product * factor if plus is None else product + plus


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
