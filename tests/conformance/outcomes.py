"""What a fault on one rank must lead to on all of them, and one form for all tables of faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from workers import error_of

LIMIT = 1e-12  # of the next step, in float64; see subjects.LIMITS


Arguments = dict[str, Any]


class Fault(NamedTuple):
    """Something that a rank does wrong, and what every rank raises then: a built-in class, and a part of the text."""

    change: Callable[[Arguments], Arguments]  # of the arguments of a right call, which it returns the wrong ones of
    kind: str
    text: str
    common: Callable[[Arguments], Arguments] = lambda arguments: {}  # what every rank passes in this case


class Outcome(NamedTuple):
    """What one rank saw of a step that a rank has spoiled, and of the step after it."""

    kind: str  # the class of the error, as workers.class_of names it; "none" without one
    text: str
    untouched: bool  # gradients, queues and switches were as before
    next_error: float  # of the next step, relative to one process; 0 for equal bits


def outcome_of(spoiled: Callable[[], Any], untouched: Callable[[], bool], next_error: Callable[[], float]) -> Outcome:
    """Run a spoiled step, look at what it has left, and take the next step."""
    kind, text = error_of(spoiled)
    return Outcome(kind, text, untouched(), next_error())


def assert_refused(outcomes: Sequence[Outcome], kind: str, *texts: str, limit: float = LIMIT) -> None:
    """Assert the same error on every rank, nothing left behind, and that the next step is exact."""
    assert len(outcomes) > 0
    for outcome in outcomes:
        assert (outcome.kind, outcome.text) == (outcomes[0].kind, outcomes[0].text)
        assert outcome.kind == kind, outcome
        assert all(text in outcome.text for text in texts), outcome
        assert outcome.untouched, outcome
        assert outcome.next_error <= limit, outcome
