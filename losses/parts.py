"""What a loss that is made of other losses does with them: settings, facts for the header, arguments, targets."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.group import check_gather_distributed
from ..distributed.header import State
from ..errors import expected
from ..queues.memory_queue import check_saved_queues
from .distributed_loss import DistributedLoss
from .focal import aligned
from .targets import check_class_range, check_exact
from .tensors import has_values


class LossOfParts(nn.Module):
    """Base of the losses that are made of other losses, their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(check_saved_queues)

    def _members(self) -> Iterable[Any]:
        """Return the losses, the one whose settings are shown first."""
        raise NotImplementedError

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
        modules = (module for part in self._members() for module in part.modules())
        return [module for module in modules if hasattr(module, "gather_distributed")]

    def _state_fact(self, name: str, fact: State) -> None:
        """Let the losses of this package compare ``fact`` between the ranks, including those inside adapters."""
        for module in self.modules():
            if isinstance(module, DistributedLoss):
                module._surrounding_facts[name] = fact

    def gather_queue(self) -> None:
        """Let the next ``state_dict`` hold the queues of all ranks; call it on every rank before saving.

        It calls ``gather_queue`` of the losses that have it: see :class:`~fullrank.SmoothAPLoss`.
        """
        self._call_each("gather_queue")

    def _call_each(self, name: str, *args: object) -> None:
        for part in self._members():
            if hasattr(part, name):
                getattr(part, name)(*args)


def check_module(name: str, loss: object) -> nn.Module:
    """Return ``loss``, or raise TypeError when it is no module."""
    if not isinstance(loss, nn.Module):
        fix = "Construct it first, such as SmoothAPLoss(num_classes=1); put a function into the forward of one."
        raise TypeError(expected(name, "an instance of torch.nn.Module", loss, fix))
    return loss


def takes(loss: nn.Module, name: str) -> bool:
    """Return whether the forward of ``loss`` has an argument ``name``, or takes any."""
    parameters = inspect.signature(loss.forward).parameters
    return name in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def targets_for(loss: nn.Module, logits: Tensor, targets: Tensor, *, validate_args: bool) -> Tensor:
    """Return the targets in the form that a loss of torch needs; those of another loss as they are."""
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)):
        return targets
    if isinstance(loss, nn.BCEWithLogitsLoss):
        return aligned(targets, tuple(logits.shape)).to(logits.dtype)
    if not isinstance(loss, nn.CrossEntropyLoss):
        return targets
    if logits.ndim < 2 or logits.shape[1] == 1:
        fix = "CrossEntropyLoss of one logit is always 0. Use BCEWithLogitsLoss()."
        raise ValueError(expected("logits", "at least two classes in dim 1 for CrossEntropyLoss", logits, fix))
    if targets.shape == logits.shape:  # probabilities
        return targets
    check_exact(targets, logits.shape[1])
    targets = aligned(targets, (logits.shape[0], *logits.shape[2:]))
    indices = targets.to(torch.int64)
    if targets.is_floating_point() and has_values(targets) and validate_args:
        ignored = indices == loss.ignore_index
        check_class_range(targets, indices, ignored, logits.shape[1], loss.ignore_index)
    return indices
