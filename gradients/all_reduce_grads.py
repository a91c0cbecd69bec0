"""Adding gradients over ranks that no wrapper reduces over: those that share a sequence, or hold copies of an expert.

What happens, on every rank of the group and whatever the data::

    header        number of parameters, what this rank has done wrong
    participants  one word per parameter: a hash of its layout, and whether it has a gradient here
    buckets       all-reduces of at most 25 MiB, of the gradients that some rank has

Layouts are compared before the first bucket, so a mismatch raises on every rank with the gradients untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..distributed.collectives import all_gather
from ..distributed.group import Group, group_ranks, resolve_group
from ..distributed.header import Offer, agree_on, digest, disagreement, header_device
from ..distributed.torch_private import fsdp_groups, not_compiled
from ..errors import Words, check_choice, expected
from .grad_buckets import add_over_ranks_
from .parameters import Entry, _check_gradient, held_gradient, is_dtensor, list_entries

CALL = "all_reduce_grads_"

G = TypeVar("G", bound=ProcessGroup | DeviceMesh)


@not_compiled
@torch.no_grad()
def all_reduce_grads_(parameters: Any, group: Group) -> None:
    r"""Replace every gradient by its sum over the ranks of ``group``.

    Equal to ``for p in parameters: dist.all_reduce(p.grad, group=group)``, where a missing gradient counts as 0.

    For gradients that no wrapper reduces over these ranks: of parameters copied over the ranks that share a sequence,
    when that dimension is not folded into FSDP (see :func:`sequence_sync_group`); of norms under hand-written sequence
    parallelism; of copies of an expert. Call it after the last backward and before clipping.

    Args:
        parameters: a Module, or an iterable of parameters or of ``(name, parameter)`` pairs, in the same order on every
            rank; plain tensors and DTensors. One that is listed twice is added once.
        group: the ranks to add over, a ``ProcessGroup`` or a ``DeviceMesh``. None is no group and adds nothing;
            ``torch.distributed.group.WORLD`` is all ranks.

    Raises:
        TypeError: for what is not a parameter; a sparse gradient; a gradient that is a DTensor where its parameter is
            not.
        ValueError: when the ranks bring different parameters: their number, dtypes, local shapes, or the shards that
            they hold. A DTensor that is sharded over ``group``, or Partial, is such a case.
        RuntimeError: when this rank's process group has been destroyed.

    Degenerate:
        A gradient that only some ranks have becomes the sum on all of them, laid out as its parameter. One that no rank
        has stays None. Empty shards take part. A group of one rank adds nothing.
    Numerics:
        Half precision is added in float32 and rounded once. NaN and inf come through.
    Distributed:
        One header of 64 bytes, 8 bytes for each parameter, and one all-reduce for 25 MiB of gradients of one dtype;
        a larger gradient travels alone, in its own memory. Tensors and DTensors stay the same objects. Errors are
        raised on every rank of ``group``.

    Example:
        >>> import torch
        >>> all_reduce_grads_(torch.nn.Linear(2, 1), None)  # a single process has nothing to add
    """
    resolved = None if group is None else resolve_group(group)
    if resolved is None or resolved.size() == 1:
        list_summands(parameters)
        return
    add_(plan_sum(parameters, resolved), resolved)


def sequence_sync_group(mode: str, *, ring: G, ulysses: G, unified: G) -> G | None:
    """Return the group that gradients are still to be added over, after FSDP has reduced over what is folded into it.

    Args:
        mode: which dimensions of context parallelism are part of FSDP's mesh: ``"all"``, ``"ulysses_only"``,
            ``"ring_only"`` or ``"none"``.
        ring: the ranks that pass keys and values around (ring attention).
        ulysses: the ranks that exchange heads for tokens.
        unified: the ranks of both, all that share a sequence.

    Returns:
        None for ``"all"``: nothing is left, and :func:`all_reduce_grads_` does nothing with it. ``ring`` for
        ``"ulysses_only"``, ``ulysses`` for ``"ring_only"``, ``unified`` for ``"none"``.

    Raises:
        ValueError: for another mode.

    Example:
        >>> sequence_sync_group("ulysses_only", ring="ring", ulysses="ulysses", unified="unified")
        'ring'
    """
    left: dict[str, G | None] = {"all": None, "ulysses_only": ring, "ring_only": ulysses, "none": unified}
    return left[check_choice("mode", mode, tuple(left))]


class Summand(NamedTuple):
    """A parameter, and this rank's part of the sum that becomes its gradient."""

    name: str
    parameter: Tensor
    held: Tensor | None  # the memory of the gradient on this rank
    layout: str  # what must be equal on all ranks of the group


def distinct_entries(parameters: Any) -> list[Entry]:
    """Return the distinct parameters in their order, or raise TypeError or ValueError.

    Of a module also those that FSDP2 keeps while it shows whole ones, as after ``set_reshard_after_backward(False)``:
    the gradients are theirs.
    """
    if isinstance(parameters, nn.Module):
        kept = [parameter for group in fsdp_groups(parameters) for parameter in group.parameters()]
        parameters = [*parameters.named_parameters(), *(("a parameter of FSDP2", parameter) for parameter in kept)]
    problems: list[Exception] = []
    entries = list_entries(parameters, problems)
    if problems:
        raise problems[0]
    if isinstance(parameters, Iterator) and not entries:
        fix = "It can be used only once, and may have been: pass a list."
        raise ValueError(expected("parameters", "parameters", Words("an iterator with none"), fix))
    return entries


def list_summands(parameters: Any) -> list[Summand]:
    """Return what this rank brings, or raise TypeError or ValueError."""
    return [_summand(entry) for entry in distinct_entries(parameters)]


def plan_sum(parameters: Any, group: ProcessGroup) -> list[Summand]:
    """Compare what the ranks bring, and return the summands of the gradients that some rank has.

    Raises:
        TypeError, ValueError: see :func:`all_reduce_grads_`; on every rank of ``group``, which has two or more.
    """

    def bring() -> Offer[list[Summand]]:
        summands = list_summands(parameters)
        return Offer(summands, {"number of parameters": len(summands)})

    summands = agree_on(CALL, group, bring).value
    if not summands:
        return []
    words = _exchange_words(summands, group)  # [W, parameters]
    layouts = words & ~1
    differs = (layouts != layouts[0]).any(dim=0).tolist()
    if any(differs):
        raise _mismatch(summands[differs.index(True)], group)
    is_present = (words & 1).any(dim=0).tolist()
    return [summand for summand, present in zip(summands, is_present) if present]


@torch.no_grad()
def add_(summands: Sequence[Summand], group: ProcessGroup) -> None:
    """Add planned summands over the ranks, bucket by bucket, into the memory of the gradients."""
    created = {index: _new_gradient(own.parameter) for index, own in enumerate(summands) if own.held is None}
    held = [_memory(created[index]) if own.held is None else own.held for index, own in enumerate(summands)]
    add_over_ranks_(held, group, CALL)
    for index, grad in created.items():
        summands[index].parameter.grad = grad


def _summand(entry: Entry) -> Summand:
    """Return what this rank brings for one parameter."""
    _check_gradient(entry)
    grad = entry.parameter.grad
    if grad is not None and grad.layout != torch.strided:
        fix = "Use nn.Embedding(sparse=False), or turn it into a dense one with to_dense()."
        raise TypeError(expected(f"gradient of {entry.name}", "a dense tensor", grad, fix))
    held = held_gradient(entry)
    laid_out = entry.parameter if grad is None else grad
    local, dtype = (_memory(laid_out), _gradient_dtype(entry.parameter)) if held is None else (held, held.dtype)
    layout = f"{str(dtype).removeprefix('torch.')} {tuple(local.shape)} on {local.device.type}{_parts(laid_out)}"
    return Summand(entry.name, entry.parameter, held, layout + ("" if entry.parameter.requires_grad else ", frozen"))


def _parts(tensor: Tensor) -> str:
    """Return which part of the whole this rank holds: equal on ranks whose gradients may be added."""
    if not is_dtensor(tensor):
        return ""
    mesh, own = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if own is None:
        return ", elsewhere"
    places = zip(tensor.placements, own, range(mesh.ndim))
    return "".join(f", {place} {part} of {mesh.size(dim)}" for place, part, dim in places if not place.is_replicate())


def _memory(tensor: Tensor) -> Tensor:
    # Without gradients on, a DTensor hands out its own memory.
    with torch.no_grad():
        return tensor.to_local() if is_dtensor(tensor) else tensor.detach()


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype that a gradient will have; torch 2.9 and later let it differ from the parameter's."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _new_gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=_gradient_dtype(parameter), requires_grad=False)


def _exchange_words(summands: Sequence[Summand], group: ProcessGroup) -> Tensor:
    """Return one int64 for each rank and parameter on the CPU: a hash, its last bit set where there is a gradient."""
    own = [digest({"layout": one.layout}) & ~1 | (one.held is not None) for one in summands]
    words = torch.tensor(own, dtype=torch.int64, device=header_device(group))
    gathered = words.new_empty(group.size() * len(own))
    all_gather(gathered, words, group, call=CALL, what="the all-gather of which gradients there are")
    return gathered.view(group.size(), -1).cpu()


def _mismatch(summand: Summand, group: ProcessGroup) -> Exception:
    """Return the error for the first parameter that differs between the ranks; on all of them."""
    held: list[Any] = [None] * group.size()
    dist.all_gather_object(held, (summand.name, summand.layout), group=group)
    texts = [{"call": CALL, held[0][0]: layout} for _, layout in held]
    return disagreement(group_ranks(group), texts)
