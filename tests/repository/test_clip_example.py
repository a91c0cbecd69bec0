"""The example of clipping over mixed meshes runs, finds the norm of one process, and torch's own function does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "clip_mixed_mesh.py"


def test_it_prints_what_it_promises(tmp_path: Path) -> None:
    done = run_script(SCRIPT, cwd=tmp_path, processes=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr.lower()
    (alone,) = re.findall(r"one process +(\S+) +(\S+)", done.stdout)
    (ours,) = re.findall(r"fullrank +(\S+) +(\S+)", done.stdout)
    assert all(abs(float(own) / float(right) - 1) < 1e-13 for own, right in zip(ours, alone))
    assert "same bits on all ranks: True" in done.stdout
    assert "_StridedShard" in done.stdout  # the placement that is_shard() does not know
    # torch refuses all three, the last with some gradients scaled; each mesh by itself leaves more than max_norm.
    assert done.stdout.count("RuntimeError: ") == 3
    assert "after 4 of 11 gradients have been scaled" in done.stdout
    (left,) = re.findall(r"norm (\S+) after clipping to 0\.1", done.stdout)
    assert float(left) > 0.15


def test_it_needs_four_processes(tmp_path: Path) -> None:
    done = run_script(SCRIPT, cwd=tmp_path, processes=2)
    assert done.returncode != 0
    assert "--nproc-per-node: expected 4, got 2" in done.stderr
