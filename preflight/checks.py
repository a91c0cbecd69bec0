"""The checks. Each returns its result as text, or raises :class:`Failed` with the reason."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import losses
from ..distributed.gather import all_gather_no_grad, all_gather_with_grad, gather_rows
from ..losses import DistributedLoss, SmoothAPLoss
from ..losses.base import HoldsQueue
from .site import Place, Site

_FEATURES, CLASSES = 5, 3
QUEUE = 48


class Failed(Exception):
    """A check ran and found an error."""


class NeedsRanks(Exception):
    """A check needs more than one process."""


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
    hint = "" if place.local_rank is not None else "; LOCAL_RANK is not set"
    _demand(not others, f"computes on device {place.current}, and so does rank {', '.join(map(str, others[:4]))}{hint}")
    local_rank = place.local_rank
    if local_rank is None or place.visible == 1:  # the launcher has chosen the device
        return f"device {place.current}, of {place.visible} that the process sees"
    _demand(
        place.current == local_rank,
        f"the current device is {place.current}, but LOCAL_RANK is {local_rank}: "
        "set the device before anything uses it",
    )
    return f"device {local_rank}, as LOCAL_RANK"


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
    gathered, ids, flags = gather_rows(rows, numbers[local], numbers[local] % 2 == 0)
    assert gathered is not None
    _demand(torch.equal(gathered, all_rows), "rows differ from those that were sent")
    _demand(torch.equal(ids, numbers), "int64 rows differ from those that were sent")  # type: ignore[arg-type]
    _demand(torch.equal(flags, numbers % 2 == 0), "bool rows differ from those that were sent")  # type: ignore[arg-type]
    (gathered * factor).sum().backward()
    wanted = site.world_size * factor[local]
    _demand(torch.equal(rows.grad, wanted), "gradient is not W times that of the own rows")  # type: ignore[arg-type]
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


Arguments = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
# What a loss may be called with, made from outputs and the class of each row. A loss has the first that it accepts.
_FORMS: tuple[Arguments, ...] = (
    lambda scores, targets: (scores, targets),
    lambda scores, targets: (scores, scores.exp()),
    lambda scores, targets: (scores, nn.functional.one_hot(targets, CLASSES).to(scores.dtype)),
    lambda scores, targets: (scores[:, 0], targets),
)
# Where a loss has these arguments: with few rows the gradient of each is large enough to be compared.
_SETTINGS: dict[str, Any] = {"num_classes": CLASSES, "quantile": 0.3, "symmetric": True}
_SETTINGS["function"] = lambda block: nn.functional.cross_entropy(block.scores, block.positives, reduction="none")


def _kinds() -> dict[str, Callable[..., DistributedLoss]]:
    """Return the losses of the package over ranks: the public classes of which no other is a subclass."""
    public = [getattr(losses, name) for name in losses.__all__]
    found = [kind for kind in public if isinstance(kind, type) and issubclass(kind, DistributedLoss)]
    return {kind.__name__: kind for kind in found if sum(issubclass(other, kind) for other in found) == 1}


KINDS = _kinds()


def _settings(kind: Callable[..., DistributedLoss], queue_size: int) -> dict[str, dict[str, Any]]:
    """Return the arguments for the losses of a class, by what is added to its name; a temperature may be automatic."""
    parameters = inspect.signature(kind).parameters
    given = {name: value for name, value in {**_SETTINGS, "queue_size": queue_size}.items() if name in parameters}
    temperature = parameters.get("temperature")
    if temperature is None or "None" not in str(temperature.annotation):
        return {"": given}
    return {"": {**given, "temperature": 0.5}, **({", automatic": given} if temperature.default is None else {})}


@functools.cache
def _form_of(kind: Callable[..., DistributedLoss]) -> Arguments:
    """Return what the losses of a class are called with."""
    generator = torch.Generator().manual_seed(0)
    for form in _FORMS:
        loss = kind(**_settings(kind, 0)[""], gather_distributed=False)
        try:
            loss(*form(torch.randn(8, CLASSES, generator=generator), torch.arange(8) % CLASSES))
        except (TypeError, ValueError):
            continue
        return form
    raise TypeError(f"{kind}: no check knows what it is called with")


def make_losses(device: torch.device, queue_size: int = QUEUE) -> dict[str, tuple[DistributedLoss, Arguments]]:
    """Return each loss, and its arguments from outputs and targets; with a fixed or an automatic temperature."""
    return {
        name + suffix: (kind(**given).to(device), _form_of(kind))
        for name, kind in KINDS.items()
        for suffix, given in _settings(kind, queue_size).items()
    }


LOSSES = tuple(make_losses(torch.device("cpu")))


def gradient_of(name: str) -> Callable[[Site], str]:
    """Return the check that the gradient of loss ``name`` under DDP is the one of one process, in two steps."""

    def check(site: Site) -> str:
        loss, form = make_losses(site.device)[name]
        alone = copy.deepcopy(loss)
        alone.gather_distributed = False
        model = _make_model(site)
        whole, spread = copy.deepcopy(model), site.wrap(model)
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


def _make_model(site: Site) -> nn.Linear:
    """Return a layer with the same parameters on every rank."""
    model = nn.Linear(_FEATURES, CLASSES).to(site.device, site.dtype)
    with torch.no_grad():
        model.weight.copy_(site.draw(4, CLASSES, _FEATURES))
        model.bias.zero_()
    return model


def _value_and_gradient(
    model: nn.Module, loss: nn.Module, form: Arguments, inputs: Tensor, targets: Tensor
) -> tuple[float, Tensor]:
    """Return the loss, and the gradient of all parameters in one tensor."""
    model.zero_grad()
    value = loss(*form(model(inputs), targets))
    value.backward()
    return float(value.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]


def control(site: Site) -> str:
    """Check that a gather without gradient gives 1 / W of the gradient, an error that the checks must detect."""
    if site.world_size == 1:
        raise NeedsRanks("one process has nothing to lose: start with torchrun")
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


def past_wrapper(site: Site) -> str:
    """Check that a network called past DDP has another gradient on each rank, which the checks must detect."""
    if site.world_size == 1:
        raise NeedsRanks("one process has no gradient to reduce: start with torchrun")
    loss, form = SmoothAPLoss(CLASSES, temperature=0.5).to(site.device), _FORMS[0]
    model = _make_model(site)
    spread, own = site.wrap(model), slice(8 * site.rank, 8 * site.rank + 8)
    inputs = site.draw(7, 8 * site.world_size, _FEATURES)[own]
    targets = torch.arange(8, device=site.device) % CLASSES
    _, right = _value_and_gradient(spread, loss, form, inputs, targets)
    _, past = _value_and_gradient(model, loss, form, inputs, targets)
    summed = past.clone()
    dist.all_reduce(summed)
    gap = float((summed / site.world_size - right).norm() / right.norm())
    _demand(gap <= site.tolerance, f"the mean of the gradients is off by {gap:.1e}, more than {site.tolerance:.0e}")
    least = min(site.gather(float((past - right).norm() / right.norm())))
    _demand(least > 0.01, f"{least:.1e} of the gradient is missing, expected a part that is seen")
    return f"a network called past DDP is off by at least {least:.2f}"


def agreement(site: Site) -> str:
    """Check that every rank raises when the last one fails, and that the next step is not affected."""
    loss, twin = (SmoothAPLoss(1, queue_size=QUEUE).to(site.device) for _ in range(2))
    logits = site.draw(6, 4 * site.world_size, 1)[site.rank :: site.world_size]
    targets = (torch.arange(4, device=site.device) == 0).long()
    if site.world_size == 1:
        raise NeedsRanks("one process has nobody to agree with: start with torchrun")
    raised = None
    try:
        loss(logits, targets[:-1] if site.rank == site.world_size - 1 else targets)
    except ValueError as error:
        raised = str(error)
    texts = site.gather(raised)
    _demand(None not in texts, "a rank did not raise")
    _demand(len(set(texts)) == 1, "the ranks raised different errors")
    _demand(len(loss.queue) == 0, "rows of the bad step were enqueued")
    # Not bit by bit: atomic operations may add up the rows of two runs in different orders.
    value, wanted = float(loss(logits, targets)), float(twin(logits, targets))
    _demand(
        abs(value - wanted) <= site.tolerance * abs(wanted),
        f"the next step is off by {abs(value / wanted - 1):.1e}, more than {site.tolerance:.0e}",
    )
    return "bad input on one rank is raised on every rank, the next step works"
