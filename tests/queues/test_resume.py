"""Checkpoints: a job that is killed and resumed ends with the bits of one that ran through."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import loss_cases
import pages
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pages import run_block
from scripts import imported, run_under_agent
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers import error_of, get_pool

from fullrank import BCEWithLogitsLoss, CrossEntropyLoss, LossWarmupWrapper, SmoothAPLoss
from fullrank.queues.saved_state import NUMBERS

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
        return LossWarmupWrapper(BCEWithLogitsLoss(), main, warmup_steps=1, blend_steps=7, temp_start=0.5, temp_end=0.1)
    return loss_cases.POOLED[name].first.make(**{"queue_size": capacity, "max_pool_size": 50, **settings})


def world() -> tuple[int, int]:
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
    _, steps, dtype = FILLS[fill]
    for index in range(steps):
        step(loss, index, dtype)
    if getattr(loss, "temperature", None) is not None:  # some have none
        loss.temperature *= 0.7


def steps_after(loss: Any, fill: str) -> list[float]:
    _, steps, dtype = FILLS[fill]
    return [step(loss, index, dtype) for index in range(steps, steps + STEPS_AFTER)]


def path_of(folder: str, name: str, fill: str) -> Path:
    return Path(folder) / f"{name}-{fill}.pt"


def save_all(rank: int, folder: str) -> list[list[float]]:
    """For each case: train, save on rank 0, continue; return the losses after the save."""
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
    return [steps_after(load(folder, name, fill), fill) for name, fill in CASES]


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


def run_example(rank: int, folder: str, steps: int, forget: str | None = None) -> tuple[str, str]:
    """Run ``train`` of the example in this group, from the checkpoint on if there is one; return its digests."""
    example = imported(EXAMPLE)
    options = argparse.Namespace(
        steps=steps, batch_size=24, save_every=10, folder=Path(folder), kill_at=None, forget=forget
    )
    with contextlib.redirect_stdout(None):
        model, loss = example.train(options)
    rows = loss.main_loss.queue.rows()
    return example.digest(model.state_dict()), example.digest({"logits": rows.logits, "targets": rows.targets})


class Unpicklable:
    """A part of a checkpoint whose writing fails after the tensors before it are on the disk."""

    def state_dict(self) -> Unpicklable:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("disk full")


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "resume.py"


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


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*drawn down")]

block_with = partial(pages.block_with, "checkpointing.md")
ONE_FILE, DCP, ASYNC, FSDP_FILE = (
    block_with(text)
    for text in ("model.module.load_state_dict", "dcp.load(", "dcp.async_save(", "full_state_dict=True")
)


# The example


def torchrun(folder: Path, *arguments: object) -> str:
    """Run the example on two processes that torchrun's agent may restart, and return what it printed."""
    options = ("--steps", 36, "--folder", folder, *arguments)
    done = run_under_agent(EXAMPLE, *options, cwd=folder, processes=2, max_restarts=3)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The digests of weights and queue at the end of the example, in two processes that are never killed."""
    first, second = get_pool(2)(run_example, str(tmp_path_factory.mktemp("through")), 36)
    assert first == second
    return first


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where two ranks have left a checkpoint of step 30."""
    folder = str(tmp_path_factory.mktemp("stopped"))
    get_pool(2)(run_example, folder, 33)
    return folder


def test_a_killed_job_ends_with_the_bits_of_one_that_ran_through(through: tuple[str, str], tmp_path: Path) -> None:
    """The kill comes after the loss has enqueued the rows of its step and before the optimizer's step."""
    killed = torchrun(tmp_path, "--kill-at", 33)
    weights, queue = through
    end = f"weights {weights}\nqueue   {queue}, 256 rows\n"
    assert killed == "starts with step 0\nstarts with step 30\n" + end
    assert re.fullmatch(r"\w{16}", weights)
    assert weights != queue


@pytest.mark.parametrize("part", [None, *imported(EXAMPLE).PARTS, "queue"])
def test_every_part_of_the_checkpoint_counts(
    through: tuple[str, str], stopped: str, tmp_path: Path, part: str | None
) -> None:
    """The control of the test above: a job that resumes without one part ends elsewhere."""
    checkpoint = torch.load(f"{stopped}/checkpoint.pt", weights_only=True)
    assert checkpoint["loss"]["main_loss.queue.saved_numbers"][NUMBERS.index("fill")] == 256
    if part == "queue":  # drop the queue alone and keep the schedule of the loss
        empty = imported(EXAMPLE).make_loss().state_dict()
        checkpoint["loss"] |= {key: value for key, value in empty.items() if key.startswith("main_loss.queue.")}
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    forget = None if part == "queue" else part
    first, second = get_pool(2)(run_example, str(tmp_path), 36, forget)
    assert first == second
    if part is None:
        assert first == through
    else:
        assert first[0] != through[0]


def test_another_number_of_ranks_takes_over(stopped: str) -> None:
    digests = get_pool(3)(run_example, stopped, 36)
    assert digests[0] == digests[1] == digests[2]


@on_ranks(2)
def test_a_save_that_fails_leaves_the_old_checkpoint(rank: int, tmp_path: Path) -> None:
    example, path, model = imported(EXAMPLE), tmp_path / "checkpoint.pt", nn.Linear(1, 1)
    nn.init.constant_(model.weight, 1.0)
    example.save(path, 7, {"model": model})
    nn.init.constant_(model.weight, 2.0)
    text = error_of(lambda: example.save(path, 8, {"model": model, "torn": Unpicklable()}))[1]
    assert text == ("" if rank else "disk full")
    dist.barrier()  # both ranks have saved
    assert example.load(path, {"model": model}) == 7
    assert model.weight.item() == 1.0


def test_the_sampler_continues_where_it_was() -> None:
    """Two ranks begin an epoch of 24 rows, three ranks finish it: no row is left out, none comes twice."""
    sampler_class = imported(EXAMPLE).ResumableSampler
    before = [sampler_class(range(24), num_replicas=2, rank=rank, seed=5) for rank in range(2)]
    after = [sampler_class(range(24), num_replicas=3, rank=rank, seed=5) for rank in range(3)]
    for sampler in before:
        sampler.start_epoch(2)
    whole = [list(sampler) for sampler in before]
    assert sorted(chain(*whole)) == list(range(24))
    done = [rows[:6] for rows in whole]
    for sampler in after:
        sampler.load_state_dict({"epoch": 2, "num_rows_done": 12})
    left = [list(sampler) for sampler in after]
    assert [len(sampler) for sampler in after] == [4, 4, 4] == [len(rows) for rows in left]
    assert sorted(chain(*done, *left)) == list(range(24))
    after[0].start_epoch(3)
    assert len(after[0]) == len(list(after[0])) == 8


# The state of the losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[float]]]:
    """Where two ranks have saved each case, and the losses of their next steps."""
    folder = str(tmp_path_factory.mktemp("losses"))
    first, second = get_pool(2)(save_all, folder)
    assert first == second
    return folder, first


@pytest.mark.parametrize("world_size", [2, 1, pytest.param(3, marks=pytest.mark.full)])
def test_any_number_of_ranks_gives_the_same_losses(saved: tuple[str, list[list[float]]], world_size: int) -> None:
    """The same bits; of another number the warm-up loss is a sum of sums of the ranks, rounded once more or less."""
    folder, expected = saved
    results = [resume_all(0, folder)] if world_size == 1 else get_pool(world_size)(resume_all, folder)
    for result in results:
        for (name, fill), losses, wanted in zip(CASES, result, expected):
            if name == BLENDING and world_size != 2:
                rounding = torch.finfo(FILLS[fill][2]).eps
                assert losses == pytest.approx(wanted, rel=8 * rounding, abs=0)
            else:
                assert losses == wanted, (name, fill)


def test_the_cases_are_what_they_are_called(saved: tuple[str, list[list[float]]]) -> None:
    folder, expected = saved
    for (name, fill), losses in zip(CASES, expected):
        loss = load(folder, name, fill)
        queue = (loss.main_loss if name == BLENDING else loss).queue
        capacity, steps, dtype = FILLS[fill]
        assert queue.rows().logits.dtype == (dtype if steps else torch.float32)  # a queue is float32 until it is fed
        enqueued = queue.position[2]
        assert fill == ("empty" if enqueued == 0 else "half-filled" if enqueued < capacity else "wrapped")
        if steps:  # the control: a new loss continues with other values
            assert steps_after(make_loss(name, capacity), fill) != losses, (name, fill)


@pytest.mark.parametrize(
    ("name", "key", "change"),
    [
        ("pauc", "saved_temperature", lambda value: 2 * value),
        ("pauc", "saved_num_draws", lambda value: value - 1),
        (BLENDING, "saved_switch_step", lambda value: value - 1),
    ],
)
def test_every_number_of_the_state_counts(
    saved: tuple[str, list[list[float]]], name: str, key: str, change: Callable[[Any], Any]
) -> None:
    """A queue with another one is refused: test_queue.py."""
    folder, expected = saved
    state, losses = torch.load(path_of(folder, name, "wrapped"), weights_only=True), []
    for number in (state[key], change(state[key])):
        loss = make_loss(name, FILLS["wrapped"][0])
        loss.load_state_dict(state | {key: number})
        losses.append(steps_after(loss, "wrapped"))
    assert losses[0] == pytest.approx(expected[CASES.index((name, "wrapped"))], rel=1e-12, abs=0)
    assert losses[1] != pytest.approx(losses[0], rel=1e-6, abs=0)


@pytest.mark.parametrize("name", ["smooth_ap", BLENDING])
@on_ranks(2)
def test_a_rank_that_has_not_loaded_is_named(rank: int, saved: tuple[str, list[list[float]]], name: str) -> None:
    """The step that failed enqueued nothing: once all ranks have loaded, training continues as if it had not been."""
    (folder, expected), fill, new = saved, "wrapped", make_loss(name, 40)
    loss = new if rank else load(folder, name, fill)
    text = error_of(lambda: steps_after(loss, fill))[1]
    call = type(new.main_loss if name == BLENDING else new).__name__
    assert re.match(rf"{call}: expected the same on every rank, got .*queue: .* on rank 0, .* on rank 1", text), text
    assert "Load the same checkpoint, or call reset_queue(), on every rank." in text
    assert steps_after(load(folder, name, fill) if rank else loss, fill) == expected[CASES.index((name, fill))]


def test_an_epoch_that_has_begun_does_not_empty_a_loaded_queue() -> None:
    trained, loaded = (
        LossWarmupWrapper(CrossEntropyLoss(), small_loss(), warmup_steps=0, reset_queue_each_epoch=True)
        for _ in range(2)
    )
    trained.on_train_epoch_start(3)
    train_two_classes(trained)
    loaded.load_state_dict(trained.state_dict())
    loaded.on_train_epoch_start(3)
    assert len(loaded.main_loss.queue) == 5
    loaded.on_train_epoch_start(4)
    assert len(loaded.main_loss.queue) == 0


@pytest.mark.parametrize("units", ["warmup_epochs", "warmup_steps"])
def test_a_schedule_whose_hooks_were_called_does_not_warn_after_a_restart(units: str) -> None:
    """In the first epoch or step too; a loss that saw no epoch or step still warns, before and after."""
    logits, targets = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    with_hooks, without_hooks, first, second = (
        LossWarmupWrapper(CrossEntropyLoss(), small_loss(), **{units: 2}) for _ in range(4)
    )
    with_hooks.on_train_epoch_start(0)
    with_hooks.on_train_batch_start(0)
    first.load_state_dict(with_hooks.state_dict())
    second.load_state_dict(without_hooks.state_dict())
    first(logits, targets)  # a warning would be an error
    with pytest.warns(UserWarning, match="was never called"):
        second(logits, targets)


# Another queue


def train_two_classes(loss: torch.nn.Module) -> None:
    """Let five rows enter the queue, in the first step after the warm-up of a wrapper."""
    if isinstance(loss, LossWarmupWrapper):
        loss.on_train_batch_start(1)
    logits = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    loss(logits, torch.tensor([0, 1, 0, 1, 1]))


@pytest.mark.parametrize("wraps", [False, True], ids=["loss", "warm-up"])
@pytest.mark.parametrize(
    ("argument", "value", "fix"),
    [
        ("queue_size", 9, "Construct it with capacity=8 (queue_size of a loss). "),
        ("num_classes", 3, "Construct it with num_classes=2. "),
        ("queue_keep", "negatives", "Construct it with keep='all' (queue_keep of a loss). "),
        ("multi_hot", True, "Construct it with multi_hot=False. "),
        ("ignore_index", -1, "Construct it with ignore_index=-100. "),
        ("temperature", 0.5, ""),  # the control: the same queue is taken, and changes the state
    ],
)
def test_another_queue_is_refused_and_nothing_changes(argument: str, value: object, fix: str, wraps: bool) -> None:
    losses = [small_loss(), small_loss(**{argument: value})]
    losses[0].temperature = 0.25
    source, other = (LossWarmupWrapper(CrossEntropyLoss(), loss, warmup_steps=1) if wraps else loss for loss in losses)
    train_two_classes(source)
    state, before = source.state_dict(), other.state_dict()
    text = rf"of the saved queue: expected .*, got .*{re.escape(fix)}To start with an empty"
    with pytest.raises(ValueError, match=text) if fix else contextlib.nullcontext():
        other.load_state_dict(state)
    assert same(other.state_dict(), before if fix else state)
    assert not same(before, state)
    if fix:
        run_block(block_with("strict=False"), {"state": state, "loss_fn": other})
        assert len(losses[1].queue) == 0
        assert losses[1].temperature == losses[0].temperature


# The recipes of docs/checkpointing.md


def test_no_block_is_left_out() -> None:
    used = {ONE_FILE, DCP, ASYNC, FSDP_FILE, block_with("state = loss_fn.state_dict()"), block_with("strict=False")}
    assert set(pages.blocks("checkpointing.md")) == used


def test_the_two_lines() -> None:
    loss = small_loss()
    train_two_classes(loss)
    names = {"loss_fn": loss}
    exec(block_with("state = loss_fn.state_dict()"), names)
    assert same(names["state"], loss.state_dict())


@pytest.mark.parametrize(
    ("saver", "loader", "wrapper"),
    [
        pytest.param(ONE_FILE, ONE_FILE, "DDP", id="one file, DDP"),
        pytest.param(DCP, DCP, "DDP", id="dcp, DDP", marks=pytest.mark.full),
        pytest.param(DCP, DCP, "FSDP2", id="dcp, FSDP2"),
        pytest.param(ASYNC, DCP, "DDP", id="async, DDP"),
        pytest.param(ASYNC, DCP, "FSDP2", id="async, FSDP2", marks=pytest.mark.full),
        pytest.param(FSDP_FILE, FSDP_FILE, "FSDP2", id="one file, FSDP2"),
    ],
)
@on_ranks(2)
def test_a_recipe(rank: int, tmp_path: Path, saver: str, loader: str, wrapper: str) -> None:
    """Save with one block, load with another. The model and the queue are float64, which a new queue is not."""
    path, names = str(tmp_path / "checkpoint"), run_block(saver, {})
    job, fresh = Job(wrapper, 0), Job(wrapper, 1)
    job.take_steps(0, 4)
    saving = names["save"](path, *job.parts)
    kept = job.take_steps(4, 7)
    if saving is not None:
        saving.result()
        dist.barrier()
    run_block(loader, names)["load"](path, *fresh.parts)
    assert fresh.take_steps(4, 7) == kept
    assert Job(wrapper, 0).take_steps(4, 7)[0] != kept[0]
