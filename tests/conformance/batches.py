"""The data of the tests over ranks: rows with targets, cut over ranks and micro-batches, and windows of tokens.

Everything is made from seeds, so every process can make the data of all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from subjects import NUM_FEATURES, gradient
from torch import Tensor, nn

IGNORED = -100

R = TypeVar("R", bound=tuple[Any, ...])


class Rows(NamedTuple):
    """Rows with their targets; weights or None."""

    features: Tensor  # (N, 7)
    targets: Tensor
    weight: Tensor | None = None


def make_rows(
    seed: int,
    count: int,
    *,
    dtype: torch.dtype | str = torch.float64,
    num_classes: int = 1,
    multi_hot: bool = False,
    weighted: bool = False,
) -> Rows:
    """Return the same rows in every process; of one class the targets are 0 and 1.

    A tenth of the elements of multi-hot targets (N, C) is ignored, or every sixth class index.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, NUM_FEATURES, dtype=torch.float64, generator=generator).to(dtype)
    if multi_hot:
        targets = (torch.rand(count, num_classes, generator=generator) < 0.3).long()
        targets[torch.rand(count, num_classes, generator=generator) < 0.1] = IGNORED
    else:
        targets = torch.randint(0, max(2, num_classes), (count,), generator=generator)
        targets[::6] = IGNORED
    weight = torch.rand(count, dtype=torch.float64, generator=generator).to(dtype) if weighted else None
    return Rows(features, targets, weight)


def split(count: int, world_size: int, step: int, layout: str = "uneven") -> list[int]:
    """Return uneven row counts; in every odd step one rank, a different one each time, has none.

    In the layout "last" the last rank has all rows; in "last at first" it has them in the first step.
    """
    if layout == "last" or (layout == "last at first" and step == 0):
        return [0] * (world_size - 1) + [count]
    shares = [1 + (rank + step) % world_size * 2 for rank in range(world_size)]
    if step % 2:
        shares[(step // 2) % world_size] = 0
    return portion(count, shares)


def cut(rows: Rows, num_parts: int, seed: int = 0) -> list[Rows]:
    """Cut rows into micro-batches of uneven size, the second of them empty when there are three."""
    shares = [1 + (seed + index) % 3 for index in range(num_parts)]
    if num_parts > 2:
        shares[1] = 0
    counts = portion(len(rows.features), shares)
    return [part_of(rows, counts, index) for index in range(num_parts)]


def portion(count: int, shares: list[int]) -> list[int]:
    """Return whole numbers that add up to ``count``, in about the ratio of ``shares``."""
    counts = [count * share // sum(shares) for share in shares]
    counts[counts.index(max(counts))] += count - sum(counts)
    return counts


def part_of(rows: R, counts: list[int], index: int) -> R:
    """Return part ``index`` of rows, or another tuple of row-aligned tensors, that are cut into ``counts``."""
    own = slice(sum(counts[:index]), sum(counts[: index + 1]))
    return type(rows)(*(None if tensor is None else tensor[own] for tensor in rows))


def own(*tensors: Tensor) -> list[Tensor]:
    """Return this rank's rows, of which ranks have different numbers."""
    counts, rank = split(len(tensors[0]), dist.get_world_size(), 0), dist.get_rank()
    return [tensor[sum(counts[:rank]) : sum(counts[: rank + 1])] for tensor in tensors]


LENGTH = 9
Batch = dict[str, Tensor]


def make_batch(rank: int, index: int, empty: bool = False) -> Batch:
    """Return a micro-batch of two rows with 1 to 15 valid tokens, or with none; the first labels would count too."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    tokens = torch.randint(0, NUM_FEATURES, (2, LENGTH), generator=generator)
    labels = tokens.clone()
    kept = [1 + (3 * rank + 5 * index) % (LENGTH - 1), (2 * rank + 7 * index) % LENGTH]  # valid tokens of the two rows
    for row, number in enumerate(kept):
        labels[row, 1 + number :] = IGNORED
    if empty:
        labels[:] = IGNORED
    return {"tokens": tokens, "labels": labels}


LAYOUTS = ("full", "uneven", "none", "unequal")


def make_window(layout: str, rank: int) -> list[Batch]:
    """Return the micro-batches of one rank.

    In every layout some have no terms. ``"uneven"``: rank 0 has no terms at all; ``"none"``: no rank has;
    ``"unequal"``: the ranks have different numbers of micro-batches.
    """
    if layout == "unequal":
        return [make_batch(rank, index) for index in range(1 + (2 * rank) % 3)]
    empty = {"uneven": rank == 0, "none": True}.get(layout, False)
    return [make_batch(rank, index, empty or (rank == 1 and index == 1)) for index in range(3)]


def all_batches(layout: str, num_ranks: int | None = None) -> list[Batch]:
    num_ranks = dist.get_world_size() if num_ranks is None else num_ranks
    return [batch for rank in range(num_ranks) for batch in make_window(layout, rank)]


def halves(batches: Sequence[Batch], part: int) -> list[Batch]:
    """Return one of two halves of every sequence, the labels shifted before the cut."""
    columns = slice(0, 5) if part == 0 else slice(5, None)
    shifted = [(b["tokens"], F.pad(b["labels"][:, 1:], (0, 1), value=IGNORED)) for b in batches]
    return [{"tokens": tokens[:, columns], "labels": labels[:, columns]} for tokens, labels in shifted]


def sum_loss(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Return the sum of the causal losses, times the ``scale`` of a micro-batch that has one."""
    logits, labels = model(batch["tokens"])[:, :-1], batch["labels"][:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss * batch["scale"] if "scale" in batch else loss


def num_valid(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())


WEIGHTS = {"mtp": 0.3}  # of the second loss of TwoHeads


def sum_losses(model: Callable[[Tensor], Any], batch: Batch) -> dict[str, Tensor]:
    sums = {}
    for shift, (name, logits) in enumerate(zip(("ce", "mtp"), model(batch["tokens"])), 1):
        labels = batch["labels"][:, shift:].flatten()
        sums[name] = F.cross_entropy(logits[:, :-shift].flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return sums


def num_mtp(batch: Batch) -> Tensor:
    return (batch["labels"][:, 2:] != IGNORED).sum()


class Result(NamedTuple):
    """A gradient of all parameters, flattened, and a loss."""

    gradient: Tensor
    loss: Tensor


def one_process(model: nn.Module, batches: Sequence[Batch], total: float | None = None) -> Result:
    """Return the definition: all rows of all ranks in one process, one sum of losses, one division by their number.

    It calls nothing of the package. ``total`` is another divisor.
    """
    model.zero_grad()
    loss = torch.stack([sum_loss(model, batch) for batch in batches]).sum()
    loss = loss / (total or max(sum(map(num_valid, batches)), 1))
    loss.backward()
    return Result(gradient(model), loss.detach())


def one_process_of_terms(model: nn.Module, batches: Sequence[Batch], mtp: float = WEIGHTS["mtp"]) -> Result:
    """Return the definition for two losses, each divided by its own number."""
    model.zero_grad()
    losses = [sum_losses(model, batch) for batch in batches]
    loss = torch.stack([each["ce"] for each in losses]).sum() / max(1, sum(map(num_valid, batches)))
    loss = loss + mtp * torch.stack([each["mtp"] for each in losses]).sum() / max(1, int(sum(map(num_mtp, batches))))
    loss.backward()
    return Result(gradient(model), loss.detach())
