"""The error that all ranks raise: its classes, how long its text is, what travels for it, and how it is printed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks, same
from scripts import run_script
from workers import error_of

import fullrank
from fullrank.distributed import header
from fullrank.distributed.header import Offer, agree_on, joint_error
from fullrank.errors import RankRuntimeError, RankTypeError, RankValueError, is_from_a_check

# --- the pure functions, for more ranks than a test can start ---------------------------------------------------------


def text_of(*reports: Any) -> str:
    return str(joint_error(list(range(len(reports))), reports))


def failed(*reasons: str | None) -> str:
    given = (None if reason is None else ("ValueError", reason) for reason in reasons)
    return text_of(*[header.Report(reason, {"call": "a call"}) for reason in given])


def differing(*values: str) -> str:
    return text_of(*[header.Report(None, {"call": "a call", "fact": value}) for value in values])


def test_at_most_four_reasons_are_named() -> None:
    """And at most four ranks."""
    for number, named in ((1, "rank 0"), (4, "ranks 0, 1, 2, 3"), (5, "ranks 0, 1, 2, 3 and 1 more")):
        assert failed(*["bad"] * number) == f"a call failed on {named}: bad"
    text = failed(None, *[f"bad {rank % 7}" for rank in range(1, 1024)])
    assert text.startswith("a call failed on ranks 1, 8, 15, 22 and 143 more: bad 1; ranks 2, 9, 16, 23 and ")
    assert text.endswith("bad 4; and 3 other reasons on ranks 5, 6, 7, 12 and 434 more")
    assert failed("a", "b", None, "c", "d") == "a call failed on rank 0: a; rank 1: b; rank 3: c; rank 4: d"


def test_at_most_four_values_are_named() -> None:
    text = differing(*[str(rank % 6) for rank in range(1024)])
    assert "got fact: 0 on ranks 0, 6, 12, 18 and 167 more, 1 on ranks " in text
    assert "and 2 other values on ranks 4, 5, 10, 11 and 336 more. Pass the same" in text
    assert "got fact: x on ranks 0, 1, 3, y on rank 2. Pass" in differing("x", "x", "y", "x")


def test_long_texts_are_cut_and_stay_different() -> None:
    long = [ValueError("x" * 10_000 + end) for end in "ab"]
    texts = [header.reason_of(error) for error in long]
    assert texts[0] != texts[1]
    assert all(len(text) < 2_100 and "10001 characters" in text for text in texts)
    assert header.reason_of(ValueError("short")) == "short"


@pytest.mark.parametrize(
    ("kind", "builtin"), [(RankValueError, ValueError), (RankTypeError, TypeError), (RankRuntimeError, RuntimeError)]
)
def test_classes_copies_and_pickles(kind: type[fullrank.RankError], builtin: type[Exception]) -> None:
    error = kind("what went wrong")
    error.agreement = (1, 2)
    assert isinstance(error, fullrank.RankError)
    assert isinstance(error, builtin)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert str(twin) == "what went wrong"
        assert twin.agreement == (1, 2)


def test_which_errors_a_check_of_this_package_has_raised() -> None:
    loss = fullrank.SmoothAPLoss(1)
    with pytest.raises(ValueError, match="expected") as caught:
        loss(torch.zeros(3, 1), torch.zeros(2, dtype=torch.int64))
    assert is_from_a_check(caught.value)
    with pytest.raises(ValueError, match="expected") as caught:
        raise ValueError("mine: expected nothing of this package")
    assert not is_from_a_check(caught.value)


# --- real ranks -------------------------------------------------------------------------------------------------------


class Raised(Exception):
    """A class of the user's own."""


A, LONG = (Raised, "a"), (TypeError, "x" * 100_000)


@pytest.mark.parametrize(
    ("world_size", "reasons", "kind"),
    [
        (3, [(ValueError, "a"), None, (OSError, "b")], "RankValueError"),
        (3, [None, A, A], "RankRuntimeError"),
        (4, [(TypeError, "a"), (ValueError, "b"), (ValueError, "c"), (ValueError, "b")], "RankTypeError"),
        (4, [None, None, LONG, LONG], "RankTypeError"),
    ],
    ids=["two", "one twice", "three", "long"],
)
@on_ranks(...)
def test_several_reasons_on_several_ranks(rank: int, reasons: list[Any], kind: str) -> None:
    """The class is that of the first; the cause is the rank's own error, which the check of no package has raised."""
    sent, original, reason = [0], dist.all_gather_object, reasons[rank]

    def exchange(said: Any, own: Any, **options: Any) -> None:
        sent.append(len(pickle.dumps(own)))
        original(said, own, **options)

    def bring() -> Offer[None]:
        if reason is not None:
            raise reason[0](reason[1])
        return Offer(None, {"long": "y" * 100_000})

    with mock.patch.object(dist, "all_gather_object", exchange), pytest.raises(fullrank.RankError) as caught:
        agree_on("a call", dist.group.WORLD, bring)
    text = same(str(caught.value))
    assert type(caught.value).__name__ == kind
    assert len(text) < 2_200
    assert isinstance(caught.value.__cause__, type(None) if reason is None else reason[0])
    assert sent[-1] < (200 if reason is None else 3_000)
    assert all(one in (None, LONG) or one[1] in text for one in reasons)


class Odd:
    """A fact or the argument of an exception whose text is ``text``, or cannot be made without one."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def __repr__(self) -> str:
        if self.text is None:
            raise OSError("no text")
        return self.text


class Own(str):
    """A text that cannot be sent: other processes do not know its class."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent")


class Saying(Exception):
    """An exception whose text is a string of a class of its own."""

    def __str__(self) -> str:
        return Own("own text")


ODD = {
    "surrogate": (lambda: ValueError("cannot read caf\udce9.jpg"), r"cannot read caf\udce9.jpg"),
    "no text": (lambda: KeyError(Odd(None)), "KeyError: an error whose text cannot be read"),
    "own text": (Saying, "own text"),
    "fact": (lambda: Odd("a fact \udce9"), r"a fact \udce9"),
    "fact without text": (lambda: Odd(None), "no text"),
}


@pytest.mark.parametrize("name", ODD)
@on_ranks(2)
def test_texts_that_no_encoding_has_are_raised_on_every_rank(rank: int, name: str) -> None:
    """In the first step and in the second; the step after it is right."""
    make, part_of_text = ODD[name]
    for _ in range(2):

        def bring() -> Offer[None]:
            given: Any = make() if rank == 1 else None
            if isinstance(given, Exception):
                raise given
            return Offer(None, {"fact": given})

        kind, text = error_of(lambda bring=bring: agree_on("a call", dist.group.WORLD, bring))
        assert kind != "none"
        assert part_of_text in text
        text.encode()  # which a terminal does
        agree_on("a call", dist.group.WORLD, lambda: Offer(None, {"fact": 1}))


@pytest.mark.parametrize("length", [10, 100_000])
@on_ranks()
def test_facts_that_differ_after_a_long_beginning(rank: int, length: int) -> None:
    facts = {"long": "y" * length + str(rank), "same": 1}
    kind, text = error_of(lambda: agree_on("a call", dist.group.WORLD, lambda: Offer(None, facts)))
    assert kind == "ValueError"
    assert "got long: 'yyy" in text
    assert "same: " not in text
    assert len(text) < 7_000


@on_ranks()
def test_an_error_with_an_earlier_one_as_its_context_still_joins(rank: int) -> None:
    """It is raised while one of an earlier agreement is handled. Else the rank would skip the header."""

    def fail() -> Offer[None]:
        raise ValueError("earlier")

    held: list[Exception] = []
    try:
        agree_on("first", dist.group.WORLD, fail)
    except fullrank.RankError:
        try:
            raise TypeError("while that was handled")
        except TypeError as error:
            held.append(error)

    def bring() -> Offer[None]:
        if rank == 1:
            raise held[0]
        return Offer(None)

    found = error_of(lambda: agree_on("second", dist.group.WORLD, bring))
    assert found == ("TypeError", "second failed on rank 1: while that was handled")
    assert isinstance(held[0].__context__, RankValueError)


@on_ranks()
def test_control_an_agreement_inside_is_not_joined_twice(rank: int) -> None:
    """Rank 0 fails in an agreement inside ``bring``, and wraps the error of it."""

    def inner() -> Offer[None]:
        if rank == 0:
            raise ValueError("inside")
        return Offer(None)

    def bring() -> Offer[None]:
        try:
            agree_on("inner", dist.group.WORLD, inner)
        except ValueError as error:
            raise TypeError(f"wrapped: {error}") from error
        return Offer(None)

    expected = "TypeError", "wrapped: inner failed on rank 0: inside"
    assert error_of(lambda: agree_on("outer", dist.group.WORLD, bring)) == expected


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import fullrank

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 3))
loss_fn = fullrank.SmoothAPLoss(num_classes=3)
targets = torch.tensor([0, 1, 7 if dist.get_rank() == 1 else 2])
loss_fn(model(torch.ones(3, 2)), targets)
"""


@pytest.mark.slow
def test_what_one_bad_target_prints(tmp_path: Path) -> None:
    """One traceback on each rank, which names the line of the user, and the frames of the module and its forward."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = run_script(script, cwd=tmp_path, processes=3)
    assert done.returncode == 1
    _, *printed = done.stderr.split("Traceback")
    assert len(printed) == 3, done.stderr
    for shown in printed:
        assert "The above exception" not in shown
        assert "During handling" not in shown
        assert "loss_fn(model(torch.ones(3, 2)), targets)" in shown
        assert "agree_on" not in shown
        assert "fullrank.errors.RankValueError: SmoothAPLoss failed on rank 1: targets: expected class" in shown
        assert len(shown.splitlines()) <= 22, shown
