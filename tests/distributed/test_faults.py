"""What one rank does wrong is raised on every rank, by name, and the next step is as if it had never happened."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from fault_calls import CALLS, Call
from faults import Arguments, Fault
from loss_cases import LOSSES, normal
from on_ranks import common_error, on_ranks, same, slow_but
from subjects import LIMITS
from subjects import error as error_to
from torch import Tensor
from torch.utils._pytree import tree_leaves
from workers import class_of, error_of, process_context

import fullrank
from fullrank.distributed import exchange, header
from fullrank.losses.embeddings import pairs, retrieval, retrieval_queries, sup_con
from fullrank.metrics import RecallAtQuantile


@functools.cache
def after_no_step(name: str, rank: int, world_size: int) -> list[bytes]:
    """Return the bits of the step after the spoiled one if that has never been."""
    return _after(CALLS[name], rank, (0,))


def spoil(rank: int, name: str, kind: str, fault: Fault, odd_ranks: Sequence[int], head: str) -> None:
    """Spoil the first step and the one after it, on each rank in turn: the others are as without them."""
    call = CALLS[name]
    for odd_rank in odd_ranks:
        subject = call.make()
        for index in (1, 0, 1, 2):
            if index != 1:
                bits = take_step(call, subject, rank, index)
                continue
            arguments, before = _arguments(call, rank, 1), _state(subject)
            arguments |= fault.common(arguments)
            arguments |= fault.change(arguments) if rank == odd_rank else {}
            error, text = common_error(partial(subject, **arguments))
            assert error == fault.kind, (kind, text)
            assert fault.is_said(text), (kind, text)
            assert f"rank {odd_rank}" in text, (kind, text)
            assert text.startswith(tuple(head.format(call=one, rank=odd_rank) for one in call.heads)), (kind, text)
            assert _state(subject) == before, kind
        assert bits == after_no_step(name, rank, dist.get_world_size()), kind


def _with_first_element(call: Call, rank: int, value: float | None, ignore: bool = False) -> tuple[float, list[bytes]]:
    """Return the objective of the second step, whose first element is ``value``, and the bits of the third step."""
    subject = call.make()
    take_step(call, subject, rank, 0)
    arguments = _arguments(call, rank, 1)
    first = next(iter(arguments))
    if value is not None:
        spoiled = arguments[first].detach().clone()
        spoiled.view(-1)[0] = value
        arguments[first] = spoiled.requires_grad_(arguments[first].requires_grad)
    if ignore:
        name = "relevance" if "relevance" in arguments else "targets"
        arguments[name] = arguments[name].index_fill(0, torch.tensor([0]), -100)
    objective = call.objective(subject(**arguments)).item()
    return objective, take_step(call, subject, rank, 2)


def _after(call: Call, rank: int, before: Sequence[int]) -> list[bytes]:
    subject = call.make()
    for index in before:
        take_step(call, subject, rank, index)
    return take_step(call, subject, rank, 2)


def _arguments(call: Call, rank: int, index: int) -> Arguments:
    return call.arguments(torch.Generator().manual_seed(10 * index + rank), rank)


def take_step(call: Call, subject: Any, rank: int, index: int) -> list[bytes]:
    """Take a step; return the bits of the objective, of the gradient and of the state."""
    arguments = _arguments(call, rank, index)
    value = call.objective(subject(**arguments))
    leaf = next(iter(arguments.values()))
    gradient = torch.autograd.grad(value, leaf)[0] if value.requires_grad else torch.zeros(())
    return [value.detach().numpy().tobytes(), gradient.numpy().tobytes(), *_state(subject)]


def _state(subject: Any) -> list[bytes]:
    leaves = tree_leaves(subject.state_dict()) if isinstance(subject, torch.nn.Module) else []
    return [leaf.numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode() for leaf in leaves]


def is_first(call: Call) -> bool:
    return call.form is None or call.form.is_first


ON_EACH_RANK = ("smooth_ap", "global_mean")
# The first call of each kind of loss, and every gather, wrapper and sharded loss that is no way to compute another.
KINDS = {call.form.loss.kind: name for name, call in reversed(CALLS.items()) if call.form}
FIRSTS = {*KINDS.values(), "sup_con", *(name for name, call in CALLS.items() if not call.form and "_by_" not in name)}
BY_NAME = [pytest.param(2, name, marks=[pytest.mark.slow] * (name not in ON_EACH_RANK)) for name in CALLS]
BY_NAME += [pytest.param(3, name, marks=pytest.mark.full) for name in ON_EACH_RANK]


def turns(name: str, kinds: Iterable[Any], among: int = 5) -> Iterator[tuple[Any, Sequence[int]]]:
    """Yield faults of a call and their ranks: losses of a kind share their checks, so one in ``among`` of most."""
    place = [*CALLS].index(name)
    for index, kind in enumerate(kinds):
        if name in FIRSTS or (index + place) % among == 0:
            yield kind, range(dist.get_world_size()) if name in ON_EACH_RANK else ((index + place // among) % 2,)


class Subclass(Tensor):
    pass


@torch.inference_mode()
def _of_inference(x: Tensor) -> Tensor:
    return x.clone()


def _unaligned(x: Tensor) -> Tensor:
    memory = bytearray(x.numel() * x.element_size() + 1)
    return torch.frombuffer(memory, dtype=x.dtype, offset=1, count=x.numel()).view(x.shape).copy_(x)


def _read_only(x: Tensor) -> Tensor:
    array = x.numpy().copy()
    array.setflags(write=False)
    return torch.from_numpy(array)


# How the memory of the numbers of a rank may be, and what it holds.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda x: torch._neg_view(-x),
    "imaginary part of a conjugate": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "expanded": lambda x: x[:1].expand(x.shape) if x.ndim else x,
    "unaligned": _unaligned,
    "read-only": _read_only,
    "of inference": _of_inference,
    "a subclass": lambda x: x.as_subclass(Subclass),
    "complex": lambda x: x.to(torch.complex128),
}


def _of_layout(
    call: Call, rank: int, change: Callable[[Tensor], Tensor], settings: Arguments, has_grad: bool
) -> list[Any]:
    """Return the bits of two steps, after the rows of the last rank are changed, or the class and text of an error."""
    subject, found = call.make(), list[Any]()
    vars(subject).update(settings)
    for index in range(2):
        arguments = _arguments(call, rank, index)
        numbers = [name for name, x in arguments.items() if isinstance(x, Tensor) and x.is_floating_point()]
        for name in numbers:
            own = arguments[name].detach()
            changed = change(own) if rank == dist.get_world_size() - 1 else own
            arguments[name] = changed.requires_grad_() if has_grad else changed
        try:
            value = call.objective(subject(**arguments))
        except (ValueError, TypeError, RuntimeError) as raised:
            return [class_of(raised), str(raised)]
        found.append(value.detach().numpy().tobytes())
        if has_grad and value.requires_grad:
            leaves = [arguments[name] for name in numbers]
            gradients = torch.autograd.grad(value, leaves, allow_unused=True)
            found += [None if gradient is None else gradient.numpy().tobytes() for gradient in gradients]
        found += _state(subject)
    return found


LAID_OUT = ("smooth_ap", "info_nce")  # in the fast tests


@pytest.mark.parametrize("name", slow_but(LAID_OUT, [name for name, call in CALLS.items() if is_first(call)]))
@on_ranks()
def test_any_layout_of_the_rows_of_one_rank(rank: int, name: str) -> None:
    """In both steps the bits are those of a plain copy, or all ranks raise the same."""
    call = CALLS[name]
    subject = call.make()
    all_settings = [{}, {"normalize": False}, {"gather_distributed": False}]  # the last is of one process
    for (layout, _), settings in itertools.product(turns(name, LAYOUTS, among=2), all_settings):
        if all(hasattr(subject, key) for key in settings):
            change = LAYOUTS[layout]
            plain = lambda x, change=change: torch.empty(x.shape, dtype=change(x).dtype).copy_(change(x))  # noqa: E731
            has_grad = layout not in ("of inference", "complex")
            found, right = (_of_layout(call, rank, way, settings, has_grad) for way in (change, plain))
            assert found == right, (layout, settings)
            if layout == "complex" and (not settings or rank == dist.get_world_size() - 1):
                assert found[0] in ("ValueError", "TypeError")
                assert settings or same(found)


def _pairs(x: Tensor, y: Tensor) -> Arguments:
    return {"queries": x, "keys": x.roll(1, 1)}


# Losses that make a collective after each rank has computed its part, and their arguments for rows and labels.
BY_PARTS: dict[str, tuple[Callable[..., Any], Callable[[Tensor, Tensor], Arguments]]] = {
    "InfoNCE": (partial(fullrank.InfoNCELoss, queue_size=16), _pairs),
    "CLIP": (
        partial(fullrank.InfoNCELoss, symmetric=True, learn_temperature=True),
        lambda x, y: {**_pairs(x, y), "negatives": 2 * x[:2]},
    ),
    "SigLIP": (fullrank.SigLIPLoss, lambda x, y: {**_pairs(x, y), "sample_weight": y + 1}),
    "SupCon": (partial(fullrank.SupConLoss, queue_size=16), lambda x, y: {"embeddings": x, "labels": y}),
    "SupCon, reference": (
        fullrank.SupConLoss,
        lambda x, y: {"embeddings": x, "labels": y, "reference": x.roll(1, 1)[1:], "reference_labels": y[1:]},
    ),
    "retrieval": (
        partial(fullrank.RetrievalSmoothAPLoss, temperature=0.1, queue_size=16),
        lambda x, y: {"embeddings": x, "labels": y, "sample_weight": y + 1},
    ),
}
# What computes the part of a rank: its module, and its name there.
KERNELS = {
    **dict.fromkeys(("InfoNCE", "CLIP", "SigLIP"), (pairs, "sum_of_blocks")),
    "SupCon": (sup_con, "sum_of_blocks"),
    "retrieval": (retrieval_queries, "_sums_of_queries"),
}


@pytest.mark.parametrize("name", slow_but(["InfoNCE"], BY_PARTS))
@on_ranks()
@mock.patch.object(retrieval, "FEWEST_SPLIT", 0)
def test_a_kernel_that_fails_on_one_rank_raises_on_all(rank: int, name: str) -> None:
    """In the first and in the second step, with rows or without on that rank. The other steps are as in one process."""
    (make, arguments), size = BY_PARTS[name], dist.get_world_size()
    module, kernel = KERNELS[name.partition(",")[0]]
    for odd_rank, empty, failing in itertools.product(range(size), range(size), range(2)):
        group = dist.new_group()
        loss, alone = make(group=group).double(), make(gather_distributed=False).double()
        counts = [0 if other == empty else 4 + other for other in range(size)]
        for step in range(3):
            parts = normal(sum(counts), 3, seed=step).split(counts)
            of_ranks = [(part.requires_grad_(), torch.arange(len(part)) % 2) for part in map(Tensor.clone, parts)]
            call = partial(loss, **arguments(*of_ranks[rank]))
            if step == failing:
                lacks_memory = mock.patch.object(module, kernel, side_effect=torch.OutOfMemoryError("no memory"))
                with lacks_memory if rank == odd_rank else nullcontext():
                    before, (error, text) = _state(loss), common_error(call)
                assert error == "RuntimeError"
                assert text == f"{type(loss).__name__} failed on rank {odd_rank}: OutOfMemoryError: no memory"
                assert _state(loss) == before
                continue
            pieces = [arguments(*rows) for rows in of_ranks]
            value, expected = call(), alone(**{key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]})
            own = of_ranks[rank][0]
            (found,), (right,) = torch.autograd.grad(value, own), torch.autograd.grad(expected, own)
            assert error_to(value.detach(), expected.detach()) <= LIMITS["float64"]
            assert error_to(found, size * right) <= LIMITS["float64"]
        dist.destroy_process_group(group)


LIMIT_S = 60  # no process may live longer; the timeouts of the groups are a fraction of it
DOOMED = 1  # the rank that dies or falls silent


class Fate(NamedTuple):
    """How a process ended: its exit code, and if it reported an error, its class, text and traceback."""

    exit_code: int | None
    error: str = ""
    text: str = ""
    trace: str = ""


def run_group(world_size: int, timeout_s: float, scenario: Callable[..., None], *arguments: Any) -> list[Fate]:
    """Run ``scenario(rank, *arguments)`` in new processes of one gloo group, of which all but one report an error."""
    context = process_context()
    with tempfile.TemporaryDirectory(prefix="fullrank-") as folder:
        reports, is_over = context.Queue(), context.Event()
        common = (world_size, timeout_s, folder, scenario, arguments, reports, is_over)
        processes = [context.Process(target=_live, args=(rank, *common), daemon=True) for rank in range(world_size)]
        for process in processes:
            process.start()
        try:
            texts = dict(reports.get(timeout=LIMIT_S) for _ in range(world_size - 1))
            is_over.set()
            for process in processes:
                process.join(LIMIT_S)
        finally:
            for process in processes:
                process.kill()
        return [Fate(process.exitcode, *texts.get(rank, ())) for rank, process in enumerate(processes)]


def _live(
    rank: int,
    world_size: int,
    timeout_s: float,
    folder: str,
    scenario: Callable[..., None],
    arguments: Any,
    reports: Any,
    is_over: Any,
) -> None:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        scenario(rank, *arguments)
    except Exception as error:
        reports.put((rank, (class_of(error), str(error), traceback.format_exc())))
    if scenario in SILENT and rank == DOOMED:
        is_over.wait()
    reports.close()
    reports.join_thread()
    os._exit(0)  # the group is broken: nothing can be torn down in order


TWO_LOSSES = ("wrapper_in_blend",)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_collective(number: int, *names: str) -> None:
    """Let this process die where it would enter the ``number``-th collective of these names from now on."""
    entered = 0

    def deadly(original: Callable[..., None]) -> Callable[..., None]:
        def collective(*arguments: Any, **options: Any) -> None:
            nonlocal entered
            entered += 1
            if entered == number:
                _die()
            original(*arguments, **options)

        return collective

    for name in names:
        setattr(exchange, name, deadly(getattr(exchange, name)))


def killed_in_forward(rank: int, name: str, number: int) -> None:
    """In front of the ``number``-th collective of the second step, or of the first where rows have one of their own."""
    call = CALLS[name]
    subject = call.make()
    if number == 1 or name in TWO_LOSSES or (name, number) in REDUCED:
        take_step(call, subject, rank, 0)
    if rank == DOOMED:
        _die_in_collective(number, "all_gather_flat", "all_reduce_flat")
    take_step(call, subject, rank, 1)


def killed_in_reduce_scatter(rank: int) -> None:
    rows = torch.ones(3, 2, requires_grad=True)
    gathered = fullrank.all_gather_with_grad(rows, backward="reduce_scatter")
    if rank == DOOMED:
        _die_in_collective(1, "reduce_scatter_flat")
    gathered.sum().backward()


def killed_among_reasons(rank: int) -> None:
    """Rank 0 has bad input, and another dies before the reasons are exchanged."""
    loss = fullrank.SmoothAPLoss(num_classes=1, temperature=0.3)
    if rank == DOOMED:
        dist.all_gather_object = lambda *arguments, **options: _die()
    loss(torch.randn(4, 1), torch.tensor([0, 1, 0, 1])[: 3 if rank == 0 else 4])


def fewer_steps(rank: int) -> None:
    loss = fullrank.SmoothAPLoss(num_classes=1, temperature=0.3)
    for _ in range(1 if rank == DOOMED else 2):
        loss(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]))


def fewer_steps_then_gone(rank: int) -> None:
    fewer_steps(rank)


def validates_alone(rank: int) -> None:
    """All ranks but one validate; with ``sync_on_compute=False`` they would not wait for it."""
    metric = RecallAtQuantile(num_classes=1, quantile=0.3)
    metric.update(torch.randn(4, 1), torch.tensor([0, 1, 0, 1]))
    if rank != DOOMED:
        metric.compute()


SILENT = (fewer_steps, validates_alone)  # here the rank that does nothing stays alive until the others have ended


@pytest.mark.parametrize(("world_size", "name"), BY_NAME)
@on_ranks(...)
def test_bad_input_on_one_rank_raises_on_all(rank: int, name: str) -> None:
    for kind, odd_ranks in turns(name, CALLS[name].bad):
        spoil(rank, name, kind, CALLS[name].bad[kind], odd_ranks, "{call} failed on rank {rank}: ")


@pytest.mark.parametrize(("world_size", "name"), BY_NAME)
@on_ranks(...)
def test_input_that_differs_on_one_rank_raises_on_all(rank: int, name: str) -> None:
    for kind, odd_ranks in turns(name, CALLS[name].differ):
        spoil(rank, name, kind, CALLS[name].differ[kind], odd_ranks, "{call}: expected the same on every rank, got ")


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.keeps_rows])
@on_ranks(2)
def test_control_a_step_that_did_happen_shows_in_the_next(rank: int, name: str) -> None:
    assert _after(CALLS[name], rank, (0, 1)) != _after(CALLS[name], rank, (0,))


def test_every_loss_and_gather_is_in_the_registry() -> None:
    names = {call.public for call in CALLS.values()}
    public = {name: getattr(fullrank, name) for name in fullrank.__all__}
    modules = {"fullrank.distributed.gather", "fullrank.distributed.global_mean"}
    gathers = {name for name, value in public.items() if getattr(value, "__module__", "") in modules}
    assert {"gather_rows", "global_mean"} <= gathers
    losses = {loss.module.__name__ for loss in LOSSES.values() if loss.module is not None}
    assert names == gathers | losses | {"ShardedLoss"}


@pytest.mark.parametrize(("world_size", "name"), BY_NAME)
@on_ranks(...)
def test_a_value_that_is_not_finite_on_one_rank(rank: int, name: str) -> None:
    """No error, NaN on every rank; the third step is as if the row was ignored. The control: a finite value."""
    call, values = CALLS[name], (math.nan, math.inf, -math.inf)
    has_logits = "logits" in _arguments(call, rank, 0)
    for turn, value in enumerate(values):
        for odd_rank in range(dist.get_world_size()) if name in ON_EACH_RANK else (turn % 2,):
            given = value if rank == odd_rank else None
            objective, bits = _with_first_element(call, rank, given)
            if has_logits:
                assert bits == _with_first_element(call, rank, given, ignore=rank == odd_rank)[1], value
            else:
                assert bits == after_no_step(name, rank, dist.get_world_size()), value
            if has_logits and call.keeps_rows:
                assert bits != _with_first_element(call, rank, 0.5 if rank == odd_rank else None)[1], value
            assert math.isnan(same(objective)) or not math.isnan(value)


TIMEOUT_S = 20  # far more than it takes to see that a connection is lost, and less than the limit of a process
SHORT_S = 2  # where the timeout itself is what ends the others

# Each call, and its collectives in the forward: what is a sum over elements travels with the header.
SUMS = [name for name, call in CALLS.items() if call.form and call.form.loss.kind in ("classes", "elements")]
FORWARD = [(name, 1) for name, call in CALLS.items() if is_first(call) and "_by_" not in name]
FORWARD += [
    (name, 2)
    for name, call in CALLS.items()
    if is_first(call) and name not in (*SUMS, "global_mean", "wrapper_in_warmup")
]
FORWARD += [("smooth_ap_by_moments", 3), ("smooth_ap_by_positives", 5), ("recall_by_sums", 7)]
# What is reduced in a collective after the header; elsewhere rows are gathered.
REDUCED = {("smooth_ap_by_moments", 2): "ranges", ("smooth_ap_by_positives", 2): "ranges"}
REDUCED |= {("smooth_ap_by_moments", 3): "moments", ("smooth_ap_by_positives", 5): "gradients of the positives"}
REDUCED |= {("smooth_ap_sharded", 2): "ranges", ("recall_by_sums", 2): "counts", ("recall_by_sums", 7): "counts"}
REDUCED |= {("pauc_trapezoid_by_sums", 2): "counts"}


def assert_named(fates: list[Fate], *texts: str) -> None:
    """All but the doomed rank have ended by themselves, with a RuntimeError that has these texts."""
    for rank, fate in enumerate(fates):
        if rank != DOOMED:
            assert fate.exit_code == 0, fate
            assert fate.error == "RuntimeError", fate
            assert all(text in fate.text for text in texts), fate.text


def deaths() -> list[Any]:
    """Return every call with each of its collectives; one of each kind of collective is not left to ``make full``."""
    kinds = {REDUCED.get(case, "rows" if case[1] > 1 else "headers"): case for case in FORWARD}
    return [
        pytest.param(*case, marks=pytest.mark.slow if case in kinds.values() else pytest.mark.full) for case in FORWARD
    ]


@pytest.mark.parametrize(("name", "number"), deaths())
def test_a_rank_killed_in_forward(name: str, number: int) -> None:
    """The middle one of three, so that both a lower and a higher rank are left."""
    fates = run_group(3, TIMEOUT_S, killed_in_forward, name, number)
    assert fates[DOOMED].exit_code == -signal.SIGKILL
    # With two losses the second collective is the header of the second one: the first has one.
    is_header = number == 1 or name in TWO_LOSSES
    what = f"the all-gather of the {'headers' if is_header else 'rows'}"
    if (name, number) in REDUCED:
        what = f"the all-reduce of the {REDUCED[name, number]}"
    assert_named(fates, what, "Another rank has probably died")
    assert [fate.text for fate in fates if fate.error and not fate.text.startswith(CALLS[name].heads)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "exit_code", "text"),
    [
        (
            killed_in_reduce_scatter,
            -signal.SIGKILL,
            "all_gather_with_grad: the reduce-scatter of the gradients, in the backward, failed.",
        ),
        (killed_among_reasons, -signal.SIGKILL, "SmoothAPLoss: the exchange of what went wrong failed."),
        (
            fewer_steps,
            0,
            "use fullrank.data.until_all_end. A rank that works alone, such as in validation, sets gather_",
        ),
        (fewer_steps_then_gone, 0, "SmoothAPLoss: the all-gather of the headers failed."),
        (
            validates_alone,
            0,
            "sets gather_distributed=False on its losses. It makes its metrics with sync_on_compute=Fa",
        ),
    ],
)
def test_a_rank_that_is_killed_elsewhere_or_falls_silent(scenario: Any, exit_code: int, text: str) -> None:
    fates = run_group(3, SHORT_S if scenario in SILENT else TIMEOUT_S, scenario)
    assert fates[DOOMED].exit_code == exit_code
    assert_named(fates, text)
    if scenario is killed_among_reasons:
        assert "targets: expected shape (4,)" in fates[0].trace  # its own error is the cause


# Transforms of torch around a call: all ranks raise one sentence, whichever of them is inside one

# A gather of every kind, and the first loss of every kind.
NAMES = ["gather_rows", "all_gather_with_grad_reduce_scatter", "global_mean", "global_sum", *KINDS.values()]


def dual(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda call, x: torch.func.grad(call)(x),
    "grad of grad": lambda call, x: torch.func.grad(lambda y: torch.func.grad(call)(y).sum())(x),
    "vmap": lambda call, x: torch.vmap(call)(torch.stack([x, x])),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
    "dual tensors": dual,
}


def call_of(name: str, subject: Any, rank: int, step: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    given = _arguments(CALLS[name], rank, step)
    first, rows = next(iter(given.items()))
    return lambda x: CALLS[name].objective(subject(**given | {first: x})), rows.detach()


def plain(call: Callable[[Tensor], Tensor], x: Tensor) -> list[float]:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(call(leaf), leaf)[0].flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("odd", [pytest.param(None, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("transform", TRANSFORMS)
@on_ranks(2)
def test_a_transform_raises_one_sentence_on_every_rank(rank: int, transform: str, odd: int | None) -> None:
    """On rank ``odd``, or on every rank, before and after a clean step, which has the gradients without transforms."""
    where = "ranks 0, 1" if odd is None else f"rank {odd}"
    for name in NAMES:
        subject, clean = CALLS[name].make(), CALLS[name].make()
        head = f"{CALLS[name].heads[0]} failed on {where}: differentiation: expected backward() or torch.autograd.grad"
        for step in range(2):
            call, rows = call_of(name, subject, rank, step)
            run = TRANSFORMS[transform] if odd in (None, rank) else plain
            kind, text = common_error(partial(run, call, rows))
            assert kind == "RuntimeError", (name, step)
            assert text.startswith(head), (name, step, text)
            assert text.endswith(("as with gather_distributed=False.", "has a first derivative alone."))
            assert plain(call, rows) == plain(call_of(name, clean, rank, step)[0], rows)


@on_ranks(2)
def test_control_without_the_check_torch_raises(rank: int) -> None:
    call, rows = call_of("gather_rows", CALLS["gather_rows"].make(), rank, 0)
    unseen = dict.fromkeys(("func_transforms_are_active", "has_tangent"), lambda *_: False)
    with mock.patch.multiple(header, **unseen):
        for name in ("grad", "grad of grad", "vmap", "jvp"):
            text = error_of(lambda name=name: TRANSFORMS[name](call, rows))[1]
            assert text
            assert "differentiation: expected" not in text


@pytest.mark.slow
@on_ranks(2)
def test_compiled_losses_over_ranks_are_eager_ones(rank: int) -> None:
    """Also the third module of a class, whose attributes the compiler no longer takes for constants."""
    generator = torch.Generator().manual_seed(rank)
    for make in (
        fullrank.CrossEntropyLoss,
        partial(fullrank.CrossEntropyLoss, weight="balanced"),
        fullrank.SoftmaxFocalLoss,
        partial(fullrank.SmoothAPLoss, 3, temperature=0.5),
    ):
        for extra in range(4):
            compiled = torch.compile(make(), backend="aot_eager")
            for rows in (5 + rank + extra, 6 + rank + extra):
                inputs, targets = torch.randn(rows, 3, dtype=torch.float64, generator=generator), torch.arange(rows) % 3
                found, expected, alone = (
                    plain(partial(loss, targets=targets), inputs)
                    for loss in (compiled, make(), make(gather_distributed=False))
                )
                assert found == expected
                assert found != alone
