"""Shared by the benchmarks: options, machine and commit, inputs, timing of steps, processes, tables, results."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import pickle
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.benchmark import Timer

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
VERSIONS = ("torch", "imbalanced-losses", "pytorch-metric-learning", "numpy")
# The peer builds several float32 matrices (positives x rows), at least three of them at the same time.
PEER_BYTES_PER_PAIR = 3 * 4
PEER_MOST_BYTES = 8 * 2**30
# How a script starts its processes. The server that forks them has imported the script once, and computed nothing.
START_METHOD = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
CPU = torch.device("cpu")
SHORTEST_S = 0.02  # the least that one repetition measures: a shorter step is run several times
T = TypeVar("T")
Step = Callable[[], object]
Record = dict[str, Any]


class Run:
    """A run of a script: its options, the machine, and where its results go.

    All scripts share ``--quick`` and ``--out``. Only a full run writes to ``RESULTS``, any run where ``--out`` says.
    """

    def __init__(self, doc: str | None, name: str, repeats: int | None = None, full: str | None = None) -> None:
        """Make the parser, to which the script may add options before :meth:`start`.

        Args:
            doc: docstring of the script, for its help.
            name: name of the file of results, without its suffix.
            repeats: default of ``--repeats``; None for a script without repetitions.
            full: what ``--full`` does; None where the default is the full run.
        """
        self.name, self.full, self.is_written = name, full, False
        self.parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        amount = self.parser.add_mutually_exclusive_group()
        amount.add_argument("--quick", action="store_true", help="small sizes, seconds; only shows that it runs")
        if full is not None:
            amount.add_argument("--full", action="store_true", help=full)
        if repeats is not None:
            text = f"repetitions of each measurement (default: {repeats})"
            self.parser.add_argument("--repeats", type=int, default=repeats, help=text)
        self.parser.add_argument("--out", type=Path, help=f"folder for {name}.json (full run: {RESULTS})")

    def start(self) -> argparse.Namespace:
        """Parse the options, print the machine, and return the options."""
        self.options = self.parser.parse_args()
        self.machine = machine()
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(f"{key}: {value}" for key, value in self.machine.items()))
        return self.options

    @property
    def size(self) -> str:
        """``"quick"``, ``"default"`` or ``"full"``."""
        if self.options.quick:
            return "quick"
        return "full" if self.full is None or self.options.full else "default"

    def folder(self, default: Path = RESULTS) -> Path | None:
        """Return the folder for results or pictures; None if nothing is to be written."""
        return self.options.out or (default if self.size == "full" else None)

    def write(self, **results: Any) -> None:
        """Write the results with the machine, if anything is to be written, and print the path once.

        The file is replaced: a script that ends at any moment leaves a whole one.
        """
        folder = self.folder()
        if folder is None:
            return
        options = {key: vars(self.options)[key] for key in ("quick", "repeats") if key in vars(self.options)}
        text = json.dumps(_rounded({"machine": self.machine, **options, **results}), indent=1)
        folder.mkdir(parents=True, exist_ok=True)
        path, new = folder / f"{self.name}.json", folder / f".{self.name}.{os.getpid()}"
        new.write_text(re.sub(r"\{[^{}]*\}", lambda record: re.sub(r"\n *", " ", record[0]), text) + "\n")
        new.replace(path)
        if not self.is_written:
            print(f"\nResults: {path}")
        self.is_written = True


def machine() -> Record:
    """Return what a result depends on: the commit, the processor, the threads and the versions."""
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        # A peer is optional; a benchmark says when it is missing.
        "versions": {name: version for name in VERSIONS if (version := _version(name)) is not None},
        # Other work on the machine makes a result worthless, so record the load.
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def commit() -> str | None:
    """Return the commit that is measured, with ``-dirty`` if files differ from it; None without a repository.

    Results and pictures do not count: a run of all scripts writes them on its way.
    """
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    try:
        found = git(["git", "rev-parse", "--short=9", "HEAD"]).stdout.strip()
        others = ["--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs/images"]
        return found + ("-dirty" if git(["git", "status", "--porcelain", *others]).stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's name; Linux has it only in /proc."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Inputs


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


def training_step(loss: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """Return forward and backward of ``loss`` as one call."""

    def step() -> None:
        inputs.grad = None
        loss(inputs, targets).backward()

    return step


# Timing, processes


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


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what ``function(rank, *arguments)`` returns on each of ``world_size`` gloo ranks of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, function, arguments)
        mp.start_processes(_serve, given, nprocs=world_size, start_method=START_METHOD)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def _serve(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(rank, *arguments)))
    dist.barrier()
    dist.destroy_process_group()


def progress(cases: Iterable[T]) -> Iterator[T]:
    """Yield the cases; between two, print how many are done when the last line is ten seconds old."""
    todo, start = list(cases), time.perf_counter()
    printed = start
    for done, case in enumerate(todo):
        if (now := time.perf_counter()) > printed + 10:
            print(f"{done} of {len(todo)} done, {now - start:.0f} s", flush=True)
            printed = now
        yield case


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what ``function(*arguments)`` returns in a new process, which has computed nothing before."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


# Tables


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns: the first left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    print(f"\n{title}\n")
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  ".join(["  " + line[0].ljust(widths[0]), *cells]))


def print_records(title: str, records: Sequence[Record]) -> None:
    """Print records with the same keys as a table."""
    header = list(records[0])
    print_table(title, header, [[_cell(record[key]) for key in header] for record in records])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if type(value) is int else str(value)
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def _rounded(value: Any) -> Any:
    """Return ``value`` with six digits of each number."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def clock(device: torch.device) -> float:
    """Return the time in seconds at which ``device`` has finished its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()
