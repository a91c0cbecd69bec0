"""Gradients: when they are reduced, over which ranks, and how large they may be."""

from .all_reduce_grads import all_reduce_grads_, sequence_sync_group
from .grad_norm import clip_grad_norm_, total_grad_norm
from .when_reduced import discard_gradients_, maybe_no_sync, sum_gradients_

__all__ = [
    "all_reduce_grads_",
    "clip_grad_norm_",
    "discard_gradients_",
    "maybe_no_sync",
    "sequence_sync_group",
    "sum_gradients_",
    "total_grad_norm",
]
