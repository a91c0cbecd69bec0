"""Draw the figures of real runs: the band of PAUCAtBudgetLoss in a training, a metric of each class, a review curve.

Usage: python docs/make_diagnostics.py [--out FOLDER]

Runs the Python blocks of docs/tutorial.md up to the section "Two processes", and those of docs/logging.md and
docs/recipes/after-training.md, and draws their results.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from figures import BLUE, MUTED, ORANGE, RC, SHADE, WIDTH, save

FOLDER = Path(__file__).resolve().parent


def run_page(name: str) -> dict[str, Any]:
    """Run the blocks of a page in one namespace, and return that namespace."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (FOLDER / name).read_text("utf-8"), flags=re.DOTALL):
        if not block.startswith("# train.py"):
            exec(block, names)
    return names


def draw_scores(axes: Axes, scores: np.ndarray, targets: np.ndarray, last: dict[str, float]) -> None:
    """Draw the histograms of the scores, and the band over them."""
    low, high = last["t_beta"], last["t_alpha"]
    bins = np.linspace(scores.min(), scores.max(), 51)
    axes.axvspan(low, high, color=SHADE, linewidth=0)
    axes.hist(scores[targets == 0], bins, density=True, color=MUTED, alpha=0.55, label="negatives")
    axes.hist(scores[targets == 1], bins, density=True, color=ORANGE, alpha=0.65, label="positives")
    top = axes.get_ylim()[1] * 1.18
    for edge, name in ((low, "t_beta "), (high, " t_alpha")):
        axes.axvline(edge, color=BLUE, linewidth=1.6)
        axes.text(edge, top * 0.95, name, color=BLUE, ha="right" if edge == low else "left", va="top")
    axes.text((low + high) / 2, top * 0.95, "band", color=BLUE, ha="center", va="top")
    axes.legend(loc="upper left", frameon=False)
    axes.set(xlabel="score", ylabel="density of each label", ylim=(0, top), title="Test rows after the training")


def draw_history(edges: Axes, share: Axes, history: list[dict[str, float]]) -> None:
    """Draw the edges of the band over the steps, and the share of positives above the lower one."""
    keys = ("step", "t_beta", "t_alpha", "caught")
    steps, low, high, caught = (np.array([row[key] for row in history]) for key in keys)
    for axes in (edges, share):
        axes.set(xlim=(0, steps[-1]))
    edges.fill_between(steps, low, high, color=SHADE, linewidth=0)
    edges.plot(steps, high, color=BLUE, linewidth=1.8)
    edges.plot(steps, low, color=BLUE, linewidth=1.8)
    edges.text(0.97, 0.6, "t_alpha", color=BLUE, ha="right", transform=edges.transAxes)
    edges.text(0.97, 0.16, "t_beta", color=BLUE, ha="right", transform=edges.transAxes)
    edges.set(ylabel="score", title="Test rows during the training")
    edges.tick_params(labelbottom=False)
    share.plot(steps, caught, color=ORANGE, linewidth=1.8)
    share.set(xlabel="step", ylabel="positives\nabove t_beta", ylim=(0, 1))


def draw(names: dict[str, Any], path: Path) -> None:
    """Draw diagnostics.svg."""
    torch = names["torch"]
    with torch.no_grad():
        scores = names["model"](names["test_features"]).flatten().numpy()
    with plt.rc_context({**RC, "axes.grid": False}):
        figure = plt.figure(figsize=(WIDTH, 6.2), layout="constrained")
        grid = figure.add_gridspec(3, 1, height_ratios=[1.8, 1.2, 0.9])
        targets = names["test_targets"].flatten().numpy()
        draw_scores(figure.add_subplot(grid[0]), scores, targets, names["history"][-1])
        draw_history(figure.add_subplot(grid[1]), figure.add_subplot(grid[2]), names["history"])
        save(figure, path)


def main() -> None:
    """Draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = FOLDER / "images"
    parser.add_argument("--out", type=Path, default=folder, help="folder for the pictures (default: docs/images)")
    out = parser.parse_args().out
    draw(run_page("tutorial.md"), out / "diagnostics.svg")
    with plt.rc_context(RC):
        for page, name in (("logging.md", "per-class.svg"), ("recipes/after-training.md", "review.svg")):
            figure = run_page(page)["figure"]
            figure.set(size_inches=(WIDTH, 0.65 * WIDTH), layout_engine="constrained")
            save(figure, out / name)


if __name__ == "__main__":
    main()
