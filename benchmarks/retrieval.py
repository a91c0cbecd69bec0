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

import importlib.util
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from memory import STATUS, resident
from report import PEER_MOST_BYTES, Run, apart, interleave, print_records, progress, training_step
from torch import Tensor

import fullrank
from fullrank.losses import smooth_ap

PEER = "pytorch_metric_learning"
FEATURES = 64
TEMPERATURE = 0.01  # the default of both
DIFFERENCES = ("loss_difference", "gradient_difference")  # with the query included
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
    return dict(zip(DIFFERENCES, (abs(values[0].item() - values[1].item()), float(distance))))


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

    steps = {name: training_step(loss, embeddings, targets) for name, loss in losses.items()}
    times = {name: median(runs) * 1e3 for name, runs in interleave(steps, repeats).items()}
    result: dict[str, Any] = {"rows": size, "positives": labels, "peer_gib": size**3 * PEER_BYTES_PER_TRIPLE / 2**30}
    result |= {f"{name}_ms": times.get(name) for name in ("ours", "peer")}
    result["ours_peak_bytes"] = apart(peak, labels) if STATUS.exists() else None
    return result | (dict.fromkeys(DIFFERENCES) if peer is None else difference(peer, labels))


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "retrieval", repeats=3)
    options = script.start()
    warnings.simplefilter("ignore")  # warnings of the peer
    results = [measure(labels, options.repeats) for labels in progress(QUICK if options.quick else FULL)]
    limit = f"the peer, if it is installed, with at most {PEER_MOST_BYTES / 2**30:.0f} GiB of arrays"
    print_records(f"Smooth-AP, N x {FEATURES} embeddings rank all N, forward + backward, median; {limit}", results)
    script.write(retrieval=results)


if __name__ == "__main__":
    main()
