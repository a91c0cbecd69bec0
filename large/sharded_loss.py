"""A ranking loss over a pool whose rows stay on their ranks.

1. ``_agree``: the rows are checked, and the headers exchanged, with rows, positives and range of the scores. 2.
``_sum_over_ranks``: sums over the rows of each class are added up over the ranks. If the sums are more bytes than the
rows, or require all rows, it returns None on every rank, and the wrapped loss gathers the rows. 3. The wrapped loss
reduces the losses of the classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.exchange import Exchange, check_rows
from ..distributed.group import gradient_scale
from ..distributed.header import Offer, agree_on
from ..errors import Words, expected
from ..losses import PAUCAtBudgetLoss, RecallAtQuantileLoss, SmoothAPLoss
from ..losses.arguments import completed
from ..losses.base import compiled_where_local
from ..losses.pooled.base import RankingLoss
from ..losses.pooled.pool import LossWithClasses, PerClass, Pool
from ..losses.rows import TENSORS, Batch
from .shard import Shard, spread_over_shards, totals_of
from .smooth_ap import smooth_ap_of_shard
from .thresholds import recall_of_shard, trapezoid_of_shard

Shardable: TypeAlias = SmoothAPLoss | RecallAtQuantileLoss | PAUCAtBudgetLoss
KINDS = SmoothAPLoss, RecallAtQuantileLoss, PAUCAtBudgetLoss
SURROGATES: dict[type, str] = {RecallAtQuantileLoss: "sigmoid", PAUCAtBudgetLoss: "trapezoid"}
CALL = "ShardedLoss"  # in the header


class ShardedLoss(nn.Module):
    """A ranking loss over the rows of all ranks, where each rank keeps its own rows.

    Equal to ``loss``, with the same gradient up to rounding. Sums over the rows of each class travel in place of the
    rows, so the cost of each rank falls with the number of ranks. If the rows are fewer bytes than the sums, ``loss``
    gathers them as it does without this wrapper.

    The settings are those of ``sharded.loss``. For diagnostics, and for a ranking per query (``indexes``), call
    ``sharded.loss`` itself, which gathers the rows.

    Args:
        loss: a :class:`~fullrank.SmoothAPLoss`, a :class:`~fullrank.RecallAtQuantileLoss` with
            ``surrogate="sigmoid"``, or a :class:`~fullrank.PAUCAtBudgetLoss` with ``surrogate="trapezoid"``, whose
            ``queue_size`` is 0 and whose ``max_pool_size`` is None.

    Raises:
        TypeError: for another loss, and for a subclass with another formula.
        ValueError: for a queue, ``max_pool_size`` or another surrogate; at construction, or in the forward on every
            rank.

    Numerics:
        The sums are float64. Thresholds are exact.

    Distributed:
        One header forward, and None backward. Then ``SmoothAPLoss`` has one sum over the ranks; one more exchange each
        for several classes and an automatic temperature, two for infinite scores; three in place of the sum where only
        positives travel. Thresholds have three sums for float32 and six for float64, and one exchange of the sums at
        them; recall one more with an automatic temperature. Every rank gets the same bits.

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
    @completed(RankingLoss.forward)
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
        """Return the loss of this rank's rows, pooled with those of the other ranks."""
        group, shard, per_class = self.loss._resolve_group(), None, None
        if group is None:
            check_shardable(self.loss)
        else:
            shard, rows = self._agree(Batch(logits, targets, iid_mask, sample_weight), group)
            per_class = self._sum_over_ranks(shard)
        if shard is None or per_class is None:
            gathered: Any = self.loss(logits, targets, iid_mask, return_per_class, sample_weight=sample_weight)
            return gathered
        # Without this rank's rows. A hint about them would be given on some ranks only, and where warnings are errors
        # it would stop only these ranks.
        none = Batch(rows.logits[:0], rows.targets[:0], over_ranks=True)
        positives = sum(shard.positives) / self.loss.num_classes
        loss = self.loss._reduce_and_enqueue(none, None, per_class, lambda: positives)
        return LossWithClasses.of(loss, per_class) if return_per_class else loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    @property
    def temperature(self) -> float | None:
        """The temperature of ``loss``, which a schedule may set here."""
        return self.loss.temperature

    @temperature.setter
    def temperature(self, value: float | None) -> None:
        self.loss.temperature = value

    def fits_in_a_graph(self) -> bool:
        return self.loss.fits_in_a_graph()

    def _agree(self, given: Batch, group: ProcessGroup) -> tuple[Shard, Batch]:
        """Check the rows of this rank, exchange the headers, and return the shard and the checked rows."""
        loss = self.loss

        def bring() -> Offer[tuple[Pool, Batch]]:
            check_shardable(loss)
            rows = loss._check(given, group)
            check_rows(rows.tensors)
            pool = Pool(rows, weighting=loss.weighting)
            facts = {**loss._facts(), "loss": type(loss).__name__}
            totals = *totals_of(pool), rows.counts[0]
            return Offer((pool, rows), facts, 0, totals, None, rows.check, rows.tensors, TENSORS, sends_rows=False)

        agreed = agree_on(CALL, group, bring)
        pool, rows = agreed.value
        if rows.unread is not None and not agreed.totals[group.rank()][4]:  # now known: no row is ignored
            rows = rows._replace(complete=True)
            pool = Pool(rows, weighting=loss.weighting)
        needs_grad = torch.is_grad_enabled() and pool.scores.requires_grad
        scale = gradient_scale(loss.gradient_reduction, group, needs_grad=needs_grad)
        return Shard.of(pool, Exchange(CALL, group), scale, agreed), rows

    def _sum_over_ranks(self, shard: Shard) -> PerClass | None:
        """Return the loss of each class from sums over the ranks; None, on all ranks, to gather the rows."""
        loss = self.loss
        if isinstance(loss, PAUCAtBudgetLoss):
            per_class, flat = trapezoid_of_shard(shard, loss._area, loss.temperature)
            loss._observe_flat(flat)
            return per_class
        temperature = loss.temperature
        if temperature is None:
            spread = spread_over_shards(shard)
            if spread is None:
                return None
            temperature = loss._last_temperature = loss.spread_multiple * spread
        if isinstance(loss, SmoothAPLoss):
            return smooth_ap_of_shard(shard, temperature)
        settings = loss.quantile, loss.quantile_interpolation, loss.threshold_gradient
        return recall_of_shard(shard, temperature, *settings)


def check_shardable(loss: Any) -> Any:
    """Return ``loss``, or raise TypeError or ValueError when its pool cannot be sharded."""
    kind: Any = next((kind for kind in KINDS if isinstance(loss, kind)), None)
    if kind is None:
        value = Words(f"a {type(loss).__name__}") if isinstance(loss, nn.Module) else loss
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise TypeError(expected("loss", f"one of {names}", value, "Without ShardedLoss it gathers the rows."))
    if any(getattr(type(loss), name) is not getattr(kind, name) for name in ("forward", "compute_per_class")):
        fix = "Its sums are those of that formula. Without ShardedLoss it gathers the rows."
        raise TypeError(expected("loss", f"the formula of {kind.__name__}", Words(f"a {type(loss).__name__}"), fix))
    settings: list[tuple[str, object]] = [("queue_size", 0), ("max_pool_size", None)]
    if kind in SURROGATES:
        settings.append(("surrogate", SURROGATES[kind]))
    for name, value in settings:
        found = loss.form if (name, kind) == ("surrogate", RecallAtQuantileLoss) else getattr(loss, name)
        if found != value:
            fix = "Construct the loss with it. Without ShardedLoss it gathers the rows."
            raise ValueError(expected(name, f"{value!r} in a ShardedLoss", found, fix))
    return loss
