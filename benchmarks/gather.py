"""How long a gather of logits and targets takes between two gloo ranks, compared with imbalanced-losses.

Usage: python benchmarks/gather.py [--quick] [--repeats 300] [--out FOLDER]

Compares ``fullrank.gather_rows(logits, targets)``, which starts with the agreement between ranks, with
``all_gather_with_grad(logits)`` and ``all_gather_no_grad(targets)`` of the peer, which exchanges only row counts. Two
processes with one thread each call both in turn, repetition by repetition, on this machine; the result is the ratio of
the medians. Parts of our gather are timed too: the header alone, and the bare torch collectives that it uses.

A second table compares forward and backward of ``all_gather_with_grad(x, backward="reduce_scatter")`` of embeddings
with those of torch's own gather with a gradient, ``torch.distributed.nn.functional.all_gather``; least times. Torch's
takes no rows that are uneven.

A third table has the room behind the header with 2, 3 and 8 processes: what it costs a call without rows, and what it
saves a call whose rows fill it, which needs one all-gather instead of two. Least times of the slowest process. The full
run takes about a minute and writes gather.json; a quick run writes only with ``--out``. Needs the ``test`` extra.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import imbalanced_losses
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from report import Run, make_rows, on_ranks, print_records
from torch import Tensor

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


ROOMS = (0, 2**12, 2**14, 2**15, 2**16)  # bytes
FULL = (Case((8_192, 8_192), 0.75), Case((8_192, 6_000)), Case((100_000, 100_000)))
QUICK = (Case((64, 64)), Case((64, 50)))
EMBEDDINGS, COLUMNS = ((64, 64), (1_024, 1_024), (64, 50), (1_024, 800)), 128


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


def measure(rank: int, cases: tuple[Case, ...], repeats: int) -> list[dict[str, float]]:
    """Return the medians in seconds of the calls on one rank, interleaved, for each case."""
    warnings.simplefilter("ignore")  # warnings of the peer
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
    return medians


def measure_reduce_scatter(rank: int, cases: tuple[tuple[int, int], ...], repeats: int) -> list[dict[str, float]]:
    """Return the least seconds of a gather and its backward on one rank; torch's and ours take turns."""
    warnings.simplefilter("ignore")  # torch 2.13 deprecates its gather

    def torchs(rows: Tensor) -> Tensor:
        return torch.cat(torch.distributed.nn.functional.all_gather(rows))

    def ours(rows: Tensor) -> Tensor:
        return fullrank.all_gather_with_grad(rows, backward="reduce_scatter")

    found = []
    for case in cases:
        rows = torch.ones(case[rank], COLUMNS, requires_grad=True)
        gradient = torch.full((sum(case), COLUMNS), rank + 1.0)
        gathers = {"ours": ours, **({"torch": torchs} if case[0] == case[1] else {})}
        least = dict.fromkeys(gathers, math.inf)
        for index in range(WARM_UP + repeats):
            for name, gather in gathers.items():
                rows.grad = None
                dist.barrier()
                start = time.perf_counter()
                gather(rows).backward(gradient)
                if index >= WARM_UP:
                    least[name] = min(least[name], time.perf_counter() - start)
        found.append(least)
    return found


def measure_rooms(rank: int, repeats: int) -> list[float]:
    """Return the least seconds of an all-gather of a header with each of ``ROOMS``; the sizes take turns."""
    blocks = [torch.zeros(HEADER_BYTES + room, dtype=torch.uint8) for room in ROOMS]
    arrived = [torch.zeros(dist.get_world_size() * block.numel(), dtype=torch.uint8) for block in blocks]
    found = [math.inf] * len(ROOMS)
    for _ in range(repeats):
        for place, (block, output) in enumerate(zip(blocks, arrived)):
            dist.barrier()
            start = time.perf_counter()
            all_gather_flat(output, block, dist.group.WORLD)
            found[place] = min(found[place], time.perf_counter() - start)
    return found


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "gather", repeats=300)
    options = script.start()
    cases = QUICK if options.quick else FULL
    results = []
    for case, seconds in zip(cases, on_ranks(WORLD_SIZE, measure, cases, options.repeats)[0]):
        times = {f"{name}_us": value * 1e6 for name, value in seconds.items()}
        results.append(case._asdict() | times | {"ratio": seconds["ours"] / seconds["peer"]})
    print_records("Gather of float32 logits (N, 1) and int64 targets (N,), two gloo ranks, median", results)
    over, own_gradients = EMBEDDINGS[:: 2 if options.quick else 1], []
    for case, seconds in zip(over, on_ranks(WORLD_SIZE, measure_reduce_scatter, over, options.repeats)[0]):
        times = {f"{name}_us": seconds[name] * 1e6 if name in seconds else None for name in ("ours", "torch")}
        ratio = seconds["ours"] / seconds["torch"] if "torch" in seconds else None
        own_gradients.append({"rows": case, **times, "ratio": ratio})
    print_records(f"Gather of (N, {COLUMNS}) and its backward by reduce-scatter, two gloo ranks", own_gradients)
    rooms = []
    for world_size in (2,) if options.quick else (2, 3, 8):
        alone, *others = map(max, zip(*on_ranks(world_size, measure_rooms, options.repeats)))
        for room, taken in zip(ROOMS[1:], others):  # two collectives have the header alone, then the same bytes
            times = {"header_us": alone * 1e6, "with_room_us": taken * 1e6, "cost/saved": taken / alone - 1}
            rooms.append({"processes": world_size, "bytes": room, **times})
    print_records("An all-gather of headers, and of headers with room for rows", rooms)
    script.write(gather=results, reduce_scatter=own_gradients, rooms=rooms)


if __name__ == "__main__":
    main()
