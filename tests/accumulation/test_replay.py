"""pooled_backward: one loss over ranks and micro-batches, with the gradient of one big batch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gradient_cases
import pytest
import torch
import torch.distributed as dist
from batches import Rows as Step
from batches import part_of as shard
from batches import split
from collective_counter import CollectiveCounter
from gradient_cases import Case, make_loss, make_step
from meshes import init_device_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm
from workers import WorkerPool, class_of, error_of, get_pool

import fullrank
from fullrank.accumulation.replay_state import RngState, accelerators_in_use, save_rng
from fullrank.gradients.wrappers import sum_gradients_

# The package holds the function under the name of its module.
replay = importlib.import_module("fullrank.accumulation.pooled_backward")

NUM_STEPS = 3
LOSSES = ("smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise", "pauc_dro", "hard_negative")


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


def by_hand(model: nn.Module) -> Any:
    """Return the ``group`` that a plain model needs on several ranks, or None for a wrapped one."""
    is_plain = type(model) is nn.Sequential and dist.is_initialized()
    return dist.group.WORLD if is_plain else None


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


@functools.cache
def train_whole(case: Case) -> Trace:
    """Train in this process alone, one forward per step."""
    loss = make_loss(case, local=True)
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
            model,
            batches,
            forward=lambda batch: model(batch.features),
            loss=joined_loss(loss),
            group=by_hand(model),
            sync=spread.sync,
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


def worst_errors(rank: int, spread: Spread, dtype: str, losses: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the largest errors of gradient, value and queue of each loss; some with weights."""
    errors = {}
    for name in losses:
        reduction = "sum" if spread.wrapper in ("plain", "summed") else "mean"
        is_weighted = (3 * LOSSES.index(name) // 2 + (dtype == "float32")) % 2 == 1
        case = Case(name, dtype=dtype, weighted=is_weighted, gradient_reduction=reduction)
        reference = train_whole(case._replace(gradient_reduction="mean"))
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


def mean_of_squares(scores: Tensor, batches: list[Step], reduction: str | int) -> Tensor:
    """Return a summed loss over all ranks."""
    return fullrank.global_mean(scores.square().sum(), scores.numel(), gradient_reduction=reduction)


def reductions_of_the_loss(rank: int, wrapper: str, name: str) -> dict[str, tuple[str, float]]:
    """Return what each ``gradient_reduction`` leads to: the error that is raised, or that of the gradient."""
    found, size = {}, dist.get_world_size()
    for reduction in ("mean", "sum", size, 2 * size):
        case = Case("smooth_ap" if name == "global_mean" else name, gradient_reduction=reduction)
        losses = [joined_loss(make_loss(case, local=False)) for _ in range(2)]
        loss_alone = joined_loss(make_loss(case._replace(gradient_reduction="mean"), local=True))
        if name == "global_mean":
            losses = [functools.partial(mean_of_squares, reduction=reduction)] * 2
            loss_alone = lambda scores, given: scores.square().mean()  # noqa: E731
        model, alone = wrap(make_model(case), wrapper), make_model(case)
        run = functools.partial(_features_through, model)
        options: dict[str, Any] = {"forward": run, "loss": losses[0], "group": by_hand(model)}
        text = error_of(functools.partial(fullrank.pooled_backward, model, own_window(rank, 3), **options))[1]
        step = make_step(case, 0)
        loss_alone(alone(step.features), [step]).backward()
        # The gradient as it was before the check, for the control: of the loss alone, with retained graphs.
        raw = wrap(make_model(case), wrapper)
        retained(raw, own_window(rank, 3), functools.partial(_features_through, raw), losses[1])
        found[str(reduction)] = text, relative(gradients(raw), gradients(alone))
    return found


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


class Counter(nn.Module):
    """Counts its forwards in a buffer, which DDP broadcasts and no score depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(1))

    def forward(self, values: Tensor) -> Tensor:
        self.forwards += 1
        return values


def mistaken(rank: int, kind: str, wrapper: str, wrong: list[int]) -> list[dict[str, Any]]:
    """Make the mistake ``kind`` on the ranks ``wrong``; return what every rank sees, and how the next window goes.

    In the first window of a model and in its second, without and, where they travel, with a buffer.
    """
    layers = ([], [Counter()]) if wrapper == "ddp" else ([],)
    return [_mistaken(rank, kind, wrapper, wrong, more, first) for more in layers for first in (True, False)]


def _mistaken(
    rank: int, kind: str, wrapper: str, wrong: list[int], layers: list[nn.Module], is_first: bool
) -> dict[str, Any]:
    case = Case("smooth_ap")
    model = warm = wrap(make_model(case, *layers), wrapper)
    if is_first:
        warm = wrap(make_model(case, *layers), wrapper)
    loss = make_loss(case, local=False)
    compute = joined_loss(loss)
    batches = own_window(rank, 3)
    is_wrong = rank in wrong
    fullrank.pooled_backward(warm, batches, forward=lambda batch: warm(batch.features), loss=compute)
    before = gradients(warm)
    if is_first:
        for parameter, other in zip(model.parameters(), warm.parameters()):
            parameter.grad = other.grad
    options: dict[str, Any] = {"forward": lambda batch: model(batch.features), "loss": compute}
    error = ""
    with _one_mistake(kind, is_wrong, model, batches, options):
        try:
            fullrank.pooled_backward(model, options.pop("batches", batches), **options)
        except Exception as caught:
            error = f"{class_of(caught)}: {caught}"
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
        "again": lambda: options.update(forward=_raise_at(score, 3)),
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
            model,
            batches,
            forward=lambda batch: model(batch.features),
            loss=loss,
            group=by_hand(model),
            sync=spread.sync,
        )
    except Exception as error:
        return f"{class_of(error)}: {error}"
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


# float64: rounding of sums in another order. float32: the model's own products, summed in parts.
LIMITS = {"float64": 1e-12, "float32": 2e-6}


def assert_exact(pool: WorkerPool, spread: Spread, dtype: str) -> None:
    """Assert that gradient, value and queue of every step equal those of one process with the whole batch.

    Each way to spread a window takes all losses in float64, on the most ranks and with one reduction; the rest takes
    every other loss.
    """
    is_main = spread.sync == "last" and pool.world_size > 2
    first = int(dtype == "float32") + int(spread.sync == "shard")
    losses = LOSSES if is_main and dtype == "float64" else LOSSES[first % 2 :: 2]
    for errors in pool(worst_errors, spread, dtype, losses):
        assert list(errors) == list(losses)
        assert max(map(max, errors.values())) <= LIMITS[dtype], errors


# Three ranks, so that the one without rows is also in the middle; and two where gradients travel.
SPREADS: list[Any] = [(3, Spread(wrapper)) for wrapper in ("plain", "ddp", "fsdp2", "summed")]
SPREADS += [(3, Spread("ddp", "each")), (3, Spread("fsdp2", "each"))]
SPREADS = [pytest.param(*spread, marks=pytest.mark.slow) for spread in SPREADS]
SPREADS += [(2, Spread("ddp")), (2, Spread("fsdp2"))]


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("world_size", "spread"), SPREADS, ids=lambda part: "-".join(part) if isinstance(part, Spread) else None
)
def test_equals_one_process(world_size: int, spread: Spread, dtype: str) -> None:
    """Uneven rows, ranks without any, uneven numbers of micro-batches, a queue that fills over three steps."""
    assert_exact(get_pool(world_size), spread, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["last", "each", "shard"])
def test_equals_one_process_in_a_hybrid_mesh(pool_of_four: WorkerPool, sync: str) -> None:
    for dtype in LIMITS if sync == "last" else ("float64",):
        assert_exact(pool_of_four, Spread("hsdp", sync), dtype)


@pytest.mark.parametrize("dtype", LIMITS)
def test_sixteen_times_32_is_once_512(dtype: str) -> None:
    """The control is what is widely done: the mean of the losses of the micro-batches."""
    case = Case("smooth_ap", dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(512, 7, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    targets = (torch.rand(512, generator=generator) < 0.2).long()
    loss = fullrank.SmoothAPLoss(1, queue_size=0, temperature=0.1)
    once, pooled, naive = (make_model(case) for _ in range(3))
    loss(once(features), targets).backward()
    batches = list(zip(features.split(32), targets.split(32)))
    joined = lambda scores, batches: loss(scores, torch.cat([target for _, target in batches]))  # noqa: E731
    fullrank.pooled_backward(pooled, batches, forward=lambda batch: pooled(batch[0]), loss=joined)
    for batch, target in batches:
        (loss(naive(batch), target) / len(batches)).backward()
    assert relative(gradients(pooled), gradients(once)) <= LIMITS[dtype]
    assert relative(gradients(naive), gradients(once)) > 1e-3


# --- one process: what both passes must share


def run_both(
    make: Callable[[], nn.Module],
    *,
    device: str | torch.device = "cpu",
    autocast: bool = False,
    check_replay: bool = True,
) -> tuple[nn.Module, nn.Module]:
    """Return the model after one backward through the graphs of all micro-batches, and after pooled_backward.

    Both start alike, and are asserted to leave the same loss and the same random state.
    """
    generator = torch.Generator().manual_seed(1)
    sizes, dtype = (5, 9, 7), next(make().parameters()).dtype
    batches = [torch.randn(size, 7, generator=generator, dtype=torch.float64).to(device, dtype) for size in sizes]
    targets = (torch.rand(sum(sizes), generator=generator) < 0.4).long().to(device)
    loss = fullrank.SmoothAPLoss(1, queue_size=0, temperature=0.5)

    def compute(scores: Tensor, given: list[Tensor]) -> Tensor:
        return loss(scores, targets)

    def run(pooled: bool) -> tuple[nn.Module, Tensor, RngState]:
        model = make().to(device)
        torch.manual_seed(11)
        # Without its cache autocast casts a weight for each micro-batch, and adds up the gradients in float32.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast, cache_enabled=pooled):
            if pooled:
                value = fullrank.pooled_backward(model, batches, forward=model, loss=compute, check_replay=check_replay)
            else:
                value = compute(torch.cat([model(batch) for batch in batches]), batches)
        if not pooled:
            value.backward()
        return model, value.detach(), save_rng(accelerators_in_use(model))

    (first, value, state), (second, other, after) = run(False), run(True)
    assert torch.equal(value, other)
    assert torch.equal(state.cpu, after.cpu)
    for (where, kept), (_, other) in zip(state.devices, after.devices, strict=True):
        assert torch.equal(kept, other), where
    return first, second


def with_dropout() -> nn.Module:
    return make_model(Case("smooth_ap"), nn.Dropout(0.4))


def test_dropout_uses_the_same_masks(device: torch.device) -> None:
    first, second = run_both(with_dropout, device=device)
    assert relative(gradients(second), gradients(first)) <= 1e-12


def test_control_without_the_random_states_dropout_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = replay.restore_rng
    monkeypatch.setattr(replay, "restore_rng", lambda state: None)
    with pytest.raises(RuntimeError, match="the same scores in both passes"):
        run_both(with_dropout)
    monkeypatch.setattr(replay, "restore_rng", real)
    calls: list[Any] = []
    # Only the last call, which puts the state back at the end, is made.
    monkeypatch.setattr(replay, "restore_rng", lambda state: calls.append(state) or len(calls) < 4 or real(state))
    first, second = run_both(with_dropout, check_replay=False)
    assert relative(gradients(second), gradients(first)) > 1e-2


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_dropout_over_ranks(pool: WorkerPool, wrapper: str) -> None:
    for error, same_state in pool(dropout_errors, wrapper):
        assert error <= 1e-12
        assert same_state


def test_batch_norm_counts_a_micro_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: make_model(Case("smooth_ap"), nn.BatchNorm1d(8))  # noqa: E731
    first, second = run_both(make)
    assert relative(gradients(second), gradients(first)) <= 1e-12
    for a, b in zip(first.buffers(), second.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)  # the same operations
    assert second[1].num_batches_tracked == 3
    monkeypatch.setattr(replay, "buffers_kept", lambda model: contextlib.nullcontext())
    first, second = run_both(make)
    assert second[1].num_batches_tracked == 6
    assert relative(second[1].running_mean, first[1].running_mean) > 1e-2


def test_power_iteration_advances_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        torch.manual_seed(4)  # spectral_norm draws its first vectors
        model = make_model(Case("smooth_ap"))
        spectral_norm(model[0])
        directions = torch.linalg.svd(model[0].parametrizations.weight.original.detach()).Vh
        far = directions[5] + 0.1 * directions[0]  # from converged, as the constructor leaves it
        model[0].parametrizations.weight[0]._v.copy_(far / far.norm())
        return model

    first, second = run_both(make)
    assert relative(gradients(second), gradients(first)) <= 1e-12
    for a, b in zip(first.buffers(), second.buffers()):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)
    monkeypatch.setattr(replay, "buffers_kept", lambda model: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="module state that is not a buffer"):
        run_both(make)


class Awkward(nn.Module):
    """Treats its buffers in every way that a forward may; the scores depend on each."""

    def __init__(self) -> None:
        super().__init__()
        one = torch.ones(8, dtype=torch.float64)
        self.register_buffer("replaced", one.clone())
        self.register_buffer("through_data", one.clone())
        self.register_buffer("absent", None)
        self.register_buffer("expanded", torch.ones(1, dtype=torch.float64).expand(8))
        self.register_buffer("hidden", one.clone(), persistent=False)

    def forward(self, values: Tensor) -> Tensor:
        self.replaced = self.replaced * 0.9
        self.through_data.data.mul_(0.8)
        self.hidden.add_(0.1)
        self.absent = torch.ones_like(self.hidden) if self.absent is None else self.absent * 1.1
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.full_like(self.hidden, 0.5))
        self.made += 0.01
        scale = self.replaced * self.through_data * self.absent * self.expanded * self.hidden * self.made
        return values * scale.clone()


def test_buffers_of_every_kind_are_put_back() -> None:
    first, second = run_both(lambda: make_model(Case("smooth_ap"), Awkward()))
    assert relative(gradients(second), gradients(first)) <= 1e-12
    for (name, a), (other, b) in zip(first.named_buffers(), second.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


def test_buffers_keep_their_identity_and_other_graphs() -> None:
    """What else holds a buffer sees it change once, and a graph that saved one before stays usable."""
    model = make_model(Case("smooth_ap"), nn.BatchNorm1d(8)).eval()
    before = [id(buffer) for buffer in model.buffers()]
    other = model(torch.ones(3, 7, dtype=torch.float64)).sum()
    fullrank.pooled_backward(model, [torch.ones(2, 7, dtype=torch.float64)], forward=model, loss=lambda s, _: s.sum())
    other.backward()
    assert [id(buffer) for buffer in model.buffers()] == before


class Float32Island(nn.Module):
    """A product that leaves autocast, and a scale that autocast does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) + 0.1)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, values: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            values = values.float() @ self.weight
        return values * self.scale


def in_autocast() -> nn.Module:
    return make_model(Case("smooth_ap", dtype="float32"), Float32Island())


def test_autocast_is_that_of_one_forward() -> None:
    """The same casts and products on both sides, and the backward outside of autocast."""
    first, second = run_both(in_autocast, autocast=True)
    assert relative(gradients(second), gradients(first)) <= 1e-6


class CachedCast(nn.Module):
    """Casts its weight once and keeps the result, as autocast does; older versions also without a graph."""

    def __init__(self, cache: dict[str, Tensor]) -> None:
        super().__init__()
        self.weight, self.cache = nn.Parameter(torch.eye(8)), cache

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.cache.setdefault("weight", self.weight.bfloat16()).float()


def test_weights_that_were_cast_without_graph_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: dict[str, Tensor] = {}
    monkeypatch.setattr(torch, "clear_autocast_cache", cache.clear)
    model = make_model(Case("smooth_ap", dtype="float32"), CachedCast(cache))
    batches = [torch.ones(2, 7)] * 2
    one_call(model=model, batches=batches)
    assert model[1].weight.grad is not None
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    cache.clear()
    model.zero_grad()
    one_call(model=model, batches=batches)
    assert model[1].weight.grad is None
    assert model[0].weight.grad is not None


def test_control_backward_inside_autocast_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_autocast_off", lambda devices: contextlib.nullcontext())
    first, second = run_both(in_autocast, autocast=True)
    assert relative(gradients(second), gradients(first)) > 1e-4


def test_grad_scaler_scales_the_gradient_and_not_the_value() -> None:
    case = Case("smooth_ap", dtype="float32")
    batches = cut(make_step(case, 0), 3)
    plain, scaled = make_model(case), make_model(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    values = [
        fullrank.pooled_backward(
            model,
            batches,
            forward=lambda batch, model=model: model(batch.features),
            loss=joined_loss(make_loss(case, local=True)),
            scaler=given,
        )
        for model, given in ((plain, None), (scaled, scaler))
    ]
    assert torch.equal(*values)
    assert relative(gradients(scaled), 1024.0 * gradients(plain)) <= 1e-6
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    assert relative(gradients(scaled), gradients(plain)) <= 1e-6


def test_memory_is_that_of_one_micro_batch() -> None:
    """The bytes that graphs hold at the same time, counted as they are saved and freed."""

    def peak(backward: Callable[..., Any], count: int) -> int:
        model = make_model(Case("smooth_ap"), nn.Linear(8, 8, dtype=torch.float64))
        batches = list(torch.ones(1024, 7, dtype=torch.float64).split(1024 // count))
        held = Held()
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda kept: kept.tensor):
            backward(model, batches, forward=model, loss=lambda scores, _: scores.mean())
        return held.peak

    retaining = lambda model, batches, forward, loss: retained(model, batches, forward, loss)  # noqa: E731
    assert peak(fullrank.pooled_backward, 16) <= peak(retaining, 1) / 12
    assert peak(retaining, 16) > 0.9 * peak(retaining, 1)  # control: cutting alone saves nothing


class Kept:
    """One saved tensor; gives its bytes back when its graph goes."""

    def __init__(self, tensor: Tensor, held: Held) -> None:
        self.tensor, self.held, self.size = tensor.detach(), held, tensor.numel() * tensor.element_size()
        held.now += self.size
        held.peak = max(held.peak, held.now)

    def __del__(self) -> None:
        self.held.now -= self.size


class Held:
    """Counts the bytes that graphs hold."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Kept:
        """Hook for what a graph saves."""
        return Kept(tensor, self)


@pytest.mark.parametrize("columns", [(), (1,), (3,), (2, 2)], ids=str)
def test_scores_of_any_trailing_shape(columns: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.randn(7, *columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    model = nn.ParameterList([weight])
    batches = [torch.randn(rows, 7, dtype=torch.float64) for rows in (2, 0, 5)]
    seen = []

    def loss(scores: Tensor, given: list[Tensor]) -> Tensor:
        seen.append((tuple(scores.shape), given is not None and len(given)))
        return scores.square().sum()

    value = fullrank.pooled_backward(model, batches, forward=lambda b: torch.tensordot(b, model[0], 1), loss=loss)
    expected = torch.tensordot(torch.cat(batches), weight.detach(), 1).square().sum()
    assert seen == [((7, *columns), 3)]  # once
    assert value.shape == ()
    assert not value.requires_grad
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(torch.tensordot(torch.cat(batches), weight, 1).square().sum(), weight)
    torch.testing.assert_close(weight.grad, slope, rtol=1e-12, atol=0)


def test_window_without_rows_gives_zero_gradients() -> None:
    model = make_model(Case("smooth_ap"))
    loss = fullrank.SmoothAPLoss(1)
    batches = [torch.zeros(0, 7, dtype=torch.float64)] * 2
    none = torch.zeros(0, dtype=torch.int64)
    value = fullrank.pooled_backward(model, batches, forward=model, loss=lambda scores, _: loss(scores, none))
    assert value == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


# --- over ranks: communication and state


@pytest.mark.parametrize("spread", [Spread("ddp"), Spread("fsdp2")], ids="-".join)
def test_one_reduction_per_window(pool_of_two: WorkerPool, spread: Spread) -> None:
    """Four headers, the loss's header and payload, DDP's broadcast of buffers, and one reduction."""
    for count in (1, 4):
        (counts, other) = pool_of_two(reductions, spread, count)
        assert counts == other
        if spread.wrapper == "ddp":
            assert counts.pop("allreduce_.default") == 1
            assert counts.pop("broadcast_.default") == 1
            assert counts == {"_allgather_base_.default": 6}
        else:
            assert counts["_reduce_scatter_base_.default"] == 2  # of each layer


def test_control_reductions_with_sync_each(pool_of_two: WorkerPool) -> None:
    counts = pool_of_two(reductions, Spread("ddp", "each"), 4)[0]
    assert counts["allreduce_.default"] == 4
    assert counts["broadcast_.default"] == 1


def test_ddp_buffers_are_those_of_rank_zero_in_both_passes(pool_of_two: WorkerPool) -> None:
    first, second = pool_of_two(ddp_buffers)
    for result in (first, second):
        assert result["gradient"] <= 1e-12
        assert result["mean"] <= 1e-12
        assert result["next forward broadcasts"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smooth_ap", "global_mean"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "summed"])
def test_a_loss_whose_gradient_does_not_fit_the_model(pool: WorkerPool, wrapper: str, name: str) -> None:
    """Every setting whose gradient is wrong is refused on every rank, and no other one."""
    results = pool(reductions_of_the_loss, wrapper, name)
    size = pool.world_size
    right = {"sum"} if wrapper == "summed" else {"mean", str(size)}
    for reduction in results[0]:
        texts = {found[reduction][0] for found in results}
        assert len(texts) == 1
        (text,) = texts
        wrong = results[0][reduction][1]
        assert (wrong <= 1e-12) == (reduction in right)
        if reduction in right:
            assert text == ""
        else:
            assert "gradient_reduction: expected the way the model combines gradients" in text
            fix = {"summed": '"sum"'}.get(wrapper, '"mean"')
            assert f"times the right one: pass gradient_reduction={fix}." in text


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_switches_are_put_back(pool_of_two: WorkerPool, wrapper: str) -> None:
    for before, after in pool_of_two(switches_afterwards, wrapper):
        assert before == after


# --- mistakes

# What is raised on every rank when one of them makes the mistake.
MISTAKES = {
    "none": "ValueError: pooled_backward failed on rank 1: micro_batches: expected at least one micro-batch",
    "generator": "TypeError: pooled_backward failed on rank 1: micro_batches: expected a list .* windows",
    "sync": "ValueError: .*sync",
    "scaler": "ValueError: .*scaler: False on rank 0, True on rank 1",
    "no_grad": "RuntimeError: .*rank 1: pooled_backward: expected gradients to be enabled",
    "forward": "RuntimeError: pooled_backward failed on rank 1: Mistake: this is mine",
    "shape": "ValueError: SmoothAPLoss failed on rank 1: logits",
    "before": "RuntimeError: pooled_backward failed on rank 1: Mistake: this is mine",
    "after": "RuntimeError: pooled_backward failed on rank 1: Mistake: this is mine",
    "targets": "ValueError: SmoothAPLoss failed on rank 1: targets",
    "detached": "ValueError: .*SmoothAPLoss|loss: expected a loss with a graph",
    "vector": "ValueError: pooled_backward failed on rank 1: loss: expected a scalar",
    "leaf": "ValueError: pooled_backward failed on rank 1: loss: .*a parameter outside of model.*in forward",
}
IN_THE_REPLAY = {
    "replay": "RuntimeError: pooled_backward: expected the same scores in both passes.*on rank 1.*random, numpy",
    "again": "RuntimeError: pooled_backward failed on rank 1: Mistake: this is mine",
    "later": "RuntimeError: pooled_backward failed on rank 1: Mistake: this is mine",
    "frozen": "ValueError: pooled_backward failed on rank 1: forward: expected scores with a graph",
}


# Under FSDP2 some, before and after the loss. Not "forward": the others would wait in the collectives of the forward
# that one of them does not make.
UNDER_FSDP = ("none", "no_grad", "shape", "before", "after", "targets", "leaf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrapper"), [(kind, "ddp") for kind in MISTAKES] + [(kind, "fsdp2") for kind in UNDER_FSDP]
)
def test_mistake_of_one_rank_is_raised_on_all(pool_of_two: WorkerPool, kind: str, wrapper: str) -> None:
    for first, second in zip(*pool_of_two(mistaken, kind, wrapper, [1])):
        assert first["error"] == second["error"]
        assert re.match(MISTAKES[kind], first["error"], re.DOTALL), first["error"]
        for result in (first, second):
            assert result["untouched"] == 0.0
            assert result["next"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrapper"),
    [("replay", "ddp"), ("again", "ddp"), ("later", "ddp"), ("frozen", "ddp"), ("replay", "fsdp2"), ("replay", "hsdp")],
)
def test_mistake_in_the_replay_discards_the_gradients(kind: str, wrapper: str) -> None:
    """What FSDP2 and HSDP hold unreduced is discarded too."""
    for results in zip(*get_pool(4 if wrapper == "hsdp" else 2)(mistaken, kind, wrapper, [1])):
        assert len({result["error"] for result in results}) == 1
        assert re.match(IN_THE_REPLAY[kind], results[0]["error"], re.DOTALL), results[0]["error"]
        for result in results:
            assert result["discarded"]
            assert result["next"] <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "later", "frozen"])
def test_mistake_of_all_ranks_leaves_fsdp_working(pool_of_two: WorkerPool, kind: str) -> None:
    for result in [result for results in pool_of_two(mistaken, kind, "fsdp2", [0, 1]) for result in results]:
        assert re.match("Mistake: this is mine|ValueError: forward: expected scores with a graph", result["error"])
        assert result["untouched"] == 0.0 if kind == "forward" else result["discarded"]
        assert result["next"] <= 1e-12


@pytest.mark.parametrize(
    "spread",
    [
        Spread("ddp"),
        Spread("plain"),
        Spread("plain", "each"),
        Spread("ddp", "each"),
        Spread("fsdp2"),
        Spread("statistics"),
    ],
    ids="-".join,
)
def test_unequal_numbers_of_micro_batches(pool: WorkerPool, spread: Spread) -> None:
    """Where nothing but the last backward communicates they are fine."""
    results = pool(unequal, spread)
    assert len(set(results)) == 1
    if spread in (Spread("ddp", "each"), Spread("fsdp2"), Spread("statistics")):
        assert results[0].startswith(
            "ValueError: micro_batches: expected the same number on every rank, got 2 on rank 0, 3 "
        )
    else:
        assert results[0] == "passed"


def test_mistake_while_an_agreed_error_is_handled(pool_of_two: WorkerPool) -> None:
    """The second error has the first one for its context, and is nevertheless of one rank alone."""
    first, second = pool_of_two(retry_in_a_handler)
    assert first == second == "pooled_backward failed on rank 0: Mistake: this is mine"


def test_groups_in_every_form(pool_of_two: WorkerPool) -> None:
    for errors in pool_of_two(named_groups):
        text = "pooled_backward failed on rank 0: Mistake: this is mine"
        assert errors == dict.fromkeys(("mesh", "world", "new"), text)


def one_call(**options: Any) -> nn.Module:
    """Call pooled_backward on a small model; options replace the arguments."""
    model = options.pop("model", None) or make_model(Case("smooth_ap"))
    batches = options.pop("batches", [torch.ones(2, 7, dtype=torch.float64)] * 2)
    fullrank.pooled_backward(model, batches, **{"forward": model, "loss": lambda scores, _: scores.sum(), **options})
    return model


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batches": iter([])}, TypeError, r"list\(\.\.\.\), or windows\(loader, size\)"),
        ({"batches": {"x": 1}}, TypeError, "list of micro-batches"),
        ({"batches": []}, ValueError, "at least one micro-batch"),
        ({"forward": None}, TypeError, "forward: expected a function"),
        ({"loss": 3}, TypeError, "loss: expected a function"),
        ({"forward": lambda batch: batch.tolist()}, TypeError, "floating-point tensor of scores"),
        ({"forward": lambda batch: batch.long()}, TypeError, "floating-point tensor of scores"),
        ({"forward": lambda batch: batch.sum()}, ValueError, r"shape \(rows, \.\.\.\)"),
        ({"forward": lambda batch: batch}, ValueError, "scores with a graph"),
        ({"loss": lambda scores, _: (scores.sum(), 1)}, TypeError, "loss: expected a scalar tensor"),
        ({"loss": lambda scores, _: scores[:2]}, ValueError, "loss: expected a scalar"),
        ({"loss": lambda scores, _: scores.detach().sum()}, ValueError, "a graph to the scores"),
        ({"loss": lambda scores, _: scores.sum().item()}, TypeError, "loss: expected a scalar tensor"),
        ({"scaler": 2.0}, TypeError, "GradScaler"),
        ({"sync": "shard"}, ValueError, "FSDP2"),
        ({"sync": "never"}, ValueError, "one of 'last'"),
        ({"model": 3, "forward": torch.sin}, TypeError, "nn.Module"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        one_call(**options)


def test_different_kinds_of_scores() -> None:
    sizes = iter([1, 2])
    with pytest.raises(ValueError, match=r"float64 \(rows, 1\) .* and .* \(rows, 2\)"):
        one_call(forward=lambda batch: batch[:, : next(sizes)])


def test_foreign_leaf_is_named() -> None:
    """A parameter of the model that the loss uses; one used inside forward is fine."""
    model = make_model(Case("smooth_ap"))
    with pytest.raises(ValueError, match=r"the parameter '2\.bias'.*in forward"):
        one_call(model=model, forward=model, loss=lambda scores, _: scores.sum() * model[2].bias.sum())
    assert not has_gradients(model)
    stored = model(torch.ones(2, 7, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"the parameter '\d\."):
        one_call(model=model, forward=model, loss=lambda scores, _: scores.sum() + stored.sum())
    offset = torch.ones(1, requires_grad=True, dtype=torch.float64)
    with pytest.raises(ValueError, match="another tensor that requires grad"):
        one_call(model=model, forward=model, loss=lambda scores, _: (scores + offset).sum())


def test_refused_without_gradients_and_inside_a_backward() -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients to be enabled"):
        one_call()
    leaf = torch.ones(1, requires_grad=True)
    leaf.register_hook(lambda grad: one_call() and None)
    with pytest.raises(RuntimeError, match="while a backward pass runs"):
        leaf.sum().backward()


def test_random_state_after_an_error_in_the_replay() -> None:
    noise = random.Random(0)
    model = with_dropout()
    torch.manual_seed(3)
    batches = [torch.ones(2, 7, dtype=torch.float64)] * 3
    for batch in batches:
        model(batch)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="the same scores"):
        one_call(model=model, batches=batches, forward=lambda batch: model(batch) * noise.random())
    assert torch.equal(torch.get_rng_state(), state)
    assert not has_gradients(model)


def test_replay_of_another_shape() -> None:
    rows = iter([2, 2, 1])
    model = make_model(Case("smooth_ap"))
    with pytest.raises(RuntimeError, match="like those of the first pass"):
        one_call(model=model, forward=lambda batch: model(batch)[: next(rows)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_difference_of_replays(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    first = torch.tensor([1.0, inf, -inf, nan, 2.0], dtype=dtype)
    assert replay.largest_difference(first, first) == 0
    assert replay.largest_score(first) == 2
    for index, value in [(0, nan), (1, -inf), (1, 1.0), (2, nan), (3, 1.0), (4, inf)]:
        again = first.clone()
        again[index] = value
        assert replay.largest_difference(first, again) == inf, (index, value)
    again = first.clone()
    again[0] += 0.5
    assert replay.largest_difference(first, again) == 0.5
    assert replay.largest_difference(first[:0], first[:0]) == replay.largest_score(first[:0]) == 0
    assert replay.tolerance(dtype) == torch.finfo(dtype).eps ** 0.5


def test_replay_may_round_differently() -> None:
    """Differences of the last digits pass, of half of the digits do not."""
    for factor, passes in [(1 + 1e-12, True), (1 + 1e-6, False)]:
        model, factors = make_model(Case("smooth_ap")), iter([1.0, 1.0, factor, 1.0])
        call = lambda: one_call(model=model, forward=lambda batch: model(batch) * next(factors))  # noqa: B023, E731
        if passes:
            call()
        else:
            with pytest.raises(RuntimeError, match="the same scores in both passes"):
                call()


def test_pool_is_left_working() -> None:
    """The last test: no worker has been left in a collective."""
    assert get_pool(2)(unequal, Spread("ddp")) == ["passed", "passed"]
