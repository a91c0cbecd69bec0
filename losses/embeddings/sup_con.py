"""The supervised contrastive loss: the rows of a label attract each other, all others are kept away."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...distributed.exchange import Exchange
from ...distributed.gather import gather_after
from ...distributed.header import Offer, agree_on, refuse_in_backward
from ...distributed.torch_private import not_compiled
from ...errors import check_positive
from ...kernels.registration import exact
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions
from ..rows import check_values
from .base import ContrastiveLoss, Part, log_sum_exp, softplus, sum_of_blocks
from .retrieval import checked_labels


@completed()
class SupConLoss(ContrastiveLoss):
    r"""Cross-entropy of finding the rows of the same label among the rows of all ranks.

    With :math:`x_{ij} = \cos(z_i, z_j)`, :math:`P_i` the other rows that have the label of i, V the rows that have any,

    .. math:: L = -\frac{1}{|V|} \sum_{i \in V} \frac{1}{|P_i|} \sum_{p \in P_i}
        \log \frac{\exp(x_{ip} / \tau)}{\sum_{j \ne i} \exp(x_{ij} / \tau)}

    With two rows of each label, such as two views of an image, this is NT-Xent, the loss of SimCLR. Labels must then
    differ between the ranks, as the indices of the images in the data set do. A row without another of its label is a
    candidate of the others. The rows of the queue have their labels: they are positives and negatives of the live rows.

    Args:
        temperature: > 0, what the similarities are divided by. May be assigned between steps.

    Example:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0], [-1.0, 1.0]])
        >>> SupConLoss(temperature=1.0)(embeddings, torch.tensor([0, 0, 1, 1]))
        tensor(0.7326)

    Reference:
        Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, eq. 2 (the mean outside of the logarithm). Chen et
        al., A Simple Framework for Contrastive Learning, ICML 2020, eq. 1 (two views). Wang et al., Cross-Batch Memory
        for Embedding Learning, CVPR 2020 (the queue).
    """

    temperature: float  # never None
    _shown = "normalize", "queue_size", "ignore_index", "gradient_reduction"

    def __init__(
        self,
        temperature: float = 0.1,
        *,
        normalize: bool = True,
        queue_size: int = 0,
        ignore_index: int = -100,
        num_features: int | None = None,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(normalize, queue_size, num_features, gather_distributed, ignore_index, **options)
        self.ignore_index = ignore_index
        self.temperature = check_positive("temperature", temperature)

    @completed(DistributedLoss)
    @not_compiled
    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the rows of all ranks, a scalar.

        Args:
            embeddings: (N, D) of this rank; N may differ between ranks and may be 0.
            labels: (N,) or (N, 1) integers or bools, in any order and number.
        """
        call, group = type(self).__name__, self._resolve_group()
        refuse_in_backward(call)

        def bring() -> Offer[tuple[Tensor, Tensor]]:
            check_positive("temperature", self.temperature)
            rows, names = self._checked("embeddings", embeddings, group), checked_labels(labels, embeddings)
            check_values("embeddings", rows)
            ignored = names == self.ignore_index
            if bool(ignored.any()):
                kept = (~ignored).nonzero()[:, 0]
                rows, names = rows.index_select(0, kept), names.index_select(0, kept)
            facts = {} if group is None else self._facts({})
            return Offer((rows, names), facts, checksum=self._checksum, tensors=(rows, names))

        agreed = agree_on(call, group, bring)
        rows, names = agreed.value
        own, exchange, first = self._comparable(rows), None, 0
        everyone = own.detach(), names
        if group is not None:
            exchange = Exchange(call, group)
            first = sum(agreed.rows[: exchange.rank])
            with torch.no_grad():
                arrived, names = gather_after(call, group, agreed)
                everyone = self._comparable(arrived), names
        needs_grad = torch.is_grad_enabled() and own.requires_grad
        loss = self._add_up(self._part(own, *everyone, first, needs_grad), [own], agreed, exchange)
        if self._enqueues:
            self.queue.enqueue(*everyone)
        return loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    @torch.no_grad()
    def _part(self, own: Tensor, live: Tensor, labels: Tensor, first: int, needs_grad: bool) -> Part:
        """Return this rank's part of the loss; ``first`` is the place of its first row among the live ones of all."""
        mine = own.detach()
        candidates, names = self._with_queue(live, labels)
        _, label, count = names.unique(return_inverse=True, return_counts=True)
        labels_of = _Labels(label, count, label.argsort(stable=True), count.cumsum(0) - count)
        weight = 1 / (count[label[: len(live)]] > 1).sum().clamp_min(1).to(mine)
        terms = partial(
            _terms, labels=labels_of, most=int(count.max()) if len(label) else 0, weight=weight, first=first
        )
        scale, needs = mine.new_tensor(1.0 / self.temperature), (needs_grad, needs_grad, False)
        total, of_own, of_all, _ = exact(sum_of_blocks)(mine, candidates, scale, needs, terms)
        of_all = None if of_all is None else of_all[: len(live)]
        # NaN is seen also where no row counts.
        total = total + 0.0 * mine.sum(dtype=torch.float64)
        return Part(total, torch.zeros_like(total), [of_own], [of_all])


class _Labels(NamedTuple):
    """The candidates of each label: the first ``number`` of ``order`` from ``start`` on."""

    label: Tensor  # [K] of each candidate, from 0 on
    number: Tensor  # [L]
    order: Tensor  # [K]
    start: Tensor  # [L]


def _terms(
    scores: Tensor, place: slice, labels: _Labels, most: int, weight: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    r"""Return the weighted sum of the losses of a block (b, K), and its gradient in place of the scores.

    With a the logarithm of the sum of exp over :math:`P_i`, and g that over the other labels less a, the loss of a row
    is :math:`\log (1 + e^g)`, and a less the mean over :math:`P_i`. The latter is 0 for a single positive. Rows far
    apart keep all digits. Row i of the block is candidate ``first + place.start + i``. Labels have up to ``most``.
    """
    own = torch.arange(first + place.start, first + place.stop, device=scores.device)[:, None]  # [b, 1]
    label, index = labels.label[own], torch.arange(most, device=scores.device)
    inside = index < labels.number[label]  # [b, S]
    same = labels.order[(labels.start[label] + index).clamp_max_(len(labels.order) - 1)]
    same = torch.where(inside, same, own)  # the row itself where the label has no more
    inside &= same != own
    number = labels.number[label[:, 0]] - 1  # [b] |P_i|
    share, weight = 1 / number.clamp_min(1).to(scores), weight * (number > 0)
    found = scores.gather(1, same)
    near = log_sum_exp(found.masked_fill(~inside, -math.inf))  # [b]
    away = log_sum_exp(scores.scatter_(1, same, -math.inf))
    gap = away - near
    spread = ((near[:, None] - found) * inside).sum(dim=1) * share
    total = (softplus(gap) + spread.double()) @ weight.double()
    push = gap.sigmoid()[:, None]
    inner = (found - near[:, None]).exp()
    inner = torch.where(inside, inner - share[:, None] - inner * push, 0.0) * weight[:, None]
    slope = scores.sub_(away[:, None]).exp_().mul_(push * weight[:, None])
    return total, slope.scatter_(1, same, inner)
