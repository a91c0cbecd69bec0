"""pooled_backward(stream=True): the loss and the gradient of all rows, of which no list of scores is kept.

Under each wrapper it equals one process: tests/conformance/test_promise.py. Mistakes of one rank are in
test_faults_of_verbs.py there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gradient_cases
import pytest
import torch
import torch.distributed as dist
from batches import Rows, cut, part_of, split
from collective_counter import CollectiveCounter
from gradient_cases import Case, joined_loss, make_step
from on_ranks import on_ranks
from subjects import LIMITS, NUM_FEATURES, Model, error, gradient
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from workers import error_of

import fullrank
from fullrank.accumulation.replay_state import checksum_of

PLAIN = Case("smooth_ap", queue_size=0, temperature=0.3)
CLASSES = PLAIN._replace(num_classes=3)
CASES = {
    "binary": PLAIN,
    "none": PLAIN._replace(reduction="none"),
    "weighted": CLASSES._replace(weighted=True),
    "multi_hot": CLASSES._replace(weighted=True, multi_hot=True, reduction="sum"),
}


def make_model(case: Case, *middle: nn.Module) -> Model:
    return Model(case.dtype, case.num_classes, middle=middle)


def make_loss(case: Case) -> fullrank.SmoothAPLoss:
    return gradient_cases.make_loss(case, local=False)


def parts_of(case: Case, number: int, seed: int = 0) -> list[Rows]:
    """Return the rows in micro-batches, the second of them empty if there are three."""
    return cut(make_step(case, seed), number)


def streamed(model: nn.Module, batches: Any, loss: Any, case: Case = PLAIN, **options: Any) -> Tensor:
    """Return the loss of a streamed window."""
    given: dict[str, Any] = {"forward": lambda batch: model(batch.features), "targets": lambda batch: batch.targets}
    if case.weighted:
        given["sample_weight"] = lambda batch: batch.weight
    return fullrank.pooled_backward(model, batches, **{**given, "loss": loss, "stream": True, **options})


def joined(model: nn.Module, batches: Any, loss: Any, _: Case = PLAIN, **options: Any) -> Tensor:
    """Return the loss of the same window with all scores kept."""
    given = {"forward": lambda batch: model(batch.features), "loss": joined_loss(loss)}
    return fullrank.pooled_backward(model, list(batches), **{**given, **options})


def assert_same(
    case: Case, batches: list[Rows], *middle: nn.Module, rtol: float = 1e-12, of_gradient: float = 0.0, **options: Any
) -> Tensor:
    """Assert that loss, gradient and random state are those of the window with all scores kept; return the loss."""
    held = []
    for run in (joined, streamed):
        model = make_model(case, *middle)
        torch.manual_seed(3)
        held.append((run(model, batches, make_loss(case), case, **options), gradient(model), torch.get_rng_state()))
    (expected, slope, state), (value, found, after) = held
    torch.testing.assert_close(value, expected, rtol=rtol, atol=0)
    assert error(found, slope) <= (of_gradient or rtol)
    assert torch.equal(after, state)
    return value


@on_ranks(2)
def test_number_of_collectives(rank: int) -> None:
    """The headers of the window, of the first pass, of the loss, of step 2 and of the replay; the table."""
    own = cut(part_of(make_step(PLAIN, 0), split(37, 2, 0), rank), 3)
    with CollectiveCounter() as counter:
        streamed(make_model(PLAIN), own, make_loss(PLAIN._replace(gradient_reduction="sum")), group=dist.group.WORLD)
    assert counter.total == 6
    assert max(counter.sizes) < 64_000


# One process


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", LIMITS)
def test_one_process(dtype: str, name: str) -> None:
    """With dropout, whose masks are drawn again, and a scaler."""
    case = CASES[name]._replace(dtype=dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert_same(case, parts_of(case, 3, seed=1), nn.Dropout(0.4), rtol=LIMITS[dtype], scaler=scaler)


@pytest.mark.parametrize("kind", ["loader", "targets"])
def test_what_is_drawn_is_drawn_again(kind: str) -> None:
    """A data loader is read twice in the same order; targets are drawn before the forward of the next micro-batch."""
    rows = make_step(PLAIN, 0)
    loader = DataLoader(TensorDataset(rows.features, rows.targets), batch_size=5, shuffle=kind == "loader")

    def noisy(batch: Any) -> Tensor:
        chance = torch.rand(len(batch[1])) if kind == "targets" else torch.ones(len(batch[1]))
        return torch.where(chance < 0.2, (batch[1] == 0).long(), batch[1])

    model, twin = (make_model(PLAIN, nn.Dropout(0.2)) for _ in range(2))
    torch.manual_seed(4)
    value = streamed(model, loader, make_loss(PLAIN), forward=lambda batch: model(batch[0]), targets=noisy)
    torch.manual_seed(4)
    pairs = [(twin(batch[0]), noisy(batch)) for batch in loader]
    expected = make_loss(PLAIN)(*(torch.cat(parts) for parts in zip(*pairs)))
    expected.backward()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert error(gradient(model), gradient(twin)) <= 1e-12


def test_micro_batches_are_read_with_gradients_enabled() -> None:
    class Reading(Lazy):
        def __iter__(self) -> Iterator[Rows]:
            for batch in super().__iter__():
                modes.append(("read", torch.is_grad_enabled()))
                yield batch

    def forward(batch: Rows) -> Tensor:
        modes.append(("forward", torch.is_grad_enabled()))
        return model(batch.features)

    modes: list[tuple[str, bool]] = []
    model = make_model(PLAIN._replace(dtype="float32"))
    streamed(model, Reading(2, 20), make_loss(PLAIN), forward=forward)
    assert modes == [("read", True), ("forward", False)] * 2 + [("read", True), ("forward", True)] * 2


@pytest.mark.parametrize("scales", [(1e308, 1e308), (1e-320, 1e-320), (1e-290, 1e300), (1e300, 1e-290)], ids=str)
def test_weights_near_the_ends_of_float64(scales: tuple[float, float]) -> None:
    case = CLASSES._replace(weighted=True)
    batches = [
        batch._replace(weight=(batch.weight > 0).double() * scale) for batch, scale in zip(parts_of(case, 2), scales)
    ]
    assert_same(case, batches)


def test_one_column_or_none() -> None:
    held: list[Tensor] = []
    for columns in (slice(0, 1), 0):
        model = make_model(PLAIN)
        score = lambda batch, model=model, columns=columns: model(batch.features)[:, columns]  # noqa: E731
        streamed(model, parts_of(PLAIN, 2), make_loss(PLAIN), forward=score)
        held.append(gradient(model))
    assert torch.equal(*held)


def test_half_precision_is_computed_in_float32() -> None:
    case = PLAIN._replace(dtype="bfloat16")
    value = assert_same(case, parts_of(case, 3), rtol=2e-6, of_gradient=1e-2)  # of bfloat16, 2**-8
    assert value.dtype == torch.float32


def test_a_nan_makes_its_class_nan() -> None:
    case = CLASSES
    batches = parts_of(case, 3)
    batches[2].features[4] = torch.nan
    model = make_model(case)
    assert streamed(model, batches, make_loss(case)).isnan()
    assert gradient(model).isnan().all()
    batches[2].targets[4] = -100  # a row that takes no part
    model = make_model(case)
    assert not streamed(model, batches, make_loss(case)).isnan()


@pytest.mark.parametrize("target", [0, 1, -100])
def test_without_a_valid_class_the_loss_is_zero(target: int) -> None:
    model = make_model(PLAIN)
    batches = [batch._replace(targets=torch.full_like(batch.targets, target)) for batch in parts_of(PLAIN, 3)]
    assert streamed(model, batches, make_loss(PLAIN)) == 0
    assert not gradient(model).any()


# Memory


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            self.largest = max(self.largest, leaf.numel() if isinstance(leaf, Tensor) else 0)
        return result


class Lazy:
    """Micro-batches that are made when they are read."""

    def __init__(self, number: int, rows: int) -> None:
        self._number, self._rows = number, rows

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Rows]:
        for index in range(self._number):
            generator = torch.Generator().manual_seed(index)
            features = torch.randn(self._rows, NUM_FEATURES, generator=generator)
            yield Rows(features, (torch.rand(self._rows, generator=generator) < 0.1).long(), None)


@pytest.mark.slow
def test_nothing_has_the_length_of_the_pool() -> None:
    """The matrices of the bins, a micro-batch, states of generators; the control keeps all scores."""
    number, rows, found = 50, 3000, []
    for run in (streamed, joined):
        model, loss = make_model(PLAIN._replace(dtype="float32")), make_loss(PLAIN._replace(temperature=2.0))
        with LargestTensor() as seen:
            run(model, Lazy(number, rows), loss)
        found.append(seen.largest)
    assert found[0] < number * rows / 2 < number * rows <= found[1]


# What is refused


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": lambda scores, batches: scores.mean()}, "loss: expected a SmoothAPLoss with stream=True"),
        ({"loss": fullrank.RecallAtQuantileLoss(1)}, "got a RecallAtQuantileLoss. A function of all scores, quantiles"),
        ({"loss": fullrank.SmoothAPLoss(1, 9, 0.1)}, "queue_size with stream=True: expected 0, got 9"),
        ({"loss": fullrank.SmoothAPLoss(1, 0, 0.1, max_pool_size=5)}, "max_pool_size with stream=True: expected None"),
        ({"loss": fullrank.SmoothAPLoss(1, 0)}, "temperature with stream=True: expected a number, got None"),
        (
            {"loss": fullrank.SmoothAPLoss(2, 0, 0.1, reduction="none")},
            "reduction with stream=True: expected 'mean' or 'sum', got 'none'",
        ),
        ({"targets": None}, "targets: expected a function of a micro-batch with stream=True"),
        ({"sample_weight": torch.ones(3)}, "sample_weight: expected a function of a micro-batch or None"),
        (
            {"stream": False, "loss": lambda scores, batches: scores.mean()},
            "targets: expected None without stream=True",
        ),
        ({"targets": lambda batch: batch.targets + 0.5}, "targets: expected 0, 1 or ignore_index=-100, got"),
        ({"targets": lambda batch: batch.targets[1:]}, "targets: expected shape"),
        ({"forward": lambda batch: batch.features.sum()}, r"forward: expected scores of shape \(rows, ...\)"),
    ],
)
def test_what_is_refused(change: dict[str, Any], text: str) -> None:
    model = make_model(PLAIN)
    with pytest.raises((TypeError, ValueError), match=text):
        streamed(model, parts_of(PLAIN, 2), **{"loss": make_loss(PLAIN), **change})
    assert model.up.weight.grad is None


class Lying(Lazy):
    """Micro-batches with a wrong length."""

    def __len__(self) -> int:
        return self._number + 1


def test_micro_batches_that_are_fewer_than_their_length() -> None:
    model = make_model(PLAIN._replace(dtype="float32"))
    with pytest.raises(
        ValueError,
        match="micro_batches: expected 4 micro-batches, as many as its length says, in each of two passes, got 3",
    ):
        streamed(model, Lying(3, 10), make_loss(PLAIN))
    with pytest.raises(TypeError, match="micro_batches: expected a list of micro-batches, with a length"):
        streamed(model, iter(Lazy(3, 10)), make_loss(PLAIN))


class At:
    """Calls one function, but another one in its last of ``number`` calls."""

    def __init__(self, usual: Callable[[Any], Any], other: Callable[[Any], Any], number: int) -> None:
        self.usual, self.other, self.left = usual, other, number

    def __call__(self, batch: Any) -> Any:
        self.left -= 1
        return self.other(batch) if self.left == 0 else self.usual(batch)


@pytest.mark.parametrize("rows", [slice(None), slice(4, 5)], ids=str)
def test_a_replay_with_other_scores_raises(rows: slice) -> None:
    """In one row of the last micro-batch, or in all."""

    def other(batch: Rows) -> Tensor:
        scores = model(batch.features)
        return scores + torch.zeros_like(scores).index_fill(0, torch.arange(len(scores))[rows], 0.5)

    model, score = make_model(PLAIN), lambda batch: model(batch.features)
    with pytest.raises(RuntimeError, match="the same scores in both passes over the window, got a difference of"):
        streamed(model, parts_of(PLAIN, 2), make_loss(PLAIN), forward=At(score, other, 4))
    assert not gradient(model).any()
    streamed(model, parts_of(PLAIN, 2), make_loss(PLAIN), forward=At(score, other, 4), check_replay=False)


@pytest.mark.parametrize("kind", ["targets", "sample_weight"])
def test_targets_or_weights_that_change_raise(kind: str) -> None:
    """In one row of the last micro-batch, whose number of positives stays."""
    case = PLAIN._replace(weighted=kind == "sample_weight")
    model, batches = make_model(case), parts_of(case, 2)

    def read(batch: Rows) -> Tensor:
        return batch.targets if kind == "targets" else batch.weight

    def swapped(batch: Rows) -> Tensor:
        values = read(batch).clone()
        first, second = int(values.argmax()), int(values.argmin())
        values[[first, second]] = values[[second, first]]
        return values

    text = r"the same targets and sample weights in both passes over the window, got others on rank 0\..*targets that"
    with pytest.raises(RuntimeError, match=text):
        streamed(model, batches, make_loss(case), case, **{kind: At(read, swapped, 4)})
    assert not gradient(model).any()
    streamed(model, batches, make_loss(case), case, check_replay=False, **{kind: At(read, swapped, 4)})
    streamed(model, batches, make_loss(case), case)


def test_the_checksum_sees_values_places_and_arguments() -> None:
    rows = [[1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 0], [0, 1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 1], []]
    given = [(torch.tensor(row, dtype=dtype), None) for row in rows for dtype in (torch.int64, torch.float64)]
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    sums = {int(checksum_of(pair)) for pair in [*given, (first, second), (second, first), (first, None)]}
    assert len(sums) == len(given) + 2  # both without a row are 0


# The table of many classes


def test_a_table_that_is_too_large_is_not_made() -> None:
    scores = torch.randn(8, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = fullrank.SmoothAPLoss(300, 0, 0.05).open_stream(False)
    with LargestTensor() as seen:
        table.add(scores / 8, torch.arange(8))
        size = table.num_bytes
        table.add(20 * scores, torch.arange(8))
        with pytest.raises(ValueError, match=r"a table of at most 256 MiB, got one of \S+ MiB, with 300 classes and"):
            table.finish()
    assert 0 < size < 2**26
    assert seen.largest < 2**24  # elements, of 8 bytes


@pytest.mark.slow
@on_ranks(2)
def test_tables_that_do_not_fit_together(rank: int) -> None:
    """Each fits alone."""
    generator = torch.Generator().manual_seed(rank)
    wide = fullrank.SmoothAPLoss(300, 0, 0.05).open_stream(False)
    wide.add(torch.randn(8, 300, generator=generator, dtype=torch.float64) + 50 * rank, torch.arange(8))
    assert wide.num_bytes > 0
    assert "expected a table of at most 256 MiB, got one of" in error_of(wide.finish)[1]


@on_ranks(2)
def test_weights_of_other_magnitudes_on_each_rank(rank: int) -> None:
    loss, rows = fullrank.SmoothAPLoss(1, 0, 0.3), make_step(PLAIN, 0)
    scores, targets = rows.features[:, :1], rows.targets
    weight = torch.full((len(targets),), 1e300, dtype=torch.float64)
    weight[:20] = 1e290
    table, own = loss.open_stream(True), slice(20) if rank == 0 else slice(20, None)
    table.add(scores[own], targets[own], weight[own])
    expected = fullrank.losses.smooth_ap(scores, targets, 0.3, sample_weight=weight)
    assert float(table.finish().value) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("beyond", [-1e3, 1e3])
def test_a_score_beyond_the_table_is_read_at_its_end(beyond: float) -> None:
    """As that of a replay may be by its rounding; the other rows read what they would."""
    rows = make_step(PLAIN, 0)
    scores, table = rows.features[:, :1], make_loss(PLAIN).open_stream(False)
    table.add(scores, rows.targets)
    loss = table.finish()
    loss.start(loss.value)
    row = int((scores * beyond)[:, 0].masked_fill(rows.targets < 0, -torch.inf).argmax())
    moved = scores.clone()
    moved[row] += beyond
    expected, found = (loss.gradient(each, rows.targets) for each in (scores, moved))
    assert found[row].isfinite()
    expected[row] = found[row]
    assert torch.equal(found, expected)
