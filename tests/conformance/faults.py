"""One form for all tables of faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Arguments = dict[str, Any]

# For every verb that takes a sum of losses: what a rank makes of it, and what every rank raises then.
WRONG_LOSSES: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "mean": (
        lambda loss: torch.stack([loss] * 3).mean() / 3,
        "ValueError",
        "expected the sum over its terms, got a mean.",
    ),
    "vector": (lambda loss: torch.stack([loss, loss]), "ValueError", "expected one element"),
    "number": (lambda loss: 3.0, "TypeError", "expected a floating-point tensor, got 3.0."),
    "no graph": (lambda loss: loss.detach(), "ValueError", "expected a loss with a graph"),
}


class Fault(NamedTuple):
    """Something that a rank does wrong, and what every rank raises then: a built-in class, a text or its pattern."""

    change: Callable[[Arguments], Arguments]  # of the arguments of a right call, which it returns the wrong ones of
    kind: str
    text: str | re.Pattern[str]
    common: Callable[[Arguments], Arguments] = lambda arguments: {}  # what every rank passes in this case

    def is_said(self, message: str) -> bool:
        return self.text in message if isinstance(self.text, str) else self.text.search(message) is not None
