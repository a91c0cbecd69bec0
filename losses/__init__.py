"""The losses as modules, their formulas as pure functions, and the sums of sigmoids under them."""

from ..kernels.sigmoid_sums import sigmoid_sums
from .base import DistributedLoss
from .composed.combined import CombinedLoss
from .composed.warmup import LossWarmupWrapper
from .embeddings.info_nce import InfoNCELoss
from .embeddings.retrieval import RetrievalSmoothAPLoss, retrieval_smooth_ap
from .embeddings.row_loss import Block, RowLoss
from .embeddings.siglip import SigLIPLoss
from .embeddings.sup_con import SupConLoss
from .pooled.base import RankingLoss
from .pooled.ndcg import NDCGLoss
from .pooled.pauc_at_budget import PAUCAtBudgetLoss, pauc_at_budget
from .pooled.pool import LossWithClasses, LossWithClassesAndStats, LossWithStats, PerClass, Pool
from .pooled.recall_at_quantile import RecallAtQuantileLoss, recall_at_quantile
from .pooled.smooth_ap import SmoothAPLoss, smooth_ap
from .summed.base import SummedLoss
from .summed.causal_lm import causal_lm_loss
from .summed.cross_entropy import BCEWithLogitsLoss, CrossEntropyLoss
from .summed.log_probs import token_log_probs
from .summed.sigmoid_focal import SigmoidFocalLoss, sigmoid_focal
from .summed.softmax_focal import SoftmaxFocalLoss, softmax_focal

__all__ = [
    "BCEWithLogitsLoss",
    "Block",
    "CombinedLoss",
    "CrossEntropyLoss",
    "DistributedLoss",
    "SummedLoss",
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
    "RowLoss",
    "SigLIPLoss",
    "SigmoidFocalLoss",
    "SmoothAPLoss",
    "SoftmaxFocalLoss",
    "SupConLoss",
    "causal_lm_loss",
    "pauc_at_budget",
    "recall_at_quantile",
    "retrieval_smooth_ap",
    "sigmoid_focal",
    "sigmoid_sums",
    "smooth_ap",
    "softmax_focal",
    "token_log_probs",
]
