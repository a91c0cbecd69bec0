"""The promise: gradients over ranks equal those of one process with the whole batch."""

from __future__ import annotations

import gather_cases
import gradient_cases
import pytest
from gradient_cases import Case
from workers import WorkerPool, get_pool

# float64: rounding of sums in another order. float32: the model's own products, summed over ranks instead of rows.
LIMITS = {"float64": 1e-12, "float32": 2e-6}
LOSSES = ["smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise", "softmax_focal", "sigmoid_focal"]
POOLED = LOSSES[:4]


def assert_exact(pool: WorkerPool, case: Case) -> None:
    """Assert that gradients and loss values of all steps equal those of one process."""
    for gradient, value in pool(gradient_cases.worst_error, pool.world_size, case):
        assert gradient <= LIMITS[case.dtype], (case, gradient)
        assert value <= LIMITS[case.dtype], (case, value)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_equals_one_process(pool: WorkerPool, loss: str, weighted: bool, dtype: str) -> None:
    """Uneven and empty shards, ignored rows, queue filling over four optimizer steps."""
    assert_exact(pool, Case(loss, dtype=dtype, weighted=weighted))


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_equals_one_process_on_four_ranks(pool_of_four: WorkerPool, loss: str) -> None:
    for dtype in LIMITS:
        for weighted in (False, True):
            assert_exact(pool_of_four, Case(loss, dtype=dtype, weighted=weighted))


@pytest.mark.parametrize(
    "case",
    [
        Case("smooth_ap", num_classes=4),
        Case("recall", num_classes=4, weighted=True),
        Case("pauc_pairwise", num_classes=3),
        Case("smooth_ap", num_classes=3, multi_hot=True, weighted=True),
        Case("pauc_trapezoid", num_classes=3, multi_hot=True),
        Case("smooth_ap", queue_keep="negatives"),
        Case("recall", num_classes=3, queue_keep="negatives"),
        Case("smooth_ap", queue_size=20),  # smaller than a batch
        Case("smooth_ap", queue_size=0),
        Case("softmax_focal", reduction="mean_positive"),
        Case("softmax_focal", reduction="sum", weighted=True),
        Case("smooth_ap", num_classes=3, reduction="sum"),
    ],
    ids=str,
)
def test_gradient_equals_one_process_in_every_form(pool: WorkerPool, case: Case) -> None:
    assert_exact(pool, case)


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_inside_the_wrapped_module(pool_of_two: WorkerPool, loss: str) -> None:
    for dtype in LIMITS:
        assert_exact(pool_of_two, Case(loss, dtype=dtype, loss_inside=True))


@pytest.mark.filterwarnings("ignore:.*drawn down")
@pytest.mark.parametrize("loss", POOLED)
def test_drawn_pool_is_the_same_on_every_rank(pool: WorkerPool, loss: str) -> None:
    """The draw is seeded by its number, so a spread batch draws the rows that one process would."""
    assert_exact(pool, Case(loss, num_classes=3, max_pool_size=40))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_parameter_after_the_gather(pool: WorkerPool, dtype: str) -> None:
    for errors in pool(gradient_cases.post_gather_errors, pool.world_size, dtype, "fullrank"):
        assert errors["encoder"] <= LIMITS[dtype]
        assert errors["scale"] <= LIMITS[dtype]


def test_control_detached_gather_is_off_by_the_world_size(pool: WorkerPool) -> None:
    for errors in pool(gradient_cases.post_gather_errors, pool.world_size, "float64", "detached"):
        assert errors["encoder"] > 0.4
        assert errors["ratio"] == pytest.approx(1 / pool.world_size, abs=1e-12)
        assert errors["scale"] <= 1e-12


def test_control_scaled_loss_is_off_after_the_gather(pool: WorkerPool) -> None:
    for errors in pool(gradient_cases.post_gather_errors, pool.world_size, "float64", "scaled"):
        assert errors["encoder"] <= 1e-12
        assert errors["scale_ratio"] == pytest.approx(pool.world_size, rel=1e-12)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("form", ["fsdp2", "hsdp"])
def test_sharded_models_as_they_come(pool_of_four: WorkerPool, form: str, inside: bool) -> None:
    assert max(pool_of_four(gather_cases.sharded_gradients, form, inside)) <= 1e-12


def test_autocast_does_not_reach_into_the_sums(pool_of_two: WorkerPool) -> None:
    for errors in pool_of_two(gather_cases.autocast_errors):
        assert len(errors) == 4
        assert max(errors.values()) == 0.0, errors


@pytest.mark.filterwarnings("ignore:.*drawn down")
@pytest.mark.parametrize("wrapped", [False, True], ids=["loss", "wrapper"])
def test_rank_zero_may_validate_alone(pool_of_two: WorkerPool, wrapped: bool) -> None:
    first, second = pool_of_two(gather_cases.rank_zero_validates_alone, wrapped)
    assert first == second


@pytest.mark.parametrize("loss", ["smooth_ap", "softmax_focal"])
def test_control_wrong_gradient_reduction_is_off(loss: str) -> None:
    """Under DDP, which averages, the scale of a SUM gives 1 / W of the gradient."""
    for gradient, value in get_pool(2)(gradient_cases.worst_error, 2, Case(loss, gradient_reduction="sum")):
        assert gradient > 0.4
        assert value > 1e-6  # the second step starts from other parameters
