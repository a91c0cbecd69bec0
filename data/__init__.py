"""What feeds the losses: batches with enough positives on every rank, and loaders that end together."""

from .balanced_batches import BalancedBatchSampler
from .until_all_end import until_all_end

__all__ = ["BalancedBatchSampler", "until_all_end"]
