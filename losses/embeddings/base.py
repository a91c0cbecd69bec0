"""The base of the contrastive losses: this rank's rows against the rows of all ranks and of a queue, block by block.

This rank's rows are anchors here, and candidates on all ranks, whose part of their gradient a reduce-scatter brings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from ...distributed.exchange import Exchange, describe_rows
from ...distributed.group import gradient_scale
from ...distributed.header import Agreement, DeviceCheck, Offer, each_or_raise, has_tangent
from ...distributed.torch_private import func_transforms_are_active, note_kind
from ...errors import RankRuntimeError, Words, check_flag, check_temperature, expected
from ...kernels import native
from ...kernels.costs import costs_of
from ...kernels.registration import exact, with_gradients
from ..arguments import completed
from ..base import GroupOptions, HoldsQueue
from ..hints import Empty
from ..rows import check_device, checked_embeddings, compute_dtype, unit_rows

T = TypeVar("T")
# What belongs to each of a number of rows: "rows" (N, D), and where there are such columns "labels" (N,), the "guide"
# (N, G) of another model, the "weight" (N,), and more by name.
Columns = dict[str, Tensor]
_NAMES = {"guide": "mask", "weight": "sample_weight"}  # the arguments of columns that have another name
NO_PAIR = Empty(
    "no row had another one of its label",
    "Draw batches with several rows of each label (fullrank.data.MPerClassSampler), use larger batches, or set "
    "queue_size so that past rows stay in the pool.",
)
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
        of its own rows; every rank gets the same value.
    """

    _checks = HoldsQueue._checks | {
        "temperature": lambda _, value: check_temperature(value),  # none is automatic
        "normalize": check_flag,
    }

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
        self.normalize = normalize
        self._make_embedding_queue(queue_size, num_features, ignore_index)

    def _checked(self, **given: Tensor) -> dict[str, Tensor]:
        """Return the checked rows of the arguments ``given``."""
        width = self.queue.num_classes if self.queue_size else None
        for name in given:
            given[name] = checked_embeddings(name, given[name], width)
        if func_transforms_are_active() or has_tangent(*given.values()):
            fix = "The loss of one call has a first derivative alone."
            what, other = "backward() or torch.autograd.grad", Words("a transform of torch.func or forward mode")
            raise RuntimeError(expected("differentiation", what, other, fix))
        return given

    def _queued_columns(self, like: Columns) -> list[Columns]:
        """Return the rows of the queue that this call uses, if any, in the dtypes of ``like``."""
        queued = self._queued_rows()
        if queued is None:
            return []
        rows = queued.logits.to(like["rows"])
        columns = {"rows": rows, "labels": queued.targets.to(rows.device)}
        return [columns if queued.sample_weight is None else columns | {"offsets": queued.sample_weight.log()}]

    def _offered(
        self,
        value: T,
        sides: Sequence[Side],
        facts: dict[str, object],
        totals: Sequence[Tensor | float],
        check: DeviceCheck | None,
    ) -> Offer[T]:
        """Return what this rank contributes. The first of the ``totals`` is the number of rows of a side apart."""
        facts, tensors = {**self._facts(), **facts}, dict[str, Tensor]()
        for side in sides:
            for column, tensor in side.live.items():
                name = side.name if column == "rows" else f"{_NAMES.get(column, column)} of {side.name}"
                if side.is_apart:
                    facts[name] = describe_rows(tensor)
                else:
                    tensors[name] = tensor
        return Offer(value, facts, 0, totals, self._checksum, check, (*tensors.values(),), (*tensors,))

    def _sum_over_ranks(
        self,
        compute: Callable[[], tuple[T, Tensor]],
        sides: Sequence[Side],
        exchange: Exchange | None,
        learned: Sequence[Learned] = (),
    ) -> tuple[Tensor, T]:
        """Return the sum of the losses of the ranks, which has gradients, and what else ``compute`` returns.

        ``compute`` returns that and this rank's sums (1 + L,) float64: the loss and the gradients of the L ``learned``
        parameters. Their sum over the ranks is the gradient of one process. If the wrapper sums too, each rank gets a
        share; no wrapper reduces that of a sharded parameter.
        """
        inputs = [side.own["rows"] for side in sides]
        for item in learned:
            inputs.append(item.parameter)
        with_grad = any(map(needs_gradient, (*sides, *learned)))
        with torch.no_grad():
            if exchange is None:
                others, sums = compute()
            else:
                others, sums = each_or_raise(exchange, compute, 1 + len(learned), inputs[0].device, "the sums")
                sums = sums.sum(dim=0)
                sides_of: dict[tuple[int, ...], list[Side]] = {}  # one reduce-scatter for sides of equal counts
                for side in sides:
                    if side.grad_candidates is not None:
                        sides_of.setdefault(side.counts, []).append(side)
                for counts, alike in sides_of.items():
                    joined = torch.cat([cast(Tensor, side.grad_candidates) for side in alike], dim=1)
                    summed = exchange.sum_own(joined, counts, "the gradients")
                    for side, gradient in zip(alike, summed.chunk(len(alike), dim=1)):
                        side.grad_candidates = gradient
            value, *slopes = sums.to(sides[0].anchors["rows"].dtype).unbind()
            if with_grad:
                k = 1 if exchange is None else gradient_scale(self.gradient_reduction, exchange.group)
                share = 1.0 if exchange is None else min(1.0, k / exchange.group.size())
                gradients = [gradient_of_given(side, k, self.normalize) for side in sides]
                for slope, item in zip(slopes, learned):
                    slope = item.limited(slope if item.is_sharded or share == 1 else slope * share)
                    gradients.append(slope.to(item.parameter).reshape(item.parameter.shape))
        if with_grad:
            value = with_gradients(type(self).__name__, value, gradients, *inputs)
        return note_kind(value, mean=True, over_ranks=exchange is not None, of_pool=True), others


class Learned(NamedTuple):
    """A parameter of a loss: the logarithm of the scale of the similarities, or their bias."""

    name: str
    parameter: Tensor  # of one number
    is_sharded: bool  # by FSDP2, in a call outside the forward of its module
    limit: float  # a larger number counts as this one
    needs_grad: bool
    number: Tensor  # ``parameter`` without a gradient

    def agreed(self, values: list[float], call: str, exchange: Exchange | None) -> Learned:
        """Return the whole parameter, or raise on all ranks unless ``values``, that of each rank, are the same."""
        parameter, number = self.parameter, self.number
        if self.is_sharded:
            parameter = parameter.full_tensor()  # type: ignore[attr-defined]  # it communicates: the ranks have agreed
            number = parameter.detach()
            if exchange is not None:
                values = exchange.each(number.reshape(1), f"the {self.name}")[:, 0].tolist()
        if len({*map(repr, values)}) > 1:
            fix = "Load the same checkpoint, and take the same optimizer steps, on every rank."
            raise RankRuntimeError(expected(f"{call}: {self.name}", "the same on every rank", values, fix))
        return self._replace(parameter=parameter, number=number)

    def limited(self, slope: Tensor) -> Tensor:
        """Return the gradient ``slope``: above the limit, there is one only if it lowers the parameter."""
        if self.number.is_cpu and self.number.item() <= self.limit:  # on the host a look is faster than the choice
            return slope
        return torch.where(self.number > self.limit, slope.clamp_min(0.0), slope)


needs_gradient = attrgetter("needs_grad")  # of a side, or a learned parameter


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the columns of ``parts``, one after another. Only the last parts may lack one that others have."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in parts[0]}


@dataclass(slots=True)
class Side:
    """One set of rows of a loss, such as its queries."""

    name: str  # as the caller passed it
    own: Columns  # of this rank
    needs_grad: bool
    live: Columns  # of this rank, those that travel; then of all ranks. Without rows if these stay on their rank
    is_apart: bool = False  # whether it has a number of rows of its own
    counts: tuple[int, ...] = ()  # the rows of each rank, if they are gathered
    first: int = 0  # where those of this rank begin
    anchors: Columns = field(init=False)  # ``own`` as they are compared
    candidates: Columns = field(init=False)  # ``live`` as they are compared, or ``own`` if the rows stay on their rank
    grad_anchors: Tensor | None = None  # [N, D] None if it is not needed
    grad_candidates: Tensor | None = None  # [M, D] and [N, D] once it has been summed over the ranks


def gather(sides: Sequence[Side], agreed: Agreement[Any], exchange: Exchange) -> None:
    """Set the columns of all ranks; rows travel in the dtype of the caller, which may be half precision."""
    rank, arrived = exchange.group.rank(), agreed.arrived
    columns = iter(exchange.rows(agreed.tensors, agreed.rows) if arrived is None else arrived)
    for side in sides:
        side.counts = agreed.rows
        if side.is_apart:
            side.counts = (*[int(number) for number, *_ in agreed.totals],)
            columns = iter(exchange.rows([*side.live.values()], side.counts))
        side.live, side.first = dict(zip(side.live, columns)), sum(side.counts[:rank])


def compare(sides: Sequence[Side], normalize: bool) -> None:
    """Set the columns of ``sides`` as they are compared, in the dtype of the computation."""
    for side in sides:
        side.candidates = side.anchors = {**(side.live if "rows" in side.live else side.own)}
    for name in ("rows", "guide") if "guide" in sides[0].own else ("rows",):
        parts = [side.candidates[name] for side in sides]
        rows, dtype = parts[0], compute_dtype(parts[0].dtype)
        if len(parts) > 1:  # one call for all sides; where autocast casts to bfloat16 it joins no float16
            rows = torch.cat(parts if rows.dtype == dtype else [part.to(dtype) for part in parts])
        rows = unit_rows(rows) if normalize or name == "guide" else rows.to(dtype)
        for side, part in zip(sides, rows.split([*map(len, parts)]) if len(parts) > 1 else [rows]):
            side.candidates[name] = part
    for side in sides:
        if len(side.candidates["rows"]) != len(side.own["rows"]):
            place = slice(side.first, side.first + len(side.own["rows"]))
            side.anchors = {name: column[place] for name, column in side.candidates.items()}


def gradient_of_given(side: Side, factor: int, normalize: bool) -> Tensor | None:
    """Return ``factor`` times the gradient of the rows that the caller passed; None if it is not needed."""
    gradient, others, rows, unit = side.grad_anchors, side.grad_candidates, side.own["rows"], side.anchors["rows"]
    if others is not None:
        gradient = others if gradient is None else gradient + others
    if gradient is None or not normalize:
        return None if gradient is None else (factor * gradient).to(rows.dtype)
    found = native.unit_gradient(rows.to(unit.dtype), unit, gradient, factor)
    if found is not None:
        return found.to(rows.dtype)
    length = (rows * unit).sum(dim=1, keepdim=True)  # 0 for a row of zeros, which counts as 1
    along = (gradient * unit).sum(dim=1, keepdim=True)
    across = torch.addcmul(gradient, unit, along, value=-1)
    return across.div_(torch.where(length == 0, 1.0, length) / factor).to(rows.dtype)


@exact
def sum_of_blocks(
    anchors: Tensor,
    candidates: Tensor,
    scale: Tensor,
    needs: tuple[bool, bool, bool],
    block_loss: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    bias: Tensor | None = None,
    copies: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    r"""Return a sum of losses of the scores :math:`s\, a_i \cdot c_j + b` and its gradients, in blocks of anchors.

    Of anchors (n, D), candidates (K, D), the scale s and the bias b, all of one dtype: the sum and its gradients of log
    s and b (1 + L,) float64, then those of anchors and candidates, as ``needs`` says of anchors, candidates, numbers.
    ``block_loss`` takes the scores (b, K) of a block, which it may overwrite, and its place among the anchors, and
    returns the sum of its losses, float64, and its gradient (b, K). ``copies`` of such tensors are in memory together.
    """
    scaled, sums, of_anchors, of_candidates = anchors * scale, list[Tensor](), list[Tensor](), None
    for place, block, scores in blocks_of_scores(scaled, candidates, copies=copies):
        value, slope = block_loss(scores if bias is None else scores.add_(bias), place)
        numbers = [value]
        if needs[0] or needs[2]:
            mean = slope @ candidates  # [b, D]
            if needs[2]:
                numbers.append((mean * block).sum(dim=1).sum(dtype=torch.float64))
            if needs[2] and bias is not None:
                numbers.append(slope.sum(dim=1).sum(dtype=torch.float64))
            of_anchors.append(mean.mul_(scale))
        if needs[1]:
            of_candidates = slope.t() @ block if of_candidates is None else of_candidates.addmm_(slope.t(), block)
        sums.append(torch.stack(numbers))
    if not sums:
        sums = [scaled.new_zeros(1 + needs[2] * (1 + (bias is not None)), dtype=torch.float64)]
        of_anchors, of_candidates = [torch.zeros_like(anchors)], torch.zeros_like(candidates)
    grad_anchors = (of_anchors[0] if len(of_anchors) == 1 else torch.cat(of_anchors)) if needs[0] else None
    return sum(sums[1:], sums[0]), grad_anchors, of_candidates if needs[1] else None


def blocks_of_scores(
    anchors: Tensor, candidates: Tensor, fewest: int | None = None, copies: int = 1
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for one block of anchors (n, D) after another its place, it, and its scores (b, K), in the same memory.

    A block has at least the ``fewest`` anchors, None for ``FEWEST_ANCHORS``, however many candidates (K, D) there are.
    """
    step, memory = anchors_at_once(candidates, fewest, copies), None
    for begin in range(0, len(anchors) if len(candidates) else 0, step):
        block = anchors[begin : begin + step]
        memory = block.new_empty(len(block), len(candidates)) if memory is None else memory[: len(block)]
        yield slice(begin, begin + len(block)), block, torch.mm(block, candidates.t(), out=memory)


def anchors_at_once(candidates: Tensor, fewest: int | None = None, copies: int = 1) -> int:
    """Return how many anchors a block of :func:`blocks_of_scores` has."""
    entries = costs_of(candidates.device).similarities_at_once // copies
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
    if rows.device != others.device:
        check_device(name, rows, others, others_name)
