"""The exact metrics for which the losses are surrogates, as torchmetrics metrics."""

from .embeddings import EmbeddingAveragePrecision, EmbeddingRecall
from .pauc_at_budget import PAUCAtBudget
from .recall_at_quantile import RecallAtQuantile
from .review_curve import ReviewCurve

__all__ = ["EmbeddingAveragePrecision", "EmbeddingRecall", "PAUCAtBudget", "RecallAtQuantile", "ReviewCurve"]
