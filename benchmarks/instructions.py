"""How many instructions the processor executes in a step: a number that other work on the machine does not change.

Usage: python benchmarks/instructions.py [--quick] [--out FOLDER]

Callgrind counts them, without AVX-512, in one thread of one process: of a whole step, forward and backward, and of it
those in the library in C and its calls. Needs valgrind with its headers and gcc; without them it says so. Takes some
minutes, most of them for valgrind to import torch. Writes instructions.json.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from report import Record, Run, Step, make_rows, print_records, training_step
from step import of_embeddings
from torch import nn

import fullrank

HEADER = Path("/usr/include/valgrind/callgrind.h")
SOURCE = f"""#include "{HEADER}"
void start(void) {{ CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }}
void stop(const char* name) {{ CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }}
"""
WARM, COUNTED = 25, 10  # steps: hints look at the first 20
IN_C = ("sums.library", "libffi")  # whose call callgrind does not tell from what it calls, which has no symbols


def steps(quick: bool) -> Iterator[tuple[str, Step]]:
    """Yield the steps by name."""
    losses: dict[str, Any] = {
        "SmoothAPLoss": fullrank.SmoothAPLoss(1),
        "SmoothAPLoss, queue of 1,024": fullrank.SmoothAPLoss(1, queue_size=1_024),
        "RecallAtQuantileLoss": fullrank.RecallAtQuantileLoss(1),
        "BCEWithLogitsLoss": fullrank.BCEWithLogitsLoss(),
    }
    for name, loss in losses.items():
        for rows in (64,) if quick else (450, 900):
            logits, targets = make_rows(rows, 1, 0.1)
            yield f"{name} of {rows}", training_step(loss, logits, targets)
    for kind in ("InfoNCELoss", "SigLIPLoss", "SupConLoss"):
        for size in (64,) if quick else (64, 256):
            for name, step in of_embeddings(kind, size).items():
                yield f"{kind} of {size}{', plain lines' * (name == 'plain')}", step
    layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(10)])
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    yield "clip_grad_norm_ of 10 x 64^2", lambda: fullrank.clip_grad_norm_(layers, 1.0)
    yield "torch's clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(layers.parameters(), 1.0)


def work(folder: Path, quick: bool) -> None:
    """Run the steps under callgrind, which leaves a file for each."""
    torch.set_num_threads(1)
    requests = ctypes.CDLL(str(folder / "requests.so"))
    for name, step in steps(quick):
        for _ in range(WARM):
            step()
        requests.start()
        for _ in range(COUNTED):
            step()
        requests.stop(name.encode())


def read(path: Path) -> Record | None:
    """Return a step and its instructions from a file of callgrind; None for the last one, which has none."""
    text = path.read_text("utf-8")
    name = re.search(r"^desc: Trigger: Client Request: (.*)", text, re.MULTILINE)
    if name is None:
        return None
    total = sum(map(int, re.findall(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)[:1]))
    in_library, inside, is_call = False, 0, False
    for line in text.splitlines():
        if line.startswith("ob="):
            in_library = any(name in line for name in IN_C)
        elif re.match(r"[\d+*-]", line):  # a position and what was executed there itself, or in a call
            inside += 0 if is_call or not in_library else int(line.split()[-1])
        is_call = line.startswith("calls=")
    return {"step": name[1], "thousands": total / COUNTED / 1e3, "in_the_library": inside / COUNTED / 1e3}


def main() -> None:
    """Count, print, write."""
    script = Run(__doc__, "instructions")
    script.parser.add_argument("--work", type=Path, help="what callgrind runs")
    if "--work" in sys.argv:
        options = script.parser.parse_args()
        work(options.work, options.quick)
        return
    options = script.start()
    if not (HEADER.exists() and shutil.which("valgrind") and shutil.which("gcc")):
        print("skipped: needs valgrind, its headers and gcc")
        return
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        (folder / "requests.c").write_text(SOURCE)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "requests.so", folder / "requests.c"], check=True)
        callgrind = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            "--compress-strings=no",
            f"--callgrind-out-file={folder}/out",
        ]
        command = [*callgrind, sys.executable, __file__, "--work", given, *["--quick"] * options.quick]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "0"}, stderr=subprocess.DEVNULL)
        paths = sorted(folder.glob("out.*"), key=lambda path: int(path.suffix[1:]))
        found = [record for path in paths if (record := read(path)) is not None]
    print_records("Instructions of a step, thousands", found)
    script.write(steps=found)


if __name__ == "__main__":
    main()
