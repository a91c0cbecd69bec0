"""What ranks that hold different rows tell each other within one call, once its header has been agreed on.

Every rank makes the same exchanges in the same order, of the same sizes. Which ones it makes may depend on the header
and on the results of earlier exchanges, which are equal on all ranks, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import all_gather, all_reduce, reduce_scatter
from .payload import gather_payload, is_staged, padded_places


class Exchange(NamedTuple):
    """The ranks of a call, and the name of the call, for the error of a collective that fails."""

    call: str
    group: ProcessGroup

    @property
    def rank(self) -> int:
        """The place of this rank in the group."""
        return self.group.rank()

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Return the sum of ``tensor``, which may be overwritten, over the ranks; ``what`` it is, in the plural."""
        return self._reduce(tensor, what, largest=False)

    def largest(self, tensor: Tensor, what: str) -> Tensor:
        """Return the largest of each element of ``tensor``, which may be overwritten, over the ranks."""
        return self._reduce(tensor, what, largest=True)

    def each(self, tensor: Tensor, what: str) -> Tensor:
        """Return (W, ...) ``tensor`` of every rank, in rank order."""
        staged = tensor.cpu() if is_staged(tensor, self.group) else tensor
        gathered = staged.new_empty(self.group.size(), *tensor.shape)
        named = f"the all-gather of {what}"
        all_gather(gathered.view(-1), staged.reshape(-1), self.group, call=self.call, what=named)
        return gathered.to(tensor.device)

    def rows(self, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Return each of the row-aligned ``tensors`` with the rows of all ranks, of which each has ``counts``."""
        return gather_payload(tensors, counts, self.group, self.call)

    def sum_own(self, tensor: Tensor, counts: Sequence[int], what: str) -> Tensor:
        """Return this rank's rows of the sum over the ranks of ``tensor`` (sum of counts, ...), rows in rank order."""
        most, rank = max(1, *counts), self.rank
        padded = tensor.new_zeros(len(counts), most, *tensor.shape[1:])
        if tensor.device.type == "cpu":
            for part, rows in zip(padded, tensor.split(list(counts))):
                part[: len(rows)] = rows
        else:  # as many kernels for any number of ranks
            padded[padded_places(counts, tensor.device)] = tensor
        staged = padded.cpu() if is_staged(tensor, self.group) else padded
        own = staged.new_empty(staged[0].numel())
        named = f"the reduce-scatter of {what}"
        if own.numel():  # else the rows have no elements, on every rank
            reduce_scatter(own, staged.view(-1), self.group, call=self.call, what=named)
        return own.view_as(staged[0])[: counts[rank]].to(tensor.device)

    def _reduce(self, tensor: Tensor, what: str, *, largest: bool) -> Tensor:
        staged = tensor.cpu() if is_staged(tensor, self.group) else tensor.contiguous()
        all_reduce(staged, self.group, largest=largest, call=self.call, what=f"the all-reduce of {what}")
        return staged.to(tensor.device)
