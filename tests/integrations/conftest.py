"""The processes of the tests of frameworks, which keep state of the process."""

from __future__ import annotations

import importlib.util

import pytest
from integration_cases import launch
from workers import WorkerPool, get_pool


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> WorkerPool:
    """Two processes for all frameworks, which have imported the modules that the file names ``FRAMEWORK``."""
    missing = [name for name in request.module.FRAMEWORK if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    pool = get_pool(2, "frameworks")
    for module in request.module.FRAMEWORK:
        pool(launch, module)  # one by one: on a busy machine an import takes as long as a test may
    return pool
