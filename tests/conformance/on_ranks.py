"""Tests that run on every rank: the body asserts there, and an error of one rank fails the test with its traceback."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable
from importlib import import_module
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from workers import error_of, get_pool

TWO_OR_THREE = (pytest.param(2, id="W2"), pytest.param(3, id="W3", marks=pytest.mark.full))


def slow_but(fast: Container[Any], names: Iterable[str], mark: Any = pytest.mark.slow) -> list[Any]:
    """Return cases, of which those that are not in ``fast`` have the mark."""
    return [pytest.param(name, marks=[] if name in fast else mark) for name in names]


def on_ranks(*world_sizes: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator of ``test(rank, ...)``, whose other arguments are those that pytest passes.

    Without sizes it runs on two ranks, and on three under `make full`; with ``...`` on as many as its parameter
    ``world_size`` says.
    """

    def decorate(body: Callable[..., None]) -> Any:
        def test(world_size: int, **given: Any) -> None:
            get_pool(world_size)(_run, body.__module__, body.__name__, given)

        names = ["world_size", *[*inspect.signature(body).parameters][1:]]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__dict__["__signature__"] = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        test.__dict__["body"] = body
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        if world_sizes == (...,):
            return test
        return pytest.mark.parametrize("world_size", world_sizes or TWO_OR_THREE)(test)

    return decorate


def _run(rank: int, module: str, name: str, given: dict[str, Any]) -> None:
    getattr(import_module(module), name).body(rank, **given)


T = TypeVar("T")


def gathered(value: Any) -> list[Any]:
    """Return what every rank has."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def same(value: T) -> T:
    """Return ``value``, which is the same on every rank."""
    everyone = gathered(value)
    assert all(str(other) == str(value) for other in everyone), everyone
    return value


def common_error(call: Callable[[], Any]) -> tuple[str, str]:
    """Return what :func:`workers.error_of` returns, which is the same on every rank."""
    return same(error_of(call))
