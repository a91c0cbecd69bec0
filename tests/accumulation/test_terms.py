"""Several losses with counts of their own in one window, against one process that divides each by its count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import IGNORED, Batch, all_batches, make_window, num_valid
from collective_counter import CollectiveCounter
from on_ranks import common_error, on_ranks
from subjects import HIDDEN, NUM_FEATURES, Model, by_hand, error, gradient, mesh_of, reduced, wrap
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fullrank import accumulate, count_valid_tokens
from fullrank.accumulation.accumulate import MAX_TERMS

SLOW = partial(pytest.param, marks=pytest.mark.slow)
# The fast tests take one case: the others execute no further line of the package.
KINDS = ["plain", SLOW("ddp"), SLOW("fsdp2")]
LAYOUTS = [SLOW("full"), "uneven", SLOW("unequal"), SLOW("none")]

WEIGHTS = {"mtp": 0.3}


class TwoHeads(Model):
    """Predicts the next token, and the one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.mtp = nn.Linear(HIDDEN, NUM_FEATURES, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(self.mtp.parameters()):
                parameter.copy_(torch.linspace(-1, 1 + number, parameter.numel()).view_as(parameter))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.up(self.embed(tokens)))
        return self.down(hidden), self.mtp(hidden)


def num_mtp(batch: Batch) -> Tensor:
    return (batch["labels"][:, 2:] != IGNORED).sum()


COUNTS: dict[str, Any] = {"mtp": num_mtp, "ce": count_valid_tokens}


def losses_of(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    logits = model(batch["tokens"])
    sums = {}
    for shift, (name, each) in enumerate(zip(("ce", "mtp"), logits), 1):
        labels = batch["labels"][:, shift:].flatten()
        sums[name] = F.cross_entropy(each[:, :-shift].flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return sums


def expected_of(batches: list[Batch], weights: Mapping[str, float], *, one_count: bool = False) -> tuple[Tensor, Any]:
    """Return the gradient and the means in one process."""
    model = TwoHeads()
    losses = [losses_of(model, batch) for batch in batches]
    numbers = {"ce": sum(map(num_valid, batches)), "mtp": int(sum(map(num_mtp, batches)))}
    numbers["mtp"] = numbers["ce"] if one_count else numbers["mtp"]
    means = {name: torch.stack([each[name] for each in losses]).sum() / max(1, numbers[name]) for name in numbers}
    (means["ce"] + weights["mtp"] * means["mtp"]).backward()
    return gradient(model), {name: mean.detach() for name, mean in means.items()}


def back_propagate(step: Any, model: nn.Module, batch: Batch, form: str) -> None:
    """The body of a loop."""
    if form == "factors":
        losses = losses_of(model, batch)
        factors = step.factors
        for name, loss in losses.items():
            step.record(loss, name, weight=WEIGHTS.get(name, 1.0))
        sum(WEIGHTS.get(name, 1.0) * factors[name] * loss for name, loss in losses.items()).backward()
        return
    losses = losses_of(model, batch)
    if form == "means":  # NaN over no terms; of one name a tensor says over how many, the other stays a sum
        name = "ce" if batch["tokens"][0, 1] % 2 else "mtp"
        number = num_valid(batch) if name == "ce" else num_mtp(batch)
        mean = losses[name] / (number or math.nan) if name == "ce" else losses[name] / number.clamp_min(1)
        step.backward(losses | {name: mean}, num_items={name: number}, weights=WEIGHTS)
    elif form == "scale":
        step.scale(losses, weights=WEIGHTS).backward()
    else:
        step.backward(losses, weights=WEIGHTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["backward", *map(SLOW, ("scale", "factors", "means"))])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_terms_are_divided_by_their_own_counts(rank: int, kind: str, form: str, layout: str) -> None:
    """In two windows; the control has one count for both."""
    if kind == "fsdp2" and layout == "unequal":
        return  # refused
    model, batches = wrap(TwoHeads(), kind), make_window(layout, rank)
    expected, means = expected_of(all_batches(layout), WEIGHTS)
    for _ in range(2):
        for step, batch in accumulate(model, batches, COUNTS, group=by_hand(model)):
            back_propagate(step, model, batch, form)
        found = step.mean_losses()
        assert error(reduced(model), expected) <= 1e-12
        assert found.keys() == means.keys()
        assert max(error(found[name], mean) for name, mean in means.items()) <= 1e-12
        assert error(step.mean_loss(), means["ce"] + 0.3 * means["mtp"]) <= 1e-12
        model.zero_grad()
    if layout != "none":
        wrong, _ = expected_of(all_batches(layout), WEIGHTS, one_count=True)
        assert error(wrong, expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("form", ["backward", "factors", "means"])
@on_ranks(4)
def test_terms_under_hsdp(rank: int, form: str) -> None:
    for layout in ("full", "uneven"):
        test_terms_are_divided_by_their_own_counts.body(rank, "hsdp", form, layout)


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp2"])
@on_ranks()
def test_a_name_without_terms_has_no_gradient_though_its_loss_is_nan(rank: int, kind: str) -> None:
    """The layers that it shares with another name get the gradient of the other."""
    model, batches = wrap(TwoHeads(), kind), make_window("full", rank)
    expected, means = expected_of(all_batches("full"), {"mtp": 0.0})
    for _ in range(2):
        for step, batch in accumulate(model, batches, COUNTS | {"mtp": lambda batch: 0}, group=by_hand(model)):
            losses = losses_of(model, batch)
            losses["mtp"] = losses["mtp"] / losses["mtp"].detach().mul(0) * math.nan
            step.backward(losses)
        assert error(reduced(model), expected) <= 1e-12
        assert error(step.mean_loss(), means["ce"]) <= 1e-12
        assert step.mean_losses()["mtp"] == 0
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()


@on_ranks()
def test_names_have_the_collectives_of_one_count(rank: int) -> None:
    model, batches = TwoHeads(), make_window("full", rank)
    with CollectiveCounter() as counter:
        for step, batch in accumulate(model, batches, COUNTS, group=by_hand(model)):
            step.backward(losses_of(model, batch))
        step.mean_losses()
    assert counter.total == 2


def with_heads_apart(kind: str) -> nn.Module:
    model = TwoHeads()
    if kind == "fsdp2":
        for head in (model.down, model.mtp):
            fully_shard(head, mesh=mesh_of(kind))
    return wrap(model, kind)


def _other(losses: dict[str, Tensor]) -> dict[str, Any]:
    return {"loss": losses | {"kl": losses["ce"]}}


MISTAKES: dict[str, Any] = {  # of the call for one micro-batch of one rank: its arguments, and the error of all
    "unknown name": (_other, "ValueError", "expected the names ['ce', 'mtp'], without those that were recorded"),
    "missing name": (lambda sums: {"loss": {"ce": sums["ce"]}}, "ValueError", "expected the names ['ce', 'mtp']"),
    "missing other name": (lambda sums: {"loss": {"mtp": sums["mtp"]}}, "ValueError", "expected the names ['ce', 'mt"),
    "no name": (lambda sums: {"loss": {}}, "ValueError", "expected the names ['ce', 'mtp']"),
    "no mapping": (lambda sums: {"loss": sums["ce"] + sums["mtp"]}, "TypeError", "a mapping of ['ce', 'mtp']"),
    "a number": (lambda sums: {"loss": sums | {"mtp": 1.0}}, "TypeError", "of 'mtp': expected a floating-point tensor"),
    "unknown weight": (lambda sums: {"loss": sums, "weights": {"kl": 1.0}}, "ValueError", "a mapping of names among"),
    "infinite weight": (
        lambda sums: {"loss": sums, "weights": {"mtp": math.inf}},
        "ValueError",
        "weight of 'mtp': expected a finite number, got inf",
    ),
    "text weight": (lambda sums: {"loss": sums, "weights": {"mtp": "1"}}, "TypeError", "weight of 'mtp': expected"),
    "items": (lambda sums: {"loss": sums, "num_items": 3}, "ValueError", "expected a mapping of names among"),
    "unknown items": (lambda sums: {"loss": sums, "num_items": {"kl": 3}}, "ValueError", "a mapping of names among"),
    "other items": (
        lambda sums: {"loss": sums, "num_items": {"mtp": torch.tensor(99)}},
        "ValueError",
        "of 'mtp': expected ",
    ),
    "other weight": (lambda sums: {"loss": sums, "weights": {"mtp": 0.5}}, "ValueError", "0.3, as earlier in this"),
}


# A loss of each name, of one, of none and of another weight: what is left for a wrapper to communicate.
GRAPHS = ("a number", "missing name", "no name", "other weight")


@pytest.mark.parametrize(
    ("mistake", "kind", "index"),
    [
        *((mistake, "plain", 1) for mistake in MISTAKES),
        *(SLOW(mistake, "fsdp2", 1) for mistake in MISTAKES if mistake not in GRAPHS),
        *(
            SLOW(mistake, kind, index)
            for mistake, kind, index in itertools.product(GRAPHS, ("plain", "ddp", "fsdp2"), range(3))
            if (kind, index) != ("plain", 1)
        ),
    ],
)
@on_ranks()
def test_a_mistake_of_one_rank(rank: int, kind: str, mistake: str, index: int) -> None:
    """It is raised on all of them; a right window follows. FSDP2 gathers each head in the backward of its own loss."""
    model, batches, last = with_heads_apart(kind), make_window("full", rank), dist.get_world_size() - 1
    change, kind_of_error, text = MISTAKES[mistake]

    def run(is_wrong: bool) -> None:
        for number, (step, batch) in enumerate(accumulate(model, batches, COUNTS, group=by_hand(model))):
            sums = losses_of(model, batch)
            wrong = is_wrong and rank == last and number == index
            step.backward(**({"loss": sums, "weights": WEIGHTS} | (change(sums) if wrong else {})))

    expected, _ = expected_of(all_batches("full"), WEIGHTS)
    for _ in range(2):
        found, message = common_error(partial(run, True))
        if mistake == "other weight" and index == 0:
            assert found == "ValueError"
            assert "weight of 'mtp': expected 0.5" in message
        else:
            assert (found, text in message) == (kind_of_error, True), message
            assert not gradient(model).any()
        model.zero_grad()
        run(False)
        assert error(reduced(model), expected) <= 1e-12
        model.zero_grad()


@on_ranks()
def test_a_mistake_in_a_loss_that_leaves_a_head_out(rank: int) -> None:
    """Zeros from all outputs would gather that head under FSDP2, in which the other ranks take no part."""
    model, batches, last = with_heads_apart("fsdp2"), make_window("full", rank), dist.get_world_size() - 1
    expected, _ = expected_of(all_batches("full"), {"mtp": 0.0})

    def run(is_wrong: bool) -> None:
        for number, (step, batch) in enumerate(accumulate(model, batches, count_valid_tokens)):
            wrong = is_wrong and rank == last and number == 1
            step.backward(losses_of(model, batch)["ce"], num_items=-1 if wrong else None)

    for _ in range(2):
        found, message = common_error(partial(run, True))
        assert (found, "num_items of micro-batch 1: expected a finite number >= 0" in message) == ("ValueError", True)
        run(False)
        assert error(reduced(model), expected) <= 1e-12
        model.zero_grad()


OPENINGS: dict[str, Any] = {  # what one rank counts, and the error of all
    "other names": ({"ce": count_valid_tokens}, "ValueError", "count of 'mtp'"),
    "no names": ({}, "ValueError", f"one to {MAX_TERMS} names, got 0"),
    "too many": ({str(number): len for number in range(MAX_TERMS + 1)}, "ValueError", f"one to {MAX_TERMS} names"),
    "a number as name": ({1: len}, "TypeError", "names that are not empty"),
    "a text as count": (COUNTS | {"ce": "x"}, "TypeError", "count of 'ce': expected a function"),
    "negative": (COUNTS | {"ce": lambda batch: -1}, "ValueError", "count of 'ce' of micro-batch 0: expected a finite"),
    "no mapping": (count_valid_tokens, "ValueError", "the same on every rank"),
}


@pytest.mark.parametrize("opening", OPENINGS)
@on_ranks()
def test_counts_that_cannot_open_a_window(rank: int, opening: str) -> None:
    model, last = TwoHeads(), dist.get_world_size() - 1
    count, kind, text = OPENINGS[opening]
    loop = partial(accumulate, model, make_window("full", rank), group=by_hand(model))
    found, message = common_error(lambda: loop(count if rank == last else COUNTS))
    assert (found, text in message) == (kind, True), message


@on_ranks()
def test_weights_that_differ_between_ranks_are_refused(rank: int) -> None:
    model, batches = TwoHeads(), make_window("full", rank)

    def run(form: str) -> None:
        for step, batch in accumulate(model, batches, COUNTS, group=by_hand(model)):
            if form == "early" and rank == 0:
                step.factors  # noqa: B018
            step.backward(losses_of(model, batch), weights={"mtp": 0.3 + rank})

    for form in ("late", "early"):
        found, message = common_error(partial(run, form))
        ranks = ", ".join(f"{0.3 + rank} on rank {rank}" for rank in range(dist.get_world_size()))
        text = f"accumulate (end of the window): expected the same on every rank, got weight of 'mtp': {ranks}."
        assert (found, text in message) == ("ValueError", True), message
        assert not gradient(model).any()


@on_ranks()
def test_weights_are_compared_as_numbers(rank: int) -> None:
    """Rank 0 spells them in one way, the others in another; also from one micro-batch to the next.

    They are used as numbers too: a float32 of numpy does not round the factor of its name.
    """
    model, last = TwoHeads(), dist.get_world_size() - 1
    spellings: list[tuple[Any, ...]] = [(2, 2.0), (0.0, -0.0), (True, 1), (None, 1.0), (0.5, numpy.float64(0.5))]
    for ways in [*spellings, (0.25, numpy.float32(0.25)), (-3.0, numpy.int64(-3))]:
        found = []
        for given in (ways[:1], ways[::-1] if rank == last else ways):
            window = accumulate(model, make_window("full", rank), COUNTS, group=by_hand(model))
            for index, (step, batch) in enumerate(window):
                weight = given[index % len(given)]
                step.backward(losses_of(model, batch), weights={} if weight is None else {"mtp": weight})
            found.append(torch.cat([gradient(model), step.mean_loss()[None]]))
            model.zero_grad()
        assert torch.equal(*found), ways


@on_ranks(2)
def test_names_and_no_names_are_not_mixed(rank: int) -> None:
    from workers import error_of

    model, batches = TwoHeads(), make_window("full", rank)
    for step, batch in accumulate(model, batches, COUNTS, group=by_hand(model)):
        assert error_of(lambda step=step: step.factor)[0] == "RuntimeError"
        step.backward(losses_of(model, batch))
    for step, batch in accumulate(model, batches, count_valid_tokens, group=by_hand(model)):
        assert error_of(lambda step=step: step.factors)[0] == "RuntimeError"
        step.backward(losses_of(model, batch)["ce"])

    def weighted() -> None:
        for step, batch in accumulate(model, batches, count_valid_tokens, group=by_hand(model)):
            step.backward(losses_of(model, batch)["ce"], weights={"": 2.0})

    found, message = common_error(weighted)
    assert (found, "weights of micro-batch 0: expected None without" in message) == ("ValueError", True), message
    assert error_of(step.mean_losses)[0] == "RuntimeError"


def _means_of_each(layout: str) -> tuple[Tensor, Tensor]:
    """Return the losses of the micro-batches of all ranks, and the means over ranks of means, in one process."""
    model, windows = TwoHeads(), [make_window(layout, rank) for rank in range(dist.get_world_size())]
    means, wrong = [], []
    for index in range(max(map(len, windows))):
        batches = [window[index] for window in windows if index < len(window)]
        sums = [losses_of(model, batch) for batch in batches]
        numbers = [{"ce": num_valid(batch), "mtp": int(num_mtp(batch))} for batch in batches]
        for found, groups in ((means, [[*range(len(batches))]]), (wrong, [[part] for part in range(len(batches))])):
            values = [
                sum(
                    {"ce": 1.0, **WEIGHTS}[name]
                    * sum(sums[part][name].detach() for part in group)
                    / max(1, sum(numbers[part][name] for part in group))
                    for name in ("ce", "mtp")
                )
                for group in groups
            ]
            found.append(torch.stack(values).mean())
    return torch.stack(means), torch.stack(wrong)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["backward", SLOW("factors"), SLOW("some early")])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks()
def test_the_loss_of_each_micro_batch(rank: int, kind: str, form: str, layout: str) -> None:
    """Over all ranks, in three windows; the control is the mean over ranks of means."""
    if kind == "fsdp2" and layout == "unequal":
        return  # refused
    model, batches = wrap(TwoHeads(), kind), make_window(layout, rank)
    (expected, wrong), numbers = _means_of_each(layout), []
    for _ in range(3):
        with CollectiveCounter() as counter:
            for step, batch in accumulate(model, batches, COUNTS, group=by_hand(model), each=True):
                early = form == "factors" or (form == "some early" and rank == 0)
                back_propagate(step, model, batch, "factors" if early else "backward")
        assert error(step.losses(), expected) <= 1e-12
        assert step.losses().dtype == torch.float64
        model.zero_grad()
        numbers.append(counter.total)
    if kind == "plain":  # the first window may have a payload of its own
        assert numbers[1:] == [2 if form == "backward" else 3] * 2
    if layout in ("full", "uneven"):
        assert error(wrong, expected) > 1e-3


@on_ranks()
def test_each_without_terms_to_divide_by(rank: int) -> None:
    """A number over all ranks says nothing of a micro-batch; a bad flag, and a call without the flag."""
    model, batches = TwoHeads(), make_window("full", rank)
    loop = partial(accumulate, model, batches, group=by_hand(model))
    for count, each, kind, text in (
        (7.0, True, "ValueError", "count: expected a function with each=True, got 7.0"),
        (COUNTS, rank == 0, "ValueError", "each: True on rank 0, False on"),
        (COUNTS, 1, "TypeError", "each: expected True or False, got 1"),
    ):
        found, message = common_error(partial(loop, count, each=each))
        assert (found, text in message) == (kind, True), message
    for step, batch in loop(COUNTS):
        step.backward(losses_of(model, batch))
    found, message = common_error(step.losses)
    assert (found, "a window with each=True" in message) == ("RuntimeError", True)


def test_each_in_one_process() -> None:
    model = nn.Linear(1, 1, bias=False)
    for step, rows in accumulate(model, [torch.ones(2, 1), torch.ones(3, 1), torch.ones(0, 1)], len, each=True):
        step.backward(model(rows).sum())
    value = float(model.weight.detach())
    torch.testing.assert_close(step.losses(), torch.tensor([value, value, 0.0]))
