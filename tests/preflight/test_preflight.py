"""The preflight check passes where all is well, says what is wrong where it is not, and its exit status tells."""

import json
import os
import re
import subprocess
import sys

import preflight_cases
import pytest
from workers import WorkerPool

from fullrank.preflight import command

LINE = re.compile(r"^  (\S.*?)  +(passed|skipped|FAILED|not run) *(.*)$", re.MULTILINE)
NEED_RANKS = {"control", "agreement", "latency", "bandwidth"}


def _launch(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_on_two_processes(tmp_path):
    report = tmp_path / "report.json"
    done = _launch(
        "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "fullrank", "--json", report, cwd=tmp_path
    )
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
    done = _launch("fullrank", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: outcome for name, outcome, _ in LINE.findall(done.stdout)}
    assert {name for name, outcome in found.items() if outcome == "skipped"} == NEED_RANKS
    assert set(found.values()) == {"passed", "skipped"}


@pytest.mark.parametrize(
    ("fault", "check", "text"),
    [
        ("gradient of one loss", "gradient of SmoothAPLoss", "off by "),
        ("value of one loss", "gradient of SmoothAPLoss", "off by inf"),
        ("rows on one rank", "gather, equal rows", "rank 1: rows differ"),
        ("silence on bad input", "agreement", "a rank did not raise"),
    ],
)
def test_a_fault_is_found(pool_of_two: WorkerPool, fault: str, check: str, text: str) -> None:
    """And the checks after it go on."""
    for outcomes in pool_of_two(preflight_cases.with_fault, fault, check):
        (outcome, detail), after = outcomes
        assert outcome == "FAILED"
        assert text in detail
        assert after == ("passed", "0 + 0 rows, gradients exact")


def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(command, "_CHECKS", {"sums": preflight_cases.raise_failed, "rest": lambda site: "fine"})
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert command.main("1.2.3", ["--device", "cpu"]) == 1
    lines = LINE.findall(capsys.readouterr().out)
    assert lines == [("sums", "FAILED", "rank 0: off by one"), ("rest", "passed", "fine")]


def test_a_folder_that_is_not_there_is_named_before_the_checks(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main("1.2.3", ["--json", str(tmp_path / "missing" / "found.json")])
    assert "is not a folder" in capsys.readouterr().err
