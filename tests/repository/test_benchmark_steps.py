"""What benchmarks/steps.py counts is what the strict simulated device counts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from device import DEVICE, Backend, count
from scripts import run_script
from torch import Tensor

from fullrank.preflight import checks

pytestmark = pytest.mark.full

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = 60


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("steps")


class Waiting(checks.SmoothAPLoss):
    """Reads a value of the device without need."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        loss = super().forward(logits, targets)
        return loss + 0 * logits.detach().sum().item()


def as_given(scores: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return scores, targets


def test_waits_are_those_that_the_device_counts(steps: Any) -> None:
    """With a planted one there is one more; the CPU cannot say."""
    found = []
    for made in (checks.SmoothAPLoss, Waiting):
        loss = made(checks.CLASSES, 30, 0.5).to(DEVICE)
        inputs, targets = steps._inputs(loss, ROWS, 0, DEVICE)
        steps._step(loss, as_given, inputs, targets)
        with count() as counts:
            steps._step(loss, as_given, inputs, targets)
        waited = steps.count_waits(DEVICE, lambda: steps._step(loss, as_given, inputs, targets))  # noqa: B023
        found.append(sum(waited.values()))
        assert found[-1] == counts.waits
        assert any(line.startswith("losses/") for line in waited)
    assert found[1] == found[0] + 1
    assert Backend().get_sync_debug_mode() == 0
    assert steps.count_waits(torch.device("cpu"), lambda: torch.ones(1).item()) is None


def test_operators_and_bytes_are_those_of_the_device(steps: Any) -> None:
    """Views and allocations are free, and the backward, which runs in another thread, counts too."""
    rows = torch.ones(3, 4).to(DEVICE).requires_grad_()
    with steps.OperatorCount() as counted, count() as counts:
        (rows.t()[1:] * 2).exp().sum().backward()
    assert counted.num_bytes == counts.bytes
    assert 0 < counted.operators <= counts.launches


def test_steps_are_measured_over_ranks(tmp_path: Path) -> None:
    script = FOLDER / "steps.py"
    done = run_script(script, "--quick", "--device", "cpu", "--out", tmp_path, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Steps, forward and backward") == 1
    assert {step["waits"] for step in json.loads((tmp_path / "steps.json").read_text())["steps"]} == {None}
