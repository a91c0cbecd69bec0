"""Weighted sums of sigmoids of score differences: the numerics under recall and partial AUC."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ..errors import check_choice, check_positive, expected
from .bins import Bins
from .registration import first_order_only
from .sigmoid_sums_binned import binned_gradients, binned_sums, find_bins

T = TypeVar("T")

METHODS = ("auto", "direct", "binned")

# What "auto" compares, in seconds on two cores, forward + backward: a pair; bins at all, each row, each coarse bin.
PAIR, FIXED, ROW, BIN = 4e-9, 1.3e-3, 13e-9, 4e-6

# Elements of one chunk of pairs: small enough to stay in a cache, or to fit a small accelerator.
CPU_CHUNK = 2**18
DEVICE_CHUNK = 2**25


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
    time for small ones.

    Args:
        queries: (Q,) or (C, Q), floating.
        keys: (K,) or (C, K), the dtype of ``queries``.
        weights: (K, n) or (C, K, n), the dtype of ``queries``.
        temperature: the width of the sigmoid in units of the scores, > 0.
        method: ``"direct"`` sums pair by pair, in chunks; ``"binned"`` sums by bins of scores, whose error is at the
            level of the dtype; ``"auto"`` takes the faster. Scores that are not finite, or that are so far apart that
            bins would be empty, are summed pair by pair in any case.

    Shape:
        output (Q, n), or (C, Q, n) when the inputs have a leading dimension of classes.

    Raises:
        TypeError: when an input is not a floating-point tensor, or the dtypes differ.
        ValueError: when shapes do not fit, ``temperature`` is not positive, or ``method`` is unknown.

    Numerics:
        Half precision is computed in float32 and returned in its own dtype. The slope is computed as
        ``sigmoid(d) * sigmoid(-d)``, exact to rounding in both tails. Gradients for queries, keys and weights are
        analytic; there is no second derivative.

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
    batched = queries.ndim == 2
    fits = queries.ndim in (1, 2) and keys.ndim == queries.ndim and weights.ndim == queries.ndim + 1
    if not fits or weights.shape[:-1] != keys.shape or keys.shape[:-1] != queries.shape[:-1]:
        shapes = tuple(tuple(tensor.shape) for tensor in (queries, keys, weights))
        what = "shapes (Q,), (K,), (K, n) or (C, Q), (C, K), (C, K, n)"
        raise ValueError(expected("queries, keys, weights", what, shapes))
    wide = torch.promote_types(queries.dtype, torch.float32)
    inputs = [tensor.to(wide) if batched else tensor.to(wide)[None] for tensor in (queries, keys, weights)]
    summed = _operator if torch.compiler.is_compiling() else _SigmoidSums.apply
    sums = summed(*inputs, float(temperature), method).to(queries.dtype)
    return sums if batched else sums[0]


def exact(function: Callable[..., T]) -> Callable[..., T]:
    """Keep autocast out of ``function``: it would turn the products under a sum back into half precision."""

    @functools.wraps(function)
    def guarded(first: Tensor, *args: Any) -> T:
        if not torch.is_autocast_enabled(first.device.type):
            return function(first, *args)
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *args)

    return guarded


def chunk_size(tensor: Tensor, pairs_per_item: int) -> int:
    """Return how many items of ``pairs_per_item`` pairs make one chunk on the device of ``tensor``, at least 1."""
    limit = CPU_CHUNK if tensor.device.type == "cpu" else DEVICE_CHUNK
    return max(1, limit // max(1, pairs_per_item))


def _chunks(queries: Tensor, keys: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of classes and of queries whose pairs with all keys make one chunk."""
    (num_classes, num_queries), num_keys = queries.shape, keys.shape[1]
    classes = chunk_size(queries, num_queries * num_keys)
    step = chunk_size(queries, num_keys) if classes == 1 else max(1, num_queries)
    for first_class in range(0, num_classes, classes):
        for first in range(0, num_queries, step):
            yield slice(first_class, first_class + classes), slice(first, first + step)


def _differences(queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
    return (keys[:, None, :] - queries[:, :, None]).div_(temperature)  # [c, q, K]


def sigmoid_and_slope(difference: Tensor) -> tuple[Tensor, Tensor]:
    """Return s(d) and s'(d) = s(d) s(-d), exact to rounding in both tails; ``difference`` is overwritten.

    With e = s(-|d|) <= 1/2, s(d) is e or 1 - e, and s'(d) = e - e^2: one exponential serves both.
    """
    e = difference.copysign(-1.0).sigmoid_()
    sigmoid = difference.gt_(0).sub_(e).abs_()
    return sigmoid, e.addcmul_(e, e, value=-1)


def _bins_if_faster(queries: Tensor, keys: Tensor, weights: Tensor, temperature: float, method: str) -> Bins | None:
    """Return bins for both, or None where pairs are to be summed one by one."""
    num_pairs, num_rows = queries.numel() * keys.shape[1], (queries.numel() + keys.numel()) * weights.shape[2]
    if method == "direct" or num_pairs == 0 or (method == "auto" and num_pairs * PAIR < FIXED + ROW * num_rows):
        return None
    bins = find_bins(queries, keys, temperature)
    if bins is None or method == "binned":
        return bins
    tables = BIN * bins.num_coarse * queries.shape[0] * weights.shape[2]
    return bins if num_pairs * PAIR > FIXED + ROW * num_rows + tables else None


def _is_worth_splitting(queries: Tensor, keys: Tensor, weights: Tensor, method: str) -> bool:
    """Return True where one class alone might go into bins: unlike several, it may have bins outside of its window."""
    if method == "direct" or queries.shape[0] == 1:
        return False
    rows = (queries.shape[1] + keys.shape[1]) * weights.shape[2]
    return queries.shape[1] * keys.shape[1] * PAIR > FIXED + ROW * rows


def _each_class(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(1) for tensor in tensors))


@exact
def _sums(queries: Tensor, keys: Tensor, weights: Tensor, temperature: float, method: str) -> Tensor:
    bins = _bins_if_faster(queries, keys, weights, temperature, method)
    if bins is not None:
        return binned_sums(queries, keys, weights, temperature, bins)
    if _is_worth_splitting(queries, keys, weights, method):
        return torch.cat([_sums(*one, temperature, method) for one in _each_class(queries, keys, weights)])
    sums = queries.new_empty(*queries.shape, weights.shape[-1])
    for c, q in _chunks(queries, keys):
        sums[c, q] = torch.sigmoid(_differences(queries[c, q], keys[c], temperature)) @ weights[c]
    return sums


@exact
def _gradients(
    grad: Tensor, queries: Tensor, keys: Tensor, weights: Tensor, temperature: float, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and weights.

    With s' = s (1 - s) and G = s' (grad @ weights^T) / tau: dq = -sum_k G, dk = sum_q G, dw = s^T @ grad.
    """
    bins = _bins_if_faster(queries, keys, weights, temperature, method)
    if bins is not None:
        return binned_gradients(grad, queries, keys, weights, temperature, bins)
    if _is_worth_splitting(queries, keys, weights, method):
        of_each = (_gradients(*one, temperature, method) for one in _each_class(grad, queries, keys, weights))
        grad_queries, grad_keys, grad_weights = map(torch.cat, zip(*of_each))
        return grad_queries, grad_keys, grad_weights
    grads = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(weights)
    for c, q in _chunks(queries, keys):
        sigmoid, slope = sigmoid_and_slope(_differences(queries[c, q], keys[c], temperature))
        slope *= (grad[c, q] @ weights[c].transpose(1, 2)).div_(temperature)
        grads[0][c, q] = -slope.sum(dim=2)
        grads[1][c] += slope.sum(dim=1)
        grads[2][c] += sigmoid.transpose(1, 2) @ grad[c, q]
    return grads


class _SigmoidSums(torch.autograd.Function):
    """The sums (C, Q, n), with the analytic gradients of queries, keys and weights."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        sums = _sums(*arguments)
        _setup_context(ctx, arguments, sums)
        return sums

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(grad.contiguous(), *ctx.saved_tensors, ctx.temperature, ctx.method), None, None


# The same as operators, which a compiled graph holds without looking inside. Called eagerly they take 0.2 ms more.
_operator = torch.library.custom_op("fullrank::sigmoid_sums", _sums, mutates_args=())
_backward_operator = torch.library.custom_op("fullrank::sigmoid_sums_backward", _gradients, mutates_args=())


@_operator.register_fake
def _(queries: Tensor, keys: Tensor, weights: Tensor, temperature: float, method: str) -> Tensor:
    return queries.new_empty(*queries.shape, weights.shape[-1])


@_backward_operator.register_fake
def _(
    grad: Tensor, queries: Tensor, keys: Tensor, weights: Tensor, temperature: float, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(weights)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.temperature, ctx.method = inputs[3:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward_operator(grad.contiguous(), *ctx.saved_tensors, ctx.temperature, ctx.method), None, None


_operator.register_autograd(_backward, setup_context=_setup_context)
