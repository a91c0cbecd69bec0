"""Control the wrappers of a model: add without dividing, reduce in the last micro-step only, discard gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

from torch import nn

from ..errors import Words, check_count, expected
from .wrappers import find_sync

# For each model the number of its loops, and what restores the switches of its wrappers after the last one.
LOOPS: WeakKeyDictionary[nn.Module, tuple[int, ReferenceType[ExitStack]]] = WeakKeyDictionary()


def sum_gradients_(model: nn.Module) -> float:
    """Make every FSDP2 module of ``model``, experts included, add its gradients over the ranks, without dividing.

    Expert modules are sharded over fewer ranks than the rest, so they would divide by another number.

    Args:
        model: the model after ``fully_shard``. DDP keeps its mean, and plain modules have nothing to change.

    Returns:
        The number by which to multiply a loss that is to be added over the ranks: 1 for FSDP2 and HSDP from now on, the
        number of ranks for DDP, 1 for a plain module. :func:`accumulate` reads it from the model.

    Raises:
        TypeError: when ``model`` is not a module.
        ValueError: when it contains DDP modules of different sizes, or both DDP and FSDP2.

    Distributed:
        No communication; call it on every rank. The collectives become sums, the only reduction that gloo has. A pooled
        loss on this model then takes ``gradient_reduction="sum"``.

    Example:
        >>> sum_gradients_(nn.Linear(2, 1))
        1.0
    """
    sync = find_sync(model)
    if sync.ddp and sync.fsdp:
        fix = "Wrap all of it in one of the two."
        raise ValueError(expected("model", "DDP or FSDP2 modules", Words("both"), fix))
    for module in sync.fsdp_modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return sync.multiplier


@contextmanager
def maybe_no_sync(
    model: nn.Module, micro_step: int, num_micro_steps: int | None = None, *, grad_accum_steps: int | None = None
) -> Iterator[None]:
    """Reduce gradients only in the last micro-step of a window; forward and backward run inside.

    Args:
        model: a model with DDP, FSDP2 or HSDP modules anywhere in it, or a plain one.
        micro_step: which micro-batch this is, from 0.
        num_micro_steps: number of micro-batches of the window.
        grad_accum_steps: another name for ``num_micro_steps``, which KempnerForge uses. Pass exactly one of them.

    Raises:
        TypeError, ValueError: for arguments that do not fit; for DDP with ``static_graph`` whose very first backward
            would not reduce, because torch fails in it. Later ones may.

    The switches of the wrappers are restored at the end, also after an exception.
    """
    if num_micro_steps is not None and grad_accum_steps is not None:
        raise ValueError(expected("grad_accum_steps", "None with num_micro_steps, which means the same", Words("both")))
    name = "num_micro_steps" if grad_accum_steps is None else "grad_accum_steps"
    number: Any = num_micro_steps if grad_accum_steps is None else grad_accum_steps
    check_count(name, number, 1)
    check_count("micro_step", micro_step, 0)
    if micro_step >= number:
        raise ValueError(expected("micro_step", f"an int in [0, {number})", micro_step, "It counts from 0."))
    sync = find_sync(model)
    sync.check_sync("last", number)
    with sync.restored():
        sync.switch("last", micro_step == number - 1)
        yield


def discard_gradients_(model: nn.Module) -> None:
    """Drop all gradients of ``model``, reduced or not, as if the window had never begun.

    ``optimizer.zero_grad()`` is not enough after a window that was left early. FSDP2 stores unreduced gradients outside
    ``grad``. After a forward without a backward FSDP2 still has the whole parameters, which the next optimizer step
    makes out of date, and DDP reduces in the first backward of the next window. A loop that you still refer to, as a
    traceback does, has not restored the switches of the wrappers.

    Args:
        model: a model with DDP, FSDP2 or HSDP modules anywhere in it, or a plain one. Call it on every rank.

    Raises:
        TypeError, ValueError: for what is not a module, or contains FullyShardedDataParallel.

    A backward that raised inside the reduction of DDP cannot be undone: DDP itself fails at its next forward.
    """
    sync = find_sync(model)
    leave_last_loop(model)
    for group in sync.fsdp:
        group.discard()
    sync.forget_forwards()
    for parameter in model.parameters():
        parameter.grad = None


def leave_last_loop(model: nn.Module) -> int:
    """Restore the switches if the last loop over ``model`` was left early and is kept; return the number of loops."""
    number, switched = LOOPS.get(model, (0, lambda: None))
    if (loop := switched()) is not None:
        loop.close()
    return number
