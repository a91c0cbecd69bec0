"""docs/reliability.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_the_tests_of_the_page_exist():
    """In a cell `::name` alone stands for the file named before it; the base names of files are unique."""
    missing, file = [], None
    texts = {path.name: path.read_text("utf-8") for path in TESTS.rglob("test_*.py")}
    for found in re.findall(r"`((?:test_\w+\.py)?(?:::\w+)?)`", PAGE.read_text("utf-8")):
        head, _, function = found.partition("::")
        file = head or file
        if file not in texts or (function and f"\ndef {function}(" not in texts[file]):
            missing.append(f"{file}::{function}")
    assert missing == []
