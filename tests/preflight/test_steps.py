"""The measurements of a step: the waits, operators and faults that the strict simulated device makes visible.

What they time is not looked at: a test that times fails at random.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from device import DEVICE, Backend, count
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullrank.kernels.costs import TABLE, Costs, costs_of
from fullrank.preflight import checks, command, costs, site, steps
from fullrank.preflight.site import Place, Site
from fullrank.preflight.torch_private import OperatorCount

pytestmark = pytest.mark.slow

ROWS = 60


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """One process on the simulated device, on which gloo communicates through the host."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with site.open_site("gloo", "sim", 60) as opened:
        yield opened


class Waiting(checks.SmoothAPLoss):
    """Reads a value of the device without need."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        loss = super().forward(logits, targets)
        return loss + 0 * logits.detach().sum().item()


def _step_of(loss: Any, place: torch.device) -> Callable[[], None]:
    inputs, targets = steps._inputs(loss, ROWS, 0, place)
    return lambda: steps._step(loss, inputs, targets)


@pytest.mark.parametrize("made", [checks.SmoothAPLoss, Waiting])
def test_waits_are_those_that_the_device_counts(made: type[checks.SmoothAPLoss]) -> None:
    step = _step_of(made(checks.CLASSES, 30, 0.5).to(DEVICE), DEVICE)
    step()
    with count() as counts:
        step()
    waited = steps.count_waits(DEVICE, step)
    assert waited is not None
    assert sum(waited.values()) == counts.waits
    assert all(line == "elsewhere" or line.split("/")[0] in steps._FOLDERS for line in waited)
    assert Backend().get_sync_debug_mode() == 0


def test_a_planted_wait_is_counted() -> None:
    found = []
    for made in (checks.SmoothAPLoss, Waiting):
        waited = steps.count_waits(DEVICE, _step_of(made(checks.CLASSES, 30, 0.5).to(DEVICE), DEVICE))
        assert waited is not None
        found.append(sum(waited.values()))
    assert found[1] == found[0] + 1


def test_the_cpu_cannot_count_waits() -> None:
    assert steps.count_waits(torch.device("cpu"), lambda: torch.ones(1).item()) is None


def test_other_warnings_are_shown() -> None:
    with pytest.warns(UserWarning, match="something else"):
        waited = steps.count_waits(DEVICE, _wait_and_warn)
    assert waited == {"elsewhere": 1}


def _wait_and_warn() -> None:
    torch.ones(1).to(DEVICE)
    warnings.warn("something else", stacklevel=1)


def test_operators_and_bytes_are_those_of_the_device() -> None:
    """Views and allocations are free, and the backward, which runs in another thread, counts too."""
    rows = torch.ones(3, 4).to(DEVICE).requires_grad_()
    with OperatorCount() as counted, count() as counts:
        (rows.t()[1:] * 2).exp().sum().backward()
    assert counted.num_bytes == counts.bytes
    assert 0 < counted.operators <= counts.launches


def test_every_loss_is_measured(sim: Site) -> None:
    found = steps.measure_steps(sim, (ROWS,))
    assert [step.loss for step in found] == list(checks.LOSSES)
    for step in found:
        assert step.rows == ROWS
        assert step.waits is not None
        assert step.waits == pytest.approx(sum(step.waited.values()))
        assert min(step.operators, step.num_bytes, step.seconds, step.copy_seconds) > 0
        assert step.repeat == 0  # the simulated device adds in order
        assert step.deterministic == "yes"
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_is_not_deterministic_is_seen() -> None:
    """A gradient that differs in its last bits, and an operator that raises, as some do on an accelerator."""
    noise = iter([0.0, 0.0, 1e-7, 0.0])
    assert 0 < steps._repeat(lambda: torch.ones(3) + next(noise)) < 1e-6
    inputs = torch.ones(3, requires_grad=True)
    raising = lambda: torch.histc(inputs.detach()) if not torch.are_deterministic_algorithms_enabled() else _refuse()  # noqa: E731
    assert steps._deterministic(raising) == "histc has no deterministic implementation"
    assert steps._deterministic(lambda: inputs) == "yes"


def _refuse() -> None:
    raise RuntimeError("histc has no\n deterministic implementation")


def test_the_command_prints_a_table_and_writes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "_CHECKS", {"placement": checks.placement})
    monkeypatch.setattr(checks, "LOSSES", checks.LOSSES[:2])
    monkeypatch.setattr(steps, "ROWS", (20,))
    monkeypatch.setattr(steps, "PRODUCT", 8)
    monkeypatch.setattr(steps, "MOST_BYTES", 1_000)
    printed = {}
    for name, options in (("cpu", []), ("sim", ["--backend", "gloo"])):
        file = tmp_path / f"{name}.json"
        assert command.main("1", ["--device", name, *options, "--measure", "steps", "--json", str(file)]) == 0
        printed[name], content = capsys.readouterr().out, json.loads(file.read_text())
        assert set(content) == {"facts", "checks", "machine", "steps"}
        assert [step["loss"] for step in content["steps"]] == list(checks.LOSSES)
        assert [step["waits"] is None for step in content["steps"]] == [name == "cpu"] * 2
        assert content["facts"]["float32 products"] == "full"
        assert all(f"\n  {loss} " in printed[name] for loss in checks.LOSSES)
    assert "Waits of a step" not in printed["cpu"]
    assert "\n  SmoothAPLoss, 20: losses/" in printed["sim"]


# Placement


def test_a_wrong_current_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated device stays at device 0, whatever is set: with two devices to see, that is wrong for rank 1."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(command, "_CHECKS", {"placement": checks.placement})
    outcomes = {}
    for visible in (1, 2):
        monkeypatch.setattr(Backend, "device_count", lambda self, visible=visible: visible)
        with site.open_site("gloo", "sim", 60) as opened:
            assert opened.device == torch.device("sim", visible - 1)
            (result,) = command._run(opened)
        outcomes[visible] = (result.outcome, result.detail)
    assert outcomes[1] == ("passed", "device 0, of 1 that the process sees")
    assert outcomes[2][0] == "FAILED"
    assert "the current device is 0, but LOCAL_RANK is 1" in outcomes[2][1]


def _placed(*places: Place) -> list[str]:
    found = []
    for rank in range(len(places)):
        try:
            found.append(checks.placement(Site(rank, len(places), "", DEVICE, torch.float64, 0.0, places)))
        except checks.Failed as failure:
            found.append(str(failure))
    return found


def test_ranks_on_one_device_are_found() -> None:
    both = _placed(Place("a", None, 0, 2, ""), Place("a", None, 0, 2, ""))
    assert both[0] == "computes on device 0, and so does rank 1; LOCAL_RANK is not set"
    assert "rank 0" in both[1]
    named = _placed(Place("a", 0, 0, 1, "x"), Place("a", 1, 0, 1, "x"))
    assert "and so does rank 1" in named[0]
    for right in (
        [Place("a", 0, 0, 2, ""), Place("a", 1, 1, 2, "")],
        [Place("a", 0, 0, 2, ""), Place("b", 0, 0, 2, "")],
        [Place("a", 0, 0, 1, "x"), Place("a", 1, 0, 1, "y")],
        [Place("a", 0, 0, 1, ""), Place("a", 1, 0, 1, "")],
    ):
        assert all(text.startswith("device ") for text in _placed(*right)), right


# Float32 products


class Rounding(TorchDispatchMode):
    """Rounds the factors of matrix products to bfloat16; unless ``always``, not while full products are asked for."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and (self.always or not checks_full()):
            args = tuple(arg.bfloat16().float() for arg in args)
        return func(*args, **(kwargs or {}))


def checks_full() -> bool:
    return torch.backends.mkldnn.matmul.fp32_precision in ("ieee", "none")


def test_rounded_products_are_found(device: torch.device) -> None:
    assert site.products(device) == "full"
    with Rounding(always=True):
        assert site.products(device) == "ROUNDED, also inside the losses"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with Rounding(always=False):
            assert site.products(device) == "rounded, full inside the losses"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


# Costs


def test_costs_are_measured_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows, and times that grow from step to step: of the tried values the first is the fastest."""

    def run_once(tried: dict[str, Callable[[], object]], repeats: int, place: torch.device) -> dict[str, list[float]]:
        assert place == DEVICE
        for step in tried.values():
            step()
        return {name: [float(number)] for number, name in enumerate(tried, 1)}

    monkeypatch.setattr(costs, "interleave", run_once)
    monkeypatch.setattr(costs.Measurement, "rows", lambda self, rows: rows // 100)
    monkeypatch.setattr(costs, "NARROW", 0.02)
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
    source = entry[entry.index("Costs(") :].rstrip(",")
    assert isinstance(eval(source, {"Costs": Costs}), Costs)
    assert isinstance(eval(source, {"Costs": Costs}).interleaved, bool)
