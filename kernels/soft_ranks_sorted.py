"""Smooth-AP from the neighbours of each positive, for scores so thin that bins would be empty.

Beyond ``CUTOFF`` temperatures a sigmoid is 0 or 1 to the last bit of float64. In sorted order the rows in between are
one slice per positive, and the rows above it are a count. O(M log M + pairs within the cutoff) time.

Where all rows are farther apart than that, the whole gradient is smaller than what the cutoff leaves out. Such pairs
are few, so they are summed as far as the dtype of the scores can hold their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .node_tables import CUTOFF
from .sigmoid_sums import chunk_size

_FAR = {torch.float32: 104.0, torch.float64: 745.0}  # temperatures: exp(-104) and exp(-745) are all but 0
_FEW = 16  # pairs per row that may be summed beyond the cutoff


def smooth_ap_sorted(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    positives: tuple[Tensor, Tensor],
    share: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) float64 and its gradient (C, M).

    Args:
        scores: (C, M), finite.
        positive: (C, M) bool.
        member: (C, M) bool, None for all True.
        positives: class and row indices of the positives, (P,) each.
        share: (P,) float64, the weight of each positive in the mean of its class.
        temperature: > 0.
    """
    num_classes, num_rows = scores.shape
    ordered, order = scores.contiguous().sort(dim=1)
    is_positive = positive.gather(1, order)
    is_negative = ~is_positive if member is None else member.gather(1, order) & ~is_positive
    class_of, row_of = positives
    x = scores[class_of, row_of].double()
    low, high = _window(ordered, class_of, x, _FAR[scores.dtype] * temperature)
    if int((high - low).sum()) > _FEW * scores.numel():
        low, high = _window(ordered, class_of, x, CUTOFF * temperature)
    above = torch.stack([_count_from(mask, class_of, high) for mask in (is_negative, is_positive)])  # [2, P]
    loss = torch.zeros(num_classes, dtype=torch.float64, device=scores.device)
    gradient = torch.zeros(num_classes * num_rows, dtype=torch.float64, device=scores.device)
    flat = ordered.reshape(-1)
    for part, owner, place in _pairs(low + class_of * num_rows, high - low):
        own = x[part][owner]
        difference = (flat[place].double() - own) / temperature
        is_self = order.reshape(-1)[place] == row_of[part][owner]
        kinds = torch.stack(
            [is_negative.reshape(-1)[place], is_positive.reshape(-1)[place] & ~is_self]
        ).double()  # [2, n]
        sigmoid = torch.sigmoid(difference)
        sums = above[:, part].clone().index_add_(1, owner, sigmoid * kinds)  # [2, p]
        n, r = sums[0], sums[1] + 1.0
        loss.index_add_(0, class_of[part], share[part] * n / (r + n))
        factor = share[part] / (r + n) ** 2 / temperature
        pull = (r * factor)[owner] * kinds[0] - (n * factor)[owner] * kinds[1]
        pull = pull * sigmoid * torch.sigmoid(-difference)
        gradient.index_add_(0, order.reshape(-1)[place] + (class_of[part] * num_rows)[owner], pull)
        gradient.index_add_(
            0, (class_of * num_rows + row_of)[part], -pull.new_zeros(n.numel()).index_add_(0, owner, pull)
        )
    return loss, gradient.view(num_classes, num_rows).to(scores.dtype)


def _window(ordered: Tensor, class_of: Tensor, x: Tensor, reach: float) -> tuple[Tensor, Tensor]:
    """Return for each positive the first row within reach, and the first beyond it, in sorted order."""
    low, high = torch.empty_like(class_of), torch.empty_like(class_of)
    wide = ordered.double()
    for first in range(0, x.numel(), 2**20):
        part = slice(first, first + 2**20)
        # One binary search for all classes: the classes stand one after another, so search rows of a 2-D tensor.
        present, inverse = class_of[part].unique(return_inverse=True)
        counts = torch.bincount(inverse, minlength=present.numel())
        width = int(counts.max())
        slot = torch.arange(inverse.numel(), device=x.device) - (counts.cumsum(0) - counts)[inverse]
        table = x.new_zeros(present.numel(), width)
        table[inverse, slot] = x[part]
        low[part] = torch.searchsorted(wide[present], table - reach)[inverse, slot]
        high[part] = torch.searchsorted(wide[present], table + reach, right=True)[inverse, slot]
    return low, high


def _count_from(mask: Tensor, class_of: Tensor, first: Tensor) -> Tensor:
    """Return (P,) float64 how many rows of the positive's class have ``mask`` from ``first`` on."""
    before = torch.nn.functional.pad(mask.to(torch.int64).cumsum(dim=1), (1, 0))  # [C, M + 1]
    return (before[class_of, -1] - before[class_of, first]).double()


def _pairs(start: Tensor, count: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of positives, and for each pair of one with a neighbour: whose it is in the slice, and its place."""
    limit = chunk_size(start, 1)
    ends = count.cumsum(0)
    first = 0
    while first < count.numel():
        base = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(torch.searchsorted(ends, base + limit, right=True)))
        part = slice(first, last)
        owner = torch.repeat_interleave(torch.arange(last - first, device=start.device), count[part])
        within = torch.arange(owner.numel(), device=start.device) - (ends[part] - count[part] - base)[owner]
        yield part, owner, start[part][owner] + within
        first = last
