"""The kernel of Smooth-AP: its loss and gradient over a pool, by whichever way of summing pairs suits the pool."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import bins as binning
from .bins import Bins
from .node_tables import order_for
from .registration import first_order_only
from .sigmoid_sums import BIN, FIXED, PAIR, ROW, exact
from .soft_ranks_binned import Rows, smooth_ap_binned
from .soft_ranks_direct import smooth_ap_direct
from .soft_ranks_sorted import smooth_ap_sorted

_TABLE_BINS = 2**14  # coarse bins of all classes that are looked at together; one takes 6 to 25 KiB, by its order


def smooth_ap_sums(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    method: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Return (C,) the weighted mean over positives i of ``1 - rank_pos_i / rank_i``, and (C,) which classes are valid.

    With :math:`s_{ij} = \sigma((x_j - x_i)/\tau)`, :math:`r_i = 1 + \sum_{j \in P, j \ne i} s_{ij}` the soft rank among
    positives and :math:`n_i = \sum_{j \in N} s_{ij}` the negatives above it,

    .. math:: 1 - \frac{r_i}{r_i + n_i} = \frac{n_i}{r_i + n_i}

    which loses no digits when a positive is ranked almost perfectly.

    Args:
        scores: (C, M) float32 or float64.
        positive: (C, M) bool, a subset of ``member``.
        member: (C, M) bool: the rows that take part; None for all.
        weight: (M,) or (C, M), >= 0, the weight of each row as a positive; None for equal weights.
        temperature: > 0.
        method: ``"direct"`` sums pair by pair in O(positives x M) time; ``"binned"`` takes O(M) time, or, where rows
            are so far apart that bins would be empty, O(M log M) and the pairs that interact; ``"auto"`` chooses.

    Returns:
        The loss, float64, and the validity, bool: the class has a positive of positive weight, and a negative. A class
        that is not valid has a loss of 0 with zero gradient, and one with a NaN score is NaN, valid or not.

    O(C M) memory. The gradient is linear in the incoming one, so it is computed with the value.
    """
    with_grad = scores.requires_grad and torch.is_grad_enabled()
    arguments = (scores, positive, member, weight, float(temperature), with_grad, method)
    if torch.compiler.is_compiling():
        loss, _, valid = _operator(*arguments)
        return loss, valid.detach()
    return _SmoothAP.apply(*arguments)


@exact
def _smooth_ap(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    with_grad: bool,
    method: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (C,) float64, its gradient (C, M), empty unless asked for, and validity."""
    problem, valid, all_valid = _pose(scores, positive, member, weight, temperature)
    num_pairs = problem.share.numel() * scores.shape[1]
    cheapest = FIXED + ROW * scores.numel()  # of the bins, without any
    if method == "direct" or num_pairs == 0 or (method == "auto" and num_pairs * PAIR < cheapest):
        loss, gradient = smooth_ap_direct(*problem, with_grad)
    else:
        loss, gradient = _in_linear_time(problem, with_grad, method == "auto")
    if not all_valid and scores.shape[1]:  # in a valid class a NaN has spread by itself
        poisoned = scores.amax(dim=1).isnan()
        loss = loss.masked_fill(poisoned, math.nan)
        gradient = gradient.masked_fill_(poisoned[:, None], math.nan) if with_grad else gradient
    return loss, gradient if with_grad else scores.new_empty(0), valid


class _Problem(NamedTuple):
    scores: Tensor  # [C, M]
    positive: Tensor  # [C, M] bool
    member: Tensor | None  # [C, M] bool, None for all True
    positives: tuple[Tensor, Tensor]  # class and row of each positive of a valid class, (P,) each
    share: Tensor  # [P] float64: what each weighs in the mean of its class
    temperature: float


def _pose(
    scores: Tensor, positive: Tensor, member: Tensor | None, weight: Tensor | None, temperature: float
) -> tuple[_Problem, Tensor, bool]:
    """List the positives of the valid classes with their shares, and return which classes are valid, (C,), and if all.

    From the list of positives, not by reducing masks: reducing bools along a dimension takes as long as a pass of bins.
    """
    num_classes = scores.shape[0]
    class_of, row_of = positive.nonzero(as_tuple=True)
    if num_classes == 1 and member is None and weight is None and 0 < row_of.numel() < scores.shape[1]:
        share = class_of.new_full(class_of.shape, 1 / row_of.numel(), dtype=torch.float64)  # the host knows it all
        problem = _Problem(scores, positive, None, (class_of, row_of), share, temperature)
        return problem, positive.new_ones(1), True
    count = torch.bincount(class_of, minlength=num_classes)
    mixed = count < (scores.shape[1] if member is None else member.sum(dim=1))  # has negatives too
    if weight is None:
        valid = mixed & (count > 0)
        share = count.double().reciprocal()[class_of]
    else:
        mass = (weight[row_of] if weight.ndim == 1 else weight[class_of, row_of]).double()
        total = mass.new_zeros(num_classes).index_add_(0, class_of, mass)
        valid = mixed & (total > 0)
        share = mass / total[class_of]
    all_valid = bool(valid.all())
    if not all_valid:
        counted = valid[class_of]
        class_of, row_of, share = class_of[counted], row_of[counted], share[counted]
    return _Problem(scores, positive, member, (class_of, row_of), share, temperature), valid, all_valid


def _in_linear_time(problem: _Problem, with_grad: bool, may_be_direct: bool) -> tuple[Tensor, Tensor]:
    """Make every score finite, and choose between bins and sorted neighbours (and pairs, if they may be direct)."""
    problem, low, high, spoiled = _make_finite(problem)
    scores = problem.scores
    bins = _find_bins(problem, low, high)
    num_pairs = problem.share.numel() * scores.shape[1]
    if bins is None:
        loss, gradient = smooth_ap_sorted(*problem)
    elif may_be_direct and num_pairs * PAIR < FIXED + ROW * scores.numel() + BIN * bins.num_coarse * scores.shape[0]:
        loss, gradient = smooth_ap_direct(*problem, with_grad)
    else:
        loss, gradient = _binned(problem, bins, with_grad)
    if spoiled is not None:
        loss = loss.masked_fill(spoiled, math.nan)
        gradient = gradient.masked_fill_(spoiled[:, None], math.nan) if with_grad else gradient
    return loss, gradient


def _make_finite(problem: _Problem) -> tuple[_Problem, Tensor, Tensor, Tensor | None]:
    """Replace infinite scores by finite ones that act alike; return the range, and which classes are NaN, if any.

    An infinite score is farther from every finite one than any sigmoid reaches. Two equal infinities, one of them of a
    positive, have no difference: by the definition their class is NaN, like one with a NaN. Rows that take no part move
    to a positive.
    """
    scores, positive, member, (class_of, row_of), *_ = problem
    if member is not None:
        place = scores.new_zeros(scores.shape[0]).index_put_((class_of,), scores[class_of, row_of])
        scores = torch.where(member, scores, place[:, None])
    low, high = scores.amin(dim=1), scores.amax(dim=1)  # aminmax along a dimension takes 17 times as long
    if bool((low.isfinite() & high.isfinite()).all()):
        return problem._replace(scores=scores), low, high, None
    spoiled = scores.isnan().any(dim=1)
    finite = scores.isfinite()
    limit = torch.finfo(scores.dtype).max
    for sign in (-1.0, 1.0):
        infinite = scores == sign * math.inf
        if member is not None:
            infinite &= member
        spoiled |= (infinite.sum(dim=1) > 1) & (infinite & positive).any(dim=1)
        edge = (scores * sign).masked_fill(~finite, -math.inf).amax(dim=1).nan_to_num(neginf=0.0)
        beyond = (edge + (edge.abs() * 1e-3).clamp_min(64 * problem.temperature)).clamp_max(limit)
        scores = torch.where(infinite, sign * beyond[:, None], scores)
    scores = scores.nan_to_num(nan=0.0)
    low, high = scores.amin(dim=1), scores.amax(dim=1)
    return problem._replace(scores=scores), low, high, spoiled


def _find_bins(problem: _Problem, low: Tensor, high: Tensor) -> Bins | None:
    """Return bins for the scores; None where most of them would be empty."""
    scores, temperature = problem.scores, problem.temperature
    num_rows = scores.shape[1]
    fine = order_for(scores.dtype, num_rows).fine
    bins = binning.cover(low, high, temperature, fine)
    if bins.window <= binning.most_bins(num_rows):
        return bins
    return binning.cover_bulk(scores[0], temperature, fine) if scores.shape[0] == 1 else None


def _binned(problem: _Problem, bins: Bins, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Sum by bins, as many classes together as their tables allow."""
    scores, _, member, (class_of, row_of), share, temperature = problem
    order = order_for(scores.dtype, scores.shape[1])
    loss = torch.zeros(scores.shape[0], dtype=torch.float64, device=scores.device)
    gradient = scores.new_empty(scores.shape) if with_grad else scores.new_empty(0)
    step = max(1, _TABLE_BINS // bins.num_coarse)
    for first in range(0, scores.shape[0], step):
        part, mine = slice(first, first + step), slice(None)
        if step < scores.shape[0]:  # the positives are listed class by class
            mine = slice(*torch.searchsorted(class_of, class_of.new_tensor([first, first + step])).tolist())
        rows = Rows(scores[part], None if member is None else member[part])
        where = (class_of[mine] - first, row_of[mine])
        some = bins._replace(first=bins.first[part])
        into = gradient[part] if with_grad else None
        loss[part] = smooth_ap_binned(rows, share[mine], where, some, order, temperature, into)
    return loss, gradient


class _SmoothAP(torch.autograd.Function):
    """The loss (C,) and the validity (C,); the gradient (C, M) was computed with the loss and is scaled in backward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        loss, gradient, valid = _smooth_ap(*arguments)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(valid)
        ctx.set_materialize_grads(False)
        return loss, valid

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad_loss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, grad_loss)


# The same as an operator, which a compiled graph holds without looking inside. Called eagerly it takes 0.2 ms more.
_operator = torch.library.custom_op("fullrank::smooth_ap", _smooth_ap, mutates_args=())


@_operator.register_fake
def _(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    temperature: float,
    with_grad: bool,
    method: str,
) -> tuple[Tensor, Tensor, Tensor]:
    loss, valid = (scores.new_empty(scores.shape[0], dtype=dtype) for dtype in (torch.float64, torch.bool))
    return loss, torch.empty_like(scores) if with_grad else scores.new_empty(0), valid


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)  # else autograd would make zeros (C, M) for the gradient of the gradient


def _backward(ctx: Any, grad_loss: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return None if grad_loss is None else grad_loss.to(gradient.dtype)[:, None] * gradient, *[None] * 6


_operator.register_autograd(_backward, setup_context=_setup_context)
