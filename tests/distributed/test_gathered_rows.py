"""Rows of a public gather are refused by a loss that would gather them again, and by sums that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loss_cases import FORMS, normal
from on_ranks import on_ranks
from subjects import error
from torch import Tensor
from torch.nn.functional import cross_entropy
from workers import error_of

import fullrank
from fullrank.distributed import exchange, gather
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
    "seventeen operators": lambda x: sum([0.5] * 17, x),  # which is too far back: the control
}
REFUSED = "expected the rows of this rank, got rows that were gathered already."


def own_rows(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    return normal(6 + rank, 1, seed=10 * step + rank).requires_grad_(), torch.arange(6 + rank) % 3 % 2


def gather_all(rank: int, step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the own logits, those of all ranks with their gradient, and all targets, which show nothing."""
    logits, targets = own_rows(rank, step)
    return logits, fullrank.all_gather_with_grad(logits), fullrank.all_gather_no_grad(targets).clone()


def make_loss(**options: Any) -> fullrank.SmoothAPLoss:
    return fullrank.SmoothAPLoss(1, temperature=0.3, **options)


def gathered_again(rank: int, change: str, gather_distributed: bool | None = None) -> list[tuple[str, str, int]]:
    """Hand gathered logits to a loss in two steps; return the errors, and the rows in the queue."""
    loss, outcomes = make_loss(queue_size=64, gather_distributed=gather_distributed), []
    for step in range(2):
        _, rows, targets = gather_all(rank, step)
        changed = CHANGES[change](rows)
        outcomes.append((*error_of(partial(loss, changed, targets[len(targets) - len(changed) :])), len(loss.queue)))
    return outcomes


def errors_of(rank: int, found: Tensor, logits: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    """Return how far value and own gradient are from those of one process with all rows."""
    whole = [own_rows(other) for other in range(dist.get_world_size())]
    rows, labels = torch.cat([x for x, _ in whole]).detach().requires_grad_(), torch.cat([y for _, y in whole])
    value = compute(rows, labels)
    (gradient,), (own,) = torch.autograd.grad(value, rows), torch.autograd.grad(found, logits)
    expected = gradient.split([len(x) for x, _ in whole])[rank] * len(whole)  # the wrapper divides by the ranks
    return [error(found.detach(), value.detach()), error(own, expected)]


@pytest.mark.parametrize(("change", "setting"), [("as they come", True), *((name, None) for name in [*CHANGES][:-1])])
@on_ranks()
def test_gathered_logits_are_refused(rank: int, change: str, setting: bool | None) -> None:
    """On every rank, in the first and in the second step, with nothing enqueued."""
    for kind, text, queued in gathered_again(rank, change, setting):
        assert (kind, queued) == ("ValueError", 0)
        assert f"logits: {REFUSED}" in text
        assert "gather_distributed=False" in text


@on_ranks()
def test_without_a_gather_in_the_loss_gathered_rows_are_right(rank: int) -> None:
    assert {kind for kind, _, _ in gathered_again(rank, "as they come", False)} == {"none"}
    compute, (own, targets) = partial(smooth_ap, temperature=0.3), own_rows(rank)
    assert max(errors_of(rank, make_loss()(own, targets), own, compute)) <= 1e-12
    logits, rows, targets = gather_all(rank)
    assert max(errors_of(rank, make_loss(gather_distributed=False)(rows, targets), logits, compute)) <= 1e-12


@on_ranks(2)
def test_control_what_is_gathered_again_is_wrong(rank: int) -> None:
    """Where the graph hides the gather, value and gradient are off and the queue holds every row several times."""
    logits, rows, targets = gather_all(rank)
    assert (
        min(errors_of(rank, make_loss()(rows.exp().log(), targets), logits, partial(smooth_ap, temperature=0.3))) > 0.01
    )
    assert [queued for *_, queued in gathered_again(rank, "seventeen operators")] == [26, 52]  # of 13 rows a step


@pytest.mark.parametrize("uneven", [0, 1])
@pytest.mark.parametrize("count", [6, 9000])
@on_ranks(2)
def test_rows_and_targets_without_a_graph_are_refused(rank: int, count: int, uneven: int) -> None:
    """The object and a view of it, if the rows fit behind the header and if not, in both steps; a copy passes."""
    group = dist.new_group()
    for _ in range(2):
        number = count + uneven * rank
        rows, targets = (fullrank.all_gather_no_grad(torch.arange(number) % 3 % 2 * 1.0, group) for _ in range(2))
        for name, x, y in (
            *(("logits", x, targets.clone()) for x in (rows, rows[:])),
            *(("targets", rows.clone(), y) for y in (targets, targets[:])),
        ):
            kind, text = error_of(partial(make_loss(group=group), x, y))
            assert kind == "ValueError"
            assert f"{name}: {REFUSED}" in text
        assert error_of(partial(make_loss(group=group), rows.clone(), targets.clone())) == ("none", "")
    dist.destroy_process_group(group)


@on_ranks(2)
def test_a_view_that_a_gather_has_returned_is_refused(rank: int) -> None:
    """The guard does not hang on how torch makes the memory of a result."""
    y, whole = own_rows(rank)[1], exchange.Exchange.rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.Exchange, "rows", lambda *args: [rows.view(-1) for rows in whole(*args)])
        targets = fullrank.all_gather_no_grad(y.repeat(2**14))
    assert targets._is_view()
    kind, text = error_of(partial(make_loss(), targets.double(), targets))
    assert kind == "ValueError"
    assert f"targets: {REFUSED}" in text


@on_ranks(2)
def test_every_loss_that_would_be_wrong_refuses_them(rank: int) -> None:
    """A mean over elements is right, as each row counts once for each rank on both sides, and so is a balanced one."""
    x, y = own_rows(rank)
    y = fullrank.all_gather_no_grad(y)
    for name, form in FORMS.items():
        if "balanced" in form.settings.values():
            continue
        rows = fullrank.all_gather_with_grad(x.expand(-1, form.columns))
        options = {"reduction": "sum"} if form.loss.kind in ("classes", "elements") else {}
        for given in (form.arguments(rows, y.clone()), form.arguments(rows.detach().clone(), y)):
            if form.loss.module is not None and any(value is y or value.requires_grad for value in given.values()):
                kind, text = error_of(partial(form.make(**options), **given))
                assert kind == "ValueError", (name, kind, text)
                assert "rows that were gathered already" in text, (name, text)


@on_ranks()
def test_a_focal_mean_over_gathered_rows_is_right(rank: int) -> None:
    """Numerator and denominator both count every row once per rank."""
    logits, x, y = gather_all(rank)
    alone = fullrank.SigmoidFocalLoss(gather_distributed=False)
    found = fullrank.SigmoidFocalLoss()(x, y[:, None].double())
    assert max(errors_of(rank, found, logits, lambda rows, labels: alone(rows, labels[:, None].double()))) <= 1e-12


@on_ranks(2)
def test_a_gather_before_a_loss_may_be_right(rank: int) -> None:
    """Over a group of one; of which the own rows are taken; as classes; and before other rows."""
    logits, targets = own_rows(rank)
    groups = [dist.new_group([member]) for member in range(2)]
    alone = fullrank.all_gather_with_grad(logits, groups[rank])
    spread = fullrank.all_gather_with_grad(logits, backward="reduce_scatter")
    similar = logits.detach() @ fullrank.all_gather_with_grad(logits).t()  # the own rows against all
    own = spread[6 * rank : 6 + 7 * rank]
    for loss, rows in ((make_loss(), alone), (make_loss(), own), (make_loss(), logits)):
        assert error_of(partial(loss, rows, targets)) == ("none", "")
    classes = fullrank.SmoothAPLoss(similar.shape[1], temperature=0.3)
    assert error_of(partial(classes, similar, targets)) == ("none", "")


@on_ranks(4)
def test_a_gather_over_other_ranks_may_come_first(rank: int) -> None:
    """Gather over pairs of ranks, then hand the rows to losses over the other pairs, and over all ranks."""
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    first, second = ([dist.new_group(ranks) for ranks in pairs][rank in pairs[1]] for pairs in (rows, columns))
    logits, targets = own_rows(rank)
    x, y = fullrank.all_gather_with_grad(logits, first), fullrank.all_gather_no_grad(targets, first)
    assert [error_of(partial(make_loss(group=group), x, y))[0] for group in (second, None)] == ["none", "ValueError"]


@on_ranks(2)
def test_all_rows_of_one_dimension_are_refused_and_the_own_are_not(rank: int) -> None:
    logits, targets = own_rows(rank)
    spread = 2 * fullrank.all_gather_with_grad(logits[:, 0], backward="reduce_scatter")
    kind, text = error_of(partial(make_loss(), spread, fullrank.all_gather_no_grad(targets).clone()))
    assert kind == "ValueError"
    assert f"logits: {REFUSED}" in text
    assert error_of(partial(make_loss(), spread[6 * rank : 6 + 7 * rank], targets)) == ("none", "")


# How the own rows q (N, D) and those of all ranks k (M, D) make the sum of this rank, with the places of the own rows.
SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "own against all": lambda q, k, places: cross_entropy(q @ k.T, places, reduction="sum"),
    "two directions": lambda q, k, places: cross_entropy(q @ k.T, places, reduction="sum") / 2 + (k[places] - q).sum(),
    "of all": lambda q, k, places: cross_entropy(k @ k.T, torch.arange(len(k)), reduction="sum"),
    "of own and of all": lambda q, k, places: q.square().sum() + torch.cov(k.T).square().sum() / 2,
    "of own": lambda q, k, places: q.square().sum(),
}
COUNTS = [3, 5]
GUARDED = "own against all", "two directions"


def sum_of(name: str, own: Tensor, rank: int, call: str, backward: str) -> Tensor:
    """Return the loss of the rows of this rank; with ``call`` "loss" that of a summed loss, else a global mean."""
    places = torch.arange(len(own)) + sum(COUNTS[:rank])
    options: Any = {"backward": backward}
    rows = fullrank.gather_rows(own, **options)[0] if call == "rows" else fullrank.all_gather_with_grad(own, **options)
    if call == "loss":
        return fullrank.CrossEntropyLoss()(own @ rows.T, places)
    return fullrank.global_mean(SUMS[name](own, rows, places), len(own))


@pytest.mark.parametrize(
    ("name", "call"), [*((name, "mean") for name in SUMS), *((GUARDED[0], c) for c in ("rows", "loss"))]
)
@on_ranks(2)
def test_a_sum_that_differs_between_ranks_needs_the_gradients_of_all(rank: int, name: str, call: str) -> None:
    """The local backward leaves out what the other ranks' sums say about the own rows; the value is right."""
    gather.num_with_grad = 0  # as in a new process
    x = normal(sum(COUNTS), 4)
    whole = x.clone().requires_grad_()
    places = torch.arange(len(x))
    total = SUMS[name](whole, whole, places)
    if name == "of own and of all":  # each rank adds the same term
        total = total + torch.cov(whole.T).square().sum() / 2
    elif name == "of all":
        total = 2 * total
    value = total / len(x)
    (right,) = torch.autograd.grad(value, whole)
    own_slice = slice(sum(COUNTS[:rank]), sum(COUNTS[: rank + 1]))

    def gap(backward: str) -> float:
        own = x[own_slice].clone().requires_grad_()
        mean = sum_of(name, own, rank, call, backward)
        assert error(mean.detach(), value.detach()) <= 1e-12
        (slope,) = torch.autograd.grad(mean, own)
        return float(error(slope / dist.get_world_size(), right[own_slice]))  # DDP takes the mean

    for _ in range(2):
        kind, text = error_of(partial(gap, "local"))
        if name in GUARDED:
            assert kind == "ValueError"
            assert "expected a sum that is the same on every rank, because its rows were gathered with" in text
            assert "Pass backward='reduce_scatter' to the gather" in text
        else:
            assert gap("local") <= 1e-12
        assert gap("reduce_scatter") <= 1e-12
    gather.num_with_grad = gather.FIRST  # a steady step does not look
    assert (gap("local") > 0.1) == (name in GUARDED)


@on_ranks(2)
def test_a_global_sum_of_gathered_rows_is_refused(rank: int) -> None:
    """Each rank would add what all have; with reduce_scatter the sums may be of own rows against all."""
    gather.num_with_grad = 0  # as in a new process
    own = torch.ones(2 + rank, 3, requires_grad=True)
    for backward, expected in (("local", "ValueError"), ("reduce_scatter", "none")):
        rows = fullrank.all_gather_with_grad(own, backward=backward)  # type: ignore[arg-type]
        kind, text = error_of(partial(fullrank.global_sum, rows.square().sum()))
        assert kind == expected
        assert kind == "none" or "value: expected a sum of the rows of this rank, got one of rows that were" in text
