"""Draw the pictures of the documentation.

Usage: python docs/make_pictures.py [--out FOLDER]

Needs matplotlib and numpy, not fullrank. The numbers of nodes and bins are those for float32, the gradients those of
benchmarks/results/gradient_scale.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from figures import BLUE, GREEN, GRID, INK, MUTED, ORANGE, RC, SHADE, panels_of, save

BIN, REACH = 4.0, 9  # coarse bins in temperatures, and how many of them ceil(34 / 4) reaches
FINE, P, Q = 16, 4, 14
TARGET = "#b9d5ea"
LEVELS = {"rows": 0.0, "fine": 1.0, "coarse": 2.0}

SCORES, TARGETS = np.array([0.6, 0.5, 0.2, 0.1]), np.array([0, 1, 0, 1])  # the first rows of the tutorial
MOVED = 1  # the positive whose rank is drawn
WIDTHS = ((0.04, BLUE, "-"), (0.15, ORANGE, "--"))  # temperatures; the first is the default there
POSITIVES = (2, 3, 4, 9)  # the places among sixteen rows with falling scores, which four processes hold in turn

GRADIENTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gradient_scale.json"
WAYS = (("fullrank", "right: fullrank", BLUE), ("no_gather", "own rows", ORANGE), ("swapped", "usual gather", GREEN))


def chebyshev(count: int) -> np.ndarray:
    """Return the Chebyshev nodes in [-1, 1], ascending."""
    return -np.cos((2 * np.arange(count) + 1) * np.pi / (2 * count))


def draw_reach(axes: Axes) -> None:
    """Draw which rows reach a target at 0 through nodes, and which are only counted."""
    edge = (REACH + 0.5) * BIN
    x = np.linspace(-58, 58, 600)
    axes.axvspan(-edge, edge, color=SHADE, linewidth=0)
    for boundary in (np.arange(-14, 15) + 0.5) * BIN:
        axes.axvline(boundary, color="#ffffff" if abs(boundary) < edge else GRID, linewidth=1)
    axes.axvspan(-BIN / 2, BIN / 2, color=TARGET, linewidth=0)
    axes.plot(x, 1 / (1 + np.exp(-x)), color=BLUE, linewidth=2.5)
    axes.text(-48, 0.5, "beyond:\nadds 0", ha="center", va="center")
    axes.text(48, 0.5, "beyond:\nadds 1", ha="center", va="center")
    axes.text(-20, 0.5, "within reach:\nthrough nodes", ha="center", va="center")
    axes.text(0, 1.1, "target bin", ha="center", va="bottom", color=INK)
    axes.set(xlim=(-58, 58), ylim=(-0.05, 1.08), yticks=[0, 0.5, 1], xticks=[-38, -20, 0, 20, 38])
    axes.set_xlabel("score of the other row minus that of the target, in temperatures")
    axes.set_ylabel("what it adds")


def draw_levels(axes: Axes) -> None:
    """Draw one source bin and one target bin: rows, fine nodes, coarse nodes, and the steps between them."""
    generator = np.random.default_rng(0)
    centers = {"source": 0.0, "target": 10.0}
    fine_nodes = (np.arange(FINE)[:, None] + 0.5 + chebyshev(P) / 2).ravel() / FINE * BIN - BIN / 2
    for name, center in centers.items():
        colour = ORANGE if name == "source" else BLUE
        rows = generator.uniform(-BIN / 2, BIN / 2, 150)
        left = center - BIN / 2
        axes.add_patch(Rectangle((left, -0.35), BIN, 2.7, facecolor=SHADE, edgecolor="none"))
        for k in range(1, FINE):
            axes.plot([left + k * BIN / FINE] * 2, [-0.35, 1.35], color="#ffffff", linewidth=1)
        axes.plot(center + rows, generator.uniform(-0.2, 0.2, rows.size), ".", color=INK, markersize=3.5)
        for level, nodes, height in (("fine", fine_nodes, 0.22), ("coarse", chebyshev(Q) * BIN / 2, 0.28)):
            y = LEVELS[level]
            axes.vlines(center + nodes, y - height, y + height, color=colour, linewidth=1.2 if level == "fine" else 2)
        axes.text(center, 2.5, f"{name} bin", ha="center", va="bottom", color=colour)
    arrow = {"arrowstyle": "-|>", "color": MUTED, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    for x, way in ((-2.35, 1), (12.35, -1)):
        for low in (0.0, 1.0):
            start, end = (low + 0.12, low + 0.88) if way > 0 else (low + 0.88, low + 0.12)
            axes.annotate("", (x, end), (x, start), arrowprops=arrow)
    axes.annotate("", (7.8, 2.0), (2.2, 2.0), arrowprops=arrow)
    notes = (
        (-2.6, 0.5, "powers of\nthe positions,\nadded up\nper fine bin", "right"),
        (-2.6, 1.5, "constant\nmatrix", "right"),
        (5.0, 2.22, "sigmoid", "center"),
        (12.6, 1.5, "constant\nmatrix", "left"),
        (12.6, 0.5, "one polynomial\nper fine bin,\nevaluated\nat each row", "left"),
        (5.0, 1.0, "p nodes in each\nof F fine bins", "center"),
        (5.0, 1.72, "14 coarse nodes", "center"),
        (5.0, 0.0, "rows,\nany number", "center"),
    )
    for x, y, text, side in notes:
        axes.text(x, y, text, ha=side, va="center", color=INK if side == "center" else MUTED)
    axes.set(xlim=(-6.6, 16.6), ylim=(-0.45, 2.9))
    axes.axis("off")


def draw(path: Path) -> None:
    """Draw linear-time.svg."""
    with plt.rc_context({**RC, "axes.grid": False}):
        figure, (upper, lower) = plt.subplots(
            2, 1, figsize=(5.5, 6.4), layout="constrained", gridspec_kw={"height_ratios": [1, 1.4], "hspace": 0.08}
        )
        draw_reach(upper)
        draw_levels(lower)
        save(figure, path)


def soft_steps(differences: np.ndarray, width: float) -> np.ndarray:
    """Return what rows add to a rank; with a width of 0, whether they are above."""
    return (differences > 0) * 1.0 if width == 0 else 1 / (1 + np.exp(-differences / width))


def precision(scores: np.ndarray, targets: np.ndarray, width: float = 0.0) -> float:
    """Return average precision, with a width that of soft ranks."""
    above = soft_steps(scores[None, :] - scores[:, None], width) * (1 - np.eye(len(scores)))
    shares = (1 + above @ targets) / (1 + above.sum(axis=1))
    return float(shares[targets == 1].mean())


def draw_soft_rank(axes: Axes) -> None:
    """Draw what the other rows add to the rank of one positive."""
    x, others = np.linspace(0, 0.75, 400), np.delete(SCORES, MOVED)
    for width, colour, style in WIDTHS:
        added = soft_steps(others - SCORES[MOVED], width)
        label = f"temperature {width:g}: rank 1 + {added.sum():.2f}"
        axes.plot(x, soft_steps(x - SCORES[MOVED], width), style, color=colour, label=label)
        axes.plot(others, added, "o", color=colour)
    axes.axvline(SCORES[MOVED], color=MUTED, linewidth=1)
    axes.text(SCORES[MOVED] - 0.01, 0.93, "the positive", ha="right", va="center", color=MUTED)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.85))
    axes.set(xlim=(0, 0.75), ylim=(-0.05, 1.05), xlabel="score of another row", title="What a row adds to a rank")


def draw_smoothed(axes: Axes) -> None:
    """Draw the loss as the score of the positive changes."""
    x = np.linspace(0, 0.75, 400)
    for width, colour, style in ((0.0, INK, "-"), *WIDTHS):
        losses = [1 - precision(np.where(np.arange(4) == MOVED, one, SCORES), TARGETS, width) for one in x]
        line = {"drawstyle": "steps-mid", "linewidth": 1} if width == 0 else {"linestyle": style}
        axes.plot(x, losses, color=colour, label=f"temperature {width:g}" if width else "1 - AP", **line)
    axes.legend(frameon=False, loc="lower left")
    axes.set(xlim=(0, 0.75), ylim=(0, 0.8), xlabel="score of the positive", title="Its loss: steps have no slope")


def draw_pools(axes: Axes) -> None:
    """Draw the rows of four processes in the order of their scores, each process alone and all together."""
    places = np.arange(16)
    targets = np.isin(places, POSITIVES) * 1
    groups = [(f"process {process}", places % 4 == process) for process in range(4)] + [("all rows", places >= 0)]
    for line, (_, mask) in enumerate(groups):
        for place in places[mask]:
            kind = {"color": ORANGE} if targets[place] else {"markerfacecolor": "none", "markeredgecolor": MUTED}
            axes.plot(place, line, "o", markersize=8, **kind)
        axes.text(16.2, line, f"AP {precision(-places[mask] * 1.0, targets[mask]):.2f}", va="center")
    axes.set(ylim=(4.6, -0.6), xlim=(-0.6, 18.6), xticks=[], title="Own rows, or the rows of all processes")
    axes.set_yticks(range(5), [name for name, _ in groups])
    axes.set_xlabel("rows by falling score; filled: positives")
    axes.grid(axis="x", visible=False)


def draw_smooth_ap(path: Path) -> None:
    """Draw smooth-ap.svg: a soft rank, the loss that it makes, and what pooling changes."""
    with panels_of(3, 7.2) as (figure, panels):
        draw_soft_rank(panels[0, 0])
        draw_smoothed(panels[1, 0])
        draw_pools(panels[2, 0])
        save(figure, path)


def draw_gradients(path: Path) -> None:
    """Draw gradient.svg: each gradient by its part along that of one process, and its part across it."""
    records = json.loads(GRADIENTS.read_text("utf-8"))["gradient_scale"]
    found = {(record["world_size"], record["key"]): (record["encoder"], record["error"]) for record in records}
    with panels_of(3, 4.4, sharex=True) as (figure, panels):
        for axes, world_size in zip(panels[:, 0], (2, 4, 8)):
            for height, (key, label, colour) in enumerate(WAYS):
                share, error = found[world_size, key]
                across = max(error**2 - (share - 1) ** 2, 0.0) ** 0.5
                arrow = {"arrowstyle": "-|>,head_width=0.3", "color": colour, "linewidth": 4 - height, "shrinkA": 0}
                axes.annotate("", (share, across), (0, 0), arrowprops=arrow | {"shrinkB": 0, "mutation_scale": 14})
                place = (share, across - 0.07) if key == "swapped" else (share + 0.03, across)
                axes.text(*place, label, color=colour, va="top" if key == "swapped" else "center")
            axes.set(ylim=(-0.35, 0.85), yticks=[0, 0.5], xlim=(0, 1.75), xticks=[0, 0.5, 1, 1.5])
            axes.set_title(f"{world_size} processes")
        axes.set_xlabel("along the gradient of one process with all rows")
        figure.supylabel("across it", fontsize=10, color=INK)
        save(figure, path)


def main() -> None:
    """Draw every picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(__file__).resolve().parent / "images"
    parser.add_argument("--out", type=Path, default=folder, help="folder for the pictures (default: docs/images)")
    out = parser.parse_args().out
    draw(out / "linear-time.svg")
    draw_gradients(out / "gradient.svg")
    draw_smooth_ap(out / "smooth-ap.svg")


if __name__ == "__main__":
    main()
