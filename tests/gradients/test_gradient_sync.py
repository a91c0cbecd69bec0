"""When gradients are reduced, what they are divided by, and what an aborted window leaves behind."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import all_batches, make_batch, make_window, one_process, sum_loss
from collective_counter import CollectiveCounter
from meshes import group_of, init_device_mesh
from on_ranks import on_ranks
from subjects import LIMITS, Model, error, gradient, reduced, switches, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from verbs import run_window
from workers import error_of

import fullrank
from fullrank.gradients.wrappers import find_sync


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@on_ranks(2)
def test_maybe_no_sync_restores_the_switches(rank: int, kind: str) -> None:
    """What it computes and reduces is in tests/conformance/test_equals_one_process.py."""
    model = wrap(Model(), kind)
    before = switches(model)
    with suppress(KeyError), fullrank.maybe_no_sync(model, 0, 2):
        assert switches(model) != before
        raise KeyError("inside")
    assert switches(model) == before


@pytest.mark.parametrize(("world_size", "kinds"), [(2, ["plain", "ddp", "fsdp2"]), (4, ["hsdp", "replicate"])])
@on_ranks(...)
def test_sum_gradients(rank: int, kinds: list[str]) -> None:
    batch, everyone = make_batch(rank, 0), [make_batch(other, 0) for other in range(dist.get_world_size())]
    expected = one_process(Model(), everyone, total=1.0)
    for kind in kinds:
        model = wrap(Model(), kind)
        multiplier = find_sync(model).multiplier
        for _ in range(2):
            model.zero_grad()
            (sum_loss(model, batch) * multiplier).backward()
            assert error(reduced(model), expected.gradient) <= LIMITS["float64"]
            multiplier = fullrank.sum_gradients_(model)
        assert multiplier == (dist.get_world_size() if kind == "ddp" else 1)


def text_of(call: Callable[[], Any]) -> str:
    return ": ".join(error_of(call))


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"micro_step": 2, "num_micro_steps": 2}, ValueError, r"expected an int in \[0, 2\), got 2. It counts"),
        ({"micro_step": -1, "num_micro_steps": 2}, ValueError, "micro_step: expected an int >= 0, got -1."),
        ({"micro_step": 0, "num_micro_steps": 0}, ValueError, "num_micro_steps: expected an int >= 1, got 0."),
        ({"micro_step": 0.0, "num_micro_steps": 1}, TypeError, "micro_step: expected an int, got 0.0."),
        ({"micro_step": 0}, TypeError, "num_micro_steps: expected an int, got None"),
        # KempnerForge calls it so.
        ({"micro_step": 2, "grad_accum_steps": 2}, ValueError, r"micro_step: expected an int in \[0, 2\), got 2"),
        ({"micro_step": 0, "num_micro_steps": 2, "grad_accum_steps": 2}, ValueError, "grad_accum_steps: expected None"),
    ],
)
def test_maybe_no_sync_checks_its_numbers(given: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(kind, match=text), fullrank.maybe_no_sync(torch.nn.Linear(1, 1), **given):
        pass
    with fullrank.maybe_no_sync(torch.nn.Linear(1, 1), micro_step=0, grad_accum_steps=2):
        pass


@on_ranks(4)
def test_what_is_found_in_a_model(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    for kind, expected in {
        "plain": ("a plain module", 1.0, None, False),
        "ddp": ("DDP over 4 ranks", 4.0, 4, False),
        "fsdp2": ("FSDP2 over 4 ranks", 4.0, 4, True),
        "hsdp": ("HSDP over 4 ranks", 4.0, 4, True),
        "replicate": ("replicas over 4 ranks", 4.0, 4, False),
    }.items():
        model = wrap(Model(torch.float32), kind)
        sync = find_sync(nn.Sequential(model))
        size = None if sync.group is None else dist.get_world_size(sync.group)
        assert (sync.kind, sync.multiplier, size, sync.is_lockstep) == expected
    bare, batch = Model(torch.float32), [make_batch(rank, 0)]
    fully_shard(bare.up, mesh=init_device_mesh("cpu", (4,)))
    assert find_sync(bare).unmanaged == ["embed.weight", "down.weight", "down.bias"]
    text = "inside a wrapper, got embed.weight, down.weight, down.bias in none of them. Wrap them too, or"
    assert text in text_of(lambda: run_window(bare, batch))
    text = "in none of them, and wrappers that divide by 4, for which the loss is multiplied by it."
    assert text in text_of(lambda: run_window(bare, batch, group=dist.group.WORLD))
    assert text_of(lambda: run_window(bare, batch, group=dist.group.WORLD, multiplier=1.0)) == "none: "
    bare.requires_grad_(False).up.requires_grad_(True)
    assert find_sync(bare).unmanaged == []
    ignoring = Model(torch.float32)
    ignoring._ddp_params_and_buffers_to_ignore = ["up.weight"]
    assert find_sync(DistributedDataParallel(ignoring)).unmanaged == ["module.up.weight"]
    both = nn.Sequential(model, DistributedDataParallel(nn.Linear(1, 1)))
    text = "ValueError: model: expected DDP or FSDP2 modules, got both."
    assert text_of(lambda: fullrank.sum_gradients_(both)).startswith(text)
    assert find_sync(nn.SyncBatchNorm(3)).is_lockstep
    one = Model(torch.float32)
    text = "ValueError: model: expected FSDP2, HSDP, DDP or plain modules, got Fully"
    assert text_of(lambda: find_sync(FullyShardedDataParallel(one, device_id=torch.device("cpu")))).startswith(text)
    assert text_of(lambda: find_sync(one.up.weight)).startswith("TypeError: model: expected an nn.Module")


@on_ranks(4)
def test_groups_that_do_not_fit(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    rows, columns = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    two, small = Model(torch.float32), Model(torch.float32)
    fully_shard(two.up, mesh=mesh["rows"])
    fully_shard(two, mesh=mesh["columns"])
    first, second = sorted([rows, columns])
    text = f"expected one group of ranks to reduce gradients over, got {first} and {second}."
    assert text in text_of(lambda: find_sync(two).group)
    fully_shard(small, mesh=mesh)
    text = f"group: expected all of [0, 1, 2, 3], which the model reduces its gradients over, got ranks {rows}."
    assert text in text_of(lambda: run_window(small, make_window("full", rank), group=mesh["rows"]))
    assert dist.get_process_group_ranks(find_sync(small).group) == [0, 1, 2, 3]
    pair = [group_of(0, 1), group_of(2, 3)][rank // 2]
    uneven = [DistributedDataParallel(nn.Linear(1, 1), process_group=group) for group in (None, pair)]
    text = "got divisors [2.0, 4.0]. DDP divides by the size of its group"
    assert text in text_of(lambda: fullrank.sum_gradients_(nn.ModuleList(uneven)))


@on_ranks(2)
def test_static_graph(rank: int) -> None:
    """torch fails when the first backward of all does not reduce; later ones need not."""
    model, batches = DistributedDataParallel(Model(), static_graph=True), make_window("full", rank)
    expected = one_process(Model(), all_batches("full")).gradient
    text = "DDP with static_graph to reduce in its first backward, in which it records the graph, got"
    found = text_of(lambda: run_window(model, batches))
    assert f"accumulate failed on ranks 0, 1: model: expected {text} 3 micro-batches" in found
    assert text in text_of(lambda: fullrank.maybe_no_sync(model, 0, 2).__enter__())
    for sync in ("each", "last", "last"):
        model.zero_grad()
        run_window(model, batches, sync=sync)
        assert error(gradient(model), expected) <= LIMITS["float64"]
    raw = DistributedDataParallel(Model(), static_graph=True)

    def plain_loop() -> None:
        for index, batch in enumerate(batches):
            raw.require_backward_grad_sync = index == 2
            sum_loss(raw, batch).backward()

    assert "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in error_of(plain_loop)[1]


@pytest.mark.parametrize("discard", [True, False])
@on_ranks(2)
def test_discard_forgets_a_forward_that_no_backward_followed(rank: int, discard: bool) -> None:
    """Without the discard there is one reduction too many in the first of three micro-batches, and the same sum."""
    model, batches, counts = wrap(Model(), "ddp"), make_window("full", rank), []
    sum_loss(model, batches[0])
    if discard:
        fullrank.discard_gradients_(model)
    for index, batch in enumerate(batches):
        with CollectiveCounter() as counter, fullrank.maybe_no_sync(model, index, 3):
            (sum_loss(model, batch) * dist.get_world_size()).backward()
        counts.append(counter.counts["allreduce_.default"])
    assert counts[0] == (0 if discard else 1)
    expected = one_process(Model(), all_batches("full"), total=1.0)
    assert error(gradient(model), expected.gradient) <= LIMITS["float64"]


@on_ranks(2)
def test_a_reduction_that_broke_off_stays_loud(rank: int) -> None:
    """A backward raises inside the reduction of DDP; a discard does not hide it."""
    model, tokens = wrap(Model(torch.float32), "ddp"), make_batch(rank, 0)["tokens"]

    def fail(grad: Tensor) -> None:
        raise KeyError("inside")

    handle = model.module.up.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    with suppress(KeyError):
        model(tokens).sum().backward()
    handle.remove()
    fullrank.discard_gradients_(model)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        model(tokens)


@pytest.mark.parametrize("discard", [True, False])
@on_ranks(2)
def test_discard_forgets_gathered_parameters(rank: int, discard: bool) -> None:
    """After a forward without backward; else FSDP2 would compute with those of before the optimizer step."""
    reference, model = Model(), wrap(Model(), "fsdp2")
    held, batch = list(model.parameters()), make_batch(rank, 0)
    sum_loss(model, batch)
    if discard:
        fullrank.discard_gradients_(model)
    with torch.no_grad():
        for parameter in [*held, *reference.parameters()]:
            parameter.mul_(1.5)
    (sum_loss(model, batch) * find_sync(model).multiplier).backward()
    expected = one_process(reference, [make_batch(other, 0) for other in range(2)], total=1.0)
    found = torch.cat([parameter.grad.full_tensor().flatten() for parameter in held])
    wrong = error(found, expected.gradient)
    assert wrong <= 1e-12 if discard else wrong > 0.05


@pytest.mark.parametrize("discard", [True, False])
@on_ranks()
def test_discard_under_mixed_precision(rank: int, discard: bool) -> None:
    """Gradients are held in the dtype of the reduction; without the discard those of an aborted window remain."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, batches = Model(torch.float32), make_window("full", rank)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)

    def window(is_aborted: bool = False) -> Tensor:
        model.zero_grad()
        for step, batch in fullrank.accumulate(model, batches, fullrank.count_valid_tokens):
            step.backward(sum_loss(lambda tokens: model(tokens).float(), batch))
            if is_aborted:
                break
        return torch.empty(0) if is_aborted else gradient(model)

    clean = window()
    window(is_aborted=True)
    held = [part for group in find_sync(model).fsdp for part in group.state.fsdp_params]
    assert all(part.unsharded_accumulated_grad is not None for part in held)
    if discard:
        fullrank.discard_gradients_(model)
    wrong = error(window(), clean)
    assert wrong == 0 if discard else wrong > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["outside", pytest.param("inside", marks=pytest.mark.full)])
@on_ranks(2)
def test_compiled_models(rank: int, where: str) -> None:
    compiled, reference = (lambda model: torch.compile(model, backend="eager")), Model()
    if where == "outside":
        model = compiled(DistributedDataParallel(Model()))
    else:
        model = DistributedDataParallel(compiled(Model()))
    for _ in range(3):
        model.zero_grad()
        with CollectiveCounter() as counter:
            run_window(model, make_window("full", rank))
    assert error(gradient(model), one_process(reference, all_batches("full")).gradient) <= LIMITS["float64"]
    assert find_sync(model).kind == "DDP over 2 ranks"
    assert counter.counts["allreduce_.default"] == 1


# --- gradients that no wrapper has reduced are not clipped ------------------------------------------------------------


# Per step: the micro-batches in no_sync, whether one more reduces, and whether a forward without gradients follows.
WAYS = {
    "reduced": (0, True, False),
    "reduced, then evaluated": (0, True, True),
    "accumulated, then evaluated": (2, True, True),
    "not reduced": (1, False, False),
    "not reduced, then evaluated": (1, False, True),
    "two not reduced": (2, False, False),
    "two not reduced, then evaluated": (2, False, True),
}


@pytest.mark.parametrize(
    ("way", "has_views"), [*((way, False) for way in WAYS), ("two not reduced, then evaluated", True)]
)
@on_ranks(2)
def test_a_warning_comes_where_the_norms_differ_and_nowhere_else(rank: int, way: str, has_views: bool) -> None:
    """Gradients of several backwards in no_sync look like reduced ones at first: they warn from the second call on."""
    model, counts, differ = wrap(Model(), "ddp", gradient_as_bucket_view=has_views), [], []
    for num_local, reduces, evaluates in [WAYS[way]] * 3 + [WAYS["reduced, then evaluated"]]:
        model.zero_grad()
        for index in range(num_local):
            with model.no_sync():
                sum_loss(model, make_batch(rank, index)).backward()
        if reduces:
            sum_loss(model, make_batch(rank, num_local)).backward()
        if evaluates:
            with torch.no_grad():
                model(make_batch(rank, 5)["tokens"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            norms = fullrank.all_gather_no_grad(fullrank.clip_grad_norm_(model, 1.0)[None])
        counts.append(sum("inside no_sync" in str(one.message) for one in caught))
        differ.append(bool((norms[0] - norms[1]).abs() > 1e-6 * norms[0]))
    num_local, reduces, _ = WAYS[way]
    wanted = [0, 0, 0] if reduces else [1, 1, 1] if num_local == 1 else [0, 1, 1]
    assert counts == [*wanted, 0]
    assert differ == [not reduces] * 3 + [False]


@pytest.mark.parametrize(("kind", "listed"), [("fsdp2", False), ("hsdp", True)])
@on_ranks(4)
def test_gradients_that_fsdp_holds_back_are_refused(rank: int, kind: str, listed: bool) -> None:
    """Those that another model has reduced can be clipped meanwhile."""
    model, other, batches = wrap(Model(), kind), wrap(Model(), kind), make_window("full", rank)
    for _ in range(2):  # the second time .grad is there, from before
        if kind == "hsdp":
            model.set_requires_all_reduce(False)
        else:
            model.set_requires_gradient_sync(False)
        sum_loss(model, batches[0]).backward()
    sum_loss(other, batches[0]).backward()
    parameters = list(model.parameters()) if listed else model
    for call in (partial(fullrank.clip_grad_norm_, max_norm=1.0), fullrank.total_grad_norm):
        error_class, text = error_of(lambda call=call: call(parameters))
        assert error_class == "RuntimeError"
        assert re.match(r"(clip_grad_norm_|total_grad_norm) failed on ranks ", text)
        assert "gradients: expected final gradients, got 5 that FSDP2 holds back unreduced" in text
        assert "maybe_no_sync does, or call set_requires_gradient_sync(True)" in text
    assert fullrank.total_grad_norm(other) > 0
    assert all(parameter.grad is None for parameter in model.parameters())  # control: .grad shows a norm of 0
    fullrank.discard_gradients_(model)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    run_window(model, batches)
    expected = one_process(Model(), all_batches("full")).gradient.norm()
    assert error(fullrank.clip_grad_norm_(parameters, None), expected) <= 1e-12


@on_ranks(2)
def test_gradients_inside_no_sync_are_refused(rank: int) -> None:
    """Afterwards it warns, which the first test compares with the norms."""
    model = wrap(Model(), "ddp")
    with model.no_sync():
        sum_loss(model, make_batch(rank, 0)).backward()
        kind, text = error_of(lambda: fullrank.clip_grad_norm_(model, 1.0))
    assert kind == "RuntimeError"
    assert "expected final gradients, got those of DDP inside no_sync" in text
    text = "total_grad_norm: the last forward of the DDP module with gradients ran inside no_sync"
    with pytest.warns(UserWarning, match=text):
        fullrank.total_grad_norm(model)
