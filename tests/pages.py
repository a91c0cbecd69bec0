"""The pages of docs/ and README.md: their Python blocks, what the page says they print, and a way to run them.

``python tests/pages.py`` prints the words of each page, without its code, and of each part of the site.
"""

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
    """Return the Python blocks alone."""
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


def words(page: str) -> int:
    """Return the number of words of a page outside of its fences; a word has a letter or a digit."""
    prose = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in prose.split())


def parts() -> dict[str, list[str]]:
    """Return the pages by the entry of the navigation that they stand under."""
    found: dict[str, list[str]] = {"README.md": ["README.md"]}
    for line in (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].splitlines():
        if line.startswith("  - "):
            found[line[4:].partition(":")[0]] = part = []
        part += [page for page in re.findall(r"\S+\.md", line) if page in PAGES]
    return found


if __name__ == "__main__":
    for name, pages in parts().items():
        print(f"{sum(map(words, pages)):6,}  {name}")
        for page in pages:
            print(f"          {words(page):6,}  {page}")
    print(f"{sum(map(words, PAGES)):6,}  all")
