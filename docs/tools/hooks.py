"""Hooks of mkdocs for this site: formulas as MathML, diagrams inline, files from outside docs/.

The site loads nothing from other servers. latex2mathml turns formulas into MathML when the pages are built. The font
that the formulas need, for brackets as tall as fractions, is stored with the pages.
"""

from __future__ import annotations

import configparser
import html
import importlib.util
import json
import posixpath
import re
import tempfile
from pathlib import Path
from typing import Any

from fontTools import subset
from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_package = tempfile.TemporaryDirectory(prefix="fullrank-docs-")


def package_folder(parent: Path) -> None:
    """Make ``parent/fullrank`` of links to the package only; the root of the repository also holds other folders."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    folder = parent / "fullrank"
    if folder.exists():
        return
    folder.mkdir()
    for name in config["options"]["packages"].split():
        part = name.removeprefix("fullrank").lstrip(".")
        if part and "." not in part:
            (folder / part).symlink_to(ROOT / part, target_is_directory=True)
    for path in ROOT.glob("*.py"):
        (folder / path.name).symlink_to(path)


@event_priority(100)  # before the plugin reads its settings
def on_config(config: Any) -> Any:
    """Let mkdocstrings read this checkout, whether it is installed or not."""
    package_folder(Path(_package.name))
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [_package.name]
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    (version,) = re.findall(r'^__version__ = "(.*)"$', (ROOT / "__init__.py").read_text("utf-8"), re.MULTILINE)
    # In the footer: next to a `repo_url` the theme asks a server how many stars there are.
    config.copyright = f'fullrank {version}, <a href="{settings["metadata"]["url"]}">repository</a>'
    return config


# Links to files outside docs/: a script gets a page that shows its source, a notebook one with its outputs too, a
# picture is copied.

_outside: dict[str, Path] = {}  # pictures: the path in the site, and the file
OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([\w/.-]+\.(?:py|ipynb|png|svg))\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the changelog, and the files outside docs/ that pages link to."""
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for page in [file for file in files if file.is_documentation_page()]:
        for _, target in OUTSIDE.findall(page.content_string):
            source = ROOT / target
            name = outside_name(target)
            if files.get_file_from_path(name) is not None or not source.is_file():
                continue
            if source.suffix == ".py":
                text = source.read_text("utf-8")
                files.append(File.generated(config, name, content=f"# {target}\n\n~~~~python\n{text}~~~~\n"))
            elif source.suffix == ".ipynb":
                files.append(File.generated(config, name, content=notebook_page(source, files, config)))
            else:
                files.append(File.generated(config, name, abs_src_path=str(source)))
                _outside[name] = source
    return files


def outside_name(target: str) -> str:
    """Return the path in the site of a file of the repository."""
    path = Path(target)
    return f"files/{path.with_suffix('.md')}" if path.suffix in (".py", ".ipynb") else f"images/{path.name}"


def notebook_page(source: Path, files: Files, config: Any) -> str:
    """Return the cells of a notebook and what they printed and drew; ``alt`` in the metadata of a cell says what."""
    parts = []
    for number, cell in enumerate(json.loads(source.read_text("utf-8"))["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text.replace("](../docs/", "](../../"))
            continue
        parts.append(f"~~~~python\n{text}\n~~~~")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"~~~~text\n{''.join(output['text'])}~~~~")
                continue
            name = f"images/{source.stem}-{number}.svg"
            _outside[name] = path = Path(_package.name) / Path(name).name
            path.write_text("".join(output["data"]["image/svg+xml"]), "utf-8")
            files.append(File.generated(config, name, abs_src_path=str(path)))
            parts.append(f"![{cell['metadata']['alt']}](../../{name})")
    return "\n\n".join(parts)


# What readers search for, and the page that should come first. The search counts tags more than titles.
TAGS = {"choosing.md": ["AUC", "imbalance", "imbalanced", "class_weight"], "contrastive.md": ["CLIP", "triplet"]}


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links to files outside docs/ to their copies in the site, and tag the page."""
    page.meta.setdefault("tags", TAGS.get(page.file.src_uri, []))

    def replace(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), found[1], found[2]))
        start = posixpath.dirname(page.file.src_uri) or "."
        return f"]({posixpath.relpath(outside_name(target), start)})"

    return OUTSIDE.sub(replace, SECTION.sub(lambda found: readme_section(found[1]), markdown))


# A paragraph that consists of a link to a section of README.md becomes the text of that section.

SECTION = re.compile(r"^\[([^]]+)\]\(\.\./README\.md#[\w-]+\)$", re.MULTILINE)


def readme_section(title: str) -> str:
    """Return the text under a heading of README.md."""
    parts = re.split(r"^## ", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    (body,) = [part.partition("\n")[2] for part in parts if part.partition("\n")[0] == title]
    return body.strip().replace("](docs/", "](")


# Formulas, diagrams, tables

_written: set[str] = set()  # the characters of all formulas
FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)
PICTURE = re.compile(r'(?:<p>)?<img alt="([^"]*)" src="([^"]*\.svg)"[^>]*>(?:</p>)?')
SHORT = re.compile(r"<(td|th)([^>]*)>([^<]{1,14})</(?:td|th)>")  # a cell that must not be cut, such as a number
WIDE = re.compile(r"<table>(.*?)</table>", re.DOTALL)


def to_mathml(latex: str, display: str) -> str:
    """Return the MathML of a formula, using only elements that browsers support."""
    latex = re.sub(r"\\mathrm\{(\w+)\}", r"\\text{\1}", latex).replace(r"\!", "")
    mathml = convert(latex, display=display).replace(r"\_", "_")
    _written.update(html.unescape(re.sub(r"<[^>]*>", "", mathml)))
    if "<msqrt>" in mathml:
        _written.add("\u221a")  # browsers draw the radical sign from the font
    return mathml


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Replace the formulas that arithmatex has marked, and put the SVG in place of references to diagrams."""

    def formula(found: re.Match[str]) -> str:
        display = "block" if found[1] == "div" else "inline"
        body = to_mathml(html.unescape(found[2])[2:-2].strip(), display)
        return f'<div class="formula">{body}</div>' if display == "block" else body

    content = FORMULA.sub(formula, content)
    content = PICTURE.sub(lambda found: diagram(found, page), content)
    return WIDE.sub(r'<div class="wide"><table>\1</table></div>', SHORT.sub(r'<\1 class="short"\2>\3</\1>', content))


# The colours of benchmarks/figures.py and of matplotlib, and the variables of the page that replace them.
COLOURS = {
    "ink": ("#000000", "#333333"),
    "muted": ("#666666", "#777777"),
    "line": ("#888888",),
    "grid": ("#e6e6e6", "#b0b0b0"),
    "page": ("#ffffff",),
    "a": ("#e3eef7",),
    "shade": ("#b9d5ea",),
    "blue": ("#0072b2", "#1f77b4"),
    "orange": ("#d55e00", "#ff7f0e"),
    "green": ("#1b7f5c", "#2ca02c"),
    "purple": ("#8b5a9f",),
}
VARIABLES = {colour: f"var(--{name}, {colour})" for name, colours in COLOURS.items() for colour in colours}


def diagram(found: re.Match[str], page: Any) -> str:
    """Return the picture as inline SVG, so that it takes the colours of the page."""
    name = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), found[2]))
    path = _outside.get(name, ROOT / "docs" / name)
    if not path.is_file():
        return found[0]
    text = path.read_text("utf-8")
    if "fr-diagram" in text:
        narrow = path.with_stem(f"{path.stem}-narrow")
        if not narrow.is_file():
            return f'<div class="diagram" data-search-exclude>{sized(text)}</div>'
        phone = f'<div class="diagram on-phone" data-search-exclude>{sized(narrow.read_text("utf-8"))}</div>'
        return f'<div class="diagram not-on-phone" data-search-exclude>{sized(text)}</div>\n{phone}'
    return f'<div class="figure" data-search-exclude>{themed(text, path.stem, html.unescape(found[1]))}</div>'


def sized(text: str) -> str:
    """Return a diagram that shrinks to two thirds of its size at most; on a smaller screen it scrolls."""
    size = re.search(r'viewBox="0 0 (\d+) ', text)
    assert size is not None
    width = int(size[1])
    return text.replace("<svg ", f'<svg style="min-width: {0.65 * width:.0f}px; max-width: {1.2 * width:.0f}px" ', 1)


def themed(text: str, name: str, label: str) -> str:
    """Return a figure of matplotlib for use within a page: colours as variables, names that are unique, a label."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<style[^>]*>\*\{(.*?)\}</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda found: VARIABLES.get(found[0], found[0]), text)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size is not None, name
    head = f'<svg class="fr-figure" role="img" aria-label="{html.escape(label)}" viewBox="{size[0][9:-1]}" '
    return re.sub(
        r"<svg [^>]*?>",
        head + 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">',
        text,
        count=1,
    )


def slanted(character: str) -> int:
    """Return the code point that browsers use for a letter as a mathematical variable."""
    if character == "h":
        return 0x210E
    for first, last, start in (("A", "Z", 0x1D434), ("a", "z", 0x1D44E), ("\u0391", "\u03a9", 0x1D6E2)):
        if first <= character <= last:
            return start + ord(character) - ord(first)
    return ord(character) - 0x3B1 + 0x1D6FC if "\u03b1" <= character <= "\u03c9" else ord(character)


def on_post_build(config: Any) -> None:
    """Write the part of STIX Two Math that the formulas use; ziamath is installed only for its copy of the font."""
    spec = importlib.util.find_spec("ziamath")
    assert spec is not None
    assert spec.origin is not None
    options = subset.Options(flavor="woff", layout_features=["*"], hinting=False, name_IDs=[1, 2, 13, 14])
    font = subset.load_font(str(Path(spec.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes={ord(c) for c in _written} | {slanted(c) for c in _written})
    subsetter.subset(font)
    subset.save_font(font, str(Path(config.site_dir) / "stylesheets" / "math.woff"), options)
