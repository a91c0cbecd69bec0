"""What can be wrong with a norm, and how all ranks come to raise it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from ..distributed.header import disagreement, failure, public_class, reason_of
from ..errors import Words, expected
from .norm_plan import Plan
from .norm_reduce import exchange
from .parameters import Entry, held_gradient

_MOST_NAMES = 10  # of parameters, in one message


class Options(NamedTuple):
    """The arguments that must be equal on every rank; ``max_norm`` None or inf only measures."""

    call: str
    norm_type: Any
    max_norm: Any
    error_if_nonfinite: bool


def check_options(options: Options, problems: list[Exception]) -> Options:
    """Return the options as numbers; a wrong one goes to ``problems`` and is replaced, so that the call can go on."""
    most = math.inf if options.max_norm is None else options.max_norm
    least = "a number >= 0, or None to measure only"
    return options._replace(
        norm_type=_number("norm_type", options.norm_type, lambda p: p > 0, "a number > 0, or inf", 2.0, problems),
        max_norm=_number("max_norm", most, lambda norm: norm >= 0, least, math.inf, problems),
        error_if_nonfinite=bool(options.error_if_nonfinite),
    )


def _number(
    name: str, value: Any, is_right: Callable[[float], bool], what: str, otherwise: float, problems: list[Exception]
) -> float:
    try:
        number = float(value)  # torch takes the same: "inf", numpy's numbers, tensors of one element
    except (TypeError, ValueError, RuntimeError):
        problems.append(TypeError(expected(name, what, value)))
        return otherwise
    if not is_right(number):
        problems.append(ValueError(expected(name, what, value)))
        return otherwise
    return number


def raise_together(plan: Plan, options: Options, problems: list[Exception], *, can_look: bool) -> NoReturn:
    """Raise what this rank or another one found: the same on all ranks, where all of them can know (``can_look``)."""
    if problems and not (plan.groups and can_look):
        raise problems[0]
    sizes = [dist.get_world_size(group) for group in plan.groups]
    texts = {key: repr(value) for key, value in options._asdict().items()}
    texts["call"] = options.call
    texts["layouts"] = f"{sorted(set(plan.layouts))} of groups of {sizes} ranks"
    reason = (public_class(problems[0]).__name__, reason_of(problems[0])) if problems else None
    known = exchange(plan, (reason, texts))
    failed = [(rank, options.call, *reason) for rank, (reason, _) in known if reason is not None]
    if failed:
        raise failure(failed) from (problems[0] if problems else None)
    raise disagreement([rank for rank, _ in known], [held for _, (_, held) in known])


def raise_nonfinite(plan: Plan, options: Options, entries: Sequence[Entry], norm: float) -> NoReturn:
    """Raise RuntimeError on all ranks, naming the parameters whose gradients are not finite, and where."""
    grads = ((entry.name, held_gradient(entry)) for entry in entries)
    own = [name for name, grad in grads if grad is not None and not grad.isfinite().all()]
    ranks_by_name: dict[str, list[str]] = {}
    for rank, names in exchange(plan, own):
        for name in names:
            ranks_by_name.setdefault(name, []).append(str(rank))
    places = [
        f"{name} on {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}" for name, ranks in ranks_by_name.items()
    ]
    more = [f"{len(places) - _MOST_NAMES} more"] if len(places) > _MOST_NAMES else []
    found = Words(f"{norm}: {'; '.join(places[:_MOST_NAMES] + more) or 'all elements are finite'}")
    raise RuntimeError(
        expected(options.call, "gradients with a finite norm", found, "Skip the step, or lower the scale.")
    )
