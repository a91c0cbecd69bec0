"""How long Smooth-AP takes for retrieval, against pytorch-metric-learning: N embeddings, each ranks all N.

Usage: python benchmarks/retrieval.py [--quick] [--repeats 3] [--out FOLDER]

The peer's SmoothAPLoss takes embeddings and labels, and lets every row rank all rows by cosine similarity: N rankings
of a pool of N, the rows of the same label positive. ``fullrank.SmoothAPLoss(num_classes=N, multi_hot=True)`` on the
(N, N) similarities is the same loss, one column for each query; the run prints how far loss and gradient are apart.
Both steps begin with the embeddings and end with their gradient. There are as many labels as rows of each: with other
numbers version 2.9.0 of the peer puts rows of different labels together.

The peer holds several (N, N, N) arrays. Where they would outgrow the limit it is not run: that is an estimate from the
sizes of the arrays, not a failed allocation. The full run takes about a minute and writes retrieval.json, a quick one
seconds, and only where ``--out`` says. Needs the ``bench`` extra; without the peer its columns stay empty.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import PEER_MOST_BYTES, RESULTS, Steps, interleave, machine, print_machine, print_table, write_json
from torch import Tensor

import fullrank

PEER = "pytorch_metric_learning"
FEATURES = 128
TEMPERATURE = 0.01  # the default of both
# Five (N, N, N) arrays of float32 at once: with 256 and with 400 rows the peak of the process is 5.1 to 5.2 of them.
PEER_BYTES_PER_TRIPLE = 5 * 4
FULL = (4, 8, 12, 16, 20, 26, 32, 48, 64)  # labels, and rows of each
QUICK = (4, 8)


def make_embeddings(labels: int) -> tuple[Tensor, Tensor]:
    """Return normal embeddings (N, FEATURES) that ask for a gradient, and labels (N,), with N = labels^2."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(labels**2, FEATURES, generator=generator).requires_grad_()
    return embeddings, torch.arange(labels).repeat_interleave(labels)


def our_loss(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of ``size`` embeddings and their labels, every row ranking all rows."""
    smooth_ap = fullrank.SmoothAPLoss(num_classes=size, queue_size=0, temperature=TEMPERATURE, multi_hot=True)

    def loss(embeddings: Tensor, labels: Tensor) -> Tensor:
        unit = torch.nn.functional.normalize(embeddings, dim=1)
        result: Tensor = smooth_ap(unit @ unit.T, (labels[:, None] == labels).long())
        return result

    return loss


def peer_loss(size: int) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return the peer's; None where it is not installed or would take too much memory."""
    if importlib.util.find_spec(PEER) is None or size**3 * PEER_BYTES_PER_TRIPLE > PEER_MOST_BYTES:
        return None
    losses = importlib.import_module(f"{PEER}.losses")
    result: Callable[[Tensor, Tensor], Tensor] = losses.SmoothAPLoss(temperature=TEMPERATURE)
    return result


def difference(ours: Callable[..., Tensor], peer: Callable[..., Tensor], labels: int) -> dict[str, float]:
    """Return how far apart the two losses are, and, in relation to its norm, the gradients."""
    embeddings, targets = make_embeddings(labels)
    values = [loss(embeddings, targets) for loss in (ours, peer)]
    gradients = [torch.autograd.grad(value, embeddings)[0].double() for value in values]
    distance = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    return {"loss_difference": abs(values[0].item() - values[1].item()), "gradient_difference": float(distance)}


def measure(labels: int, repeats: int) -> dict[str, Any]:
    """Return the medians of one size, and how far the results are apart."""
    embeddings, targets = make_embeddings(labels)
    size = targets.numel()
    losses = {"ours": our_loss(size)}
    peer = peer_loss(size)
    if peer is not None:
        losses["peer"] = peer

    def step_of(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            embeddings.grad = None
            loss(embeddings, targets).backward()

        return step

    steps: Steps = {name: step_of(loss) for name, loss in losses.items()}
    times = {name: median(runs) * 1e3 for name, runs in interleave(steps, repeats).items()}
    result: dict[str, Any] = {"rows": size, "positives": labels, "peer_gib": size**3 * PEER_BYTES_PER_TRIPLE / 2**30}
    result |= {f"{name}_ms": times.get(name) for name in ("ours", "peer")}
    return result | (difference(losses["ours"], peer, labels) if peer is not None else {})


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
        lines.append(cells)
    limit = f"the peer's arrays at most {PEER_MOST_BYTES / 2**30:.0f} GiB"
    title = f"SmoothAPLoss, N embeddings rank all N, forward + backward, median; {limit}"
    header = ("N", "positives each", "ours ms", "peer ms", "peer / ours", "losses differ by", "gradients by")
    print_table(title, header, lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of each measurement (default: 3)")
    parser.add_argument("--out", type=Path, help=f"folder for retrieval.json (default: {RESULTS})")
    arguments = parser.parse_args()
    out = arguments.out or (None if arguments.quick else RESULTS)
    warnings.simplefilter("ignore")  # the peer's
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
