"""The losses of the benchmark on real data: sums of terms, their defaults, and the ranges in which they are tuned.

A method is named by its terms: ``"SmoothAP + weighted CE"`` adds two losses. Weighted cross-entropy weighs each row by
the inverse share of its class and divides by the sum of the weights, as ``torch.nn.CrossEntropyLoss(weight=)`` does.
Everything else has the defaults of its class, except for ``queue_size=0``, the quantile of the recall and the budget of
the partial AUC, which are the share of positives, and what stands in the name.
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
    HardNegativeCrossEntropyLoss,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
)

Config = dict[str, Any]
Loss = Callable[[Tensor, Tensor], Tensor]
BASELINE = "CE"
TREES = "boosted trees"
# The detached forms are controls, with the defaults that these losses had before their thresholds had a gradient.
LONG = (
    BASELINE,
    "weighted CE",
    "hard-negative 0.05",
    "SmoothAP",
    "SmoothAP + CE",
    "SmoothAP + weighted CE",
    "recall",
    "pAUC dro",
)
SHORT = (
    "focal",
    "hard-negative 0.2",
    "SmoothAP 0.01",
    "recall + CE",
    "recall detached",
    "pAUC dro + CE",
    "pAUC trapezoid",
    "pAUC trapezoid detached",
    "pAUC pairwise",
)
METHODS = (*LONG, *SHORT)
TUNED = (
    BASELINE,
    "weighted CE",
    "focal",
    "hard-negative",
    "SmoothAP",
    "recall",
    "pAUC",
    "SmoothAP + CE",
    "SmoothAP + weighted CE",
)
QUEUED = ("SmoothAP", "recall", "pAUC trapezoid", "pAUC pairwise", "pAUC dro")
SEVERAL = (
    BASELINE,
    "weighted CE",
    "focal",
    "hard-negative 0.05",
    "SmoothAP",
    "SmoothAP + CE",
    "SmoothAP + weighted CE",
)
# Milliseconds of a step with 512 rows on one core, for the estimate of the time; the rest of a step takes STEP.
STEP = 0.5
COSTS = {"focal": 0.4, "hard-negative": 0.5, "SmoothAP": 0.5, "recall": 0.7, "pAUC": 1.4}


def cost(method: str) -> float:
    """Return the milliseconds that one step of ``method`` takes, for one logit and 512 rows."""
    return STEP + sum(COSTS.get(term.split()[0], 0.0) for term in method.split(" + "))


def draw(method: str, trial: int) -> Config:
    """Return the configuration of one trial of the random search of ``method``.

    The n-th trial has the same learning rate for every method. All further ranges are the method's own.
    """
    shared = np.random.default_rng([11, trial])
    own = np.random.default_rng([11, trial, TUNED.index(method)])
    config: Config = {"lr": _log_uniform(shared, 1e-3, 2e-2)}
    if "weighted CE" in method:
        config["positive_power"] = float(own.choice([0.25, 0.5, 0.75, 1.0]))
    if method == "focal":
        config |= {"gamma": float(own.uniform(0.5, 4)), "alpha": float(own.uniform(0.25, 0.95))}
    if method == "hard-negative":
        config["share"] = _log_uniform(own, 0.02, 0.5)
    if "SmoothAP" in method or method == "recall":
        config["spread"] = _log_uniform(own, 0.03, 0.5)
    if method == "pAUC":
        config["surrogate"] = str(own.choice(["trapezoid", "pairwise", "dro"]))
        dro, others = {"dro_lambda": 1 / int(own.integers(1, 6))}, {"temperature": _log_uniform(own, 0.03, 0.5)}
        config |= dro if config["surrogate"] == "dro" else others
    if "SmoothAP + " in method:
        config["ce"] = _log_uniform(own, 0.03, 3)
    return config


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.4g}")


class SpreadTemperature(nn.Module):
    """Sets the temperature of a loss to a multiple of the standard deviation of the scores before each call."""

    def __init__(self, loss: nn.Module, multiple: float) -> None:
        super().__init__()
        self.loss, self.multiple = loss, multiple

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.loss.temperature = max(1e-6, self.multiple * float(logits.detach().std()))
        return self.loss(logits, targets)


def build(method: str, share: Tensor, config: Config) -> Loss:
    """Return the loss, to be called with logits (N, C) and targets (N,).

    Args:
        method: terms with " + " between them.
        share: (C,) shares of the classes of the training rows; for C = 1 that of the positives.
        config: what ``draw`` returned, or nothing but ``queue_size``.
    """
    terms = [_term(name, share, config) for name in method.split(" + ")]
    weights = [config.get("ce", 1.0) if name.endswith("CE") else 1.0 for name in method.split(" + ")]
    if len(terms) == 1:
        return terms[0]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return sum(weight * term(logits, targets) for weight, term in zip(weights, terms, strict=True))

    return loss


def _term(name: str, share: Tensor, config: Config) -> Loss:
    kind, _, rest = name.partition(" ")
    num_classes, queue = len(share), {"queue_size": config.get("queue_size", 0)}
    if name == "CE" or kind == "weighted":
        return _cross_entropy(share, config.get("positive_power", 1.0) if kind == "weighted" else 0.0)
    if kind == "focal":
        if num_classes > 1:
            return SoftmaxFocalLoss()
        focal = SigmoidFocalLoss(**{key: config[key] for key in ("gamma", "alpha") if key in config})
        return lambda logits, targets: focal(logits[:, 0], targets.to(logits))
    if kind == "hard-negative":
        return HardNegativeCrossEntropyLoss(num_classes, share=config.get("share") or float(rest), **queue)
    if kind == "SmoothAP":
        loss: nn.Module = SmoothAPLoss(num_classes, **({"temperature": float(rest)} if rest else {}), **queue)
    elif kind == "recall":
        form = {"threshold_gradient": False, "temperature": 0.01} if rest == "detached" else {}
        loss = RecallAtQuantileLoss(1, quantile=float(share), **form, **queue)
    else:
        surrogate, _, detached = rest.partition(" ")
        form = {key: config[key] for key in ("temperature", "dro_lambda") if key in config}
        form |= {"threshold_gradient": False} if detached else {}
        if rest == "dro":
            form = {"dro_lambda": 1.0} | form
        loss = PAUCAtBudgetLoss(1, beta=float(share), surrogate=config.get("surrogate") or surrogate, **form, **queue)
    return SpreadTemperature(loss, config["spread"]) if "spread" in config else loss


def _cross_entropy(share: Tensor, power: float) -> Loss:
    """Return cross-entropy with rows weighed by ``share ** -power``, divided by the sum of the weights."""
    if len(share) > 1:
        return nn.CrossEntropyLoss(weight=share**-power)
    weights = torch.cat([1 - share, share]) ** -power

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        weight = weights[targets]
        scores, labels = logits[:, 0], targets.to(logits)
        return F.binary_cross_entropy_with_logits(scores, labels, weight, reduction="sum") / weight.sum()

    return loss
