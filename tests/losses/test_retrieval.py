"""Smooth-AP with one AP per query: rows grouped by ``indexes``, and embeddings that rank each other."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import loss_cases as cases
import pytest
import reference
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from gradient_cases import NUM_FEATURES, Scorer, flat_gradients, split
from reference import Rows
from scripts import run_script
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from workers import WorkerPool, class_of

import fullrank
from fullrank.kernels.costs import TABLE
from fullrank.losses import retrieval, retrieval_smooth_ap, smooth_ap
from fullrank.losses.queries import group_rows

IGNORED = -100


class Queries(NamedTuple):
    """Rows of queries of many lengths, in no order; three queries are not valid, each for a reason of its own."""

    rows: Rows
    indexes: Tensor


def make_queries(seed: int = 0, *, weighted: bool = False, dtype: torch.dtype = torch.float64) -> Queries:
    """Return 14 queries of 1 to 70 rows, about a tenth of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 70, 6, 6])
    order = torch.randperm(int(lengths.sum()), generator=generator)
    query = torch.arange(lengths.numel()).repeat_interleave(lengths)[order]
    targets = (torch.rand(query.numel(), generator=generator) < 0.3).long()
    logits = torch.randn(query.numel(), 1, generator=generator, dtype=dtype) + 0.8 * targets[:, None]
    targets[torch.rand(query.numel(), generator=generator) < 0.1] = IGNORED
    targets[query == 5] = 0  # without a positive
    targets[query == 12] = 1  # without a negative
    targets[query == 13] = IGNORED
    names = torch.tensor([5, -3, 2**40, 0, 17, 1, 99, -2, 44, 1000, 12, 13, 6, 7])  # what the queries are called
    weight = torch.rand(query.numel(), generator=generator, dtype=dtype) if weighted else None
    return Queries(Rows(logits, targets, None, weight), names[query])


# name: the labels of the rows, before they are shuffled
LAYOUTS = {
    "as many classes as rows of each": [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3],
    "equal sizes": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4],
    "unequal sizes": [3, 3, 8, 8, 8, 8, 8, 8, 8, 1, 1, 1, 5, 5],
    "rows that are alone": [0, 0, 0, 1, 2, 2, 7, 7, 7, 7, -4],
    "ignored rows": [IGNORED, 0, 0, 1, 1, 1, IGNORED, 2, 2, 2, 2, 2],
}


def make_embeddings(layout: str, seed: int = 0, num_features: int = 5) -> tuple[Tensor, Tensor]:
    """Return float64 embeddings of many lengths, and the labels of ``layout`` in random order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(LAYOUTS[layout])
    labels = labels[torch.randperm(labels.numel(), generator=generator)]
    embeddings = torch.randn(labels.numel(), num_features, generator=generator, dtype=torch.float64)
    return embeddings * (0.1 + 3 * torch.rand(labels.numel(), 1, generator=generator, dtype=torch.float64)), labels


def separated(layout: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return embeddings that are the same within a class and orthogonal between classes, shuffled, and their labels."""
    _, labels = make_embeddings(layout, seed)
    lengths = 1 + torch.arange(labels.numel(), dtype=torch.float64)[:, None]
    directions = torch.eye(labels.unique().numel(), dtype=torch.float64)
    return lengths * directions[labels.unique(return_inverse=True)[1]], labels


# --- over ranks ------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """One of the two losses of retrieval, and how its gradients are combined."""

    loss: str  # "queries" or "embeddings"
    dtype: str = "float64"
    reduction: str = "mean"
    gradient_reduction: str = "mean"
    weighted: bool = False
    apart: bool = False  # the control: every rank has its own queries, and the wrapper averages the losses


def _make_loss(form: Form, local: bool) -> nn.Module:
    gather = False if local or form.apart else None
    options: dict[str, Any] = {"reduction": form.reduction, "gather_distributed": gather}
    options |= {"gradient_reduction": form.gradient_reduction, "temperature": 0.2}
    if form.loss == "queries":
        return fullrank.SmoothAPLoss(1, queue_size=32, **options)
    return fullrank.RetrievalSmoothAPLoss(**options)


def _make_step(form: Form, step: int) -> dict[str, Tensor | None]:
    """Return the whole batch; the rows of a query, and of a label, lie all over it."""
    generator = torch.Generator().manual_seed(step)
    dtype = getattr(torch, form.dtype)
    count = 41 + 4 * step
    weight = torch.rand(count, generator=generator, dtype=torch.float64).to(dtype) if form.weighted else None
    targets = torch.randint(0, 2 if form.loss == "queries" else 9, (count,), generator=generator)
    return {
        "features": torch.randn(count, NUM_FEATURES, generator=generator, dtype=torch.float64).to(dtype),
        "targets": targets.masked_fill(torch.arange(count) % 11 == 3, IGNORED),
        "indexes": torch.randint(-3, 4, (count,), generator=generator),
        "weight": weight,
    }


def _gradient(form: Form, rank: int, world_size: int, step: int) -> Tensor:
    """Return the loss, and the gradient of the parameters once the ranks have combined it, in one tensor."""
    local = world_size == 1
    model = Scorer(1 if form.loss == "queries" else 4).to(getattr(torch, form.dtype))
    wrapped = model if local or form.gradient_reduction == "sum" else DistributedDataParallel(model)
    batch = _make_step(form, step)
    if not local:
        counts = split(len(batch["indexes"]), world_size, step)  # type: ignore[arg-type]
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        batch = {name: None if value is None else value[own] for name, value in batch.items()}
    outputs = wrapped(batch["features"])
    options = {"sample_weight": batch["weight"], "indexes": batch["indexes"]} if form.loss == "queries" else {}
    loss = _make_loss(form, local)(outputs, batch["targets"], **options)
    factors = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view_as(loss)
    objective = (loss.nan_to_num() * factors).sum()
    objective.backward()
    gradient = torch.cat(flat_gradients(model))
    if not local and form.gradient_reduction == "sum":
        dist.all_reduce(gradient)
    return torch.cat([objective.detach().reshape(1), gradient]).double()


def worst_error(rank: int, world_size: int, form: Form) -> tuple[float, float]:
    """Return the largest relative error of gradient and loss over four batches, one rank being empty in two of them."""
    worst = [0.0, 0.0]
    for step in range(4):
        spread, whole = (_gradient(form, rank, size, step) for size in (world_size, 1))
        gradient = float((spread[1:] - whole[1:]).norm() / whole[1:].norm())
        worst = [max(worst[0], gradient), max(worst[1], float(abs(spread[0] / whole[0] - 1)))]
    return worst[0], worst[1]


def collectives(rank: int, loss: str) -> tuple[int, int]:
    """Return the collectives in the forward and in the backward."""
    module = _make_loss(Form(loss), local=False)
    rows = torch.randn(5 + rank, 1 if loss == "queries" else 4, requires_grad=True)
    options = {"indexes": torch.arange(5 + rank) % 2} if loss == "queries" else {}
    with CollectiveCounter() as forward:
        value = module(rows, torch.arange(5 + rank) % 2, **options)
    with CollectiveCounter() as backward:
        value.backward()
    return forward.total, backward.total


def values_of_all_ranks(rank: int, loss: str) -> list[list[float]]:
    """Return the values under ``"none"`` over the ranks, and those of one process."""
    form = Form(loss, reduction="none")
    world_size = dist.get_world_size()
    batch = _make_step(form, 1)
    outputs = Scorer(1 if loss == "queries" else 4)(batch["features"]).detach()
    counts = split(len(outputs), world_size, 1)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    values = []
    for local, rows in ((False, own), (True, slice(None))):
        options = {"indexes": batch["indexes"][rows]} if loss == "queries" else {}  # type: ignore[index]
        values.append(_make_loss(form, local)(outputs[rows], batch["targets"][rows], **options).tolist())  # type: ignore[index]
    return values


def disagree(rank: int, what: str) -> tuple[str, str]:
    """Return the error of a call in which rank 1 differs."""
    odd = rank == 1
    logits, targets = torch.randn(4, 1), torch.tensor([0, 1, 0, 1])
    try:
        if what == "temperature":
            fullrank.RetrievalSmoothAPLoss(0.1 if odd else 0.2)(logits, targets)
        elif what == "max_pool_size":
            module = fullrank.SmoothAPLoss(1, max_pool_size=3 if odd else None)
            module(logits, targets, indexes=targets)
        else:
            fullrank.SmoothAPLoss(1)(logits, targets, indexes=None if odd else targets)
    except Exception as error:
        return class_of(error), str(error)
    return "none", ""


def autocast_error(loss: str, guarded: bool) -> float:
    """Return how far autocast moves loss and gradient; without ``guarded`` the losses are blind to it."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(600, 1 if loss == "queries" else 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 2 if loss == "queries" else 40, (600,), generator=generator)
    options = {"indexes": torch.randint(0, 9, (600,), generator=generator)} if loss == "queries" else {}
    outcomes = []
    for enabled in (False, True):
        blind = nullcontext() if guarded else mock.patch.object(torch, "is_autocast_enabled", return_value=False)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled), blind:
            value = _make_loss(Form(loss), local=True)(rows, targets, **options)
            (gradient,) = torch.autograd.grad(value, rows)
        outcomes.append(torch.cat([value.detach().reshape(1), gradient.flatten() * 100]))
    return float((outcomes[0] - outcomes[1]).norm() / outcomes[0].norm())


# Both sides are float64 and add at most some hundred terms of order one in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-14}
# Cosines of float64 add some roundings of 1e-16, which a temperature of 0.1 makes 1e-15, in a gradient of order 1e-2.
COSINES = {"rtol": 1e-12, "atol": 1e-13}
REDUCTIONS = ["mean", "sum", "none"]

over_reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
over_layouts = pytest.mark.parametrize("layout", LAYOUTS)
over_losses = pytest.mark.parametrize("loss", ["queries", "embeddings"])


def _of_queries(rows: Rows, indexes: Tensor, **options):
    return smooth_ap(rows.logits, rows.targets, sample_weight=rows.sample_weight, indexes=indexes, **options)


# --- rows grouped by indexes -----------------------------------------------------------------------------------------


@over_reductions
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("form", ["functional", "module"])
def test_queries_equal_the_reference(form: str, weighted: bool, reduction: str, device: torch.device) -> None:
    for seed in range(3):
        rows, indexes = make_queries(seed, weighted=weighted)
        twin = cases.leaf(rows)
        rows = cases.leaf(Rows(*(None if value is None else value.to(device) for value in rows)))
        expected = reference.smooth_ap_of_queries(twin, indexes, temperature=0.3, reduction=reduction)
        options = {"indexes": indexes.to(device), "return_per_class": True, "sample_weight": rows.sample_weight}
        if form == "module":
            module = fullrank.SmoothAPLoss(1, temperature=0.3, reduction=reduction)
            loss, per_query, valid = module(rows.logits, rows.targets, **options)
        else:
            loss, per_query, valid = smooth_ap(rows.logits, rows.targets, 0.3, reduction, **options)
        assert_close(loss.cpu(), expected.loss, equal_nan=True, **EXACT)
        assert_close(per_query.cpu(), expected.per_class, equal_nan=True, **EXACT)
        assert torch.equal(valid.cpu(), expected.valid)
        assert int(expected.valid.sum()) < 12  # some are not valid
        ours, theirs = cases.gradient(loss, rows.logits).cpu(), cases.gradient(expected.loss, twin.logits)
        assert_close(ours, theirs, **EXACT)
        assert bool(theirs.any())


def test_controls_of_queries() -> None:
    """One query of all rows, queries of neighbouring rows, ignored rows as negatives, all queries: other numbers."""
    (logits, targets, *_), indexes = make_queries()
    ours = smooth_ap(logits, targets, 0.3, indexes=indexes)
    neighbours = torch.arange(indexes.numel()) * 14 // indexes.numel()
    values = smooth_ap(logits, targets, 0.3, "none", indexes=indexes)
    wrong = {
        "one query": smooth_ap(logits, targets, 0.3),
        "neighbours": smooth_ap(logits, targets, 0.3, indexes=neighbours),
        "ignored rows": smooth_ap(logits, targets.clamp_min(0), 0.3, indexes=indexes),
        "queries that are not valid": values.nansum() / values.numel(),
    }
    assert [name for name, value in wrong.items() if abs(ours - value) < 1e-3] == []


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_queries_in_float32(weighted: bool) -> None:
    """Single precision holds the loss and, in relation to its norm, the gradient."""
    rows, indexes = make_queries(1, weighted=weighted)
    single, double = (
        cases.leaf(Rows(*(None if x is None else x.to(dtype) if x.is_floating_point() else x for x in rows)))
        for dtype in (torch.float32, torch.float64)
    )
    double = cases.leaf(double._replace(logits=single.logits.double()))
    ours, exact = (_of_queries(part, indexes, temperature=0.1) for part in (single, double))
    assert abs(ours.item() - exact.item()) <= 2e-6
    gradients = [cases.gradient(loss, part.logits).double() for loss, part in ((ours, single), (exact, double))]
    assert (gradients[0] - gradients[1]).norm() <= 2e-6 * gradients[1].norm()


def _force_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    # A pair costs so much that pairs are never summed one by one.
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(pair=1e9))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_queries_summed_by_bins(monkeypatch: pytest.MonkeyPatch, weighted: bool) -> None:
    rows, indexes = make_queries(2, weighted=weighted)
    rows = cases.leaf(rows)
    pairs = _of_queries(rows, indexes, temperature=0.3, reduction="none")
    expected = pairs.detach(), cases.gradient(pairs, rows.logits)
    _force_bins(monkeypatch)
    bins = _of_queries(rows, indexes, temperature=0.3, reduction="none")
    assert not torch.equal(bins.nan_to_num(), expected[0].nan_to_num())  # they are other sums
    assert_close(bins.detach(), expected[0], equal_nan=True, **EXACT)
    assert_close(cases.gradient(bins, rows.logits), expected[1], **EXACT)


def test_the_order_of_rows_does_not_matter() -> None:
    rows, indexes = make_queries(weighted=True)
    order = torch.randperm(indexes.numel(), generator=torch.Generator().manual_seed(1))
    outcomes = []
    for index in (torch.arange(indexes.numel()), order):
        part = cases.leaf(reference.take(rows, index))
        loss = _of_queries(part, indexes[index], temperature=0.3, reduction="none")
        outcomes.append((loss.detach(), cases.gradient(loss, part.logits)))
    assert_close(outcomes[1][0], outcomes[0][0], equal_nan=True, **EXACT)
    assert_close(outcomes[1][1], outcomes[0][1][order], **EXACT)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_indexes_of_any_integers(dtype: torch.dtype) -> None:
    (logits, targets, *_), indexes = make_queries()
    number = indexes.unique(return_inverse=True)[1]
    expected = smooth_ap(logits, targets, reduction="none", indexes=indexes)
    assert_close(
        smooth_ap(logits, targets, reduction="none", indexes=number.to(dtype)), expected, equal_nan=True, rtol=0, atol=0
    )


def test_ignored_rows_are_removed_rows_and_their_nan_is_not_seen() -> None:
    (logits, targets, *_), indexes = make_queries()
    kept = targets != IGNORED
    expected = smooth_ap(logits[kept], targets[kept], 0.3, indexes=indexes[kept])
    poisoned = logits.masked_fill(~kept[:, None], math.nan).requires_grad_()
    loss = smooth_ap(poisoned, targets, 0.3, indexes=indexes)
    assert_close(loss, expected, **EXACT)
    gradient = torch.autograd.grad(loss, poisoned)[0]
    assert gradient.isfinite().all()
    assert not gradient[~kept].any()


def test_nan_poisons_its_own_query() -> None:
    (logits, targets, *_), indexes = make_queries()
    first = int((targets == 0).nonzero()[0])
    clean = smooth_ap(logits, targets, 0.3, "none", indexes=indexes)
    poisoned = logits.index_fill(0, torch.tensor([first]), math.nan).requires_grad_()
    loss, values, _ = smooth_ap(poisoned, targets, 0.3, indexes=indexes, return_per_class=True)
    assert loss.isnan()
    place = int((indexes.unique() == indexes[first]).nonzero())
    others = torch.arange(14) != place
    assert_close(values[others], clean[others], equal_nan=True, **EXACT)
    assert clean[place].isfinite()
    assert values[place].isnan()
    total = smooth_ap(poisoned, targets, 0.3, "none", indexes=indexes)[others].nansum()
    assert torch.autograd.grad(total, poisoned)[0][indexes != indexes[first]].isfinite().all()


@over_reductions
@pytest.mark.parametrize("missing", ["rows", "positives", "negatives", "targets"])
def test_without_valid_queries_the_loss_is_zero_and_connected(missing: str, reduction: str) -> None:
    (logits, targets, *_), indexes = make_queries()
    fill = {"positives": 0, "negatives": 1, "targets": IGNORED, "rows": 0}[missing]
    count = 0 if missing == "rows" else len(logits)
    rows = logits[:count].clone().requires_grad_()
    loss = smooth_ap(rows, torch.full_like(targets, fill)[:count], reduction=reduction, indexes=indexes[:count])
    if reduction == "none":
        assert loss.shape == (14 if count else 0,)
        assert loss.isnan().all()
    else:
        assert loss.item() == 0.0
    (gradient,) = torch.autograd.grad(loss.nan_to_num().sum(), rows)
    assert gradient.shape == rows.shape
    assert not gradient.any()


def _shuffled_grid(count: int, targets: Tensor, seed: int) -> Tensor:
    """Scores of step 1, no two alike, of positives a little higher."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (noise + 0.7 * targets).argsort().argsort().double()


def test_small_temperatures_give_the_average_precision_of_scikit_learn_and_torchmetrics() -> None:
    from torchmetrics.retrieval import RetrievalMAP  # slow to import, and the workers import this file

    (_, targets, *_), indexes = make_queries(3)
    scores = _shuffled_grid(targets.numel(), targets.clamp_min(0), 3)
    values = smooth_ap(scores[:, None], targets, 0.01, "none", indexes=indexes)  # a sigmoid is 0 or 1 within exp(-100)
    for index, value in zip(indexes.unique(), values):
        rows = (indexes == index) & (targets != IGNORED)
        if value.isnan():
            assert rows.sum() == 0 or targets[rows].unique().numel() == 1
        else:
            expected = average_precision_score(targets[rows].numpy(), scores[rows].numpy())
            assert_close(1 - value.item(), expected, rtol=1e-12, atol=0)
    metric = RetrievalMAP(empty_target_action="skip", ignore_index=IGNORED)
    # torchmetrics counts a query without a negative as 1 where the loss leaves it out.
    mixed = torch.isin(indexes, indexes.unique()[~values.isnan()])
    metric.update(scores[mixed], targets[mixed], indexes[mixed])
    loss = smooth_ap(scores[:, None], targets, 0.01, indexes=indexes)
    assert_close(1 - loss.item(), metric.compute().item(), rtol=0, atol=1e-6)  # the metric is float32
    metric.reset()
    metric.update(scores, targets, indexes)
    counted = sum(bool((targets[indexes == index] == 1).any()) for index in indexes.unique())
    ones = counted - int((~values.isnan()).sum())
    assert ones >= 1
    with_ones = (ones + (1 - values).nansum().item()) / counted
    assert_close(with_ones, metric.compute().item(), rtol=0, atol=1e-6)
    assert abs(with_ones - (1 - loss.item())) > 1e-2


def test_a_call_with_indexes_neither_reads_nor_fills_the_queue() -> None:
    rows, indexes = make_queries()
    module = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.3)
    module(rows.logits[:30], rows.targets[:30])
    position, checksum = module.queue.position, module.queue.checksum.clone()
    assert len(module.queue) > 0
    expected = smooth_ap(rows.logits, rows.targets, 0.3, indexes=indexes)
    assert torch.equal(module(rows.logits, rows.targets, indexes=indexes), expected)
    assert module.queue.position == position
    assert torch.equal(module.queue.checksum, checksum)
    # Controls: without indexes the queue counts, and is filled.
    assert abs(module(rows.logits, rows.targets) - smooth_ap(rows.logits, rows.targets, 0.3)) > 1e-3
    assert module.queue.position != position


def test_indexes_reach_the_main_loss_of_a_wrapper() -> None:
    (logits, targets, *_), indexes = make_queries()
    kept = targets != IGNORED
    logits, targets, indexes = logits[kept], targets[kept], indexes[kept]

    def warmup(scores: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(scores[:, 0], labels.to(scores.dtype))

    class Warmup(torch.nn.Module):
        def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
            return warmup(scores, labels)

    main = fullrank.SmoothAPLoss(1, temperature=0.3)
    wrapper = fullrank.LossWarmupWrapper(Warmup(), main, warmup_steps=1, blend_steps=1, temp_start=0.3, temp_end=0.3)
    values = []
    for step in range(3):
        wrapper.on_train_batch_start(step)
        values.append(wrapper(logits, targets, indexes=indexes))
    first, last = warmup(logits, targets), smooth_ap(logits, targets, 0.3, indexes=indexes)
    for value, expected in zip(values, (first, (first + last) / 2, last)):
        assert_close(value, expected, **EXACT)


# name: (class, head of the message, changed arguments)
BAD = {
    "a list": (TypeError, "indexes: expected a tensor or None, got ", {"indexes": [0, 1, 0, 1]}),
    "floats": (TypeError, "indexes: expected a tensor of integers, got a float32", {"indexes": torch.zeros(4)}),
    "bools": (TypeError, "indexes: expected a tensor of integers, got a bool", {"indexes": torch.ones(4) > 0}),
    "a column": (ValueError, "indexes: expected shape .4,., one entry", {"indexes": torch.zeros(4, 1).long()}),
    "too few": (ValueError, "indexes: expected shape .4,., one entry", {"indexes": torch.zeros(3).long()}),
    "elsewhere": (ValueError, "indexes: expected a tensor on cpu", {"indexes": torch.zeros(4).long().to("meta")}),
    "classes": (ValueError, "logits: expected shape .N, 1. with indexes", {"logits": torch.zeros(4, 3)}),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_indexes_raise_and_change_nothing(bad: str) -> None:
    error, text, changes = BAD[bad]
    rows = {"logits": torch.randn(4, 1), "targets": torch.tensor([0, 1, 0, 1]), "indexes": torch.arange(4) % 2}
    with pytest.raises(error, match=text):
        smooth_ap(**(rows | changes))
    module = fullrank.SmoothAPLoss(3 if bad == "classes" else 1)
    with pytest.raises(error, match=text):
        module(**(rows | changes))
    assert len(module.queue) == 0


def test_a_drawn_pool_has_no_queries() -> None:
    module = fullrank.SmoothAPLoss(1, max_pool_size=100)
    with pytest.raises(ValueError, match="max_pool_size: expected None in a call with indexes, got 100"):
        module(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]), indexes=torch.arange(4) % 2)


class _Operators(TorchDispatchMode):
    """Counts the operators of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_padding_at_most_doubles_the_rows_and_no_query_costs_an_operator() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = []
    for num_queries in (63, 20_000):
        lengths = 1 + torch.arange(num_queries) % 63
        indexes = torch.arange(num_queries).repeat_interleave(lengths)
        indexes = indexes[torch.randperm(indexes.numel(), generator=generator)]
        with _Operators() as operators:
            found, blocks = group_rows(indexes)
        counts.append(operators.count)
        assert found == num_queries
        assert sum(block.rows.numel() for block in blocks) <= 2 * indexes.numel()
        held = torch.cat([block.rows[block.present] for block in blocks])
        assert torch.equal(held.sort().values, torch.arange(indexes.numel()))
        for block in blocks:
            own = block.queries[:, None].expand(block.rows.shape)[block.present]
            assert torch.equal(indexes[block.rows[block.present]], own)  # here a query is called by its place
    assert counts[0] == counts[1]


# --- embeddings ------------------------------------------------------------------------------------------------------


@over_reductions
@over_layouts
def test_embeddings_equal_the_reference(layout: str, reduction: str, device: torch.device) -> None:
    """With ``"none"`` the queries weigh differently in the backward; with the others alike."""
    for seed in range(2 if device.type == "cpu" else 1):
        embeddings, labels = make_embeddings(layout, seed)
        twin = embeddings.clone().requires_grad_()
        embeddings = embeddings.to(device).requires_grad_()
        expected = reference.retrieval_smooth_ap(twin, labels, temperature=0.1, reduction=reduction)
        module = fullrank.RetrievalSmoothAPLoss(0.1, reduction)
        for loss in (
            retrieval_smooth_ap(embeddings, labels.to(device), temperature=0.1, reduction=reduction),
            module(embeddings, labels.to(device)),
        ):
            assert_close(loss.cpu(), expected.loss, equal_nan=True, **COSINES)
            ours, theirs = cases.gradient(loss, embeddings).cpu(), cases.gradient(expected.loss, twin)
            assert_close(ours, theirs, **COSINES)
            assert bool(theirs.any())


@over_layouts
def test_separated_embeddings_have_no_loss(layout: str) -> None:
    """Whatever the sizes and the order of the classes; a computation bound to a layout would see a loss."""
    embeddings, labels = separated(layout)
    values = retrieval_smooth_ap(embeddings, labels, reduction="none")
    _, count = labels.unique(return_counts=True)
    alone = (count[labels.unique(return_inverse=True)[1]] == 1) | (labels == IGNORED)
    assert torch.equal(values.isnan(), alone)
    assert values.nan_to_num().max() <= 1e-12
    assert retrieval_smooth_ap(embeddings, labels) <= 1e-12
    # The control: rows taken to lie class after class, as many of each.
    num_classes = labels[labels != IGNORED].unique().numel()
    bound = torch.arange(labels.numel()) * num_classes // labels.numel()
    assert reference.retrieval_smooth_ap(embeddings, bound).loss > 0.1


def test_the_peer_is_bound_to_its_layout() -> None:
    """Separated embeddings have no loss there either, if they lie in classes of as many rows as there are classes."""
    if importlib.util.find_spec("pytorch_metric_learning") is None:
        pytest.skip("needs the bench extra")
    if importlib.metadata.version("pytorch-metric-learning") != "2.9.0":
        pytest.skip("says something about version 2.9.0")
    peer = importlib.import_module("pytorch_metric_learning.losses").SmoothAPLoss()
    square = torch.arange(4).repeat_interleave(4)
    oblong = torch.arange(3).repeat_interleave(5)
    shuffled = square[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    losses = [peer(torch.eye(4)[labels], labels).item() for labels in (square, shuffled, oblong)]
    assert losses[0] <= 1e-6
    assert min(losses[1:]) > 0.1
    assert max(retrieval_smooth_ap(torch.eye(4)[y], y).item() for y in (square, shuffled, oblong)) <= 1e-12


def test_embeddings_are_queries_of_all_pairs() -> None:
    embeddings, labels = make_embeddings("unequal sizes")
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    others = ~torch.eye(labels.numel(), dtype=torch.bool)
    same = (labels[:, None] == labels).long()
    query = torch.arange(labels.numel()).repeat_interleave(labels.numel() - 1)
    ours = retrieval_smooth_ap(embeddings, labels, temperature=0.1)
    pairs = smooth_ap((unit @ unit.T)[others][:, None], same[others], 0.1, indexes=query)
    assert_close(ours, pairs, **COSINES)
    with_itself = smooth_ap(
        (unit @ unit.T).reshape(-1, 1), same.reshape(-1), 0.1, indexes=torch.arange(14).repeat_interleave(14)
    )
    assert abs(ours - with_itself) > 1e-2  # the control: a query that ranks itself


@pytest.mark.parametrize("limit", [1, 3 * 14 + 1])
def test_embeddings_in_chunks_of_queries(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    embeddings, labels = make_embeddings("unequal sizes")
    embeddings.requires_grad_()
    outcomes = []
    for chunk in (2**20, limit):
        monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(similarities_at_once=chunk))
        for reduction in REDUCTIONS:
            loss = retrieval_smooth_ap(embeddings, labels, temperature=0.1, reduction=reduction)
            outcomes.append((loss.detach(), cases.gradient(loss, embeddings)))
    for whole, parts in zip(outcomes[:3], outcomes[3:]):
        assert_close(parts, whole, **COSINES)


def test_a_mean_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = sys.modules["fullrank.losses.retrieval"]
    original, calls = kernel.smooth_ap_sums, []
    monkeypatch.setattr(kernel, "smooth_ap_sums", lambda *given: calls.append(1) or original(*given))
    embeddings, labels = make_embeddings("rows that are alone")
    embeddings.requires_grad_()
    for reduction, times in (("mean", 1), ("sum", 1), ("none", 2)):
        calls.clear()
        cases.gradient(retrieval_smooth_ap(embeddings, labels, reduction=reduction), embeddings)
        assert len(calls) == times
    with torch.no_grad():
        assert not retrieval_smooth_ap(embeddings, labels).requires_grad


def _outcome(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of each query, and the gradient of their mean."""
    loss = retrieval_smooth_ap(embeddings, labels, temperature=0.05, reduction="none")
    return loss.detach(), torch.autograd.grad(loss.mean(), embeddings)[0]


def test_embeddings_summed_by_bins_and_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 12, (150,), generator=generator)
    exact = torch.randn(150, 16, generator=generator).double().requires_grad_()
    expected, slope = _outcome(exact, labels)
    single = exact.detach().float().requires_grad_()

    def check(value: float, gradient: float) -> None:
        for rows, most, least in ((single, 2e-6, 2e-6), (exact, value, gradient)):
            loss, own = _outcome(rows, labels)
            assert abs(loss.mean() - expected.mean()) <= most
            assert (own.double() - slope).norm() <= least * slope.norm()

    check(0, 0)
    _force_bins(monkeypatch)
    check(1e-12, 1e-12)
    assert not torch.equal(_outcome(exact, labels)[0], expected)  # they are other sums


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_length_of_an_embedding_does_not_matter(scale: float) -> None:
    """In float32, where the squares of such lengths vanish or overflow. The gradient is along no embedding."""
    embeddings, labels = make_embeddings("unequal sizes")
    plain, scaled = embeddings.float(), embeddings.float()
    scaled[::2] *= scale
    scaled.requires_grad_()
    loss = retrieval_smooth_ap(scaled, labels, temperature=0.1)
    # Cosines that differ by some roundings of 6e-8, over a temperature of 0.1.
    assert_close(loss, retrieval_smooth_ap(plain, labels, temperature=0.1), rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(loss, scaled)
    assert gradient.isfinite().all()
    lengths = scaled.double().norm(dim=1) * gradient.double().norm(dim=1)
    assert (lengths > 1e-4).all()
    assert ((scaled.double() * gradient.double()).sum(dim=1).abs() <= 1e-5 * lengths).all()


def test_an_embedding_of_zeros_is_orthogonal_to_all() -> None:
    embeddings, labels = make_embeddings("unequal sizes")
    embeddings[3] = 0
    raised = torch.cat([embeddings, torch.zeros(14, 1, dtype=torch.float64)], dim=1)
    raised[3, -1] = 1  # truly orthogonal to all others, and of length 1
    zeros, raised = embeddings.requires_grad_(), raised.requires_grad_()
    losses = [retrieval_smooth_ap(z, labels, temperature=0.1) for z in (zeros, raised)]
    assert_close(losses[0], losses[1], **COSINES)
    gradients = [torch.autograd.grad(loss, z)[0] for loss, z in zip(losses, (zeros, raised))]
    assert_close(gradients[0], gradients[1][:, :-1], **COSINES)
    assert gradients[0][3].any()


def test_nan_in_an_embedding() -> None:
    embeddings, labels = make_embeddings("ignored rows")
    clean = retrieval_smooth_ap(embeddings, labels)
    ignored = embeddings.masked_fill((labels == IGNORED)[:, None], math.nan).requires_grad_()
    loss = retrieval_smooth_ap(ignored, labels)
    assert torch.equal(loss, clean)
    gradient = torch.autograd.grad(loss, ignored)[0]
    assert gradient.isfinite().all()
    assert not gradient[labels == IGNORED].any()
    poisoned = embeddings.clone()
    poisoned[int((labels == 2).nonzero()[0]), 0] = math.nan
    assert retrieval_smooth_ap(poisoned, labels).isnan()
    # Two rows of one label: no query is valid, and NaN is seen still.
    assert retrieval_smooth_ap(poisoned[labels == 2], labels[labels == 2]).isnan()


@over_reductions
@pytest.mark.parametrize("labels", [[], [3], [1, 1, 1], [1, 2, 3], [IGNORED] * 3], ids=str)
def test_without_valid_embeddings_the_loss_is_zero_and_connected(labels: list[int], reduction: str) -> None:
    embeddings = torch.randn(len(labels), 4, requires_grad=True)
    loss = retrieval_smooth_ap(embeddings, torch.tensor(labels, dtype=torch.int64), reduction=reduction)
    if reduction == "none":
        assert loss.isnan().tolist() == [True] * len(labels)
    else:
        assert loss.item() == 0.0
    (gradient,) = torch.autograd.grad(loss.nan_to_num().sum(), embeddings)
    assert gradient.shape == embeddings.shape
    assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    embeddings, labels = make_embeddings("unequal sizes")
    half = embeddings.to(dtype).requires_grad_()
    single = half.detach().float().requires_grad_()
    losses = [retrieval_smooth_ap(z, labels, temperature=0.1) for z in (half, single)]
    assert torch.equal(losses[0], losses[1])
    gradients = [torch.autograd.grad(loss, z)[0] for loss, z in zip(losses, (half, single))]
    assert gradients[0].dtype == dtype
    assert torch.equal(gradients[0], gradients[1].to(dtype))
    (logits, targets, *_), indexes = make_queries()
    rows = logits.to(dtype).requires_grad_()
    loss = smooth_ap(rows, targets, 0.3, indexes=indexes)
    assert torch.equal(loss, smooth_ap(rows.detach().float(), targets, 0.3, indexes=indexes))
    assert torch.autograd.grad(loss, rows)[0].dtype == dtype


def test_autocast_changes_no_bit() -> None:
    for loss in ("queries", "embeddings"):
        assert autocast_error(loss, guarded=True) == 0.0
    assert autocast_error("embeddings", guarded=False) > 1e-4  # the control


@pytest.mark.slow
def test_compiled_functions_call_the_losses_outside_of_their_graphs() -> None:
    embeddings, labels = make_embeddings("unequal sizes")
    (logits, targets, *_), indexes = make_queries()
    compiled = torch.compile(
        lambda z, x: retrieval_smooth_ap(2 * z, labels) + smooth_ap(2 * x, targets, indexes=indexes), backend="eager"
    )
    plain = retrieval_smooth_ap(embeddings, labels) + smooth_ap(2 * logits, targets, indexes=indexes)
    assert_close(compiled(embeddings, logits), plain, **COSINES)


BAD_EMBEDDINGS = {
    "embeddings: expected a tensor, got ": (TypeError, {"embeddings": [[1.0]]}),
    "embeddings: expected a floating-point tensor, got an int64": (TypeError, {"embeddings": torch.ones(4, 2).long()}),
    "embeddings: expected shape (N, D), D >= 1, got a float32 tensor of shape (4,)": (
        ValueError,
        {"embeddings": torch.ones(4)},
    ),
    "embeddings: expected shape (N, D), D >= 1, got a float32 tensor of shape (4, 0)": (
        ValueError,
        {"embeddings": torch.ones(4, 0)},
    ),
    "labels: expected a tensor, got [0, 1, 0, 1]": (TypeError, {"labels": [0, 1, 0, 1]}),
    "labels: expected integers or bools, got a float32": (TypeError, {"labels": torch.ones(4)}),
    "labels: expected shape (4,) or (4, 1), one entry per row of embeddings, got an int64 tensor of shape (4, 2)": (
        ValueError,
        {"labels": torch.ones(4, 2).long()},
    ),
    "labels: expected a tensor on cpu, as embeddings, got one on meta. Use labels.to(embeddings.device).": (
        ValueError,
        {"labels": torch.ones(4).long().to("meta")},
    ),
}


def test_labels_may_be_a_column() -> None:
    embeddings, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 2, 2])
    loss_fn = fullrank.RetrievalSmoothAPLoss()
    assert torch.equal(loss_fn(embeddings, labels[:, None]), loss_fn(embeddings, labels))


@pytest.mark.parametrize("text", BAD_EMBEDDINGS)
def test_bad_embeddings_raise(text: str) -> None:
    error, changes = BAD_EMBEDDINGS[text]
    rows = {"embeddings": torch.randn(4, 2), "labels": torch.tensor([0, 1, 0, 1])} | changes
    for loss in (retrieval_smooth_ap, fullrank.RetrievalSmoothAPLoss()):
        with pytest.raises(error) as caught:
            loss(**rows)
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("temperature", 0.0, ValueError),
        ("temperature", math.nan, ValueError),
        ("temperature", "0.1", TypeError),
        ("reduction", "median", ValueError),
        ("ignore_index", -1.5, TypeError),
        ("gather_distributed", "yes", TypeError),
        ("gradient_reduction", "average", ValueError),
    ],
)
def test_bad_settings_raise(argument: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{argument}: expected .*, got "):
        fullrank.RetrievalSmoothAPLoss(**{argument: value})
    if argument not in ("gather_distributed", "gradient_reduction"):
        with pytest.raises(error, match=f"{argument}: expected .*, got "):
            retrieval_smooth_ap(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]), **{argument: value})


def test_bools_are_labels_and_another_value_is_ignored() -> None:
    embeddings, labels = make_embeddings("ignored rows")
    moved = torch.where(labels == IGNORED, 77, labels)
    expected = retrieval_smooth_ap(embeddings, labels)
    assert torch.equal(retrieval_smooth_ap(embeddings, moved, ignore_index=77), expected)
    assert not torch.equal(retrieval_smooth_ap(embeddings, moved), expected)
    even = retrieval_smooth_ap(embeddings, labels % 2 == 0)
    assert torch.equal(even, retrieval_smooth_ap(embeddings, 5 - 3 * (labels % 2)))


def test_the_module_shows_its_settings_and_saves_its_temperature() -> None:
    loss = fullrank.RetrievalSmoothAPLoss(0.2, "sum", ignore_index=-1)
    text = "RetrievalSmoothAPLoss(reduction='sum', ignore_index=-1, gradient_reduction='mean')"
    assert repr(loss).replace("\n", "") == text
    other = fullrank.RetrievalSmoothAPLoss()
    other.load_state_dict(loss.state_dict())
    assert other.temperature == 0.2
    loss.temperature = -1.0
    with pytest.raises(ValueError, match=r"temperature: expected a finite number > 0, got -1\.0"):
        loss(*make_embeddings("equal sizes"))


@pytest.mark.slow
def test_memory_of_four_thousand_embeddings(tmp_path: Path) -> None:
    """The peak of a process, Python and torch included, with 4,096 x 64 and 64 rows of a label."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc")
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "retrieval.py"
    done = run_script(script, "--peak", 64, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # A quarter of what is allowed. One array of all pairs and their rows would take 256 GiB, as the peer's would.
    assert 2**27 < int(done.stdout) < 2**30


# --- over ranks ------------------------------------------------------------------------------------------------------

LIMITS = {"float64": 1e-12, "float32": 2e-6}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("gradient_reduction", ["mean", "sum"])
@over_losses
def test_gradient_equals_one_process(pool: WorkerPool, loss: str, gradient_reduction: str, dtype: str) -> None:
    """Queries and labels split over ranks, uneven shards, an empty rank, ignored rows; under DDP, and under a sum."""
    for reduction in REDUCTIONS:
        form = Form(loss, dtype, reduction, gradient_reduction, weighted=loss == "queries")
        for gradient, value in pool(worst_error, pool.world_size, form):
            assert gradient <= LIMITS[dtype], form
            assert value <= LIMITS[dtype], form


@over_losses
def test_control_queries_of_each_rank_are_another_loss(pool: WorkerPool, loss: str) -> None:
    for gradient, value in pool(worst_error, pool.world_size, Form(loss, apart=True)):
        assert gradient > 0.1
        assert value > 1e-3


@over_losses
def test_every_rank_has_the_values_of_all_queries(pool: WorkerPool, loss: str) -> None:
    for spread, whole in pool(values_of_all_ranks, loss):
        assert len(whole) >= 7
        assert_close(torch.tensor(spread), torch.tensor(whole), rtol=0, atol=1e-12, equal_nan=True)


@over_losses
def test_two_collectives_forward_and_none_backward(pool_of_two: WorkerPool, loss: str) -> None:
    assert pool_of_two(collectives, loss) == [(2, 0)] * 2


def sharing_queries(rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run ``function`` with queries that the ranks share, however few they are."""
    with mock.patch.object(retrieval, "FEWEST_SPLIT", 0):
        return function(rank, *arguments)


def gradients_of_one_rank(rank: int, world_size: int, form: Form) -> tuple[float, float]:
    """Do what ``worst_error`` does, with the part of the gradient that each rank has computed itself."""

    def own(self: Any, tensor: Tensor, counts: Any, what: str) -> Tensor:
        return tensor.split(list(counts))[rank]

    with mock.patch("fullrank.distributed.exchange.Exchange.sum_own", own):
        return worst_error(rank, world_size, form)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("gradient_reduction", ["mean", "sum"])
def test_each_rank_computes_its_own_queries(pool: WorkerPool, gradient_reduction: str, dtype: str) -> None:
    for reduction in REDUCTIONS:
        form = Form("embeddings", dtype, reduction, gradient_reduction)
        for gradient, value in pool(sharing_queries, worst_error, pool.world_size, form):
            assert gradient <= LIMITS[dtype], form
            assert value <= LIMITS[dtype], form


def test_every_rank_has_the_values_of_the_queries_of_others(pool: WorkerPool) -> None:
    for spread, whole in pool(sharing_queries, values_of_all_ranks, "embeddings"):
        assert_close(torch.tensor(spread), torch.tensor(whole), rtol=0, atol=1e-12, equal_nan=True)
    assert pool(sharing_queries, collectives, "embeddings") == [(4, 0)] * pool.world_size


def test_control_the_part_of_one_rank_is_not_the_gradient(pool_of_two: WorkerPool) -> None:
    errors = pool_of_two(sharing_queries, gradients_of_one_rank, 2, Form("embeddings"))
    assert min(gradient for gradient, _ in errors) > 0.1


@pytest.mark.parametrize(
    ("what", "error", "texts"),
    [
        ("indexes", "ValueError", ["with indexes: True on rank 0, False on rank 1"]),
        ("max_pool_size", "ValueError", ["rank 1: max_pool_size: expected None in a call with indexes, got 3"]),
        ("temperature", "RuntimeError", ["temperature: 0.2 on rank 0, 0.1 on rank 1"]),
    ],
)
def test_ranks_that_differ_are_named(pool_of_two: WorkerPool, what: str, error: str, texts: list[str]) -> None:
    outcomes = pool_of_two(disagree, what)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == error, outcomes[0]
    assert all(text in outcomes[0][1] for text in texts), outcomes[0]
