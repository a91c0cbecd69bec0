"""Every recipe of docs/accumulation.md runs as it stands, and gives the gradient of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pages
import pytest
import torch
import torch.distributed as dist
from batches import LENGTH, Batch, halves, make_batch, num_valid, one_process, sum_loss
from integration_cases import flat as parameters
from loss_cases import normal
from meshes import init_device_mesh
from on_ranks import on_ranks
from pages import run_block
from subjects import Adapted, Model, Router, error, wrap
from subjects import gradient as flat
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fullrank

pytestmark = pytest.mark.slow

NUM_BATCHES = 6
LIMIT = 1e-12  # float64
blocks = partial(pages.blocks, "accumulation.md")
NAMES = blocks("Recipes")
LOOP, MEANS = blocks("Plain, DDP, FSDP2, HSDP")
(INJECTED,) = blocks("Losses that back-propagate themselves")
(SERVER,) = blocks("A server, whose calls come one by one")
(SEVERAL,) = blocks("Several losses with counts of their own")
(CONTEXT,) = blocks("Context parallelism")


class Run(NamedTuple):
    """A block to run after the first one on a rank, with names; what to compare after it; is it equal, or a control."""

    code: str
    names: dict[str, Any]
    found: Callable[[dict[str, Any]], Tensor]
    expected: Tensor
    is_right: bool = True


Runs = Iterator[Run]


def batches_of(rank: int) -> list[Batch]:
    """Return the micro-batches of one rank; one of them without valid labels."""
    return [make_batch(rank, index, empty=index == rank) for index in range(NUM_BATCHES)]


def everyone(part: slice = slice(None)) -> list[Batch]:
    return [batch for rank in range(2) for batch in batches_of(rank)[part]]


def whole(batches: list[Batch]) -> Tensor:
    return one_process(Model(), batches).gradient


def trained(windows: Sequence[list[Batch]]) -> Model:
    """Return the model of one process after a step for each window."""
    reference = Model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for window in windows:
        one_process(reference, window)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    return reference


def of_window(code: str, model: nn.Module, expected: Tensor, is_right: bool = True, **names: Any) -> Run:
    """Return the run of a window of all micro-batches of the rank, of which the gradient of the model is expected."""
    names = {"model": model, "micro_batches": batches_of(dist.get_rank()), **names}
    return Run(code, names, lambda _: flat(model), expected, is_right)


def loop(rank: int, kind: str, code: str, size: int) -> Runs:
    """Windows of four and of two micro-batches; a server takes two steps of three calls, by one object."""
    model = wrap(Model(), kind)
    names = {"model": model, "loader": batches_of(rank), "scaler": torch.amp.GradScaler("cpu")}

    def found(names: dict[str, Any]) -> Tensor:
        for number, batch in enumerate(batches_of(rank) if "on_step" in names else []):
            names["on_backward"](batch)
            if number % size == size - 1:
                names["on_step"]()
        return parameters(model)

    names |= {"micro_batches": batches_of(rank), "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}
    ranks, starts = range(dist.get_world_size()), range(0, NUM_BATCHES, size)
    windows = [[batch for r in ranks for batch in batches_of(r)[start : start + size]] for start in starts]
    yield Run(code, names, found, parameters(trained(windows)))


def window(rank: int, kind: str, code: str) -> Runs:
    names = {}
    if "accelerator" in code:
        from accelerate import Accelerator

        names["accelerator"] = Accelerator(cpu=True)
    yield of_window(code, wrap(Model(), kind), whole(everyone()), **names)


def inside(rank: int, kind: str, code: str) -> Runs:
    """A loss that back-propagates itself, in two windows; the control has the factor of one process."""
    inner, reference, router = Model(), Model(), Router()
    inner.middle.append(router)
    losses = [sum_loss(reference, batch) for batch in everyone()]
    losses += [0.1 * reference.up(reference.embed(batch["tokens"])).square().sum() for batch in everyone()]
    expected = torch.stack(losses).sum() / sum(map(num_valid, everyone()))
    expected.backward()
    model, right = wrap(inner, kind), torch.cat([flat(reference), expected.detach()[None]])
    for is_right in (True, True, False):
        model.zero_grad()
        changed = code if is_right else code.replace("step.factor", "step.factor / 2")
        run = of_window(changed, model, right, is_right, router=router)
        yield run._replace(found=lambda names: torch.cat([flat(model), names["step"].mean_loss()[None]]))


def mtp_loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = model(batch["tokens"])[:, :-2], batch["labels"][:, 2:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def several_losses(rank: int, kind: str, code: str) -> Runs:
    """The control has another weight."""
    number = sum(int((batch["labels"][:, 2:] != -100).sum()) for batch in everyone())
    for weight in (0.3, 0.2):
        reference = Model()
        mtp = torch.stack([mtp_loss_sum(reference, batch) for batch in everyone()]).sum() / number
        mtp.backward(torch.tensor(weight, dtype=torch.float64))
        expected = flat(reference) + whole(everyone())
        yield of_window(code, wrap(Model(), kind), expected, weight == 0.3, mtp_loss_sum=mtp_loss_sum)


def packed(rank: int, code: str) -> Runs:
    """Documents in rows are documents apart, and not rows as they are: the control."""
    starts, parts = (torch.arange(LENGTH) >= 2).long(), [slice(2), slice(2, None)]
    own = [{**batch, "document_ids": starts.expand_as(batch["labels"])} for batch in batches_of(rank)]
    apart = [{key: value[:, part] for key, value in batch.items()} for batch in everyone() for part in parts]
    for batches, is_right in ((apart, True), (everyone(), False)):
        yield of_window(code, wrap(Model(), "ddp"), whole(batches), is_right, micro_batches=own)


def experts(rank: int, code: str) -> Runs:
    """The dense part, and this rank's expert."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    model, reference, own = Adapted(), Adapted(), mesh["experts"].get_local_rank()
    expert = model.adapters[own]
    model.adapters[1 - own] = nn.Identity()  # is on another rank
    model.forward = partial(model.forward, index=own)
    fully_shard(expert, mesh=mesh["data"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    parts = [(partial(reference, index=r % 2), batch) for r in range(4) for batch in batches_of(r)]
    (sum(sum_loss(*part) for part in parts) / sum(num_valid(batch) for _, batch in parts)).backward()
    yield of_window(code, model, torch.cat([flat(reference.base), flat(reference.adapters[own])]))


def loss_parallel(rank: int, code: str) -> Runs:
    """Two data ranks of two tensor-parallel ranks, under FSDP2, then as copies; the control counts all four ranks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for group in ("", ', group=mesh["data"]', ", group=torch.distributed.group.WORLD"):
        model, is_copied = Model(), "data" in group
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(output_layouts=Replicate()), "down": head})
        if not is_copied:
            fully_shard(model, mesh=mesh["data"])
        changed = code.replace("count_valid_tokens)", f"count_valid_tokens{group})")
        changed += 'all_reduce_grads_(model, mesh["data"])\n' * is_copied
        names = {"micro_batches": batches_of(mesh["data"].get_local_rank()), "mesh": mesh}
        yield of_window(changed, model, whole(everyone()), "WORLD" not in group, **names)


def context(rank: int, code: str, folded: str) -> Runs:
    """With sequences cut over two ranks, of Ulysses if the ring is folded; the control leaves the recipe's sum out."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    data_rank, part = mesh["data"].get_local_rank(), mesh["context"].get_local_rank()
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "own"))["own"]
    group = mesh["context"].get_group()
    ring, ulysses = (alone, group) if folded == "ring_only" else (group, alone)
    names = {"ring_group": ring, "ulysses_group": ulysses, "unified_group": group, "mesh": mesh, "folded": folded}
    names["micro_batches"] = halves(batches_of(data_rank), part)
    for is_right in (True, False) if folded == "none" else (True,):
        model = Model()
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)) if folded == "all" else mesh["data"])
        changed = code if is_right else code.replace("all_reduce_grads_(model, group)", "")
        yield of_window(changed, model, whole(everyone()), is_right, **names)


def pipeline(rank: int, code: str) -> Runs:
    """Of two stages, with two copies of the pipeline under FSDP2; two steps of four micro-batches each."""
    from torch.distributed import pipelining

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stages"))
    copy, index, group = mesh["data"].get_local_rank(), mesh["stages"].get_local_rank(), mesh["stages"].get_group()

    def stage_of(model: Model) -> nn.Module:
        return nn.Sequential(model.embed, model.up) if index == 0 else nn.Sequential(nn.Tanh(), model.down)

    part = stage_of(Model())
    fully_shard(part, mesh=mesh["data"])
    pairs = [batches_of(copy)[start : start + 2] for start in (0, 2)]
    names = {
        "ScheduleGPipe": pipelining.ScheduleGPipe,
        "stages_group": group,
        "stage": pipelining.PipelineStage(part, index, 2, torch.device("cpu"), group=group),
        "loader": [{key: torch.cat([batch[key] for batch in pair]) for key in pair[0]} for pair in pairs],
        "optimizer": torch.optim.SGD(part.parameters(), lr=0.5),
    }
    reference = trained([everyone(slice(0, 2)), everyone(slice(2, 4))])
    yield Run(code, names, lambda _: parameters(part), parameters(stage_of(reference)))


def validation(rank: int, code: str) -> Runs:
    """The ranks have 3, 2 and 1 batches, the last of them without a token; the control has no weights."""
    own = [batches_of(r)[r : 3 if r < 2 else 4] for r in range(dist.get_world_size())]
    expected = one_process(Model(), [batch for batches in own for batch in batches]).loss.exp()
    for changed, is_right in ((code, True), (code.replace(", weight=num_items", ""), False)):
        names = {"model": wrap(Model(), "ddp"), "validation_loader": own[rank], "device": "cpu"}
        yield Run(changed, names, lambda names: names["perplexity"], expected, is_right)


def pooled(rank: int, code: str) -> Runs:
    """Training with a pooled loss over windows of 16 micro-batches."""

    def rows(of: int) -> list[tuple[Tensor, Tensor]]:
        drawn = [normal(3 + index % 2, 7, seed=32 * of + index) for index in range(32)]
        return [(features, (features[:, 0] > 0.5).long()) for features in drawn]

    model, reference = wrap(Model(num_outputs=1), "ddp"), Model(num_outputs=1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    loss_fn = fullrank.SmoothAPLoss(1, temperature=0.1, gather_distributed=False)
    for start in (0, 16):
        optimizers[1].zero_grad()
        features, targets = map(torch.cat, zip(*(pair for r in range(2) for pair in rows(r)[start : start + 16])))
        loss_fn(reference(features), targets).backward()
        optimizers[1].step()
    names = {"model": model, "row_loader": rows(rank), "optimizer": optimizers[0]}
    yield Run(code, names, lambda _: parameters(model), parameters(reference))


# How many ranks, what makes the runs, and the arguments of that. The verbs run under each wrapper in tests/conformance.
RECIPES: dict[str, tuple[int, Callable[..., Runs], tuple[Any, ...]]] = {
    "loop, ddp": (2, loop, ("ddp", LOOP, 4)),
    "loop, hsdp": (4, loop, ("hsdp", LOOP, 4)),
    "scaler": (2, loop, ("ddp", *blocks("GradScaler"), NUM_BATCHES)),
    "server": (2, loop, ("fsdp2", SERVER, 3)),
    "means": (2, window, ("ddp", MEANS)),
    "accelerate": (2, window, ("ddp", *blocks("Accelerate"))),
    "injected": (2, inside, ("fsdp2", INJECTED)),
    "several losses": (2, several_losses, ("ddp", SEVERAL)),
    "packed": (2, packed, (*blocks("Packed sequences"),)),
    "experts": (4, experts, (*blocks("Experts"),)),
    "loss parallel": (4, loss_parallel, (*blocks("Loss parallel"),)),
    **{f"context, {name}": (4, context, (CONTEXT, name)) for name in ("all", "none", "ring_only", "ulysses_only")},
    "pipeline": (4, pipeline, (*blocks("Pipeline schedules"),)),
    "validation": (3, validation, (*blocks("Validation"),)),
    "pooled": (2, pooled, (*blocks("Pooled losses"),)),
}


def test_every_block_is_run() -> None:
    assert {*blocks()} - {given for *_, arguments in RECIPES.values() for given in arguments} == {*NAMES}


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for name, (size, *_) in RECIPES.items()])
@on_ranks(...)
def test_a_recipe(rank: int, name: str) -> None:
    _, runs, arguments = RECIPES[name]
    for run in runs(rank, *arguments):
        names = run_block("\n".join([*NAMES, run.code]), {"loader": [], "optimizer": None, **run.names})
        wrong = error(run.found(names), run.expected)
        assert wrong <= LIMIT if run.is_right else wrong > 1e-3, run.code
