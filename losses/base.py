"""The base classes of the losses, each derived from the one before, and the facts that the ranks compare.

:class:`DistributedLoss` has the group of ranks, :class:`CurrentTemperature` a temperature, :class:`HoldsQueue` a queue.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.group import (
    SAME_REDUCTION,
    DataGroup,
    Group,
    check_gather_distributed,
    check_gradient_reduction,
    is_initialized,
)
from ..distributed.header import Checksum, State, States, refuse_in_backward
from ..distributed.torch_private import not_compiled
from ..errors import check_count, check_temperature, describe, expected
from ..kernels import native
from ..queues.memory_queue import SAME_QUEUE, MemoryQueue, QueueRows
from ..queues.saved_state import SavedState, as_saved, from_saved
from .arguments import completed
from .hints import hints_of

# The advice in the error when ranks differ in a fact.
SAME_ARGUMENTS = "Construct it with the same arguments on every rank."
SAME_TEMPERATURE = "Set the same temperature, a number or None, or advance the same schedule, on every rank."
_SAME_KERNELS = "Build the extension on every rank, or set FULLRANK_NATIVE=0 on all of them."
_SAME_ORDER = "Call the losses in the same order on every rank: keep them in a list or a dict, not in a set."
_SAME_MODE = (
    "Call train() or eval(), and enable or disable gradients, on every rank; gather_distributed=False lets a rank work "
    "alone."
)

P = ParamSpec("P")
T = TypeVar("T")


def compiled_where_local(forward: Callable[P, T]) -> Callable[P, T]:
    """Compile ``forward`` of a :class:`DistributedLoss` only if it ``fits_in_a_graph``; otherwise break the graph."""
    eagerly = not_compiled(forward)

    @functools.wraps(forward)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() and args[0].fits_in_a_graph():  # type: ignore[attr-defined]
            return forward(*args, **kwargs)
        return eagerly(*args, **kwargs)

    return call


def unchecked(name: str, value: object) -> None:
    """Take any value; the check of an argument that is checked next to others."""


class GroupOptions(TypedDict, total=False):
    """The arguments of :class:`DistributedLoss` that its subclasses pass on unchanged."""

    group: Group
    gradient_reduction: str | int
    validate_args: bool
    name: str | None


@completed()
class DistributedLoss(nn.Module):
    """Base of the losses: the ranks that take part, and how the wrapper combines their gradients.

    Args:
        gather_distributed: None uses a process group if one exists at the forward, False uses this rank's rows alone,
            True requires a process group. May be changed between steps: False while rank 0 validates alone.
        group: process group or device mesh of the data-parallel ranks; None for the default group.
        gradient_reduction: how the wrapper combines parameter gradients over the ranks: ``"mean"`` (DDP, FSDP2, HSDP),
            ``"sum"``, or the number of ranks it averages over.
        validate_args: check values (target ranges, weights), which waits for the device; skipped while compiling.
            Types, shapes and devices are always checked.
        name: a name that the ranks compare; None for no name. Two losses of one class with equal arguments look the
            same: name them, and ranks that call them in different orders raise.

    Raises:
        TypeError, ValueError: for bad arguments, at construction, or in the forward on every rank, nothing enqueued.
        RuntimeError: when ranks disagree about the call or the state, or inside activation checkpointing.
    """

    # The checks of the arguments by name, and the arguments that cannot change later.
    _checks: ClassVar[dict[str, Callable[[str, Any], object]]] = {
        "gather_distributed": lambda _, value: check_gather_distributed(value),
        "gradient_reduction": lambda _, value: check_gradient_reduction(value),
    }
    _fixed: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        gather_distributed: bool | None = None,
        group: Group = None,
        gradient_reduction: str | int = "mean",
        validate_args: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if name is not None and not isinstance(name, str):
            raise TypeError(expected("name", "a str or None", name))
        self.name = name
        self.gather_distributed = gather_distributed
        self.gradient_reduction = gradient_reduction
        self.validate_args = validate_args
        self._data_group = DataGroup(group)
        self._hints = hints_of(type(self).__name__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. An argument of the constructor is checked as there, and raises if it has no effect."""
        if name in self._checks:
            self._checks[name](name, value)
            if name in self.__dict__ or name in dict(self.named_children()):  # not a property, which may read
                self._check_change(name, value)
        super().__setattr__(name, value)

    def _check_change(self, name: str, value: Any) -> None:
        """Check an argument of the constructor that is assigned later; a subclass checks it next to the others."""
        if name in self._fixed and value != getattr(self, name):
            what = f"{describe(getattr(self, name))}, as in the constructor"
            raise ValueError(expected(name, what, value, "Construct another loss."))

    @property
    def group(self) -> Group:
        """The group this loss was given; may be assigned."""
        return self._data_group.group

    @group.setter
    def group(self, group: Group) -> None:
        self._data_group = DataGroup(group)

    def fits_in_a_graph(self) -> bool:
        """Return whether a call communicates with no other rank and keeps no state, so that it can be compiled."""
        return self.gather_distributed is False or (self.gather_distributed is None and not is_initialized())

    def _resolve_group(self) -> ProcessGroup | None:
        """Return the group to communicate over, None for a local call; RuntimeError while a backward pass runs."""
        if torch.compiler.is_compiling() and self.fits_in_a_graph():  # the compiler cannot trace the question
            return None
        refuse_in_backward(type(self).__name__)
        return self._data_group.resolve(self.gather_distributed, self.gradient_reduction)

    @property
    def _shown(self) -> tuple[str, ...]:
        """The names of the arguments that ``repr`` shows and the ranks compare."""
        return ()

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return ", ".join(f"{name}={value!r}" for name, value in self._arguments().items())

    def _arguments(self) -> dict[str, object]:
        """Return the arguments that the ranks compare, by ``repr``."""
        return {name: getattr(self, name) for name in self._shown}

    def _facts(self) -> dict[str, object]:
        """Return the facts that must be equal on all ranks; a subclass adds its own."""
        return {
            "name": State(self.name, _SAME_ORDER),
            "arguments": States(self._arguments(), SAME_ARGUMENTS),
            "kernels": State(native.KERNELS, _SAME_KERNELS),
            "gradient_reduction": State(self.gradient_reduction, SAME_REDUCTION),
        }


class CurrentTemperature(DistributedLoss, SavedState):
    """Base of the losses with a temperature, which may be automatic. The state has it unless the constructor set it."""

    _saved_names: ClassVar[tuple[str, ...]] = ("saved_temperature",)
    _optional_names = _saved_names
    # None where it is not automatic raises in the forward.
    _checks = DistributedLoss._checks | {"temperature": lambda _, value: check_temperature(value, automatic=True)}

    temperature: float | None
    _first_temperature: float | None = None
    has_temperature = True  # False for a loss without a temperature, or whose temperature is a parameter
    _last_temperature: float | None = None

    @property
    def current_temperature(self) -> float | None:
        """The attribute ``temperature`` if it is a number, else the temperature of the last call; None before it."""
        temperature: float | None = getattr(self, "temperature", None)
        return self._last_temperature if temperature is None else temperature

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``, and the temperature, which the ranks compare as a fact of its own."""
        if not self.has_temperature:
            return super().extra_repr()
        text, last = f"{super().extra_repr()}, temperature={self.temperature}", self._last_temperature
        is_automatic = self.temperature is None and last is not None
        return f"{text} (automatic, {last:.4g} in the last call)" if is_automatic else text

    def _facts(self) -> dict[str, object]:
        facts = super()._facts()
        if self.has_temperature:
            facts["temperature"] = State(self.temperature, SAME_TEMPERATURE)
        return facts

    def _start_temperature(self, temperature: float | None) -> None:
        """Set the temperature of the constructor, with which the state has none."""
        self.temperature = self._first_temperature = temperature

    def _saved(self) -> dict[str, Tensor]:
        if not self.has_temperature or self.temperature == self._first_temperature:
            return {}
        return {"saved_temperature": as_saved(self.temperature, float)}

    def _read_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        if not self.has_temperature:
            return {}
        if "saved_temperature" not in state:
            return {"temperature": self._first_temperature}
        saved, name = from_saved(state, "temperature", kind=float), "temperature of the saved state"
        return {"temperature": None if saved == -1 else check_temperature(saved, name=name)}


class HoldsQueue(CurrentTemperature):
    """Base of the losses with a memory queue.

    Args:
        queue_size: number of rows of earlier steps to keep, a cross-batch memory; 0 for none. The live rows are
            compared with them too. Queued rows have no loss of their own, carry no gradient and are the same on every
            rank. Finite live rows enter after the loss is computed, unless gradients are disabled. In eval mode no
            queued row is used and none enters.
        num_features: D, for a queue that ``torch.distributed.checkpoint`` loads before the first call; else None.
    """

    queue: MemoryQueue
    queue_size: int
    _checks = CurrentTemperature._checks | {"queue": unchecked, "queue_size": partial(check_count, least=0)}
    _fixed: ClassVar[tuple[str, ...]] = ("queue", "queue_size")
    update_queue_in_eval = queue_in_eval = False
    _num_draws = 0

    def _make_embedding_queue(self, queue_size: int, num_features: int | None, ignore_index: int) -> None:
        """Make a queue of embeddings (queue_size, num_features), each with a label."""
        self.queue_size = queue_size
        if num_features is not None:
            check_count("num_features", num_features, 1)
        self._set_queue(MemoryQueue(queue_size, num_features, ignore_index))

    def _set_queue(self, queue: MemoryQueue) -> None:
        self.queue = queue
        if queue.capacity:
            self._hints.count_queue()

    def _queued_rows(self) -> QueueRows | None:
        """Return the queued rows that this call uses, None if it uses none."""
        rows = self.queue.rows() if self._ranks_queue else None
        return rows if rows is not None and rows.logits.shape[0] else None

    @property
    def _enqueues(self) -> bool:  # a validation of which only the model is in eval mode runs without gradients
        return self.queue_size > 0 and (self.update_queue_in_eval or (self.training and torch.is_grad_enabled()))

    @property
    def _ranks_queue(self) -> bool:
        return self.queue_size > 0 and (self.training or self.queue_in_eval)

    @property
    def _checksum(self) -> Checksum | None:
        return Checksum(self.queue.checksum, "queue", SAME_QUEUE) if self.queue_size else None

    def _facts(self) -> dict[str, object]:
        facts = super()._facts()
        if self.queue_size:
            facts["enqueues rows"] = State(self._enqueues, _SAME_MODE)
            facts["ranks queued rows"] = State(self._ranks_queue, _SAME_MODE)
            names = "pointer", "length", "rows so far", "has weights"
            facts["queue"] = State(dict(zip(names, self.queue.position)), SAME_QUEUE)
        return facts

    def reset_queue(self) -> None:
        """Remove all queued rows. With several ranks, call it on every rank."""
        self.queue.reset()
