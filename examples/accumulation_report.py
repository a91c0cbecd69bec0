"""The output of the accumulation example: the largest gap between the curves of each panel, and the curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Curve = Sequence[tuple[int, float]]  # (optimizer step, loss on held-out rows)


class Panel(NamedTuple):
    """The learning curves on one kind of data, by their labels."""

    title: str
    unit: str
    whole: Curve  # one process, undivided batches
    naive: Mapping[str, Curve]
    exact: Mapping[str, Curve]
    naive_must_coincide: bool = False
    in_picture: bool = False

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


def save(panels: Sequence[Panel], path: Path) -> None:
    """Write the curves, one panel on a line, with the six digits that a picture needs."""

    def rounded(curves: Mapping[str, Curve]) -> dict[str, list[float]]:
        return {label: [float(f"{value:.6g}") for _, value in curve] for label, curve in curves.items()}

    found = [
        {
            "title": panel.title,
            "unit": panel.unit,
            "method": next(iter(panel.exact)).partition(",")[0],
            "in_picture": panel.in_picture,
            "whole": rounded({"": panel.whole})[""],
            "naive": rounded(panel.naive),
            "exact": rounded(panel.exact),
            "gaps": {label: panel.gap(curve) for label, curve in [*panel.naive.items(), *panel.exact.items()]},
        }
        for panel in panels
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n", encoding="utf-8")
