"""Intervals of the benchmarks: Student's t over seeds, and paired comparisons over sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student_t
from scipy.stats import wilcoxon

RESAMPLES = 10_000


class Interval(NamedTuple):
    """A mean and half the width of its interval of 95 % by Student's t; NaN for a single value."""

    mean: float
    width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the mean of ``values`` and its interval."""
        if len(values) < 2:
            return cls(mean(values), math.nan)
        error = stdev(values) / math.sqrt(len(values))
        return cls(mean(values), float(student_t.ppf(0.975, len(values) - 1)) * error)


def paired(values: Sequence[float], base: Sequence[float]) -> Interval:
    """Return the mean of the differences, run by run, and its interval."""
    return Interval.of([value - other for value, other in zip(values, base, strict=True)])


class OverSets(NamedTuple):
    """The mean of one difference a set, its 95 % bootstrap interval over the sets, and how often it is above 0."""

    mean: float
    low: float
    high: float
    p: float  # of Wilcoxon's signed-rank test
    wins: int
    sets: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> OverSets:
        """Return the comparison; the resamples have a fixed seed."""
        values = np.asarray(differences)
        picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
        low, high = np.quantile(values[picks].mean(axis=1), (0.025, 0.975))
        p = float(wilcoxon(values).pvalue) if np.any(values) else 1.0
        return cls(float(values.mean()), float(low), float(high), p, int((values > 0).sum()), len(values))

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"
