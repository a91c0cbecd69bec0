"""The samplers of batches: what is in a batch, what ranks share, epochs, and resuming."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import common_error, gathered, on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from workers import error_of, get_pool

from fullrank.data import BalancedBatchSampler, MPerClassSampler, UnrepeatedDistributedSampler


def make_targets(number: int = 103, positives: int = 7) -> Tensor:
    targets = torch.zeros(number, dtype=torch.int64)
    targets[torch.arange(positives) * 13 + 3] = 1
    return targets


def make_labels(num_classes: int = 20, ignored: int = 3) -> Tensor:
    """Return labels of classes with 2, 2, 3, 4, ... rows in a mixed order, and some that are ignored."""
    labels = torch.arange(num_classes).repeat_interleave((torch.arange(num_classes) + 1).clamp_min(2))
    labels = torch.cat([labels * 7, torch.full((ignored,), -100)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]


SAMPLERS: dict[str, Any] = {
    "balanced": partial(BalancedBatchSampler, targets=make_targets(), batch_size=10, positives=2),
    "m per class": partial(MPerClassSampler, labels=make_labels(), m=3, batch_size=12),
}


def batches(rank: int, epoch: int, options: dict[str, Any]) -> list[list[int]]:
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


@on_ranks(2)
def test_a_worker_of_a_loader_waits_for_no_rank(rank: int) -> None:
    """Only rank 0 starts an epoch, where torch says that it runs in a worker of a loader."""
    if rank == 0:
        with mock.patch("torch.utils.data._utils.worker._worker_info", object()):
            assert len(batches(rank, 0, {})) == 5


@pytest.mark.parametrize("num_classes", [4, 20])  # fewer than a step has, and more
@on_ranks()
def test_every_batch_has_m_rows_of_each_of_its_classes(rank: int, num_classes: int) -> None:
    labels, world_size = make_labels(num_classes), dist.get_world_size()
    sampler = MPerClassSampler(labels[:, None], 3, 12, num_batches=10)
    uses, seen = torch.zeros(7 * num_classes, dtype=torch.int64), set()
    assert len(list(sampler)) == 10
    for rows in sampler:
        classes, counts = labels[rows].unique(return_counts=True)
        assert counts.tolist() == [3] * 4
        assert classes.min() >= 0
        for label in classes.tolist():
            chosen = {row for row in rows if labels[row] == label}
            assert len(chosen) == min(3, max(2, label // 7 + 1))  # a class with fewer rows repeats them
        step = torch.tensor(gathered(rows))
        in_step = labels[step.flatten()].unique()
        assert len(in_step) == min(4 * world_size, num_classes)  # other classes on every rank
        uses += torch.bincount(labels[step[:, :]].reshape(-1), minlength=len(uses)) // 3
        seen |= set(step.flatten().tolist())
    per_class = uses[::7]
    assert int(per_class.max() - per_class.min()) <= 1  # all classes once before one is used again
    sampler.set_epoch(1)
    other = list(sampler)
    sampler.set_epoch(0)
    assert other != list(sampler)


def test_rows_of_a_class_are_used_once_before_one_is_used_again() -> None:
    labels = torch.tensor([5] * 7 + [6] * 4)
    drawn = [row for rows in MPerClassSampler(labels, 2, 4, num_batches=7) for row in rows]
    assert torch.bincount(torch.tensor(drawn))[:7].tolist() == [2] * 7
    assert set(torch.bincount(torch.tensor(drawn))[7:].tolist()) <= {3, 4}
    assert len(MPerClassSampler(labels, 2, 4)) == 11 // 4


def test_classes_of_a_single_row_give_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"2 of 4 classes have a single row, .* 3 times: .* to ignore_index") as caught:
        MPerClassSampler([0, 0, 1, 2, 3, 3, 3, -100], 3, 6)
    assert len(caught) == 1
    MPerClassSampler([0, 0, -100, -100, 3, 3, 3, -100], 3, 6)  # a warning is an error here


def test_control_shuffled_batches_lack_a_positive_and_have_few_pairs() -> None:
    for classes, size, number in ((make_targets(), 10, 1), (torch.arange(400) // 4, 8, 8)):
        loader = DataLoader(TensorDataset(classes), size, shuffle=True, generator=torch.Generator().manual_seed(0))
        assert number in {len(batch.unique()) for (batch,) in loader}


@pytest.mark.parametrize("name", SAMPLERS)
def test_it_resumes_within_an_epoch(name: str) -> None:
    through = SAMPLERS[name]()
    through.set_epoch(3)
    expected = list(through)
    for _ in range(4):
        through.advance()
    again = SAMPLERS[name]()
    again.load_state_dict(through.state_dict())
    again.set_epoch(3)  # the loop of the resumed job does this; it is the same epoch
    assert list(again) == expected[4:]
    assert len(again) == len(expected) - 4
    again.set_epoch(4)
    assert len(again) == len(expected)
    assert list(again) != expected
    assert again.sampler is again  # what Lightning and Accelerate look for


OTHER: list[tuple[str, dict[str, Any]]] = [
    *(("balanced", given) for given in ({"positives": 3}, {"seed": 1}, {"batch_size": 12}, {"num_batches": 4})),
    *(("balanced", {"targets": targets}) for targets in (make_targets(104), make_targets().roll(1))),
    *(("m per class", given) for given in ({"labels": make_labels().roll(1)}, {"m": 4})),
]


@pytest.mark.parametrize(("name", "options"), OTHER)
def test_a_state_of_another_sampler_is_refused(name: str, options: dict[str, Any]) -> None:
    state, ((argument, _),) = SAMPLERS[name]().state_dict(), options.items()
    same = {"targets": make_targets().bool()} if name == "balanced" else {"labels": make_labels().double()}
    SAMPLERS[name](**same).load_state_dict(state)
    with pytest.raises(ValueError, match=f"{argument}: expected .*, as in the state"):
        SAMPLERS[name](**options).load_state_dict(state)


MISTAKES: dict[tuple[str, str], Any] = {
    ("balanced", "targets"): lambda rank: {"targets": make_targets()[rank * 50 : 50 + rank * 53]},
    ("balanced", "seed"): lambda rank: {"seed": rank},
    ("balanced", "batch_size"): lambda rank: {"batch_size": 10 + rank},
    ("m per class", "labels"): lambda rank: {"labels": make_labels().roll(rank)},
    ("m per class", "m"): lambda rank: {"m": 2 if rank else 3},
}
PLACES = ("epoch", "batches done", "none")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("name", "mistake"), [*MISTAKES, *((name, place) for name in SAMPLERS for place in PLACES)])
@on_ranks(2)
def test_ranks_that_differ_raise_when_an_epoch_starts(rank: int, name: str, mistake: str, first: int) -> None:
    """In the first of three epochs or in the second; the others, and one after them, start."""
    plain = SAMPLERS[name]()
    for epoch in range(3):
        sampler, is_odd = plain, epoch == first
        if is_odd and mistake not in PLACES:
            sampler = SAMPLERS[name](**MISTAKES[name, mistake](rank))
        sampler.set_epoch(epoch + (mistake == "epoch" and is_odd and rank == 1))
        if mistake == "batches done" and is_odd and rank == 1:
            sampler.advance()
        loader = DataLoader(make_labels(), batch_sampler=sampler)
        kind, text = common_error(lambda loader=loader: iter(loader))
        if not is_odd or mistake == "none":
            assert kind == "none", text
            continue
        assert kind == "RuntimeError"
        assert f"{type(sampler).__name__}: expected the same on every rank, got {mistake}: " in text
        what = "targets" if name == "balanced" else "labels"
        fix = "Call set_epoch and advance, or load" if mistake in PLACES else f"Pass the {what} of the whole data set"
        assert fix in text
    plain.set_epoch(9)
    assert len(list(plain)) == {"balanced": 103 // 20, "m per class": 211 // 24}[name]  # rows in a step of two ranks


@pytest.mark.parametrize(
    ("sampler", "arguments", "error", "text"),
    [
        (BalancedBatchSampler, ([0, 1], 4, 5), ValueError, "at most 4 rows, the batch_size"),
        (BalancedBatchSampler, ([0, 1], 4, 0), ValueError, "positives: expected an int >= 1"),
        (BalancedBatchSampler, ([0, 1], 0, 1), ValueError, "batch_size: expected an int >= 1"),
        (BalancedBatchSampler, ([0, 0], 4, 1), ValueError, "rows of class 1"),
        (BalancedBatchSampler, ([1, 1], 4, 1), ValueError, "rows of other classes, 3 in a batch"),
        (BalancedBatchSampler, ([0.5, 1.0], 4, 1), ValueError, "integers of shape"),
        (BalancedBatchSampler, ([float("nan"), 1.0], 4, 1), ValueError, "integers of shape"),
        (BalancedBatchSampler, (torch.eye(3), 4, 1), ValueError, r"got .*targets\.argmax\(1\) of one-hot"),
        (BalancedBatchSampler, (Dataset(), 4, 1), ValueError, r"Of a Dataset: \[target for"),
        (BalancedBatchSampler, ([0, 1], 4, 1.0), TypeError, "positives: expected an int"),
        (BalancedBatchSampler, ([0, 1], 4, {"1": 1}), TypeError, "class of positives: expected an int, got '1'"),
        (BalancedBatchSampler, ([0, 1], 4, {1.5: 1}), TypeError, "class of positives: expected an int, got 1.5"),
        (BalancedBatchSampler, ([], 4, 1), ValueError, "targets: expected at least one row, got none"),
        (MPerClassSampler, ([0, 0, 1, 1], 1, 4), ValueError, "m: expected an int >= 2, got 1"),
        (MPerClassSampler, ([0, 0, 1, 1], 2.0, 4), TypeError, "m: expected an int"),
        (MPerClassSampler, ([0, 0, 1, 1], 2, 0), ValueError, "batch_size: expected an int >= 1"),
        (MPerClassSampler, ([0, 0, 1, 1], 2, 3), ValueError, "batch_size: expected a multiple of m=2, got 3"),
        (MPerClassSampler, ([0, 0, 1, 1], 2, 6), ValueError, "at least 3 classes, batch_size / m, got 2 classes"),
        (MPerClassSampler, ([0, 1, 2, 3], 2, 4), ValueError, "labels: expected a class with two rows"),
        (MPerClassSampler, ([-100, -100], 2, 4), ValueError, "at least 2 classes"),
        (MPerClassSampler, ([0.5, 1.0], 2, 4), ValueError, "labels: expected integers of shape"),
        (
            MPerClassSampler,
            (["a", "b"], 2, 4),
            ValueError,
            r"expected integers of shape .*got \['a', 'b'\]. Number .*numpy.unique\(labels",
        ),
        (MPerClassSampler, ([], 2, 4), ValueError, "labels: expected at least one row, got none"),
    ],
)
def test_arguments_that_do_not_fit(sampler: Any, arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        sampler(*arguments)


# Every row of an evaluation comes once, in the order of the data set or in one order of each epoch


@pytest.mark.parametrize("length", [0, 1, 2, 7, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_row_once(length: int, ranks: int, shuffle: bool) -> None:
    """In each epoch; torch's sampler repeats rows where the number of ranks does not divide theirs."""
    samplers = [UnrepeatedDistributedSampler(range(length), ranks, rank, shuffle) for rank in range(ranks)]
    orders = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        orders.append([row for column in range(length) for part in parts for row in part[column : column + 1]])
        assert sorted(orders[-1]) == list(range(length))
    assert orders[0] == list(range(length)) or shuffle
    assert orders[0] != orders[1] or not shuffle or length < 7
    repeated = (
        [row for rank in range(ranks) for row in DistributedSampler(range(length), ranks, rank)] if length else []
    )
    assert (len(repeated) > length) == (length % ranks > 0)


def test_arguments() -> None:
    assert list(UnrepeatedDistributedSampler(3)) == [0, 1, 2]  # without a process group
    assert "an int >= 0" in error_of(lambda: UnrepeatedDistributedSampler(-1))[1]
    assert "a data set with a length" in error_of(lambda: UnrepeatedDistributedSampler(iter([1])))[1]
    assert error_of(lambda: UnrepeatedDistributedSampler(3, 2, 2))[0] == "ValueError"
