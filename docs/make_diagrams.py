"""Draw the diagrams of the documentation: the map, what travels between ranks, the life of one call, gains and curves.

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
.fr-diagram .before {{ fill: var(--line); }}
.fr-diagram .after {{ fill: var(--a-line); }}
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


KINDS = {"pooled": "a rank or a threshold needs every row", "summed": "a sum over rows, divided by a count"}
CELLS = {  # kind of loss, how the batch is spread
    ("pooled", "across ranks"): ("Gather the rows", ["gather_rows", "all_gather_with_grad", "MemoryQueue: past rows"]),
    ("pooled", "across micro-batches"): ("Score, one loss, replay", ["pooled_backward"]),
    ("summed", "across ranks"): ("Reduce two numbers", ["global_mean"]),
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
    "A table of two rows and two columns. Pooled losses: across ranks the rows are gathered; across micro-batches "
    "all are scored, one loss is computed, and the forwards are replayed. Summed losses: across ranks two numbers "
    "are reduced; across micro-batches there is one count per window. Below: when gradients are reduced, and how "
    "large they may be."
)


def draw_map() -> str:
    """Return the map: two kinds of loss, two ways to spread a batch, and the two steps on gradients."""
    columns, rows = {"across ranks": 150, "across micro-batches": 460}, {"pooled": 44, "summed": 170}
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


def squares(x: float, y: float, kinds: str) -> str:
    """Return a row of squares: a and b for rows of the two ranks, q for queued rows, p for padding."""
    names = {"a": "a", "b": "b", "q": "c", "p": "pad"}
    return "\n".join(box(x + 22 * i, y, 18, 18, names[kind], 3) for i, kind in enumerate(kinds))


def draw_travel() -> str:
    """Return what travels between two ranks in one call of a pooled loss."""
    columns = (
        (112, "own rows", "any number"),
        (232, "1. header", "checks, counts"),
        (372, "2. payload", "padded rows"),
        (522, "pool", "rows, then queue"),
        (690, "loss", "same number"),
    )
    parts = [text(x, 26, head, "head", "middle") for x, head, _ in columns]
    parts += [text(x, 44, note, "small", "middle") for x, _, note in columns]
    backward = "backward: takes the gradient of its own rows, times k; no communication"
    # The backward arrows run along the outside, so that they do not cross the exchanges between the ranks.
    for y, middle, back, name, own, sent in (
        (64, 124, 84, "rank 0", "aaa", "aaa"),
        (174, 210, 250, "rank 1", "bb", "bbp"),
    ):
        down = 1 if back > middle else -1
        parts += [box(4, y, 762, 100, "pad", 8), text(16, middle + 5, name, "head")]
        parts += [squares(82, middle - 9, own), arrow(152, middle, 22)]
        parts += [box(182, middle - 16, 100, 32, "c"), text(232, middle + 4, "checks, counts", "small", "middle")]
        parts += [arrow(290, middle, 32), squares(340, middle - 9, sent), arrow(414, middle, 26)]
        parts += [squares(448, middle - 9, "aaabbqq"), arrow(610, middle, 30)]
        parts += [box(648, middle - 18, 84, 36, "c"), text(690, middle + 5, "L", "head", "middle")]
        parts += [path("arrow", f"M690 {middle + 18 * down} V{back} H112 V{middle + 19 * down}")]
        parts += [path("tip", f"M112 {middle + 12 * down} l-4 {8 * down} h8 z")]
        parts += [text(398, back - 5 if down > 0 else back + 15, backward, "small", "middle")]
    for x in (232, 372):
        parts += [path("arrow", f"M{x} 148 V187"), path("tip", f"M{x} 142 l-4 8 h8 z M{x} 193 l-4 -8 h8 z")]
    legend = [(60, "a", "rows of rank 0"), (210, "b", "rows of rank 1"), (360, "q", "queued rows, constants")]
    for x, kind, name in (*legend, (560, "p", "padding, trimmed on arrival")):
        parts += [squares(x, 288, kind), text(x + 26, 302, name, "small")]
    description = (
        "Two ranks with three and two rows. Both exchange a header, which carries checks and counts, and "
        "one payload of rows, padded to the larger rank. Each then holds all five rows and the queue, and computes the "
        "same loss. In the backward each rank takes the gradient of its own rows, times k, without communication."
    )
    return svg("travel", 770, 318, "What travels between ranks in one call of a pooled loss", description, parts)


def draw_call() -> str:
    """Return the life of one call: data from the logits down to the loss, and the gradient back up to ``.grad``."""
    forward = [
        ("b", "your model", "", "logits (N, C) and targets (N,): this rank's rows"),
        ("c", "1. check", "losses/batch.py", "shapes, dtypes and target range of this rank's rows"),
        ("a", "2. header", "distributed/header.py", "agree_on: all ranks continue or all raise"),
        ("a", "3. payload gather", "distributed/gather.py", "(N, C) becomes (sum of N, C): the rows of all ranks"),
        ("c", "4. join with the queue", "losses/ranking.py", "past rows are appended as constants: M rows"),
        ("c", "5. kernel, per class", "kernels/soft_ranks.py", "scores (C, M) become one loss per class (C,)"),
        ("c", "6. reduce", "losses/pool.py", "mean over the valid classes: the same scalar on every rank"),
        ("c", "7. enqueue", "queues/memory_queue.py", "in training mode the gathered rows enter the queue"),
    ]
    backward = {
        0: ("b", "parameter.grad", "as one process with the whole batch"),
        1: ("a", "DDP averages", "all-reduce of gradients, divided by W"),
        2: ("b", "model backward", "from dL/dlogits (N, C) of this rank"),
        3: ("c", "own rows, times k", "k = W; no communication"),
        4: ("c", "drop the queued rows", "they carry no gradient"),
        5: ("c", "kernel backward", "dL/dscores (C, M)"),
        6: ("c", "reduce backward", "dL/d per class (C,)"),
    }
    top, pitch, height, left, width, right, narrow = 44, 66, 50, 10, 440, 490, 270
    parts = [text(left + width / 2, 26, "forward", "head", "middle")]
    parts += [text(right + narrow / 2, 26, "backward", "head", "middle")]
    for row, (kind, head, file, note) in enumerate(forward):
        y = top + row * pitch
        parts += [box(left, y, width, height, kind), text(left + 14, y + 21, head, "head")]
        parts += [text(left + width - 14, y + 21, file, "code", "end"), text(left + 14, y + 40, note, "small")]
        if row:
            middle = left + width / 2
            parts += [path("arrow", f"M{middle:g} {y - 15} V{y - 8}"), path("tip", f"M{middle:g} {y - 1} l-4 -7 h8 z")]
    middle = right + narrow / 2
    for row, (kind, head, note) in backward.items():
        y = top + row * pitch
        parts += [box(right, y, narrow, height, kind), text(right + 14, y + 21, head, "head")]
        parts += [text(right + 14, y + 40, note, "small")]
        if row:
            above = max(other for other in backward if other < row)
            end = top + above * pitch + height + 1
            parts += [path("arrow", f"M{middle:g} {y - 1} V{end + 7}"), path("tip", f"M{middle:g} {end} l-4 7 h8 z")]
    # From the last step of the forward to the first one of the backward.
    y, end = top + 7 * pitch + height / 2, top + 6 * pitch + height + 1
    parts += [path("arrow", f"M{left + width} {y:g} H{middle:g} V{end + 7}")]
    parts += [path("tip", f"M{middle:g} {end} l-4 7 h8 z"), text(middle + 10, y + 5, "loss.backward()", "code")]
    legend = [(10, "b", "your model"), (140, "c", "local to a rank"), (300, "a", "all ranks exchange")]
    y = top + 8 * pitch
    for x, kind, name in legend:
        parts += [box(x, y, 18, 18, kind, 3), text(x + 26, y + 14, name, "small")]
    description = (
        "Two columns. Forward, from top to bottom: the model gives logits and targets of this rank's rows; they are "
        "checked; all ranks exchange a header and continue together or all raise; one payload gathers the "
        "rows of all ranks; queued rows are appended as constants; the kernel computes one loss per class; the mean "
        "over the valid classes is the loss; the gathered rows enter the queue. Backward, from bottom to top: through "
        "the reduction and the kernel; queued rows are dropped; each rank takes the gradient of its own rows times k, "
        "without communication; the model's backward runs and DDP averages the parameter gradients."
    )
    return svg("call", 770, y + 28, "The life of one call of SmoothAPLoss under DDP", description, parts)


SETS = {  # what is positive in each, for its line in the picture
    "letter-H": "letters, H",
    "satimage-4": "satellite pixels, damp soil",
    "page-blocks0": "page blocks, not text",
    "diamonds-fair": "diamonds, fair cut",
    "nass-dead": "car crashes, death",
    "accidents-fatal": "road accidents, fatal",
    "flights-cancelled": "flights, cancelled",
    "bird-strikes": "bird strikes, an effect",
    "covid-tests": "covid tests, positive",
    "lending-bad": "loans, bad",
    "stops-searched": "traffic stops, a search",
}


def draw_gains() -> str:
    """Return the average precision of each real set of the benchmark, without and with the added line."""
    results = json.loads((Path(__file__).resolve().parents[1] / "benchmarks/results/real.json").read_text("utf-8"))
    steps = max(results["size"]["lengths"])

    def mean_of(method: str, name: str) -> float:
        records = [one for one in results["defaults"] if (one["method"], one["steps"]) == (method, steps)]
        values = [value for one in records for value in one["ap"][name]]
        return sum(values) / len(values)

    sets = {one["set"]: one for one in results["sets"] if one["set"] in results["size"]["binary"]}
    found = {name: (mean_of("CE", name), mean_of("SmoothAP + CE", name)) for name in sets}
    left, unit, pitch, top = 215, 190, 27, 66
    parts = [text(4, 24, "Average precision on test rows, nothing tuned", "head")]
    parts += ['<circle cx="10" cy="43" r="6" class="before"/>', text(22, 48, "cross-entropy", "small")]
    parts += ['<circle cx="136" cy="43" r="6" class="after"/>', text(148, 48, "cross-entropy + SmoothAPLoss", "small")]
    names = sorted(found, key=lambda name: found[name][0] - found[name][1])
    for row, name in enumerate(names):
        y, (before, after) = top + row * pitch + 10, found[name]
        one, other = left + unit * before, left + unit * after
        note = f"{SETS[name]}, {100 * sets[name]['share']:.1f} %"
        parts += [text(4, y + 5, note, "small"), path("pad", f"M{left} {y} H{left + unit}")]
        parts += [path("gain" if after > before else "loss", f"M{one:.1f} {y} H{other:.1f}")]
        parts += [f'<circle cx="{x:.1f}" cy="{y}" r="6" class="{k}"/>' for x, k in ((one, "before"), (other, "after"))]
        parts += [text(left + unit + 12, y + 5, f"{before:.3f} {after - before:+.3f}", "small")]
    y = top + len(names) * pitch + 10
    parts += [text(left + unit * share, y + 8, f"{share:g}", "small", "middle") for share in (0, 0.5, 1)]
    description = f"For each of {len(names)} imbalanced sets the average precision without and with SmoothAPLoss: "
    description += "; ".join(f"{name} {found[name][0]:.3f} and {found[name][1]:.3f}" for name in names) + "."
    title = f"Average precision without and with SmoothAPLoss, {steps:,} steps, mean over learning rates and splits"
    return svg("gains", 530, y + 24, title, description, parts)


def draw_accumulation(narrow: bool = False) -> str:
    """Return the learning curves of two panels of the accumulation example, the same batches cut in three ways."""
    file = Path(__file__).resolve().parents[1] / "benchmarks/results/accumulation.json"
    panels = [panel for panel in json.loads(file.read_text("utf-8")) if panel["in_picture"]]
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
    "gains.svg": draw_gains,
    "map.svg": draw_map,
    "map-narrow.svg": draw_narrow_map,
    "travel.svg": draw_travel,
    "call.svg": draw_call,
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
