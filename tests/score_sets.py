"""Sets of scores with which sums by bins may go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

ROWS = 4000


def generator() -> torch.Generator:
    """Return the same numbers in every test."""
    return torch.Generator().manual_seed(5)


def normal(size: int = ROWS) -> Tensor:
    """Return normal scores."""
    return torch.randn(size, generator=generator())


def cauchy() -> Tensor:
    """Return scores with tails that no window covers."""
    return torch.tan(math.pi * (torch.rand(ROWS, generator=torch.Generator().manual_seed(6)) - 0.5))


SETS: dict[str, Callable[[], Tensor]] = {
    "normal": normal,
    "tied": lambda: normal().round(decimals=1),
    "equal": lambda: torch.full((ROWS,), 0.3),
    "clustered": lambda: torch.cat([normal()[::2] * 0.01, 3 + normal()[1::2]]),
    "scale 1000": lambda: normal() * 1000,
    "far from 0": lambda: normal() + 4096,
    "one outlier": lambda: torch.cat([normal()[1:], torch.tensor([1e30])]),
    "two clusters": lambda: torch.cat([normal()[::2] - 1e6, 1e6 + normal()[1::2]]),
    "cauchy": cauchy,
}
