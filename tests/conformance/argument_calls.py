"""Calls of everything public that is no loss, each with arguments other than their defaults, over uneven ranks.

A body gets the callable with these arguments, and returns pairs of what it found and what one process has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import IGNORED, all_batches, make_window, num_valid, one_process, split, sum_loss
from loss_cases import normal
from meshes import init_device_mesh
from subjects import Model, gradient, reduced, wrap
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from verbs import mean_over_ranks, scores_of

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
    """A value that each process makes."""

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


def own(*tensors: Tensor) -> list[Tensor]:
    """Return this rank's rows, of which ranks have different numbers."""
    counts, rank = split(len(tensors[0]), dist.get_world_size(), 0), dist.get_rank()
    return [tensor[sum(counts[:rank]) : sum(counts[: rank + 1])] for tensor in tensors]


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


def sums_of_sigmoids(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    keys, weights = fullrank.gather_rows(*own(normal(11), normal(11, 3, seed=1)))
    expected = torch.sigmoid((normal(11) - normal(11)[:, None]) / 0.5) @ normal(11, 3, seed=1)
    return [(call(own(normal(11))[0], keys, weights, 0.5), own(expected)[0])]


# Windows of micro-batches


def subject(given: Mapping[str, Any]) -> nn.Module:
    """Return a plain model with ``group``, which a hook divides as ``multiplier`` says, or DDP."""
    model = Model()
    for parameter in model.parameters() if "multiplier" in given else ():
        parameter.register_hook(lambda slope: slope / given["multiplier"])
    return wrap(model, "plain" if "group" in given else "ddp")


def compared(model: nn.Module, loss: Tensor | None = None, factor: float = 1.0) -> Pairs:
    """Return the gradient after its reduction, and the loss, with those of one process."""
    expected = one_process(Model(), all_batches("full"))
    return [(reduced(model), factor * expected.gradient), *([] if loss is None else [(loss, expected.loss)])]


def accumulates(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    model = subject(given)
    for step, batch in call(model, make_window("full", dist.get_rank()), fullrank.count_valid_tokens):
        step.backward(sum_loss(model, batch))
    return compared(model, step.mean_loss())


def accumulates_each(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    model = subject(given)
    for step, batch in call(model, make_window("full", dist.get_rank()), fullrank.count_valid_tokens):
        step.backward(sum_loss(model, batch))
    windows, reference = [make_window("full", rank) for rank in range(dist.get_world_size())], Model()
    return [(step.losses(), torch.stack([one_process(reference, [*batches]).loss for batches in zip(*windows)]))]


def takes_means(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """A step with means, of which one is over no term."""
    model, group = subject({"group": None}), dist.group.WORLD
    window = make_window("full", dist.get_rank())
    for step, batch in fullrank.accumulate(model, window, fullrank.count_valid_tokens, group=group):
        number = given["num_items"](batch)
        scaled = call(step, sum_loss(model, batch) / number, num_items=number)
        if scaled is not None:
            scaled.backward()
    return compared(model, step.mean_loss())


def takes_terms(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """A step with two names for one loss, of which the second has the weight 2."""
    model, group = subject({"group": None}), dist.group.WORLD
    counts = dict.fromkeys(("first", "second"), fullrank.count_valid_tokens)
    for step, batch in fullrank.accumulate(model, make_window("full", dist.get_rank()), counts, group=group):
        loss = sum_loss(model, batch)
        if "name" in given:
            call(step, loss.detach())
            step.record(loss.detach(), "first")
            (3 * step.factors["first"] * loss).backward()
        else:
            scaled = call(step, {"first": loss, "second": loss})
            if scaled is not None:
                scaled.backward()
    (gradients, _), (value, expected) = compared(model, step.mean_loss())
    return [(gradients, 3 * one_process(Model(), all_batches("full")).gradient), (value, 3 * expected)]


def defers(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    group, finishes = given.get("group", dist.group.WORLD), "sync_groups" in given
    model = subject({"group": group, **given})
    one = fullrank.DeferredMean(model, group) if finishes else call(model)
    for batch in make_window("full", dist.get_rank()):
        one.backward(sum_loss(model, batch), num_valid(batch))
    count = call(one) if finishes else one.finish([group])
    expected = one_process(Model(), all_batches("full"))
    total = sum(map(num_valid, all_batches("full")))
    return [(gradient(model), expected.gradient), (one.mean_loss(), expected.loss), (count, total)]


def all_labels() -> Tensor:
    return torch.cat([batch["labels"] for batch in make_window("full", dist.get_rank())])


def runs_schedule(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """A pipeline of one stage on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "stages"))
    stages_group = mesh["stages"].get_group()
    stage = pipelining.PipelineStage(model := Model(), 0, 1, torch.device("cpu"), group=stages_group)
    schedule = pipelining.ScheduleGPipe(stage, 3, loss_fn=partial(fullrank.causal_lm_loss, reduction="sum"))
    batches, (group, takes_step) = make_window("full", dist.get_rank()), (dist.group.WORLD, "target" in given)
    tokens, labels = (torch.cat([batch[key] for batch in batches]) for key in ("tokens", "labels"))
    if takes_step:
        mean = fullrank.PipelineMean(schedule, fullrank.count_valid_tokens, group)
        call(mean, tokens)
    else:
        mean = call(schedule, fullrank.count_valid_tokens, **({} if "group" in given else {"group": group}))
        mean.step(tokens, target=labels)
    expected = one_process(Model(), all_batches("full"))
    found = [(reduced(model) / given.get("multiplier", 1.0), expected.gradient), (mean.mean_loss(), expected.loss)]
    if takes_step:
        found.append((torch.stack(given["losses"]).sum(), sum(sum_loss(Model(), batch) for batch in batches).detach()))
    return found


def pools(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    model = subject(given)
    loss = partial(mean_over_ranks, reduction="sum" if "group" in given else "mean")
    options = {"forward": partial(scores_of, model), "loss": loss}
    value = call(model, make_window("full", dist.get_rank()), **options)
    return compared(model, value, given["scaler"].get_scale() if "scaler" in given else 1.0)


def loops(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    model, total = subject({}), sum(map(num_valid, all_batches("full")))
    for index, batch in enumerate(make_window("full", dist.get_rank())):
        with call(model, index):
            (sum_loss(model, batch) * dist.get_world_size() / total).backward()
    return compared(model)


def discards(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    model = wrap(Model(), "fsdp2")
    model.set_requires_gradient_sync(False)
    sum_loss(model, make_window("full", 0)[0]).backward()
    call(model)
    model.set_requires_gradient_sync(True)
    window = make_window("full", dist.get_rank())
    for step, batch in fullrank.accumulate(model, window, fullrank.count_valid_tokens):
        step.backward(sum_loss(model, batch))
    return compared(model, step.mean_loss())


def adds(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """``all_reduce_grads_`` of a plain model, or ``sum_gradients_`` of one under FSDP2."""
    model, total = wrap(Model(), "plain" if "group" in given else "fsdp2"), sum(map(num_valid, all_batches("full")))
    if "group" not in given:
        call(model)
    for batch in make_window("full", dist.get_rank()):
        (sum_loss(model, batch) / total).backward()
    if "group" in given:
        call(model)
    return [(gradient(model), one_process(Model(), all_batches("full")).gradient)]


def cuts(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    return [(len(window), size) for window, size in zip(call(range(7), 3), (3, 3, 1))]


def picks(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    found = call(ring=1, ulysses=2, unified=3)
    return [(found, {"ulysses_only": 1, "ring_only": 2, "none": 3}[given["mode"]])]


# Tokens


def documents(labels: Tensor) -> Tensor:
    return torch.arange(labels.shape[-1]).expand_as(labels) // 4


def terms(labels: Tensor, given: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Return row, position of the logits and target of each term, in a loop."""
    shift, found = given.get("shift", True) and "shift_labels" not in given, []
    of = documents(labels).tolist()
    by_document = "document_ids" in given or "document_ids_key" in given
    for (row, place), target in zip(itertools.product(*map(range, labels.shape)), labels.flatten().tolist()):
        is_first = place == 0 or (by_document and of[row][place] != of[row][place - 1])
        if target != given.get("ignore_index", IGNORED) and not (shift and is_first):
            found.append((row, place - shift, target))
    return found


def labels_of_all(given: Mapping[str, Any]) -> Tensor:
    labels = torch.cat([batch["labels"] for batch in all_batches("full")])
    return labels.masked_fill(labels == IGNORED, given.get("ignore_index", IGNORED))


def counts_tokens(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    labels = labels_of_all(given)
    (mine,) = own(labels)
    batches = [{given.get("key", "labels"): part, "documents": documents(part)} for part in mine.split(2)]
    return [(call(batches), len(terms(labels, given)))]


def predicts(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    labels = labels_of_all(given)
    logits, whole = (normal(*labels.shape, 7).requires_grad_() for _ in range(2))
    (mine,) = own(labels)
    (scores,) = own(logits)
    value = call(scores, mine, **{name: make(mine) for name, make in given.items() if callable(make)})
    rows, places, targets = map(list, zip(*terms(labels, given)))
    x, softcap = whole[rows, places], given.get("softcap")
    if "weight" in given:
        x = x @ given["weight"].T + given["bias"]
    x = x if softcap is None else softcap * torch.tanh(x / softcap)
    smoothing = given.get("label_smoothing", 0.0)
    expected = F.cross_entropy(x, torch.tensor(targets), label_smoothing=smoothing, reduction="sum")
    expected = expected + given.get("z_loss", 0.0) * torch.logsumexp(x, 1).square().sum()
    expected = expected / given.get("num_items", given.get("num_items_in_batch", 1))
    (slope,), (other,) = torch.autograd.grad(value, logits), torch.autograd.grad(expected, whole)
    total = value.detach().clone()
    dist.all_reduce(total)
    return [(total, expected), (own(slope)[0], own(other)[0])]


def scores(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """Of log-probabilities of all tokens, with entropies where they are asked for."""
    labels = labels_of_all(given)
    hidden, whole = (normal(*labels.shape, 7).requires_grad_() for _ in range(2))
    (mine,), (states,) = own(labels), own(hidden)
    found = call(states, mine)
    found = found if "return_entropy" in given else found[None]
    logits, softcap = F.linear(whole, given["weight"], given.get("bias")), given.get("softcap")
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = (logits / given.get("temperature", 1.0)).log_softmax(-1)
    ignored = labels == given.get("ignore_index", IGNORED)
    expected = [log_probs.gather(-1, labels.masked_fill(ignored, 0)[..., None])[..., 0]]
    expected += [-(log_probs.exp() * log_probs).sum(-1)] if "return_entropy" in given else []
    total = torch.stack([each.masked_fill(ignored, 0.0) for each in expected])
    (slope,) = torch.autograd.grad(found.exp().sum(), hidden)
    (other,) = torch.autograd.grad(total.exp().sum(), whole)
    return [*zip(found.detach(), (own(each)[0] for each in total.detach())), (own(slope)[0], own(other)[0])]


# Norms


def norms(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """Of a parameter cut over a mesh, of shards that ``shard_groups`` names, or of parameters of different ranks."""
    full = nn.Parameter(torch.zeros(7, 3, dtype=torch.float64))
    full.grad = normal(7, 3)
    if "shard_groups" in given or "across" in given:
        (mine,) = own(full.grad)
        parameter = nn.Parameter(torch.zeros_like(mine))
        parameter.grad = mine.clone()
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shards",))
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(full.grad), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(full.grad, mesh, [Shard(0)])
    found = call([parameter])
    most = given.get("max_norm", 1e9)
    expected = torch.nn.utils.clip_grad_norm_([full], most, given.get("norm_type", 2.0))
    if isinstance(parameter.grad, DTensor):
        return [(found, expected), (parameter.grad.full_tensor(), full.grad)]
    return [(found, expected), (parameter.grad, own(full.grad)[0])]


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


def measures(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    rows = {"logits": normal(31, 3), "targets": classes(31, 3, given)}
    return values_of(call, lambda metric: metric.update, rows)


def updates(kind: str, call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    rows: dict[str, Any] = {} if "target" in given else {"logits": normal(31, 3), "targets": classes(31, 3, {})}
    rows |= {name: make(normal(31, 3)) for name, make in given.items()}
    return values_of(partial(find(kind), **THRESHOLD[kind]), lambda metric: partial(call, metric), rows)


def queried(call: Callable[..., Any], given: dict[str, Any], kind: str = "PAUCAtBudget") -> Pairs:
    """Rows of one class, of which each is of a query; ``call`` is the class of a metric, or the update of ``kind``."""
    scores = normal(31)
    ignored = given.get("ignore_index", IGNORED)
    targets = (torch.arange(31) % 3 == 0).long().where(torch.arange(31) % 5 > 0, ignored)
    rows = {} if "target" in given else {"logits": scores, "targets": targets}
    if kind == "QueryNDCG":
        rows["relevance"] = (torch.arange(31) % 3).where(rows.pop("targets") != ignored, ignored)
    rows["indexes"] = torch.arange(31) % 4
    is_update = any(map(callable, given.values()))
    rows |= {name: make(scores) for name, make in given.items() if is_update}
    first = {"beta": 0.4} if kind == "PAUCAtBudget" else {}
    make = partial(find(kind), **first) if is_update else call
    update = (lambda metric: partial(call, metric)) if is_update else (lambda metric: metric.update)
    return values_of(lambda num_classes, **options: make(**options), update, rows)


def reviews(kind: str, call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    rows = {"logits": normal(31, 3), "targets": classes(31, 3, {})}
    return values_of(find(kind), lambda metric: metric.update, rows, call)


def values_of(
    make: Callable[..., Any], update: Callable[[Any], Any], rows: dict[str, Tensor], read: Any = lambda m: [m.compute()]
) -> Pairs:
    """Return the values of a metric of all ranks, and of one process."""
    spread, whole = make(num_classes=3), make(num_classes=3, sync_on_compute=False)
    update(spread)(**dict(zip(rows, own(*rows.values()))))
    update(whole)(**rows)
    return [*zip(read(spread), read(whole))]


def samples(first: Callable[[int], tuple[Any, ...]], call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """The rows of each step, in any order: those of one process with batches as large as those of all ranks.

    ``first`` returns the arguments without a default for a batch of as many ranks.
    """
    size, alone = dist.get_world_size(), dist.new_subgroups(1)[0]
    spread, whole = torch.tensor([*call(*first(1))]), torch.tensor([*call(*first(size), group=alone)])
    parts = [torch.empty_like(spread) for _ in range(size)]
    dist.all_gather(parts, spread)
    return [(torch.cat(parts, dim=1).sort(dim=1).values, whole.sort(dim=1).values)]


def evaluates(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    """Seven rows come once, in the order of the seed, on all ranks in turn or on one that counts itself alone."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [*call(7)])
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


def ends_together(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    batches = [torch.ones(2, 1)] * (1 + 2 * dist.get_rank())
    found = [batch.sum().item() for batch in call(batches)]
    longest = 2 * dist.get_world_size() - 1
    rest = given["empty"].sum().item() if "empty" in given else 0.0
    return [(torch.tensor(found), torch.tensor([2.0] * len(batches) + [rest] * (longest - len(batches))))]


def shards(call: Callable[..., Any], given: dict[str, Any]) -> Pairs:
    logits, targets, found = normal(41, 3), classes(41, 3, {}), []
    arguments = {"beta": 0.5, "surrogate": "trapezoid", "temperature": 0.3}
    options = {name: make(logits) if callable(make) else make for name, make in given.items()}
    for is_spread in (True, False):
        loss: Any = fullrank.PAUCAtBudgetLoss(3, **arguments, gather_distributed=None if is_spread else False)
        forward = partial(call, fullrank.large.ShardedLoss(loss)) if is_spread else loss
        rows = {"logits": logits, "targets": targets, **options}
        for name, value in rows.items() if is_spread else ():
            rows[name] = own(value)[0] if isinstance(value, Tensor) else value
        rows["logits"] = leaf = rows["logits"].clone().requires_grad_()
        value = forward(**rows)
        value, per_class = (value[0], value[1].nan_to_num()) if isinstance(value, tuple) else (value, value)
        (slope,) = torch.autograd.grad(value, leaf)
        slope = slope / dist.get_world_size() if is_spread else own(slope)[0]
        found.append([value, per_class, slope])
    return [*zip(*found)]


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


def balanced(size: int) -> tuple[Any, ...]:
    return (torch.arange(60) % 7 == 0).long(), 4 * size, size


def of_classes(world_size: int) -> tuple[Any, ...]:
    """Return the labels, and the rows of a class and of a batch."""
    return torch.arange(60) % 7, 2, 4 * world_size


WORLD = Made(lambda: dist.group.WORLD)
THRESHOLD = {"RecallAtQuantile": {"quantile": 0.3}, "PAUCAtBudget": {"beta": 0.4}}
OF_METRICS: dict[str, Any] = {"average": None, "ignore_index": -1, "multi_hot": True, "num_classes": 3}


def metrics() -> list[Call]:
    """Return the calls of the metrics."""
    found = []
    for kind, first in THRESHOLD.items():
        settings = OF_METRICS | {
            "RecallAtQuantile": {"quantile_interpolation": "lower"},
            "PAUCAtBudget": {"alpha": 0.1, "budget_basis": "population"},
        }.get(kind, {})
        found += [Call(kind, {**first, name: value}, measures) for name, value in settings.items()]
        for names in (("logits", "targets"), ("preds", "target")):
            rows = dict(zip(names, (lambda rows: rows, lambda rows: classes(len(rows), 3, {}))))
            found.append(Call(f"{kind}.update", rows, partial(updates, kind)))
        found.append(Call(f"{kind}.update", {"sample_weight": share}, partial(updates, kind)))
        if kind == "PAUCAtBudget":
            found.append(Call(f"{kind}.update", {"indexes": lambda rows: torch.arange(len(rows)) % 4}, queried))
        found.append(Call(f"{kind}.review_curve", {"class_index": 1}, partial(reviews, kind)))
    for kind, settings in {"QueryReciprocalRank": {}, "QueryRecall": {}, "QueryNDCG": {"gain": "exponential"}}.items():
        of_queries = partial(queried, kind=kind)
        found += [Call(kind, {"k": 2, **settings}, of_queries), Call(kind, {"average": None}, of_queries)]
        found.append(Call(kind, {"ignore_index": -1, "k": 2}, of_queries))
        names = () if kind == "QueryNDCG" else ("logits", "targets")
        found += [
            Call(f"{kind}.update", {"indexes": lambda rows: torch.arange(len(rows)) % 4}, of_queries),
        ]
        if names:
            rows = {"preds": lambda rows: rows, "target": lambda rows: (rows > 0).long()}
            found += [
                Call(f"{kind}.update", dict(zip(names, rows.values())), of_queries),
                Call(f"{kind}.update", rows, of_queries),
            ]
    of_embeddings = {f"Embedding{name}": {"k": 3} for name in ("Recall", "Precision", "ReciprocalRank")}
    for kind, settings in (of_embeddings | {"EmbeddingAveragePrecision": {"at_r": True}}).items():
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
    Call("sigmoid_sums", {"method": "direct"}, sums_of_sigmoids),
    Call("accumulate", {"group": WORLD}, accumulates),
    Call("accumulate", {"sync": "each"}, accumulates),
    Call("accumulate", {"each": True}, accumulates_each),
    Call("accumulate", {"group": WORLD, "multiplier": 4.0}, accumulates),
    Call("Step.backward", {"num_items": num_valid}, takes_means),
    Call("Step.scale", {"num_items": num_valid}, takes_means),
    Call("Step.backward", {"weights": {"second": 2.0}}, takes_terms),
    Call("Step.scale", {"weights": {"second": 2.0}}, takes_terms),
    Call("Step.record", {"name": "second", "weight": 2.0}, takes_terms),
    Call("DeferredMean", {"group": WORLD}, defers),
    Call("DeferredMean", {"group": WORLD, "multiplier": 4.0}, defers),
    Call("DeferredMean.finish", {"sync_groups": Made(lambda: [dist.group.WORLD])}, defers),
    Call("PipelineMean", {"group": WORLD}, runs_schedule),
    Call("PipelineMean", {"group": WORLD, "multiplier": 4.0}, runs_schedule),
    Call("PipelineMean.step", {"target": Made(all_labels), "losses": Made(list)}, runs_schedule),
    Call("pooled_backward", {"group": WORLD, "check_replay": False}, pools),
    Call("pooled_backward", {"sync": "each"}, pools),
    Call("pooled_backward", {"scaler": Made(lambda: torch.amp.GradScaler("cpu", init_scale=8.0))}, pools),
    *(Call("maybe_no_sync", {name: 3}, loops) for name in ("num_micro_steps", "grad_accum_steps")),
    Call("discard_gradients_", {}, discards),
    Call("all_reduce_grads_", {"group": WORLD}, adds),
    Call("sum_gradients_", {}, adds),
    Call("windows", {}, cuts),
    Call("sequence_sync_group", {"mode": "ring_only"}, picks),
    Call("count_valid_tokens", {"group": WORLD}, counts_tokens),
    Call("count_valid_tokens", {"key": "targets"}, counts_tokens),
    Call("count_valid_tokens", {"shift": False}, counts_tokens),
    Call("count_valid_tokens", {"document_ids_key": "documents"}, counts_tokens),
    Call("count_valid_tokens", {"ignore_index": -1}, counts_tokens),
    Call("causal_lm_loss", {"reduction": "sum", "vocab_size": 7}, predicts),
    Call("causal_lm_loss", {"num_items": 20, "document_ids": documents}, predicts),
    Call("causal_lm_loss", {"num_items": 20, "shift": False, "validate_args": False}, predicts),
    Call("causal_lm_loss", {"num_items": 20, "shift_labels": lambda labels: labels}, predicts),
    Call("causal_lm_loss", {"num_items_in_batch": 20, "ignore_index": -1}, predicts),
    *(
        Call(
            "causal_lm_loss", {"num_items": 20, "z_loss": 0.1, "softcap": 2.0, "label_smoothing": 0.3, **head}, predicts
        )
        for head in ({}, {"weight": Made(lambda: normal(7, 7)), "bias": Made(lambda: normal(7))})
    ),
    *(
        Call("token_log_probs", {"weight": Made(lambda: normal(7, 7)), **given}, scores)
        for given in (
            {"bias": Made(lambda: normal(7)), "temperature": 0.7, "softcap": 2.0, "validate_args": False},
            {"return_entropy": True, "ignore_index": -1},
        )
    ),
    *(
        Call(name, {**first, **given}, norms)
        for name, first in (("total_grad_norm", {}), ("clip_grad_norm_", {"max_norm": 0.5, "foreach": True}))
        for given in (
            {"norm_type": 1.0, "error_if_nonfinite": True},
            {"shard_groups": lambda parameter: dist.group.WORLD},
            {"across": WORLD},
        )
    ),
    *(Call("MemoryQueue", given, queues) for given in ({"ignore_index": 1}, {"keep": "negatives", "multi_hot": True})),
    Call("MemoryQueue.enqueue", {"sample_weight": share, "iid_mask": lambda rows: rows[:, 0] > 0}, queues),
    Call("MemoryQueue.enqueue", {"num_stored": lambda rows: len(rows) - len(rows[::5])}, queues),
    Call("MemoryQueue.assert_synchronized", {"group": WORLD}, synchronized),
    Call("BalancedBatchSampler", {"num_batches": 3, "seed": 5, "group": WORLD}, partial(samples, balanced)),
    Call("MPerClassSampler", {"num_batches": 3, "seed": 5, "group": WORLD}, partial(samples, of_classes)),
    Call("MPerClassSampler", {"ignore_index": 3}, partial(samples, of_classes)),
    Call("UnrepeatedDistributedSampler", {"shuffle": True, "seed": 3}, evaluates),
    Call("UnrepeatedDistributedSampler", {"num_replicas": 1, "rank": 0}, evaluates),
    Call("verify_step", {"build_model": lambda: nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.0)).double()}, verifies),
    Call("verify_step", {"group": WORLD, "join": concatenate, "losses": [fullrank.SmoothAPLoss()]}, verifies),
    Call("verify_step", {"disable_dropout": True}, verifies),
    Call("until_all_end", {"group": WORLD, "empty": torch.full((1, 1), 0.25)}, ends_together),
    Call("ShardedLoss.forward", {"iid_mask": lambda rows: rows[:, 0] < 0.8}, shards),
    Call("ShardedLoss.forward", {"sample_weight": share, "return_per_class": True}, shards),
    *metrics(),
]
