"""The rows of the demo, one digit made rare, and how they are shared between the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Sampler


class Rows(NamedTuple):
    """Images as rows of 64 pixels in [0, 1], and 1 where the digit is the rare one."""

    pixels: Tensor  # [N, 64] float32
    targets: Tensor  # [N] int64

    def __str__(self) -> str:
        return f"{len(self.targets)} rows with {int(self.targets.sum())} positives"

    def take(self, index: Tensor | slice) -> Rows:
        """Return the rows of ``index``."""
        return Rows(self.pixels[index], self.targets[index])


def make_rare(digit: int, rate: float, seed: int) -> tuple[Rows, Rows]:
    """Return train and test rows of scikit-learn's digits, disjoint, with a share ``rate`` of positives in each."""
    pixels, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    negatives = rng.permutation(np.flatnonzero(digits != digit))
    positives = rng.permutation(np.flatnonzero(digits == digit))
    num_negatives = len(negatives) // 2
    num_positives = round(num_negatives * rate / (1 - rate))
    if not 1 <= num_positives <= len(positives) // 2:
        raise SystemExit(f"--positive-rate {rate}: needs {num_positives} positives, there are {len(positives) // 2}")
    halves = []
    for half in (0, 1):
        negative = negatives[half * num_negatives :][:num_negatives]
        positive = positives[half * num_positives :][:num_positives]
        index = rng.permutation(np.concatenate([negative, positive]))
        rows = torch.tensor(pixels[index] / 16, dtype=torch.float32)
        halves.append(Rows(rows, torch.tensor(digits[index] == digit, dtype=torch.int64)))
    return halves[0], halves[1]


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_share(num_rows: int, rank: int | None = None) -> slice:
    """Return which of ``num_rows`` rows belong to ``rank``, by default this one: no two ranks have the same number.

    Nothing is padded and nothing is dropped. Usually shards differ only at the end of an epoch; here every batch does.
    """
    ranks = world_size()
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    shares = range(ranks, 2 * ranks)  # of two ranks, the first has two fifths
    start, total = sum(shares[:rank]), sum(shares)
    return slice(num_rows * start // total, num_rows * (start + shares[rank]) // total)


class UnevenShards(Sampler[Tensor]):
    """This rank's part of every batch. All ranks shuffle with the same seed and take their own share of each batch."""

    def __init__(self, num_rows: int, batch_size: int, steps: int, seed: int) -> None:
        self.num_rows, self.batch_size, self.steps, self.seed = num_rows, batch_size, steps, seed

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        batches: list[Tensor] = []
        for _ in range(self.steps):
            if not batches:  # an epoch, in batches of nearly equal size, at most batch_size
                shuffled = torch.randperm(self.num_rows, generator=generator)
                batches = list(shuffled.tensor_split(math.ceil(self.num_rows / self.batch_size)))
            batch = batches.pop()
            yield batch[own_share(len(batch))]
