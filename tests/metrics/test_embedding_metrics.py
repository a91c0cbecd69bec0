"""The metrics of embeddings against definitions in loops, and one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor
from workers import error_of

from fullrank.kernels.costs import TABLE
from fullrank.metrics import EmbeddingAveragePrecision, EmbeddingPrecision, EmbeddingRecall, EmbeddingReciprocalRank

IGNORED = -7
K = (1, 3, 100)  # the last is more than there are rows
ONE = "precision", "at r", "first", "first at 3"  # the metrics with one value


def rows_of(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of seven labels, of which one occurs once and some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 6, (count,), generator=generator)
    labels[0], labels[1::9] = 17, IGNORED
    return torch.randn(count, 5, generator=generator), labels


def by_loops(rows: Tensor, labels: Tensor, is_query: list[bool], is_key: list[bool]) -> dict[str, list[float]]:
    """Return the means of each metric; some have a value for each k."""
    unit, found = torch.nn.functional.normalize(rows.double(), dim=1), []
    live = [i for i, label in enumerate(labels.tolist()) if label != IGNORED]
    for i in (i for i in live if is_query[i]):
        others = sorted((j for j in live if j != i and is_key[j]), key=lambda j: -float(unit[i] @ unit[j]))
        hits = [bool(labels[j] == labels[i]) for j in others]
        total = sum(hits)
        if total:
            precisions = [sum(hits[: place + 1]) / (place + 1) for place, hit in enumerate(hits) if hit]
            first = [sum(hits[: place + 1]) / (place + 1) for place, hit in enumerate(hits[:total]) if hit]
            values = [float(any(hits[:k])) for k in K] + [sum(hits[:k]) / k for k in K]
            top = 1 / (1 + hits.index(True))
            found.append([*values, sum(precisions) / total, sum(first) / total, top, top if top >= 1 / 3 else 0.0])
    means = [sum(column) / len(found) for column in zip(*found)]
    return {"recall": means[:3], "at k": means[3:6], **{name: [mean] for name, mean in zip(ONE, means[6:])}}


def values_of(metric: Any) -> list[float]:
    """Return the values of a metric; the first has one for each k."""
    value = metric.compute()
    assert not isinstance(value, dict) or tuple(value) == K
    return [float(one) for one in (value.values() if isinstance(value, dict) else [value])]


def metrics(**options: Any) -> dict[str, Any]:
    options = {"ignore_index": IGNORED, **options}
    one = [EmbeddingAveragePrecision(at_r, **options) for at_r in (False, True)]
    one += [EmbeddingReciprocalRank(k=k, **options) for k in (None, 3)]
    at_k = {"recall": EmbeddingRecall(k=K, **options), "at k": EmbeddingPrecision(k=K, **options)}
    return {**at_k, **dict(zip(ONE, one))}


@pytest.mark.parametrize("with_references", [False, True], ids=["alone", "references"])
def test_they_are_their_definitions(with_references: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several updates and blocks, with references alone too. The control: other queries."""
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(similarities_at_once=150))
    rows, labels = rows_of(60)
    queries = [index < 30 or not with_references for index in range(60)]
    keys = [index >= 30 or not with_references for index in range(60)]
    expected = by_loops(rows, labels, queries, keys)
    control = by_loops(rows, labels, [index < 30 or with_references for index in range(60)], [True] * 60)
    for name, metric in metrics().items():
        for own, others in ((slice(0, 30), slice(30, 41)), (slice(0, 0), slice(41, 60))):
            if with_references:
                metric.update(rows[own], labels[own], references=rows[others], reference_labels=labels[others])
            else:
                for part in (own, others):
                    metric.update(rows[part], labels[part])
        assert values_of(metric) == pytest.approx(expected[name], rel=1e-12)
        assert values_of(metric) != pytest.approx(control[name], rel=1e-4)


@on_ranks()
def test_over_ranks_they_are_those_of_one_process(rank: int) -> None:
    """The first rank never has rows; without ``num_features`` that raises on every rank."""
    rows, labels = rows_of(40)
    cuts = [0, 0, 40] if dist.get_world_size() == 2 else [0, 0, 15, 40]
    own, everyone = slice(cuts[rank], cuts[rank + 1]), [True] * 40
    first, whole = by_loops(rows[:25], labels[:25], everyone, everyone), by_loops(rows, labels, everyone, everyone)
    for name, metric in metrics(num_features=5).items():
        for expected, part in ((first, slice(0, 25)), (whole, slice(25, 40))):  # the second after more rows of one rank
            for index in range(part.start, part.stop) if rank else ():
                if cuts[rank] <= index < cuts[rank + 1]:
                    metric.update(rows[index : index + 1], labels[index : index + 1])
            assert values_of(metric) == pytest.approx(expected[name], rel=1e-12)
        assert first[name] != pytest.approx(whole[name], rel=1e-4)
    alone = EmbeddingRecall(K)
    if rank:
        alone.update(rows[own], labels[own])
    kind, text = error_of(alone.compute)
    assert kind == "ValueError"
    assert "float32 (N, 5) on cpu" in text


@on_ranks()
def test_pairs_without_labels_are_numbered_over_updates_and_ranks(rank: int) -> None:
    """By ``update`` and by ``forward``, on uneven ranks. The control numbers those of each update, and is warned of."""
    world_size = dist.get_world_size()
    rows, _ = rows_of(60)
    size = 30 // world_size - 1
    numbers = torch.arange(30)
    of_rank = [numbers[slice(size * r, size * r + size if r < world_size - 1 else 30)] for r in range(world_size)]
    everyone = [index < 30 for index in range(60)]
    expected = by_loops(rows, numbers.repeat(2), everyone, [not one for one in everyone])
    for call in ("update", "forward"):
        for index, (name, metric) in enumerate(metrics().items()):
            control = [*metrics().values()][index]
            for own in of_rank[rank].split(5):
                given = {"references": rows[30 + own]}
                getattr(metric, call)(rows[own], **given)
                labels = torch.arange(len(own))
                control.update(rows[own], labels, **given, reference_labels=labels)
            assert values_of(metric) == pytest.approx(expected[name], rel=1e-12)
            with pytest.warns(UserWarning, match="the labels are 0, 1, 2, ... again and again"):
                assert values_of(control) != pytest.approx(expected[name], rel=1e-4)
    mixed = EmbeddingRecall(1)
    for options in ({}, {"reference_labels": torch.arange(3)}):
        with pytest.raises(ValueError, match="labels: expected a tensor, or None for as many references without"):
            mixed.update(rows[:3], references=rows[: 3 + (not options)], **options)


def test_ties_and_what_is_not_finite() -> None:
    """An embedding that has collapsed finds nothing; no query has no value; NaN shows."""
    labels = torch.arange(12) % 3
    for metric in metrics().values():
        metric.update(torch.randn(3, 4), torch.arange(3))
        with pytest.warns(UserWarning, match="no query has another row of its label"):
            assert all(map(math.isnan, values_of(metric)))
        metric.reset()
        metric.update(torch.full((4, 4), math.nan), torch.zeros(4).long())
        assert all(map(math.isnan, values_of(metric)))
    recall, worst = EmbeddingRecall(1), EmbeddingReciprocalRank()
    for metric in (recall, EmbeddingPrecision(8), EmbeddingAveragePrecision(at_r=True), EmbeddingReciprocalRank(8)):
        metric.update(torch.ones(12, 4), labels)
        assert metric.compute() == 0
    worst.update(torch.ones(12, 4), labels)
    assert worst.compute() == pytest.approx(1 / 9)  # below eight rows of other labels
    with pytest.raises(ValueError, match="k: expected at least one number"):
        EmbeddingRecall(())
    with pytest.raises(ValueError, match="reference_labels: expected a tensor, because the other one is given"):
        recall.update(torch.ones(12, 4), labels, references=torch.ones(12, 4))
    with pytest.raises(ValueError, match=r"references: expected shape \(N, 4\), as num_features or the other rows"):
        recall.update(torch.ones(12, 4), labels, references=torch.ones(12, 5), reference_labels=labels)
    assert recall.compute() == 0
    with pytest.raises(TypeError, match="at_r: expected True or False"):
        EmbeddingAveragePrecision(1)
