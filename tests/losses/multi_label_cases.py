"""Multi-hot rows whose scores are a shuffled grid, the losses at a small temperature, and what the workers run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from loss_cases import IGNORED
from torch import Tensor

from fullrank import losses

NUM_CLASSES = 5
SMALL = 0.01  # a hundredth of the step between scores: sigmoids are 0, 1/2 and 1 to within exp(-100)


class MultiLabel(NamedTuple):
    """A loss; ``options`` bring it to its metric, ``training`` are for learning."""

    module: type[losses.RankingLoss]
    functional: Callable[..., Any]
    options: Mapping[str, Any]
    training: Mapping[str, Any]


_BAND = {"alpha": 0.0, "beta": 0.4}
LOSSES = {
    "smooth_ap": MultiLabel(losses.SmoothAPLoss, losses.smooth_ap, {"temperature": SMALL}, {"temperature": 0.3}),
    "recall": MultiLabel(
        losses.RecallAtQuantileLoss,
        losses.recall_at_quantile,
        {"temperature": SMALL, "quantile": 0.1},
        {"temperature": 0.3, "quantile": 0.3},
    ),
    # The temperature of partial AUC is in units of the spread of the negatives, here some hundred.
    "pauc_pairwise": MultiLabel(
        losses.PAUCAtBudgetLoss,
        losses.pauc_at_budget,
        {"temperature": 1e-5, "surrogate": "pairwise", **_BAND},
        {"temperature": 0.3, "surrogate": "pairwise", **_BAND},
    ),
    "pauc_trapezoid": MultiLabel(
        losses.PAUCAtBudgetLoss,
        losses.pauc_at_budget,
        {"temperature": 1e-5, "n_knots": 101, **_BAND},
        {"temperature": 0.3, "n_knots": 5, **_BAND},
    ),
}


def make_rows(seed: int, ignored: bool) -> tuple[Tensor, Tensor]:
    """Return scores (300, 5), each column a permutation of whole numbers, and multi-hot targets of many shares.

    With ``ignored`` a third of the elements is, most of them with high scores.
    """
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.6])
    targets = (torch.rand(300, NUM_CLASSES, generator=generator) < share).long()
    noise = torch.randn(300, NUM_CLASSES, generator=generator, dtype=torch.float64)
    scores = (noise + 1.2 * targets).argsort(dim=0).argsort(dim=0).double()
    if ignored:
        chance = 2 / 3 * scores / 300
        targets[torch.rand(300, NUM_CLASSES, generator=generator) < chance] = IGNORED
    return scores, targets


def values_over_ranks(rank: int, name: str) -> tuple[float, float]:
    """Return the loss over two ranks with 100 and 200 rows, and that of this rank's rows alone."""
    scores, targets = make_rows(0, ignored=True)
    own = slice(0, 100) if rank == 0 else slice(100, None)
    loss = LOSSES[name]
    values = []
    for gather in (True, False):
        module = loss.module(NUM_CLASSES, multi_hot=True, queue_size=0, gather_distributed=gather, **loss.options)
        values.append(module(scores[own], targets[own]).item())
    return values[0], values[1]
