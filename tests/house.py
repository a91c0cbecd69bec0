"""Figures of the layout: how large each folder is, and through how many files the main argument of a verb passes.

Usage: python tests/house.py [--root FOLDER]

Reads the source with ``ast``; nothing is imported, so the script also runs on an older checkout (``--root``). The
packages are those that setup.cfg lists. One line per folder:

- lines, and code lines: those without blank lines, comments and docstrings;
- the longest file, in lines;
- private functions and methods (one leading underscore), and how many of them are referenced once. References to a
  function are counted in its own file and in the files that import it by name; references to a method, in all files.

How many files an argument passes, by a static reading of the calls:

1. Start in the function, with the name of the argument.
2. A name that is assigned from an expression that contains a tracked name is tracked too; so are the targets of ``for``
   and ``with``. An attribute ``self.x`` that holds a tracked value is tracked in all methods of the class.
3. A call of a function, class or method of the package is followed when a tracked name is among its arguments, or is
   the object whose method is called. ``partial(f, x)`` counts as ``f(x)``. A lambda or a nested function is read where
   it is defined: what it calls is followed, but whoever receives the function does not receive the names that it uses.
4. Calls are followed depth-first, each function once for each set of tracked names. Counted are the distinct files that
   are entered, the first one included.

The class of an object is known when a constructor, a return annotation or a parameter annotation names it; the methods
of other objects are not followed. So the figure is a lower bound on what has to be read.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import io
import tokenize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
# The verbs whose main argument is followed.
VERBS = (
    ("pooled_backward", "model"),
    ("clip_grad_norm_", "parameters"),
    ("accumulate", "model"),
    ("DeferredMean.__init__", "model"),
)


class File(NamedTuple):
    """One file of the package; ``package`` is the dotted name of its folder, "" for the root."""

    path: Path
    package: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The dotted name below the root: that of the folder for an ``__init__.py``."""
        stem = "" if self.path.stem == "__init__" else self.path.stem
        return ".".join(part for part in (self.package, stem) if part)


def read_package(root: Path) -> list[File]:
    """Return the files of the packages that setup.cfg lists, in its order."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    files = []
    for name in config["options"]["packages"].split():
        package = name.partition(".")[2]
        for path in sorted(root.joinpath(*package.split(".")).glob("*.py")):
            text = path.read_text("utf-8")
            files.append(File(path, package, text, ast.parse(text)))
    return files


# Sizes


class Size(NamedTuple):
    """The figures of one folder, or of all."""

    files: int
    lines: int
    code: int
    longest: int
    longest_name: str
    private: int
    once: int


def count_code_lines(text: str, tree: ast.Module) -> int:
    """Return the number of lines without blank lines, comments and docstrings."""
    rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            rows.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node) is not None:
            rows.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(rows)


def private_references(files: Sequence[File]) -> dict[tuple[Path, str], int]:
    """Return how often each private function (file, name) is referenced."""
    nodes = {file.path: list(ast.walk(file.tree)) for file in files}
    names = {path: Counter(getattr(n, "attr", getattr(n, "id", "")) for n in found) for path, found in nodes.items()}
    imports = {
        path: {alias.name for n in found if isinstance(n, ast.ImportFrom) for alias in n.names}
        for path, found in nodes.items()
    }
    references = {}
    for path, found in nodes.items():
        methods = {item for node in found if isinstance(node, ast.ClassDef) for item in node.body}
        for node in found:
            if isinstance(node, FUNCTIONS) and node.name.startswith("_") and not node.name.startswith("__"):
                where = [other for other in names if node in methods or other == path or node.name in imports[other]]
                references[path, node.name] = sum(names[other][node.name] for other in where)
    return references


def size_of(files: Sequence[File], references: dict[tuple[Path, str], int]) -> Size:
    """Return the figures of ``files``."""
    lines = {file.path: len(file.text.splitlines()) for file in files}
    code = sum(count_code_lines(file.text, file.tree) for file in files)
    counts = [count for (path, _), count in references.items() if path in lines]
    longest = max(lines, key=lambda path: lines[path])
    return Size(
        len(lines), sum(lines.values()), code, lines[longest], longest.name, len(counts), sum(n == 1 for n in counts)
    )


# The way of an argument


class Place(NamedTuple):
    """A function or a class and where it stands; ``owner`` is the class of a method."""

    file: File
    node: Function | ast.ClassDef
    owner: ast.ClassDef | None = None


class Reader:
    """Follows one argument through the calls of the package; ``entered`` are the files, in order."""

    def __init__(self, files: Sequence[File]) -> None:
        self.modules = {file.module: file for file in files}
        self.entered: list[File] = []
        self.known: dict[Path, dict[str, Function | ast.ClassDef | tuple[str, str]]] = {}
        self.done: set[tuple[int, frozenset[str]]] = set()
        self.held: dict[int, set[str]] = {}  # by class: the attributes, as "self.x", that hold a tracked name

    def find(self, file: File, name: str) -> Place | None:
        """Return the function or class that ``name`` means in ``file``, through the imports of the package."""
        if file.path not in self.known:
            self.known[file.path] = names_at_the_top(file)
        node = self.known[file.path].get(name)
        if isinstance(node, tuple):
            module, original = node
            return self.find(self.modules[module], original) if module in self.modules else None
        return None if node is None else Place(file, node)

    def method(self, place: Place | None, name: str) -> Place | None:
        """Return the method ``name`` of a class or of its bases in the package."""
        if place is None or not isinstance(place.node, ast.ClassDef):
            return None
        for node in place.node.body:
            if isinstance(node, FUNCTIONS) and node.name == name:
                return Place(place.file, node, place.node)
        bases = (self.find(place.file, base.id) for base in place.node.bases if isinstance(base, ast.Name))
        return next((found for base in bases if (found := self.method(base, name)) is not None), None)

    def enter(self, place: Place, tracked: set[str]) -> None:
        """Read a function with the names ``tracked``, then what it calls with them."""
        if place.file not in self.entered:
            self.entered.append(place.file)
        if (key := (id(place.node), frozenset(tracked))) in self.done:
            return
        self.done.add(key)
        body = Body(self, place, set(tracked))
        if place.owner is not None:
            self.held.setdefault(id(place.owner), set()).update(name for name in body.tracked if name[:5] == "self.")
        for call in body.calls:
            body.follow(call)


class Body:
    """One function: its calls, its tracked names, and the classes that its names are known to be of."""

    def __init__(self, reader: Reader, place: Place, tracked: set[str]) -> None:
        assert isinstance(place.node, FUNCTIONS)
        self.reader, self.place, self.tracked = reader, place, tracked
        self.classes = {"self": Place(place.file, place.owner)} if place.owner is not None else {}
        arguments = place.node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            self.classify([argument.arg], argument.annotation)
        nodes = [node for statement in place.node.body for node in ast.walk(statement)]
        self.calls = [as_call(node) for node in nodes if isinstance(node, ast.Call)]
        pairs = [pair for node in nodes for pair in assigned(node)]
        self.inner: set[str] = set()  # the nested functions that use a tracked name
        before = -1
        while before < len(self.tracked) + len(self.inner):  # a line may use what a later line of a loop assigns
            before = len(self.tracked) + len(self.inner)
            for target, value in pairs:
                names = names_of(target)
                if isinstance(value, ast.Call) and (callee := self.callee(as_call(value))) is not None:
                    is_class = isinstance(callee.node, ast.ClassDef)
                    self.classify(names, value.func if is_class else callee.node.returns, callee.file)
                # What a function returns may come from a function that it was given: attempt(lambda: f(model)).
                if self.contains(value, functions_too=True):
                    self.tracked.update(names)
            nested = (node for node in nodes if isinstance(node, FUNCTIONS))
            self.inner = {node.name for node in nested if self.contains(node, functions_too=True)}

    def classify(self, names: list[str], annotation: ast.expr | None, file: File | None = None) -> None:
        """Note that ``names`` are objects of the class of the package that ``annotation`` names, if it names one."""
        if isinstance(annotation, ast.Name):
            found = self.reader.find(file or self.place.file, annotation.id)
            if found is not None and isinstance(found.node, ast.ClassDef):
                self.classes |= dict.fromkeys(names, found)

    def callee(self, call: ast.Call) -> Place | None:
        """Return the function, method or class of the package that is called, None for others."""
        if isinstance(call.func, ast.Name):
            return self.reader.find(self.place.file, call.func.id)
        if not isinstance(call.func, ast.Attribute):
            return None
        owner = call.func.value
        known = self.classes.get(dotted(owner))
        if known is None and isinstance(owner, ast.Name):
            known = self.reader.find(self.place.file, owner.id)  # a class method
        return self.reader.method(known, call.func.attr)

    def contains(self, node: ast.AST, *, functions_too: bool = False) -> bool:
        """Return whether ``node`` contains a tracked name; ``functions_too``: also within a function that it names."""
        if isinstance(node, ast.Lambda) and not functions_too:
            return False
        name = dotted(node)
        if name in self.tracked or (functions_too and name in self.inner):
            return True
        return any(self.contains(part, functions_too=functions_too) for part in ast.iter_child_nodes(node))

    def follow(self, call: ast.Call) -> None:
        """Enter what ``call`` calls, if it is of the package and gets a tracked name."""
        place = self.callee(call)
        if place is None:
            return
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        held = self.reader.held.get(id(place.owner), set()) if place.owner is not None else set()
        is_held = receiver is not None and self.contains(receiver)
        if dotted(receiver) == "self":
            held = {name for name in self.tracked if name[:5] == "self."}
            is_held = bool(held)
        if not is_held and not any(map(self.contains, given)):
            return
        init = self.reader.method(place, "__init__")
        if isinstance(place.node, ast.ClassDef) and init is None:  # a NamedTuple or a dataclass
            if place.file not in self.reader.entered:
                self.reader.entered.append(place.file)
            fields = [item.target.id for item in place.node.body if isinstance(item, ast.AnnAssign)]
            tracked = self.parameters(call, fields)
            self.reader.held.setdefault(id(place.node), set()).update(f"self.{name}" for name in tracked)
            return
        target = init or place
        arguments = target.node.args
        names = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        tracked = self.parameters(call, names, arguments.vararg.arg if arguments.vararg else None)
        if tracked or is_held:
            self.reader.enter(target, tracked | (held if is_held else set()))

    def parameters(self, call: ast.Call, names: Sequence[str], rest: str | None = None) -> set[str]:
        """Return the parameters that get a tracked value; all of them from a tracked ``*value`` on."""
        tracked = {keyword.arg for keyword in call.keywords if keyword.arg and self.contains(keyword.value)}
        for index, value in enumerate(call.args):
            if self.contains(value):
                tracked.update(names[index:] if isinstance(value, ast.Starred) else names[index : index + 1])
                if rest is not None and (isinstance(value, ast.Starred) or index >= len(names)):
                    tracked.add(rest)
        return tracked


def names_at_the_top(file: File) -> dict[str, Function | ast.ClassDef | tuple[str, str]]:
    """Return what the names of a module mean: a definition, or (module, name) of a relative import."""
    names: dict[str, Function | ast.ClassDef | tuple[str, str]] = {}
    parts = file.package.split(".") if file.package else []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            module = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            names |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    return names | {node.name: node for node in file.tree.body if isinstance(node, DEFINITIONS)}


def as_call(call: ast.Call) -> ast.Call:
    """Return ``f(x)`` for ``partial(f, x)``, and other calls unchanged."""
    if isinstance(call.func, ast.Name) and call.func.id == "partial" and call.args:
        return ast.Call(call.args[0], call.args[1:], call.keywords)
    return call


def dotted(node: ast.AST | None) -> str:
    """Return ``x`` for the name x and ``self.x`` for that attribute, "" for other expressions."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return f"self.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_of(target: ast.expr) -> list[str]:
    """Return the names that an assignment to ``target`` sets."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for part in target.elts for name in names_of(part)]
    inner = target.value if isinstance(target, (ast.Starred, ast.Subscript)) else target
    return [dotted(inner)] if dotted(inner) else []


def assigned(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return the pairs of target and value of a statement, a loop or a comprehension."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, (ast.For, ast.comprehension)):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, ast.With):
        pairs = [(item.optional_vars, item.context_expr) for item in node.items if item.optional_vars is not None]
    else:
        return []
    split = []
    for target, value in pairs:
        alike = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)
        split += zip(target.elts, value.elts) if alike else [(target, value)]
    return split


def files_passed(files: Sequence[File], verb: str, argument: str) -> list[File]:
    """Return the files that ``argument`` of ``verb`` passes, in the order of reading; a method is ``Class.method``."""
    name, _, method = verb.partition(".")
    reader = Reader(files)
    for file in files:
        place = next((Place(file, node) for node in file.tree.body if getattr(node, "name", None) == name), None)
        if place is not None:
            start = reader.method(place, method) if method else place
            assert start is not None, f"{name} has no method {method}"
            reader.enter(start, {argument})
            return reader.entered
    raise LookupError(f"no {name} in the package")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=root, help="root of a checkout (default: the one of this script)")
    files = read_package(parser.parse_args().root)
    references = private_references(files)
    print(f"{'folder':<16}{'files':>6}{'lines':>8}{'code':>8}{'longest':>9}{'private':>9}{'once':>6}")
    folders = list(dict.fromkeys(file.package for file in files))
    for folder in [*folders, None]:
        size = size_of([file for file in files if folder in (file.package, None)], references)
        name = "total" if folder is None else folder or "(root)"
        numbers = f"{size.files:>6}{size.lines:>8,}{size.code:>8,}{size.longest:>9}{size.private:>9}{size.once:>6}"
        print(f"{name:<16}{numbers}  {size.longest_name}")
    print("\nFiles that the main argument passes")
    for verb, argument in VERBS:
        passed = files_passed(files, verb, argument)
        print(f"  {verb}({argument}): {len(passed)}")
        print("    " + ", ".join(file.module for file in passed))


if __name__ == "__main__":
    main()
