"""``make gpu`` keeps what it has measured, whatever ends it, and knows the tests that take a device."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripts import imported

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS.parent / "benchmarks" / "gpu.py"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_killed_it_leaves_what_it_has_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--out", str(tmp_path)]
    process = subprocess.Popen([*command, "--budget", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
    file, parts = tmp_path / "gpu.json", {}
    try:
        while process.poll() is None and len(parts) < 2:
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
