"""What the benchmarks share: their inputs, the machine they ran on, how a table is printed and results are stored.

Run as a script, it prints the machine and the versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).resolve().parent / "results"
# The peer builds several matrices (positives x rows) of float32, three of them at once at the very least.
PEER_BYTES_PER_PAIR = 3 * 4
PEER_MOST_BYTES = 8 * 2**30


def make_rows(rows: int, num_classes: int, share: float | None) -> tuple[Tensor, Tensor]:
    """Return normal scores (rows, num_classes) that ask for a gradient, and targets; ``share`` None: uniform classes.

    Filled in place, so that the peak of memory before a measurement is what stays.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(rows, num_classes).normal_(generator=generator).requires_grad_()
    targets = torch.empty(rows, dtype=torch.int64)
    if share is None:
        return logits, targets.random_(0, num_classes, generator=generator)
    return logits, targets.bernoulli_(share, generator=generator)


def peer_bytes(positives: int, rows: int) -> int:
    """Return what the peer's pair matrices take at least, in bytes."""
    return positives * rows * PEER_BYTES_PER_PAIR


def machine() -> dict[str, Any]:
    """Return the processor, the threads and the versions a result depends on."""
    names = ("torch", "imbalanced-losses", "numpy")
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        # Other work on the machine makes a result worthless: let it show.
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def _processor() -> str:
    """Return the processor's name; Linux has it only in /proc."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_machine(info: dict[str, Any]) -> None:
    """Print what ``machine`` returned."""
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    print(f"{info['processor']}, {info['cores']} cores, {info['threads']} threads, load {info['load_average']}")
    print(f"Python {info['python']}, {versions}")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns: the first to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print(f"\n{title}\n")
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  ".join(["  " + line[0].ljust(widths[0]), *cells]))


def bar_cells(value: float, bar: float | None, at_least: bool) -> list[str]:
    """Return the cells "bar" and "met" of a table; both empty where there is no bar."""
    if bar is None:
        return ["", ""]
    met = value >= bar if at_least else value <= bar
    return [f"{'>=' if at_least else '<='} {bar:g}", "yes" if met else "NO"]


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nResults: {path}")


if __name__ == "__main__":
    print_machine(machine())
