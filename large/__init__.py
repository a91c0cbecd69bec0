"""Losses over pools that are not gathered: each rank keeps its rows, and sums over the rows of each class travel.

:class:`ShardedLoss` wraps a loss of :mod:`fullrank.losses`, which does not depend on it.
"""

from .sharded_loss import ShardedLoss

__all__ = ["ShardedLoss"]
