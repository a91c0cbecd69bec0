"""The example of accumulation runs, its curves coincide where they must, and it says so when they do not."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import run_script

pytestmark = pytest.mark.full

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
    """One step of the toy, and paragraphs of a few tokens."""
    done = run_script(
        SCRIPT, "--steps", 1, "--length", 24, "--output", "figures/curves.json", cwd=tmp_path, processes=2
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sections = re.split(r"\n\n  (?=\S)", done.stdout)[1:]
    gaps = [{label: float(gap) for label, gap in LINE.findall(section)} for section in sections]
    has_transformers = importlib.util.find_spec("transformers") is not None
    assert [len(found) for found in gaps] == [8, 8, *[6] * has_transformers, 6]
    for number, found in enumerate(gaps):
        exact = [gap for label, gap in found.items() if label.startswith(("accumulate", "pooled_backward"))]
        naive = [gap for label, gap in found.items() if label.startswith("mean of") and "1 x 512" not in label]
        assert max(exact) <= 1e-12
        # The control with equal lengths is the second.
        assert max(naive) <= 1e-12 if number == 1 else min(naive) > 1e-5
    panels = json.loads((tmp_path / "figures" / "curves.json").read_text("utf-8"))
    assert [len(panel["whole"]) for panel in panels] == [2, 2, *[3] * has_transformers, 4]
    assert done.stdout.isascii()
    assert "warning" not in done.stderr.lower()


def test_the_page_quotes_the_curves() -> None:
    """The table of the page and the picture are of one run."""
    page = (EXAMPLES.parent / "docs" / "accumulation.md").read_text("utf-8")
    panels = json.loads((EXAMPLES.parent / "benchmarks" / "results" / "accumulation.json").read_text("utf-8"))
    assert [panel["title"] for panel in panels if panel["in_picture"]] == [panels[-2]["title"], panels[-1]["title"]]
    for title, first, last in re.findall(r"^  (\S.*): loss from (\S+) to (\S+)$", page, re.MULTILINE):
        (panel,) = (panel for panel in panels if panel["title"] == title)
        assert [panel["whole"][0], panel["whole"][-1]] == pytest.approx([float(first), float(last)], abs=1e-3)
        for label, curve in panel["naive"].items():
            gap = max(abs(value / other - 1) for value, other in zip(curve, panel["whole"]))
            (quoted,) = re.findall(rf"^  {re.escape(title)}.*?^    {label} +(\S+)$", page, re.MULTILINE | re.DOTALL)
            assert float(quoted) == pytest.approx(gap, rel=0.06) or max(float(quoted), gap) < 1e-5


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
