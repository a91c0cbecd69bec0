"""The output of the accumulation example: the largest gap between the curves of each panel, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito, which color-blind readers can distinguish.
COLORS = ("#D55E00", "#E69F00", "#009E73", "#CC79A7")
EXACT_COLOR = "#0072B2"

Curve = Sequence[tuple[int, float]]  # (optimizer step, loss on held-out rows)


class Panel(NamedTuple):
    """The learning curves on one kind of data, by their labels."""

    title: str
    unit: str
    whole: Curve  # one process, undivided batches
    naive: Mapping[str, Curve]
    exact: Mapping[str, Curve]
    naive_must_coincide: bool = False

    def gap(self, curve: Curve) -> float:
        """Return the largest relative distance of a curve from that of the undivided batches."""
        pairs = zip(curve, self.whole, strict=True)
        gaps = [abs(value - other) / abs(other) for (_, value), (_, other) in pairs]
        return max(gaps) if all(gap == gap for gap in gaps) else float("inf")  # NaN counts as a difference

    def gaps_to_hold(self) -> list[float]:
        """Return the gaps of the curves that must coincide with that of the undivided batches."""
        curves = [*self.exact.values(), *(self.naive.values() if self.naive_must_coincide else ())]
        return [self.gap(curve) for curve in curves]


def print_gaps(panels: Sequence[Panel], bound: float) -> bool:
    """Print the tables; return whether the curves that must coincide do."""
    print("Largest gap of a learning curve to that of one process with every batch in one piece, relative")
    for panel in panels:
        print(f"\n  {panel.title}: loss from {panel.whole[0][1]:.3f} to {panel.whole[-1][1]:.12f}")
        for label, curve in [*panel.naive.items(), *panel.exact.items()]:
            print(f"    {label:<30}{panel.gap(curve):.1e}")
    largest = max(gap for panel in panels for gap in panel.gaps_to_hold())
    is_kept = largest <= bound
    word = "kept" if is_kept else "BROKEN. The exit status is 1"
    print("\nThe curves of accumulate and pooled_backward must coincide with it; with equal lengths and shares all do.")
    print(f"Largest gap of these: {largest:.1e}, allowed {bound:.0e}: {word}.")
    return is_kept


def plot(panels: Sequence[Panel], path: Path, subject: str) -> None:
    """Save the curves."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    look = {"axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "grid.color": "#e6e6e6"}
    with mpl.rc_context(look):
        figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 4.2), layout="constrained")
        for axis, panel in zip(axes, panels):
            _draw(axis, panel)
        figure.suptitle(subject)
        figure.savefig(path, dpi=80)
        plt.close(figure)


def _draw(axes: Axes, panel: Panel) -> None:
    # Wide and pale first, then narrow and dark, so that curves that coincide all stay visible.
    for place, (label, curve) in enumerate(panel.exact.items()):
        width, strength = 9 - 2 * place, (place + 1) / len(panel.exact)
        axes.plot(*zip(*curve), color=EXACT_COLOR, alpha=0.2 + 0.5 * strength, linewidth=width, label=label)
    for color, (label, curve) in zip(COLORS, panel.naive.items()):
        axes.plot(*zip(*curve), color=color, linewidth=1.5, linestyle="--", label=label)
    axes.plot(*zip(*panel.whole), color="black", linewidth=0.8, label="one batch, one process")
    axes.set(title=panel.title, xlabel="optimizer step", ylabel=panel.unit)
    axes.legend(fontsize=8, frameon=False)
