"""Train a classifier of rare digits under DDP with each loss of fullrank, prove the gradients, compare the metrics.

Two processes:  torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
One process:    python examples/train_ddp.py --seeds 1 --steps 20

To use a ranking loss in your own training, start from the recipe in README.md. Or copy `CrossEntropy`, what
`build_loss` and `warm_up` return for one loss, and the lines of `train` that call `on_train_batch_start` and the loss.
DDP wraps the model with its default settings, and the batches of the ranks may differ in size.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo_data import Rows, UnevenShards, make_rare, own_share, world_size
from demo_proof import print_proof, prove
from demo_report import STYLES, Figures, Progress, Run, count, exact_figures, plot, print_table, print_verdict
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAveragePrecision

from fullrank import (
    LossWarmupWrapper,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
    all_gather_no_grad,
)
from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

HIGHEST_DIFFERENCE = 1e-12  # relative, of a float64 gradient: the promise of the package
METRIC_TOLERANCE = 1e-6  # between our metrics and scikit-learn: both are exact up to the rounding of their dtype


class PerElement(nn.Module):
    """Calls a loss whose targets are floats in the shape of the logits, as for every sigmoid loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(logits, targets.to(logits).unsqueeze(1))


class CrossEntropy(nn.Module):
    """Cross-entropy whose mean is over the rows of all ranks, for one logit.

    A softmax needs two logits, and the model returns one. The softmax of (0, z) is the sigmoid of z.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = SoftmaxFocalLoss(gamma=0)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(F.pad(logits, (1, 0)), targets)


def build_loss(name: str, options: argparse.Namespace) -> nn.Module:
    """Return the loss called ``name``, to be called with logits (N, 1) and targets (N,) of 0 and 1.

    Binary mode, num_classes=1: with two logits a ranking loss would also rank the frequent class against the rare one.
    The temperatures are in units of the logits, which are log-odds after cross-entropy; the temperature of pAUC is a
    multiple of the spread of the negatives. They decrease during training, so that the sigmoid approaches the step
    function that it replaces.
    """
    if name == "cross_entropy":
        return PerElement(nn.BCEWithLogitsLoss())  # torch's own: the mean of each rank, averaged by DDP
    if name == "focal":
        return PerElement(SigmoidFocalLoss())
    shared = {"num_classes": 1, "queue_size": options.queue_size}
    if name == "smooth_ap":
        return warm_up(SmoothAPLoss(**shared), 1.0, 0.25, options)
    if name == "recall":
        return warm_up(RecallAtQuantileLoss(quantile=options.quantile, **shared), 1.0, 0.25, options)
    if name == "pauc":
        # "pairwise" also lowers the negatives in the band; "trapezoid" treats their scores as constants.
        return warm_up(PAUCAtBudgetLoss(beta=options.beta, surrogate="pairwise", **shared), 0.25, 0.1, options)
    raise ValueError(f"name: expected one of {list(STYLES)}, got {name!r}")


def warm_up(loss: nn.Module, temp_start: float, temp_end: float, options: argparse.Namespace) -> LossWarmupWrapper:
    """Return ``loss`` after cross-entropy for a quarter of the steps and a blend for an eighth of them.

    A share of cross-entropy stays to the end. A loss with a threshold only raises positives towards a constant score.
    Nothing in it lowers the negatives, so on its own it lets all scores drift up together.
    """
    warmup_steps = options.steps // 4
    return LossWarmupWrapper(
        CrossEntropy(),
        loss,
        temp_start=temp_start,
        temp_end=temp_end,
        temp_decay_steps=max(options.steps - warmup_steps, 1),
        warmup_steps=warmup_steps,
        blend_steps=options.steps // 8,
        final_main_weight=options.main_weight,
    )


def build_model(seed: int) -> nn.Module:
    """Return a multilayer perceptron with one logit."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def wrap(model: nn.Module) -> nn.Module:
    """Return ``model`` wrapped by DDP, or unchanged without a process group."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def train(
    model: nn.Module, loss: nn.Module, train_rows: Rows, test_shard: Rows, options: argparse.Namespace, seed: int
) -> list[tuple[int, float]]:
    """Train ``model`` and return pairs of (step, average precision on the test rows of all ranks)."""
    shards = UnevenShards(len(train_rows.targets), options.batch_size * world_size(), options.steps, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    every = max(options.steps // 25, 1)
    curve: list[tuple[int, float]] = []
    # batch_size=None: the sampler yields the indices of a whole batch, so there is nothing to collate.
    for step, (pixels, targets) in enumerate(DataLoader(TensorDataset(*train_rows), sampler=shards, batch_size=None)):
        if isinstance(loss, LossWarmupWrapper):
            loss.on_train_batch_start(step)
        optimizer.zero_grad()
        loss(model(pixels), targets).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            curve.append((step + 1, average_precision(score(model, test_shard.pixels), test_shard.targets)))
    return curve


@torch.no_grad()
def score(model: nn.Module, pixels: Tensor) -> Tensor:
    """Return the logits (N, 1)."""
    return model(pixels)


def average_precision(logits: Tensor, targets: Tensor) -> float:
    """Return the average precision over the rows of all ranks."""
    metric = BinaryAveragePrecision()
    # torchmetrics applies a sigmoid to scores outside [0, 1], in float32, where large logits become ties.
    metric.update(logits[:, 0].double().sigmoid(), targets)
    return float(metric.compute())


def our_figures(logits: Tensor, targets: Tensor, options: argparse.Namespace) -> Figures:
    """Return the metrics over the rows of all ranks; each rank updates them with its own rows."""
    recall, pauc = RecallAtQuantile(1, options.quantile), PAUCAtBudget(1, 0.0, options.beta)
    recall.update(logits, targets)
    pauc.update(logits, targets)
    return Figures(average_precision(logits, targets), float(recall.compute()), float(pauc.compute()))


def run(name: str, seed: int, options: argparse.Namespace) -> Run:
    """Train with one loss and one seed, and evaluate. The seed draws the rows, the model and the batches."""
    train_rows, test_rows = make_rare(options.digit, options.positive_rate, seed)
    train_shard, test_shard = (rows.take(own_share(len(rows.targets))) for rows in (train_rows, test_rows))
    model = wrap(build_model(seed))
    curve = train(model, build_loss(name, options), train_rows, test_shard, options, seed)
    logits = score(model, test_shard.pixels)
    train_ap = average_precision(score(model, train_shard.pixels), train_shard.targets)
    scores = all_gather_no_grad(logits) if dist.is_initialized() else logits
    ours = our_figures(logits, test_shard.targets, options)
    scores, targets = scores[:, 0].double().numpy(), test_rows.targets.numpy()
    exact = exact_figures(scores, targets, options.quantile, options.beta)
    return Run(scores, targets, curve, train_ap, ours, exact)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Train with each loss on scikit-learn's digits, one of them made rare. Compare gradients, metrics.",
        epilog="With two processes: torchrun --standalone --nproc-per-node 2 examples/train_ddp.py [options]. "
        "With one: python examples/train_ddp.py --seeds 1 --steps 20, in about 10 seconds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--losses", nargs="+", choices=list(STYLES), default=list(STYLES), help="which to compare")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--batch-size", type=int, default=64, help="rows per rank and step, on average over the ranks")
    # The best rate for cross-entropy on a coarse grid; the other losses use the same rate.
    parser.add_argument("--lr", type=float, default=3e-2, help="learning rate of Adam, for all losses")
    parser.add_argument("--main-weight", type=float, default=0.5, help="weight of a ranking loss after the blend")
    parser.add_argument("--queue-size", type=int, default=512, help="rows of the memory queue of the ranking losses")
    parser.add_argument("--digit", type=int, choices=range(10), default=8, metavar="0..9", help="the positive digit")
    parser.add_argument("--positive-rate", type=float, default=0.03, help="share of positives, in train and test")
    parser.add_argument("--quantile", type=float, default=0.05, help="recall is measured among this top share of rows")
    parser.add_argument("--beta", type=float, default=0.05, help="pAUC is measured up to this false-positive rate")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo.png"), help="where the figure goes")
    options = parser.parse_args()
    if not 0 < options.positive_rate < 1:
        parser.error(f"--positive-rate: expected a share between 0 and 1, got {options.positive_rate}")
    for name in ("quantile", "beta"):
        if not 0 < getattr(options, name) < 1:
            parser.error(f"--{name}: expected a share between 0 and 1, got {getattr(options, name)}")
    if not 0 < options.main_weight <= 1:
        parser.error(f"--main-weight: expected a weight > 0 and at most 1, got {options.main_weight}")
    # With two rows per rank, every rank gets at least one; torch's cross-entropy of no rows is NaN.
    for name, least in (("seeds", 1), ("steps", 1), ("batch_size", 2), ("queue_size", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: expected a number >= {least}, got {getattr(options, name)}")
    return options


def proof_loss(name: str, options: argparse.Namespace) -> nn.Module:
    """Return the loss without its warm-up; for cross-entropy, the one that the ranking losses warm up with."""
    loss = CrossEntropy() if name == "cross_entropy" else build_loss(name, options)
    return loss.main_loss if isinstance(loss, LossWarmupWrapper) else loss


def prove_all(options: argparse.Namespace, is_first: bool) -> bool:
    """Print the proof; return whether the gradients are as promised."""
    train_rows, test_rows = make_rare(options.digit, options.positive_rate, seed=0)
    losses = {name: proof_loss(name, options) for name in options.losses}
    own = own_share(len(train_rows.targets))
    proofs = prove(losses, (build_model(0), build_model(1)), wrap, train_rows, own)
    if is_first:
        print(f"Digit {options.digit} against the rest: {train_rows} to train, {test_rows} to test")
        shards = [own_share(len(train_rows.targets), rank) for rank in range(world_size())]
        sizes = [shard.stop - shard.start for shard in shards]
        print_proof(proofs, sizes, options.queue_size, HIGHEST_DIFFERENCE)
    return all(proof.fullrank <= HIGHEST_DIFFERENCE for proof in proofs.values())


def train_all(options: argparse.Namespace, is_first: bool) -> bool:
    """Train with every loss and seed, print and plot the metrics; return whether ours are those of scikit-learn."""
    if is_first:
        print(f"\nTraining, {count(options.seeds, 'seed')} of {count(options.steps, 'step')} each")
        weight, warmup = options.main_weight, count(options.steps // 4, "step")
        print(f"ranking losses: {warmup} of cross-entropy, then a blend that ends at ", end="")
        print(f"{weight:g} x ranking loss + {1 - weight:g} x cross-entropy\n", flush=True)
    progress = Progress(options.seeds, is_first)
    runs: dict[str, list[Run]] = {}
    for name in options.losses:
        progress.start(STYLES[name].label)
        runs[name] = [progress.watch(run(name, seed, options)) for seed in range(options.seeds)]
    if is_first:
        print_table(runs, options.quantile, options.beta, METRIC_TOLERANCE)
        print_verdict(runs)
        plot(runs, options.output, options.steps // 4, f"Digit {options.digit} against the rest")
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
