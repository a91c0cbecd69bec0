"""From a pointwise loss to a ranking loss: phases, blending, and a temperature that may decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...distributed.group import check_gather_distributed
from ...distributed.header import State
from ...distributed.torch_private import is_mean, not_compiled, note_kind
from ...errors import check_between, check_count, check_temperature, expected, warn
from ...queues.saved_state import as_saved, from_saved
from .combined import LossOfParts, check_module, surrounding, takes

_POSITION = ("_epoch", "_step", "_switch_step")
_SAME_SCHEDULE = "Call on_train_epoch_start and on_train_batch_start with the same numbers on every rank."


class LossWarmupWrapper(LossOfParts):
    r"""Train with ``warmup_loss`` first, blend, then with ``main_loss``, at a temperature that may decay.

    A ranking loss has little gradient while all scores are close together. Blend unit k of n, from 0, has

    .. math:: L = (1 - w) \, L_\text{warmup} + w \, L_\text{main}, \quad
              w = \frac{k + 1}{n + 1} \cdot \text{final\_main\_weight}

    The switch is at step ``warmup_steps``, or at the first step after ``warmup_epochs``. There the queue of
    ``main_loss`` is reset. With ``temp_start`` and ``temp_end`` its temperature is from then on

    .. math:: \tau(s) = \tau_\text{start} \, (\tau_\text{end} / \tau_\text{start})^{\min(s / S, 1)}

    with s the steps since the switch and S ``temp_decay_steps``. Call :meth:`on_train_batch_start` in every step, and
    :meth:`on_train_epoch_start` in every epoch if the warm-up is counted in epochs, or it never ends.

    With several ranks, the gradient equals that of one process only if ``warmup_loss`` also averages over all ranks, as
    :class:`~fullrank.BCEWithLogitsLoss` does. Losses of torch average on each rank. They get the targets as floats in
    the shape of the logits (``torch.nn.BCEWithLogitsLoss``), or as class indices (``torch.nn.CrossEntropyLoss``).

    Args:
        warmup_loss: called with ``(logits, targets)``; also with ``sample_weight`` if its forward takes it.
        main_loss: called with ``(logits, targets, **kwargs)``.
        warmup_epochs: length of the warm-up in epochs; 0 to start with ``main_loss``.
        temp_start, temp_end: > 0, temperatures of ``main_loss`` at the switch and after ``temp_decay_steps``, both or
            neither, in which case it keeps its own. Common values are a hundredth to a tenth of the spread of the
            scores; for a band of ``PAUCAtBudgetLoss``, whose temperature is a multiple of a scale, 0.25 to 0.1.
        temp_decay_steps: length of the decay in steps, >= 1.
        blend_epochs: length of the blend in epochs.
        warmup_steps, blend_steps: the lengths in steps instead; ``blend_steps`` requires ``warmup_steps``.
        final_main_weight: in (0, 1], the weight of ``main_loss`` after the blend.
        reset_queue_each_epoch: also reset the queue at the start of each epoch after the switch, once per epoch.
        gather_distributed: None leaves the settings of the two losses; another value is set on both, also when it is
            assigned between steps: False while rank 0 validates alone, None to detect again.

    Raises:
        TypeError, ValueError: for arguments that do not fit each other, or leave the wrapper nothing to do.

    Distributed:
        The collectives of the two losses. If they are losses of this package, they compare the temperature and the
        weight of ``main_loss``, and ranks whose schedules differ raise. With several wrappers, name the losses in them.

    Example:
        >>> from fullrank import CrossEntropyLoss, SmoothAPLoss
        >>> loss = LossWarmupWrapper(CrossEntropyLoss(), SmoothAPLoss(num_classes=2), warmup_steps=10)
        >>> loss.in_warmup, loss.main_weight
        (True, 0.0)
        >>> loss.on_train_batch_start(10)
        >>> loss.in_warmup, loss.main_weight
        (False, 1.0)
    """

    _saved_names = (*(f"saved{name}" for name in _POSITION), "saved_temperature")
    warmup_loss: Any  # a module; Any because optional attributes besides `forward` are looked up
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
        self.main_loss = check_module("main_loss", main_loss)  # first, so that its settings are shown
        self.warmup_loss = check_module("warmup_loss", warmup_loss)
        self._warmup_takes_weight = takes(warmup_loss, "sample_weight")
        check_count("warmup_epochs", warmup_epochs, 0)
        check_count("blend_epochs", blend_epochs, 0)
        check_count("warmup_steps", 0 if warmup_steps is None else warmup_steps, 0)
        check_count("blend_steps", 0 if blend_steps is None else blend_steps, 0)
        if warmup_steps is not None and warmup_epochs > 0:
            raise ValueError(expected("warmup_steps", "None with warmup_epochs > 0", warmup_steps, "Give one of them."))
        if blend_steps is not None and warmup_steps is None:
            raise ValueError(expected("blend_steps", "None without warmup_steps", blend_steps, "Give both in steps."))
        if blend_epochs > 0 and warmup_steps is not None:
            raise ValueError(expected("blend_epochs", "0 with a warm-up in steps", blend_epochs, "Use blend_steps."))
        check_between("final_main_weight", final_main_weight, 0, 1, above=True)
        check_count("temp_decay_steps", temp_decay_steps, 1)
        check_temperature(temp_start, automatic=True, name="temp_start")
        check_temperature(temp_end, automatic=True, name="temp_end")
        if (temp_start is None) != (temp_end is None):
            name = "temp_start" if temp_start is None else "temp_end"
            raise ValueError(expected(name, "a number with the other temperature", None, "Give both or neither."))
        self.warmup_epochs, self.blend_epochs = warmup_epochs, blend_epochs
        self.warmup_steps, self.blend_steps = warmup_steps, blend_steps
        self.temp_start, self.temp_end = temp_start, temp_end
        self.temp_decay_steps, self.final_main_weight = temp_decay_steps, final_main_weight
        self._epoch: int | None = None  # None until the hooks are called
        self._step: int | None = None
        self._switch_step: int | None = None
        self._warned: set[str] = set()
        self.reset_queue_each_epoch, temperatures = reset_queue_each_epoch, temp_start is not None
        if temperatures and getattr(main_loss, "surrogate", None) == "dro":
            what = "None, because surrogate='dro' has no temperature"
            raise ValueError(expected("temp_start, temp_end", what, temp_start, "Or choose another surrogate."))
        for setting, is_set, name in (
            ("temp_start", temperatures, "temperature"),
            ("reset_queue_each_epoch", reset_queue_each_epoch, "reset_queue"),
        ):
            if is_set and not hasattr(main_loss, name):
                fix = f"An adapter around a loss needs an attribute `{name}` that is that of the loss."
                warn(f"{type(main_loss).__name__} has no {name}: {setting} has no effect. {fix}")
        if temperatures and hasattr(main_loss, "temperature") and not self.in_warmup:
            self.main_loss.temperature = temp_start
        if check_gather_distributed(gather_distributed) is not None:
            self.gather_distributed = gather_distributed
        has_length = warmup_epochs or blend_epochs or warmup_steps is not None
        if not (has_length or temperatures or reset_queue_each_epoch or final_main_weight < 1):
            fix = "Pass warmup_steps=1000 and call on_train_batch_start(global_step), or use main_loss alone."
            raise ValueError(expected("warmup_epochs", "a length of the warm-up or the blend", warmup_epochs, fix))

    @property
    def _lengths(self) -> tuple[int, int, int]:
        """The current step or epoch, and the lengths of warm-up and blend in the same unit."""
        if self.warmup_steps is not None:
            return self._step or 0, self.warmup_steps, self.blend_steps or 0
        return self._epoch or 0, self.warmup_epochs, self.blend_epochs

    @property
    def in_warmup(self) -> bool:
        """True while only ``warmup_loss`` is used."""
        now, warmup, _ = self._lengths
        return now < warmup

    @property
    def in_blend(self) -> bool:
        """True between the warm-up and the full weight of ``main_loss``."""
        now, warmup, blend = self._lengths
        return warmup <= now < warmup + blend

    @property
    def main_weight(self) -> float:
        """The weight of ``main_loss`` now: 0 in the warm-up, rising in the blend, ``final_main_weight`` after it."""
        now, warmup, blend = self._lengths
        if now < warmup:
            return 0.0
        return min(1.0, (now - warmup + 1) / (blend + 1)) * self.final_main_weight

    @property
    def current_temperature(self) -> float | None:
        """The temperature of ``main_loss``: its ``current_temperature``, else its ``temperature``; None without one."""
        found = (getattr(self.main_loss, name, None) for name in ("current_temperature", "temperature"))
        return next((float(temperature) for temperature in found if temperature is not None), None)

    def on_train_epoch_start(self, epoch: int) -> None:
        """Set the epoch, counted from 0. Call it on every rank, and after a restart in the middle of an epoch too."""
        is_new, self._epoch = epoch != self._epoch, epoch
        if is_new and self.reset_queue_each_epoch and not self.in_warmup:
            self._reset_queue()

    def on_train_batch_start(self, global_step: int) -> None:
        """Set the optimizer step, counted from 0, and the temperature. Call it on every rank."""
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
            A scalar in the warm-up, then what ``main_loss`` returns; of a tuple the first element is blended.
        """
        weight = self.main_weight
        facts = surrounding("schedule", State(weight, _SAME_SCHEDULE))
        if self.training:
            self._warn_of_missing_calls()
        if weight < 1.0:  # The loss without a queue comes first. If it raises, nothing has been enqueued.
            names = {"sample_weight"} & kwargs.keys() if self._warmup_takes_weight else ()
            warmup = self._value_of(self.warmup_loss, logits, targets, {name: kwargs[name] for name in names}, facts)
            if weight == 0.0:
                return warmup
        main = self._value_of(self.main_loss, logits, targets, kwargs, facts)
        if weight == 1.0:
            return main
        first = main[0] if isinstance(main, tuple) else main
        blended = (1 - weight) * warmup + weight * first
        if is_mean(warmup) or is_mean(first):
            note_kind(blended, mean=True)
        if isinstance(main, tuple):
            return main._replace(loss=blended) if hasattr(main, "_replace") else (blended, *main[1:])
        return blended

    def _warn_of_missing_calls(self) -> None:
        of_steps = (self.warmup_steps or 0) + (self.blend_steps or 0) > 0 or self.temp_start is not None
        for hook, is_missing in (
            ("on_train_batch_start(global_step)", of_steps and self._step is None),
            ("on_train_epoch_start(epoch)", self.warmup_epochs + self.blend_epochs > 0 and self._epoch is None),
        ):
            if is_missing and hook not in self._warned:
                self._warned.add(hook)
                text = f"{hook} was never called, so the schedule stands still. Call it on every rank."
                warn(f"LossWarmupWrapper: {text}")

    def _reset_queue(self) -> None:
        if hasattr(self.main_loss, "reset_queue"):
            self.main_loss.reset_queue()

    @property
    def has_temperature(self) -> bool:  # type: ignore[override]
        """Whether ``main_loss`` has a temperature that is no parameter."""
        return hasattr(self.main_loss, "temperature") and getattr(self.main_loss, "has_temperature", True)

    def _saved(self) -> dict[str, Tensor]:  # always all keys, because the schedule changes all
        # The temperature for a main_loss that does not save its own, and for a new one, which has no key to ask for.
        temperature = {"saved_temperature": as_saved(self.main_loss.temperature, float)} if self.has_temperature else {}
        return {**{f"saved{name}": as_saved(getattr(self, name)) for name in _POSITION}, **temperature}

    def _read_saved(self, state: Mapping[str, Any]) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for name in (key.removeprefix("saved_") for key in state):
            kind, of_state = float if name == "temperature" else int, f"{name} of the saved state"
            saved = from_saved(state, name, kind=kind)
            if name != "temperature":
                read[f"_{name}"] = None if saved == -1 else check_count(of_state, saved, 0)
            elif self.has_temperature:
                read["main_loss.temperature"] = None if saved == -1 else check_temperature(saved, name=of_state)
        return read

    def extra_repr(self) -> str:
        unit = "epochs" if self.warmup_steps is None else "steps"
        _, warmup, blend = self._lengths
        decay = f"temperature {self.temp_start} -> {self.temp_end} in {self.temp_decay_steps} steps"
        return (
            f"warmup_{unit}={warmup}, blend_{unit}={blend}, final_main_weight={self.final_main_weight}, "
            f"{'temperature of main_loss' if self.temp_start is None else decay}"
        )
