"""The runners tests/run.py and ``make gpu``: what fails and what hangs is said, and nothing is left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run
from scripts import imported
from workers import RemoteError, WorkerPool

PASSES = "def test():\n    pass\n"
FAILS = "def test_a():\n    assert False\n"
EXITS = "def test_b():\n    import pytest\n    pytest.exit('enough', returncode=0)\n"
HANGS = """
def test_c():
    import pathlib, subprocess, time
    program = subprocess.Popen(["sleep", "60"])
    print("hangs", flush=True)
    path = pathlib.Path(__file__).with_name("writing")
    path.write_text(str(program.pid))
    path.rename(path.with_name("pid"))
    time.sleep(60)
"""


@pytest.fixture
def run_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Run one job with the server of these tests, and return why it failed."""
    monkeypatch.setattr(run, "start_server", lambda output: None)

    def call(source: str, *arguments: str, limit_s: float = 120.0) -> list[str]:
        (tmp_path / "test_it.py").write_text(source, "utf-8")
        job = run.Job("it", [str(tmp_path / "test_it.py")])
        return run.run_all([job], list(arguments), tmp_path, limit_s)[0]

    return call


@pytest.mark.parametrize(
    ("source", "failed"),
    [
        (PASSES, []),
        (FAILS, ["it failed"]),
        (PASSES + EXITS, ["it broke off with status 0"]),
    ],
)
def test_a_job_passes_only_if_all_its_tests_ran(
    run_job: Callable[..., list[str]], source: str, failed: list[str]
) -> None:
    assert run_job(source) == failed


def test_a_failure_that_is_counted_is_one_whatever_the_status(tmp_path: Path) -> None:
    for text, reasons in (("3 passed", []), ("1 failed, 3 passed", ["it failed"]), ("1 error", ["it failed"])):
        (tmp_path / "it").write_text(f"===== {text} in 0.10s =====\n", "utf-8")
        ended: Any = SimpleNamespace(exitcode=0)
        assert run.finish(run.Running(run.Job("it", ["it"]), ended, tmp_path / "it", 0.0), run.Counter()) == reasons


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc to see which processes run")


@needs_proc
@pytest.mark.slow
def test_a_job_that_hangs_is_killed_with_its_programs(
    run_job: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a clock that jumps to the limit as soon as the program runs."""

    def clock() -> float:
        return time.monotonic() + 600 * (tmp_path / "pid").exists()

    monkeypatch.setattr(run, "time", SimpleNamespace(sleep=time.sleep, monotonic=clock))
    reasons = run_job(HANGS, "-s", limit_s=600.0)
    assert reasons == ["it was killed after 600 s", "it broke off with status -9"]
    assert "hangs" in capsys.readouterr().out
    assert not is_running(int((tmp_path / "pid").read_text("ascii")))


@needs_proc
def test_after_an_interrupt_the_output_is_shown_and_the_folder_removed(
    run_job: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def sleep(seconds: float) -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    (tmp_path / "test_it.py").write_text(HANGS, "utf-8")
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    monkeypatch.setenv("TMPDIR", "unset")
    monkeypatch.setattr(run, "test_jobs", lambda quick: [run.Job("it", [str(tmp_path / "test_it.py")])])
    monkeypatch.setattr(run, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert run.main(["-s"]) == 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "hangs" in capsys.readouterr().out
    assert Path(os.environ["TMPDIR"]).parent == tmp_path / "own"  # where all that starts puts its files
    assert list((tmp_path / "own").iterdir()) == []
    assert not is_running(int((tmp_path / "pid").read_text("ascii")))


def dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal that kills")
def test_a_worker_that_is_killed_is_named() -> None:
    with pytest.raises(RemoteError, match="rank 0: no answer\nrank 1: killed by SIGKILL"):
        WorkerPool(2)(dies)


# ``make gpu`` keeps what it has measured, whatever ends it, and knows the tests that take a device

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS.parent / "benchmarks" / "gpu.py"


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_killed_it_leaves_what_it_has_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--out", str(tmp_path)]
    process = subprocess.Popen([*command, "--budget", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
    file, parts = tmp_path / "gpu.json", {}
    try:
        while process.poll() is None and parts.get("environment", {"status": "running"})["status"] == "running":
            time.sleep(0.05)
            parts = json.loads(file.read_text())["parts"] if file.exists() else {}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    parts = json.loads(file.read_text())["parts"]
    assert parts["environment"]["status"] == "0"
    assert parts["environment"]["results"][0]["device"] == "cpu"


def test_every_file_with_tests_that_take_a_device_is_listed() -> None:
    takes_device = re.compile(r"^def test_\w+\([^)]*\bdevice: torch\.device", re.MULTILINE)
    found = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py") if takes_device.search(path.read_text())}
    assert found - {*imported(SCRIPT).TESTS} == set()
    assert all((TESTS / name).exists() for name in imported(SCRIPT).TESTS)
