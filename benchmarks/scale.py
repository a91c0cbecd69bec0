"""What a sharded pool costs, compared with a gathered one: time, memory, bytes and collectives of a rank.

Usage: python benchmarks/scale.py [--quick] [--repeats 7] [--out FOLDER]

Two parts. In the first, two and four gloo processes with one thread each take steps with a loss and with a
``ShardedLoss`` around it, in turn. A time is the least processor time of rank 0 over the repetitions, which excludes
waiting. The peak is that of the resident set in one step, above the resident set before it, in fresh processes; it
needs Linux's /proc. Retrieval has no sharded pool: its queries are computed on every rank, and on the rank of their
row.

In the second part the number of ranks is 2 to 1,024, and this process is rank 0 of all of them: the collectives of
torch are replaced by ones that act as if every other rank had the same rows. So the real code runs, and what it passes
to the collectives is counted. An all-gather of n bytes a rank receives (W - 1) n, an all-reduce of n bytes
2 (W - 1) / W n, and a reduce-scatter of n bytes in all (W - 1) / W n. A gathered pool of more than ``MOST_ROWS`` rows
times classes is not computed: its bytes are those of its rows. The full run takes some minutes and writes scale.json
and scale.svg; a quick run takes a minute and writes only with ``--out``. Needs the ``test`` extra.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from memory import CLEAR, resident
from report import PICTURES, Record, Run, make_rows, on_ranks, print_records
from torch import Tensor

import fullrank
from fullrank.distributed import exchange
from fullrank.large import ShardedLoss
from fullrank.losses.embeddings import retrieval

MOST_ROWS = 2_000_000  # times classes, of a gathered pool that is computed
FEATURES = 64


class Case(NamedTuple):
    """A loss, the rows of all ranks together, and the number of processes."""

    loss: str
    rows: int
    world_size: int = 2
    num_classes: int = 1
    share: float = 0.01  # of positives, with one class


FULL = (
    Case("smooth_ap", 10_000),
    Case("smooth_ap", 100_000),
    Case("smooth_ap", 1_000_000),
    Case("smooth_ap", 10_000_000),
    Case("smooth_ap", 1_000_000, 4),
    Case("smooth_ap", 10_000, num_classes=100),
    Case("smooth_ap", 100_000, num_classes=10),
    Case("recall", 1_000_000),
    Case("trapezoid", 1_000_000),
    Case("retrieval", 2_048, 4),
)
QUICK = (Case("smooth_ap", 30_000), Case("recall", 30_000), Case("retrieval", 256))
MODELLED = (
    Case("smooth_ap", 1_000_000),
    Case("smooth_ap", 1_000_000, num_classes=10),
    Case("smooth_ap", 10_000, num_classes=1_000),
    Case("recall", 1_000_000),
)
QUICK_MODELLED = (Case("smooth_ap", 30_000), Case("recall", 30_000))
RANKS = (2, 8, 64, 1_024)


def make_step(case: Case, pool: Any, world_size: int) -> Callable[[], None]:
    """Return forward and backward of one rank, whose part of the rows is the same on all ranks."""
    count = case.rows // world_size
    if case.loss == "retrieval":
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(count, FEATURES, generator=generator).requires_grad_()
        targets = torch.randint(0, max(1, case.rows // 8), (count,), generator=generator)
        fewest = 0 if pool == "sharded" else case.rows + 1

        def step() -> None:
            inputs.grad = None
            with mock.patch.object(retrieval, "FEWEST_SPLIT", fewest):
                fullrank.RetrievalSmoothAPLoss()(inputs, targets).backward()

        return step
    inputs, targets = make_rows(count, case.num_classes, case.share if case.num_classes == 1 else None)
    loss: Any
    if case.loss == "smooth_ap":
        loss = fullrank.SmoothAPLoss(case.num_classes, temperature=0.1)
    elif case.loss == "recall":
        loss = fullrank.RecallAtQuantileLoss(case.num_classes, temperature=0.3, surrogate="sigmoid")
    else:
        loss = fullrank.PAUCAtBudgetLoss(case.num_classes, surrogate="trapezoid")
    loss = ShardedLoss(loss) if pool == "sharded" else loss

    def step() -> None:
        inputs.grad = None
        loss(inputs, targets).backward()

    return step


class Count:
    """Counts what passes through the collectives: how often, and the bytes that a rank receives."""

    def __init__(self) -> None:
        self.collectives, self.received = 0, 0.0

    def wrap(self, world_size: int, act: bool) -> Any:
        """Return a context in which the collectives are counted; with ``act`` this rank acts for all others too."""
        originals = {name: getattr(exchange, name) for name in ("all_gather_flat", "all_reduce_flat")}
        originals["reduce_scatter_flat"] = exchange.reduce_scatter_flat

        def all_gather_flat(output: Tensor, tensor: Tensor, group: Any) -> None:
            self._add((world_size - 1) * _bytes(tensor))
            if act:
                output.view(world_size, -1).copy_(tensor.view(1, -1).expand(world_size, -1))
            else:
                originals["all_gather_flat"](output, tensor, group)

        def all_reduce_flat(tensor: Tensor, op: Any = None, group: Any = None) -> None:
            self._add(2 * (world_size - 1) / world_size * _bytes(tensor))
            if not act:
                originals["all_reduce_flat"](tensor, op=op, group=group)
            elif op == dist.ReduceOp.SUM:
                tensor.mul_(world_size)

        def reduce_scatter_flat(output: Tensor, tensor: Tensor, group: Any) -> None:
            self._add((world_size - 1) / world_size * _bytes(tensor))
            if act:
                output.copy_(tensor.view(world_size, -1)[0]).mul_(world_size)
            else:
                originals["reduce_scatter_flat"](output, tensor, group)

        replaced = {"all_gather_flat": all_gather_flat, "all_reduce_flat": all_reduce_flat}
        return mock.patch.multiple(exchange, **replaced, reduce_scatter_flat=reduce_scatter_flat)

    def _add(self, received: float) -> None:
        self.collectives += 1
        self.received += received


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Real processes


def run_rank(rank: int, case: Case, repeats: int, peak_of: str) -> Record:
    """Measure on one rank; ``peak_of`` takes one step of that pool and measures its peak."""
    if peak_of:
        make_step(case._replace(rows=20 * case.world_size), peak_of, case.world_size)()
        step = make_step(case, peak_of, case.world_size)
        CLEAR.write_text("5")  # the peak so far becomes the resident set
        before = resident("VmRSS")
        step()
        return {f"{peak_of}_peak": resident("VmHWM") - before}
    found: Record = {}
    steps = {pool: make_step(case, pool, case.world_size) for pool in ("gathered", "sharded")}
    for repetition in range(repeats + 1):
        for pool, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step()
            seconds = time.process_time() - start
            if repetition:  # the first one loads what is loaded once
                found[f"{pool}_ms"] = min(found.get(f"{pool}_ms", float("inf")), 1e3 * seconds)
    for pool, step in steps.items():
        count = Count()
        with count.wrap(case.world_size, act=False):
            step()
        found |= {f"{pool}_collectives": count.collectives, f"{pool}_bytes": int(count.received)}
    return found


def measure(case: Case, repeats: int) -> Record:
    """Return the figures of rank 0."""
    record: Record = {}
    for peak_of in ("", "gathered", "sharded") if CLEAR.exists() else ("",):
        record |= on_ranks(case.world_size, run_rank, case, repeats, peak_of)[0]
    return case._asdict() | record | {"ratio": record["sharded_ms"] / record["gathered_ms"]}


# One process for all ranks


def count_at(case: Case, world_size: int) -> Record:
    """Return the collectives and bytes of a step at ``world_size`` ranks with as many rows each."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    record: Record = {"loss": case.loss, "rows": case.rows, "classes": case.num_classes, "ranks": world_size}
    try:
        for pool in ("gathered", "sharded"):
            if pool == "gathered" and case.rows * case.num_classes > MOST_ROWS:
                row = 4 * case.num_classes + 8
                received = (world_size - 1) * (64 + case.rows // world_size * row)
                record |= {"gathered_bytes": received, "gathered_collectives": 2}
                continue
            count, step = Count(), make_step(case, pool, world_size)
            with count.wrap(world_size, act=True):
                step()
            record |= {f"{pool}_bytes": int(count.received), f"{pool}_collectives": count.collectives}
    finally:
        dist.destroy_process_group()
    return record


def draw(records: list[Record], path: Path) -> None:
    """Draw the bytes that a rank receives against the number of ranks."""
    from figures import BLUE, ORANGE, panels_of, save

    cases = list(dict.fromkeys((record["loss"], record["rows"], record["classes"]) for record in records))
    names = {"smooth_ap": "Smooth-AP", "recall": "recall", "trapezoid": "partial AUC"}
    rows_of_panels = -(-len(cases) // 2)
    with panels_of(rows_of_panels, 2.7 * rows_of_panels, columns=2, sharey=True) as (figure, panels):
        for axes, (loss, rows, classes) in zip(panels.flat, cases):
            some = [r for r in records if (r["loss"], r["rows"], r["classes"]) == (loss, rows, classes)]
            for pool, colour in (("gathered", ORANGE), ("sharded", BLUE)):
                values = [record[f"{pool}_bytes"] / 1e6 for record in some]
                axes.plot([record["ranks"] for record in some], values, color=colour, marker="o", markersize=5)
                if axes is panels[0, 0]:
                    style = {"textcoords": "offset points", "color": colour, "ha": "right"}
                    axes.annotate(pool, (some[-1]["ranks"], values[-1]), (0, 8), **style)
            axes.set(xscale="log", yscale="log", xlabel="processes", xticks=[2, 8, 64, 1024])
            axes.set_xticklabels(["2", "8", "64", "1,024"])
            kind = "binary" if classes == 1 else f"{classes:,} classes"
            axes.set_title(f"{names[loss]}, {kind}\n{rows:,} rows", fontsize=10)
        for row in panels:
            row[0].set_ylabel("MB per process and step")
        save(figure, path)


def main() -> None:
    """Measure, count, print, write."""
    script = Run(__doc__, "scale", repeats=7)
    options = script.start()
    measured = []
    for case in QUICK if options.quick else FULL:
        measured.append(measure(case, options.repeats))
        print_records("a step of rank 0: processor time, peak in bytes, bytes received, collectives", measured[-1:])
    modelled = [count_at(case, ranks) for case in (QUICK_MODELLED if options.quick else MODELLED) for ranks in RANKS]
    print_records("bytes received by a rank and collectives, one process in place of all", modelled)
    script.write(measured=measured, modelled=modelled)
    if (folder := script.folder(PICTURES)) is not None:
        draw(modelled, folder / "scale.svg")


if __name__ == "__main__":
    main()
