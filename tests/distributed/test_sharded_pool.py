"""A sharded pool: the loss and the gradient of one process with all rows, with no rank holding them."""

from __future__ import annotations

import hashlib
import itertools
import random
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from batches import part_of, portion
from collective_counter import CollectiveCounter
from on_ranks import on_ranks
from score_sets import SETS
from score_sets import generator as score_generator
from subjects import LIMITS
from torch import Tensor
from workers import WorkerPool, error_of

import fullrank
from fullrank.distributed.exchange import Exchange
from fullrank.kernels.soft_ranks import smooth_ap_sums
from fullrank.kernels.spread import sample_of
from fullrank.losses import sharded_smooth_ap, sharded_threshold

STEPS = 3


class Case(NamedTuple):
    """One configuration: the loss, its rows, and which form computes it."""

    loss: str = "smooth_ap"
    form: str = "moments"
    dtype: str = "float64"
    split: str = "uneven"
    num_classes: int = 1
    queue_size: int = 0
    weighted: bool = False
    weighted_steps: int = STEPS  # the first of all steps
    masked: bool = False
    multi_hot: bool = False
    queue_keep: str = "all"
    temperature: float | None = 0.3
    reduction: str = "mean"
    options: tuple[tuple[str, Any], ...] = ()


class Step(NamedTuple):
    """The rows of all ranks in one step."""

    logits: Tensor
    targets: Tensor
    iid_mask: Tensor | None
    weight: Tensor | None


def make_loss(case: Case, **options: Any) -> fullrank.losses.RankingLoss:
    """Return the loss of ``case``."""
    cls = {"smooth_ap": fullrank.SmoothAPLoss, "recall": fullrank.RecallAtQuantileLoss}.get(
        case.loss, fullrank.PAUCAtBudgetLoss
    )
    if cls is fullrank.PAUCAtBudgetLoss:
        options |= {"surrogate": case.loss, "beta": 0.4}
    names = ["queue_size", "multi_hot", "queue_keep", "reduction", *(["temperature"] if case.loss != "dro" else [])]
    return cls(case.num_classes, **{name: getattr(case, name) for name in names}, **options, **dict(case.options))


def make_step(case: Case, index: int, count: int = 90) -> Step:
    """Return the same rows in every process; some are ignored."""
    generator = torch.Generator().manual_seed(10 * index + case.num_classes)
    dtype = getattr(torch, case.dtype)
    count += 7 * index
    logits = torch.randn(count, case.num_classes, generator=generator, dtype=torch.float64).to(dtype)
    logits = (logits * 16).round() / 16 if index == 1 else logits  # ties
    if case.multi_hot:
        targets = (torch.rand(count, case.num_classes, generator=generator) < 0.3).long()
        targets[torch.rand(targets.shape, generator=generator) < 0.1] = -100
    else:
        targets = torch.randint(0, max(2, case.num_classes), (count,), generator=generator)
        targets[::6] = -100
    iid = torch.rand(count, generator=generator) < 0.8 if case.masked else None
    weight = torch.rand(count, generator=generator, dtype=torch.float64).to(dtype) if case.weighted else None
    weight = weight if index < case.weighted_steps else None
    return Step(logits, targets, iid, weight)


def counts_of(split: str, count: int, world_size: int, index: int) -> list[int]:
    """Return how many rows each rank has."""
    if split == "last" or (split == "last at first" and index == 0):
        return [0] * (world_size - 1) + [count]
    shares = [1 + (rank + index) % world_size * 2 for rank in range(world_size)]
    if split == "empty":
        shares[index % world_size] = 0
    return portion(count, shares)


def loss_and_gradient(loss: Any, step: Step, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the loss, or the sum of its elements with factors, and the gradient of the logits."""
    logits = step.logits.clone().requires_grad_()
    value = loss(logits, step.targets, step.iid_mask, sample_weight=step.weight, **options)
    factors = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).view(value.shape)
    (value.nan_to_num() * factors).sum().backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


class Outcome(NamedTuple):
    """What a rank has seen of one case."""

    gradient: float  # error relative to the norm of the whole gradient
    value: float
    digest: str  # of all values
    collectives: int  # of the last step


def forced(form: str) -> Any:
    """Let a loss take ``form`` wherever it can; "auto" leaves the choice to it, "sums" is that of thresholds."""
    if form == "sums":
        return mock.patch.dict(sharded_threshold.COSTS, {"sums": 1e-30})
    # Bins that are too many cost infinitely much, and then the positives travel.
    costs = {name: 1.0 if name == form or form == "auto" else 1e30 for name in sharded_smooth_ap.COSTS}
    costs["gather"] = costs["gather"] ** 2
    return mock.patch.dict(sharded_smooth_ap.COSTS, costs)


def run_case(rank: int, case: Case) -> Outcome:
    """Take steps with a sharded pool, and with one process that has all rows in float64."""
    world_size = dist.get_world_size()
    loss, alone = make_loss(case, pool="sharded"), make_loss(case, gather_distributed=False)
    worst_gradient = worst_value = 0.0
    digest, number = hashlib.blake2b(digest_size=8), 0
    with forced(case.form):
        for index in range(STEPS):
            step = make_step(case, index)
            counts = counts_of(case.split, step.logits.shape[0], world_size, index)
            wide = Step(step.logits.double(), step.targets, step.iid_mask, step.weight)
            expected, whole = loss_and_gradient(alone, wide)
            with CollectiveCounter() if index == STEPS - 1 else nullcontext() as counter:
                value, gradient = loss_and_gradient(loss, part_of(step, counts, rank))
            number = counter.total if counter else 0
            reference = whole.split(counts)[rank]
            error = (gradient.double() / world_size - reference).norm() / whole.norm().clamp_min(1e-30)
            worst_gradient = max(worst_gradient, float(error))
            difference = (value.double().nan_to_num() - expected.nan_to_num()).abs()
            worst_value = max(worst_value, float(difference.max() / expected.nan_to_num().abs().max().clamp_min(1e-3)))
            digest.update(value.contiguous().numpy().tobytes())
    return Outcome(worst_gradient, worst_value, digest.hexdigest(), number)


def run_cases(rank: int, cases: list[Case]) -> list[Outcome]:
    """Run several cases in one task."""
    return [run_case(rank, case) for case in cases]


def assert_exact(pool: WorkerPool, cases: list[Case]) -> list[Outcome]:
    """Assert that the promise holds, and that all ranks have the same value to the last bit."""
    of_ranks = pool(run_cases, cases)
    for case, *outcomes in zip(cases, *of_ranks):
        assert len({outcome.digest for outcome in outcomes}) == 1, case
        for outcome in outcomes:
            assert outcome.gradient <= LIMITS[case.dtype], (case, outcome)
            assert outcome.value <= LIMITS[case.dtype], (case, outcome)
    return of_ranks[0]


ROWS_OF: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weighted": True, "split": "last"},
    "masked": {"masked": True, "split": "empty"},
    "classes": {"num_classes": 4, "split": "empty"},
    "multi_hot": {"num_classes": 3, "multi_hot": True, "weighted": True},
    "queue": {"queue_size": 130, "split": "empty"},
    "queue_of_classes": {"queue_size": 130, "num_classes": 3, "weighted": True, "reduction": "none"},
    "queue_on_one_rank": {"queue_size": 130, "multi_hot": True, "num_classes": 2, "split": "last"},
    # After the first step the queued rows of one rank have weights, and the others hold no queued row.
    "once_weighted": {"queue_size": 500, "weighted": True, "weighted_steps": 1, "split": "last at first"},
    "negatives": {"queue_size": 50, "queue_keep": "negatives", "temperature": None},
    "automatic": {"temperature": None, "num_classes": 2, "queue_size": 64, "split": "empty"},
}


FEW = ("multi_hot", "queue", "queue_of_classes", "automatic")


def cases_of(loss: str, form: str) -> list[Case]:
    """Return every kind of rows in float64, and a few in float32."""
    cases = [Case(loss, form, **kind) for kind in ROWS_OF.values()]
    return cases + [Case(loss, form, "float32", **ROWS_OF[kind]) for kind in FEW]


@pytest.mark.parametrize(
    "form", ["moments", *(pytest.param(form, marks=pytest.mark.slow) for form in ("positives", "gather"))]
)
def test_smooth_ap_equals_one_process(pool_of_two: WorkerPool, form: str) -> None:
    assert_exact(pool_of_two, cases_of("smooth_ap", form))


def random_case(seed: int) -> Case:
    """Return a configuration at random."""
    draw = random.Random(seed)
    loss = draw.choice(["smooth_ap", "smooth_ap", "recall", "trapezoid"])
    num_classes = draw.choice([1, 1, 2, 5])
    return Case(
        loss,
        draw.choice(["moments", "positives", "gather", "auto"]) if loss == "smooth_ap" else "sums",
        draw.choice([*LIMITS]),
        draw.choice(["uneven", "empty", "last"]),
        num_classes,
        draw.choice([0, 20, 130, 1000]),
        weighted=draw.random() < 0.5,
        weighted_steps=draw.choice([1, STEPS]),
        masked=draw.random() < 0.3,
        multi_hot=draw.random() < 0.3,
        queue_keep=draw.choice(["all", "all", "negatives"]),
        # At smaller ones a gradient may be so small that float32 rounds it by more, in one process too.
        temperature=draw.choice([0.3, 2.0] if loss == "trapezoid" else [0.3, 2.0, None]),
        reduction=draw.choice(["mean", "sum", "none"]),
    )


@pytest.mark.slow
def test_random_configurations(pool_of_four: WorkerPool) -> None:
    assert_exact(pool_of_four, [random_case(seed) for seed in range(10)])


THRESHOLDS: dict[str, dict[str, Any]] = {
    "linear": {"options": (("quantile_interpolation", "linear"),)},
    "linear_queue": {"options": (("quantile_interpolation", "linear"),), "queue_size": 90, "num_classes": 2},
    "detached": {"options": (("threshold_gradient", False),), "queue_size": 40},
}
BANDS: dict[str, dict[str, Any]] = {
    "population": {"options": (("budget_basis", "population"), ("n_knots", 4)), "num_classes": 3, "masked": True},
    "live": {"options": (("pos_numerator", "live"), ("tau_scale", "band")), "queue_size": 90, "weighted": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["recall", "trapezoid"])
def test_losses_at_thresholds_equal_one_process(pool_of_two: WorkerPool, loss: str) -> None:
    kinds = [*THRESHOLDS.values(), *(BANDS.values() if loss == "trapezoid" else [])]
    more = [Case(loss, "sums", **kind) for kind in kinds]
    cases = cases_of(loss, "sums") + more
    if loss == "trapezoid":
        cases = [case._replace(temperature=case.temperature or 0.3) for case in cases]
    assert_exact(pool_of_two, cases)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["recall", "trapezoid", "pairwise", "dro"])
def test_other_losses_gather_the_rows(pool_of_two: WorkerPool, loss: str) -> None:
    kinds = [{"queue_size": 90}, {"num_classes": 3, "weighted": True, "masked": True, "split": "empty"}]
    assert_exact(pool_of_two, [Case(loss, "gather", dtype, **kind) for dtype in LIMITS for kind in kinds])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "number"),
    [
        (Case(), 2),  # header, moments
        (Case(temperature=None), 3),  # header, sample, moments
        (Case(num_classes=3), 3),  # header, ranges, moments
        (Case(queue_size=40), 2),
        (Case(form="positives"), 4),  # header, positives, sums, gradients
        (Case(form="gather"), 2),
        (Case(form="gather", queue_size=40), 3),
        (Case("recall", "sums", "float32"), 5),  # header, three digits, sums
        (Case("recall", "sums"), 8),
        (Case("trapezoid", "sums", "float32", queue_size=40), 5),
        (Case("trapezoid", "sums", "float32", num_classes=3), 5),
    ],
    ids=str,
)
def test_number_of_collectives(pool_of_two: WorkerPool, case: Case, number: int) -> None:
    for kind in ("uneven", "last"):
        (outcome,) = assert_exact(pool_of_two, [case._replace(split=kind)])
        assert outcome.collectives == number


# Score sets


EXTREMES = {"finite": {}, "inf": {0: torch.inf}, "-inf": {1: -torch.inf}, "both": {0: torch.inf, 1: torch.inf}}
EXTREMES |= {"nan": {1: torch.nan}, "lone positive": {2: torch.inf}}


def whole_smooth_ap(leaf: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the loss by its sums over pairs."""
    return smooth_ap_sums(leaf.t(), targets[None] > 0, None, None, temperature, "direct")[0].sum()


def whole_recall(leaf: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return fullrank.losses.recall_at_quantile(leaf, targets, 0.1, temperature)


def of_sets(rank: int, form: str, dtype_name: str, sets: list[str]) -> list[str]:
    """Compare every set of scores, and every value that is not finite, with one process; return what differs."""
    dtype, world_size, wrong = getattr(torch, dtype_name), dist.get_world_size(), []
    is_float32 = dtype == torch.float32
    limit, of_value = (2e-6, 6e-8) if is_float32 else (1e-12, 1e-13)
    if form == "sums":
        make, define, of_value = fullrank.RecallAtQuantileLoss, whole_recall, limit
    else:
        make, define = fullrank.SmoothAPLoss, whole_smooth_ap
    for name in sets:
        for temperature in (1e-4, 0.1, 10.0):
            for kind in EXTREMES if name in ("normal", "cauchy") else ("finite",):
                scores = SETS[name]()[::2].to(dtype)[:, None].clone()
                targets = (torch.rand(scores.shape[0], generator=score_generator()) < 0.05).long()
                targets[:3] = torch.tensor([0, kind == "both", 1])
                for row, value in EXTREMES[kind].items():
                    scores[row] = value
                step, leaf = Step(scores, targets, None, None), scores.double().clone().requires_grad_()
                expected = define(leaf, targets, temperature)
                expected.backward()
                counts, options = counts_of("uneven", len(scores), world_size, 0), {"quantile": 0.1}
                with forced(form):
                    loss = make(1, temperature=temperature, pool="sharded", **options if form == "sums" else {})
                    value, gradient = loss_and_gradient(loss, part_of(step, counts, rank))
                assert leaf.grad is not None
                size, reference = leaf.grad.norm(), leaf.grad.split(counts)[rank]
                error = (gradient.double() / world_size - reference).norm()
                # The pair of a positive with itself cancels between two float64 numbers, and may be far larger.
                rounding = 1e-15 * 0.25 / temperature / float(targets.sum())
                right = bool(error <= limit * size + rounding or size <= 1e-12)
                right &= bool((value.double() - expected).abs() <= of_value * expected + of_value / 6)
                if expected.isnan():
                    right = bool(value.isnan() and (form == "sums" or gradient.isnan().all()))
                if not right:
                    wrong.append(f"{name} {kind} {temperature} {value} {expected} {size} {error}")
    return wrong


@pytest.mark.parametrize(
    ("form", "dtype", "sets"),
    [
        ("moments", "float64", ["normal"]),
        *(pytest.param(form, "float64", [*SETS], marks=pytest.mark.slow) for form in ("moments", "positives", "sums")),
        *(pytest.param(form, "float32", [*SETS], marks=pytest.mark.full) for form in ("moments", "positives", "sums")),
    ],
)
def test_any_scores(pool_of_two: WorkerPool, form: str, dtype: str, sets: list[str]) -> None:
    """A value that is not finite is on one rank alone, or on two; "sums" is recall."""
    assert pool_of_two(of_sets, form, dtype, sets) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recall", "trapezoid"])
@on_ranks(2)
def test_nan_is_where_a_gathered_pool_has_it(rank: int, name: str) -> None:
    """Infinite scores at a threshold, where differences are NaN, or a NaN; with and without its gradient."""
    for kind, carried, queue_size in itertools.product(("inf", "nan", "finite"), (True, False), (0, 20)):
        case = Case(name, queue_size=queue_size, options=(("threshold_gradient", carried),), temperature=0.3)
        step = make_step(case, 0)
        if kind == "inf":
            step.logits[::7] = torch.inf  # and so a threshold
        elif kind == "nan":
            step.logits[-1] = torch.nan
        own = part_of(step, counts_of("uneven", len(step.logits), 2, 0), rank)
        gathered = loss_and_gradient(make_loss(case), own)
        with forced("sums"):
            value, gradient = loss_and_gradient(make_loss(case, pool="sharded"), own)
        for found, expected in zip((value, gradient), gathered):
            torch.testing.assert_close(found, expected, equal_nan=True)
        assert bool(value.isnan()) == bool(gradient.isnan().any()) == (kind != "finite")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["moments", "positives", "gather", "sums"])
@on_ranks(2)
def test_calls_without_gradient(rank: int, form: str) -> None:
    """They give the values of those with one. In training mode their rows enter the queue that the next step reads."""
    for name in ("recall", "trapezoid") if form == "sums" else ("smooth_ap",):
        case = Case(name, queue_size=60)
        steps = [make_step(case, index) for index in range(3)]
        split = [counts_of("empty", len(step.logits), dist.get_world_size(), index) for index, step in enumerate(steps)]
        owns = [part_of(step, counts, rank) for step, counts in zip(steps, split)]
        with forced(form):
            clean = make_loss(case, pool="sharded")
            expected = [loss_and_gradient(clean, own) for own in owns]
            for context in (torch.no_grad, torch.inference_mode):
                loss = make_loss(case, pool="sharded")
                with context():
                    values = [loss(own.logits, own.targets) for own in owns[:2]]
                last = loss_and_gradient(loss, owns[2])
                assert all(bool(value == wanted[0]) for value, wanted in zip(values, expected))
                assert all(map(torch.equal, last, expected[2]))


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
    "form", ["moments", *(pytest.param(form, marks=pytest.mark.slow) for form in ("positives", "gather", "sums"))]
)
@on_ranks(2)
def test_rows_without_a_valid_class(rank: int, form: str) -> None:
    """They give what one process gives."""
    for count, num_classes, target, is_infinite in DEGENERATE.values():
        for loss in ("recall", "trapezoid") if form == "sums" else ("smooth_ap",):
            case = Case(loss, num_classes=num_classes, reduction="none", queue_size=10)
            losses = [make_loss(case, gather_distributed=False), make_loss(case, pool="sharded")]
            for index in range(2):
                logits = torch.randn(count, num_classes, generator=torch.Generator().manual_seed(index)).double()
                logits[: 2 * is_infinite] = torch.inf
                step = Step(logits, torch.full((count,), target), None, None)
                counts = counts_of("last" if index else "uneven", count, 2, index)
                expected, whole = loss_and_gradient(losses[0], step)
                with forced(form):
                    value, gradient = loss_and_gradient(losses[1], part_of(step, counts, rank))
                close = {"rtol": 1e-12, "atol": 1e-12, "equal_nan": True}
                torch.testing.assert_close(value, expected, **close)
                torch.testing.assert_close(gradient / 2, whole.split(counts)[rank], **close | {"rtol": 1e-5})


@pytest.mark.parametrize(
    "form", [pytest.param("moments", marks=pytest.mark.slow), pytest.param("positives", marks=pytest.mark.full)]
)
@on_ranks(2)
def test_the_automatic_temperature_is_that_of_a_gathered_pool(rank: int, form: str) -> None:
    """Also where the sample holds a queued row twice, as an even sample of hardly more rows does."""
    for num_classes, capacity in ((3, 7), (3, 50), (30, 500)):  # too many rows for all of them to be in the sample
        losses = [fullrank.SmoothAPLoss(num_classes, capacity, pool=pool) for pool in ("gathered", "sharded")]
        for index in range(4):
            generator = torch.Generator().manual_seed(10 * index + rank)
            count = 1500 + index if rank else 0
            logits = torch.randn(count, num_classes, generator=generator).double().requires_grad_()
            targets = torch.randint(0, num_classes, (count,), generator=generator)
            with forced(form):
                for loss in losses:
                    loss(logits, targets)
            assert losses[0].current_temperature == losses[1].current_temperature


@on_ranks(2)
def test_a_sample_without_spread_is_not_the_pool(rank: int) -> None:
    """Of many classes the sample has a few rows of some, which may all be constant; the spread is then that of all."""
    scores = torch.zeros(130, 640)
    scores[1::2] = 3 * torch.randn(65, 640, generator=torch.Generator().manual_seed(0))
    scores.view(-1)[sample_of(torch.arange(scores.numel()).double().view_as(scores), None).long().reshape(-1)] = 0
    own, found = slice(200, None) if rank else slice(200), []
    for pool in ("gathered", "sharded"):
        loss = fullrank.SmoothAPLoss(130, queue_size=0, pool=pool)
        with forced("moments"):
            loss(scores.t()[own], torch.arange(640)[own] % 130)
        found.append(loss.current_temperature)
    assert found[0] == found[1] > 0.2


# Controls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "case"), [("table", Case()), ("ranges", Case()), ("table", Case("recall", "sums"))], ids=str
)
def test_control_what_one_rank_knows_is_not_enough(pool_of_two: WorkerPool, what: str, case: Case) -> None:
    assert max(pool_of_two(without_the_others, what, case)) > 1e-3


def without_the_others(rank: int, what: str, case: Case) -> float:
    """Return the error of the gradient when a rank takes one thing from its own rows."""
    if what == "table":  # that of one rank, and so its thresholds
        patched: Any = mock.patch.object(Exchange, "sum", lambda self, tensor, named: tensor)
    else:  # bins that begin where this rank's rows do
        original = sharded_smooth_ap.cover

        def shifted(*arguments: Any) -> Any:
            bins = original(*arguments)
            return bins._replace(first=bins.first - rank, window=bins.window + 1)

        patched = mock.patch.object(sharded_smooth_ap, "cover", shifted)
    with patched:
        return run_case(rank, case).gradient


@on_ranks(2)
def test_bytes_do_not_grow_with_the_rows(rank: int) -> None:
    """Of one forward and backward at a tenth of the spread."""
    sent = []
    for num_rows in (100_000, 200_000):
        generator = torch.Generator().manual_seed(rank)
        logits = torch.randn(num_rows, 1, generator=generator).clamp(-5, 5)
        logits[:2, 0] = torch.tensor([-5.0, 5.0])
        loss = fullrank.SmoothAPLoss(1, temperature=0.1, pool="sharded")
        with CollectiveCounter() as counter:
            loss(logits.requires_grad_(), (torch.rand(num_rows, generator=generator) < 0.02).long()).backward()
        sent.append(sum(counter.sizes))
    assert sent[0] == sent[1] < 100_000


# Under a wrapper


@on_ranks(2)
def test_a_warm_up_before_a_sharded_loss(rank: int) -> None:
    """Value and gradient in a warm-up, a blend and with the main loss, whose queue is reset."""
    case, schedule = Case(queue_size=130), {"temp_start": 0.5, "temp_end": 0.1, "temp_decay_steps": 3}
    losses = [
        fullrank.LossWarmupWrapper(
            fullrank.SigmoidFocalLoss(), make_loss(case, **options), warmup_steps=2, blend_steps=2, **schedule
        )
        for options in ({"pool": "sharded"}, {})
    ]
    losses[1].gather_distributed = False
    for index in range(6):
        step = make_step(case, index)
        step = step._replace(targets=(torch.arange(len(step.logits)) % 3 // 2)[:, None])
        counts, found = counts_of("empty", len(step.logits), 2, index), []
        for loss, rows in zip(losses, (part_of(step, counts, rank), step)):
            loss.on_train_batch_start(index)
            plain = lambda logits, targets, *_, loss=loss, **__: loss(logits, targets)  # noqa: E731
            found.append(loss_and_gradient(plain, rows))
        (value, gradient), (expected, whole) = found
        reference = whole.split(counts)[rank]
        assert abs(float(value - expected)) <= 1e-12
        assert (gradient / 2 - reference).norm() <= 1e-12 * whole.norm()


# The choice


def test_max_pool_size_is_refused() -> None:
    with pytest.raises(ValueError, match="max_pool_size: expected None with pool='sharded', got 9"):
        fullrank.SmoothAPLoss(1, max_pool_size=9, pool="sharded")
    with pytest.raises(ValueError, match="pool: expected"):
        fullrank.SmoothAPLoss(1, pool="shared")  # type: ignore[arg-type]
    with pytest.raises(AttributeError):  # the queue is of the other kind
        fullrank.SmoothAPLoss(1).pool = "sharded"  # type: ignore[misc]


@on_ranks(2)
def test_ranks_with_other_pools_raise(rank: int) -> None:
    loss = fullrank.SmoothAPLoss(1, pool="sharded" if rank else "gathered")
    kind, text = error_of(lambda: loss(torch.zeros(3, 1), torch.tensor([0, 1, 0])))
    assert kind == "RuntimeError"
    assert "arguments: " in text


@on_ranks(2)
def test_queries_are_gathered_and_one_process_needs_nothing(rank: int) -> None:
    losses = [fullrank.SmoothAPLoss(1, pool=pool) for pool in ("gathered", "sharded")]
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(20, 1, generator=generator), torch.randint(0, 2, (20,), generator=generator)
    indexes = torch.randint(0, 3, (20,), generator=generator)
    assert torch.equal(*(loss(*rows, indexes=indexes) for loss in losses))
    for loss in losses:
        loss.gather_distributed = False
    assert torch.equal(*(loss(*rows) for loss in losses))
