"""The losses of pairs with negatives, labels and guides: their formulas as one matrix, and processes against one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import split
from collective_counter import CollectiveCounter
from on_ranks import on_ranks
from subjects import gradient, wrap
from torch import Tensor, nn
from torch.testing import assert_close
from workers import error_of

import fullrank
from fullrank import InfoNCELoss, SigLIPLoss
from fullrank.kernels.costs import TABLE
from fullrank.losses.embeddings import base as embeddings_base

EXACT = {"rtol": 1e-11, "atol": 1e-14}  # float64, sums of some hundred terms of order one in another order
MARGIN = 0.1


class Rows(NamedTuple):
    """What a loss of pairs is called with; the negatives have another number of rows than the rest."""

    queries: Tensor
    keys: Tensor
    negatives: Tensor | None = None
    labels: Tensor | None = None
    mask: tuple[Tensor, ...] | None = None
    weight: Tensor | None = None

    def call(self, loss: nn.Module) -> Tensor:
        """Return the loss."""
        queries, keys, negatives, labels, mask, weight = self
        return loss(queries, keys, negatives, labels=labels, mask=mask, sample_weight=weight)

    def part(self, pairs: slice, negatives: slice) -> Rows:
        """Return some of the pairs and of the negatives, on leaves of their own."""
        of_negatives = None if self.negatives is None else self.negatives[negatives].detach().requires_grad_()
        return Rows(
            *(rows[pairs].detach().requires_grad_() for rows in self[:2]),
            of_negatives,
            None if self.labels is None else self.labels[pairs],
            self.mask and (*(rows[pairs] for rows in self.mask[:2]), *(rows[negatives] for rows in self.mask[2:])),
            None if self.weight is None else self.weight[pairs],
        )

    @property
    def leaves(self) -> list[Tensor]:
        """The embeddings."""
        return [rows for rows in self[:3] if rows is not None]


def draw(step: int, names: Sequence[str] = ("negatives", "labels", "mask", "weight"), pairs: int = 14) -> Rows:
    """Return the rows of all processes in a step."""
    generator = torch.Generator().manual_seed(step)

    def normal(count: int, width: int = 4) -> Tensor:
        return torch.randn(count, width, generator=generator, dtype=torch.float64).requires_grad_()

    further, rows, guides = 9, Rows(normal(pairs), normal(pairs)), [normal(count, 3) for count in (pairs, pairs, 9)]
    labels = torch.randint(0, 6, (pairs,), generator=generator)
    labels[::5] = -100
    given: dict[str, Any] = {
        "negatives": normal(further),
        "labels": labels,
        "weight": torch.arange(pairs).double() + 0.5,
    }
    given["mask"] = tuple(guide.detach() for guide in guides[: 3 if "negatives" in names else 2])
    return rows._replace(**{name: given[name] for name in names})


Queue = tuple[Tensor, Tensor]
NO_ROWS = torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)


def left_out(rows: Rows, of_queue: Tensor, guides: Sequence[Tensor], second: int) -> Tensor:
    """Return, pair by pair, which candidates are left out: live, negatives, queued. ``guides`` are of both sides."""
    count, found = len(rows.keys), []
    for i in range(count):
        labels = [] if rows.labels is None else rows.labels.tolist()
        same = [j != i and labels[i] == labels[j] != -100 for j in range(count)] if labels else [False] * count
        same += [False] * second
        same += [labels[i] == other != -100 for other in of_queue.tolist()] if labels else [False] * len(of_queue)
        if rows.mask is not None:
            least = F.cosine_similarity(rows.mask[0][i], rows.mask[1][i], dim=0) - MARGIN
            for j in range(count + second):
                same[j] |= j != i and bool(F.cosine_similarity(guides[0][i], guides[1][j], dim=0) > least)
        found.append(same)
    return torch.tensor(found).reshape(count, count + second + len(of_queue))


def textbook(loss: nn.Module, rows: Rows, queue: Queue, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return the loss of all pairs by one matrix, and by a second one of keys among queries if it is symmetric."""
    queries, keys = (F.normalize(side, dim=1) for side in rows[:2])
    negatives = F.normalize(queue[0][:0] if rows.negatives is None else rows.negatives, dim=1)
    weight = torch.ones(len(keys), dtype=torch.float64) if rows.weight is None else rows.weight
    first, second, third = (*(rows.mask or ()), *[torch.zeros(0, 3, dtype=torch.float64)] * 3)[:3]
    among_keys = left_out(rows, queue[1], (first, torch.cat([second, third])), len(negatives))
    among_queries = left_out(rows, queue[1][:0], (second, first), 0)
    scores = scale * queries @ torch.cat([keys, negatives, queue[0]]).T
    if bias is not None:
        signs = 2 * torch.eye(*scores.shape, dtype=torch.float64) - 1
        terms = -F.logsigmoid(signs * (scores + bias))
        return (terms.masked_fill(among_keys, 0).sum(dim=1) @ weight) / weight.sum()
    places = torch.arange(len(keys))
    values = F.cross_entropy(scores.masked_fill(among_keys, -math.inf), places, reduction="none")
    if loss.symmetric:
        others = (scale * keys @ queries.T).masked_fill(among_queries, -math.inf)
        values = (values + F.cross_entropy(others, places, reduction="none")) / 2
    return (values @ weight) / weight.sum()


def make(kind: str, **options: Any) -> nn.Module:
    options = {"mask_margin": MARGIN, "queue_size": 16, **options}
    if kind == "siglip":
        return SigLIPLoss(0.2, -1.0, **options).double()
    return InfoNCELoss(0.2, symmetric=kind == "symmetric", learn_temperature=True, **options).double()


def compare(loss: nn.Module, rows: Rows, own: Rows, parts: tuple[slice, slice], queue: Queue, scale: int) -> Queue:
    """Compare the loss of the ``own`` rows, and all gradients, with those of one matrix; return the next queue."""
    learned = [*loss.parameters()]
    theirs = [one.detach().clone().requires_grad_() for one in learned]
    value = own.call(loss)
    expected = textbook(loss, rows, queue, theirs[0].exp(), theirs[1] if len(theirs) > 1 else None)
    assert_close(value, expected, **EXACT)
    found = torch.autograd.grad(value, [*own.leaves, *learned])
    slopes = torch.autograd.grad(expected, [*rows.leaves, *theirs])
    of_rows = [part for part, _ in zip((parts[0], parts[0], parts[1]), own.leaves)]
    for mine, other, part in zip(found, slopes, of_rows):
        assert_close(mine, scale * other[part], **EXACT)
    for mine, other in zip(found[len(of_rows) :], slopes[len(of_rows) :]):
        assert_close(mine, other, **EXACT)
    for name in ("negatives", "labels", "mask", "weight"):  # the controls
        if getattr(rows, name) is not None:
            changed = rows._replace(**{name: None})
            changed = changed._replace(mask=changed.mask and changed.mask[: 2 if name == "negatives" else 3])
            other = textbook(loss, changed, queue, theirs[0].exp(), theirs[1] if len(theirs) > 1 else None)
            assert abs(other - expected) > 1e-4
    labels = torch.full((len(rows.keys),), -100) if rows.labels is None else rows.labels
    kept = F.normalize(rows.keys.detach(), dim=1), labels
    return tuple(torch.cat([old, new])[-loss.queue_size :] for old, new in zip(queue, kept))  # type: ignore[return-value]


KINDS = ["one way", "symmetric", "siglip"]
ARGUMENTS = [
    (),
    ("negatives",),
    ("labels",),
    ("mask",),
    ("mask", "negatives"),
    ("negatives", "labels", "mask", "weight"),
]


@pytest.mark.parametrize("names", ARGUMENTS, ids=" ".join)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_is_the_textbook_formula(kind: str, names: tuple[str, ...], monkeypatch: Any) -> None:
    """In three steps of a queue that overflows, in blocks of five queries."""
    monkeypatch.setattr(embeddings_base, "FEWEST_ANCHORS", 5)
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(similarities_at_once=1))
    loss, queue, whole = make(kind), NO_ROWS, slice(None)
    for step in range(3):
        rows = draw(step, names if step != 1 else [name for name in names if name != "labels"])
        queue = compare(loss, rows, rows.part(whole, whole), (whole, whole), queue, 1)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_processes_are_the_textbook_formula(rank: int, kind: str) -> None:
    """In four steps; a rank has no pairs in the second and the fourth, one no negatives in the first and the third."""
    loss, queue, world_size = make(kind), NO_ROWS, dist.get_world_size()
    for step in range(4):
        rows = draw(step)
        parts = []
        for count, turn in ((14, step), (9, step + 1)):
            counts = split(count, world_size, turn)
            parts.append(slice(sum(counts[:rank]), sum(counts[: rank + 1])))
        queue = compare(loss, rows, rows.part(*parts), (parts[0], parts[1]), queue, world_size)
        loss.queue.assert_synchronized()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_one_pair_in_all_is_the_textbook_formula(rank: int, kind: str) -> None:
    """With negatives and a queue, on another rank in each step."""
    loss, queue, world_size = make(kind), NO_ROWS, dist.get_world_size()
    for step in range(3):
        of_rank, counts = rank == step % world_size, split(9, world_size, step)
        parts = slice(0, int(of_rank)), slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        rows = draw(step, ["negatives"], pairs=1)
        queue = compare(loss, rows, rows.part(*parts), parts, queue, world_size)


@on_ranks()
def test_no_negatives_on_any_rank_and_collectives(rank: int) -> None:
    """Negatives take a gather and a reduce-scatter more than pairs alone, and the backward takes none."""
    loss, rows, totals = make("siglip", queue_size=0), draw(rank), []
    for negatives in (None, rows.negatives[:0], rows.negatives, rows.negatives.reshape(3, 3, 4)):
        rows = rows._replace(negatives=negatives, mask=None)
        for _ in range(2):
            with CollectiveCounter() as forward:
                value = rows.call(loss)
        with CollectiveCounter() as backward:
            value.backward()
        assert backward.total == 0
        totals.append((forward.total, float(value)))
    (alone, first), (_, second), (further, third), (_, fourth) = totals
    assert further == alone + 2
    assert first == second != third == fourth


@pytest.mark.parametrize("kind", ["one way", "siglip"])
@on_ranks()
def test_a_guide_that_is_not_finite_makes_the_loss_nan_on_every_rank(rank: int, kind: str) -> None:
    """That of a query, a key or a negative of one rank, the last, in the first and in the second step."""
    loss, rows, last = make(kind), draw(rank), dist.get_world_size() - 1
    assert rows.mask is not None
    for place, odd in ((0, math.nan), (1, math.inf), (2, math.nan), (2, 1.0)):
        mask = [guide.clone() for guide in rows.mask]
        mask[place][-1] = odd if rank == last else 1.0
        for _ in range(2):
            assert rows._replace(mask=tuple(mask)).call(loss).isnan() == (odd != 1.0)  # the control: finite ones


@pytest.mark.parametrize("kind", ["one way", "siglip"])
@on_ranks()
def test_a_negative_that_is_left_out_makes_the_loss_nan_too(rank: int, kind: str) -> None:
    """One of the last rank that the guide leaves out for all queries: its gradient would be NaN with a finite loss."""
    rows, guide = draw(rank), torch.eye(2).double()
    guides = guide[:1].expand(14, 2), guide[1:].expand(14, 2), guide[:1].expand(9, 2)
    for odd in (math.nan, math.inf, 1.0):
        negatives = rows.negatives.detach().clone()
        negatives[0, 1] = odd if rank == dist.get_world_size() - 1 else 1.0
        found = rows._replace(mask=guides, negatives=negatives).call(make(kind))
        assert found.isnan() == (odd != 1.0)  # the control: finite ones


@pytest.mark.parametrize("kind", ["one way", "siglip"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@on_ranks()
def test_micro_batches_are_one_batch(rank: int, kind: str, wrapper: str) -> None:
    """Through pooled_backward, with three columns and labels; the learned scale and bias belong to the model."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.weight = nn.Parameter(torch.randn(6, 12, generator=generator, dtype=torch.float64))
            self.contrast = make(kind)

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).reshape(len(x), 3, 4)

    rows, labels = torch.randn(17, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(17) % 7
    counts = split(17, dist.get_world_size(), 0)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    reference, model = Encoder(), Encoder()
    reference.contrast.gather_distributed = False

    def loss_of(contrast: nn.Module, columns: Tensor, labels: Tensor) -> Tensor:
        return contrast(columns[:, 0], columns[:, 1], columns[:, 2:], labels=labels)

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


def columns(count: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [F.normalize(torch.randn(count, 5, generator=generator, dtype=torch.float64), dim=1) for _ in range(8)]


def test_siglip_is_that_of_open_clip() -> None:
    """SigLipLoss: the sum of softplus(-z (s x + b)) over the matrix, divided by the rows."""
    image, text, *_ = columns()
    logits = 10.0 * image @ text.T - 10.0
    z = torch.full((12, 12), -1.0).double().fill_diagonal_(1.0)
    expected = F.softplus(-z * logits).sum() / 12
    assert_close(SigLIPLoss(learn=False)(image, text), expected, **EXACT)
    assert abs(SigLIPLoss(bias=-9.0)(image, text) - expected) > 1e-3


def test_hard_negatives_are_those_of_sentence_transformers() -> None:
    """MultipleNegativesRankingLoss: all positives and all negatives of the batch are candidates of each anchor."""
    anchor, positive, *negatives = columns()[:4]
    scores = 20.0 * anchor @ torch.cat([positive, *negatives]).T
    expected = F.cross_entropy(scores, torch.arange(12))
    loss = InfoNCELoss(1 / 20)
    assert_close(loss(anchor, positive, torch.stack(negatives, dim=1)), expected, **EXACT)
    assert_close(loss(anchor, positive, torch.cat(negatives)), expected, **EXACT)
    assert abs(loss(anchor, positive) - expected) > 1e-3


def test_a_mask_is_that_of_gist() -> None:
    """GISTEmbedLoss without the contrasts among anchors and among positives, with an absolute margin."""
    anchor, positive, negative, *guides = columns()[:6]
    scores = torch.cat([anchor @ positive.T, anchor @ negative.T], dim=1) / 0.01
    of_guide = torch.cat([guides[0] @ guides[1].T, guides[0] @ guides[2].T], dim=1)
    is_false = of_guide > of_guide.diagonal()[:, None] - MARGIN
    is_false[torch.arange(12), torch.arange(12)] = False
    expected = F.cross_entropy(scores.masked_fill(is_false, -math.inf), torch.arange(12))
    loss = InfoNCELoss(0.01, mask_margin=MARGIN)
    assert_close(loss(anchor, positive, negative, mask=guides), expected, **EXACT)
    assert abs(loss(anchor, positive, negative) - expected) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_copies_of_a_key_are_left_out(dtype: torch.dtype) -> None:
    """A guide finds a copy as similar as the key, however both are rounded: the other 29 pairs do not count."""
    queries, keys = torch.randn(2, 30, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys[:] = keys[0]
    assert InfoNCELoss()(queries, keys, mask=(queries, keys)) == 0
    assert InfoNCELoss()(queries, keys) > 3


@on_ranks()
def test_what_is_refused_on_every_rank(rank: int) -> None:
    """In the first and in the second step, and the next call is right."""
    rows, loss = draw(0), make("siglip")
    bare = rows._replace(mask=None)
    wrong: dict[str, Any] = {
        "Pass it on every rank or on none": bare._replace(negatives=None),
        "labels": bare._replace(labels=None),
        "negatives: expected rows of 4 numbers|as the queue": bare._replace(negatives=torch.zeros(3, 5).double()),
        "negatives: expected shape .*pass labels=": bare._replace(negatives=torch.arange(9)),
        "negatives: expected torch.float64": bare._replace(negatives=torch.zeros(3, 4)),
        "mask: expected a tuple of embeddings of a guide, of queries, keys, negatives": rows._replace(
            mask=rows.mask[:2]
        ),
        "mask: expected a tuple .* got a Tensor": rows._replace(mask=rows.keys.detach()),
        "mask of negatives: expected 9 rows": rows._replace(mask=(*rows.mask[:2], rows.mask[2][:3])),
        "mask of keys: expected rows of 3": rows._replace(mask=(rows.mask[0], rows.keys.detach(), rows.mask[2])),
        r"labels: expected shape \(14,\) or \(14, 1\), one entry per row of queries": bare._replace(
            labels=rows.labels[:3]
        ),
    }
    for text, other in wrong.items():
        usual = rows if other.mask is not None else bare
        for _ in range(2):
            with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
                (other if rank == 0 else usual).call(loss)
            assert len(loss.queue) == 0
    with torch.no_grad():
        loss.logit_bias += rank
    assert (
        "SigLIPLoss: logit_bias: expected the same on every rank, got [-1.0, 0.0"
        in error_of(lambda: bare.call(loss))[1]
    )
    with torch.no_grad():
        loss.logit_bias -= rank
    assert bare.call(loss).isfinite()


def test_sums_of_a_sigmoid_keep_their_digits() -> None:
    """Pairs far from the boundary: the float32 error is that of its scores, and no loss is rounded to 0."""
    image, text, *_ = columns()
    exact = SigLIPLoss(0.02, -10.0, learn=False)(image, text)
    assert_close(SigLIPLoss(0.02, -10.0, learn=False)(image.float(), text.float()).double(), exact, rtol=1e-5, atol=0)
    assert SigLIPLoss(0.5, -60.0, learn=False)(image, text).isfinite()
