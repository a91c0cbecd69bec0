"""The automatic temperature: its value, its independence of the scale, degenerate scores, ranks, and its state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import reference
import torch
from loss_cases import FORMS, NAN, draw, normal, step
from reference import Rows
from torch import Tensor

from fullrank import PAUCAtBudgetLoss, RetrievalSmoothAPLoss
from fullrank.kernels.spread import spread_of, standardized
from fullrank.losses import retrieval_smooth_ap

AUTOMATIC = {
    name: form
    for name, form in FORMS.items()
    if form.settings.get("temperature", NAN) is None or (form.loss.is_automatic and "temperature" not in form.settings)
}
OVER_POOLS = [name for name, form in AUTOMATIC.items() if form.loss.is_pooled]
over_pools = pytest.mark.parametrize("name", OVER_POOLS)


def multiple(name: str) -> float:
    """Return the temperature for scores of spread 1."""
    return FORMS[name].loss.module.spread_multiple


def expected_spread(columns: Tensor) -> float:
    """Return the reference of the spread of ``columns`` (C, M), all rows of which are used."""
    codes = torch.zeros(columns.shape[1], len(columns), dtype=torch.int64)
    return reference.spread(reference.problems(Rows(columns.t(), codes)))


# --- the value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 30, 1000])
def test_spread_equals_the_reference(count: int, classes: int) -> None:
    for factor, shift in ((1.0, 0.0), (1e-3, 0.0), (2.0**60, 0.0), (1.0, 16.0)):
        scores = draw(count, classes)[0].detach().t() * factor + shift
        assert spread_of(scores, None) == pytest.approx(expected_spread(scores), rel=1e-13)
        assert spread_of(scores.float(), None) == pytest.approx(expected_spread(scores.float()), rel=1e-13)


def test_the_spread_is_that_of_the_members_and_of_normal_scores_their_deviation() -> None:
    scores = draw(60, 4)[0].detach().t()
    member = torch.rand(4, 60, generator=torch.Generator().manual_seed(1)) < 0.6
    alone = [spread_of(scores[c : c + 1, member[c]], None) for c in range(4)]
    assert spread_of(scores, member) == pytest.approx(sum(alone) / 4, rel=1e-13)
    assert spread_of(scores, None) != pytest.approx(sum(alone) / 4, rel=1e-3)  # control
    assert spread_of(torch.zeros(1, 0), None) == spread_of(scores, torch.zeros_like(member)) == 1.0
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 300_000), (5, 50_000), (300, 2000)):
        assert spread_of(7 + 3 * torch.randn(shape, generator=generator), None) == pytest.approx(3.0, rel=0.06)


@pytest.mark.parametrize("classes", [1, 3])
@over_pools
def test_none_equals_the_number_it_stands_for(name: str, classes: int) -> None:
    logits, targets = draw(80, classes)
    tau = multiple(name) * spread_of(logits.t(), None)
    for ours, number in zip(step(FORMS[name].call(), logits, targets), step(numbered(name, tau), logits, targets)):
        assert torch.equal(ours, number)
    control = step(numbered(name, 1.01 * tau), logits, targets)
    assert not torch.equal(control[0], step(FORMS[name].call(), logits, targets)[0])
    loss = FORMS[name].make(num_classes=classes)
    assert (loss.temperature, loss.current_temperature) == (None, None)
    loss(logits, targets)
    assert loss.current_temperature == tau
    loss(5 * logits, targets)
    assert loss.current_temperature > 2 * tau
    loss.temperature = 0.07
    assert loss.current_temperature == copy.deepcopy(loss).current_temperature == 0.07
    assert PAUCAtBudgetLoss(1).current_temperature == 0.1


def numbered(name: str, temperature: float) -> Callable[..., Tensor]:
    return lambda logits, targets: FORMS[name].call()(logits, targets, temperature=temperature)


# --- degenerate scores -----------------------------------------------------------------------------------------------

N = 400
RAMP = torch.linspace(-1, 1, N, dtype=torch.float64)
DEGENERATE: dict[str, tuple[Tensor, float, float]] = {  # scores, and the least and the largest spread
    "constant": (torch.full((N,), 3.7, dtype=torch.float64), 1, 1),
    "zeros": (torch.zeros(N, dtype=torch.float64), 1, 1),
    "rounding alone": (1.0 + 2.0**-52 * (torch.arange(N) % 3), 1, 1),
    "one outlier": (torch.where(torch.arange(N) == 7, 1e30, RAMP), 0.7, 0.8),
    "constant but one outlier": (torch.where(torch.arange(N) == 7, 1e30, torch.ones(N, dtype=torch.float64)), 1, 1),
    "two clusters": (torch.where(torch.arange(N) % 2 == 0, 1e6, -1e6) + RAMP, 1e6, 2e6),
    "two uneven clusters": (torch.where(torch.arange(N) % 10 == 0, 1e6, 0.0) + RAMP, 2e5, 4e5),
    "a tight majority": (torch.where(torch.arange(N) % 5 == 0, RAMP, 1e-4 * RAMP), 0.2, 0.3),
    "a majority that is not tight": (torch.where(torch.arange(N) % 5 == 0, RAMP, 0.1 * RAMP), 0.04, 0.1),
    "the jitter of bfloat16": ((3 + 0.01 * RAMP.cos()).bfloat16().double(), 1, 1),
    "the jitter of float16": ((3 + 0.001 * (9 * RAMP).cos()).half().double(), 1, 1),
    "few steps of bfloat16": ((3 + 0.1 * RAMP).bfloat16().double(), 0.05, 0.1),
    "two tied clusters": (torch.where(torch.arange(N) % 10 == 0, 1e6, 0.0).double(), 2e5, 4e5),
    "mostly tied": (torch.where(torch.arange(N) % 10 == 0, RAMP, torch.zeros_like(RAMP)), 0.05, 0.3),
    "infinities": (torch.where(torch.arange(N) % 5 == 0, -math.inf, RAMP), 0.7, 0.8),
    "all -inf": (torch.full((N,), -math.inf, dtype=torch.float64), 1, 1),
    "all nan": (torch.full((N,), math.nan, dtype=torch.float64), 1, 1),
    "huge": (RAMP * 1e37, 7e36, 8e36),
    "tiny": (RAMP * 1e-44, 1e-60, 1e-30),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_scores_have_a_usable_spread(name: str) -> None:
    """The form that reads no value finds the same: two scores at a distance of 1 are its yardstick."""
    scores, least, most = DEGENERATE[name]
    for dtype in (torch.float64, torch.float32):
        info, given = torch.finfo(dtype), scores.to(dtype)[None]
        for columns in (given, given.expand(3, -1)):
            found = spread_of(columns, None)
            assert info.tiny < 0.1 * found < info.max
            assert least <= found <= most
            if not given.isnan().any():
                assert standardized(columns, None).isfinite().eq(columns.isfinite()).all()
    scores = torch.cat([scores, torch.tensor([5.0, 6.0], dtype=torch.float64)])
    of_classes = torch.stack([scores, 3 * scores, torch.zeros_like(scores)])
    member = torch.rand(of_classes.shape, generator=torch.Generator().manual_seed(0)) < 0.8
    member[:, -2:] = True
    for columns, mask in ((scores[None], None), (scores[None], member[:1]), (of_classes, None), (of_classes, member)):
        standard = standardized(columns, mask)
        found = float((standard[0, -1].double() - standard[0, -2].double()).reciprocal())
        # The difference is lost where the scores are divided by 1e30: then the spread is the ratio of large scores.
        wanted = spread_of(columns, mask)
        if wanted < 1e5:
            assert found == pytest.approx(wanted, rel=1e-10 * max(1.0, wanted), abs=0)


def test_a_tight_majority_is_a_matter_of_a_hundredth() -> None:
    """Values below and above the ratio at which the deviation takes the place of the range."""
    for ratio, takes_range in ((0.001, False), (0.006, True)):
        scores = torch.where(torch.arange(N) % 5 == 0, RAMP, ratio * RAMP)[None]
        narrow = scores.abs() <= ratio
        widths = (scores[narrow].max().item(), scores[~narrow].max().item())
        assert (spread_of(scores, None) < widths[0]) == takes_range
        assert spread_of(scores, None) == pytest.approx(expected_spread(scores), rel=1e-13)
        assert spread_of(1e3 + scores, None) == pytest.approx(expected_spread(scores), rel=1e-9)


def test_standardized_scores_are_those_from_the_median() -> None:
    """Division alone would round scores that are far from 0. The lower median of an even number of rows is one."""
    assert standardized(1e6 + RAMP[None], None).median() == 0


def test_the_whole_range_of_float64() -> None:
    assert spread_of(RAMP[None] * 1.7e308, None) == pytest.approx(1.7e308 / 1.349, rel=0.01)
    assert spread_of(torch.tensor([[-1.7e308, 1.7e308]], dtype=torch.float64), None) == torch.finfo(torch.float64).max
    ends = torch.where(torch.arange(N) % 10 == 0, 1.7, -1.7).double()[None]  # their quartiles are equal
    for scale in (1e308, 1e-300):
        assert spread_of(scale * ends, None) == pytest.approx(scale * spread_of(ends, None), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@over_pools
def test_degenerate_scores_lose_no_step_and_poison_none(name: str, dtype: torch.dtype) -> None:
    """A step on degenerate scores, with a queue, then clean steps, which have a usual loss and gradient."""
    targets = (torch.arange(N) % 8 == 0).long()
    for kind in [kind for kind in DEGENERATE if kind not in ("all nan", "all -inf", "infinities")]:
        loss, given = FORMS[name].make(queue_size=200), DEGENERATE[kind][0].to(dtype)[:, None]
        value, gradient = step(loss, given, targets)
        if given.isfinite().all():
            assert value.isfinite()
            assert gradient.isfinite().all()
            assert 0 < loss.current_temperature < math.inf
        for index in range(2):
            value, gradient = step(loss, *draw(N, seed=index, dtype=dtype))
            assert 0 < value < 1
            assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0
        usual = 2 * multiple(name)  # after a clean step the queue holds clean rows alone
        assert usual / 4 < loss.current_temperature < usual


# --- retrieval -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_reference", [False, True])
@pytest.mark.parametrize("count", [9, 150])
def test_retrieval(count: int, of_reference: bool) -> None:
    """Of the pairs of a query and another row that it ranks. The control: of the queries alone."""
    rows, labels = normal(count, 5), torch.arange(count) % 3
    others = normal(70, 5, seed=1) if of_reference else rows
    pairs = (torch.ones(count, 70) if of_reference else 1 - torch.eye(count)).nonzero()
    given = {"reference": others, "reference_labels": torch.arange(70) % 4} if of_reference else {}
    sampled = pairs[reference.evenly_spaced(min(len(pairs), 4096), len(pairs))]
    cosines = torch.nn.functional.cosine_similarity(rows[sampled[:, 0]], others[sampled[:, 1]])
    loss = RetrievalSmoothAPLoss(None)
    value = loss(rows, labels, **given)
    tau = 0.1 * expected_spread(cosines[None])
    assert loss.current_temperature == pytest.approx(tau, rel=1e-12)
    torch.testing.assert_close(value, RetrievalSmoothAPLoss(tau)(rows, labels, **given), rtol=1e-10, atol=1e-12)
    loss(rows, labels)
    assert (loss.current_temperature == pytest.approx(tau, rel=1e-3)) != of_reference
    assert of_reference or torch.equal(value, retrieval_smooth_ap(rows, labels, temperature=None))
