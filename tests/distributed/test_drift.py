"""State that has come apart between ranks is named in the next step, at no cost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import gradient_cases
import pytest
import torch
import torch.distributed as dist
from gradient_cases import Case
from loss_cases import FORMS, LOSSES, OF_POOL, normal
from on_ranks import common_error, on_ranks
from torch import Tensor, nn
from workers import error_of

import fullrank
from fullrank.kernels import native
from fullrank.losses import RankingLoss


class Drift(NamedTuple):
    """``apply(loss, is_odd, saved)`` lets one rank drift; ``text`` is a part of the message in the next step."""

    apply: Callable[[RankingLoss, bool, dict[str, Any]], None]
    text: str


def _on_one(change: Callable[[RankingLoss], Any], text: str) -> Drift:
    return Drift(lambda loss, is_odd, saved: change(loss) if is_odd else None, text)


def _enqueue(loss: RankingLoss, *values: float, **options: Tensor) -> None:
    for value in values:
        logits = torch.tensor([[value, 0.0], [0.5, 0.25]], dtype=torch.float64)
        loss.queue.enqueue(logits, torch.tensor([0, 1]), **options)


def _set(**attributes: Any) -> Callable[[RankingLoss], None]:
    def change(loss: RankingLoss) -> None:
        for name, value in attributes.items():
            setattr(loss, name, value)

    return change


DRIFTS = {
    "temperature": _on_one(_set(temperature=0.7), "temperature: "),
    "eval mode": _on_one(lambda loss: loss.eval(), "enqueues rows: "),
    "updates in eval mode": Drift(lambda loss, odd, _: _set(update_queue_in_eval=odd)(loss.eval()), "enqueues rows: "),
    # Every rank enqueues its rows; the one in eval mode would rank without the queue.
    "eval mode, updates everywhere": Drift(
        lambda loss, odd, _: _set(update_queue_in_eval=True)(loss.train(not odd)), "ranks queued rows: "
    ),
    "reset": _on_one(lambda loss: loss.reset_queue(), "queue: {"),
    "a step alone": _on_one(lambda loss: _enqueue(loss, 0.7), "queue: {"),
    "pointer": _on_one(lambda loss: setattr(loss.queue, "_pointer", loss.queue._pointer + 1), "queue: {"),
    "weighted rows": Drift(
        lambda loss, odd, _: _enqueue(loss, 0.7, **{"sample_weight": torch.ones(2)} if odd else {}), "queue: {"
    ),
    "other rows": Drift(lambda loss, odd, _: _enqueue(loss, 0.7 if odd else -0.7), "queue: contents "),
    "other rows, eval mode": Drift(
        lambda loss, odd, _: _enqueue(loss.eval(), 0.7 if odd else -0.7), "queue: contents "
    ),
    "order of rows": Drift(lambda loss, odd, _: _enqueue(loss, *(0.7, -0.7)[:: -1 if odd else 1]), "queue: contents "),
    "draws": _on_one(lambda loss: setattr(loss, "_num_draws", loss._num_draws + 1), "draws: "),
    "a checkpoint on one rank": Drift(
        lambda loss, is_odd, saved: loss.load_state_dict(saved) if is_odd else None, "queue: {"
    ),
    "reduction": _on_one(_set(reduction="sum"), "got reduction: '"),
    "gradient_reduction": _on_one(_set(gradient_reduction="sum"), "got gradient_reduction: '"),
    "max_pool_size": _on_one(_set(max_pool_size=5), "got max_pool_size: "),
}


def _take_step(loss: nn.Module, rank: int, index: int) -> float:
    generator = torch.Generator().manual_seed(10 * index + rank)
    logits = torch.randn(5 + rank, 2, dtype=torch.float64, generator=generator)
    return float(loss(logits, torch.randint(0, 2, (5 + rank,), generator=generator)))


def assert_named(call: Callable[[], Any], odd_rank: int, *texts: str) -> None:
    """On every rank the same error, which says that something differs and on which rank."""
    found, text = common_error(call)
    assert found == "RuntimeError", text
    assert ": expected the same on every rank, got " in text
    assert f" on rank {odd_rank}" in text
    assert all(part in text for part in texts), text


pytestmark = pytest.mark.filterwarnings("ignore:.*drawn down")

# One loss with every drift; the other forms take turns.
DRIFTING: list[Any] = [("smooth_ap", kind) for kind in DRIFTS]
DRIFTING += [
    pytest.param(name, kind, marks=pytest.mark.slow)
    for turn, kind in enumerate(DRIFTS)
    for name in OF_POOL[1:][turn % 4 :: 4]
    if kind != "temperature" or ("temperature" in FORMS[name].loss.arguments and "dro" not in name)
]


@pytest.mark.parametrize(("name", "kind"), DRIFTING)
@on_ranks()
def test_drift_of_one_rank_is_named_in_the_next_step(rank: int, name: str, kind: str) -> None:
    """After two steps, of each rank in turn. With the state from before, it continues as if it had not."""
    for odd_rank in range(dist.get_world_size()):
        case = Case(name, num_classes=2, options={"max_pool_size": 30})
        loss, repaired = (gradient_cases.make_loss(case, local=False) for _ in range(2))
        _take_step(loss, rank, 0)
        first = copy.deepcopy(loss.state_dict())
        _take_step(loss, rank, 1)
        pristine = copy.deepcopy(loss)
        repaired.load_state_dict(copy.deepcopy(loss.state_dict()))
        DRIFTS[kind].apply(loss, rank == odd_rank, first)
        assert_named(partial(_take_step, loss, rank, 2), odd_rank, DRIFTS[kind].text)
        assert _take_step(repaired, rank, 2) == _take_step(pristine, rank, 2)


ARGUMENTS = [
    (loss.name, argument)
    for loss in LOSSES.values()
    for argument in sorted(loss.arguments)
    if loss.kind not in ("queries", "parts") and not loss.argument(argument).apart
]


@pytest.mark.parametrize(
    ("name", "argument"),
    [pytest.param(*case, marks=[] if case[0] == ARGUMENTS[0][0] else pytest.mark.slow) for case in ARGUMENTS],
)
@on_ranks(2)
def test_another_argument_on_one_rank_is_named(rank: int, name: str, argument: str) -> None:
    form = LOSSES[name].form_with(argument)
    for odd_rank in range(2):
        arguments = form.given(num_classes=2)
        if rank == odd_rank:
            other = form.loss.argument(argument).other
            arguments[argument] = other() if callable(other) else other
        rows, targets = normal(4, arguments.get("num_classes", form.columns)), torch.tensor([0, 1, 0, 1])
        if arguments.get("multi_hot"):
            targets = torch.nn.functional.one_hot(targets, 2)
        call = partial(form.loss.module(**arguments), **form.arguments(rows, targets))
        assert_named(call, odd_rank, argument)


@pytest.mark.parametrize(
    ("blend", "step", "behind", "text"),
    [
        (0, 2, 1, "call: "),  # the others have left the warm-up
        (4, 2, 1, "schedule: "),  # the same call, with another weight of the main loss
        (4, 4, 1, "schedule: "),
        (4, 9, 3, "temperature: "),
        *((4, step, 0, "") for step in (2, 4, 9)),  # the controls
    ],
)
@on_ranks()
def test_a_schedule_that_is_behind_on_one_rank(rank: int, blend: int, step: int, behind: int, text: str) -> None:
    """In a schedule of two warm-up and ``blend`` blend steps."""
    for odd_rank in range(dist.get_world_size()):
        main = fullrank.SmoothAPLoss(num_classes=2, queue_size=0)
        # Inside a module too: a schedule reaches the loss wherever it stands.
        warmup = nn.Sequential(fullrank.SoftmaxFocalLoss())
        warmup.forward = lambda logits, targets, warmup=warmup: warmup[0](logits, targets)
        decay = {"temp_start": 0.05, "temp_end": 0.005, "temp_decay_steps": 100}
        loss = fullrank.LossWarmupWrapper(warmup, main, warmup_steps=2, blend_steps=blend, **decay)
        for index in range(step + 1 - behind * (rank == odd_rank)):
            loss.on_train_batch_start(index)
        call = partial(_take_step, loss, rank, 0)
        if behind:
            assert_named(call, odd_rank, text)
        else:
            call()


@on_ranks(2)
def test_damage_that_no_checksum_sees(rank: int) -> None:
    """The header compares what entered the queue; assert_synchronized compares what it holds."""
    loss = fullrank.SmoothAPLoss(num_classes=2, queue_size=40, temperature=0.5)
    _take_step(loss, rank, 0)
    loss.queue.assert_synchronized()
    assert loss.queue.checksum != 0  # which is now that of the rows before the damage
    if rank == 1:
        loss.queue.rows().logits[0] += 1
    own = [dist.new_group([member]) for member in range(2)][rank]
    loss.queue.assert_synchronized(own)
    _take_step(loss, rank, 1)
    kind, text = error_of(loss.queue.assert_synchronized)
    assert kind == "RuntimeError"
    for part in ("MemoryQueue.assert_synchronized: expected the same on every rank", "on rank 1", "reset_queue()"):
        assert part in text


@pytest.mark.parametrize("in_place", [False, True])
@on_ranks(2)
def test_an_argument_that_is_a_tensor(rank: int, in_place: bool) -> None:
    """After two calls another one on every rank, or the same object with other values; then on one rank."""

    class WithMargins(fullrank.SmoothAPLoss):
        own_arguments = ("margins",)

    loss = WithMargins(2, queue_size=4)
    loss.margins = torch.tensor([0.1, 0.2])
    for step, margin in enumerate((0.2, 0.2, 0.4, 0.4 + rank)):
        if step > 1:
            new = torch.tensor([0.1, margin])
            loss.margins = loss.margins.copy_(new) if in_place else new
        if step < 3:
            _take_step(loss, rank, step)
    assert_named(lambda: _take_step(loss, rank, 3), 1, "got margins: tensor")


@on_ranks(2)
def test_kernels_of_another_form(rank: int) -> None:
    """Their results differ in the last bits, so ranks must not mix them: in the first step and in the second."""
    loss, logits, targets = fullrank.SmoothAPLoss(queue_size=0), torch.randn(4, 1), torch.tensor([0, 1, 0, 1])
    for forms in (("native", "torch"), ("torch", "torch"), ("torch", "native")):
        with mock.patch.object(native, "KERNELS", forms[rank]):
            kind, text = error_of(lambda: loss(logits, targets))
        assert kind == ("none" if forms[0] == forms[1] else "RuntimeError")
        assert forms[0] == forms[1] or f"kernels: '{forms[0]}' on rank 0, '{forms[1]}' on rank 1" in text
