"""The two collectives that move tensors, failing with the name of the call that made them.

torch says which connection was closed, or how long it waited, but not for what. In a job whose ranks die for reasons of
their own, the call is the first thing to know: in it the others stood while one of them did not come.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from .torch_private import all_gather_flat, reduce_scatter_flat


def all_gather(output: Tensor, tensor: Tensor, group: ProcessGroup, *, call: str, what: str) -> None:
    """Fill ``output`` (W * n,) with ``tensor`` (n,) of every rank, in rank order.

    Args:
        output: where the parts arrive.
        tensor: this rank's part.
        group: the group.
        call: name of the public call, the head of the message.
        what: which of its collectives this is, such as ``"the all-gather of the rows"``.

    Raises:
        RuntimeError: when the collective fails, with the text of torch at its end and its error as the cause.
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


def lost(call: str, what: str, error: Exception) -> RuntimeError:
    """Return what to raise when a collective fails: the group cannot be used again."""
    return RuntimeError(
        f"{call}: {what} failed. Another rank has probably died, has left early, or did not make this call within the "
        f"timeout of the process group: look into the log of each rank for the first error. {error}"
    )
