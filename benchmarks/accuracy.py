"""How far Smooth-AP by bins is from sums over pairs in float64: per score set, per number of nodes, per reach.

Usage: python benchmarks/accuracy.py [--plot] [--out FOLDER]

An error is ``norm(gradient - reference) / norm(reference)``; the reference sums pair by pair in float64, from the same
float32 scores. Nothing is timed. The run takes about a minute; with ``--plot`` it also writes accuracy.json and
error_over_order.png. Needs the ``test`` extra and, for ``--plot``, matplotlib.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from report import RESULTS, machine, print_table, write_json
from torch import Tensor

from fullrank.losses import bins as binning
from fullrank.losses import node_tables, soft_ranks, soft_ranks_binned
from fullrank.losses.node_tables import Order, order_for

ROWS, SHARE = 20_000, 0.02
MANY, FEW = 1_000_000, 200  # rows and positives, where the number of rows matters
TEMPERATURES = (1e-5, 1e-3, 1e-2, 0.1, 1.0)
CUTOFFS = (12.0, 16.0, 20.0, 24.0, 34.0)
GAPS = (12.0, 18.0, 24.0, 30.0)
FINE_NODES, COARSE_NODES = range(2, 11), range(4, 31, 2)
WIDEST = 0.25  # a power of two as temperature makes a coarse bin 4 temperatures wide, the most there is
Record = dict[str, Any]


def normal(size: int = ROWS) -> Tensor:
    """Return normal scores."""
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def clustered() -> Tensor:
    """Return two clusters, one of them a hundred times as narrow as the other."""
    return torch.cat([normal()[::2] * 0.01, 3 + normal()[1::2]])


def cauchy() -> Tensor:
    """Return scores with tails that no window of bins covers."""
    return torch.tan(math.pi * (torch.rand(ROWS, generator=torch.Generator().manual_seed(1)) - 0.5))


SETS: dict[str, Callable[[], Tensor]] = {
    "normal": normal,
    "tied": lambda: normal().round(decimals=1),
    "clustered": clustered,
    "one outlier": lambda: torch.cat([normal()[1:], torch.tensor([1e30])]),
    "cauchy": cauchy,
}


def choose_positives(size: int, share: float) -> Tensor:
    """Return (size,) bool, about ``share`` of it True."""
    return torch.rand(size, generator=torch.Generator().manual_seed(2)) < share


def run(method: str, scores: Tensor, positive: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient (M,) of one class, in float64."""
    leaf = scores[None].clone().requires_grad_()
    loss = soft_ranks.smooth_ap_sums(leaf, positive[None], None, None, temperature, method)[0]
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach().double(), leaf.grad[0].double()


def error(ours: Tensor, reference: Tensor) -> float:
    """Return the relative error in the 2-norm."""
    return float((ours - reference).norm() / reference.norm())


def way(scores: Tensor, temperature: float) -> str:
    """Return in words how ``method="binned"`` sums these scores."""
    fine = order_for(scores.dtype, scores.numel()).fine
    bins = binning.cover(scores.min()[None], scores.max()[None], temperature, fine)
    if bins.window <= binning.most_bins(scores.numel()):
        return "one window"
    return "neighbours" if binning.cover_bulk(scores, temperature, fine) is None else "window + far bins"


def measure_set(name: str, temperature: float) -> Record:
    """Return the errors of three ways to compute one set's gradient."""
    scores, positive = SETS[name](), choose_positives(ROWS, SHARE)
    loss, gradient = run("direct", scores.double(), positive, temperature)
    record: Record = {"scores": name, "temperature": temperature, "way": way(scores, temperature)}
    record["direct float32"] = error(run("direct", scores, positive, temperature)[1], gradient)
    for dtype in (torch.float32, torch.float64):
        ours = run("binned", scores.to(dtype), positive, temperature)
        record[f"binned {dtype}".replace("torch.", "")] = error(ours[1], gradient)
        record[f"loss binned {dtype}".replace("torch.", "")] = error(ours[0], loss)
    return record


def ellipse(half_width: float) -> float:
    """Return rho of the largest ellipse around an interval of so many temperatures that has no pole of a sigmoid."""
    z = math.pi / half_width
    return z + math.sqrt(1 + z * z)


def bounds() -> list[Record]:
    """Return what a polynomial through Chebyshev nodes is off by, in the widest bins of each dtype."""
    records = []
    for dtype in (torch.float32, torch.float64):
        order = order_for(dtype, ROWS)
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


def measure_orders() -> dict[str, list[Record]]:
    """Return the error in float64 over the nodes of a fine bin, and over those of a coarse one, the others ample."""
    scores, positive = normal().double(), choose_positives(ROWS, SHARE)
    _, gradient = run("direct", scores, positive, WIDEST)

    def with_order(order: Order) -> float:
        with mock.patch.object(soft_ranks, "order_for", return_value=order):
            return error(run("binned", scores, positive, WIDEST)[1], gradient)

    return {
        "fine": [
            {"fine": fine, "p": p, "error": with_order(Order(fine, p, 30))} for fine in (16, 32) for p in FINE_NODES
        ],
        "coarse": [{"q": q, "error": with_order(Order(32, 8, q))} for q in COARSE_NODES],
    }


def measure_reaches() -> list[Record]:
    """Return the gradient errors of several cutoffs, for 5 positives so many temperatures above a million negatives.

    The coarse bins are hardly wider than 2 temperatures, and the negatives at the left of a boundary: what is cut off
    is then nearly what the cutoff says.
    """
    temperature = 0.99
    records = []
    for gap in GAPS:
        negatives = normal(MANY).double() * 0.01 - 0.1
        scores = torch.cat([negatives, torch.full((5,), gap * temperature - 0.1, dtype=torch.float64)])
        positive = torch.arange(scores.numel()) >= MANY
        loss, gradient = run("direct", scores, positive, temperature)
        record: Record = {"gap": gap, "loss": float(loss)}
        for cutoff in CUTOFFS:
            with mock.patch.object(node_tables, "CUTOFF", cutoff):
                record[f"cutoff {cutoff:g}"] = error(run("binned", scores, positive, temperature)[1], gradient)
        records.append(record)
    return records


def measure_moments() -> list[Record]:
    """Return the errors with moments summed in float64 and in float32, for a million rows."""
    positive = choose_positives(MANY, FEW / MANY)
    records = []
    sets = {"normal": normal(MANY), "tied": normal(MANY).round(decimals=1), "equal": torch.full((MANY,), 0.3)}
    for name, scores in sets.items():
        _, gradient = run("direct", scores.double(), positive, 0.1)
        record: Record = {"scores": name, "float64": error(run("binned", scores, positive, 0.1)[1], gradient)}
        with mock.patch.object(soft_ranks_binned, "add_moments", add_moments_in_float32):
            record["float32"] = error(run("binned", scores, positive, 0.1)[1], gradient)
        records.append(record)
    return records


def add_moments_in_float32(moments: Tensor, index: Tensor, u: Tensor, weight: Tensor | None = None) -> None:
    """Do what ``add_moments`` does, rounding every sum to float32."""
    flat = u.float().reshape(-1)
    power = torch.ones_like(flat) if weight is None else weight.float().reshape(-1)
    for degree in range(moments.shape[0]):
        if degree:
            power = power * flat
        moments[degree] = moments[degree].float().scatter_add_(0, index, power)


def measure() -> Record:
    """Measure everything, print it as tables, and return it."""
    result: Record = {"rows": ROWS, "share_positive": SHARE, "machine": machine()}
    result["bounds"] = bounds()
    title = "Chebyshev bound rho^-n in the widest bins; half-width in temperatures"
    print_records(title, result["bounds"])
    result["sets"] = [measure_set(name, temperature) for name in SETS for temperature in TEMPERATURES]
    title = f"Relative error of gradient or loss against direct float64; {ROWS:,} rows, {SHARE:.0%} positive"
    print_records(title, result["sets"])
    result["orders"] = measure_orders()
    print_records("Gradient error in float64 over p, with fine bins per coarse bin, q = 30", result["orders"]["fine"])
    print_records("Gradient error in float64 over q, with 32 fine bins of p = 8", result["orders"]["coarse"])
    result["reaches"] = measure_reaches()
    print_records(f"Gradient error in float64: 5 positives a gap above {MANY:,} negatives", result["reaches"])
    result["moments"] = measure_moments()
    title = f"Gradient error in float32 with moments in either dtype, {MANY:,} rows, about {FEW} positives"
    print_records(title, result["moments"])
    return result


def print_records(title: str, records: list[Record]) -> None:
    """Print records of the same keys as a table."""
    header = list(records[0])
    print_table(title, header, [[_cell(record[key]) for key in header] for record in records])


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.4g}"


def draw(orders: dict[str, list[Record]], path: Path) -> None:
    """Draw the error over the number of nodes, beside what the bound promises."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from speed_figure import INK, MUTED, RC

    blue, orange = "#0072B2", "#D55E00"
    with plt.rc_context(RC):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10.0, 4.6), sharey=True, layout="constrained")
        panels = [(left, 16, blue), (left, 32, orange), (right, None, blue)]
        for axes, fine, colour in panels:
            kind, key = ("coarse", "q") if fine is None else ("fine", "p")
            points = [(one[key], one["error"]) for one in orders[kind] if one.get("fine") == fine]
            rho = ellipse(2.0 if fine is None else 2 / fine)
            line = [(count, rho**-count) for count, _ in points if rho**-count > 1e-16]
            axes.plot(*zip(*line), color=colour, linewidth=1.2, linestyle="--")
            axes.plot(*zip(*points), color=colour, linewidth=2.0, marker="o", markersize=5)
        left.set_yscale("log")
        left.set_ylim(1e-16, 8)
        left.set_yticks([10.0**power for power in range(-16, 1, 4)])
        left.set_xticks(list(FINE_NODES))
        right.set_xticks(list(COARSE_NODES)[::2])
        left.set_ylabel("relative error of the gradient")
        left.set_xlabel("p, nodes of a fine bin")
        right.set_xlabel("q, nodes of a coarse bin")
        left.text(4.3, 2e-6, "16 fine bins in a coarse one", color=blue, backgroundcolor="white")
        left.text(2.1, 2e-10, "32 fine bins", color=orange)
        right.text(14.8, 1e-6, r"bound $\rho^{-q}$", color=blue)
        right.text(10.8, 1e-10, "measured", color=blue, ha="right")
        marks = ((left, 4, "float32: 16"), (left, 8, "float64: 32"), (right, 14, "float32"), (right, 28, "float64"))
        for axes, count, label in marks:
            axes.axvline(count, ymax=0.93, color=MUTED, linewidth=0.8, linestyle=":")
            axes.text(count, 0.6, label, color=INK, fontsize=9.5, ha="center", va="bottom")
        figure.suptitle("Smooth-AP by bins against pairs in float64; dashed: the Chebyshev bound", x=0.01, ha="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        plt.close(figure)
    print(f"Figure: {path}")


def main() -> None:
    """Measure, print, and store if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", action="store_true", help="write accuracy.json and error_over_order.png")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for them (default: benchmarks/results)")
    arguments = parser.parse_args()
    result = measure()
    if arguments.plot:
        write_json(arguments.out / "accuracy.json", result)
        draw(result["orders"], arguments.out / "error_over_order.png")


if __name__ == "__main__":
    main()
