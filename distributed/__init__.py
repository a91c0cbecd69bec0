"""Moving rows and sums between ranks so that gradients equal those of one process."""

from .accumulation import accumulate
from .all_reduce_grads import all_reduce_grads_, sequence_sync_group
from .deferred_mean import DeferredMean
from .gather import all_gather_no_grad, all_gather_with_grad, gather_rows
from .grad_norm import clip_grad_norm_, total_grad_norm
from .gradient_sync import discard_gradients_, maybe_no_sync, sum_gradients_
from .normalize import global_mean
from .replay import pooled_backward
from .window_counts import count_valid_tokens, windows

__all__ = [
    "DeferredMean",
    "accumulate",
    "all_gather_no_grad",
    "all_gather_with_grad",
    "all_reduce_grads_",
    "clip_grad_norm_",
    "count_valid_tokens",
    "discard_gradients_",
    "gather_rows",
    "global_mean",
    "maybe_no_sync",
    "pooled_backward",
    "sequence_sync_group",
    "sum_gradients_",
    "total_grad_norm",
    "windows",
]
