"""How a kernel with an analytic gradient becomes a differentiable function, in each form that torch asks for.

:func:`register` makes three forms from one description:

- Eager code calls a ``torch.autograd.Function``.
- A graph of ``torch.compile`` calls an operator of ``torch.library``, and the compiler does not trace into it. Tensors
  on the meta device, which have shapes only, take the same operator. An eager call of it would take 0.2 ms longer.
- The transforms of ``torch.func`` call a ``torch.autograd.Function`` with a separate ``setup_context``. They require
  that form. An eager call of it would take 20 us longer.

In all forms a second derivative raises RuntimeError. So do forward-mode differentiation and ``torch.vmap``.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import Backward, first_order_only, second_derivative
from .torch_private import func_transforms_are_active, is_batched, may_overwrite

T = TypeVar("T")
Outputs = tuple[Tensor, ...]

# The operators read values, so no CUDA graph can hold them. With the tag, a compiled graph is cut around them.
_has_tags = "tags" in inspect.signature(torch.library.custom_op).parameters and hasattr(torch.Tag, "cudagraph_unsafe")
OPAQUE: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if _has_tags else {}

_FORWARD_MODE = (
    "a ranking loss: expected reverse-mode differentiation, got forward mode. Use backward(), torch.autograd.grad, "
    "torch.func.grad or torch.func.vjp instead of dual tensors, torch.func.jvp and torch.func.jacfwd."
)
_VMAP = (
    "a ranking loss: expected plain tensors, got a batch of torch.vmap. One call handles many classes as columns of "
    "(N, C), and many queries with indexes=; else loop over the batch."
)


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

    Only the first output is differentiable. ``forward`` and ``backward`` run as :func:`exact` says.

    Args:
        name: name of the operator in the namespace ``fullrank``.
        forward: the computation. Its annotations are the schema of the operator.
        fake: returns empty tensors in the shapes and dtypes of the outputs of ``forward``, for the compiler and for
            tensors on the meta device.
        saved: takes the inputs and the output of ``forward``; returns the tensors and the other values that
            ``backward`` needs. One of the tensors must be an input or the first output: a second derivative finds a
            path to the inputs through it, and raises.
        backward: takes the gradient of the first output, then what ``saved`` returned; returns the gradients of the
            leading inputs. The remaining inputs have no gradient.
        fake_backward: the same as ``fake`` for ``backward``. With it ``backward`` is an operator too, which it must be
            if it looks at values; without it the compiler traces into ``backward``.
    """
    forward, backward = exact(forward), exact(backward)
    num_inputs = len(inspect.signature(forward).parameters)
    operator = torch.library.custom_op(f"fullrank::{name}", forward, mutates_args=(), **OPAQUE)
    operator.register_fake(fake)
    compiled_backward: Callable[..., Any] = backward
    if fake_backward is not None:
        backward_operator = torch.library.custom_op(f"fullrank::{name}_backward", backward, mutates_args=(), **OPAQUE)
        backward_operator.register_fake(fake_backward)
        compiled_backward = backward_operator

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | Outputs) -> None:
        tensors, ctx.values = saved(inputs, output)
        ctx.save_for_backward(*tensors)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros for the outputs without a gradient

    def gradients(compute: Callable[..., Outputs]) -> Backward:
        @first_order_only
        def of_inputs(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            found = () if grad is None else compute(grad, *ctx.saved_tensors, *ctx.values)
            return *found, *[None] * (num_inputs - len(found))

        return of_inputs

    eager_backward = gradients(backward)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor | Outputs:
            output = forward(*inputs)
            setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(eager_backward)
        jvp = staticmethod(refuse_forward_mode)

    operator.register_autograd(gradients(compiled_backward), setup_context=setup_context)
    transformed = _for_transforms(forward, saved, backward, num_inputs)

    def differentiable(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or inputs[0].is_meta:
            return operator(*inputs)
        if func_transforms_are_active():
            return transformed(*inputs)
        return Eager.apply(*inputs)

    return differentiable


def _for_transforms(
    forward: Callable[..., Tensor | Outputs],
    saved: Callable[[tuple[Any, ...], Any], tuple[tuple[Tensor, ...], tuple[Any, ...]]],
    backward: Callable[..., Outputs],
    num_inputs: int,
) -> Callable[..., Any]:
    """Return ``forward`` as a function that the transforms of ``torch.func`` can differentiate once.

    They differentiate with ``create_graph=True`` at all times, so that cannot be what gives a second derivative away,
    as in :func:`first_order_only`. Here the gradients are a function of their own, also of the first input of
    ``forward``, and the derivative of that function raises.
    """

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(first_input: Tensor, *args: Any) -> Outputs:
            return backward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
            pass

        @staticmethod
        def backward(*_: Any) -> Any:
            raise second_derivative("a ranking loss")

        jvp = staticmethod(refuse_forward_mode)
        vmap = staticmethod(_refuse_vmap)

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Tensor | Outputs:
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor | Outputs) -> None:
            tensors, ctx.values = saved(inputs, output)
            ctx.save_for_backward(inputs[0], *tensors)
            if isinstance(output, tuple):
                ctx.mark_non_differentiable(*output[1:])

        @staticmethod
        def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
            first_input, *tensors = ctx.saved_tensors
            found = Gradients.apply(first_input, grad, *tensors, *ctx.values)
            return *found, *[None] * (num_inputs - len(found))

        jvp = staticmethod(refuse_forward_mode)
        vmap = staticmethod(_refuse_vmap)

    return Transformed.apply


def refuse_forward_mode(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_FORWARD_MODE)


def _refuse_vmap(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_VMAP)


def check_not_batched(*tensors: Tensor | None) -> None:
    """Raise RuntimeError when one of ``tensors`` is a batch of ``torch.vmap``, whose values no branch may depend on."""
    if torch.compiler.is_compiling() or not func_transforms_are_active():
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and is_batched(tensor):
            raise RuntimeError(_VMAP)


def exact(function: Callable[..., T]) -> Callable[..., T]:
    """Turn off inside ``function`` what would round its matrix products.

    That is autocast, which computes them in half precision, and :func:`torch.set_float32_matmul_precision` below
    ``"highest"``, which computes float32 products from TF32 or bfloat16 parts.
    """

    @functools.wraps(function)
    def guarded(first: Tensor, *args: Any) -> T:
        if not torch.compiler.is_compiling():
            try:
                # While another thread has raised the precision it reads "highest", until that thread restores it.
                is_rounded = _calls > 0 or torch.get_float32_matmul_precision() != "highest"
            except RuntimeError:  # torch raises if the newer settings, torch.backends.*, have lowered the precision
                is_rounded = True
            if is_rounded:
                with full_products():
                    return without_autocast(first, *args)
        if first.is_meta or not torch.is_autocast_enabled(first.device.type):
            return function(first, *args)
        return without_autocast(first, *args)

    def without_autocast(first: Tensor, *args: Any) -> T:
        if first.is_meta:
            return function(first, *args)
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *args)

    return guarded


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


_FULL = ("none", "ieee")  # values of torch.backends.*.fp32_precision with which float32 products are float32
_lock = threading.Lock()
_calls = 0  # that run with full products because of :func:`full_products`
_before: list[tuple[Any, str]] = []  # what they restore: settings and their values


@contextmanager
def full_products() -> Iterator[None]:
    """Compute float32 matrix products in float32, as with ``torch.set_float32_matmul_precision("highest")``."""
    global _calls
    with _lock:
        if _calls == 0:
            found: tuple[Any, ...] = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
            settings = [setting for setting in found if hasattr(setting, "fp32_precision")]  # from torch 2.9 on
            if settings:
                _before[:] = [(one, one.fp32_precision) for one in settings if one.fp32_precision not in _FULL]
                for setting, _ in _before:
                    setting.fp32_precision = "ieee"
            else:
                _before[:] = [(None, torch.get_float32_matmul_precision())]
                torch.set_float32_matmul_precision("highest")
        _calls += 1
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            for setting, value in _before if _calls == 0 else []:
                if setting is None:
                    torch.set_float32_matmul_precision(value)
                    continue
                setting.fp32_precision = "none"  # inherits from the settings above it, as torch.backends.fp32_precision
                if setting.fp32_precision != value:
                    setting.fp32_precision = value
