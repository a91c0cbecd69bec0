"""What feeds the losses: batches with enough positives or pairs on every rank, and loaders that end together."""

from .balanced_batches import BalancedBatchSampler
from .m_per_class import MPerClassSampler
from .until_all_end import until_all_end

__all__ = ["BalancedBatchSampler", "MPerClassSampler", "until_all_end"]
