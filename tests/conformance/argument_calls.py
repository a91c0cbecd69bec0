"""Calls of what is public and no loss, each with arguments other than their defaults, over uneven ranks.

Here is what the tests of the folder of a callable leave out. A body gets the callable with these arguments, and returns
pairs of what it found and what one process has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from batches import IGNORED, own
from loss_cases import normal
from on_ranks import gathered
from torch import Tensor, nn

import fullrank
from fullrank.preflight import concatenate

# What has public names. The integrations run under their frameworks, in tests/integrations.
ROOMS = (
    fullrank,
    *(import_module(f"fullrank.{name}") for name in ("accumulation", "data", "distributed", "gradients")),
)
ROOMS += tuple(import_module(f"fullrank.{name}") for name in ("large", "losses", "metrics", "queues"))
Pairs = list[tuple[Any, Any]]


class Made(NamedTuple):
    make: Callable[[], Any]


class Call(NamedTuple):
    """A callable, by its name in its package, the arguments that are not their defaults, and the body of the test."""

    name: str
    given: Mapping[str, Any]
    body: Callable[[Callable[..., Any], dict[str, Any]], Pairs]

    def run(self, without: str = "") -> Pairs:
        """Return what the body returns; the callable does not get the argument ``without``, if the body leaves that."""
        given = {name: value.make() if isinstance(value, Made) else value for name, value in self.given.items()}
        passed = {name: value for name, value in given.items() if name != without}
        return self.body(partial(find(self.name), **passed), given)


def find(name: str) -> Any:
    """Return the public callable of a name such as ``"DeferredMean.finish"``."""
    owner, *method = name.split(".")
    found = next(getattr(room, owner) for room in ROOMS if hasattr(room, owner))
    return getattr(found, method[0]) if method else found


def divisor(given: Mapping[str, Any]) -> int:
    """Return what the wrapper of a model divides gradients by, for a factor that is in the gradients."""
    return dist.get_world_size() if given.get("gradient_reduction", "mean") == "mean" else 1


# Gathers


def gathers(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    rows, slope = normal(11, 2), normal(11, 2, seed=1)
    leaf = own(rows)[0].clone().requires_grad_()
    found = call(leaf)
    found = found[0] if isinstance(found, tuple) else found
    pairs = [(found, rows)]
    if found.requires_grad:
        pairs.append((torch.autograd.grad((found * slope).sum(), leaf)[0] / divisor(given), own(slope)[0]))
    return pairs


def means(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    leaf = own(normal(11))[0].clone().requires_grad_()
    found = call(leaf.square().sum(), len(leaf))
    (slope,) = torch.autograd.grad(found, leaf)
    return [(found, normal(11).square().mean()), (slope / divisor(given), 2 * leaf / 11)]


def sums(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    rows, slope = normal(11, 2), normal(2, seed=1)
    leaf = own(rows)[0].clone().requires_grad_()
    found = call(leaf.square().sum(dim=0))
    (of_rows,) = torch.autograd.grad(found @ slope, leaf)
    return [(found, rows.square().sum(dim=0)), (of_rows / divisor(given), own(2 * rows * slope)[0])]


# Queues, metrics, data


def classes(count: int, columns: int, given: Mapping[str, Any]) -> Tensor:
    """Return class indices, or (count, columns) with ``multi_hot``; some are ignored."""
    shape = (count, columns) if given.get("multi_hot") else (count,)
    generator = torch.Generator().manual_seed(count)
    targets = torch.randint(0, 2 if given.get("multi_hot") else columns, shape, generator=generator)
    targets[::5] = given.get("ignore_index", IGNORED)
    return targets


def queues(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """The rows that a queue holds after gathered rows, and after all rows at once."""
    logits, targets, held = normal(23, 2), classes(23, 2, given), []
    options = {name: make(logits) for name, make in given.items() if callable(make)}
    for is_spread in (True, False):
        queue = fullrank.MemoryQueue(15, 2) if options else call(15, 2)
        enqueue = partial(call, queue) if options else queue.enqueue
        rows = {"logits": logits, "targets": targets, **options}
        tensors = [name for name, value in rows.items() if isinstance(value, Tensor)]
        if is_spread:
            rows |= zip(tensors, fullrank.gather_rows(*own(*(rows[name] for name in tensors))))
        enqueue(**rows)
        held.append(queue.rows())
    queue.assert_synchronized()
    return [pair for pair in zip(*held) if pair[0] is not None]


def synchronized(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    queue = fullrank.MemoryQueue(4, 1)
    queue.enqueue(normal(3, 1), torch.zeros(3).long())
    return [(call(queue) is None, True)]


def reviews(kind: str, call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    rows = {"logits": normal(31, 3), "targets": classes(31, 3, {})}
    return values_of(find(kind), lambda metric: metric.update, rows, call)


def values_of(
    make: Callable[..., Any], update: Callable[[Any], Any], rows: dict[str, Tensor], read: Any = lambda m: [m.compute()]
) -> Pairs:
    spread, whole = make(num_classes=3), make(num_classes=3, sync_on_compute=False)
    update(spread)(**dict(zip(rows, own(*rows.values()))))
    update(whole)(**rows)
    return [*zip(read(spread), read(whole))]


def samples(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """The rows of each step, in any order: those of one process with batches as large as those of all ranks."""
    size, alone, labels = dist.get_world_size(), dist.new_subgroups(1)[0], torch.arange(60) % 7
    spread, whole = torch.tensor([*call(labels, 2, 4)]), torch.tensor([*call(labels, 2, 4 * size, group=alone)])
    parts = [torch.empty_like(spread) for _ in range(size)]
    dist.all_gather(parts, spread)
    return [(torch.cat(parts, dim=1).sort(dim=1).values, whole.sort(dim=1).values)]


def evaluates(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """Seven rows come once, in the order of the seed, on all ranks in turn or on one that counts itself alone."""
    parts = gathered([*call(7)])
    parts = parts if "shuffle" in given else [parts[dist.get_rank()]]
    rows = [part[turn] for turn in range(7) for part in parts if turn < len(part)]
    shuffled = torch.randperm(7, generator=torch.Generator().manual_seed(given.get("seed", 0)))
    return [(torch.tensor(rows), shuffled if "shuffle" in given else torch.arange(7))]


def verifies(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """A loss over all rows is exact, and dropout makes a step random unless it is switched off."""
    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5 if "disable_dropout" in given else 0.0)).double()
    loss = fullrank.BCEWithLogitsLoss()

    def step(model: nn.Module, batch: Any) -> None:
        loss(model(batch[0])[:, 0], batch[1]).backward()

    rows = normal(5 + 2 * dist.get_rank(), 4, seed=dist.get_rank()).detach()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    report = call(step, nn.parallel.DistributedDataParallel(model), (rows, (rows[:, 0] > 0).double()))
    return [(torch.tensor(report.verdict == "exact"), torch.tensor(True))]


def embeds(call: Callable[..., Any], given: dict[str, Any], kind: str = "") -> Pairs:
    """Compare a metric of embeddings over ranks with one process; ``call`` is its class, or the update of ``kind``."""
    found, (rows, labels) = [], (normal(23, 4), torch.arange(23) % 5)
    labels[::6] = given.get("ignore_index", -100)
    for is_spread in (True, False):
        metric = find(kind)(sync_on_compute=is_spread) if kind else call(sync_on_compute=is_spread)
        batch = own(rows, labels) if is_spread else [rows, labels]
        metric.update(*batch)
        if kind:
            others = [make() for make in given.values()]
            further = dict(zip(given, own(*others) if is_spread else others))
            call(metric, batch[0], **{"labels": batch[1], **further})
        value = metric.compute()
        found.append(torch.stack([*value.values()]) if isinstance(value, dict) else value)
    return [(found[0], found[1])]


def share(rows: Tensor) -> Tensor:
    return 0.1 + torch.rand(len(rows), generator=torch.Generator().manual_seed(3), dtype=torch.float64)


WORLD = Made(lambda: dist.group.WORLD)
THRESHOLD = {"RecallAtQuantile": {"quantile": 0.3}, "PAUCAtBudget": {"beta": 0.4}}


def metrics() -> list[Call]:
    found = [Call(f"{kind}.review_curve", {"class_index": 1}, partial(reviews, kind)) for kind in THRESHOLD]
    for name in ("Recall", "Precision", "ReciprocalRank", "AveragePrecision"):
        kind = f"Embedding{name}"
        settings: dict[str, Any] = {"at_r": True} if name == "AveragePrecision" else {"k": 3}
        found += [Call(kind, {**settings, "num_features": 4}, embeds), Call(kind, {"ignore_index": -1}, embeds)]
        others = {"references": lambda: normal(17, 4, seed=2), "reference_labels": lambda: torch.arange(17) % 5}
        found.append(Call(f"{kind}.update", others, partial(embeds, kind=kind)))
        found.append(Call(f"{kind}.update", {"labels": lambda: torch.arange(23) % 4}, partial(embeds, kind=kind)))
    return found


CALLS: list[Call] = [
    Call("gather_rows", {"group": WORLD, "gradient_reduction": "sum"}, gathers),
    Call("gather_rows", {"backward": "reduce_scatter"}, gathers),
    Call("all_gather_no_grad", {"group": WORLD}, gathers),
    Call("all_gather_with_grad", {"group": WORLD, "gradient_reduction": "sum"}, gathers),
    Call("all_gather_with_grad", {"backward": "reduce_scatter"}, gathers),
    Call("global_mean", {"group": WORLD, "gradient_reduction": "sum"}, means),
    Call("global_sum", {"group": WORLD, "gradient_reduction": "sum"}, sums),
    *(Call("MemoryQueue", given, queues) for given in ({"ignore_index": 1}, {"keep": "negatives", "multi_hot": True})),
    Call("MemoryQueue.enqueue", {"sample_weight": share, "iid_mask": lambda rows: rows[:, 0] > 0}, queues),
    Call("MemoryQueue.enqueue", {"num_stored": lambda rows: len(rows) - len(rows[::5])}, queues),
    Call("MemoryQueue.assert_synchronized", {"group": WORLD}, synchronized),
    Call("MPerClassSampler", {"num_batches": 3, "seed": 5, "group": WORLD}, samples),
    Call("MPerClassSampler", {"ignore_index": 3}, samples),
    Call("UnrepeatedDistributedSampler", {"shuffle": True, "seed": 3}, evaluates),
    Call("UnrepeatedDistributedSampler", {"num_replicas": 1, "rank": 0}, evaluates),
    Call("verify_step", {"build_model": lambda: nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.0)).double()}, verifies),
    Call("verify_step", {"group": WORLD, "join": concatenate, "losses": [fullrank.SmoothAPLoss()]}, verifies),
    Call("verify_step", {"disable_dropout": True}, verifies),
    *metrics(),
]
