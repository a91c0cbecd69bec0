"""The kernel of Smooth-AP: the loss of each class and its gradient, in the form that is fastest for the pool.

The forms differ only by rounding: ``FORMS`` is the table of them, and costs.py says how many are few. The losses try
:func:`try_in_c` first: for a small pool on the host, one call of C computes the temperature too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor

from .. import native
from ..bins import Bins, find_bins
from ..costs import costs_of
from ..node_tables import Order, order_for
from ..pairs import Problem, weight_at
from ..registration import register, scaled, with_gradients
from ..spread import MOST_SCORES
from ..torch_private import is_followed
from .binned import smooth_ap_binned, smooth_ap_of_one_class, weighted_smooth_ap_in_c
from .direct import smooth_ap_direct, smooth_ap_sorted
from .plain import plain_is_faster, plain_loss_and_gradient, smooth_ap_plain

Results: TypeAlias = tuple[Tensor, Tensor, Tensor]


def smooth_ap_sums(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    method: str = "auto",
    num_positive: int | None = None,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return (C,) the weighted mean over positives i of ``1 - rank_pos_i / rank_i``, and (C,) which classes are valid.

    With :math:`s_{ij} = \sigma((x_j - x_i)/\tau)`, :math:`r_i = w_i + \sum_{j \in P, j \ne i} w_j s_{ij}` the soft rank
    among positives and :math:`n_i = \sum_{j \in N} w_j s_{ij}` the soft number of negatives above it,

    .. math:: 1 - \frac{r_i}{r_i + n_i} = \frac{n_i}{r_i + n_i}

    The right side loses no digits when a positive is ranked almost perfectly. A class is valid if it has a positive of
    positive weight and a negative. An invalid class has a loss of 0 with zero gradient. A class with a NaN score is
    NaN, valid or not. The gradient is linear in the incoming one, so the forward computes it together with the loss.

    Args:
        scores: (C, M) float32 or float64.
        positive: (C, M) bool, a subset of ``member``.
        member: (C, M) bool: the rows that take part; None for all.
        weight: (M,) or (C, M), >= 0, the weight of each row as a positive, in the mean; None for equal weights.
        temperature: > 0.
        method: ``"direct"`` sums pair by pair in O(positives x M) time. ``"binned"`` takes O(M) time, or
            O(M log M + interacting pairs) if the rows are so far apart that most bins would be empty. ``"plain"`` sums
            all M^2 pairs and reads no value. ``"auto"`` takes the fastest on the device.
        num_positive: the number of positives if the host knows it; otherwise the host may wait for the device.
        key_weight: None for 1, or ``weight``: w, the weight of each row where rows are compared, > 0 for members.
    """
    if torch.compiler.is_compiling() and (method == "plain" or (method == "auto" and plain_is_faster(scores))):
        return smooth_ap_plain(scores, positive, member, weight, temperature, key_weight)
    with_grad = scores.requires_grad and torch.is_grad_enabled()
    number = -1 if num_positive is None else num_positive
    rows = scores, positive, member, weight
    loss, _, valid = _smooth_ap(*rows, float(temperature), with_grad, method, number, key_weight)
    return loss, valid


def try_in_c(
    rows: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    key_weight: Tensor | None,
    ignore_index: int,
    temperature: float | None,
    multiple: float,
) -> tuple[Tensor, Tensor, float] | None:
    """Return the results of :func:`smooth_ap_sums` and the temperature from one call of C; None if it does not apply.

    It applies to few rows (M, C) on the host whose scores are finite, whose targets (M,) int64 are all classes, and
    whose weights (M,) have the dtype of the scores. A temperature of None is ``multiple`` times the spread of the
    scores.
    """
    if not (0 < len(targets) <= MOST_SCORES and rows.is_cpu and rows.dtype in native.FUNCTIONS) or is_followed():
        return None
    with_grad = torch.is_grad_enabled() and rows.requires_grad
    most = costs_of(rows.device).most_native_pairs(rows.shape[1], rows.numel())
    results = native.smooth_ap_rows(
        rows.detach(), targets, weight, key_weight, ignore_index, temperature, multiple, with_grad, most
    )
    if results is None:
        return None
    loss, valid, gradient, width = results
    return loss if gradient is None else with_gradients("a ranking loss", loss, [gradient], rows), valid, width


def smooth_ap_and_gradient(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    with_grad: bool,
    method: str = "auto",
    num_positive: int = -1,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (C,) float64, its gradient (C, M), empty unless ``with_grad``, and the validity (C,)."""
    call = _Call(scores, positive, member, weight, temperature, with_grad, method, num_positive, key_weight)
    for _, applies, compute in FORMS:
        if applies(call) and (results := compute(call)) is not None:
            return results
    raise AssertionError("the last form always applies")


@dataclass
class _Call:
    """The arguments of a call, and what decides on its form, found out when a form first asks for it."""

    scores: Tensor
    positive: Tensor
    member: Tensor | None
    weight: Tensor | None
    temperature: float
    with_grad: bool
    method: str
    num_positive: int
    key_weight: Tensor | None

    def __post_init__(self) -> None:
        self.rows = self.scores, self.positive, self.member, self.weight
        self.costs, self.num_rows = costs_of(self.scores.device), self.scores.shape[1]
        self.arguments = *self.rows, self.temperature, self.with_grad, self.key_weight
        is_known = self.num_positive >= 0 and self.member is None and self.weight is None
        self.lists_without_a_wait = is_known and self.pairs_are_best(self.num_positive)

    @cached_property
    def order(self) -> Order:
        """The numbers of fine bins and of nodes."""
        return order_for(self.scores, self.num_rows)

    def pairs_are_best(self, count: int, bins: Bins | None = None) -> bool:
        """Return whether the pairs of ``count`` positives take less time than the bins, None for the fewest."""
        num_pairs, num_bins = count * self.num_rows, 0 if bins is None else bins.num_coarse * len(self.scores)
        few = self.costs.pairs_are_faster(num_pairs, self.scores.numel(), num_bins)
        return self.method == "direct" or num_pairs == 0 or (self.method == "auto" and few)

    @property
    def has_few_rows(self) -> bool:
        """Whether all pairs of rows are few, or there is no row; a list without a wait pays from a quarter on."""
        num_pairs = self.scores.numel() * self.num_rows * (4 if self.lists_without_a_wait else 1)
        return num_pairs <= self.costs.plain_pairs if self.method == "auto" else self.method == "plain" or not num_pairs

    @property
    def has_few_pairs_for_c(self) -> bool:
        """Whether the pairs of positives and rows are few for C."""
        if self.method != "auto" or not self.scores.is_cpu:
            return self.method == "direct"
        return self.count * self.num_rows <= self.costs.most_native_pairs(len(self.scores), self.scores.numel())

    @cached_property
    def count(self) -> int:
        """The positives of all classes, on an accelerator of a single class."""
        return int(numpy.count_nonzero(self.positive.numpy())) if self.read is None else self.read.num_positive

    @cached_property
    def read(self) -> _OneClass | None:
        """What the host knows of a single class on an accelerator, for which it waits at most once."""
        if self.scores.is_cpu or len(self.scores) > 1:
            return None
        if self.lists_without_a_wait:
            return _OneClass(self.num_positive, self.num_rows, 1.0, None)
        (scores, positive, member, weight), number = self.rows, self.num_positive
        if member is None:
            values = [*scores.aminmax()]
        else:
            values = [torch.where(member, scores, math.inf).amin(), torch.where(member, scores, -math.inf).amax()]
        if number < 0:
            values.append(positive.sum(dtype=torch.float64))
        if member is not None:
            values.append(member.sum(dtype=torch.float64))
        if weight is not None:
            values.append(torch.where(positive, weight, 0.0).sum(dtype=torch.float64))
        dtype = scores.dtype if len(values) == 2 else torch.float64
        numbers = [*torch.stack([value.to(dtype) for value in values]).cpu()]
        low, high = (numbers.pop(0).to(scores.dtype)[None] for _ in range(2))
        number = int(numbers.pop(0)) if number < 0 else number
        num_member = self.num_rows if member is None else int(numbers.pop(0))
        return _OneClass(number, num_member, 1.0 if weight is None else float(numbers.pop()), (low, high))

    @cached_property
    def bins(self) -> Bins | None:
        """Bins of one class of equal weights or, in C, of rows with a ``key_weight``; None if pairs are best."""
        is_even = len(self.scores) == 1 and self.member is None and self.weight is None
        if self.read is None:
            fits = is_even or self.key_weight is not None
            fits = fits and native.is_usable(self.scores, self.positive, self.member, self.key_weight)
        else:
            fits = is_even and self.num_rows <= self.costs.rows_at_once and not self.costs.reads_freely
        if not fits or (is_even and not 0 < self.count < self.num_rows) or self.pairs_are_best(self.count):
            return None
        ends = None if self.read is None else self.read.ends
        low, high = _lowest_and_highest(self.scores) if ends is None else ends
        if not bool((low.isfinite() & high.isfinite()).all()):
            return None
        bins = find_bins(self.scores, low, high, self.temperature, self.order.fine)
        if bins is None or self.pairs_are_best(self.count, bins):
            return None
        fits = is_even or bins.num_coarse * len(self.scores) <= self.costs.tables_at_once
        return bins if fits and (bins.outside is None or (is_even and self.read is None)) else None

    @cached_property
    def problem(self) -> Problem:
        """The rows with a list of the positives of valid classes."""
        return _list_positives(self, *self.rows)

    @property
    def has_few_pairs(self) -> bool:
        """Whether the pairs of the listed positives and rows are few."""
        count = self.problem.share.numel()
        return self.pairs_are_best(count) or self.pairs_are_best(count, self.finite.bins)

    @cached_property
    def finite(self) -> _Finite:
        """The same with finite scores."""
        problem, low, high, undefined = _make_finite(self.problem, None if self.read is None else self.read.ends)
        return _Finite(problem, find_bins(problem.scores, low, high, self.temperature, self.order.fine), undefined)

    def completed(self, sums: tuple[Tensor, Tensor], undefined: Tensor | None = None) -> Results:
        """Return the loss and gradient with the validity, NaN in ``undefined`` classes and in those with a NaN."""
        (loss, gradient), valid = sums, self.problem.valid
        assert valid is not None
        if not self.problem.all_valid:  # the sums of a valid class already carry a NaN
            has_nan = self.scores.amax(dim=1).isnan()
            undefined = has_nan if undefined is None else undefined | has_nan
        if undefined is not None:
            loss = loss.masked_fill(undefined, math.nan)
            gradient = gradient.masked_fill_(undefined[:, None], math.nan) if self.with_grad else gradient
        return loss, gradient, valid


class _Finite(NamedTuple):
    problem: Problem
    bins: Bins | None  # None if most would be empty
    undefined: Tensor | None  # [C] bool, the classes that are NaN; None for none


def _without_a_list(call: _Call) -> Results:
    assert call.bins is not None
    settings = call.bins, call.order, call.temperature, call.with_grad
    if call.key_weight is not None:
        return weighted_smooth_ap_in_c(call.scores, call.positive, call.member, call.key_weight, *settings)
    sums = smooth_ap_of_one_class(call.scores, call.positive, call.count, *settings)
    return *sums, call.positive.new_ones(1)


def _by_pairs(call: _Call) -> Results:
    return call.completed(smooth_ap_direct(call.problem, call.with_grad))


def _by_bins(call: _Call) -> Results:
    problem, bins, undefined = call.finite
    assert bins is not None
    return call.completed(smooth_ap_binned(problem, bins, call.order, call.with_grad), undefined)


def _by_sorting(call: _Call) -> Results:
    return call.completed(smooth_ap_sorted(call.finite.problem, call.with_grad), call.finite.undefined)


# The first form that applies is taken. One that returns None leaves the call to the next.
FORMS: tuple[tuple[str, Callable[[_Call], bool], Callable[[_Call], Results | None]], ...] = (
    # It reads no value: a small step on an accelerator takes as long as its launches and waits.
    ("all pairs of rows", lambda call: call.has_few_rows, lambda call: plain_loss_and_gradient(*call.arguments)),
    # C passes over few pairs while torch lists the positives. It refuses scores that are not finite.
    ("pairs in C", lambda call: call.has_few_pairs_for_c, lambda call: native.smooth_ap(*call.arguments)),
    # Many rows: a list of the positives would take as long as the sums.
    ("bins without a list", lambda call: call.bins is not None, _without_a_list),
    # Few positives, of which the pairs take less time than tables of bins.
    ("pairs", lambda call: call.has_few_pairs, _by_pairs),
    # Many rows of several classes, with masks or with weights of the positives, or without the library.
    ("bins", lambda call: call.finite.bins is not None, _by_bins),
    # Scores so far apart that most bins would be empty.
    ("sorted rows", lambda call: True, _by_sorting),
)


def _list_positives(
    call: _Call, scores: Tensor, positive: Tensor, member: Tensor | None, weight: Tensor | None
) -> Problem:
    """List the positives of the valid classes with their shares.

    Dropping the positives of invalid classes would wait for an accelerator, so there they stay with shares of 0.
    """
    known, settings, all_valid = call.read, (call.temperature, call.key_weight), False
    if known is not None:
        all_valid = 0 < known.num_positive < known.num_member and known.mass > 0
        row_of = torch.nonzero_static(positive[0], size=known.num_positive if all_valid else 0)[:, 0]
        class_of, valid = torch.zeros_like(row_of), torch.full((1,), all_valid, device=scores.device)
        if weight is None:
            share = torch.full(row_of.shape, 1 / max(1, known.num_positive), dtype=torch.float64, device=scores.device)
        else:
            mass = weight.reshape(-1)[row_of].double()
            share = mass / mass.new_zeros(1).index_add_(0, class_of, mass)  # in the order of the rows, as below
        return Problem(scores, positive, member, class_of, row_of, share, *settings, valid, all_valid)
    num_classes = scores.shape[0]
    if positive.is_cpu and num_classes == 1:  # numpy takes a quarter of the time of torch
        row_of = torch.from_numpy(positive.numpy()[0].nonzero()[0])
        class_of = torch.zeros_like(row_of)
    else:
        class_of, row_of = positive.nonzero(as_tuple=True)
    if num_classes == 1 and member is None and weight is None and 0 < row_of.numel() < scores.shape[1]:
        share = class_of.new_full((1,), 1 / row_of.numel(), dtype=torch.float64).expand_as(class_of)
        return Problem(scores, positive, None, class_of, row_of, share, *settings, positive.new_ones(1), True)
    if positive.is_cpu:  # to reduce the mask along a dimension takes as long there as a pass over the bins
        count = class_of.new_zeros(num_classes).scatter_add_(0, class_of, torch.ones_like(class_of))
    else:
        count = positive.sum(dim=1)
    has_negatives = count < (scores.shape[1] if member is None else member.sum(dim=1))
    if weight is None:
        valid = has_negatives & (count > 0)
        share = count.double().reciprocal()[class_of]
    else:
        mass = weight_at(weight, class_of, row_of)
        total = mass.new_zeros(num_classes).index_add_(0, class_of, mass)
        valid = has_negatives & (total > 0)
        share = mass / total[class_of]
    if scores.device.type != "cpu":
        share = torch.where(valid[class_of], share, 0.0)
    elif not (all_valid := bool(valid.all())):
        counted = valid[class_of]
        class_of, row_of, share = class_of[counted], row_of[counted], share[counted]
    return Problem(scores, positive, member, class_of, row_of, share, *settings, valid, all_valid)


class _OneClass(NamedTuple):
    """What the host knows of the only class of a pool."""

    num_positive: int
    num_member: int
    mass: float  # the sum of the weights of the positives
    ends: tuple[Tensor, Tensor] | None  # the lowest and the highest score, (1,) each on the host


def _make_finite(problem: Problem, ends: tuple[Tensor, Tensor] | None) -> tuple[Problem, Tensor, Tensor, Tensor | None]:
    """Replace infinite scores by finite ones with the same effect.

    An infinite score moves beyond the reach of every finite one. The difference of two equal infinities is undefined:
    if one of them is a positive, the class is NaN by the definition, like a class with a NaN. Rows that take no part
    move to a positive, so that they do not widen the range.

    Returns the problem, the lowest and the highest scores, (C,) each on the host, and which classes are NaN, None if
    every score was finite. ``ends`` are the lowest and the highest scores of the members, if they are known.
    """
    scores, positive, member, class_of, row_of, *_ = problem
    if member is not None:
        place = scores.new_zeros(scores.shape[0]).index_put_((class_of,), scores[class_of, row_of])
        scores = torch.where(member, scores, place[:, None])
    low, high = _lowest_and_highest(scores) if ends is None else ends
    if bool((low.isfinite() & high.isfinite()).all()):
        return problem._replace(scores=scores), low, high, None
    undefined = scores.isnan().any(dim=1)
    scores, _, clashes = move_infinities(scores, positive, member, problem.temperature)
    return problem._replace(scores=scores), *_lowest_and_highest(scores), undefined | clashes


def move_infinities(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    temperature: float,
    largest: Callable[[Tensor], Tensor] | None = None,
    add: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Move infinite scores beyond the reach of every finite one. The rows may be one of several parts.

    Returns the scores, of which NaN becomes 0, the negated lowest and the highest of them over the parts (2, C)
    float64, and the classes with two equal infinities of which one is a positive, (C,) bool.

    Args:
        scores, positive, member: (C, M), as for :func:`smooth_ap_sums`.
        largest: returns the largest numbers (2, C) float64 over the parts; None if there are no others.
        add: returns the sums of numbers (4, C) float64 over the parts; None if there are no others.
    """
    ends = ends_of(scores.detach(), scores.isfinite())  # where an infinite score moves to is a constant
    counts = ends.new_zeros(4, scores.shape[0])
    infinities = [scores == end for end in (-math.inf, math.inf)]
    for k, infinite in enumerate(infinities):
        if member is not None:
            infinite &= member
        counts[2 * k], counts[2 * k + 1] = infinite.sum(dim=1), (infinite & positive).sum(dim=1)
    ends = ends if largest is None else largest(ends)
    counts = counts if add is None else add(counts)
    ends = ends.nan_to_num(neginf=0.0)
    for k, (sign, infinite) in enumerate(zip((-1.0, 1.0), infinities)):
        end = ends[k].to(scores.dtype)
        beyond = end + (end.abs() * 1e-3).clamp_min(64 * temperature)
        beyond = beyond.clamp_max(torch.finfo(scores.dtype).max)
        scores = torch.where(infinite, sign * beyond[:, None], scores)
        ends[k] = torch.where(counts[2 * k] > 0, beyond.double(), ends[k])
    clashes = ((counts[::2] > 1) & (counts[1::2] > 0)).any(dim=0)
    return scores.nan_to_num(nan=0.0), ends, clashes


def ends_of(scores: Tensor, inside: Tensor | None) -> Tensor:
    """Return (2, C) float64: the negated lowest and the highest of the scores (C, M) that are ``inside``.

    A class without such a score has -inf, and one with a NaN among them has NaN.
    """
    if scores.shape[1] == 0:
        return torch.full((2, scores.shape[0]), -math.inf, dtype=torch.float64, device=scores.device)
    low = (scores if inside is None else scores.masked_fill(~inside, math.inf)).amin(dim=1)
    high = (scores if inside is None else scores.masked_fill(~inside, -math.inf)).amax(dim=1)
    return torch.stack([-low, high]).double()


def _lowest_and_highest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest score of each class, (C,) each on the host; waits for the device once."""
    if scores.device.type == "cpu" and scores.shape[0] == 1:
        low, high = scores.aminmax()
        return low[None], high[None]
    low, high = scores.amin(dim=1), scores.amax(dim=1)  # aminmax along a dimension takes 17 times as long
    if scores.device.type == "cpu":
        return low, high
    low, high = torch.stack([low, high]).cpu()
    return low, high


_smooth_ap = register(
    "smooth_ap",
    forward=smooth_ap_and_gradient,
    fake=lambda scores, *others: (
        scores.new_empty(scores.shape[0], dtype=torch.float64),
        torch.empty_like(scores) if others[4] else scores.new_empty(0),  # with_grad
        scores.new_empty(scores.shape[0], dtype=torch.bool),
    ),
    saved=lambda inputs, outputs: (outputs[:2], ()),
    backward=lambda grad_loss, loss, gradient: (scaled(gradient.t(), grad_loss).t(),),
)
