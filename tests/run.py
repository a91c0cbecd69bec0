"""Run the tests and the checks as jobs, as many at a time as there are cores, and end with the sum of their counts.

A server imports torch once and forks each folder of tests as a pytest process, and the workers of all of them. Small
folders share a process, in the fast tests all do. What a job prints is shown when it ends. Further arguments are passed
on to pytest::

    python tests/run.py                all tests but those marked `full` (see tests/pytest.ini)
    python tests/run.py --quick -x     the fast tests
    python tests/run.py --full         all tests
    python tests/run.py --checks       also lint, types and, unless --quick, the documentation
    python tests/run.py --lanes        the fast tests, once in each of LANES; SEED=7 draws an order again

A job that takes longer than --limit seconds is killed. All temporary files are in one folder, which is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

from processes import COSTLY, process_context

TESTS = Path(__file__).resolve().parent
# glibc gives large blocks back to the system when they are freed, and new pages are 7 % of the time of all tests.
KEPT_BYTES = {"MALLOC_MMAP_THRESHOLD_": str(2**28), "MALLOC_TRIM_THRESHOLD_": str(2**29)}

CORES = max(2, os.cpu_count() or 2)
NOTHING_COLLECTED = 5  # pytest's exit status, which is no failure for a part of the tests

# The order in which jobs start, the longest first; a folder that is not here comes after them.
FIRST = ["types", "conformance", "distributed", "losses", "gradients", "accumulation", "integrations", "repository"]
FIRST += ["metrics", "kernels", "preflight", "docs"]
# What shares a process, where starting pytest and its workers takes as long as the tests of a folder: of the fast tests
# all, of the others the small folders.
TOGETHER = [
    ["distributed", "gradients", "large", "queues"],
    ["conformance", "accumulation"],
    ["repository", "data", "integrations", "preflight"],
    ["kernels", "metrics", "tests"],
]
SMALL = [["gradients", "large", "queues", "data"], ["metrics", "tests"]]

# The fast tests on other processors, with other numbers of threads, and without the help of the tests before: each
# capability and each number once, not their product. Threads that wait for each other give their core away: there are
# more of them than cores.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
LANES: dict[str, tuple[dict[str, str], list[str]]] = {
    "DEFAULT": ({"ATEN_CPU_CAPABILITY": "default", "FULLRANK_TEST_THREADS": "1"}, []),
    "AVX2": ({"ATEN_CPU_CAPABILITY": "avx2", "FULLRANK_TEST_THREADS": "2", **PASSIVE}, []),
    "AVX512": ({"ATEN_CPU_CAPABILITY": "avx512", "FULLRANK_TEST_THREADS": "4", **PASSIVE}, []),
    "new workers for each test": ({}, ["--cold"]),
    "a drawn order": ({}, ["--shuffle"]),
}


class Job(NamedTuple):
    """Files and folders of tests for one pytest process; without any, the target of the Makefile with that name."""

    name: str
    paths: list[str]


class Running(NamedTuple):
    """A job that has started: its process, the file of its output and the time at which it started."""

    job: Job
    process: Any
    output: Path
    start: float


def main(arguments: list[str]) -> int:
    """Return 0 if all jobs passed."""
    usage = "python tests/run.py [--quick | --full | --lanes] [--checks] [--limit SECONDS] [arguments of pytest]"
    parser = argparse.ArgumentParser(usage=usage)
    for name in ("--quick", "--full", "--checks", "--lanes"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--limit", type=float, default=2400.0)
    own, arguments = parser.parse_known_args(arguments)
    if own.lanes:
        return run_lanes(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    checks = ["types", "lint", *([] if own.quick else ["docs"])] if own.checks else []
    if not own.full:
        arguments = ["-m", "not slow and not full" if own.quick else "not full", *arguments]
    with tempfile.TemporaryDirectory(prefix="fullrank-", ignore_cleanup_errors=True) as folder:
        os.environ.update({**KEPT_BYTES, "TMPDIR": folder})  # of all that starts below
        try:
            jobs = [*(Job(name, []) for name in checks), *test_jobs(own.quick)]
            failed, counts = run_all(jobs, arguments, Path(folder), own.limit)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        if failed:
            print(f"== workers\n{Path(folder, 'workers').read_text('utf-8', 'replace')}")
    for reason in failed:
        print(reason)
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return 1 if failed else 0


def run_lanes(arguments: list[str]) -> int:
    """Run the fast tests in each lane that this processor has; return 0 if all passed."""
    import torch

    capabilities = ["DEFAULT", "AVX2", "AVX512"]
    best = torch.backends.cpu.get_cpu_capability()
    lacking = capabilities[capabilities.index(best) + 1 :] if best in capabilities else capabilities[1:]
    failed = []
    for name, (variables, options) in LANES.items():
        seed = [os.environ.get("SEED") or str(random.randrange(10**6))] if "--shuffle" in options else []
        if name in lacking:
            print(f"== lane {name}: left out, this processor has {best}", flush=True)
            continue
        print(f"== lane {name}:", *(f"{key}={value}" for key, value in variables.items()), *options, *seed, flush=True)
        command = [sys.executable, __file__, "--quick", *options, *seed, *arguments]
        if subprocess.run(command, env=os.environ | variables).returncode:
            failed.append(" ".join([name, *seed]))
    print("== lanes:", f"failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def test_jobs(quick: bool) -> list[Job]:
    """Return a job for each folder of tests, or for those that are together, and for the files next to this one."""
    folders = sorted({path.parent for path in TESTS.rglob("test_*.py")} - {TESTS})
    paths = {folder.relative_to(TESTS).as_posix(): [str(folder)] for folder in folders}
    paths["tests"] = [str(path) for path in sorted(TESTS.glob("test_*.py"))]
    together = TOGETHER if quick else SMALL
    alone = [[name] for name in paths if all(name not in names for names in together)]
    return [Job(" ".join(names), [path for name in names for path in paths[name]]) for names in [*together, *alone]]


def run_all(jobs: list[Job], arguments: list[str], folder: Path, limit_s: float) -> tuple[list[str], Counter[str]]:
    """Run the jobs; return a reason for each that failed, and the sum of the counts."""
    failed: list[str] = []
    counts = Counter({"passed": 0, "failed": 0, "skipped": 0})
    order = {name: place for place, name in enumerate(FIRST)}
    waiting = sorted(jobs, key=lambda job: order.get(job.name.partition(" ")[0], len(FIRST)))
    running: list[Running] = []
    start_server(folder / "workers")
    try:
        while waiting or running:
            for job in waiting[: CORES - len(running)]:
                waiting.remove(job)
                running.append(start(job, arguments, folder / job.name.replace("/", "-")))
            time.sleep(0.05)
            for one in running[:]:
                is_late = time.monotonic() - one.start > limit_s
                if is_late:
                    kill(one.process)
                    failed.append(f"{one.job.name} was killed after {limit_s:.0f} s")
                if is_late or status_of(one.process) is not None:
                    running.remove(one)
                    failed += finish(one, counts)
    finally:  # after an interrupt
        for one in running:
            kill(one.process)
            finish(one, counts)
    return failed, counts


def start_server(output: Path) -> None:
    """Start the server of all processes. It and the workers write to a file, which is shown after a failure."""
    process_context(*COSTLY)
    kept = [os.dup(1), os.dup(2)]
    write_to(output)
    forkserver.ensure_running()
    for number, saved in enumerate(kept, start=1):
        os.dup2(saved, number)
        os.close(saved)


def start(job: Job, arguments: list[str], output: Path) -> Running:
    """Start a job."""
    process: Any
    if job.paths:
        process = process_context(*COSTLY).Process(target=run_pytest, args=([*job.paths, *arguments], output))
        process.start()
    else:
        command = ["make", "--no-print-directory", job.name]
        with output.open("wb") as file:
            options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(command, cwd=TESTS.parent, **options)
    return Running(job, process, output, time.monotonic())


def status_of(process: Any) -> int | None:
    """Return how a process has ended: an exit status, or a signal below 0; None if it runs."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def kill(process: Any) -> None:
    """Kill a job and the programs that it has started; the workers of its tests end with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # before it has a group
    process.wait() if isinstance(process, subprocess.Popen) else process.join()


def run_pytest(arguments: list[str], output: Path) -> None:
    """Be a pytest process."""
    write_to(output)
    os.setsid()
    import pytest

    # The server has imported plugins of pytest, which have no assertions of tests that pytest would rewrite.
    sys.exit(pytest.main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))


def write_to(output: Path) -> None:
    """Send what this process prints to a file."""
    sys.stdout.flush()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


def finish(one: Running, counts: Counter[str]) -> list[str]:
    """Print the output of a job that has ended, add its counts, and return why it failed."""
    text, status = one.output.read_text("utf-8", "replace"), status_of(one.process)
    print(f"== {one.job.name}: {time.monotonic() - one.start:.0f} s\n{text}", flush=True)
    found = counts_of(text)
    counts.update(found)
    if one.job.paths and status in (0, 1, NOTHING_COLLECTED):
        # A test that ends the process with status 0 leaves no summary; after pytest.exit a line of it says so.
        broke_off = not found or re.search(r"^!+ \S*outcomes\.Exit: ", text, re.MULTILINE) is not None
        failed = status == 1 or bool(found.get("failed", 0) + found.get("errors", 0))
    else:
        broke_off, failed = bool(one.job.paths), status != 0
    if broke_off:
        return [f"{one.job.name} broke off with status {status}"]
    return [f"{one.job.name} failed"] if failed else []


def counts_of(output: str) -> dict[str, int]:
    """Return the counts of pytest's summary, the last line with a time; a run that broke off has none."""
    summary = next((line for line in reversed(output.splitlines()) if re.search(r" in \d+\.\d+s", line)), "")
    kinds = r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)"
    return {re.sub("^(error|warning)$", r"\1s", kind): int(number) for number, kind in re.findall(kinds, summary)}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
