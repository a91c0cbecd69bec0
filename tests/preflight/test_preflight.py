"""The preflight check passes on a correct setup, and names what is wrong otherwise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loss_cases import LOSSES
from on_ranks import on_ranks
from scripts import run_script
from torch import Tensor

from fullrank import losses
from fullrank.losses import smooth_ap
from fullrank.preflight import checks, command
from fullrank.preflight.site import Site

pytestmark = pytest.mark.slow


def _spoil_rows(*tensors: Any, **options: Any) -> Any:
    gathered = list(_gather_rows(*tensors, **options))
    if dist.get_rank() == 1 and gathered[0].shape[0] == 16:
        gathered[0] = gathered[0] + 1
    return tuple(gathered)


_gather_rows = checks.gather_rows


class _LocalSmoothAP(losses.SmoothAPLoss):
    """Ranks against the rows of this rank only, as a loss without gather does."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return smooth_ap(logits, targets, self.temperature) + 0 * super().forward(logits, targets)


class _Poisoned(losses.SmoothAPLoss):
    """Returns NaN where it gathers, with the right gradient."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        loss = super().forward(logits, targets)
        return loss if self.gather_distributed is False else loss + (loss * float("nan")).detach()


class _Silent(losses.SmoothAPLoss):
    """Returns zero for bad input instead of raising."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        try:
            return super().forward(logits, targets)
        except ValueError:
            return logits.sum() * 0


# What is replaced in the module of the checks, with what, the check that runs, its outcome and its detail.
FAULTS: dict[str, tuple[str, Any, str, str, str]] = {
    "rows on one rank": ("gather_rows", _spoil_rows, "gather, equal rows", "FAILED", "rows of torch.float64 differ"),
    "gradient": ("SmoothAPLoss", _LocalSmoothAP, "gradient of SmoothAPLoss", "FAILED", "off by "),
    "value": ("SmoothAPLoss", _Poisoned, "gradient of SmoothAPLoss", "FAILED", "off by inf"),
    "silence on bad input": ("SmoothAPLoss", _Silent, "agreement", "FAILED", "a rank did not raise"),
}


LINE = re.compile(r"^  (\S.*?)  +(passed|skipped|FAILED|not run) *(.*)$", re.MULTILINE)
NEED_RANKS = {"control", "agreement"}


def test_on_two_processes(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = run_script("fullrank", "--json", report, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: (outcome, detail) for name, outcome, detail in LINE.findall(done.stdout)}
    assert set(found) == set(command.CHECKS)
    assert {outcome for outcome, _ in found.values()} == {"passed"}
    # The control: half of the gradient is missing, so the checks above could have failed.
    assert found["control"][1] == "a gather without gradient gives 0.500 of it"
    for name, (_, detail) in found.items():
        if name.startswith("gradient of"):
            assert float(detail.split()[-1]) <= 1e-12
    content = json.loads(report.read_text())
    assert content["facts"]["world size"] == 2
    assert [check["name"] for check in content["checks"]] == list(command.CHECKS)


def test_on_one_process(tmp_path: Path) -> None:
    done = run_script("fullrank", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: outcome for name, outcome, _ in LINE.findall(done.stdout)}
    assert {name for name, outcome in found.items() if outcome == "skipped"} == NEED_RANKS
    assert set(found.values()) == {"passed", "skipped"}


LEAVING = """
import gc
import weakref
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
from fullrank.preflight.site import open_site

with open_site("gloo", "cpu", 60):
    DistributedDataParallel(Linear(2, 1))
    group = weakref.ref(dist.group.WORLD)
gc.collect()
print(group())
"""


@pytest.mark.full
def test_nothing_holds_the_group_after_its_end() -> None:
    """In a Python of its own: what other tests have imported, and when, decides."""
    assert subprocess.check_output([sys.executable, "-c", LEAVING], text=True) == "None\n"


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_a_fault_is_found(rank: int, fault: str) -> None:
    """And the checks after it still run."""
    site = Site(rank, dist.get_world_size(), "gloo", torch.device("cpu"), torch.float64, 1e-12)
    name, replacement, check, outcome, text = FAULTS[fault]
    kept = {key: command.CHECKS[key] for key in (check, "gather, no rows")}
    replacement.__name__ = name
    with (
        mock.patch.object(losses if hasattr(losses, name) else checks, name, replacement),
        mock.patch.object(command, "CHECKS", kept),
    ):
        first, after = command.run_checks(site)
    assert first[:2] == (check, outcome), first
    assert text in first.detail
    assert after[1:] == ("passed", "0 + 0 rows, gradients exact")


def test_every_loss_is_checked() -> None:
    classes = {loss.module.__name__ for loss in LOSSES.values() if "gather_distributed" in loss.arguments}
    assert {*checks.LOSSES} == classes - {"LossWarmupWrapper"}  # whose losses are


def test_a_failure_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(site: Site) -> str:
        raise checks.Failed("off by one")

    monkeypatch.setattr(command, "CHECKS", {"sums": fail, "rest": lambda site: "fine"})
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    report = tmp_path / "report.json"
    assert command.main("1.2.3", ["--device", "cpu", "--json", str(report)]) == 1
    printed = capsys.readouterr().out
    assert LINE.findall(printed) == [("sums", "FAILED", "rank 0: off by one"), ("rest", "passed", "fine")]
    assert "\n2 checks: 1 FAILED, 1 passed.\n" in printed
    assert [check["outcome"] for check in json.loads(report.read_text())["checks"]] == ["FAILED", "passed"]


def test_a_wrong_argument_is_named_before_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main("1.2.3", ["--json", "missing/found.json"])
    assert "missing is not a folder" in capsys.readouterr().err
