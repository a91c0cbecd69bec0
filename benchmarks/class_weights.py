"""From which rows should balanced class weights be counted? This batch, the batches so far, or the training set.

Usage: python benchmarks/class_weights.py [--quick] [--cache FILE] [--out FOLDER]

Weighted cross-entropy, alone and with SmoothAP, by the protocol of real.py: ten of its sets, three rates, two splits
that no other benchmark has, 800 steps, rate and checkpoint by validation AP. The weights are the inverse shares of the
classes among the rows counted: those of the whole training set; of this batch alone; of the batches so far, each of
which counts 0.9 or 0.99 of the next; of all batches so far. Batches of 256 rows hold some ten positives; of 32 rows
many hold none, and so do those of 256 rows of sets that are thinned to 0.4 %. Differences from the weights of the
training set are paired, one a set, with the 95 % bootstrap interval over the sets. The full run takes a quarter of an
hour on one core and writes class_weights.json. A run that starts again takes finished runs from ``--cache``. Needs the
``bench`` extra.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from intervals import OverSets
from real import LARGE, QUICK, SHARE, WEIGHTED, chosen
from real_data import BINARY, describe, missing
from real_runs import Cache, Job, run
from report import Record, Run, print_records, progress

SETS = tuple(BINARY)[::3]
RATES, SPLITS, STEPS = (1e-3, 3e-3, 1e-2), (20, 21), (50, 100, 200, 400, 800)
MEMORIES = {
    "training set": "",
    "this batch": ", memory 0",
    "memory 0.9": ", memory 0.9",
    "memory 0.99": ", memory 0.99",
    "all so far": ", memory 1",
}
FEW = 100  # the budget of the second figure


def main() -> None:
    """Run, print, write."""
    script = Run(__doc__, "class_weights")
    cache, options = Cache.start(script, missing()), script.options
    sets, rates, splits, steps = QUICK if options.quick else (SETS, RATES, SPLITS, STEPS)
    budgets = [sum(step <= FEW for step in steps), len(steps)]
    table: list[Record] = []
    for batch, share in ((256, None), (32, None), (256, SHARE)):
        for loss in (WEIGHTED, f"{WEIGHTED} + SmoothAP"):
            values: dict[str, list[np.ndarray]] = {}
            for memory, added in progress(MEMORIES.items()):
                found = {}
                names = [name for name in sets if share is None or name in LARGE]
                for name in names:
                    job = Job(name, loss + added, rates, splits, steps, share, batch)
                    found[name] = {loss: np.array(cache.get(job, partial(run, job))[0])}
                values[memory] = [
                    np.array([chosen(found, name, (loss,), budget) for name in names]) for budget in budgets
                ]
            for memory, of_budgets in values.items():
                record: Record = {"batch": batch, "share": share, "loss": loss, "counts": memory}
                for step, own, base in zip((FEW, steps[-1]), of_budgets, values["training set"], strict=True):
                    gain = OverSets.of(own - base)
                    record |= {f"AP, {step} steps": float(own.mean()), f"minus, {step} steps": str(gain)}
                table.append(record)
            print_records(f"Average precision, {batch} rows a batch", table[-len(MEMORIES) :])
    script.write(sets=describe(sets), rates=rates, splits=splits, steps=steps, table=table)


if __name__ == "__main__":
    main()
