"""How long a gather of logits and targets takes between two gloo ranks, compared with imbalanced-losses.

Usage: python benchmarks/gather.py [--quick] [--repeats 300] [--out FOLDER]

Compares ``fullrank.gather_rows(logits, targets)``, which starts with the agreement between ranks, with
``all_gather_with_grad(logits)`` and ``all_gather_no_grad(targets)`` of the peer, which exchanges only row counts. Two
processes with one thread each call both in turn, repetition by repetition, on this machine; the result is the ratio of
the medians. Parts of our gather are timed too: the header alone, and the bare torch collectives that it uses. The full
run takes about half a minute and writes gather.json; a quick run writes only with ``--out``. Needs the ``test`` extra.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import imbalanced_losses
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import RESULTS, START_METHOD, bar_cells, machine, make_rows, print_machine, print_table, write_json

import fullrank
from fullrank.distributed.header import Offer, agree_on
from fullrank.distributed.torch_private import all_gather_flat

WORLD_SIZE = 2
WARM_UP = 20  # repetitions that are not counted
HEADER_BYTES = 64


class Case(NamedTuple):
    """Rows of each rank; ``bar`` is the required ratio."""

    rows: tuple[int, int]
    bar: float | None = None


FULL = (Case((8_192, 8_192), 0.75), Case((8_192, 6_000)), Case((100_000, 100_000)))
QUICK = (Case((64, 64)), Case((64, 50)))


def calls(rank: int, case: Case) -> dict[str, Callable[[], object]]:
    """Return the calls to time: both gathers, the header, and the bare collectives of the same sizes."""
    logits, targets = make_rows(case.rows[rank], 1, 0.1)
    group = dist.group.WORLD
    assert group is not None
    row_bytes = logits.element_size() + targets.element_size()
    blocks = [torch.zeros(HEADER_BYTES, dtype=torch.uint8)]
    blocks += [torch.zeros(max(case.rows) * row_bytes, dtype=torch.uint8)]
    arrived = [torch.zeros(WORLD_SIZE * block.numel(), dtype=torch.uint8) for block in blocks]

    def bare() -> None:
        for block, output in zip(blocks, arrived):
            all_gather_flat(output, block, group)

    return {
        "peer": lambda: (
            imbalanced_losses.all_gather_with_grad(logits),
            imbalanced_losses.all_gather_no_grad(targets),
        ),
        "ours": lambda: fullrank.gather_rows(logits, targets),
        "header": lambda: agree_on("benchmark", group, lambda: Offer(None, {"rows": "as they are"})),
        "bare": bare,
    }


def measure(rank: int, folder: str, cases: tuple[Case, ...], repeats: int, answers: Any) -> None:
    """Time the calls on one rank, interleaved; rank 0 answers with the medians in seconds of each case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # warnings of the peer
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    medians = []
    for case in cases:
        steps = calls(rank, case)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(WARM_UP + repeats):
            for name, call in steps.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        medians.append({name: median(held[WARM_UP:]) for name, held in times.items()})
    if rank == 0:
        answers.put(medians)
    dist.barrier()
    dist.destroy_process_group()


def run(cases: tuple[Case, ...], repeats: int) -> list[dict[str, Any]]:
    """Start the two processes, and return the medians in microseconds and the ratio of each case."""
    context = mp.get_context(START_METHOD)
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, cases, repeats, answers)
        mp.start_processes(measure, arguments, nprocs=WORLD_SIZE, start_method=START_METHOD)
        medians = answers.get()
    results: list[dict[str, Any]] = []
    for case, seconds in zip(cases, medians):
        times = {f"{name}_us": value * 1e6 for name, value in seconds.items()}
        results.append(case._asdict() | times | {"ratio": seconds["ours"] / seconds["peer"]})
    return results


def print_results(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    lines = []
    for row in results:
        times = [f"{row[f'{name}_us']:,.0f}" for name in ("peer", "ours", "header", "bare")]
        rows = " + ".join(f"{count:,}" for count in row["rows"])
        lines.append([rows, *times, f"{row['ratio']:.2f}", *bar_cells(row["ratio"], row["bar"], False)])
    header = ("rows", "peer us", "ours us", "our header us", "bare collectives us", "ours / peer", "bar", "met")
    print_table("Gather of float32 logits (N, 1) and int64 targets (N,), two gloo ranks, median", header, lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--repeats", type=int, default=300, help="repetitions of each call (default: 300)")
    parser.add_argument("--out", type=Path, help=f"folder for gather.json (default: {RESULTS})")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.quick else RESULTS)
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "repeats": arguments.repeats}
    print_machine(results["machine"])
    results["gather"] = run(QUICK if arguments.quick else FULL, arguments.repeats)
    print_results(results["gather"])
    if out is not None:
        write_json(out / "gather.json", results)


if __name__ == "__main__":
    main()
