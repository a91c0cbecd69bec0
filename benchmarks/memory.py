"""How much memory a loss needs beyond its inputs, forward and backward, per row; compared with imbalanced-losses.

Usage: python benchmarks/memory.py [--quick] [--repeats 3] [--out FOLDER]

Each measurement runs in a separate process. It makes the inputs, takes a first step on few rows (which loads everything
that is loaded once), then measures the peak of the resident set during the step minus the resident set before it. This
includes the gradient of the logits, 4 bytes per row. Needs Linux's /proc and the ``bench`` extra. Writes memory.json; a
quick run writes only with ``--out``.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import warnings
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from report import (
    PEER_MOST_BYTES,
    RESULTS,
    bar_cells,
    machine,
    make_rows,
    peer_bytes,
    print_machine,
    print_table,
    write_json,
)

SHARE = 0.01  # of positives
WARM_ROWS = 1_000
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Case(NamedTuple):
    """One loss on one size; ``bar`` is the allowed number of bytes per row."""

    library: str
    rows: int
    bar: float | None = None
    loss: str = "SmoothAPLoss"


FULL = (
    Case("imbalanced_losses", 10_000),
    Case("imbalanced_losses", 100_000),
    Case("fullrank", 10_000),
    Case("fullrank", 100_000),
    Case("fullrank", 1_000_000),
    Case("fullrank", 10_000_000, 12),
    Case("fullrank", 50_000_000, loss="RecallAtQuantileLoss"),
)
QUICK = (Case("imbalanced_losses", 10_000), Case("fullrank", 100_000))


def resident(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process in bytes.

    Not ru_maxrss, which a process inherits from its parent.
    """
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in {STATUS}")


def measure(library: str, name: str, rows: int) -> int:
    """Return the peak of one forward and backward above the resident set before it, in bytes."""
    loss = getattr(importlib.import_module(library), name)(num_classes=1, queue_size=0)
    logits, targets = make_rows(rows, 1, SHARE)
    if library != "fullrank" and peer_bytes(int(targets.sum()), rows) > PEER_MOST_BYTES:
        raise MemoryError(f"{library} at {rows} rows")
    few, few_targets = make_rows(WARM_ROWS, 1, 0.05)
    loss(few, few_targets).backward()
    CLEAR.write_text("5")  # the peak so far becomes the resident set
    before = resident("VmRSS")
    loss(logits, targets).backward()
    return resident("VmHWM") - before


def measure_apart(case: Case, repeats: int) -> dict[str, Any]:
    """Return the median over fresh processes."""
    command = [sys.executable, __file__, "--measure", case.library, case.loss, str(case.rows)]
    peaks = [int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(repeats)]
    peak = median(peaks)
    return case._asdict() | {"peak_bytes": peak, "bytes_per_row": peak / case.rows}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each measurement (default: 3)")
    parser.add_argument("--out", type=Path, help=f"folder for memory.json (default: {RESULTS})")
    parser.add_argument("--measure", nargs=3, metavar=("LIBRARY", "LOSS", "ROWS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # warnings of the peer
    if arguments.measure is not None:
        library, name, rows = arguments.measure
        print(measure(library, name, int(rows)))
        return
    if not CLEAR.exists():
        print("skipped: without Linux's /proc the peak of a single step cannot be read")
        return
    info = machine()
    print_machine(info)
    cases = [measure_apart(case, arguments.repeats) for case in (QUICK if arguments.quick else FULL)]
    print_results(cases)
    out = arguments.out or (None if arguments.quick else RESULTS)
    if out is not None:
        result = {"machine": info, "quick": arguments.quick, "repeats": arguments.repeats, "cases": cases}
        write_json(out / "memory.json", result)


def print_results(cases: list[dict[str, Any]]) -> None:
    """Print the table."""
    lines = []
    for case in cases:
        numbers = [f"{case['rows']:,}", f"{case['peak_bytes'] / 2**20:,.1f}", f"{case['bytes_per_row']:,.1f}"]
        name = case["loss"].removesuffix("Loss")
        lines.append([case["library"], name, *numbers, *bar_cells(case["bytes_per_row"], case["bar"], False)])
    header = ("library", "loss", "rows", "peak MiB", "bytes a row", "bar", "met")
    print_table(f"Memory beyond the inputs, forward + backward, {SHARE:.0%} positive, median", header, lines)


if __name__ == "__main__":
    main()
