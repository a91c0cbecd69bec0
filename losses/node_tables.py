"""What bins tell each other: moments become weights at Chebyshev nodes, and nodes interact through the kernel.

The kernel, a sigmoid or its slope, is analytic: its nearest pole is i pi temperatures away from the real line. On an
interval of half-width a temperatures a polynomial through n Chebyshev nodes then errs by a factor rho^-n with
rho = z + sqrt(1 + z^2), z = pi / a. So a few numbers stand for all rows of a bin, as sources and as targets::

    rows -> moments of fine bins -> weights at p fine nodes -> weights at q coarse nodes
                                                                     | kernel, between coarse bins within reach;
                                                                     | beyond it a sigmoid is 0 or 1
    rows <- polynomials of fine bins <- values at p fine nodes <- values at q coarse nodes

This is the fast multipole method in one dimension (Greengard and Rokhlin, 1987), with two levels.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MANY_ROWS = 400_000  # of a class; with fewer, the larger tables cost more than the rows
CUTOFF = 34.0  # temperatures; exp(-34) = 2e-15. A shorter one loses what 1e6 negatives do to a positive 18 above them


class Order(NamedTuple):
    """How many fine bins make a coarse one, and how many nodes each has."""

    fine: int
    p: int  # nodes, and moments, of a fine bin
    q: int  # nodes of a coarse bin


def order_for(dtype: torch.dtype, num_rows: int) -> Order:
    """Return the order whose error is at the level of ``dtype``.

    Many rows take more and smaller fine bins: each row then has 3 moments instead of 4, at the same error.
    """
    if dtype == torch.float64:
        return Order(32, 8, 28)
    return Order(64, 3, 14) if num_rows >= MANY_ROWS else Order(32, 4, 14)


class Constants(NamedTuple):
    """Matrices that depend on the order only, float64."""

    to_weights: Tensor  # [p, p]: moments -> weights at the fine nodes
    to_coefficients: Tensor  # [p, p]: values at the fine nodes -> coefficients of the polynomial
    lagrange: Tensor  # [F p, q]: the polynomials of the coarse nodes, at the fine nodes
    nodes: Tensor  # [q]: coarse nodes in [-1, 1]


def _chebyshev(count: int) -> Tensor:
    return torch.cos((2 * torch.arange(count, dtype=torch.float64) + 1) * math.pi / (2 * count))


@functools.lru_cache(maxsize=8)
def _constants_on_cpu(order: Order) -> Constants:
    fine_nodes, nodes = _chebyshev(order.p), _chebyshev(order.q)
    vandermonde = fine_nodes[None, :] ** torch.arange(order.p)[:, None]  # [degree, node]
    center = torch.arange(order.fine, dtype=torch.float64) - (order.fine - 1) / 2
    places = ((center[:, None] + fine_nodes / 2) / (order.fine / 2)).reshape(-1)  # [F p] in [-1, 1]
    degree = torch.arange(order.q, dtype=torch.float64)
    at_places, at_nodes = (torch.cos(degree * torch.arccos(x)[:, None]) for x in (places, nodes))  # T_k(x)
    at_places[:, 1:] *= 2
    return Constants(
        torch.linalg.inv(vandermonde), torch.linalg.inv(vandermonde.T), at_places @ at_nodes.T / order.q, nodes
    )


def constants(order: Order, device: torch.device) -> Constants:
    """Return the matrices of ``order`` on ``device``."""
    return Constants(*(matrix.to(device) for matrix in _constants_on_cpu(order)))


class Kernel(NamedTuple):
    """The kernel between the nodes of two coarse bins, for every distance within reach."""

    reach: int  # R, in coarse bins
    sigmoid: Tensor  # [2R + 1, q sources, q targets]: s((x_source - x_target) / temperature), source R bins left first
    slope: Tensor  # the same for s' / temperature, which is even


def make_kernel(matrices: Constants, width: float, temperature: float) -> Kernel:
    """Return the kernel for coarse bins of ``width``."""
    h = width / temperature
    reach = math.ceil(CUTOFF / h)
    offset = torch.arange(-reach, reach + 1, dtype=torch.float64, device=matrices.nodes.device)[:, None, None] * h
    nodes = matrices.nodes * (h / 2)
    distance = offset + nodes[None, :, None] - nodes[None, None, :]
    sigmoid = torch.sigmoid(distance)
    return Kernel(reach, sigmoid, sigmoid * torch.sigmoid(-distance) / temperature)


def fine_weights(moments: Tensor, matrices: Constants) -> Tensor:
    """Return (..., B, F p) weights at the fine nodes from moments (p, ..., B, F)."""
    return torch.einsum("mk,k...f->...fm", matrices.to_weights, moments).flatten(-2)


def coarse_weights(weights: Tensor, matrices: Constants) -> Tensor:
    """Return (..., B, q) weights at the coarse nodes from those at the fine nodes (..., B, F p)."""
    return weights @ matrices.lagrange


def at_fine_nodes(values: Tensor, matrices: Constants) -> Tensor:
    """Return (..., B, F p) values at the fine nodes from those at the coarse nodes (..., B, q)."""
    return values @ matrices.lagrange.T


def coefficients(values: Tensor, matrices: Constants, dtype: torch.dtype) -> Tensor:
    """Return (p, ...) contiguous polynomial coefficients in u from values (..., B, F p) at the fine nodes."""
    p = matrices.to_coefficients.shape[0]
    return (matrices.to_coefficients @ values.reshape(-1, p).T).to(dtype).contiguous()


def interact(sources: Tensor, kernel: Tensor, reach: int, ids: Tensor | None) -> Tensor:
    """Return (..., B, o) the sum over bins within reach of ``sources`` (..., B, q) through ``kernel`` (2R + 1, q, o).

    ``ids`` (B,) numbers the bins where they are not contiguous.
    """
    count = sources.shape[-2]
    total = sources.new_zeros(*sources.shape[:-1], kernel.shape[2])
    padded = F.pad(sources, (0, 0, reach, reach)) if ids is None else sources
    for step in range(2 * reach + 1):
        if ids is None:
            total += padded[..., step : step + count, :] @ kernel[step]
        else:
            wanted = ids + (step - reach)
            place = torch.searchsorted(ids, wanted).clamp_max_(count - 1)
            found = (ids[place] == wanted).to(sources.dtype)[:, None]
            total += (padded[..., place, :] * found) @ kernel[step]
    return total


def beyond_reach(totals: Tensor, reach: int, ids: Tensor | None) -> Tensor:
    """Return (..., B) the sum of ``totals`` (..., B) over the bins to the right, beyond reach: there a sigmoid is 1."""
    count = totals.shape[-1]
    if ids is None:
        first = torch.arange(count, device=totals.device) + reach + 1
    else:
        first = torch.searchsorted(ids, ids + reach, right=True)
    suffix = F.pad(totals.flip(-1).cumsum(-1).flip(-1), (0, 1))  # [..., B + 1]: sum from each bin on
    return suffix[..., first.clamp_max(count)]
