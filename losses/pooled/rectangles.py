"""Entries in rectangles: the rows of queries, and the positives of classes with their rivals."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import has_values


class Block(NamedTuple):
    """Queries of similar length, one per row of a rectangle."""

    queries: Tensor  # [q] their positions among all queries
    rows: Tensor  # [q, L] the row in each place; an arbitrary row in the padding
    present: Tensor  # [q, L] bool: the place holds a row

    def take(self, column: Tensor) -> Tensor:
        """Return the entries of ``column`` (M,) in their places, (q, L); 0 or False in the padding."""
        taken = column.index_select(0, self.rows.view(-1)).view(self.rows.shape)
        # Not a product: the padding holds entries of other queries, which may be NaN.
        return torch.where(self.present, taken, torch.zeros((), dtype=column.dtype, device=column.device))


def group_rows(indexes: Tensor) -> tuple[int, list[Block]]:
    """Return the number of queries, and their rows in blocks.

    Rows with the same index (M,) are one query; queries are numbered in sorted order. A block has queries of similar
    length: 1, 2, 3 to 4, 5 to 8 and so on. The shorter ones are padded to the longest, so there are at most twice as
    many places as rows, and 64 blocks. Waits for the device three times, however many queries there are.
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
        blocks.append(Block(queries, rows, present))
    return distinct.numel(), blocks


def list_both(
    scores: Tensor, numerator: Tensor, share: Tensor, rivals: Tensor, flat: Tensor | None
) -> tuple[tuple[Tensor | None, Tensor, Tensor], tuple[Tensor | None, Tensor], int | None]:
    """Return the scores of both groups, those of the numerator with their share, and the first of the ``flat``.

    In (C, K) the entries of a class come first, then padding; K is the largest number of entries of any class. A mask
    says which are which, None without padding. All numbers are read at once, so the device is waited for once. Where
    values cannot be read, as while compiling, masks (C, M) are returned with all scores.
    """
    if scores.shape[0] == 0 or not has_values(numerator):
        return (numerator, scores, share), (rivals, scores), None
    counts = [mask.sum(dim=1) for mask in (numerator, rivals)]  # [C] each
    numbers = torch.stack([count.max() for count in counts] + ([] if flat is None else [flat.any()]))
    (*sizes, is_flat) = numbers.tolist() if flat is not None else (*numbers.tolist(), 0)
    first = int(flat.nonzero()[0, 0]) if flat is not None and is_flat else None
    if scores.shape[0] == 1:
        both = torch.cat([numerator[0], rivals[0]])
        rows = torch.nonzero_static(both, size=sum(sizes))[:, 0].remainder_(max(1, scores.shape[1]))
        queries, points = scores.index_select(1, rows).split(sizes, dim=1)
        return (None, queries, share.index_select(1, rows[: sizes[0]])), (None, points), first
    (index, mask), (of_rivals, inside) = (_places(*group) for group in zip((numerator, rivals), counts, sizes))
    return (mask, scores.gather(1, index), share.gather(1, index)), (inside, scores.gather(1, of_rivals)), first


def _places(mask: Tensor, count: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return where the entries of a mask (C, M) are, (C, width) with padding, and which of these are no padding."""
    slot = torch.where(mask, mask.cumsum(dim=1) - 1, width)
    rows = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    index = rows.new_zeros(mask.shape[0], width + 1).scatter_(1, slot, rows)[:, :width]
    return index, torch.arange(width, device=mask.device)[None] < count[:, None]
