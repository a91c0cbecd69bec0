"""Kernels with analytic gradients as differentiable functions.

:func:`register` makes three forms of a function from its forward and its backward:

- Eager code calls a ``torch.autograd.Function``.
- A graph of ``torch.compile``, and tensors on the meta device, take an operator of ``torch.library``, into which the
  compiler does not trace. In eager code it would add 0.2 ms to each call.
- The transforms of ``torch.func`` call a ``torch.autograd.Function`` with a separate ``setup_context``, which they
  require. In eager code it would add 20 us to each call.

In all forms a second derivative, forward-mode differentiation and ``torch.vmap`` raise RuntimeError.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import Backward, first_order_only, second_derivative
from .torch_private import func_transforms_are_active, is_batched, may_overwrite

T = TypeVar("T")
Outputs = tuple[Tensor, ...]

# The operators read values, so CUDA graphs cannot capture them. The tag makes the compiler split its graph around them.
OPAQUE: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)}

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
    """Return ``forward`` as a differentiable function of the same positional arguments, of the first output alone.

    ``forward`` and ``backward`` run under :func:`exact`.

    Args:
        name: name of the operator in the namespace ``fullrank``.
        forward: the computation. Its annotations are the schema of the operator.
        fake: returns empty tensors with the shapes and dtypes of the outputs of ``forward``.
        saved: takes the inputs and the output of ``forward``; returns the tensors and the other values that
            ``backward`` needs. One of the tensors must be an input or the first output, so that a second derivative
            reaches the inputs through it and raises.
        backward: takes the gradient of the first output, then what ``saved`` returned; returns the gradients of the
            leading inputs. The remaining inputs have no gradient.
        fake_backward: the same as ``fake`` for a ``backward`` that reads values: it makes an operator of it too.
    """
    compute, differentiate = exact(forward), exact(backward)
    num_inputs = len(inspect.signature(forward).parameters)
    operator = torch.library.custom_op(f"fullrank::{name}", compute, mutates_args=(), **OPAQUE)
    operator.register_fake(fake)
    compiled_backward: Callable[..., Any] = differentiate
    if fake_backward is not None:
        operator_name = f"fullrank::{name}_backward"
        compiled_backward = torch.library.custom_op(operator_name, differentiate, mutates_args=(), **OPAQUE)
        compiled_backward.register_fake(fake_backward)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor | Outputs) -> None:
        tensors, ctx.values = saved(inputs, output)
        ctx.save_for_backward(*tensors)
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros for the outputs without a gradient

    def of_context(gradients_of: Callable[..., Outputs]) -> Backward:
        def gradients_of_inputs(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            gradients = () if grad is None else gradients_of(grad, *ctx.saved_tensors, *ctx.values)
            return *gradients, *[None] * (num_inputs - len(gradients))

        return gradients_of_inputs

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor | Outputs:
            output = compute(*inputs)
            keep(ctx, inputs, output)
            return output

        backward = staticmethod(first_order_only(of_context(differentiate)))
        jvp = staticmethod(refuse_forward_mode)

    operator.register_autograd(first_order_only(of_context(compiled_backward)), setup_context=keep)

    class Gradients(torch.autograd.Function):
        """The gradients as a function of what was saved. Transforms always build its graph, and its backward raises."""

        forward = staticmethod(differentiate)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
            pass

        @staticmethod
        def backward(*_: Any) -> Any:
            raise second_derivative("a ranking loss")

        jvp = staticmethod(refuse_forward_mode)
        vmap = staticmethod(_refuse_vmap)

    class Transformed(torch.autograd.Function):
        forward = staticmethod(compute)
        setup_context = staticmethod(keep)
        backward = staticmethod(of_context(Gradients.apply))
        jvp = staticmethod(refuse_forward_mode)
        vmap = staticmethod(_refuse_vmap)

    def differentiable(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or inputs[0].is_meta:
            return operator(*inputs)
        if func_transforms_are_active():
            return Transformed.apply(*inputs)
        return Eager.apply(*inputs)

    return differentiable


def refuse_forward_mode(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_FORWARD_MODE)


def _refuse_vmap(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_VMAP)


def check_not_batched(*tensors: Tensor | None) -> None:
    """Raise RuntimeError if one of ``tensors`` is a batch of ``torch.vmap``: no branch may depend on its values."""
    if torch.compiler.is_compiling() or not func_transforms_are_active():
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and is_batched(tensor):
            raise RuntimeError(_VMAP)


def exact(function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function`` with matrix products of full precision, in spite of autocast and of torch's settings."""

    @functools.wraps(function)
    def guarded(first: Tensor, *args: Any) -> T:
        precision: AbstractContextManager[Any] = nullcontext()
        if not torch.compiler.is_compiling():
            try:
                # A call in another thread may have set "highest" until it ends, so this call must count too.
                must_set = _calls > 0 or torch.get_float32_matmul_precision() != "highest"
            except RuntimeError:  # torch raises if the newer settings, torch.backends.*, have lowered the precision
                must_set = True
            precision = full_products() if must_set else precision
        is_cast = not first.is_meta and torch.is_autocast_enabled(first.device.type)
        with precision, torch.autocast(first.device.type, enabled=False) if is_cast else nullcontext():
            return function(first, *args)

    return guarded


_FULL = ("none", "ieee")  # values of torch.backends.*.fp32_precision that compute float32 products in float32
_lock = threading.Lock()
_calls = 0  # running calls of :func:`full_products`
_before: list[tuple[Any, str]] = []  # the settings that the last of them restores, with their values


@contextmanager
def full_products() -> Iterator[None]:
    """Compute float32 matrix products in float32, as with ``torch.set_float32_matmul_precision("highest")``."""
    global _calls
    with _lock:
        if _calls == 0:
            backends: tuple[Any, ...] = (
                torch.backends.cuda.matmul,
                torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]  # it replaces its module by an object
            )
            _before[:] = [(one, one.fp32_precision) for one in backends if one.fp32_precision not in _FULL]
            for backend, _ in _before:
                backend.fp32_precision = "ieee"
        _calls += 1
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            for backend, value in _before if _calls == 0 else []:
                # "none" inherits from torch.backends.fp32_precision, which may have been the origin of the value.
                backend.fp32_precision = "none"
                if backend.fp32_precision != value:
                    backend.fp32_precision = value


def with_gradients(call: str, value: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor) -> Tensor:
    """Return ``value`` as a function of ``inputs`` with ``gradients``; ``call`` is for the error of a second one."""
    result: Tensor = _WithGradients.apply(call, (value, gradients), *inputs)
    return result


class _WithGradients(torch.autograd.Function):
    """A value, () or (C,), whose gradients are known: of each input in its shape, (M, C) column by column for (C,)."""

    @staticmethod
    def forward(ctx: Any, call: str, computed: tuple[Tensor, Sequence[Tensor | None]], *inputs: Tensor) -> Tensor:
        value, gradients = computed  # a tuple, because autograd would take plain tensors for inputs
        ctx.call, ctx.witnesses = call, inputs
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if gradient is None else scaled(gradient, grad) for gradient in ctx.saved_tensors]
        return None, None, *gradients

    jvp = staticmethod(refuse_forward_mode)


def scaled(gradient: Tensor, grad: Tensor) -> Tensor:
    """Return ``gradient``, saved by a forward, times ``grad``: one number, or (C,) for a gradient (..., C)."""
    if grad.numel() != 1:
        return gradient * grad.to(gradient.dtype)
    if may_overwrite(gradient, grad):
        if grad.is_cpu and grad.item() == 1:  # as from loss.backward()
            return gradient
        return gradient.mul_(grad.reshape(()))  # fresh memory pages would take longer
    return gradient * grad.reshape(())  # a scalar needs no conversion
