"""The example of docs/contributing.md is a whole loss: in a copy of the repository it passes what all losses pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT

pytestmark = pytest.mark.full

SECTION = PAGES["contributing.md"].partition("## Add a loss\n")[2].partition("\n## ")[0]
# Each block, by the last file that the text before it names.
BLOCKS = {
    re.findall(r"`([\w/]+\.\w+)`", before)[-1]: block
    for before, block in re.findall(r"(.*?)```(?:python|text)\n(.*?)```", SECTION, re.DOTALL)
}
ROW = "tests/loss_cases.py"
NAME = "pairwise_hinge"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the loss."""
    folder = tmp_path_factory.mktemp("copy") / "repository"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "site", "build", "*.egg-info")
    shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
    for name, block in BLOCKS.items():
        path = folder / name
        text = path.read_text("utf-8") if path.exists() else ""
        text = (
            text.replace("\n)\nLOSSES: ", f"\n{block.rstrip()},\n)\nLOSSES: ") if name == ROW else f"{text}\n\n{block}"
        )
        path.write_text(text, "utf-8")
    (folder.parent / "link").mkdir()
    (folder.parent / "link" / "fullrank").symlink_to(folder, target_is_directory=True)
    return folder


def run_tests(folder: Path, *arguments: str) -> tuple[str, dict[str, int]]:
    """Return what pytest prints in the copy, and its counts."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", "tests/pytest.ini", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder.parent / "link")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout, done.stderr
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout.splitlines()[-1])
    return done.stdout, {kind: int(number) for number, kind in counts}


def test_five_files_are_touched() -> None:
    assert len(BLOCKS) == 5


def test_the_tests_of_all_losses_pass(copy: Path) -> None:
    """On one process and on two; that no other loss has become wrong is what the other tests show."""
    folders = [
        f"tests/{name}" for name in ("losses", "conformance", "distributed", "queues", "kernels", "test_device.py")
    ]
    others = "test_every_loss_is_checked or test_every_public or test_every_loss_has or has_the_defaults"
    text, counts = run_tests(copy, *folders, "-m", "not slow and not full", "-k", f"{NAME} or {others}")
    assert counts.keys() <= {"passed", "skipped"}, text
    assert counts["passed"] > 60, text


def test_control_a_wrong_formula_fails(copy: Path) -> None:
    path = copy / "losses/pooled/pairwise_hinge.py"
    text = path.read_text("utf-8")
    assert "margin - pool" in text
    path.write_text(text.replace("margin - pool", "0.9 * margin - pool"), "utf-8")
    try:
        printed, counts = run_tests(copy, "tests/losses/test_loss_values.py", "-k", NAME, "-x")
    finally:
        path.write_text(text, "utf-8")
    assert counts["failed"] == 1
    assert "test_module_with_queue_over_three_steps" in printed
