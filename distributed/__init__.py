"""Moving rows and sums between ranks so that gradients equal those of one process."""

from .gather import all_gather_no_grad, all_gather_with_grad, gather_rows
from .global_mean import global_mean, global_sum

__all__ = [
    "all_gather_no_grad",
    "all_gather_with_grad",
    "gather_rows",
    "global_mean",
    "global_sum",
]
