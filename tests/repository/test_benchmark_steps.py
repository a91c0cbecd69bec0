"""What benchmarks/steps.py and benchmarks/costs.py measure: what the strict simulated device counts makes visible.

What they time is not looked at: a test that times fails at random.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device import DEVICE, Backend, count
from scripts import run_script
from torch import Tensor

from fullrank.kernels.costs import TABLE, Costs, costs_of
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


def test_waits_are_those_that_the_device_counts(steps: Any) -> None:
    """With a planted one there is one more; the CPU cannot say."""
    found = []
    for made in (checks.SmoothAPLoss, Waiting):
        loss = made(checks.CLASSES, 30, 0.5).to(DEVICE)
        inputs, targets = steps._inputs(loss, ROWS, 0, DEVICE)
        steps._step(loss, inputs, targets)
        with count() as counts:
            steps._step(loss, inputs, targets)
        waited = steps.count_waits(DEVICE, lambda: steps._step(loss, inputs, targets))  # noqa: B023
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


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script with few rows, and times that grow from step to step: of the tried values the first is the fastest."""

    def run_once(tried: dict[str, Callable[[], object]], repeats: int, place: torch.device) -> dict[str, list[float]]:
        assert place == DEVICE
        for step in tried.values():
            step()
        return {name: [float(number)] for number, name in enumerate(tried, 1)}

    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("costs")
    monkeypatch.setattr(module, "interleave", run_once)
    monkeypatch.setattr(module.Measurement, "rows", lambda self, rows: rows // 100)
    monkeypatch.setattr(module, "NARROW", 0.02)
    return module


def test_costs_are_measured_on_an_accelerator(costs: Any) -> None:
    before = copy.copy(TABLE)
    records = costs.measure_costs(DEVICE, repeats=1)
    assert before == TABLE
    assert [record["constant"] for record in records] == list(Costs._fields)
    assert {record["constant"]: record["in_use"] for record in records} == costs_of(DEVICE)._asdict()
    found = {record["constant"]: record["measured"] for record in records}
    assert found["lanes"] == costs_of(DEVICE).lanes // 4
    assert found["interleaved"] is False
    assert found["searches_at_once"] is None
    entry = costs.entry_of(DEVICE, records)
    made = eval(entry[entry.index("Costs(") :].rstrip(","), {"Costs": Costs})
    assert isinstance(made, Costs)
    assert isinstance(made.interleaved, bool)
