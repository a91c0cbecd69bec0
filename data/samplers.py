"""Samplers: batches with enough rows of rare classes, or of each class, on every rank; and each row once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler, get_worker_info

from ..distributed.group import Group, is_initialized, resolve_group
from ..distributed.header import Offer, State, agree_on
from ..errors import Words, check_count, check_int, expected, warn

_SAME_PLACE = "Call set_epoch and advance, or load the same state, on every rank."


class BatchSampler(Sampler[list[int]]):
    """Base of the samplers: every rank draws the same epoch, and takes its part of each step."""

    _targets = "targets"  # the name of the argument with the class of each row
    _classes: list[Tensor]  # all that the subclass uses of the targets, int64
    _own_arguments: dict[str, Any]  # that only the subclass has

    def __init__(self, batch_size: int, num_batches: int | None, seed: int, group: Group) -> None:
        self.batch_size = check_count("batch_size", batch_size, 1)
        if num_batches is not None:
            check_count("num_batches", num_batches, 1)
        self.num_batches, self.seed, self.group = num_batches, check_int("seed", seed), group
        self.num_rows, self.epoch, self.batches_done = 0, 0, 0
        self._num_skipped = 0  # batches of this epoch that were done when it was started, or its state loaded
        self._is_complete = self._has_warned = False  # all batches of this epoch were drawn; the warning was given
        self._digest: str | None = None  # of the targets, once it is compared or saved

    def _draw(self, length: int, rank: int, world_size: int, generator: torch.Generator) -> Tensor:
        """Return the rows (length, batch_size) of this rank; the generator is the same on every rank."""
        raise NotImplementedError

    @property
    def sampler(self) -> BatchSampler:
        """The sampler itself: Lightning and Accelerate call ``set_epoch`` of this attribute of a batch sampler."""
        return self

    def _rank_and_size(self) -> tuple[int, int]:
        group = resolve_group(self.group) if is_initialized() else None
        return (0, 1) if group is None else (group.rank(), group.size())

    def _length(self, world_size: int) -> int:
        return self.num_batches or max(1, self.num_rows // (self.batch_size * world_size))

    def __len__(self) -> int:
        """Return the number of batches of this epoch, less those done before a restart; the same on every rank."""
        return max(0, self._length(self._rank_and_size()[1]) - self._num_skipped)

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the batches of this rank, less those done before a restart."""
        rank, world_size = self._rank_and_size()
        if world_size > 1 and get_worker_info() is None:  # the worker processes of a loader are in no group
            fix = (
                f"Pass the {self._targets} of the whole data set, and the same seed, on every rank: each takes its own "
                "part of every step."
            )
            facts = {name: State(value, fix) for name, value in self._arguments().items()}
            facts |= {"epoch": State(self.epoch, _SAME_PLACE), "batches done": State(self.batches_done, _SAME_PLACE)}
            agree_on(type(self).__name__, resolve_group(self.group), lambda: Offer(None, facts))
        length, self._num_skipped = self._length(world_size), self.batches_done
        if self.batches_done >= length:
            warn(f"{type(self).__name__}: epoch {self.epoch} has no batches left. Call set_epoch({self.epoch + 1}).")
        if self._is_complete and self.batches_done == 0 and not self._has_warned:
            self._has_warned = True
            warn(
                f"{type(self).__name__}: epoch {self.epoch} starts again, with the same batches and without "
                "the same rows. Call set_epoch(epoch) before each epoch."
            )
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        batches = self._draw(length, rank, world_size, generator)
        # Shuffle each batch, which may be cut into micro-batches.
        order = torch.rand(length, self.batch_size, generator=generator).argsort(dim=1)
        return self._yield_lists(batches.gather(1, order)[self.batches_done :])

    def _yield_lists(self, batches: Tensor) -> Iterator[list[int]]:
        for batch in batches:
            yield batch.tolist()
        self._is_complete = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0. A new epoch starts with its first batch; the current one stays where it is."""
        if check_count("epoch", epoch, 0) != self.epoch:
            self.epoch, self.batches_done, self._num_skipped = epoch, 0, 0
        self._is_complete = False

    def advance(self) -> None:
        """Count a batch as done; call it after each optimizer step if you save checkpoints within an epoch.

        A loader asks for batches before the model has trained on them, so the sampler does not count by itself. It
        raises RuntimeError when all batches of the epoch are done.
        """
        length = self._length(self._rank_and_size()[1])
        if self.batches_done >= length:
            fix = f"Call set_epoch({self.epoch + 1}) before the batches of the next epoch."
            got = Words(f"one more in epoch {self.epoch}")
            raise RuntimeError(expected("advance", f"at most {length} batches in an epoch", got, fix))
        self.batches_done += 1

    def _arguments(self) -> dict[str, Any]:
        """Return what the order of an epoch depends on, besides its number and the ranks."""
        if self._digest is None:
            digest = hashlib.blake2b(str(self.num_rows).encode(), digest_size=8)
            for rows in self._classes:
                digest.update(str(len(rows)).encode())
                digest.update(rows.numpy().tobytes())
            self._digest = digest.hexdigest()
        shared = {name: getattr(self, name) for name in ("seed", "batch_size", "num_batches")}
        return {**shared, **self._own_arguments, self._targets: f"{self.num_rows} rows, digest {self._digest}"}

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, batches done and number of ranks; for comparison also arguments and a digest of the targets."""
        place = {"epoch": self.epoch, "batches_done": self.batches_done, "world_size": self._rank_and_size()[1]}
        return place | self._arguments()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: for the state of a sampler with other arguments or targets; within an epoch on another number of
                ranks, whose batches differ; and for more batches than an epoch has.
        """
        world_size = self._rank_and_size()[1]
        for name, value in self._arguments().items():
            if state.get(name) != value:
                fix = "Construct the sampler with the arguments of the one that was saved, or call set_epoch instead."
                raise ValueError(expected(name, f"{state.get(name)}, as in the state", Words(value), fix))
        if state["batches_done"] > 0 and state["world_size"] != world_size:
            fix = f"Continue with the next epoch: set_epoch({state['epoch'] + 1})."
            what = f"{state['world_size']}, as in the epoch that the state is within"
            raise ValueError(expected("number of ranks", what, world_size, fix))
        epoch, done = check_count("epoch", state["epoch"], 0), check_count("batches_done", state["batches_done"], 0)
        if done > self._length(world_size):
            raise ValueError(expected("batches_done", f"at most {self._length(world_size)}, those of an epoch", done))
        self.epoch, self.batches_done, self._num_skipped, self._is_complete = epoch, done, done, False


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


def checked_classes(name: str, targets: Any) -> Tensor:
    """Return the class of each row, (N,) integers or bools on the host, or raise ValueError."""
    try:
        classes = torch.as_tensor(targets).detach().cpu()
    except (TypeError, ValueError, RuntimeError):  # such as of strings
        fix = f"Number them: numpy.unique({name}, return_inverse=True)[1]. Of a Dataset: [target for _, target in it]."
        raise ValueError(expected(name, "integers of shape (N,)", targets, fix)) from None
    if classes.numel() == 0:
        fix = "Pass those of the whole data set."
        raise ValueError(expected(name, "at least one row", Words("none"), fix))
    if classes.ndim == 2 and classes.shape[1] == 1:
        classes = classes[:, 0]
    if classes.is_floating_point() and bool((classes.isfinite() & (classes == classes.round())).all()):
        classes = classes.long()
    if classes.ndim != 1 or classes.is_floating_point() or classes.is_complex():
        fix = f"Pass one class per row, such as {name}.argmax(1) of one-hot rows, {name}.long(), or one of its labels."
        raise ValueError(expected(name, "integers of shape (N,)", classes, fix))
    return classes


def repeated_shuffles(number: int, per_step: int, steps: int, generator: torch.Generator) -> Tensor:
    """Return indices of ``number`` rows for all ``steps``, from one shuffle after another.

    No step has a row twice, unless ``per_step`` is greater than ``number``.
    """
    shuffles: list[Tensor] = []
    for drawn in range(0, steps * per_step, number):
        shuffle = torch.randperm(number, generator=generator)
        begun = drawn % per_step  # rows of a step that the last shuffle did not complete
        if begun and per_step <= number:
            is_in_step = torch.isin(shuffle, shuffles[-1][-begun:])
            shuffle = torch.cat([shuffle[~is_in_step], shuffle[is_in_step]])
        shuffles.append(shuffle)
    return torch.cat(shuffles)[: steps * per_step]


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
