"""What feeds the losses: batches with enough positives or pairs on every rank, each row of an
evaluation once, and loaders that end together."""

from .balanced_batches import BalancedBatchSampler
from .m_per_class import MPerClassSampler
from .unrepeated import UnrepeatedDistributedSampler
from .until_all_end import until_all_end

__all__ = ["BalancedBatchSampler", "MPerClassSampler", "UnrepeatedDistributedSampler", "until_all_end"]
