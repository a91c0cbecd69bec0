"""Accumulation of summed losses: micro-batches and ranks against one process with all the rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import accumulate_cases as cases
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from workers import WorkerPool, get_pool

import fullrank

# float64: rounding of sums in another order. float32: the model's own products, added up over ranks instead of rows.
LIMITS = {"float64": 1e-12, "float32": 2e-6}
SYNCS = {
    "plain": ["last", "each"],
    "ddp": ["last", "each"],
    "fsdp": ["last", "each"],
    "hsdp": ["last", "each", "shard"],
}
WRAPPED = [
    (world_size, kind, sync)
    for world_size in (2, 3, 4)
    for kind, syncs in SYNCS.items()
    for sync in syncs
    if kind != "hsdp" or world_size == 4
]

each_dtype = pytest.mark.parametrize("dtype", LIMITS)


def assert_exact(errors: dict[str, float], dtype: str) -> None:
    """Assert that every error is within the limit, naming those that are not."""
    assert errors
    assert {name: value for name, value in errors.items() if not value <= LIMITS[dtype]} == {}


@each_dtype
@pytest.mark.parametrize(("world_size", "kind", "sync"), WRAPPED)
def test_gradient_and_loss_equal_one_process(world_size: int, kind: str, sync: str, dtype: str) -> None:
    """Uneven tokens, a rank without any, a window without any, windows of three and one, unequal numbers of them."""
    for errors in get_pool(world_size)(cases.exactness, kind, sync, dtype):
        assert_exact(errors, dtype)
        assert errors["none"] == 0.0
        assert ("unequal" in errors) == (kind in ("plain", "ddp") and sync == "last")


@each_dtype
def test_replicate_may_have_unequal_numbers_of_micro_batches(pool_of_two: WorkerPool, dtype: str) -> None:
    for errors in pool_of_two(cases.exactness, "replicate", "last", dtype):
        assert_exact(errors, dtype)
        assert "unequal" in errors


@each_dtype
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "plain"])
def test_every_form_of_count_and_step(pool: WorkerPool, kind: str, dtype: str) -> None:
    for errors in pool(cases.forms, kind, dtype):
        assert_exact(errors, dtype)


@each_dtype
def test_weights_may_take_the_place_of_counts(pool: WorkerPool, dtype: str) -> None:
    for kind in ("ddp", "fsdp"):
        assert max(pool(cases.weighted, kind, dtype)) <= LIMITS[dtype]


@each_dtype
@pytest.mark.parametrize("way", ["mean of means", "fixed length", "unshifted count"])
def test_what_is_widely_done_is_wrong(pool: WorkerPool, way: str, dtype: str) -> None:
    assert min(pool(cases.naive, way, dtype)) > 0.05


@each_dtype
def test_grad_scaler(pool_of_two: WorkerPool, dtype: str) -> None:
    for kind in ("ddp", "fsdp"):
        for error, ratio in pool_of_two(cases.scaler_errors, kind, dtype):
            assert error <= LIMITS[dtype]
            assert abs(ratio / 2.0**12 - 1) <= LIMITS[dtype]  # it was scaled before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_as_good_as_one_process(pool: WorkerPool, dtype: str) -> None:
    """Against float64, the error may be that of one process in the same dtype, and rounding of the sums over ranks."""
    for accumulated, alone in pool(cases.half_errors, dtype):
        assert accumulated <= 2 * alone + torch.finfo(getattr(torch, dtype)).eps


@each_dtype
def test_a_pooled_loss_on_the_same_model(pool: WorkerPool, dtype: str) -> None:
    """Accumulation leaves the wrapper's reduction alone; after sum_gradients_ both follow the sum."""
    for errors in pool(cases.summed_then_pooled, dtype):
        assert_exact(errors, dtype)


@each_dtype
@pytest.mark.parametrize(("kind", "sync"), [("ddp", "last"), ("fsdp", "last"), ("fsdp", "each"), ("plain", "last")])
def test_discarded_window_leaves_nothing(pool: WorkerPool, kind: str, sync: str, dtype: str) -> None:
    for errors in pool(cases.aborted, kind, sync, dtype, True):
        assert max(errors) <= LIMITS[dtype]


@each_dtype
@pytest.mark.parametrize("sync", ["last", "shard"])
def test_discarded_window_leaves_nothing_under_hsdp(pool_of_four: WorkerPool, sync: str, dtype: str) -> None:
    for errors in pool_of_four(cases.aborted, "hsdp", sync, dtype, True):
        assert max(errors) <= LIMITS[dtype]
    for errors in pool_of_four(cases.aborted, "hsdp", sync, dtype, False):
        assert min(errors) > 0.1


def test_discarded_window_of_unequal_length_leaves_nothing(pool: WorkerPool) -> None:
    found = pool(cases.aborted_in_different_places)
    for errors, _ in found:
        assert max(errors) <= LIMITS["float64"]
    assert [stood for _, stood in found] == [True, *[False] * (len(found) - 1)]  # the next forwards would not have met


@each_dtype
def test_zero_grad_does_not_discard(pool_of_two: WorkerPool, dtype: str) -> None:
    for errors in pool_of_two(cases.aborted, "fsdp", "last", dtype, False):
        assert min(errors) > 0.1


@pytest.mark.parametrize(
    ("kind", "way"), [("ddp", "left"), ("fsdp", "left"), ("ddp", "raised"), ("fsdp", "failed and kept")]
)
def test_switches_are_restored(pool_of_two: WorkerPool, kind: str, way: str) -> None:
    assert pool_of_two(cases.leaving, kind, way) == [[False, True]] * 2


@each_dtype
def test_unequal_numbers_after_a_stray_forward(pool: WorkerPool, dtype: str) -> None:
    assert max(pool(cases.unequal_after_a_stray_forward, dtype)) <= LIMITS[dtype]


REDUCTIONS = {"ddp": "allreduce_.default", "fsdp": "_reduce_scatter_base_.default"}


@pytest.mark.parametrize(("kind", "num_groups"), [("ddp", 1), ("fsdp", 2)])
def test_gradients_are_reduced_once_per_window(pool: WorkerPool, kind: str, num_groups: int) -> None:
    """DDP reduces one bucket here, FSDP2 two groups of parameters. Headers: two per window, none in between."""
    name, headers = REDUCTIONS[kind], "_allgather_base_.default"
    for whole, before_last in pool(cases.collectives, kind, "last"):
        assert whole[name] == num_groups
        assert name not in before_last
        if kind == "ddp":
            assert whole == {name: 1, headers: 2}
            assert before_last == {headers: 1}
    for whole, before_last in pool(cases.collectives, kind, "each"):
        assert whole[name] == 3 * num_groups
        assert before_last[name] == 2 * num_groups


@pytest.mark.parametrize(("sync", "scatters", "reductions"), [("last", 2, 2), ("shard", 6, 2), ("each", 6, 6)])
def test_hsdp_reduces_where_it_is_told(pool_of_four: WorkerPool, sync: str, scatters: int, reductions: int) -> None:
    for whole, _ in pool_of_four(cases.collectives, "hsdp", sync):
        assert whole["_reduce_scatter_base_.default"] == scatters
        assert whole["allreduce_.default"] == reductions


@each_dtype
@pytest.mark.parametrize("world_size", [2, 4])
def test_experts(world_size: int, dtype: str) -> None:
    """Two experts, each on one rank of two: what a token sends there comes back to it, gradients too."""
    pool = get_pool(world_size)
    for errors in pool(cases.expert_errors, "sum", dtype):
        assert max(errors) <= LIMITS[dtype]
    for text in pool(cases.expert_errors, "mean", dtype):
        assert f"got divisors [{world_size // 2}.0, {world_size}.0]. Call sum_gradients_(model) once" in text


@each_dtype
def test_number_of_expert_ranks_is_no_divisor(pool_of_four: WorkerPool, dtype: str) -> None:
    for dense, expert in pool_of_four(cases.expert_errors, "ep_size", dtype):
        assert dense <= LIMITS[dtype]
        assert abs(expert - 1) <= LIMITS[dtype]  # twice the gradient


@each_dtype
def test_tensor_parallel_copies_count_once(pool_of_four: WorkerPool, dtype: str) -> None:
    for errors in pool_of_four(cases.tensor_parallel_errors, dtype):
        wrong = {name: errors.pop(name) for name in ("world", "world loss")}
        assert_exact(errors, dtype)
        assert abs(wrong["world"] - 0.5) <= LIMITS[dtype]  # every token was counted twice, every loss added twice
        assert wrong["world loss"] <= LIMITS[dtype]


@each_dtype
@pytest.mark.parametrize("folded", [True, False], ids=["folded", "added"])
def test_context_parallel(pool_of_four: WorkerPool, folded: bool, dtype: str) -> None:
    assert max(pool_of_four(cases.context_parallel_error, dtype, folded)) <= LIMITS[dtype]


@each_dtype
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipeline_schedules(schedule: str, world_size: int, dtype: str) -> None:
    """The schedule runs the micro-batches; its loss function multiplies by m / N, and it must not divide again."""
    pool = get_pool(world_size)
    assert max(pool(cases.pipeline_error, schedule, dtype, "loss")) <= LIMITS[dtype]
    for error in pool(cases.pipeline_error, schedule, dtype, "schedule"):
        assert abs(error - 2 / 3) <= LIMITS[dtype]  # a third of the gradient: divided by the three micro-batches


# What is raised when one rank of two passes this: class, and a part of the text.
OPENINGS = {
    "generator": (
        "TypeError",
        "micro-batches, with a length, got a list_iterator. The window is read before its first",
    ),
    "one mapping": ("TypeError", "Pass [batch] for one batch."),
    "no micro-batch": ("ValueError", "expected at least one micro-batch on every rank, got none."),
    "missing key": ("ValueError", "count of micro-batch 0: micro-batch: expected one of the keys 'labels'"),
    "float labels": ("TypeError", "labels: expected integers"),
    "list of labels": ("TypeError", "labels: expected a plain torch.Tensor"),
    "negative count": ("ValueError", "count of micro-batch 0: expected a finite number >= 0, got -1."),
    "count with several elements": ("ValueError", "count of micro-batch 0: expected one element"),
    "count that fails": ("RuntimeError", "count of micro-batch 0: KeyError: 'length'"),
    "count of no kind": ("TypeError", "count: expected a function of a micro-batch, count_valid_tokens, or"),
    "positional count": (
        "TypeError",
        "count: expected the keywords key, shift, ignore_index only, got positional ones.",
    ),
    "group of the count": ("TypeError", "only, got group. The ranks are given by accumulate(..., group=...)."),
    "local count": ("ValueError", "count: 5 over all ranks on rank 0, 6 over all ranks on rank 1"),
    "another rule": ("ValueError", "shift=True, ignore_index=-100) on rank 0, TokenRule(key='labels', shift=False"),
    "another sync": ("ValueError", "sync: 'last' on rank 0, 'each' on rank 1"),
    "unknown sync": ("ValueError", "sync: expected one of 'last', 'each', 'shard', got 'never'."),
    "another multiplier": ("ValueError", "on rank 0, 7.0 on rank 1"),
    "bad multiplier": ("ValueError", "multiplier: expected a finite number > 0, got 0.0."),
    "unequal, each": (
        "ValueError",
        "micro_batches: expected the same number on every rank, got 3 on rank 0, 2 on rank 1.",
    ),
}
LOOPS = {
    "vector in 0": ("ValueError", "on rank 1: loss of micro-batch 0: expected one element"),
    "vector in 2": ("ValueError", "on rank 1: loss of micro-batch 2: expected one element"),
    "scaled vector in 1": ("ValueError", "on rank 1: loss of micro-batch 1: expected one element"),
    "scaled vector in 2": ("ValueError", "on rank 1: loss of micro-batch 2: expected one element"),
    "number in 2": ("TypeError", "on rank 1: loss of micro-batch 2: expected a floating-point tensor, got 3.0."),
    "no graph in 2": ("ValueError", "on rank 1: loss of micro-batch 2: expected a loss with a graph"),
    "no call in 2": ("RuntimeError", "on rank 1: micro-batch 2: expected one backward, got 0."),
    "two calls in 0": (
        "RuntimeError",
        "on rank 1: step of micro-batch 0: expected one call of backward or scale, got 2.",
    ),
    "negative items in 1": (
        "ValueError",
        "on rank 1: num_items of micro-batch 1: expected a finite number >= 0, got -1.",
    ),
    "negative items in a tensor in 1": ("ValueError", "on rank 1: num_items: expected a finite number >= 0, got -1."),
    "items that are text in 0": ("TypeError", "on rank 1: num_items of micro-batch 0: expected a number or a tensor"),
    "too many items in 0": ("ValueError", "num_items: expected a sum over the window equal to its count, "),
}
# Without a graph there is no backward to keep step with where the wrapper communicates in every one.
LOCAL_LOOPS = {
    "number in 0": ("TypeError", "on rank 1: loss of micro-batch 0: expected a floating-point tensor, got 3.0."),
    "no graph in 1": ("ValueError", "on rank 1: loss of micro-batch 1: expected a loss with a graph"),
    "no call in 0": ("RuntimeError", "on rank 1: micro-batch 0: expected one backward, got 0."),
    "scale alone in 1": ("RuntimeError", "on rank 1: micro-batch 1: expected one backward, got 0."),
}


def assert_refused(outcomes: list[cases.Outcome], name: str, text: str) -> None:
    """Assert the same error on every rank, nothing left behind, and that the next window is exact."""
    for outcome in outcomes:
        assert outcome.kind == name, outcome
        assert text in outcome.text
        assert outcome.text == outcomes[0].text
        assert outcome.untouched
        assert outcome.restored
        assert outcome.next_error <= LIMITS["float64"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "plain"])
@pytest.mark.parametrize("case", OPENINGS)
def test_bad_arguments_on_one_rank(pool_of_two: WorkerPool, case: str, kind: str) -> None:
    assert_refused(pool_of_two(cases.spoil, kind, case, 1), *OPENINGS[case])


@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_shard_needs_fsdp(pool_of_two: WorkerPool, kind: str) -> None:
    text = "sync: expected a model with FSDP2 modules for 'shard'"
    assert_refused(pool_of_two(cases.spoil, kind, "shard without FSDP", 1), "ValueError", text)


def test_unequal_numbers_are_refused_where_they_would_hang(pool: WorkerPool) -> None:
    text = "2 on rank 1"
    assert_refused(pool(cases.spoil, "fsdp", "unequal", 1), "ValueError", text)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "plain"])
@pytest.mark.parametrize("case", LOOPS)
def test_bad_use_of_the_step_on_one_rank(pool_of_two: WorkerPool, case: str, kind: str) -> None:
    assert_refused(pool_of_two(cases.spoil, kind, case, 1), *LOOPS[case])


@pytest.mark.parametrize("kind", ["ddp", "plain"])
@pytest.mark.parametrize("case", LOCAL_LOOPS)
def test_missing_backward_on_one_rank(pool_of_two: WorkerPool, case: str, kind: str) -> None:
    assert_refused(pool_of_two(cases.spoil, kind, case, 1), *LOCAL_LOOPS[case])


@pytest.mark.parametrize("case", LOCAL_LOOPS)
def test_missing_backward_under_fsdp_raises_at_once(pool_of_two: WorkerPool, case: str) -> None:
    """Every rank makes the mistake here: one alone leaves the others in a backward that it cannot run."""
    name, text = LOCAL_LOOPS[case]
    assert_refused(pool_of_two(cases.spoil, "fsdp", case, -1), name, text.removeprefix("on rank 1: "))


def make_rows() -> tuple[torch.nn.Linear, list[torch.Tensor]]:
    """Return a model and three micro-batches of uneven size."""
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    return model, [torch.randn(size, 2, dtype=torch.float64, generator=generator) for size in (3, 1, 5)]


def test_one_process_needs_no_process_group() -> None:
    model, rows = make_rows()
    for step, batch in fullrank.accumulate(model, rows, len):
        step.backward(model(batch).square().sum())
    found = model.weight.grad
    model.zero_grad()
    loss = model(torch.cat(rows)).square().mean()
    loss.backward()
    torch.testing.assert_close(found, model.weight.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(step.mean_loss(), loss.detach(), rtol=1e-12, atol=0)


def test_one_process_raises_at_once() -> None:
    model, rows = make_rows()
    model.weight.grad = torch.ones_like(model.weight)
    for step, batch in fullrank.accumulate(model, rows, len):
        with pytest.raises(ValueError, match=r"loss of micro-batch 0: expected one element"):
            step.backward(model(batch))
    assert bool((model.weight.grad == 1).all())  # nothing was added before, so nothing is taken away
    with pytest.raises(RuntimeError, match="mean_loss"):
        step.mean_loss()


@pytest.mark.parametrize("place", [1, 2])
def test_one_process_discards_what_it_has_added(place: int) -> None:
    model, rows = make_rows()

    def run() -> None:
        for index, (step, batch) in enumerate(fullrank.accumulate(model, rows, len)):
            step.backward(model(batch).sum() if index < place else model(batch).detach().sum())

    with pytest.raises(ValueError, match=f"loss of micro-batch {place}: expected a loss with a graph"):
        run()
    assert model.weight.grad is None


class HostReads(TorchDispatchMode):
    """Context that counts the reads of a tensor by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def no_synchronization(device: torch.device, is_forbidden: bool) -> Iterator[None]:
    """Let CUDA raise when the host waits for it."""
    if device.type == "cuda" and is_forbidden:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("items", [None, "tensor", "number"])
def test_no_micro_batch_but_the_last_is_waited_for(device: torch.device, items: str | None) -> None:
    model, rows = make_rows()
    model, rows = model.to(device), [row.to(device) for row in rows]
    reads = HostReads()
    loop = fullrank.accumulate(model, rows, lambda batch: torch.full((), len(batch), device=device))
    for index, (step, batch) in enumerate(loop):
        loss = model(batch).square().sum() / (len(batch) if items else 1)
        number = {"tensor": torch.full((), len(batch), device=device), "number": len(batch)}.get(items)
        with reads, no_synchronization(device, index < len(rows) - 1):
            step.backward(loss, num_items=number)
    assert reads.count == 0
    with reads:
        float(step.mean_loss())
    assert reads.count == 1  # it does count


def test_mean_loss_is_for_ended_windows() -> None:
    model, rows = make_rows()
    for step, batch in fullrank.accumulate(model, rows, len):
        step.backward(model(batch).sum())
        with pytest.raises(RuntimeError, match="a window that has ended, got one that has not"):
            step.mean_loss()
        break
    with pytest.raises(RuntimeError, match="a window that has ended"):
        step.mean_loss()
    with pytest.raises(RuntimeError, match="none: the loop was left"):
        step.backward(model(rows[0]).sum())


def test_second_backward_through_one_scaled_loss_is_seen() -> None:
    model, rows = make_rows()

    def run() -> None:
        for step, batch in fullrank.accumulate(model, rows, len):
            scaled = step.scale(model(batch).sum())
            scaled.backward(retain_graph=True)
            scaled.backward()

    with pytest.raises(RuntimeError, match="micro-batch 0: expected one backward, got 2"):
        run()


@pytest.mark.parametrize("items", [0, torch.tensor(0)], ids=["number", "tensor"])
def test_mean_over_nothing_counts_as_nothing(items: object) -> None:
    model, rows = make_rows()
    for step, batch in fullrank.accumulate(model, [rows[0], rows[0][:0]], len):
        loss = torch.nn.functional.mse_loss(model(batch), torch.zeros(len(batch), 1, dtype=torch.float64))
        assert bool(loss.isnan()) == (len(batch) == 0)
        step.backward(loss, num_items=len(batch) or items)
    found = model.weight.grad
    model.zero_grad()
    model(rows[0]).square().mean().backward()
    torch.testing.assert_close(found, model.weight.grad, rtol=1e-12, atol=0)
    assert bool(step.mean_loss().isfinite())


def test_nan_is_never_hidden_where_there_are_terms() -> None:
    model, rows = make_rows()
    for step, batch in fullrank.accumulate(model, rows, len):
        step.backward(model(batch).sum() * float("nan"))
    assert bool(step.mean_loss().isnan())
    assert bool(model.weight.grad.isnan().all())


def test_windows() -> None:
    assert list(fullrank.windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(fullrank.windows(iter(range(4)), 2)) == [[0, 1], [2, 3]]
    assert list(fullrank.windows([], 2)) == []
    taken = []
    loader = (taken.append(index) or index for index in range(9))
    assert next(fullrank.windows(loader, 2)) == [0, 1]
    assert taken == [0, 1]  # it never reads ahead of the window


@pytest.mark.parametrize(
    ("loader", "size", "kind", "text"),
    [
        ([1], 0, ValueError, "size: expected an int >= 1, got 0."),
        ([1], 2.0, TypeError, "size: expected an int, got 2.0."),
        ([1], True, TypeError, "size: expected an int, got True."),
        (7, 1, TypeError, "loader: expected an iterable of micro-batches, got 7."),
    ],
)
def test_windows_checks_at_the_call(loader: object, size: object, kind: type, text: str) -> None:
    with pytest.raises(kind) as raised:
        fullrank.windows(loader, size)
    assert str(raised.value).startswith(text)


class Holder:
    """A micro-batch with attributes."""

    labels = None
    target_tokens = torch.tensor([[1, 2, -100], [-100, 4, 5]])


def test_count_valid_tokens() -> None:
    labels = torch.tensor([[1, 2, -100], [-100, 4, 5]])
    keys = ("labels", "target_tokens")
    assert fullrank.count_valid_tokens([{"labels": labels}]) == 3
    assert fullrank.count_valid_tokens([{"labels": labels}], shift=False) == 4
    assert fullrank.count_valid_tokens([{"labels": labels}, {"labels": labels[0]}], ignore_index=2) == 3 + 1
    assert fullrank.count_valid_tokens([{"other": labels}], key="other") == 3
    assert fullrank.count_valid_tokens([{"labels": labels, "target_tokens": labels[:1]}, Holder()], key=keys) == 6
    assert fullrank.count_valid_tokens([{"target_tokens": labels, "labels": None}], key=keys) == 3
    assert fullrank.count_valid_tokens([]) == 0
    assert fullrank.count_valid_tokens([{"labels": labels[:, :0]}]) == 0
    with pytest.raises(TypeError, match="key: expected a string or a tuple of strings, got 3"):
        fullrank.count_valid_tokens([{"labels": labels}], key=3)
    with pytest.raises(TypeError, match="shift: expected True or False, got 1"):
        fullrank.count_valid_tokens([{"labels": labels}], shift=1)
    with pytest.raises(ValueError, match="Pass shift=False for single labels"):
        fullrank.count_valid_tokens([{"labels": labels[0, 0]}])


def test_count_valid_tokens_over_ranks(pool: WorkerPool) -> None:
    for outcome in pool(cases.counts):
        assert outcome["found"] == outcome["expected"]
        assert outcome["subgroup"] == outcome["expected subgroup"]
        assert outcome["bad"] == ("TypeError", pool.world_size - 1)
        assert outcome["other rule"][0] == "ValueError"
