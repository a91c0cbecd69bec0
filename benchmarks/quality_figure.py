"""The figures of the quality benchmarks: dots and intervals of each method, and recall against the queue capacity.

Usage: python benchmarks/quality_figure.py [--results FOLDER] [--out FOLDER]

Redraws quality.png and quality_queue.png from the stored results; quality.py and queue_scale.py call the functions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from report import RESULTS
from speed_figure import BLUE, INK, MUTED, ORANGE, RC

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "images"
GREEN = "#1b7f5c"
COLOURS = {"SmoothAP": BLUE, "RecallAtQuantile": ORANGE, "PAUCAtBudget": GREEN}
REFERENCES = {  # label, dashes, and how far below the first label
    "best possible ranking": ("best possible", (0, (5, 3)), 0.0),
    "cross-entropy, 4 times the steps": ("CE, 4 x steps", (0, (1, 2)), 0.7),
}
TITLES = {"fraud": "Fraud-like task with hard decoys", "digits": "Digits, one made rare"}


def draw_quality(tasks: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each task and metric, and print the path of the figure."""
    with plt.rc_context(RC):
        size = (13.0, 0.9 + 4.6 * len(tasks))
        figure, axes = plt.subplots(len(tasks), 3, figsize=size, sharey="row", layout="constrained", squeeze=False)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        note = "Mean and 95 % interval over the seeds. Line and band: cross-entropy. Filled dots differ from it"
        figure.supxlabel(f"{note}, seed by seed.", fontsize=10, color=MUTED)
        for row, task in zip(axes, tasks):
            for place, metric in zip(row, ("ap", "recall", "pauc")):
                _draw_metric(place, task, metric)
            row[0].set_title(TITLES[task["task"]], loc="left", fontsize=14, fontweight="bold", pad=12)
        _save(figure, path)


def _draw_metric(axes: Axes, task: dict[str, Any], metric: str) -> None:
    """Draw the mean and the interval of every method; the band is the interval of cross-entropy."""
    methods = task["methods"]
    base = methods[0][metric]
    axes.axvspan(base["mean"] - base["width"], base["mean"] + base["width"], color="#eeeeee", linewidth=0)
    axes.axvline(base["mean"], color="#999999", linewidth=1)
    for place, method in enumerate(methods):
        colour = COLOURS.get(method["method"].partition(" ")[0], INK)
        value = method[metric]
        axes.plot([value["mean"] - value["width"], value["mean"] + value["width"]], [place] * 2, color=colour, lw=2)
        filled = "white" if value["sign"] == "0" and method is not methods[0] else colour
        axes.plot(value["mean"], place, "o", color=colour, markerfacecolor=filled, markersize=6.5, markeredgewidth=1.6)
    for name, figures in task["references"].items():
        if name in REFERENCES:
            label, style, below = REFERENCES[name]
            axes.axvline(figures[metric], color=MUTED, linewidth=1.2, linestyle=style)
            at = (figures[metric], len(methods) - 0.3 + below)
            axes.annotate(f"{label} ", at, ha="right", va="center", fontsize=9.5, color=MUTED)
    axes.set_yticks(range(len(methods)), [method["method"] for method in methods], fontsize=9.5)
    axes.set_ylim(len(methods) + (0.8 if task["references"] else -0.3), -0.7)
    axes.tick_params(axis="y", length=0)
    budget = f"{100 * task['budget']:g} %"
    labels = {
        "ap": "average precision",
        "recall": f"recall in the top {budget}",
        "pauc": f"partial AUC, FPR to {budget}",
    }
    axes.set_xlabel(labels[metric])


def draw_queue(results: list[dict[str, Any]], path: Path) -> None:
    """Draw recall at the budget, and the processor time of a step, against the capacity of the queue."""
    capacities = sorted({row["capacity"] for row in results})
    with plt.rc_context(RC):
        figure, (recall, time) = plt.subplots(1, 2, figsize=(11.0, 4.4), layout="constrained")
        for shift, loss in enumerate(dict.fromkeys(row["loss"] for row in results)):
            rows = [row for row in results if row["loss"] == loss]
            style = {"color": COLOURS[loss], "lw": 1.8, "markersize": 6, "label": loss}
            x = [capacities.index(row["capacity"]) + 0.08 * (shift - 0.5) for row in rows]
            y, width = [row["recall"]["mean"] for row in rows], [row["recall"]["width"] for row in rows]
            recall.errorbar(x, y, yerr=width, fmt="o-", capsize=3, **style)
            time.plot(x, [row["step_ms"] for row in rows], "o-", **style)
        for axes in (recall, time):
            axes.set_xticks(range(len(capacities)), [f"{capacity:,}" for capacity in capacities])
            axes.set_xlabel("rows of the queue")
        recall.set_title("Recall in the top 0.5 %, mean and 95 % interval", loc="left")
        time.set_title("Processor time of a step, ms", loc="left")
        time.set_ylim(bottom=0)
        recall.legend(frameon=False)
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    print(f"Figure: {path}")


def main() -> None:
    """Draw the stored results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"folder of the results (default: {RESULTS})")
    parser.add_argument("--out", type=Path, default=PICTURES, help=f"folder of the figures (default: {PICTURES})")
    arguments = parser.parse_args()
    draw_quality(json.loads((arguments.results / "quality.json").read_text())["tasks"], arguments.out / "quality.png")
    queue = json.loads((arguments.results / "queue_scale.json").read_text())
    draw_queue(queue["queue_scale"], arguments.out / "quality_queue.png")


if __name__ == "__main__":
    main()
