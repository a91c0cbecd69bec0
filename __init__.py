"""Ranking losses that see the full batch: exact under data parallelism."""

from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

from .accumulation import DeferredMean, PipelineMean, accumulate, count_valid_tokens, pooled_backward, windows
from .distributed import all_gather_no_grad, all_gather_with_grad, gather_rows, global_mean, global_sum
from .errors import RankError
from .gradients import (
    all_reduce_grads_,
    clip_grad_norm_,
    discard_gradients_,
    maybe_no_sync,
    sequence_sync_group,
    sum_gradients_,
    total_grad_norm,
)
from .kernels.native import KERNELS
from .losses import (
    BCEWithLogitsLoss,
    CombinedLoss,
    CrossEntropyLoss,
    InfoNCELoss,
    LossWarmupWrapper,
    NDCGLoss,
    PAUCAtBudgetLoss,
    RecallAtQuantileLoss,
    RetrievalSmoothAPLoss,
    RowLoss,
    SigLIPLoss,
    SigmoidFocalLoss,
    SmoothAPLoss,
    SoftmaxFocalLoss,
    SupConLoss,
    causal_lm_loss,
    token_log_probs,
)
from .preflight import verify_step
from .queues import MemoryQueue

__version__ = "0.1.0"
__config__ = {"kernels": KERNELS}  # "native" where the extension was built, else "torch"


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage at its first use: torchmetrics is slow to import, and training does not need it."""
    if name in ("data", "integrations", "large", "metrics"):
        return import_module(f".{name}", __name__)
    names = {public.lower(): public for public in __all__}
    close = [f". Did you mean {names[lower]!r}?" for lower in get_close_matches(name.lower(), names, n=1, cutoff=0.7)]
    text = f"module {__name__!r} has no attribute {name!r}{''.join(close)}"
    raise AttributeError(text, name=name, obj=None)  # of the module Python would add a suggestion of its own


def __dir__() -> list[str]:
    """Return the public names: those of ``__all__``, the subpackages with further ones, and the version."""
    return [*__all__, "__config__", "__version__", "data", "integrations", "large", "losses", "metrics"]


__all__ = [
    "BCEWithLogitsLoss",
    "CombinedLoss",
    "CrossEntropyLoss",
    "DeferredMean",
    "InfoNCELoss",
    "LossWarmupWrapper",
    "MemoryQueue",
    "NDCGLoss",
    "PAUCAtBudgetLoss",
    "PipelineMean",
    "RankError",
    "RecallAtQuantileLoss",
    "RetrievalSmoothAPLoss",
    "RowLoss",
    "SigLIPLoss",
    "SigmoidFocalLoss",
    "SmoothAPLoss",
    "SoftmaxFocalLoss",
    "SupConLoss",
    "accumulate",
    "all_gather_no_grad",
    "all_gather_with_grad",
    "all_reduce_grads_",
    "causal_lm_loss",
    "clip_grad_norm_",
    "count_valid_tokens",
    "discard_gradients_",
    "gather_rows",
    "global_mean",
    "global_sum",
    "maybe_no_sync",
    "pooled_backward",
    "sequence_sync_group",
    "sum_gradients_",
    "token_log_probs",
    "total_grad_norm",
    "verify_step",
    "windows",
]
