"""Train on digits with a long tail under DDP: cross-entropy against the same with one line more. Prove the gradients.

Two processes:  torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
One process:    python examples/train_ddp.py --seeds 1 --steps 20

To use the recipe in your own training, copy `WeightedPlusRanking`. DDP wraps the model with its default settings, and
the batches of the ranks may differ in size.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from demo_data import NUM_CLASSES, Rows, UnevenShards, make_long_tail, own_share, world_size
from demo_proof import print_proof, prove
from demo_report import STYLES, Figures, Progress, Run, count, exact_figures, plot, print_table, print_verdict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAveragePrecision

from fullrank import (
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
    all_gather_no_grad,
)

HIGHEST_DIFFERENCE = 1e-12  # relative, of a float64 gradient: the promise of the package
METRIC_TOLERANCE = 1e-6  # between torchmetrics over the ranks and scikit-learn, up to the rounding of float32


class WeightedPlusRanking(nn.Module):
    """Weighted cross-entropy plus Smooth-AP. The second term is the line that the recipe adds.

    Cross-entropy keeps the columns of the logits comparable, which the argmax needs. Smooth-AP ranks each class against
    the rest, with the same weight for a rare class as for a frequent one.
    """

    def __init__(self, class_weights: Tensor) -> None:
        super().__init__()
        self.weighted = weighted_cross_entropy(class_weights)
        self.ranking = SmoothAPLoss(num_classes=len(class_weights), queue_size=0)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.weighted(logits, targets) + self.ranking(logits, targets)


def weighted_cross_entropy(class_weights: Tensor) -> nn.Module:
    """Return ``torch.nn.CrossEntropyLoss(weight=class_weights)`` whose mean is over the rows of all ranks."""
    return SoftmaxFocalLoss(alpha=class_weights, gamma=0, reduction="mean_weighted")


def build_loss(name: str, sizes: Tensor) -> nn.Module:
    """Return the loss called ``name``, with its defaults, for classes with ``sizes`` training rows."""
    class_weights = sizes.sum() / (len(sizes) * sizes)  # inverse to the share of the class
    if name == "cross_entropy":
        return SoftmaxFocalLoss(gamma=0)
    if name == "weighted":
        return weighted_cross_entropy(class_weights)
    if name == "smooth_ap":
        return SmoothAPLoss(num_classes=len(sizes), queue_size=0)
    if name == "sum":
        return WeightedPlusRanking(class_weights)
    raise ValueError(f"name: expected one of {list(STYLES)}, got {name!r}")


def proof_losses(sizes: Tensor, queue_size: int) -> dict[str, nn.Module]:
    """Return the losses of the proof by label: every kind of loss, the ranking losses with a queue."""
    queue = {"num_classes": len(sizes), "queue_size": queue_size}
    return {
        "cross-entropy": build_loss("cross_entropy", sizes),
        "weighted cross-entropy": build_loss("weighted", sizes),
        "weighted CE + SmoothAP": build_loss("sum", sizes),
        "focal": SoftmaxFocalLoss(),
        "SmoothAP, queue": SmoothAPLoss(**queue),
        "RecallAtQuantile, queue": RecallAtQuantileLoss(quantile=0.1, **queue),
        "PAUCAtBudget, queue": PAUCAtBudgetLoss(**queue),
    }


def build_model(seed: int) -> nn.Module:
    """Return a multilayer perceptron with one logit for each class."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))


def wrap(model: nn.Module) -> nn.Module:
    """Return ``model`` wrapped by DDP, or unchanged without a process group."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def train(model: nn.Module, loss: nn.Module, rows: Rows, options: argparse.Namespace, seed: int) -> None:
    """Train ``model`` on this rank's part of every batch."""
    shards = UnevenShards(len(rows.targets), options.batch_size * world_size(), options.steps, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    # batch_size=None: the sampler yields the indices of a whole batch, so there is nothing to collate.
    for pixels, targets in DataLoader(TensorDataset(*rows), sampler=shards, batch_size=None):
        optimizer.zero_grad()
        loss(model(pixels), targets).backward()
        optimizer.step()


def figures_of_ranks(logits: Tensor, targets: Tensor) -> Figures:
    """Return the metrics over the rows of all ranks; each rank updates them with its own rows."""
    metrics = MulticlassAveragePrecision(NUM_CLASSES, average="macro"), MulticlassAccuracy(NUM_CLASSES, average="macro")
    for metric in metrics:
        # Values outside [0, 1] would get a softmax, which changes the order of the rows within a class.
        metric.update(0.5 + logits.double().atan() / torch.pi, targets)
    return Figures(*(float(metric.compute()) for metric in metrics))


@torch.no_grad()
def run(name: str, seed: int, options: argparse.Namespace) -> Run:
    """Train with one loss and one seed, and evaluate. The seed draws the rows, the model and the batches."""
    train_rows, test_rows = make_long_tail(options.smallest, seed)
    model = wrap(build_model(seed))
    with torch.enable_grad():
        train(model, build_loss(name, train_rows.sizes), train_rows, options, seed)
    shard = test_rows.take(own_share(len(test_rows.targets)))
    logits = model(shard.pixels)
    scores = all_gather_no_grad(logits) if dist.is_initialized() else logits
    class_ap, exact = exact_figures(scores.double().numpy(), test_rows.targets.numpy())
    return Run(train_rows.sizes.numpy(), class_ap, figures_of_ranks(logits, shard.targets), exact)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Train on scikit-learn's digits with a long tail of class sizes, with and without a ranking loss.",
        epilog="With two processes: torchrun --standalone --nproc-per-node 2 examples/train_ddp.py [options]. "
        "With one: python examples/train_ddp.py --seeds 1 --steps 20, in about 10 seconds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--losses", nargs="+", choices=list(STYLES), default=list(STYLES), help="which to compare")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--batch-size", type=int, default=64, help="rows per rank and step, on average over the ranks")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate of Adam, for all losses")
    parser.add_argument("--smallest", type=float, default=0.03, help="size of the rarest class, of the most frequent")
    parser.add_argument("--queue-size", type=int, default=512, help="rows of the memory queues in the proof")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo.png"), help="where the figure goes")
    options = parser.parse_args()
    if not 0.03 <= options.smallest <= 1:
        parser.error(f"--smallest: expected a share between 0.03 and 1, got {options.smallest}")
    # With two rows per rank, every rank gets at least one.
    for name, least in (("seeds", 1), ("steps", 1), ("batch_size", 2), ("queue_size", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: expected a number >= {least}, got {getattr(options, name)}")
    return options


def prove_all(options: argparse.Namespace, is_first: bool) -> bool:
    """Print the proof; return whether the gradients are as promised."""
    rows, test_rows = make_long_tail(options.smallest, seed=0)
    losses = proof_losses(rows.sizes, options.queue_size)
    proofs = prove(losses, (build_model(0), build_model(1)), wrap, rows, own_share(len(rows.targets)))
    if is_first:
        sizes = rows.sizes.sort(descending=True).values.tolist()
        print(f"Digits: {sum(sizes)} rows to train, {sizes} of the ten classes; {len(test_rows.targets)} rows to test")
        shards = [own_share(len(rows.targets), rank) for rank in range(world_size())]
        print_proof(proofs, [part.stop - part.start for part in shards], options.queue_size, HIGHEST_DIFFERENCE)
    return all(proof.fullrank <= HIGHEST_DIFFERENCE for proof in proofs.values())


def train_all(options: argparse.Namespace, is_first: bool) -> bool:
    """Train with every loss and seed, print and plot the metrics; return whether they are those of scikit-learn."""
    if is_first:
        print(f"\nTraining, {count(options.seeds, 'seed')} of {count(options.steps, 'step')} each\n", flush=True)
    progress = Progress(options.seeds, is_first)
    runs: dict[str, list[Run]] = {}
    for name in options.losses:
        progress.start(STYLES[name].label)
        runs[name] = [progress.watch(run(name, seed, options)) for seed in range(options.seeds)]
    if is_first:
        print_table(runs, METRIC_TOLERANCE)
        print_verdict(runs)
        plot(runs, options.output)
        print(f"\nFigure: {options.output}")
    return all(one.largest_difference() <= METRIC_TOLERANCE for many in runs.values() for one in many)


def demonstrate(options: argparse.Namespace, is_first: bool) -> int:
    """Prove, train and report; return the exit status, 0 if all figures are as promised."""
    start = time.perf_counter()
    is_exact, do_agree = prove_all(options, is_first), train_all(options, is_first)
    if is_first:
        print(f"Time: {time.perf_counter() - start:.0f} s")
    return 0 if is_exact and do_agree else 1


def main() -> int:
    """Run on as many processes as torchrun started, or on one; return the exit status."""
    options = parse_options()
    if "RANK" not in os.environ:  # not started by torchrun
        return demonstrate(options, True)
    dist.init_process_group("gloo")
    try:
        status = demonstrate(options, dist.get_rank() == 0)
        dist.barrier()  # gloo may abort a rank that leaves while another rank still communicates
        return status
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
