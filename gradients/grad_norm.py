"""One gradient norm over every mesh, and clipping by it: measure, reduce, apply.

*Measure* checks the arguments, plans the groups (norm_plan.py) and computes the norms of the gradients on this rank
(norm_measure.py): one norm, called a column, for all parameters that are sharded over the same groups. *Reduce* joins
the columns over the groups, one all-gather per group, in the same order on all ranks. *Apply* is torch's own scaling.
The host does not wait for the device between the first kernel and the last.

A rank with a bad argument still takes part in every all-gather, and all ranks raise afterwards. Each group joins the
columns that are sharded over it. A column that has been joined over all of its groups is whole::

    sent by each rank:  | failed | digest | narrow | not finite | whole | column | column | ...

    failed       1 if this rank or any rank reduced so far failed its checks
    digest       hash of the arguments and of the layout of the columns, which must be equal on all ranks
    narrow       1 if this rank or any rank reduced so far returns the norm in float32, else 0
    not finite   inf or NaN if this rank or any rank reduced so far has such a gradient, else 0
    whole        norm of the whole columns: equal on all ranks of the group up to rounding, so the first is used;
                 stages are joined
    column       norm of this rank's part of the parameters that are sharded over this group, and maybe over later ones

The norms are gathered and not all-reduced, because a sum of their powers stays within the range of float64 only if all
norms are known. All ranks then add them in the same order, to the same bits, and NaN survives the maximum.
"""

from __future__ import annotations

import hashlib
import math
import operator
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
from ..distributed.header import Report, cause_of, joint_error, name_ranks
from ..distributed.torch_private import not_compiled
from ..errors import RankRuntimeError, Words, expected, warn
from .norm_measure import by_device, by_dtype, join_norms, local_norm
from .norm_plan import Groups, Layout, Plan
from .parameters import Entry, Label, elements_of, is_elsewhere, list_distinct, local_gradient, plain_gradients
from .torch_private import count_unreduced, holds_unreduced, multiply_each_

Parameters = Tensor | nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
ShardGroups = Callable[[Any], Groups]

_HEAD = 5  # words in front of the columns
_BLOCK = 16  # words: the columns are padded to a multiple, so that ranks with other columns send the same size
_MAX_NAMES = 10  # of parameters, in one message
_ROUNDING = 0.01  # the norms of copies differ by less, also in half precision


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

    over the parameters :math:`\theta` and their distinct elements i. In each mesh dimension, Replicate means copies,
    which count once, Partial gradients are reduced first, and every other placement means shards. A plain tensor is
    whole, unless ``shard_groups`` names groups for it. A parameter listed twice counts once.

    Args:
        parameters: a Module, a tensor, or an iterable of parameters or of ``(name, parameter)`` pairs, in the same
            order on every rank; plain tensors and DTensors on any meshes and devices. A missing gradient counts as 0.
        norm_type: p > 0, or inf.
        error_if_nonfinite: raise on every rank when the norm is inf or NaN. Waits for the device.
        shard_groups: called with each parameter; returns the groups over which it is sharded in addition to those of
            its placements, such as the expert-parallel group for local experts: None, a group, a mesh, or several.
        across: the groups whose ranks hold different parameters, such as pipeline stages; reduced last.

    Returns:
        A plain scalar, the same number on all ranks that the groups connect; on the device of the gradients, of several
        on the first that is no CPU. Its dtype is float64 if one of this rank's parameters is float64, else float32,
        also for half precision. If any rank returns float32, the number is rounded to float32 on all ranks.

    Raises:
        TypeError, ValueError: for arguments that do not fit, or differ between ranks; for a gradient that is a DTensor
            although its parameter is not; for some gradients on the meta device; for groups that overlap.
        RuntimeError: with ``error_if_nonfinite``, when the norm is inf or NaN; names the parameters and their ranks.
            For whole parameters whose norms differ between ranks of one of the groups by over 1 % of the largest norm.

    Degenerate: no gradient at all gives 0, and the same collectives. Empty shards add 0. NaN anywhere gives NaN.
    Numerics:
        No power overflows or underflows, for any p, if the result dtype can hold the norm. Half precision is summed in
        float32. The relative error in float64 is at most 1e-14.
    Distributed:
        One all-gather of 128 bytes per distinct process group. A gradient that is not placed as its parameter is
        redistributed by further collectives. If the norms travel over the CPU, or with ``error_if_nonfinite``, an error
        of one rank is raised on all. Otherwise the other ranks get NaN.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> total_grad_norm([weight])
        tensor(5.)
    """
    given = _Options("total_grad_norm", norm_type, None, error_if_nonfinite)
    return _reduce(_measure(parameters, given, shard_groups, across)).returned


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

    Equal to ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` in one process that holds everything, with the
    same arguments. With :math:`\|g\|_p` as in :func:`total_grad_norm`, on every rank

    .. math:: g \leftarrow g \cdot \min\Bigl(1, \frac{\text{max\_norm}}{\|g\|_p + 10^{-6}}\Bigr)

    Call it when all gradients are final: after the last backward, after your own reductions, after
    ``scaler.unscale_``, and before the optimizer step.

    Args:
        parameters, norm_type, shard_groups, across: see :func:`total_grad_norm`.
        max_norm: the largest norm, >= 0. With None or inf the gradients are only measured.
        error_if_nonfinite: raise on every rank, before any gradient changes, when the norm is inf or NaN.
        foreach: multiply all gradients in few kernels (True) or one by one (False); None decides by their types.

    Returns:
        The norm before clipping; see :func:`total_grad_norm`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`total_grad_norm`.

    Degenerate: a norm of inf or NaN scales as in torch: inf makes finite gradients 0, NaN makes all gradients NaN.
    Numerics: the factor for gradients in half precision is float64: a small one would round to 0 in their dtype.
    Distributed: as :func:`total_grad_norm`; scaling is local. Gradients keep their placements, Partial ones too.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    given = _Options("clip_grad_norm_", norm_type, max_norm, error_if_nonfinite)
    measured = _measure(parameters, given, shard_groups, across)
    reduced, limit = _reduce(measured), measured.options.max_norm
    if limit == math.inf:
        return reduced.returned
    factor = torch.clamp(limit / (reduced.norm + 1e-6), max=1.0)  # float64: float32 may not hold the norm
    if factor.device.type == "cpu" and factor.item() == 1:
        return reduced.returned  # reading the factor is free on the host and saves a multiplication by 1
    for on_device in by_device(measured.grads, measured.devices):
        for dtype, grads in by_dtype(on_device).items():
            # The fused kernels need a factor in the dtype of the gradients. In half precision a small one rounds to 0.
            own = factor.to(grads[0].device, torch.float32 if dtype is torch.float32 else None)
            if foreach or (foreach is None and all(type(grad) is Tensor for grad in grads)):
                multiply_each_(grads, own)
            else:
                for grad in grads:
                    grad.mul_(own)
    return reduced.returned


# --- measure ---------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """The arguments that must be equal on every rank. With a ``max_norm`` of inf the gradients are only measured."""

    call: str
    norm_type: Any  # a float once it is checked, like the next
    max_norm: Any
    error_if_nonfinite: bool


class _Measured(NamedTuple):
    options: _Options
    listed: list[tuple[Label, Any]]  # the distinct parameters with their labels
    grads: list[Tensor]  # the memory of the gradients
    groups: list[ProcessGroup]  # in the order of the plan
    first_stage: int  # the place of the first group that joins stages
    layouts: list[Layout]  # of the parameters
    columns: dict[Layout, Tensor]  # the norms on this rank, as float64 scalars on the device of the exchange
    devices: tuple[torch.device, ...]  # of the gradients
    device: torch.device | None  # the first of them, else that of the first parameter; None without parameters
    narrow: bool  # whether this rank returns the norm in float32
    error: Exception | None  # the first failed check of this rank; the columns are then 0


def _measure(parameters: Any, given: _Options, shard_groups: ShardGroups | None, across: Groups) -> _Measured:
    """Check, plan and measure on this rank; a failed check is returned, because this rank has to meet the others."""
    errors: list[Exception] = []
    options = _Options(given.call, 2.0, math.inf, bool(given.error_if_nonfinite))
    listed: list[tuple[Label, Any]] = []
    try:
        power = _as_number("norm_type", given.norm_type, "a number > 0, or inf", operator.gt)
        limit = math.inf if given.max_norm is None else given.max_norm
        limit = _as_number("max_norm", limit, "a number >= 0, or None to measure only", operator.ge)
        options = options._replace(norm_type=power, max_norm=limit)
    except Exception as error:
        errors.append(error)
    try:
        listed = list_distinct(parameters)
        _check_final(given.call, parameters, listed)
        if not listed and across is None and isinstance(parameters, types.GeneratorType):
            warn("parameters: an empty generator, nothing is measured or clipped. A generator can be used only once.")
    except Exception as error:
        errors.append(error)

    plan, own = Plan(shard_groups), [parameter for _, parameter in listed]
    plain = plain_gradients(own) if shard_groups is None else None
    grads = plain or []
    by_layout: dict[Layout, list[Tensor]] = {} if plain is None else {(): plain}
    if plain is None:
        own = []
        for label, parameter in listed:
            try:
                layout, counted, local = plan.read(label, parameter)
            except Exception as error:
                errors.append(error)
                continue
            own.append(parameter)
            parts = by_layout.setdefault(layout, [])
            if counted is not None and local is not None:
                parts.append(counted)
                grads.append(local)
    if options.error_if_nonfinite:
        plan.add_copies()
    try:
        plan.add_stages(across)
    except Exception as error:
        errors.append(error)
    groups = [*plan.shards.values(), *plan.stages.values()]

    # An accelerator first: the ranks exchange norms there, also those of gradients on the CPU.
    found = dict.fromkeys([grad.device for grad in grads])
    devices = tuple(sorted(found, key=lambda device: device.type == "cpu"))
    device = devices[0] if devices else next((p.device for p in own if not is_elsewhere(p)), None)
    home = (_exchange_device(groups[0], device) if groups else device) or torch.device("cpu")
    columns: dict[Layout, Tensor] = {}
    try:
        if len(devices) > 1 and any(device.type == "meta" for device in devices):
            got = Words(", ".join(sorted(map(str, devices))))
            raise ValueError(expected("gradients", "values of all, or of none", got, "Materialize the model first."))
        for layout, parts in by_layout.items() if not errors else ():
            norms = [local_norm(part, options.norm_type).to(home) for part in by_device(parts, devices)]
            if norms:
                columns[layout] = norms[0] if len(norms) == 1 else join_norms(torch.stack(norms), options.norm_type)
    except Exception as error:
        errors.append(error)
    columns = {} if errors else columns
    if missing := {(), *by_layout} - columns.keys():  # a rank without gradients, or one that failed, sends zeros
        columns |= dict.fromkeys(missing, torch.zeros((), dtype=torch.float64, device=home))

    # A norm in half precision would overflow: float16 ends at 65504.
    is_double = not {parameter.dtype for parameter in own}.isdisjoint((torch.float64, torch.complex128))
    narrow = not is_double and bool(own or not groups)  # other ranks decide for one without parameters
    first_stage, layouts, first = len(plan.shards), sorted(by_layout), errors[0] if errors else None
    return _Measured(options, listed, grads, groups, first_stage, layouts, columns, devices, device, narrow, first)


def _check_final(call: str, parameters: Any, listed: list[tuple[Label, Any]]) -> None:
    """Raise RuntimeError for gradients that a wrapper has not reduced yet, and warn where that is only probable."""
    num_unreduced = count_unreduced(map(operator.itemgetter(1), listed))
    if num_unreduced:
        got = Words(f"{num_unreduced} that FSDP2 holds back unreduced, apart from .grad")
        fix = "Reduce in the last backward: maybe_no_sync does, or call set_requires_gradient_sync(True) before it."
        raise RuntimeError(expected("gradients", "final gradients", got, fix))
    if not isinstance(parameters, nn.Module):
        return
    ddp = [module for module in parameters.modules() if isinstance(module, DistributedDataParallel)]
    if any(not module.require_backward_grad_sync for module in ddp):
        fix = "They differ between the ranks: clip after the backward that reduces, outside of no_sync."
        raise RuntimeError(expected("gradients", "final gradients", Words("those of DDP inside no_sync"), fix))
    if any(holds_unreduced(module) and module.process_group.size() > 1 for module in ddp):
        warn(
            f"{call}: the last forward of the DDP module with gradients ran inside no_sync, so its backward did "
            "not reduce. Unless something else has reduced since, the gradients differ between the ranks, and so "
            "does their norm: clip after a forward and backward outside of no_sync."
        )


def _as_number(name: str, value: Any, what: str, is_valid: Callable[[float, float], bool]) -> float:
    if isinstance(value, bool):  # float() would convert it to 1 or 0
        fix = "The arguments are in torch's order: pass error_if_nonfinite by its name." if name == "norm_type" else ""
        raise TypeError(expected(name, what, value, fix))
    try:
        number = float(value)  # accepts what torch accepts: "inf", numpy's numbers, tensors of one element
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(expected(name, what, value)) from None
    if not is_valid(number, 0):
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
    whole = measured.columns[()]  # the norm, if there are no groups
    norm, returned, failed = _join_over_groups(measured) if measured.groups else _Reduced(whole, whole)
    can_read = failed is not None and (failed.device.type == "cpu" or options.error_if_nonfinite)
    if measured.error is not None or (can_read and failed):
        _raise_together(measured, can_read=can_read)
    if options.error_if_nonfinite and not norm.isfinite():
        _raise_nonfinite(measured, float(norm))
    device = measured.device or norm.device
    returned = returned.to(device)
    return _Reduced(norm.to(device), returned.float() if measured.narrow else returned, failed)


def _join_over_groups(measured: _Measured) -> _Reduced:
    """Join the columns over one group after the other, without reading a value."""
    options, columns = measured.options, dict(measured.columns)
    norms = torch.stack(list(columns.values()))
    nonfinite = torch.where(norms.isfinite(), 0.0, norms).sum()  # inf, NaN, or 0
    failed = torch.full_like(nonfinite, float(measured.error is not None))
    narrow = torch.full_like(nonfinite, float(measured.narrow))
    for place, group in enumerate(measured.groups):
        layouts = sorted([layout for layout in columns if place in layout])
        # 48 bits of a hash that is the same in every process: float64 holds them exactly.
        facts = repr({**options._asdict(), "layouts": layouts}).encode()
        digest = float(int.from_bytes(hashlib.blake2b(facts, digest_size=6).digest(), "big"))
        head = [failed, torch.full_like(nonfinite, digest), narrow, nonfinite, columns[()]]
        sent = torch.stack([*head, *map(columns.pop, layouts)])
        padded = torch.nn.functional.pad(sent, (0, -sent.numel() % _BLOCK)).to(_exchange_device(group, sent.device))
        received = Exchange(options.call, group).each(padded, "the norms").to(sent.device)  # [W, words]
        differ, is_stage = received[:, 1] != received[0, 1], place >= measured.first_stage
        if not is_stage:
            least, most = received[:, 4].aminmax()
            # Relative to the largest norm: the copies of a gradient that is 0 differ by any factor, in rounding alone.
            differ |= most - least > _ROUNDING * received[:, 4 : sent.numel()].amax()  # False for inf and NaN
        failed = torch.maximum(received[:, 0], differ.double()).amax()
        narrow, nonfinite = received[:, 2].amax(), received[:, 3].sum()
        columns[()] = join_norms(received[:, 4], options.norm_type) if is_stage else received[0, 4]
        for layout, norm in zip(layouts, join_norms(received[:, _HEAD : sent.numel()], options.norm_type)):
            rest = tuple(sorted({*layout} - {place}))
            if rest in columns:
                norm = join_norms(torch.stack([columns[rest], norm]), options.norm_type)
            columns[rest] = norm
    norm = torch.where(failed > 0, math.nan, columns[()] + nonfinite)
    return _Reduced(norm, torch.where(narrow > 0, norm.float().double(), norm), failed)


def _exchange_device(group: ProcessGroup, device: torch.device | None) -> torch.device:
    """Return the device on which the ranks of ``group`` exchange norms."""
    backends = backend_by_device(group)
    if device is not None and backends.get(device.type, "gloo") != "gloo":
        return device
    if "cpu" in backends and (device is not None or set(backends.values()) == {"gloo"}):
        return torch.device("cpu")  # gloo cannot send memory of an accelerator
    # A rank without gradients uses the device on which the gradients of the other ranks probably are.
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _raise_together(measured: _Measured, *, can_read: bool) -> NoReturn:
    """Raise the same error on all ranks if all of them can read the flag (``can_read``), else this rank's own error."""
    options, groups, error = measured.options, measured.groups, measured.error
    if error is not None and not (groups and can_read):
        raise error
    sizes = [dist.get_world_size(group) for group in groups]
    facts = {**options._asdict(), "call": Words(options.call)}
    facts["layouts"] = Words(f"{measured.layouts} of groups of {sizes} ranks")
    ranks, reports = zip(*_gather_objects(groups, Report.of(facts, error)))
    if reports[0].reason is None and all(report == reports[0] for report in reports):
        what = "equal gradients where several ranks hold a whole parameter"
        got = Words(f"norms that differ by more than {_ROUNDING:.0%}")
        fix = "Parts of a sum, as under sequence parallelism: all_reduce_grads_ first. Experts: name shard_groups."
        raise RankRuntimeError(expected(options.call, what, got, fix))
    raise joint_error(ranks, reports) from cause_of(error)


def _raise_nonfinite(measured: _Measured, norm: float) -> NoReturn:
    """Raise RuntimeError on all ranks, naming the parameters whose gradients are not finite, and their ranks."""
    named = ((entry.name, local_gradient(entry)) for entry in map(Entry._make, measured.listed))
    own_names = [name for name, grad in named if grad is not None and not elements_of(grad).isfinite().all()]
    ranks_by_name: dict[str, list[int]] = {}
    for rank, names in _gather_objects(measured.groups, own_names):
        for name in names:
            ranks_by_name.setdefault(name, []).append(rank)
    places = [f"{name} on {name_ranks(ranks)}" for name, ranks in ranks_by_name.items()]
    more = [f"{len(places) - _MAX_NAMES} more"] if len(places) > _MAX_NAMES else []
    got = Words(f"{norm}: {'; '.join(places[:_MAX_NAMES] + more) or 'all elements are finite'}")
    fix = "Skip the step, or lower the scale."
    kind = RankRuntimeError if measured.groups else RuntimeError
    raise kind(expected(measured.options.call, "gradients with a finite norm", got, fix))


def _gather_objects(groups: list[ProcessGroup], value: Any) -> list[tuple[int, Any]]:
    """Return (rank, value) of all ranks that the groups connect, in the order of the ranks. Only before an error."""
    values = {dist.get_rank() if is_initialized() else 0: value}
    for group in groups:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, values, group=group)
        values = {rank: value for part in gathered for rank, value in part.items()}
    return sorted(values.items(), key=lambda item: item[0])
