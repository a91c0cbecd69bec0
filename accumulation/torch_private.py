"""Every use of an interface of torch that is private, by the code for micro-batches: buffers, outputs, pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def tensors_with_graph(outputs: object) -> list[Tensor]:
    """Return the plain tensors with a graph in what a module returns; FSDP2 looks for them in the same way."""
    return [leaf for leaf in tree_leaves(outputs) if type(leaf) is Tensor and leaf.requires_grad]


def buffer_slots(model: nn.Module) -> list[dict[str, Tensor | None]]:
    """Return the dicts in which the modules of ``model`` store their own buffers; writing to one changes its module."""
    return [module._buffers for module in model.modules()]


def stages_of_schedule(schedule: Any) -> list[Any]:
    """Return the stages of a pipeline schedule on this rank; none for another object."""
    return list(getattr(schedule, "_stages", None) or [stage for stage in [getattr(schedule, "_stage", None)] if stage])


def num_micro_batches_of_schedule(schedule: Any) -> int:
    return int(schedule._n_microbatches)


@contextmanager
def loss_of_schedule(schedule: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let a pipeline schedule use ``change(loss_fn)`` inside, and not divide gradients by the micro-batches."""
    kept = schedule._loss_fn, schedule.scale_grads
    schedule._loss_fn, schedule.scale_grads = change(kept[0]), False
    try:
        yield
    finally:
        schedule._loss_fn, schedule.scale_grads = kept
