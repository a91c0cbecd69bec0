"""A loss that is 0 whatever it was, and whose backward gives zeros whatever the graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import Node


def zero_loss(loss: Tensor) -> Tensor:
    """Return 0, connected to the graph of ``loss``, with exactly zero gradients for all that it reaches.

    Equal to ``loss * 0`` where everything is finite. A mean over no rows is 0 / 0, and its backward makes NaN of a
    gradient of 0 too. A backward there must be all the same, for the collectives that the wrapper runs in it. So
    whatever a node of the graph returns is replaced by zeros.
    """
    seen: set[Node] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        # Not the leaves: they return nothing, and DDP keeps them, with their hooks, for good.
        if node is not None and node not in seen and node.next_functions:
            seen.add(node)
            node.register_hook(_zeros_like)
            pending += [following for following, _ in node.next_functions]
    return torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0


def _zeros_like(grads: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)
