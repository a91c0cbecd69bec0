"""When gradients are reduced, what they are divided by, and what an aborted window leaves behind."""

from __future__ import annotations

import gradient_sync_cases as cases
import pytest
import torch
from workers import WorkerPool, get_pool

import fullrank
from fullrank.gradients.wrappers import find_sync

LIMITS = {"float64": 1e-12, "float32": 2e-6}
each_dtype = pytest.mark.parametrize("dtype", LIMITS)


@each_dtype
@pytest.mark.parametrize(("kind", "reductions"), [("ddp", 1), ("fsdp", 2)])
def test_maybe_no_sync_reduces_in_the_last_micro_step(pool: WorkerPool, kind: str, reductions: int, dtype: str) -> None:
    for outcome in pool(cases.no_sync, kind, dtype):
        assert outcome["error"] <= LIMITS[dtype]
        assert outcome["counts"] == [0, 0, reductions]
        assert outcome["restored"]
        assert outcome["off"]


@each_dtype
def test_maybe_no_sync_under_hsdp(pool_of_four: WorkerPool, dtype: str) -> None:
    for outcome in pool_of_four(cases.no_sync, "hsdp", dtype):
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
    multipliers = {"plain": 1.0, "ddp": float(pool.world_size), "fsdp": 1.0}
    for kind, expected in multipliers.items():
        for multiplier, before, after in pool(cases.summed, kind, dtype):
            assert multiplier == expected
            assert before <= LIMITS[dtype]
            assert after <= LIMITS[dtype]


@each_dtype
@pytest.mark.parametrize("kind", ["hsdp", "replicate"])
def test_sum_gradients_over_replicas(pool_of_four: WorkerPool, kind: str, dtype: str) -> None:
    for multiplier, before, after in pool_of_four(cases.summed, kind, dtype):
        assert multiplier == 1.0
        assert before <= LIMITS[dtype]
        assert after <= LIMITS[dtype]


def test_what_is_found_in_a_model(pool_of_four: WorkerPool) -> None:
    for found in pool_of_four(cases.described):
        assert found["plain"] == ("a plain module", 1.0, None, False)
        assert found["ddp"] == ("DDP over 4 ranks", 4.0, 4, False)
        assert found["fsdp"] == ("FSDP2 over 4 ranks", 4.0, 4, True)
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
    for rank, found in enumerate(pool_of_four(cases.several_groups)):
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
    for outcome in pool_of_two(cases.static_graph, dtype):
        text = "DDP with static_graph to reduce in its first backward, in which it records the graph, got"
        assert f"accumulate failed on ranks 0, 1: model: expected {text} 3 micro-batches" in outcome["refused"]
        assert text in outcome["no_sync"]
        assert "expect_autograd_hooks_ INTERNAL ASSERT FAILED" in outcome["torch"]
        assert max(outcome[name] for name in ("each", "last", "again")) <= LIMITS[dtype]


@each_dtype
def test_discard_forgets_a_forward_that_no_backward_followed(pool_of_two: WorkerPool, dtype: str) -> None:
    for reductions, error in pool_of_two(cases.stray_forward, dtype, True):
        assert reductions == 0
        assert error <= LIMITS[dtype]
    for reductions, error in pool_of_two(cases.stray_forward, dtype, False):
        assert reductions == 1  # torch's own behaviour: one reduction too many, and still the same sum
        assert error <= LIMITS[dtype]


def test_a_reduction_that_broke_off_stays_loud(pool_of_two: WorkerPool) -> None:
    for text in pool_of_two(cases.broken_backward):
        assert "Expected to have finished reduction in the prior iteration" in text


def test_discard_forgets_gathered_parameters(pool_of_two: WorkerPool) -> None:
    """Else FSDP2 would compute with those of before the optimizer step, as the control does."""
    assert max(pool_of_two(cases.stale_parameters, True)) <= 1e-12
    assert min(pool_of_two(cases.stale_parameters, False)) > 0.05


def test_discard_under_mixed_precision(pool: WorkerPool) -> None:
    for error, is_apart in pool(cases.mixed_precision, True):
        assert is_apart
        assert error == 0.0
    for error, _ in pool(cases.mixed_precision, False):
        assert error > 0.1


def test_discard_drops_all_gradients_of_a_plain_module() -> None:
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1, 1)).backward()
    fullrank.discard_gradients_(model)
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    with pytest.raises(TypeError, match=r"model: expected an nn\.Module"):
        fullrank.discard_gradients_([model])


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_compiled_models(where: str) -> None:
    for kind, error, reductions in get_pool(2)(cases.compiled, where):
        assert kind == "DDP over 2 ranks"
        assert error <= LIMITS["float64"]
        assert reductions == 1


def test_sum_gradients_leaves_a_plain_module_alone() -> None:
    model = torch.nn.Linear(1, 1)
    assert fullrank.sum_gradients_(model) == 1.0
    assert find_sync(model).kind == "a plain module"
