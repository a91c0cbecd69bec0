"""Print the notes of a release: its section of CHANGELOG.md.

Usage: python .ci/release_notes.py v1.2.3

Refuses a tag that is not the version of ``__init__.py`` and CITATION.cff, and a release with no address in setup.cfg.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release_notes(tag: str, root: Path = ROOT) -> str:
    """Return the section of a version, without its heading."""
    problems = []
    for name, pattern in (("__init__.py", r'^__version__ = "(.*)"$'), ("CITATION.cff", r"^version: (.*)$")):
        found = re.findall(pattern, (root / name).read_text("utf-8"), re.MULTILINE)
        if found != [tag.removeprefix("v")]:
            problems.append(f"{name} has the version {', '.join(found)}")
    if "example.org" in (root / "setup.cfg").read_text("utf-8"):
        problems.append("url in setup.cfg is the placeholder")
    parts = re.split(r"^## \[(.*?)\].*\n", (root / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2]))
    notes = sections.get(tag.removeprefix("v"), "").strip()
    if not notes:
        problems.append("CHANGELOG.md has no section for it, or an empty one")
    if problems:
        raise SystemExit(f"{tag}: " + "; ".join(problems))
    return notes


if __name__ == "__main__":
    print(release_notes(sys.argv[1]))
