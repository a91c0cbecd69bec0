"""What other rows are worth to a contrastive loss: code search on Python's source, and SupCon, by number of processes.

Usage: python benchmarks/code_search.py [--quick] [--seeds 5] [--cache FILE] [--out FOLDER]

The first line of a function's docstring looks for its body among 2,000 of files that were not trained on. The encoder
of both is a mean of embeddings of hashed words and pairs of words. Each process has 16 pairs a step, and all runs take
400 steps of Adam, each at its best of four rates by a seed that chooses. The loss is symmetric ``InfoNCELoss``, over a
process's own pairs or those of all; W processes are simulated in one, as in pooling.py, whose data this is. A queue has
1,024 keys of each side, of the encoder that is trained or of its running mean (0.99 a step). ``Smooth-AP`` is
``RetrievalSmoothAPLoss`` with the two rows of a pair as positives of each other, ``SigLIP`` is ``SigLIPLoss`` as it is.

With ``negatives`` each pair brings another pair of its file, both of whose sides are hard negatives of the other side.
Docstrings that occur more than once are left out, except with ``repeats`` and ``labels``: ``labels`` are equal for
equal docstrings, ``repeats`` has none. Both train on the same pairs, and are tested on docstrings that occur once.

Runs with 1, 2 and 4 real processes, each by micro-batches with ``pooled_backward`` (GradCache), are compared with one
process that has all rows at once, in float64: their parameters must go the same way.

SupCon takes the task of pooling.py: functions of one file are positives of each other.

A seed draws the files, the model and the batches. Intervals are 95 %, Student's t over seeds; differences are paired,
from all rows of as many processes without a queue, or from ``repeats``. The full run takes about half an hour on one
core and writes code_search.json. A run that starts again takes finished runs from ``--cache``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pooling
import torch
import torch.nn.functional as F
from intervals import Interval, paired
from pooling import MOST_FILES, STEPS, TEST_FILES, WIDTH, WORDS, Draws, Function, Functions, read
from real_runs import Cache
from report import Record, Run, on_ranks, print_records
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullrank import InfoNCELoss, RetrievalSmoothAPLoss, SigLIPLoss, SupConLoss, pooled_backward

PAIRS, TEST_PAIRS = 16, 2_000  # of a process and step, and to test on
QUEUE, MOMENTUM, TEMPERATURE = 1_024, 0.99, 0.05
RATES, SEARCH_SEED = (3e-3, 1e-2, 3e-2, 1e-1), 100
REAL, REAL_ROWS, REAL_STEPS = (1, 2, 4), 64, 20


class Cell(NamedTuple):
    """What the runs of all seeds share."""

    loss: str
    processes: int
    pool: str  # "own" rows or those of "all" processes
    queue: str = "none"  # or of the "same" encoder, or of a "slow" one
    scale: str = "learned"  # or "fixed"
    extra: str = "none"  # or hard "negatives"; "repeats" of docstrings, or the same with "labels"


CELLS = (
    *(Cell("InfoNCE", 1, "all", queue) for queue in ("none", "same", "slow")),
    *(Cell("InfoNCE", 1, "all", queue, "fixed") for queue in ("none", "same")),
    *(Cell("InfoNCE", 16, pool) for pool in ("own", "all")),
    Cell("InfoNCE", 16, "all", "same"),
    Cell("Smooth-AP", 16, "all"),
    *(Cell("SigLIP", processes, "all") for processes in (1, 16)),
    *(Cell("InfoNCE", processes, "all", extra="negatives") for processes in (1, 16)),
    *(Cell("InfoNCE", 16, "all", extra=extra) for extra in ("repeats", "labels")),
    *(Cell("SupCon", 16, pool) for pool in ("own", "all")),
)


class Pairs(NamedTuple):
    """Functions with a docstring: its first line, and the body."""

    summaries: Functions
    bodies: Functions
    folder: Tensor  # [pairs]
    label: Tensor  # [pairs] the same for equal first lines

    @classmethod
    def of(cls, functions: Sequence[Function], repeats: bool = False) -> Pairs:
        """Return what :func:`summarized` chooses."""
        some = summarized(functions, repeats)
        label = {summary: place for place, summary in enumerate(dict.fromkeys(one.summary for one in some))}
        paths = [one.path for one in some]
        number = {folder: place for place, folder in enumerate(dict.fromkeys(str(Path(path).parent) for path in paths))}
        folder = torch.tensor([number[str(Path(path).parent)] for path in paths])
        summaries, bodies = ([getattr(one, name) for one in some] for name in ("summary", "body"))
        labels = torch.tensor([label[one.summary] for one in some])
        return cls(Functions.of(summaries, paths), Functions.of(bodies, paths), folder, labels)

    def split(self, generator: torch.Generator, test_pairs: int) -> tuple[Tensor, Tensor]:
        """Return pairs to train on, and pairs of other files to test on, whose first lines occur once."""
        file = self.bodies.file
        count = torch.bincount(file)
        order = torch.randperm(len(count), generator=generator)
        tested = torch.zeros(len(count), dtype=torch.bool)
        tested[order[: int((count[order].cumsum(0) < test_pairs).sum()) + 1]] = True
        test = (tested[file] & (torch.bincount(self.label)[self.label] == 1)).nonzero()[:, 0]
        return (~tested[file]).nonzero()[:, 0], test[torch.randperm(len(test), generator=generator)[:test_pairs]]

    def others(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return another pair of the file of each of ``rows``, but of none that is alone in its file."""
        number = torch.bincount(self.bodies.file)
        start, number = ((of[self.bodies.file[rows]]) for of in (number.cumsum(0) - number, number))
        step = 1 + (torch.rand(len(rows), generator=generator) * (number - 1)).long()
        return (start + (rows - start + step) % number)[number > 1]


def summarized(functions: Sequence[Function], repeats: bool = False) -> list[Function]:
    """Return the functions whose first line has three words or more and, without repeats, did not occur before."""
    first = {one.summary: one for one in reversed(functions) if len(one.summary.split()) >= 3}
    return [one for one in functions if one.summary in first and (repeats or first[one.summary] is one)]


class Search(nn.Module):
    """The encoder of summaries and bodies, and its loss."""

    def __init__(self, seed: int, queue: int = 0, learned: bool = True, sigmoid: bool = False) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="mean")
        nn.init.normal_(self.words.weight, std=0.1, generator=torch.Generator().manual_seed(seed))
        make: Callable[[], InfoNCELoss | SigLIPLoss] = SigLIPLoss
        if not sigmoid:
            make = partial(InfoNCELoss, TEMPERATURE, learn_temperature=learned, queue_size=queue)
        self.find_body, self.find_summary = make(), make()
        self.find_summary.logit_scale, self.find_summary.logit_bias = (
            self.find_body.logit_scale,
            self.find_body.logit_bias,
        )

    def forward(self, pairs: Pairs, rows: Tensor) -> Tensor:
        """Return the embeddings (rows, 2, WIDTH)."""
        return torch.stack([self.words(*texts.take(rows)) for texts in pairs[:2]], dim=1)

    def contrast(
        self, embeddings: Tensor, keys: Tensor, negatives: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Return the loss of both directions; of pairs alone it is InfoNCELoss(symmetric=True)."""
        (summary, body), (key_summary, key_body) = embeddings.unbind(1), keys.unbind(1)
        no_body, no_summary = (None, None) if negatives is None else (negatives[:, 1], negatives[:, 0])
        forth = self.find_body(summary, key_body, no_body, labels=labels)
        back: Tensor = self.find_summary(body, key_summary, no_summary, labels=labels)
        return (forth + back) / 2

    def contrast_own(self, embeddings: Tensor) -> Tensor:
        """Return the mean of the losses of processes that have ``PAIRS`` rows each and see no others."""
        summary, body = F.normalize(embeddings, dim=2).unflatten(0, (-1, PAIRS)).unbind(2)  # [W, PAIRS, WIDTH]
        assert self.find_body.logit_scale is not None
        scores = self.find_body.logit_scale.exp() * summary @ body.mT
        places = torch.arange(PAIRS).repeat(len(scores))
        some: list[Tensor] = [F.cross_entropy(one.flatten(0, 1), places) for one in (scores, scores.mT)]
        return (some[0] + some[1]) / 2


def train(pairs: Pairs, seed: int, cell: Cell, rate: float, steps: int, test_pairs: int) -> Record:
    """Return the figures of the encoder that the processes of ``cell`` would train."""
    generator = torch.Generator().manual_seed(2_000 + seed)
    own, test = pairs.split(generator, test_pairs)
    of_others = torch.Generator().manual_seed(seed)
    model = Search(seed, 0 if cell.queue == "none" else QUEUE, cell.scale == "learned", cell.loss == "SigLIP")
    slow, smooth_ap = copy.deepcopy(model).requires_grad_(False), RetrievalSmoothAPLoss(temperature=TEMPERATURE)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    for _ in range(steps):
        rows = own[torch.randperm(len(own), generator=generator)[: PAIRS * cell.processes]]
        embeddings = keys = model(pairs, rows)
        if cell.queue == "slow":
            slow.words.weight.lerp_(model.words.weight.detach(), 1 - MOMENTUM)
            keys = slow(pairs, rows)
        if cell.loss == "Smooth-AP":
            loss = smooth_ap(embeddings.transpose(0, 1).flatten(0, 1), torch.arange(len(rows)).repeat(2))
        elif cell.pool == "own":
            loss = model.contrast_own(embeddings)
        else:
            negatives = model(pairs, pairs.others(rows, of_others)) if cell.extra == "negatives" else None
            loss = model.contrast(embeddings, keys, negatives, pairs.label[rows] if cell.extra == "labels" else None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        summary, body = F.normalize(model(pairs, test), dim=2).unbind(1)
    scores = summary @ body.T
    rank = 1.0 + (scores > scores.diagonal()[:, None]).sum(dim=1)
    temperature = TEMPERATURE if cell.loss == "Smooth-AP" else model.find_body.temperature
    return {"recall": float((rank == 1).double().mean()), "mean": float((1 / rank).mean()), "temperature": temperature}


def train_supcon(functions: Functions, seed: int, cell: Cell, rate: float, steps: int, test_files: int) -> Record:
    """Return the figures of SupCon on the task of pooling.py."""
    draws = Draws(functions, seed, test_files)
    same = pooling.Cell(cell.processes, cell.pool)
    model = pooling.train(functions, draws, seed, same, steps, rate, SupConLoss(temperature=0.1))
    precision, recall = pooling.evaluate(model, functions, draws.test)
    return {"recall": recall, "mean": precision, "temperature": 0.1}


def way(rank: int, processes: int, pairs: Pairs, steps: int, parts: int) -> Tensor:
    """Return the way that the parameters go in float64: by ``pooled_backward``, or with all rows at once (parts 0).

    With SGD, because Adam divides rounding errors by their own size where a gradient is 0.
    """
    model, generator = Search(0).double(), torch.Generator().manual_seed(0)
    wrapped = DistributedDataParallel(model) if parts else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(steps):
        rows = torch.randperm(len(pairs.bodies.file), generator=generator)[:REAL_ROWS].chunk(processes)[rank]
        optimizer.zero_grad()
        if parts:
            pooled_backward(
                wrapped,
                rows.chunk(parts),
                forward=lambda some: wrapped(pairs, some),
                loss=lambda embeddings, _: model.contrast(embeddings, embeddings),
            )
        else:
            embeddings = model(pairs, rows)
            model.contrast(embeddings, embeddings).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - start


def agreement(pairs: Pairs, steps: int) -> list[Record]:
    """Return how far micro-batches on real processes lead from one process with all rows, relative to its way.

    The control is half of the rows.
    """
    whole, half = (way(0, processes, pairs, steps, 0) for processes in (1, 2))
    found = []
    for processes in REAL:
        micro_batches = REAL_ROWS // PAIRS // processes
        real = on_ranks(processes, way, processes, pairs, steps, micro_batches)[0]
        gaps = {"difference": float((real - whole).norm() / whole.norm())}
        gaps["control"] = float((half - whole).norm() / whole.norm())
        found.append({"processes": processes, "micro_batches": micro_batches, "steps": steps, **gaps})
    return found


def summary(runs: Sequence[tuple[Cell, list[Any]]]) -> list[Record]:
    """Return the means with their intervals, and the differences from the cell they are compared with."""
    by_cell, records = dict(runs), []
    for cell, found in runs:
        loss = "SupCon" if cell.loss == "SupCon" else "InfoNCE"
        extra = "repeats" if cell.extra in ("repeats", "labels") else "none"
        base = by_cell[Cell(loss, cell.processes, "all", "none", cell.scale, extra)]
        record: Record = cell._asdict()
        for name in ("recall", "mean"):
            values = [one[name] for one in found]
            of, gain = Interval.of(values), paired(values, [one[name] for one in base])
            record |= {name: of.mean, f"{name}_width": of.width, f"{name}_gain": gain.mean, f"{name}_pm": gain.width}
        records.append(record | {"temperature": Interval.of([one["temperature"] for one in found]).mean})
    return records


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "code_search")
    script.parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    cache, options = Cache.start(script), script.options
    quick = options.quick
    found = read(150 if quick else MOST_FILES)
    functions = Functions.of([one.body for one in found], [one.path for one in found])
    pairs, repeated = Pairs.of(found), Pairs.of(found, repeats=True)
    test_pairs, test_files = (100, 10) if quick else (TEST_PAIRS, TEST_FILES)
    seeds, steps = (2, 2) if quick else (options.seeds, STEPS)
    about = {"pairs": len(pairs.label), "with_repeats": len(repeated.label), "test_pairs": test_pairs}
    about |= {"functions": len(functions.file)}
    print(about, flush=True)
    real = agreement(pairs, 2 if quick else REAL_STEPS)
    print_records("Micro-batches on real processes against one process with all rows: relative difference", real)

    def run(seed: int, cell: Cell, rate: float) -> Record:
        some = repeated if cell.extra in ("repeats", "labels") else pairs
        make = partial(train, some, seed, cell, rate, steps, test_pairs)
        if cell.loss == "SupCon":
            make = partial(train_supcon, functions, seed, cell, rate, steps, test_files)
        one: Record = cache.get([*cell, seed, rate, steps], make)
        print(f"seed {seed}, {cell}, rate {rate}: recall@1 {one['recall']:.4f}, mean {one['mean']:.4f}", flush=True)
        return one

    searched = {cell: {rate: run(SEARCH_SEED, cell, rate)["mean"] for rate in RATES} for cell in CELLS}
    chosen = {cell: max(found, key=found.__getitem__) for cell, found in searched.items()}
    runs = {cell: [run(seed, cell, rate) for seed in range(seeds)] for cell, rate in chosen.items()}
    means = [{"rate": chosen[cell], **one} for cell, one in zip(runs, summary([*runs.items()]))]
    print_records("Recall@1, and the mean reciprocal rank, of SupCon the mean average precision", means)
    script.write(
        about=about,
        real=real,
        means=means,
        runs=[{**cell._asdict(), "searched": searched[cell], "runs": runs[cell]} for cell in runs],
    )


if __name__ == "__main__":
    main()
