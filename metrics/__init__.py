"""The exact metrics for which the losses are surrogates, as torchmetrics metrics."""

from .embeddings import EmbeddingAveragePrecision, EmbeddingPrecision, EmbeddingRecall, EmbeddingReciprocalRank
from .pauc_at_budget import PAUCAtBudget
from .queries import QueryNDCG, QueryRecall, QueryReciprocalRank
from .recall_at_quantile import RecallAtQuantile
from .review_curve import ReviewCurve

__all__ = [
    "EmbeddingAveragePrecision",
    "EmbeddingPrecision",
    "EmbeddingRecall",
    "EmbeddingReciprocalRank",
    "PAUCAtBudget",
    "QueryNDCG",
    "QueryRecall",
    "QueryReciprocalRank",
    "RecallAtQuantile",
    "ReviewCurve",
]
