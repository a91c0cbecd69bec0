"""Sums by bins against sums by pairs: whatever the scores, the same numbers in another time."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from score_sets import ROWS, SETS, generator, normal
from torch import Tensor

from fullrank.kernels import bins as bins_of
from fullrank.kernels import native, node_tables
from fullrank.kernels import sigmoid_sums as pairwise_sums
from fullrank.kernels.bins import (
    MOST_EXACT,
    Bins,
    Outside,
    compact_ids,
    cover,
    cover_bulk,
    find_bins,
    locate,
    most_bins,
)
from fullrank.kernels.costs import TABLE
from fullrank.kernels.pairs import Problem
from fullrank.kernels.smooth_ap import binned, sums
from fullrank.kernels.smooth_ap.sums import smooth_ap_sums
from fullrank.losses import sigmoid_sums

pytestmark = pytest.mark.usefixtures("kernels")
FULL = pytest.mark.full
TEMPERATURES = [1e-6, 1e-4, 1e-2, 0.1, 1.0, 10.0, 1e6]


def smooth_ap_by(
    method: str, scores: Tensor, positive: Tensor, temperature: float, *, is_weighted: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the loss (C,) and the gradient (C, M) by one method, in float64; with weights from 1e-3 to 1e3."""
    leaf, weight = scores.clone().requires_grad_(), None
    if is_weighted:
        weight = 10 ** (6 * torch.rand(scores.shape[1], generator=generator()) - 3).to(scores)
    loss, _ = smooth_ap_sums(leaf, positive, None, weight, temperature, method, key_weight=weight)
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach().double(), leaf.grad.double()


def assert_same(ours: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Assert the bars: relative error of the gradient, and of each row against the largest; loss to its rounding."""
    loss, gradient = reference
    limit, row_limit, loss_limit = (2e-6, 5e-6, 6e-8) if dtype == torch.float32 else (1e-12, 1e-12, 1e-13)
    assert (ours[0] - loss).abs().max() <= loss_limit * loss.abs().max() + loss_limit / 6
    if gradient.norm() > 1e-12:  # else hardly a pair is within reach, and what is left is beyond the cutoff
        assert (ours[1] - gradient).norm() <= limit * gradient.norm()
        assert (ours[1] - gradient).abs().max() <= row_limit * gradient.abs().max()


BY_BINS = [
    pytest.param(name, temperature, "float64", marks=[] if temperature in (1e-6, 0.1, 1e6) else FULL)
    for name, temperature in product(SETS, TEMPERATURES)
]
BY_BINS += [
    pytest.param(*case, marks=FULL if number % 4 else pytest.mark.slow)
    for number, case in enumerate(product(SETS, TEMPERATURES, ("float32", "many rows", "float64 weights")))
]


@pytest.mark.parametrize(("name", "temperature", "form"), BY_BINS)
def test_smooth_ap_by_bins(name: str, temperature: float, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with three moments in narrower bins, whatever the number of rows they are meant for."""
    if form == "many rows":
        monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(many_rows=0))
        assert node_tables.order_for(torch.empty(0), 1).p == 3
    dtype, weighs = torch.float64 if "float64" in form else torch.float32, {"is_weighted": "weights" in form}
    scores, positive = SETS[name]()[None], torch.rand(1, ROWS, generator=generator()) < 0.02
    reference = smooth_ap_by("direct", scores.double(), positive, temperature, **weighs)
    assert_same(smooth_ap_by("binned", scores.to(dtype), positive, temperature, **weighs), reference, dtype)


@pytest.mark.parametrize("method", ["direct", "binned"])
def test_a_graph_that_is_kept_gives_its_gradient_again(method: str) -> None:
    """The last backward may overwrite what the forward has saved, those before may not."""
    leaf = normal()[None].requires_grad_()
    loss, _ = smooth_ap_sums(leaf, leaf.detach() > 1.5, None, None, 0.1, method)
    gradients = [torch.autograd.grad(3 * loss.sum(), leaf, retain_graph=kept)[0] for kept in (True, True, False)]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert gradients[0].norm() > 0


def test_rows_of_which_no_two_are_within_the_cutoff() -> None:
    """Their gradient, e^-50 of the others, is not 0."""
    scores = 50 * torch.randperm(3000, generator=generator()).double()[None]
    positive = torch.rand(scores.shape, generator=generator()) < 0.3
    reference = smooth_ap_by("direct", scores, positive, 1.0)[1]
    for dtype in (torch.float32, torch.float64):
        gradient = smooth_ap_by("binned", scores.to(dtype), positive, 1.0)[1]
        assert (gradient - reference).norm() * 1e6 <= reference.norm()
    assert 0 < reference.norm() < 1e-20


def test_control_a_coarser_polynomial_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The float64 limit does catch the order that is enough for float32."""
    scores, positive = normal()[None].double(), torch.rand(1, ROWS, generator=generator()) < 0.02
    reference = smooth_ap_by("direct", scores, positive, 0.5)
    monkeypatch.setattr(sums, "order_for", lambda scores, num_rows: node_tables.Order(16, 4, 14))
    with pytest.raises(AssertionError):
        assert_same(smooth_ap_by("binned", scores, positive, 0.5), reference, torch.float64)


def test_a_few_positives_far_above_many_negatives() -> None:
    """33 temperatures above 1e5 negatives, from bin 0 to bin 9, the tail of the sigmoid is all there is."""
    scores = torch.cat([normal(100_000) * 0.01 + 3.2, torch.full((5,), 36.5)])[None]
    positive = torch.zeros_like(scores, dtype=torch.bool)
    positive[0, -5:] = True
    reference = smooth_ap_by("direct", scores.double(), positive, 1.0)
    for dtype in (torch.float32, torch.float64):
        assert_same(smooth_ap_by("binned", scores.to(dtype), positive, 1.0), reference, dtype)


@pytest.mark.parametrize(
    ("num_classes", "size", "change"),
    [(1, 300_000, {"lanes": 1}), (1, 300_001, {"lanes": 1}), (7, 900, {"tables_at_once": 100})],
    ids=["side by side", "and a remainder", "groups of classes"],
)
def test_rows_and_classes_are_split(
    num_classes: int, size: int, change: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = torch.randn(num_classes, size, generator=generator()).double()
    positive = torch.rand(num_classes, size, generator=generator()) < 0.02
    expected = [smooth_ap_by("binned", scores, positive, 0.1, is_weighted=weighs) for weighs in (False, True)]
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(**change))
    for weighs in (False, True):
        found = smooth_ap_by("binned", scores, positive, 0.1, is_weighted=weighs)
        assert_same(found, expected[weighs], torch.float64)
        assert not torch.allclose(found[0], expected[not weighs][0], rtol=1e-3)


@pytest.mark.parametrize("temperature", [1e-3, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("sizes", [(1, 300, 2000, 2), (3, 1200, 400, 1)])
def test_sigmoid_sums_by_bins(
    sizes: tuple[int, int, int, int], temperature: float, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C as in torch; one of several classes in blocks of rows."""
    (num_classes, num_queries, num_keys, columns), calls, moments = sizes, [], native.moments
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(rows_at_once=1000 if num_classes > 1 else 2**18))
    monkeypatch.setattr(native, "moments", lambda *given, **more: calls.append(given) or moments(*given, **more))
    numbers = generator()
    queries = torch.randn(num_classes, num_queries, generator=numbers)
    keys = torch.randn(num_classes, num_keys, generator=numbers) + 0.5
    weights = torch.rand(num_classes, num_keys, columns, generator=numbers)
    upstream = torch.rand(num_classes, num_queries, columns, generator=numbers)
    outcomes = {}
    for method, dtype in (("direct", torch.float64), ("binned", torch.float64), ("binned", torch.float32)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (queries, keys, weights)]
        sums = sigmoid_sums(*leaves, temperature, method=method)
        sums.backward(upstream.to(dtype))
        outcomes[method, dtype] = [sums.detach().double(), *(leaf.grad.double() for leaf in leaves)]
    # C adds up one column alone, and at the smallest temperature there are too many bins.
    assert bool(calls) == (kernels == "native" and columns == 1 and temperature > 1e-3)
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        for ours, reference in zip(outcomes["binned", dtype], outcomes["direct", torch.float64]):
            assert (ours - reference).norm() <= limit * reference.norm()


@pytest.mark.parametrize("num_classes", [1, 2])
def test_sigmoid_sums_with_an_outlier_and_with_infinity(num_classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bins hold the outlier of one class and the rows of another: each class has its own, forward and backward."""
    queries, keys = (normal(size).repeat(num_classes, 1).requires_grad_() for size in (500, 3000))
    weights, gradients = torch.ones(num_classes, 3000, 1), {}
    for extreme in (math.inf, 1e30):
        with torch.no_grad():
            keys[0, 3] = extreme
        for method in ("direct", "binned"):
            with monkeypatch.context() as patch:
                if (method, extreme) == ("binned", 1e30):
                    patch.delattr(pairwise_sums, "chunks_of_pairs")
                points = [tensor.double() if method == "direct" else tensor for tensor in (queries, keys, weights)]
                sums = sigmoid_sums(*points, 0.1, method=method)
                gradients[method] = [sums.detach().double(), *torch.autograd.grad(sums.square().sum(), (queries, keys))]
        for ours, exact in zip(gradients["binned"], gradients["direct"]):
            torch.testing.assert_close(ours.double(), exact.double(), rtol=2e-6, atol=2e-6 * float(exact.abs().max()))


def test_bins_hold_the_rows_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Position and bin give the score back, inside the window and outside of it."""
    scores = torch.cat([normal(20_000), torch.tensor([1e30, -1e25, 500.0])])
    bins = cover_bulk(scores, 0.01, 16)
    assert bins is not None
    assert bins.outside is not None
    assert bins.num_coarse <= most_bins(scores.numel()) * 2
    index, u = locate(bins, scores[None], slice(None))
    assert int(index.min()) >= 0
    assert int(index.max()) < bins.num_fine
    assert u.abs().max() <= 1.0
    assert index[0, scores.argsort()].diff().min() >= 0  # the order of the scores
    plain = cover(scores[:100].min()[None], scores[:100].max()[None], 0.01, 16)
    index, u = locate(plain, scores[None, :100], slice(None))
    position = index[0] + u[0].double() / 2 + float(plain.first[0]) * plain.fine
    torch.testing.assert_close(position * plain.width / plain.fine, scores[:100].double(), rtol=1e-6, atol=1e-8)


# The method, the rows, what their scores are multiplied by, if they have weights, and the form in C and in torch.
CHOICES = [
    ("binned", 0, 1.0, False, ("all pairs of rows", "all pairs of rows")),
    ("auto", 1000, 1.0, True, ("pairs in C", "pairs")),
    ("auto", 100_000, 1.0, False, ("bins without a list", "bins")),
    ("auto", 100_000, 1.0, True, ("bins without a list", "bins")),
    ("auto", 100_000, 1e7, False, ("sorted rows", "sorted rows")),
]


@pytest.mark.parametrize(("method", "size", "scale", "is_weighted", "names"), CHOICES)
def test_the_first_form_that_applies(
    method: str,
    size: int,
    scale: float,
    is_weighted: bool,
    names: tuple[str, str],
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[str] = []

    def noted(name: str, compute: Callable[[object], object]) -> Callable[[object], object]:
        return lambda pool: taken.append(name) or compute(pool)

    forms = [(name, applies, noted(name, compute)) for name, applies, compute in sums.FORMS]
    monkeypatch.setattr(sums, "FORMS", forms)
    positive = torch.rand(1, size, generator=generator()) < 0.05
    smooth_ap_by(method, normal(size)[None] * scale, positive, 0.01, is_weighted=is_weighted)
    assert taken[-1] == names[kernels == "torch"]


def test_the_default_device_is_not_kept_in_the_tables():
    scores, positive = normal(5_000)[None], torch.arange(5_000)[None] % 50 == 0
    node_tables.constants.cache_clear()
    with torch.device("meta"):
        found = smooth_ap_sums(scores, positive, None, None, 0.1, "binned")[0]
    again = smooth_ap_sums(scores, positive, None, None, 0.1, "binned")[0]
    assert found.device.type == "cpu"
    assert torch.equal(found, again)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e37), (torch.float64, 1e307)])
@pytest.mark.parametrize("shift", [0.0, 9.0])
@pytest.mark.parametrize("num_classes", [1, 2])
def test_scores_that_are_infinite_in_units_of_the_bins(dtype, scale, num_classes, shift):
    """Every pair is then far apart: the exact average precision. After the shift both ends are the same infinity."""
    generator = torch.Generator().manual_seed(0)
    scores = (shift + torch.randn(num_classes, 3_000, generator=generator, dtype=torch.float64)).mul(scale).to(dtype)
    positive = torch.rand(num_classes, 3_000, generator=generator) < 0.3
    direct, binned = (smooth_ap_sums(scores, positive, None, None, 0.01, way)[0] for way in ("direct", "binned"))
    # Direct sums are in the dtype of the scores: a thousand terms.
    torch.testing.assert_close(direct, binned, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)


def by_hand(values: Tensor, digits: int = 3) -> str:
    """Return numbers of bins (B, n) as the head of binned.py writes them."""
    return " | ".join(" ".join(f"{value:.{digits}f}" for value in of_bin) for of_bin in values.tolist())


def numbers_of_the_head(scores: Tensor) -> list[str]:
    """Return the numbers in the head of binned.py for two negatives and the positive between them."""
    positive, one = torch.tensor([[False, True, False]]), torch.ones(1, dtype=torch.float64)
    problem = Problem(scores, positive, None, torch.tensor([0]), torch.tensor([1]), one, 1.0)

    def by_bins(order: node_tables.Order) -> tuple[Bins, Tensor, Tensor]:
        bins = cover(scores[:, 0], scores[:, 2], 1.0, order.fine)
        return bins, *binned.smooth_ap_binned(problem, bins, order, True)

    order = node_tables.Order(fine=1, p=2, q=2)
    bins, loss, gradient = by_bins(order)
    of_all, positives, _ = binned.Places.of(problem, bins).moments(order)
    moments = torch.stack([of_all - positives, positives], dim=2)[..., :-1].unflatten(-1, (3, 1))  # [p, 1, 2, B, 1]
    grid = binned._grid_of(bins, order, 1.0, scores.device)
    weights, fields = node_tables.fine_weights(moments, grid.matrices), binned.fields_of(moments, grid)
    found = [by_hand(of_kind) for of_kind in moments[:, 0, :, :, 0].movedim(0, -1)]
    found += [by_hand(of_kind[0]) for of_kind in (*weights.unbind(dim=1), fields.r_n, fields.r_p)]
    fields.r_p.add_(0.5)
    f = (fields.r_n / (fields.r_n + fields.r_p))[0]  # [B, p]
    found += [by_hand(f), f"0.5 * {f[1, 0]:.3f} + 0.5 * {f[1, 1]:.3f} = {loss[0]:.3f}"]
    lines = binned.polynomials_of(fields, weights[:, 1], grid)[:, 0, 0, :3]  # [p, B]
    found += [" | ".join(f"{a:.4f} {'+-'[b < 0]} {abs(b):.4f} u" for a, b in lines.t().tolist())]
    found += [by_hand(gradient.t(), 4)]
    by_pairs = smooth_ap_by("direct", scores, positive, 1.0)
    for loss, gradient in (by_pairs, by_bins(node_tables.order_for(scores.float(), 3))[1:]):
        found += [f"the loss is {loss[0]:.3f} and the gradient {by_hand(gradient.t(), 4)}"]
    return found


def test_the_three_bins_of_the_head() -> None:
    scores, text = torch.tensor([[0.5, 4.0, 8.5]], dtype=torch.float64), str(binned.__doc__)
    assert [number for number in numbers_of_the_head(scores) if number not in text] == []
    # The control: of other scores all numbers but the counts are others.
    assert sum(number not in text for number in numbers_of_the_head(scores * 1.1)) >= 9


# Temperature, and the number of rows from which fine bins are narrower.
POSITIVES_ALONE = {"few rows": (0.45, 10**9), "many rows": (0.45, 0), "far bins": (1.8e-3, 0)}


def positives_alone(temperature: float) -> tuple[Tensor, Tensor]:
    """Return one negative, 20 positives below it, 12 temperatures apart, and 20,000 negatives far below them."""
    steps = 12.03 * temperature * torch.arange(21)
    scores = torch.cat([normal(20_000).clamp(-4, 4), 100 + steps])[None]
    return scores, (scores > 99) & (scores < scores.max())


@pytest.mark.parametrize("case", POSITIVES_ALONE)
def test_positives_far_from_every_row(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope of the pair of a positive with itself, 1e5 times that of its other pairs, leaves no rounding behind."""
    temperature, many_rows = POSITIVES_ALONE[case]
    monkeypatch.setitem(TABLE, "cpu", TABLE["cpu"]._replace(many_rows=many_rows))
    scores, positive = positives_alone(temperature)
    bins = find_bins(scores, scores.amin(dim=1), scores.amax(dim=1), temperature, 64)
    assert bins is not None
    assert (bins.outside is not None) == (case == "far bins")
    reference = smooth_ap_by("direct", scores.double(), positive, temperature)
    assert_same(smooth_ap_by("binned", scores, positive, temperature), reference, torch.float32)

    def rounded(values: Tensor, matrices: node_tables.Constants, dtype: torch.dtype) -> Tensor:
        return node_tables.coefficients(values, matrices, torch.float32).to(dtype)

    # Control: both of its terms rounded to float32 before their difference.
    monkeypatch.setattr(binned, "coefficients", rounded)
    with pytest.raises(AssertionError):
        assert_same(smooth_ap_by("binned", scores, positive, temperature), reference, torch.float32)


# Fine bins are counted exactly, also where there are more of them than float32 has whole numbers

WIDTH = 0.5


def window_at_the_limit(fine: int, num_left: int, dtype: torch.dtype) -> tuple[Bins, Tensor]:
    """Return a window of as many bins as are allowed, with occupied bins to the left of it, and rows in all parts."""
    window = MOST_EXACT * 64 // fine
    ids = -1000.0 - torch.arange(num_left, 0, -1, dtype=torch.float64)
    bins = Bins(WIDTH, fine, torch.zeros(1, dtype=dtype), window, Outside(ids, num_left, torch.arange(0)))
    inside = torch.linspace(0.0, (window - 1) * WIDTH, 4001, dtype=torch.float64)
    last = (window - 1) * WIDTH + torch.arange(fine // 2) * WIDTH / fine
    return bins, torch.cat([inside, last, (ids + 0.25) * WIDTH]).to(dtype)


def exact_numbers(bins: Bins, scores: Tensor) -> Tensor:
    """Return the fine bin of each score by whole numbers of Python."""
    assert bins.outside is not None
    ids, left, found = bins.outside.ids.tolist(), bins.outside.num_left, []
    for score in scores.double().tolist():
        fine = round(score * bins.fine / bins.width)
        coarse = fine // bins.fine
        place = coarse + left if 0 <= coarse < bins.window else ids.index(float(coarse))
        found.append(place * bins.fine + fine % bins.fine)
    return torch.tensor(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fine", [8, 32, 64])
def test_rows_are_in_their_bins_at_the_limit_of_float32(fine: int, dtype: torch.dtype) -> None:
    bins, scores = window_at_the_limit(fine, 301, dtype)
    index, _ = locate(bins, scores[None], slice(None))
    exact = exact_numbers(bins, scores)
    assert torch.equal(index[0], exact)
    # Control: the same numbers in float32, in which every second one above 2^24 is another.
    assert not torch.equal(exact.float().long(), exact)


@pytest.mark.parametrize("offset", [2.0**26, -(2.0**26), 1e9])
def test_window_and_outside_agree_far_from_zero(offset: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 numbers of coarse bins are then multiples of 8, and no end of a window is a whole number of them."""
    monkeypatch.setattr(bins_of, "FEWEST_ROWS", 0)
    monkeypatch.setattr(bins_of, "most_bins", lambda num_rows: 4097)
    scores = (offset + 64.0 * torch.arange(-400, 400)).float()
    bins = cover_bulk(scores, 0.1, 8)
    assert bins is not None
    assert bins.outside is not None
    ids = compact_ids(bins, 10)
    assert ids is not None
    assert bool((ids.diff() > 0).all())  # every bin exists once
    index, _ = locate(bins, scores[None], slice(None))
    assert index[0].diff().min() > 0
    assert int(index.max()) < bins.num_fine
