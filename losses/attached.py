"""A loss with gradients that were computed with it: its backward communicates nothing, so no rank can miss it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import anchor_of, first_order_only


class _Attached(torch.autograd.Function):
    """A value with the gradients of its inputs.

    ======== =================== =========================================
    tensor   shape               meaning
    ======== =================== =========================================
    value    (C,) or ()          the loss, equal on all ranks
    x_i      (C, N), or any      input i of this rank
    g_i      of x_i              dvalue / dx_i, row by row for (C,) values
    dx_i     of x_i              k * dvalue * g_i
    ======== =================== =========================================
    """

    @staticmethod
    def forward(
        ctx: Any, call: str, scale: int, value: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor
    ) -> Tensor:
        ctx.call, ctx.scale, ctx.count = call, scale, len(gradients)
        ctx.save_for_backward(*gradients, *inputs[len(gradients) :])  # those are anchors
        return value.clone()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors[: ctx.count]
        slope = (grad * ctx.scale)[:, None] if grad.ndim else grad * ctx.scale
        found = (None if one is None else slope.to(one.dtype) * one for one in gradients)
        return None, None, None, None, *found, *[None] * (len(ctx.saved_tensors) - ctx.count)


def attach(
    call: str, value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], scale: int = 1
) -> Tensor:
    """Return ``value`` with ``gradients`` of ``inputs``, which the backward multiplies by ``scale``."""
    anchors = [anchor_of(one) for one in inputs if one.requires_grad]
    attached: Tensor = _Attached.apply(call, scale, value, gradients, *inputs, *anchors)
    return attached
