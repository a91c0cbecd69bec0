"""Smooth average precision for metric learning: every embedding is a query that ranks all others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..distributed.gather import Rows, gather_agreed
from ..distributed.group import Group
from ..distributed.header import State, refuse_in_backward
from ..distributed.torch_private import not_compiled
from ..errors import check_choice, check_int, check_positive, check_tensor, expected
from .all_queries import ap_of_all_queries, directions
from .batch import check_device, is_integer
from .distributed_loss import SAME_TEMPERATURE, DistributedLoss
from .pool import REDUCTIONS, PerClass, reduce_values
from .ranking import Reduction


def retrieval_smooth_ap(
    embeddings: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
) -> Tensor:
    r"""Compute one minus the smooth average precision of every row as a query against all other rows.

    With :math:`x_{qj} = \cos(z_q, z_j)` and :math:`P_q` the other rows that have the label of q,

    .. math::
        L_q = 1 - \frac{1}{|P_q|} \sum_{i \in P_q}
            \frac{1 + \sum_{j \in P_q, j \ne i} \sigma((x_{qj} - x_{qi})/\tau)}
                 {1 + \sum_{j \ne i, j \ne q} \sigma((x_{qj} - x_{qi})/\tau)}

    Equal to :func:`~fullrank.losses.smooth_ap` of the N (N - 1) similarities with ``indexes`` that name the query.

    Args:
        embeddings: (N, D) in any scale; they are normalised here.
        labels: (N,) integers or bools, in any order and number: classes may differ in size, and a row may be alone.
        temperature: tau > 0, in units of the cosine.
        reduction: ``"mean"`` or ``"sum"`` over the valid queries, or ``"none"`` for (N,).
        ignore_index: rows with this label take no part: they are no query, and no query ranks them.

    Raises:
        TypeError, ValueError: for arguments that do not fit.

    Degenerate:
        A query without another row of its label, or without one of another label, is invalid: left out of the mean and
        the sum, NaN under ``"none"``. Ignored rows are NaN there too. With no valid query the loss is 0 and its
        gradient too. An embedding of zeros has a cosine of 0 with all others, and the gradient of one of length 1.

    Numerics:
        Half precision is computed in float32. O(N^2) time for the similarities and the sums, O(N D) memory: a few
        queries are held at a time, and their gradient is added up at once. Where queries weigh differently in what is
        back-propagated, as after ``reduction="none"``, the backward computes them again.

    Example:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0], [-1.0, 1.0]])
        >>> retrieval_smooth_ap(embeddings, torch.tensor([0, 0, 1, 1]))
        tensor(0.5417)

    Reference:
        Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020, eq. 6.
    """
    check_positive("temperature", temperature)
    check_choice("reduction", reduction, REDUCTIONS)
    check_int("ignore_index", ignore_index)
    return _loss(*_check_rows(embeddings, labels), temperature, reduction, ignore_index)


class RetrievalSmoothAPLoss(DistributedLoss):
    """One minus the smooth average precision of every embedding as a query against those of all ranks.

    The formula is that of :func:`~fullrank.losses.retrieval_smooth_ap`. The embeddings of all ranks are gathered with
    gradient, normalised, and each of them ranks all others by cosine similarity.

    Args:
        temperature: width of the sigmoid that stands for the step, > 0, in units of the cosine; may be changed between
            steps.
        reduction: ``"mean"`` or ``"sum"`` over the valid queries, or ``"none"`` for a value for each row of all ranks.
        ignore_index: rows with this label take no part: they are no query, and no query ranks them.
        gather_distributed: None detects a process group at the forward, False keeps to this rank, True demands a group.
        group: process group or device mesh of the data-parallel ranks; None for the default group.
        gradient_reduction: how the wrapper combines parameter gradients: ``"mean"``, ``"sum"``, or a number of ranks.
        validate_args: as in the other losses; any integer is a label, so no value is looked at here.

    Shape:
        embeddings (N, D), labels (N,); N may differ between ranks and may be 0. Output scalar, or with
        ``reduction="none"`` (sum over ranks of N,), in rank order.

    Raises:
        TypeError, ValueError: for arguments that do not fit, at construction and in the forward, on every rank.
        RuntimeError: when ranks disagree about the call or the temperature, or inside activation checkpointing.

    Degenerate:
        A query without another row of its label, or without one of another label, is invalid: left out of the mean and
        the sum, NaN under ``"none"``. With no valid query the loss is 0 and its gradient too.

    Distributed:
        Two collectives forward, the header and one payload with the rows of all ranks; none backward. Every rank
        computes all queries, and gets the same value.

    Example:
        >>> import torch
        >>> loss = RetrievalSmoothAPLoss()
        >>> loss(torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 1.0], [-1.0, 1.0]]), torch.tensor([0, 0, 1, 1]))
        tensor(0.5417)

    Reference:
        Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020.
    """

    def __init__(
        self,
        temperature: float = 0.01,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        gather_distributed: bool | None = None,
        *,
        group: Group = None,
        gradient_reduction: str | int = "mean",
        validate_args: bool = True,
    ) -> None:
        super().__init__(gather_distributed, group, gradient_reduction, validate_args)
        self.temperature = check_positive("temperature", temperature)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.ignore_index = check_int("ignore_index", ignore_index)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the rows of all ranks.

        Args:
            embeddings: (N, D) of this rank; N may differ between ranks and may be 0.
            labels: (N,) integers or bools.

        Raises:
            TypeError, ValueError: for arguments that do not fit; on every rank.
            RuntimeError: when ranks disagree about the call, or inside activation checkpointing.
        """
        call = type(self).__name__
        refuse_in_backward(call)

        def check() -> tuple[Tensor, Tensor]:
            check_positive("temperature", self.temperature)
            return _check_rows(embeddings, labels)

        def prepare() -> Rows:
            return Rows(check(), {**self._shared_facts(), "temperature": State(self.temperature, SAME_TEMPERATURE)})

        group = self._resolve_group()
        if group is None:
            rows: tuple[Any, ...] = check()
        else:
            rows = gather_agreed(call, group, prepare, gradient_reduction=self.gradient_reduction).tensors
        return _loss(*rows, self.temperature, self.reduction, self.ignore_index)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what changes during training: the temperature."""
        return {"temperature": float(self.temperature)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self.temperature = float(state["temperature"])

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``, and for the comparison between ranks."""
        names = ("reduction", "ignore_index", "gradient_reduction")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _check_rows(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings, and the labels as int64; or raise TypeError or ValueError."""
    check_tensor("embeddings", embeddings)
    check_tensor("labels", labels)
    if not embeddings.is_floating_point():
        raise TypeError(expected("embeddings", "a floating-point tensor", embeddings, "Use embeddings.float()."))
    if embeddings.ndim != 2 or embeddings.shape[1] == 0:
        raise ValueError(expected("embeddings", "shape (N, D), D >= 1", embeddings, "Use embeddings.flatten(1)."))
    if not is_integer(labels) and labels.dtype != torch.bool:
        raise TypeError(expected("labels", "integers or bools", labels, "Use labels.long() on class indices."))
    count = embeddings.shape[0]
    if tuple(labels.shape) != (count,):
        fix = "Use labels.squeeze(1)." if tuple(labels.shape) == (count, 1) else ""
        raise ValueError(expected("labels", f"shape ({count},), one entry per row of embeddings", labels, fix))
    check_device("labels", labels, embeddings, "embeddings")
    return embeddings, labels.to(torch.int64)


@not_compiled
def _loss(embeddings: Tensor, labels: Tensor, temperature: float, reduction: str, ignore_index: int) -> Tensor:
    """Return the loss of rows that have been checked."""
    kept = (labels != ignore_index).nonzero()[:, 0]
    unit = directions(embeddings.index_select(0, kept))
    per_query = PerClass(*ap_of_all_queries(unit, labels.index_select(0, kept), temperature))
    loss = reduce_values(per_query, reduction, unit.dtype)
    if reduction == "none":
        return loss.new_full(labels.shape, math.nan).index_copy(0, kept, loss)
    return loss
