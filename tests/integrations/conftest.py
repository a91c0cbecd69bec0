"""The processes of the tests of frameworks, which keep state of the process."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from integration_cases import own_pool
from workers import WorkerPool


@pytest.fixture(scope="module")
def workers(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Two processes that have imported the modules that the file names ``FRAMEWORK``."""
    missing = [name for name in request.module.FRAMEWORK if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    yield from own_pool(*request.module.FRAMEWORK)
