"""The losses of a window, summed by name, and the closing header in which the ranks add them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.gather import gather_after
from ..distributed.group import header_device
from ..distributed.header import DeviceCheck, Offer, agree_on, combined, digest
from ..errors import Words, check_amount, check_number, expected
from .summed_loss import as_mean
from .token_count import as_numbers, check_amounts, check_scalar, sums_of
from .window import Window


class Terms(NamedTuple):
    """The counts and the multiplier of a window, by the names of the losses; a loss without a name has the name ""."""

    numbers: dict[str, float]  # N, over all ranks and micro-batches
    counts: dict[str, list[Tensor | float] | None]  # of this rank's micro-batches; None when the caller passed N
    multiplier: float  # m

    @property
    def are_named(self) -> bool:
        """Whether the losses have names."""
        return "" not in self.numbers


def named(what: str, name: str) -> str:
    """Return how a message calls ``what`` of the loss ``name``."""
    return f"{what} of {name!r}" if name else what


class WindowSums:
    """The sums of a window by name: of this rank's micro-batches until they are exchanged, then over all ranks."""

    def __init__(self, window: Window, terms: Terms, *, each: bool) -> None:
        self._window, self._terms = window, terms
        # The sums, with micro-batch and name; the device is read when they are exchanged.
        self._losses: list[tuple[int, str, Any]] = []
        self._items: list[tuple[str, Tensor | float, Tensor | float | None]] = []  # with their names and counts
        self._weights: dict[str, float] = {}  # of the names in the loss of the window
        # (G, 2, names) with ``each``: the sums of each micro-batch, and its counts.
        self._each: Tensor | None = None
        if each:
            counts = torch.tensor([as_numbers(each) for each in terms.counts.values() if each], dtype=torch.float64).T
            self._each = torch.stack([torch.zeros_like(counts), counts], dim=1)
        self.kind = torch.get_default_dtype(), torch.device("cpu")  # of the losses
        self.totals = dict.fromkeys(terms.numbers, 0.0)  # over all ranks
        self.num_items = 0.0  # the sum of num_items over all ranks

    def add(self, index: int, term: str, value: Tensor | float, weight: float) -> None:
        """Add a sum of micro-batch ``index``, and the weight of its name, which does not change."""
        if weight is not self._weights.get(term, self):
            name = named("weight", term)
            weight = check_number(name, float(weight) if isinstance(weight, Real) else weight) or 0.0  # -0.0 is 0.0
            if not abs(weight) < math.inf:
                raise ValueError(expected(name, "a finite number", weight))
            if self._weights.setdefault(term, weight) != weight:
                raise ValueError(expected(name, f"{self._weights[term]:g}, as earlier in this window", weight))
        kept: Any = value
        if isinstance(value, Tensor):
            kept = kept.detach().full_tensor() if hasattr(value, "full_tensor") else value
            self.kind = kept.dtype, kept.device
            kept = kept.tolist() if kept.is_cpu else kept.detach().clone()
        self._losses.append((index, term, kept))

    def add_items(self, index: int, term: str, given: Any, what: str = "num_items") -> Tensor | float:
        """Check the number of terms of micro-batch ``index``, and return it; a tensor is checked in the exchange."""
        name, counts = named(f"{what} of micro-batch {index}", term), self._terms.counts[term]
        items = check_scalar(name, given)
        self._items.append((name, items, None if counts is None else counts[index]))
        return items if isinstance(items, Tensor) else check_amount(name, items)

    def exchange(self, call: str, *, is_early: bool, error: Exception | None, check: DeviceCheck | None) -> bool:
        """Exchange a closing header: add the sums, or raise an error, on every rank; return whether it is the last.

        If any rank calls it ``is_early``, before it knows its last loss, all ranks call it again after the backward.
        """
        window, terms = self._window, self._terms
        weights = {f"weight of {name!r}": self._weights.get(name, 1.0) for name in terms.numbers}

        def bring() -> Offer[None]:
            if error is not None:
                raise error
            checks, items = [check], [value for _, value, _ in self._items]
            if items:
                counts = [value if count is None else count for _, value, count in self._items]
                has_counts = any(count is not None for *_, count in self._items)
                names = [name for name, *_ in self._items]
                checks.append(check_amounts(names, items, window.ranks, counts if has_counts else ()))
            forwards = window.wrappers.same_forwards
            if is_early and window.wrappers.ddp:
                forwards = forwards._replace(value=Words("some"))  # this rank's may follow
            values = {name: [value for _, term, value in self._losses if term == name] for name in terms.numbers}
            if self._each is not None:
                numbers = as_numbers([value for *_, value in self._losses])
                for (index, name, _), value in zip(self._losses, numbers):
                    self._each[index, 0, [*values].index(name)] += value
            # A rank that comes early does not know its weights.
            state = -1 if is_early else digest(weights) % 2**52 if terms.are_named else 0
            num_items, *sums = sums_of([items, *values.values()], window.ranks)
            rows = self._each
            if rows is not None and window.ranks is not None:
                rows = rows.to(header_device(window.ranks))
            return Offer(
                None,
                {"forwards of DDP": forwards},
                totals=(num_items, state, *sums),
                check=combined(checks),
                tensors=None if rows is None else (rows,),
                names=("losses",),
            )

        call = f"{call} (end of the window)"
        agreed = agree_on(call, window.ranks, bring)
        states = [row[1] for row in agreed.totals]
        items, _, *losses = map(sum, zip(*agreed.totals))
        is_final = -1 not in states
        for name, loss in zip(terms.numbers, losses):
            self.totals[name] += loss
        self.num_items += items
        self._losses.clear()
        self._items.clear()
        if is_final and window.ranks is not None and len(set(states)) > 1:
            agree_on(call, window.ranks, lambda: Offer(None, weights))  # raises, and names what differs
        if is_final and self._each is not None and window.ranks is not None:
            (gathered,) = gather_after(call, window.ranks, agreed)
            parts = gathered.cpu().split(agreed.rows)
            most = max(agreed.rows)
            padded = [nn.functional.pad(part, (0, 0, 0, 0, 0, most - len(part))) for part in parts]
            self._each = torch.stack(padded).sum(0)
        return is_final

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each name over all ranks, without the weights."""
        return {name: as_mean(self.totals[name], number, *self.kind) for name, number in self._terms.numbers.items()}

    def mean(self) -> Tensor:
        """Return the weighted sum of the means."""
        counted = [(name, number) for name, number in self._terms.numbers.items() if number]
        means = (self._weights.get(name, 1.0) * (self.totals[name] / number) for name, number in counted)
        return as_mean(sum(means), 1.0, *self.kind)

    def of_each(self) -> Tensor | None:
        """Return the weighted sum of the means of each micro-batch, (G,); None without ``each``."""
        if self._each is None:
            return None
        sums, counts = self._each.unbind(1)
        weights = torch.tensor([self._weights.get(name, 1.0) for name in self.totals], dtype=torch.float64)
        means = torch.where(counts > 0, sums / counts, 0.0) * weights  # [G, names]
        dtype, device = self.kind
        return means.sum(1).to(device, torch.promote_types(dtype, torch.float32))
