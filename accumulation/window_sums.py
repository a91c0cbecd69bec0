"""The losses of a window by name: their sums, and what the closing header carries of them."""

from __future__ import annotations

import math
from numbers import Real
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.gather import gather_after
from ..distributed.group import header_device
from ..distributed.header import UNKNOWN, Agreement, Checksum, DeviceCheck, Offer, combined, digest
from ..errors import check_amount, check_number, expected
from .summed_loss import named
from .token_count import Term, as_numbers, check_amounts, check_scalar, sums_of


class WindowSums:
    """The sums of a window: of this rank's micro-batches until they are exchanged, then over all ranks."""

    def __init__(self, terms: dict[str, Term], ranks: ProcessGroup | None, *, each: bool = False) -> None:
        self.terms, self._ranks, self.are_named = terms, ranks, "" not in terms
        self._items: list[tuple[tuple[Any, ...], Tensor | float, Tensor | float | None]] = []  # with names and counts
        self.num_items = 0.0  # the sum of num_items over all ranks
        self.kind = torch.get_default_dtype(), torch.device("cpu")  # of the losses
        self.each: Tensor | None = None  # (G, 2, names) with ``each``: the sums of each micro-batch, and its counts
        if each:
            counts = torch.tensor([as_numbers(term.counts or []) for term in terms.values()], dtype=torch.float64).T
            self.each = torch.stack([torch.zeros_like(counts), counts], dim=1)

    def add(self, index: int, term: Term, value: Tensor | float, weight: Any) -> float:
        """Add a sum of micro-batch ``index``; return the weight of its name, which does not change in a window."""
        if term.weight is None or weight != term.weight:
            number = float(weight) + 0.0 if isinstance(weight, Real) else math.nan  # -0.0 + 0.0 is 0.0
            if not abs(number) < math.inf:
                name = named("weight", term.name)
                raise ValueError(expected(name, "a finite number", check_number(name, weight)))
            if term.weight not in (None, number):
                what = f"{term.weight:g}, as earlier in this window"
                raise ValueError(expected(named("weight", term.name), what, number))
            term.weight = number
        kept: Any = value
        if isinstance(value, Tensor):
            kept = kept.detach().full_tensor() if hasattr(value, "full_tensor") else value
            self.kind = kept.dtype, kept.device
            kept = kept.tolist() if kept.is_cpu else kept.detach().clone()
        term.sums.append((index, kept))
        return term.weight

    def add_items(self, index: int, term: Term, given: Any, what: str = "num_items") -> Tensor | float:
        """Check the number of terms of micro-batch ``index``, and return it; a tensor is checked in the exchange."""
        name = what, index, term.name
        items = check_scalar(given, *name)
        self._items.append((name, items, None if term.counts is None else term.counts[index]))
        if not (isinstance(items, Tensor) or 0 <= items < math.inf):
            check_amount(named(*name), items)
        return items

    def offer(self, error: Exception | None, check: DeviceCheck | None, is_early: bool) -> Offer[None]:
        """Return what this rank adds in the closing header, or raise its ``error``; early: its last loss may follow."""
        if error is not None:
            raise error
        items: list[Tensor | float] = []
        if self._items:
            names, items, counts = map(list, zip(*self._items))
            if any(count is not None for count in counts):
                counts = [value if count is None else count for value, count in zip(items, counts)]
            else:
                counts = []
            check = combined([check, check_amounts(items, lambda place: named(*names[place]), self._ranks, counts)])
        sums: list[list[Any]] = []
        for term in self.terms.values():
            sums.append([*map(itemgetter(1), term.sums)])
            if not is_early and term.weight is None:
                term.weight = 1.0
        rows = self.each
        if rows is not None:
            for place, term in enumerate(self.terms.values()):
                for (index, _), value in zip(term.sums, as_numbers(sums[place])):
                    rows[index, 0, place] += value
            rows = rows if self._ranks is None else rows.to(header_device(self._ranks))
        checksum = None
        if self.are_named and self._ranks is not None:
            weights = {f"weight of {name!r}": term.weight for name, term in self.terms.items()}
            checksum = Checksum(UNKNOWN if is_early else digest(weights), facts=weights)
        totals = [is_early, *sums_of([items, *sums], self._ranks)]
        tensors = None if rows is None else (rows,)
        return Offer(None, {}, 0, totals, checksum, check, tensors, names=("losses",))

    def take(self, call: str, agreed: Agreement[None]) -> bool:
        """Add the sums of all ranks; return whether all knew their last losses, so that no other header follows."""
        are_early, items, *sums = zip(*agreed.totals)
        self.num_items += sum(items)
        self._items.clear()
        for term, values in zip(self.terms.values(), sums):
            term.total += sum(values)
            term.sums.clear()
        if any(are_early):
            return False
        if self.each is not None and self._ranks is not None:
            (gathered,) = gather_after(call, self._ranks, agreed)
            parts = gathered.cpu().split(agreed.rows)
            most = max(agreed.rows)
            padded = [nn.functional.pad(part, (0, 0, 0, 0, 0, most - len(part))) for part in parts]
            self.each = torch.stack(padded).sum(0)
        return True
