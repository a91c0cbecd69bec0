"""The supervised contrastive loss: rows with the same label attract each other, and rows of other labels repel."""

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
from ...errors import check_temperature, expected
from ...kernels.registration import exact
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions
from ..pooled.hints import NO_PAIR
from ..rows import check_values, weight_of_rows, weight_unit
from .base import ContrastiveLoss, LocalLoss, log_sum_exp, softplus, sum_of_blocks
from .retrieval import TENSORS, checked_labels


@completed()
class SupConLoss(ContrastiveLoss):
    r"""Cross-entropy of finding the rows of the same label among the rows of all ranks.

    With :math:`x_{ij} = \cos(z_i, z_j)`, :math:`P_i` the other rows with the label of i, and V the rows for which there
    are any,

    .. math:: L = -\frac{1}{|V|} \sum_{i \in V} \frac{1}{|P_i|} \sum_{p \in P_i}
        \log \frac{\exp(x_{ip} / \tau)}{\sum_{j \ne i} \exp(x_{ij} / \tau)}

    With two rows of each label, such as two views of an image, this is NT-Xent, the loss of SimCLR. Labels must then
    differ between the ranks, as the indices of the images in the data set do. Views may be passed as (N, V, D): equal
    to ``(embeddings.flatten(0, 1), labels.repeat_interleave(V))``. A row without another of its label is a
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
        check_temperature(temperature)
        self.temperature = temperature

    @completed(DistributedLoss)
    @not_compiled
    def forward(self, embeddings: Tensor, labels: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of the rows of all ranks, a scalar.

        Args:
            embeddings: (N, D) of this rank, or (N, V, D) with V views of each row, which have its label; N and V may
                differ between ranks, and N may be 0.
            labels: (N,) or (N, 1) integers or bools, in any order and number.
            sample_weight: (N,) >= 0, of the rows in the mean over V, on every rank or on none. Every row stays a
                candidate of the others.
        """
        call, group = type(self).__name__, self._resolve_group()
        refuse_in_backward(call)

        def bring() -> Offer[tuple[Tensor, Tensor, Tensor | None]]:
            check_temperature(self.temperature)
            self._check_not_gathered(group, labels=labels)
            has_views = isinstance(embeddings, Tensor) and not embeddings.is_nested and embeddings.ndim == 3
            has_views = has_views and embeddings.shape[1] > 0
            if has_views:
                self._check_not_gathered(group, embeddings=embeddings)
            elif isinstance(embeddings, Tensor) and not embeddings.is_nested and embeddings.ndim > 3:
                fix = "Use embeddings.flatten(2) if dim 1 is views, else embeddings.flatten(1)."
                raise ValueError(expected("embeddings", "shape (N, D) or (N, V, D)", embeddings, fix))
            rows = self._checked("embeddings", embeddings.flatten(0, 1) if has_views else embeddings, group)
            targets = checked_labels(labels, embeddings)
            weight, check = weight_of_rows(sample_weight, embeddings, "embeddings", self.validate_args)
            if has_views:
                targets = targets.repeat_interleave(embeddings.shape[1])
                weight = None if weight is None else weight.repeat_interleave(embeddings.shape[1])
            check_values("embeddings", rows)
            ignored = targets == self.ignore_index
            if bool(ignored.any()):
                kept = (~ignored).nonzero()[:, 0]
                rows, targets = rows.index_select(0, kept), targets.index_select(0, kept)
                weight = None if weight is None else weight.index_select(0, kept)
            facts = {} if group is None else self._facts({})
            tensors = rows, targets, weight
            return Offer(tensors, facts, checksum=self._checksum, check=check, tensors=tensors, names=TENSORS)

        agreed = agree_on(call, group, bring)
        rows, targets, weight = agreed.value
        rows = self._comparable(rows)
        live, exchange, first = rows.detach(), None, 0
        if group is not None:
            exchange = Exchange(call, group)
            first = sum(agreed.rows[: exchange.rank])
            with torch.no_grad():
                live, targets, weight = gathered = gather_after(call, group, agreed)
                live = self._comparable(live)
        needs_grad = torch.is_grad_enabled() and rows.requires_grad
        local, has_pair = self._local_loss(rows.detach(), live, targets, weight, first, needs_grad)
        loss = self._sum_over_ranks(local, [rows], [agreed.rows], exchange)
        if self._enqueues:
            self.queue.enqueue(live, targets)
        if self.validate_args and self.training and self._hints.count_call():
            self._hints.observe_valid(has_pair, NO_PAIR)
            if group is not None:
                self._hints.observe_ranks(agreed.rows, gathered)
        return loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    @torch.no_grad()
    def _local_loss(
        self, rows: Tensor, live: Tensor, targets: Tensor, weight: Tensor | None, first: int, needs_grad: bool
    ) -> tuple[LocalLoss, Tensor]:
        """Return this rank's terms of the loss, and which of the ``live`` rows of all ranks have a pair, (M,) bool.

        ``rows`` begin at ``first`` of the ``live`` rows.
        """
        candidates, labels = self._with_queue(live, targets)
        _, label, count = labels.unique(return_inverse=True, return_counts=True)
        groups = _LabelGroups(label, count, label.argsort(stable=True), count.cumsum(0) - count)
        has_pair = count[label[: len(live)]] > 1
        if weight is None:
            share = 1 / has_pair.sum().clamp_min(1).to(rows)
        else:
            weight = weight / weight_unit(weight)
            mass = (weight * has_pair).sum()
            share = (weight / torch.where(mass > 0, mass, 1.0))[first : first + len(rows)]
        largest = int(count.max()) if len(label) else 0
        block_loss = partial(_block_loss, groups=groups, largest=largest, weight=share, first=first)
        scale, needs = rows.new_tensor(1.0 / self.temperature), (needs_grad, needs_grad, False)
        total, grad_own, grad_all, *_ = exact(sum_of_blocks)(rows, candidates, scale, needs, block_loss)
        grad_all = None if grad_all is None else grad_all[: len(live)]
        # A NaN reaches the loss even if no row counts.
        total = total + 0.0 * rows.sum(dtype=torch.float64)
        return LocalLoss(total, total.new_zeros(0), [grad_own], [grad_all]), has_pair


class _LabelGroups(NamedTuple):
    """The candidates of each label: the first ``number`` of ``order`` from ``start`` on."""

    label: Tensor  # [K] of each candidate, from 0 on
    number: Tensor  # [L]
    order: Tensor  # [K]
    start: Tensor  # [L]


def _block_loss(
    scores: Tensor, place: slice, groups: _LabelGroups, largest: int, weight: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    r"""Return the weighted sum of the losses of a block (b, K), and its gradient in place of the scores.

    With a the logarithm of the sum of exp over :math:`P_i`, and g the same over the other labels less a, the loss of a
    row is :math:`\log (1 + e^g)`, plus a less the mean over :math:`P_i`, which is 0 for a single positive. Rows far
    apart keep all digits. Row i of the block is candidate ``first + place.start + i``. S is the ``largest`` group.
    """
    anchor = torch.arange(first + place.start, first + place.stop, device=scores.device)[:, None]  # [b, 1]
    label, index = groups.label[anchor], torch.arange(largest, device=scores.device)
    inside = index < groups.number[label]  # [b, S]
    same = groups.order[(groups.start[label] + index).clamp_max_(len(groups.order) - 1)]
    same = torch.where(inside, same, anchor)  # the row itself where the label has no more
    inside &= same != anchor
    number = groups.number[label[:, 0]] - 1  # [b] |P_i|
    share, weight = 1 / number.clamp_min(1).to(scores), (weight[place] if weight.ndim else weight) * (number > 0)
    positives = scores.gather(1, same)
    near = log_sum_exp(positives.masked_fill(~inside, -math.inf))  # [b]
    away = log_sum_exp(scores.scatter_(1, same, -math.inf))
    gap = away - near
    spread = ((near[:, None] - positives) * inside).sum(dim=1) * share
    total = (softplus(gap) + spread.double()) @ weight.double()
    push = gap.sigmoid()[:, None]
    inner = (positives - near[:, None]).exp()
    factor = weight[:, None].to(scores)
    inner = torch.where(inside, inner - share[:, None] - inner * push, 0.0) * factor
    slope = scores.sub_(away[:, None]).exp_().mul_(push * factor)
    return total, slope.scatter_(1, same, inner)
