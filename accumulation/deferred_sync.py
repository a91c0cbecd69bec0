"""What is left to do to the gradients at the end of a step: additions that no wrapper makes, and one division."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.group import group_ranks, resolve_group
from ..distributed.torch_private import divide_each_
from ..errors import Words, attempt, expected
from ..gradients.all_reduce_grads import Summand, add_, distinct_entries, plan_sum
from ..gradients.parameters import Entry, held_gradient
from ..gradients.wrappers import GradientSync


class SyncEntry(NamedTuple):
    """Parameters whose gradients are added over a group; None and a group of one rank add nothing."""

    entries: list[Entry]
    group: ProcessGroup | None
    is_pair: bool  # the parameters were named, not all of the model's


Plans = list[tuple[list[Summand], ProcessGroup]]


def read_sync_groups(sync_groups: Any, own: list[Entry]) -> list[SyncEntry]:
    """Return the entries of ``sync_groups`` for the parameters ``own`` of a model; TypeError or ValueError if bad."""
    if isinstance(sync_groups, (str, dict)) or not isinstance(sync_groups, Iterable):
        what = "a list of groups and of (parameters, group) pairs"
        raise TypeError(expected("sync_groups", what, sync_groups, "Pass [group] for one group."))
    read = [_read_entry(f"sync_groups[{index}]", item, own) for index, item in enumerate(sync_groups)]
    known, seen = {id(entry.parameter) for entry in own}, set()
    for index, (entries, group, _) in enumerate(read):
        ranks = () if group is None else tuple(group_ranks(group))
        for name, parameter in entries:
            place = f"{name} in sync_groups[{index}]"
            if id(parameter) not in known:
                raise ValueError(expected(place, "a parameter of the model", parameter))
            if group is not None and (id(parameter), ranks) in seen:
                fix = "It is listed in an earlier entry, alone or with all parameters of the model."
                found = Words("a second sum over the same ranks")
                raise ValueError(expected(place, "one sum over each group", found, fix))
            seen.add((id(parameter), ranks))
    return read


def _read_entry(name: str, item: Any, own: list[Entry]) -> SyncEntry:
    is_pair = isinstance(item, (tuple, list)) and len(item) == 2
    parameters, group = item if is_pair else (own, item)
    try:
        entries = distinct_entries(parameters)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    resolved = None if group is None else resolve_group(group, name=name)
    return SyncEntry(entries, resolved if resolved is not None and resolved.size() > 1 else None, is_pair)


def plan_sync(read: Sequence[SyncEntry]) -> tuple[Plans, Exception | None]:
    """Compare over every group what its ranks bring; return what to add where, and the first error.

    Every group is met, also after an error: its other ranks wait there.
    """
    plans: Plans = []
    first = None
    for entries, group, _ in read:
        if group is not None:
            plan, error = attempt(lambda entries=entries, group=group: plan_sum(entries, group))  # type: ignore[misc]
            plans.append((plan or [], group))
            first = first or error
    return plans, first


def add_planned_(plans: Plans) -> None:
    """Make all the sums."""
    for summands, group in plans:
        add_(summands, group)


def check_whole(sync: GradientSync, model: nn.Module, read: Sequence[SyncEntry]) -> None:
    """Raise ValueError when there are gradients that neither a wrapper nor a pair takes care of."""
    named = {id(parameter) for entries, _, is_pair in read if is_pair for _, parameter in entries}
    beside = [name for name in sync.unmanaged if id(model.get_parameter(name)) not in named]
    if beside:
        more = f" and {len(beside) - 3} more" if len(beside) > 3 else ""
        what = "every trainable parameter inside a wrapper, or in a pair of sync_groups"
        fix = "Pass (parameters, group), with the group that they are copied over, or None when no rank has a copy."
        found = Words(f"{', '.join(beside[:3])}{more} in neither")
        raise ValueError(expected("model", what, found, fix))


def count_nonzero(entries: Sequence[Entry]) -> Tensor | int:
    """Return how many elements of the gradients are not 0, an int without gradients; NaN is not 0."""
    held = [grad for grad in map(held_gradient, entries) if grad is not None]
    if not held:
        return 0
    return torch.stack([grad.count_nonzero().to(held[0].device) for grad in held]).sum()


def divide_(entries: Sequence[Entry], beside: set[str], num_terms: float, multiplier: float) -> None:
    """Divide every gradient in place, whatever holds it: by N / m where a wrapper has divided by m, else by N.

    With N = 0 set it to 0, whatever it was.
    """
    alike: dict[tuple[float, torch.device, torch.dtype], list[Tensor]] = {}
    for entry in entries:
        grad = held_gradient(entry)
        if grad is not None:
            divided = 1.0 if entry.name in beside else multiplier
            alike.setdefault((divided, grad.device, grad.dtype), []).append(grad)
    for (divided, _, _), grads in alike.items():
        if num_terms:
            divide_each_(grads, num_terms / divided)
        else:
            for grad in grads:
                grad.zero_()
