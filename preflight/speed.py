"""How long a gather takes on this cluster: its latency and its bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from ..distributed.gather import all_gather_no_grad
from .checks import NeedsRanks
from .site import Site

Step = Callable[[], object]
_REPEATS = 10
_MEBIBYTE = 2**20
_MAX_SIZE = 64  # MiB per rank
_MAX_SECONDS = 2.0  # for all repeats together, so that the check stays short on a slow network


def latency(site: Site) -> str:
    """Time a gather of one row: header, rows and checks."""
    return f"{_gather_seconds(site, 4) * 1e6:.0f} us for one row"


def bandwidth(site: Site) -> str:
    """Time a gather of as many rows as fit into two seconds."""
    seconds = _gather_seconds(site, _MEBIBYTE)
    size = min(_MAX_SIZE, max(1, int(_MAX_SECONDS / _REPEATS / seconds)))
    received = (site.world_size - 1) * size * _MEBIBYTE
    rate = received / _gather_seconds(site, size * _MEBIBYTE)
    return f"{rate / 1e9:.3g} GB/s received by each rank, {size} MiB from each"


def _gather_seconds(site: Site, num_bytes: int) -> float:
    if site.world_size == 1:
        raise NeedsRanks("nothing travels in one process: start with torchrun")
    rows = torch.zeros(num_bytes // 4, 1, device=site.device)
    return seconds_together(site, lambda: all_gather_no_grad(rows))


def seconds_together(site: Site, step: Step) -> float:
    """Return the median time of ``step``, which may communicate, on the slowest rank: ten runs, fewer if it is slow."""

    def seconds() -> float:
        start = clock(site.device)
        step()
        return clock(site.device) - start

    first = [seconds() for _ in range(2)]
    repeats = min(_REPEATS, max(2, int(_MAX_SECONDS / max(site.gather(first[1])))))
    return max(site.gather(median(seconds() for _ in range(repeats))))


def clock(device: torch.device) -> float:
    """Return the time in seconds at which ``device`` has finished its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()
