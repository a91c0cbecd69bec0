"""Smooth-AP in C: equal to the definition and to torch, for any layout of its arguments; what it leaves to torch."""

from __future__ import annotations

import itertools
import math
import runpy
import sys

import pytest
import torch
from torch import Tensor

import fullrank
from fullrank.kernels import native
from fullrank.kernels.costs import TABLE
from fullrank.kernels.sigmoid_sums import sigmoid_sums
from fullrank.kernels.soft_ranks import smooth_ap_and_gradient

needs_extension = pytest.mark.skipif(not native.FUNCTIONS, reason="the extension was not built")


LIMITS = {torch.float32: 1e-6, torch.float64: 1e-13}
ALL = sys.maxsize


def by_definition(
    scores: Tensor, positive: Tensor, member: Tensor | None, weight: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, gradient and validity in float64, from all pairs."""
    leaf = scores.double().requires_grad_()
    weights = torch.ones(()) if weight is None else weight
    member = torch.ones_like(positive) if member is None else member
    losses, valid = [], []
    for c, row in enumerate(leaf):
        shares = weights.double().expand_as(scores)[c] * positive[c]
        is_valid = bool(shares.sum() > 0 and (member[c] & ~positive[c]).any())
        above = torch.sigmoid((row - row[positive[c], None]) / temperature)
        among = above[:, positive[c]].sum(1) + 0.5  # a row adds 1/2 to itself
        terms = shares[positive[c]] / shares.sum() * (1 - among / (above[:, member[c]].sum(1) + 0.5))
        losses.append(terms.sum() if is_valid else row.sum() * 0)
        valid.append(is_valid)
    loss = torch.stack(losses)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient, torch.tensor(valid)


def rows(num_classes: int, num_rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, positives and members, which hold the positives."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_classes, num_rows, generator=generator, dtype=torch.float64).to(dtype)
    positive = torch.rand(num_classes, num_rows, generator=generator) < 0.3
    return scores, positive, positive | (torch.rand(num_classes, num_rows, generator=generator) < 0.7)


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_it_equals_the_definition(dtype: torch.dtype) -> None:
    """Sizes around the length of a block of sums, members, weights of rows and of elements, wide and narrow."""
    for seed, (num_classes, num_rows) in enumerate([(1, 1), (1, 2), (3, 7), (2, 511), (1, 513), (2, 1100)]):
        scores, positive, members = rows(num_classes, num_rows, dtype, seed)
        weights = [None, torch.rand(num_rows, dtype=dtype), torch.rand(num_classes, num_rows, dtype=dtype)]
        weights[1][:2] = 0
        for member in (None, members):
            for weight in weights:
                for temperature in (0.003, 0.1, 30.0):
                    given = scores, positive, member, weight, temperature
                    loss, gradient, valid = native.smooth_ap(*given, True, ALL)
                    expected = by_definition(*given)
                    torch.testing.assert_close(loss, expected[0], rtol=0, atol=LIMITS[dtype])
                    error = (gradient - expected[1]).norm() / expected[1].norm().clamp_min(1e-3)
                    assert error <= LIMITS[dtype]
                    assert torch.equal(valid, expected[2])
                    alone = native.smooth_ap(*given, False, ALL)
                    assert torch.equal(alone[0], loss)
                    assert alone[1].numel() == 0


@needs_extension
def test_control_another_temperature_is_seen() -> None:
    scores, positive, _ = rows(1, 200, torch.float64)
    loss, gradient, _ = native.smooth_ap(scores, positive, None, None, 0.1, True, ALL)
    expected = by_definition(scores, positive, None, None, 0.1 * (1 + 1e-9))
    assert (loss - expected[0]).abs() > 1e-13
    assert (gradient - expected[1]).norm() > 1e-12 * gradient.norm()


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_scores_that_are_not_ordinary(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, infinities, equal ones, subnormal and largest numbers, no positive, no negative: as torch computes them."""
    scores, positive, member = rows(12, 40, dtype)
    tiny, largest = torch.finfo(dtype).smallest_normal / 8, torch.finfo(dtype).max
    scores[0, 3] = math.nan
    scores[1, 4], scores[2, 5], scores[3, 6] = math.inf, -math.inf, largest
    scores[4] = scores[4] * tiny
    scores[5] = 0
    positive[6], positive[7] = False, True
    positive[8, :], positive[8, 9], scores[8, 9] = False, True, math.inf
    scores[9, 1:3], positive[9, 1:3] = math.inf, torch.tensor([True, False])  # no difference: NaN by the definition
    scores[10] *= 1e30
    scores[11, 0], positive[11] = math.nan, False
    for masked in (None, member | positive):
        given = scores, positive, masked, None, 0.1, True
        found = native.smooth_ap(*given, ALL)
        with monkeypatch.context() as patch:
            patch.setattr(native, "FUNCTIONS", {})
            expected = smooth_ap_and_gradient(*given, method="direct")
        for ours, others in zip(found, expected):
            if masked is not None and ours.ndim == 2:  # rows that take no part in a class that is NaN: either
                ours, others = ours.where(masked, 0), others.where(masked, 0)
            torch.testing.assert_close(ours, others, rtol=0, atol=10 * LIMITS[dtype], equal_nan=True)


@needs_extension
@pytest.mark.parametrize("form", ["transposed", "strided", "shifted"])
def test_memory_of_any_layout(form: str) -> None:
    scores, positive, member = rows(3, 90, torch.float32)

    def laid_out(tensor: Tensor) -> Tensor:
        if form == "transposed":
            return tensor.t().contiguous().t()
        if form == "strided":
            return tensor.repeat_interleave(2, dim=1)[:, ::2]
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)  # not aligned

    expected = native.smooth_ap(scores, positive, member, None, 0.1, True, ALL)
    found = native.smooth_ap(laid_out(scores), laid_out(positive), laid_out(member), None, 0.1, True, ALL)
    assert all(map(torch.equal, found, expected))


@needs_extension
def test_the_default_device_is_not_asked() -> None:
    scores, positive, _ = rows(1, 50, torch.float32)
    with torch.device("meta"):
        found = native.smooth_ap(scores, positive, None, None, 0.1, True, ALL)
    assert all(map(torch.equal, found, native.smooth_ap(scores, positive, None, None, 0.1, True, ALL)))


@needs_extension
def test_what_it_leaves_to_torch() -> None:
    scores, positive, _ = rows(1, 50, torch.float32)
    pairs = int(positive.sum()) * 50
    assert native.smooth_ap(scores, positive, None, None, 0.1, True, pairs) is not None
    for given in (
        (scores, positive, None, None, 0.1, True, pairs - 1),
        (scores.half(), positive, None, None, 0.1, True, ALL),
        (scores.to("meta"), positive.to("meta"), None, None, 0.1, True, ALL),
        (scores, positive, None, None, 1e-38, True, ALL),
        (scores[:, :0], positive[:, :0], None, None, 0.1, True, ALL),
    ):
        assert native.smooth_ap(*given) is None


@needs_extension
def test_the_same_bits_with_any_number_of_threads() -> None:
    """Of bins, whose rows are cut into parts: large pools of one class and of several."""
    threads = torch.get_num_threads()
    for num_classes, num_rows in ((1, 300_001), (3, 100_001)):
        scores, positive, _ = rows(num_classes, num_rows, torch.float32)
        found = []
        try:
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                found.append(smooth_ap_and_gradient(scores, positive, None, None, 0.1, True))
        finally:
            torch.set_num_threads(threads)
        assert all(map(torch.equal, found[0], found[1]))
        assert all(map(torch.equal, found[0], found[2]))


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_moments_and_polynomials_of_bins(dtype: torch.dtype) -> None:
    """By their definition, with members and without, for the numbers of powers that the compiler knows and others."""
    scores, positive, members = rows(2, 1000, dtype)
    first, num_bins, scale = torch.tensor([-40.0, -33.0], dtype=dtype), 80, 8.0
    scores = scores.clamp(-4, 4)
    rounded = (scores * scale).round()
    u, bins = 2 * (scores * scale - rounded), (rounded - first[:, None]).long()
    for p, member in itertools.product((1, 3, 4, 6, 8), (None, members)):
        held = torch.ones_like(members) if member is None else member
        expected = torch.zeros(p, 2, num_bins + 1, dtype=torch.float64)
        for k in range(p):
            expected[k].scatter_add_(1, bins, torch.where(held, u.double() ** k, 0.0))
        found = native.moments(scores, member, scale, first, num_bins, p)
        torch.testing.assert_close(found[..., :-1], expected[..., :-1], rtol=0, atol=1e-12)
        table, out = torch.randn(p, 2, num_bins + 1, dtype=dtype), torch.empty_like(scores)
        table[..., -1] = 0
        native.evaluate(table, scores, member, scale, first, out)
        value = sum(table[k].gather(1, bins).double() * u.double() ** k for k in range(p))
        torch.testing.assert_close(out.double(), value.where(held, 0.0), rtol=0, atol=10 * LIMITS[dtype])
        # Of the only class two sums, and two polynomials.
        only = scores[:1], None, scale, first[:1]
        groups = native.moments(*only, num_bins, p, positive[:1])
        for group, mask in enumerate((~positive[:1], positive[:1])):
            alone = native.moments(scores[:1], mask, *only[2:], num_bins, p)
            torch.testing.assert_close(groups[:, group, :-1], alone[:, 0, :-1], rtol=0, atol=1e-12)
        both = torch.empty_like(scores[:1])
        native.evaluate(table[:, :1], *only, both, positive[:1], 2 * table[:, :1].double())
        twice = value[:1] * (1 + positive[:1].double())
        torch.testing.assert_close(both.double(), twice, rtol=0, atol=20 * LIMITS[dtype])


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_sums_of_sigmoids_with_and_without_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several classes, with weights of one, which it adds up, and others, whose sums it only reads."""
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(rows_at_once=1000))
    keys, _, _ = rows(2, 3000, dtype)
    ones, others = torch.ones(2, 3000, 1, dtype=dtype), torch.rand(2, 3000, 1, dtype=dtype)
    calls, plain = [], native.moments
    monkeypatch.setattr(native, "moments", lambda *given: calls.append(given) or plain(*given))
    for weights in (ones, others):
        found = []
        for functions in (native.FUNCTIONS, {}):
            with monkeypatch.context() as patch:
                patch.setattr(native, "FUNCTIONS", functions)
                points, queries = keys.clone().requires_grad_(), keys[:, :40].clone().requires_grad_()
                sums = sigmoid_sums(queries, points, weights, 0.1, method="binned")
                sums.square().sum().backward()
                found.append([sums.detach(), queries.grad, points.grad])
        for ours, torchs in zip(*found):
            assert (ours - torchs).norm() <= 2 * LIMITS[dtype] * torchs.norm()
    assert len(calls) == 2  # of the keys with ones, forward and backward


@needs_extension
def test_a_library_from_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._load().keys() == native.FUNCTIONS.keys()
    monkeypatch.setattr(native, "_ABI", native._ABI + 1)
    assert native._load() == {}


@pytest.mark.parametrize(("value", "expected"), [("0", "torch"), ("1", fullrank.__config__["kernels"])])
def test_it_can_be_left_out(value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read at import."""
    monkeypatch.setenv("FULLRANK_NATIVE", value)
    assert runpy.run_path(native.__file__)["KERNELS"] == expected
