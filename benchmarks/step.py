"""What an ordinary step costs, forward and backward, next to cross-entropy, ten naive lines and imbalanced-losses.

Usage: python benchmarks/step.py [--quick] [--repeats 30] [--out FOLDER]

One thread. Times are CPU microseconds of a process, the least of many repetitions, in which the competitors take turns:
other work on the machine disturbs them less than wall time, and ratios of one run hold best. The naive lines hold all
pairs of positives and rows of a class. With a queue the last column compares with the same pool without one.

The losses of embeddings and of queries take turns with plain lines, which hold all pairs in one matrix, and the median
counts. Embeddings have 128 columns. The peak of the resident set in a step above that before it, in a fresh process, is
measured for the sigmoid loss; it needs Linux's /proc.

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
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from memory import CLEAR, resident
from report import CPU, Record, Run, Step, apart, make_rows, on_ranks, print_records, progress, training_step
from torch import Tensor, nn

import fullrank

FEATURES, TEMPERATURE = 128, 0.07
SHARE = 0.1  # of positives, of one class; several classes are uniform
SHORTEST_S, FEWEST, LONG_S = 0.002, 8, 0.1  # CPU time and steps of a turn; a step as long as that is one
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
EMBEDDINGS = (
    *(("InfoNCELoss", size) for size in (64, 256, 1_024, 4_096)),
    *(("SigLIPLoss", size) for size in (64, 256, 1_024, 4_096)),
    *(("SupConLoss", size) for size in (64, 256, 1_024)),
    ("RetrievalSmoothAPLoss", 128),
    ("NDCGLoss", 100),
)
QUICK_EMBEDDINGS = tuple((kind, 16) for kind in dict(EMBEDDINGS))
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


def in_turns(steps: Mapping[str, Step], repeats: int) -> dict[str, list[float]]:
    """Return ``repeats`` CPU times of each step in seconds.

    The steps take turns. The first of a turn finds the caches of another competitor, and is not measured.
    """
    numbers: dict[str, int] = {}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name, step in steps.items():
        step()
        start = time.process_time()
        step()
        spent = max(time.process_time() - start, 1e-6)
        numbers[name] = 1 if spent > LONG_S else max(FEWEST, int(SHORTEST_S / spent))
    for _ in range(repeats):
        for name, step in steps.items():
            step()
            start = time.process_time()
            for _ in range(numbers[name]):
                step()
            found[name].append((time.process_time() - start) / numbers[name])
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
    found = {name: min(times) * 1e6 for name, times in in_turns(steps, repeats).items()}
    ratios = {
        f"{name}/{other}": found[name] / found[other] if other in found else None
        for name, other in (("ours", "naive"), ("ours_fixed", "naive_fixed"), ("ours", "peer"), ("ours", "same_pool"))
    }
    names = ("cross_entropy", "naive", "naive_fixed", "peer", "ours", "ours_fixed", "same_pool")
    return {**case._asdict(), **{name: found.get(name) for name in names}, **ratios}


class Plain(nn.Module):
    """Losses of embeddings and of queries as anybody would write them first."""

    def __init__(self, loss: Callable[[Plain, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(-math.log(TEMPERATURE)))
        self.bias = nn.Parameter(torch.tensor(-10.0))
        self.loss = loss

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        return self.loss(self, rows, targets)

    def clip(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of CLIP of pairs (2, N, D): one product, and a cross-entropy both ways."""
        queries, keys = F.normalize(rows, dim=2)
        logits, places = self.scale.exp() * queries @ keys.T, torch.arange(len(keys), device=keys.device)
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2

    def siglip(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the sigmoid loss of pairs (2, N, D), as open_clip writes it."""
        queries, keys = F.normalize(rows, dim=2)
        logits = self.scale.exp() * queries @ keys.T + self.bias
        signs = 2 * torch.eye(len(keys), device=keys.device) - 1
        return -F.logsigmoid(signs * logits).sum() / len(keys)

    def sup_con(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the supervised contrastive loss of rows (N, D)."""
        unit, itself = F.normalize(rows, dim=1), torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        logits = (unit @ unit.T / TEMPERATURE).masked_fill(itself, -1e9)
        same = (targets[:, None] == targets) & ~itself
        return -((logits.log_softmax(dim=1) * same).sum(dim=1) / same.sum(dim=1)).mean()

    def retrieval(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the smooth average precision of each of the rows (N, D) as a query."""
        unit, others = F.normalize(rows, dim=1), ~torch.eye(len(rows), dtype=torch.bool)
        scores, same = unit @ unit.T, (targets[:, None] == targets) & others
        above = torch.sigmoid((scores[:, None] - scores[:, :, None]) / 0.01) * (others[:, None] & others)
        ranks, of_same = 1 + above.sum(dim=2), 1 + (above * same[:, None]).sum(dim=2)
        return 1 - ((of_same / ranks * same).sum(dim=1) / same.sum(dim=1)).mean()

    def ndcg(self, scores: Tensor, grades: Tensor) -> Tensor:
        """Return the approximate NDCG of padded queries (Q, L)."""
        ranks = 0.5 + torch.sigmoid((scores[:, None] - scores[:, :, None]) / 0.1).sum(dim=2)
        ideal = grades.sort(dim=1, descending=True).values / (torch.arange(grades.shape[1]) + 2).log2()
        return 1 - ((grades / (1 + ranks).log2()).sum(dim=1) / ideal.sum(dim=1)).mean()


def of_embeddings(kind: str, size: int, device: torch.device = CPU) -> dict[str, Step]:
    """Return a step of ours and of plain lines: of pairs, of rows with four of each label, of queries of 20 rows."""
    generator = torch.Generator().manual_seed(0)
    if kind == "NDCGLoss":
        rows, targets = torch.randn(size, 20, generator=generator), torch.randint(0, 5, (size, 20), generator=generator)
        indexes, loss = torch.arange(size).repeat_interleave(20), fullrank.NDCGLoss(0.1)
        ours = lambda rows, targets: loss(rows.flatten(), targets.flatten(), indexes)  # noqa: E731
        plain = Plain.ndcg
    elif kind in ("InfoNCELoss", "SigLIPLoss"):
        rows, targets = torch.randn(2, size, FEATURES, generator=generator), torch.empty(0)
        pairs, plain = fullrank.SigLIPLoss(TEMPERATURE).to(device), Plain.siglip
        if kind == "InfoNCELoss":
            pairs = fullrank.InfoNCELoss(TEMPERATURE, symmetric=True, learn_temperature=True).to(device)
            plain = Plain.clip
        ours = lambda rows, targets: pairs(*rows)  # noqa: E731
    else:
        rows, targets = torch.randn(size, FEATURES, generator=generator), torch.arange(size) // 4
        ours, plain = fullrank.SupConLoss(TEMPERATURE), Plain.sup_con
        if kind == "RetrievalSmoothAPLoss":
            ours, plain = fullrank.RetrievalSmoothAPLoss(), Plain.retrieval
    rows, targets, by_hand = rows.to(device).requires_grad_(), targets.to(device), Plain(plain).to(device)
    assert torch.allclose(ours(rows, targets), by_hand(rows, targets), rtol=1e-4)
    return {"plain": training_step(by_hand, rows, targets), "ours": training_step(ours, rows, targets)}


def peak(kind: str, size: int, name: str) -> int:
    """Return the peak of one step above the resident set before it, in bytes, in a process that has done little."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    of_embeddings(kind, 64)[name]()
    step = of_embeddings(kind, size)[name]
    CLEAR.write_text("5")  # the peak so far becomes the resident set
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def measure_embeddings(kind: str, size: int, repeats: int) -> Record:
    """Return the CPU time of ours, of plain lines, and their ratio; of the sigmoid loss the peaks of both too."""
    found = {name: median(times) * 1e6 for name, times in in_turns(of_embeddings(kind, size), repeats).items()}
    record = {"loss": kind, "size": size, **found, "ours/plain": found["ours"] / found["plain"]}
    peaks = {name: apart(peak, kind, size, name) for name in found} if kind == "SigLIPLoss" and CLEAR.exists() else {}
    return {**record, **{f"{name}_peak": peaks.get(name) for name in found}}


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
    cases = progress(QUICK_EMBEDDINGS if options.quick else EMBEDDINGS)
    others = [measure_embeddings(kind, size, max(1, options.repeats // 3)) for kind, size in cases]
    print_records(
        "Losses of embeddings and of queries, one process, CPU us, forward and backward; peaks in bytes", others
    )
    two = []
    for of_ranks in zip(*on_ranks(2, measure_rank, QUICK_OVER if options.quick else FULL_OVER, options.repeats)):
        slower = {name: max(record[name] for record in of_ranks) for name in of_ranks[0]}
        bar = slower["local_on_all_rows"] + 1.6 * slower["all_gather"]
        two.append({**slower, "step/(local + 1.6 all_gather)": slower["step"] / bar})
    print_records("SmoothAPLoss, two processes, wall us of the slower one", two)
    script.write(one_process=one, embeddings=others, two_processes=two)


if __name__ == "__main__":
    main()
