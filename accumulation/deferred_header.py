"""What the ranks tell each other in front of a deferred backward, and how all of them come to raise what is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.group import group_ranks
from ..distributed.header import agree, failure
from ..errors import Words, expected


class Told(NamedTuple):
    """What the header of a backward carries."""

    num_terms: Tensor | float
    loss: Tensor | float  # a sum
    num_stale: Tensor | float  # elements of gradients, not 0, that were there before the step


class Sums(NamedTuple):
    """What has been collected since the last finish, over all ranks."""

    num_calls: int = 0
    num_terms: float = 0.0
    loss: float = 0.0

    def add(self, every: Sequence[Sequence[float]]) -> Sums:
        """Return the sums after a call of which every rank has told :class:`Told`."""
        num_terms, loss = (math.fsum(told[field] for told in every) for field in (0, 1))
        return Sums(self.num_calls + 1, self.num_terms + num_terms, self.loss + loss)


def exchange(
    call: str,
    ranks: ProcessGroup | None,
    error: Exception | None,
    facts: Mapping[str, object],
    told: Told | None = None,
) -> list[list[float]]:
    """Exchange a header and return what every rank told, in rank order; raise on every rank what one has to raise.

    Alone, without ``ranks``, return or raise what there is.
    """
    if ranks is not None:
        totals = agree(call, ranks, error=error, facts=facts, totals=told or ()).totals
        every: list[list[float]] = totals[:, : len(Told._fields)].tolist()
    elif error is not None:
        raise error
    else:
        every = [[float(number) for number in told or (0.0, 0.0, 0.0)]]
    mistakes = [_mistake(num_terms, num_stale) for num_terms, _, num_stale in every]
    found = [mistake for mistake in mistakes if mistake is not None]
    if found and ranks is None:
        raise found[0]
    if found and ranks is not None:
        named = zip(group_ranks(ranks), mistakes)
        raise failure([(rank, call, type(one).__name__, str(one)) for rank, one in named if one is not None])
    return every


def _mistake(num_terms: float, num_stale: float) -> Exception | None:
    """Return what is wrong with the numbers of one rank; they are read only after they have travelled."""
    if not (num_terms >= 0 and math.isfinite(num_terms)):
        return ValueError(expected("n", "a finite number >= 0", num_terms))
    if num_stale:
        fix = "Call optimizer.zero_grad() after each step: the division is for the gradients of one step."
        found = Words(f"gradients with {num_stale:.0f} elements that are not 0")
        return RuntimeError(expected("model", "no gradient before the first backward of a step", found, fix))
    return None
