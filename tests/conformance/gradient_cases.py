"""Every loss in every form, and a training that shows whether its gradients over ranks are those of one process.

``train`` takes a few optimizer steps of the model. The same function computes both sides: spread over the ranks of the
pool under a wrapper, and in one process on the whole batch. It returns the gradient of every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from batches import Rows, cut, make_rows, part_of, split
from loss_cases import FORMS
from on_ranks import same
from subjects import Model, by_hand, error, gradient, wrap
from torch import Tensor, nn

import fullrank
from fullrank.kernels.costs import TABLE
from fullrank.large import ShardedLoss, smooth_ap, thresholds
from fullrank.losses.embeddings import retrieval

NUM_STEPS = 3
SHARDED = ("smooth_ap", "recall", "pauc_trapezoid")  # whose pool may be sharded


class Case(NamedTuple):
    """One configuration of the promise."""

    loss: str  # a key of FORMS
    dtype: str = "float64"
    weighted: bool = False
    num_classes: int = 1  # of the losses over a pool
    queue_size: int = 64
    multi_hot: bool = False
    wrapper: str = "ddp"
    loss_inside: bool = False  # the loss is part of the wrapped module
    gradient_reduction: str | int = "mean"
    options: Mapping[str, Any] = {}  # other arguments of the constructor than those of the form
    masked: bool = False
    one_query: bool = False  # where there may be several
    by_bins: bool = False  # sums over pairs, where one process adds up pair by pair
    sharded: bool = False  # without a queue
    form: str = ""  # of a sharded pool: how it is computed, where its cost would decide
    layout: str = "uneven"  # of the rows over the ranks
    has_gap: bool = False  # no rank has a row in the second step
    is_split: bool = False  # each process has queries of its own, however few there are
    sync: str = ""  # of pooled_backward over micro-batches, which are one batch without it
    tied: bool = False  # many rows are alike
    seed: int = 100  # of the rows


def make_loss(case: Case, local: bool, group: object = None) -> nn.Module:
    """Return the loss of ``case``; ``local`` keeps it to this process."""
    form = FORMS[case.loss]
    options: dict[str, Any] = {"group": group, "gradient_reduction": case.gradient_reduction, **case.options}
    options |= {"gather_distributed": False} if local else {}
    options |= {"num_classes": num_outputs(case), "multi_hot": case.multi_hot}
    options["queue_size"] = 0 if case.sharded else case.queue_size
    if case.sharded and not local:
        options["wrap"] = ShardedLoss
    assert form.loss.module is not None
    loss = form.loss.module(**form.given(**options))
    if "wrap" in options and form.loss.parts is None:
        loss = ShardedLoss(loss)
    return loss.to(getattr(torch, case.dtype))


def forced(form: str) -> Any:
    """Let a loss over a sharded pool take ``form`` wherever it can; "sums" is that of the losses at thresholds."""
    if form in ("", "sums"):
        return mock.patch.dict(thresholds.COSTS, {"sums": 1e-30}) if form else nullcontext()
    # Bins that are too many cost infinitely much, and then the positives travel.
    costs = {name: 1.0 if name == form else 1e30 for name in smooth_ap.COSTS}
    return mock.patch.dict(smooth_ap.COSTS, costs | {"gather": costs["gather"] ** 2})


class OfRows(nn.Module):
    """A loss that is called with outputs (N, C) and the targets of rows, whatever its arguments are."""

    def __init__(self, case: Case, loss: nn.Module) -> None:
        super().__init__()
        self.form, self.loss = FORMS[case.loss], loss

    def forward(self, rows: Tensor, targets: Tensor, queries: Tensor | None = None, **given: Any) -> Tensor:
        arguments = self.form.arguments(rows, targets, queries)
        if "indexes" in arguments and queries is None:
            del arguments["indexes"]
        return self.loss(**arguments, **given)


def make_step(case: Case, step: int) -> Rows:
    """Return the batch of all ranks; the same in every process, some rows ignored."""
    num_classes = 5 if FORMS[case.loss].loss.kind == "grades" else num_outputs(case)
    options: dict[str, Any] = {"num_classes": num_classes, "multi_hot": case.multi_hot, "weighted": case.weighted}
    count = 0 if case.has_gap and step == 1 else 37 + 3 * step
    rows = make_rows(case.seed + step, count, dtype=case.dtype, **options)
    if case.tied:
        rows.features[:] = (rows.features > 0) * torch.tensor([2.0, 1, 0, 0, 0, 0, 0])
    return rows


def num_outputs(case: Case) -> int:
    form = FORMS[case.loss]
    return case.num_classes if form.loss.is_pooled else form.columns


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
    loss = OfRows(case, make_loss(case, local))
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
            step = part_of(step, split(len(step.features), world_size, index, case.layout), rank)
        optimizer.zero_grad()
        if hasattr(loss.loss, "on_train_batch_start"):
            loss.loss.on_train_batch_start(index)
        options = {} if step.weight is None else {"sample_weight": step.weight}
        if case.masked:
            options["iid_mask"] = step.features[:, 0] < 0.8
        if not case.one_query:
            options["queries"] = (2 * step.features[:, 0]).round().long()
        if case.sync and not local:
            value = back_propagate_window(case, wrapped, loss, step, rank + index)
        elif case.loss_inside:
            value = wrapped(step.features, step.targets, **options)
        else:
            value = loss(wrapped(step.features), step.targets, **options)
        if value.ndim:  # the loss of each class or query
            value = (value.nan_to_num() * torch.linspace(0.5, 2, len(value), dtype=value.dtype)).sum()
        if value.requires_grad:  # a window has been back-propagated
            value.backward()
        for parameter in outside if case.gradient_reduction == "sum" and not local else []:
            dist.all_reduce(parameter.grad)
        trace.gradients.append(torch.cat([value.detach().reshape(1), gradient(parts)]).double())
        optimizer.step()
    return trace


def joined_loss(loss: nn.Module) -> Callable[[Tensor, list[Rows]], Tensor]:
    def compute(scores: Tensor, batches: list[Rows]) -> Tensor:
        weight = None if batches[0].weight is None else torch.cat([batch.weight for batch in batches])
        return loss(scores, torch.cat([batch.targets for batch in batches]), sample_weight=weight)

    return compute


def back_propagate_window(case: Case, model: nn.Module, loss: nn.Module, own: Rows, seed: int) -> Tensor:
    """Back-propagate the rows in micro-batches, of which ranks have other numbers where only the last communicates."""
    batches = cut(own, seed % 3 + 1 if case.wrapper in ("plain", "ddp") and case.sync == "last" else 3, seed)
    options: dict[str, Any] = {
        "forward": lambda batch: model(batch.features),
        "loss": joined_loss(loss),
        "group": by_hand(model),
    }
    value = fullrank.pooled_backward(model, batches, sync=case.sync, **options)
    for parameter in model.parameters() if case.wrapper == "plain" else []:
        dist.all_reduce(parameter.grad)
    return value


_of_one_process: dict[str, Trace] = {}


def train_alone(case: Case) -> Trace:
    """Train in one process, once for all cases that only spread the rows or the computation in another way.

    Rank 0 does so for all: half of the time of these tests would go into the same training on every rank.
    """
    queue_size = 0 if case.sharded else case.queue_size
    spread = ("wrapper", "gradient_reduction", "by_bins", "sharded", "form", "layout", "is_split", "sync")
    usual = case._replace(queue_size=queue_size, **{name: Case._field_defaults[name] for name in spread})
    if str(usual) not in _of_one_process:
        found = [train(usual, 0, 1) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        _of_one_process[str(usual)] = found[0]
    return _of_one_process[str(usual)]


def worst_error(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """Return the largest gradient error and the largest error of the loss value, over the steps.

    In float64 the two trainings run apart. In float32, and of sums, whose steps are larger by the number of rows, the
    spread one follows the parameters of the other: the limit is about a gradient, and a step of 0.5 turns the rounding
    of one into other scores for the next.
    """
    whole = train_alone(case)
    costs = TABLE["cpu"]._replace(pair=1e9) if case.by_bins else TABLE["cpu"]
    fewest = 0 if case.is_split else retrieval.FEWEST_SPLIT
    follows = case.dtype == "float32" or case.options.get("reduction") == "sum"
    with forced(case.form), mock.patch.dict(TABLE, cpu=costs), mock.patch.object(retrieval, "FEWEST_SPLIT", fewest):
        spread = train(case, rank, world_size, whole if follows else None)
    same([float(found[0]) for found in spread.gradients])
    pairs = list(zip(spread.gradients, whole.gradients))
    value = max(float(abs(a[0] - b[0]) / max(abs(b[0]), 1e-3)) for a, b in pairs)
    return max(error(a[1:], b[1:]) for a, b in pairs), value


def worst_errors(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float]]:
    return [worst_error(rank, world_size, case) for case in cases]
