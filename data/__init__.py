"""What feeds the losses: batches with enough positives on every rank."""

from .balanced_batches import BalancedBatchSampler

__all__ = ["BalancedBatchSampler"]
