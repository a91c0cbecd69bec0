"""State that has come apart between ranks is named in the next step, at no cost."""

from __future__ import annotations

import inspect

import drift_cases
import pytest
from drift_cases import CONSTRUCTED, DRIFTS, NOT_COMPARED, OTHER_VALUES, POOLED
from workers import WorkerPool, get_pool

pytestmark = pytest.mark.filterwarnings("ignore:.*drawn down")

ARGUMENTS = [
    (kind.__name__, argument)
    for kind in CONSTRUCTED
    for argument in inspect.signature(kind).parameters
    if argument not in NOT_COMPARED
]


def assert_named(of_workers: list, *texts: str, error: str = "RuntimeError") -> None:
    """On every rank the same error, which says that something differs and on which rank: each of them in turn."""
    for odd_rank, outcomes in enumerate(zip(*of_workers)):
        assert len({outcome[:2] for outcome in outcomes}) == 1, outcomes
        found, text = outcomes[0][:2]
        assert found == error, text
        assert ": expected the same on every rank, got " in text
        assert f" on rank {odd_rank}" in text
        assert all(part in text for part in texts), text


@pytest.mark.parametrize("kind", DRIFTS)
@pytest.mark.parametrize("name", POOLED)
def test_drift_of_one_rank_is_named_in_the_next_step(pool: WorkerPool, name: str, kind: str) -> None:
    """And the error leaves nothing behind: a loss with the state from before goes on as if there had been no drift."""
    of_workers = pool(drift_cases.drift_on_each_rank, name, kind)
    assert_named(of_workers, DRIFTS[kind].text)
    assert all(repaired for outcomes in of_workers for _, _, repaired in outcomes)


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_another_argument_on_one_rank_is_named(pool_of_two: WorkerPool, name: str, argument: str) -> None:
    assert_named(pool_of_two(drift_cases.other_argument, name, argument), argument)


def test_every_constructor_argument_is_compared_or_excused() -> None:
    arguments = {argument for kind in CONSTRUCTED for argument in inspect.signature(kind).parameters}
    assert arguments == set(OTHER_VALUES) | set(NOT_COMPARED)


@pytest.mark.parametrize(
    ("blend", "step", "behind", "text"),
    [
        (0, 2, 1, "call: "),  # the others have left the warm-up
        (4, 2, 1, "schedule: "),  # the same call, with another weight of the main loss
        (4, 4, 1, "schedule: "),
        (4, 9, 3, "temperature: "),
    ],
)
def test_a_schedule_that_is_behind_on_one_rank(pool: WorkerPool, blend: int, step: int, behind: int, text: str) -> None:
    assert_named(pool(drift_cases.schedule_on_each_rank, blend, step, behind), text)


def test_control_equal_schedules_are_fine(pool_of_two: WorkerPool) -> None:
    for step in (2, 4, 9):
        assert pool_of_two(drift_cases.schedule_on_each_rank, 4, step, 0) == [[("none", "")] * 2] * 2


def test_damage_that_no_checksum_sees(pool_of_two: WorkerPool) -> None:
    """The header compares what entered the queue; assert_synchronized compares what it holds."""
    outcomes = pool_of_two(drift_cases.silent_damage)
    assert {step for step, _ in outcomes} == {"none"}
    assert len({check for _, check in outcomes}) == 1
    error, text = outcomes[0][1]
    assert error == "RuntimeError"
    assert "MemoryQueue.assert_synchronized: expected the same on every rank" in text
    assert "on rank 1" in text


def test_assert_synchronized_over_a_group() -> None:
    outcomes = get_pool(3)(drift_cases.synchronized_in_a_part)
    assert {whole[0] for whole, _ in outcomes} == {"RuntimeError"}
    assert all(" on ranks 0, 2, " in whole[1] and " on rank 1." in whole[1] for whole, _ in outcomes)
    assert [part for _, part in outcomes] == [("none", "")] * 3
