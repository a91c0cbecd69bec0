"""Checkpoints: a job that is killed and resumed ends with the bits of one that ran through."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import resume_cases
import torch
from resume_cases import BLENDING, CASES, same, small_loss
from workers import WorkerPool, get_pool

from fullrank import LossWarmupWrapper, SoftmaxFocalLoss

pytestmark = pytest.mark.filterwarnings("ignore:.*drawn down")

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "checkpointing.md").read_text("utf-8"), flags=re.DOTALL)


def block_with(text: str) -> str:
    """Return the only block of docs/checkpointing.md that contains ``text``."""
    (block,) = [block for block in BLOCKS if text in block]
    return block


ONE_FILE, DCP, ASYNC, FSDP_FILE = (
    block_with(text)
    for text in ("model.module.load_state_dict", "dcp.load(", "dcp.async_save(", "full_state_dict=True")
)


# The example


def torchrun(folder: Path, *arguments: object) -> str:
    """Run the example on two processes that torchrun may restart, and return what it printed."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--max-restarts", 3)
    command = [sys.executable, *launch, ROOT / "examples" / "resume.py", "--steps", 36, "--folder", folder, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the example prints that is never killed."""
    return torchrun(tmp_path_factory.mktemp("through"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where two ranks have left a checkpoint of step 30."""
    folder = str(tmp_path_factory.mktemp("stopped"))
    get_pool(2)(resume_cases.run_example, folder, 33)
    return folder


def test_a_killed_job_ends_with_the_bits_of_one_that_ran_through(through: str, tmp_path: Path) -> None:
    """The kill comes after the loss has enqueued the rows of its step and before the optimizer's step."""
    killed = torchrun(tmp_path, "--kill-at", 33)
    pattern = r"starts with step 0\nweights \w{16}\nqueue   \w{16}, 256 rows\n"
    assert re.fullmatch(pattern, through), through
    assert killed == "starts with step 0\n" + through.replace("step 0", "step 30")


@pytest.mark.parametrize("part", [None, *resume_cases.import_example().PARTS, "queue"])
def test_every_part_of_the_checkpoint_counts(through: str, stopped: str, tmp_path: Path, part: str | None) -> None:
    """The control of the test above: a job that resumes without one part ends elsewhere."""
    checkpoint = torch.load(f"{stopped}/checkpoint.pt", weights_only=True)
    assert checkpoint["loss"]["main_loss.queue._extra_state"]["fill"] == 256
    if part == "queue":  # of the loss the queue alone, while the schedule goes on
        empty = resume_cases.import_example().make_loss().state_dict()
        checkpoint["loss"]["main_loss.queue._extra_state"] = empty["main_loss.queue._extra_state"]
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    forget = None if part == "queue" else part
    first, second = get_pool(2)(resume_cases.run_example, str(tmp_path), 36, forget)
    assert first == second
    weights, queue = re.findall(r"(?:weights|queue) +(\w{16})", through)
    if part is None:
        assert first == (weights, queue)
    else:
        assert first[0] != weights


def test_three_ranks_go_on_too(tmp_path: Path) -> None:
    pool = get_pool(3)
    through = pool(resume_cases.run_example, str(tmp_path / "through"), 16)
    pool(resume_cases.run_example, str(tmp_path / "stopped"), 13)
    assert pool(resume_cases.run_example, str(tmp_path / "stopped"), 16) == through


def test_three_ranks_need_settled_buckets() -> None:
    assert get_pool(3)(resume_cases.first_gradient_is_the_second, True) == [True] * 3
    # The control: DDP adds up in another order from its second step on.
    assert get_pool(3)(resume_cases.first_gradient_is_the_second, False) == [False] * 3


def test_another_number_of_ranks_takes_over(stopped: str) -> None:
    digests = get_pool(3)(resume_cases.run_example, stopped, 36)
    assert digests[0] == digests[1] == digests[2]


def test_a_save_that_fails_leaves_the_old_checkpoint(pool_of_two: WorkerPool, tmp_path: Path) -> None:
    first, second = pool_of_two(resume_cases.tear_a_save, str(tmp_path))
    assert first == ("disk full", 7, 1.0)
    assert second == ("", 7, 1.0)


def test_the_sampler_goes_on_where_it_was() -> None:
    """Two ranks begin an epoch of 24 rows, three ranks finish it: no row is left out, none comes twice."""
    sampler_class = resume_cases.import_example().ResumableSampler
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
    """Where two ranks have saved each case, and the losses with which they went on."""
    folder = str(tmp_path_factory.mktemp("losses"))
    first, second = get_pool(2)(resume_cases.save_all, folder)
    assert first == second
    return folder, first


def test_two_ranks_go_on_bit_identically(saved: tuple[str, list[list[float]]]) -> None:
    folder, expected = saved
    assert get_pool(2)(resume_cases.resume_all, folder) == [expected, expected]


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_gives_the_same_losses(saved: tuple[str, list[list[float]]], world_size: int) -> None:
    """The same bits, but for the warm-up loss: a sum of the sums of the ranks, rounded once more or less."""
    folder, expected = saved
    alone = world_size == 1
    results = [resume_cases.resume_all(0, folder)] if alone else get_pool(3)(resume_cases.resume_all, folder)
    for result in results:
        for (name, fill), losses, wanted in zip(CASES, result, expected):
            if name == BLENDING:
                rounding = torch.finfo(resume_cases.FILLS[fill][2]).eps
                assert losses == pytest.approx(wanted, rel=8 * rounding, abs=0)
            else:
                assert losses == wanted, (name, fill)


def test_the_cases_are_what_they_are_called(saved: tuple[str, list[list[float]]]) -> None:
    folder, expected = saved
    for (name, fill), losses in zip(CASES, expected):
        loss = resume_cases.load(folder, name, fill)
        queue = (loss.main_loss if name == BLENDING else loss).queue
        capacity, steps, dtype = resume_cases.FILLS[fill]
        assert queue.rows().logits.dtype == (dtype if steps else torch.float32)  # a queue is float32 until it is fed
        enqueued = queue.position[2]
        is_so = {"empty": enqueued == 0, "half-filled": 0 < enqueued < capacity, "wrapped": enqueued > capacity}
        assert is_so[fill], (name, enqueued)
        if name == BLENDING and steps:
            assert loss.in_blend
        # The control: a loss that starts anew does not go on alike.
        fresh = resume_cases.make_loss(name, capacity)
        assert resume_cases.steps_after(fresh, fill) != losses, (name, fill)


@pytest.mark.parametrize(
    ("name", "key", "field", "change"),
    [
        ("pauc_at_budget", "_extra_state", "temperature", lambda value: 2 * value),
        ("pauc_at_budget", "_extra_state", "num_draws", lambda value: value - 1),
        ("pauc_at_budget", "queue._extra_state", "logits", lambda value: -value),
        ("pauc_at_budget", "queue._extra_state", "targets", lambda value: 1 - value),
        ("pauc_at_budget", "queue._extra_state", "iid_mask", lambda value: ~value),
        ("pauc_at_budget", "queue._extra_state", "sample_weight", lambda value: value.flip(0)),
        ("pauc_at_budget", "queue._extra_state", "pointer", lambda value: (value + 9) % 40),
        ("pauc_at_budget", "queue._extra_state", "fill", lambda value: value - 5),
        ("pauc_at_budget", "queue._extra_state", "has_weights", lambda value: not value),
        (BLENDING, "_extra_state", "switch_step", lambda value: value - 1),
    ],
)
def test_every_field_of_the_state_counts(
    saved: tuple[str, list[list[float]]], name: str, key: str, field: str, change: Callable[[Any], Any]
) -> None:
    folder, expected = saved
    fill = "wrapped"
    state = torch.load(resume_cases.path_of(folder, name, fill), weights_only=True)
    losses = []
    for changes in (False, True):
        loss = resume_cases.make_loss(name, resume_cases.FILLS[fill][0])
        if changes:
            state[key][field] = change(state[key][field])
        loss.load_state_dict(state)
        losses.append(resume_cases.steps_after(loss, fill))
    assert losses[0] == pytest.approx(expected[CASES.index((name, fill))], rel=1e-12, abs=0)
    assert losses[1] != pytest.approx(losses[0], rel=1e-6, abs=0)


@pytest.mark.parametrize("name", [name for name, fill in CASES if fill == "wrapped"])
def test_a_rank_that_has_not_loaded_is_named(saved: tuple[str, list[list[float]]], name: str) -> None:
    folder, expected = saved
    (text, losses), other = get_pool(2)(resume_cases.load_on_rank_zero_only, folder, name)
    assert (text, losses) == other
    loss = resume_cases.make_loss(name, 40)
    call = type(loss.main_loss if name == BLENDING else loss).__name__
    assert re.match(rf"{call}: expected the same on every rank, got .*queue: .* on rank 0, .* on rank 1", text), text
    assert "Load the same checkpoint, or call reset_queue(), on every rank." in text
    # Nothing was enqueued by the step that failed: now that all have loaded they go on as if it had not been.
    assert losses == expected[CASES.index((name, "wrapped"))]


def test_a_temperature_that_one_rank_has_loaded_is_named(pool_of_two: WorkerPool) -> None:
    first, second = pool_of_two(resume_cases.temperature_on_rank_zero_only)
    assert first == second
    assert "temperature: 0.21 on rank 0, 0.3 on rank 1" in first


def test_an_epoch_that_has_begun_does_not_empty_a_loaded_queue() -> None:
    trained, loaded = (
        LossWarmupWrapper(SoftmaxFocalLoss(gamma=0), small_loss(), reset_queue_each_epoch=True) for _ in range(2)
    )
    trained.on_train_epoch_start(3)
    train_two_classes(trained)
    loaded.load_state_dict(trained.state_dict())
    loaded.on_train_epoch_start(3)
    assert len(loaded.main_loss.queue) == 5
    loaded.on_train_epoch_start(4)
    assert len(loaded.main_loss.queue) == 0


@pytest.mark.parametrize("units", ["warmup_epochs", "warmup_steps"])
def test_a_schedule_that_was_told_where_it_is_does_not_warn_after_a_restart(units: str) -> None:
    """In the first epoch or step too; one that was never told still warns, before and after."""
    logits, targets = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    told, untold, first, second = (
        LossWarmupWrapper(SoftmaxFocalLoss(gamma=0), small_loss(), **{units: 2}) for _ in range(4)
    )
    told.on_train_epoch_start(0)
    told.on_train_batch_start(0)
    first.load_state_dict(told.state_dict())
    second.load_state_dict(untold.state_dict())
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
        ("queue_size", 9, "Construct it with capacity=8 (queue_size of a loss), or "),
        ("num_classes", 3, "Construct it with num_classes=2, or "),
        ("queue_keep", "negatives", "Construct it with keep='all' (queue_keep of a loss), or "),
        ("multi_hot", True, "Construct it with multi_hot=False, or "),
        ("ignore_index", -1, "Construct it with ignore_index=-100, or "),
    ],
)
def test_another_queue_is_refused_and_nothing_changes(argument: str, value: object, fix: str, wraps: bool) -> None:
    losses = [small_loss(), small_loss(**{argument: value})]
    losses[0].temperature = 0.25
    source, other = (
        LossWarmupWrapper(SoftmaxFocalLoss(gamma=0), loss, warmup_steps=1) if wraps else loss for loss in losses
    )
    train_two_classes(source)
    state, before = source.state_dict(), other.state_dict()
    with pytest.raises(
        ValueError, match=rf"of the saved queue: expected .*, got .*{re.escape(fix)}start with an empty"
    ):
        other.load_state_dict(state)
    assert same(other.state_dict(), before)
    names = {"state": state, "loss_fn": other}
    exec(block_with("strict=False"), names)
    assert len(losses[1].queue) == 0
    assert losses[1].temperature == losses[0].temperature
    # The control: the same queue is taken, and changes the state.
    twin = LossWarmupWrapper(SoftmaxFocalLoss(gamma=0), small_loss(), warmup_steps=1) if wraps else small_loss()
    fresh = twin.state_dict()
    twin.load_state_dict(state)
    assert not same(twin.state_dict(), fresh)
    assert same(twin.state_dict(), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("settings", [{"queue_size": 9}, {"num_classes": 3}])
def test_distributed_checkpoint_names_what_does_not_fit(tmp_path: Path, settings: dict[str, int]) -> None:
    import torch.distributed.checkpoint as dcp

    source, other = small_loss(), small_loss(**settings)
    train_two_classes(source)
    dcp.save({"loss": source}, checkpoint_id=tmp_path)
    before = other.state_dict()
    with pytest.raises(dcp.api.CheckpointException, match=r"Size mismatch .* for loss\.queue\._extra_state\.logits"):
        dcp.load({"loss": other}, checkpoint_id=tmp_path)
    assert same(other.state_dict(), before)


# The recipes of docs/checkpointing.md


def test_no_block_is_left_out() -> None:
    used = {ONE_FILE, DCP, ASYNC, FSDP_FILE, block_with("state = loss_fn.state_dict()"), block_with("strict=False")}
    assert set(BLOCKS) == used


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
        pytest.param(DCP, DCP, "DDP", id="dcp, DDP"),
        pytest.param(DCP, DCP, "FSDP2", id="dcp, FSDP2"),
        pytest.param(ASYNC, DCP, "DDP", id="async, DDP"),
        pytest.param(ASYNC, DCP, "FSDP2", id="async, FSDP2"),
        pytest.param(FSDP_FILE, FSDP_FILE, "FSDP2", id="one file, FSDP2"),
    ],
)
def test_a_recipe(pool_of_two: WorkerPool, tmp_path: Path, saver: str, loader: str, wrapper: str) -> None:
    """The model and the queue are float64, which a new queue is not."""
    path = str(tmp_path / "checkpoint")
    for kept, loaded, new in pool_of_two(resume_cases.run_recipe, saver, loader, wrapper, path):
        assert loaded == kept
        assert new[0] != kept[0]


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_loss_inside_the_model(pool_of_two: WorkerPool, tmp_path: Path, wrapper: str) -> None:
    lengths = pool_of_two(resume_cases.run_submodule, wrapper, str(tmp_path / "checkpoint"))
    assert lengths == [[64, 64], [64, 64]]
