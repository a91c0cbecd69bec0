"""One gradient norm over any mesh: against the full gradient in one process, bit-identical, raised by all or none."""

from __future__ import annotations

import math

import grad_norm_cases
import pytest
from workers import WorkerPool

POWERS = [1.0, 2.0, 3.0, 0.5, math.inf]
INF_NAN = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("case", grad_norm_cases.CASES)
def test_the_norm_is_that_of_the_full_gradient(pool_of_four: WorkerPool, case: str) -> None:
    results = pool_of_four(grad_norm_cases.norms, case, POWERS)
    assert all(ours == results[0] for ours in results)  # bit for bit
    for ours, expected in results[0]:
        assert ours == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("case", grad_norm_cases.CASES)
def test_clipped_gradients_are_those_of_one_process(pool_of_four: WorkerPool, case: str, norm_type: float) -> None:
    for distances in pool_of_four(grad_norm_cases.clipped, case, norm_type):
        # The gradients of a model are rounded otherwise where they are added over ranks.
        limit = 1e-13 if case in grad_norm_cases.MODELS else 4e-15
        assert {name for name, distance in distances if not distance <= limit} == set()
        assert distances or case == "pp_empty_stage"


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        ("tp_fsdp", "is_shard"),
        ("sequence_fsdp", "is_shard"),
        ("tp_fsdp", "all dimensions"),
        ("by_hand", "all dimensions"),
        ("hsdp", "all dimensions"),
    ],
)
def test_other_rules_of_what_is_sharded_are_wrong(pool_of_four: WorkerPool, case: str, rule: str) -> None:
    for wrong, right, expected in pool_of_four(grad_norm_cases.planned_by, case, rule):
        assert right == pytest.approx(expected, rel=1e-14)
        assert abs(wrong / expected - 1) > 1e-2


def test_a_plain_maximum_loses_nan(pool_of_four: WorkerPool) -> None:
    plain, ours = zip(*pool_of_four(grad_norm_cases.maximum_of_nan))
    assert all(map(math.isfinite, plain))
    assert all(map(math.isnan, ours))


# Distinct groups, without and with error_if_nonfinite, where replicas meet too to raise together.
NUM_COLLECTIVES = {
    "by_hand": (2, 2),
    "fsdp": (1, 1),
    "hsdp": (1, 2),
    "tp": (1, 1),
    "tp_fsdp": (2, 2),
    "ep": (2, 2),
    "ep_fsdp": (3, 3),
    "pp": (2, 2),
    "pp_all_listed": (2, 2),
}


@pytest.mark.parametrize("without_gradients", [False, True])
@pytest.mark.parametrize("case", NUM_COLLECTIVES)
def test_one_collective_per_group(pool_of_four: WorkerPool, case: str, without_gradients: bool) -> None:
    for error_if_nonfinite, expected in zip((False, True), NUM_COLLECTIVES[case]):
        for counts, sizes in pool_of_four(grad_norm_cases.collectives, case, error_if_nonfinite, without_gradients):
            assert counts == {"_allgather_base_.default": expected}
            assert set(sizes) == {128}


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [("float16", 1.2e4), ("bfloat16", 1e25), ("bfloat16", 1e-30), ("float32", 1e30), ("float64", 1e200)],
)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, 50.0, math.inf])
def test_the_range_of_the_dtype_is_no_limit(
    pool_of_four: WorkerPool, dtype: str, magnitude: float, norm_type: float
) -> None:
    results = pool_of_four(grad_norm_cases.magnitudes, dtype, magnitude, norm_type)
    assert len(set(results)) == 1
    norm, expected, returned, left, is_plain = results[0]
    assert norm == pytest.approx(expected, rel=1e-6 if dtype != "float64" else 1e-13)
    assert returned == ("torch.float64" if dtype == "float64" else "torch.float32")
    assert is_plain
    # bfloat16 has three digits; float16 cannot hold the smaller of the clipped elements.
    assert left == pytest.approx(min(100.0, expected), rel=1e-2)


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("case", ["by_hand", "hsdp", "tp_fsdp", "ep_fsdp", "pp"])
def test_what_is_not_finite_on_one_rank_raises_on_all(pool_of_four: WorkerPool, case: str, norm_type: float) -> None:
    for bad_rank in (0, 3) if case == "hsdp" or norm_type == 2.0 else (2,):
        value = INF_NAN[(bad_rank + int(2 * min(norm_type, 9.0))) % 3]
        results = pool_of_four(grad_norm_cases.poisoned, case, bad_rank, value, norm_type)
        for key, text, unchanged, norm in (outcome for outcomes in results for outcome in outcomes):
            if text is None:  # the rank has no element of it
                assert math.isfinite(norm)
                continue
            assert unchanged
            found = "nan" if math.isnan(value) else "inf"
            assert f"expected gradients with a finite norm, got {found}: {key} on rank" in text
            assert f"rank {bad_rank}" in text
            if case != "hsdp":  # there, copies that differ are seen only where all copies meet
                assert str(norm) == found
        outcomes = [[(key, text) for key, text, _, _ in outcomes] for outcomes in results]
        assert all(texts == outcomes[0] for texts in outcomes)
        assert sum(text is not None for _, text in outcomes[0]) >= 2


BAD = {
    "norm_type": ("ValueError", "norm_type: expected a number > 0, or inf, got 0."),
    "norm_type nan": ("ValueError", "norm_type: expected a number > 0, or inf, got nan."),
    "norm_type text": ("TypeError", "norm_type: expected a number > 0, or inf, got 'two'."),
    "max_norm": ("ValueError", "max_norm: expected a number >= 0, or None to measure only, got -1.0."),
    "max_norm nan": ("ValueError", "max_norm: expected a number >= 0"),
    "max_norm tensor": ("TypeError", "max_norm: expected a number >= 0"),
    "foreign group": ("ValueError", "shard_groups(two_d): expected a group with this rank in it"),
    "foreign across": ("ValueError", "across: expected a group with this rank in it"),
    "across is no group": ("TypeError", "across: expected a ProcessGroup, a DeviceMesh or None, got 'p'."),
    "across holds copies": ("ValueError", "across: expected groups whose ranks hold different parameters, got"),
    "shard_groups raises": ("RuntimeError", ""),
    "groups that overlap": ("ValueError", "shard_groups(two_d): expected groups that share one rank, got ranks"),
    "devices": ("ValueError", "gradients: expected all on one device, got cpu, meta."),
    "plain gradient": ("TypeError", "gradient of parameter 17: expected a DTensor, as the parameter is, got Tensor."),
    "no tensor": ("TypeError", "parameter 17: expected a parameter or a (name, parameter) pair, got 3.0."),
    "key of a dict": ("TypeError", "parameter 17: expected a parameter or a (name, parameter) pair, got 'weight'."),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_on_one_rank_raises_on_all(pool_of_four: WorkerPool, kind: str) -> None:
    name, fragment = BAD[kind]
    for bad_rank in (0, 3):
        outcomes = pool_of_four(grad_norm_cases.bad_input, kind, bad_rank)
        assert len({outcome[:2] for outcome in outcomes}) == 1, outcomes
        assert outcomes[0][0] == name
        assert f"clip_grad_norm_ failed on rank {bad_rank}: {fragment}" in outcomes[0][1]
        for _, _, unchanged, distance in outcomes:
            assert unchanged
            assert distance <= 1e-14  # the next call works


DISAGREEMENTS = {
    "norm_type": ("ValueError", "norm_type: 2.0 on ranks 0, 1, 2, 3.0 on rank 3"),
    "max_norm": ("ValueError", "max_norm: 0.5 on ranks 0, 1, 2, 1.0 on rank 3"),
    "call": ("RuntimeError", "clip_grad_norm_ on ranks 0, 1, 2, total_grad_norm on rank 3"),
    "layouts": ("ValueError", "layouts: [(0, 1)] of groups of [2, 2] ranks on ranks 0, 1, 2, [(0,), (0, 1)] of groups"),
}


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_disagree_are_named(pool_of_four: WorkerPool, kind: str) -> None:
    outcomes = pool_of_four(grad_norm_cases.disagreement, kind)
    assert len(set(outcomes)) == 1, outcomes
    name, text, unchanged = outcomes[0]
    assert name == DISAGREEMENTS[kind][0]
    assert DISAGREEMENTS[kind][1] in text
    assert unchanged


def test_a_number_that_stages_of_two_dtypes_can_hold(pool_of_four: WorkerPool) -> None:
    results = pool_of_four(grad_norm_cases.stages_of_two_dtypes)
    assert [dtype for dtype, _, _ in results] == ["torch.float32"] * 2 + ["torch.float64"] * 2
    assert len({norm for _, norm, _ in results}) == 1
    assert results[0][1] == pytest.approx(results[0][2], rel=1e-7)


def test_the_reduction_reads_no_value(pool_of_four: WorkerPool) -> None:
    for norm, expected in pool_of_four(grad_norm_cases.reduced_blindly):
        assert norm == pytest.approx(expected, rel=1e-14)


def test_copies_that_differ_by_a_rounding_give_one_number(pool_of_four: WorkerPool) -> None:
    assert len(set(pool_of_four(grad_norm_cases.replicas))) == 1
