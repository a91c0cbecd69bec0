"""Sums over keys at queries by bins, with the fast multipole method of node_tables.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native
from .bins import Bins, add_moments, chunks, compact_ids, evaluate, locate, num_lanes
from .node_tables import Order, at_fine_nodes, beyond_reach, coefficients, constants, interact, make_kernel, sources_of


class Line(NamedTuple):
    """Queries or keys on the line of the bins."""

    scores: Tensor  # [C, N], times the factors
    places: tuple[Tensor, Tensor] | None  # what locate returns for all of them; None if they are too many to keep


class Tables:
    """Bins, nodes and the kernel between them, for one call: moments of rows, sums at nodes, values at rows."""

    def __init__(
        self, bins: Bins, order: Order, temperature: float | Tensor, factors: Tensor | None, queries: Line, keys: Line
    ) -> None:
        """Compute the kernel.

        Args:
            bins: bins of the scores, or of the scores times the factors.
            order: numbers of fine bins and of nodes.
            temperature: in units of the scores; or (C,), one for each class.
            factors: (C,) powers of two; None for 1.
            queries, keys: their scores, times the factors.
        """
        self.bins, self.order, self.queries, self.keys = bins, order, queries, keys
        self.matrices = constants(order, queries.scores.device)
        if factors is not None:
            temperature = temperature * factors
        self.kernel = make_kernel(self.matrices, bins.width, temperature)
        if factors is not None:  # slopes per unit of the scores
            self.kernel = self.kernel._replace(slope=self.kernel.slope * factors.double()[:, None, None, None])
        self.ids = compact_ids(bins, self.kernel.reach)

    def moments(self, line: Line, weights: Tensor) -> Tensor:
        """Return the moments (p, C, n, B, F) of the scores of ``line`` with ``weights`` (C, N, n)."""
        num_classes, _, count = weights.shape
        layout = self.bins.num_coarse, self.bins.fine
        if self._reads_in_c(line) and count == 1 and bool((weights == 1).all()):
            moments = native.moments(line.scores, None, *self.bins.numbering, self.bins.num_fine, self.order.p)
            return moments[:, :, None, :-1].unflatten(-1, layout)
        lanes = num_lanes(line.scores, self.bins.num_fine)
        shape = self.order.p, num_classes * lanes, count, self.bins.num_fine
        table = torch.zeros(shape, dtype=torch.float64, device=weights.device)
        for c, m, index, u in self._places(line):
            for n in range(count):
                add_moments(table[:, c if lanes == 1 else slice(None), n], index, u, weights[c, m, n])
        table = table if lanes == 1 else table.sum(dim=1, keepdim=True)
        return table.unflatten(-1, layout)

    def _reads_in_c(self, line: Line) -> bool:
        return line.places is None and self.bins.outside is None and native.is_usable(line.scores)

    def _places(self, line: Line) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield slices of classes and of rows with their bins and the positions in these, (c, m) each."""
        if line.places is not None:
            yield slice(None), slice(None), *line.places
            return
        for c, m in chunks(line.scores):
            yield c, m, *locate(self.bins, line.scores[c, m], c)

    def sigmoids(self, moments: Tensor) -> Tensor:
        """Return the sums (C, n, B, F p) over the sources to the right of each node, near and far."""
        far = beyond_reach(moments[0].sum(-1), self.kernel.reach, self.ids)
        return self._near(moments, self.kernel.sigmoid) + far[..., None]

    def mirrored_sigmoids(self, moments: Tensor) -> Tensor:
        """Return the sums (C, n, B, F p) over the sources to the left of each node: the same on the mirrored line."""
        ids = None if self.ids is None else self.ids[-1] - self.ids.flip(0)
        far = beyond_reach(moments[0].sum(-1).flip(-1), self.kernel.reach, ids).flip(-1)
        return self._near(moments, self.kernel.sigmoid.flip(-3, -2, -1)) + far[..., None]

    def slopes(self, moments: Tensor) -> Tensor:
        """Return the sums of slopes (C, n, B, F p)."""
        return self._near(moments, self.kernel.slope)

    def _near(self, moments: Tensor, kernel: Tensor) -> Tensor:
        """Return the sums (C, n, B, F p) over the sources within reach."""
        sources = sources_of(moments, self.matrices)  # [C, n, B, q]
        return at_fine_nodes(interact(sources, kernel, self.kernel.reach, self.ids), self.matrices)

    def read(self, values: Tensor, line: Line) -> Tensor:
        """Return (C, N, n): the functions ``values`` (C, n, B, F p) at the scores of ``line`` (C, N)."""
        num_classes, count = values.shape[:2]
        table = coefficients(values, self.matrices, line.scores.dtype).view(self.order.p, num_classes, count, -1)
        result = line.scores.new_empty(*line.scores.shape, count)
        if self._reads_in_c(line) and count == 1:
            native.evaluate(F.pad(table[:, :, 0], (0, 1)), line.scores, None, *self.bins.numbering, result[..., 0])
            return result
        for c, m, index, u in self._places(line):
            for n in range(count):
                result[c, m, n] = evaluate(table[:, c, n], index, u)
        return result
