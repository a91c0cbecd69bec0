"""The figure of the speed benchmarks: time against pool size.

Usage: python benchmarks/speed_figure.py [--out FOLDER]

Redraws speed.svg from the speed.json and the retrieval.json in the same folder, without measuring anything; speed.py
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
from figures import BLUE, MUTED, ORANGE, PURPLE, RC, WIDTH, save
from matplotlib.axes import Axes
from report import PEER_MOST_BYTES, RESULTS


class Line(NamedTuple):
    """How one competitor is drawn."""

    key: str
    label: str
    colour: str
    width: float
    is_left: bool = False  # the label is left of the end, because another line passes on the right


# Why the line of a peer ends: its arrays of pairs, or of triples in retrieval, would be larger.
LIMIT = f"needs over {PEER_MOST_BYTES / 2**30:.0f} GiB"
POOL = (
    Line("peer_ms", "imbalanced-losses", ORANGE, 2.0, is_left=True),
    Line("sort_ms", "one torch.sort", MUTED, 2.0),
    Line("ours_ms", "fullrank", BLUE, 3.0),
)
RETRIEVAL = (
    Line("peer_ms", "pytorch-metric-learning", PURPLE, 2.0, is_left=True),
    Line("ours_ms", "fullrank", BLUE, 3.0),
)


def draw(folder: Path) -> None:
    """Draw time against pool size from the results in ``folder``, and print the path of the figure."""
    growth = json.loads((folder / "speed.json").read_text())["growth"]
    retrieval = folder / "retrieval.json"
    panels = [(growth, POOL, "one ranking", "rows in the pool, 1 % positive", 0.42)]
    if retrieval.exists():
        points = json.loads(retrieval.read_text())["retrieval"]
        panels.append((points, RETRIEVAL, "N rankings of N rows (retrieval)", "N", 0.42))
    with plt.rc_context(RC):
        size = (WIDTH, 3.6 * len(panels))
        figure, axes = plt.subplots(len(panels), 1, figsize=size, layout="constrained", squeeze=False)
        figure.get_layout_engine().set(h_pad=0.12)
        for place, (points, lines, title, label, room) in zip(axes[:, 0], panels):
            _draw_panel(place, points, lines, room)
            place.set_xlabel(label)
            place.set_title(f"Time of a step: {title}", pad=12)
        save(figure, folder / "speed.svg")


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
    end = _time(drawn[-1][1]) + (f", then\n{LIMIT}" if len(drawn) < len(points) else "")
    style = {
        "textcoords": "offset points",
        "color": line.colour,
        "va": "top",
        "ha": "right" if line.is_left else "left",
    }
    place = -22 if line.is_left else 9
    axes.annotate(line.label, drawn[-1], (place, 6), fontweight="bold", **style)
    axes.annotate(end, drawn[-1], (place, -7), fontsize=8, **style)


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
