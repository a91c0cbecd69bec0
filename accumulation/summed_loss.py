"""What a loss must be so that it can be divided by a count: a sum by its graph, and not back-propagated before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.header import DeviceCheck
from ..distributed.torch_private import OF_POOL, OVER_RANKS, WEIGHTED_SUM, is_mean, nodes_of
from ..errors import Words, expected
from ..gradients.all_reduce_grads import distinct_entries
from ..gradients.parameters import elements_of
from ..gradients.torch_private import fsdp_groups
from ..kernels.torch_private import version_of

_HALF = torch.float16, torch.bfloat16

SUM_UP = 'Sum it up, as with reduction="sum"'


def named(what: str, *places: int | str) -> str:
    """Return how a message calls ``what``: of which micro-batch (an int), and of which of the losses by name."""
    for place in places:
        if place != "":
            what += f" of micro-batch {place}" if isinstance(place, int) else f" of {place!r}"
    return what


def not_a_sum(
    loss: Tensor, fix: str, *name: Any, over_ranks: bool = True, may_be_mean: bool = False
) -> ValueError | None:
    """Return the error for a loss that its graph shows to be a mean, or ``over_ranks`` of all ranks; None for a sum."""
    notes = set[str]().union(*map(attrgetter("metadata"), nodes_of(loss.grad_fn, through=WEIGHTED_SUM)))
    if over_ranks and OVER_RANKS in notes:  # adding it would count the rows of all ranks again
        what, got = "the sum over this rank's terms", "a loss over the rows of all ranks"
        fix = "Set gather_distributed=False and sum up; for a ranking loss over the whole window use pooled_backward."
    elif OF_POOL in notes:
        what = "the sum over its terms"
        got = "the mean of a loss that compares its rows, or weighs them by the numbers of their classes"
        fix = "Use pooled_backward, for the loss over the rows of the whole window."
    elif not may_be_mean and is_mean(loss):
        what, got = "the sum over its terms", "a mean"
    else:
        return None
    return ValueError(expected(named(*name), what, Words(got), fix))


def checked_sum(loss: Any, *name: Any) -> Tensor:
    """Return ``loss`` as a scalar, or raise TypeError or ValueError if it has no gradient; ``name`` as in `named`.

    In float32 for half precision: that would round m / N, and float16 ends at 65504.
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise TypeError(expected(named(*name), "a floating-point tensor", loss, "Pass the summed loss with its graph."))
    if loss.numel() != 1:
        raise ValueError(expected(named(*name), "one element", loss, "Use loss.sum(), the sum over the terms."))
    if not (loss.requires_grad and torch.is_grad_enabled()):
        fix = "Compute it with gradients enabled, and do not detach it. A model without trainable parameters has none."
        raise ValueError(expected(named(*name), "a loss with a graph", Words("one without"), fix))
    total = loss.float() if loss.dtype in _HALF else loss
    return total.reshape(()) if total.ndim else total


def sum_of(number: Tensor | float, loss: Any) -> Any:
    """Return the sum ``loss`` of ``number`` terms, as :func:`zero_loss` does if the host knows that there are none."""
    is_known = not isinstance(number, Tensor) or number.is_cpu
    return zero_loss(loss) if is_known and not number and isinstance(loss, Tensor) and loss.requires_grad else loss


def as_mean(total: float, number: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``total / number``, or 0 without terms, for losses of ``dtype``; float32 for half precision."""
    mean = total / number if number else 0.0
    return torch.full((), mean, dtype=torch.promote_types(dtype, torch.float32), device=device)


def zero_loss(loss: Tensor, others: Sequence[Tensor] = ()) -> Tensor:
    """Return 0, connected to the graph of ``loss``, with exactly zero gradients for all of it but ``others``.

    ``loss * 0`` is not enough: a mean over no rows is 0 / 0, and its backward turns even a gradient of 0 into NaN. That
    backward must still run, because the wrapper communicates in it, so hooks make the gradients of each node zeros.
    """
    for node in nodes_of(loss.grad_fn, known=nodes_of(*[other.grad_fn for other in others])):
        # Leaves return nothing, and DDP keeps them alive: a hook on a leaf would never go away.
        if node.next_functions:
            node.register_hook(lambda grads, _: tuple(None if g is None else torch.zeros_like(g) for g in grads))
    return torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0


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
