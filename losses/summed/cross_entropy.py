"""Cross-entropy over the rows of all ranks, of classes and of independent labels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ...distributed.header import DeviceCheck
from ...errors import Words, check_between, check_choice, check_int, check_tensor, expected
from ...kernels.torch_private import version_of
from ..arguments import completed
from ..base import GroupOptions
from ..pooled.pool import REDUCTIONS, Reduction
from ..rows import compute_dtype, has_values
from .base import ClassSums, Elements, SummedLoss, check_inputs
from .sigmoid_focal import expanded_weight, soft_target_checks, targets_as
from .softmax_focal import check_classes, check_element_weight

_LARGE = 0.25  # of the largest number: infinity for a logit, whose differences do not overflow
_FEW = 8  # up to so many weights are listed in the text that the ranks compare; of more, it has the shape and a hash


class TorchLikeLoss(SummedLoss):
    """Base of the losses that have the arguments of torch: their weights are buffers, whose values the ranks compare.

    Distributed:
        One collective forward, the header, and none backward. Logits do not travel. Balanced weights count the elements
        of all ranks: the sums of each class travel behind the header. Each call has weights of its own, so let
        :func:`~fullrank.pooled_backward` call the loss once for all micro-batches. Where all ranks together have few
        rows in a call, such as 32, pass weights counted in the training set: they rank better.
    """

    _checks = SummedLoss._checks | {"reduction": partial(check_choice, choices=REDUCTIONS)}

    def _set_weights(self, class_weight: str | None, **weights: Tensor | None) -> None:
        """Register the weights as buffers, or let them follow from the counts of the classes in a call."""
        for name, weight in weights.items():
            if isinstance(weight, str):
                fix = "For classes of equal weight use class_weight='balanced'."
                raise TypeError(expected(name, "a tensor or None", weight, fix))
            if weight is not None:
                check_tensor(name, weight, "a tensor or None")
                if weight.is_complex() or not bool((weight.isfinite() & (weight >= 0)).all()):
                    raise ValueError(expected(name, "finite numbers >= 0", weight.tolist()))
            self.register_buffer(name, weight)
        self._texts: dict[str, tuple[Tensor, int, Words]] = {}  # of a weight: the tensor, its version, the text
        self.class_weight = class_weight
        if class_weight is None:
            return
        check_choice("class_weight", class_weight, ("balanced",))
        if any(weight is not None for weight in weights.values()):
            fix = "Pass weights of the rows as sample_weight."
            raise ValueError(expected("class_weight", f"None next to {' or '.join(weights)}", class_weight, fix))
        if self.reduction != "mean":
            fix = "The weights, and with them the divisor of a sum, change from call to call."
            raise ValueError(expected("reduction", "'mean' with balanced weights", self.reduction, fix))
        self._is_balanced = True

    def _arguments(self) -> dict[str, object]:
        arguments = super()._arguments().items()
        return {name: self._text_of(name, value) if isinstance(value, Tensor) else value for name, value in arguments}

    def _text_of(self, name: str, weight: Tensor) -> Words:
        version, cached = version_of(weight), self._texts.get(name)
        if cached is None or cached[0] is not weight or cached[1] != version:
            values = weight.detach().cpu().double()
            text = str(values.tolist())
            if values.numel() > _FEW:
                digest = hashlib.blake2b(values.contiguous().numpy().tobytes(), digest_size=4).hexdigest()
                text = f"{tuple(weight.shape)} with hash {digest}"
            cached = self._texts[name] = (weight, version, Words(text))
        return cached[2]


@completed()
class CrossEntropyLoss(TorchLikeLoss):
    r"""Cross-entropy of mutually exclusive classes, with the mean over the elements of all ranks.

    Equal to ``torch.nn.CrossEntropyLoss(weight, ignore_index=..., reduction=..., label_smoothing=...)`` of all rows:

    .. math:: L = \frac{\sum_i w_{y_i} \, \mathrm{CE}(x_i, y_i)}{\sum_i w_{y_i}}

    Both sums are over the elements of all ranks that are not ignored; with probabilities as targets the divisor is
    their number. Other than in torch, ignored elements may have NaN for logits. A class with a probability of 0 may
    have the logit -inf, as the padding of a list: it adds 0, and smoothing spreads over the others. Class indices may
    be floats that are whole numbers. Inputs (N, 1), whose loss is always 0, and inputs (C,) raise.

    Args:
        weight: (C,) weights of the classes, >= 0, the same on every rank; None for all 1. A buffer, as in torch.
            ``"balanced"`` is ``class_weight="balanced"``.
        ignore_index: elements with this target are not valid: no loss, no gradient, not counted. With
            probabilities it must be negative, as in torch.
        reduction: ``"mean"`` divides by the sum of the weights of the target classes over all ranks, ``"sum"`` over all
            ranks, or ``"none"`` for this rank's elements.
        label_smoothing: in [0, 1], the share of the uniform distribution in the targets.
        class_weight: ``"balanced"``: the weights of scikit-learn for the elements of this call, of all ranks, so that
            each class that is present weighs the same. With probabilities a class has the sum of its column.

    Shape:
        inputs (N, C, *) with C >= 2; targets (N, *) or (N, *, 1) class indices, or (N, C, *) probabilities as floats;
        ``sample_weight`` of the forward (N, *), with which the counts become sums of weights. N may differ between
        ranks and may be 0. Output scalar, or (N, *) with ``reduction="none"``.

    Degenerate:
        No valid element on any rank gives 0 with zero gradients, and so do weights that are all 0. With balanced
        weights a class without an element has weight 0, and the others are balanced without it.

    Example:
        >>> import torch
        >>> CrossEntropyLoss()(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor(1.3863)
    """

    weight: Tensor | None
    _checks = TorchLikeLoss._checks | {
        "ignore_index": check_int,
        "label_smoothing": partial(check_between, low=0, high=1),
    }
    _shown = "weight", "ignore_index", "reduction", "label_smoothing", "class_weight"

    def __init__(
        self,
        weight: Tensor | Literal["balanced"] | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        *,
        class_weight: Literal["balanced"] | None = None,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(reduction, gather_distributed, **options)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        if isinstance(weight, str):
            class_weight, weight = weight, None
        self._set_weights(class_weight, weight=weight)
        if weight is not None and weight.ndim != 1:
            raise ValueError(expected("weight", "shape (C,), one weight per class", weight))

    def elements(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Elements:
        x, y, valid, checks = self._checked(inputs, targets)
        shape = (*x.shape[:1], *x.shape[2:])
        weight, counted = self._weights_of(x), valid
        if weight is not None and not y.is_floating_point():
            counted = weight[y] if valid is None else torch.where(valid, weight[torch.where(valid, y, 0)], 0.0)
        row_weight = check_element_weight(sample_weight, shape, x.dtype, self.validate_args, checks)
        # The sum is made by torch, not from the elements: so the mean has the bits of torch's.
        reduction = "none" if row_weight is not None or self.reduction == "none" else "sum"
        of = partial(F.cross_entropy, weight=weight, ignore_index=self.ignore_index, reduction=reduction)
        usual = partial(of, x, y, label_smoothing=self.label_smoothing)
        values = _finite(usual, lambda: of(*self._unpadded(x, y)), x) if y.is_floating_point() else usual()
        return Elements.of(values, math.prod(shape), counted, row_weight, self.reduction == "mean", checks)

    def class_sums(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> ClassSums:
        """Return this rank's losses and masses of each class, of one problem."""
        x, y, valid, checks = self._checked(inputs, targets)
        num_rows, num_classes, rest = x.shape[0], x.shape[1], math.prod(x.shape[2:])
        shape, present = (num_rows, *x.shape[2:]), torch.ones((), dtype=x.dtype, device=x.device)
        shares = y
        if not y.is_floating_point():
            if valid is not None:
                y, present = y.where(valid, 0), valid.to(x.dtype).unsqueeze(1)
            shares = torch.zeros_like(x).scatter_(1, y.unsqueeze(1), present.expand(num_rows, 1, *x.shape[2:]))
        if y.is_floating_point():
            x, smoothed = self._unpadded(x, y)
        else:
            smoothed = torch.lerp(shares, present / num_classes, self.label_smoothing)
        # Where the share is 0 the logarithm may be infinite.
        losses = torch.where(smoothed > 0, -smoothed * F.log_softmax(x, dim=1), 0.0)
        weight = check_element_weight(sample_weight, shape, x.dtype, self.validate_args, checks)
        weight = None if weight is None else weight.reshape(num_rows, 1, rest)
        rows = num_rows, 1, num_classes, rest
        return ClassSums.of(losses.reshape(rows), shares.reshape(rows), weight, checks)

    def _checked(
        self, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, list[DeviceCheck | None]]:
        """Return the logits, the classes (N, *) or probabilities, which of them are not ignored, and the checks."""
        check_inputs(inputs, targets)
        x = inputs.to(compute_dtype(inputs.dtype))
        if targets.shape == inputs.shape and inputs.shape[1:2] > (1,):
            if not targets.is_floating_point():
                fix = "Use targets.argmax(dim=1) for one-hot targets; BCEWithLogitsLoss for several labels per row."
                raise TypeError(expected("targets", "class indices (N, *), or probabilities as floats", targets, fix))
            return x, targets.to(x.dtype), None, soft_target_checks(targets, self.validate_args)
        y, valid, checks = check_classes(inputs, targets, self.ignore_index, self.validate_args)
        if valid is not None:
            # Ignored elements may hold anything. Zeros for their logits keep a NaN out of the gradient.
            x, y = x.masked_fill(~valid.unsqueeze(1), 0.0), y.masked_fill(~valid, self.ignore_index)
        return x, y, valid, checks

    def _unpadded(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and smoothed probabilities to which a class of -inf without a probability adds exactly 0."""
        absent = (x == -math.inf) & (y == 0)
        share = self.label_smoothing / (~absent).sum(dim=1, keepdim=True, dtype=torch.float64)
        smoothed = y * (1 - self.label_smoothing) + share.to(y.dtype)
        return x.masked_fill(absent, -_LARGE * torch.finfo(x.dtype).max), smoothed.masked_fill(absent, 0.0)

    def _weights_of(self, x: Tensor) -> Tensor | None:
        if self.weight is None:
            return None
        if self.weight.shape != x.shape[1:2]:
            raise ValueError(expected("weight", f"shape ({x.shape[1]},), one weight per class", self.weight))
        return self.weight.detach().to(x)


@completed()
class BCEWithLogitsLoss(TorchLikeLoss):
    r"""Binary cross-entropy of independent problems, with the mean over the elements of all ranks.

    Equal to ``torch.nn.BCEWithLogitsLoss(weight, reduction=..., pos_weight=...)`` of the rows of all ranks:

    .. math:: L = -\frac{1}{n} \sum_i w_i \left(p \, y_i \log \sigma(x_i) + (1 - y_i) \log (1 - \sigma(x_i))\right)

    with p the ``pos_weight`` and n the number of elements of all ranks. A logit of -inf with the target 0, and of inf
    with 1, adds 0, where torch gives NaN.

    Args:
        weight: >= 0, broadcast to the shape of the inputs, such as (C,); the same on every rank; None for all 1. A
            buffer, as in torch. Weights of the rows of a batch are the ``sample_weight`` of the forward.
        pos_weight: >= 0, broadcast to the shape of the inputs: the factor on the positives, the same on every rank;
            None for all 1. A buffer.
        reduction: ``"mean"`` over the elements of all ranks, whose weights are not in the divisor, ``"sum"`` over all
            ranks, or ``"none"`` for this rank's elements.
        class_weight: ``"balanced"``: the weights of scikit-learn for the elements of this call, of all ranks, so that
            positives and negatives weigh the same; divided by the sum of the weights. Inputs (N, C, *) have C problems,
            which are balanced one by one.

    Shape:
        inputs of any shape; targets the same, numbers in [0, 1], where one of (N,) and (N, 1) may stand for the other;
        ``sample_weight`` of the forward has dim 0 of the inputs, and ``"mean"`` then divides by the sum of it. N may
        differ between ranks and may be 0. Output scalar, or the shape of inputs with ``reduction="none"``.

    Degenerate:
        No element on any rank gives 0 with zero gradients, where torch gives NaN. With balanced weights all rows weigh
        1 where there is no positive.

    Example:
        >>> import torch
        >>> BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))(torch.zeros(2), torch.tensor([1, 0]))
        tensor(1.3863)
    """

    weight: Tensor | None
    pos_weight: Tensor | None
    _shown = "weight", "pos_weight", "reduction", "class_weight"

    def __init__(
        self,
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
        reduction: Reduction = "mean",
        *,
        class_weight: Literal["balanced"] | None = None,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(reduction, gather_distributed, **options)
        self._set_weights(class_weight, weight=weight, pos_weight=pos_weight)

    def elements(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Elements:
        targets = targets_as(inputs, targets)
        checks = soft_target_checks(targets, self.validate_args)
        x = inputs.to(compute_dtype(inputs.dtype))
        weight, pos_weight = self._weight_of("weight", x), self._weight_of("pos_weight", x)
        row_weight = expanded_weight(sample_weight, inputs, x.dtype, self.validate_args, checks)
        # The sum is made by torch, not from the elements: so the mean has the bits of torch's.
        reduction = "none" if row_weight is not None or self.reduction == "none" else "sum"
        y = targets.to(x.dtype)
        of = partial(F.binary_cross_entropy_with_logits, weight=weight, pos_weight=pos_weight, reduction=reduction)
        values = _finite(partial(of, x, y), lambda: of(_settled(x, y), y), x)
        return Elements.of(values, x.numel(), None, row_weight, self.reduction == "mean", checks)

    def class_sums(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> ClassSums:
        """Return this rank's losses and masses of negatives and positives, of each problem."""
        targets = targets_as(inputs, targets)
        checks = soft_target_checks(targets, self.validate_args)
        weight = expanded_weight(sample_weight, inputs, compute_dtype(inputs.dtype), self.validate_args, checks)
        num_rows, num_problems = (*inputs.shape, 1, 1)[:2]
        shape = num_rows, num_problems, math.prod(inputs.shape[2:])
        x = inputs.to(compute_dtype(inputs.dtype)).reshape(shape)
        y = targets.to(x.dtype).reshape(shape)
        shares = torch.stack([1 - y, y], dim=2)
        logarithms = torch.stack([F.logsigmoid(-x), F.logsigmoid(x)], dim=2)
        # Where the share is 0 the logarithm may be infinite.
        losses = torch.where(shares > 0, -shares * logarithms, 0.0)
        return ClassSums.of(losses, shares, None if weight is None else weight.reshape(shape), checks)

    def _weight_of(self, name: str, x: Tensor) -> Tensor | None:
        weight: Tensor | None = getattr(self, name)
        if weight is None:
            return None
        fits = weight.ndim <= x.ndim and all(size in (1, n) for size, n in zip(weight.shape[::-1], x.shape[::-1]))
        if not fits:
            fix = "Pass weights of the rows as sample_weight."
            raise ValueError(expected(name, f"a shape that can be broadcast to {tuple(x.shape)}", weight, fix))
        return weight.detach().to(x)


def _finite(usual: Callable[[], Tensor], other: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Return ``usual()`` if the host sees that it is finite, else ``other()``, which is equal for finite ``x``."""
    if x.is_cpu and has_values(values := usual()) and math.isfinite(values.detach().sum()):  # no batch of targets
        return values
    return other()


def _settled(x: Tensor, y: Tensor) -> Tensor:
    """Return finite logits where they are infinite and on the side of a target of 0 or 1, so that the loss is 0."""
    large, values = _LARGE * torch.finfo(x.dtype).max, x.detach()
    finite = values.clamp(-large, large)
    return torch.where((values == y.logit()) & (values != finite), finite, x)  # logit(0) = -inf and logit(1) = inf
