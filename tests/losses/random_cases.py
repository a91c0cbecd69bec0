"""Random batches, losses and splits for the property-based tests, and what the workers of those tests run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import loss_cases as cases
import reference
import torch
from hypothesis import strategies as st
from loss_cases import IGNORED, POOLED
from reference import Rows
from torch import Tensor

from fullrank import losses


@dataclass(frozen=True)
class Problem:
    """Some steps of training, small enough to send to a worker: the rows are made from the seed on arrival.

    ``sizes``: the rows of each rank, for each step.
    """

    name: str
    setting: str
    sizes: tuple[tuple[int, ...], ...]
    num_classes: int = 1
    multi_hot: bool = False
    dtype: torch.dtype = torch.float64
    queue_size: int = 0
    queue_keep: str = "all"
    max_pool_size: int | None = None
    weighted: bool = False
    masked: bool = False
    grid: float = 0.0
    seed: int = 0

    def rows(self, step: int) -> Rows:
        """Return the rows of all ranks."""
        share = 0.3 if self.seed % 3 else 0.05
        case = cases.InputCase(self.num_classes, 0, self.multi_hot, share, self.grid)
        count = sum(self.sizes[step])
        rows = case.rows(97 * self.seed + step, num_rows=count, weighted=self.weighted, masked=self.masked)
        return rows._replace(logits=rows.logits.to(self.dtype))

    def module(self, **options: Any) -> losses.RankingLoss:
        """Return the loss."""
        loss = POOLED[self.name]
        settings = dict(loss.settings[self.setting])
        kept = {"queue_keep": self.queue_keep, "max_pool_size": self.max_pool_size, "multi_hot": self.multi_hot}
        return loss.module(self.num_classes, queue_size=self.queue_size, **settings, **kept, **options)


def problems(world_size: int) -> st.SearchStrategy[Problem]:
    """Return the strategy of problems for ``world_size`` ranks: uneven, empty, ignored, tied, weighted, queued."""
    sizes = st.lists(st.tuples(*[st.integers(0, 9)] * world_size), min_size=1, max_size=3).map(tuple)
    names = st.sampled_from([(name, setting) for name, loss in POOLED.items() for setting in loss.settings])
    return st.builds(
        lambda named, **others: Problem(*named, **others),
        names,
        sizes=sizes,
        num_classes=st.integers(1, 4),
        multi_hot=st.booleans(),
        dtype=st.sampled_from([torch.float64, torch.float32]),
        queue_size=st.sampled_from([0, 1, 2, 7, 40]),
        queue_keep=st.sampled_from(["all", "negatives"]),
        max_pool_size=st.sampled_from([None, None, 12]),
        weighted=st.booleans(),
        masked=st.booleans(),
        grid=st.sampled_from([0.0, 0.5, 100.0]),
        seed=st.integers(0, 10**6),
    )


def run(problem: Problem, own: list[slice] | None = None) -> tuple[list[float], list[Any], list[Any]]:
    """Return value and gradient of every step, and what the queue holds at the end; ``own``: which rows are given."""
    module = problem.module(gather_distributed=None if own else False)
    values, gradients = [], []
    for step in range(len(problem.sizes)):
        rows = problem.rows(step)
        rows = cases.leaf(rows if own is None else reference.take(rows, torch.arange(len(rows.logits))[own[step]]))
        loss = cases.call(module, rows)
        loss.backward()
        assert rows.logits.grad is not None
        values.append(loss.item())
        gradients.append(rows.logits.grad.double().numpy())
    held = [None if part is None else part.double().numpy() for part in module.queue.rows()]
    return values, gradients, held


def on_rank(rank: int, problem: Problem) -> tuple[list[float], list[Any], list[Any]]:
    """Return what one of several ranks gets."""
    own = [slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for sizes in problem.sizes]
    return run(problem, own)


# Scores that break naive formulas, each alone and next to ordinary ones.
EXTREMES = (0.0, -0.0, 1e30, -1e30, 1e-40, -1e-40, 5e-324, 1.0, 1.0 + 2**-23, 65504.0, 1e37, -1e37)


def extreme_rows(num_classes: int, picks: list[tuple[int, int]], dtype: torch.dtype) -> Rows:
    """Return rows of extreme scores; ``picks`` are (score, target) pairs, an odd class index per row."""
    count = len(picks)
    scores = [[EXTREMES[(pick + 5 * column) % len(EXTREMES)] for column in range(num_classes)] for pick, _ in picks]
    labels = [target % (max(2, num_classes) + 1) for _, target in picks]
    ignored = max(2, num_classes)
    targets = torch.tensor([IGNORED if label == ignored else label for label in labels], dtype=torch.int64)
    return Rows(torch.tensor(scores, dtype=dtype).view(count, num_classes), targets)


def finite(tensor: Tensor) -> bool:
    """Return True when every entry is finite."""
    return bool(tensor.isfinite().all())
