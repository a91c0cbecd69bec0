"""The benefit of a longer queue: recall at the operating point against the capacity of the memory queue.

Usage: python benchmarks/queue_scale.py [--full | --quick] [--quality FILE] [--cache FILE] [--out FOLDER]

The task is the fraud task of quality.py, with SmoothAP and RecallAtQuantile and queues of 0 to 1,000,000 rows.
Everything else is the configuration that quality.py found for the loss with a queue, with or without warm-up, whichever
did better on its validation rows. It is read from the quality.json of its full run. The seeds, rows, steps and batches
are those of quality.py too. The queue starts empty, at the end of the warm-up if there is one, and takes the 4,096 rows
of every step, so a queue of 1,000,000 rows is full 245 steps later. For each capacity the benchmark reports the
processor time of a step (forward, backward and optimizer), and the share of the ranking loss's steps in which the queue
was full.

``--full`` takes about 15 minutes on one core and writes queue_scale.json, and quality_queue.svg for the documentation.
The default takes a minute or two on fewer rows and ``--quick`` seconds; they write only with ``--out``. Needs the
``test`` extra.
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from quality import SIZES, Task, make_task
from quality_figure import draw_queue
from quality_methods import RANKING, Config, build
from quality_runs import METRICS, Cache, Figures, evaluate, say, score, summary, train
from report import PICTURES, RESULTS, Record, Run, print_table

FORMS = (" + queue", " + queue + warm-up")


class Scale(NamedTuple):
    """How much is run; ``size`` is the name of a size in quality.py."""

    size: str
    capacities: tuple[int, ...]
    seeds: int


SCALES = {
    "full": Scale("full", (0, 1_000, 10_000, 100_000, 1_000_000), 5),
    "default": Scale("default", (0, 1_000, 10_000, 100_000), 2),
    "quick": Scale("quick", (0, 1_000), 2),
}


def tuned(path: Path, loss: str) -> tuple[str, Config]:
    """Return the better form of ``loss`` with a queue on the fraud task, by validation, and its configuration."""
    (fraud,) = (task for task in json.loads(path.read_text())["tasks"] if task["task"] == "fraud")
    forms = [method for method in fraud["methods"] if method["method"] in [loss + form for form in FORMS]]
    best = max(forms, key=lambda method: method["trials"][0]["goal"])
    return best["method"], best["config"]


def run(task: Task, method: str, config: Config, seed: int) -> Figures:
    """Return the test figures of one run, the processor time of a step in ms and the share of steps at capacity."""
    rows, setting = task.make(seed), task.setting
    module = build(method, config, setting.budget, setting.steps)
    start = time.process_time()
    model = train(rows.train, module, config["lr"], setting, seed)
    seconds = time.process_time() - start
    after = setting.steps - round(config.get("warmup_share", 0) * setting.steps)
    fill = -(-config["queue_size"] // setting.batch_size)
    cost = {"step_ms": 1e3 * seconds / setting.steps, "full_share": max(0.0, 1 - fill / after)}
    return evaluate(score(model, rows.test.features), rows.test.targets, setting.budget) | cost


def study(task: Task, scale: Scale, chosen: dict[str, tuple[str, Config]], cache: Cache) -> list[Record]:
    """Return the intervals for each loss and capacity, and for the difference from no queue."""
    runs: dict[tuple[str, int], list[Figures]] = {(loss, rows): [] for loss in chosen for rows in scale.capacities}
    for seed in range(1, scale.seeds + 1):
        for loss, capacity in runs:
            method, config = chosen[loss][0], chosen[loss][1] | {"queue_size": capacity}
            key = ["queue scale", scale.size, method, config, seed]
            runs[loss, capacity].append(cache.get(key, partial(run, task, method, config, seed)))
        say(f"seed {seed} of {scale.seeds}")
    return [
        {"loss": loss, "capacity": capacity}
        | summary(found, runs[loss, 0])
        | {name: median(figures[name] for figures in found) for name in ("step_ms", "full_share")}
        for (loss, capacity), found in runs.items()
    ]


def print_results(results: list[Record], scale: Scale) -> None:
    """Print the table."""
    lines = []
    for row in results:
        cells = [f"{row['capacity']:,}"]
        cells += [f"{row[metric]['mean']:.3f} +- {row[metric]['width']:.3f}" for metric in METRICS]
        gain = row["recall"]
        cells += [f"{gain['gain']:+.3f} +- {gain['gain_width']:.3f}" if row["capacity"] else ""]
        lines.append([row["loss"], *cells, f"{row['step_ms']:.1f}", f"{row['full_share']:.0%}"])
    header = ("loss", "capacity", "AP", "recall", "pAUC", "recall gain", "CPU ms a step", "full")
    title = f"test rows, mean and 95 % interval over {scale.seeds} seeds; recall minus that without queue"
    print_table(title, header, lines)


def main() -> None:
    """Run, print, write."""
    script = Run(__doc__, "queue_scale", full="2,000,000 rows, queues to 1,000,000, 5 seeds")
    add = script.parser.add_argument
    add("--losses", nargs="+", choices=RANKING, default=list(RANKING[:2]), help="which losses (default: two)")
    add("--seeds", type=int, help="number of seeds (default: by the size)")
    add("--quality", type=Path, default=RESULTS / "quality.json", help="results of quality.py")
    add("--cache", type=Path, help="file of finished runs, one line of JSON each")
    options = script.start()
    scale = SCALES[script.size]
    scale = scale._replace(seeds=options.seeds or scale.seeds)
    chosen = {loss: tuned(options.quality, loss) for loss in options.losses}
    results = study(make_task("fraud", SIZES[scale.size]), scale, chosen, Cache(options.cache))
    print_results(results, scale)
    used = [{"method": method, "config": config} for method, config in chosen.values()]
    script.write(scale=scale._asdict(), chosen=used, queue_scale=results)
    if (folder := script.folder(PICTURES)) is not None:
        draw_queue(results, folder / "quality_queue.svg")


if __name__ == "__main__":
    main()
