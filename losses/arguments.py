"""``@completed`` completes docstrings and signatures, so that arguments that losses share are described once."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from textwrap import dedent, indent
from typing import Any, TypeVar

# The sections of a docstring, in their order. A missing one is taken over as a whole, unless it is in OWN.
_ORDER = "Args, Shape, Returns, Raises, Degenerate, Automatic temperature, Numerics, Distributed, Example, Reference"
SECTIONS = _ORDER.split(", ")
OWN = ("Args", "Returns", "Example")
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):.*\n(?:(?: .*)?\n)*", re.MULTILINE)
_ENTRY = re.compile(r"^(?=[\w*])", re.MULTILINE)
_PACKAGE = __name__.partition(".")[0]

T = TypeVar("T")


def completed(*sources: Any) -> Callable[[T], T]:
    """Return a decorator that completes a docstring from those of ``sources``, and of a class first from its bases."""

    def complete(item: T) -> T:
        bases: tuple[Any, ...] = ()
        if isinstance(item, type):
            bases = tuple(base for base in item.__mro__[1:] if base.__module__.startswith(f"{_PACKAGE}."))
            _complete_signature(item, bases)
        if item.__doc__:  # not under python -OO
            parameters = inspect.signature(item).parameters.values()  # type: ignore[arg-type]
            names = [f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in parameters if p.name != "self"]
            docstrings = [source.__doc__ or "" for source in (*bases, *sources)]
            item.__doc__ = complete_docstring(item.__doc__, names, docstrings)
        return item

    return complete


def complete_docstring(docstring: str, names: Iterable[str], sources: Iterable[str]) -> str:
    """Return ``docstring`` with the arguments and sections that it lacks, each from the first of ``sources`` with it.

    The docstring or a source must describe each argument of ``names``, which are in the order of the signature.
    """
    entries: dict[str, str] = {}
    sections: dict[str, str] = {}
    for text in (docstring, *sources):
        parts = {match[1]: match[0].strip() for match in _SECTION.finditer(inspect.cleandoc(text) + "\n")}
        for entry in _ENTRY.split(dedent(parts.get("Args", "").partition("\n")[2])):
            for name in entry.partition(":")[0].split(", "):
                entries.setdefault(name, entry.rstrip())
        sections = {name: body for name, body in parts.items() if text is docstring or name not in OWN} | sections
    described = indent("\n".join(dict.fromkeys(entries[name] for name in names)), "    ")
    sections["Args"] = f"Args:\n{described}"
    head = _SECTION.sub("", inspect.cleandoc(docstring) + "\n").strip()
    return "\n\n".join([head, *(sections[name] for name in SECTIONS if name in sections)]) + "\n"


def _complete_signature(cls: type, bases: Iterable[type]) -> None:
    """Replace ``**options: Unpack[Options]`` in the signature of ``cls`` by those arguments of its bases."""
    init: Any = cls.__dict__.get("__init__")
    if init is None:
        return
    *parameters, options = inspect.signature(init).parameters.values()
    unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(options.annotation))
    if unpacked is None:
        return
    names = init.__globals__[unpacked[1]].__annotations__
    base_init = next(base.__dict__["__init__"] for base in bases if "__init__" in base.__dict__)
    of_base = inspect.signature(base_init).parameters
    inherited = [of_base[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names]
    signature = inspect.Signature([*parameters, *inherited])

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            text = f"{type(self).__name__}: {error}"
            unknown = next((name for name in kwargs if name not in signature.parameters), "")
            others = [name for name in signature.parameters if name != "self" and name not in kwargs]
            for closest in difflib.get_close_matches(unknown, others, n=1):
                text += f". Did you mean {closest}=?"
            raise TypeError(text) from None
        init(self, *args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    cls.__init__ = checked  # type: ignore[misc]
