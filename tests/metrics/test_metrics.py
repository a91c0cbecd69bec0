"""The metrics against scikit-learn, numpy and definitions in loops; what distribution adds is in its own section."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from loss_cases import LOSSES
from on_ranks import on_ranks
from refusals import LOGITS, TARGETS, Refusal, refused_rows
from sklearn.metrics import ndcg_score, recall_score, roc_auc_score, roc_curve
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAveragePrecision
from torchmetrics.retrieval import RetrievalMRR, RetrievalNormalizedDCG, RetrievalRecall
from torchmetrics.utilities.distributed import gather_all_tensors
from workers import error_of

import fullrank
from fullrank.kernels.quantiles import INTERPOLATIONS
from fullrank.metrics import PAUCAtBudget, QueryNDCG, QueryRecall, QueryReciprocalRank, RecallAtQuantile

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


@pytest.mark.slow
@on_ranks(3)
def test_process_group(rank):
    """Values of ranks 0 and 1 together, and of the other, by the argument of Metric, by clone and by ``sync``."""
    shards, (logits, targets) = [[20, 5], [], [30]], make_rows(55)
    groups = [dist.new_group([0, 1]), dist.new_group(list(range(2, dist.get_world_size())))]
    group = groups[0 if rank < 2 else 1]
    by_argument, by_sync = make_metrics(process_group=group), make_metrics(sync_on_compute=False)
    for metric in (*by_argument, *by_sync):
        update_with_shard(metric, rank, shards)
    clones = [metric.clone() for metric in by_argument]
    assert all(clone.process_group is group for clone in clones)
    found = [[metric.compute() for metric in metrics] for metrics in (by_argument, clones)]
    synced = []
    for metric in by_sync:
        with metric.sync_context(process_group=group):
            synced.append(metric.compute())
    own = slice(0, 25) if rank < 2 else slice(25, 55)
    alone = make_metrics(sync_on_compute=False)
    expected = [_value(metric, logits[own], targets[own]).reshape(-1).tolist() for metric in alone]
    for results in (*found, synced):
        _close(_values(results), expected)


@on_ranks(2)
def test_the_value_is_cached_while_no_rank_has_new_rows(rank):
    """Collectives of: compute, compute again, compute after the first rank has new rows, compute again.

    A header per compute, and two collectives more when rows travel: here more than there is room for.
    """
    shards = [[50], []]
    metric = make_metrics(process_group=dist.new_group())[1]
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
    assert counts == [3, 1, 3, 1]


@pytest.mark.parametrize("on_step", [False, True])
@on_ranks(2)
def test_forward_across_ranks(rank, on_step):
    """The values of forward, and those of compute after it."""
    batch_values, values, (logits, targets) = [], [], make_rows(101)
    own = (slice(0, 40), slice(40, 101))[rank]
    for metric in make_metrics(dist_sync_on_step=on_step):
        batch_values.append(metric(logits[own], targets[own]))
        values.append(metric.compute())
    whole, local = (
        [_value(metric, logits[of], targets[of]).reshape(-1).tolist() for metric in make_metrics(sync_on_compute=False)]
        for of in (slice(None), own)
    )
    _close(_values(batch_values), whole if on_step else local)
    _close(_values(values), whole)


@on_ranks(2)
def test_ranks_with_different_arguments_all_raise(rank):
    metric = RecallAtQuantile(1, quantile=0.1 * (rank + 1))
    metric.update(torch.zeros(2, 1), torch.tensor([0, 1]))
    for call in (metric.compute, metric.sync):
        kind, text = error_of(call)
        assert kind == "RuntimeError"
        assert "quantile=0.1" in text
        assert "quantile=0.2" in text


TOLERANCE = {"rtol": 0, "atol": 1e-9}  # sums of float64 quotients, in another order than the reference's


def _close(actual, expected):
    """Numbers, tensors, or lists of lists of numbers, one of each metric."""
    if isinstance(expected, list) and isinstance(expected[0], list):
        actual, expected = (
            torch.tensor(list(itertools.chain(*one)), dtype=torch.float64) for one in (actual, expected)
        )
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    torch.testing.assert_close(actual, expected, equal_nan=True, **TOLERANCE)


SCORES = {
    "random": lambda x: x,
    "tied": lambda x: (2 * x).round(),
    "equal": torch.ones_like,
    "float32": torch.Tensor.float,
    "float16": torch.Tensor.half,
    "bfloat16": torch.Tensor.bfloat16,
    "steps": lambda x: torch.tensor([9, 8, 7, 6.5, 6, 5, 4, 3, 2, 1, 0.5, 0]),
}


def _binary(kind):
    """Scores of 253 rows, or of twelve, ten of them negatives, and targets."""
    targets = (torch.rand(253, generator=torch.Generator().manual_seed(1)) < 0.2).long()
    noise = torch.randn(253, generator=torch.Generator().manual_seed(253), dtype=torch.float64)
    scores = SCORES[kind](noise + targets)
    return scores, targets if kind != "steps" else torch.tensor([0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0])


def _value(metric, logits, targets):
    metric.update(logits if logits.ndim == 2 else logits[:, None], targets)
    return metric.compute()


# --- references ------------------------------------------------------------------------------------------------------


def recall_reference(scores, targets, quantile, method):
    threshold = np.quantile(scores, 1 - quantile, method=method)
    return np.mean(scores[targets == 1] >= threshold)


def pauc_reference(scores, targets, alpha, beta, weights=None):
    fpr, tpr, _ = roc_curve(targets, scores, drop_intermediate=False, sample_weight=weights)
    inside = (fpr > alpha) & (fpr <= beta)
    # Where the curve is vertical, np.interp takes its upper end: the first point of the band, and no area at its last.
    x = np.concatenate([[alpha], fpr[inside], [beta]])
    y = np.concatenate([[np.interp(alpha, fpr, tpr)], tpr[inside], [np.interp(beta, fpr, tpr)]])
    return np.trapezoid(y, x) / (beta - alpha)


def population_reference(scores, targets, alpha, beta):
    """Segment by segment, the line between the ends of two groups of ties, cut to the band."""
    points = [(0.0, 0.0)]
    for threshold in sorted(set(scores), reverse=True):
        flagged = [target for score, target in zip(scores, targets) if score >= threshold]
        points.append((len(flagged) / len(scores), sum(flagged) / sum(targets)))
    area = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        left, right = max(x0, alpha), min(x1, beta)
        if left < right:
            heights = [y0 + (y1 - y0) * (x - x0) / (x1 - x0) for x in (left, right)]
            area += (right - left) * sum(heights) / 2
    return area / (beta - alpha)


# --- values ----------------------------------------------------------------------------------------------------------


# A metric of one class, and its reference.
VALUES = {}
for _quantile, _method in itertools.product((1 / 256, 0.03, 0.25, 0.75), INTERPOLATIONS):
    VALUES[f"recall {_quantile:.3f} {_method}"] = (
        partial(RecallAtQuantile, 1, _quantile, quantile_interpolation=_method),
        partial(recall_reference, quantile=_quantile, method=_method),
    )
# 0.1 and 0.3 are ends on a point of the curve of the steps, 0.3 where it is vertical.
for _alpha, _beta in ((0, 0.005), (0, 0.1), (0.1, 0.3), (0.3, 0.5), (0.05, 0.3), (0.5, 0.51), (0.9, 1), (0, 1)):
    for _basis, _reference in (("fpr", pauc_reference), ("population", population_reference)):
        VALUES[f"pauc {_alpha}-{_beta} {_basis}"] = (
            partial(PAUCAtBudget, 1, _alpha, _beta, budget_basis=_basis),
            partial(_reference, alpha=_alpha, beta=_beta),
        )


OF_VALUES = [(name, kind) for name in VALUES for kind in ("random", "tied", "steps")]
OF_VALUES += itertools.product(
    ("recall 0.030 linear", "pauc 0.05-0.3 fpr"), ("equal", "float32", "float16", "bfloat16")
)


@pytest.mark.parametrize(("name", "kind"), OF_VALUES)
def test_the_value_is_that_of_the_reference(name, kind):
    """Half precision is kept as float32, which ties no further scores."""
    make, reference = VALUES[name]
    (scores, targets), metric = _binary(kind), make()
    value = _value(metric, scores, targets)
    assert value.dtype == torch.float64
    assert metric.logits[0].dtype == (torch.float64 if scores.dtype == torch.float64 else torch.float32)
    _close(value, reference(scores.double().numpy(), targets.numpy()))
    if kind == "random" and name == "pauc 0.05-0.3 population":  # the control
        assert abs(value - _value(PAUCAtBudget(1, 0.05, 0.3), scores, targets)) > 1e-3


def test_rows_in_any_order_and_in_parts_give_one_value_and_forward_that_of_its_part():
    logits, targets = make_rows(301)
    order = torch.randperm(301, generator=torch.Generator().manual_seed(2))
    for whole, permuted, parts, alone in zip(*(make_metrics() for _ in range(4))):
        value = _value(whole, logits, targets)
        _close(_value(permuted, logits[order], targets[order]), value)
        for part in torch.arange(101).split([1, 0, 100]):
            parts.update(logits[part], targets[part])
        _close(parts(logits[101:].clone().requires_grad_(), targets[101:]), _value(alone, logits[101:], targets[101:]))
        torch.testing.assert_close(parts.compute(), value, rtol=0, atol=0)
        parts.reset()
        parts.update(logits[:101], targets[:101])
        parts.merge_state(alone)
        _close(parts.compute(), value)
        assert not any(rows.requires_grad for rows in parts.logits)


@pytest.mark.parametrize("ignore_index", [-100, -1, 255, 0])
def test_ignored_rows_are_left_out_whatever_they_hold(ignore_index):
    logits, targets = make_rows(101)
    ignored = (targets == -100) | (targets == ignore_index)
    targets[ignored] = ignore_index
    poisoned = logits.masked_fill(ignored[:, None], math.nan)
    for kind in (RecallAtQuantile, PAUCAtBudget):
        value = _value(kind(3, ignore_index=ignore_index, average=None), poisoned, targets)
        _close(value, _value(kind(3, average=None), logits[~ignored], targets[~ignored]))


def test_devices(device):
    logits, targets = (tensor.to(device) for tensor in make_rows(301))
    for metric, on_host in zip(make_metrics(), make_metrics()):
        value = _value(metric.to(device), logits, targets)
        assert value.device.type == device.type
        _close(value.cpu(), _value(on_host, logits.cpu(), targets.cpu()))
        _close(metric.to("cpu").compute(), value.cpu())


# --- degenerate classes, NaN and infinity ----------------------------------------------------------------------------


ONE = torch.arange(6.0)
# name: targets of the scores 0 ... 5, the recall among the upper 0.4 (ranks 3, 4, 5), and the area up to a rate of 0.5
FEW = {
    "one positive, best": ([0, 0, 0, 0, 0, 1], 1.0, 1.0),
    "one positive, worst": ([1, 0, 0, 0, 0, 0], 0.0, 0.0),
    "one negative, best": ([1, 1, 1, 1, 1, 0], 0.4, 0.0),
    "one negative, worst": ([0, 1, 1, 1, 1, 1], 0.6, 1.0),
    "no negative": ([1, 1, 1, 1, 1, 1], 0.5, math.nan),
    "no positive": ([0, 0, 0, 0, 0, 0], math.nan, math.nan),
}


@pytest.mark.parametrize("case", FEW)
def test_classes_of_few_rows(case):
    """In a mean over classes those without a value are left out; one class keeps its dimension, from the cache too."""
    targets, *values = FEW[case]
    scores = torch.stack([ONE, ONE], dim=1)
    codes = torch.stack([torch.tensor(targets), torch.tensor([0, 1, 0, 0, 0, 1])], dim=1)
    for make, value in zip((RecallAtQuantile, PAUCAtBudget), values):
        options = {"quantile": 0.4} if make is RecallAtQuantile else {"beta": 0.5}
        metric = make(1, average=None, **options)
        assert metric(ONE[:, None], codes[:, 0]).shape == metric.compute().shape == metric.compute().shape == (1,)
        _close(metric.compute(), [value])
        other = _value(make(1, **options), ONE, codes[:, 1])
        expected = other if math.isnan(value) else (other + value) / 2
        _close(_value(make(2, multi_hot=True, **options), scores, codes), expected)
    _close(_value(PAUCAtBudget(1, beta=1.0), ONE, codes[:, 0]), values[1])  # the whole curve has the same area
    population = _value(PAUCAtBudget(1, beta=1.0, budget_basis="population"), ONE, codes[:, 0])
    assert population.isnan() == math.isnan(values[1])


def test_nan_score_makes_its_class_nan():
    logits, targets = make_rows(60)
    logits[targets.ne(-100).nonzero()[0], 1] = math.nan
    for kind in (RecallAtQuantile, PAUCAtBudget):
        assert _value(kind(3, average=None), logits, targets).isnan().tolist() == [False, True, False]
        assert _value(kind(3), logits, targets).isnan()


def test_infinite_scores_follow_the_definition():
    scores = torch.tensor([math.inf, math.inf, 1.0, 0.0, -math.inf, -math.inf])
    finite = torch.tensor([5.0, 5.0, 1.0, 0.0, -5.0, -5.0])
    targets = torch.tensor([1, 0, 1, 0, 1, 0])
    for make in (lambda: PAUCAtBudget(1, beta=0.7), lambda: RecallAtQuantile(1, 0.5), lambda: RecallAtQuantile(1, 0.1)):
        _close(_value(make(), scores, targets), _value(make(), finite, targets))
    # Between two equal infinities lies that infinity.
    linear = RecallAtQuantile(1, 0.75, quantile_interpolation="linear")
    assert _value(linear, torch.tensor([0.0, -math.inf, -math.inf]), torch.tensor([1, 0, 0])) == 1.0


# --- as a torchmetrics metric ----------------------------------------------------------------------------------------


def test_copies_and_saved_state():
    logits, targets = make_rows(100)
    for metric, fresh in zip(make_metrics(), make_metrics()):
        value = _value(metric, logits, targets)
        twins = [metric.clone(), copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))]
        assert metric.state_dict() == {}
        metric.persistent(True)
        fresh.persistent(True)
        fresh.load_state_dict(metric.state_dict())
        metric.reset()
        for twin in twins:
            _close(twin.compute(), value)
            twin.update(logits[:50], targets[:50])
            _close(twin.compute(), _value(metric, torch.cat([logits, logits[:50]]), torch.cat([targets, targets[:50]])))
            metric.reset()
        fresh.update(logits[:0], targets[:0])
        _close(fresh.compute(), value)


def test_collection_shares_the_rows_of_metrics_that_read_targets_alike():
    logits, targets = make_rows(100, num_classes=3)
    targets[targets == -100] = 0
    metrics = {"recall": RecallAtQuantile(3), "pauc": PAUCAtBudget(3), "ignoring": PAUCAtBudget(3, ignore_index=0)}
    collection = MetricCollection(metrics)
    first = targets != 0  # without a row to ignore, all three hold the same rows
    collection.update(logits[first], targets[first])
    collection.update(logits[~first], targets[~first])
    assert sorted(map(sorted, collection.compute_groups.values())) == [["ignoring"], ["pauc", "recall"]]
    results = collection.compute()
    assert collection["recall"].logits[0] is not collection["ignoring"].logits[0]
    _close(results["recall"], _value(RecallAtQuantile(3), logits, targets))
    _close(results["pauc"], _value(PAUCAtBudget(3), logits, targets))
    _close(results["ignoring"], _value(PAUCAtBudget(3, ignore_index=0), logits, targets))


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [0, 15, 24, 40, 200])
def test_a_recall_of_many_ties_warns_once(tied):
    """Of 200 rows 20 are reviewed, and those that tie with the last of them."""
    scores, targets = torch.arange(200.0).flip(0), (torch.arange(200) % 9 == 0).long()
    scores[15 : 15 + tied] = scores[15]
    if tied == 200:
        scores[:] = 0.5
    metric = RecallAtQuantile(1, quantile=0.1)
    metric.update(scores, targets)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = [metric.compute()]
        metric._computed = None  # torchmetrics would return the value that it holds
        values.append(metric.compute())
    texts = [str(one.message) for one in caught]
    assert len(texts) == (tied >= 40)
    assert all("because scores are equal" in text for text in texts)
    assert values[0] == values[1]
    if tied == 200:
        assert float(values[0]) == 1


@pytest.mark.parametrize(("kind", "loss"), [(RecallAtQuantile, LOSSES["recall"]), (PAUCAtBudget, LOSSES["pauc"])])
def test_what_is_refused_is_what_the_loss_refuses(kind, loss):
    """Of rows and of the arguments that both have."""
    neither = [Refusal(TypeError, name, {name: None}, "neither") for name in ("logits", "targets")]
    for refusal in itertools.chain(*refused_rows(loss), neither):
        if refusal.argument not in ("indexes", "iid_mask"):
            metric = kind(3)
            with pytest.raises(refusal.error, match=f"^{refusal.pattern}"):
                metric.update(**{"logits": LOGITS, "targets": TARGETS, **refusal.changes})
            assert metric.logits == metric.targets == []
    names = inspect.signature(kind).parameters.keys() & loss.arguments
    assert len(names) >= 5
    for name, entry in ((name, loss.argument(name)) for name in names):
        for error, values in ((ValueError, entry.bad), (TypeError, entry.wrong)):
            for value in values:
                with pytest.raises(error, match=rf"^(\w+, )?{name}(, \w+)?: expected .+, got "):
                    kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (RecallAtQuantile, {"average": "micro"}, "average: expected 'macro' or None, got 'micro'"),
        (PAUCAtBudget, {"unheard_of": 1}, "unheard_of"),
        (PAUCAtBudget, {"alpha": 1, "beta": 2.5}, r"alpha, beta: .* got \(1, 2\.5\)\. 2\.5 % is 0\.025\.$"),
    ],
)
def test_bad_arguments(kind, arguments, text):
    with pytest.raises(ValueError, match=text):
        kind(**arguments)


@pytest.mark.parametrize("kind", [RecallAtQuantile, PAUCAtBudget])
def test_the_names_of_torchmetrics_and_the_inputs_people_have(kind):
    scores, targets = _binary("random")
    expected = _value(kind(1, average=None), scores, targets)
    forms = [targets, targets[:, None], targets.bool(), targets.int(), targets.float(), targets.half()[:, None]]
    for given, target in itertools.product((scores, scores[:, None]), forms):
        metric = kind(1, average=None)
        metric.update(preds=given, target=target)
        assert torch.equal(metric.compute(), expected)
        assert metric.logits[0].shape == (len(scores), 1)
    collection = MetricCollection({"ours": kind(1, average=None), "theirs": BinaryAveragePrecision()})
    collection.update(preds=scores.sigmoid(), target=targets)
    _close(collection.compute()["ours"], _value(kind(1, average=None), scores.sigmoid(), targets))
    with pytest.raises(TypeError, match="logits: expected logits or preds, got both"):
        metric.update(scores, targets, preds=scores)
    with pytest.raises(ValueError, match=r"target: .*preds"):
        metric.update(preds=scores, target=targets[:-1])
    with pytest.raises(ValueError, match=r"targets: .*logits"):
        metric.update(scores, targets[:-1])
    with pytest.raises(ValueError, match=r"targets: expected 0, 1 or ignore_index=-100, got 0\.5"):
        metric.update(scores, targets * 0.5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_multi_hot_targets_are_one_binary_problem_for_each_class(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-9, 9, (90, NUM_CLASSES), generator=generator) / 4.0
    targets = (torch.rand(90, NUM_CLASSES, generator=generator) < 0.3).long()
    if dtype != torch.bool:
        targets[torch.rand(targets.shape, generator=generator) < 0.1] = -100
        targets[7] = -100  # a row that takes part in nothing
    by_class = []
    for multi, single in zip(make_metrics(multi_hot=True), make_metrics()):
        assert [part.shape for part in multi.rows()] == [(0, NUM_CLASSES), (0, NUM_CLASSES), (0,), (0,)]
        half = len(logits) // 2
        for part in (slice(half), slice(half, None)):
            multi.update(logits[part], targets[part].to(dtype))
        assert len(multi.rows()[0]) == (targets != -100).any(dim=1).sum()
        arguments = {name: getattr(single, name) for name in single.own_arguments}
        by_class = torch.stack(
            [
                _value(type(single)(1, average=None, **arguments), logits[:, c], targets[:, c]).squeeze()
                for c in range(NUM_CLASSES)
            ]
        )
        _close(multi.compute(), by_class if multi.average is None else by_class.mean())
    # The control: with a row that is ignored for class 0 counted as a negative, the value of class 0 differs.
    if dtype != torch.bool:
        other = PAUCAtBudget(NUM_CLASSES, multi_hot=True, average=None, beta=0.2, budget_basis="population")
        other.update(logits, targets.clamp_min(0))
        assert not torch.allclose(other.compute(), by_class)
    with pytest.raises(ValueError, match=r"targets: expected multi-hot shape \(90, 3\)"):
        multi.update(logits, targets[:, 0])


# --- distributed -----------------------------------------------------------------------------------------------------

# Sizes of each rank's updates: 0 is an empty update, [] none at all. Cut to the number of ranks.
SHARDS = {
    "uneven": [[50, 13], [107], [30, 1]],
    "empty": [[0], [60, 41], [0, 7]],
    "never_last": [[60, 41], [], []],
    "never_first": [[], [53, 50], [0]],
}


def _one_process(*rounds):
    """Values of one process with the rows of all ranks; a round is (shards, seed)."""
    results = []
    for metric in make_metrics(sync_on_compute=False):
        for shards, seed in rounds:
            metric.update(*make_rows(total_rows(shards), seed))
        results.append(metric.compute().reshape(-1).tolist())
    return results


@pytest.mark.parametrize("case", SHARDS)
@on_ranks()
def test_every_rank_has_the_value_of_one_process_and_keeps_its_rows(rank, case):
    """In two rounds, in the second alone, in a collection, and by a user's own dist_sync_fn.

    In the second round only the first rank has rows: the others' values of the first are out of date all the same.
    """
    shards, more = (SHARDS[name][: dist.get_world_size()] for name in (case, "never_last"))
    first, both, alone = (_one_process(*rounds) for rounds in ([(shards, 0)], [(shards, 0), (more, 1)], [(more, 1)]))
    logits, targets = make_rows(total_rows(shards))
    start = total_rows(shards[:rank])
    own = int((targets[start : start + sum(shards[rank])] != -100).sum())
    for metric, *expected in zip(make_metrics(), first, both, alone):
        update_with_shard(metric, rank, shards)
        _close(metric.compute().reshape(-1), expected[0])
        kept = sum(map(len, metric.logits)), sum(map(len, metric.targets)), metric.update_count
        assert kept == (own, own, len(shards[rank]))
        update_with_shard(metric, rank, more, seed=1)
        _close(metric.compute().reshape(-1), expected[1])
        metric.reset()
        update_with_shard(metric, rank, more, seed=1)
        _close(metric.compute().reshape(-1), expected[2])
    collection = MetricCollection({str(index): metric for index, metric in enumerate(make_metrics())})
    for given, expected in (((shards, 0), first), (None, first), ((more, 1), both)):  # None: compute again
        if given:
            update_with_shard(collection, rank, *given)
        results = collection.compute()  # of metrics that share their state
        _close(_values(results[key] for key in sorted(results)), expected)
    calls = []
    gather = lambda tensor, group=None: calls.append(tensor.shape) or gather_all_tensors(tensor, group)  # noqa: E731
    for metric, expected in zip(make_metrics(dist_sync_fn=gather), first):
        update_with_shard(metric, rank, shards)
        for _ in range(2):  # a cached value would not communicate
            _close(metric.compute().reshape(-1), expected)
    assert len(calls) == 2 * 4 * len(first)  # logits, targets, weights and indexes
    if case == "uneven":  # the control: the mean of the values of the ranks
        cuts = [sum(shard) for shard in shards]
        for metrics, value in zip(zip(*(make_metrics(sync_on_compute=False) for _ in shards)), first):
            parts = zip(metrics, logits.split(cuts), targets.split(cuts))
            mean = torch.stack([_value(*part) for part in parts]).mean(dim=0)
            assert (mean - torch.tensor(value, dtype=torch.float64)).abs().max() > 1e-3


def weighted_rows(seed=0, high=4):
    """Rows of one class with ties and whole weights, some of them 0."""
    logits, targets = make_rows(300, seed, num_classes=1)
    kept = targets != -100
    generator = torch.Generator().manual_seed(seed)
    return logits[kept], targets[kept], torch.randint(0, high, (int(kept.sum()),), generator=generator)


@pytest.mark.parametrize("basis", ["fpr", "population"])
def test_weighted_rates_are_those_of_scikit_learn_and_of_repeated_rows(basis):
    logits, targets, weights = weighted_rows()
    metric = PAUCAtBudget(1, alpha=0.05, beta=0.4, budget_basis=basis)
    repeated = _value(metric, *(rows.repeat_interleave(weights, dim=0) for rows in (logits, targets)))
    metric.reset()
    large = weights * (2**24 + 1)  # which float32 rounds
    metric.update(logits[:100], targets[:100], sample_weight=large[:100])
    metric.update(logits[100:], targets[100:], sample_weight=large[100:].double())
    weighted = metric.compute()
    _close(weighted, repeated)
    if basis == "fpr":
        expected = pauc_reference(logits[:, 0].numpy(), targets.numpy(), 0.05, 0.4, weights.numpy())
        assert float(weighted) == pytest.approx(expected, abs=1e-12)
    curve = metric.review_curve()
    metric.reset()
    without = _value(metric, logits, targets)
    metric.reset()
    metric.update(*(rows.repeat_interleave(weights, dim=0) for rows in (logits, targets)))
    for values, others in zip(curve, metric.review_curve()):
        _close(values, others)
    assert abs(float(weighted - without)) > 1e-4  # control


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_weighted_recall_is_that_of_its_definition(interpolation):
    """And that of scikit-learn at the threshold; at most the share q of the weight is strictly above it."""
    for seed, q in enumerate((0.05, 0.21, 0.5, 0.9)):
        logits, targets, weights = weighted_rows(seed, high=9)
        scores, masses = logits[:, 0].tolist(), weights.tolist()
        pairs = [pair for pair in zip(scores, masses) if pair[1]]
        threshold = sum(reference.upper_level([x for x, _ in pairs], q, interpolation, [m for _, m in pairs]))
        metric = RecallAtQuantile(1, quantile=q, quantile_interpolation=interpolation)
        metric.update(logits, targets, sample_weight=weights.double() * 1e300)
        expected = recall_score(targets, logits[:, 0].double() >= threshold, sample_weight=weights)
        assert float(metric.compute()) == pytest.approx(expected, abs=1e-12)
        if interpolation == "higher":
            assert float(weights[logits[:, 0] > threshold].sum() / weights.sum()) <= q


@on_ranks()
def test_weights_over_ranks(rank):
    """A rank whose rows have none counts them as 1; another has no rows."""
    logits, targets, weights = weighted_rows()
    weights[:100] = 1
    for metric in (RecallAtQuantile(1, quantile=0.1), PAUCAtBudget(1, beta=0.3)):
        own = copy.deepcopy(metric)
        if rank == 0:
            own.update(logits[:100], targets[:100])
        elif rank == dist.get_world_size() - 1:
            own.update(logits[100:], targets[100:], sample_weight=weights[100:])
        alone = copy.deepcopy(metric)
        alone.sync_on_compute = False
        alone.update(logits, targets, sample_weight=weights)
        _close(own.compute(), alone.compute())
        alone.reset()
        alone.update(logits, targets)
        assert abs(float(own.compute() - alone.compute())) > 1e-4  # control


def queried_rows(weighted):
    """Rows of 16 queries of 1 to 30 rows with ties, some without a positive or a negative, in no order."""
    generator = torch.Generator().manual_seed(0)
    indexes = torch.cat([torch.full((1 + 7 * q % 30,), 3 * q - 20) for q in range(16)])
    scores = torch.randint(-9, 9, indexes.shape, generator=generator) / 4.0
    targets = (torch.rand(len(indexes), generator=generator) < 0.3).long()
    weights = torch.randint(0, 4, indexes.shape, generator=generator).double() if weighted else None
    order = torch.randperm(len(indexes), generator=generator)
    return [None if rows is None else rows[order] for rows in (scores, targets, indexes, weights)]


def by_queries(function, scores, targets, indexes, weights, needs_both=True):
    """Return the values of ``function`` of the rows of each query, NaN where positives, or one of both, are missing."""
    found = []
    for query in indexes.unique():
        own = indexes == query if weights is None else (indexes == query) & (weights > 0)
        rows = [None if one is None else one[own].numpy() for one in (scores, targets, weights)]
        is_valid = 0 < rows[1].sum() < (len(rows[1]) if needs_both else math.inf)
        found += [function(*rows) if is_valid else math.nan] if len(rows[1]) else []
    return torch.tensor(found, dtype=torch.float64)


def hits_of(scores, targets):
    """The targets from the highest score on; of equal scores those that are not relevant come first."""
    return [target for _, target in sorted(zip(-scores, targets))]


def ndcg(scores, grades, weights=None, k=None, exponential=False):
    gains = 2.0**grades - 1 if exponential else grades
    return ndcg_score(gains[None], scores[None], k=k) if len(grades) > 1 else 1.0


def area(alpha, beta):
    """A metric and its value of one query."""
    return partial(PAUCAtBudget, alpha=alpha, beta=beta), lambda x, y, w: pauc_reference(x, y, alpha, beta, w), None


RANKERS = {  # a metric, its value of one query, and the metric of torchmetrics
    "auc": (partial(PAUCAtBudget, beta=1.0), lambda x, y, w: roc_auc_score(y, x, sample_weight=w), None),
    "area 0-0.3": area(0.0, 0.3),
    "area 0.2-0.5": area(0.2, 0.5),
    "rank": (QueryReciprocalRank, lambda x, y, _: 1 / (1 + hits_of(x, y).index(1)), RetrievalMRR),
    "rank 2": (
        partial(QueryReciprocalRank, 2),
        lambda x, y, _: max(0, *hits_of(x, y)[:2] / np.arange(1, 3)[: len(x)]),
        None,
    ),
    "recall 3": (
        partial(QueryRecall, 3),
        lambda x, y, _: sum(hits_of(x, y)[:3]) / sum(y),
        partial(RetrievalRecall, top_k=3),
    ),
    "recall": (QueryRecall, lambda x, y, _: 1.0, None),
    "ndcg": (QueryNDCG, ndcg, RetrievalNormalizedDCG),
    "ndcg 3": (partial(QueryNDCG, 3), partial(ndcg, k=3), partial(RetrievalNormalizedDCG, top_k=3)),
    "exponential": (partial(QueryNDCG, 5, gain="exponential"), partial(ndcg, k=5, exponential=True), None),
}
OF_QUERIES = [(name, False) for name in RANKERS] + [(name, True) for name in [*RANKERS][:3]]


@pytest.mark.parametrize(("name", "weighted"), OF_QUERIES)
def test_values_of_queries_are_those_of_loops_and_of_scikit_learn(name, weighted):
    """In two updates with parts of queries, with ties. Without ties those of torchmetrics. The control: one query."""
    make, of_query, theirs = RANKERS[name]
    scores, targets, indexes, weights = queried_rows(weighted)
    is_area = name.startswith("a")
    if name.startswith(("ndcg", "exp")):
        targets = targets * (1 + indexes % 3 + torch.arange(len(targets)) % 2)
    for x in (scores, scores + torch.linspace(0, 0.1, len(scores))):
        expected = by_queries(of_query, x, targets, indexes, weights, needs_both=is_area)
        assert 0 < expected.isnan().sum() < 10
        for average, value in ((None, expected), ("macro", expected.nanmean())):
            metric = make(average=average)
            for part in (slice(0, 77), slice(77, None)):
                given = {} if weights is None else {"sample_weight": weights[part]}
                metric.update(x[part, None], targets[part], indexes=indexes[part], **given)
            torch.testing.assert_close(metric.compute(), value, rtol=1e-11, atol=1e-13, equal_nan=True)
    if theirs is not None:
        theirs = theirs(empty_target_action="skip")
        theirs.update((x / 10).sigmoid().double(), targets, indexes)
        assert float(theirs.compute()) == pytest.approx(float(expected.nanmean()), rel=1e-6)  # theirs is float32
    one = make()
    one.update(x, targets, **({} if weights is None else {"sample_weight": weights}))
    assert name == "recall" or abs(one.compute() - expected.nanmean()) > 1e-3


@on_ranks(2)
def test_indexes_of_some_rows_are_refused_and_nan_stays_in_its_query(rank):
    scores, targets, indexes, _ = queried_rows(False)
    metric = PAUCAtBudget(1, beta=1.0, average=None)
    metric.update(scores, targets, indexes=indexes if rank else None)
    kind, text = error_of(metric.compute)
    assert kind == "ValueError"
    assert "indexes: expected the query of each row in every update and on every rank, or in none, got both" in text
    with pytest.raises(TypeError, match=r"indexes: expected None, since this metric ranks one pool, got "):
        RecallAtQuantile(1).update(scores, targets, indexes=indexes)
    scores[int((indexes == 1).nonzero()[0])] = math.nan
    values = []
    for average in (None, "macro"):
        metric = PAUCAtBudget(1, beta=1.0, average=average, sync_on_compute=False)
        metric.update(scores, targets, indexes=indexes)
        values.append(metric.compute())
    clean = by_queries(RANKERS["auc"][1], scores.nan_to_num(), targets, indexes, None)
    names = indexes.unique()
    equal = PAUCAtBudget(1, beta=1.0, average=None, sync_on_compute=False)
    equal.update(torch.zeros(len(scores)), targets, indexes=indexes)  # runs end where queries do
    _close(equal.compute(), clean.masked_fill(~clean.isnan(), 0.5))
    assert values[0][names == 1].isnan()
    _close(values[0][names != 1], clean[names != 1])
    assert values[1].isnan()


@pytest.mark.parametrize("metric", [RecallAtQuantile, PAUCAtBudget])
def test_the_defaults_are_those_of_the_loss(metric):
    given, of_loss = (
        inspect.signature(one).parameters for one in (metric, getattr(fullrank, f"{metric.__name__}Loss"))
    )
    shared = [name for name in given if name in of_loss and name != "kwargs"]
    assert len(shared) >= 5
    assert [given[name].default for name in shared] == [of_loss[name].default for name in shared]


@on_ranks(2)
def test_only_a_metric_without_a_row_on_any_rank_warns(rank):
    for shards in ([[50], []], [[], []]):
        for metric in make_metrics():
            update_with_shard(metric, rank, shards)
            assert metric.update_called == bool(shards[rank])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                value = metric.compute()
            assert ["found no row on any rank" in str(one.message) for one in caught] == [True] * (not shards[0])
            assert shards[0] or value.isnan().all()
