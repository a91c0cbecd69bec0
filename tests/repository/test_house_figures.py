"""The figures of tests/house.py are right on a small package whose figures are known."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import house
import pytest

SETTINGS = "[options]\npackages =\n    small\n    small.rooms\n    small.cellar\n"
SOURCES = {
    "__init__.py": '"""The root."""\n',
    "rooms/__init__.py": "",
    "rooms/verb.py": '''
        """A verb.

        A docstring of three lines.
        """

        from functools import partial

        from ..cellar.held import Held, make
        from ..cellar.named import attempt, plain, unrelated, used_late
        from .steps import first, third, unreached

        FIGURE = 1  # a comment at the end of a line of code


        # A comment.
        def verb(model, other):
            """One line."""
            kept = first(model)
            result, error = attempt(lambda: third(kept))
            unreached(other)
            unrelated("model")
            text = """two lines
            of code"""
            return result, error, text, partial(plain, model)


        def objects(model):
            held = Held(model)
            held.use()
            made = make(model)
            made.use()


        def nothing(model):
            return FIGURE
    ''',
    "rooms/steps.py": """
        def first(model):
            return _once(model) + _twice(model) + _twice(2)


        def third(kept):
            return kept


        def unreached(other):
            return other


        def _once(model):
            return model


        def _twice(model):
            return model


        class Method:
            def _never(self):
                return 0
    """,
    "cellar/__init__.py": "",
    "cellar/named.py": """
        def attempt(function):
            return function(), None


        def plain(model):
            return model


        def unrelated(text):
            return text


        def used_late(model):
            return model
    """,
    "cellar/held.py": """
        from .named import used_late


        class Held:
            def __init__(self, model):
                self.model, self.other = model, 0

            def use(self):
                return used_late(self.model)

            def keep(self):
                return used_late(self.other)


        def make(model) -> Held:
            return Held(model)
    """,
}


@pytest.fixture
def files(tmp_path: Path) -> list[house.File]:
    (tmp_path / "setup.cfg").write_text(SETTINGS)
    for name, source in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(source).lstrip("\n"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text("not = code")  # no package, so never read
    return house.read_package(tmp_path)


def size(files: list[house.File], package: str) -> house.Size:
    return house.size_of([file for file in files if file.package == package], house.private_references(files))


def test_sizes(files: list[house.File]) -> None:
    assert [file.module for file in files if file.package != "cellar"] == ["", "rooms", "rooms.steps", "rooms.verb"]
    root, rooms = size(files, ""), size(files, "rooms")
    assert (root.files, root.lines, root.code) == (1, 1, 0)
    assert (rooms.files, rooms.longest, rooms.longest_name) == (3, 35, "verb.py")


def test_lines_of_code_are_those_without_blank_lines_comments_and_docstrings(files: list[house.File]) -> None:
    (verb,) = (file for file in files if file.module == "rooms.verb")
    # 4 imports, 1 constant, 8 of verb (the text has two), 5 of objects, 2 of nothing.
    assert house.count_code_lines(verb.text, verb.tree) == 20


def test_private_functions_are_counted_and_so_are_those_that_are_referenced_once(files: list[house.File]) -> None:
    references = house.private_references(files)
    assert {name: count for (_, name), count in references.items()} == {"_once": 1, "_twice": 2, "_never": 0}
    assert (size(files, "rooms").private, size(files, "rooms").once) == (3, 1)
    assert (size(files, "cellar").private, size(files, "cellar").once) == (0, 0)


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("verb", ["rooms.verb", "rooms.steps", "cellar.named"]),  # named through partial, not through attempt
        ("objects", ["rooms.verb", "cellar.held", "cellar.named"]),  # named through the attribute
        ("nothing", ["rooms.verb"]),
        ("Held.__init__", ["cellar.held"]),
        ("Held.keep", ["cellar.held"]),  # control: an attribute that does not hold the argument
    ],
)
def test_the_files_that_an_argument_passes(files: list[house.File], verb: str, expected: list[str]) -> None:
    assert [file.module for file in house.files_passed(files, verb, "model")] == expected


def test_a_function_that_receives_a_lambda_does_not_receive_what_it_uses(files: list[house.File]) -> None:
    (verb,) = (file for file in files if file.module == "rooms.verb")
    without_partial = verb.text.replace("partial(plain, model)", "0")
    assert without_partial != verb.text
    verb.path.write_text(without_partial)
    files = house.read_package(verb.path.parents[1])
    assert [file.module for file in house.files_passed(files, "verb", "model")] == ["rooms.verb", "rooms.steps"]


def test_an_unknown_verb_is_named(files: list[house.File]) -> None:
    with pytest.raises(LookupError, match="no nowhere in the package"):
        house.files_passed(files, "nowhere", "model")


@pytest.mark.slow
def test_the_script_prints_this_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["house.py"])
    house.main()
    text = capsys.readouterr().out
    for name in ("total", "kernels", "pooled_backward(model): ", "DeferredMean.__init__(model): "):
        assert name in text
