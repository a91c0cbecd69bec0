"""From a pointwise loss to a ranking loss: phases, blending, and a temperature that may decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..distributed.group import check_gather_distributed
from ..distributed.header import State
from ..distributed.torch_private import is_mean, not_compiled, note_kind
from ..errors import expected, warn
from .parts import LossOfParts, takes, targets_for
from .schedule import Schedule

_SAME_SCHEDULE = "Call on_train_epoch_start and on_train_batch_start with the same numbers on every rank."


class LossWarmupWrapper(LossOfParts, Schedule):
    r"""Train with ``warmup_loss`` first, blend, then with ``main_loss``, at a temperature that may decay.

    A ranking loss gives little gradient while the scores are not yet spread, and a pointwise loss spreads them. Blend
    unit k of n, counted from 0, has

    .. math:: L = (1 - w) \, L_\text{warmup} + w \, L_\text{main}, \quad
              w = \frac{k + 1}{n + 1} \cdot \text{final\_main\_weight}

    The switch is at step ``warmup_steps``, or at the first step after ``warmup_epochs``. There the queue of
    ``main_loss`` is reset. The temperature of ``main_loss`` stays as it is, unless ``temp_start`` and ``temp_end`` are
    given. Then, whatever it was constructed with, it is from the switch on

    .. math:: \tau(s) = \tau_\text{start} \, (\tau_\text{end} / \tau_\text{start})^{\min(s / S, 1)}

    with s the steps since the switch and S ``temp_decay_steps``. Without a warm-up it is ``temp_start`` from the
    construction on.

    Call :meth:`on_train_batch_start` in every step, and :meth:`on_train_epoch_start` in every epoch if the warm-up is
    counted in epochs. Without these calls the warm-up never ends.

    With several ranks, the gradient equals that of one process only if ``warmup_loss`` also averages over all ranks.
    The losses of torch average on each rank. They are given the targets in the form they need: floats in the shape of
    the logits for ``torch.nn.BCEWithLogitsLoss``, class indices for ``torch.nn.CrossEntropyLoss``. Binary cross-entropy
    of torch knows no ``ignore_index``. Use :class:`~fullrank.BCEWithLogitsLoss` for one logit and
    :class:`~fullrank.CrossEntropyLoss` for several classes, which average over all ranks.

    Args:
        warmup_loss: called with ``(logits, targets)``; also with ``sample_weight`` if its forward takes it.
        main_loss: called with ``(logits, targets, **kwargs)``.
        warmup_epochs: length of the warm-up in epochs; 0 to start with ``main_loss``.
        temp_start, temp_end: > 0, temperatures of ``main_loss`` at the switch and after ``temp_decay_steps``, both or
            neither. None, the default, leaves the temperature alone. In units of the scores, where a hundredth to a
            tenth of their spread is usual; for a band of ``PAUCAtBudgetLoss`` multiples of its scale, where 0.25 to 0.1
            is usual.
        temp_decay_steps: length of the decay in steps, >= 1.
        blend_epochs: length of the blend in epochs.
        warmup_steps: length of the warm-up in steps instead of epochs.
        blend_steps: length of the blend in steps; needs ``warmup_steps``.
        final_main_weight: in (0, 1], the weight of ``main_loss`` after the blend.
        reset_queue_each_epoch: also reset the queue at the start of each epoch after the switch, once per epoch.
        gather_distributed: None leaves the settings of the two losses; another value is set on both. Assigning the
            attribute between steps sets both: False while rank 0 validates alone, None to detect again.

    Shape:
        Inputs as for the two losses, which must take the same. Output a scalar in the warm-up, then as ``main_loss``.

    Raises:
        TypeError: for losses that are not instances of a module, and for arguments of the wrong type.
        ValueError: for values out of range, for lengths given in epochs and in steps, for one temperature without the
            other, and when no argument leaves the wrapper anything to do.

    Distributed:
        The collectives of the two losses. If they are losses of this package, they compare the temperature and the
        weight of ``main_loss``, and ranks whose schedules differ raise. With several wrappers, name the losses in them.

    Example:
        >>> import torch
        >>> from fullrank import CrossEntropyLoss, SmoothAPLoss
        >>> loss = LossWarmupWrapper(CrossEntropyLoss(), SmoothAPLoss(num_classes=2), warmup_steps=10)
        >>> loss.on_train_batch_start(0)
        >>> loss.in_warmup, loss.main_weight
        (True, 0.0)
        >>> loss.on_train_batch_start(10)
        >>> loss.in_warmup, loss.main_weight, loss.current_temperature
        (False, 1.0, None)
        >>> value = loss(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 1]))
        >>> round(loss.current_temperature, 3)
        0.111
    """

    warmup_loss: Any  # modules; Any, since the attributes they have besides forward are looked up
    main_loss: Any

    def __init__(
        self,
        warmup_loss: nn.Module,
        main_loss: nn.Module,
        warmup_epochs: int = 0,
        temp_start: float | None = None,
        temp_end: float | None = None,
        temp_decay_steps: int = 10_000,
        *,
        blend_epochs: int = 0,
        warmup_steps: int | None = None,
        blend_steps: int | None = None,
        final_main_weight: float = 1.0,
        reset_queue_each_epoch: bool = False,
        gather_distributed: bool | None = None,
    ) -> None:
        super().__init__()
        for name, loss in (("warmup_loss", warmup_loss), ("main_loss", main_loss)):
            if not isinstance(loss, nn.Module):
                fix = "Construct it first, such as SmoothAPLoss(num_classes=1); put a function into the forward of one."
                raise TypeError(expected(name, "an instance of torch.nn.Module", loss, fix))
        self._set_lengths(warmup_epochs, blend_epochs, warmup_steps, blend_steps)
        self._set_weights(final_main_weight, temp_start, temp_end, temp_decay_steps)
        temperatures = temp_start is not None
        self.warmup_loss, self.main_loss = warmup_loss, main_loss
        self.reset_queue_each_epoch = reset_queue_each_epoch
        self._weights_warmup = takes(warmup_loss, "sample_weight")
        if temperatures and not hasattr(main_loss, "temperature"):
            warn(
                f"{type(main_loss).__name__} has no temperature: the schedule has no effect. An adapter around a loss "
                "needs a property `temperature` that reads and sets that of the loss."
            )
        elif temperatures and getattr(main_loss, "surrogate", None) == "dro":
            warn(
                "temp_start and temp_end have no effect: surrogate='dro' has no temperature. Leave them out, or use "
                "surrogate='pairwise'."
            )
        elif temperatures and not self.in_warmup:
            self.main_loss.temperature = temp_start
        if reset_queue_each_epoch and not hasattr(main_loss, "reset_queue"):
            warn(f"{type(main_loss).__name__} has no reset_queue(): reset_queue_each_epoch has no effect.")
        if check_gather_distributed(gather_distributed) is not None:
            self.gather_distributed = gather_distributed
        has_length = warmup_epochs or blend_epochs or warmup_steps is not None
        if not (has_length or temperatures or reset_queue_each_epoch or final_main_weight < 1):
            fix = "Pass warmup_steps=1000 and call on_train_batch_start(global_step), or use main_loss alone."
            raise ValueError(expected("warmup_epochs", "a length of the warm-up or the blend", warmup_epochs, fix))

    def _members(self) -> tuple[Any, ...]:
        return self.main_loss, self.warmup_loss

    @property
    def current_temperature(self) -> float | None:
        """The temperature of ``main_loss``: its ``current_temperature``, else its ``temperature``; None without one."""
        temperature = getattr(self.main_loss, "current_temperature", None)
        if temperature is None:
            temperature = getattr(self.main_loss, "temperature", None)
        return None if temperature is None else float(temperature)

    def on_train_epoch_start(self, epoch: int) -> None:
        """Set the epoch, counted from 0. Call it on every rank, and after a restart in the middle of an epoch too."""
        begins, self._epoch = epoch != self._epoch, epoch
        if begins and self.reset_queue_each_epoch and not self.in_warmup:
            self._reset_queue()

    def on_train_batch_start(self, global_step: int) -> None:
        """Set the optimizer step, counted from 0, and the temperature. Call it on every rank.

        The first call after the warm-up resets the queue. The decay counts from ``warmup_steps``, or from this call if
        the warm-up is counted in epochs.
        """
        self._step = global_step
        if self.in_warmup:
            return
        if self._switch_step is None:
            self._switch_step = global_step if self.warmup_steps is None else self.warmup_steps
            self._reset_queue()
        if self.temp_start is not None and self.temp_end is not None and hasattr(self.main_loss, "temperature"):
            progress = min(1.0, max(0, global_step - self._switch_step) / self.temp_decay_steps)
            decayed = self.temp_start * (self.temp_end / self.temp_start) ** progress
            self.main_loss.temperature = self.temp_end if progress == 1.0 else decayed

    @not_compiled
    def forward(self, logits: Tensor, targets: Tensor, **kwargs: Any) -> Any:
        """Return the loss of the current phase.

        Args:
            logits, targets: passed to both losses.
            **kwargs: passed to ``main_loss``. ``warmup_loss`` gets ``sample_weight`` if it takes it, and no other.

        Returns:
            A scalar in the warm-up. Afterwards what ``main_loss`` returns. If that is a tuple, the first element is
            blended and the others are those of ``main_loss``.
        """
        weight = self.main_weight
        self._state_fact("schedule", State(weight, _SAME_SCHEDULE))
        if self.training:
            self._warn_of_missing_calls(weight)
        if weight == 0.0:
            return self._warmup(logits, targets, kwargs)
        if weight == 1.0:
            return self.main_loss(logits, self._targets_for(self.main_loss, logits, targets), **kwargs)
        # The loss without a queue comes first. If it raises, nothing has been enqueued.
        warmup = self._warmup(logits, targets, kwargs)
        main = self.main_loss(logits, self._targets_for(self.main_loss, logits, targets), **kwargs)
        first = main[0] if isinstance(main, tuple) else main
        blended = (1 - weight) * warmup + weight * first
        if is_mean(warmup) or is_mean(first):
            note_kind(blended)
        if isinstance(main, tuple):
            return main._replace(loss=blended) if hasattr(main, "_replace") else (blended, *main[1:])
        return blended

    def _targets_for(self, loss: nn.Module, logits: Tensor, targets: Tensor) -> Tensor:
        return targets_for(loss, logits, targets, validate_args=getattr(self.main_loss, "validate_args", True))

    def _warmup(self, logits: Tensor, targets: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        targets = self._targets_for(self.warmup_loss, logits, targets)
        if self._weights_warmup and "sample_weight" in kwargs:
            return self.warmup_loss(logits, targets, sample_weight=kwargs["sample_weight"])
        return self.warmup_loss(logits, targets)

    def _reset_queue(self) -> None:
        if hasattr(self.main_loss, "reset_queue"):
            self.main_loss.reset_queue()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the position in the schedule, and the temperature for a ``main_loss`` that does not save its own."""
        temperature = getattr(self.main_loss, "temperature", None)
        return {
            "epoch": _or_minus_one(self._epoch),
            "step": _or_minus_one(self._step),
            "switch_step": _or_minus_one(self._switch_step),
            "temperature": float(_or_minus_one(temperature)),
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        saved = (int(state[name]) for name in ("epoch", "step", "switch_step"))
        self._epoch, self._step, self._switch_step = (None if number < 0 else number for number in saved)
        if float(state["temperature"]) > 0 and hasattr(self.main_loss, "temperature"):
            self.main_loss.temperature = float(state["temperature"])

    def extra_repr(self) -> str:
        """Return the schedule for ``repr``."""
        unit = "epochs" if self.warmup_steps is None else "steps"
        _, warmup, blend = self._lengths
        decay = f"temperature {self.temp_start} -> {self.temp_end} in {self.temp_decay_steps} steps"
        return (
            f"warmup_{unit}={warmup}, blend_{unit}={blend}, final_main_weight={self.final_main_weight}, "
            f"{'temperature of main_loss' if self.temp_start is None else decay}"
        )


def _or_minus_one(number: float | None) -> float:
    """Return ``number``, or -1 for None: the saved state holds numbers alone."""
    return -1 if number is None else number
