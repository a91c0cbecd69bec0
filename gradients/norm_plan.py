"""Which ranks hold different elements of a parameter, and the order in which all ranks reduce over their groups.

The plan comes from the parameters, never from the gradients that happen to be there, so that all ranks make the same
one. Of a DTensor, mesh dimension by mesh dimension::

    Replicate   the ranks hold the same elements, which count once: nothing to reduce
    Partial     no elements yet: the gradient is reduced first
    otherwise   the ranks hold different elements: Shard, the strided shards of FSDP2 over TP, and what may come

What placements do not tell, of a parameter that is sharded by hand, the caller tells by ``shard_groups``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.group import Group, group_ranks, resolve_group
from ..errors import Words, attempt, expected
from .parameters import Entry, is_dtensor, is_elsewhere

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# None, one group or mesh, or several of them.
Groups = Group | Sequence[Group]

# The groups over which a parameter is sharded, by their place in the plan, ascending; () for a parameter that is whole.
Layout = tuple[int, ...]


class Plan(NamedTuple):
    """The groups in the order in which every rank reduces over them; none of them has a single rank.

    Attributes:
        groups: the groups over which parameters are sharded (and copied, if asked for), then the stages.
        layouts: for each entry, the groups over which it is sharded.
        first_stage: the place in ``groups`` of the first group of ``across``.
    """

    groups: list[ProcessGroup]
    layouts: list[Layout]
    first_stage: int


def make_plan(
    entries: Sequence[Entry],
    shard_groups: Callable[[Any], Groups] | None,
    across: Groups,
    problems: list[Exception],
    *,
    include_copies: bool,
) -> Plan:
    """Return the plan of this rank; a group that cannot be used is left out and goes to ``problems``.

    Args:
        entries: the parameters, in the same order on every rank: groups are met in the order of their first parameter.
        shard_groups: see :func:`~fullrank.gradients.grad_norm.total_grad_norm`.
        across: likewise.
        problems: receives exceptions. A rank with a problem joins the collectives nevertheless and tells it there.
        include_copies: also meet over mesh dimensions along which parameters are only replicated.
    """
    registry, meshes = _Registry(), _MeshGroups()
    layouts = []
    for entry in entries:
        groups = _placed_over(entry.parameter, meshes)
        named, problem = attempt(partial(_named_groups, entry, shard_groups, groups))
        layouts.append(registry.places([*groups, *(named or [])]))
        problems += [problem] if problem else []
    copies = [group for groups in meshes.known.values() for group in groups]
    if include_copies:
        registry.places(copies)
    sharded = list(registry.groups.values())
    stages, problem = attempt(partial(_stage_groups, across, [*sharded, *copies]))
    problems += [problem] if problem else []
    return Plan([*sharded, *(stages or [])], layouts, len(sharded))


class _Registry:
    """The groups met so far, each once however many objects stand for the same ranks."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._places: dict[int, int | None] = {}  # by id: listing the ranks of a large group takes its time

    def places(self, groups: Iterable[ProcessGroup]) -> Layout:
        """Add ``groups``, return their places. A group of one rank has none: that rank holds all there is."""
        found = (self._places[id(group)] if id(group) in self._places else self._add(group) for group in groups)
        return tuple(sorted({place for place in found if place is not None}))

    def _add(self, group: ProcessGroup) -> int | None:
        ranks = tuple(group_ranks(group))
        if len(ranks) > 1:
            self.groups.setdefault(ranks, group)
        self._places[id(group)] = list(self.groups).index(ranks) if len(ranks) > 1 else None
        return self._places[id(group)]


class _MeshGroups:
    """The groups of every dimension of the meshes met so far."""

    def __init__(self) -> None:
        self.known: dict[int, list[ProcessGroup]] = {}

    def groups_of(self, mesh: DeviceMesh) -> list[ProcessGroup]:
        if id(mesh) not in self.known:
            self.known[id(mesh)] = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        return self.known[id(mesh)]


def is_sharded(placement: Placement) -> bool:
    """Return True when the ranks hold different elements. Not ``is_shard()``: it is False for strided shards."""
    return not (placement.is_replicate() or placement.is_partial())


def _placed_over(parameter: Tensor, meshes: _MeshGroups) -> list[ProcessGroup]:
    """Return the groups over which a DTensor is sharded; none for a plain tensor."""
    if not is_dtensor(parameter) or is_elsewhere(parameter):
        return []
    pairs = zip(meshes.groups_of(parameter.device_mesh), parameter.placements)
    return [group for group, placement in pairs if is_sharded(placement)]


def _named_groups(
    entry: Entry, shard_groups: Callable[[Any], Groups] | None, placed: list[ProcessGroup]
) -> list[ProcessGroup]:
    """Return the groups that the caller names; ValueError when shards would be counted twice over them."""
    if shard_groups is None:
        return []
    name = f"shard_groups({entry.name})"
    named = _resolve(shard_groups(entry.parameter), name)
    for first, second in combinations([*placed, *named], 2):
        if _overlap(first, second) and group_ranks(first) != group_ranks(second):
            fix = "Name the groups that the placements of a DTensor do not tell, and no union of them."
            found = Words(f"ranks {group_ranks(first)} and {group_ranks(second)}")
            raise ValueError(expected(name, "groups that share one rank", found, fix))
    return named


def _stage_groups(across: Groups, used: list[ProcessGroup]) -> list[ProcessGroup]:
    """Return the groups of ``across``; ValueError when their ranks share parameters, which would count twice."""
    stages = {tuple(group_ranks(group)): group for group in _resolve(across, "across")}
    for ranks, group in stages.items():
        if any(_overlap(group, other) for other in used):
            fix = "Parameters are sharded or copied over some of these ranks: pass the groups of the pipeline stages."
            raise ValueError(expected("across", "groups whose ranks hold different parameters", Words(ranks), fix))
    return [group for ranks, group in stages.items() if len(ranks) > 1]


def _resolve(groups: Any, name: str) -> list[ProcessGroup]:
    """Return the process groups that the caller named: none, one, or several."""
    if groups is None:
        return []
    several = isinstance(groups, Iterable) and not isinstance(groups, (ProcessGroup, DeviceMesh))
    return [resolve_group(group, name=name) for group in (groups if several else [groups])]


def _overlap(first: ProcessGroup, second: ProcessGroup) -> bool:
    """Return True when two groups share more ranks than this one."""
    return len(set(group_ranks(first)) & set(group_ranks(second))) > 1
