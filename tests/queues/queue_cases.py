"""What the worker processes run for the tests of the queue's state."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import fullrank


def make_loss(gather: bool | None = None) -> fullrank.SmoothAPLoss:
    """Return a loss whose pool is drawn, so that queue, temperature and draws all matter."""
    return fullrank.SmoothAPLoss(
        num_classes=1, queue_size=40, temperature=0.4, max_pool_size=30, gather_distributed=gather
    )


def step(loss: fullrank.SmoothAPLoss, index: int, rank: int, world_size: int) -> float:
    """Return the loss of the same global batch of 24 rows, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(index)
    logits = torch.randn(24, 1, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 2, (24,), generator=generator)
    loss.temperature = 0.4 / (index + 1)
    rows = slice(24 * rank // world_size, 24 * (rank + 1) // world_size)
    return loss(logits[rows], targets[rows]).item()


def save_after(rank: int, steps: int, path: str) -> list[float]:
    """Take steps, save on rank 0 after ``steps``, go on; return the losses after the save."""
    loss, world_size = make_loss(), dist.get_world_size()
    for index in range(steps):
        step(loss, index, rank, world_size)
    if rank == 0:
        torch.save(loss.state_dict(), path)
    return [step(loss, index, rank, world_size) for index in range(steps, steps + 4)]


def resume(rank: int, steps: int, path: str) -> list[float]:
    """Load what :func:`save_after` saved and take the steps after it."""
    loss = make_loss()
    loss.load_state_dict(torch.load(path, weights_only=True))
    return [step(loss, index, rank, dist.get_world_size()) for index in range(steps, steps + 4)]


def checkpoint_round_trip(rank: int, folder: str) -> list[Any]:
    """Save with torch.distributed.checkpoint, load into a fresh loss; return whether it goes on alike."""
    import torch.distributed.checkpoint as dcp

    loss, world_size = make_loss(), dist.get_world_size()
    for index in range(3):
        step(loss, index, rank, world_size)
    dcp.save({"loss": loss.state_dict()}, checkpoint_id=folder)
    fresh = make_loss()
    state = {"loss": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    fresh.load_state_dict(state["loss"])
    return [step(loss, 3, rank, world_size), step(fresh, 3, rank, world_size), len(fresh.queue)]
