"""Losses of one's own: the examples of their page are textbook loops over the rows of all ranks; what is refused."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from loss_cases import on_devices
from on_ranks import common_error, on_ranks
from pages import blocks
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_map_only

from fullrank import InfoNCELoss, RowLoss
from fullrank.kernels.costs import TABLE
from fullrank.losses import Block
from fullrank.losses.embeddings import base as embeddings_base

EXACT = {"rtol": 1e-11, "atol": 1e-14}  # float64, sums of some hundred terms of order one in another order
EXAMPLES = "additive_margin", "hardest_negative", "soft_targets", "label_smoothing", "decoupled", "several_labels"
TEMPERATURE = 0.1
Given = dict[str, Any]


@functools.cache
def example(name: str) -> Callable[[Block], Tensor]:
    """Return a function that the page defines; its calls are not run, because here there may be ranks."""
    body = ast.parse("".join(blocks("own-loss.md"))).body
    kept = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
    kept += [node for node in body if ast.unparse(node).startswith("TEMPERATURE = ")]
    kept.sort(key=lambda node: node.lineno)
    names: Given = {}
    exec(compile(ast.Module(kept, []), "own-loss.md", "exec"), names)
    function: Callable[[Block], Tensor] = names[name]
    return function


def log_sum(scores: list[Tensor]) -> Tensor:
    return torch.stack(scores).logsumexp(dim=0)


def textbook(name: str, scores: list[Tensor], own: int, guide: list[float], shares: list[bool]) -> Tensor:
    """Return the loss of a query from its scores with all candidates, of which one is its own key."""
    others = [score for place, score in enumerate(scores) if place != own]
    if name == "additive_margin":
        less = scores[own] - 0.3 / TEMPERATURE
        return log_sum([less, *others]) - less
    if name == "hardest_negative":
        return torch.stack([score - scores[own] + 0.2 / TEMPERATURE for score in others]).max().clamp_min(0)
    if name == "soft_targets":
        exps = torch.tensor(guide, dtype=torch.float64).div(0.3).exp()
        targets = (exps / exps.sum()).tolist()
        return sum(share * (log_sum(scores) - score) for share, score in zip(targets, scores))
    if name == "label_smoothing":
        spread = sum(log_sum(scores) - score for score in scores) / len(scores)
        return 0.9 * (log_sum(scores) - scores[own]) + 0.1 * spread
    if name == "decoupled":
        return log_sum(others) - scores[own]
    positives = [score for score, share in zip(scores, shares) if share]
    return sum((log_sum(scores) - score for score in positives), 0 * scores[own]) / max(1, len(positives))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def draw(name: str, step: int, count: int = 7, further: int = 5) -> Given:
    seeds = itertools.count(1000 * step)
    given: Given = {part: normal(count, 4, seed=next(seeds)) for part in ("queries", "keys")}
    given["negatives"] = normal(further, 4, seed=next(seeds))
    given["sample_weight"] = torch.arange(count) + 0.5
    given["offsets"] = tuple(normal(size, seed=next(seeds)).detach() for size in (count, further))
    if name == "soft_targets":
        given["mask"] = tuple(normal(size, 3, seed=next(seeds)).detach() for size in (count, count, further))
    if name == "several_labels":
        labels = tuple(normal(size, 5, seed=next(seeds)).detach() > 0.5 for size in (count, further))
        given["columns"] = {"labels": labels, "unused": tuple(part.long() for part in labels)}
    return given


def by_rows(name: str, given: Given, temperature: Tensor) -> Tensor:
    """Return the weighted mean over the queries, in loops."""
    queries, keys, negatives = (F.normalize(given[key], dim=1) for key in ("queries", "keys", "negatives"))
    weight, candidates = given["sample_weight"].double(), torch.cat([keys, negatives])
    offsets, total = torch.cat(given["offsets"]), torch.zeros((), dtype=torch.float64)
    for i, query in enumerate(queries):
        scores = [query @ row / temperature + added for row, added in zip(candidates, offsets)]
        guide, shares = [0.0] * len(scores), [False] * len(scores)
        if "mask" in given:
            first, *others = given["mask"]
            guide = [float(F.cosine_similarity(first[i], row, dim=0)) for row in torch.cat(others)]
        if "columns" in given:
            labels = torch.cat(given["columns"]["labels"])
            shares = [bool((labels[i] & row).any()) for row in labels]
        total = total + weight[i] * textbook(name, scores, i, guide, shares)
    return total / weight.sum()


@pytest.mark.parametrize(
    ("name", "device"), on_devices([(name,) for name in EXAMPLES], [("several_labels",)]), indirect=["device"]
)
def test_an_example_is_its_textbook_loop(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in blocks of three queries; test_contrast.py has ranks. The control: another example."""
    loss = RowLoss(example(name), temperature=TEMPERATURE, learn_temperature=True).double().to(device)
    for step in range(2):
        given, scale = draw(name, step), loss.logit_scale.detach().cpu().clone().requires_grad_()
        expected = by_rows(name, given, 1 / scale.exp())
        value = loss(**tree_map_only(Tensor, lambda rows: rows.to(device), given))
        assert_close(value.cpu(), expected.reshape(()), **EXACT)
        leaves = [given[key] for key in ("queries", "keys", "negatives")]
        found = torch.autograd.grad(value, [*leaves, loss.logit_scale])
        for ours, theirs in zip(found, torch.autograd.grad(expected, [*leaves, scale], retain_graph=True)):
            assert_close(ours.cpu(), theirs, **EXACT)
        other = EXAMPLES[EXAMPLES.index(name) - 1]
        assert abs(by_rows(other, given, 1 / scale.exp()) - expected) > 1e-3
        monkeypatch.setattr(embeddings_base, "FEWEST_ANCHORS", 3)
        costs = TABLE.get(device.type, TABLE["accelerator"])
        monkeypatch.setitem(TABLE, device.type, costs._replace(similarities_at_once=1))


@on_ranks()
def test_gist_by_default(rank: int) -> None:
    """GISTEmbedLoss as it comes, of triplets, by its matrices. The control: no guide."""
    size = dist.get_world_size()
    counts = {2: [4, 2], 3: [3, 0, 4]}[size]
    rows, guides = ([normal(sum(counts), width, seed=width + place) for place in range(3)] for width in (4, 3))
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))

    def cosines(parts: list[Tensor]) -> Tensor:
        q, k, n = (F.normalize(part, dim=1) for part in parts)
        return torch.cat([q @ k.T, q @ q.T, k @ k.T, q @ n.T], dim=1)

    of_guide, places = cosines(guides), torch.arange(sum(counts))
    least, is_key = of_guide.diagonal()[:, None], torch.eye(*of_guide.shape, dtype=torch.bool)
    limits = {"absolute": least - 0.1 * 2**0.5, "relative": least - 0.1 * least.abs()}
    for strategy, limit in limits.items():
        scores, is_false = cosines(rows) / TEMPERATURE, (of_guide > limit) & ~is_key
        expected = F.cross_entropy(scores.masked_fill(is_false, -torch.inf), places)
        mine, of_mine = [part[own] for part in rows], [part[own].detach() for part in guides]
        found = example("gist_by_default")(*mine, of_mine, margin=0.1, margin_strategy=strategy)
        assert_close(found, expected, **EXACT)
        assert abs(F.cross_entropy(scores, places) - expected) > 1e-3
        for slope, right in zip(*(torch.autograd.grad(value, rows) for value in (found, expected))):
            assert_close(slope[own], size * right[own], **EXACT)


@on_ranks()
def test_a_margin_of_classes(rank: int) -> None:
    """Rows and classes lie on other ranks. The control: no margin."""
    size = dist.get_world_size()
    counts, of_classes = {2: ([4, 3], [1, 4]), 3: ([4, 0, 3], [2, 3, 0])}[size]
    rows, centres, labels = normal(7, 4, seed=0), normal(5, 4, seed=1), torch.tensor([4, 0, 1, 1, 3, 2, 4])
    own, held = (slice(sum(each[:rank]), sum(each[: rank + 1])) for each in (counts, of_classes))
    found = example("of_classes")(rows[own], labels[own], centres[held], torch.arange(5)[held])
    cosines = F.normalize(rows, dim=1) @ F.normalize(centres, dim=1).T
    expected = F.cross_entropy((cosines - 0.3 * F.one_hot(labels, 5).double()) / TEMPERATURE, labels)
    assert_close(found, expected, **EXACT)
    of_rows, of_centres = torch.autograd.grad(found, (rows, centres))
    right, right_centres = torch.autograd.grad(expected, (rows, centres))
    assert_close(of_rows[own], size * right[own], **EXACT)
    assert_close(of_centres[held], right_centres[held], **EXACT)
    assert abs(F.cross_entropy(cosines / TEMPERATURE, labels) - expected) > 1e-3


def cross_entropy(block: Block) -> Tensor:
    return F.cross_entropy(block.scores, block.positives, reduction="none")


def test_what_is_left_out_has_no_gradient() -> None:
    """Of the first two queries all others are left out: the gradient of their logsumexp is NaN, says the control."""
    queries, keys, labels = normal(3, 4, seed=0), normal(3, 4, seed=1), torch.tensor([0, 0, 1])
    offsets = torch.tensor([0.5, 0.0, -torch.inf], dtype=torch.float64)
    slopes: list[Tensor] = []

    def of_others(block: Block) -> Tensor:
        others = block.scores.scatter(1, block.positives[:, None], -torch.inf)
        others.register_hook(slopes.append)
        return torch.where(others.isneginf().all(dim=1), 0.0, others.logsumexp(dim=1))

    found = RowLoss(of_others)(queries, keys, labels=labels, offsets=(offsets,))
    expected = (F.normalize(keys[:2], dim=1) @ F.normalize(queries[2], dim=0) + offsets[:2]).logsumexp(dim=0) / 3
    assert_close(found, expected, **EXACT)
    for ours, theirs in zip(*(torch.autograd.grad(value, (queries, keys)) for value in (found, expected))):
        assert_close(ours, theirs, **EXACT)
    assert slopes[0].isnan().any()


def test_keys_of_the_queue_have_no_guide() -> None:
    """Their cosine is -inf, and so their target 0."""
    function, guides = example("soft_targets"), (normal(5, 3, seed=8).detach(), normal(5, 3, seed=9).detach())
    loss, (queries, keys, old) = (
        RowLoss(function, queue_size=8).double(),
        [normal(5, 4, seed=seed) for seed in range(3)],
    )
    loss(queries, old, mask=guides)
    scores = F.normalize(queries, dim=1) @ F.normalize(torch.cat([keys, old.detach()]), dim=1).T
    targets = (F.cosine_similarity(guides[0][:, None], guides[1], dim=2) / 0.3).softmax(dim=1)
    expected = F.cross_entropy(scores, F.pad(targets, (0, 5)))
    assert_close(loss(queries, keys, mask=guides), expected, **EXACT)
    assert abs(F.cross_entropy(scores[:, :5], targets) - expected) > 1e-3


@pytest.mark.parametrize("learn", [False, True])
def test_the_function_is_not_differentiated_without_need(learn: bool) -> None:
    """In evaluation it runs without a graph, also in inference mode, with the same value."""
    queries, keys, seen = normal(5, 4, seed=0), normal(5, 4, seed=1), []

    def recorded(block: Block) -> Tensor:
        seen.append(block.scores.requires_grad)
        return cross_entropy(block)

    loss = RowLoss(recorded, learn_temperature=learn)
    values = [loss(queries, keys)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            values.append(loss(queries, keys))
    assert seen == [True, False, False]
    assert len({value.item() for value in values}) == 1


def refused() -> Iterator[tuple[str, Callable[[Block], Any]]]:
    """Yield functions that are refused, and a part of the message."""
    margin, rows = nn.Parameter(torch.ones(())), normal(5, 4, seed=7)
    yield r"a loss of block\.scores alone, got one with another gradient", lambda block: cross_entropy(block) * margin
    yield "with another gradient.* detach", lambda block: cross_entropy(block) + (2 * rows).sum()
    yield "got one without a gradient", lambda block: cross_entropy(block).detach()
    yield r"shape \(5,\), got .*\(\)", lambda block: cross_entropy(block).mean()
    yield r"shape \(5,\), got None", lambda block: None


@pytest.mark.parametrize(("text", "function"), [*refused()])
def test_functions_whose_gradient_would_be_lost_are_refused(text: str, function: Callable[[Block], Any]) -> None:
    queries, keys = normal(5, 4, seed=0), normal(5, 4, seed=1)
    with pytest.raises(ValueError, match=f"^function: expected .*{text}"):
        RowLoss(function)(queries, keys)
    for control in (cross_entropy, lambda block: (block.scores * block.scores).sum(dim=1)):  # scores twice in a product
        assert RowLoss(control)(queries, keys).isfinite()


COLUMNS: dict[str, tuple[type[Exception], Any]] = {
    r"columns: expected a mapping .*, got \(": (TypeError, (torch.ones(5),)),
    r"column a: expected a tuple of constants, of keys, got 2 of them": (TypeError, {"a": (torch.ones(5),) * 2}),
    r"column a of keys: expected 5 rows, as keys, got .*\(4,\)": (ValueError, {"a": (torch.ones(4),)}),
    r"column a of keys: expected constants": (ValueError, {"a": (torch.ones(5, requires_grad=True),)}),
    r"column a of keys: expected a tensor, got 3": (TypeError, {"a": (3,)}),
}


@pytest.mark.parametrize("text", COLUMNS)
def test_columns_that_are_refused(text: str) -> None:
    kind, columns = COLUMNS[text]
    with pytest.raises(kind, match=f"^{text}"):
        RowLoss(cross_entropy)(normal(5, 4, seed=0), normal(5, 4, seed=1), columns=columns)
    uneven = {"a": (torch.ones(5, 2), torch.ones(3))}
    with pytest.raises(ValueError, match=r"^column a of negatives: expected rows of shape \(2,\), as those of keys"):
        RowLoss(cross_entropy)(*(normal(count, 4, seed=0) for count in (5, 5, 3)), columns=uneven)
    with pytest.raises(ValueError, match=r"^queue_size: expected 0 with columns, got 8"):
        RowLoss(cross_entropy, queue_size=8)(
            normal(5, 4, seed=0), normal(5, 4, seed=1), columns={"a": (torch.ones(5),)}
        )


@on_ranks()
def test_ranks_that_differ_raise_on_all(rank: int) -> None:
    """In columns, in their dtypes, in the function, or where the function fails; the next step is right."""
    rows, last = (normal(4, 3, seed=0), normal(4, 3, seed=1)), rank == dist.get_world_size() - 1
    ones = torch.ones(4)

    def fails(block: Block) -> Tensor:
        if last:
            raise KeyError("a bug")
        return cross_entropy(block)

    fails.__qualname__ = cross_entropy.__qualname__
    calls: dict[str, Callable[[], Tensor]] = {
        "columns": lambda: RowLoss(cross_entropy)(*rows, columns={"a" if last else "b": (ones,)}),
        "int64": lambda: RowLoss(cross_entropy)(*rows, columns={"a": (ones.long() if last else ones,)}),
        "function": lambda: RowLoss(example("decoupled") if last else cross_entropy)(*rows),
        "KeyError": lambda: RowLoss(fails)(*rows),
    }
    for text, call in calls.items():
        for _ in range(2):
            assert text in common_error(call)[1]
        assert RowLoss(cross_entropy)(*rows).isfinite()


def peak(call: Callable[[], Tensor]) -> int:
    """Return the most bytes that a forward and backward hold at a time, counted as they are taken and freed."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call().backward()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.slow
def test_the_memory_is_about_that_of_info_nce(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 2,048 pairs; the control: a third of that of the matrix of all pairs."""
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(similarities_at_once=2**18))
    queries, keys = (normal(2048, 256, seed=seed).detach().float().requires_grad_() for seed in range(2))
    matrix = peak(lambda: F.cross_entropy(F.normalize(queries) @ F.normalize(keys).T, torch.arange(2048)))
    fast = peak(lambda: InfoNCELoss(1.0)(queries, keys))
    for name in ("hardest_negative", "decoupled", "additive_margin", "label_smoothing"):
        found = peak(lambda name=name: RowLoss(example(name))(queries, keys))
        assert fast < found <= min(1.6 * fast, matrix / 3)
