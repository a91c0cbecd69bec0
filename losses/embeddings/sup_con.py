"""The supervised contrastive loss: rows with the same label attract each other, and rows of other labels repel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from ...distributed.exchange import Exchange
from ...distributed.gather import check_not_gathered
from ...distributed.header import DeviceCheck, Offer, agree_on
from ...distributed.torch_private import not_compiled
from ...errors import check_int, expected
from ...kernels import native
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions
from ..rows import check_values, weight_of_rows, weight_unit
from .base import (
    NO_PAIR,
    Columns,
    ContrastiveLoss,
    Side,
    check_like,
    compare,
    gather,
    joined,
    lowest,
    softmax_,
    softplus,
    sum_of_blocks,
)
from .retrieval import checked_labels

_NUMBERED = -(2**62)  # the first of the labels that rows without one get, far from those of callers


@completed()
class SupConLoss(ContrastiveLoss):
    r"""Cross-entropy of finding the rows of the same label among the rows of all ranks.

    With :math:`x_{ij} = \cos(z_i, z_j)`, :math:`P_i` the other rows with the label of i, or with one of its labels, and
    V the rows for which there are any,

    .. math:: L = -\frac{1}{|V|} \sum_{i \in V} \frac{1}{|P_i|} \sum_{p \in P_i}
        \log \frac{\exp(x_{ip} / \tau)}{\sum_{j \ne i} \exp(x_{ij} / \tau)}

    With two views of each image as (N, V, D) and no labels, this is NT-Xent, the loss of SimCLR. With labels, views are
    equal to ``(embeddings.flatten(0, 1), labels.repeat_interleave(V))``. Labels have one meaning on all ranks: the
    numbers of the rows of a batch would give unrelated rows of different ranks the same label. A row without another of
    its label is a candidate of the others. Rows of the queue are positives and negatives too, by their labels.

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
    _checks = ContrastiveLoss._checks | {"ignore_index": check_int}
    _fixed = (*ContrastiveLoss._fixed, "ignore_index")
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
        self._start_temperature(temperature)

    @completed(DistributedLoss)
    @not_compiled
    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        *,
        reference: Tensor | None = None,
        reference_labels: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the rows of all ranks, a scalar.

        Each of ``reference`` and ``sample_weight`` is passed on every rank or on none.

        Args:
            embeddings: (N, D) of this rank, or (N, V, D) with V views of each row, which have its label; N and V may
                differ between ranks, and N may be 0.
            labels: (N,) or (N, 1) integers or bools, in any order and number. Bools (N, C) are several labels a row,
                or none: rows that share one are positives of each other; without a queue. None, on every rank, with
                views: those of a row are positives of each other alone.
            reference: (M, D) or (M, V, D), another set, whose rows on all ranks are the candidates in place of the
                embeddings, with a gradient. M may differ between ranks and may be 0. They enter the queue.
            reference_labels: (M,) or (M, 1), those of the reference; (M, C) where the labels are (N, C).
            sample_weight: (N,) >= 0, of the rows in the mean over V; for weights of classes pass
                ``class_weight[labels]``. Every row stays a candidate of the others.
        """
        call, group = type(self).__name__, self._resolve_group()

        def bring() -> Offer[list[Side]]:
            own, check = self._checked_columns("embeddings", embeddings, labels, sample_weight, group)
            if (reference is None) != (reference_labels is None):
                raise ValueError(expected("reference, reference_labels", "both or none of them", reference_labels))
            if reference is not None and labels is None:
                raise ValueError(expected("labels", "a tensor, because there is a reference", labels))
            sides = [Side("embeddings", own, torch.is_grad_enabled() and own["rows"].requires_grad, own)]
            if reference is not None and reference_labels is not None:
                others, _ = self._checked_columns("reference", reference, reference_labels, None, group)
                check_like("reference", others["rows"], own["rows"], "embeddings")
                if others["labels"].shape[1:] != own["labels"].shape[1:]:
                    raise ValueError(expected("reference_labels", "as many columns as labels", reference_labels))
                sides[0].live = {name: own[name] for name in [*own][1:]}  # all but the rows, which are no candidates
                needs_grad = torch.is_grad_enabled() and others["rows"].requires_grad
                sides.append(Side("reference", others, needs_grad, others, is_apart=True))
            if group is None:
                return Offer(sides, rows=len(own["rows"]), check=check)
            facts: dict[str, object] = {"labels": "none"} if labels is None else {}
            return self._offered(sides, sides, facts, [float(len(sides[-1].own["rows"]))], check)

        agreed = agree_on(call, group, bring)
        sides, exchange = agreed.value, None if group is None else Exchange(call, group)
        anchors, *others = sides
        if exchange is not None:
            gather(sides, agreed, exchange)
        if labels is None:
            # Each rank has numbered its rows from 0. Those of other ranks and of the queue get other numbers.
            starts = accumulate(agreed.rows, initial=_NUMBERED + self.queue.position[2])
            parts = zip(anchors.live["labels"].split(agreed.rows), starts)
            anchors.live = {**anchors.live, "labels": torch.cat([part + first for part, first in parts])}
        loss, has_pair = self._sum_over_ranks(partial(self._local_loss, sides), sides, exchange)
        if self._enqueues:
            self.queue.enqueue(sides[-1].candidates["rows"], sides[-1].candidates["labels"])
        if self._hints.should_observe(self, loss):
            self._hints.observe_valid(has_pair, NO_PAIR)
            if group is not None:
                what, candidates = "reference" if others else "rows", sides[-1]
                self._hints.observe_ranks(candidates.counts, [*candidates.live.values()], what)
                views = embeddings.shape[1] if embeddings.ndim == 3 else 1
                counts, numbers = [count // views for count in agreed.rows], anchors.live["labels"][::views]
                self._hints.observe_labels(counts, None if numbers.ndim == 2 else numbers)
        return loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def _checked_columns(
        self, name: str, rows: Tensor, labels: Tensor | None, sample_weight: Tensor | None, group: ProcessGroup | None
    ) -> tuple[Columns, DeviceCheck | None]:
        """Return the checked rows, one for each view, without those that are ignored, and the check of the weights."""
        check_not_gathered(group, **{name: rows}, labels=labels)
        num_dims = rows.ndim if isinstance(rows, Tensor) and not rows.is_nested else 0
        if num_dims > 3:
            fix = f"Use {name}.flatten(2) if dim 1 is views, else {name}.flatten(1)."
            raise ValueError(expected(name, "shape (N, D) or (N, V, D)", rows, fix))
        has_views = num_dims == 3 and rows.shape[1] > 0
        flat = self._checked(**{name: rows.flatten(0, 1) if has_views else rows})[name]
        if labels is None and not (has_views and rows.shape[1] > 1):
            fix = "Pass the label of each row, or the views of each row as (N, V, D)."
            raise ValueError(expected(name, "at least two views of each row, because there are no labels", rows, fix))
        if labels is None:
            targets = torch.arange(len(rows), device=rows.device)
        else:
            of_labels = "labels" if name == "embeddings" else "reference_labels"
            targets = checked_labels(labels, rows, name, of_labels, several=True)
        if targets.ndim == 2 and self.queue_size:
            raise ValueError(expected("queue_size", "0 with several labels a row", self.queue_size))
        weight, check = weight_of_rows(sample_weight, rows, name, self.validate_args)
        if has_views:
            targets = targets.repeat_interleave(rows.shape[1], dim=0)
            weight = None if weight is None else weight.repeat_interleave(rows.shape[1])
        check_values(name, flat)
        ignored = targets == self.ignore_index
        if labels is not None and targets.ndim == 1 and bool(ignored.any()):
            kept = (~ignored).nonzero()[:, 0]
            flat, targets = flat.index_select(0, kept), targets.index_select(0, kept)
            weight = None if weight is None else weight.index_select(0, kept)
        columns = {"rows": flat, "labels": targets}
        return columns if weight is None else columns | {"weight": weight}, check

    def _local_loss(self, sides: Sequence[Side]) -> tuple[Tensor, Tensor]:
        """Return which anchors of all ranks have a pair, (N,) bool, and this rank's loss (1,)."""
        compare(sides, self.normalize)
        anchors, others, has_reference = sides[0], sides[-1], len(sides) > 1
        rows, targets, weight = anchors.anchors["rows"], anchors.live["labels"], anchors.live.get("weight")
        targets = targets.contiguous()  # searchsorted warns of others
        own = slice(anchors.first, anchors.first + len(rows))
        candidates = joined([others.candidates, *self._queued_columns(others.candidates)])
        labels, first = candidates["labels"], None if has_reference else anchors.first
        index = torch.arange(len(labels), device=labels.device)
        if targets.ndim == 2:  # several labels each, 0 or 1
            has_pair = (targets & (labels.sum(dim=0) > (not has_reference))).any(dim=1)
            shared, of_anchors = labels.to(rows).t(), targets[own].to(rows)

            def positives(place: slice) -> tuple[Tensor, Tensor]:
                inside = of_anchors[place] @ shared > 0  # [b, K]
                return torch.where(inside, index, inside.int().argmax(dim=1, keepdim=True)), inside
        else:  # candidates in the order of their labels: ``number`` from ``start`` on have the label of an anchor
            in_order, order = labels.sort(stable=True)
            start = torch.searchsorted(in_order, targets)
            number = torch.searchsorted(in_order, targets, right=True) - start
            has_pair = number > (not has_reference)
            start, number = start[own, None], number[own, None]

            def positives(place: slice) -> tuple[Tensor, Tensor]:
                up_to = index[: max(1, int(number[place].max()))]  # [S], >= 1 for the fillers
                places = (start[place] + up_to).clamp_max_(len(order) - 1)  # [b, S]
                return order[places], up_to < number[place]

        if weight is None:
            share = rows.new_ones(len(rows), dtype=torch.float64) / has_pair.sum().clamp_min(1)
        else:
            weight = weight / weight_unit(weight)
            mass = (weight * has_pair).sum()
            share = (weight / torch.where(mass > 0, mass, 1.0))[own].double()

        def block_loss(scores: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            begin, of_block = None if first is None else first + place.start, share[place]
            if targets.ndim == 1:
                total = native.terms_of_labels(scores, targets[own][place], labels, of_block, begin)
                if total is not None:
                    return total, scores
            return _block_loss(scores, *positives(place), of_block, begin)

        needs, scale = (anchors.needs_grad, others.needs_grad, False), rows.new_tensor(1.0 / self.temperature)
        copies = 8 if targets.ndim == 2 else 1
        sums, *gradients = sum_of_blocks(rows, candidates["rows"], scale, needs, block_loss, None, copies)
        anchors.grad_anchors, of_candidates = gradients
        if of_candidates is not None:
            others.grad_candidates = of_candidates[: len(others.candidates["rows"])]
        # A NaN reaches the loss even if no row counts.
        return has_pair, sums + sum([(0.0 * side.anchors["rows"]).sum() for side in sides])


def _block_loss(
    scores: Tensor, same: Tensor, inside: Tensor, weight: Tensor, first: int | None
) -> tuple[Tensor, Tensor]:
    r"""Return the weighted sum of the losses of a block (b, K), and its gradient in place of the scores.

    With a the logarithm of the sum of exp over :math:`P_i`, and g the same over the others less a, the loss of a row is
    :math:`\log (1 + e^g)`, plus a less the mean over :math:`P_i`, which is 0 for a single positive. Rows far apart keep
    all digits. Row i is candidate ``first + i``, or none. Of the candidates ``same`` (b, S) those ``inside`` have a
    label of the anchor: the first if any has.
    """
    filler, least = same[:, :1], lowest(scores)  # takes the places that are not inside; 0 is added to it
    if first is not None:
        filler = torch.arange(first, first + len(scores), device=scores.device)[:, None]
        inside = inside & (same != filler)
    same, number = torch.where(inside, same, filler), inside.sum(dim=1)  # [b] |P_i|
    share, weight = 1 / number.clamp_min(1).to(scores), weight * (number > 0)
    scored, outside = scores.gather(1, same), ~inside
    inner = scored.masked_fill(outside, least)
    near, away = softmax_(inner), softmax_(scores.scatter_(1, same, least))
    gap = away - near
    spread = (near[:, None] - scored).masked_fill_(outside, 0.0).sum(dim=1) * share
    total = (softplus(gap) + spread.double()) @ weight
    push, factor = gap.sigmoid()[:, None], weight[:, None].to(scores)
    inner = (inner - share[:, None] - inner * push) * factor * inside
    return total, scores.mul_(push * factor).scatter_add_(1, same, inner)
