"""The contrastive loss of pairs: InfoNCE, and in its symmetric form the loss of CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from typing_extensions import Unpack

from ...errors import check_amount, check_choice, check_flag, expected
from ..arguments import completed
from ..base import unchecked
from .base import softmax_, softplus
from .pairs import PairLoss, PairOptions

_HARDNESS_MODES = "in_batch_negatives", "hard_negatives", "all_negatives"
_DIRECTIONS = "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"


@completed()
class InfoNCELoss(PairLoss):
    r"""Cross-entropy of finding the key of each query among the keys of all ranks.

    With :math:`x_{ij} = \cos(q_i, k_j)`, over the N pairs of all ranks,

    .. math:: L = -\frac{1}{N} \sum_i \log \frac{\exp(x_{ii} / \tau)}{\sum_j \exp(x_{ij} / \tau)}

    Equal to ``F.cross_entropy(normalize(queries) @ normalize(keys).T / temperature, arange(N))`` in one process with
    all pairs. The queue has keys, further candidates of the queries: use those of an encoder that changes slowly, such
    as a momentum encoder.

    Args:
        symmetric: average with the same loss of keys among the queries, as CLIP does; the queries then travel too.
        directions: what is compared with what, as in sentence-transformers, whose documents are the keys and negatives:
            ``"query_to_doc"``, always, and any of ``"doc_to_query"``, ``"query_to_query"`` without the query itself and
            ``"doc_to_doc"``, each key with all documents but those of its query. Further ones double the width of the
            product where keys are compared, and take no queue.
        partition_mode: ``"joint"``, one softmax over all candidates of a pair, or ``"per_direction"``: of
            ``"query_to_doc"`` and ``"doc_to_query"``, the same as ``symmetric``.
        hardness_mode: the negatives of a query, in ``"query_to_doc"``, that are made harder: those ``"all_negatives"``,
            only its own ``"hard_negatives"``, or all others ``"in_batch_negatives"``. None for no negatives.
        hardness_strength: >= 0. This times the similarity, a constant, is added to the scores of those negatives. For
            modes but ``"all_negatives"``, and for ``"doc_to_doc"``, ``negatives`` are (N, K, D) or (N, D), those of
            query i in place i.
        learn_temperature: let ``logit_scale``, the logarithm of 1 / temperature, be a parameter of this module, of
            shape (1,). Its gradient is that of one process on every rank, before and after an average over the ranks:
            give it to the optimizer, inside the model that DDP or FSDP2 wraps or outside of it. With
            ``gradient_reduction="sum"`` it must be added up with the others. Assign ``loss.logit_scale =
            model.logit_scale`` to use the parameter of a model. One that FSDP2 has sharded takes two more collectives.

    Example:
        >>> import torch
        >>> queries, keys = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0]])
        >>> InfoNCELoss(temperature=1.0)(queries, keys)
        tensor(0.5032)

    Reference:
        van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018, eq. 4. Radford et al.,
        Learning Transferable Visual Models From Natural Language Supervision, ICML 2021, fig. 3. He et al., Momentum
        Contrast, CVPR 2020, eq. 1 (the queue).
    """

    _fixed = *PairLoss._fixed, "symmetric", "directions", "partition_mode"
    _shown = "symmetric", "directions", "partition_mode", "hardness_mode", "hardness_strength", *PairLoss._of_guided
    _checks = PairLoss._checks | {
        "symmetric": check_flag,
        "directions": unchecked,
        "partition_mode": partial(check_choice, choices=("joint", "per_direction")),
        "hardness_mode": partial(check_choice, choices=(None, *_HARDNESS_MODES)),
        "hardness_strength": check_amount,
    }
    _in_c = "cross_entropy"

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        symmetric: bool = False,
        learn_temperature: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        margin: float = 0.0,
        margin_strategy: str = "absolute",
        **options: Unpack[PairOptions],
    ) -> None:
        check_flag("symmetric", symmetric)
        check_flag("learn_temperature", learn_temperature)
        super().__init__(temperature, learn_temperature, margin, margin_strategy, **options)
        self.partition_mode = partition_mode
        self.directions = _checked_directions(directions, partition_mode, symmetric, self.queue_size)
        self.symmetric = symmetric or (partition_mode == "per_direction" and len(self.directions) > 1)
        self.hardness_mode, self.hardness_strength = hardness_mode, hardness_strength

    def _terms(self, others: Tensor, positives: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        r"""Compute :math:`\log (1 + e^g)`, of which :math:`-\sigma(g)` is the gradient of :math:`x_{ii}`.

        With :math:`g = \log \sum_{j \ne i} \exp x_{ij} - x_{ii}` nothing is subtracted from a number close to it, so
        pairs that are far apart keep all digits.
        """
        gap = softmax_(others) - positives  # [b]
        push = gap.sigmoid() * weight
        others.mul_(push[:, None])
        return softplus(gap), -push


def _checked_directions(
    directions: Sequence[str], partition_mode: str, symmetric: bool, queue_size: int
) -> tuple[str, ...]:
    """Return the ``directions``, each once, or raise unless they have a meaning with the other arguments."""
    if not isinstance(directions, (tuple, list)):
        raise TypeError(expected("directions", f"a tuple of {', '.join(map(repr, _DIRECTIONS))}", directions))
    for name in directions:
        check_choice("directions", name, _DIRECTIONS)
    if "query_to_doc" not in directions:
        raise ValueError(expected("directions", "'query_to_doc', which has the key of a query, among them", directions))
    if partition_mode == "per_direction" and not {*directions} <= {"query_to_doc", "doc_to_query"}:
        fix = "Use partition_mode='joint': the other directions hold no pair."
        raise ValueError(expected("directions", "'query_to_doc' and 'doc_to_query' per direction", directions, fix))
    if partition_mode == "joint" and len({*directions}) > 1:
        if symmetric:
            raise ValueError(expected("symmetric", "False with directions in one softmax", symmetric))
        if queue_size:
            raise ValueError(expected("queue_size", "0 with directions in one softmax", queue_size))
    return (*dict.fromkeys(directions),)
