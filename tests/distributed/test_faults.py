"""What one rank does wrong is raised on every rank, by name, and the next step is as if it had never happened."""

from __future__ import annotations

import inspect
import math
import signal

import death_cases
import fault_cases
import pytest
import torch
from death_cases import DOOMED, Fate
from fault_calls import BAD, CALLS, DIFFERENT, Spoiled
from gradient_cases import Case
from workers import WorkerPool

import fullrank
from fullrank.losses.distributed_loss import DistributedLoss


def check(pool: WorkerPool, name: str, group: str, kind: str, head: str) -> None:
    """Spoil a step on each rank in turn; the message begins with ``head``, filled in, and names that rank."""
    spoiled: Spoiled = getattr(CALLS[name], group)[kind]
    of_workers = pool(fault_cases.spoil_each_rank, name, group, kind)
    assert all(len(outcomes) == pool.world_size for outcomes in of_workers)
    for odd_rank, outcomes in enumerate(zip(*of_workers)):
        assert len({(outcome.error, outcome.text) for outcome in outcomes}) == 1, outcomes
        error, text, _, _ = outcomes[0]
        assert error == spoiled.error, text
        assert text.startswith(tuple(head.format(call=call, rank=odd_rank) for call in CALLS[name].heads)), text
        assert spoiled.text in text
        assert f"rank {odd_rank}" in text
        assert all(outcome.state_is_unchanged for outcome in outcomes)
        assert all(outcome.next_is_equal for outcome in outcomes)


@pytest.mark.parametrize(("name", "kind"), BAD)
def test_bad_input_on_one_rank_raises_on_all(pool: WorkerPool, name: str, kind: str) -> None:
    check(pool, name, "bad", kind, "{call} failed on rank {rank}: ")


@pytest.mark.parametrize(("name", "kind"), DIFFERENT)
def test_input_that_differs_on_one_rank_raises_on_all(pool: WorkerPool, name: str, kind: str) -> None:
    check(pool, name, "differ", kind, "{call}: expected the same on every rank, got ")


@pytest.mark.parametrize("name", ["smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise", "wrapper_in_blend"])
def test_control_a_step_that_did_happen_shows_in_the_next(pool_of_two: WorkerPool, name: str) -> None:
    assert pool_of_two(fault_cases.step_in_between, name) == [False, False]


def test_every_loss_and_gather_is_in_the_registry() -> None:
    names = {call.public for call in CALLS.values()}
    public = {name: getattr(fullrank, name) for name in fullrank.__all__}
    modules = {"fullrank.distributed.gather", "fullrank.distributed.global_mean"}
    gathers = {name for name, value in public.items() if getattr(value, "__module__", "") in modules}
    losses = {name for name, value in public.items() if inspect.isclass(value) and issubclass(value, DistributedLoss)}
    assert {"gather_rows", "global_mean"} <= gathers
    assert gathers | losses | {"LossWarmupWrapper"} == names


def test_the_number_of_combinations() -> None:
    """A call, a kind of bad input and the rank it is on, counted once for both world sizes."""
    assert 2 * len(BAD) >= 60
    assert 2 * len(DIFFERENT) >= 60


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_value_that_is_not_finite_on_one_rank(pool: WorkerPool, name: str, value: float) -> None:
    """No error. A NaN makes the loss NaN on every rank; the queue and the next step know nothing of it."""
    has_queue = "logits" in CALLS[name].arguments(torch.Generator(), 0) and name not in ("wrapper_in_warmup", "queries")
    for outcomes in zip(*pool(fault_cases.not_finite, name, value)):
        assert len({str(outcome.value) for outcome in outcomes}) == 1
        assert all(math.isnan(outcome.value) for outcome in outcomes if math.isnan(value))
        assert all(outcome.next_is_equal for outcome in outcomes)
        if has_queue:
            assert all(outcome.shows for outcome in outcomes)


TIMEOUT_S = 20  # far more than it takes to see that a connection is lost, and less than the limit of a process
SHORT_S = 2  # where the timeout itself is what ends the others

# Each call, and its collectives in the forward.
FORWARD = [(name, 1) for name in CALLS]
FORWARD += [(name, 2) for name in CALLS if name not in ("softmax_focal", "sigmoid_focal", "global_mean")]
FORWARD.remove(("wrapper_in_warmup", 2))


def assert_told(fates: list[Fate], *texts: str) -> None:
    """All but the doomed rank have ended by themselves, with a RuntimeError that has these texts."""
    for rank, fate in enumerate(fates):
        if rank != DOOMED:
            assert fate.exit_code == 0, fate
            assert fate.error == "RuntimeError", fate
            assert all(text in fate.text for text in texts), fate.text


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("name", "number"), FORWARD)
def test_a_rank_killed_in_forward(world_size: int, name: str, number: int) -> None:
    fates = death_cases.run_group(world_size, TIMEOUT_S, death_cases.killed_in_forward, name, number)
    assert fates[DOOMED].exit_code == -signal.SIGKILL
    # In the blend the second collective is the header of the main loss: the warm-up loss has one.
    is_header = number == 1 or name == "wrapper_in_blend"
    assert_told(fates, f"the all-gather of the {'headers' if is_header else 'rows'}", "Another rank has probably died")
    assert all(fate.text.startswith(CALLS[name].heads) for fate in fates if fate.error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_killed_in_the_reduce_scatter_of_a_backward(world_size: int) -> None:
    fates = death_cases.run_group(world_size, TIMEOUT_S, death_cases.killed_in_reduce_scatter)
    assert fates[DOOMED].exit_code == -signal.SIGKILL
    assert_told(fates, "all_gather_with_grad: the reduce-scatter of the gradients, in the backward, failed.")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_killed_in_the_backward_of_ddp(world_size: int) -> None:
    """The collective is DDP's and so is the error, which names the peer; the traceback names the backward."""
    fates = death_cases.run_group(world_size, TIMEOUT_S, death_cases.killed_in_backward)
    assert fates[DOOMED].exit_code == -signal.SIGKILL
    assert_told(fates, "peer")
    assert all(".backward()" in fate.trace for fate in fates if fate.error)


def test_a_rank_killed_while_reasons_are_exchanged() -> None:
    fates = death_cases.run_group(3, TIMEOUT_S, death_cases.killed_among_reasons)
    assert_told(fates, "SmoothAPLoss: the exchange of what went wrong failed.")
    assert "targets: expected shape (4,)" in fates[0].trace  # its own error is the cause


@pytest.mark.parametrize("scenario", [death_cases.fewer_steps, death_cases.fewer_steps_then_gone])
def test_a_rank_with_fewer_steps(scenario: object) -> None:
    timeout_s = SHORT_S if scenario is death_cases.fewer_steps else TIMEOUT_S
    fates = death_cases.run_group(3, timeout_s, scenario)
    assert fates[DOOMED].exit_code == 0
    assert_told(
        fates, "SmoothAPLoss: the all-gather of the headers failed.", "did not make this call within the timeout"
    )


def test_a_rank_that_validates_alone_is_told() -> None:
    """The control of ``gather_distributed=False``: without it the others wait for the one that does not validate."""
    fates = death_cases.run_group(3, SHORT_S, death_cases.validates_alone)
    assert fates[DOOMED].exit_code == 0
    assert_told(fates, "RecallAtQuantileLoss: the all-gather of the headers failed.")


@pytest.mark.parametrize(
    "loss", ["smooth_ap", "recall", "pauc_trapezoid", "pauc_pairwise", "softmax_focal", "sigmoid_focal"]
)
def test_a_rank_without_data_goes_on_with_zero_rows(pool: WorkerPool, loss: str) -> None:
    assert max(pool(fault_cases.run_out_of_data, Case(loss))) <= 1e-12


def test_control_the_wrong_scale_is_seen_without_data_too(pool_of_two: WorkerPool) -> None:
    assert min(pool_of_two(fault_cases.run_out_of_data, Case("smooth_ap", gradient_reduction="sum"))) > 0.4
