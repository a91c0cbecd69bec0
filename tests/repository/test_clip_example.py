"""The example of clipping over mixed meshes runs, finds the norm of one process, and torch's own function does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import run_script

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "clip_mixed_mesh.py"
FIVE = SCRIPT.with_name("clip_five_dimensions.py")
PAGE = SCRIPT.parents[1] / "docs" / "gradient-norm.md"


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


def test_five_dimensions(tmp_path: Path) -> None:
    """The page quotes the whole output."""
    done = run_script(FIVE, cwd=tmp_path, processes=8)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, ours, no_experts, no_stages = (
        float(re.search(rf"{name} +(\S+)", done.stdout)[1])
        for name in ("one process", "fullrank", "without shard_groups", "without across")
    )
    assert abs(ours / alone - 1) < 1e-13
    assert "same bits on all ranks: True" in done.stdout
    assert max(no_experts, no_stages) < 0.97 * alone  # the controls
    placed = ("data _StridedShard, tp Shard", "copies Replicate, own Shard, a different one on each rank of tp")
    assert all(text in done.stdout for text in placed)
    (quoted,) = re.findall(r"```text\n(norm\.weight.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    number = re.compile(r"\d+\.\d+|\d+e-\d+")
    assert number.sub("#", quoted).split() == number.sub("#", done.stdout).split()
    norms = [[float(found) for found in number.findall(text) if "." in found] for text in (quoted, done.stdout)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
