"""The rows of queries of any lengths as a few rectangular blocks, on which formulas are vectorised."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def query_blocks(indexes: Tensor) -> tuple[int, list[QueryBlock]]:
    """Return the number of queries, and their rows in blocks.

    Rows with the same index (M,) are one query; queries are numbered in sorted order. A block has queries of similar
    length: 1, 2, 3 to 4, 5 to 8 and so on. The shorter ones are padded to the longest, so there are at most twice as
    many places as rows, and at most 64 blocks. Waits for the device three times, however many queries there are.
    """
    distinct, query = indexes.unique(return_inverse=True)
    count = torch.bincount(query, minlength=distinct.numel())
    order = query.argsort(stable=True)
    start = count.cumsum(0) - count
    # count - 1 has k binary digits where 2^(k-1) < count <= 2^k. float64 holds these integers exactly.
    digits = torch.frexp((count - 1).double()).exponent.to(torch.int64)
    widths = count.new_zeros(64).scatter_reduce_(0, digits, count, "amax").tolist()
    sizes = torch.bincount(digits, minlength=64).tolist()
    by_length = digits.argsort(stable=True).split(sizes)
    blocks = []
    for queries, width in zip(by_length, widths):
        if not width:
            continue
        place = torch.arange(width, device=indexes.device)
        present = place < count[queries][:, None]
        rows = order[(start[queries][:, None] + place).clamp_max_(order.numel() - 1)]
        blocks.append(QueryBlock(queries, rows, present))
    return distinct.numel(), blocks


class QueryBlock(NamedTuple):
    """Queries of similar length, one per row of a rectangle."""

    queries: Tensor  # [q] their positions among all queries
    rows: Tensor  # [q, L] the row in each place; an arbitrary row in the padding
    present: Tensor  # [q, L] bool: the place holds a row

    def take(self, column: Tensor) -> Tensor:
        """Return the entries of ``column`` (M,) in their places, (q, L); 0 or False in the padding."""
        entries = column.index_select(0, self.rows.view(-1)).view(self.rows.shape)
        # Not a product with the mask: the padding holds entries of other queries, which may be NaN.
        return torch.where(self.present, entries, torch.zeros((), dtype=column.dtype, device=column.device))
