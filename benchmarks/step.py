"""What an ordinary step costs, forward and backward, next to cross-entropy, ten naive lines and imbalanced-losses.

Usage: python benchmarks/step.py [--quick] [--repeats 30] [--out FOLDER]

One thread. Times are CPU microseconds of a process, the least of many repetitions, in which the competitors take turns:
other work on the machine disturbs them less than wall time, and ratios of one run hold best. The naive lines hold all
pairs of positives and rows of a class. With a queue the last column compares with the same pool without one.
Over two processes each has the rows of the first column, and the wall time is that of the slower one. The peer is left
out where it is not installed. Takes a minute or two, and writes step.json.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Record, Run, Step, make_rows, on_ranks, print_records, progress, training_step
from torch import Tensor

import fullrank

SHARE = 0.1  # of positives, of one class; several classes are uniform
SHORTEST_S, FEWEST = 0.002, 8  # CPU time and steps of a turn
MOST_PAIRS = 2**26  # for the naive lines
WARM = 5  # steps over processes before the first that is measured


class Case(NamedTuple):
    """One size of a step."""

    rows: int
    classes: int = 1
    queue: int = 0


FULL = (
    *(Case(rows) for rows in (32, 128, 512, 1_024, 4_096)),
    Case(512, queue=1_024),
    Case(512, 10),
    Case(1_024, 100),
)
QUICK = (Case(32), Case(32, queue=40), Case(32, 3))
FULL_OVER, QUICK_OVER = (64, 512, 2_048), (16,)


def naive(logits: Tensor, targets: Tensor, temperature: float | None = None) -> Tensor:
    """Return the smooth average precision as anybody would write it first."""
    losses = []
    for c, scores in enumerate(logits.t()):
        positive = targets == (c if logits.shape[1] > 1 else 1)
        if positive.any():
            width = 0.1 * scores.detach().std() if temperature is None else temperature
            above = torch.sigmoid((scores - scores[positive, None]) / width)
            # A row adds 1/2 to itself.
            losses.append(1 - ((above[:, positive].sum(1) + 0.5) / (above.sum(1) + 0.5)).mean())
    return torch.stack(losses).mean()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return that of torch."""
    if logits.shape[1] > 1:
        return F.cross_entropy(logits, targets)
    return F.binary_cross_entropy_with_logits(logits[:, 0], targets.to(logits.dtype))


def least(steps: Mapping[str, Step], repeats: int) -> dict[str, float]:
    """Return the least CPU time of each step in microseconds.

    The steps take turns. The first of a turn finds the caches of another competitor, and is not measured.
    """
    numbers, found = {}, dict.fromkeys(steps, math.inf)
    for name, step in steps.items():
        step()
        start = time.process_time()
        step()
        numbers[name] = max(FEWEST, int(SHORTEST_S / max(time.process_time() - start, 1e-6)))
    for _ in range(repeats):
        for name, step in steps.items():
            step()
            start = time.process_time()
            for _ in range(numbers[name]):
                step()
            found[name] = min(found[name], (time.process_time() - start) / numbers[name] * 1e6)
    return found


def measure(case: Case, repeats: int) -> Record:
    """Return the times of one case, and those of ours divided by those of others."""
    logits, targets = make_rows(case.rows, case.classes, SHARE if case.classes == 1 else None)
    loss = partial(fullrank.SmoothAPLoss, case.classes, gather_distributed=False)
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": cross_entropy}
    if not case.queue and case.rows**2 <= MOST_PAIRS:
        losses |= {"naive": naive, "naive_fixed": partial(naive, temperature=0.1)}
    if importlib.util.find_spec("imbalanced_losses") is not None:
        peer: Any = importlib.import_module("imbalanced_losses")
        losses["peer"] = peer.SmoothAPLoss(num_classes=case.classes, queue_size=case.queue)
    losses |= {"ours": loss(queue_size=case.queue), "ours_fixed": loss(queue_size=case.queue, temperature=0.1)}
    steps = {name: training_step(one, logits, targets) for name, one in losses.items()}
    if case.queue:
        pool = make_rows(case.rows + case.queue, case.classes, SHARE if case.classes == 1 else None)
        steps["same_pool"] = training_step(loss(queue_size=0), *pool)
        for _ in range(case.queue // case.rows + 1):  # until the queue is full
            steps["ours"](), steps["ours_fixed"]()
    found = least(steps, repeats)
    ratios = {
        f"{name}/{other}": found[name] / found[other] if other in found else None
        for name, other in (("ours", "naive"), ("ours_fixed", "naive_fixed"), ("ours", "peer"), ("ours", "same_pool"))
    }
    names = ("cross_entropy", "naive", "naive_fixed", "peer", "ours", "ours_fixed", "same_pool")
    return {**case._asdict(), **{name: found.get(name) for name in names}, **ratios}


def measure_rank(rank: int, sizes: tuple[int, ...], repeats: int) -> list[Record]:
    """Return for each size the wall times of one process in microseconds, the least of ``repeats``."""
    warnings.simplefilter("ignore")
    results = []
    local = fullrank.SmoothAPLoss(queue_size=0, gather_distributed=False)
    for rows in sizes:
        world_size = dist.get_world_size()
        logits, targets = make_rows(rows, 1, SHARE)
        everyone = make_rows(rows * world_size, 1, SHARE)
        block, gathered = torch.zeros(rows, 3), torch.zeros(rows * world_size, 3)  # as many bytes as logits and targets
        embeddings = torch.zeros(rows, 1)
        steps: dict[str, Step] = {
            "all_gather": partial(dist.all_gather, list(gathered.split(rows)), block),
            "gather_rows": partial(fullrank.gather_rows, embeddings, targets),
            "local_on_all_rows": training_step(local, *everyone),
            "step": training_step(fullrank.SmoothAPLoss(queue_size=0), logits, targets),
        }
        found = dict.fromkeys(steps, math.inf)
        for index in range(WARM + repeats):  # as often on every process, which communicate
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                step()
                if index >= WARM:
                    found[name] = min(found[name], (time.perf_counter() - start) * 1e6)
        results.append({"rows": rows, **found})
    return results


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "step", repeats=30)
    options = script.start()
    warnings.simplefilter("ignore")  # hints about the random rows
    torch.set_num_threads(1)
    one = [measure(case, options.repeats) for case in progress(QUICK if options.quick else FULL)]
    print_records("SmoothAPLoss, one process, CPU us, forward and backward", one)
    two = []
    for of_ranks in zip(*on_ranks(2, measure_rank, QUICK_OVER if options.quick else FULL_OVER, options.repeats)):
        slower = {name: max(record[name] for record in of_ranks) for name in of_ranks[0]}
        bar = slower["local_on_all_rows"] + 1.6 * slower["all_gather"]
        two.append({**slower, "step/(local + 1.6 all_gather)": slower["step"] / bar})
    print_records("SmoothAPLoss, two processes, wall us of the slower one", two)
    script.write(one_process=one, two_processes=two)


if __name__ == "__main__":
    main()
