"""Does the automatic temperature of SmoothAPLoss need tuning? Against fixed ones, over three learning rates.

Usage: python benchmarks/temperature.py [--quick] [--out FOLDER]

The task is ``fraud`` of quality_data.py with 200,000 rows: 800 steps of 4,096 rows, Adam with a rate that falls
linearly, two hidden layers of 32, no queue, two seeds. Prints the mean average precision on test rows for each learning
rate and temperature, and the ratio of the automatic one to the best of the fixed ones. The full run takes about five
minutes on one core and writes temperature.json; a quick one writes only where ``--out`` says. Needs the ``test`` extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import torch
from quality_data import make_fraud
from quality_runs import Setting, evaluate, score, train
from report import RESULTS, machine, print_machine, print_records, write_json

from fullrank import SmoothAPLoss

RATES = (1e-3, 1e-2, 5e-2)
FIXED = (0.01, 0.1, 0.5, 2.0)
SEEDS = (1, 2)


def average_precision(lr: float, temperature: float | None, rows: int, steps: int, seed: int) -> float:
    """Return the average precision on test rows after a training with ``temperature``."""
    splits, setting = make_fraud(rows, seed), Setting(0.005, steps, 4_096)
    model = train(splits.train, SmoothAPLoss(1, queue_size=0, temperature=temperature), lr, setting, seed)
    return evaluate(score(model, splits.test.features), splits.test.targets, setting.budget)["ap"]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps on few rows, seconds")
    parser.add_argument("--out", type=Path, help=f"folder for temperature.json (full run: {RESULTS})")
    arguments = parser.parse_args()
    rows, steps, seeds = (20_000, 4, SEEDS[:1]) if arguments.quick else (200_000, 800, SEEDS)
    torch.set_num_threads(1)
    info, records = machine(), []
    print_machine(info)
    for lr in RATES:
        found = {
            "automatic" if temperature is None else f"{temperature:g}": mean(
                average_precision(lr, temperature, rows, steps, seed) for seed in seeds
            )
            for temperature in (*FIXED, None)
        }
        best = max(value for name, value in found.items() if name != "automatic")
        ratio = found["automatic"] / best if best > 0 else float("nan")
        records.append({"lr": lr, **found, "automatic_over_best": ratio})
    print_records("Average precision by temperature", records)
    out = arguments.out or (None if arguments.quick else RESULTS)
    if out is not None:
        write_json(out / "temperature.json", {"machine": info, "temperature": records})


if __name__ == "__main__":
    main()
