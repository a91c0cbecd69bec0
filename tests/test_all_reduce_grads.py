"""Sums of gradients over ranks that no wrapper reduces over."""

from __future__ import annotations

import all_reduce_cases as cases
import pytest
import torch
from workers import WorkerPool

from fullrank import all_reduce_grads_, sequence_sync_group

HEADER, REDUCTION = "_allgather_base_.default", "allreduce_.default"
# One rounding of each dtype; float32 and float64 are added in another order.
LIMITS = {"float64": 1e-15, "float32": 5e-7, "bfloat16": 2**-8, "float16": 2**-11}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("bucket", "num_buckets"), [(25 * 2**20, 1), (1, 4)])
def test_sum_in_place(pool: WorkerPool, dtype: str, bucket: int, num_buckets: int) -> None:
    """All in one bucket, and each of the four tensors with elements in one of its own."""
    for found in pool(cases.sums, dtype, bucket):
        assert found["error"] <= LIMITS[dtype]
        assert found["same"]
        assert found["counts"] == {HEADER: 2, REDUCTION: num_buckets}


def test_buckets_are_filled() -> None:
    from fullrank.gradients.all_reduce_grads import BUCKET_BYTES, buckets

    quarter = BUCKET_BYTES // 4 // 4  # elements of float32 in a quarter
    tensors = [torch.empty(n, device="meta") for n in (quarter, 3 * quarter, 1, quarter, 5 * quarter, 0, quarter)]
    tensors.insert(1, torch.empty(quarter, dtype=torch.bfloat16, device="meta"))  # travels as float32
    sizes = [[(tensor.dtype, tensor.numel() / quarter) for tensor in bucket] for bucket in buckets(tensors)]
    wide, narrow = torch.float32, torch.bfloat16
    assert sizes == [
        [(wide, 1), (wide, 3)],
        [(wide, 1 / quarter), (wide, 1)],
        [(wide, 5)],
        [(narrow, 1)],
        [(wide, 1)],
    ]


def test_dtypes_travel_apart(pool: WorkerPool) -> None:
    assert max(pool(cases.mixed)) == 0.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_added_in_float32(pool_of_four: WorkerPool, dtype: str) -> None:
    """A sum of four numbers of 8 or 11 bits is exact in float32, but for a few that differ much in size."""
    assert max(pool_of_four(cases.half_sum, dtype, "ours")) <= 1
    assert min(pool_of_four(cases.half_sum, dtype, "one by one")) > 100


@pytest.mark.parametrize("kind", ["plain", "dtensor"])
def test_a_gradient_that_some_ranks_lack_counts_as_zero_there(pool: WorkerPool, kind: str) -> None:
    for found in pool(cases.missing, kind):
        assert found["none"] == [2]
        assert found["kinds"]
        assert found["error"] <= 1e-15


def test_uneven_and_empty_shards(pool_of_four: WorkerPool) -> None:
    for found in pool_of_four(cases.sharded):
        assert found["same"]
        assert found["layout"]
        assert found["error"] <= 1e-15


def test_a_module_that_fsdp_left_unsharded(pool_of_four: WorkerPool) -> None:
    assert max(pool_of_four(cases.left_unsharded)) <= 1e-14


def test_nan_and_inf_come_through(pool: WorkerPool) -> None:
    world_size = pool.world_size
    for one, nan, infinite in pool(cases.strange_values):
        assert one == world_size
        assert nan != nan
        assert infinite == float("inf")


def test_nothing_to_add(pool_of_two: WorkerPool) -> None:
    """No group and a group of one cost nothing; no parameter costs the header, in which the others would object."""
    assert pool_of_two(cases.nothing_to_add) == [[0, 0, 1]] * 2


BAD = {
    "sparse": ("TypeError", "failed on rank 1: gradient of parameter 0: expected a dense tensor"),
    "number": ("TypeError", "failed on rank 1: parameters: expected a module, a tensor"),
    "not a parameter": ("TypeError", "failed on rank 1: parameter 1: expected a parameter"),
    "used up": ("ValueError", "failed on rank 1: parameters: expected parameters, got an iterator with none."),
    "fewer": ("ValueError", "number of parameters: 1 on rank 0, 0 on rank 1."),
    "shape": ("ValueError", "parameter 0: float32 (4, 3) on cpu on rank 0, float32 (3, 4) on cpu on rank 1."),
    "dtype": ("ValueError", "parameter 0: float32 (4, 3) on cpu on rank 0, float64 (4, 3) on cpu on rank 1."),
    "frozen": ("ValueError", "float32 (4, 3) on cpu on rank 0, float32 (4, 3) on cpu, frozen on rank 1."),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_raises_on_every_rank(pool_of_two: WorkerPool, case: str) -> None:
    outcomes = pool_of_two(cases.spoil, case)
    assert outcomes[0] == outcomes[1]
    kind, text, total = outcomes[0]
    assert kind == BAD[case][0]
    assert text.startswith("all_reduce_grads_")
    assert BAD[case][1] in text
    assert total == 24.0


@pytest.mark.parametrize(
    ("place", "kind", "text"),
    [
        ("shard", "ValueError", "S(0) 0 of 2 on rank 0, float32 (2, 3) on cpu, S(0) 1 of 2 on rank 1."),
        ("partial", "ValueError", "P(sum) 0 of 2 on rank 0"),
        ("replicate", "nothing", "2.0"),
    ],
)
def test_shards_are_not_added_to_each_other(pool_of_two: WorkerPool, place: str, kind: str, text: str) -> None:
    """A replicated gradient may be a summand, as of hand-written sequence parallelism."""
    for found, message in pool_of_two(cases.own_mesh, place):
        assert found == kind
        assert text in message


def test_one_process() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, 2.0])
    all_reduce_grads_(torch.nn.ParameterList([weight]), None)
    assert weight.grad.tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="parameters: expected a module"):
        all_reduce_grads_(1, None)


@pytest.mark.parametrize(
    ("mode", "expected"), [("all", None), ("ulysses_only", "ring"), ("ring_only", "ulysses"), ("none", "unified")]
)
def test_sequence_sync_group(mode: str, expected: str | None) -> None:
    """What is folded into FSDP is reduced by it; what is left over is the other dimension, or both."""
    assert sequence_sync_group(mode, ring="ring", ulysses="ulysses", unified="unified") == expected


@pytest.mark.parametrize("mode", ["ring", "", None, "ALL"])
def test_sequence_sync_group_of_no_mode(mode: str | None) -> None:
    with pytest.raises(ValueError, match="mode: expected one of 'all', 'ulysses_only', 'ring_only', 'none', got"):
        sequence_sync_group(mode, ring=1, ulysses=2, unified=3)
