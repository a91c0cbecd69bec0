"""What the demo shows: progress, a table checked against scikit-learn, the gain over cross-entropy, a figure."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.stats import t as student_t
from sklearn.metrics import average_precision_score, balanced_accuracy_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Style(NamedTuple):
    """How a loss is shown. The colors are those of Okabe and Ito, which color-blind readers can distinguish."""

    label: str
    color: str


STYLES = {
    "cross_entropy": Style("cross-entropy", "#777777"),
    "weighted": Style("weighted CE", "#E69F00"),
    "smooth_ap": Style("SmoothAP alone", "#56B4E9"),
    "sum": Style("weighted CE + SmoothAP", "#0072B2"),
}
LOOK = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 12,
    "font.size": 11,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 1.8,
}
METRIC_LABELS = {"ap": "macro AP", "accuracy": "balanced accuracy"}  # of the fields of Figures


class Figures(NamedTuple):
    """The metrics of one run on its test rows."""

    ap: float  # mean over the classes of the average precision of the class against the rest
    accuracy: float  # mean over the classes of the share of their rows that are predicted correctly


class Run(NamedTuple):
    """One training and its evaluation."""

    sizes: np.ndarray  # [C] training rows of each class
    class_ap: np.ndarray  # [C] average precision of each class on the test rows, by scikit-learn
    ours: Figures  # by torchmetrics, each rank with its own rows
    exact: Figures  # by scikit-learn

    def largest_difference(self) -> float:
        """Return the largest difference between the metrics over the ranks and those of scikit-learn."""
        return float(np.abs(np.subtract(self.ours, self.exact)).max())


def exact_figures(scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, Figures]:
    """Return the average precision of each class, and the metrics; scores (N, C), targets (N,)."""
    classes = range(scores.shape[1])
    class_ap = np.array([average_precision_score(targets == c, scores[:, c]) for c in classes])
    return class_ap, Figures(float(class_ap.mean()), float(balanced_accuracy_score(targets, scores.argmax(axis=1))))


def count(number: int, noun: str) -> str:
    """Return the number and the noun, in the plural if needed."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Progress:
    """A bar for each loss on a terminal, elsewhere only its final line. Only one rank prints."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self.total, self.is_shown, self.is_terminal = total, is_shown, sys.stdout.isatty()
        self.label, self.done, self.began = "", 0, 0.0

    def start(self, label: str) -> None:
        """Begin the bar of ``label``."""
        self.label, self.done, self.began = label, 0, time.perf_counter()
        self._draw()

    def watch(self, run: Run) -> Run:
        """Count ``run`` and return it."""
        self.done += 1
        self._draw()
        return run

    def _draw(self) -> None:
        is_complete = self.done == self.total
        if not self.is_shown or not (self.is_terminal or is_complete):
            return
        bar = "#" * (30 * self.done // self.total)
        text = f"{time.perf_counter() - self.began:.1f} s" if is_complete else f"[{bar:.<30}] {self.done}/{self.total}"
        back = "\r\x1b[K" if self.is_terminal else ""  # carriage return, erase the line
        print(f"{back}  {self.label:<28}{text}", end="\n" if is_complete else "", flush=True)


def print_table(runs: Mapping[str, Sequence[Run]], tolerance: float) -> None:
    """Print mean and standard deviation over the seeds, and the difference between the ranks and scikit-learn."""
    seeds = len(next(iter(runs.values())))
    print(f"\nTest rows, mean +- standard deviation over {count(seeds, 'seed')}, by scikit-learn\n")
    print(f"  {'loss':<24}" + "".join(f"{label:>20}" for label in METRIC_LABELS.values()))
    for name, many in runs.items():
        figures = np.array([one.exact for one in many])
        # One seed has no spread.
        spread = (
            [f" +- {width:.3f}" for width in figures.std(axis=0, ddof=1)] if seeds > 1 else [""] * len(Figures._fields)
        )
        cells = [f"{mean:.3f}{width}" for mean, width in zip(figures.mean(axis=0), spread, strict=True)]
        print(f"  {STYLES[name].label:<24}" + "".join(f"{cell:>20}" for cell in cells))
    largest = max(one.largest_difference() for many in runs.values() for one in many)
    word = "they agree" if largest <= tolerance else "THEY DISAGREE. The exit status is 1"
    print("\n  The same by torchmetrics, each rank with its own rows:")
    print(f"  largest difference {largest:.1e}, {word}.")


class Gain(NamedTuple):
    """A metric of a loss minus that of cross-entropy."""

    by_seed: np.ndarray  # [seeds]
    mean: float
    width: float  # half of the 95 % interval of the mean, by Student's t


def gains(runs: Mapping[str, Sequence[Run]], metric: str) -> dict[str, Gain]:
    """Return the gain of each other loss over cross-entropy; empty without cross-entropy or with a single seed."""
    base = runs.get("cross_entropy", ())
    found = {}
    for name, many in runs.items():
        if name == "cross_entropy" or len(base) < 2:
            continue
        pairs = zip(many, base, strict=True)
        values = [getattr(one.exact, metric) - getattr(other.exact, metric) for one, other in pairs]
        error = np.std(values, ddof=1) / math.sqrt(len(values))
        width = float(student_t.ppf(0.975, len(values) - 1) * error)
        found[name] = Gain(np.array(values), float(np.mean(values)), width)
    return found


def print_verdict(runs: Mapping[str, Sequence[Run]]) -> None:
    """Print for each loss whether it is better than cross-entropy."""
    if not gains(runs, "ap"):
        return
    print("\nBetter than cross-entropy? Difference of each seed, mean and 95 % interval\n")
    for metric, label in METRIC_LABELS.items():
        for name, gain in gains(runs, metric).items():
            word = "yes" if gain.mean > gain.width else "no, worse" if gain.mean < -gain.width else "not measurably"
            cell = f"{gain.mean:+.3f} +- {gain.width:.3f}"
            better, worse = (gain.by_seed > 0).sum(), (gain.by_seed < 0).sum()
            print(f"  {label:<20}{STYLES[name].label:<24}{cell:<18}{better} seeds better, {worse} worse: {word}")


def plot(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Save what the losses add to cross-entropy in both metrics, and the average precision against the class size."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    found = {metric: gains(runs, metric) for metric in METRIC_LABELS}
    panels = 3 if found["ap"] else 1
    with mpl.rc_context(LOOK):
        figure, axes = plt.subplots(1, panels, figsize=(5.2 * panels, 4.8), layout="constrained", squeeze=False)
        _draw_classes(axes[0, 0], runs)
        for panel, (metric, label) in zip(axes[0, 1:], METRIC_LABELS.items(), strict=False):
            _draw_gains(panel, found[metric], label)
        seeds = len(next(iter(runs.values())))
        figure.suptitle(f"Digits with a long tail: test rows, {count(seeds, 'seed')}", fontsize=14)
        figure.legend(
            *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), frameon=False
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_classes(axes: Axes, runs: Mapping[str, Sequence[Run]]) -> None:
    """Draw the average precision of each class against the number of its training rows."""
    for name, many in runs.items():
        order = [np.argsort(one.sizes) for one in many]  # every seed has the same sizes, of other digits
        sizes = np.mean([one.sizes[by_size] for one, by_size in zip(many, order, strict=True)], axis=0)
        ap = np.mean([one.class_ap[by_size] for one, by_size in zip(many, order, strict=True)], axis=0)
        axes.plot(sizes, ap, "o-", color=STYLES[name].color, label=STYLES[name].label, markersize=4)
    axes.set(xscale="log", xlabel="training rows of the class", ylabel="average precision of the class")
    axes.set_xticks([3, 10, 30, 90], ["3", "10", "30", "90"])
    axes.minorticks_off()
    axes.set(title="The rare classes gain")


def _draw_gains(axes: Axes, found: Mapping[str, Gain], label: str) -> None:
    """Draw a dot for each seed, and the mean with its interval."""
    axes.axvline(0, color=STYLES["cross_entropy"].color, linewidth=1.2)
    for row, (name, gain) in enumerate(found.items()):
        color = STYLES[name].color
        axes.plot(gain.by_seed, np.full(len(gain.by_seed), row + 0.12), "o", color=color, alpha=0.5, markeredgewidth=0)
        axes.errorbar(gain.mean, row - 0.12, xerr=gain.width, fmt="D", color=color, capsize=4)
    axes.set_yticks(range(len(found)), [STYLES[name].label.replace(" + ", "\n+ ") for name in found])
    axes.set(
        ylim=(len(found) - 0.5, -0.5), xlabel="minus that of cross-entropy", title=f"{label[0].upper()}{label[1:]}"
    )
