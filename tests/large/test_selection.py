"""Quantiles by counts of digits equal those of the sorted scores, bit for bit, however the scores are split."""

from __future__ import annotations

import itertools
import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from parts import Meet, together
from torch import Tensor

from fullrank.kernels.quantiles import INTERPOLATIONS, upper_levels
from fullrank.large import selection
from fullrank.large.selection import Selected, select_levels

KINDS = ["normal", "tied", "zeros", "wide", "not finite", "ends"]
FRACTIONS = [0.005, 0.5, 0.1, 0.9, 0.0, 1.0, 1 / 3]


def scores_of(kind: str, num_classes: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(num_classes, 600, generator=generator, dtype=torch.float64)
    if kind == "tied":
        scores = scores.round()
    if kind == "zeros":
        scores = torch.where(scores > 1, 1e-310, torch.where(scores > 0.5, 0.0, -0.0)).to(torch.float64)
    if kind == "wide":
        scores = (scores * 40).exp() * scores.sign()
    if kind == "not finite":
        scores[:, ::5], scores[:, 1::7] = math.inf, -math.inf
    if kind == "ends":  # of each kind of extreme value there are enough to be a quantile, next to the other
        most = torch.finfo(dtype).max
        for place, value in enumerate([math.inf, most, -most, -math.inf]):
            scores[:, place::5] = value
    return scores.to(dtype)


def of_parts(
    scores: Tensor, member: Tensor | None, bounds: list[int], interpolation: str, fractions: list[float] = FRACTIONS
) -> tuple[list[Selected], int]:
    """Return the quantiles that each part finds with the others, and the number of rounds."""

    def of_part(own: slice, add: Meet, _: Meet) -> Selected:
        mask = None if member is None else member[:, own]
        extra = torch.tensor([1.0, float(own.start)], dtype=torch.float64)
        return select_levels(scores[:, own], mask, fractions, interpolation, add, extra)

    return together([partial(of_part, slice(*ends)) for ends in pairwise(bounds)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("kind", "masked"), [*zip(KINDS, itertools.cycle([False, True]))])
def test_equal_to_the_quantiles_of_all(kind: str, dtype: torch.dtype, masked: bool) -> None:
    for num_classes in (1, 3):
        scores = scores_of(kind, num_classes, dtype)
        member = torch.rand(scores.shape, generator=torch.Generator().manual_seed(4)) < 0.8 if masked else None
        for interpolation in INTERPOLATIONS if kind == "tied" else ["linear"]:
            expected = upper_levels(scores, member, FRACTIONS, interpolation)
            # A part without rows, one with a single row.
            found, rounds = of_parts(scores, member, [0, 0, 1, 250, 600], interpolation)
            for levels, count, extra in found:
                assert torch.equal(levels.base.nan_to_num(nan=7.0), expected.base.nan_to_num(nan=7.0))
                if expected.offset is None:
                    assert levels.offset is None
                else:
                    assert torch.equal(levels.offset.nan_to_num(nan=7.0), expected.offset.nan_to_num(nan=7.0))
                assert torch.equal(count, (member if masked else torch.ones_like(scores)).sum(dim=1).double())
                assert extra.tolist() == [4.0, 251.0]
            assert rounds == (3 if dtype == torch.float32 else 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("kind", "fraction"), [*zip(KINDS, itertools.cycle([0.005, 0.7, 0.5]))])
def test_one_quantile(kind: str, dtype: torch.dtype, fraction: float) -> None:
    """Two comparisons say which scores share its first digit."""
    for num_classes in (1, 3):
        scores = scores_of(kind, num_classes, dtype)
        expected = upper_levels(scores, None, [fraction], "higher")
        for found in of_parts(scores, None, [0, 250, 600], "higher", [fraction])[0]:
            assert torch.equal(found.levels.base, expected.base)


def test_many_classes_take_more_rounds_of_shorter_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MOST_COUNTS", 512)
    scores = scores_of("normal", 3, torch.float32)
    found, rounds = of_parts(scores, None, [0, 50, 600], "linear")
    assert torch.equal(found[1].levels.value, upper_levels(scores, None, FRACTIONS, "linear").value)
    assert rounds > 3


def test_control_the_quantiles_of_one_part_are_others() -> None:
    scores = scores_of("normal", 1, torch.float32)
    expected = upper_levels(scores, None, FRACTIONS, "higher").base
    alone = select_levels(scores[:, :300], None, FRACTIONS, "higher", lambda counts: counts, torch.zeros(0))
    assert not torch.equal(alone.levels.base, expected)


def test_classes_with_one_member_and_without() -> None:
    scores = torch.ones(3, 5)
    scores[1, 3] = 7.0
    member = torch.tensor([[True] * 5, [False, False, False, True, False], [False] * 5])
    found = select_levels(scores, member, [0.5], "linear", lambda counts: counts, torch.zeros(0))
    assert found.members.tolist() == [5.0, 1.0, 0.0]
    assert found.levels.value[:2, 0].tolist() == [1.0, 7.0]
