"""Smooth-AP by every method: one definition, whatever the scores, the members, the weights and the number of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from loss_cases import why_torch_computes
from torch import Tensor

from fullrank.kernels import native, node_tables
from fullrank.kernels.costs import TABLE
from fullrank.kernels.smooth_ap.sums import smooth_ap_sums

# A sigmoid of d temperatures errs by d roundings, and differs from 0 or 1 by less than e^-32 from d = 32.
LIMITS = {torch.float64: 1e-12, torch.float32: 32 * torch.finfo(torch.float32).eps}
METHODS = {"native": "direct", "native binned": "binned", "direct": "direct", "plain": "plain", "binned": "binned"}
METHODS |= {"binned for many rows": "binned"}


def put(**values: float) -> Callable[[Tensor], Tensor]:
    """Return a change that gives rows of each class other scores; ``_3=7.0`` is the score of row 3."""
    places = torch.tensor([int(name[1:]) for name in values])
    return lambda x: x.index_copy(1, places, torch.tensor([list(values.values())]).to(x).expand(len(x), -1))


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": lambda x: (x * 3).round() / 3,
    "equal": lambda x: x * 0,
    "subnormal": lambda x: x * torch.finfo(x.dtype).smallest_normal / 8,
    "wide": lambda x: x * 1e30,
    "the largest number": lambda x: put(_4=torch.finfo(x.dtype).max)(x),
    "1e30": put(_4=1e30),
    "a positive at infinity": put(_0=math.inf),
    "a negative at infinity": put(_1=math.inf),
    "minus infinity": put(_2=-math.inf),
    "both ends": put(_0=math.inf, _1=-math.inf, _2=-math.inf),
    "two infinities, one of a positive": put(_0=math.inf, _1=math.inf),
    "NaN": put(_3=math.nan),
}


def definition(
    scores: Tensor,
    positive: Tensor,
    member: Tensor | None,
    weight: Tensor | None,
    tau: float,
    key_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, gradient and validity of each class in float64, pair by pair; without a row itself."""
    leaf = scores.double().requires_grad_()
    weights, keys = (
        (torch.ones(()) if given is None else given).double().expand_as(scores) for given in (weight, key_weight)
    )
    member = torch.ones_like(positive) if member is None else member
    losses, valid = [], []
    for c, row in enumerate(leaf):
        places = positive[c].nonzero()
        shares = weights[c, places[:, 0]]
        is_own = places == torch.arange(len(row))
        above = torch.sigmoid(((row - row[places]) / tau).masked_fill(is_own | ~member[c], -math.inf))
        own, above = keys[c, places[:, 0]], above * keys[c]
        terms = shares / shares.sum() * (1 - (own + above[:, positive[c]].sum(1)) / (own + above.sum(1)))
        valid.append(bool(shares.sum() > 0 and (member[c] & ~positive[c]).any()))
        losses.append(terms.sum() if valid[-1] else 0 * row.clamp(-1, 1).sum())
    loss = torch.stack(losses)
    (gradient,) = torch.autograd.grad(loss.nan_to_num().sum(), leaf)
    return loss.detach(), gradient, torch.tensor(valid)


def assert_method(method: str, scores: Tensor, extra: str, tau: float = 0.3, factor: float = 1.0) -> None:
    """Assert that loss, gradient and validity are those of the definition at ``tau * factor``."""
    numbers = torch.Generator().manual_seed(7)
    positive = (torch.rand(scores.shape, generator=numbers) < 0.2) | (torch.arange(scores.shape[1]) == 0)
    positive[:, 1:4] = False
    positive[1:2], positive[2:3] = False, True  # a class without positives, one without negatives
    member = torch.rand(scores.shape, generator=numbers) < 0.7 if "members" in extra else None
    if member is not None:
        member[:, :4] = True
        positive, scores = positive & member, torch.where(member, scores, 0.0)
    weight = torch.rand(scores.shape, generator=numbers, dtype=scores.dtype) if "weights" in extra else None
    if weight is not None:
        weight[:, 4:9] = 0  # a positive of no weight still ranks
        weight = weight if "each class" in extra else weight[0]
    key_weight = None
    if "of all rows" in extra:
        weight = torch.where(weight > 0, weight, 1.0)
        weight = torch.where(positive, weight * 2.0**-90, weight) if "light positives" in extra else weight
        weight = weight * 2.0**62 if "heavy" in extra else weight
        key_weight = weight
    expected, slopes, valid = definition(scores, positive, member, weight, tau * factor, key_weight)
    leaf = scores.clone().requires_grad_()
    loss, is_valid = smooth_ap_sums(leaf, positive, member, weight, tau, METHODS[method], key_weight=key_weight)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    limit = LIMITS[scores.dtype]
    assert torch.equal(is_valid, valid)
    assert not loss[~valid].nan_to_num().any()  # which the losses leave out, unless they are NaN
    assert loss[expected.isnan()].isnan().all()
    torch.testing.assert_close(loss[valid].double(), expected[valid], rtol=0, atol=limit, equal_nan=True)
    members = torch.ones_like(positive) if member is None else member
    assert torch.equal((gradient.isnan() & members).any(dim=1)[valid], expected[valid].isnan())
    defined = valid & ~expected.isnan()
    difference, eps = gradient[defined].double() - slopes[defined], torch.finfo(torch.float64).eps
    # The definition takes a ratio from 1, which rounds by eps, and divides by tau: a small gradient is no more exact.
    assert difference.norm() <= max(limit * max(slopes[defined].norm(), 1e-3), 8 * eps / (tau * factor))


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A method; without the extension where it is not named, with three moments in narrower bins for many rows."""
    if "native" not in request.param:
        monkeypatch.setattr(native, "FUNCTIONS", {})
    elif not native.FUNCTIONS:
        pytest.skip(why_torch_computes())
    if "many rows" in request.param:
        monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(many_rows=0))
        assert node_tables.order_for(torch.empty(0), 1).p == 3
    return request.param


def normal(num_classes: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_classes, num_rows, generator=generator, dtype=torch.float64).to(dtype)


FAST = ["", "members, weights of each class", "weights of all rows"]
SLOW = ["members", "weights", "members, weights of all rows of each class"]
OF_KINDS = [(kind, extra) for kind in ("normal", "ties") for extra in FAST]
OF_KINDS += [(kind, FAST[number % 3]) for number, kind in enumerate([*SCORES][2:])]
OF_KINDS += [
    pytest.param(kind, SLOW[n % 3], marks=pytest.mark.slow if n < 3 else pytest.mark.full)
    for n, kind in enumerate(SCORES)
]


@pytest.mark.parametrize(("kind", "extra"), OF_KINDS)
def test_it_is_the_definition(kind: str, extra: str, method: str) -> None:
    for shape, dtype in itertools.product(((1, 10), (4, 60)), LIMITS):
        assert_method(method, SCORES[kind](normal(*shape, dtype)), extra)


@pytest.mark.parametrize("tau", [0.003, 30.0])
def test_any_number_of_rows(tau: float, method: str) -> None:
    """Such as around the length of a block of sums, 512."""
    for (num_classes, num_rows), dtype in itertools.product(
        [(1, 1), (1, 2), (3, 7), (2, 511), (1, 513), (1, 1100)], LIMITS
    ):
        for extra in FAST if num_rows < 100 else FAST[num_rows % 2 : num_rows % 2 + 1]:
            assert_method(method, normal(num_classes, num_rows, dtype), extra, tau)


@pytest.mark.parametrize("extra", ["light positives, weights of all rows of each class", "heavy weights of all rows"])
def test_squares_of_sums_of_weights_are_in_range(extra: str, method: str) -> None:
    """The rank of a light positive far above all others is its weight alone."""
    # From 34 temperatures on a sigmoid is 0 in bins, also where a ratio of weights of 2^90 would make it count.
    top = 3.0 if METHODS[method] == "binned" else 30.0
    for shape, dtype in itertools.product(((1, 60), (4, 60), (1, 1100)), LIMITS):
        assert_method(method, put(_0=top)(normal(*shape, dtype)), extra)


def test_control_another_temperature_is_seen(method: str) -> None:
    with pytest.raises(AssertionError, match=r"not close|<="):
        assert_method(method, normal(4, 60, torch.float64), "", factor=1 + 1e-9)
