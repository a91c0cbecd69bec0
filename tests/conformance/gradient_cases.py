"""Every loss in every form, and a training that shows whether its gradients over ranks are those of one process.

``train`` takes a few optimizer steps of the model. The same function computes both sides: spread over the ranks of the
pool under a wrapper, and in one process on the whole batch. It returns the gradient of every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from batches import Rows, make_rows, part_of, split
from subjects import Model, error, gradient, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fullrank
from fullrank.kernels.costs import TABLE

NUM_STEPS = 4
COMBINED = ("smooth_ap", "cross_entropy")
CONTRASTIVE = ("info_nce", "info_nce_one_way", "sup_con")
ELEMENTS = ("sigmoid_focal", "binary_cross_entropy")  # of which each has a target


class Case(NamedTuple):
    """One configuration of the promise."""

    loss: str
    dtype: str = "float64"
    weighted: bool = False
    num_classes: int = 1
    queue_size: int = 64
    multi_hot: bool = False
    queue_keep: str = "all"
    max_pool_size: int | None = None
    wrapper: str = "ddp"
    loss_inside: bool = False  # the loss is part of the wrapped module
    gradient_reduction: str | int = "mean"
    reduction: str = "mean"
    temperature: float | None = 0.2  # of the losses that have an automatic one, and of the contrastive ones
    threshold_gradient: bool = True  # of recall and partial AUC
    pool: str = "gathered"
    by_bins: bool = False  # sums over pairs, where one process adds up pair by pair


def make_loss(case: Case, local: bool, group: object = None) -> nn.Module:
    """Return the loss of ``case``; ``local`` keeps it to this process."""
    gather = False if local else None
    options = {"group": group, "gradient_reduction": case.gradient_reduction}
    if case.loss == "sigmoid_focal":
        return fullrank.SigmoidFocalLoss(reduction=case.reduction, gather_distributed=gather, **options)
    if case.loss == "softmax_focal":
        alpha = [0.2, 1.0, 3.0] if case.reduction == "mean_weighted" else None
        return fullrank.SoftmaxFocalLoss(alpha, reduction=case.reduction, gather_distributed=gather, **options)
    if case.loss == "binary_cross_entropy":
        factors = {"weight": torch.tensor(0.7), "pos_weight": torch.tensor(3.0)} if case.weighted else {}
        return fullrank.BCEWithLogitsLoss(reduction=case.reduction, gather_distributed=gather, **factors, **options)
    if case.loss == "cross_entropy":
        weight = torch.tensor([0.2, 1.0, 3.0]) if case.weighted else None
        return fullrank.CrossEntropyLoss(
            weight, reduction=case.reduction, label_smoothing=0.1, gather_distributed=gather, **options
        )
    if case.loss == "ndcg":
        return fullrank.NDCGLoss(case.temperature, reduction=case.reduction, gather_distributed=gather, **options)
    if case.loss in CONTRASTIVE:
        queue = {"queue_size": case.queue_size, "gather_distributed": gather, **options}
        if case.loss == "sup_con":
            return fullrank.SupConLoss(case.temperature, **queue)
        is_clip = case.loss == "info_nce"
        loss = Pairs(fullrank.InfoNCELoss(case.temperature, symmetric=is_clip, learn_temperature=is_clip, **queue))
        return loss.to(getattr(torch, case.dtype))
    if case.loss == "combined":
        parts = {name: make_loss(case._replace(loss=name, num_classes=3), local, group) for name in COMBINED}
        return fullrank.CombinedLoss(parts, {"smooth_ap": 0.5, "cross_entropy": 2.0})
    pooled: dict[str, Any] = dict(  # noqa: C408
        queue_size=case.queue_size,
        gather_distributed=gather,
        max_pool_size=case.max_pool_size,
        reduction=case.reduction,
    )
    pooled |= options | {"queue_keep": case.queue_keep, "multi_hot": case.multi_hot}
    if case.pool == "sharded" and not local:
        pooled["pool"] = case.pool
    if case.loss == "smooth_ap":
        return fullrank.SmoothAPLoss(case.num_classes, temperature=case.temperature, **pooled)
    if case.loss == "hard_negative":
        return fullrank.HardNegativeCrossEntropyLoss(case.num_classes, share=0.2, **pooled)
    surrogate = case.loss.removeprefix("pauc_")
    if surrogate.startswith("dro"):  # "dro", "dro0.3" with a lambda, "dro0.3_iqr" with a scale too
        tilt, _, scale = surrogate.removeprefix("dro").partition("_")
        pooled |= {"dro_lambda": float(tilt) if tilt else None, "tau_scale": scale or None}
        return fullrank.PAUCAtBudgetLoss(case.num_classes, beta=0.1, surrogate="dro", **pooled)
    if surrogate != "pairwise":
        pooled["threshold_gradient"] = case.threshold_gradient
    if case.loss == "recall":
        return fullrank.RecallAtQuantileLoss(case.num_classes, quantile=0.2, temperature=case.temperature, **pooled)
    pooled["n_knots"] = 3 if surrogate == "trapezoid" else 2
    return fullrank.PAUCAtBudgetLoss(
        case.num_classes, alpha=0.05, beta=0.5, surrogate=surrogate, temperature=0.3, **pooled
    )


class Pairs(nn.Module):
    """A loss of queries and keys, which are the halves of the columns of a model's output."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, rows: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        return self.loss(*rows.chunk(2, dim=1))


def make_step(case: Case, step: int) -> Rows:
    """Return the batch of all ranks; the same in every process, some rows ignored."""
    kind = "float" if case.loss in ELEMENTS else "multi_hot" if case.multi_hot else "index"
    options: dict[str, Any] = {"num_classes": num_outputs(case), "kind": kind, "weighted": case.weighted}
    return make_rows(100 + step, 37 + 3 * step, dtype=case.dtype, **options)


def num_outputs(case: Case) -> int:
    """Return the number of logits per row."""
    if case.loss in CONTRASTIVE:
        return 8
    return 3 if case.loss in ("softmax_focal", "cross_entropy", "combined") else case.num_classes


class Trace(NamedTuple):
    """What a training leaves: per step, the loss and the gradient as one vector, and the parameters it started from."""

    gradients: list[Tensor]
    parameters: list[dict[str, Tensor]]


def train(case: Case, rank: int, world_size: int, follow: Trace | None = None) -> Trace:
    """Train over ``world_size`` ranks under the wrapper, or in one process if it is 1.

    With ``follow``, under DDP, every step starts from the parameters of that trace, so that one step's rounding is not
    what the next step's gradient is judged by.
    """
    local = world_size == 1
    loss = make_loss(case, local)
    model = Model(case.dtype, num_outputs(case), loss=loss if case.loss_inside else None)
    wrapped = model if local else wrap(model, case.wrapper)
    outside = [] if case.loss_inside else [*loss.parameters()]  # a learned temperature
    parts = nn.ModuleList([model] if case.loss_inside else [model, loss])
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.5)
    trace = Trace([], [])
    for index in range(NUM_STEPS):
        if follow is not None:
            parts.load_state_dict(follow.parameters[index], strict=False)
        trace.parameters.append({name: value.detach().clone() for name, value in parts.named_parameters()})
        step = make_step(case, index)
        if not local:
            step = part_of(step, split(step.features.shape[0], world_size, index), rank)
        optimizer.zero_grad()
        options = {} if step.weight is None else {"sample_weight": step.weight}
        if case.loss_inside:
            value = wrapped(step.features, step.targets, **options)
        else:
            value = loss(wrapped(step.features), step.targets, **options)
        value.backward()
        for parameter in outside if case.gradient_reduction == "sum" and not local else []:
            dist.all_reduce(parameter.grad)
        trace.gradients.append(torch.cat([value.detach().reshape(1), gradient(parts)]).double())
        optimizer.step()
    return trace


def worst_error(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """Return the largest gradient error and the largest error of the loss value, over the steps.

    In float64 the two trainings run apart. In float32, and of sums, whose steps are larger by the number of rows, the
    spread one follows the parameters of the other: the limit is about a gradient, and a step of 0.5 turns the rounding
    of one into other scores for the next.
    """
    whole = train(case, rank, 1)
    costs = TABLE["cpu"]._replace(pair=1e9) if case.by_bins else TABLE["cpu"]
    with mock.patch.dict(TABLE, cpu=costs):
        spread = train(case, rank, world_size, whole if case.dtype == "float32" or case.reduction == "sum" else None)
    pairs = list(zip(spread.gradients, whole.gradients))
    value = max(float(abs(a[0] - b[0]) / max(abs(b[0]), 1e-3)) for a, b in pairs)
    return max(error(a[1:], b[1:]) for a, b in pairs), value


def worst_errors(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float]]:
    """Do so for several cases in one task."""
    return [worst_error(rank, world_size, case) for case in cases]


def post_gather_errors(rank: int, world_size: int, dtype: str, convention: str) -> dict[str, float]:
    """Return relative gradient errors of the encoder and of a scale that is applied after the gather.

    ``convention`` is how the rows are gathered: ``"fullrank"``, ``"detached"`` (all-gather, this rank's slice put back)
    or ``"scaled"`` (the same with the loss multiplied by W).
    """
    case = Case("smooth_ap", dtype=dtype, queue_size=0)
    step = make_step(case, 4)  # of the first ones, some have a gradient of the scale that cancels to float32 noise
    counts = split(step.features.shape[0], world_size, 0)
    whole = _scaled_gradients(case, step, "local", world_size)
    spread = _scaled_gradients(case, part_of(step, counts, rank), convention, world_size)
    return {name: error(spread[name], whole[name]) for name in whole} | {
        "ratio": float((spread["encoder"] @ whole["encoder"]) / whole["encoder"].norm() ** 2),
        "scale_ratio": float(spread["scale"].sum() / whole["scale"].sum()),
    }


class ScaledScorer(nn.Module):
    """An encoder, and a learned scale that acts on the gathered rows."""

    def __init__(self, case: Case, convention: str, world_size: int) -> None:
        super().__init__()
        self.encoder = Model(num_outputs=1)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64) * 1.3)
        self.loss = make_loss(case, local=True)
        self.convention, self.world_size = convention, world_size

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        logits = self.encoder(features)
        if self.convention == "fullrank":
            logits, targets = fullrank.gather_rows(logits, targets)
        elif self.convention != "local":
            logits, targets = _detached_gather(logits), _detached_gather(targets)
        loss = self.loss(logits * self.scale, targets)
        return loss * self.world_size if self.convention == "scaled" else loss


def _detached_gather(tensor: Tensor) -> Tensor:
    """Gather without gradient and put this rank's rows back: what is widely done, and wrong by 1 / W under DDP."""
    counts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(counts, tensor.shape[0])
    padded = tensor.detach().new_zeros(max(counts), *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor.detach()
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    parts = [part[:count] for part, count in zip(parts, counts)]
    parts[dist.get_rank()] = tensor
    return torch.cat(parts)


def _scaled_gradients(case: Case, step: Rows, convention: str, world_size: int) -> dict[str, Tensor]:
    model = ScaledScorer(case, convention, world_size).to(getattr(torch, case.dtype))
    wrapped = model if convention == "local" else DistributedDataParallel(model)
    wrapped(step.features, step.targets).backward()
    assert model.scale.grad is not None
    return {"encoder": gradient(model.encoder).double(), "scale": model.scale.grad.reshape(1).double()}
