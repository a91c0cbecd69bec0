"""Smooth average precision."""

from __future__ import annotations

import torch
from torch import Tensor

from ...distributed.torch_private import not_compiled
from ...kernels.smooth_ap.sums import smooth_ap_sums, try_in_c
from ..arguments import completed
from ..rows import Batch, compute_dtype
from .base import RankingLoss
from .pool import PerClass, Pool, Reduction, Weighting, at_temperature, local_pool, reduce_values

SPREAD_MULTIPLE = 0.1  # of the spread of the scores: the automatic temperature


@completed(local_pool, at_temperature)
def smooth_ap(
    logits: Tensor,
    targets: Tensor,
    temperature: float | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    *,
    sample_weight: Tensor | None = None,
    indexes: Tensor | None = None,
    multi_hot: bool = False,
    weighting: Weighting = "rows",
    validate_args: bool = True,
) -> Tensor:
    r"""Compute one minus the smooth average precision of each class against the rest, or of each query.

    .. math::
        L = 1 - \frac{1}{\sum_{i \in P} w_i} \sum_{i \in P} w_i
            \frac{w_i + \sum_{j \in P, j \ne i} w_j \sigma((x_j - x_i)/\tau)}
            {w_i + \sum_{j \ne i} w_j \sigma((x_j - x_i)/\tau)}

    The weights w are 1 without ``sample_weight``. Towards a temperature of 0 one minus the loss is
    ``average_precision_score(sample_weight=)`` of scikit-learn, where no positive has the score of another row.

    With ``indexes`` there is one such loss for each query, over its rows alone; read "query" for "class" below. One
    minus the loss is what ``RetrievalMAP(empty_target_action="skip")`` of torchmetrics measures of probabilities,
    except that it counts a query without a negative as an AP of 1, which this loss leaves out.

    Degenerate:
        A class without a positive or without a negative of positive weight is not valid.

    Numerics:
        Half precision is computed in float32. The smaller the temperature, the closer the loss is to the exact metric,
        and the fewer rows have gradient. O(N C) memory and time, O(positives x N) for small N. For large N rows more
        than 34 temperatures apart have no effect on each other, which shows where weights differ by 1e12 or more.
        Queries are padded to similar lengths, which at most doubles the rows, and break a compiled graph.

    Example:
        >>> import torch
        >>> logits, targets = torch.tensor([[3.0], [2.0], [1.0], [0.0], [1.0]]), torch.tensor([1, 0, 1, 1, 0])
        >>> smooth_ap(logits, targets, reduction="none", indexes=torch.tensor([4, 4, 4, 7, 7]))
        tensor([0.1667, 0.5000])

    Reference:
        Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV 2020, eq. 6.
    """
    given = Batch(logits, targets, None, sample_weight, indexes)
    pool = local_pool(given, temperature, reduction, ignore_index, multi_hot, validate_args, weighting)
    per_class, _ = _of_pool(pool, temperature)
    return reduce_values(per_class, reduction, compute_dtype(pool.rows.logits.dtype), of_pool=indexes is None)


def _of_pool(pool: Pool, temperature: float | None, spread_multiple: float = SPREAD_MULTIPLE) -> tuple[PerClass, float]:
    """Return the loss of each class, or of each query, and the temperature; None follows the spread of the scores."""
    rows, rule = pool.rows, pool.rows.rule
    if pool.is_of_rows and not (rows.indexes is not None or rule.multi_hot or pool.drops_queued_positives):
        # A kernel for the common case reads the rows as they are, unless a subclass has assigned others. It returns
        # None where it does not apply.
        weight, key_weight = (None, None) if rows.sample_weight is None else (pool.weight, pool.key_weight)
        settings = rule.ignore_index, temperature, spread_multiple
        result = try_in_c(rows.logits, rows.targets, weight, key_weight, *settings)
        if result is not None:
            loss, valid, temperature = result
            return PerClass(loss, valid), temperature
    pool, temperature = at_temperature(pool, temperature, spread_multiple)
    if pool.indexes is not None:
        return _of_queries(pool, temperature), temperature
    arguments = pool.scores, pool.positive, pool.member, pool.weight, temperature
    sums = smooth_ap_sums(*arguments, num_positive=pool.num_positive, key_weight=pool.key_weight)
    return PerClass(*sums), temperature


@not_compiled
def _of_queries(pool: Pool, temperature: float) -> PerClass:
    """Return the loss of each query, in the order of ``indexes.unique()``."""
    num_queries, blocks = pool.queries()
    values, valid = pool.scores.new_zeros(num_queries, dtype=torch.float64), pool.positive.new_zeros(num_queries)
    values = values + pool.scores[0, :0].sum()  # connects the loss to the rows even without a block
    for queries, part in blocks:
        arguments = part.scores, part.positive, part.member, part.weight, temperature
        block_values, block_valid = smooth_ap_sums(*arguments, key_weight=part.key_weight)
        values = values.index_copy(0, queries, block_values)
        valid[queries] = block_valid
    return PerClass(values, valid)


@completed(smooth_ap)
class SmoothAPLoss(RankingLoss):
    """One minus the smooth average precision, over the rows of all ranks and of a memory queue.

    The formula is that of :func:`~fullrank.losses.smooth_ap`.

    Example:
        >>> import torch
        >>> loss = SmoothAPLoss(num_classes=1, queue_size=0)
        >>> loss(torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([1, 0, 1]))
        tensor(0.1671)
    """

    ranks_queries = True
    spread_multiple = SPREAD_MULTIPLE

    def compute_per_class(self, pool: Pool) -> PerClass:
        per_class, temperature = _of_pool(pool, self.temperature, self.spread_multiple)
        self._note_temperature(pool, temperature)
        return per_class
