"""Sums of sigmoids between queries and keys in time linear in both: the general form, without a fused loss."""

from __future__ import annotations

import torch
from torch import Tensor

from .bins import Bins, add_moments, chunks, compact_ids, cover, cover_bulk, evaluate, locate, most_bins, num_lanes
from .node_tables import (
    Constants,
    Kernel,
    at_fine_nodes,
    beyond_reach,
    coefficients,
    constants,
    interact,
    make_kernel,
    order_for,
    sources_of,
)


def find_bins(queries: Tensor, keys: Tensor, temperature: float) -> Bins | None:
    """Return bins that hold queries (C, Q) and keys (C, K); None where most would be empty or a score is not finite."""
    both = torch.cat([queries, keys], dim=1)
    if both.shape[1] == 0:
        return None
    low, high = both.amin(dim=1), both.amax(dim=1)
    if not bool((low.isfinite() & high.isfinite()).all()):
        return None
    fine = order_for(both.dtype, both.shape[1]).fine
    bins = cover(low, high, temperature, fine)
    if bins.window <= most_bins(both.shape[1]):
        return bins
    return cover_bulk(both[0], temperature, fine) if both.shape[0] == 1 else None


class _Tables:
    """Bins, nodes and the kernel between them, for one call."""

    def __init__(self, bins: Bins, like: Tensor, num_rows: int, temperature: float) -> None:
        self.bins, self.order, self.dtype = bins, order_for(like.dtype, num_rows), like.dtype
        self.matrices: Constants = constants(self.order, like.device)
        self.kernel: Kernel = make_kernel(self.matrices, bins.width, temperature)
        self.ids = compact_ids(bins, self.kernel.reach)

    def moments(self, scores: Tensor, weights: Tensor) -> Tensor:
        """Return the moments (p, C, n, B, F) of ``scores`` (C, N) with ``weights`` (C, N, n)."""
        num_classes, count = weights.shape[0], weights.shape[2]
        lanes = num_lanes(scores.shape, self.bins.num_fine)
        shape = self.order.p, num_classes * lanes, count, self.bins.num_fine
        table = torch.zeros(shape, dtype=torch.float64, device=scores.device)
        for c, m in chunks(num_classes, scores.shape[1]):
            index, u = locate(self.bins, scores[c, m], c)
            for n in range(count):
                add_moments(table[:, c if lanes == 1 else slice(None), n], index, u, weights[c, m, n])
        table = table if lanes == 1 else table.sum(dim=1, keepdim=True)
        return table.unflatten(-1, (self.bins.num_coarse, self.bins.fine))

    def sigmoids(self, moments: Tensor) -> Tensor:
        """Return the sums (C, n, B, F p) over sources to the right of a target, near and far."""
        near = interact(self.sources(moments), self.kernel.sigmoid, self.kernel.reach, self.ids)
        far = beyond_reach(moments[0].sum(-1), self.kernel.reach, self.ids)
        return at_fine_nodes(near, self.matrices) + far[..., None]

    def mirrored_sigmoids(self, moments: Tensor) -> Tensor:
        """Return the sums (C, n, B, F p) over sources to the left of a target: the same on the mirrored line."""
        near = interact(self.sources(moments), self.kernel.sigmoid.flip(0, 1, 2), self.kernel.reach, self.ids)
        ids = None if self.ids is None else self.ids[-1] - self.ids.flip(0)
        far = beyond_reach(moments[0].sum(-1).flip(-1), self.kernel.reach, ids).flip(-1)
        return at_fine_nodes(near, self.matrices) + far[..., None]

    def slopes(self, moments: Tensor) -> Tensor:
        """Return the sums of slopes (C, n, B, F p)."""
        near = interact(self.sources(moments), self.kernel.slope, self.kernel.reach, self.ids)
        return at_fine_nodes(near, self.matrices)

    def sources(self, moments: Tensor) -> Tensor:
        """Return the weights at the coarse nodes (C, n, B, q)."""
        return sources_of(moments, self.matrices)

    def read(self, values: Tensor, scores: Tensor) -> Tensor:
        """Return (C, N, n): the functions ``values`` (C, n, B, F p) at ``scores`` (C, N)."""
        num_classes, count = values.shape[:2]
        table = coefficients(values, self.matrices, self.dtype).view(self.order.p, num_classes, count, -1)
        result = scores.new_empty(*scores.shape, count)
        for c, m in chunks(num_classes, scores.shape[1]):
            index, u = locate(self.bins, scores[c, m], c)
            for n in range(count):
                result[c, m, n] = evaluate(table[:, c, n], index, u)
        return result


def binned_sums(queries: Tensor, keys: Tensor, weights: Tensor, temperature: float, bins: Bins) -> Tensor:
    """Return (C, Q, n)."""
    tables = _Tables(bins, queries, queries.shape[1] + keys.shape[1], temperature)
    return tables.read(tables.sigmoids(tables.moments(keys, weights)), queries)


def binned_gradients(
    grad: Tensor, queries: Tensor, keys: Tensor, weights: Tensor, temperature: float, bins: Bins
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and weights; the formulas stand at the direct method."""
    tables = _Tables(bins, queries, queries.shape[1] + keys.shape[1], temperature)
    of_keys, of_queries = tables.moments(keys, weights), tables.moments(queries, grad)
    grad_queries = -(tables.read(tables.slopes(of_keys), queries) * grad).sum(dim=2)
    grad_keys = (tables.read(tables.slopes(of_queries), keys) * weights).sum(dim=2)
    grad_weights = tables.read(tables.mirrored_sigmoids(of_queries), keys)
    return grad_queries, grad_keys, grad_weights
