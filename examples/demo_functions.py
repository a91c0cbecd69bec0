"""The functions of one file: what the rows of all processes are worth to a retrieval loss, on Python's own source.

The task, the encoder and the metric are those of benchmarks/pooling.py, in small: a step has ``FILES`` files with
``FUNCTIONS`` functions each, which the processes share. The rate was the best for both pools in runs with other seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from demo_data import world_size
from demo_report import Progress, count, print_pools  # which finds the folder of the benchmarks
from pooling import FILES, FUNCTIONS, Draws, Encoder, Functions, evaluate, read
from torch import nn

from fullrank import RetrievalSmoothAPLoss

MOST_FILES, TEST_FILES, WORDS = 400, 60, 2**12
SEEDS, STEPS, RATE = 5, 150, 0.1
POOLS = {"own rows": False, "all rows": None}  # gather_distributed; None gathers where there are several processes


def train(
    functions: Functions, seed: int, pool: str, steps: int, wrap: Callable[[nn.Module], nn.Module], progress: Progress
) -> float:
    """Return the mean average precision of files that were not trained on. The seed draws files, model and batches."""
    draws, model = Draws(functions, seed, TEST_FILES), wrap(Encoder(seed, WORDS))
    loss = RetrievalSmoothAPLoss(gather_distributed=POOLS[pool])
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for _ in range(steps):
        rows = draws.step(1).chunk(world_size())[rank]
        optimizer.zero_grad()
        loss(model(*functions.take(rows)), functions.file[rows]).backward()
        optimizer.step()
        progress.advance()
    return evaluate(model, functions, draws.test)[0]


def compare_pools(steps: int, wrap: Callable[[nn.Module], nn.Module], is_first: bool) -> dict[str, list[float]]:
    """Train with both pools, print, and return the mean average precision of each seed."""
    if is_first:
        print("\nReading the source of Python's standard library and of torch", flush=True)
    found = read(MOST_FILES, is_shown=False)
    functions = Functions.of([one.body for one in found], [one.path for one in found])
    functions = functions._replace(words=functions.words % WORDS)
    progress = Progress(SEEDS * steps, is_first)
    if is_first:
        files, over = int(functions.file[-1]) + 1, count(world_size(), "process", "processes")
        print(
            f"{len(found)} functions of {files} files, {TEST_FILES} of them to test on. Those of one file are positives"
        )
        print(
            f"for RetrievalSmoothAPLoss: {FILES * FUNCTIONS} rows on {over}, {SEEDS} seeds of {count(steps, 'step')}\n"
        )
    scores = {}
    for pool in POOLS:
        progress.start(pool)
        scores[pool] = [train(functions, seed, pool, steps, wrap, progress) for seed in range(SEEDS)]
    if is_first:
        print_pools(scores)
    return scores
