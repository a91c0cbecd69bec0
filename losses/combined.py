"""A weighted sum of losses as one module, for trainers that take one loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..distributed.header import Offer, State, agree_on
from ..distributed.torch_private import is_mean, not_compiled, note_kind
from ..errors import Words, check_number, expected
from .distributed_loss import DistributedLoss
from .parts import LossOfParts, check_module, takes, targets_for

_SAME_WEIGHTS = "Give the CombinedLoss the same parts, in the same order, and the same weights on every rank."
_OPTIONAL = ("iid_mask", "sample_weight", "indexes")


class CombinedLoss(LossOfParts):
    r"""Weighted sum of several losses of the same logits and targets.

    .. math:: L = \sum_k w_k \, L_k

    Equal to ``weights["ce"] * losses["ce"](logits, targets) + weights["ap"] * losses["ap"](logits, targets) + ...``,
    as one module. After a call, the dict ``parts`` has the value of each part by name, without its weight and its
    graph, for logging. The calls of a training loop are passed on to the parts that have them.

    With several ranks, the gradient equals that of one process only if each part is a loss of this package. The losses
    of torch average on each rank: use :class:`~fullrank.CrossEntropyLoss` and :class:`~fullrank.BCEWithLogitsLoss`
    instead. They are allowed, and given the targets in the form they need, as in :class:`~fullrank.LossWarmupWrapper`.

    Args:
        losses: the parts, modules that are called with ``(logits, targets)``, by name. The names have no dots.
        weights: a number >= 0 for each name; None for all 1. May be assigned between steps, the same on every rank.

    Shape:
        Inputs as for the parts, which must take the same. Output a scalar, if those of the parts are.

    Raises:
        TypeError: for a part that is no module or does not return a tensor, and for an argument that no part takes.
        ValueError: for names and weights that do not fit.
        RuntimeError: when ranks disagree about the parts or their weights.

    Distributed:
        The collectives of the parts, which compare the weights. With a part that is not a loss of this package, one
        more, a header: an error in that part is then raised on every rank.

    Example:
        >>> import torch
        >>> from fullrank import BCEWithLogitsLoss, SmoothAPLoss
        >>> losses = {"ce": BCEWithLogitsLoss(), "ap": SmoothAPLoss(num_classes=1)}
        >>> loss = CombinedLoss(losses, weights={"ce": 1.0, "ap": 0.5})
        >>> value = loss(torch.tensor([2.0, -1.0, 0.0]), torch.tensor([1, 0, 1]))
        >>> sorted(loss.parts), bool(value == loss.parts["ce"] + 0.5 * loss.parts["ap"])
        (['ap', 'ce'], True)
    """

    losses: nn.ModuleDict
    parts: dict[str, Tensor]

    def __init__(self, losses: Mapping[str, nn.Module], weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        if not isinstance(losses, Mapping):
            fix = 'Give each loss a name, such as {"ce": BCEWithLogitsLoss(), "ap": SmoothAPLoss(num_classes=1)}.'
            raise TypeError(expected("losses", "a mapping from names to losses", losses, fix))
        if not losses:
            raise ValueError(expected("losses", "at least one loss", losses))
        self.losses = nn.ModuleDict()
        for name, loss in losses.items():
            check_module(f"losses[{name!r}]", loss)
            try:
                self.losses[name] = loss
            except (KeyError, TypeError) as error:  # a dot, or a name that modules have
                raise ValueError(expected("losses", "names of attributes", name, f"{error.args[0]}.")) from None
        self.weights = dict.fromkeys(losses, 1.0) if weights is None else weights
        self.parts = {}
        self._takes = {name: [one for one in _OPTIONAL if takes(loss, one)] for name, loss in losses.items()}

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of each part. Assign a mapping to change them, on every rank."""
        return MappingProxyType(self._weights)

    @weights.setter
    def weights(self, weights: Mapping[str, float]) -> None:
        names = list(self.losses)
        if not isinstance(weights, Mapping) or set(weights) != set(names):
            kind = ValueError if isinstance(weights, Mapping) else TypeError
            raise kind(expected("weights", f"a number for each of {', '.join(map(repr, names))}", weights))
        for name, weight in weights.items():
            if not 0 <= check_number(f"weights[{name!r}]", weight) < math.inf:
                raise ValueError(expected(f"weights[{name!r}]", "a finite number >= 0", weight))
        self._weights = {name: float(weights[name]) for name in names}

    def _members(self) -> Iterable[Any]:
        return self.losses.values()

    @not_compiled
    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        iid_mask: Tensor | None = None,
        *,
        sample_weight: Tensor | None = None,
        indexes: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the parts.

        Args:
            logits: passed to all parts.
            targets: passed to all parts.
            iid_mask: passed to the parts that take it; None for none.
            sample_weight: passed to the parts that take it; None for none. The losses of torch do not.
            indexes: passed to the parts that take it; None for none.

        Raises:
            TypeError: when no part takes an argument that is given.
        """
        optional = {"iid_mask": iid_mask, "sample_weight": sample_weight, "indexes": indexes}
        given = {name: value for name, value in optional.items() if value is not None}
        for name, value in given.items():
            if not any(name in taken for taken in self._takes.values()):
                raise TypeError(expected(name, "None, because no part takes it", value))
        self._state_fact("weights", State(self._weights, _SAME_WEIGHTS))

        def evaluate() -> Offer[dict[str, Tensor]]:
            values = {}
            validate_args = all(getattr(module, "validate_args", True) for module in self._members())
            # Parts without a queue come first. If one of them raises, nothing has been enqueued.
            has_queue = {k: any(hasattr(one, "reset_queue") for one in self.losses[k].modules()) for k in self.losses}
            for name in sorted(self.losses, key=lambda name: has_queue[name]):
                part = self.losses[name]
                own = targets_for(part, logits, targets, validate_args=validate_args)
                value = part(logits, own, **{one: given[one] for one in self._takes[name] if one in given})
                if not isinstance(value, Tensor):
                    found = Words(type(value).__name__)
                    raise TypeError(expected(f"losses[{name!r}]", "a loss that returns a tensor", found))
                values[name] = value
            return Offer(values)

        own = [module for module in self.modules() if isinstance(module, DistributedLoss)]
        if own and not all(isinstance(part, DistributedLoss) for part in self._members()):
            values = agree_on(type(self).__name__, own[0]._resolve_group(), evaluate).value
        else:  # each part raises what it raises on every rank
            values = evaluate().value
        self.parts = {name: values[name].detach() for name in self.losses}
        first, *others = (weight * values[name] for name, weight in self._weights.items())
        total = sum(others, start=first)
        return note_kind(total) if any(map(is_mean, values.values())) else total

    def on_train_epoch_start(self, epoch: int) -> None:
        """Pass the epoch to the parts that have a schedule."""
        self._call_each("on_train_epoch_start", epoch)

    def on_train_batch_start(self, global_step: int) -> None:
        """Pass the optimizer step to the parts that have a schedule."""
        self._call_each("on_train_batch_start", global_step)

    def reset_queue(self) -> None:
        """Remove all queued rows of the parts that have a queue. With several ranks, call it on every rank."""
        self._call_each("reset_queue")

    def get_extra_state(self) -> dict[str, Any]:
        """Return the weights, which may change in a training."""
        return {"weights": dict(self._weights)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        self.weights = state["weights"]

    def extra_repr(self) -> str:
        """Return the weights for ``repr``."""
        return f"weights={self._weights}"

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward
