"""Do the losses for a budget win by their own metric, and does it help to rank more rows together?

Usage: python benchmarks/own_metric.py [--quick] [--tables losses pools budgets] [--part K/N] [--cache FILE]
       [--out FOLDER]

Sets, networks and training are those of real.py, the three metrics those of real_runs.py: average precision, recall in
the top 5 % of the rows, where ties share what is left of them, and the area under the ROC curve to a false-positive
rate of 5 %, over 5 %. A metric on validation rows chooses rate and checkpoint, for each method, set and split, and the
same metric on test rows judges. Nothing was chosen on these splits, and on all sets but the first ``SEEN`` no default
of the library was. Differences are paired, one value a set; intervals are the bootstrap's over the sets, at 95 % for
one comparison, and a title says how many comparisons a table makes.

``losses``: 29 sets, batches of 256 rows, checkpoints after 50, 100, 200, 400 and 800 steps at three rates, three
splits. "Best of four" is the one of cross-entropy, weighted or not, with SmoothAP or without, that validation prefers.
LibAUC 2 has its own optimizer and batches; without it (``pip install --no-deps libauc==2.0.1``) its rows are left out.

``pools``: the ten sets with more than 15,000 rows, two rates and two splits. A loss ranks a batch of
256, 1,024 or 4,096 rows as a whole, or 256 of its rows at a time, as 4 or 16 processes do that do not pool, or 256 rows
and a queue of 4,096. Differences are from cross-entropy with as many rows a step.

``budgets``: the same ten sets, rates and splits, checkpoints up to 400 steps, 64, 256 and 1,024 rows a step and budgets
of 0.5, 2 and 8 %, of loss and metric. How many rows must the budget hold before a loss for it works alone?

The full run takes one to two hours on one core and writes own_metric.json and the picture of the page about choosing a
loss. ``--part 1/2`` and ``--part 2/2`` fill two caches at a time; with both in one file a run without it needs seconds.
Needs the ``bench`` extra.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from figures import BLUE, LINE, ORANGE, panels_of
from figures import save as save_figure
from real import CE, FOUR, LARGE, SAMPLER, SEEN, SUM, WEIGHTED, Found, Size, against, cells, compare, markdown, of_sets
from real_data import BINARY, missing
from real_runs import BATCH, METRICS, PEERS, TREES, Cache, Job, has_peer, run
from report import PICTURES, Record, Run

TERMS = ("", f"{CE} + ", f"{WEIGHTED} + ")
OWN = (*(f"{term}{name}" for name in ("recall", "pAUC dro", "pAUC pairwise") for term in TERMS), "pAUC")
BASES = (CE, WEIGHTED, SAMPLER, f"{CE} + SmoothAP", SUM, "SmoothAP", TREES, *(PEERS if has_peer() else ()))
POOLED = (SUM, f"{WEIGHTED} + recall", "pAUC dro", f"{CE} + pAUC pairwise")


class Layout(NamedTuple):
    """The rows of a step and what is ranked together."""

    batch: int
    parts: int = 1
    added: str = ""  # to the name of the method

    def __str__(self) -> str:
        return f"{self.batch:,}{f' as {self.parts}' if self.parts > 1 else ''}{self.added}"


class Few(NamedTuple):
    """The rows of a step, and the budget of the losses and of the metrics."""

    rows: int
    budget: float


LAYOUTS = (Layout(256), Layout(1024, 4), Layout(1024), Layout(4096, 16), Layout(4096), Layout(256, 1, ", queue"))
FEW = tuple(Few(rows, budget) for rows in (64, 256, 1024) for budget in (0.005, 0.02, 0.08))
ALONE = (("recall", "recall"), ("pAUC dro", "recall"), ("pAUC pairwise", "pAUC"), ("pAUC dro", "pAUC"))  # own metric
STEPS = (50, 100, 200, 400, 800)
FULL = (
    Size(tuple(BINARY), (1e-3, 3e-3, 1e-2), (10, 11, 12), STEPS),
    Size(LARGE, (3e-3, 1e-2), (10, 11), STEPS),
    Size(LARGE, (3e-3, 1e-2), (10, 11), STEPS[:-1]),
)
SMALL = Size(("letter H",), (1e-2,), (10,), (2,))
QUICK = (Size(("letter H", "positive covid tests"), (1e-2,), (10,), (2, 4)), SMALL, SMALL)


def losses(found: dict[str, Found]) -> Record:
    """Return and print the tables of each metric, which chooses and judges."""
    records: Record = {}
    for metric, runs in found.items():
        new = {name: runs[name] for name in list(runs)[SEEN:] or runs}
        records[metric] = against(runs, f"{metric}, chosen by {metric}", (*BASES, FOUR, *OWN), (CE, FOUR))
        title = f"{metric} on the sets on which nothing was chosen"
        records[f"{metric}, fresh"] = against(new, title, (*BASES, FOUR, *OWN), (CE, FOUR))
    return records


def pools(found: dict[str, dict[Layout, Found]]) -> list[Record]:
    """Return and print the differences from cross-entropy with as many rows a step, by metric, loss and layout."""
    records: list[Record] = []
    for metric, by_layout in found.items():
        for method in POOLED:
            for layout, runs in by_layout.items():
                base = of_sets(by_layout[Layout(layout.batch)], CE)
                values = of_sets(runs, f"{method}{layout.added}")
                about = {"metric": metric, "method": method, "layout": str(layout), "base": float(base.mean())}
                records.append(about | {"rows": layout.batch, "parts": layout.parts} | compare(values, base))
        of_metric = [record for record in records if record["metric"] == metric]
        lines = [[record["method"], record["layout"], f"{record['base']:.3f}", *cells(record)] for record in of_metric]
        header = ("loss", "rows a step", CE, "minus cross-entropy", "p", "better")
        markdown(f"{metric} by the rows that are ranked together; {len(lines)} comparisons", header, lines)
    return records


def budgets(found: dict[str, dict[Few, Found]]) -> list[Record]:
    """Return and print the differences of each loss alone from cross-entropy, by rows and budget."""
    records: list[Record] = []
    for method, metric in ALONE:
        for few, runs in sorted(found[metric].items(), key=lambda item: (item[0].rows * item[0].budget, item[0])):
            base = of_sets(runs, CE)
            about = {"method": method, "metric": metric, **few._asdict(), "base": float(base.mean())}
            records.append(about | compare(of_sets(runs, method), base))
    lines = []
    for one in records:
        size = f"{one['rows']:,}", f"{100 * one['budget']:g} %", f"{one['rows'] * one['budget']:.1f}"
        lines.append([one["method"], one["metric"], *size, f"{one['base']:.3f}", *cells(one)])
    header = ("loss", "metric", "rows a step", "budget", "rows in it", CE, "minus cross-entropy", "p", "better")
    markdown(f"Own metric by the rows in the budget; {len(lines)} comparisons", header, lines)
    return records


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw recall and partial area minus those of cross-entropy, by the rows of a step, pooled or not."""
    sizes = sorted({record["rows"] for record in records})
    panels = (
        ("recall", "recall in the top 5 %", POOLED[1]),
        ("pAUC", "area to a false-positive rate of 5 %", "pAUC dro"),
    )
    with panels_of(2, 5.8, sharex=True) as (figure, axes):
        for (metric, title, own), axis in zip(panels, axes[:, 0], strict=True):
            for number, (method, colour) in enumerate(((SUM, BLUE), (own, ORANGE))):
                some = [record for record in records if (record["metric"], record["method"]) == (metric, method)]
                some = [record for record in some if "queue" not in record["layout"]]
                for is_pooled in (True, False):
                    line = [one for one in some if (one["parts"] == 1) == is_pooled or one["rows"] == BATCH]
                    place = [sizes.index(one["rows"]) + 0.06 * (2 * number + is_pooled) for one in line]
                    y = np.array([[one[key] for key in ("mean", "low", "high")] for one in line])
                    label = f"{method}, {'all rows' if is_pooled else '256 rows at a time'}"
                    style = {"fmt": "o-" if is_pooled else "o:", "color": colour, "lw": 1.6, "capsize": 3}
                    axis.errorbar(place, y[:, 0], yerr=np.abs(y[:, 1:].T - y[:, 0]), label=label, markersize=4, **style)
            axis.axhline(0, color=LINE, linewidth=1)
            axis.set(title=f"{title[:1].upper()}{title[1:]}, minus cross-entropy")
            axis.legend(frameon=False, fontsize=7)
        axes[-1, 0].set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        axes[-1, 0].set(xlabel="rows a step")
        save_figure(figure, path)


def main() -> None:
    """Run, print, write."""
    script, tables = Run(__doc__, "own_metric"), ("losses", "pools", "budgets")
    script.parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    script.parser.add_argument("--part", default="1/1", help="which of how many parts of the runs to make")
    cache, options = Cache.start(script, missing()), script.options
    of_losses, of_pools, of_budgets = QUICK if options.quick else FULL
    jobs: dict[Job, Layout | Few | None] = {}
    if "losses" in options.tables:
        jobs |= {Job(name, method, *of_losses[1:]): None for name in of_losses.sets for method in (*BASES, *OWN)}
    if "pools" in options.tables:
        for name in of_pools.sets:
            for layout in LAYOUTS:
                baseline = (CE,) if layout.parts == 1 and not layout.added else ()
                for method in (*baseline, *POOLED):
                    job = Job(name, f"{method}{layout.added}", *of_pools[1:], None, layout.batch, layout.parts)
                    jobs[job] = layout
    if "budgets" in options.tables:
        for name, few, method in itertools.product(of_budgets.sets, FEW, (CE, *dict(ALONE))):
            jobs[Job(name, method, *of_budgets[1:], batch=few.rows, budget=few.budget)] = few
    part, parts = map(int, options.part.split("/"))
    found: dict[tuple[Layout | Few | None, str], Found] = {}
    start = time.perf_counter()
    for done, (job, layout) in enumerate(jobs.items()):
        if done % parts != part - 1:
            continue
        for metric, result in zip(METRICS, cache.get(job, lambda job=job: run(job)), strict=True):
            found.setdefault((layout, metric), {}).setdefault(job.set, {})[job.method] = np.array(result)
        if done % 20 < parts:
            print(f"{time.perf_counter() - start:.0f} s: {done + 1} of {len(jobs)} runs, {job.set}", flush=True)
    if parts > 1:
        return
    results: Record = {"sizes": [size._asdict() for size in (of_losses, of_pools, of_budgets)]}
    if "losses" in options.tables:
        results["losses"] = losses({metric: found[None, metric] for metric in METRICS})
    if "pools" in options.tables:
        results["pools"] = pools({metric: {layout: found[layout, metric] for layout in LAYOUTS} for metric in METRICS})
    if "budgets" in options.tables:
        results["budgets"] = budgets({metric: {few: found[few, metric] for few in FEW} for metric in METRICS})
    script.write(**results)
    if "pools" in results and (folder := script.folder(PICTURES)) is not None:
        draw(results["pools"], folder / "pools.svg")


if __name__ == "__main__":
    main()
