"""Log-probabilities of given tokens from hidden states: what policy gradients, preferences and distillation need."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...distributed.torch_private import not_compiled
from ...errors import check_flag, check_int, check_positive, check_temperature, first_order_only
from ..arguments import completed
from ..rows import compute_dtype
from .causal_lm import causal_lm_loss
from .vocabulary import (
    OF_ROWS,
    Gradients,
    Rows,
    Vocabulary,
    at_least,
    check_labels,
    check_range,
    prepared,
    read_head,
    without_autocast,
)


class _LinearLogProbs(torch.autograd.Function):
    """Return the log-probabilities of the targets of N rows, and on request the entropies of the rows: (1 or 2, N)::

        z [n, v] of a block, p = softmax(z)      g, h [n] the incoming gradients, H [n] the entropies

        log_prob = z_t - lse      H = lse - sum p z
        dz = g [t] - p (g + h (log p + H))

    The incoming gradients differ from row to row, so the backward computes z again.
    """

    @staticmethod
    def forward(
        ctx: Any, vocabulary: Vocabulary, x: Tensor, weight: Tensor, bias: Any, targets: Tensor, has_entropy: bool
    ) -> Tensor:
        ctx.call, ctx.vocabulary, given = "token_log_probs", vocabulary, (x, weight, bias)
        with without_autocast(x):
            x, weight, bias = vocabulary.factors(*given)
            ctx.dtype, found = x.dtype, x.new_zeros(4, len(x), dtype=compute_dtype(x.dtype))
            for block in vocabulary.blocks(x):
                sums = vocabulary.sums(vocabulary.logits(x[block], weight, bias), targets[block], moment=has_entropy)
                log_mass = sums.mass.log()
                entropy = log_mass - sums.moment / sums.mass
                found[:, block] = torch.stack([sums.picked - log_mass, entropy, sums.largest, log_mass])
        ctx.save_for_backward(*given, targets, found)
        return found[: 1 + has_entropy].clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, targets, (_, entropy, largest, log_mass) = ctx.saved_tensors
        vocabulary, grad = ctx.vocabulary, grad / ctx.vocabulary.temperature
        with without_autocast(targets):
            factors: list[Any] = [None if each is None else each.to(ctx.dtype) for each in given]
            gradients, x = Gradients(ctx.needs_input_grad[1:4], *factors), factors[0]
            for block in vocabulary.blocks(x):
                z = vocabulary.logits(x[block], *factors[1:])
                slope, amount = vocabulary.slope(z), grad[0, block, None]
                z.sub_(largest[block, None]).sub_(log_mass[block, None])
                if len(grad) == 2:
                    amount = amount + grad[1, block, None] * (at_least(z) + entropy[block, None])
                z = vocabulary.pick_(z.exp_().mul_(amount).neg_(), targets[block], grad[0, block])
                gradients.add(block, z if slope is None else z.mul_(slope), *factors[:2])
            found = gradients.finished(vocabulary)
        return None, *(None if each is None else each.to(one.dtype) for each, one in zip(found, given)), None, None


@functools.partial(not_compiled, reason=OF_ROWS)
@completed(causal_lm_loss)
def token_log_probs(
    hidden: Tensor,
    tokens: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    ignore_index: int = -100,
    validate_args: bool = True,
) -> Tensor:
    r"""Return the log-probability of each token from the hidden state that predicts it, without the logits.

    Equal to ``F.linear(hidden, weight, bias).div(temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]``.

    A few rows of logits exist at a time, and the backward computes them again: the memory is about that of the hidden
    states and of the gradient of the weight.

    Args:
        hidden: (..., T, D); the one at t scores ``tokens[..., t]``: for a causal model pass ``hidden[:, :-1]`` and
            ``tokens[:, 1:]``.
        tokens: (..., T) token indices; ``ignore_index`` where none is needed, as in the prompt: it is not projected.
        temperature: > 0, of the sampling. The logits are divided by it, after the soft cap.
        return_entropy: return the entropies of the distributions over tokens too, with their gradient, as in
            ``log_probs, entropy = token_log_probs(..., return_entropy=True)``.

    Returns:
        (..., T), float32, or float64 for float64 tensors; 0 for ``ignore_index``. With ``return_entropy`` (2, ..., T).

    Raises:
        TypeError, ValueError: as :func:`causal_lm_loss`.

    Degenerate: without a token that is needed all gradients are 0.
    Numerics: half precision is computed in float32. A second derivative raises.
    Distributed: nothing travels. The ranks of a ``weight`` sharded on V agree on the rows, reduce the maxima and the
        sums of each block of rows, and in the backward the gradient of the hidden states once.

    Example:
        >>> import torch
        >>> hidden, weight = torch.zeros(1, 2, 3), torch.zeros(4, 3)
        >>> token_log_probs(hidden, torch.tensor([[2, -100]]), weight=weight)
        tensor([[-1.3863,  0.0000]])
    """

    def prepare() -> Rows:
        check_temperature(temperature)
        if softcap is not None:
            check_positive("softcap", softcap)
        check_int("ignore_index", ignore_index)
        check_flag("return_entropy", return_entropy)
        settings = {"softcap": softcap, "temperature": temperature}
        vocabulary, own_weight, own_bias = read_head("token_log_probs", hidden, weight, bias, **settings)
        targets = check_labels("tokens", tokens, hidden, "hidden").to(torch.int64)
        valid = targets != ignore_index
        if validate_args:
            check_range("tokens", targets, valid, vocabulary.size, f"ignore_index={ignore_index}")
        return Rows(vocabulary, hidden, own_weight, own_bias, targets, valid)

    rows = prepared("token_log_probs", weight, prepare)
    x, targets, places = rows.counted()
    found = _LinearLogProbs.apply(rows.vocabulary, x, rows.weight, rows.bias, targets, return_entropy)
    filled = found.new_zeros(len(found), tokens.numel()).index_copy(1, places, found).unflatten(1, tokens.shape)
    return filled if return_entropy else filled[0]
