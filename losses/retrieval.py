"""Smooth average precision for metric learning: every embedding is a query that ranks all others.

The (N, N) similarities are never in memory together: a few queries are ranked at a time, and their gradient is added up
at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..distributed.exchange import Exchange
from ..distributed.gather import gather_agreed
from ..distributed.header import Offer, State, refuse_in_backward
from ..distributed.torch_private import not_compiled
from ..errors import anchor_of, check_choice, check_int, check_tensor, expected, first_order_only
from ..kernels.costs import costs_of
from ..kernels.registration import check_not_batched, exact, register
from ..kernels.soft_ranks import smooth_ap_sums
from ..kernels.spread import MOST_SCORES, evenly_spaced, spread_of
from .arguments import completed
from .batch import check_device, compute_dtype, has_values, is_integer
from .distributed_loss import (
    SAME_TEMPERATURE,
    CurrentTemperature,
    DistributedLoss,
    GroupOptions,
    loaded_temperature,
    saved_temperature,
)
from .pool import REDUCTIONS, PerClass, Reduction, check_temperature, reduce_values

SPREAD_MULTIPLE = 0.1  # of the spread of the similarities: the automatic temperature
FEWEST_SPLIT = 256  # rows of all ranks: with fewer, each rank computes all queries before the others' would arrive


def retrieval_smooth_ap(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float | None = 0.01,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
) -> Tensor:
    r"""Compute one minus the smooth average precision of every row as a query against all other rows.

    With :math:`x_{qj} = \cos(z_q, z_j)` and :math:`P_q` the other rows that have the label of q,

    .. math::
        L_q = 1 - \frac{1}{|P_q|} \sum_{i \in P_q}
            \frac{1 + \sum_{j \in P_q, j \ne i} \sigma((x_{qj} - x_{qi})/\tau)}
                 {1 + \sum_{j \ne i, j \ne q} \sigma((x_{qj} - x_{qi})/\tau)}

    Equal to :func:`~fullrank.losses.smooth_ap` of the N (N - 1) similarities with ``indexes`` that name the query.

    Args:
        embeddings: (N, D) of any scale; the loss normalises them.
        labels: (N,) or (N, 1) integers or bools, in any order and number: classes may differ in size, and a row may be
            the only one of its label.
        temperature: > 0, width of the sigmoid that replaces the step, in units of the cosine. None is automatic: 0.1
            times the spread of the similarities, which is their interquartile range over 1.349.
        reduction: ``"mean"`` or ``"sum"`` over the valid queries, or ``"none"`` for (N,).
        ignore_index: rows with this label take no part: they are not queries, and no query ranks them.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate:
        A query without another row of its label, or without one of another label, is invalid: left out of the mean and
        the sum, NaN under ``"none"``. Ignored rows are NaN under ``"none"`` too. With no valid query the loss is 0 with
        zero gradients. An embedding of zeros has a cosine of 0 with all others, and the gradient of one of length 1.

    Numerics:
        Half precision is computed in float32. O(N^2) time for the similarities and the sums, O(N D) memory. If the
        incoming gradient differs between queries, as it can after ``reduction="none"``, the backward computes the
        queries again.

    Example:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0], [-1.0, 1.0]])
        >>> retrieval_smooth_ap(embeddings, torch.tensor([0, 0, 1, 1]))
        tensor(0.5417)

    Reference:
        Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020, eq. 6.
    """
    check_temperature(temperature, automatic=True)
    check_choice("reduction", reduction, REDUCTIONS)
    check_int("ignore_index", ignore_index)
    return _loss(*_check_rows(embeddings, labels), temperature, reduction, ignore_index)[0]


@completed(retrieval_smooth_ap)
class RetrievalSmoothAPLoss(CurrentTemperature, DistributedLoss):
    """One minus the smooth average precision of every embedding as a query against those of all ranks.

    The formula is that of :func:`~fullrank.losses.retrieval_smooth_ap`. The embeddings of all ranks are gathered with
    gradient and normalised, and each of them ranks all others by cosine similarity. The temperature may be assigned
    between steps, a number or None. ``current_temperature`` is the temperature of the last call.

    Args:
        reduction: ``"mean"`` or ``"sum"`` over the valid queries, or ``"none"`` for a value for each row of all ranks.
        validate_args: taken for symmetry with the other losses; it has no effect here, because every integer is a valid
            label and no check reads values. Types, shapes and devices are always checked.

    Shape:
        embeddings (N, D), labels (N,); N may differ between ranks and may be 0. Output scalar, or with
        ``reduction="none"`` (sum over ranks of N,), in rank order.

    Distributed:
        Four collectives forward: the header, one payload with the rows of all ranks, the losses of the queries, and one
        reduce-scatter of gradients. None backward. Each rank computes the queries of its own rows, and every rank gets
        the same value. With fewer than 256 rows in all, two collectives: every rank computes all queries. The same
        holds in backward after ``reduction="none"``, if the incoming gradient differs between queries.

    Example:
        >>> import torch
        >>> loss = RetrievalSmoothAPLoss()
        >>> loss(torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 0, 1, 1]))
        tensor(0.5417)
    """

    def __init__(
        self,
        temperature: float | None = 0.01,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(gather_distributed, **options)
        self.temperature = check_temperature(temperature, automatic=True)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.ignore_index = check_int("ignore_index", ignore_index)

    @not_compiled
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the rows of all ranks.

        Args:
            embeddings: (N, D) of this rank; N may differ between ranks and may be 0.
            labels: (N,) or (N, 1) integers or bools.

        Raises:
            TypeError, ValueError: for arguments that do not fit; on every rank.
            RuntimeError: when ranks disagree about the call, or inside activation checkpointing.
        """
        call = type(self).__name__
        refuse_in_backward(call)

        def check() -> tuple[Tensor, Tensor]:
            check_temperature(self.temperature, automatic=True)
            return _check_rows(embeddings, labels)

        def bring() -> Offer[None]:
            self._check_not_gathered(group, embeddings=embeddings, labels=labels)
            tensors = check()
            facts = {**self._shared_facts(), "temperature": State(self.temperature, SAME_TEMPERATURE)}
            return Offer(None, facts, tensors=tensors)

        group = self._resolve_group()
        split = None
        if group is None:
            rows = check()
        else:
            gathered = gather_agreed(call, group, bring, gradient_reduction=self.gradient_reduction)
            rows = gathered.tensors
            if sum(gathered.rows) >= FEWEST_SPLIT:
                split = _Split(Exchange(call, group), gathered.rows)
        loss, used = _loss(*rows, self.temperature, self.reduction, self.ignore_index, split)
        if has_values(loss):
            self._last_temperature = used
        return loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def get_extra_state(self) -> dict[str, Any]:
        """Return what changes during training: the temperature."""
        return {"temperature": saved_temperature(self.temperature)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self.temperature = loaded_temperature(state["temperature"])

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``, and for the comparison between ranks."""
        names = ("reduction", "ignore_index", "gradient_reduction")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _check_rows(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings and the labels as int64, or raise TypeError or ValueError."""
    check_tensor("embeddings", embeddings)
    check_tensor("labels", labels)
    check_not_batched(embeddings, labels)
    if not embeddings.is_floating_point():
        raise TypeError(expected("embeddings", "a floating-point tensor", embeddings, "Use embeddings.float()."))
    if embeddings.ndim != 2 or embeddings.shape[1] == 0:
        raise ValueError(expected("embeddings", "shape (N, D), D >= 1", embeddings, "Use embeddings.flatten(1)."))
    if not is_integer(labels) and labels.dtype != torch.bool:
        raise TypeError(expected("labels", "integers or bools", labels, "Use labels.long() on class indices."))
    count = embeddings.shape[0]
    if tuple(labels.shape) == (count, 1):
        labels = labels[:, 0]
    if tuple(labels.shape) != (count,):
        wanted = f"shape ({count},) or ({count}, 1), one entry per row of embeddings"
        raise ValueError(expected("labels", wanted, labels))
    check_device("labels", labels, embeddings, "embeddings")
    return embeddings, labels.to(torch.int64)


@not_compiled
def _loss(
    embeddings: Tensor,
    labels: Tensor,
    temperature: float | None,
    reduction: str,
    ignore_index: int,
    split: _Split | None = None,
) -> tuple[Tensor, float]:
    """Return the loss of rows that have been checked, and the temperature."""
    rows = torch.arange(labels.shape[0], device=labels.device)
    kept = rows[labels != ignore_index] if has_values(labels) else rows  # on the meta device the shapes of all rows
    unit = _directions(embeddings.index_select(0, kept))
    with_grad = unit.requires_grad and torch.is_grad_enabled()
    if temperature is None:
        temperature = SPREAD_MULTIPLE * (_spread(unit.detach()) if has_values(unit) else 1.0)
    if split is None:
        values, valid, _ = _queries(unit, labels.index_select(0, kept), temperature, with_grad)
    else:
        # The rows kept of all ranks together are read at once, whatever the number of ranks.
        so_far = F.pad((labels != ignore_index).cumsum(0), (1, 0))
        ends = torch.tensor([0, *itertools.accumulate(split.rows)], device=labels.device)
        counts = tuple(so_far[ends].diff().tolist())
        anchors = [anchor_of(unit)] if with_grad else []
        given = unit, labels.index_select(0, kept), temperature, with_grad
        values, valid = _SplitQueries.apply(split._replace(rows=counts), *given, *anchors)
    per_query = PerClass(values, valid)
    loss = reduce_values(per_query, reduction, unit.dtype)
    if reduction == "none":
        loss = loss.new_full(labels.shape, math.nan).index_copy(0, kept, loss)
    return loss, temperature


def _spread(unit: Tensor) -> float:
    """Return the spread of the similarities of different rows (M, D), from an even sample of the ordered pairs."""
    count = unit.shape[0]
    pairs = count * (count - 1)
    if pairs == 0:
        return 1.0
    chosen = evenly_spaced(min(pairs, MOST_SCORES), pairs, unit.device)
    query, other = chosen // (count - 1), chosen % (count - 1)
    other = other + (other >= query)  # a query does not rank itself
    similarities = (unit.index_select(0, query) * unit.index_select(0, other)).sum(dim=1)
    return spread_of(similarities[None], None)


def _directions(embeddings: Tensor) -> Tensor:
    """Return the embeddings (N, D) scaled to length 1, in the dtype of the computation. Rows of zeros stay zeros.

    Each row is first divided by its largest entry, so that no square overflows or underflows. This does not change the
    direction, so the entry is a constant for the gradient. The length is then at least 1, or 0 for a row of zeros.
    """
    embeddings = embeddings.to(compute_dtype(embeddings.dtype))
    largest = embeddings.detach().abs().amax(dim=1, keepdim=True)
    scaled = embeddings / torch.where(largest > 0, largest, torch.ones_like(largest))
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / length.clamp_min(1.0)


def _with_gradient(unit: Tensor, labels: Tensor, temperature: float, with_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return one minus the smooth average precision of each row as a query, and which are valid, and the gradient.

    A query is valid if it has a positive, which is another row of its label, and a negative.

    ======== ========= ====================================================================
    tensor   shape     meaning
    ======== ========= ====================================================================
    z        (M, D)    rows of length 1, float32 or float64
    y        (M,)      their labels, int64
    L        (M,)      loss of each query, float64; 0 where not valid, NaN if a similarity is
    G        (M, M)    dL_q / dx_qj, of which a few rows are held at a time
    dz       (M, D)    (g G) z + (g G)^T z, g the incoming gradient on the diagonal
    ======== ========= ====================================================================

    The forward adds up dz for g = 1, because it has the rows of G in memory. If g is the same for all queries, as after
    a mean or a sum, the backward multiplies that by g. Otherwise the backward computes the rows of G again.
    """
    ones = torch.ones(unit.shape[0], dtype=torch.float64, device=unit.device) if with_grad else None
    values, valid, gradient = _sums_of_queries(unit, labels, temperature, ones)
    return values, valid, unit.new_empty(0) if gradient is None else gradient


def _scaled_or_again(
    grad_values: Tensor, unit: Tensor, labels: Tensor, counted: Tensor, gradient: Tensor, temperature: float
) -> tuple[Tensor]:
    """Return dz for the incoming gradient."""
    factors = grad_values[counted]
    if factors.numel() == 0 or bool((factors == factors[0]).all()):
        return (gradient * factors[:1].sum().to(gradient.dtype),)
    again = _sums_of_queries(unit, labels, temperature, grad_values)[2]
    assert again is not None
    return (again,)


def _sums_of_queries(
    unit: Tensor, labels: Tensor, temperature: float, factors: Tensor | None, queries: slice = slice(None)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss of each query (M,) float64, which are valid, and the gradient (M, D) of ``factors @ loss``.

    Only ``queries`` are computed; the others are 0 and not valid.
    """
    count = unit.shape[0]
    values, valid = unit.new_zeros(count, dtype=torch.float64), labels.new_zeros(count, dtype=torch.bool)
    gradient = None if factors is None else torch.zeros_like(unit)
    step = max(1, costs_of(unit.device).similarities_at_once // max(1, count))
    begin, end, _ = queries.indices(count)
    for first in range(begin, end, step):
        own = slice(first, min(first + step, end))
        scores = (unit[own] @ unit.t()).requires_grad_(factors is not None)  # [q, M]
        same = labels[own, None] == labels
        others = torch.ones_like(same)
        for mask in (same, others):
            mask.diagonal(first).fill_(False)  # a query does not rank itself
        with torch.set_grad_enabled(factors is not None):
            loss, valid[own] = smooth_ap_sums(scores, same, others, None, temperature)
        values[own] = loss.detach()
        if gradient is not None and factors is not None:
            (slope,) = torch.autograd.grad(loss, scores, factors[own])  # [q, M]
            gradient[own] += slope @ unit
            gradient += slope.t() @ unit[own]
    return values, valid, gradient


def _fake(unit: Tensor, labels: Tensor, temperature: float, with_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    values, valid = (unit.new_empty(unit.shape[0], dtype=dtype) for dtype in (torch.float64, torch.bool))
    return values, valid, torch.empty_like(unit) if with_grad else unit.new_empty(0)


def _fake_backward(
    grad_values: Tensor, unit: Tensor, labels: Tensor, counted: Tensor, gradient: Tensor, temperature: float
) -> tuple[Tensor]:
    return (torch.empty_like(unit),)


_queries = register(
    "retrieval_smooth_ap",
    forward=_with_gradient,
    fake=_fake,
    saved=lambda inputs, out: ((inputs[0], inputs[1], out[1] | out[0].isnan(), out[2]), inputs[2:3]),
    backward=_scaled_or_again,
    fake_backward=_fake_backward,
)


class _Split(NamedTuple):
    """The ranks that share the queries, and how many rows each has."""

    exchange: Exchange
    rows: tuple[int, ...]


class _SplitQueries(torch.autograd.Function):
    """Do what ``_queries`` does, with the queries of this rank alone.

    ======== ========== ==========================================================================
    tensor   shape      meaning
    ======== ========== ==========================================================================
    z        (M, D)     rows of length 1, those of all ranks
    L        (M,)       loss of each query, computed on the rank whose row it is and gathered
    G        (N_r, M)   dL_q / dx_qj for the queries of this rank
    dz       (N_r, D)   this rank's rows of the sum over the ranks of G z + G^T z: a reduce-scatter
    ======== ========== ==========================================================================

    The forward makes both exchanges, so the backward communicates nothing. The gradient of the rows of other ranks is
    0 here, because those ranks have it. If the incoming gradient differs between queries, the backward computes all
    queries again.
    """

    @staticmethod
    def forward(
        ctx: Any, split: _Split, unit: Tensor, labels: Tensor, temperature: float, with_grad: bool, *anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        exchange, rows = split
        first = sum(rows[: exchange.rank])
        own = slice(first, first + rows[exchange.rank])
        factors = unit.new_ones(unit.shape[0], dtype=torch.float64) if with_grad else None
        values, valid, gradient = exact(_sums_of_queries)(unit, labels, temperature, factors, own)
        values, valid = exchange.rows([values[own], valid[own]], rows)
        if gradient is not None:
            gradient = exchange.sum_own(gradient, rows, "the gradients")
            ctx.save_for_backward(unit, labels, valid | values.isnan(), gradient, *anchors)
        ctx.own, ctx.temperature, ctx.call = own, temperature, exchange.call
        ctx.mark_non_differentiable(valid)
        return values, valid

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_values: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        unit, labels, counted, gradient, *anchors = ctx.saved_tensors
        (of_own,) = exact(_scaled_or_again)(grad_values, unit, labels, counted, gradient, ctx.temperature)
        if of_own.shape != unit.shape:
            of_all = torch.zeros_like(unit)
            of_all[ctx.own] = of_own
            of_own = of_all
        return None, of_own, None, None, None, *[None] * len(anchors)
