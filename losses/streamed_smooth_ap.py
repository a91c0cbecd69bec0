"""Smooth-AP of rows that come in parts and are never held together; see :mod:`fullrank.losses.sharded_smooth_ap`.

The moments of bins add up over parts as they do over ranks. So every part is seen twice: its moments are added to a
table, and once those of all parts and ranks are in it, the gradient of its rows is read from polynomials::

    each part -> moments, added up ==all-reduce==> loss, polynomials
                                     each part again -> gradient of its rows

The bins are on an absolute grid: bin k is around k widths. So a table grows at its ends when a score is outside of it,
and tables of different ranges add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.exchange import Exchange
from ..distributed.group import gradient_scale
from ..distributed.header import Offer, agree_on
from ..errors import Words, expected
from ..kernels.bins import MOST_EMPTY, Bins, cover, locate
from ..kernels.costs import costs_of
from ..kernels.node_tables import Order, order_for
from ..kernels.pairs import Problem
from ..kernels.registration import exact
from ..kernels.soft_ranks import ends_of
from ..kernels.soft_ranks_binned import find_places, moments_of, read_gradient, runs_of_classes, solve
from .batch import check_batch
from .pool import PerClass, one_vs_rest, reduce_values
from .sharded_smooth_ap import shares_of_moments
from .targets import TargetRule

MOST_BINS = MOST_EMPTY  # coarse bins of a table: scores over a wider range are refused
MOST_BYTES = 2**28  # of the table of all classes; the peak is several times that, with polynomials and copies
LEAST_UNIT = 2.0**-1000


class Stream(NamedTuple):
    """What a loss says about its rows before the first part, equal on all ranks."""

    call: str  # name of the loss, for the comparison between ranks and the head of messages
    group: ProcessGroup | None  # None when this process is alone
    rule: TargetRule
    temperature: float
    reduction: str
    gradient_reduction: str | int
    weighted: bool  # the rows have sample weights
    validate_args: bool
    facts: Mapping[str, object]  # what else must be equal on all ranks

    def parts(self, logits: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Iterator[tuple[Problem, Tensor]]:
        """Yield runs of rows, each small enough to be placed in bins at once, and (C,) which classes have a NaN in it.

        A row whose score is NaN takes no part: the loss of its class is NaN whatever the other rows are.
        """
        given = logits.detach(), targets, None, sample_weight
        batch = check_batch(*given, self.rule, validate_args=self.validate_args)
        pool = one_vs_rest(batch._replace(sample_weight=None), self.rule)
        count, num_classes = pool.scores.shape[1], self.rule.num_classes
        step = max(1, costs_of(pool.scores.device).rows_at_once // num_classes)
        for first in range(0, max(1, count), step):
            some = slice(first, first + step)
            scores, positive = pool.scores[:, some].contiguous(), pool.positive[:, some]
            member = None if pool.member is None else pool.member[:, some]
            undefined = scores.isnan()
            if bool(undefined.any()):
                scores, positive = scores.masked_fill(undefined, 0.0), positive & ~undefined
                member = ~undefined if member is None else member & ~undefined
            class_of, row_of = positive.nonzero(as_tuple=True)
            mass = scores.new_ones(row_of.shape, dtype=torch.float64)
            if batch.sample_weight is not None:
                mass = batch.sample_weight[some][row_of].double()
            yield Problem(scores, positive, member, class_of, row_of, mass, self.temperature), undefined.any(dim=1)


class StreamedTable:
    """A table of moments: :meth:`add` each part, :meth:`finish` on every rank, then read each :meth:`gradient`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._low, self._high = math.inf, -math.inf  # of the scores so far
        self._empty = torch.empty(0)  # on the device of the scores, and in the dtype of the computation
        self._undefined = torch.zeros(stream.rule.num_classes, dtype=torch.float64)  # [C] > 0 where a class has a NaN
        self._first = 0  # coarse bin at which the table begins
        self._unit = LEAST_UNIT if stream.weighted else 1.0  # what weights are divided by
        # [T, p, C, B F] float64: members, positives, and with weights those of the positives; None without a row
        self._table: Tensor | None = None

    @torch.no_grad()
    def add(self, logits: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Add the moments of a part; the arguments are those of the forward of the loss."""
        for rows, undefined in self._stream.parts(logits, targets, sample_weight):
            self._empty = rows.scores.new_empty(0)
            self._undefined = self._undefined.to(undefined.device) + undefined
            exact(self._add)(rows.scores, rows)

    def _add(self, scores: Tensor, rows: Problem) -> None:
        below, high = ends_of(scores, rows.member).amax(dim=1).tolist()
        low = -below
        if low > high:  # no row takes part
            return
        self._low, self._high = min(self._low, low), max(self._high, high)
        if self._bins_of(self._low, self._high) is None:
            self._table = None  # finish raises on every rank
            return
        bins, order = self._bins_of(low, high), self._order
        assert bins is not None
        self._cover(bins)
        assert self._table is not None
        bins = bins._replace(first=bins.first.to(scores.device).expand(scores.shape[0]))
        if self._stream.weighted:
            # By a power of two, which is exact, so that the largest weight is near 2**500: no sum overflows, and much
            # smaller ones keep their digits.
            most = float(rows.share.amax()) if rows.share.numel() else 0.0
            self._set_unit(max(LEAST_UNIT, 2.0 ** (math.frexp(most)[1] - 500)) if most > 0 else LEAST_UNIT)
            rows = rows._replace(share=rows.share / self._unit)
        start = (int(bins.first[0]) - self._first) * order.fine
        for held, new in zip(self._table, moments_of(rows, bins, order, find_places(rows, bins))):
            held[..., start : start + bins.num_fine] += new[..., :-1]

    def finish(self) -> StreamedTable:
        """Set ``value``, the loss over the parts of all ranks; a collective.

        Raises:
            ValueError: on every rank, when scores are infinite or too far apart for a table, the table of all classes
                would be too large, or ``gradient_reduction`` does not fit the model.
        """
        stream, low, high, unit, self._scale = self._stream, self._low, self._high, self._unit, 1
        if stream.group is not None:
            self._scale = gradient_scale(stream.gradient_reduction, stream.group)

            def bring() -> Offer[None]:
                facts = {"dtype": self._empty.dtype, "order": self._order, "weighted": stream.weighted}
                return Offer(None, {**stream.facts, **facts}, totals=(self._low, self._high, self._unit))

            lows, highs, units, _ = numpy.array(agree_on(stream.call, stream.group, bring).totals).T
            low, high, unit = float(lows.min()), float(highs.max()), float(units.max())  # NaN stays
        bins = self._bins_of(low, high)
        if bins is None:
            raise self._too_large(low, high)
        self._cover(bins)
        self._set_unit(unit)
        table, undefined = self._table, self._undefined
        self._table = None
        assert table is not None
        if stream.group is not None:
            exchange = Exchange(stream.call, stream.group)
            sums = exchange.sum(torch.cat([table.view(-1), undefined]), "the moments")
            table, undefined = sums[: table.numel()].view(table.shape), sums[table.numel() :]
        self._undefined = undefined > 0
        self._bins = bins._replace(first=bins.first.to(table.device).expand(stream.rule.num_classes))
        sums = F.pad(table, (0, 1))  # the bin of rows that take no part
        self._factor, valid = shares_of_moments(sums)  # [C] what weights are multiplied by
        given = self._bins, self._order, stream.temperature

        def solve_classes(sums: Tensor) -> list[tuple[Tensor, Tensor | None]]:
            runs = runs_of_classes(self._bins)
            return [solve([*sums[:, :, part]], *given, self._factor[part], True) for part in runs]

        losses, polynomials = zip(*exact(solve_classes)(sums))
        self._polynomials = torch.cat(polynomials, dim=2)  # [p, 3, C, B F + 1]
        self._per_class = torch.cat(losses).masked_fill(self._undefined, math.nan).requires_grad_()
        self.value = reduce_values(PerClass(self._per_class, valid), stream.reduction, self._empty.dtype)
        return self

    def _too_large(self, low: float, high: float) -> ValueError:
        """Return the error for scores from ``low`` to ``high``; equal on all ranks."""
        stream, num_classes = self._stream, self._stream.rule.num_classes
        found = f"scores from {low:g} to {high:g} at temperature {stream.temperature:g}"
        bins = self._bins_of(low, high, MOST_BINS)
        if bins is None:
            what = f"finite scores in a range of {2 * MOST_BINS:,} temperatures"
            fix = "Bound the scores or raise the temperature; without stream any scores will do."
        else:
            size = math.ceil(bins.window * self._bytes_per_bin / 2**20)
            what = f"a table of at most {MOST_BYTES >> 20} MiB"
            found = f"one of {size:,} MiB, with {num_classes} classes and {found}"
            fix = "Raise the temperature, bound the scores or use fewer classes; without stream there is no table."
        return ValueError(expected(f"{stream.call} with stream=True", what, Words(found), fix))

    @property
    def _order(self) -> Order:
        return order_for(self._empty, 0)  # that of few rows: the number of all is not known in the first pass

    @property
    def _shape(self) -> tuple[int, int, int]:
        """The shape of the table without that of its bins."""
        return 3 if self._stream.weighted else 2, self._order.p, self._stream.rule.num_classes

    @property
    def _bytes_per_bin(self) -> int:
        """The memory of a coarse bin of all classes in the table."""
        return 8 * math.prod(self._shape) * self._order.fine

    def _bins_of(self, low: float, high: float, most: int | None = None) -> Bins | None:
        """Return bins from ``low`` to ``high``, (1,) and on the host; None if more than ``most`` or the table may hold.

        Without a score ``low > high``, and there is one bin. What all ranks know decides that, so with the range over
        all ranks they take the same branch.
        """
        low, high = (low, high) if low <= high else (0.0, 0.0)
        if not math.isfinite(low) or not math.isfinite(high):
            return None
        ends = torch.tensor([[low], [high]], dtype=self._empty.dtype, device="cpu")
        bins = cover(ends[0], ends[1], self._stream.temperature, self._order.fine)
        most = min(MOST_BINS, MOST_BYTES // self._bytes_per_bin) if most is None else most
        return bins if bins.window <= most else None

    def _set_unit(self, unit: float) -> None:
        """Divide weights by ``unit`` from now on, and those in the table too, if it is larger than before."""
        if unit > self._unit:
            if self._table is not None:
                self._table[2:] *= self._unit / unit
            self._unit = unit

    def _cover(self, bins: Bins) -> None:
        order, first = self._order, int(bins.first[0])
        if self._table is None:
            self._first = first
            self._table = self._empty.new_zeros(*self._shape, bins.num_fine, dtype=torch.float64)
        held = self._table.shape[-1] // order.fine
        left, right = max(0, self._first - first), max(0, first + bins.window - self._first - held)
        if left or right:
            self._table = F.pad(self._table, (left * order.fine, right * order.fine))
            self._first -= left

    @property
    def num_bytes(self) -> int:
        """The memory of the table."""
        return 0 if self._table is None else self._table.numel() * self._table.element_size()

    def start(self, value: Tensor) -> None:
        """Let :meth:`gradient` be that of ``value``, a function of the attribute ``value`` alone."""
        (self._slope,) = torch.autograd.grad(value, self._per_class)  # [C]

    @torch.no_grad()
    def gradient(self, logits: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> Tensor:
        """Return the gradient of the rows of a part, in the form of ``logits``; the arguments as in the first pass."""
        parts = self._stream.parts(logits, targets, sample_weight)
        gradient = torch.cat([exact(self._read)(rows.scores, rows) for rows, _ in parts], dim=1)
        slope = (self._slope * self._scale).to(gradient.dtype).masked_fill(self._undefined, math.nan)
        return (gradient * slope[:, None]).t().reshape(logits.shape).to(logits.dtype)

    def _read(self, scores: Tensor, rows: Problem) -> Tensor:
        index, u = locate(self._bins, scores, slice(None))
        index.clamp_(0, self._bins.num_fine - 1)  # the score of a replay may be beyond the ends by its rounding
        if rows.member is not None:
            index.masked_fill_(~rows.member, self._bins.num_fine)
        rows = rows._replace(share=rows.share / self._unit * self._factor[rows.class_of])
        gradient = torch.empty_like(scores)
        read_gradient(self._polynomials, rows, self._bins, find_places(rows, self._bins, (index, u)), gradient)
        return gradient
