"""Clipping refuses gradients that FSDP2 has not reduced, and arguments in the order of another function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from batches import all_batches, make_batch, make_window, one_process, sum_loss
from subjects import Model, error, wrap
from torch import nn
from verbs import run_window
from workers import WorkerPool, error_of, get_pool

import fullrank


def unreduced(rank: int, kind: str, listed: bool) -> dict[str, Any]:
    """Return what the norms say after a backward that did not reduce, and after one that did.

    Whether the gradients that another model reduced can be clipped meanwhile.
    """
    model, other = wrap(Model(torch.float64), kind), wrap(Model(torch.float64), kind)
    batches = make_window("full", rank)
    for _ in range(2):  # the second time .grad is there, from before
        if kind == "hsdp":
            model.set_requires_all_reduce(False)
        else:
            model.set_requires_gradient_sync(False)
        sum_loss(model, batches[0]).backward()
    sum_loss(other, batches[0]).backward()
    parameters = list(model.parameters()) if listed else model
    found: dict[str, Any] = {
        "clip": error_of(lambda: fullrank.clip_grad_norm_(parameters, 1.0)),
        "norm": error_of(lambda: fullrank.total_grad_norm(parameters)),
        "other": float(fullrank.total_grad_norm(other)),
    }
    found["torch"] = [parameter.grad is None for parameter in model.parameters()]
    fullrank.discard_gradients_(model)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    run_window(model, batches)
    expected = one_process(Model(torch.float64), all_batches("full")).gradient.norm()
    found["after"] = error(fullrank.clip_grad_norm_(parameters, None), expected)
    return found


def unreduced_under_ddp(rank: int) -> list[Any]:
    """Return the norms of DDP after a backward in no_sync and after one more that reduces, and the error inside."""
    model = wrap(Model(torch.float64), "ddp")
    with model.no_sync():
        sum_loss(model, make_batch(rank, 0)).backward()
        inside = error_of(lambda: fullrank.clip_grad_norm_(model, 1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = float(fullrank.total_grad_norm(model))
        texts = [str(one.message) for one in caught]
        sum_loss(model, make_batch(rank, 1)).backward()
        after = float(fullrank.total_grad_norm(model))
    return [before, after, inside, texts, len(caught)]


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


def warnings_of_steps(rank: int, way: str, options: dict[str, bool]) -> list[tuple[int, float]]:
    """Clip in three steps of one kind and in one that reduces; return the warnings and the norm of each."""
    model = nn.parallel.DistributedDataParallel(Model(torch.float64), **options)
    found = []
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
            norm = float(fullrank.clip_grad_norm_(model, 1.0))
        found.append((sum("inside no_sync" in str(one.message) for one in caught), norm))
    return found


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["default", "views"])
@pytest.mark.parametrize("way", WAYS)
def test_a_warning_comes_where_the_norms_differ_and_nowhere_else(
    pool_of_two: WorkerPool, way: str, options: dict[str, bool]
) -> None:
    """Gradients of several backwards in no_sync look like reduced ones at first: they warn from the second call on."""
    first, second = pool_of_two(warnings_of_steps, way, options)
    num_local, reduces, _ = WAYS[way]
    wanted = [0, 0, 0] if reduces else [1, 1, 1] if num_local == 1 else [0, 1, 1]
    assert [count for count, _ in first] == [count for count, _ in second] == [*wanted, 0]
    differ = [abs(one - other) > 1e-6 * one for (_, one), (_, other) in zip(first, second)]
    assert differ == [not reduces] * 3 + [False]


@pytest.mark.parametrize(("kind", "world_size", "listed"), [("fsdp2", 2, False), ("hsdp", 4, True)])
def test_gradients_that_fsdp_holds_back_are_refused(kind: str, world_size: int, listed: bool) -> None:
    for found in get_pool(world_size)(unreduced, kind, listed):
        for call, name in (("clip", "clip_grad_norm_"), ("norm", "total_grad_norm")):
            error, text = found[call]
            assert error == "RuntimeError"
            assert text.startswith(f"{name} failed on ranks ")
            assert "gradients: expected final gradients, got 5 that FSDP2 holds back unreduced" in text
            assert "maybe_no_sync does, or call set_requires_gradient_sync(True)" in text
        assert found["other"] > 0
        assert all(found["torch"])  # control: no .grad shows them, so their norm would be 0
        assert found["after"] <= 1e-12


def test_what_ddp_has_not_reduced_differs_between_the_ranks(pool_of_two: WorkerPool) -> None:
    """Inside no_sync it raises, afterwards it warns; once a backward has reduced, it does neither."""
    (first, final, inside, texts, count), (second, other, same, *rest) = pool_of_two(unreduced_under_ddp)
    assert [inside, texts, count] == [same, *rest]
    assert count == len(texts) == 1
    assert "total_grad_norm: the last forward of the DDP module with gradients ran inside no_sync" in texts[0]
    assert inside[0] == "RuntimeError"
    assert "expected final gradients, got those of DDP inside no_sync" in inside[1]
    assert abs(first - second) > 0.01 * first
    assert abs(final - other) <= 1e-12 * final


@pytest.mark.parametrize(
    "call", [fullrank.clip_grad_norm_, lambda p, most, kind=2.0: fullrank.total_grad_norm(p, kind)]
)
def test_a_bool_is_no_norm_type(call: Callable[..., Any]) -> None:
    model = nn.Linear(2, 1)
    for flag in (True, False):
        with pytest.raises(
            TypeError, match=r"norm_type: expected a number > 0, or inf, got (True|False)\. .* error_if_nonf"
        ):
            call(model, 1.0, flag)
    call(model, 1.0, 1)


def test_a_bool_is_no_largest_norm() -> None:
    with pytest.raises(TypeError, match="max_norm: expected a number >= 0, or None to measure only, got True"):
        fullrank.clip_grad_norm_(nn.Linear(2, 1), True)
    assert not dist.is_initialized()
