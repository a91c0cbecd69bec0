"""DeferredMean: sums of gradients divided once, against one process with all the rows."""

from __future__ import annotations

import deferred_cases as cases
import pytest
import torch
from accumulate_cases import Model, make_batch, num_valid, sum_loss
from test_accumulate import LIMITS, assert_exact
from workers import WorkerPool, get_pool

from fullrank import DeferredMean

each_dtype = pytest.mark.parametrize("dtype", LIMITS)
KINDS = ["plain", "ddp", "fsdp", "summed"]


@each_dtype
@pytest.mark.parametrize("num_calls", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_loss_and_count_equal_one_process(pool: WorkerPool, kind: str, num_calls: int, dtype: str) -> None:
    """Uneven tokens, a rank without any, a step without any; one object for all steps."""
    for errors in pool(cases.exactness, kind, num_calls, dtype):
        assert_exact(errors, dtype)
        assert errors["none"] == 0.0


@each_dtype
@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_hsdp(pool_of_four: WorkerPool, num_calls: int, dtype: str) -> None:
    for errors in pool_of_four(cases.exactness, "hsdp", num_calls, dtype):
        assert_exact(errors, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_terms_has_zero_gradients_though_losses_are_nan(pool_of_two: WorkerPool, kind: str) -> None:
    assert pool_of_two(cases.nothing_but_nan, kind, "float32") == [0.0, 0.0]


@each_dtype
def test_weights_may_take_the_place_of_counts(pool: WorkerPool, dtype: str) -> None:
    for kind in ("ddp", "plain"):
        assert max(pool(cases.weighted, kind, dtype)) <= LIMITS[dtype]


@pytest.mark.parametrize(("kind", "world_size"), [("plain", 2), ("ddp", 2), ("fsdp", 3), ("hsdp", 4)])
def test_gradients_stay_the_same_objects_and_can_be_clipped(kind: str, world_size: int) -> None:
    for found in get_pool(world_size)(cases.objects, kind):
        assert found.pop("same")
        assert found.pop("layouts")
        assert_exact(found, "float64")


@each_dtype
def test_parameters_that_fsdp_left_unsharded(pool_of_two: WorkerPool, dtype: str) -> None:
    assert max(pool_of_two(cases.left_unsharded, dtype)) <= LIMITS[dtype]


@pytest.mark.parametrize(
    ("kind", "name", "times"),
    [
        ("ddp", "allreduce_.default", 1),
        ("fsdp", "_reduce_scatter_base_.default", 2),
        ("plain", "allreduce_.default", 0),
    ],
)
def test_gradients_are_reduced_once_per_call(pool_of_two: WorkerPool, kind: str, name: str, times: int) -> None:
    """DDP has one bucket here, FSDP2 two groups of parameters. A plain model is reduced in finish, in one bucket."""
    header = "_allgather_base_.default"
    for *calls, finish in pool_of_two(cases.collectives, kind):
        assert [counts.get(name, 0) for counts in calls] == [times, times]
        if kind != "fsdp":  # which gathers its parameters with the same collective
            assert [counts[header] for counts in calls] == [1, 1]
        # Two headers; the header and the words of the sum.
        assert finish == ({"allreduce_.default": 1, header: 4} if kind == "plain" else {header: 1})


@each_dtype
@pytest.mark.parametrize("way", ["mean of means", "count alone", "divided before the sum", "second sync"])
def test_what_is_done_instead_is_wrong(pool: WorkerPool, way: str, dtype: str) -> None:
    assert min(pool(cases.naive, way, dtype)) > 0.05


@each_dtype
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("way", ["plain", "ignored by FSDP2", "ignored by FSDP2, summed", "sharded, summed"])
def test_experts(way: str, world_size: int, dtype: str) -> None:
    """Dense parameters over all ranks, experts over their copies; without a copy there is nothing to add."""
    for errors in get_pool(world_size)(cases.expert_errors, way, dtype):
        assert max(errors) <= LIMITS[dtype]


@each_dtype
def test_context_parallel(pool_of_four: WorkerPool, dtype: str) -> None:
    for errors in pool_of_four(cases.context_parallel_errors, dtype):
        assert_exact(errors, dtype)


# What is raised when one rank of two passes this in the second call: class, and a part of the text.
CALLS = {
    "vector": ("ValueError", "DeferredMean.backward failed on rank 1: loss_sum: expected one element"),
    "number": ("TypeError", "loss_sum: expected a floating-point tensor, got 3.0."),
    "no graph": ("ValueError", "loss_sum: expected a loss with a graph"),
    "negative count": ("ValueError", "failed on rank 1: n: expected a finite number >= 0, got -1.0."),
    "negative count in a tensor": ("ValueError", "failed on rank 1: n: expected a finite number >= 0, got -1.0."),
    "count that is NaN": ("ValueError", "failed on rank 1: n: expected a finite number >= 0, got nan."),
    "count that is text": ("TypeError", "n: expected a number or a tensor of one element, got '3'."),
    "several counts": ("ValueError", "n: expected one element"),
    "finish instead": ("RuntimeError", "call: 'DeferredMean.backward' on rank 0, 'DeferredMean.finish' on rank 1."),
}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("case", CALLS)
def test_a_bad_call_raises_on_every_rank_and_the_step_goes_on(pool_of_two: WorkerPool, kind: str, case: str) -> None:
    outcomes = pool_of_two(cases.spoil_call, kind, case, 1)
    assert {(outcome.kind, outcome.text) for outcome in outcomes} == {outcomes[0][:2]}
    kind, text = CALLS[case]
    assert outcomes[0].kind == kind
    assert text.replace("'", "") in outcomes[0].text.replace("'", "")
    assert max(outcome.error for outcome in outcomes) <= 1e-12


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no_sync", "gradients that every backward reduces, got no_sync"),
        ("old gradients", "no gradient before the first backward of a step, got gradients with"),
        ("newer object", "expected one DeferredMean, got a newer one"),
    ],
)
def test_a_step_that_cannot_begin(pool_of_two: WorkerPool, kind: str, case: str, text: str) -> None:
    for outcome in pool_of_two(cases.spoil_call_everywhere, kind, case):
        assert outcome.kind == "RuntimeError"
        assert text in outcome.text
        assert outcome.error <= 1e-12


def test_parameters_that_change_after_an_error_are_seen(pool_of_two: WorkerPool) -> None:
    assert max(pool_of_two(cases.parameters_after_an_error, "ours")) <= 1e-12
    assert min(pool_of_two(cases.parameters_after_an_error, "no reshard")) > 0.05


def test_an_unequal_window_after_an_error(pool_of_two: WorkerPool) -> None:
    """DDP has prepared a reduction for the refused call, and would make it in the first backward of the window."""
    assert max(pool_of_two(cases.window_after_an_error)) <= 1e-12


FINISHES = {
    "text": ("TypeError", "sync_groups: expected a list of groups and of (parameters, group) pairs, got 'all'."),
    "one group": ("TypeError", "Pass [group] for one group."),
    "a module": ("TypeError", "sync_groups[0]: expected a ProcessGroup, a DeviceMesh or None"),
    "another model's": ("ValueError", "weight in sync_groups[0]: expected a parameter of the model"),
    "no parameter": ("TypeError", "sync_groups[0]: parameter 0: expected a parameter"),
    "used up": ("ValueError", "sync_groups[0]: parameters: expected parameters, got an iterator with none."),
    "twice": (
        "ValueError",
        "in sync_groups[1]: expected one sum over each group, got a second sum over the same ranks",
    ),
    "nothing": ("ValueError", "sync_groups: 1 on rank 0, 0 on rank 1."),
    "others": ("ValueError", "number of parameters: 5 on rank 0, 4 on rank 1."),
}


@pytest.mark.parametrize("case", FINISHES)
def test_a_bad_finish_raises_on_every_rank_and_may_be_repeated(pool_of_two: WorkerPool, case: str) -> None:
    outcomes = pool_of_two(cases.spoil_finish, case, 1)
    assert {(outcome.kind, outcome.text) for outcome in outcomes} == {outcomes[0][:2]}
    kind, text = FINISHES[case]
    assert outcomes[0].kind == kind
    assert text in outcomes[0].text
    assert max(outcome.error for outcome in outcomes) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_sync_raises(pool_of_two: WorkerPool, kind: str) -> None:
    for outcome in pool_of_two(cases.second_sync, kind):
        assert outcome.kind == "RuntimeError"
        assert "expected a backward since the last finish, got none. A second sync" in outcome.text
        assert outcome.error <= 1e-12


def test_a_reduction_that_changes_within_a_step(pool_of_two: WorkerPool) -> None:
    for outcome in pool_of_two(cases.changed_reduction):
        assert outcome.kind == "RuntimeError"
        assert "got 1 after 2. Call sum_gradients_ before the first backward" in outcome.text
        assert outcome.error <= 1e-12


def test_parameters_that_no_wrapper_reduces(pool_of_two: WorkerPool) -> None:
    for outcome in pool_of_two(cases.forgotten_parameters):
        assert outcome.kind == "ValueError"
        assert "module.up.weight, module.up.bias in neither. Pass (parameters, group)" in outcome.text
        assert outcome.error <= 1e-12


def test_one_object_for_each_model(pool_of_two: WorkerPool) -> None:
    for first, second, after_finish, after_the_end in pool_of_two(cases.owners):
        assert first == after_finish == after_the_end == "nothing"
        assert "got one with 1 calls of backward that are not finished. Call finish() or discard()" in second


def test_one_process() -> None:
    model, reference = Model(torch.float64), Model(torch.float64)
    deferred, batches = DeferredMean(model), [make_batch(0, index) for index in range(3)]
    with pytest.raises(RuntimeError, match="expected a step that is finished"):
        deferred.mean_loss()
    with pytest.raises(RuntimeError, match=r"^gradients: expected a backward since the last finish, got none"):
        deferred.finish()
    for batch in batches:
        deferred.backward(sum_loss(model, batch), num_valid(batch))
    with pytest.raises(ValueError, match=r"^n: expected a finite number >= 0, got inf"):
        deferred.backward(sum_loss(model, batches[0]), float("inf"))
    total = sum(map(num_valid, batches))
    assert deferred.finish([None]) == total
    expected = torch.stack([sum_loss(reference, batch) for batch in batches]).sum() / total
    expected.backward()
    torch.testing.assert_close(deferred.mean_loss(), expected.detach(), rtol=1e-14, atol=0)
    for one, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("model", [None, "model", torch.ones(2)])
def test_no_model(model: object) -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
        DeferredMean(model)


def test_the_loss_of_half_precision_is_reported_in_float32() -> None:
    model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    deferred = DeferredMean(model)
    deferred.backward(model(torch.ones(3, 2, dtype=torch.bfloat16)).sum(), 3)
    deferred.finish()
    assert deferred.mean_loss().dtype == torch.float32
    assert model.weight.grad.dtype == torch.bfloat16
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
