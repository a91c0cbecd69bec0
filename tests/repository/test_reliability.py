"""docs/reliability.md names tests that exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def test_the_tests_of_the_page_exist():
    """In a cell `::name` alone stands for the file named before it; the base names of files are unique."""
    missing, file = [], None
    for found in re.findall(r"`((?:test_\w+\.py)?(?:::\w+)?)`", PAGE.read_text("utf-8")):
        head, _, function = found.partition("::")
        file = head or file
        (tree,) = [ast.parse(path.read_text("utf-8")) for path in TESTS.rglob(file)] or [ast.Module([])]
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if not names or (function and function not in names):
            missing.append(f"{file}::{function}")
    assert missing == []
