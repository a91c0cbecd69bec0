"""The figure of the speed benchmarks: time against pool size.

Usage: python benchmarks/speed_figure.py [--out FOLDER]

Redraws speed.png from the speed.json and the retrieval.json in the same folder, without measuring anything; speed.py
calls ``draw`` itself. The left panel shows one ranking. If there is a retrieval.json, the right panel shows N rankings
of N rows.
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
    """How one competitor is drawn."""

    key: str
    label: str
    colour: str
    width: float
    rise: float = 0.0  # of the label, in points: separates the labels of two lines that end close together
    before: bool = False  # the label is above the end and to the left, because another line continues below
    ends: str = ""  # why it ends before the others


BLUE, ORANGE, PURPLE = "#0072B2", "#D55E00", "#8B5A9F"
LIMIT = f"{PEER_MOST_BYTES / 2**30:.0f} GiB"
POOL = (
    Line("peer_ms", "imbalanced-losses", ORANGE, 2.0, ends=f"ends here: its pairs\nwould outgrow {LIMIT}"),
    Line("sort_ms", "one torch.sort", MUTED, 2.0, rise=14.0),
    Line("ours_ms", "fullrank", BLUE, 3.0, rise=-3.0),
)
CUBE = f"ends here: its N x N x N arrays\nwould outgrow {LIMIT}"
RETRIEVAL = (
    Line("peer_ms", "pytorch-metric-learning", PURPLE, 2.0, rise=56.0, before=True, ends=CUBE),
    Line("ours_ms", "fullrank", BLUE, 3.0),
)


def draw(folder: Path) -> None:
    """Draw time against pool size from the results in ``folder``, and print the path of the figure."""
    growth = json.loads((folder / "speed.json").read_text())["growth"]
    retrieval = folder / "retrieval.json"
    panels = [(growth, POOL, "one ranking; rows in the pool, 1 % positive", 0.34)]
    if retrieval.exists():
        points = json.loads(retrieval.read_text())["retrieval"]
        panels.append((points, RETRIEVAL, "N rankings of N rows each (retrieval); N", 0.36))
    with plt.rc_context(RC):
        size = (8.4, 5.0) if len(panels) == 1 else (13.0, 5.4)
        widths = [1.6, 1.0][: len(panels)]
        figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, layout="constrained", squeeze=False)
        axes[0, 0].get_gridspec().set_width_ratios(widths)
        for place, (points, lines, label, room) in zip(axes[0], panels):
            _draw_panel(place, points, lines, room)
            place.set_xlabel(label)
        first = axes[0, 0]
        first.set_ylim(top=first.get_ylim()[1] * 30)  # space for a label above the highest line
        first.set_title("Smooth-AP, forward and backward", loc="left", fontsize=14, fontweight="bold", pad=24)
        subtitle = "Time on a CPU, compared with one sort of the same scores. All axes are logarithmic."
        first.text(0, 1.025, subtitle, transform=first.transAxes, color=MUTED)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "speed.png", dpi=130)
        plt.close(figure)
    print(f"Figure: {folder / 'speed.png'}")


def _draw_panel(axes: Axes, points: list[dict[str, Any]], lines: tuple[Line, ...], room: float) -> None:
    """Draw one panel; ``room`` is the space for labels on the right, as a share of the width of the lines."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    for line in lines:
        _draw_line(axes, line, points)
    rows = [point["rows"] for point in points]
    axes.set_xlim(rows[0] * 0.85, rows[-1] * (rows[-1] / rows[0]) ** room)
    axes.set_xticks([tick for tick in (10**power for power in range(9)) if rows[0] <= tick <= rows[-1]])
    axes.xaxis.set_major_formatter(lambda value, _: _rows(value))
    axes.yaxis.set_major_formatter(lambda value, _: _time(value))
    axes.minorticks_off()


def _draw_line(axes: Axes, line: Line, points: list[dict[str, Any]]) -> None:
    drawn = [(point["rows"], point[line.key]) for point in points if point[line.key] is not None]
    if not drawn:
        return
    axes.plot(*zip(*drawn), color=line.colour, linewidth=line.width, marker="o", markersize=line.width + 2.5)
    halo = [withStroke(linewidth=4, foreground="white")]  # keeps the grid away from the letters
    style = {"textcoords": "offset points", "color": line.colour, "va": "center", "path_effects": halo}
    place = -2 if line.before else 9
    style["ha"] = "right" if line.before else "left"
    axes.annotate(line.label, drawn[-1], (place, line.rise), fontweight="bold", **style)
    axes.annotate(_time(drawn[-1][1]), drawn[-1], (place, line.rise - 14), fontsize=9.5, **style)
    if len(drawn) < len(points):
        axes.annotate(line.ends, drawn[-1], (place, line.rise - 35), fontsize=9.5, **style)


def _rows(value: float) -> str:
    return f"{value / 1e6:g} million" if value >= 1e6 else f"{value:,.0f}"


def _time(milliseconds: float) -> str:
    if milliseconds >= 1e6:
        return f"{milliseconds / 1e3:,.0f} s"
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1e3 else f"{milliseconds:.3g} ms"


def main() -> None:
    """Draw the stored results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"folder of the results (default: {RESULTS})")
    folder = parser.parse_args().out
    if not (folder / "speed.json").exists():
        raise SystemExit(f"no {folder / 'speed.json'}: run speed.py first")
    draw(folder)


if __name__ == "__main__":
    main()
