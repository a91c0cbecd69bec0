"""What the steps of the kernels cost on this machine: measures the table in kernels/costs.py again.

Usage: python benchmarks/costs.py [--device DEVICE] [--write] [--quick] [--repeats 5] [--out FOLDER]

Prints an entry for ``TABLE`` in kernels/costs.py: each measured constant, with the value in use next to it. ``--write``
puts it there, in place of an earlier one for this type of device.

The seconds (pair to coarse_bin) are solved from the times of Smooth-AP, forward and backward, at five sizes. Each size
(the other constants) is the fastest of a quarter of the value in use, that value and four times as much, with all other
constants unchanged. ``many_rows`` is the smallest tried number of rows at which the narrower bins are faster,
``plain_pairs`` the largest tried number of pairs up to which summing them all is faster, and ``interleaved`` the faster
of the two.

Runs in one process alone, because ranks on shared processors would disturb each other; measure on a quiet machine. The
full run takes a few minutes and writes costs.json; a quick one takes seconds and writes only where ``--out`` says. Do
not use the values of a quick run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from report import CPU, ROOT, Record, Run, Step, interleave
from torch import Tensor

from fullrank.kernels import native
from fullrank.kernels.bins import find_bins
from fullrank.kernels.costs import TABLE, Costs, costs_of
from fullrank.kernels.node_tables import order_for
from fullrank.kernels.smooth_ap.sums import smooth_ap_sums
from fullrank.losses import retrieval_smooth_ap

SOURCE = ROOT / "kernels" / "costs.py"
SHARE = 0.01  # of positives
WIDE, NARROW = 0.1, 0.002  # temperatures: few and many coarse bins
FACTORS = (0.25, 1.0, 4.0)  # of the value in use


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

    def step(
        self, pool: tuple[Tensor, Tensor], temperature: float, method: str, in_c: bool = False
    ) -> Callable[[], None]:
        """Return forward and backward of Smooth-AP as one call, ``in_c`` with the extension where it was built."""
        scores, positive = pool
        functions = native.FUNCTIONS if in_c else {}

        def run() -> None:
            scores.grad = None
            with mock.patch.object(native, "FUNCTIONS", functions):
                smooth_ap_sums(scores, positive, None, None, temperature, method)[0].sum().backward()

        return run

    def under(self, step: Step, **changes: Any) -> Callable[[], None]:
        """Return ``step`` under other costs of the device."""
        costs = self.in_use._replace(**changes)

        def run() -> None:
            with _in_use(self.device, costs):
                step()

        return run

    def times(self, steps: dict[str, Step]) -> dict[str, float]:
        """Return the median time of each step in seconds."""
        return {name: median(runs) for name, runs in interleave(steps, self.repeats, self.device).items()}

    def num_bins(self, scores: Tensor, temperature: float) -> int:
        """Return the number of coarse bins of one class of ``scores`` (1, M)."""
        low, high = scores.detach().amin(dim=1), scores.detach().amax(dim=1)
        bins = find_bins(scores.detach(), low, high, temperature, order_for(scores, scores.shape[1]).fine)
        assert bins is not None
        return bins.num_coarse

    def seconds(self) -> Record:
        """Return the constants that are seconds; native_pair is that of torch where the extension was not built."""
        few, many = self.pool(self.rows(100_000)), self.pool(self.rows(500_000))  # both of the same order
        pairs = self.pool(self.rows(50_000))
        times = self.times(
            {
                "pairs": self.step(pairs, WIDE, "direct"),
                "pairs in C": self.step(pairs, WIDE, "direct", in_c=True),
                "few rows": self.step(few, WIDE, "binned"),
                "many rows": self.step(many, WIDE, "binned"),
                "many bins": self.step(few, NARROW, "binned"),
                "classes": self.step(self.pool(self.rows(5_000), 64, 0.1), WIDE, "binned"),
            }
        )
        bins = [self.num_bins(few[0], WIDE), self.num_bins(few[0], NARROW)]
        row = (times["many rows"] - times["few rows"]) / (many[0].numel() - few[0].numel())
        coarse_bin = (times["many bins"] - times["few rows"]) / (bins[1] - bins[0])
        fixed = times["few rows"] - row * few[0].numel() - coarse_bin * bins[0]
        num_pairs = int(pairs[1].sum()) * pairs[0].numel()
        pair, native_pair = times["pairs"] / num_pairs, times["pairs in C"] / num_pairs
        native_class = times["classes"] / 64 - row * self.rows(5_000)
        in_c = {"native_pair": native_pair, "native_class": native_class} if self.device.type == "cpu" else {}
        return {"pair": pair, **in_c, "fixed": fixed, "row": row, "coarse_bin": coarse_bin}

    def fastest(self, field: str, step: Step) -> int | bool:
        """Return the fastest value of one size, or of one choice, on ``step``."""
        used = getattr(self.in_use, field)
        values = [False, True] if isinstance(used, bool) else sorted({max(1, int(used * factor)) for factor in FACTORS})
        times = self.times({str(value): self.under(step, **{field: value}) for value in values})
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
            "interleaved": self.fastest("interleaved", line),
            "similarities_at_once": self.fastest("similarities_at_once", retrieve),
        }

    def many_rows(self) -> int | None:
        """Return the smallest tried number of rows from which narrower bins are faster; None if there is none."""
        for count in (150_000, 300_000, 600_000, 1_200_000, 2_400_000):
            rows = self.rows(count)
            step = self.step(self.pool(rows), WIDE, "binned")
            times = self.times({"narrow": self.under(step, many_rows=0), "wide": self.under(step, many_rows=rows + 1)})
            if times["narrow"] < times["wide"]:
                return rows
        return None

    def plain_pairs(self) -> int:
        """Return the largest tried number of pairs up to which all are summed faster than those of the positives."""
        most = 0
        for count in (1_000, 2_000, 4_000, 8_000):
            pool = self.pool(self.rows(count))
            other = self.under(self.step(pool, WIDE, "auto"), plain_pairs=0)
            times = self.times({"plain": self.step(pool, WIDE, "plain"), "other": other})
            if times["plain"] >= times["other"]:
                break
            most = pool[0].numel() ** 2
        return most


@contextmanager
def _in_use(device: torch.device, costs: Costs) -> Iterator[None]:
    before = dict(TABLE)
    TABLE[device.type] = costs
    try:
        yield
    finally:
        TABLE.clear()
        TABLE.update(before)


def measure_costs(device: torch.device, quick: bool = False, repeats: int = 5) -> list[Record]:
    """Return the value in use and the measured one of each constant; None where nothing sensible was measured.

    Args:
        device: the device, on which nothing else should compute.
        quick: small sizes, a few seconds; only shows that it runs.
        repeats: repetitions of each measurement.
    """
    measurement = Measurement(device, quick, repeats)
    measured = measurement.seconds() | measurement.sizes()
    measured |= {"many_rows": measurement.many_rows(), "plain_pairs": measurement.plain_pairs()}
    records = []
    for name in Costs._fields:
        value = measured.get(name)
        if isinstance(value, float):  # times of noise may give a difference that is not positive
            value = float(f"{value:.2g}") if value > 0 else None
        records.append({"constant": name, "in_use": getattr(measurement.in_use, name), "measured": value})
    return records


def entry_of(device: torch.device, records: list[Record]) -> str:
    """Return the entry for ``TABLE`` in kernels/costs.py, with each value in use next to the measured one."""
    lines = ["Entry for TABLE in kernels/costs.py:", "", f'    "{device.type}": Costs(']
    for record in records:
        used, value = record["in_use"], record["measured"]
        note = f"in use: {_as_source(used)}" if value is not None else "in use, not measured"
        line = f"{record['constant']}={_as_source(used if value is None else value)},"
        lines.append(f"        {line:<30}  # {note}")
    return "\n".join([*lines, "    ),"])


def with_entry(source: str, device: torch.device, entry: str) -> str:
    """Return the ``source`` of kernels/costs.py with ``entry``, see :func:`entry_of`, behind the table."""
    block = "TABLE |= {\n" + entry.partition("\n\n")[2] + "\n}\n\n\n"
    others = re.sub(rf'TABLE \|= \{{\n    "{device.type}": .*?\n\}}\n+', "", source, flags=re.DOTALL)
    return others.replace("def costs_of(", block + "def costs_of(")


def _as_source(value: float) -> str:
    """Return a constant as the source of kernels/costs.py writes it."""
    if value == math.inf:
        return "math.inf"
    if isinstance(value, int) and value >= 2**8 and value & (value - 1) == 0:
        return f"2**{int(math.log2(value))}"
    return f"{value:_}" if type(value) is int else f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "costs", repeats=5)
    script.parser.add_argument("--device", type=torch.device, default=CPU, help="device (default: cpu)")
    script.parser.add_argument("--write", action="store_true", help=f"put the entry into {SOURCE}")
    options = script.start()
    records = measure_costs(options.device, options.quick, 1 if options.quick else options.repeats)
    entry = entry_of(options.device, records)
    print(f"\n{entry}")
    if options.write:
        SOURCE.write_text(with_entry(SOURCE.read_text("utf-8"), options.device, entry), "utf-8")
    script.write(device=str(options.device), constants=records)


if __name__ == "__main__":
    main()
