"""Focal loss of mutually exclusive classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distributed.errors import check_choice, check_number, expected
from ..distributed.group import Group
from .focal import Elements, FocalLoss, check_gamma, check_inputs, focus, reduce_elements
from .pool import check_weight, compute_dtype

FocalReduction = Literal["mean", "mean_positive", "sum", "none"]
REDUCTIONS = ("mean", "mean_positive", "sum", "none")


def softmax_focal(
    inputs: Tensor,
    targets: Tensor,
    alpha: Tensor | Sequence[float] | None = None,
    gamma: float = 2.0,
    reduction: FocalReduction = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    background_class: int = 0,
    *,
    sample_weight: Tensor | None = None,
    validate_args: bool = True,
) -> Tensor:
    r"""Compute the focal loss of mutually exclusive classes.

    .. math:: L = \alpha_y (1 - p_y)^\gamma \, \mathrm{CE}(x, y), \quad p = \mathrm{softmax}(x)

    Args:
        inputs: (N, C, *) raw logits.
        targets: (N, *) class indices.
        alpha: C weights >= 0, one per class; None for all 1.
        gamma: focusing exponent >= 0; 0 is cross-entropy.
        reduction: ``"mean"`` over valid elements, ``"mean_positive"``: the sum over valid elements divided by the
            number of valid elements that are not background (1 if there is none), ``"sum"``, or ``"none"`` for (N, *).
        label_smoothing: in [0, 1], of the cross-entropy; p stays that of the target class.
        ignore_index: elements with this target are not valid: no loss, no gradient, not counted.
        background_class: what ``"mean_positive"`` does not count.
        sample_weight: (N, *) >= 0; counts become masses of weights.
        validate_args: check target range and weights.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate: no valid element gives 0 with zero gradients.
    Numerics: half precision is computed in float32, which the loss has too; the gradient has the dtype of the inputs.

    Example:
        >>> import torch
        >>> softmax_focal(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(0.7798)

    Reference: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """
    check_choice("reduction", reduction, REDUCTIONS)
    _check_softmax(alpha, gamma, label_smoothing)
    rule = _SoftmaxRule(alpha, gamma, reduction, label_smoothing, ignore_index, background_class)
    return reduce_elements(_softmax_elements(inputs, targets, rule, sample_weight, validate_args), reduction)


class _SoftmaxRule(NamedTuple):
    alpha: Tensor | Sequence[float] | None
    gamma: float
    reduction: str
    label_smoothing: float
    ignore_index: int
    background_class: int


def _softmax_elements(
    inputs: Tensor, targets: Tensor, rule: _SoftmaxRule, sample_weight: Tensor | None, validate_args: bool
) -> Elements:
    check_inputs(inputs, targets)
    if inputs.ndim < 2:
        raise ValueError(expected("inputs", "shape (N, C, *)", inputs))
    shape = (inputs.shape[0], *inputs.shape[2:])
    if tuple(targets.shape) != shape:
        raise ValueError(expected("targets", f"shape {shape} for inputs (N, C, *)", targets))
    if targets.is_floating_point():
        raise TypeError(expected("targets", "integer class indices", targets, "Use targets.long()."))
    num_classes = inputs.shape[1]
    targets = targets.to(torch.int64)
    valid = targets != rule.ignore_index
    if validate_args and not torch.compiler.is_compiling():
        bad = valid & ((targets < 0) | (targets >= num_classes))
        if bool(bad.any()):
            what = f"class indices in [0, {num_classes}) or ignore_index={rule.ignore_index}"
            raise ValueError(expected("targets", what, int(targets[bad][0])))
    x = inputs.to(compute_dtype(inputs.dtype))
    # Ignored elements may hold anything: with zeros for logits they cannot poison a sum or a gradient.
    x = torch.where(valid.unsqueeze(1), x, torch.zeros((), dtype=x.dtype, device=x.device))
    known = torch.where(valid, targets, torch.zeros_like(targets))
    log_p = F.log_softmax(x, dim=1)
    log_p_target = log_p.gather(1, known.unsqueeze(1)).squeeze(1)  # [N, *]
    smoothing = rule.label_smoothing
    cross_entropy = -log_p_target
    if smoothing > 0:
        cross_entropy = (1 - smoothing) * cross_entropy - smoothing * log_p.mean(dim=1)
    values = focus(log_p_target, rule.gamma) * cross_entropy
    if rule.alpha is not None:
        alpha = torch.as_tensor(rule.alpha, dtype=x.dtype, device=x.device)
        if alpha.shape != (num_classes,):
            raise ValueError(expected("alpha", f"{num_classes} weights, one per class", alpha))
        values = values * alpha[known]
    weight = valid.to(x.dtype)
    if sample_weight is not None:
        if not isinstance(sample_weight, Tensor):
            raise TypeError(expected("sample_weight", "a tensor or None", sample_weight))
        if sample_weight.shape != targets.shape:
            raise ValueError(expected("sample_weight", f"the shape of targets, {shape}", sample_weight))
        weight = weight * check_weight(sample_weight, x.dtype, validate_args)
    counted = weight * (targets != rule.background_class) if rule.reduction == "mean_positive" else weight
    count = counted.sum() * (rule.reduction in ("mean", "mean_positive"))
    return Elements(values * weight, count)


def _check_softmax(alpha: Tensor | Sequence[float] | None, gamma: float, label_smoothing: float) -> None:
    if isinstance(alpha, (int, float)):
        raise TypeError(expected("alpha", "None or a sequence of one weight per class", alpha))
    # A tensor is checked by the module, once: reading it here would wait for the device in every call.
    if alpha is not None and not isinstance(alpha, Tensor) and not all(weight >= 0 for weight in alpha):
        raise ValueError(expected("alpha", "weights >= 0", alpha))
    check_gamma(gamma)
    check_number("label_smoothing", label_smoothing)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(expected("label_smoothing", "a number in [0, 1]", label_smoothing))


class SoftmaxFocalLoss(FocalLoss):
    """Focal loss of mutually exclusive classes, averaged over the valid elements of all ranks.

    The formula is that of :func:`~fullrank.losses.softmax_focal`. ``SoftmaxFocalLoss(gamma=0)`` is cross-entropy whose
    mean is exact over ranks with different numbers of valid elements.

    Args:
        alpha: C weights >= 0, one per class; None for all 1.
        gamma: focusing exponent >= 0.
        reduction: ``"mean"``, ``"mean_positive"``, ``"sum"`` over all ranks, or ``"none"`` for this rank's elements.
        label_smoothing: in [0, 1].
        ignore_index: elements with this target take no part.
        background_class: what ``"mean_positive"`` does not count.
        gather_distributed, group, gradient_reduction, validate_args: see :class:`FocalLoss`.

    Example:
        >>> import torch
        >>> SoftmaxFocalLoss(gamma=0)(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(1.3863)

    Reference: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """

    def __init__(
        self,
        alpha: Tensor | Sequence[float] | None = None,
        gamma: float = 2.0,
        reduction: FocalReduction = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        background_class: int = 0,
        gather_distributed: bool | None = None,
        *,
        group: Group = None,
        gradient_reduction: str | int = "mean",
        validate_args: bool = True,
    ) -> None:
        check_choice("reduction", reduction, REDUCTIONS)
        _check_softmax(alpha.tolist() if isinstance(alpha, Tensor) else alpha, gamma, label_smoothing)
        super().__init__(reduction, gather_distributed, group, gradient_reduction, validate_args)
        self.alpha, self.gamma, self.label_smoothing = alpha, gamma, label_smoothing
        self.ignore_index, self.background_class = ignore_index, background_class

    def elements(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Elements:
        """Return this rank's element losses and count."""
        rule = _SoftmaxRule(
            self.alpha, self.gamma, self.reduction, self.label_smoothing, self.ignore_index, self.background_class
        )
        return _softmax_elements(inputs, targets, rule, sample_weight, self.validate_args)

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``, and for the comparison between ranks."""
        alpha = self.alpha.tolist() if isinstance(self.alpha, Tensor) else self.alpha
        return (
            f"alpha={alpha}, gamma={self.gamma}, reduction={self.reduction!r}, label_smoothing={self.label_smoothing}, "
            f"ignore_index={self.ignore_index}, background_class={self.background_class}"
        )
