"""The wording of every error message, the checks of plain arguments, and how a check runs before a collective."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def describe(value: object) -> str:
    """Return ``value`` as an error message should show it: tensors by dtype and shape, never by content."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return repr(value)


def expected(name: str, what: str, value: object, fix: str = "") -> str:
    """Return ``"{name}: expected {what}, got {value}. {fix}"``, the sentence that every error of the package is."""
    return f"{name}: expected {what}, got {describe(value)}.{' ' + fix if fix else ''}"


def attempt(check: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run ``check`` and return ``(result, None)``, or ``(None, exception)``.

    Checks in front of a collective may not raise at once: the other ranks would wait for this one. The exception is
    handed to :func:`~fullrank.distributed.header.agree`, which raises it on every rank.
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
        raise TypeError(expected(name, "a number", value))
    return value


def check_positive(name: str, value: float) -> float:
    """Return ``value`` unchanged, or raise when it is not a finite number > 0."""
    check_number(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(expected(name, "a finite number > 0", value))
    return value


def check_count(name: str, value: int, least: int) -> int:
    """Return ``value`` unchanged, or raise when it is not an int >= ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(expected(name, "an int", value))
    if value < least:
        raise ValueError(expected(name, f"an int >= {least}", value))
    return value
