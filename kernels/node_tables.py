"""How bins interact: moments become weights at Chebyshev nodes, and the nodes interact through the kernel.

The kernel, a sigmoid or its slope, is analytic: its nearest pole is i pi temperatures away from the real line. On an
interval of half-width a temperatures, the error of a polynomial through n Chebyshev nodes is therefore proportional to
rho^-n with rho = z + sqrt(1 + z^2), z = pi / a. So a few numbers represent all rows of a bin, as sources and as
targets: the one-dimensional fast multipole method (Greengard and Rokhlin, 1987) with two levels.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .costs import costs_of

# Temperatures beyond which a sigmoid counts as 0 or 1; exp(-34) = 2e-15. 1e6 negatives 18 temperatures below a positive
# still add 1e6 exp(-18) = 0.015 to its rank, and nothing else makes its gradient; a cutoff at 18 would drop that.
CUTOFF = 34.0


class Order(NamedTuple):
    """The number of fine bins in a coarse one, and the numbers of nodes of both."""

    fine: int  # F
    p: int  # nodes, and moments, of a fine bin
    q: int  # nodes of a coarse bin


def order_for(scores: Tensor, num_rows: int) -> Order:
    """Return the order whose error is at the level of the dtype of ``scores``, for ``num_rows`` rows of a class.

    Many rows take more and narrower fine bins, for 3 moments instead of 6 at the same error.
    """
    if scores.dtype == torch.float64:
        return Order(32, 8, 28)
    return Order(64, 3, 14) if num_rows >= costs_of(scores.device).many_rows else Order(8, 6, 14)


class Constants(NamedTuple):
    """The matrices that depend only on the order, float64."""

    to_weights: Tensor  # [p, p]: moments -> weights at the fine nodes
    to_coarse: Tensor  # [p F, q]: moments of the fine bins -> weights at the coarse nodes
    to_coefficients: Tensor  # [p, p]: values at the fine nodes -> coefficients of the polynomial
    lagrange: Tensor  # [F p, q]: the polynomials of the coarse nodes, at the fine nodes
    nodes: Tensor  # [q]: coarse nodes in [-1, 1]
    order: Order


def _chebyshev(count: int) -> Tensor:
    return torch.cos((2 * torch.arange(count, dtype=torch.float64) + 1) * math.pi / (2 * count))


@functools.lru_cache(maxsize=16)
def constants(order: Order, device: torch.device) -> Constants:
    if device.type != "cpu":  # the copies block, so that calls in other streams can use the matrices
        *matrices, order = constants(order, torch.device("cpu"))
        to_weights, to_coarse, to_coefficients, lagrange, nodes = (matrix.to(device) for matrix in matrices)
        return Constants(to_weights, to_coarse, to_coefficients, lagrange, nodes, order)
    with torch.device("cpu"):  # not on the default device: the matrices are cached for calls under other defaults
        fine_nodes, nodes = _chebyshev(order.p), _chebyshev(order.q)
        vandermonde = fine_nodes[None, :] ** torch.arange(order.p)[:, None]  # [degree, node]
        center = torch.arange(order.fine, dtype=torch.float64) - (order.fine - 1) / 2
        places = ((center[:, None] + fine_nodes / 2) / (order.fine / 2)).reshape(-1)  # [F p] in [-1, 1]
        degree = torch.arange(order.q, dtype=torch.float64)
        at_places, at_nodes = (torch.cos(degree * torch.arccos(x)[:, None]) for x in (places, nodes))  # T_k(x)
        at_places[:, 1:] *= 2
        to_weights, to_coefficients = torch.linalg.inv(vandermonde), torch.linalg.inv(vandermonde.T)
        lagrange = at_places @ at_nodes.T / order.q
        to_coarse = torch.einsum("mk,fmq->kfq", to_weights, lagrange.view(order.fine, order.p, order.q))
        return Constants(to_weights, to_coarse.reshape(-1, order.q), to_coefficients, lagrange, nodes, order)


class Kernel(NamedTuple):
    """The kernel between the nodes of two coarse bins, for every distance within reach."""

    reach: int  # R, in coarse bins
    sigmoid: Tensor  # [2R + 1, q sources, q targets]: s((x_source - x_target) / temperature), sources at the left first
    slope: Tensor  # the same for s' / temperature, which is even
    both: Tensor  # [2R + 1, q, 2q]: sigmoid, then slope


def make_kernel(matrices: Constants, width: float, temperature: float | Tensor) -> Kernel:
    """Return the kernel for bins of ``width``; for each class, of temperatures (C,) of at most half of it."""
    if isinstance(temperature, Tensor):
        reach = math.ceil(CUTOFF / 2)
        return _kernel(matrices.nodes, reach, width, temperature.double()[:, None, None, None])
    device = matrices.nodes.device
    # Another stream could read a cached kernel before it is computed, so each stream has its own.
    stream = 0 if device.type in ("cpu", "mps") else torch.accelerator.current_stream(device).stream_id
    return _cached_kernel(matrices.order, device, stream, width, temperature)


@functools.lru_cache(maxsize=8)  # some 100 KiB each; a constant temperature needs one
def _cached_kernel(order: Order, device: torch.device, stream: int, width: float, temperature: float) -> Kernel:
    reach = math.ceil(CUTOFF / (width / temperature))
    return _kernel(constants(order, device).nodes, reach, width, temperature)


def _kernel(nodes: Tensor, reach: int, width: float, temperature: float | Tensor) -> Kernel:
    h = width / temperature
    offset = torch.arange(-reach, reach + 1, dtype=torch.float64, device=nodes.device)[:, None, None] * h
    places = nodes[None, None, :] * (h / 2)  # of the targets
    distance = offset + places.transpose(-1, -2) - places
    sigmoid = torch.sigmoid(distance)
    slope = sigmoid * torch.sigmoid(-distance) / temperature
    return Kernel(reach, sigmoid, slope, torch.cat([sigmoid, slope], dim=-1))


def fine_weights(moments: Tensor, matrices: Constants) -> Tensor:
    """Return (..., B, F p) weights at the fine nodes from moments (p, ..., B, F)."""
    return (moments.movedim(0, -1) @ matrices.to_weights.T).flatten(-2)


def sources_of(moments: Tensor, matrices: Constants) -> Tensor:
    """Return (..., B, q) weights at the coarse nodes from moments (p, ..., B, F)."""
    return moments.movedim(0, -2).flatten(-2) @ matrices.to_coarse


def coarse_weights(weights: Tensor, matrices: Constants) -> Tensor:
    """Return (..., B, q) weights at the coarse nodes from those at the fine nodes (..., B, F p)."""
    return weights @ matrices.lagrange


def at_fine_nodes(values: Tensor, matrices: Constants) -> Tensor:
    """Return (..., B, F p) values at the fine nodes from those at the coarse nodes (..., B, q)."""
    return values @ matrices.lagrange.T


def coefficients(values: Tensor, matrices: Constants, dtype: torch.dtype) -> Tensor:
    """Return (p, ...) contiguous polynomial coefficients in u from values (..., B, F p) at the fine nodes."""
    p = matrices.to_coefficients.shape[0]
    return (matrices.to_coefficients @ values.reshape(-1, p).T).to(dtype)


def interact(sources: Tensor, kernel: Tensor, reach: int, ids: Tensor | None) -> Tensor:
    """Return (..., B, o) the sum over bins within reach of ``sources`` (..., B, q) through ``kernel`` (2R + 1, q, o).

    A kernel (C, 2R + 1, q, o) for each class takes sources (C, n, B, q). A block of bins is one matrix product: a row
    of the matrix is a bin and its 2R neighbours. ``ids`` (B,) numbers the bins if they are not contiguous.
    """
    count, q = sources.shape[-2:]
    matrix = kernel.flatten(-3, -2)  # [(2R + 1) q, o]
    matrix = matrix[:, None] if matrix.ndim == 3 else matrix  # [C, 1, (2R + 1) q, o]
    if ids is None:
        padded = F.pad(sources, (0, 0, reach, reach))
        near = padded.unfold(-2, 2 * reach + 1, 1).transpose(-1, -2)  # [..., B, 2R + 1, q], a view
    else:
        padded = F.pad(sources, (0, 0, 0, 1))  # the last row stands for bins that do not exist
        offsets = torch.arange(-reach, reach + 1, device=ids.device)
    blocks = max(1, math.ceil(sources.numel() / (q * costs_of(sources.device).bins_at_once)))
    step = max(1, math.ceil(count / blocks))
    if ids is None and step == count:
        return near.reshape(*near.shape[:-2], -1) @ matrix
    total = sources.new_empty(*sources.shape[:-1], kernel.shape[-1])
    for first in range(0, count, step):
        part = slice(first, first + step)
        if ids is None:
            block = near[..., part, :, :]
        else:
            wanted = ids[part, None] + offsets  # [b, 2R + 1]
            place = torch.searchsorted(ids, wanted).clamp_max_(count - 1)
            block = padded[..., torch.where(ids[place] == wanted, place, count), :]
        total[..., part, :] = block.reshape(*block.shape[:-2], -1) @ matrix
    return total


def beyond_reach(totals: Tensor, reach: int, ids: Tensor | None) -> Tensor:
    """Return (..., B) the sum of ``totals`` (..., B) over the bins to the right beyond reach, where a sigmoid is 1."""
    if ids is None and totals.device.type != "cpu" and totals.shape[-1] <= _BLOCK:
        count = totals.shape[-1]
        return totals @ _triangle(_BLOCK, totals.device, reach + 1)[:count, :count]
    if ids is None:
        suffix = suffix_sums(totals[..., reach + 1 :])
        return F.pad(suffix, (0, totals.shape[-1] - suffix.shape[-1]))
    first = torch.searchsorted(ids, ids + reach, right=True)
    suffix = F.pad(suffix_sums(totals), (0, 1))  # [..., B + 1]: sum over each bin and all to its right
    return suffix[..., first.clamp_max(totals.shape[-1])]


_BLOCK = 256  # entries that one product adds up on an accelerator: its triangle has 512 KiB; not measured


def suffix_sums(values: Tensor) -> Tensor:
    """Return (..., n) the sum over each of ``values`` (..., n) and all to its right."""
    count = values.shape[-1]
    if values.device.type == "cpu":
        return values.flip(-1).cumsum(-1).flip(-1)
    # Products of blocks and a triangle take fewer kernels, and CUDA has no deterministic cumsum.
    if count <= _BLOCK:
        return values @ _triangle(_BLOCK, values.device)[:count, :count]
    blocks = F.pad(values, (0, -count % _BLOCK)).unflatten(-1, (-1, _BLOCK))  # [..., blocks, 256]
    beyond = suffix_sums(blocks.sum(dim=-1)[..., 1:])  # [..., blocks - 1]
    sums = blocks @ _triangle(_BLOCK, values.device) + F.pad(beyond, (0, 1))[..., None]
    return sums.flatten(-2)[..., :count]


@functools.lru_cache(maxsize=8)
def _triangle(size: int, device: torch.device, distance: int = 0) -> Tensor:
    # A blocking copy, as in :func:`constants`.
    return torch.ones(size, size, dtype=torch.float64, device="cpu").tril(-distance).to(device)
