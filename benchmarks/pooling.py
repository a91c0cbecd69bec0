"""What a batch over processes is worth: own rows against the rows of all, by number of processes, on Python's source.

Usage: python benchmarks/pooling.py [--quick] [--seeds 5] [--out FOLDER]

The rows are the bodies of the functions in the standard library and in torch, which every machine that runs this has.
Functions of one file are positives of each other. A function is a bag of hashed words and pairs of words, the encoder a
mean of embeddings and a layer. Each process draws 4 files and 4 functions of each, 16 rows a step; no file is drawn
twice in a step. All runs take the same number of steps of Adam, so a process adds rows and nothing else.
``RetrievalSmoothAPLoss`` ranks a process's own 16 rows, or the rows of all processes. Each of the two has, for each
number of processes, its best rate and temperature of one seed that chooses; the five that are reported are others.

W processes are simulated in one: the mean of the losses of W parts is what DDP computes for own rows, and the loss of
the whole batch is what the package computes for all rows. The run trains with 1, 2 and 4 real processes too, in
float64, and prints how far their parameters are from the simulation's.

The metric is the mean average precision of files that were not trained on: every function is a query that ranks all
others. A seed draws the files, the model and the batches. Intervals are 95 %, Student's t over seeds; gains are paired.
The full run takes most of an hour on one core and writes pooling.json and the picture of the front page.
"""

from __future__ import annotations

import ast
import itertools
import re
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from figures import BLUE, LINE, ORANGE, panels_of, save
from intervals import Interval, paired
from report import PICTURES, Record, Run, on_ranks, print_records
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullrank import RetrievalSmoothAPLoss

FILES, FUNCTIONS = 4, 4  # of a process and step, and of a file
FEWEST, MOST = 6, 10  # functions of a file that is used; of a file to test on
TEST_FILES, MOST_FILES = 210, 3_000
WORDS, WIDTH, MOST_WORDS = 2**14, 64, 256
WIDTHS, STEPS = (1, 4, 16, 48), 400
RATES = (0.1, 0.3)
TEMPERATURES: dict[str, float | None] = {"automatic": None, "0.05": 0.05}
SEARCH_SEED = 100  # of the runs that choose
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^\w\s]")  # parts of names, numbers, signs
REAL, REAL_STEPS = (1, 2, 4), 20


class Function(NamedTuple):
    """A function or method of a file, as text."""

    path: str
    summary: str  # the first line of the docstring
    body: str  # without it


class Functions(NamedTuple):
    """The functions of some files."""

    words: Tensor  # [all words] int64
    starts: Tensor  # [functions + 1]
    file: Tensor  # [functions]

    @classmethod
    def of(cls, texts: Sequence[str], paths: Sequence[str]) -> Functions:
        """Return texts that come from files, those of a file one after another."""
        words = [hashed(text) for text in texts]
        number = {path: place for place, path in enumerate(dict.fromkeys(paths))}
        starts = torch.tensor([0, *map(len, words)]).cumsum(0)
        return cls(torch.tensor([*itertools.chain(*words)]), starts, torch.tensor([number[path] for path in paths]))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words of some functions as an EmbeddingBag takes them."""
        sizes = (self.starts[1:] - self.starts[:-1])[index]
        ends = sizes.cumsum(0)
        shift = (self.starts[:-1][index] - (ends - sizes)).repeat_interleave(sizes)
        return self.words[torch.arange(len(shift)) + shift], ends - sizes


def functions_of(path: Path) -> Iterator[Function]:
    """Yield the functions and methods of a file; a nested function is part of one."""
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                body = node.body if docstring is None else node.body[1:]
                if len(lines := "\n".join(map(ast.unparse, body)).splitlines()) >= 3:
                    yield Function(str(path), (docstring or "").partition("\n")[0], "\n".join(lines))
            else:
                waiting.append(node)


def read(most_files: int, is_shown: bool = True) -> list[Function]:
    """Return the functions of an even sample of the files; a body that occurs twice counts once."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), Path(torch.__file__).parent]
    paths = [
        path
        for root in roots
        for path in sorted(root.rglob("*.py"))
        if path.stat().st_size < 200_000 and not {"site-packages", "test", "tests"} & {*path.relative_to(root).parts}
    ]
    seen: set[str] = set()
    functions: list[Function] = []
    start = time.perf_counter()
    for number, path in enumerate(paths[:: max(1, len(paths) // most_files)]):
        try:
            found = [function for function in functions_of(path) if function.body not in seen]
        except (SyntaxError, UnicodeDecodeError):  # files that are wrong on purpose
            continue
        seen.update(function.body for function in found)
        if len(found) >= FEWEST:
            functions += found
        if is_shown and number % 200 == 199:
            print(f"read {number + 1} files, {time.perf_counter() - start:.0f} s", flush=True)
    return functions


def hashed(text: str) -> list[int]:
    """Return the hashes of the first words of a text and of the pairs of neighbours, each once."""
    words = [word.lower() for word in WORD.findall(text)][:MOST_WORDS]
    some = itertools.chain(words, map(" ".join, itertools.pairwise(words)))
    return sorted({zlib.crc32(one.encode()) % WORDS for one in some})


class Cell(NamedTuple):
    """What is compared."""

    processes: int
    pool: str  # "own" rows or those of "all" processes


class Tuned(NamedTuple):
    """What is chosen for a cell."""

    rate: float
    temperature: str


class Encoder(nn.Module):
    """A mean of embeddings and a layer."""

    def __init__(self, seed: int, words: int = WORDS) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.words, self.out = nn.EmbeddingBag(words, WIDTH, mode="mean"), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, starts: Tensor) -> Tensor:
        result: Tensor = self.out(F.relu(self.words(words, starts)))
        return result


class Draws:
    """The rows of each step: ``FILES`` files a process, ``FUNCTIONS`` functions each."""

    def __init__(self, functions: Functions, seed: int, test_files: int) -> None:
        self.generator = torch.Generator().manual_seed(1_000 + seed)
        order = torch.randperm(int(functions.file[-1]) + 1, generator=self.generator)
        of = [torch.where(functions.file == file)[0] for file in range(len(order))]
        self.train = [of[file] for file in order[test_files:].tolist()]
        self.test = torch.cat([self.some(of[file], MOST) for file in order[:test_files].tolist()])

    def some(self, rows: Tensor, most: int) -> Tensor:
        return rows[torch.randperm(len(rows), generator=self.generator)[:most]]

    def step(self, processes: int) -> Tensor:
        """Return the rows of all processes, process by process."""
        files = torch.randperm(len(self.train), generator=self.generator)[: FILES * processes].tolist()
        return torch.cat([self.some(self.train[file], FUNCTIONS) for file in files])


def train(
    functions: Functions, draws: Draws, seed: int, cell: Cell, steps: int, rate: float, loss_fn: nn.Module
) -> Encoder:
    """Return the encoder that the processes of ``cell`` would train."""
    model = Encoder(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(steps):
        rows = draws.step(cell.processes)
        embeddings, labels = model(*functions.take(rows)), functions.file[rows]
        parts = cell.processes if cell.pool == "own" else 1
        losses = [loss_fn(*part) for part in zip(embeddings.chunk(parts), labels.chunk(parts))]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return model


@torch.no_grad()
def evaluate(model: nn.Module, functions: Functions, rows: Tensor) -> tuple[float, float]:
    """Return the mean average precision and recall@1 of ``rows``, each a query that ranks all others."""
    unit, file = F.normalize(model(*functions.take(rows)), dim=1), functions.file[rows]
    order = (unit @ unit.T).fill_diagonal_(-2).argsort(dim=1, descending=True)[:, :-1]
    hits = (file[order] == file[:, None]).double()
    precision = hits.cumsum(dim=1) / torch.arange(1, hits.shape[1] + 1)
    return float(((precision * hits).sum(dim=1) / hits.sum(dim=1)).mean()), float(hits[:, 0].mean())


def train_exactly(
    processes: int, functions: Functions, pool: str, steps: int, test_files: int, real: bool, rank: int = 0
) -> Tensor:
    """Return the way that the parameters go in float64, by real processes or by their simulation in one.

    With SGD, because Adam divides rounding errors by their own size where a gradient is 0.
    """
    draws, model = Draws(functions, 0, test_files), Encoder(0).double()
    loss_fn = RetrievalSmoothAPLoss(temperature=0.05, gather_distributed=real and pool == "all")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = DistributedDataParallel(model) if real else model
    start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(steps):
        rows = draws.step(processes)
        rows = rows.chunk(processes)[rank] if real else rows
        embeddings, labels = wrapped(*functions.take(rows)), functions.file[rows]
        parts = processes if pool == "own" and not real else 1
        losses = [loss_fn(*part) for part in zip(embeddings.chunk(parts), labels.chunk(parts))]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - start


def train_on_ranks(rank: int, *arguments: Any) -> dict[str, Tensor]:
    """Return what :func:`train_exactly` returns on a real process, for both pools."""
    return {pool: train_exactly(*arguments[:2], pool, *arguments[2:], real=True, rank=rank) for pool in ("all", "own")}


def agreement(functions: Functions, steps: int, test_files: int) -> list[Record]:
    """Return how far the parameters of real processes are from those of their simulation, relative to their way.

    The control is the distance of the two simulations from each other.
    """
    found = []
    for processes in REAL:
        real = on_ranks(processes, train_on_ranks, processes, functions, steps, test_files)[0]
        simulated = {pool: train_exactly(processes, functions, pool, steps, test_files, False) for pool in real}
        gaps = {pool: float((real[pool] - way).norm() / way.norm()) for pool, way in simulated.items()}
        gaps["control"] = float((simulated["own"] - simulated["all"]).norm() / simulated["all"].norm())
        found.append({"processes": processes, "steps": steps, **gaps})
        print(f"{processes} real processes agree to {gaps['all']:.1e} and {gaps['own']:.1e}", flush=True)
    return found


def summary(runs: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Return the means with their intervals, and the gains of pooling."""
    found: dict[Cell, list[Record]] = {}
    for run in runs:
        found.setdefault(Cell(run["processes"], run["pool"]), []).append(run)
    scores = {cell: [run["map"] for run in some] for cell, some in found.items()}
    means, gains = [], []
    for cell, values in scores.items():
        of, recall = Interval.of(values), Interval.of([run["recall"] for run in found[cell]])
        chosen = {name: found[cell][0][name] for name in Tuned._fields}
        means.append({**cell._asdict(), **chosen, "map": of.mean, "width": of.width, "recall": recall.mean})
        for other in scores if cell.pool == "all" and cell.processes > 1 else ():
            if other.pool == "own" and other.processes >= cell.processes:
                gain = paired(values, scores[other])
                named = {"all_rows_of": cell.processes, "own_rows_of": other.processes}
                gains.append({**named, "gain": gain.mean, "width": gain.width})
    return means, gains


def draw(means: Sequence[Record], gains: Sequence[Record], path: Path) -> None:
    """Draw the mean average precision by number of processes, and below what the rows of the others add."""
    widths = sorted({row["processes"] for row in means})
    with panels_of(2, 5.2, sharex=True, height_ratios=(1.6, 1)) as (figure, panels):
        upper, lower = panels[:, 0]
        for pool, label, colour, above in (("all", "rows of all", BLUE, 9), ("own", "own rows", ORANGE, -9)):
            rows = [row for row in means if row["pool"] == pool or row["processes"] == 1]
            y = [row["map"] for row in rows]
            upper.plot(range(len(widths)), y, "o-", color=colour, lw=1.8, markersize=5)
            upper.annotate(
                label, (len(widths) - 1, y[-1]), (9, above), textcoords="offset points", va="center", color=colour
            )
        upper.set(ylim=(0, None), title="Mean average precision, files not trained on")
        same = [row for row in gains if row["all_rows_of"] == row["own_rows_of"]]
        x, y = [widths.index(row["own_rows_of"]) for row in same], [row["gain"] for row in same]
        lower.axhline(0, color=LINE, lw=1)
        lower.errorbar(x, y, yerr=[row["width"] for row in same], fmt="o", color=BLUE, capsize=4, lw=1.8, markersize=5)
        lower.set(xlabel="processes, 16 rows each", title="Difference, paired over seeds, 95 % interval")
        lower.set_xticks(range(len(widths)), [f"{processes}" for processes in widths])
        lower.set(xlim=(-0.2, len(widths) - 0.2))
        save(figure, path)


def main() -> None:
    """Measure, print, write, draw."""
    script = Run(__doc__, "pooling")
    script.parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    options = script.start()
    torch.set_num_threads(1)
    quick = options.quick
    found = read(150 if quick else MOST_FILES)
    functions = Functions.of([one.body for one in found], [one.path for one in found])
    files = int(functions.file[-1]) + 1
    test_files = files // 3 if quick else TEST_FILES
    seeds, widths, steps = (2, (1, 2), 5) if quick else (options.seeds, WIDTHS, STEPS)
    print(f"{len(functions.file):,} functions of {files:,} files, {test_files} of them to test on", flush=True)
    real = agreement(functions, 2 if quick else REAL_STEPS, test_files)
    print_records("Real processes: relative difference of the way of the parameters from the simulation", real)
    cells = [Cell(processes, pool) for processes in widths for pool in (("all",) if processes == 1 else ("own", "all"))]

    def run(seed: int, cell: Cell, tuned: Tuned) -> Record:
        start, draws = time.perf_counter(), Draws(functions, seed, test_files)
        loss_fn = RetrievalSmoothAPLoss(temperature=TEMPERATURES[tuned.temperature])
        score, recall = evaluate(train(functions, draws, seed, cell, steps, tuned.rate, loss_fn), functions, draws.test)
        seconds = time.perf_counter() - start
        print(f"{seconds:.0f} s: seed {seed}, {cell}, {tuned}: mAP {score:.3f}, recall@1 {recall:.3f}", flush=True)
        return {"seed": seed, **cell._asdict(), **tuned._asdict(), "map": score, "recall": recall}

    choices = [Tuned(*choice) for choice in itertools.product(RATES, TEMPERATURES)]
    searched = [run(SEARCH_SEED, cell, tuned) for cell in cells for tuned in choices]
    chosen = {}
    for cell in cells:
        best = max((one for one in searched if one.items() >= cell._asdict().items()), key=lambda one: one["map"])
        chosen[cell] = Tuned(best["rate"], best["temperature"])
    runs = [run(seed, cell, chosen[cell]) for seed in range(seeds) for cell in cells]
    means, gains = summary(runs)
    print_records("Mean average precision of unseen files", means)
    print_records("Gain of pooling, paired over seeds", gains)
    about = {"functions": len(functions.file), "files": files, "test_files": test_files, "steps": steps}
    script.write(about=about, means=means, gains=gains, real=real, searched=searched, runs=runs)
    if (folder := script.folder(PICTURES)) is not None:
        draw(means, gains, folder / "pooling.svg")


if __name__ == "__main__":
    main()
