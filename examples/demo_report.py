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
from sklearn.metrics import auc, average_precision_score, precision_recall_curve, roc_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Style(NamedTuple):
    """How a loss is shown. The colors are those of Okabe and Ito, which color-blind readers can distinguish."""

    label: str
    color: str


STYLES = {
    "cross_entropy": Style("cross-entropy", "#777777"),
    "weighted": Style("weighted CE", "#E69F00"),
    "smooth_ap": Style("SmoothAP alone", "#009E73"),
    "sum": Style("weighted CE + SmoothAP", "#0072B2"),
}
LOOK = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "font.size": 10,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fullrank",
}
METRIC_LABELS = {"ap": "AP", "recall": "recall", "pauc": "pAUC"}


class Figures(NamedTuple):
    """The metrics of one run on its test rows."""

    ap: float
    recall: float
    pauc: float


class Run(NamedTuple):
    """One training and its evaluation."""

    scores: np.ndarray  # [N] of the test rows
    targets: np.ndarray  # [N]
    curve: Sequence[tuple[int, float]]  # step, average precision on the test rows
    ours: Figures  # by torchmetrics and fullrank.metrics
    exact: Figures  # by scikit-learn

    def largest_difference(self) -> float:
        """Return the largest difference between the metrics of fullrank and those of scikit-learn."""
        return float(np.abs(np.subtract(self.ours, self.exact)).max())


def exact_figures(scores: np.ndarray, targets: np.ndarray, quantile: float, beta: float) -> Figures:
    """Return the metrics, computed without fullrank."""
    # The threshold is the score at rank (1 - q)(n - 1), counted from 0 at the bottom, rounded up to a row; the row at
    # the threshold is reviewed. The inner rounding keeps 0.95 * 820 = 779.0000000000001 from going up to 780.
    rank = math.ceil(round((1 - quantile) * (len(scores) - 1), 6))
    recall = (scores[targets == 1] >= np.sort(scores)[rank]).mean()
    false_positive_rate, true_positive_rate, _ = roc_curve(targets, scores, drop_intermediate=False)
    inside = false_positive_rate <= beta
    edge = np.interp(beta, false_positive_rate, true_positive_rate)
    area = auc(np.append(false_positive_rate[inside], beta), np.append(true_positive_rate[inside], edge))
    return Figures(float(average_precision_score(targets, scores)), float(recall), float(area / beta))


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


def print_table(runs: Mapping[str, Sequence[Run]], quantile: float, beta: float, tolerance: float) -> None:
    """Print mean and standard deviation over the seeds, and the difference between our metrics and scikit-learn's."""
    seeds = len(next(iter(runs.values())))
    print(f"\nTest rows, mean +- standard deviation over {count(seeds, 'seed')}, by scikit-learn\n")
    heads = ("average precision", f"recall at top {100 * quantile:g} %", f"pAUC, FPR 0..{100 * beta:g} %")
    print(f"  {'loss':<24}" + "".join(f"{head:>22}" for head in heads))
    for name, many in runs.items():
        figures = np.array([one.exact for one in many])
        # One seed has no spread.
        spread = [f" +- {width:.3f}" for width in figures.std(axis=0, ddof=1)] if seeds > 1 else [""] * len(heads)
        cells = [f"{mean:.3f}{width}" for mean, width in zip(figures.mean(axis=0), spread, strict=True)]
        print(f"  {STYLES[name].label:<24}" + "".join(f"{cell:>22}" for cell in cells))
    largest = max(one.largest_difference() for many in runs.values() for one in many)
    word = "they agree" if largest <= tolerance else "THEY DISAGREE. The exit status is 1"
    print("\n  The same by AP of torchmetrics and by fullrank.metrics, each rank with its own rows:")
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
    print("\nMinus cross-entropy, seed by seed: mean and 95 % interval\n")
    for metric, label in METRIC_LABELS.items():
        for name, gain in gains(runs, metric).items():
            word = "better" if gain.mean > gain.width else "worse" if gain.mean < -gain.width else "not measurable"
            cell = f"{gain.mean:+.3f} +- {gain.width:.3f}"
            better, worse = (gain.by_seed > 0).sum(), (gain.by_seed < 0).sum()
            print(f"  {label:<8}{STYLES[name].label:<24}{cell:<18}{better} seeds better, {worse} worse: {word}")


def plot(runs: Mapping[str, Sequence[Run]], path: Path, subject: str) -> None:
    """Save precision-recall curves, training curves, and what the other losses add to cross-entropy."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    found = gains(runs, "ap")
    panels = 3 if found else 2
    with mpl.rc_context(LOOK):
        figure, axes = plt.subplots(panels, 1, figsize=(5.5, 3.5 * panels), layout="constrained")
        figure.get_layout_engine().set(h_pad=0.12)
        _draw_training(axes[0], runs)
        _draw_precision_recall(axes[1], runs)
        if found:
            _draw_gains(axes[2], found)
        seeds = len(next(iter(runs.values())))
        figure.suptitle(f"{subject}: test rows, mean over {count(seeds, 'seed')}", fontsize=12)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _draw_precision_recall(axes: Axes, runs: Mapping[str, Sequence[Run]]) -> None:
    """Draw the precision at each positive that is found; the area under the steps is the average precision."""
    for name, many in runs.items():
        num_positives = int(many[0].targets.sum())
        recall = np.arange(1, num_positives + 1) / num_positives
        precision = np.mean([_precision_at(one, recall) for one in many], axis=0)
        edges, heights = np.append(0, recall), np.append(precision[0], precision)
        axes.step(edges, heights, color=STYLES[name].color)
    axes.set(xlabel="recall (share of positives found)", ylabel="precision (share of found rows that are positive)")
    axes.set(xlim=(0, 1), ylim=(0, 1.02), title="Precision and recall after training")


def _precision_at(run: Run, recall: np.ndarray) -> np.ndarray:
    """Return the precision at the highest threshold that reaches each ``recall``."""
    precision, reached, _ = precision_recall_curve(run.targets, run.scores)
    return precision[::-1][np.searchsorted(reached[::-1], recall - 1e-9)]


def _draw_training(axes: Axes, runs: Mapping[str, Sequence[Run]]) -> None:
    """Draw the average precision on the test rows over the steps; a label at the end of each line."""
    ends = {}
    for name, many in runs.items():
        steps = [step for step, _ in many[0].curve]
        ap = np.array([[value for _, value in one.curve] for one in many]).mean(axis=0)
        axes.plot(steps, ap, color=STYLES[name].color)
        ends[name] = float(ap[-1])
    height = -math.inf
    for name, end in sorted(ends.items(), key=lambda pair: pair[1]):
        height = max(end, height + 0.075)  # labels of lines that end close together
        axes.annotate(STYLES[name].label, (steps[-1] * 1.02, height), color=STYLES[name].color, va="center")
    axes.set(xlabel="optimizer step", ylabel="average precision", title="Average precision in training")
    axes.set(xlim=(0, steps[-1] * 1.5), ylim=(0, 1.05))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= steps[-1]])


def _draw_gains(axes: Axes, found: Mapping[str, Gain]) -> None:
    """Draw a dot for each seed, and the mean with its interval."""
    axes.axvline(0, color=STYLES["cross_entropy"].color, linewidth=1.2)
    for row, (name, gain) in enumerate(found.items()):
        color = STYLES[name].color
        axes.plot(gain.by_seed, np.full(len(gain.by_seed), row + 0.12), "o", color=color, alpha=0.5, markeredgewidth=0)
        axes.errorbar(gain.mean, row - 0.12, xerr=gain.width, fmt="D", color=color, capsize=4)
    axes.set_yticks(range(len(found)), [STYLES[name].label.replace(" + ", "\n+ ") for name in found])
    axes.set(ylim=(len(found) - 0.5, -0.5), xlabel="average precision minus that of cross-entropy")
    axes.set(title="Gain: seeds, mean, 95 % interval")
