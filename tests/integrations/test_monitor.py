"""What the logging callbacks show: temperatures, positives of the pool, and calls without one, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collective_counter import CollectiveCounter
from gradient_cases import forced
from loss_cases import normal
from on_ranks import on_ranks
from torch import Tensor, nn

import fullrank
from fullrank.integrations.monitor import Monitor
from fullrank.large import ShardedLoss

# Targets of the rows of each rank in three calls. The second has no positive on any rank, the third one on rank 1.
CALLS = [([1, 0, 1], [0]), ([0, 0], [0, 0, 0]), ([], [0, 1, 0])]


def rows(rank: int, call: int) -> tuple[Tensor, Tensor]:
    targets = torch.tensor(CALLS[call][min(rank, 1)], dtype=torch.int64)
    return normal(len(targets), 1, seed=10 * call + rank).requires_grad_(), targets


def seen(monitor: Monitor) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in monitor.values().items()}


@pytest.mark.parametrize(("queue_size", "form"), [(0, ""), (16, ""), (0, "moments"), (0, "gather")])
@on_ranks(2)
def test_the_positives_are_those_of_the_pool_of_all_ranks(rank: int, queue_size: int, form: str) -> None:
    loss = fullrank.SmoothAPLoss(temperature=0.25, queue_size=queue_size)
    both = fullrank.CombinedLoss({"ce": fullrank.BCEWithLogitsLoss(), "ap": ShardedLoss(loss) if form else loss})
    monitor, name = Monitor(both), "losses.ap.loss" if form else "losses.ap"
    monitor.start()
    assert seen(monitor) == {f"{name}/temperature": 0.25}
    in_pool = [2, 2, 3] if queue_size else [2, 0, 1]  # what is queued in a call belongs to the pool of the next
    for call, _ in enumerate(CALLS):
        with CollectiveCounter() as counted, forced(form):
            both(*rows(rank, call)).backward()
            with_monitor, before = counted.total, seen(monitor)
        assert counted.total == with_monitor  # reading communicates nothing
        assert before[f"{name}/positives"] == round(sum(in_pool[: call + 1]) / (call + 1), 6)
        missing = 0 if queue_size else int(call >= 1)
        assert before[f"{name}/without_positives"] == round(missing / (call + 1), 6)
    loss.eval()(*rows(rank, 0))
    assert seen(monitor) == before  # a validation does not count
    monitor.start()
    loss.train()(*rows(rank, 0))
    assert seen(monitor)[f"{name}/positives"] == (5 if queue_size else 2)
    monitor.stop()
    assert loss.pool_counts is None


@on_ranks(2)
def test_the_monitor_adds_no_collective(rank: int) -> None:
    totals = []
    for is_watched in (False, False, True):  # the first one on a group makes one more
        loss = fullrank.RecallAtQuantileLoss(quantile=0.5)
        if is_watched:
            Monitor(loss).start()
        with CollectiveCounter() as counted:
            for call, _ in enumerate(CALLS):
                loss(*rows(rank, call)).backward()
        totals.append(counted.total)
    assert totals[1] == totals[2] > 0, totals


def test_several_classes_and_queries_are_means() -> None:
    loss = fullrank.SmoothAPLoss(num_classes=4)
    monitor = Monitor(loss)
    monitor.start()
    loss(torch.randn(6, 4), torch.tensor([0, 0, 0, 1, 1, -100]))  # classes 2 and 3 have none
    assert seen(monitor)["positives"] == 5 / 4
    assert seen(monitor)["without_positives"] == 0.5
    loss = fullrank.SmoothAPLoss()
    monitor = Monitor(loss)
    monitor.start()
    loss(torch.randn(6), torch.tensor([1, 0, 0, 1, 0, 0]), indexes=torch.tensor([0, 0, 1, 1, 2, 2]))
    assert seen(monitor)["positives"] == 2
    assert seen(monitor)["without_positives"] == pytest.approx(1 / 3, abs=1e-6)
    loss(torch.randn(0), torch.zeros(0), indexes=torch.zeros(0, dtype=torch.int64))  # no query is missing
    assert seen(monitor)["without_positives"] == pytest.approx(1 / 6, abs=1e-6)


LOSSES = [
    (fullrank.InfoNCELoss(0.2, learn_temperature=True), 0.2),
    (fullrank.InfoNCELoss(0.2), 0.2),
    (fullrank.SupConLoss(0.3), 0.3),
    (fullrank.RetrievalSmoothAPLoss(0.4), 0.4),
    (fullrank.NDCGLoss(0.5), 0.5),
    (fullrank.SmoothAPLoss(), None),  # automatic, before the first call
]


@pytest.mark.parametrize(("loss", "temperature"), LOSSES)
def test_the_temperature_of_each_loss(loss: nn.Module, temperature: float | None) -> None:
    expected: Any = {} if temperature is None else {"temperature": pytest.approx(temperature, rel=1e-6)}
    assert Monitor(loss).values() == expected


def test_a_monitor_without_anything_to_log_warns() -> None:
    with pytest.warns(UserWarning, match="no loss in the module has a temperature, so that nothing is logged"):
        assert Monitor(fullrank.BCEWithLogitsLoss()).values() == {}


def test_a_learned_temperature_is_held_at_its_limit() -> None:
    loss = fullrank.InfoNCELoss(0.2, learn_temperature=True, max_logit_scale=10.0)
    with torch.no_grad():
        loss.logit_scale.fill_(9.0)  # type: ignore[union-attr]
    assert float(Monitor(loss).values()["temperature"]) == pytest.approx(loss.temperature) == pytest.approx(0.1)
