"""Is the gradient of a step that of one process? torchrun --nproc-per-node 2 verify_step.py tries two steps.

The first gathers as many programs do: without gradient, the own rows put back. The second uses this package.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fullrank import SmoothAPLoss, verify_step
from fullrank.losses import smooth_ap


def gather_by_hand(tensor: Tensor) -> Tensor:
    """Return the rows of all processes, of which the own ones have a gradient."""
    parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach())
    parts[dist.get_rank()] = tensor
    return torch.cat(parts)


def by_hand(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Forward and backward, without the optimizer."""
    features, targets = batch
    loss = smooth_ap(gather_by_hand(model(features)), gather_by_hand(targets), temperature=0.3)
    loss.backward()
    return loss


def with_fullrank(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The same with a loss that gathers."""
    features, targets = batch
    loss = loss_fn(model(features), targets)
    loss.backward()
    return loss


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loss_fn = SmoothAPLoss(num_classes=1, temperature=0.3)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    torch.manual_seed(1 + dist.get_rank())
    batch = torch.randn(64, 8), (torch.rand(64) < 0.2).long()  # of this process
    for step in (by_hand, with_fullrank):
        report = verify_step(step, model, batch)
        if dist.get_rank() == 0:
            print(f"{step.__name__}\n{report}\n")
    dist.destroy_process_group()
