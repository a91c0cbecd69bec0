"""The agreement itself: what opens every call. What ranks do wrong in it is in test_faults.py and test_drift.py."""

from __future__ import annotations

import gather_cases
import pytest
from workers import WorkerPool

import fullrank


@pytest.mark.parametrize("call", ["smooth_ap", "focal", "gather", "global_mean"])
def test_a_call_inside_checkpoint_is_refused(pool_of_two: WorkerPool, call: str) -> None:
    """The non-re-entrant form runs the forward twice, once in backward; so does the re-entrant one."""
    for reentrant in (False, True):
        for name, text in pool_of_two(gather_cases.inside_checkpoint, reentrant, call):
            assert name == "RuntimeError"
            assert "call the loss outside checkpoint" in text


def test_gather_distributed_is_checked_where_it_is_set() -> None:
    """In the forward an exception of one rank would leave the others waiting."""
    loss = fullrank.SmoothAPLoss(num_classes=1)
    with pytest.raises(TypeError, match="gather_distributed: expected None, True or False, got 'yes'"):
        loss.gather_distributed = "yes"  # type: ignore[assignment]


def test_assert_synchronized(pool: WorkerPool) -> None:
    assert all(outcome == ("none", "") for outcome in pool(gather_cases.synchronized, False))
    outcomes = pool(gather_cases.synchronized, True)
    assert len(set(outcomes)) == 1
    name, text = outcomes[0]
    assert name == "RuntimeError"
    assert "on rank 1" in text
    assert "reset_queue()" in text


def test_the_header_carries_any_total_and_every_word(pool: WorkerPool) -> None:
    """Numbers and tensors of any kind arrive as float64, in rank order; rows and checksums as they are."""
    world_size = pool.world_size
    for rows, totals in pool(gather_cases.agree_on_totals):
        assert rows == [2**40 + rank for rank in range(world_size)]
        assert totals == [[rank + 0.1, 3.0, 0.5, -(2.0**60)] for rank in range(world_size)]


def test_a_header_that_cannot_be_made_is_an_error_on_every_rank(pool: WorkerPool) -> None:
    for kind, text in (("meta", "meta"), ("two elements", "2 elements"), ("text", "not a float"), ("repr", "no text")):
        outcomes = pool(gather_cases.agree_on_nonsense, kind)
        assert len(set(outcomes)) == 1
        error, message = outcomes[0]
        assert error in ("RuntimeError", "TypeError", "ValueError")
        assert message.startswith("a call failed on rank 1: ")
        assert text in message


def test_ranks_in_different_calls_are_told_which(pool: WorkerPool) -> None:
    for calls in (["smooth_ap", "softmax_focal"], ["gather", "smooth_ap"], ["softmax_focal", "gather"]):
        outcomes = pool(gather_cases.different_calls, calls)
        assert len(set(outcomes)) == 1
        error, text = outcomes[0]
        assert error == "RuntimeError"
        assert text.startswith("ranks: expected the same on every rank, got call: ")
        assert "Every rank must make the same calls in the same order." in text
        assert all(gather_cases.CALLED[name] in text for name in calls)


def test_the_calls_after_a_disagreement_work(pool_of_two: WorkerPool) -> None:
    assert pool_of_two(gather_cases.call_after_disagreement) == [[0.0, 1.0], [0.0, 1.0]]


def test_backends_are_kept_for_as_long_as_their_group(pool_of_two: WorkerPool) -> None:
    assert pool_of_two(gather_cases.known_groups) == [[True, True, False]] * 2
