"""See a loss that has back-propagated inside itself, as chunked cross-entropies do, without the factor m / N."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..distributed.header import DeviceCheck
from ..errors import Words, expected
from ..gradients.all_reduce_grads import distinct_entries
from ..gradients.parameters import elements_of
from ..gradients.torch_private import fsdp_groups
from ..kernels.torch_private import version_of


class Gradients:
    """The gradients of a model at one moment, without a reference to their memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._versions = {place: (id(grad), version_of(grad)) for place, grad in gradients_of(model)}

    def check_added(self) -> DeviceCheck | None:
        """Return the check that backward passes have added no element that is not 0 since then; None if none ran.

        A backward makes a gradient where there was none, or changes the same tensor; other tensors do not count, as
        when DDP rearranges its buckets.
        """
        added = []
        for place, grad in gradients_of(self._model):
            before = self._versions.get(place)
            if before is None or (before[0] == id(grad) and before[1] != version_of(grad)):
                added.append(grad)

        def error(number: int) -> Exception:
            what = "gradients that have not changed since the loop began"
            got = Words(f"{number} changed elements before step.backward(loss)")
            fix = (
                "The loss has probably called backward itself, and that part would not be divided by the count: "
                "multiply it by step.factor, and pass its sum to step.record in place of step.backward. What must stay "
                "undivided, such as a penalty, calls backward only after step.backward(loss)."
            )
            return RuntimeError(expected("loss of micro-batch 0", what, got, fix))

        return check_zero(added, error)


def check_zero(grads: Sequence[Tensor], error: Callable[[int], Exception]) -> DeviceCheck | None:
    """Return the check that ``grads`` are 0; ``error`` takes the number of elements that are not. None without any."""
    with torch.no_grad():
        counts = [elements_of(grad).count_nonzero() for grad in grads]  # counts NaN too
    if not counts:
        return None
    number = torch.stack([count.to(counts[0].device) for count in counts]).sum()
    return DeviceCheck(number > 0, lambda: error(int(number)))


def gradients_of(model: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Yield each gradient of ``model``, also those that FSDP2 has not reduced, with a number for its place."""
    for _, parameter in distinct_entries(model):
        if parameter.grad is not None:
            yield id(parameter), parameter.grad
    for group in fsdp_groups(model):
        yield from group.unreduced().items()
