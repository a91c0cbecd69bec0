"""Loaders that end together: what a batch without rows is, uneven loaders, loaders that fail."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from loss_cases import normal
from on_ranks import common_error, on_ranks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from workers import error_of

import fullrank
from fullrank.data.until_all_end import until_all_end, without_rows


class Pair(NamedTuple):
    features: Tensor
    labels: Any


@dataclass(frozen=True)
class Example:
    features: Tensor
    task: str = "rank"
    squares: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "squares", self.features.square())


ROWS = torch.arange(6.0).view(3, 2)
FORMS: dict[str, tuple[Any, Any]] = {
    "tensor": (ROWS, ROWS[:0]),
    "list": ([ROWS, ROWS[:, 0]], [ROWS[:0], ROWS[:0, 0]]),
    "tuple": ((ROWS, [ROWS]), (ROWS[:0], [ROWS[:0]])),
    "named tuple": (Pair(ROWS, {"a": ROWS}), Pair(ROWS[:0], {"a": ROWS[:0]})),
    "dataclass": (Example(ROWS), Example(ROWS[:0])),
    "dict": ({"x": ROWS, "deep": {"y": (ROWS,)}}, {"x": ROWS[:0], "deep": {"y": (ROWS[:0],)}}),
    "strings": ({"x": ROWS, "text": ["a", "b", "c"]}, {"x": ROWS[:0], "text": []}),
    "numbers": ((ROWS, (1, 2.5, True)), (ROWS[:0], ())),
    "constants": ([ROWS, "task", 3, None, torch.tensor(2.0)], [ROWS[:0], "task", 3, None, torch.tensor(2.0)]),
    "array": ({"x": ROWS.numpy()}, {"x": ROWS.numpy()[:0]}),
}


def same(found: Any, expected: Any) -> bool:
    """Return whether two batches have the same types, shapes and values."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, Example):
        return same(vars(found), vars(expected))
    if isinstance(found, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, (Tensor, numpy.ndarray)):
        return found.dtype == expected.dtype and found.shape == expected.shape and bool((found == expected).all())
    return bool(found == expected)


@pytest.mark.parametrize("name", FORMS)
def test_a_batch_without_rows_keeps_its_form(name: str) -> None:
    batch, expected = FORMS[name]
    assert same(without_rows(batch), expected)
    assert same(without_rows(without_rows(batch)), expected)
    assert not same(batch, expected)


def test_other_containers_and_what_they_hold_besides() -> None:
    factory: Any = defaultdict(list, x=ROWS)
    found = without_rows(OrderedDict(x=ROWS, inner=factory))
    assert isinstance(found, OrderedDict)
    assert found["inner"].default_factory is list
    assert found["inner"]["x"].shape == (0, 2)
    assert factory["x"].shape == (3, 2)
    assert without_rows(ROWS).untyped_storage().nbytes() == 0  # nothing of the batch is kept alive
    for batch in ({"x": object()}, {1, 2}):  # the second has `copy`, as an array
        with pytest.raises(TypeError, match=r"batch: expected tensors, in dicts, lists and tuples.* Pass empty="):
            without_rows(batch)


def test_one_process_iterates_as_it_is() -> None:
    batches = [object(), object()]
    loader = until_all_end(batches)
    for _ in range(2):
        assert [id(batch) for batch in loader] == [id(batch) for batch in batches]


def loader_of(rank: int, world_size: int, epoch: int = 0, empty_rank: int | None = None) -> list[dict[str, Tensor]]:
    """Return the batches of a rank: of different sizes, another rank having the most in each epoch."""
    number = 0 if rank == empty_rank else 1 + 2 * ((rank + epoch) % world_size)
    features = [normal(2 + (rank + index) % 3, 4, seed=100 * epoch + 10 * rank + index) for index in range(number)]
    return [{"features": rows, "targets": (rows[:, 0] > 0).long()} for rows in features]


NONE = {"features": torch.zeros(0, 4, dtype=torch.float64), "targets": torch.zeros(0, dtype=torch.int64)}


@pytest.mark.parametrize("empty_rank", [None, 1], ids=["uneven", "one is empty"])
@on_ranks()
def test_own_batches_and_then_batches_without_rows(rank: int, empty_rank: int | None) -> None:
    """That a step with a rank without rows is right is in tests/conformance/test_promise.py."""
    world_size, batches = dist.get_world_size(), list[Any]()
    loader = until_all_end(batches, empty=NONE if empty_rank is not None else None)
    for epoch in range(3):
        batches[:] = loader_of(rank, world_size, epoch, empty_rank)
        numbers = [len(loader_of(other, world_size, epoch, empty_rank)) for other in range(world_size)]
        assert min(numbers) < max(numbers)
        padding = [NONE] * (max(numbers) - numbers[rank])
        assert same(list(loader), batches + padding)


class Failing:
    """A loader that fails at the batch of a number, counted over the epochs; -1 when it starts."""

    def __init__(self, batches: list[Any], number: int) -> None:
        self.batches, self.number, self.count = batches, number, 0

    def __iter__(self) -> Iterator[Any]:
        if self.number == -1:
            raise OSError("no such folder")
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for batch in self.batches:
            self.count += 1
            if self.count == self.number:
                raise OSError("cannot read cat.jpg")
            yield batch


@pytest.mark.parametrize(("number", "before"), [(-1, 0), (1, 0), (2, 1), (4, None)])
@on_ranks()
def test_a_loader_that_fails_raises_on_every_rank(rank: int, number: int, before: int | None) -> None:
    """Of rank 1: where it starts, in the first batch, in the second, and in the second epoch; the next loader works."""
    own, longest = loader_of(rank, dist.get_world_size()), 2 * dist.get_world_size() - 1
    failing, seen = until_all_end(Failing(own, number) if rank == 1 else own), []
    text = "no such folder" if number == -1 else "cannot read cat.jpg"
    error = common_error(lambda: [seen.extend(failing) for _ in range(2)])
    assert error == ("RuntimeError", f"until_all_end failed on rank 1: OSError: {text}")
    assert len(seen) == (longest if before is None else before)
    assert len(list(until_all_end(own))) == longest


@on_ranks()
def test_a_rank_without_anything_to_yield(rank: int) -> None:
    own = [] if rank == 0 else [ROWS]
    assert len(list(until_all_end(own, empty=ROWS[:0]))) == 1
    kind, text = common_error(lambda: list(until_all_end(own)))
    assert kind == "ValueError"
    assert text.startswith("until_all_end: expected a batch in the loader of every rank, got none on rank 0. Pass ")
    kind, text = common_error(lambda: list(until_all_end(own or [object()])))
    assert kind == "TypeError"
    assert text.startswith("until_all_end failed on rank 0: batch: expected tensors")


@on_ranks(2)
def test_the_last_batch_is_known_in_the_next_epoch(rank: int) -> None:
    """Rank 0 has a batch in the first epoch alone, and loops change their batches."""
    batches = [{"x": ROWS}] if rank == 0 else [{"x": ROWS}, {"x": ROWS}]
    loader, found = until_all_end(batches), []
    for epoch in range(2):
        if epoch and rank == 0:
            batches.clear()
        for batch in loader:
            found.append(len(dict(batch)["x"]))
            if not found[-1]:
                batch.pop("x")
    assert found == ([3, 3, 3, 3] if rank else [3, 0, 0, 0])


@on_ranks()
def test_a_rank_that_leaves_early_raises_on_all(rank: int) -> None:
    """Rank 0 leaves the loop and calls something else."""

    def train() -> None:
        for step, _ in enumerate(until_all_end([ROWS] * 3)):
            if rank == 0 and step == 1:
                break
        fullrank.all_gather_no_grad(ROWS)

    kind, text = error_of(train)
    assert kind == "RuntimeError"
    assert "until_all_end on rank" in text


@on_ranks(2)
def test_a_loader_of_torch(rank: int) -> None:
    rows = TensorDataset(torch.arange(3.0 + 4 * rank)[:, None].expand(-1, 2), torch.arange(3 + 4 * rank))
    shapes = [tuple(batch[0].shape) for batch in until_all_end(DataLoader(rows, batch_size=2))]
    assert shapes == [[(2, 2), (1, 2), (0, 2), (0, 2)], [(2, 2), (2, 2), (2, 2), (1, 2)]][rank]
