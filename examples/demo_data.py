"""The rows of the demo, digits with a long tail of class sizes, and how they are shared between the ranks."""

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

NUM_CLASSES = 10
LARGEST = 90  # rows of the most frequent class in the training set; every class has at least 174 images


class Rows(NamedTuple):
    """Images as rows of 64 pixels in [0, 1], and their class."""

    pixels: Tensor  # [N, 64] float32
    targets: Tensor  # [N] int64

    @property
    def sizes(self) -> Tensor:
        """(NUM_CLASSES,): the number of rows of each class."""
        return torch.bincount(self.targets, minlength=NUM_CLASSES)

    def take(self, index: Tensor | slice) -> Rows:
        """Return the rows of ``index``."""
        return Rows(self.pixels[index], self.targets[index])


def make_long_tail(smallest: float, seed: int) -> tuple[Rows, Rows]:
    """Return train and test rows of scikit-learn's digits, disjoint.

    The sizes of the classes in the training rows fall geometrically to the share ``smallest`` of the largest. The seed
    decides which class has which size. In the test rows all classes have nearly the same size.
    """
    pixels, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    train, test = [], []
    for place, digit in enumerate(rng.permutation(NUM_CLASSES)):
        rows = rng.permutation(np.flatnonzero(digits == digit))
        train.append(rows[: round(LARGEST * smallest ** (place / (NUM_CLASSES - 1)))])
        test.append(rows[LARGEST:])
    index = (rng.permutation(np.concatenate(part)) for part in (train, test))
    first, second = (Rows(torch.tensor(pixels[i] / 16, dtype=torch.float32), torch.tensor(digits[i])) for i in index)
    return first, second


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_share(num_rows: int, rank: int | None = None) -> slice:
    """Return the rows of ``rank``, by default this one: no two ranks have the same number.

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
