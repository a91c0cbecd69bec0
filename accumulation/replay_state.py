"""What two passes over the same micro-batches must share: buffers, the state of torch's generators, and the scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .torch_private import buffer_slots


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore every buffer of ``model`` at the end: the same tensor objects in all modules, with the same content."""
    saved = []
    for slots in buffer_slots(model):
        copies = []
        for tensor in slots.values():
            # A forward cannot change expanded memory or inference tensors in place.
            if tensor is None or tensor.is_inference():
                continue
            is_strided = tensor.layout is torch.strided
            if not (is_strided and any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride()))):
                copies.append((tensor, tensor.detach().clone()))
        saved.append((slots, dict(slots), copies))
    try:
        yield
    finally:
        for slots, tensors, copies in saved:
            for tensor, copy in copies:
                # Through .data, which does not change the version: a graph that saved a buffer stays usable if the
                # forward did not change that buffer.
                tensor.data.copy_(copy)
            slots.clear()
            slots.update(tensors)


class RngState(NamedTuple):
    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]


def accelerators_in_use(model: nn.Module) -> tuple[torch.device, ...]:
    """Return the accelerator devices that a forward of ``model`` may draw random numbers on."""
    tensors = chain(model.parameters(), model.buffers())
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    # A forward with parameters that are offloaded to the CPU runs on the current device.
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        assert current is not None
        # Reading the state of a device that is not in use would create a context on it.
        if getattr(torch.get_device_module(current), "is_initialized", lambda: True)():
            devices.add(torch.device(current.type, torch.accelerator.current_device_index()))
    return tuple(sorted(devices, key=str))


def save_rng(devices: Sequence[torch.device]) -> RngState:
    """Return the state of the generators of the CPU and of ``devices``, without waiting for a device."""
    states = ((device, torch.get_device_module(device).get_rng_state(device)) for device in devices)
    return RngState(torch.get_rng_state(), tuple(states))


def restore_rng(state: RngState) -> None:
    torch.set_rng_state(state.cpu)
    for device, device_state in state.devices:
        torch.get_device_module(device).set_rng_state(device_state, device)


def compare_scores(first: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest |first - again| and the largest finite |first|, 0 without one; scalars on their device.

    Equal infinities and two NaN differ by 0, other infinities and NaN by infinity.
    """
    dtype = torch.promote_types(first.dtype, torch.float32)
    if first.numel() == 0:
        return first.new_zeros((), dtype=dtype), first.new_zeros((), dtype=dtype)
    same = (first == again) | (first.isnan() & again.isnan())
    difference = (first.to(dtype) - again.to(dtype)).abs().masked_fill(same, 0.0)
    largest = first.to(dtype).abs().masked_fill(~first.isfinite(), 0.0)
    return difference.nan_to_num(nan=math.inf, posinf=math.inf).amax(), largest.amax()
