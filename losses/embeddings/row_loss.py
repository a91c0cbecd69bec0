"""A contrastive loss of one's own: any function of the scores of a query with the candidates of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from ...distributed.torch_private import not_compiled
from ...errors import Words, check_flag, expected
from ..arguments import completed
from .base import Side
from .pairs import Direction, Given, PairLoss, PairOptions


class Block(NamedTuple):
    """Some queries of this rank with all K candidates: the keys of all ranks, the negatives, the queue.

    The scores are overwritten after the call. A candidate that is left out has a score of -inf, and no gradient.
    """

    scores: Tensor  # [b, K] similarities, divided by the temperature, plus the offsets
    positives: Tensor  # [b] the place of the key of each query among the candidates
    guide: Tensor | None  # [b, K] cosines of the ``mask``; -inf for keys of the queue, which have no guide
    queries: Mapping[str, Tensor]  # [b, ...] each, the columns of the keys of these queries
    columns: Mapping[str, Tensor]  # [K, ...] each, those of the candidates


@completed()
class RowLoss(PairLoss):
    r"""A loss of one's own: the mean over all queries of any differentiable function of their scores.

    With :math:`f_i` what ``function`` returns for query i,

    .. math:: L = \frac{1}{N} \sum_i f_i(x_{i1} / \tau, \dots, x_{iK} / \tau)

    ``function`` gets one :class:`Block` of queries after another, and autograd differentiates one at a time: the scores
    of all pairs are never in memory together.
    :class:`~fullrank.InfoNCELoss` is ``RowLoss(lambda block: F.cross_entropy(block.scores, block.positives,
    reduction="none"))`` with a gradient written out, in less time and with more digits.

    Args:
        function: takes a :class:`Block` of b queries and returns the loss of each, (b,), from its own row. It is
            differentiated with respect to the scores alone: whatever else has a gradient raises. It may not
            communicate, because ranks have different numbers of blocks. The ranks compare its name.
        learn_temperature: let ``logit_scale``, the logarithm of 1 / temperature, be a parameter, as in
            :class:`~fullrank.InfoNCELoss`.

    Numerics:
        Scores and guide are float32, or float64 for rows in float64. Autocast is off in ``function``.

    Example:
        >>> import torch
        >>> def hinge(block):  # the hardest negative, by a margin
        ...     own = block.scores.gather(1, block.positives[:, None])
        ...     others = block.scores.scatter(1, block.positives[:, None], -torch.inf)
        ...     return (0.5 + others.amax(dim=1) - own[:, 0]).relu()
        >>> queries, keys = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> RowLoss(hinge)(queries, keys)
        tensor(0.2500)
    """

    _shown = PairLoss._of_all
    _pairs_views = False
    _copies = 2  # next to the scores, what the function makes of them and its gradient

    def __init__(
        self,
        function: Callable[[Block], Tensor],
        *,
        temperature: float = 1.0,
        learn_temperature: bool = False,
        **options: Unpack[PairOptions],
    ) -> None:
        if not callable(function):
            raise TypeError(expected("function", "a callable", function))
        check_flag("learn_temperature", learn_temperature)
        super().__init__(temperature, learn_temperature, None, **options)
        self.function = function

    def _arguments(self) -> dict[str, object]:
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return {"function": Words(name), **super()._arguments()}

    @completed(PairLoss.forward)
    @not_compiled
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        negatives: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        negative_labels: Tensor | None = None,
        mask: Sequence[Tensor] | None = None,
        offsets: Sequence[Tensor] | None = None,
        columns: Mapping[str, Sequence[Tensor]] | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the pairs of all ranks, a scalar.

        Each argument after ``keys`` is passed on every rank or on none.

        Args:
            mask: embeddings of a guide, another model: of the queries (N, G), of the keys (N, G) and, with
                ``negatives``, of those, in their shape. ``block.guide`` has their cosines; they leave out nothing.
            columns: more of each candidate for ``function``, by name: constants of the keys (N, ...) and, with
                ``negatives``, of those, (M, ...) or (N, K, ...). Not next to a queue.
        """
        of_pairs = queries, keys, negatives, labels, negative_labels, mask, offsets, sample_weight
        return self._loss(Given(*of_pairs, columns))

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def _checked_sides(self, given: Given, group: ProcessGroup | None) -> list[Side]:
        if given.columns is not None and not isinstance(given.columns, Mapping):
            raise TypeError(expected("columns", "a mapping of names to tuples of tensors", given.columns))
        if given.columns and self.queue_size:
            raise ValueError(expected("queue_size", "0 with columns", self.queue_size, "A queue holds no columns."))
        return super()._checked_sides(given, group)

    def _block_loss(self, scores: Tensor, place: slice, direction: Direction) -> tuple[Tensor, Tensor]:
        own, others, first = direction.anchors.anchors, direction.candidates, direction.anchors.first + place.start
        guide = None
        if "guide" in own:
            guide = own["guide"][place] @ others["guide"].t()
            guide = F.pad(guide, (0, scores.shape[1] - guide.shape[1]), value=-torch.inf)
        if "offsets" in others:
            scores.add_(others["offsets"])
        if "labels" in own:
            same = own["labels"][place, None] == others["labels"]
            same.diagonal(first).fill_(False)
            scores.masked_fill_(same, -torch.inf)
        positives = torch.arange(first, first + len(scores), device=scores.device)
        columns = {name.removeprefix("column "): rows for name, rows in others.items() if name.startswith("column ")}
        queries = {name: rows[positives] for name, rows in columns.items()}
        scores = scores.detach().requires_grad_(direction.needs_grad)  # a leaf
        with torch.set_grad_enabled(direction.needs_grad):
            losses = self.function(Block(scores, positives, guide, queries, columns))
            if not isinstance(losses, Tensor) or losses.shape != positives.shape:
                raise ValueError(expected("function", f"a loss for each query, shape {(*positives.shape,)}", losses))
            total = losses.double() @ direction.weight[place]
        if not direction.needs_grad:
            return total, scores
        _check_graph(total, scores)
        (slope,) = torch.autograd.grad(total, scores)
        if "offsets" in others or "labels" in own:
            slope = slope.masked_fill(scores.isneginf(), 0.0)
        return total.detach(), slope


def _check_graph(total: Tensor, scores: Tensor) -> None:
    """Raise ValueError unless ``total`` has a gradient with respect to ``scores``, and to nothing else."""
    nodes: list[Any] = [] if total.grad_fn is None else [total.grad_fn]
    seen = {None, *nodes}
    for node in nodes:  # which grows
        parents = dict.fromkeys(parent for parent, _ in node.next_functions if parent not in seen)
        nodes += parents
        seen |= parents.keys()
    leaves = [node.variable for node in nodes if hasattr(node, "variable")]
    if [*map(id, leaves)] != [id(scores)]:
        got = Words("one with another gradient" if leaves else "one without a gradient")
        fix = "A gradient of anything but the scores would be lost: use detach()."
        raise ValueError(expected("function", "a loss of block.scores alone", got, fix))
