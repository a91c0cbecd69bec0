"""The base of focal losses and cross-entropy: a sum over elements divided by a count. Logits never travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from ...distributed.gather import check_not_gathered, gather_agreed
from ...distributed.global_mean import local_mean, mean_agreed, part_of_mean
from ...distributed.header import DeviceCheck, Offer, agree_on, combined
from ...distributed.torch_private import note_kind
from ...errors import check_tensor, expected
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions, compiled_where_local
from ..rows import check_device, compute_dtype, weight_unit


@completed()
class SummedLoss(DistributedLoss):
    """Base of the focal losses and of cross-entropy: the header carries the sum of the elements and their count.

    Args:
        reduction: see the subclass.

    Numerics: half precision is computed and returned in float32; the gradient has the dtype of the inputs.
    Distributed: one collective forward, the header, and none backward. Logits do not travel.
    """

    _is_balanced = False  # whether the classes are given equal weight, by the number of rows that each has in a call

    def __init__(self, reduction: str, gather_distributed: bool | None = None, **options: Unpack[GroupOptions]) -> None:
        super().__init__(gather_distributed, **options)
        self.reduction = reduction

    def elements(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> Elements:
        """Return this rank's element losses and their divisor; the formula of the subclass."""
        raise NotImplementedError

    def class_sums(self, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None) -> ClassSums:
        """Return this rank's losses and masses of each class; the formula of a subclass with balanced weights."""
        raise NotImplementedError

    @completed(DistributedLoss)
    @compiled_where_local
    def forward(self, inputs: Tensor, targets: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss over the elements of all ranks; with ``"none"``, the element losses of this rank.

        Args:
            inputs: raw scores of this rank, N of them, which may be 0. Sigmoid: any shape. Softmax: (N, C, *), C >= 2.
            targets: sigmoid: numbers from 0 to 1 in the shape of inputs; (N,) and (N, 1) may stand for each other.
                Softmax: (N, *) class indices.
            sample_weight: >= 0, weight of each element; None for all 1.
        """
        call = type(self).__name__
        group = self._resolve_group()
        if self._is_balanced:
            return self._noted(self._balanced(group, inputs, targets, sample_weight))
        if group is None:
            return self._noted(local_loss(self.elements(inputs, targets, sample_weight), self.reduction))
        elements: list[Elements] = []  # one entry, once the checks have passed

        def bring() -> Offer[Tensor]:
            if self.reduction == "sum":  # a mean is right for gathered rows too: both its sums are W times as large
                check_not_gathered(group, inputs=inputs, targets=targets)
            elements.append(self.elements(inputs, targets, sample_weight))
            facts = self._facts_of(inputs, sample_weight)
            values, divisor, unit, check = elements[0]
            if unit is None:
                return part_of_mean(values.sum(), divisor, facts, check)
            # The units differ between ranks. In float64 nothing overflows.
            return part_of_mean(values.sum().double() * unit, unit.double() * divisor, facts, check)

        mean = mean_agreed(call, group, bring, gradient_reduction=self.gradient_reduction)
        if self.reduction == "none":
            return elements[0].values
        return self._noted(mean.to(elements[0].values.dtype))

    def _balanced(
        self, group: ProcessGroup | None, inputs: Tensor, targets: Tensor, sample_weight: Tensor | None
    ) -> Tensor:
        """Return the mean with balanced weights, for which each rank needs the sums of each class over all ranks."""

        def bring() -> Offer[Tensor]:
            check_not_gathered(group, inputs=inputs, targets=targets)
            losses, masses, unit, check = self.class_sums(inputs, targets, sample_weight)
            sums = torch.stack([losses.double(), masses])[None] * (1.0 if unit is None else unit.double())
            facts = self._facts_of(inputs, sample_weight)
            return Offer(sums, facts, check=check, tensors=(sums,), names=("sums of classes",))

        name = type(self).__name__
        if group is None:
            rows = agree_on(name, None, bring).value
        else:
            (rows,) = gather_agreed(name, group, bring, gradient_reduction=self.gradient_reduction).tensors
        losses, masses = rows.sum(dim=0)  # [P, K] each, the same bits on every rank
        unit = weight_unit(masses.detach())  # no sum of weights overflows
        losses, masses = losses / unit, masses.detach() / unit
        present = masses > 0
        # scikit-learn's: with it the present classes weigh the same, and the rows of a problem 1 on average.
        weights = masses.sum(dim=1, keepdim=True) / (present.sum(dim=1, keepdim=True) * masses)
        mean = local_mean((weights.where(present, 0.0) * losses).sum(), masses.sum())
        mean = mean.to(compute_dtype(inputs.dtype))
        return mean if group is None else note_kind(mean, over_ranks=True)

    def _facts_of(self, inputs: Tensor, sample_weight: Tensor | None) -> dict[str, object]:
        """Return the facts of a call that must be equal on all ranks."""
        dtype = str(inputs.dtype).removeprefix("torch.")
        given = {} if sample_weight is None else {"sample_weight": True}
        return {**self._facts(), "inputs": dtype, "classes": inputs.shape[1:2], **given}

    def _noted(self, loss: Tensor) -> Tensor:
        """Return ``loss``, marked as a mean if it is one; balanced weights are those of a pool."""
        return note_kind(loss, mean=True, of_pool=self._is_balanced) if self.reduction.startswith("mean") else loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward


class ClassSums(NamedTuple):
    """What the elements of each of K classes add up to, in each of P problems. Both sums are in units of ``unit``."""

    losses: Tensor  # [P, K], compute dtype
    masses: Tensor  # [P, K] number of elements, or their weights
    unit: Tensor | None  # scalar, the weights were divided by it; None for 1
    check: DeviceCheck | None  # checks of values that have not been read

    @staticmethod
    def of(losses: Tensor, shares: Tensor, weight: Tensor | None, checks: list[DeviceCheck | None]) -> ClassSums:
        """Return the sums of (N, P, K, M) losses and shares of elements in classes; weights (N, P or 1, M)."""
        unit = None
        if weight is not None:
            unit = weight_unit(weight)
            weight = (weight / unit).to(losses.dtype).unsqueeze(2)
            losses, shares = losses * weight, shares * weight
        return ClassSums(losses.sum(dim=(0, 3)), shares.sum(dim=(0, 3), dtype=torch.float64), unit, combined(checks))


class Elements(NamedTuple):
    """Element losses, weighted, 0 where ignored; and the divisor of their sum. A mean has both in units of ``unit``."""

    values: Tensor  # [N, *], compute dtype
    divisor: Tensor | float  # scalar: number of elements, or their mass of weights; 0 for a plain sum
    unit: Tensor | None = None  # scalar, the weights were divided by it; None for 1
    check: DeviceCheck | None = None  # checks of values that have not been read

    @staticmethod
    def of(
        values: Tensor,
        number: int,
        counted: Tensor | None,
        weight: Tensor | None,
        is_mean: bool,
        checks: list[DeviceCheck | None],
    ) -> Elements:
        """Return the losses of ``number`` elements, or their sum, times the weights if there are any, and the divisor.

        ``counted`` is what each element adds to the divisor, None for 1.
        """
        unit = None
        if weight is not None:
            if is_mean:
                unit = weight_unit(weight)
                weight = weight / unit
            weight = weight.to(values.dtype)
            values, counted = values * weight, weight if counted is None else counted * weight
        divisor = float(number) if counted is None else counted.sum()
        return Elements(values, divisor if is_mean else 0.0, unit, combined(checks))


def local_loss(elements: Elements, reduction: str) -> Tensor:
    """Return the loss over the elements of this rank, or raise the error of a failed check of values."""
    if elements.check is not None:
        elements.check.read()
    return elements.values if reduction == "none" else local_mean(elements.values.sum(), elements.divisor)


def check_inputs(inputs: Tensor, targets: Tensor) -> None:
    """Raise when the inputs are not floating-point, or the two tensors are on different devices."""
    check_tensor("inputs", inputs)
    check_tensor("targets", targets)
    if not inputs.is_floating_point():
        raise TypeError(expected("inputs", "a floating-point tensor", inputs, "Pass raw logits."))
    check_device("targets", targets, inputs, "inputs")


def match_shape(targets: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return ``targets`` in ``shape`` if only a last dimension of one element differs, else unchanged."""
    current = tuple(targets.shape)
    return targets.reshape(shape) if current == (*shape, 1) or (*current, 1) == shape else targets


def squeeze_advice(name: str, value: Tensor, shape: tuple[int, ...]) -> str:
    """Return the fix if only a last dimension of one element differs from ``shape``, else an empty text."""
    if tuple(value.shape) == (*shape, 1):
        return f"Use {name}.squeeze({len(shape)})."
    return f"Use {name}.unsqueeze({value.ndim})." if (*value.shape, 1) == shape else ""


def focus(log_p: Tensor, gamma: float) -> Tensor:
    """Return ``(1 - p)^gamma``, to full accuracy for p near 1, with a finite slope there."""
    return power(-torch.expm1(log_p), gamma)


def power(distance: Tensor, gamma: float) -> Tensor:
    """Return ``distance^gamma`` for numbers >= 0, with a finite slope at 0."""
    if gamma == 0:
        return torch.ones_like(distance)
    # For gamma < 1 the slope of x^gamma at 0 is infinite. At the smallest normal number it is finite.
    return distance.clamp_min(torch.finfo(distance.dtype).tiny) ** gamma if gamma < 1 else distance**gamma
