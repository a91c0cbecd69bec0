"""NDCG: the definition written out with loops, scikit-learn at small temperatures, queries."""

from __future__ import annotations

import math

import pytest
import torch
from loss_cases import on_devices, why_torch_computes
from sklearn.metrics import ndcg_score
from torch import Tensor
from torch.testing import assert_close

from fullrank import NDCGLoss
from fullrank.kernels import native
from fullrank.losses.pooled import ndcg

EXACT = {"rtol": 1e-12, "atol": 1e-14}
IGNORED = -100


def by_definition(scores: Tensor, relevance: Tensor, temperature: float, gain: str, top: int | None) -> Tensor:
    """Return the loss of one query from its soft ranks, pair by pair."""
    rows = [i for i, grade in enumerate(relevance.tolist()) if grade != IGNORED]
    gains = {i: float(relevance[i]) if gain == "linear" else 2.0 ** float(relevance[i]) - 1 for i in rows}
    found = scores.new_zeros(())
    for i in rows:
        rank = 1 + sum(torch.sigmoid((scores[j] - scores[i]) / temperature) for j in rows if j != i)
        counted = 1.0 if top is None else (top + 1 - rank).clamp(0, 1)
        found = found + counted * gains[i] / torch.log2(1 + torch.as_tensor(rank))
    best = sorted(gains.values(), reverse=True)[:top]
    return 1 - found / sum(g / math.log2(2 + place) for place, g in enumerate(best))


def rows_of(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores that are at least 1 apart, relevance with ignored rows, and queries."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randperm(count, generator=generator).double().requires_grad_()
    relevance = torch.randint(0, 5, (count,), generator=generator)
    relevance[::7] = IGNORED
    return scores, relevance, torch.randint(-2, 3, (count,), generator=generator)


WAYS = [("linear", None), ("linear", 3), ("exponential", 3)]


@pytest.mark.parametrize(("gain", "top", "device"), on_devices(WAYS, WAYS[2:]), indirect=["device"])
def test_value_and_gradient_are_those_of_the_definition(gain: str, top: int | None, device: torch.device) -> None:
    scores, relevance, indexes = rows_of(40)
    given = scores.detach().to(device).requires_grad_()
    loss = NDCGLoss(1.5, gain=gain, top=top)
    expected = by_definition(scores, relevance, 1.5, gain, top)
    ours = loss(given[:, None], relevance.float().to(device))
    assert_close(ours.cpu(), expected, **EXACT)
    assert_close(torch.autograd.grad(ours, given)[0].cpu(), torch.autograd.grad(expected, scores)[0], **EXACT)
    of_each = [by_definition(scores[indexes == i], relevance[indexes == i], 1.5, gain, top) for i in range(-2, 3)]
    ours, theirs = loss(given, relevance.to(device), indexes.to(device)), torch.stack(of_each).mean()
    assert_close(ours.cpu(), theirs, **EXACT)
    assert_close(torch.autograd.grad(ours, given)[0].cpu(), torch.autograd.grad(theirs, scores)[0], **EXACT)
    assert abs(loss(scores, relevance) - loss(scores, relevance, indexes)) > 1e-3  # the control: one query


@pytest.mark.parametrize("top", [None, 1, 10])
@pytest.mark.parametrize("count", [30, 5_000])
def test_small_temperatures_give_scikit_learn(count: int, top: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ndcg, "MOST_GRADES", 100)  # so that relevances are counted
    scores, relevance, indexes = rows_of(count)
    kept = relevance != IGNORED
    x, y, query = (column[kept].detach().numpy() for column in (scores, relevance, indexes))
    assert_close(1 - NDCGLoss(0.01, top=top)(scores, relevance).item(), ndcg_score(y[None], x[None], k=top), **EXACT)
    spread = NDCGLoss(top=top)
    spread(scores, relevance)
    assert spread.current_temperature == pytest.approx(0.037 * count, rel=0.15)
    whole = NDCGLoss(0.01, top=top, reduction="none")(scores, relevance, indexes)
    for index, value in zip(range(-2, 3), whole):
        own = query == index
        assert_close(1 - value.item(), ndcg_score(y[own][None], x[own][None], k=top), **EXACT)
    weight = (indexes + 3.0 + torch.arange(len(scores)) % 2).double()  # of rows, which differ within a query too
    mass = [float(weight[kept][torch.from_numpy(query == index)].mean()) for index in range(-2, 3)]
    weighted = NDCGLoss(0.01, top=top)(scores, relevance, indexes, sample_weight=weight).item()
    assert_close(weighted, sum(a * b for a, b in zip(whole.tolist(), mass)) / sum(mass), **EXACT)
    assert abs(weighted - whole.mean().item()) > 1e-4  # control


@pytest.mark.skipif(not native.FUNCTIONS, reason=why_torch_computes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gain", ["linear", "exponential"])
def test_queries_in_c_are_those_of_torch(gain: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of 1, 2, 17, 64 and 130 rows, one without a gain, one without members; sorted, mixed, and as one query.

    The control has other weights.
    """
    calls, plain = [], native.ndcg
    monkeypatch.setattr(native, "ndcg", lambda *given: calls.append(plain(*given)) or calls[-1])
    lengths = torch.tensor([1, 17, 2, 64, 130, 5, 5])
    indexes, generator = torch.arange(7).repeat_interleave(lengths) - 3, torch.Generator().manual_seed(0)
    scores = torch.randn(len(indexes), generator=generator, dtype=torch.float64).to(dtype)
    relevance = torch.randint(0, 4, (len(indexes),), generator=generator)
    relevance[::6], relevance[-10:-5], relevance[-5:] = IGNORED, 0, IGNORED
    weight = torch.rand(len(indexes), generator=generator, dtype=torch.float64)
    exact = EXACT if dtype == torch.float64 else {"rtol": 2e-6, "atol": 1e-6}
    mixed = indexes[torch.randperm(len(indexes), generator=generator)]
    settings = zip([None, None, 1, 1, 3, 3], ["mean", "sum"] * 3, [None, weight, weight, None, None, weight])
    for top, reduction, given in settings:
        for of_rows in (indexes, mixed, None):
            loss, found = NDCGLoss(0.3, gain=gain, top=top, reduction=reduction), []
            for functions, of_query in ((native.FUNCTIONS, given), ({}, given), ({}, 2 * weight.flip(0))):
                leaf = torch.stack([scores, scores], dim=1).requires_grad_()
                with monkeypatch.context() as patch:
                    patch.setattr(native, "FUNCTIONS", functions)
                    value = loss(leaf[:, 0], relevance, of_rows, sample_weight=of_query)
                found.append((value, torch.autograd.grad(3 * value, leaf)[0]))
            for ours, theirs in zip(*found[:2]):
                assert_close(ours, theirs, **exact)
            if of_rows is not None:
                assert (found[0][0] - found[2][0]).abs() > 1e-4
            with torch.no_grad():
                assert torch.equal(loss(scores, relevance, of_rows, sample_weight=given), found[0][0])
    assert sum(call is not None for call in calls) == 36  # and C has refused those that are mixed
    assert len(calls) == 36 + 12


@pytest.mark.skipif(not native.FUNCTIONS, reason=why_torch_computes())
def test_what_c_leaves_to_torch() -> None:
    scores, gains, indexes = torch.arange(6.0), torch.arange(6).double(), torch.tensor([1, 1, 2, 2, 2, 5])
    columns = {"scores": scores, "gains": gains, "member": None, "weight": None, "indexes": indexes}
    numbers = {"temperature": 0.1, "top": None, "is_mean": True, "with_grad": True, "most": 12}
    assert native.ndcg(**columns, **numbers) is not None
    for changes in (
        {"indexes": indexes.flip(0)},
        {"indexes": torch.tensor([1, 1, 2, 2, 1, 5])},
        {"gains": gains - 1},
        {"gains": gains.log().log()},
        {"gains": 3e307 * gains},  # those of a query add up to infinity
        {"scores": 10 * scores},  # the last two of a query are 200 temperatures apart
        {"scores": scores.index_fill(0, torch.tensor([5]), math.nan)},
        {"scores": scores.index_fill(0, torch.tensor([5]), math.inf)},
        {"scores": scores[:0], "gains": gains[:0], "indexes": indexes[:0]},
        {"temperature": 1e-31},
        {"most": 11},
        {"gains": gains.float()},
        {"member": gains > 1, "indexes": indexes.int()},
        {"weight": scores},
    ):
        assert native.ndcg(**{**columns, **numbers, **changes}) is None, changes


@pytest.mark.parametrize("gain", ["linear", "exponential"])
def test_gains_that_overflow_give_nan(gain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C as in torch. The control: gains whose sum is finite."""
    scores, large = torch.tensor([0.1, 0.5, 0.3, 0.9, 0.2], dtype=torch.float64, requires_grad=True), [1.7e308, 1e308]
    for numbers, is_nan in ((large if gain == "linear" else [1023.9, 1023.5], True), ([9.0, 8.0], False)):
        relevance = torch.tensor([*numbers, numbers[0], 0.0, 1.0], dtype=torch.float64)
        for functions in (native.FUNCTIONS, {}):
            monkeypatch.setattr(native, "FUNCTIONS", functions)
            assert bool(NDCGLoss(0.1, gain=gain, validate_args=False)(scores, relevance).isnan()) == is_nan


def test_infinite_rows_and_nan() -> None:
    scores, relevance, indexes = rows_of(20)
    infinite = scores.detach().clone()
    infinite[1], infinite[2] = math.inf, -math.inf
    finite = infinite.clamp(-1e3, 1e3)
    values, gradients = [], []
    for given in (infinite, finite):
        leaf = given.clone().requires_grad_()
        values.append(NDCGLoss(0.5)(leaf, relevance))
        gradients.append(torch.autograd.grad(values[-1], leaf)[0])
    assert_close(*values, **EXACT)
    assert_close(*gradients, **EXACT)
    infinite[3] = math.nan
    assert NDCGLoss(0.5)(infinite, relevance).isnan()
    values = NDCGLoss(0.5, reduction="none")(infinite, relevance, indexes)
    assert values.isnan().sum() == 1


def test_unchecked_relevance_below_zero_is_a_gain_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows with whole numbers too, which are counted where none is below zero."""
    scores, relevance = torch.arange(5.0).double(), torch.tensor([-1, 4, -2, 3, 1])
    expected = by_definition(scores, relevance, 0.5, "linear", None)
    for most in (4096, 3):
        monkeypatch.setattr(ndcg, "MOST_GRADES", most)
        assert_close(NDCGLoss(0.5, validate_args=False)(scores, relevance), expected, **EXACT)
