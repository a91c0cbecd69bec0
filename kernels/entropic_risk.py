r"""The entropic risk of logistic pair losses: for each query, a soft maximum over the keys.

.. math:: y_q = \lambda \log \frac{1}{n} \sum_k \exp\!\left(\frac{\ell_{qk}}{\lambda}\right), \quad
          \ell_{qk} = \log(1 + e^{d_{qk}}), \quad d_{qk} = \frac{x_k - x_q}{s}

With the weights p_k = softmax of l_qk / lambda over the keys: dy/dx_k = p_k s(d_qk) / s = -(its part of) dy/dx_q.
The caller passes the lambda of a class, or :func:`tilts_of_budget` finds it from the number of keys that must count.

If 1 / lambda is a whole number m, exp(l / lambda) = (1 + e^d)^m is a sum of powers of e^d, all positive, and the mean
over the keys factors. With z = (x - c) / s and L_n = log mean_k e^(n z_k):

    y_q = lambda log(1 + e^(A_q)),  A_q = log sum over n = 1..m of C(m, n) e^(L_n - n z_q)

That takes O(m (Q + K)) time. Other lambda, and few pairs, are summed pair by pair, in chunks.

All of it is computed in float64: for small lambda float32 would round l / lambda, and with it p, by more than 1e-6.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .pairs import chunk_size, chunks_of_pairs
from .registration import register, scaled

MOST_POWERS = 100  # a smaller lambda than 1/100 is summed pair by pair
# The values of 1 / lambda for :func:`tilts_of_budget`. With a small budget scores stay close together in training, and
# a larger value would leave little but the top negative.
MULTIPLES = range(1, 13)
_ROUNDING = 1e-9  # of the logarithm of a perplexity; the largest scores may be tied, and then it has a limit
# Pairs that take as long as one power of a few rows, on the host. An accelerator has it too: there a power is no kernel
# of its own, so that the value matters little, and no other was measured.
POWER = 10_000


def entropic_risk(
    queries: Tensor,
    keys: Tensor,
    inside: Tensor,
    scales: Tensor,
    tilts: Tensor,
    share: Tensor,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean of the risks over the queries (C,) float64, and the risks (C, Q), which have no gradient.

    Args:
        queries: (C, Q), float32 or float64.
        keys: (C, K), the dtype of ``queries``.
        inside: (C, K) bool, the keys that count, n of them; without any the risk is 0.
        scales: (C,), > 0, detached.
        tilts: (C,) float64, lambda > 0 of each class; on the CPU where the host knows it.
        share: (C, Q), what each query weighs in the mean.
        weight: (C, K) > 0 where ``inside``: a key counts as so many; None for 1.
    """
    with_grad = torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad)
    results = _entropic_risk(queries, keys, inside, scales.double(), tilts, share, weight, with_grad)
    mean: Tensor = results[0]
    return mean, results[1]


@torch.no_grad()
def tilts_of_budget(
    queries: Tensor,
    share: Tensor,
    keys: Tensor,
    inside: Tensor,
    scales: Tensor,
    budget: float,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the lambda (C,) float64, 1/m each, with which about ``budget`` of the keys of each class count.

    How many count is the perplexity of the weights p of the keys, for a query at the mean. Queries beyond the keys
    are moved to their ends first, where the order of all pairs is the same, so that one far away does not decide.

    Args:
        queries: (C, Q).
        share: (C, Q), what each query weighs in the mean; the sum over a class is 1, or 0 without queries.
        keys: (C, K).
        inside: (C, K) bool, the keys that count.
        scales: (C,), > 0.
        budget: > 0 and <= 1, of the number of keys inside.
        weight: (C, K) > 0 where ``inside``: a key counts as so many; None for 1.
    """
    multiples = torch.tensor(MULTIPLES, dtype=torch.float64).to(keys.device, non_blocking=True)
    if keys.shape[1] == 0:
        return multiples.new_ones(len(keys))
    finite, keys = inside & keys.isfinite(), keys.double()
    highest = torch.where(finite, keys, -math.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(finite, keys, math.inf).amin(dim=1, keepdim=True)
    mean = (queries.double().clamp(lowest, highest) * share).sum(dim=1, keepdim=True)
    losses = _softplus((keys - mean) / scales.double()[:, None])
    below = losses - losses.masked_fill(~inside, 0.0).amax(dim=1, keepdim=True)
    below, count = below.masked_fill_(~inside, -1e30), inside if weight is None else _masked(weight.double(), inside)
    ones = torch.ones_like(below) if weight is None else count
    columns = torch.stack([below if weight is None else below * count, ones], dim=2)  # [C, K, 2]
    goal = count.sum(dim=1).double().log() + math.log(budget)  # [C]

    parts = multiples[:, None, None].split(chunk_size(keys, below.numel()))
    sums = torch.cat([torch.einsum("mck,cks->mcs", (part * below).exp_(), columns) for part in parts])
    exponent, total = sums.unbind(dim=2)
    # (m, C): by how much the logarithm of the perplexity is too large, falling with m
    excess = total.log() - multiples[:, None] * exponent / total - goal
    number = (excess > _ROUNDING).sum(dim=0)
    ends = torch.stack([number - 1, number]).clamp(0, len(MULTIPLES) - 1)  # too many keys count, and the next
    last, following = excess.abs().gather(0, ends)
    return multiples[torch.where(following < last, ends[1], ends[0])].reciprocal()


def _num_powers(tilts: Tensor, queries: Tensor, keys: Tensor) -> list[int]:
    """Return m = 1 / lambda of each class if the powers are faster than a sum over pairs; otherwise an empty list."""
    powers = []
    for value in tilts.tolist():
        m = round(min(1 / value, MOST_POWERS + 1.0))
        if not (1 <= m <= MOST_POWERS and abs(m * value - 1) <= 1e-12):
            return []
        powers.append(m)
    most, num_rows = max(powers, default=1), queries.numel() + keys.numel()
    return powers if most == 1 or most * (POWER + num_rows) < queries.numel() * keys.shape[1] else []


def _risks_and_gradients(
    queries: Tensor,
    keys: Tensor,
    inside: Tensor,
    scales: Tensor,
    tilts: Tensor,
    share: Tensor,
    weight: Tensor | None,
    with_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mean (C,), the risks (C, Q), and the gradients of queries and keys, empty unless ``with_grad``."""
    on_host = tilts.to("cpu")
    powers, of_class = _num_powers(on_host, queries, keys), tilts.to(scales.device, non_blocking=True)
    risks = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    weight = None if weight is None else weight.double()
    rates = share / scales[:, None]  # of the queries in the gradient
    of_queries, of_keys = (torch.zeros_like(rows, dtype=torch.float64) for rows in (queries, keys))
    if powers and keys.shape[1]:
        log_weight = None if weight is None else torch.where(inside, weight, 1.0).log()
        terms, most, z_keys = _powers(queries, keys, inside, scales, powers, log_weight)
        parts = _minus(terms, most).exp_()  # [m, C, Q]
        total = parts.sum(dim=0)
        top = most if len(terms) == 1 else most + total.log()
        risks = of_class[:, None] * _softplus(top)
        if with_grad:
            degrees = _degrees(len(terms), z_keys)
            flow = parts.mul_(rates * of_class[:, None] * top.sigmoid() / total).mul_(degrees)
            of_queries, flows = -flow.sum(dim=0), flow.sum(dim=2, keepdim=True)
            for n in _chunks_of_powers(len(terms), z_keys):
                of_keys += (_softmax(_logs(degrees[n], z_keys, log_weight)) * flows[n]).sum(dim=0)
    elif keys.shape[1]:
        any_above = bool((on_host > 1).any())
        count = (inside.sum(dim=1, keepdim=True) if weight is None else _masked(weight, inside).sum(1, True)).double()
        for c, q in chunks_of_pairs(queries, keys):
            distances, outside = _distances(queries[c, q], keys[c], scales[c]), ~inside[c, None]
            losses = _softplus(distances).masked_fill_(outside, -math.inf)
            most, lam, number = losses.amax(dim=2, keepdim=True), of_class[c, None, None], _or_one(count[c])[:, None]
            below = _minus(losses, most).div_(lam)
            # For lambda > 1 the exponents may be so small that their exponentials are 1 to the last bit.
            parts = below.expm1() if any_above else below.exp_()
            summed = parts.masked_fill_(outside, 0.0) if weight is None else _masked(parts * weight[c, None], ~outside)
            ratio = summed.sum(dim=2, keepdim=True) / number
            log_mean = ratio.log1p() if any_above else ratio.log()
            risks[c, q] = torch.where(most == -math.inf, 0.0, most + lam * log_mean)[:, :, 0]
            if with_grad:
                if any_above:
                    summed = below.exp_() if weight is None else below.exp_() * weight[c, None]
                slope = _masked(summed, ~outside)
                slope = slope / _or_one(slope.sum(dim=2, keepdim=True)) * distances.sigmoid_() * rates[c, q, None]
                of_queries[c, q] = -slope.sum(dim=2)
                of_keys[c] += slope.sum(dim=1)
    # A key at +inf gives padding, and queries without weight, an infinite risk; 0 times it is NaN.
    mean = torch.where(share > 0, risks * share, 0.0).sum(dim=1)
    if not with_grad:
        return mean, risks, queries.new_empty(0), keys.new_empty(0)
    return mean, risks, of_queries.to(queries.dtype), of_keys.to(keys.dtype)


def _powers(
    queries: Tensor,
    keys: Tensor,
    inside: Tensor,
    scales: Tensor,
    powers: list[int],
    log_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log C(m, n) + L_n - n z_q for n = 1..m (m, C, Q), the largest of them (C, Q), and z of the keys (C, K).

    For n above the m of a class they are -inf.
    """
    # Differences to the largest finite key are exact where the scores are large and close together.
    usable = inside & keys.isfinite()
    centre = torch.where(usable, keys, -math.inf).amax(dim=1, keepdim=True)
    centre = torch.where(centre == -math.inf, 0.0, centre).double()  # [C, 1]
    z_keys = torch.where(inside, (keys.double() - centre) / scales[:, None], -math.inf)
    z_queries = (queries.double() - centre) / scales[:, None]
    # A key and a query at -inf have no distance, as in a sum over pairs.
    lowest = (inside & (keys == -math.inf)).any(dim=1, keepdim=True)
    z_queries = z_queries.masked_fill(lowest & (z_queries == -math.inf), math.nan)
    count = inside.sum(dim=1, keepdim=True).clamp_min(1).double()
    if log_weight is not None:
        count = _or_one(_masked(log_weight.exp(), inside).sum(dim=1, keepdim=True))
    degrees, log_means = _degrees(max(powers), z_keys), []
    for n in _chunks_of_powers(max(powers), z_keys):
        parts, highest = _exponentials(_logs(degrees[n], z_keys, log_weight))
        log_means.append(parts.sum(dim=-1, keepdim=True).log() + highest - count.log())  # L_n [n, C, 1]
    logs = [[math.log(math.comb(m, n)) if n <= m else -math.inf for m in powers] for n in range(1, max(powers) + 1)]
    binomials = torch.tensor(logs, dtype=z_keys.dtype).to(z_keys.device, non_blocking=True)[:, :, None]
    terms = binomials + torch.cat(log_means) - degrees * z_queries
    if min(powers) < max(powers):
        terms = torch.where(binomials == -math.inf, -math.inf, terms)
    return terms, terms.amax(dim=0), z_keys


def _degrees(m: int, like: Tensor) -> Tensor:
    """Return 1..m (m, 1, 1)."""
    return torch.arange(1, m + 1, dtype=like.dtype, device=like.device)[:, None, None]


def _logs(degrees: Tensor, z_keys: Tensor, log_weight: Tensor | None) -> Tensor:
    """Return the logarithms of the powers of the keys, times their weights, (n, C, K)."""
    logs = degrees * z_keys
    return logs if log_weight is None else logs.add_(log_weight)


def _chunks_of_powers(m: int, keys: Tensor) -> list[slice]:
    """Return the numbers below m in parts whose powers of ``keys`` (C, K) make one chunk."""
    step, parts = chunk_size(keys, keys.numel()), []
    for first in range(0, m, step):
        parts.append(slice(first, first + step))
    return parts


def _softmax(z: Tensor) -> Tensor:
    """Return the softmax of each row (n, C, K), 0 in a row of -inf."""
    parts, _ = _exponentials(z)
    return parts / _or_one(parts.sum(dim=-1, keepdim=True))


def _exponentials(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponentials of each row (n, C, K), over that of its largest entry, and this entry (n, C, 1)."""
    most = z.amax(dim=-1, keepdim=True)
    return torch.where(z == -math.inf, 0.0, _minus(z, most).exp_()), most


def _distances(queries: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    """Return d of some queries (c, q) and keys (c, K), (c, q, K) float64."""
    return (keys.double()[:, None] - queries.double()[:, :, None]).div_(scales[:, None, None])


def _softplus(x: Tensor) -> Tensor:
    """Return log(1 + e^x) to full accuracy; torch's softplus leaves out e^-x above its threshold."""
    return -F.logsigmoid(-x)


def _minus(x: Tensor, most: Tensor) -> Tensor:
    """Return ``x - most``, 0 where both are the same infinity."""
    return torch.where(x == most, 0.0, x - most)


def _masked(values: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside, values, 0.0)


def _or_one(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1.0, total)


def _scaled(grad: Tensor, _: Tensor, of_queries: Tensor, of_keys: Tensor) -> tuple[Tensor, Tensor]:
    of_queries, of_keys = (scaled(gradient.t(), grad).t() for gradient in (of_queries, of_keys))
    return of_queries, of_keys


_entropic_risk = register(
    "entropic_risk",
    forward=_risks_and_gradients,
    fake=lambda queries, keys, *others: (
        queries.new_empty(queries.shape[0], dtype=torch.float64),
        torch.empty_like(queries, dtype=torch.float64),
        torch.empty_like(queries) if others[-1] else queries.new_empty(0),  # with_grad
        torch.empty_like(keys) if others[-1] else keys.new_empty(0),
    ),
    saved=lambda inputs, outputs: ((outputs[0], *outputs[2:]), ()),
    backward=_scaled,
)
