"""Smooth-AP with one AP per query: rows grouped by ``indexes``, and embeddings that rank each other."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import loss_cases as cases
import pytest
import reference
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from reference import Rows
from torch import Tensor
from torch.testing import assert_close

import fullrank
from fullrank.kernels.costs import TABLE
from fullrank.losses import pauc_at_budget, retrieval_smooth_ap, smooth_ap
from fullrank.losses.embeddings import retrieval
from fullrank.losses.pooled.pool import query_blocks

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


# Both sides are float64 and add at most some hundred terms of order one in another order.
EXACT = {"rtol": 1e-12, "atol": 1e-14}
# Cosines of float64 add some roundings of 1e-16, which a temperature of 0.1 makes 1e-15, in a gradient of order 1e-2.
COSINES = {"rtol": 1e-12, "atol": 1e-13}
REDUCTIONS = ["mean", "sum", "none"]

# --- rows grouped by indexes -----------------------------------------------------------------------------------------


OF_AREAS = fullrank.PAUCAtBudgetLoss, pauc_at_budget, reference.pauc_of_queries
# A module, its function, its definition, and the settings of all three.
KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "ap": (fullrank.SmoothAPLoss, smooth_ap, reference.smooth_ap_of_queries, {"temperature": 0.3}),
    "ap automatic": (fullrank.SmoothAPLoss, smooth_ap, reference.smooth_ap_of_queries, {}),
    "auc": (*OF_AREAS, {"beta": 1.0, "surrogate": "pairwise", "temperature": 0.3}),
    "band": (*OF_AREAS, {"alpha": 0.1, "beta": 0.7, "surrogate": "pairwise", "tau_scale": "band"}),
    "knots": (
        *OF_AREAS,
        {"alpha": 0.1, "beta": 0.9, "surrogate": "trapezoid", "n_knots": 3, "budget_basis": "population"},
    ),
    "dro": (*OF_AREAS, {"beta": 0.5}),
    "dro iqr": (*OF_AREAS, {"dro_lambda": 0.3, "tau_scale": "iqr"}),
}
OF_QUERIES = [(kind, True, "none") for kind in KINDS]
OF_QUERIES += [("ap", False, "mean"), ("ap", True, "sum"), ("ap", True, "mean")]
OF_QUERIES += [("auc", False, "mean"), ("band", True, "sum"), ("dro", True, "mean")]


@pytest.mark.parametrize(
    ("kind", "weighted", "reduction", "device"),
    cases.on_devices(OF_QUERIES, [OF_QUERIES[0], *OF_QUERIES[4:6]]),
    indirect=["device"],
)
def test_queries_equal_the_reference(kind: str, weighted: bool, reduction: str, device: torch.device) -> None:
    """Those of areas with a mask of iid rows too. The control: the rows in one pool."""
    make, function, define, settings = KINDS[kind]
    (rows, indexes), is_area = make_queries(weighted=weighted), make is fullrank.PAUCAtBudgetLoss
    if weighted and is_area:
        rows = rows._replace(iid_mask=torch.arange(len(indexes)) % 7 != 3)
    twin = cases.leaf(rows)
    rows = cases.leaf(Rows(*(None if value is None else value.to(device) for value in rows)))
    expected = define(twin, indexes, reduction=reduction, **settings)
    options: dict[str, Any] = {"sample_weight": rows.sample_weight}
    options |= {"iid_mask": rows.iid_mask} if is_area else {}
    of_queries = {**options, "indexes": indexes.to(device)}
    module = make(1, reduction=reduction, **settings)
    shows = {"return_diagnostics": True} if is_area else {}
    found = module(rows.logits, rows.targets, return_per_class=True, **of_queries, **shows)
    assert_close(found.per_class.cpu(), expected.per_class, equal_nan=True, **EXACT)
    assert torch.equal(found.valid.cpu(), expected.valid)
    assert int(expected.valid.sum()) < 12  # some are not valid
    assert not is_area or {value.shape for value in found.stats.values()} == {(14,)}
    assert kind != "dro" or len(module.current_hardness) == 14
    if kind == "ap automatic":
        assert module.current_temperature == pytest.approx(0.1 * reference.spread(reference.problems(twin)), rel=1e-12)
    theirs = cases.gradient(expected.loss, twin.logits)
    assert bool(theirs.any())
    alone, in_queries = (
        function(rows.logits, rows.targets, reduction=reduction, **given, **settings) for given in (options, of_queries)
    )
    for loss in (found.loss, in_queries):
        assert_close(loss.cpu(), expected.loss, equal_nan=True, **EXACT)
        assert_close(cases.gradient(loss, rows.logits).cpu(), theirs, **EXACT)
    assert reduction == "none" or abs(float(alone.detach()) - float(expected.loss.detach())) > 1e-3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32], ids=str)
def test_the_dtype_of_indexes_does_not_matter(dtype: torch.dtype) -> None:
    (logits, targets, *_), indexes = make_queries()
    small = indexes.unique(return_inverse=True)[1].to(dtype)
    expected = smooth_ap(logits, targets, 0.3, "none", indexes=indexes)
    assert_close(smooth_ap(logits, targets, 0.3, "none", indexes=small), expected, equal_nan=True, rtol=0, atol=0)


def test_nan_poisons_its_own_query() -> None:
    (logits, targets, *_), indexes = make_queries()
    first = int((targets == 0).nonzero()[0])
    clean = smooth_ap(logits, targets, 0.3, "none", indexes=indexes)
    poisoned = logits.index_fill(0, torch.tensor([first]), math.nan).requires_grad_()
    assert smooth_ap(poisoned, targets, 0.3, indexes=indexes).isnan()
    values = smooth_ap(poisoned, targets, 0.3, "none", indexes=indexes)
    place = int((indexes.unique() == indexes[first]).nonzero())
    others = torch.arange(14) != place
    assert_close(values[others], clean[others], equal_nan=True, **EXACT)
    assert clean[place].isfinite()
    assert values[place].isnan()
    total = smooth_ap(poisoned, targets, 0.3, "none", indexes=indexes)[others].nansum()
    assert torch.autograd.grad(total, poisoned)[0][indexes != indexes[first]].isfinite().all()


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


def test_padding_at_most_doubles_the_rows_and_no_query_costs_an_operator(simulated_device: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    launches = []
    for num_queries in (63, 5_000):
        lengths = 1 + torch.arange(num_queries) % 63
        indexes = torch.arange(num_queries).repeat_interleave(lengths)
        indexes = indexes[torch.randperm(indexes.numel(), generator=generator)]
        found, blocks = query_blocks(indexes)
        assert found == num_queries
        assert sum(block.rows.numel() for block in blocks) <= 2 * indexes.numel()
        held = torch.cat([block.rows[block.present] for block in blocks])
        assert torch.equal(held.sort().values, torch.arange(indexes.numel()))
        for block in blocks:
            own = block.queries[:, None].expand(block.rows.shape)[block.present]
            assert torch.equal(indexes[block.rows[block.present]], own)  # here a query is called by its place
        with simulated_device.count() as counts:
            query_blocks(indexes.to(simulated_device.DEVICE))
        launches.append(counts.launches)
    assert launches[0] == launches[1] > 0


# --- embeddings ------------------------------------------------------------------------------------------------------


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


def test_bools_are_labels_and_another_value_is_ignored() -> None:
    embeddings, labels = make_embeddings("ignored rows")
    moved = torch.where(labels == IGNORED, 77, labels)
    expected = retrieval_smooth_ap(embeddings, labels)
    assert torch.equal(retrieval_smooth_ap(embeddings, moved, ignore_index=77), expected)
    assert not torch.equal(retrieval_smooth_ap(embeddings, moved), expected)
    even = retrieval_smooth_ap(embeddings, labels % 2 == 0)
    assert torch.equal(even, retrieval_smooth_ap(embeddings, 5 - 3 * (labels % 2)))


# The rows of each rank in three steps: queries, and the reference. tests/conformance has the promise.
COUNTS = {
    1: [([9], [12])] * 3,
    2: [([4, 5], [7, 5]), ([0, 9], [12, 0]), ([9, 0], [3, 9])],
    3: [([4, 0, 5], [0, 7, 5]), ([0, 9, 0], [12, 0, 0]), ([3, 3, 3], [5, 5, 2])],
}


def compare(reduction: str, layout: str = "", device: Any = "cpu") -> None:
    """Queries of all ranks rank a reference, or in a ``layout`` each other, and a queue of 20 rows, in three steps.

    The last is in blocks of a query. The second has weights, which have no effect on the loss of each query. The
    control: queries that rank each other, without a queue.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    loss, given = fullrank.RetrievalSmoothAPLoss(0.1, reduction, queue_size=20), {"temperature": 0.1}
    queued, named = torch.zeros(0, 5, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    for step, parts in enumerate(COUNTS[size]):
        own, held = (slice(sum(each[:rank]), sum(each[: rank + 1])) for each in parts)
        if layout:
            embeddings, labels = make_embeddings(layout, step)
            leaves, of_others, own = [embeddings.requires_grad_()], labels, slice(None)
        else:
            leaves = [cases.normal(count, 5, seed=2 * step + count).requires_grad_() for count in (9, 12)]
            labels, of_others = torch.tensor([0, 1, 1, IGNORED, 2, 3, 0, 1, 9]), torch.arange(12) % 4
            of_others[5] = IGNORED
        among = torch.cat([leaves[-1], queued]), torch.cat([of_others, named])
        if layout:  # a query does not rank itself
            values = reference.retrieval_smooth_ap(*among, **given, reduction="none").loss[: len(labels)]
        else:
            values = reference.retrieval_smooth_ap(leaves[0], labels, **given, reduction="none", among=among).loss
        control = reference.retrieval_smooth_ap(leaves[0], labels, **given, reduction="none").loss
        weight = torch.arange(len(labels)).double() % 4 if step == 1 else torch.ones(len(labels)).double()
        expected = values * (1.0 if reduction == "none" else weight)
        if reduction != "none":
            expected = expected.nansum() / (weight[~values.isnan()].sum() if reduction == "mean" else 1)
        rows = [leaves[0][own].detach().to(device, copy=True).requires_grad_(), labels[own].to(device)]
        call = {"sample_weight": weight[own].to(device)} if step == 1 else {}
        if not layout:
            others = leaves[1][held].detach().clone().requires_grad_()
            call |= {"reference": others, "reference_labels": of_others[held]}
        blocks = {torch.device(device).type: TABLE["cpu"]._replace(similarities_at_once=1)}
        with mock.patch.dict(TABLE, blocks if step == 2 else {}):
            found = [loss(*rows, **call)]
        if layout and step == 0:
            found.append(retrieval_smooth_ap(*rows, reduction=reduction, **given))
        for value in found:
            assert_close(value.cpu(), expected, equal_nan=True, **COSINES)
            for leaf, mine, cut in zip(leaves, (rows[0], call.get("reference")), (own, held)):
                theirs = cases.gradient(expected, leaf)
                assert bool(theirs.any())
                assert_close(cases.gradient(value, mine).cpu(), size * theirs[cut], **COSINES)
        assert (layout and step == 0) or (control - values).abs().nansum() > 1e-3
        kept = of_others != IGNORED
        queued = torch.cat([queued, torch.nn.functional.normalize(leaves[-1].detach()[kept], dim=1)])[-20:]
        named = torch.cat([named, of_others[kept]])[-20:]
    loss.queue.assert_synchronized()


WAYS = [("ignored rows", reduction) for reduction in REDUCTIONS]
WAYS += [(layout, REDUCTIONS[2 * (number % 2)]) for number, layout in enumerate([*LAYOUTS][:-1])]
WAYS += [("", reduction) for reduction in REDUCTIONS]


@pytest.mark.parametrize(
    ("layout", "reduction", "device"), cases.on_devices(WAYS, [("ignored rows", "mean")]), indirect=["device"]
)
def test_embeddings_and_a_queue_equal_the_reference(layout: str, reduction: str, device: torch.device) -> None:
    compare(reduction, layout, device)


@pytest.mark.parametrize(("reduction", "fewest"), [("mean", 0), ("none", 0), ("sum", 1000)])
@on_ranks()
def test_a_reference_of_all_ranks_is_ranked(rank: int, reduction: str, fewest: int) -> None:
    """Where each rank computes its own queries, and where every rank computes all."""
    with mock.patch.object(retrieval, "FEWEST_SPLIT", fewest):
        compare(reduction)
