"""docs/reliability.md names tests that exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


def named_tests(page):
    """The (file, function) of each name in `code`; `::name` alone stands for the file named before it in its cell."""
    names, file = [], None
    for found in re.findall(r"`((?:test_\w+\.py)?(?:::\w+)?)`", page):
        head, _, function = found.partition("::")
        file = head or file
        names.append((file, function))
    return names


@functools.cache
def functions(file):
    """The names of the functions of a test file. The base names are unique, so the page names no folder."""
    (path,) = TESTS.rglob(file)
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "function"), sorted(set(named_tests(PAGE.read_text()))))
def test_the_test_exists(file, function):
    found = functions(file)
    assert not function or function in found


def test_names_are_found_in_a_page():
    page = "| a | `test_x.py::test_a`, `::test_b` |\n| b | `no_test` | `test_y.py` |"
    assert named_tests(page) == [("test_x.py", "test_a"), ("test_x.py", "test_b"), ("test_y.py", "")]
    assert len(named_tests(PAGE.read_text())) > 40
