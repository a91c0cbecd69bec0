"""The promise: gradients over ranks equal those of one process with the whole batch."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import gradient_cases
import pytest
import torch
import torch.distributed as dist
from batches import Rows, part_of, split
from gradient_cases import SHARDED, Case
from loss_cases import FORMS, LOSSES, OF_POOL
from on_ranks import gathered, on_ranks
from subjects import LIMITS, Model, error, gradient, wrap
from torch import Tensor, nn
from workers import WorkerPool, get_pool

import fullrank
from fullrank.distributed.exchange import Exchange
from fullrank.large import smooth_ap

MODULES = [name for name, form in FORMS.items() if form.loss.module is not None]
BALANCED = ("cross_entropy_balanced", "binary_cross_entropy_balanced")
FEW = ("smooth_ap", "pauc_dro", "cross_entropy", "combined")  # of the fast tests
FIRST_SLOW = (pytest.mark.slow, pytest.mark.full)  # the marks of the first form of a loss, and of its others


def assert_exact(pool: WorkerPool, *cases: Case) -> None:
    """Assert that gradients and loss values of all steps equal those of one process."""
    for of_rank in pool(gradient_cases.worst_errors, pool.world_size, [*cases]):
        for case, errors in zip(cases, of_rank, strict=True):
            assert max(errors) <= LIMITS[case.dtype], (case, errors)


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        *(pytest.param(loss, "float64", marks=[] if FORMS[loss].is_first else pytest.mark.slow) for loss in MODULES),
        *(pytest.param(loss, "float32", marks=FIRST_SLOW[not FORMS[loss].is_first]) for loss in MODULES),
    ],
)
def test_gradient_equals_one_process(pool: WorkerPool, loss: str, dtype: str) -> None:
    """Uneven and empty shards, ignored rows, a queue that fills and wraps; in float64 also without weights."""
    weighted = FORMS[loss].loss.takes("sample_weight")
    ways = {weighted, False} if dtype == "float64" else {weighted}
    assert_exact(pool, *(Case(loss, dtype, weighted=way) for way in sorted(ways)))


# What every loss over a pool can do: the first form of each in all ways, and each other form in one of them.
WAYS: list[dict[str, Any]] = [
    {"num_classes": 3, "multi_hot": True, "weighted": True},
    {"num_classes": 4},
    {"queue_size": 0, "dtype": "float32"},
    {"num_classes": 2, "weighted": True, "by_bins": True},
    {"num_classes": 3, "options": {"queue_keep": "negatives"}},
    {"queue_size": 20},  # smaller than a batch
    {"num_classes": 3, "options": {"reduction": "sum"}},
    {"num_classes": 3, "options": {"reduction": "none"}, "masked": True},
]
FIRST = [name for name in OF_POOL if FORMS[name].is_first]
IN_WAYS = [Case(name, **way) for name in FIRST for way in WAYS]
IN_WAYS += [
    Case(name, **WAYS[index % len(WAYS)]) for index, name in enumerate(name for name in OF_POOL if name not in FIRST)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *IN_WAYS,
        *(
            Case(loss, dtype, options={"temperature": 0.07})
            for loss in ("info_nce_symmetric", "sup_con")
            for dtype in LIMITS
        ),
        *(Case("queries", weighted=way != "sum", options={"reduction": way}) for way in ("mean", "sum", "none")),
        *(Case(f"pauc_queries{form}", weighted=form == "", masked=True) for form in ("", "_dro")),
        *(
            Case("retrieval", is_split=is_split, options={"reduction": way})
            for is_split in (False, True)
            for way in ("mean", "sum", "none")
        ),
        Case("retrieval", "float32", is_split=True),
        Case("ndcg", one_query=True),
        *(Case(loss, queue_size=size) for loss in ("info_nce", "sup_con") for size in (0, 50)),
    ],
    ids=str,
)
def test_gradient_equals_one_process_in_every_form(pool: WorkerPool, case: Case) -> None:
    assert_exact(pool, case)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=[] if loss in FEW else FIRST_SLOW[not FORMS[loss].is_first]) for loss in MODULES],
)
def test_loss_inside_the_wrapped_module(loss: str) -> None:
    assert_exact(get_pool(2), Case(loss, loss_inside=True))
    if loss in SHARDED:
        form = "moments" if loss == "smooth_ap" else "sums"
        assert_exact(get_pool(2), Case(loss, sharded=True, form=form, loss_inside=True))


def detached(tensor: Tensor) -> Tensor:
    """Gather without gradient and put this rank's rows back: what is widely done, and wrong by 1 / W under DDP."""
    parts = gathered(tensor.detach())
    parts[dist.get_rank()] = tensor
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [("gather_rows", "float64"), ("gather_rows", "float32"), ("detached", "float64"), ("scaled", "float64")],
)
@on_ranks()
def test_parameter_after_the_gather(rank: int, way: str, dtype: str) -> None:
    """An encoder, and a learned scale that acts on the gathered rows.

    The controls: a detached gather gives 1 / W of the encoder's gradient, and a loss that is multiplied by W to make up
    for it gives W times that of the scale.
    """
    # Of the first steps, some have a gradient of the scale that cancels to float32 noise.
    step, size, gradients = gradient_cases.make_step(Case("smooth_ap", dtype=dtype), 4), dist.get_world_size(), []
    own = part_of(step, split(len(step.features), size, 0), rank)
    for is_spread, rows in ((False, step), (True, own)):
        model = Model(dtype, 1)
        model.scale = torch.nn.Parameter(torch.full((), 1.3, dtype=rows.features.dtype))
        wrapped = wrap(model, "ddp" if is_spread else "plain")
        logits, targets = wrapped(rows.features), rows.targets
        if is_spread and way == "gather_rows":
            logits, targets = fullrank.gather_rows(logits, targets)
        elif is_spread:
            logits, targets = detached(logits), detached(targets)
        loss = fullrank.SmoothAPLoss(1, temperature=0.2, gather_distributed=False)(logits * model.scale, targets)
        (loss * (size if is_spread and way == "scaled" else 1)).backward()
        gradients.append((gradient([p for p in model.parameters() if p is not model.scale]), model.scale.grad[None]))
    (whole, of_scale), (found, scale_found) = gradients
    assert (error(found, whole) <= LIMITS[dtype]) == (way != "detached")
    assert (error(scale_found, of_scale) <= LIMITS[dtype]) == (way != "scaled")
    if way == "detached":
        assert float(found @ whole / whole.norm() ** 2) == pytest.approx(1 / size, abs=1e-12)
    if way == "scaled":
        assert float(scale_found / of_scale) == pytest.approx(size, rel=1e-12)


# Inside of the others a loss shows what it shows inside of FSDP2, of which they are forms; and a further form of a loss
# what its first one does.
OTHERS: list[Any] = [
    pytest.param(world_size, wrapper, inside, MODULES, marks=pytest.mark.full)
    for world_size, wrapper in ((2, "fsdp2"), (2, "replicate"), (2, "summed"), (4, "hsdp"))
    for inside in (False, True)
]
OTHERS += [
    pytest.param(2, "fsdp2", True, [name for name in MODULES if FORMS[name].is_first], marks=pytest.mark.slow),
    pytest.param(4, "hsdp", False, ["smooth_ap", "cross_entropy"], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "wrapper", "inside", "losses"), OTHERS)
def test_every_loss_under_every_other_wrapper(world_size: int, wrapper: str, inside: bool, losses: list[str]) -> None:
    """As they come, and ``summed`` after ``sum_gradients_``."""
    reduction = "sum" if wrapper == "summed" else "mean"
    common = {"wrapper": wrapper, "loss_inside": inside, "gradient_reduction": reduction}
    sharded = Case("smooth_ap", sharded=True, form="moments", **common)
    assert_exact(get_pool(world_size), *(Case(loss, **common) for loss in losses), sharded)


def windows(wrapper: str, sync: str = "last", dtype: str = "float64", losses: Any = slice(None)) -> list[Case]:
    """Return the losses over windows of ``pooled_backward``, every other one with weights."""
    common = {"dtype": dtype, "wrapper": wrapper, "sync": sync}
    common["gradient_reduction"] = "sum" if wrapper in ("plain", "summed") else "mean"
    of_window = (*OF_POOL, *BALANCED)  # balanced weights count the rows of the window
    cases = [Case(loss, weighted=index % 2 == 1, **common) for index, loss in enumerate(of_window)][losses]
    return [*cases, Case("smooth_ap", sharded=True, form="moments", **common)]


EVEN, ODD = slice(0, None, 4), slice(1, None, 4)
WINDOWS: list[Any] = [pytest.param(2, windows("ddp"), id="ddp")]
WINDOWS += [
    pytest.param(2, windows(*window, losses=losses), id="-".join(window), marks=pytest.mark.slow)
    for losses, *window in ((EVEN, "fsdp2"), (ODD, "summed"), (ODD, "plain"), (ODD, "ddp", "last", "float32"))
]
WINDOWS += [
    pytest.param(world_size, windows(*window), id="-".join([str(world_size), *window]), marks=pytest.mark.full)
    for world_size, *window in (
        *((3, kind) for kind in ("plain", "ddp", "fsdp2", "summed")),
        *((3, "ddp", "each"), (2, "fsdp2", "each")),
        *((4, "hsdp", sync) for sync in ("last", "each", "shard")),
    )
]


@pytest.mark.parametrize(("world_size", "cases"), WINDOWS)
def test_windows_of_micro_batches(world_size: int, cases: list[Case]) -> None:
    """Uneven rows, ranks without any, uneven numbers of micro-batches, a queue that fills over the steps."""
    assert_exact(get_pool(world_size), *cases)


@on_ranks()
def test_weights_balanced_in_each_micro_batch_are_not_those_of_the_window(rank: int) -> None:
    """The control of the windows above: the mean of the losses of micro-batches with weights of their own."""

    def one_by_one(model: nn.Module, batches: list[Rows], *, loss: Any, forward: Any, **options: Any) -> Tensor:
        total = torch.stack([loss(forward(batch), [batch]) for batch in batches]).mean()
        total.backward()
        return total.detach()

    for name in BALANCED:
        case = Case(name, sync="each")  # as many micro-batches on each rank
        assert max(gradient_cases.worst_error(rank, dist.get_world_size(), case)) <= LIMITS["float64"]
        with mock.patch.object(fullrank, "pooled_backward", one_by_one):
            assert min(gradient_cases.worst_error(rank, dist.get_world_size(), case)) > 1e-3


# Of a sharded pool: in every form that a loss has, with rows of every kind.
ROWS_OF: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weighted": True, "layout": "last"},
    "weighted positives": {"weighted": True, "options": {"weighting": "positives"}},
    "masked": {"masked": True, "layout": "last at first"},
    "classes": {"num_classes": 4},
    "elements": {"num_classes": 3, "weighted": True, "options": {"reduction": "none"}},
    "multi_hot": {"num_classes": 3, "multi_hot": True, "weighted": True},
    "sum": {"num_classes": 2, "multi_hot": True, "layout": "last", "options": {"reduction": "sum"}},
    "automatic": {"num_classes": 2, "options": {"temperature": None}},
}
IN_FLOAT32 = ("plain", "multi_hot", "automatic")
LINEAR, DETACHED = {"options": {"quantile_interpolation": "linear"}}, {"options": {"threshold_gradient": False}}
AT_THRESHOLDS: list[dict[str, Any]] = [LINEAR, {**LINEAR, "num_classes": 2}, DETACHED]
BANDS: list[dict[str, Any]] = [
    {"options": {"budget_basis": "population", "n_knots": 4}, "num_classes": 3, "masked": True},
    {"options": {"pos_numerator": "live", "tau_scale": "band"}, "weighted": True},
]


def sharded(loss: str, form: str) -> list[Case]:
    """Return every kind of rows in float64, and a few in float32."""
    ways = {way: rows for way, rows in ROWS_OF.items() if way != "automatic" or FORMS[loss].loss.is_automatic}
    cases = [Case(loss, sharded=True, form=form, **rows) for rows in ways.values()]
    cases += [Case(loss, "float32", sharded=True, form=form, **ways[way]) for way in IN_FLOAT32 if way in ways]
    kinds = [*(AT_THRESHOLDS if form == "sums" else []), *(BANDS if loss == "pauc_trapezoid" else [])]
    return cases + [Case(loss, sharded=True, form=form, **kind) for kind in kinds]


PARTS = [Case(loss, dtype, sharded=True, form="moments") for loss in ("warm_up", "combined") for dtype in LIMITS]
UNFORCED = [Case(loss, dtype, sharded=True, masked=True, weighted=True) for loss in SHARDED for dtype in LIMITS]
OF_A_SHARDED_POOL = [pytest.param(2, sharded("smooth_ap", "moments"), id="moments")]
OF_A_SHARDED_POOL += [
    pytest.param(world_size, cases, id=f"{world_size}-{cases[0].loss}-{cases[0].form}", marks=mark)
    for world_size, mark in ((2, pytest.mark.slow), (3, pytest.mark.full))
    for cases in (
        *(sharded("smooth_ap", form) for form in ("positives", "gather", "moments")[:world_size]),
        *(sharded(loss, "sums") for loss in ("recall", "pauc_trapezoid")),
        PARTS,
        UNFORCED,
    )
]


@pytest.mark.parametrize(("world_size", "cases"), OF_A_SHARDED_POOL)
def test_a_sharded_pool(world_size: int, cases: list[Case]) -> None:
    assert_exact(get_pool(world_size), *cases)


def random_case(seed: int, is_sharded: bool) -> Case:
    """Return a loss over a pool at random; a sharded one has no queue."""
    draw = random.Random(seed)
    loss = draw.choice(["smooth_ap", "smooth_ap", "recall", "pauc_trapezoid"] if is_sharded else OF_POOL)
    options = {"reduction": draw.choice(["mean", "sum", "none"])}
    if is_sharded:
        # At smaller ones a gradient may be so small that float32 rounds it by more, in one process too.
        options["temperature"] = draw.choice([0.3, 2.0, None if FORMS[loss].loss.is_automatic else 0.3])
    else:
        options |= {"queue_keep": draw.choice(["all", "negatives"]), "max_pool_size": draw.choice([None, None, 12])}
    return Case(
        loss,
        draw.choice([*LIMITS]) if is_sharded else "float64",
        sharded=is_sharded,
        form=draw.choice(["moments", "positives", "gather", ""]) if loss == "smooth_ap" else "sums",
        layout=draw.choice(["uneven", "last", "last at first"]),
        num_classes=draw.choice([1, 2, 3, 5]),
        queue_size=draw.choice([0, 1, 2, 7, 40]),
        weighted=draw.random() < 0.5,
        masked=draw.random() < 0.4,
        multi_hot=draw.random() < 0.4,
        tied=not is_sharded and draw.random() < 0.5,
        seed=100 if is_sharded else 1000 * seed,
        options=options,
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*drawn down")
@pytest.mark.parametrize(("world_size", "is_sharded"), [(2, False), (4, True)], ids=["gathered", "sharded"])
def test_pools_at_random(world_size: int, is_sharded: bool) -> None:
    """Uneven and empty shards, with rows that are ignored."""
    cases = [random_case(seed, is_sharded) for seed in range(50)]
    for of_rank in get_pool(world_size)(gradient_cases.worst_errors, world_size, cases):
        for case, errors in zip(cases, of_rank, strict=True):
            # The rounding of a step moves the parameters of the next, at some scales tenfold.
            assert max(errors) <= (LIMITS[case.dtype] if is_sharded else 1e-11), case


@pytest.mark.parametrize(
    ("what", "loss", "form"),
    [
        ("table", "smooth_ap", "moments"),
        pytest.param("ranges", "smooth_ap", "moments", marks=pytest.mark.slow),
        pytest.param("table", "recall", "sums", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_control_what_one_rank_knows_is_not_enough(rank: int, what: str, loss: str, form: str) -> None:
    if what == "table":  # that of one rank, and so its thresholds
        patched: Any = mock.patch.object(Exchange, "sum", lambda self, tensor, named: tensor)
    else:  # bins that begin where this rank's rows do
        original = smooth_ap.cover

        def shifted(*arguments: Any) -> Any:
            bins = original(*arguments)
            return bins._replace(first=bins.first - rank, window=bins.window + 1)

        patched = mock.patch.object(smooth_ap, "cover", shifted)
    with patched, mock.patch.object(gradient_cases, "same"):
        assert gradient_cases.worst_error(rank, 2, Case(loss, sharded=True, form=form))[0] > 1e-3


@pytest.mark.filterwarnings("ignore:.*drawn down")
@pytest.mark.parametrize("wrapped", [False, True], ids=["loss", "wrapper"])
@on_ranks(2)
def test_rank_zero_may_validate_alone(rank: int, wrapped: bool) -> None:
    main = fullrank.SmoothAPLoss(num_classes=2, queue_size=8, temperature=0.5, max_pool_size=6)
    warmup = fullrank.CrossEntropyLoss()
    blend = fullrank.LossWarmupWrapper(warmup, main, warmup_steps=0, blend_steps=9)  # both losses communicate
    loss: Any = blend if wrapped else main
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        if wrapped:
            loss.on_train_batch_start(step)
        value = loss(torch.randn(6, 2, generator=generator), torch.randint(0, 2, (6,), generator=generator))
        values = fullrank.all_gather_no_grad(value[None])
        assert values[0] == values[1]
        if rank == 0:
            loss.eval().gather_distributed = False
            loss(torch.randn(9, 2), torch.randint(0, 2, (9,)))
            loss.train().gather_distributed = None


@pytest.mark.parametrize("loss", ["smooth_ap", "softmax_focal", "info_nce", "sup_con"])
def test_control_wrong_gradient_reduction_is_off(loss: str) -> None:
    """Under DDP, which averages, the scale of a SUM gives 1 / W of the gradient."""
    for of_gradient, value in get_pool(2)(gradient_cases.worst_error, 2, Case(loss, gradient_reduction="sum")):
        assert of_gradient > 0.4
        assert value > 1e-6  # the second step starts from other parameters


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "combined")) for n, loss in LOSSES.items() if loss.module],
)
def test_no_row_on_any_rank(pool: WorkerPool, name: str) -> None:
    """In the second step; tests/losses/test_every_loss.py has the value and the gradient of one process."""
    forms = [form for form in MODULES if FORMS[form].loss.name == name]
    cases = [Case(form, weighted=FORMS[form].loss.takes("sample_weight")) for form in forms]
    cases += [case for case in IN_WAYS if case.loss in forms and case.loss in FEW]
    cases += [
        Case(form, sharded=True, form="moments" if form == "smooth_ap" else "sums", num_classes=number)
        for form in SHARDED
        for number in (1, 3)
        if form in forms
    ]
    assert_exact(pool, *(case._replace(has_gap=True) for case in cases))
