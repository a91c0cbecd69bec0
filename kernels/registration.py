"""How a kernel with an analytic gradient becomes a differentiable function, in an eager and in a compiled form.

Eager code calls a ``torch.autograd.Function``. A graph of ``torch.compile`` calls an operator of ``torch.library``, and
the compiler does not trace into it. An eager call of that operator would take 0.2 ms longer. :func:`register` makes
both forms from one description. In both, a second derivative raises RuntimeError.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import Backward, anchor_of, first_order_only

T = TypeVar("T")
Outputs = tuple[Tensor, ...]


def register(
    name: str,
    *,
    forward: Callable[..., Tensor | Outputs],
    fake: Callable[..., Tensor | Outputs],
    saved: Callable[[tuple[Any, ...], Any], tuple[tuple[Tensor, ...], tuple[Any, ...]]],
    backward: Callable[..., Outputs],
    fake_backward: Callable[..., Outputs] | None = None,
) -> Callable[..., Any]:
    """Return ``forward`` as a differentiable function of the same positional arguments.

    Only the first output is differentiable. Autocast is off inside ``forward`` and ``backward``.

    Args:
        name: name of the operator in the namespace ``fullrank``.
        forward: the computation. Its annotations are the schema of the operator.
        fake: returns empty tensors in the shapes and dtypes of the outputs of ``forward``, for the compiler.
        saved: takes the inputs and the output of ``forward``; returns the tensors and the other values that
            ``backward`` needs.
        backward: takes the gradient of the first output, then what ``saved`` returned; returns the gradients of the
            leading inputs. The remaining inputs have no gradient.
        fake_backward: the same as ``fake`` for ``backward``. With it ``backward`` is an operator too, which it must be
            if it looks at values; without it the compiler traces into ``backward``.
    """
    forward, backward = exact(forward), exact(backward)
    num_inputs = len(inspect.signature(forward).parameters)
    operator = torch.library.custom_op(f"fullrank::{name}", forward, mutates_args=())
    operator.register_fake(fake)
    compiled_backward: Callable[..., Any] = backward
    if fake_backward is not None:
        backward_operator = torch.library.custom_op(f"fullrank::{name}_backward", backward, mutates_args=())
        backward_operator.register_fake(fake_backward)
        compiled_backward = backward_operator

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Tensor | Outputs, anchor: Tensor | None = None
    ) -> None:
        tensors, ctx.values = saved(inputs, output)
        ctx.num_saved = len(tensors)
        ctx.save_for_backward(*tensors, *([] if anchor is None else [anchor]))
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros for the outputs without a gradient

    def gradients(compute: Callable[..., Outputs]) -> Backward:
        @first_order_only
        def of_inputs(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            found = () if grad is None else compute(grad, *ctx.saved_tensors[: ctx.num_saved], *ctx.values)
            return *found, *[None] * (num_inputs - len(found))

        return of_inputs

    eager_backward = gradients(backward)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, anchor: Tensor | None, *inputs: Any) -> Tensor | Outputs:
            output = forward(*inputs)
            setup_context(ctx, inputs, output, anchor)
            return output

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
            return None, *eager_backward(ctx, grad, *others)

    operator.register_autograd(gradients(compiled_backward), setup_context=setup_context)

    def differentiable(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*inputs)
        # A second derivative with respect to the first input finds a path to it, and raises, through the anchor.
        anchor = anchor_of(inputs[0]) if inputs[0].requires_grad and torch.is_grad_enabled() else None
        return Eager.apply(anchor, *inputs)

    return differentiable


def exact(function: Callable[..., T]) -> Callable[..., T]:
    """Turn autocast off inside ``function``, which would otherwise compute its matrix products in half precision."""

    @functools.wraps(function)
    def guarded(first: Tensor, *args: Any) -> T:
        if not torch.is_autocast_enabled(first.device.type):
            return function(first, *args)
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *args)

    return guarded
