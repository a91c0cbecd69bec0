"""What the demo shows: progress, a table checked against scikit-learn, steps to the same precision, a figure."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.stats import t as student_t
from sklearn.metrics import auc, average_precision_score, roc_curve

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
REACHED = 0.97  # of the final average precision of cross-entropy


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


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return the number and the noun, in the plural if needed."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


class Progress:
    """A bar for each loss on a terminal, elsewhere only its final line. Only one process prints."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self.total, self.is_shown, self.is_terminal = total, is_shown, sys.stdout.isatty()
        self.label, self.done, self.began = "", 0, 0.0

    def start(self, label: str) -> None:
        """Begin the bar of ``label``."""
        self.label, self.done, self.began = label, 0, time.perf_counter()
        self._draw()

    def advance(self) -> None:
        """Count one of ``total``."""
        self.done += 1
        self._draw()

    def _draw(self) -> None:
        is_complete = self.done == self.total
        if not self.is_shown or not (self.is_terminal or is_complete):
            return
        bar = "#" * (30 * self.done // self.total)
        text = f"{time.perf_counter() - self.began:.1f} s" if is_complete else f"[{bar:.<30}]"
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
    print("\n  The same by AP of torchmetrics and by fullrank.metrics, each process with its own rows:")
    print(f"  largest difference {largest:.1e}, {word}.")


class Against(NamedTuple):
    """A loss compared with cross-entropy, seed by seed; intervals are 95 %, by Student's t."""

    steps: float  # to reach ``REACHED`` of the final average precision of cross-entropy, median over seeds; or infinite
    ratio: np.ndarray  # [seeds] these steps divided by those of cross-entropy
    interval: tuple[float, float, float]  # geometric mean of the ratio, and its ends
    gain: float  # of the final average precision
    width: float

    @property
    def verdict(self) -> str:
        """One sentence that holds whatever the figures are."""
        mean, low, high = self.interval
        if not math.isfinite(self.steps):
            speed = f"does not reach {REACHED:.0%} of it"
        else:
            word = "fewer steps" if high < 1 else "more steps" if low > 1 else "no fewer steps that could be measured"
            speed = (
                f"{self.steps:.0f} steps to {REACHED:.0%} of it, {mean:.2f} [{low:.2f}, {high:.2f}] of its own: {word}"
            )
        final = "better" if self.gain > self.width else "worse" if self.gain < -self.width else "no difference measured"
        return f"{speed}; in the end {self.gain:+.3f} +- {self.width:.3f}: {final}"


def compare(runs: Mapping[str, Sequence[Run]]) -> dict[str, Against]:
    """Return each other loss against cross-entropy; empty without cross-entropy or with a single seed."""
    base = runs.get("cross_entropy", ())
    if len(base) < 2:
        return {}
    goals = [REACHED * run.curve[-1][1] for run in base]
    own = np.array([steps_to(run.curve, goal) for run, goal in zip(base, goals, strict=True)])
    found = {}
    quantile = student_t.ppf(0.975, len(base) - 1) / math.sqrt(len(base))
    for name, many in runs.items():
        if name == "cross_entropy":
            continue
        steps = np.array([steps_to(run.curve, goal) for run, goal in zip(many, goals, strict=True)])
        gains = np.array([one.exact.ap - other.exact.ap for one, other in zip(many, base, strict=True)])
        logs = np.log(steps / own)
        mean, width = (logs.mean(), quantile * logs.std(ddof=1)) if np.isfinite(logs).all() else (math.inf, math.inf)
        interval = (
            (math.exp(mean), math.exp(mean - width), math.exp(mean + width)) if math.isfinite(mean) else (mean,) * 3
        )
        width = float(quantile * gains.std(ddof=1))
        found[name] = Against(float(np.median(steps)), steps / own, interval, float(gains.mean()), width)
    return found


def steps_to(curve: Sequence[tuple[int, float]], goal: float) -> float:
    """Return the step at which a curve first reaches ``goal``, between two evaluations; infinite if it does not."""
    before, low = 0, 0.0
    for step, value in curve:
        if value >= goal:
            return before + (step - before) * (goal - low) / (value - low)
        before, low = step, value
    return math.inf


def print_verdict(runs: Mapping[str, Sequence[Run]]) -> None:
    """Print one sentence for each loss."""
    found = compare(runs)
    if not found:
        return
    final = np.mean([run.curve[-1][1] for run in runs["cross_entropy"]])
    print(f"\nAgainst cross-entropy, whose average precision ends at {final:.3f}, seed by seed, 95 % intervals\n")
    for name, against in found.items():
        print(f"  {STYLES[name].label}: {against.verdict}")


def plot(runs: Mapping[str, Sequence[Run]], path: Path, subject: str) -> None:
    """Save the training curves, and how many steps the other losses take to the precision of cross-entropy."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    found = compare(runs)
    heights = [3.8, 1.0 + 0.5 * len(found)] if found else [3.8]
    is_faster = bool(found) and all(against.interval[2] < 1 for against in found.values())
    claim = "the same average precision in fewer steps" if is_faster else "average precision by step"
    with mpl.rc_context(LOOK):
        figure, axes = plt.subplots(
            len(heights), 1, figsize=(5.5, sum(heights)), layout="constrained", squeeze=False, height_ratios=heights
        )
        figure.get_layout_engine().set(h_pad=0.12)
        _draw_training(axes[0, 0], runs)
        if found:
            _draw_steps(axes[1, 0], found)
        figure.suptitle(f"{subject}:\n{claim}", fontsize=12)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _draw_training(axes: Axes, runs: Mapping[str, Sequence[Run]]) -> None:
    """Draw the average precision on the test rows over the steps."""
    curves = {name: np.array([[value for _, value in one.curve] for one in many]) for name, many in runs.items()}
    steps = [step for step, _ in next(iter(runs.values()))[0].curve]
    for name in sorted(curves, key=lambda name: -curves[name][:, -1].mean()):
        axes.plot(steps, curves[name].mean(axis=0), color=STYLES[name].color, label=STYLES[name].label)
    if "cross_entropy" in curves:
        goal, note = REACHED * curves["cross_entropy"][:, -1].mean(), f"{REACHED:.0%} of cross-entropy's end"
        axes.axhline(goal, color=STYLES["cross_entropy"].color, linewidth=1, linestyle=(0, (4, 3)), label=note)
    # Below the axes, where no curve can be.
    axes.legend(loc="upper center", bbox_to_anchor=(0.42, -0.18), ncols=2, frameon=False, fontsize=9, columnspacing=1)
    seeds = count(len(next(iter(runs.values()))), "seed")
    axes.set(xlabel="optimizer step", title=f"Average precision on test rows, mean over {seeds}")
    axes.set(xlim=(0, steps[-1]), ylim=(0, 1.05))


def _draw_steps(axes: Axes, found: Mapping[str, Against]) -> None:
    """Draw for each loss a dot for each seed, and the mean with its interval."""
    axes.axvline(1, color=STYLES["cross_entropy"].color, linewidth=1.2)
    for row, (name, against) in enumerate(found.items()):
        color = STYLES[name].color
        mean, low, high = against.interval
        if not math.isfinite(mean):
            axes.text(0.05, row, "does not get there", color=color, va="center")
            continue
        axes.plot(
            against.ratio, np.full(len(against.ratio), row + 0.14), "o", color=color, alpha=0.5, markeredgewidth=0
        )
        axes.errorbar(mean, row - 0.12, xerr=[[mean - low], [high - mean]], fmt="D", color=color, capsize=4)
    ends = [end for against in found.values() for end in against.interval if math.isfinite(end)]
    axes.set_yticks(range(len(found)), [STYLES[name].label.replace(" + ", "\n+ ") for name in found])
    axes.set(ylim=(len(found) - 0.5, -0.5), xlim=(0, 1.1 * max(1.0, *ends) if ends else 1.1))
    axes.set(xlabel="divided by those of cross-entropy")
    axes.set_title("Steps to the dashed line: seeds, mean, 95 % interval")
