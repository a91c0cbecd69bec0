"""Record which lines of the package each test executes, in the processes of the tests too, for tests/mutants.py.

Nothing is recorded unless the variable FULLRANK_LINES names a folder. Each process appends to a file of its own: the
name of a test, then each line when that test executes it for the first time, so a process that is killed loses none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = os.environ.get("FULLRANK_LINES", "")


class Recorder:
    """Traces this process; ``begin`` names the test to which lines belong."""

    def __init__(self) -> None:
        (root,) = importlib.util.find_spec("fullrank").submodule_search_locations
        self._root = Path(root)
        self._files: dict[str, str] = {}  # by the name of a source file: its path below the root, "" for others
        self._left: dict[int, set[int]] = {}  # by code object: the lines that the test has not executed yet
        self._output = os.open(Path(FOLDER, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def begin(self, test: str) -> None:
        """The lines from here on are those of ``test``."""
        self._left.clear()
        self.write(f"> {test}")
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def write(self, text: str) -> None:
        os.write(self._output, f"{text}\n".encode())

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not self._file(code):
            return None
        if id(code) not in self._left:
            self._left[id(code)] = {line for *_, line in code.co_lines() if line}
        return self._step if self._left[id(code)] else None

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        code, line = frame.f_code, frame.f_lineno
        left = self._left.get(id(code), set())
        if event == "line" and line in left:
            left.discard(line)
            self.write(f"{self._file(code)}:{line}")
        return self._step

    def _file(self, code: CodeType) -> str:
        name = code.co_filename
        if name not in self._files:
            path = Path(name)
            below = path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else ""
            self._files[name] = "" if below.startswith((".", "benchmarks/", "docs/", "examples/", "tests/")) else below
        return self._files[name]


_recorder: Recorder | None = None


def begin(test: str) -> None:
    """Note the lines from here on as those of ``test``, as pytest names it in its variable, if lines are recorded."""
    global _recorder
    if FOLDER:
        _recorder = _recorder or Recorder()
        _recorder.begin(re.sub(r" \((setup|call|teardown)\)$", "", test))


def note(test: str, seconds: float, passed: bool) -> None:
    """Note how long a part of a test took, and whether it passed."""
    if _recorder is not None:
        _recorder.write(f"= {seconds:.4f} {int(passed)} {test}")
