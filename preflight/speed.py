"""How long things take on this cluster: steps on a device, and a gather, by its latency and its bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
from torch.utils.benchmark import Timer

from ..distributed.gather import all_gather_no_grad
from .checks import NeedsRanks
from .site import Site, synchronize

Step = Callable[[], object]
_REPEATS = 10
_MEBIBYTE = 2**20
_MOST = 64  # MiB per rank
_SECONDS = 2.0  # for all repeats together, so that the check stays short on a slow network
_SHORTEST = 0.02  # seconds, the least that one repetition measures: a shorter step is run several times


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
    if site.world_size == 1:
        raise NeedsRanks("nothing travels in one process: start with torchrun")
    rows = torch.zeros(num_bytes // 4, 1, device=site.device)
    return seconds_together(site, lambda: all_gather_no_grad(rows))


def seconds_together(site: Site, step: Step) -> float:
    """Return the median time of ``step``, which may communicate, on the slowest rank: ten runs, fewer if it is slow."""
    first = [_seconds(site.device, step) for _ in range(2)]
    repeats = min(_REPEATS, max(2, int(_SECONDS / max(site.gather(first[1])))))
    return max(site.gather(median(_seconds(site.device, step) for _ in range(repeats))))


def _seconds(device: torch.device, step: Step) -> float:
    start = clock(device)
    step()
    return clock(device) - start


def interleave(steps: Mapping[str, Step], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Return ``repeats`` times in seconds of each step. The steps take turns; each first runs once unmeasured.

    A step must not communicate: how often it runs depends on its time in this process.
    """
    threads = torch.get_num_threads()  # a Timer uses one thread by default
    now = partial(clock, device)
    timers = {
        name: Timer("step()", globals={"step": step}, timer=now, num_threads=threads) for name, step in steps.items()
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, timer in timers.items():
            times[name].append(timer.blocked_autorange(min_run_time=_SHORTEST).median)
    return times


def clock(device: torch.device) -> float:
    """Return the time in seconds at which ``device`` has finished its work."""
    synchronize(device)
    return time.perf_counter()
