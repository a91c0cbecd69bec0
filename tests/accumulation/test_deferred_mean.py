"""DeferredMean: sums of gradients divided once, against one process with all the rows."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import Batch, all_batches, halves, make_batch, make_window, num_valid, one_process, sum_loss
from meshes import init_device_mesh
from on_ranks import common_error, on_ranks, slow_but
from subjects import Adapted, Model, by_hand, error, gradient, wrap
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from verbs import collect
from workers import error_of

from fullrank import DeferredMean, accumulate, all_reduce_grads_, maybe_no_sync, sum_gradients_


def sync_groups(kind: str) -> list[Any]:
    return [dist.group.WORLD] if kind == "plain" else []


def run_step(deferred: DeferredMean, model: Any, batches: Iterable[Batch], groups: Iterable[Any] = ()) -> Any:
    return collect(deferred, model, batches).finish(sync_groups=groups)


KINDS = ["plain", "ddp", "fsdp2", "summed"]


@pytest.mark.parametrize("kind", slow_but(["ddp"], KINDS))
@on_ranks(2)
def test_a_call_without_terms_adds_nothing(rank: int, kind: str) -> None:
    """One rank passes NaN for 0 terms: of a mean over nothing, alone, times 0, or by a window; the rest counts."""
    model, batches = wrap(Model(), kind), make_window("full", rank)
    deferred, (expected, mean) = DeferredMean(model, by_hand(model)), one_process(Model(), all_batches("full"))
    nothing: Any = [
        lambda loss: (loss * torch.nan, 0),
        lambda loss: (loss / torch.zeros(()), torch.tensor(0)),
        lambda loss: (functional.mse_loss(loss[None][:0], torch.zeros(0, dtype=loss.dtype)) * 0, 0.0),
    ]
    for _ in range(2):
        collect(deferred, model, batches)
        for empty in nothing if rank else [lambda loss: (loss * 0, 0)] * 3:
            assert deferred.backward(*empty(sum_loss(model, batches[0]))) == (0, 0)
            of_batch = lambda batch, empty=empty: empty(sum_loss(model, batch))  # noqa: E731
            assert deferred.backward_window(batches[:1], of_batch) == (0, 0)
        deferred.finish(sync_groups(kind))
        assert error(gradient(model), expected) <= 1e-12
        assert error(deferred.mean_loss(), mean) <= 1e-12
        model.zero_grad()
    deferred.backward(sum_loss(model, batches[0]) * torch.nan, 1)  # the control
    assert gradient(model).isnan().any()


@pytest.mark.parametrize("kind", ["ddp", "plain"])
@on_ranks()
def test_weights_may_take_the_place_of_counts(rank: int, kind: str) -> None:
    reference, model = Model(), wrap(Model(), kind)
    deferred, mine = DeferredMean(model, by_hand(model)), 0.37 * (1 + rank)
    parts = [(0.37 * (1 + r), batch) for r in range(dist.get_world_size()) for batch in make_window("full", r)]
    mass = sum(weight * num_valid(batch) for weight, batch in parts)
    (torch.stack([weight * sum_loss(reference, batch) for weight, batch in parts]).sum() / mass).backward()
    for batch in make_window("full", rank):
        deferred.backward(mine * sum_loss(model, batch), torch.tensor(mine * num_valid(batch), dtype=torch.float64))
    count = deferred.finish(sync_groups(kind))
    assert isinstance(count, float)
    assert abs(count / mass - 1) < 1e-14
    assert error(gradient(model), gradient(reference)) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "ignored by FSDP2", "ignored by FSDP2, summed", "sharded, summed"])
@on_ranks(4, pytest.param(2, marks=pytest.mark.full))
def test_experts(rank: int, way: str) -> None:
    """Dense parameters over all ranks, experts over their copies; on two ranks there is no copy to add."""
    from torch.distributed.fsdp import fully_shard

    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "experts"))
    model, reference, own = Adapted(), Adapted(), rank % 2
    expert = model.adapters[own]
    model.adapters[1 - own] = nn.Identity()  # is on another rank
    groups: list[Any] = [(expert, mesh["data"].get_group() if world_size > 2 else None)]
    if way == "plain":
        groups.append((model.base, dist.group.WORLD))
    elif "ignored" in way:
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), ignored_params=set(expert.parameters()))
    else:
        fully_shard(expert, mesh=mesh["data"])
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        groups = []
    if "summed" in way:
        sum_gradients_(model)
    run_step(DeferredMean(model, by_hand(model)), partial(model, index=own), make_window("full", rank), groups)
    loss = 0.0
    for other in range(world_size):
        loss += sum(sum_loss(partial(reference, index=other % 2), batch) for batch in make_window("full", other))
    (loss / sum(map(num_valid, all_batches("full")))).backward()
    assert error(gradient(model.base), gradient(reference.base)) <= 1e-12
    assert error(gradient(expert), gradient(reference.adapters[own])) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "mode"),
    [*((way, mode) for way in ("deferred", "accumulate") for mode in ("different", "equal")), ("accumulate", "stale")],
)
@on_ranks(4)
def test_a_count_over_the_data_ranks_alone_is_seen(rank: int, way: str, mode: str) -> None:
    """Equal counts, as of tensor parallelism, pass, and so do gradients of another backward ("stale")."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    group, window = mesh["context"].get_group(), make_window("full", mesh["data"].get_local_rank())
    model, batches = Model(), halves(window, mesh["context"].get_local_rank())
    fully_shard(model, mesh=mesh["data"])
    deferred = DeferredMean(model)

    def loss(batch: Batch) -> Tensor:
        logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
        return functional.cross_entropy(logits, labels, reduction="sum")

    def valid(batch: Batch) -> Tensor:
        return ((halves(window, 0)[0] if mode == "equal" else batch)["labels"] != -100).sum()

    if way == "deferred":
        for batch in batches:
            deferred.backward(loss(batch), valid(batch))
    else:
        for step, batch in accumulate(model, batches, valid):
            step.backward(loss(batch))
    if mode == "stale":
        model.zero_grad()
        loss(batches[0]).backward()
    before = gradient(model)
    kind, text = error_of(lambda: deferred.finish([group]) if way == "deferred" else all_reduce_grads_(model, group))
    assert kind == ("ValueError" if mode == "different" else "none")
    assert mode == "stale" or torch.equal(gradient(model), before) == (mode == "different")
    if mode == "different":
        assert "count of terms: expected the same on all ranks that are added up, got" in text
        assert "pass a group that contains them to " in text


@pytest.mark.slow
@on_ranks(3)
def test_two_sums_that_fail_over_groups_that_overlap(rank: int) -> None:
    """Over ranks 0 and 1 and over all. All ranks raise, and the next call works: no header was left over."""
    model = Model()
    deferred, parameters = DeferredMean(model, group=dist.group.WORLD), list(model.parameters())
    pair = dist.new_group([0, 1])
    deferred.backward(sum_loss(model, make_batch(rank, 0)), 1)
    own = (parameters[: 2 - rank], pair) if rank < 2 else (parameters[:1], None)
    everyone = (parameters[2 : 5 if rank else 4], dist.group.WORLD)
    kind, text = error_of(lambda: deferred.finish([own, everyone]))
    assert kind == "ValueError"
    assert "number of parameters: 2 on rank 0, 3 on ranks 1, 2." in text
    assert error_of(lambda: deferred.finish([dist.group.WORLD])) == ("none", "")


@on_ranks(2)
def test_without_a_forward_that_communicates_an_error_is_in_no_header(rank: int) -> None:
    """The other ranks would wait in that forward, here without parts of them. The control: after the forward."""
    model, window = wrap(Model(), "fsdp2"), make_window("full", rank)
    deferred = DeferredMean(model)
    for is_after in (False, True, False):

        def fails(batch: Batch, is_after: bool = is_after) -> Any:
            if batch is window[-1]:
                _ = sum_loss(model, batch) if is_after else None
                raise ValueError("boom")
            return sum_loss(model, batch), num_valid(batch)

        kind, text = error_of(lambda fails=fails: deferred.backward_window(window, fails))
        assert (kind, text == "boom") == ("ValueError", not is_after)
    for _ in range(2):
        model.zero_grad()
        deferred.backward_window(window, lambda batch: (sum_loss(model, batch), num_valid(batch)))
        deferred.finish()
        assert error(gradient(model), one_process(Model(), all_batches("full")).gradient) <= 1e-12


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@on_ranks(2)
def test_a_window_that_is_refused_changes_nothing(rank: int, kind: str) -> None:
    """A function on one rank alone, gradients of the last step, and under FSDP2 unequal numbers."""
    model, window = wrap(Model(), kind), make_window("full", rank)
    deferred = DeferredMean(model)

    def run(batches: list[Batch], fn: Any = None) -> Any:
        return deferred.backward_window(batches, fn or (lambda batch: (sum_loss(model, batch), num_valid(batch))))

    run(window)
    before = gradient(model)
    texts = [common_error(lambda: run(window, 3.0 if rank else None))[1]]
    if kind == "fsdp2":
        texts.append(common_error(lambda: run(window[: 1 + rank]))[1])
    assert torch.equal(gradient(model), before)
    deferred.finish()
    texts.append(common_error(lambda: run(window))[1])
    assert "failed on rank 1: fn: expected a function of a micro-batch, got 3.0." in texts[0]
    assert kind != "fsdp2" or "micro_batches: expected the same number on every rank, got 1 on rank 0, 2" in texts[1]
    assert "model: expected no gradient before the first backward of a step, got gradients with" in texts[-1]
    assert error(gradient(model), one_process(Model(), all_batches("full")).gradient) <= 1e-12


MISTAKES = [
    ("no_sync", ("ddp", "fsdp2"), "gradients that every backward reduces, got no_sync"),
    ("old gradients", ("ddp", "fsdp2"), "no gradient before the first backward of a step, got gradients with"),
    ("newer object", ("ddp", "fsdp2"), "expected one DeferredMean, got a newer one"),
    ("second sync", KINDS, "expected a backward since the last finish, got none. A second sync"),
    ("changed reduction", ("fsdp2",), "got 1 after 2. Call sum_gradients_ before the first backward"),
    ("parameters of no wrapper", ("ddp",), "module.up.weight, module.up.bias in neither. Pass (parameters, group)"),
]


@pytest.mark.parametrize(
    ("case", "kind", "text"), [(case, kind, text) for case, kinds, text in MISTAKES for kind in kinds]
)
@on_ranks(2)
def test_a_mistake_of_every_rank(rank: int, case: str, kind: str, text: str) -> None:
    """It raises on all of them; what it takes to end the step rightly gives the exact gradient."""
    inner = Model()
    if "wrapper" in case:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["up.weight", "up.bias"])
    model = wrap(inner, kind)
    batches, groups, newer = make_window("full", rank), sync_groups(kind), []
    deferred, optimizer = DeferredMean(model, by_hand(model)), torch.optim.SGD(model.parameters())
    step = partial(run_step, deferred, model, batches, groups)

    def mistake() -> None:
        if case == "newer object":
            newer.append(DeferredMean(model, by_hand(model)))
        if case == "changed reduction":
            deferred.backward(sum_loss(model, batches[0]), num_valid(batches[0]))
            sum_gradients_(model)
        with maybe_no_sync(model, 0, 2) if case == "no_sync" else contextlib.nullcontext():
            step()
        if case == "old gradients":
            step()
        if case == "second sync":
            deferred.finish(groups)

    found = error_of(mistake)
    assert found[0] == ("ValueError" if "wrapper" in case else "RuntimeError")
    assert text in found[1]
    if "wrapper" in case:
        deferred.finish([(inner.up, dist.group.WORLD)])
    elif case == "changed reduction":
        deferred.discard()
        step()
    elif case != "second sync":
        newer.clear()
        optimizer.zero_grad()
        run_step(DeferredMean(model, by_hand(model)), model, batches)
    assert error(gradient(model), one_process(Model(), all_batches("full")).gradient) <= 1e-12


@on_ranks(2)
def test_one_object_for_each_model(rank: int) -> None:
    """A second construction raises with open gradients, but not after finish or when the first is gone."""
    model = wrap(Model(), "ddp")
    batches = make_window("full", rank)[:1]
    first = collect(DeferredMean(model, by_hand(model)), model, batches)
    kind, text = error_of(lambda: DeferredMean(model, by_hand(model)))
    assert kind == "RuntimeError"
    assert "got one with 1 calls of backward that are not finished. Call finish() or discard()" in text
    first.finish()
    model.zero_grad()
    second = collect(DeferredMean(model, by_hand(model)), model, batches)
    del second
    gc.collect()
    DeferredMean(model, by_hand(model))


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_step_goes_on_in_another_process(rank: int, kind: str) -> None:
    """With the counts and the gradients it ends with the same bits; the control loads no counts."""
    batches, groups = make_window("uneven", rank), sync_groups(kind)

    def begin() -> tuple[nn.Module, DeferredMean]:
        model = wrap(Model(), kind)
        return model, DeferredMean(model, by_hand(model))

    model, deferred = begin()
    collect(deferred, model, batches[:2])
    saved, grads = deferred.state_dict(), [parameter.grad.clone() for parameter in model.parameters()]
    count = run_step(deferred, model, batches[2:], groups)
    results = []
    for is_control in (False, True):
        other, again = begin()
        if not is_control:
            again.load_state_dict(saved)
        for parameter, grad in zip(other.parameters(), grads):
            parameter.grad = grad.clone()
        is_same = run_step(again, other, batches[2:], groups) == count
        results.append(
            (is_same, torch.equal(gradient(other), gradient(model)), again.mean_loss() == deferred.mean_loss())
        )
    assert results == [(True, True, True), (False, False, False)]
    other, again = begin()
    again.load_state_dict(saved)  # after the last call
    for parameter, grad in zip(other.parameters(), grads):
        parameter.grad = grad
    again.finish(groups)
    assert all(parameter.grad is grad for parameter, grad in zip(other.parameters(), grads))
    assert again.mean_loss().dtype == torch.float64
    kind_of_error, text = error_of(lambda: again.load_state_dict(saved | {"multiplier": torch.tensor(7.0)}))
    assert (kind_of_error, "as the model divides now, got 7.0." in text) == ("ValueError", True)


def test_one_process() -> None:
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
        DeferredMean(None)
    model, reference = Model(), Model()
    deferred, batches = DeferredMean(model, by_hand(model)), [make_batch(0, index) for index in range(3)]
    with pytest.raises(RuntimeError, match="expected a step that is finished"):
        deferred.mean_loss()
    with pytest.raises(RuntimeError, match=r"^gradients: expected a backward since the last finish, got none"):
        deferred.finish()
    collect(deferred, model, batches)
    with pytest.raises(ValueError, match=r"^n: expected a finite number >= 0, got inf"):
        deferred.backward(sum_loss(model, batches[0]), float("inf"))
    total = sum(map(num_valid, batches))
    assert deferred.finish([None]) == total
    expected = torch.stack([sum_loss(reference, batch) for batch in batches]).sum() / total
    expected.backward()
    torch.testing.assert_close(deferred.mean_loss(), expected.detach(), rtol=1e-14, atol=0)
    for one, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-15)
