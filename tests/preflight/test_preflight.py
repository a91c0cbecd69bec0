"""The preflight check passes on a correct setup, names what is wrong otherwise, and its exit status says which."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from scripts import run_script
from workers import WorkerPool

from fullrank import losses
from fullrank.losses import DistributedLoss, hard_negative_cross_entropy, smooth_ap
from fullrank.preflight import checks, command, steps
from fullrank.preflight.site import Site

pytestmark = pytest.mark.slow


def raise_failed(site: Site) -> str:
    raise checks.Failed("off by one")


def _spoil_rows(*tensors: Any, **options: Any) -> Any:
    gathered = list(_gather_rows(*tensors, **options))
    if dist.get_rank() == 1 and gathered[0].shape[0] == 16:
        gathered[0] = gathered[0] + 1
    return tuple(gathered)


_gather_rows = checks.gather_rows


class _LocalSmoothAP(checks.SmoothAPLoss):
    """Ranks against the rows of this rank only, as a loss without gather does."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return smooth_ap(logits, targets, self.temperature) + 0 * super().forward(logits, targets)


class _LocalHardNegative(checks.HardNegativeCrossEntropyLoss):
    """Takes the hardest negatives of this rank only."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return hard_negative_cross_entropy(logits, targets, self.share) + 0 * super().forward(logits, targets)


class _Poisoned(checks.SmoothAPLoss):
    """Returns NaN where it gathers, with the right gradient."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        loss = super().forward(logits, targets)
        return loss if self.gather_distributed is False else loss + (loss * float("nan")).detach()


class _Silent(checks.SmoothAPLoss):
    """Returns zero for bad input instead of raising."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        try:
            return super().forward(logits, targets)
        except ValueError:
            return logits.sum() * 0


class _Unordered(checks.SmoothAPLoss):
    """Adds up in another order than the object before it, as atomic operations do: a few last bits differ."""

    size, objects = 1e-15, 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _Unordered.objects += 1
        self.factor = 1 + self.size * (_Unordered.objects % 2)

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(logits, targets) * self.factor


class _Wrong(_Unordered):
    """Differs by more than the promise."""

    size = 1e-10


def with_fault(rank: int, fault: str, check: str) -> list[tuple[str, str]]:
    """Return outcome and detail of ``check``, run with ``fault``, and of another check after it."""
    site = Site(rank, dist.get_world_size(), "gloo", torch.device("cpu"), torch.float64, 1e-12)
    replacement: dict[str, Any] = {
        "gradient of one loss": ("SmoothAPLoss", _LocalSmoothAP),
        "gradient of another loss": ("HardNegativeCrossEntropyLoss", _LocalHardNegative),
        "value of one loss": ("SmoothAPLoss", _Poisoned),
        "rows on one rank": ("gather_rows", _spoil_rows),
        "silence on bad input": ("SmoothAPLoss", _Silent),
        "last bits": ("SmoothAPLoss", _Unordered),
        "more than last bits": ("SmoothAPLoss", _Wrong),
    }
    kept = {key: command._CHECKS[key] for key in (check, "gather, no rows")}
    with mock.patch.object(checks, *replacement[fault]), mock.patch.object(command, "_CHECKS", kept):
        return [(result.outcome, result.detail) for result in command._run(site)]


LINE = re.compile(r"^  (\S.*?)  +(passed|skipped|FAILED|not run) *(.*)$", re.MULTILINE)
NEED_RANKS = {"control", "agreement", "latency", "bandwidth"}


def test_on_two_processes(tmp_path):
    report = tmp_path / "report.json"
    done = run_script("fullrank", "--json", report, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: (outcome, detail) for name, outcome, detail in LINE.findall(done.stdout)}
    assert set(found) == set(command._CHECKS)
    assert {outcome for outcome, _ in found.values()} == {"passed"}
    # The control: half of the gradient is missing, so the checks above could have failed.
    assert found["control"][1] == "a gather without gradient gives 0.500 of it"
    for name, (_, detail) in found.items():
        if name.startswith("gradient of"):
            assert float(detail.split()[-1]) <= 1e-12
    content = json.loads(report.read_text())
    assert content["facts"]["world size"] == 2
    assert [check["name"] for check in content["checks"]] == list(command._CHECKS)


def test_on_one_process(tmp_path):
    done = run_script("fullrank", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: outcome for name, outcome, _ in LINE.findall(done.stdout)}
    assert {name for name, outcome in found.items() if outcome == "skipped"} == NEED_RANKS
    assert set(found.values()) == {"passed", "skipped"}


@pytest.mark.parametrize(
    ("fault", "check", "text"),
    [
        ("gradient of one loss", "gradient of SmoothAPLoss", "off by "),
        ("gradient of one loss", "gradient of SmoothAPLoss, automatic", "off by "),
        ("gradient of another loss", "gradient of HardNegativeCrossEntropyLoss", "off by "),
        ("value of one loss", "gradient of SmoothAPLoss", "off by inf"),
        ("rows on one rank", "gather, equal rows", "rank 1: rows differ"),
        ("silence on bad input", "agreement", "a rank did not raise"),
        ("more than last bits", "agreement", "the next step is off by 1.0e-10"),
    ],
)
def test_a_fault_is_found(pool_of_two: WorkerPool, fault: str, check: str, text: str) -> None:
    """And the checks after it still run."""
    for outcomes in pool_of_two(with_fault, fault, check):
        (outcome, detail), after = outcomes
        assert outcome == "FAILED"
        assert text in detail
        assert after == ("passed", "0 + 0 rows, gradients exact")


def test_the_last_bits_may_differ(pool_of_two: WorkerPool) -> None:
    for (outcome, detail), _ in pool_of_two(with_fault, "last bits", "agreement"):
        assert outcome == "passed", detail


def measured(rank: int) -> list[steps.StepCost]:
    """Return the steps of rows that the ranks gather."""
    site = Site(rank, dist.get_world_size(), "gloo", torch.device("cpu"), torch.float64, 1e-12)
    return steps.measure_steps(site, (20,))


def test_steps_are_measured_over_ranks(pool_of_two: WorkerPool) -> None:
    first, second = pool_of_two(measured)
    assert [step.loss for step in first] == list(checks.LOSSES)
    for one, other in zip(first, second):
        assert one.waits is None
        assert one.operators > 0
        assert (one.seconds, one.copy_seconds) == (other.seconds, other.copy_seconds)  # those of the slowest rank


def test_every_loss_is_checked() -> None:
    """Each class, and the automatic temperature of those that have it by default."""
    classes = {name for name in losses.__all__ if isinstance(getattr(losses, name), type)}
    classes = {name for name in classes if issubclass(getattr(losses, name), DistributedLoss)}
    bases = {"DistributedLoss", "FocalLoss", "RankingLoss"}
    assert {name.partition(",")[0] for name in checks.LOSSES} == classes - bases
    for name, (loss, _) in checks.make_losses(torch.device("cpu")).items():
        assert (getattr(loss, "temperature", 0.0) is None) == name.endswith(", automatic")


def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(command, "_CHECKS", {"sums": raise_failed, "rest": lambda site: "fine"})
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert command.main("1.2.3", ["--device", "cpu"]) == 1
    lines = LINE.findall(capsys.readouterr().out)
    assert lines == [("sums", "FAILED", "rank 0: off by one"), ("rest", "passed", "fine")]


def test_a_folder_that_is_not_there_is_named_before_the_checks(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main("1.2.3", ["--json", str(tmp_path / "missing" / "found.json")])
    assert "is not a folder" in capsys.readouterr().err
