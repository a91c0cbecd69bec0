"""What the figures share: their look, and how they are stored.

A figure is an SVG whose text stays text, without a ground. docs/tools/hooks.py replaces the colours named here by those
of the page; elsewhere, as in README.md, the figure inverts its own where the reader's system is dark. Figures are 5.5
inches wide: their text is readable on a phone too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WIDTH = 5.5
INK, MUTED, LINE, GRID, SHADE = "#333333", "#666666", "#888888", "#e6e6e6", "#e3eef7"
DARK = "@media (prefers-color-scheme: dark){svg{filter: invert(1) hue-rotate(180deg)}}"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#1b7f5c", "#8b5a9f"
RC = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "fullrank",  # the same figure has the same bytes
}


@contextmanager
def panels_of(rows: int, height: float, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Return a figure with the look of all figures, and its axes as an array (rows, columns)."""
    with plt.rc_context({**RC, "axes.titlepad": 12}):
        size = (WIDTH, height)
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
        figure.get_layout_engine().set(h_pad=0.12)
        yield figure, axes


def save(figure: Any, path: Path) -> None:
    """Store ``figure`` in the format that the suffix of ``path`` names, close it, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_svg = path.suffix == ".svg"
    figure.savefig(path, dpi=130, metadata={"Date": None} if is_svg else None, transparent=is_svg)
    plt.close(figure)
    if is_svg:
        path.write_text(path.read_text("utf-8").replace("</style>", f"{DARK}</style>", 1), "utf-8")
    print(f"Figure: {path}")
