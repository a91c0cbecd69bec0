"""The sums over groups that :meth:`DeferredMean.finish` makes because no wrapper makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from ..distributed.group import group_ranks, resolve_group
from ..distributed.header import public_class, reason_of
from ..errors import Words, expected
from ..gradients.all_reduce_grads import Summand, distinct_entries, plan_sum
from ..gradients.parameters import Entry


class SyncEntry(NamedTuple):
    """Parameters, and the group over which their gradients are added."""

    parameters: list[Entry]
    group: ProcessGroup | None  # None adds nothing; so does a group of one rank
    is_pair: bool  # the caller listed the parameters; otherwise they are all of the model's


def read_sync_groups(sync_groups: Any, model_entries: list[Entry]) -> list[SyncEntry]:
    """Return the entries of ``sync_groups`` for a model of ``model_entries``; TypeError or ValueError if bad."""
    if isinstance(sync_groups, (str, dict)) or not isinstance(sync_groups, Iterable):
        what = "a list of groups and of (parameters, group) pairs"
        raise TypeError(expected("sync_groups", what, sync_groups, "Pass [group] for one group."))
    to_sync: list[SyncEntry] = []
    for index, item in enumerate(sync_groups):
        is_pair = isinstance(item, (tuple, list)) and len(item) == 2
        parameters, group = item if is_pair else (model_entries, item)
        try:
            listed = distinct_entries(parameters)
        except (TypeError, ValueError) as error:
            raise type(error)(f"sync_groups[{index}]: {error}") from error
        ranks = None if group is None else resolve_group(group, name=f"sync_groups[{index}]")
        to_sync.append(SyncEntry(listed, ranks if ranks is not None and ranks.size() > 1 else None, is_pair))
    known, seen = {id(entry.parameter) for entry in model_entries}, set()
    for index, (listed, ranks, _) in enumerate(to_sync):
        members = () if ranks is None else tuple(group_ranks(ranks))
        for entry in listed:
            place, parameter = f"{entry.name} in sync_groups[{index}]", entry.parameter
            if id(parameter) not in known:
                raise ValueError(expected(place, "a parameter of the model", parameter))
            if ranks is not None and (id(parameter), members) in seen:
                fix = "It is listed in an earlier entry, alone or with all parameters of the model."
                got = Words("a second sum over the same ranks")
                raise ValueError(expected(place, "one sum over each group", got, fix))
            seen.add((id(parameter), members))
    return to_sync


def plan_sums(to_sync: list[SyncEntry], count: float) -> list[tuple[list[Summand], ProcessGroup]]:
    """Return what to add over which group, after comparing it within each group; or raise the first error.

    The loop continues after an error, because the ranks of the other groups wait for this one. It raises a copy of the
    error: with one that an agreement has raised, this rank would skip the next header, in which others may wait.
    """
    plans, errors = [], []
    for parameters, group, _ in to_sync:
        if group is not None:
            try:
                plans.append((plan_sum(parameters, group, count), group))
            except Exception as error:
                errors.append(error)
    if errors:
        raise public_class(errors[0])(reason_of(errors[0]))
    return plans
