"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest
import torch
from workers import WorkerPool, close_pools, get_pool


def pytest_configure() -> None:
    """Compute with one thread, as the workers do: on busy cores, threads that wait for each other take far longer."""
    torch.set_num_threads(1)


def pytest_sessionfinish() -> None:
    """End the worker processes."""
    close_pools()


@pytest.fixture(params=[pytest.param(2, id="W2"), pytest.param(3, id="W3", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> WorkerPool:
    """Two, then three gloo processes; the fast tests leave it at two."""
    return get_pool(request.param)


@pytest.fixture
def pool_of_two() -> WorkerPool:
    """Two gloo processes, for what does not depend on their number."""
    return get_pool(2)


@pytest.fixture
def pool_of_four() -> WorkerPool:
    """Four gloo processes, for meshes and sub-groups."""
    return get_pool(4)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU always, CUDA where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)
