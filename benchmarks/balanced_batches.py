"""What do balanced batches change? Plain shuffling against a fixed number of positives, and class weights against both.

Usage: python benchmarks/balanced_batches.py [--quick] [--out FOLDER]

Two sets of real_data.py with 3.7 and 10 % positives, a network with two hidden layers, Adam with a learning rate of
3e-3, 400 steps, three splits. Each loss is trained on batches of 32 rows, from three samplers: "shuffled"
are those of an ordinary loader, "stratified" have the share of the data in each batch (at least one positive), and
"quarter" have one positive in four rows. The table has, on test rows and averaged over sets and splits: the average
precision, the mean of the predicted probabilities over the share of positives (1 is calibrated), and the log loss as it
is and after the logits were moved by the change of the log odds. The full run takes about two minutes on one core and
writes balanced_batches.json; a quick one writes only where ``--out`` says. Needs the extras ``test`` and ``demo``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from statistics import mean

import torch
import torch.nn.functional as F
from real_data import Rows, split
from report import Run, print_records, progress
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler

from fullrank import BCEWithLogitsLoss, SigmoidFocalLoss, SmoothAPLoss
from fullrank.data import BalancedBatchSampler

SETS = ("letter H", "page blocks other than text")
SIZE = 32
SAMPLERS = ("shuffled", "stratified", "quarter")
LOSSES = ("cross-entropy", "weighted cross-entropy", "cross-entropy + SmoothAP", "SmoothAP")


def batches_of(sampler: str, targets: Tensor, size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches without end."""
    share = float(targets.double().mean())
    positives = size // 4 if sampler == "quarter" else max(1, round(share * size))
    balanced = BalancedBatchSampler(targets, size, positives, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    plain = BatchSampler(RandomSampler(range(len(targets)), generator=generator), size, drop_last=True)
    epoch = 0
    while True:
        balanced.set_epoch(epoch)
        yield from plain if sampler == "shuffled" else balanced
        epoch += 1


def make_loss(name: str, share: float) -> nn.Module:
    """Return the loss called ``name`` for batches with a ``share`` of positives."""
    if name == "cross-entropy":
        return BCEWithLogitsLoss()
    if name == "weighted cross-entropy":
        return SigmoidFocalLoss(alpha=1 - share, gamma=0, reduction="mean_weighted")
    return SmoothAPLoss(num_classes=1)


def train(rows: Rows, name: str, sampler: str, size: int, steps: int, seed: int) -> tuple[nn.Module, float]:
    """Return a trained network, and how many batches had no positive, in per cent."""
    torch.manual_seed(seed)
    width = rows.features.shape[1]
    model = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    terms = [make_loss(part, float(rows.targets.double().mean())) for part in name.split(" + ")]
    without = 0
    for _, batch in zip(range(steps), batches_of(sampler, rows.targets, size, seed)):
        logits, targets = model(rows.features[batch]), rows.targets[batch][:, None]
        optimizer.zero_grad()
        sum(term(logits, targets) for term in terms).backward()
        optimizer.step()
        without += int(targets.sum() == 0)
    return model, 100 * without / steps


def run(name: str, sampler: str, size: int, steps: int, data: str, seed: int) -> dict[str, float]:
    """Return the figures of one training."""
    rows, _, test = split(data, seed)
    model, without = train(rows, name, sampler, size, steps, seed)
    with torch.no_grad():
        logits = model(test.features)[:, 0].double()
    targets, share = test.targets.double(), float(rows.targets.double().mean())
    positives = size // 4 if sampler == "quarter" else round(share * size)
    shown = share if sampler == "shuffled" else max(1, positives) / size
    weight = (1 - share) / share if name == "weighted cross-entropy" else 1.0  # of a positive against a negative
    shift = math.log(weight * shown / (1 - shown)) - math.log(share / (1 - share))
    return {
        "ap": float(average_precision_score(targets, logits)),
        "probability_over_share": float(logits.sigmoid().mean() / targets.mean()),
        "log_loss": float(F.binary_cross_entropy_with_logits(logits, targets)),
        "log_loss_shifted": float(F.binary_cross_entropy_with_logits(logits - shift, targets)),
        "batches_without_positive_percent": without,
    }


def main() -> None:
    """Run, print, write."""
    torch.set_num_threads(1)
    script = Run(__doc__, "balanced_batches")
    steps, seeds, sets = (4, (0,), SETS[:1]) if script.start().quick else (400, (0, 1, 2), SETS)
    records = []
    for name, sampler in progress(itertools.product(LOSSES, SAMPLERS)):
        found = [run(name, sampler, SIZE, steps, data, seed) for data in sets for seed in seeds]
        means = {key: round(mean(each[key] for each in found), 4) for key in found[0]}
        records.append({"loss": name, "sampler": sampler} | means)
    print_records("On test rows, averaged over sets and splits", records)
    script.write(balanced_batches=records)


if __name__ == "__main__":
    main()
