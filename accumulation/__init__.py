"""One loss over several micro-batches: the gradient of the whole window, in the memory of one micro-batch."""

from .accumulate import accumulate
from .deferred_mean import DeferredMean
from .pooled_backward import pooled_backward
from .window import count_valid_tokens, windows

__all__ = [
    "DeferredMean",
    "accumulate",
    "count_valid_tokens",
    "pooled_backward",
    "windows",
]
