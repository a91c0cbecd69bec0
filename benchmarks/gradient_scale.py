"""Which way to gather is off by W: the gradient of each known way, compared with one process that holds all rows.

Usage: python benchmarks/gradient_scale.py [--worlds 2 4 8] [--quick] [--out FOLDER]

A small network scores rows, a learned scale (a temperature used after the gather) multiplies the gathered scores, and
Smooth-AP is the loss. Everything is in float64 under DistributedDataParallel, which averages gradients over the W
processes. Every convention is implemented here in a few lines; docs/gradient-scale.md says, with sources, which
projects use it. Let g be the gradient of the encoder and g0 that of one process. The table shows the share of g0 that
is in g, <g, g0> / <g0, g0>, and the relative error |g - g0| / |g0|. For the scale and the logged loss it shows the
ratio. The logged loss is the mean over the ranks.

Smooth-AP is a mean over positives, so a rank may also rank only its own positives against all gathered rows, as
contrastive losses do with their anchors ("own rows"). Such a mean of means needs the same number of positives on every
rank, which equal shards have. Uneven shards are marked; their sizes are as 1 to 2 to ... to W. Takes a minute.
Writes gradient_scale.json; a quick run (only W = 2) writes only with ``--out``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from report import Record, Run, on_ranks, print_records
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fullrank
from fullrank.losses import smooth_ap

ROWS, EVERY = 240, 10  # every tenth row is positive
TEMPERATURE = 0.1
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # own scores (N, 1), own targets (N,), the log of the scale


def loss_of_pool(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    """Return the loss of one process that holds these rows."""
    result: Tensor = smooth_ap(scores * log_scale.exp(), targets, TEMPERATURE)
    return result


def loss_of_own_rows(scores: Tensor, targets: Tensor, pool: Tensor, log_scale: Tensor) -> Tensor:
    """Return one minus the mean precision at each of this rank's positives, ranked against ``pool``."""
    pool_targets = fullrank.all_gather_no_grad(targets)
    first = sum(_sizes(len(targets))[: dist.get_rank()])
    own = torch.arange(first, first + len(targets))[targets == 1]  # the places of this rank's positives in the pool
    above = torch.sigmoid((pool[:, 0] - scores[targets == 1]) * log_scale.exp() / TEMPERATURE)  # [P, M]
    above = above.scatter(1, own[:, None], 1.0)  # a row counts itself once
    return 1 - (above[:, pool_targets == 1].sum(dim=1) / above.sum(dim=1)).mean()


def _sizes(rows: int) -> list[int]:
    return fullrank.all_gather_no_grad(torch.tensor([rows])).tolist()


def gather_detached(x: Tensor) -> list[Tensor]:
    """Return the rows of each rank, as constants; equal shards."""
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x.detach())
    return rows


def gather_swapped(x: Tensor) -> Tensor:
    """Return all rows; only this rank's rows carry gradient."""
    rows = gather_detached(x)
    rows[dist.get_rank()] = x
    return torch.cat(rows)


def gather_summed(x: Tensor) -> Tensor:
    """Return all rows; the backward adds the gradients of these rows over all ranks (torch's own)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated in torch 2.13, but widely used
        return torch.cat(torch.distributed.nn.functional.all_gather(x))


def no_gather(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return loss_of_pool(scores, targets, log_scale)


def swapped(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return loss_of_pool(gather_swapped(scores), fullrank.all_gather_no_grad(targets), log_scale)


def swapped_times_world(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return swapped(scores, targets, log_scale) * dist.get_world_size()


def summed(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return loss_of_pool(gather_summed(scores), fullrank.all_gather_no_grad(targets), log_scale)


def own_rows_summed(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return loss_of_own_rows(scores, targets, gather_summed(scores), log_scale)


def own_rows_summed_times_world(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return own_rows_summed(scores, targets, log_scale) * dist.get_world_size()


def own_rows_reduce_scatter(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    pool = fullrank.all_gather_with_grad(
        scores, backward="reduce_scatter"
    )  # like own_rows_summed, for shards of any size
    return loss_of_own_rows(scores, targets, pool, log_scale)


def own_rows_swapped(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return loss_of_own_rows(scores, targets, gather_swapped(scores), log_scale)


def own_rows_swapped_times_world(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return own_rows_swapped(scores, targets, log_scale) * dist.get_world_size()


def own_rows_detached(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return loss_of_own_rows(scores, targets, torch.cat(gather_detached(scores)), log_scale)


def ours(scores: Tensor, targets: Tensor, log_scale: Tensor) -> Tensor:
    return loss_of_pool(*fullrank.gather_rows(scores, targets), log_scale)  # type: ignore[arg-type]


class Convention(NamedTuple):
    """One way of gathering; ``key`` names it in the results."""

    key: str
    label: str
    loss: Loss
    uneven: bool = False


CONVENTIONS = (
    Convention("no_gather", "no gather", no_gather),
    Convention("swapped", "detached gather, own rows put back", swapped),
    Convention("swapped_w", "the same, loss times W", swapped_times_world),
    Convention("summed", "gather whose backward sums over ranks", summed),
    Convention("own_summed", "own rows against that gather", own_rows_summed),
    Convention("own_summed_w", "the same, loss times W", own_rows_summed_times_world),
    Convention("own_swapped", "own rows against a detached gather, own put back", own_rows_swapped),
    Convention("own_swapped_w", "the same, loss times W", own_rows_swapped_times_world),
    Convention("own_detached", "own rows against a detached gather", own_rows_detached),
    Convention("fullrank", "fullrank.gather_rows", ours),
    Convention("no_gather_uneven", "no gather, uneven shards", no_gather, True),
    Convention(
        "own_summed_uneven", "own rows against the summing gather, uneven shards", own_rows_reduce_scatter, True
    ),
    Convention("fullrank_uneven", "fullrank.gather_rows, uneven shards", ours, True),
)


class Model(nn.Module):
    """An encoder, and a scale that acts on the scores after they have been gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, features: Tensor, targets: Tensor, loss: Loss) -> Tensor:
        return loss(self.encoder(features), targets, self.log_scale)


def make_model() -> Model:
    """Return the same model in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model().double()


def make_rows() -> tuple[Tensor, Tensor]:
    """Return features (ROWS, 8) in float64 and targets; positives are spread evenly and score one higher on average."""
    generator = torch.Generator().manual_seed(1)
    targets = (torch.arange(ROWS) % EVERY == 0).long()
    features = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64) + targets[:, None] / math.sqrt(8)
    return features, targets


def shard(rank: int, world_size: int, uneven: bool) -> slice:
    """Return the rows of ``rank``: equal parts, or parts with sizes as 1 to 2 to ... to W."""
    parts = range(1, world_size + 1) if uneven else [1] * world_size
    ends = [ROWS * end // sum(parts) for end in accumulate(parts, initial=0)]
    return slice(ends[rank], ends[rank + 1])


def gradients(model: Model, loss: Tensor) -> dict[str, Tensor]:
    """Return the loss, and the gradients of the encoder and of the scale."""
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    encoder = torch.cat([parameter.grad.flatten() for parameter in model.encoder.parameters()])
    return {"encoder": encoder, "scale": model.log_scale.grad.clone(), "loss": loss.detach()}


def compare(found: dict[str, Tensor], true: dict[str, Tensor]) -> dict[str, float]:
    """Return the ratios to the true values and the relative error of the encoder's gradient."""
    distance = (found["encoder"] - true["encoder"]).norm() / true["encoder"].norm()
    return {
        "encoder": float(found["encoder"] @ true["encoder"] / (true["encoder"] @ true["encoder"])),
        "error": float(distance),
        "scale": float(found["scale"] / true["scale"]),
        "loss": float(found["loss"] / true["loss"]),
    }


def measure(rank: int, world_size: int) -> list[Record]:
    """Return how every convention compares with one process, on one rank of ``world_size``."""
    features, targets = make_rows()
    alone = make_model()
    true = gradients(alone, alone(features, targets, loss_of_pool))
    model = make_model()
    wrapped = DistributedDataParallel(model)
    results = []
    for convention in CONVENTIONS:
        own = shard(rank, world_size, convention.uneven)
        found = gradients(model, wrapped(features[own], targets[own], convention.loss))
        logged = fullrank.all_gather_no_grad(found["loss"][None]).mean()
        named = {"label": convention.label, "world_size": world_size, "key": convention.key}
        results.append(named | compare(found | {"loss": logged}, true))
    return results


def main() -> None:
    """Measure, print, write."""
    script = Run(__doc__, "gradient_scale")
    script.parser.add_argument(
        "--worlds", type=int, nargs="+", default=[2, 4, 8], help="numbers of processes (default: 2 4 8)"
    )
    options = script.start()
    worlds = [2] if options.quick else options.worlds
    if any(world_size < 2 or ROWS % (world_size * EVERY) for world_size in worlds):
        script.parser.error(f"--worlds: expected numbers >= 2 that divide {ROWS // EVERY}, got {worlds}")
    results = []
    for world_size in worlds:
        results += (found := on_ranks(world_size, measure, world_size)[0])
        print_records("Gradients averaged by DDP, relative to one process with all rows", found)
    script.write(gradient_scale=results)


if __name__ == "__main__":
    main()
