"""The base of the losses of pairs: each query against the keys of all ranks, further negatives, and the queue."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import Unpack

from ...distributed.exchange import Exchange, describe_rows
from ...distributed.gather import check_not_gathered
from ...distributed.header import Agreement, Offer, agree_on
from ...distributed.torch_private import not_compiled
from ...errors import Words, check_amount, check_choice, check_positive, check_tensor, expected
from ...kernels import native
from ..arguments import completed
from ..base import DistributedLoss, GroupOptions
from ..rows import check_device, check_values, checked_embeddings, has_values, weight_of_rows, weight_unit
from .base import (
    Columns,
    ContrastiveLoss,
    Learned,
    Side,
    anchors_at_once,
    check_like,
    compare,
    gather,
    joined,
    lowest,
    needs_gradient,
    sum_of_blocks,
)
from .retrieval import checked_labels

_NO_LABEL = -100
_ALONE = torch.iinfo(torch.int64).min  # the label of a candidate without one, which no anchor has


class PairOptions(GroupOptions, total=False):
    """The arguments of :class:`PairLoss` that its subclasses pass on unchanged."""

    max_logit_scale: float
    normalize: bool
    queue_size: int
    num_features: int | None
    gather_distributed: bool | None


class Given(NamedTuple):
    """The arguments of a call, as :meth:`PairLoss.forward` describes them."""

    queries: Tensor
    keys: Tensor
    negatives: Tensor | None
    labels: Tensor | None
    negative_labels: Tensor | None
    mask: Sequence[Tensor] | None
    offsets: Sequence[Tensor] | None
    sample_weight: Tensor | None
    columns: Mapping[str, Sequence[Tensor]] | None = None  # of a RowLoss


class Direction(NamedTuple):
    """One way to find pairs: the rows of a side among the rows of others, which begin with those of its pairs."""

    anchors: Side
    parts: Sequence[tuple[Side, slice]]  # the sides of the candidates, and which of the columns of a row are theirs
    candidates: Columns  # those of ``parts``, and then of the queue
    limit: Tensor | None  # [n] a candidate that the guide finds as similar as this is left out
    weight: Tensor  # [n] float64, of the anchors
    needs_grad: bool
    hardness: Tensor | None = None  # () times the scores of hard candidates, is added to them
    pairs: Tensor | None = None  # [K] the pair that a candidate belongs to, -1 for none
    num_docs: int | None = None  # candidates of ``query_to_doc``; of the further ones those of the pair are left out
    again: int | None = None  # where the queries begin as candidates of the keys, of which those of the pair stay


@completed()
class PairLoss(ContrastiveLoss):
    """Base of the losses of pairs: what they are called with, the temperature, and the sum over the blocks.

    Args:
        temperature: > 0, what the similarities are divided by. May be assigned between steps.
        learn: let ``logit_scale``, the logarithm of 1 / temperature, be a parameter.
        max_logit_scale: the largest factor on the similarities with a learned temperature, whose smallest value is then
            1 / ``max_logit_scale``. A ``logit_scale`` above its logarithm is clamped to it, and has a gradient only if
            that lowers it.
        margin: >= 0. The ``mask`` of a call also leaves out candidates that are less similar than the key by up to this
            much.
        margin_strategy: ``"absolute"``, or ``"relative"``: the margin is a share of the similarity of the key.
    """

    _checks = ContrastiveLoss._checks | {
        "max_logit_scale": check_positive,
        "margin": lambda name, value: value is None or check_amount(name, value),
        "margin_strategy": partial(check_choice, choices=("absolute", "relative")),
    }
    logit_scale: nn.Parameter | None
    logit_bias: nn.Parameter | None
    bias: float | None = None  # what is added to the scaled similarities, if it is no parameter
    symmetric = False
    directions: tuple[str, ...] = ("query_to_doc",)
    hardness_mode: str | None = None
    hardness_strength = 0.0
    # What repr shows: of all losses of pairs, and of those that read the guide themselves.
    _of_all = "learn_temperature", "max_logit_scale", "normalize", "queue_size", "gradient_reduction"
    _of_guided = "margin", "margin_strategy", *_of_all
    _copies = 1  # of the scores of a block that are in memory together
    _in_c = ""  # what the library calls the same as ``_terms``
    _pairs_views = True  # so keys that are the queries are a mistake

    def __init__(
        self,
        temperature: float,
        learn: bool,
        margin: float | None,
        margin_strategy: str = "absolute",
        max_logit_scale: float = 100.0,
        normalize: bool = True,
        queue_size: int = 0,
        num_features: int | None = None,
        gather_distributed: bool | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        super().__init__(normalize, queue_size, num_features, gather_distributed, **options)
        self.max_logit_scale, self.margin, self.margin_strategy = max_logit_scale, margin, margin_strategy
        # Of shape (1,), because FSDP2 refuses parameters without a dimension.
        self.register_parameter("logit_scale", nn.Parameter(torch.zeros(1)) if learn else None)
        self.register_parameter("logit_bias", None)
        self._start_temperature(temperature)

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
            self._temperature = value
        else:
            if value < (1 - 1e-9) / self.max_logit_scale:
                what = f"at least 1 / max_logit_scale = {1 / self.max_logit_scale:g}"
                fix = "Pass a larger max_logit_scale, or do not learn the temperature."
                raise ValueError(expected("temperature", what, value, fix))
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
        negative_labels: Tensor | None = None,
        mask: Sequence[Tensor] | None = None,
        offsets: Sequence[Tensor] | None = None,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the pairs of all ranks, a scalar.

        Each argument after ``keys`` is passed on every rank or on none.

        Args:
            queries: (N, D) of this rank; N may differ between ranks and may be 0.
            keys: (N, D), of which row i is the positive of row i of the queries.
            negatives: (M, D) or (N, K, D), hard negatives: further candidates of the queries of all ranks, with a
                gradient. M may differ between ranks and may be 0. They do not enter the queue.
            labels: (N,) or (N, 1) integers or bools. Pairs with the same label, on any rank or in the queue, are no
                negatives of each other: they are left out. -100 is no label.
            negative_labels: (M,) or (N, K), next to ``labels``: a negative is left out for the queries of its label.
            mask: embeddings of a guide, another model that tells false negatives: of the queries (N, G), of the keys
                (N, G) and, with ``negatives``, of those, in their shape. A candidate is left out for a query if the
                guide finds it at least as similar (cosine) as the key of the query. Keys of the queue have no guide and
                stay. A guide that is not finite makes the loss NaN on every rank.
            offsets: constants to add to the scaled similarities of candidates: of the keys (N,) and, with
                ``negatives``, of those, (M,) or (N, K). o weighs a candidate by exp(o), and -inf leaves it out. Minus
                the logarithm of how often it is drawn gives a sampled softmax. The queue holds the offsets of its keys.
                Candidates of other directions than ``query_to_doc`` have none.
            sample_weight: (N,) >= 0, of the pairs in the mean. All keys stay candidates.
        """
        return self._loss(Given(queries, keys, negatives, labels, negative_labels, mask, offsets, sample_weight))

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward

    def _loss(self, given: Given) -> Tensor:
        call, group, queries = type(self).__name__, self._resolve_group(), given.queries
        learned: list[Learned] = []
        for name, limit in (("logit_scale", math.log(self.max_logit_scale)), ("logit_bias", math.inf)):
            if (parameter := getattr(self, name)) is not None:
                needs_grad = torch.is_grad_enabled() and parameter.requires_grad
                is_sharded, number = hasattr(parameter, "full_tensor"), parameter.detach()
                learned.append(Learned(name, parameter, is_sharded, limit, needs_grad, number))

        def bring() -> Offer[tuple[list[Side], Tensor | None]]:
            sides = self._checked_sides(given, group)
            weight, check = weight_of_rows(given.sample_weight, queries, "queries", self.validate_args)
            totals: list[Tensor | float] = [float(len(sides[-1].own["rows"])), 0.0, 0.0]
            if weight is not None and not weight.is_meta:
                unit = weight_unit(weight)  # so that no sum of weights overflows
                totals[1:] = (weight / unit).sum(), unit
            if group is None:
                return Offer((sides, weight), {}, len(queries), totals, check=check)
            facts: dict[str, object] = {"columns": [*(given.columns or ())]}
            if weight is not None:
                facts["sample_weight"] = True
            for item in learned:
                facts[f"{item.name} is sharded"] = item.is_sharded
                totals.append(0.0 if item.is_sharded else item.number)
            if not self.symmetric and {"query_to_query", "doc_to_query"}.isdisjoint(self.directions):
                sides[0].live = {}  # the queries are no candidates
                facts["queries"] = describe_rows(queries)
            return self._offered((sides, weight), sides, facts, totals, check)

        agreed = agree_on(call, group, bring)
        exchange = None if group is None else Exchange(call, group)
        for place, item in enumerate(learned, start=3):
            learned[place - 3] = item.agreed([totals[place] for totals in agreed.totals], call, exchange)
        sides, _ = agreed.value
        of_queries, of_keys, *further = sides
        if exchange is not None:
            gather(sides, agreed, exchange)
        loss, _ = self._sum_over_ranks(partial(self._local_sums, agreed, learned), sides, exchange, learned)
        if not has_values(loss):
            return loss
        if self._pairs_views and given.queries is given.keys:
            fix = "Pass another view as keys, or rows and labels to SupConLoss."
            self._hints.warn_once("keys", f"the queries are the keys: each row is its own positive. {fix}")
        if self._enqueues:
            columns = of_keys.candidates
            offsets, labels = columns.get("offsets"), columns.get("labels")
            if labels is None:
                labels = columns["rows"].new_full((len(columns["rows"]),), _ALONE, dtype=torch.int64)
            weights = None if offsets is None else offsets.double().exp()  # float64, so that few underflow
            self.queue.enqueue(columns["rows"], labels, sample_weight=weights)
        if self._hints.should_observe(self, loss) and group is not None:
            self._hints.observe_ranks(agreed.rows, [of_keys.live["rows"], of_queries.live.get("rows")])
            self._hints.observe_labels(agreed.rows, of_keys.live.get("labels"))
            if given.mask is not None:
                self._hints.observe_ranks(agreed.rows, [of_keys.live["guide"]], "mask")
            for side in further:
                self._hints.observe_ranks(side.counts, [side.live["rows"]], "negatives")
        return loss

    def _checked_sides(self, given: Given, group: ProcessGroup | None) -> list[Side]:
        """Return the queries, the keys, and the negatives if there are any, of this rank."""
        queries, keys, negatives, labels, negative_labels, mask, offsets, *_ = given
        check_not_gathered(group, **dict(zip(given._fields[:5], given)))
        if isinstance(keys, Tensor) and (keys.ndim < 2 or not keys.is_floating_point()):
            fix = "If these are labels, use SupConLoss(embeddings, labels). If they are embeddings, use keys.float()."
            kind = ValueError if keys.is_floating_point() else TypeError
            raise kind(expected("keys", "shape (N, D) of floats, one key for each query", keys, fix))
        if isinstance(negatives, Tensor) and not negatives.is_floating_point():
            fix = "If these are labels, pass labels=. If they are embeddings, use negatives.float()."
            raise TypeError(expected("negatives", "shape (M, D) or (N, K, D) of floats", negatives, fix))
        flat = {} if negatives is None else {"negatives": _flattened(negatives)}
        checked = self._checked(queries=queries, keys=keys, **flat)
        queries, keys = checked["queries"], checked["keys"]
        if queries.shape != keys.shape:
            fix = "Row i of the keys is the positive of row i of the queries."
            raise ValueError(expected("keys", f"shape {tuple(queries.shape)}, as queries", keys, fix))
        if negatives is not None and len(negatives) != len(queries) and self._asks_whose:
            what = f"{len(queries)} rows of shape (N, K, D) or (N, D), those of each query"
            fix = "The hardness_mode or the direction doc_to_doc tell the negatives of a query from those of others."
            raise ValueError(expected("negatives", what, negatives, fix))
        if labels is not None:
            labels = checked_labels(labels, queries, "queries")
        if negative_labels is not None:
            if labels is None or negatives is None:
                raise ValueError(expected("negative_labels", "None without labels and negatives", negative_labels))
            negative_labels = _of_rows("negative_labels", negative_labels, negatives, "negatives")
            negative_labels = checked_labels(negative_labels, checked["negatives"], "negatives", "negative_labels")
        if mask is not None:
            _check_parts("mask", mask, "embeddings of a guide", [*checked])
        columns = {} if offsets is None else {"offsets": offsets}
        columns |= {f"column {name}": values for name, values in (given.columns or {}).items()}
        for column, values in columns.items():
            _check_parts(column, values, "constants", [*checked][1:])
        sides: list[Side] = []
        for place, (name, rows) in enumerate(checked.items()):
            own = {"rows": rows}
            if name != "queries":
                check_like(name, rows, queries, "queries")
                of_rows = labels if name == "keys" else negative_labels
                if of_rows is not None:  # those of the keys are those of the queries
                    own["labels"] = of_rows
                for column, values in columns.items():
                    own[column] = part = _of_rows(f"{column} of {name}", values[place - 1], getattr(given, name), name)
                    if column == "offsets" and (part.ndim > 1 or not part.is_floating_point()):
                        kind = ValueError if part.is_floating_point() else TypeError
                        raise kind(expected(f"offsets of {name}", "a floating-point number for each row", part))
                    like = part.shape[1:] if name == "keys" else sides[1].own[column].shape[1:]
                    if part.shape[1:] != like:
                        what = f"rows of shape {tuple(like)}, as those of keys"
                        raise ValueError(expected(f"{column} of {name}", what, part))
            if mask is not None:
                check_not_gathered(group, mask=mask[place])
                guide = checked_embeddings(f"mask of {name}", _flattened(mask[place])).detach()
                own["guide"] = _of_rows(f"mask of {name}", guide, rows, name)
                check_like(f"mask of {name}", guide, sides[0].own["guide"] if sides else guide, "the mask of queries")
            needs_grad = torch.is_grad_enabled() and rows.requires_grad
            sides.append(Side(name, own, needs_grad, own, is_apart=name == "negatives"))
        if self.logit_scale is not None and not self.logit_scale.is_meta:
            check_values("queries", queries)
        return sides

    def _compared(
        self, queries: Side, docs: Sequence[Side]
    ) -> tuple[Side, list[Columns], list[tuple[Side, slice]], dict[str, Any]]:
        """Return anchors, candidates and their parts in all directions of one softmax, and more of the direction.

        Where keys are compared too, an anchor is the row of a query and behind it that of its key, and a candidate has
        zeros in place of the one that it is not compared with.
        """
        keys, directions = docs[0], () if self.symmetric else self.directions
        numbers = torch.arange(len(keys.candidates["rows"]))
        compared = [(keys, numbers, False)]  # each with the pairs of its rows, and whether keys are compared with them
        for side in docs[1:]:
            of_pairs = numbers.new_full((len(side.candidates["rows"]),), -1)
            if self._asks_whose:
                counts, others = keys.counts or (len(numbers),), side.counts or (len(of_pairs),)
                each = torch.tensor([theirs // max(1, own) for own, theirs in zip(counts, others)])
                of_pairs = numbers.repeat_interleave(each.repeat_interleave(torch.tensor(counts)))
            compared.append((side, of_pairs, False))
        of_docs, options = [*compared], dict[str, Any]()
        if "query_to_query" in directions:
            compared.append((queries, numbers, False))
        if "doc_to_query" in directions:
            options["again"] = sum([len(of_pairs) for _, of_pairs, _ in compared])
            compared.append((queries, numbers, True))
        if "doc_to_doc" in directions:
            compared += [(side, of_pairs, True) for side, of_pairs, _ in of_docs]
        if len(compared) > len(docs):
            options["num_docs"] = sum([len(of_pairs) for _, of_pairs, _ in of_docs])
        if self._asks_whose or len(compared) > len(docs):
            options["pairs"] = torch.cat([of_pairs for _, of_pairs, _ in compared])
        columns = [side.candidates for side, *_ in compared]
        for place in range(len(docs), len(compared)):  # the offsets are those of the documents of a query
            columns[place] = {name: column for name, column in columns[place].items() if name != "offsets"}
        if not compared[-1][2]:
            return queries, columns, [(side, slice(None)) for side, *_ in compared], options
        width, wide = keys.anchors["rows"].shape[1], replace(queries, needs_grad=queries.needs_grad or keys.needs_grad)
        wide.anchors = {**queries.anchors}
        for name in ("rows", "guide") if "guide" in wide.anchors else ("rows",):
            wide.anchors[name] = torch.cat([queries.anchors[name], keys.anchors[name]], dim=1)
            for place, (*_, with_keys) in enumerate(compared):
                column = columns[place][name]
                zeros = (column.shape[1], 0) if with_keys else (0, column.shape[1])
                columns[place] = {**columns[place], name: F.pad(column, zeros)}
        parts = [(side, slice(width, None) if with_keys else slice(width)) for side, _, with_keys in compared]
        return wide, columns, parts, options

    @property
    def _asks_whose(self) -> bool:
        """Whether the negatives of a query differ from those of others."""
        return self.hardness_mode in ("in_batch_negatives", "hard_negatives") or "doc_to_doc" in self.directions

    def _local_sums(
        self, agreed: Agreement[tuple[list[Side], Tensor | None]], learned: Sequence[Learned]
    ) -> tuple[None, Tensor]:
        """Return this rank's loss and gradients of ``learned`` (1 + L,) float64, next to nothing."""
        sides, weight = agreed.value
        compare(sides, self.normalize)
        queries, *docs = sides
        keys, rows = docs[0], docs[0].anchors["rows"]
        if weight is None:
            weight = rows.new_full((len(rows),), 1 / max(1, sum(agreed.rows)), dtype=torch.float64)
        else:  # each rank has the mass of its weights in a unit of its own
            _, masses, units, *_ = zip(*agreed.totals)
            most = max(units)
            weight = weight / most / (sum([mass * (unit / most) for mass, unit in zip(masses, units)]) or 1.0)
        weight = weight / 2 if self.symmetric else weight
        if "labels" in keys.own:
            for side in docs:
                labels = side.candidates.get("labels")
                if labels is None:
                    labels = rows.new_full((len(side.candidates["rows"]),), _ALONE, dtype=torch.int64)
                side.candidates = {**side.candidates, "labels": labels.masked_fill(labels == _NO_LABEL, _ALONE)}
            queries.candidates = {**queries.candidates, "labels": keys.candidates["labels"]}
            queries.anchors = {**queries.anchors, "labels": keys.anchors["labels"]}
        columns, parts, wide, options = list[Columns](), list[tuple[Side, slice]](), queries, dict[str, Any]()
        for side in docs:
            columns.append(side.candidates)
            parts.append((side, slice(None)))
        if self.hardness_mode is not None or (len(self.directions) > 1 and not self.symmetric):
            wide, columns, parts, options = self._compared(queries, docs)
        if self.queue_size:
            columns += self._queued_columns(columns[0])
        if "offsets" in {*itertools.chain(*columns)}:
            for place, part in enumerate(columns):
                offsets = part.get("offsets", rows.new_zeros(len(part["rows"])))
                columns[place] = {**part, "offsets": offsets.to(rows)}
        candidates, limit = joined(columns), None
        if self.margin is not None and "guide" in candidates:
            # The same similarity is rounded differently in other blocks, so that without a tolerance copies of a key
            # would be left out on some ranks alone.
            tolerance = 64 * torch.finfo(candidates["guide"].dtype).eps
            limit = (queries.anchors["guide"] * keys.anchors["guide"]).sum(dim=1)
            unit = limit.abs() if self.margin_strategy == "relative" else 1.0
            limit = limit - (self.margin * unit + tolerance)
        if learned:
            scale = learned[0].number.to(rows).clamp_max(learned[0].limit).exp()
        else:
            scale = rows.new_full((), 1.0).div_(self._temperature)
        if self.hardness_mode is not None:
            options["hardness"] = self.hardness_strength / scale
        if "pairs" in options:
            numbers = options["pairs"].to(scale.device)
            options["pairs"] = F.pad(numbers, (0, len(candidates["rows"]) - len(numbers)), value=-1)  # of the queue
        bias: Tensor | None = None
        if learned[1:]:
            bias = learned[1].number.to(rows)
        elif self.bias is not None:
            bias = scale.new_full((), self.bias)
        needs_grad = any(map(needs_gradient, (*sides, *learned)))
        there = Direction(wide, parts, candidates, limit, weight, needs_grad, **options)
        back = Direction(keys, [(queries, slice(None))], queries.candidates, limit, weight, needs_grad)

        def both_ways(scores: Tensor, place: slice) -> tuple[Tensor, Tensor]:
            square = slice(len(scores))
            if is_alike and scores.is_cpu:
                positives = self._masked(scores, place, there)
                total = native.terms_of_pairs(self._in_c, scores, positives, weight[place], 0, both_ways=True)
                if total is not None:
                    return total, scores
                scores.diagonal().copy_(positives)  # torch computes them, from the scores as they were
            # A copy, of a single pair too; softmax_ works along the contiguous side.
            value_back, slope_back = self._block_loss(scores[:, square].clone().t(), place, back)
            value, slope = self._block_loss(scores, place, there)
            slope[:, square].add_(slope_back.t())
            return value + value_back, slope

        is_alone = len(rows) == len(keys.candidates["rows"])
        copies = self._copies + (there.hardness is not None)
        shares_product = self.symmetric and is_alone and len(rows) <= anchors_at_once(candidates["rows"], copies=copies)
        # The library has both directions in one call, where two rows have the same score in both.
        is_alike = shares_product and limit is None and there.hardness is None and "offsets" not in candidates
        sums: list[Tensor] = []
        for direction in (there, back) if self.symmetric and not shares_product else (there,):
            block_loss = both_ways if shares_product else partial(self._block_loss, direction=direction)
            of_candidates = any(map(needs_gradient, [side for side, _ in direction.parts]))
            wanted = direction.anchors.needs_grad, of_candidates, bool(learned)
            anchors, others = direction.anchors.anchors["rows"], direction.candidates["rows"]
            numbers, of_anchors, of_others = sum_of_blocks(anchors, others, scale, wanted, block_loss, bias, copies)
            direction.anchors.grad_anchors, begin = of_anchors, 0
            for side, half in direction.parts:
                end = begin + len(side.candidates["rows"])
                if side.needs_grad and of_others is not None:
                    gradient = of_others[begin:end, half]
                    side.grad_candidates = gradient if side.grad_candidates is None else side.grad_candidates + gradient
                begin = end
            sums.append(numbers)
        if wide is not queries and wide.grad_anchors is not None:
            for side, gradient in zip((queries, keys), wide.grad_anchors.chunk(2, dim=1)):
                side.grad_anchors = gradient if side.needs_grad else None
        if shares_product:  # every rank sends the same gradients, whether it shares the product or not
            queries.grad_anchors, queries.grad_candidates = None, queries.grad_anchors
        # What is not finite may show in no score: a guide is more similar than nothing, a negative may be left out.
        shown = [candidates["rows"] if docs[1:] or not self.normalize else None]
        shown += [queries.anchors["rows"]] * (not self.normalize)
        for number in (candidates.get("guide"), limit, *shown):
            if number is not None:
                sums[0][0] += (0.0 * number).sum()
        return None, sum(sums[1:], sums[0])

    def _block_loss(self, scores: Tensor, place: slice, direction: Direction) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the losses of a block (b, K), and its gradient in place of the scores."""
        positives, weight = self._masked(scores, place, direction), direction.weight[place]
        first = direction.anchors.first + place.start
        total = native.terms_of_pairs(self._in_c, scores, positives, weight, first)
        if total is None:
            diagonal = scores.diagonal(first)
            diagonal.fill_(lowest(scores))
            losses, of_positives = self._terms(scores, positives, weight.to(scores))
            diagonal.copy_(of_positives)
            total = losses.where(weight > 0, losses.clamp_max(torch.finfo(losses.dtype).max)) @ weight  # no inf times 0
        return total, scores

    def _masked(self, scores: Tensor, place: slice, direction: Direction) -> Tensor:
        """Return the scores of the pairs of a block (b,), and mark the candidates (b, K) that are left out."""
        own, others = direction.anchors.anchors, direction.candidates
        first, is_own, num_docs = direction.anchors.first + place.start, None, direction.num_docs
        if direction.pairs is not None:
            is_own = direction.pairs == torch.arange(first, first + len(scores), device=scores.device)[:, None]
        if direction.hardness is not None:
            penalty = scores[:, :num_docs] * direction.hardness
            if is_own is not None and self.hardness_mode != "all_negatives":
                keeps = is_own if self.hardness_mode == "in_batch_negatives" else ~is_own
                penalty.masked_fill_(keeps[:, :num_docs], 0.0)
            penalty.diagonal(first).zero_()
            scores[:, :num_docs].add_(penalty)
        if "offsets" in others:
            scores.add_(others["offsets"])
        positives = scores.diagonal(first).clone()  # [b]
        if direction.again is not None:
            again = scores.diagonal(direction.again + first)
            of_pairs = again.clone()
        if "labels" in own:
            scores.masked_fill_(own["labels"][place, None] == others["labels"], lowest(scores))
        if direction.limit is not None:
            similar = own["guide"][place] @ others["guide"].t() >= direction.limit[place, None]
            scores[:, : len(others["guide"])].masked_fill_(similar, lowest(scores))
        if num_docs is not None and is_own is not None:
            scores[:, num_docs:].masked_fill_(is_own[:, num_docs:], lowest(scores))
        if direction.again is not None:
            again.copy_(of_pairs)
        return positives

    def _terms(self, others: Tensor, positives: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each anchor (b,), float64, and the weighted gradient of its positive (b,).

        That of the scores of all ``others`` (b, K), the lowest number where one takes no part, takes their place.
        """
        raise NotImplementedError

    def _of_earlier_version(self, state: Mapping[str, Any]) -> dict[str, Any]:
        # -1 is a temperature that was learned where the state was saved.
        return {name: value for name, value in super()._of_earlier_version(state).items() if value > 0}


def _flattened(rows: Tensor) -> Tensor:
    """Return (N, K, D) as (N K, D), and everything else as it is."""
    return rows.flatten(0, 1) if isinstance(rows, Tensor) and not rows.is_nested and rows.ndim == 3 else rows


def _check_parts(name: str, values: Sequence[Tensor], what: str, of: Sequence[str]) -> None:
    """Raise TypeError unless ``values`` are a tuple with one tensor for each name in ``of``."""
    if not isinstance(values, (tuple, list)) or len(values) != len(of):
        got = Words(f"{len(values)} of them" if isinstance(values, (tuple, list)) else f"a {type(values).__name__}")
        fix = f"Pass ({', '.join(f'of_{name}' for name in of)}{',' * (len(of) == 1)})."
        raise TypeError(expected(name, f"a tuple of {what}, of {', '.join(of)}", got, fix))


def _of_rows(name: str, values: Tensor, given: Tensor, rows_name: str) -> Tensor:
    """Return the constants ``values`` of the rows ``given``, of which (N, K, D) are flattened with them, or raise."""
    check_tensor(name, values)
    if given.ndim == 3 and values.shape[:2] == given.shape[:2]:
        values = values.flatten(0, 1)
    count = given.shape[:-1].numel()
    if values.ndim == 0 or len(values) != count:
        raise ValueError(expected(name, f"{count} rows, as {rows_name}", values))
    if values.requires_grad:
        raise ValueError(expected(name, "constants", Words("a tensor with a gradient"), f"Detach the {name}."))
    check_device(name, values, given, rows_name)
    return values
