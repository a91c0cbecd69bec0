"""What a machine with CUDA says: preflight, speed, waits and operators of a step, memory, the tests on its device.

Usage: make gpu PYTHON=python3 [BUDGET=seconds] [PART=speed]     with the Python of a CUDA build of torch
       python benchmarks/gpu.py [--quick] [--device cuda] [--budget SECONDS] [--part NAME] [--out FOLDER]

Writes gpu.json with the machine: attach it to an issue, whatever it says. Each part is a process with a limit of its
own, and the file is replaced as results come: what was measured is there whenever this ends, even if it is killed. Of
a budget no part but the last gets more than half of what is left. ``--part`` runs one part and leaves the others in the
file as they are. Without CUDA it says so in one line.

Needs torch and numpy, no network. If fullrank is not installed, the clone is used. Tests whose packages are missing are
skipped by name. Speed is that of forward and backward against one ``torch.sort`` of the same scores, with the time that
the device computes in it, and that of the same step replayed as a CUDA graph, where it can be captured. Memory is the
most that torch had allocated above the inputs, a row.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

if importlib.util.find_spec("fullrank") is None:  # the root of the clone is the package, under the name of its folder
    _LINKS = tempfile.mkdtemp(prefix="fullrank-")
    atexit.register(shutil.rmtree, _LINKS)
    Path(_LINKS, "fullrank").symlink_to(Path(__file__).resolve().parents[1])
    sys.path.append(_LINKS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _LINKS]))

from report import ROOT, Record, Run, interleave, make_rows, training_step

import fullrank

STEPS, VERIFY = ROOT / "benchmarks" / "steps.py", ROOT / "benchmarks" / "verify.py"
ROWS, QUICK_ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000), (1_000,)
SHARE = 0.01  # of positives
GRAPHED = 4_096  # rows up to which a step can be captured
PAIRS, HEAD = (256, 1_024, 4_096, 16_384), (8_192, 128_256, 2_048)  # rows; tokens, words and columns of a model
# Seconds, in the order in which the parts run.
LIMITS = {"environment": 60, "preflight": 120, "preflight over processes": 120, "preflight over gloo": 120}
LIMITS |= {"verify over processes": 120, "speed": 120, "pairs": 60, "vocabulary": 60, "launches": 240, "memory": 60}
LIMITS |= {"tests": 540}
LINES = 60  # of the output that is kept
FILES = {"launches": "steps", "verify over processes": "verify"}  # of parts that are scripts with a name of their own
GRACE_S = 5  # for torchrun, which ends its processes
# The files of tests/ with tests that take a device. Collecting all files to find them would take minutes.
TESTS = ["test_device.py", "losses/test_loss_values.py", "losses/test_contract.py", "losses/test_retrieval.py"]
TESTS += ["losses/test_contrast.py", "losses/test_hints.py", "losses/test_ndcg.py", "losses/test_every_loss.py"]
TESTS += ["losses/test_linear_form.py", "accumulation/test_accumulate.py", "accumulation/test_replay.py"]
TESTS += ["gradients/test_grad_norm_local.py", "metrics/test_metrics.py", "queues/test_queue.py"]
TESTS += ["preflight/test_site.py", "kernels/test_plain.py", "losses/test_row_loss.py"]
EXTRAS = ("pytest", "sklearn", "torchmetrics", "scipy")  # that some tests import
NCCL_SHARES_A_DEVICE = (2, 30)  # the first version that can, if NCCL_MULTI_RANK_GPU_ENABLE is set


def environment(device: torch.device, _: tuple[int, ...]) -> Iterator[Record]:
    """Yield what the results depend on besides the machine."""
    yield {"device": str(device), "missing": [name for name in EXTRAS if importlib.util.find_spec(name) is None]}
    if device.type == "cuda":
        facts, nccl = torch.cuda.get_device_properties(device), torch.distributed.is_nccl_available()
        yield {
            "name": facts.name,
            "count": torch.cuda.device_count(),
            "capability": f"{facts.major}.{facts.minor}",
            "memory_gib": facts.total_memory / 2**30,
            "cuda": torch.version.cuda,
            "nccl": [*torch.cuda.nccl.version()] if nccl else None,
        }


def speed(device: torch.device, sizes: tuple[int, ...]) -> Iterator[Record]:
    """Yield the time of a step of SmoothAPLoss against one sort, by rows, and where it goes."""
    for rows in sizes:
        step, logits = _step(device, rows)
        flat = logits.detach().flatten()
        steps = {"ours": step, "sort": lambda flat=flat: torch.sort(flat)}
        if device.type == "cuda" and rows <= GRAPHED:
            steps["graph"] = _graph(device, rows).replay
        times = {name: median(runs) for name, runs in interleave(steps, 5, device).items()}
        record = {"rows": rows, **{f"{name}_ms": seconds * 1e3 for name, seconds in times.items()}}
        if device.type == "cuda":
            record["kernels"], record["device_ms"] = _kernels(step)
        yield record | {"ratio": times["ours"] / times["sort"]}


def _graph(device: torch.device, rows: int) -> Any:
    """Return a CUDA graph of the step, without checks, whose values the host would read, and at a number."""
    logits, targets = (tensor.detach().to(device) for tensor in make_rows(rows, 1, SHARE))
    loss, leaf = fullrank.SmoothAPLoss(1, temperature=0.1, validate_args=False), logits.requires_grad_()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.autograd.grad(loss(leaf, targets), leaf)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        torch.autograd.grad(loss(leaf, targets), leaf)
    return graph


def _kernels(step: Any, steps: int = 5) -> tuple[float, float]:
    """Return how many kernels of the device a step runs, and for how many milliseconds together."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(kernels) / steps, sum(event.device_time for event in kernels) / steps / 1e3


def pairs(device: torch.device, sizes: tuple[int, ...]) -> Iterator[Record]:
    """Yield the step of losses of embeddings of 128 columns, and of plain lines with the matrix of all pairs."""
    from step import of_embeddings  # for this part alone

    for kind in ("InfoNCELoss", "SigLIPLoss", "SupConLoss"):
        for size in PAIRS if len(sizes) > 1 else PAIRS[:1]:
            yield {"loss": kind, "rows": size, **_against(of_embeddings(kind, size, device), device)}


def vocabulary(device: torch.device, sizes: tuple[int, ...]) -> Iterator[Record]:
    """Yield the loss of a language model from hidden states and the weight of its head, both in bfloat16."""
    from vocabulary import FORMS, QUICK, draw

    tokens, words, columns = HEAD if len(sizes) > 1 else QUICK
    steps = {}
    for name, (form, share) in FORMS.items():
        if not name.startswith("F.") or hasattr(torch.nn.functional, "linear_cross_entropy"):
            inputs = draw((tokens, words, columns), share, device, torch.bfloat16)
            steps[name] = lambda form=form, inputs=inputs: torch.autograd.grad(form(*inputs), inputs[:2])
    yield {"tokens": tokens, "words": words, "columns": columns, **_against(steps, device)}


def _against(steps: dict[str, Any], device: torch.device) -> Record:
    """Return the milliseconds and the peak in MiB above what was allocated of each of ``steps``."""
    record: Record = {f"{name}_ms": median(runs) * 1e3 for name, runs in interleave(steps, 5, device).items()}
    for name, step in steps.items() if device.type == "cuda" else ():
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        record[f"{name}_mib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return record


def memory(device: torch.device, sizes: tuple[int, ...]) -> Iterator[Record]:
    """Yield the memory of such a step, by rows."""
    for rows in sizes:
        step, logits = _step(device, rows)
        step()  # fills caches
        logits.grad = None
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        yield {"rows": rows, "bytes_per_row": (torch.cuda.max_memory_allocated(device) - before) / rows}


def _step(device: torch.device, rows: int) -> tuple[Any, torch.Tensor]:
    logits, targets = (tensor.detach().to(device) for tensor in make_rows(rows, 1, SHARE))
    return training_step(fullrank.SmoothAPLoss(num_classes=1), logits.requires_grad_(), targets), logits


OWN = {"environment": environment, "speed": speed, "pairs": pairs, "vocabulary": vocabulary, "memory": memory}


def test_files() -> tuple[list[Path], list[str]]:
    """Return the files whose packages are there, and why the others are skipped."""
    chosen, skipped = [], []
    for name in TESTS:
        imports = re.findall(r"^(?:from|import) (\w+)", (ROOT / "tests" / name).read_text("utf-8"), re.MULTILINE)
        missing = [extra for extra in EXTRAS if extra in imports and importlib.util.find_spec(extra) is None]
        if missing:
            skipped.append(f"skipped: {name} needs {', '.join(missing)}")
        else:
            chosen.append(ROOT / "tests" / name)
    return chosen, skipped


def command_of(name: str, device: torch.device, quick: bool, facts: Record, folder: Path) -> list[str]:
    """Return the command of a part, which writes its results into ``folder``; facts are those of the environment."""
    size = ["--quick"] if quick else []
    if name in OWN:
        return [__file__, "--work", name, "--device", str(device), "--out", str(folder), *size]
    if name == "launches":
        return [str(STEPS), "--device", str(device), "--out", str(folder), *size]
    if name == "tests":
        files = [ROOT / "tests" / "test_device.py"] if quick else test_files()[0]
        marks = "not full and not slow" if quick else "not full"
        return ["-m", "pytest", "-v", "--tb=short", "-k", device.type, "-m", marks, *map(str, files)]
    preflight = ["-m", "fullrank", "--json", str(folder / f"{name}.json"), "--device"]
    if name == "preflight":
        return [*preflight, str(device)]
    if name == "verify over processes":
        preflight = [str(VERIFY), "--out", str(folder), "--device"]
    processes = 2
    if "over processes" in name and device.type == "cuda":
        shares = tuple(facts.get("nccl") or ()) >= NCCL_SHARES_A_DEVICE
        processes = max(facts.get("count", 1), 2 if shares else 1)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torchrun, *preflight, device.type, *(["--backend", "gloo"] if "gloo" in name else [])]


def results_of(name: str, folder: Path, output: str) -> Any:
    """Return what a part has found so far."""
    if name == "tests":
        outcomes = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", output, re.MULTILINE)
        bad = [test for test, outcome in outcomes if outcome in ("FAILED", "ERROR")]
        return {**Counter(outcome for _, outcome in outcomes), "failed": bad, "left_out": test_files()[1]}
    path = folder / f"{FILES.get(name, name)}.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found.get("records", found) if name in OWN else found


def has_failed(part: Record) -> bool:
    """Return whether a part says that something is wrong; two processes on one device are no failure of that device."""
    if part["status"] in ("0", "limit") or part["status"].startswith("skipped"):
        return False
    checks = part["results"].get("checks", []) if isinstance(part["results"], dict) else []
    bad = {check["name"] for check in checks if check["outcome"] in ("FAILED", "not run")}
    return bad != {"placement"}


def reason_to_skip(name: str, device: torch.device) -> str | None:
    """Return why a part cannot say anything here, None if it can."""
    if name == "tests" and importlib.util.find_spec("pytest") is None:
        return "pytest is missing"
    if device.type != "cuda" and name == "memory":
        return f"torch does not count the memory of a {device.type}"
    if device.type == "cpu" and name == "preflight over gloo":
        return "gloo is what the processes before used"
    return None


def run_part(script: Run, name: str, parts: dict[str, Record], limit: float) -> None:
    """Run a part, at most ``limit`` seconds, and write its results into the file whenever there are more."""
    options = script.options
    print(f"{name}: at most {limit:.0f} s", flush=True)
    environment_facts = [*parts.get("environment", {}).get("results", []), {}, {}][1]
    variables = os.environ | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    start, old = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="fullrank-") as given:
        folder, status = Path(given), "running"
        command = command_of(name, options.device, options.quick, environment_facts, folder)
        with open(folder / "output", "w+") as sink:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=variables, stdout=sink, stderr=subprocess.STDOUT
            )
            try:
                while status == "running":
                    time.sleep(0.2)
                    code, seconds = process.poll(), time.monotonic() - start
                    if code is None and seconds > limit:
                        end(process)
                        status = "limit"
                    elif code is not None:
                        status = str(code)
                    output = (folder / "output").read_text("utf-8", errors="replace").replace(str(ROOT), ".")
                    new = status, output, results_of(name, folder, output)
                    if new != old:
                        old, lines = new, output.splitlines()[-LINES:]
                        record = {"status": status, "seconds": seconds, "limit_s": limit, "results": new[2]}
                        parts[name] = record | {"commit": script.machine["commit"]}
                        if has_failed(parts[name]):
                            parts[name]["output"] = lines
                        script.write(parts=parts)
            finally:
                end(process)
    print("\n".join([*lines, f"{name}: exit status {status}, {seconds:.0f} s"]), flush=True)


def end(process: subprocess.Popen[Any]) -> None:
    """End ``process``, if it runs, and what it has started, if it is torchrun."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def work(script: Run, name: str, device: torch.device) -> None:
    """Measure a part in this process, and write each record when it is there."""
    script.name, records = name, []
    for record in OWN[name](device, QUICK_ROWS if script.options.quick else ROWS):
        records.append(record)
        print(record, flush=True)
        script.write(records=records)


def main() -> int:
    """Measure, print, write; return 1 if a test or a check failed."""
    script = Run(__doc__, "gpu")
    script.parser.add_argument("--device", default="cuda", type=torch.device, help="default: cuda")
    script.parser.add_argument("--budget", type=float, help="seconds for all parts")
    script.parser.add_argument("--part", choices=LIMITS, help="run this part alone")
    script.parser.add_argument("--work", choices=OWN, help="measure it in this process, as a part of a run")
    device = script.parser.parse_args().device
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"no CUDA device, or torch {torch.__version__} was built without CUDA: nothing was measured")
        return 0
    options = script.start()
    if options.work:
        work(script, options.work, device)
        return 0
    folder = script.folder()
    path = None if folder is None else folder / "gpu.json"
    keeps = options.part and path is not None and path.exists()
    parts: dict[str, Record] = json.loads(path.read_text("utf-8"))["parts"] if keeps else {}
    todo = [options.part] if options.part else [*LIMITS]
    deadline = time.monotonic() + (options.budget or sum(LIMITS.values()))
    script.write(parts=parts)
    for name in todo:
        left = deadline - time.monotonic()
        limit = min(LIMITS[name], left if name == todo[-1] else left / 2)
        reason = "the budget is spent" if limit < 1 else reason_to_skip(name, device)
        if reason is None:
            run_part(script, name, parts, limit)
        else:
            parts[name] = {"status": f"skipped: {reason}", "seconds": 0.0, "results": {}}
            print(f"{name}: skipped: {reason}", flush=True)
            script.write(parts=parts)
    return int(any(has_failed(parts[name]) for name in todo))


if __name__ == "__main__":
    sys.exit(main())
