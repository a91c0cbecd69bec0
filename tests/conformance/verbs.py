"""The verbs of the package as the tests call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batches import Batch, sum_loss
from subjects import by_hand
from torch import Tensor, nn

from fullrank import accumulate, count_valid_tokens


def run_window(model: nn.Module, batches: Sequence[Batch], **options: Any) -> Tensor:
    """Accumulate one window and return its mean loss."""
    options.setdefault("group", by_hand(model))
    for step, batch in accumulate(model, batches, options.pop("count", count_valid_tokens), **options):
        step.backward(sum_loss(model, batch))
    return step.mean_loss()
