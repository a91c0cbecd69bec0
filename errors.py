"""The wording of every error and warning, the checks of plain arguments, and how a check runs before a collective."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

_LONGEST = 200  # characters of a value that a message quotes

# What a warning is not about: the caller's line is the first one outside of these.
_NOT_THE_CALLER = (__name__.partition(".")[0], "torch", "torchmetrics")


class Words(str):
    """A text that messages quote as it is, in full."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe(value: object) -> str:
    """Return ``value`` as a message should show it: arrays by type, dtype and shape, other content cut when long."""
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
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ... ({type(value).__name__})"


def expected(name: str, what: str, value: object, fix: str = "") -> str:
    """Return ``"{name}: expected {what}, got {value}. {fix}"``, the sentence that every error of the package is."""
    return f"{name}: expected {what}, got {describe(value)}.{' ' + fix if fix else ''}"


def warn(text: str) -> None:
    """Give a UserWarning that points at the first line outside this package and torch, however deep the call is."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_CALLER:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def attempt(check: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run ``check`` and return ``(result, None)``, or ``(None, exception)``.

    Checks in front of a collective may not raise at once: the other ranks would wait for this one. The exception is
    handed to the agreement of the ranks, which raises it on all of them.
    """
    try:
        return check(), None
    except Exception as error:
        return None, error


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """Return ``value`` unchanged, or raise ValueError when it is not one of ``choices``."""
    if value not in choices:
        raise ValueError(expected(name, f"one of {', '.join(map(repr, choices))}", value))
    return value


def check_number(name: str, value: float) -> float:
    """Return ``value`` unchanged, or raise TypeError when it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fix = f"Pass float({name})." if hasattr(value, "__float__") and not isinstance(value, bool) else ""
        raise TypeError(expected(name, "a number", value, fix))
    return value


def check_positive(name: str, value: float) -> float:
    """Return ``value`` unchanged, or raise when it is not a finite number > 0."""
    check_number(name, value)
    if not 0 < value < math.inf:  # not math.isfinite, which torch.compile does not trace
        raise ValueError(expected(name, "a finite number > 0", value))
    return value


def check_int(name: str, value: int) -> int:
    """Return ``value`` unchanged, or raise TypeError when it is not an int."""
    if isinstance(value, bool) or not isinstance(value, int):
        fix = f"Pass int({name})." if hasattr(value, "__index__") and not isinstance(value, bool) else ""
        raise TypeError(expected(name, "an int", value, fix))
    return value


def check_tensor(name: str, value: object, what: str = "a tensor") -> None:
    """Raise TypeError when ``value`` is not a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(expected(name, what, value, f"Use torch.as_tensor({name})."))


def check_count(name: str, value: int, least: int) -> int:
    """Return ``value`` unchanged, or raise when it is not an int >= ``least``."""
    check_int(name, value)
    if value < least:
        raise ValueError(expected(name, f"an int >= {least}", value))
    return value
