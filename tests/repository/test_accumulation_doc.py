"""Every recipe of docs/accumulation.md runs as it stands, and gives the gradient of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
from batches import LENGTH, Batch, halves, make_batch, num_valid, one_process, sum_loss
from integration_cases import flat as parameters
from meshes import init_device_mesh
from on_ranks import on_ranks
from pages import run_block
from subjects import Adapted, Headless, Model, Router, error, wrap
from subjects import gradient as flat
from torch import Tensor, nn
from workers import WorkerPool, get_pool

import fullrank

pytestmark = pytest.mark.slow

NUM_BATCHES = 6


def run_blocks(codes: list[str], **names: Any) -> dict[str, Any]:
    """Execute blocks of the document one after another, on ``names``; return all names."""
    return run_block("\n".join(codes), names)


def batches_of(rank: int) -> list[Batch]:
    """Return the micro-batches of one rank; one of them without valid labels."""
    return [make_batch(rank, index, empty=index == rank) for index in range(NUM_BATCHES)]


def training(rank: int, kind: str, recipe: list[str], size: int) -> None:
    """Train in windows of ``size``, as one process does."""
    model, reference, ranks = wrap(Model(), kind), Model(), range(dist.get_world_size())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    names = {"optimizer": optimizers[0], "loader": batches_of(rank), "scaler": torch.amp.GradScaler("cpu")}
    found = run_blocks(NAMES + recipe, model=model, micro_batches=batches_of(rank), **names)
    if "on_step" in found:
        for number, batch in enumerate(batches_of(rank)):
            found["on_backward"](batch)
            if number % size == size - 1:
                found["on_step"]()
    for start in range(0, NUM_BATCHES, size):
        one_process(reference, [batch for r in ranks for batch in batches_of(r)[start : start + size]])
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizers[1].step()
    assert error(parameters(model), parameters(reference)) <= LIMIT


def whole(batches: list[Batch], model: nn.Module | None = None) -> Tensor:
    """Return the gradient of one process with all of ``batches``."""
    return one_process(Model() if model is None else model, batches).gradient


LIMIT = 1e-12  # float64
blocks = partial(pages.blocks, "accumulation.md")
NAMES = blocks("Recipes")
LOOP, MEANS = blocks("Plain, DDP, FSDP2, HSDP")
CHUNKED, INJECTED = blocks("Losses that back-propagate themselves")


def test_every_block_is_run_here() -> None:
    tested = ["Experts", "Context parallelism", "Pipeline schedules", "GradScaler", "Accelerate", "Pooled losses"]
    tested += ["A server, whose calls come one by one", "Packed sequences", "Several losses with counts of their own"]
    tested += ["Loss parallel", "Validation"]
    assert [len(blocks(section)) for section in tested] == [1] * len(tested)
    others = len(NAMES) + len([LOOP, MEANS, CHUNKED, INJECTED])
    assert pages.PAGES["accumulation.md"].count("```python") == others + len(tested)


LOOPS = {f"loop, {kind}": (size, kind, [LOOP], 4) for kind, size in (("ddp", 2), ("fsdp2", 2), ("hsdp", 4))}
LOOPS["scaler"] = 2, "ddp", blocks("GradScaler"), NUM_BATCHES
LOOPS |= {f"server, {kind}": (2, kind, blocks("A server, whose calls come one by one"), 3) for kind in ("ddp", "fsdp2")}


@pytest.mark.parametrize(("world_size", "kind", "recipe", "size"), LOOPS.values(), ids=LOOPS)
def test_a_training(world_size: int, kind: str, recipe: list[str], size: int) -> None:
    """Six micro-batches in windows of four: four and two. The server takes two steps of three calls, by one object."""
    get_pool(world_size)(training, kind, recipe, size)


def test_a_mean_of_means_in_the_loop_is_seen(pool_of_two: WorkerPool) -> None:
    wrong = LOOP.replace(
        "step.backward(loss_sum(model, batch))",
        "causal_lm_loss(model(batch['tokens']), batch['labels']).div(4).backward()",
    )
    assert wrong != LOOP
    with pytest.raises(AssertionError, match="expected one backward, got 0"):
        pool_of_two(training, "ddp", [wrong], 4)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@on_ranks(2)
def test_a_loss_that_back_propagates_itself(rank: int, kind: str, is_chunked: bool, is_right: bool) -> None:
    """Two windows; the control has the factor of one process."""
    inner, reference, router = (Headless() if is_chunked else Model()), Model(), Router()
    for each in (inner, reference):
        each.down.register_parameter("bias", None)
    everyone = [batch for r in range(2) for batch in batches_of(r)]
    losses = [sum_loss(reference, batch) for batch in everyone]
    if not is_chunked:
        inner.middle.append(router)
        losses += [0.1 * reference.up(reference.embed(batch["tokens"])).square().sum() for batch in everyone]
    expected = torch.stack(losses).sum() / sum(map(num_valid, everyone))
    expected.backward()
    model, code = wrap(inner, kind), (CHUNKED.replace("1024", "5") if is_chunked else INJECTED)
    if not is_right:
        code = code.replace("step.factor", "step.factor / 2")
    for _ in range(2):
        names = {"model": model, "head": inner.down, "router": router, "micro_batches": batches_of(rank)}
        step = run_blocks([*NAMES, code], loader=[], optimizer=None, **names)["step"]
        assert (error(flat(model), flat(reference)) <= LIMIT) == is_right
        assert error(step.mean_loss(), expected.detach()) <= LIMIT
        model.zero_grad()


def mtp_loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    logits, labels = model(batch["tokens"])[:, :-2], batch["labels"][:, 2:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("weight", [0.3, 0.2])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@on_ranks(2)
def test_several_losses(rank: int, kind: str, weight: float) -> None:
    """The control has another weight."""
    model, reference = wrap(Model(), kind), Model()
    everyone = [batch for r in range(2) for batch in batches_of(r)]
    number = sum(int((batch["labels"][:, 2:] != -100).sum()) for batch in everyone)
    mtp = torch.stack([mtp_loss_sum(reference, batch) for batch in everyone]).sum() / number
    mtp.backward(torch.tensor(weight, dtype=torch.float64))
    expected = flat(reference).clone() + whole(everyone)
    names = {"model": model, "mtp_loss_sum": mtp_loss_sum, "micro_batches": batches_of(rank)}
    run_blocks([*NAMES, *blocks("Several losses with counts of their own")], loader=[], optimizer=None, **names)
    assert (error(flat(model), expected) <= LIMIT) == (weight == 0.3)


WINDOWS = {
    "means, ddp": ("ddp", [MEANS]),
    "means, fsdp2": ("fsdp2", [MEANS]),
    "Accelerate": ("ddp", blocks("Accelerate")),
}


@pytest.mark.parametrize(("kind", "recipe"), WINDOWS.values(), ids=WINDOWS)
@on_ranks(2)
def test_a_window(rank: int, kind: str, recipe: list[str]) -> None:
    model, names = Model(), {}
    if "accelerator" in "".join(recipe):
        from accelerate import Accelerator

        names["accelerator"] = Accelerator(cpu=True)
    run_blocks(NAMES + recipe, model=wrap(model, kind), micro_batches=batches_of(rank), **names)
    assert error(flat(model), whole([batch for r in range(2) for batch in batches_of(r)])) <= LIMIT


@on_ranks(2)
def test_packed_sequences(rank: int) -> None:
    """Documents in rows are documents apart, and not rows as they are: the control."""
    model, starts = wrap(Model(), "ddp"), (torch.arange(LENGTH) >= 2).long()
    own = [{**batch, "document_ids": starts.expand_as(batch["labels"])} for batch in batches_of(rank)]
    run_blocks(NAMES + blocks("Packed sequences"), model=model, micro_batches=own)
    everything = [batch for r in range(2) for batch in batches_of(r)]
    parts = [slice(2), slice(2, None)]
    apart = [{key: value[:, part] for key, value in b.items()} for b in everything for part in parts]
    assert error(flat(model), whole(apart)) <= LIMIT
    assert error(flat(model), whole(everything)) > 1e-3


@on_ranks(4)
def test_experts(rank: int) -> None:
    """The dense part, and this rank's expert."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    model, reference, own = Adapted(), Adapted(), mesh["experts"].get_local_rank()
    expert = model.adapters[own]
    model.adapters[1 - own] = nn.Identity()  # is on another rank
    model.forward = partial(model.forward, index=own)
    fully_shard(expert, mesh=mesh["data"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    run_blocks(NAMES + blocks("Experts"), model=model, micro_batches=batches_of(rank))
    parts = [(partial(reference, index=r % 2), batch) for r in range(4) for batch in batches_of(r)]
    (sum(sum_loss(*part) for part in parts) / sum(num_valid(batch) for _, batch in parts)).backward()
    assert error(flat(model.base), flat(reference.base)) <= LIMIT
    assert error(flat(expert), flat(reference.adapters[own])) <= LIMIT


@on_ranks(4)
def test_loss_parallel(rank: int) -> None:
    """Two data ranks of two tensor-parallel ranks, under FSDP2, then as copies; the control counts all four ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    own, (recipe,) = batches_of(mesh["data"].get_local_rank()), blocks("Loss parallel")
    everything = whole([batch for r in range(2) for batch in batches_of(r)])
    for group, is_wrapped in (
        ("", True),
        (', group=mesh["data"]', False),
        (", group=torch.distributed.group.WORLD", True),
    ):
        model = Model()
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(output_layouts=Replicate()), "down": head})
        if is_wrapped:
            fully_shard(model, mesh=mesh["data"])
        code = recipe.replace("count_valid_tokens)", f"count_valid_tokens{group})")
        run_blocks([*NAMES, code], model=model, micro_batches=own, mesh=mesh)
        if not is_wrapped:
            fullrank.all_reduce_grads_(model, mesh["data"])
        assert (error(flat(model), everything) <= LIMIT) == ("WORLD" not in group)


@pytest.mark.parametrize("folded", ["all", "none", "ring_only", "ulysses_only"])
@on_ranks(4)
def test_context_parallelism(rank: int, folded: str) -> None:
    """With sequences cut over two ranks, of Ulysses if the ring is folded; the control leaves the recipe's sum out."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    data_rank, part = mesh["data"].get_local_rank(), mesh["context"].get_local_rank()
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("others", "own"))["own"]
    context, (recipe,) = mesh["context"].get_group(), blocks("Context parallelism")
    ring, ulysses = (alone, context) if folded == "ring_only" else (context, alone)
    groups = {"ring_group": ring, "ulysses_group": ulysses, "unified_group": context}
    without = recipe.replace("all_reduce_grads_(model, group)", "")
    for code, is_right in ((recipe, True), *([(without, False)] if folded == "none" else [])):
        model = Model()
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)) if folded == "all" else mesh["data"])
        own = halves(batches_of(data_rank), part)
        run_blocks([*NAMES, code], model=model, micro_batches=own, mesh=mesh, folded=folded, **groups)
        found = error(flat(model), whole([b for r in range(2) for b in batches_of(r)]))
        assert found <= LIMIT if is_right else found > 0.05


@on_ranks(4)
def test_pipeline_schedules(rank: int) -> None:
    """Of two stages, with two copies of the pipeline under FSDP2; two steps of four micro-batches each."""
    from torch.distributed import pipelining
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stages"))
    copy, index = mesh["data"].get_local_rank(), mesh["stages"].get_local_rank()
    full, reference = Model(), Model()
    part = nn.Sequential(full.embed, full.up) if index == 0 else nn.Sequential(nn.Tanh(), full.down)
    fully_shard(part, mesh=mesh["data"])

    def loader(copy: int) -> list[Batch]:
        parts = [batches_of(copy)[start : start + 2] for start in (0, 2)]
        return [{key: torch.cat([batch[key] for batch in part]) for key in ("tokens", "labels")} for part in parts]

    run_blocks(
        NAMES + blocks("Pipeline schedules"),
        ScheduleGPipe=pipelining.ScheduleGPipe,
        stages_group=mesh["stages"].get_group(),
        stage=pipelining.PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["stages"].get_group()),
        loader=loader(copy),
        optimizer=torch.optim.SGD(part.parameters(), lr=0.5),
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for batches in zip(*map(loader, range(2))):
        one_process(reference, batches)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
    own = nn.Sequential(reference.embed, reference.up) if index == 0 else nn.Sequential(reference.down)
    assert error(parameters(part), parameters(own)) <= LIMIT


@on_ranks(2, 3)
def test_validation(rank: int) -> None:
    """The ranks have 3, 2 and 1 batches, the last of them without a token; the control has no weights."""
    own, (recipe,) = [batches_of(r)[r : 3 if r < 2 else 4] for r in range(dist.get_world_size())], blocks("Validation")
    everything = [batch for batches in own for batch in batches]
    expected = one_process(Model(), everything).loss.exp()
    unweighted = recipe.replace(", weight=num_items", "")
    assert unweighted != recipe
    for code, is_right in ((recipe, True), (unweighted, False)):
        names = {"model": wrap(Model(), "ddp"), "validation_loader": own[rank], "device": "cpu"}
        found = run_blocks([*NAMES, code], **names)["perplexity"]
        assert (error(found, expected) <= LIMIT) == is_right


@on_ranks(2)
def test_pooled_losses(rank: int) -> None:
    """The parameters after training with a pooled loss over windows of 16 micro-batches."""

    def rows(of: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(of)
        drawn = [torch.randn(3 + index % 2, 7, generator=generator, dtype=torch.float64) for index in range(32)]
        return [(features, (features[:, 0] > 0.5).long()) for features in drawn]

    model, reference = wrap(Model(num_outputs=1), "ddp"), Model(num_outputs=1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, reference)]
    run_blocks(NAMES + blocks("Pooled losses"), model=model, row_loader=rows(rank), optimizer=optimizers[0])
    loss_fn = fullrank.SmoothAPLoss(1, temperature=0.1, gather_distributed=False)
    for start in (0, 16):
        window = [pair for r in range(2) for pair in rows(r)[start : start + 16]]
        optimizers[1].zero_grad()
        features, targets = (torch.cat(parts) for parts in zip(*window))
        loss_fn(reference(features), targets).backward()
        optimizers[1].step()
    assert error(parameters(model), parameters(reference)) <= LIMIT
