"""Weighted sums of sigmoids of score differences: the numerics under every pooled loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ..distributed.errors import expected

# Elements of one chunk of pairs: small enough to stay in a cache, or to fit a small accelerator.
CPU_CHUNK = 2**18
DEVICE_CHUNK = 2**25


def sigmoid_sums(
    queries: Tensor,
    keys: Tensor,
    weights: Tensor,
    temperature: float,
    *,
    method: Literal["auto", "direct"] = "auto",
) -> Tensor:
    r"""Sum sigmoids of the scaled differences between keys and queries.

    .. math:: y_{qn} = \sum_k \sigma\!\left(\frac{x_k - x_q}{\tau}\right) w_{kn}

    Equal to ``torch.sigmoid((keys - queries[:, None]) / temperature) @ weights``, in chunks of pairs: O(Q K) time,
    O(Q + K) memory.

    Args:
        queries: (Q,) or (C, Q), floating.
        keys: (K,) or (C, K), the dtype of ``queries``.
        weights: (K, n) or (C, K, n), the dtype of ``queries``.
        temperature: the width of the sigmoid in units of the scores, > 0.
        method: ``"direct"`` sums pair by pair; ``"auto"`` chooses.

    Shape:
        output (Q, n), or (C, Q, n) when the inputs have a leading dimension of classes.

    Raises:
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
    if method not in ("auto", "direct"):
        raise ValueError(expected("method", "'auto' or 'direct'", method))
    if not temperature > 0:
        raise ValueError(expected("temperature", "a number > 0", temperature))
    batched = queries.ndim == 2
    fits = queries.ndim in (1, 2) and keys.ndim == queries.ndim and weights.ndim == queries.ndim + 1
    if not fits or weights.shape[:-1] != keys.shape or keys.shape[:-1] != queries.shape[:-1]:
        shapes = tuple(tuple(tensor.shape) for tensor in (queries, keys, weights))
        what = "shapes (Q,), (K,), (K, n) or (C, Q), (C, K), (C, K, n)"
        raise ValueError(expected("queries, keys, weights", what, shapes))
    wide = torch.promote_types(queries.dtype, torch.float32)
    inputs = [tensor.to(wide) if batched else tensor.to(wide)[None] for tensor in (queries, keys, weights)]
    sums = _direct(*inputs, float(temperature)).to(queries.dtype)
    return sums if batched else sums[0]


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


@torch.library.custom_op("fullrank::sigmoid_sums", mutates_args=())
def _direct(queries: Tensor, keys: Tensor, weights: Tensor, temperature: float) -> Tensor:
    sums = queries.new_empty(*queries.shape, weights.shape[-1])
    for c, q in _chunks(queries, keys):
        sums[c, q] = torch.sigmoid(_differences(queries[c, q], keys[c], temperature)) @ weights[c]
    return sums


@_direct.register_fake
def _(queries: Tensor, keys: Tensor, weights: Tensor, temperature: float) -> Tensor:
    return queries.new_empty(*queries.shape, weights.shape[-1])


@torch.library.custom_op("fullrank::sigmoid_sums_backward", mutates_args=())
def _direct_backward(
    grad: Tensor, queries: Tensor, keys: Tensor, weights: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and weights.

    With s' = s (1 - s) and G = s' (grad @ weights^T) / tau: dq = -sum_k G, dk = sum_q G, dw = s^T @ grad.
    """
    grads = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(weights)
    for c, q in _chunks(queries, keys):
        difference = _differences(queries[c, q], keys[c], temperature)
        sigmoid = torch.sigmoid(difference)
        slope = sigmoid * torch.sigmoid(difference.neg_()) / temperature
        slope *= grad[c, q] @ weights[c].transpose(1, 2)
        grads[0][c, q] = -slope.sum(dim=2)
        grads[1][c] += slope.sum(dim=1)
        grads[2][c] += sigmoid.transpose(1, 2) @ grad[c, q]
    return grads


@_direct_backward.register_fake
def _(
    grad: Tensor, queries: Tensor, keys: Tensor, weights: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(weights)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.temperature = inputs[3]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_direct_backward(grad.contiguous(), *ctx.saved_tensors, ctx.temperature), None


_direct.register_autograd(_backward, setup_context=_setup_context)
