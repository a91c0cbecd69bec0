"""Losses over pools that no rank holds: each rank keeps its rows, and class-wise sums travel in their place.

:class:`ShardedLoss` wraps a loss of :mod:`fullrank.losses`, which knows nothing of it.
"""

from .sharded_loss import ShardedLoss

__all__ = ["ShardedLoss"]
