"""Is a linear model better by a metric when all its rows are trained at once on a loss for that metric?

Usage: python benchmarks/linear_probe.py [--quick] [--cache FILE] [--out FOLDER]

The sets are those of linear_probe_data.py: tables with 1 to 10 % positives, and four with many features. Each has five
splits into 60, 20 and 20 % for training, validation and test. The metrics are those of own_metric.py: average
precision, recall in the top 5 % of the rows and the area under the ROC curve to a false-positive rate of 5 %. For each
metric all choices are by that metric on validation rows, and the same metric on test rows judges.

1. Logistic regression of scikit-learn: C from 1e-4 to 1e4, with equal and with balanced class weights.
2. From its weights, L-BFGS on a loss of fullrank of all training rows, at most 60 iterations: ``SmoothAPLoss``, and the
   losses for the budget of the metric. The temperature is that of the first step. The L2 is that of the regression, or
   none. The weights of every iteration are candidates, those of the regression too.
3. The control: the same from the same weights with cross-entropy, weighted as in the regression.

Each set counts once, with its mean over the splits. Differences are paired, with a bootstrap interval of 95 % over the
sets, one comparison at a time, and Wilcoxon's test. Optimizer, temperature, L2 and iterations were chosen on five sets
of real_data.py, for average precision. The script also trains on two processes with half of the rows each.
It takes about half an hour on one core. ``--cache`` keeps finished splits, so that a stopped run continues. Needs the
``bench`` extra.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from intervals import OverSets
from linear_probe_data import TABLES, WIDE, Part, parts
from real_data import missing
from real_runs import BUDGET, METRICS, figures_of
from report import Record, Run, on_ranks, print_records
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from fullrank import PAUCAtBudgetLoss, RecallAtQuantileLoss, SmoothAPLoss
from fullrank.losses import RankingLoss

SPLITS, ITERATIONS = 5, 60
STRENGTHS = 10.0 ** np.arange(-4, 5)  # C
DECAYS = (1.0, 0.0)  # times the L2 of the regression
REAL, REAL_ITERATIONS = "subtropical storms", 20
LOSSES: dict[str, Callable[[], RankingLoss]] = {
    "SmoothAP": lambda: SmoothAPLoss(1),
    "recall": lambda: RecallAtQuantileLoss(1, BUDGET, surrogate="sigmoid"),
    **{
        f"pAUC {surrogate}": lambda surrogate=surrogate: PAUCAtBudgetLoss(1, beta=BUDGET, surrogate=surrogate)
        for surrogate in ("dro", "pairwise", "trapezoid")
    },
}
OWN = {metric: [name for name in LOSSES if name.startswith(("SmoothAP", metric))] for metric in METRICS}
Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]  # of scores: the value and its gradient


class Start(NamedTuple):
    """The logistic regression that is best on validation rows."""

    weights: np.ndarray  # [F + 1], the last is the bias
    decay: float  # L2 relative to the mean loss
    rows: np.ndarray  # [N] weights of the training rows, with a sum of 1
    chosen: str


def figures(weights: np.ndarray, part: Part) -> list[float]:
    """Return the ``METRICS``."""
    return figures_of(torch.from_numpy(part.features @ weights[:-1]), torch.from_numpy(part.targets))


def regressions(training: Part, validation: Part) -> dict[str, Start]:
    """Return the logistic regression that is best by each metric."""
    best, found = dict.fromkeys(METRICS, -1.0), dict[str, Start]()
    for kind in (None, "balanced"):
        rows = np.ones(len(training.targets))
        if kind == "balanced":
            rows = (len(rows) / 2 / np.bincount(training.targets))[training.targets]
        model = LogisticRegression(class_weight=kind, warm_start=True, max_iter=300)
        for strength in STRENGTHS:
            model.set_params(C=strength).fit(training.features, training.targets)
            weights = np.append(model.coef_[0], model.intercept_)
            for metric, reached in zip(METRICS, figures(weights, validation), strict=True):
                if reached > best[metric]:
                    chosen = f"C={strength:g}, {kind or 'equal'}"
                    start = Start(weights, 1 / (strength * rows.sum()), rows / rows.sum(), chosen)
                    best[metric], found[metric] = reached, start
    return found


def cross_entropy(targets: np.ndarray, rows: np.ndarray) -> Loss:
    """Return weighted cross-entropy."""

    def loss(scores: np.ndarray) -> tuple[float, np.ndarray]:
        values = np.logaddexp(0, scores) - targets * scores
        return float(values @ rows), (0.5 + 0.5 * np.tanh(scores / 2) - targets) * rows

    return loss


def ranking(module: RankingLoss, targets: np.ndarray) -> Loss:
    """Return the value and the gradient of ``module`` at the temperature of its first call, as L-BFGS needs."""
    labels, first = torch.from_numpy(targets), list[float]()

    def loss(scores: np.ndarray) -> tuple[float, np.ndarray]:
        leaf = torch.from_numpy(scores)[:, None].requires_grad_()
        if isinstance(module, PAUCAtBudgetLoss):  # its temperature is a multiple of the scale of the scores
            if module.surrogate != "dro":
                first.append(float(np.subtract(*np.quantile(scores[targets == 0], (0.75, 0.25)))))
                module.temperature *= first[-2] / first[-1] if len(first) > 1 else 1
            value = module(leaf, labels)
        else:
            value = module(leaf, labels)
            module.temperature = module.current_temperature
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
    """Return the figure on test rows of each metric and method, chosen by that metric on validation rows."""
    training, validation, test = parts(name, seed)
    record: Record = {"set": name, "seed": seed}
    record |= {"rows": sum(len(part.targets) for part in (training, validation, test))}
    record |= {"features": training.features.shape[1], "positives": int(training.targets.sum())}
    began = time.process_time()
    starts = regressions(training, validation)
    record["regression seconds"] = time.process_time() - began
    visited: dict[tuple[str, str], list[tuple[list[float], np.ndarray]]] = {}
    for index, (metric, start) in enumerate(starts.items()):
        record[f"{metric} chosen"] = start.chosen
        for method in ("regression", "cross-entropy", *OWN[metric]):
            began, key = time.process_time(), (start.chosen, method)
            if key not in visited:
                found = visited[key] = [(figures(start.weights, validation), start.weights)]
                for decay in DECAYS if method != "regression" else ():
                    if method == "cross-entropy":
                        loss = cross_entropy(training.targets, start.rows)
                    else:
                        loss = ranking(LOSSES[method](), training.targets)
                    train(
                        training.features,
                        loss,
                        start,
                        decay,
                        iterations,
                        lambda weights: found.append((figures(weights, validation), weights.copy())),  # noqa: B023
                    )
                record.setdefault(f"{method} seconds", time.process_time() - began)
            reached, weights = max(visited[key], key=lambda pair: pair[0][index])
            record |= {f"{metric} {method}": figures(weights, test)[index]}
            record |= {f"{metric} {method} validation": reached[index]}
    return record


def on_process(rank: int, own: bool) -> np.ndarray:
    """Return the weights after a few iterations, with the rows of process ``rank`` of those that there are."""
    training, validation, _ = parts(REAL, 0)
    start = regressions(training, validation)["AP"]
    index = np.random.default_rng(0).permutation(len(training.targets))
    if dist.get_world_size() == 2:
        index = np.split(index, [len(index) // 3])[rank]  # a different number of rows each
    training = Part(training.features[index], training.targets[index])
    loss = ranking(SmoothAPLoss(1, gather_distributed=False if own else None), training.targets)
    return train(training.features, loss, start, 1.0, REAL_ITERATIONS, lambda weights: None)


def agreement() -> Record:
    """Return how far the weights of two processes are from those of one, relative to the way from the start."""
    training, validation, _ = parts(REAL, 0)
    begin = regressions(training, validation)["AP"].weights
    one = on_ranks(1, on_process, False)[0]
    two, own = (on_ranks(2, on_process, alone) for alone in (False, True))
    way = np.linalg.norm(one - begin)
    assert all(np.array_equal(*weights) for weights in (two, own))
    gaps = (float(np.linalg.norm(weights[0] - one) / way) for weights in (two, own))
    return {"set": REAL, **dict(zip(("all rows", "own rows"), gaps, strict=True))}


def summary(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return a row per metric and set, and the comparisons over groups of sets."""
    sets: list[Record] = []
    compared: list[Record] = []
    for metric in METRICS:
        methods = ("regression", "cross-entropy", *OWN[metric])
        rows: list[Record] = []
        for name in dict.fromkeys(record["set"] for record in records):
            own = [record for record in records if record["set"] == name]
            row = {"metric": metric, "set": name, **{key: own[0][key] for key in ("rows", "features", "positives")}}
            rows.append(row | {method: mean(record[f"{metric} {method}"] for record in own) for method in methods})
        sets += rows
        for base, method in combinations(methods, 2):
            if base not in methods[:3]:
                continue
            best = {row["set"] for row in sorted(rows, key=lambda row: row[method] - row[base])[-2:]}
            names = {row["set"] for row in rows}
            groups = {"all": names, "tables": {*TABLES}, "wide": {*WIDE}, "all but the two best": names - best}
            for group, members in groups.items():
                if differences := [row[method] - row[base] for row in rows if row["set"] in members]:
                    about = {"metric": metric, "group": group, "compared": f"{method} - {base}"}
                    compared.append(about | OverSets.of(differences)._asdict())
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
        means = (f"{key} {mean(record[key] for record in some):.3f}" for key in ("AP regression", "AP SmoothAP"))
        print(f"{len(records)} of {splits * len(names)}: {name}, {', '.join(means)}", flush=True)
    sets, compared = summary(records)
    real = agreement()
    print_records("The metrics on test rows, mean of the splits", sets)
    print_records("Differences, mean over sets with the 95 % bootstrap interval", compared)
    print_records("Two processes: distance from the weights of one, relative to the way from the regression", [real])
    sources = {name: source[1:6] for name, source in TABLES.items()}
    script.write(sources=sources, sets=sets, compared=compared, real=real, runs=records)


if __name__ == "__main__":
    main()
