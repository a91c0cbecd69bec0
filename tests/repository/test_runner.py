"""The runner of the tests, tests/run.py, and the hooks of tests/conftest.py."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import run
import torch
from workers import RemoteError, WorkerPool

# By its path: in a process with other folders the name is that of another file.
SPEC = importlib.util.spec_from_file_location("conftest_of_all", Path(run.__file__).with_name("conftest.py"))
assert SPEC is not None
assert SPEC.loader is not None
conftest = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(conftest)

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
        (FAILS + EXITS, ["it broke off with status 0"]),
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


def test_errors_are_one_count() -> None:
    for kind in ("error", "errors"):
        counts = run.counts_of(f"==== 3 passed, 2 {kind}, 1 warning in 0.10s ====")
        assert counts == {"passed": 3, "errors": 2, "warnings": 1}


def dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signal that kills")
def test_a_worker_that_is_killed_is_named() -> None:
    with pytest.raises(RemoteError, match="rank 0: no answer\nrank 1: killed by SIGKILL"):
        WorkerPool(2)(dies)


def test_lanes_cover_each_capability_and_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A processor without AVX-512 leaves its lane out; a drawn order is that of the seed that is given."""
    runs = []

    def record(command: list[str], env: dict[str, str]) -> Any:
        runs.append((command[2:], env.get("ATEN_CPU_CAPABILITY"), env.get("FULLRANK_TEST_THREADS")))
        return SimpleNamespace(returncode=int("--cold" in command))

    monkeypatch.setattr(subprocess, "run", record)
    monkeypatch.setenv("SEED", "7")
    for name in ("ATEN_CPU_CAPABILITY", "FULLRANK_TEST_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert run.main(["--lanes", "-x"]) == 1
    assert runs == [
        (["--quick", "-x"], "default", "1"),
        (["--quick", "-x"], "avx2", "2"),
        (["--quick", "--cold", "-x"], None, None),
        (["--quick", "--shuffle", "7", "-x"], None, None),
    ]
    printed = capsys.readouterr().out
    assert "lane AVX512: left out, this processor has AVX2\n" in printed
    assert "--shuffle 7\n" in printed
    assert printed.endswith("failed: new workers for each test\n")


def test_cold_ends_the_workers_of_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(conftest, "close_pools", lambda: closed.append(1))
    for is_cold in (False, True):
        item: Any = SimpleNamespace(config=SimpleNamespace(getoption={"cold": is_cold}.get))
        conftest.pytest_runtest_teardown(item)
    assert closed == [1]


class Item:
    """What the hook needs of a collected test."""

    def __init__(self, file: str, size: int, *marks: str, own: bool = True) -> None:
        self.path, self.name = Path(file), f"{file}[{size}-{marks}]"
        self.callspec = SimpleNamespace(params={"pool": size})
        self.marks = [getattr(pytest.mark, mark).mark for mark in marks]
        self.own_markers = self.marks if own else []

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def add_marker(self, name: str) -> None:
        self.marks.append(getattr(pytest.mark, name).mark)


def collected(seed: int | None) -> list[tuple[str, list[str]]]:
    items: Any = [
        Item("a", 2),
        Item("a", 3, "full", "full"),  # left out for two reasons
        Item("a", 3, "full"),
        Item("a", 3, "full"),
        Item("b", 3),  # already there
        Item("b", 3, "full"),
        Item("c", 3, "full", own=False),  # a mark of the whole file
        *(Item("d", size) for size in range(4, 20)),
    ]
    config: Any = SimpleNamespace(getoption={"shuffle": seed}.get)
    conftest.pytest_collection_modifyitems(config, items)
    return [(item.name, [mark.name for mark in item.marks]) for item in items]


def test_one_case_of_three_processes_of_each_file_is_not_full_but_slow() -> None:
    marks = [marks for _, marks in collected(None)[:7]]
    assert marks == [[], ["full", "full"], ["slow"], ["full"], [], ["full"], ["full"]]


def test_a_seed_draws_one_order() -> None:
    assert collected(1) == collected(1) != collected(None)
    assert sorted(collected(1)) == sorted(collected(None))
