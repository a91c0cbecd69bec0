"""How long a step of each pooled loss takes, forward and backward, against imbalanced-losses in the same run.

Usage: python benchmarks/loss_speed.py [--repeats 5]

Prints milliseconds of both and their ratio; only the ratio travels between machines. Needs the ``test`` extra.
"""

from __future__ import annotations

import argparse
import warnings

import imbalanced_losses
import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import fullrank

# (loss, its arguments, rows, share of positives or None for uniform classes)
CASES: list[tuple[str, dict[str, object], int, float | None]] = [
    ("SmoothAPLoss", {"num_classes": 1}, 1_000, 0.05),
    ("SmoothAPLoss", {"num_classes": 1}, 5_000, 0.20),
    ("SmoothAPLoss", {"num_classes": 1}, 20_000, 0.01),
    ("SmoothAPLoss", {"num_classes": 100}, 2_048, None),
    ("RecallAtQuantileLoss", {"num_classes": 1}, 1_000, 0.05),
    ("RecallAtQuantileLoss", {"num_classes": 1}, 1_000_000, 0.01),
    ("PAUCAtBudgetLoss", {"num_classes": 1}, 1_000_000, 0.01),
    ("PAUCAtBudgetLoss", {"num_classes": 1, "surrogate": "pairwise"}, 100_000, 0.01),
]


def make_rows(rows: int, num_classes: int, share: float | None) -> tuple[Tensor, Tensor]:
    """Return random scores and targets."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, num_classes, generator=generator).requires_grad_()
    if share is None:
        return logits, torch.randint(0, num_classes, (rows,), generator=generator)
    return logits, (torch.rand(rows, generator=generator) < share).long()


def seconds(loss: nn.Module, logits: Tensor, targets: Tensor, repeats: int) -> float:
    """Return the median time of forward and backward."""

    def step() -> None:
        logits.grad = None
        loss(logits, targets).backward()

    step()
    runs: list[float] = []
    for _ in range(repeats):
        runs.append(Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads()).timeit(1).mean)
    return sorted(runs)[repeats // 2]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case, of which the median counts")
    repeats = parser.parse_args().repeats
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, forward + backward, median of {repeats}")
    print(f"{'loss':22} {'rows':>9} {'classes':>8} {'positive':>9} {'peer ms':>10} {'ours ms':>10} {'ratio':>7}")
    for name, arguments, rows, share in CASES:
        classes = int(str(arguments["num_classes"]))
        logits, targets = make_rows(rows, classes, share)
        theirs = seconds(getattr(imbalanced_losses, name)(queue_size=0, **arguments), logits, targets, repeats)
        ours = seconds(getattr(fullrank, name)(queue_size=0, **arguments), logits, targets, repeats)
        label = name + (" pairwise" if "surrogate" in arguments else "")
        positive = "uniform" if share is None else f"{share:.0%}"
        line = f"{label.replace('Loss', ''):22} {rows:9,} {classes:8} {positive:>9}"
        print(f"{line} {theirs * 1e3:10.2f} {ours * 1e3:10.2f} {theirs / ours:7.2f}")


if __name__ == "__main__":
    main()
