"""Several parts of the rows in one process: each is computed in a thread, and meets the others where numbers add up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Meet = Callable[[Tensor], Tensor]


def together(calls: Sequence[Callable[[Meet, Meet], T]]) -> tuple[list[T], int]:
    """Return what ``calls`` return, of which each is given a sum and a maximum over all, and the number of rounds."""
    held = [torch.empty(0)] * len(calls)
    barrier, rounds = threading.Barrier(len(calls), timeout=60), 0

    def meet(number: int, reduce: Callable[..., Tensor], values: Tensor) -> Tensor:
        nonlocal rounds
        held[number] = values
        if barrier.wait() == 0:
            rounds += 1
        result = reduce(torch.stack(held), dim=0)  # which raises unless all have one shape
        barrier.wait()
        return result

    def run(number: int) -> T:
        try:
            return calls[number](partial(meet, number, torch.sum), partial(meet, number, torch.amax))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(calls)) as threads:
        return [*threads.map(run, range(len(calls)))], rounds
