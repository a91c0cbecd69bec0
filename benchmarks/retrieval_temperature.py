"""Which temperature should RetrievalSmoothAPLoss have by default? Embeddings on classes that were not trained on.

Usage: python benchmarks/retrieval_temperature.py [--quick] [--out FOLDER]

Sets of several classes from real_data.py: the even classes are for training, the odd ones for the test. A network with
one hidden layer of 64 makes embeddings of 16 dimensions, from batches of 256 rows. Figures are the mean average
precision of 600 test rows among each other: each embedding ranks the others by cosine similarity. The full run takes a
few minutes on one core and writes retrieval_temperature.json; a quick one writes only where ``--out`` says. Needs the
``bench`` extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import torch
from quality_data import Rows
from real_data import missing, split
from report import RESULTS, machine, print_machine, print_records, write_json
from torch import nn

from fullrank import RetrievalSmoothAPLoss
from fullrank.losses import retrieval_smooth_ap

SETS = ("letter", "texture", "segment")
TEST_ROWS = 600
RATES = (1e-3, 3e-3, 1e-2)
TEMPERATURES = (0.01, 0.03, 0.1, None)
SEEDS = (0, 1, 2)
EXACT = 1e-5  # a temperature at which the loss is one minus the mean average precision


def mean_average_precision(
    train: Rows, test: Rows, temperature: float | None, lr: float, seed: int, steps: int
) -> float:
    """Return the mean average precision on the test rows after a training on the training rows."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(train.features.shape[1], 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer, loss = torch.optim.Adam(model.parameters(), lr=lr), RetrievalSmoothAPLoss(temperature)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = train.take(torch.randint(len(train.targets), (256,), generator=generator))
        optimizer.zero_grad()
        loss(model(batch.features), batch.targets).backward()
        optimizer.step()
    with torch.no_grad():
        return 1 - float(retrieval_smooth_ap(model(test.features), test.targets, temperature=EXACT))


def _some(rows: Rows) -> Rows:
    """Return at most ``TEST_ROWS`` rows, drawn the same way every time."""
    return rows.take(torch.randperm(len(rows.targets), generator=torch.Generator().manual_seed(0))[:TEST_ROWS])


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one set, a few steps, seconds")
    parser.add_argument("--out", type=Path, help=f"folder for retrieval_temperature.json (full run: {RESULTS})")
    arguments = parser.parse_args()
    if (absent := missing()) is not None:
        parser.exit(0, f"{parser.prog}: {absent}\n")
    sets, seeds, steps = (SETS[-1:], SEEDS[:1], 3) if arguments.quick else (SETS, SEEDS, 250)
    torch.set_num_threads(1)
    info, records = machine(), []
    print_machine(info)
    for name in sets:
        rows = {seed: split(name, seed, 1.0) for seed in seeds}
        halves = {
            seed: (
                splits.train.take(splits.train.targets % 2 == 0),
                _some(splits.test.take(splits.test.targets % 2 == 1)),
            )
            for seed, splits in rows.items()
        }
        for lr in RATES:
            found = {
                "None" if temperature is None else f"{temperature:g}": mean(
                    mean_average_precision(*halves[seed], temperature, lr, seed, steps) for seed in seeds
                )
                for temperature in TEMPERATURES
            }
            records.append({"set": name, "lr": lr, **found})
    means = {key: mean(record[key] for record in records) for key in records[0] if key not in ("set", "lr")}
    print_records("Mean average precision on classes not trained on, by temperature", records)
    print_records("Mean over sets and learning rates", [means])
    out = arguments.out or (None if arguments.quick else RESULTS)
    if out is not None:
        write_json(out / "retrieval_temperature.json", {"machine": info, "temperatures": records})


if __name__ == "__main__":
    main()
