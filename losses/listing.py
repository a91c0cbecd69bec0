"""The scores of positives and of their rivals, listed without the entries between them."""

from __future__ import annotations

import torch
from torch import Tensor

from .tensors import has_values


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
