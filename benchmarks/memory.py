"""How much memory a loss needs beyond its inputs, forward and backward, per row; compared with imbalanced-losses.

Usage: python benchmarks/memory.py [--quick] [--repeats 3] [--out FOLDER]

Each measurement runs in a separate process. It makes the inputs, takes a first step on few rows (which loads everything
that is loaded once), then measures the peak of the resident set during the step minus the resident set before it. This
includes the gradient of the logits, 4 bytes per row. Needs Linux's /proc and the ``bench`` extra. Writes memory.json; a
quick run writes only with ``--out``.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from statistics import median
from typing import NamedTuple

from report import PEER_MOST_BYTES, Run, apart, make_rows, peer_bytes, print_records, progress

SHARE = 0.01  # of positives
WARM_ROWS = 1_000
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Case(NamedTuple):
    """One loss on one size; ``bar`` is the allowed number of bytes per row."""

    library: str
    rows: int
    bar: float | None = None
    loss: str = "SmoothAPLoss"
    arguments: dict[str, str] = {}  # noqa: RUF012  (read only)


FULL = (
    Case("imbalanced_losses", 10_000),
    Case("imbalanced_losses", 100_000),
    Case("fullrank", 10_000),
    Case("fullrank", 100_000),
    Case("fullrank", 1_000_000),
    Case("fullrank", 10_000_000, 12),
    Case("fullrank", 50_000_000, loss="RecallAtQuantileLoss", arguments={"surrogate": "sigmoid"}),
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


def measure(library: str, name: str, rows: int, arguments: dict[str, str]) -> int:
    """Return the peak of one forward and backward above the resident set before it, in bytes."""
    warnings.simplefilter("ignore")  # warnings of the peer
    loss = getattr(importlib.import_module(library), name)(num_classes=1, queue_size=0, **arguments)
    logits, targets = make_rows(rows, 1, SHARE)
    if library != "fullrank" and peer_bytes(int(targets.sum()), rows) > PEER_MOST_BYTES:
        raise MemoryError(f"{library} at {rows} rows")
    few, few_targets = make_rows(WARM_ROWS, 1, 0.05)
    loss(few, few_targets).backward()
    CLEAR.write_text("5")  # the peak so far becomes the resident set
    before = resident("VmRSS")
    loss(logits, targets).backward()
    return resident("VmHWM") - before


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "memory", repeats=3)
    options = script.start()
    if not CLEAR.exists():
        print("skipped: without Linux's /proc the peak of a single step cannot be read")
        return
    cases = []
    for case in progress(QUICK if options.quick else FULL):
        peak = median(
            apart(measure, case.library, case.loss, case.rows, case.arguments) for _ in range(options.repeats)
        )
        cases.append(case._asdict() | {"peak_bytes": peak, "bytes_per_row": peak / case.rows})
    print_records(f"Memory beyond the inputs, forward + backward, {SHARE:.0%} positive, median", cases)
    script.write(cases=cases)


if __name__ == "__main__":
    main()
