"""How long forward and backward take, compared with imbalanced-losses and one torch.sort, and as the pool grows.

Usage: python benchmarks/speed.py [--quick | --redraw] [--repeats 5] [--out FOLDER]

Competitors run in turn, repetition by repetition, so that both see the same state of the machine; only the ratios hold
on other machines. The full run takes a few minutes and writes speed.json and speed.svg. A quick run of small sizes
takes seconds and writes only with ``--out``. The figure also shows the results of retrieval.py, if they are in the same
folder. Needs the ``bench`` extra.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import imbalanced_losses
import torch
from report import (
    PEER_MOST_BYTES,
    RESULTS,
    Record,
    Run,
    Step,
    interleave,
    make_rows,
    peer_bytes,
    print_records,
    progress,
    training_step,
)
from torch import Tensor

import fullrank

SHARE = 0.01  # of positives, where sizes are compared


class Case(NamedTuple):
    """One loss on one input, compared with the peer; ``bar`` is the required ratio."""

    loss: str
    rows: int
    share: float | None  # of positives, None for uniform classes
    bar: float | None = None
    classes: int = 1
    arguments: dict[str, Any] = {}  # noqa: RUF012  (read only)
    own: dict[str, Any] = {}  # noqa: RUF012  of fullrank alone


class SortCase(NamedTuple):
    """SmoothAPLoss compared with one sort; ``outlier`` replaces one logit."""

    rows: int
    bar: float | None = None
    outlier: float | None = None


PAIRWISE, SIGMOID = {"surrogate": "pairwise"}, {"surrogate": "sigmoid"}
FULL = (
    Case("SmoothAPLoss", 1_000, 0.05, 1),
    Case("SmoothAPLoss", 20_000, 0.20, 250),
    Case("SmoothAPLoss", 50_000, 0.01, 80),
    Case("SmoothAPLoss", 4_096, None, 10, classes=1_000),
    Case("RecallAtQuantileLoss", 1_000_000, 0.01, 2.5, own=SIGMOID),
    Case("PAUCAtBudgetLoss", 1_000_000, 0.01, 2.5, arguments=PAIRWISE),
)
FULL_SORT = (
    SortCase(100_000, 1),
    SortCase(1_000_000, 0.25),
    SortCase(10_000_000, 0.15),
    SortCase(10_000_000, 0.3, outlier=1e30),
)
FULL_GROWTH = (*(factor * 10**power for power in range(3, 7) for factor in (1, 3)), 10**7)
QUICK = (
    Case("SmoothAPLoss", 1_000, 0.05, 1),
    Case("SmoothAPLoss", 2_000, 0.20),
    Case("SmoothAPLoss", 256, None, classes=20),
    Case("RecallAtQuantileLoss", 20_000, 0.01, own=SIGMOID),
    Case("PAUCAtBudgetLoss", 20_000, 0.01, arguments=PAIRWISE),
)
QUICK_SORT = (SortCase(10_000), SortCase(10_000, outlier=1e30))
QUICK_GROWTH = (1_000, 10_000)


def against_peer(cases: tuple[Case, ...], repeats: int) -> list[Record]:
    """Return the medians of the peer and of ours, and the time of the peer divided by ours."""
    results: list[Record] = []
    for case in progress(cases):
        logits, targets = make_rows(case.rows, case.classes, case.share)
        arguments = {"num_classes": case.classes, "queue_size": 0} | case.arguments
        steps = {
            name: training_step(getattr(library, case.loss)(**arguments, **own), logits, targets)
            for name, library, own in (("peer", imbalanced_losses, {}), ("ours", fullrank, case.own))
        }
        peer, ours = (median(times) for times in interleave(steps, repeats).values())
        results.append(case._asdict() | {"peer_ms": peer * 1e3, "ours_ms": ours * 1e3, "ratio": peer / ours})
    return results


def against_sort(cases: tuple[SortCase, ...], repeats: int) -> list[Record]:
    """Return the best times of SmoothAPLoss, of one sort and of one pass, and ours divided by those of the others."""
    results: list[Record] = []
    for case in progress(cases):
        logits, targets = make_rows(case.rows, 1, SHARE)
        if case.outlier is not None:
            with torch.no_grad():
                logits[case.rows // 2] = case.outlier
        scores = logits.detach()
        # A pass reads the scores, and writes a new number for each, as any gradient is.
        steps = {**ours_and_sort(logits, targets), "pass": lambda scores=scores: scores * 2}
        best = {name: min(times) for name, times in interleave(steps, repeats).items()}
        ratios = {"ratio": best["ours"] / best["sort"], "passes": best["ours"] / best["pass"]}
        results.append({**case._asdict(), **{f"{name}_ms": time * 1e3 for name, time in best.items()}, **ratios})
    return results


def ours_and_sort(logits: Tensor, targets: Tensor) -> dict[str, Step]:
    """Return a step of SmoothAPLoss, and one sort of the same scores."""
    scores = logits.detach().flatten()
    ours = fullrank.SmoothAPLoss(num_classes=1, queue_size=0)
    return {"ours": training_step(ours, logits, targets), "sort": lambda: torch.sort(scores)}


def growth(sizes: tuple[int, ...], repeats: int) -> list[Record]:
    """Return the medians for each pool size; that of the peer is None if its pairs do not fit in memory."""
    results: list[Record] = []
    for rows in progress(sizes):
        logits, targets = make_rows(rows, 1, SHARE)
        steps = ours_and_sort(logits, targets)
        needed = peer_bytes(int(targets.sum()), rows)
        if needed <= PEER_MOST_BYTES:
            peer = imbalanced_losses.SmoothAPLoss(num_classes=1, queue_size=0)
            steps["peer"] = training_step(peer, logits, targets)
        times = {name: median(runs) * 1e3 for name, runs in interleave(steps, repeats).items()}
        result = {"rows": rows, "peer_gib": needed / 2**30}
        results.append(result | {f"{name}_ms": times.get(name) for name in ("ours", "sort", "peer")})
    return results


def draw(folder: Path) -> None:
    """Draw time against pool size from speed.json in ``folder``, and from retrieval.json if there is one."""
    from figures import BLUE, MUTED, ORANGE, PURPLE, panels_of, save  # matplotlib takes seconds to import

    ours = {"ours_ms": ("fullrank", BLUE, 3.0)}
    lines = {"peer_ms": ("imbalanced-losses", ORANGE, 2.0), "sort_ms": ("one torch.sort", MUTED, 2.0)} | ours
    panels = [("speed", "growth", lines, "one ranking", "rows in the pool, 1 % positive")]
    if (folder / "retrieval.json").exists():
        lines = {"peer_ms": ("pytorch-metric-learning", PURPLE, 2.0)} | ours
        panels.append(("retrieval", "retrieval", lines, "N rankings of N rows (retrieval)", "N"))
    with panels_of(len(panels), 3.6 * len(panels)) as (figure, places):
        for axes, (name, key, lines, title, label) in zip(places[:, 0], panels):
            draw_panel(axes, json.loads((folder / f"{name}.json").read_text())[key], lines)
            axes.set(title=f"Time of a step: {title}", xlabel=label)
        save(figure, folder / "speed.svg")


def draw_panel(axes: Any, points: list[Record], lines: dict[str, tuple[str, str, float]]) -> None:
    """Draw time against rows; ``lines`` has the label, the colour and the width of each competitor."""
    axes.set(xscale="log", yscale="log")
    for key, (label, colour, width) in lines.items():
        drawn = [(point["rows"], point[key]) for point in points if point[key] is not None]
        if not drawn:
            continue
        axes.plot(*zip(*drawn), color=colour, linewidth=width, marker="o", markersize=width + 2.5)
        # Why the line of a peer ends: its arrays of pairs, or of triples in retrieval, would be larger.
        end = f", then\nneeds over {PEER_MOST_BYTES / 2**30:.0f} GiB" if len(drawn) < len(points) else ""
        place = -30 if key == "peer_ms" else 9  # to the left of a peer, because another line passes on the right
        style = {"textcoords": "offset points", "color": colour, "va": "top", "ha": "right" if place < 0 else "left"}
        axes.annotate(label, drawn[-1], (place, 6), fontweight="bold", **style)
        axes.annotate(as_time(drawn[-1][1]) + end, drawn[-1], (place, -7), fontsize=8, **style)
    rows = [point["rows"] for point in points]
    axes.set_xlim(rows[0] * 0.35, rows[-1] * (rows[-1] / rows[0]) ** 0.42)  # room for the labels
    axes.set_xticks([tick for tick in (10**power for power in range(9)) if rows[0] <= tick <= rows[-1]])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} million" if value >= 1e6 else f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: as_time(value))
    axes.minorticks_off()


def as_time(milliseconds: float) -> str:
    """Return milliseconds, or seconds from 1,000 on, with three digits."""
    if milliseconds >= 1e6:
        return f"{milliseconds / 1e3:,.0f} s"
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1e3 else f"{milliseconds:.3g} ms"


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "speed", repeats=5)
    script.parser.add_argument("--redraw", action="store_true", help="draw speed.svg again, from the stored results")
    options = script.start()
    if options.redraw:
        draw(options.out or RESULTS)
        return
    warnings.simplefilter("ignore")  # warnings of the peer
    found = {
        "against_peer": against_peer(QUICK if options.quick else FULL, options.repeats),
        "against_sort": against_sort(QUICK_SORT if options.quick else FULL_SORT, options.repeats),
        "growth": growth(QUICK_GROWTH if options.quick else FULL_GROWTH, options.repeats),
    }
    print_records("Against imbalanced-losses, forward + backward, median", found["against_peer"])
    title = f"SmoothAPLoss, forward + backward, against one torch.sort, {SHARE:.0%} positive, best"
    print_records(title, found["against_sort"])
    limit = f"the peer's pairs at most {PEER_MOST_BYTES / 2**30:.0f} GiB"
    print_records(f"Over pool size, {SHARE:.0%} positive, median; {limit}", found["growth"])
    script.write(**found)
    if (folder := script.folder()) is not None:
        draw(folder)


if __name__ == "__main__":
    main()
