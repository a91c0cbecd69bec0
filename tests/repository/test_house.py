"""The rules of the repository itself: its layout, its distribution and what imports what, and how a release is made."""

from __future__ import annotations

import ast
import configparser
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import traceback
import zipfile
from pathlib import Path

import pytest
import torch
from scripts import imported

import fullrank

ROOT = Path(__file__).resolve().parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")
PACKAGES = CONFIG["options"]["packages"].split()
SUBPACKAGES = [name.removeprefix("fullrank.") for name in PACKAGES if name != "fullrank"]


def _module_names():
    """Names of the modules of the package; never of tests, examples or benchmarks, which lie in the same folder."""
    names = []
    for package in PACKAGES:
        names.append(package)
        folder = ROOT.joinpath(*package.split(".")[1:])
        # Not walk_packages: from the root it would import every folder that has an __init__.py.
        names += [f"{package}.{module.name}" for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg]
    return [name for name in names if name != "fullrank.setup"]  # that of setuptools


MODULES = _module_names()


def _source(module):
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if module in PACKAGES else path.with_suffix(".py")


@pytest.mark.full
def test_sdist_has_the_repository_and_the_wheel_the_package(tmp_path):
    """The sdist from the files that git knows or would add, and the wheel from the sdist, as a release builds them."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs a git checkout to know which files belong to the repository")
    listing = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    # The listing has files that are deleted but still in the index.
    files = {name for name in listing.split("\0") if (ROOT / name).is_file()}
    for name in files:
        target = tmp_path / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    # One set of instructions: for all of them the compiler takes ten seconds.
    environment = os.environ | ({} if os.name == "nt" else {"CFLAGS": "-DMANY="})

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path / "source",
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout

    run("setup.py", "-q", "sdist", "--dist-dir", tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in names if not name.startswith("fullrank.egg-info/")} - {"PKG-INFO"} == files

    options = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    run("-m", "pip", "wheel", *options, tmp_path, sdist)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    expected = {f"fullrank/{_source(module).relative_to(ROOT).as_posix()}" for module in MODULES}
    library = {name for name in names if name.endswith((".library", ".record"))}  # not without a compiler
    assert names - library == expected | {"fullrank/py.typed"}
    assert len(library) == 2 * (shutil.which("cc") is not None)
    assert wheel.name.startswith(f"fullrank-{fullrank.__version__}-py3-none-")
    # The package index shows README, where only absolute links work.
    links = re.findall(r"\]\((?!#)(.*?)\)", metadata)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []


def test_every_package_folder_is_listed():
    found = {path.parent.relative_to(ROOT) for folder in SUBPACKAGES for path in (ROOT / folder).rglob("*.py")}
    assert {".".join(("fullrank", *folder.parts)) for folder in found} == set(PACKAGES) - {"fullrank"}


@pytest.mark.parametrize(
    ("name", "public"), [("SmoothApLoss", "SmoothAPLoss"), ("infonce", "InfoNCELoss"), ("clip_grad", "clip_grad_norm_")]
)
def test_a_misspelt_name_suggests_the_public_one(name, public):
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. Did you mean '{public}'\?$") as caught:
        getattr(fullrank, name)
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("Did you mean") == 1  # Python adds its own to the error of a module
    with pytest.raises(AttributeError, match=r"has no attribute 'ShardedLoss'$"):
        fullrank.ShardedLoss  # noqa: B018


@pytest.mark.slow
def test_dir_shows_public_names_alone():
    """Those of ``__all__``, the subpackages with further public names, and what the package says about itself."""
    names = set(dir(fullrank))
    assert names - set(fullrank.__all__) == {
        "__config__",
        "__version__",
        "data",
        "integrations",
        "large",
        "losses",
        "metrics",
    }
    assert all(hasattr(fullrank, name) for name in names)


class _Finder(doctest.DocTestFinder):
    """Finds the examples of decorated functions too.

    doctest.testmod leaves out, without a word, what a decorator defined in another module has wrapped: a function under
    ``torch.no_grad`` has the globals of torch.
    """

    def _from_module(self, module, object):
        return super()._from_module(module, inspect.unwrap(object))

    def find(self, module, name):
        # A graph break in an earlier test leaves parts of functions, with their docstrings, in the module.
        return [test for test in super().find(module, name) if ".__resume_at_" not in test.name]


def _docstrings_with_examples(source):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    return sum(">>> " in (ast.get_docstring(node) or "") for node in nodes)


# `__main__` is a program: importing it is no use of it.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith(".__main__")])
def test_doctests(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if "its extra `integrations`" not in str(error):
            raise
        pytest.skip("needs the extra `integrations`")
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    tests = [test for test in _Finder().find(module, name) if test.examples]
    # An example may set the global seed; the tests after it must not see that.
    with torch.random.fork_rng(devices=[]):
        for test in tests:
            runner.run(test)
    assert runner.failures == 0, "see the captured output"
    assert len(tests) == _docstrings_with_examples(_source(name).read_text()), "an example was not found by doctest"


# What each subpackage may import besides itself. The root imports all of them.
ALLOWED_IMPORTS = {
    "kernels": {"errors"},
    "distributed": {"errors"},
    "queues": {"errors", "distributed"},
    "data": {"errors", "distributed"},
    "gradients": {"errors", "distributed"},
    "accumulation": {"errors", "kernels", "distributed", "gradients"},
    "losses": {"errors", "kernels", "distributed", "queues"},
    "large": {"errors", "kernels", "distributed", "losses"},
    "metrics": {"errors", "kernels", "distributed", "losses"},
    "integrations": {"errors", "accumulation", "distributed", "losses", "preflight", "queues"},
    "preflight": {"errors", "kernels", "distributed", "data", "gradients", "accumulation", "losses"},
}


def _forbidden_imports(source, package, allowed):
    """The imports in the source of a module of `package` that are absolute within the house or not in `allowed`."""
    depth = package.count(".")
    forbidden = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from .. import losses` names its target after `import`, `from ..losses import x` before it.
            targets = [(node.level, node.module)] if node.module else [(node.level, alias.name) for alias in node.names]
        else:
            continue
        for level, name in targets:
            top = name.split(".")[0]
            if level == 0:
                # A subpackage under its bare name is found only when the current folder is the repository.
                wrong = top in {"fullrank", *SUBPACKAGES}
            else:
                # Level 1 is the module's own package, depth + 1 is the root.
                wrong = level == depth + 1 and top not in allowed
            if wrong:
                forbidden.append(f"line {node.lineno}: {ast.unparse(node)}")
    return forbidden


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    package = name if name in PACKAGES else name.rpartition(".")[0]
    subpackage = package.removeprefix("fullrank").lstrip(".").split(".")[0]
    if name == "fullrank.errors":
        allowed = set()
    else:
        # `__main__` takes the version from the root.
        allowed = ALLOWED_IMPORTS[subpackage] | {subpackage} if subpackage else {"errors", "__version__", *SUBPACKAGES}
    assert _forbidden_imports(_source(name).read_text(), package, allowed) == []


@pytest.mark.parametrize(
    "source",
    [
        "from ..losses.focal import softmax_focal",
        "from .. import losses",
        "import losses.focal",
        "import fullrank",
        "def late():\n    from ..losses import focal",
    ],
)
def test_control_a_forbidden_import_is_seen(source):
    assert _forbidden_imports(source, "fullrank.distributed", set()) != []


def test_the_tests_that_the_page_of_reliability_names_exist():
    """In a cell `::name` alone stands for the file named before it; the base names of files are unique."""
    missing, file = [], None
    texts = {path.name: path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    for found in re.findall(r"`((?:test_\w+\.py)?(?:::\w+)?)`", page):
        head, _, function = found.partition("::")
        file = head or file
        if file not in texts or (function and f"\ndef {function}(" not in texts[file]):
            missing.append(f"{file}::{function}")
    assert missing == []


# Using the package imports neither the compiler, which takes longer than everything else together, nor a framework.

USE = {
    "subpackages, which are attributes": """
assert "fullrank.large" not in sys.modules
assert fullrank.large.ShardedLoss
assert fullrank.integrations.__doc__
assert "torchmetrics" not in sys.modules
""",
    "norm": """
parameter = torch.nn.Parameter(torch.zeros(2))
parameter.grad = torch.tensor([3.0, 4.0])
assert fullrank.clip_grad_norm_([parameter], 1.0) == 5.0
""",
    "loss": """
logits = torch.linspace(-1, 1, 20)[:, None].requires_grad_()
loss = fullrank.SmoothAPLoss(num_classes=1)(logits, (torch.arange(20) % 4 == 0).long())
loss.backward()
assert logits.grad.abs().sum() > 0
""",
    "integrations": """
import fullrank.data, fullrank.integrations.transformers, fullrank.integrations.sentence_transformers
frameworks = {"pytorch_lightning", "lightning", "accelerate", "transformers", "sentence_transformers"}
assert frameworks.isdisjoint(sys.modules)
""",
    "retrieval": """
embeddings = torch.eye(4).requires_grad_()
fullrank.RetrievalSmoothAPLoss()(embeddings, torch.tensor([0, 0, 1, 1])).backward()
assert embeddings.grad is not None
assert "sympy" not in sys.modules  # which torch imports for a backward with an incoming gradient
""",
}
# The control: after it, the compiler must be found.
COMPILE = "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "imports"), [("\n".join(USE.values()), False), pytest.param(COMPILE, True, marks=pytest.mark.full)]
)
def test_using_the_package_does_not_import_the_compiler(code, imports):
    program = f"import sys, torch, fullrank\n{code}\nprint('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == str(imports)


# A release: the notes that .github/workflows/release.yml makes of CHANGELOG.md, and what its jobs may do.

FILES = {
    "__init__.py": '__version__ = "0.2.0"\n',
    "CITATION.cff": "cff-version: 1.2.0\nversion: 0.2.0\n",
    "setup.cfg": "[metadata]\nurl = https://forge.test/owner/fullrank\n",
    "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n- later\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- this\n\n"
    "## [0.1.0] - 2026-01-01\n\n- first\n",
}


def notes(tag: str, folder: Path, **changed: str) -> str:
    for name, text in FILES.items():
        (folder / name).write_text(changed.get(name.partition(".")[0].strip("_"), text), "utf-8")
    return imported(ROOT / ".ci" / "release_notes.py").release_notes(tag, folder)


def test_the_notes_are_the_section_of_the_version(tmp_path: Path) -> None:
    assert notes("v0.2.0", tmp_path) == "### Added\n\n- this"


@pytest.mark.parametrize(
    ("tag", "changed", "reason"),
    [
        ("v0.1.0", {}, "__init__.py has the version 0.2.0; CITATION.cff has the version 0.2.0"),
        ("v0.2.0", {"CITATION": "cff-version: 1.2.0\nversion: 0.1.0\n"}, "CITATION.cff"),
        ("v0.2.0", {"CHANGELOG": "## [Unreleased]\n\n- this\n"}, "CHANGELOG.md"),
        ("v0.2.0", {"CHANGELOG": "## [0.2.0]\n\n## [0.1.0]\n\n- first\n"}, "CHANGELOG.md"),
        ("v0.2.0", {"setup": "[metadata]\nurl = https://example.org/OWNER/fullrank\n"}, "placeholder"),
    ],
)
def test_a_release_that_is_not_ready(tag: str, changed: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"^{tag}: .*{reason}"):
        notes(tag, tmp_path, **changed)


WORKFLOWS = {path.stem: path.read_text("utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_no_checkout_keeps_credentials(name: str) -> None:
    uses = re.findall(r"uses: (.*)", WORKFLOWS[name])
    assert uses
    assert [use for use in uses if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use)] == []
    assert WORKFLOWS[name].count("actions/checkout@") == WORKFLOWS[name].count("persist-credentials: false")
    assert "concurrency:" in WORKFLOWS[name]
