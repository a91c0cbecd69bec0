"""Smooth-AP of M rows, each a query against all others, without the (M, M) similarities at one time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.costs import costs_of
from ..kernels.registration import exact, first_order_only
from ..kernels.soft_ranks import smooth_ap_sums
from .batch import compute_dtype


def directions(embeddings: Tensor) -> Tensor:
    """Return the embeddings (N, D) at length 1, those of zeros as they are, in the dtype of the computation.

    First each row is divided by its largest entry, so that no square overflows or vanishes. The direction does not
    change, so that entry is a constant. The length is then at least 1, unless it is 0.
    """
    embeddings = embeddings.to(compute_dtype(embeddings.dtype))
    largest = embeddings.detach().abs().amax(dim=1, keepdim=True)
    scaled = embeddings / torch.where(largest > 0, largest, torch.ones_like(largest))
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / length.clamp_min(1.0)


def ap_of_all_queries(unit: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return one minus the smooth average precision of each row as a query against the others, and which are valid.

    Args:
        unit: (M, D) float32 or float64, rows of length 1.
        labels: (M,) int64; the positives of a query are the other rows of its label.
        temperature: > 0.

    Returns:
        The loss (M,), float64, 0 where it is not valid, and the validity (M,), bool: the query has a positive and a
        negative. A query with a NaN similarity is NaN, valid or not.
    """
    values, valid = _Queries.apply(unit, labels, temperature)
    return values, valid


class _Queries(torch.autograd.Function):
    """One minus the smooth average precision of each query.

    ======== ========= ====================================================================
    tensor   shape     meaning
    ======== ========= ====================================================================
    z        (M, D)    rows of length 1
    y        (M,)      their labels
    L        (M,)      loss of each query; 0 where it is not valid
    G        (M, M)    dL_q / dx_qj, of which a few rows are held at a time
    dz       (M, D)    (g G) z + (g G)^T z, g the incoming gradient on the diagonal
    ======== ========= ====================================================================

    The forward adds dz up for g = 1, since the rows of G are at hand. That times g is right where g is the same for all
    queries, as after a mean or a sum; else the backward computes the rows again.
    """

    @staticmethod
    def forward(ctx: Any, unit: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        ones = torch.ones(unit.shape[0], dtype=torch.float64, device=unit.device)
        values, valid, gradient = _queries(unit, labels, temperature, ones if unit.requires_grad else None)
        ctx.save_for_backward(unit, labels, valid | values.isnan(), gradient)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(valid)
        return values, valid

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_values: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        unit, labels, counted, gradient = ctx.saved_tensors
        factors = grad_values[counted]
        if factors.numel() == 0 or bool((factors == factors[0]).all()):
            return gradient * factors[:1].sum().to(gradient.dtype), None, None
        return _queries(unit, labels, ctx.temperature, grad_values)[2], None, None


@exact
def _queries(
    unit: Tensor, labels: Tensor, temperature: float, factors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss of each query (M,) float64, which are valid, and the gradient (M, D) of ``factors @ loss``."""
    count = unit.shape[0]
    values, valid = unit.new_zeros(count, dtype=torch.float64), labels.new_zeros(count, dtype=torch.bool)
    gradient = None if factors is None else torch.zeros_like(unit)
    step = max(1, costs_of(unit.device).similarities_at_once // max(1, count))
    for first in range(0, count, step):
        own = slice(first, first + step)
        scores = (unit[own] @ unit.t()).requires_grad_(factors is not None)  # [q, M]
        same = labels[own, None] == labels
        others = torch.ones_like(same)
        for mask in (same, others):
            mask.diagonal(first).fill_(False)  # a query does not rank itself
        with torch.set_grad_enabled(factors is not None):
            loss, valid[own] = smooth_ap_sums(scores, same, others, None, temperature)
        values[own] = loss.detach()
        if gradient is not None and factors is not None:
            (slope,) = torch.autograd.grad(loss, scores, factors[own])  # [q, M]
            gradient[own] += slope @ unit
            gradient += slope.t() @ unit[own]
    return values, valid, gradient
