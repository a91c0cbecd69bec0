"""One gradient norm over every mesh, and clipping by it: measure, reduce, apply.

*Measure* (norm_measure.py) takes the norm of what this rank holds, one number for all parameters that are sharded over
the same groups. *Reduce* (norm_reduce.py) joins these numbers over the groups, in the order that all ranks share
(norm_plan.py). *Apply* is torch's own scaling. Nothing between the first kernel and the last waits for the device.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from ..distributed.torch_private import not_compiled
from ..errors import Words, attempt, expected, warn
from .norm_errors import Options, check_options, raise_nonfinite, raise_together
from .norm_measure import local_norm
from .norm_plan import Groups, Layout, Plan, make_plan
from .norm_reduce import meeting_device, reduce_columns
from .parameters import Entry, counted_gradient, held_gradient, is_elsewhere, list_entries

Parameters = Tensor | nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
ShardGroups = Callable[[Any], Groups]


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
    sharded. A plain tensor is whole, unless ``shard_groups`` says otherwise. A parameter listed twice counts once.

    Args:
        parameters: a Module, a tensor, or an iterable of parameters or of ``(name, parameter)`` pairs, in the same
            order on every rank; plain tensors and DTensors on any meshes. What has no gradient counts as 0.
        norm_type: p > 0, or inf.
        error_if_nonfinite: raise on every rank when the norm is inf or NaN. Waits for the device.
        shard_groups: called with each parameter; returns the groups over which it is sharded beside what its placements
            say, such as the expert-parallel group for local experts: None, a group, a mesh, or several of these.
        across: the groups whose ranks hold different parameters, pipeline stages; reduced last.

    Returns:
        A plain scalar on the device of the gradients, the same number on all ranks that the groups connect: float64
        where a parameter is, else float32, also for half precision; as float32 rounds it if that is so on any rank.

    Raises:
        TypeError: for what is not a parameter, and a gradient that is a DTensor where its parameter is not.
        ValueError: for a ``norm_type`` not > 0; gradients on different devices; a group without this rank; groups that
            overlap; arguments that differ between ranks.
        RuntimeError: with ``error_if_nonfinite``; names the parameters and the ranks that hold them.

    Degenerate:
        No gradient at all gives 0, and the same collectives. Empty shards add 0. NaN anywhere gives NaN.
    Numerics:
        Range: any norm that the result can hold, for any p; half precision is summed in float32. float64 to 1e-14.
    Distributed:
        One all-gather of 128 bytes per distinct process group. Redistributing a gradient that is not placed as its
        parameter comes on top. An error of one rank is raised on all where the norms travel by the CPU, or with
        ``error_if_nonfinite``; elsewhere the other ranks get NaN, since to look would be to wait.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> total_grad_norm([weight])
        tensor(5.)
    """
    options = Options("total_grad_norm", norm_type, None, error_if_nonfinite)
    return _measure_and_reduce(parameters, options, shard_groups, across).returned


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

    Call it when all gradients are final: after the last backward, after any reduction of one's own, after
    ``scaler.unscale_``, and before the step.

    Args:
        parameters: see :func:`total_grad_norm`.
        max_norm: the largest norm, >= 0. None and inf measure only.
        norm_type: p > 0, or inf.
        error_if_nonfinite: raise on every rank, before any gradient is touched, when the norm is inf or NaN.
        foreach: handed to torch's scaling: None uses the faster kernels where there are some.
        shard_groups: see :func:`total_grad_norm`.
        across: see :func:`total_grad_norm`.

    Returns:
        The norm before clipping; see :func:`total_grad_norm`.

    Raises:
        ValueError: for a ``max_norm`` that is negative or NaN, and as :func:`total_grad_norm`.
        TypeError, RuntimeError: as :func:`total_grad_norm`.

    Degenerate:
        A norm of inf or NaN scales as it does in torch: inf makes finite gradients 0, NaN makes all of them NaN.
    Numerics:
        The factor for gradients in half precision is float64: in their own dtype small ones round to 0.
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
    options = Options("clip_grad_norm_", norm_type, max_norm, error_if_nonfinite)
    measured = _measure_and_reduce(parameters, options, shard_groups, across)
    if measured.max_norm < math.inf:
        _scale(measured, foreach)
    return measured.returned


class _Measured(NamedTuple):
    entries: list[Entry]
    norm: Tensor  # float64, on the device of the gradients
    returned: Tensor
    max_norm: float


def _measure_and_reduce(
    parameters: Parameters, options: Options, shard_groups: ShardGroups | None, across: Groups
) -> _Measured:
    """Return the norm. What is wrong on this rank is raised after the collectives, so that no rank waits for it."""
    problems: list[Exception] = []
    options = check_options(options, problems)
    entries = list_entries(parameters, problems)
    if isinstance(parameters, types.GeneratorType) and not entries and across is None:
        warn("parameters: an empty generator, nothing is measured or clipped. A generator can be used only once.")
    plan = make_plan(entries, shard_groups, across, problems, include_copies=options.error_if_nonfinite)
    own, columns = _measure(entries, plan, options.norm_type, problems)
    # Half precision has no norm of its own: float16 ends at 65504.
    wide = any(entry.parameter.dtype in (torch.float64, torch.complex128) for entry in entries)
    narrow = not wide and bool(entries or not plan.groups)  # without any, the other ranks decide
    facts = options._asdict()
    reduced = reduce_columns(columns, plan, options.norm_type, facts, failed=bool(problems), narrow=narrow)
    can_look = reduced.failed.device.type == "cpu" or options.error_if_nonfinite
    if problems or (can_look and reduced.failed):
        raise_together(plan, options, problems, can_look=can_look)
    if options.error_if_nonfinite and not reduced.norm.isfinite():
        raise_nonfinite(plan, options, entries, float(reduced.norm))
    norm, returned = (norm if own is None else norm.to(own) for norm in (reduced.norm, reduced.rounded))
    return _Measured(entries, norm, returned.float() if narrow else returned, options.max_norm)


def _measure(
    entries: Sequence[Entry], plan: Plan, norm_type: float, problems: list[Exception]
) -> tuple[torch.device | None, dict[Layout, Tensor]]:
    """Return the device of the gradients, None without parameters, and each layout's norm where the ranks meet."""
    held: dict[Layout, list[Tensor]] = {(): []}
    for entry, layout in zip(entries, plan.layouts):
        grads = held.setdefault(layout, [])
        grad, problem = attempt(partial(counted_gradient, entry))
        grads += [] if grad is None else [grad]
        problems += [problem] if problem else []
    own, problem = attempt(partial(_device_of, entries, held))
    problems += [problem] if problem else []
    home = meeting_device(plan.groups[0], own) if plan.groups else own
    nothing = torch.zeros((), dtype=torch.float64, device=home or "cpu")
    columns, problem = attempt(
        lambda: {
            layout: local_norm(grads, norm_type).to(nothing.device) if grads else nothing
            for layout, grads in held.items()
        }
    )
    problems += [problem] if problem else []
    # With a problem the values are of no use, but the other ranks expect as many.
    return own, dict.fromkeys(held, nothing) if problems or columns is None else columns


def _device_of(entries: Sequence[Entry], held: Mapping[Layout, Sequence[Tensor]]) -> torch.device | None:
    """Return the device of the gradients, else of the first parameter, else None; ValueError when there are several."""
    devices = {grad.device for grads in held.values() for grad in grads}
    if len(devices) > 1:
        fix = "Move the parameters to one device, or clip those of each device by themselves."
        raise ValueError(expected("gradients", "all on one device", Words(", ".join(sorted(map(str, devices)))), fix))
    here = (entry.parameter.device for entry in entries if not is_elsewhere(entry.parameter))
    return devices.pop() if devices else next(here, None)


class _Scaled(NamedTuple):
    """What torch's scaling reads of a parameter."""

    grad: Tensor


def _scale(measured: _Measured, foreach: bool | None) -> None:
    """Multiply the gradients in place. As plain local tensors: torch's kernels take no mix of meshes and norms."""
    by_dtype: dict[torch.dtype, list[_Scaled]] = {}
    for entry in measured.entries:
        grad = held_gradient(entry)
        if grad is not None:
            by_dtype.setdefault(grad.dtype, []).append(_Scaled(grad))
    for dtype, scaled in by_dtype.items():
        # The fused kernels want a factor in the dtype of the gradients. One in half precision would round to 0 early.
        norm = measured.norm.to(torch.float32 if dtype is torch.float32 else torch.float64)
        clip_grads_with_norm_(cast(Iterable[Tensor], scaled), measured.max_norm, norm, foreach)
