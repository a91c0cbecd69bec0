"""The losses as modules, their formulas as pure functions, and the sums of sigmoids under them."""

from ..kernels.sigmoid_sums import sigmoid_sums
from .binary_cross_entropy import BCEWithLogitsLoss
from .causal_lm import causal_lm_loss
from .combined import CombinedLoss
from .cross_entropy import CrossEntropyLoss
from .distributed_loss import DistributedLoss
from .focal import FocalLoss
from .hard_negative_cross_entropy import HardNegativeCrossEntropyLoss, hard_negative_cross_entropy
from .info_nce import InfoNCELoss
from .ndcg import NDCGLoss
from .pauc_at_budget import pauc_at_budget
from .pauc_at_budget_loss import PAUCAtBudgetLoss
from .pool import LossWithClasses, LossWithClassesAndStats, LossWithStats, PerClass, Pool
from .ranking import RankingLoss
from .recall_at_quantile import RecallAtQuantileLoss, recall_at_quantile
from .retrieval import RetrievalSmoothAPLoss, retrieval_smooth_ap
from .sigmoid_focal import SigmoidFocalLoss, sigmoid_focal
from .smooth_ap import SmoothAPLoss, smooth_ap
from .softmax_focal import SoftmaxFocalLoss, softmax_focal
from .sup_con import SupConLoss
from .warmup import LossWarmupWrapper

__all__ = [
    "BCEWithLogitsLoss",
    "CombinedLoss",
    "CrossEntropyLoss",
    "DistributedLoss",
    "FocalLoss",
    "HardNegativeCrossEntropyLoss",
    "InfoNCELoss",
    "LossWarmupWrapper",
    "LossWithClasses",
    "LossWithClassesAndStats",
    "LossWithStats",
    "NDCGLoss",
    "PAUCAtBudgetLoss",
    "PerClass",
    "Pool",
    "RankingLoss",
    "RecallAtQuantileLoss",
    "RetrievalSmoothAPLoss",
    "SigmoidFocalLoss",
    "SmoothAPLoss",
    "SoftmaxFocalLoss",
    "SupConLoss",
    "causal_lm_loss",
    "hard_negative_cross_entropy",
    "pauc_at_budget",
    "recall_at_quantile",
    "retrieval_smooth_ap",
    "sigmoid_focal",
    "sigmoid_sums",
    "smooth_ap",
    "softmax_focal",
]
