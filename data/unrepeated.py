"""Rows for an evaluation over processes: each of them once."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import DistributedSampler

from ..distributed.group import is_initialized
from ..errors import check_count, expected


class UnrepeatedDistributedSampler(DistributedSampler[int]):
    """A ``DistributedSampler`` that repeats no row: ranks may get one row fewer than others, or none.

    torch's sampler repeats the first rows until all ranks have equally many, so a metric over all ranks counts these
    twice. Use it for evaluation: in a training the ranks would run different numbers of steps.

    Args:
        dataset: the data set, or its length.
        num_replicas: number of ranks; None for those of the default group, 1 without one.
        rank: this rank; None for that in the default group.
        shuffle: draw another order in each epoch, the same on every rank; see ``set_epoch``.
        seed: of the orders.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Example:
        >>> [list(UnrepeatedDistributedSampler(5, 2, rank)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if isinstance(dataset, int):
            dataset = range(check_count("dataset", dataset, 0))
        elif not isinstance(dataset, Sized):
            raise TypeError(expected("dataset", "a data set with a length, or its length", dataset))
        if not is_initialized() and num_replicas is None and rank is None:
            num_replicas, rank = 1, 0
        whole: Any = dataset
        super().__init__(whole, num_replicas, rank, shuffle, seed)
        self.total_size = len(dataset)
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
