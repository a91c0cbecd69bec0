"""Shared by the benchmarks: inputs, timing of steps, the machine, printing of tables and storing of results.

Run as a script, it prints the machine and the versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from fullrank.preflight.speed import clock

RESULTS = Path(__file__).resolve().parent / "results"
# The peer builds several float32 matrices (positives x rows), at least three of them at the same time.
PEER_BYTES_PER_PAIR = 3 * 4
PEER_MOST_BYTES = 8 * 2**30
# How a script starts its processes. The server that forks them has imported the script once, and computed nothing.
START_METHOD = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
CPU = torch.device("cpu")
SHORTEST_S = 0.02  # the least that one repetition measures: a shorter step is run several times
Step = Callable[[], object]


def make_rows(rows: int, num_classes: int, share: float | None) -> tuple[Tensor, Tensor]:
    """Return normal scores (rows, num_classes) that require grad, and targets; ``share`` None: uniform classes.

    Filled in place, so that no temporary memory raises the peak before a measurement.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(rows, num_classes).normal_(generator=generator).requires_grad_()
    targets = torch.empty(rows, dtype=torch.int64)
    if share is None:
        return logits, targets.random_(0, num_classes, generator=generator)
    return logits, targets.bernoulli_(share, generator=generator)


def peer_bytes(positives: int, rows: int) -> int:
    """Return the least number of bytes that the peer's pair matrices need."""
    return positives * rows * PEER_BYTES_PER_PAIR


def training_step(loss: nn.Module, logits: Tensor, targets: Tensor) -> Callable[[], None]:
    """Return forward and backward of ``loss`` as one call."""

    def step() -> None:
        logits.grad = None
        loss(logits, targets).backward()

    return step


def interleave(steps: Mapping[str, Step], repeats: int, device: torch.device = CPU) -> dict[str, list[float]]:
    """Return ``repeats`` times in seconds of each step. The steps take turns; each first runs once unmeasured.

    A step must not communicate: how often it runs depends on its time in this process.
    """
    threads = torch.get_num_threads()  # a Timer uses one thread by default
    now = partial(clock, device)
    timers = {
        name: Timer("step()", globals={"step": step}, timer=now, num_threads=threads) for name, step in steps.items()
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer.blocked_autorange(min_run_time=SHORTEST_S).median)
    return times


def machine() -> dict[str, Any]:
    """Return the processor, the threads and the versions that a result depends on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": _versions("torch", "imbalanced-losses", "pytorch-metric-learning", "numpy"),
        # Other work on the machine makes a result worthless, so record the load.
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def _versions(*names: str) -> dict[str, str]:
    """Return the versions of the distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a peer is optional; a benchmark says when it is missing
    return found


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
    """Print rows in aligned columns: the first left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print(f"\n{title}\n")
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  ".join(["  " + line[0].ljust(widths[0]), *cells]))


def print_records(title: str, records: Sequence[dict[str, Any]]) -> None:
    """Print records with the same keys as a table."""
    header = list(records[0])
    print_table(title, header, [[_cell(record[key]) for key in header] for record in records])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.4g}"


def bar_cells(value: float, bar: float | None, at_least: bool) -> list[str]:
    """Return the cells "bar" and "met" of a table; both empty if there is no bar."""
    if bar is None:
        return ["", ""]
    met = value >= bar if at_least else value <= bar
    return [f"{'>=' if at_least else '<='} {bar:g}", "yes" if met else "NO"]


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result, one record per line and numbers with six digits, and print the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(result), indent=1)
    path.write_text(re.sub(r"\{[^{}]*\}", lambda record: re.sub(r"\n *", " ", record[0]), text) + "\n")
    print(f"\nResults: {path}")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    print_machine(machine())
