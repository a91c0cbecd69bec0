"""Smooth average precision for metric learning: every embedding is a query that ranks all others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ...distributed.exchange import Exchange, describe_rows
from ...distributed.gather import check_not_gathered, gather_after
from ...distributed.header import Offer, agree_on
from ...distributed.torch_private import not_compiled, note_kind
from ...errors import check_choice, check_int, check_temperature, check_tensor, expected
from ...kernels.registration import check_not_batched
from ...kernels.spread import MOST_SCORES, evenly_spaced, spread_of
from ...queues.memory_queue import QueueRows
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions, HoldsQueue
from ..pooled.pool import REDUCTIONS, PerClass, Reduction, local_pool, reduce_values
from ..rows import check_device, checked_embeddings, has_values, is_integer, query_weight, unit_rows, weight_of_rows
from .base import NO_PAIR, check_like
from .retrieval_queries import Split, SplitQueries, queries

TENSORS = "embeddings", "labels", "sample_weight"  # the row-aligned arguments
NO_RANKING = NO_PAIR._replace(what="no row had both another one of its label and one of another label")
SPREAD_MULTIPLE = 0.1  # of the spread of the similarities: the automatic temperature
FEWEST_SPLIT = 256  # rows of all ranks: with fewer, computing all queries on each rank is faster than an exchange


@completed(local_pool)
def retrieval_smooth_ap(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float | None = 0.01,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    sample_weight: Tensor | None = None,
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
        labels: (N,) or (N, 1) integers or bools, in any order and number; a row may be the only one of its label.
        sample_weight: (N,) >= 0, of the rows as queries in the mean or the sum; no effect with ``"none"``. Every row
            counts as one where it is ranked.
        temperature: > 0, width of the sigmoid that replaces the step, in units of the cosine. None is automatic: 0.1
            times the spread of the similarities, which is their interquartile range over 1.349.
        reduction: ``"mean"`` or ``"sum"`` over the valid queries, or ``"none"`` for (N,).
        ignore_index: rows with this label take no part: they are not queries, and no query ranks them.

    Degenerate:
        A query without another row of its label, or without one of another label, is invalid: left out of the mean and
        the sum, NaN under ``"none"``. Ignored rows are NaN under ``"none"`` too. With no valid query the loss is 0 with
        zero gradients. An embedding of zeros has a cosine of 0 with all others, and a gradient as if its length were 1.

    Numerics:
        Half precision is computed in float32. O(N^2) time for the similarities and the sums, O(N D) memory. If the
        incoming gradient differs between queries, as after ``reduction="none"``, the backward computes them again.

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
    rows = checked_embeddings("embeddings", embeddings)
    weight, check = weight_of_rows(sample_weight, rows, "embeddings", True)
    if check is not None:
        check.read()
    return _loss([(rows, checked_labels(labels, rows))], weight, temperature, reduction, ignore_index)[0]


@completed(retrieval_smooth_ap)
class RetrievalSmoothAPLoss(HoldsQueue):
    """One minus the smooth average precision of every embedding as a query against those of all ranks.

    The formula is that of :func:`~fullrank.losses.retrieval_smooth_ap`; each embedding ranks the rows of the queue too,
    or those of a ``reference`` in place of the other embeddings.
    The temperature may be assigned between steps, a number or None. ``current_temperature`` is that of the last call.

    Args:
        reduction: ``"mean"`` or ``"sum"`` over the valid queries, or ``"none"`` for a value for each row of all ranks.
        validate_args: False turns the hints and the check of the values of weights off. Every integer is a valid label;
            types, shapes and devices are always checked.

    Distributed:
        The collectives of :func:`~fullrank.gather_rows` forward, one or two, one more for a reference, then a gather of
        the losses of the queries and one reduce-scatter of gradients. None backward. Each rank computes the queries of
        its own rows, and every rank gets the same value. With fewer than 256 rows in all, every rank computes all
        queries, and only the rows are gathered. Every rank also computes all queries in a backward after
        ``reduction="none"``, if the incoming gradient differs between queries.

    Example:
        >>> import torch
        >>> loss = RetrievalSmoothAPLoss()
        >>> loss(torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 0, 1, 1]))
        tensor(0.5417)
    """

    _checks = HoldsQueue._checks | {
        "reduction": partial(check_choice, choices=REDUCTIONS),
        "ignore_index": check_int,
    }
    _fixed = (*HoldsQueue._fixed, "ignore_index")

    def __init__(
        self,
        temperature: float | None = 0.01,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        gather_distributed: bool | None = None,
        *,
        queue_size: int = 0,
        num_features: int | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(gather_distributed, **options)
        self._make_embedding_queue(queue_size, num_features, ignore_index)
        self._start_temperature(check_temperature(temperature, automatic=True))
        self.reduction, self.ignore_index = reduction, ignore_index

    @completed(DistributedLoss)
    @not_compiled
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        reference: Tensor | None = None,
        reference_labels: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the rows of all ranks, a scalar, or with ``reduction="none"`` that of each, in rank order.

        Each of ``reference`` and ``sample_weight`` is passed on every rank or on none.

        Args:
            embeddings: (N, D) of this rank; N may differ between ranks and may be 0.
            labels: (N,) or (N, 1) integers or bools.
            reference: (M, D), another set, whose rows on all ranks the embeddings rank in place of each other, with a
                gradient. M may differ between ranks and may be 0. They enter the queue.
            reference_labels: (M,) or (M, 1), those of the reference.
            sample_weight: (N,) >= 0, of the rows as queries in the mean or the sum.
        """
        call, group = type(self).__name__, self._resolve_group()

        def bring() -> Offer[tuple[list[tuple[Tensor, Tensor]], Tensor | None]]:
            check_not_gathered(group, embeddings=embeddings, labels=labels, reference=reference)
            check_temperature(self.temperature, automatic=True)
            width = self.queue.num_classes if self.queue_size else None
            rows, targets = checked_embeddings("embeddings", embeddings, width), checked_labels(labels, embeddings)
            weight, check = weight_of_rows(sample_weight, rows, "embeddings", self.validate_args)
            facts, tensors = {} if group is None else self._facts(), (rows, targets, weight)
            sets, totals = [(rows, targets)], list[float]()
            if (reference is None) != (reference_labels is None):
                raise ValueError(expected("reference, reference_labels", "both or none of them", reference_labels))
            if reference is not None and reference_labels is not None:
                others = checked_embeddings("reference", reference, width)
                check_like("reference", others, rows, "embeddings")
                sets.append((others, checked_labels(reference_labels, others, "reference", "reference_labels")))
                facts, totals = {**facts, "reference": describe_rows(others)}, [float(len(others))]
            return Offer((sets, weight), facts, 0, totals, self._checksum, check=check, tensors=tensors, names=TENSORS)

        agreed, split = agree_on(call, group, bring), None
        sets, weight = agreed.value
        counts = [agreed.rows, *[tuple(int(number) for number, *_ in agreed.totals)] * (len(sets) - 1)]
        if group is not None:
            *rows, weight = gather_after(call, group, agreed, self.gradient_reduction)
            further = [replace(agreed, rows=counts[-1], tensors=others, arrived=None) for others in sets[1:]]
            others = [gather_after(call, group, one, self.gradient_reduction) for one in further]
            sets = [(rows[0], rows[1]), *others]
            if sum(map(sum, counts)) >= FEWEST_SPLIT:
                split = Split(Exchange(call, group), counts)
        loss, temperature, valid, live, live_labels = _loss(
            sets, weight, self.temperature, self.reduction, self.ignore_index, split, self._queued_rows()
        )
        if has_values(loss):
            vars(self)["_last_temperature"] = temperature
            if self._enqueues:
                self.queue.enqueue(live, live_labels)
            if self._hints.should_observe(self, loss):
                self._hints.observe_valid(valid, NO_RANKING)
                if group is not None:
                    what, more = ("rows", [weight]) if reference is None else ("reference", [])
                    self._hints.observe_ranks(counts[-1], [*sets[-1], *more], what)
                    self._hints.observe_labels(agreed.rows, sets[0][1])
        return loss if group is None else note_kind(loss, over_ranks=True)

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    @property
    def _shown(self) -> tuple[str, ...]:
        return "reduction", "ignore_index", "gradient_reduction", *(("queue_size",) if self.queue_size else ())


def checked_labels(
    labels: Tensor, embeddings: Tensor, rows_name: str = "embeddings", name: str = "labels", several: bool = False
) -> Tensor:
    """Return the labels of ``embeddings`` (N, D) as int64 (N,), or ``several`` as bools (N, C)."""
    check_tensor(name, labels)
    check_not_batched(labels)
    if not is_integer(labels) and labels.dtype != torch.bool:
        raise TypeError(expected(name, "integers or bools", labels, f"Use {name}.long() on class indices."))
    count = embeddings.shape[0]
    if tuple(labels.shape) == (count, 1):
        labels = labels[:, 0]
    columns = labels.shape[1:2] if several and labels.dtype == torch.bool else ()
    if tuple(labels.shape) != (count, *columns):
        what = f"shape ({count},) or ({count}, 1), one entry per row of {rows_name}"
        fix = "With views pass one label per row: all V views have it." if embeddings.ndim == 3 else ""
        if several and labels.ndim == 2 and not columns:
            fix = f"Several labels a row are bools: use {name}.bool()."
        raise ValueError(expected(name, what, labels, fix))
    check_device(name, labels, embeddings, rows_name)
    return labels if columns else labels.to(torch.int64)


@not_compiled
def _loss(
    sets: Sequence[tuple[Tensor, Tensor]],
    weight: Tensor | None,
    temperature: float | None,
    reduction: str,
    ignore_index: int,
    split: Split | None = None,
    queued: QueueRows | None = None,
) -> tuple[Tensor, float, Tensor, Tensor, Tensor]:
    """Return the loss, the temperature, which queries are valid, and the rows of length 1 that enter the queue.

    Of ``sets``, checked rows with their labels, the first are the queries, and the last what they rank.
    """
    parts, kept = list[tuple[Tensor, Tensor]](), list[Tensor]()
    for embeddings, labels in sets:
        index = torch.arange(labels.shape[0], device=labels.device)
        kept.append(index[labels != ignore_index] if has_values(labels) else index)
        parts.append((unit_rows(embeddings.index_select(0, kept[-1])), labels.index_select(0, kept[-1])))
    num_live, (live, live_labels) = len(kept[0]), parts[-1]
    weight = query_weight(None if weight is None else weight.index_select(0, kept[0]), reduction)
    if queued is not None:
        parts.append((queued.logits.to(live), queued.targets.to(live_labels)))
    unit, unit_labels = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))
    first = num_live if len(sets) > 1 else 0  # of the rows that are ranked
    with_grad = unit.requires_grad and torch.is_grad_enabled()
    of_all = None if weight is None else F.pad(weight, (0, len(unit) - num_live))  # the others are no queries
    if temperature is None:
        count = len(unit) - first
        num_queries, others = (num_live, count) if len(sets) > 1 else (count, count - 1)
        pairs, spread = num_queries * others, 1.0
        if pairs and has_values(unit):  # an even sample of the ordered pairs
            pair = evenly_spaced(min(pairs, MOST_SCORES), pairs, unit.device)
            query, other = pair // others, pair % others
            other = other + (first if len(sets) > 1 else other >= query)  # a query does not rank itself
            rows = unit.detach()
            spread = spread_of((rows.index_select(0, query) * rows.index_select(0, other)).sum(dim=1)[None], None)
        temperature = SPREAD_MULTIPLE * spread
    if split is None:
        values, valid, _ = queries(unit, unit_labels, temperature, with_grad, 0, num_live, first, of_all, None)
        values, valid = values[:num_live], valid[:num_live]
    else:
        counts = []
        for index, rows_of_each in zip(kept, split.counts):
            # How many rows of each rank are kept. One read for all ranks, so the device is waited for once.
            ends = torch.tensor([0, *itertools.accumulate(rows_of_each)], device="cpu")
            # Safe without waiting: torch has read so little unpinned memory before the call returns.
            ends = ends.to(index.device, non_blocking=True)
            counts.append(tuple(torch.searchsorted(index, ends).diff().tolist()))
        split = split._replace(counts=counts)
        values, valid = SplitQueries.apply(split, unit, unit_labels, temperature, with_grad, first, of_all)
    per_query = PerClass(values, valid)
    loss = reduce_values(per_query, reduction, unit.dtype, weight)
    if reduction == "none":
        loss = loss.new_full(sets[0][1].shape, math.nan).index_copy(0, kept[0], loss)
    return loss, temperature, valid, live.detach(), live_labels
