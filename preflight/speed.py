"""The time of a gather on this cluster: the latency of a small one and the bandwidth of a large one."""

from __future__ import annotations

import statistics
import time

import torch

from ..distributed.gather import all_gather_no_grad
from .checks import NeedsRanks
from .site import Site

_REPEATS = 10
_MEBIBYTE = 2**20
_MOST = 64  # MiB per rank
_SECONDS = 2.0  # for all repeats together, so that the check stays short on a slow network


def latency(site: Site) -> str:
    """Time a gather of one row: two collectives and the checks."""
    return f"{_gather_seconds(site, 4) * 1e6:.0f} us for one row"


def bandwidth(site: Site) -> str:
    """Time a gather of as many rows as fit into two seconds."""
    quick = _gather_seconds(site, _MEBIBYTE)
    size = min(_MOST, max(1, int(_SECONDS / _REPEATS / quick)))
    received = (site.world_size - 1) * size * _MEBIBYTE
    rate = received / _gather_seconds(site, size * _MEBIBYTE)
    return f"{rate / 1e9:.3g} GB/s received by each rank, {size} MiB from each"


def _gather_seconds(site: Site, num_bytes: int) -> float:
    """Return the median time of a gather of ``num_bytes`` per rank, on the slowest rank."""
    if site.world_size == 1:
        raise NeedsRanks("nothing travels in one process: start with torchrun")
    rows = torch.zeros(num_bytes // 4, 1, device=site.device)
    times = []
    for _ in range(_REPEATS + 2):
        site.synchronize()
        start = time.perf_counter()
        all_gather_no_grad(rows)
        site.synchronize()
        times.append(time.perf_counter() - start)
    return max(site.gather(statistics.median(times[2:])))
