"""Binary cross-entropy over the rows of all ranks, with the arguments and the values of torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ..errors import check_choice, expected
from .arguments import completed
from .cross_entropy import REDUCTIONS, TorchLikeLoss, TorchReduction
from .distributed_loss import GroupOptions
from .focal import Elements
from .sigmoid_focal import check_of_soft_targets, expanded_weight, targets_as
from .tensors import compute_dtype, has_values


@completed()
class BCEWithLogitsLoss(TorchLikeLoss):
    r"""Binary cross-entropy of independent problems, with the mean over the elements of all ranks.

    Equal to ``torch.nn.BCEWithLogitsLoss(weight, reduction=..., pos_weight=...)`` of the rows of all ranks:

    .. math:: L = -\frac{1}{n} \sum_i w_i \left(p \, y_i \log \sigma(x_i) + (1 - y_i) \log (1 - \sigma(x_i))\right)

    with p the ``pos_weight`` and n the number of elements of all ranks. Half precision is returned in float32.

    Args:
        weight: >= 0, broadcast to the shape of the inputs, such as (C,); the same on every rank; None for all 1. A
            buffer, as in torch. Weights of the rows of a batch are the ``sample_weight`` of the forward.
        pos_weight: >= 0, broadcast to the shape of the inputs: the factor on the positives, the same on every rank;
            None for all 1. The number of negatives over that of positives lets both weigh the same. A buffer.
        reduction: ``"mean"`` over the elements of all ranks, whose weights are not in the divisor, ``"sum"`` over all
            ranks, or ``"none"`` for this rank's elements.

    Shape:
        inputs of any shape; targets the same, numbers in [0, 1], where one of (N,) and (N, 1) may stand for the other;
        ``sample_weight`` of the forward has dim 0 of the inputs, and ``"mean"`` then divides by the sum of it. N may
        differ between ranks and may be 0. Output scalar, or the shape of inputs with ``reduction="none"``.

    Degenerate: no element on any rank gives 0 with zero gradients, where torch gives NaN.

    Example:
        >>> import torch
        >>> BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))(torch.zeros(2), torch.tensor([1, 0]))
        tensor(1.3863)
    """

    weight: Tensor | None
    pos_weight: Tensor | None
    _shown = "weight", "pos_weight", "reduction"

    def __init__(
        self,
        weight: Tensor | None = None,
        pos_weight: Tensor | None = None,
        reduction: TorchReduction = "mean",
        *,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        check_choice("reduction", reduction, REDUCTIONS)
        super().__init__(reduction, gather_distributed, **options)
        self._register_weights(weight=weight, pos_weight=pos_weight)

    def elements(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Elements:
        """Return this rank's element losses, or their sum, and their divisor."""
        targets = targets_as(inputs, targets)
        checks = [check_of_soft_targets(targets)] if self.validate_args and has_values(targets) else []
        x = inputs.to(compute_dtype(inputs.dtype))
        weight, pos_weight = self._weight_of("weight", x), self._weight_of("pos_weight", x)
        given = expanded_weight(sample_weight, inputs, x.dtype, self.validate_args)
        # A sum of torch rather than of its elements: that has the bits of its mean.
        reduction = "none" if given is not None or self.reduction == "none" else "sum"
        values = F.binary_cross_entropy_with_logits(
            x, targets.to(x.dtype), weight, pos_weight=pos_weight, reduction=reduction
        )
        return Elements.of(values, x.numel(), None, given, self.reduction == "mean", checks)

    def _weight_of(self, name: str, x: Tensor) -> Tensor | None:
        weight: Tensor | None = getattr(self, name)
        if weight is None:
            return None
        fits = weight.ndim <= x.ndim and all(own in (1, n) for own, n in zip(weight.shape[::-1], x.shape[::-1]))
        if not fits:
            fix = "Pass weights of the rows as sample_weight."
            raise ValueError(expected(name, f"a shape that can be broadcast to {tuple(x.shape)}", weight, fix))
        return weight.detach().to(x)
