"""The public signatures, with the names and the defaults of their arguments, are those in interface.txt.

``python tests/repository/test_interface.py > interface.txt`` in this folder writes those of the package.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

OF_TORCH = {*dir(torch.nn.Module)} - {"forward"}
TABLE = Path(__file__).with_name("interface.txt")
FOLDERS = ["", ".accumulation", ".data", ".distributed", ".gradients", ".large", ".losses", ".metrics", ".queues"]
FRAMEWORKS = [f".integrations.{name}" for name in ("lightning", "sentence_transformers", "sklearn", "transformers")]


def without_types(function: Any) -> inspect.Signature:
    parameters = inspect.signature(function).parameters.values()
    return inspect.Signature([one.replace(annotation=one.empty) for one in parameters])


def signatures(module: str) -> Iterator[str]:
    """Yield those of functions and constructors, and of methods that have a default, by the folder they are in."""
    public = importlib.import_module(f"fullrank{module}")
    for name in getattr(public, "__all__", dir(public)):
        value = getattr(public, name)
        package, _, place = str(getattr(value, "__module__", "")).partition(".")
        if package != "fullrank" or not place.startswith(module[1:]) or name.startswith("_") or not callable(value):
            continue
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        path = f"{place if module in FRAMEWORKS else place.partition('.')[0]}.{name}"
        yield f"{path}{without_types(value)}"
        for method, function in inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else ():
            is_ours = not method.startswith("_") and str(function.__module__).startswith("fullrank")
            is_ours = is_ours and not (issubclass(value, torch.nn.Module) and method in OF_TORCH)
            if is_ours and "=" in (arguments := str(without_types(function))):
                yield f"{path}.{method}{arguments}"


def lines(modules: list[str]) -> list[str]:
    return sorted({line for module in modules for line in signatures(module)})


@pytest.mark.parametrize("modules", [FOLDERS, pytest.param(FRAMEWORKS, marks=pytest.mark.slow)], ids=len)
def test_names_and_defaults_of_arguments(modules: list[str]) -> None:
    table = TABLE.read_text("utf-8").splitlines()
    assert lines(modules) == [line for line in table if line.startswith("integrations.") == (modules is FRAMEWORKS)]


if __name__ == "__main__":
    print("\n".join([*lines(FOLDERS), *lines(FRAMEWORKS)]))
