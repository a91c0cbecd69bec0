"""A value whose gradients were computed with it: the backward multiplies, and communicates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import first_order_only
from .registration import refuse_forward_mode
from .torch_private import may_overwrite


class _WithGradients(torch.autograd.Function):
    """A value with the gradients of its inputs.

    ======== =================== =====================================
    tensor   shape               meaning
    ======== =================== =====================================
    value    (C,) or ()          the loss, equal on all ranks
    x_i      (M, C), or any      input i
    g_i      of x_i              dvalue / dx_i; of (C,) column by column
    dx_i     of x_i              dvalue * g_i
    ======== =================== =====================================
    """

    @staticmethod
    def forward(ctx: Any, call: str, computed: tuple[Tensor, Sequence[Tensor | None]], *inputs: Tensor) -> Tensor:
        value, gradients = computed  # in a tuple, in which autograd does not look for inputs
        ctx.call, ctx.witnesses = call, inputs
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if gradient is None else scaled(gradient, grad) for gradient in ctx.saved_tensors]
        return None, None, *gradients

    jvp = staticmethod(refuse_forward_mode)


def with_gradients(call: str, value: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor) -> Tensor:
    """Return ``value`` with these ``gradients`` of the ``inputs``; ``call`` is named in the error of a second one."""
    attached: Tensor = _WithGradients.apply(call, (value, gradients), *inputs)
    return attached


def scaled(gradient: Tensor, grad: Tensor) -> Tensor:
    """Return ``gradient``, which a forward has saved, times ``grad``: one number, or (C,) for a gradient (..., C)."""
    if grad.numel() != 1:
        return gradient * grad.to(gradient.dtype)
    if may_overwrite(gradient, grad):
        if grad.is_cpu and grad.item() == 1:  # as from loss.backward()
            return gradient
        return gradient.mul_(grad.reshape(()))  # new pages would take longer
    return gradient * grad.reshape(())  # a scalar needs no conversion
