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
from .registration import register

MOST_POWERS = 100
# The values of 1 / lambda for :func:`tilts_of_budget`. With a small budget scores stay close together in training, and
# a larger value would leave little but the top negative.
MULTIPLES = range(1, 13)
_ROUNDING = 1e-9  # of the logarithm of a perplexity; the largest scores may be tied, and then it has a limit
POWER = 10_000  # pairs that take as long as one power of a few rows


def entropic_risk(queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilts: Tensor) -> Tensor:
    """Return the risks (C, Q) float64.

    Args:
        queries: (C, Q), float32 or float64.
        keys: (C, K), the dtype of ``queries``.
        inside: (C, K) bool, the keys that count, n of them; without any the risk is 0.
        scales: (C,), > 0, detached.
        tilts: (C,) float64, lambda > 0 of each class; on the CPU where the host knows it.
    """
    risks: Tensor = _entropic_risk(queries, keys, inside, scales.double(), tilts)[0]
    return risks


@torch.no_grad()
def tilts_of_budget(
    queries: Tensor, share: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, budget: float
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
    columns = torch.stack([below.masked_fill_(~inside, -1e30), torch.ones_like(below)], dim=2)  # [C, K, 2]
    goal = inside.sum(dim=1).double().log() + math.log(budget)  # [C]

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


def _risks(queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the risks, and the tilts on the host, so that the backward does not wait for them again."""
    on_host = tilts.to("cpu", copy=True)
    return _risks_at(queries, keys, inside, scales, on_host), on_host


def _risks_at(queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilts: Tensor) -> Tensor:
    powers = _num_powers(tilts, queries, keys)
    of_class = tilts.to(scales.device, non_blocking=True)  # [C]
    if powers and keys.shape[1]:
        terms, most, _ = _powers(queries, keys, inside, scales, powers)
        if len(terms) == 1:
            return of_class[:, None] * _softplus(most)
        total = _minus(terms, most).exp_().sum(dim=0)
        return of_class[:, None] * _softplus(most + total.log())
    risks = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    if keys.shape[1] == 0:
        return risks
    any_above = bool((tilts > 1).any())
    for c, q in chunks_of_pairs(queries, keys):
        losses = _softplus(_distances(queries[c, q], keys[c], scales[c])).masked_fill_(~inside[c, None], -math.inf)
        most, lam = losses.amax(dim=2, keepdim=True), of_class[c, None, None]
        below = _minus(losses, most).div_(lam)
        count = inside[c].sum(dim=1).clamp_min(1)[:, None, None].double()
        if any_above:  # the exponents may be so small that their exponentials are 1 to the last bit
            log_mean = torch.log1p(below.expm1_().masked_fill_(~inside[c, None], 0.0).sum(dim=2, keepdim=True) / count)
        else:
            log_mean = torch.log(below.exp_().sum(dim=2, keepdim=True) / count)
        risks[c, q] = torch.where(most == -math.inf, 0.0, most + lam * log_mean)[:, :, 0]
    return risks


def _gradients(
    grad: Tensor, queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys."""
    grad = grad / scales[:, None]
    powers = _num_powers(tilts, queries, keys)
    of_class = tilts.to(scales.device, non_blocking=True)
    if powers and keys.shape[1]:
        terms, most, z_keys = _powers(queries, keys, inside, scales, powers)
        if len(terms) == 1:
            pull = grad * of_class[:, None] * most.sigmoid()
            of_keys = _softmax(z_keys) * pull.sum(dim=1, keepdim=True)
            return (-pull).to(queries.dtype), of_keys.to(keys.dtype)
        parts = _minus(terms, most).exp_()  # [m, C, Q]
        total = parts.sum(dim=0)
        degrees = _degrees(len(terms), z_keys)
        flow = parts.mul_(grad * of_class[:, None] * (most + total.log()).sigmoid() / total).mul_(degrees)
        of_queries, flows, of_keys = -flow.sum(dim=0), flow.sum(dim=2, keepdim=True), torch.zeros_like(z_keys)
        for n in _chunks_of_powers(len(terms), z_keys):
            of_keys += (_softmax(degrees[n] * z_keys) * flows[n]).sum(dim=0)
        return of_queries.to(queries.dtype), of_keys.to(keys.dtype)
    grads = torch.zeros_like(grad), torch.zeros(keys.shape, dtype=torch.float64, device=keys.device)
    if keys.shape[1] == 0:
        return grads[0].to(queries.dtype), grads[1].to(keys.dtype)
    for c, q in chunks_of_pairs(queries, keys):
        distances = _distances(queries[c, q], keys[c], scales[c])
        losses = _softplus(distances).masked_fill_(~inside[c, None], -math.inf)
        weights = _minus(losses, losses.amax(dim=2, keepdim=True)).div_(of_class[c, None, None]).exp_()
        weights = weights.masked_fill_(~inside[c, None], 0.0)
        slope = weights / _or_one(weights.sum(dim=2, keepdim=True)) * distances.sigmoid_() * grad[c, q, None]
        grads[0][c, q] = -slope.sum(dim=2)
        grads[1][c] += slope.sum(dim=1)
    return grads[0].to(queries.dtype), grads[1].to(keys.dtype)


def _powers(
    queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, powers: list[int]
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
    degrees, log_means = _degrees(max(powers), z_keys), []
    for n in _chunks_of_powers(max(powers), z_keys):
        parts, highest = _exponentials(degrees[n] * z_keys)
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


def _or_one(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1.0, total)


_entropic_risk = register(
    "entropic_risk",
    forward=_risks,
    fake=lambda queries, *_: (
        torch.empty_like(queries, dtype=torch.float64),
        torch.empty(len(queries), dtype=torch.float64, device="cpu"),
    ),
    saved=lambda inputs, output: ((*inputs[:4], output[1]), ()),
    backward=_gradients,
    fake_backward=lambda grad, queries, keys, *_: (torch.empty_like(queries), torch.empty_like(keys)),
)
