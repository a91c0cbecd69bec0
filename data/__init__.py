"""What feeds the losses: batches with enough positives or pairs on every rank, each row of an
evaluation once, and loaders that end together."""

from .samplers import BalancedBatchSampler, MPerClassSampler, UnrepeatedDistributedSampler
from .until_all_end import until_all_end

__all__ = ["BalancedBatchSampler", "MPerClassSampler", "UnrepeatedDistributedSampler", "until_all_end"]
