"""Weighted sums of sigmoids of score differences, pair by pair or by bins.

:func:`sigmoid_sums` is public; a variant takes checked arguments and a temperature for each class. Below them are the
choice between pairs and bins, the forward and the backward, and the tables of bins.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import check_choice, check_temperature, expected
from .bins import Line, compact_ids, find_bins, locate
from .costs import costs_of
from .node_tables import (
    Order,
    at_fine_nodes,
    beyond_reach,
    coefficients,
    constants,
    interact,
    make_kernel,
    order_for,
    sources_of,
)
from .pairs import chunks_of_pairs, sigmoid_and_slope, slope_of
from .registration import check_not_batched, register
from .torch_private import func_transforms_are_active

METHODS = ("auto", "direct", "binned")
MOST_KERNELS = 64  # classes whose kernels are in memory at a time, up to 430 KiB each


def sigmoid_sums(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    temperature: float,
    *,
    method: Literal["auto", "direct", "binned"] = "auto",
) -> Tensor:
    r"""Sum sigmoids of the scaled differences between keys and queries.

    .. math:: y_{qn} = \sum_k \sigma\!\left(\frac{x_k - x_q}{\tau}\right) w_{kn}

    Equal to ``torch.sigmoid((keys - queries[:, None]) / temperature) @ weights``; O(Q + K) time and memory, or O(Q K)
    time for small inputs.

    Args:
        queries: (Q,) or (C, Q), floating.
        keys: (K,) or (C, K), the dtype of ``queries``.
        weights: (K, n) or (C, K, n), the dtype of ``queries``.
        temperature: the width of the sigmoid in units of the scores, > 0.
        method: ``"direct"`` sums pair by pair, in chunks; ``"binned"`` sums by bins of scores, with an error at the
            level of the dtype; ``"auto"`` takes the faster. Scores that are not finite, or so far apart that most bins
            would be empty, are always summed pair by pair.

    Shape:
        output (Q, n), or (C, Q, n) when the inputs have a leading dimension of classes.

    Raises:
        TypeError: when an input is not a floating-point tensor, or the dtypes differ.
        ValueError: when shapes do not fit, ``temperature`` is not positive, or ``method`` is unknown.

    Numerics:
        Half precision is computed in float32 and returned in its own dtype. The slope is computed as
        ``sigmoid(d) * sigmoid(-d)``, exact to rounding in both tails. Gradients for queries, keys and weights are
        analytic; a second derivative raises RuntimeError.

    Example:
        >>> import torch
        >>> sigmoid_sums(torch.tensor([0.0]), torch.tensor([0.0, 100.0]), torch.ones(2, 1), temperature=1.0)
        tensor([[1.5000]])
    """
    check_choice("method", method, METHODS)
    check_temperature(temperature)
    for name, value in (("queries", queries), ("keys", keys), ("weights", weights)):
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype != queries.dtype:
            raise TypeError(expected(name, "a floating-point tensor, all three of one dtype", value))
    check_not_batched(queries, keys, weights)
    batched = queries.ndim == 2
    fits = queries.ndim in (1, 2) and keys.ndim == queries.ndim and weights.ndim == queries.ndim + 1
    if not fits or weights.shape[:-1] != keys.shape or keys.shape[:-1] != queries.shape[:-1]:
        shapes = tuple(tuple(tensor.shape) for tensor in (queries, keys, weights))
        what = "shapes (Q,), (K,), (K, n) or (C, Q), (C, K), (C, K, n)"
        raise ValueError(expected("queries, keys, weights", what, shapes))
    dtype = torch.promote_types(queries.dtype, torch.float32)
    inputs = [tensor.to(dtype) if batched else tensor.to(dtype)[None] for tensor in (queries, keys, weights)]
    with_weights = weights.requires_grad or func_transforms_are_active()  # it takes as long as that of the scores
    sums: Tensor = _sigmoid_sums(*inputs, temperature, method, None, with_weights)[0].to(queries.dtype)
    return sums if batched else sums[0]


def sigmoid_sums_of_classes(queries: Tensor, keys: Tensor, weights: Tensor, temperatures: Tensor) -> Tensor:
    """Return the sums (C, Q, n) of :func:`sigmoid_sums` of float32 or float64 with a temperature (C,) for each class.

    Dividing the scores by their temperatures beforehand would round those that are far from 0.
    """
    widths, with_weights = temperatures.to(queries.dtype), weights.requires_grad or func_transforms_are_active()
    sums: Tensor = _sigmoid_sums(queries, keys, weights, 1.0, "auto", widths, with_weights)[0]
    return sums


class _Request(NamedTuple):
    """The arguments of a call, and the choice between pairs and bins."""

    queries: Tensor  # [C, Q]
    keys: Tensor  # [C, K]
    weights: Tensor  # [C, K, n]
    temperature: float
    method: str
    temperatures: Tensor | None  # [C], instead of ``temperature``

    def sizes(self) -> tuple[int, int]:
        """Return the number of pairs, and the number of queries and keys times the columns of weights."""
        num_queries, num_keys = self.queries.numel(), self.keys.numel()
        return num_queries * self.keys.shape[1], (num_queries + num_keys) * self.weights.shape[2]

    def is_direct(self) -> bool:
        """Return whether the pairs are summed directly whatever the values of the scores."""
        num_pairs, num_rows = self.sizes()
        if self.method != "auto":
            return self.method == "direct" or num_pairs == 0
        return num_pairs == 0 or costs_of(self.queries.device).pairs_are_faster(num_pairs, num_rows)

    def ends(self) -> Tensor | None:
        """Return the ends of each class and its temperature, (3, C) on the host; None if :meth:`is_direct`."""
        queries, keys = self.queries, self.keys
        if self.is_direct():
            return None
        low = torch.minimum(queries.amin(dim=1), keys.amin(dim=1))
        high = torch.maximum(queries.amax(dim=1), keys.amax(dim=1))
        return torch.stack([low, high, torch.ones_like(low) if self.temperatures is None else self.temperatures]).cpu()

    def parts(self, *others: Tensor) -> list[tuple[Any, ...]]:
        """Return requests for parts of the classes, each with its part of ``others``; one sums the pairs directly.

        Bins may suit a part: only ``MOST_KERNELS`` classes may have kernels of their own, and only one bins outside.
        """
        (queries, keys, weights, temperature, method, temperatures), num_classes = self, len(self.queries)
        costs, (num_pairs, num_rows), size = costs_of(queries.device), self.sizes(), 1
        if temperatures is not None and num_classes > MOST_KERNELS:
            size = math.ceil(num_classes / math.ceil(num_classes / MOST_KERNELS))
        else:
            num_pairs, num_rows = num_pairs // num_classes, num_rows // num_classes
        if method == "direct" or costs.pairs_are_faster(num_pairs, num_rows):
            return [(self, *others)]
        columns = [tensor.split(size) for tensor in (queries, keys, weights, *others)]
        widths = [None] * len(columns[0]) if temperatures is None else temperatures.split(size)
        return [(_Request(q, k, w, temperature, method, t), *rest) for t, q, k, w, *rest in zip(widths, *columns)]

    def difference(self, c: slice, q: slice) -> tuple[Tensor, float | Tensor]:
        """Return (keys - queries) / temperature (c, q, K) for slices of classes and queries, and the temperature."""
        divisor = self.temperature if self.temperatures is None else self.temperatures[c, None, None]
        return (self.keys[c, None, :] - self.queries[c, q, None]).div_(divisor), divisor


def _sums(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    temperature: float,
    method: str,
    temperatures: Tensor | None,
    with_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sums (C, Q, n), and :meth:`_Request.ends` for the backward, NaN if they were not read."""
    request = _Request(queries, keys, weights, temperature, method, temperatures)
    ends = request.ends()
    # The compiler must know the shape, so it is the same if nothing was read.
    unknown = torch.full((3, queries.shape[0]), math.nan, dtype=queries.dtype, device="cpu")
    return _sums_of(request, ends), unknown if ends is None else ends


def _sums_of(request: _Request, ends: Tensor | None) -> Tensor:
    queries, keys, weights = request[:3]
    tables = None if ends is None else _tables_if_faster(request, ends)
    if tables is not None:
        return tables.read(tables.sigmoids(tables.moments(tables.keys, weights)), tables.queries)
    if len(queries) > 1 and len(parts := request.parts()) > 1:
        return torch.cat([_sums_of(part, part.ends()) for (part,) in parts])
    chunks = chunks_of_pairs(queries, keys)
    sums = None if len(chunks) == 1 else queries.new_zeros(*queries.shape, weights.shape[-1])
    for c, q in chunks:
        part = torch.sigmoid(request.difference(c, q)[0]) @ weights[c]
        if sums is None:
            return part
        sums[c, q] = part
    assert sums is not None
    return sums


def _gradients(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    temperatures: Tensor | None,
    ends: Tensor,
    temperature: float,
    method: str,
    with_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    request = _Request(queries, keys, weights, temperature, method, temperatures)
    return _gradients_of(request, None if request.is_direct() else ends, grad.contiguous(), with_weights)


def _gradients_of(
    request: _Request, ends: Tensor | None, grad: Tensor, with_weights: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and weights; that of the weights is empty unless ``with_weights``.

    With s' = s (1 - s) and G = s' (grad @ weights^T) / tau: dq = -sum_k G, dk = sum_q G, dw = s^T @ grad.
    """
    queries, keys, weights = request[:3]
    tables = None if ends is None else _tables_if_faster(request, ends)
    if tables is not None:
        of_keys, of_queries = tables.moments(tables.keys, weights), tables.moments(tables.queries, grad)
        grad_queries = -(tables.read(tables.slopes(of_keys), tables.queries) * grad).sum(dim=2)
        grad_keys = (tables.read(tables.slopes(of_queries), tables.keys) * weights).sum(dim=2)
        if not with_weights:
            return grad_queries, grad_keys, weights.new_empty(0)
        return grad_queries, grad_keys, tables.read(tables.mirrored_sigmoids(of_queries), tables.keys)
    if len(queries) > 1 and len(parts := request.parts(grad)) > 1:
        grads = (_gradients_of(part, part.ends(), own_grad, with_weights) for part, own_grad in parts)
        grad_queries, grad_keys, grad_weights = map(torch.cat, zip(*grads))
        return grad_queries, grad_keys, grad_weights
    chunks, empty, totals = chunks_of_pairs(queries, keys), weights.new_empty(0), None
    if len(chunks) != 1:
        totals = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(weights) if with_weights else empty
    for c, q in chunks:
        difference, divisor = request.difference(c, q)
        if with_weights:
            sigmoid, slope = sigmoid_and_slope(difference)
            of_weights = sigmoid.transpose(1, 2) @ grad[c, q]
        else:
            slope, of_weights = slope_of(difference), empty
        slope *= (grad[c, q] @ weights[c].transpose(1, 2)).div_(divisor)
        of_chunk = -slope.sum(dim=2), slope.sum(dim=1), of_weights
        if totals is None:
            return of_chunk
        totals[0][c, q] = of_chunk[0]
        totals[1][c] += of_chunk[1]
        if with_weights:
            totals[2][c] += of_chunk[2]
    assert totals is not None
    return totals


def _tables_if_faster(request: _Request, ends: Tensor) -> Tables | None:
    """Return tables of bins that hold queries (C, Q) and keys (C, K), or None if the pairs must be summed directly.

    The scores of classes with temperatures of their own are multiplied by powers of two, which is exact, so that all
    temperatures are between 1 and 2 and the classes can share the width of their bins.
    """
    if not bool(ends[:2].isfinite().all()):
        return None
    queries, keys, weights, temperature, method, temperatures = request
    low, high, temperatures_on_host = ends
    both, factors = torch.cat([queries, keys], dim=1), None
    if temperatures is not None and temperatures.numel() == 1:
        temperature, temperatures = temperatures_on_host.item(), None
    if temperatures is not None:
        if queries.shape[0] > MOST_KERNELS:
            return None
        powers = torch.ldexp(torch.ones_like(low), 1 - torch.frexp(temperatures_on_host).exponent)  # [C]
        low, high, temperature = low * powers, high * powers, 1.0
        if not bool((low.isfinite() & high.isfinite()).all()):
            return None
        factors = powers.to(queries.device, non_blocking=True)
        both = both * factors[:, None]
    order = order_for(both, both.shape[1])
    bins = find_bins(both, low, high, temperature, order.fine)
    if bins is None:
        return None
    num_bins = bins.num_coarse * queries.shape[0] * weights.shape[2]
    costs = costs_of(queries.device)
    if method != "binned" and costs.pairs_are_faster(*request.sizes(), num_bins):
        return None
    size = queries.shape[1]
    lines = [
        Line(bins, scores) for scores in ((queries, keys) if factors is None else both.tensor_split([size], dim=1))
    ]
    if both.numel() <= costs.rows_at_once:  # few enough to keep: the tables use them several times
        places = zip(*(values.tensor_split([size], dim=1) for values in locate(bins, both, slice(None))))
        lines = [line._replace(places=places_of_line) for line, places_of_line in zip(lines, places)]
    return Tables(order, temperature if temperatures is None else temperatures, factors, *lines)


class Tables:
    """Bins, nodes and the kernel between them, for one call: moments of rows, sums at nodes, values at rows."""

    def __init__(
        self,
        order: Order,
        temperature: float | Tensor,  # in units of the scores; or (C,), one for each class
        factors: Tensor | None,  # (C,) powers of two; None for 1
        queries: Line,  # of the scores times the factors
        keys: Line,
    ) -> None:
        self.bins, self.order, self.queries, self.keys = queries.bins, order, queries, keys
        self.matrices = constants(order, queries.scores.device)
        if factors is not None:
            temperature = temperature * factors
        self.kernel = make_kernel(self.matrices, self.bins.width, temperature)
        if factors is not None:  # slopes per unit of the scores
            self.kernel = self.kernel._replace(slope=self.kernel.slope * factors.double()[:, None, None, None])
        self.ids = compact_ids(self.bins, self.kernel.reach)

    def moments(self, line: Line, weights: Tensor) -> Tensor:
        """Return the moments (p, C, n, B, F) of the scores of ``line`` with ``weights`` (C, N, n)."""
        columns = [line.moments(self.order.p, weight) for weight in weights.unbind(dim=2)]
        return torch.stack(columns, dim=2)[..., :-1].unflatten(-1, (self.bins.num_coarse, self.bins.fine))

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
        for n in range(count):
            line.read(table[:, :, n], result[..., n])
        return result


_sigmoid_sums = register(
    "sigmoid_sums",
    forward=_sums,
    fake=lambda queries, keys, weights, *_: (
        queries.new_empty(*queries.shape, weights.shape[-1]),
        torch.empty(3, queries.shape[0], dtype=queries.dtype, device="cpu"),
    ),
    saved=lambda inputs, outputs: ((*inputs[:3], inputs[5], outputs[1]), (*inputs[3:5], inputs[6])),
    backward=_gradients,
    fake_backward=lambda grad, queries, keys, weights, *values: (
        torch.empty_like(queries),
        torch.empty_like(keys),
        torch.empty_like(weights) if values[-1] else weights.new_empty(0),  # with_weights
    ),
)
