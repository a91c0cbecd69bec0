"""The contrastive losses: their formulas written out, the queue, the learned scale, and processes against one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collective_counter import CollectiveCounter
from on_ranks import on_ranks
from subjects import Model, whole, wrap
from torch import Tensor
from torch.testing import assert_close
from workers import error_of

from fullrank import InfoNCELoss, SigLIPLoss, SupConLoss
from fullrank.kernels.costs import TABLE
from fullrank.losses.embeddings import base as embeddings_base

EXACT = {"rtol": 1e-12, "atol": 1e-14}  # float64, sums of some hundred terms of order one in another order


def info_nce(
    queries: Tensor,
    keys: Tensor,
    scale: Tensor | float,
    symmetric: bool,
    queued: Tensor | None,
    weight: Tensor | None = None,
) -> Tensor:
    """The textbook form, of rows of any length: one matrix of all pairs and a cross-entropy over its rows."""
    candidates = keys if queued is None else torch.cat([keys, queued])
    places, share = torch.arange(len(queries)), torch.ones(len(queries)) if weight is None else weight
    loss = F.cross_entropy(scale * queries @ candidates.T, places, reduction="none")
    if symmetric:
        loss = (loss + F.cross_entropy(scale * keys @ queries.T, places, reduction="none")) / 2
    return (loss * share).sum() / share.sum()


def sup_con(
    rows: Tensor,
    labels: Tensor,
    temperature: float,
    queued: Tensor,
    of_queued: Tensor,
    weight: Tensor | None = None,
) -> Tensor:
    """Eq. 2 of Khosla et al., term by term, with a weight of each row in the mean."""
    candidates, names, losses = torch.cat([rows, queued]), torch.cat([labels, of_queued]).tolist(), []
    weight, mass = torch.ones(len(rows)) if weight is None else weight, 0.0
    for i, label in enumerate(labels.tolist()):
        others = [j for j in range(len(candidates)) if j != i]
        positives = [j for j in others if names[j] == label]
        terms = [
            rows[i] @ candidates[p] / temperature - (candidates[others] @ rows[i] / temperature).exp().sum().log()
            for p in positives
        ]
        losses += [-weight[i] * sum(terms) / len(terms)] if terms else []
        mass += float(weight[i]) if terms else 0.0
    return sum(losses) / mass


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def unit(rows: Tensor) -> Tensor:
    return F.normalize(rows, dim=1)


LABELS = torch.tensor([3, 3, 1, 1, 1, 1, 7, -2, -2, 9, -100])  # 7 and 9 are alone, the last is ignored


@pytest.mark.parametrize("symmetric", [False, True], ids=["one way", "symmetric"])
@pytest.mark.parametrize("normalize", [False, True], ids=["dot", "cosine"])
@pytest.mark.parametrize("queue_size", [0, 20])
def test_info_nce_is_the_textbook_formula(
    symmetric: bool, normalize: bool, queue_size: int, device: torch.device
) -> None:
    """In three steps of a queue that overflows, with the gradients of queries, keys and scale; one with weights."""
    kept: Callable[[Tensor], Tensor] = unit if normalize else lambda rows: rows
    options: dict[str, Any] = {"symmetric": symmetric, "normalize": normalize, "queue_size": queue_size}
    loss = InfoNCELoss(0.2, learn_temperature=True, **options).double().to(device)
    queued = None
    for step in range(3):
        queries, keys = normal(9, 5, seed=step), normal(9, 5, seed=9 + step)
        assert loss.logit_scale is not None
        scale = loss.logit_scale.detach().cpu().requires_grad_()
        weight = torch.arange(9.0).double() if step == 1 else None
        theirs = info_nce(kept(queries), kept(keys), scale.exp(), symmetric, queued, weight)
        without = info_nce(kept(queries), kept(keys), scale.exp(), symmetric, queued)
        assert torch.equal(without, theirs) == (step != 1)  # control
        alone = info_nce(kept(queries), kept(keys), scale.exp(), symmetric, None, weight)
        given = [rows.detach().to(device).requires_grad_() for rows in (queries, keys)]
        ours = loss(*given, sample_weight=None if weight is None else weight.to(device))
        assert_close(ours.cpu(), theirs, **EXACT)
        assert (abs(alone - ours.cpu()) > 1e-3) == (queued is not None)  # the control: without the queue
        found = torch.autograd.grad(ours, (*given, loss.logit_scale))
        for mine, other in zip(found, torch.autograd.grad(theirs, (queries, keys, scale))):
            assert_close(mine.cpu(), other, **EXACT)
        fixed = InfoNCELoss(loss.temperature, **options | {"queue_size": 0})
        assert_close(fixed(queries, keys, sample_weight=weight), alone, **EXACT)
        if queue_size:
            held = kept(keys).detach()
            queued = held if queued is None else torch.cat([queued, held])
            queued = queued[-queue_size:]


@pytest.mark.parametrize("queue_size", [0, 14])
def test_sup_con_is_the_formula_of_the_paper(queue_size: int, device: torch.device) -> None:
    loss, queued, of_queued = SupConLoss(0.2, queue_size=queue_size), torch.zeros(0, 4).double(), LABELS[:0]
    for step in range(3):
        rows, order = normal(11, 4, seed=step), torch.randperm(11, generator=torch.Generator().manual_seed(step))
        labels = LABELS[order]
        live = labels != -100
        weight = torch.arange(11.0).double() if step == 1 else torch.ones(11).double()
        theirs = sup_con(unit(rows[live]), labels[live], 0.2, queued, of_queued, weight[live])
        given = rows.detach().to(device).requires_grad_()
        ours = loss(given, labels.to(device), sample_weight=weight.to(device) if step == 1 else None)
        assert_close(ours.cpu(), theirs, **EXACT)
        assert_close(torch.autograd.grad(ours, given)[0].cpu(), torch.autograd.grad(theirs, rows)[0], **EXACT)
        if queue_size:
            queued = torch.cat([queued, unit(rows[live]).detach()])[-queue_size:]
            of_queued = torch.cat([of_queued, labels[live]])[-queue_size:]


def test_two_views_are_the_loss_of_simclr() -> None:
    """Eq. 1 of Chen et al. over 2N rows. The control: the same with other pairs."""
    views = normal(2, 8, 5)
    rows = unit(views.flatten(0, 1))
    logits = (rows @ rows.T / 0.5).masked_fill(torch.eye(16, dtype=torch.bool), -math.inf)
    expected = F.cross_entropy(logits, torch.arange(16).roll(8))
    labels = torch.arange(8).repeat(2)
    assert_close(SupConLoss(0.5)(views.flatten(0, 1), labels), expected, **EXACT)
    assert abs(SupConLoss(0.5)(views.flatten(0, 1), labels.sort().values) - expected) > 1e-3


@pytest.mark.parametrize("queue_size", [0, 14])
@on_ranks()
def test_views_are_rows_with_the_label_of_their_row(rank: int, queue_size: int) -> None:
    """The formula of the paper over all views of all ranks, in three steps; a rank has none in the second.

    The control gives the views of a row different labels.
    """
    world_size, loss, queued = dist.get_world_size(), SupConLoss(0.2, queue_size=queue_size), torch.zeros(0, 4).double()
    of_queued = LABELS[:0]
    for step in range(3):
        counts = [0 if step == 1 and r == 0 else 4 + r for r in range(world_size)]
        views = [normal(count, 2 + (r + step) % 2, 4, seed=10 * step + r) for r, count in enumerate(counts)]
        labels = [LABELS[r + step :][:count] for r, count in enumerate(counts)]
        rows = torch.cat([part.flatten(0, 1) for part in views])
        of_rows = torch.cat([names.repeat_interleave(part.shape[1]) for names, part in zip(labels, views)])
        mixed = torch.cat([names.repeat(part.shape[1]) for names, part in zip(labels, views)])
        theirs, control = (
            sup_con(unit(rows[names != -100]), names[names != -100], 0.2, queued, of_queued)
            for names in (of_rows, mixed)
        )
        ours = loss(views[rank], labels[rank][:, None] if step else labels[rank])
        assert_close(ours, theirs, **EXACT)
        assert abs(control - theirs) > 1e-3
        (expected,) = torch.autograd.grad(theirs, views[rank])
        assert_close(torch.autograd.grad(ours, views[rank])[0], world_size * expected, **EXACT)
        if queue_size:
            live = of_rows != -100
            queued = torch.cat([queued, unit(rows[live]).detach()])[-queue_size:]
            of_queued = torch.cat([of_queued, of_rows[live]])[-queue_size:]


def of_reference(
    rows: Tensor, labels: Tensor, others: Tensor, names: Tensor, temperature: float, weight: Tensor
) -> Tensor:
    """Eq. 2 of Khosla et al. with the rows of another set as candidates, as pytorch-metric-learning's ``ref_emb``.

    The mean over p of the rows with the label of i of -log(exp(x_ip / t) / sum over all j of exp(x_ij / t)), and over i
    the mean with weights of those that have one.
    """
    losses, mass = [0.0 * (rows.sum() + others.sum())], 1e-300
    for i, label in enumerate(labels.tolist()):
        scores = others @ rows[i] / temperature
        terms = [scores[p] - scores.exp().sum().log() for p, name in enumerate(names.tolist()) if name == label]
        if terms:
            losses.append(-weight[i] * sum(terms) / len(terms))
            mass += float(weight[i])
    return sum(losses) / mass


@pytest.mark.parametrize("queue_size", [0, 14])
@on_ranks()
def test_a_reference_is_the_other_set(rank: int, queue_size: int) -> None:
    """Against the formula over all ranks, with weights of classes, in five steps.

    A rank has no anchors in the second and no reference in the third step; no rank has a reference in the fourth. Rows
    of the reference have views and are ignored like the anchors, and enter the queue. The control ranks the anchors.
    """
    world_size, loss = dist.get_world_size(), SupConLoss(0.2, queue_size=queue_size)
    queued, of_queued, class_weight = torch.zeros(0, 4).double(), LABELS[:0], torch.arange(1.0, 13.0).double()
    for step in range(5):
        counts = [0 if step == 1 and r == 0 else 4 + r for r in range(world_size)]
        numbers = [0 if step == 3 or (step == 2 and r == 1) else 3 + r for r in range(world_size)]
        rows = [normal(count, 4, seed=10 * step + r) for r, count in enumerate(counts)]
        views = [normal(number, 2, 4, seed=99 + 10 * step + r) for r, number in enumerate(numbers)]
        labels = [LABELS.roll(-r - step)[:count] for r, count in enumerate(counts)]
        names = [LABELS.roll(-r - step - 1)[:number] for r, number in enumerate(numbers)]
        all_rows, of_rows = unit(torch.cat(rows)), torch.cat(labels)
        others, of_others = unit(torch.cat(views).flatten(0, 1)), torch.cat(names).repeat_interleave(2)
        candidates = torch.cat([others[of_others != -100], queued])
        of_candidates = torch.cat([of_others[of_others != -100], of_queued])
        live, weight = of_rows != -100, class_weight[of_rows.clamp(-2)]
        weight = torch.ones(len(of_rows)).double() if step % 2 else weight
        given = all_rows[live], of_rows[live], candidates, of_candidates, 0.2
        theirs = of_reference(*given, weight[live])
        ours = loss(
            rows[rank],
            labels[rank],
            reference=views[rank],
            reference_labels=names[rank],
            sample_weight=None if step % 2 else class_weight[labels[rank].clamp(-2)],
        )
        assert_close(ours, theirs, **EXACT)
        if step in (0, 4):  # the controls
            assert abs(of_reference(*given, torch.ones(len(of_rows)).double()) - theirs) > 1e-3
        if step != 3:
            control = sup_con(all_rows[live], of_rows[live], 0.2, queued, of_queued, weight[live])
            assert abs(control - theirs) > 1e-3
        for mine in (rows[rank], views[rank]):
            (expected,) = torch.autograd.grad(theirs, mine, retain_graph=True)
            (found,) = torch.autograd.grad(ours, mine, retain_graph=True)
            assert_close(found, world_size * expected, **EXACT)
        if queue_size:
            queued = torch.cat([queued, others[of_others != -100].detach()])[-queue_size:]
            of_queued = torch.cat([of_queued, of_others[of_others != -100]])[-queue_size:]
            loss.queue.assert_synchronized()


@on_ranks()
def test_a_reference_on_one_process_only_is_refused_on_all(rank: int) -> None:
    """In the first and the second step; so are one without labels and one of another dtype. The next call is right."""
    loss, rows, labels = SupConLoss(), normal(6, 4), torch.arange(6) % 3
    both = {"reference": rows, "reference_labels": labels}
    wrong: dict[str, dict[str, Any]] = {
        "Pass it on every rank or on none|embeddings": {},
        "reference, reference_labels: expected both or none of them": {"reference": rows},
        "reference: expected torch.float64": {**both, "reference": rows.float()},
        r"reference: expected rows of 4 numbers": {**both, "reference": rows[:, :3]},
        r"labels: expected shape \(6,\) or \(6, 1\), one entry per row of reference": {
            **both,
            "reference_labels": labels[:3],
        },
    }
    for text, given in wrong.items():
        for _ in range(2):
            with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
                loss(rows, labels, **(given if rank == 0 else both))
    assert_close(loss(rows, labels, **both), loss(rows, labels, **both))


def test_blocks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = normal(30, 4), normal(30, 4, seed=1)
    labels = torch.arange(30) % 7

    def outcome() -> tuple[Tensor, ...]:
        values = InfoNCELoss(symmetric=True)(*inputs), SupConLoss()(inputs[0], labels)
        values = *values, SupConLoss()(inputs[0], labels, reference=inputs[1], reference_labels=labels.flip(0))
        return *values, *torch.autograd.grad(sum(values), inputs)

    whole = outcome()
    monkeypatch.setattr(embeddings_base, "FEWEST_ANCHORS", 7)
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(similarities_at_once=1))
    assert_close(outcome(), whole, **EXACT)


@pytest.mark.parametrize("name", ["one way", "symmetric", "two views", "eight of a label"])
@pytest.mark.parametrize("temperature", [0.2, 0.07, 0.02])
def test_pairs_that_are_far_apart_keep_their_digits(temperature: float, name: str) -> None:
    """The error of float32 is at most twice that of the matrix of all pairs, whose value rounds to 0 in the end."""
    count, halves = 128, (normal(128, 64, dtype=torch.float32), normal(128, 64, seed=1, dtype=torch.float32))
    labels = torch.arange(count).repeat(2) // (4 if name == "eight of a label" else 1)

    def ours(first: Tensor, second: Tensor) -> Tensor:
        if name in ("one way", "symmetric"):
            return InfoNCELoss(temperature, symmetric=name == "symmetric")(first, second)
        return SupConLoss(temperature)(torch.cat([first, second]), labels)

    def naive(first: Tensor, second: Tensor) -> Tensor:
        if name in ("one way", "symmetric"):
            return info_nce(unit(first), unit(second), 1 / temperature, name == "symmetric", None)
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
    for mine, other in zip(error, of_usual):
        assert mine <= 2 * max(other, 1e-7)  # float32 rounds the value itself by up to 6e-8
    assert error[1] < 1e-5  # the promise
    if temperature == 0.07 and name == "one way":
        assert of_usual[1] > 1e-5  # the control
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
        assert 0 <= loss(rows, rows) < 1e-6
    assert 0 <= SupConLoss(1e-6)(rows.repeat(2, 1), torch.arange(64).repeat(2)) < 1e-6


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
    for keys, is_held in ((queries, True), (queries.roll(1, 0), False)):
        loss = InfoNCELoss(0.07, learn_temperature=True, max_logit_scale=30.0).double()
        assert loss.logit_scale is not None
        with torch.no_grad():
            loss.logit_scale.fill_(math.log(50.0))
        assert loss.temperature == pytest.approx(1 / 30)
        value = loss(queries, keys)
        assert_close(value.detach(), info_nce(queries, keys, 30.0, False, None), **EXACT)
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
        assert loss(rows, rows if isinstance(loss, InfoNCELoss) else torch.arange(4)).isnan()
        assert len(loss.queue) == 3


def test_a_queue_is_saved_moved_and_left_alone_in_eval() -> None:
    """Its width is that of the first rows, or of the state that is loaded."""
    loss, rows = SupConLoss(queue_size=8), normal(6, 4)
    labels = torch.arange(6) % 3
    loss(rows, labels)
    again = SupConLoss(queue_size=8)
    again.load_state_dict(loss.state_dict())
    assert torch.equal(again(rows, labels), loss(rows, labels))
    held = len(loss.queue)
    assert torch.equal(loss.eval()(rows, labels), SupConLoss()(rows, labels))
    assert len(loss.queue) == held
    with pytest.raises(ValueError, match=r"embeddings: expected shape \(N, 4\), as the queue, got .*\(6, 3\)"):
        loss(rows[:, :3], labels)
    with pytest.raises(ValueError, match="capacity of the saved queue"):
        SupConLoss(queue_size=9).load_state_dict(loss.state_dict())
    assert SupConLoss(queue_size=8, num_features=4).queue.rows().logits.shape == (0, 4)
    loss.reset_queue()
    assert len(loss.queue) == 0


def test_the_parameter_of_a_model_may_be_the_scale() -> None:
    loss, scale = InfoNCELoss(learn_temperature=True), torch.nn.Parameter(torch.tensor(1.0))
    loss.logit_scale = scale
    loss(normal(4, 3), normal(4, 3, seed=1)).backward()
    assert scale.grad is not None
    assert scale.grad.shape == ()


# --- over processes --------------------------------------------------------------------------------------------------


@on_ranks()
def test_collectives_and_the_same_scale_on_every_process(rank: int) -> None:
    """The gradient of the scale is that of one process before any wrapper has touched it. Control: own keys only."""
    world_size = dist.get_world_size()
    counts = [5 + index for index in range(world_size)]
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    queries, keys = normal(sum(counts), 4), normal(sum(counts), 4, seed=1)
    loss = InfoNCELoss(learn_temperature=True, symmetric=True).double()
    assert loss.logit_scale is not None
    with CollectiveCounter() as forward:
        value = loss(queries[own], keys[own])
    with CollectiveCounter() as backward:
        (slope,) = torch.autograd.grad(value, loss.logit_scale)
    assert forward.total in (3, 4)  # the first rows of a group do not travel behind the header
    assert backward.total == 0
    of_all = info_nce(unit(queries), unit(keys), loss.logit_scale.exp(), True, None)
    assert_close(slope, torch.autograd.grad(of_all, loss.logit_scale)[0], **EXACT)
    part = info_nce(unit(queries[own]), unit(keys[own]), loss.logit_scale.exp(), True, None)
    assert abs(part - of_all) > 0.1
    loss.max_logit_scale = 5.0  # held there: only a gradient of all processes together that lowers the scale counts
    limit = torch.tensor(math.log(5.0), dtype=torch.float64, requires_grad=True)
    value = loss(queries[own], keys[own])
    (slope,) = torch.autograd.grad(value, loss.logit_scale)
    of_all = info_nce(unit(queries), unit(keys), limit.exp(), True, None)
    (expected,) = torch.autograd.grad(of_all, limit)
    assert_close(value, of_all, **EXACT)
    assert_close(slope.reshape(()), expected.clamp_min(0), **EXACT)
    assert expected > 0
    with CollectiveCounter() as without, torch.no_grad():
        loss(queries[own], keys[own])
    assert without.total in (2, 3)  # nothing to reduce and scatter


@on_ranks()
def test_different_scales_and_widths_raise_on_every_process(rank: int) -> None:
    """In the first and in the second step; the next step is right, and the queue is as it was."""
    loss = InfoNCELoss(learn_temperature=True, queue_size=8)
    rows = normal(4, 3, seed=rank)
    for _ in range(2):
        assert loss.logit_scale is not None
        held, kept = len(loss.queue), loss.logit_scale.detach().clone()
        with torch.no_grad():
            loss.logit_scale += rank
        kind, text = error_of(lambda: loss(rows, rows))
        assert kind == "RuntimeError"
        assert "InfoNCELoss: logit_scale: expected the same on every rank, got [2.6" in text
        with torch.no_grad():
            loss.logit_scale.copy_(kept)
        assert error_of(partial(loss, *[normal(4, 3 + rank)] * 2))[0] == "ValueError"
        assert len(loss.queue) == held
        assert loss(rows, rows).isfinite()
        loss.queue.assert_synchronized()
    fixed = SupConLoss()
    fixed.temperature = 0.1 * rank - 0.1
    assert "temperature: expected a finite number > 0" in error_of(lambda: fixed(rows, torch.arange(4)))[1]


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
    (expected,) = torch.autograd.grad(info_nce(unit(rows), unit(rows**2), scale.exp(), False, None), scale)
    assert_close(whole(holder.contrast.logit_scale.grad), expected, **EXACT)
    # Another loss, or another scale, on another process: all raise, in the first and in the second step.
    plain = InfoNCELoss(learn_temperature=True, gradient_reduction=reduction).double()
    for other in (SupConLoss(), plain):
        for _ in range(2):
            labels = torch.zeros(len(own), dtype=torch.int64)
            mine, second = (holder.contrast, own) if rank == 0 else (other, labels if other is not plain else own)
            text = error_of(partial(mine, own, second))[1]
            assert ("SupConLoss on rank" if other is not plain else "logit_scale is sharded: True on rank") in text
    assert_close(holder.contrast(own, own**2), info_nce(unit(rows), unit(rows**2), scale.exp(), False, None), **EXACT)
