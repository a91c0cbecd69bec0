"""How long forward and backward take, compared with imbalanced-losses and one torch.sort, and as the pool grows.

Usage: python benchmarks/speed.py [--quick] [--repeats 5] [--out FOLDER]

Competitors run in turn, repetition by repetition, so that both see the same state of the machine; only the ratios hold
on other machines. The full run takes a few minutes and writes speed.json and speed.svg. A quick run of small sizes
takes seconds and writes only with ``--out``. The figure also shows the results of retrieval.py, if they are in the same
folder. Needs the ``bench`` extra.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import imbalanced_losses
import torch
from report import (
    PEER_MOST_BYTES,
    RESULTS,
    Step,
    bar_cells,
    interleave,
    machine,
    make_rows,
    peer_bytes,
    print_machine,
    print_table,
    training_step,
    write_json,
)
from torch import Tensor

import fullrank

SHARE = 0.01  # of positives, where sizes are compared


class Case(NamedTuple):
    """One loss on one input, compared with the peer; ``bar`` is the required ratio."""

    loss: str
    rows: int
    share: float | None  # of positives, None for uniform classes
    bar: float | None = None
    classes: int = 1
    arguments: dict[str, Any] = {}  # noqa: RUF012  (read only)


class SortCase(NamedTuple):
    """SmoothAPLoss compared with one sort; ``outlier`` replaces one logit."""

    rows: int
    bar: float | None = None
    outlier: float | None = None


PAIRWISE = {"surrogate": "pairwise"}
FULL = (
    Case("SmoothAPLoss", 1_000, 0.05, 1),
    Case("SmoothAPLoss", 20_000, 0.20, 250),
    Case("SmoothAPLoss", 50_000, 0.01, 80),
    Case("SmoothAPLoss", 4_096, None, 10, classes=1_000),
    Case("RecallAtQuantileLoss", 1_000_000, 0.01, 2.5, arguments={"quantile": 0.005}),
    Case("PAUCAtBudgetLoss", 1_000_000, 0.01, 2.5, arguments=PAIRWISE),
)
FULL_SORT = (
    SortCase(100_000, 1),
    SortCase(1_000_000, 0.25),
    SortCase(10_000_000, 0.15),
    SortCase(10_000_000, 0.3, outlier=1e30),
)
FULL_GROWTH = (*(factor * 10**power for power in range(3, 7) for factor in (1, 3)), 10**7)
QUICK = (
    Case("SmoothAPLoss", 1_000, 0.05, 1),
    Case("SmoothAPLoss", 2_000, 0.20),
    Case("SmoothAPLoss", 256, None, classes=20),
    Case("RecallAtQuantileLoss", 20_000, 0.01, arguments={"quantile": 0.005}),
    Case("PAUCAtBudgetLoss", 20_000, 0.01, arguments=PAIRWISE),
)
QUICK_SORT = (SortCase(10_000), SortCase(10_000, outlier=1e30))
QUICK_GROWTH = (1_000, 10_000)


def against_peer(cases: tuple[Case, ...], repeats: int) -> list[dict[str, Any]]:
    """Return the medians of the peer and of ours, and the time of the peer divided by ours."""
    results: list[dict[str, Any]] = []
    for case in cases:
        logits, targets = make_rows(case.rows, case.classes, case.share)
        arguments = {"num_classes": case.classes, "queue_size": 0} | case.arguments
        steps = {
            name: training_step(getattr(library, case.loss)(**arguments), logits, targets)
            for name, library in (("peer", imbalanced_losses), ("ours", fullrank))
        }
        peer, ours = (median(times) for times in interleave(steps, repeats).values())
        results.append(case._asdict() | {"peer_ms": peer * 1e3, "ours_ms": ours * 1e3, "ratio": peer / ours})
    return results


def against_sort(cases: tuple[SortCase, ...], repeats: int) -> list[dict[str, Any]]:
    """Return the best times of one sort and of SmoothAPLoss, and ours divided by that of the sort."""
    results: list[dict[str, Any]] = []
    for case in cases:
        logits, targets = make_rows(case.rows, 1, SHARE)
        if case.outlier is not None:
            with torch.no_grad():
                logits[case.rows // 2] = case.outlier
        times = interleave(ours_and_sort(logits, targets), repeats)
        ours, sort = min(times["ours"]), min(times["sort"])
        results.append(case._asdict() | {"ours_ms": ours * 1e3, "sort_ms": sort * 1e3, "ratio": ours / sort})
    return results


def ours_and_sort(logits: Tensor, targets: Tensor) -> dict[str, Step]:
    """Return a step of SmoothAPLoss, and one sort of the same scores."""
    scores = logits.detach().flatten()
    ours = fullrank.SmoothAPLoss(num_classes=1, queue_size=0)
    return {"ours": training_step(ours, logits, targets), "sort": lambda: torch.sort(scores)}


def growth(sizes: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Return the medians for each pool size; that of the peer is None if its pairs do not fit in memory."""
    results: list[dict[str, Any]] = []
    for rows in sizes:
        logits, targets = make_rows(rows, 1, SHARE)
        steps = ours_and_sort(logits, targets)
        needed = peer_bytes(int(targets.sum()), rows)
        if needed <= PEER_MOST_BYTES:
            peer = imbalanced_losses.SmoothAPLoss(num_classes=1, queue_size=0)
            steps["peer"] = training_step(peer, logits, targets)
        times = {name: median(runs) * 1e3 for name, runs in interleave(steps, repeats).items()}
        result = {"rows": rows, "peer_gib": needed / 2**30}
        results.append(result | {f"{name}_ms": times.get(name) for name in ("ours", "sort", "peer")})
    return results


def print_results(results: dict[str, Any]) -> None:
    """Print the three tables."""
    lines = []
    for row in results["against_peer"]:
        share = "uniform" if row["share"] is None else f"{row['share']:.0%}"
        name = row["loss"].removesuffix("Loss") + (" pairwise" if row["arguments"] == PAIRWISE else "")
        times = [f"{row['peer_ms']:,.2f}", f"{row['ours_ms']:,.2f}", f"{row['ratio']:,.2f}"]
        lines.append([name, f"{row['rows']:,}", f"{row['classes']:,}", share, *times, *bar_cells(*_bar(row), True)])
    header = ("loss", "rows", "classes", "positive", "peer ms", "ours ms", "peer / ours", "bar", "met")
    print_table("Against imbalanced-losses, forward + backward, median", header, lines)
    lines = []
    for row in results["against_sort"]:
        outlier = "" if row["outlier"] is None else f"{row['outlier']:g}"
        times = [f"{row['sort_ms']:,.2f}", f"{row['ours_ms']:,.2f}", f"{row['ratio']:.3f}"]
        lines.append([f"{row['rows']:,}", outlier, *times, *bar_cells(*_bar(row), False)])
    header = ("rows", "one logit of", "sort ms", "ours ms", "ours / sort", "bar", "met")
    print_table(f"SmoothAPLoss, forward + backward, against one torch.sort, {SHARE:.0%} positive, best", header, lines)
    lines = []
    for row in results["growth"]:
        peer = f"{row['peer_ms']:,.2f}" if row["peer_ms"] is not None else f"{row['peer_gib']:,.0f} GiB: skipped"
        lines.append([f"{row['rows']:,}", f"{row['ours_ms']:,.2f}", f"{row['sort_ms']:,.2f}", peer])
    limit = f"the peer's pairs at most {PEER_MOST_BYTES / 2**30:.0f} GiB"
    print_table(
        f"Over pool size, {SHARE:.0%} positive, median; {limit}", ("rows", "ours ms", "sort ms", "peer ms"), lines
    )


def _bar(row: dict[str, Any]) -> tuple[float, float | None]:
    return row["ratio"], row["bar"]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each measurement (default: 5)")
    parser.add_argument("--out", type=Path, help=f"folder for speed.json and speed.svg (default: {RESULTS})")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.quick else RESULTS)
    warnings.simplefilter("ignore")  # warnings of the peer
    repeats = arguments.repeats
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "repeats": repeats}
    print_machine(results["machine"])
    results["against_peer"] = against_peer(QUICK if arguments.quick else FULL, repeats)
    results["against_sort"] = against_sort(QUICK_SORT if arguments.quick else FULL_SORT, repeats)
    results["growth"] = growth(QUICK_GROWTH if arguments.quick else FULL_GROWTH, repeats)
    print_results(results)
    if out is not None:
        write_json(out / "speed.json", results)
        from speed_figure import draw  # matplotlib takes seconds to import

        draw(out)


if __name__ == "__main__":
    main()
