"""What the steps of the kernels cost on this machine: measures the table in kernels/costs.py again.

Usage: python benchmarks/costs.py [--device DEVICE] [--quick] [--repeats 5] [--out FOLDER]

Prints an entry for ``TABLE`` in kernels/costs.py: each measured constant, with the value in use next to it. The seconds
(pair, fixed, row, coarse_bin) are solved from the times of Smooth-AP, forward and backward, at four sizes. Each size
(the other constants) is the fastest of a quarter of the value in use, that value and four times as much, with all other
constants unchanged. ``many_rows`` is the smallest tried number of rows at which the narrower bins are faster.
``searches_at_once`` only bounds memory, so it is not measured. The full run takes a few minutes and writes costs.json;
a quick one takes seconds and writes only where ``--out`` says. Do not use the values of a quick run, and measure on a
quiet machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from report import RESULTS, Steps, interleave, machine, print_machine, write_json
from torch import Tensor

from fullrank.kernels.bins import find_bins
from fullrank.kernels.costs import TABLE, Costs, costs_of
from fullrank.kernels.node_tables import order_for
from fullrank.kernels.soft_ranks import smooth_ap_sums
from fullrank.losses import retrieval_smooth_ap

SHARE = 0.01  # of positives
WIDE, NARROW = 0.1, 0.002  # temperatures: few and many coarse bins
FACTORS = (0.25, 1.0, 4.0)  # of the value in use
Record = dict[str, Any]


class Measurement:
    """The measurements on one device; with ``quick`` of small inputs."""

    def __init__(self, device: torch.device, quick: bool, repeats: int) -> None:
        self.device, self.quick, self.repeats = device, quick, repeats
        self.in_use = costs_of(device)

    def rows(self, count: int) -> int:
        """Return ``count``, or a tenth of it in a quick run."""
        return count // 10 if self.quick else count

    def pool(self, rows: int, classes: int = 1, share: float = SHARE) -> tuple[Tensor, Tensor]:
        """Return normal scores (classes, rows) that require a gradient, and which are positive, about ``share``."""
        numbers = torch.Generator().manual_seed(0)
        scores = torch.randn(classes, rows, generator=numbers).to(self.device).requires_grad_()
        return scores, (torch.rand(classes, rows, generator=numbers) < share).to(self.device)

    def step(self, pool: tuple[Tensor, Tensor], temperature: float, method: str) -> Callable[[], None]:
        """Return forward and backward of Smooth-AP as one call."""
        scores, positive = pool

        def run() -> None:
            scores.grad = None
            smooth_ap_sums(scores, positive, None, None, temperature, method)[0].sum().backward()

        return run

    def patched(self, step: Callable[[], object], **changes: Any) -> Callable[[], None]:
        """Return ``step`` under other costs of the device."""
        costs = self.in_use._replace(**changes)

        def run() -> None:
            with mock.patch.dict(TABLE, {self.device.type: costs}):
                step()

        return run

    def times(self, steps: Steps) -> dict[str, float]:
        """Return the median time of each step in seconds."""
        return {name: median(runs) for name, runs in interleave(steps, self.repeats).items()}

    def num_bins(self, scores: Tensor, temperature: float) -> int:
        """Return the number of coarse bins of one class of ``scores`` (1, M)."""
        low, high = scores.detach().amin(dim=1), scores.detach().amax(dim=1)
        bins = find_bins(scores.detach(), low, high, temperature, order_for(scores, scores.shape[1]).fine)
        assert bins is not None
        return bins.num_coarse

    def seconds(self) -> Record:
        """Return pair, fixed, row and coarse_bin."""
        few, many = self.pool(self.rows(100_000)), self.pool(self.rows(500_000))  # both of the same order
        pairs = self.pool(self.rows(50_000))
        times = self.times(
            {
                "pairs": self.step(pairs, WIDE, "direct"),
                "few rows": self.step(few, WIDE, "binned"),
                "many rows": self.step(many, WIDE, "binned"),
                "many bins": self.step(few, NARROW, "binned"),
            }
        )
        bins = [self.num_bins(few[0], WIDE), self.num_bins(few[0], NARROW)]
        row = (times["many rows"] - times["few rows"]) / (many[0].numel() - few[0].numel())
        coarse_bin = (times["many bins"] - times["few rows"]) / (bins[1] - bins[0])
        fixed = times["few rows"] - row * few[0].numel() - coarse_bin * bins[0]
        num_pairs = int(pairs[1].sum()) * pairs[0].numel()
        return {"pair": times["pairs"] / num_pairs, "fixed": fixed, "row": row, "coarse_bin": coarse_bin}

    def fastest(self, field: str, step: Callable[[], object]) -> int:
        """Return the fastest value of one size on ``step``."""
        used = getattr(self.in_use, field)
        values = sorted({max(1, int(used * factor)) for factor in FACTORS})
        times = self.times({str(value): self.patched(step, **{field: value}) for value in values})
        return min(values, key=lambda value: times[str(value)])

    def sizes(self) -> Record:
        """Return the constants that are numbers of things computed together."""
        line = self.step(self.pool(self.rows(2_000_000)), WIDE, "binned")
        thin = self.step(self.pool(self.rows(200_000)), NARROW / 2, "binned")
        classes = self.step(self.pool(self.rows(5_000), 1_000, 0.1), WIDE, "binned")
        pairs = self.step(self.pool(self.rows(50_000)), WIDE, "direct")
        embeddings = torch.randn(max(64, self.rows(4_096)), 64, device=self.device, requires_grad=True)
        labels = torch.arange(embeddings.shape[0], device=self.device) // 4

        def retrieve() -> None:
            embeddings.grad = None
            retrieval_smooth_ap(embeddings, labels, temperature=WIDE).backward()

        return {
            "pairs_at_once": self.fastest("pairs_at_once", pairs),
            "rows_at_once": self.fastest("rows_at_once", line),
            "bins_at_once": self.fastest("bins_at_once", thin),
            "tables_at_once": self.fastest("tables_at_once", classes),
            "lanes": self.fastest("lanes", line),
            "similarities_at_once": self.fastest("similarities_at_once", retrieve),
        }

    def many_rows(self) -> int | None:
        """Return the smallest tried number of rows from which narrower bins are faster; None if there is none."""
        for count in (150_000, 300_000, 600_000, 1_200_000, 2_400_000):
            rows = self.rows(count)
            step = self.step(self.pool(rows), WIDE, "binned")
            orders = {"narrow": self.patched(step, many_rows=0), "wide": self.patched(step, many_rows=rows + 1)}
            times = self.times(orders)
            if times["narrow"] < times["wide"]:
                return rows
        return None


def measure(device: torch.device, quick: bool, repeats: int) -> list[Record]:
    """Return the value in use and the measured one of each constant; None where nothing sensible was measured."""
    measurement = Measurement(device, quick, repeats)
    measured = measurement.seconds() | measurement.sizes() | {"many_rows": measurement.many_rows()}
    records = []
    for name in Costs._fields:
        value = measured.get(name)
        if isinstance(value, float):  # times of noise may give a difference that is not positive
            value = float(f"{value:.2g}") if value > 0 else None
        records.append({"constant": name, "in_use": getattr(measurement.in_use, name), "measured": value})
    return records


def as_source(value: float) -> str:
    """Return a constant as the source of kernels/costs.py writes it."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int) and value >= 2**8 and value & (value - 1) == 0:
        return f"2**{int(math.log2(value))}"
    return f"{value:_}" if isinstance(value, int) else f"{value:g}"


def print_entry(device: torch.device, records: list[Record]) -> None:
    """Print the entry of the table."""
    print(f'\nEntry for TABLE in kernels/costs.py:\n\n    "{device.type}": Costs(')
    for record in records:
        used, value = record["in_use"], record["measured"]
        note = f"in use: {as_source(used)}" if value is not None else "in use, not measured"
        line = f"{record['constant']}={as_source(used if value is None else value)},"
        print(f"        {line:<30}  # {note}")
    print("    ),")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="device (default: cpu)")
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds; only shows that it runs")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each measurement (default: 5)")
    parser.add_argument("--out", type=Path, help=f"folder for costs.json (default: {RESULTS})")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.quick else RESULTS)
    info = machine()
    print_machine(info)
    records = measure(arguments.device, arguments.quick, 1 if arguments.quick else arguments.repeats)
    print_entry(arguments.device, records)
    if out is not None:
        head = {"machine": info, "device": str(arguments.device), "quick": arguments.quick}
        write_json(out / "costs.json", head | {"constants": records})


if __name__ == "__main__":
    main()
