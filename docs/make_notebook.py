"""Run notebooks from top to bottom and store what they print and draw: python docs/make_notebook.py [NAME ...].

Without a name, all of examples/.

No Jupyter is needed. Pictures are stored as SVG, so that the page of the site gives them its own colours.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from figures import RC

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def code_cells(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the cells of code, each with its source."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield cell, "".join(cell["source"])


class Shown(io.StringIO):
    """Keeps what is printed, and shows it at once."""

    def write(self, text: str) -> int:
        assert sys.__stdout__ is not None
        print(text, end="", file=sys.__stdout__, flush=True)
        return super().write(text)


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the cells in order, write their outputs into them, and return the names that they define."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (cell, source) in enumerate(code_cells(notebook), start=1):
        with contextlib.redirect_stdout(Shown()) as printed:
            exec(source, names)
        cell["execution_count"] = number
        cell["outputs"] = [
            {"output_type": "display_data", "metadata": {}, "data": picture()} for _ in plt.get_fignums()
        ]
        if text := printed.getvalue():
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
    return names


def picture() -> dict[str, list[str]]:
    """Return the current figure as SVG, and close it."""
    file = io.StringIO()
    plt.savefig(file, format="svg", metadata={"Date": None})
    plt.close()
    return {"image/svg+xml": file.getvalue().splitlines(keepends=True)}


if __name__ == "__main__":
    for path in [FOLDER / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        content, start = json.loads(path.read_text("utf-8")), time.perf_counter()
        with plt.rc_context(RC):
            run(content)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} kB, {time.perf_counter() - start:.0f} s")
