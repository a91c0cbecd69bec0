"""Smooth-AP pair by pair: directly over all pairs, or over the sorted neighbours of the positives.

The direct sums follow the definition, in chunks of positives, and are the reference for the other forms. With u_i the
share of positive i: dloss/ds_ij = w_j u_i r_i / (r_i + n_i)^2 for a negative j, and -w_j u_i n_i / (r_i + n_i)^2 for a
positive j; ds_ij/dx_j = s (1 - s) / tau = -ds_ij/dx_i. w is the weight of a row where rows are compared.

The sorted sums are for many scores so far apart that most bins would be empty. ``CUTOFF`` temperatures away from a
positive a sigmoid is 0 or 1 to the last bit of float64. In sorted order the rows within the cutoff of some neighbouring
positives are one slice, over which the direct sums run, and the rows above that slice only need a count.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..node_tables import CUTOFF, suffix_sums
from ..pairs import Problem, chunk_size, power_of_two

_FAR = {torch.float32: 104.0, torch.float64: 745.0}  # temperatures: exp(-104) and exp(-745) are almost 0 in the dtype
_FEW = 16  # pairs per row that may be summed beyond the cutoff


def smooth_ap_direct(problem: Problem, with_grad: bool, above: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) float64 and its gradient (C, M), empty unless ``with_grad``.

    ``above`` (2,) are the masses of further negatives and positives, so far above that their sigmoids are 1.
    """
    scores, positive, member, class_of, row_of, share, temperature, key_weight, *_ = problem
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
        weighted = sigmoid if mass is None else sigmoid * mass
        among_positives = weighted * is_positive
        own = 1 if own_weight is None else own_weight[first : first + step]
        n, r = (weighted - among_positives).sum(dim=1), among_positives.sum(dim=1) + own
        n, r = (n, r) if above is None else (n + above[0], r + above[1])
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


def smooth_ap_sorted(problem: Problem, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the same for finite scores, in float64: neighbouring positives with the rows near them, chunk by chunk.

    Where few pairs are beyond the cutoff they are summed too, as far as the dtype of the scores can represent their
    gradient: they are all of it if no two rows are within the cutoff of each other.
    """
    scores, positive, member, class_of, row_of, share, temperature, key_weight, *_ = problem
    loss, gradient = share.new_zeros(len(scores)), torch.zeros_like(scores, dtype=torch.float64)
    most, first = chunk_size(scores, 1), 0
    for c, count in zip(*(column.tolist() for column in class_of.unique_consecutive(return_counts=True))):
        own, first = slice(first, first + count), first + count
        ordered, order = scores[c].double().sort()
        place_of_row = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        place, sequence = place_of_row[row_of[own]].sort()
        shares, is_positive = share[own][sequence], positive[c, order]
        takes_part = None if member is None else member[c, order]
        weight = None if key_weight is None else key_weight.expand_as(scores)[c, order].double()
        for reach in (_FAR[scores.dtype] * temperature, CUTOFF * temperature):
            low = torch.searchsorted(ordered, ordered[place] - reach)
            high = torch.searchsorted(ordered, ordered[place] + reach, right=True)
            if int((high - low).sum()) <= _FEW * len(order):
                break
        kinds = torch.stack([~is_positive, is_positive])
        kinds = (kinds if takes_part is None else kinds & takes_part).double()
        # Summed from the top, so that small weights there are not lost in a difference of large sums.
        above = F.pad(suffix_sums(kinds if weight is None else kinds * weight), (0, 1))  # [2, M + 1]
        lows, highs, start = low.tolist(), high.tolist(), 0
        while start < count:
            size = count - start
            while size > 1 and size * (highs[start + size - 1] - lows[start]) > most:
                size = (size + 1) // 2
            part, near = slice(start, start + size), slice(lows[start], highs[start + size - 1])
            at = place[part] - near.start
            members, key = (None if row is None else row[None, near] for row in (takes_part, weight))
            listed = torch.zeros_like(at), at, shares[part]
            chunk = Problem(ordered[None, near], is_positive[None, near], members, *listed, temperature, key)
            of_chunk, pulls = smooth_ap_direct(chunk, with_grad, above[:, near.stop])
            loss[c] += of_chunk[0]
            if with_grad:
                gradient[c].index_add_(0, order[near], pulls[0])
            start += size
    return loss, gradient.to(scores.dtype) if with_grad else scores.new_empty(0)
