"""What the samplers of batches share: epochs, resuming, and the comparison of the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler, get_worker_info

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
