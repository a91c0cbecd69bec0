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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
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
    """A change of a file, in the statement of ``lines``; ``number`` counts those of the file."""

    path: str
    line: int
    old: str
    new: str
    lines: range
    number: int


# Changes of the source. Annotations, docstrings, texts, imports, assertions and warnings stay as they are.

SWAPPED = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Lt, ast.Gt), (ast.LtE, ast.GtE), (ast.Eq, ast.NotEq)]
SWAPPED += [(ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or), (ast.BitAnd, ast.BitOr)]
SWAPPED += [(ast.Add, ast.Sub), (ast.Mult, ast.Div)]
OTHERS: dict[type[ast.AST], list[type[Any]]] = defaultdict(list)
for _one, _other in SWAPPED:
    OTHERS[_one].append(_other)
    OTHERS[_other].append(_one)
OTHERS |= {ast.FloorDiv: [ast.Mult], ast.Mod: [ast.Mult], ast.Pow: [ast.Mult], ast.LShift: [ast.RShift]}
METHODS = {"amin": "amax", "min": "max", "floor": "ceil", "sum": "mean", "clamp_min": "clamp_max", "any": "all"}
METHODS |= {new: old for old, new in METHODS.items()}
DROPPED = {"detach", "cumsum", "contiguous", "clone", "double", "abs", "flip", "exp", "sqrt", "neg", "float"}
ORDERLESS = ("isinstance", "getattr", "hasattr", "setattr", "partial", "cast", "max", "min")
TEXTS = ("fix", "advice", "message")
FIELDS_LEFT_OUT = ("annotation", "returns", "decorator_list")


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of ``node``."""
    match node:
        case ast.Raise() | ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=targets) if all(isinstance(one, ast.Subscript | ast.Attribute) for one in targets):
            yield ast.Pass()
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.If() if "TYPE_CHECKING" not in ast.unparse(node.test):
            for value in (False, True):
                yield with_fields(node, test=ast.Constant(value))
        case ast.IfExp():
            yield with_fields(node, body=node.orelse, orelse=node.body)
        case ast.Compare(ops=[op]):
            for other in OTHERS[type(op)]:
                yield with_fields(node, ops=[other()])
        case ast.BinOp(op=op) | ast.BoolOp(op=op):
            for other in OTHERS[type(op)]:
                yield with_fields(node, op=other())
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from map(ast.Constant, [value + 1, *([value - 1] if value > 0 else [])])
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value or 1.0)
        case ast.Slice(upper=ast.AST() as upper) if not isinstance(upper, ast.Constant | ast.UnaryOp):
            yield with_fields(node, upper=ast.BinOp(upper, ast.Sub(), ast.Constant(1)))
        case ast.Call():
            yield from changes_of_call(node)


def changes_of_call(node: ast.Call) -> Iterator[ast.AST]:
    """Yield other calls: two arguments swapped, another method or none, a keyword left out."""
    called, args = ast.unparse(node.func), node.args
    if len(args) > 1 and called not in ORDERLESS and not isinstance(args[0], ast.Starred):
        yield with_fields(node, args=[args[1], args[0], *args[2:]])
    if called == "range":
        yield with_fields(node, args=[*args[:-1], ast.BinOp(args[-1], ast.Sub(), ast.Constant(1))])
    if isinstance(node.func, ast.Attribute):
        name, of = node.func.attr, ast.unparse(node.func.value)
        if name in METHODS:
            yield with_fields(node, func=with_fields(node.func, attr=METHODS[name]))
        elif name in DROPPED and of not in ("torch", "math"):
            yield node.func.value
    for keyword in node.keywords if len(args) + len(node.keywords) > 1 else []:
        is_text = isinstance(keyword.value, ast.JoinedStr) or isinstance(getattr(keyword.value, "value", 0), str)
        if keyword.arg and keyword.arg not in TEXTS and not is_text:
            yield with_fields(node, keywords=[other for other in node.keywords if other is not keyword])


def with_fields(node: ast.AST, **fields: Any) -> ast.AST:
    return type(node)(**dict(ast.iter_fields(node)) | fields)


def places(node: ast.AST, lines: range = range(0)) -> Iterator[tuple[ast.AST, Callable[[ast.AST], None], range]]:
    """Yield the nodes below ``node`` that may change, what puts another one there, and the lines of the statement."""
    for name, value in ast.iter_fields(node):
        if name in FIELDS_LEFT_OUT or (isinstance(node, ast.arguments) and "defaults" not in name):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or is_left_out(child):
                continue
            own = lines
            if isinstance(child, ast.FunctionDef):  # a default is used wherever the function runs
                own = range(child.lineno, (child.end_lineno or 0) + 1)
            elif isinstance(child, ast.stmt):  # of a compound statement the head alone
                body = getattr(child, "body", None)
                own = range(child.lineno, body[0].lineno if body else (child.end_lineno or 0) + 1)
            put = partial(value.__setitem__, index) if isinstance(value, list) else partial(setattr, node, name)
            yield child, put, own
            if not isinstance(child, ast.Raise) and not isinstance(getattr(child, "op", None), ast.USub):
                yield from places(child, own)


def is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Assert() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=func)) | ast.Call(func=func):
            return "warn" in ast.unparse(func) or "TypeVar" in ast.unparse(func)
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.FunctionDef():
            return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
    return False


def mutants_of(path: str, text: str) -> list[Mutant]:
    found: list[Mutant] = []
    for node, _, lines in places(ast.parse(text)):
        line = getattr(node, "lineno", lines.start)
        for new in changes(node):
            reach = lines
            if isinstance(new, ast.If) and ast.unparse(new.test) == "False":  # only where the body ran is a difference
                reach = range(new.body[0].lineno, (new.body[-1].end_lineno or 0) + 1)
            found.append(Mutant(path, line, ast.unparse(node), ast.unparse(new), reach, len(found)))
    return found


def apply(number: int, text: str) -> str:
    """Return the changed source, without its comments; for -1 nothing else changes."""
    tree = ast.parse(text)
    every = ((put, new) for node, put, _ in places(tree) for new in changes(node))
    for put, new in islice(every, number, number + 1) if number >= 0 else []:
        put(new)
    return ast.unparse(ast.fix_missing_locations(tree))


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
    """Run the tests and return how they ended: "" if all passed. Without a mutant every file loses its comments."""
    package = folder / "package"
    for name in package_files():
        target = package / "fullrank" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        text, is_control = (ROOT / name).read_text("utf-8"), mutant is None
        if is_control or name == mutant.path:
            text = apply(-1 if is_control else mutant.number, text)
        target.write_text(text, "utf-8")
    for library in (ROOT / "kernels/native").glob("sums.[lr]*"):  # and its record
        shutil.copy(library, package / "fullrank/kernels/native")
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
    mutants = [mutant for name in files for mutant in mutants_of(name, (ROOT / name).read_text("utf-8"))]
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
