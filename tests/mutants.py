"""Change the package in one place, run the tests that execute that place, and print the changes that no test notices.

Each change is a mutant: a comparison turned round, a call left out, an argument dropped, a constant moved by one. Which
test executes which line is recorded once, in a run of all tests that `make test` runs, and kept in .pytest_cache until
the package or the tests change. A mutant is a copy of the package in a temporary folder, which comes first on the path
of a pytest process and of its workers; the checkout is never changed. Its tests run from the fastest on, one case of
each test function first, until one fails. A run that takes far longer than it did without the change has failed too::

    python tests/mutants.py --seed 1 --number 40 --folder losses
"""

from __future__ import annotations

import argparse
import ast
import configparser
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from processes import COSTLY, PRELOADED, process_context
from run import CORES, NOTHING_COLLECTED, write_to

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
CACHE = TESTS / ".pytest_cache" / "lines"
FIRST_S = 5  # the recorded seconds of the tests that run before the others are collected
SLACK_S = 60  # a run that takes this long, and three times the recorded time, hangs


class Mutant(NamedTuple):
    """A change of a file: ``new`` in place of the bytes from ``start`` to ``end``, in the statement of ``lines``."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str
    lines: range


# Changes of the source. Annotations, docstrings, texts, imports, assertions and warnings stay as they are.

COMPARISONS: dict[type, tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">"),
    ast.LtE: ("<=", "<", ">="),
    ast.Gt: (">", ">=", "<"),
    ast.GtE: (">=", ">", "<="),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
}
METHODS = {"amin": "amax", "min": "max", "floor": "ceil", "sum": "mean", "clamp_min": "clamp_max", "any": "all"}
METHODS |= {new: old for old, new in METHODS.items()}
DROPPED = {"detach", "cumsum", "contiguous", "clone", "double", "abs", "flip", "exp", "sqrt", "neg", "float"}
ORDERLESS = ("isinstance", "getattr", "hasattr", "setattr", "partial", "cast")
TEXTS = ("fix", "advice", "message")


class Mutator(ast.NodeVisitor):
    """Collects the mutants of a file."""

    def __init__(self, path: str, text: str) -> None:
        self.found: list[Mutant] = []
        self._path, self._data = path, text.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = range(0)
        self.visit(ast.parse(text))

    def visit(self, node: ast.AST) -> None:
        outer = self._lines
        if isinstance(node, ast.stmt):
            # Of a compound statement the head alone.
            body = getattr(node, "body", None)
            self._lines = range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)
        super().visit(node)
        self._lines = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if any("overload" in self._source(decorator) for decorator in node.decorator_list):
            return
        # A default is used wherever the function runs.
        self._lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Import(self, node: ast.AST) -> None:
        pass

    visit_ImportFrom = visit_JoinedStr = visit_Assert = visit_Import

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass")

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            return
        if all(isinstance(target, ast.Subscript | ast.Attribute) for target in node.targets):
            self._replace(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and "warn" not in self._source(node.value.func):
            self._replace(node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self._source(node.test):
            self._replace(node.test, "False")
            self._replace(node.test, "True")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._replace(node.test, f"not ({self._source(node.test)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self._operator(node.left, node.ops[0], node.comparators[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.left, ast.JoinedStr) and not isinstance(node.right, ast.JoinedStr):
            self._operator(node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:]):
            self._operator(left, node.op, right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._replace(node, f"({self._source(node.operand)})")
        if not isinstance(node.op, ast.USub):
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, str(node.value + 1))
            if node.value > 0:
                self._replace(node, str(node.value - 1))
        elif isinstance(node.value, float):
            self._replace(node, repr(2 * node.value) if node.value else "1.0")

    def visit_Slice(self, node: ast.Slice) -> None:
        if node.upper is not None and not isinstance(node.upper, ast.Constant | ast.UnaryOp):
            self._replace(node.upper, f"({self._source(node.upper)}) - 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._source(node.func)
        if "warn" in called or "TypeVar" in called:
            return
        first, second = (*node.args[:2], None, None)[:2]
        if second is not None and called not in ORDERLESS and not isinstance(first, ast.Starred):
            between = self._data[self._span(first)[1] : self._span(second)[0]].decode()
            swapped = self._source(second) + between + self._source(first)
            self._change(self._span(first)[0], self._span(second)[1], swapped, node)
        if called == "range":
            self._replace(node.args[-1], f"{self._source(node.args[-1])} - 1")
        if isinstance(node.func, ast.Attribute):
            end = self._span(node.func)[1]
            if node.func.attr in METHODS:
                self._change(end - len(node.func.attr), end, METHODS[node.func.attr], node)
            elif node.func.attr in DROPPED and self._source(node.func.value) not in ("torch", "math"):
                self._replace(node, f"({self._source(node.func.value)})")
        for keyword in node.keywords:
            is_text = isinstance(keyword.value, ast.JoinedStr) or isinstance(getattr(keyword.value, "value", 0), str)
            if keyword.arg and keyword.arg not in TEXTS and not is_text and len(node.args) + len(node.keywords) > 1:
                start, end = self._span(keyword)
                comma = self._data.rfind(b",", 0, start)
                if comma > self._span(node.func)[1] and not self._data[comma + 1 : start].strip():
                    self._change(comma, end, "", keyword)
        self.generic_visit(node)

    def _operator(self, left: ast.AST, operator: ast.AST, right: ast.AST) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._data[start:end].decode()
        old, *others = COMPARISONS.get(type(operator), ("",))
        for new in others:
            if between.count(old) == 1:
                self._change(start, end, between.replace(old, new), left)

    def _replace(self, node: ast.AST, new: str) -> None:
        self._change(*self._span(node), new, node)

    def _change(self, start: int, end: int, new: str, node: Any) -> None:
        mutant = Mutant(self._path, node.lineno, start, end, self._data[start:end].decode(), new, self._lines)
        try:
            ast.parse(apply(mutant, self._data))
        except SyntaxError:
            return
        if mutant.old != new:
            self.found.append(mutant)

    def _span(self, node: Any) -> tuple[int, int]:
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _source(self, node: ast.AST) -> str:
        return self._data[slice(*self._span(node))].decode()


def apply(mutant: Mutant, data: bytes) -> bytes:
    """Return the changed source."""
    return data[: mutant.start] + mutant.new.encode() + data[mutant.end :]


def package_files() -> list[str]:
    """Return the files of the packages that setup.cfg lists, below the root."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    folders = [name.partition(".")[2].replace(".", "/") for name in config["options"]["packages"].split()]
    paths = [path for folder in folders for path in sorted((ROOT / folder).glob("*.py"))]
    return [path.relative_to(ROOT).as_posix() for path in paths]


# Which test executes which line


class Record(NamedTuple):
    """Tests with their seconds, for those that pass; by "file:line", the tests that execute it."""

    seconds: dict[str, float]
    tests: dict[str, list[str]]

    def ways(self, mutant: Mutant) -> tuple[list[str], list[str]]:
        """Return the tests that execute the statement, and the others of their files, each in the order to run them.

        The latter may read what the line left in a fixture or a cache. A line that runs at the import, before any test,
        is executed by the tests that execute something of its file.
        """
        found = {test for line in mutant.lines for test in self.tests.get(f"{mutant.path}:{line}", [])}
        if not found:
            found = {test for line, tests in self.tests.items() if line.startswith(f"{mutant.path}:") for test in tests}
        files = {test.partition("::")[0] for test in found}
        others = {test for test in self.seconds if test.partition("::")[0] in files} - found
        return self._order(found), self._order(others)

    def _order(self, tests: Iterable[str]) -> list[str]:
        """Sort by time, but one case of each function before the second of any."""
        ranks: dict[str, int] = defaultdict(int)
        keys = {}
        for test in sorted(tests, key=lambda test: (self.seconds.get(test, 0.0), test)):
            function = test.partition("[")[0]
            keys[test] = (ranks[function], self.seconds.get(test, 0.0))
            ranks[function] += 1
        return sorted((test for test in keys if test in self.seconds), key=lambda test: keys[test])


def load_record() -> Record:
    """Return the record of this state of the package and the tests, made now if there is none."""
    state = hashlib.sha256()
    for path in [*(ROOT / name for name in package_files()), *sorted(TESTS.rglob("*.py"))]:
        state.update(path.read_bytes())
    path = CACHE / f"{state.hexdigest()[:16]}.json"
    if not path.exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        CACHE.mkdir(parents=True)
        with tempfile.TemporaryDirectory(prefix="fullrank-") as folder:
            print("recording which test executes which line, which takes about twice as long as the tests", flush=True)
            command, environment = [sys.executable, str(TESTS / "run.py")], os.environ | {"FULLRANK_LINES": folder}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode not in (0, 1) or "broke off" in done.stdout:
                raise SystemExit(f"{done.stdout}\nthe record is not complete: a job of tests/run.py broke off")
            path.write_text(json.dumps(read_lines(Path(folder))), encoding="utf-8")
    return Record(**json.loads(path.read_text("utf-8")))


def read_lines(folder: Path) -> dict[str, Any]:
    """Return what the processes have written, as the fields of a :class:`Record`."""
    seconds: dict[str, float] = defaultdict(float)
    failed: set[str] = set()
    tests: dict[str, dict[str, None]] = defaultdict(dict)
    for path in sorted(folder.iterdir()):
        test = ""
        for line in path.read_text("utf-8", "replace").splitlines():
            if line.startswith("> "):
                test = line[2:]
            elif line.startswith("= "):
                _, time_s, passed, name = line.split(" ", 3)
                seconds[name] += float(time_s)
                failed |= set() if passed == "1" else {name}
            elif test:
                tests[line][test] = None
    if failed:
        print(f"left out, because they failed or were skipped while lines were recorded: {len(failed)} tests")
    return {
        "seconds": {name: time_s for name, time_s in seconds.items() if name not in failed},
        "tests": {line: list(names) for line, names in tests.items()},
    }


# Running


class Chosen:
    """A plugin of pytest that keeps the tests with these names, in their order."""

    def __init__(self, names: list[str]) -> None:
        self.ranks = {name: rank for rank, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.ranks), key=lambda i: self.ranks[i.nodeid])


def run_chosen(package: str, names: list[str], output: Path) -> None:
    """Be a pytest process that runs the tests on the package in a folder."""
    write_to(output)
    sys.path.insert(0, package)
    os.environ["PYTHONPATH"] = package  # for the programs that tests start
    os.environ.pop("FULLRANK_LINES", None)
    import pytest

    files = sorted({str(TESTS / name.partition("::")[0]) for name in names})
    options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main([*options, *files], plugins=[Chosen(names)]))


def judge(mutant: Mutant | None, record: Record, names: list[list[str]], folder: Path) -> str:
    """Run the tests and return how they ended: "" if all passed."""
    package = folder / "package"
    for name in package_files():
        target = package / "fullrank" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        data = (ROOT / name).read_bytes()
        target.write_bytes(apply(mutant, data) if mutant is not None and name == mutant.path else data)
    library = Path("kernels/native/sums.library")
    if (ROOT / library).exists():
        shutil.copy(ROOT / library, package / "fullrank" / library)
    context = process_context(*COSTLY, preloaded=[name for name in PRELOADED if name != "fullrank"])
    for part in filter(None, names):
        process = context.Process(target=run_chosen, args=(str(package), part, folder / "output"))
        process.start()
        process.join(SLACK_S + 3 * sum(record.seconds[name] for name in part))
        if process.exitcode is None:
            process.kill()
            return "hangs"
        if process.exitcode not in (0, NOTHING_COLLECTED):
            return "fails"
    return ""


def parts_of(record: Record, mutant: Mutant, limit_s: float) -> list[list[str]]:
    """Return the tests to run, those of the first seconds apart, so that most mutants need few files."""
    parts: list[list[str]] = [[], []]
    total = 0.0
    for names in record.ways(mutant):
        for name in names:
            total += record.seconds[name]
            if total <= limit_s:
                parts[total > FIRST_S].append(name)
    return parts


def main(arguments: list[str]) -> int:
    """Draw mutants, judge them and print the survivors; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=20, help="how many mutants to draw")
    parser.add_argument("--folder", default="", help="a folder or a file of the package; all of it without")
    parser.add_argument("--limit", type=float, default=120, help="seconds of tests for one mutant")
    own = parser.parse_args(arguments)
    files = [name for name in package_files() if f"{name}/".startswith(f"{own.folder}/" if own.folder else "")]
    mutants = [mutant for name in files for mutant in Mutator(name, (ROOT / name).read_text("utf-8")).found]
    drawn = random.Random(own.seed).sample(mutants, min(own.number, len(mutants)))
    print(f"{len(drawn)} of {len(mutants)} mutants of {len(files)} files, seed {own.seed}", flush=True)
    record, survivors, reached = load_record(), [], 0
    names = [parts_of(record, mutant, own.limit) for mutant in drawn]
    with tempfile.TemporaryDirectory(prefix="fullrank-") as folder, ThreadPoolExecutor(CORES) as threads:
        # The control: without a change the tests pass.
        if judge(None, record, names[0][:1], Path(folder, "control")):
            print(Path(folder, "control", "output").read_text("utf-8", "replace"))
            return 1
        folders = [Path(folder, str(number)) for number in range(len(drawn))]
        verdicts = threads.map(lambda *given: judge(given[0], record, *given[1:]), drawn, names, folders)
        for mutant, parts, verdict in zip(drawn, names, verdicts):
            count = sum(map(len, parts))
            reached += bool(count)
            survivors += [] if verdict else [mutant]
            print(f"{verdict or 'SURVIVES':8} {described(mutant)}  by {count} tests", flush=True)
    number = len(drawn) - len(survivors)
    print(f"\n{number} killed, {len(survivors)} survive, of which no test executes {len(drawn) - reached}:")
    print("\n".join(described(mutant) for mutant in sorted(survivors)))
    return 0


def described(mutant: Mutant) -> str:
    """Return the place, the old text and the new one on one line."""
    old, new = (" ".join(text.split()) or "nothing" for text in (mutant.old, mutant.new))
    return f"{mutant.path}:{mutant.line}: {old[:60]} -> {new[:60]}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
