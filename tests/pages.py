"""The pages of docs/ and README.md: their Python blocks, what the page says they print, and a way to run them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))}
PAGES["README.md"] = (ROOT / "README.md").read_text("utf-8")
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def printing_blocks(page: str, section: str = "") -> list[tuple[str, str]]:
    """Return the Python blocks of a page, or of a section with its heading, each with what it prints."""
    text = PAGES[page]
    if section:
        (text,) = (part for part in re.split(r"^##+ ", text, flags=re.MULTILINE) if part.startswith(f"{section}\n"))
    return BLOCK.findall(text)


def blocks(page: str, section: str = "") -> list[str]:
    return [code for code, _ in printing_blocks(page, section)]


def block_with(page: str, text: str) -> str:
    """Return the only block of a page that contains ``text``."""
    (block,) = [block for block in blocks(page) if text in block]
    return block


def output_of(code: str, names: dict[str, Any]) -> str:
    """Return what a block prints, and leave what it defines in ``names``."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return out.getvalue()


def run_block(block: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute a block on ``names``, which get what it defines."""
    with contextlib.redirect_stderr(io.StringIO()):
        output_of(block, names)
    return names


def assert_printed(found: str, expected: str) -> None:
    """Compare word by word; the last digits of a training depend on the machine."""
    assert NUMBER.sub("#", found).split() == NUMBER.sub("#", expected).split()
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=0.04)
