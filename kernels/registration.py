"""Backward functions that cannot be differentiated again, and say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order_only(backward: Backward) -> Backward:
    """Make the gradients that ``backward`` returns raise RuntimeError where they are back-propagated through.

    ``torch.autograd.function.once_differentiable`` does so only where the incoming gradient asks for one itself. That
    of a loss does not, so the gradients would be constants there, and a gradient penalty would add nothing, silently.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # on while a backward runs only with create_graph=True
            return found
        witness = torch.zeros((), requires_grad=True)
        return tuple(None if one is None else _NoSecondDerivative.apply(one, witness) for one in found)

    return guarded


class _NoSecondDerivative(torch.autograd.Function):
    """The identity of a gradient; its own gradient is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, witness: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "a ranking loss: expected a first derivative, got a second one. Its gradient cannot be differentiated "
            "again; compute the penalty on another output of the model."
        )
