"""What a machine with CUDA says: the tests on its device, preflight, waits and launches of a step, speed, memory.

Usage: make gpu PYTHON=python3     with the Python of a CUDA build of torch, after ``pip install -e ".[test]"``
       python benchmarks/gpu.py [--quick] [--device cuda] [--out FOLDER]

Writes gpu.json with the machine: attach it to an issue, whatever it says. Without CUDA it says so in one line. Each
part has a limit of its own, 17 minutes in all; one that fails or ends at its limit is in the file with the end of its
output, and the next one runs. Speed has no limit. Speed is that of forward and backward
against one ``torch.sort`` of the same scores, memory the most that torch had allocated above the inputs, a row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import ROOT, Record, Run, interleave, make_rows, print_records, training_step

import fullrank

TESTS, STEPS = ROOT / "tests", ROOT / "benchmarks" / "steps.py"
ROWS, QUICK_ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000), (1_000,)
SHARE = 0.01  # of positives
LIMITS_S = {"tests": 540, "preflight": 120, "preflight over processes": 120, "steps": 240}
LINES = 30  # of the output that is kept


def part(name: str, arguments: list[Any]) -> Record:
    """Run a program in its limit, and return its exit status, its time and the end of its output."""
    print(f"{name}: at most {LIMITS_S[name]} s", flush=True)
    start = time.perf_counter()
    try:
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMITS_S[name]
        )
        status, output = str(done.returncode), done.stdout
    except subprocess.TimeoutExpired as expired:
        text = expired.stdout or ""
        status, output = "limit", text.decode(errors="replace") if isinstance(text, bytes) else text
    seconds, lines = time.perf_counter() - start, output.replace(str(ROOT), ".").splitlines()[-LINES:]
    print("\n".join([*lines, f"{name}: exit status {status}, {seconds:.0f} s"]), flush=True)
    return {"part": name, "status": status, "seconds": seconds, "output": lines}


def read(path: Path) -> Any:
    """Return the JSON that a part has written, None if it did not come so far."""
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def speed_and_memory(device: torch.device, sizes: tuple[int, ...]) -> list[Record]:
    """Return the time of a step of SmoothAPLoss against one sort, and its memory, by rows."""
    found = []
    for rows in sizes:
        logits, targets = (tensor.detach().to(device) for tensor in make_rows(rows, 1, SHARE))
        step = training_step(fullrank.SmoothAPLoss(num_classes=1), logits.requires_grad_(), targets)
        flat = logits.detach().flatten()
        times = interleave({"ours": step, "sort": lambda flat=flat: torch.sort(flat)}, 5, device)
        ours, sort = median(times["ours"]), median(times["sort"])
        record: Record = {"rows": rows, "ours_ms": ours * 1e3, "sort_ms": sort * 1e3, "ratio": ours / sort}
        if device.type == "cuda":
            logits.grad = None
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            step()
            record["bytes_per_row"] = (torch.cuda.max_memory_allocated(device) - before) / rows
        found.append(record)
        print(f"{rows:,} rows: {record}", flush=True)
    return found


def gpu(device: torch.device) -> Record:
    """Return what the results depend on besides the machine."""
    if device.type != "cuda":
        return {"device": str(device)}
    facts = torch.cuda.get_device_properties(device)
    return {
        "device": facts.name,
        "count": torch.cuda.device_count(),
        "capability": f"{facts.major}.{facts.minor}",
        "memory_gib": facts.total_memory / 2**30,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def main() -> int:
    """Measure, print, write; return 1 if a test or a check failed."""
    script = Run(__doc__, "gpu")
    script.parser.add_argument("--device", default="cuda", help="default: cuda")
    device = torch.device(script.parser.parse_args().device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device, or torch {torch.__version__} was built without CUDA: nothing was measured")
        return 0
    options = script.start()
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = [TESTS / "test_device.py"] if options.quick else [TESTS]
        marks = "not full and not slow" if options.quick else "not full"
        parts = [part("tests", ["-m", "pytest", "-q", "-k", device.type, "-m", marks, *chosen])]
        one = ["-m", "fullrank", "--device", device, "--json"]
        parts.append(part("preflight", [*one, folder / "one.json"]))
        count = torch.cuda.device_count() if device.type == "cuda" else 2
        if count > 1:
            over = [*torchrun, "--nproc-per-node", count, "-m", "fullrank"]
            several = [*over, "--device", device.type, "--json", folder / "several.json"]
            parts.append(part("preflight over processes", several))
        given = [STEPS, "--device", device, "--out", folder, *(["--quick"] if options.quick else [])]
        parts.append(part("steps", given))
        preflight, steps = [read(folder / "one.json"), read(folder / "several.json")], read(folder / "steps.json")
    speed = speed_and_memory(device, QUICK_ROWS if options.quick else ROWS)
    print_records("SmoothAPLoss, forward and backward, against one sort", speed)
    script.write(gpu=gpu(device), parts=parts, preflight=preflight, steps=steps, speed=speed)
    return int(any(one["status"] != "0" for one in parts))


if __name__ == "__main__":
    sys.exit(main())
