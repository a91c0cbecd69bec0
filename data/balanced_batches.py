"""Batches that hold a fixed number of rows of rare classes, on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..distributed.group import Group
from ..errors import Words, check_count, check_int, expected
from .batch_sampler import BatchSampler, checked_classes, repeated_shuffles


class BalancedBatchSampler(BatchSampler):
    """Batches of row indices with a fixed number of rows of each rare class, on every rank and in every batch.

    Equal to shuffling the rare rows and the others separately, repeating each shuffle as often as needed, and cutting
    both into batches. A row occurs twice in one step only if its class has fewer rows than the step requires. An epoch
    has as many batches as with plain shuffling, so it leaves out some of the other rows, each epoch different ones.

    Rare classes are more frequent in the batches than in the data. So the model learns probabilities that are too high,
    and a quantile of a batch is not the quantile of the data. docs/recipes/batches.md measures both.

    Args:
        targets: (N,) or (N, 1), the class of each row of the whole data set, on every rank; ints, bools, whole floats.
        batch_size: rows of a batch, on each rank.
        positives: rows of class 1 in each batch, on each rank; or a mapping from class to rows. Others fill the batch.
        num_batches: batches of an epoch, on each rank; None is ``N // (batch_size * world_size)``, and at least 1.
        seed: the same on every rank. The order of an epoch depends only on the seed and the number of the epoch.
        group: process group or device mesh of the data-parallel ranks; None for the default group, if there is one.

    Raises:
        TypeError, ValueError: for arguments that do not fit, and for a class that has no row.
        RuntimeError: on every rank, when an epoch starts and targets, seed, epoch or other arguments differ.

    Distributed:
        Every rank computes the same shuffle, and takes its part. One collective at the start of an epoch, a header,
        compares what the shuffle depends on. You may construct the sampler before the group.

    Example:
        >>> targets = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0])
        >>> sampler = BalancedBatchSampler(targets, batch_size=4, positives=1)
        >>> [int(targets[rows].sum()) for rows in sampler]
        [1, 1, 1]
    """

    def __init__(
        self,
        targets: Tensor | Sequence[int],
        batch_size: int,
        positives: int | Mapping[int, int],
        *,
        num_batches: int | None = None,
        seed: int = 0,
        group: Group = None,
    ) -> None:
        classes = checked_classes("targets", targets)
        super().__init__(batch_size, num_batches, seed, group)
        self.num_rows = len(classes)
        self.positives = dict(positives) if isinstance(positives, Mapping) else {1: positives}
        for class_index, count in self.positives.items():
            check_int("class of positives", class_index)
            check_count("positives", count, 1)
        rest = batch_size - sum(self.positives.values())
        if rest < 0:
            raise ValueError(expected("positives", f"at most {batch_size} rows, the batch_size", positives))
        # How many rows of each stratum a batch has, and the indices of all its rows.
        strata = [(count, torch.nonzero(classes == index)[:, 0]) for index, count in self.positives.items()]
        is_rest = torch.ones(len(classes), dtype=torch.bool)
        for (_, rows), index in zip(strata, self.positives):
            if len(rows) == 0:
                raise ValueError(expected("targets", f"rows of class {index}", Words("none"), "Ask for another class."))
            is_rest[rows] = False
        if rest > 0:
            others = torch.nonzero(is_rest)[:, 0]
            if len(others) == 0:
                fix = f"Ask for {rest} more rows of the classes in positives."
                raise ValueError(expected("targets", f"rows of other classes, {rest} in a batch", Words("none"), fix))
            strata.append((rest, others))
        self._counts, self._classes = [count for count, _ in strata], [rows for _, rows in strata]
        self._own_arguments = {"positives": str(self.positives)}

    def _draw(self, length: int, rank: int, world_size: int, generator: torch.Generator) -> Tensor:
        parts = []
        for count, rows in zip(self._counts, self._classes):
            drawn = repeated_shuffles(len(rows), world_size * count, length, generator)
            parts.append(rows[drawn].view(length, world_size, count)[:, rank])
        return torch.cat(parts, dim=1)
