"""What the processes of the distributed metric tests run. A shard is a list of update sizes; [] never updates."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from torchmetrics import MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from fullrank.metrics import PAUCAtBudget, RecallAtQuantile

NUM_CLASSES = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def make_rows(count, seed=0, num_classes=NUM_CLASSES):
    """Rows with ties, whose scores are exact in every dtype, and some ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-12, 12, (count, num_classes), generator=generator) / 8.0
    targets = torch.randint(0, max(num_classes, 2), (count,), generator=generator)
    targets[torch.rand(count, generator=generator) < 0.1] = -100
    return logits, targets


def make_metrics(**kwargs):
    """One of each kind, whose values differ by class."""
    return [
        RecallAtQuantile(NUM_CLASSES, quantile=0.1, average=None, **kwargs),
        RecallAtQuantile(NUM_CLASSES, quantile=0.3, quantile_interpolation="linear", **kwargs),
        PAUCAtBudget(NUM_CLASSES, alpha=0.05, beta=0.3, **kwargs),
        PAUCAtBudget(NUM_CLASSES, beta=0.2, budget_basis="population", average=None, **kwargs),
    ]


def total_rows(shards):
    """Number of rows of all ranks."""
    return sum(map(sum, shards))


def update_with_shard(metric, rank, shards, seed=0):
    """Give ``metric`` this rank's rows; the dtype differs by rank and update."""
    logits, targets = make_rows(total_rows(shards), seed)
    start = total_rows(shards[:rank])
    for index, size in enumerate(shards[rank]):
        dtype = DTYPES[(rank + index) % len(DTYPES)]
        metric.update(logits[start : start + size].to(dtype), targets[start : start + size])
        start += size


def _values(results):
    return [result.reshape(-1).tolist() for result in results]


def compute_twice(rank, shards, more_shards):
    """Values after each of two rounds of updates, the local rows between them, and those of the second round alone."""
    first, kept, second, alone = [], [], [], []
    for metric in make_metrics():
        update_with_shard(metric, rank, shards)
        first.append(metric.compute())
        kept.append((sum(map(len, metric.logits)), sum(map(len, metric.targets)), metric.update_count))
        update_with_shard(metric, rank, more_shards, seed=1)
        second.append(metric.compute())
        metric.reset()
        update_with_shard(metric, rank, more_shards, seed=1)
        alone.append(metric.compute())
    return _values(first), kept, _values(second), _values(alone)


def mean_of_ranks(rank, shards):
    """What averaging the values of the ranks gives: the control."""
    results = []
    for metric in make_metrics(sync_on_compute=False):
        update_with_shard(metric, rank, shards)
        value = metric.compute()
        dist.all_reduce(value)
        results.append(value / dist.get_world_size())
    return _values(results)


def compute_in_collection(rank, shards):
    """Values through a MetricCollection, whose metrics share their state."""
    collection = MetricCollection({str(index): metric for index, metric in enumerate(make_metrics())})
    update_with_shard(collection, rank, shards)
    first = collection.compute()
    again = collection.compute()
    update_with_shard(collection, rank, shards)
    doubled = collection.compute()
    return [_values(results[key] for key in sorted(results)) for results in (first, again, doubled)]


def compute_in_subgroups(rank, shards):
    """Values of ranks 0 and 1 together, and of the others, by the argument of Metric, by clone and by ``sync``."""
    world_size = dist.get_world_size()
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, world_size)))]
    group = groups[0 if rank < 2 else 1]
    results = []
    for metric in make_metrics(process_group=group):
        update_with_shard(metric, rank, shards)
        twin = metric.clone()
        assert twin.process_group is group
        results.append((metric.compute().reshape(-1).tolist(), twin.compute().reshape(-1).tolist()))
    by_sync = []
    for metric in make_metrics(sync_on_compute=False):
        update_with_shard(metric, rank, shards)
        with metric.sync_context(process_group=group):
            by_sync.append(metric.compute())
    return [one for one, _ in results], [two for _, two in results], _values(by_sync)


def compute_with_own_sync(rank, shards):
    """Values with a user's dist_sync_fn, and how often it was called for each metric."""
    calls = []

    def gather(tensor, group=None):
        calls.append(tensor.shape)
        return gather_all_tensors(tensor, group)

    results = []
    for metric in make_metrics(dist_sync_fn=gather):
        update_with_shard(metric, rank, shards)
        results.append(metric.compute())
    return _values(results), len(calls) / len(results)


def count_collectives(rank, shards):
    """Collectives of: compute, compute again, compute after the first rank has new rows, compute again."""
    metric = make_metrics()[1]
    update_with_shard(metric, rank, shards)
    counts = []
    for round_of in range(2):
        if round_of == 1 and rank == 0:
            update_with_shard(metric, rank, shards)
        for _ in range(2):
            with CollectiveCounter() as counter:
                value = metric.compute()
            counts.append(counter.total)
        assert metric.compute() is value
    return counts


def forward_values(rank, shards, on_step):
    """Values of forward on the last update of this rank, then those of compute."""
    batch_values, values = [], []
    logits, targets = make_rows(total_rows(shards))
    own = slice(total_rows(shards[:rank]), total_rows(shards[: rank + 1]))
    for metric in make_metrics(dist_sync_on_step=on_step):
        batch_values.append(metric(logits[own], targets[own]))
        values.append(metric.compute())
    return _values(batch_values), _values(values)


def warnings_of_compute(rank, shards):
    """Texts of the warnings of compute, and its values."""
    texts, results = [], []
    for metric in make_metrics():
        update_with_shard(metric, rank, shards)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results.append(metric.compute())
        texts += [str(warning.message) for warning in caught]
        assert metric.update_called == bool(shards[rank])
    return texts, _values(results)


def error_of_different_arguments(rank):
    """Class and text of the exception when the ranks hold different metrics."""
    metric = RecallAtQuantile(1, quantile=0.1 * (rank + 1))
    metric.update(torch.zeros(2, 1), torch.tensor([0, 1]))
    try:
        metric.compute()
    except Exception as error:
        # The local rows are still there, and the next round is a clean one.
        metric.reset()
        dist.barrier()
        return type(error).__name__, str(error)
    return None
