"""Sums over all ranks, and sums divided by counts. The ranks exchange two scalars each, or one tensor, and no rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import RankValueError, Words, expected, first_order_only
from . import gather
from .group import SAME_REDUCTION, Group, alone, check_gradient_reduction, gradient_scale, is_initialized, resolve_group
from .header import DeviceCheck, Offer, State, agree_on, refuse_in_backward
from .torch_private import not_compiled, note_kind


class _GlobalRatio(torch.autograd.Function):
    """Return ``ratio``, sum_r S_r / N. The gradient with respect to this rank's ``total`` S_r is ``scale``, k / N.

    The totals of other ranks are constants. A second derivative would multiply by k twice, so it raises.
    """

    @staticmethod
    def forward(ctx: Any, call: str, total: Tensor, ratio: float, scale: float) -> Tensor:
        ctx.call, ctx.scale, ctx.witnesses = call, scale, (total,)
        return torch.full_like(total, ratio)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad * ctx.scale, None, None


def local_mean(total: Tensor, count: Tensor | float) -> Tensor:
    """Return ``total / count``, or ``total`` if the count is 0, because the total is then an empty sum."""
    if isinstance(count, (int, float)):
        return total / (count or 1)
    count = count.to(total)
    return total / torch.where(count == 0, torch.ones_like(count), count)


def part_of_mean(
    total: Tensor, count: Tensor | float, facts: Mapping[str, object], check: DeviceCheck | None = None
) -> Offer[Tensor]:
    """Return this rank's part of a global mean: its total, with the graph, its number of terms, and facts."""
    needs_grad = total.requires_grad and torch.is_grad_enabled()
    return Offer(total, {**facts, "gradient": needs_grad}, totals=(total, count), check=check)


@not_compiled
def mean_agreed(
    call: str, group: ProcessGroup, bring: Callable[[], Offer[Tensor]], *, gradient_reduction: str | int = "mean"
) -> Tensor:
    """Agree on :func:`part_of_mean`, which ``bring`` returns, and return the mean over all ranks."""
    refuse_in_backward(call)  # here, because a compiled caller skips its own check

    def look() -> Offer[Tensor]:
        offer = bring()
        return replace(offer, totals=(*offer.totals, float(gather.is_of_local_gather(offer.value, group))))

    agreed = agree_on(call, group, look if _looks() else bring)
    total = agreed.value
    totals, counts, are_gathered, *_ = zip(*agreed.totals)
    if any(are_gathered) and max(totals) - min(totals) > 1e-3 * max(map(abs, totals)):  # more than rounding
        what = "a sum that is the same on every rank, because its rows were gathered with backward='local'"
        got = Words(f"sums of {min(totals):.6g} to {max(totals):.6g}")
        fix = "Pass backward='reduce_scatter' to the gather, or sum the loss of all rows on every rank."
        raise RankValueError(expected(f"{call}: total", what, got, fix))
    # On the host, in rank order: every rank gets the same bits, and no kernel is launched for each rank.
    summed, count = sum(totals), sum(counts)
    divisor = 1.0 if count == 0 else count
    needs_grad = total.requires_grad and torch.is_grad_enabled()
    scale = gradient_scale(gradient_reduction, group, needs_grad=needs_grad) / divisor
    return note_kind(_GlobalRatio.apply(call, total, summed / divisor, scale), over_ranks=True)


def global_mean(
    total: Tensor, count: Tensor | float, group: Group = None, *, gradient_reduction: str | int = "mean"
) -> Tensor:
    r"""Divide the sum of ``total`` over the ranks by the sum of ``count`` over the ranks.

    .. math:: \frac{\sum_r S_r}{\sum_r N_r}

    Equal to ``loss_of_all_rows.sum() / num_rows_of_all_ranks`` in one process. If every rank divides by its own count,
    DDP computes the mean over ranks of ``S_r / N_r``, in which a rank with few rows weighs as much as one with many.

    Args:
        total: scalar, this rank's sum of losses.
        count: this rank's number of terms, or its mass of weights; a number or a one-element tensor, >= 0. No gradient
            flows to it.
        group, gradient_reduction: see :func:`all_gather_with_grad`.

    Returns:
        Scalar in the dtype of ``total``, with the same value on every rank. Without a process group, ``total / count``.

    Raises:
        TypeError, ValueError: on every rank, for arguments that do not fit, such as a ``count`` that is negative.

    Degenerate: a count of 0 over all ranks gives the sum of the totals, an empty sum: 0 with zero gradients.
    Distributed: one collective forward, the header, and none backward.

    Example:
        >>> import torch
        >>> global_mean(torch.tensor(6.0), 4)
        tensor(1.5000)
    """

    def bring() -> Offer[Tensor]:
        check_gradient_reduction(gradient_reduction)
        _check_floats("total", total)
        if total.numel() != 1:
            raise ValueError(expected("total", "one element", total, "Sum the losses first."))
        if not isinstance(count, (Tensor, int, float)):
            raise TypeError(expected("count", "a number or a tensor", count))
        if isinstance(count, Tensor) and count.numel() != 1:
            raise ValueError(expected("count", "one element", count, "Count the rows of this rank first."))
        number = count.detach().reshape(()) if isinstance(count, Tensor) else count
        if not number >= 0:
            raise ValueError(expected("count", "a number >= 0", float(number)))
        reduction = State(gradient_reduction, SAME_REDUCTION)
        return part_of_mean(total, number, {"gradient_reduction": reduction, "dtype": total.dtype})

    resolved = resolve_group(group) if group is not None or is_initialized() else None
    if resolved is None or alone(resolved, gradient_reduction):
        return note_kind(local_mean(total, bring().totals[1]), mean=True)
    return note_kind(mean_agreed("global_mean", resolved, bring, gradient_reduction=gradient_reduction), mean=True)


@not_compiled
def global_sum(value: Tensor, group: Group = None, *, gradient_reduction: str | int = "mean") -> Tensor:
    r"""Add up the tensors of the ranks, for a loss that is a function of sums over the rows of all ranks.

    .. math:: \sum_r v_r

    Equal to ``value_of_all_rows`` in one process, such as the sums of a batch Dice or of a covariance. Every rank must
    compute the same loss from the sum. A sum of losses divided by a count is :func:`global_mean`.

    Args:
        value: (*) floating-point, this rank's sum over its rows, of one shape and dtype on every rank.
        group, gradient_reduction: see :func:`all_gather_with_grad`.

    Returns:
        (*) in the dtype of ``value``, the same bits on every rank. Without a process group, ``value`` itself.

    Raises:
        TypeError, ValueError: on every rank, for what is no floating-point tensor; for shapes, dtypes or need of
            gradient that differ between ranks; in the first calls, for a sum of rows gathered with the local backward.

    Distributed: one collective forward, or two as in :func:`gather_rows`, and none backward.

    Example:
        >>> import torch
        >>> sums = global_sum(torch.tensor([3.0, 8.0]))  # such as 2 sum(p t) and sum(p + t)
        >>> 1 - sums[0] / sums[1]
        tensor(0.6250)
    """

    def bring() -> Offer[Tensor]:
        check_gradient_reduction(gradient_reduction)
        _check_floats("value", value)
        if resolved is not None and _looks() and gather.is_of_local_gather(value, resolved):
            fix = "Leave the gather out, or pass backward='reduce_scatter' to it."
            got = Words("one of rows that were gathered with backward='local'")
            raise ValueError(expected("value", "a sum of the rows of this rank", got, fix))
        facts = {"gradient_reduction": State(gradient_reduction, SAME_REDUCTION)}
        return Offer(value, facts, tensors=(value[None],), names=("value",))

    resolved = resolve_group(group) if group is not None or is_initialized() else None
    if resolved is None or alone(resolved, gradient_reduction):
        return bring().value
    refuse_in_backward("global_sum")
    agreed = gather.gather_agreed("global_sum", resolved, bring, gradient_reduction=gradient_reduction)
    total: Tensor = agreed.tensors[0].sum(dim=0)
    return total


def _check_floats(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(expected(name, "a tensor", value, "Pass the summed loss, with its graph."))
    if not value.is_floating_point():
        raise TypeError(expected(name, "a floating-point tensor", value, f"Use {name}.float()."))


def _looks() -> bool:
    """Return whether a sum is searched for rows of a gather: in the first calls, where gradients are enabled."""
    return 0 < gather.num_with_grad <= gather.FIRST and torch.is_grad_enabled()
