"""Smooth-AP pair by pair: directly over all pairs, or over the sorted neighbours of each positive.

The direct sums follow the definition, in chunks of positives, and are the reference for the other forms. With u_i the
share of positive i: dloss/ds_ij = w_j u_i r_i / (r_i + n_i)^2 for a negative j, and -w_j u_i n_i / (r_i + n_i)^2 for a
positive j; ds_ij/dx_j = s (1 - s) / tau = -ds_ij/dx_i. w is the weight of a row where rows are compared.

The sorted sums are for scores so far apart that most bins would be empty. ``CUTOFF`` temperatures away from a positive
a sigmoid is 0 or 1 to the last bit of float64. In sorted order the rows within the cutoff of a positive are one slice,
and the rows above that slice only need a count: O(M log M + pairs within the cutoff) time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..costs import costs_of
from ..node_tables import CUTOFF, suffix_sums
from ..pairs import Problem, chunk_size, power_of_two

_FAR = {torch.float32: 104.0, torch.float64: 745.0}  # temperatures: exp(-104) and exp(-745) are almost 0 in the dtype
_FEW = 16  # pairs per row that may be summed beyond the cutoff


def smooth_ap_direct(problem: Problem, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) float64 and its gradient (C, M), empty unless ``with_grad``."""
    scores, positive, member, class_of, row_of, share, temperature, key_weight = problem
    own_weight = None if key_weight is None else problem.at_positives(key_weight).to(scores.dtype)
    loss = share.new_zeros(scores.shape[0])
    gradient = torch.zeros_like(scores) if with_grad else scores.new_empty(0)
    step = chunk_size(scores, scores.shape[1])
    ones = positive.to(scores.dtype)  # on the host a product with bools takes five times as long

    def of_classes(rows: Tensor, c: Tensor) -> Tensor:
        return rows if len(rows) == 1 else rows.index_select(0, c)

    for first in range(0, share.shape[0], step):
        c, row = class_of[first : first + step], row_of[first : first + step]
        difference = (of_classes(scores, c) - scores[c, row][:, None]).div_(temperature)  # [p, M]
        if member is not None:
            difference.masked_fill_(~of_classes(member, c), -math.inf)
        difference.scatter_(1, row[:, None], -math.inf)  # a positive is not compared with itself
        sigmoid = difference.sigmoid()
        is_positive, mass = of_classes(ones, c), key_weight
        if key_weight is not None and key_weight.ndim == 2:
            mass = of_classes(key_weight, c)
        above = sigmoid if mass is None else sigmoid * mass
        among_positives = above * is_positive
        own = 1 if own_weight is None else own_weight[first : first + step]
        n, r = (above - among_positives).sum(dim=1), among_positives.sum(dim=1) + own
        total, weight = r + n, share[first : first + step]
        loss.index_add_(0, c, weight * (n / total))
        if with_grad:
            unit = None
            if mass is not None:  # the square of a sum of weights may be out of range
                unit = power_of_two(total)
                r, n, total = r / unit, n / unit, total / unit
            factor = weight.to(n.dtype) / total / (total * temperature)
            factor = factor if unit is None else factor / unit
            slope = difference.neg_().sigmoid_().mul_(sigmoid)  # exact in both tails
            slope *= torch.lerp((r * factor)[:, None], -(n * factor)[:, None], is_positive)
            slope = slope if mass is None else slope.mul_(mass)
            gradient.index_add_(0, c, slope)
            gradient.index_put_((c, row), -slope.sum(dim=1), accumulate=True)
    return loss, gradient


def smooth_ap_sorted(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) float64 and its gradient (C, M); all scores are finite.

    If no two rows are within the cutoff of each other, the cutoff would drop the whole gradient. If there are few pairs
    beyond it, they are summed too, as far as the dtype of the scores can represent their gradient.
    """
    scores, positive, member, class_of, row_of, share, temperature, key_weight = problem
    num_classes, num_rows = scores.shape
    ordered, order = scores.contiguous().sort(dim=1)
    is_positive = positive.gather(1, order)
    is_negative = ~is_positive if member is None else member.gather(1, order) & ~is_positive
    x = scores[class_of, row_of].double()
    low, high = _window(ordered, class_of, x, _FAR[scores.dtype] * temperature)
    if int((high - low).sum()) > _FEW * scores.numel():
        low, high = _window(ordered, class_of, x, CUTOFF * temperature)
    masses = torch.stack([is_negative, is_positive]).double()  # [2, C, M]
    own_weight = None if key_weight is None else problem.at_positives(key_weight)
    if key_weight is not None:
        masses *= key_weight.expand_as(scores).gather(1, order)
    # Summed from the top, so that small weights there are not lost in a difference of large sums.
    above = F.pad(suffix_sums(masses), (0, 1))[:, class_of, high]  # [2, P]
    masses = masses.flatten(1)
    loss = torch.zeros(num_classes, dtype=torch.float64, device=scores.device)
    gradient = torch.zeros(num_classes * num_rows, dtype=torch.float64, device=scores.device)
    flat = ordered.reshape(-1)
    for part, owner, place in _pairs(low + class_of * num_rows, high - low):
        difference = (flat[place].double() - x[part][owner]) / temperature
        is_self = order.reshape(-1)[place] == row_of[part][owner]
        kinds = masses[:, place].masked_fill_(is_self, 0.0)  # [2, n]
        sigmoid = torch.sigmoid(difference)
        sums = above[:, part].clone().index_add_(1, owner, sigmoid * kinds)  # [2, p]
        n, r = sums[0], sums[1] + (1.0 if own_weight is None else own_weight[part])
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
    """Return the first row within ``reach`` of each positive, and the first beyond it, in sorted order, (P,) each."""
    low, high = torch.empty_like(class_of), torch.empty_like(class_of)
    ordered = ordered.double()
    step = costs_of(x.device).searches_at_once
    for first in range(0, x.numel(), step):
        part = slice(first, first + step)
        # One binary search serves all classes: each class with positives is one row of a 2-D search.
        present, inverse = class_of[part].unique(return_inverse=True)
        counts = torch.bincount(inverse, minlength=present.numel())
        width = int(counts.max())
        slot = torch.arange(inverse.numel(), device=x.device) - (counts.cumsum(0) - counts)[inverse]
        table = x.new_zeros(present.numel(), width)
        table[inverse, slot] = x[part]
        low[part] = torch.searchsorted(ordered[present], table - reach)[inverse, slot]
        high[part] = torch.searchsorted(ordered[present], table + reach, right=True)[inverse, slot]
    return low, high


def _pairs(start: Tensor, count: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of positives, and for each of their pairs the positive, as an index in the slice, and the place.

    Each positive has pairs with the ``count`` (P,) places from ``start`` (P,) on.
    """
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
