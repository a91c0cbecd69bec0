"""Turn the Sphinx syntax of docstrings into the Markdown of the site: an extension of griffe.

Formulas (``.. math::``, ``:math:``) become ``$$`` and ``$``. Roles become links if their target is on a page of the
reference, and code otherwise. ``::`` blocks become fenced code. The package's own sections (Shape, Degenerate,
Numerics, Distributed, Reference) become paragraphs with a heading, because griffe would read them as admonitions. So
does Returns, because griffe would read its text up to the first colon as a type; the type is in the signature.

What ``@completed`` adds to signatures and docstrings when the package is imported is added here without importing it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import griffe

_spec = importlib.util.spec_from_file_location("arguments", Path(__file__).resolve().parents[2] / "losses/arguments.py")
assert _spec is not None
assert _spec.loader is not None
arguments = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(arguments)

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
SECTIONS = ("Returns", "Shape", "Degenerate", "Numerics", "Distributed", "Reference")


def documented(folder: Path = REFERENCE) -> list[str]:
    """Return the names that follow ``:::`` on the pages of the reference."""
    pages = sorted(folder.glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text("utf-8"), re.MULTILINE)]


def blocks(lines: list[str], start: int) -> tuple[list[str], int]:
    """Return the lines from ``start`` that are indented more than the line before them, and the index behind them."""
    depth = len(lines[start - 1]) - len(lines[start - 1].lstrip())
    end = start
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > depth):
        end += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return lines[start:end], end


def to_markdown(text: str, link: Any = lambda target: None) -> str:
    """Return a docstring without Sphinx syntax; ``link(target)`` gives the path of what a role names, or None."""
    lines, out, at = text.split("\n"), [], 0
    while at < len(lines):
        line, at = lines[at], at + 1
        margin = line[: len(line) - len(line.lstrip())]
        if (found := re.match(r"\s*\.\. math::(.*)", line)) is not None:
            body, at = blocks(lines, at)
            formula = " ".join([found[1], *body]).split()
            out += ["", f"{margin}$$ {' '.join(formula)} $$", ""]
        elif (found := re.match(rf"({'|'.join(SECTIONS)}):(?:\s+(.*))?$", line)) is not None:
            body, at = blocks(lines, at)
            body = dedent("\n".join(body)).split("\n")
            head = f'<span class="doc-section-title">{found[1]}:</span>'
            out += ["", head, "", *([found[2]] if found[2] else []), *body, ""]
        elif re.search(r"(^|\s)::$", line):
            body, at = blocks(lines, at)
            code = indent("\n".join(["```python", *dedent("\n".join(body)).strip("\n").split("\n"), "```"]), margin)
            out += [re.sub(r"\s*::$", "", line), "", *code.split("\n")]
        elif line == "Example:":
            out.append("Examples:")
        elif (found := re.match(r"(\s+)(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*)", line)) is not None and "Error" not in line:
            ends = at == len(lines) or len(lines[at]) - len(lines[at].lstrip()) <= len(found[1])
            out += shared_argument(found, out, ends)
        else:
            out.append(line)
    # A description may begin with "> 0", which is not a quotation.
    return roles(re.sub(r"^(\s+[\w*]+: )>", r"\1\\>", "\n".join(out), flags=re.MULTILINE), link)


def shared_argument(found: re.Match[str], before: list[str], ends: bool) -> list[str]:
    """Split a line that describes several arguments together into one line each, if they are arguments.

    If the description ends with the line, every argument gets it. Otherwise only the last one does, and the others
    refer to that one.
    """
    heads = [line for line in before if re.match(r"\w+:$", line)]
    if not heads or heads[-1] not in ("Args:", "Attributes:"):
        return [found[0]]
    margin, names, description = found[1], found[2].split(", "), found[3]
    others = description if ends else f"see ``{names[-1]}``."
    return [f"{margin}{name}: {others}" for name in names[:-1]] + [f"{margin}{names[-1]}: {description}"]


def roles(text: str, link: Any) -> str:
    """Replace the roles in ``text``."""

    def replace(found: re.Match[str]) -> str:
        kind, target = found.groups()
        if kind == "math":
            return f"${target}$"
        path = link(target.removeprefix("~"))
        shown = target.rpartition(".")[2] if target.startswith("~") else target
        return f"`{shown}`" if path is None else f"[`{shown}`][{path}]"

    text = re.sub(r":(func|class|meth|attr|mod|math):`([^`]*)`", replace, text)
    return re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", text)


def walk(item: Any) -> Iterator[Any]:
    """Yield ``item`` and the objects below it, without imported names."""
    if not item.is_alias:
        yield item
        for member in item.members.values():
            yield from walk(member)


def find(target: str, item: Any, modules: Any) -> str | None:
    """Return the path of the definition that a role in the docstring of ``item`` names, None if it is not ours."""
    first, dot, rest = target.partition(".")
    try:
        found = modules[target if first == "fullrank" else item.resolve(first) + dot + rest]
        # A module hides a function of the same name in the package.
        if found.is_module and found.name in found.members:
            found = found[found.name]
        return found.canonical_path
    except (KeyError, griffe.NameResolutionError, griffe.AliasResolutionError):
        return None


def complete(item: Any, modules: Any, done: set[str]) -> None:
    """Complete the signature and the docstring of ``item`` as its decorator ``@completed`` does."""
    calls = [one.value for one in getattr(item, "decorators", ()) if str(one.value).startswith("completed(")]
    if not calls or item.path in done:
        return
    done.add(item.path)
    bases = item.mro() if item.is_class else []
    others = [*bases, *(modules[find(str(source), item, modules)] for source in calls[0].arguments)]
    for other in others:
        complete(other, modules, done)
    function = item.all_members["__init__"] if item.is_class else item
    if item.is_class and "__init__" in item.members:
        complete_signature(function, bases, modules)
    names = [f"**{one.name}" if one.kind is VARIADIC else one.name for one in function.parameters if one.name != "self"]
    texts = [other.docstring.value for other in others if other.docstring is not None]
    item.docstring.value = arguments.complete_docstring(item.docstring.value, names, texts)


VARIADIC = griffe.ParameterKind.var_keyword


def complete_signature(init: griffe.Function, bases: list[griffe.Class], modules: Any) -> None:
    """Replace ``**options: Unpack[Options]`` by the arguments of a base that Options names."""
    options = list(init.parameters)[-1]
    found = re.fullmatch(r"Unpack\[(\w+)\]", str(options.annotation))
    if found is None:
        return
    named = modules[find(found[1], init, modules)]
    base = next(base.members["__init__"].parameters for base in bases if "__init__" in base.members)
    del init.parameters[options.name]
    for name in named.attributes:
        given, kind = base[name], griffe.ParameterKind.keyword_only
        init.parameters.add(griffe.Parameter(name, annotation=given.annotation, kind=kind, default=given.default))


class Docstrings(griffe.Extension):
    """Complete and convert every docstring of the package."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Convert the docstrings of ``pkg`` after all of its modules have been loaded."""
        loader.resolve_aliases(implicit=True)
        modules = loader.modules_collection
        known = [modules[name].canonical_path for name in documented()]

        def convert(item: Any) -> str:
            def link(target: str) -> str | None:
                path = find(target, item, modules)
                return path if any(f"{path}.".startswith(f"{name}.") for name in known) else None

            return to_markdown(item.docstring.value, link)

        done: set[str] = set()
        for item in walk(pkg):
            complete(item, modules, done)
        for item in list(walk(pkg)):
            if item.is_function and any(str(decorator.value) == "_Once" for decorator in item.decorators):
                made = {"docstring": item.docstring, "annotation": item.returns, "lineno": item.lineno}
                item.parent.set_member(item.name, griffe.Attribute(item.name, **made))
        for item in walk(pkg):
            if item.docstring is not None:
                item.docstring.value = convert(item)
