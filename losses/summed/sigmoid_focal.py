"""Focal loss of independent binary problems."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ...distributed.header import DeviceCheck
from ...errors import check_amount, check_choice, check_number, check_tensor, expected
from ..arguments import completed
from ..base import GroupOptions
from ..pooled.pool import local_pool
from ..rows import compute_dtype, has_values, weight_and_check
from .base import Elements, SummedLoss, check_inputs, focus, local_loss, match_shape, power

SigmoidReduction = Literal["mean", "mean_weighted", "sum", "none"]
REDUCTIONS = get_args(SigmoidReduction)


@completed(local_pool)
def sigmoid_focal(
    inputs: Tensor,
    targets: Tensor,
    alpha: float = 0.25,
    gamma: float = 2.0,
    reduction: SigmoidReduction = "mean",
    *,
    sample_weight: Tensor | None = None,
    validate_args: bool = True,
) -> Tensor:
    r"""Compute the focal loss of independent binary problems.

    .. math:: L = -\alpha_t (1 - p_t)^\gamma \log p_t, \quad p_t = \sigma(x) \text{ where } y = 1, \; 1 - \sigma(x)
              \text{ where } y = 0

    Args:
        inputs: raw logits of any shape.
        targets: numbers in [0, 1] of any dtype, in the shape of ``inputs``; (N,) and (N, 1) stand for each other.
        alpha: weight of the positives in [0, 1], ``1 - alpha`` for the negatives; -1 for no weights.
        gamma: focusing exponent >= 0; 0 is cross-entropy.
        reduction: ``"mean"`` over elements, ``"mean_weighted"``: the sum over elements divided by the sum of their
            weights, :math:`\alpha_t` times ``sample_weight``, with :math:`\alpha_t = \alpha y + (1 - \alpha)(1 - y)`,
            or 1 for ``alpha=-1``; ``"sum"``, or ``"none"`` for the shape of ``inputs``.
        sample_weight: >= 0, dim 0 as ``inputs``, the others broadcastable; ``"mean"`` then divides by their sum.

    Degenerate: no elements give 0 with zero gradients, and so do weights that are all 0.
    Numerics: half precision is computed and returned in float32; the gradient has the dtype of the inputs.

    Example:
        >>> import torch
        >>> sigmoid_focal(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
        tensor(0.0433)

    Reference: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017, eq. 5.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    _check_alpha("alpha", alpha)
    check_amount("gamma", gamma)
    elements = _elements(inputs, targets, alpha, gamma, reduction, sample_weight, validate_args)
    return local_loss(elements, reduction)


def _elements(
    inputs: Tensor,
    targets: Tensor,
    alpha: float,
    gamma: float,
    reduction: str,
    sample_weight: Tensor | None,
    validate_args: bool,
) -> Elements:
    targets = targets_as(inputs, targets)
    x = inputs.to(compute_dtype(inputs.dtype))
    y = targets.to(x.dtype)
    are_hard = x.device.type == "cpu" and has_values(x) and has_values(y) and torch.equal(y, (y > 0).to(y.dtype))
    checks = [] if are_hard else soft_target_checks(targets, validate_args)
    # p_t = p y + (1 - p)(1 - y). For y in {0, 1} this is one sigmoid, and its logarithm is minus the cross-entropy.
    # Nothing cancels then, even for infinite logits. Only other targets need the general form.
    if are_hard:
        hard = F.logsigmoid(x * (2 * y - 1))
        values = -hard if gamma == 0 else -hard * focus(hard, gamma)
    else:
        is_hard = (y == 0) | (y == 1)
        hard = F.logsigmoid(torch.where(y > 0.5, x, -x))
        x_soft = torch.where(is_hard, torch.zeros_like(x), x)
        missed = torch.sigmoid(x_soft) * (1 - y) + torch.sigmoid(-x_soft) * y  # 1 - p_t, a sum of numbers >= 0
        values = torch.where(is_hard, -hard, -y * F.logsigmoid(x_soft) - (1 - y) * F.logsigmoid(-x_soft))
        # Each branch gets 0.5, or log 0.5, for the elements of the other one, so that no slope there is infinite.
        focus_of_hard = focus(torch.where(is_hard, hard, torch.full_like(x, -math.log(2))), gamma)
        focus_of_soft = power(torch.where(is_hard, torch.full_like(x, 0.5), missed), gamma)
        values = torch.where(is_hard, focus_of_hard, focus_of_soft) * values
    counted = None  # [N, *] the share of each element in the divisor; None for all 1
    if alpha >= 0:
        alpha_t = (1 - alpha) + (2 * alpha - 1) * y
        values = values * alpha_t
        counted = alpha_t.detach() if reduction == "mean_weighted" else None
    weight = expanded_weight(sample_weight, inputs, x.dtype, validate_args, checks)
    return Elements.of(values, values.numel(), counted, weight, reduction.startswith("mean"), checks)


def targets_as(inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the targets in the shape of ``inputs``, or raise TypeError or ValueError."""
    check_inputs(inputs, targets)
    targets = match_shape(targets, tuple(inputs.shape))
    if targets.shape != inputs.shape:
        raise ValueError(expected("targets", f"the shape of inputs, {tuple(inputs.shape)}", targets))
    return targets


def soft_target_checks(targets: Tensor, validate_args: bool) -> list[DeviceCheck | None]:
    """Return the check that every target is in [0, 1], unless it is not wanted or not possible."""
    if not (validate_args and has_values(targets)):
        return []
    bad = ~((targets >= 0) & (targets <= 1))

    def error() -> Exception:
        fix = "Use (targets > 0).float() for -1 and +1. To leave rows out give them sample_weight 0."
        return ValueError(expected("targets", "numbers in [0, 1]", targets[bad][0].item(), fix))

    return [DeviceCheck(bad.any(), error)]


def expanded_weight(
    sample_weight: Tensor | None,
    inputs: Tensor,
    dtype: torch.dtype,
    validate_args: bool,
    checks: list[DeviceCheck | None],
) -> Tensor | None:
    """Return the weights, aligned with dim 0, in the shape of ``inputs``; the check of them joins ``checks``."""
    if sample_weight is None:
        return None
    what = f"dim 0 of {tuple(inputs.shape)[:1]} and trailing dims broadcastable to {tuple(inputs.shape)}"
    check_tensor("sample_weight", sample_weight, "a tensor or None")
    if sample_weight.shape[:1] != inputs.shape[:1]:
        raise ValueError(expected("sample_weight", what, sample_weight))
    if 1 <= sample_weight.ndim < inputs.ndim:
        sample_weight = sample_weight.reshape(*sample_weight.shape, *[1] * (inputs.ndim - sample_weight.ndim))
    try:
        weight, check = weight_and_check(sample_weight.expand(inputs.shape), dtype, validate_args)
    except RuntimeError:
        raise ValueError(expected("sample_weight", what, sample_weight)) from None
    checks.append(check)
    return weight


def _check_alpha(name: str, alpha: float) -> None:
    if not (0 <= check_number(name, alpha) <= 1 or alpha == -1):
        raise ValueError(expected(name, "a number in [0, 1], or -1 for no weighting", alpha))


@completed(sigmoid_focal)
class SigmoidFocalLoss(SummedLoss):
    """Focal loss of independent binary problems, averaged over the elements of all ranks.

    The formula is that of :func:`~fullrank.losses.sigmoid_focal`.

    Args:
        reduction: ``"mean"``, ``"mean_weighted"``, ``"sum"`` over all ranks, or ``"none"`` for this rank's elements.

    Shape:
        inputs of any shape, targets the same, where one of (N,) and (N, 1) may stand for the other; sizes may differ
        between ranks and may be 0. Output scalar, or the shape of inputs with ``reduction="none"``.

    Example:
        >>> import torch
        >>> SigmoidFocalLoss()(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
        tensor(0.0433)
    """

    _shown = "alpha", "gamma", "reduction"
    _checks = SummedLoss._checks | {
        "reduction": partial(check_choice, choices=REDUCTIONS),
        "alpha": _check_alpha,
        "gamma": check_amount,
    }

    def __init__(
        self,
        alpha: float = 0.25,
        gamma: float = 2.0,
        reduction: SigmoidReduction = "mean",
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(reduction, gather_distributed, **options)
        self.alpha, self.gamma = alpha, gamma

    def elements(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Elements:
        return _elements(inputs, targets, self.alpha, self.gamma, self.reduction, sample_weight, self.validate_args)
