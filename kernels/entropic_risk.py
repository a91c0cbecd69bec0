r"""The entropic risk of logistic pair losses: for each positive of a pool, a soft maximum over its rivals.

.. math:: y_i = \lambda \log \frac{1}{n} \sum_j \exp\!\left(\frac{\ell_{ij}}{\lambda}\right), \quad
          \ell_{ij} = \log(1 + e^{d_{ij}}), \quad d_{ij} = \frac{x_j - x_i}{s}

The loss of a class is the mean of y over its positives. For :math:`\lambda = 1/m` it takes O(m M) time. With c the
highest rival, the keys :math:`e_j = e^{(x_j - c) / s} \le 1` and :math:`u_i = e^{(c - x_i) / s}`,

.. math:: y_i = \frac{1}{m} \log \frac{1}{n} \sum_j (1 + u_i e_j)^m
              = \frac{1}{m} \log\Bigl(1 + \sum_{k=1}^m a_k u_i^k\Bigr), \quad
          a_k = \binom{m}{k} \frac{S_k}{n}, \quad S_k = \sum_j e_j^k

The powers are products of one exponential a rival. The gradient of rival j is a polynomial in e_j, with coefficients
that are sums over the positives. All terms are > 0, so no digit is lost. Without a lambda m is the one with which
the perplexity of the weights of the rivals, for a positive at the mean, is nearest to the budget. With
:math:`f = e^{(\bar x - c) / s}` these weights are powers of :math:`r_j = (f + e_j) / (f + 1)`, products again.

Other lambda are summed pair by pair, in chunks. All of it is in float64: for small lambda float32 would round l /
lambda by more than 1e-6. On the host one call of C computes a pool of finite scores, see native/soft_maximum.inc.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native
from .costs import costs_of
from .pairs import chunks_of_pairs, places_of
from .registration import register, scaled

MOST_POWERS = 100  # a smaller lambda than 1/100 is summed pair by pair
# The values of m for a budget. With a small budget scores stay close together in training, and a larger value would
# leave little but the top negative.
MOST_MULTIPLES = 12
_ROUNDING = 1e-9  # of the logarithm of a perplexity; the largest scores may be tied, and then it has a limit
_SMALLEST = 1e-300  # a ratio whose logarithm counts
_LOOK = 6  # values of m that are tried at a time where the host reads without waiting; a divisor of the number above


def risk_and_gradient(
    scores: Tensor,  # (C, M) float32 or float64, contiguous, with a row
    positive: Tensor,  # (C, M) bool, a subset of ``member``
    member: Tensor | None,  # (C, M) bool: the rows that take part; None for all
    iid: Tensor | None,  # (M,) or (C, M) bool: the rows that may be rivals; None for all
    live: Tensor | None,  # (M,) bool: the rows that may be positives of the mean; None for all
    weight: Tensor | None,  # (M,) or (C, M) >= 0, of the positives in the mean; None for 1
    key_weight: Tensor | None,  # (M,) or (C, M) > 0 for members: a rival counts as so many; None for 1
    scales: Tensor | None,  # (C,) float64, s > 0, detached; None for 1
    budget: float,  # > 0 and <= 1, the share of the rivals that counts
    tilt: float | None,  # lambda > 0; None to find it from ``budget``
    num_positive: int | None,  # of a single class; None if the host does not know
    with_grad: bool,  # False for an empty gradient
    with_variance: bool,  # False for an empty variance
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, its gradient (C, M), the validity, lambda, and the variance of the losses, (C,) each, float64.

    A class is valid if it has a positive of positive weight and a rival. An invalid class has a loss of 0 with zero
    gradient, and a lambda of 1. A class with a NaN score is NaN, valid or not.
    """
    power = 0 if tilt is None else round(min(1 / tilt, MOST_POWERS + 1.0))  # m, 0 to find it
    is_whole = tilt is None or (1 <= power <= MOST_POWERS and abs(power * tilt - 1) <= 1e-12)
    if is_whole:
        rows = scores, positive, member, iid, live, weight, key_weight, scales
        results = native.soft_maximum(rows, budget, power, with_grad, with_variance)
        if results is not None:
            return results

    rivals = ~positive if member is None else member & ~positive
    rivals, counted = (own if also is None else own & also for own, also in ((rivals, iid), (positive, live)))
    mass = rivals.double() if key_weight is None else torch.where(rivals, key_weight, 0.0).double()  # [C, M]
    index, shares = _listed(counted, num_positive if live is None else None)
    shares = shares if weight is None else shares * weight.expand_as(scores).gather(1, index).double()
    sums, total = shares.sum(dim=1, keepdim=True), mass.sum(dim=1, keepdim=True)  # [C, 1]
    valid, shares, total = ((sums > 0) & (total > 0))[:, 0], shares / _or_one(sums), _or_one(total)
    pool = _Pool(scores.gather(1, index).double(), shares, scores, mass, total, scales)
    if tilt is None or is_whole:
        risks, of_queries, of_keys, multiples = _by_powers(pool, power, budget, with_grad)
        tilts = multiples.reciprocal()
    else:
        risks, of_queries, of_keys = _by_pairs(pool, tilt, with_grad)
        tilts = torch.full_like(total[:, 0], tilt)
    # A rival at +inf gives positives without weight an infinite risk; 0 times it is NaN.
    risks = torch.where(shares > 0, risks, 0.0)
    mean = (risks * shares).sum(dim=1)
    variance = ((risks - mean[:, None]).square() * shares).sum(dim=1) if with_variance else mean.new_empty(0)
    undefined = scores.amax(dim=1).isnan()
    loss = torch.where(valid, mean, 0.0).masked_fill_(undefined, math.nan)
    tilts, gradient = torch.where(valid, tilts, 1.0), scores.new_empty(0)
    if with_grad:
        gradient = of_keys.scatter_add_(1, index, of_queries).to(scores.dtype)
        other = torch.where(undefined, math.nan, 0.0).to(gradient.dtype)[:, None]
        gradient = torch.where((valid & ~undefined)[:, None], gradient, other)
    return loss, gradient, valid, tilts, variance


def _listed(mask: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """Return where the entries of a mask (C, M) are, (C, P), with padding, and 1.0 for those without padding.

    P is the largest number of a class, ``count`` of a single class if the host knows it. Else it is read.
    """
    if len(mask) == 1:
        index = torch.nonzero_static(mask[0], size=int(mask.sum()) if count is None else count).t()
        return index, torch.ones_like(index, dtype=torch.float64)
    counts = mask.sum(dim=1)
    index, inside = places_of(mask, counts, int(counts.max()))
    return index, inside.double()


class _Pool(NamedTuple):
    """The positives and the rivals of each class. Padding and rows that are no rivals have no share and no mass."""

    queries: Tensor  # [C, P] float64, scores of the positives
    shares: Tensor  # [C, P] float64, of the positives in the mean
    scores: Tensor  # [C, M]
    mass: Tensor  # [C, M] float64, of the rivals
    total: Tensor  # [C, 1] float64, its sum, n
    scales: Tensor | None  # [C] float64

    def scaled(self, differences: Tensor) -> Tensor:
        """Return the differences of scores (C, ...), divided by the scale of their class."""
        shape = len(differences), *[1] * (differences.ndim - 1)
        return differences if self.scales is None else differences.div_(self.scales.view(shape))


def _by_powers(pool: _Pool, power: int, budget: float, with_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the risks (C, P), the gradients of positives (C, P) and rivals (C, M), and m of each class (C,)."""
    queries, shares, scores, mass, total, _ = pool
    costs, low = costs_of(scores.device), torch.where(mass > 0, scores, math.inf)
    highest = torch.where(mass > 0, scores, -math.inf).amax(dim=1, keepdim=True).double()  # [C, 1]
    lowest = low.amin(dim=1, keepdim=True)
    count = power or (_LOOK if costs.reads_freely else MOST_MULTIPLES)
    step = max(1, costs.rows_at_once // (len(scores) * count))
    blocks = [slice(at, at + step) for at in range(0, scores.shape[1], step)]  # that stay in the cache
    keys = torch.empty_like(mass)
    for b in blocks:
        below = (scores[:, b] - highest).nan_to_num_(neginf=-math.inf)  # 0 where both are the same infinity
        keys[:, b] = pool.scaled(below).clamp_max_(0.0).exp_()  # rows above the highest are no rivals

    if power:
        m = torch.full_like(total, power)  # [C, 1]
    else:
        # Positives beyond the rivals are moved to their ends, where the order of all pairs is the same, so that one far
        # away does not decide.
        finite = low.masked_fill_(low == -math.inf, math.inf).amin(dim=1, keepdim=True)
        mean = (queries.clamp(finite, highest) * shares).sum(dim=1, keepdim=True)
        f, goal = pool.scaled(mean - highest).exp_(), total.log() + math.log(budget)
        ratios = [(keys[:, b] + f).div_(f + 1) for b in blocks]
        m = _multiples(ratios, [mass[:, b] for b in blocks], goal, count)

    # The sums S of the powers, and log a.
    most = power or (int(m.max()) if costs.reads_freely else MOST_MULTIPLES)
    sums, degrees = total.new_zeros(len(scores), most, 1), _degrees(most, total)  # [C, m, 1], [m, 1]
    for b in blocks:
        sums += _powers(keys[:, b], most) @ mass[:, b, None]
    m = m[:, None]
    binomials = (m + 1).lgamma() - (degrees + 1).lgamma() - (m - degrees + 1).lgamma()  # -inf for degrees above m
    logs = binomials + (sums / total[:, None]).log()

    z = torch.where(shares > 0, pool.scaled(queries - highest), 0.0)
    # A rival and a positive at -inf have no distance, as in a sum over pairs.
    z.masked_fill_((lowest == -math.inf) & (z == -math.inf), math.nan)
    risks, of_queries, flows = torch.empty_like(z), torch.empty_like(z), torch.zeros_like(sums)
    step = max(1, costs.pairs_at_once // (len(scores) * most))
    for q in (slice(at, at + step) for at in range(0, z.shape[1], step)):
        terms = torch.where(logs == -math.inf, -math.inf, logs - degrees * z[:, None, q])  # [C, m, q]
        largest = terms.amax(dim=1, keepdim=True)
        parts = _minus(terms, largest).exp_()
        whole = parts.sum(dim=1, keepdim=True)
        top = largest + whole.log()
        risks[:, q] = (_softplus(top) / m)[:, 0]
        if with_grad:
            flow = parts.mul_(pool.scaled(shares[:, None, q] * top.sigmoid() / (m * whole))).mul_(degrees)
            of_queries[:, q] = -flow.sum(dim=1)
            flows += flow.sum(dim=2, keepdim=True)
    coefficients = flows.div_(sums)
    for b in blocks if with_grad else ():
        gradient = coefficients[:, -1]
        for k in range(most - 2, -1, -1):
            gradient = torch.addcmul(coefficients[:, k], gradient, keys[:, b])
        keys[:, b].mul_(gradient).mul_(mass[:, b])
    return risks, of_queries, keys, m[:, 0, 0]


def _multiples(ratios: list[Tensor], masses: list[Tensor], goal: Tensor, count: int) -> Tensor:
    """Return the m with which the logarithm of the perplexity is nearest to the ``goal``, (C, 1) each.

    The ratios and masses are of blocks of rows. The perplexity falls with m: ``count`` are tried at a time until it is
    small.
    """
    losses, excess = [ratio.clamp_min(_SMALLEST).log_() for ratio in ratios], goal[:, :0]
    while excess.shape[1] < MOST_MULTIPLES and not (excess.numel() and bool((excess[:, -1] <= _ROUNDING).all())):
        sums, of_losses = goal.new_zeros(2, len(goal), count, 1)
        for k, (ratio, loss) in enumerate(zip(ratios, losses)):
            powers = _powers(ratio, count)
            sums += powers @ masses[k][:, :, None]
            of_losses += powers @ (masses[k] * loss)[:, :, None]
            masses[k] = masses[k] * powers[:, -1]
        m = _degrees(count, goal) + excess.shape[1]
        # By how much the logarithm is too large.
        excess = torch.cat([excess, (sums.log() - m * of_losses / sums)[:, :, 0] - goal], dim=1)
    number = (excess > _ROUNDING).sum(dim=1, keepdim=True)
    ends = torch.cat([number - 1, number], dim=1).clamp_(0, excess.shape[1] - 1)  # too many count, and the next
    last, following = excess.abs().gather(1, ends).split(1, dim=1)
    return torch.where(following < last, ends[:, 1:], ends[:, :1]).double() + 1


def _degrees(most: int, like: Tensor) -> Tensor:
    """Return 1..most, (most, 1)."""
    return torch.arange(1, most + 1, dtype=like.dtype, device=like.device)[:, None]


def _powers(base: Tensor, most: int) -> Tensor:
    """Return the powers 1..most of ``base`` (C, M), (C, most, M)."""
    powers, count = base.new_empty(len(base), most, base.shape[1]), 1
    powers[:, 0] = base
    while count < most:
        size = min(count, most - count)
        torch.mul(powers[:, :size], powers[:, count - 1 : count], out=powers[:, count : count + size])
        count += size
    return powers


def _by_pairs(pool: _Pool, tilt: float, with_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the risks (C, P) for any lambda, and the gradients of positives (C, P) and rivals (C, M)."""
    queries, shares, scores, mass, total, _ = pool
    risks, of_queries, of_keys = torch.empty_like(queries), torch.empty_like(queries), torch.zeros_like(mass)
    for c, q in chunks_of_pairs(queries, scores):
        part = pool._replace(scales=None if pool.scales is None else pool.scales[c])
        distances = part.scaled(scores[c, None] - queries[c, q, None])  # [c, q, M]
        of_rivals = (mass[c] > 0)[:, None]
        losses = torch.where(of_rivals, _softplus(distances), -math.inf)
        most = losses.amax(dim=2, keepdim=True)
        below = _minus(losses, most).div_(tilt)
        # For lambda > 1 the exponents may be so small that their exponentials are 1 to the last bit.
        parts = below.expm1() if tilt > 1 else below.exp()
        parts = torch.where(of_rivals, parts * mass[c, None], 0.0)
        ratio = parts.sum(dim=2, keepdim=True) / total[c, None]
        risks[c, q] = (most + tilt * (ratio.log1p() if tilt > 1 else ratio.log()))[:, :, 0]
        if with_grad:
            if tilt > 1:
                parts = torch.where(of_rivals, below.exp_() * mass[c, None], 0.0)
            slopes = torch.where(of_rivals, parts / parts.sum(dim=2, keepdim=True) * distances.sigmoid_(), 0.0)
            slopes = part.scaled(slopes * shares[c, q, None])
            of_queries[c, q] = -slopes.sum(dim=2)
            of_keys[c] += slopes.sum(dim=1)
    return risks, of_queries, of_keys


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) to full accuracy; torch's softplus leaves out e^-x above its threshold."""
    return -F.logsigmoid(-x)


def _minus(x: Tensor, most: Tensor) -> Tensor:
    """Return ``x - most``, 0 where both are the same infinity."""
    return torch.where(x == most, 0.0, x - most)


def _or_one(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1.0, total)


entropic_risk = register(
    "entropic_risk",
    forward=risk_and_gradient,
    fake=lambda scores, *others: (
        scores.new_empty(len(scores), dtype=torch.float64),
        torch.empty_like(scores) if others[-2] else scores.new_empty(0),  # with_grad
        scores.new_empty(len(scores), dtype=torch.bool),
        scores.new_empty(len(scores), dtype=torch.float64),
        scores.new_empty(len(scores) if others[-1] else 0, dtype=torch.float64),  # with_variance
    ),
    saved=lambda inputs, outputs: (outputs[:2], ()),
    backward=lambda grad, _, gradient: (scaled(gradient.t(), grad).t(),),
)
