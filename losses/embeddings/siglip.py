"""The sigmoid loss of pairs: SigLIP."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Unpack

from ...errors import check_flag, check_number, expected
from ..arguments import completed
from .base import softplus
from .pairs import PairLoss, PairOptions


def _check_bias(name: str, value: float) -> None:
    if not math.isfinite(check_number(name, value)):
        raise ValueError(expected(name, "a finite number", value))


@completed()
class SigLIPLoss(PairLoss):
    r"""Binary cross-entropy of telling the pairs from all other combinations of the queries and keys of all ranks.

    With :math:`x_{ij} = \cos(q_i, k_j)` over the N pairs of all ranks, :math:`z_{ii} = 1` and all other
    :math:`z_{ij} = -1`,

    .. math:: L = -\frac{1}{N} \sum_i \sum_j \log \sigma\bigl(z_{ij} (x_{ij} / \tau + b)\bigr)

    In one process equal to the loss of SigLIP of the whole batch. Negatives and the keys of the queue are further
    candidates of the queries.

    Args:
        bias: b, a finite number; its start if it is learned.
        learn: let ``logit_scale``, the logarithm of 1 / temperature, and ``logit_bias`` be parameters of this module,
            of shape (1,). Their gradients are those of one process on every rank, as in
            :class:`~fullrank.InfoNCELoss`: give them to the optimizer, without weight decay.

    Example:
        >>> import torch
        >>> queries, keys = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> SigLIPLoss(temperature=1.0, bias=0.0, learn=False)(queries, keys)
        tensor(1.2576)

    Reference:
        Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023, eq. 1 and algorithm 1.
    """

    learn = PairLoss.learn_temperature  # of the bias too
    _checks = PairLoss._checks | {"bias": _check_bias}
    _in_c = "sigmoid_of_pairs"

    def __init__(
        self,
        temperature: float = 0.1,
        bias: float = -10.0,
        *,
        learn: bool = True,
        margin: float = 0.0,
        margin_strategy: str = "absolute",
        **options: Unpack[PairOptions],
    ) -> None:
        check_flag("learn", learn)
        super().__init__(temperature, learn, margin, margin_strategy, **options)
        self.bias = bias
        self.logit_bias = nn.Parameter(torch.full((1,), float(bias))) if learn else None

    @property
    def _shown(self) -> tuple[str, ...]:
        shared = "learn", *(name for name in self._of_guided if name != "learn_temperature")
        return shared if self.learn else ("bias", *shared)

    def _terms(self, others: Tensor, positives: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        losses = softplus(-positives) + F.softplus(others, threshold=40.0).sum(dim=1)  # the default of 20 rounds
        others.sigmoid_().mul_(weight[:, None])
        return losses, -(-positives).sigmoid() * weight
