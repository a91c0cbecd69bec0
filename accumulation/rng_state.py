"""Where torch's random generators stand, so that a forward can be repeated with the same masks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn


class RngState(NamedTuple):
    """The state of the CPU's generator and of the generators of accelerator devices."""

    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]


def accelerators_in_use(model: nn.Module) -> tuple[torch.device, ...]:
    """Return the accelerator devices that a forward of ``model`` may draw random numbers on."""
    held = (tensor.device for tensor in chain(model.parameters(), model.buffers()))
    devices = {device for device in held if device.type not in ("cpu", "meta")}
    # Parameters that are offloaded to the CPU are computed with on the current device.
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        assert current is not None
        # Asking a device that nobody has used for its state would create a context on it.
        if getattr(torch.get_device_module(current), "is_initialized", lambda: True)():
            devices.add(torch.device(current.type, torch.accelerator.current_device_index()))
    return tuple(sorted(devices, key=str))


def save_rng(devices: Sequence[torch.device]) -> RngState:
    """Return the state of the generators of the CPU and of ``devices``; none of them is waited for."""
    states = ((device, torch.get_device_module(device).get_rng_state(device)) for device in devices)
    return RngState(torch.get_rng_state(), tuple(states))


def restore_rng(state: RngState) -> None:
    """Put the generators back to ``state``."""
    torch.set_rng_state(state.cpu)
    for device, held in state.devices:
        torch.get_device_module(device).set_rng_state(held, device)
