"""The contrastive losses: their formulas as one matrix, in one process and over ranks; scales and edges."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import split
from loss_cases import of_block, on_devices
from on_ranks import on_ranks
from subjects import Model, gradient, whole, wrap
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only
from workers import error_of

import fullrank
from fullrank import InfoNCELoss, RetrievalSmoothAPLoss, RowLoss, SigLIPLoss, SupConLoss
from fullrank.kernels import native
from fullrank.kernels.costs import TABLE
from fullrank.losses.embeddings import base as embeddings_base

EXACT = {"rtol": 1e-11, "atol": 1e-14}  # float64, sums of some hundred terms of order one in another order


OPTIONS = {"margin": 0.1, "queue_size": 16}
KINDS: dict[str, Callable[..., Any]] = {
    "one way": partial(InfoNCELoss, 0.2, learn_temperature=True, **OPTIONS),
    "symmetric": partial(InfoNCELoss, 0.2, symmetric=True, learn_temperature=True, **OPTIONS),
    "siglip": partial(SigLIPLoss, 0.2, -1.0, **OPTIONS),
    "dot": partial(InfoNCELoss, 0.2, symmetric=True, normalize=False),
    "row": partial(RowLoss, of_block, temperature=0.2, learn_temperature=True, queue_size=16),
    "sup_con": partial(SupConLoss, 0.2, queue_size=14),
    "several": partial(SupConLoss, 0.2),
}
ALL_WAYS = "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"
HARD = {"hardness_strength": 9.0}
DIRECTED: dict[str, Given] = {  # options of InfoNCELoss; "and" says what a call gets besides
    **{mode: {"hardness_mode": mode, **HARD} for mode in ("all_negatives", "in_batch_negatives", "hard_negatives")},
    "joint": {"directions": ALL_WAYS},
    "joint with keys as queries": {"directions": ALL_WAYS[::2]},
    "joint with queries": {"directions": ALL_WAYS[1::-1]},
    "joint with documents": {"directions": ALL_WAYS[::3]},
    "per_direction": {"directions": ALL_WAYS[::2], "partition_mode": "per_direction"},
    "all": {"directions": ALL_WAYS, "hardness_mode": "in_batch_negatives", **HARD},
    "both ways": {"symmetric": True, "hardness_mode": "hard_negatives", **HARD},
    "mask": {"margin": 0.3},
    "relative mask": {"margin": 0.3, "margin_strategy": "relative"},
    "all and mask": {"directions": ALL_WAYS, "margin": 0.3, "margin_strategy": "relative"},
    "all and labels": {"directions": ALL_WAYS, "hardness_mode": "hard_negatives", **HARD},
    "all and offsets": {"directions": ALL_WAYS, "hardness_mode": "all_negatives", **HARD},
}
KINDS |= {
    name: partial(InfoNCELoss, 0.2, learn_temperature=True, queue_size=8 * ("directions" not in options), **options)
    for name, options in DIRECTED.items()
}
ALL = "negatives", "labels", "mask", "weight", "negative_labels", "offsets"
LABELS = torch.tensor([3, 3, 1, 1, 1, 1, 7, -2, -2, 9, -100])  # 7 and 9 are alone, the last is ignored
# Several labels a row, of which some have none; the last row has one of its own.
SEVERAL = torch.rand(10, 5, generator=torch.Generator().manual_seed(0)) < 0.3
SEVERAL = torch.block_diag(SEVERAL.int(), torch.ones(1, 1)).bool()
Given = dict[str, Any]  # arguments of a call
Queue = tuple[Tensor, Tensor, Tensor]  # rows, labels and offsets
NO_ROWS: Queue = torch.zeros(0, 4, dtype=torch.float64), LABELS[:0], torch.zeros(0, dtype=torch.float64)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def unit(rows: Tensor) -> Tensor:
    return F.normalize(rows, dim=1)


def draw(kind: str, names: tuple[str, ...], step: int, rank: int, count: int = 11, further: int = 9) -> Given:
    """Return the arguments of a rank in a step; ``further``: rows of the other set, or of negatives."""
    seeds, given = itertools.count(1000 * step + 100 * rank), Given()
    labels = (SEVERAL if kind == "several" else LABELS).roll(-rank - step, 0)
    views = (2 + (rank + step) % 2,) * ("views" in names)
    if kind in ("sup_con", "several"):
        if "unnamed" in names:
            labels = torch.arange(count) + 100 * rank + 1000 * step
        given = {"embeddings": normal(count, *views, 4, seed=next(seeds)), "labels": labels[:count]}
        if "reference" in names:
            given["reference"] = normal(further, *views, 4, seed=next(seeds))
            given["reference_labels"] = labels.roll(-1, 0)[:further]
    else:
        given = {name: normal(count, 4, seed=next(seeds)) for name in ("queries", "keys")}
        sizes = [count, count, *[further] * ("negatives" in names)]
        if "negatives" in names:
            given["negatives"] = normal(further, 4, seed=next(seeds))
        if "whose" in names:  # the query of each negative
            given["whose"] = torch.arange(count).repeat_interleave(further // max(1, count))
        if "labels" in names and step != 1:
            given["labels"] = labels[:count]
            if "negative_labels" in names:
                given["negative_labels"] = labels.roll(-2)[:further]
        if "offsets" in names and step != 1:
            given["offsets"] = tuple(normal(size, seed=next(seeds)).detach() for size in sizes[1:])
            given["offsets"][-1][0 if step == 4 else 1 : 2] = -math.inf if "negatives" in names else 1.0
        if "mask" in names:
            given["mask"] = tuple(normal(size, 3, seed=next(seeds)).detach() for size in sizes)
    if "weight" in names:
        given["sample_weight"] = torch.arange(count) + 0.5 + rank
    return given


def joined(parts: list[Given], repeat: Any = Tensor.repeat_interleave) -> Given:
    """Return the arguments of one process with the rows of all ranks, of which each view is a row."""
    found: dict[str, list[Any]] = {name: [] for name in parts[0]}
    for index, part in enumerate(parts):
        for name, rows in part.items():
            rows = rows + sum(len(other["keys"]) for other in parts[:index]) if name == "whose" else rows
            of = "reference" if name == "reference_labels" else "embeddings"
            if of in part and rows.ndim < 3 and part[of].ndim == 3:
                rows = rows[repeat(torch.arange(len(rows)), part[of].shape[1])]
            found[name].append(rows.flatten(0, 1) if isinstance(rows, Tensor) and rows.ndim == 3 else rows)
    return {
        name: torch.cat(rows) if isinstance(rows[0], Tensor) else (*map(torch.cat, zip(*rows)),)
        for name, rows in found.items()
    }


def of_pairs(options: Given, given: Given, queue: Queue, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the loss of all pairs by a matrix of each direction. Documents are keys, negatives and queued rows."""
    kept = unit if options.get("normalize", True) else torch.clone
    queries, keys = kept(given["queries"]), kept(given["keys"])
    negatives, places = kept(given.get("negatives", keys[:0])), torch.arange(len(keys))
    labels = given.get("labels", torch.full_like(places, -100))
    of_negatives = given.get("negative_labels", torch.full((len(negatives),), -100))[: len(negatives)]
    whose = [places, given.get("whose", torch.full_like(of_negatives, -1)), torch.full_like(queue[1], -1)]
    sides = {  # rows, their queries, their labels and their guides, which queued rows have not
        "query": (queries, places, labels, given.get("mask", [queries])[0]),
        "doc": (
            torch.cat([keys, negatives, queue[0]]),
            torch.cat(whose),
            torch.cat([labels, of_negatives, queue[1]]),
            torch.cat([*given.get("mask", ())[1:], torch.zeros(0, 3, dtype=torch.float64)]),
        ),
    }
    offsets = [*given.get("offsets", [torch.zeros(len(keys) + len(negatives), dtype=torch.float64)]), queue[2]]
    directions, is_joint = options.get("directions", ALL_WAYS[:1]), options.get("partition_mode", "joint") == "joint"
    if options.get("symmetric"):
        directions, is_joint = ALL_WAYS[::2], False
    pair, parts = scale * (queries * keys).sum(dim=1), []
    own = {ALL_WAYS[0]: pair + torch.cat(offsets)[: len(keys)]}
    for name in directions:
        (anchors, _, _, guides), (rows, owners, names, others) = (sides[side] for side in name.split("_to_"))
        scores, is_own = scale * anchors[: len(keys)] @ rows.T, owners == places[:, None]
        is_key, left_out = torch.eye(*scores.shape, dtype=torch.bool), (labels[:, None] == names) & (names != -100)
        if "mask" in given:
            least = F.cosine_similarity(*given["mask"][:2])
            least = least - options.get("margin", 0.0) * (least.abs() if "margin_strategy" in options else 1.0)
            left_out[:, : len(others)] |= unit(guides[: len(keys)]) @ unit(others).T > least[:, None]
        left_out = left_out & ~is_key | (is_own if name in ALL_WAYS[1::2] else False)
        if name == ALL_WAYS[0]:
            hard = {"all_negatives": ~is_key, "in_batch_negatives": ~is_own, "hard_negatives": is_own & ~is_key}
            penalty = (scores / scale).detach() * hard.get(options.get("hardness_mode", ""), is_key & ~is_key)
            scores = scores + options.get("hardness_strength", 0.0) * penalty + torch.cat(offsets)
        parts.append(scores.masked_fill(left_out, -math.inf))
    values = torch.cat(parts, dim=1).logsumexp(dim=1) - own[ALL_WAYS[0]]
    if bias is not None:
        values = -F.logsigmoid((2.0 * is_key - 1) * (parts[0] + bias)).masked_fill(left_out, 0).sum(dim=1)
    elif not is_joint:
        values = sum(part.logsumexp(dim=1) - own.get(name, pair) for name, part in zip(directions, parts)) / len(parts)
    weight = given.get("sample_weight", torch.ones(len(keys))).double()
    return (values @ weight) / weight.sum()


def of_labels(options: Given, given: Given, queue: Queue, scale: Tensor) -> Tensor:
    """Return eq. 2 of Khosla et al., row by row; of a reference, as of ``ref_emb`` in pytorch-metric-learning."""
    rows, names = given["embeddings"], given["labels"]
    others, of_others = given.get("reference", rows), given.get("reference_labels", names)
    names, of_others, queued = (one if one.ndim == 2 else one[:, None] for one in (names, of_others, queue[1]))
    kept = (of_others != -100).any(dim=1).nonzero()[:, 0]
    candidates, of_candidates = torch.cat([unit(others[kept]), queue[0]]), of_others[kept]
    if len(queued):
        of_candidates = torch.cat([of_candidates, queued])
    is_self = torch.zeros(len(rows), len(candidates), dtype=torch.bool)
    if "reference" not in given:
        is_self[kept, torch.arange(len(kept))] = True
    total, mass = 0.0 * (rows.sum() + others.sum()), 1e-300
    for i, weight in enumerate(given.get("sample_weight", torch.ones(len(rows)))):
        same = of_candidates & names[i] if names.dtype == torch.bool else of_candidates == names[i]
        positives = same.any(dim=1) & ~is_self[i]
        if bool((names[i] != -100).all()) and positives.any():
            scores = scale * candidates @ unit(rows)[i]
            total = total - weight * (scores[positives] - scores[~is_self[i]].logsumexp(dim=0)).mean()
            mass += float(weight)
    return total / mass


def enqueued(loss: Any, given: Given, queue: Queue) -> Queue:
    rows = given.get("keys", given.get("reference", given.get("embeddings")))
    labels = given.get("reference_labels", given.get("labels", torch.full((len(rows),), -100)))
    live = slice(None) if "keys" in given else labels != -100
    offsets = given.get("offsets", [torch.zeros(len(rows), dtype=torch.float64)])[0]
    new = unit(rows.detach()[live]), labels[live], offsets[live]
    return (*(torch.cat(both)[-loss.queue_size :] for both in zip(queue, new)),)


def numbers(kind: str, step: int, rank: int, size: int) -> tuple[int, int]:
    """Return how many pairs and further rows a rank has: in some steps one has none, in the last there is one pair."""
    if kind in DIRECTED:  # as many negatives for each query
        count = 5 if size == 1 else 0 if (step, rank) == (2, 0) else 3 + rank
        return count, count * (1 + (step + rank) % 2)
    count, further = (11, 9) if size == 1 else (4 + rank, 3 + rank)
    if step == 3 or (step, rank) == (2, 1):
        further = 0
    if step == 4:
        return int(rank == size - 1), further
    return 0 if size > 1 and (step, rank) == (1, 0) else count, further


def compare(kind: str, names: tuple[str, ...], steps: range, loss: Any, queue: Queue, device: Any = "cpu") -> Queue:
    """Compare loss and gradients of these steps with those of a matrix over all ranks; return the queue after them.

    The controls leave out an argument, an option, the queue or the rows of the other ranks, and mix the views.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    definition: Any = of_labels if kind in ("sup_con", "several") else of_pairs
    options: Given = KINDS[kind].keywords
    learned = [*loss.parameters()]
    theirs = [one.detach().cpu().clone().requires_grad_() for one in learned]
    numbered = [theirs[0].exp() if theirs else torch.tensor(5.0), *theirs[1:]]
    for step in steps:
        parts = [draw(kind, names, step, each, *numbers(kind, step, each, size)) for each in range(size)]
        given = joined(parts)
        expected = definition(options, given, queue, *numbered)
        hidden = {"whose"} | ({"labels"} if "unnamed" in names else set())
        passed = {name: rows for name, rows in parts[rank].items() if name not in hidden}
        if "whose" in names:
            passed["negatives"] = passed["negatives"].reshape(len(passed["keys"]), 1 + (step + rank) % 2, 4)
        value = loss(**tree_map_only(Tensor, lambda rows: rows.to(device), passed))
        assert_close(value.cpu(), expected, **EXACT)
        leaves = [rows for rows in parts[rank].values() if isinstance(rows, Tensor) and rows.requires_grad]
        found = torch.autograd.grad(value, [*leaves, *learned])
        for index, slope in enumerate(torch.autograd.grad(expected, [*leaves, *theirs], retain_graph=True)):
            assert_close(found[index].cpu(), (size if index < len(leaves) else 1) * slope, **EXACT)
        others = [(given, NO_ROWS)] * bool(len(queue[0]))
        if "unnamed" in names and (len(queue[0]) or (size > 1 and step != 1)):  # without numbers of ranks and steps
            others.append((given | {"labels": given["labels"] % 100}, (queue[0], queue[1] % 100, queue[2])))
        if 0 < len(parts[rank].get("keys", ())) < len(given.get("keys", ())):
            others.append((joined(parts[rank : rank + 1]), queue))
        for name in given.keys() - {"queries", "keys", "embeddings", "reference_labels", "whose"}:
            if (name, kind) == ("labels", "several") and "unnamed" not in names:  # equal labels instead of a shared one
                names_of = [one for one in ("labels", "reference_labels") if one in given]
                sets = torch.cat([given[one] for one in names_of]).unique(dim=0, return_inverse=True)[1]
                others.append((given | dict(zip(names_of, sets.split([len(given[one]) for one in names_of]))), queue))
            elif name != "labels" or kind not in ("sup_con", "several"):
                left = {other: rows for other, rows in given.items() if not other.startswith(name)}
                if name == "negatives":
                    left = {other: rows for other, rows in left.items() if other not in ("negative_labels", "whose")}
                    sizes = {"mask": 2, "offsets": 1}
                    left |= {other: left[other][:size] for other, size in sizes.items() if other in left}
                others.append((left, queue))
        others += [(joined(parts, lambda rows, views: rows.repeat(views)), queue)] * ("views" in names)
        for other, rows in others if step < 3 else ():
            assert abs(definition(options, other, rows, *numbered) - expected) > 1e-4
        for left_out in DIRECTED.get(kind, ()) if step == 0 else ():
            less = {name: value for name, value in options.items() if name != left_out}
            assert abs(definition(less, given, queue, *numbered) - expected) > 1e-3
        queue = enqueued(loss, given, queue) if loss.queue_size else queue
    loss.queue.assert_synchronized()
    return queue


OF_PAIRS = ((), ("negatives",), ("labels",), ("mask",), ("mask", "negatives"), ("weight",), ("offsets",), ALL)
OF_LABELS = ((), ("weight",), ("views",), ("reference",), ("views", "unnamed"), ("reference", "views", "weight"))
UNMASKED = tuple(name for name in ALL if name != "mask")  # to which a mask tells its function something
ARGUMENTS = [(kind, names) for kind in ("one way", "symmetric", "siglip") for names in OF_PAIRS]
ARGUMENTS += [("row", names) for names in (*OF_PAIRS[:3], UNMASKED)]
ARGUMENTS += [("dot", ()), ("dot", ("weight",))]
ARGUMENTS += [(kind, names) for kind in ("sup_con", "several") for names in OF_LABELS]
OF_DIRECTED = {
    kind: ("negatives", "whose", "weight", *(name for name in ("mask", "offsets", "labels") if name in kind))
    for kind in DIRECTED
}
OF_DIRECTED["all and labels"] += ("negative_labels",)
ARGUMENTS += OF_DIRECTED.items()
OVER_RANKS = [(kind, ALL) for kind in ("one way", "symmetric", "siglip")]
ON_DEVICES = [OVER_RANKS[1], ("all and mask", OF_DIRECTED["all and mask"])]
OVER_RANKS += [("row", UNMASKED)]
OVER_RANKS += [(kind, names) for kind in ("sup_con", "several") for names in OF_LABELS[-2:]]
OVER_RANKS += [(kind, names) for kind, names in OF_DIRECTED.items() if " and " in kind or kind[:3] in ("per", "bot")]


@pytest.mark.parametrize(
    ("kind", "names", "device"),
    on_devices(ARGUMENTS, ON_DEVICES),
    ids=str,
    indirect=["device"],
)
def test_one_process_is_the_textbook_formula(
    kind: str, names: tuple[str, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In five steps of a queue that overflows; every other one in blocks of five queries."""
    loss, queue = KINDS[kind]().double().to(device), NO_ROWS
    for step in range(5):
        with monkeypatch.context() as patch:
            if step % 2:
                patch.setattr(embeddings_base, "FEWEST_ANCHORS", 5)
                patch.setitem(TABLE, device.type, TABLE["cpu"]._replace(similarities_at_once=1))
            queue = compare(kind, names, range(step, step + 1), loss, queue, device)


@pytest.mark.parametrize(("kind", "names"), OVER_RANKS, ids=str)
@on_ranks()
def test_ranks_are_the_textbook_formula(rank: int, kind: str, names: tuple[str, ...]) -> None:
    compare(kind, names, range(5), KINDS[kind]().double(), NO_ROWS)


def columns() -> list[Tensor]:
    return [unit(normal(12, 5, seed=seed)).detach() for seed in range(8)]


def test_negatives_of_each_query_are_given_by_query() -> None:
    """Where documents are ranked by documents, or negatives are hard. The control ranks all alike."""
    rows = normal(5, 4), normal(5, 4, seed=1), normal(7, 4, seed=2)
    with pytest.raises(ValueError, match=r"^negatives: expected 5 rows of shape \(N, K, D\) or \(N, D\), those of"):
        InfoNCELoss(directions=ALL_WAYS)(*rows)
    loss = InfoNCELoss(directions=ALL_WAYS[:3], hardness_mode="all_negatives", hardness_strength=3.0)
    assert loss(*rows).isfinite()


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in DIRECTED if " and " not in name and "mask" not in name])
def test_options_are_those_of_the_package_of_sentence_transformers(name: str) -> None:
    """Their loss of pairs, and with two hard negatives a query. The control is theirs without the options."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    rows, settings = columns()[:4], DIRECTED[name]
    theirs = {"directions": ALL_WAYS[::2], "partition_mode": "per_direction"} | settings
    theirs = theirs if theirs.pop("symmetric", False) else settings
    for number, negatives in ((2, None), (4, torch.stack(rows[2:], dim=1))):
        expected, plain = (
            losses.MultipleNegativesRankingLoss(nn.Identity(), 10.0, **options).compute_loss_from_embeddings(
                rows[:number], None
            )
            for options in (theirs, {})
        )
        assert_close(InfoNCELoss(0.1, **settings)(*rows[:2], negatives), expected, **EXACT)
        assert abs(expected - plain) > 1e-3 or (name == "hard_negatives" and negatives is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_copies_of_a_key_are_left_out(dtype: torch.dtype) -> None:
    """A guide finds a copy as similar as the key, however both are rounded: the other 29 pairs do not count."""
    queries, keys = torch.randn(2, 30, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys[:] = keys[0]
    assert InfoNCELoss()(queries, keys, mask=(queries, keys)) == 0
    assert InfoNCELoss()(queries, keys) > 3


def test_sums_of_a_sigmoid_keep_their_digits() -> None:
    """Pairs far from the boundary: the float32 error is that of its scores, and no loss is rounded to 0."""
    image, text, *_ = columns()
    exact = SigLIPLoss(0.02, -10.0, learn=False)(image, text)
    assert_close(SigLIPLoss(0.02, -10.0, learn=False)(image.float(), text.float()).double(), exact, rtol=1e-5, atol=0)
    assert SigLIPLoss(0.5, -60.0, learn=False)(image, text).isfinite()


@pytest.mark.parametrize("name", ["one way", "symmetric", "two views", "eight of a label"])
@pytest.mark.parametrize("temperature", [0.2, 0.07, 0.02])
def test_pairs_that_are_far_apart_keep_their_digits(temperature: float, name: str) -> None:
    """The error of float32 is that of the cosines; the matrix of all pairs, whose value rounds to 0 in the end, is off.

    A cosine of 64 columns is rounded by about sqrt(64) u, so the exponential of a difference of two over the
    temperature, to which a loss far below 1 and its gradient are proportional, by a share of 16 u / temperature.
    """
    count, halves = 128, (normal(128, 64, dtype=torch.float32), normal(128, 64, seed=1, dtype=torch.float32))
    labels = torch.arange(count).repeat(2) // (4 if name == "eight of a label" else 1)

    def ours(first: Tensor, second: Tensor) -> Tensor:
        if name in ("one way", "symmetric"):
            return InfoNCELoss(temperature, symmetric=name == "symmetric")(first, second)
        return SupConLoss(temperature)(torch.cat([first, second]), labels)

    def naive(first: Tensor, second: Tensor) -> Tensor:
        if name in ("one way", "symmetric"):
            scores, places = unit(first) @ unit(second).T / temperature, torch.arange(count)
            values = [F.cross_entropy(one, places) for one in (scores, scores.T)[: 1 + (name == "symmetric")]]
            return sum(values) / len(values)
        rows, others = unit(torch.cat([first, second])), ~torch.eye(2 * count, dtype=torch.bool)
        same = (labels[:, None] == labels) & others
        target = same.to(rows) / same.sum(dim=1, keepdim=True)
        return F.cross_entropy((rows @ rows.T / temperature).masked_fill(~others, -1e9), target)

    def outcome(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        first = halves[0].detach().to(dtype).requires_grad_()
        second = (halves[0] + 0.3 * halves[1]).detach().to(dtype).requires_grad_()
        value = loss(first, second)
        return value.detach().double(), torch.cat(torch.autograd.grad(value, (first, second))).double()

    exact, found, usual = outcome(ours, torch.float64), outcome(ours, torch.float32), outcome(naive, torch.float32)
    if temperature > 0.02:  # the reference, which at 0.02 has a few digits left in float64 too
        assert_close(exact, outcome(naive, torch.float64), rtol=1e-9, atol=1e-12)
    error, of_usual = ([float((a - b).norm() / b.norm()) for a, b in zip(one, exact)] for one in (found, usual))
    bound = 16 * 2**-24 / temperature
    assert max(error) <= bound
    if temperature <= 0.07 and name != "eight of a label":
        assert of_usual[1] > bound  # the control
    assert found[0] >= 0


@pytest.mark.parametrize("num_candidates", [1, 7, 1023, 4096, 70_001])
def test_a_softmax_may_overwrite_its_scores(num_candidates: int, device: torch.device) -> None:
    """Torch does not promise it: rows of a block, of its transpose, and of one that is padded."""
    block = normal(3, num_candidates).detach().float().to(device)
    for scores in (block.clone(), block.t().clone().t(), torch.cat([block, block], dim=1)[:, :num_candidates]):
        logarithm = embeddings_base.softmax_(scores)
        assert_close(scores, block.softmax(dim=1), rtol=1e-5, atol=1e-7)
        assert_close(logarithm, block.logsumexp(dim=1), rtol=1e-5, atol=1e-5)


def test_a_tiny_temperature_gives_no_negative_loss() -> None:
    rows = normal(64, 16, dtype=torch.float16)
    for loss in (InfoNCELoss(1e-6), InfoNCELoss(1e-6, symmetric=True)):
        assert 0 <= loss(rows, rows.clone()) < 1e-6
    assert 0 <= SupConLoss(1e-6)(rows.repeat(2, 1), torch.arange(64).repeat(2)) < 1e-6


@pytest.fixture(params=["in C", "in torch"])
def computes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in torch":
        monkeypatch.setattr(native, "FUNCTIONS", {})


@pytest.mark.usefixtures("computes")
@pytest.mark.parametrize("loss", [InfoNCELoss(0.2), InfoNCELoss(0.2, symmetric=True), SigLIPLoss(0.2, learn=False)])
def test_a_pair_of_weight_0_that_is_left_out_is_padding(loss: nn.Module) -> None:
    rows = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    padding, weight = torch.tensor([0.0, 0, 0, -math.inf]), torch.tensor([1.0, 1, 1, 0])
    offsets = None if getattr(loss, "symmetric", False) else (padding,)
    padded, alone = loss(*rows, offsets=offsets, sample_weight=weight), loss(*rows[:, :3])
    if offsets is not None:
        assert_close(padded, alone)
        wanted = torch.autograd.grad(alone, rows)[0]
        assert_close(torch.autograd.grad(padded, rows)[0], wanted)
        weight = torch.ones(4)
        assert loss(*rows, offsets=offsets, sample_weight=weight).isinf(), "the control"
    spoiled = rows.detach().clone()
    spoiled[0, 3] = math.nan
    assert loss(*spoiled, sample_weight=weight).isnan()


@pytest.mark.usefixtures("computes")
def test_anchors_without_a_candidate_of_their_label_count_as_none() -> None:
    """In a block of their own and in a batch of their own, where nothing else says how many places a row has."""
    rows, others = normal(70, 4), normal(30, 4, seed=1)
    labels, of_others = torch.arange(70) // 64, torch.zeros(30, dtype=torch.int64)
    with mock.patch.object(embeddings_base, "anchors_at_once", return_value=64):
        found = SupConLoss()(rows, labels, reference=others, reference_labels=of_others)
    assert_close(found, SupConLoss()(rows[:64], labels[:64], reference=others, reference_labels=of_others))
    assert SupConLoss()(rows[64:], labels[64:], reference=others, reference_labels=of_others) == 0


@pytest.mark.parametrize("loss", [InfoNCELoss(), SigLIPLoss()])
def test_half_precision_may_meet_the_autocast_of_another(loss: nn.Module) -> None:
    queries, keys = normal(2, 5, 4).half()
    with torch.autocast("cpu", torch.bfloat16):
        found = loss(queries, keys)
    assert torch.equal(found, loss(queries, keys))


@pytest.mark.usefixtures("computes")
@pytest.mark.parametrize("loss", [InfoNCELoss(normalize=False), SigLIPLoss(normalize=False)])
def test_a_row_that_is_not_finite_is_seen_in_products_too(loss: nn.Module) -> None:
    """The product with it is infinitely small or large, which a loss may take for a pair far apart."""
    assert loss(torch.tensor([[math.inf], [1.0]]), torch.tensor([[1.0], [-1.0]])).isnan()
    assert loss(torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [-1.0]])).isfinite()


@pytest.mark.parametrize("size", [1e30, 1e31])
def test_large_scores_and_rows_without_a_pair_give_a_finite_loss(size: float) -> None:
    """Also where a score divided by the temperature is nearly the largest number."""
    rows, labels = normal(6, 3).detach() * size**0.5, torch.tensor([0, 0, 1, 2, 3, 4])
    loss = SupConLoss(normalize=False)
    assert_close(loss(rows.float(), labels), loss(rows, labels).float(), rtol=1e-5, atol=0)


NORMALIZING = [InfoNCELoss(0.1), InfoNCELoss(0.1, symmetric=True), SigLIPLoss(), SupConLoss(0.1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("loss", NORMALIZING, ids=lambda loss: type(loss).__name__)
def test_the_length_of_a_row_of_zeros_counts_as_1(loss: Any, dtype: torch.dtype) -> None:
    """As a ReLU may give it: the gradient is that of rows that were divided by their lengths, or by 1, before."""
    generator, labels = torch.Generator().manual_seed(3), torch.tensor([0, 1, 0, 1, 2, 2])
    rows, keys = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64).to(dtype).unbind()
    rows[2], found, plain = 0, [], copy.deepcopy(loss)
    plain.normalize = False
    for call in (loss, plain):
        leaf = rows.clone().requires_grad_()
        unit = leaf if call is loss else leaf / torch.where(leaf.detach() == 0, 1.0, leaf.norm(dim=1, keepdim=True))
        found += torch.autograd.grad(call(unit, labels if isinstance(loss, SupConLoss) else F.normalize(keys)), leaf)
    assert found[0][2].any()
    # Each entry is a sum of some ten terms of its size, all of them rounded.
    torch.testing.assert_close(*found, rtol=0, atol=40 * torch.finfo(dtype).eps * float(found[1].abs().max()))


def test_the_scale_is_clamped_and_comes_back() -> None:
    """Above the limit its gradient is 0, unless a step along it lowers the scale."""
    queries = torch.eye(6).double()
    for keys, is_held in ((queries.clone(), True), (queries.roll(1, 0), False)):
        loss = InfoNCELoss(0.07, learn_temperature=True, max_logit_scale=30.0).double()
        assert loss.logit_scale is not None
        with torch.no_grad():
            loss.logit_scale.fill_(math.log(50.0))
        assert loss.temperature == pytest.approx(1 / 30)
        value = loss(queries, keys)
        assert_close(value.detach(), F.cross_entropy(30.0 * queries @ keys.T, torch.arange(6)), **EXACT)
        value.backward()
        slope = loss.logit_scale.grad.item()
        assert slope == 0.0 if is_held else slope > 1.0
    loss.temperature = 0.5
    assert loss.logit_scale.item() == pytest.approx(math.log(2.0))
    with pytest.raises(ValueError, match=r"temperature: expected at least 1 / max_logit_scale = 0.0333333, got 0.03"):
        loss.temperature = 0.03
    assert loss.logit_scale.item() == pytest.approx(math.log(2.0))
    loss.temperature = 1 / loss.max_logit_scale
    with torch.no_grad():
        loss.logit_scale.fill_(800.0)
    assert loss.temperature == pytest.approx(1 / 30)
    with pytest.raises(ValueError, match=r"max_logit_scale = 0\.01, got 0\.005"):
        InfoNCELoss(0.005, learn_temperature=True)
    assert InfoNCELoss(0.005).temperature == 0.005


def test_a_row_that_is_not_finite_stays_out_of_the_queue() -> None:
    rows = normal(4, 3).detach()
    rows[2, 1] = math.nan
    for loss in (InfoNCELoss(queue_size=8), SupConLoss(queue_size=8)):
        assert loss(rows, rows.clone() if isinstance(loss, InfoNCELoss) else torch.arange(4)).isnan()
        assert len(loss.queue) == 3


def test_the_width_of_a_queue_is_that_of_the_first_rows() -> None:
    for loss, rows in ((SupConLoss(queue_size=8), normal(6, 4)), (RetrievalSmoothAPLoss(queue_size=8), normal(6, 4))):
        loss(rows, torch.arange(6) % 3)
        with pytest.raises(ValueError, match=r"embeddings: expected shape \(N, 4\), as the queue, got .*\(6, 3\)"):
            loss(rows[:, :3], torch.arange(6) % 3)
    assert SupConLoss(queue_size=8, num_features=4).queue.rows().logits.shape == (0, 4)


def test_the_parameter_of_a_model_may_be_the_scale() -> None:
    loss, scale = InfoNCELoss(learn_temperature=True), torch.nn.Parameter(torch.tensor(1.0))
    loss.logit_scale = scale
    loss(normal(4, 3), normal(4, 3, seed=1)).backward()
    assert scale.grad is not None
    assert scale.grad.shape == ()


# --- over processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one way", "siglip"])
@on_ranks()
def test_what_is_not_finite_makes_the_loss_nan_on_every_rank(rank: int, kind: str) -> None:
    """A guide of a query, a key or a negative of the last rank, in both steps, or a negative that the guide leaves out.

    The gradient of the latter would be NaN with a finite loss.
    """
    loss, given, is_last = KINDS[kind]().double(), draw(kind, ALL, 0, rank), rank == dist.get_world_size() - 1
    *guides, negatives = *given["mask"], given["negatives"].detach()
    left_out_all = [*(torch.eye(2)[i].double().expand(len(guide), 2) for i, guide in zip((0, 1, 0), guides)), negatives]
    cases = [([*guides, negatives], place) for place in range(3)] + [(left_out_all, 3)]
    for (tensors, place), odd in itertools.product(cases, (math.inf if kind == "siglip" else math.nan, 1.0)):
        *mask, negatives = (rows.clone() for rows in tensors)
        (*mask, negatives)[place][-1] = odd if is_last else 1.0
        for _ in range(2):
            found = loss(**{**given, "mask": tuple(mask), "negatives": negatives})
            assert found.isnan() == (odd != 1.0)  # the control: finite ones


@pytest.mark.parametrize(("kind", "wrapper"), [("one way", "ddp"), ("siglip", "fsdp2"), ("row", "ddp")])
@on_ranks()
def test_micro_batches_are_one_batch(rank: int, kind: str, wrapper: str) -> None:
    """Through pooled_backward, three columns, labels and offsets; the learned scale and bias belong to the model."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.weight = nn.Parameter(torch.randn(6, 12, generator=generator, dtype=torch.float64))
            self.contrast = KINDS[kind]().double()

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).reshape(len(x), 3, 4)

    rows, labels = torch.randn(17, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(17) % 7
    counts = split(17, dist.get_world_size(), 0)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    reference, model = Encoder(), Encoder()
    reference.contrast.gather_distributed = False

    def loss_of(contrast: nn.Module, columns: Tensor, labels: Tensor, is_plain: bool = False) -> Tensor:
        more = {"negative_labels": labels[:, None] - 1, "offsets": (labels.double(), -labels[:, None] / 3.0)}
        return contrast(columns[:, 0], columns[:, 1], columns[:, 2:], labels=labels, **({} if is_plain else more))

    wrapped = wrap(model, wrapper)
    value = fullrank.pooled_backward(
        wrapped,
        [rows[own][:1], rows[own][1:]],
        forward=wrapped,
        loss=lambda columns, _: loss_of(model.contrast, columns, labels[own]),
    )
    expected = loss_of(reference.contrast, reference(rows), labels)
    expected.backward()
    assert_close(value, expected.detach(), **EXACT)
    assert_close(gradient(model), gradient(reference), **EXACT)
    assert abs(loss_of(reference.contrast.eval(), reference(rows), labels, True) - expected) > 1e-3


@on_ranks()
def test_a_scale_that_is_held_on_every_process(rank: int) -> None:
    """Only a gradient of all processes together that lowers the scale counts. Control: own keys only."""
    counts = split(11, dist.get_world_size(), 0)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    queries, keys = normal(11, 4), normal(11, 4, seed=1)
    loss = InfoNCELoss(learn_temperature=True, symmetric=True).double()
    loss.max_logit_scale = 5.0
    value = loss(queries[own], keys[own])
    (slope,) = torch.autograd.grad(value, loss.logit_scale)
    limit = torch.tensor(math.log(5.0), dtype=torch.float64, requires_grad=True)
    of_all, part = (
        of_pairs({"symmetric": True}, {"queries": queries[of], "keys": keys[of]}, NO_ROWS, limit.exp())
        for of in (slice(None), own)
    )
    (expected,) = torch.autograd.grad(of_all, limit)
    assert_close(value, of_all, **EXACT)
    assert_close(slope.reshape(()), expected.clamp_min(0), **EXACT)
    assert expected > 0
    assert abs(part - of_all) > 1e-2


@pytest.mark.parametrize(("kind", "name"), [("one way", "logit_scale"), ("siglip", "logit_bias")])
@on_ranks()
def test_different_scales_and_widths_raise_on_every_process(rank: int, kind: str, name: str) -> None:
    """In the first and in the second step; the next step is right, and the queue is as it was."""
    loss, rows = KINDS[kind](), normal(4, 3, seed=rank)
    for _ in range(2):
        held, learned = len(loss.queue), getattr(loss, name)
        kept = learned.detach().clone()
        learned.data += rank
        error, text = error_of(lambda: loss(rows, rows))
        assert error == "RuntimeError"
        assert f"{type(loss).__name__}: {name}: expected the same on every rank, got [{float(kept):.1f}" in text[:120]
        learned.data = kept
        assert error_of(partial(loss, *[normal(4, 3 + rank)] * 2))[0] == "ValueError"
        assert len(loss.queue) == held
        assert loss(rows, rows).isfinite()
        loss.queue.assert_synchronized()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@on_ranks()
def test_a_scale_that_is_sharded_has_the_gradient_of_one_process(rank: int, reduction: str) -> None:
    """Under FSDP2, outside of the forward of the module that holds it."""
    rows, world_size = normal(8, 4), dist.get_world_size()
    holder = Model()
    holder.contrast = InfoNCELoss(learn_temperature=True, gradient_reduction=reduction).double()
    scale = holder.contrast.logit_scale.detach().clone().requires_grad_()
    wrap(holder, "fsdp2")
    own = rows.split([1] * (world_size - 1) + [9 - world_size])[rank]
    holder.contrast(own, own**2).backward()
    of_all = of_pairs({}, {"queries": rows, "keys": rows**2}, NO_ROWS, scale.exp())
    (expected,) = torch.autograd.grad(of_all, scale, retain_graph=True)
    assert_close(whole(holder.contrast.logit_scale.grad), expected, **EXACT)
    # Another loss, or another scale, on another process: all raise, in the first and in the second step.
    plain = InfoNCELoss(learn_temperature=True, gradient_reduction=reduction).double()
    for other in (SupConLoss(), plain):
        for _ in range(2):
            labels = torch.zeros(len(own), dtype=torch.int64)
            mine, second = (holder.contrast, own) if rank == 0 else (other, labels if other is not plain else own)
            text = error_of(partial(mine, own, second))[1]
            assert ("SupConLoss on rank" if other is not plain else "logit_scale is sharded: True on rank") in text
    assert_close(holder.contrast(own, own**2), of_all, **EXACT)
