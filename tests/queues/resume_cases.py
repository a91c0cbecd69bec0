"""What the worker processes run for the tests of checkpoints: losses, the recipes of the documentation, the example."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
from pathlib import Path
from typing import Any

import loss_cases
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fullrank import LossWarmupWrapper, SigmoidFocalLoss, SmoothAPLoss

# capacity of the queue, steps of some 22 rows before the save, dtype of the logits
FILLS = {
    "empty": (64, 0, torch.float64),
    "half-filled": (200, 3, torch.float32),
    "wrapped": (40, 3, torch.float64),
}
BLENDING = "blending"  # a warm-up wrapper: its warm-up averages per rank first, so its bits depend on their number
CASES = [(name, fill) for name in (*loss_cases.POOLED, BLENDING) for fill in FILLS]
# Where the 24 rows of a step are cut: no two ranks have as many, and of three ranks one has none.
CUTS = {1: (0, 24), 2: (0, 9, 24), 3: (0, 0, 17, 24)}
STEPS_AFTER = 3


def make_loss(name: str, capacity: int, **settings: Any) -> Any:
    """Return a loss whose pool is drawn, so that the queue, the temperature and the draws all matter."""
    if name == BLENDING:
        main = make_loss("smooth_ap", capacity, **settings)
        return LossWarmupWrapper(
            SigmoidFocalLoss(alpha=-1, gamma=0), main, warmup_steps=1, blend_steps=7, temp_start=0.5, temp_end=0.1
        )
    loss = loss_cases.POOLED[name]
    return loss.module(1, **{"queue_size": capacity, "max_pool_size": 50, **loss.default, **settings})


def world() -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def step(loss: Any, index: int, dtype: torch.dtype) -> float:
    """Return the loss of the same 24 rows, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(index)
    logits = torch.randn(24, 1, dtype=dtype, generator=generator)
    targets = torch.randint(0, 2, (24,), generator=generator)
    iid = torch.rand(24, generator=generator) < 0.8
    weight = torch.rand(24, dtype=dtype, generator=generator)
    if hasattr(loss, "on_train_batch_start"):
        loss.on_train_batch_start(index)
    rank, world_size = world()
    rows = slice(*CUTS[world_size][rank : rank + 2])
    if isinstance(loss, LossWarmupWrapper):
        return loss(logits[rows], targets[rows, None]).item()
    targets[::12] = -100
    return loss(logits[rows], targets[rows], iid[rows], sample_weight=weight[rows]).item()


def train(loss: Any, fill: str) -> None:
    """Take the steps before the save."""
    _, steps, dtype = FILLS[fill]
    for index in range(steps):
        step(loss, index, dtype)
    if not isinstance(loss, LossWarmupWrapper):
        loss.temperature *= 0.7


def steps_after(loss: Any, fill: str) -> list[float]:
    """Return the losses of the steps after the save."""
    _, steps, dtype = FILLS[fill]
    return [step(loss, index, dtype) for index in range(steps, steps + STEPS_AFTER)]


def path_of(folder: str, name: str, fill: str) -> Path:
    """Return where the state of a case is saved."""
    return Path(folder) / f"{name}-{fill}.pt"


def save_all(rank: int, folder: str) -> list[list[float]]:
    """For each case: train, save on rank 0, go on; return the losses after the save."""
    results = []
    for name, fill in CASES:
        loss = make_loss(name, FILLS[fill][0])
        train(loss, fill)
        if rank == 0:
            torch.save(loss.state_dict(), path_of(folder, name, fill))
        results.append(steps_after(loss, fill))
    return results


def load(folder: str, name: str, fill: str) -> Any:
    """Return a new loss that has loaded what :func:`save_all` saved."""
    loss = make_loss(name, FILLS[fill][0])
    loss.load_state_dict(torch.load(path_of(folder, name, fill), weights_only=True))
    return loss


def resume_all(rank: int, folder: str) -> list[list[float]]:
    """For each case: load and go on; return the losses."""
    return [steps_after(load(folder, name, fill), fill) for name, fill in CASES]


def load_on_rank_zero_only(rank: int, folder: str, name: str) -> tuple[str, list[float]]:
    """Return the error of the next step, and the losses after the other ranks have loaded too."""
    fill = "wrapped"
    loss = load(folder, name, fill) if rank == 0 else make_loss(name, FILLS[fill][0])
    text = "no error"
    try:
        steps_after(loss, fill)
    except RuntimeError as error:
        text = str(error)
    if rank != 0:
        loss = load(folder, name, fill)
    return text, steps_after(loss, fill)


def temperature_on_rank_zero_only(rank: int) -> str:
    """Return the error of a loss without a queue of which one rank has loaded a cooler one."""
    cooled, loss = (make_loss("smooth_ap", 0, max_pool_size=None) for _ in range(2))
    cooled.temperature *= 0.7
    if rank == 0:
        loss.load_state_dict(cooled.state_dict())
    try:
        step(loss, 0, torch.float64)
    except RuntimeError as error:
        return str(error)
    return "no error"


class Job:
    """A model in float64 under DDP or FSDP2, its optimizer, and a loss in the middle of its blend."""

    def __init__(self, wrapper: str, seed: int) -> None:
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.model: Any = DistributedDataParallel(network) if wrapper == "DDP" else fully_shard(network)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.loss = make_loss(BLENDING, 64)

    @property
    def parts(self) -> tuple[Any, ...]:
        """What the recipes are given."""
        return self.model, self.optimizer, self.loss

    def take_steps(self, first: int, last: int) -> tuple[list[float], list[float]]:
        """Return the losses of the steps, and the weights after them."""
        losses = []
        for index in range(first, last):
            generator = torch.Generator().manual_seed(1000 * dist.get_rank() + index)
            features = torch.randn(12, 6, dtype=torch.float64, generator=generator)
            self.loss.on_train_batch_start(index)
            self.optimizer.zero_grad()
            loss = self.loss(self.model(features), (features.sum(dim=1, keepdim=True) > 0).long())
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.model.parameters())
        return losses, torch.cat([tensor.detach().flatten() for tensor in whole]).tolist()


def run_recipe(rank: int, saver: str, loader: str, wrapper: str, path: str) -> list[Any]:
    """Save with one block of the documentation, load with another; return how the two jobs, and a new one, go on."""
    names: dict[str, Any] = {}
    exec(saver, names)
    job, fresh = Job(wrapper, 0), Job(wrapper, 1)
    job.take_steps(0, 4)
    saving = names["save"](path, *job.parts)
    kept = job.take_steps(4, 7)
    if saving is not None:
        saving.result()
        dist.barrier()
    exec(loader, names)
    names["load"](path, *fresh.parts)
    return [kept, fresh.take_steps(4, 7), Job(wrapper, 0).take_steps(4, 7)]


def run_submodule(rank: int, wrapper: str, path: str) -> list[int]:
    """Save and load a model that holds its loss, by the functions of torch; return the lengths of the queues."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    jobs = [Job(wrapper, seed) for seed in (0, 1)]
    jobs[0].take_steps(0, 4)
    whole, fresh = (nn.ModuleDict({"network": job.model, "loss": job.loss}) for job in jobs)
    dcp.save(get_model_state_dict(whole), checkpoint_id=path)
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(fresh, state)
    queues = [job.loss.main_loss.queue for job in jobs]
    assert torch.equal(queues[0].rows().logits, queues[1].rows().logits)
    assert torch.equal(queues[0].checksum, queues[1].checksum)
    return [len(queue) for queue in queues]


def run_example(rank: int, folder: str, steps: int, forget: str | None = None) -> tuple[str, str]:
    """Run ``train`` of the example in this group, from the checkpoint on if there is one; return its digests."""
    example = import_example()
    options = argparse.Namespace(
        steps=steps, batch_size=24, save_every=10, folder=Path(folder), kill_at=None, forget=forget
    )
    with contextlib.redirect_stdout(None):
        model, loss = example.train(options)
    rows = loss.main_loss.queue.rows()
    return example.digest(model.state_dict()), example.digest({"logits": rows.logits, "targets": rows.targets})


def first_gradient_is_the_second(rank: int, settles: bool) -> bool:
    """Return whether DDP gives the same bits for the same batch in its first step and in its second."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh()))
    features = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
    if settles:
        import_example().settle(model, features[:1])
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(features).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return all(torch.equal(*pair) for pair in zip(*gradients))


def tear_a_save(rank: int, folder: str) -> tuple[str, int, float]:
    """Save, then fail in the middle of a second save; return the error, and what is loaded."""
    example = import_example()
    path, model = Path(folder) / "checkpoint.pt", nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0)
    example.save(path, 7, {"model": model})
    nn.init.constant_(model.weight, 2.0)
    text = ""
    try:
        example.save(path, 8, {"model": model, "torn": Unpicklable()})
    except RuntimeError as error:
        text = str(error)
    dist.barrier()  # both ranks have saved
    step_number = example.load(path, {"model": model})
    return text, step_number, model.weight.item()


class Unpicklable:
    """A part of a checkpoint whose writing fails after the tensors before it are on the disk."""

    def state_dict(self) -> Unpicklable:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("disk full")


@functools.cache
def import_example() -> Any:
    """Return the example as a module; its folder is no package."""
    path = Path(__file__).resolve().parents[2] / "examples" / "resume.py"
    spec = importlib.util.spec_from_file_location("resume", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(one: Any, other: Any) -> bool:
    """Return True when two states are equal, bit for bit in their tensors."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def small_loss(**settings: Any) -> SmoothAPLoss:
    """Return a loss of two classes with a queue of eight rows, or what ``settings`` make of it."""
    return SmoothAPLoss(**{"num_classes": 2, "queue_size": 8, "temperature": 0.5, **settings})
