"""Smooth-AP of rows that stay on their ranks, in one of two forms; see :mod:`fullrank.kernels.smooth_ap.binned`.

moments
    These are the moments of bins, which add up over the ranks; with weights of the rows so do those of the rates::

        own rows -> moments ==all-reduce==> fields -> loss, polynomials -> gradient of own rows

positives
    For scores so far apart that most bins would be empty, and for many classes. With R_N and R_P the sums over all
    negatives and positives at x_i, the loss is the weighted mean of R_N / (R_N + R_P + w_i / 2), because R_P contains
    the pair of i with itself::

        positives ==all-gather==> sums over own rows ==all-reduce==> loss, slopes -> gradient of own rows as keys
                                                                 gradient of the positives as queries ==all-reduce==>
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ..kernels.bins import Bins, cover, most_bins
from ..kernels.node_tables import Order, order_for
from ..kernels.pairs import Problem
from ..kernels.registration import exact
from ..kernels.sigmoid_sums import sigmoid_sums
from ..kernels.smooth_ap.binned import Places, smooth_ap_binned
from ..kernels.smooth_ap.sums import ends_of, move_infinities
from ..losses.pooled.pool import PerClass
from .shard import Positives, Shard

# The cost of a byte in each form, of which the cheapest is taken. That of the positives computes more, in float64.
COSTS = {"moments": 1.0, "positives": 16.0, "gather": 1.0}


def smooth_ap_of_shard(shard: Shard, temperature: float) -> PerClass | None:
    """Return the loss of each class, or None if the rows are to be gathered; equal on all ranks."""
    pool = shard.pool
    num_classes, size = pool.scores.shape[0], pool.scores.element_size()
    scores, ends, undefined, clashes = _make_finite(shard, temperature)
    order = order_for(scores, shard.num_rows)
    bins = cover(-ends[0].to(scores.dtype), ends[1].to(scores.dtype), temperature, order.fine)
    bytes_of = {
        "gather": shard.num_rows * (num_classes * size + 8.0),
        "positives": sum(shard.positives) * (size + 60.0),
        "moments": math.inf,
    }
    if bins.window <= most_bins(shard.num_rows):
        num_tables = 2.0 if pool.weight is None else 3.0 if pool.key_weight is None else 4.0
        bytes_of["moments"] = 16.0 * num_tables * order.p * num_classes * bins.num_fine
    form = min(COSTS, key=lambda name: COSTS[name] * bytes_of[name])
    if form == "gather":
        return None
    if form == "moments":
        loss, gradient, valid = _by_moments(scores, shard, temperature, bins, order)
    else:
        loss, gradient, valid = _by_positives(scores, shard, temperature)
    undefined = undefined | (clashes & valid)
    loss = loss.masked_fill(undefined, math.nan)
    gradient = None if gradient is None else gradient.masked_fill_(undefined[:, None], math.nan)
    return PerClass(shard.attach(loss, gradient), valid)


def _make_finite(shard: Shard, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return this rank's scores with infinite ones replaced as in a gathered pool, and facts about those of all ranks.

    They are the negated lowest and the highest of each class (2, C) float64, and (C,) bool which classes have a NaN,
    and in which a positive and another row are at the same infinity.
    """
    scores, member, exchange = shard.pool.scores.detach(), shard.pool.member, shard.exchange
    if scores.shape[0] == 1:
        ends = torch.tensor([[-shard.low], [shard.high]], dtype=torch.float64, device=scores.device)
        undefined = ends[0].isnan()
    else:
        local = ends_of(scores, member)
        has_nan = local.isnan().any(dim=0)
        local = torch.cat([local.masked_fill(has_nan, -math.inf), has_nan[None]])  # some reductions drop a NaN
        ends, undefined = exchange.largest(local, "the ranges of the classes").split([2, 1])
        undefined = undefined[0] > 0
    ends = ends.masked_fill((ends == -math.inf).all(dim=0) | undefined, 0.0)
    scores = scores.masked_fill(undefined[:, None], 0.0) if bool(undefined.any()) else scores
    if bool(ends.isfinite().all()):
        return scores, ends, undefined, torch.zeros_like(undefined)
    moved, ends, clashes = move_infinities(
        scores if member is None else scores.masked_fill(~member, math.nan),
        shard.pool.positive,
        None,
        temperature,
        lambda ends: exchange.largest(ends, "the ends of the finite scores"),
        lambda counts: exchange.sum(counts, "the numbers of infinite scores"),
    )
    return moved, ends, undefined, clashes


def _shares_of(total: Tensor, has_negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors on the weights of positives and the valid classes, (C,) each."""
    valid = (total > 0) & has_negatives
    return torch.where(valid, total, 1.0).reciprocal() * valid, valid


@exact
def _by_moments(
    scores: Tensor, shard: Shard, temperature: float, bins: Bins, order: Order
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the loss (C,) float64, the gradient of the rows (C, N), and the validity (C,)."""
    pool = shard.pool
    key_weight = pool.key_weight
    rows = Problem(scores, pool.positive, pool.member, *Positives.of(pool), temperature, key_weight)
    moments = Places.of(rows, bins).moments(order)
    sums = shard.exchange.sum(torch.stack(moments[: 2 if pool.weight is None else 3]), "the moments")
    del moments
    first, positives, total = (sums[k, 0, :, :-1].sum(dim=1) for k in (0, 1, -1))
    factor, valid = _shares_of(total, first > (positives if key_weight is None else 0))
    # Without weights of the rows the loss reads none.
    read = slice(None if shard.needs_gradient or key_weight is not None else 0)
    rows = Problem(
        scores[:, read],
        pool.positive[:, read],
        None if pool.member is None else pool.member[:, read],
        rows.class_of[read],
        rows.row_of[read],
        (rows.share * factor[rows.class_of])[read],
        temperature,
        key_weight,
    )
    add = partial(shard.exchange.sum, what="the rates of the positives")
    loss, gradient = smooth_ap_binned(rows, bins, order, shard.needs_gradient, sums, factor, add)
    return loss, gradient if shard.needs_gradient else None, valid


@exact
def _by_positives(scores: Tensor, shard: Shard, temperature: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the same in float64."""
    pool, exchange, with_grad, num_classes = shard.pool, shard.exchange, shard.needs_gradient, scores.shape[0]
    rows, counts = Positives.of(pool), [int(count) for count in shard.positives]
    sent = [scores[rows.class_of, rows.row_of], rows.class_of.to(torch.int32)]
    x, class_of, *mass = exchange.rows(sent if pool.weight is None else [*sent, rows.mass], counts)
    x, class_of = x.double(), class_of.to(torch.int64)
    weight = mass[0] if mass else torch.ones_like(x)
    groups = _groups(class_of, num_classes)

    # Two sums for each positive over this rank's negatives and positives; of each class rows, or weight of negatives.
    sums = x.new_zeros(2 * x.numel() + num_classes)
    key_weight = pool.key_weight
    if key_weight is None:
        sums[2 * x.numel() :] = scores.shape[1] if pool.member is None else pool.member.sum(dim=1)
    else:
        sums[2 * x.numel() :] = (pool.negative * key_weight).sum(dim=1)
    at_positives, graphs = sums[: 2 * x.numel()].view(-1, 2), []
    for classes, place in groups:
        real = place >= 0
        queries = x[place.clamp_min(0)]  # [c, q], some of them padding
        kinds = torch.stack([pool.negative[classes], pool.positive[classes]], dim=2).double()
        kinds = kinds if key_weight is None else kinds.mul_(key_weight[:, None])
        keys = scores[classes].double()
        with torch.set_grad_enabled(with_grad):
            queries.requires_grad_(with_grad)
            keys.requires_grad_(with_grad)
            class_sums = sigmoid_sums(queries, keys, kinds, temperature)  # [c, q, 2]
        at_positives[place[real]] = class_sums.detach()[real]
        graphs.append((queries, keys, class_sums))
    sums = exchange.sum(sums, "the sums at the positives")
    r_n, r_p = sums[: 2 * x.numel()].view(-1, 2).unbind(dim=1)
    r_p = r_p + (0.5 if key_weight is None else weight / 2)
    positives = torch.bincount(class_of, minlength=num_classes) if key_weight is None else 0
    total = x.new_zeros(num_classes).index_add_(0, class_of, weight)
    factor, valid = _shares_of(total, sums[2 * x.numel() :] > positives)
    share = weight * factor[class_of]
    loss = x.new_zeros(num_classes).index_add_(0, class_of, share * (r_n / (r_n + r_p)))
    if not with_grad:
        return loss, None, valid

    square = (r_n + r_p) ** 2
    slopes = torch.stack([share * r_p / square, -share * r_n / square], dim=1)  # [P, 2] dloss/dR
    gradient, of_queries = torch.zeros_like(scores, dtype=torch.float64), torch.zeros_like(x)
    for (classes, place), (queries, keys, class_sums) in zip(groups, graphs):
        real = place >= 0
        upstream = torch.where(real[:, :, None], slopes[place.clamp_min(0)], 0.0)
        grad_queries, gradient[classes] = torch.autograd.grad(class_sums, (queries, keys), upstream)
        of_queries[place[real]] = grad_queries[real]
    of_queries = exchange.sum(of_queries, "the gradients of the positives")
    gradient[rows.class_of, rows.row_of] += of_queries.split(counts)[exchange.rank]
    return loss, gradient.to(scores.dtype), valid


def _groups(class_of: Tensor, num_classes: int) -> list[tuple[Tensor, Tensor]]:
    """Return groups of classes (c,) with positives, and the places (c, q) of these with a padding of -1."""
    order = class_of.argsort(stable=True)
    count = torch.bincount(class_of, minlength=num_classes)
    first = count.cumsum(0) - count
    kind = torch.frexp(count.double()).exponent  # 0 without positives, 1 with one, 2 with two or three ...
    groups = []
    for exponent in kind.unique().tolist():
        if exponent == 0:
            continue
        classes = (kind == exponent).nonzero()[:, 0]
        column = torch.arange(int(count[classes].max()), device=class_of.device)
        inside = column < count[classes, None]
        place = order[(first[classes, None] + column).clamp_max(max(0, order.numel() - 1))]
        groups.append((classes, torch.where(inside, place, -1)))
    return groups
