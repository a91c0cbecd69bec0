"""Does anything grow, leak or drift in a long run? Two ranks, batches of random sizes, alternating losses.

Usage: python benchmarks/soak.py [--quick] [--steps 20000] [--world-size 2] [--out FOLDER]

Each step draws the number of rows of each rank (sometimes none), scores and targets, all from a seed that every rank
shares. So each rank can also compute the step as one process with all rows, on a copy of the loss. Loss values,
gradients and queues must agree to the end. Memory is compared between two windows of steps: one after the first 500
steps, in which allocators and lazily loaded code still settle, and one at the end. A run of fewer than 1,000 steps does
not check memory. File descriptors are compared in every run. The exit status is 1 if anything is out of bounds. Needs
Linux's /proc; writes soak.json.
"""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Record, Run, on_ranks, print_records
from torch import Tensor, nn

import fullrank

CLASSES = 3
MOST_ROWS = 96
QUEUE = 257  # a prime, so that batches rarely end where the queue wraps around
SAMPLE_EVERY = 10
# Steps before memory is compared, and the least number of steps of a run that compares it.
WARM_UP = 500
LEAST_STEPS = 2 * WARM_UP
# Bounds: memory may not grow by more than this between the windows; gradients differ by rounding only, in float64.
MOST_GROWTH = 4 * 2**20
MOST_DIFFERENCE = 1e-12


def make_losses() -> dict[str, nn.Module]:
    """Return one loss of each kind, with queues that wrap around and one pool that is subsampled."""
    options: dict[str, Any] = {"num_classes": CLASSES, "queue_size": QUEUE, "temperature": 0.3}
    return {
        "SmoothAPLoss": fullrank.SmoothAPLoss(**options),
        "SmoothAPLoss, drawn": fullrank.SmoothAPLoss(**options, max_pool_size=200),
        "RecallAtQuantileLoss": fullrank.RecallAtQuantileLoss(quantile=0.2, surrogate="sigmoid", **options),
        "PAUCAtBudgetLoss": fullrank.PAUCAtBudgetLoss(beta=0.3, surrogate="pairwise", **options),
        "SoftmaxFocalLoss": fullrank.SoftmaxFocalLoss(),
    }


def draw(step: int, world_size: int) -> tuple[list[int], Tensor, Tensor]:
    """Return the rows of each rank, and scores and targets of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.randint(0, MOST_ROWS, (world_size,), generator=generator)
    sizes = sizes * (torch.rand(world_size, generator=generator) > 0.05)  # sometimes a rank has none
    total = int(sizes.sum())
    scores = torch.randn(total, CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (total,), generator=generator)
    targets[torch.rand(total, generator=generator) < 0.1] = -100
    return sizes.tolist(), scores, targets


def resident() -> int:
    """Return the resident set of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_step(loss: nn.Module, twin: nn.Module, step: int, rank: int, world_size: int) -> float:
    """Return the largest difference from one process, of the loss or of the gradient of this rank's rows."""
    sizes, scores, targets = draw(step, world_size)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    whole = scores.clone().requires_grad_()
    truth = twin(whole, targets)
    truth.backward()
    mine = scores[own].clone().requires_grad_()
    value = loss(mine, targets[own])
    value.backward()
    assert whole.grad is not None
    assert mine.grad is not None
    difference = float((mine.grad / world_size - whole.grad[own]).norm())
    size = float(whole.grad.norm())
    return max(abs(float(value.detach() - truth.detach())), difference / size if size else difference)


def serve(rank: int, world_size: int, steps: int) -> Record:
    """Run all steps on one rank, and return its figures."""
    warnings.filterwarnings("ignore", message=".*is drawn down to max_pool_size")  # on purpose here
    losses = make_losses()
    twins = copy.deepcopy(losses)
    for twin in twins.values():
        twin.gather_distributed = False
    worst = dict.fromkeys(losses, 0.0)
    names, memory, files = list(losses), [], []
    for step in range(steps):
        name = names[step % len(names)]
        worst[name] = max(worst[name], one_step(losses[name], twins[name], step, rank, world_size))
        if rank == 0 and (step + 1) % 1000 == 0:
            print(f"{step + 1:,} of {steps:,} steps", flush=True)
        if step % SAMPLE_EVERY == 0:
            memory.append(resident())
            files.append(len(os.listdir("/proc/self/fd")))
    for loss in losses.values():
        if hasattr(loss, "queue"):
            loss.queue.assert_synchronized()
    return {"worst": worst, "memory": memory, "files": files}


def growth(samples: list[int]) -> int | None:
    """Return the median of the last tenth of the settled samples minus that of the first; None in a short run."""
    if len(samples) * SAMPLE_EVERY < LEAST_STEPS:
        return None
    settled = samples[WARM_UP // SAMPLE_EVERY :]
    tenth = max(1, len(settled) // 10)
    return int(median(settled[-tenth:]) - median(settled[:tenth]))


def too_much(grown: int | None) -> bool:
    return grown is not None and grown > MOST_GROWTH


def main() -> int:
    """Run, print, write; return the exit status."""
    script = Run(__doc__, "soak")
    script.parser.add_argument(
        "--steps", type=int, default=20_000, help="steps of all losses together (default: 20000)"
    )
    script.parser.add_argument("--world-size", type=int, default=2, help="number of processes (default: 2)")
    options = script.start()
    steps = 100 if options.quick else options.steps
    ranks = on_ranks(options.world_size, serve, options.world_size, steps)
    worst = {name: max(held["worst"][name] for held in ranks) for name in ranks[0]["worst"]}
    grown = [growth(held["memory"]) for held in ranks]
    leaked = [held["files"][-1] - held["files"][0] for held in ranks]
    print_records("Largest difference from one process with all rows, over all steps", [worst])
    found = [{"rank": rank, "grown_bytes": grown[rank], "leaked_files": leaked[rank]} for rank in range(len(ranks))]
    print_records(f"Growth since the first steps; memory is not checked below {LEAST_STEPS} steps", found)
    script.write(steps=steps, worst=worst, grown_bytes=grown, leaked_files=leaked)
    kept = max(worst.values()) <= MOST_DIFFERENCE and not any(map(too_much, grown)) and max(leaked) <= 0
    verdict = "nothing grew, leaked or drifted" if kept else "FAILED"
    print(f"{steps} steps over {len(worst)} losses on {len(ranks)} ranks: {verdict}")
    return int(not kept)


if __name__ == "__main__":
    raise SystemExit(main())
