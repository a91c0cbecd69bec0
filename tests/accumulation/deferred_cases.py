"""What the worker processes run for the tests of DeferredMean, against one process with all the rows.

Models, micro-batches and the definition ``whole`` are those of accumulation (accumulate_cases.py).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accumulate_cases import (
    Batch,
    Experts,
    Model,
    _cut,
    all_batches,
    error,
    flat,
    make_batch,
    make_window,
    num_valid,
    sum_loss,
    whole,
    wrap,
)
from collective_counter import CollectiveCounter
from meshes import init_device_mesh
from torch import Tensor, nn
from torch.nn import functional

from fullrank import (
    DeferredMean,
    accumulate,
    clip_grad_norm_,
    count_valid_tokens,
    sequence_sync_group,
    sum_gradients_,
)


def make_pair(kind: str, dtype: str) -> tuple[nn.Module, nn.Module]:
    """Return the model of one process, and a wrapped one: plain, ddp, fsdp, hsdp, or summed (FSDP2)."""
    kept = getattr(torch, dtype)
    model = wrap(Model(kept), "fsdp" if kind == "summed" else kind)
    if kind == "summed":
        sum_gradients_(model)
    return Model(kept), model


def sync_groups(kind: str) -> list[Any]:
    """Return what is left to add for a wrapper."""
    return [dist.group.WORLD] if kind == "plain" else []


def run_step(deferred: DeferredMean, model: nn.Module, batches: Iterable[Batch], groups: Iterable[Any] = ()) -> Any:
    """Run one step and return its count."""
    for batch in batches:
        deferred.backward(sum_loss(model, batch), num_valid(batch))
    return deferred.finish(groups)


def exactness(rank: int, kind: str, num_calls: int, dtype: str) -> dict[str, float]:
    """Return the errors of gradient, loss and count, one object serving a step for every layout."""
    reference, model = make_pair(kind, dtype)
    deferred, errors = DeferredMean(model), {}
    for layout in ("full", "uneven", "none"):
        model.zero_grad()
        everything = [b for other in range(dist.get_world_size()) for b in make_window(layout, other)[:num_calls]]
        expected = whole(reference, everything)
        count = run_step(deferred, model, make_window(layout, rank)[:num_calls], sync_groups(kind))
        assert type(count) is int
        assert deferred.mean_loss().dtype == getattr(torch, dtype)
        errors[layout] = error(flat(model), expected.gradient)
        errors[f"{layout} loss"] = error(deferred.mean_loss(), expected.loss)
        errors[f"{layout} count"] = abs(count - sum(map(num_valid, everything)))
        if layout == "none":
            assert all(p.grad is not None for p in model.parameters())
            errors["none"] = float(flat(model).abs().max())
    return errors


def nothing_but_nan(rank: int, kind: str, dtype: str) -> float:
    """Return the largest gradient of a step without terms, whose losses are means over nothing."""
    _, model = make_pair(kind, dtype)
    deferred = DeferredMean(model)
    for batch in make_window("none", rank):
        deferred.backward(model(batch["tokens"]).sum() * torch.nan, 0)
    assert flat(model).isnan().any()
    assert deferred.finish(sync_groups(kind)) == 0
    return float(flat(model).abs().max())


def weighted(rank: int, kind: str, dtype: str) -> float:
    """Return the error with weights for counts, given as tensors."""
    reference, model = make_pair(kind, dtype)
    everything, deferred = all_batches("full"), DeferredMean(model)
    weight = 0.37 * (1 + rank)
    losses = [
        0.37 * (1 + r) * sum_loss(reference, b) for r in range(dist.get_world_size()) for b in make_window("full", r)
    ]
    masses = [0.37 * (1 + r) * num_valid(b) for r in range(dist.get_world_size()) for b in make_window("full", r)]
    assert len(losses) == len(everything)
    (torch.stack(losses).sum() / sum(masses)).backward()
    for batch in make_window("full", rank):
        deferred.backward(weight * sum_loss(model, batch), torch.tensor(weight * num_valid(batch), dtype=torch.float64))
    count = deferred.finish(sync_groups(kind))
    assert isinstance(count, float)
    assert abs(count / sum(masses) - 1) < 1e-14
    return error(flat(model), flat(reference))


def objects(rank: int, kind: str) -> dict[str, Any]:
    """Return whether finish keeps gradients and what DTensors say, and the error of clipping them afterwards."""
    reference, model = make_pair(kind, "float64")
    deferred = DeferredMean(model)
    for batch in make_window("full", rank):
        deferred.backward(sum_loss(model, batch), num_valid(batch))
    before = [p.grad for p in model.parameters()]
    layouts = [(getattr(g, "placements", None), getattr(g, "device_mesh", None), g.stride()) for g in before]
    deferred.finish(sync_groups(kind))
    after = [p.grad for p in model.parameters()]
    whole(reference, all_batches("full"))
    largest = 0.5 * float(flat(reference).norm())
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), largest)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {
        "same": all(one is other for one, other in zip(before, after)),
        "layouts": layouts
        == [(getattr(g, "placements", None), getattr(g, "device_mesh", None), g.stride()) for g in after],
        "norm": error(norm, expected),
        "clipped": error(flat(model), flat(reference)),
        "ours": error(clip_grad_norm_(model, None), flat(reference).norm()),
    }


def left_unsharded(rank: int, dtype: str) -> float:
    """Return the error when FSDP2 keeps the parameters whole after the backward, so that the module shows no shards."""
    reference, model = make_pair("fsdp", dtype)
    model.set_reshard_after_backward(False)
    deferred = DeferredMean(model)
    expected = whole(reference, all_batches("full")).gradient
    run_step(deferred, model, make_window("full", rank))
    model.reshard()
    model.up.reshard()
    return error(flat(model), expected)


def collectives(rank: int, kind: str) -> list[dict[str, int]]:
    """Return the collectives of one call of backward, forward not included, and of finish."""
    _, model = make_pair(kind, "float32")
    deferred = DeferredMean(model)
    found = []
    for _ in range(3):  # DDP arranges its buckets in the second
        found.clear()
        model.zero_grad()
        for batch in make_window("full", rank)[:2]:
            loss = sum_loss(model, batch)
            with CollectiveCounter() as counter:
                deferred.backward(loss, num_valid(batch))
            found.append(dict(counter.counts))
        with CollectiveCounter() as counter:
            deferred.finish(sync_groups(kind))
        found.append(dict(counter.counts))
    return found


def naive(rank: int, way: str, dtype: str) -> float:
    """Return the error of what is done instead."""
    reference, model = make_pair("ddp" if way in ("mean of means", "count alone") else "plain", dtype)
    expected, batches = whole(reference, all_batches("full")).gradient, make_window("full", rank)
    world_size, total = dist.get_world_size(), sum(map(num_valid, all_batches("full")))
    for batch in batches:
        terms = max(num_valid(batch), 1) * len(batches) if way == "mean of means" else 1
        (sum_loss(model, batch) / terms).backward()
    own = float(sum(map(num_valid, batches)))
    for p in model.parameters():
        if way == "count alone":  # DDP has divided by the number of ranks already
            p.grad /= total
        elif way == "divided before the sum":
            p.grad /= own * world_size
            dist.all_reduce(p.grad)
        elif way == "second sync":
            for _ in range(2):
                dist.all_reduce(p.grad)
            p.grad /= total
    return error(flat(model), expected)


def expert_errors(rank: int, way: str, dtype: str) -> tuple[float, float]:
    """Return the errors of the dense part and of this rank's expert, one of two; W = 4 has two copies of each."""
    from torch.distributed.fsdp import fully_shard

    kept, world_size = getattr(torch, dtype), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "experts"))
    model = Experts(kept, mesh["experts"].get_group())
    (expert,) = model.experts.values()
    copies = mesh["data"].get_group() if world_size > 2 else None
    groups: list[Any] = [(expert, copies)]
    if way == "plain":
        groups.append((model.outer, dist.group.WORLD))
    elif way == "ignored by FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), ignored_params=set(expert.parameters()))
    else:
        fully_shard(expert, mesh=mesh["data"])
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        groups = []
    if "summed" in way:
        sum_gradients_(model)
    run_step(DeferredMean(model), model, make_window("full", rank), groups)
    reference = Experts(kept)
    whole(reference, all_batches("full"))
    own = reference.experts[str(dist.get_rank(model.group))].weight.grad
    return error(flat(model.outer), flat(reference.outer)), error(flat(expert), own.flatten())


def context_parallel_errors(rank: int, dtype: str) -> dict[str, float]:
    """Return the errors with sequences cut over two ranks, by what is folded into FSDP's mesh; the count is of all."""
    from torch.distributed.fsdp import fully_shard

    kept, errors = getattr(torch, dtype), {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    data_rank, part = mesh["data"].get_local_rank(), mesh["context"].get_local_rank()
    reference = Model(kept)
    expected = whole(reference, [b for other in range(2) for b in make_window("full", other)]).gradient
    context, alone = mesh["context"].get_group(), init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))["b"]
    for mode, (ring, ulysses) in {
        "all": (context, alone),
        "none": (context, alone),
        "ring_only": (alone, context),
        "ulysses_only": (context, alone),
    }.items():
        model = Model(kept)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)) if mode == "all" else mesh["data"])
        group = sequence_sync_group(mode, ring=ring, ulysses=ulysses, unified=context)
        deferred = DeferredMean(model, group=mesh)
        for batch in _cut(make_window("full", data_rank), part):
            logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
            deferred.backward(functional.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())
        deferred.finish([group])
        errors[mode] = error(flat(model), expected)
    return errors


class Outcome(NamedTuple):
    """What one rank saw of a step that one rank spoils, and the error of the step when it goes on all the same."""

    kind: str
    text: str
    error: float


CALLS: dict[str, Callable[[DeferredMean, nn.Module, Tensor], Any]] = {
    "vector": lambda deferred, model, loss: deferred.backward(torch.stack([loss, loss]), 1),
    "number": lambda deferred, model, loss: deferred.backward(3.0, 1),
    "no graph": lambda deferred, model, loss: deferred.backward(loss.detach(), 1),
    "negative count": lambda deferred, model, loss: deferred.backward(loss, -1),
    "negative count in a tensor": lambda deferred, model, loss: deferred.backward(loss, torch.tensor(-1)),
    "count that is NaN": lambda deferred, model, loss: deferred.backward(loss, float("nan")),
    "count that is text": lambda deferred, model, loss: deferred.backward(loss, "3"),
    "several counts": lambda deferred, model, loss: deferred.backward(loss, torch.tensor([1, 2])),
    "finish instead": lambda deferred, model, loss: deferred.finish(),
}


def spoil_call(rank: int, kind: str, case: str, bad_rank: int) -> Outcome:
    """Run a step whose second call goes wrong on ``bad_rank``, and which then goes on."""
    reference, model = make_pair(kind, "float64")
    deferred, batches = DeferredMean(model), make_window("full", rank)
    deferred.backward(sum_loss(model, batches[0]), num_valid(batches[0]))
    loss = sum_loss(model, batches[1])
    found = "nothing", ""
    try:
        if rank == bad_rank:
            CALLS[case](deferred, model, loss)
        else:
            deferred.backward(loss, num_valid(batches[1]))
    except Exception as raised:
        found = type(raised).__name__, str(raised)
    run_step(deferred, model, batches[1:], sync_groups(kind))
    return Outcome(*found, error(flat(model), whole(reference, all_batches("full")).gradient))


def spoil_call_everywhere(rank: int, kind: str, case: str) -> Outcome:
    """Run a step that starts wrongly on every rank, and again."""
    reference, model = make_pair(kind, "float64")
    deferred, batches = DeferredMean(model), make_window("full", rank)
    optimizer = torch.optim.SGD(model.parameters())
    found = "nothing", ""
    try:
        if case == "no_sync" and kind == "ddp":
            with model.no_sync():
                run_step(deferred, model, batches)
        elif case == "no_sync":
            model.set_requires_gradient_sync(False)
            run_step(deferred, model, batches)
        elif case == "old gradients":
            run_step(deferred, model, batches)
            run_step(deferred, model, batches)
        else:
            newer = DeferredMean(model)
            run_step(deferred, model, batches)
            del newer
    except Exception as raised:
        found = type(raised).__name__, str(raised)
    if case == "no_sync" and kind == "fsdp":
        model.set_requires_gradient_sync(True)
    optimizer.zero_grad()
    run_step(DeferredMean(model), model, batches)
    return Outcome(*found, error(flat(model), whole(reference, all_batches("full")).gradient))


def parameters_after_an_error(rank: int, way: str) -> float:
    """Return the error of a step after one that was refused, FSDP2 having gathered the parameters of before.

    ``way``: "ours", or "no reshard", the control.
    """
    reference, model = make_pair("fsdp", "float64")
    deferred, batches, held = DeferredMean(model), make_window("full", rank), list(model.parameters())
    loss = sum_loss(model, batches[0])
    if way == "no reshard":
        for module in (model, model.up):
            module.reshard = lambda: None
    with contextlib.suppress(ValueError):
        deferred.backward(loss, -1)
    with torch.no_grad():
        for p in [*held, *reference.parameters()]:
            p.mul_(1.5)
    run_step(deferred, model, batches)
    found = torch.cat([p.grad.full_tensor().flatten() for p in held])
    return error(found, whole(reference, all_batches("full")).gradient)


def window_after_an_error(rank: int) -> float:
    """Return the error of a window of accumulate, of unequal lengths on the ranks, after a call that was refused."""
    reference, model = make_pair("ddp", "float64")
    loss = sum_loss(model, make_batch(rank, 0))
    with contextlib.suppress(ValueError):
        DeferredMean(model).backward(loss, -1)
    for step, batch in accumulate(model, make_window("unequal", rank), count_valid_tokens):
        step.backward(sum_loss(model, batch))
    return error(flat(model), whole(reference, all_batches("unequal")).gradient)


FINISHES: dict[str, Callable[[nn.Module], Any]] = {
    "text": lambda model: "all",
    "one group": lambda model: dist.group.WORLD,
    "a module": lambda model: [model],
    "another model's": lambda model: [(nn.Linear(1, 1), None)],
    "no parameter": lambda model: [("weight", None)],
    "used up": lambda model: [(iter([]), None)],
    "twice": lambda model: [dist.group.WORLD, ([*model.parameters()][:1], dist.group.WORLD)],
    "nothing": lambda model: [],
    "others": lambda model: [([*model.parameters()][1:], dist.group.WORLD)],
}


def spoil_finish(rank: int, case: str, bad_rank: int) -> Outcome:
    """Finish a plain model wrongly on ``bad_rank`` (-1: every rank), and then rightly."""
    reference, model = make_pair("plain", "float64")
    deferred, batches = DeferredMean(model), make_window("full", rank)
    for batch in batches:
        deferred.backward(sum_loss(model, batch), num_valid(batch))
    found = "nothing", ""
    try:
        deferred.finish(FINISHES[case](model) if bad_rank in (rank, -1) else [dist.group.WORLD])
    except Exception as raised:
        found = type(raised).__name__, str(raised)
    deferred.finish([dist.group.WORLD])
    return Outcome(*found, error(flat(model), whole(reference, all_batches("full")).gradient))


def second_sync(rank: int, kind: str) -> Outcome:
    """Finish twice; the gradient afterwards is that of once."""
    reference, model = make_pair(kind, "float64")
    deferred, found = DeferredMean(model), ("nothing", "")
    run_step(deferred, model, make_window("full", rank), sync_groups(kind))
    try:
        deferred.finish(sync_groups(kind))
    except Exception as raised:
        found = type(raised).__name__, str(raised)
    return Outcome(*found, error(flat(model), whole(reference, all_batches("full")).gradient))


def changed_reduction(rank: int) -> Outcome:
    """Change how FSDP2 reduces in the middle of a step; discard it and begin again."""
    reference, model = make_pair("fsdp", "float64")
    deferred, batches, found = DeferredMean(model), make_window("full", rank), ("nothing", "")
    deferred.backward(sum_loss(model, batches[0]), num_valid(batches[0]))
    sum_gradients_(model)
    try:
        run_step(deferred, model, batches[1:])
    except Exception as raised:
        found = type(raised).__name__, str(raised)
    deferred.discard()
    run_step(deferred, model, batches)
    return Outcome(*found, error(flat(model), whole(reference, all_batches("full")).gradient))


def forgotten_parameters(rank: int) -> Outcome:
    """Finish a model with a parameter that DDP leaves out: refused, then with a pair, which makes it exact."""
    from torch.nn.parallel import DistributedDataParallel

    reference, inner = Model(torch.float64), Model(torch.float64)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["up.weight", "up.bias"])
    model = DistributedDataParallel(inner)
    deferred, found = DeferredMean(model), ("nothing", "")
    try:
        run_step(deferred, model, make_window("full", rank))
    except Exception as raised:
        found = type(raised).__name__, str(raised)
    deferred.finish([(inner.up, dist.group.WORLD)])
    return Outcome(*found, error(flat(model), whole(reference, all_batches("full")).gradient))


def owners(rank: int) -> list[str]:
    """Return what a second construction raises: with open gradients, after finish, after the first is gone."""
    _, model = make_pair("ddp", "float32")
    batches, outcomes = make_window("full", rank), []

    def construct() -> DeferredMean | None:
        try:
            made = DeferredMean(model)
            outcomes.append("nothing")
            return made
        except RuntimeError as raised:
            outcomes.append(str(raised))
            return None

    first = construct()
    first.backward(sum_loss(model, batches[0]), num_valid(batches[0]))
    construct()
    first.finish()
    model.zero_grad()
    second = construct()
    second.backward(sum_loss(model, batches[0]), num_valid(batches[0]))
    del second
    gc.collect()
    construct()
    return outcomes
