"""Run the tests in two pytest processes side by side, and end with the sum of their counts.

One pytest process leaves a core idle whenever a test needs no worker, starts a program or waits for a network. So the
folders of ``APART``, which start many programs, run next to all others. Arguments are passed on to both::

    python tests/run.py -m "not slow"
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import IO

TESTS = Path(__file__).resolve().parent
APART = [TESTS / name for name in ("integrations", "preflight", "queues", "repository")]
NOTHING_COLLECTED = 5  # pytest's exit status, which is no failure for a part of the tests


def main(arguments: list[str]) -> int:
    """Return 0 if both processes passed."""
    shares = [[TESTS, *(f"--ignore={folder}" for folder in APART)], APART]
    with tempfile.TemporaryFile() as output:
        first, second = (
            subprocess.Popen([sys.executable, "-m", "pytest", *map(str, share), *arguments], stdout=out, stderr=err)
            for share, out, err in zip(shares, (subprocess.PIPE, output), (None, subprocess.STDOUT))
        )
        try:
            counts = _counts(_echo(first.stdout))
            codes = [first.wait(), second.wait()]
        finally:
            for process in (first, second):
                process.kill()
        output.seek(0)
        counts += _counts(_echo(output))
    for code in set(codes) - {0, 1, NOTHING_COLLECTED}:
        print(f"a part broke off: pytest ended with status {code}")
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return 0 if set(codes) <= {0, NOTHING_COLLECTED} else 1


def _echo(stream: IO[bytes]) -> str:
    """Print what comes, as it comes, and return the last part of it."""
    text = b""
    while part := os.read(stream.fileno(), 65536):
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()
        text = (text + part)[-10_000:]
    return text.decode(errors="replace")


def _counts(output: str) -> Counter[str]:
    """Return the counts of pytest's summary, the last line with a time; a run that broke off has none."""
    summary = next((line for line in reversed(output.splitlines()) if re.search(r" in \d+\.\d+s", line)), "")
    kinds = r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)"
    found = Counter({"passed": 0, "failed": 0, "skipped": 0})
    for number, kind in re.findall(kinds, summary):
        found[kind] += int(number)
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
