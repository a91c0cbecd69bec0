"""No rank is left waiting: what one rank does wrong, every rank raises, and the next step works."""

from __future__ import annotations

import gather_cases
import pytest
from workers import WorkerPool

import fullrank

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
    "train and eval": ("RuntimeError", "enqueues rows: True on rank"),
    "queue": ("RuntimeError", "queue: "),
    "queue contents": ("RuntimeError", "queue: contents "),
    "queue contents in eval mode": ("RuntimeError", "queue: contents "),
    "draws": ("RuntimeError", "draws: 0 on rank"),
    "schedule": ("RuntimeError", "schedule: 0.25 on rank"),
    "focal gradient_reduction": ("RuntimeError", "gradient_reduction: 'mean' on rank"),
    "nonsense in gradient_reduction": ("ValueError", "failed on rank 1: gradient_reduction: expected 'mean', 'sum' or"),
    "focal classes": ("ValueError", "classes: "),
    "focal arguments": ("RuntimeError", "gamma=1.0"),
    "gather backward": ("ValueError", "backward: 'local' on rank"),
    "global_mean gradient_reduction": ("RuntimeError", "gradient_reduction: 'mean' on rank"),
    "sparse": ("TypeError", "failed on rank 1: tensor 0: expected a dense tensor"),
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
