"""One loss over several micro-batches: the gradient of the whole window, in the memory of one micro-batch."""

from .accumulate import accumulate
from .deferred_mean import DeferredMean
from .pipeline_mean import PipelineMean
from .pooled_backward import pooled_backward
from .step import Step
from .token_count import count_valid_tokens
from .window import windows

__all__ = ["DeferredMean", "PipelineMean", "Step", "accumulate", "count_valid_tokens", "pooled_backward", "windows"]
