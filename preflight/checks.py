"""The checks. Each returns its result as text, or raises :class:`Failed` with the reason."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import losses
from ..distributed.gather import all_gather_no_grad, all_gather_with_grad, gather_rows
from ..losses import DistributedLoss
from ..losses.base import HoldsQueue
from .site import Place, Site

Arguments = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # of a loss, from outputs (N, C) and the class of each row

_FEATURES, CLASSES = 5, 3
QUEUE = 48


class Failed(Exception):
    """A check ran and found an error."""


def _demand(condition: bool, text: str) -> None:
    if not condition:
        raise Failed(text)


def placement(site: Site) -> str:
    """Check that no two ranks have the same current device: a backend such as NCCL communicates from there."""
    place = site.places[site.rank]
    if place.visible == 0:
        return "the CPU"

    def shares_device(other: Place) -> bool:
        if place.host != other.host or other.visible == 0:
            return False
        if place.uuid and other.uuid:
            return place.uuid == other.uuid
        # Without a UUID, device 0 of a process that sees one device may be any device of the host.
        return place.current == other.current and max(place.visible, other.visible) > 1

    others = [rank for rank, other in enumerate(site.places) if rank != site.rank and shares_device(other)]
    hint = "" if "LOCAL_RANK" in os.environ else "; LOCAL_RANK is not set"
    _demand(not others, f"computes on device {place.current}, and so does rank {', '.join(map(str, others[:4]))}{hint}")
    return f"device {place.current}, of {place.visible} that the process sees"


def _rows_of_rank(site: Site, sizes: list[int]) -> slice:
    start = sum(sizes[: site.rank])
    return slice(start, start + sizes[site.rank])


def uneven_sizes(site: Site) -> list[int]:
    """Return numbers of rows that differ between ranks; the last of several ranks has none."""
    sizes = [7 + 4 * (rank % 3) for rank in range(site.world_size)]
    return [*sizes[:-1], 0] if site.world_size > 1 else sizes


def gather(site: Site, sizes: list[int]) -> str:
    """Compare gathered rows of three dtypes, and the gradient, with the expected ones."""
    local, total = _rows_of_rank(site, sizes), sum(sizes)
    all_rows, factor = site.draw(1, total, 2), site.draw(2, total, 2)
    numbers = torch.arange(total, device=site.device)
    rows = all_rows[local].clone().requires_grad_()
    sent = (all_rows, numbers, numbers % 2 == 0)
    arrived: tuple[Any, ...] = gather_rows(rows, numbers[local], sent[2][local])
    for tensor, wanted in zip(arrived, sent):
        _demand(torch.equal(tensor, wanted), f"rows of {wanted.dtype} differ from those that were sent")
    (arrived[0] * factor).sum().backward()
    _demand(torch.equal(rows.grad, site.world_size * factor[local]), "gradient is not W times that of the own rows")  # type: ignore[arg-type]
    return f"{' + '.join(map(str, sizes[:4]))}{' + ...' if len(sizes) > 4 else ''} rows, gradients exact"


def reduce_scatter(site: Site) -> str:
    """Check the gather for ranks that compute different losses, whose backward communicates."""
    sizes = uneven_sizes(site)
    rows = site.draw(3, sum(sizes), 2)[_rows_of_rank(site, sizes)].requires_grad_()
    gathered = all_gather_with_grad(rows, backward="reduce_scatter")
    (gathered * (site.rank + 1)).sum().backward()
    wanted = torch.full_like(rows, site.world_size * (site.world_size + 1) / 2)
    assert rows.grad is not None
    _demand(torch.allclose(rows.grad, wanted, rtol=1e-6), "gradient is not the sum over the ranks")
    return "gradients of different losses add up"


def make_losses(device: torch.device, queue_size: int = QUEUE) -> dict[str, tuple[DistributedLoss, Arguments]]:
    """Return each loss, and its arguments from outputs and targets."""
    one_hot = nn.functional.one_hot

    def of_block(block: losses.Block) -> Tensor:
        return nn.functional.cross_entropy(block.scores, block.positives, reduction="none")

    made: dict[Arguments, list[DistributedLoss]] = {
        lambda scores, targets: (scores, targets): [
            losses.CrossEntropyLoss(),
            losses.SoftmaxFocalLoss(),
            losses.SmoothAPLoss(CLASSES, queue_size),
            losses.RecallAtQuantileLoss(CLASSES, 0.3, queue_size),
            losses.PAUCAtBudgetLoss(CLASSES, queue_size=queue_size),
            losses.RetrievalSmoothAPLoss(0.5, queue_size=queue_size),
            losses.SupConLoss(queue_size=queue_size),
        ],
        lambda scores, targets: (scores, one_hot(targets, CLASSES).to(scores.dtype)): [
            losses.BCEWithLogitsLoss(),
            losses.SigmoidFocalLoss(),
        ],
        lambda scores, targets: (scores, scores.exp()): [
            losses.InfoNCELoss(symmetric=True, queue_size=queue_size),
            losses.RowLoss(of_block, queue_size=queue_size),
            losses.SigLIPLoss(queue_size=queue_size),
        ],
        lambda scores, targets: (scores[:, 0], targets): [losses.NDCGLoss()],
    }
    return {type(loss).__name__: (loss.to(device), form) for form, alike in made.items() for loss in alike}


LOSSES = tuple(make_losses(torch.device("cpu")))


def gradient_of(name: str) -> Callable[[Site], str]:
    """Return the check that the gradient of loss ``name`` under DDP is the one of one process, in two steps."""

    def check(site: Site) -> str:
        loss, form = make_losses(site.device)[name]
        alone = copy.deepcopy(loss)
        alone.gather_distributed = False
        whole = nn.Linear(_FEATURES, CLASSES, bias=False).to(site.device, site.dtype)
        whole.weight.data.copy_(site.draw(4, CLASSES, _FEATURES))
        spread = DistributedDataParallel(copy.deepcopy(whole))
        sizes = uneven_sizes(site)
        local, errors = _rows_of_rank(site, sizes), []
        for step in range(2):  # the second step has rows in the queue
            inputs = site.draw(10 + step, sum(sizes), _FEATURES)
            targets = torch.arange(sum(sizes), device=site.device) * 7 % CLASSES
            value, gradient = _value_and_gradient(spread, loss, form, inputs[local], targets[local])
            true_value, true_gradient = _value_and_gradient(whole, alone, form, inputs, targets)
            errors += [float((gradient - true_gradient).norm() / true_gradient.norm()), abs(value / true_value - 1)]
        # NaN does not compare as too large, so it counts as infinity.
        worst = max(site.gather(max(error if error == error else float("inf") for error in errors)))
        _demand(worst <= site.tolerance, f"off by {worst:.1e}, more than {site.tolerance:.0e}")
        if isinstance(loss, HoldsQueue) and loss.queue_size:
            loss.queue.assert_synchronized()
        return f"relative difference to one process {worst:.1e}"

    return check


def _value_and_gradient(
    model: nn.Module, loss: nn.Module, form: Arguments, inputs: Tensor, targets: Tensor
) -> tuple[float, Tensor]:
    model.zero_grad()
    value = loss(*form(model(inputs), targets))
    value.backward()
    return float(value.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def control(site: Site) -> str:
    """Check that a gather without gradient gives 1 / W of the gradient, an error that the checks must detect."""
    rows = site.draw(5, site.world_size, 1)
    weight = torch.ones(1, device=site.device, dtype=site.dtype, requires_grad=True)
    gathered = all_gather_no_grad(rows[site.rank : site.rank + 1] * weight.detach())
    pooled = torch.cat([gathered[: site.rank], rows[site.rank :][:1] * weight, gathered[site.rank + 1 :]])
    pooled.sum().backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    ratio = float(weight.grad / site.world_size / rows.sum())
    _demand(abs(ratio * site.world_size - 1) < 1e-6, f"{ratio:.3f} of the gradient, expected {1 / site.world_size:.3f}")
    return f"a gather without gradient gives {ratio:.3f} of it"


def agreement(site: Site) -> str:
    """Check that every rank raises when the last one fails."""
    logits, targets = site.draw(6, 4, 1), torch.ones(4 - (site.rank == site.world_size - 1), device=site.device)
    raised = None
    try:
        losses.SmoothAPLoss()(logits, targets)
    except ValueError as error:
        raised = str(error)
    texts = site.gather(raised)
    _demand(None not in texts, "a rank did not raise")
    _demand(len(set(texts)) == 1, "the ranks raised different errors")
    return "bad input on one rank is raised on every rank"
