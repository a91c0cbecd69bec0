"""Weighted sums of sigmoids of score differences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import check_choice, check_positive, expected
from .bins import Bins, add_moments, chunks, compact_ids, evaluate, find_bins, locate, num_lanes
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
from .registration import check_not_batched, register
from .torch_private import func_transforms_are_active

METHODS = ("auto", "direct", "binned")
MOST_KERNELS = 64  # classes with a kernel of their own at a time, up to 430 KiB each


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
    check_positive("temperature", temperature)
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
    wide = torch.promote_types(queries.dtype, torch.float32)
    inputs = [tensor.to(wide) if batched else tensor.to(wide)[None] for tensor in (queries, keys, weights)]
    sums: Tensor = _sigmoid_sums(*inputs, temperature, method, None, _is_variable(weights))[0].to(queries.dtype)
    return sums if batched else sums[0]


def sigmoid_sums_of_classes(queries: Tensor, keys: Tensor, weights: Tensor, temperatures: Tensor) -> Tensor:
    """Return the sums (C, Q, n) of :func:`sigmoid_sums` with a temperature for each class.

    Scores that were divided by their temperature first would be rounded where they are far from 0.

    Args:
        queries: (C, Q), float32 or float64.
        keys: (C, K), the dtype of ``queries``.
        weights: (C, K, n), the dtype of ``queries``.
        temperatures: (C,), > 0, detached.
    """
    widths = temperatures.to(queries.dtype)
    sums: Tensor = _sigmoid_sums(queries, keys, weights, 1.0, "auto", widths, _is_variable(weights))[0]
    return sums


def _is_variable(weights: Tensor) -> bool:
    """Return whether ``weights`` may need a gradient, which takes as long as that of the scores."""
    return weights.requires_grad or func_transforms_are_active()


def _sums(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    temperature: float,
    method: str,
    temperatures: Tensor | None,
    with_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Return the sums (C, Q, n), and the ends of the scores on the host, (3, C), for the backward.

    ``temperatures`` (C,) replace ``temperature`` where they are given. ``with_weights`` is for the backward alone.
    """
    ends = _ends(queries, keys, weights, method, temperatures)
    sums = _sums_of_some(queries, keys, weights, temperature, method, temperatures, ends)
    # Where nothing has been read, in a shape that the compiler knows.
    nothing = torch.full((3, queries.shape[0]), math.nan, dtype=queries.dtype, device="cpu")
    return sums, nothing if ends is None else ends


def _sums_of_some(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    temperature: float,
    method: str,
    temperatures: Tensor | None,
    ends: Tensor | None,
) -> Tensor:
    tables = _tables_if_faster(queries, keys, weights, temperature, method, temperatures, ends)
    if tables is not None:
        return tables.read(tables.sigmoids(tables.moments(keys, weights)), queries)
    parts = _num_parts(queries, keys, weights, method, temperatures)
    if parts > 1:
        of_each = _split(parts, temperatures, queries, keys, weights)
        return torch.cat([_sums(q, k, w, temperature, method, t, False)[0] for t, q, k, w in of_each])
    sums = None
    for c, q in chunks_of_pairs(queries, keys):
        divisor = _divisor(temperature, temperatures, c)
        some = torch.sigmoid(_differences(queries[c, q], keys[c], divisor)) @ weights[c]
        if some.shape[:2] == queries.shape:  # one chunk
            return some
        sums = queries.new_empty(*queries.shape, weights.shape[-1]) if sums is None else sums
        sums[c, q] = some
    return queries.new_zeros(*queries.shape, weights.shape[-1]) if sums is None else sums


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
    """Return the gradients of queries, keys and weights. ``ends`` are those of the forward, NaN where not known.

    That of the weights is empty unless ``with_weights``.

    With s' = s (1 - s) and G = s' (grad @ weights^T) / tau: dq = -sum_k G, dk = sum_q G, dw = s^T @ grad.
    """
    grad = grad.contiguous()
    known = _ends(queries, keys, weights, method, temperatures) if bool(ends.isnan().any()) else ends
    tables = _tables_if_faster(queries, keys, weights, temperature, method, temperatures, known)
    if tables is not None:
        of_keys, of_queries = tables.moments(keys, weights), tables.moments(queries, grad)
        grad_queries = -(tables.read(tables.slopes(of_keys), queries) * grad).sum(dim=2)
        grad_keys = (tables.read(tables.slopes(of_queries), keys) * weights).sum(dim=2)
        if not with_weights:
            return grad_queries, grad_keys, weights.new_empty(0)
        return grad_queries, grad_keys, tables.read(tables.mirrored_sigmoids(of_queries), keys)
    parts = _num_parts(queries, keys, weights, method, temperatures)
    if parts > 1:
        of_each = _split(parts, temperatures, grad, queries, keys, weights)
        unknown = ends.new_full((3, 1), math.nan)
        found = (_gradients(g, q, k, w, t, unknown, temperature, method, with_weights) for t, g, q, k, w in of_each)
        grad_queries, grad_keys, grad_weights = map(torch.cat, zip(*found))
        return grad_queries, grad_keys, grad_weights
    grads = None
    for c, q in chunks_of_pairs(queries, keys):
        divisor = _divisor(temperature, temperatures, c)
        difference = _differences(queries[c, q], keys[c], divisor)
        if with_weights:
            sigmoid, slope = sigmoid_and_slope(difference)
            of_weights = sigmoid.transpose(1, 2) @ grad[c, q]
        else:
            slope, of_weights = slope_of(difference), weights.new_empty(0)
        slope *= (grad[c, q] @ weights[c].transpose(1, 2)).div_(divisor)
        some = -slope.sum(dim=2), slope.sum(dim=1), of_weights
        if some[0].shape == queries.shape:  # one chunk
            return some
        grads = grads or _zeros(queries, keys, weights, with_weights)
        grads[0][c, q] = some[0]
        grads[1][c] += some[1]
        if with_weights:
            grads[2][c] += some[2]
    return grads or _zeros(queries, keys, weights, with_weights)


def _zeros(queries: Tensor, keys: Tensor, weights: Tensor, with_weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    of_weights = torch.zeros_like(weights) if with_weights else weights.new_empty(0)
    return torch.zeros_like(queries), torch.zeros_like(keys), of_weights


# Pairs or bins


def _ends(queries: Tensor, keys: Tensor, weights: Tensor, method: str, temperatures: Tensor | None) -> Tensor | None:
    """Return the lowest and the highest score of each class and its temperature, (3, C) on the host.

    None where the pairs are summed directly in any case. Waits for the device, once for all of them.
    """
    num_pairs = queries.numel() * keys.shape[1]
    num_rows = (queries.numel() + keys.numel()) * weights.shape[2]
    if method == "direct" or num_pairs == 0:
        return None
    if method == "auto" and costs_of(queries.device).pairs_are_faster(num_pairs, num_rows):
        return None
    low, high = (
        torch.minimum(queries.amin(dim=1), keys.amin(dim=1)),
        torch.maximum(queries.amax(dim=1), keys.amax(dim=1)),
    )
    return torch.stack([low, high, torch.ones_like(low) if temperatures is None else temperatures]).cpu()


def _tables_if_faster(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    temperature: float,
    method: str,
    temperatures: Tensor | None,
    ends: Tensor | None,
) -> _Tables | None:
    """Return tables of bins that hold queries (C, Q) and keys (C, K), or None if the pairs are to be summed directly.

    With a temperature for each of several classes, all classes have the same bins on a line of their own, on which the
    scores are multiplied by a power of two, which is exact, so that the temperatures are between 1 and 2.
    """
    if ends is None or not bool(ends[:2].isfinite().all()):
        return None
    costs, num_pairs = costs_of(queries.device), queries.numel() * keys.shape[1]
    num_rows = (queries.numel() + keys.numel()) * weights.shape[2]
    both, factors = torch.cat([queries, keys], dim=1), None
    if temperatures is not None and temperatures.numel() == 1:
        temperature, temperatures = ends[2].item(), None
    low, high = ends[0], ends[1]
    if temperatures is not None:
        if queries.shape[0] > MOST_KERNELS:
            return None
        powers = torch.ldexp(torch.ones_like(low), 1 - torch.frexp(ends[2]).exponent)  # [C]
        low, high, temperature = low * powers, high * powers, 1.0
        if not bool((low.isfinite() & high.isfinite()).all()):
            return None
        factors = powers.to(queries.device, non_blocking=True)
        both = both * factors[:, None]
    order = order_for(both, both.shape[1])
    bins = find_bins(both, low, high, temperature, order.fine)
    if bins is None:
        return None
    bins = bins._replace(first=bins.first.to(queries.device, non_blocking=True))
    num_bins = bins.num_coarse * queries.shape[0] * weights.shape[2]
    if method != "binned" and costs.pairs_are_faster(num_pairs, num_rows, num_bins):
        return None
    return _Tables(bins, order, temperature if temperatures is None else temperatures, factors, queries.device)


def _num_parts(queries: Tensor, keys: Tensor, weights: Tensor, method: str, temperatures: Tensor | None) -> int:
    """Return into how many parts the classes are split, 1 if they stay together and their pairs are summed directly.

    Fewer classes may have bins where more have not: up to ``MOST_KERNELS`` may have a kernel each, and a single class
    may have bins outside of its window.
    """
    costs, num_classes = costs_of(queries.device), queries.shape[0]
    if method == "direct" or num_classes == 1:
        return 1
    num_pairs, num_rows = queries.shape[1] * keys.shape[1], (queries.shape[1] + keys.shape[1]) * weights.shape[2]
    if temperatures is not None and num_classes > MOST_KERNELS:
        together = costs.pairs_are_faster(num_classes * num_pairs, num_classes * num_rows)
        return 1 if together else math.ceil(num_classes / MOST_KERNELS)
    return 1 if costs.pairs_are_faster(num_pairs, num_rows) else num_classes


def _split(parts: int, temperatures: Tensor | None, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the classes of the temperatures and of the tensors in ``parts`` parts."""
    size = math.ceil(tensors[0].shape[0] / parts)
    of_each = [None] * parts if temperatures is None else temperatures.split(size)
    return zip(of_each, *(tensor.split(size) for tensor in tensors))


# Pairs


def chunk_size(tensor: Tensor, pairs_per_item: int) -> int:
    """Return how many items of ``pairs_per_item`` pairs make one chunk on the device of ``tensor``, at least 1."""
    return max(1, costs_of(tensor.device).pairs_at_once // max(1, pairs_per_item))


def chunks_of_pairs(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of classes and of queries whose pairs with all keys make one chunk."""
    (num_classes, num_queries), num_keys = queries.shape, keys.shape[1]
    classes = chunk_size(queries, num_queries * num_keys)
    step = chunk_size(queries, num_keys) if classes == 1 else max(1, num_queries)
    for first_class in range(0, num_classes, classes):
        for first in range(0, num_queries, step):
            yield slice(first_class, first_class + classes), slice(first, first + step)


def _divisor(temperature: float, temperatures: Tensor | None, classes: slice) -> float | Tensor:
    """Return what the differences (c, q, K) of some classes are divided by."""
    return temperature if temperatures is None else temperatures[classes, None, None]


def _differences(queries: Tensor, keys: Tensor, temperature: float | Tensor) -> Tensor:
    return (keys[:, None, :] - queries[:, :, None]).div_(temperature)  # [c, q, K]


def sigmoid_and_slope(difference: Tensor) -> tuple[Tensor, Tensor]:
    """Return s(d) and s'(d) = s(d) s(-d), exact to rounding in both tails; ``difference`` is overwritten.

    With e = s(-|d|) <= 1/2, s(d) is e or 1 - e, and s'(d) = e - e^2, so one exponential is enough for both.
    """
    e = difference.copysign(-1.0).sigmoid_()
    sigmoid = difference.gt_(0).sub_(e).abs_()
    return sigmoid, e.addcmul_(e, e, value=-1)


def slope_of(difference: Tensor) -> Tensor:
    """Return the second result of :func:`sigmoid_and_slope` alone; ``difference`` is overwritten."""
    e = difference.copysign_(-1.0).sigmoid_()
    return e.addcmul_(e, e, value=-1)


# Bins


class _Tables:
    """Bins, nodes and the kernel between them, for one call: moments of rows, sums at nodes, values at rows."""

    def __init__(
        self, bins: Bins, order: Order, temperature: float | Tensor, factors: Tensor | None, device: torch.device
    ) -> None:
        """Compute the kernel.

        Args:
            bins: bins of the scores, or of the scores times the factors.
            order: numbers of fine bins and of nodes.
            temperature: in units of the scores; or (C,), one for each class.
            factors: (C,) powers of two; None for 1.
            device: that of the scores.
        """
        self.bins, self.order, self.factors = bins, order, factors
        self.matrices = constants(order, device)
        if factors is not None:
            temperature = temperature * factors
        self.kernel = make_kernel(self.matrices, bins.width, temperature)
        if factors is not None:  # slopes per unit of the scores
            self.kernel = self.kernel._replace(slope=self.kernel.slope * factors.double()[:, None, None, None])
        self.ids = compact_ids(bins, self.kernel.reach)

    def moments(self, scores: Tensor, weights: Tensor) -> Tensor:
        """Return the moments (p, C, n, B, F) of ``scores`` (C, N) with ``weights`` (C, N, n)."""
        num_classes, _, count = weights.shape
        lanes = num_lanes(scores, self.bins.num_fine)
        shape = self.order.p, num_classes * lanes, count, self.bins.num_fine
        table = torch.zeros(shape, dtype=torch.float64, device=scores.device)
        for c, m in chunks(scores):
            index, u = self._locate(scores, c, m)
            for n in range(count):
                add_moments(table[:, c if lanes == 1 else slice(None), n], index, u, weights[c, m, n])
        table = table if lanes == 1 else table.sum(dim=1, keepdim=True)
        return table.unflatten(-1, (self.bins.num_coarse, self.bins.fine))

    def _locate(self, scores: Tensor, classes: slice, rows: slice) -> tuple[Tensor, Tensor]:
        some = scores[classes, rows]
        return locate(self.bins, some if self.factors is None else some * self.factors[classes, None], classes)

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

    def read(self, values: Tensor, scores: Tensor) -> Tensor:
        """Return (C, N, n): the functions ``values`` (C, n, B, F p) at ``scores`` (C, N)."""
        num_classes, count = values.shape[:2]
        table = coefficients(values, self.matrices, scores.dtype).view(self.order.p, num_classes, count, -1)
        result = scores.new_empty(*scores.shape, count)
        for c, m in chunks(scores):
            index, u = self._locate(scores, c, m)
            for n in range(count):
                result[c, m, n] = evaluate(table[:, c, n], index, u)
        return result


# The differentiable function


def _fake_sums(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    temperature: float,
    method: str,
    temperatures: Tensor | None,
    with_weights: bool,
) -> tuple[Tensor, Tensor]:
    ends = torch.empty(3, queries.shape[0], dtype=queries.dtype, device="cpu")
    return queries.new_empty(*queries.shape, weights.shape[-1]), ends


def _fake_gradients(
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
    of_weights = torch.empty_like(weights) if with_weights else weights.new_empty(0)
    return torch.empty_like(queries), torch.empty_like(keys), of_weights


_sigmoid_sums = register(
    "sigmoid_sums",
    forward=_sums,
    fake=_fake_sums,
    saved=lambda inputs, outputs: ((*inputs[:3], inputs[5], outputs[1]), (*inputs[3:5], inputs[6])),
    backward=_gradients,
    fake_backward=_fake_gradients,
)
