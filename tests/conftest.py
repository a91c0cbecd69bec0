"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import random
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
from workers import THREADS, WorkerPool, close_pools, forget_hints, get_pool

# The shared subjects, data and tables of the tests over ranks, and the trainings. The workers inherit the path.
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("conformance", "integrations")]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two ways to find a test that passes only after others, and what runs where processes are slow to start."""
    parser.addoption("--one-process", action="store_true", help="skip tests of several processes")
    parser.addoption("--cold", action="store_true", help="start new workers for each test")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in an order drawn with this seed")


def pytest_configure(config: pytest.Config) -> None:
    """Compute with the threads of the workers, one by default: on busy cores, threads wait for each other for long."""
    torch.set_num_threads(THREADS)
    if config.getoption("one_process"):
        WorkerPool.__init__ = lambda pool, world_size: pytest.skip("needs several processes")


# The parameters that say on how many processes a case runs.
SIZES = ("pool", "world_size")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file whose tests are all left out: the frameworks alone take four seconds."""
    names = [name for name in ("slow", "full") if f"not {name}" in config.getoption("markexpr")]
    if collection_path.suffix != ".py" or not names:
        return None
    is_left_out = rf"^pytestmark = \[?\s*pytest\.mark\.({'|'.join(names)})\b"
    return True if re.search(is_left_out, collection_path.read_text("utf-8"), re.MULTILINE) else None


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let `make test` run one case of three processes of each file, so that `make full` is never the first to."""
    chosen: set[Path] = set()
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        own = [mark for mark in item.own_markers if mark.name == "full"]
        # A case with a second mark, or in a file that has the mark, is left out for another reason too.
        if 3 in map(params.get, SIZES) and item.path not in chosen and own[:1] == list(item.iter_markers("full")):
            chosen.add(item.path)
            for mark in own:
                item.own_markers.remove(mark)
                item.add_marker("slow")
    seed = config.getoption("shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """With --cold, no memory of an earlier test, such as room for a gather, helps the next one."""
    if item.config.getoption("cold"):
        close_pools()


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
    close_pools()


@pytest.fixture(params=[pytest.param(2, id="W2"), pytest.param(3, id="W3", marks=pytest.mark.full)])
def pool(request: pytest.FixtureRequest) -> WorkerPool:
    """Two gloo processes; three under `make full`, and in one case of each file under `make test`."""
    return get_pool(request.param)


@pytest.fixture
def pyplot() -> Iterator[Any]:
    """matplotlib without a screen, and without the figures that a test leaves behind."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    yield pyplot
    pyplot.close("all")


# Importing device.py registers the simulated device for the whole process. Workers import the files of tests, and must
# not have an accelerator that no wrapper of torch knows, so files with workers reach it through these fixtures alone.
@pytest.fixture(params=["cpu", pytest.param("sim", marks=pytest.mark.slow) if simulated.IS_SIMULATED else "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and CUDA where there is one, else the strict simulated accelerator of device.py.

    In the fast tests the simulated one is only in tests/test_device.py and tests/test_budgets.py.
    """
    return torch.device("cpu") if request.param == "cpu" else simulated.DEVICE


@pytest.fixture
def no_waits(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A context in which waiting for the device is an error; on the CPU nothing waits."""
    return partial(simulated.no_waits, device)


@pytest.fixture
def simulated_device() -> ModuleType:
    """The module device.py, for tests that count waits and launches on the simulated accelerator."""
    if not simulated.IS_SIMULATED:
        pytest.skip("counts on the simulated device, which CUDA stands for")
    return simulated


@pytest.fixture(autouse=True)
def _forgotten_hints() -> None:
    """Warn again in each test of what a loss of the same class was warned of in one before it."""
    forget_hints()
