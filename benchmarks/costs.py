"""What the steps of the kernels cost on this machine: measures the table in kernels/costs.py again.

Usage: python benchmarks/costs.py [--device DEVICE] [--quick] [--repeats 5] [--out FOLDER]

Prints an entry for ``TABLE`` in kernels/costs.py: each measured constant, with the value in use next to it. The
measurement is that of ``python -m fullrank --measure costs``, which needs no clone; preflight/costs.py says how each
constant is found. The full run takes a few minutes and writes costs.json; a quick one takes seconds and writes only
where ``--out`` says. Do not use the values of a quick run, and measure on a quiet machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from report import RESULTS, machine, print_machine, write_json

from fullrank.preflight.costs import entry_of, measure_costs


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
    records = measure_costs(arguments.device, arguments.quick, 1 if arguments.quick else arguments.repeats)
    print(f"\n{entry_of(arguments.device, records)}")
    if out is not None:
        head = {"machine": info, "device": str(arguments.device), "quick": arguments.quick}
        write_json(out / "costs.json", head | {"constants": records})


if __name__ == "__main__":
    main()
