"""Is a linear model better in average precision when all its rows are trained on average precision at once?

Usage: python benchmarks/linear_probe.py [--quick] [--cache FILE] [--out FOLDER]

The sets are those of linear_probe_data.py: tables with 1 to 10 % positives, and four with many features. Each has five
splits into 60, 20 and 20 % for training, validation and test. All choices are by average precision on validation rows.

1. Logistic regression of scikit-learn: C from 1e-4 to 1e4, with equal and with balanced class weights.
2. From its weights, L-BFGS on ``SmoothAPLoss(1)`` of all training rows, at most 60 iterations. The temperature is the
   automatic one of the first step. The L2 is that of the regression, or none. The weights of every iteration are
   candidates, those of the regression too.
3. The control: the same from the same weights with cross-entropy, weighted as in the regression.

Each set counts once, with its mean over the splits. Differences are paired, with a bootstrap interval of 95 % over the
sets and Wilcoxon's test; there are two comparisons, 2 with 1 and 2 with 3. Optimizer, temperature, L2 and iterations
were chosen on five sets of real_data.py. The script also trains on two processes with half of the rows each.
It takes about twenty minutes on one core. ``--cache`` keeps finished splits, so that a stopped run continues. Needs the
``bench`` extra.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from intervals import OverSets
from linear_probe_data import TABLES, WIDE, Part, parts
from real_data import missing
from report import Record, Run, on_ranks, print_records
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score

from fullrank import SmoothAPLoss

SPLITS, ITERATIONS = 5, 60
STRENGTHS = 10.0 ** np.arange(-4, 5)  # C
DECAYS = (1.0, 0.0)  # times the L2 of the regression
REAL, REAL_ITERATIONS = "subtropical storms", 20
Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]  # of scores: the value and its gradient


class Start(NamedTuple):
    """The logistic regression that is best on validation rows."""

    weights: np.ndarray  # [F + 1], the last is the bias
    decay: float  # L2 relative to the mean loss
    rows: np.ndarray  # [N] weights of the training rows, with a sum of 1
    chosen: str


def precision(weights: np.ndarray, part: Part) -> float:
    """Return the average precision."""
    return float(average_precision_score(part.targets, part.features @ weights[:-1]))


def regression(training: Part, validation: Part) -> Start:
    """Return the best logistic regression."""
    best, found = -1.0, None
    for kind in (None, "balanced"):
        rows = np.ones(len(training.targets))
        if kind == "balanced":
            rows = (len(rows) / 2 / np.bincount(training.targets))[training.targets]
        model = LogisticRegression(class_weight=kind, warm_start=True, max_iter=300)
        for strength in STRENGTHS:
            model.set_params(C=strength).fit(training.features, training.targets)
            weights = np.append(model.coef_[0], model.intercept_)
            if (reached := precision(weights, validation)) > best:
                chosen = f"C={strength:g}, {kind or 'equal'}"
                best, found = reached, Start(weights, 1 / (strength * rows.sum()), rows / rows.sum(), chosen)
    assert found is not None
    return found


def cross_entropy(targets: np.ndarray, rows: np.ndarray) -> Loss:
    """Return weighted cross-entropy."""

    def loss(scores: np.ndarray) -> tuple[float, np.ndarray]:
        values = np.logaddexp(0, scores) - targets * scores
        return float(values @ rows), (0.5 + 0.5 * np.tanh(scores / 2) - targets) * rows

    return loss


def ranking(targets: np.ndarray, own: bool = False) -> Loss:
    """Return one minus the smooth average precision over the rows of all processes, or over the ``own`` rows alone."""
    module, labels = SmoothAPLoss(1, gather_distributed=False if own else None), torch.from_numpy(targets)

    def loss(scores: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(scores)[:, None].requires_grad_()
        value = module(leaf, labels)
        module.temperature = module.current_temperature  # fixed from the first call on, as L-BFGS needs
        value.backward()
        return value.item(), leaf.grad[:, 0].numpy()

    return loss


def train(
    features: np.ndarray, loss: Loss, start: Start, decay: float, iterations: int, visit: Callable[[np.ndarray], None]
) -> np.ndarray:
    """Return the weights after L-BFGS; with several processes each has its own rows, and gradients are averaged."""

    def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = loss(features @ weights[:-1] + weights[-1])
        found = torch.from_numpy(np.concatenate([features.T @ slope, [slope.sum(), value]]))
        if dist.is_initialized():
            dist.all_reduce(found)
            found /= dist.get_world_size()
        gradient, own = found.numpy()[:-1], decay * start.decay * np.append(weights[:-1], 0)
        return found[-1].item() + own @ weights / 2, gradient + own

    options = {"maxiter": iterations}
    return minimize(objective, start.weights, jac=True, method="L-BFGS-B", callback=visit, options=options).x


def run(name: str, seed: int, iterations: int) -> Record:
    """Return the average precision on validation and test rows of the regression, of training on AP and on CE."""
    training, validation, test = parts(name, seed)
    began = time.process_time()
    start = regression(training, validation)
    first = (precision(start.weights, validation), start.weights)
    record: Record = {"set": name, "seed": seed, "chosen": start.chosen}
    record |= {"rows": sum(len(part.targets) for part in (training, validation, test))}
    record |= {"features": training.features.shape[1], "positives": int(training.targets.sum())}
    losses = {"CE": cross_entropy(training.targets, start.rows), "AP": ranking(training.targets)}
    best = {"LR": first}
    seconds = {"LR": time.process_time() - began}
    for method, loss in losses.items():
        found = [first]
        for decay in DECAYS:
            train(
                training.features,
                loss,
                start,
                decay,
                iterations,
                lambda weights: found.append((precision(weights, validation), weights.copy())),  # noqa: B023
            )
        best[method] = max(found, key=lambda pair: pair[0])
        seconds[method] = time.process_time() - began - sum(seconds.values())
    for method, (reached, weights) in best.items():
        record |= {method: precision(weights, test), f"{method} validation": reached}
        record[f"{method} seconds"] = seconds[method]
    return record


def on_process(rank: int, own: bool) -> np.ndarray:
    """Return the weights after a few iterations, with the rows of process ``rank`` of those that there are."""
    training, validation, _ = parts(REAL, 0)
    start = regression(training, validation)
    index = np.random.default_rng(0).permutation(len(training.targets))
    if dist.get_world_size() == 2:
        index = np.split(index, [len(index) // 3])[rank]  # a different number of rows each
    training = Part(training.features[index], training.targets[index])
    return train(training.features, ranking(training.targets, own), start, 1.0, REAL_ITERATIONS, lambda weights: None)


def agreement() -> Record:
    """Return how far the weights of two processes are from those of one, relative to the way from the start."""
    training, validation, _ = parts(REAL, 0)
    begin = regression(training, validation).weights
    one = on_ranks(1, on_process, False)[0]
    two, own = (on_ranks(2, on_process, alone) for alone in (False, True))
    way = np.linalg.norm(one - begin)
    assert all(np.array_equal(*weights) for weights in (two, own))
    gaps = (float(np.linalg.norm(weights[0] - one) / way) for weights in (two, own))
    return {"set": REAL, **dict(zip(("all rows", "own rows"), gaps, strict=True))}


def summary(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return a row per set, and the comparisons over all sets, the tables, the wide ones and all but the two best."""
    sets: list[Record] = []
    for name in dict.fromkeys(record["set"] for record in records):
        own = [record for record in records if record["set"] == name]
        row: Record = {"set": name, "rows": own[0]["rows"], "features": own[0]["features"]}
        row |= {"positives": own[0]["positives"]}
        row |= {method: mean(record[method] for record in own) for method in ("LR", "CE", "AP")}
        sets.append(row | {"AP - LR": row["AP"] - row["LR"], "CE - LR": row["CE"] - row["LR"]})
    compared = []
    best = sorted(sets, key=lambda row: row["AP - LR"])[-2:]
    groups = {"all": {*TABLES, *WIDE}, "tables": {*TABLES}, "wide": {*WIDE}}
    groups["all but the two best"] = groups["all"] - {row["set"] for row in best}
    for group, names in groups.items():
        some = [row for row in sets if row["set"] in names]
        for method, base in (("AP", "LR"), ("AP", "CE"), ("CE", "LR")):
            if some:
                over = OverSets.of([row[method] - row[base] for row in some])
                compared.append({"group": group, "compared": f"{method} - {base}", **over._asdict()})
    return sets, compared


def main() -> None:
    """Run, print, write."""
    script = Run(__doc__, "linear_probe")
    script.parser.add_argument("--cache", type=Path, help="file of finished splits")
    options = script.start()
    if (needs := missing()) is not None:
        raise SystemExit(needs)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # regressions that have not converged are candidates too
    names, splits, iterations = [*TABLES, *WIDE], SPLITS, ITERATIONS
    if options.quick:
        names, splits, iterations = ["men arrested twice", "ketchup of 41 ounces"], 2, 5
    cache = options.cache
    lines = cache.read_text().splitlines() if cache and cache.exists() else []
    known = {(record["set"], record["seed"]): record for record in map(json.loads, lines)}
    records = []
    for name in names:
        for seed in range(splits):
            if (name, seed) not in known:
                known[name, seed] = run(name, seed, iterations)
                if cache:
                    with cache.open("a") as file:
                        file.write(json.dumps(known[name, seed]) + "\n")
            records.append(known[name, seed])
        some = records[-splits:]
        means = (f"{method} {mean(record[method] for record in some):.3f}" for method in ("LR", "CE", "AP"))
        print(f"{len(records)} of {splits * len(names)}: {name}, {', '.join(means)}", flush=True)
    sets, compared = summary(records)
    real = agreement()
    print_records("Average precision on test rows, mean of the splits", sets)
    print_records("Differences, mean over sets with the 95 % bootstrap interval", compared)
    print_records("Two processes: distance from the weights of one, relative to the way from the regression", [real])
    sources = {name: source[1:6] for name, source in TABLES.items()}
    script.write(sources=sources, sets=sets, compared=compared, real=real, runs=records)


if __name__ == "__main__":
    main()
