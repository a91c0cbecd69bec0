"""docs/recipes/fsdp.md: FSDP2 with tensor parallelism and torch.distributed.checkpoint, and FSDP1."""

from __future__ import annotations

import importlib
import importlib.util
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from integration_cases import (
    average_precision,
    change,
    error,
    flat,
    make_encoder,
    make_rows,
    of_rows,
    own_pool,
    train,
)
from meshes import init_device_mesh
from pages import blocks, run_block
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from workers import WorkerPool

import fullrank

pytestmark = pytest.mark.slow

WRAP, FIT, FSDP1, DEEPSPEED = blocks("recipes/fsdp.md")
QUEUE = ("num_classes=1", "num_classes=1, queue_size=64, temperature=0.5")
LIMIT = 1e-12  # float64, the promise


def make_model() -> nn.Module:
    """Return the encoder in float64 with names for its layers."""
    return nn.Sequential(OrderedDict(zip(("up", "tanh", "down"), make_encoder().double().children())))


def full(model: nn.Module) -> Tensor:
    """Return all parameters of a sharded model."""
    return torch.cat([parameter.detach().full_tensor().reshape(-1) for parameter in model.parameters()])


def loss_alone() -> nn.Module:
    """Return the loss of one process."""
    return fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.5, gather_distributed=False)


def sharded(rank: int, recipe: str) -> tuple[float, float, float]:
    """Return the errors of loss, gradient norm and clipped gradient under FSDP2 and tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    features, targets = make_rows(40)
    own = slice(0, 25) if mesh["data"].get_local_rank() == 0 else slice(25, 40)
    model, reference = make_model(), make_model()
    names = {"model": model, "mesh": mesh, "features": features[own].double(), "targets": targets[own]}
    found = run_block(recipe, names)
    value = loss_alone()(reference(features.double()), targets)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    gradients = torch.cat([p.grad.full_tensor().reshape(-1) for p in model.parameters()])
    expected = torch.cat([p.grad.reshape(-1) for p in reference.parameters()])
    return error(found["loss"].detach(), value.detach()), error(found["norm"], norm), error(gradients, expected)


def fitted(rank: int, wrap: str, fit: str, folder: str) -> tuple[float, list[float], float, list[bool]]:
    """Return the error of the parameters after two epochs, the metrics, the last one by scikit-learn, and three flags.

    The flags: whether a job that resumes ends with the same bits, with the state of the loss and without; and whether a
    resumed job that is worse keeps the best.
    """
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
        setup = wrap.partition("loss = loss_fn(")[0]
        names = run_block(setup, {"model": model, "mesh": mesh, **given})
        run_block(fit, names)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if metrics is not None:
            names["evaluate"] = lambda *_: metrics.pop(0)
        if forgets:
            names["loss_fn"].load_state_dict = lambda state, *args: None
        val = [(features[side::2], targets[side::2])]
        given = optimizer, names["loss_fn"], batches_of, val, mesh, f"{folder}/{place}", epochs, first
        return model, names["fit"](model, *given)

    model, history = job("through", 2)
    reference = make_model()
    before, steps = flat(reference), [steps_of(epoch) for epoch in range(2)]
    after, *_ = train(reference, of_rows(loss_alone(), reference, features, targets), steps, max_norm=1.0)
    expected = average_precision(reference, features, targets)
    found = error(full(model) - before, after - before)
    same = []
    for forgets in (False, True):
        job("killed", 1)
        dist.barrier()
        again, _ = job("killed", 2, first=1, forgets=forgets)
        same.append(torch.equal(full(model), full(again)))
    written = []  # when the best was written: not by the resumed job, which is worse
    for first, metrics in ((0, [0.1, 0.9, 0.3]), (2, [0.3, 0.5])):
        job("worse", first + len(metrics) - 1, first=first, metrics=metrics)
        dist.barrier()
        written.append((Path(folder) / "worse" / "best" / ".metadata").stat().st_mtime_ns)
    same.append(written[0] == written[1])
    return found, history, expected, same


def steps_of(epoch: int) -> list[list[int]]:
    """Return the rows of the steps of an epoch, of all ranks."""
    order = torch.randperm(48, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [order[:24], order[24:]]


def older(rank: int, recipe: str) -> tuple[float, float, float]:
    """Return the errors of loss, gradient norm and step under FSDP1, after one step."""
    features, targets = make_rows(40)
    own = slice(0, 25) if rank == 0 else slice(25, 40)
    network, reference = make_encoder(), make_encoder()
    before = flat(reference)
    names: dict[str, Any] = {"network": network, "features": features[own], "targets": targets[own]}
    found = run_block(recipe, names)
    value = loss_alone()(reference(features), targets)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    for model in (found["model"], reference):
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    with FullyShardedDataParallel.summon_full_params(found["model"]):
        step = change(found["model"], before, flat(reference))
    return error(found["loss"].detach(), value.detach()), error(torch.as_tensor(found["norm"]), norm), step


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
    expected, *_ = train(reference, of_rows(loss_fn, reference, features, targets), [steps])
    parameters = list(found["engine"].module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        error = change(found["engine"].module, before, expected)
    return error, len(found["loss_fn"].queue) == 48


@pytest.mark.parametrize("is_control", [False, pytest.param(True, marks=pytest.mark.full)])
def test_fsdp2_with_tensor_parallelism(pool_of_four: WorkerPool, is_control: bool) -> None:
    """The control gathers over all ranks: every row is there twice and weighs half, but it has a rival more."""
    recipe = WRAP.replace(*QUEUE)
    everyone = recipe.replace(', group=mesh["data"]', "")
    assert everyone != recipe
    for errors in pool_of_four(sharded, everyone if is_control else recipe):
        assert errors[1] > 1e-3 if is_control else max(errors) <= LIMIT


def test_it_validates_saves_and_resumes_as_one_process(pool_of_four: WorkerPool, tmp_path: Path) -> None:
    for parameters, history, expected, same in pool_of_four(fitted, WRAP.replace(*QUEUE), FIT, str(tmp_path)):
        assert parameters <= 1e-6
        assert history[0] < history[1]  # the first epoch improves the metric
        assert history[-1] == pytest.approx(expected, rel=1e-6)
        assert same == [True, False, True]  # the second is the control
    assert {path.name for path in (tmp_path / "through").iterdir()} <= {"best", "last"}


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which compiles at first use"
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    recipe = DEEPSPEED.replace(*QUEUE).replace('"stage": 3', f'"stage": {stage}')
    # Not Adam: a loss of order leaves the last bias a gradient of rounding errors, which Adam makes as large as others.
    recipe = recipe.replace('"Adam", "params": {"lr": 1e-2, "torch_adam": True}', '"SGD", "params": {"lr": 0.5}')
    recipe = recipe.replace('"optimizer"', '"zero_allow_untested_optimizer": True, "optimizer"')
    pool = own_pool("deepspeed")  # the engine keeps state of the process
    for parameters, has_queue in next(pool)(engine, recipe, str(tmp_path)):
        assert parameters <= 1e-6
        assert has_queue
    pool.close()


def test_fsdp1(pool_of_two: WorkerPool) -> None:
    for errors in pool_of_two(older, FSDP1.replace(*QUEUE)):
        assert max(errors) <= 2e-6  # float32, the only dtype that its clip_grad_norm_ takes


@pytest.mark.full
def test_control_the_norm_of_pieces(pool_of_two: WorkerPool) -> None:
    pieces = FSDP1.replace("model.clip_grad_norm_(1.0)", "fullrank.clip_grad_norm_(model, 1.0)")
    assert pieces != FSDP1
    assert max(norm for _, norm, _ in pool_of_two(older, "import fullrank\n" + pieces.replace(*QUEUE))) > 0.05
