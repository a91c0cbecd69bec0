"""The scores of a window, kept as one tensor or added up in a table, and the two passes over its micro-batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Words, expected
from ..gradients.parameters import leaves_of
from .replay_state import RngState, largest_difference, largest_score, restore_rng, save_rng
from .window import Window

NUM_SAMPLED = 16  # streamed scores of each micro-batch that are kept for the comparison with those of the second pass


class Scores:
    """The scores of the first pass as one leaf, and the second pass over the same micro-batches."""

    def __init__(self, window: Window, loss: Callable[..., Any], devices: Sequence[torch.device]) -> None:
        self._window, self._loss, self.devices = window, loss, devices
        self._parts: list[Tensor] = []
        self._states: list[RngState] = []  # in front of each forward of the first pass
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._kind = ""  # dtype, shape without the rows, and device of the scores
        self._mistake: Exception | None = None
        self.learned: Mapping[str, Tensor] = {}  # parameters of the model that the loss uses
        self.of_learned: Mapping[str, Tensor] = {}  # their gradients
        self.num_changed: Tensor | float = 0.0  # micro-batches with other targets or weights in the second pass
        self.began = save_rng(devices)

    def first_pass(self) -> Iterator[Any]:
        """Yield each micro-batch; it goes to :meth:`add` with its scores."""
        for batch in self._window.micro_batches:
            self._states.append(save_rng(self.devices))
            yield batch

    def add(self, scores: Any, batch: Any) -> None:
        """Add the scores of a micro-batch. A mistake is kept: :meth:`check` raises it, where all ranks can."""
        if self._mistake is not None:
            return
        try:
            if not isinstance(scores, Tensor) or not scores.is_floating_point():
                raise TypeError(expected("forward", "a floating-point tensor of scores", scores))
            if scores.ndim == 0:
                fix = "Return one row per example."
                raise ValueError(expected("forward", "scores of shape (rows, ...)", scores, fix))
            kind = f"{scores.dtype} ({', '.join(map(str, ('rows', *scores.shape[1:])))}) on {scores.device}"
            if self._kind not in ("", kind):
                fix, found = "Only the number of rows may differ.", Words(f"{self._kind} and {kind}")
                raise ValueError(expected("forward", "scores of one kind from all micro-batches", found, fix))
            self._add(scores.detach(), batch)
            self._kind = kind
            self._forms.append((scores.shape, scores.dtype))
        except Exception as error:
            self._mistake = error

    def _add(self, scores: Tensor, batch: Any) -> None:
        self._parts.append(scores.clone())  # the next forward may write its output into the same memory

    def check(self) -> Scores:
        """Return this, or raise the mistake that was found in the scores or the rows of a micro-batch."""
        if self._mistake is not None:
            raise self._mistake
        return self

    def evaluate(self) -> Tensor:
        """Return the loss, a scalar with a graph to the scores, and note the parameters of the model in its graph."""
        self._leaf = torch.cat(self._parts).requires_grad_()  # [rows of this rank, ...]
        self._parts = []
        value = self._loss(self._leaf, self._window.micro_batches)
        if not isinstance(value, Tensor):
            raise TypeError(expected("loss", "a scalar tensor", value, "Return the loss alone."))
        if value.numel() != 1:
            raise ValueError(expected("loss", "a scalar", value, "Reduce it."))
        leaves = {id(one): one for one in leaves_of(value)} if value.requires_grad else {}
        if leaves.pop(id(self._leaf), None) is None:
            fix = "Compute it from the scores that loss is given, without detach, item or no_grad."
            raise ValueError(expected("loss", "a loss with a graph to the scores", Words("one without"), fix))
        named = self._window.model.named_parameters()
        self.learned = {name: one for name, one in named if leaves.pop(id(one), None) is not None}
        for other in leaves.values():
            kind = "another tensor that requires grad"
            if isinstance(other, nn.Parameter):
                name = next((name for name, one in _parameters_around(self._loss) if one is other), None)
                kind = "a parameter outside of model" if name is None else f"the parameter {name!r} outside of model"
            found = Words(f"a loss of {kind}, of shape {tuple(other.shape)}, too")
            fix = (
                "No wrapper would reduce its gradient: register the module that has it in the model before that is "
                "wrapped, as in model.loss = loss, or use it in forward and return the result in the scores."
            )
            raise ValueError(expected("loss", "a function of the scores and of parameters of model", found, fix))
        return value

    def start(self, value: Tensor) -> None:
        """Let :meth:`gradient` be that of ``value``."""
        slope, *others = torch.autograd.grad(value, [self._leaf, *self.learned.values()])
        sizes = [shape[0] for shape, _ in self._forms]
        self._firsts, self._slopes = self._leaf.detach().split(sizes), slope.split(sizes)
        self.of_learned = dict(zip(self.learned, others))

    def second_pass(self) -> Iterator[Any]:
        """Yield each micro-batch under the random state of the first pass."""
        for batch, state in zip(self._window.micro_batches, self._states):
            restore_rng(state)
            yield batch

    def form(self, index: int) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and the dtype of the scores of a micro-batch in the first pass."""
        return self._forms[index]

    def largest(self) -> Tensor:
        """Return the largest finite |score| of the first pass."""
        return largest_score(self._leaf.detach())

    def difference(self, index: int, scores: Tensor) -> Tensor:
        """Return how far the ``scores`` of a micro-batch are from those of the first pass, as far as is known."""
        return largest_difference(self._firsts[index], scores)

    def gradient(self, index: int, batch: Any, scores: Tensor) -> Tensor:
        """Return the gradient of the scores of a micro-batch."""
        return self._slopes[index]


def _parameters_around(loss: Callable[..., Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that ``loss`` holds or its code names, as far as they are found, with their names."""
    known: Mapping[str, Any] = {}
    if isinstance(loss, nn.Module):
        yield from loss.named_parameters()
    elif isinstance(loss, functools.partial):
        yield from _parameters_around(loss.func)
        with suppress(TypeError, ValueError):  # of a function without a signature
            known = inspect.signature(loss.func).bind_partial(*loss.args, **loss.keywords).arguments
    elif inspect.ismethod(loss):
        yield from _parameters_around(loss.__func__)
        known = {"self": loss.__self__, **getattr(loss.__self__, "__dict__", {})}
    elif inspect.isfunction(loss):
        with suppress(ValueError):  # of a variable without a value
            found = inspect.getclosurevars(loss)
            known = {**found.globals, **found.nonlocals}
    for name, value in known.items():
        if isinstance(value, nn.Module):
            yield from value.named_parameters(name)
        elif isinstance(value, nn.Parameter):
            yield name, value
