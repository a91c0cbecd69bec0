"""A fixture for tests that run with the extension in C, and without it."""

from __future__ import annotations

import pytest

from fullrank.kernels import native

FORMS = ["native", pytest.param("torch", marks=pytest.mark.slow)] if native.FUNCTIONS else ["torch"]


@pytest.fixture(params=FORMS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "FUNCTIONS", {})
    return request.param
