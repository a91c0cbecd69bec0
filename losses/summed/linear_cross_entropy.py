"""The sum of cross-entropies from hidden states, with gradients that are computed in the forward, block by block."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...distributed.torch_private import not_compiled
from ...errors import Words, expected, first_order_only
from ..rows import compute_dtype, has_float64
from .vocabulary import Gradients, Vocabulary, without_autocast

OF_ROWS = (
    "the number of tokens that count is known only when it runs, so it runs eagerly. Compile without fullgraph=True"
)


class _LinearCrossEntropy(torch.autograd.Function):
    """Return the sum over N rows of the losses of their targets.

    ::

        x [N, D]   weight [v, D]   bias [v]   targets [N]      v of the V rows of the vocabulary, those of this rank

        loss  = lse - (1 - s) z_t - s mean(z) + k lse^2         z [n, v] of a block of n rows, s smoothing, k z_loss
        dz    = (1 + 2 k lse) softmax(z) - (1 - s) [t] - s / V
        dx    = dz @ weight      dweight = dz.T @ x      dbias = sum dz

    The forward has z at hand, so it computes the gradients; the backward multiplies them by the incoming number, in
    place. To compute z again there would cost a third of the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vocabulary: Vocabulary,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        z_loss: float,
        smoothing: float,
    ) -> Tensor:
        ctx.call, ctx.witnesses = "causal_lm_loss", [x, weight, *([] if bias is None else [bias])]
        with without_autocast(x):
            x, weight, bias = vocabulary.factors(x, weight, bias)
            gradients = Gradients(ctx.needs_input_grad[1:4], x, weight, bias)
            losses = torch.empty(len(x), dtype=compute_dtype(x.dtype), device=x.device)
            for block in vocabulary.blocks(x):
                z = vocabulary.logits(x[block], weight, bias)
                slope = vocabulary.slope(z) if gradients.are_needed else None
                sums = vocabulary.sums(z, targets[block], total=smoothing > 0)
                log_mass = sums.mass.log()
                lse = log_mass + sums.largest
                losses[block] = log_mass - (1 - smoothing) * sums.picked
                losses[block] += z_loss * lse.square() - smoothing / vocabulary.size * sums.total
                if gradients.are_needed:
                    z.mul_(((1 + 2 * z_loss * lse) / sums.mass)[:, None]).sub_(smoothing / vocabulary.size)
                    vocabulary.pick_(z, targets[block], torch.full_like(lse, smoothing - 1))
                    gradients.add(block, z if slope is None else z.mul_(slope), x, weight)
            ctx.gradients = gradients.finished(vocabulary)
        return losses.sum(dtype=torch.float64 if has_float64(x.device) else None).to(losses.dtype)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            fix = "Its gradients are computed in the forward and given away, so retain_graph has no effect."
            raise RuntimeError(expected("causal_lm_loss", "one backward", Words("another"), fix))
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (None if each is None else each.mul_(grad) for each in gradients)
        dtypes = [tensor.dtype for tensor in ctx.witnesses]
        found = [None if each is None else each.to(dtype) for each, dtype in zip(scaled, [*dtypes, torch.float32])]
        return None, *found, None, None, None


@functools.partial(not_compiled, reason=OF_ROWS)
def linear_cross_entropy(
    vocabulary: Vocabulary,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    valid: Tensor,
    *,
    z_loss: float,
    label_smoothing: float,
) -> Tensor:
    """Return the sum of the losses of the ``targets`` (..., T) that are ``valid``, from ``hidden`` (..., T, D)."""
    x = hidden.flatten(0, -2)[valid.flatten()]
    if not torch.is_grad_enabled():
        x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    settings = targets[valid], z_loss, label_smoothing
    return _LinearCrossEntropy.apply(vocabulary, x, weight, bias, *settings)
