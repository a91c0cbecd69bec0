"""Batches that hold several rows of each of their classes, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..distributed.group import Group
from ..errors import Words, check_count, check_int, expected, warn
from .batch_sampler import BatchSampler, checked_classes, repeated_shuffles


class MPerClassSampler(BatchSampler):
    """Batches of row indices with m rows of each of ``batch_size / m`` classes, on every rank and in every batch.

    Equal to shuffling the classes, taking ``batch_size / m`` of them for each batch, and m rows of each from a shuffle
    of its rows. For losses that compare the rows of one label with those of others, such as :class:`SupConLoss` and
    :class:`RetrievalSmoothAPLoss`: with many classes a shuffled batch has few pairs, or none. For losses with
    ``indexes``, pass the query of each row as its label.

    All classes are used once before one is used again, whatever their sizes, and all rows of a class too. The ranks
    have different classes in a step, if there are enough. A row occurs twice in a batch only if its class has fewer
    than m rows. A class of one row warns: set labels that occur once to ``ignore_index`` here.

    Args:
        labels: (N,) or (N, 1), the class of each row of the whole data set, on every rank; ints, bools, whole floats.
        m: rows of each class in a batch, at least 2.
        batch_size: rows of a batch, on each rank; a multiple of m.
        num_batches, seed, group: those of :class:`BalancedBatchSampler`; N counts the rows that are not ignored.
        ignore_index: rows with this label are never drawn.

    Raises:
        TypeError, ValueError: for arguments that do not fit, for fewer than ``batch_size / m`` classes, and if no class
            has two rows.
        RuntimeError: on every rank, when an epoch starts and labels, seed, epoch or other arguments differ.

    Distributed:
        As :class:`BalancedBatchSampler`: one collective at the start of an epoch, a header.

    Example:
        >>> labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 3, 3])
        >>> sampler = MPerClassSampler(labels, m=2, batch_size=4)
        >>> [labels[rows].unique(return_counts=True)[1].tolist() for rows in sampler]
        [[2, 2], [2, 2], [2, 2]]
    """

    _targets = "labels"

    def __init__(
        self,
        labels: Tensor | Sequence[int],
        m: int,
        batch_size: int,
        *,
        num_batches: int | None = None,
        seed: int = 0,
        group: Group = None,
        ignore_index: int = -100,
    ) -> None:
        classes = checked_classes("labels", labels).long()
        super().__init__(batch_size, num_batches, seed, group)
        self.m, self.ignore_index = check_count("m", m, 2), check_int("ignore_index", ignore_index)
        if batch_size % m:
            raise ValueError(expected("batch_size", f"a multiple of m={m}", batch_size))
        kept = torch.nonzero(classes != ignore_index)[:, 0]
        found, counts = classes[kept].unique(return_counts=True)
        if len(found) < batch_size // m:
            fix = "Ask for smaller batches, or for more rows of a class."
            got = Words(f"{len(found)} classes")
            raise ValueError(expected("labels", f"at least {batch_size // m} classes, batch_size / m", got, fix))
        if int(counts.max()) < 2:
            fix = "No row then has another one of its label. Pass the same label for rows that belong together."
            raise ValueError(expected("labels", "a class with two rows", Words("one row of each class"), fix))
        single = int((counts == 1).sum())
        if single:
            warn(
                f"MPerClassSampler: {single} of {len(counts)} classes have a single row, which a batch then has {m} "
                "times: copies as positives teach nothing. Set labels that occur once to ignore_index in the sampler."
            )
        self.num_rows = len(kept)
        self._rows = kept[classes[kept].argsort(stable=True)]  # those of the first class, of the second, ...
        self._counts = counts
        self._own_arguments, self._classes = {"m": m}, [self._rows, counts]

    def _draw(self, length: int, rank: int, world_size: int, generator: torch.Generator) -> Tensor:
        num_classes, per_batch = len(self._counts), self.batch_size // self.m
        per_step = per_batch * world_size if per_batch * world_size <= num_classes else per_batch
        number = length * world_size * per_batch
        drawn = repeated_shuffles(num_classes, per_step, number // per_step, generator)  # [number]
        rows = drawn.new_empty(number, self.m)
        starts = self._counts.cumsum(0) - self._counts
        used, uses = drawn.unique(return_counts=True)
        places = drawn.argsort(stable=True).split(uses.tolist())
        for place, start, count in zip(places, starts[used].tolist(), self._counts[used].tolist()):
            of_class = repeated_shuffles(count, self.m, len(place), generator).view(-1, self.m)
            rows[place] = self._rows[start + of_class]
        return rows.view(length, world_size, self.batch_size)[:, rank]
