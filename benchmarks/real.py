"""What do the losses gain on real data? 29 sets with 1 to 10 % positives, by the protocol of a practitioner.

Usage: python benchmarks/real.py [--quick] [--tables binary thinned] [--cache FILE] [--out FOLDER]

The sets are those of real_data.py, the losses and the training those of real_runs.py. All methods share, for a set and
a split, the rows, the network (two hidden layers of 32), its initial weights and the batches of 256 rows; a sampler
alone draws others. The optimizer is Adam with a constant rate, 0.001, 0.003 or 0.01. 60, 20 and 20 % of the rows of
each class are for training, validation and test. Each method runs once at each rate, with checkpoints after 50, 100,
200, 400, 800 and 1,600 steps. Validation AP chooses rate and checkpoint, for each method, set and split; the figure is
the AP of the test rows, averaged over three splits. The splits are others than those on which the defaults of the
losses were chosen, and on all sets but the first ``SEEN`` nothing was chosen. "Best baseline" is the one of
cross-entropy, weighted and hard-negative cross-entropy that validation AP prefers.

A difference is paired, one value a set. Its interval is the bootstrap's over the sets, at 95 % for one comparison; p is
that of Wilcoxon's signed-rank test, not corrected: the title of a table says how many comparisons it makes.

``binary``: the differences with all steps; for every budget of steps, in which rate and checkpoint are chosen within
the budget; and at each rate the steps to 97 % of the AP of cross-entropy at its checkpoint of that rate, relative to
cross-entropy: the geometric mean over the sets, interpolated between checkpoints. A run that does not get there counts
as twice its steps.

``thinned``: ten sets with more than 15,000 rows, their training and validation rows thinned to 0.4 % positives, with
ordinary batches and with a sampler that puts 16 positives into each. On test rows negatives are weighed so that
positives have that share.

The full run takes about an hour on one core and writes real.json and the picture of the page about choosing a loss.
``--cache`` stores every finished run, so that an interrupted benchmark resumes. Needs the ``bench`` extra.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from figures import BLUE, LINE, MUTED, ORANGE, panels_of, save
from intervals import OverSets
from real_data import BINARY, describe, missing, print_sets
from real_runs import METRICS, TREES, Cache, Job, run
from report import PICTURES, Record, Run

CE, WEIGHTED, HARD = BASELINES = ("cross-entropy", "weighted cross-entropy", "hard-negative 0.2")
SUM = f"{WEIGHTED} + SmoothAP"
METHODS = (*BASELINES, f"{CE} + SmoothAP", SUM, "SmoothAP", f"{CE} + pAUC", f"{CE}, sampler", TREES)
BEST, FOUR = "best baseline", "best of four"
GROUPS = {BEST: BASELINES, FOUR: (CE, WEIGHTED, f"{CE} + SmoothAP", SUM)}
SAMPLER = f"{CE}, sampler"
THINNED = (CE, SAMPLER, WEIGHTED, SUM, f"{SUM}, queue", f"{WEIGHTED}, sampler", f"{CE} + SmoothAP, sampler")
SHARE, SEEN, TARGET = 0.004, 11, 0.97
LARGE = (
    "letter H",
    "diamonds of fair cut",
    "killed car occupants",
    "fatal road accidents",
    "cancelled flights",
    "positive covid tests",
    "searched vehicles",
    "deaths in a liver study",
    "returning hotel guests",
    "respondents born abroad",
)
Found = dict[str, dict[str, np.ndarray]]  # by set and method: (2, rates, splits, steps), of validation and test rows


class Size(NamedTuple):
    """How much is run."""

    sets: tuple[str, ...]
    rates: tuple[float, ...]
    splits: tuple[int, ...]
    steps: tuple[int, ...]


FULL = Size(tuple(BINARY), (1e-3, 3e-3, 1e-2), (10, 11, 12), (50, 100, 200, 400, 800, 1600))
QUICK = Size(("letter H", "positive covid tests"), (3e-3, 1e-2), (10,), (2, 4))


def chosen(found: Found, name: str, methods: Sequence[str], budget: int | None = None) -> float:
    """Return the test AP of the method, rate and checkpoint with the best validation AP, averaged over the splits.

    Only the first ``budget`` checkpoints take part.
    """
    runs = np.concatenate([found[name][method][..., :budget] for method in methods], axis=1)
    validation, test = runs.transpose(0, 2, 1, 3).reshape(2, runs.shape[2], -1)  # of each: splits, choices
    return float(np.take_along_axis(test, validation.argmax(axis=1)[:, None], axis=1).mean())


def of_sets(found: Found, method: str, budget: int | None = None) -> np.ndarray:
    """Return what ``chosen`` does for each set."""
    return np.array([chosen(found, name, GROUPS.get(method, (method,)), budget) for name in found])


def steps_to(found: Found, name: str, method: str, rate: int, steps: Sequence[int]) -> float:
    """Return the steps after which ``method`` has 97 % of what cross-entropy has at the same rate."""
    base = {CE: found[name][CE][:, rate : rate + 1]}
    goal = TARGET * chosen({name: base}, name, (CE,))
    curve = found[name][method][1, rate].mean(axis=0)
    reached = np.flatnonzero(curve >= goal)
    if len(reached) == 0:
        return 2.0 * steps[-1]
    last = int(reached[0])
    if last == 0:
        return float(steps[0])
    part = (goal - curve[last - 1]) / (curve[last] - curve[last - 1])
    return float(steps[last - 1] * (steps[last] / steps[last - 1]) ** part)


def compare(values: np.ndarray, base: np.ndarray) -> Record:
    """Return the comparison with the sets of the largest loss and the largest gain."""
    difference = values - base
    return OverSets.of(difference)._asdict() | {"worst": float(difference.min()), "best": float(difference.max())}


def cells(record: Record) -> list[str]:
    """As cells of a table: the difference with its interval, p, and in how many sets it is above 0."""
    gain = f"{record['mean']:+.3f} [{record['low']:+.3f}, {record['high']:+.3f}]"
    return [gain, f"{record['p']:.3f}", f"{record['wins']} of {record['sets']}"]


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of Markdown."""
    print(f"\n**{title}**\n")
    for line in (header, ["---", *["---:"] * (len(header) - 1)], *rows):
        print("| " + " | ".join(line) + " |")


def against(found: Found, title: str, methods: Sequence[str], bases: Sequence[str]) -> list[Record]:
    """Return and print each method's AP and its differences from the bases that come before it."""
    records: list[Record] = []
    values = {method: of_sets(found, method) for method in (*methods, *bases)}
    for place, method in enumerate(methods):
        earlier = [base for base in bases if base != method and (base not in methods[place:])]
        against_bases = {base: compare(values[method], values[base]) for base in earlier}
        by_set = dict(zip(found, map(float, values[method]), strict=True))
        records.append({"method": method, "ap": float(values[method].mean()), "against": against_bases, "sets": by_set})
    count = sum(len(record["against"]) for record in records)
    header = ["loss", "AP", *(part for base in bases for part in (f"minus {base}", "p", "better"))]
    lines = []
    for record in records:
        compared = [cells(record["against"][base]) if base in record["against"] else [""] * 3 for base in bases]
        lines.append([record["method"], f"{record['ap']:.3f}", *itertools.chain(*compared)])
    markdown(f"{title}; {len(found)} sets, {count} comparisons", header, lines)
    return records


def binary(found: Found, size: Size) -> Record:
    """Return and print the tables of two classes."""
    order = (CE, WEIGHTED, HARD, BEST, *(method for method in METHODS if method not in BASELINES))
    main = against(found, "Average precision, rate and checkpoint by validation", order, (CE, WEIGHTED, BEST))
    new = {name: found[name] for name in list(found)[SEEN:] or found}
    fresh = against(new, "The same on the sets on which nothing was chosen before", (SUM,), (CE, WEIGHTED, BEST))
    budgets = []
    for budget, steps in enumerate(size.steps, 1):
        base = {name: of_sets(found, name, budget) for name in (CE, BEST)}
        for method in (WEIGHTED, HARD, f"{CE} + SmoothAP", SUM):
            values = of_sets(found, method, budget)
            budgets += [{"steps": steps, "method": method, "base": name} | compare(values, base[name]) for name in base]
    lines = [[f"{one['steps']:,}", one["method"], one["base"], *cells(one)] for one in budgets]
    header = ("budget of steps", "loss", "minus", "AP", "p", "better")
    markdown(f"By the budget of steps; {len(found)} sets, {len(lines)} comparisons", header, lines)
    speed = []
    for rate, value in enumerate(size.rates):
        for method in (WEIGHTED, HARD, f"{CE} + SmoothAP", SUM):
            pairs = [[steps_to(found, name, which, rate, size.steps) for which in (method, CE)] for name in found]
            logs = OverSets.of([float(np.log(own / other)) for own, other in pairs])
            ratio, low, high = (float(np.exp(part)) for part in logs[:3])
            never = sum(own > size.steps[-1] for own, _ in pairs)
            record = {"rate": value, "method": method, "ratio": ratio, "low": low, "high": high}
            speed.append(record | {"p": logs.p, "never": never})
    lines = []
    for one in speed:
        ratio = f"{one['ratio']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
        lines.append([f"{one['rate']:g}", one["method"], ratio, f"{one['p']:.3f}", str(one["never"])])
    header = ("rate", "loss", "steps relative to cross-entropy", "p", "never")
    markdown(f"Steps to 97 % of the AP of cross-entropy; {len(found)} sets", header, lines)
    return {"binary": main, "fresh": fresh, "budgets": budgets, "speed": speed}


def draw(results: Record, path: Path) -> None:
    """Draw the gain over cross-entropy by the budget of steps, and that of each set with all steps."""
    steps = [f"{value:,}" for value in results["size"]["steps"]]
    by_set = {record["method"]: record["sets"] for record in results["binary"]}
    gains = {name: value - by_set[CE][name] for name, value in by_set[SUM].items()}
    names = sorted(gains, key=gains.__getitem__)
    with panels_of(2, 3.4 + 0.21 * len(names), height_ratios=[2.4, 0.4 + 0.21 * len(names)]) as (figure, axes):
        budgets, sets = axes[:, 0]
        for shift, (method, colour, label) in enumerate(
            ((SUM, BLUE, "weighted + SmoothAP"), (WEIGHTED, ORANGE, "weighted"))
        ):
            rows = [one for one in results["budgets"] if (one["method"], one["base"]) == (method, CE)]
            place = [x + 0.12 * shift for x in range(len(rows))]
            y = np.array([[one[key] for key in ("mean", "low", "high")] for one in rows])
            spread = np.abs(y[:, 1:].T - y[:, 0])
            budgets.errorbar(place, y[:, 0], yerr=spread, fmt="o-", color=colour, lw=1.8, capsize=3, label=label)
        budgets.legend(frameon=False, loc="upper right")
        budgets.axhline(0, color=LINE, linewidth=1)
        budgets.set_xticks(range(len(steps)), steps)
        budgets.set(xlabel="budget of steps", title="AP minus that of cross-entropy")
        for row, name in enumerate(names):
            colour = BLUE if gains[name] > 0 else MUTED
            sets.plot([0, gains[name]], [row, row], color=colour, linewidth=2)
            sets.plot(gains[name], row, "o", color=colour, markersize=5)
        sets.axvline(0, color=LINE, linewidth=1)
        sets.set_yticks(range(len(names)), names, fontsize=9)
        sets.tick_params(axis="y", length=0)
        sets.set(title="By set, weighted + SmoothAP, all steps", ylim=(-0.7, len(names) - 0.3))
        sets.grid(axis="y", visible=False)
        save(figure, path)


def main() -> None:
    """Run, print, write."""
    script, tables = Run(__doc__, "real"), ("binary", "thinned")
    script.parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    cache, options = Cache.start(script, missing()), script.options
    size = QUICK if options.quick else FULL
    large = [name for name in size.sets if name in LARGE]
    plan = [(size.sets, METHODS, None)] if "binary" in options.tables else []
    plan += [(large, THINNED, SHARE)] if "thinned" in options.tables else []
    jobs = [
        Job(name, method, size.rates, size.splits, size.steps, share)
        for sets, methods, share in plan
        for name in sets
        for method in methods
    ]
    found: dict[float | None, Found] = {}
    start = time.perf_counter()
    for done, job in enumerate(jobs, 1):
        of_metrics = cache.get(job, lambda job=job: run(job))
        result = np.array(of_metrics[METRICS.index("AP")])
        found.setdefault(job.share, {}).setdefault(job.set, {})[job.method] = result
        if job.method == METHODS[-1] or done % 10 == 0:
            print(f"{time.perf_counter() - start:.0f} s: {done} of {len(jobs)} runs, {job.set}", flush=True)
    results: Record = {"size": size._asdict(), "sets": describe(size.sets)}
    print_sets(results["sets"])
    results |= binary(found[None], size) if None in found else {}
    if SHARE in found:
        title = "Thinned to 0.4 % positives, rate and checkpoint by validation"
        results["thinned"] = against(found[SHARE], title, THINNED, (CE, SAMPLER))
    script.write(**results)
    if "binary" in results and (folder := script.folder(PICTURES)) is not None:
        draw(results, folder / "gains.svg")


if __name__ == "__main__":
    main()
