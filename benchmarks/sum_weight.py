"""What the usual scale of 1/W costs in a sum: cross-entropy + Smooth-AP, its weight tuned on one process.

Usage: python benchmarks/sum_weight.py [--quick] [--splits 3] [--out FOLDER]

A detached gather with the own rows put back gives Smooth-AP 1/W of its gradient, and cross-entropy all of it. Adam does
not see a factor common to all gradients, but this one is not common: on W processes the ranking term weighs 1/W. So W
processes with that gather train as one process does with a weight of w/W: the simulation is exact. The run takes one
step on 2 and 4 real processes in float64, and prints how far their gradient is from it.

Eight sets (FRESH in real_data.py), batches of 512 rows in all, 400 steps of Adam at 3e-3. For each set and split the
weight w is the one of ``WEIGHTS`` with the best average precision on validation rows after training on one process.
Figures are on test rows. "norm" is the norm of the gradient that is logged and clipped, relative to one process, in the
first 50 steps. Takes some minutes on one core. Writes sum_weight.json. Needs the extras ``test`` and ``demo``.
"""

from __future__ import annotations

import time
from statistics import mean

import torch
import torch.nn.functional as F
from intervals import Interval, paired
from real_data import FRESH, THINNED, Rows, Splits, split, thinned
from real_runs import make_model
from report import Record, Run, on_ranks, print_records
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullrank import SmoothAPLoss, all_gather_no_grad
from fullrank.losses import smooth_ap

WEIGHTS = (0.1, 0.3, 1.0, 3.0, 10.0)
WORLDS, REAL = (1, 2, 4, 8), (2, 4)
STEPS, BATCH, RATE, FIRST = 400, 512, 3e-3, 50


def train(splits: Splits, seed: int, weight: float, steps: int) -> tuple[float, float, dict[int, float]]:
    """Return the average precision on validation and test rows, and the norm of the gradient by number of processes."""
    model, rows = make_model(splits.train.features.shape[1], seed), splits.train
    parameters = list(model.parameters())
    ranking, optimizer = SmoothAPLoss(num_classes=1), torch.optim.Adam(parameters, lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    norms: dict[int, list[float]] = {world_size: [] for world_size in WORLDS}
    for step in range(steps):
        batch = rows.take(torch.randint(len(rows.targets), (BATCH,), generator=generator))
        logits = model(batch.features)
        pointwise = F.binary_cross_entropy_with_logits(logits[:, 0], batch.targets.float())
        ranked = weight * ranking(logits, batch.targets)
        if step < FIRST:
            first, second = (
                torch.cat([part.flatten() for part in torch.autograd.grad(one, parameters, retain_graph=True)])
                for one in (pointwise, ranked)
            )
            for world_size, values in norms.items():
                values.append(float((first + second / world_size).norm() / (first + second).norm()))
        optimizer.zero_grad()
        (pointwise + ranked).backward()
        optimizer.step()
    return score(model, splits.validation), score(model, splits.test), {key: mean(some) for key, some in norms.items()}


@torch.no_grad()
def score(model: nn.Module, rows: Rows) -> float:
    return float(average_precision_score(rows.targets, model(rows.features)[:, 0].double()))


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def one_step(rank: int, world_size: int) -> float:
    """Return the error of the simulation: a detached gather under DDP against 1/W of the ranking term."""
    generator = torch.Generator().manual_seed(0)
    targets = (torch.arange(BATCH) % 10 == 0).long()
    features = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64) + targets[:, None]
    own, model = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size), make_model(8, 0).double()

    def terms(logits: Tensor, pool: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
        pointwise = F.binary_cross_entropy_with_logits(logits[:, 0], of.double())
        return pointwise, smooth_ap(pool, targets, temperature=0.1)

    logits = model(features)
    pointwise, ranked = terms(logits, logits, targets)
    simulated = gradient(model, pointwise + ranked / world_size)
    wrapped = DistributedDataParallel(model)  # kept: its hooks end with it
    logits = wrapped(features[own])
    others = all_gather_no_grad(logits.detach())
    pool = torch.cat([others[: own.start], logits, others[own.stop :]])
    found = gradient(model, sum(terms(logits, pool, targets[own]), torch.zeros(())))
    return float((found - simulated).norm() / simulated.norm())


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "sum_weight")
    script.parser.add_argument("--splits", type=int, default=3, help="number of splits (default: 3)")
    options = script.start()
    torch.set_num_threads(1)
    names = list(FRESH)[:2] if options.quick else list(FRESH)
    num_splits, steps = (1, 5) if options.quick else (options.splits, STEPS)
    real = [{"processes": world_size, "error": max(on_ranks(world_size, one_step, world_size))} for world_size in REAL]
    print_records("Gradient of a detached gather: relative difference from one process with a weight of w/W", real)
    runs: list[Record] = []
    start = time.perf_counter()
    for name in names:
        for seed in range(num_splits):
            splits = split(name, seed)
            splits = thinned(splits, THINNED[name], seed) if name in THINNED else splits
            tuned = {weight: train(splits, seed, weight, steps) for weight in WEIGHTS}
            best = max(tuned, key=lambda weight: tuned[weight][0])
            alone = train(splits, seed, 0.0, steps)[1]
            for world_size in WORLDS:
                usual = tuned[best] if world_size == 1 else train(splits, seed, best / world_size, steps)
                named = {"set": name, "split": seed, "processes": world_size, "weight": best}
                norm = tuned[best][2][world_size]
                runs.append(named | {"exact": tuned[best][1], "usual": usual[1], "alone": alone, "norm": norm})
            passed = time.perf_counter() - start
            print(f"{name}, split {seed}, {passed:.0f} s: weight {best}, AP {tuned[best][1]:.3f}", flush=True)
    table = []
    for world_size in WORLDS:
        of = [run for run in runs if run["processes"] == world_size]
        by_set = {
            key: [mean(run[key] for run in of if run["set"] == name) for name in names] for key in ("exact", "usual")
        }
        lost = paired(by_set["usual"], by_set["exact"])
        gain = paired(by_set["usual"], [mean(run["alone"] for run in of if run["set"] == name) for name in names])
        table.append(
            {
                "processes": world_size,
                "weight": f"w/{world_size}",
                "exact": mean(by_set["exact"]),
                "usual": mean(by_set["usual"]),
                "minus exact": lost.mean,
                "width": lost.width,
                "minus cross-entropy": gain.mean,
                "width of that": gain.width,
                "norm": Interval.of([run["norm"] for run in of]).mean,
            }
        )
    print_records(
        f"Average precision over {len(names)} sets: exact gather and usual gather; intervals over sets", table
    )
    script.write(real=real, table=table, runs=runs)


if __name__ == "__main__":
    main()
