"""Exception classes, the wording of errors and warnings, checks of plain arguments, and a guard for backwards."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MAX_LENGTH = 200  # characters of a value that a message quotes
_LEAST_TEMPERATURE = 2.0**-126  # the smallest normal number of float32: the inverse of a smaller one may be infinite

# A warning points at the caller, the first line outside of these packages.
_CALLED_PACKAGES = (__name__.partition(".")[0], "torch", "torchmetrics")


class RankError(Exception):
    """An error that every rank of a group has raised, with the same class and text.

    A rank has failed a check, or the ranks disagree. The text names the ranks and the reasons, at most four of each.
    All ranks can continue after it. A collective that fails because a rank has died raises a plain RuntimeError, and
    not necessarily on every rank.
    """

    agreement: tuple[int, int] | None = None  # that raised it: id of the group, number of the agreement in this process


class RankValueError(RankError, ValueError):
    """A wrong value or shape on some ranks, or arguments that differ between the ranks."""


class RankTypeError(RankError, TypeError):
    """A wrong type on some ranks."""


class RankRuntimeError(RankError, RuntimeError):
    """Another error on some ranks, or state that differs between the ranks."""


class Words(str):
    """A text that messages quote in full and without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe(value: object) -> str:
    """Return ``value`` as messages show it: arrays by type, dtype and shape, anything else by its repr, cut if long."""
    if isinstance(value, Words):
        return str(value)
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{'an' if name[0] in 'aeio' else 'a'} {name} tensor of shape {tuple(value.shape)}"
    if isinstance(shape, tuple) and shape and not isinstance(value, type):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return f"{kind} of {'' if dtype is None else f'dtype {dtype} and '}shape {shape}"
    text = repr(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 4]} ... ({type(value).__name__})"


def expected(name: str, what: str, value: object, fix: str = "") -> str:
    """Return ``"{name}: expected {what}, got {value}. {fix}"``, the form of the package's error messages."""
    return f"{name}: expected {what}, got {describe(value)}.{' ' + fix if fix else ''}"


def is_from_a_check(error: BaseException) -> bool:
    """Return True if a check of this package raised ``error``, whose text then explains it without a traceback."""
    trace, name = error.__traceback__, ""
    while trace is not None:
        name, trace = str(trace.tb_frame.f_globals.get("__name__")), trace.tb_next
    return name.partition(".")[0] == _CALLED_PACKAGES[0] and ": expected " in str(error)


def warn(text: str) -> None:
    """Give a UserWarning that points at the first line outside this package and torch, however deep the call is."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _CALLED_PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def check_choice(name: str, value: Any, choices: tuple[str | None, ...]) -> Any:
    """Return ``value`` unchanged, or raise ValueError when it is not one of ``choices``."""
    if value not in choices:
        raise ValueError(expected(name, f"one of {', '.join(map(repr, choices))}", value))
    return value


def check_flag(name: str, value: bool) -> bool:
    """Return ``value`` unchanged, or raise TypeError when it is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(expected(name, "True or False", value))
    return value


def check_number(name: str, value: float) -> float:
    """Return ``value`` unchanged, or raise TypeError when it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fix = f"Pass float({name})." if hasattr(value, "__float__") and not isinstance(value, bool) else ""
        raise TypeError(expected(name, "a number", value, fix))
    return value


def check_between(name: str, value: float, low: float, high: float, *, above: bool = False) -> float:
    """Return ``value`` unchanged, or raise unless it is a number in [low, high]; ``above`` excludes ``low`` itself."""
    if not low <= check_number(name, value) <= high or (above and value == low):
        raise ValueError(expected(name, f"a number in {'(' if above else '['}{low}, {high}]", value))
    return value


def check_share(name: str, value: float) -> float:
    """Return ``value`` unchanged, or raise when it is not a number strictly between 0 and 1."""
    if not 0 < check_number(name, value) < 1:
        raise ValueError(expected(name, "a number strictly between 0 and 1", value, of_percent(value)))
    return value


def of_percent(value: float) -> str:
    """Return the advice for a share that was probably given in percent; an empty text for other numbers."""
    return f"{value:g} % is {value / 100:g}." if 1 < value <= 100 else ""


def check_positive(name: str, value: float) -> float:
    """Return ``value`` unchanged, or raise when it is not a finite number > 0."""
    if not 0 < check_number(name, value) < math.inf:  # not math.isfinite, which torch.compile does not trace
        raise ValueError(expected(name, "a finite number > 0", value))
    return value


def check_temperature(temperature: float | None, automatic: bool = False, *, name: str = "temperature") -> float | None:
    """Return ``temperature`` unchanged, or raise unless it is a finite normal number > 0, or None and ``automatic``."""
    if temperature is None and automatic:
        return None
    if temperature is None:
        fix = "This loss has no automatic temperature: pass a number > 0."
        raise TypeError(expected(name, "a number", temperature, fix))
    if check_positive(name, temperature) < _LEAST_TEMPERATURE:
        fix = "Scale the scores up instead."
        raise ValueError(expected(name, f"a number >= {_LEAST_TEMPERATURE:.2g}", temperature, fix))
    return temperature


def check_amount(name: str, value: float) -> float:
    """Return ``value`` unchanged, or raise when it is not a finite number >= 0."""
    if not 0 <= check_number(name, value) < math.inf:
        raise ValueError(expected(name, "a finite number >= 0", value))
    return value


def check_int(name: str, value: int) -> int:
    """Return ``value`` unchanged, or raise TypeError when it is not an int."""
    if isinstance(value, bool) or not isinstance(value, int):
        fix = f"Pass int({name})." if hasattr(value, "__index__") and not isinstance(value, bool) else ""
        raise TypeError(expected(name, "an int", value, fix))
    return value


def check_tensor(name: str, value: object, what: str = "a tensor") -> None:
    """Raise TypeError when ``value`` is not a dense tensor."""
    if isinstance(value, tuple):  # such as what gather_rows returns
        raise TypeError(expected(name, what, Words(f"a tuple of length {len(value)}"), f"Index it: {name}[0]."))
    if not isinstance(value, Tensor):
        entries = getattr(value, "tolist", lambda: value)()  # of an array, or of a column of a table
        is_text = isinstance(entries, list) and any(isinstance(entry, str) for entry in entries)
        numbers = f"numpy.unique({name}, return_inverse=True)[1]" if is_text else name
        raise TypeError(expected(name, what, value, f"Use torch.as_tensor({numbers})."))
    if value.is_nested:  # its shape may not exist, so that the message cannot quote it
        fix = f"Pass its rows, torch.cat({name}.unbind()), and one row of the other tensors for each."
        raise TypeError(expected(name, "a dense tensor", Words("a nested one"), fix))
    if value.layout is not torch.strided:
        got = Words(f"one of layout {value.layout}")
        raise TypeError(expected(name, "a dense tensor", got, f"Use {name}.to_dense()."))


def check_count(name: str, value: int, least: int) -> int:
    """Return ``value`` unchanged, or raise when it is not an int >= ``least``."""
    check_int(name, value)
    if value < least:
        raise ValueError(expected(name, f"an int >= {least}", value))
    return value


Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order_only(backward: Backward) -> Backward:
    """Make a second derivative through the gradients that ``backward`` returns raise RuntimeError.

    ``torch.autograd.function.once_differentiable`` raises only if the incoming gradient requires a gradient. That of a
    loss is a constant, so a gradient penalty would silently add nothing.

    The returned gradients are connected to the saved tensors that require a gradient, or to ``ctx.witnesses`` of a
    function that saves no inputs because they may change in place. ``ctx.call`` names the call in the message.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # in a backward, gradients are enabled only with create_graph=True
            return backward(ctx, *grads)
        saved = *ctx.saved_tensors, *getattr(ctx, "witnesses", ())
        connected = [tensor for tensor in saved if tensor is not None and tensor.requires_grad]
        with torch.no_grad():
            gradients = backward(ctx, *grads)
        witnesses = connected or [torch.zeros((), requires_grad=True)]
        call = getattr(ctx, "call", "a ranking loss")
        return tuple(None if grad is None else _NoSecondDerivative.apply(grad, call, *witnesses) for grad in gradients)

    return guarded


class _NoSecondDerivative(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, call: str, *witnesses: Tensor) -> Tensor:
        ctx.call = call
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise second_derivative(ctx.call)


def second_derivative(call: str) -> RuntimeError:
    """Return the exception for a second derivative through ``call``."""
    return RuntimeError(
        f"{call}: expected a first derivative, got a second one. Its gradient cannot be differentiated again; compute "
        "the penalty on another output of the model."
    )
