"""Run the tests in several pytest processes side by side, and end with the sum of their counts.

One pytest process leaves a core idle whenever a test needs no worker, starts a program or waits for a network. So the
folders are shared out: most of the tests over ranks, most of those that compute in one process together with the
gradients, and those that start many programs.
The output of the first share is printed as it comes, that of the others after it. The fast tests are shared by two
processes, since starting a third one costs more than it brings. Further arguments are passed on to all::

    python tests/run.py               all but the tests marked `full` (see tests/pytest.ini)
    python tests/run.py --quick -x    the fast tests
    python tests/run.py --full        all
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import IO

TESTS = Path(__file__).resolve().parent
APART = [("gradients", "kernels", "losses", "metrics"), ("integrations", "preflight", "queues", "repository")]
APART_QUICK = [("integrations", "kernels", "losses", "metrics", "preflight", "queues", "repository")]
NOTHING_COLLECTED = 5  # pytest's exit status, which is no failure for a share of the tests


def main(arguments: list[str]) -> int:
    """Return 0 if all processes passed."""
    apart, select = APART, "not full"
    if arguments[:1] == ["--quick"]:
        apart, select, arguments = APART_QUICK, "not slow and not full", arguments[1:]
    elif arguments[:1] == ["--full"]:
        select, arguments = "", arguments[1:]
    arguments = ["-m", select, *arguments] if select else arguments
    # The first share is whatever the others leave, so that no file is forgotten.
    shares = [[str(TESTS), *(f"--ignore={TESTS / name}" for names in apart for name in names)]]
    shares += [[str(TESTS / name) for name in names] for names in apart]
    counts = Counter({"passed": 0, "failed": 0, "skipped": 0})
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in apart]
        processes = []
        for share, output in zip(shares, [subprocess.PIPE, *outputs]):
            command = [sys.executable, "-m", "pytest", *share, *arguments]
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            stack.callback(processes[-1].kill)
        counts.update(_counts(_echo(processes[0].stdout)))
        for process, output in zip(processes[1:], outputs):
            process.wait()
            output.seek(0)
            counts.update(_counts(_echo(output)))
        codes = {process.wait() for process in processes}
    for code in codes - {0, 1, NOTHING_COLLECTED}:
        print(f"a share broke off: pytest ended with status {code}")
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return 0 if codes <= {0, NOTHING_COLLECTED} else 1


def _echo(stream: IO[bytes]) -> str:
    """Print what comes, as it comes, and return the last part of it."""
    text = b""
    while part := os.read(stream.fileno(), 65536):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        text = (text + part)[-10_000:]
    return text.decode(errors="replace")


def _counts(output: str) -> dict[str, int]:
    """Return the counts of pytest's summary, the last line with a time; a run that broke off has none."""
    summary = next((line for line in reversed(output.splitlines()) if re.search(r" in \d+\.\d+s", line)), "")
    kinds = r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)"
    return {kind: int(number) for number, kind in re.findall(kinds, summary)}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
