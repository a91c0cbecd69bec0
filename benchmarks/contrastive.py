"""What a contrastive step costs on W processes, compared with one process and with the matrix of all pairs.

Usage: python benchmarks/contrastive.py [--quick] [--repeats 5] [--out FOLDER]

W gloo processes with one thread each hold N pairs together. A step begins with the embeddings and ends with their
gradient. ``ours`` is ``InfoNCELoss(symmetric=True, learn_temperature=True)``. ``matrix`` is what is written by hand:
the rows of all processes gathered with gradient, and the cross-entropy of all N x N similarities on every process.

A time is the least processor time of rank 0 over the repetitions, which excludes waiting. ``of one process`` is that
time divided by the same with W = 1. A peak is that of the resident set in one step above the resident set before it, in
fresh processes; it needs Linux's /proc. Writes contrastive.json; a quick run writes only with ``--out``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from memory import CLEAR, resident
from report import Record, Run, on_ranks, print_records, progress
from torch import Tensor, nn

import fullrank

FORMS = ("ours", "matrix")


class Case(NamedTuple):
    """The pairs of all processes together, and the columns of an embedding."""

    pairs: int
    features: int


FULL = (Case(2_048, 256), Case(4_096, 256))
QUICK = (Case(512, 32),)


class Matrix(nn.Module):
    """The loss of CLIP from the similarities of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(-math.log(0.07)))

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        queries, keys = (F.normalize(rows, dim=1) for rows in (queries, keys))
        if dist.get_world_size() > 1:
            queries, keys = (fullrank.all_gather_with_grad(rows) for rows in (queries, keys))
        logits, places = self.logit_scale.exp() * queries @ keys.T, torch.arange(len(queries))
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


def make_step(case: Case, form: str) -> Callable[[], Tensor]:
    """Return forward and backward of one rank, whose rows are those of all ranks in turn; it returns the gradient."""
    generator = torch.Generator().manual_seed(0)
    count = case.pairs // dist.get_world_size()
    own = slice(count * dist.get_rank(), count * (dist.get_rank() + 1))
    rows = torch.randn(2, case.pairs, case.features, generator=generator)[:, own].clone().requires_grad_()
    ours = fullrank.InfoNCELoss(symmetric=True, learn_temperature=True)
    loss = ours if form == "ours" else Matrix()

    def step() -> Tensor:
        rows.grad = None
        loss(*rows).backward()
        assert rows.grad is not None
        return rows.grad

    return step


def run_rank(rank: int, case: Case, repeats: int, peak_of: str) -> Record:
    """Measure on one rank; ``peak_of`` takes one step of that form and measures its peak."""
    if peak_of:
        make_step(case._replace(pairs=8 * dist.get_world_size()), peak_of)()
        step = make_step(case, peak_of)
        CLEAR.write_text("5")  # the peak so far becomes the resident set
        before = resident("VmRSS")
        step()
        return {f"{peak_of}_peak": resident("VmHWM") - before}
    steps, found = {form: make_step(case, form) for form in FORMS}, {}
    gradients = [step() for step in steps.values()]
    for _ in range(repeats):
        for form, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step()
            milliseconds = 1e3 * (time.process_time() - start)
            found[f"{form}_ms"] = min(found.get(f"{form}_ms", math.inf), milliseconds)
    return found | {"difference": float((gradients[0] - gradients[1]).norm() / gradients[1].norm())}


def measure(case: Case, repeats: int) -> list[Record]:
    """Return the figures of rank 0 for each number of processes."""
    records: list[Record] = []
    for world_size in (1, 2, 4):
        record: Record = {**case._asdict(), "processes": world_size}
        for peak_of in ("", *FORMS) if CLEAR.exists() else ("",):
            record |= on_ranks(world_size, run_rank, case, repeats, peak_of)[0]
        first = records[0] if records else record
        records.append(record | {"of one process": record["ours_ms"] / first["ours_ms"]})
    return records


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "contrastive", repeats=5)
    options = script.start()
    results = [
        record for case in progress(QUICK if options.quick else FULL) for record in measure(case, options.repeats)
    ]
    print_records("A symmetric contrastive step of all pairs, forward + backward, of one of the processes", results)
    script.write(contrastive=results)


if __name__ == "__main__":
    main()
