"""Where the checks run: the process group, of torchrun or of a single process, and this rank's device."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Import it before the group exists. DDP would import it later, and its functions would keep the group as a default
# argument. The threads of gloo then outlive the group, and can abort the process when Python exits.
import torch.distributed.nn.functional
from torch import Tensor

from ..kernels import native
from ..kernels.registration import full_products


class Place(NamedTuple):
    host: str
    current: int  # index of the current device; 0 on the CPU
    visible: int  # number of devices that the process sees; 0: it computes on the CPU
    uuid: str  # "" if the device has none


class Site(NamedTuple):
    """The rank, the group and the device on which a check runs."""

    rank: int
    world_size: int
    backend: str
    device: torch.device
    dtype: torch.dtype  # float64, or float32 on devices without float64
    tolerance: float  # relative, for gradients in that dtype
    places: tuple[Place, ...] = ()  # of all ranks
    facts: tuple[dict[str, Any], ...] = ()  # about the machines of all ranks

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def draw(self, seed: int, *shape: int) -> Tensor:
        """Return random numbers, drawn on the CPU, that are the same on every rank."""
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return numbers.to(self.dtype).to(self.device)


@contextmanager
def open_site(backend: str | None, device: str | None, timeout: float) -> Iterator[Site]:
    """Join the process group of the environment, or of one process without torchrun, and leave it afterwards."""
    own_device = _find_device(device)
    backend = backend or dist.get_default_backend_for_device(own_device)
    limit = timedelta(seconds=timeout)
    store, rank, world_size = dist.HashStore(), 0, 1
    if "WORLD_SIZE" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    has_float64 = own_device.type != "mps"
    dtype, tolerance = (torch.float64, 1e-12) if has_float64 else (torch.float32, 2e-6)
    try:
        index, visible, uuid = 0, 0, ""
        if own_device.type != "cpu":
            index, visible = torch.accelerator.current_device_index(), torch.accelerator.device_count()
            module: Any = torch.get_device_module(own_device)
            if hasattr(module, "get_device_properties"):
                uuid = str(getattr(module.get_device_properties(index), "uuid", ""))
        place = Place(socket.gethostname(), index, visible, uuid)
        # Exchange them through the store: two ranks on one device could not even start a collective of NCCL.
        store.set(f"fullrank/{rank}", json.dumps([place, facts_of(own_device)]))
        stored = [json.loads(store.get(f"fullrank/{other}")) for other in range(world_size)]
        places, facts = tuple(Place(*values[0]) for values in stored), tuple(values[1] for values in stored)
        yield Site(rank, world_size, dist.get_backend(), own_device, dtype, tolerance, places, facts)
        # Wait until every rank has finished its last collective: gloo kills a process whose peer leaves earlier. A
        # barrier is not enough, because it is a collective too: over a slow network one rank finishes it before
        # another. If a rank is lost, the wait ends with the timeout.
        if store.add("fullrank/done", 1) == world_size:
            store.set("fullrank/all done", "")
        with contextlib.suppress(dist.DistStoreError):
            store.wait(["fullrank/all done"])
    finally:
        dist.destroy_process_group()


def _find_device(name: str | None) -> torch.device:
    """Return the device of this rank and make it the current one, as a training must."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(name or (accelerator.type if accelerator is not None else "cpu"))
    if device.type == "cpu":
        return torch.device("cpu")
    index = device.index
    if index is None:  # a launcher may make only one device visible to each process, whatever its LOCAL_RANK
        index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.accelerator.device_count())
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def describe(site: Site, version: str) -> dict[str, Any]:
    """Return versions, settings and devices of all ranks: one value where they are equal, all where they differ."""
    facts = {}
    for key in site.facts[0]:
        distinct = list(dict.fromkeys(rank_facts[key] for rank_facts in site.facts))
        facts[key] = distinct[0] if len(distinct) == 1 else "DIFFERENT: " + ", ".join(distinct)
    hosts = len({place.host for place in site.places})
    return {"fullrank": version, **facts, "backend": site.backend, "world size": site.world_size, "hosts": hosts}


def facts_of(device: torch.device) -> dict[str, str]:
    toolkits = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    module: Any = torch.get_device_module(device)
    has_name = hasattr(module, "get_device_name")
    has_nccl = dist.is_nccl_available() and hasattr(module, "nccl")
    deterministic = "warns" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"
    return {
        "torch": torch.__version__,
        "built for": ", ".join(f"{name} {version}" for name, version in toolkits.items() if version) or "cpu",
        "collectives": "nccl " + ".".join(map(str, module.nccl.version())) if has_nccl else "-",
        "python": platform.python_version(),
        "kernels": native.KERNELS,
        "device": f"{device.type} ({module.get_device_name(device)})" if has_name else device.type,
        "threads": str(torch.get_num_threads()),
        "float32 products": products(device),
        "deterministic": deterministic if torch.are_deterministic_algorithms_enabled() else "off",
    }


def products(device: torch.device) -> str:
    """Return whether float32 products are full, or rounded to TF32 or bfloat16 by a setting or a library."""
    try:
        if not _rounds_products(device):
            return "full"
        with full_products():
            is_rounded = _rounds_products(device)
            return "ROUNDED, also inside the losses" if is_rounded else "rounded, full inside the losses"
    except RuntimeError as error:  # raised by the device
        return f"not known: {' '.join(str(error).split())[:80]}"


def _rounds_products(device: torch.device) -> bool:
    numbers = torch.full((256, 256), 1 + 2.0**-13, device=device)  # TF32 keeps 10 bits after the point, bfloat16 7
    return bool((numbers @ torch.eye(256, device=device) != numbers).any())
