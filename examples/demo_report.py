"""What the demo shows: progress, tables, a figure. Its look and its intervals are those of the benchmarks."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from sklearn.metrics import auc, average_precision_score, roc_curve

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from figures import BLUE, GREEN, MUTED, ORANGE, panels_of, save
from intervals import Interval, paired

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Style(NamedTuple):
    """How a loss is shown."""

    label: str
    color: str


STYLES = {
    "cross_entropy": Style("cross-entropy", MUTED),
    "weighted": Style("weighted CE", ORANGE),
    "smooth_ap": Style("SmoothAP alone", GREEN),
    "sum": Style("weighted CE + SmoothAP", BLUE),
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
        return f"{speed}; in the end {judged(Interval(self.gain, self.width))}"


def judged(gain: Interval) -> str:
    """Return a difference with its interval, and what they allow to say; without an interval that is nothing."""
    word = "better" if gain.mean > gain.width else "worse" if gain.mean < -gain.width else "not measurable"
    return f"{gain.mean:+.3f} +- {gain.width:.3f}: {word}"


def print_pools(scores: Mapping[str, Sequence[float]]) -> None:
    """Print the mean average precision of both pools, own rows first, and the difference."""
    print(f"\nMean average precision of other images, {count(len(scores['own rows']), 'seed')}, 95 % interval\n")
    for label, values in scores.items():
        print(f"  {label:<28}{np.mean(values):.3f}")
    print(f"  {'difference':<28}{judged(paired(scores['all rows'], scores['own rows']))}")


def compare(runs: Mapping[str, Sequence[Run]]) -> dict[str, Against]:
    """Return each other loss against cross-entropy; empty without cross-entropy or with a single seed."""
    base = runs.get("cross_entropy", ())
    if len(base) < 2:
        return {}
    goals = [REACHED * run.curve[-1][1] for run in base]
    own = np.array([steps_to(run.curve, goal) for run, goal in zip(base, goals, strict=True)])
    found = {}
    for name, many in runs.items():
        if name == "cross_entropy":
            continue
        steps = np.array([steps_to(run.curve, goal) for run, goal in zip(many, goals, strict=True)])
        logs = np.log(steps / own)
        mean, width = Interval.of(logs.tolist()) if np.isfinite(logs).all() else (math.inf, 0.0)
        interval = (math.exp(mean), math.exp(mean - width), math.exp(mean + width))
        gain = paired([one.exact.ap for one in many], [one.exact.ap for one in base])
        found[name] = Against(float(np.median(steps)), steps / own, interval, *gain)
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


def plot(scores: Mapping[str, Sequence[float]], runs: Mapping[str, Sequence[Run]], path: Path, letter: str) -> None:
    """Save what the rows of all add, the training curves, and the steps to the precision of cross-entropy."""
    found = compare(runs)
    gains = np.subtract(scores["all rows"], scores["own rows"]).tolist()
    heights = [1.7, 3.8, *([1.0 + 0.5 * len(found)] if found else [])]
    is_faster = bool(found) and all(against.interval[2] < 1 for against in found.values())
    claim = "the same AP in fewer steps" if is_faster else "AP by step"
    with panels_of(len(heights), sum(heights) + 0.4, height_ratios=heights) as (figure, axes):
        mean, width = Interval.of(gains)
        _draw_row(axes[0, 0], 0, gains, (mean, mean - width, mean + width), BLUE)
        axes[0, 0].axvline(0, color=MUTED, linewidth=1.2)
        axes[0, 0].set(ylim=(0.5, -0.5), yticks=[], title="Images of one letter: all rows minus own")
        axes[0, 0].set(xlabel="mean average precision: seeds, mean, 95 % interval")
        _draw_training(axes[1, 0], runs)
        axes[1, 0].set_title(f"Letter {letter}: {claim}")
        if found:
            _draw_steps(axes[2, 0], found)
        save(figure, path)


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
    axes.set(xlabel="optimizer step", ylabel=f"AP on test rows, mean over {seeds}", xlim=(0, steps[-1]), ylim=(0, 1.05))


def _draw_row(axes: Axes, row: float, values: Sequence[float], ends: tuple[float, ...], color: str) -> None:
    """Draw a dot for each seed, and above them the mean with the ends of its interval."""
    mean, low, high = ends
    axes.plot(values, np.full(len(values), row + 0.14), "o", color=color, alpha=0.5, markeredgewidth=0)
    axes.errorbar(mean, row - 0.12, xerr=[[mean - low], [high - mean]], fmt="D", color=color, capsize=4)


def _draw_steps(axes: Axes, found: Mapping[str, Against]) -> None:
    """Draw the steps of each loss relative to those of cross-entropy."""
    axes.axvline(1, color=STYLES["cross_entropy"].color, linewidth=1.2)
    right = 1.0
    for row, (name, against) in enumerate(found.items()):
        color = STYLES[name].color
        if not math.isfinite(against.interval[0]):
            axes.text(0.05, row, "does not get there", color=color, va="center")
            continue
        _draw_row(axes, row, against.ratio, against.interval, color)
        right = max(right, *against.ratio, min(against.interval[2], 2.0))  # a longer bar ends at the edge
    axes.set_yticks(range(len(found)), [STYLES[name].label.replace(" + ", "\n+ ") for name in found])
    axes.set(ylim=(len(found) - 0.5, -0.5), xlim=(0, 1.1 * right))
    axes.set(title="Steps to the dashed line", xlabel="relative to cross-entropy: seeds, mean, 95 % interval")
