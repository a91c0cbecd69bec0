"""The kernels in C: equal to the definition and to torch, for any layout of its arguments; what it leaves to torch."""

from __future__ import annotations

import functools
import itertools
import math
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from loss_cases import normal, why_torch_computes
from on_ranks import on_ranks
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fullrank
from fullrank.kernels import native
from fullrank.kernels.smooth_ap.sums import smooth_ap_and_gradient
from fullrank.kernels.spread import spread_of
from fullrank.losses.pooled.pool import PerClass, Pool
from fullrank.losses.rows import unit_rows

needs_extension = pytest.mark.skipif(not native.FUNCTIONS, reason=why_torch_computes())


LIMITS = {torch.float32: 1e-6, torch.float64: 1e-13}
ALL = sys.maxsize


def rows(num_classes: int, num_rows: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores, positives and members, which hold the positives."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_classes, num_rows, generator=generator, dtype=torch.float64).to(dtype)
    positive = torch.rand(num_classes, num_rows, generator=generator) < 0.3
    return scores, positive, positive | (torch.rand(num_classes, num_rows, generator=generator) < 0.7)


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

    expected = native.smooth_ap(scores, positive, member, None, 0.1, True)
    found = native.smooth_ap(laid_out(scores), laid_out(positive), laid_out(member), None, 0.1, True)
    assert all(map(torch.equal, found, expected))
    assert found[1].stride() == torch.empty_like(laid_out(scores)).stride()  # as the compiler is told


@needs_extension
@pytest.mark.parametrize(("dtype", "widest", "limit"), [(torch.float32, 80, 5e-7), (torch.float64, 600, 1e-15)])
def test_a_pair_to_the_last_digits(dtype: torch.dtype, widest: float, limit: float) -> None:
    """Of one positive and one negative: s / (1 + s) of the sigmoid s, and its slope, a relative error for each gap."""
    gaps = torch.linspace(-widest, widest, 4001, dtype=torch.float64).to(dtype).double()
    scores = torch.stack([-gaps / 2, gaps / 2], dim=1)
    above, below = gaps.sigmoid(), (-gaps).sigmoid()
    positive = torch.tensor([[True, False]]).expand_as(scores)
    loss, gradient, _ = native.smooth_ap(scores.to(dtype), positive, None, None, 1.0, True)
    assert (loss / (above / (1 + above)) - 1).abs().max() <= limit
    assert (gradient[:, 1] / (above * below / (1 + above).square()) - 1).abs().max() <= 2 * limit


@needs_extension
@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 85.0), (torch.float64, 700.0)])
def test_rows_as_far_apart_as_keys_reach(dtype: torch.dtype, far: float) -> None:
    """Each of the others is above or below by 1, not by a half: positives have 2 of 3 and 1 of 2 rows above them."""
    scores = far * torch.tensor([[-3, -1, 0, 1, 2, 3]], dtype=dtype)
    positive = torch.tensor([[False, False, True, True, False, True]])
    loss, _, _ = native.smooth_ap(scores, positive, None, None, 1.0, True)
    assert loss.item() == pytest.approx((1 / 4 + 1 / 3 + 0) / 3, rel=LIMITS[dtype])


@needs_extension
def test_the_default_device_is_not_asked() -> None:
    scores, positive, _ = rows(1, 50, torch.float32)
    with torch.device("meta"):
        found = native.smooth_ap(scores, positive, None, None, 0.1, True)
    assert all(map(torch.equal, found, native.smooth_ap(scores, positive, None, None, 0.1, True)))


@needs_extension
def test_what_it_leaves_to_torch() -> None:
    scores, positive, _ = rows(1, 50, torch.float32)
    assert native.smooth_ap(scores, positive, None, None, 0.1, True) is not None
    for given in (
        (scores.half(), positive, None, None, 0.1, True),
        (scores.to("meta"), positive.to("meta"), None, None, 0.1, True),
        (scores, positive, None, None, 1e-38, True),
        (scores.index_fill(1, torch.tensor([7]), torch.inf), positive, None, None, 0.1, True),
        (scores[:, :0], positive[:, :0], None, None, 0.1, True),
    ):
        assert native.smooth_ap(*given) is None


@needs_extension
def test_the_same_bits_with_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bins, whose rows are cut into parts: large pools of one class and of several."""
    monkeypatch.setattr(native, "_MANY_ROWS", 1)
    threads = torch.get_num_threads()
    for num_classes, num_rows, weight in ((3, 100_001, None), (1, 100_001, torch.rand(100_001))):
        scores, positive, _ = rows(num_classes, num_rows, torch.float32)
        found = []
        try:
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                given = scores, positive, None, weight, 0.1, True
                found.append(smooth_ap_and_gradient(*given, key_weight=weight))
        finally:
            torch.set_num_threads(threads)
        assert all(map(torch.equal, found[0], found[1]))
        assert all(map(torch.equal, found[0], found[2]))
    monkeypatch.setattr(native, "_MANY_ROWS", sys.maxsize)
    of_one_part = smooth_ap_and_gradient(*given, key_weight=weight)
    for ours, other in zip(found[0], of_one_part):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-9)


@needs_extension
@pytest.mark.parametrize("num_classes", [1, 3, 70])
@pytest.mark.parametrize(
    ("weighting", "temperature", "dtype"),
    [
        *((None, None, torch.float32), (None, 0.3, torch.float64), ("rows", None, torch.float64)),
        *(("positives", None, torch.float32), ("rows", 0.3, torch.float32)),
    ],
)
def test_a_small_pool_in_one_step(
    weighting: str | None,
    temperature: float | None,
    dtype: torch.dtype,
    num_classes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The module takes the short way, which is the long one to the last bit."""
    file = sys.modules[fullrank.SmoothAPLoss.__module__]
    counted, plain = [], file.try_in_c
    monkeypatch.setattr(file, "try_in_c", lambda *given: counted.append(plain(*given)) or counted[-1])
    options = {"temperature": temperature, "weighting": weighting or "rows"}
    loss, long = (kind(num_classes, **options) for kind in (fullrank.SmoothAPLoss, TheLongWay))
    for seed, count in enumerate((64, 64, 300, 64, 1400)):  # with several classes the spread is that of a sample
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randn(count, num_classes, generator=generator, dtype=torch.float64).to(dtype)
        # The last of several classes has no positive.
        targets = torch.randint(max(2, num_classes - 1), (count,), generator=generator)
        logits = [scores.clone().requires_grad_() for _ in range(2)]
        weight = None if weighting is None else torch.rand(count, generator=generator)
        values = loss(logits[0], targets, sample_weight=weight), long(logits[1], targets, sample_weight=weight)
        for value in values:
            (value / 3).backward()
        assert torch.equal(*values)
        assert torch.equal(logits[0].grad, logits[1].grad)
    assert loss.current_temperature == pytest.approx(0.3 if temperature else counted[-1][-1], rel=0)
    assert [found is not None for found in counted] == [True] * 5


class TheLongWay(fullrank.SmoothAPLoss):
    def compute_per_class(self, pool: Pool) -> PerClass:
        assert pool.scores is not None  # now the rows are no longer as they were given
        return super().compute_per_class(pool)


@needs_extension
@pytest.mark.parametrize(("queue_size", "num_classes"), [(0, 1), (60, 1), (60, 3)])
@on_ranks()
def test_a_small_pool_of_all_ranks_and_of_a_queue(rank: int, queue_size: int, num_classes: int) -> None:
    """Loss, gradient and queue are those of the long way to the last bit, alone and over the ranks."""
    file = sys.modules[fullrank.SmoothAPLoss.__module__]
    with pytest.MonkeyPatch.context() as patch:
        counted, plain = [], file.try_in_c
        patch.setattr(file, "try_in_c", lambda *given: counted.append(plain(*given)) or counted[-1])
        for gathers in (False, True):
            kinds = fullrank.SmoothAPLoss, TheLongWay
            losses = [kind(num_classes, queue_size, gather_distributed=gathers) for kind in kinds]
            counted.clear()
            for seed, count in enumerate((30, 30, 50, 9, 20, 0, 30, 9, 3000, 40)):
                count = 0 if seed == 4 and rank == 0 else count * (rank + 1)
                scores, positive, _ = rows(num_classes, count, torch.float32, seed + rank)
                given = [scores.t().contiguous().requires_grad_() for _ in losses]
                found = [loss(logits, positive.sum(dim=0) % max(2, num_classes)) for loss, logits in zip(losses, given)]
                for value in found:
                    (value / 3).backward()
                assert torch.equal(*found)
                assert torch.equal(*[logits.grad for logits in given])
                assert all(map(torch.equal, *([*loss.queue.rows()[:3], loss.queue.checksum] for loss in losses)))
                assert losses[0].current_temperature == losses[1].current_temperature
            assert sum(one is not None for one in counted) >= 3  # not in calls 1, 2, 4 and 8, nor without rows


def _tangent(loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(x, torch.ones_like(x)), y)).tangent


def _traced(loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.jit.trace(lambda *rows: loss(*rows), (x, y), check_trace=False)(-x, y)


def _of_fake_tensors(loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return loss(x, y)


def _batch_of_gradients(loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    given = x.requires_grad_()
    return torch.autograd.grad(loss(given, y), given, torch.tensor([1.0, 2.0]), is_grads_batched=True)[0]


def _changed_in_place(loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = x.clone().requires_grad_()
    value = loss(logits, y)
    logits.detach().sigmoid_()
    value.backward()
    return logits.grad


WATCHED: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "forward mode": _tangent,
    "trace": _traced,
    "fake tensors": _of_fake_tensors,
    "several gradients": _batch_of_gradients,
    "in place": _changed_in_place,
    "negative bit": lambda loss, x, y: loss(torch._neg_view(x), y),
    "zeros without memory": lambda loss, x, y: loss(torch._efficientzerotensor(x.shape), y),
    "the largest numbers": lambda loss, x, y: loss(3.3e38 * x.sign() * (1 - x.abs() / 1e4), y),
}


@needs_extension
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "num_classes"), [*zip(WATCHED, itertools.cycle([1, 3]))])
def test_the_step_is_left_to_torch_where_something_follows_it(way: str, num_classes: int) -> None:
    """The value, the gradient or the error is that of the long way. Eval mode has no hints that look at the rows."""
    found = []
    for kind in (fullrank.SmoothAPLoss, TheLongWay):
        x, targets = normal(40, num_classes).float(), torch.arange(40) % max(2, num_classes)
        try:
            found.append(WATCHED[way](kind(num_classes).eval(), x, targets))
        except (RuntimeError, NotImplementedError) as error:
            found.append(torch.tensor([*f"{type(error)}: {error}".encode()]))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@needs_extension
def test_a_subclass_with_another_formula_never_takes_the_step() -> None:
    class Half(fullrank.SmoothAPLoss):
        def compute_per_class(self, pool: Pool) -> PerClass:
            return PerClass(super().compute_per_class(pool).values / 2, pool.positive.any(dim=1))

    class Wide(fullrank.SmoothAPLoss):
        spread_multiple = 0.3

    class Fewer(fullrank.SmoothAPLoss):
        """It assigns to the pool: other positives, members or weights than those of the rows."""

        def compute_per_class(self, pool: Pool) -> PerClass:
            pool.positive = pool.positive & (torch.arange(40) % 2 == 0)
            return super().compute_per_class(pool)

    class Weighted(fullrank.SmoothAPLoss):
        def compute_per_class(self, pool: Pool) -> PerClass:
            pool.weight = torch.arange(1.0, 41.0)
            return super().compute_per_class(pool)

    x, targets = normal(40, 3).float(), torch.arange(40) % 3
    for kind in (Fewer, Weighted):
        loss = kind(3, temperature=0.1)
        values = [loss(x, targets).item() for _ in range(6)]
        assert values == values[:1] * 6
        assert values[0] != fullrank.SmoothAPLoss(3, temperature=0.1)(x, targets).item()
    half, wide, plain = (kind(3, gather_distributed=False) for kind in (Half, Wide, fullrank.SmoothAPLoss))
    for _ in range(6):
        torch.testing.assert_close(2 * half(x, targets), plain(x, targets), rtol=1e-6, atol=0)  # of float32
        wide(x, targets)
        assert wide.current_temperature == pytest.approx(3 * plain.current_temperature)


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_the_spread_of_a_step_is_that_of_torch(dtype: torch.dtype) -> None:
    """To the last bit, in samples of rows and classes; what is not usual is left to torch."""
    generator = torch.Generator().manual_seed(0)
    for num_rows, num_classes in ((2, 1), (5, 1), (4096, 1), (4097, 1), (9000, 1), (500, 9), (90, 65), (200, 151)):
        scores = torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64).exp().to(dtype)
        targets = torch.arange(num_rows) % max(2, num_classes)
        found = native.smooth_ap_rows(scores, targets, None, None, -100, None, 1.0, False, ALL)
        assert found[3] == spread_of(scores.t().contiguous(), None)
    for scores, targets in (
        (torch.ones(8, dtype=dtype), torch.arange(8) % 2),
        (torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 1], dtype=dtype), torch.arange(8) % 2),
        (1000 + torch.arange(8, dtype=dtype) / 100, torch.arange(8) % 2),
        (torch.tensor([63.0] * 4 + [64.0] * 4, dtype=dtype), torch.arange(8) % 2),  # as bfloat16 rounds
        (torch.arange(8, dtype=dtype) / 0, torch.arange(8) % 2),
        (torch.arange(8, dtype=dtype), torch.arange(8)),
        (torch.arange(8, dtype=dtype), -(torch.arange(8) % 2)),
    ):
        assert native.smooth_ap_rows(scores[:, None], targets, None, None, -100, None, 1.0, False, ALL) is None
    ordinary = torch.arange(8, dtype=dtype)[:, None], torch.arange(8) % 2
    assert native.smooth_ap_rows(*ordinary, None, None, -100, None, 1.0, True, 4 * 8)[1].tolist() == [True]
    without_positive = ordinary[0], 0 * ordinary[1]
    assert native.smooth_ap_rows(*without_positive, None, None, -100, None, 1.0, True, ALL)[1].tolist() == [False]
    for ignored, temperature, most in ((1, None, ALL), (-100, 1e-38, ALL), (-100, None, 4 * 8 - 1)):
        assert native.smooth_ap_rows(*ordinary, None, None, ignored, temperature, 1.0, True, most) is None


# --- the gate --------------------------------------------------------------------------------------------------------


def _freed(tensor: Tensor) -> Tensor:
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


class Subclass(Tensor):
    """A tensor whose operations might mean something else."""


NOT_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "negative bit": lambda x: x.neg()._neg_view(),
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "freed": _freed,
    "meta": lambda x: x.to("meta"),
    "subclass": lambda x: x.as_subclass(Subclass),
    "sparse": lambda x: x.to_sparse(),
    "fewer rows": lambda x: x[..., :-1],
    "another dtype": lambda x: x.to(torch.int16),
}


def calls_of_c() -> dict[str, tuple[Callable[..., object], list[Tensor]]]:
    """Return calls of C by name, and their tensors; the first ones say how many rows there are, and of which dtype."""
    scores, positive, member = rows(1, 60, torch.float32)
    weight, first, targets = torch.rand(60) + 0.5, torch.zeros(1), positive[0].long()
    table, out, rest = torch.rand(3, 1, 81), torch.empty(1, 60), {"scale": 8.0, "first": first}
    rates = functools.partial(native.rates, torch.rand(3, 4, 1, 81).double(), scores, **rest, factor=torch.ones(1))
    evaluate = functools.partial(native.evaluate, table, **rest)
    of_terms = functools.partial(evaluate, scores, None, out=out, of_positives=table.double())
    risk = [scores, positive, member, member[0], positive[0], weight, weight, first.double() + 1]
    graded = [weight, weight.double(), member[0], weight.double(), targets.sort().values]
    of_block = [rows(1, 60, torch.float32)[0].view(6, 10), weight[:6].clone(), weight[:6].double()]
    labels = torch.arange(6), torch.arange(10)
    return {
        "cross_entropy": (lambda *given: native.terms_of_pairs("cross_entropy", *given, 2), of_block),
        "sigmoid_of_pairs": (lambda *given: native.terms_of_pairs("sigmoid_of_pairs", *given, 2), of_block),
        "terms_of_labels": (lambda *given: native.terms_of_labels(*given, 2), [of_block[0], *labels, of_block[2]]),
        "smooth_ap_rows": (
            lambda *given: native.smooth_ap_rows(*given, -100, 0.1, 1.0, True, ALL),
            [scores.t().contiguous(), targets, weight, weight],
        ),
        "smooth_ap": (
            lambda x, w, k: native.smooth_ap(x, positive, member, w, 0.1, True, k),
            [scores, weight, weight],
        ),
        "ndcg": (lambda *given: native.ndcg(*given, 0.1, None, True, True, ALL), graded),
        "soft_maximum": (lambda *given: native.soft_maximum(given, 0.1, 0, True, True), risk),
        "moments": (
            lambda x, m, w: native.moments(x, m, 8.0, first, 80, 3, weight=w),
            [scores, member, weight[None]],
        ),
        "evaluate": (
            lambda x, m, o, w: evaluate(x, m, out=o, weight=w) or True,
            [scores, member, out, weight[None]],
        ),
        "rates": (lambda p, w: rates(positive=p, weight=w), [positive, weight]),
        "evaluate of terms": (
            lambda p, w, t: of_terms(positive=p, weight=w, terms=t) or True,
            [positive, weight, rates(positive=positive, weight=weight)[2]],
        ),
    }


def is_refused(call: Callable[..., object], given: list[Tensor]) -> bool:
    """Return whether a call raises, or returns None, so that torch computes."""
    try:
        return call(*given) is None
    except (ValueError, RuntimeError, NotImplementedError):
        return True


@needs_extension
@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_only_numbers_in_plain_memory_pass_the_gate(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each dtype that C reads. The control: the tensors as they were."""
    scores, positive, member = rows(1, 60, torch.float32)
    changed, is_of_all = NOT_PLAIN[kind], kind in ("fewer rows", "another dtype")
    for tensor in (scores[0], scores[0].double(), positive[0].long(), member[0]):
        if tensor.is_floating_point() or kind != "negative bit":
            given, out = [(scores, scores.dtype, scores.shape)], torch.empty_like(scores)
            passes = functools.partial(native._computes, "unit_rows", given, (*scores.shape,), out)
            monkeypatch.setitem(native.FUNCTIONS[scores.dtype], "unit_rows", lambda *_: 1)
            assert passes(tables=[(tensor, tensor.dtype, (60,))])
            assert not passes(tables=[(changed(tensor), tensor.dtype, (60,))])
            monkeypatch.undo()
    if kind == "freed":
        return  # torch reads it, and the process ends
    assert is_of_all or not native.is_usable(changed(scores))
    for name, (call, given) in calls_of_c().items():
        assert not is_refused(call, given)
        for place, tensor in enumerate(given):
            is_first = place == 0 and is_of_all and tensor.is_floating_point()
            converts = name == "smooth_ap" and place and kind in ("another dtype", "sparse")  # torch does, or raises
            has_none = kind == "negative bit" and not tensor.is_floating_point()
            if not (is_first or converts or has_none or (kind == "sparse" and name in ("ndcg", "soft_maximum"))):
                assert is_refused(call, [*given[:place], changed(tensor), *given[place + 1 :]]), (name, place)


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_unit_rows_and_the_gradient_through_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of zeros too. Rows that are not usual, and what the gate refuses, are left to torch."""
    rows, gradient = normal(9, 37, seed=0).to(dtype), normal(9, 37, seed=1).to(dtype)
    rows[4], rows[5] = 0, rows[5] * 1e-25
    leaf = rows.double().requires_grad_()
    exact = leaf / leaf.norm(dim=1, keepdim=True).masked_fill(leaf.detach().norm(dim=1, keepdim=True) == 0, 1.0)
    (of_rows,) = torch.autograd.grad(exact, leaf, 3.0 * gradient.double())
    found = native.unit_rows(rows.t().contiguous().t())
    assert (found - exact.detach()).abs().max() <= 2 * torch.finfo(
        dtype
    ).eps  # a product with 1 / length, rounded twice
    scale = of_rows.norm(dim=1, keepdim=True)
    error = (native.unit_gradient(rows, found, gradient, 3.0) - of_rows).norm(dim=1, keepdim=True) / scale
    assert error.max() <= 20 * torch.finfo(dtype).eps  # two sums of 37 in 16 parts, 7 roundings each, and a few more
    assert (gradient * 3.0 / rows.norm(dim=1, keepdim=True) - of_rows)[0].norm() > 0.1 * scale[0], "the control"
    for number in (math.nan, math.inf, -math.inf, *((1e200, 1e-200) if dtype == torch.float64 else ())):
        spoiled = rows.clone()
        spoiled[2] = number
        assert native.unit_rows(spoiled) is None
        if math.isfinite(number):
            assert (unit_rows(spoiled)[2].norm() - 1).abs() <= 37 * torch.finfo(dtype).eps  # a sum of so many
    for change in (rows.neg()._neg_view(), rows.as_subclass(Subclass), rows[:0], rows.to("meta")):
        assert native.unit_rows(change) is None
        assert native.unit_gradient(rows, found, change, 1.0) is None
    monkeypatch.setattr(native, "FUNCTIONS", {})
    assert native.unit_rows(rows) is None
    assert (unit_rows(rows) - found).abs().max() <= 4 * torch.finfo(dtype).eps


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_weights_of_rows_and_of_classes(dtype: torch.dtype) -> None:
    """C reads both weights with one stride; one of each kind it leaves to torch. The control has other weights."""
    scores, positive, member = rows(3, 90, dtype)
    of_rows = torch.rand(2, 90, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    expected = smooth_ap_and_gradient(scores, positive, member, of_rows[0], 0.1, True, key_weight=of_rows[1])
    of_classes = of_rows[:, None].repeat(1, 3, 1)
    for weight, key_weight in itertools.product((of_rows[0], of_classes[0]), (of_rows[1], of_classes[1])):
        given = scores, positive, member, weight, 0.1, True
        assert (native.smooth_ap(*given, key_weight) is None) == (weight.ndim != key_weight.ndim)
        for ours, theirs in zip(smooth_ap_and_gradient(*given, key_weight=key_weight), expected):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=LIMITS[dtype])
        others = smooth_ap_and_gradient(*given, key_weight=key_weight.flip(-1))
        assert (others[0] - expected[0]).abs().max() > 1e-4
    for key_weight in of_rows[1], of_classes[1]:
        given = scores, positive, member, None, 0.1, True, key_weight
        assert all(map(torch.equal, native.smooth_ap(*given), native.smooth_ap(*given[:-1], of_rows[1])))


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_a_soft_maximum_leaves_to_torch_what_is_not_usual(dtype: torch.dtype) -> None:
    """And reads columns of any layout; each row of the table has its control above it."""
    scores, positive, member = rows(3, 60, dtype)
    rest, scales = (0.1, 0, True, True), torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    given = scores, positive, member, member[0], positive[0], scores[0].abs() + 1, scores[0].abs() + 1, scales
    expected = native.soft_maximum(given, *rest)
    spread = [None if tensor is None else tensor.repeat_interleave(2, dim=-1)[..., ::2] for tensor in given]
    assert all(map(torch.equal, native.soft_maximum(spread, *rest), expected))
    without = native.soft_maximum(given, 0.1, 0, False, False)
    assert torch.equal(without[0], expected[0])
    assert without[1].numel() == without[4].numel() == 0
    for value in (math.inf, -math.inf, math.nan):
        for place, column in ((0, scores), (7, scales)):
            spoiled = column.clone()
            spoiled.view(-1)[1] = value
            assert native.soft_maximum((*given[:place], spoiled, *given[place + 1 :]), *rest) is None
    for budget, power in ((0.0, 0), (1.1, 0), (math.nan, 0), (0.1, -1), (0.1, 101)):
        assert native.soft_maximum(given, budget, power, True, True) is None
    assert native.soft_maximum((scores.half(), *given[1:]), *rest) is None


@pytest.mark.parametrize("num_rows", [40, 5000, 40_000])
@pytest.mark.parametrize("kind", ["negative bit", "zeros without memory", "subclass"])
def test_rows_elsewhere_give_their_loss(kind: str, num_rows: int) -> None:
    """For few rows, pairs and bins, with their gradient, and scores in the queue. The control has other numbers."""
    changed, targets, weight = NOT_PLAIN[kind], torch.arange(num_rows) % 5 // 4, normal(num_rows).float().abs()
    scores = 0 * weight if kind == "zeros without memory" else 2 * targets + normal(num_rows, seed=1).float()
    rows = [(scores, targets, weight), (scores, targets, weight.flip(0))]
    rows += [(scores, changed(targets), weight)] * (kind == "subclass")
    rows += [(scores, targets, changed(weight))] * (kind != "zeros without memory")
    rows += [(changed(scores), targets, weight)] * (kind != "subclass")
    for make in (fullrank.SmoothAPLoss, fullrank.RecallAtQuantileLoss, fullrank.PAUCAtBudgetLoss):
        found, losses = [], [make(1, queue_size=100) for _ in rows]
        for loss, (x, y, w) in zip(losses, rows):
            for _ in range(2):
                leaf = x.detach().requires_grad_()
                value = loss(leaf, y, sample_weight=w).as_subclass(Tensor)
            found.append((value, torch.autograd.grad(value, leaf)[0].as_subclass(Tensor)))
        for value, gradient in found[2:]:
            torch.testing.assert_close(value, found[0][0], rtol=1e-5, atol=0)
            torch.testing.assert_close(gradient, found[0][1], rtol=1e-3, atol=1e-7)
        assert (found[1][1] - found[0][1]).abs().sum() > 1e-2 * found[0][1].abs().sum()
        assert torch.equal(losses[-1].queue.rows().logits, losses[0].queue.rows().logits)


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
def test_numbers_that_are_not_those_of_tables_raise(dtype: torch.dtype) -> None:
    scores = torch.zeros(1, 5, dtype=dtype)
    for num_bins, p in ((0, 1), (1, 0)):
        with pytest.raises((ValueError, RuntimeError)):
            native.moments(scores, None, 1.0, torch.zeros(1), num_bins, p)


@needs_extension
@pytest.mark.parametrize("num_classes", [1, 3])
def test_a_class_that_does_not_exist_raises_in_every_call(num_classes: int) -> None:
    """From the third call on, only C looks at the targets of a step: at those next to the last class too."""
    loss, generator = fullrank.SmoothAPLoss(num_classes), torch.Generator().manual_seed(0)
    kinds = max(2, num_classes)
    for _ in range(8):
        logits, targets = torch.randn(40, num_classes, generator=generator), torch.arange(40) % kinds
        for wrong in (kinds, -1):
            with pytest.raises(ValueError, match=f"targets: expected .*, got {wrong}"):
                loss(logits, targets.index_fill(0, torch.tensor([5]), wrong))
            spoiled = targets.index_fill(0, torch.tensor([5]), wrong)
            assert native.smooth_ap_rows(logits, spoiled, None, None, -100, None, 0.1, False, ALL) is None
        loss(logits, targets)


# --- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the library, its record and its sources, which :func:`native._load` loads."""
    for source in Path(native.__file__).parent.glob("*.*"):
        if source.suffix in (".library", ".record", ".c", ".inc"):
            shutil.copy(source, tmp_path)
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("FULLRANK_NATIVE", "1")
    return tmp_path / "sums.library"


def _truncate(library: Path) -> None:
    library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])


def _with_other_sources(library: Path) -> None:
    library.with_name("pairs.inc").write_text("// another line\n")


def _not_a_library(library: Path) -> None:
    library.write_bytes(bytes(library.stat().st_size))


CHANGED: dict[str, Callable[[Path], object]] = {
    r"got \d+ of \d+ bytes": _truncate,
    "got one of other sources": _with_other_sources,
    "got one without a record": lambda library: library.with_suffix(".record").unlink(),
    "got one without a record of": lambda library: library.with_suffix(".record").write_text("nothing"),
    "got .*sums.library": _not_a_library,
}


@needs_extension
@pytest.mark.parametrize("text", CHANGED)
def test_another_library_than_setup_py_built_is_not_used(text: str, library: Path) -> None:
    """One warning says so, and torch computes; it is off with ``FULLRANK_NATIVE=0``."""
    CHANGED[text](library)
    with pytest.warns(UserWarning, match=text) as caught:
        assert native._load() == {}
    assert len(caught) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLRANK_NATIVE", "off")
        assert why_torch_computes() == "FULLRANK_NATIVE switches the library in C off"
        assert native._load() == {}


@needs_extension
def test_a_library_without_sources_is_that_of_a_wheel(library: Path) -> None:
    for source in [*library.parent.glob("*.c"), *library.parent.glob("*.inc")]:
        source.unlink()
    assert native._load().keys() == native.FUNCTIONS.keys()


def test_without_a_library_the_first_step_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the import, not the second step, and not where the user leaves it out."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(native, "FUNCTIONS", {})
    step = functools.partial(fullrank.losses.smooth_ap, torch.tensor([[2.0], [1.0]]), torch.tensor([0, 1]))
    for value, messages in (("0", 0), ("1", 1)):
        monkeypatch.setenv("FULLRANK_NATIVE", value)
        native._warn_if_missing.cache_clear()
        assert native._load() == {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
            step()
        assert len(caught) == messages
    assert "sums.library: expected the library in C, got none" in str(caught[0].message)
    native._warn_if_missing.cache_clear()


@needs_extension
@pytest.mark.parametrize("value", ["0", "false", "off", "OFF", "1", "true", "on", "True", ""])
def test_it_can_be_left_out(value: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLRANK_NATIVE", value)
    assert bool(native._load()) == (value.lower() in ("1", "true", "on", ""))


@pytest.mark.parametrize("value", ["no", "2", "00", "native"])
def test_other_values_of_the_variable_raise(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULLRANK_NATIVE", value)
    with pytest.raises(ValueError, match=f"^FULLRANK_NATIVE: expected 0, 1, true, false, on or off, got '{value}'"):
        native._load()


FLAGS = ["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]  # as in setup.py


ROOT = Path(__file__).parents[2]


def driven(folder: Path, name: str, calls: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Return the run of native_drive.c, built with ``flags`` and the sources that are in ``folder``, or else ours."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    for path in [*ROOT.glob("kernels/native/*.[ci]*"), Path(__file__).with_name("native_drive.c")]:
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists():
            shutil.copy(path, copy)
    command = ["gcc", *flags, "tests/kernels/native_drive.c", "-o", name, "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return subprocess.run(
        [str(folder / name), "0", str(calls)], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.full
def test_the_same_bits_with_any_instructions(tmp_path: Path) -> None:
    """Of 500 random calls; all limits of sizes and numbers hold. The control lets the compiler contract products."""

    def result(name: str, *flags: str) -> str:
        run = driven(tmp_path, name, 500, *flags)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    expected, processor = result("plain", *FLAGS, "-DMANY="), Path("/proc/cpuinfo")
    flags = processor.read_text().split() if processor.exists() else []
    for target in ("avx2,fma", "avx512f"):
        if set(target.split(",")) <= set(flags):
            one = f'-DMANY=__attribute__((target("{target}")))'
            assert result(target.replace(",", "_"), *FLAGS, one) == expected
            if target == "avx2,fma":
                assert result("contracted", *FLAGS[:-1], "-ffp-contract=fast", one) != expected


@pytest.mark.full
@pytest.mark.parametrize("is_control", [False, True])
def test_no_sanitizer_finds_an_error(is_control: bool, tmp_path: Path) -> None:
    """Neither of addresses nor of undefined behaviour, in 40 calls; the control allocates too little."""
    asked = [f"-print-file-name={name}" for name in ("libasan.so", "libubsan.so")] if shutil.which("gcc") else []
    libraries = [subprocess.check_output(["gcc", option], text=True).strip() for option in asked]
    if not libraries or not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("there is no gcc with sanitizers")
    if is_control:
        text = (ROOT / "kernels/native/sums.c").read_text("utf-8")
        (tmp_path / "kernels/native").mkdir(parents=True)
        (tmp_path / "kernels/native/sums.c").write_text(text.replace("(9 * (num_rows)", "(2 * (num_rows)"), "utf-8")
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
    run = driven(tmp_path, "clean", 40, "-O0", "-g", *sanitizers, "-DMANY=")
    assert ("AddressSanitizer" in run.stderr) == is_control, run.stderr
    assert (run.returncode == 0) == (not is_control), run.stdout + run.stderr


def test_many_weighted_rows_of_classes_of_which_some_are_ignored() -> None:
    """Their scores are a transpose, so a gradient like them is none that C can write."""
    targets = torch.arange(9_000) % 3
    targets[::7] = -100
    gradients = []
    for kept in (torch.ones(9_000, dtype=torch.bool), targets >= 0):  # ignored rows count as removed ones
        logits = normal(9_000, 3, seed=0).float()[kept].requires_grad_()
        weight = torch.linspace(0.5, 1.5, 9_000)[kept]
        fullrank.losses.smooth_ap(logits, targets[kept], 0.1, sample_weight=weight).backward()
        gradients.append(logits.grad[targets[kept] >= 0])
    torch.testing.assert_close(*gradients, rtol=2e-6, atol=2e-6 * float(gradients[1].abs().max()))


def _terms_by_hand(kind: str, scores: Tensor, labels: Tensor, others: Tensor, first: int) -> Tensor:
    """Return the loss of each anchor (b,), by the definitions, where the pair of row i is candidate ``first + i``."""
    losses = []
    for i, row in enumerate(scores):
        own = torch.arange(len(row)) == first + i
        if kind == "sigmoid_of_pairs":
            losses.append(F.softplus(-row[own]).sum() + F.softplus(row[~own], threshold=700).sum())
            continue
        same = (others == labels[i]) & ~own if kind == "labels" else own
        if not same.any():
            losses.append(0.0 * row.sum())
            continue
        inside, outside = row[same].logsumexp(0), row[~same & ~own].logsumexp(0)
        losses.append(F.softplus(outside - inside, threshold=700) + inside - row[same].mean())
    if kind == "both ways":
        square = scores[:, : len(scores)].t()
        return torch.stack(losses) + _terms_by_hand("cross_entropy", square, labels, others, 0)
    return torch.stack(losses)


@needs_extension
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", ["cross_entropy", "both ways", "sigmoid_of_pairs", "labels"])
def test_terms_of_pairs_are_those_of_the_definitions(kind: str, dtype: torch.dtype) -> None:
    """With widths around those of the parts of a sum, candidates that are left out, and pairs far apart."""
    for size, spread, first in ((9, 1.0, 0), (16, 3.0, 4), (513, 1.0, 7), (1_100, 20.0, 0), (40, 300.0, 3)):
        first = 0 if kind == "both ways" else first
        scores = (spread * normal(7, size, seed=size)).to(dtype)
        weight, labels, others = torch.rand(7, dtype=torch.float64), torch.arange(7) % 3, torch.arange(size) % 5
        scores[2, [1, 3]] = -math.inf
        others[first : first + 7] = labels
        exact = scores.double().requires_grad_()
        wanted = _terms_by_hand(kind, exact, labels, others, first) @ weight
        (gradient,) = torch.autograd.grad(wanted, exact)
        found, positives = scores.clone(), scores.diagonal(first)[:7].clone()
        if kind == "labels":
            total = native.terms_of_labels(found, labels, others, weight, first)
        else:
            name = kind.replace("both ways", "cross_entropy")
            total = native.terms_of_pairs(name, found, positives, weight, first, kind == "both ways")
        # A sum has up to 32 roundings in each of 16 parts and 16 more, an exponential has 10, and a gap that of scores.
        bound = (60 + 2 * scores[scores.isfinite()].abs().max()) * torch.finfo(dtype).eps
        assert abs(total - wanted) <= bound * wanted.abs()
        assert (found - gradient).norm() <= bound * gradient.norm()
        assert (found.roll(1, 0) - gradient).norm() > 0.1 * gradient.norm(), "the control"


@needs_extension
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_score_that_is_not_finite_reaches_the_terms_of_its_row_alone(number: float) -> None:
    for name, both_ways in (("cross_entropy", False), ("cross_entropy", True), ("sigmoid_of_pairs", False)):
        scores, weight = normal(4, 20, seed=1).float(), torch.ones(4, dtype=torch.float64)
        scores[1, 9] = number
        total = native.terms_of_pairs(name, scores, scores.diagonal().clone(), weight, 0, both_ways)
        assert not total.isfinite()
        assert scores[[0, 2, 3]].isfinite().all()
        assert name != "cross_entropy" or scores[1].isnan().sum() >= 19
    scores[1, 9], labels = number, torch.arange(20) % 4
    assert native.terms_of_labels(scores, labels[:4], labels, weight, 0).isnan()
    assert scores[1].isnan().all()
