"""Does a ranking loss help? Sixteen methods on two imbalanced tasks, each tuned by the same random search.

Usage: python benchmarks/quality.py [--full | --quick] [--tasks fraud digits] [--cache FILE] [--out FOLDER]

The tasks are those of quality_data.py: ``fraud``, rows made by code with hard decoys at the operating point, and
``digits`` with one digit made rare. The methods and the ranges of their search are those of quality_methods.py:
cross-entropy, three variants of it, and three ranking losses, each with and without queue and warm-up. All share the
network (two hidden layers of 32), Adam with a rate that falls linearly to a hundredth, the batches and the number of
steps. On the fraud task a batch has 4,096 rows, about 12 of them positive.

Tuning: every method draws the same number of configurations and trains each once, on seed 0. The best one has the
highest mean of the three validation figures (AP, recall and partial AUC at the operating point). All methods share this
goal, instead of each loss using its own metric, to show what a loss is good for beyond its own metric. Seed 0 is not
reported. Every other seed draws new rows, a new network and new batches, and its test figures after the last step are
reported: the mean over the seeds and its 95 % interval by Student's t, and the same for the paired difference from
cross-entropy. Each interval covers one comparison and is not widened for the number of comparisons. The digits of all
seeds are splits of the same 1,797 images, so a validation image of seed 0 may be a test image of other seeds, for all
methods alike.

The data and the ranges of the search were fixed before any method was run on the reported seeds. The number of steps
was chosen with cross-entropy only, on other rows. The rule for ties in ``evaluate`` was added after some networks had
given most rows the same score; it can only lower a recall.

``--full`` takes about 45 minutes on one core and writes quality.json, and quality.svg for the documentation. The
default takes a few minutes and ``--quick`` seconds; they write only with ``--out``. ``--cache`` stores every finished
run, so that an interrupted benchmark can resume. Needs the ``test`` extra.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from quality_data import Splits, best_scores, linear_scores, make_digits, make_fraud
from quality_figure import draw_quality
from quality_methods import BASELINE, METHODS, Config, build, draw
from quality_runs import METRICS, Cache, Figures, Interval, Setting, evaluate, say, score, summary, train
from report import PICTURES, Record, Run, print_table
from torch import Tensor

TUNING_SEED = 0
LONGER = 4  # times the steps, for the reference of cross-entropy


class Size(NamedTuple):
    """How much is run."""

    name: str
    rows: int  # of the fraud task
    fraud_steps: int
    digits_steps: int
    trials: int
    seeds: int


SIZES = {
    "full": Size("full", 2_000_000, 800, 300, 10, 8),
    "default": Size("default", 200_000, 150, 150, 3, 3),
    "quick": Size("quick", 10_000, 6, 6, 1, 2),
}


class Task(NamedTuple):
    """The rows of each seed, and the settings that all runs share."""

    name: str
    make: Callable[[int], Splits]
    setting: Setting


def make_task(name: str, size: Size) -> Task:
    """Return the task called ``name``; the rows of the last seed are kept."""
    if name == "fraud":
        make = lru_cache(maxsize=1)(lambda seed: make_fraud(size.rows, seed))
        return Task(name, make, Setting(0.005, size.fraud_steps, 4_096))
    return Task(name, lru_cache(maxsize=1)(make_digits), Setting(0.05, size.digits_steps, 128))


class Study:
    """The runs of one task, through the cache."""

    def __init__(self, task: Task, size: Size, cache: Cache) -> None:
        self.task, self.size, self.cache = task, size, cache

    def run(self, method: str, config: Config, seed: int) -> Figures:
        """Return the figures of one run: on validation rows for the tuning seed, else on test rows."""

        def compute() -> Figures:
            rows, setting = self.task.make(seed), self.task.setting
            loss = build(method, config, setting.budget, setting.steps)
            model = train(rows.train, loss, config["lr"], setting, seed)
            held_out = rows.validation if seed == TUNING_SEED else rows.test
            return evaluate(score(model, held_out.features), held_out.targets, setting.budget)

        shared = [*self.task.setting, self.size.rows if self.task.name == "fraud" else None]
        return self.cache.get([self.task.name, shared, method, config, seed], compute)

    def tune(self) -> dict[str, Record]:
        """Return for each method the best configuration, and the goal of every trial, the best first."""
        trials: dict[str, list[Record]] = {method: [] for method in METHODS}
        for trial in range(self.size.trials):
            for method in METHODS:
                config = draw(method, trial)
                figures = self.run(method, config, TUNING_SEED)
                trials[method].append({"goal": sum(figures.values()) / len(figures), "config": config})
            say(f"{self.task.name}: trial {trial + 1} of {self.size.trials}")
        for found in trials.values():
            found.sort(key=lambda trial: -trial["goal"])
        return {method: {"config": found[0]["config"], "trials": found} for method, found in trials.items()}

    def report(self) -> Record:
        """Tune, run every seed, and return the results to store."""
        best = self.tune()
        runs: dict[str, list[Figures]] = {method: [] for method in METHODS}
        for seed in range(1, self.size.seeds + 1):
            for method in METHODS:
                runs[method].append(self.run(method, best[method]["config"], seed))
            say(f"{self.task.name}: seed {seed} of {self.size.seeds}")
        methods = [{"method": method, **best[method], **summary(runs[method], runs[BASELINE])} for method in METHODS]
        shared = {"budget": self.task.setting.budget, "steps": self.task.setting.steps}
        shared["batch_size"] = self.task.setting.batch_size
        references = self.references(best[BASELINE]["config"]) if self.task.name == "fraud" else {}
        return {"task": self.task.name, **shared, "methods": methods, "references": references}

    def references(self, config: Config) -> Record:
        """Return the references of the fraud task, as means over the seeds.

        They are the best possible and the best linear ranking, and cross-entropy with more steps than any method,
        which shows what more time achieves instead of another loss.
        """
        result = {}
        for name, scores in (("best possible ranking", best_scores), ("best linear ranking", linear_scores)):
            runs = [self._reference(name, scores, seed) for seed in range(1, self.size.seeds + 1)]
            result[name] = _means(runs)
        longer = self.task.setting._replace(steps=LONGER * self.task.setting.steps)
        study = Study(self.task._replace(setting=longer), self.size, self.cache)
        runs = [study.run(BASELINE, config, seed) for seed in range(1, self.size.seeds + 1)]
        return result | {f"{BASELINE}, {LONGER} times the steps": _means(runs)}

    def _reference(self, name: str, scores: Callable[[Tensor], Tensor], seed: int) -> Figures:
        def compute() -> Figures:
            rows = self.task.make(seed).test
            return evaluate(scores(rows.features), rows.targets, self.task.setting.budget)

        return self.cache.get([name, self.size.rows, seed], compute)


def _means(runs: list[Figures]) -> Figures:
    return {metric: Interval.of([run[metric] for run in runs]).mean for metric in METRICS}


def print_results(task: Record, size: Size) -> None:
    """Print the results of the search of one task, then the means and the differences."""
    labels = ("AP", f"recall at {task['budget']:.1%}", f"pAUC, FPR to {task['budget']:.1%}")
    lines = []
    for method in task["methods"]:
        cells = [f"{method[metric]['mean']:.3f} +- {method[metric]['width']:.3f}" for metric in METRICS]
        gains = [f"{method[metric]['gain']:+.3f} +- {method[metric]['gain_width']:.3f}" for metric in METRICS]
        signs = "".join(method[metric]["sign"] for metric in METRICS)
        lines.append([method["method"], *cells, *([""] * 4 if method["method"] == BASELINE else [*gains, signs])])
    for name, figures in task["references"].items():
        lines.append([f"({name})", *(f"{figures[metric]:.3f}" for metric in METRICS), *[""] * 4])
    search = []
    for method in task["methods"]:
        goals = [trial["goal"] for trial in method["trials"]]
        chosen = ", ".join(f"{key} {value}" for key, value in method["config"].items())
        search.append([method["method"], *(f"{goal:.3f}" for goal in (goals[0], median(goals), goals[-1])), chosen])
    title = f"{task['task']}: the search on seed 0, mean of the three validation figures; the best configuration"
    print_table(title, ("method", "best trial", "median", "worst", "chosen"), search)
    title = f"{task['task']}: test rows, mean and 95 % interval over {size.seeds} seeds; minus that of cross-entropy"
    print_table(title, ("method", *labels, *(f"{metric} gain" for metric in METRICS), "sign"), lines)


def main() -> None:
    """Run, print, write."""
    script = Run(__doc__, "quality", full="2,000,000 rows, 10 trials, 8 seeds")
    add = script.parser.add_argument
    add("--tasks", nargs="+", choices=["fraud", "digits"], default=["fraud", "digits"])
    add("--seeds", type=int, help="number of seeds that are reported (default: by the size)")
    add("--trials", type=int, help="trials of each random search (default: by the size)")
    add("--cache", type=Path, help="file of finished runs, one line of JSON each")
    options = script.start()
    size = SIZES[script.size]
    size = size._replace(seeds=options.seeds or size.seeds, trials=options.trials or size.trials)
    cache = Cache(options.cache)
    tasks = [Study(make_task(name, size), size, cache).report() for name in options.tasks]
    for task in tasks:
        print_results(task, size)
    script.write(size=size._asdict(), tasks=tasks)
    if (folder := script.folder(PICTURES)) is not None:
        draw_quality(tasks, folder / "quality.svg")


if __name__ == "__main__":
    main()
