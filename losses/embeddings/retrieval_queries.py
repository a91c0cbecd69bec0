"""Rows as queries that rank all others, or other rows, in one process (``queries``) or over ranks (``SplitQueries``).

A few queries are computed at a time, and their gradient is added up at once, so the (M, M) similarities are never in
memory together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...distributed.exchange import Exchange
from ...distributed.header import each_or_raise
from ...errors import first_order_only
from ...kernels.registration import register
from ...kernels.smooth_ap.sums import smooth_ap_and_gradient
from .base import sum_of_blocks


def _sums_of_queries(
    unit: Tensor,
    labels: Tensor,
    temperature: float,
    with_grad: bool,
    begin: int,
    end: int,
    first: int,
    weight: Tensor | None,
    grad_values: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return one minus the smooth average precision of each row as a query, which queries are valid, and the gradient.

    A query is valid if it has a positive, which is another row with its label, and a negative.

    ======== ========= ====================================================================
    tensor   shape     meaning
    ======== ========= ====================================================================
    z        (M, D)    rows of length 1, float32 or float64
    y        (M,)      their labels, int64
    L        (M,)      loss of each query times its weight, float64; 0 where not valid, NaN if a similarity is
    G        (M, M)    dL_q / dx_qj, of which a few rows are in memory at a time
    dz       (M, D)    (g G) z + (g G)^T z, g the incoming gradient on the diagonal; None for 1
    ======== ========= ====================================================================

    Only the rows from ``begin`` to ``end`` are queries, of which L is not 0. They rank the rows from ``first`` on.
    """
    count = unit.shape[0]
    values, valid = unit.new_zeros(count, dtype=torch.float64), labels.new_zeros(count, dtype=torch.bool)
    factors = weight if grad_values is None else grad_values if weight is None else weight * grad_values
    ranked, ranked_labels = (unit[first:], labels[first:]) if first else (unit, labels)

    def block_loss(scores: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        block = slice(begin + place.start, begin + place.stop)
        same = labels[block, None] == ranked_labels
        others = torch.ones_like(same)
        for mask in (same, others) if first == 0 else ():
            mask.diagonal(block.start).fill_(False)  # a query does not rank itself
        arguments = scores, same, others, None, temperature, with_grad
        values[block], slope, valid[block] = smooth_ap_and_gradient(*arguments)
        if with_grad and factors is not None:
            slope *= factors[block, None].to(slope.dtype)  # [q, M]
        return values[block].sum(), slope

    needs, gradient = (with_grad, with_grad, False), unit.new_empty(0)
    _, of_queries, of_ranked = sum_of_blocks(unit[begin:end], ranked, unit.new_ones(()), needs, block_loss)
    if of_queries is not None and of_ranked is not None:
        gradient = F.pad(of_ranked, (0, 0, first, 0)) if first else of_ranked
        gradient[begin:end] += of_queries
    return values if weight is None else values * weight, valid, gradient


def _scaled_or_recomputed(
    grad_values: Tensor,
    unit: Tensor,
    labels: Tensor,
    counted: Tensor,
    gradient: Tensor,
    weight: Tensor | None,
    temperature: float,
    num_live: int,
    first: int,
) -> tuple[Tensor]:
    """Return dz: that of the forward, in which g is 1, times g, or computed again if g differs between queries."""
    factors = grad_values[counted]
    if factors.numel() == 0 or bool((factors == factors[0]).all()):
        return (gradient * factors[:1].sum().to(gradient.dtype),)
    return (_sums_of_queries(unit, labels, temperature, True, 0, num_live, first, weight, grad_values)[2],)


queries = register(
    "retrieval_smooth_ap",
    forward=_sums_of_queries,
    fake=lambda unit, labels, temperature, with_grad, *_: (
        *(unit.new_empty(unit.shape[0], dtype=dtype) for dtype in (torch.float64, torch.bool)),
        torch.empty_like(unit) if with_grad else unit.new_empty(0),
    ),
    saved=lambda inputs, out: (
        (inputs[0], inputs[1], out[1] | out[0].isnan(), out[2], inputs[7]),
        (inputs[2], inputs[5], inputs[6]),
    ),
    backward=_scaled_or_recomputed,
    fake_backward=lambda grad_values, unit, *saved: (torch.empty_like(unit),),
)


class Split(NamedTuple):
    """The ranks that share the queries, and how many rows each has: of the queries, and of a reference if any."""

    exchange: Exchange
    counts: Sequence[tuple[int, ...]]


class SplitQueries(torch.autograd.Function):
    """The same as ``queries``, where each rank computes the queries of its own rows.

    The losses are gathered, and a reduce-scatter gives each rank its rows of dz; those of others are 0. The forward
    makes both exchanges, so the backward communicates nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        split: Split,
        unit: Tensor,
        labels: Tensor,
        temperature: float,
        with_grad: bool,
        first: int,
        weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        exchange, (rows, *others) = split
        rank, ranked, width = exchange.rank, split.counts[-1], 1 + max(rows)
        begin, own_first = sum(rows[:rank]), first + sum(ranked[:rank])
        own_rows = slice(begin, begin + rows[rank])

        def compute() -> tuple[Tensor, Tensor]:
            arguments = unit, labels, temperature, with_grad, begin, own_rows.stop, first, weight, None
            values, valid, gradient = _sums_of_queries(*arguments)
            block = values.new_zeros(2, width)  # begins with a 0
            block[0, 1 : 1 + rows[rank]] = values[own_rows]
            block[1, 1 : 1 + rows[rank]] = valid[own_rows]
            return gradient, block.view(-1)

        gradient, blocks = each_or_raise(exchange, compute, 2 * width, unit.device, "the losses of the queries")
        of_ranks = zip(blocks.view(-1, 2, width).unbind(), rows)
        values, valid = torch.cat([block[:, 1 : 1 + count] for block, count in of_ranks], dim=1).unbind()
        valid = valid != 0
        if with_grad:
            summed = exchange.sum_own(gradient[first : first + sum(ranked)], ranked, "the gradients")
            gradient = torch.cat([gradient[own_rows], summed]) if others else summed
            ctx.save_for_backward(unit, labels, valid | values.isnan(), gradient, weight)
        ctx.own = [own_rows, *[slice(own_first, own_first + ranked[rank])] * len(others)]
        ctx.temperature, ctx.call, ctx.count, ctx.first = temperature, exchange.call, sum(rows), first
        ctx.mark_non_differentiable(valid)
        return values, valid

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_values: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        unit, labels, counted, gradient, weight = ctx.saved_tensors
        saved = unit, labels, counted, gradient, weight, ctx.temperature, ctx.count, ctx.first
        (grad,) = _scaled_or_recomputed(grad_values, *saved)
        if grad.shape != unit.shape:
            own, grad = grad.split([place.stop - place.start for place in ctx.own]), torch.zeros_like(unit)
            for place, part in zip(ctx.own, own):
                grad[place] = part
        return None, grad, None, None, None, None, None
