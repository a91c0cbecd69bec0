"""Sums of gradients over ranks that no wrapper reduces over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from loss_cases import normal
from meshes import init_device_mesh
from on_ranks import on_ranks
from subjects import whole, with_gradient
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from workers import error_of

from fullrank import all_reduce_grads_, sequence_sync_group
from fullrank.gradients import all_reduce_grads

SHAPES = [(3, 4), (), (5,), (0, 2), (1, 6)]
NUM_BYTES = 8 * (12 + 1 + 5 + 6)  # of all of them in float64

HEADER, REDUCTION = "_allgather_base_.default", "allreduce_.default"
# One rounding of each dtype; float32 and float64 are added in another order.
LIMITS = {"float64": 1e-15, "float32": 5e-7, "bfloat16": 2**-8, "float16": 2**-11}


def part(rank: int, index: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the gradient of one rank, in tenths: their sums are not exact in half precision."""
    return normal(*shape, seed=100 * rank + index).to(dtype)


def make_parameters(
    rank: int, dtype: torch.dtype, has: Callable[[int], bool] = lambda index: True
) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for index, parameter in enumerate(parameters):
        parameter.grad = part(rank, index, SHAPES[index], dtype) if has(index) else None
    return parameters


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = [(one.double(), other.double()) for one, other in zip(found, expected) if one.numel()]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def _good() -> list[nn.Parameter]:
    return [with_gradient(torch.ones(4, 3))]


def _sparse() -> list[nn.Parameter]:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    return [embedding.weight]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("bucket", "num_buckets"), [(NUM_BYTES, 1), (1, 4)])
@on_ranks()
def test_sum_in_place(rank: int, dtype: str, bucket: int, num_buckets: int) -> None:
    """All in one bucket, which in float64 they fill, and each of the four that have elements in its own."""
    kept, world_size = getattr(torch, dtype), dist.get_world_size()
    parameters = make_parameters(rank, kept)
    parameters[0].grad = parameters[0].grad.t().contiguous().t()  # another order in memory
    held = [(p.grad, p.grad.data_ptr(), p.grad.stride()) for p in parameters]
    with mock.patch.object(all_reduce_grads, "BUCKET_BYTES", bucket), CollectiveCounter() as counter:
        all_reduce_grads_([*parameters, parameters[0]], dist.group.WORLD)  # one of them twice
    expected = [sum(part(r, i, shape, kept).double() for r in range(world_size)) for i, shape in enumerate(SHAPES)]
    assert worst([p.grad for p in parameters], expected) <= LIMITS[dtype]
    assert all(p.grad is g and g.data_ptr() == at and g.stride() == s for p, (g, at, s) in zip(parameters, held))
    assert counter.counts == {HEADER: 2, REDUCTION: num_buckets}


def test_buckets_are_filled() -> None:
    quarter = 25 * 2**20 // 4 // 4  # elements of float32 in a quarter
    tensors = [torch.empty(n, device="meta") for n in (quarter, 3 * quarter, 1, quarter, 5 * quarter, 0, quarter)]
    tensors.insert(1, torch.empty(quarter, dtype=torch.bfloat16, device="meta"))  # travels as float32
    buckets = all_reduce_grads.buckets(tensors)
    sizes = [[(tensor.dtype, tensor.numel() / quarter) for tensor in bucket] for bucket in buckets]
    wide, narrow = torch.float32, torch.bfloat16
    assert sizes == [[(wide, 1), (wide, 3)], [(wide, 1 / quarter), (wide, 1)], [(wide, 5)], [(narrow, 1)], [(wide, 1)]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@on_ranks(4)
def test_half_precision_is_added_in_float32(rank: int, dtype: str) -> None:
    """A sum of four numbers of 8 or 11 bits is exact in float32, but for a few that differ much in size."""
    parts = [part(other, 0, (1000,), getattr(torch, dtype)) for other in range(4)]
    expected = sum(one.double() for one in parts).to(parts[0].dtype)
    parameter = with_gradient(parts[rank])
    all_reduce_grads_([parameter], dist.group.WORLD)
    assert int((parameter.grad != expected).sum()) <= 1
    assert int((sum(parts[1:], parts[0]) != expected).sum()) > 100  # the control: one by one


@pytest.mark.parametrize(
    ("world_size", "kind"), [(2, "plain"), pytest.param(3, "plain", marks=pytest.mark.full), (4, "shards")]
)
@on_ranks(...)
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(rank: int, kind: str) -> None:
    """Parameter 0 has one on every rank, 1 on the last only, 2 on none, 3 and 4 on all but the first.

    Or two copies of uneven and empty shards are added, over the other dimension of the mesh.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")) if kind == "shards" else None
    group = dist.group.WORLD if mesh is None else mesh["copies"].get_group()
    own, size = dist.get_rank(group), dist.get_world_size(group)
    has = {0: lambda r: True, 1: lambda r: r == size - 1, 2: lambda r: False}
    holds = [[has.get(index, lambda r: r > 0)(r) for r in range(size)] for index in range(len(SHAPES))]
    parameters = make_parameters(own, torch.float64, lambda index: holds[index][own])
    for index, plain in enumerate(parameters if mesh is not None else []):
        given = mesh["shards"], [Shard(0) if plain.ndim else Replicate()]
        parameters[index] = nn.Parameter(distribute_tensor(plain.detach(), *given))
        parameters[index].grad = None if plain.grad is None else distribute_tensor(plain.grad, *given)
    before = [p.grad for p in parameters]
    all_reduce_grads_(parameters, group)
    assert [index for index, p in enumerate(parameters) if p.grad is None] == [2]
    assert all(p.grad is grad for p, grad in zip(parameters, before) if grad is not None)
    for index in (0, 1, 3, 4):
        found = parameters[index].grad
        assert type(found) is (Tensor if mesh is None else DTensor)
        assert mesh is None or found.placements == parameters[index].placements
        parts = [part(r, index, SHAPES[index]) for r in range(size) if holds[index][r]]
        torch.testing.assert_close(whole(found), sum(parts, torch.zeros_like(parts[0])), rtol=1e-15, atol=1e-15)


@on_ranks(4)
def test_a_module_that_fsdp_left_unsharded(rank: int) -> None:
    """FSDP2 shows whole parameters, while the gradients are those of shards."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 5, dtype=torch.float64), nn.Linear(3, 5, dtype=torch.float64)
    reference.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh["shards"])
    held = list(model.parameters())
    model.set_reshard_after_backward(False)
    model(part(rank, 0, (4, 3))).square().sum().backward()
    assert all(p.grad is None for p in model.parameters())
    all_reduce_grads_(model, mesh["copies"])
    reference(torch.cat([part(r, 0, (4, 3)) for r in range(4)])).square().sum().div(2).backward()
    assert worst([p.grad.full_tensor() for p in held], [p.grad for p in reference.parameters()]) <= 1e-14


@on_ranks(2)
def test_nothing_to_add(rank: int) -> None:
    """No group and a group of one cost nothing; no parameter costs the header, in which the others would object."""
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("others", "own"))["own"]
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    for parameters, group, number in ((model, None, 0), (model, own, 0), ([], dist.group.WORLD, 1)):
        with CollectiveCounter() as counter:
            all_reduce_grads_(parameters, group)
        assert counter.total == number
    assert all(p.grad.equal(grad) for p, grad in zip(model.parameters(), before))


_TWO = "parameter 0: float32 (4, 3) on cpu on rank 0, "
# What the last rank passes, and the error.
BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "sparse": (_sparse, "TypeError", "failed on rank 1: gradient of parameter 0: expected a dense tensor"),
    "number": (lambda: 3, "TypeError", "failed on rank 1: parameters: expected a module, a tensor"),
    "text": (lambda: [*_good(), "weight"], "TypeError", "failed on rank 1: parameter 1: expected a parameter"),
    "used up": (lambda: iter([]), "ValueError", "parameters: expected parameters, got an iterator with none."),
    "fewer": (list, "ValueError", "number of parameters: 1 on rank 0, 0 on rank 1."),
    "shape": (lambda: [with_gradient(torch.ones(3, 4))], "ValueError", f"{_TWO}float32 (3, 4) on cpu on rank 1."),
    "dtype": (lambda: [with_gradient(_good()[0].grad.double())], "ValueError", f"{_TWO}float64 (4, 3) on cpu on rank"),
    "frozen": (
        lambda: [_good()[0].requires_grad_(False)],
        "ValueError",
        f"{_TWO}float32 (4, 3) on cpu, frozen on rank 1.",
    ),
}


@pytest.mark.parametrize("case", BAD)
@on_ranks(2)
def test_what_does_not_fit_raises_on_every_rank(rank: int, case: str) -> None:
    """The last rank passes it; gradients are untouched, and a right call afterwards works."""
    make, error, part_of_text = BAD[case]
    parameters = make() if rank else _good()
    kind, text = error_of(lambda: all_reduce_grads_(parameters, dist.group.WORLD))
    assert kind == error
    assert text.startswith("all_reduce_grads_")
    assert part_of_text in text, text
    if isinstance(parameters, list) and parameters:
        assert parameters[0].grad.sum() in (12.0, 6.0)  # untouched
    again = _good()
    all_reduce_grads_(again, dist.group.WORLD)
    assert again[0].grad.sum() == 24.0


@on_ranks(2)
def test_the_first_parameter_that_differs_is_named(rank: int) -> None:
    parameters = [with_gradient(torch.zeros(n)) for n in (2, 3, 4 + rank, 5 + rank)]
    _, text = error_of(lambda: all_reduce_grads_(parameters, dist.group.WORLD))
    assert "parameter 2: float32 (4,) on cpu on rank 0, float32 (5,) on cpu on rank 1." in text


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Shard(0), "S(0) 0 of 2 on rank 0, float32 (2, 3) on cpu, S(0) 1 of 2 on rank 1."),
        (Partial(), "P(sum) 0 of 2 on rank 0"),
        (Replicate(), ""),
    ],
    ids=str,
)
@on_ranks(2)
def test_shards_are_not_added_to_each_other(rank: int, placement: Any, text: str) -> None:
    """A replicated gradient may be a summand, as of hand-written sequence parallelism."""
    mesh, whole = init_device_mesh("cpu", (2,)), Replicate()
    layout = placement if placement == Shard(0) else whole
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [layout]))
    parameter.grad = DTensor.from_local(parameter.to_local().detach() + 1, mesh, [placement])
    found = error_of(lambda: all_reduce_grads_([parameter], dist.group.WORLD))
    assert found[0] == ("none" if placement == whole else "ValueError")
    assert text in found[1]
    assert parameter.grad.to_local()[0, 0] == (2 if placement == whole else 1)


@pytest.mark.parametrize(
    ("mode", "expected"), [("all", None), ("ulysses_only", "ring"), ("ring_only", "ulysses"), ("none", "unified")]
)
def test_sequence_sync_group(mode: str, expected: str | None) -> None:
    """What is folded into FSDP is reduced by it; what is left over is the other dimension, or both."""
    assert sequence_sync_group(mode, ring="ring", ulysses="ulysses", unified="unified") == expected
    with pytest.raises(ValueError, match="mode: expected one of 'all', 'ulysses_only', 'ring_only', 'none', got"):
        sequence_sync_group(mode.upper(), ring=1, ulysses=2, unified=3)
