"""What do the budget of partial AUC and the share of hard negatives change? On sets that real.py does not use.

Usage: python benchmarks/budget.py [--quick] [--splits N] [--out FOLDER]

Eight sets (FRESH in real_data.py), four of them thinned to 3 to 5 % positives, two splits,
a network with two hidden layers, Adam with a learning rate of 3e-3, batches of 512 rows, 1,600 steps. Each figure is on
test rows, at the checkpoint that is best in it on validation rows: the average precision after 400 and after 1,600
steps, then after 1,600 the partial AUC up to four budgets. "better" is the number of sets whose average precision is
above that of cross-entropy. A number after "hard-negative" is the share, after "hardness" the dro_lambda, after
"budget" the beta from which the loss finds it; "1 / hardness" is the median over the steps. The run takes about a
quarter of an hour on one core. Needs the extras ``test`` and ``demo``.
"""

from __future__ import annotations

from statistics import mean, median

import numpy as np
import torch
from quality_data import Rows, Splits
from quality_runs import make_model, paired
from real_data import FRESH, split
from report import Run, print_records
from sklearn.metrics import average_precision_score
from torch import nn

from fullrank import BCEWithLogitsLoss, HardNegativeCrossEntropyLoss, PAUCAtBudgetLoss, SigmoidFocalLoss, SmoothAPLoss
from fullrank.metrics import PAUCAtBudget

# The share of positives to which a set is thinned.
THINNED = {"magic-h": 0.03, "phoneme-1": 0.04, "spambase-1": 0.04, "optdigits-8": 0.05}
BUDGETS = (0.005, 0.02, 0.05, 0.2)
LOSSES = (
    "cross-entropy",
    "weighted cross-entropy",
    "hard-negative 0.05",
    "hard-negative 0.2",
    "SmoothAP",
    "hardness 1.0",
    "hardness 0.2",
    *(f"budget {budget}" for budget in BUDGETS),
)
AP = "AP, {} steps"


def rows_of(name: str, seed: int) -> Splits:
    """Return the split, with as many of its positives as its share says."""
    splits, share = split(name, seed), THINNED.get(name)
    if share is None:
        return splits
    rng = np.random.default_rng(seed + 99)
    parts = []
    for part in splits:
        targets = part.targets.numpy()
        positive, negative = np.flatnonzero(targets == 1), np.flatnonzero(targets == 0)
        kept = rng.permutation(positive)[: max(4, int(share * len(negative) / (1 - share)))]
        parts.append(part.take(torch.tensor(np.sort(np.concatenate([negative, kept])))))
    return Splits(*parts)


def make_loss(name: str, share: float) -> nn.Module:
    """Return the loss called ``name`` for a ``share`` of positives."""
    kind, _, value = name.partition(" ")
    if kind == "hard-negative":
        return HardNegativeCrossEntropyLoss(1, share=float(value))
    if kind == "weighted":
        return SigmoidFocalLoss(alpha=1 - share, gamma=0, reduction="mean_weighted")
    if kind == "hardness":
        return PAUCAtBudgetLoss(1, dro_lambda=float(value))
    if kind == "budget":
        return PAUCAtBudgetLoss(1, beta=float(value))
    return SmoothAPLoss(1) if kind == "SmoothAP" else BCEWithLogitsLoss()


def figures(model: nn.Module, rows: Rows) -> list[float]:
    """Return the average precision, and the partial AUC up to each budget."""
    with torch.no_grad():
        scores = model(rows.features)
    found = [float(average_precision_score(rows.targets, scores[:, 0].double()))]
    for budget in BUDGETS:
        metric = PAUCAtBudget(1, 0.0, budget)
        metric.update(scores, rows.targets)
        found.append(float(metric.compute()))
    return found


def run(name: str, data: str, seed: int, steps: int) -> tuple[list[float], float | None]:
    """Return the figures after a quarter of the steps and after all, and the median of 1 / hardness."""
    training, validation, test = rows_of(data, seed)
    loss = make_loss(name, float(training.targets.double().mean()))
    model = make_model(training.features.shape[1], seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    generator, size = torch.Generator().manual_seed(seed), min(512, len(training.targets))
    checks: list[tuple[list[float], list[float]]] = []
    inverses, early, step = [], 0.0, 0
    while step < steps:
        epoch = training.take(torch.randperm(len(training.targets), generator=generator))
        for features, targets in zip(epoch.features.split(size), epoch.targets.split(size)):
            if len(targets) < size or step == steps:
                break
            optimizer.zero_grad()
            logits = model(features)
            loss(logits, targets[:, None]).backward()
            optimizer.step()
            step += 1
            hardness = getattr(loss, "current_hardness", None)
            if hardness is not None:
                inverses.append(1 / hardness)
            if step % max(1, steps // 16) == 0:
                checks.append((figures(model, validation), figures(model, test)))
            if step == steps // 4:
                early = max(checks)[1][0]
    best = [max((on[k], test[k]) for on, test in checks)[1] for k in range(1 + len(BUDGETS))]
    return [early, *best], median(inverses) if inverses else None


def main() -> None:
    """Run, print, write."""
    torch.set_num_threads(1)
    script = Run(__doc__, "budget")
    script.parser.add_argument("--splits", type=int, default=2, help="splits of each set (default: 2)")
    options = script.start()
    steps, seeds, sets = (
        (16, range(1), list(FRESH)[:2]) if options.quick else (1600, range(options.splits), list(FRESH))
    )
    records, base = [], []
    for name in LOSSES:
        found = [[run(name, data, seed, steps) for seed in seeds] for data in sets]
        of_sets = [[mean(each[0][k] for each in runs) for runs in found] for k in range(2 + len(BUDGETS))]
        base = base or of_sets
        shown = [round(mean(values), 4) for values in of_sets]
        inverses = [each[1] for runs in found for each in runs if each[1] is not None]
        difference = paired(of_sets[1], base[1])
        record = {
            "loss": name,
            AP.format(steps // 4): shown[0],
            AP.format(steps): shown[1],
            "minus cross-entropy": f"{difference.mean:+.4f} +- {difference.width:.4f}",
            "better": sum(a > b for a, b in zip(of_sets[1], base[1])),
            **{f"pAUC {budget:g}": value for budget, value in zip(BUDGETS, shown[2:])},
            "1 / hardness": round(median(inverses)) if inverses else None,
        }
        print(record, flush=True)
        records.append(record)
    print_records("On test rows, averaged over sets and splits", records)
    script.write(budget=records)


if __name__ == "__main__":
    main()
