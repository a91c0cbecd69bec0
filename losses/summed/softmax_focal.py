"""Focal loss of mutually exclusive classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ...distributed.header import DeviceCheck
from ...errors import check_amount, check_between, check_choice, check_int, check_number, check_tensor, expected
from ..arguments import completed
from ..base import GroupOptions
from ..pooled.pool import local_pool
from ..rows import check_exact, class_range_check, compute_dtype, has_values, weight_and_check
from .base import Elements, SummedLoss, check_inputs, focus, local_loss, squeeze_advice

FocalReduction = Literal["mean", "mean_positive", "mean_weighted", "sum", "none"]
REDUCTIONS = get_args(FocalReduction)


@completed(local_pool)
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
        inputs: (N, C, *) raw logits, C >= 2; one logit is for :func:`~fullrank.losses.sigmoid_focal`.
        targets: (N, *) or (N, *, 1) class indices, integers, bools or floats that are whole numbers.
        alpha: C weights >= 0, one per class; None for all 1.
        gamma: focusing exponent >= 0; 0 is cross-entropy.
        reduction: ``"mean"`` over valid elements, ``"mean_positive"``: the sum over valid elements divided by the
            number of valid elements that are not background (1 if there is none), ``"mean_weighted"``: by the sum of
            their weights, alpha of the target class times ``sample_weight``, ``"sum"``, or ``"none"`` for (N, *).
        label_smoothing: in [0, 1], of the cross-entropy; p stays that of the target class.
        ignore_index: elements with this target are not valid: no loss, no gradient, not counted.
        background_class: the class that ``"mean_positive"`` does not count.
        sample_weight: (N, *) >= 0; the counts become sums of weights.

    With class weights, ``"mean"`` lets the effective learning rate change with the classes that happen to be in the
    batch. ``"mean_weighted"`` divides by their sum, as ``torch.nn.CrossEntropyLoss(weight=alpha)`` does.

    Degenerate: no valid element gives 0 with zero gradients, and so do weights that are all 0.
    Numerics: half precision is computed and returned in float32; the gradient has the dtype of the inputs.

    Example:
        >>> import torch
        >>> softmax_focal(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(0.7798)

    Reference: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """
    rule = _Rule(alpha, gamma, reduction, label_smoothing, ignore_index, background_class)
    for name, value in zip(_Rule._fields, rule):
        _CHECKS[name](name, value)
    return local_loss(_elements(inputs, targets, rule, sample_weight, validate_args), reduction)


class _Rule(NamedTuple):
    """The arguments of the formula."""

    alpha: Tensor | Sequence[float] | None
    gamma: float
    reduction: str
    label_smoothing: float
    ignore_index: int
    background_class: int


def _check_alpha(_: str, alpha: Tensor | Sequence[float] | None) -> None:
    """Raise TypeError or ValueError unless all weights are >= 0; those of a tensor are not read."""
    if alpha is None or isinstance(alpha, Tensor):
        return
    if isinstance(alpha, (str, bytes)) or not isinstance(alpha, Iterable):
        fix = "Count the classes and pass their weights, such as [0.2, 0.8]."
        raise TypeError(expected("alpha", "None or a sequence of one weight per class", alpha, fix))
    for weight in alpha:
        if not check_number("alpha", float(weight) if hasattr(weight, "__float__") else weight) >= 0:
            raise ValueError(expected("alpha", "weights >= 0", alpha))


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "alpha": _check_alpha,
    "gamma": check_amount,
    "reduction": partial(check_choice, choices=REDUCTIONS),
    "label_smoothing": partial(check_between, low=0, high=1),
    "ignore_index": check_int,
    "background_class": check_int,
}


def _elements(
    inputs: Tensor, targets: Tensor, rule: _Rule | SoftmaxFocalLoss, sample_weight: Tensor | None, validate_args: bool
) -> Elements:
    targets, valid, checks = check_classes(inputs, targets, rule.ignore_index, validate_args)
    x = inputs.to(compute_dtype(inputs.dtype))
    classes = targets
    if valid is not None:
        # Ignored elements may hold anything. Zeros for their logits keep a NaN out of the sum and out of the gradient.
        x = torch.where(valid.unsqueeze(1), x, torch.zeros((), dtype=x.dtype, device=x.device))
        classes = torch.where(valid, targets, torch.zeros_like(targets))
    log_p = F.log_softmax(x, dim=1)
    of_target = F.nll_loss(log_p, classes, reduction="none")  # [N, *]
    values = of_target
    if rule.label_smoothing > 0:
        values = (1 - rule.label_smoothing) * values - rule.label_smoothing * log_p.mean(dim=1)
    if rule.gamma != 0:
        values = focus(-of_target, rule.gamma) * values
    alpha = None if rule.alpha is None else torch.as_tensor(rule.alpha, dtype=x.dtype, device=x.device)
    if alpha is not None:
        if alpha.shape != (x.shape[1],):
            raise ValueError(expected("alpha", f"{x.shape[1]} weights, one per class", alpha))
        alpha = alpha[classes]
        values = values * alpha
    counted = None
    if rule.reduction == "mean_positive":
        counted = (targets != rule.background_class).to(x.dtype)
    elif rule.reduction == "mean_weighted" and alpha is not None:
        counted = alpha.detach()
    if valid is not None:
        kept = valid.to(x.dtype)
        values, counted = values * kept, kept if counted is None else counted * kept
    weight = check_element_weight(sample_weight, tuple(targets.shape), x.dtype, validate_args, checks)
    return Elements.of(values, values.numel(), counted, weight, rule.reduction.startswith("mean"), checks)


def check_classes(
    inputs: Tensor, targets: Tensor, ignore_index: int, validate_args: bool
) -> tuple[Tensor, Tensor | None, list[DeviceCheck | None]]:
    """Return the targets as int64 (N, *), which are classes, None for all, and the check of their range."""
    check_inputs(inputs, targets)
    if inputs.ndim < 2:
        raise ValueError(expected("inputs", "shape (N, C, *)", inputs))
    if inputs.shape[1] < 2:
        what = "at least two classes in dim 1 of inputs (N, C, *)"
        raise ValueError(expected("inputs", what, inputs, "For one logit use SigmoidFocalLoss or BCEWithLogitsLoss."))
    shape = (inputs.shape[0], *inputs.shape[2:])
    if tuple(targets.shape) == (*shape, 1):
        targets = targets.squeeze(-1)
    if tuple(targets.shape) != shape:
        fix = squeeze_advice("targets", targets, shape)
        raise ValueError(expected("targets", f"shape {shape} for inputs (N, C, *)", targets, fix))
    check_exact(targets, inputs.shape[1])
    raw, targets = targets, targets.to(torch.int64)
    if targets.device.type == "cpu" and has_values(targets) and targets.numel() and not raw.is_floating_point():
        low, high = (int(end) for end in targets.aminmax())
        if low >= 0 and high < inputs.shape[1] and not low <= ignore_index <= high:
            return targets, None, []
    if not (validate_args and has_values(targets)):
        return targets, targets != ignore_index, []
    ignored, outside = targets == ignore_index, (targets < 0) | (targets >= inputs.shape[1])
    check = class_range_check(raw, targets, outside & ~ignored, inputs.shape[1], ignore_index)
    return targets, ~(ignored | outside), [check]


def check_element_weight(
    sample_weight: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    validate_args: bool,
    checks: list[DeviceCheck | None],
) -> Tensor | None:
    """Return the weights of the elements; the check that they are in range joins ``checks``."""
    if sample_weight is None:
        return None
    check_tensor("sample_weight", sample_weight, "a tensor or None")
    if tuple(sample_weight.shape) != shape:
        fix = squeeze_advice("sample_weight", sample_weight, shape)
        raise ValueError(expected("sample_weight", f"shape {shape}, one weight per element", sample_weight, fix))
    weight, check = weight_and_check(sample_weight, dtype, validate_args)
    checks.append(check)
    return weight


@completed(softmax_focal)
class SoftmaxFocalLoss(SummedLoss):
    """Focal loss of mutually exclusive classes, averaged over the valid elements of all ranks.

    The formula is that of :func:`~fullrank.losses.softmax_focal`.

    Args:
        reduction: ``"mean"``, ``"mean_positive"``, ``"mean_weighted"``, which is better with class weights, ``"sum"``
            over all ranks, or ``"none"`` for this rank's elements.

    Shape:
        inputs (N, C, *) with C >= 2, targets (N, *) or (N, *, 1); N may differ between ranks and may be 0. Output
        scalar, or (N, *) with ``reduction="none"``.

    Example:
        >>> import torch
        >>> SoftmaxFocalLoss(gamma=0)(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(1.3863)
    """

    _shown = _Rule._fields
    _checks = SummedLoss._checks | _CHECKS | {"alpha": lambda name, value: _check_alpha(name, _listed(value))}

    def __init__(
        self,
        alpha: Tensor | Sequence[float] | None = None,
        gamma: float = 2.0,
        reduction: FocalReduction = "mean",
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        background_class: int = 0,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(reduction, gather_distributed, **options)
        self.alpha, self.gamma, self.label_smoothing = alpha, gamma, label_smoothing
        self.ignore_index, self.background_class = ignore_index, background_class

    def elements(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Elements:
        return _elements(inputs, targets, self, sample_weight, self.validate_args)

    def _arguments(self) -> dict[str, object]:
        return {**super()._arguments(), "alpha": _listed(self.alpha)}


def _listed(alpha: Any) -> Any:
    return alpha.reshape(-1).tolist() if isinstance(alpha, Tensor) else alpha
