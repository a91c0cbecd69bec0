"""How long Smooth-AP for retrieval takes, compared with pytorch-metric-learning: each of N embeddings ranks all N.

Usage: python benchmarks/retrieval.py [--quick] [--repeats 3] [--out FOLDER]

``RetrievalSmoothAPLoss`` and the peer's SmoothAPLoss take embeddings and labels. Every row ranks the rows by cosine
similarity, and the rows with its label are positive. Both steps begin with the embeddings and end with their gradient.

In the peer each query also ranks itself, as a positive at the top; ours leaves it out. ``smooth_ap`` with ``indexes``
on all (N, N) similarities is the loss with the query included. The run prints how far this loss and its gradient are
from the peer's. The number of labels equals the number of rows per label, and rows are sorted by label: with other
numbers, or in another order, version 2.9.0 of the peer mixes rows of different labels.

The peer holds several (N, N, N) arrays. It is skipped where they would exceed the limit, which is an estimate from the
sizes of the arrays, not a failed allocation. The peak is that of a separate process that takes one step of ours,
including Python and torch; it needs Linux's /proc. The full run takes a few minutes and writes retrieval.json; a quick
run takes seconds and writes only with ``--out``. Needs the ``bench`` extra; without the peer its columns stay empty.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from memory import STATUS, resident
from report import PEER_MOST_BYTES, RESULTS, Step, interleave, machine, print_machine, print_table, write_json
from torch import Tensor

import fullrank
from fullrank.losses import smooth_ap

PEER = "pytorch_metric_learning"
FEATURES = 64
TEMPERATURE = 0.01  # the default of both
# Five (N, N, N) arrays of float32 at once: with 256 and 400 rows the peak of the process is 5.1 to 5.2 of them.
PEER_BYTES_PER_TRIPLE = 5 * 4
FULL = (4, 8, 12, 16, 20, 26, 32, 48, 64)  # labels, and rows of each
QUICK = (4, 8)


def make_embeddings(labels: int) -> tuple[Tensor, Tensor]:
    """Return normal embeddings (N, FEATURES) that require grad, and labels (N,), with N = labels^2."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(labels**2, FEATURES, generator=generator).requires_grad_()
    return embeddings, torch.arange(labels).repeat_interleave(labels)


def loss_with_itself(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of queries that also rank themselves, as in the peer."""
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    positive = (labels[:, None] == labels).long()
    query = torch.arange(labels.numel()).repeat_interleave(labels.numel())
    loss = smooth_ap((unit @ unit.T).reshape(-1, 1), positive.reshape(-1), TEMPERATURE, indexes=query)
    assert isinstance(loss, Tensor)
    return loss


def peer_loss(size: int) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the peer's loss; None if it is not installed or would need too much memory."""
    if importlib.util.find_spec(PEER) is None or size**3 * PEER_BYTES_PER_TRIPLE > PEER_MOST_BYTES:
        return None
    losses = importlib.import_module(f"{PEER}.losses")
    result: Callable[[Tensor, Tensor], Tensor] = losses.SmoothAPLoss(temperature=TEMPERATURE)
    return result


def difference(peer: Callable[..., Tensor], labels: int) -> dict[str, float]:
    """Return the difference between the loss with the query included and the peer's, and that of their gradients."""
    embeddings, targets = make_embeddings(labels)
    values = [loss(embeddings, targets) for loss in (loss_with_itself, peer)]
    gradients = [torch.autograd.grad(value, embeddings)[0].double() for value in values]
    distance = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    return {"loss_difference": abs(values[0].item() - values[1].item()), "gradient_difference": float(distance)}


def peak_apart(labels: int) -> int | None:
    """Return the peak resident set, in bytes, of a process that takes one step of ours."""
    if not STATUS.exists():
        return None
    command = [sys.executable, __file__, "--peak", str(labels)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def peak(labels: int) -> int:
    """Return the peak resident set of this process after one step of ours, in bytes."""
    fullrank.RetrievalSmoothAPLoss(temperature=TEMPERATURE)(*make_embeddings(labels)).backward()
    return resident("VmHWM")


def measure(labels: int, repeats: int) -> dict[str, Any]:
    """Return the medians for one size, and the differences between the results."""
    embeddings, targets = make_embeddings(labels)
    size = targets.numel()
    losses: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    losses["ours"] = fullrank.RetrievalSmoothAPLoss(temperature=TEMPERATURE)
    peer = peer_loss(size)
    if peer is not None:
        losses["peer"] = peer

    def step_of(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            embeddings.grad = None
            loss(embeddings, targets).backward()

        return step

    steps: dict[str, Step] = {name: step_of(loss) for name, loss in losses.items()}
    times = {name: median(runs) * 1e3 for name, runs in interleave(steps, repeats).items()}
    result: dict[str, Any] = {"rows": size, "positives": labels, "peer_gib": size**3 * PEER_BYTES_PER_TRIPLE / 2**30}
    result |= {f"{name}_ms": times.get(name) for name in ("ours", "peer")}
    result["ours_peak_bytes"] = peak_apart(labels)
    return result | (difference(peer, labels) if peer is not None else {})


def print_results(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    lines = []
    for row in results:
        cells = [f"{row['rows']:,}", f"{row['positives']:,}", f"{row['ours_ms']:,.2f}"]
        if row["peer_ms"] is None:
            cells += [f"{row['peer_gib']:,.1f} GiB: skipped", "", "", ""]
        else:
            cells += [f"{row['peer_ms']:,.2f}", f"{row['peer_ms'] / row['ours_ms']:,.1f}"]
            cells += [f"{row['loss_difference']:.0e}", f"{row['gradient_difference']:.0e}"]
        size = row["ours_peak_bytes"]
        cells.append("" if size is None else f"{size / 2**20:,.0f}")
        lines.append(cells)
    limit = f"the peer's arrays at most {PEER_MOST_BYTES / 2**30:.0f} GiB"
    title = f"Smooth-AP, N x {FEATURES} embeddings rank all N, forward + backward, median; {limit}"
    header = ("N", "of a label", "ours ms", "peer ms", "peer / ours", "with itself in: loss", "gradient", "peak MiB")
    print_table(title, header, lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each measurement (default: 3)")
    parser.add_argument("--out", type=Path, help=f"folder for retrieval.json (default: {RESULTS})")
    parser.add_argument("--peak", type=int, metavar="LABELS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak is not None:
        print(peak(arguments.peak))
        return
    out = arguments.out or (None if arguments.quick else RESULTS)
    warnings.simplefilter("ignore")  # warnings of the peer
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "repeats": arguments.repeats}
    print_machine(results["machine"])
    if importlib.util.find_spec(PEER) is None:
        print("pytorch-metric-learning is not installed: nothing to compare with")
    sizes = QUICK if arguments.quick else FULL
    results["retrieval"] = [measure(labels, arguments.repeats) for labels in sizes]
    print_results(results["retrieval"])
    if out is not None:
        write_json(out / "retrieval.json", results)


if __name__ == "__main__":
    main()
