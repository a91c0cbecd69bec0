"""One gradient norm over every mesh, and clipping by it: measure, reduce, apply.

*Measure* checks the arguments, plans the groups (norm_plan.py) and takes the norms of what this rank holds
(norm_measure.py): one norm, a column, for all parameters that are sharded over the same groups. *Reduce* joins the
columns over the groups, one all-gather per group, in the order that all ranks share. *Apply* is torch's own scaling.
Between the first kernel and the last nothing waits for the device.

A rank with a bad argument still takes part in every all-gather, so that no rank hangs, and all ranks raise afterwards.
Group by group, the columns sharded over that group are joined over its ranks. A column that was joined over all of its
groups is whole::

    sent by each rank:  | failed | digest | narrow | not finite | whole | column | column | ...

    failed       1 if this rank or any rank reduced so far failed its checks
    digest       hash of the arguments and of the layout of the columns, which must be equal on all ranks
    narrow       1 if this rank or any rank reduced so far returns the norm in float32, else 0
    not finite   inf or NaN if this rank or any rank reduced so far holds such a gradient, else 0
    whole        norm of what every rank of the group has whole: the first rank's counts. Of stages, all ranks' count
    column       norm of this rank's part of what is sharded over this group, and perhaps over later groups

It is a gather and not an all-reduce because powers of norms can be added within the range of float64 only where all
norms are known. All ranks then add them in the same order, to the same bits, and NaN survives the maximum.
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ..distributed.exchange import Exchange
from ..distributed.group import backend_by_device, is_initialized
from ..distributed.header import cause_of, disagreement, failure, public_class, reason_of
from ..distributed.torch_private import count_unreduced, holds_unreduced, multiply_each_, not_compiled
from ..errors import RankRuntimeError, Words, expected, warn
from .norm_measure import by_dtype, join_norms, local_norm
from .norm_plan import Groups, Layout, Plan
from .parameters import Plain, counted_gradient, held_gradient, is_elsewhere, list_entries, read_once, read_plain

Parameters = Tensor | nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
ShardGroups = Callable[[Any], Groups]

_HEAD = 5  # words in front of the columns
_LEAST = 16  # words: ranks that disagree on the number of columns must still send the same size
_MOST_NAMES = 10  # of parameters, in one message


@not_compiled
@torch.no_grad()
def total_grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    shard_groups: ShardGroups | None = None,
    across: Groups = None,
) -> Tensor:
    r"""Return the norm of the gradient that one process would hold, on every rank.

    Equal to ``torch.linalg.vector_norm(torch.cat([full_gradient.flatten(), ...]), norm_type)``.

    .. math:: \|g\|_p = \Bigl(\sum_\theta \sum_{i \in \theta} |g_i|^p\Bigr)^{1/p}

    over the parameters :math:`\theta` and their distinct elements i: shards are added, copies count once. Mesh
    dimension by mesh dimension, Replicate is a copy, a Partial gradient is reduced first, and every other placement is
    sharded. A plain tensor is whole, unless ``shard_groups`` names groups for it. A parameter listed twice counts once.

    Args:
        parameters: a Module, a tensor, or an iterable of parameters or of ``(name, parameter)`` pairs, in the same
            order on every rank; plain tensors and DTensors on any meshes. A missing gradient counts as 0.
        norm_type: p > 0, or inf.
        error_if_nonfinite: raise on every rank when the norm is inf or NaN. Waits for the device.
        shard_groups: called with each parameter; returns the groups over which it is sharded in addition to those of
            its placements, such as the expert-parallel group for local experts: None, a group, a mesh, or several.
        across: the groups whose ranks hold different parameters, such as pipeline stages; reduced last.

    Returns:
        A plain scalar on the device of the gradients, the same number on all ranks that the groups connect. Its dtype
        is float64 if one of this rank's parameters is float64, else float32, also for half precision. If any rank
        returns float32, all ranks return the number rounded to float32.

    Raises:
        TypeError: for an item that is not a parameter; for a gradient that is a DTensor although its parameter is not.
        ValueError: for a ``norm_type`` not > 0; gradients on different devices; a group without this rank; groups that
            overlap; arguments that differ between ranks.
        RuntimeError: with ``error_if_nonfinite``; names the parameters and the ranks that hold them.

    Degenerate:
        No gradient at all gives 0, and the same collectives. Empty shards add 0. NaN anywhere gives NaN.
    Numerics:
        The norm is right whenever the result dtype can hold it, for any p; half precision is summed in float32. The
        relative error in float64 is at most 1e-14.
    Distributed:
        One all-gather of 128 bytes per distinct process group. A gradient that is not placed as its parameter needs
        further collectives to redistribute it. If the norms travel over the CPU, or with ``error_if_nonfinite``, an
        error of one rank is raised on all. Otherwise the other ranks get NaN, because reading the flag would wait for
        the device.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> total_grad_norm([weight])
        tensor(5.)
    """
    call = "total_grad_norm"
    return _reduce(_measure(call, parameters, norm_type, None, error_if_nonfinite, shard_groups, across)).returned


@not_compiled
@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    shard_groups: ShardGroups | None = None,
    across: Groups = None,
) -> Tensor:
    r"""Scale all gradients by one factor, so that the norm of the whole gradient is at most ``max_norm``.

    Equal to ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` in one process that holds everything, whose
    arguments it takes. With :math:`\|g\|_p` as in :func:`total_grad_norm`, on every rank

    .. math:: g \leftarrow g \cdot \min\Bigl(1, \frac{\text{max\_norm}}{\|g\|_p + 10^{-6}}\Bigr)

    Call it when all gradients are final: after the last backward, after your own reductions, after
    ``scaler.unscale_``, and before the optimizer step.

    Args:
        parameters: see :func:`total_grad_norm`.
        max_norm: the largest norm, >= 0. With None or inf the gradients are only measured.
        norm_type: p > 0, or inf.
        error_if_nonfinite: raise on every rank, before any gradient is touched, when the norm is inf or NaN.
        foreach: multiply all gradients in few kernels (True) or one by one (False); None decides by their types.
        shard_groups: see :func:`total_grad_norm`.
        across: see :func:`total_grad_norm`.

    Returns:
        The norm before clipping; see :func:`total_grad_norm`.

    Raises:
        ValueError: for a ``max_norm`` that is negative or NaN, and as :func:`total_grad_norm`.
        TypeError, RuntimeError: as :func:`total_grad_norm`.

    Degenerate:
        A norm of inf or NaN scales as in torch: inf makes finite gradients 0, NaN makes all gradients NaN.
    Numerics:
        The factor for gradients in half precision is float64, because a small factor would round to 0 in their dtype.
    Distributed:
        As :func:`total_grad_norm`; scaling is local. Gradients keep their placements, Partial ones too.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    call = "clip_grad_norm_"
    measured = _measure(call, parameters, norm_type, max_norm, error_if_nonfinite, shard_groups, across)
    reduced, largest = _reduce(measured), measured.options.max_norm
    if largest == math.inf:
        return reduced.returned
    held = map(held_gradient, measured.plan.entries) if measured.plain is None else measured.plain
    for dtype, grads in by_dtype(grad for grad in held if grad is not None).items():
        factor = torch.clamp(largest / (reduced.norm + 1e-6), max=1.0)  # float64: float32 may not hold the norm
        if factor.device.type == "cpu" and factor.item() == 1:
            continue  # to look is free on the host, where torch multiplies all gradients by 1
        # The fused kernels need a factor in the dtype of the gradients. In half precision a small one rounds to 0.
        factor = factor.float() if dtype is torch.float32 else factor
        if foreach or (foreach is None and all(type(grad) is Tensor for grad in grads)):
            multiply_each_(grads, factor)
        else:
            for grad in grads:
                grad.mul_(factor)
    return reduced.returned


# --- measure ---------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """The arguments that must be equal on every rank. With a ``max_norm`` of inf the gradients are only measured."""

    call: str
    norm_type: float
    max_norm: float
    error_if_nonfinite: bool


class _Measured(NamedTuple):
    """What one rank holds."""

    options: _Options
    listed: list[Any] | nn.Module  # the parameters, as they can be read again
    plan: Plan  # the groups to reduce over, and the parameters unless their gradients are plain
    columns: dict[Layout, Tensor]  # the norm of what this rank holds; float64 scalars where the ranks meet
    plain: list[Tensor] | None  # the gradients, if they and their parameters are all plain and dense
    device: torch.device | None  # of the gradients, else of the first parameter; None without parameters
    narrow: bool  # whether this rank returns the norm in float32
    error: Exception | None  # the first failed check of this rank; the columns are then 0


class _Postponed:
    """Context manager that keeps the first exception raised inside it, to be raised after the collectives."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self.error is None and isinstance(error, Exception):
            self.error = error
        return isinstance(error, Exception)


def _measure(
    call: str,
    parameters: Any,
    norm_type: Any,
    max_norm: Any,
    error_if_nonfinite: bool,
    shard_groups: ShardGroups | None,
    across: Groups,
) -> _Measured:
    """Check the arguments, plan the groups and take the norms on this rank. A failed check is returned, not raised."""
    postponed = _Postponed()

    options = _Options(call, 2.0, math.inf, bool(error_if_nonfinite))
    with postponed:
        options = options._replace(norm_type=_number("norm_type", norm_type, "a number > 0, or inf", lambda p: p > 0))
    with postponed:
        what, most = "a number >= 0, or None to measure only", math.inf if max_norm is None else max_norm
        options = options._replace(max_norm=_number("max_norm", most, what, lambda norm: norm >= 0))

    plan = Plan()
    listed: list[Any] | nn.Module = []
    plain: Plain | None = Plain([], [])
    with postponed:
        listed = read_once(parameters)
        plain = read_plain(listed) if shard_groups is None else None
    entries = list_entries(listed) if plain is None else []
    with postponed:
        num_unreduced = count_unreduced(plain.parameters if plain else [entry.parameter for entry in entries])
        if num_unreduced:
            found = Words(f"{num_unreduced} that FSDP2 holds back unreduced, apart from .grad")
            fix = "Reduce in the last backward: maybe_no_sync does, or call set_requires_gradient_sync(True) before it."
            raise RuntimeError(expected("gradients", "final gradients", found, fix))
        modules = parameters.modules() if isinstance(parameters, nn.Module) else ()
        wrapped = [one for one in modules if isinstance(one, DistributedDataParallel)]
        if any(not one.require_backward_grad_sync for one in wrapped):
            fix = "They differ between the ranks: clip after the backward that reduces, outside of no_sync."
            raise RuntimeError(expected("gradients", "final gradients", Words("those of DDP inside no_sync"), fix))
        if any(holds_unreduced(one) and one.process_group.size() > 1 for one in wrapped):
            warn(
                f"{call}: the last forward of the DDP module with gradients ran inside no_sync, so its backward did "
                "not reduce. Unless something else has reduced since, the gradients differ between the ranks, and so "
                "does their norm: clip after a forward and backward outside of no_sync."
            )
    if isinstance(parameters, types.GeneratorType) and not listed and across is None:
        warn("parameters: an empty generator, nothing is measured or clipped. A generator can be used only once.")
    held: dict[Layout, list[Tensor]] = {(): plain.grads if plain else []}
    for entry in entries:
        with postponed:
            plan.add(entry, shard_groups)
    if options.error_if_nonfinite:
        plan.add_copies()
    with postponed:
        plan.add_stages(across)
    for entry, layout in zip(plan.entries, plan.layouts):
        grads = held.setdefault(layout, [])
        # One by one: the redistribution of a gradient is a collective, which an earlier error must not skip.
        with postponed:
            grad = counted_gradient(entry)
            grads += [] if grad is None else [grad]
    own = plain.parameters if plain else [entry.parameter for entry in plan.entries]
    device: torch.device | None = None
    with postponed:
        devices = {grad.device for grads in held.values() for grad in grads}
        if len(devices) > 1:
            found = Words(", ".join(sorted(map(str, devices))))
            fix = "Move the parameters to one device, or clip those of each device separately."
            raise ValueError(expected("gradients", "all on one device", found, fix))
        here = (one.device for one in own if not is_elsewhere(one))
        device = devices.pop() if devices else next(here, None)

    home = (_meeting_device(plan.groups[0], device) if plan.groups else device) or torch.device("cpu")
    columns: dict[Layout, Tensor] = {}
    if postponed.error is None:
        with postponed:
            columns = {layout: local_norm(grads, options.norm_type).to(home) for layout, grads in held.items() if grads}
    if len(columns) < len(held):  # what the other ranks receive from a rank without gradients, or one that failed
        columns = dict.fromkeys(held, torch.zeros((), dtype=torch.float64, device=home)) | columns

    # Half precision has no norm of its own: float16 ends at 65504.
    wide = not {parameter.dtype for parameter in own}.isdisjoint((torch.float64, torch.complex128))
    narrow = not wide and bool(own or not plan.groups)  # a rank without parameters leaves it to the others
    return _Measured(options, listed, plan, columns, plain and plain.grads, device, narrow, postponed.error)


def _number(name: str, value: Any, what: str, is_right: Callable[[float], bool]) -> float:
    if isinstance(value, bool):  # which float() takes for 1 or 0
        fix = "The arguments are in torch's order: pass error_if_nonfinite by its name." if name == "norm_type" else ""
        raise TypeError(expected(name, what, value, fix))
    try:
        number = float(value)  # torch takes the same: "inf", numpy's numbers, tensors of one element
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(expected(name, what, value)) from None
    if not is_right(number):
        raise ValueError(expected(name, what, value))
    return number


# --- reduce ----------------------------------------------------------------------------------------------------------


class _Reduced(NamedTuple):
    """Scalars that are bit-identical on all ranks that the groups connect."""

    norm: Tensor  # float64; NaN if a rank failed or the ranks disagree
    returned: Tensor  # the norm, rounded to float32 if any rank returns float32
    failed: Tensor | None = None  # 1 if a rank failed or the ranks disagree, else 0; None without other ranks


def _reduce(measured: _Measured) -> _Reduced:
    """Return the norm over all ranks. If a rank failed its checks, or the ranks disagree, raise on all of them."""
    options = measured.options
    alone = measured.columns[()]  # the norm where there is no group
    norm, returned, failed = _join_over_groups(measured) if measured.plan.groups else _Reduced(alone, alone)
    can_look = failed is not None and (failed.device.type == "cpu" or options.error_if_nonfinite)
    if measured.error is not None or (can_look and failed):
        _raise_together(measured, can_look=can_look)
    if options.error_if_nonfinite and not norm.isfinite():
        _raise_nonfinite(measured, float(norm))
    device = measured.device or norm.device
    returned = returned.to(device)
    return _Reduced(norm.to(device), returned.float() if measured.narrow else returned, failed)


def _join_over_groups(measured: _Measured) -> _Reduced:
    """Exchange the columns over one group after the other, without reading a value."""
    options, plan, left = measured.options, measured.plan, dict(measured.columns)
    held = torch.stack(list(left.values()))
    odd = torch.where(held.isfinite(), 0.0, held).sum()  # inf, NaN, or 0
    failed = torch.full_like(odd, float(measured.error is not None))
    narrow = torch.full_like(odd, float(measured.narrow))
    for place, group in enumerate(plan.groups):
        layouts = sorted(layout for layout in left if place in layout)
        # 48 bits of a hash that is the same in every process: float64 holds them exactly.
        facts = repr({**options._asdict(), "layouts": layouts}).encode()
        digest = float(int.from_bytes(hashlib.blake2b(facts, digest_size=6).digest(), "big"))
        head = [failed, torch.full_like(odd, digest), narrow, odd, left[()]]
        sent = torch.stack([*head, *(left.pop(layout) for layout in layouts)])
        padded = torch.nn.functional.pad(sent, (0, -sent.numel() % _LEAST)).to(_meeting_device(group, sent.device))
        ranks = Exchange(options.call, group).each(padded, "the norms").to(sent.device)  # [W, words]
        differ = ranks[:, 1] != ranks[0, 1]
        failed = torch.maximum(ranks[:, 0], differ.double()).amax()
        narrow, odd = ranks[:, 2].amax(), ranks[:, 3].sum()
        is_stage = place >= plan.first_stage
        left[()] = join_norms(ranks[:, 4], options.norm_type) if is_stage else ranks[0, 4]
        for layout, norm in zip(layouts, join_norms(ranks[:, _HEAD : sent.numel()], options.norm_type)):
            rest = tuple(other for other in layout if other != place)
            left[rest] = join_norms(torch.stack([left[rest], norm]), options.norm_type) if rest in left else norm
    norm = torch.where(failed > 0, math.nan, left[()] + odd)
    return _Reduced(norm, torch.where(narrow > 0, norm.float().double(), norm), failed)


def _meeting_device(group: ProcessGroup, own: torch.device | None) -> torch.device:
    """Return the device on which the ranks of ``group`` exchange norms; ``own`` is that of the gradients, if any."""
    served = backend_by_device(group)
    if own is not None and served.get(own.type, "gloo") != "gloo":
        return own
    if "cpu" in served and (own is not None or set(served.values()) == {"gloo"}):
        return torch.device("cpu")  # gloo moves no memory of an accelerator
    # A rank without gradients uses the device that the gradients of the other ranks are probably on.
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _raise_together(measured: _Measured, *, can_look: bool) -> NoReturn:
    """Raise the same error on all ranks if all of them know that there is one (``can_look``), else this rank's own."""
    options, plan, error = measured.options, measured.plan, measured.error
    if error is not None and not (plan.groups and can_look):
        raise error
    sizes = [dist.get_world_size(group) for group in plan.groups]
    texts = {key: repr(value) for key, value in options._asdict().items()} | {"call": options.call}
    layouts = set(plan.layouts) if measured.plain is None else {()}
    texts["layouts"] = f"{sorted(layouts)} of groups of {sizes} ranks"
    reason = None if error is None else (public_class(error).__name__, reason_of(error))
    known = _exchange(plan, (reason, texts))
    failed = [(rank, options.call, *reason) for rank, (reason, _) in known if reason is not None]
    if failed:
        raise failure(failed) from cause_of(error)
    raise disagreement([rank for rank, _ in known], [held for _, (_, held) in known])


def _raise_nonfinite(measured: _Measured, norm: float) -> NoReturn:
    """Raise RuntimeError on all ranks, naming the parameters whose gradients are not finite, and their ranks."""
    grads = ((entry.name, held_gradient(entry)) for entry in list_entries(measured.listed))
    own = [name for name, grad in grads if grad is not None and not grad.isfinite().all()]
    ranks_by_name: dict[str, list[str]] = {}
    for rank, names in _exchange(measured.plan, own):
        for name in names:
            ranks_by_name.setdefault(name, []).append(str(rank))
    places = [
        f"{name} on {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)}" for name, ranks in ranks_by_name.items()
    ]
    more = [f"{len(places) - _MOST_NAMES} more"] if len(places) > _MOST_NAMES else []
    found = Words(f"{norm}: {'; '.join(places[:_MOST_NAMES] + more) or 'all elements are finite'}")
    fix = "Skip the step, or lower the scale."
    kind = RankRuntimeError if measured.plan.groups else RuntimeError
    raise kind(expected(measured.options.call, "gradients with a finite norm", found, fix))


def _exchange(plan: Plan, own: Any) -> list[tuple[int, Any]]:
    """Return (rank, object) of all ranks that the groups connect, in the order of the ranks. Only before an error."""
    known = {dist.get_rank() if is_initialized() else 0: own}
    for group in plan.groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, known, group=group)
        known = {rank: value for part in gathered for rank, value in part.items()}
    return sorted(known.items(), key=lambda item: item[0])
