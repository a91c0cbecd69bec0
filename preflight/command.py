"""The command ``python -m fullrank``: its arguments, the order of the checks, the tables and the JSON file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import checks
from .site import Site, describe, open_site

CHECKS: dict[str, Callable[[Site], str]] = {
    "placement": checks.placement,
    "gather, equal rows": lambda site: checks.gather(site, [8] * site.world_size),
    "gather, uneven rows": lambda site: checks.gather(site, checks.uneven_sizes(site)),
    "gather, no rows": lambda site: checks.gather(site, [0] * site.world_size),
    "gather, different losses": checks.reduce_scatter,
    **{f"gradient of {name}": checks.gradient_of(name) for name in checks.LOSSES},
    "control": checks.control,
    "agreement": checks.agreement,
}
OVER_RANKS = ("control", "agreement")  # they have no meaning on one process


class Result(NamedTuple):
    """The outcome of a check: passed, skipped, FAILED, or not run because the connection was lost before."""

    name: str
    outcome: str
    detail: str = ""


def main(version: str, arguments: Sequence[str] | None = None) -> int:
    """Run every check, print the table on rank 0, and return the exit status: 1 if a check failed or was not run."""
    options = _parse_arguments(arguments)
    with open_site(options.backend, options.device, options.timeout) as site:
        facts = describe(site, version)
        results = run_checks(site)
        if site.rank == 0:
            print(_table(facts, results), flush=True)
        if site.rank == 0 and options.json is not None:
            content = {"facts": facts, "checks": [result._asdict() for result in results]}
            options.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(any(result.outcome in ("FAILED", "not run") for result in results))


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fullrank",
        description="Check that gathers, gradients and errors are right here. Under torchrun: on all of its processes.",
    )
    parser.add_argument("--backend", help="backend of torch.distributed (default: that of the device)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the accelerator if there is one)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"argument --json: {options.json.parent} is not a folder")
    return options


def run_checks(site: Site) -> list[Result]:
    """Run the checks in order and share the outcomes over the ranks. After a lost connection no check is run."""
    results: list[Result] = []
    for name, check in CHECKS.items():
        if site.world_size == 1 and name in OVER_RANKS:
            results.append(Result(name, "skipped", "one process alone: start with torchrun"))
            continue
        outcome = "FAILED"
        try:
            outcome, detail = "passed", check(site)
        except checks.Failed as failure:
            detail = str(failure)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
        try:
            gathered = site.gather((outcome, detail))
        except RuntimeError as error:
            print(f"rank {site.rank}, {name}: {detail}", file=sys.stderr, flush=True)  # no other rank has the detail
            results.append(Result(name, "FAILED", f"{detail}; then the ranks lost each other: {error}"))
            return results + [Result(other, "not run") for other in list(CHECKS)[len(results) :]]
        failures = [f"rank {rank}: {text}" for rank, (outcome, text) in enumerate(gathered) if outcome == "FAILED"]
        results.append(Result(name, "FAILED", "; ".join(failures[:3])) if failures else Result(name, *gathered[0]))
    return results


def _table(facts: dict[str, Any], results: list[Result]) -> str:
    width = max(len(result.name) for result in results) + 2
    lines = ["fullrank preflight", ""]
    lines += [f"  {key:<{width}}{value}" for key, value in facts.items()]
    lines += ["", *(f"  {name:<{width}}{outcome:<9}{' '.join(detail.split())}" for name, outcome, detail in results)]
    outcomes = [result.outcome for result in results]
    tally = [f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)]
    own_step = "Your own training step: fullrank.verify_step."
    return "\n".join([*lines, "", f"{len(results)} checks: {', '.join(tally)}.", own_step])
