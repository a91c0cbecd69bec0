"""The buffers of a model, kept from a forward that is not meant to count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.torch_private import broadcast_ddp_buffers, buffer_slots


class _Kept(NamedTuple):
    slots: dict[str, Tensor | None]  # the module's own
    found: dict[str, Tensor | None]  # the tensor objects in them
    contents: dict[str, Tensor]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Give every buffer of ``model`` its content back at the end; all modules hold the same tensor objects again."""
    kept = [_keep(buffer_slots(module)) for module in model.modules()]
    try:
        yield
    finally:
        for slots, found, contents in kept:
            for name, content in contents.items():
                # Through .data, which leaves the version alone: a graph that saved a buffer which the forward did not
                # touch stays usable.
                found[name].data.copy_(content)  # type: ignore[union-attr]
            slots.clear()
            slots.update(found)


def _keep(slots: dict[str, Tensor | None]) -> _Kept:
    found = dict(slots)
    present = {name: tensor for name, tensor in found.items() if tensor is not None}
    contents = {name: tensor.detach().clone() for name, tensor in present.items() if _is_writable(tensor)}
    return _Kept(slots, found, contents)


def _is_writable(tensor: Tensor) -> bool:
    """Return False for what no forward can change in place either: expanded memory, and tensors of inference mode."""
    is_expanded = tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride())
    )
    return not (is_expanded or tensor.is_inference())


@contextmanager
def buffers_broadcast_once(wrappers: list[DistributedDataParallel]) -> Iterator[None]:
    """Let DDP broadcast its buffers now instead of in the forwards inside, which then do not communicate.

    So both passes over a window start from the same buffers, the ranks may make different numbers of forwards, and one
    that fails in its forward leaves no other waiting in a broadcast. Collective, if DDP would have broadcast. A forward
    inside that reduces needs :func:`hold_broadcasts` in front of the next one.
    """
    for module in wrappers:
        broadcast_ddp_buffers(module)
    hold_broadcasts(wrappers)
    try:
        yield
    finally:
        for module in wrappers:
            module.require_forward_param_sync = True  # as DDP leaves it after a step that was reduced


def hold_broadcasts(wrappers: list[DistributedDataParallel]) -> None:
    """Let the next forward of DDP broadcast no buffers."""
    for module in wrappers:
        module.require_forward_param_sync = False
