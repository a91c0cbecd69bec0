"""The gathers: rows of all ranks in rank order, gradients of one's own rows at the right scale, few collectives."""

from __future__ import annotations

from pathlib import Path

import gather_cases
import pytest
import torch
from workers import WorkerPool

import fullrank

UNEVEN = {2: [3, 5], 3: [4, 0, 2]}
DTYPES = ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape_in_rank_order(pool: WorkerPool, dtype: str) -> None:
    for counts in (UNEVEN[pool.world_size], [3] * pool.world_size, [0] * pool.world_size):
        for trailing in ((), (1,), (3,), (2, 3), (0,)):
            assert all(pool(gather_cases.gather_all_kinds, counts, dtype, trailing)), (counts, trailing)


def test_row_aligned_tensors_travel_together(pool: WorkerPool) -> None:
    for counts in (UNEVEN[pool.world_size], [4] * pool.world_size, [0] * pool.world_size):
        for right, collectives, operators in pool(gather_cases.gather_together, counts):
            assert right
            assert collectives == 2  # the header and one payload, also for 0 rows
            assert operators == ["_allgather_base_.default"]


@pytest.mark.parametrize("reduction", ["mean", "sum", 6])
@pytest.mark.parametrize("backward", ["local", "reduce_scatter"])
def test_backward_scale(pool: WorkerPool, reduction: str | int, backward: str) -> None:
    for counts in (UNEVEN[pool.world_size], [3] * pool.world_size):
        for gradient, expected, collectives in pool(gather_cases.backward_of_gather, counts, reduction, backward):
            torch.testing.assert_close(torch.tensor(gradient), torch.tensor(expected))
            assert collectives == (1 if backward == "reduce_scatter" else 0)


def test_reduce_scatter_adds_half_precision_in_float32(pool_of_two: WorkerPool) -> None:
    for gradient, dtype in pool_of_two(gather_cases.half_precision_reduce_scatter):
        assert gradient == [[256.0]]  # 257 is not a bf16 number
        assert dtype == "torch.bfloat16"


def test_equal_rows_are_neither_padded_nor_copied(pool_of_two: WorkerPool) -> None:
    for copied, sizes in pool_of_two(gather_cases.copied_elements, [1000, 1000]):
        assert copied < 100  # the header's words
        assert sizes == [64, 32_000]
    for copied, sizes in pool_of_two(gather_cases.copied_elements, [1000, 999]):  # the control: padded and trimmed
        assert copied >= 2 * 8_000
        assert sizes == [64, 32_000]


def test_world_size_one_is_the_identity(pool_of_two: WorkerPool) -> None:
    for forward_backward in pool_of_two(gather_cases.collectives_of_losses):
        assert all(counts == (0, 0) for name, counts in forward_backward.items() if name.endswith("lone"))


def test_collectives_of_the_losses(pool_of_two: WorkerPool) -> None:
    for counts in pool_of_two(gather_cases.collectives_of_losses):
        whole = {name.removesuffix(" whole"): value for name, value in counts.items() if name.endswith("whole")}
        assert {name: value for name, value in whole.items() if "focal" in name} == {
            "softmax_focal": (1, 0),
            "sigmoid_focal": (1, 0),
        }
        pooled = {name: value for name, value in whole.items() if "focal" not in name}
        assert len(pooled) == 4
        assert set(pooled.values()) == {(2, 0)}


def test_conjugates_negatives_and_changes_in_place(pool_of_two: WorkerPool) -> None:
    assert pool_of_two(gather_cases.odd_tensors) == [True, True]


def test_a_group_of_one_gives_the_same_objects_back(pool_of_two: WorkerPool) -> None:
    assert pool_of_two(gather_cases.identity_at_world_size_one) == [True, True]


def test_global_mean(pool: WorkerPool) -> None:
    world_size = pool.world_size
    totals, counts = [3.0, 5.0, 1.0][:world_size], [2, 0, 7][:world_size]
    expected = sum(totals) / sum(counts)
    for as_tensor in (False, True):
        for mean, gradient, forward, backward in pool(gather_cases.world_mean, totals, counts, as_tensor):
            assert mean == pytest.approx(expected, rel=1e-15)
            assert gradient == pytest.approx(world_size / sum(counts), rel=1e-15)
            assert (forward, backward) == (1, 0)


def test_global_mean_of_two_dtypes_is_refused(pool_of_two: WorkerPool) -> None:
    """The ranks would return two numbers."""
    first, second = pool_of_two(gather_cases.mean_of_two_dtypes)
    assert first == second
    assert first[0] == "ValueError"
    assert "dtype: torch.float32 on rank 0, torch.bfloat16 on rank 1" in first[1]


def test_losses_made_on_meta(pool_of_two: WorkerPool) -> None:
    """The queue is empty until its first rows bring their device."""
    for differences in pool_of_two(gather_cases.losses_made_on_meta):
        assert differences == [0.0] * 4


def test_global_mean_of_nothing_is_zero(pool_of_two: WorkerPool) -> None:
    for mean, gradient, _, _ in pool_of_two(gather_cases.world_mean, [0.0, 0.0], [0, 0], False):
        assert mean == 0.0
        assert gradient == 2.0  # finite: the total is an empty sum, whose own gradient is zero


def test_global_mean_equals_one_process_and_mean_of_means_does_not(pool: WorkerPool) -> None:
    assert max(pool(gather_cases.mean_over_unequal_shards, "fullrank")) <= 1e-12
    assert min(pool(gather_cases.mean_over_unequal_shards, "mean of means")) > 1e-2


@pytest.mark.parametrize("form", ["subgroup", "mesh", "mesh of two dimensions"])
def test_groups_and_meshes(pool_of_four: WorkerPool, form: str) -> None:
    assert max(pool_of_four(gather_cases.gradient_over_groups, form)) <= 1e-12


def test_a_rank_outside_the_group_is_told_so(pool_of_two: WorkerPool) -> None:
    inside, outside = pool_of_two(gather_cases.outsider)
    assert inside == "torch.Size([2])"
    assert outside.startswith("group: expected a group with this rank in it, got 'one without rank 1'.")


def test_a_queue_of_ten_million_rows_adds_no_broadcast(pool_of_two: WorkerPool) -> None:
    small = pool_of_two(gather_cases.broadcasts_with_a_large_queue, 16)
    large = pool_of_two(gather_cases.broadcasts_with_a_large_queue, 10_000_000)
    assert small == large
    assert all(broadcasts == 0 and largest < 1000 for broadcasts, largest in large)


def test_copies_share_the_group_and_pickles_drop_it(pool_of_two: WorkerPool) -> None:
    for first, again, shares, dropped, queued in pool_of_two(gather_cases.copies_and_pickles):
        assert again[0] == again[1] == again[2]
        assert again[0] != first  # the queue holds the first step's rows
        assert shares
        assert dropped
        assert queued == 8 or queued == 4


def test_detection_and_its_override_between_steps(pool_of_two: WorkerPool) -> None:
    first, second = pool_of_two(gather_cases.detection)
    assert first[0] == second[0] == first[2] == second[2] == first[3] == second[3]
    assert first[1] != second[1]


def test_a_process_group_that_was_destroyed_is_found_again(tmp_path: Path) -> None:
    """Local before there is one, gathered with one, local without, gathered with the next."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [context.Process(target=gather_cases.generations, args=(r, str(tmp_path), answers)) for r in range(2)]
    for worker in workers:
        worker.start()
    results = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=20)
    for values, stale in results:
        assert values[0] == values[2]  # local
        assert values[1] == values[3]  # gathered
        assert values[0] != values[1]
        assert "It was destroyed" in stale


def test_global_mean_of_integers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"total: expected a floating-point tensor, got an int64 tensor"):
        fullrank.global_mean(torch.tensor([3]), 2)


@pytest.mark.parametrize("call", [fullrank.all_gather_with_grad, fullrank.all_gather_no_grad, fullrank.gather_rows])
def test_a_gather_without_process_group_raises(call: object) -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        call(torch.ones(2))  # type: ignore[operator]


def test_global_mean_without_process_group_divides() -> None:
    total = torch.tensor(6.0, requires_grad=True)
    fullrank.global_mean(total, torch.tensor(4)).backward()
    assert total.grad == 0.25


@pytest.mark.parametrize("bad", ["median", 0, -1, 1.5, True, None])
def test_unknown_gradient_reduction(bad: object) -> None:
    with pytest.raises(ValueError, match="gradient_reduction: expected 'mean', 'sum' or the number"):
        fullrank.SmoothAPLoss(1, gradient_reduction=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradient_reduction"):
        fullrank.global_mean(torch.tensor(1.0), 1, gradient_reduction=bad)  # type: ignore[arg-type]


def test_the_wrapper_validates_on_one_rank_alone(pool_of_two: WorkerPool) -> None:
    value, expected = pool_of_two(gather_cases.wrapper_on_rank_0)[0]
    assert value == pytest.approx(expected, rel=1e-6)  # float32
    assert value > 0
