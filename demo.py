"""``python -m fullrank.demo``: the gradient of a batch that is split over processes, by who ranks which rows.

The same 240 rows and the same small model under DistributedDataParallel, in float64 on the CPU. The true gradient is
that of one process with all rows. ``python -m fullrank.demo 8`` takes eight processes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import losses

ROWS = 240
TEMPERATURE = 0.1


def own_rows(scores: Tensor, targets: Tensor) -> Tensor:
    """Rank the rows of this process alone."""
    return losses.SmoothAPLoss(1, temperature=TEMPERATURE, gather_distributed=False)(scores, targets)


def by_hand(scores: Tensor, targets: Tensor) -> Tensor:
    """Rank all rows, of which only those of this process carry gradient: the usual gather."""
    gathered = [[torch.empty_like(own) for _ in range(dist.get_world_size())] for own in (scores, targets)]
    for rows, own in zip(gathered, (scores.detach(), targets)):
        dist.all_gather(rows, own)
    gathered[0][dist.get_rank()] = scores
    return own_rows(*map(torch.cat, gathered))


def ours(scores: Tensor, targets: Tensor) -> Tensor:
    """Rank all rows."""
    return losses.SmoothAPLoss(1, temperature=TEMPERATURE)(scores, targets)


WAYS = {"each its own rows": own_rows, "all rows, gathered by hand": by_hand, "all rows, fullrank": ours}


def main(rank: int, world_size: int, store: str) -> None:
    """Be one process, the first of which prints the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    targets = (torch.arange(ROWS) % 10 == 0).long()
    features = torch.randn(ROWS, 8, dtype=torch.float64) + 0.35 * targets[:, None]

    def gradient(loss: Tensor) -> Tensor:
        model.zero_grad()
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    true = gradient(own_rows(model(features), targets))
    if rank == 0:
        print(f"{'SmoothAPLoss on ' + str(world_size) + ' processes':28} share of the true gradient   error")
    wrapped = DistributedDataParallel(model)
    own = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    for name, way in WAYS.items():
        found = gradient(way(wrapped(features[own]), targets[own]))
        if rank == 0:
            share, error = found @ true / (true @ true), (found - true).norm() / true.norm()
            print(f"{name:28} {share:26.2f} {error:7.2f}", flush=True)
    del wrapped  # or it ends the group, holding the lock of the interpreter while it waits for a thread that needs it
    dist.barrier()  # gloo may abort a process that leaves while another still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fullrank.demo", description="The gradient of a split batch.")
    parser.add_argument("processes", type=int, nargs="?", default=2, choices=(2, 4, 8), help="2, 4 or 8 (default: 2)")
    world_size = parser.parse_args().processes
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (world_size, Path(folder, "store").as_uri()), nprocs=world_size)
