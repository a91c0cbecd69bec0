"""Rows that a public gather has gathered already are refused by a loss that would gather them again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workers import WorkerPool, error_of

import fullrank
from fullrank.distributed.gather import check_not_gathered
from fullrank.losses import smooth_ap

SCALE = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

# What a model may do with gathered logits before it hands them to the loss.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "as they come": lambda x: x,
    "converted": lambda x: x.float(),
    "reshaped": lambda x: x.squeeze(1).unsqueeze(1),
    "scaled": lambda x: 2 * x / 3 - 1,
    "with a learned temperature": lambda x: x * SCALE,
    "a slice": lambda x: x[1:],
    "chosen": lambda x: x[torch.arange(len(x) - 1)],
    "fifteen operators": lambda x: sum([0.5] * 14, x) + 1,
}
TOO_FAR: dict[str, Callable[[Tensor], Tensor]] = {"seventeen operators": lambda x: sum([0.5] * 17, x)}


def own_rows(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Return this rank's logits (N, 1), which require a gradient, and targets; N differs between ranks."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    logits = torch.randn(6 + rank, 1, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), torch.arange(6 + rank) % 3 % 2


def fit(targets: Tensor, logits: Tensor) -> Tensor:
    """Return as many of the last targets as there are logits."""
    return targets[len(targets) - len(logits) :]


def gathered_again(rank: int, change: str, gather_distributed: bool | None) -> list[tuple[str, str, int]]:
    """Hand gathered logits to a loss in two steps; return the errors, and the rows in the queue."""
    loss = fullrank.SmoothAPLoss(1, queue_size=64, temperature=0.3, gather_distributed=gather_distributed)
    outcomes = []
    for step in range(2):
        logits, targets = own_rows(rank, step)
        changed = (CHANGES | TOO_FAR)[change](fullrank.all_gather_with_grad(logits))
        all_targets = fit(targets.new_tensor(fullrank.all_gather_no_grad(targets).tolist()), changed)
        outcomes.append((*error_of(partial(loss, changed, all_targets)), len(loss.queue)))
    return outcomes


def targets_alone(rank: int, change: str) -> tuple[str, str]:
    """Hand gathered targets, or a view of them, to a loss with logits that show nothing."""
    targets = own_rows(rank)[1]
    with torch.no_grad():
        all_logits = torch.cat([own_rows(other)[0] for other in range(dist.get_world_size())])
    gathered = fullrank.gather_rows(targets)[0]
    assert gathered is not None
    gathered = {"object": gathered, "view": gathered[:], "copy": gathered.clone()}[change]
    return error_of(lambda: fullrank.SmoothAPLoss(1, queue_size=0, temperature=0.3)(all_logits, gathered))


def loss_and_gradient(rank: int, form: str) -> tuple[float, float]:
    """Return how far the loss and the gradient of the own rows are from those of one process with all rows."""
    world_size = dist.get_world_size()
    whole = [own_rows(other) for other in range(world_size)]
    rows, labels = torch.cat([x for x, _ in whole]).detach().requires_grad_(), torch.cat([y for _, y in whole])
    value = smooth_ap(rows, labels, temperature=0.3)
    (gradient,) = torch.autograd.grad(value, rows)
    counts = [len(x) for x, _ in whole]
    expected = gradient.split(counts)[rank] * world_size  # the wrapper divides by the number of ranks
    logits, targets = own_rows(rank)
    loss = fullrank.SmoothAPLoss(1, queue_size=0, temperature=0.3)
    if form == "own rows":
        found = loss(logits, targets)
    else:
        loss.gather_distributed = None if form == "hidden" else False
        gathered = fullrank.all_gather_with_grad(logits)
        if form == "hidden":  # the control: what the check prevents, through a function that hides the gather
            gathered = gathered.exp().log()
        all_targets = fullrank.all_gather_no_grad(targets).clone()
        found = loss(gathered, all_targets)
    (own,) = torch.autograd.grad(found, logits)
    return abs(found.item() - value.item()) / abs(value.item()), float((own - expected).norm() / expected.norm())


def others(rank: int) -> dict[str, tuple[str, str]]:
    """Return the errors of the losses that are not over one column of logits."""
    logits, targets = own_rows(rank)
    x, y = fullrank.all_gather_with_grad(logits), fullrank.all_gather_no_grad(targets)
    pairs = torch.cat([x, -x], dim=1)
    calls: dict[str, Callable[[], Any]] = {
        "recall": lambda: fullrank.RecallAtQuantileLoss(1, quantile=0.3, temperature=0.3)(x, y),
        "pauc": lambda: fullrank.PAUCAtBudgetLoss(1, beta=0.5)(x, y),
        "retrieval": lambda: fullrank.RetrievalSmoothAPLoss()(pairs, y),
        "focal sum": lambda: fullrank.SoftmaxFocalLoss(reduction="sum")(pairs, y),
        "binary sum": lambda: fullrank.SigmoidFocalLoss(reduction="sum")(x, y[:, None].double()),
        "warm-up": lambda: fullrank.LossWarmupWrapper(
            fullrank.SoftmaxFocalLoss(), fullrank.SmoothAPLoss(2), warmup_steps=0
        )(pairs, y),
    }
    return {name: error_of(call) for name, call in calls.items()}


def focal_mean(rank: int) -> tuple[float, float]:
    """Return how far a focal mean over gathered rows is from one process, in value and in gradient."""
    whole = [own_rows(other) for other in range(dist.get_world_size())]
    rows, labels = torch.cat([x for x, _ in whole]).detach().requires_grad_(), torch.cat([y for _, y in whole])
    loss = fullrank.SigmoidFocalLoss()
    loss.gather_distributed = False
    value = loss(rows, labels[:, None].double())
    (gradient,) = torch.autograd.grad(value, rows)
    expected = gradient.split([len(x) for x, _ in whole])[rank] * len(whole)
    loss.gather_distributed = None
    logits, targets = own_rows(rank)
    x, y = fullrank.all_gather_with_grad(logits), fullrank.all_gather_no_grad(targets)
    found = loss(x, y[:, None].double())
    (own,) = torch.autograd.grad(found, logits)
    return abs(found.item() - value.item()), float((own - expected).norm() / expected.norm())


def allowed(rank: int) -> list[tuple[str, str]]:
    """Return the errors of calls that are right although a gather came before."""
    loss = fullrank.SmoothAPLoss(1, queue_size=0, temperature=0.3)
    logits, targets = own_rows(rank)
    groups = [dist.new_group([member]) for member in range(dist.get_world_size())]
    alone = fullrank.all_gather_with_grad(logits, groups[rank])
    spread = fullrank.all_gather_with_grad(logits, backward="reduce_scatter")
    first = sum(6 + other for other in range(rank))
    similar = logits.detach() @ fullrank.all_gather_with_grad(logits).t()  # the own rows against all
    return [
        error_of(lambda: loss(alone, targets)),
        error_of(lambda: loss(spread[first : first + 6 + rank], targets)),
        error_of(lambda: fullrank.SmoothAPLoss(similar.shape[1], queue_size=0, temperature=0.3)(similar, targets)),
        error_of(lambda: loss(logits, targets)),
    ]


def groups_that_share_one_rank(rank: int) -> list[str]:
    """Gather over pairs of ranks, then hand the rows to losses over the other pairs, and over all ranks."""
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    first, second = ([dist.new_group(ranks) for ranks in pairs][rank in pairs[1]] for pairs in (rows, columns))
    logits, targets = own_rows(rank)
    x, y = fullrank.all_gather_with_grad(logits, first), fullrank.all_gather_no_grad(targets, first)
    losses = [fullrank.SmoothAPLoss(1, queue_size=0, temperature=0.3, group=group) for group in (second, None)]
    return [error_of(lambda loss=loss: loss(x, y))[0] for loss in losses]


class Operators(TorchDispatchMode):
    """Counts the operators that reach the dispatcher, collectives among them."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def operators_of_the_check(rank: int) -> tuple[int, int]:
    """Return the operators that the check of logits and targets runs, and those of a copy, as a control."""
    logits, targets = own_rows(rank)
    changed = CHANGES["fifteen operators"](logits * 2)
    assert dist.group.WORLD is not None
    with Operators() as check:
        for name, tensor in {"logits": changed, "targets": targets}.items():
            check_not_gathered(name, tensor, dist.group.WORLD)
    with Operators() as copy:
        changed.clone()
    return check.number, copy.number


def one_dimension(rank: int) -> list[tuple[str, str]]:
    """Hand rows (N,) that were gathered for different losses to a loss: all of them, and those of this rank."""
    loss = fullrank.SmoothAPLoss(1, queue_size=0, temperature=0.3)
    logits, targets = own_rows(rank)
    spread = 2 * fullrank.all_gather_with_grad(logits[:, 0], backward="reduce_scatter")
    all_targets = fullrank.all_gather_no_grad(targets).clone()
    first = sum(6 + other for other in range(rank))
    own = spread[first : first + 6 + rank]
    return [error_of(lambda: loss(spread, all_targets)), error_of(lambda: loss(own, targets))]


CASES = [("as they come", True), *((name, None) for name in CHANGES)]


@pytest.mark.parametrize(("change", "gather_distributed"), CASES)
def test_gathered_logits_are_refused(pool: WorkerPool, change: str, gather_distributed: bool | None) -> None:
    """On every rank, in the first and in the second step, with nothing enqueued."""
    outcomes = pool(gathered_again, change, gather_distributed)
    assert len({tuple(outcome) for outcome in outcomes}) == 1
    for error, text, queued in outcomes[0]:
        assert error == "ValueError"
        assert "logits: expected the rows of this rank, got rows that were gathered already." in text
        assert "gather_distributed=False" in text
        assert queued == 0


def test_without_a_gather_in_the_loss_gathered_rows_are_right(pool: WorkerPool) -> None:
    assert {error for outcome in pool(gathered_again, "as they come", False) for error, _, _ in outcome} == {"none"}
    for form in ("own rows", "gathered"):
        assert max(max(errors) for errors in pool(loss_and_gradient, form)) <= 1e-12


def test_control_what_is_gathered_again_is_wrong(pool_of_two: WorkerPool) -> None:
    """Where the graph hides the gather, value and gradient are off and the queue holds every row several times."""
    value, gradient = pool_of_two(loss_and_gradient, "hidden")[0]
    assert value > 0.01
    assert gradient > 0.01
    outcomes = pool_of_two(gathered_again, "seventeen operators", None)[0]
    assert [queued for *_, queued in outcomes] == [26, 52]  # of 13 rows a step


def test_gathered_targets_are_refused(pool_of_two: WorkerPool) -> None:
    for change in ("object", "view"):
        for error, text in pool_of_two(targets_alone, change):
            assert error == "ValueError"
            assert "targets: expected the rows of this rank, got rows that were gathered already." in text
    assert {error for error, _ in pool_of_two(targets_alone, "copy")} == {"none"}


def test_every_loss_that_would_be_wrong_refuses_them(pool_of_two: WorkerPool) -> None:
    for outcomes in pool_of_two(others):
        for name, (error, text) in outcomes.items():
            assert error == "ValueError", name
            assert "rows that were gathered already" in text


def test_a_focal_mean_over_gathered_rows_is_right(pool: WorkerPool) -> None:
    """Numerator and denominator both count every row once per rank."""
    assert max(max(errors) for errors in pool(focal_mean)) <= 1e-12


def test_a_gather_before_a_loss_may_be_right(pool_of_two: WorkerPool) -> None:
    assert pool_of_two(allowed) == [[("none", "")] * 4] * 2


def test_a_gather_over_other_ranks_may_come_first(pool_of_four: WorkerPool) -> None:
    assert pool_of_four(groups_that_share_one_rank) == [["none", "ValueError"]] * 4


def test_all_rows_of_one_dimension_are_refused_and_the_own_are_not(pool_of_two: WorkerPool) -> None:
    for whole, own in pool_of_two(one_dimension):
        assert whole[0] == "ValueError"
        assert "logits: expected the rows of this rank, got rows that were gathered already." in whole[1]
        assert own == ("none", "")


def test_the_check_runs_no_operator(pool_of_two: WorkerPool) -> None:
    assert pool_of_two(operators_of_the_check) == [(0, 1)] * 2
