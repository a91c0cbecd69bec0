"""How time grows with the number of classes, with the share of positives, and, for recall, with the pool.

Usage: python benchmarks/growth.py [--quick] [--repeats 3] [--out FOLDER]

Compared with imbalanced-losses, and with one torch.sort of all the scores, class by class. All run in turn, so that the
ratios also hold on other machines. The growth of Smooth-AP with the pool is in speed.py. The full run takes a few
minutes, needs 2 GiB of memory and writes growth.json; a quick run takes seconds and writes only with ``--out``. Needs
the ``bench`` extra.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import imbalanced_losses
import torch
from report import (
    PEER_MOST_BYTES,
    RESULTS,
    Steps,
    interleave,
    machine,
    make_rows,
    peer_bytes,
    print_machine,
    print_table,
    training_step,
    write_json,
)

import fullrank

SMOOTH_AP, RECALL = "SmoothAPLoss", "RecallAtQuantileLoss"


class Case(NamedTuple):
    """One loss on one input."""

    loss: str
    rows: int
    classes: int = 1
    share: float | None = None  # of positives, None for uniform classes


FULL = {
    "classes": [Case(SMOOTH_AP, 4_096, classes) for classes in (3, 10, 30, 100, 300, 1_000)],
    "positive": [
        Case(SMOOTH_AP, rows, share=share)
        for rows in (20_000, 1_000_000)
        for share in (0.0001, 0.001, 0.01, 0.05, 0.2, 0.5)
    ],
    "recall": [Case(RECALL, rows, share=0.01) for rows in (100_000, 1_000_000, 10_000_000, 50_000_000)],
}
QUICK = {
    "classes": [Case(SMOOTH_AP, 256, classes) for classes in (3, 30)],
    "positive": [Case(SMOOTH_AP, 2_000, share=share) for share in (0.01, 0.5)],
    "recall": [Case(RECALL, rows, share=0.01) for rows in (1_000, 10_000)],
}
TITLES = {
    "classes": "SmoothAPLoss over the number of classes, uniform",
    "positive": "SmoothAPLoss over the share of positives",
    "recall": "RecallAtQuantileLoss at 0.5 % over pool size, 1 % positive",
}


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Return the medians in milliseconds of ours, one sort and the peer; None for a peer that cannot run."""
    logits, targets = make_rows(case.rows, case.classes, case.share)
    scores = logits.detach().T.contiguous()
    arguments = {"num_classes": case.classes, "queue_size": 0}
    ours, peer = (
        training_step(getattr(library, case.loss)(**arguments), logits, targets)
        for library in (fullrank, imbalanced_losses)
    )
    steps: Steps = {"ours": ours, "sort": lambda: torch.sort(scores)}
    obstacle = None
    if case.loss == SMOOTH_AP and case.classes == 1:  # with several classes the peer holds one at a time
        needed = peer_bytes(int(targets.sum()), case.rows)
        if needed > PEER_MOST_BYTES:
            obstacle = f"{needed / 2**30:,.0f} GiB: skipped"
    obstacle = obstacle or try_once(peer)
    if obstacle is None:
        steps["peer"] = peer
    times = {name: median(runs) * 1e3 for name, runs in interleave(steps, repeats).items()}
    result = case._asdict() | {"peer_obstacle": obstacle}
    return result | {f"{name}_ms": times.get(name) for name in ("ours", "sort", "peer")}


def try_once(step: Callable[[], object]) -> str | None:
    """Run ``step``; return the message of a RuntimeError, None if there is none."""
    try:
        step()
    except RuntimeError as error:  # torch.quantile takes no more than 2**24 elements
        return str(error).splitlines()[0]
    return None


def print_results(results: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table for each question."""
    header = ("rows", "classes", "positive", "ours ms", "sort ms", "ours / sort", "peer ms", "peer / ours")
    for question, rows in results.items():
        lines = []
        for row in rows:
            share = "uniform" if row["share"] is None else f"{row['share']:.2%}"
            cells = [
                f"{row['rows']:,}",
                f"{row['classes']:,}",
                share,
                f"{row['ours_ms']:,.2f}",
                f"{row['sort_ms']:,.2f}",
            ]
            cells.append(f"{row['ours_ms'] / row['sort_ms']:.3f}")
            if row["peer_ms"] is None:
                cells += [row["peer_obstacle"], ""]
            else:
                cells += [f"{row['peer_ms']:,.2f}", f"{row['peer_ms'] / row['ours_ms']:,.2f}"]
            lines.append(cells)
        print_table(f"{TITLES[question]}: forward + backward, median", header, lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each measurement (default: 3)")
    parser.add_argument("--out", type=Path, help=f"folder for growth.json (default: {RESULTS})")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.quick else RESULTS)
    warnings.simplefilter("ignore")  # warnings of the peer
    info = machine()
    print_machine(info)
    cases = QUICK if arguments.quick else FULL
    results = {name: [measure(case, arguments.repeats) for case in listed] for name, listed in cases.items()}
    print_results(results)
    if out is not None:
        head = {"machine": info, "quick": arguments.quick, "repeats": arguments.repeats}
        write_json(out / "growth.json", head | results)


if __name__ == "__main__":
    main()
