"""Which ranks hold different elements of a parameter, and the order in which all ranks reduce over their groups.

The plan depends on the parameters only, whether or not they have gradients, so all ranks make the same plan. For a
DTensor, each mesh dimension has a placement::

    Replicate   the ranks hold the same elements, which count once: nothing to reduce
    Partial     the ranks hold summands: the gradient is reduced first
    otherwise   the ranks hold different elements: Shard, the strided shards of FSDP2 over TP, and future placements

A parameter that is sharded by hand has no placements. The caller names its groups with ``shard_groups``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.group import Group, group_ranks, resolve_group
from ..errors import Words, expected
from .parameters import Entry, check_parameter, is_dtensor, is_elsewhere

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# None, one group or mesh, or several of them.
Groups = Group | Sequence[Group]

# The places in the plan of the groups over which a parameter is sharded, ascending; () for a whole parameter.
Layout = tuple[int, ...]


class Plan:
    """The parameters of one rank, and the groups in the order in which every rank reduces over them.

    After a method has raised, this rank can still follow the plan, and so meets the other ranks in every group that it
    knows. Groups of a single rank are left out, because that rank holds everything.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # in the same order on every rank, which determines the order of the groups
        self.layouts: list[Layout] = []  # of each entry
        self._shards: dict[tuple[int, ...], ProcessGroup] = {}  # keyed by ranks: several groups may have the same
        self._stages: dict[tuple[int, ...], ProcessGroup] = {}
        # By id, because it takes time to list the ranks of a large group or the groups of a mesh.
        self._places: dict[int, int | None] = {}
        self._groups_of_mesh: dict[int, list[ProcessGroup]] = {}

    @property
    def groups(self) -> list[ProcessGroup]:
        """The groups over which parameters are sharded, those of :meth:`add_copies`, and the stages, in this order."""
        return [*self._shards.values(), *self._stages.values()]

    @property
    def first_stage(self) -> int:
        """The place of the first stage among the groups."""
        return len(self._shards)

    def add(self, entry: Entry, shard_groups: Callable[[Any], Groups] | None) -> None:
        """Add a parameter with its layout; see :func:`~fullrank.gradients.grad_norm.total_grad_norm`.

        Raises:
            TypeError: for an entry that is not a parameter; it is not added.
            ValueError: for groups of ``shard_groups`` that cannot be used; the parameter is added with the layout of
                its placements only.
        """
        check_parameter(entry)
        parameter = entry.parameter
        placed: list[ProcessGroup] = []
        if is_dtensor(parameter) and not is_elsewhere(parameter):
            mesh = parameter.device_mesh
            if id(mesh) not in self._groups_of_mesh:
                self._groups_of_mesh[id(mesh)] = [mesh.get_group(dim) for dim in range(mesh.ndim)]
            pairs = zip(self._groups_of_mesh[id(mesh)], parameter.placements)
            placed = [group for group, placement in pairs if is_sharded(placement)]
        self.entries.append(entry)
        self.layouts.append(self._layout_of(placed))
        if shard_groups is None:
            return
        name = f"shard_groups({entry.name})"
        named = _resolve_groups(shard_groups(parameter), name)
        for first, second in combinations([*placed, *named], 2):
            if _overlap(first, second) and group_ranks(first) != group_ranks(second):
                fix = "Name only the groups that the placements of a DTensor do not show, and no union of groups."
                got = Words(f"ranks {group_ranks(first)} and {group_ranks(second)}")
                raise ValueError(expected(name, "groups that share one rank", got, fix))
        self.layouts[-1] = self._layout_of([*placed, *named])

    def add_copies(self) -> None:
        """Add mesh dimensions along which parameters are only replicated, so that an error is raised on all ranks."""
        self._layout_of(group for groups in self._groups_of_mesh.values() for group in groups)

    def add_stages(self, across: Groups) -> None:
        """Add the groups whose ranks hold different parameters; ValueError if parameters would count twice."""
        stages = {tuple(group_ranks(group)): group for group in _resolve_groups(across, "across")}
        copies = [group for groups in self._groups_of_mesh.values() for group in groups]
        for ranks, group in stages.items():
            if any(_overlap(group, other) for other in [*self._shards.values(), *copies]):
                fix = (
                    "Parameters are sharded or copied over some of these ranks: pass the groups of the pipeline stages."
                )
                raise ValueError(expected("across", "groups whose ranks hold different parameters", Words(ranks), fix))
        self._stages = {ranks: group for ranks, group in stages.items() if len(ranks) > 1}

    def _layout_of(self, groups: Iterable[ProcessGroup]) -> Layout:
        """Register ``groups`` and return their places. A group of one rank has none."""
        places = []
        for group in groups:
            if id(group) not in self._places:
                ranks = tuple(group_ranks(group))
                if len(ranks) > 1:
                    self._shards.setdefault(ranks, group)
                self._places[id(group)] = list(self._shards).index(ranks) if len(ranks) > 1 else None
            places.append(self._places[id(group)])
        return tuple(sorted({place for place in places if place is not None}))


def is_sharded(placement: Placement) -> bool:
    """Return True when the ranks hold different elements; ``placement.is_shard()`` is False for strided shards."""
    return not (placement.is_replicate() or placement.is_partial())


def _resolve_groups(groups: Any, name: str) -> list[ProcessGroup]:
    """Return the process groups that the caller named: none, one, or several."""
    if groups is None:
        return []
    are_several = isinstance(groups, Iterable) and not isinstance(groups, (ProcessGroup, DeviceMesh))
    return [resolve_group(group, name=name) for group in (groups if are_several else [groups])]


def _overlap(first: ProcessGroup, second: ProcessGroup) -> bool:
    """Return True when two groups of this rank share another rank too."""
    return len(set(group_ranks(first)) & set(group_ranks(second))) > 1
