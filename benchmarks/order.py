"""What the number of nodes and the reach do to the error of Smooth-AP by bins.

Usage: python benchmarks/order.py [--quick] [--out FOLDER]

An error is ``norm(gradient - reference) / norm(reference)``; the reference sums pair by pair in float64, from the same
scores. Nothing is timed. The full run takes about a minute and writes order.json and error_over_order.svg; a quick one
of fewer rows takes seconds and writes only where ``--out`` says. Needs the ``bench`` extra.
"""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import torch
from accuracy import choose_positives, normal, relative_error, run
from report import Record, Run, print_records

from fullrank.kernels import node_tables
from fullrank.kernels.node_tables import Order, order_for
from fullrank.kernels.smooth_ap import sums

SHARE = 0.02
CUTOFFS = (12.0, 16.0, 20.0, 24.0, 34.0)
GAPS = (12.0, 18.0, 24.0, 30.0)
FINE_NODES, COARSE_NODES = range(2, 11), range(4, 31, 2)
WIDEST = 0.25  # a power of two as temperature makes a coarse bin 4 temperatures wide, the most there is


def ellipse(half_width: float) -> float:
    """Return rho of the largest ellipse around an interval of so many temperatures that has no pole of a sigmoid."""
    z = math.pi / half_width
    return z + math.sqrt(1 + z * z)


def bounds() -> list[Record]:
    """Return what a polynomial through Chebyshev nodes is off by, in the widest bins of each dtype."""
    records = []
    for dtype in (torch.float32, torch.float64):
        order = order_for(torch.empty(0, dtype=dtype), 1)
        for level, half_width, count in (("fine", 2 / order.fine, order.p), ("coarse", 2.0, order.q)):
            rho = ellipse(half_width)
            records.append(
                {
                    "dtype": str(dtype).replace("torch.", ""),
                    "level": level,
                    "half_width": half_width,
                    "nodes": count,
                    "rho": rho,
                    "bound": rho**-count,
                }
            )
    return records


def measure_orders(rows: int) -> dict[str, list[Record]]:
    """Return the error in float64 over the nodes of a fine bin, and over those of a coarse one, the others ample."""
    scores, positive = normal(rows), choose_positives(rows, SHARE)
    _, gradient = run("direct", scores, positive, WIDEST)

    def with_order(order: Order) -> float:
        with mock.patch.object(sums, "order_for", return_value=order):
            return relative_error(run("binned", scores, positive, WIDEST)[1], gradient)

    return {
        "fine": [
            {"fine": fine, "p": p, "error": with_order(Order(fine, p, 30))} for fine in (8, 32) for p in FINE_NODES
        ],
        "coarse": [{"q": q, "error": with_order(Order(32, 8, q))} for q in COARSE_NODES],
    }


def measure_reaches(rows: int) -> list[Record]:
    """Return the gradient errors of several cutoffs, for 5 positives so many temperatures above ``rows`` negatives.

    The coarse bins are hardly wider than 2 temperatures, and the negatives at the left of a boundary: what is cut off
    is then nearly what the cutoff says.
    """
    temperature = 0.99
    records = []
    for gap in GAPS:
        negatives = normal(rows) * 0.01 - 0.1
        scores = torch.cat([negatives, torch.full((5,), gap * temperature - 0.1, dtype=torch.float64)])
        positive = torch.arange(scores.numel()) >= rows
        loss, gradient = run("direct", scores, positive, temperature)
        record: Record = {"gap": gap, "loss": float(loss)}
        for cutoff in CUTOFFS:
            with mock.patch.object(node_tables, "CUTOFF", cutoff):
                node_tables._cached_kernel.cache_clear()
                record[f"cutoff {cutoff:g}"] = relative_error(run("binned", scores, positive, temperature)[1], gradient)
        records.append(record)
    node_tables._cached_kernel.cache_clear()
    return records


def measure(rows: int, many: int) -> Record:
    """Measure everything, print it as tables, and return it."""
    result: Record = {"rows": rows, "many_rows": many, "share_positive": SHARE, "bounds": bounds()}
    title = "Chebyshev bound rho^-n in the widest bins; half-width in temperatures"
    print_records(title, result["bounds"])
    result["orders"] = measure_orders(rows)
    title = (
        f"Gradient error in float64 over p, with fine bins per coarse bin, q = 30; {rows:,} rows, {SHARE:.0%} positive"
    )
    print_records(title, result["orders"]["fine"])
    print_records("Gradient error in float64 over q, with 32 fine bins of p = 8", result["orders"]["coarse"])
    result["reaches"] = measure_reaches(many)
    print_records(f"Gradient error in float64: 5 positives a gap above {many:,} negatives", result["reaches"])
    return result


def draw(orders: dict[str, list[Record]], path: Path) -> None:
    """Draw the error over the number of nodes, with the bound."""
    from figures import BLUE, INK, MUTED, ORANGE, panels_of, save

    with panels_of(2, 7.2) as (figure, axes_of):
        upper, lower = axes_of[:, 0]
        panels = [(upper, 8, BLUE), (upper, 32, ORANGE), (lower, None, BLUE)]
        for axes, fine, colour in panels:
            kind, key = ("coarse", "q") if fine is None else ("fine", "p")
            points = [(one[key], one["error"]) for one in orders[kind] if one.get("fine") == fine]
            rho = ellipse(2.0 if fine is None else 2 / fine)
            line = [(count, rho**-count) for count, _ in points if rho**-count > 1e-16]
            axes.plot(*zip(*line), color=colour, linewidth=1.2, linestyle="--")
            axes.plot(*zip(*points), color=colour, linewidth=2.0, marker="o", markersize=5)
        for axes in (upper, lower):
            axes.set(yscale="log", ylim=(1e-16, 8), ylabel="relative error of the gradient")
            axes.set_yticks([10.0**power for power in range(-16, 1, 4)])
        upper.set_xticks(list(FINE_NODES))
        lower.set_xticks(list(COARSE_NODES)[::2])
        upper.set_xlabel("p, nodes of a fine bin")
        lower.set_xlabel("q, nodes of a coarse bin")
        upper.text(4.6, 3e-5, "8 fine bins in a coarse one", color=BLUE)
        upper.text(2.1, 2e-10, "32 fine bins", color=ORANGE)
        lower.text(14.8, 1e-6, r"bound $\rho^{-q}$", color=BLUE)
        lower.text(10.8, 1e-10, "measured", color=BLUE, ha="right")
        marks = ((upper, 6, "float32: 8"), (upper, 8, "float64: 32"), (lower, 14, "float32"), (lower, 28, "float64"))
        for axes, count, label in marks:
            axes.axvline(count, ymax=0.93, color=MUTED, linewidth=0.8, linestyle=":")
            axes.text(count, 0.6, label, color=INK, fontsize=9, ha="center", va="bottom")
        upper.set_title("Bins against pairs; dashed: the Chebyshev bound", pad=12)
        save(figure, path)


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "order")
    result = measure(*((2_000, 20_000) if script.start().quick else (20_000, 1_000_000)))
    script.write(**result)
    if (folder := script.folder()) is not None:
        draw(result["orders"], folder / "error_over_order.svg")


if __name__ == "__main__":
    main()
