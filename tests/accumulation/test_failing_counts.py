"""A count that fails prints one traceback on each rank, which names the line of the caller's function."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import WorkerPool

from fullrank import DeferredMean, accumulate, count_valid_tokens

HERE = Path(__file__).name


def length(batch: Any) -> int:
    return len(batch["length"])  # KeyError


def wrong_value(batch: Any) -> float:
    raise ValueError("no length")


def everyone() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


def run_deferred(model: nn.Module, number: Any) -> None:
    DeferredMean(model, everyone()).backward(model(torch.ones(1, 1)).sum(), number)


CALLS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a function": (
        lambda model: accumulate(model, [{}], length, group=everyone()),
        "KeyError: 'length', raised in length",
    ),
    "its ValueError": (
        lambda model: accumulate(model, [{}], wrong_value, group=everyone()),
        "ValueError: no length, raised in wrong_value",
    ),
    "a built-in": (lambda model: accumulate(model, [3], len, group=everyone()), "TypeError: object of type 'int'"),
    "tokens": (lambda model: accumulate(model, [{}], count_valid_tokens, group=everyone()), "one of the keys 'labels'"),
    "tokens alone": (lambda _: count_valid_tokens([{}]), "one of the keys 'labels'"),
    "not a number": (lambda model: accumulate(model, [{}], str, group=everyone()), "a number or a tensor of one"),
    "deferred": (lambda model: run_deferred(model, "x"), "n: expected a number"),
    "deferred, negative": (lambda model: run_deferred(model, -1), "n: expected a finite number >= 0"),
}


def printed(rank: int, name: str) -> str:
    """Return what an uncaught exception of the call would print."""
    try:
        CALLS[name][0](nn.Linear(1, 1))
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.mark.parametrize("name", CALLS)
def test_one_traceback(pool_of_two: WorkerPool, name: str) -> None:
    for text in [printed(0, name), *pool_of_two(printed, name)]:
        assert text.count("Traceback (most recent call last)") == 1, text
        assert CALLS[name][1] in text
        assert "During handling" not in text


@pytest.mark.parametrize("name", ["a function", "its ValueError"])
def test_the_line_of_the_function_is_named(pool_of_two: WorkerPool, name: str) -> None:
    function = {"a function": length, "its ValueError": wrong_value}[name]
    for text in pool_of_two(printed, name):
        assert f"{HERE}, line {function.__code__.co_firstlineno + 1})." in text
