"""What the worker processes run for the tests of pooled_backward: windows over ranks against one process.

``train`` takes a few optimizer steps of a small model whose batch is spread over ranks and micro-batches. The same
function computes the reference, in one process and one forward. ``retained`` is the other reference: all graphs of a
window kept until one backward, which has the masks and the buffers that micro-batches have.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gradient_cases
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from gradient_cases import Case, Step, make_loss, make_step, shard, split
from meshes import init_device_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fullrank
from fullrank.gradients.wrappers import sum_gradients_

NUM_STEPS = 3
LOSSES = ("smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise")


class Spread(NamedTuple):
    """How a window is spread."""

    wrapper: str = "ddp"  # plain, statistics (SyncBatchNorm), ddp, fsdp2, hsdp, summed (FSDP2 after sum_gradients_)
    sync: str = "last"


def make_model(case: Case, *layers: nn.Module, seed: int = 7) -> nn.Sequential:
    """Return a two-layer scorer with ``layers`` after the first, the same in every process."""
    modules = [nn.Linear(gradient_cases.NUM_FEATURES, 8), *layers, nn.Tanh(), nn.Linear(8, case.num_classes)]
    model = nn.Sequential(*modules).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 2)
    return model.to(getattr(torch, case.dtype))


@functools.cache
def mesh(wrapper: str) -> DeviceMesh:
    """Return the mesh of ``wrapper``; made once, because meshes make groups."""
    if wrapper == "hsdp":
        return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def wrap(model: nn.Sequential, wrapper: str, **options: Any) -> nn.Module:
    """Return ``model`` under ``wrapper``."""
    if wrapper in ("plain", "statistics"):
        return model
    if wrapper == "ddp":
        return DistributedDataParallel(model, **options)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh(wrapper))
    fully_shard(model, mesh=mesh(wrapper))
    if wrapper == "summed":
        sum_gradients_(model)
    return model


def whole(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> Tensor:
    """Return all gradients as one float64 vector, zeros for a parameter without one; collective if sharded."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([whole(part).detach().double().reshape(-1) for part in parts])


def has_gradients(model: nn.Module) -> bool:
    """Return whether any parameter has a gradient."""
    return any(parameter.grad is not None for parameter in model.parameters())


def load(model: nn.Module, values: list[Tensor]) -> None:
    """Write whole ``values`` into the parameters."""
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values):
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
                parameter.to_local().copy_(value)
            else:
                parameter.copy_(value)


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference over the norm of ``b``."""
    return float((a - b).norm() / b.norm())


def cut(step: Step, count: int, seed: int = 0) -> list[Step]:
    """Cut a batch into ``count`` micro-batches of uneven size, the second of them empty when there are three."""
    num_rows = step.features.shape[0]
    shares = [1 + (seed + index) % 3 for index in range(count)]
    if count > 2:
        shares[1] = 0
    counts = [num_rows * share // sum(shares) for share in shares]
    counts[-1] += num_rows - sum(counts)
    parts = zip(*(value.split(counts) if value is not None else [None] * count for value in step))
    return [Step(*part) for part in parts]


def joined_loss(loss: nn.Module) -> Callable[[Tensor, list[Step]], Tensor]:
    """Return ``loss`` in the form that pooled_backward calls."""

    def compute(scores: Tensor, batches: list[Step]) -> Tensor:
        weight = None if batches[0].weight is None else torch.cat([batch.weight for batch in batches])
        return loss(scores, torch.cat([batch.targets for batch in batches]), sample_weight=weight)

    return compute


class Trace(NamedTuple):
    """What each step leaves: the loss, the gradient, the parameters before it, and the queue after it."""

    values: list[float]
    gradients: list[Tensor]
    parameters: list[list[Tensor]]
    queues: list[Tensor]


def train_whole(case: Case) -> Trace:
    """Train in this process alone, one forward per step."""
    loss = make_loss(case._replace(gradient_reduction="mean"), local=True)
    model = make_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trace = Trace([], [], [], [])
    for index in range(NUM_STEPS):
        trace.parameters.append([parameter.detach().clone() for parameter in model.parameters()])
        step = make_step(case, index)
        optimizer.zero_grad()
        value = loss(model(step.features), step.targets, sample_weight=step.weight)
        value.backward()
        _record(trace, value, model, loss)
        optimizer.step()
    return trace


def train_spread(rank: int, case: Case, spread: Spread, reference: Trace) -> Trace:
    """Train with rows spread over ranks and micro-batches.

    In float32 every step starts from the parameters of ``reference``: the limit is about a gradient, and a step of 0.5
    turns the rounding of one into other scores for the next.
    """
    world_size = dist.get_world_size()
    loss = make_loss(case, local=False)
    model = wrap(make_model(case), spread.wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trace = Trace([], [], [], [])
    for index in range(NUM_STEPS):
        if case.dtype == "float32":
            load(model, reference.parameters[index])
        optimizer.zero_grad()
        step = make_step(case, index)
        own = shard(step, split(step.features.shape[0], world_size, index), rank)
        free = spread.wrapper in ("ddp", "plain") and spread.sync == "last"
        batches = cut(own, (rank + index) % 3 + 1 if free else 3, seed=rank + index)
        value = fullrank.pooled_backward(
            model, batches, forward=lambda batch: model(batch.features), loss=joined_loss(loss), sync=spread.sync
        )
        if spread.wrapper == "plain":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        _record(trace, value, model, loss)
        optimizer.step()
    return trace


def _record(trace: Trace, value: Tensor, model: nn.Module, loss: nn.Module) -> None:
    rows = loss.queue.rows()
    columns = [rows.logits.double(), rows.targets[:, None].double()]
    trace.values.append(value.item())
    trace.gradients.append(gradients(model))
    trace.queues.append(torch.cat(columns, dim=1))


def worst_errors(rank: int, spread: Spread, dtype: str) -> dict[str, list[float]]:
    """Return the largest errors of gradient, value and queue of each loss; every other one with weights."""
    errors = {}
    for index, name in enumerate(LOSSES):
        reduction = "sum" if spread.wrapper in ("plain", "summed") else "mean"
        is_weighted = (index + (dtype == "float32")) % 2 == 1
        case = Case(name, dtype=dtype, weighted=is_weighted, gradient_reduction=reduction)
        reference = train_whole(case)
        trace = train_spread(rank, case, spread, reference)
        gradient = max(relative(a, b) for a, b in zip(trace.gradients, reference.gradients))
        value = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(trace.values, reference.values))
        queue = max(relative(a, b) for a, b in zip(trace.queues, reference.queues))
        errors[name] = [gradient, value, queue]
    return errors


def retained(
    model: nn.Module, batches: list[Any], forward: Callable[[Any], Tensor], loss: Callable[..., Tensor]
) -> Tensor:
    """Return the loss after one backward through the graphs of all micro-batches."""
    value = loss(torch.cat([forward(batch) for batch in batches]), batches)
    value.backward()
    return value.detach()


def own_window(rank: int, count: int, case: Case | None = None, index: int = 0) -> list[Step]:
    """Return this rank's micro-batches of a step."""
    case = case or Case("smooth_ap")
    step = make_step(case, index)
    return cut(shard(step, split(step.features.shape[0], dist.get_world_size(), index), rank), count, seed=rank)


def dropout_errors(rank: int, wrapper: str) -> tuple[float, bool]:
    """Return the gradient error with dropout, whose masks differ by rank and micro-batch, and whether the RNG agrees.

    The reference keeps the graphs on an unwrapped copy, whose gradients are added by hand.
    """
    case = Case("smooth_ap")
    batches = own_window(rank, 3)
    plain, model = make_model(case, nn.Dropout(0.4)), wrap(make_model(case, nn.Dropout(0.4)), wrapper)
    torch.manual_seed(50 + rank)
    added = joined_loss(make_loss(case._replace(gradient_reduction="sum"), local=False))
    retained(plain, batches, lambda batch: plain(batch.features), added)
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
    after = torch.get_rng_state()
    torch.manual_seed(50 + rank)
    loss = joined_loss(make_loss(case, local=False))
    fullrank.pooled_backward(model, batches, forward=lambda batch: model(batch.features), loss=loss)
    return relative(gradients(model), gradients(plain)), torch.equal(torch.get_rng_state(), after)


def reductions(rank: int, spread: Spread, count: int) -> dict[str, int]:
    """Return how often each collective ran in one window of ``count`` micro-batches."""
    model = wrap(make_model(Case("smooth_ap"), RunningNorm(8)), spread.wrapper)
    loss = joined_loss(make_loss(Case("smooth_ap"), local=False))
    batches = own_window(rank, count)
    for _ in range(3):  # a wrapper sets itself up in the first two: DDP arranges its buckets
        with CollectiveCounter() as counter:
            fullrank.pooled_backward(
                model, batches, forward=lambda batch: model(batch.features), loss=loss, sync=spread.sync
            )
    return dict(counter.counts)


def ddp_buffers(rank: int) -> dict[str, Any]:
    """Return how BatchNorm under DDP compares with one process that makes rank 0's forwards, and other ranks' own.

    The running statistics differ between the ranks at the start, and the model uses them: rank 0's count.
    """
    case = Case("smooth_ap")
    batches = [batch for batch in own_window(rank, 3) if len(batch.features)][: 2 - rank]
    norm = RunningNorm(8)
    model = make_model(case, norm)
    norm.mean += 1.0 + rank
    plain = make_model(case, RunningNorm(8))
    plain[1].mean += 1.0
    added = joined_loss(make_loss(case._replace(gradient_reduction="sum"), local=False))
    retained(plain, batches, lambda batch: plain(batch.features), added)
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
    wrapped = DistributedDataParallel(model)
    norm.mean.copy_(torch.full((8,), 1.0 + rank))  # the constructor has broadcast them too
    loss = joined_loss(make_loss(case, local=False))
    fullrank.pooled_backward(wrapped, batches, forward=lambda batch: wrapped(batch.features), loss=loss)
    return {
        "gradient": relative(gradients(model), gradients(plain)),
        "mean": relative(norm.mean, plain[1].mean),
        "next forward broadcasts": wrapped.require_forward_param_sync,
    }


class RunningNorm(nn.Module):
    """Subtracts a running mean that each forward first moves on, so that scores depend on how often it was moved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        if self.training and len(values):
            self.mean.mul_(0.5).add_(0.5 * values.detach().mean(dim=0))
        return values - self.mean


class Mistake(Exception):
    """Raised by the code of a user."""


def mistaken(rank: int, kind: str, wrapper: str, wrong: list[int]) -> dict[str, Any]:
    """Make the mistake ``kind`` on the ranks ``wrong``; return what every rank sees, and how the next window goes."""
    case = Case("smooth_ap")
    model = wrap(make_model(case), wrapper)
    loss = make_loss(case, local=False)
    compute = joined_loss(loss)
    batches = own_window(rank, 3)
    is_wrong = rank in wrong
    options: dict[str, Any] = {"forward": lambda batch: model(batch.features), "loss": compute}
    fullrank.pooled_backward(model, batches, **options)
    before = gradients(model)
    error = ""
    with _one_mistake(kind, is_wrong, model, batches, options):
        try:
            fullrank.pooled_backward(model, options.pop("batches", batches), **options)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
    after, discarded = gradients(model), not has_gradients(model)
    loss.reset_queue()
    for parameter in model.parameters():
        parameter.grad = None
    options = {"forward": lambda batch: model(batch.features), "loss": compute}
    fullrank.pooled_backward(model, batches, **options)
    return {
        "error": error,
        "untouched": relative(after, before) if after.norm() > 0 else 1.0,
        "discarded": discarded,
        "next": relative(gradients(model), before),
    }


@contextlib.contextmanager
def _one_mistake(
    kind: str, is_wrong: bool, model: nn.Module, batches: list[Step], options: dict[str, Any]
) -> Iterator[None]:
    """Change ``options`` for the duration."""
    score, compute = options["forward"], options["loss"]
    wrong: dict[str, Callable[[], Any]] = {
        "none": lambda: options.update(batches=[]),
        "generator": lambda: options.update(batches=iter(batches)),
        "sync": lambda: options.update(sync="never"),
        "scaler": lambda: options.update(scaler=torch.amp.GradScaler("cpu")),
        "forward": lambda: options.update(forward=_raise_at(score, 1)),
        "shape": lambda: options.update(forward=lambda batch: score(batch)[:, :, None]),
        "before": lambda: options.update(loss=lambda scores, batches: _fail()),
        "after": lambda: options.update(loss=lambda scores, batches: (compute(scores, batches), _fail())),
        "targets": lambda: options.update(loss=lambda scores, batches: compute(scores[1:], batches)),
        "detached": lambda: options.update(loss=lambda scores, batches: compute(scores.detach(), batches)),
        "vector": lambda: options.update(loss=lambda scores, batches: compute(scores, batches).expand(2)),
        "leaf": lambda: options.update(loss=lambda scores, batches: compute(scores, batches) * _OUTSIDE),
        "replay": lambda: options.update(forward=lambda batch: score(batch) * (1 + random.random())),
        "later": lambda: options.update(forward=_raise_at(score, 4)),
        "frozen": lambda: options.update(forward=lambda batch: score(batch).detach()),
    }
    with torch.no_grad() if kind == "no_grad" and is_wrong else contextlib.nullcontext():
        if is_wrong and kind != "no_grad":
            wrong[kind]()
        yield


_OUTSIDE = nn.Parameter(torch.ones((), dtype=torch.float64))


def _fail() -> None:
    raise Mistake("this is mine")


def _raise_at(score: Callable[[Any], Tensor], call: int) -> Callable[[Any], Tensor]:
    """Return ``score`` with a mistake in its call number ``call``, from 0."""
    calls = iter(range(10_000))

    def forward(batch: Any) -> Tensor:
        if next(calls) == call:
            _fail()
        return score(batch)

    return forward


def unequal(rank: int, spread: Spread) -> str:
    """Return what different numbers of micro-batches lead to."""
    layers = [nn.SyncBatchNorm(8)] if spread.wrapper == "statistics" else []
    model = wrap(make_model(Case("smooth_ap"), *layers), spread.wrapper)
    loss = joined_loss(make_loss(Case("smooth_ap"), local=False))
    batches = own_window(rank, 2 + rank)
    try:
        fullrank.pooled_backward(
            model, batches, forward=lambda batch: model(batch.features), loss=loss, sync=spread.sync
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def retry_in_a_handler(rank: int) -> str:
    """Return what a mistake of one rank leads to in a call that is made while an agreed error is handled."""
    model = wrap(make_model(Case("smooth_ap")), "ddp")
    loss = joined_loss(make_loss(Case("smooth_ap"), local=False))
    batches = own_window(rank, 2)
    options: dict[str, Any] = {"forward": lambda batch: model(batch.features)}
    try:
        fullrank.pooled_backward(model, batches if rank else [], loss=loss, **options)
    except ValueError:
        try:
            wrong = loss if rank else lambda scores, batches: (loss(scores, batches), _fail())
            fullrank.pooled_backward(model, batches, loss=wrong, **options)
        except RuntimeError as error:
            return str(error)
    return "passed"


def named_groups(rank: int) -> dict[str, str]:
    """Return what a mistake in front of the loss leads to, for groups given in different forms."""
    errors = {}
    groups = {"mesh": mesh("fsdp2"), "world": dist.group.WORLD, "new": _everyone()}
    for name, group in groups.items():
        model = wrap(make_model(Case("smooth_ap")), "ddp")
        loss = joined_loss(make_loss(Case("smooth_ap"), local=False, group=group))
        wrong = loss if rank else lambda scores, given: _fail()
        forward = functools.partial(_features_through, model)
        try:
            fullrank.pooled_backward(model, own_window(rank, 2), forward=forward, loss=wrong, group=group)
        except RuntimeError as error:
            errors[name] = str(error)
    return errors


def _features_through(model: nn.Module, batch: Step) -> Tensor:
    return model(batch.features)


@functools.cache
def _everyone() -> Any:
    return dist.new_group(list(range(dist.get_world_size())))


def switches_afterwards(rank: int, wrapper: str) -> tuple[Any, Any]:
    """Return how the wrapper reduces before and after a window that fails in its second pass."""
    from fullrank.gradients.wrappers import find_sync

    model = wrap(make_model(Case("smooth_ap")), wrapper)
    sync = find_sync(model)
    sync.switch("last", False)

    def state() -> Any:
        return [m.require_backward_grad_sync for m in sync.ddp], [group.switches for group in sync.fsdp]

    before = state()
    loss = joined_loss(make_loss(Case("smooth_ap"), local=False))
    noise = random.Random(rank)
    with contextlib.suppress(RuntimeError):
        fullrank.pooled_backward(
            model, own_window(rank, 3), forward=lambda batch: model(batch.features) * noise.random(), loss=loss
        )
    return before, state()
