"""The figure of the speed benchmark: time over pool size.

Usage: python benchmarks/speed_figure.py [--out FOLDER]

Draws speed.png anew from the speed.json beside it, without measuring anything; speed.py calls ``draw`` itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from report import PEER_MOST_BYTES, RESULTS

INK, MUTED = "#333333", "#666666"
RC = {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
}


class Line(NamedTuple):
    """What is drawn of one competitor."""

    key: str
    label: str
    colour: str
    width: float
    rise: float = 0.0  # of the label, in points: two lines that end close together are labelled apart


LINES = (
    Line("peer_ms", "imbalanced-losses", "#D55E00", 2.0),
    Line("sort_ms", "one torch.sort", MUTED, 2.0, rise=14.0),
    Line("ours_ms", "fullrank", "#0072B2", 3.0, rise=-3.0),
)


def draw(growth: list[dict[str, Any]], path: Path) -> None:
    """Draw time over pool size, each line labelled at its end, and say where the figure is."""
    with plt.rc_context(RC):
        figure, axes = plt.subplots(figsize=(8.4, 5.0), layout="constrained")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for line in LINES:
            _draw_line(axes, line, growth)
        rows = [point["rows"] for point in growth]
        axes.set_xlim(rows[0] * 0.85, rows[-1] * (rows[-1] / rows[0]) ** 0.26)  # room for the labels
        axes.set_xticks([tick for tick in (10**power for power in range(9)) if rows[0] <= tick <= rows[-1]])
        axes.xaxis.set_major_formatter(lambda value, _: _rows(value))
        axes.yaxis.set_major_formatter(lambda value, _: _time(value))
        axes.minorticks_off()
        axes.set_xlabel("rows in the pool, 1 % positive")
        axes.set_title("Smooth-AP, forward and backward", loc="left", fontsize=14, fontweight="bold", pad=24)
        subtitle = "Time on a CPU, beside one sort of the same scores. Both axes are logarithmic."
        axes.text(0, 1.025, subtitle, transform=axes.transAxes, color=MUTED)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
        plt.close(figure)
    print(f"Figure: {path}")


def _draw_line(axes: Axes, line: Line, growth: list[dict[str, Any]]) -> None:
    points = [(point["rows"], point[line.key]) for point in growth if point[line.key] is not None]
    if not points:
        return
    axes.plot(*zip(*points), color=line.colour, linewidth=line.width, marker="o", markersize=line.width + 2.5)
    halo = [withStroke(linewidth=4, foreground="white")]  # the grid stops short of the letters
    style = {"textcoords": "offset points", "color": line.colour, "va": "center", "path_effects": halo}
    axes.annotate(line.label, points[-1], (9, line.rise), fontweight="bold", **style)
    axes.annotate(_time(points[-1][1]), points[-1], (9, line.rise - 14), fontsize=9.5, **style)
    if len(points) < len(growth):
        text = f"ends here: its pair matrices\nwould outgrow {PEER_MOST_BYTES / 2**30:.0f} GiB"
        axes.annotate(text, points[-1], (9, line.rise - 35), fontsize=9.5, **style)


def _rows(value: float) -> str:
    return f"{value / 1e6:g} million" if value >= 1e6 else f"{value:,.0f}"


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1e3 else f"{milliseconds:.3g} ms"


def main() -> None:
    """Draw the stored results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of speed.json (default: {RESULTS})")
    folder = parser.parse_args().out
    stored = folder / "speed.json"
    if not stored.exists():
        raise SystemExit(f"no {stored}: run speed.py first")
    draw(json.loads(stored.read_text())["growth"], folder / "speed.png")


if __name__ == "__main__":
    main()
