"""The images of one letter: what the rows of all processes are worth to a retrieval loss.

A step has ``LETTERS`` letters with ``IMAGES`` images each, which the processes share; two processes have two letters
each. The metric is the mean average precision of other images, each a query that ranks all others. The rate was the
best for both pools in runs with other seeds, and the seeds are as many as make the verdict the same for other seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo_data import read_letters, world_size
from demo_report import Progress, count, print_pools
from torch import Tensor, nn

from fullrank import RetrievalSmoothAPLoss

LETTERS, IMAGES, TEST_IMAGES = 4, 4, 40
SEEDS, STEPS, RATE = 8, 300, 2e-3
POOLS = {"own rows": False, "all rows": None}  # gather_distributed; None gathers where there are several processes


def train(
    images: list[Tensor], seed: int, pool: str, steps: int, wrap: Callable[[nn.Module], nn.Module], progress: Progress
) -> float:
    """Return the mean average precision of images that were not trained on. The seed draws images, model, batches."""
    generator = torch.Generator().manual_seed(seed)
    images = [own[torch.randperm(len(own), generator=generator)] for own in images]
    torch.manual_seed(seed)
    model = wrap(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)))
    loss = RetrievalSmoothAPLoss(gather_distributed=POOLS[pool])
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for _ in range(steps):
        letters = torch.randperm(len(images), generator=generator)[:LETTERS]
        features = [
            images[letter][TEST_IMAGES:][
                torch.randint(len(images[letter]) - TEST_IMAGES, (IMAGES,), generator=generator)
            ]
            for letter in letters
        ]
        rows, labels = (
            part.chunk(world_size())[rank] for part in (torch.cat(features), letters.repeat_interleave(IMAGES))
        )
        optimizer.zero_grad()
        loss(model(rows), labels).backward()
        optimizer.step()
        progress.advance()
    return evaluate(model, torch.stack([own[:TEST_IMAGES] for own in images]))


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor) -> float:
    """Return the mean average precision of ``images`` (letters, images, 16)."""
    unit = F.normalize(model(images.flatten(0, 1)), dim=1)
    letter = torch.arange(len(images)).repeat_interleave(images.shape[1])
    order = (unit @ unit.T).fill_diagonal_(-2).argsort(dim=1, descending=True)[:, :-1]
    hits = (letter[order] == letter[:, None]).double()
    precision = hits.cumsum(dim=1) / torch.arange(1, hits.shape[1] + 1)
    return float(((precision * hits).sum(dim=1) / hits.sum(dim=1)).mean())


def compare_pools(steps: int, wrap: Callable[[nn.Module], nn.Module], is_first: bool) -> dict[str, list[float]]:
    """Train with both pools, print, and return the mean average precision of each seed."""
    features, letters = read_letters()
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    images = [torch.tensor(features[letters == letter], dtype=torch.float32) for letter in np.unique(letters)]
    progress = Progress(SEEDS * steps, is_first)
    if is_first:
        over = count(world_size(), "process", "processes")
        print(f"\nThe images of one of {len(images)} letters are positives for RetrievalSmoothAPLoss:", flush=True)
        print(f"{LETTERS * IMAGES} rows on {over}, {SEEDS} seeds of {count(steps, 'step')}\n")
    scores = {}
    for pool in POOLS:
        progress.start(pool)
        scores[pool] = [train(images, seed, pool, steps, wrap, progress) for seed in range(SEEDS)]
    if is_first:
        print_pools(scores)
    return scores
