"""The losses, the inputs and the settings that the tests of the losses run over; each is named once, here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import reference
import torch
from reference import Rows
from torch import Tensor

from fullrank import losses

IGNORED = -100

# Names of fullrank.losses.__all__ that are no loss of rows or elements, and losses with a file of tests of their own.
NOT_LOSSES = {"DistributedLoss", "FocalLoss", "RankingLoss", "PerClass", "Pool", "sigmoid_sums"}
NOT_LOSSES |= {"LossWithClasses", "LossWithClassesAndStats", "LossWithStats", "CombinedLoss", "LossWarmupWrapper"}
NOT_LOSSES |= {"BCEWithLogitsLoss", "CrossEntropyLoss", "InfoNCELoss", "NDCGLoss", "SupConLoss", "causal_lm_loss"}
NOT_LOSSES |= {"RetrievalSmoothAPLoss", "retrieval_smooth_ap"}


@dataclass(frozen=True)
class PooledLoss:
    """A loss whose value depends on the ranks of all rows.

    Only differences of scores count, in units of a temperature; the loss is in [0, 1], and needs positives.
    ``settings``: the arguments worth a run of their own.
    """

    module: type[losses.RankingLoss]
    functional: Callable[..., Any]
    reference: Callable[..., reference.Result]
    settings: Mapping[str, Mapping[str, Any]]
    default: Mapping[str, Any]
    needs_negatives: bool = True
    module_only: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FocalCase:
    """A loss that is a sum over elements divided by a count."""

    module: type[torch.nn.Module]
    functional: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    settings: Mapping[str, Mapping[str, Any]]
    inputs: Callable[..., tuple[Tensor, Tensor, Tensor]]


def focal_binary(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets in {0, 1} with some soft ones, and weights, all (5, 3, 2)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(5, 3, 2, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (5, 3, 2), generator=generator).double()
    targets[0, 0] = torch.tensor([0.3, 0.9])
    return logits, targets, torch.rand(5, 3, 2, generator=generator, dtype=torch.float64)


def focal_classes(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (6, 4, 2), targets and weights (6, 2), with background and ignored elements."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(6, 4, 2, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 4, (6, 2), generator=generator)
    targets[1, 0], targets[2, 1], targets[4, 0] = IGNORED, IGNORED, 0
    return logits, targets, torch.rand(6, 2, generator=generator, dtype=torch.float64)


POOLED: dict[str, PooledLoss] = {
    "smooth_ap": PooledLoss(
        losses.SmoothAPLoss,
        losses.smooth_ap,
        reference.smooth_ap,
        settings={"narrow": {"temperature": 0.05}, "wide": {"temperature": 1.0}, "automatic": {}},
        default={"temperature": 0.3},
    ),
    "recall_at_quantile": PooledLoss(
        losses.RecallAtQuantileLoss,
        losses.recall_at_quantile,
        reference.recall_at_quantile,
        settings={
            rule: {"quantile": q, "temperature": 0.3, "quantile_interpolation": rule}
            for rule, q in [("linear", 0.13), ("lower", 0.13), ("higher", 0.1), ("nearest", 0.37), ("midpoint", 0.45)]
        }
        | {"automatic": {"quantile": 0.3}},
        default={"quantile": 0.3, "temperature": 0.3},
        needs_negatives=False,
    ),
    "pauc_at_budget": PooledLoss(
        losses.PAUCAtBudgetLoss,
        losses.pauc_at_budget,
        reference.pauc_at_budget,
        settings={
            "defaults": {},
            "trapezoid": {"beta": 0.3, "surrogate": "trapezoid"},
            "knots": {"alpha": 0.1, "beta": 0.7, "surrogate": "trapezoid", "n_knots": 5, "temperature": 0.3},
            "band": {
                "alpha": 0.05,
                "beta": 0.8,
                "surrogate": "trapezoid",
                "tau_scale": "band",
                "quantile_interpolation": "linear",
            },
            "population": {"beta": 0.6, "surrogate": "trapezoid", "budget_basis": "population", "n_knots": 3},
            "pairwise": {"beta": 0.5, "surrogate": "pairwise"},
            "pairwise_band": {"alpha": 0.1, "beta": 0.9, "surrogate": "pairwise", "tau_scale": "band"},
            "pairwise_population": {"beta": 0.8, "surrogate": "pairwise", "budget_basis": "population"},
            "live": {"beta": 0.5, "surrogate": "trapezoid", "pos_numerator": "live"},
            "live_pairwise": {"beta": 0.5, "pos_numerator": "live", "surrogate": "pairwise"},
            "dro_half": {"beta": 0.5},
            "dro_iqr": {"dro_lambda": 1.0, "tau_scale": "iqr"},
            "dro_population": {"beta": 0.2, "tau_scale": "iqr", "budget_basis": "population"},
            "dro_pairs": {"surrogate": "dro", "dro_lambda": 0.3, "beta": 0.4},
            "dro_pairs_band": {"surrogate": "dro", "dro_lambda": 0.3, "beta": 0.4, "tau_scale": "band"},
            "live_dro": {"surrogate": "dro", "dro_lambda": 2.5, "pos_numerator": "live"},
            "live_dro_iqr": {"dro_lambda": 2.5, "pos_numerator": "live", "tau_scale": "iqr"},
        },
        default={"beta": 0.5, "surrogate": "pairwise", "temperature": 0.3},
        module_only=frozenset({"pos_numerator"}),
    ),
}

# Forms of the pooled losses with code of their own: the loss and its settings. Properties run over them.
VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "smooth_ap": ("smooth_ap", {"temperature": 0.3}),
    "smooth_ap_automatic": ("smooth_ap", {}),
    "recall": ("recall_at_quantile", {"quantile": 0.3, "temperature": 0.3}),
    "recall_linear": ("recall_at_quantile", {"quantile": 0.3, "temperature": 0.3, "quantile_interpolation": "linear"}),
    "pauc_trapezoid": ("pauc_at_budget", {"beta": 0.5, "surrogate": "trapezoid", "temperature": 0.3}),
    "pauc_pairwise": ("pauc_at_budget", {"beta": 0.5, "surrogate": "pairwise", "temperature": 0.3}),
    "pauc_dro": ("pauc_at_budget", {"beta": 0.2}),
    "pauc_dro_tilted": ("pauc_at_budget", {"surrogate": "dro", "dro_lambda": 0.3, "tau_scale": "iqr"}),
    "pauc_dro_band": ("pauc_at_budget", {"surrogate": "dro", "dro_lambda": 4.0, "tau_scale": "band", "beta": 0.7}),
}

FOCAL: dict[str, FocalCase] = {
    "sigmoid_focal": FocalCase(
        losses.SigmoidFocalLoss,
        losses.sigmoid_focal,
        reference.sigmoid_focal,
        settings={"defaults": {}, "cross_entropy": {"alpha": -1, "gamma": 0}, "root": {"gamma": 0.5, "alpha": 0.9}},
        inputs=focal_binary,
    ),
    "softmax_focal": FocalCase(
        losses.SoftmaxFocalLoss,
        losses.softmax_focal,
        reference.softmax_focal,
        settings={
            "defaults": {},
            "cross_entropy": {"gamma": 0.0},
            "weights": {"alpha": [0.1, 2.0, 0.0, 0.7], "gamma": 1.5},
            "smoothing": {"label_smoothing": 0.2},
            "background": {"background_class": 2},
        },
        inputs=focal_classes,
    ),
}


@dataclass(frozen=True)
class InputCase:
    """Named inputs: ``rows(seed)`` is a step's batch; weights and iid masks on request."""

    num_classes: int
    num_rows: int = 24
    multi_hot: bool = False
    positive_share: float = 0.4
    grid: float = 0.0  # scores are rounded to multiples of it

    def rows(self, seed: int = 0, *, num_rows: int | None = None, weighted: bool = False, masked: bool = False) -> Rows:
        """Float64 rows, about a tenth of them ignored; positives of class c score a little higher in column c."""
        generator = torch.Generator().manual_seed(seed)
        count, columns = self.num_rows if num_rows is None else num_rows, self.num_classes
        chance = torch.rand(count, columns, generator=generator)
        if columns == 1 or self.multi_hot:
            codes = (chance < self.positive_share).long()
            if count:
                codes[0] = 1
        else:
            codes = torch.nn.functional.one_hot(chance.argmax(dim=1), columns)
        logits = torch.randn(count, columns, generator=generator, dtype=torch.float64) + 0.8 * codes
        if self.grid:
            logits = (logits / self.grid).round() * self.grid
        ignored = torch.rand(codes.shape, generator=generator) < 0.1
        if self.multi_hot:
            targets = codes.masked_fill(ignored, IGNORED)
        else:
            targets = codes[:, 0] if columns == 1 else codes.argmax(dim=1)
            targets = targets.masked_fill(ignored[:, 0], IGNORED)
        iid = torch.rand(count, generator=generator) < 0.8 if masked else None
        weight = 2 * torch.rand(count, generator=generator, dtype=torch.float64) if weighted else None
        return Rows(logits, targets, iid, weight)

    def module(self, loss: PooledLoss, queue_size: int = 0, **settings: Any) -> losses.RankingLoss:
        """Return the module of ``loss`` for these inputs."""
        return loss.module(self.num_classes, queue_size=queue_size, multi_hot=self.multi_hot, **settings)


INPUTS: dict[str, InputCase] = {
    "binary": InputCase(num_classes=1),
    "classes": InputCase(num_classes=3, num_rows=23),
    "multi_hot": InputCase(num_classes=3, num_rows=21, multi_hot=True),
    "imbalanced": InputCase(num_classes=1, num_rows=61, positive_share=0.04),
    "tied": InputCase(num_classes=2, num_rows=26, grid=0.5),
}

POOLED_SETTINGS = [(name, setting) for name, loss in POOLED.items() for setting in loss.settings]
FOCAL_SETTINGS = [(name, setting) for name, loss in FOCAL.items() for setting in loss.settings]


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers that float32 holds, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def draw(count: int, columns: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return logits (count, columns) that require a gradient, and targets; binary with one column."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, columns, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return logits, torch.randint(0, max(2, columns), (count,), generator=generator)


def step(loss: Callable[..., Tensor], logits: Tensor, targets: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient."""
    leaf = logits.detach().clone().requires_grad_()
    value = loss(leaf, targets, **given)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def leaf(rows: Rows) -> Rows:
    """Return the rows with logits that record a gradient."""
    return rows._replace(logits=rows.logits.detach().clone().requires_grad_())


def gradient(loss: Tensor, logits: Tensor, seed: int = 0) -> Tensor:
    """Return the gradient of a fixed random combination of the finite entries of ``loss``."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(loss.shape, generator=generator, dtype=torch.float64).to(loss)
    return torch.autograd.grad((torch.where(loss.isnan(), 0, loss) * factors).sum(), logits, retain_graph=True)[0]


def call(loss: Callable[..., Any], rows: Rows, **options: Any) -> Any:
    """Call a module or a functional form on ``rows``; AP and recall take no iid mask in their functional form."""
    given = dict(options)
    if rows.iid_mask is not None:
        given["iid_mask"] = rows.iid_mask
    return loss(rows.logits, rows.targets, sample_weight=rows.sample_weight, **given)


CLASSES = torch.arange(60) % 3


def functions() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return every loss as a pure function of scores (60, 3), on any device; no value of a target is looked at."""

    def variant(name: str) -> Callable[[Tensor], Tensor]:
        loss, settings = VARIANTS[name]
        return lambda x: POOLED[loss].functional(x, CLASSES.to(x.device), validate_args=False, **settings)

    return {name: variant(name) for name in VARIANTS} | {
        "sigmoid_sums": lambda x: losses.sigmoid_sums(x[:, 0], x[:, 1], x[:, 1:], 0.5).square().mean(),
        "retrieval": lambda x: losses.retrieval_smooth_ap(x, CLASSES.to(x.device)),
        "retrieval_none": lambda x: (
            losses.retrieval_smooth_ap(x, CLASSES.to(x.device), reduction="none").nan_to_num().square().sum()
        ),
        "softmax_focal": lambda x: losses.softmax_focal(x, CLASSES.to(x.device), validate_args=False),
        "sigmoid_focal": lambda x: losses.sigmoid_focal(
            x, torch.nn.functional.one_hot(CLASSES).to(x.device), validate_args=False
        ),
        "causal_lm": lambda x: losses.causal_lm_loss(x[None], CLASSES.to(x.device)[None], validate_args=False),
    }


FUNCTIONS = functions()
