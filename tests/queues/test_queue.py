"""The memory queue: a ring of rows whose whole state is saved."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loss_cases import POOLED
from on_ranks import common_error, on_ranks
from torch import Tensor, nn
from workers import error_of

import fullrank
from fullrank import MemoryQueue
from fullrank.distributed.group import UNDO


def rows(first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` rows whose logits are their running numbers."""
    numbers = torch.arange(first, first + count)
    return numbers.float()[:, None], numbers % 2


pytestmark = pytest.mark.filterwarnings("ignore:.*drawn down")


def contents(queue: MemoryQueue) -> list[float]:
    return sorted(queue.rows().logits[:, 0].tolist())


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8])
def test_the_last_rows_are_kept_in_one_batch_or_in_parts(capacity: int) -> None:
    """Wrap-around, batches of the capacity and beyond it."""
    logits, targets = rows(0, 7)
    for cut in range(8):
        whole, parts = MemoryQueue(capacity, 1), MemoryQueue(capacity, 1)
        whole.enqueue(logits, targets)
        parts.enqueue(logits[:cut], targets[:cut])
        parts.enqueue(logits[cut:], targets[cut:])
        assert torch.equal(whole.rows().logits, parts.rows().logits)  # the order in storage too
        assert whole.position == parts.position
        assert torch.equal(whole.checksum, parts.checksum)
        assert contents(parts) == [*map(float, range(7))][-capacity:]
        assert torch.equal(parts.rows().targets, parts.rows().logits[:, 0].long() % 2)


def mixed(value: int) -> int:
    """Return 64 bits of a number mixed, with a sign."""
    for factor in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F):
        value = (value * factor + 2**63) % 2**64 - 2**63
        value ^= value >> 32
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("columns", "multi_hot"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("read_after", [None, 0, 2])
def test_the_checksum_is_that_of_its_definition(
    columns: int, multi_hot: bool, dtype: torch.dtype, read_after: int | None
) -> None:
    """By whole numbers of Python: it is saved with the queue, and compared with that of ranks on other devices."""
    generator, queue = torch.Generator().manual_seed(0), MemoryQueue(9, columns, multi_hot=multi_hot)
    hashes: list[int] = []
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    for number in range(5):  # twice round the ring
        logits = torch.randn(5, columns, generator=generator, dtype=torch.float64).to(dtype)
        targets = torch.randint(0, 2, (5, columns) if multi_hot else (5,), generator=generator)
        iid, weight = torch.arange(5) % 2 == 0, torch.rand(5, generator=generator, dtype=torch.float64).to(dtype)
        if number == 1:  # what is not passed is 1
            queue.enqueue(logits, targets)
            assert queue.rows().sample_weight is not None  # of the rows before
            iid, weight = torch.ones_like(iid), torch.ones_like(weight)
        else:
            queue.enqueue(logits, targets, iid, weight)
        for row in range(5):
            words = [*logits.view(bits)[row].tolist(), *targets.reshape(5, -1)[row].tolist()]
            words += [int(weight.view(bits)[row]), int(iid[row])]
            factors = [mixed(place - len(words) + 0x165667B19E3779F9) | 1 for place in range(len(words))]
            of_row = mixed(5 * number + row + 0x165667B19E3779F9) | 1
            hashes.append(of_row * sum(mixed(word) * factor for word, factor in zip(words, factors)))
        if number == read_after:
            assert int(queue.checksum) % 2**64 == sum(hashes[-9:]) % 2**64
    assert int(queue.checksum) % 2**64 == sum(hashes[-9:]) % 2**64  # of the rows that it holds
    copy = MemoryQueue(9, columns, multi_hot=multi_hot)
    copy.load_state_dict(queue.state_dict())
    assert torch.equal(copy.checksum, queue.checksum)


def test_rows_that_are_taken_back_leave_the_checksum() -> None:
    queue = MemoryQueue(4, 1)
    queue.enqueue(*rows(0, 6))
    before = queue.checksum
    with ExitStack() as undo:
        undo.callback(UNDO.reset, UNDO.set(undo))
        queue.enqueue(*rows(6, 3))
        assert queue.checksum != before
    assert queue.checksum == before


BAD = torch.tensor([[1.0, torch.nan], [torch.inf, 0.0], [1.0, -torch.inf], [2.0, 2.0], [3.0, 3.0]])
NEGATIVES = {"keep": "negatives"}
# Settings of a queue of two classes, rows, their targets, and the targets of those that enter.
ENTERING: dict[str, tuple[dict[str, Any], Tensor, Any, Any]] = {
    "finite": ({}, BAD, [0, 1, 0, -100, 1], [1]),
    "negatives": (NEGATIVES | {"num_classes": 1}, rows(0, 6)[0], [0, 1, 0, 1, 0, 1], [0, 0, 0]),
    "negatives of the other class": (NEGATIVES, BAD[3:], [0, 1], [0, 1]),
    "negatives of a label": (NEGATIVES | {"multi_hot": True}, BAD[[3, 4, 4]], [[1, 1], [1, 0], [1, -100]], [[1, 0]]),
    "multi-hot": ({"multi_hot": True}, BAD[[3, 4, 4]], [[1, -100], [0, 0], [-100] * 2], [[1, -100], [0, 0]]),
    "a wide index": (
        {"multi_hot": True, "ignore_index": 255},
        *(BAD[[3, 4, 4]], [[1, 255], [0, 0], [255] * 2], [[1, 255], [0, 0]]),
    ),
    "none": ({"capacity": 0}, BAD[3:], [0, 1], []),
}


@pytest.mark.parametrize("name", ENTERING)
def test_rows_that_enter(name: str) -> None:
    """Also where their number is told."""
    settings, logits, targets, entering = ENTERING[name]
    for told in ({}, {"num_stored": len(entering)}):
        queue = MemoryQueue(**{"capacity": 8, "num_classes": 2, **settings})
        queue.enqueue(logits.clone().requires_grad_(), torch.tensor(targets), **told)
        held = queue.rows()
        assert held.targets.tolist() == entering
        assert held.logits.isfinite().all()
        assert not held.logits.requires_grad


def test_dtype_follows_the_rows_and_never_the_module() -> None:
    loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=4)
    third = torch.full((1, 1), 1 / 3)
    loss.queue.enqueue(third, torch.tensor([0]))
    loss.bfloat16()
    assert torch.equal(loss.queue.rows().logits, third)
    loss.queue.enqueue(third.double() / 7, torch.tensor([0]))
    assert loss.queue.rows().logits.dtype == torch.float64
    assert loss.queue.rows().targets.dtype == torch.int64  # float32 has no labels beyond 2**24
    assert list(loss.buffers()) == []


def test_device_follows_the_module(device: torch.device) -> None:
    with torch.device("meta"):
        loss = fullrank.SmoothAPLoss(num_classes=1, queue_size=4, temperature=0.5)
    loss.to_empty(device=device)
    loss(torch.randn(3, 1, device=device), torch.tensor([0, 1, 0], device=device))
    assert loss.queue.rows().logits.device.type == device.type
    assert len(loss.queue) == 3


def test_a_meta_queue_takes_the_device_of_what_it_is_given() -> None:
    with torch.device("meta"):
        assigned, fed = (fullrank.SmoothAPLoss(num_classes=1, queue_size=4, temperature=0.5) for _ in range(2))
    saved = fullrank.SmoothAPLoss(num_classes=1, queue_size=4, temperature=0.5)
    saved(*rows(0, 3))
    assigned.load_state_dict(saved.state_dict(), assign=True)
    assert contents(assigned.queue) == [0.0, 1.0, 2.0]
    fed(*rows(0, 3))
    assert contents(fed.queue) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", POOLED)
def test_in_eval_mode_validation_rows_are_ranked_among_themselves(name: str) -> None:
    form = POOLED[name].first
    generator = torch.Generator().manual_seed(0)
    past, live = (
        (torch.randn(40, 1, generator=generator, dtype=torch.float64), (torch.arange(40) % 3 == 0).long())
        for _ in range(2)
    )
    alone = form.make(num_classes=1)(*live)
    for queue_in_eval in (False, True):
        loss = form.make(num_classes=1, queue_size=64, queue_in_eval=queue_in_eval)
        loss(*past)
        twin = copy.deepcopy(loss)
        value = loss.eval()(*live)
        assert torch.equal(value, twin(*live) if queue_in_eval else alone)
        assert loss.queue.position[1] == 40
        assert torch.equal(loss.train()(*live), twin(*live) if not queue_in_eval else value)
    assert not torch.equal(value, alone)  # the control: these rows rank otherwise against the queue


def rows_of(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of a step that is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    logits = torch.randn(24, 1, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 2, (24,), generator=generator)
    own = slice(24 * rank // world_size, 24 * (rank + 1) // world_size)
    return logits[own].requires_grad_(), targets[own]


@on_ranks(2)
def test_a_loss_in_train_mode_keeps_its_queue_in_a_validation_without_gradients(rank: int) -> None:
    """In the first step and later. The control: a loss that lets rows enter. All raise if one rank alone has none."""
    plain = fullrank.SmoothAPLoss(1, queue_size=100), fullrank.SupConLoss(queue_size=100)
    for loss, enters in ((plain[0], 0), (plain[1], 0), (fullrank.SmoothAPLoss(1, 100, update_queue_in_eval=True), 1)):
        for step in range(3):
            own = [column[5 * rank :] for column in rows_of(step, rank, 2)]
            for context, number in ((torch.no_grad, enters), (torch.inference_mode, enters), (torch.enable_grad, 1)):
                before = loss.queue.position[2]
                with context():
                    loss(*own)
                assert loss.queue.position[2] - before == 19 * number
        loss.queue.assert_synchronized(group=dist.group.WORLD)
    with torch.set_grad_enabled(rank == 0):
        assert "enqueues rows: True on rank 0, False on rank 1" in error_of(lambda: plain[0](*rows_of(3, rank, 2)))[1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"capacity": -1, "num_classes": 1}, ValueError),
        ({"capacity": 2.0, "num_classes": 1}, TypeError),
        ({"capacity": 2, "num_classes": 0}, ValueError),
        ({"capacity": 2, "num_classes": 1, "keep": "positives"}, ValueError),
    ],
)
def test_impossible_arguments(arguments: dict, error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        MemoryQueue(**arguments)


@pytest.mark.parametrize(
    ("logits", "targets", "weight", "text"),
    [
        (torch.ones(2), torch.ones(2).long(), None, "expected shape"),
        (torch.ones(2, 2), torch.ones(2).long(), None, "expected shape"),
        (torch.ones(2, 1), torch.ones(3).long(), None, "expected shape"),
        (torch.ones(2, 1), torch.ones(2).long(), torch.ones(3), "sample_weight: expected shape"),
        (torch.ones(2, 1), torch.ones(2), None, "targets: expected integers or bools"),
        (torch.ones(2, 1).long(), torch.ones(2).long(), None, "logits: expected a floating-point tensor"),
    ],
)
def test_rows_that_do_not_fit(logits: Tensor, targets: Tensor, weight: Tensor | None, text: str) -> None:
    queue = MemoryQueue(2, 1)
    with pytest.raises((TypeError, ValueError), match=text):
        queue.enqueue(logits, targets, sample_weight=weight)
    assert len(queue) == 0
    queue.assert_synchronized()  # alone there is nothing to compare


# The numbers, in the order in which the state has them.
NUMBERS = ("capacity", "num_classes", "keep", "multi_hot", "ignore_index", "num_enqueued", "fill", "pointer")
NUMBERS += ("has_weights", "is_double", "checksum", "contents")
DAMAGED: dict[str, list[Any]] = {
    "fill": [-1, 17, 10**9, 16, 7],
    "pointer": [-5, 16, 10**9, 7],
    "num_enqueued": [-1, 7, 9, 2**62],
    "logits": [torch.zeros(3, 1), torch.zeros(16, 2), torch.zeros(0), "x", torch.zeros(16, 1), -torch.ones(16, 1) / 0],
    "targets": [torch.zeros(3), torch.zeros(16, 2), torch.full((16,), 77)],
    "iid_mask": [torch.zeros(3, dtype=torch.bool), torch.zeros(16, dtype=torch.bool)],
    "sample_weight": [torch.zeros(2)],
    "has_weights": [1],
    "checksum": [5],
    "contents": [0],
}


def damaged(state: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a copy of the state of a loss with another value in its queue."""
    if field in NUMBERS:
        numbers = state["queue.saved_numbers"].clone()
        numbers[NUMBERS.index(field)] = value
        field, value = "numbers", numbers
    return {**state, f"queue.saved_{field}": value}


def damaged_loss() -> fullrank.SmoothAPLoss:
    return fullrank.SmoothAPLoss(1, 16, temperature=0.2)


@pytest.mark.parametrize("field", DAMAGED)
def test_a_damaged_state_is_refused_and_nothing_changes(field: str) -> None:
    """Alone, inside a wrapper, and by the queue itself; the state that was saved is taken."""
    source = damaged_loss()
    source(*rows(0, 8))
    state = source.state_dict()
    key = f"queue.saved_{'numbers' if field in NUMBERS else field}"
    for value in DAMAGED[field]:
        loss = damaged_loss()
        loss(*rows(20, 5))
        loss.temperature = 0.1
        before = loss.state_dict()
        changed = damaged(state, field, value)
        with pytest.raises(ValueError, match=r"of the saved queue: expected .* damaged, or was changed: load another"):
            loss.load_state_dict(changed)
        with pytest.raises(ValueError, match="of the saved queue: expected"):
            loss.queue.load_state_dict({name.removeprefix("queue."): kept for name, kept in changed.items()})
        without = {name: kept for name, kept in state.items() if name != key}
        with pytest.raises(ValueError, match=r"the saved queue: expected 'saved_.*', got a state without it"):
            loss.load_state_dict(without, strict=False)
        assert str(loss.state_dict()) == str(before)
        wrapper = fullrank.LossWarmupWrapper(nn.BCEWithLogitsLoss(), loss, warmup_steps=1)
        before = wrapper.state_dict()
        inside = {f"main_loss.{key}": kept for key, kept in changed.items()}
        with pytest.raises(ValueError, match="of the saved queue: expected"):
            wrapper.load_state_dict(before | inside)
        assert str(wrapper.state_dict()) == str(before)
        loss.load_state_dict(state)
        assert torch.equal(loss(*rows(8, 9)), copy.deepcopy(source)(*rows(8, 9)))


@pytest.mark.parametrize(("field", "value"), [("temperature", float("nan")), ("num_draws", -1)])
def test_damaged_numbers_of_a_loss_are_refused_by_name(field: str, value: float) -> None:
    loss = damaged_loss()
    before = loss.state_dict()
    for number in (torch.tensor(value), torch.zeros(2), value):
        with pytest.raises(ValueError, match=f"{field} of the saved state: expected"):
            loss.load_state_dict({**before, f"saved_{field}": number})
    assert str(loss.state_dict()) == str(before)


@on_ranks()
def test_a_rank_with_a_damaged_state_does_not_continue_in_silence(rank: int) -> None:
    """It raises where it loads, and the next step raises everywhere; with the state that was saved all continue."""
    source = damaged_loss()
    source(*rows(3 * rank, 3))
    state = copy.deepcopy(source.state_dict())
    expected = source(*rows(rank, 4))
    loss, kept = damaged_loss(), int(state["queue.saved_numbers"][NUMBERS.index("fill")])
    changed = damaged(state, "logits", state["queue.saved_logits"].flip(0))
    error, _ = error_of(lambda: loss.load_state_dict(changed if rank == 1 else state))
    assert (error, len(loss.queue)) == (("ValueError", 0) if rank == 1 else ("none", kept))
    _, text = common_error(lambda: loss(*rows(rank, 4)))
    assert "queue:" in text
    loss.load_state_dict(state)
    assert torch.equal(loss(*rows(rank, 4)), expected)


def test_a_state_in_another_order_of_memory_is_loaded() -> None:
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    queues = [MemoryQueue(8, 3) for _ in range(2)]
    state = queues[0].state_dict()
    queues[1].load_state_dict(state | {"saved_logits": state["saved_logits"].t().contiguous().t()})
    for queue in queues:
        queue.enqueue(rows, torch.zeros(6, dtype=torch.int64))
    assert torch.equal(queues[0].rows().logits, queues[1].rows().logits)
    assert torch.equal(queues[1].rows().logits, rows)
