"""Queries and embeddings for the tests of retrieval, and what the workers run with them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from gradient_cases import NUM_FEATURES, Scorer, flat_gradients, split
from reference import Rows
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fullrank

IGNORED = -100


class Queries(NamedTuple):
    """Rows of queries of many lengths, in no order; three queries are not valid, each for a reason of its own."""

    rows: Rows
    indexes: Tensor


def make_queries(seed: int = 0, *, weighted: bool = False, dtype: torch.dtype = torch.float64) -> Queries:
    """Return 14 queries of 1 to 70 rows, about a tenth of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 70, 6, 6])
    order = torch.randperm(int(lengths.sum()), generator=generator)
    query = torch.arange(lengths.numel()).repeat_interleave(lengths)[order]
    targets = (torch.rand(query.numel(), generator=generator) < 0.3).long()
    logits = torch.randn(query.numel(), 1, generator=generator, dtype=dtype) + 0.8 * targets[:, None]
    targets[torch.rand(query.numel(), generator=generator) < 0.1] = IGNORED
    targets[query == 5] = 0  # without a positive
    targets[query == 12] = 1  # without a negative
    targets[query == 13] = IGNORED
    names = torch.tensor([5, -3, 2**40, 0, 17, 1, 99, -2, 44, 1000, 12, 13, 6, 7])  # what the queries are called
    weight = torch.rand(query.numel(), generator=generator, dtype=dtype) if weighted else None
    return Queries(Rows(logits, targets, None, weight), names[query])


# name: the labels of the rows, before they are shuffled
LAYOUTS = {
    "as many classes as rows of each": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
    "equal sizes": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4],
    "unequal sizes": [3, 3, 8, 8, 8, 8, 8, 8, 8, 1, 1, 1, 5, 5],
    "rows that are alone": [0, 0, 0, 1, 2, 2, 7, 7, 7, 7, -4],
    "ignored rows": [IGNORED, 0, 0, 1, 1, 1, IGNORED, 2, 2, 2, 2, 2],
}


def make_embeddings(layout: str, seed: int = 0, num_features: int = 5) -> tuple[Tensor, Tensor]:
    """Return float64 embeddings of many lengths, and the labels of ``layout`` in random order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(LAYOUTS[layout])
    labels = labels[torch.randperm(labels.numel(), generator=generator)]
    embeddings = torch.randn(labels.numel(), num_features, generator=generator, dtype=torch.float64)
    return embeddings * (0.1 + 3 * torch.rand(labels.numel(), 1, generator=generator, dtype=torch.float64)), labels


def separated(layout: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return embeddings that are the same within a class and orthogonal between classes, shuffled, and their labels."""
    _, labels = make_embeddings(layout, seed)
    lengths = 1 + torch.arange(labels.numel(), dtype=torch.float64)[:, None]
    directions = torch.eye(labels.unique().numel(), dtype=torch.float64)
    return lengths * directions[labels.unique(return_inverse=True)[1]], labels


# --- over ranks ------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """One of the two losses of retrieval, and how its gradients are combined."""

    loss: str  # "queries" or "embeddings"
    dtype: str = "float64"
    reduction: str = "mean"
    gradient_reduction: str = "mean"
    weighted: bool = False
    apart: bool = False  # the control: every rank has its own queries, and the wrapper averages the losses


def _make_loss(form: Form, local: bool) -> nn.Module:
    gather = False if local or form.apart else None
    options: dict[str, Any] = {"reduction": form.reduction, "gather_distributed": gather}
    options |= {"gradient_reduction": form.gradient_reduction, "temperature": 0.2}
    if form.loss == "queries":
        return fullrank.SmoothAPLoss(1, queue_size=32, **options)
    return fullrank.RetrievalSmoothAPLoss(**options)


def _make_step(form: Form, step: int) -> dict[str, Tensor | None]:
    """Return the whole batch; the rows of a query, and of a label, lie all over it."""
    generator = torch.Generator().manual_seed(step)
    dtype = getattr(torch, form.dtype)
    count = 41 + 4 * step
    weight = torch.rand(count, generator=generator, dtype=torch.float64).to(dtype) if form.weighted else None
    targets = torch.randint(0, 2 if form.loss == "queries" else 9, (count,), generator=generator)
    return {
        "features": torch.randn(count, NUM_FEATURES, generator=generator, dtype=torch.float64).to(dtype),
        "targets": targets.masked_fill(torch.arange(count) % 11 == 3, IGNORED),
        "indexes": torch.randint(-3, 4, (count,), generator=generator),
        "weight": weight,
    }


def _gradient(form: Form, rank: int, world_size: int, step: int) -> Tensor:
    """Return the loss, and the gradient of the parameters once the ranks have combined it, in one tensor."""
    local = world_size == 1
    model = Scorer(1 if form.loss == "queries" else 4).to(getattr(torch, form.dtype))
    wrapped = model if local or form.gradient_reduction == "sum" else DistributedDataParallel(model)
    batch = _make_step(form, step)
    if not local:
        counts = split(len(batch["indexes"]), world_size, step)  # type: ignore[arg-type]
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        batch = {name: None if value is None else value[own] for name, value in batch.items()}
    outputs = wrapped(batch["features"])
    options = {"sample_weight": batch["weight"], "indexes": batch["indexes"]} if form.loss == "queries" else {}
    loss = _make_loss(form, local)(outputs, batch["targets"], **options)
    factors = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view_as(loss)
    objective = (loss.nan_to_num() * factors).sum()
    objective.backward()
    gradient = torch.cat(flat_gradients(model))
    if not local and form.gradient_reduction == "sum":
        dist.all_reduce(gradient)
    return torch.cat([objective.detach().reshape(1), gradient]).double()


def worst_error(rank: int, world_size: int, form: Form) -> tuple[float, float]:
    """Return the largest relative error of gradient and loss over four batches, one rank being empty in two of them."""
    worst = [0.0, 0.0]
    for step in range(4):
        spread, whole = (_gradient(form, rank, size, step) for size in (world_size, 1))
        gradient = float((spread[1:] - whole[1:]).norm() / whole[1:].norm())
        worst = [max(worst[0], gradient), max(worst[1], float(abs(spread[0] / whole[0] - 1)))]
    return worst[0], worst[1]


def collectives(rank: int, loss: str) -> tuple[int, int]:
    """Return the collectives in the forward and in the backward."""
    module = _make_loss(Form(loss), local=False)
    rows = torch.randn(5 + rank, 1 if loss == "queries" else 4, requires_grad=True)
    options = {"indexes": torch.arange(5 + rank) % 2} if loss == "queries" else {}
    with CollectiveCounter() as forward:
        value = module(rows, torch.arange(5 + rank) % 2, **options)
    with CollectiveCounter() as backward:
        value.backward()
    return forward.total, backward.total


def values_of_all_ranks(rank: int, loss: str) -> list[list[float]]:
    """Return the values under ``"none"`` over the ranks, and those of one process."""
    form = Form(loss, reduction="none")
    world_size = dist.get_world_size()
    batch = _make_step(form, 1)
    outputs = Scorer(1 if loss == "queries" else 4)(batch["features"]).detach()
    counts = split(len(outputs), world_size, 1)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    values = []
    for local, rows in ((False, own), (True, slice(None))):
        options = {"indexes": batch["indexes"][rows]} if loss == "queries" else {}  # type: ignore[index]
        values.append(_make_loss(form, local)(outputs[rows], batch["targets"][rows], **options).tolist())  # type: ignore[index]
    return values


def disagree(rank: int, what: str) -> tuple[str, str]:
    """Return the error of a call in which rank 1 differs."""
    odd = rank == 1
    logits, targets = torch.randn(4, 1), torch.tensor([0, 1, 0, 1])
    try:
        if what == "temperature":
            fullrank.RetrievalSmoothAPLoss(0.1 if odd else 0.2)(logits, targets)
        elif what == "max_pool_size":
            module = fullrank.SmoothAPLoss(1, max_pool_size=3 if odd else None)
            module(logits, targets, indexes=targets)
        else:
            fullrank.SmoothAPLoss(1)(logits, targets, indexes=None if odd else targets)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def autocast_error(loss: str, guarded: bool) -> float:
    """Return how far autocast moves loss and gradient; without ``guarded`` the losses are blind to it."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(600, 1 if loss == "queries" else 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 2 if loss == "queries" else 40, (600,), generator=generator)
    options = {"indexes": torch.randint(0, 9, (600,), generator=generator)} if loss == "queries" else {}
    outcomes = []
    for enabled in (False, True):
        blind = nullcontext() if guarded else mock.patch.object(torch, "is_autocast_enabled", return_value=False)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), blind:
            value = _make_loss(Form(loss), local=True)(rows, targets, **options)
            (gradient,) = torch.autograd.grad(value, rows)
        outcomes.append(torch.cat([value.detach().reshape(1), gradient.flatten() * 100]))
    return float((outcomes[0] - outcomes[1]).norm() / outcomes[0].norm())
