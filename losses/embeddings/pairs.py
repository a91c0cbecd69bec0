"""The base of the losses of pairs: each query against the keys of all ranks, further negatives, and the queue."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from ...distributed.exchange import Exchange, check_rows, describe_rows
from ...distributed.gather import gather_after
from ...distributed.header import Offer, agree_on, refuse_in_backward
from ...distributed.torch_private import not_compiled
from ...errors import RankRuntimeError, Words, check_amount, check_positive, check_temperature, expected
from ...kernels.registration import exact
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions
from ..rows import check_device, check_values, checked_embeddings, has_values, unit_rows, weight_of_rows, weight_unit
from .base import ContrastiveLoss, LocalLoss, anchors_at_once, check_like, lowest, sum_of_blocks
from .retrieval import checked_labels

_NO_LABEL = -100
_ALONE = torch.iinfo(torch.int64).min  # the label of a candidate without one, which no anchor has


class _Pairs(NamedTuple):
    """The rows of this rank or of all ranks; those of all have queries only for a symmetric loss."""

    keys: Tensor  # [N, D]
    queries: Tensor | None  # [N, D]
    labels: Tensor | None  # [N]
    key_guides: Tensor | None  # [N, G]
    query_guides: Tensor | None  # [N, G]


class _Mask(NamedTuple):
    """Which candidates are left out for an anchor: those of its label, and those that a guide finds too similar."""

    own_labels: Tensor | None  # [n] of the anchors
    labels: Tensor  # [K] of the candidates
    own_guides: Tensor | None  # [n, G] of the anchors, of length 1
    guides: Tensor | None  # [K, G]; of fewer if only the first candidates have one
    limit: Tensor | None  # [n] a candidate as similar as this is left out

    def fill(self, scores: Tensor, place: slice) -> None:
        """Set the scores (b, K) of a block of anchors to the lowest number where a candidate is left out."""
        if self.own_labels is not None:
            scores.masked_fill_(self.own_labels[place, None] == self.labels, lowest(scores))
        if self.own_guides is not None and self.guides is not None and self.limit is not None:
            similar = self.own_guides[place] @ self.guides.t() >= self.limit[place, None]
            scores[:, : len(self.guides)].masked_fill_(similar, lowest(scores))


@completed()
class PairLoss(ContrastiveLoss):
    """Base of the losses of pairs: what they are called with, the temperature, and the sum over the blocks.

    Args:
        temperature: > 0, what the similarities are divided by. May be assigned between steps.
        learn: let ``logit_scale``, the logarithm of 1 / temperature, be a parameter.
        max_logit_scale: the largest factor on the similarities with a learned temperature, whose smallest value is then
            1 / ``max_logit_scale``. A ``logit_scale`` above its logarithm is clamped to it, and has a gradient only if
            that lowers it.
        mask_margin: >= 0. The ``mask`` of a call also leaves out candidates that are less similar than the key by up to
            this much.
    """

    logit_scale: nn.Parameter | None
    logit_bias: nn.Parameter | None
    symmetric = False

    def __init__(
        self,
        temperature: float,
        learn: bool,
        max_logit_scale: float,
        mask_margin: float,
        normalize: bool,
        queue_size: int,
        num_features: int | None,
        gather_distributed: bool | None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(normalize, queue_size, num_features, gather_distributed, **options)
        self.max_logit_scale = check_positive("max_logit_scale", max_logit_scale)
        self.mask_margin = check_amount("mask_margin", mask_margin)
        # Of shape (1,), because FSDP2 refuses parameters without a dimension.
        self.register_parameter("logit_scale", nn.Parameter(torch.zeros(1)) if learn else None)
        self.register_parameter("logit_bias", None)
        check_temperature(temperature)
        self._start_temperature(temperature)

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
                fix = "Pass a larger max_logit_scale, or do not learn the temperature."
                raise ValueError(expected("temperature", f"at least 1 / max_logit_scale = {lowest:g}", value, fix))
            with torch.no_grad():
                self.logit_scale.fill_(-math.log(value))

    @completed(DistributedLoss)
    @not_compiled
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        negatives: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        mask: Sequence[Tensor] | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the pairs of all ranks, a scalar.

        Each of ``negatives``, ``labels``, ``mask`` and ``sample_weight`` is passed on every rank or on none.

        Args:
            queries: (N, D) of this rank; N may differ between ranks and may be 0.
            keys: (N, D), of which row i is the positive of row i of the queries.
            negatives: (M, D) or (N, K, D), hard negatives: further candidates of the queries of all ranks, with a
                gradient. M may differ between ranks and may be 0. They do not enter the queue.
            labels: (N,) or (N, 1) integers or bools. Pairs with the same label, on any rank or in the queue, are no
                negatives of each other: they are left out. -100 is no label. Negatives have none.
            mask: embeddings of a guide, another model that tells false negatives: of the queries (N, G), of the keys
                (N, G) and, with ``negatives``, of those, in their shape. A candidate is left out for a query if the
                guide finds it at least as similar (cosine) as the key of the query. Keys of the queue have no guide and
                stay. A guide that is not finite makes the loss NaN on every rank.
            sample_weight: (N,) >= 0, of the pairs in the mean. All keys stay candidates.
        """
        call, group = type(self).__name__, self._resolve_group()
        parameters = {name: p for name in ("logit_scale", "logit_bias") if (p := getattr(self, name)) is not None}
        # True for a parameter that FSDP2 has sharded, if this call is outside the forward of its module.
        sharded = {name: hasattr(parameter, "full_tensor") for name, parameter in parameters.items()}
        refuse_in_backward(call)

        def bring() -> Offer[tuple[_Pairs, list[Tensor], Tensor | None]]:
            if self.has_temperature:
                check_temperature(self.temperature)
            pairs, further = self._checked_pairs(queries, keys, negatives, labels, mask, group)
            if any(not parameter.is_meta for parameter in parameters.values()):
                check_values("queries", queries)
            facts: dict[str, object] = {}
            if group is not None:
                facts = {"queries": describe_rows(queries)}
                facts |= {f"{name} is sharded": is_sharded for name, is_sharded in sharded.items()}
                facts |= {name: describe_rows(rows) for name, rows in zip(("negatives", "mask of negatives"), further)}
                facts = self._facts(facts if sample_weight is None else {**facts, "sample_weight": True})
            weight, check = weight_of_rows(sample_weight, queries, "queries", self.validate_args)
            totals: list[Tensor | float] = [0.0, 0.0, float(len(further[0]) if further else 0)]
            if weight is not None and not weight.is_meta:
                unit = weight_unit(weight)  # so that no sum of weights overflows
                totals[:2] = (weight / unit).sum(), unit
            if group is not None:
                totals += [0.0 if sharded[name] else parameter.detach() for name, parameter in parameters.items()]
            tensors = pairs if self.symmetric else pairs._replace(queries=None, query_guides=None)
            names = "keys", "queries", "labels", "mask of keys", "mask of queries"
            return Offer((pairs, further, weight), facts, len(keys), totals, self._checksum, check, tensors, names)

        agreed = agree_on(call, group, bring)
        exchange = None if group is None else Exchange(call, group)
        masses, units, numbers, *of_learned = ([*values] for values in zip(*agreed.totals))  # of each rank
        learned: list[tuple[Tensor, bool]] = []
        for (name, parameter), values in zip(parameters.items(), of_learned):
            if sharded[name]:
                parameter = parameter.full_tensor()  # this communicates, so the ranks must have agreed
                if exchange is not None:
                    values = exchange.each(parameter.detach().reshape(1), f"the {name}")[:, 0].tolist()
            if len(set(map(repr, values))) > 1:
                fix = "Load the same checkpoint, and take the same optimizer steps, on every rank."
                raise RankRuntimeError(expected(f"{call}: {name}", "the same on every rank", values, fix))
            learned.append((parameter, sharded[name]))
        (own, further, weight), num_further = agreed.value, (*map(int, numbers),)
        given = [own.keys, cast(Tensor, own.queries), *further[:1]]
        live, gathered = own, cast(list[Tensor | None], [None] * len(given))
        if exchange is not None:  # rows travel in the dtype of the caller, which may be half precision
            with torch.no_grad():
                live = _Pairs(*gather_after(call, exchange.group, agreed))
                further = exchange.rows(further, num_further) if further else further
                gathered = [live.keys, live.queries, *further[:1]]
        first = 0 if exchange is None else sum(agreed.rows[: exchange.rank])
        needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in given]

        def compute() -> tuple[LocalLoss, tuple[Tensor, Tensor]]:
            rows = [self._comparable(tensor) for tensor in given]
            all_rows = [a if b is None else self._comparable(b) for a, b in zip(rows, gathered)]
            if weight is None:
                share = rows[0].new_full((len(rows[0]),), 1 / max(1, sum(agreed.rows)), dtype=torch.float64)
            else:
                most = max(units)
                share = weight / most / (sum(mass * (unit / most) for mass, unit in zip(masses, units)) or 1.0)
            scale, is_clamped = rows[0].new_tensor(1.0), None
            if learned:
                logit_scale, limit = learned[0][0].detach().reshape(()).to(scale), math.log(self.max_logit_scale)
                scale, is_clamped = logit_scale.clamp_max(limit).exp(), logit_scale > limit
            else:
                scale = scale / self.temperature
            bias = self._bias(scale, [tensor.detach() for tensor, _ in learned[1:]])
            masks = self._masks(own, live, further[1:])
            local = self._local_loss(rows, all_rows, needs, masks, first, scale, bias, share)
            return local._replace(is_clamped=is_clamped), (all_rows[0], masks[0].labels)

        counts = agreed.rows, agreed.rows, num_further
        loss, to_enqueue = self._sum_over_ranks(compute, given, counts, exchange, learned)
        if self._enqueues and has_values(loss):
            self.queue.enqueue(*to_enqueue)
        is_hinted = self.validate_args and self.training and has_values(loss)
        if is_hinted and self._hints.count_call() and group is not None:
            self._hints.observe_ranks(agreed.rows, live[:2])
        return loss

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def _checked_pairs(
        self,
        queries: Tensor,
        keys: Tensor,
        negatives: Tensor | None,
        labels: Tensor | None,
        mask: Sequence[Tensor] | None,
        group: ProcessGroup | None,
    ) -> tuple[_Pairs, list[Tensor]]:
        """Return the checked rows of this rank, and its negatives with their guides, as far as there are any."""
        queries = self._checked("queries", queries, group)
        if isinstance(keys, Tensor) and (keys.ndim < 2 or not keys.is_floating_point()):
            fix = "If these are labels, use SupConLoss(embeddings, labels). If they are embeddings, use keys.float()."
            kind = ValueError if keys.is_floating_point() else TypeError
            raise kind(expected("keys", "shape (N, D) of floats, one key for each query", keys, fix))
        keys = self._checked("keys", keys, group)
        if queries.shape != keys.shape:
            fix = "Row i of the keys is the positive of row i of the queries."
            raise ValueError(expected("keys", f"shape {tuple(queries.shape)}, as queries", keys, fix))
        check_like("keys", keys, queries, "queries")
        further = []
        if negatives is not None:
            self._check_not_gathered(group, negatives=negatives)
            if isinstance(negatives, Tensor) and not negatives.is_floating_point():
                fix = "If these are labels, pass labels=. If they are embeddings, use negatives.float()."
                raise TypeError(expected("negatives", "shape (M, D) or (N, K, D) of floats", negatives, fix))
            further = [self._checked("negatives", _flattened(negatives), group)]
            check_like("negatives", further[0], queries, "queries")
        if labels is not None:
            self._check_not_gathered(group, labels=labels)
            labels = checked_labels(labels, queries, "queries")
        if mask is None:
            return _Pairs(keys, queries, labels, None, None), further
        names = "queries", "keys", *(["negatives"] if further else [])
        if not isinstance(mask, (tuple, list)) or len(mask) != len(names):
            got = Words(f"{len(mask)} of them" if isinstance(mask, (tuple, list)) else f"a {type(mask).__name__}")
            raise TypeError(expected("mask", f"a tuple of embeddings of a guide, of {', '.join(names)}", got))
        guides: list[Tensor] = []
        for name, guide, rows in zip(names, mask, (queries, keys, *further)):
            self._check_not_gathered(group, mask=guide)
            guide = checked_embeddings(f"mask of {name}", _flattened(guide)).detach()
            guides.append(guide)
            if check_rows([guide]) != len(rows):
                raise ValueError(expected(f"mask of {name}", f"{len(rows)} rows, as {name}", guide))
            check_device(f"mask of {name}", guide, rows, name)
            check_like(f"mask of {name}", guide, guides[0], "the mask of queries")
        return _Pairs(keys, queries, labels, guides[1], guides[0]), [*further, *guides[2:]]

    def _bias(self, scale: Tensor, learned: Sequence[Tensor]) -> Tensor | None:
        """Return what is added to the scaled similarities, in the dtype of the scale; None for nothing."""
        return None

    @torch.no_grad()
    def _masks(self, own: _Pairs, live: _Pairs, of_negatives: Sequence[Tensor]) -> tuple[_Mask, _Mask]:
        """Return the masks of queries among the live keys and then the negatives, and of keys among live queries.

        ``own`` are the pairs of this rank, ``live`` those of all, and ``of_negatives`` the guides of all negatives.
        """
        labels = live.keys.new_full((len(live.keys),), _ALONE, dtype=torch.int64)
        if live.labels is not None:
            labels = torch.where(live.labels == _NO_LABEL, labels, live.labels)
        if own.query_guides is None or own.key_guides is None or live.key_guides is None:
            mask = _Mask(own.labels, labels, None, None, None)
            return mask, mask
        queries, keys = unit_rows(own.query_guides), unit_rows(own.key_guides)
        # The same similarity is rounded differently in other blocks, so that without a tolerance copies of a key would
        # be left out on some ranks alone.
        limit = (queries * keys).sum(dim=1) - (self.mask_margin + 64 * torch.finfo(keys.dtype).eps)
        candidates = unit_rows(torch.cat([live.key_guides, *of_negatives]))
        others = None if live.query_guides is None else unit_rows(live.query_guides)
        return _Mask(own.labels, labels, queries, candidates, limit), _Mask(own.labels, labels, keys, others, limit)

    @torch.no_grad()
    def _local_loss(
        self,
        rows: Sequence[Tensor],
        all_rows: Sequence[Tensor],
        needs: Sequence[bool],
        masks: tuple[_Mask, _Mask],
        first: int,
        scale: Tensor,
        bias: Tensor | None,
        share: Tensor,
    ) -> LocalLoss:
        """Return this rank's terms of the loss, with the gradients of the logarithm of the scale and of the bias.

        ``rows`` are this rank's keys, queries and negatives, and ``needs`` says which of their gradients are needed.
        ``all_rows`` are those of all ranks, of which this rank's pairs begin at ``first``. ``share`` is what a pair
        weighs, (N,) float64.
        """
        total, learned = rows[0].new_zeros((), dtype=torch.float64), list[list[Tensor]]()
        # What is not finite may show in no score: a guide is more similar than nothing, a negative may be left out.
        for part in (masks[0].guides, masks[0].limit, *rows[2:]):
            total = total if part is None else total + 0.0 * part.sum(dtype=torch.float64)
        grad_own: list[Tensor | None] = [None] * len(rows)
        grad_all: list[Tensor | None] = [None] * len(rows)
        labels = [masks[0].labels, *(masks[0].labels.new_full((len(part),), _ALONE) for part in all_rows[2:])]
        candidates, all_labels = self._with_queue([all_rows[0], *all_rows[2:]], labels)
        weight, masks = share / (1 + self.symmetric), (masks[0]._replace(labels=all_labels), masks[1])
        one_way, back = (partial(self._block_loss, first=first, weight=weight, mask=mask) for mask in masks)

        def both_ways(scores: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            square = slice(len(scores))
            # A copy, of a single pair too; softmax_ works along the contiguous side.
            value_back, slope_back = back(scores[:, square].clone().t(), place)
            value, slope = one_way(scores, place)
            slope[:, square].add_(slope_back.t())
            return value + value_back, slope

        shares_product = self.symmetric and len(rows[0]) == len(all_rows[0]) <= anchors_at_once(candidates)
        directions = [
            (1, candidates, (0, *range(2, len(rows))), both_ways if shares_product else one_way),
            (0, all_rows[1], (1,), back),
        ]
        for anchors, others, places, block_loss in directions[: 1 + (self.symmetric and not shares_product)]:
            wanted = needs[anchors], any(needs[place] for place in places), self.logit_scale is not None
            result = exact(sum_of_blocks)(rows[anchors], others, scale, wanted, block_loss, bias)
            # Every rank sends the same gradients, whether it shares the product or not.
            (grad_all if shares_product else grad_own)[anchors], begin = result.grad_anchors, 0
            for place in places:
                end = begin + len(all_rows[place])
                if needs[place] and result.grad_candidates is not None:
                    grad_all[place] = result.grad_candidates[begin:end]
                begin = end
            total, learned = total + result.total, [*learned, result.grad_learned]
        grad_learned = [sum(gradients[1:], gradients[0]) for gradients in zip(*learned)]
        return LocalLoss(rows, total, grad_learned, grad_own, grad_all)

    def _block_loss(
        self, scores: Tensor, place: slice, first: int, weight: Tensor, mask: _Mask
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the losses of a block (b, K), and its gradient in place of the scores.

        Anchor i of the block has the positive ``first + place.start + i``.
        """
        diagonal = scores.diagonal(first + place.start)
        positives = diagonal.clone()  # [b]
        mask.fill(scores, place)
        diagonal.fill_(lowest(scores))
        losses, of_positives = self._terms(scores, positives, weight[place].to(scores))
        diagonal.copy_(of_positives)
        return losses @ weight[place], scores

    def _terms(self, others: Tensor, positives: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each anchor (b,), float64, and the weighted gradient of its positive (b,).

        ``others`` (b, K) are the scores of all other candidates, the lowest number where one takes no part. Their
        weighted gradient takes their place.
        """
        raise NotImplementedError

    def _of_earlier_version(self, state: Mapping[str, Any]) -> dict[str, Any]:
        # -1 is a temperature that was learned where the state was saved.
        return {name: value for name, value in super()._of_earlier_version(state).items() if value > 0}


def _flattened(rows: Tensor) -> Tensor:
    """Return (N, K, D) as (N K, D), and everything else as it is."""
    return rows.flatten(0, 1) if isinstance(rows, Tensor) and not rows.is_nested and rows.ndim == 3 else rows
