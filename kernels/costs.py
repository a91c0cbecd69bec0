"""What the steps of the kernels cost on a kind of device: the one table of constants that were measured.

The constants decide how the same sums are computed, so a wrong one costs time and changes a result only by rounding.
``python benchmarks/costs.py --device cuda --write`` measures them and puts an entry behind ``TABLE``. Keep a value only
if it is off by a factor of 2 or more: each was measured alone, and smaller differences are within its noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Costs(NamedTuple):
    """The costs of one kind of device; seconds are for forward and backward together."""

    pair: float  # seconds: one pair of scores, summed directly
    native_pair: float  # seconds: the same in C, where that was built
    native_class: float  # seconds: the bins of one more class, at the least, that C then spares
    fixed: float  # seconds: bins, for any number of rows
    row: float  # seconds: one row (of one column of weights), placed in its bin and read from it
    coarse_bin: float  # seconds: one coarse bin (of one class and column of weights)
    pairs_at_once: int  # pairs in one chunk of a direct sum: few stay in a cache, many keep an accelerator busy
    rows_at_once: int  # rows whose positions and bin numbers are computed together, to stay in the cache
    bins_at_once: int  # coarse bins that interact in one matrix product, 2.5 to 5 KiB each, to stay in the cache
    tables_at_once: int  # coarse bins of all classes that are summed together, 6 to 25 KiB each: bounds the memory
    lanes: int  # parts of the rows of a single class, each summed into a table of its own
    interleaved: bool  # the parts take turns row by row, else each is a run of rows, which one thread sums
    many_rows: int  # rows of a class from which narrower fine bins pay: larger tables, fewer moments for each row
    plain_pairs: int  # pairs of all rows, of all classes, up to which Smooth-AP sums them all without reading a value
    similarities_at_once: int  # entries of a matrix of similarities that are held at a time
    reads_freely: bool  # the host reads a value without waiting, so that listing the positives pays

    def pairs_are_faster(self, num_pairs: int, num_rows: int, num_bins: int = 0) -> bool:
        """Return whether summing the pairs directly is faster than bins for the rows, with ``num_bins`` coarse bins."""
        return num_pairs * self.pair < self.fixed + self.row * num_rows + self.coarse_bin * num_bins

    def most_native_pairs(self, num_classes: int, num_rows: int) -> int:
        """Return up to how many pairs a direct sum in C is faster than bins for the rows of all classes."""
        bins = self.fixed + self.native_class * max(0, num_classes - 1) + self.row * num_rows
        return int(bins / self.native_pair)


_CPU = Costs(
    pair=4e-9,
    native_pair=3.5e-10,
    native_class=5e-4,
    fixed=1.3e-3,
    row=13e-9,
    coarse_bin=4e-6,
    pairs_at_once=2**16,
    rows_at_once=2**18,
    bins_at_once=2**8,
    tables_at_once=2**14,
    lanes=4,
    interleaved=False,
    many_rows=600_000,
    plain_pairs=0,
    similarities_at_once=2**20,
    reads_freely=True,
)

# What stands for every type of device that is not listed. The seconds were measured on an NVIDIA H200; its other values
# are those in use, or within a factor of 4 in steps whose time is the host's. Chunks fill an accelerator and bound the
# memory, at some 64 bytes for each of 2**24 or 2**25 entries. plain_pairs follows from the promise that a graph of up
# to 4,096 rows reads no value. Where the number of positives is known the H200 takes, by all pairs and by those of the
# positives, 229 and 294 us for 1,448 rows, 303 and 299 us for 2,048, 451 and 310 us for 2,896; hence a quarter there.
# The threads of a warp add neighbouring rows at the same time, so lanes take turns: ties would share one address.
_ACCELERATOR = Costs(
    pair=5e-11,
    native_pair=math.inf,
    native_class=0.0,
    fixed=2.3e-3,
    row=2e-10,
    coarse_bin=3.3e-7,
    pairs_at_once=2**25,
    rows_at_once=2**24,
    bins_at_once=2**18,
    tables_at_once=2**17,
    lanes=32,
    interleaved=True,
    many_rows=0,
    plain_pairs=2**24,
    similarities_at_once=2**25,
    reads_freely=False,
)

# By device type. The values of "cpu" were measured on two cores.
TABLE: dict[str, Costs] = {"cpu": _CPU, "accelerator": _ACCELERATOR}


def costs_of(device: torch.device) -> Costs:
    return TABLE.get(device.type, TABLE["accelerator"])
