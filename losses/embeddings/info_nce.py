"""The contrastive loss of pairs: InfoNCE, and in its symmetric form the loss of CLIP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ...distributed.exchange import Exchange, describe_rows
from ...distributed.gather import gather_after
from ...distributed.header import Offer, agree_on, refuse_in_backward
from ...distributed.torch_private import not_compiled
from ...errors import RankRuntimeError, check_positive, check_temperature, expected
from ...kernels.registration import exact
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions
from ..rows import check_device, check_values, has_values, weight_of_rows, weight_unit
from .base import ContrastiveLoss, LocalLoss, log_sum_exp, softplus, sum_of_blocks


@completed()
class InfoNCELoss(ContrastiveLoss):
    r"""Cross-entropy of finding the key of each query among the keys of all ranks.

    With :math:`x_{ij} = \cos(q_i, k_j)`, over the N pairs of all ranks,

    .. math:: L = -\frac{1}{N} \sum_i \log \frac{\exp(x_{ii} / \tau)}{\sum_j \exp(x_{ij} / \tau)}

    Equal to ``F.cross_entropy(normalize(queries) @ normalize(keys).T / temperature, arange(N))`` in one process with
    all pairs. The similarities of all pairs are never in memory together. The queue has keys, further candidates of the
    queries: use those of an encoder that changes slowly, such as a momentum encoder.

    Args:
        temperature: > 0, what the similarities are divided by. May be assigned between steps.
        symmetric: average with the same loss of keys among the queries, as CLIP does; the queries then travel too.
        learn_temperature: let ``logit_scale``, the logarithm of 1 / temperature, be a parameter of this module, of
            shape (1,). Its gradient is that of one process on every rank, before and after an average over the ranks:
            give it to the optimizer, inside the model that DDP or FSDP2 wraps or outside of it. With
            ``gradient_reduction="sum"`` it must be added up with the others. Assign ``loss.logit_scale =
            model.logit_scale`` to use the parameter of a model. One that FSDP2 has sharded takes two more collectives.
        max_logit_scale: the largest factor on the similarities with a learned temperature, whose smallest value is then
            1 / ``max_logit_scale``. A ``logit_scale`` above its logarithm is clamped to it, and has a gradient only if
            that lowers it.

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

    logit_scale: nn.Parameter | None
    _shown = "learn_temperature", "symmetric", "max_logit_scale", "normalize", "queue_size", "gradient_reduction"

    def __init__(
        self,
        temperature: float = 0.07,
        *,
        symmetric: bool = False,
        learn_temperature: bool = False,
        max_logit_scale: float = 100.0,
        normalize: bool = True,
        queue_size: int = 0,
        num_features: int | None = None,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(normalize, queue_size, num_features, gather_distributed, **options)
        for name, value in (("symmetric", symmetric), ("learn_temperature", learn_temperature)):
            if not isinstance(value, bool):
                raise TypeError(expected(name, "True or False", value))
        self.symmetric = symmetric
        self.max_logit_scale = check_positive("max_logit_scale", max_logit_scale)
        # Of shape (1,), because FSDP2 refuses parameters without a dimension.
        self.register_parameter("logit_scale", nn.Parameter(torch.zeros(1)) if learn_temperature else None)
        check_temperature(temperature)
        self.temperature = temperature

    @property
    def learn_temperature(self) -> bool:
        """Whether ``logit_scale`` is a parameter."""
        return self.logit_scale is not None

    @property
    def has_temperature(self) -> bool:  # type: ignore[override]
        """Whether the temperature is a number, which the ranks compare and a state holds."""
        return self.logit_scale is None

    @property
    def temperature(self) -> float:
        """What the similarities are divided by; a learned one is read from the device."""
        if self.logit_scale is None:
            return self._temperature
        return math.exp(-min(float(self.logit_scale.detach()), math.log(self.max_logit_scale)))

    @temperature.setter
    def temperature(self, value: float) -> None:
        if self.logit_scale is None:
            self._temperature = value  # the forward checks it: an exception on one rank would leave the others waiting
        else:
            lowest = 1 / self.max_logit_scale
            if check_positive("temperature", value) < lowest * (1 - 1e-9):
                fix = "Pass a larger max_logit_scale, or leave out learn_temperature."
                raise ValueError(expected("temperature", f"at least 1 / max_logit_scale = {lowest:g}", value, fix))
            with torch.no_grad():
                self.logit_scale.fill_(-math.log(value))

    @completed(DistributedLoss)
    @not_compiled
    def forward(self, queries: Tensor, keys: Tensor, *, sample_weight: Tensor | None = None) -> Tensor:
        """Return the loss of the pairs of all ranks, a scalar.

        Args:
            queries: (N, D) of this rank; N may differ between ranks and may be 0.
            keys: (N, D), of which row i is the positive of row i of the queries.
            sample_weight: (N,) >= 0, of the pairs in the mean, on every rank or on none. All keys stay candidates.
        """
        call, group = type(self).__name__, self._resolve_group()
        learned: Tensor | None = self.logit_scale
        refuse_in_backward(call)
        # True for a parameter that FSDP2 has sharded, if this call is outside the forward of its module.
        is_sharded = hasattr(learned, "full_tensor")

        def bring() -> Offer[Tensor | None]:
            if learned is None:
                check_temperature(self.temperature)
            self._checked("queries", queries, group)
            if isinstance(keys, Tensor) and (keys.ndim < 2 or not keys.is_floating_point()):
                fix = (
                    "If these are labels, use SupConLoss(embeddings, labels). If they are embeddings, use keys.float()."
                )
                kind = ValueError if keys.is_floating_point() else TypeError
                raise kind(expected("keys", "shape (N, D) of floats, one key for each query", keys, fix))
            self._checked("keys", keys, group)
            if queries.shape != keys.shape:
                fix = "Row i of the keys is the positive of row i of the queries."
                raise ValueError(expected("keys", f"shape {tuple(queries.shape)}, as queries", keys, fix))
            if queries.dtype != keys.dtype:
                raise TypeError(expected("keys", f"{queries.dtype}, as queries", keys, "Use keys.to(queries.dtype)."))
            check_device("keys", keys, queries, "queries")
            if learned is not None and not learned.is_meta:
                check_values("queries", queries)
            facts: dict[str, object] = {}
            if group is not None:
                of_call = {"queries": describe_rows(queries), "logit_scale is sharded": is_sharded}
                facts = self._facts(of_call if sample_weight is None else {**of_call, "sample_weight": True})
            weight, check = weight_of_rows(sample_weight, queries, "queries", self.validate_args)
            totals: list[Tensor | float] = [0.0, 0.0]
            if weight is not None and not weight.is_meta:
                unit = weight_unit(weight)  # so that no sum of weights overflows
                totals = [(weight / unit).sum(), unit]
            totals += [] if learned is None or is_sharded or group is None else [learned.detach()]
            tensors = (keys, queries) if self.symmetric else (keys,)
            return Offer(weight, facts, len(keys), totals, self._checksum, check, tensors, ("keys", "queries"))

        agreed = agree_on(call, group, bring)
        exchange = None if group is None else Exchange(call, group)
        masses, units, logit_scales, *_ = ([*numbers] for numbers in zip(*agreed.totals))  # of each rank, 0 without any
        if learned is not None and hasattr(learned, "full_tensor"):
            learned = learned.full_tensor()  # this communicates, so the ranks must have agreed
            if exchange is not None:
                logit_scales = exchange.each(learned.detach().reshape(1), "the scale")[:, 0].tolist()
        if len(set(map(repr, logit_scales))) > 1:
            fix = "Load the same checkpoint, and take the same optimizer steps, on every rank."
            raise RankRuntimeError(expected(f"{call}: logit_scale", "the same on every rank", logit_scales, fix))
        rows = [self._comparable(keys), self._comparable(queries)]
        all_rows = [tensor.detach() for tensor in (rows if self.symmetric else rows[:1])]
        if group is not None:  # rows travel in the dtype of the caller, which may be half precision
            with torch.no_grad():
                all_rows = [self._comparable(tensor) for tensor in gather_after(call, group, agreed)]
        scale, is_clamped = rows[0].new_tensor(1.0), None
        if learned is None:
            scale = scale / self.temperature
        else:
            logit_scale, limit = learned.detach().reshape(()).to(scale), math.log(self.max_logit_scale)
            scale, is_clamped = logit_scale.clamp_max(limit).exp(), logit_scale > limit
        with_grad = torch.is_grad_enabled()
        first = 0 if exchange is None else sum(agreed.rows[: exchange.rank])
        needs = [with_grad and tensor.requires_grad for tensor in rows]
        share: Tensor | float = 1 / max(1, sum(agreed.rows)) / (1 + self.symmetric)
        if agreed.value is not None:
            most = max(units)
            mass = sum(mass * (unit / most) for mass, unit in zip(masses, units))
            share = agreed.value / most / (mass or 1.0) / (1 + self.symmetric)
        local = self._local_loss(rows, all_rows, sum(agreed.rows), first, scale, needs, share)
        scales = [] if learned is None else [learned]
        loss = self._sum_over_ranks(local, rows, agreed, exchange, scales, is_clamped, is_sharded)
        if self._enqueues and has_values(loss):
            self.queue.enqueue(all_rows[0], torch.zeros(len(all_rows[0]), dtype=torch.int64, device=keys.device))
        is_hinted = self.validate_args and self.training and has_values(loss)
        if is_hinted and self._hints.count_call() and group is not None:
            self._hints.observe_ranks(agreed.rows, all_rows)
        return loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    @torch.no_grad()
    def _local_loss(
        self,
        rows: list[Tensor],
        all_rows: list[Tensor],
        count: int,
        first: int,
        scale: Tensor,
        needs: list[bool],
        share: Tensor | float,
    ) -> LocalLoss:
        """Return this rank's terms of the loss, with the gradient of the logarithm of the scale.

        ``rows`` are this rank's keys and queries, and ``needs`` says which of their gradients are needed. ``all_rows``
        are the keys of all ranks, and their queries if the loss is symmetric. Of the ``count`` pairs of all ranks those
        of this rank begin at ``first``. ``share`` is what a pair weighs, a number or (N,) float64.
        """
        total = grad_scale = rows[0].new_zeros((), dtype=torch.float64)
        grad_own: list[Tensor | None] = [None, None]
        grad_all: list[Tensor | None] = [None, None]
        block_loss = partial(_block_loss, first=first, weight=share)
        for anchors, candidates in ((1, 0), (0, 1))[: 1 + self.symmetric]:
            others = all_rows[candidates]
            if candidates == 0:
                others, _ = self._with_queue(others, others.new_zeros(len(others), dtype=torch.int64))
            wanted = needs[anchors], needs[candidates], self.logit_scale is not None
            result = exact(sum_of_blocks)(rows[anchors].detach(), others, scale, wanted, block_loss)
            grad_own[anchors] = result.grad_anchors
            grad_all[candidates] = None if result.grad_candidates is None else result.grad_candidates[:count]
            total, grad_scale = total + result.total, grad_scale + result.grad_scale * scale
        return LocalLoss(total, grad_scale, grad_own, grad_all)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the temperature, unless it is learned here or was where the state was saved."""
        if float(state["temperature"]) > 0:
            super().set_extra_state(state)


def _block_loss(scores: Tensor, place: slice, first: int, weight: Tensor | float) -> tuple[Tensor, Tensor]:
    r"""Return the weighted sum of the losses of a block (b, K), and its gradient in place of the scores.

    With :math:`g = \log \sum_{j \ne i} \exp x_{ij} - x_{ii}` the loss of a pair is :math:`\log (1 + e^g)`, and its
    gradient of :math:`x_{ii}` is :math:`-\sigma(g)`. Nothing is subtracted from a number close to it, so pairs that are
    far apart keep all digits. Query i of the block has the key ``first + place.start + i``.
    """
    diagonal = scores.diagonal(first + place.start)
    positives = diagonal.clone()  # [b]
    diagonal.fill_(-math.inf)
    others = log_sum_exp(scores)  # [b]
    gap = others - positives
    losses = softplus(gap)
    if isinstance(weight, Tensor):
        total, share = losses @ weight[place], gap.sigmoid() * weight[place].to(gap)
    else:
        total, share = losses.sum() * weight, gap.sigmoid() * weight
    slope = scores.sub_(others[:, None]).exp_().mul_(share[:, None])
    diagonal.copy_(-share)
    return total, slope
