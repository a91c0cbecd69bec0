"""The collectives that move tensors. When one fails, the error names the public call that made it.

torch's error says which connection was closed or how long it waited, but not in which call. When a rank dies, the other
ranks fail in their next collective, so the name of that call is the first thing to know.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .torch_private import all_gather_flat, reduce_scatter_flat

all_reduce_flat = dist.all_reduce


def all_gather(output: Tensor, tensor: Tensor, group: ProcessGroup, *, call: str, what: str) -> None:
    """Fill ``output`` (W * n,) with ``tensor`` (n,) of every rank, in rank order.

    Args:
        output: where the parts arrive.
        tensor: this rank's part.
        group: the group.
        call: name of the public call, the head of the message.
        what: which collective of that call this is, such as ``"the all-gather of the rows"``.

    Raises:
        RuntimeError: when the collective fails. The message ends with torch's text; torch's error is the cause.
    """
    try:
        all_gather_flat(output, tensor, group)
    except RuntimeError as error:
        raise lost(call, what, error) from error


def reduce_scatter(output: Tensor, tensor: Tensor, group: ProcessGroup, *, call: str, what: str) -> None:
    """Fill ``output`` (n,) with this rank's part of the sum over ranks of ``tensor`` (W * n,).

    Arguments and errors are those of :func:`all_gather`.
    """
    try:
        reduce_scatter_flat(output, tensor, group)
    except RuntimeError as error:
        raise lost(call, what, error) from error


def all_reduce(tensor: Tensor, group: ProcessGroup, *, largest: bool = False, call: str, what: str) -> None:
    """Replace ``tensor`` by its sum over the ranks, or by the largest of each element; the same bits on every rank.

    The other arguments and errors are those of :func:`all_gather`.
    """
    try:
        all_reduce_flat(tensor, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    except RuntimeError as error:
        raise lost(call, what, error) from error


def lost(call: str, what: str, error: Exception) -> RuntimeError:
    """Return the error to raise when a collective fails. The group cannot be used afterwards."""
    return RuntimeError(
        f"{call}: {what} failed. Another rank has probably died, has left early, or did not make this call within the "
        f"timeout of the process group: look into the log of each rank for the first error. {error}"
    )
