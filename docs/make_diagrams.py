"""Draw the diagrams of the documentation: the map, what travels, the life of one call, and curves.

Usage: python docs/make_diagrams.py [--out FOLDER]

Writes SVG by hand, so that text stays text. The colours are variables: the site sets them for its light and its dark
scheme. A diagram that is opened by itself follows the colour scheme of the reader's system.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from html import escape
from pathlib import Path

LIGHT = "--ink: #1f2328; --muted: #59636e; --line: #8b949e; --a: #dbeafe; --a-line: #2563eb; --b: #ffedd5; "
LIGHT += "--b-line: #c2410c; --c: #f1f3f5;"
DARK = "--ink: #e6e9ee; --muted: #a9b3c1; --line: #7c8796; --a: #1e3a5f; --a-line: #7db3ff; --b: #4a2a16; "
DARK += "--b-line: #ffab70; --c: #2b303b;"
STYLE = f"""
.fr-diagram {{ {LIGHT} font-family: system-ui, sans-serif; font-size: 14px; }}
@media (prefers-color-scheme: dark) {{ .fr-diagram {{ {DARK} }} }}
.fr-diagram text {{ fill: var(--ink); }}
.fr-diagram .head {{ font-weight: 600; font-size: 15px; }}
.fr-diagram .code {{ font-family: ui-monospace, monospace; font-size: 12.5px; }}
.fr-diagram .small {{ fill: var(--muted); font-size: 12.5px; }}
.fr-diagram .a {{ fill: var(--a); stroke: var(--a-line); }}
.fr-diagram .b {{ fill: var(--b); stroke: var(--b-line); }}
.fr-diagram .c {{ fill: var(--c); stroke: var(--line); }}
.fr-diagram .gain {{ stroke: var(--a-line); stroke-width: 3; }}
.fr-diagram .loss {{ stroke: var(--b-line); stroke-width: 3; }}
.fr-diagram .pad {{ fill: none; stroke: var(--line); stroke-dasharray: 3 3; }}
.fr-diagram .arrow {{ fill: none; stroke: var(--muted); stroke-width: 1.5; }}
.fr-diagram .tip {{ fill: var(--muted); }}
"""


def text(x: float, y: float, lines: str | list[str], kind: str = "", anchor: str = "start", step: float = 18) -> str:
    """Return lines of text, the first one's baseline at (x, y)."""
    lines = [lines] if isinstance(lines, str) else lines
    attributes = f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * (anchor != "start")
    shown = [f'<text x="{x:g}" y="{y + i * step:g}"{attributes}>{escape(line)}</text>' for i, line in enumerate(lines)]
    return "\n".join(shown)


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 6) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"/>'


def path(kind: str, points: str) -> str:
    """Return a path."""
    return f'<path class="{kind}" d="{points}"/>'


def arrow(x: float, y: float, length: float) -> str:
    """Return a horizontal arrow from (x, y), to the left when ``length`` is negative."""
    end, back = x + length, -7 if length > 0 else 7
    return path("arrow", f"M{x:g} {y:g} H{end + back:g}") + path("tip", f"M{end:g} {y:g} l{back:g} -4 v8 z")


def svg(name: str, width: int, height: int, title: str, description: str, parts: list[str]) -> str:
    """Return the document, with a title and a description for screen readers."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="fr-diagram" viewBox="0 0 {width} {height}" role="img" '
    head += f'aria-labelledby="{name}-title {name}-desc">'
    labels = f'<title id="{name}-title">{title}</title>\n<desc id="{name}-desc">{description}</desc>'
    return "\n".join([head, labels, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


KINDS = {"pooled": "a position or a threshold needs every row", "summed": "a sum over rows, divided by a count"}
CELLS = {  # kind of loss, how the batch is spread
    ("pooled", "across processes"): (
        "Gather the rows",
        ["SmoothAPLoss, InfoNCELoss, ...", "gather_rows, all_gather_with_grad", "MemoryQueue: past rows"],
    ),
    ("pooled", "across micro-batches"): ("Score, one loss, replay", ["pooled_backward"]),
    ("summed", "across processes"): ("Reduce two numbers", ["BCEWithLogitsLoss, ...", "global_mean"]),
    ("summed", "across micro-batches"): (
        "One count per window",
        ["windows, count_valid_tokens", "accumulate", "DeferredMean"],
    ),
}
GRADIENTS = {
    "When they are reduced": [
        "maybe_no_sync, sum_gradients_",
        "all_reduce_grads_",
        "sequence_sync_group",
        "discard_gradients_",
    ],
    "How large they may be": ["total_grad_norm", "clip_grad_norm_"],
}
MAP = "The map of fullrank"
MAP_IN_WORDS = (
    "A table of two rows and two columns. Pooled losses: across processes the rows are gathered; across micro-batches "
    "all are scored, one loss is computed, and the forwards are replayed. Summed losses: across processes two numbers "
    "are reduced; across micro-batches there is one count per window. Below: when gradients are reduced, and how "
    "large they may be."
)


def draw_map() -> str:
    """Return the map: two kinds of loss, two ways to spread a batch, and the two steps on gradients."""
    columns, rows = {"across processes": 150, "across micro-batches": 460}, {"pooled": 44, "summed": 170}
    parts = [text(x + 150, 28, spread, "head", "middle") for spread, x in columns.items()]
    for kind, y in rows.items():
        parts += [text(10, y + 32, kind, "head"), text(10, y + 52, textwrap.wrap(KINDS[kind], 19), "small", step=16)]
    for (kind, spread), (head, names) in CELLS.items():
        x, y = columns[spread], rows[kind]
        parts += [box(x, y, 300, 112, "a" if kind == "pooled" else "b"), text(x + 16, y + 28, head, "head")]
        parts += [text(x + 16, y + 54, names, "code")]
    parts += [text(10, 328, "gradients", "head")]
    parts += [text(10, 348, ["the same for both", "kinds of loss"], "small", step=16)]
    for x, (head, names) in zip(columns.values(), GRADIENTS.items()):
        parts += [box(x, 296, 300, 112, "c"), text(x + 16, 324, head, "head"), text(x + 16, 346, names, "code")]
    return svg("map", 770, 418, MAP, MAP_IN_WORDS, parts)


def draw_narrow_map() -> str:
    """Return the map in one column, for a phone."""
    parts, y = [], 0.0
    for kind, note in [*KINDS.items(), ("gradients", "the same for both kinds of loss")]:
        parts += [text(4, y + 26, kind, "head"), text(4, y + 44, note, "small")]
        cells = [(head, spread, names) for (row, spread), (head, names) in CELLS.items() if row == kind]
        y += 54
        for head, spread, names in cells or [(head, "", names) for head, names in GRADIENTS.items()]:
            lower = 66 if spread else 46
            height = lower - 4 + 18 * len(names)
            parts += [box(4, y, 332, height, {"pooled": "a", "summed": "b"}.get(kind, "c"))]
            parts += [text(16, y + 24, head, "head"), text(16, y + lower, names, "code")]
            parts += [text(16, y + 43, spread, "small")] if spread else []
            y += height + 8
    return svg("map-narrow", 340, round(y), MAP, MAP_IN_WORDS, parts)


def squares(x: float, y: float, kinds: str, pitch: float = 22) -> str:
    """Return a row of squares: a and b for rows of the two processes, q for queued rows, p for padding."""
    names = {"a": "a", "b": "b", "q": "c", "p": "pad"}
    return "\n".join(box(x + pitch * i, y, pitch - 4, pitch - 4, names[kind], 3) for i, kind in enumerate(kinds))


TRAVEL = "What travels between processes in one call of a pooled loss"
TRAVEL_IN_WORDS = (
    "Two processes with three and two rows. Both exchange a header, which carries checks and counts, and one payload "
    "of rows, padded to the larger process. Each then holds all five rows and the queue, and computes the same loss. "
    "In the backward each process takes the gradient of its own rows, times k, without communication."
)
STAGES = (
    ("own rows", "any number"),
    ("1. header", "checks, counts"),
    ("2. payload", "padded rows"),
    ("pool", "rows, then queue"),
    ("loss", "same number"),
)
LANES = (("process 0", "aaa", "aaa"), ("process 1", "bb", "bbp"))  # name, own rows, rows sent
LEGEND = {
    "a": "rows of process 0",
    "b": "rows of process 1",
    "q": "queued rows, constants",
    "p": "padding, trimmed on arrival",
}


def draw_travel() -> str:
    """Return what travels between two processes in one call of a pooled loss."""
    places = (142, 262, 402, 552, 716)
    parts = [text(x, 26, head, "head", "middle") for x, (head, _) in zip(places, STAGES)]
    parts += [text(x, 44, note, "small", "middle") for x, (_, note) in zip(places, STAGES)]
    backward = "backward: takes the gradient of its own rows, times k; no communication"
    # The backward arrows run along the outside, so that they do not cross the exchanges between the processes.
    for (name, own, sent), (y, middle, back) in zip(LANES, ((64, 124, 84), (174, 210, 250))):
        down = 1 if back > middle else -1
        parts += [box(4, y, 786, 100, "pad", 8), text(16, middle + 5, name, "head")]
        parts += [squares(112, middle - 9, own), arrow(182, middle, 22)]
        parts += [box(212, middle - 16, 100, 32, "c"), text(262, middle + 4, "checks, counts", "small", "middle")]
        parts += [arrow(320, middle, 32), squares(370, middle - 9, sent), arrow(444, middle, 26)]
        parts += [squares(478, middle - 9, "aaabbqq"), arrow(640, middle, 28)]
        parts += [box(674, middle - 18, 84, 36, "c"), text(716, middle + 5, "L", "head", "middle")]
        parts += [path("arrow", f"M716 {middle + 18 * down} V{back} H142 V{middle + 19 * down}")]
        parts += [path("tip", f"M142 {middle + 12 * down} l-4 {8 * down} h8 z")]
        parts += [text(428, back - 5 if down > 0 else back + 15, backward, "small", "middle")]
    for x in (262, 402):
        parts += [path("arrow", f"M{x} 148 V187"), path("tip", f"M{x} 142 l-4 8 h8 z M{x} 193 l-4 -8 h8 z")]
    for x, (kind, name) in zip((40, 200, 360, 556), LEGEND.items()):
        parts += [squares(x, 288, kind), text(x + 26, 302, name, "small")]
    return svg("travel", 794, 318, TRAVEL, TRAVEL_IN_WORDS, parts)


def draw_narrow_travel() -> str:
    """Return the same for a phone, from top to bottom."""
    top, pitch, size = 66, 66, 15
    parts = [text(4, top + pitch * row + 2, head, "head") for row, (head, _) in enumerate(STAGES)]
    parts += [text(4, top + pitch * row + 19, note, "small") for row, (_, note) in enumerate(STAGES)]
    for (name, own, sent), middle, side in zip(LANES, (182, 292), (-1, 1)):
        parts += [text(middle, 26, name, "head", "middle")]
        for row, kinds in ((0, own), (2, sent), (3, "aaabbqq")):
            parts += [squares(middle - size * len(kinds) / 2 + 2, top + pitch * row - 6, kinds, size)]
        for row, note in ((1, "checks"), (4, "L")):
            parts += [box(middle - 32, top + pitch * row - 14, 64, 28, "c")]
            parts += [text(middle, top + pitch * row + 5, note, "small" if row == 1 else "head", "middle")]
        for row in range(4):
            y = top + pitch * row + 18
            parts += [path("arrow", f"M{middle} {y} V{y + 20}"), path("tip", f"M{middle} {y + 28} l-4 -8 h8 z")]
        edge, low = middle + 54 * side, top + pitch * 4
        parts += [path("arrow", f"M{middle + 32 * side} {low} H{edge} V{top} H{middle + 34 * side}")]
        parts += [path("tip", f"M{middle + 27 * side} {top} l{8 * side} -4 v8 z")]
    for row, gap in ((1, 34), (2, 28)):
        y, left, right = top + pitch * row, 182 + gap, 292 - gap
        parts += [path("arrow", f"M{left + 8} {y} H{right - 8}")]
        parts += [path("tip", f"M{left} {y} l8 -4 v8 z M{right} {y} l-8 -4 v8 z")]
    y = top + pitch * 4 + 44
    parts += [
        text(4, y, ["Outer arrows, the backward: the gradient of its", "own rows, times k; no communication"], "small")
    ]
    for row, (kind, name) in enumerate(LEGEND.items()):
        parts += [squares(4, y + 30 + 24 * row, kind), text(30, y + 44 + 24 * row, name, "small")]
    return svg("travel-narrow", 350, y + 130, TRAVEL, TRAVEL_IN_WORDS, parts)


CALL = "The life of one call of SmoothAPLoss under DDP"
CALL_IN_WORDS = (
    "Two columns. Forward, from top to bottom: the model gives logits and targets of this process's rows; they are "
    "checked; all processes exchange a header and continue together or all raise; one payload gathers the rows of all "
    "processes; queued rows are appended as constants; the kernel computes one loss per class; the mean over the valid "
    "classes is the loss; the gathered rows enter the queue. Backward, from bottom to top: through the reduction and "
    "the kernel; queued rows are dropped; each process takes the gradient of its own rows times k, without "
    "communication; the model's backward runs and DDP averages the parameter gradients."
)
FORWARD = (  # kind of box, what, where, note
    ("b", "your model", "", "logits (N, C) and targets (N,): own rows"),
    ("c", "1. check", "losses/rows.py", "shapes, dtypes and target range of the own rows"),
    ("a", "2. header", "distributed/header.py", "agree_on: all processes continue or all raise"),
    ("a", "3. payload gather", "distributed/gather.py", "(N, C) becomes (sum of N, C): the rows of all"),
    ("c", "4. join with the queue", "losses/pooled/base.py", "past rows are appended as constants: M rows"),
    ("c", "5. kernel, per class", "kernels/smooth_ap/sums.py", "scores (C, M) become one loss per class (C,)"),
    ("c", "6. reduce", "losses/pooled/pool.py", "mean over valid classes: the same everywhere"),
    ("c", "7. enqueue", "queues/memory_queue.py", "in training the gathered rows enter the queue"),
)
BACKWARD = (  # the first three forward steps have no backward of their own
    ("b", "parameter.grad", "as one process with the whole batch"),
    ("a", "DDP averages", "all-reduce of gradients, divided by W"),
    ("b", "model backward", "from dL/dlogits (N, C) of the own rows"),
    ("c", "own rows, times k", "k = W; no communication"),
    ("c", "drop the queued rows", "they carry no gradient"),
    ("c", "kernel backward", "dL/dscores (C, M)"),
    ("c", "reduce backward", "dL/d per class (C,)"),
)
WHERE = {"b": "your model", "c": "local to a process", "a": "all processes exchange"}


def stage(x: float, y: float, width: float, kind: str, head: str, file: str, note: str) -> list[str]:
    """Return the box of one step."""
    parts = [box(x, y, width, 50, kind), text(x + 14, y + 21, head, "head"), text(x + 14, y + 40, note, "small")]
    return parts + [text(x + width - 14, y + 21, file, "code", "end")] * bool(file)


def upright(x: float, start: float, end: float) -> list[str]:
    """Return a vertical arrow from one height to another."""
    back = -7 if end > start else 7
    return [path("arrow", f"M{x:g} {start:g} V{end + back:g}"), path("tip", f"M{x:g} {end:g} l-4 {back} h8 z")]


def draw_call() -> str:
    """Return the life of one call: data from the logits down to the loss, and the gradient back up to ``.grad``."""
    top, pitch, left, width, right, narrow = 44, 66, 10, 440, 490, 270
    middle = right + narrow / 2
    parts = [text(left + width / 2, 26, "forward", "head", "middle"), text(middle, 26, "backward", "head", "middle")]
    for row, one in enumerate(FORWARD):
        y = top + row * pitch
        parts += stage(left, y, width, *one) + (upright(left + width / 2, y - 15, y - 1) if row else [])
    for row, (kind, head, note) in enumerate(BACKWARD):
        y = top + row * pitch
        parts += stage(right, y, narrow, kind, head, "", note) + (upright(middle, y - 1, y - 15) if row else [])
    # From the last step of the forward to the first one of the backward.
    y, end = top + 7 * pitch + 25, top + 6 * pitch + 51
    parts += [path("arrow", f"M{left + width} {y:g} H{middle:g} V{end + 7}")]
    parts += [path("tip", f"M{middle:g} {end} l-4 7 h8 z"), text(middle + 10, y + 5, "loss.backward()", "code")]
    y = top + 8 * pitch
    for x, (kind, name) in zip((10, 140, 300), WHERE.items()):
        parts += [box(x, y, 18, 18, kind, 3), text(x + 26, y + 14, name, "small")]
    return svg("call", 770, y + 28, CALL, CALL_IN_WORDS, parts)


def draw_narrow_call() -> str:
    """Return the same in one column, for a phone: the backward goes on below the forward."""
    parts, y = [], 10
    forward = [(kind, head, note) for kind, head, _, note in FORWARD]
    for row, (kind, head, note) in enumerate([*forward, *reversed(BACKWARD)]):
        if row == len(forward):
            parts += [text(186, y + 6, "loss.backward()", "code")]
            y += 14
        parts += stage(4, y, 336, kind, head, "", note)
        if row:
            parts += upright(172, y - 14 * (2 if row == len(forward) else 1), y - 1)
        y += 64
    for row, (kind, name) in enumerate(WHERE.items()):
        parts += [box(4, y + 24 * row, 18, 18, kind, 3), text(30, y + 14 + 24 * row, name, "small")]
    return svg("call-narrow", 344, y + 74, CALL, CALL_IN_WORDS, parts)


def draw_accumulation(narrow: bool = False) -> str:
    """Return the learning curves of two panels of the accumulation example, the same batches cut in three ways."""
    file = Path(__file__).resolve().parents[1] / "benchmarks/results/accumulation.json"
    panels = [panel for panel in json.loads(file.read_text("utf-8"))["panels"] if panel["in_picture"]]
    parts, sentences = [], []
    for (left, top), panel in zip(((44, 0), (44, 280)) if narrow else ((44, 0), (424, 0)), panels):
        first, second = list(panel["naive"])[:2]
        ends = [name.partition(", ") for name in (first, second)]
        exact = [f"{panel['method']},", f"all {len(panel['exact'])} ways"]
        curves = [
            (panel["naive"][first], "loss", "", [f"{ends[0][0]},", ends[0][2]]),
            (panel["naive"][second], "loss", ' stroke-dasharray="7 4"', [f"{ends[1][0]},", ends[1][2]]),
            (panel["whole"], "gain", "", exact),
        ]
        parts += draw_curves(left, top, panel["title"], panel["unit"], curves)
        final = ", ".join(f"{' '.join(label)} {curve[-1]:.3f}" for curve, _, _, label in curves)
        sentences.append(f"{panel['title']}, {panel['unit']} after the last step: {final}.")
    title = "Learning curves of the same batches, cut into micro-batches (number x size) in several ways"
    if narrow:
        return svg("accumulation-narrow", 390, 565, title, " ".join(sentences), parts)
    return svg("accumulation", 770, 285, title, " ".join(sentences), parts)


def draw_narrow_accumulation() -> str:
    """Return the learning curves for a phone, one panel above the other."""
    return draw_accumulation(narrow=True)


def draw_curves(
    left: float, above: float, title: str, unit: str, curves: list[tuple[list[float], str, str, list[str]]]
) -> list[str]:
    """Return one panel: curves from step 0 on, with their style and the label at their end."""
    top, width, height = above + 62, 196, 180
    lowest, highest = (bound(value for curve, *_ in curves for value in curve) for bound in (min, max))
    places, room = [], 36
    for curve, *_ in curves:
        places.append([top + height * (highest - value) / (highest - lowest) for value in curve])
    parts = [text(left - 34, above + 22, title, "head"), text(left - 34, above + 42, unit, "small")]
    for value, y in ((highest, top), (lowest, top + height)):
        parts += [text(left - 6, y + 4, f"{value:.2f}", "small", "end")]
        parts += [path("pad", f"M{left} {y} H{left + width}")]
    steps = len(curves[0][0]) - 1
    for step in (0, steps):
        parts += [text(left + width * step / steps, top + height + 20, str(step), "small", "middle")]
    parts += [text(left + width / 2, top + height + 20, "optimizer step", "small", "middle")]
    for (_, kind, style, _), heights in zip(curves, places):
        points = " ".join(f"{left + width * i / steps:.1f},{y:.1f}" for i, y in enumerate(heights))
        parts += [f'<polyline class="{kind}" fill="none"{style} points="{points}"/>']
    # Labels stand beside the ends of their curves, as far apart as they must.
    order = sorted(range(len(curves)), key=lambda row: places[row][-1])
    spots = [min(places[row][-1], top + height - room * (len(order) - 1 - i)) for i, row in enumerate(order)]
    for i in range(1, len(spots)):
        spots[i] = max(spots[i], spots[i - 1] + room)
    for row, y in zip(order, spots):
        _, kind, style, label = curves[row]
        parts += [f'<path class="{kind}"{style} d="M{left + width + 8} {y:.1f} h16"/>']
        parts += [text(left + width + 30, y + 4, label, "small", step=14)]
    return parts


DIAGRAMS = {
    "accumulation.svg": draw_accumulation,
    "accumulation-narrow.svg": draw_narrow_accumulation,
    "map.svg": draw_map,
    "map-narrow.svg": draw_narrow_map,
    "travel.svg": draw_travel,
    "travel-narrow.svg": draw_narrow_travel,
    "call.svg": draw_call,
    "call-narrow.svg": draw_narrow_call,
}


def main() -> None:
    """Write every diagram."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(__file__).resolve().parent / "images"
    parser.add_argument("--out", type=Path, default=folder, help="folder for the diagrams (default: docs/images)")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in DIAGRAMS.items():
        (out / name).write_text(draw(), encoding="utf-8")
        print(f"Diagram: {out / name}")


if __name__ == "__main__":
    main()
