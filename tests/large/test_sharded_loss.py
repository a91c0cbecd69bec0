"""ShardedLoss: what it wraps, when it gathers, what it raises and saves. tests/conformance has losses and gradients."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from batches import portion
from gradient_cases import forced
from loss_cases import step
from on_ranks import common_error, on_ranks, same
from torch import Tensor

import fullrank
from fullrank import PAUCAtBudgetLoss, RecallAtQuantileLoss, SmoothAPLoss
from fullrank.large import ShardedLoss, smooth_ap
from fullrank.losses.pooled.pool import PoolCounts

SIGMOID = {"quantile": 0.1, "temperature": 0.1, "surrogate": "sigmoid"}
KINDS: dict[str, Callable[..., Any]] = {
    "smooth_ap": lambda *given, **options: SmoothAPLoss(*given, temperature=0.1, **options),
    "recall": lambda *given, **options: RecallAtQuantileLoss(*given, **SIGMOID, **options),
    "pauc": lambda *given, **options: PAUCAtBudgetLoss(*given, beta=0.1, surrogate="trapezoid", **options),
}


def draw(count: int, num_classes: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of scores in [-5, 5], both ends included, a twentieth of them positive."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, num_classes, generator=generator).clamp_(-5, 5)
    logits[:2, 0] = torch.tensor([-5.0, 5.0])
    if num_classes > 1:
        return logits, torch.arange(count) % num_classes
    return logits, (torch.arange(count) % 20 == 3).long()


# What it wraps


class Steeper(SmoothAPLoss):
    """Another formula."""

    def compute_per_class(self, pool: Any) -> Any:
        return super().compute_per_class(pool)


class Renamed(RecallAtQuantileLoss):
    """The same formula."""


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fullrank.NDCGLoss(), TypeError, "loss: expected one of SmoothAPLoss, .*, got a NDCGLoss"),
        (lambda: fullrank.CrossEntropyLoss(), TypeError, "got a CrossEntropyLoss"),
        (lambda: fullrank.CombinedLoss({"ap": SmoothAPLoss()}), TypeError, "got a CombinedLoss"),
        (lambda: ShardedLoss(SmoothAPLoss()), TypeError, "got a ShardedLoss"),
        (lambda: SmoothAPLoss, TypeError, "loss: expected one of"),
        (lambda: Steeper(), TypeError, "expected the formula of SmoothAPLoss, got a Steeper"),
        (lambda: SmoothAPLoss(queue_size=8), ValueError, "queue_size: expected 0 in a ShardedLoss, got 8"),
        (lambda: RecallAtQuantileLoss(max_pool_size=9), ValueError, "max_pool_size: expected None in a Sh.*, got 9"),
        (lambda: RecallAtQuantileLoss(), ValueError, "surrogate: expected 'sigmoid' in a ShardedLoss, got 'dro'"),
        (lambda: PAUCAtBudgetLoss(), ValueError, "surrogate: expected 'trapezoid' in a ShardedLoss, got 'dro'"),
        (lambda: PAUCAtBudgetLoss(surrogate="pairwise"), ValueError, "surrogate: expected 'trapezoid' in a Sharded"),
    ],
)
def test_other_losses_are_refused(make: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ShardedLoss(make())


def test_a_subclass_with_the_same_formula_is_taken() -> None:
    assert isinstance(ShardedLoss(Renamed(quantile=0.3, surrogate="sigmoid")).loss, Renamed)


# A loss, an attribute of it that somebody assigns after the construction, the value, and the error.
CHANGES: dict[str, tuple[str, str, Any, str]] = {
    "a draw": ("recall", "max_pool_size", 7, "max_pool_size: expected None in a ShardedLoss, got 7"),
    "dro": ("pauc", "surrogate", "dro", "surrogate: expected 'trapezoid' in a ShardedLoss, got 'dro'"),
}


@pytest.mark.parametrize(("change", "form"), [("a draw", ""), ("dro", "sums")])
@on_ranks()
def test_a_setting_that_changes_on_one_rank_raises_on_all(rank: int, change: str, form: str) -> None:
    """In the first step and in the second; the state stays, and the next step is that of a run without the change."""
    name, attribute, value, text = CHANGES[change]
    for odd_rank, num_before in itertools.product(range(dist.get_world_size()), (0, 1)):
        sharded, clean = ShardedLoss(KINDS[name]()), ShardedLoss(KINDS[name]())
        with forced(form):
            for index in range(num_before):
                step(sharded, *draw(40 + rank, seed=index))
            before, right = str(sharded.state_dict()), getattr(sharded.loss, attribute)
            if rank == odd_rank:
                setattr(sharded.loss, attribute, value)
            kind, message = common_error(lambda s=sharded: s(*draw(40 + rank)))
            assert (kind, text in message) == ("ValueError", True), message
            assert message.startswith(f"ShardedLoss failed on rank {odd_rank}: ")
            setattr(sharded.loss, attribute, right)
            assert str(sharded.state_dict()) == before
            assert all(map(torch.equal, *(step(one, *draw(40 + rank, seed=9)) for one in (sharded, clean))))


@pytest.mark.parametrize("change", CHANGES)
def test_a_setting_that_changes_in_one_process_raises(change: str) -> None:
    name, attribute, value, text = CHANGES[change]
    sharded = ShardedLoss(KINDS[name]())
    setattr(sharded.loss, attribute, value)
    with pytest.raises(ValueError, match=text):
        sharded(*draw(40))


DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "gathered": (lambda rank: ShardedLoss(SmoothAPLoss()) if rank else SmoothAPLoss(), "ShardedLoss on rank 1"),
    "kinds": (lambda rank: ShardedLoss(KINDS["recall" if rank else "smooth_ap"]()), "loss: 'SmoothAPLoss' on rank 0, "),
    "arguments": (
        lambda rank: ShardedLoss(RecallAtQuantileLoss(quantile=0.1 + rank / 10, surrogate="sigmoid")),
        "quantile: 0.1 on rank 0, 0.2 on",
    ),
    "temperatures": (lambda rank: ShardedLoss(SmoothAPLoss(temperature=0.1 + rank)), "temperature: 0.1 on rank 0, 1.1"),
}


@pytest.mark.parametrize("what", DIFFERENT)
@on_ranks(2)
def test_ranks_with_other_losses_raise(rank: int, what: str) -> None:
    make, text = DIFFERENT[what]
    kind, message = common_error(lambda: make(rank)(*draw(40 + rank)))
    assert kind == "RuntimeError" or what == "gathered"
    assert text in message, message


# When it gathers


@contextmanager
def forms_taken() -> Iterator[list[str]]:
    """Let the block know the form of each call: "gather", "positives", or "sums" for all others."""
    taken: list[str] = []
    sum_over_ranks, by_positives = ShardedLoss._sum_over_ranks, smooth_ap._by_positives

    def noted(self: ShardedLoss, shard: Any) -> Any:
        before, per_class = len(taken), sum_over_ranks(self, shard)
        if len(taken) == before:
            taken.append("gather" if per_class is None else "sums")
        return per_class

    def travelling(*given: Any) -> Any:
        taken.append("positives")
        return by_positives(*given)

    of_step = mock.patch.object(ShardedLoss, "_sum_over_ranks", noted)
    with of_step, mock.patch.object(smooth_ap, "_by_positives", travelling):
        yield taken


# 41 bins of 8 fine ones with 6 moments of 2 groups; counts of 11, 11 and 10 bits for 1 quantile, and for 4.
NUMBERS = {"smooth_ap": 2 * 6 * 41 * 8, "recall": 2048 + 2048 + 1024, "pauc": 2048 + 4 * (2048 + 1024)}


@pytest.mark.parametrize("name", KINDS)
@on_ranks()
def test_all_ranks_take_one_form_on_both_sides_of_the_boundary(rank: int, name: str) -> None:
    """Nothing is forced. The number of rows of all ranks decides, however they are spread, and where it changes both
    forms have the loss and the gradient of a gathered pool.

    A sum costs 16 bytes for each number, a gather 12 for each row. Ranks that choose by their
    own rows would take different forms here, and meet in different collectives.
    """
    world_size = dist.get_world_size()

    def of(count: int, shares: list[int]) -> tuple[str, float]:
        """Return the form of a call, and how far its gradient and loss are from those of a gathered pool."""
        logits, targets = draw(count)
        counts = portion(count, shares)
        own = logits.split(counts)[rank], targets.split(counts)[rank]
        with forms_taken() as taken:
            value, gradient = step(ShardedLoss(KINDS[name]()), *own)
        expected, right = step(KINDS[name](), *own)
        norm = fullrank.all_gather_no_grad(right).norm()
        (form,) = taken
        same((form, value.item()))
        return form, max(float((gradient - right).norm() / norm), float(abs(value / expected - 1)))

    layouts = [[1, *[0] * (world_size - 1)], [0] * (world_size - 1) + [1], list(range(1, 2 * world_size, 2))]
    layouts.append([1] + [40] * (world_size - 1))
    edge = 4 * NUMBERS[name] // 3
    few, many = edge - 8, edge + 8  # bisect the number of rows
    assert of(few, layouts[2])[0] == "gather"
    assert of(many, layouts[2])[0] == "sums"
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if of(middle, layouts[2])[0] == "gather" else (few, middle)
    assert 12 * few < 16 * NUMBERS[name] <= 12 * many
    for shares in layouts:
        (before, exact), (after, error) = of(few, shares), of(many, shares)
        assert (before, exact, after) == ("gather", 0.0, "sums")
        assert error < 2e-6
    alone, pooled = (KINDS[name](gather_distributed=one)(*draw(300, seed=rank))[None] for one in (False, None))
    off = fullrank.all_gather_no_grad(alone / pooled - 1).abs()
    assert off.max() > 1e-3  # the control: the rows of one rank have another loss


@on_ranks()
def test_all_ranks_let_the_positives_travel_from_one_number_of_classes_on(rank: int) -> None:
    """A row has 4 bytes for each class and 8 more, its only positive 16 times 64: they are equal at 254 classes."""
    for num_classes, form in ((253, "gather"), (254, "positives")):
        logits, targets = draw(
            2 * num_classes, num_classes
        )  # of each class two positives, of which one rank may have both
        counts = portion(len(logits), [5, *[2] * (dist.get_world_size() - 1)])
        own = logits.split(counts)[rank], targets.split(counts)[rank]
        with forms_taken() as taken:
            value, gradient = step(ShardedLoss(KINDS["smooth_ap"](num_classes)), *own)
        expected, right = step(KINDS["smooth_ap"](num_classes), *own)
        assert same(taken) == [form]
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=0)
        assert (gradient - right).norm() <= 2e-6 * right.norm()


@on_ranks(2)
def test_weights_are_in_a_unit_of_all_ranks(rank: int) -> None:
    """No sum of theirs fits into the dtype of the scores; only one rank has such a weight."""
    logits, targets = draw(30_000, seed=rank)
    weight = torch.rand(30_000, generator=torch.Generator().manual_seed(rank)).double()
    for largest in (0.5, 1e30, 1e300):
        weight[3] = largest if rank else 0.5
        with forms_taken() as taken:
            value = ShardedLoss(KINDS["smooth_ap"]())(logits, targets, sample_weight=weight)
        assert same(taken) == ["sums"]
        expected = KINDS["smooth_ap"]()(logits, targets, sample_weight=weight)
        torch.testing.assert_close(value, expected, rtol=2e-6, atol=0)


@on_ranks(2)
def test_ignored_rows_do_not_widen_the_range(rank: int) -> None:
    """The scores are far from 0, and that of an ignored row, which may be anything, is at 0 or elsewhere."""
    logits, targets = draw(20_000, seed=rank)
    logits += 2**14
    for ignored in (0.0, torch.nan, -1e30):
        logits[7], targets[7] = ignored, -100
        with forms_taken() as taken:
            value = ShardedLoss(KINDS["smooth_ap"]())(logits, targets)
        assert taken == ["sums"]
        torch.testing.assert_close(value, KINDS["smooth_ap"]()(logits, targets), rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_one_process_has_the_wrapped_loss(name: str) -> None:
    logits, targets = draw(40, 3)
    given = {"iid_mask": torch.arange(40) % 3 > 0, "sample_weight": torch.linspace(0.1, 1, 40)}
    loss = KINDS[name](3)
    for ours, theirs in zip(
        ShardedLoss(loss)(logits, targets, **given, return_per_class=True),
        loss(logits, targets, **given, return_per_class=True),
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", KINDS)
@on_ranks(2)
def test_a_rank_may_work_alone(rank: int, name: str) -> None:
    sharded, plain = ShardedLoss(KINDS[name]()), KINDS[name](gather_distributed=False)
    sharded.loss.gather_distributed = False
    if rank == 0:
        assert all(map(torch.equal, step(sharded, *draw(40)), step(plain, *draw(40))))
    sharded.loss.gather_distributed = None
    same(sharded(*draw(40 + rank, seed=rank)).item())


@pytest.mark.parametrize("form", ["moments", "positives", "gather"])
@on_ranks(2)
def test_the_loss_of_each_class_is_returned(rank: int, form: str) -> None:
    own = draw(60 + rank, 3, seed=rank)
    with forced(form):
        found = ShardedLoss(KINDS["smooth_ap"](4))(torch.cat([own[0], own[0][:, :1]], 1), own[1], None, True)
    assert found.valid.tolist() == [True, True, True, False]
    assert found.per_class.isnan().tolist() == [False, False, False, True]
    same(found.per_class[:3].tolist())
    torch.testing.assert_close(found.per_class[:3].mean(), found.loss, rtol=1e-6, atol=0)  # of float32


# State and settings


def test_its_state_is_that_of_the_loss() -> None:
    """tests/integrations/test_savers.py restarts trainings."""
    sharded, plain = ShardedLoss(KINDS["recall"](3)), KINDS["recall"](3)
    sharded.loss.temperature = 0.7
    plain.load_state_dict({name.removeprefix("loss."): value for name, value in sharded.state_dict().items()})
    assert plain.temperature == 0.7
    assert repr(sharded).startswith("ShardedLoss(\n  (loss): RecallAtQuantileLoss(\n    num_classes=3, quantile=0.1")
    sharded.load_state_dict(ShardedLoss(KINDS["recall"](3)).state_dict())  # without a temperature: the constructor's
    assert sharded.temperature == KINDS["recall"](3).temperature != 0.7


def test_modes_and_settings_are_those_of_the_loss() -> None:
    sharded = ShardedLoss(SmoothAPLoss())
    assert not sharded.eval().loss.training
    assert sharded.train().loss.training
    sharded.temperature = 0.3
    assert sharded.loss.temperature == sharded.temperature == 0.3
    warm = fullrank.LossWarmupWrapper(
        fullrank.SigmoidFocalLoss(), sharded, warmup_steps=1, temp_start=0.5, temp_end=0.1
    )
    warm.on_train_batch_start(1)
    assert sharded.loss.temperature == warm.current_temperature == 0.5
    both = fullrank.CombinedLoss({"ap": sharded, "ce": fullrank.BCEWithLogitsLoss()})
    both.gather_distributed = False
    assert sharded.loss.gather_distributed is False
    with pytest.raises(TypeError, match="indexes"):
        sharded(*draw(40), indexes=torch.zeros(40))  # type: ignore[call-overload]


@on_ranks(2)
def test_parts_of_a_combined_loss_compare_its_weights(rank: int) -> None:
    """Also where only a part inside of a part is a loss that communicates."""
    both = fullrank.CombinedLoss({"ap": ShardedLoss(KINDS["smooth_ap"]())}, {"ap": 1.0 + rank})
    kind, text = common_error(lambda: both(*draw(40 + rank)))
    assert (kind, "weights: {'ap': 1.0} on rank 0" in text) == ("RuntimeError", True), text


@pytest.mark.parametrize("form", ["moments", "gather"])
@on_ranks(2)
def test_positives_are_counted_for_a_logger(rank: int, form: str) -> None:
    """Those of all ranks, a mean over the classes, in training."""
    loss = SmoothAPLoss(4, temperature=0.5)
    loss.pool_counts = PoolCounts()
    with forced(form):
        for _ in range(2):
            ShardedLoss(loss)(torch.randn(20 + rank, 4), torch.arange(20 + rank) % 3)  # class 3 has none
        ShardedLoss(loss.eval())(torch.randn(20, 4), torch.arange(20) % 3)
    assert loss.pool_counts.calls == 2
    assert same(loss.pool_counts.sums.tolist()) == [2 * 41 / 4, 2 * 1 / 4]


@pytest.mark.parametrize("form", ["sums", "gather"])
@on_ranks(2)
def test_hints_are_those_of_all_ranks(rank: int, form: str) -> None:
    """A warning that only some ranks give could stop these alone: the scores of rank 1 look like probabilities."""
    loss = ShardedLoss(RecallAtQuantileLoss(quantile=0.005, temperature=0.1, surrogate="sigmoid"))
    texts = []
    with warnings.catch_warnings(record=True) as caught, forced(form if form == "sums" else ""):
        warnings.simplefilter("always")
        for index in range(20):
            logits, targets = draw(40, seed=index)
            loss(logits.sigmoid() if rank else 5 * logits, 0 * targets)
    texts = [str(warning.message) for warning in caught]
    assert len(same(texts)) == 1
    assert "no class was valid in 20 calls in a row" in texts[0]


@pytest.mark.slow
def test_it_compiles_in_one_process() -> None:
    sharded = ShardedLoss(SmoothAPLoss(3, temperature=0.5, validate_args=False))
    logits, targets = draw(40, 3)
    compiled = torch.compile(sharded, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, targets), sharded(logits, targets), rtol=1e-6, atol=0)  # of float32
