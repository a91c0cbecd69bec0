"""CombinedLoss: the weighted sum, what it shows, saves and passes on, and what the ranks compare."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_counter import CollectiveCounter
from loss_cases import draw
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.testing import assert_close
from workers import error_of

from fullrank import BCEWithLogitsLoss, CombinedLoss, CrossEntropyLoss, LossWarmupWrapper
from fullrank.distributed.header import SURROUNDING
from fullrank.losses import RecallAtQuantileLoss, SmoothAPLoss

ROWS = 12


def make(queue_size: int = 8, weights: Any = None) -> CombinedLoss:
    """Return the loss of the recipes, with a queue."""
    parts = {"ap": SmoothAPLoss(num_classes=1, queue_size=queue_size), "ce": BCEWithLogitsLoss()}
    return CombinedLoss(parts, weights)


def test_it_is_the_weighted_sum_and_shows_its_parts() -> None:
    ap, ce = SmoothAPLoss(num_classes=1, queue_size=8), BCEWithLogitsLoss()
    loss = make(weights={"ap": 0.5, "ce": 2})
    assert loss.parts == {}
    for step in range(3):
        logits, targets = draw(ROWS, seed=step)
        found, parts = loss(logits, targets), [ap(logits, targets), ce(logits, targets)]
        assert torch.equal(found, 0.5 * parts[0] + 2 * parts[1])
        ours, theirs = (torch.autograd.grad(one, logits)[0] for one in (found, 0.5 * parts[0] + 2 * parts[1]))
        assert torch.equal(ours, theirs)
        assert list(loss.parts) == ["ap", "ce"]
        assert [value.item() for value in loss.parts.values()] == [part.item() for part in parts]
        assert not any(value.requires_grad for value in loss.parts.values())
    loss.weights = {"ce": 1.0, "ap": 0.0}
    assert dict(loss.weights) == {"ap": 0.0, "ce": 1.0}
    assert torch.equal(loss(logits, targets), ce(logits, targets))
    assert loss.losses["ap"].queue.state_dict() is not None
    assert len(loss.losses["ap"].queue) == len(ap.queue) == 8  # a part of weight 0 is still called


class Adapter(nn.Module):
    """A part of a user: takes no weights, has a schedule and a queue of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.sum() * 0 + 1

    def on_train_epoch_start(self, epoch: int) -> None:
        self.calls.append(("epoch", epoch))

    def on_train_batch_start(self, global_step: int) -> None:
        self.calls.append(("step", global_step))

    def reset_queue(self) -> None:
        self.calls.append("reset")


def test_calls_of_a_training_loop_are_passed_on() -> None:
    warm = LossWarmupWrapper(BCEWithLogitsLoss(), SmoothAPLoss(1), warmup_steps=2)
    adapter, ap = Adapter(), SmoothAPLoss(1, queue_size=8)
    loss = CombinedLoss({"warm": warm, "own": adapter, "ap": ap, "ce": BCEWithLogitsLoss()})
    loss.on_train_epoch_start(3)
    loss.on_train_batch_start(7)
    assert not warm.in_warmup
    loss(*draw(ROWS))
    assert len(ap.queue) == 8
    loss.reset_queue()
    assert len(ap.queue) == 0
    assert adapter.calls == [("epoch", 3), ("step", 7), "reset"]
    assert loss.gather_distributed is None
    loss.gather_distributed = False
    assert [one.gather_distributed for one in (warm, ap, loss.losses["ce"])] == [False] * 3
    with pytest.raises(TypeError, match="gather_distributed"):
        loss.gather_distributed = "no"


def test_arguments_go_to_the_parts_that_take_them() -> None:
    logits, targets = draw(ROWS)
    weight, mask = torch.rand(ROWS, dtype=torch.float64), torch.arange(ROWS) % 3 > 0
    parts = {"recall": RecallAtQuantileLoss(1, 0.3), "ce": BCEWithLogitsLoss(), "torch": nn.BCEWithLogitsLoss()}
    found = CombinedLoss(parts)(logits, targets, mask, sample_weight=weight)
    expected = parts["recall"](logits, targets, mask, sample_weight=weight)
    expected = expected + parts["ce"](logits, targets, sample_weight=weight)
    expected = expected + parts["torch"](logits, targets[:, None].double())  # takes no weights
    assert torch.equal(found, expected)
    indexes = torch.arange(ROWS) // 6
    queries = CombinedLoss({"ap": SmoothAPLoss(1), "ce": BCEWithLogitsLoss()})(logits, targets, indexes=indexes)
    assert torch.equal(queries, SmoothAPLoss(1)(logits, targets, indexes=indexes) + parts["ce"](logits, targets))
    with pytest.raises(TypeError, match="iid_mask: expected None, because no part takes it, got a bool tensor"):
        CombinedLoss({"ce": BCEWithLogitsLoss()})(logits, targets, mask)


def test_losses_of_torch_get_the_targets_they_need() -> None:
    logits, targets = draw(ROWS, 3)
    loss = CombinedLoss({"torch": nn.CrossEntropyLoss(), "ce": CrossEntropyLoss(), "ap": SmoothAPLoss(3)})
    for form in (targets, targets.int(), targets.double(), targets[:, None]):
        loss(logits, form)
        assert_close(loss.parts["torch"], loss.parts["ce"], rtol=1e-14, atol=0.0)
    alone = CombinedLoss({"torch": nn.CrossEntropyLoss(), "again": nn.CrossEntropyLoss()})
    with pytest.raises(ValueError, match=r"targets: expected .*got \d\.5"):
        alone(logits, targets + 0.5)
    with pytest.raises(ValueError, match="CrossEntropyLoss of one logit is always 0"):
        CombinedLoss({"torch": nn.CrossEntropyLoss(), "ap": SmoothAPLoss(1)})(*draw(ROWS))


def test_state_copies_and_pickles() -> None:
    """Of another number of parts, or with other names, nothing is loaded; test_savers.py restarts trainings."""
    loss = make()
    loss.weights = {"ap": 0.25, "ce": 1.0}
    copy.deepcopy(loss).weights = {"ap": 1.0, "ce": 1.0}
    assert loss.weights["ap"] == 0.25
    other = CombinedLoss({"ap": SmoothAPLoss(1, queue_size=4), "ce": BCEWithLogitsLoss()}, {"ap": 3, "ce": 3})
    with pytest.raises(ValueError, match="capacity"):  # a queue of other arguments: nothing has been loaded
        other.load_state_dict(loss.state_dict())
    assert dict(other.weights) == {"ap": 3.0, "ce": 3.0}
    renamed = CombinedLoss({"ap": SmoothAPLoss(1, queue_size=4), "bce": BCEWithLogitsLoss()})
    renamed.weights = {"ap": 3.0, "bce": 3.0}
    names = r"weights of the saved state: expected those of \['ap', 'ce'\], got other names"
    for changed, kind, text in (
        ({"_extra_state": {"temperature": 0.1}}, RuntimeError, 'Unexpected key.* "_extra_state"'),  # of another class
        ({"_extra_state": {"weights": {"ap": 1.0, "bce": 1.0}}}, ValueError, names),
        ({"saved_weights": renamed.state_dict()["saved_weights"]}, ValueError, names),
        (
            {"saved_weights": torch.ones(4)},
            ValueError,
            r"expected a tensor of torch.float64 \(3,\), got torch.float32 \(4,",
        ),
    ):
        with pytest.raises(kind, match=text):
            other.load_state_dict({**other.state_dict(), **changed})
    turned = CombinedLoss({"ce": BCEWithLogitsLoss(), "ap": SmoothAPLoss(1, queue_size=8)})
    turned.load_state_dict(loss.state_dict())  # the weights have their names in another order of the parts too
    assert dict(turned.weights) == dict(loss.weights)
    assert "weights={'ap': 0.25, 'ce': 1.0}" in repr(loss)


def test_it_is_the_main_loss_of_a_warm_up_and_a_part_of_another() -> None:
    inner = make(queue_size=0, weights={"ap": 0.5, "ce": 0.5})
    warm = LossWarmupWrapper(BCEWithLogitsLoss(), inner, warmup_steps=1, blend_steps=1)
    logits, targets = draw(ROWS)
    ap, ce = SmoothAPLoss(1)(logits, targets), BCEWithLogitsLoss()(logits, targets)
    for step, weight in enumerate([0.0, 0.5, 1.0]):
        warm.on_train_batch_start(step)
        expected = (1 - weight) * ce + weight * (0.5 * ap + 0.5 * ce)
        assert_close(warm(logits, targets), expected, rtol=1e-14, atol=0.0)
    outer = CombinedLoss({"warm": warm, "ce": BCEWithLogitsLoss()}, {"warm": 2.0, "ce": 1.0})
    assert_close(outer(logits, targets), 2 * (0.5 * ap + 0.5 * ce) + ce, rtol=1e-14, atol=0.0)
    compared: list[Any] = []
    inner.losses["ap"].register_forward_pre_hook(lambda *_: compared.append(SURROUNDING.get()))
    outer(logits, targets)
    assert {name: fact.value for name, fact in compared[0].items()} == {
        "weights": {"warm": 2.0, "ce": 1.0},
        "schedule": 1.0,
        "inner weights": {"ap": 0.5, "ce": 0.5},
    }
    assert SURROUNDING.get() == {}  # a part that is called alone compares nothing of it


def test_a_part_must_return_a_tensor() -> None:
    class Pair(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Any:
            return logits.sum(), targets

    with pytest.raises(TypeError, match=r"losses\['pair'\]: expected a loss that returns a tensor, got tuple"):
        CombinedLoss({"pair": Pair()})(*draw(ROWS))


@pytest.mark.parametrize(("ce", "collectives"), [("sums", 1), ("balanced", 2), ("own rows", 1), ("other group", 2)])
@on_ranks()
def test_a_sum_over_ranks_and_a_pool_agree_once(rank: int, ce: str, collectives: int) -> None:
    """The same bits as the parts alone, with a rank without rows; where they cannot agree once, each by itself."""
    options: dict[str, Any] = {
        "sums": {},
        "balanced": {"class_weight": "balanced"},
        "own rows": {"gather_distributed": False},
        "other group": {"group": dist.new_group()},
    }[ce]
    parts, alone = ({"ap": SmoothAPLoss(1, queue_size=20), "ce": BCEWithLogitsLoss(**options)} for _ in range(2))
    loss = CombinedLoss(parts)
    for step in range(3):
        logits, targets = draw(ROWS * rank, seed=10 * step + rank)
        with CollectiveCounter() as counter:
            found = loss(logits, targets)
        expected = alone["ap"](logits, targets) + alone["ce"](logits, targets)
        gradients = [torch.autograd.grad(value, logits)[0] for value in (found, expected)]
        assert torch.equal(found, expected)
        assert torch.equal(*gradients)
    assert counter.total == collectives


@on_ranks()
def test_a_part_that_was_replaced_by_one_with_rows_is_refused_on_every_rank(rank: int) -> None:
    loss = CombinedLoss({"ap": SmoothAPLoss(1, queue_size=20), "ce": BCEWithLogitsLoss()})
    loss.losses["ce"] = BCEWithLogitsLoss(class_weight="balanced")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"a call without rows.* construct that loss again"):
            loss(*draw(2, seed=rank))
        assert len(loss.losses["ap"].queue) == 0


@on_ranks()
def test_a_sum_that_fails_after_it_agreed_leaves_the_queue_alone(rank: int) -> None:
    loss = CombinedLoss({"ap": SmoothAPLoss(1, queue_size=20), "ce": BCEWithLogitsLoss()})

    def fail(*_: object) -> None:
        raise KeyError("after the agreement")

    for step in range(2):
        with loss.losses["ce"].register_forward_hook(fail), pytest.raises(KeyError):
            loss(*draw(2, seed=rank))
        assert len(loss.losses["ap"].queue) == 2 * step * dist.get_world_size()
        loss(*draw(2, seed=rank))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("fault", ["weights", "outer weights", "arguments", "soft targets"])
@on_ranks()
def test_a_fault_of_one_rank_raises_on_all(rank: int, fault: str, step: int) -> None:
    """Weights, named once; an argument whose name both parts have; what AP refuses and a loss of torch has taken."""
    ce = nn.BCEWithLogitsLoss if fault == "soft targets" else BCEWithLogitsLoss
    found, twin = (CombinedLoss({"ap": SmoothAPLoss(1, queue_size=30), "ce": ce()}) for _ in range(2))
    if fault == "outer weights":
        found, twin = (CombinedLoss({"ap": one, "ce": CombinedLoss({"only": ce()})}) for one in (found, twin))
    for index in range(step + 2):
        logits, targets = draw(ROWS + rank, seed=10 * index + rank)
        if index != step:
            assert torch.equal(found(logits, targets), twin(logits, targets))  # no queue has seen the spoiled step
        elif "weights" in fault:
            found.weights = {"ap": 1.0, "ce": 0.5 if rank == 1 else 1.0}
            error, text = error_of(partial(found, logits, targets))
            found.weights = twin.weights
            assert error == "RuntimeError"
            assert text.count("{'ap': 1.0, 'ce': 1.0} on ") == 1
        elif fault == "arguments":
            found.losses["ap"].reduction = "sum" if rank == 1 else "mean"
            error, text = error_of(partial(found, logits, targets))
            found.losses["ap"].reduction = "mean"
            assert error == "RuntimeError"
            assert "got reduction: 'mean' on " in text
        else:
            error, text = error_of(partial(found, logits, targets.double() * (2 if rank == 1 else 1)))
            assert error == "ValueError"
            assert " failed on rank 1: " in text


@on_ranks()
def test_weights_are_compared_as_numbers(rank: int) -> None:
    """The control, other numbers, is an argument that differs in test_drift.py."""
    loss = CombinedLoss(
        {"ap": SmoothAPLoss(1), "ce": BCEWithLogitsLoss()}, [{"ap": 0, "ce": 2}, {"ap": -0.0, "ce": 2.0}][rank % 2]
    )
    assert torch.isfinite(loss(*draw(ROWS + rank, seed=rank)))
