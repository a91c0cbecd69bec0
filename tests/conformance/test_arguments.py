"""Every argument of every public signature has a case with another value than its default, over two uneven ranks.

The values of the losses are in tests/loss_cases.py. In each case the values and gradients equal those of one process
with all rows, and the argument makes a difference there.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from batches import split
from loss_cases import IGNORED, KINDS, LOSSES, Form, Loss, normal
from on_ranks import on_ranks, slow_but
from subjects import LIMITS, error
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import fullrank
from fullrank.data import MPerClassSampler, UnrepeatedDistributedSampler
from fullrank.errors import is_from_a_check
from fullrank.preflight import concatenate

TESTS = Path(__file__).parents[1]
# What has public names. The integrations run under their frameworks, in tests/integrations.
NAMES = ("accumulation", "data", "distributed", "gradients", "large", "losses", "metrics", "queues")
ROOMS = (fullrank, *(import_module(f"fullrank.{name}") for name in NAMES))
NUM_STEPS = 3  # of a module, the second in eval mode; a function has no state
# Arguments that make no difference in one process.
SILENT = {"gather_distributed", "gradient_reduction", "group", "name", "num_features", "validate_args"}
NO_CASE = {
    "Pool": "It is made by the losses, for a formula of one's own.",
    "Step": "It is made by accumulate.",
    **{
        f"{name}.plot": "It draws values that compute has returned."
        for name in fullrank.metrics.__all__
        if name != "ReviewCurve"
    },
    "CombinedLoss.forward(indexes)": "It is passed on to a loss of one class, of which SmoothAPLoss has the case.",
    **{
        f"{row.module.__name__}.forward(indexes)": "It is refused: the loss ranks one pool."
        for row in LOSSES.values()
        if getattr(row.module, "ranks_queries", None) is False and row.takes("indexes")
    },
}


def optional(called: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that have a default, and the defaults."""
    parameters = inspect.signature(called).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def random_share(rows: Tensor) -> Tensor:
    """Return a number for each row, the same for as many rows."""
    return torch.rand(len(rows), generator=torch.Generator().manual_seed(len(rows)), dtype=torch.float64)


def of_rows(width: int, seed: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes normal numbers for each row, the same for as many rows."""
    return lambda rows: torch.randn(
        len(rows), width, generator=torch.Generator().manual_seed(seed + len(rows)), dtype=torch.float64
    )


# Values of the arguments of a call, or functions of the rows that make them.
OF_CALLS: dict[str, Any] = {
    "iid_mask": lambda rows: random_share(rows) < 0.7,
    "sample_weight": lambda rows: 0.1 + random_share(rows),
    "indexes": lambda rows: torch.arange(len(rows)) % 3,
    "negatives": of_rows(8, 1),
    "labels": lambda rows: torch.arange(len(rows)) % 5,
    "negative_labels": lambda rows: torch.arange(len(rows)) % 3,
    "offsets": lambda rows: (random_share(rows).log(),),
    "columns": lambda rows: {"more": (random_share(rows),)},
    "mask": lambda rows: (of_rows(3, 2)(rows), of_rows(3, 3)(rows)),
    "reference": lambda rows: rows.flip(0) + 0.1,
    "reference_labels": lambda rows: torch.arange(len(rows)) % 5,
    "return_per_class": True,
    "return_diagnostics": True,
}
# Those without which one is refused.
TOGETHER = {
    **dict.fromkeys(("reference", "reference_labels"), ("reference", "reference_labels")),
    "negative_labels": ("negatives", "labels"),
}


class Case(NamedTuple):
    """A loss with one argument that is not its default."""

    row: Loss
    called: Callable[..., Any]  # the class, its forward or the pure function
    argument: str

    @property
    def name(self) -> str:
        is_forward = self.called is not self.row.module and self.called is not self.row.function
        return f"{self.row.module.__name__}.forward" if is_forward else self.called.__name__

    @property
    def value(self) -> Any:
        """The value of the argument, or a function that makes it: of a call from the rows, of others from nothing."""
        return OF_CALLS.get(self.argument, self.row.argument(self.argument).other)

    def settings(self, is_changed: bool) -> dict[str, Any]:
        """Return the settings of the constructor or the function, with the other value or without it."""
        form = self.row.first if self.argument in OF_CALLS else self.row.form_with(self.argument)
        settings = {**form.settings, **self.row.argument(self.argument).among}
        if is_changed and self.argument not in OF_CALLS:
            settings[self.argument] = self.value() if callable(self.value) else self.value
        return settings

    def call(self, index: int, is_changed: bool) -> dict[str, Any]:
        """Return the arguments of the call with the rows of all ranks in a step."""
        settings, kind = self.settings(True), KINDS[self.row.kind]
        columns, generator = self.columns, torch.Generator().manual_seed(index)
        x = torch.randn(23 + 3 * index, columns, generator=generator, dtype=torch.float64)
        highest = {"grades": 4, "embeddings": 4}.get(self.row.kind, columns)
        targets = torch.randint(0, highest, x.shape if settings.get("multi_hot") else x.shape[:1], generator=generator)
        if settings.get("multi_hot"):
            targets = targets.clamp_max(1)
        if kind.ignores:
            targets[::6] = settings.get("ignore_index", IGNORED)
        call = kind.make(x, targets, torch.arange(len(x)) % 4)
        if self.argument in OF_CALLS:
            call.pop(self.argument, None)
            if is_changed:
                call[self.argument] = self.value(x) if callable(self.value) else self.value
            if is_changed or self.argument == "negative_labels":
                call |= {name: OF_CALLS[name](x) for name in TOGETHER.get(self.argument, ())}
        elif self.argument == "weighting":
            call["sample_weight"] = OF_CALLS["sample_weight"](x)
        elif self.argument in ("margin", "margin_strategy"):
            call["mask"] = OF_CALLS["mask"](x)
        return call

    @property
    def columns(self) -> int:
        return self.settings(True).get("num_classes", max(2, KINDS[self.row.kind].columns))


def cases_of(row: Loss) -> Iterator[Case]:
    """Yield a case for each argument of a loss, of its forward and of its function."""
    if row.module is None:
        return
    for called in filter(None, (row.module, row.module.forward, row.function)):
        for argument in optional(called):
            # The losses of queries have another row, which has their other arguments.
            if argument in OF_CALLS if row.kind == "queries" else argument != "indexes" or row.kind == "grades":
                yield Case(row, called, argument)


def take_steps(case: Case, ranks: str, is_changed: bool = True) -> list[Tensor]:
    """Return the loss, and the gradients of this rank's rows and of the parameters, of all steps.

    ``ranks``: all ranks with "their" rows, one process with the rows of "all", or each rank with its "own" alone.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    settings, found = case.settings(is_changed), []
    if ranks != "their":
        for name in ("gather_distributed", "gradient_reduction", "group"):
            settings.pop(name, None)
    scale = size if ranks == "their" and settings.get("gradient_reduction", "mean") == "mean" else 1
    if case.called is case.row.function:
        loss: Any = partial(case.called, **{k: v for k, v in settings.items() if k in case.row.of_function})
    else:
        options = {"num_classes": max(2, KINDS[case.row.kind].columns), "queue_size": 16 * (case.argument != "columns")}
        options |= {} if ranks == "their" else {"gather_distributed": False}
        options = {name: value for name, value in options.items() if name not in settings}
        loss = case.row.module(**Form(case.row, settings).given(**options)).double()
    parameters = [*getattr(loss, "parameters", tuple)()]
    for parameter in parameters:
        parameter.data += 0.1  # as after some steps, which may have led beyond the largest scale
    for index in range(1 if case.called is case.row.function else NUM_STEPS):
        call = case.call(index, is_changed)
        count = len(next(iter(call.values())))
        counts = split(count, size, index)
        own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        cut = slice(None) if ranks == "all" else own
        call = tree_map_only(Tensor, lambda rows: rows[cut].clone(), call)  # noqa: B023
        names = {"logits", "inputs", "embeddings", "queries", "keys", "negatives", "reference"} & call.keys()
        leaves = [call[name].requires_grad_() for name in sorted(names)]
        if hasattr(loss, "on_train_batch_start"):
            loss.on_train_epoch_start(index)
            loss.on_train_batch_start(index)
        if case.called is not case.row.function:
            loss.train(index != 1)
        elif ranks == "their":
            tensors = [name for name, rows in call.items() if isinstance(rows, Tensor)]
            call |= zip(tensors, fullrank.gather_rows(*(call[name] for name in tensors)))
        outputs = [part.reshape(-1) for part in tree_leaves(loss(**call)) if part.is_floating_point()]
        value = torch.cat(outputs).nan_to_num()
        value = value @ torch.linspace(0.5, 2, len(value), dtype=value.dtype)
        slopes = torch.autograd.grad(value, [*leaves, *parameters], allow_unused=True, materialize_grads=True)
        of_rows, others = slopes[: len(leaves)], slopes[len(leaves) :]
        for slope in others if ranks == "their" else ():
            dist.all_reduce(slope)
        found += [value.detach(), *(slope[own if ranks == "all" else slice(None)] / scale for slope in of_rows)]
        found += [slope / scale for slope in others]
    return found


def differs(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error; infinity if there are not as many numbers, as of a parameter that is learned."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return math.inf
    return max(map(error, found, expected))


@pytest.mark.parametrize("name", slow_but(["sigmoid_focal"], [name for name, row in LOSSES.items() if row.module]))
@on_ranks(2, pytest.param(3, marks=[pytest.mark.full] * 2))
def test_arguments_of_losses(rank: int, name: str) -> None:
    wrong, row = [], LOSSES[name]
    for case in cases_of(row):
        try:
            found, expected = take_steps(case, "their"), take_steps(case, "all")
        except Exception as raised:
            raise AssertionError(f"{case.name}({case.argument})") from raised
        if not differs(found, expected) <= LIMITS["float64"]:
            wrong.append(f"{case.name}({case.argument}) over ranks: {differs(found, expected)}")
        is_used = case.argument != "iid_mask" or getattr(row.module, "uses_iid", False)
        if rank == 0 and is_used and case.argument not in SILENT:
            try:
                usual = take_steps(case, "all", is_changed=False)
            except (ValueError, TypeError) as refused:  # the rows are right with the other value alone
                if not is_from_a_check(refused):
                    raise
                continue
            if not differs(usual, expected) > 1e-6:
                wrong.append(f"{case.name}({case.argument}) has no effect")
    assert not wrong, wrong
    # The control: each rank alone, whose gradient is another one.
    first = next(cases_of(row))
    assert differs(take_steps(first, "own"), take_steps(first, "all")) > 1e-3


# Of everything else the arguments that no test of another folder passes by name.
OTHERS = [("MPerClassSampler", "ignore_index", 3), ("UnrepeatedDistributedSampler", "num_replicas", 1)]
OTHERS += [("UnrepeatedDistributedSampler", "rank", 0), ("verify_step", "join", concatenate)]


@on_ranks()
def test_arguments_of_samplers(rank: int) -> None:
    """The rows of each step are those of one process with batches as large as those of all ranks, in any order."""
    size, alone, labels = dist.get_world_size(), dist.new_subgroups(1)[0], torch.arange(60) % 7
    sampler = partial(MPerClassSampler, labels, 2, ignore_index=3)
    spread, whole = torch.tensor([*sampler(4)]), torch.tensor([*sampler(4 * size, group=alone)])
    parts = [torch.empty_like(spread) for _ in range(size)]
    dist.all_gather(parts, spread)
    assert torch.equal(torch.cat(parts, dim=1).sort(dim=1).values, whole.sort(dim=1).values)
    assert not (labels[whole] == 3).any()
    assert [*UnrepeatedDistributedSampler(range(7), num_replicas=1, rank=0)] == [*range(7)]


@on_ranks()
def test_arguments_of_verify_step(rank: int) -> None:
    loss, model = fullrank.BCEWithLogitsLoss(), torch.nn.Linear(4, 1).double()

    def step(model: torch.nn.Module, batch: Any) -> None:
        loss(model(batch[0])[:, 0], batch[1]).backward()

    rows = normal(5 + 2 * rank, 4, seed=rank)
    given = {"group": dist.group.WORLD, "join": concatenate, "losses": [fullrank.SmoothAPLoss()]}
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    assert fullrank.verify_step(step, wrapped, (rows, (rows[:, 0] > 0).double()), **given).verdict == "exact"


# The walk over the public signatures


OF_TORCH = {*dir(torch.nn.Module)} - {"forward"}


def public() -> dict[str, Callable[..., Any]]:
    """Return what is public: functions, classes that are no base of another, their methods with optional arguments.

    Tuples are results, and exceptions are raised: neither is called.
    """
    values = {name: getattr(room, name) for room in ROOMS for name in room.__all__}
    classes = {name: value for name, value in values.items() if inspect.isclass(value)}
    bases = {base for value in classes.values() for base in value.__mro__[1:]}
    found = {name: value for name, value in values.items() if inspect.isfunction(value)}
    for name, value in classes.items():
        if value in bases or issubclass(value, (tuple, BaseException)):
            continue
        found[name] = value
        of_torch = OF_TORCH if issubclass(value, torch.nn.Module) else set()
        names = [method for method in dir(value) if method[0] != "_" and method not in of_torch]
        methods = {method: inspect.getattr_static(value, method) for method in names}
        for method, called in methods.items():
            if inspect.isfunction(called) and called.__module__.startswith("fullrank") and optional(called):
                found[f"{name}.{method}"] = called
    return found


Given = tuple[str, str, Any]  # what is called, an argument and its value
CASES = [case for row in LOSSES.values() for case in cases_of(row)]
GIVEN: list[Given] = [(case.name, case.argument, case.value) for case in CASES]
# Where the default is the other value, since the form has another.
GIVEN += [(case.name, case.argument, case.settings(False).get(case.argument)) for case in CASES]
GIVEN += OTHERS


@cache
def files_of_tests() -> list[tuple[set[str], set[str]]]:
    """Return the words of each file of another folder, and those in the place of a keyword or a text."""
    paths = [path for path in TESTS.rglob("test_*.py") if path.parent != Path(__file__).parent]
    texts = [path.read_text("utf-8") for path in paths]
    return [({*re.findall(r"\w+", t)}, {*re.findall(r"""\b\w+(?==)|(?<=")\w+(?=")""", t)}) for t in texts]


@cache
def passed_elsewhere(name: str) -> set[str]:
    """Return the names in the files of other folders that call something: its arguments by name, and it too.

    A loss has all its cases here.
    """
    if name.partition(".")[0] in {case.name.partition(".")[0] for case in CASES}:
        return set()
    last = name.rpartition(".")[2]
    return {word for words, passed in files_of_tests() if last in words for word in {name, *passed}}


def lacking(called: dict[str, Callable[..., Any]], given: list[Given]) -> dict[str, str]:
    """Return what has no case, and what is excused without need, by name."""
    found, excused = {}, {*NO_CASE}
    owners = {part for owner, *_ in given for part in (owner, owner.partition(".")[0])}
    for name, value in called.items():
        if name in NO_CASE:
            excused.discard(name)
        elif name not in owners | passed_elsewhere(name):
            found[name] = "expected a row in tests/loss_cases.py, or a call in another folder of tests"
        for argument, default in optional(value).items() if name not in NO_CASE else ():
            values = [one for owner, of, one in given if (owner, of) == (name, argument)]
            if any(isinstance(one, Tensor) or one != default for one in values) or argument in passed_elsewhere(name):
                continue
            if f"{name}({argument})" in NO_CASE:
                excused.discard(f"{name}({argument})")
            else:
                where = "`other` in tests/loss_cases.py, or a call by name in another folder"
                found[f"{name}({argument})"] = f"expected a case with another value than {default!r}: {where}"
    return found | dict.fromkeys(excused, "expected a reason in NO_CASE for what is public and has no case alone")


def test_every_argument_of_every_public_signature_has_a_case() -> None:
    assert lacking(public(), GIVEN) == {}


def new_verb(model: object, *, share: float = 0.5) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("called", "given", "expected"),
    [
        ({}, [("verify_step", "join", None)], "verify_step(join)"),
        ({"new_verb": new_verb}, [("new_verb", "model", 3)], "new_verb(share)"),
        ({"new_verb": new_verb}, [], "new_verb"),
    ],
)
def test_control_what_has_no_case_is_named(
    called: dict[str, Callable[..., Any]], given: list[Given], expected: str
) -> None:
    others = [one for one in GIVEN if (one[0], one[1]) != (given[0][:2] if given else ("", ""))]
    found = lacking(public() | called, [*others, *given])
    new = found.keys() - lacking(public(), GIVEN).keys()
    assert expected in new
    assert {name.partition("(")[0] for name in new} == {expected.partition("(")[0]}
    assert all("expected a " in found[name] for name in new)
