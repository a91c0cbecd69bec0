"""The command ``python -m fullrank``: its arguments, the order of the checks, the tables and the JSON file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import checks, speed, steps
from .costs import entry_of, measure_costs
from .site import Site, describe, open_site

_CHECKS: dict[str, Callable[[Site], str]] = {
    "placement": checks.placement,
    "gather, equal rows": checks.gather_equal,
    "gather, uneven rows": checks.gather_uneven,
    "gather, no rows": checks.gather_empty,
    "gather, different losses": checks.reduce_scatter,
    **{f"gradient of {name}": checks.gradient_of(name) for name in checks.LOSSES},
    "control": checks.control,
    "agreement": checks.agreement,
    "latency": speed.latency,
    "bandwidth": speed.bandwidth,
}


class Result(NamedTuple):
    """The outcome of a check: passed, skipped, FAILED, or not run, because the ranks lost each other before it."""

    name: str
    outcome: str
    detail: str = ""


def main(version: str, arguments: Sequence[str] | None = None) -> int:
    """Run every check, print the table on rank 0, and return the exit status: 0 when all passed, else 1.

    Args:
        version: version of this package, for the table.
        arguments: arguments of the command; None for those of the command line.
    """
    options = _parse(arguments)
    with open_site(options.backend, options.device, options.timeout) as site:
        facts = describe(site, version)
        results = _run(site)
        is_wrong = any(result.outcome in ("FAILED", "not run") for result in results)
        if site.rank == 0:
            print(_table(facts, results), flush=True)
        measured = {} if is_wrong else _measure(site, options.measure)
        if site.rank == 0 and options.json is not None:
            content = {"facts": facts, "checks": [result._asdict() for result in results], **measured}
            options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(is_wrong)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fullrank",
        description="Check that gathers, gradients and errors are right here. Under torchrun: on all of its processes.",
    )
    parser.add_argument("--backend", help="backend of torch.distributed (default: that of the device)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the accelerator if there is one)")
    parser.add_argument(
        "--measure",
        choices=("steps", "costs", "all"),
        help="then measure: steps of the losses, costs of the kernels (some minutes, one process), or both",
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: {options.json.parent} is not a folder")
    return options


def _run(site: Site) -> list[Result]:
    """Run the checks in order and share the outcomes over the ranks. After a lost connection no check is run."""
    results: list[Result] = []
    for name, check in _CHECKS.items():
        outcome, detail = _attempt(check, site)
        try:
            everyone = site.gather((outcome, detail))
        except RuntimeError as error:
            print(f"rank {site.rank}, {name}: {detail}", file=sys.stderr, flush=True)  # the other ranks do not have it
            results.append(Result(name, "FAILED", f"{detail}; then the ranks lost each other: {error}"))
            return results + [Result(other, "not run") for other in list(_CHECKS)[len(results) :]]
        wrong = [f"rank {rank}: {text}" for rank, (found, text) in enumerate(everyone) if found == "FAILED"]
        results.append(Result(name, "FAILED", "; ".join(wrong[:3])) if wrong else Result(name, *everyone[0]))
    return results


def _attempt(check: Callable[[Site], str], site: Site) -> tuple[str, str]:
    try:
        return "passed", check(site)
    except checks.NeedsRanks as reason:
        return "skipped", str(reason)
    except checks.Failed as failure:
        return "FAILED", str(failure)
    except Exception as error:
        return "FAILED", f"{type(error).__name__}: {error}"


def _table(facts: dict[str, Any], results: list[Result]) -> str:
    width = max(len(result.name) for result in results) + 2
    lines = ["fullrank preflight", ""]
    lines += [f"  {key:<{width}}{value}" for key, value in facts.items()]
    lines += ["", *(f"  {name:<{width}}{outcome:<9}{' '.join(detail.split())}" for name, outcome, detail in results)]
    outcomes = [result.outcome for result in results]
    tally = [f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)]
    return "\n".join([*lines, "", f"{len(results)} checks: {', '.join(tally)}."])


def _measure(site: Site, what: str | None) -> dict[str, Any]:
    """Measure what ``--measure`` asks for, print it on rank 0, and return it in a form for JSON."""
    measured: dict[str, Any] = {}
    if what in ("steps", "all"):
        machine = steps.measure_machine(site.device, steps.PRODUCT, steps.MOST_BYTES)
        found = steps.measure_steps(site, steps.ROWS)
        measured |= {"machine": machine._asdict(), "steps": [step._asdict() for step in found]}
        if site.rank == 0:
            print("\n" + _table_of_steps(machine, found), flush=True)
    if what in ("costs", "all"):
        if site.world_size > 1:  # ranks that share processors would disturb each other
            text = "Costs of the kernels: not measured with several ranks, start one process."
        else:
            measured["costs"] = measure_costs(site.device)
            text = entry_of(site.device, measured["costs"])
        if site.rank == 0:
            print("\n" + text, flush=True)
    return measured


def _table_of_steps(machine: steps.Machine, found: list[steps.StepCost]) -> str:
    """Return the table of the steps, then what waits and what raises."""
    header = ["loss", "rows", "waits", "operators", "MB", "ms", "copy ms", "repeat", "deterministic"]
    cells = [
        [
            step.loss,
            str(step.rows),
            "-" if step.waits is None else f"{step.waits:g}",
            str(step.operators),
            _three_digits(step.num_bytes / 1e6),
            _three_digits(step.seconds * 1e3),
            _three_digits(step.copy_seconds * 1e3),
            f"{step.repeat:.0e}" if step.repeat else "exact",
            "yes" if step.deterministic == "yes" else "raises",
        ]
        for step in found
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    rows = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in [header, *cells]]
    lines = [
        f"Steps, forward and backward, float32: {checks.CLASSES} classes, queue of {steps.QUEUE:,}, rows of each rank",
        "",
        f"  one operator {machine.launch * 1e6:.3g} us, with its result read {machine.wait * 1e6:.3g} us, "
        f"copy {machine.copy / 1e9:.3g} GB/s, float32 matrix products {machine.product / 1e12:.3g} TFLOP/s",
        "",
        *("  " + "  ".join(row) for row in rows),
    ]
    names = [f"  {step.loss}, {step.rows}: " for step in found]
    waited = [", ".join(f"{line} {number:g}" for line, number in step.waited.items()) for step in found]
    raised = ["" if step.deterministic == "yes" else step.deterministic[:200] for step in found]
    for title, texts in (("Waits of a step, by line:", waited), ("Raised by deterministic algorithms:", raised)):
        if any(texts):
            lines += ["", title, "", *(name + text for name, text in zip(names, texts) if text)]
    return "\n".join(lines)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
