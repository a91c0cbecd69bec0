"""The benchmarks run and leave their results. What they measure is not looked at: a test that times fails at random."""

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def test_speed_writes_its_results(tmp_path):
    command = [sys.executable, str(FOLDER / "speed.py"), "--quick", "--repeats", "1", "--out", str(tmp_path)]
    # One thread: on busy cores, threads that wait for each other take seconds for what takes microseconds.
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "speed.json").read_text())
    assert {"against_peer", "against_sort", "growth", "machine"} <= set(results)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
