"""Add gradients over ranks that no wrapper reduces over, such as ranks that share a sequence or copies of an expert.

The ranks compare layouts before the first sum, so a mismatch raises on every rank with the gradients untouched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import TensorWeakRef

from ..distributed.exchange import Exchange, communicate, is_staged
from ..distributed.group import Group, group_ranks, resolve_group
from ..distributed.header import Offer, agree_on, digest, disagreement, header_device
from ..distributed.torch_private import not_compiled
from ..errors import RankValueError, Words, check_choice, expected
from .parameters import Entry, check_parameter, fitting_gradient, is_dtensor, list_distinct
from .torch_private import copy_each_, fsdp_groups

CALL = "all_reduce_grads_"
BUCKET_BYTES = 25 * 2**20  # per collective: large enough to use the bandwidth, small compared with all gradients

G = TypeVar("G", bound=ProcessGroup | DeviceMesh)


@not_compiled
@torch.no_grad()
def all_reduce_grads_(parameters: Any, group: Group) -> None:
    r"""Replace every gradient by its sum over the ranks of ``group``.

    Equal to ``for p in parameters: dist.all_reduce(p.grad, group=group)``, where a missing gradient counts as 0.

    Use it for gradients that no wrapper reduces over these ranks: of parameters copied over the ranks that share a
    sequence (see :func:`sequence_sync_group`); of norms under hand-written sequence parallelism; of copies of an
    expert. Call it after the last backward and before clipping.

    Args:
        parameters: a Module, or an iterable of parameters or of ``(name, parameter)`` pairs, in the same order on every
            rank; plain tensors and DTensors. A parameter that is listed twice is added once.
        group: the ranks to add over, a ``ProcessGroup`` or a ``DeviceMesh``. None means no group and adds nothing;
            ``torch.distributed.group.WORLD`` means all ranks.

    Raises:
        TypeError: for an item that is not a parameter; for a sparse gradient; for a gradient that is a DTensor although
            its parameter is not.
        ValueError: when the ranks list different parameters: another number, other dtypes, local shapes or shards, as
            of a DTensor that is sharded over ``group``, or Partial. Also when the gradients of a Module are known to
            have been divided by different counts of terms: the ranks hold different tokens, so all of them must count.

    Degenerate:
        If only some ranks have a gradient, all ranks get the sum, laid out as the parameter. If no rank has one, it
        stays None. Empty shards take part.
    Numerics: half precision is added in float32 and rounded once.
    Distributed:
        One header, one bit per parameter, and one all-reduce per 25 MiB of gradients of one dtype. A larger gradient is
        reduced alone, in its own memory. Tensors stay the same objects. Errors are raised on every rank of ``group``.

    Example:
        >>> import torch
        >>> all_reduce_grads_(torch.nn.Linear(2, 1), None)  # a single process has nothing to add
    """
    resolved = None if group is None else resolve_group(group)
    if resolved is None or resolved.size() == 1:
        list_summands(parameters)
        return
    count = None  # the number that the current gradients of a module have been divided by, if it is known
    for module in parameters.modules() if isinstance(parameters, nn.Module) and _COUNTS else ():
        if module in _COUNTS and count is None:
            noted_count, parameter, grad = _COUNTS[module]
            count = noted_count if parameter.grad is not None and grad() is parameter.grad else None
    add_(plan_sum(parameters, resolved, count), resolved)


def sequence_sync_group(mode: str, *, ring: G, ulysses: G, unified: G) -> G | None:
    """Return the group over which gradients must still be added after FSDP has reduced over the dimensions in its mesh.

    Args:
        mode: which dimensions of context parallelism are part of FSDP's mesh: ``"all"``, which returns None, and leaves
            :func:`all_reduce_grads_` nothing to add; ``"ulysses_only"`` returns ``ring``, ``"ring_only"`` returns
            ``ulysses``, and ``"none"`` returns ``unified``. ValueError for another mode.
        ring: the ranks that pass keys and values around (ring attention).
        ulysses: the ranks that exchange heads for tokens.
        unified: the ranks of both, all ranks that share a sequence.

    Example:
        >>> sequence_sync_group("ulysses_only", ring="ring", ulysses="ulysses", unified="unified")
        'ring'
    """
    groups: dict[str, G | None] = {"all": None, "ulysses_only": ring, "ring_only": ulysses, "none": unified}
    return groups[check_choice("mode", mode, tuple(groups))]


# The last count of each model, with a parameter and its gradient. If the gradient is another one, the count is stale.
_COUNTS: WeakKeyDictionary[nn.Module, tuple[float, Tensor, TensorWeakRef]] = WeakKeyDictionary()


def note_count(model: nn.Module, count: float) -> None:
    """Note the divisor of the gradients of ``model``, for :func:`all_reduce_grads_`."""
    _COUNTS.pop(model, None)
    for parameter in model.parameters():
        if parameter.grad is not None:
            _COUNTS[model] = count, parameter, TensorWeakRef(parameter.grad)
            return


class Summand(NamedTuple):
    """A parameter, and this rank's part of the sum that becomes its gradient."""

    name: str
    parameter: Tensor
    grad: Tensor | None  # the memory of the gradient on this rank
    layout: str  # must be equal on all ranks of the group


def distinct_entries(parameters: Any) -> list[Entry]:
    """Return the distinct parameters in their order, of FSDP2 in both forms: a whole one has no gradient of its own."""
    if isinstance(parameters, nn.Module):
        both = [parameter for group in fsdp_groups(parameters) for parameter in group.parameters()]
        parameters = [*parameters.named_parameters(), *(("a parameter of FSDP2", parameter) for parameter in both)]
    entries = list(map(Entry._make, list_distinct(parameters)))
    for entry in entries:
        if not isinstance(entry.parameter, Tensor):
            check_parameter(entry)
    if isinstance(parameters, Iterator) and not entries:
        fix = "An iterator can be used only once, and this one may already be used up: pass a list."
        raise ValueError(expected("parameters", "parameters", Words("an iterator with none"), fix))
    return entries


def list_summands(parameters: Any) -> list[Summand]:
    """Return this rank's part of every sum, or raise TypeError or ValueError."""
    summands = []
    for entry in distinct_entries(parameters):
        parameter, grad = entry.parameter, fitting_gradient(entry)
        if grad is not None and grad.layout != torch.strided:
            fix = "Use nn.Embedding(sparse=False), or make the gradient dense with to_dense()."
            raise TypeError(expected(f"gradient of {entry.name}", "a dense tensor", grad, fix))
        local, where = parameter if grad is None else grad, ""
        if is_dtensor(local):  # which part of the whole tensor this rank holds
            placements, mesh = local.placements, local.device_mesh
            local = local.to_local()  # its own memory, since no gradients are enabled here
            if (coordinate := mesh.get_coordinate()) is None:
                grad, where = None, ", elsewhere"
            for dim, (place, part) in enumerate(zip(placements, coordinate or ())):
                where += "" if place.is_replicate() else f", {place} {part} of {mesh.size(dim)}"
        dtype = parameter.grad_dtype or parameter.dtype if grad is None else grad.dtype
        layout = f"{str(dtype).removeprefix('torch.')} {tuple(local.shape)} on {local.device.type}{where}"
        layout += "" if parameter.requires_grad else ", frozen"
        summands.append(Summand(entry.name, parameter, None if grad is None else local, layout))
    return summands


def plan_sum(parameters: Any, group: ProcessGroup, count: float | None = None) -> list[Summand]:
    """Compare the parameters of two or more ranks, and return the summands whose gradient at least one rank has."""

    def bring() -> Offer[list[Summand]]:
        summands = list_summands(parameters)
        total = math.nan if count is None else count
        return Offer(summands, {"number of parameters": len(summands)}, totals=(total,))

    agreed = agree_on(CALL, group, bring)
    summands, ranks = agreed.value, group_ranks(group)
    counts = [(number, rank) for rank, (number, *_) in zip(ranks, agreed.totals) if not math.isnan(number)]
    if counts and max(counts)[0] - min(counts)[0] > 1e-6 * max(counts)[0]:  # weights may be summed in another order
        got = Words(", ".join(f"{number:.17g} on rank {rank}" for number, rank in counts))
        fix = (
            "These ranks hold different tokens, so all of them must count: pass a group that contains them to "
            "accumulate(..., group=...) or DeferredMean(model, group)."
        )
        raise RankValueError(expected("count of terms", "the same on all ranks that are added up", got, fix))
    if not summands:
        return []
    layouts = [summand.layout for summand in summands]
    bits = numpy.packbits([summand.grad is not None for summand in summands]).tobytes()
    sent = digest({"layouts": layouts}).to_bytes(8, "big", signed=True) + bits
    received = _gather_data(sent, group, "which gradients there are")  # [W, 8 + parameters / 8]
    if (received[:, :8] != received[0, :8]).any():  # name the first parameter whose layouts differ
        words = b"".join(digest({"layout": layout}).to_bytes(8, "big", signed=True) for layout in layouts)
        hashes = _gather_data(words, group, "the layouts, which differ,")
        first = summands[int((hashes != hashes[0]).any(axis=0).argmax()) // 8]
        pairs: list[Any] = [None] * group.size()
        dist.all_gather_object(pairs, (first.name, first.layout), group=group)
        raise disagreement(ranks, [{"call": CALL, pairs[0][0]: layout} for _, layout in pairs])
    is_present = numpy.unpackbits(numpy.bitwise_or.reduce(received[:, 8:], axis=0), count=len(summands))
    return [summand for summand, present in zip(summands, is_present) if present]


def _gather_data(data: bytes, group: ProcessGroup, what: str) -> Any:
    """Return ``data`` of all ranks, equally long on each, as an array (W, bytes)."""
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(header_device(group), non_blocking=True)
    return Exchange(CALL, group).each(sent, what).cpu().numpy()


@torch.no_grad()
def add_(summands: Sequence[Summand], group: ProcessGroup) -> None:
    """Add planned summands over the ranks, in the memory of the gradients. A parameter without a gradient gets one."""
    created: dict[int, Tensor] = {}
    tensors: list[Tensor] = []
    for index, (_, parameter, local_grad, _) in enumerate(summands):
        if local_grad is None:
            dtype = parameter.grad_dtype or parameter.dtype
            created[index] = made = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            local_grad = made.to_local() if is_dtensor(made) else made
        tensors.append(local_grad)
    what = CALL, "an all-reduce of gradients", dist.all_reduce
    for bucket in buckets(tensors):
        first, staged = bucket[0], is_staged(bucket[0], group)
        dtype = torch.promote_types(first.dtype, torch.float32)
        if len(bucket) == 1 and first.dtype == dtype and first.is_contiguous() and not staged:
            communicate(*what, first, group=group)
            continue
        sizes = [tensor.numel() for tensor in bucket]
        flat = torch.empty(sum(sizes), dtype=dtype, device="cpu" if staged else first.device)
        parts = [part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), bucket)]
        copy_each_(parts, bucket)
        communicate(*what, flat, group=group)
        copy_each_(bucket, parts)
    for index, grad in created.items():
        summands[index].parameter.grad = grad


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, in their order, the same on all ranks; without empty tensors."""
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        kind, size = (tensor.device, tensor.dtype), tensor.numel() * max(4, tensor.itemsize)
        if kind in filling and sizes[kind] + size > BUCKET_BYTES:
            yield filling.pop(kind)
        sizes[kind] = size + (sizes[kind] if kind in filling else 0)
        if size:
            filling.setdefault(kind, []).append(tensor)
    yield from filling.values()
