"""The notes of a release, which .github/workflows/release.yml makes of CHANGELOG.md, and what its jobs may do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import imported

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "__init__.py": '__version__ = "0.2.0"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 0.2.0\n",
    "setup.cfg": "[metadata]\nurl = https://forge.test/owner/fullrank\n",
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n- later\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- this\n\n"
    "## [0.1.0] - 2026-01-01\n\n- first\n",
}


def notes(tag: str, folder: Path, **changed: str) -> str:
    for name, text in FILES.items():
        (folder / name).write_text(changed.get(name.partition(".")[0].strip("_"), text), "utf-8")
    return imported(ROOT / ".ci" / "release_notes.py").release_notes(tag, folder)


def test_the_notes_are_the_section_of_the_version(tmp_path: Path) -> None:
    assert notes("v0.2.0", tmp_path) == "### Added\n\n- this"


@pytest.mark.parametrize(
    ("tag", "changed", "reason"),
    [
        ("v0.1.0", {}, "__init__.py has the version 0.2.0; CITATION.cff has the version 0.2.0"),
        ("v0.2.0", {"CITATION": "cff-version: 1.2.0\nversion: 0.1.0\n"}, "CITATION.cff"),
        ("v0.2.0", {"CHANGELOG": "## [Unreleased]\n\n- this\n"}, "CHANGELOG.md"),
        ("v0.2.0", {"CHANGELOG": "## [0.2.0]\n\n## [0.1.0]\n\n- first\n"}, "CHANGELOG.md"),
        ("v0.2.0", {"setup": "[metadata]\nurl = https://example.org/OWNER/fullrank\n"}, "placeholder"),
    ],
)
def test_a_release_that_is_not_ready(tag: str, changed: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^{tag}: .*{reason}"):
        notes(tag, tmp_path, **changed)


WORKFLOWS = {path.stem: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_no_checkout_keeps_credentials(name: str) -> None:
    uses = re.findall(r"uses: (.*)", WORKFLOWS[name])
    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use)] == []
    assert WORKFLOWS[name].count("actions/checkout@") == WORKFLOWS[name].count("persist-credentials: false")
    assert "concurrency:" in WORKFLOWS[name]
