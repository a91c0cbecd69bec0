"""A queue of which each rank keeps its own rows: together they are the queue that every rank would hold."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor
from workers import error_of, get_pool

import fullrank
from fullrank.queues.memory_queue import MemoryQueue
from fullrank.queues.sharded_queue import ShardedQueue


def batch(step: int, world_size: int, num_classes: int, weighted: bool) -> list[list[Tensor | None]]:
    """Return the rows of each rank: some ranks have none, and some rows are not stored."""
    generator = torch.Generator().manual_seed(step)
    parts = []
    for rank in range(world_size):
        count = 0 if (step + rank) % 4 == 0 else int(torch.randint(1, 40, (), generator=generator))
        logits = torch.randn(count, num_classes, generator=generator)
        logits[::7] = torch.nan
        targets = torch.randint(0, max(2, num_classes), (count,), generator=generator)
        targets[::5] = -100
        weight = torch.rand(count, generator=generator) if weighted else None
        parts.append([logits, targets, torch.rand(count, generator=generator) < 0.5, weight])
    return parts


def enqueue(queues: list[ShardedQueue], whole: MemoryQueue, step: int, weighted: bool) -> None:
    """Enqueue one step."""
    parts = batch(step, len(queues), whole.num_classes, weighted)
    counts = [queue.count(part[0], part[1]) for queue, part in zip(queues, parts)]  # type: ignore[arg-type]
    for queue, part in zip(queues, parts):
        queue.enqueue(*part, counts)  # type: ignore[arg-type]
    columns = [None if column[0] is None else torch.cat(column) for column in zip(*parts)]  # type: ignore[arg-type]
    whole.enqueue(*columns)  # type: ignore[arg-type]


def joined(queues: list[ShardedQueue]) -> list[Tensor]:
    """Return the rows of all ranks, where a gathered queue has them."""
    order = torch.cat([queue.places() for queue in queues]).argsort()
    columns = zip(*(queue.rows() for queue in queues))
    return [torch.cat(column)[order] for column in columns if column[0] is not None]


def assert_equal(queues: list[ShardedQueue], whole: MemoryQueue) -> None:
    """Assert that the ranks hold the rows of ``whole``, in its order, and know how many each has."""
    for ours, theirs in zip(joined(queues), [rows for rows in whole.rows() if rows is not None], strict=True):
        assert torch.equal(ours, theirs)
    for queue in queues:
        assert queue.num_held == len(whole)
        assert queue.position == queues[0].position
        assert torch.equal(queue._held()[0], queues[0]._held()[0])
        assert queue._held()[1].sum(dim=1).tolist() == [len(other) for other in queues]
        places = torch.arange(-3, len(whole))
        steps, queue._steps = queue._steps, deque()  # a look-up costs the same after any number of steps
        found, row = queue.find(places)
        queue._steps = steps
        assert torch.equal(places[found], queue.places()[row])
        assert len(found) == len(queue)


@pytest.mark.parametrize("keep", ["all", "negatives"])
@pytest.mark.parametrize(("capacity", "num_classes", "weighted"), [(100, 1, False), (7, 3, True), (1000, 1, True)])
def test_the_ranks_hold_the_rows_of_a_gathered_queue(
    capacity: int, num_classes: int, weighted: bool, keep: Any
) -> None:
    whole = MemoryQueue(capacity, num_classes, keep=keep)
    queues = [ShardedQueue(capacity, num_classes, keep=keep) for _ in range(3)]
    for rank, queue in enumerate(queues):
        queue.take_place(rank, 3)
    for step in range(14):
        enqueue(queues, whole, step, weighted and step > 2)
        assert_equal(queues, whole)
    assert sum(queue._checksum for queue in queues) == whole.checksum
    held = sum(queue._logits.shape[0] for queue in queues)
    assert held <= 4 * capacity + 400  # buffers are at most doubled twice, or hold one step
    steps = len(queues[0]._steps)
    for _ in range(3):  # steps without rows leave nothing behind
        for queue in queues:
            queue.enqueue(torch.zeros(0, num_classes), torch.zeros(0, dtype=torch.int64), counts=[0, 0, 0])
    assert len(queues[0]._steps) == steps
    for queue in queues:
        queue.reset()
        assert len(queue) == queue.num_held == 0


@pytest.mark.parametrize("steps", [1, 9])
def test_a_gathered_state_is_split_and_goes_on(steps: int) -> None:
    whole, alone = MemoryQueue(50, 2), ShardedQueue(50, 2)
    alone.take_place(0, 1)
    for step in range(steps):
        enqueue([alone], whole, step, False)
    state = alone.get_extra_state()
    for name, value in whole.get_extra_state().items():  # one rank saves what a gathered queue would
        assert torch.equal(state[name], value) if isinstance(value, Tensor) else state[name] == value, name
    queues = [ShardedQueue(50, 2) for _ in range(4)]
    for rank, queue in enumerate(queues):
        queue.set_extra_state(state)
        queue.take_place(rank, 4)
    assert_equal(queues, whole)
    assert max(len(queue) for queue in queues) - min(len(queue) for queue in queues) <= 1
    for step in range(steps, steps + 4):
        enqueue(queues, whole, step, False)
        assert_equal(queues, whole)
    assert sum(queue._checksum for queue in queues) == whole.checksum


def test_rows_of_one_rank_load_there_alone() -> None:
    whole, queues = MemoryQueue(50, 1), [ShardedQueue(50, 1) for _ in range(2)]
    for rank, queue in enumerate(queues):
        queue.take_place(rank, 2)
    for step in range(5):
        enqueue(queues, whole, step, True)
    again = [ShardedQueue(50, 1) for _ in range(2)]
    for rank, (queue, old) in enumerate(zip(again, queues)):
        with pytest.warns(UserWarning, match=f"only the queued rows of rank {rank} of 2.*Call gather_queue"):
            state = old.get_extra_state()
        queue.set_extra_state(state)
        queue.take_place(rank, 2)
    assert_equal(again, whole)
    enqueue(again, whole, 5, True)
    assert_equal(again, whole)
    for place in ((1, 2), (0, 3), (0, 1)):
        with pytest.raises(ValueError, match=r"those of rank 0 of 2\. Call gather_queue"):
            again[0].take_place(*place)
    queues[0].is_gathered_later = True
    state = queues[0].get_extra_state()
    with pytest.raises(ValueError, match=r"rows of all ranks, got those of rank 0 of 2\. Call gather_queue"):
        MemoryQueue(50, 1).set_extra_state(state)


# With ranks


def rows_of(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a step that is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    logits = torch.randn(24, 1, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (24,), generator=generator)
    own = slice(24 * rank // world_size, 24 * (rank + 1) // world_size)
    return logits[own].requires_grad_(), targets[own]


def train(rank: int, folder: str, pool: Any, load: str, save: str, first: int, gather: bool = True) -> list[float]:
    """Take three steps from a checkpoint, and save one."""
    world_size, values = dist.get_world_size(), []
    loss = fullrank.SmoothAPLoss(1, queue_size=40, pool=pool)
    if load:
        loss.load_state_dict(torch.load(Path(folder, load), weights_only=True))
    for step in range(first, first + 3):
        value = loss(*rows_of(step, rank, world_size))
        value.backward()
        values.append(value.item())
    if gather:
        loss.gather_queue()
    if save and (rank == 0 or not gather):
        torch.save(loss.state_dict(), Path(folder, save if gather else f"{save}{rank}"))
    dist.barrier()
    return values


@pytest.mark.slow
def test_a_gathered_checkpoint_loads_on_any_number_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run: list[float] = []
    ways: list[tuple[int, Any]] = [(2, "sharded"), (4, "sharded"), (2, "gathered"), (4, "sharded")]
    for index, (world_size, pool) in enumerate(ways):
        load = f"state{index - 1}" if index else ""
        values = get_pool(world_size)(train, folder, pool, load, f"state{index}", 3 * index)
        assert all(value == values[0] for value in values)
        run += values[0]
    whole = [
        value
        for first in (0, 3, 6, 9)
        for value in get_pool(2)(train, folder, "gathered", "whole" if first else "", "whole", first)[0]
    ]
    assert run == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("kind", ["whole", "own"])
@on_ranks(2)
def test_ranks_that_load_different_checkpoints_raise(rank: int, tmp_path: Path, kind: str) -> None:
    """Those of two trainings that stored as many rows in every step; the second time as well."""
    for name, first in (("first", 0), ("second", 3)):
        train(rank, str(tmp_path), "sharded", "", name, first, kind == "whole")
    for own, expected in (("second", "RuntimeError"), ("first", "none")):
        loss = fullrank.SmoothAPLoss(1, queue_size=40, pool="sharded")
        name = own if rank == 1 else "first"
        state = torch.load(Path(tmp_path, f"{name}{rank if kind == 'own' else ''}"), weights_only=True)
        for _ in range(2):
            loss.load_state_dict(state)
            assert error_of(lambda loss=loss: loss(*rows_of(9, rank, 2)))[0] == expected  # type: ignore[misc]


@pytest.mark.parametrize("keeps_owners", [True, False])
@pytest.mark.parametrize("name", ["SmoothAPLoss", "RecallAtQuantileLoss"])
@on_ranks()
def test_as_many_ranks_go_on_bit_identically(rank: int, name: str, keeps_owners: bool) -> None:
    """With the rows that they had; not so after a checkpoint of an earlier version, which did not name the owners."""

    def rows(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        count = 900 if (step + rank) % 3 else 7  # an equal part is another one
        return torch.randn(count, 1, generator=generator).requires_grad_(), torch.rand(count, generator=generator) < 0.1

    losses = [getattr(fullrank, name)(1, queue_size=3000, pool="sharded") for _ in range(2)]
    for step in range(5):
        losses[0](*rows(step))
    losses[0].gather_queue()
    state = losses[0].state_dict()
    if not keeps_owners:
        del state["queue._extra_state"]["steps"], state["queue._extra_state"]["world_size"]
    losses[1].load_state_dict(state)
    for step in range(5, 9):
        results = []
        for loss in losses:
            logits, targets = rows(step)
            value = loss(logits, targets)
            held = loss.queue.rows().logits.flatten()
            value.backward()
            results.append(torch.cat([value.detach().reshape(1), logits.grad[:, 0], held]))  # type: ignore[index]
        assert torch.equal(*results) or not keeps_owners
        assert step > 5 or torch.equal(*results) == keeps_owners


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "wrapped"])
@on_ranks(2)
def test_a_queue_is_gathered_again(rank: int, wrapped: bool) -> None:
    """Three times, with a step before the first and the last: a rank whose state is up to date takes part all the same,
    as the others may not know."""
    kinds: tuple[Any, Any] = ("gathered", "sharded")
    losses: list[Any] = [fullrank.SmoothAPLoss(1, queue_size=40, pool=pool) for pool in kinds]
    if wrapped:
        focal = fullrank.SigmoidFocalLoss()
        losses = [fullrank.LossWarmupWrapper(focal, loss, final_main_weight=0.5) for loss in losses]
    for step in range(3):
        for loss in losses:
            if step != 1:
                loss(*rows_of(step, rank, 2))
            loss.gather_queue()
        states = [loss.state_dict() for loss in losses]
        for name, value in states[0].items():
            if name.endswith("queue._extra_state"):
                assert all(torch.equal(value[part], states[1][name][part]) for part in ("logits", "checksum"))


@pytest.mark.parametrize("count", [0, 3])
@on_ranks(2)
def test_without_a_stored_row_the_state_is_that_of_a_gathered_queue(rank: int, count: int) -> None:
    """From ``count`` ignored rows on the last rank."""
    own = count if rank else 0
    rows = torch.zeros(own, 1, dtype=torch.float64), torch.full((own,), -100)
    for pool in ("gathered", "sharded"):
        loss = fullrank.SmoothAPLoss(1, queue_size=40, pool=pool)  # type: ignore[arg-type]
        loss(*rows, sample_weight=torch.ones(own, dtype=torch.float64))
        loss.gather_queue()
        state = loss.state_dict()["queue._extra_state"]
        assert [state["is_double"], state["has_weights"]] == [count > 0] * 2


@pytest.mark.parametrize("world_size", [2, 4])
def test_own_rows_load_where_they_were(tmp_path: Path, world_size: int) -> None:
    get_pool(2)(train, str(tmp_path), "sharded", "", "own", 0, False)
    get_pool(world_size)(elsewhere, str(tmp_path))


def elsewhere(rank: int, folder: str) -> None:
    """Load own rows on another rank, on another number of ranks, and into a gathered pool; validate alone."""
    own, other = (torch.load(Path(folder, f"own{r}"), weights_only=True) for r in (rank % 2, 1 - rank % 2))

    def load(pool: Any, state: Any) -> Any:
        loss = fullrank.SmoothAPLoss(1, queue_size=40, pool=pool)
        loss.load_state_dict(state)
        return loss

    expected = f"the rows of rank {rank} of {dist.get_world_size()}, got those of rank {1 - rank % 2} of 2. "
    for pool, state, text in (("sharded", other, expected), ("gathered", own, "expected the rows of all ranks")):
        kind, found = error_of(lambda pool=pool, state=state: load(pool, state))  # type: ignore[misc]
        assert kind == "ValueError"
        assert text in found
        assert "gather_queue()" in found
    if dist.get_world_size() == 4:
        assert "gather_queue()" in error_of(lambda: load("sharded", own))[1]
        return
    loss = load("sharded", own)
    loss(*rows_of(3, rank, 2))
    loss.gather_distributed = False
    kind, text = error_of(lambda: loss(*rows_of(4, 0, 1)))
    assert kind == "RuntimeError"
    assert "pool='gathered'" in text
    assert error_of(lambda: loss.eval()(*rows_of(4, 0, 1)))[0] == "none"  # there the queue takes no part
    assert torch.equal(loss(*rows_of(4, 0, 1)), fullrank.losses.smooth_ap(*rows_of(4, 0, 1)))
    loss.train().reset_queue()
    loss(*rows_of(4, 0, 1))
    load("gathered", loss.state_dict())  # the queue of one process


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("call", "RuntimeError", "ranks: expected the same on every rank, got call: "),
        ("place", "ValueError", "gather_queue failed on rank {odd}: queue: expected the rows of rank {odd} of 2, got "),
        ("state", "RuntimeError", "gather_queue: expected the same on every rank, got queue: "),
    ],
)
@on_ranks(2)
def test_a_fault_in_gather_queue_is_raised_on_every_rank(
    rank: int, fault: str, error: str, text: str, steps: int
) -> None:
    """Of each rank in turn; a step follows that is as if it had never been called."""
    for odd in range(2):
        loss, clean = (fullrank.SmoothAPLoss(1, queue_size=40, pool="sharded") for _ in range(2))
        if fault == "place" and rank == odd:  # rows of this rank alone, which no gathered queue has
            loss.gather_distributed = False
            loss(*rows_of(9, rank, 2))
            loss.gather_distributed = None
        elif fault != "place":
            for step in range(steps):
                loss(*rows_of(step, rank, 2)), clean(*rows_of(step, rank, 2))
        if fault == "state" and rank == odd:
            loss.queue._steps[-1] = loss.queue._steps[-1]._replace(counts=(99, 1))  # type: ignore[union-attr]
        if fault == "call" and rank == odd:
            kind, message = error_of(lambda loss=loss: loss(*rows_of(8, rank, 2)))  # type: ignore[misc]
        else:
            kind, message = error_of(loss.gather_queue)
        assert kind == error
        assert message.startswith(text.format(odd=odd)), message
        if fault == "call":
            assert loss(*rows_of(7, rank, 2)) == clean(*rows_of(7, rank, 2))
            loss.gather_queue()


@on_ranks(2)
def test_own_rows_load_before_the_group_exists(rank: int, tmp_path: Path) -> None:
    """What does not fit shows in the first step with the group; a queue of several ranks is not gathered alone."""
    train(rank, str(tmp_path), "sharded", "", "own", 0, False)
    refused = "ValueError", "SmoothAPLoss failed on rank 0: queue: expected the rows of rank 0 of 2, got those of"
    for place, (kind, text) in ((rank, ("none", "")), (1 - rank, refused)):
        loss = fullrank.SmoothAPLoss(1, queue_size=40, pool="sharded", gather_distributed=False)
        loss.load_state_dict(torch.load(tmp_path / f"own{place}", weights_only=True))
        gathered = error_of(loss.gather_queue)
        assert gathered[0] == "RuntimeError"
        assert "gather_queue: expected a call on all ranks of the queue, got rank" in gathered[1]
        loss.gather_distributed = None
        found = error_of(lambda loss=loss: loss(*rows_of(3, rank, 2)))  # type: ignore[misc]
        assert found[0] == kind
        assert text in found[1]


@pytest.mark.parametrize("pool", ["gathered", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_queue_filled_in_inference_mode_is_trained_with(pool: Any, dtype: torch.dtype) -> None:
    def rows(step: int) -> tuple[Tensor, Tensor]:
        logits, targets = rows_of(step, 0, 1)
        return logits.detach().to(dtype).requires_grad_(), targets

    def run(context: Any, size: int) -> tuple[list[float], Any]:
        with context():
            loss = fullrank.SmoothAPLoss(1, queue_size=size, pool=pool, update_queue_in_eval=True)
        values = []
        for first in (0, 5):
            with context():
                loss.eval()(*rows(first))
                if first:
                    loss.load_state_dict(loss.state_dict())
            for step in range(first + 1, first + 4):
                value = loss.train()(*rows(step))
                value.backward()
                values.append(value.item())
        tensors = (loss.queue._logits, loss.queue._targets, loss.queue._iid, loss.queue._weight, loss.queue._checksum)
        assert not any(tensor.is_inference() for tensor in tensors)
        return values, loss.queue.checksum.item()

    for size in (200, 60):  # the second one is full when it is loaded
        assert run(torch.inference_mode, size) == run(torch.no_grad, size)
