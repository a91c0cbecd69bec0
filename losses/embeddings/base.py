"""The base of the contrastive losses: this rank's rows against the rows of all ranks and of a queue, block by block.

This rank's rows are anchors here, and candidates on all ranks. One reduce-scatter in the forward brings the part of
their gradient that the other ranks have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from ...distributed.exchange import Exchange, check_rows
from ...distributed.group import gradient_scale
from ...distributed.header import each_or_raise
from ...distributed.torch_private import func_transforms_are_active, has_tangent, note_kind
from ...errors import Words, expected
from ...kernels.costs import costs_of
from ...kernels.registration import with_gradients
from ..arguments import completed
from ..base import GroupOptions, HoldsQueue
from ..pooled.hints import Hints
from ..rows import check_device, checked_embeddings, compute_dtype, unit_rows

T = TypeVar("T")
FEWEST_ANCHORS = 64  # in a block: with fewer, the products are too thin to be fast, and the blocks too many


@completed()
class ContrastiveLoss(HoldsQueue):
    """Base of the contrastive losses: the arguments that they share, and the sum over the ranks.

    Args:
        normalize: compare by cosine: the loss divides each row by its length. False compares by the dot product, for
            rows that are normalised already or should not be.
        ignore_index: rows with this label take no part.

    Degenerate:
        Without a pair on any rank the loss is 0 with zero gradients. A row of zeros has a cosine of 0 with all others.
        A row that is not finite makes the loss NaN on every rank.

    Numerics:
        Half precision is computed in float32, the loss in float64. A row with one positive that is far from all others
        keeps all digits, where the cross-entropy of the matrix rounds the loss to 0 and its gradient to noise. O(N M D)
        time for M candidates and O(M D) memory.

    Distributed:
        Three collectives forward: the header with the rows of all ranks, the sums, one reduce-scatter of gradients if
        there are any; rows that do not fit behind the header take one more. None backward. Each rank computes the terms
        of its own rows, and all raise if one fails, such as for lack of memory. Every rank gets the same value.
    """

    def __init__(
        self,
        normalize: bool = True,
        queue_size: int = 0,
        num_features: int | None = None,
        gather_distributed: bool | None = None,
        ignore_index: int = -100,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(gather_distributed, **options)
        if not isinstance(normalize, bool):
            raise TypeError(expected("normalize", "True or False", normalize))
        self.normalize = normalize
        self._hints = Hints(type(self).__name__)
        self._make_embedding_queue(queue_size, num_features, ignore_index)

    def _checked(self, name: str, rows: Tensor, group: ProcessGroup | None) -> Tensor:
        self._check_not_gathered(group, **{name: rows})
        rows = checked_embeddings(name, rows, self.queue.num_classes if self.queue_size else None)
        check_rows([rows])
        if func_transforms_are_active() or has_tangent(rows):
            fix = "The loss of one call has a first derivative alone."
            what, other = "backward() or torch.autograd.grad", Words("a transform of torch.func or forward mode")
            raise RuntimeError(expected("differentiation", what, other, fix))
        return rows

    @torch.no_grad()
    def _comparable(self, rows: Tensor) -> Tensor:
        """Return the rows as they are compared, in the dtype of the computation."""
        return unit_rows(rows) if self.normalize else rows.detach().to(compute_dtype(rows.dtype))

    def _gradient_of_given(self, gradient: Tensor, factor: int, unit: Tensor, rows: Tensor) -> Tensor:
        """Return ``factor`` times the gradient of a caller's ``rows`` from that of :meth:`_comparable`, ``unit``."""
        if not self.normalize:
            return (factor * gradient).to(rows.dtype)
        length = (rows.detach() * unit).sum(dim=1, keepdim=True)  # 0 for a row of zeros, which counts as 1
        along = (gradient * unit).sum(dim=1, keepdim=True)
        across = torch.addcmul(gradient, unit, along, value=-1)
        return across.div_(torch.where(length == 0, 1.0, length) / factor).to(rows.dtype)

    def _with_queue(self, rows: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return all ``rows`` (M, D) with their targets (M,), followed by those of the queue."""
        queued = self._queued_rows()
        if queued is not None:
            rows, targets = [*rows, queued.logits.to(rows[0])], [*targets, queued.targets.to(targets[0])]
        return (torch.cat(rows), torch.cat(targets)) if len(rows) > 1 else (rows[0], targets[0])

    def _sum_over_ranks(
        self,
        compute: Callable[[], tuple[LocalLoss, T]],
        rows: Sequence[Tensor],
        counts: Sequence[tuple[int, ...]],
        exchange: Exchange | None,
        learned: Sequence[tuple[Tensor, bool]] = (),
    ) -> tuple[Tensor, T]:
        """Return the loss, the sum of those of the ranks, with the gradients of ``rows``, this rank's, and ``learned``.

        ``compute`` returns this rank's terms, and what is returned with the loss. If it fails on one rank, all raise.
        ``counts`` are the numbers of rows of each rank, for each of ``rows``. ``learned`` are a learned scale and bias,
        each with whether it is sharded. Their gradients are summed over the ranks: on every rank they are those of one
        process, whether or not a wrapper averages them. If the wrapper sums gradients, each rank gets an equal share of
        it. If one is sharded, the rank that has it gets all of it, because nothing sums it.
        """

        def local_sums() -> tuple[tuple[LocalLoss, T], Tensor]:
            computed = compute()
            return computed, torch.stack([computed[0].total, *computed[0].grad_learned])

        if exchange is None:
            (local, others), sums = local_sums()
        else:
            kind = 1 + len(learned), rows[0].device
            (local, others), sums = each_or_raise(exchange, local_sums, *kind, "the sums")
            sums = sums.sum(dim=0)
        grad_all, k, share = [*local.grad_all], 1, 1.0
        inputs = *rows, *(parameter for parameter, _ in learned)
        with_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        if exchange is not None:
            places_of: dict[tuple[int, ...], list[int]] = {}  # one reduce-scatter for rows of equal counts
            for place, gradient in enumerate(grad_all):
                if gradient is not None:
                    places_of.setdefault(counts[place], []).append(place)
            for of_ranks, places in places_of.items():
                joined = torch.cat([cast(Tensor, grad_all[place]) for place in places], dim=1)
                summed = exchange.sum_own(joined, of_ranks, "the gradients")
                for place, gradient in zip(places, summed.chunk(len(places), dim=1)):
                    grad_all[place] = gradient
            k = gradient_scale(self.gradient_reduction, exchange.group, needs_grad=with_grad)
            share = min(1.0, k / exchange.group.size())
        value = sums[0].to(local.rows[0].dtype)
        if with_grad:
            gradients: list[Tensor | None] = []
            for of_own, of_all, *given in zip(local.grad_own, grad_all, local.rows, rows):
                present = [gradient for gradient in (of_own, of_all) if gradient is not None]
                of_unit = sum(present[1:], present[0]) if present else None
                gradients.append(None if of_unit is None else self._gradient_of_given(of_unit, k, *given))
            slopes = [*sums[1:].unbind()]
            if local.is_clamped is not None:
                slopes[0] = torch.where(local.is_clamped, slopes[0].clamp_min(0.0), slopes[0])
            for slope, (parameter, is_sharded) in zip(slopes, learned):
                gradients.append((slope if is_sharded else slope * share).to(parameter).reshape(parameter.shape))
            value = with_gradients(type(self).__name__, value, gradients, *inputs)
        return note_kind(value, over_ranks=exchange is not None, of_pool=True), others


class LocalLoss(NamedTuple):
    """This rank's terms of the loss, summed, with their gradients; None for those that are not needed."""

    rows: Sequence[Tensor]  # [N, D] each: those of this rank as they are compared
    total: Tensor  # () float64
    grad_learned: list[Tensor]  # () float64 each: of the logarithm of the scale and of the bias, if they are learned
    grad_own: Sequence[Tensor | None]  # [N, D] each: of this rank's rows as anchors
    grad_all: Sequence[Tensor | None]  # [sum of N, D] each: of the rows of all ranks as candidates
    is_clamped: Tensor | None = None  # () bool: the scale is above its limit, and its gradient may only lower it


class SumOfBlocks(NamedTuple):
    """A sum of losses of anchors, with its gradients; None for those that are not needed."""

    total: Tensor  # () float64
    grad_anchors: Tensor | None  # [n, D]
    grad_candidates: Tensor | None  # [K, D]
    grad_learned: list[Tensor]  # () float64 each: of the logarithm of the scale, and of the bias if there is one


def sum_of_blocks(
    anchors: Tensor,
    candidates: Tensor,
    scale: Tensor,
    needs: tuple[bool, bool, bool],
    block_loss: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    bias: Tensor | None = None,
) -> SumOfBlocks:
    r"""Return a sum of losses of the scores :math:`s\, a_i \cdot c_j + b` and its gradients, in blocks of anchors.

    Anchors (n, D), candidates (K, D), the scale s and the bias b, None for 0, have one dtype. ``needs`` says which
    gradients to return: of the anchors, of the candidates, of the scale and the bias.
    ``block_loss`` takes the scores (b, K) of a block, which it may overwrite, and the place of the block among the
    anchors. It returns the sum of the losses of the block, float64, and its gradient (b, K).
    """
    total = anchors.new_zeros((), dtype=torch.float64)
    scaled = anchors * scale
    grad_anchors = torch.zeros_like(anchors) if needs[0] else None
    grad_candidates = torch.zeros_like(candidates) if needs[1] else None
    grad_learned = [torch.zeros_like(total) for _ in range(1 + (bias is not None)) if needs[2]]
    for place, scores in blocks_of_scores(scaled, candidates):
        value, slope = block_loss(scores if bias is None else scores.add_(bias), place)
        total += value
        if needs[0] or needs[2]:
            mean = slope @ candidates  # [b, D]
            if needs[2]:
                grad_learned[0] += (mean * scaled[place]).sum(dim=1).sum(dtype=torch.float64)
            if needs[2] and bias is not None:
                grad_learned[1] += slope.sum(dim=1).sum(dtype=torch.float64)
            if grad_anchors is not None:
                torch.mul(mean, scale, out=grad_anchors[place])
        if grad_candidates is not None:
            grad_candidates.addmm_(slope.t(), scaled[place])
    return SumOfBlocks(total, grad_anchors, grad_candidates, grad_learned)


def blocks_of_scores(anchors: Tensor, candidates: Tensor, fewest: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield for one block of anchors (n, D) after another its place and its scores (b, K), in the same memory.

    A block has at least the ``fewest`` anchors, None for ``FEWEST_ANCHORS``, however many candidates (K, D) there are.
    """
    step, memory = anchors_at_once(candidates, fewest), None
    for begin in range(0, len(anchors) if len(candidates) else 0, step):
        block = anchors[begin : begin + step]
        memory = block.new_empty(len(block), len(candidates)) if memory is None else memory[: len(block)]
        yield slice(begin, begin + len(block)), torch.mm(block, candidates.t(), out=memory)


def anchors_at_once(candidates: Tensor, fewest: int | None = None) -> int:
    """Return how many anchors a block of :func:`blocks_of_scores` has."""
    entries = costs_of(candidates.device).similarities_at_once
    return max(FEWEST_ANCHORS if fewest is None else fewest, entries // max(1, len(candidates)))


def softmax_(scores: Tensor) -> Tensor:
    """Return the logarithm (b,) of the sum of exp of finite scores (b, K), which become their softmax over K."""
    most = scores.amax(dim=1)
    rows, dim = (scores, 1) if scores.is_contiguous() else (scores.t(), 0)  # torch would copy a transpose
    torch.softmax(rows, dim, out=rows)
    return most - scores.amax(dim=1).log()  # the softmax of the largest is 1 over the sum of exp(scores - most)


def lowest(scores: Tensor) -> float:
    """Return the score of a candidate that is left out, whose differences from others are finite."""
    return torch.finfo(scores.dtype).min / 2


def softplus(gaps: Tensor) -> Tensor:
    """Return log(1 + exp(gaps)) in float64, with all digits."""
    return F.softplus(gaps.double(), threshold=40.0)  # the default threshold of 20 rounds


def check_like(name: str, rows: Tensor, others: Tensor, others_name: str) -> None:
    """Raise unless ``rows`` have the width, dtype and device of ``others``."""
    if rows.shape[1] != others.shape[1]:
        raise ValueError(expected(name, f"rows of {others.shape[1]} numbers, as {others_name}", rows))
    if rows.dtype != others.dtype:
        raise TypeError(expected(name, f"{others.dtype}, as {others_name}", rows, f"Use {name}.to({others.dtype})."))
    check_device(name, rows, others, others_name)
