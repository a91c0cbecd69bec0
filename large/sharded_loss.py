"""A loss over a pool that no rank holds.

What happens in a call over several ranks::

    header     checks, what must be equal, number of rows and positives, range of the scores
    1. part    this rank's rows, with what the header has shown of the others       _agree
    2. sums    class-wise sums over the ranks, where they are less than the rows    _add_up
    3. finish  reduction, counts for a logger, hints                                _finish

Where the sums do not pay, or need all rows, step 2 returns None on every rank, and the wrapped loss gathers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.exchange import Exchange, check_rows
from ..distributed.group import gradient_scale
from ..distributed.header import Offer, agree_on, refuse_in_backward
from ..distributed.torch_private import note_kind
from ..errors import Words, expected
from ..losses import PAUCAtBudgetLoss, RecallAtQuantileLoss, SmoothAPLoss
from ..losses.base import compiled_where_local
from ..losses.pooled.base import Given
from ..losses.pooled.pool import LossWithClasses, PerClass, Pool, reduce_values
from ..losses.rows import Batch, weight_unit
from .part import Part, spread_of_parts, totals_of
from .smooth_ap import smooth_ap_of_part
from .thresholds import recall_of_part, trapezoid_of_part

Shardable: TypeAlias = SmoothAPLoss | RecallAtQuantileLoss | PAUCAtBudgetLoss
KINDS = SmoothAPLoss, RecallAtQuantileLoss, PAUCAtBudgetLoss
CALL = "ShardedLoss"


class ShardedLoss(nn.Module):
    """A ranking loss over the rows of all ranks, of which each rank keeps its own.

    Equal to ``loss``, with the same gradient up to rounding. Sums over the rows of each class travel in place of the
    rows, so the cost of a rank falls with their number. Where the rows are fewer bytes than the sums, ``loss`` gathers
    them as it does alone; which of both happens depends on numbers that all ranks know. In one process, and with
    ``gather_distributed=False``, the call is that of ``loss``.

    The settings are those of ``sharded.loss``. For diagnostics, and for a ranking per query (``indexes``), call
    ``sharded.loss`` itself, which gathers the rows.

    Args:
        loss: a :class:`~fullrank.SmoothAPLoss`, a :class:`~fullrank.RecallAtQuantileLoss`, or a
            :class:`~fullrank.PAUCAtBudgetLoss` with ``surrogate="trapezoid"``, whose ``queue_size`` is 0 and whose
            ``max_pool_size`` is None. The state is its state, with ``loss.`` before the names.

    Shape:
        As for ``loss``.

    Raises:
        TypeError: for another loss, and for a subclass with another formula.
        ValueError: for a queue, ``max_pool_size`` or another surrogate; at construction, or in the forward on every
            rank.

    Numerics:
        The sums are float64. Thresholds are exact. Rows are gathered if a weight is above 2**64, or 2**512 in float64.

    Distributed:
        One header forward, and None backward. Then ``SmoothAPLoss`` has one sum over the ranks; one more exchange each
        for several classes and an automatic temperature, two for infinite scores; three in place of the sum where only
        positives travel. Thresholds have three sums for float32 and six for float64, and one exchange of the sums at
        them; recall one more with an automatic temperature. Every rank gets the same value to the last bit, and the
        gradient of its own rows.

    Example:
        >>> import torch
        >>> from fullrank import SmoothAPLoss
        >>> sharded = ShardedLoss(SmoothAPLoss(num_classes=1))
        >>> sharded(torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([1, 0, 1]))
        tensor(0.1671)
    """

    loss: Shardable

    def __init__(self, loss: Shardable) -> None:
        super().__init__()
        self.loss = check_shardable(loss)

    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: Literal[False] = False,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        *,
        return_per_class: Literal[True],
        sample_weight: Tensor | None = None,
    ) -> LossWithClasses: ...
    @overload
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: bool = False,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor | LossWithClasses: ...
    @compiled_where_local
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        return_per_class: bool = False,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor | LossWithClasses:
        """Return the loss of this rank's rows, pooled with those of the other ranks.

        Args:
            logits, targets, iid_mask, sample_weight: the rows of this rank, as ``loss`` takes them.
            return_per_class: return ``LossWithClasses(loss, per_class, valid)``: also that of each class, if valid.
        """
        group, part, per_class = self.loss._resolve_group(), None, None
        if group is None:
            check_shardable(self.loss)
        else:
            part, rows = self._agree(Given(logits, targets, iid_mask, sample_weight), group)
            per_class = self._add_up(part)
        if part is None or per_class is None:
            gathered: Any = self.loss(logits, targets, iid_mask, return_per_class, sample_weight=sample_weight)
            return gathered
        loss = self._finish(part, rows, per_class)
        return LossWithClasses.of(loss, per_class) if return_per_class else loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    @property
    def temperature(self) -> float | None:
        """The temperature of ``loss``, which a schedule may set here."""
        return self.loss.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.loss.temperature = value

    def fits_in_a_graph(self) -> bool:
        """Return whether a call communicates with no other rank and keeps no state, so that it can be compiled."""
        return self.loss.fits_in_a_graph()

    # The steps. They and `forward` alone use of the loss what is not public.

    def _agree(self, given: Given, group: ProcessGroup) -> tuple[Part, Batch]:
        """Check the rows of this rank, exchange headers, and return the rows with what is known of the others."""
        loss = self.loss
        refuse_in_backward(CALL)

        def bring() -> Offer[tuple[Pool, Batch]]:
            check_shardable(loss)
            rows = loss._check(given, group)
            check_rows(rows.tensors)
            pool, weight = Pool(rows), rows.sample_weight
            # Huge weights are divided by a unit, which must be that of all ranks.
            is_huge = weight is not None and bool(weight_unit(weight) != 1)
            facts = loss._facts({"loss": type(loss).__name__})
            return Offer((pool, rows), facts, totals=(*totals_of(pool), is_huge), tensors=rows.tensors, stays=True)

        agreed = agree_on(CALL, group, bring)
        pool, rows = agreed.value
        needs_grad = torch.is_grad_enabled() and pool.scores.requires_grad
        scale = gradient_scale(loss.gradient_reduction, group, needs_grad=needs_grad)
        return Part.of(pool, Exchange(CALL, group), scale, agreed), rows

    def _add_up(self, part: Part) -> PerClass | None:
        """Return the loss of each class from sums over the ranks; None if the rows are to be gathered.

        The choice depends on what is equal on all ranks alone.
        """
        loss = self.loss
        if part.must_gather:
            return None
        if isinstance(loss, PAUCAtBudgetLoss):
            per_class, flat_class = trapezoid_of_part(part, loss._area, loss.temperature)
            if flat_class is not None and loss.validate_args:
                loss._warn_of_flat(flat_class)
            return per_class
        temperature = loss.temperature
        if temperature is None:
            spread = spread_of_parts(part)
            if spread is None:
                return None
            temperature = loss._last_temperature = type(loss).spread_multiple * spread
        if isinstance(loss, SmoothAPLoss):
            return smooth_ap_of_part(part, temperature)
        threshold = loss.quantile, loss.quantile_interpolation, loss.threshold_gradient
        return recall_of_part(part, temperature, *threshold)

    def _finish(self, part: Part, rows: Batch, per_class: PerClass) -> Tensor:
        """Return the loss. Count for a logger, and warn of a likely misuse."""
        loss, pool = self.loss, part.pool
        if loss.training and loss.pool_counts is not None:
            loss.pool_counts.add(sum(part.positives) / loss.num_classes, per_class)
        if loss.training and loss.validate_args and loss._hints.count_call(pool):
            # A hint about the rows of some ranks would be given by these ranks alone, and could stop them alone.
            pool, rows = pool.with_scores(pool.scores.detach()), rows.take(rows.targets.new_zeros(0).long())
            loss._hints.observe(loss._setting(part.num_rows), rows, pool, per_class)
        return note_kind(reduce_values(per_class, loss.reduction, pool.scores.dtype), over_ranks=True)


def check_shardable(loss: Any) -> Any:
    """Return ``loss``, or raise TypeError or ValueError when its pool cannot be sharded."""
    kind: Any = next((kind for kind in KINDS if isinstance(loss, kind)), None)
    if kind is None:
        found = Words(f"a {type(loss).__name__}") if isinstance(loss, nn.Module) else loss
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise TypeError(expected("loss", f"one of {names}", found, "Without ShardedLoss it gathers the rows."))
    if any(getattr(type(loss), name) is not getattr(kind, name) for name in ("forward", "compute_per_class")):
        fix = "Its sums are those of that formula. Without ShardedLoss it gathers the rows."
        raise TypeError(expected("loss", f"the formula of {kind.__name__}", Words(f"a {type(loss).__name__}"), fix))
    needed = [("queue_size", 0), ("max_pool_size", None)]
    for name, value in [*needed, ("surrogate", "trapezoid")] if kind is PAUCAtBudgetLoss else needed:
        if getattr(loss, name) != value:
            fix = "Construct the loss with it. Without ShardedLoss it gathers the rows."
            raise ValueError(expected(name, f"{value!r} in a ShardedLoss", getattr(loss, name), fix))
    return loss
