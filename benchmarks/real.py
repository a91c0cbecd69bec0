"""Do the losses help as they are? Eleven imbalanced sets and five sets of several classes, all real.

Usage: python benchmarks/real.py [--tables defaults tuned classes queue] [--sets NAME ...] [--rates LR ...]
                                 [--full | --quick] [--workers N] [--cache FILE] [--out FOLDER]

The sets are those of real_data.py, the losses those of real_methods.py. Everything below was fixed before the reported
runs. All methods share, for a set and a split, the rows, the network (two hidden layers of 32), its initial weights and
the batches of 512 rows. The optimizer is Adam with a constant rate. 60, 20 and 20 % of the rows of each class are for
training, validation and test. Figures are AP, the recall in the top q of the rows, and the partial AUC up to a
false-positive rate of q, where q is the share of positives; all on test rows, at the one of four evenly spaced
checkpoints that has the best AP on validation rows. Recall and partial AUC are reported also at the checkpoint that is
best in them.

``defaults``: nothing is tuned. Learning rates 0.001, 0.003 and 0.01, 400 and 1,600 steps of the same training, five
splits. The methods in SHORT of real_methods.py train for 400 steps alone, to save time.

``tuned``: every method draws the same number of configurations. Each runs once on split 0, and the one with the best
AP on validation rows runs on the other splits. 800 steps.

``classes``: several classes, without imbalance and with classes that shrink geometrically to 20 and to 3 % of the
largest, in training and test rows alike. Macro AP and balanced accuracy of the argmax after 600 steps, without choice
of a checkpoint: the smallest classes have too few validation rows. Macro AP is that of the logits and that of the
softmax probabilities. Cross-entropy leaves a constant per row undetermined, so only its probabilities are comparable
between rows: both figures of every method are compared with those. Learning rate 0.01, and for the tail of 3 % 0.003
too. Five seeds, which draw the split and the order of the classes.

``queue``: each ranking loss with a queue of 0 and of 1,024 rows, in batches of 128 and of 1,024 rows. Five of the sets,
three learning rates, three splits, 400 steps.

Every comparison is paired, set by set and split by split, with cross-entropy at the same learning rate. An interval is
that of Student's t over the means of the sets, since splits of a set share rows; the other is over sets and splits.
Both are at 95 % after Bonferroni's correction for all comparisons of a table.

``--full`` takes about an hour on two cores and writes real.json; the default and ``--quick`` write only with ``--out``.
``--cache`` stores every finished run, so that an interrupted benchmark can resume. Needs the ``bench`` extra.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from quality_runs import METRICS, Cache, Figures, Interval
from real_data import BINARY, CLASSES, describe, missing, print_sets
from real_methods import BASELINE, LONG, QUEUED, SEVERAL, SHORT, TREES, TUNED, draw
from real_runs import Job, Workers
from report import Record, Run

BATCH = 512
QUEUE_SETS = ("letter H", "damp grey soil", "killed car occupants", "positive covid tests", "searched vehicles")
QUEUE_BATCHES = (128, 1_024)
FEW = ("letter H", "damp grey soil", "positive covid tests")  # sets of the smaller sizes
QUEUES = (0, 1_024)
TAILS = {"heavy": 0.03, "light": 0.2, "none": 1.0}
CLASS_METRICS = ("macro_ap_logits", "macro_ap_softmax", "balanced_accuracy")
OWN_TOO = (*METRICS, "own_recall", "own_pauc")
LABELS = {
    "ap": "AP",
    "recall": "recall",
    "pauc": "pAUC",
    "own_recall": "recall, own checkpoint",
    "own_pauc": "pAUC, own checkpoint",
}


class Size(NamedTuple):
    """How much is run."""

    name: str
    lengths: tuple[int, int]  # steps of ``defaults``: of all methods, and of those in LONG
    rates: tuple[float, ...]
    splits: int
    tuned_steps: int
    trials: int
    class_steps: int
    class_rates: tuple[float, ...]
    class_seeds: int
    queue_steps: int
    queue_splits: int
    binary: tuple[str, ...] = tuple(BINARY)
    several: tuple[str, ...] = tuple(CLASSES)
    queued: tuple[str, ...] = QUEUE_SETS


SIZES = {
    "full": Size("full", (400, 1_600), (1e-3, 3e-3, 1e-2), 5, 800, 5, 600, (3e-3, 1e-2), 5, 400, 3),
    "default": Size("default", (400, 1_600), (3e-3,), 2, 400, 2, 600, (1e-2,), 2, 400, 2, FEW),
    "quick": Size("quick", (4, 8), (3e-3,), 2, 4, 2, 4, (1e-2,), 2, 4, 2, FEW[1:], ("segment",), FEW[:1]),
}


class Study:
    """The runs of all tables, through the cache."""

    def __init__(self, size: Size, workers: Workers) -> None:
        self.size, self.run = size, workers.run

    def defaults(self) -> list[Record]:
        """Return a record per length, learning rate and method, with the figures of each set and split."""
        size, jobs = self.size, []
        for name in size.binary:
            for seed in range(size.splits):
                jobs.append(Job(name, seed, TREES, {}, size.lengths, BATCH))
                for rate in size.rates:
                    jobs += [Job(name, seed, method, {"lr": rate}, size.lengths, BATCH) for method in LONG]
                    jobs += [Job(name, seed, method, {"lr": rate}, size.lengths[:1], BATCH) for method in SHORT]
        found = Runs(jobs, self.run("defaults", jobs))
        return [
            {"steps": steps, "lr": rate, "method": method, **found.of(steps, method, None if method == TREES else rate)}
            for steps in size.lengths
            for rate in size.rates
            for method in (*LONG, *(SHORT if steps == size.lengths[0] else ()), TREES)
        ]

    def tuned(self) -> list[Record]:
        """Return a record per method, with the chosen configurations and the figures of each set and split."""
        size, steps = self.size, (self.size.tuned_steps,)
        draws = {method: [draw(method, trial) for trial in range(size.trials)] for method in TUNED}
        search = [
            Job(name, 0, method, config, steps, BATCH)
            for name in size.binary
            for method in TUNED
            for config in draws[method]
        ]
        goals = [figures[f"validation@{steps[0]}"] for figures in self.run("tuned, search", search)]
        best: dict[tuple[str, str], tuple[float, Job]] = {}
        for goal, job in zip(goals, search, strict=True):
            place = (job.set, job.method)
            if place not in best or goal > best[place][0]:
                best[place] = (goal, job)
        jobs = [best[place][1]._replace(seed=seed) for place in best for seed in range(1, size.splits)]
        jobs += [Job(name, seed, TREES, {}, steps, BATCH) for name in size.binary for seed in range(1, size.splits)]
        found = Runs(jobs, self.run("tuned", jobs))
        return [
            {
                "steps": steps[0],
                "method": method,
                "chosen": {name: best[name, method][1].config for name in size.binary} if method != TREES else {},
                **found.of(steps[0], method),
            }
            for method in (*TUNED, TREES)
        ]

    def classes(self) -> list[Record]:
        """Return a record per tail, learning rate and method, with the figures of each set and seed."""
        size = self.size
        jobs = {
            (tail, rate): [
                Job(name, seed, method, {"lr": rate}, (size.class_steps,), BATCH, smallest)
                for name in size.several
                for seed in range(size.class_seeds)
                for method in SEVERAL
            ]
            for tail, smallest in TAILS.items()
            for rate in (size.class_rates if tail == "heavy" else size.class_rates[-1:])
        }
        together = [job for some in jobs.values() for job in some]
        found = Runs(together, self.run("classes", together))
        return [
            {"tail": tail, "lr": rate, "method": method, **found.of(None, method, rate, smallest=TAILS[tail])}
            for tail, rate in jobs
            for method in SEVERAL
        ]

    def queue(self) -> list[Record]:
        """Return a record per loss, batch, queue and learning rate, with the figures of each set and split."""
        size, steps = self.size, self.size.queue_steps
        settings = [(batch, queue, rate) for batch in QUEUE_BATCHES for queue in QUEUES for rate in size.rates]
        jobs = [
            Job(name, seed, method, {"lr": rate, "queue_size": queue}, (steps,), batch)
            for name in size.queued
            for seed in range(size.queue_splits)
            for method in QUEUED
            for batch, queue, rate in settings
        ]
        found = Runs(jobs, self.run("queue", jobs))
        return [
            {"method": method, "batch": batch, "queue": queue, "lr": rate}
            | found.of(steps, method, rate, batch_size=batch, queue=queue)
            for method in QUEUED
            for batch, queue, rate in settings
        ]


class Runs:
    """Finished jobs with their figures."""

    def __init__(self, jobs: list[Job], figures: list[Figures]) -> None:
        self.all = list(zip(jobs, figures, strict=True))

    def of(self, steps: int | None, method: str, rate: float | None = None, **where: Any) -> Record:
        """Return for each metric the figures of ``method``, a list per set with one entry per split."""
        queue = where.pop("queue", None)
        chosen = [
            (job, figures)
            for job, figures in self.all
            if job.method == method
            and (rate is None or job.config["lr"] == rate)
            and (queue is None or job.config["queue_size"] == queue)
            and all(getattr(job, key) == value for key, value in where.items())
        ]
        result: dict[str, dict[str, list[float]]] = {}
        for job, figures in chosen:
            for name, value in figures.items():
                metric, _, length = name.partition("@")
                if metric != "validation" and length == ("" if steps is None else str(steps)):
                    result.setdefault(metric, {}).setdefault(job.set, []).append(value)
        return result


class Against(NamedTuple):
    """The comparison of one method with another in one metric."""

    mean: float
    gain: float
    over_sets: float  # half the width of the interval, over the means of the sets
    over_splits: float  # the same, over sets and splits
    better: int
    of: int
    worst: float  # least ratio of the means of a set

    @property
    def cells(self) -> list[str]:
        """As cells of a table: gain, both intervals, in how many sets it is better, and the worst ratio."""
        sign = "+" if self.gain > self.over_sets else "-" if -self.gain > self.over_sets else "0"
        gain = f"{self.gain:+.3f} +- {self.over_sets:.3f} ({sign}) / {self.over_splits:.3f}"
        return [gain, f"{self.better} of {self.of}", f"{self.worst:.2f}"]


def against(values: list[dict[str, list[float]]], base: list[dict[str, list[float]]], comparisons: int) -> Against:
    """Return how ``values`` compare with ``base``: for each learning rate, the figures of every set and split.

    The intervals average over the learning rates first. "Better" and "worst" count every set at every rate.
    """
    level = 0.05 / comparisons
    pairs = [[[mean(run[name]), mean(other[name])] for name in run] for run, other in zip(values, base, strict=True)]
    names = list(values[0])
    by_set = [mean(pair[place][0] - pair[place][1] for pair in pairs) for place in range(len(names))]
    every = [
        mean(run[name][place] - other[name][place] for run, other in zip(values, base, strict=True))
        for name in names
        for place in range(len(values[0][name]))
    ]
    flat = [pair for some in pairs for pair in some]
    return Against(
        mean(pair[0] for pair in flat),
        mean(by_set),
        Interval.of(by_set, level).width,
        Interval.of(every, level).width,
        sum(own > other for own, other in flat),
        len(flat),
        min(own / other if other else float("nan") for own, other in flat),
    )


def markdown(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table of Markdown."""
    print(f"\n**{title}**\n")
    for line in (header, ["---", *["---:"] * (len(header) - 1)], *rows):
        print("| " + " | ".join(line) + " |")


def _select(records: list[Record], **where: Any) -> list[Record]:
    return [record for record in records if all(record[key] == value for key, value in where.items())]


def _values(records: list[Record], metric: str, **where: Any) -> list[dict[str, list[float]]]:
    return [record[metric] for record in _select(records, **where)]


def _mean(values: list[dict[str, list[float]]]) -> float:
    return mean(mean(splits) for run in values for splits in run.values())


def _different(records: list[Record], key: str) -> list[Any]:
    return list(dict.fromkeys(record[key] for record in records))


def print_defaults(records: list[Record]) -> None:
    """Print for each length the means by learning rate, the gains over cross-entropy, and AP by set."""
    comparisons = len({(record["steps"], record["method"]) for record in records if record["method"] != BASELINE})
    for steps in _different(records, "steps"):
        rates = _different(records, "lr")
        methods = _different(_select(records, steps=steps), "method")
        lines = []
        for method in methods:
            where = {"steps": steps, "method": method}
            cells = [f"{_mean(_values(records, 'ap', **where, lr=rate)):.3f}" for rate in rates]
            cells += [f"{_mean(_values(records, metric, **where)):.3f}" for metric in OWN_TOO]
            base = _values(records, "ap", steps=steps, method=BASELINE)
            compared = against(_values(records, "ap", **where), base, comparisons)
            lines.append([method, *cells, *(compared.cells if method != BASELINE else ["", "", ""])])
        header = ["loss", *(f"AP, lr {rate:g}" for rate in rates), *(LABELS[metric] for metric in OWN_TOO)]
        header += ["AP minus that of CE, over sets / over splits", "better", "worst ratio"]
        markdown(f"Defaults, {steps:,} steps; intervals corrected for {comparisons} comparisons", header, lines)
        for rate in rates:
            names = list(records[0]["ap"])
            lines = [
                [method, *(f"{mean(values[name]):.3f}" for name in names)]
                for method in methods
                for values in _values(records, "ap", steps=steps, method=method, lr=rate)
            ]
            markdown(f"AP by set, defaults, {steps:,} steps, learning rate {rate:g}", ["loss", *names], lines)


def print_tuned(records: list[Record]) -> None:
    """Print the means and the gains over cross-entropy, all tuned alike."""
    comparisons, lines = len(records) - 1, []
    for record in records:
        cells = [f"{_mean([record[metric]]):.3f}" for metric in OWN_TOO]
        compared = against([record["ap"]], [records[0]["ap"]], comparisons)
        lines.append([record["method"], *cells, *(compared.cells if record["method"] != BASELINE else ["", "", ""])])
    header = [
        "loss",
        *(LABELS[metric] for metric in OWN_TOO),
        "AP minus that of CE, over sets / over splits",
        "better",
        "worst ratio",
    ]
    title = f"Tuned alike, {records[0]['steps']:,} steps; intervals corrected for {comparisons} comparisons"
    markdown(title, header, lines)


def print_classes(records: list[Record]) -> None:
    """Print for each tail the figures of every set, and the gains over the probabilities of cross-entropy."""
    comparisons = len(CLASS_METRICS) * sum(record["method"] != BASELINE for record in records)
    for tail, rate in dict.fromkeys((record["tail"], record["lr"]) for record in records):
        some, lines = _select(records, tail=tail, lr=rate), []
        base = _select(some, method=BASELINE)[0]
        for record in some:
            names = list(record["balanced_accuracy"])
            cells = [" / ".join(f"{mean(record[metric][name]):.3f}" for metric in CLASS_METRICS) for name in names]
            cells.append(" / ".join(f"{_mean([record[metric]]):.3f}" for metric in CLASS_METRICS))
            for metric in CLASS_METRICS:
                other = base["balanced_accuracy" if metric == "balanced_accuracy" else "macro_ap_softmax"]
                cells.append("" if record is base else against([record[metric]], [other], comparisons).cells[0])
            lines.append([record["method"], *cells])
        header = ["macro AP of logits / of softmax / balanced accuracy", *names, "mean"]
        header += ["logits minus softmax of CE", "softmax minus softmax of CE", "accuracy minus that of CE"]
        title = f"Several classes, tail: {tail}, learning rate {rate:g}; corrected for {comparisons} comparisons"
        markdown(title, header, lines)


def print_queue(records: list[Record]) -> None:
    """Print the figures with and without a queue, by loss, batch and learning rate."""
    rates, lines = _different(records, "lr"), []
    comparisons = len(QUEUED) * len(QUEUE_BATCHES)
    for method in QUEUED:
        for batch in QUEUE_BATCHES:
            for queue in QUEUES:
                where = {"method": method, "batch": batch, "queue": queue}
                cells = [f"{_mean(_values(records, 'ap', **where, lr=rate)):.3f}" for rate in rates]
                cells += [f"{_mean(_values(records, metric, **where)):.3f}" for metric in METRICS]
                base = _values(records, "ap", **(where | {"queue": 0}))
                compared = against(_values(records, "ap", **where), base, comparisons)
                lines.append([method, f"{batch:,}", f"{queue:,}", *cells, *(compared.cells if queue else ["", "", ""])])
    header = ["loss", "batch", "queue", *(f"AP, lr {rate:g}" for rate in rates), *(LABELS[name] for name in METRICS)]
    header += ["AP minus that without queue, over sets / over splits", "better", "worst ratio"]
    markdown(f"Queue; intervals corrected for {comparisons} comparisons", header, lines)


PRINT: dict[str, Callable[[list[Record]], None]] = {
    "defaults": print_defaults,
    "tuned": print_tuned,
    "classes": print_classes,
    "queue": print_queue,
}


def main() -> None:
    """Run, print, write."""
    script = Run(__doc__, "real", full="all sets, five splits, three learning rates")
    add = script.parser.add_argument
    add("--tables", nargs="+", choices=list(PRINT), default=list(PRINT))
    add("--sets", nargs="+", choices=[*BINARY, *CLASSES], help="these sets only")
    add("--rates", nargs="+", type=float, help="these learning rates only, in every table but tuned")
    add("--splits", type=int, help="number of splits (default: by the size)")
    add("--workers", type=int, default=min(2, os.cpu_count() or 1), help="processes (default: 2)")
    add("--cache", type=Path, help="file of finished runs, one line of JSON each")
    options = script.start()
    if (absent := missing()) is not None:
        script.parser.exit(0, f"{script.parser.prog}: {absent}\n")
    size = SIZES[script.size]
    if options.sets:
        binary = tuple(name for name in BINARY if name in options.sets)
        size = size._replace(
            binary=binary, several=tuple(name for name in CLASSES if name in options.sets), queued=binary
        )
    if options.rates:
        size = size._replace(rates=tuple(options.rates), class_rates=tuple(options.rates))
    if options.splits:
        size = size._replace(splits=options.splits, class_seeds=options.splits, queue_splits=options.splits)
    workers = Workers(options.workers, Cache(options.cache))
    study = Study(size, workers)
    sets_of = {"classes": size.several, "queue": size.queued}
    tables = [table for table in options.tables if sets_of.get(table, size.binary)]
    results = {table: getattr(study, table)() for table in tables}
    workers.close()
    sets = describe((*size.binary, *size.several))
    print_sets(sets)
    for table, records in results.items():
        PRINT[table](records)
    script.write(size=size._asdict(), sets=sets, **results)


if __name__ == "__main__":
    main()
