"""Which loss for several classes of unequal size? Macro average precision and balanced accuracy on five sets.

Usage: python benchmarks/several_classes.py [--quick] [--seeds 10] [--cache FILE] [--out FOLDER]

Five sets of real_data.py have 7 to 26 classes, whose sizes shrink geometrically to 3 % of the largest, in training and
test rows alike. Batches of 512 rows, Adam at a rate of 0.01, the figures after 600 steps: neither rate nor checkpoint
is chosen, because the smallest classes have too few validation rows. A seed draws the split, the order of the classes
and the batches. A figure is the mean over the sets. Differences from cross-entropy are paired, seed by seed; their
intervals are 95 %, Student's t over the seeds, and hold for these sets. The full run takes a quarter of an hour on one
core and writes several_classes.json. A run that starts again takes finished runs from ``--cache``. Needs the ``bench``
extra.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from intervals import paired
from real_data import CLASSES, describe, missing
from real_runs import CLASS_STEPS, Cache, run_classes
from report import Run, print_records, progress

CE = "cross-entropy"
METHODS = (CE, f"weighted {CE}", "SmoothAP", f"{CE} + SmoothAP", f"weighted {CE} + SmoothAP")
FIGURES = ("logits", "probabilities", "accuracy")


def main() -> None:
    """Run, print, write."""
    script = Run(__doc__, "several_classes")
    script.parser.add_argument("--seeds", type=int, default=10, help="number of seeds (default: 10)")
    cache, options = Cache.start(script, missing()), script.options
    names, seeds, steps = (("segment",), 2, 4) if options.quick else (tuple(CLASSES), options.seeds, CLASS_STEPS)
    table, base = [], np.empty(0)
    for method in METHODS:
        found = []
        for seed in progress(range(seeds)):
            jobs = [(name, seed, method, steps) for name in names]
            runs = [cache.get(job, partial(run_classes, *job)) for job in jobs]
            found.append([float(np.mean([run[figure] for run in runs])) for figure in FIGURES])
        values = np.array(found).T  # of each figure, by seed
        base = values if method == CE else base
        record = {"loss": method} | dict(zip(FIGURES, values.mean(axis=1).tolist(), strict=True))
        for figure, own, other in zip(FIGURES, values.tolist(), base.tolist(), strict=True):
            gain = paired(own, other)
            record |= {f"{figure} minus {CE}": gain.mean, f"{figure} width": gain.width}
        table.append(record)
        print_records("Macro AP of logits and of probabilities, balanced accuracy", [record])
    script.write(seeds=seeds, steps=steps, sets=describe(names), table=table)


if __name__ == "__main__":
    main()
