"""The learning curves of examples/accumulation.py, on two processes, with the commit and the machine.

Usage: python benchmarks/accumulation.py [--quick] [--out FOLDER]

The example trains on the same batches, cut into micro-batches in several ways, and prints how far each curve is from
that of undivided batches. This runs it and writes accumulation.json, from which docs/make_diagrams.py draws. The full
run takes some minutes. Needs the ``integrations`` extra.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from report import ROOT, Run

SMALL = ("--steps", "1", "--length", "24")


def main() -> None:
    """Run the example, write its curves."""
    script = Run(__doc__, "accumulation")
    options = script.start()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "curves.json")
        given = [ROOT / "examples/accumulation.py", "--output", path, *(SMALL if options.quick else ())]
        subprocess.run([*torchrun, *given], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        script.write(panels=json.loads(path.read_text("utf-8")))


if __name__ == "__main__":
    main()
