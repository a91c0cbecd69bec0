"""Which elements of each gradient this rank counts, and the order in which all ranks reduce over their groups.

The layouts depend on the parameters only, whether or not they have gradients, so all ranks make the same plan. For a
DTensor, each mesh dimension has a placement::

    Replicate   the ranks hold the same elements, which count once: nothing to reduce
    Partial     the ranks hold summands: the gradient is reduced first
    otherwise   the ranks hold different elements: Shard, the strided shards of FSDP2 over TP, and future placements

A parameter that is sharded by hand has no placements. The caller names its groups with ``shard_groups``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.group import Group, group_ranks, resolve_group
from ..errors import Words, expected
from .parameters import Entry, Label, check_parameter, fitting_gradient, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

# None, one group or mesh, or several of them.
Groups = Group | Sequence[Group]

# The places in the plan of the groups over which a parameter is sharded, ascending; () for a whole parameter.
Layout = tuple[int, ...]


class _Place(NamedTuple):
    """What the mesh and the placements say of all parameters that share them."""

    layout: Layout = ()
    groups: tuple[ProcessGroup, ...] = ()  # over which the parameters are sharded
    wanted: tuple[Placement, ...] | None = None  # of a gradient whose elements count once; None for plain tensors
    is_here: bool = True  # False on a mesh without this rank, such as that of another pipeline stage


class Plan:
    """The groups in the order in which every rank reduces over them: ``shards``, then ``stages``.

    After a method has raised, this rank can still follow the plan, and so meets the other ranks in every group that it
    knows. Groups of a single rank are left out.
    """

    def __init__(self, shard_groups: Callable[[Any], Groups] | None = None) -> None:
        self._shard_groups = shard_groups
        self.shards: dict[tuple[int, ...], ProcessGroup] = {}  # keyed by ranks: several groups may have the same
        self.stages: dict[tuple[int, ...], ProcessGroup] = {}
        self._places: dict[tuple[DeviceMesh, tuple[Placement, ...]], _Place] = {}
        self._layouts: dict[tuple[ProcessGroup, ...], Layout] = {}  # it takes time to list the ranks of a large group
        self._copies: dict[DeviceMesh, list[ProcessGroup]] = {}  # the groups of the meshes, one per dimension

    def read(self, label: Label, parameter: Any) -> tuple[Layout, Tensor | None, Tensor | None]:
        """Return the layout of a parameter, the elements of its gradient that count, and the memory of its gradient.

        Both are plain dense tensors on this rank, mostly the same one, and None without a gradient. A gradient that is
        not placed as its parameter, such as the Partial one of a norm layer under SequenceParallel, is first
        redistributed into a copy, by collectives that all ranks of its mesh make. Raises TypeError or ValueError.
        """
        entry = Entry(label, parameter)
        check_parameter(entry)
        place = self._place_of(parameter) if is_dtensor(parameter) else _Place()
        try:
            layout = place.layout if self._shard_groups is None else self._named_layout(entry, place.groups)
        finally:  # also after an error, because the other ranks redistribute
            counted, local = _read_gradient(entry, place.wanted) if place.is_here else (None, None)
        return layout, counted, local

    def add_copies(self) -> None:
        """Add mesh dimensions along which parameters are only replicated, so that an error is raised on all ranks."""
        self._layout_of(tuple([group for groups in self._copies.values() for group in groups]))

    def add_stages(self, across: Groups) -> None:
        """Add the groups whose ranks hold different parameters; ValueError if parameters would count twice."""
        if across is None:
            return
        stages = {tuple(group_ranks(group)): group for group in _resolve_groups(across, "across")}
        copies = [group for groups in self._copies.values() for group in groups]
        for ranks, group in stages.items():
            if any(_overlap(group, other) for other in [*self.shards.values(), *copies]):
                fix = "Parameters are sharded or copied over some of these ranks: pass the groups of pipeline stages."
                raise ValueError(expected("across", "groups whose ranks hold different parameters", Words(ranks), fix))
        self.stages = {ranks: group for ranks, group in stages.items() if len(ranks) > 1}

    def _place_of(self, parameter: DTensor) -> _Place:
        mesh, placements = parameter.device_mesh, parameter.placements
        if (mesh, placements) not in self._places:
            place = _Place(is_here=mesh.get_coordinate() is not None)
            if place.is_here:
                from torch.distributed.tensor import Replicate

                self._copies[mesh] = [mesh.get_group(dim) for dim in range(mesh.ndim)]
                sharded = tuple([group for group, placed in zip(self._copies[mesh], placements) if is_sharded(placed)])
                wanted = tuple([Replicate() if placed.is_partial() else placed for placed in placements])
                place = _Place(self._layout_of(sharded), sharded, wanted)
            self._places[mesh, placements] = place
        return self._places[mesh, placements]

    def _named_layout(self, entry: Entry, placed: tuple[ProcessGroup, ...]) -> Layout:
        """Return the layout of a parameter sharded over the groups of its placements and of ``shard_groups``."""
        assert self._shard_groups is not None
        name = f"shard_groups({entry.name})"
        groups = (*placed, *_resolve_groups(self._shard_groups(entry.parameter), name))
        for first, second in combinations(groups, 2) if groups not in self._layouts else ():
            if _overlap(first, second) and group_ranks(first) != group_ranks(second):
                fix = "Name only the groups that the placements of a DTensor do not show, and no union of groups."
                got = Words(f"ranks {group_ranks(first)} and {group_ranks(second)}")
                raise ValueError(expected(name, "groups that share one rank", got, fix))
        return self._layout_of(groups)

    def _layout_of(self, groups: tuple[ProcessGroup, ...]) -> Layout:
        """Register ``groups`` and return their places. A group of one rank has none."""
        if groups not in self._layouts:
            all_ranks = [tuple(group_ranks(group)) for group in groups]
            for ranks, group in zip(all_ranks, groups):
                if len(ranks) > 1:
                    self.shards.setdefault(ranks, group)
            self._layouts[groups] = tuple([place for place, ranks in enumerate(self.shards) if ranks in all_ranks])
        return self._layouts[groups]


def is_sharded(placement: Placement) -> bool:
    """Return True when the ranks hold different elements; ``placement.is_shard()`` is False for strided shards."""
    return not (placement.is_replicate() or placement.is_partial())


def _read_gradient(entry: Entry, wanted: tuple[Placement, ...] | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the elements of a gradient that count and its memory, or raise as :func:`fitting_gradient`."""
    grad: Any = fitting_gradient(entry)
    if grad is None:
        return None, None
    local: Tensor = grad if wanted is None else grad.to_local()  # under no_grad the memory itself
    counted = local
    if wanted is not None and tuple(grad.placements) != wanted:
        counted = grad.redistribute(placements=wanted).to_local()
    if local.is_sparse:  # it may list an index several times, and its values are added before their powers
        return counted.coalesce().values(), local
    return counted, local


def _resolve_groups(groups: Any, name: str) -> list[ProcessGroup]:
    if groups is None:
        return []
    are_several = isinstance(groups, Iterable) and not isinstance(groups, (ProcessGroup, DeviceMesh))
    return [resolve_group(group, name=name) for group in (groups if are_several else [groups])]


def _overlap(first: ProcessGroup, second: ProcessGroup) -> bool:
    """Return True when two groups of this rank share another rank too."""
    return len(set(group_ranks(first)) & set(group_ranks(second))) > 1
