"""What a step costs on an accelerator: waits, kernels and bytes, counted on the simulated device of tests/device.py.

Usage: python benchmarks/launches.py [--quick] [--lines NAME]
       torchrun --nproc-per-node 2 benchmarks/launches.py [--mixed] [--lines NAME]

Nothing is measured in seconds, so the counts are those of every machine. The last column is a model: 5 us for each
launch, 20 us for each wait, and 2.5e12 bytes a second, as of a GPU with HBM3 that is driven by eager torch. A GPU that
runs torch.float64 slowly takes longer. ``--lines`` prints the lines of the package that cost most in one step.

Under torchrun every step is over ranks, in a group that is like one of NCCL: it serves the simulated device alone, or
with ``--mixed`` the host too, as ``cpu:gloo,cuda:nccl`` does.
Each is the third of its kind: the first steps fill caches and the queue. More than two processes share the rows of
two in a small step, because their number decides on the form.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import print_table
from torch import Tensor, nn

import fullrank
from fullrank import losses
from fullrank.large import ShardedLoss

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with CUDA there is no simulated device
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from device import DEVICE, Counts, count, init_process_group

LAUNCH, WAIT, BYTES_PER_SECOND = 5e-6, 20e-6, 2.5e12


class Step(NamedTuple):
    """Forward and backward of a loss."""

    loss: Callable[[], nn.Module]
    rows: int
    classes: int = 1
    is_large: bool = False  # takes seconds to count


def _ap(classes: int = 1, temperature: float | None = 0.1, **options: object) -> Callable[[], nn.Module]:
    return lambda: losses.SmoothAPLoss(classes, temperature=temperature, **options)


STEPS = {
    "SmoothAP": Step(_ap(), 1_000),
    "SmoothAP, nothing checked": Step(_ap(validate_args=False), 1_000),
    "SmoothAP of more rows": Step(_ap(), 100_000),
    "SmoothAP, automatic temperature": Step(_ap(temperature=None), 100_000),
    "SmoothAP, queue of 1,024": Step(_ap(queue_size=1024), 100_000),
    "SmoothAP of many rows": Step(_ap(), 10_000_000, is_large=True),
    "SmoothAP of classes": Step(_ap(100), 4_096, 100, is_large=True),
    "SmoothAP of many rows and classes": Step(_ap(100), 100_000, 100, is_large=True),
    "Recall": Step(lambda: losses.RecallAtQuantileLoss(1, temperature=0.1, surrogate="sigmoid"), 100_000),
    "pAUC, trapezoid": Step(lambda: losses.PAUCAtBudgetLoss(1, surrogate="trapezoid", queue_size=0), 100_000),
    "pAUC, pairwise": Step(lambda: losses.PAUCAtBudgetLoss(1, beta=0.05, surrogate="pairwise", queue_size=0), 100_000),
    "pAUC, dro": Step(lambda: losses.PAUCAtBudgetLoss(1, surrogate="dro", queue_size=0), 100_000),
    "softmax focal": Step(losses.SoftmaxFocalLoss, 100_000, 10),
}
QUICK = [name for name, step in STEPS.items() if not step.is_large]
OVER_RANKS = {
    "SmoothAP": STEPS["SmoothAP"],
    "SmoothAP of few rows, queue of 1,024": STEPS["SmoothAP"]._replace(loss=_ap(queue_size=1024)),
    "cross-entropy + SmoothAP": Step(
        lambda: losses.CombinedLoss({"ce": losses.BCEWithLogitsLoss(), "ap": _ap()()}), 1_000
    ),
    "SmoothAP, queue of 1,024": STEPS["SmoothAP, queue of 1,024"],
    "SmoothAP, sharded": Step(lambda: ShardedLoss(_ap()()), 100_000),
    "Recall, sharded": Step(
        lambda: ShardedLoss(losses.RecallAtQuantileLoss(1, temperature=0.1, surrogate="sigmoid")), 100_000
    ),
    "retrieval": Step(losses.RetrievalSmoothAPLoss, 300, 64),  # 64 dimensions and 64 labels
    "softmax focal": STEPS["softmax focal"],
}


VOCABULARY = 31


class Window(NamedTuple):
    """What an optimizer step of a small language model calls; ``rows`` are micro-batches."""

    run: Callable[[nn.Module, list[dict[str, Tensor]]], object]
    rows: int
    classes: int = VOCABULARY


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum over the tokens of a micro-batch."""
    return fullrank.causal_lm_loss(model(batch["labels"]), batch["labels"], reduction="sum")


def accumulated(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    """Accumulate over ``batches``."""
    for step, batch in fullrank.accumulate(model, batches, fullrank.count_valid_tokens, group=_world()):
        step.backward(token_loss(model, batch))


def deferred(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    """Make a step of a server with a call for all of ``batches``."""
    one = fullrank.DeferredMean(model, _world())
    one.backward_window(batches, lambda batch: (token_loss(model, batch), (batch["labels"] != -100).sum()))
    one.finish([_world()])


def pooled(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    """Rank the first logit of all tokens by whether the token is the first word."""
    fullrank.pooled_backward(
        model,
        batches,
        forward=lambda batch: model(batch["labels"])[..., 0].flatten(),
        loss=lambda scores, all_batches: fullrank.SmoothAPLoss(1, temperature=0.1)(
            scores, torch.cat([(batch["labels"] == 0).long().flatten() for batch in all_batches])
        ),
        group=_world(),
    )


def _world() -> Any:
    return torch.distributed.group.WORLD


WINDOWS = {
    "accumulate": Window(accumulated, 1),
    "accumulate of more": Window(accumulated, 8),
    "DeferredMean": Window(deferred, 8),
    "pooled_backward": Window(pooled, 8),
}


def make_rows(step: Step, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Return scores that require grad, and targets, 5 % positive; each rank has 7 rows more than the one before.

    Scores are multiples of 1/64, so that every rank has a row at a threshold: operators on no row launch nothing.
    """
    generator = torch.Generator().manual_seed(rank)
    rows = step.rows + 7 * rank
    logits = torch.randn(rows, step.classes, generator=generator).mul_(64).round_().div_(64)
    if step.classes == 1:
        targets = (torch.rand(rows, generator=generator) < 0.05).long()
    else:
        targets = torch.randint(0, step.classes, (rows,), generator=generator)
    return logits.to(DEVICE).requires_grad_(), targets.to(DEVICE)


def counts_of(step: Step | Window, rank: int = 0) -> Counts:
    """Return what the third step costs."""
    if isinstance(step, Window):
        return counts_of_window(step, rank)
    loss, (logits, targets) = step.loss().to(DEVICE), make_rows(step, rank)
    for part in loss.modules():
        if hasattr(part, "_hints"):  # a count of calls of its own: the third is not one in which hints are looked for
            part._hints = type(part._hints)(*part._hints._key)
    for _ in range(3):
        logits.grad = None
        with count() as counts:
            loss(logits, targets).backward()
    return counts


def counts_of_window(step: Window, rank: int) -> Counts:
    """Return what the third window costs; the second is the last that is searched for a loss that calls backward."""
    generator = torch.Generator().manual_seed(rank)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)).to(DEVICE)
    for _ in range(3):
        model.zero_grad()
        labels = [torch.randint(0, VOCABULARY, (2 + rank, 6), generator=generator) for _ in range(step.rows)]
        batches = [{"labels": each.to(DEVICE)} for each in labels]
        with count() as counts:
            step.run(model, batches)
    return counts


def seconds(counts: Counts) -> float:
    """Return the time of the model."""
    return counts.launches * LAUNCH + counts.waits * WAIT + counts.bytes / BYTES_PER_SECOND


def main() -> None:
    """Count the steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what takes seconds")
    parser.add_argument("--mixed", action="store_true", help="under torchrun: in a group that serves the host too")
    parser.add_argument(
        "--lines", choices=[*STEPS, *OVER_RANKS, *WINDOWS], help="print the lines that cost most in this step"
    )
    arguments = parser.parse_args()
    rank, is_alone = int(os.environ.get("RANK", 0)), "WORLD_SIZE" not in os.environ
    steps = STEPS if is_alone else OVER_RANKS | WINDOWS
    if not is_alone:
        init_process_group(arguments.mixed)
        small = {name: step for name, step in OVER_RANKS.items() if step.rows <= 1_000}
        size = torch.distributed.get_world_size()
        steps |= {name: step._replace(rows=step.rows * 2 // size) for name, step in small.items()}
    if arguments.lines:
        report = counts_of(steps[arguments.lines], rank).report(400)
        print(f"rank {rank}: {report}")
        return
    names = QUICK if is_alone and arguments.quick else list(steps)
    found = {name: counts_of(steps[name], rank) for name in names}
    if rank == 0:
        heads = ("step (forward + backward)", "rows", "classes", "waits", "launches", "MB", "model, ms")
        table = [
            (
                name,
                f"{steps[name].rows:,}",
                str(steps[name].classes),
                str(counts.waits),
                str(counts.launches),
                f"{counts.bytes / 1e6:,.0f}",
                f"{seconds(counts) * 1e3:.2f}",
            )
            for name, counts in found.items()
        ]
        print_table("What a step costs on an accelerator", heads, table)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
