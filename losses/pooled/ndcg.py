"""Smooth NDCG: a loss of graded relevance, for one ranking or one ranking per query."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...distributed.exchange import check_rows
from ...distributed.gather import check_not_gathered, gather_agreed
from ...distributed.header import DeviceCheck, Offer, agree_on, combined
from ...distributed.torch_private import not_compiled, note_kind
from ...errors import check_choice, check_count, check_int, check_temperature, check_tensor, expected
from ...kernels import native
from ...kernels.costs import costs_of
from ...kernels.registration import check_not_batched, with_gradients
from ...kernels.sigmoid_sums import sigmoid_sums
from ...kernels.smooth_ap.sums import move_infinities
from ...kernels.spread import spread_of
from ...kernels.torch_private import is_followed
from ..arguments import completed
from ..base import CurrentTemperature, DistributedLoss, GroupOptions
from ..hints import Empty
from ..rows import (
    check_device,
    check_values,
    checked_indexes,
    compute_dtype,
    has_values,
    in_memory,
    may_hold,
    query_weight,
    weight_of_rows,
)
from .base import NO_QUERY
from .pool import REDUCTIONS, PerClass, Reduction, query_blocks, reduce_values

SPREAD_MULTIPLE = 0.1  # of the spread of the scores: the automatic temperature
NO_GRADES = Empty(
    "no query had rows of different relevance, of which one is above 0",
    f"{NO_QUERY.fix} If no row has a relevance above 0, look at the targets.",
)
MOST_GRADES = 4096  # whole numbers up to it are counted, which is cheaper than sorting them
LARGEST_EXPONENT = 1000.0  # 2 to this power, times any number of rows, is finite in float64


@completed()
class NDCGLoss(CurrentTemperature):
    r"""One minus the smooth normalised discounted cumulative gain, with graded relevance.

    With :math:`r_i = 1 + \sum_{j \ne i} \sigma((x_j - x_i)/\tau)`, the soft rank of row i in its query, and :math:`g_i`
    its gain,

    .. math:: L = 1 - \frac{1}{I} \sum_i \frac{g_i}{\log_2(1 + r_i)},

    where I is the same sum in the best order. It is one minus ``ndcg_score`` of scikit-learn and
    ``RetrievalNormalizedDCG`` of torchmetrics to 1e-6 where no two scores of a query are within 15 temperatures of each
    other. Rows with closer scores share their places.

    Args:
        temperature: > 0, width of the sigmoid that replaces the step, in units of the scores. None, the default, is
            automatic: 0.1 times the spread of the scores.
        gain: of a relevance: ``"linear"``, the relevance itself, or ``"exponential"``, 2 to its power, minus 1.
        top: count only the first k places, as NDCG@k does: a row counts fully up to rank k, and less and less up to
            k + 1. Rows beyond have no gradient of their own, so start a training with None, which counts all places.
        reduction: ``"mean"`` or ``"sum"`` over the queries with a relevance above 0, 0 with zero gradients if there is
            none; or ``"none"`` for (queries,), by sorted indexes, with NaN for the others.
        ignore_index: rows with this relevance take no part.

    Numerics:
        Half precision is computed in float32, sums in float64. The soft ranks take time linear in the rows of a query,
        or quadratic for few rows. Queries may be padded to similar lengths, which at most doubles the rows.

    Distributed:
        One collective forward, the header with the rows of all ranks, or two if they do not fit. None backward. Every
        rank gets the same value.

    Example:
        >>> import torch
        >>> loss = NDCGLoss(temperature=0.01)
        >>> loss(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([0, 1, 3]))
        tensor(0.4131)

    Reference:
        Qin, Liu and Li, A General Approximation Framework for Direct Optimization of IR Measures, 2010, eq. 16 and 18.
    """

    _shown = "gain", "top", "reduction", "ignore_index", "gradient_reduction"
    _checks = CurrentTemperature._checks | {
        "gain": partial(check_choice, choices=("linear", "exponential")),
        "top": lambda name, value: None if value is None else check_count(name, value, 1),
        "reduction": partial(check_choice, choices=REDUCTIONS),
        "ignore_index": check_int,
    }

    def __init__(
        self,
        temperature: float | None = None,
        *,
        gain: Literal["linear", "exponential"] = "linear",
        top: int | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(gather_distributed, **options)
        self._start_temperature(check_temperature(temperature, automatic=True))
        self.gain, self.top, self.reduction, self.ignore_index = gain, top, reduction, ignore_index

    @completed(DistributedLoss)
    @not_compiled
    def forward(
        self,
        logits: Tensor,
        relevance: Tensor,
        indexes: Tensor | None = None,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the rows of all ranks, a scalar, or (queries,) with ``reduction="none"``.

        Args:
            logits: (N,) or (N, 1) raw scores of this rank; N may differ between ranks and may be 0.
            relevance: (N,) or (N, 1) numbers >= 0, or ``ignore_index``; higher is more relevant.
            indexes: (N,) integers, the query of each row, on every rank or on none; the same index on two ranks is the
                same query. Without them all rows of all ranks are one query.
            sample_weight: (N,) >= 0, on every rank or on none: a query has the mean weight of its rows in the mean or
                the sum over the queries. No effect with ``reduction="none"``.
        """
        call, group = type(self).__name__, self._resolve_group()

        def bring() -> Offer[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
            check_not_gathered(group, logits=logits, relevance=relevance)
            check_temperature(self.temperature, automatic=True)
            rows = checked_grades(logits, relevance, indexes)
            weight, of_weight = weight_of_rows(sample_weight, logits, "logits", self.validate_args)
            of_grades = relevance_check(rows[1], self.gain, self.ignore_index) if self.validate_args else None
            tensors, check = (*rows, weight), combined([of_grades, of_weight])
            names = "logits", "relevance", "indexes", "sample_weight"
            return Offer(tensors, self._facts(), check=check, tensors=tensors, names=names)

        if group is None:
            rows = agree_on(call, None, bring).value
        else:
            agreed = gather_agreed(call, group, bring, gradient_reduction=self.gradient_reduction)
            rows = agreed.tensors
        loss = self._loss(*rows)
        if has_values(loss) and self._hints.should_observe(self, loss):
            self._hints.observe_valid(self._differ(*rows[1:3]), NO_GRADES)
            if group is not None:
                self._hints.observe_ranks(agreed.rows, rows)
        return loss if group is None else note_kind(loss, over_ranks=True)

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def _differ(self, grades: Tensor, indexes: Tensor | None) -> Tensor:
        """Return in which queries two rows differ in relevance."""
        query = torch.zeros_like(grades, dtype=torch.int64)
        query = query if indexes is None else indexes.unique(return_inverse=True)[1]
        ends, ignored = [], grades == self.ignore_index
        for way, nothing in (("amin", math.inf), ("amax", -math.inf)):
            start = torch.full_like(grades, nothing)  # there are no more queries than rows
            ends.append(start.scatter_reduce(0, query, grades.masked_fill(ignored, nothing), way))
        return ends[0] < ends[1]

    def _loss(self, logits: Tensor, grades: Tensor, indexes: Tensor | None, weight: Tensor | None) -> Tensor:
        dtype, member, weight = compute_dtype(logits.dtype), None, query_weight(weight, self.reduction)
        scores = logits.to(dtype)
        # Build the mask on an accelerator anyway: asking whether it is needed would wait for the device.
        if grades.device.type != "cpu" or may_hold(grades, self.ignore_index):
            member = grades != self.ignore_index
            scores, grades = (torch.where(member, column, 0.0) for column in (scores, grades))
        temperature = self.temperature
        if temperature is None:
            temperature = SPREAD_MULTIPLE * spread_of(scores[None], None if member is None else member[None])
        vars(self)["_last_temperature"] = temperature
        loss = self._in_c(scores, grades, member, weight, indexes, temperature)
        if loss is not None:
            return loss
        if indexes is None:
            whole = None if member is None else member[None]
            values, valid = self._of_queries(scores[None], grades[None], whole, temperature)
            factors = None if weight is None else _mean_of_rows(weight[None], whole)
        else:
            num_queries, blocks = query_blocks(indexes)
            values = scores.new_zeros(num_queries, dtype=torch.float64)
            values = values + scores[:0].sum()  # connects the loss to the rows even without a block
            valid = grades.new_zeros(num_queries, dtype=torch.bool)
            factors = None if weight is None else weight.new_zeros(num_queries)
            for block in blocks:
                inside = block.present if member is None else block.take(member)
                of_block = self._of_queries(block.take(scores), block.take(grades), inside, temperature)
                values = values.index_copy(0, block.queries, of_block[0])
                valid[block.queries] = of_block[1]
                if factors is not None and weight is not None:
                    factors[block.queries] = _mean_of_rows(block.take(weight), inside)
        values = values if factors is None else values * factors
        return reduce_values(PerClass(values, valid), self.reduction, dtype, factors, of_pool=indexes is None)

    def _in_c(
        self,
        scores: Tensor,
        grades: Tensor,
        member: Tensor | None,
        weight: Tensor | None,
        indexes: Tensor | None,
        temperature: float,
    ) -> Tensor | None:
        """Return the loss of few rows of each query on the host from one call of C; None if it does not apply."""
        if self.reduction == "none" or not native.is_usable(scores) or is_followed():
            return None
        of_rows, gains, is_mean = scores.detach(), self._gains(grades), self.reduction == "mean"
        with_grad, order = torch.is_grad_enabled() and scores.requires_grad, None
        most = costs_of(scores.device).most_native_pairs(1, len(scores))
        numbers = float(temperature), self.top, is_mean, with_grad, most
        found = native.ndcg(of_rows, gains, member, weight, indexes, *numbers)
        if found is None and indexes is not None and bool((indexes[1:] < indexes[:-1]).any()):
            order = indexes.argsort(stable=True)
            member, weight = (None if row is None else row[order] for row in (member, weight))
            found = native.ndcg(of_rows[order], gains[order], member, weight, indexes[order], *numbers)
        if found is None:
            return None
        loss, gradient = found[0].to(scores.dtype), found[1]
        if gradient is not None:
            gradient = gradient if order is None else torch.empty_like(gradient).index_copy_(0, order, gradient)
            loss = with_gradients("a ranking loss", loss, [gradient], scores)
        return note_kind(loss, mean=True, of_pool=indexes is None) if is_mean else loss

    def _of_queries(
        self, scores: Tensor, grades: Tensor, member: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss (q,) float64 of queries of L rows each, 0 outside of ``member``, and which are valid."""
        undefined = None
        if not bool(scores.detach().sum().isfinite()):
            undefined = scores.isnan().any(dim=1)  # [q]
            scores, _, clashes = move_infinities(scores, grades > 0, member, temperature)
            undefined = undefined | clashes
        rows = scores
        if len(scores) == 1:  # the ranks of rows without a gain have no effect
            places = grades[0].ne(0).nonzero()[:, 0]
            rows, grades = scores.index_select(1, places), grades.index_select(1, places)
        weights = torch.ones_like(scores) if member is None else member.to(scores.dtype)
        above = sigmoid_sums(rows, scores.contiguous(), weights[:, :, None], temperature)[:, :, 0]  # [q, P]
        ranks = above.double() + 0.5  # a row is half above itself
        discount = 1 / (1 + ranks).log2()
        if self.top is not None:
            discount = discount * (self.top + 1 - ranks).clamp(0, 1)
        ideal = self._ideal(grades)
        valid = ideal > 0
        values = 1 - (self._gains(grades) * discount).sum(dim=1) / torch.where(valid, ideal, 1.0)
        values = torch.where(valid, values, 0.0)
        return values if undefined is None else values * torch.where(undefined, math.nan, 1.0), valid

    def _gains(self, grades: Tensor) -> Tensor:
        return grades.double().exp2() - 1 if self.gain == "exponential" else grades.double()

    def _ideal(self, grades: Tensor) -> Tensor:
        """Return the discounted cumulative gain (q,) of the best order of relevances (q, P)."""
        count = grades.shape[1] if self.top is None else min(self.top, grades.shape[1])
        discount = 1 / (torch.arange(count, dtype=torch.float64, device=grades.device) + 2).log2()
        if count < grades.shape[1]:
            return self._gains(grades.topk(count, dim=1).values) @ discount
        if len(grades) == 1 and grades.numel() > MOST_GRADES:
            whole = grades[0].clamp(0, MOST_GRADES).to(torch.int64)
            if torch.equal(whole.to(grades.dtype), grades[0]):
                so_far = torch.cat([discount.new_zeros(1), discount.cumsum(0)])
                counts = torch.bincount(whole).flip(0)  # the rows of each relevance, the highest first
                ends = counts.cumsum(0)
                levels = torch.arange(len(ends) - 1, -1, -1, device=grades.device)
                return (self._gains(levels) @ (so_far[ends] - so_far[ends - counts]))[None]
        return self._gains(grades.sort(dim=1, descending=True).values) @ discount


def _mean_of_rows(weight: Tensor, member: Tensor | None) -> Tensor:
    """Return the mean (q,) of the weights (q, L) of the members of each query, 0 without any."""
    return weight.mean(dim=1) if member is None else (weight * member).sum(dim=1) / member.sum(dim=1).clamp_min(1)


def checked_grades(logits: Tensor, relevance: Tensor, indexes: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the checked scores, relevances, detached, and queries of the rows, (N,) each."""
    check_tensor("logits", logits)
    check_tensor("relevance", relevance)
    check_not_batched(logits, relevance, indexes)
    check_rows([logits])
    if not logits.is_floating_point():
        raise TypeError(expected("logits", "a floating-point tensor", logits, "Use logits.float()."))
    count = logits.shape[:1]
    if logits.ndim == 0 or tuple(logits.shape) not in ((*count,), (*count, 1)):
        fix = "One score per row; the query of each row goes to indexes."
        raise ValueError(expected("logits", "shape (N,) or (N, 1)", logits, fix))
    if relevance.is_complex():
        raise TypeError(expected("relevance", "a tensor of real numbers", relevance))
    if tuple(relevance.shape) not in ((*count,), (*count, 1)):
        what = f"shape ({count[0]},), one entry per row of logits"
        raise ValueError(expected("relevance", what, relevance, "Use flatten() on both, and indexes."))
    check_device("relevance", relevance, logits)
    indexes = None if indexes is None else checked_indexes(indexes, logits)
    check_values("logits", logits)
    grades = in_memory(relevance).detach().reshape(-1).to(compute_dtype(logits.dtype))
    return in_memory(logits).reshape(-1), grades, indexes


def relevance_check(grades: Tensor, gain: str, ignore_index: int) -> DeviceCheck | None:
    """Return the check that every relevance is in range; None if that is known already, or not to be checked."""
    most = LARGEST_EXPONENT if gain == "exponential" else torch.finfo(grades.dtype).max
    if grades.is_meta or grades.numel() == 0:
        return None
    if grades.device.type == "cpu":  # there the common case takes one pass
        low, high = torch.stack(grades.aminmax()).tolist()
        if low >= 0 and high <= most:
            return None
    bad = ~((grades >= 0) & (grades <= most)) & (grades != ignore_index)

    def error() -> Exception:
        limit = f"at most {most:g} with exponential gain" if gain == "exponential" else "finite"
        what = f"numbers >= 0, {limit}, or ignore_index={ignore_index}"
        return ValueError(expected("relevance", what, grades[bad][0].item()))

    return DeviceCheck(bad.any(), error)
