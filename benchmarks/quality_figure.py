"""The figures of the quality benchmarks: dots and intervals of each method, and recall against the queue capacity."""

from __future__ import annotations

from pathlib import Path

from figures import BLUE, GREEN, GRID, INK, MUTED, ORANGE, panels_of, save
from matplotlib.axes import Axes
from report import Record

COLOURS = {"SmoothAP": BLUE, "RecallAtQuantile": ORANGE, "PAUCAtBudget": GREEN}
REFERENCES = {  # label, dashes, and how far below the first label
    "best possible ranking": ("best possible", (0, (5, 3)), 0.0),
    "cross-entropy, 4 times the steps": ("CE, 4 x steps", (0, (1, 2)), 0.7),
}
TITLES = {"fraud": "Fraud-like task with hard decoys", "digits": "Digits, one made rare"}


def draw_quality(tasks: list[Record], path: Path) -> None:
    """Draw the average precision of every method, a panel for each task, and print the path of the figure."""
    with panels_of(len(tasks), 3.9 * len(tasks)) as (figure, axes):
        for place, task in zip(axes[:, 0], tasks):
            _draw_task(place, task)
        save(figure, path)


def _draw_task(axes: Axes, task: Record) -> None:
    """Draw the mean and the interval of every method; the band is the interval of cross-entropy."""
    methods = task["methods"]
    base = methods[0]["ap"]
    axes.axvspan(base["mean"] - base["width"], base["mean"] + base["width"], color=GRID, linewidth=0)
    for place, method in enumerate(methods):
        colour = COLOURS.get(method["method"].partition(" ")[0], INK)
        value = method["ap"]
        axes.plot([value["mean"] - value["width"], value["mean"] + value["width"]], [place] * 2, color=colour, lw=2)
        filled = "#ffffff" if value["sign"] == "0" and method is not methods[0] else colour
        axes.plot(value["mean"], place, "o", color=colour, markerfacecolor=filled, markersize=5.5, markeredgewidth=1.6)
    for name, figures in task["references"].items():
        if name in REFERENCES:
            label, style, below = REFERENCES[name]
            axes.axvline(figures["ap"], color=MUTED, linewidth=1.2, linestyle=style)
            at = (figures["ap"], len(methods) - 0.2 + below)
            axes.annotate(f"{label} ", at, ha="right", va="center", fontsize=8.5, color=MUTED)
    axes.set_yticks(range(len(methods)), [method["method"] for method in methods], fontsize=8.5)
    axes.set_ylim(len(methods) + (1.2 if task["references"] else -0.3), -0.7)
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="average precision", title=TITLES[task["task"]])


def draw_queue(results: list[Record], path: Path) -> None:
    """Draw recall at the budget, and the processor time of a step, against the capacity of the queue."""
    capacities = sorted({row["capacity"] for row in results})
    with panels_of(2, 6.4) as (figure, panels):
        recall, time = panels[:, 0]
        for shift, loss in enumerate(dict.fromkeys(row["loss"] for row in results)):
            rows = [row for row in results if row["loss"] == loss]
            style = {"color": COLOURS[loss], "lw": 1.8, "markersize": 5}
            x = [capacities.index(row["capacity"]) + 0.08 * (shift - 0.5) for row in rows]
            y, width = [row["recall"]["mean"] for row in rows], [row["recall"]["width"] for row in rows]
            recall.errorbar(x, y, yerr=width, fmt="o-", capsize=3, **style)
            time.plot(x, [row["step_ms"] for row in rows], "o-", **style)
            for axes, last in ((recall, y[-1]), (time, rows[-1]["step_ms"])):
                at = (x[-1], last)
                axes.annotate(loss, at, (9, 0), textcoords="offset points", va="center", color=COLOURS[loss])
        for axes in (recall, time):
            axes.set_xticks(range(len(capacities)), [f"{capacity:,}" for capacity in capacities])
            axes.set(xlabel="rows of the queue", xlim=(-0.3, len(capacities) + 0.35))
        recall.set_title("Recall in the top 0.5 %, mean and 95 % interval")
        time.set_title("Processor time of a step, ms")
        time.set_ylim(bottom=0)
        save(figure, path)
