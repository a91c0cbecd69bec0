"""The forms of a sharded pool: any scores, degenerate rows, what travels. test_promise.py has the gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from batches import Rows, part_of, split
from collective_counter import CollectiveCounter
from gradient_cases import Case, forced, make_loss, make_step
from on_ranks import on_ranks, same
from score_sets import SETS
from score_sets import generator as score_generator
from torch import Tensor

import fullrank
from fullrank.kernels.smooth_ap.sums import smooth_ap_sums
from fullrank.kernels.spread import sample_of
from fullrank.large import ShardedLoss


def loss_and_gradient(loss: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the loss, or the sum of its elements with factors, of the first features, and their gradient."""
    num_classes = getattr(loss, "loss", loss).num_classes
    logits = rows.features[:, :num_classes].clone().requires_grad_()
    value = loss(logits, rows.targets, sample_weight=rows.weight)
    factors = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).view(value.shape)
    (value.nan_to_num() * factors).sum().backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


def own_rows(rank: int, case: Case, index: int) -> Rows:
    step = make_step(case, index)
    return part_of(step, split(len(step.features), 2, index, case.layout), rank)


AP = Case("smooth_ap", sharded=True, form="moments")
RECALL, PAUC = (AP._replace(loss=loss, form="sums") for loss in ("recall", "pauc_trapezoid"))
COLLECTIVES = {
    "header, moments": (AP, 2),
    "header, sample, moments": (AP._replace(loss="smooth_ap_automatic"), 3),
    "header, ranges, moments": (AP._replace(num_classes=3), 3),
    "header, positives, sums, gradients": (AP._replace(form="positives"), 4),
    "header, and that of the wrapped loss with its rows": (AP._replace(form="gather"), 2),
    "header, three digits, sums": (RECALL._replace(dtype="float32"), 5),
    "header, six digits, sums": (RECALL, 8),
    "header, sample, six digits, sums": (RECALL._replace(loss="recall_automatic"), 9),
    "header, three digits, sums of classes": (PAUC._replace(dtype="float32", num_classes=3), 5),
}
OFTEN = ["header, sample, moments", "header, positives, sums, gradients", "header, six digits, sums"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.full) for name in COLLECTIVES]
)
@on_ranks(2)
def test_number_of_collectives(rank: int, name: str) -> None:
    case, number = COLLECTIVES[name]
    loss = make_loss(case, local=False)
    with forced(case.form):
        for index, layout in ((40, "uneven"), (41, "last"), (42, "last")):  # of 160 rows
            with CollectiveCounter() as counter:
                loss_and_gradient(loss, own_rows(rank, case._replace(layout=layout), index))
    assert counter.total == number


@on_ranks(2)
def test_bytes_do_not_grow_with_the_rows(rank: int) -> None:
    """Of one forward and backward at a tenth of the spread."""
    sent = []
    for num_rows in (100_000, 200_000):
        generator = torch.Generator().manual_seed(rank)
        logits = torch.randn(num_rows, 1, generator=generator).clamp(-5, 5)
        logits[:2, 0] = torch.tensor([-5.0, 5.0])
        loss = ShardedLoss(fullrank.SmoothAPLoss(1, temperature=0.1))
        with CollectiveCounter() as counter:
            loss(logits.requires_grad_(), (torch.rand(num_rows, generator=generator) < 0.02).long()).backward()
        sent.append(sum(counter.sizes))
    assert sent[0] == sent[1] < 100_000


# Score sets


EXTREMES = {"finite": {}, "inf": {0: torch.inf}, "-inf": {1: -torch.inf}, "both": {0: torch.inf, 1: torch.inf}}
EXTREMES |= {"nan": {1: torch.nan}, "lone positive": {2: torch.inf}}


FEW = ["tied", "far from 0", "two clusters", "cauchy"]


def whole_smooth_ap(leaf: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return smooth_ap_sums(leaf.t(), targets[None] > 0, None, None, temperature, "direct")[0].sum()


def whole_recall(leaf: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return fullrank.losses.recall_at_quantile(leaf, targets, 0.1, temperature, surrogate="sigmoid")


@pytest.mark.parametrize(
    ("form", "name", "sets"),
    [
        ("moments", "float64", ["normal"]),
        *(pytest.param(form, "float64", [*FEW], marks=pytest.mark.slow) for form in ("moments", "positives", "sums")),
        *(
            pytest.param(form, dtype, [*SETS], marks=pytest.mark.full)
            for form in ("moments", "positives", "sums")
            for dtype in ("float64", "float32")
        ),
    ],
)
@on_ranks(2)
def test_any_scores(rank: int, form: str, name: str, sets: list[str]) -> None:
    """As in one process. A value that is not finite is on one rank alone, or on two; "sums" is recall."""
    dtype, wrong = getattr(torch, name), []
    is_float32 = dtype == torch.float32
    limit, of_value = (2e-6, 6e-8) if is_float32 else (1e-12, 1e-13)
    define = whole_recall if form == "sums" else whole_smooth_ap
    of_value = limit if form == "sums" else of_value
    for name in sets:
        for temperature in (1e-4, 0.1, 10.0):
            for kind in EXTREMES if name in ("normal", "cauchy") else ("finite",):
                scores = SETS[name]()[::2].to(dtype)[:, None].clone()
                targets = (torch.rand(scores.shape[0], generator=score_generator()) < 0.05).long()
                targets[:3] = torch.tensor([0, kind == "both", 1])
                for row, value in EXTREMES[kind].items():
                    scores[row] = value
                leaf = scores.double().clone().requires_grad_()
                expected = define(leaf, targets, temperature)
                expected.backward()
                counts = split(len(scores), 2, 0)
                loss: Any = fullrank.SmoothAPLoss(1, temperature=temperature)
                if form == "sums":
                    loss = fullrank.RecallAtQuantileLoss(1, 0.1, temperature=temperature, surrogate="sigmoid")
                with forced(form):
                    value, gradient = loss_and_gradient(ShardedLoss(loss), part_of(Rows(scores, targets), counts, rank))
                assert leaf.grad is not None
                size, reference = leaf.grad.norm(), leaf.grad.split(counts)[rank]
                error = (gradient.double() / 2 - reference).norm()
                # The pair of a positive with itself cancels between two float64 numbers, and may be far larger.
                rounding = 1e-15 * 0.25 / temperature / float(targets.sum())
                right = bool(error <= limit * size + rounding or size <= 1e-12)
                right &= bool((value.double() - expected).abs() <= of_value * expected + of_value / 6)
                if expected.isnan():
                    right = bool(value.isnan() and (form == "sums" or gradient.isnan().all()))
                if not right:
                    wrong.append(f"{name} {kind} {temperature} {value} {expected} {size} {error}")
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [RECALL, PAUC], ids=["recall", "trapezoid"])
@on_ranks(2)
def test_nan_is_where_a_gathered_pool_has_it(rank: int, case: Case) -> None:
    """Infinite scores at a threshold, where differences are NaN, or a NaN; with and without its gradient."""
    for kind, carried in itertools.product(("inf", "nan", "finite"), (True, False)):
        own, case = own_rows(rank, case, 40), case._replace(options={"threshold_gradient": carried})
        if kind == "inf":
            own.features[:: 2 if case.loss == "recall" else 3] = torch.inf  # and so a threshold
        elif kind == "nan" and rank == 1:
            own.features[-2] = torch.nan  # a row that counts
        gathered = loss_and_gradient(make_loss(case._replace(sharded=False, queue_size=0), local=False), own)
        with forced("sums"):
            value, gradient = loss_and_gradient(make_loss(case, local=False), own)
        for found, expected in zip((value, gradient), gathered):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14, equal_nan=True)  # sums of float64
        assert bool(value.isnan()) == bool(gradient.isnan().any()) == (kind != "finite")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["moments", "positives", "gather", "sums"])
@on_ranks(2)
def test_calls_without_gradient(rank: int, form: str) -> None:
    """They give the values of those with one, and each rank gives the same."""
    for case in (RECALL, PAUC) if form == "sums" else (AP, AP._replace(num_classes=3, weighted=True)):
        own, loss = own_rows(rank, case, 2), make_loss(case, local=False)
        with forced(form):
            expected = same(loss_and_gradient(loss, own)[0].item())
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    value = loss(own.features[:, : case.num_classes], own.targets, sample_weight=own.weight)
                assert value.item() == expected


POPULATION = {"budget_basis": "population"}  # of which positives alone are a reference too
# Rows of all ranks, classes, the target of every row, and whether two scores are infinite.
DEGENERATE = {
    "no rows": (0, 1, 0, False),
    "no positive": (30, 1, 0, False),
    "no negative": (30, 1, 1, False),
    "one class of three": (30, 3, 2, False),
    "all ignored": (30, 3, -100, False),
    "one row": (1, 1, 1, False),
    "infinite positives alone": (30, 1, 1, True),
}


@pytest.mark.parametrize(
    "form",
    ["moments", pytest.param("sums", marks=pytest.mark.slow)]
    + [pytest.param(form, marks=pytest.mark.full) for form in ("positives", "gather")],
)
@on_ranks()
def test_rows_without_a_valid_class(rank: int, form: str) -> None:
    world_size = torch.distributed.get_world_size()
    for count, num_classes, target, is_infinite in DEGENERATE.values():
        for base in (RECALL, PAUC, PAUC._replace(options=POPULATION)) if form == "sums" else (AP,):
            case = base._replace(num_classes=num_classes, options={**base.options, "reduction": "none"})
            losses = [make_loss(case, local) for local in (True, False)]
            for index in range(2):
                logits = torch.randn(count, num_classes, generator=torch.Generator().manual_seed(index)).double()
                logits[: 2 * is_infinite] = torch.inf
                step = Rows(logits, torch.full((count,), target))
                counts = split(count, world_size, index, "last" if index else "uneven")
                expected, whole = loss_and_gradient(losses[0], step)
                with forced(form):
                    value, gradient = loss_and_gradient(losses[1], part_of(step, counts, rank))
                close = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
                torch.testing.assert_close(value, expected, **close)
                torch.testing.assert_close(gradient / world_size, whole.split(counts)[rank], **close | {"rtol": 1e-5})


# The automatic temperature


@pytest.mark.parametrize(
    "form", [pytest.param("moments", marks=pytest.mark.slow), pytest.param("positives", marks=pytest.mark.full)]
)
@on_ranks(2)
def test_the_automatic_temperature_is_that_of_a_gathered_pool(rank: int, form: str) -> None:
    for num_classes in (1, 30):  # too many rows for all of them to be in the sample
        gathered, wrapped = fullrank.SmoothAPLoss(num_classes), fullrank.SmoothAPLoss(num_classes)
        for index in range(2):
            generator = torch.Generator().manual_seed(10 * index + rank)
            count = 4500 + index if rank else index % 2
            logits = torch.randn(count, num_classes, generator=generator).double().requires_grad_()
            targets = torch.randint(0, max(2, num_classes), (count,), generator=generator)
            with forced(form):
                for loss in (gathered, ShardedLoss(wrapped)):
                    loss(logits, targets)
            assert gathered.current_temperature == wrapped.current_temperature


@on_ranks(2)
def test_a_sample_without_spread_is_not_the_pool(rank: int) -> None:
    """Of many classes the sample has a few rows of some, which may all be constant; the spread is then that of all."""
    scores = torch.zeros(130, 640)
    scores[1::2] = 3 * torch.randn(65, 640, generator=torch.Generator().manual_seed(0))
    scores.view(-1)[sample_of(torch.arange(scores.numel()).double().view_as(scores), None).long().reshape(-1)] = 0
    own, found = slice(200, None) if rank else slice(200), []
    for wrap in (lambda loss: loss, ShardedLoss):
        loss = fullrank.SmoothAPLoss(130)
        with forced("moments"):
            wrap(loss)(scores.t()[own], torch.arange(640)[own] % 130)
        found.append(loss.current_temperature)
    assert found[0] == found[1] > 0.2
