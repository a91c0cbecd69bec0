"""One gradient norm over any mesh: against the full gradient in one process, bit-identical, raised by all or none."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from blindfold import Blindfold
from collective_counter import CollectiveCounter
from meshes import group_of, init_device_mesh
from on_ranks import common_error, on_ranks, slow_but
from subjects import with_gradient
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from workers import WorkerPool

import fullrank
from fullrank.gradients import grad_norm, norm_plan
from fullrank.gradients.parameters import is_elsewhere

MOST = 0.5  # max_norm: below the norm of every case


@functools.cache
def mesh_of(*names: str) -> DeviceMesh:
    shape = (2, 2) if len(names) == 2 else (4,)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Case(NamedTuple):
    """A rank's parameters with their gradients, the gradients that one process would have, and more arguments."""

    parameters: list[tuple[str, Tensor]]
    full: dict[str, Tensor]
    options: Mapping[str, Any] = MappingProxyType({})


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def place(full: Tensor, mesh: DeviceMesh, *placements: Any) -> Tensor:
    """Return a parameter placed like that whose gradient is ``full``, placed likewise."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, placements))
    parameter.grad = distribute_tensor(full, mesh, placements)
    return parameter


def by_hand(rank: int) -> Case:
    """Hand-made DTensors: every placement and every mesh at once, uneven and empty shards, plain parameters between."""
    mesh, dp, tp = mesh_of("dp", "tp"), mesh_of("dp", "tp")["dp"], mesh_of("dp", "tp")["tp"]
    layouts: dict[str, tuple[Any, ...]] = {
        "two_d": ((7, 5), mesh, Shard(0), Shard(1)),
        "plain": ((3, 2), None),
        "same_dim_twice": ((5, 3), mesh, Shard(0), Shard(0)),
        "one_d": ((5, 2), dp, Shard(0)),
        "other_d": ((3, 3), tp, Shard(1)),
        "replicated": ((4,), mesh, Replicate(), Replicate()),
        "half": ((5, 3), mesh, Replicate(), Shard(0)),
        "empty": ((1, 3), mesh, Shard(0), Shard(0)),
        "partial": ((4, 3), tp, Replicate()),
        "partial_avg": ((5,), tp, Replicate()),
        "partial_of_shards": ((6, 3), mesh, Shard(0), Replicate()),
        "sharded_gradient": ((5,), tp, Replicate()),
        "whole_gradient": ((5, 2), dp, Shard(0)),
        "some_ranks": ((4, 2), dp, Shard(0)),
        "scalar": ((), dp, Replicate()),
    }
    full = {name: draw(seed, *layout[0]) for seed, (name, layout) in enumerate(layouts.items())}
    parameters = {
        name: place(full[name], *where) if where[0] else with_gradient(full[name])
        for name, (_, *where) in layouts.items()
    }
    # Two summands on the two ranks of tp whose sum (mean) is the gradient.
    noise = draw(99, 4, 3) if tp.get_local_rank() == 0 else -draw(99, 4, 3)
    parameters["partial"].grad = DTensor.from_local(full["partial"] / 2 + noise, tp, [Partial()])
    parameters["partial_avg"].grad = DTensor.from_local(full["partial_avg"] + noise[0, 0], tp, [Partial("avg")])
    own = full["partial_of_shards"].chunk(2)[dp.get_local_rank()]
    parameters["partial_of_shards"].grad = DTensor.from_local(own / 2 + noise[:3], mesh, [Shard(0), Partial()])
    parameters["sharded_gradient"].grad = distribute_tensor(full["sharded_gradient"], tp, [Shard(0)])
    parameters["whole_gradient"].grad = distribute_tensor(full["whole_gradient"], dp, [Replicate()])
    if dp.get_local_rank() == 1:  # its half of the rows has no gradient
        parameters["some_ranks"].grad = None
    full["some_ranks"][2:] = 0
    unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    return Case([*parameters.items(), ("unused", unused), ("tied", parameters["two_d"])], full)


class Block(nn.Module):
    """An embedding, a norm, two linear layers, a head, and a parameter that belongs to no parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 14)
        self.down = nn.Linear(14, 8)
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.linspace(1, 2, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return self.head(hidden)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)


def model_of(kind: str, rank: int) -> Case:
    """A real model, its gradients from a real backward, and those of one process with the whole batch."""
    torch.manual_seed(0)
    model = Block().double()
    alone = copy.deepcopy(model)
    tokens = torch.arange(32).reshape(8, 4) * 3 % 11
    mesh = mesh_of("dp", "tp")
    if kind != "hsdp":
        tensor_parallel(model, mesh["tp"], sequence=kind == "sequence_fsdp")
    for part in (model.up, model.down, model):  # "scale" is left out
        ignored = {"ignored_params": {model.scale}} if part is model else {}
        fully_shard(part, mesh=mesh if kind == "hsdp" else mesh["dp"], **ignored)
    num_parts, index = (4, rank) if kind == "hsdp" else (2, rank // 2)
    own = tokens.chunk(num_parts)[index]
    # FSDP averages over the parts; `scale` is outside of it and equal on every rank.
    (num_parts * model(own).square().sum() + model.scale.square().sum()).backward()
    (alone(tokens).square().sum() + alone.scale.square().sum()).backward()
    return Case(list(model.named_parameters()), {name: p.grad for name, p in alone.named_parameters()})


def expert_parallel(rank: int, *, sharded: bool) -> Case:
    """Dense parameters under FSDP2 over four ranks, one of two experts on each rank, itself under FSDP2 or copied."""
    mesh, data = mesh_of("edp", "ep"), mesh_of("dp")
    dense = {name: draw(seed, 5, 3) for seed, name in enumerate(("first", "second"))}
    experts = {f"expert{index}": draw(10 + index, 7, 2) for index in range(2)}
    own = f"expert{mesh['ep'].get_local_rank()}"
    expert = place(experts[own], mesh["edp"], Shard(0)) if sharded else with_gradient(experts[own])
    parameters = [("first", place(dense["first"], data, Shard(0))), (own, expert)]
    parameters += [("second", place(dense["second"], data, Shard(0))), ("router", with_gradient(draw(30, 4)))]
    full = {**dense, **experts, "router": draw(30, 4)}
    return Case(parameters, full, {"shard_groups": lambda p: mesh["ep"].get_group() if p is expert else None})


def pipeline(kind: str, rank: int) -> Case:
    """Two stages of unequal size, each over tensor-parallel ranks; "pp_all_listed": every rank knows all parameters."""
    mesh = mesh_of("pp", "tp")
    names = ("stage0.a", "stage0.bb", "stage0.ccc", "stage1.a", "stage1.bb")
    full = {name: draw(seed, 5, 3) for seed, name in enumerate(names)}
    stage = mesh["pp"].get_local_rank()
    if kind == "pp_empty_stage":
        full = {name: value for name, value in full.items() if name.startswith("stage0")}
    parameters = []
    for name, value in full.items():
        if kind == "pp_all_listed":
            place_on = stage_meshes()[int(name[5])]
            parameters.append((name, place(value, place_on, Replicate() if name.endswith("bb") else Shard(0))))
        elif name.startswith(f"stage{stage}"):
            parameters.append(
                (name, with_gradient(value) if name.endswith("bb") else place(value, mesh["tp"], Shard(0)))
            )
    across = mesh["pp"] if kind == "pp" else [mesh["pp"].get_group()]
    return Case(parameters, full, {"across": across})


@functools.cache
def stage_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Return the meshes of the stages, made on every rank."""
    return DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])


def lone(rows: int, rank: int) -> Case:
    """Every placement on a mesh of which one dimension has one rank, and on that dimension alone."""
    mesh = init_device_mesh("cpu", (rows, 4 // rows), mesh_dim_names=("rows", "columns"))
    kinds, of_one = (Shard(0), Shard(1), Replicate()), mesh["rows" if rows == 1 else "columns"]
    layouts: list[Any] = [(mesh, *both) for both in itertools.product(kinds, kinds)] + [
        (of_one, kind) for kind in kinds
    ]
    full = {f"layout{number}": draw(number, 5, 4) for number in range(len(layouts))}
    return Case([(name, place(full[name], *layout)) for name, layout in zip(full, layouts)], full)


MODELS = ("hsdp", "tp_fsdp", "sequence_fsdp")  # FSDP2 alone: tests/conformance/test_equals_one_process.py
CASES: dict[str, Callable[[int], Case]] = {
    "by_hand": by_hand,
    **{kind: functools.partial(model_of, kind) for kind in MODELS},
    "ep": functools.partial(expert_parallel, sharded=False),
    "ep_fsdp": functools.partial(expert_parallel, sharded=True),
    **{kind: functools.partial(pipeline, kind) for kind in ("pp", "pp_empty_stage", "pp_all_listed")},
    "(1, W)": functools.partial(lone, 1),
    "(W, 1)": functools.partial(lone, 4),
}


def flat(case: Case) -> Tensor:
    return torch.cat([value.flatten() for value in case.full.values()])


def bytes_of(case: Case) -> list[bytes]:
    grads = (p.grad for _, p in case.parameters if p.grad is not None)
    locals_ = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads)
    return [local.detach().contiguous().numpy().tobytes() for local in locals_]


POWERS = [1.0, 2.0, 3.0, 0.5, math.inf]
INF_NAN = [math.nan, math.inf, -math.inf]
FAST = ("by_hand", "hsdp", "ep", "pp")


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
@on_ranks(4)
def test_norms_and_clipped_gradients_are_those_of_one_process(rank: int, name: str) -> None:
    """Norms of each p, the same to the last bit on every rank, and what is clipped."""
    case = CASES[name](rank)
    ours = torch.stack([fullrank.total_grad_norm(case.parameters, p, **case.options).double() for p in POWERS])
    expected = torch.stack([torch.linalg.vector_norm(flat(case), p) for p in POWERS])
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0)
    assert torch.equal(fullrank.all_gather_no_grad(ours[None]), ours.expand(4, -1))
    # The gradients of a model are rounded otherwise where they are added over ranks.
    limit, compared = 1e-13 if name in MODELS else 4e-15, 0
    for norm_type in (2.0, math.inf):
        case = CASES[name](rank)
        alone = {key: with_gradient(value) for key, value in case.full.items()}
        torch.nn.utils.clip_grad_norm_(alone.values(), MOST, norm_type)
        fullrank.clip_grad_norm_(case.parameters, MOST, norm_type, **case.options)
        for key, parameter in case.parameters:
            grad = parameter.grad
            if key not in alone or is_elsewhere(parameter):
                continue
            whole = alone[key].grad
            if key == "some_ranks":  # not there on every rank: no collective
                grad, whole = (None if grad is None else grad.to_local()), whole[:2]
            elif isinstance(grad, DTensor):
                grad = grad.full_tensor()
            if grad is not None:
                compared += 1
                assert (grad - whole).norm() <= limit * alone[key].grad.norm(), (key, norm_type)
    assert compared > 0 or name == "pp_empty_stage"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("sequence_fsdp", "is_shard"),
        ("by_hand", "all dimensions"),
        ("hsdp", "all dimensions"),
    ],
)
@on_ranks(4)
def test_other_rules_of_what_is_sharded_are_wrong(rank: int, case: str, rule: str) -> None:
    """Some of them are seen already, because copies then differ."""
    made, right, rounding = CASES[case](rank), norm_plan.is_sharded, grad_norm._ROUNDING
    rules = {"is_shard": lambda placement: placement.is_shard(), "all dimensions": lambda placement: True}
    norm_plan.is_sharded, grad_norm._ROUNDING = rules[rule], math.inf
    try:
        wrong = fullrank.total_grad_norm(made.parameters, **made.options).item()
    finally:
        norm_plan.is_sharded, grad_norm._ROUNDING = right, rounding
    expected = flat(made).norm().item()
    assert fullrank.total_grad_norm(made.parameters, **made.options).item() == pytest.approx(expected, rel=1e-14)
    assert abs(wrong / expected - 1) > 1e-2


@on_ranks(4)
def test_a_plain_maximum_loses_nan(rank: int) -> None:
    own = torch.tensor([math.nan if rank == 1 else float(rank)])
    parameter = with_gradient(own)
    assert fullrank.total_grad_norm([parameter], math.inf, shard_groups=lambda _: dist.group.WORLD).isnan()
    dist.all_reduce(own, dist.ReduceOp.MAX)
    assert own.isfinite()


# Distinct groups, without and with error_if_nonfinite, where replicas meet too to raise together.
NUM_COLLECTIVES = {
    "by_hand": (2, 2),
    "hsdp": (1, 2),
    "ep_fsdp": (3, 3),
    "pp": (2, 2),
    "pp_all_listed": (2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NUM_COLLECTIVES)
@on_ranks(4)
def test_one_collective_per_group(rank: int, case: str) -> None:
    """Also where no rank has a gradient, as with ``error_if_nonfinite`` here."""
    for error_if_nonfinite, expected in zip((False, True), NUM_COLLECTIVES[case]):
        made = CASES[case](rank)
        for _, parameter in made.parameters if error_if_nonfinite else []:
            parameter.grad = None
        with CollectiveCounter() as counter:
            norm = fullrank.total_grad_norm(made.parameters, error_if_nonfinite=error_if_nonfinite, **made.options)
        assert norm == 0 or not error_if_nonfinite
        assert counter.counts == {"_allgather_base_.default": expected}
        assert set(counter.sizes) == {128}


LARGE = {"float16": (1.2e4, math.inf), "bfloat16": (1e25, 3.0), "float32": (1e30, 50.0), "float64": (1e200, 3.0)}


@pytest.mark.parametrize(
    ("dtype", "magnitude", "norm_type"),
    [("bfloat16", 1e-30, 2.0), *((d, m, p) for d, (m, other) in LARGE.items() for p in (2.0, other))],
)
@on_ranks(4)
def test_the_range_of_the_dtype_is_no_limit(rank: int, dtype: str, magnitude: float, norm_type: float) -> None:
    mesh = mesh_of("dp", "tp")
    full = {name: (draw(ord(name), 9, 5) * magnitude).to(getattr(torch, dtype)) for name in "abc"}
    parameters = [
        place(full["a"], mesh, Shard(0), Shard(1)),
        with_gradient(full["b"]),
        place(full["c"], mesh["dp"], Shard(0)),
    ]
    whole = torch.cat([value.flatten().double() for value in full.values()])
    expected = magnitude * torch.linalg.vector_norm(whole / magnitude, norm_type).item()
    norm = fullrank.clip_grad_norm_(parameters, 100.0, norm_type)
    norms = fullrank.all_gather_no_grad(norm[None])
    assert torch.equal(norms, norm.expand(4))
    assert norm.item() == pytest.approx(expected, rel=1e-6 if dtype != "float64" else 1e-13)
    assert norm.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert type(norm) is Tensor
    assert norm.ndim == 0
    # bfloat16 has three digits; float16 cannot hold the smaller of the clipped elements.
    left = fullrank.total_grad_norm(parameters, norm_type)
    assert left.item() == pytest.approx(min(100.0, expected), rel=1e-2)


# Every placement, and the meshes of real wrappers, each with one kind of norm; under `make full` with the others.
POISONED = [("by_hand", 2.0), ("hsdp", 1.0), ("ep_fsdp", math.inf), ("pp", 3.0)]
POISONED += [pytest.param("by_hand", p, marks=pytest.mark.full) for p in (0.5, 1.0, 3.0, math.inf)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "norm_type"), POISONED)
@on_ranks(4)
def test_what_is_not_finite_on_one_rank_raises_on_all(rank: int, case: str, norm_type: float) -> None:
    """In each gradient of that rank in turn; the gradients stay as they are."""
    made, found = CASES[case](rank), []
    for bad_rank in (0, 3) if case == "hsdp" else (2,):
        value = INF_NAN[(bad_rank + int(2 * min(norm_type, 9.0))) % 3]
        names = [[key for key, p in made.parameters if p.grad is not None and key != "tied"]]
        dist.broadcast_object_list(names, src=bad_rank)
        for key in names[0]:
            if rank == bad_rank:
                grad = dict(made.parameters)[key].grad
                first = (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[:1]  # of an empty one nothing
                right = first.clone()
                first.fill_(value)
            before = bytes_of(made)
            clip = functools.partial(fullrank.clip_grad_norm_, made.parameters, MOST, norm_type, **made.options)
            kind, text = common_error(functools.partial(clip, error_if_nonfinite=True))
            found.append(text)
            norm = fullrank.total_grad_norm(made.parameters, norm_type, **made.options).item()
            if kind == "none":  # the rank has no element of it
                assert math.isfinite(norm)
            else:
                shown = "nan" if math.isnan(value) else "inf"
                assert kind == "RuntimeError"
                assert bytes_of(made) == before
                assert f"expected gradients with a finite norm, got {shown}: {key} on rank" in text
                assert f"rank {bad_rank}" in text
                assert case == "hsdp" or str(norm) == shown  # there, copies that differ meet in the error alone
            if rank == bad_rank:
                first.copy_(right)
    assert sum(text != "" for text in found) >= 2


BAD = {
    "norm_type": ("ValueError", "norm_type: expected a number > 0, or inf, got 0."),
    "foreign group": ("ValueError", "shard_groups(two_d): expected a group with this rank in it"),
    "foreign across": ("ValueError", "across: expected a group with this rank in it"),
    "across is no group": ("TypeError", "across: expected a ProcessGroup, a DeviceMesh or None, got 'p'."),
    "across holds copies": ("ValueError", "across: expected groups whose ranks hold different parameters, got"),
    "shard_groups raises": ("RuntimeError", ""),
    "groups that overlap": ("ValueError", "shard_groups(two_d): expected groups that share one rank, got ranks"),
    "devices": ("ValueError", "gradients: expected values of all, or of none, got cpu, meta."),
    "plain gradient": ("TypeError", "gradient of parameter 17: expected a DTensor, as the parameter is, got Tensor."),
    "placed gradient": ("TypeError", "gradient of parameter 17: expected a plain tensor, as the parameter is, got DT"),
}


# Of the last rank.
DIFFERENT = {
    "another norm_type": ("ValueError", "norm_type: 2.0 on ranks 0, 1, 2, 3.0 on rank 3"),
    "another max_norm": ("ValueError", "max_norm: 0.5 on ranks 0, 1, 2, 1.0 on rank 3"),
    "another call": ("RuntimeError", "clip_grad_norm_ on ranks 0, 1, 2, total_grad_norm on rank 3"),
    "other layouts": ("ValueError", "layouts: [(0, 1)] of groups of [2, 2] ranks on ranks 0, 1, 2, [(0,), "),
}


@pytest.mark.parametrize("kind", slow_but(DIFFERENT, BAD | DIFFERENT))
@on_ranks(4)
def test_bad_input_on_one_rank_raises_on_all(rank: int, kind: str) -> None:
    """The first and the last rank take turns. The gradients stay as they are, and the next call works."""
    bad_rank = 3 if kind in DIFFERENT else (0, 3)[list(BAD).index(kind) % 2]
    case = by_hand(rank)
    parameters: Any = case.parameters
    strangers = group_of(*(other for other in range(4) if other != bad_rank))
    options: dict[str, Any] = {"max_norm": MOST, "norm_type": 2.0}
    if kind == "placed gradient":  # of a parameter that is sharded over a group that no other is
        by_name = with_gradient(draw(1, 4))
        parameters = [*parameters, by_name]
        options["shard_groups"] = lambda p: dist.group.WORLD if p is by_name else None
    before = bytes_of(case)
    if rank == bad_rank:
        elsewhere = nn.Parameter(torch.zeros(2, device="meta"))
        elsewhere.grad = torch.zeros(2, device="meta")
        dense = nn.Parameter(DTensor.from_local(draw(1, 4), mesh_of("dp", "tp")["tp"], [Replicate()]))
        dense.grad = draw(1, 4)
        if kind == "placed gradient":
            by_name.grad = DTensor.from_local(draw(1, 4), mesh_of("dp", "tp")["tp"], [Replicate()])
        changes: dict[str, Any] = {
            "norm_type": {"norm_type": 0},
            "foreign group": {"shard_groups": lambda p: strangers if p is parameters[0][1] else None},
            "foreign across": {"across": strangers},
            "across is no group": {"across": "pp"},
            "across holds copies": {"across": mesh_of("dp", "tp")["tp"]},
            "shard_groups raises": {"shard_groups": lambda p: {}[p]},
            "groups that overlap": {"shard_groups": lambda p: dist.group.WORLD if p is parameters[0][1] else None},
            "another norm_type": {"norm_type": 3.0},
            "another max_norm": {"max_norm": 2 * MOST},
        }
        options.update(changes.get(kind, {}))
        added = {"devices": elsewhere, "plain gradient": dense}
        parameters = [*parameters, added[kind]] if kind in added else parameters
    call: Any = fullrank.clip_grad_norm_
    if kind == "another call" and rank == bad_rank:
        call = lambda parameters, max_norm, norm_type: fullrank.total_grad_norm(parameters, norm_type)  # noqa: E731
    if kind == "other layouts":
        parameters = [parameters[0], parameters[3]] if rank == bad_rank else parameters[:1]
    kind_of_error, text = common_error(lambda: call(parameters, **options))
    expected, part_of_text = (BAD | DIFFERENT)[kind]
    assert kind_of_error == expected
    assert (part_of_text if kind in DIFFERENT else f"clip_grad_norm_ failed on rank {bad_rank}: {part_of_text}") in text
    assert bytes_of(case) == before
    assert abs(fullrank.total_grad_norm(case.parameters).item() / flat(case).norm().item() - 1) <= 1e-14


def test_shards_on_several_devices_of_a_process() -> None:
    """A sharded parameter on the accelerator and a copied one that was left on the CPU; the last rank has no shard."""
    pool = WorkerPool(3)  # the device stays registered for the whole process
    pool(clip_on_several_devices)
    pool.close()


def clip_on_several_devices(rank: int) -> None:
    from device import DEVICE

    full = [draw(seed, 30) for seed in range(2)]
    shard = full[0].split((10, 20, 0))[rank].to(DEVICE)
    parameters = [with_gradient(full[1]), with_gradient(shard)]
    groups = {id(parameters[1]): dist.group.WORLD}
    norm = fullrank.clip_grad_norm_(parameters, MOST, shard_groups=lambda parameter: groups.get(id(parameter)))
    expected = torch.cat(full).norm()
    assert norm.device == DEVICE
    assert norm.item() == pytest.approx(expected.item(), rel=1e-14)
    factor = MOST / (expected + 1e-6)
    for parameter, grad in zip(parameters, (full[1], full[0].split((10, 20, 0))[rank])):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), grad * factor, rtol=1e-14, atol=0)


@on_ranks(4)
def test_a_number_that_stages_of_two_dtypes_can_hold(rank: int) -> None:
    mesh = mesh_of("pp", "tp")
    full = [draw(seed, 30).to(dtype) for seed, dtype in enumerate((torch.float32, torch.float64))]
    norm = fullrank.clip_grad_norm_(with_gradient(full[mesh["pp"].get_local_rank()]), MOST, across=mesh["pp"])
    assert norm.dtype == (torch.float32 if rank < 2 else torch.float64)
    assert norm.item() == pytest.approx(torch.cat(full).norm().item(), rel=1e-7)
    norms = fullrank.all_gather_no_grad(norm.double()[None])
    assert torch.equal(norms, norms[:1].expand(4))


@on_ranks(4)
def test_the_reduction_reads_no_value(rank: int) -> None:
    case = by_hand(rank)
    with torch.no_grad():
        measured = grad_norm._measure(case.parameters, grad_norm._Options("test", 2.0, None, True), None, None)
        with Blindfold():
            reduced = grad_norm._join_over_groups(measured)
    assert reduced.norm.item() == pytest.approx(flat(case).norm().item(), rel=1e-14)


@on_ranks(4)
def test_parts_of_gradients_are_no_copies(rank: int) -> None:
    """Sequence parallelism leaves parts of the gradients of plain parameters; added up they are copies."""
    mesh = mesh_of("dp", "tp")
    for step in range(2):
        part = draw(10 * step + rank % 2, 5)
        parameters = [place(draw(1, 4, 4), mesh, Replicate(), Shard(1)), with_gradient(part)]
        for call in (fullrank.total_grad_norm, functools.partial(fullrank.clip_grad_norm_, max_norm=MOST)):
            kind, text = common_error(functools.partial(call, parameters))
            assert kind == "RuntimeError"
            assert "expected equal gradients where several ranks hold a whole parameter, got norms that differ" in text
            assert "as under sequence parallelism: all_reduce_grads_ first." in text
        assert torch.equal(parameters[1].grad, part)
        fullrank.all_reduce_grads_(parameters[1:], mesh["tp"])
        whole = torch.cat([draw(1, 4, 4).flatten(), draw(10 * step, 5) + draw(10 * step + 1, 5)])
        assert fullrank.total_grad_norm(parameters).item() == pytest.approx(whole.norm().item(), rel=1e-14)


@pytest.mark.parametrize("of_zero", [False, True])
@on_ranks(4)
def test_copies_that_differ_by_a_rounding_give_one_number(rank: int, of_zero: bool) -> None:
    """Also where the gradient is 0, as that of a bias before a loss of ranks, and only roundings are left."""
    mesh = mesh_of("dp", "tp")
    copy = draw(rank, 5) * 2.0**-52 if of_zero else draw(2, 5) * (1 + rank * 2.0**-52)
    norm = fullrank.total_grad_norm([place(draw(1, 4, 4), mesh, Shard(0), Shard(1)), with_gradient(copy)])
    assert torch.equal(fullrank.all_gather_no_grad(norm[None]), norm.expand(4))
