"""Where the checks run: the process group, of torchrun or of a single process, and this rank's device."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Site(NamedTuple):
    """The rank, the group and the device on which a check runs."""

    rank: int
    world_size: int
    backend: str
    device: torch.device
    dtype: torch.dtype  # float64, or float32 on devices without float64
    tolerance: float  # relative, for gradients in that dtype

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return ``model`` under DDP on this device."""
        return DistributedDataParallel(model)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def draw(self, seed: int, *shape: int) -> Tensor:
        """Return random numbers, drawn on the CPU, that are the same on every rank."""
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return numbers.to(self.dtype).to(self.device)

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()


@contextmanager
def open_site(backend: str | None, device: str | None, timeout: float) -> Iterator[Site]:
    """Join the process group that the environment describes (one process without torchrun), and leave it afterwards.

    Args:
        backend: a backend of torch.distributed; None for the default of the device.
        device: a type of device; None for the accelerator if there is one, else the CPU.
        timeout: seconds after which a collective fails if a rank does not join it.
    """
    place = _find_device(device)
    backend = backend or dist.get_default_backend_for_device(place)
    limit = timedelta(seconds=timeout)
    store, rank, world_size = dist.HashStore(), 0, 1
    if "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    is_wide = place.type != "mps"
    dtype, tolerance = (torch.float64, 1e-12) if is_wide else (torch.float32, 2e-6)
    try:
        yield Site(rank, world_size, dist.get_backend(), place, dtype, tolerance)
        _wait_for_all(store, world_size)
    finally:
        dist.destroy_process_group()


def _wait_for_all(store: dist.Store, world_size: int) -> None:
    """Wait until every rank has finished its last collective: gloo kills a process whose peer leaves earlier.

    A barrier would not do, because it is a collective too: over a slow network one rank finishes it before another. The
    wait ends with the timeout if a rank is lost.
    """
    if store.add("fullrank/done", 1) == world_size:
        store.set("fullrank/all done", "")
    with contextlib.suppress(dist.DistStoreError):
        store.wait(["fullrank/all done"])


def _find_device(kind: str | None) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = kind or (found.type if found is not None else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def describe(site: Site, version: str) -> dict[str, Any]:
    """Return versions, sizes and devices of all ranks: one value where they are equal, all values where they differ."""
    own = {
        "fullrank": version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": site.backend,
        "device": _name(site.device),
    }
    everyone = site.gather((own, socket.gethostname()))
    facts = {key: _one_or_all([held[key] for held, _ in everyone]) for key in own}
    return {**facts, "world size": site.world_size, "hosts": len({host for _, host in everyone})}


def _name(device: torch.device) -> str:
    properties: Callable[..., Any] | None = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if properties is None else f"{device.type} ({properties(device)})"


def _one_or_all(values: list[str]) -> str:
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else "DIFFERENT: " + ", ".join(distinct)
