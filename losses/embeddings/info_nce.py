"""The contrastive loss of pairs: InfoNCE, and in its symmetric form the loss of CLIP."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ...errors import expected
from ..arguments import completed
from .base import softmax_, softplus
from .pairs import PairLoss, PairOptions


@completed()
class InfoNCELoss(PairLoss):
    r"""Cross-entropy of finding the key of each query among the keys of all ranks.

    With :math:`x_{ij} = \cos(q_i, k_j)`, over the N pairs of all ranks,

    .. math:: L = -\frac{1}{N} \sum_i \log \frac{\exp(x_{ii} / \tau)}{\sum_j \exp(x_{ij} / \tau)}

    Equal to ``F.cross_entropy(normalize(queries) @ normalize(keys).T / temperature, arange(N))`` in one process with
    all pairs. The similarities of all pairs are never in memory together. It is the case of :class:`~fullrank.RowLoss`
    whose function is the cross-entropy of a block, faster, with the gradient written out. The queue has keys, further
    candidates of the queries: use those of an encoder that changes slowly, such as a momentum encoder.

    Args:
        symmetric: average with the same loss of keys among the queries, as CLIP does; the queries then travel too.
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

    _shown = ("symmetric", "mask_margin", *PairLoss._of_all)

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        symmetric: bool = False,
        learn_temperature: bool = False,
        mask_margin: float = 0.0,
        **options: Unpack[PairOptions],
    ) -> None:
        for name, value in (("symmetric", symmetric), ("learn_temperature", learn_temperature)):
            if not isinstance(value, bool):
                raise TypeError(expected(name, "True or False", value))
        super().__init__(temperature, learn_temperature, mask_margin, **options)
        self.symmetric = symmetric

    def _terms(self, others: Tensor, positives: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return what :meth:`PairLoss._terms` does.

        With :math:`g = \log \sum_{j \ne i} \exp x_{ij} - x_{ii}` the loss of a pair is :math:`\log (1 + e^g)`, and its
        gradient of :math:`x_{ii}` is :math:`-\sigma(g)`. Nothing is subtracted from a number close to it, so pairs that
        are far apart keep all digits.
        """
        gap = softmax_(others) - positives  # [b]
        push = gap.sigmoid() * weight
        others.mul_(push[:, None])
        return softplus(gap), -push
