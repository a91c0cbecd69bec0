"""A weighted sum of losses as one module, and the base of the losses that are made of other losses."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...distributed.group import check_gather_distributed
from ...distributed.header import SURROUNDING, Offer, State, agree_on, agree_once
from ...distributed.torch_private import is_mean, not_compiled, note_kind
from ...errors import Words, check_amount, expected
from ...queues.saved_state import SavedState, as_saved, from_saved, with_names
from ..base import DistributedLoss
from ..pooled.base import RankingLoss
from ..rows import check_exact, class_range_check, has_values
from ..summed.base import SummedLoss, match_shape

_SAME_WEIGHTS = "Give the CombinedLoss the same parts, in the same order, and the same weights on every rank."
_OPTIONAL = ("iid_mask", "sample_weight", "indexes")


class LossOfParts(SavedState):
    """Base of the losses that are made of other losses, their parts."""

    @property
    def gather_distributed(self) -> bool | None:
        """The setting of the first part that has one. Assigning it sets all parts."""
        settings = [loss.gather_distributed for loss in self._gathering_losses()]
        return settings[0] if settings else None

    @gather_distributed.setter
    def gather_distributed(self, value: bool | None) -> None:
        check_gather_distributed(value)
        for loss in self._gathering_losses():
            loss.gather_distributed = value

    def _gathering_losses(self) -> list[Any]:
        """Return the modules that have the setting, including those inside adapters."""
        return [module for module in [*self.modules()][1:] if hasattr(module, "gather_distributed")]

    def _value_of(
        self, part: nn.Module, logits: Tensor, targets: Tensor, options: Mapping[str, Any], facts: Mapping[str, State]
    ) -> Any:
        """Call a part, with the targets in the form that a loss of torch requires; its headers compare ``facts``."""
        if isinstance(logits, Tensor) and isinstance(targets, Tensor):
            if isinstance(part, nn.BCEWithLogitsLoss):
                targets = match_shape(targets, tuple(logits.shape)).to(logits.dtype)
            elif isinstance(part, nn.CrossEntropyLoss):
                validate_args = all(getattr(module, "validate_args", True) for module in self.modules())
                targets = _class_indices(part, logits, targets, validate_args)
        token = SURROUNDING.set(facts)
        try:
            return part(logits, targets, **options)
        finally:
            SURROUNDING.reset(token)


def surrounding(name: str, fact: State) -> Mapping[str, State]:
    """Return the facts around the parts of a loss: those around the loss, and a ``fact`` of its own."""
    around = dict(SURROUNDING.get())
    while name in around:
        name = f"inner {name}"
    return {**around, name: fact}


def check_module(name: str, loss: object) -> nn.Module:
    if not isinstance(loss, nn.Module):
        fix = "Construct it first, such as SmoothAPLoss(num_classes=1); put a function into the forward of one."
        raise TypeError(expected(name, "an instance of torch.nn.Module", loss, fix))
    return loss


def takes(loss: nn.Module, name: str) -> bool:
    """Return whether the forward of ``loss`` has an argument ``name``, or takes any."""
    parameters = inspect.signature(loss.forward).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _class_indices(loss: nn.CrossEntropyLoss, logits: Tensor, targets: Tensor, validate_args: bool) -> Tensor:
    """Return targets that are no probabilities as class indices."""
    if logits.ndim < 2 or logits.shape[1] == 1:
        fix = "CrossEntropyLoss of one logit is always 0. Use BCEWithLogitsLoss()."
        raise ValueError(expected("logits", "at least two classes in dim 1 for CrossEntropyLoss", logits, fix))
    if targets.shape == logits.shape:  # probabilities
        return targets
    check_exact(targets, logits.shape[1])
    targets = match_shape(targets, (logits.shape[0], *logits.shape[2:]))
    indices = targets.to(torch.int64)
    if targets.is_floating_point() and has_values(targets) and validate_args:
        bad = ((indices < 0) | (indices >= logits.shape[1])) & (indices != loss.ignore_index)
        class_range_check(targets, indices, bad, logits.shape[1], loss.ignore_index).read()
    return indices


class CombinedLoss(LossOfParts):
    r"""Weighted sum of several losses of the same logits and targets.

    .. math:: L = \sum_k w_k \, L_k

    After a call, the dict ``parts`` has the value of each part by name, without its weight and its graph, for logging.
    Losses of torch are allowed as in :class:`~fullrank.LossWarmupWrapper`; with several ranks they average on each.

    Args:
        losses: the parts, modules that are called with ``(logits, targets)``, by name. The names have no dots.
        weights: a number >= 0 for each name; None for all 1. May be assigned between steps, the same on every rank.

    Shape:
        Inputs as for the parts, which must all take the same. Output a scalar, if those of the parts are.

    Raises:
        TypeError: for a part that is no module or does not return a tensor, and for an argument that no part takes.
        ValueError: for names and weights that do not fit.
        RuntimeError: when ranks disagree about the parts or their weights.

    Distributed:
        The collectives of the parts, which compare the weights. The first cross-entropy or focal loss, not balanced,
        and the first of SmoothAP, recall and partial AUC share one header. With a part that is not a loss of this
        package there is one more, a header: an error in that part is then raised on every rank.

    Example:
        >>> import torch
        >>> from fullrank import BCEWithLogitsLoss, SmoothAPLoss
        >>> losses = {"ce": BCEWithLogitsLoss(), "ap": SmoothAPLoss(num_classes=1)}
        >>> loss = CombinedLoss(losses, weights={"ce": 1.0, "ap": 0.5})
        >>> value = loss(torch.tensor([2.0, -1.0, 0.0]), torch.tensor([1, 0, 1]))
        >>> bool(value == loss.parts["ce"] + 0.5 * loss.parts["ap"])
        True
    """

    _saved_names = _optional_names = ("saved_weights",)
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
        self._first_weights = self._weights
        self.parts = {}
        # Parts without a queue come first. If one of them raises, nothing has been enqueued.
        has_queue = {n: any(hasattr(module, "reset_queue") for module in part.modules()) for n, part in losses.items()}
        self._order = sorted(losses, key=lambda name: has_queue[name])
        pooled = (name for name, loss in losses.items() if isinstance(loss, RankingLoss))
        # Balanced weights need rows of their own; the sums of other losses have room in the header of a pool.
        summed = (n for n, loss in losses.items() if isinstance(loss, SummedLoss) and not loss._is_balanced)
        self._agreeing_once = next(summed, None), next(pooled, None)
        self._takes = {name: [option for option in _OPTIONAL if takes(loss, option)] for name, loss in losses.items()}

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
            check_amount(f"weights[{name!r}]", weight)
        self._weights = {name: float(weights[name]) + 0.0 for name in names}  # + 0.0 so that -0.0 has the text of 0.0

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
            logits, targets: passed to all parts.
            iid_mask, sample_weight, indexes: passed to the parts that take them; losses of torch do not. Or None.
        """
        optional = {"iid_mask": iid_mask, "sample_weight": sample_weight, "indexes": indexes}
        options = {name: value for name, value in optional.items() if value is not None}
        for name, value in options.items():
            if not any(name in names for names in self._takes.values()):
                raise TypeError(expected(name, "None, because no part takes it", value))
        facts = surrounding("weights", State(self._weights, _SAME_WEIGHTS))

        def value_of(name: str) -> Tensor:
            taken = {key: options[key] for key in self._takes[name] if key in options}
            value = self._value_of(self.losses[name], logits, targets, taken, facts)
            if not isinstance(value, Tensor):
                returned = Words(type(value).__name__)
                raise TypeError(expected(f"losses[{name!r}]", "a loss that returns a tensor", returned))
            return value

        def evaluate() -> Offer[dict[str, Tensor]]:
            values, (summed, pooled) = dict[str, Tensor](), self._agreeing_once
            for name in self._order:
                if name == pooled and summed:
                    values[name], values[summed] = agree_once(partial(value_of, name), partial(value_of, summed))
                elif name != summed or not pooled:
                    values[name] = value_of(name)
            return Offer(values)

        of_package = [module for module in self.modules() if isinstance(module, DistributedLoss)]
        if of_package and not all(isinstance(part, DistributedLoss) for part in self.losses.values()):
            values = agree_on(type(self).__name__, of_package[0]._resolve_group(), evaluate).value
        else:  # a loss of this package raises on every rank by itself
            values = evaluate().value
        self.parts = {name: values[name].detach() for name in self.losses}
        first, *others = (weight * values[name] for name, weight in self._weights.items())
        total = sum(others, start=first)
        return note_kind(total, mean=True) if any(map(is_mean, values.values())) else total

    def on_train_epoch_start(self, epoch: int) -> None:
        """Pass the epoch to the parts that have a schedule."""
        self._call_each("on_train_epoch_start", epoch)

    def on_train_batch_start(self, global_step: int) -> None:
        """Pass the optimizer step to the parts that have a schedule."""
        self._call_each("on_train_batch_start", global_step)

    def reset_queue(self) -> None:
        """Remove all queued rows of the parts. With several ranks, call it on every rank."""
        self._call_each("reset_queue")

    def _call_each(self, name: str, *args: object) -> None:
        for part in self.losses.values():
            if hasattr(part, name):
                getattr(part, name)(*args)

    def _saved(self) -> dict[str, Tensor]:  # the weights, unless they are those of the constructor, by sorted names
        if self._weights == self._first_weights:
            return {}
        return {"saved_weights": as_saved(with_names(self._weights))}

    def _read_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if "saved_weights" not in state:
            return {"weights": self._first_weights}
        names, saved = sorted(self._weights), from_saved(state, "weights", (len(self._weights) + 1,), float)
        if saved[0] != with_names(self._weights)[0]:
            fix = "Load the state into a CombinedLoss of the parts that saved it."
            raise ValueError(expected("weights of the saved state", f"those of {names}", Words("other names"), fix))
        weights = dict(zip(names, saved[1:]))
        for name, weight in weights.items():
            check_amount(f"weights[{name!r}] of the saved state", weight)
        return {"weights": weights}

    def extra_repr(self) -> str:
        return f"weights={self._weights}"

    if TYPE_CHECKING:  # that of nn.Module returns Any
        __call__ = forward
