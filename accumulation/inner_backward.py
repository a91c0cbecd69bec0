"""See a loss that has back-propagated inside itself, as chunked cross-entropies do.

``step.backward(loss)`` multiplies the gradient of ``loss`` by m / N. What a loss has back-propagated before, while it
was computed, is already in the gradients, without that factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..distributed.torch_private import fsdp_groups
from ..gradients.all_reduce_grads import distinct_entries
from ..gradients.parameters import local_values
from ..kernels.torch_private import version_of

_NUM_WINDOWS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class Gradients:
    """The gradients of a model at one moment, without a reference to their memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._versions = {place: (id(grad), version_of(grad)) for place, grad in _gradients(model)}

    def count_added(self) -> Tensor | None:
        """Return how many elements that are not 0 backward passes have added since then; None if there was none.

        A backward makes a gradient where there was none, or changes the same tensor. Nothing else counts: gradients
        that were set to None or to 0, and other tensors in the place of gradients, as when DDP rearranges its buckets.
        """
        added = []
        for place, grad in _gradients(self._model):
            before = self._versions.get(place)
            if before is None or (before[0] == id(grad) and before[1] != version_of(grad)):
                added.append(grad)
        with torch.no_grad():
            counts = [local_values(grad).count_nonzero() for grad in added]  # counts NaN too
        return torch.stack([count.to(counts[0].device) for count in counts]).sum() if counts else None


def gradients_to_watch(model: nn.Module) -> Gradients | None:
    """Return the gradients at the start of a window, in windows 1, 2, 4, 8, ... of a model; None in the others.

    A loss that back-propagates inside itself does so from the first window on, and the other windows cost nothing.
    """
    number = _NUM_WINDOWS[model] = _NUM_WINDOWS.get(model, 0) + 1
    return Gradients(model) if number & (number - 1) == 0 else None


def _gradients(model: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Yield each gradient of ``model``, also those that FSDP2 has not reduced, with a number for its place."""
    for _, parameter in distinct_entries(model):
        if parameter.grad is not None:
            yield id(parameter), parameter.grad
    for group in fsdp_groups(model):
        yield from group.unreduced().items()
