"""README.md: what it shows runs and prints what it says."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pages
import pytest
from scripts import run_script

README = pages.PAGES["README.md"]
(CODE, EXPECTED), _ = pages.printing_blocks("README.md")
(PROGRAMS, PRINTED) = re.findall(r"```sh\n((?:(?!```).)*)```\n\n```text\n(.*?)```", README, re.DOTALL)[0]


def test_the_six_lines() -> None:
    names: dict = {}
    printed = pages.output_of(CODE, names)
    assert printed == EXPECTED
    # Positives at places 2 and 4 of 4: an average precision of 1/2.
    assert names["loss"].item() == pytest.approx(1 / 2, abs=1e-2)


def recorded(name: str) -> dict[str, Any]:
    """Return the results that a benchmark has left; test_benchmarks.py runs it again."""
    return json.loads((pages.ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def test_the_gradients_of_the_table_are_those_of_the_benchmark() -> None:
    found = {(row["key"], row["world_size"]): row for row in recorded("gradient_scale")["gradient_scale"]}
    keys = "no_gather", "swapped", "swapped_w", "own_summed", "own_summed_uneven", "fullrank"
    for key, line in zip(keys, README.partition("| gather |")[2].splitlines()[2:8], strict=True):
        of_worlds = [found[key, world] for world in (2, 4)]
        for name, cell in zip(("encoder", "scale", "loss"), line.strip("|").split("|")[1:]):
            shown = [float(Fraction(number)) for number in re.findall(r"\d+/\d+|\d+\.\d+|\d+", cell)]
            assert shown == [round(row[name], 2) for row in of_worlds], (key, name)
        is_multiple = max(row["error"] - abs(row["encoder"] - 1) for row in of_worlds) < 1e-6
        assert ("another direction" in line) is not is_multiple


def test_the_gains_are_those_of_the_benchmark() -> None:
    kind = "weighted cross-entropy + SmoothAP", "cross-entropy"
    rows = [row for row in recorded("real")["budgets"] if (row["method"], row["base"]) == kind]
    gains = {row["steps"]: f"{row['mean']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]" for row in rows}
    text = f"gains {gains[100]} of average precision over cross-entropy after 100 steps, {gains[1600]} after 1,600"
    assert text in " ".join(README.split())


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    """The gradients of README, and the same with four processes."""
    assert "python -m fullrank.demo" in PROGRAMS
    done = run_script("fullrank.demo", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, PRINTED), done.stderr
    done = run_script("fullrank.demo", 4, cwd=tmp_path)
    assert [line.split()[-2:] for line in done.stdout.splitlines()[2:]] == [["0.25", "0.75"], ["1.00", "0.00"]]


@pytest.mark.slow
def test_the_short_script_of_the_ddp_page(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(pages.block_with("recipes/ddp.md", "# short.py"), encoding="utf-8")
    done = run_script(script, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss \d\.\d{4}, temperature \d\.\d\d\n", done.stdout), done.stdout


@pytest.mark.slow
def test_the_report_of_a_step(tmp_path: Path) -> None:
    """The report of README is that of the example, up to rounding, whose second step is exact."""
    done = run_script(pages.ROOT / "examples" / "verify_step.py", cwd=tmp_path, processes=2)
    by_hand, fullrank = done.stdout.removeprefix("by_hand\n").split("with_fullrank\n")
    (text,) = re.findall(r"```text\n(verify_step: .*?)```", README, re.DOTALL)
    pages.assert_printed(by_hand, text)
    assert fullrank.startswith("verify_step: exact")
