"""Graded relevance: NDCGLoss against a regression of the grades and RankNet, by NDCG@10, on Python's source.

Usage: python benchmarks/graded.py [--quick] [--seeds 5] [--cache FILE] [--out FOLDER]

The first line of a function's docstring ranks the bodies of functions: its own has relevance 3, others of its file 2,
of its folder 1, all others 0. Data and encoder are those of code_search.py. A step has 64 functions, of 4 folders, each
of which ranks all 64; 400 steps of Adam, each loss at its best of four rates by a seed that chooses. ``regression`` is
the squared difference of the grade and a learned line of the cosine, ``RankNet`` the logistic loss of all pairs of
different grade of a query with a learned factor on the cosine, ``NDCG`` is ``NDCGLoss()`` of the cosines.

NDCG@10 is that of scikit-learn, of 2,000 functions of files that were not trained on, which rank the bodies of all of
them. A seed draws the files, the model and the batches. Intervals are 95 %, Student's t over seeds; differences from
NDCG are paired. The run takes a few minutes and writes graded.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from code_search import TEST_PAIRS, Pairs, Search
from intervals import Interval, paired
from pooling import MOST_FILES, STEPS, read
from real_runs import Cache
from report import Record, Run, print_records
from sklearn.metrics import ndcg_score
from torch import Tensor, nn

from fullrank import NDCGLoss

FOLDERS, ROWS = 4, 16  # of a step, and of a folder
RATES, SEARCH_SEED = (3e-3, 1e-2, 3e-2, 1e-1), 100


class Regression(nn.Module):
    """The squared difference of the grade and a line of the score."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, scores: Tensor, grades: Tensor) -> Tensor:
        """Return the mean over all pairs of query and row."""
        return (self.line[0] * scores + self.line[1] - grades).square().mean()


class RankNet(nn.Module):
    """The logistic loss of pairs of rows of one query, (Q, L), with different grades."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, scores: Tensor, grades: Tensor) -> Tensor:
        """Return the mean over pairs."""
        gaps = self.scale * (scores[:, None, :] - scores[:, :, None])  # [Q, L, L]: of the second from the first
        return F.softplus(gaps[grades[:, :, None] > grades[:, None, :]]).mean()


class Graded(NDCGLoss):
    """NDCGLoss of the scores of queries (Q, L)."""

    def forward(self, scores: Tensor, grades: Tensor) -> Tensor:  # type: ignore[override]
        """Return the mean over queries."""
        queries = torch.arange(len(scores)).repeat_interleave(scores.shape[1])
        return super().forward(scores.flatten(), grades.flatten(), queries)


LOSSES: dict[str, Callable[[], nn.Module]] = {"NDCG": Graded, "regression": Regression, "RankNet": RankNet}


def grades_of(rows: Tensor, file: Tensor, folder: Tensor) -> Tensor:
    """Return the relevance (rows, rows) of the bodies for the summaries."""
    same = [one[rows][:, None] == one[rows] for one in (folder, file)]
    return same[0].float() + same[1] + torch.eye(len(rows))


def train(pairs: Pairs, seed: int, loss: str, rate: float, steps: int, test_pairs: int) -> float:
    """Return the NDCG@10 of the encoder that a loss trains."""
    generator, file, folder = torch.Generator().manual_seed(3_000 + seed), pairs.bodies.file, pairs.folder
    own, test = pairs.split(generator, test_pairs)
    of_folder = [some for one in folder[own].unique() if len(some := own[folder[own] == one]) >= 2]
    model, loss_fn = Search(seed), LOSSES[loss]()
    optimizer = torch.optim.Adam([model.words.weight, *loss_fn.parameters()], lr=rate, fused=True)
    for _ in range(steps):
        chosen = [of_folder[int(one)] for one in torch.randperm(len(of_folder), generator=generator)[:FOLDERS]]
        rows = torch.cat([some[torch.randperm(len(some), generator=generator)[:ROWS]] for some in chosen])
        summary, body = F.normalize(model(pairs, rows), dim=2).unbind(1)
        optimizer.zero_grad()
        loss_fn(summary @ body.T, grades_of(rows, file, folder)).backward()
        optimizer.step()
    with torch.no_grad():
        summary, body = F.normalize(model(pairs, test), dim=2).unbind(1)
    return float(ndcg_score(grades_of(test, file, folder).numpy(), (summary @ body.T).numpy(), k=10))


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "graded")
    script.parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    cache, options = Cache.start(script), script.options
    seeds, steps, test_pairs = (2, 2, 100) if options.quick else (options.seeds, STEPS, TEST_PAIRS)
    pairs = Pairs.of(read(150 if options.quick else MOST_FILES))

    def run(seed: int, loss: str, rate: float) -> float:
        make = partial(train, pairs, seed, loss, rate, steps, test_pairs)
        found: float = cache.get([loss, seed, rate, steps], make)
        print(f"seed {seed}, {loss}, rate {rate}: {found:.4f}", flush=True)
        return found

    searched = {loss: {rate: run(SEARCH_SEED, loss, rate) for rate in RATES} for loss in LOSSES}
    chosen = {loss: max(found, key=found.__getitem__) for loss, found in searched.items()}
    runs = {loss: [run(seed, loss, rate) for seed in range(seeds)] for loss, rate in chosen.items()}
    table: list[Record] = []
    for loss, found in runs.items():
        (mean, width), (gain, pm) = Interval.of(found), paired(found, runs["NDCG"])
        table.append(
            {"loss": loss, "rate": chosen[loss], "NDCG@10": mean, "width": width, "minus NDCG": gain, "pm": pm}
        )
    print_records("NDCG@10 of files that were not trained on", table)
    script.write(folders=int(pairs.folder.max()) + 1, steps=steps, table=table, searched=searched, runs=runs)


if __name__ == "__main__":
    main()
