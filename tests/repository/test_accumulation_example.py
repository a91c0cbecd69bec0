"""The example of accumulation runs, its curves coincide where they must, and it says so when they do not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import run_script

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT = EXAMPLES / "accumulation.py"
# label, gap
LINE = re.compile(r"^    (\S.*\S) +(\d\.\de[+-]\d+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """The module that compares the curves."""
    spec = importlib.util.spec_from_file_location("accumulation_report", EXAMPLES / "accumulation_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_processes(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--steps", 2, "--output", "figures/curves.png", cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = LINE.findall(done.stdout)
    assert len(found) == 3 * 8 + 4
    exact = [float(gap) for label, gap in found if label.startswith(("accumulate", "pooled_backward"))]
    naive = [float(gap) for label, gap in found if label.startswith("mean of") and "1 x 512" not in label]
    assert max(exact) <= 1e-12
    # Mixed and extreme lengths, and SmoothAP; the control, equal lengths, stands between them.
    assert min(naive[:8] + naive[12:]) > 1e-4
    assert max(naive[8:12]) <= 1e-12
    assert (tmp_path / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert done.stdout.isascii()
    assert "warning" not in done.stderr.lower()


@pytest.mark.parametrize(("value", "is_kept"), [(1.0, True), (1.0 + 1e-9, False), (float("nan"), False)])
def test_a_gap_is_seen(report: ModuleType, capsys: Any, value: float, is_kept: bool) -> None:
    whole, other = [(0, 2.0), (1, 1.0)], [(0, 2.0), (1, value)]
    panel = report.Panel("rows", "loss", whole, {"naive": [(0, 9.0), (1, 9.0)]}, {"exact": other})
    assert report.print_gaps([panel], 1e-12) is is_kept
    assert ("BROKEN. The exit status is 1" in capsys.readouterr().out) is not is_kept
    held = panel._replace(naive_must_coincide=True)
    assert not report.print_gaps([held], 1e-12)


def test_a_bad_option_is_named(tmp_path: Path) -> None:
    done = run_script(SCRIPT, "--steps", 0, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: --steps: expected a number >= 1, got 0" in done.stderr
