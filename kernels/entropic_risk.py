r"""The entropic risk of logistic pair losses: for each query, a soft maximum over the keys.

.. math:: y_q = \lambda \log \frac{1}{n} \sum_k \exp\!\left(\frac{\ell_{qk}}{\lambda}\right), \quad
          \ell_{qk} = \log(1 + e^{d_{qk}}), \quad d_{qk} = \frac{x_k - x_q}{s}

With the weights p_k = softmax of l_qk / lambda over the keys: dy/dx_k = p_k s(d_qk) / s = -(its part of) dy/dx_q.

For lambda = 1 the mean is linear in e^d: y_q = log(1 + e^m), m = log mean_k e^(z_k) - z_q, z = (x - c) / s. That takes
O(Q + K) time, and p_k s(d_qk) becomes softmax(z)_k s(m). Other lambda are summed over pairs, in chunks.

All of it is computed in float64: for small lambda float32 would round l / lambda, and with it p, by more than 1e-6.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .registration import register
from .sigmoid_sums import chunks_of_pairs


def entropic_risk(queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilt: float) -> Tensor:
    """Return the risks (C, Q) float64.

    Args:
        queries: (C, Q), float32 or float64.
        keys: (C, K), the dtype of ``queries``.
        inside: (C, K) bool, the keys that count, n of them; without any the risk is 0.
        scales: (C,), > 0, detached.
        tilt: lambda > 0.
    """
    risks: Tensor = _entropic_risk(queries, keys, inside, scales.double(), tilt)
    return risks


def _risks(queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilt: float) -> Tensor:
    if tilt == 1:
        return _softplus(_margins(queries, keys, inside, scales)[0])
    risks = torch.zeros(queries.shape, dtype=torch.float64, device=queries.device)
    if keys.shape[1] == 0:
        return risks
    for c, q in chunks_of_pairs(queries, keys):
        losses = _softplus(_distances(queries[c, q], keys[c], scales[c])).masked_fill_(~inside[c, None], -math.inf)
        most = losses.amax(dim=2, keepdim=True)
        below = _minus(losses, most).div_(tilt)
        mean = inside[c].sum(dim=1).clamp_min(1)[:, None, None].double()
        if tilt > 1:  # the exponents may be so small that their exponentials are 1 to the last bit
            log_mean = torch.log1p(below.expm1_().masked_fill_(~inside[c, None], 0.0).sum(dim=2, keepdim=True) / mean)
        else:
            log_mean = torch.log(below.exp_().sum(dim=2, keepdim=True) / mean)
        risks[c, q] = torch.where(most == -math.inf, 0.0, most + tilt * log_mean)[:, :, 0]
    return risks


def _gradients(
    grad: Tensor, queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilt: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys."""
    grad = grad / scales[:, None]
    if tilt == 1:
        margins, shares = _margins(queries, keys, inside, scales)
        pull = grad * margins.sigmoid()  # [C, Q]
        return -pull.to(queries.dtype), (shares * pull.sum(dim=1, keepdim=True)).to(keys.dtype)
    grads = torch.zeros_like(grad), torch.zeros(keys.shape, dtype=torch.float64, device=keys.device)
    if keys.shape[1] == 0:
        return grads[0].to(queries.dtype), grads[1].to(keys.dtype)
    for c, q in chunks_of_pairs(queries, keys):
        distances = _distances(queries[c, q], keys[c], scales[c])
        losses = _softplus(distances).masked_fill_(~inside[c, None], -math.inf)
        weights = _minus(losses, losses.amax(dim=2, keepdim=True)).div_(tilt).exp_()
        weights = weights.masked_fill_(~inside[c, None], 0.0)
        slope = weights / _or_one(weights.sum(dim=2, keepdim=True)) * distances.sigmoid_() * grad[c, q, None]
        grads[0][c, q] = -slope.sum(dim=2)
        grads[1][c] += slope.sum(dim=1)
    return grads[0].to(queries.dtype), grads[1].to(keys.dtype)


def _margins(queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the mean of e^d over the keys (C, Q), and the softmax of the keys (C, K)."""
    if keys.shape[1] == 0:
        return torch.full_like(queries, -math.inf, dtype=torch.float64), keys.double()
    # Differences to the largest finite key are exact where the scores are large and close together.
    usable = inside & keys.isfinite()
    centre = keys.masked_fill(~usable, -math.inf).amax(dim=1, keepdim=True)
    centre = torch.where(centre.isfinite(), centre, 0.0).double()  # [C, 1]
    z_keys = ((keys.double() - centre) / scales[:, None]).masked_fill_(~inside, -math.inf)
    z_queries = (queries.double() - centre) / scales[:, None]
    most = z_keys.amax(dim=1, keepdim=True)
    shares = _minus(z_keys, most).exp_().masked_fill_(~inside, 0.0)
    total = shares.sum(dim=1, keepdim=True)
    log_mean = torch.log(total / inside.sum(dim=1, keepdim=True).clamp_min(1)) + most
    # A key and a query at -inf have no distance, as in a sum over pairs.
    lowest = (inside & (keys == -math.inf)).any(dim=1, keepdim=True)
    margins = (log_mean - z_queries).masked_fill_(lowest & (z_queries == -math.inf), math.nan)
    return margins, shares / _or_one(total)


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
    return torch.where(total == 0, torch.ones_like(total), total)


def _fake_risks(queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilt: float) -> Tensor:
    return torch.empty_like(queries, dtype=torch.float64)


def _fake_gradients(
    grad: Tensor, queries: Tensor, keys: Tensor, inside: Tensor, scales: Tensor, tilt: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(queries), torch.empty_like(keys)


_entropic_risk = register(
    "entropic_risk",
    forward=_risks,
    fake=_fake_risks,
    saved=lambda inputs, output: (inputs[:4], inputs[4:]),
    backward=_gradients,
    fake_backward=_fake_gradients,
)
