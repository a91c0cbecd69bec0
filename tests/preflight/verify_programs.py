"""Programs for :func:`fullrank.verify_step`, right and wrong, with what its report has to say.

Each is a training step ``step(model, batch)`` as people write it, many without this package. A row of :data:`PROGRAMS`
names the step, the verdict, and words of the first or second cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
from on_ranks import gathered
from torch import Tensor, nn

import fullrank as fr

DTYPE = torch.float64
COUNTS = (9, 14, 5)
EVEN = (8, 8, 8)


class Net(nn.Module):
    """Two layers, and a learned scale that some programs use."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 8).to(DTYPE), nn.Linear(8, 1).to(DTYPE)
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=DTYPE))
        self.middle = nn.Identity() if middle is None else middle.to(DTYPE)

    def embed(self, rows: Tensor) -> Tensor:
        return self.middle(torch.tanh(self.first(rows)))

    def forward(self, rows: Tensor, *, embeds: bool = False) -> Any:
        hidden = self.embed(rows)
        return (F.normalize(hidden, dim=1), self.scale * 1) if embeds else self.second(hidden)[:, 0] + 0 * self.scale


def make_batch(rank: int, counts: tuple[int, ...] = COUNTS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return features (n, 6) and targets of 0 and 1 (n,), at least one of each."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    targets = (torch.rand(counts[rank], generator=generator) < 0.4).long()
    targets[:2] = torch.tensor([0, 1])[: len(targets)]
    return torch.randn(counts[rank], 6, generator=generator, dtype=DTYPE), targets


def make_window(rank: int, counts: tuple[int, ...] = COUNTS) -> list[tuple[Tensor, Tensor]]:
    fewer = counts if len(set(counts)) == 1 else tuple(count - 3 for count in counts)
    return [make_batch(rank, counts), make_batch(rank, fewer, 1), make_batch(rank, counts, 2)]


def naive_ap(scores: Tensor, targets: Tensor) -> Tensor:
    """Return one minus a smooth average precision, of pairs."""
    above = torch.sigmoid((scores[None] - scores[targets.bool()][:, None]) / 0.3)
    return 1 - ((above[:, targets.bool()].sum(1) + 0.5) / (above.sum(1) + 0.5)).mean()


def all_rows(tensor: Tensor, *, put_back: bool = True) -> Tensor:
    """Gather as many do: without gradient, the own rows put back; uneven batches are padded."""
    sizes = gathered(len(tensor))
    padded = torch.zeros(max(sizes), *tensor.shape[1:], dtype=tensor.dtype)
    padded[: len(tensor)] = tensor.detach()
    parts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    parts = [part[:size] for part, size in zip(parts, sizes)]
    if put_back:
        parts[dist.get_rank()] = tensor
    return torch.cat(parts)


def first_row(tensor: Tensor) -> int:
    """Return the place of the first own row among those of all ranks."""
    return sum(gathered(len(tensor))[: dist.get_rank()])


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss.detach()


def bce(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    rows, targets = batch
    return F.binary_cross_entropy_with_logits(model(rows), targets.to(DTYPE), **options)


def ap(model: Callable[[Tensor], Tensor], batch: Any, **options: Any) -> Tensor:
    return fr.SmoothAPLoss(queue_size=0, **options)(model(batch[0]), batch[1])


def torchs_rows(model: nn.Module, batch: Any) -> Tensor:
    return torch.cat(list(collectives.all_gather(model(batch[0]), group=dist.group.WORLD)))


# Losses of one batch.


def own_rows(model: nn.Module, batch: Any) -> Tensor:
    return backward(naive_ap(model(batch[0]), batch[1]))


def usual_gather_times_ranks(model: nn.Module, batch: Any) -> Tensor:
    rows, scale = model(batch[0], embeds=True)
    gathered, targets = all_rows(rows), all_rows(batch[1])
    return backward(naive_ap(scale * gathered.sum(1), targets) * dist.get_world_size())


def usual_gather_with_scale(model: nn.Module, batch: Any) -> Tensor:
    rows, scale = model(batch[0], embeds=True)
    return backward(naive_ap(scale * all_rows(rows).sum(1), all_rows(batch[1])))


def gather_without_own(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0])
    pooled = all_rows(scores, put_back=False) if dist.get_world_size() > 1 else scores
    return backward(naive_ap(pooled, all_rows(batch[1])) + 0 * scores.sum())


def mean_of_kept(model: nn.Module, batch: Any) -> Tensor:
    """One process has none of the rows."""
    weight = (batch[0][:, 1] > 1.1).to(DTYPE)
    return backward((bce(model, batch, reduction="none") * weight).sum() / weight.sum())


def against_gathered(model: nn.Module, batch: Any) -> Tensor:
    rows, scale = model(batch[0], embeds=True)
    (keys,) = fr.gather_rows(rows)
    labels = first_row(rows) + torch.arange(len(rows))
    total = F.cross_entropy(scale * rows @ keys.T, labels, reduction="sum")
    (total * dist.get_world_size() / len(keys)).backward()  # not through this package, which would raise
    return fr.global_mean(total.detach(), len(rows))


def against_detached(model: nn.Module, batch: Any) -> Tensor:
    """As open_clip with local_loss: torch's gather has no gradient, and the own rows are not put back."""
    rows, scale = model(batch[0], embeds=True)
    keys = [torch.zeros_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(keys, rows)
    return backward(F.cross_entropy(scale * rows @ torch.cat(keys).T, first_row(rows) + torch.arange(len(rows))))


def equal_places(model: nn.Module, batch: Any) -> Tensor:
    rows, scale = model(batch[0], embeds=True)
    keys = fr.all_gather_with_grad(rows, backward="reduce_scatter")
    labels = (dist.get_rank() * len(rows) + torch.arange(len(rows))).clamp(max=len(keys) - 1)
    return backward(fr.CrossEntropyLoss()(scale * rows @ keys.T, labels))


def numbered_labels(model: nn.Module, batch: Any) -> Tensor:
    rows, _ = model(batch[0], embeds=True)
    other = F.normalize(rows + 0.1 * rows.roll(1, 1), dim=1)
    labels = torch.arange(len(rows)).repeat(2)
    return backward(fr.SupConLoss(temperature=0.5)(torch.cat([rows, other]), labels))


def left_in_no_sync(model: nn.Module, batch: Any) -> Tensor:
    with model.no_sync():
        return backward(bce(model, batch))


class Scale(nn.Module):
    """A learned temperature that no wrapper has."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(1, dtype=DTYPE))

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.logit_scale


SCALE = Scale()


class Shift(nn.Module):
    """A layer for the rows of a kind, of which the first rank has none."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, hidden: Tensor) -> Tensor:
        is_shifted = hidden[:, :1] > 0.33
        return hidden + is_shifted * self.shift if is_shifted.any() else hidden


# Windows of micro-batches.


def means_of_means(model: nn.Module, batches: Any) -> None:
    for number, batch in enumerate(batches):
        with fr.maybe_no_sync(model, number, len(batches)):
            (bce(model, batch) / len(batches)).backward()


def undivided(model: nn.Module, batches: Any) -> None:
    for batch in batches:
        bce(model, batch).backward()


def divided_twice(model: nn.Module, batches: Any) -> None:
    for batch in batches:
        (bce(model, batch) / len(batches) ** 2).backward()


def ap_of_micro_batches(model: nn.Module, batches: Any) -> None:
    for batch in batches:
        (ap(model, batch) / len(batches)).backward()


def updated_in_the_step(model: nn.Module, batches: Any) -> None:
    ap_of_micro_batches(model, batches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def mean_as_sum(model: nn.Module, batches: Any) -> Tensor:
    for step, (rows, targets) in fr.accumulate(model, batches, lambda batch: len(batch[1])):
        mask = torch.ones(len(targets), dtype=DTYPE)
        losses = F.binary_cross_entropy_with_logits(model(rows), targets.to(DTYPE), reduction="none")
        step.backward((losses * mask / mask.sum()).sum())  # divided after the sum, accumulate would refuse it
    return step.mean_loss()


def counted_all(model: nn.Module, batches: Any) -> Tensor:
    """Counts the rows before a filter: the factor is theirs over the rows that the loss has."""
    for step, (rows, targets) in fr.accumulate(model, batches, lambda batch: len(batch[1])):
        weight = (rows[:, 0] > 0).to(DTYPE)
        losses = F.binary_cross_entropy_with_logits(model(rows), targets.to(DTYPE), reduction="none")
        step.backward(len(targets) * (losses * weight).sum() / weight.sum().clamp(min=1))
    return step.mean_loss()


# Right programs.

QUEUED = fr.SmoothAPLoss(queue_size=16, temperature=0.3)


def with_queue(model: nn.Module, batch: Any) -> Tensor:
    return backward(QUEUED(model(batch[0]), batch[1]))


class Memory(nn.Module):
    """A queue as others write it: attributes that are no buffers, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.place = torch.zeros(64, dtype=DTYPE), 0

    def forward(self, scores: Tensor) -> Tensor:
        loss = (torch.cat([scores, self.rows]).logsumexp(0) - scores).mean()
        self.rows[self.place : self.place + len(scores)] = scores.detach()
        self.place += len(scores)
        return loss


MEMORY = Memory()


def learned_scale(model: nn.Module, batch: Any) -> Tensor:
    rows, scale = model(batch[0], embeds=True)
    keys = F.normalize(rows + 0.2 * rows.roll(1, 1), dim=1)
    rows, keys = fr.gather_rows(rows, keys)
    return backward(F.cross_entropy(scale * rows @ keys.T, torch.arange(len(rows))))


def window(model: nn.Module, batches: Any) -> Tensor:
    for step, batch in fr.accumulate(model, batches, lambda batch: len(batch[1])):
        step.backward(bce(model, batch, reduction="sum"))
    return step.mean_loss()


def deferred(model: nn.Module, batches: Any) -> None:
    mean = fr.DeferredMean(model)
    for batch in batches:
        mean.backward(bce(model, batch, reduction="sum"), len(batch[1]))
    mean.finish()


def pooled(model: nn.Module, batches: Any) -> float:
    loss = fr.SmoothAPLoss(queue_size=0)

    def of_window(scores: Tensor, batches: Any) -> Tensor:
        return loss(scores, torch.cat([targets for _, targets in batches]))

    return fr.pooled_backward(model, batches, forward=lambda batch: model(batch[0]), loss=of_window)


SCALER = torch.amp.GradScaler("cpu", init_scale=1024.0)


def scaled(model: nn.Module, batch: Any) -> Tensor:
    loss = QUEUED(model(batch[0]), batch[1])
    SCALER.scale(loss).backward()
    return loss.detach()


def global_mean(model: nn.Module, batch: Any) -> Tensor:
    return backward(fr.BCEWithLogitsLoss()(model(batch[0]), batch[1].to(DTYPE)))


def two_terms(model: nn.Module, batches: Any) -> Tensor:
    for step, batch in fr.accumulate(model, batches, {"ce": lambda batch: len(batch[1]), "size": lambda batch: 1}):
        terms = {"ce": bce(model, batch, reduction="sum"), "size": model(batch[0]).square().mean()}
        step.backward(terms, weights={"ce": 1.0, "size": 0.0})
    return step.mean_loss()


class Program(NamedTuple):
    """A step, its batches, and what the report says."""

    step: Callable[..., Any]
    verdict: str
    cause: str = ""
    is_window: bool = False
    counts: tuple[int, ...] = COUNTS
    wrappers: str = "ddp"  # FSDP2 reduces at other places: one program of each kind runs under it too
    middle: Callable[[], nn.Module] | None = None


PROGRAMS = {
    "own rows": Program(own_rows, "direction", "A loss of own rows", wrappers="ddp fsdp"),
    "usual gather": Program(
        lambda m, b: backward(naive_ap(all_rows(m(b[0])), all_rows(b[1]))), "factor", "1/{W} on everything"
    ),
    "usual gather, times ranks": Program(usual_gather_times_ranks, "factor", "{W} on what is used after"),
    "usual gather, scale": Program(usual_gather_with_scale, "factor", "before the gather"),
    "gather without own rows": Program(gather_without_own, "missing", "No gradient arrives"),
    "times ranks": Program(
        lambda m, b: backward(dist.get_world_size() * ap(m, b)), "factor", "{W} on everything", wrappers="ddp fsdp"
    ),
    "sum for mean of gradients": Program(
        lambda m, b: backward(ap(m, b, gradient_reduction="sum")), "factor", "1/{W} on everything"
    ),
    "mean of ranks": Program(lambda m, b: backward(bce(m, b)), "direction", "A mean of means"),
    "mean of no rows": Program(mean_of_kept, "direction", "NaN or infinite gradients"),
    "mean of ranks, with a layer of some": Program(
        lambda m, b: backward(bce(m, b)), "direction", "A mean of means", middle=Shift
    ),
    "against gathered rows": Program(against_gathered, "direction", "The loss is right and its gradient"),
    "against detached rows": Program(against_detached, "direction", "The loss is right and its gradient", counts=EVEN),
    "places of equal ranks": Program(equal_places, "direction", "uneven rows"),
    "numbered labels": Program(numbered_labels, "direction", "Labels or places", counts=EVEN),
    "past the wrapper": Program(
        lambda m, b: backward(bce(getattr(m, "module", m), b)), "direction", "No wrapper has reduced"
    ),
    "left in no_sync": Program(left_in_no_sync, "direction", "No wrapper has reduced"),
    "first rank alone": Program(
        lambda m, b: backward(naive_ap(fr.gather_rows(m(b[0]))[0], all_rows(b[1])) * (dist.get_rank() == 0)),
        "direction",
    ),
    "scale outside": Program(
        lambda m, b: backward(ap(lambda rows: SCALE(m(rows)), b)), "direction", "A parameter outside the model"
    ),
    "means of means": Program(means_of_means, "direction", "A mean of means", True, wrappers="ddp fsdp"),
    "undivided": Program(undivided, "factor", "3 times", True, EVEN),
    "divided twice": Program(divided_twice, "factor", "1/3: the loss is divided", True, EVEN),
    "AP of micro-batches": Program(ap_of_micro_batches, "direction", "A loss of own rows", True),
    "updated in the step": Program(updated_in_the_step, "direction", "A loss of own rows", True, wrappers="ddp fsdp"),
    "mean as a sum": Program(mean_as_sum, "direction", "A mean of means", True),
    "sum for mean": Program(lambda m, b: backward(bce(m, b, reduction="sum")), "factor", "a sum over the rows"),
    "rows before a filter": Program(counted_all, "direction", "micro-batch", True),
    "batch norm": Program(global_mean, "direction", "BatchNorm", middle=lambda: nn.BatchNorm1d(8)),
    "dropout": Program(global_mean, "random", "Dropout", middle=lambda: nn.Dropout(0.3)),
    "torch's gather": Program(lambda m, b: backward(naive_ap(torchs_rows(m, b), all_rows(b[1]))), "exact", counts=EVEN),
    "queue": Program(with_queue, "exact", wrappers="ddp fsdp"),
    "queue in attributes": Program(lambda m, b: backward(MEMORY(torchs_rows(m, b))), "exact", counts=EVEN),
    "learned scale": Program(learned_scale, "exact"),
    "window": Program(window, "exact", "", True, wrappers="ddp fsdp"),
    "deferred mean": Program(deferred, "exact", "", True, wrappers="ddp fsdp"),
    "pooled window": Program(pooled, "exact", "", True, wrappers="ddp fsdp"),
    "scaler": Program(scaled, "exact"),
    "global mean": Program(global_mean, "exact", wrappers="ddp fsdp"),
    "two terms": Program(two_terms, "exact", "", True),
}
