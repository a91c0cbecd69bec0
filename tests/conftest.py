"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import device as simulated
import lines
import pytest
import torch
from workers import WorkerPool, close_pools, get_pool

# The shared subjects, data and tables of the tests over ranks, and the trainings. The workers inherit the path.
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("conformance", "integrations")]


def pytest_configure() -> None:
    """Compute with one thread, as the workers do: on busy cores, threads that wait for each other take far longer."""
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file whose tests are all left out: the frameworks alone take four seconds."""
    if collection_path.suffix != ".py" or "not slow" not in config.getoption("markexpr"):
        return None
    is_slow = re.search(
        r"^pytestmark = \[?\s*pytest\.mark\.(slow|full)\b", collection_path.read_text("utf-8"), re.MULTILINE
    )
    return True if is_slow else None


def pytest_collection_finish() -> None:
    """Leave half a million objects of what is imported out of all garbage collections, of which pytest makes ten."""
    gc.freeze()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Let tests/mutants.py know which test executes a line."""
    lines.begin(nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Let it know how long a test takes."""
    lines.note(report.nodeid, report.duration, report.passed)


def pytest_sessionfinish() -> None:
    """End the worker processes."""
    close_pools()


@pytest.fixture(params=[pytest.param(2, id="W2"), pytest.param(3, id="W3", marks=pytest.mark.full)])
def pool(request: pytest.FixtureRequest) -> WorkerPool:
    """Two gloo processes; three under `make full`."""
    return get_pool(request.param)


@pytest.fixture
def pool_of_two() -> WorkerPool:
    """Two gloo processes, for what does not depend on their number."""
    return get_pool(2)


@pytest.fixture
def pool_of_four() -> WorkerPool:
    """Four gloo processes, for meshes and sub-groups."""
    return get_pool(4)


@pytest.fixture
def pyplot() -> Iterator[Any]:
    """matplotlib without a screen, and without the figures that a test leaves behind."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    yield pyplot
    pyplot.close("all")


# Importing device.py registers the simulated device for the whole process. Workers import the files of tests, and must
# not have an accelerator that no wrapper of torch knows, so files with workers reach it through these fixtures alone.
@pytest.fixture(
    params=["cpu", pytest.param("sim", marks=pytest.mark.slow), *(["cuda"] if torch.cuda.is_available() else [])]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, the strict simulated accelerator of device.py, and CUDA where there is one.

    In the fast tests the simulated one is only in tests/test_device.py and tests/test_budgets.py.
    """
    return simulated.DEVICE if request.param == "sim" else torch.device(request.param)


@pytest.fixture
def no_waits(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context in which waiting for the device is an error; on the CPU nothing waits."""
    return partial(simulated.no_waits, device)


@pytest.fixture
def simulated_device() -> ModuleType:
    """The module device.py, for tests that count waits and launches on the simulated accelerator."""
    return simulated
