"""The room behind the headers: rows travel with them, it is as large on all ranks, and only agreements change it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from on_ranks import on_ranks
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_gather_tensor

import fullrank
from fullrank.distributed.exchange import Exchange
from fullrank.distributed.room import MAX_IDLE_CALLS, MAX_SIZE, MAX_TOTAL_SIZE, Room, room_of
from fullrank.large import ShardedLoss


def own_rows(rank: int, counts: list[int], width: int) -> Tensor:
    return torch.arange(counts[rank] * width, dtype=torch.float64).reshape(-1, width) + 100 * rank


def rows_of_all(counts: list[int], width: int) -> Tensor:
    return torch.cat([own_rows(rank, counts, width) for rank in range(len(counts))])


def counted(call: Callable[[], Any]) -> int:
    with CollectiveCounter() as counter:
        call()
    return counter.total


@pytest.mark.parametrize("num_ranks", [2, 8, 1024])
def test_limits(num_ranks: int) -> None:
    """At most 64 KiB a rank and 1 MiB of all; more needs leave the room to fall."""
    room, limit = Room(num_ranks), min(MAX_SIZE, MAX_TOTAL_SIZE // num_ranks)
    for needed, size in ((0, 0), (16, 16), (17, 32), (limit, limit), (limit + 1, limit)):
        room.adapt(needed)
        assert room.size == size
    room.adapt(limit)
    for needed in (100, *[0] * (min(MAX_IDLE_CALLS, 2**17 // limit) - 2)):
        room.adapt(needed)
        assert room.size == limit
    room.adapt(0)
    assert room.size == 128  # the most that the idle calls needed


def test_need_of_more_than_half_keeps_the_room() -> None:
    room = Room(2)
    room.adapt(1024)
    for _ in range(3 * MAX_IDLE_CALLS):
        room.adapt(0)
        room.adapt(513)
    assert room.size == 1024


@on_ranks()
def test_rows_that_grow_shrink_and_differ(rank: int) -> None:
    """Values, and where two collectives are needed."""
    group, world_size = dist.new_group(), dist.get_world_size()
    for base, number in ((10, 2), (10, 1), (3, 1), (0, 1), (40, 2), (33, 1), (3000, 2), (3000, 2), (40, 1)):
        counts = [base * (place + 1) for place in range(world_size)] if base < 1000 else [base] * world_size
        own, found = own_rows(rank, counts, 3), []
        assert counted(lambda own=own, found=found: found.append(fullrank.all_gather_no_grad(own, group))) == number
        assert torch.equal(found[0], rows_of_all(counts, 3))
    exact = dist.new_group()
    fullrank.all_gather_no_grad(torch.ones(16, 4), exact)
    assert room_of(exact).size == 256  # not more than the rows need
    assert sum(fullrank.gather_rows(torch.ones(4), group=group)[0]) == 4 * world_size  # beside what was there before
    for _ in range(MAX_IDLE_CALLS):
        assert counted(lambda: fullrank.global_mean(torch.ones(()), 1, group=group)) == 1
    assert counted(lambda: fullrank.all_gather_no_grad(own_rows(rank, [40] * world_size, 3), group)) == 2


def faulty(rank: int, kind: str, group: ProcessGroup) -> None:
    last = dist.get_world_size() - 1
    rows = {
        "one rank fails": torch.ones(7, 2) if rank != last else torch.ones(()),
        "dtypes differ": torch.ones(7, 2, dtype=torch.float64 if rank == last else torch.float32),
        "shapes differ": torch.ones(7, 90 if rank == last else 2),
        "calls differ": torch.ones(7, 2),
    }[kind]
    is_other = kind == "calls differ" and rank == last
    call = partial(fullrank.global_mean, torch.ones(()), 1) if is_other else partial(fullrank.all_gather_no_grad, rows)
    with pytest.raises(fullrank.RankError):
        call(group=group)


FAULTS = ["one rank fails", "dtypes differ", "shapes differ", "calls differ"]


@pytest.mark.parametrize("kind", FAULTS)
@on_ranks()
def test_faults_leave_the_room(rank: int, kind: str) -> None:
    """In the first call of a group, in the second, and twice; the next call has the right rows."""
    for num_before in (0, 1, 2):
        group = dist.new_group()
        counts = [5 + place for place in range(dist.get_world_size())]
        for _ in range(num_before):
            fullrank.all_gather_no_grad(own_rows(rank, counts, 2), group)
        size = room_of(group).size
        for _ in range(2):
            faulty(rank, kind, group)
            assert room_of(group).size == size
        assert torch.equal(fullrank.all_gather_no_grad(own_rows(rank, counts, 2), group), rows_of_all(counts, 2))
        dist.destroy_process_group(group)


@on_ranks()
def test_random_calls(rank: int) -> None:
    """Rows of any size, calls without rows, faults, losses: the room is as large on all ranks after each of them."""
    draw, group, world_size = random.Random(7), dist.new_group(), dist.get_world_size()
    losses = [fullrank.SmoothAPLoss(queue_size=8, group=group), ShardedLoss(fullrank.SmoothAPLoss(group=group))]
    sizes = []
    for _ in range(120):
        kind = draw.choice(["rows", "rows", "count", "fault", "loss"])
        counts = [draw.choice([0, 1, 20, 400]) for _ in range(world_size)]
        width, fault, loss = draw.choice([1, 7, 60]), draw.choice(FAULTS), draw.choice(losses)
        if kind == "rows":
            assert torch.equal(
                fullrank.all_gather_no_grad(own_rows(rank, counts, width), group), rows_of_all(counts, width)
            )
        elif kind == "count":
            fullrank.global_mean(torch.ones(()), 1, group=group)
        elif kind == "fault":
            faulty(rank, fault, group)
        else:
            logits = torch.linspace(-1, 1, counts[rank]).reshape(-1, 1).requires_grad_()
            loss(logits, torch.arange(counts[rank]) % 2).backward()
        sizes.append(room_of(group).size)
    every = Exchange("test", group).each(torch.tensor(sizes), "the sizes")
    assert len(set(sizes)) > 5
    assert torch.equal(every, every[:1].expand_as(every))


@on_ranks(2)
def test_rows_that_stay_on_their_ranks_need_no_room(rank: int) -> None:
    group = dist.new_group()
    ShardedLoss(fullrank.SmoothAPLoss(group=group))(torch.linspace(-1, 1, 4000), torch.arange(4000) % 2)
    assert room_of(group).size == 0


@pytest.mark.parametrize("inside", [partial(torch.device, "meta"), torch.inference_mode], ids=["meta", "inference"])
@on_ranks(2)
def test_a_call_inside_a_default_device_or_inference_mode(rank: int, inside: Callable[[], Any]) -> None:
    """As in a validation: what is kept of the call serves those outside of it. After the first call there is room."""
    group = dist.new_group()
    for counts in ([9, 9], [3, 3], [5, 4]):
        rows = own_rows(rank, counts, 2)
        with inside():
            inner = fullrank.all_gather_no_grad(rows, group)
        assert torch.equal(inner, rows_of_all(counts, 2))
        assert torch.equal(fullrank.all_gather_no_grad(rows, group), rows_of_all(counts, 2))


@on_ranks()
def test_rows_that_a_functional_collective_still_brings(rank: int) -> None:
    """They have no memory until somebody waits for them. The second call finds them a room."""
    for _ in range(2):
        arriving = all_gather_tensor(torch.full((2, 3), float(rank)), 0, dist.group.WORLD)
        assert torch.equal(fullrank.all_gather_no_grad(arriving), arriving.repeat(dist.get_world_size(), 1))
