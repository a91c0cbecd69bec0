"""Gathers whose backward gives each rank the gradient of its own rows, at the scale that the wrapper requires.

Every rank holds the same gathered rows and computes the same loss L from them. With x_r the rows of rank r, the true
gradient of a parameter w is ``sum_r (dx_r/dw)^T dL/dx_r``. A wrapper that averages over W ranks divides that sum by W,
so the backward of the gather multiplies by k = W; under a sum k = 1. The backward needs no communication, because rank
r has already computed dL/dx_r. The loss itself is not scaled, so its logged value is exact. A parameter used after the
gather gets the same gradient on W ranks, and their average is correct.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import Words, expected, first_order_only
from .exchange import Exchange, check_rows
from .group import SAME_REDUCTION, Group, alone, check_gradient_reduction, gradient_scale, group_ranks, resolve_group
from .header import Agreement, Offer, State, agree_on, refuse_in_backward
from .torch_private import WEIGHTED_SUM, nodes_of, not_compiled

T = TypeVar("T")


class _Plan(NamedTuple):
    call: str
    group: ProcessGroup
    rows: tuple[int, ...]  # of each rank
    scale: int  # k
    reduce_scatter: bool


class _GatherRows(torch.autograd.Function):
    """Connect gathered rows y_i (sum N_r, ...) to the rows x_i (N_r, ...) of this rank that require a gradient.

    ``dx_i = k * dy_i[own rows]``, or with reduce_scatter ``k / W * (sum_r dy_i)[own rows]``. A second derivative would
    multiply by k twice: it raises.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, outputs: list[Tensor], *inputs: Tensor) -> Any:
        # The inputs are kept only to refuse a second derivative. Nothing is saved: outputs may change in place.
        ctx.plan, ctx.call, ctx.witnesses = plan, plan.call, inputs
        # The local form skips an output without a gradient. A collective needs a gradient on every rank.
        ctx.set_materialize_grads(plan.reduce_scatter)
        return tuple(outputs)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, input_grads = ctx.plan, list(grads)
        rank = plan.group.rank()
        for place, grad in enumerate(grads):
            if grad is None or not ctx.needs_input_grad[2 + place]:
                input_grads[place] = None
            elif plan.reduce_scatter:  # half precision is added in float32
                summand = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
                total = Exchange(plan.call, plan.group).sum_own(summand, plan.rows, "the gradients, in the backward,")
                factor = plan.scale / len(plan.rows)
                input_grads[place] = (total if factor == 1 else total * factor).to(grad.dtype)
            else:
                own_rows = grad.narrow(0, sum(plan.rows[:rank]), plan.rows[rank])
                input_grads[place] = own_rows if plan.scale == 1 else own_rows * _factor(plan.scale)
        return None, None, *input_grads


@functools.cache
def _factor(scale: int) -> Tensor:
    """Return k as a tensor, because multiplying by a tensor takes a third of the time of multiplying by a number."""
    return torch.tensor(float(scale), dtype=torch.float64, device="cpu")


def gather_agreed(
    call: str,
    group: ProcessGroup,
    bring: Callable[[], Offer[T]],
    *,
    gradient_reduction: str | int = "mean",
    backward: Literal["local", "reduce_scatter"] = "local",
) -> Agreement[T]:
    """Agree as :func:`agree_on` does, and gather the tensors: one header and at most one payload."""
    agreed = agree_on(call, group, bring)
    agreed.tensors = gather_after(call, group, agreed, gradient_reduction, backward)
    return agreed


def gather_after(
    call: str,
    group: ProcessGroup,
    agreed: Agreement[Any],
    gradient_reduction: str | int = "mean",
    backward: Literal["local", "reduce_scatter"] = "local",
) -> tuple[Any, ...]:
    """Return the tensors of an agreement, gathered from all ranks; None stays None."""
    present = {place: tensor for place, tensor in enumerate(agreed.tensors) if tensor is not None}
    inputs = {place: tensor for place, tensor in present.items() if tensor.requires_grad and torch.is_grad_enabled()}
    rows = agreed.arrived
    if rows is None:
        with torch.no_grad():
            rows = Exchange(call, group).rows([*present.values()], agreed.rows) if present else []
    gathered = dict(zip(present, rows))
    if inputs:
        plan = _Plan(call, group, agreed.rows, gradient_scale(gradient_reduction, group), backward == "reduce_scatter")
        outputs = _GatherRows.apply(plan, [*map(gathered.get, inputs)], *inputs.values())
        gathered.update(zip(inputs, outputs))
    return tuple(map(gathered.get, range(len(agreed.tensors))))


def gather_rows(
    *tensors: Tensor | None,
    group: Group = None,
    gradient_reduction: str | int = "mean",
    backward: Literal["local", "reduce_scatter"] = "local",
) -> tuple[Tensor | None, ...]:
    """Gather tensors whose rows belong together from all ranks, in one payload collective.

    Equal to ``tuple(all_gather_with_grad(t) for t in tensors)``, with a third of the collectives for three tensors.

    Args:
        *tensors: (N, ...) with the same number of rows N on this rank; N may differ between ranks and may be 0. Any
            dtype, any trailing shape, equal on every rank. None stands for an absent tensor and comes back as None.
        group, gradient_reduction, backward: see :func:`all_gather_with_grad`.

    Returns:
        A tuple with one entry (sum over ranks of N, ...) per argument, as of :func:`all_gather_with_grad`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`all_gather_with_grad`; for row counts that differ within a rank;
            for devices, presence or need of gradient that differ between ranks.

    Distributed:
        One all-gather forward if the rows fit behind the header: at most 64 KiB per rank, on the host, from the second
        call of a group on. Otherwise two, header and rows. Backward none, or one for each tensor with a gradient with
        ``"reduce_scatter"``. Errors are raised on every rank.
    """
    return _gather_tensors("gather_rows", tensors, group, gradient_reduction, backward)


def all_gather_with_grad(
    tensor: Tensor,
    group: Group = None,
    *,
    gradient_reduction: str | int = "mean",
    backward: Literal["local", "reduce_scatter"] = "local",
) -> Tensor:
    r"""Gather rows from all ranks; gradients flow back to this rank's own rows.

    Equal to ``torch.cat(rows_of_every_rank)``. With :math:`L` the same loss on every rank and :math:`x_r` the rows of
    rank r, the backward is

    .. math:: \frac{\partial}{\partial x_r} = k \, \frac{\partial L}{\partial y}[\text{own rows}]

    with k from ``gradient_reduction``, so that the parameter gradients after the wrapper's reduction are those of one
    process with all rows.

    Args:
        tensor: (N, ...) of any dtype, contiguous or not; N may differ between ranks and may be 0.
        group: None for the default group, a ``ProcessGroup``, or a ``DeviceMesh`` (several dimensions are flattened).
        gradient_reduction: how parameter gradients are combined over the ranks. ``"mean"`` (DDP, FSDP2 and HSDP by
            default): k = W. ``"sum"``: k = 1. An int, the number of ranks the wrapper averages over if that is not the
            size of the gather's group: k = that int.
        backward: ``"local"`` when every rank computes the same loss from the gathered rows, as all losses of this
            package do; it needs no communication. ``"reduce_scatter"`` when ranks compute different losses, such as
            own rows against all. The objective is then their mean, and the backward is ``k / W`` times the sum over
            ranks of the gradients of these rows, in one collective that every rank must reach.

    Returns:
        (sum over ranks of N, ...) in rank order. Without a process group, or at world size 1 and k = 1, the same tensor
        object comes back.

    Raises:
        TypeError: when ``tensor`` is not a plain tensor.
        ValueError: for a tensor without dimensions, for dtypes or trailing shapes that differ between ranks, for an
            unknown ``gradient_reduction`` or ``backward``. In :func:`global_mean` and in a summed loss, in their first
            calls, for a sum of rows gathered with the local backward that differs between ranks: its value would be
            right, and its gradient not.
        RuntimeError: when a rank has died or does not make the call. Under NCCL the process then waits instead, until
            the watchdog of the group ends it after the timeout.

    Distributed:
        One or two all-gathers forward, as :func:`gather_rows`. Errors are raised on every rank.
    """
    return _gather_tensors("all_gather_with_grad", (tensor,), group, gradient_reduction, backward)[0]  # type: ignore[return-value]


def all_gather_no_grad(tensor: Tensor, group: Group = None) -> Tensor:
    """Gather rows from all ranks, without a gradient: targets, masks, weights.

    Equal to ``torch.cat(rows_of_every_rank).detach()``; arguments, shapes, errors and collectives are those of
    :func:`all_gather_with_grad`. Without a process group, or at world size 1, the same tensor object comes back.
    """
    with torch.no_grad():
        return _gather_tensors("all_gather_no_grad", (tensor,), group, "mean")[0]  # type: ignore[return-value]


@not_compiled
def _gather_tensors(
    call: str,
    tensors: tuple[Tensor | None, ...],
    group: Group,
    gradient_reduction: str | int,
    backward: Literal["local", "reduce_scatter"] = "local",
) -> tuple[Tensor | None, ...]:
    def bring() -> Offer[None]:
        check_gradient_reduction(gradient_reduction)
        if backward not in ("local", "reduce_scatter"):
            raise ValueError(expected("backward", "'local' or 'reduce_scatter'", backward))
        facts = {"backward": backward, "gradient_reduction": State(gradient_reduction, SAME_REDUCTION)}
        return Offer(None, facts, tensors=tensors)

    resolved = resolve_group(group) if group is not None or torch.distributed.is_initialized() else None
    if resolved is None or alone(resolved, gradient_reduction):
        check_rows(tensors)
        bring()
        return tensors
    refuse_in_backward(call)
    global _has_gathered, num_with_grad
    _has_gathered, num_with_grad = True, num_with_grad + torch.is_grad_enabled()
    gathered = gather_agreed(call, resolved, bring, gradient_reduction=gradient_reduction, backward=backward).tensors
    for tensor in gathered:
        if tensor is not None:
            _GATHERED_OVER[id(tensor)] = ref(tensor, functools.partial(_GATHERED_OVER.pop, id(tensor))), resolved
    return gathered


# The living tensors that public gathers have returned, by id, because == of tensors is elementwise.
_GATHERED_OVER: dict[int, tuple[ReferenceType[Tensor], ProcessGroup]] = {}
_has_gathered = False  # whether a public gather was called in this process; if not, there is nothing to recognise
num_with_grad = 0  # calls of them where gradients are enabled
FIRST = 8  # of these calls, after which global means look for the rows in their graph


# Names of autograd nodes whose output rows are input rows. Not a matrix product: its output rows need not be.
_KEEP_ROWS = {"Add", "Alias", "Clone", "Div", "Index", "IndexSelect", "MaskedSelect", "Mul", "Neg", "ReshapeAlias"}
_KEEP_ROWS |= {"Select", "Sigmoid", "Slice", "Squeeze", "Sub", "ToCopy", "UnsafeView", "Unsqueeze", "View"}
_MAX_NODES = 16
_PUBLIC = ("all_gather_with_grad", "gather_rows")


def check_not_gathered(group: ProcessGroup | None, **tensors: object) -> None:
    """Raise ValueError when one of ``tensors`` holds rows that a public gather has gathered over ranks of ``group``.

    It recognises a tensor that a gather returned, and a view of one. In a graph it looks behind at most 16 operators
    with one input each, such as a conversion, a slice or a factor.
    """
    if group is None or not _has_gathered:
        return
    for name, tensor in tensors.items():
        over = _gathered_over(tensor) if isinstance(tensor, Tensor) else None
        if over is not None and _share_ranks(over, group):
            fix = "Pass the rows of this rank, which the loss gathers, or set gather_distributed=False on the loss."
            raise ValueError(expected(name, "the rows of this rank", Words("rows that were gathered already"), fix))


def _share_ranks(over: ProcessGroup, group: ProcessGroup) -> bool:
    """Return False for a gather over other ranks, such as one over the parts of a sequence: it is allowed before."""
    try:
        return len({*group_ranks(over)} & {*group_ranks(group)}) > 1
    except Exception:  # that group has been destroyed
        return False


def _gathered_over(tensor: Tensor) -> ProcessGroup | None:
    """Return the group of the public gather that returned the rows of ``tensor``; None if no gather is recognised."""
    base, node = tensor._base, tensor.grad_fn
    is_view = base is not None and node is None and base.shape[:1] == tensor.shape[:1]
    for rows in (tensor, base if is_view else None):
        gathered = _GATHERED_OVER.get(id(rows))
        if gathered is not None and gathered[0]() is rows:
            return gathered[1]
    for _ in range(_MAX_NODES):
        plan = getattr(node, "plan", None)
        if isinstance(plan, _Plan):
            # With reduce_scatter the ranks compute different losses, for example each of its own part of the rows.
            is_whole = tensor.ndim > 0 and tensor.shape[0] == sum(plan.rows)
            return plan.group if is_whole or not plan.reduce_scatter else None
        if node is None or node.name().rstrip("0123456789").removesuffix("Backward") not in _KEEP_ROWS:
            return None
        inputs = [parent for parent, _ in node.next_functions if parent is not None and parent.next_functions]
        if len(inputs) != 1:  # not counting leaves, such as a temperature
            return None
        node = inputs[0]
    return None


def is_of_local_gather(total: Tensor, group: ProcessGroup) -> bool:
    """Return True if each term of ``total`` is of rows that a local public gather has brought from all of ``group``."""

    def is_gathered(node: Any) -> bool:
        plans: list[Any] = [getattr(behind, "plan", None) for behind in nodes_of(node)]
        plans = [plan for plan in plans if isinstance(plan, _Plan) and plan.call in _PUBLIC and not plan.reduce_scatter]
        return bool(plans) and {*group_ranks(group)} <= {*group_ranks(plans[0].group)}

    nodes = nodes_of(total.grad_fn, through=WEIGHTED_SUM)
    terms = [node for node in nodes if not node.name().startswith(WEIGHTED_SUM)]
    return bool(terms) and all(map(is_gathered, terms))
