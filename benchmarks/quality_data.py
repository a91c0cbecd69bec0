"""The two tasks of the quality benchmark: rows, their splits, and the best possible ranking where it is known.

``fraud``: 20 features, 0.3 % positives and 1 % decoys. The features of all other rows are independent standard normals.
Positives and decoys alike are shifted by 4 along one direction, the mean of the first four features, so that both sit
at the top of every linear score. They differ in the product of two more features, the product-type cue: its mean is
+0.9 for positives and -0.9 for decoys, while each of the two features alone is standard normal for all rows. A linear
model cannot see the cue: no linear score separates positives from decoys. At the operating point, the top 0.5 % of
rows, there is room for all positives and for few decoys. The densities are known, so the best possible ranking, that of
the likelihood ratio, is known too. Fourteen features are noise.

``digits``: scikit-learn's digits, the 8 against the rest, with 3 % positives. Two halves
of 836 rows. The operating point is the top 5 %, and a false-positive rate of 5 %, since 0.5 % would be four rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

FEATURES, SHIFTED = 20, 4
POSITIVES, DECOYS = 0.003, 0.01  # shares of the rows
SHIFT, CUE = 4.0, 0.9
SHARES = (0.5, 0.2, 0.3)  # of train, validation and test
DIGIT, DIGIT_POSITIVES = 8, 0.03


class Rows(NamedTuple):
    """Features and 0 or 1; ``kinds`` is 1 for positives, -1 for decoys and 0 for the rest, where it is known."""

    features: Tensor  # [N, F] float32
    targets: Tensor  # [N] int64
    kinds: Tensor | None = None  # [N] int64

    def take(self, index: Tensor | slice) -> Rows:
        """Return the rows of ``index``."""
        return Rows(self.features[index], self.targets[index], None if self.kinds is None else self.kinds[index])


class Splits(NamedTuple):
    """Disjoint rows."""

    train: Rows
    validation: Rows
    test: Rows


def make_fraud(rows: int, seed: int) -> Splits:
    """Return ``rows`` independently drawn rows of the fraud-like task, over all splits."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    features = torch.randn(rows, FEATURES, generator=generator)
    draws = torch.rand(rows, generator=generator)
    kinds = (draws < POSITIVES).long() - ((draws >= POSITIVES) & (draws < POSITIVES + DECOYS)).long()
    features[:, :SHIFTED] += (kinds != 0)[:, None] * SHIFT / math.sqrt(SHIFTED)
    first, second = features[:, SHIFTED], features[:, SHIFTED + 1]
    correlation = CUE * kinds
    features[:, SHIFTED + 1] = correlation * first + (1 - correlation**2).sqrt() * second
    everyone = Rows(features, (kinds == 1).long(), kinds)
    ends = [round(rows * share) for share in (SHARES[0], SHARES[0] + SHARES[1])]
    return Splits(*(everyone.take(slice(*part)) for part in ((0, ends[0]), (ends[0], ends[1]), (ends[1], rows))))


def linear_scores(features: Tensor) -> Tensor:
    """Return the best linear scores of the fraud-like task, (N,): along the shift of the suspicious rows."""
    return features[:, :SHIFTED].sum(dim=1)


def best_scores(features: Tensor) -> Tensor:
    """Return the logarithm of the likelihood ratio of positives to other rows, (N,) float64: the best ranking."""
    features = features.double()
    shifted = SHIFT * linear_scores(features) / math.sqrt(SHIFTED) - SHIFT**2 / 2
    first, second = features[:, SHIFTED], features[:, SHIFTED + 1]

    def against_independent(correlation: float) -> Tensor:
        spread = 1 - correlation**2
        form = (first**2 - 2 * correlation * first * second + second**2) / spread
        return (first**2 + second**2 - form - math.log(spread)) / 2

    decoys = math.log(DECOYS) + shifted + against_independent(-CUE)
    rest = torch.logaddexp(decoys, torch.full_like(decoys, math.log(1 - POSITIVES - DECOYS)))
    return shifted + against_independent(CUE) - rest


def make_digits(seed: int) -> Splits:
    """Return two halves of the digits with few 8s: one for training, the other for validation or test."""
    pixels, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    negatives = rng.permutation(np.flatnonzero(digits != DIGIT))
    positives = rng.permutation(np.flatnonzero(digits == DIGIT))
    num_negatives = len(negatives) // 2
    num_positives = round(num_negatives * DIGIT_POSITIVES / (1 - DIGIT_POSITIVES))
    halves = []
    for half in (0, 1):
        index = np.concatenate(
            [
                negatives[half * num_negatives :][:num_negatives],
                positives[half * num_positives :][:num_positives],
            ]
        )
        features = torch.tensor(pixels[index] / 16, dtype=torch.float32)
        halves.append(Rows(features, torch.tensor(digits[index] == DIGIT, dtype=torch.int64)))
    return Splits(halves[0], halves[1], halves[1])
