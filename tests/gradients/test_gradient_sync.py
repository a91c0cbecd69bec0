"""When gradients are reduced, what they are divided by, and what an aborted window leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import Batch, all_batches, make_batch, make_window, one_process, sum_loss
from collective_counter import CollectiveCounter
from meshes import init_device_mesh
from subjects import LIMITS, Model, error, gradient, reduced, switches, wrap
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from verbs import run_window
from workers import WorkerPool, class_of, get_pool

import fullrank
from fullrank.gradients.wrappers import find_sync


def no_sync(rank: int, kind: str, dtype: str) -> dict[str, Any]:
    """Return the error of a window under ``maybe_no_sync``, its collectives in order, and whether it restores."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), kind)
    batches, before = make_window("full", rank), switches(model)
    counts = []
    for _ in range(2):
        model.zero_grad()
        for index, batch in enumerate(batches):
            with CollectiveCounter() as counter, fullrank.maybe_no_sync(model, index, len(batches)):
                sum_loss(model, batch).backward()
            counts += [counter.counts["allreduce_.default"] + counter.counts["_reduce_scatter_base_.default"]]
    expected = one_process(reference, all_batches("full"), total=float(dist.get_world_size()))
    outcome = {"error": error(gradient(model), expected.gradient), "counts": counts[3:]}
    try:
        with fullrank.maybe_no_sync(model, 0, 2):
            raise KeyError("inside")
    except KeyError:
        outcome["restored"] = switches(model) == before
    with fullrank.maybe_no_sync(model, 0, 2):
        outcome["off"] = switches(model) != before
    return outcome


def summed(rank: int, kind: str, dtype: str) -> tuple[float, float, float]:
    """Return what ``sum_gradients_`` returns, and the error of a sum over the ranks before and after it."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), kind)
    batch = make_batch(rank, 0)
    expected = one_process(reference, [make_batch(other, 0) for other in range(dist.get_world_size())], total=1.0)
    multiplier = find_sync(model).multiplier
    errors = []
    for _ in range(2):
        model.zero_grad()
        (sum_loss(model, batch) * multiplier).backward()
        errors.append(error(reduced(model), expected.gradient))
        multiplier = fullrank.sum_gradients_(model)
    return multiplier, *errors


def described(rank: int) -> dict[str, Any]:
    """Return what ``find_sync`` says of every kind of model, and what it refuses."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    found: dict[str, Any] = {}
    kinds = ["plain", "ddp", "fsdp2", "hsdp", "replicate"]
    for kind in kinds if dist.get_world_size() == 4 else kinds[:3]:
        model = wrap(Model(torch.float32), kind)
        sync = find_sync(nn.Sequential(model))
        size = None if sync.group is None else dist.get_world_size(sync.group)
        found[kind] = sync.kind, sync.multiplier, size, sync.is_lockstep
    bare = Model(torch.float32)
    fully_shard(bare.up, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    found["unmanaged"] = find_sync(bare).unmanaged, _text(lambda: run_window(bare, [make_batch(rank, 0)]))
    found["named"] = _text(lambda: run_window(bare, [make_batch(rank, 0)], group=dist.group.WORLD))
    frozen = bare.requires_grad_(False)
    frozen.up.requires_grad_(True)
    found["frozen"] = find_sync(frozen).unmanaged
    ignoring = Model(torch.float32)
    ignoring._ddp_params_and_buffers_to_ignore = ["up.weight"]
    found["ignored"] = find_sync(DistributedDataParallel(ignoring)).unmanaged
    found["both"] = _text(
        lambda: fullrank.sum_gradients_(nn.Sequential(model, DistributedDataParallel(nn.Linear(1, 1))))
    )
    found["statistics"] = find_sync(nn.SyncBatchNorm(3)).is_lockstep
    one = Model(torch.float32)
    found["fsdp1"] = _text(lambda: find_sync(FullyShardedDataParallel(one, device_id=torch.device("cpu"))))
    found["module"] = _text(lambda: find_sync(one.up.weight))
    return found


def several_groups(rank: int) -> dict[str, str | list[int]]:
    """Return what is said of groups that do not fit, on four ranks."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    two, small = Model(torch.float32), Model(torch.float32)
    fully_shard(two.up, mesh=mesh["rows"])
    fully_shard(two, mesh=mesh["columns"])
    found: dict[str, str | list[int]] = {"two": _text(lambda: find_sync(two).group)}
    fully_shard(small, mesh=mesh)
    found["part"] = _text(lambda: run_window(small, make_window("full", rank), group=mesh["rows"]))
    found["ranks"] = dist.get_process_group_ranks(find_sync(small).group)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    uneven = nn.ModuleList([DistributedDataParallel(nn.Linear(1, 1)), DistributedDataParallel(nn.Linear(1, 1), None)])
    uneven.append(DistributedDataParallel(nn.Linear(1, 1), process_group=pair))
    found["ddp"] = _text(lambda: fullrank.sum_gradients_(uneven))
    return found


def _text(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as raised:
        return f"{class_of(raised)}: {raised}"
    return "nothing raised"


def static_graph(rank: int, dtype: str) -> dict[str, Any]:
    """Return what DDP with ``static_graph`` does: refused at first, exact afterwards, and torch's own failure."""
    kept = getattr(torch, dtype)
    reference = Model(kept)
    model = DistributedDataParallel(Model(kept), static_graph=True)
    batches = make_window("full", rank)
    expected = one_process(reference, all_batches("full")).gradient
    outcome: dict[str, Any] = {"refused": _text(lambda: run_window(model, batches))}

    def enter() -> None:
        with fullrank.maybe_no_sync(model, 0, 2):
            pass

    outcome["no_sync"] = _text(enter)
    for name, sync in (("each", "each"), ("last", "last"), ("again", "last")):
        model.zero_grad()
        run_window(model, batches, sync=sync)
        outcome[name] = error(gradient(model), expected)
    raw = DistributedDataParallel(Model(kept), static_graph=True)
    try:
        for index, batch in enumerate(batches):
            raw.require_backward_grad_sync = index == 2
            sum_loss(raw, batch).backward()
    except RuntimeError as raised:
        outcome["torch"] = str(raised)
    return outcome


def stray_forward(rank: int, dtype: str, discard: bool) -> tuple[int, float]:
    """Return the reductions in the first of three micro-batches after a forward without a backward, and the error."""
    kept = getattr(torch, dtype)
    reference, model = Model(kept), wrap(Model(kept), "ddp")
    batches = make_window("full", rank)
    sum_loss(model, batches[0])
    if discard:
        fullrank.discard_gradients_(model)
    counts = []
    for index, batch in enumerate(batches):
        with CollectiveCounter() as counter, fullrank.maybe_no_sync(model, index, 3):
            (sum_loss(model, batch) * dist.get_world_size()).backward()
        counts.append(counter.counts["allreduce_.default"])
    expected = one_process(reference, all_batches("full"), total=1.0)
    return counts[0], error(gradient(model), expected.gradient)


def stale_parameters(rank: int, discard: bool) -> float:
    """Return the error of an FSDP2 step after a forward without backward and a change of the parameters."""
    reference, model = Model(torch.float64), wrap(Model(torch.float64), "fsdp2")
    held, batch = list(model.parameters()), make_batch(rank, 0)
    sum_loss(model, batch)
    if discard:
        fullrank.discard_gradients_(model)
    with torch.no_grad():
        for parameter in [*held, *reference.parameters()]:
            parameter.mul_(1.5)
    (sum_loss(model, batch) * find_sync(model).multiplier).backward()
    expected = one_process(reference, [make_batch(other, 0) for other in range(dist.get_world_size())], total=1.0)
    found = torch.cat([parameter.grad.full_tensor().flatten() for parameter in held])
    return error(found, expected.gradient)


def broken_backward(rank: int) -> str:
    """Return what DDP says after a backward that raised inside its reduction, discarded or not."""
    model = wrap(Model(torch.float32), "ddp")
    tokens = make_batch(rank, 0)["tokens"]

    def fail(grad: Tensor) -> None:
        raise KeyError("inside")

    def attach(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.module.up.register_forward_hook(attach)
    try:
        model(tokens).sum().backward()
    except KeyError:
        handle.remove()
    fullrank.discard_gradients_(model)
    try:
        model(tokens)
    except RuntimeError as raised:
        return str(raised)
    return "nothing raised"


def mixed_precision(rank: int, discard: bool) -> tuple[float, bool]:
    """Return the error of a window after an aborted one, with gradients held in the dtype of the reduction."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Model(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    batches = make_window("full", rank)

    def loss(batch: Batch) -> Tensor:
        return sum_loss(lambda tokens: model(tokens).float(), batch)

    def window() -> Tensor:
        for step, batch in fullrank.accumulate(model, batches, fullrank.count_valid_tokens):
            step.backward(loss(batch))
        return gradient(model)

    clean = window()
    model.zero_grad()
    for step, batch in fullrank.accumulate(model, batches, fullrank.count_valid_tokens):
        step.backward(loss(batch))
        break
    held = [part for group in find_sync(model).fsdp for part in group.state.fsdp_params]
    is_apart = all(part.unsharded_accumulated_grad is not None for part in held)
    model.zero_grad()
    if discard:
        fullrank.discard_gradients_(model)
    return error(window(), clean), is_apart


def compiled(rank: int, where: str) -> tuple[str, float, int]:
    """Return what is found in a compiled model, the error of its second window and the reductions in it."""
    reference, inner = Model(torch.float64), Model(torch.float64)
    if where == "outside":
        model = torch.compile(DistributedDataParallel(inner), backend="eager")
    else:
        model = DistributedDataParallel(torch.compile(inner, backend="eager"))
    for _ in range(3):
        model.zero_grad()
        with CollectiveCounter() as counter:
            run_window(model, make_window("full", rank))
    wrong = error(gradient(model), one_process(reference, all_batches("full")).gradient)
    return find_sync(model).kind, wrong, counter.counts["allreduce_.default"]


# tests/conformance has float32 for every verb.
each_dtype = pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.full)])


@each_dtype
@pytest.mark.parametrize(("kind", "reductions"), [("ddp", 1), ("fsdp2", 2)])
def test_maybe_no_sync_reduces_in_the_last_micro_step(pool: WorkerPool, kind: str, reductions: int, dtype: str) -> None:
    for outcome in pool(no_sync, kind, dtype):
        assert outcome["error"] <= LIMITS[dtype]
        assert outcome["counts"] == [0, 0, reductions]
        assert outcome["restored"]
        assert outcome["off"]


@pytest.mark.full
@each_dtype
def test_maybe_no_sync_under_hsdp(pool_of_four: WorkerPool, dtype: str) -> None:
    for outcome in pool_of_four(no_sync, "hsdp", dtype):
        assert outcome["error"] <= LIMITS[dtype]
        assert outcome["counts"] == [0, 0, 4]  # two groups, over shards and over replicas
        assert outcome["restored"]


@pytest.mark.parametrize(
    ("step", "steps", "kind", "text"),
    [
        (2, 2, ValueError, r"micro_step: expected an int in \[0, 2\), got 2. It counts from 0."),
        (-1, 2, ValueError, "micro_step: expected an int >= 0, got -1."),
        (0, 0, ValueError, "num_micro_steps: expected an int >= 1, got 0."),
        (0.0, 1, TypeError, "micro_step: expected an int, got 0.0."),
    ],
)
def test_maybe_no_sync_checks_its_numbers(step: int, steps: int, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text), fullrank.maybe_no_sync(torch.nn.Linear(1, 1), step, steps):
        pass


@each_dtype
def test_sum_gradients(pool: WorkerPool, dtype: str) -> None:
    multipliers = {"plain": 1.0, "ddp": float(pool.world_size), "fsdp2": 1.0}
    for kind, expected in multipliers.items():
        for multiplier, before, after in pool(summed, kind, dtype):
            assert multiplier == expected
            assert before <= LIMITS[dtype]
            assert after <= LIMITS[dtype]


@each_dtype
@pytest.mark.parametrize("kind", ["hsdp", "replicate"])
def test_sum_gradients_over_replicas(pool_of_four: WorkerPool, kind: str, dtype: str) -> None:
    for multiplier, before, after in pool_of_four(summed, kind, dtype):
        assert multiplier == 1.0
        assert before <= LIMITS[dtype]
        assert after <= LIMITS[dtype]


def test_what_is_found_in_a_model(pool_of_four: WorkerPool) -> None:
    for found in pool_of_four(described):
        assert found["plain"] == ("a plain module", 1.0, None, False)
        assert found["ddp"] == ("DDP over 4 ranks", 4.0, 4, False)
        assert found["fsdp2"] == ("FSDP2 over 4 ranks", 4.0, 4, True)
        assert found["hsdp"] == ("HSDP over 4 ranks", 4.0, 4, True)
        assert found["replicate"] == ("replicas over 4 ranks", 4.0, 4, False)
        names, text = found["unmanaged"]
        assert names == ["embed.weight", "down.weight", "down.bias"]
        assert "inside a wrapper, got embed.weight, down.weight, down.bias in none of them. Wrap them too, or" in text
        assert (
            "in none of them, and wrappers that divide by 4, for which the loss is multiplied by it." in found["named"]
        )
        assert found["frozen"] == []
        assert found["ignored"] == ["module.up.weight"]
        assert found["both"].startswith("ValueError: model: expected DDP or FSDP2 modules, got both.")
        assert found["statistics"]
        assert found["fsdp1"].startswith("ValueError: model: expected FSDP2, HSDP, DDP or plain modules, got Fully")
        assert found["module"].startswith("TypeError: model: expected an nn.Module")


def test_groups_that_do_not_fit(pool_of_four: WorkerPool) -> None:
    for rank, found in enumerate(pool_of_four(several_groups)):
        rows, columns = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        first, second = sorted([rows, columns])
        assert f"expected one group of ranks to reduce gradients over, got {first} and {second}." in found["two"]
        assert (
            f"group: expected all of [0, 1, 2, 3], which the model reduces its gradients over, got ranks {rows}."
            in (found["part"])
        )
        assert found["ranks"] == [0, 1, 2, 3]
        assert "got divisors [2.0, 4.0]. DDP divides by the size of its group" in found["ddp"]


@each_dtype
def test_static_graph(pool_of_two: WorkerPool, dtype: str) -> None:
    """torch fails when the first backward of all does not reduce; later ones need not."""
    for outcome in pool_of_two(static_graph, dtype):
        text = "DDP with static_graph to reduce in its first backward, in which it records the graph, got"
        assert f"accumulate failed on ranks 0, 1: model: expected {text} 3 micro-batches" in outcome["refused"]
        assert text in outcome["no_sync"]
        assert "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in outcome["torch"]
        assert max(outcome[name] for name in ("each", "last", "again")) <= LIMITS[dtype]


@each_dtype
def test_discard_forgets_a_forward_that_no_backward_followed(pool_of_two: WorkerPool, dtype: str) -> None:
    for reductions, wrong in pool_of_two(stray_forward, dtype, True):
        assert reductions == 0
        assert wrong <= LIMITS[dtype]
    for reductions, wrong in pool_of_two(stray_forward, dtype, False):
        assert reductions == 1  # torch's own behaviour: one reduction too many, and still the same sum
        assert wrong <= LIMITS[dtype]


def test_a_reduction_that_broke_off_stays_loud(pool_of_two: WorkerPool) -> None:
    for text in pool_of_two(broken_backward):
        assert "Expected to have finished reduction in the prior iteration" in text


def test_discard_forgets_gathered_parameters(pool_of_two: WorkerPool) -> None:
    """Else FSDP2 would compute with those of before the optimizer step, as the control does."""
    assert max(pool_of_two(stale_parameters, True)) <= 1e-12
    assert min(pool_of_two(stale_parameters, False)) > 0.05


def test_discard_under_mixed_precision(pool: WorkerPool) -> None:
    for wrong, is_apart in pool(mixed_precision, True):
        assert is_apart
        assert wrong == 0.0
    for wrong, _ in pool(mixed_precision, False):
        assert wrong > 0.1


def test_discard_drops_all_gradients_of_a_plain_module() -> None:
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1, 1)).backward()
    fullrank.discard_gradients_(model)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
        fullrank.discard_gradients_([model])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_compiled_models(where: str) -> None:
    for kind, wrong, reductions in get_pool(2)(compiled, where):
        assert kind == "DDP over 2 ranks"
        assert wrong <= LIMITS["float64"]
        assert reductions == 1


def test_sum_gradients_leaves_a_plain_module_alone() -> None:
    model = torch.nn.Linear(1, 1)
    assert fullrank.sum_gradients_(model) == 1.0
    assert find_sync(model).kind == "a plain module"


def test_maybe_no_sync_by_its_other_keyword() -> None:
    """KempnerForge calls the number of micro-steps grad_accum_steps."""
    model = torch.nn.Linear(1, 1)
    with fullrank.maybe_no_sync(model, micro_step=0, grad_accum_steps=2):
        pass
    with pytest.raises(ValueError, match=r"micro_step: expected an int in \[0, 2\), got 2"):
        fullrank.maybe_no_sync(model, 2, grad_accum_steps=2).__enter__()
    with pytest.raises(ValueError, match="grad_accum_steps: expected None with num_micro_steps"):
        fullrank.maybe_no_sync(model, 0, 2, grad_accum_steps=2).__enter__()
    with pytest.raises(TypeError, match="num_micro_steps: expected an int, got None"):
        fullrank.maybe_no_sync(model, 0).__enter__()
