"""One form for all tables of faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

Arguments = dict[str, Any]


class Fault(NamedTuple):
    """Something that a rank does wrong, and what every rank raises then: a built-in class, a text or its pattern."""

    change: Callable[[Arguments], Arguments]  # of the arguments of a right call, which it returns the wrong ones of
    kind: str
    text: str | re.Pattern[str]
    common: Callable[[Arguments], Arguments] = lambda arguments: {}  # what every rank passes in this case

    def is_said(self, message: str) -> bool:
        """Return whether a message has the text."""
        return self.text in message if isinstance(self.text, str) else self.text.search(message) is not None
