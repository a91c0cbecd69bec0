"""Ranking losses that see the full batch: exact under data parallelism."""

from importlib import import_module
from types import ModuleType

from .distributed import all_gather_no_grad, all_gather_with_grad, gather_rows, global_mean
from .losses import (
    LossWarmupWrapper,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
)
from .queues import MemoryQueue

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Import ``fullrank.metrics`` at its first use: torchmetrics takes a while, and training needs no metric."""
    if name == "metrics":
        return import_module(".metrics", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LossWarmupWrapper",
    "MemoryQueue",
    "PAUCAtBudgetLoss",
    "RecallAtQuantileLoss",
    "SigmoidFocalLoss",
    "SmoothAPLoss",
    "SoftmaxFocalLoss",
    "all_gather_no_grad",
    "all_gather_with_grad",
    "gather_rows",
    "global_mean",
]
