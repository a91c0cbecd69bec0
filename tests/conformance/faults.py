"""One form for all tables of faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Arguments = dict[str, Any]


class Fault(NamedTuple):
    """Something that a rank does wrong, and what every rank raises then: a built-in class, and a part of the text."""

    change: Callable[[Arguments], Arguments]  # of the arguments of a right call, which it returns the wrong ones of
    kind: str
    text: str
    common: Callable[[Arguments], Arguments] = lambda arguments: {}  # what every rank passes in this case
