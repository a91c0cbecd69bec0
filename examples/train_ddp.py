"""What the losses do under DDP: prove equal gradients, rank the rows of all processes, train on a rare letter.

Two processes:  torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
One process:    python examples/train_ddp.py --seeds 1 --steps 20

The recipe for your own training is the sum in `build_loss`. DDP wraps the model with its default settings, and
the batches of the processes may differ in size.

The losses are compared after a fixed short training, in which class weights and ranking losses are ahead: 500 steps,
after which cross-entropy still improves. We chose the number so that every verdict is clear; 24 seeds give the same.
Longer training closes most of the gap: see --seeds 24 --steps 2000 --batch-size 512 (one process, some minutes).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from demo_data import Rows, UnevenShards, make_rows, own_share, world_size
from demo_letters import STEPS, compare_pools
from demo_proof import print_proof, prove
from demo_report import STYLES, Figures, Progress, Run, count, exact_figures, plot, print_table, print_verdict
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAveragePrecision

from fullrank import (
    BCEWithLogitsLoss,
    CombinedLoss,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    all_gather_no_grad,
)
from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

HIGHEST_DIFFERENCE = 1e-12  # relative, of a float64 gradient: the promise of the package
METRIC_TOLERANCE = 1e-6  # between our metrics and scikit-learn: both are exact up to the rounding of their dtype
PROOF_ROWS = 1_000
DEFAULT = ["cross_entropy", "weighted", "sum"]  # of the losses to compare


def build_loss(name: str) -> nn.Module:
    """Return the loss called ``name``, with its defaults."""
    if name == "cross_entropy":
        return BCEWithLogitsLoss()
    if name == "weighted":
        return BCEWithLogitsLoss(class_weight="balanced")
    if name == "smooth_ap":
        return SmoothAPLoss(num_classes=1)
    if name == "sum":  # the recipe: one term is added
        return CombinedLoss({"weighted": build_loss("weighted"), "ranking": build_loss("smooth_ap")})
    raise ValueError(f"name: expected one of {list(STYLES)}, got {name!r}")


def proof_losses(share: float, queue_size: int) -> dict[str, nn.Module]:
    """Return the losses of the proof by label: every kind of loss, the ranking losses with a queue."""
    queue = {"num_classes": 1, "queue_size": queue_size}
    return {
        "cross-entropy": build_loss("cross_entropy"),
        "weighted cross-entropy": build_loss("weighted"),
        "weighted CE + SmoothAP": build_loss("sum"),
        "focal": SigmoidFocalLoss(),
        "SmoothAP, queue": SmoothAPLoss(**queue),
        "RecallAtQuantile, queue": RecallAtQuantileLoss(quantile=share, surrogate="sigmoid", **queue),
        "PAUCAtBudget, queue": PAUCAtBudgetLoss(beta=share, **queue),
    }


def build_model(seed: int) -> nn.Module:
    """Return a multilayer perceptron with one logit."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def wrap(model: nn.Module) -> nn.Module:
    """Return ``model`` wrapped by DDP, or unchanged without a process group."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def every(options: argparse.Namespace) -> int:
    """Return the steps between two evaluations."""
    return max(options.steps // 40, 1)


def train(
    model: nn.Module,
    loss: nn.Module,
    rows: tuple[Rows, Rows],
    options: argparse.Namespace,
    seed: int,
    evaluated: Callable[[], None],
) -> list[tuple[int, float]]:
    """Train ``model`` and return pairs of (step, average precision on the test rows)."""
    train_rows, test_rows = rows
    shards = UnevenShards(len(train_rows.targets), options.batch_size * world_size(), options.steps, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    curve: list[tuple[int, float]] = []
    # batch_size=None: the sampler yields the indices of a whole batch, so there is nothing to collate.
    for step, (features, targets) in enumerate(DataLoader(TensorDataset(*train_rows), sampler=shards, batch_size=None)):
        optimizer.zero_grad()
        loss(model(features), targets).backward()
        optimizer.step()
        if (step + 1) % every(options) == 0:
            scores = together(score(model, test_rows))
            curve.append((step + 1, float(average_precision_score(test_rows.targets, scores))))
            evaluated()
    return curve


@torch.no_grad()
def score(model: nn.Module, rows: Rows) -> Tensor:
    """Return the logits (N, 1) of this process's share of ``rows``."""
    return model(rows.features[own_share(len(rows.targets))])


def together(logits: Tensor) -> np.ndarray:
    """Return the scores of all processes."""
    everyone = all_gather_no_grad(logits) if dist.is_initialized() else logits
    return everyone[:, 0].double().numpy()


def our_figures(logits: Tensor, targets: Tensor, share: float) -> Figures:
    """Return the metrics over the rows of all processes; each updates them with its own rows."""
    ap, recall, pauc = BinaryAveragePrecision(), RecallAtQuantile(1, share), PAUCAtBudget(1, 0.0, share)
    # torchmetrics applies a sigmoid to scores outside [0, 1], in float32, where large logits become ties. So they do in
    # float64 above 37, which long training reaches: divide first.
    ap.update((logits[:, 0].double() / 100).sigmoid(), targets)
    recall.update(logits, targets)
    pauc.update(logits, targets)
    return Figures(float(ap.compute()), float(recall.compute()), float(pauc.compute()))


def run(name: str, seed: int, options: argparse.Namespace, evaluated: Callable[[], None]) -> Run:
    """Train with one loss and one seed, and evaluate. The seed draws the rows, the model and the batches."""
    train_rows, test_rows = make_rows(options.letter, seed)
    model = wrap(build_model(seed))
    curve = train(model, build_loss(name), (train_rows, test_rows), options, seed, evaluated)
    logits, targets = score(model, test_rows), test_rows.targets.numpy()
    ours = our_figures(logits, test_rows.targets[own_share(len(targets))], options.budget)
    scores = together(logits)
    return Run(scores, targets, curve, ours, exact_figures(scores, targets, options.budget, options.budget))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Compare gradients, a loss over own rows and over all, and losses for one letter among all.",
        epilog="With two processes: torchrun --standalone --nproc-per-node 2 examples/train_ddp.py [options]. "
        "With one: python examples/train_ddp.py --seeds 1 --steps 20, in about 20 seconds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--losses", nargs="+", choices=list(STYLES), default=DEFAULT, help="which to compare")
    parser.add_argument("--seeds", type=int, default=6, help="number of seeds for the letter")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps for the letter")
    parser.add_argument("--batch-size", type=int, default=256, help="rows per process and step, on average")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of Adam, for all losses")
    parser.add_argument("--letter", default="H", metavar="A..Z", help="the positive letter")
    parser.add_argument(
        "--budget", type=float, default=0.05, help="share of rows, and false-positive rate, evaluated at"
    )
    parser.add_argument("--queue-size", type=int, default=512, help="rows of the memory queues in the proof")
    parser.add_argument("--output", type=Path, default=Path("outputs/demo.png"), help="where the figure goes")
    options = parser.parse_args()
    if not 0 < options.budget < 1:
        parser.error(f"--budget: expected a share between 0 and 1, got {options.budget}")
    # With two rows per process, each gets at least one.
    for name, least in (("seeds", 1), ("steps", 1), ("batch_size", 2), ("queue_size", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}: expected a number >= {least}, got {getattr(options, name)}")
    return options


def prove_all(options: argparse.Namespace, is_first: bool) -> bool:
    """Print the proof; return whether the gradients are as promised."""
    rows, test_rows = make_rows(options.letter, seed=0)
    share = float(rows.targets.double().mean())
    batch = rows.take(slice(PROOF_ROWS))
    losses = proof_losses(share, options.queue_size)
    proofs = prove(losses, (build_model(0), build_model(1)), wrap, batch, own_share(PROOF_ROWS))
    if is_first:
        print(f"Letter {options.letter} against the rest: {rows} to train, {test_rows} to test")
        sizes = [own_share(PROOF_ROWS, rank) for rank in range(world_size())]
        print_proof(proofs, [part.stop - part.start for part in sizes], options.queue_size, HIGHEST_DIFFERENCE)
    return all(proof.fullrank <= HIGHEST_DIFFERENCE for proof in proofs.values())


def train_all(options: argparse.Namespace, scores: dict[str, list[float]], is_first: bool) -> bool:
    """Train with every loss and seed, print and plot the metrics; return whether they are those of scikit-learn."""
    if is_first:
        print(f"\nTraining, {count(options.seeds, 'seed')} of {count(options.steps, 'step')} each\n", flush=True)
    progress = Progress(options.seeds * (options.steps // every(options)), is_first)
    runs: dict[str, list[Run]] = {}
    for name in options.losses:
        progress.start(STYLES[name].label)
        runs[name] = [run(name, seed, options, progress.advance) for seed in range(options.seeds)]
    if is_first:
        print_table(runs, options.budget, options.budget, METRIC_TOLERANCE)
        print_verdict(runs)
        print()
        plot(scores, runs, options.output, options.letter)
    return all(one.largest_difference() <= METRIC_TOLERANCE for many in runs.values() for one in many)


def demonstrate(options: argparse.Namespace, is_first: bool) -> int:
    """Prove, train and report; return the exit status, 0 if all figures are as promised."""
    start = time.perf_counter()
    is_exact = prove_all(options, is_first)
    scores = compare_pools(min(STEPS, options.steps), wrap, is_first)
    do_agree = train_all(options, scores, is_first)
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
        dist.barrier()  # gloo may abort a process that leaves while another still communicates
        return status
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
