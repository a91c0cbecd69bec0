"""docs/recipes/fsdp.md: FSDP2 with tensor parallelism and torch.distributed.checkpoint, and FSDP1."""

from __future__ import annotations

import importlib
import importlib.util
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from integration_cases import average_precision, change, flat, launch, loss_alone, make_encoder, make_rows, of_rows
from integration_cases import train as train_alone
from meshes import init_device_mesh
from on_ranks import on_ranks
from pages import blocks, run_block
from subjects import error, gradient
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from workers import WorkerPool

import fullrank

pytestmark = pytest.mark.slow

WRAP, FIT, FSDP1, DEEPSPEED = blocks("recipes/fsdp.md")
QUEUE = ("num_classes=1", "num_classes=1, queue_size=64, temperature=0.5")
LIMIT = 1e-12  # float64, the promise


def make_model() -> nn.Module:
    return nn.Sequential(OrderedDict(zip(("up", "tanh", "down"), make_encoder().double().children())))


@on_ranks(4)
def test_it_validates_saves_and_resumes_as_one_process(rank: int, tmp_path: Path) -> None:
    """Not without the state of the loss; a resumed job that is worse keeps the best checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    side = mesh["data"].get_local_rank()
    features, targets = make_rows(48)
    features = features.double()

    def batches_of(epoch: int) -> list[tuple[Tensor, Tensor]]:
        order = steps_of(epoch)
        halves = [rows[:10] if side == 0 else rows[10:] for rows in order]
        return [(features[rows], targets[rows]) for rows in halves]

    def job(
        place: str, epochs: int, first: int = 0, forgets: bool = False, metrics: list[float] | None = None
    ) -> tuple[nn.Module, list[float]]:
        model = make_model()
        given = {"features": features[:20], "targets": targets[:20]}
        setup = WRAP.replace(*QUEUE).partition("loss = loss_fn(")[0]
        names = run_block(setup, {"model": model, "mesh": mesh, **given})
        run_block(FIT, names)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if metrics is not None:
            names["evaluate"] = lambda *_: metrics.pop(0)
        if forgets:
            names["loss_fn"].load_state_dict = lambda state, *args: None
        val = [(features[side::2], targets[side::2])]
        given = optimizer, names["loss_fn"], batches_of, val, mesh, f"{tmp_path}/{place}", epochs, first
        return model, names["fit"](model, *given)

    model, history = job("through", 2)
    reference = make_model()
    before, steps = flat(reference), [steps_of(epoch) for epoch in range(2)]
    after, *_ = train_alone(reference, of_rows(loss_alone(), reference, features, targets), steps, max_norm=1.0)
    expected = average_precision(reference, features, targets)
    assert change(model, before, after) <= 1e-6
    assert history[0] < history[1]  # the first epoch improves the metric
    assert history[-1] == pytest.approx(expected, rel=1e-6)
    for forgets in (False, True):
        job("killed", 1)
        dist.barrier()
        again, _ = job("killed", 2, first=1, forgets=forgets)
        assert torch.equal(flat(model), flat(again)) != forgets
    written = []  # when the best was written: not by the resumed job, which is worse
    for first, metrics in ((0, [0.1, 0.9, 0.3]), (2, [0.3, 0.5])):
        job("worse", first + len(metrics) - 1, first=first, metrics=metrics)
        dist.barrier()
        written.append((tmp_path / "worse" / "best" / ".metadata").stat().st_mtime_ns)
    assert written[0] == written[1]
    assert {path.name for path in (tmp_path / "through").iterdir()} <= {"best", "last"}


def steps_of(epoch: int) -> list[list[int]]:
    order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [order[:24], order[24:]]


def engine(rank: int, recipe: str, folder: str) -> tuple[float, bool]:
    """Return the error of the parameters after steps of DeepSpeed, and whether the queue is that of one process."""
    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    features, targets = make_rows(48)
    network, reference, loss_fn = make_encoder(), make_encoder(), loss_alone()
    before = flat(reference)
    steps = [slice(start, start + 16) for start in range(0, 48, 16)]
    own = [slice(step.start + 8 * rank, step.start + 8 * rank + 8) for step in steps]
    batches = [(features[rows], targets[rows]) for rows in own]
    found = run_block(recipe.replace("outputs", folder), {"network": network, "batches": batches})
    expected, *_ = train_alone(reference, of_rows(loss_fn, reference, features, targets), [steps])
    parameters = list(found["engine"].module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        error = change(found["engine"].module, before, expected)
    return error, len(found["loss_fn"].queue) == 48


@pytest.mark.parametrize("is_control", [False, pytest.param(True, marks=pytest.mark.full)])
@on_ranks(4)
def test_fsdp2_with_tensor_parallelism(rank: int, is_control: bool) -> None:
    """The control gathers over all ranks: every row is there twice and weighs half, but it has a rival more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    features, targets = make_rows(40)
    own = slice(0, 25) if mesh["data"].get_local_rank() == 0 else slice(25, 40)
    model, reference = make_model(), make_model()
    names = {"model": model, "mesh": mesh, "features": features[own].double(), "targets": targets[own]}
    recipe = WRAP.replace(*QUEUE)
    everyone = recipe.replace(', group=mesh["data"]', "")
    assert everyone != recipe
    found = run_block(everyone if is_control else recipe, names)
    value = loss_alone()(reference(features.double()), targets)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    if is_control:
        assert error(found["norm"], norm) > 1e-3
    else:
        assert error(found["loss"].detach(), value.detach()) <= LIMIT
        assert error(found["norm"], norm) <= LIMIT
        assert error(gradient(model), gradient(reference)) <= LIMIT


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which compiles at first use"
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    recipe = DEEPSPEED.replace(*QUEUE).replace('"stage": 3', f'"stage": {stage}')
    # Not Adam: a loss of order leaves the last bias a gradient of rounding errors, which Adam makes as large as others.
    recipe = recipe.replace('"Adam", "params": {"lr": 1e-2, "torch_adam": True}', '"SGD", "params": {"lr": 0.5}')
    recipe = recipe.replace('"optimizer"', '"zero_allow_untested_optimizer": True, "optimizer"')
    pool = WorkerPool(2)  # the engine keeps state of the process
    pool(launch, "deepspeed")
    for parameters, has_queue in pool(engine, recipe, str(tmp_path)):
        assert parameters <= 1e-6
        assert has_queue
    pool.close()


@pytest.mark.parametrize("is_control", [False, pytest.param(True, marks=pytest.mark.full)])
@on_ranks(2)
def test_fsdp1(rank: int, is_control: bool) -> None:
    """The control takes the norm of the pieces that FSDP1 leaves in .grad."""
    recipe = FSDP1.replace(*QUEUE)
    pieces = recipe.replace("model.clip_grad_norm_(1.0)", "fullrank.clip_grad_norm_(model, 1.0)")
    assert pieces != recipe
    features, targets = make_rows(40)
    own = slice(0, 25) if rank == 0 else slice(25, 40)
    network, reference = make_encoder(), make_encoder()
    names = {"network": network, "features": features[own], "targets": targets[own], "fullrank": fullrank}
    before, found = flat(reference), run_block(pieces if is_control else recipe, names)
    expected, losses, norms = train_alone(
        reference, of_rows(loss_alone(), reference, features, targets), [[[*range(40)]]], max_norm=1.0
    )
    torch.optim.SGD(found["model"].parameters(), lr=0.5).step()
    with FullyShardedDataParallel.summon_full_params(found["model"]):
        step = change(found["model"], before, expected)
    norm = abs(float(found["norm"]) / norms[0] - 1)
    if is_control:
        assert fullrank.all_gather_no_grad(torch.tensor([norm])).max() > 0.05
    else:  # float32, the only dtype that its clip_grad_norm_ takes
        assert max(abs(float(found["loss"]) / losses[0] - 1), norm, step) <= 2e-6
