"""Smooth-AP pair by pair on the host, in numpy, which starts an operation several times as fast as torch.

With E = exp(x / tau) a sigmoid is a quotient, and so is its slope::

    s_ij = E_j R_ij,    s'_ij = E_j E_i R_ij^2,    R_ij = 1 / (E_i + E_j)

Both are exact to rounding in both tails. One reciprocal takes the place of an exponential for each pair, and what is
summed over j or over i, see ``soft_ranks_pairs.py``, is a product with the two columns E_j of positives and negatives.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from .costs import costs_of
from .pairs import Problem

Array = Any
Group = tuple[Any, tuple[Array, ...], Array, Array]
# The most temperatures between two scores of a class for which every E and R^2 is a normal number.
_FARTHEST = {numpy.dtype("float32"): 85.0, numpy.dtype("float64"): 700.0}
_MEMORY_BYTES = 2**19
_kept = threading.local()
_FEW_ROWS = 4096  # float32 sums over more rows would lose digits


def smooth_ap_of_one_class(
    scores: Tensor, positive: Tensor, rows: Array, temperature: float, with_grad: bool
) -> tuple[Tensor, Tensor] | None:
    """Do the same as :func:`smooth_ap_on_host` for C = 1, with equal weights of the positives ``rows`` (P,)."""
    group = 0, (), rows, numpy.full(len(rows), 1 / len(rows))
    return _sums(scores, positive, None, temperature, with_grad, lambda _: [group])


def smooth_ap_on_host(problem: Problem, with_grad: bool) -> tuple[Tensor, Tensor] | None:
    """Return the loss (C,) float64 and its gradient (C, M), empty unless ``with_grad``.

    None if the scores of a class are too far apart, or not finite.
    """
    scores, positive, mask, *_, temperature = problem
    member = None if mask is None else mask.numpy()
    return _sums(scores, positive, member, temperature, with_grad, partial(_groups, problem))


@numpy.errstate(all="ignore")
def _sums(
    scores: Tensor,
    positives: Tensor,
    member: Array | None,
    temperature: float,
    with_grad: bool,
    groups: Callable[[int], Iterable[Group]],
) -> tuple[Tensor, Tensor] | None:
    x, positive = scores.detach().numpy(), positives.numpy()
    inside = True if member is None else member
    low = numpy.minimum.reduce(x, axis=1, keepdims=True, initial=math.inf, where=inside)
    high = numpy.maximum.reduce(x, axis=1, keepdims=True, initial=-math.inf, where=inside)
    span = float((high - low).max()) / temperature
    dtype = x.dtype if x.shape[1] <= _FEW_ROWS and span <= _FARTHEST[x.dtype] else numpy.dtype(float)
    if not span <= _FARTHEST[dtype]:
        return None
    middle = (0.5 * low + 0.5 * high).astype(float)
    loss, gradient = numpy.zeros(len(x)), numpy.zeros_like(x) if with_grad else numpy.empty(0, x.dtype)
    limit = 8 * costs_of(scores.device).pairs_at_once // dtype.itemsize
    for classes, g, rows, share in groups(limit):
        some = x[classes] if member is None else numpy.where(member[classes], x[classes], low[classes])
        keys = some - middle[classes]  # [g, M], and so in the following; without the g for a single class
        keys /= temperature
        keys = numpy.exp(keys, keys).astype(dtype, copy=False)
        columns = numpy.empty((*keys.shape[:-1], 2, keys.shape[-1]), dtype)
        numpy.multiply(keys, positive[classes], columns[..., 0, :])
        numpy.subtract(keys if member is None else keys * member[classes], columns[..., 0, :], columns[..., 1, :])
        step = max(1, limit // keys.size)
        for first in range(0, rows.shape[-1], step):
            row, weight = rows[..., first : first + step], share[..., first : first + step]  # [g, p]
            own = keys[(*g, row)]
            pairs = _memory_for((*own.shape, x.shape[1]), dtype)  # [g, p, M]
            numpy.add(own[..., None], keys[..., None, :], pairs)
            numpy.divide(1, pairs, pairs)
            pairs[(*g, numpy.arange(row.shape[-1]), row)] = 0.0  # j = i does not count
            ranks = columns @ pairs.swapaxes(-1, -2)  # [g, 2, p]
            ranks[..., 0, :] += 1.0  # r and n
            total = ranks[..., 0, :] + ranks[..., 1, :]
            weight = weight / total
            loss[classes] += (weight * ranks[..., 1, :]).sum(axis=-1)
            if with_grad:
                weight *= own
                weight /= total
                ranks *= weight[..., None, :]
                pairs *= pairs
                of_keys, of_own = ranks @ pairs, columns @ pairs.swapaxes(-1, -2)  # [g, 2, M], [g, 2, p]
                of_keys *= columns[..., ::-1, :]
                of_own *= ranks[..., ::-1, :]
                push = of_keys[..., 0, :] - of_keys[..., 1, :]
                # Of a row that is listed twice the last entry counts. The others are padding.
                push[(*g, row)] -= of_own[..., 1, :] - of_own[..., 0, :]
                push /= temperature
                gradient[classes] = push if first == 0 else gradient[classes] + push
    return torch.from_numpy(loss), torch.from_numpy(gradient)


def _memory_for(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return memory that the thread keeps: new pages would take longer than the sums."""
    size = math.prod(shape)
    if size * dtype.itemsize > _MEMORY_BYTES:
        return numpy.empty(shape, dtype)
    if not hasattr(_kept, "memory"):
        _kept.memory = numpy.empty(_MEMORY_BYTES, numpy.uint8)
    return _kept.memory.view(dtype)[:size].reshape(shape)


def _groups(problem: Problem, limit: int) -> Iterator[Group]:
    """Yield classes, their numbers within the group, the rows of their positives (g, p), and the shares of these.

    Classes with similar numbers of positives are together, with at most ``limit`` pairs if there are several. Padding
    has a share of 0, stands in front, and repeats the first positive of its class.
    """
    rows, share = problem.row_of.numpy(), problem.share.numpy()
    num_classes, num_rows = problem.scores.shape
    if num_classes == 1:
        yield 0, (), rows, share
        return
    counts = numpy.bincount(problem.class_of.numpy(), minlength=num_classes)
    ends, order = counts.cumsum()[:, None], counts.argsort()[::-1]
    first, num_present = 0, numpy.count_nonzero(counts)
    while first < num_present:
        width = counts[order[first]]
        some = order[first : min(num_present, first + max(1, limit // (width * num_rows)))]
        place, begin = numpy.arange(-width, 0) + ends[some], ends[some] - counts[some, None]
        filled = numpy.maximum(place, begin)
        yield some, (numpy.arange(len(some))[:, None],), rows[filled], share[filled] * (place >= begin)
        first += len(some)
