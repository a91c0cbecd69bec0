"""No rank is left waiting: what one rank does wrong, every rank raises, and the next step works."""

from __future__ import annotations

import gather_cases
import pytest
from workers import WorkerPool

BAD = {
    "rank of logits": "ValueError",
    "columns": "ValueError",
    "length": "ValueError",
    "float targets": "TypeError",
    "integer logits": "TypeError",
    "not a tensor": "TypeError",
    "class out of range": "ValueError",
    "mask shape": "ValueError",
    "mask dtype": "TypeError",
    "weight shape": "ValueError",
    "negative weight": "ValueError",
    "weight not finite": "ValueError",
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_on_one_rank_raises_on_all(pool: WorkerPool, kind: str) -> None:
    """The same class and text everywhere, nothing enqueued, and the next step as if it had never happened."""
    for bad_rank in range(pool.world_size):
        outcomes = pool(gather_cases.bad_input, "smooth_ap", kind, bad_rank)
        assert len({(name, text) for name, text, _, _ in outcomes}) == 1
        name, text, _, _ = outcomes[0]
        assert name == BAD[kind]
        assert text.startswith(f"SmoothAPLoss failed on rank {bad_rank}: ")
        assert "expected" in text
        assert "got" in text
        assert all(value == 0.0 and gradient == 0.0 for _, _, value, gradient in outcomes)


@pytest.mark.parametrize("loss", ["recall", "pauc_trapezoid", "pauc_pairwise"])
def test_bad_input_to_the_other_pooled_losses(pool_of_two: WorkerPool, loss: str) -> None:
    for name, text, value, gradient in pool_of_two(gather_cases.bad_input, loss, "class out of range", 1):
        assert name == "ValueError"
        assert "failed on rank 1: targets: expected class indices in [0, 3)" in text
        assert value == gradient == 0.0


DISAGREEMENTS = {
    "weights": ("ValueError", "tensors: "),
    "mask": ("ValueError", "tensors: "),
    "dtype": ("ValueError", "float64 (N, 2) with gradient"),
    "no gradient": ("ValueError", "'float32 (N, 2) on cpu'"),
    "number of tensors": ("ValueError", "None"),
    "trailing shape": ("ValueError", "(N, 1)"),
    "another loss": ("RuntimeError", "call: SmoothAPLoss on rank"),
    "other function": ("RuntimeError", "call: all_gather_no_grad on rank"),
    "arguments": ("RuntimeError", "reduction='sum'"),
    "temperature": ("RuntimeError", "temperature: 0.5 on rank"),
    "train and eval": ("RuntimeError", "training: True on rank"),
    "queue": ("RuntimeError", "queue: "),
    "queue contents": ("RuntimeError", "queue: contents "),
    "negative count": ("ValueError", "failed on rank 1: count: expected a number >= 0, got -1.0"),
    "focal weights": ("ValueError", "sample_weight: False on rank"),
    "focal targets": ("ValueError", "failed on rank 1: targets: expected class indices in [0, 2)"),
}


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_disagree_are_named(pool: WorkerPool, kind: str) -> None:
    outcomes = pool(gather_cases.disagreement, kind)
    assert len(set(outcomes)) == 1, outcomes
    name, text = outcomes[0]
    expected_name, fragment = DISAGREEMENTS[kind]
    assert name == expected_name
    assert fragment in text
    assert "rank 1" in text


def test_a_loss_inside_checkpoint_is_refused(pool_of_two: WorkerPool) -> None:
    """The non-re-entrant form runs the forward twice, once in backward; so does the re-entrant one."""
    for reentrant in (False, True):
        for name, text in pool_of_two(gather_cases.inside_checkpoint, reentrant):
            assert name == "RuntimeError"
            assert "call the loss outside checkpoint" in text


def test_assert_synchronized(pool: WorkerPool) -> None:
    assert all(outcome == ("none", "") for outcome in pool(gather_cases.synchronized, False))
    outcomes = pool(gather_cases.synchronized, True)
    assert len(set(outcomes)) == 1
    name, text = outcomes[0]
    assert name == "RuntimeError"
    assert "on rank 1" in text
    assert "reset_queue()" in text
