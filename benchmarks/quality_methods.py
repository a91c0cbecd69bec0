"""The losses of the quality benchmark and the ranges in which random search tunes them.

Every method has a learning rate, and the n-th trial uses the same rate for every method. The rest of a trial is drawn
from the method's own ranges. The ranking losses come in four forms. "queue" has a memory queue; the search chooses its
size and which rows it keeps. "warm-up" begins with cross-entropy, of which a share may stay to the end
(``final_main_weight``), and lowers the temperature from four times its final value. Without a warm-up the ranking loss
is used alone from the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullrank import (
    LossWarmupWrapper,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
)

Config = dict[str, Any]
POINTWISE = ("cross-entropy", "weighted CE", "focal", "hard-negative CE")
RANKING = ("SmoothAP", "RecallAtQuantile", "PAUCAtBudget")
FORMS = ("", " + queue", " + warm-up", " + queue + warm-up")
METHODS = (*POINTWISE, *(loss + form for loss in RANKING for form in FORMS))
BASELINE = "cross-entropy"
TEMP_START = 4.0  # times the temperature at the end
CAPACITIES = (4_096, 16_384, 65_536)


def draw(method: str, trial: int) -> Config:
    """Return the configuration of one trial of the random search of ``method``."""
    shared = np.random.default_rng([7, trial])
    own = np.random.default_rng([7, trial, METHODS.index(method)])
    config: Config = {"lr": _log_uniform(shared, 2e-3, 5e-2)}
    if method == "weighted CE":
        config["positive_weight"] = _log_uniform(own, 1, 300)
    elif method == "focal":
        config |= {"gamma": float(own.uniform(0.5, 4)), "alpha": float(own.uniform(0.25, 0.95))}
    elif method == "hard-negative CE":
        config["share"] = _log_uniform(own, 0.003, 0.3)
    elif method not in POINTWISE:
        config |= _draw_ranking(method, own)
    return config


def _draw_ranking(method: str, rng: np.random.Generator) -> Config:
    config: Config = {"temperature": _log_uniform(rng, 0.03, 3)}
    if method.startswith("PAUC"):  # a multiple of the spread of the negatives
        config = {"temperature": _log_uniform(rng, 0.03, 0.5), "surrogate": _one_of(rng, "pairwise", "trapezoid")}
    if "queue" in method:
        config |= {"queue_size": _one_of(rng, *CAPACITIES), "queue_keep": _one_of(rng, "all", "negatives")}
    if "warm-up" in method:
        config |= {
            "warmup_share": _one_of(rng, 0.1, 0.25, 0.5),
            "final_main_weight": _one_of(rng, 0.25, 0.5, 0.75, 1.0),
        }
    return config


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.4g}")


def _one_of(rng: np.random.Generator, *values: Any) -> Any:
    return values[rng.integers(len(values))]


class Pointwise(nn.Module):
    """Calls a loss of one logit and one float target per row."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(logits[:, 0], targets.to(logits))


def hard_negative_loss(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return cross-entropy averaged over the positives and the top ``share`` of the negatives of the batch."""

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        negatives = each[targets == 0]
        hard = negatives.topk(max(1, math.ceil(share * negatives.numel()))).values
        return torch.cat([each[targets == 1], hard]).mean()

    return loss


def build(method: str, config: Config, budget: float, steps: int) -> nn.Module:
    """Return the loss, to be called with logits (N, 1) and targets (N,).

    Args:
        method: one of ``METHODS``.
        config: what ``draw`` returned.
        budget: share of rows, or of negatives, at the operating point.
        steps: optimizer steps of the run.
    """
    if method == BASELINE:
        return Pointwise(F.binary_cross_entropy_with_logits)
    if method == "weighted CE":
        return Pointwise(nn.BCEWithLogitsLoss(pos_weight=torch.tensor(config["positive_weight"])))
    if method == "focal":
        return Pointwise(SigmoidFocalLoss(alpha=config["alpha"], gamma=config["gamma"]))
    if method == "hard-negative CE":
        return Pointwise(hard_negative_loss(config["share"]))
    ranking = _build_ranking(method.partition(" ")[0], config, budget)
    if "warmup_share" not in config:
        return ranking
    warmup_steps = round(config["warmup_share"] * steps)
    return LossWarmupWrapper(
        Pointwise(F.binary_cross_entropy_with_logits),
        ranking,
        temp_start=TEMP_START * config["temperature"],
        temp_end=config["temperature"],
        temp_decay_steps=max(1, steps - warmup_steps),
        warmup_steps=warmup_steps,
        blend_steps=steps // 10,
        final_main_weight=config["final_main_weight"],
    )


def _build_ranking(name: str, config: Config, budget: float) -> nn.Module:
    # Without checks: the search tries what the losses warn about.
    shared: dict[str, Any] = {"queue_size": 0, "validate_args": False} | {
        key: config[key] for key in ("temperature", "queue_size", "queue_keep") if key in config
    }
    if name == "SmoothAP":
        return SmoothAPLoss(1, **shared)
    if name == "RecallAtQuantile":
        return RecallAtQuantileLoss(1, quantile=budget, threshold_gradient=False, **shared)
    surrogate = config["surrogate"]
    return PAUCAtBudgetLoss(1, beta=budget, surrogate=surrogate, threshold_gradient=False, **shared)
