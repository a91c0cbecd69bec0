"""Batches with several rows of each class; epochs and resuming are those of test_balanced_batches.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import common_error, on_ranks, same
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fullrank.data import MPerClassSampler


def make_labels(num_classes: int = 20, ignored: int = 3) -> Tensor:
    """Return labels of classes with 2, 2, 3, 4, ... rows in a mixed order, and some that are ignored."""
    labels = torch.arange(num_classes).repeat_interleave((torch.arange(num_classes) + 1).clamp_min(2))
    labels = torch.cat([labels * 7, torch.full((ignored,), -100)])
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]


def everyone(rows: list[int]) -> list[list[int]]:
    """Return the batch of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, rows)
    return found


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
        step = torch.tensor(everyone(rows))
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


def test_control_a_shuffled_batch_has_few_pairs() -> None:
    labels = torch.arange(400) // 4
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(labels), 8, shuffle=True, generator=generator)
    assert 8 in {len(batch.unique()) for (batch,) in loader}


MISTAKES: dict[str, Any] = {
    "labels": lambda rank: {"labels": make_labels().roll(rank)},
    "m": lambda rank: {"m": 2 if rank else 3},
    "seed": lambda rank: {"seed": rank},
}


@pytest.mark.parametrize("mistake", [*MISTAKES, "epoch"])
@on_ranks()
def test_ranks_that_differ_raise_when_an_epoch_starts(rank: int, mistake: str) -> None:
    options: dict[str, Any] = {"labels": make_labels(), "m": 3, "batch_size": 12}
    right = MPerClassSampler(**options)
    first = same(len(list(right)))
    sampler = MPerClassSampler(**options | MISTAKES.get(mistake, lambda rank: {})(rank))
    sampler.set_epoch(1 + (mistake == "epoch") * rank)
    kind, text = common_error(lambda: iter(sampler))
    assert kind == "RuntimeError"
    assert f"MPerClassSampler: expected the same on every rank, got {mistake}: " in text
    assert ("Call set_epoch and" if mistake == "epoch" else "Pass the labels of the whole data set") in text
    right.set_epoch(1)
    assert len(list(right)) == first


def test_it_resumes_within_an_epoch() -> None:
    arguments = {"labels": make_labels(), "m": 2, "batch_size": 8}
    through = MPerClassSampler(**arguments)
    expected = list(through)
    for _ in range(4):
        through.advance()
    again = MPerClassSampler(**arguments)
    again.load_state_dict(through.state_dict())
    assert list(again) == expected[4:]
    for name, value in (("labels", make_labels().roll(1)), ("m", 4)):
        with pytest.raises(ValueError, match=f"{name}: expected .*, as in the state"):
            MPerClassSampler(**{**arguments, name: value}).load_state_dict(through.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([0, 0, 1, 1], 1, 4), ValueError, "m: expected an int >= 2, got 1"),
        (([0, 0, 1, 1], 2.0, 4), TypeError, "m: expected an int"),
        (([0, 0, 1, 1], 2, 0), ValueError, "batch_size: expected an int >= 1"),
        (([0, 0, 1, 1], 2, 3), ValueError, "batch_size: expected a multiple of m=2, got 3"),
        (([0, 0, 1, 1], 2, 6), ValueError, "at least 3 classes, batch_size / m, got 2 classes"),
        (([0, 1, 2, 3], 2, 4), ValueError, "labels: expected a class with two rows"),
        (([-100, -100], 2, 4), ValueError, "at least 2 classes"),
        (([0.5, 1.0], 2, 4), ValueError, "labels: expected integers of shape"),
        (
            (["a", "b"], 2, 4),
            ValueError,
            r"expected integers of shape .*got \['a', 'b'\]. Number .*numpy.unique\(labels",
        ),
        (([], 2, 4), ValueError, "labels: expected at least one row, got none"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        MPerClassSampler(*arguments)
