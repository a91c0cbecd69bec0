"""Balanced batches: the number of positives, what ranks share, epochs, and resuming."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from on_ranks import common_error, on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from workers import get_pool

from fullrank.data import BalancedBatchSampler


def make_targets(number: int = 103, positives: int = 7) -> Tensor:
    """Return targets with positives at odd places."""
    targets = torch.zeros(number, dtype=torch.int64)
    targets[torch.arange(positives) * 13 + 3] = 1
    return targets


def batches(rank: int, epoch: int, options: dict[str, Any]) -> list[list[int]]:
    """Return the batches of this rank."""
    sampler = BalancedBatchSampler(make_targets(), **{"batch_size": 10, "positives": 2, **options})
    sampler.set_epoch(epoch)
    found = list(sampler)
    assert len(found) == len(sampler)
    return found


@pytest.mark.parametrize(("world_size", "positives"), [(2, 2), (2, 3), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_every_rank_has_its_positives_in_every_batch(world_size: int, positives: int) -> None:
    targets, ranks = make_targets(), get_pool(world_size)(batches, 0, {"positives": positives})
    assert {len(found) for found in ranks} == {103 // (10 * world_size)}
    assert {int(targets[rows].sum()) for found in ranks for rows in found} == {positives}
    assert {len(rows) for found in ranks for rows in found} == {10}
    for step in zip(*ranks):
        rows = [row for part in step for row in part]
        assert len(set(rows)) == len(rows)  # no row twice in a step
    others = [row for found in ranks for rows in found for row in rows if targets[row] == 0]
    assert len(set(others)) == len(others)  # nor a negative in an epoch
    uses = [sum(row in rows for found in ranks for rows in found) for row in targets.nonzero()[:, 0].tolist()]
    assert max(uses) - min(uses) <= 1  # all positives once before one is used again


def test_control_plain_shuffling_has_batches_without_a_positive() -> None:
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(make_targets()), 10, shuffle=True, generator=generator)
    assert 0 in {int(targets.sum()) for (targets,) in loader}


@on_ranks(2)
def test_epochs_are_orders_of_their_own(rank: int) -> None:
    first = batches(rank, 0, {})
    assert batches(rank, 0, {}) == first
    assert batches(rank, 1, {}) != first
    assert batches(rank, 0, {"seed": 1}) != first


def test_classes_with_numbers_of_their_own() -> None:
    targets = torch.tensor([0] * 50 + [1] * 30 + [2] * 5 + [3] * 3)
    sampler = BalancedBatchSampler(targets[:, None], 12, {2: 2, 3: 1})
    for rows in sampler:
        assert targets[rows].bincount(minlength=4)[2:].tolist() == [2, 1]
    every = BalancedBatchSampler(targets, 8, dict.fromkeys(range(4), 2))
    assert all(targets[rows].bincount().tolist() == [2] * 4 for rows in every)


def test_more_positives_than_there_are_repeat() -> None:
    (rows,) = BalancedBatchSampler([1, 0, 0, 1, 0, 0], 6, 5, num_batches=1)
    assert sorted(row for row in rows if row in (0, 3)) in ([0, 0, 0, 3, 3], [0, 0, 3, 3, 3])


def test_positives_are_mixed_with_the_others() -> None:
    targets = make_targets()
    places = {rows.index(row) for rows in BalancedBatchSampler(targets, 10, 1) for row in rows if targets[row] == 1}
    assert len(places) > 3


def test_it_resumes_within_an_epoch() -> None:
    through = BalancedBatchSampler(make_targets(), 10, 2)
    through.set_epoch(3)
    expected = list(through)
    for _ in range(4):
        through.advance()
    again = BalancedBatchSampler(make_targets(), 10, 2)
    again.load_state_dict(through.state_dict())
    again.set_epoch(3)  # the loop of the resumed job does this; it is the same epoch
    assert list(again) == expected[4:]
    assert len(again) == len(expected) - 4
    again.set_epoch(4)
    assert len(again) == len(expected)
    assert again.sampler is again  # what Lightning and Accelerate look for


MISTAKES = {
    "targets": lambda rank: {"targets": make_targets()[rank * 50 : 50 + rank * 53]},
    "seed": lambda rank: {"seed": rank},
    "batch_size": lambda rank: {"batch_size": 10 + rank},
}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("mistake", [*MISTAKES, "epoch", "batches done", "none"])
@on_ranks(2)
def test_ranks_that_differ_raise_when_an_epoch_starts(rank: int, mistake: str, first: int) -> None:
    """In the first of three epochs or in the second; the others, and one after them, start."""
    options: dict[str, Any] = {"targets": make_targets(), "batch_size": 10, "positives": 2}
    plain = BalancedBatchSampler(**options)
    for epoch in range(3):
        sampler, is_odd = plain, epoch == first
        if is_odd and mistake in MISTAKES:
            sampler = BalancedBatchSampler(**options | MISTAKES[mistake](rank))
        sampler.set_epoch(epoch + (mistake == "epoch" and is_odd and rank == 1))
        if mistake == "batches done" and is_odd and rank == 1:
            sampler.advance()
        loader = DataLoader(make_targets(), batch_sampler=sampler)  # type: ignore[arg-type]
        kind, text = common_error(lambda loader=loader: iter(loader))
        if not is_odd or mistake == "none":
            assert kind == "none", text
            continue
        assert kind == "RuntimeError"
        assert f"BalancedBatchSampler: expected the same on every rank, got {mistake}: " in text
        place = mistake in ("epoch", "batches done")
        assert ("Call set_epoch and advance, or load" if place else "Pass the targets of the whole data set") in text
    plain.set_epoch(9)
    assert len(list(plain)) == 103 // 20


def test_the_length_of_an_epoch_does_not_change_while_it_is_counted() -> None:
    assert len(BalancedBatchSampler(make_targets(), 200, 2)) == 1  # a batch larger than the data
    sampler = BalancedBatchSampler(make_targets(), 10, 2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _ in sampler:
            sampler.advance()
            assert len(sampler) == 10
    state = sampler.state_dict() | {"batches_done": 4}
    sampler.load_state_dict(state)
    assert len(sampler) == 6
    for done, _ in enumerate(sampler):
        sampler.advance()
        assert len(sampler) == 6, done
    sampler.set_epoch(2)
    next(iter(sampler))
    for _ in range(3):  # a part of an epoch; the next iteration is what is left of it
        sampler.advance()
    assert len(sampler) == 10
    iter(sampler)
    assert len(sampler) == 7


def test_an_epoch_that_starts_again_gives_a_warning_once() -> None:
    sampler = BalancedBatchSampler(make_targets(), 10, 2)
    next(iter(sampler))  # a look at the first batch is no epoch
    first = list(sampler)
    with pytest.warns(UserWarning, match=r"epoch 0 starts again, with the same batches.*Call set_epoch\(epoch\)"):
        assert list(sampler) == first
    list(sampler)  # an unexpected warning is an error here
    quiet = BalancedBatchSampler(make_targets(), 10, 2)
    for epoch in (0, 1, 1):  # the same number again, as in a second training, is what was asked for
        quiet.set_epoch(epoch)
        list(quiet)
    quiet.load_state_dict(quiet.state_dict())
    list(quiet)


def test_another_number_of_ranks_within_an_epoch_is_refused() -> None:
    sampler = BalancedBatchSampler(make_targets(), 10, 2)
    state = sampler.state_dict() | {"epoch": 2, "world_size": 4}
    sampler.load_state_dict(state)
    assert sampler.epoch == 2
    with pytest.raises(ValueError, match=r"expected 4, as in the epoch.*set_epoch\(3\)"):
        sampler.load_state_dict(state | {"batches_done": 1})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("seed", {"seed": 1}),
        ("batch_size", {"batch_size": 12}),
        ("positives", {"positives": 3}),
        ("num_batches", {"num_batches": 4}),
        ("targets", {"targets": make_targets(104)}),
        ("targets", {"targets": make_targets().roll(1)}),
    ],
)
def test_a_state_of_another_sampler_is_refused(name: str, options: dict[str, Any]) -> None:
    arguments = {"targets": make_targets(), "batch_size": 10, "positives": 2}
    state = BalancedBatchSampler(**arguments).state_dict()
    BalancedBatchSampler(**{**arguments, "targets": make_targets().bool()}).load_state_dict(state)  # the same rows
    with pytest.raises(ValueError, match=f"{name}: expected .*, as in the state"):
        BalancedBatchSampler(**{**arguments, **options}).load_state_dict(state)


def test_more_batches_than_an_epoch_has() -> None:
    sampler = BalancedBatchSampler(make_targets(), 10, 2)
    state = sampler.state_dict()
    for done in (-1, 11):
        with pytest.raises(ValueError, match="batches_done: expected"):
            sampler.load_state_dict(state | {"batches_done": done})
    for _ in range(10):
        sampler.advance()
    with pytest.raises(RuntimeError, match=r"at most 10 batches in an epoch.*set_epoch\(1\)"):
        sampler.advance()
    sampler.num_batches = 4  # or more ranks: fewer batches than are done
    with pytest.warns(UserWarning, match=r"epoch 0 has no batches left. Call set_epoch\(1\)"):
        assert list(sampler) == []
    assert len(sampler) == 0
    sampler.set_epoch(1)
    sampler.advance()
    assert len(list(sampler)) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([0, 1], 4, 5), ValueError, "at most 4 rows, the batch_size"),
        (([0, 1], 4, 0), ValueError, "positives: expected an int >= 1"),
        (([0, 1], 0, 1), ValueError, "batch_size: expected an int >= 1"),
        (([0, 0], 4, 1), ValueError, "rows of class 1"),
        (([1, 1], 4, 1), ValueError, "rows of other classes, 3 in a batch"),
        (([0.5, 1.0], 4, 1), ValueError, "integers of shape"),
        (([float("nan"), 1.0], 4, 1), ValueError, "integers of shape"),
        ((torch.zeros(3, 2, dtype=torch.int64), 4, 1), ValueError, "integers of shape"),
        (([0, 1], 4, 1.0), TypeError, "positives: expected an int"),
        (([0, 1], 4, {"1": 1}), TypeError, "class of positives: expected an int, got '1'"),
        (([0, 1], 4, {1.5: 1}), TypeError, "class of positives: expected an int, got 1.5"),
        (([], 4, 1), ValueError, "targets: expected at least one row, got none"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        BalancedBatchSampler(*arguments)


@on_ranks(2)
def test_a_worker_of_a_loader_waits_for_no_rank(rank: int) -> None:
    """Only rank 0 starts an epoch, where torch says that it runs in a worker of a loader."""
    if rank == 0:
        with mock.patch("torch.utils.data._utils.worker._worker_info", object()):
            assert len(batches(rank, 0, {})) == 5
