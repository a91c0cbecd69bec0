"""Every row of an evaluation comes once, in the order of the data set or in one order of each epoch."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks, same
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from workers import error_of

from fullrank.data import UnrepeatedDistributedSampler


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


@on_ranks(2)
def test_ranks_of_the_default_group(rank: int) -> None:
    rows = TensorDataset(torch.arange(7))
    own = [int(row) for (batch,) in DataLoader(rows, 2, sampler=UnrepeatedDistributedSampler(rows)) for row in batch]
    assert own == list(range(rank, 7, 2))
    assert same(sum(len(UnrepeatedDistributedSampler(7, 2, part)) for part in (0, 1))) == 7


def test_arguments() -> None:
    assert list(UnrepeatedDistributedSampler(3)) == [0, 1, 2]  # without a process group
    assert "an int >= 0" in error_of(lambda: UnrepeatedDistributedSampler(-1))[1]
    assert "a data set with a length" in error_of(lambda: UnrepeatedDistributedSampler(iter([1])))[1]
    assert error_of(lambda: UnrepeatedDistributedSampler(3, 2, 2))[0] == "ValueError"
