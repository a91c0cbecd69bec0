"""What the integrations look for in a training: warm-up schedules, and losses whose queue is spread over the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..losses import LossWarmupWrapper
from ..losses.queued_loss import QueuedLoss
from ..queues.sharded_queue import ShardedQueue


def find_schedules(module: object) -> list[LossWarmupWrapper]:
    """Return the warm-up schedules in ``module``, including itself; an empty list if it is not a module."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return [found for found in modules if isinstance(found, LossWarmupWrapper)]


def sharded_losses(module: nn.Module) -> Iterator[tuple[str, QueuedLoss, ShardedQueue]]:
    """Yield the name, the loss and the queue of each loss in ``module`` with ``pool="sharded"``."""
    for name, loss in module.named_modules(remove_duplicate=False):  # a state has a loss under each of its names
        if isinstance(loss, QueuedLoss) and isinstance(loss.queue, ShardedQueue):
            yield name, loss, loss.queue
